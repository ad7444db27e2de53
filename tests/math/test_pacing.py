"""``growing(most_work=...)``: on layers whose decompositions take long beside a step, refreshes wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACSGD, FactorWise, LayerWise, growing
from kfac_optim.refresh import pacing
from tests.helpers.ranks import run_ranks

WAITS = growing(fraction=0.5, minimum=2, most_work=2.0)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 2, bias=False))


def train(model: nn.Sequential, optimizer: KFACSGD, steps: int, examples: int = 6) -> list[int]:
    """Takes steps; returns those at which a refresh began."""
    refreshed = []
    for _ in range(steps):
        step, before = optimizer.curvature.step_count, optimizer.curvature.stages.refresher.refreshes
        x = torch.randn(examples, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        optimizer.step()
        refreshed += [step] * (optimizer.curvature.stages.refresher.refreshes - before)
    return refreshed


def built(interval: Any = WAITS, **options: Any) -> tuple[nn.Sequential, KFACSGD]:
    model = net()
    return model, KFACSGD(model, lr=0.01, inv_update_steps=interval, spread=0, **options)


def set_cost(cost: float, patch: pytest.MonkeyPatch | None = None) -> None:
    """A decomposition costs so many products."""
    (patch or pytest.MonkeyPatch()).setitem(pacing._COSTS, "cpu", (cost, *pacing._COSTS["cpu"][1:]))


def work(examples: int, cost: float) -> int:
    """Of a refresh, in steps, from the shapes."""
    decompositions = cost * (8**3 + 5**3 + 5**3 + 2**3)
    weights = 8 * 5 + 5 * 2
    return max(1, round(decompositions / ((3 * examples + 300) * weights)))


def interval_of(optimizer: KFACSGD, step: int) -> int:
    """Steps between refreshes at a step."""
    return optimizer.curvature.stages.refresher.pace.interval(optimizer.curvature, step)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("cost", [10.0, 3000.0])
def test_the_interval_is_as_long_as_the_work_asks_for(
    monkeypatch: pytest.MonkeyPatch, cost: float, fraction: float
) -> None:
    set_cost(cost, monkeypatch)
    model, optimizer = built(factor_batch_fraction=fraction)
    assert interval_of(optimizer, 0) == 2
    train(model, optimizer, 1)
    least = work(6, cost) // 2
    assert (least > 20) == (cost > 1000)
    for step in (0, 10, 1000):
        assert interval_of(optimizer, step) == max(2, step // 2, least)
    engine, refresher = optimizer.curvature, optimizer.curvature.stages.refresher
    collecting = (step for step in range(1, 1000) if refresher.collects(engine, step, last=0))
    assert next(collecting) == max(2, least) // 2
    told = f"a refresh is as much work as {work(6, cost)} steps: one in {least} steps"
    assert (told in repr(optimizer.curvature)) == (least > 2)
    assert (f"from step {least} on" in repr(optimizer.curvature)) == (cost > 1000)


@pytest.mark.parametrize(("cost", "most_work"), [(10.0, 2.0), (3000.0, 2.0), (3000.0, None)])
def test_intervals_end_where_refreshes_cost_a_tenth(
    monkeypatch: pytest.MonkeyPatch, cost: float, most_work: float | None
) -> None:
    set_cost(cost, monkeypatch)
    model, optimizer = built(growing(0.5, 2, most_work=most_work, maximum=30))
    train(model, optimizer, 1)
    last = max(30, 10 * work(6, cost)) if most_work else 30
    assert (last > 250) == (cost > 1000 and most_work is not None)
    for step in (100_000, 1_000_000):
        assert interval_of(optimizer, step) == last
    assert interval_of(optimizer, 40) == max(20, work(6, cost) // 2 if most_work else 0)


def test_where_intervals_grow_fast_the_first_refresh_is_announced_for_the_step_it_comes_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_cost(3000.0, monkeypatch)
    model, optimizer = built(growing(3.0, 2, most_work=2.0, maximum=3))
    least = work(6, 3000.0) // 2
    assert train(model, optimizer, least) == []
    assert f"from step {least} on" in repr(optimizer.curvature)
    assert train(model, optimizer, 1) == [least]


def test_expensive_refreshes_wait_and_cheap_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(*built(), 10) == train(*built(growing(0.5, 2)), 10) == [0, 2, 4, 7]
    set_cost(3000.0, monkeypatch)
    least = work(6, 3000.0) // 2
    assert train(*built(), 2 * least + 2) == [least, 2 * least]
    assert train(*built(growing(0.5, 2)), 10) == [0, 2, 4, 7]
    assert train(*built(growing(0.5, minimum=10, most_work=2.0)), least + 1) == [0, least], "the first is not too long"


def test_on_a_gpu_rows_of_factors_and_layers_of_a_step_cost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of two rows are decomposed in closed form."""
    monkeypatch.setitem(pacing._COSTS, "cpu", (0.0, 7.0, 1e6))
    model, optimizer = built()
    train(model, optimizer, 1)
    assert optimizer.curvature.stages.refresher.pace.work == 1
    monkeypatch.setitem(pacing._COSTS, "cpu", (0.0, 7e6, 1e6))
    model, optimizer = built()
    train(model, optimizer, 1)
    assert optimizer.curvature.stages.refresher.pace.work == round(7 * (8 + 5 + 5) / 2)


