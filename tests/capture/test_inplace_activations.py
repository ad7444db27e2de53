"""In-place operations after a layer change its output tensor; the gradient that counts is that of the layer itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACSGD, CurvatureEngine
from kfac_optim.capture.autograd import own_result
from tests.helpers.compare import assert_step_alike
from tests.helpers.settings import OPTIONS
from tests.helpers.versions import needs_saved_tensors_hooks

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 3
ACTIVATIONS: dict[str, Callable[[bool], nn.Module]] = {
    "relu": lambda inplace: nn.ReLU(inplace=inplace),
    "leaky": lambda inplace: nn.LeakyReLU(0.2, inplace=inplace),
    "silu": lambda inplace: nn.SiLU(inplace=inplace),
}


class Net(nn.Module):
    """Convolution, norm and Linear, each followed by an activation; both residuals are added in place on request."""

    def __init__(self, activation: str, inplace: bool) -> None:
        super().__init__()
        act = ACTIVATIONS[activation]
        self.inplace = inplace
        self.first = nn.Sequential(nn.Conv2d(1, 3, 3), act(inplace))
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
        self.act = act(inplace)
        self.plain = nn.Conv2d(3, 3, 1)
        self.head = nn.Sequential(nn.Linear(3, 5), act(inplace), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.act(self.add(self.block(x), x))
        x = self.add(self.plain(x), x)  # in place on the output of a layer
        return self.head(x.mean((2, 3)))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return x.add_(residual) if self.inplace else x + residual


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fisher", ["empirical", "categorical", "gaussian"])
def test_in_place_equals_out_of_place(activation: str, fisher: str) -> None:
    """Also behind the last layer."""
    model, plain = (
        nn.Sequential(Net(activation, inplace), ACTIVATIONS[activation](inplace)) for inplace in (True, False)
    )
    model.load_state_dict(plain.state_dict())
    first, second = (KFACSGD(m, fisher=fisher, **(OPTIONS | {"lr": 0.01})) for m in (model, plain))
    for _ in range(STEPS):
        x, y = torch.randn(6, 1, 6, 6), torch.randint(4, (6,))
        losses = [F.cross_entropy(m(x), y) for m in (model, plain)]
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_in_place_on_the_output_of_the_model(fisher: str) -> None:
    """The loss works in place on what the model returned."""
    model, plain = Net("relu", True), Net("relu", False)
    model.load_state_dict(plain.state_dict())
    first, second = (KFACSGD(m, fisher=fisher, **(OPTIONS | {"lr": 0.01})) for m in (model, plain))
    for _ in range(STEPS):
        x = torch.randn(6, 1, 6, 6)
        losses = [output.square().mean(1).mean() for output in (model(x).sub_(1.0), plain(x) - 1.0)]
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_a_forward_hook_that_changes_the_output(fisher: str, when: str) -> None:
    """Whether it was there before the optimizer or not."""
    plain = nn.Sequential(nn.Linear(3, 4), Twice(), nn.Linear(4, 2))
    model = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2))
    model.load_state_dict(plain.state_dict())
    if when == "before":
        model[0].register_forward_hook(lambda module, args, output: 2 * output)
    first, second = (KFACSGD(m, fisher=fisher, **(OPTIONS | {"lr": 0.01})) for m in (model, plain))
    if when == "after":
        model[0].register_forward_hook(lambda module, args, output: 2 * output)
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    losses = [F.cross_entropy(m(x), y) for m in (model, plain)]
    assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fisher", ["empirical", "gaussian"])
@pytest.mark.parametrize("shape", [(6, 5, 3), (2, 3, 5, 3)])
def test_in_place_on_the_tokens_of_a_linear(shape: tuple[int, ...], fisher: str, bias: bool) -> None:
    """With a bias the output is a view of a matrix, and views that are changed in place get another node."""
    models = [
        nn.Sequential(nn.Linear(3, 4, bias=bias), nn.ReLU(inplace=inplace), nn.Linear(4, 2))
        for inplace in (True, False)
    ]
    models[0].load_state_dict(models[1].state_dict())
    first, second = (KFACSGD(m, fisher=fisher, factor_batch_fraction=0.5, **(OPTIONS | {"lr": 0.01})) for m in models)
    for _ in range(STEPS):
        x = torch.randn(shape)
        losses = [model(x).square().mean() for model in models]
        assert_step_alike((models[0], first, losses[0]), (models[1], second, losses[1]))
    assert float(first.curvature.factors("0")[1].norm()) > 0


class NormOfPixels(nn.LayerNorm):
    """Normalizes channels that come first, as torchvision's ConvNeXt does; its output is a permuted view."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class CopyOfPixels(NormOfPixels):
    """The same, but its output is no view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).contiguous()


class Transposed(nn.Module):
    """A Linear that returns the transposed view of a square matrix, from which its shape does not tell it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.mT).mT


