"""Pipeline stages of torch.distributed.pipelining: an optimizer for each, among the ranks that have the same stage."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.nn import functional as F

from kfac_optim import KFACSGD, Graft, OfLargest, TorchCommunicator
from tests.helpers.compare import assert_all_near
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, OFTEN
from tests.helpers.training import data_of, share
from tests.helpers.versions import needs_sharding_on_cpus, needs_working_pipelines

SHAPE, STEPS, STAGES, PARTS = (12, 4), 7, 2, 2
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "scaling": Graft(trust=1.0), **OFTEN, **FLOAT64}
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
# By default the schedule divides the gradients when all are there, and not the losses: G is then PARTS^2 times as
# large, which a damping relative to the layer doesn't see. Otherwise the loss is divided as in any accumulation.
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {  # schedule, whether it divides the gradients, options
    "GPipe": ("GPipe", False, {}),
    "1F1B, layer-wise": ("1F1B", False, {"assignment": "layer-wise"}),
    "GPipe, divided by the schedule": ("GPipe", True, {"damping": OfLargest(0.1)}),
}


# Ranks with two stages each, of which every micro-batch has a backward pass: G is twice as large.
INTERLEAVED = {"1F1B": ScheduleInterleaved1F1B, "breadth first": ScheduleLoopedBFS}
OF_RANK = ((0, 2), (1, 3))


def make_stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.LayerNorm(7))
    return [stage.double() for stage in (first, nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))]


def make_four() -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4 + i, 5 + i), nn.Tanh()).double() for i in range(4)]


def divided_loss(output: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(output, classes) / PARTS


def feed(runner: Any, inputs: Tensor, classes: Tensor, *, first: bool) -> None:
    """Runs a schedule; the first stage is given the inputs, others, the last one among them, the classes."""
    if first:
        runner.step(inputs)
    else:
        runner.step(target=classes)


def pipelined(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """The parameters of this rank's stage."""
    replicas = world_size // STAGES
    mesh = init_device_mesh("cpu", (STAGES, replicas), mesh_dim_names=("pipeline", "data"))
    number, replica = mesh.get_coordinate()  # type: ignore[misc]
    found = {}
    for name, (schedule, scales, options) in CASES.items():
        module = make_stages()[number]
        comm = TorchCommunicator(mesh["data"].get_group())
        optimizer = KFACSGD(module, communicator=comm, **{**OPTIONS, **options})
        stage = PipelineStage(module, number, STAGES, torch.device("cpu"), group=mesh["pipeline"].get_group())
        loss = F.cross_entropy if scales else divided_loss
        runner = SCHEDULES[schedule](stage, PARTS, loss_fn=loss, scale_grads=scales)
        for step in range(STEPS):
            inputs, classes = share(data_of(step, SHAPE), replica, replicas)
            optimizer.zero_grad()
            feed(runner, inputs, classes, first=number == 0)
            for p in module.parameters():
                dist.all_reduce(p.grad, group=comm.group)
                p.grad.div_(replicas)  # type: ignore[union-attr]
            optimizer.step()
        found[name] = [p.detach().clone() for p in module.parameters()]
    return found


def interleaved(rank: int, world_size: int) -> dict[str, Any]:
    """The parameters of this rank's two stages; and what a schedule that splits backward passes warns of."""
    own = [dist.new_group([each]) for each in range(world_size)][rank]
    found: dict[str, Any] = {}
    for name, schedule in {**INTERLEAVED, "zero bubble": ScheduleInterleavedZeroBubble}.items():
        four = make_four()
        modules = nn.ModuleList(four[number] for number in OF_RANK[rank])
        optimizer = KFACSGD(modules, communicator=TorchCommunicator(own), **{**OPTIONS, "damping": OfLargest(0.1)})
        stages = [PipelineStage(four[number], number, 4, torch.device("cpu")) for number in OF_RANK[rank]]
        runner = schedule(stages, PARTS, loss_fn=divided_loss, scale_grads=False)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(STEPS):
                inputs, classes = data_of(step, SHAPE)
                optimizer.zero_grad()
                feed(runner, inputs, classes, first=rank == 0)
                optimizer.step()
        found[name] = [p.detach().clone() for p in modules.parameters()], [str(each.message) for each in told]
    return found


def in_shards(rank: int, world_size: int) -> list[Tensor]:
    """The parameters of this rank's stage, which FSDP2 shards over the ranks that have the same one."""
    replicas = world_size // STAGES
    mesh = init_device_mesh("cpu", (STAGES, replicas), mesh_dim_names=("pipeline", "data"))
    number, replica = mesh.get_coordinate()  # type: ignore[misc]
    module = make_stages()[number]
    fully_shard(module, mesh=mesh["data"])
    optimizer = KFACSGD(module, **OPTIONS)
    stage = PipelineStage(module, number, STAGES, torch.device("cpu"), group=mesh["pipeline"].get_group())
    runner = Schedule1F1B(stage, PARTS, loss_fn=divided_loss, scale_grads=False)
    for step in range(STEPS):
        inputs, classes = share(data_of(step, SHAPE), replica, replicas)
        optimizer.zero_grad()
        feed(runner, inputs, classes, first=number == 0)
        optimizer.step()
    return [p.full_tensor().detach() for p in module.parameters()]  # type: ignore[attr-defined]


def alone(stages: Sequence[nn.Module], models: Sequence[nn.Module], options: dict[str, Any]) -> list[list[Tensor]]:
    """The parameters of each model after the same training in one process, with an optimizer for each."""
    optimizers = [KFACSGD(model, **{**OPTIONS, **options}) for model in models]
    for step in range(STEPS):
        inputs, classes = data_of(step, SHAPE)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(nn.Sequential(*stages)(inputs), classes).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [[p.detach() for p in model.parameters()] for model in models]


@needs_working_pipelines
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_equal_one_process(world_size: int) -> None:
    outcomes = run_ranks(world_size, pipelined)
    replicas = world_size // STAGES
    for name, (_, _, options) in CASES.items():
        stages = make_stages()
        for number, expected in enumerate(alone(stages, stages, options)):
            of_stage = outcomes[number * replicas : (number + 1) * replicas]
            assert_all_near([found[name] for found in of_stage], expected, case=name)


@needs_sharding_on_cpus
@pytest.mark.slow
def test_sharded_stages_equal_one_process() -> None:
    """Before the first step the schedule takes derivatives by made inputs, to learn their shapes."""
    outcomes, stages = run_ranks(4, in_shards), make_stages()
    for number, expected in enumerate(alone(stages, stages, {})):
        assert_all_near(outcomes[2 * number : 2 * number + 2], expected, case=f"stage {number}")


@needs_working_pipelines
@pytest.mark.slow
def test_ranks_with_several_stages_equal_one_process() -> None:
    outcomes = run_ranks(2, interleaved)
    four = make_four()
    models = [nn.ModuleList(four[number] for number in numbers) for numbers in OF_RANK]
    for found, expected in zip(outcomes, alone(four, models, {"damping": OfLargest(0.1)}), strict=True):
        for name in INTERLEAVED:
            parameters, told = found[name]
            assert_all_near([parameters], expected, case=name)
            assert not [message for message in told if "never seen" in message]
    assert "splits backward passes" in str([found["zero bubble"][1] for found in outcomes])
