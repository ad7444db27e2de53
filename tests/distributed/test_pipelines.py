"""Pipeline stages of torch.distributed.pipelining: an optimizer for each, among the ranks that have the same stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from kfac_optim import KFACSGD, OfLargest, TorchCommunicator
from tests.helpers.compare import assert_all_near
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, OFTEN
from tests.helpers.training import data_of, share

SHAPE, STEPS, STAGES, PARTS = (12, 4), 7, 2, 2
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, **OFTEN, **FLOAT64}
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
# By default the schedule divides the gradients when all are there, and not the losses: G is then PARTS^2 times as
# large, which a damping relative to the layer doesn't see. Otherwise the loss is divided as in any accumulation.
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {  # schedule, whether it divides the gradients, options
    "GPipe": ("GPipe", False, {}),
    "1F1B, layer-wise": ("1F1B", False, {"assignment": "layer-wise"}),
    "GPipe, divided by the schedule": ("GPipe", True, {"damping": OfLargest(0.1)}),
}


def make_stages() -> list[nn.Sequential]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.LayerNorm(7))
    return [stage.double() for stage in (first, nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))]


def divided_loss(output: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(output, classes) / PARTS


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
            if number == 0:
                runner.step(inputs)
            else:
                runner.step(target=classes)
            for p in module.parameters():
                dist.all_reduce(p.grad, group=comm.group)
                p.grad.div_(replicas)  # type: ignore[union-attr]
            optimizer.step()
        found[name] = [p.detach().clone() for p in module.parameters()]
    return found


def alone(options: dict[str, Any]) -> list[list[Tensor]]:
    """The parameters of each stage after the same training in one process, with an optimizer for each."""
    stages = make_stages()
    optimizers = [KFACSGD(stage, **{**OPTIONS, **options}) for stage in stages]
    for step in range(STEPS):
        inputs, classes = data_of(step, SHAPE)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(stages[1](stages[0](inputs)), classes).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [[p.detach() for p in stage.parameters()] for stage in stages]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_equal_one_process(world_size: int) -> None:
    outcomes = run_ranks(world_size, pipelined)
    replicas = world_size // STAGES
    for name, (_, _, options) in CASES.items():
        for number, expected in enumerate(alone(options)):
            of_stage = outcomes[number * replicas : (number + 1) * replicas]
            assert_all_near([found[name] for found in of_stage], expected, case=name)