@pytest.mark.parametrize("fisher", ["empirical", "gaussian"])
@pytest.mark.parametrize("kind", ["pixels", "square"])
def test_in_place_on_a_permuted_view(kind: str, fisher: str) -> None:
    """There are as many channels as pixels in a row, or as many outputs as positions: shapes do not tell them apart."""
    ends = nn.Flatten(), nn.Linear(64 if kind == "pixels" else 16, 2)
    if kind == "pixels":
        views, copies = [nn.Conv2d(2, 4, 1), NormOfPixels(4)], [nn.Conv2d(2, 4, 1), CopyOfPixels(4)]
    else:
        views, copies = [nn.Linear(2, 3), Transposed()], [nn.Linear(2, 3), nn.Linear(3, 4, bias=False)]
    models = [
        nn.Sequential(*layers, nn.ReLU(inplace=inplace), *copy.deepcopy(ends))
        for layers, inplace in ((views, True), (copies, False))
    ]
    models[0].load_state_dict(models[1].state_dict())
    first, second = (KFACSGD(m, fisher=fisher, **(OPTIONS | {"lr": 0.01})) for m in models)
    for _ in range(STEPS):
        x = torch.randn(6, 2, 4, 4) if kind == "pixels" else torch.randn(6, 4, 2)
        losses = [model(x).square().mean() for model in models]
        assert_step_alike((models[0], first, losses[0]), (models[1], second, losses[1]))
    traces = [float(block.state["current"]["G"]["trace"]) for block in first.curvature.stages.blocks]
    assert len(traces) == 3 and all(trace > 0 for trace in traces)


def test_an_expanded_part_is_no_whole_view() -> None:
    """It has as many entries as the tensor that it is a part of."""
    whole = torch.randn(3, 4, requires_grad=True) * 2
    permuted, expanded = whole.mT, whole[:1].expand_as(whole)
    assert own_result(permuted) is whole and own_result(expanded) is expanded


def test_a_permuted_view_in_a_compiled_model() -> None:
    """There the gradient of the output itself arrives."""
    plain = nn.Sequential(nn.Conv2d(2, 4, 1), NormOfPixels(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))
    model = copy.deepcopy(plain)
    first, second = (KFACSGD(m, **(OPTIONS | {"lr": 0.01})) for m in (model, plain))
    compiled = torch.compile(model, backend="eager")
    for _ in range(STEPS):
        x = torch.randn(6, 2, 4, 4)
        losses = [call(x).square().mean() for call in (compiled, plain)]
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


@pytest.mark.parametrize("layers_before", [0, 1])
@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_a_hook_that_changes_the_gradient_of_an_output(fisher: str, layers_before: int) -> None:
    """Loops that clip gradients inside a network do it so: what the layer gets is what its weight's gradient is of."""
    before = [nn.Linear(3, 3) for _ in range(layers_before)]
    plain = nn.Sequential(*before, nn.Linear(3, 4), WithHook(as_function=True), nn.Linear(4, 2))
    model = nn.Sequential(*copy.deepcopy(before), nn.Linear(3, 4), WithHook(as_function=False), nn.Linear(4, 2))
    model.load_state_dict(plain.state_dict())
    first, second = (KFACSGD(m, fisher=fisher, **(OPTIONS | {"lr": 0.01})) for m in (model, plain))
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    losses = [F.cross_entropy(m(x), y) for m in (model, plain)]
    assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


