"""What new gradients say about the last step: how far they agree with the vectors that the step recorded.

:func:`lessons_of` computes it on the device; :class:`Readings` reads it with everything else that a step needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor, nn

from ..bases import Bucket, records
from ..bases.state_keys import MOMENT
from ..common.flat_storage import are_adjacent
from ..common.machines import is_asynchronous
from ..common.rates import Scalar, common_rate, rate_of
from ..distributed import any_sharded, largest_entry
from .constraints import WeightWatch
from .inner_products import Compared, Copies, alignments, total_alignment


@dataclass(frozen=True)
class Lessons:
    """What new gradients say about the last step, in tensors, which :class:`Readings` reads. None: there is nothing.

    Attributes:
        largest: The largest absolute entry of the gradients, 0-dim; None: not yet known.
        entry: The same of ``sized``.
        sized: Where updates grow, the gradients of preconditioned layers, which, unlike others, are the same on all
            ranks; else all gradients.
        turn: The alignment of the gradients with the last ``k - u`` (:mod:`~.trust`), 0-dim.
        length: The length of the base optimizer's last update, if directions were computed for it, 0-dim.
        grows: Whether updates grow with the gradient (:meth:`.Rule.updates_grow`).
        has_moments: Whether the base class keeps first moments: no average of gradients stands in for them.
        stretched: The parameters that the last step stretched, each with the size of its learning rate, negative under
            ``maximize``.
        after: ``<g', s>`` of each, ``[n]``, with the gradient g' and the last stretch s.
        before: ``<g, s>`` of each, ``[n]``, with the averaged gradient g that s was made from.
        edits: Which weights were changed since the last step (:meth:`.WeightWatch.edits`).
    """

    largest: Tensor | None
    entry: Tensor | None
    sized: Sequence[Tensor]
    turn: Tensor | None
    length: Tensor | None
    grows: bool
    has_moments: bool
    stretched: Mapping[nn.Parameter, Scalar]
    after: Tensor | None
    before: Tensor | None
    edits: Tensor | None


class Readings:
    """All numbers that a step needs, read in one transfer: the only wait for the device in an ordinary step.

    Args:
        gradients: The gradients.
        rates: The learning rates.
        lessons: What is to be learned from; None: there is nothing.
        flags: The flags of the statistics.

    Attributes:
        lessons: As given; :meth:`number` and :meth:`numbers` look up what is in its tensors, and in ``flags``.
        largest: The largest absolute entry of the gradients; NaN or infinite if one of them is.
        entry: The largest absolute entry of the lessons' gradients ``sized``.
        rate: The largest absolute learning rate; groups that go uphill may have negative ones.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor],
        rates: Sequence[float | Tensor],
        lessons: Lessons | None,
        flags: Sequence[Tensor],
    ) -> None:
        if lessons is None:
            entry = largest = largest_entry(gradients)
        elif lessons.largest is None or lessons.entry is None:
            entry = largest_entry(lessons.sized)
            largest = entry if len(lessons.sized) == len(gradients) else largest_entry(gradients)
        else:
            entry, largest = lessons.entry, lessons.largest
        learned = [] if lessons is None else [*vars(lessons).values(), *lessons.stretched.values()]
        tensors = dict.fromkeys(each for each in (largest, entry, *rates, *learned, *flags) if isinstance(each, Tensor))
        self._found = dict(zip(tensors, _numbers_in([*tensors]), strict=True))  # a tensor equals itself alone as a key
        self.lessons, self.largest, self.entry = lessons, self.number(largest), self.number(entry)
        self.rate = max((abs(self.number(r) if isinstance(r, Tensor) else r) for r in rates), default=0.0)

    @property
    def trains(self) -> bool:
        """Whether the step changes weights because of gradients."""
        return self.largest > 0 and self.rate != 0

    def numbers(self, tensor: Tensor | None) -> Sequence[float]:
        """The numbers in a tensor; none for None."""
        return () if tensor is None else self._found[tensor]

    def number(self, tensor: Tensor | None) -> float:
        """The number in a 0-dim tensor; 0 for None."""
        return 0.0 if tensor is None else self._found[tensor][0]

    def slopes(self, lessons: Lessons) -> dict[nn.Parameter, tuple[float, float]]:
        """``after`` and ``before`` of lessons by parameter, times its rate in ``stretched`` and the rate's size."""
        after, before = self.numbers(lessons.after), self.numbers(lessons.before)
        rates = [self.number(lr) if isinstance(lr, Tensor) else lr for lr in lessons.stretched.values()]
        each = zip(lessons.stretched, rates, after, before, strict=True)
        return {p: (of_after * lr, of_before * abs(lr)) for p, lr, of_after, of_before in each}


