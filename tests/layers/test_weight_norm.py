"""Layers with weight norm: v is preconditioned, by the factors of the plain layer with rows of G multiplied."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from kfac_optim import KFACSGD, EigenSolver, KFACAdam, LayerOptions
from kfac_optim.layers import FoundLayers, KroneckerLayer, RowsLayer
from tests.helpers.compare import assert_identical, assert_same_factors

pytestmark = pytest.mark.usefixtures("float64")


def by_hook(module: nn.Module, dim: int | None = 0) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in most scripts there are
        return nn.utils.weight_norm(module, dim=dim)  # type: ignore[arg-type]


def by_parametrization(module: nn.Module, dim: int | None = 0) -> nn.Module:
    return parametrizations.weight_norm(module, dim=dim)  # type: ignore[arg-type]


WAYS = [by_hook, by_parametrization]
Way = Callable[..., nn.Module]


def v_of(module: nn.Module) -> nn.Parameter:
    return next(p for name, p in module.named_parameters() if name.endswith(("weight_v", "original1")))


def layer_of(module: nn.Module, **options: Any) -> RowsLayer:
    (layer,) = FoundLayers([module], LayerOptions(**options)).layers
    assert isinstance(layer, RowsLayer)
    return layer


@st.composite
def normed(draw: st.DrawFn) -> tuple[nn.Module, Tensor, int | None]:
    """A layer with weight norm and gains of any size, its input, and the dimension of the norm."""
    torch.manual_seed(draw(st.integers(0, 999)))
    bias, examples, groups = draw(st.booleans()), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["linear", "sequence", "image"]))
    module: nn.Module
    if kind == "linear":
        d_in, d_out = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        module, x = nn.Linear(d_in, d_out, bias), torch.randn(examples, *draw(st.sampled_from([(), (3,)])), d_in)
    elif kind == "sequence":
        module = nn.Conv1d(2 * groups, 3 * groups, 3, groups=groups, bias=bias, padding=draw(st.integers(0, 2)))
        x = torch.randn(examples, 2 * groups, 5)
    else:
        module = nn.Conv2d(groups, 2 * groups, 2, groups=groups, bias=bias, stride=draw(st.integers(1, 2)))
        x = torch.randn(examples, groups, 4, 3)
    dim = draw(st.sampled_from([0, None]))
    module = draw(st.sampled_from(WAYS))(module, dim)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1 + torch.rand_like(p))
    return module, x, dim


@given(normed())
def test_rows_make_the_gradient_of_each_example_but_for_its_part_along_v(
    case: tuple[nn.Module, Tensor, int | None],
) -> None:
    module, x, dim = case
    layer, v = layer_of(module), v_of(module)
    assert layer.parameters == (v,)
    for example in x.split(1):
        output = module(example)
        towards = torch.randn_like(output)
        (expected,) = torch.autograd.grad((output * towards).sum(), v)
        (a,) = layer.input_rows(module, example, output)
        g = layer.output_rows(module, towards, None)
        found = layer.matrix_to_weight(torch.einsum("nrpo,nrpi->poi", g, a))
        flat = (1, -1) if dim is None else (len(v), -1)
        along, its = v.detach().reshape(flat), found.reshape(flat)
        part = (its * along).sum(1, keepdim=True) / along.square().sum(1, keepdim=True) * along
        torch.testing.assert_close((its - part).reshape(v.shape), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_solves_with_these_factors(way: Way) -> None:
    torch.manual_seed(0)
    module = way(nn.Linear(4, 3))
    with torch.no_grad():
        module.weight_g.mul_(3) if way is by_hook else module.parametrizations.weight.original0.mul_(3)
    x, y, v = torch.randn(16, 4), torch.randn(16, 3), v_of(module)
    options: dict[str, Any] = {"precondition": "gradient", "damping": 0.1, "scaling": None, "inv_update_steps": 1}
    options |= {"factor_dtype": torch.float64, "inv_dtype": torch.float64, "solver": EigenSolver(negligible=0.0)}
    optimizer = KFACSGD(nn.ModuleList([module]), lr=1.0, **options)
    output = module(x)
    output.retain_grad()
    (output - y).square().sum(1).mean().backward()
    assert v.grad is not None and output.grad is not None
    gain = module.weight.detach().norm(dim=1) / v.detach().norm(dim=1)
    rows = 16 * output.grad * gain
    fisher = torch.kron(rows.T @ rows / 16, x.T @ x / 16)  # of the entries of v, row by row
    expected = v.detach() - torch.linalg.solve(fisher + 0.1 * torch.eye(12), v.grad.flatten()).view(3, 4)
    optimizer.step()
    torch.testing.assert_close(v.detach(), expected, rtol=1e-8, atol=1e-10)


def make(way: Way) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(way(nn.Conv1d(2, 3, 3)), nn.Flatten(), way(nn.Linear(12, 5)), nn.Tanh(), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 2, 6)).square().mean().backward()
        optimizer.step()


OFTEN: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 2}


def test_both_ways_train_alike() -> None:
    models = [make(way) for way in WAYS]
    for model in models:
        train(model, KFACAdam(model, lr=0.01, **OFTEN), range(8))
    x = torch.randn(4, 2, 6)
    torch.testing.assert_close(models[0](x), models[1](x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_gains_and_biases_train_by_the_base_rule_and_the_table_says_why(way: Way) -> None:
    model = make(way)
    optimizer = KFACAdam(model, lr=0.01, **OFTEN)
    train(model, optimizer, range(3))
    table = str(optimizer.curvature)
    assert "WeightNormConv" in table and "WeightNormLinear" in table
    assert table.count("the gain or the bias of a layer with weight norm") == 4
    assert "3 layers preconditioned, 4 parameters by the base rule" in table
    assert "computed from other parameters" not in table


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_goes_on_bit_for_bit(way: Way) -> None:
    model = make(way)
    optimizer = KFACAdam(model, lr=0.01, **OFTEN)
    train(model, optimizer, range(5))
    other = make(way)
    other.load_state_dict(model.state_dict())
    resumed = KFACAdam(other, lr=0.01, **OFTEN)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(5, 9))
    train(other, resumed, range(5, 9))
    assert_identical(model, other)


def test_a_copy_goes_on_bit_for_bit() -> None:
    """Not by hook: torch cannot copy such a module after its first call."""
    model = make(by_parametrization)
    optimizer = KFACAdam(model, lr=0.01, **OFTEN)
    train(model, optimizer, range(5))
    other, its = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(5, 9))
    train(other, its, range(5, 9))
    assert_identical(model, other)


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_by_the_inputs_are_not_counted(way: Way) -> None:
    models = make(way), make(way)
    optimizers = [KFACSGD(model, lr=0.1, **OFTEN) for model in models]
    x = torch.randn(8, 2, 6, requires_grad=True)
    torch.autograd.grad(models[1](x).square().mean(), x)  # as for adversarial examples
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(1))
    assert_same_factors(optimizers[1], optimizers[0])


def pruned(module: nn.Module) -> nn.Module:
    prune.random_unstructured(by_hook(module), "weight_v", amount=0.5)
    return module


def along_inputs(module: nn.Module) -> nn.Module:
    return by_parametrization(module, 1)


def twice(module: nn.Module) -> nn.Module:
    return parametrizations.spectral_norm(by_parametrization(module))


@pytest.mark.parametrize(
    ("module", "change", "reason"),
    [
        (nn.Linear(3, 4), pruned, "computed from other parameters"),
        (nn.Linear(3, 4), along_inputs, "weight norm along another dimension than the first"),
        (nn.Linear(3, 4), twice, "computed from other parameters"),
        (nn.Linear(3, 4), parametrizations.spectral_norm, "computed from other parameters"),
        (nn.ConvTranspose1d(3, 4, 2), by_hook, "computed from other parameters"),
        (nn.ConvTranspose1d(3, 4, 2), by_parametrization, "computed from other parameters"),
        (nn.Embedding(3, 4), by_parametrization, "computed from other parameters"),
    ],
)
def test_other_norms_of_weights_are_declined(module: nn.Module, change: Way, reason: str) -> None:
    found = FoundLayers([change(copy.deepcopy(module))], LayerOptions())
    assert found.layers == []
    assert any(reason in why for _, why in found.uncovered.values())


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_gain_and_a_shared_layer(way: Way) -> None:
    shared = way(nn.Linear(3, 3))
    shared.get_parameter("weight_g" if way is by_hook else "parametrizations.weight.original0").requires_grad_(False)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    optimizer = KFACSGD(model, lr=0.1, **OFTEN)
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    layers: list[KroneckerLayer] = optimizer.curvature.layers
    assert [layer.weight is v_of(shared) for layer in layers] == [True]


@pytest.mark.parametrize("way", WAYS)
def test_weight_norm_may_be_removed_if_the_optimizer_gets_the_weight(way: Way) -> None:
    model = make(way)
    optimizer = KFACAdam(model, lr=0.01, **OFTEN)
    train(model, optimizer, range(3))
    if way is by_hook:
        nn.utils.remove_weight_norm(model[2])
    else:
        parametrize.remove_parametrizations(model[2], "weight")
    with pytest.raises(RuntimeError, match="weight_norm\\(\\) or its removal"):
        train(model, optimizer, range(3, 4))
    optimizer.add_param_group({"params": [model[2].weight]})
    train(model, optimizer, range(4, 7))
    assert [type(layer).__name__ for layer in optimizer.curvature.layers][1:] == ["LinearLayer", "LinearLayer"]


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_layer_may_get_weight_norm_if_the_optimizer_gets_its_parameters(way: Way) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = KFACAdam(model, lr=0.01, **OFTEN)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    way(model[0])
    with pytest.raises(RuntimeError, match="parameters that the model no longer has"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert [type(layer).__name__ for layer in optimizer.curvature.layers] == ["WeightNormLinearLayer", "LinearLayer"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_v_shared_with_a_module_without_rule_is_declined(way: Way, norm_first: bool) -> None:
    covered, other = way(nn.Conv1d(4, 4, 3)), way(nn.ConvTranspose1d(4, 4, 3))
    owners = [m if way is by_hook else m.parametrizations["weight"] for m in (covered, other)]  # type: ignore[index]
    setattr(owners[1], "weight_v" if way is by_hook else "original1", v_of(covered))
    model = nn.ModuleList([covered, other] if norm_first else [other, covered])
    found = FoundLayers([model], LayerOptions())
    assert found.layers == []
    reasons = [why for _, why in found.uncovered.values()]
    assert all("computed from other parameters" in why for why in reasons)  # the gain's, too
    assert len(reasons) == 5


def test_skip_layers_may_name_the_parametrization() -> None:
    found = FoundLayers([make(by_parametrization)], LayerOptions(skip_layers=["parametrizations"]))
    assert [layer.name for layer in found.layers] == ["4"]
    assert all("skip_layers" in why for _, why in found.uncovered.values())


@pytest.mark.parametrize("dim", [0, None])
@pytest.mark.parametrize("way", WAYS)
def test_the_norm_of_v_is_no_use_beside_the_calls(way: Way, dim: int | None) -> None:
    """Without a fused kernel, v is in the graph twice."""
    model = nn.Sequential(way(nn.Linear(4, 3), dim), nn.Tanh(), nn.Linear(3, 2))
    optimizer = KFACAdam(model, lr=0.01, **OFTEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_weight_norm_that_is_made_anew_is_an_error_until_the_optimizer_knows(way: Way) -> None:
    model = make(way)
    optimizer = KFACAdam(model, lr=0.01, **OFTEN)
    train(model, optimizer, range(3))
    nn.utils.remove_weight_norm(model[2]) if way is by_hook else parametrize.remove_parametrizations(model[2], "weight")
    way(model[2])
    with pytest.raises(RuntimeError, match="parameters that the model no longer has"):
        train(model, optimizer, range(3, 4))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, range(4, 7))
    assert optimizer.curvature.layers[1].weight is v_of(model[2])


def test_other_classes_of_that_name_are_not_taken_for_torchs() -> None:
    class WeightNorm:
        def __call__(self, module: nn.Module, inputs: Any) -> None:
            module.weight = module.weight_v * module.weight_g

    module = nn.Linear(3, 4)
    module.weight_v, module.weight_g = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 1))
    del module._parameters["weight"]
    module.register_forward_pre_hook(WeightNorm())
    assert FoundLayers([module], LayerOptions()).layers == []


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_half_precision_weights_are_multiplied_in_float32(way: Way) -> None:
    torch.manual_seed(0)
    module = way(nn.Linear(7, 3).bfloat16())
    layer, v, g = layer_of(module), v_of(module), torch.randn(4, 3, dtype=torch.float32)
    gain = next(p for name, p in module.named_parameters() if name.endswith(("weight_g", "original0")))
    expected = g.double() * (gain.double() / v.double().norm(dim=1, keepdim=True)).T
    found = layer.output_rows(module, g, None).view(4, 3)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-6, atol=0.0)
