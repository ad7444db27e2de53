"""Listening to attention concerns the thread that runs it, and leaves torch's functions as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from kfac_optim import KFACSGD
from tests.helpers.compare import factors_of

pytestmark = pytest.mark.usefixtures("float64")

WAIT = 60.0  # seconds


class Attend(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def build(model: nn.Module) -> KFACSGD:
    return KFACSGD(model, lr=0.1, factor_update_steps=1, inv_update_steps=1)


def factors_after(model: nn.Module, forward: Callable[[Tensor], Tensor], optimizer: KFACSGD) -> dict[str, Tensor]:
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    forward(x).square().mean().backward()
    optimizer.step()
    return factors_of(optimizer)


def optimizers_of(model: nn.Module, names: tuple[str, ...]) -> list[KFACSGD]:
    """One for the parameters with each of these in their names."""
    return [
        KFACSGD(
            [p for name, p in model.named_parameters() if own in name],
            model=model,
            lr=0.1,
            factor_update_steps=1,
            inv_update_steps=1,
        )
        for own in names
    ]


PARTS = [("in_proj", "out_proj", "head"), ("out_proj", "in_proj", "head"), ("", "")]


@pytest.mark.parametrize("names", PARTS)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_optimizers_listen_to_one_attention(names: tuple[str, ...], compiled: bool) -> None:
    """Each has a part of its weights, or all have all of them."""
    model, twin = Attend(), Attend()
    expected = factors_after(twin, twin, build(twin))
    optimizers = optimizers_of(model, names)
    if compiled:
        torch._dynamo.reset()
    call: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    call(torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    found: set[str] = set()
    for optimizer in optimizers:
        optimizer.step()
        factors = factors_of(optimizer)
        assert all(torch.allclose(factors[name], expected[name]) for name in factors)
        found |= factors.keys()
    assert found == expected.keys()
    assert not _get_current_function_mode_stack()


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any], Callable[[], None]], Any]]:
    """``paused(run, meanwhile)`` runs the first in a thread, and the second while that is in the midst of attention."""
    reached, go_on = threading.Event(), threading.Event()
    original, results, errors = F.scaled_dot_product_attention, [], []

    def wait(*args: Any, **kwargs: Any) -> Tensor:
        if threading.current_thread().name == "attention":
            reached.set()
            assert go_on.wait(WAIT)
        return original(*args, **kwargs)

    def both(run: Callable[[], Any], meanwhile: Callable[[], None]) -> Any:
        def target() -> None:
            try:
                results.append(run())
            except BaseException as error:
                errors.append(error)
                reached.set()

        monkeypatch.setattr(F, "scaled_dot_product_attention", wait)
        thread = threading.Thread(target=target, name="attention")
        thread.start()
        try:
            assert reached.wait(WAIT)
            meanwhile()
        finally:
            go_on.set()
            thread.join(WAIT)
        assert not errors, errors
        return results[0]

    yield both


def test_another_thread_meets_torchs_own_functions(paused: Callable[..., Any]) -> None:
    linear, attention = F.linear, F.multi_head_attention_forward
    model = Attend()
    optimizer = build(model)

    def meanwhile() -> None:
        assert F.linear is linear and F.multi_head_attention_forward is attention
        assert not _get_current_function_mode_stack()

    paused(lambda: factors_after(model, model, optimizer), meanwhile)
    assert not _get_current_function_mode_stack()


def test_what_another_thread_does_meanwhile_does_not_count(paused: Callable[..., Any]) -> None:
    """It applies the watched weights itself, evaluates an attention module and trains another one."""
    model, twin, third, other = Attend(), Attend(), Attend(2), Attend(2)
    optimizer, second, trainer = build(model), build(twin), build(other)
    expected, expected_of_other = factors_after(twin, twin, second), factors_after(third, third, build(third))
    found: list[dict[str, Tensor]] = []

    def meanwhile() -> None:
        assert model.attention.in_proj_weight is not None
        F.linear(torch.randn(7, 4), model.attention.in_proj_weight).sum().backward()
        F.linear(torch.randn(7, 4), model.attention.out_proj.weight).sum().backward()
        model.zero_grad()
        with torch.no_grad():
            other(torch.randn(2, 3, 4))
        found.append(factors_after(other, other, trainer))

    factors = paused(lambda: factors_after(model, model, optimizer), meanwhile)
    assert factors.keys() == expected.keys() and len(factors) == 6
    assert all(torch.equal(factors[name], expected[name]) for name in expected)
    assert all(torch.equal(found[0][name], expected_of_other[name]) for name in expected_of_other)


class Counting(TorchFunctionMode):
    """A mode of the user's, which counts the calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += getattr(func, "__name__", "") == "multi_head_attention_forward"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), Counting])
def test_under_a_function_mode_of_the_users(mode: Callable[[], Any]) -> None:
    model, twin = Attend(), Attend()
    expected = factors_after(twin, twin, build(twin))
    with mode() as entered:
        stack = _get_current_function_mode_stack()
        factors = factors_after(model, model, build(model))
        assert _get_current_function_mode_stack() == stack
    assert all(torch.equal(factors[name], expected[name]) for name in expected)
    assert not isinstance(entered, Counting) or entered.calls == 1


def interrupt_call(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(F, "scaled_dot_product_attention", interrupt)
        model(torch.randn(2, 3, 4))


def test_an_interrupted_call_leaves_other_modes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt skips the hooks; the next call takes off what is left, below other modes as well."""
    model, twin = Attend(), Attend()
    optimizer = build(model)
    interrupt_call(model, monkeypatch)
    with Counting() as mode:
        factors = factors_after(model, model, optimizer)
        assert _get_current_function_mode_stack() == [mode]
    assert not _get_current_function_mode_stack()
    expected = factors_after(twin, twin, build(twin))
    assert all(torch.equal(factors[name], expected[name]) for name in expected)


def test_an_interrupted_call_is_not_taken_for_that_of_another_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = Attend(), Attend()
    expected = factors_after(twin, twin, build(twin))
    first, second = optimizers_of(model, PARTS[-1])
    interrupt_call(model, monkeypatch)
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    assert not _get_current_function_mode_stack()
    for optimizer in (first, second):
        optimizer.step()
        factors = factors_of(optimizer)
        assert all(torch.equal(factors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("names", PARTS[:2])
def test_an_interrupted_call_is_not_joined_by_an_optimizer_that_had_no_part_in_it(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = Attend(), Attend()
    expected = factors_after(twin, twin, build(twin))
    optimizers = optimizers_of(model, names)
    frozen = [p for name, p in model.named_parameters() if "in_proj" in name]
    for p in frozen:
        p.requires_grad_(False)
    interrupt_call(model, monkeypatch)
    for p in frozen:
        p.requires_grad_(True)
    model(torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1))).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        factors = factors_of(optimizer)
        assert all(torch.allclose(factors[name], expected[name]) for name in factors)


def test_somebody_else_wraps_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = F.multi_head_attention_forward, []

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    model, twin = Attend(), Attend()
    expected = factors_after(twin, twin, build(twin))
    monkeypatch.setattr(F, "multi_head_attention_forward", wrapper)
    factors = factors_after(model, model, build(model))
    assert calls == [1]
    assert all(torch.equal(factors[name], expected[name]) for name in expected)
