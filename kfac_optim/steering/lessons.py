"""Feedback on the last step: how far the new gradients agree with the vectors that the step recorded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from ..distributed import largest_entry
from ..rates import Scalar

__all__ = ["Lessons", "Readings", "read_all"]


@dataclass(frozen=True)
class Lessons:
    """Feedback on the last step, still on the device; :func:`read_all` reads it with everything else a step needs.

    What the host knows already, because it was computed on the CPU, may be a number or a list of numbers.

    Attributes:
        largest: The largest absolute entry of the gradients; None: not yet known.
        turn: The alignment of the gradients with the last ``k - u`` (:mod:`~.trust`).
        average: The alignment of the gradients with the average kept where the base has no first moment.
        length: The length of the base optimizer's last update, if directions were computed for it.
        grows: Whether updates grow with the gradient; those of Adam and other optimizers with ``exp_avg`` do not.
        stretch: ``<g', s>`` of each stretched parameter, ``[n]``, with the gradient g' and the last stretch s.
        descent: ``<g, s>`` of each stretched parameter, ``[n]``, with the averaged gradient g that s was made from.
            ``stretch / descent`` is the slope of :mod:`~.reach`.
        stretched: The stretched parameters.
        rates: Their learning rates, if these are numbers, which are not sent to the device; else 1.
        changes: For each watched parameter 1 if it was changed since the last step, else 0, ``[n]``.
        watched: The watched parameters (:mod:`~.constraints`).
    """

    largest: Scalar | None = None
    turn: Scalar | None = None
    average: Scalar | None = None
    length: Tensor | None = None
    grows: bool = False
    stretch: Tensor | None = None
    descent: Tensor | list[float] | None = None
    stretched: Sequence[nn.Parameter] = ()
    rates: Sequence[float] = ()
    changes: Tensor | None = None
    watched: Sequence[nn.Parameter] = ()


@dataclass(frozen=True)
class Readings:
    """Everything that a step reads from the device, in one transfer.

    Attributes:
        largest: The largest absolute entry of the gradients; NaN or infinite if one of them is.
        rate: The highest learning rate.
        lessons: The feedback that has been read; None: there is nothing to learn from.
        turn: Its ``turn``; 0 if there is none.
        average: Its ``average``; None if there is none.
        length: Its ``length``; 0 if there is none.
        slopes: Its ``stretch`` and ``descent``, by parameter, times the parameter's learning rate.
        changed: Those of its ``watched`` parameters that were changed.
        flags: The flags of the statistics.
    """

    largest: float
    rate: float
    lessons: Lessons | None
    turn: float
    average: float | None
    length: float
    slopes: Mapping[nn.Parameter, tuple[float, float]]
    changed: Collection[nn.Parameter]
    flags: Sequence[float]


def read_all(
    gradients: Sequence[Tensor], rates: Sequence[float | Tensor], lessons: Lessons | None, flags: Sequence[Tensor]
) -> Readings:
    """Reads all numbers that a step needs in one transfer: the only wait for the device in an ordinary step."""
    feedback = lessons or Lessons()
    largest = largest_entry(gradients) if feedback.largest is None else feedback.largest
    names = ("turn", "average", "length", "stretch", "descent", "changes")
    known = {name: given for name in names if (given := getattr(feedback, name)) is not None}
    tensors = [given for given in (largest, *rates, *known.values(), *flags) if isinstance(given, Tensor)]
    values = iter(_numbers_in(tensors))  # in this order
    found = next(values) if isinstance(largest, Tensor) else largest
    rate = max((next(values) if isinstance(rate, Tensor) else rate for rate in rates), default=0.0)
    numbers = {name: _listed(given, values) for name, given in known.items()}
    pairs = zip(numbers.get("stretch", ()), numbers.get("descent", ()), strict=True)
    slopes = zip(feedback.stretched, pairs, feedback.rates, strict=True)
    changes = zip(feedback.watched, numbers.get("changes", ()), strict=True)
    first = {name: of_name[0] for name, of_name in numbers.items()}
    return Readings(
        found,
        rate,
        lessons,
        turn=first.get("turn", 0.0),
        average=first.get("average"),
        length=first.get("length", 0.0),
        slopes={p: (after * lr, before * lr) for p, (after, before), lr in slopes},
        changed=[p for p, has_changed in changes if has_changed],
        flags=list(values),
    )


def _listed(given: Tensor | list[float] | float, values: Iterator[float]) -> list[float]:
    """Some numbers as a list; ``values``: those in tensors, the next of which are in this one if it is a tensor."""
    if isinstance(given, Tensor):
        return list(islice(values, given.numel()))
    return given if isinstance(given, list) else [given]


def _numbers_in(tensors: Sequence[Tensor]) -> list[float]:
    """The numbers in all tensors, in one transfer from an accelerator."""
    if all(tensor.is_cpu for tensor in tensors):
        return [number for tensor in tensors for number in tensor.view(-1).tolist()]
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    together: list[float] = torch.cat([tensor.to(tensors[0].device, dtype).view(-1) for tensor in tensors]).tolist()
    return together
