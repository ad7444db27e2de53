"""Hooks are on the model only in steps that need them: when they are off, and that nothing is lost by it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from kfac_optim import KFACSGD, Categorical
from kfac_optim.capture import hooks
from tests.helpers.compare import assert_identical, assert_same_factors, assert_same_weights
from tests.helpers.settings import FLOAT64
from tests.helpers.training import make_model, train

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_steps": 4, "inv_update_steps": 8, **FLOAT64}


class Attention(nn.Module):
    """Rows of four numbers that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x)[0])


def count(model: nn.Module) -> int:
    """Hooks on the model and everything in it."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture
def graphs() -> Iterator[None]:
    """No graph of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_between_statistics_no_hook_is_on_the_model() -> None:
    model = make_model().double()
    optimizer = KFACSGD(model, **OPTIONS)
    all_of_them, seen = count(model), []
    train(model, optimizer, range(9), lambda: seen.append(count(model)))
    assert all_of_them > 0
    # Before steps 4 and 8, which collect statistics, they are put on.
    assert seen == [0, 0, 0, all_of_them, 0, 0, 0, all_of_them, 0]


@pytest.mark.parametrize("make", [make_model, Attention], ids=["mlp", "attention"])
@pytest.mark.parametrize("options", [{}, {"fisher": Categorical()}], ids=["empirical", "sampled"])
@pytest.mark.parametrize("parts", [1, 2])
def test_training_is_as_with_hooks(
    make: Callable[[], nn.Module], options: dict[str, Any], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = make().double(), make().double()
    optimizer, other = KFACSGD(model, **OPTIONS, **options), KFACSGD(kept, **OPTIONS, **options)
    train(model, optimizer, range(14), parts=parts)
    monkeypatch.setattr(hooks.Capture, "_rest", lambda self: None)
    on = [count(kept)]
    train(kept, other, range(14), lambda: on.append(count(kept)), parts=parts)
    assert count(model) < min(on) == max(on)
    assert_same_factors(optimizer, other)
    assert_identical(model, kept)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("before", [2, 3, 4, 5])
@pytest.mark.parametrize("resumed", [False, True], ids=["", "resumed"])
def test_a_model_that_is_compiled_later_is_seen(before: int, resumed: bool) -> None:
    """A graph is traced with the hooks in it, although it is first called in a step without them."""
    model, eager = make_model().double(), make_model().double()
    optimizer, other = KFACSGD(model, **OPTIONS), KFACSGD(eager, **OPTIONS)
    train(model, optimizer, range(before))
    train(eager, other, range(before))
    if resumed:
        model, state = copy.deepcopy(model), optimizer.state_dict()
        optimizer = KFACSGD(model, **OPTIONS)
        optimizer.load_state_dict(copy.deepcopy(state))
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(graph, optimizer, range(before, 14))
    train(eager, other, range(before, 14))
    assert count(model) > 0, "the graph's guards look at the hooks"
    assert_same_factors(optimizer, other, 1e-12)
    assert_same_weights(model, eager, 1e-12)


@pytest.mark.usefixtures("graphs")
def test_a_compiled_model_keeps_its_hooks() -> None:
    """Taken off, they would have to be traced again."""
    model = make_model().double()
    optimizer = KFACSGD(model, **OPTIONS)
    graph, on = torch.compile(model, backend="aot_eager", fullgraph=True), [count(model)]
    train(graph, optimizer, range(10), lambda: on.append(count(model)))
    assert 0 < min(on) == max(on)


def test_close_and_a_second_optimizer_while_hooks_are_off() -> None:
    model = make_model().double()
    other = copy.deepcopy(model)
    optimizer = KFACSGD(model, **OPTIONS)
    train(model, optimizer, range(2))
    optimizer.curvature.close()
    train(model, optimizer, range(2, 6))  # by the base rule
    hooks._wake()  # something is compiled
    assert count(model) == 0
    before = copy.deepcopy(model)
    fresh, expected = KFACSGD(model, **OPTIONS), KFACSGD(before, **OPTIONS)
    train(model, fresh, range(6))
    train(before, expected, range(6))
    assert_same_factors(fresh, expected)
    assert_identical(model, before)
    assert count(other) == 0


def test_an_optimizer_that_is_gone_is_not_woken() -> None:
    model = make_model().double()
    optimizer = KFACSGD(model, **OPTIONS)
    train(model, optimizer, range(2))
    del optimizer
    gc.collect()
    hooks._wake()
    assert count(model) == 0


def test_elsewhere_hooks_stay() -> None:
    """On a GPU they refuse to be recorded in CUDA graphs."""
    with torch.device("meta"):
        model = make_model().double()
    capture = KFACSGD(model, **OPTIONS).curvature._capture
    capture._seen, before = True, count(model)
    capture.plan(step=1, enabled=False, fraction=1.0, grad_scaler=None)
    assert count(model) == before > 0