@pytest.mark.parametrize("spread", [None, 0])
def test_what_a_function_of_the_step_returns_is_checked(spread: int | None) -> None:
    model, optimizer = built(lambda step: 2 if step < 3 else 0)
    optimizer.curvature.spread = spread
    with pytest.raises(ValueError, match=r"inv_update_steps"):
        train(model, optimizer, 6)


def test_waiting_goes_on_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cost(3000.0, monkeypatch)
    least = work(6, 3000.0) // 2
    model, optimizer = built()
    train(model, optimizer, 5)
    other, resumed = built()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(other, resumed, least) == train(model, optimizer, least) == [least]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(("first", "dear_first"), [(0, True), (2, False)])
def test_the_work_is_measured_again_when_layers_are_unfrozen(
    first: int, dear_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that trains alone says nothing of what the others take, whether it makes refreshes wait or not."""
    set_cost(3000.0, monkeypatch)
    model, optimizer = built(growing(fraction=0.5, minimum=2, most_work=0.2))
    model[2 - first].requires_grad_(False)
    train(model, optimizer, 3)
    alone, together = interval_of(optimizer, 0), 5 * work(6, 3000.0)
    assert (alone > together) == dear_first and alone != together
    model.requires_grad_(True)
    step = optimizer.curvature.step_count
    train(model, optimizer, 2, examples=6)  # the first of them notices
    assert interval_of(optimizer, 0) == together
    assert optimizer.curvature.stages.progress.last_statistics == step + 1


class Spare(nn.Sequential):
    """A net with a layer that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare, self.uses_spare = net(), nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return self.spare(y) if self.uses_spare else y  # type: ignore[no-any-return]


def test_a_layer_that_was_frozen_before_it_was_used_is_new_when_it_is_unfrozen() -> None:
    model = Spare()
    optimizer = KFACSGD(model, lr=0.01, inv_update_steps=4, factor_update_steps=4, spread=0)
    assert train(model, optimizer, 4) == [0]
    model.spare.requires_grad_(False)
    assert train(model, optimizer, 1) == [4]
    model.requires_grad_(True)
    model.uses_spare = True
    assert train(model, optimizer, 7) == [6, 10]  # the first of these steps notices
    assert all(block.has_direction for block in optimizer.curvature.stages.blocks)


def wait_together(rank: int, world_size: int) -> tuple[int, list[int]]:
    """Ranks with batches of different sizes."""
    set_cost(3000.0)
    model, optimizer = built()
    refreshed = train(model, optimizer, 40, examples=3 + 4 * rank)
    return interval_of(optimizer, 0), refreshed


def test_all_ranks_wait_for_the_same_step() -> None:
    first, second = run_ranks(2, wait_together)
    assert first == second
    assert first[0] > 20 and first[1] == [first[0]]


def measure_together(rank: int, world_size: int) -> list[int]:
    """The work of a refresh for ranks that share it, wherever the factors stand."""
    set_cost(3000.0)
    found = []
    for assignment in (FactorWise(), FactorWise("sharded"), FactorWise("local"), LayerWise("local")):
        model, optimizer = built(assignment=assignment)
        train(model, optimizer, 1, examples=600)
        found.append(optimizer.curvature.stages.refresher.pace.work)
    return found


def test_a_refresh_is_as_much_work_wherever_factors_stand() -> None:
    """Of local factors the averages have the rows of one rank, of others those of all."""
    assert run_ranks(2, measure_together) == [[work(600, 3000.0 / 2)] * 4] * 2
