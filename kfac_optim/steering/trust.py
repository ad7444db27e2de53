"""Trust: how far a step turns from the base optimizer's update to K-FAC's direction, learned during training.

Let u be the base optimizer's update and k K-FAC's direction, scaled to the same length::

    step = (1 - trust) u + trust k,    rescaled to the length of u
    d loss(w - lr step) / d trust  ~  -lr <g', k - u>,    g': the gradient at the next step

This is hypergradient descent (Baydin et al. 2018) on a single number for the whole model, and only the sign of the
derivative is used. The next gradient comes from a batch that had no part in the step, so it tells whether more of k
would have lowered the loss. Where learning rates are too small for curvature to matter, u wins and trust stays at 0;
where they are large, the step exhausts the steep directions, and trust rises. The sign does not depend on any scale,
and it costs one inner product.

Where k is neither better nor worse than u, the sign is random, and trust would wander around one half. Adam and related
optimizers already scale their updates by a kind of curvature; there k may be worse in the long run even where single
gradients do not show it. With these base classes trust rises by one tenth and falls by two, so that it rises only where
more than two gradients in three agree with k - u.

K-FAC's share of a step is braked where the base's update is unusually long (:mod:`~.brake`). Where updates grow with
the gradient, a part of the base optimizer's update always remains: trust goes up to 0.6 only. There the length of
K-FAC's direction is learned as well (:mod:`~.graft`).
"""

from __future__ import annotations

from torch import Tensor

from ..common.counters import Counted, counter, moved
from ..stacks import Matrices, Stacked, ratio

_NOTCHES = 10  # trust moves by a tenth per step, which averages over the noise of about ten batches
_MOST_WHERE_UPDATES_GROW = 6  # tenths: the highest trust where the base's update grows with the gradient
_FALL = 2  # tenths by which trust falls where it does not
_YOUNG = 20  # steps until k is repeated once, and as many more until it is repeated twice
_PATIENCE = 4  # while steps are not turned, k is computed in one of this many steps, or less often


class Trust(Counted):
    """The trust in K-FAC's directions, from 0 (the base optimizer's updates) to 1.

    Attributes:
        notches: Trust in tenths.
    """

    notches: int = counter(0, _NOTCHES, "trust")

    @property
    def value(self) -> float:
        """The trust, in [0, 1]."""
        return self.notches / _NOTCHES

    def computes(self, step: int, *, stretches: bool) -> bool:
        """Whether k is computed at this step.

        It is computed always while steps are turned or stretched, otherwise now and then, to find out whether they
        should be. At first that is every fourth step. Later the interval doubles to 8, 16 and so on, so that it stays
        between 1/32 and 1/16 of the steps taken. A step in between is the base optimizer's own, and costs no more.
        ``stretches``: whether steps are stretched.
        """
        return self.notches > 0 or stretches or step % max(_PATIENCE, 2 ** max(0, step.bit_length() - 5)) == 0

    def repeats(self, step: int, *, stretches: bool) -> bool:
        """Whether this step changes the base's update as the step before did, if that change was recorded.

        Once first moments are averages of many gradients, they hardly differ between two steps, and neither do their
        preconditioned forms. So k is computed in every step at first, then in every second, and later in every third;
        while trust is 1, finally in every fourth, because no gradient could raise it further. A stretch that was too
        long is forgotten: its layer is not stretched until k is computed again.

        ``stretches``: see :meth:`computes`.
        """
        most = 4 if self.notches == _NOTCHES else 3
        return (self.notches > 0 or stretches) and step % min(most, 1 + step // _YOUNG) != 0

    def learn(self, turn: float, *, grows: bool) -> None:
        """Moves trust a tenth up if the gradients agree with ``k - u``, else one or two tenths down.

        Args:
            turn: The alignment of the gradients with the last ``k - u``. 0, as after a rate of 0, moves nothing.
            grows: Whether the base's updates grow with the gradient.
        """
        most, fall = (_MOST_WHERE_UPDATES_GROW, 1) if grows else (_NOTCHES, _FALL)
        self.notches = moved(self.notches, turn, most, fall=fall)


def turns(stacked: Stacked, out: Matrices | None = None) -> Matrices:
    """``k - u``; ``out``: see :class:`~kfac_optim.stacks.matrices.Matrices`."""
    return stacked.directions.minus(stacked.updates, out)


def changes_at(
    stacked: Stacked,
    trust: float,
    share: Tensor | float | None = None,
    graft: float = 1.0,
    out: Matrices | None = None,
) -> Matrices:
    """The step minus u; the step is u, turned towards k by the share ``trust``.

    A mixture of two directions is shorter than either, so the step is brought back to the length of u, as far as
    ``graft`` says. At a trust of 1 and its whole length, the result is that of :func:`turns`.

    Args:
        stacked: The directions.
        trust: In [0, 1].
        share: The share of the length of u that a braked step has, the result of :meth:`.Brake.share`; None: all of it.
        graft: The graft that k was shortened with, in [0, 1]; 1: k is as long as u (:mod:`~.graft`).
        out: See :class:`~kfac_optim.stacks.matrices.Matrices`.
    """
    if not stacked or (trust == 1 and share is None):
        return turns(stacked, out)
    updates = stacked.updates
    steps = updates.lerp(stacked.directions, trust, out)
    if trust < 1 and graft > 0:
        lengths = ratio(stacked.update_norms, steps.norms())
        steps = steps.times(lengths if graft == 1 else lengths**graft, out=steps)
    if share is not None:
        share = share.to(steps.tensors[0].dtype) if isinstance(share, Tensor) else share
        steps = steps.times(share, out=steps)
    return steps.minus(updates, out=steps)
