"""From the moments of micro-batches to those of a step: sums that stay on the device until the flags are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from .calls import ModelCall
from .gradients import GradientWatch

__all__ = ["MicroBatch", "Moments", "StepMoments", "StepStatistics", "TakenStatistics"]


@dataclass
class Moments:
    """One layer's share of a micro-batch or of a step: packed sums."""

    a: Tensor
    g: Tensor

    def add_call(self, a: Tensor, g: Tensor) -> None:
        """Adds another call in the same micro-batch; the tensors may be somebody else's."""
        self.a, self.g = self.a + a, self.g + g

    def add_batch_(self, batch: Moments) -> None:
        """Adds another micro-batch, in place."""
        self.a.add_(batch.a)
        self.g.add_(batch.g)

    def drop_unless_(self, kept: Tensor) -> None:
        """Makes the sums zero if ``kept`` is false, in place: all of them together are as large as the factors."""
        for sums in (self.a, self.g):
            sums.masked_fill_(~kept.to(sums.device), 0.0)


@dataclass
class MicroBatch:
    """One backward pass in progress.

    Attributes:
        sums: Packed raw sums by layer index.
        counts: The rows behind A, by layer index.
        by_example: Of layers that pool their calls by example the sums over these, by layer index and number of
            examples: of what they have seen (``a`` and ``count``), and of output gradients.
        calls: The model calls that the backward pass has reached.
        task: The number of the backward pass.
        to_caller: Whether it returns the gradients (``torch.autograd.grad``) instead of adding them to ``.grad``.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)
    by_example: dict[tuple[int, int], tuple[Tensor, Any, Tensor]] = field(default_factory=dict)
    calls: set[ModelCall] = field(default_factory=set)
    task: int = -1
    to_caller: bool = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is of another thread, which is still running."""
        return any(call.is_elsewhere for call in self.calls)

    def note_caller(self) -> None:
        """The pass returns the gradients to its caller."""
        self.to_caller = True

    def add(self, layer: int, a: Tensor, count: float, g: Tensor) -> None:
        """Adds one layer call; several calls within a backward pass add rows."""
        if layer in self.sums:
            self.sums[layer].add_call(a, g)
        else:
            self.sums[layer] = Moments(a, g)
        self.counts[layer] = self.counts.get(layer, 0.0) + count

    def add_examples(self, layer: int, a: Tensor, count: Any, g: Tensor) -> None:
        """Adds one call of a layer that pools them; calls on as many examples are taken for calls on the same ones."""
        known = self.by_example.get((layer, len(g)))
        if known is not None:
            a, count, g = known[0] + a, known[1] + count, known[2] + g
        self.by_example[layer, len(g)] = a, count, g


@dataclass
class StepMoments:
    """The statistics of a step, resolved after its flags have been read from the device.

    Attributes:
        sums: Packed raw sums by layer index.
        terms: M of each micro-batch.
        counts: Per micro-batch the rows behind A, by layer index.
        taken: Per micro-batch whether it belongs to the step.
        finite: Per micro-batch whether it belongs to the step and its moments are finite, so that they are in the sums.
        starts: By layer index, the number of the first micro-batch that counts, where that is not 0.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    terms: list[int] = field(default_factory=list)
    counts: list[dict[int, float]] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)

    def rows(self, layer: int) -> float:
        """The number of rows in a layer's A."""
        counted = list(zip(self.counts, self.finite, strict=True))[self.starts.get(layer, 0) :]
        return sum(counts.get(layer, 0.0) for counts, finite in counted if finite)

    def loss_terms(self, layer: int | None = None) -> tuple[int, int]:
        """M of all micro-batches that count for a layer (None: for any), and of the finite ones among them."""
        start = 0 if layer is None else self.starts.get(layer, 0)
        counted = list(zip(self.terms, self.taken, self.finite, strict=True))[start:]
        return sum(m for m, taken, _ in counted if taken), sum(m for m, _, finite in counted if finite)


