"""The brake: K-FAC's share of a step is shortened where the base optimizer's update is much longer than usual.

What the factors call flat is not always flat. A step that was too long there raises the gradient; a base class whose
updates grow with the gradient then takes a longer step, and K-FAC's direction, scaled to that length, leads further
astray. Adam's updates do not grow with a gradient that stays large. Where gradients have become small, though, a single
large one, of an example that is still hard, makes them a hundred times as long at once, along what the factors have
seen no gradients of and call flat. So with trust as in :mod:`~.trust`::

    length of the step = |u| (1 - trust + trust brake),    brake = min(1, 1.3 usual / |u|)^2

``usual`` is the running average of ``|u|`` over the steps in which k was computed. The base optimizer's share keeps its
full length, because the base optimizer copes with its own steps. Stretches (:mod:`~.reach`) are braked alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from ..counters import Counted, Counter

__all__ = ["Brake", "brake_of"]

_REMEMBERED = 10  # lengths of updates that their running average remembers
_SLACK, _POWER = 1.3, 2  # steps are braked where the update is longer than 1.3 times the usual, by that squared


class Brake(Counted):
    """What is known of the lengths of the base optimizer's updates.

    Attributes:
        usual: The usual length, per unit of the learning rate and of the gradients in its momentum; 0 before the first.
        seen: The number of updates that this is an average of, at most 10.
        last: The brake of the last step in which k was computed, in (0, 1]; 1: none.
    """

    COUNTERS: ClassVar[Mapping[str, Counter]] = {
        "usual_length": Counter("usual", 0.0),
        "lengths": Counter("seen", 0, _REMEMBERED),
        "brake": Counter("last", 1.0, 1),
    }
    usual: float
    seen: int
    last: float

    def learn(self, length: float) -> None:
        """Notes the length of the base's update in the step before; 0: it was not turned, or is not to be braked."""
        if 0 < length < math.inf:
            braked = brake_of(length, self.usual)
            self.last = 1.0 if braked is None else float(braked)
            self.seen = min(_REMEMBERED, self.seen + 1)
            self.usual += (length - self.usual) / self.seen


def brake_of(length: Tensor | float, usual: float) -> Tensor | float | None:
    """The brake where the base's update is so long; None: there is none.

    A device is not waited for: there it is a 0-dim tensor, which may turn out to be 1.
    """
    if not usual:
        return None
    if isinstance(length, Tensor) and length.device.type != "cpu":
        return (length / (_SLACK * usual)).clamp(min=1.0) ** -_POWER
    known = float(length)
    return (_SLACK * usual / known) ** _POWER if known > _SLACK * usual else None
