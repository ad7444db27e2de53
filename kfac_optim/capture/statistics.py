"""From the moments of micro-batches to those of a step: sums that stay on the device until the flags are read.

They pass through three forms::

    StepStatistics     the passes of a step so far that have ended
    TakenStatistics    those that may count for the step being taken, and the flags that decide it
    StepMoments        the sums that do count, once the flags are known
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .gradients import GradientWatch

Moments = tuple[Tensor, Tensor]  # of one layer in a micro-batch or in a step: the packed sums for A and for G
Read = Callable[[Tensor], Sequence[float]]  # the numbers in a tensor, which have been read from the device


class Counts(NamedTuple):
    """What is counted of a micro-batch."""

    terms: int  # M
    rows: dict[int, float]  # in A, by the index of the layers that it has reached
    taken: bool = True  # whether it belongs to the step
    finite: bool = True  # whether it does and, its moments being finite, is in the sums


@dataclass
class StepMoments:
    """The statistics of a step, resolved after its flags have been read from the device.

    Attributes:
        sums: Packed raw sums by layer index.
        counts: Those of each micro-batch.
        starts: By layer index, the number of the first micro-batch that counts, if that is not 0.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    counts: list[Counts] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)

    def rows(self, layer: int) -> float:
        """The number of rows in a layer's A."""
        return sum(each.rows.get(layer, 0.0) for each in self.counts[self.starts.get(layer, 0) :] if each.finite)

    def loss_terms(self, layer: int | None = None) -> tuple[int, int]:
        """M of all micro-batches that count for a layer (None: for any), and of the finite ones among them."""
        counts = self.counts if layer is None else self.counts[self.starts.get(layer, 0) :]
        return sum(each.terms for each in counts if each.taken), sum(each.terms for each in counts if each.finite)


@dataclass
class StepStatistics:
    """The micro-batches of a step so far.

    Attributes:
        sums: Packed raw sums by layer index, over the finite micro-batches; a single one is kept even if not finite.
        counts: Those of each micro-batch, before it is known whether it belongs to the step.
        kept: For each micro-batch, whether all of its moments were finite, a 0-dim bool.
        scales: For each micro-batch, the loss scale, a 0-dim tensor.
        starts: By layer index, the number of the first micro-batch that counts, if that is not 0.
        checks: Each time that gradients were found changed between micro-batches: the number of micro-batches so far,
            the layers, and the largest entry of each gradient, 0 if it had been zeroed.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    counts: list[Counts] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    checks: list[tuple[int, list[int], Tensor]] = field(default_factory=list)

    def add(self, moments: dict[int, Moments], counts: Counts, scale: Tensor, *, drop_overflowed: bool) -> None:
        """Adds a backward pass that has ended, with weight 0 if one of its moments is not finite.

        Args:
            moments: Its packed raw sums by layer index, which are overwritten.
            counts: What is counted of it.
            scale: The loss scale of the pass.
            drop_overflowed: Whether a smaller loss scale than before removes the earlier micro-batches from the sums,
                because they belong to a step that was not taken.
        """
        kept = _all_finite(list(chain.from_iterable(moments.values())))
        if len(self.kept) == 1:  # the first is zeroed only now: had it stayed alone, its flag would have been enough
            _drop_unless_(self.kept[0], self.sums.values())
        if self.scales and drop_overflowed:
            _drop_unless_(scale >= self.scales[-1].to(scale), self.sums.values())
        if self.kept:
            _drop_unless_(kept, moments.values())
        for index, new in moments.items():
            if index not in self.sums:
                self.sums[index] = new
                continue
            for total, part in zip(self.sums[index], new, strict=True):
                total.add_(part)
        self.counts.append(counts)
        self.kept.append(kept)
        self.scales.append(scale.clone())

    def restart(self, layers: Sequence[int]) -> None:
        """Restarts the statistics of these layers, because their gradients were removed."""
        for i in layers:
            self.sums.pop(i, None)
            self.starts[i] = len(self.counts)

    def restart_cleared(self, layers: Sequence[int], largest: Tensor) -> None:
        """Restarts the statistics of layers whose gradient was changed to zero; ``largest``: its largest entries."""
        for i, entry in zip(layers, largest, strict=True):
            _drop_unless_(entry != 0, [self.sums[i]])
        self.checks.append((len(self.counts), list(layers), largest))

    @property
    def flags(self) -> list[Tensor]:
        """The tensors that have to be read from the device to know which micro-batches count."""
        return [*self.kept, *self.scales, *(largest for _, _, largest in self.checks)]

    def resolve(self, read: Read) -> StepMoments:
        """The step's statistics, with :attr:`flags` as they were read."""
        starts = dict(self.starts)
        for position, layers, largest in self.checks:
            for i, entry in zip(layers, read(largest), strict=True):
                if entry == 0:
                    starts[i] = max(position, starts.get(i, 0))
        counts, least = list(self.counts), math.inf  # the least of the later scales
        for k in reversed(range(len(counts))):
            (kept,), (scale,) = read(self.kept[k]), read(self.scales[k])
            taken = scale <= least and any(starts.get(i, 0) <= k for i in counts[k].rows)
            counts[k] = counts[k]._replace(taken=taken, finite=taken and bool(kept))
            least = min(least, scale)
        return StepMoments(self.sums, counts, starts)


