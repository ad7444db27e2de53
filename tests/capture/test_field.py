"""What users of other libraries ran into and what belongs to no other file: models called through ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from kfac_optim import KFACSGD
from tests.helpers.compare import assert_same_factors, assert_same_weights
from tests.helpers.reference import EXACT

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS: dict[str, object] = EXACT | {"lr": 0.1, "damping": 0.1}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def test_functional_call_is_a_call_of_the_model() -> None:
    model = small()
    plain = copy.deepcopy(model)
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(plain, **OPTIONS)
    for _ in range(3):
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        first.zero_grad()
        second.zero_grad()
        F.cross_entropy(functional_call(model, dict(model.named_parameters()), (x,)), y).backward()
        F.cross_entropy(plain(x), y).backward()
        first.step()
        second.step()
    assert_same_factors(first, second)
    assert_same_weights(model, plain)


def whole_batch(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Gradients of the batch by ``torch.func.grad``."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = grad(lambda p: F.cross_entropy(functional_call(model, p, (x,)), y))(parameters)
    for name, p in model.named_parameters():
        p.grad = gradients[name]


def per_example(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The mean of gradients per example, as for differential privacy."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, p, (x[None],)), y[None])

    gradients = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    for name, p in model.named_parameters():
        p.grad = gradients[name].mean(0)


def batched_forward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """An ordinary backward pass behind a forward under ``vmap``."""
    F.cross_entropy(vmap(model)(x), y).backward()


@pytest.mark.parametrize("transform", [whole_batch, per_example, batched_forward])
def test_transforms_hide_the_layers_and_the_first_step_says_so(
    transform: Callable[[nn.Module, Tensor, Tensor], None],
) -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    optimizer = KFACSGD(model, **OPTIONS)
    transform(model, torch.randn(8, 4), torch.randint(3, (8,)))
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
    with pytest.raises(RuntimeError, match="none of its layers was seen"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