class Probed(nn.Module):
    """Takes the gradient of an input inside the backward pass, through the same call of a layer or one beside it."""

    def __init__(self, probes: str | None) -> None:
        super().__init__()
        self.first, self.last, self.probes = nn.Linear(3, 4), nn.Linear(4, 2), probes

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.first(x)
        probed = y if self.probes == "same call" else self.first(x)
        z = y.tanh()
        if self.probes:
            z.register_hook(
                lambda g: torch.autograd.grad(probed, x, torch.full_like(z, 7.0), retain_graph=True) and None
            )
        return self.last(z)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
@pytest.mark.parametrize("probes", ["same call", "call beside it"])
def test_a_hook_that_takes_another_gradient(fisher: str, probes: str) -> None:
    """It is no part of the loss's."""
    model, plain = Probed(probes), Probed(None)
    plain.load_state_dict(model.state_dict())
    first, second = (KFACSGD(m, fisher=fisher, **(OPTIONS | {"lr": 0.01})) for m in (model, plain))
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    losses = [F.cross_entropy(m(x), y) for m in (model, plain)]
    assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


class TenthOfGradient(torch.autograd.Function):
    """Returns its input, and sends a tenth of the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 0.1 * g


class WithHook(nn.Module):
    """Sends a tenth of the gradient back, by an operation or by a hook on its input."""

    def __init__(self, as_function: bool) -> None:
        super().__init__()
        self.as_function = as_function

    def forward(self, x: Tensor) -> Tensor:
        if self.as_function:
            return TenthOfGradient.apply(x)
        x.register_hook(lambda g: 0.1 * g)
        return x


class Twice(nn.Module):
    """Doubles."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Centred(nn.Module):
    """A LayerNorm in steps: autograd saves the input less its mean, not the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)) + self.bias


class Residual(nn.Module):
    """``x + f(norm(x))``, on request in the place of x."""

    def __init__(self, norm: Callable[[int], nn.Module], inplace: bool) -> None:
        super().__init__()
        self.first, self.norm, self.branch, self.head = nn.Linear(4, 6), norm(6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        branch = self.branch(self.norm(x))
        return self.head(x.add_(branch) if self.inplace else x + branch)


@pytest.mark.parametrize(
    ("norm", "dtype"), [(nn.RMSNorm, torch.bfloat16), (Centred, torch.float64)], ids=["RMSNorm", "lookalike"]
)
def test_a_residual_that_is_added_in_the_place_of_a_norms_input(norm: Any, dtype: torch.dtype) -> None:
    """Autograd lets the input of a norm layer be written over where it has saved something else."""
    plain, model = Residual(norm, False).to(dtype), Residual(norm, True).to(dtype)
    model.load_state_dict(plain.state_dict())
    first, second = (KFACSGD(m, **(OPTIONS | {"lr": 0.0})) for m in (model, plain))
    x, y = torch.randn(8, 4, dtype=dtype), torch.randint(3, (8,))
    losses = [F.cross_entropy(m(x), y) for m in (model, plain)]
    assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))
    assert "norm" in [layer.name for layer in first.curvature.layers]


@needs_saved_tensors_hooks
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, nn.BatchNorm1d, functools.partial(nn.GroupNorm, 2)], ids=["layer", "batch", "group"]
)
def test_where_activations_are_offloaded_the_input_of_a_norm_layer_may_be_written_over(norm: Any) -> None:
    """Autograd then keeps a copy, and compares no versions."""
    plain, model = Residual(norm, False), Residual(norm, True)
    model.load_state_dict(plain.state_dict())
    first, second = (KFACSGD(m, **(OPTIONS | {"lr": 0.0})) for m in (model, plain))
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        losses = [F.cross_entropy(m(x), y) for m in (model, plain)]
    assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


@pytest.mark.parametrize(
    ("norm", "copied"), [(nn.LayerNorm(4), True), (nn.GroupNorm(2, 4), True), (nn.BatchNorm1d(4), False)]
)
def test_under_autocast_a_norm_layer_may_save_a_copy_of_its_input(norm: nn.Module, copied: bool) -> None:
    """On GPUs it does, so that users can write over the input; BatchNorm runs as it is."""
    (layer,) = CurvatureEngine(norm).layers
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        kept = layer.observe(norm, x, norm(x), torch.float32).context[0]
    assert (kept.data_ptr() != x.data_ptr()) == copied
    assert layer.observe(norm, x, x, torch.float32).context[0].data_ptr() == x.data_ptr()
