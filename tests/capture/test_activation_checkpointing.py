"""Activation checkpointing: layers whose forward runs twice count once, in both modes of torch.utils.checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from kfac_optim import KFACSGD
from tests.helpers.compare import assert_same_factors, assert_same_weights, assert_step_alike
from tests.helpers.settings import OPTIONS

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 3


class Block(nn.Module):
    """Convolution, norm, dropout, in-place activation and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu_(self.norm(self.conv(x))))


class Net(nn.Module):
    """Three blocks and a head; ``inside`` are the blocks that are checkpointed."""

    def __init__(self, inside: tuple[int, ...] = (), reentrant: bool = False) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 3, 1), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(3, 4)
        self.inside, self.reentrant = inside, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant) if i in self.inside else block(x)
        return self.head(x.mean((2, 3)))


class Whole(nn.Module):
    """The whole model under one checkpoint; ``reentrant=None``: without."""

    def __init__(self, net: Net, reentrant: bool | None) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.reentrant is None else checkpoint(self.net, x, use_reentrant=self.reentrant)


def run(model: nn.Module, optimizer: KFACSGD, parts: int = 1, call: Callable[[Tensor], Tensor] | None = None) -> None:
    """A few steps whose data and dropout are the same in every run."""
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for _ in range(parts):
            x = torch.randn(4, 1, 5, 5, requires_grad=True)  # re-entrant checkpoints need an input with a gradient
            ((call or model)(x).square().sum() / 4 / parts).backward()
        optimizer.step()


def check(
    model: nn.Module,
    plain: nn.Module,
    parts: int = 1,
    call: Callable[[Tensor], Tensor] | None = None,
    **keywords: object,
) -> None:
    """``call``: how the first model is called."""
    first, second = (KFACSGD(m, **(OPTIONS | {"lr": 0.01} | keywords)) for m in (model, plain))
    run(model, first, parts, call)
    run(plain, second, parts)
    assert_same_factors(first, second)
    assert_same_weights(model, plain)


def checkpointed(plain: Net, inside: tuple[int, ...], reentrant: bool) -> Net:
    net = Net(inside, reentrant)
    net.load_state_dict(plain.state_dict())
    return net


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("parts", [1, 2])
def test_checkpointed_blocks_equal_plain_ones(reentrant: bool, inside: tuple[int, ...], parts: int) -> None:
    plain = Net()
    check(checkpointed(plain, inside, reentrant), plain, parts)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("average", ["batch", "batch+sequence", "elements"])
def test_a_checkpoint_around_the_whole_model(reentrant: bool, average: str) -> None:
    plain = Net()
    check(Whole(copy.deepcopy(plain), reentrant), Whole(plain, None), loss_average=average)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_call_of_the_model(reentrant: bool) -> None:
    model = Net()
    check(model, copy.deepcopy(model), call=lambda x: checkpoint(model, x, use_reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_sequential(reentrant: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
    plain = copy.deepcopy(model)
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(plain, **OPTIONS)
    for _ in range(STEPS):
        x = torch.randn(6, 3, requires_grad=True)
        outputs = checkpoint_sequential(model, 2, x, use_reentrant=reentrant), plain(x)
        losses = [output.pow(4).mean(1).mean() for output in outputs]
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


@pytest.mark.parametrize("fisher", ["categorical", "gaussian"])
@pytest.mark.parametrize("inside", [(1,), (0, 1, 2)])
def test_sampled_fisher_without_reentry_equals_plain(fisher: str, inside: tuple[int, ...]) -> None:
    plain = Net()
    check(checkpointed(plain, inside, reentrant=False), plain, fisher=fisher)


@pytest.mark.parametrize("inside", [(1,), (0, 1, 2)])
def test_sampled_fisher_refuses_reentry_with_the_remedy(inside: tuple[int, ...]) -> None:
    model = Net(inside, reentrant=True)
    optimizer = KFACSGD(model, fisher="categorical", **OPTIONS)
    with pytest.raises(RuntimeError, match=r"use_reentrant=False.*fisher='empirical'"):
        run(model, optimizer)


def test_sampled_fisher_refuses_reentry_where_no_layer_comes_before() -> None:
    """The sampled backward pass then ends behind the checkpoint, and the layers inside would never be seen."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = KFACSGD(model, fisher="categorical", **OPTIONS)
    optimizer.zero_grad()
    first, rest = model[0], model[1:]
    model.forward = lambda x: rest(checkpoint(first, x, use_reentrant=True))  # type: ignore[method-assign]
    loss = model(torch.randn(4, 4, requires_grad=True)).logsumexp(1).mean()
    with pytest.raises(RuntimeError, match=r"'0' runs with gradients.*use_reentrant=False.*fisher='empirical'"):
        loss.backward()


@pytest.mark.parametrize("around_call", [False, True])
def test_sampled_fisher_refuses_reentry_of_the_whole_model(around_call: bool) -> None:
    """No layer is outside of the checkpoint, so that there is no sampled backward pass at all."""
    model = Net() if around_call else Whole(Net(), reentrant=True)
    optimizer = KFACSGD(model, fisher="categorical", **OPTIONS)
    with pytest.raises(RuntimeError, match=r"use_reentrant=False.*fisher='empirical'"):
        run(model, optimizer, call=(lambda x: checkpoint(model, x, use_reentrant=True)) if around_call else None)


class Failing(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise RuntimeError("the user's own")


def test_another_error_in_the_sampled_backward_pass_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    model[0].register_forward_hook(lambda module, args, output: Failing.apply(output))
    optimizer = KFACSGD(model, fisher="categorical", **OPTIONS)
    with pytest.raises(RuntimeError, match="^the user's own$"):
        run(model, optimizer)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("average", ["batch+sequence", "elements"])
def test_a_checkpointed_block_is_no_call_of_the_model(reentrant: bool, average: str) -> None:
    """The output of a block has more positions and elements than that of the model, of which the loss is a mean."""
    plain = Net()
    check(checkpointed(plain, (0, 2), reentrant), plain, loss_average=average)
