"""Layers whose weight trains although their module is never called."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KFACSGD, CurvatureEngine
from tests.helpers.training import train

OFTEN = {"factor_update_steps": 1, "inv_update_steps": 2}


class Functional(nn.Module):
    """The first layer is called, the second one's weight is used by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.used = nn.Linear(4, 6), nn.Linear(6, 3)
        self.idle = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.called(x)), self.used.weight, self.used.bias)


def warned_of(model: nn.Module, optimizer: KFACSGD) -> list[str]:
    """Some steps; the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, range(12))
    return [str(w.message) for w in caught]


def test_a_layer_that_is_never_called_is_named_in_the_table_and_in_one_warning() -> None:
    model = Functional()
    optimizer = KFACSGD(model, lr=0.1, **OFTEN)
    assert "3 layers preconditioned, 0 parameters by the base rule" in repr(optimizer.curvature)
    texts = warned_of(model, optimizer)
    assert len(texts) == 1 and texts[0].startswith("'used': ") and "skip_layers" in texts[0], texts
    table = repr(optimizer.curvature).splitlines()
    assert "never seen" in next(line for line in table if line.startswith("used "))
    assert "by the base rule until its first" in next(line for line in table if line.startswith("idle "))
    assert table[-1].startswith("2 layers preconditioned, 1 of them not yet, 2 parameters by the base rule")


class Switched(Functional):
    """Calls the second layer until it is told not to."""

    calls = True

    def forward(self, x: Tensor) -> Tensor:
        return self.used(torch.tanh(self.called(x))) if self.calls else super().forward(x)


def test_a_layer_that_is_no_longer_called_is_named_in_the_table_and_in_one_warning() -> None:
    """Its factors are those of other steps from then on, until it is called again."""
    model = Switched()
    optimizer = KFACSGD(model, lr=0.1, **OFTEN)
    assert not warned_of(model, optimizer)
    model.calls = False
    texts = warned_of(model, optimizer)
    assert len(texts) == 1 and texts[0].startswith("'used': ") and "no longer seen" in texts[0], texts
    assert "no longer seen" in next(line for line in repr(optimizer.curvature).splitlines() if line.startswith("used "))
    model.calls = True
    assert not warned_of(model, optimizer)
    assert "no longer seen" not in repr(optimizer.curvature)


class Masked(nn.Module):
    """The inner layer only holds the weight."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_in, d_out)
        self.register_buffer("mask", torch.ones(d_out, d_in).tril())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight * self.mask, self.linear.bias)


def test_a_model_none_of_whose_layers_is_called_trains_as_by_the_base_class() -> None:
    """As flows of masked layers do; they are named once."""
    torch.manual_seed(0)
    model = nn.Sequential(Masked(4, 6), nn.Tanh(), Masked(6, 3))
    other = copy.deepcopy(model)
    optimizers = [KFACSGD(model, lr=0.1, momentum=0.9), torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for net, optimizer in zip((model, other), optimizers, strict=True):
            train(net, optimizer, range(12))
    assert [str(w.message).partition(":")[0] for w in caught] == ["'0.linear', '2.linear'"]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert repr(optimizers[0].curvature).splitlines()[-1].startswith("0 layers preconditioned, 4 parameters")  # type: ignore[attr-defined]


def test_layers_in_plain_lists_are_said_to_be_no_submodules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [nn.Linear(4, 6), nn.Linear(6, 3)]
            self.held = nn.ParameterList(p for part in self.parts for p in part.parameters())

    with pytest.warns(UserWarning, match="in a ParameterList: layers are found as submodules alone.*nn.ModuleList"):
        KFACSGD(Net(), lr=0.1)


def test_a_layer_that_is_seen_later_is_an_ordinary_one() -> None:
    model = Functional()
    engine = CurvatureEngine(model, **OFTEN)
    foreign = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(14):
        foreign.zero_grad()
        hidden = torch.tanh(model.called(torch.randn(8, 4)))
        (model(torch.randn(8, 4)) if step < 8 else model.used(hidden)).square().mean().backward()
        with pytest.warns(UserWarning, match="never seen") if step == 2 else warnings.catch_warnings():
            engine.precondition_(lr=0.1)
        foreign.step()
    assert "never seen" not in repr(engine)
    assert set(engine.report()["layers"]) == {"called", "used"}


def test_gradients_that_are_zero_make_no_layer_unseen() -> None:
    """``zero_grad(set_to_none=False)`` leaves zeros behind for layers that the loss does not use."""
    model = Functional()
    optimizer = KFACSGD(model, lr=0.1, **OFTEN)
    model.idle.weight.grad = torch.zeros(3, 6)
    model.used.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert "never seen" not in repr(optimizer.curvature)


def test_steps_of_parameters_without_a_layer_need_no_call_of_the_model() -> None:
    model = Functional()
    model.scale = nn.Parameter(torch.ones(()))
    optimizer = KFACSGD(model, lr=0.1, **OFTEN)
    for _ in range(12):
        optimizer.zero_grad()
        model.scale.square().backward()
        optimizer.step()
    assert model.scale.item() == pytest.approx(0.8**12)


def test_a_resumed_run_refreshes_before_it_has_seen_anything() -> None:
    """Its first step collects no statistics: those that were saved are decomposed."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    resumed = copy.deepcopy(model)
    first, second = (KFACSGD(m, lr=0.1, factor_update_steps=4, inv_update_steps=3, spread=0) for m in (model, resumed))
    for step in range(6):
        if step == 3:
            resumed.load_state_dict(model.state_dict())
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        x = torch.randn(8, 4)
        for m, optimizer in ((model, first), (resumed, second))[: 1 if step < 3 else 2]:
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    assert second.curvature.stages.counters()["last_refresh"] == 3
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


def test_steps_at_a_rate_of_0_are_no_training_that_is_not_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = KFACSGD(model, lr=0.0, **OFTEN)

    def step() -> None:
        optimizer.zero_grad()
        F.linear(torch.randn(5, 4), model[0].weight).square().mean().backward()  # type: ignore[arg-type]
        optimizer.step()

    for _ in range(8):
        step()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RuntimeError, match="none of its layers was seen"):
        for _ in range(8):
            step()
