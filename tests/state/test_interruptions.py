"""Ctrl-C in a notebook, or memory that runs out: what is left must be able to go on, and to be saved."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import kfac_optim
from kfac_optim import KFACSGD, CurvatureEngine
from kfac_optim.capture.statistics import StepStatistics
from kfac_optim.common import precision
from kfac_optim.preconditioning import Preconditioner
from kfac_optim.refresh.refresher import Refresher
from kfac_optim.saved_state import engine as engine_state
from tests.helpers.compare import assert_identical, factors_of
from tests.helpers.files import through_a_file
from tests.helpers.settings import CLASSES, SETTINGS
from tests.helpers.training import assert_go_on_alike, backward, loss_of, make_model, resumed_from, train

pytestmark = pytest.mark.usefixtures("float64", "own_switch")


@pytest.fixture
def own_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt right in ``full_precision.__enter__`` leaves the switch held, which other tests must not find."""
    monkeypatch.setattr(precision, "_SWITCH", precision._Switch())


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
    refreshed = optimizer.curvature.stages.refresher.last_refresh
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        owners: dict[str, object] = {"adopt_states": engine_state, "_finish": Refresher}
        patch.setattr(owners.get(where, CurvatureEngine), where, interrupt)
        optimizer.step()
    optimizer.curvature.inv_update_steps = due
    if where != "directions":
        assert optimizer.curvature.stages.refresher.last_refresh == refreshed
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    expected = factors_of(optimizer)
    assert expected and all(torch.equal(factors_of(other)[name], factor) for name, factor in expected.items())


def test_an_interrupted_attention_does_not_reach_into_the_next_step() -> None:
    """Which collects no statistics, so that nothing looks for what was left."""
    model = attention()
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=5, inv_update_steps=5)
    for step in range(3):
        x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(step))
        if step == 0:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(F, "scaled_dot_product_attention", interrupt)
                model(x)
        else:
            model(x).square().mean().backward()
        optimizer.step()
        assert not _get_current_function_mode_stack()


PACKAGE = str(Path(kfac_optim.__file__).parent)


def lines_until(work: Callable[[], Any], last: int | None = None) -> int:
    """Runs ``work``, which is interrupted before the last of so many lines of the package; returns how many it took."""
    count = 0

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == last:
                raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        # A lock is let go of by one instruction, after which Python looks for signals; only a trace comes before it.
        watched = frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name not in ("hold", "release")
        return on_line if watched else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_step_can_be_taken_after_an_interrupt_at_the_end_of_its_backward_pass() -> None:
    """Where gradients are complete, but half of the statistics has been added."""
    model = make_model(0)
    optimizer = KFACSGD(model, lr=0.1, **SETTINGS)
    train(model, optimizer, range(2))
    before = pickle.dumps((model, optimizer))
    lines_until(loss_of(model, 2).backward)  # which fills caches
    optimizer.zero_grad()
    total = lines_until(loss_of(model, 2).backward)
    for lines in range(total - 80, total):
        model, optimizer = pickle.loads(before)
        loss = loss_of(model, 2)
        with pytest.raises(KeyboardInterrupt):
            lines_until(loss.backward, lines)
        optimizer.step()
        train(model, optimizer, range(3, 6))
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_statistics_that_were_being_added_when_interrupted_are_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(0)
    optimizer = KFACSGD(model, lr=0.1, **SETTINGS | {"factor_update_steps": 1})
    train(model, optimizer, range(2))
    before = {name: factor.clone() for name, factor in factors_of(optimizer).items()}
    add = StepStatistics.add
    optimizer.zero_grad()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StepStatistics, "add", lambda *args, **how: interrupt(add(*args, **how)))
        loss_of(model, 2).backward()
    optimizer.step()
    after = factors_of(optimizer)
    assert all(torch.equal(after[name], factor) for name, factor in before.items())


MODES: dict[str, dict[str, Any]] = {
    "learned": {"inv_update_steps": 4, "factor_update_steps": 2, "spread": 2},
    "at once": {"inv_update_steps": 1, "factor_update_steps": 1, "spread": 0, "solver": "inverse"},
    "gradient": {**SETTINGS, "precondition": "gradient", "scaling": "kl_clip", "spread": 2},
}


@pytest.mark.parametrize(
    "steps", [0, 1, 8, 10]
)  # a first one, an early one, one that begins a refresh, one that ends it
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kfac", CLASSES)
@pytest.mark.fast("^KFACSGD-(learned|at once)-(1|10)$")
def test_a_step_that_is_interrupted_anywhere_can_be_followed_by_others_and_resumed(
    kfac: Any, mode: str, steps: int
) -> None:
    """Going on, and going on from a file, are the same, bit for bit; a step that is tried again is no error."""

    def build() -> tuple[nn.Module, Any]:
        model = make_model(0)
        return model, kfac(model, **CLASSES[kfac], **MODES[mode])

    model, optimizer = build()
    train(model, optimizer, range(steps))
    before = pickle.dumps((model, optimizer))
    for _ in range(2):  # the first time it takes more lines, to fill caches
        model, optimizer = pickle.loads(before)
        backward(model, steps)
        total = lines_until(optimizer.step)

    def interrupted_after(lines: int) -> tuple[nn.Module, Any]:
        model, optimizer = pickle.loads(before)
        backward(model, steps)
        gradients = values_of_gradients(model)
        with pytest.raises(KeyboardInterrupt):
            lines_until(optimizer.step, lines)
        assert all(map(torch.equal, values_of_gradients(model), gradients))
        return model, optimizer

    for lines in range(1 + steps, total - 50, total // 8):
        model, optimizer = interrupted_after(lines)
        resumed, other = resumed_from(model, optimizer, build())
        assert_go_on_alike(range(steps + 1, steps + 6), (model, optimizer), (resumed, other))
        model, optimizer = interrupted_after(lines)
        optimizer.step()
        train(model, optimizer, range(steps + 1, steps + 3))
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def values_of_gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_layers_that_were_found_anew_when_interrupted_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics go by the index of a layer, which is another one once a layer has gone."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    optimizer = KFACSGD(model, lr=0.1, **SETTINGS)
    train(model, optimizer, range(3))
    nn.utils.parametrizations.spectral_norm(model[0])
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Preconditioner, "clear", interrupt)
        optimizer.step()
    train(model, optimizer, range(3, 8))
    assert [layer.name for layer in optimizer.curvature.layers] == ["1", "2"]
    assert factors_of(optimizer).keys() == {"1.A", "1.G", "2.A", "2.G"}
