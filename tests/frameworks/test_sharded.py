"""FSDP2 by Accelerate's plugin and by Lightning's ModelParallelStrategy: two ranks are one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

import lightning as L
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lightning.pytorch.strategies import ModelParallelStrategy

from kfac_optim import KFACSGD
from tests.helpers.frameworks import LIMIT, as_torchrun, assert_ranks_are_one, forget
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import SETTINGS
from tests.helpers.training import data_of, make_model, share, train
from tests.helpers.versions import needs_sharding_on_cpus

SHAPE, STEPS = (12, 4), 7
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, **SETTINGS}
ASSIGNMENTS = ("factor-wise", "layer-wise")


def whole(model: nn.Module) -> list[Tensor]:
    """The whole parameters, all of which are sharded."""
    parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
    assert len(parameters) == len(list(model.parameters()))
    return [p.full_tensor().clone() for p in parameters]


def in_accelerate(rank: int, ranks: int, assignment: str) -> list[Tensor]:
    forget()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20, cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # It takes processes with accelerators alone for sharded ones; nothing else depends on that.
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = make_model().double()
    model, optimizer = accelerator.prepare(model, KFACSGD(model, assignment=assignment, **OPTIONS))
    for step in range(STEPS):
        inputs, classes = share(data_of(step, SHAPE), rank, ranks)
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), classes))
        optimizer.step()
    return whole(model)


class Module(L.LightningModule):
    """Shards its model as Lightning's documentation does."""

    def __init__(self, rank: int, ranks: int, assignment: str) -> None:
        super().__init__()
        self.place, self.assignment, self.model = (rank, ranks), assignment, make_model().double()

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for part in (self.model[0], self.model):
            fully_shard(part, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return KFACSGD(self.model, assignment=self.assignment, **OPTIONS)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, classes = share(batch, *self.place)
        return F.cross_entropy(self.model(inputs), classes)

    def train_dataloader(self) -> Iterable[Any]:
        return torch.utils.data.DataLoader([data_of(step, SHAPE) for step in range(STEPS)], batch_size=None)


def in_lightning(rank: int, ranks: int, assignment: str) -> list[Tensor]:
    module = Module(rank, ranks, assignment)
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, use_distributed_sampler=False, **silent
    )
    trainer.fit(module)
    return whole(module)


def all_cases(rank: int, ranks: int) -> dict[str, list[Tensor]]:
    as_torchrun(rank, ranks, GROUP_RANK="0", TORCHELASTIC_RUN_ID="test", ACCELERATE_USE_CPU="true")
    found = {}
    for assignment in ASSIGNMENTS:
        found[f"Lightning, {assignment}"] = in_lightning(rank, ranks, assignment)
        found[f"Accelerate, {assignment}"] = in_accelerate(rank, ranks, assignment)
    return found


@needs_sharding_on_cpus
@pytest.mark.slow
def test_two_processes_are_one_on_the_whole_batch() -> None:
    model = make_model().double()
    train(model, KFACSGD(model, **OPTIONS), range(STEPS), shape=SHAPE)
    outcomes = run_ranks(2, all_cases, limit=LIMIT)
    for name in outcomes[0]:
        assert_ranks_are_one(outcomes, name, model.parameters())
