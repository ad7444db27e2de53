"""From captured moments to the running averages A and G of all ranks (eqs. 14-15).

A running average consists of a sum S of moments and a sum w of their counts. Each update multiplies both by xi
(``factor_decay``, the weight of the past; the paper prints xi on the new term)::

    S <- xi S + sum of the new moments,    w <- xi w + their count,    factor = S / w

For A the moments are ``sum a a^T`` and their count is the number of rows. For G they are ``M^2 sum g g^T`` and their
count is M, the number of averaged terms of the loss, so that after one batch ``G = M sum g g^T``. Averages do not start
from the identity, so they have no bias to correct; batches of different sizes are weighted exactly.

In a statistics step the ranks add up counts and traces, so that each knows the new w, and also xi where it depends on
the moments (:class:`~kfac_optim.forgetting`). The moments, which are as large as the factors, wait for a refresh. Since
sums are linear, each rank adds up its moments since the last refresh (:class:`Unpooled`) with the same xi, and one
sum over the ranks is enough. A single process adds its moments to the averages in every statistics step. So do ranks
that share factors out: a rank that does not keep a factor sends its moments at once to the rank that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from .blocks import Block
from .capture import StepMoments
from .common.counters import Counted, counter
from .common.stopwatch import Stopwatch
from .common.tensor_cache import sent_once
from .factors import Average, FactorSpec, read, write_
from .placement import Ranks
from .snapshots import AG


class Averaging(Counted):
    """Collects the moments that this rank captures, and adds those of all ranks to the running averages.

    Factors are stored in ``dtype``, and sums kept in float32 at least. ``ranks``: those that pool their moments;
    ``summed``: whether the loss is a sum; ``sampled``: whether the gradients are those of sampled targets
    (:meth:`scale_of_rank`).

    Attributes:
        skipped_batches: How many micro-batches of all ranks were left out because a moment was not finite.
    """

    skipped_batches: int = counter(0)

    def __init__(self, dtype: torch.dtype, stopwatch: Stopwatch, ranks: Ranks, *, summed: bool, sampled: bool) -> None:
        super().__init__()
        self.ranks = ranks
        self.dtype, self.stopwatch = torch.promote_types(dtype, torch.float32), stopwatch
        self.summed, self.sampled = summed, sampled
        self.clear()

    def clear(self) -> None:
        """Forgets the moments that have not been pooled."""
        self._unpooled: dict[Block, tuple[Unpooled, Unpooled]] = {}  # of A and of G

    def add(
        self,
        blocks: Sequence[Block],
        statistics: StepMoments,
        decay: float,
        slack: float,
        reports: Sequence[bool],
    ) -> tuple[bool, list[int]]:
        """Adds what this rank has captured in one step (a collective).

        Args:
            blocks: All blocks, in the order of the statistics' layer indices.
            statistics: Of this step.
            decay: xi at this step.
            slack: The ``slack`` of :class:`~kfac_optim.forgetting`; infinite where xi does not depend on the moments.
            reports: Flags of this rank, which travel with the counts.

        Returns:
            Whether any rank had something to add, and how many ranks have set each of the flags; both are the same on
            all ranks.
        """
        own = {i: moments for i, moments in statistics.sums.items() if statistics.rows[i]}
        for index, moments in own.items():
            _require_fit(blocks[index], moments)
        self._scale_(own, statistics.terms)
        # M belongs to the loss, so G also counts the terms of ranks that did not use the layer: their gradient is zero.
        counts = [(0.0, self.terms_of_rank(*statistics.all_terms))] * len(blocks)
        for index in own:
            counts[index] = statistics.rows[index], self.terms_of_rank(*statistics.terms[index])
        seen, (all_skips, *reported) = self._of_all_ranks(blocks, counts, own, [statistics.skipped, *reports])
        self.skipped_batches += all_skips
        anything = False
        for index, (block, (of_a, of_g)) in enumerate(zip(blocks, seen, strict=True)):
            block.note_rows(of_a[0])
            # Layers that no rank has used, or that were frozen before their first step, get no update.
            if of_a[0] and block.state:
                anything = True
                sides = self._unpooled.setdefault(block, (Unpooled(), Unpooled()))
                parts: Sequence[Tensor | None] = own[index] if index in own else (None, None)
                for name, unpooled, moment, (count, trace) in zip(AG, sides, parts, (of_a, of_g), strict=True):
                    unpooled.add(moment, block.state["current"][name], count, trace, decay, slack)
        return anything, reported

    def _of_all_ranks(
        self,
        blocks: Sequence[Block],
        counts: Sequence[tuple[float, float]],
        own: Mapping[int, tuple[Tensor, Tensor]],
        of_step: Sequence[int],
    ) -> tuple[list[list[list[float]]], list[int]]:
        """The sums of counts and traces over the ranks whose moments count (a collective).

        Args:
            blocks: All blocks.
            counts: This rank's rows and loss terms for each block.
            own: Its moments, by index.
            of_step: More numbers of this rank, to be summed as well.

        Returns:
            For each block, count and trace of A, and those of G; the sums of the other numbers.
        """
        comm = self.ranks.comm
        seen = torch.zeros(len(blocks), 2, 2, dtype=torch.float64, device="cpu")  # of A and of G, count and trace
        seen[:, :, 0] = torch.tensor(counts, dtype=torch.float64, device="cpu").view(-1, 2)
        if own:
            specs = [spec for index in own for spec in blocks[index].specs]
            seen[list(own), :, 1] = traces(specs, [moment for pair in own.values() for moment in pair]).view(-1, 2)
        counted = [[block.workers.counts(side, comm.rank) for side in range(2)] for block in blocks]
        seen *= torch.tensor(counted, device="cpu").view(-1, 2, 1)
        with self.stopwatch.communication("factor", comm.world_size):
            others = torch.tensor(of_step, dtype=torch.float64, device="cpu")
            seen, others = comm.sum([seen, others], "counts")
        return seen.tolist(), list(map(int, others.tolist()))

    def terms_of_rank(self, terms: int, finite: int) -> float:
        """This rank's share of M, the count of G.

        If the loss is a mean, M is R ``terms`` on R ranks with equal batches. A loss that is a sum has M = 1, however
        many backward passes and ranks it is spread over.

        Args:
            terms: M of all micro-batches of the step, by whose number gradients are scaled.
            finite: M of those that count, because they are finite.
        """
        return 1 / self.ranks.comm.world_size * finite / max(1, terms) if self.summed else finite

    def scale_of_rank(self, terms: int) -> float:
        """What this rank's own ``sum g g^T`` is multiplied by in the moment ``M^2 sum g g^T``; ``terms`` as above.

        If the ranks' gradients are averaged, a local g counts as g / R, so that it adds ``terms^2 g g^T`` if the loss
        is a mean; if they are added up, it adds ``(R terms)^2 g g^T``. The gradient for sampled targets is that of the
        sum of the terms, not of their mean.
        """
        ranks = self.ranks.comm.world_size
        rank_weight = 1 / ranks if self.ranks.comm.average_gradients else 1.0
        if self.summed:
            return rank_weight**2
        return 1.0 if self.sampled else (rank_weight * ranks * terms) ** 2

    def _scale_(self, own: Mapping[int, tuple[Tensor, Tensor]], terms: Mapping[int, tuple[int, int]]) -> None:
        """Multiplies the moments of G by ``M^2``, in place."""
        alike: dict[float, list[Tensor]] = {}
        for index, (_, of_g) in own.items():
            alike.setdefault(self.scale_of_rank(terms[index][0]), []).append(of_g)
        for scale, moments in alike.items():
            if scale != 1:
                torch._foreach_mul_(moments, scale)

    def pool(self, blocks: Sequence[Block]) -> None:
        """Adds the moments of all ranks since the last pooling to the running averages of all blocks (a collective)."""
        unpooled, self._unpooled = self._unpooled, {}
        with self.stopwatch.communication("factor", self.ranks.comm.world_size):
            summed = self._summed({block: unpooled[block] for block in blocks if block in unpooled})
            at_once = None if self.ranks.alone else 1  # sums over ranks are folded as they arrive
            while batch := list(islice(summed, at_once)):
                fold_(batch)

    def _summed(self, by_block: Mapping[Block, Sequence[Unpooled]]) -> Iterator[_Fold]:
        """Sums the moments of all ranks for each average (a collective); None if another rank gets the sum."""
        comm = self.ranks.comm
        # Each with the only rank that gets the sum, if it is one.
        sent: list[tuple[int | None, Average, Unpooled, Tensor]] = []
        for block, sides in by_block.items():
            workers = block.workers
            for side, (name, spec, unpooled) in enumerate(zip(AG, block.specs, sides, strict=True)):
                average = block.state["current"][name]
                if not workers.counts(side, comm.rank):
                    yield average, unpooled, None
                    continue
                own = unpooled.sum
                if own is None:  # a rank that has not used the layer adds zeros
                    own = spec.zeros(self.dtype, block.layer.weight.device)
                if workers.factors == "local":  # nothing is sent: the owner's own part is the whole sum
                    yield average, unpooled, own
                else:
                    sent.append((workers.owner(side), average, unpooled, own))
        sent.sort(key=lambda item: -1 if item[0] is None else item[0])  # neighbours of one owner share a bucket
        owners = [owner for owner, *_ in sent]
        sums = comm.sum([own for *_, own in sent], "factors", owners=owners, compressed=True)
        for (owner, average, unpooled, _), total in zip(sent, sums, strict=True):
            yield average, unpooled, total if owner in (None, comm.rank) else None


@dataclass
class Unpooled:
    """What one running average has not been given yet, because the ranks have not pooled their moments.

    k updates ``S <- xi S + sum over ranks m_r`` equal one ``S <- xi^k S + sum over ranks s_r`` with the local sums
    ``s_r <- xi s_r + m_r``. xi may differ from update to update and between A and G, as long as all ranks use the same.

    Attributes:
        past: What the average itself is to be multiplied by: the product of xi over these steps.
        count: The sum over all ranks of rows (A) or loss terms (G), each multiplied by the xi of the steps after it.
        trace: The sum of the moments' traces, likewise.
        sum: This rank's packed local sum; None as long as it has not used the layer.
    """

    past: float = 1.0
    count: float = 0.0
    trace: float = 0.0
    sum: Tensor | None = None

    def add(
        self, moment: Tensor | None, average: Average, count: float, trace: float, decay: float, slack: float
    ) -> None:
        """Adds the moments of a step (eqs. 14-15); ``decay``, which is xi, and ``slack`` are as for a whole step.

        ``moment`` is this rank's, packed, which is kept and changed in place; None: it has not used the layer. Its
        ``count`` and ``trace`` are those of all ranks. ``average`` is the running average without it.
        """
        decay *= past_worth(slack, count, trace, *self.added_to(average))
        self.past, self.count, self.trace = decay * self.past, decay * self.count + count, decay * self.trace + trace
        if self.sum is None:
            self.sum = moment
            return
        self.sum.mul_(decay)
        if moment is not None:
            self.sum.add_(moment)

    def added_to(self, average: Average) -> tuple[float, float]:
        """The weight and the trace that the running average has with it."""
        past = self.past * float(average["weight"])
        weight = past + self.count
        return weight, (past * float(average["trace"]) + self.trace) / weight if weight else 0.0


_Fold = tuple[Average, Unpooled, Tensor | None]


def fold_(folds: Sequence[_Fold]) -> None:
    """Updates running averages in place (eqs. 14-15): ``S <- xi S + moments``, ``w <- xi w + count``.

    S / w and w are stored (:class:`~kfac_optim.factors.Average`), because S could overflow in half precision.

    Args:
        folds: Running averages, each with what it lacks, which changes nothing if its count is 0, and the packed sum of
            the new moments, ``[p, packed]``, which is overwritten; None if another rank keeps the factor.
    """
    kept: list[tuple[Average, Tensor]] = []
    numbers: list[tuple[Average, float, float]] = []
    pasts, shares = [], []
    for average, unpooled, moment in folds:
        if not unpooled.count:
            continue
        weight, trace = unpooled.added_to(average)
        if moment is not None:
            kept.append((average, moment))
            pasts.append(unpooled.past * float(average["weight"]) / weight)
            shares.append(1 / weight)
        numbers.append((average, weight, trace))
    values, new = [read(average) for average, _ in kept], [moment for _, moment in kept]
    if kept:
        torch._foreach_mul_(new, shares)
        torch._foreach_mul_(values, pasts)
        torch._foreach_add_(values, new)
    for (average, _), value in zip(kept, values, strict=True):
        if value is not average["value"]:  # a copy in float32
            write_(average, value)
    # Weights are set last, so that an interrupt cannot leave an average that has a weight but no moments.
    for average, weight, trace in numbers:
        average["weight"].fill_(weight)
        average["trace"].fill_(trace)


def _require_fit(block: Block, moments: Iterable[Tensor]) -> None:
    """Raises ValueError if the rows of a user's layer type do not fit its structure(), as sums might broadcast."""
    layer = block.layer
    methods = ("input_rows", layer.bias is not None), ("output_rows", False)
    for spec, moment, (method, ones) in zip(block.specs, moments, methods, strict=True):
        if moment.numel() != spec.packed_numel:
            raise ValueError(
                f"{layer.name!r}: the rows of {type(layer).__name__}.{method}() do not fit structure(): they must be "
                f"[examples, positions, {spec.pairs}, {spec.dim - ones}], in chunks if they are those of the input"
            )


