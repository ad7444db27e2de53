"""``KFAC`` on Gloo ranks: one decision for all of them, and that of one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import KAISA, KFAC, FactorWise, LayerWise
from tests.helpers.compare import assert_all_near, assert_equal_on_ranks, values
from tests.helpers.fishers import FixedTargets
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64
from tests.helpers.training import data_of, make_model, train

SHAPE = (64, 4)
STRATEGIES = {"kaisa": KAISA(1.0), "sharded": LayerWise("sharded")}
NUMBERS = ("damping", "learning_rate", "momentum", "reduction_ratio")


def trained(rank: int, world_size: int, how: str) -> tuple[list[Tensor], list[float]]:
    """Some steps; weights, and what the optimizer found."""
    model = make_model().double()
    wrapped: Any = DDP(model) if world_size > 1 else model
    optimizer = KFAC(wrapped, fisher=FixedTargets(), assignment=STRATEGIES.get(how, FactorWise()), **FLOAT64)
    parts = 2 if how == "micro-batches" else 1
    train(wrapped, optimizer, range(6), shape=SHAPE, parts=parts, rank=rank, world_size=world_size)
    return values(model), [optimizer.param_groups[0][name] for name in NUMBERS]


@pytest.mark.parametrize("how", ["ddp", "micro-batches", "kaisa", "sharded"])
def test_two_ranks_step_as_one_process(how: str) -> None:
    expected, numbers = trained(0, 1, how)
    outcomes = run_ranks(2, trained, how)
    assert_equal_on_ranks([weights for weights, _ in outcomes])
    assert outcomes[0][1] == outcomes[1][1]
    assert outcomes[0][1] == pytest.approx(numbers, rel=1e-5)
    assert_all_near([weights for weights, _ in outcomes], expected, 1e-7)


def uneven(rank: int, world_size: int) -> tuple[list[Tensor], list[float]]:
    """The second rank runs out of data; both find out that the loss is not the likelihood's at the same time."""
    model = make_model()
    wrapped = DDP(model)
    optimizer = KFAC(wrapped, fisher="categorical")
    with Join([wrapped, optimizer]):
        for step in range(4 - rank):
            inputs, classes = data_of(10 * rank + step, SHAPE, dtype=torch.float32)
            optimizer.zero_grad()
            F.cross_entropy(wrapped(inputs), classes).backward()
            optimizer.step()
    return values(model), [optimizer.param_groups[0][name] for name in NUMBERS]


def test_ranks_that_run_out_of_data_go_on() -> None:
    outcomes = run_ranks(2, uneven)
    assert_equal_on_ranks([weights for weights, _ in outcomes])
    assert outcomes[0][1] == outcomes[1][1]


def wrong_on_one(rank: int, world_size: int) -> None:
    """The loss of one rank alone is another one."""
    model = DDP(make_model())
    optimizer = KFAC(model, fisher="categorical")
    inputs, classes = data_of(rank, SHAPE, dtype=torch.float32)
    weights = torch.tensor([4.0, 1.0, 1.0]) if rank else torch.ones(3)
    (F.cross_entropy(model(inputs), classes, weights, reduction="sum") / len(inputs)).backward()
    optimizer.step()


def test_all_ranks_tell_of_a_wrong_loss_on_one_of_them() -> None:
    for text in run_ranks(2, wrong_on_one, may_fail=True):
        assert "needs the loss to be the mean negative log likelihood" in text


def sharded(rank: int, world_size: int) -> None:
    """FSDP2."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    fully_shard(model)
    KFAC(model, fisher="categorical")


def test_sharded_weights_are_refused() -> None:
    for text in run_ranks(2, sharded, may_fail=True):
        assert "is sharded (FSDP2" in text
