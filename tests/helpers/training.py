"""What the feature tests share: a small model, data that depend on the step alone, a training loop, comparisons."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.helpers.compare import assert_identical
from tests.helpers.files import through_a_file

Batch = tuple[Tensor, Tensor]
SHAPE = (8, 4)  # inputs of the small model


def make_model(seed: int = 0) -> nn.Sequential:
    """Two Linear layers, a LayerNorm and a parameter no Kronecker block covers (PReLU's)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.LayerNorm(6), nn.Linear(6, 3))


def data_of(step: int, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float64) -> Batch:
    """Inputs of a step and their classes, one for every row; the same in every process."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(3, (shape[0],), generator=generator)


def share(batch: Batch, rank: int, world_size: int) -> Batch:
    """A rank's part of a batch."""
    inputs, targets = batch
    return inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of a step."""
    inputs, classes = data_of(step, dtype=next(model.parameters()).dtype)
    return F.cross_entropy(model(inputs), classes)


def backward(model: nn.Module, step: int) -> Tensor:
    """Fresh gradients of a step's loss in ``.grad``."""
    model.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[int | Batch],
    after: Callable[[], Any] | None = None,
    *,
    shape: Sequence[int] = SHAPE,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    parts: int = 1,
    rank: int = 0,
    world_size: int = 1,
    before_step: Callable[[], Any] | None = None,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """The loop of every PyTorch tutorial, on this rank's share of every batch.

    Args:
        model: The model as it is called, wrapped where there are ranks.
        optimizer: Any.
        batches: Pairs of inputs and targets, or numbers of steps, which stand for :func:`data_of`.
        after: Called after each step, a scheduler's ``step`` for instance.
        shape: Of the inputs of a step that is given by its number.
        loss: Of output and targets, a mean.
        parts: Number of micro-batches to a step.
        rank: Whose share.
        world_size: Number of ranks.
        before_step: Called between the last backward pass and the step, on unscaled gradients.
        autocast: Dtype of the forward pass; outputs are cast back to float32.
        scaler: Of the loss.
    """
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for batch in batches:
        data = data_of(batch, shape, dtype=next(model.parameters()).dtype) if isinstance(batch, int) else batch
        inputs, targets = share(data, rank, world_size)
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                output = model(x)
            scaler.scale(loss(output if autocast is None else output.float(), y) / parts).backward()
        if before_step is not None:
            scaler.unscale_(optimizer)
            before_step()
        scaler.step(optimizer)
        scaler.update()
        if after is not None:
            after()


def resumed_from(model: nn.Module, optimizer: Any, into: tuple[Any, Any]) -> tuple[Any, Any]:
    """Another model and its optimizer, from the states of these, by way of a file."""
    weights, state = through_a_file([model.state_dict(), optimizer.state_dict()])
    into[0].load_state_dict(weights)
    into[1].load_state_dict(state)
    return into


def assert_go_on_alike(steps: range, *runs: tuple[nn.Module, Any], **how: Any) -> None:
    """Models that train on by their optimizers are the same afterwards, bit for bit."""
    for model, optimizer in runs:
        train(model, optimizer, steps, **how)
    for model, _ in runs[1:]:
        assert_identical(model, runs[0][0])


def assert_refused(model: nn.Module, optimizer: Any, state: dict[str, Any]) -> str:
    """The state is, by a ValueError, whose message is returned; training goes on as if nothing had been."""
    before = copy.deepcopy(optimizer.state_dict())
    twin, other = copy.deepcopy((model, optimizer))
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(state)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    assert_identical(model, twin)
    assert_go_on_alike(range(20, 26), (model, optimizer), (twin, other))
    return str(error.value)


def trusts_of(model: nn.Module, optimizer: Any, steps: int, **options: Any) -> list[float]:
    """The trust of each step of a :func:`train` on one batch, on which trust rises."""
    trusts: list[float] = []
    train(model, optimizer, [0] * steps, lambda: trusts.append(optimizer.curvature.trust), **options)
    return trusts


def clipping(model: nn.Module, largest: float | None) -> Callable[[], Any] | None:
    """For ``before_step``: the gradients' norm is limited, if to anything."""
    return None if largest is None else partial(nn.utils.clip_grad_norm_, list(model.parameters()), largest)


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Over the ranks, where no wrapper does it."""
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())  # type: ignore[union-attr]