class TakenStatistics:
    """The statistics of a step that is being taken.

    Args:
        passes: The statistics of the passes that have added to ``.grad``.
        to_caller: The statistics of the passes that have returned gradients to the caller; they count only if no other
            pass does.
        watch: The gradients as the last backward pass has left them.
        transformed: Whether a layer was called inside ``torch.func``.
        model_seen: Whether a backward pass has come through an ordinary call of the model.
    """

    def __init__(
        self,
        passes: StepStatistics,
        to_caller: StepStatistics,
        watch: GradientWatch,
        *,
        transformed: bool,
        model_seen: bool,
    ) -> None:
        self.transformed, self.model_seen, self._watch = transformed, model_seen, watch
        # What may count, in this order, each with the largest entries of its gradients if these may all be zero.
        self._kinds: list[tuple[StepStatistics, Tensor | None]] = []
        gone = set(watch.removed(passes.sums))
        rest = [i for i in passes.sums if i not in gone]
        if rest:
            self._kinds.append((passes, watch.largest(rest) if watch.changed(rest) == rest else None))
        # If no pass has added to any gradient, the loop has set what there is, perhaps by .data, which leaves no trace.
        set_by_hand = watch.comparable(watch.written(to_caller.sums) if passes.counts else to_caller.sums)
        if set_by_hand:
            self._kinds.append((to_caller, watch.largest(set_by_hand)))

    def has_gradients(self) -> bool:
        """Whether a layer has a gradient that is not zero; waits for the device."""
        layers = self._watch.comparable(range(len(self._watch.layers)))
        return bool(layers) and bool((self._watch.largest(layers) != 0).any())

    @property
    def flags(self) -> list[Tensor]:
        """The tensors, of any shape, that have to be read from the device to know which micro-batches count."""
        found: list[Tensor] = []
        for statistics, largest in self._kinds:
            found += [*statistics.flags, *([] if largest is None else [largest])]
        return found

    def resolve(self, read: Read) -> StepMoments:
        """The step's statistics, with :attr:`flags` as they were read."""
        for statistics, largest in self._kinds:
            found = statistics.resolve(read)
            cleared = largest is not None and not any(read(largest))
            if any(each.taken for each in found.counts) and not cleared:
                return found
        return StepMoments()


def _drop_unless_(kept: Tensor, moments: Iterable[Moments]) -> None:
    """Sets moments to zero if ``kept`` is false; in place, because all of them are as large as all factors."""
    for tensor in chain.from_iterable(moments):
        tensor.masked_fill_(~kept.to(tensor.device), 0.0)


def _all_finite(tensors: list[Tensor]) -> Tensor:
    """Whether all entries of some tensors are finite, a 0-dim bool on the first one's device."""
    if all(tensor.is_cpu for tensor in tensors):  # a sum takes a tenth of a norm's time there
        totals = [tensor.sum() for tensor in tensors]
    else:
        totals = list(torch._foreach_norm(tensors, math.inf))
    return torch.stack([total.to(totals[0].device) for total in totals]).isfinite().all()