@dataclass
class StepStatistics:
    """The micro-batches of a step so far.

    Attributes:
        sums: Packed raw sums by layer index, over the finite micro-batches; of a single one as they are.
        terms: M of each micro-batch.
        counts: Per micro-batch the rows behind A, by the index of the layers that it has reached.
        kept: Per micro-batch whether all of its moments were finite, a 0-dim bool.
        scales: Per micro-batch the loss scale, a 0-dim tensor.
        starts: By layer index, the number of the first micro-batch that counts, where that is not 0.
        checks: Between which micro-batches gradients were found changed: the number of micro-batches so far, the
            layers, and the largest entry of each gradient, 0 where it had been zeroed.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    terms: list[int] = field(default_factory=list)
    counts: list[dict[int, float]] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    checks: list[tuple[int, list[int], Tensor]] = field(default_factory=list)

    def add(self, batch: MicroBatch, scale: Tensor, *, drop_overflowed: bool) -> None:
        """Adds a backward pass that has ended, with weight 0 if one of its moments is not finite.

        Args:
            batch: Its moments, which are overwritten.
            scale: The loss scale of the pass.
            drop_overflowed: Whether a smaller loss scale than before takes the earlier micro-batches out of the sums:
                they belong to a step that was not taken.
        """
        kept = _all_finite([tensor for entry in batch.sums.values() for tensor in (entry.a, entry.g)])
        if len(self.kept) == 1:  # the first one counts as a whole or not at all unless there is a second
            for entry in self.sums.values():
                entry.drop_unless_(self.kept[0])
        if self.scales and drop_overflowed:
            valid = scale >= self.scales[-1].to(scale)
            for entry in self.sums.values():
                entry.drop_unless_(valid)
        for index, new in batch.sums.items():
            if self.kept:
                new.drop_unless_(kept)
            if index in self.sums:
                self.sums[index].add_batch_(new)
            else:
                self.sums[index] = new
        self.terms.append(max((call.terms for call in batch.calls), default=1))
        self.kept.append(kept)
        self.scales.append(scale.clone())
        self.counts.append(batch.counts)

    def restart(self, layers: Sequence[int]) -> None:
        """The gradients of these layers were removed: their statistics start anew."""
        for i in layers:
            self.sums.pop(i, None)
            self.starts[i] = len(self.terms)

    def check(self, layers: Sequence[int], largest: Tensor) -> None:
        """The gradients of these layers were changed; where their largest entry is 0, the statistics start anew."""
        for i, entry in zip(layers, largest, strict=True):
            self.sums[i].drop_unless_(entry != 0)
        self.checks.append((len(self.terms), list(layers), largest))

    @property
    def flags(self) -> list[Tensor]:
        """What has to be read from the device to know which micro-batches count."""
        return [*self.kept, *self.scales, *(largest for _, _, largest in self.checks)]

    def resolve(self, values: Iterator[float]) -> StepMoments:
        """What the step's statistics are.

        Args:
            values: The entries of :attr:`flags`, read from the device; as many as there are of them are taken.
        """
        kept, scales = list(islice(values, len(self.kept))), list(islice(values, len(self.scales)))
        starts = dict(self.starts)
        for position, layers, _ in self.checks:
            for i, entry in zip(layers, islice(values, len(layers)), strict=True):
                if entry == 0:
                    starts[i] = max(position, starts.get(i, 0))
        least = list(accumulate(reversed(scales), min, initial=math.inf))[-2::-1]  # of the later scales
        taken = [
            later >= scale and any(starts.get(i, 0) <= k for i in self.counts[k])
            for k, (scale, later) in enumerate(zip(scales, least, strict=True))
        ]
        finite = [belongs and bool(finite) for belongs, finite in zip(taken, kept, strict=True)]
        return StepMoments(self.sums, self.terms, self.counts, taken, finite, starts)


class TakenStatistics:
    """The statistics of a step that is being taken.

    Args:
        passes: The statistics of the passes that have added to ``.grad``.
        to_caller: The statistics of those that have returned gradients to the caller; they count only if none of the
            others does.
        watch: The gradients.
        transformed: Whether a layer was called inside ``torch.func``.
        model_seen: Whether a backward pass has come through an ordinary call of the model.

    Attributes:
        transformed: See above.
        model_seen: Likewise.
        captured: Whether there are any.
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
        self.captured = bool(passes.terms or to_caller.terms)
        # Which may count, in this order; each with the largest entries of its gradients, if these may all be zero.
        self._kinds: list[tuple[StepStatistics, Tensor | None]] = []
        gone = set(watch.removed(passes.sums))
        rest = [i for i in passes.sums if i not in gone]
        if rest:
            self._kinds.append((passes, watch.largest(rest) if watch.changed(rest) == rest else None))
        # Where no pass has added to any gradient, whatever there is was set; through .data, too, which shows nowhere.
        set_by_hand = watch.comparable(watch.written(to_caller.sums) if passes.terms else to_caller.sums)
        if set_by_hand:
            self._kinds.append((to_caller, watch.largest(set_by_hand)))

    def has_gradients(self) -> bool:
        """Whether a layer has a gradient that is not zero; waits for the device."""
        layers = self._watch.comparable(range(len(self._watch.layers)))
        return bool(layers) and bool((self._watch.largest(layers) != 0).any())

    @property
    def flags(self) -> list[Tensor]:
        """What has to be read from the device to know which micro-batches count; of any shape."""
        found: list[Tensor] = []
        for statistics, largest in self._kinds:
            found += [*statistics.flags, *([] if largest is None else [largest])]
        return found

    def resolve(self, flags: Iterable[float]) -> StepMoments:
        """What the step's statistics are.

        Args:
            flags: All entries of :attr:`flags`, read from the device.
        """
        values = iter(flags)
        for statistics, largest in self._kinds:
            found = statistics.resolve(values)
            cleared = largest is not None and not any(list(islice(values, len(largest))))
            if any(found.taken) and not cleared:
                return found
        return StepMoments()


def _all_finite(tensors: list[Tensor]) -> Tensor:
    """Whether all entries of some tensors are finite, a 0-dim bool on the first one's device."""
    if all(tensor.device.type == "cpu" for tensor in tensors):  # where a sum takes a tenth of a norm's time
        totals = [tensor.sum() for tensor in tensors]
    else:
        totals = list(torch._foreach_norm(tensors, math.inf))
    return torch.stack([total.to(totals[0].device) for total in totals]).isfinite().all()
