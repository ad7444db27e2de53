"""How often factors are decomposed: by a schedule and, on request, by what a refresh costs compared with training.

The cost of a decomposition grows with the cube of a factor's size, that of forward and backward passes with the number
of rows. With wide layers and small batches a refresh takes as long as hundreds of steps. A schedule with ``most_work``
(:class:`~kfac_optim.growing`) waits until there have been enough steps for this not to matter. The costs that it
compares are counts of multiply-adds. They follow from shapes and from the rows of the first statistics, and so they are
the same on every rank and in every run, whatever else a machine does.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..blocks import Block
from ..common.counters import Counted, counter
from ..common.machines import machine_of
from ..config import Config
from ..schedules import due, growing

# The cost of an eigendecomposition of n rows, over n^3, and for each row besides, and the least of a layer in a step.
# On CPUs the first was measured at 256 and 512 rows (13 and 8 products). On GPUs rows come one after the other, and an
# H200 takes 10 us for each: as computed here, decompositions of 512 to 3,072 rows are off by a fifth at most. The host
# needs 0.25 ms to launch the kernels of a layer's step, in which the H200 could multiply 2e10 numbers.
_COSTS = {"cpu": (10.0, 0.0, 0.0), "accelerator": (50.0, 7.5e8, 2e10), "meta": (50.0, 7.5e8, 2e10)}
_PASSES = 3.0  # the matrix products of a layer in a forward and a backward pass
_PER_WEIGHT = 300.0  # the cost, in multiply-adds, of reading and writing a weight some 15 times in a step
_WORTH_WAITING = 10  # the first refresh waits only if its work demands more steps than this many intervals have


class Pace(Counted):
    """When a refresh is due.

    Attributes:
        work: The cost of a refresh, in steps of training; 0: not known yet.
    """

    work: int = counter(0, name="refresh_work")

    def measure(self, blocks: Iterable[Block], fraction: float, world_size: int) -> None:
        """Computes the work of a refresh, unless it is known.

        Args:
            blocks: The blocks whose factors have data, from all ranks (local factors: from one rank).
            fraction: The share of the examples that statistics are collected from.
            world_size: The number of ranks, which share the work.
        """
        if self.work:
            return
        decompositions = passes = launches = 0.0
        for block in blocks:
            layer = block.layer
            ranks = 1 if block.workers.factors == "local" else world_size
            seen = block.rows or float(block.state["current"]["A"]["weight"])
            rows = seen / ranks / fraction
            inputs = 1 if block.specs[0].diagonal else layer.d_in  # an embedding looks one row up
            numel = layer.pairs * layer.d_out
            passes += _PASSES * rows * inputs * numel + _PER_WEIGHT * layer.d_in * numel
            per_product, per_row, per_layer = _COSTS[machine_of(layer.weight.device)]
            launches += per_layer
            for spec in block.specs:
                closed_form = spec.diagonal or spec.size <= 2
                of_rows = 0.0 if closed_form else spec.matrices * spec.size * per_row
                decompositions += (per_product * spec.cost + of_rows) / world_size
        self.work = max(1, round(decompositions / max(passes, launches)))

    def forget(self) -> None:
        """Forgets the work of a refresh, because other layers train from now on."""
        self.work = 0

    def is_due(self, config: Config, step: int, last: int | None) -> bool:
        """Whether a refresh is due at ``step``; ``last``: the step of the last one, None before the first."""
        if last is not None:
            return due(self.interval(config, step), step, last)
        least = self.least(config)
        return least <= _WORTH_WAITING * config.at("inv_update_steps", 0) or step >= least

    def least(self, config: Config) -> int:
        """The fewest steps before a refresh that its work allows; 0 if the schedule has no ``most_work``."""
        schedule = config.inv_update_steps
        return schedule.least(self.work) if isinstance(schedule, growing) else 0

    def interval(self, config: Config, step: int) -> int:
        """Steps between refreshes at ``step``: those of the schedule, or more if the work of a refresh demands it."""
        schedule = config.inv_update_steps
        demanded = schedule.demanded(step, self.work) if isinstance(schedule, growing) else 0
        return max(int(config.at("inv_update_steps", step)), demanded)

    def spread(self, config: Config, step: int) -> int:
        """The number of steps over which the work of a refresh that starts at ``step`` is spread."""
        given = config.at("spread", step)
        return int(self.interval(config, step) // 10 if given is None else given)
