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

    @property
    def tensors(self) -> list[Tensor]:
        """All that is known."""
        given = (self.turn, self.average, self.length, self.stretch, self.descent, self.changes)
        return [tensor for tensor in given if tensor is not None]


@dataclass(frozen=True)
class Read:
    """What a step reads from the device, all of it at once.

    Attributes:
        largest: The largest absolute entry of the gradients; NaN or infinite if one of them is.
        rate: The highest learning rate.
        turn: See :class:`Lessons`; 0 where there is none.
        average: See :class:`Lessons`; None where there is none.
        length: See :class:`Lessons`; 0 where there is none.
        grows: See :class:`Lessons`.
        slopes: ``stretch`` and ``descent``, by parameter, times their learning rates.
        watched: The parameters that were compared with what the last step has left.
        changed: Those of them that were changed since.
        flags: The flags of the statistics.
    """

    largest: float
    rate: float
    turn: float
    average: float | None
    length: float
    grows: bool
    slopes: Mapping[nn.Parameter, tuple[float, float]]
    watched: Collection[nn.Parameter]
    changed: Collection[nn.Parameter]
    flags: Sequence[float]


def read_all(
    gradients: Sequence[Tensor], rates: Sequence[float | Tensor], lessons: Lessons, flags: Sequence[Tensor]
) -> Read:
    """Reads all numbers that a step needs in one transfer: the only wait for the device in an ordinary step."""
    largest = largest_entry(gradients)
    tensors = [largest, *(rate for rate in rates if isinstance(rate, Tensor)), *lessons.tensors, *flags]
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    values = iter(torch.cat([tensor.to(largest.device, dtype).view(-1) for tensor in tensors]).tolist())
    # In the order in which they were put together.
    found = next(values)
    rate = max((abs(next(values) if isinstance(rate, Tensor) else rate) for rate in rates), default=0.0)
    turn, average, length = (
        None if of is None else next(values) for of in (lessons.turn, lessons.average, lessons.length)
    )
    after, before = (
        []
        if of is None
        else [number * lr for number, lr in zip(islice(values, of.numel()), lessons.rates, strict=True)]
        for of in (lessons.stretch, lessons.descent)
    )
    slopes = dict(zip(lessons.stretched, zip(after, before, strict=True), strict=True))
    changed = [] if lessons.changes is None else [p for p in lessons.watched if next(values)]
    return Read(
        found,
        rate,
        turn or 0.0,
        average,
        length or 0.0,
        lessons.grows,
        slopes,
        lessons.watched,
        changed,
        list(values),
    )
