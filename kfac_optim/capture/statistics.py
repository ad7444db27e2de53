"""From the moments of micro-batches to those of a step: sums that stay on the device until the flags are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

import torch
from torch import Tensor

from ..layers import Observation
from .calls import ModelCall
from .gradients import GradientWatch

__all__ = ["MicroBatch", "Moments", "StepMoments", "StepStatistics", "TakenStatistics"]


@dataclass
class Moments:
    """One layer's share of a micro-batch or of a step: packed sums and the rows behind A."""

    a: Tensor
    g: Tensor
    counts: list[float] = field(default_factory=list)  # per micro-batch

    def add_call(self, a: Tensor, count: float, g: Tensor) -> None:
        """Adds another call in the same micro-batch; the tensors may be somebody else's."""
        self.a, self.g, self.counts = self.a + a, self.g + g, [self.counts[0] + count]

    def add_batch(self, a: Tensor, g: Tensor, counts: list[float]) -> None:
        """Adds another micro-batch, in place; ``counts`` has an entry for each one of the step."""
        self.a.add_(a)
        self.g.add_(g)
        self.counts += counts[len(self.counts) :]

    def drop_unless_(self, kept: Tensor) -> None:
        """Makes the sums zero if ``kept`` is false, in place: all of them together are as large as the factors."""
        for sums in (self.a, self.g):
            sums.masked_fill_(~kept.to(sums.device), 0.0)

    def scale_(self, factor: Tensor) -> None:
        """Multiplies the sums, in place."""
        self.a.mul_(factor.to(self.a))
        self.g.mul_(factor.to(self.g))


@dataclass
class MicroBatch:
    """One backward pass in progress.

    Attributes:
        sums: Packed raw sums by layer index.
        by_example: The calls of layers that pool them by example, by layer index and number of examples.
        calls: The model calls that the backward pass has reached.
        task: The number of the backward pass.
        to_caller: Whether it returns the gradients (``torch.autograd.grad``) instead of adding them to ``.grad``.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    by_example: dict[tuple[int, int], list[tuple[Observation, Tensor]]] = field(default_factory=dict)
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
            self.sums[layer].add_call(a, count, g)
        else:
            self.sums[layer] = Moments(a, g, [count])


@dataclass
class StepMoments:
    """The statistics of a step, resolved after its flags have been read from the device.

    Attributes:
        sums: Packed raw sums by layer index.
        terms: M of each micro-batch.
        taken: Per micro-batch whether it belongs to the step.
        finite: Per micro-batch whether it belongs to the step and its moments are finite, so that they are in the sums.
        starts: By layer index, the number of the first micro-batch that counts, where that is not 0.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    terms: list[int] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)

    def rows(self, layer: int) -> float:
        """The number of rows in a layer's A."""
        # A layer that the last micro-batches did not use has fewer counts than there are micro-batches.
        start, counts = self.starts.get(layer, 0), self.sums[layer].counts
        return sum(count for count, use in list(zip(counts, self.finite, strict=False))[start:] if use)

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
        kept: Per micro-batch a 0-dim tensor, 1.0 if all of its moments were finite, else 0.0.
        scales: Per micro-batch the loss scale, a 0-dim tensor.
        layers: Per micro-batch the layers that it has reached.
        starts: By layer index, the number of the first micro-batch that counts, where that is not 0.
        checks: Between which micro-batches gradients were found changed: the number of micro-batches so far, the
            layers, and the largest entry of each gradient, 0 where it had been zeroed.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    terms: list[int] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    layers: list[set[int]] = field(default_factory=list)
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
                entry.scale_(valid)
        for index, new in batch.sums.items():
            if self.kept:
                new.drop_unless_(kept)
            counts = [0.0] * len(self.terms) + new.counts
            if index in self.sums:
                self.sums[index].add_batch(new.a, new.g, counts)
            else:
                self.sums[index] = Moments(new.a, new.g, counts)
        self.terms.append(max((call.terms for call in batch.calls), default=1))
        self.kept.append(kept)
        self.scales.append(scale.clone())
        self.layers.append(set(batch.sums))

    def restart(self, layers: Sequence[int]) -> None:
        """The gradients of these layers were removed: their statistics start anew."""
        for i in layers:
            self.sums.pop(i, None)
            self.starts[i] = len(self.terms)

    def check(self, layers: Sequence[int], largest: Tensor) -> None:
        """The gradients of these layers were changed; where their largest entry is 0, the statistics start anew."""
        for i, entry in zip(layers, largest, strict=True):
            self.sums[i].scale_(entry != 0)
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
            later >= scale and any(starts.get(i, 0) <= k for i in self.layers[k])
            for k, (scale, later) in enumerate(zip(scales, least, strict=True))
        ]
        finite = [belongs and bool(finite) for belongs, finite in zip(taken, kept, strict=True)]
        return StepMoments(self.sums, self.terms, taken, finite, starts)


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
