"""Bad batches, failing decompositions, oversized factors, dead layers: training goes on, and says what happened."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, InverseSolver, KFACAdam
from kfac_optim.bases.records import TURN
from kfac_optim.common import machines
from kfac_optim.distributed import largest_entry
from kfac_optim.optimizers import KFACMixin
from kfac_optim.solvers import Failure, decompose_safely
from tests.helpers import training
from tests.helpers.compare import (
    SAME,
    assert_near,
    assert_same_factors,
    assert_same_weights,
    factors_of,
    snapshot,
)
from tests.helpers.reference import averaged, log_cosh, squared_error
from tests.helpers.settings import OPTIONS, damping_of

pytestmark = pytest.mark.usefixtures("float64")

SINGLE = 1e-4  # a decomposition in float32 in place of one in float64, at a condition number of some hundreds
JITTER = 1e-4  # 1e-6 of the largest entry of a factor on its diagonal, against a damping of 0.1
CLASSES = [KFACSGD, KFACAdam, KFACLAMB]
loss = averaged(log_cosh, "batch")
train = partial(training.train, loss=loss)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def twins(cls: type[KFACMixin] = KFACSGD, **keywords: object) -> tuple[nn.Module, KFACMixin, nn.Module, KFACMixin]:
    model = network()
    other = copy.deepcopy(model)
    options = {k: v for k, v in OPTIONS.items() if cls is KFACSGD or k not in ("momentum", "precondition")} | keywords
    return model, cls(model, **options), other, cls(other, **options)


def data(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randn(n, 2)


# Non-finite values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first_one", [True, False])
def test_a_bad_micro_batch_has_weight_zero(bad: float, first_one: bool) -> None:
    """The user drops the bad micro-batch's gradient; its moments drop out too, the others' stay exact."""
    model, first, plain, second = twins()
    x, y = data()
    poisoned = x.clone()
    poisoned[0, 0] = bad
    for turn in ("bad", "good") if first_one else ("good", "bad"):
        kept = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
        loss(model(poisoned if turn == "bad" else x), y).backward()
        if turn == "bad":
            for p, grad in zip(model.parameters(), kept, strict=True):
                p.grad = grad
    first.step()
    for _ in range(2):
        (loss(plain(x), y) / 2).backward()
    second.step()
    # Where the bad one came first, its gradients were gone before the next pass: it is no part of the step.
    assert first.curvature.report()["skipped_batches"] == (0 if first_one else 1)
    assert first.curvature.report()["skipped_steps"] == 0
    found, wanted = factors_of(first), factors_of(second)
    for name, factor in wanted.items():
        # Undivided, where both count: the loss of the step is twice the mean loss.
        twice = name.endswith("G") and not first_one
        assert_near(found[name], factor * (4 if twice else 1), name, SAME, scale=0.0)
    weight = first.state[model[0].weight]["kfac"]["current"]["A"]["weight"]
    assert float(weight) == 6.0


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_steps_after_a_bad_batch_equal_a_run_without_it(
    cls: type[KFACMixin], bad: float, when: int, parts: int
) -> None:
    keywords = {"lr": 0.01} | ({"momentum": 0.9} if cls is KFACSGD else {})
    model, first, plain, second = twins(cls, **keywords)
    batches = [data() for _ in range(5)]
    good = [(x.clone(), y) for i, (x, y) in enumerate(batches) if i != when]
    batches[when][0][-1, 1] = bad
    train(model, first, batches, parts=parts)
    train(plain, second, good, parts=parts)
    assert_same_factors(first, second)
    assert_same_weights(model, plain)
    report = first.curvature.report()
    assert report["skipped_steps"] == 1
    assert report["step"] == 4


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_final_gradient_changes_nothing(cls: type[KFACMixin], bad: float) -> None:
    """As after an all-reduce with a rank that overflowed: the own moments are finite, the gradient is not."""
    model, first, plain, second = twins(cls, lr=0.01)
    batches = [data() for _ in range(4)]
    for step, (x, y) in enumerate(batches):
        first.zero_grad()
        loss(model(x), y).backward()
        if step == 1:
            before, states = snapshot(model), copy.deepcopy(first.state_dict()["state"])
            model[2].bias.grad[0] = bad
            first.step()
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            torch.testing.assert_close(first.state_dict()["state"], states, rtol=0, atol=0)
            continue
        first.step()
    train(plain, second, [b for i, b in enumerate(batches) if i != 1])
    assert_same_factors(first, second)
    assert_same_weights(model, plain)
    assert first.curvature.report()["skipped_steps"] == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_without_layers_a_step_that_is_not_finite_is_skipped_as_well(cls: type[KFACMixin]) -> None:
    model = network()
    optimizer = cls(model, lr=0.1, skip_layers=("",))
    x, y = data()
    loss(model(x), y).backward()
    model[0].bias.grad[1] = math.nan
    before = snapshot(model)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.curvature.report()["skipped_steps"] == 1


# Decompositions that fail --------------------------------------------------------------------------------------------


class FailingEigh:
    """Stands in for ``torch.linalg.eigh``: raises or returns NaN for the calls that ``fails`` picks, and counts."""

    def __init__(self, how: str, fails: Callable[[Tensor, int], bool]) -> None:
        self.how, self.fails, self.real = how, fails, torch.linalg.eigh
        self.dtypes: list[torch.dtype] = []

    def __call__(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.dtypes.append(x.dtype)
        if not self.fails(x, len(self.dtypes)):
            return self.real(x, *args, **kwargs)
        if self.how == "raise":
            raise torch.linalg.LinAlgError("linalg.eigh: The algorithm failed to converge")
        values, vectors = self.real(x, *args, **kwargs)
        if self.how == "nan":
            return values, vectors * math.nan
        doubled = vectors.clone()
        doubled[..., 0] = vectors[..., 1]  # no longer orthogonal, but all of length 1
        return values, doubled


REASONS = {
    "raise": " (_LinAlgError: linalg.eigh: The algorithm failed to converge), ",
    "nan": " (the result is not finite), ",
    "doubled": " (eigenvectors are not orthonormal), ",
}


@pytest.fixture(params=REASONS)
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def install(monkeypatch: pytest.MonkeyPatch, how: str, fails: Callable[[Tensor, int], bool]) -> FailingEigh:
    eigh = FailingEigh(how, fails)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    return eigh


def test_a_failure_in_float32_is_retried_in_float64(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    single = {"factor_dtype": torch.float32, "inv_dtype": torch.float32}
    model, first, plain, second = twins(**single)
    batches = [data() for _ in range(3)]
    train(plain, second, batches)
    eigh = install(monkeypatch, how, lambda x, call: x.dtype is torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a retry that succeeds is no news
        train(model, first, batches)
    assert eigh.dtypes[0] is torch.float32 and eigh.dtypes[-1] is torch.float64
    assert_same_weights(model, plain, SINGLE)
    assert first.curvature.report()["failed_decompositions"] == 0


def test_the_last_retry_adds_jitter_on_the_cpu(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The third attempt at each factor succeeds."""
    model, first, plain, second = twins()
    batches = [data() for _ in range(3)]
    train(plain, second, batches)
    eigh = install(monkeypatch, how, lambda x, call: call % 3 != 0)
    train(model, first, batches)
    assert len(eigh.dtypes) == 3 * 3 * 5  # attempts, steps, factors of more than two rows
    assert_same_weights(model, plain, JITTER)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert first.curvature.report()["failed_decompositions"] == 0


