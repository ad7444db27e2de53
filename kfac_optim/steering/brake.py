"""The brake: K-FAC's share of a step is shortened where the base optimizer's update is much longer than usual.

Directions that are flat according to the factors are not always flat. A step that was too long there raises the
gradient; a base class whose updates grow with the gradient then takes a longer step, and K-FAC's direction, scaled to
that length, leads further astray. Adam's updates do not grow with a gradient that stays large. But once gradients have
become small, a single large one, from an example that is still hard, makes Adam's update a hundred times as long, along
directions that look flat because the factors have seen no gradients there. So with trust as in :mod:`~.trust`::

    length of the step = |u| (1 - trust + trust brake),    brake = min(1, 1.3 usual / |u|)^2

``usual`` is the running average of ``|u|`` over the steps in which k was computed. The base optimizer's share keeps its
full length, because the base optimizer copes with its own steps. Stretches (:mod:`~.reach`) are braked as well.

It copes where its own steps have led. A stretched step may end where the loss is far steeper than the learning rate was
chosen for, as with full batches, whose gradients do not differ, so that reaches rise until something happens. A
gradient is then suddenly many times as large, and so is an update that grows with it. Such a step is *outsized*: the
largest entry of the gradient is more than five times the usual one, or the update of the step before was more than five
times as long as usual, as momentum's updates go on to be. It repeats no other step, and if it computes k, as it does
while steps are turned or stretched, the base optimizer's share is at most five times as long as usual.
"""

from __future__ import annotations

import math

from torch import Tensor

from ..common.counters import Counted, counter
from ..common.machines import is_asynchronous

_REMEMBERED = 10  # the number of lengths that the running average covers
_SLACK, _POWER = 1.3, 2  # an update longer than 1.3 times the usual is braked, by the square of the excess
_OUTSIZED = 5.0  # a gradient this many times as large as usual, or an update this many times as long, is outsized
_LEAST = (_SLACK / _OUTSIZED) ** _POWER  # the brake of an update that is just not outsized


class Brake(Counted):
    """The usual length of the base optimizer's updates, the usual size of gradients, and the last brake.

    Attributes:
        usual: The usual length, per unit of the learning rate and of the weight of gradients in momentum; 0 at first.
        seen: The number of updates in this average, at most 10.
        last: The brake of the last step in which k was computed, in (0, 1]; 1: it was not braked.
        entry: The usual largest entry of the gradients of preconditioned layers, where updates grow; 0 at first.
        is_outsized: Whether the step in progress is outsized, where the base's updates grow with the gradient.
    """

    usual: float = counter(0.0, name="usual_length")
    seen: int = counter(0, _REMEMBERED, "lengths")
    last: float = counter(1.0, 1, "brake")
    entry: float = counter(0.0, name="usual_entry")
    is_outsized: bool = False

    def learn(self, length: float, largest: float, *, grows: bool) -> None:
        """Takes in the last update and the new gradients.

        Args:
            length: The length of the base's last update; 0: none was recorded, as by a step without directions.
            largest: The largest absolute entry of the gradients of preconditioned layers; used where updates grow.
            grows: Whether the base's updates grow with the gradient.
        """
        most = _OUTSIZED if grows else math.inf
        if 0 < length < math.inf:
            brake = self.of(length)
            self.last = 1.0 if brake is None else float(brake)
            self.seen = min(_REMEMBERED, self.seen + 1)
            self.usual = _averaged(self.usual, length, self.seen, most)
        self.is_outsized = grows and (largest > most * self.entry > 0 or self.last < _LEAST)
        if grows and largest and self.usual:  # pauses say nothing; before there are directions, nothing is repeated
            self.entry = _averaged(self.entry, largest, _REMEMBERED, most)

    def of(self, length: Tensor | float) -> Tensor | float | None:
        """The brake for a base's update of this length; None: the step is not braked.

        For a length on an accelerator it is a 0-dim tensor, which may be 1, as comparing it would wait for the device.
        """
        if not self.usual:
            return None
        if isinstance(length, Tensor) and is_asynchronous(length.device):
            return (length / (_SLACK * self.usual)).clamp(min=1.0) ** -_POWER
        length = float(length)
        return (_SLACK * self.usual / length) ** _POWER if length > _SLACK * self.usual else None

    def share(self, trust: float, brake: Tensor | float | None) -> Tensor | float | None:
        """The share of ``|u|`` that the length of a turned step is; None: all of it. ``brake``: see :meth:`of`."""
        if brake is None or not (trust or self.is_outsized):
            return None
        if not self.is_outsized:
            return trust * brake + (1 - trust)
        longest = (brake / _LEAST) ** (1 / _POWER)  # five times the usual length, over |u|
        own = longest.clamp(max=1.0) if isinstance(longest, Tensor) else min(1.0, longest)
        return trust * brake + (1 - trust) * own


def _averaged(usual: float, value: float, count: int, most: float) -> float:
    """A running average over ``count`` values; those above ``most`` times what is usual count as that."""
    return usual + (min(value, most * usual) - usual) / count if usual else value
