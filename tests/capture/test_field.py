"""What users of other libraries ran into and what belongs to no other file: models called through ``torch.func``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.nn import functional as F

from kfac_optim import KFACSGD, CurvatureEngine
from tests.helpers.compare import assert_step_alike, twins
from tests.helpers.settings import EXACT
from tests.helpers.training import train

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS: dict[str, object] = EXACT | {"lr": 0.1, "damping": 0.1}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None] + torch.arange(3.0, dtype=x.dtype)[:, None]
        return self.head(self.attention(rows, rows.flip(1), rows.sin())[0].mean(1))


@pytest.mark.parametrize("make", [small, Attending])
@pytest.mark.parametrize("computed", ["as they are", "copies", "parts of one vector"])
def test_functional_call_is_a_call_of_the_model(make: Callable[[], nn.Module], computed: str) -> None:
    model = make()
    plain = copy.deepcopy(model)

    def weights() -> dict[str, Tensor]:
        given: dict[str, Tensor] = dict(model.named_parameters())
        if computed == "copies":
            return {name: p * 1.0 for name, p in given.items()}
        if computed == "parts of one vector":
            parts = torch.cat([p.flatten() for p in given.values()]).split([p.numel() for p in given.values()])
            return {name: part.view_as(given[name]) for name, part in zip(given, parts, strict=True)}
        return given

    first, second = KFACSGD(model, **OPTIONS), KFACSGD(plain, **OPTIONS)
    for _ in range(3):
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        losses = [F.cross_entropy(output, y) for output in (functional_call(model, weights(), (x,)), plain(x))]
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))
    stages = first.curvature.stages
    assert not any(map(stages.sightings.has_never_seen, stages.blocks))


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


class Images(nn.Module):
    """A model with several kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.conv(x).tanh()).mT
        return self.head(self.attention(tokens, tokens, tokens)[0].mean(1))


@pytest.mark.parametrize("times", [1, 2])
def test_jvp_gives_the_curvature_of_the_values(times: int) -> None:
    """As losses of few-step generators (mean flows) have it, whose targets are made of the derivatives."""
    model, plain = twins(Images)
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(plain, **OPTIONS)

    def values(net: nn.Module) -> Callable[[Tensor], Tensor]:
        return net if times == 1 else lambda x: jvp(net, (x,), (x,))[0]

    for _ in range(3):
        x, direction = torch.randn(2, 8, 2, 6)
        value, derivative = jvp(values(model), (x,), (direction,))
        losses = [(output - derivative.detach()).square().mean() for output in (value, plain(x))]
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))
    assert len(first.curvature.report()["layers"]) == 5


@pytest.mark.parametrize("transform", [whole_batch, per_example, batched_forward])
def test_transforms_hide_the_layers_and_the_first_step_says_so_each_time(
    transform: Callable[[nn.Module, Tensor, Tensor], None],
) -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    optimizer = KFACSGD(model, **OPTIONS)
    for _ in range(3):
        optimizer.zero_grad()
        transform(model, torch.randn(8, 4), torch.randint(3, (8,)))
        assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
        with pytest.raises(RuntimeError, match="none of its layers was seen"):
            optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizer, range(3))  # called rightly
    assert optimizer.curvature.stages.refresher.refreshes > 0


def test_copies_that_use_the_weights_of_the_model_hide_its_layers_and_the_error_names_them() -> None:
    """The library higher (MAML) calls functional copies of all modules, as here a copy of the model."""
    model = small()
    optimizer = KFACSGD(model, **OPTIONS)
    out = functional_call(copy.deepcopy(model), dict(model.named_parameters()), (torch.randn(8, 4),))
    F.cross_entropy(out, torch.randint(3, (8,))).backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
    with pytest.raises(RuntimeError, match="none of its layers was seen.*or copies of them"):
        optimizer.step()


def test_a_trained_model_of_which_nothing_is_seen_any_more_is_an_error_in_each_step() -> None:
    model = small()
    optimizer = KFACSGD(model, **OPTIONS | {"factor_update_steps": 3, "inv_update_steps": 6})
    train(model, optimizer, range(7))
    while True:  # an unseen step may come between statistics
        optimizer.zero_grad()
        whole_batch(model, torch.randn(8, 4), torch.randint(3, (8,)))
        try:
            optimizer.step()
        except RuntimeError:
            break
        assert optimizer.curvature.step_count < 30
    for _ in range(4):
        whole_batch(model, torch.randn(8, 4), torch.randint(3, (8,)))
        with pytest.raises(RuntimeError, match="none of its layers was seen"):
            optimizer.step()


@pytest.mark.parametrize("lr", [None, 0.1])
def test_an_engine_of_its_own_says_so_too(lr: float | None) -> None:
    """Whether or not the loop tells it a learning rate."""
    model = small()
    engine = CurvatureEngine(model, scaling=None)
    whole_batch(model, torch.randn(8, 4), torch.randint(3, (8,)))
    with pytest.raises(RuntimeError, match="none of its layers was seen"):
        engine.precondition_(lr)


@pytest.mark.parametrize("transform", [whole_batch, per_example])
def test_transforms_after_ordinary_steps(transform: Callable[[nn.Module, Tensor, Tensor], None]) -> None:
    model = small()
    optimizer = KFACSGD(model, **OPTIONS)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    train(model, optimizer, [(x, y)] * 2)
    transform(model, x, y)
    with pytest.raises(RuntimeError, match="none of its layers was seen"):
        optimizer.step()


def test_gradients_out_of_nowhere_after_ordinary_steps() -> None:
    """A step or two on old gradients may be meant; the third statistics step in a row stops the training."""
    model = small()
    optimizer = KFACSGD(model, **(OPTIONS | {"factor_update_steps": 2, "inv_update_steps": 100}))
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    F.cross_entropy(model(x), y).backward()
    steps = 0

    with pytest.raises(RuntimeError, match="none of its layers was seen"):
        while steps < 20:
            optimizer.step()
            steps += 1
    assert steps == 6
    train(model, optimizer, [(x, y)])


def test_steps_that_train_no_layer_are_no_error() -> None:
    """The layers have no gradient, or one that is zero, and something else is trained."""
    model = nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 3))
    optimizer = KFACSGD(model, **OPTIONS)
    F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
    optimizer.step()
    for set_to_none in (True, False):
        for _ in range(5):
            optimizer.zero_grad(set_to_none)
            model[1].weight.square().sum().backward()
            optimizer.step()


def residual(model: nn.Module, x: Tensor) -> Tensor:
    """Of Laplace's equation, by ``torch.func``."""
    return vmap(hessian(lambda point: model(point)[0]))(x).diagonal(dim1=1, dim2=2).sum(1)


def test_a_loss_of_derivatives_beside_an_ordinary_pass() -> None:
    """Only the boundary term is an ordinary pass; its curvature is not that of the loss."""
    model = small()
    optimizer = KFACSGD(model, **OPTIONS)
    before = copy.deepcopy(model.state_dict())
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    (residual(model, x).square().mean() + F.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="torch.func.*none of its layers was seen.*create_graph=True"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optimizer, [(x, y)])


def test_derivatives_by_transforms_that_the_loss_has_no_part_in() -> None:
    model = small()
    plain = copy.deepcopy(model)
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(plain, **OPTIONS)
    for _ in range(3):
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        residual(model, x)
        torch.autograd.grad(residual(model, x).sum(), list(model.parameters()), allow_unused=True)
        losses = [F.cross_entropy(m(x), y) for m in (model, plain)]
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))
