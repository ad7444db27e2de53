"""Parameters of a layer that are replaced, or computed from others, after the optimizer was built."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from kfac_optim import KFACSGD, CurvatureEngine, KFACAdam
from tests.helpers.compare import assert_same_factors, assert_same_weights

OFTEN = {"factor_update_steps": 1, "inv_update_steps": 2, "factor_dtype": torch.float64, "inv_dtype": torch.float64}


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def backward(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int] | range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(backward(model, step)))
        optimizer.step()
    return losses


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized(model: nn.Sequential) -> None:
    parametrize.register_parametrization(model[0], "weight", Double())


def pruned(model: nn.Sequential) -> None:
    prune.random_unstructured(model[0], "weight", amount=0.5)


def spectral(model: nn.Sequential) -> None:
    parametrizations.spectral_norm(model[0])


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("change", [parametrized, pruned, spectral])
@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_layer_whose_weight_is_computed_later_is_declined(cls: type, change: Callable, steps: int) -> None:
    """The other layer goes on as before; the parameters move by the base rule."""
    model = make()
    optimizer = cls(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(steps))
    assert "Linear, expand" in repr(optimizer.curvature)
    change(model)
    with pytest.warns(UserWarning, match=r"'0' \(.*Linear\).*parametrization or pruning.*base rule") as warned:
        train(model, optimizer, range(steps, steps + 8))
    assert len(warned) == 1
    engine = optimizer.curvature
    assert [layer.name for layer in engine.layers] == ["2"]
    assert set(engine.report()["layers"]) == {"2"}
    assert "0.bias" in repr(engine) and "computed from other parameters" in repr(engine)
    assert "kfac" not in optimizer.state[model[0].bias]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = train(model, optimizer, range(40))
    assert losses[-1] < losses[0]
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_layer_comes_back_when_its_weight_is_a_parameter_again() -> None:
    """Pruning that has been made permanent."""
    model = make()
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.warns(UserWarning, match="parametrization or pruning"):
        train(model, optimizer, range(4, 8))
    prune.remove(model[0], "weight")
    train(model, optimizer, range(8, 16))
    assert set(optimizer.curvature.report()["layers"]) == {"0", "2"}
    assert "weight_orig" not in repr(optimizer.curvature)


@pytest.mark.filterwarnings("ignore:.*parametrization or pruning")
@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("change", [parametrized, spectral])
def test_a_layer_whose_parametrization_is_removed_is_covered(change: Callable, first: bool, leave: bool) -> None:
    """Also if the optimizer has never known it without: torch makes the parameter the weight again."""
    model = make()
    if first:
        change(model)
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(4))
    if not first:
        change(model)
    train(model, optimizer, range(4, 8))
    assert [layer.name for layer in optimizer.curvature.layers] == ["2"]
    assert "0.parametrizations.weight.original" in repr(optimizer.curvature)
    assert repr(optimizer.curvature).count("computed from other parameters") == 2
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=leave)
    train(model, optimizer, range(8, 16))
    assert set(optimizer.curvature.report()["layers"]) == {"0", "2"}
    assert "parametrizations" not in repr(optimizer.curvature)


@contextmanager
def switched_on(switch: Callable[[bool], None]) -> Iterator[None]:
    """With one of ``torch.__future__`` on."""
    switch(True)
    try:
        yield
    finally:
        switch(False)


def assigned(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def converted(model: nn.Module) -> None:
    with switched_on(torch.__future__.set_overwrite_module_params_on_conversion):
        model.to(torch.float32).to(torch.float64)


def normed(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[0])


def one_weight(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def frozen_by_a_trained_one(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)
    one_weight(model)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("change", [assigned, converted, normed, one_weight, frozen_by_a_trained_one])
def test_parameters_that_only_the_model_has_anew_are_an_error(change: Callable, steps: int) -> None:
    model = make()
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(steps))
    change(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"have been replaced since the optimizer was built.*assign=True"):
        train(model, optimizer, range(1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_an_optimizer_that_was_given_flat_partitions_is_told_how_to_go_on() -> None:
    model = make()
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    optimizer.param_groups[0]["params"] = [nn.Parameter(nn.utils.parameters_to_vector(model.parameters()))]
    with pytest.raises(
        RuntimeError, match=r"flat partitions.*before wrapping the model, and call engine\.precondition_"
    ):
        train(model, optimizer, range(1))


class Adapted(nn.Module):
    """As peft adapts attention: in each call the frozen layer computes with another weight, then gets a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        frozen = self.base.weight.detach()
        del self.base.weight
        self.base.weight = frozen + 0.1 * self.adapter.weight.detach()
        y = self.base(x)
        del self.base.weight
        self.base.weight = nn.Parameter(frozen, requires_grad=False)
        return y + self.adapter(x)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_frozen_parameters_may_be_replaced(cls: type) -> None:
    """As under torch's classes, which do not move them; the other layers go on."""
    model = nn.Sequential(nn.Linear(4, 6), Adapted(), nn.Tanh(), nn.Linear(6, 3)).double()
    frozen = copy.deepcopy(model[1].base)
    optimizer = cls(model, lr=0.05, **OFTEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = train(model, optimizer, range(40))
    assert losses[-1] < losses[0]
    assert set(optimizer.curvature.report()["layers"]) == {"0", "1.adapter", "3"}
    assert torch.equal(model[1].base.weight, frozen.weight) and torch.equal(model[1].base.bias, frozen.bias)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_what_torch_swaps_stays_the_optimizers(cls: type) -> None:
    """Gradients, too, of which torch swaps none that anything refers to weakly."""
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = cls(model, lr=0.05, **OFTEN)
        train(model, optimizer, range(4))
        if model is models[0]:
            with switched_on(torch.__future__.set_swap_module_params_on_conversion):
                model._apply(torch.clone)
        train(model, optimizer, range(4, 8))
    assert_same_weights(*models)


def adopt(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """What users do who know that a model has new parameters."""
    optimizer.param_groups[0]["params"] = list(model.parameters())


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("change", [assigned, one_weight])
def test_parameters_that_the_optimizer_has_too_are_adopted(change: Callable, steps: int) -> None:
    """Without momentum nothing else is lost, so that the run goes on as if nothing had happened."""
    model = make()
    twin = copy.deepcopy(model)
    first, second = (KFACSGD(m, lr=0.05, precondition="gradient", **OFTEN) for m in (model, twin))
    train(model, first, range(steps))
    change(model)
    adopt(first, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, first, range(steps, 9))
    train(twin, second, range(9))
    assert_same_factors(first, second, 1e-12)
    assert_same_weights(model, twin, 1e-12)
    assert len(first.curvature.layers) == 2
    copy.deepcopy(first).load_state_dict(first.state_dict())


def test_a_widened_layer_starts_anew_and_the_other_goes_on() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 3)).double()
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(3))
    kept = optimizer.curvature.layers[2]
    model[0].weight = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
    model[0].bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    model[2].weight = nn.Parameter(torch.randn(3, 8, dtype=torch.float64))
    adopt(optimizer, model)
    losses = train(model, optimizer, range(3, 40))
    assert losses[-1] < losses[0]
    engine = optimizer.curvature
    assert [layer.name for layer in engine.layers] == ["0", "2", "3"] and engine.layers[2] is kept
    assert engine.factors("0")[1].shape == (1, 8, 8) and engine.factors("2")[0].shape == (1, 9, 9)
    assert set(engine.report()["layers"]) == {"0", "2", "3"}


@pytest.mark.parametrize("change", [assigned, one_weight, parametrized])
def test_an_engine_that_stands_alone_goes_on_with_what_the_model_has(change: Callable) -> None:
    model = make()
    engine = CurvatureEngine(model, **OFTEN)
    for step in range(8):
        if step == 3:
            change(model)
        model.zero_grad()
        backward(model, step)
        raw = [p.grad.clone() for p in model.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.precondition_(lr=0.05)
        changed = [not torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True)]
    covered = {p for layer in engine.layers for p in layer.parameters}
    assert changed == [p in covered for p in model.parameters()]
    assert len(engine.layers) == (1 if change is parametrized else 2)


def test_looking_notices_a_parameter_that_was_replaced() -> None:
    model = make()
    trained = CurvatureEngine(model).stages.trained
    assert trained.is_intact
    one_weight(model)
    assert not trained.is_intact
