"""The graft: how much of the length of the base optimizer's update K-FAC's direction has.

Given all of it, K-FAC's direction has less than the update along steep components, and so more along flat ones. Once
only noise is left there, that does harm, and trust (:mod:`~.trust`) does not fall: taking less of what is
steep still agrees with the next gradient. Without any of it, the direction is the base's step with steep components
shortened by the damping, the flattest left as they are. With the base's update u, the first moment m, the rate c at
which u follows m, and the preconditioner P::

    k = (|u| / |P m|)^graft (c gamma)^(1 - graft) P m

A step between u and k is brought back to the length of u by that share alone, ``(|u| / |mixture|)^graft``.

graft starts at 1 and moves by the sign of ``<g', stretch>`` (:mod:`~.reach`), over all layers whose stretch
has not been found too long before: whether the loss falls along what is flat. It moves by three hundredths: slowly,
because the sign is almost a coin's where all is well. It is learned where the base class keeps a first moment that
grows with the gradient, as SGD's momentum does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ..counters import Counted, Counter, moved
from ..flat_storage import elementwise
from ..stack_algebra import Direction, bare_shares, rates_followed, scaled

__all__ = ["GraftShare", "shortened"]

_ALL, _STEP = 100, 3  # hundredths


class GraftShare(Counted):
    """How much of the base optimizer's length directions have.

    Attributes:
        hundredths: The share in hundredths.
    """

    COUNTERS: ClassVar[Mapping[str, Counter]] = {"graft": Counter("hundredths", _ALL, _ALL)}
    hundredths: int

    @property
    def value(self) -> float:
        """The share, in [0, 1]."""
        return self.hundredths / _ALL

    def learn(self, flat: float | None) -> None:
        """Moves by the sign of the alignment of the gradients with the last stretches; None: all of the length."""
        self.hundredths = _ALL if flat is None else moved(self.hundredths, flat, _ALL, fall=_STEP, rise=_STEP)


def shortened(directions: Sequence[Direction], graft: float) -> Sequence[Direction]:
    """Directions of the base's length, brought towards ``gamma P m`` at the base's own rate.

    Along the flattest components that is the base's own step, along all others less. Left alone where damping is not
    relative to the largest eigenvalue.

    Args:
        directions: The stacks.
        graft: How much of the base's length they keep, in [0, 1]; 1: all.
    """
    if graft == 1 or not directions or directions[0].steepest is None:
        return directions
    shares = bare_shares(directions)
    if any(d.update is not d.gradient for d in directions):  # else it follows at a rate of 1
        shares = elementwise("mul", shares, rates_followed(directions))
    return scaled(directions, elementwise("pow", shares, 1 - graft))