def test_without_any_decomposition_the_base_class_trains(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    model, first, plain, _ = twins(momentum=0.9)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    install(monkeypatch, how, lambda x, call: True)
    batches = [data() for _ in range(3)]
    with pytest.warns(UserWarning, match="trains by the base rule") as warned:
        train(model, first, batches)
    assert sorted(str(w.message).split("'")[1] for w in warned) == ["0", "2", "4"]  # one for each layer, not each step
    assert all(f"decomposed{REASONS[how]}" in str(w.message) for w in warned), "one reason of both factors is told once"
    train(plain, sgd, batches)
    assert_same_weights(model, plain)
    assert first.curvature.report()["failed_decompositions"] == 9


def test_after_a_failure_the_last_good_decomposition_serves(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """As if no refresh had been due; later refreshes succeed again."""
    model, first, plain, second = twins()
    batches = [data() for _ in range(5)]
    train(model, first, batches[:2])
    train(plain, second, batches[:2])
    second.curvature.inv_update_steps = 1000
    train(plain, second, batches[2:4])
    second.curvature.inv_update_steps = 1
    train(plain, second, batches[4:])
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="last good decomposition") as warned:
        install(patch, how, lambda x, call: True)
        train(model, first, batches[2:4])
    assert len(warned) == 3
    train(model, first, batches[4:])
    assert_same_factors(first, second)
    assert_same_weights(model, plain)
    second.load_state_dict(first.state_dict())
    assert [each.curvature.report()["failed_decompositions"] for each in (first, second)] == [6, 6]


def test_one_layer_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The middle layer's A is the only factor of size 6."""
    model, first, plain, _ = twins()
    second = KFACSGD(plain, **(OPTIONS | {"skip_layers": ("^2$",)}))
    batches = [data() for _ in range(3)]
    train(plain, second, batches)
    install(monkeypatch, how, lambda x, call: x.shape[-1] == 6)
    with pytest.warns(UserWarning, match="'2'") as warned:
        train(model, first, batches)
    assert len(warned) == 1
    assert_same_weights(model, plain)
    report = first.curvature.report()
    assert report["failed_decompositions"] == 3
    assert sorted(report["layers"]) == ["0", "4"]


def test_a_failing_cholesky(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("linalg.cholesky: the input is not positive-definite")

    model, first, plain, _ = twins(solver="inverse")
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    monkeypatch.setattr(torch.linalg, "cholesky", fail)
    batches = [data() for _ in range(2)]
    with pytest.warns(UserWarning, match="trains by the base rule"):
        train(model, first, batches)
    train(plain, sgd, batches)
    assert_same_weights(model, plain)


@pytest.mark.parametrize("scale", [1e-19, 1e-20, 1e-21])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_gradients_that_have_all_but_vanished(solver: str, scale: float) -> None:
    """The quotient of the mean eigenvalues of A and G, and the inverse of G, are more than float32 can hold."""
    model = network().float()
    optimizer = KFACSGD(model, lr=0.02, solver=solver, scaling="unit")
    batches = [tuple(part.float() for part in data()) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, batches, loss=lambda output, target: scale * loss(output, target))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_an_inverse_that_float32_cannot_hold_is_a_failure() -> None:
    """float64, in which the failure is retried, can."""
    tiny = torch.full((1, 2, 2), 1e-42, dtype=torch.float32)
    shift = torch.full((1,), 1e-42, dtype=torch.float32)
    assert isinstance(decompose_safely(InverseSolver(), tiny, shift, torch.float32), Failure)


# Nothing to learn from -----------------------------------------------------------------------------------------------


def dead() -> nn.Module:
    """The first layer's ReLU is never active: zero gradients for it, a zero input for the second."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[0].bias, -100.0)
    return model


def zero_head() -> nn.Module:
    """The first layer has zero gradients until the head has moved."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return zero(model, 2)


def zero_first() -> nn.Module:
    """Without biases the second layer has a zero input, and so a zero gradient."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    return zero(model, 0)


def zero_everything() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    return zero(zero(model, 0), 3)


def dead_convolution() -> nn.Module:
    layers = [nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 6, 1, groups=3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(6, 2))
    nn.init.constant_(model[2].bias[:2], -100.0)  # one group of three
    return model


def zero(model: nn.Module, i: int) -> nn.Module:
    for p in model[i].parameters():
        nn.init.zeros_(p)
    return model


@pytest.mark.parametrize("factory", [dead, zero_head, zero_first, zero_everything, dead_convolution])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("scaling", ["kl_clip", "unit", "orthogonal", "graft", None])
@pytest.mark.parametrize("relative", [False, True])
def test_dead_and_zero_layers(
    factory: Callable[[], nn.Module], solver: str, scaling: str | None, relative: bool
) -> None:
    """No NaN anywhere, and a parameter without a gradient does not move."""
    model = factory()
    options = OPTIONS | {
        "solver": solver,
        "scaling": scaling,
        "damping": damping_of(OPTIONS["damping"], relative),
        "lr": 0.01,
    }
    optimizer = KFACSGD(model, **options)
    moved = False
    for _ in range(4):
        x, y = data()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        gradients = {id(p): p.grad for p in model.parameters()}
        for layer in optimizer.curvature.layers:
            still = all(not gradients[id(p)].any() for p in layer.parameters)
            for p in layer.parameters:
                name = next(n for n, q in model.named_parameters() if q is p)
                assert bool(p.isfinite().all()), name
                if still:
                    assert torch.equal(p, before[name]), name
                moved |= not torch.equal(p, before[name])
        cosines = [row["cosine"] for row in optimizer.curvature.report()["layers"].values()]
        assert all(math.isfinite(c) for c in cosines)
    assert optimizer.curvature.report()["failed_decompositions"] == 0
    assert moved or factory is zero_everything


@pytest.mark.fast("KFACSGD|1-inverse")
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("n", [1, 6])
def test_constant_inputs_and_batches_of_one(cls: type[KFACMixin], solver: str, n: int) -> None:
    """A of rank one: every direction that the data never showed is left to the damping."""
    options = {k: v for k, v in OPTIONS.items() if cls is KFACSGD or k not in ("momentum", "precondition")}
    model = network()
    optimizer = cls(model, **(options | {"solver": solver, "lr": 0.01, "damping": 1e-4}))
    x, y = torch.ones(n, 3), torch.zeros(n, 2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        value = averaged(squared_error, "batch")(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("scaling", ["kl_clip", "unit", "orthogonal", "graft", None])
@pytest.mark.parametrize("cls", CLASSES)
def test_lr_zero_moves_nothing_and_learns_the_curvature(cls: type[KFACMixin], scaling: str | None) -> None:
    """A warm-up that starts at lr 0."""
    model, first, _, _ = twins(cls, scaling=scaling)
    for group in first.param_groups:
        group["lr"] = 0.0  # torch_optimizer.Lamb takes no 0 at construction
    before = snapshot(model)
    x, y = data()
    train(model, first, [(x, y), (x, y)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    hidden = torch.cat([x, torch.ones(6, 1)], 1)
    assert_near(factors_of(first)["0.A"][0], hidden.T @ hidden / 6, "0.A")
    assert first.curvature.report()["step"] == 2
    for group in first.param_groups:
        group["lr"] = 0.01
    train(model, first, [(x, y)])
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# The check for what is not finite ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "largest"),
    [
        ([[1.0, -3.0], [2.0]], 3.0),
        ([[1.0, 4.0], [-2.0]], 4.0),
        ([[1.0, -math.inf], [2.0]], math.inf),
        ([[1.0, math.inf], [2.0]], math.inf),
        ([[1.0, math.nan], [-math.inf]], math.nan),
        ([[], [-2.0]], 2.0),
        ([[]], 0.0),
        ([], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_the_largest_entry_of_all_gradients(entries: list[list[float]], largest: float, dtype: torch.dtype) -> None:
    """By hand; the tensors need not be of one dtype, and may be empty."""
    dtypes = [dtype, torch.float32]
    tensors = [torch.tensor(values, dtype=dtypes[i]) for i, values in enumerate(entries)]
    assert float(largest_entry(tensors)) == pytest.approx(largest, nan_ok=True)


def test_a_parameter_without_entries_is_in_nobodys_way() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    optimizer = KFACSGD(model, lr=0.1)
    before = model[0].weight.detach().clone()
    (model(torch.randn(4, 3)).square().mean() + model.empty.sum()).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


class Shifted(nn.Module):
    """Adds a parameter that no layer covers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


@pytest.mark.parametrize("launches_count", [False, True])
def test_gradients_that_are_compared_with_the_last_step_are_looked_at(
    launches_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie side by side in one vector; one that no layer covers does not."""
    if launches_count:
        monkeypatch.setattr(machines, "machine_of", lambda _: "accelerator")
    model = nn.Sequential(network(), Shifted())
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, factor_update_steps=1, inv_update_steps=2, spread=0)
    x, y = data()
    train(model, optimizer, [(x, y)] * 6)
    assert sum(TURN in state for state in optimizer.state.values()) == 6
    for number, parameter in enumerate(model.parameters()):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        assert parameter.grad is not None
        parameter.grad.view(-1)[-1] = math.nan
        before = snapshot(model)
        optimizer.step()
        assert optimizer.curvature.report()["skipped_steps"] == number + 1
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