def _numbers_in(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The numbers in each tensor, in one transfer from an accelerator."""
    if not any(is_asynchronous(tensor.device) for tensor in tensors):
        return [tensor.view(-1).tolist() for tensor in tensors]
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    together = iter(torch.cat([tensor.to(tensors[0].device, dtype).view(-1) for tensor in tensors]).tolist())
    return [list(islice(together, tensor.numel())) for tensor in tensors]


def lessons_of(
    optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], watch: WeightWatch, covered: Set[nn.Parameter]
) -> Lessons:
    """Compares the new gradients with the directions and stretches that earlier steps recorded.

    A collective if gradients are sharded.

    Args:
        optimizer: The optimizer, before its step.
        buckets: The parameters that have a gradient.
        watch: Knows whether weights have changed since the last step.
        covered: The parameters of layers that are preconditioned.
    """
    members, copies = [*chain.from_iterable(buckets)], Copies()
    turn = _turn(buckets, [rate_of(group) for group in optimizer.param_groups], copies)
    stretched, after, before = _stretched(buckets, copies)
    grows = all(m.rule.updates_grow(m.state) for m in members)
    sized = [m.gradient for m in members if not grows or m.p in covered]
    others = [m.gradient for m in members if grows and m.p not in covered]
    entry, largest = _largest_of(sized, others, copies)  # after the others, which make the copies
    return Lessons(
        turn=turn,
        stretched=stretched,
        after=after,
        before=before,
        largest=largest,
        entry=entry,
        sized=sized,
        length=records.last_length(optimizer),
        grows=grows,
        has_moments=not records.having([m for m in members if not m.has_first_moment], MOMENT),
        edits=watch.edits(),
    )


def _turn(buckets: Sequence[Bucket], rates: Sequence[Scalar], copies: Copies) -> Tensor | None:
    """``|lr| <g', k - u>``, summed over all parameters, up to a positive factor; ``rates``: those of all groups."""
    common = common_rate(rates)
    # Rates are divided by it, which keeps signs: where all are equal, nothing is to be multiplied on the device.
    unit = 1.0 if common is None or isinstance(common, Tensor) else abs(common) or 1.0
    compared: list[Compared] = []
    for some, turns in records.recorded(buckets, records.TURN):
        lr = _rate_downhill(some)
        compared.append(Compared([m.gradient for m in some], turns, lr if isinstance(lr, Tensor) else lr / unit))
    return total_alignment(compared, copies) if compared else None


def _stretched(
    buckets: Sequence[Bucket], copies: Copies
) -> tuple[dict[nn.Parameter, Scalar], Tensor | None, Tensor | None]:
    """What the gradients say about the last stretches: ``stretched``, ``after`` and ``before`` of :class:`Lessons`."""
    found: dict[nn.Parameter, Scalar] = {}
    compared: list[Compared] = []
    before: list[Tensor] = []
    both = records.STRETCH, records.DESCENT
    having_both = [records.having(bucket, *both) for bucket in buckets]  # users may have deleted one
    recorded = (records.recorded(having_both, key) for key in both)
    for (some, stretches), (_, descents) in zip(*recorded, strict=True):
        found.update(dict.fromkeys([m.p for m in some], _rate_downhill(some)))
        compared.append(Compared([m.gradient for m in some], stretches))
        before += descents
    return (found, alignments(compared, copies), _together(before)) if found else ({}, None, None)


def _rate_downhill(bucket: Bucket) -> Scalar:
    """The size of the learning rate, negative under ``maximize``.

    The sign of the rate does not count: it turns the step and the direction that was aimed at alike.
    """
    lr = rate_of(bucket[0].group)
    lr = lr.abs() if isinstance(lr, Tensor) else abs(lr)
    return -lr if bucket[0].group.get("maximize") else lr


def _largest_of(
    sized: Sequence[Tensor], others: Sequence[Tensor], copies: Copies
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The largest entry of ``sized``, taken from copies of its gradients if there are any, and that of all gradients.

    None if they are sharded, because it is then a collective, which has to wait until the ranks have been compared.
    """
    if any_sharded([*sized, *others]):
        return None, None
    copied = {*chain.from_iterable(copies)}
    vectors = [vector for batches in copies.values() for _, vector in batches]
    entry = largest_entry([*vectors, *(g for g in sized if id(g) not in copied)])
    return entry, torch.maximum(entry, largest_entry(others).to(entry.device)) if others else entry


def _together(numbers: list[Tensor]) -> Tensor:
    """Joins 0-dim tensors into one, on an accelerator as a view while they share one storage."""
    first = numbers[0]
    if not any(is_asynchronous(number.device) for number in numbers):
        return torch.stack(numbers)
    if are_adjacent(numbers):
        return first.as_strided((len(numbers),), (1,), first.storage_offset())
    return torch.stack([number.to(first) for number in numbers])
