"""Where launches count matrices lie side by side: the same steps, by other operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, EigenSolver, Graft, KFACAdam, KFACAdamW, OfLargest, OfMean
from kfac_optim.bases.records import STRETCH, TURN
from kfac_optim.common import machines
from kfac_optim.solvers.joint import JointEigen
from kfac_optim.stacks.matrices import FlatMatrices, FlatStorage, Matrices
from tests.helpers.compare import assert_near

pytestmark = pytest.mark.usefixtures("float64")

# The first and third leave eigenvectors out, the second none.
OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (KFACSGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3, "damping": OfLargest(0.3)}),
    (KFACSGD, {"lr": 0.02, "momentum": 0.9, "solver": EigenSolver(negligible=0)}),
    (KFACSGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True, "solver": EigenSolver(negligible=0.9)}),
    (KFACSGD, {"lr": 0.02}),
    (KFACSGD, {"lr": 0.02, "precondition": "gradient", "scaling": "kl_clip", "damping": OfMean(0.1)}),
    (KFACSGD, {"lr": 0.02, "precondition": "gradient", "scaling": None, "damping": 0.1}),
    (KFACSGD, {"lr": 0.02, "momentum": 0.9, "scaling": "unit"}),
    (KFACSGD, {"lr": 0.02, "momentum": 0.9, "scaling": Graft(trust=0.5)}),
    (KFACSGD, {"lr": 0.02, "momentum": 0.9, "solver": "inverse"}),
    (KFACSGD, {"lr": 0.02, "momentum": 0.9, "lr_of_biases": 0.05}),
    (KFACAdam, {"lr": 0.01}),
    (KFACAdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (KFACLAMB, {"lr": 0.01}),
]


class Net(nn.Module):
    """Several layers of each shape, rows of odd lengths, an embedding, norm layers, a layer that some steps skip."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.convolutions = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1, bias=False), nn.Conv1d(8, 8, 3, padding=1))
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.BatchNorm1d(8)])
        self.linear = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        self.extra, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, words: Tensor, skips: bool) -> Tensor:
        x = self.norms[1](self.words(words).mT)  # not behind biases: of these it would leave no gradient
        x = self.norms[0](self.convolutions(x).mT).mean(1)
        for layer in self.linear:
            x = x + layer(x).tanh()
        return self.head(x if skips else x + self.extra(x).tanh())


def trained(model: nn.Module, cls: Any, options: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """The weights after some steps, and the optimizer."""
    how = dict(options)
    biases = {"lr": how.pop("lr_of_biases", how["lr"]), "params": [p for p in model.parameters() if p.dim() == 1]}
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, biases]
    more = {"inv_update_steps": 4, "factor_update_steps": 2, "spread": 0, "inv_dtype": torch.float64}
    optimizer = cls(groups, model=model, factor_dtype=torch.float64, **more, **how)
    torch.manual_seed(1)
    for step in range(11):
        words, labels = torch.randint(12, (6, 5)), torch.randint(3, (6,))
        optimizer.zero_grad()
        # In the fourth step the layer has a gradient, but no decomposition.
        F.cross_entropy(model(words, step in (0, 1, 2, 6)), labels).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, optimizer


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many stacks were preconditioned together, by step."""
    taken: list[int] = []
    precondition = JointEigen.precondition
    monkeypatch.setattr(
        JointEigen, "precondition", lambda self, *given: (taken.append(len(given[0])), precondition(self, *given))
    )
    return taken


@pytest.mark.parametrize(("cls", "options"), OPTIONS)
def test_steps_are_the_same_where_launches_count(
    cls: Any, options: dict[str, Any], joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    expected, there = trained(copy.deepcopy(model), cls, options)
    assert not joined
    monkeypatch.setattr(machines, "machine_of", lambda _: "accelerator")
    found, here = trained(copy.deepcopy(model), cls, options)
    assert len(set(joined)) == (0 if options.get("solver") == "inverse" else 2), "with and without the extra layer"
    for name, weight in expected.items():
        assert_near(found[name], weight, name, rel=1e-6)  # dot products, and with them reach, are of float32
    usual, expected_usual = (optimizer.curvature.stages.steering.brake.usual for optimizer in (here, there))
    assert usual == pytest.approx(expected_usual, rel=1e-6), "the length of all updates"


@pytest.mark.parametrize("bias", [False, True])
def test_a_view_does_not_keep_the_matrices_of_all_stacks(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step notes are views where most of the matrices are such, else copies."""
    monkeypatch.setattr(machines, "machine_of", lambda _: "accelerator")
    model = nn.Sequential(*(nn.Linear(16, 16, bias=bias) for _ in range(4)), nn.Linear(16, 8, bias=not bias))
    # The second step tells: stretch. In the type of the weights, which parts of another would be converted to.
    optimizer = KFACSGD(model, lr=0.02, momentum=0.9, factor_update_steps=1, inv_dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 16)).square().mean().backward()
        optimizer.step()
    noted = [state[key] for state in optimizer.state.values() for key in (TURN, STRETCH) if key in state]
    assert len(noted) == 2 * (9 if bias else 6)
    kept = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in noted}
    assert sum(kept.values()) < 1.5 * sum(part.nbytes for part in noted)


