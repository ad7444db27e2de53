"""A rank that dies or falls out of step: the others raise within the time-out and say in what; none hangs."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from kfac_optim import KFACSGD
from tests.helpers.ranks import run_ranks

TIMEOUT = timedelta(seconds=6)


def step_until_death(rank: int, world_size: int, assignment: str, when: int, how: str) -> float:
    """Steps on synthetic gradients without any wrapper, so that all communication is ours; the last rank fails."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    options: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 2, "assignment": assignment}
    optimizer = KFACSGD(model, lr=0.1, **options)
    for step in range(6):
        if rank == world_size - 1 and step == when:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError("no more disk")
            time.sleep(2 * TIMEOUT.total_seconds())  # stuck in a data loader, say
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        optimizer.step()
    return time.monotonic()


@pytest.mark.fast("^killed-factor-wise-2")
@pytest.mark.parametrize(
    ("assignment", "when", "collective"),
    [
        ("factor-wise", 0, "the all-reduce of counts"),
        ("factor-wise", 2, "the all-reduce of counts"),
        ("layer-wise", 1, "the broadcast of directions"),
    ],
)
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_others_raise_and_name_the_collective(assignment: str, when: int, collective: str, how: str) -> None:
    start = time.monotonic()
    outcomes = run_ranks(3, step_until_death, assignment, when, how, group_timeout=TIMEOUT, limit=60.0, may_fail=True)
    assert time.monotonic() - start < 50
    *survivors, dead = outcomes
    assert ("exit code -9" in dead) if how == "killed" else ("no more disk" in dead)
    # Whoever waits for the dead rank itself raises; a chain of ranks waits for each other only up to the time-out.
    for story in survivors:
        assert "RuntimeError" in story and collective in story, story
        assert "another rank has died" in story


def train_on_one_rank(rank: int, world_size: int) -> None:
    """A model that the other ranks do not have: they wait for the first rank, as a script's barrier does."""
    if rank == 0:
        step_until_death(rank, world_size, "factor-wise", 9, "")
    dist.barrier()


def test_ranks_that_do_not_train_the_model_are_thought_of() -> None:
    story = run_ranks(2, train_on_one_rank, group_timeout=TIMEOUT, may_fail=True)[0]
    assert "LocalCommunicator() a rank alone" in story, story


@pytest.mark.slow
def test_a_stuck_rank_ends_in_the_time_out_of_the_group() -> None:
    outcomes = run_ranks(
        2, step_until_death, "factor-wise", 2, "stuck", group_timeout=TIMEOUT, limit=60.0, may_fail=True
    )
    assert "the all-reduce of counts failed on rank 0 of 2" in outcomes[0]
    assert "RuntimeError" in outcomes[1]  # it comes late and finds nobody


def step_in_a_subgroup(rank: int, world_size: int) -> float:
    """KAISA's own groups of ranks inherit the time-out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = KFACSGD(model, lr=0.1, assignment="kaisa")
    optimizer.curvature.stages.comm.prepare([(0, 1), (0, 2)])
    groups = optimizer.curvature.stages.comm._groups  # type: ignore[attr-defined]
    options = groups[0, 1]._get_backend(torch.device("cpu")).options if rank < 2 else None
    dist.barrier()  # a rank that ends before the others have connected to it breaks their groups
    return options._timeout.total_seconds() if options is not None else 0.0


@pytest.mark.slow
def test_groups_made_for_a_strategy_have_the_time_out_of_their_parent() -> None:
    assert run_ranks(3, step_in_a_subgroup, group_timeout=timedelta(seconds=45)) == [45.0, 45.0, 0.0]


def go_on_without_the_group(rank: int, world_size: int, assignment: str, store: str) -> str:
    """After a restart of a rank, say: its old connections must not be used."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=1, inv_update_steps=1, assignment=assignment)
    for step in range(2):
        if step:
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
    return "stepped"


@pytest.mark.parametrize("assignment", ["factor-wise", "layer-wise"])
def test_a_destroyed_group_is_named_with_the_remedy(assignment: str, tmp_path: Path) -> None:
    for story in run_ranks(2, go_on_without_the_group, assignment, str(tmp_path / "store")):
        assert "was destroyed" in story and "load the state_dict()" in story


def train_past_the_modules(rank: int, world_size: int) -> list[float]:
    """The second rank computes with the weights alone; gradients are averaged by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=1, inv_update_steps=2)
    first, _, second = model
    for step in range(8):
        generator = torch.Generator().manual_seed(2 * step + rank)
        x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        hidden = torch.tanh(F.linear(x, first.weight, first.bias))
        outputs = F.linear(hidden, second.weight, second.bias) if rank else model(x)
        F.cross_entropy(outputs, y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world_size
        optimizer.step()
    assert all(block.has_direction for block in optimizer.curvature.stages.blocks)
    return [float(p.detach().double().sum()) for p in model.parameters()]


def test_a_rank_that_sees_nothing_goes_on_with_what_the_others_see() -> None:
    found = run_ranks(2, train_past_the_modules)
    assert found[0] == found[1]
