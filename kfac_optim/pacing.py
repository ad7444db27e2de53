"""How often factors are decomposed: a schedule, and where asked for, what that costs beside training itself.

Decompositions grow with the cube of a factor's size, passes with its rows. On wide layers and small batches a refresh
takes as long as hundreds of steps. A schedule with ``most_work`` (:class:`~kfac_optim.growing`) waits for so many
steps that this does not matter. What is compared is a count of multiply-adds, of shapes and rows alone, once the first
statistics are known: it is the same on every rank and in every run, whatever else a machine does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from .blocks import Block
from .config import Config
from .counters import Counted, Counter
from .schedules import due, growing

__all__ = ["Pace"]

# What an eigendecomposition of n rows takes, in multiply-adds of products of n^3. On CPUs measured at 256 and 512 rows
# (13 and 8); on GPUs, whose eigendecompositions are mostly sequential, on an H200 in steps under bf16 autocast of a
# ResNet-50 (78) and of a GPT-small (134).
_DECOMPOSITION = {"cpu": 10.0, "cuda": 100.0}
_PASSES = 3.0  # products of a layer in a forward and a backward pass
_PER_WEIGHT = 300.0  # what reading and writing a weight some 15 times in a step takes, in multiply-adds
_WORTH_WAITING = 10  # the first refresh is at once, unless this many intervals of the schedule are too short for it


class Pace(Counted):
    """When a refresh is due.

    Attributes:
        work: What a refresh takes, in steps of training; 0: not known yet.
    """

    COUNTERS: ClassVar[Mapping[str, Counter]] = {"refresh_work": Counter("work", 0)}
    work: int

    def measure(self, blocks: Iterable[Block], fraction: float, world_size: int) -> None:
        """Notes the work of a refresh, the first time that it is called and after :meth:`forget`.

        Args:
            blocks: Those whose factors have data, of all ranks (local factors: of one rank).
            fraction: The share of the examples that is in the data.
            world_size: The number of ranks, which share the work.
        """
        if self.work:
            return
        decompositions = passes = 0.0
        for block in blocks:
            layer = block.layer
            ranks = 1 if block.workers.factors == "local" else world_size
            seen = block.rows or float(block.state["current"]["A"]["weight"])
            rows = seen / ranks / fraction
            inputs = 1 if block.specs[0].diagonal else layer.d_in  # of embeddings one row is looked up
            numel = layer.pairs * layer.d_out
            passes += _PASSES * rows * inputs * numel + _PER_WEIGHT * layer.d_in * numel
            cost = _DECOMPOSITION.get(layer.weight.device.type, _DECOMPOSITION["cuda"])
            decompositions += cost * sum(spec.cost for spec in block.specs) / world_size
        self.work = max(1, round(decompositions / passes)) if passes else 0

    def forget(self) -> None:
        """Other layers train from now on: what a refresh takes is to be measured again."""
        self.work = 0

    def is_due(self, config: Config, step: int, last: int | None) -> bool:
        """Whether a refresh is due at ``step``; ``last``: the step of the last one, None before the first."""
        if last is not None:
            return due(self.interval(config, step), step, last)
        least = self._least(config)
        return least <= _WORTH_WAITING * config.at("inv_update_steps", 0) or step >= least

    def interval(self, config: Config, step: int) -> int:
        """Steps between refreshes at ``step``: those of the schedule, or as many as their work asks for."""
        return max(int(config.at("inv_update_steps", step)), self._least(config))

    def _least(self, config: Config) -> int:
        """Steps between refreshes at least; 0 where the schedule does not ask what they take."""
        schedule = config.inv_update_steps
        most_work = schedule.most_work if isinstance(schedule, growing) else None
        return 0 if most_work is None else int(self.work / most_work)
