"""torchtitan's own Llama, container of optimizers, learning rates and chunked loss; FSDP2 on two ranks is one process.

Where torchtitan is installed: it takes a torch of its own time, and Triton.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

pytest.importorskip("torchtitan")
pytest.importorskip("triton")

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from kfac_optim import Graft, KFACAdamW, LayerWise
from tests.helpers.compare import assert_near
from tests.helpers.ranks import run_ranks

WORDS, LENGTH = 2048, 32
FLOAT32_TOL = 1e-5  # the same sums in another order, ten steps of them
OPTIONS: dict[str, Any] = {
    "loss_average": "batch+sequence",
    "scaling": Graft(trust=1.0),
    "factor_update_steps": 2,
    "inv_update_steps": 4,
    "spread": 0,
}


class Container(OptimizersContainer):
    """As in docs/frameworks."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return KFACAdamW if name == "KFACAdamW" else OptimizersContainer._resolve_optimizer_factory(name)


class Run:
    """A small Llama, sharded if there are ranks, with optimizer and schedule."""

    def __init__(self, rank: int, world_size: int, *, chunks: int = 0, **options: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = copy.deepcopy(model_registry("debugmodel").model)
        config.layers = config.layers[:2]
        for layer in config.layers:  # its other kinds of attention have no backward pass on CPUs
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        self.rank, self.world_size = rank, world_size
        self.model: nn.Module = config.build()
        self.model.init_states(buffer_device=torch.device("cpu"))
        for part in (*self.model.layers.values(), self.model) if world_size > 1 else ():
            fully_shard(part)
        self.loss = None
        if chunks:
            loss = ChunkedLossWrapper.Config(
                loss_fn=CrossEntropyLoss.Config(global_vocab_size=WORDS), num_chunks=chunks
            )
            self.loss = loss.build()
            self.loss.set_lm_head(self.model.lm_head)
            self.model._skip_lm_head = True
        given = {"lr": 8e-4, "betas": (0.9, 0.95)}
        groups = {"norm": {**given, "weight_decay": 0.0}, ".*": {**given, "weight_decay": 0.1}}
        settings = Container.Config(
            implementation="foreach",
            param_groups=[
                ParamGroupConfig(pattern=pattern, optimizer_name="KFACAdamW", optimizer_kwargs=keywords)
                for pattern, keywords in groups.items()
            ],
            optimizer_factory_kwargs_by_name={"KFACAdamW": {**OPTIONS, **options}},
        )
        self.optimizers = Container(settings, model_parts=[self.model])
        self.rates = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=self.optimizers, training_steps=20)

    @property
    def engine(self) -> Any:
        """That of the only optimizer."""
        (optimizer,) = self.optimizers
        return optimizer.curvature

    def train(self, steps: range) -> None:
        """Takes steps on this rank's share."""
        for step in steps:
            words = torch.randint(WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
            words = words.chunk(self.world_size)[self.rank]
            inputs, targets = words[:, :-1], words[:, 1:]
            self.optimizers.zero_grad()
            output = self.model(inputs)
            if self.loss is None:
                F.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
            else:
                self.loss(output, targets, torch.tensor(float(targets.numel())))[0].backward()
            self.optimizers.step()
            self.rates.step()

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "rates": self.rates.state_dict(),
        }

    def weights(self) -> list[Tensor]:
        """The whole parameters."""
        return [p.full_tensor() if self.world_size > 1 else p.detach() for p in self.model.parameters()]


def in_torchtitan(rank: int, world_size: int, folder: str) -> list[list[Tensor]]:
    """Trained without a stop, and resumed from a folder."""
    first = Run(rank, world_size, assignment=LayerWise("sharded"))
    first.train(range(6))
    first.engine.synchronize()
    dcp.save(first.state(), checkpoint_id=folder)
    first.train(range(6, 10))
    second = Run(rank, world_size, assignment=LayerWise("sharded"))
    state = second.state()
    dcp.load(state, checkpoint_id=folder)
    second.model.load_state_dict(state["model"])
    second.optimizers.load_state_dict(state["optimizers"])
    second.rates.load_state_dict(state["rates"])
    second.train(range(6, 10))
    return [first.weights(), second.weights()]


@pytest.mark.slow
def test_two_processes_are_one_and_resume(tmp_path: Path) -> None:
    alone = Run(0, 1)
    alone.train(range(10))
    assert len(alone.engine.layers) == 16
    for first, second in run_ranks(2, in_torchtitan, str(tmp_path), limit=240):
        for found, resumed, expected in zip(first, second, alone.weights(), strict=True):
            assert torch.equal(found, resumed)
            assert_near(found, expected, "weight", FLOAT32_TOL)


@pytest.mark.slow
def test_the_chunked_loss_trains_as_the_whole_one() -> None:
    """It takes the head out of the model and calls it in chunks, each with a backward pass of its own."""
    whole, chunked = Run(0, 1), Run(0, 1, chunks=4)
    for run in (whole, chunked):
        run.train(range(6))
    for found, expected in zip(chunked.weights(), whole.weights(), strict=True):
        assert_near(found, expected, "weight", FLOAT32_TOL)
