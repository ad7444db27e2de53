"""Threads that use one model at the same time: right, or refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACSGD
from tests.helpers.compare import assert_same_factors
from tests.helpers.settings import OPTIONS

pytestmark = pytest.mark.usefixtures("float64")

WAIT = 60.0  # seconds


class Gate(nn.Module):
    """Waits in its forward or backward pass, in one thread only."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on, self.where = threading.Event(), threading.Event(), ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        return Gate()

    def wait(self, where: str) -> None:
        if self.where == where and threading.current_thread().name == "gated":
            self.reached.set()
            assert self.go_on.wait(WAIT)

    def forward(self, x: Tensor) -> Tensor:
        self.wait("forward")
        y = x.tanh()
        if y.requires_grad:
            y.register_hook(lambda g: self.wait("backward"))
        return y


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Gate(), nn.Linear(4, 2))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 3, generator=generator), torch.randint(2, (6,), generator=generator)
    return F.cross_entropy(model(x), y)


def beside(model: nn.Sequential, where: str, meanwhile: Callable[[], Any]) -> None:
    """Runs a backward pass in a thread, and something else while that is in the midst of it."""
    gate, errors = model[1], []
    gate.where = where

    def target() -> None:
        try:
            loss_of(model, 1).backward()
        except BaseException as error:
            errors.append(error)
            gate.reached.set()

    thread = threading.Thread(target=target, name="gated")
    thread.start()
    try:
        assert gate.reached.wait(WAIT)
        meanwhile()
    finally:
        gate.go_on.set()
        thread.join(WAIT)
    assert not errors, errors


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("what", ["forward", "backward", "step"])
def test_two_threads_at_the_same_time_are_refused(where: str, what: str) -> None:
    """The thread that comes second gets the error, and what the first has computed counts."""
    model = net()
    twin = copy.deepcopy(model)
    optimizer, expected = (KFACSGD(m, **(OPTIONS | {"lr": 0.0})) for m in (model, twin))
    loss = loss_of(model, 2) if what == "backward" else None

    def meanwhile() -> None:
        with pytest.raises(RuntimeError, match="two threads .* one thread after the other"):
            if what == "forward":
                loss_of(model, 2)
            elif loss is not None and where == "backward":
                loss.backward()
            elif loss is not None:
                loss_of(model, 3).backward()
            else:
                optimizer.step()

    beside(model, where, meanwhile)
    if what == "step":
        return
    optimizer.step()
    loss_of(twin, 1).backward()
    expected.step()
    assert_same_factors(optimizer, expected)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("average", ["batch", lambda _, output: len(output)], ids=["of inputs", "of the output"])
def test_evaluation_beside_training_leaves_no_trace(where: str, average: Any) -> None:
    """Nor does it end the call in progress, of which some losses' M is known only when it returns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), Gate())
    twin = copy.deepcopy(model)
    optimizer, expected = (KFACSGD(m, **OPTIONS, loss_average=average) for m in (model, twin))

    def meanwhile() -> None:
        with torch.no_grad():
            model(torch.randn(2, 3))

    beside(model, where, meanwhile)
    optimizer.step()
    loss_of(twin, 1).backward()
    expected.step()
    assert_same_factors(optimizer, expected)


def test_gradients_that_another_thread_clears_within_a_pass() -> None:
    """The pass then ends with what came after that."""
    model = net()
    optimizer = KFACSGD(model, **OPTIONS)
    beside(model, "backward", optimizer.zero_grad)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    expected = net()
    again = KFACSGD(expected, **OPTIONS)
    loss_of(expected, 2).backward()
    again.step()
    assert_same_factors(optimizer, again)


def test_one_thread_after_the_other() -> None:
    """Each with forward and backward; or all forward passes in threads, and one backward pass."""
    model = net()
    twin = copy.deepcopy(model)
    optimizer, expected = (KFACSGD(m, **(OPTIONS | {"lr": 0.0})) for m in (model, twin))
    losses: list[Tensor] = []
    for target in (
        lambda: loss_of(model, 1).backward(),
        lambda: losses.append(loss_of(model, 2)),
        lambda: losses.append(loss_of(model, 3)),
    ):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    torch.stack(losses).sum().backward()
    optimizer.step()
    loss_of(twin, 1).backward()
    (loss_of(twin, 2) + loss_of(twin, 3)).backward()
    expected.step()
    assert_same_factors(optimizer, expected)


@pytest.mark.parametrize("attempt", range(20))
def test_hogwild_is_right_or_refused(attempt: int) -> None:
    """Threads without a lock: whoever was not refused has counted, in full."""
    model = net()
    twin = copy.deepcopy(model)
    optimizer, expected = (KFACSGD(m, **(OPTIONS | {"lr": 0.0})) for m in (model, twin))
    finished: list[int] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait(WAIT)
        try:
            loss_of(model, seed).backward()
            finished.append(seed)
        except RuntimeError as error:
            assert "two threads" in str(error)

    threads = [threading.Thread(target=work, args=(10 * attempt + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert finished
    optimizer.step()
    for seed in finished:
        loss_of(twin, seed).backward()
    expected.step()
    assert_same_factors(optimizer, expected)


def test_a_pass_that_was_left_behind_by_another_thread() -> None:
    """A thread that has ended, or a ``zero_grad()``, leaves nothing in the way."""
    model = net()
    optimizer = KFACSGD(model, **OPTIONS)

    def fail(g: Tensor) -> None:
        raise KeyboardInterrupt

    def target() -> None:
        output = model[0](torch.randn(2, 3))
        output.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model[2](model[1](output)).sum().backward()

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.curvature.step_count == 1


@pytest.mark.parametrize("calls_again", [True, False])
def test_a_pass_that_raised_in_a_thread_that_goes_on(calls_again: bool) -> None:
    """It is over, so that another thread may train the model next; nothing of it counts."""
    model = net()
    twin = copy.deepcopy(model)
    optimizer, expected = (KFACSGD(m, **OPTIONS) for m in (model, twin))

    def fail(g: Tensor) -> None:
        raise KeyboardInterrupt

    output = model[0](torch.randn(2, 3))
    output.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model[2](model[1](output)).sum().backward()
    model.zero_grad()
    if calls_again:
        loss_of(model, 2)
    errors: list[RuntimeError] = []

    def target() -> None:
        try:
            loss_of(model, 1).backward()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert not errors, errors
    optimizer.step()
    loss_of(twin, 1).backward()
    expected.step()
    assert_same_factors(optimizer, expected)


def test_replicas_of_data_parallel_are_refused_with_the_remedy() -> None:
    """On several GPUs it calls copies of the modules, which have the same tables of hooks."""
    model = nn.Linear(3, 2)
    optimizer = KFACSGD(model, lr=0.1)
    replica = model._replicate_for_data_parallel()
    replica.weight, replica.bias = model.weight * 1, model.bias * 1
    with pytest.raises(RuntimeError, match="DistributedDataParallel instead of DataParallel"):
        replica(torch.randn(4, 3))
    with torch.no_grad():
        replica(torch.randn(4, 3))
    assert optimizer.curvature.step_count == 0
