"""Models that are called in other ways than the zoo's, return something else than logits, or are compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, Categorical, KFACAdam, KLClip
from kfac_optim.optimizers import KFACMixin
from tests.helpers.compare import assert_same_factors, assert_same_weights
from tests.helpers.zoo import FAMILIES

STEPS = 30
FALL = 0.7  # the loss after 30 steps on one batch, as a share of the first: with right directions all end below 0.5
COMPILED_TOL = 1e-4  # float32; the compiler reorders sums, and a few steps pass through an eigendecomposition
CLASSES: dict[type[KFACMixin], dict[str, float]] = {
    KFACSGD: {"lr": 0.1, "momentum": 0.9, "scaling": KLClip(0.01)},
    KFACAdam: {"lr": 0.01},
    KFACLAMB: {"lr": 0.02},
}
INTERVALS = {"factor_update_steps": 1, "inv_update_steps": 5}
TURNED = {"lr": 0.05, "scaling": "unit", **INTERVALS}  # along K-FAC's directions from the first step on


class GPT(nn.Module):
    """Token and position embeddings, causal attention by F.scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return self.head(self.norms[2](x))


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Returning(nn.Module):
    """A nested classifier called by keywords, whose output is of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        inner = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.ModuleDict({"act": nn.Tanh()})["act"])
        self.parts = nn.ModuleDict({"inner": inner, "head": nn.Linear(8, 4)})

    def forward(self, *, images: Tensor, labels: Tensor) -> dict[str, Tensor] | Output | Tensor:
        logits = self.parts["head"](self.parts["inner"](images))
        loss = F.cross_entropy(logits, labels)
        return {"dict": {"logits": logits}, "dataclass": Output(loss, logits), "loss": loss}[self.kind]


class Parent(nn.Module):
    """Lightning's way: the parent has a training_step and is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 64))

    def training_step(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), x.flatten(1))


LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def predict_next(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    ids = (torch.arange(7) + y[:, None]) % 11
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def of_dict(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(images=x, labels=y)["logits"], y)


def of_dataclass(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(images=x, labels=y).loss


def own_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(images=x, labels=y)


def training_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model.training_step(x)


def flat(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.flatten(1)), y)


@dataclass(frozen=True)
class Case:
    """A model, its loss, what its loss averages over, and how many of its layers are preconditioned."""

    factory: Callable[[], nn.Module]
    loss: LossOf
    average: str
    layers: int


CASES = {
    "dict": Case(lambda: Returning("dict"), of_dict, "batch", 2),
    "dataclass": Case(lambda: Returning("dataclass"), of_dataclass, "batch", 2),
    "its own loss": Case(lambda: Returning("loss"), own_loss, "batch", 2),
    "submodules on their own": Case(Parent, training_step, "elements", 3),
    "a single Linear": Case(lambda: nn.Linear(64, 4), flat, "batch", 1),
}


def batch() -> tuple[Tensor, Tensor]:
    """Eight images of four patterns in noise."""
    y = torch.arange(8) % 4
    patterns = torch.randn(4, 1, 8, 8)
    return patterns[y] + 0.3 * torch.randn(8, 1, 8, 8), y


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cls", CLASSES)
def test_trains(name: str, cls: type[KFACMixin]) -> None:
    case = CASES[name]
    x, y = batch()
    model = case.factory()
    optimizer = cls(model, loss_average=case.average, **CLASSES[cls], **INTERVALS)
    assert len(optimizer.curvature.layers) == case.layers
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = case.loss(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < FALL * losses[0], losses
    report = optimizer.curvature.report()
    assert len(report["layers"]) == case.layers  # every one of them got its decomposition
    assert report["failed_decompositions"] == report["skipped_batches"] == report["skipped_steps"] == 0


@pytest.mark.parametrize("cls", CLASSES)
def test_given_parameters_alone_the_model_is_found(cls: type[KFACMixin]) -> None:
    family = FAMILIES["ResNet"]
    model = family.make()
    other = copy.deepcopy(model)
    options = {**CLASSES[cls], **INTERVALS, "scaling": "unit"}
    first, second = cls(model, **options), cls(other.parameters(), **options)
    for step in range(3):
        data = family.batch(torch.Generator().manual_seed(step))
        for m, optimizer in ((model, first), (other, second)):
            optimizer.zero_grad()
            family.loss(m, data).backward()
            optimizer.step()
    assert_same_weights(other, model, rel=0.0)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_outputs_of_other_kinds_equal_the_plain_tensor(fisher: str, kind: str) -> None:
    """The logits are found in a dict or beside a loss, also to sample from."""
    model = Returning(kind)
    inner = copy.deepcopy(model.parts)
    plain = nn.Sequential(inner["inner"], inner["head"])
    output_fn = (lambda output: output["logits"]) if kind == "dict" else None
    options = {"fisher": fisher, **TURNED}
    ours = options | ({} if fisher == "empirical" else {"fisher": Categorical(output_fn=output_fn)})
    first, second = KFACSGD(model, **ours), KFACSGD(plain, **options)
    for _ in range(3):
        x, y = batch()
        for optimizer, loss in ((first, of_dict if kind == "dict" else of_dataclass), (second, classify)):
            optimizer.zero_grad()
            loss(model if optimizer is first else plain, x, y).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


# torch.compile -------------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    """Few layers, because every hook is a graph to compile."""
    layers = [nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(36, 4))


COMPILED = {"small": Case(small, classify, "batch", 3), "attention": Case(GPT, predict_next, "batch+sequence", 10)}


@pytest.mark.fast("small")
@pytest.mark.parametrize(("backend", "name"), [("eager", "small"), ("aot_eager", "small"), ("aot_eager", "attention")])
def test_compiled_after_the_optimizer_was_built(backend: str, name: str) -> None:
    torch._dynamo.reset()
    case = COMPILED[name]
    model = case.factory()
    plain = copy.deepcopy(model)
    options = {"loss_average": case.average, **TURNED}
    first, second = KFACSGD(model, **options), KFACSGD(plain, **options)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        x, y = batch()
        for m, optimizer in ((compiled, first), (plain, second)):
            optimizer.zero_grad()
            case.loss(m, x, y).backward()
            optimizer.step()
    assert_same_factors(first, second, COMPILED_TOL)
    assert_same_weights(model, plain, COMPILED_TOL)


def test_a_compiled_model_as_the_argument() -> None:
    """Compiled, but not called yet."""
    torch._dynamo.reset()
    model = small()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    first, second = KFACSGD(compiled, **TURNED), KFACSGD(plain, **TURNED)
    for _ in range(3):
        x, y = batch()
        for m, optimizer in ((compiled, first), (plain, second)):
            optimizer.zero_grad()
            classify(m, x, y).backward()
            optimizer.step()
    assert_same_weights(model, plain, COMPILED_TOL)


@pytest.mark.fast("^eager")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_that_was_compiled_and_called_before_raises_at_the_first_step(backend: str) -> None:
    torch._dynamo.reset()
    model = CASES["dict"].factory()
    before = copy.deepcopy(model.state_dict())
    compiled = torch.compile(model, backend=backend)
    x, y = batch()
    of_dict(compiled, x, y).backward()
    optimizer = KFACSGD(model, lr=0.1, **INTERVALS)
    optimizer.zero_grad()
    of_dict(compiled, x, y).backward()
    with pytest.raises(RuntimeError, match=r"before the first call of a compiled model.*torch\._dynamo\.reset\(\)"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
