"""From the moments of micro-batches to those of a step: sums that stay on the device until the flags are read.

They pass through three forms::

    StepStatistics     the passes of a step so far that have ended
    TakenStatistics    those that may count for the step being taken, and the flags that decide it
    StepMoments        the sums that do count, once the flags are known
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .gradients import GradientWatch

Moments = tuple[Tensor, Tensor]  # of one layer in a micro-batch or in a step: the packed sums for A and for G
Read = Callable[[Tensor], Sequence[float]]  # the numbers in a tensor, which have been read from the device


class StepMoments(NamedTuple):
    """The statistics of a step, resolved after its flags have been read from the device; by layer index.

    ``terms`` are M of all micro-batches that count for a layer, and of the finite ones among them.
    """

    sums: Mapping[int, Moments] = {}  # packed, over the finite micro-batches
    rows: Mapping[int, float] = {}  # in A
    terms: Mapping[int, tuple[int, int]] = {}
    all_terms: tuple[int, int] = (0, 0)  # for a layer that was not seen: of all micro-batches
    any_taken: bool = False  # whether any micro-batch belongs to the step
    skipped: int = 0  # how many do, but are not finite


class EndedPass(NamedTuple):
    """What is noted of a micro-batch besides its sums."""

    terms: int  # M
    rows: Mapping[int, float]  # in A, by the index of the layers that it has reached
    finite: Tensor  # whether all of its moments were, a 0-dim bool
    scale: Tensor  # the loss scale, 0-dim


@dataclass
class StepStatistics:
    """The micro-batches of a step so far.

    Attributes:
        sums: Packed raw sums by layer index, over the finite micro-batches; a single one is kept even if not finite.
        passes: The micro-batches, before it is known whether they belong to the step.
        starts: By layer index, the number of the first micro-batch that counts, if that is not 0.
        checks: Each time that gradients were found changed between micro-batches: the number of micro-batches so far,
            the layers, and the largest entry of each gradient, 0 if it had been zeroed.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    passes: list[EndedPass] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    checks: list[tuple[int, list[int], Tensor]] = field(default_factory=list)

    def add(
        self,
        moments: Mapping[int, Moments],
        terms: int,
        rows: Mapping[int, float],
        scale: Tensor,
        *,
        drop_overflowed: bool,
    ) -> None:
        """Adds a backward pass that has ended, with weight 0 if one of its moments is not finite.

        Args:
            moments: Its packed raw sums by layer index, which are overwritten.
            terms: Its M.
            rows: The number of rows in its A, by layer index.
            scale: The loss scale of the pass.
            drop_overflowed: Whether a smaller loss scale than before removes the earlier micro-batches from the sums,
                because they belong to a step that was not taken.
        """
        finite, earlier = _all_finite(list(chain.from_iterable(moments.values()))), self.passes
        if len(earlier) == 1:  # the first is zeroed only now: had it stayed alone, its flag would have been enough
            _drop_unless_(earlier[0].finite, self.sums.values())
        if earlier and drop_overflowed:
            _drop_unless_(scale >= earlier[-1].scale.to(scale), self.sums.values())
        if earlier:
            _drop_unless_(finite, moments.values())
        for index, new in moments.items():
            if index not in self.sums:
                self.sums[index] = new
                continue
            for total, part in zip(self.sums[index], new, strict=True):
                total.add_(part)
        self.passes.append(EndedPass(terms, rows, finite, scale.clone()))

    def restart(self, layers: Sequence[int]) -> None:
        """Restarts the statistics of these layers, because their gradients were removed."""
        for i in layers:
            self.sums.pop(i, None)
            self.starts[i] = len(self.passes)

    def restart_cleared(self, layers: Sequence[int], largest: Tensor) -> None:
        """Restarts the statistics of layers whose gradient was changed to zero; ``largest``: its largest entries."""
        for i, entry in zip(layers, largest, strict=True):
            _drop_unless_(entry != 0, [self.sums[i]])
        self.checks.append((len(self.passes), list(layers), largest))

    @property
    def flags(self) -> list[Tensor]:
        """The tensors that have to be read from the device to know which micro-batches count."""
        of_passes = chain.from_iterable((each.finite, each.scale) for each in self.passes)
        return [*of_passes, *(largest for _, _, largest in self.checks)]

    def resolve(self, read: Read) -> StepMoments:
        """The step's statistics, with :attr:`flags` as they were read."""
        starts = dict(self.starts)
        for position, layers, largest in self.checks:
            for i, entry in zip(layers, read(largest), strict=True):
                if entry == 0:
                    starts[i] = max(position, starts.get(i, 0))
        taken: list[int] = []  # the micro-batches that belong to the step, the last one first
        finite: list[int] = []  # those of them that are finite
        least = math.inf  # the least of the later scales
        for k in reversed(range(len(self.passes))):
            (is_finite,), (scale,) = read(self.passes[k].finite), read(self.passes[k].scale)
            if scale <= least and any(starts.get(i, 0) <= k for i in self.passes[k].rows):
                taken.append(k)
                if is_finite:
                    finite.append(k)
            least = min(least, scale)

        def terms_from(start: int) -> tuple[int, int]:
            of_all, of_finite = (sum(self.passes[k].terms for k in some if k >= start) for some in (taken, finite))
            return of_all, of_finite

        first = {i: starts.get(i, 0) for i in self.sums}
        rows = {
            i: sum(self.passes[k].rows.get(i, 0.0) for k in reversed(finite) if k >= start)
            for i, start in first.items()
        }
        terms = {start: terms_from(start) for start in {0, *first.values()}}
        of_layers = {i: terms[start] for i, start in first.items()}
        return StepMoments(self.sums, rows, of_layers, terms[0], bool(taken), len(taken) - len(finite))


class TakenStatistics:
    """The statistics of a step that is being taken.

    Args:
        added: The statistics of the passes that have added to ``.grad``.
        to_caller: The statistics of the passes that have returned gradients to the caller; they count only if no other
            pass does.
        watch: The gradients as the last backward pass has left them.
        transformed: Whether a layer was called inside ``torch.func``.
        model_seen: Whether a backward pass has come through an ordinary call of the model.
    """

    def __init__(
        self,
        added: StepStatistics,
        to_caller: StepStatistics,
        watch: GradientWatch,
        *,
        transformed: bool,
        model_seen: bool,
    ) -> None:
        self.transformed, self.model_seen, self._watch = transformed, model_seen, watch
        # What may count, in this order, each with the largest entries of its gradients if these may all be zero.
        self._kinds: list[tuple[StepStatistics, Tensor | None]] = []
        gone = set(watch.removed(added.sums))
        rest = [i for i in added.sums if i not in gone]
        if rest:
            self._kinds.append((added, watch.largest(rest) if watch.changed(rest) == rest else None))
        # If no pass has added to any gradient, the loop has set what there is, perhaps by .data, which leaves no trace.
        set_by_hand = watch.comparable(watch.written(to_caller.sums) if added.passes else to_caller.sums)
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
            if found.any_taken and not cleared:
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