@pytest.mark.parametrize("transposed", [[False] * 4, [True, False, True, True]])
@pytest.mark.parametrize("alone", [[(1, 5, 5), (100, 8, 1)], [(100, 8, 1), (1, 5, 5)]])
def test_factors_of_pairs_reach_the_rows_of_their_matrices(
    alone: list[tuple[int, int, int]], transposed: list[bool]
) -> None:
    """Of stacks that stand alone, too: of many pairs, and of matrices that no whole number of rows fills."""
    shapes = [(2, 8, 3), (3, 4, 4), *alone]
    side = FlatStorage(shapes, [None] * len(shapes), torch.device("cpu"), transposed)
    found = [tensor.shape for tensor in side.several(1, torch.float64)[0].tensors]
    for (p, rows, columns), shape, turned in zip(shapes, found, transposed, strict=True):
        assert shape == ((p, columns, rows) if turned else (p, rows, columns))
    assert side.stacks_multiplied == 2 and side.multiplied_shape == (12, 1, 8)
    matrices, others = side.several(2, torch.float64)
    for flat in (matrices, others):
        flat.whole.normal_()
    apart, beside = (Matrices([tensor.clone() for tensor in of.tensors], side.groups) for of in (matrices, others))
    factors = torch.randn(sum(p for p, *_ in shapes))
    for found, expected in (
        (matrices.times(factors), apart.times(factors)),
        (matrices.times(0.5), apart.times(0.5)),
        (matrices.minus(others), apart.minus(beside)),
        (matrices.lerp(others, 0.3), apart.lerp(beside, 0.3)),
        (matrices.minus(others, out=matrices.empty()), apart.minus(beside)),
        (matrices.minus(others), apart.minus(beside, out=apart.empty())),
        (matrices.times(factors, out=matrices), apart.times(factors, out=apart)),
        (matrices.minus_multiples_(others, factors), apart.minus_multiples_(beside, factors)),
    ):
        assert isinstance(found, FlatMatrices)
        torch.testing.assert_close(found.tensors, expected.tensors, rtol=0, atol=0)
    assert found is matrices and expected is apart, "in place"


