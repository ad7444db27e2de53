"""The graft: how far K-FAC's direction is scaled to the length of the base optimizer's update.

At a graft of 1, K-FAC's direction is as long as the update. It is then shorter along steep components, and so longer
along flat ones. Once only noise is left along the flat ones, that does harm, yet trust (:mod:`~.trust`) does not fall,
because shorter steep components still agree with the next gradient. At a graft of 0, the direction is the base's step
with its steep components shortened by preconditioning, the flattest left as they are. With the base's update u, the
first moment m, the coefficient ``c = <u, m> / <m, m>`` of u projected on m, and the preconditioner P::

    k = (|u| / |P m|)^graft (c gamma)^(1 - graft) P m

Likewise a step between u and k is multiplied by ``(|u| / |mixture|)^graft`` only.

graft starts at 1 and moves by the sign of ``<g', stretch>`` (:mod:`~.reach`), which tells whether the loss falls along
flat directions. All layers count whose stretch has not been found too long before. graft moves by three hundredths:
slowly, because the sign is almost random where all is well. It is learned where the base class keeps a first moment
that grows with the gradient, as SGD's momentum does.
"""

from __future__ import annotations

from ..common.counters import Counted, counter, moved
from ..stacks import Stacked

_ALL, _STEP = 100, 3  # in hundredths: the start value, which is the largest, and the change per step


class GraftShare(Counted):
    """The learned graft.

    Attributes:
        hundredths: The graft in hundredths.
    """

    hundredths: int = counter(_ALL, _ALL, "graft")

    @property
    def value(self) -> float:
        """The graft, in [0, 1]."""
        return self.hundredths / _ALL

    def learn(self, flat: float | None) -> None:
        """Moves by the sign of ``flat``, the alignment of the gradients with the last stretches; None: resets to 1."""
        self.hundredths = _ALL if flat is None else moved(self.hundredths, flat, _ALL, fall=_STEP, rise=_STEP)


def grafted(stacked: Stacked, graft: float) -> Stacked:
    """Directions as long as the base's updates at a graft of 1, and ``c gamma P m`` at 0 (see the top of the module).

    The latter are the base's own step along the flattest components, and shorter along all others. Directions stay as
    they are unless damping is relative to the largest eigenvalue.
    """
    steepest = stacked.steepest
    if graft == 1 or steepest is None:
        return stacked
    lengths = steepest.multipliers / steepest.contrast  # |gamma P m| / |u|
    if stacked.updates is not stacked.moments:  # otherwise u = m, and c is 1
        lengths = lengths * stacked.projections
    return stacked.times(lengths ** (1 - graft))
