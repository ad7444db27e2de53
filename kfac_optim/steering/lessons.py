"""Feedback on the last step: what the new gradients say of the vectors that the step recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from ..distributed import largest_entry

__all__ = ["Lessons", "Read", "read_all"]


@dataclass(frozen=True)
class Lessons:
    """Feedback on the last step, still on the device; :func:`read_all` reads it with everything else a step needs.

    Attributes:
        largest: The largest absolute entry of the gradients, 0-dim; None: not yet known.
        turn: How far the gradients agree with the last ``k - u``, 0-dim (:mod:`~.trust`).
        average: Likewise with the average of the gradients before them, where one is kept.
        length: The length of the base optimizer's last update, if it was turned.
        grows: Whether the base optimizer's updates grow with the gradient, as all but those of Adam and its kin do.
        stretch: ``<g', s>`` of each parameter that was stretched, ``[n]``: g' the gradient, s the last stretch.
        descent: ``<g, s>`` of each, ``[n]``: g the averaged gradient that s was made of. Their ratio is the slope of
            :mod:`~.reach`.
        stretched: These parameters.
        rates: Their learning rates, where these are numbers, which the device need not know; else 1.
        changes: For each watched parameter 1 if it is not as the last step has left it, else 0, ``[n]``.
        watched: These parameters.
    """

    largest: Tensor | None = None
    turn: Tensor | None = None
    average: Tensor | None = None
    length: Tensor | None = None
    grows: bool = False
    stretch: Tensor | None = None
    descent: Tensor | None = None
    stretched: Sequence[nn.Parameter] = ()
    rates: Sequence[float] = ()
    changes: Tensor | None = None
    watched: Sequence[nn.Parameter] = ()


@dataclass(frozen=True)
class Read:
    """What a step reads from the device, all of it at once.

    Attributes:
        largest: The largest absolute entry of the gradients; NaN or infinite if one of them is.
        rate: The highest learning rate.
        lessons: What has been read.
        turn: Its ``turn``; 0 where there is none.
        average: Its ``average``; None where there is none.
        length: Its ``length``; 0 where there is none.
        slopes: Its ``stretch`` and ``descent``, by parameter, times their learning rates.
        changed: Those of its ``watched`` that were changed.
        flags: The flags of the statistics.
    """

    largest: float
    rate: float
    lessons: Lessons
    turn: float
    average: float | None
    length: float
    slopes: Mapping[nn.Parameter, tuple[float, float]]
    changed: Collection[nn.Parameter]
    flags: Sequence[float]


def read_all(
    gradients: Sequence[Tensor], rates: Sequence[float | Tensor], lessons: Lessons, flags: Sequence[Tensor]
) -> Read:
    """Reads all numbers that a step needs in one transfer: the only wait for the device in an ordinary step."""
    largest = largest_entry(gradients) if lessons.largest is None else lessons.largest
    names = ("turn", "average", "length", "stretch", "descent", "changes")
    known = {name: tensor for name in names if (tensor := getattr(lessons, name)) is not None}
    tensors = [largest, *(rate for rate in rates if isinstance(rate, Tensor)), *known.values(), *flags]
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    values = iter(torch.cat([tensor.to(largest.device, dtype).view(-1) for tensor in tensors]).tolist())
    # In the order in which they were put together.
    found = next(values)
    rate = max((abs(next(values) if isinstance(rate, Tensor) else rate) for rate in rates), default=0.0)
    numbers = {name: list(islice(values, tensor.numel())) for name, tensor in known.items()}
    after, before = (
        [number * lr for number, lr in zip(numbers.get(name, ()), lessons.rates, strict=True)]
        for name in ("stretch", "descent")
    )
    changes = zip(lessons.watched, numbers.get("changes", ()), strict=True)
    first = {name: of_name[0] for name, of_name in numbers.items()}
    return Read(
        found,
        rate,
        lessons,
        turn=first.get("turn", 0.0),
        average=first.get("average"),
        length=first.get("length", 0.0),
        slopes=dict(zip(lessons.stretched, zip(after, before, strict=True), strict=True)),
        changed=[p for p, has_changed in changes if has_changed],
        flags=list(values),
    )
