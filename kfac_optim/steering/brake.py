"""The brake: K-FAC's share of a step is shortened where the base optimizer's update is much longer than usual.

Directions that are flat according to the factors are not always flat. A step that was too long there raises the
gradient; a base class whose updates grow with the gradient then takes a longer step, and K-FAC's direction, scaled to
that length, leads further astray. Adam's updates do not grow with a gradient that stays large. But once gradients have
become small, a single large one, from an example that is still hard, makes Adam's update a hundred times as long, along
directions that look flat because the factors have seen no gradients there. So with trust as in :mod:`~.trust`::

    length of the step = |u| (1 - trust + trust brake),    brake = min(1, 1.3 usual / |u|)^2

``usual`` is the running average of ``|u|`` over the steps in which k was computed. The base optimizer's share keeps its
full length, because the base optimizer copes with its own steps. Stretches (:mod:`~.reach`) are braked as well.
"""

from __future__ import annotations

import math

from torch import Tensor

from ..common.counters import Counted, counter
from ..common.machines import is_asynchronous

_REMEMBERED = 10  # the number of lengths that the running average covers
_SLACK, _POWER = 1.3, 2  # an update longer than 1.3 times the usual is braked, by the square of the excess


class Brake(Counted):
    """The usual length of the base optimizer's updates, and the last brake.

    Attributes:
        usual: The usual length, per unit of the learning rate and of the weight of gradients in momentum; 0 at first.
        seen: The number of updates in this average, at most 10.
        last: The brake of the last step in which k was computed, in (0, 1]; 1: it was not braked.
    """

    usual: float = counter(0.0, name="usual_length")
    seen: int = counter(0, _REMEMBERED, "lengths")
    last: float = counter(1.0, 1, "brake")

    def learn(self, length: float) -> None:
        """Takes in the length of the base's last update; 0: none was recorded, as by a step without directions."""
        if 0 < length < math.inf:
            brake = self.of(length)
            self.last = 1.0 if brake is None else float(brake)
            self.seen = min(_REMEMBERED, self.seen + 1)
            self.usual += (length - self.usual) / self.seen

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
