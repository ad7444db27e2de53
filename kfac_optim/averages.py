"""From captured moments to the running averages A and G of all ranks (eqs. 14-15).

Each running average is a sum S of moments and a sum w of their counts, both of which forget at the rate xi
(``factor_decay``, the weight of the past; the paper prints xi on the new term)::

    S <- xi S + sum of the new moments,    w <- xi w + their count,    factor = S / w

For A the moments are ``sum a a^T`` and their count is the number of rows. For G they are ``M^2 sum g g^T`` and their
count is M, the number of averaged terms of the loss, so that of one batch ``G = M sum g g^T``. There is no identity to
start from, and so no bias to correct; batches of different sizes are weighted exactly.

Each rank adds up what it sees (:class:`LocalSums`), and the ranks add up their sums when a refresh is due. A single
process does so in every step. So do ranks of which one alone keeps a factor: the others have nothing to add up in, and
hand it what they have seen at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .blocks import SIDES, Block
from .capture import StepMoments
from .diagnostics import StageTimes, communicating
from .distributed import Communicator
from .factors import read, write_

__all__ = ["Averaging", "LocalSums", "fold_", "terms_of_rank"]


class Averaging:
    """Collects what this rank sees, and pools it with the other ranks' into the running averages.

    Args:
        dtype: Storage of the factors; sums are kept in float32 at least.
        stages: Where the time is noted.
        summed: Whether the loss is a sum; see :func:`terms_of_rank`.
        sampled: Whether the gradients are those of sampled targets; see :func:`terms_of_rank`.

    Attributes:
        skipped_batches: How many micro-batches of all ranks were left out because a moment was not finite.
        seen: Whether any rank had something to pool the last time that they pooled.
    """

    def __init__(self, dtype: torch.dtype, stages: StageTimes, *, summed: bool, sampled: bool) -> None:
        self.dtype, self.stages = torch.promote_types(dtype, torch.float32), stages
        self.summed, self.sampled = summed, sampled
        self.skipped_batches = 0
        self.seen = False
        self.clear()

    def clear(self) -> None:
        """Forgets what has not been pooled."""
        self._sums = LocalSums()
        self._skips = 0  # micro-batches that were not finite

    def fold(
        self,
        blocks: Sequence[Block],
        statistics: StepMoments,
        decay: float,
        comm: Communicator,
    ) -> None:
        """Adds what this rank has captured in one step.

        Args:
            blocks: All blocks, in the order of the statistics' layer indices.
            statistics: The packed raw sums of the step's micro-batches.
            decay: xi at this step.
            comm: The ranks.
        """

        def weights(layer: int | None) -> tuple[float, float]:
            # The gradients carry the 1 / M of all micro-batches; only the finite ones count in the weight.
            all_terms, terms = statistics.loss_terms(layer)
            scale, m = terms_of_rank(all_terms, comm, summed=self.summed, sampled=self.sampled)
            return scale, m * terms / max(1, all_terms)

        self._skips += sum(statistics.taken) - sum(statistics.finite)
        self._sums.begin(decay, weights(None)[1])
        scaled: dict[float, list[Tensor]] = {}
        counted = [index for index in statistics.sums if statistics.rows(index)]
        for index in counted:
            scaled.setdefault(weights(index)[0], []).append(statistics.sums[index].g)
        for scale, of_g in scaled.items():
            if scale != 1:
                torch._foreach_mul_(of_g, scale)
        for index in counted:
            sums = statistics.sums[index]
            self._sums.add(blocks[index], (sums.a, sums.g), (statistics.rows(index), weights(index)[1]))

    def load(self, counters: Mapping[str, Any]) -> None:
        """Restores saved counters."""
        self.clear()
        self.skipped_batches = int(counters.get("skipped_batches", 0))

    def pool(self, blocks: Sequence[Block], comm: Communicator) -> None:
        """Adds what all ranks have seen since the last pooling to the running averages (a collective).

        Args:
            blocks: All blocks; their averages are updated in place.
            comm: The ranks.
        """
        local, self._sums = self._sums, LocalSums()
        if not local.decays:
            return
        with communicating("factor", self.stages, comm.world_size):
            skips = torch.tensor(float(self._skips), dtype=torch.float64)
            weights, skips = comm.sum([local.weights(blocks) * _counted(blocks, comm.rank), skips], "counts")
            self._skips = 0
            decays, totals = local.merge_runs(blocks, weights)
            self.seen = any(rows for rows, _ in totals)
            updates: list[_Update] = []
            for block, decay, counts in zip(blocks, decays, totals, strict=True):
                if counts[0]:  # some rank has used the layer; one that has not adds zeros
                    device, used, workers = block.layer.weight.device, local.sums(block), block.workers
                    for i, (side, spec) in enumerate(zip(SIDES, block.specs, strict=True)):
                        own = None if used is None else used[i]
                        if own is None and (workers.factors != "local" or workers.keeps(i, comm.rank)):
                            own = spec.zeros(self.dtype, device)
                        average = block.state["current"][side]
                        updates.append(_Update(average, own, counts[i], decay, workers.owner(i), workers.factors))
            del local
            summed = _summed(updates, comm)
            at_once = max(1, len(updates)) if comm.world_size == 1 else 1  # from other ranks as they arrive
            while batch := list(islice(summed, at_once)):
                fold_([(u.average, u.count, u.decay) for u, _ in batch], [total for _, total in batch])
        self.skipped_batches += int(skips)


@dataclass(frozen=True, eq=False)
class _Update:
    """What a running average is to take up.

    Attributes:
        average: The running average.
        own: This rank's part of the sum of moments; None where nobody wants it.
        count: The count of all of them.
        decay: The weight of the past.
        owner: The rank that gets the sum; None: every rank.
        place: "local": that rank's own part is all.
    """

    average: dict[str, Tensor]
    own: Tensor | None
    count: float
    decay: float
    owner: int | None
    place: str


def _summed(updates: Sequence[_Update], comm: Communicator) -> Iterator[tuple[_Update, Tensor | None]]:
    """Adds up what the ranks have (a collective); None where another rank gets it."""
    everywhere: list[tuple[_Update, Tensor]] = []
    shared: list[tuple[_Update, Tensor, int]] = []
    for update in updates:
        if update.place == "local":
            yield update, update.own if update.owner == comm.rank else None
        elif update.own is not None:
            if update.owner is None:
                everywhere.append((update, update.own))
            else:
                shared.append((update, update.own, update.owner))
    pooled = comm.sum([own for _, own in everywhere], "factors", compressed=True)
    yield from zip([update for update, _ in everywhere], pooled, strict=True)
    shared.sort(key=lambda item: item[2])  # neighbours with one owner share a bucket
    owners = [owner for *_, owner in shared]
    mine = comm.reduce([own for _, own, _ in shared], owners, "factors", compressed=True)
    yield from zip([update for update, *_ in shared], mine, strict=True)


def _counted(blocks: Sequence[Block], rank: int) -> Tensor:
    """Whether what this rank has seen goes into A and G of each block, ``[blocks, 2]``: 1 or 0."""
    return torch.tensor(
        [[float(b.workers.factors != "local" or b.workers.keeps(i, rank)) for i in range(2)] for b in blocks],
        dtype=torch.float64,
    ).view(-1, 2)


def terms_of_rank(terms: int, comm: Communicator, *, summed: bool, sampled: bool) -> tuple[float, float]:
    """This rank's part in the moment ``M^2 sum g g^T`` and in its count M.

    If the loss is a mean, M is R ``terms`` on R ranks with equal batches. Where the ranks' gradients are averaged, a
    local g counts as g / R, so that its part in the moment is ``terms^2 g g^T``; where they are added up, it is
    ``(R terms)^2 g g^T``. A loss that is a sum has M = 1, in however many backward passes and on however many ranks it
    was taken.

    Args:
        terms: The number of averaged terms of the loss on this rank.
        comm: The ranks.
        summed: Whether the loss is a sum.
        sampled: Whether g belongs to sampled targets; such a g is that of the sum of the terms, not of their
            mean.

    Returns:
        What to multiply the rank's own ``sum g g^T`` by, and the rank's part of M.
    """
    ranks = comm.world_size
    rank_weight = 1 / ranks if comm.average_gradients else 1.0
    if summed:
        return rank_weight**2, 1 / ranks
    return 1.0 if sampled else (rank_weight * ranks * terms) ** 2, terms


def fold_(updates: Sequence[tuple[dict[str, Tensor], float, float]], moments: Sequence[Tensor | None]) -> None:
    """Updates running averages in place: ``S <- xi S + moment``, ``w <- xi w + count``.

    What is stored is S / w and w (:meth:`~kfac_optim.factors.FactorSpec.empty`), which keeps half precision from
    overflowing.

    Args:
        updates: Each running average; how many rows or loss terms are in the new sum, where 0 leaves the average as it
            is; and xi, the weight of the past.
        moments: The packed sums of the new moments, ``[p, packed]``; None where another rank keeps the factor.
    """
    alike: dict[tuple[float, float], list[tuple[dict[str, Tensor], Tensor]]] = {}
    for (average, count, decay), moment in zip(updates, moments, strict=True):
        past = decay * float(average["weight"])
        if count and moment is not None:
            alike.setdefault((count, past), []).append((average, moment))
        elif count:
            average["weight"] = torch.tensor(past + count, dtype=torch.float64)
    for (count, past), pairs in alike.items():
        averages, new = zip(*pairs, strict=True)
        weight, values = past + count, [read(average) for average in averages]
        torch._foreach_mul_(values, past / weight)
        torch._foreach_add_(values, new, alpha=1 / weight)
        for average, value in zip(averages, values, strict=True):
            if value is not average["value"]:  # a copy in float32
                write_(average, value)
            average["weight"] = torch.tensor(weight, dtype=torch.float64)


class LocalSums:
    """What this rank has seen of every layer since the ranks last pooled their sums.

    Running sums are linear: k updates ``S <- xi S + sum over ranks m_r`` are one update ``S <- xi^k S + sum over ranks
    s_r`` with local sums ``s_r <- xi s_r + m_r``. So ranks need to communicate only when a refresh is due.

    A rank alone cannot know whether any rank used a layer in an update; if none did, the layer does not decay. Local
    sums are therefore kept in *runs* of consecutive updates with data, within which every decay is certain, and the
    runs are put together once the ranks have added up their :meth:`weights`. A layer that is always used has one run.

    The weight of G is M, which belongs to the loss: it counts the terms of all ranks, also of those that did not use
    the layer (their gradient of it is zero).

    Attributes:
        decays: xi of each update so far.
    """

    def __init__(self) -> None:
        self.decays: list[float] = []
        self._terms: list[float] = []  # by update, this rank's part of M
        self._weights: list[dict[Hashable, tuple[float, float]]] = []  # by update and layer
        self._runs: dict[Hashable, list[tuple[int, list[Tensor]]]] = {}  # last update of a run, and its sums of A and G

    def begin(self, decay: float, terms: float = 0.0) -> None:
        """Begins an update, on all ranks, with or without data; ``terms`` is this rank's part of M."""
        self.decays.append(decay)
        self._terms.append(terms)
        self._weights.append({})

    def add(self, layer: Hashable, sums: Sequence[Tensor], weights: tuple[float, float]) -> None:
        """Adds this rank's packed sums of A and G in the current update, and their weights.

        Takes ownership of the tensors and later changes them in place.
        """
        update, runs = len(self.decays) - 1, self._runs.setdefault(layer, [])
        self._weights[update][layer] = weights
        if runs and runs[-1][0] == update - 1:  # extends the run only if the layer was also used in the previous update
            for total, new in zip(runs[-1][1], sums, strict=True):
                total.mul_(self.decays[update]).add_(new)
            runs[-1] = (update, runs[-1][1])
        else:
            runs.append((update, list(sums)))

    def weights(self, layers: Sequence[Hashable]) -> Tensor:
        """The weights of A and G, ``[updates, layers, 2]``, float64, which the ranks then add up."""
        updates = zip(self._weights, self._terms, strict=True)
        rows = [[update.get(layer, (0.0, terms)) for layer in layers] for update, terms in updates]
        return torch.tensor(rows, dtype=torch.float64).view(len(self.decays), len(layers), 2)

    def merge_runs(self, layers: Sequence[Hashable], weights: Tensor) -> tuple[list[float], list[list[float]]]:
        """Merges the runs of every layer into one.

        Args:
            layers: As given to :meth:`weights`.
            weights: The sum of :meth:`weights` over the ranks.

        Returns:
            For each layer the factor by which its past decays, and the pooled weights of A and G (0 if no rank has used
            the layer).
        """
        used = weights[:, :, :1] > 0
        weights = torch.where(used, weights, 0.0)
        decays = torch.tensor(self.decays, dtype=torch.float64)[:, None]
        since = torch.where(used[:, :, 0], decays, 1.0).flip(0).cumprod(0).flip(0)  # decay from before each update on
        after = torch.cat([since[1:], torch.ones_like(since[:1])])  # decay from after each update on
        for i, layer in enumerate(layers):
            runs = self._runs.get(layer, [])
            for update, sums in runs:
                factor = float(after[update, i])
                for total in sums if factor != 1 else ():
                    total.mul_(factor)
            if len(runs) > 1:
                pooled = [torch.stack(parts).sum(0) for parts in zip(*(sums for _, sums in runs), strict=True)]
                self._runs[layer] = [(runs[-1][0], pooled)]
        return since[0].tolist(), (weights * after[:, :, None]).sum(0).tolist()

    def sums(self, layer: Hashable) -> list[Tensor] | None:
        """This rank's packed sums of A and G, after :meth:`merge_runs`; None if it did not use the layer."""
        runs = self._runs.get(layer)
        return runs[0][1] if runs else None
