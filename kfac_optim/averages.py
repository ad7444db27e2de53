"""From captured moments to the running averages A and G, of all ranks (eqs. 14-15).

    A = sum a a^T / rows,   G = M sum g g^T       over the statistics steps, the past weighted by factor_decay

Each rank adds up what it sees; the ranks add up their sums when a refresh is due. One process does so at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .blocks import SIDES, Block
from .capture import StepStatistics
from .diagnostics import StageTimes, communicating
from .distributed import Communicator
from .factors import LocalSums, fold_

__all__ = ["Averaging", "terms_of_rank"]


class Averaging:
    """What this rank has seen since the ranks last pooled their sums.

    Args:
        dtype: Storage of the factors.
        summed: Whether the loss is a sum; see :func:`terms_of_rank`.
        sampled: Whether the gradients are those of sampled targets.

    Attributes:
        skipped_batches: How many micro-batches of all ranks were left out because a moment was not finite.
    """

    def __init__(self, dtype: torch.dtype, *, summed: bool, sampled: bool) -> None:
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.summed, self.sampled = summed, sampled
        self.skipped_batches = 0
        self.clear()

    def clear(self) -> None:
        """Forgets what has not been pooled."""
        self._sums = LocalSums()
        self._skips = 0  # non-finite micro-batches

    def fold(
        self,
        blocks: Sequence[Block],
        statistics: StepStatistics,
        flags: Sequence[float],
        decay: float,
        comm: Communicator,
    ) -> None:
        """Adds what was captured of the blocks' layers; ``flags`` are the values of its flags, ``decay`` is xi."""
        taken, finite = statistics.counted(flags)
        self._skips += sum(taken) - sum(finite)
        all_terms = sum(terms for terms, use in zip(statistics.terms, taken, strict=True) if use)
        terms = sum(terms for terms, use in zip(statistics.terms, finite, strict=True) if use)
        per_term, m = terms_of_rank(all_terms, comm, summed=self.summed, sampled=self.sampled)
        m *= terms / max(1, all_terms)
        self._sums.begin(decay, m)
        for index, sums in statistics.sums.items():
            rows = sum(count for count, use in zip(sums.counts, finite, strict=False) if use)
            if rows:
                self._sums.add(blocks[index], (sums.a, sums.g.mul_(per_term)), (rows, m))

    def load(self, counters: Mapping[str, Any]) -> None:
        """Goes on from saved counters."""
        self.clear()
        self.skipped_batches = int(counters.get("skipped_batches", 0))

    def pool(self, blocks: Sequence[Block], comm: Communicator, stages: StageTimes) -> None:
        """Adds up what the ranks saw since the last time, into the running averages of all of them (a collective)."""
        local, self._sums = self._sums, LocalSums()
        if not local.decays:
            return
        with communicating("factor", stages, comm.world_size):
            skips = torch.tensor(float(self._skips), dtype=torch.float64)
            weights, skips = comm.sum([local.weights(blocks), skips], "counts")
            self._skips = 0
            decays, totals = local.pool(blocks, weights)
            jobs, sums = [], []
            for block, decay, weight in zip(blocks, decays, totals, strict=True):
                if weight[0]:
                    device = block.layer.weight.device
                    own = local.sums(block) or [spec.zeros(self.dtype, device) for spec in block.specs]
                    current = block.state["current"]
                    jobs += [(current[side], w, decay) for side, w in zip(SIDES, weight, strict=True)]
                    sums += own
            pooled = comm.sum(sums, "factors", compressed=True)
            for (average, count, decay), total in zip(jobs, pooled, strict=True):
                fold_(average, total, count, decay)
        self.skipped_batches += int(skips)


def terms_of_rank(terms: int, comm: Communicator, *, summed: bool, sampled: bool) -> tuple[float, float]:
    """This rank's part in ``G = M sum g g^T``: the factor of its ``sum g g^T``, and its part of M.

    A local g counts as g / R where the ranks' gradients are averaged. Of a mean over M = R ``terms`` terms that
    gives ``terms^2`` (g carries the 1 / terms of the mean; ``sampled`` gradients are those of the sum). A sum has
    M = 1, in however many backward passes and on however many ranks it was taken.
    """
    ranks = comm.world_size
    share = 1 / ranks if comm.average_gradients else 1.0
    if summed:
        return share**2, 1 / ranks
    return (share * ranks) ** 2 * (1 if sampled else terms**2), terms
