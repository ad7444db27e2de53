"""What the feature tests share: a small model, data that depend on the step alone, a training loop, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_optimizer
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KFACLAMB, KFACSGD, KFACAdam

FLOAT64: dict[str, Any] = {"factor_dtype": torch.float64, "inv_dtype": torch.float64}
# Statistics and refreshes at intervals that do not divide each other, so that a few steps see every combination.
OFTEN: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 3, "damping": 0.1, "relative_damping": False}
SETTINGS: dict[str, Any] = {**FLOAT64, **OFTEN, "kl_clip": 1e-2}

CLASSES: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    KFACSGD: {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    KFACAdam: {"lr": 0.01},
    KFACLAMB: {"lr": 0.01, "weight_decay": 1e-3},
}

# By a name that test parameters can have; SGD's other mode is a kind of its own.
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (KFACSGD, CLASSES[KFACSGD]),
    "momentum": (KFACSGD, {"lr": 0.02, "momentum": 0.9, "precondition": "momentum", "scaling": "unit"}),
    "adam": (KFACAdam, CLASSES[KFACAdam]),
    "lamb": (KFACLAMB, CLASSES[KFACLAMB]),
}

BASES: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    KFACSGD: torch.optim.SGD,
    KFACAdam: torch.optim.Adam,
    KFACLAMB: torch_optimizer.Lamb,
}


def make_model(seed: int = 0) -> nn.Sequential:
    """Two Linear layers, a LayerNorm and a parameter no Kronecker block covers (PReLU's)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.LayerNorm(6), nn.Linear(6, 3))


def batch_of(step: int, *shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs of a shape, float64, and classes, one for every row."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(classes, shape[:1], generator=generator)


def data_of(step: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and classes of a step, for the small model."""
    inputs, classes = batch_of(step, 8, 4)
    return inputs.to(like.dtype), classes


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of a step."""
    inputs, classes = data_of(step, next(model.parameters()))
    return F.cross_entropy(model(inputs), classes)


def backward(model: nn.Module, step: int) -> Tensor:
    """Fresh gradients of a step's loss in ``.grad``."""
    model.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], after: Callable[[], Any] | None = None
) -> None:
    """:func:`train_on` the data of some steps."""
    train_on(model, optimizer, (data_of(step, next(model.parameters())) for step in steps), after=after)


def train_on(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    rank: int = 0,
    world_size: int = 1,
    after: Callable[[], Any] | None = None,
) -> None:
    """The loop of every PyTorch tutorial, on this rank's share of every batch.

    ``model`` is wrapped where there are ranks; ``after`` is called after each step (a scheduler's step, say).
    """
    for batch in batches:
        inputs, classes = (part.chunk(world_size)[rank] for part in batch)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        if after is not None:
            after()


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def assert_identical(model: nn.Module, other: nn.Module) -> None:
    """The same parameters, bit for bit, and finite."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert bool(p.isfinite().all()), f"{name} is not finite"
        assert torch.equal(p, q), f"{name} differs by up to {float((p - q).detach().abs().max()):.3g}"


def assert_close(model: nn.Module, other: nn.Module, tolerance: float) -> None:
    """The same parameters up to a tolerance, relative and absolute."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def assert_all_near(
    outcomes: Iterable[list[Tensor]], expected: list[Tensor], tolerance: float = 1e-9, case: str = ""
) -> None:
    """Every rank has the expected parameters, up to the order of sums."""
    for rank, found in enumerate(outcomes):
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(
                p, q, rtol=tolerance, atol=tolerance, msg=lambda text, r=rank: f"{case}, rank {r}: {text}"
            )


def assert_trained(model: nn.Module, before: list[Tensor]) -> None:
    """Every parameter has changed: a comparison of two models that both stood still proves nothing."""
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert not torch.equal(p, old), f"{name} has not changed"