def past_worth(slack: float, count: float, trace: float, weight: float, mean: float) -> float:
    """The factor for the weight of the past beside new moments, in [0, 1]; see :class:`~kfac_optim.forgetting`.

    Args:
        slack: The past counts in full if ``mean`` is at most this many times the mean trace of the new moments.
        count: The count of the new moments.
        trace: The trace of the new moments. If it or any of the other numbers is 0, the past counts in full.
        weight: The weight of the past.
        mean: The trace of the running average.
    """
    if not (count and trace and weight and mean):
        return 1.0
    ratio = slack * trace / count / mean
    return ratio if ratio < 1 else 1.0  # 1 also if it is not a number


def traces(specs: Sequence[FactorSpec], packed: Sequence[Tensor]) -> Tensor:
    """The traces of packed factors, ``[n]``, float64, on the CPU; waits for the devices once.

    The diagonals lie side by side, so that one call sums all of them.
    """
    found = torch.empty(len(packed), dtype=torch.float64, device="cpu")
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(packed):
        by_device.setdefault(tensor.device, []).append(i)
    for device, indices in by_device.items():
        parts = [part for i in indices for part in specs[i].diagonals(packed[i])]
        side_by_side = torch.cat([part if len(part) == 1 else part.reshape(1, -1) for part in parts], 1)[0]
        lengths = sent_once(tuple(specs[i].matrices * specs[i].size for i in indices), device)
        found[indices] = torch.segment_reduce(side_by_side, "sum", lengths=lengths, unsafe=True).to(found)
    return found
