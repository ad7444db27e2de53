"""DeepSpeed: our optimizer as client optimizer at ZeRO stage 0, the engine before DeepSpeed's step at all stages.

Skipped where DeepSpeed is not installed. Its first use builds a C++ extension, which takes a minute.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KFACSGD, CurvatureEngine
from tests.helpers.compare import assert_all_near, values
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import OFTEN
from tests.helpers.training import data_of, share, train

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.timeout(600),
]

# Of optimizers and engines, whose solvers are others by default.
OPTIONS: dict[str, Any] = {**OFTEN, "scaling": "kl_clip", "solver": "eigen"}
PAPER = {**OPTIONS, "precondition": "gradient"}
STEPS = 8
SHAPE = (8, 2, 5)
TOLERANCE = 1e-4  # float32, reduced in another order


def make() -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(7, 3)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(12, 7), nn.LayerNorm(7), nn.Tanh(), head)


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, rank: int, world_size: int) -> Any:
    import deepspeed

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world_size))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def loop(engine: Any, rank: int, world_size: int, before_step: Any = None) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    for step in range(STEPS):
        inputs, classes = share(data_of(step, SHAPE, dtype=torch.float32), rank, world_size)
        engine.backward(F.cross_entropy(engine(inputs), classes))
        if before_step is not None:
            before_step()
        engine.step()
    found = []
    for p in engine.module.parameters():
        whole = safe_get_full_fp32_param(p)
        found.append((p if whole is None else whole).detach().clone())
    return found


def client(rank: int, world_size: int, stage: int) -> list[Tensor] | str:
    """Our optimizer handed to DeepSpeed."""
    model = make()
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **PAPER)
    engine = initialize(model, optimizer, stage, rank, world_size)
    try:
        return loop(engine, rank, world_size)
    except RuntimeError as error:
        return str(error)


def in_front(rank: int, world_size: int, stage: int, assignment: str) -> list[Tensor]:
    """Our engine before the step of a foreign optimizer that DeepSpeed shards as it likes."""
    model = make()
    curvature = CurvatureEngine(model, **OPTIONS, assignment=assignment)
    engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage, rank, world_size)
    return loop(engine, rank, world_size, lambda: curvature.precondition_(lr=0.1))


def one_process() -> list[Tensor]:
    model = make()
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **PAPER)
    train(model, optimizer, range(STEPS), shape=SHAPE)
    return values(model)


def test_client_optimizer_at_stage_0() -> None:
    assert_all_near(run_ranks(2, client, 0, limit=300), one_process(), TOLERANCE)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_flat_partitions_are_refused_with_the_remedy(stage: int) -> None:
    for story in run_ranks(2, client, stage, limit=300):
        assert isinstance(story, str) and "ZeRO" in story and "precondition_" in story


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_engine_in_front_of_a_foreign_optimizer(stage: int) -> None:
    outcomes = run_ranks(2, in_front, stage, "layer-wise" if stage % 2 else "factor-wise", limit=300)
    assert_all_near(outcomes, one_process(), TOLERANCE)
