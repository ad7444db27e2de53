"""Ctrl-C in a notebook, or memory that runs out: what is left must be able to go on, and to be saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from kfac_optim import KFACSGD, CurvatureEngine
from kfac_optim.refresh import Refresher
from tests.helpers.compare import assert_identical, factors_of
from tests.helpers.files import through_a_file
from tests.helpers.settings import CLASSES, SETTINGS
from tests.helpers.training import loss_of, make_model, train

pytestmark = pytest.mark.usefixtures("float64")


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))


@pytest.mark.parametrize("fisher", ["empirical", "gaussian"])
@pytest.mark.parametrize("make", [linear, attention])
def test_a_forward_that_is_interrupted_leaves_no_trace(
    make: Callable[[], nn.Module], fisher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward hooks do not run after a KeyboardInterrupt, not even those that always do."""

    def run(interrupted: bool) -> tuple[nn.Module, dict[str, Tensor]]:
        model = make()
        optimizer = KFACSGD(model, lr=0.1, fisher=fisher, factor_update_steps=1, inv_update_steps=1)
        for step in range(4):
            x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(step))
            if interrupted and step % 2:
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(torch, "tanh", interrupt)
                    patch.setattr(F, "scaled_dot_product_attention", interrupt)
                    patch.setattr(nn.Tanh, "forward", interrupt)
                    model(x)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model, factors_of(optimizer)

    linear_before = F.linear
    (model, factors), (twin, expected) = run(True), run(False)
    assert F.linear is linear_before
    assert not _get_current_function_mode_stack()
    assert_identical(model, twin)
    assert factors.keys() == expected.keys()
    assert all(torch.equal(factors[name], expected[name]) for name in factors)


@pytest.mark.parametrize("compiles", [False, True])
def test_the_call_after_an_interrupted_one_counts_its_own_terms(compiles: bool) -> None:
    """In a loop that clears gradients after its step, so that nothing stands between the two calls."""

    class Model(nn.Module):
        interrupted = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if self.interrupted:
                raise KeyboardInterrupt
            return y.tanh()

    def run(interrupted: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Model()
        optimizer = KFACSGD(model, lr=0.1, factor_update_steps=1, inv_update_steps=1)
        call = torch.compile(model, backend="eager") if compiles else model
        for step in range(4):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            if interrupted and step % 2:
                model.interrupted = True
                with pytest.raises(KeyboardInterrupt):
                    call(x[:2])
                model.interrupted = False
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return factors_of(optimizer)

    found, expected = run(True), run(False)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("where", ["adopt_states", "update", "directions", "_finish"])
@pytest.mark.parametrize("kfac", CLASSES)
def test_the_state_is_whole_after_a_step_that_was_interrupted(
    kfac: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = make_model(0), make_model(0)
    optimizer, other = (kfac(m, **CLASSES[kfac], **SETTINGS, spread=0) for m in (model, twin))
    train(model, optimizer, range(4))  # in every fourth step directions are asked for, whatever trust is
    optimizer.zero_grad()
    loss_of(model, 4).backward()
    due = optimizer.curvature.inv_update_steps
    optimizer.curvature.inv_update_steps = 1
    refreshed = optimizer.curvature.last_refresh
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Refresher if where == "_finish" else CurvatureEngine, where, interrupt)
        optimizer.step()
    optimizer.curvature.inv_update_steps = due
    if where != "directions":
        assert optimizer.curvature.last_refresh == refreshed
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    expected = factors_of(optimizer)
    assert expected and all(torch.equal(factors_of(other)[name], factor) for name, factor in expected.items())