def assert_same_where_launches_count(
    model: nn.Module,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int], Tensor],
    steps: int,
    rel: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trains two copies, one of them as on a device; ``loss``: of a model in a step."""

    def weights() -> list[Tensor]:
        own = copy.deepcopy(model)
        optimizer = make(own)
        for step in range(steps):
            optimizer.zero_grad()
            loss(own, step).backward()
            optimizer.step()
        return [p.detach() for p in own.parameters()]

    expected = weights()
    monkeypatch.setattr(machines, "machine_of", lambda _: "accelerator")
    for found, weight in zip(weights(), expected, strict=True):
        assert_near(found, weight, rel=rel)


OFTEN: dict[str, Any] = {
    "inv_update_steps": 2,
    "factor_update_steps": 1,
    "spread": 0,
    "inv_dtype": torch.float64,
    "factor_dtype": torch.float64,
}


class Many(nn.Module):
    """A norm layer, and more layers of one shape than share a kernel for their factors; some steps skip one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(66))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        outputs = [layer(self.norm(x)).tanh() for layer in self.layers]
        return self.head(torch.stack(outputs[:-1] if skips else outputs).sum(0) / 8)


def test_a_stack_of_many_layers_comes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers then stand behind the norm layers, and are still multiplied each by its own factor."""
    torch.manual_seed(0)
    model, batches = Many(), [(3 * torch.randn(16, 8), torch.randn(16, 4)) for _ in range(7)]

    def make(own: nn.Module) -> KFACSGD:
        return KFACSGD(own, lr=0.05, precondition="gradient", scaling=Graft(trust=1.0), **OFTEN)

    def loss(own: nn.Module, step: int) -> Tensor:
        x, y = batches[step]
        return (own(x, step in (3, 4)) - y).square().mean()

    assert_same_where_launches_count(model, make, loss, len(batches), 1e-10, monkeypatch)


class Heads(nn.Module):
    """Layers of three shapes, the last of which some steps skip."""

    def __init__(self, shapes: list[tuple[int, int]], bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=bias) for shape in shapes)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        given = zip(self.layers, x.split([layer.in_features for layer in self.layers], 1), strict=True)
        outputs = [layer(part).tanh().square().mean() for layer, part in given]
        return torch.stack(outputs[:-1] if skips else outputs).sum()


@pytest.mark.parametrize(("cls", "lr"), [(KFACSGD, 0.05), (KFACAdam, 0.01)])
@pytest.mark.parametrize(
    "shapes", [[(7, 8), (15, 4), (3, 16)], [(2, 3), (4, 5), (6, 3)]], ids=["rows", "each stands alone"]
)
def test_stacks_come_and_go(
    cls: Any, lr: float, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole stack without a gradient; matrices of which none has rows of eight numbers."""
    torch.manual_seed(0)
    model = Heads(shapes)
    batches = [torch.randn(6, sum(d_in for d_in, _ in shapes)) for _ in range(9)]

    def make(own: nn.Module) -> Any:
        return cls(own.parameters(), lr=lr, **OFTEN)

    def loss(own: nn.Module, step: int) -> Tensor:
        return own(batches[step], step in (3, 4, 6))

    assert_same_where_launches_count(model, make, loss, len(batches), 1e-6, monkeypatch)


@pytest.mark.parametrize(
    ("limit", "value", "block", "joins"),
    [
        ("solvers.joint._KEPT_NUMEL", 20, None, True),
        ("solvers.joint._KEPT_NUMEL", 0, None, True),
        ("stacks.preconditioner._MOST_NUMEL", 20, None, False),
        ("stacks.preconditioner._MOST_NUMEL", 100, 4, False),
    ],
    ids=["one is large", "all are large", "too large together", "tiles"],
)
def test_large_stacks(
    limit: str, value: int, block: int | None, joins: bool, joined: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their products of eigenvalues are not kept, or nothing lies side by side; one matrix is a single number."""
    monkeypatch.setattr(f"kfac_optim.{limit}", value)
    torch.manual_seed(0)
    model = Heads([(7, 8), (3, 4), (1, 1)], bias=False)
    batches = [torch.randn(6, 11) for _ in range(5)]

    def make(own: nn.Module) -> KFACSGD:
        return KFACSGD(own, lr=0.05, max_factor_dim=block, **OFTEN)

    assert_same_where_launches_count(model, make, lambda own, i: own(batches[i], False), 5, 1e-6, monkeypatch)
    assert bool(joined) == joins
