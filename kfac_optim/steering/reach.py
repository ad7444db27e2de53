"""Reach: how much further the step of a layer goes along flat directions, learned during training.

The steepest direction limits the learning rate. Along a flatter one, a step may be longer in proportion. So a step is
not only turned (:mod:`~.trust`), but also stretched, if damping is relative to the largest eigenvalue L of a
layer's ``A (x) G``. With the first moment m, and c the coefficient of the base's update u projected on it::

    stretch = c ((L + gamma) (A (x) G + gamma I)^-1 - I) m,    c = <u, m> / <m, m>
    step   += reach stretch

(With a solver that damps A and G apart, ``L + gamma`` is the product of their largest damped eigenvalues.)

The stretch is zero in the steepest direction, and ``L / gamma`` times the base's own step in the flattest. Steep
directions are left to the base, whose rate was chosen for them: a stretch only ever adds to its step. At reach 1 the
step is along the natural gradient, and as long as the base's in the layer's steepest direction. The rate was chosen for
the steepest direction of the whole model, which may be steeper than the layer's; so a reach may go up to 3. That of a
recurrent layer goes up to 0.05: where its cells saturate, the loss is flat and shows no wall, and weights would grow
without end.

Each layer has a reach of its own, which starts low. If the loss still falls along the layer's last stretch::

    slope = <g', stretch> / <g, stretch> > 0.05,    g = m / (the weight of all gradients in m)

a longer stretch would have been better, and reach rises by a tenth of itself; else it falls. (Where less is left of the
slope, a longer stretch gains next to nothing, but weights wander along flat directions with the noise in m, until they
saturate a tanh, say.) A slope below -1 says that the stretch was more than twice as long as the best one: it has met a
wall, and reach falls by much more. Once a reach has fallen, it falls as much at slopes above 2, which are just as far
from 1/2, and mostly noise. Where single gradients say so little, steps along flat directions should be short.

Before its first fall, a reach is only known to be too small, and the less the slope has changed, the further it may be
from where the loss ceases to fall. So until then it rises by more where the slope is above a half, by four tenths where
it is 1 (TCP finds its rate in the same way, by a slow start that the first loss of a packet ends). It does not while
the learning rate rises: a slope at the low rate of a warm-up says little about the rate that is to come. Where the
base's updates grow with the gradient, it does so up to 0.1 only: steps become longer where a plateau ends, and a loss
that has fallen ever faster along the stretch jumps.

A reach is tied to the learning rate at which it was learned. Where the rate rises again after it has fallen (warm
restarts, cycles), or jumps, reaches fall by the same factor, so that steps along flat directions stay as long as they
were. In a warm-up these steps grow with the rate.

Networks that train against each other are neither turned nor stretched (:mod:`~.opponents`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from torch import nn

from ..blocks import Block
from ..common.counters import Counted, counter
from ..stacks import Matrices, Stacked

LEAST_REACH = 3e-4  # a stretch that is too small to notice
_GROWTH = 1.1  # in a step, reach is multiplied by this factor or divided by it
_FIRST_GROWTH = 1.4  # what it is multiplied by where the slope has not changed, before its first fall
_FAST_UP_TO = 0.1  # up to which reach this holds where updates grow
_LEAST_SLOPE = 0.05  # above which reach rises
_FALL = 30.0  # at a slope below -1 or above 2, reach is divided by more than _GROWTH, up to this
_JUMP = 2.0  # a rate that rises by more than this factor from one step to the next has jumped: this is no warm-up


def learn_reaches(
    blocks: Sequence[Block],
    slopes: Mapping[nn.Parameter, tuple[float, float]],
    undone: Set[nn.Parameter],
    *,
    warms_up: bool,
    grows: bool,
) -> set[nn.Parameter]:
    """Moves the reach of each layer.

    Args:
        blocks: The layers' blocks.
        slopes: For each parameter that was stretched, two alignments with its stretch, times its learning rate: that of
            the gradient after the step, and that of the gradients before it.
        undone: The parameters of layers whose last stretch the training loop may have undone. Nothing is learned from
            these stretches, except that a constrained layer still learns, up to its start value.
        warms_up: Whether the learning rate rises.
        grows: Whether the base's updates grow with the gradient.

    Returns:
        The parameters of layers whose stretch was too long, so that the loss no longer falls along it.
    """
    too_long: set[nn.Parameter] = set()
    fast_up_to = 0.0 if warms_up else _FAST_UP_TO if grows else math.inf
    for block in blocks if slopes else ():
        after, before, parameters = 0.0, 0.0, block.layer.parameters
        for p in parameters:
            of_p = slopes.get(p, (0.0, 0.0))
            after, before = after + of_p[0], before + of_p[1]
        if before > 0 and (undone.isdisjoint(parameters) or block.is_constrained):
            slope, fell = after / before, block.learned("fell")
            reach = _moved(block.reach, slope, fell=fell, fast_up_to=fast_up_to)
            block.set_learned(reach=min(reach, block.layer.most_reach), fell=fell or not slope > _LEAST_SLOPE)
            too_long.update(() if after > 0 else parameters)  # also if ``after`` is NaN
    return too_long


def lower_reaches(blocks: Sequence[Block], rise: float) -> None:
    """Lowers all reaches by the factor by which the learning rate has risen, ``rise`` (:meth:`RateHistory.rise`)."""
    for block in blocks:
        if rise > 1 and block.state:
            block.set_learned(reach=max(LEAST_REACH, block.reach / rise))


class RateHistory(Counted):
    """How the learning rate has changed during training.

    Attributes:
        last: The highest rate of the last step in which it was not 0; 0 before the first such step.
        fell: Whether this rate has ever fallen.
    """

    last: float = counter(0.0, name="rate")
    fell: bool = counter(False, 1, "rate_fell")

    def rise(self, rate: float) -> float:
        """Records the highest learning rate of a step, if it is not 0.

        Returns:
            The factor by which the rate has risen, if it has ever fallen or now jumps; else, as in a warm-up, 1.
        """
        last = self.last
        if rate:
            self.last = rate
        if not rate or not last:
            return 1.0
        self.fell = self.fell or rate < last
        rises = rate > last if self.fell else rate > _JUMP * last
        return rate / last if rises else 1.0


def _moved(reach: float, slope: float, *, fell: bool, fast_up_to: float) -> float:
    """The next reach.

    Args:
        reach: The reach.
        slope: The loss's slope along the last stretch, divided by that before the step.
        fell: Whether it has ever fallen.
        fast_up_to: Up to which reach it rises faster until then.
    """
    excess = max(-slope, slope - 1)  # above 1 outside of -1 to 2
    if slope > _LEAST_SLOPE and not (fell and excess > 1):
        unchanged = min(1.0, max(0.0, 2 * slope - 1)) if not fell and reach < fast_up_to else 0.0
        return reach * _GROWTH * (_FIRST_GROWTH / _GROWTH) ** unchanged
    fall = max(1.0, min(min(excess, _FALL) ** 2, _FALL / _GROWTH)) if math.isfinite(slope) else _FALL / _GROWTH
    return max(LEAST_REACH, reach / (_GROWTH * fall))


def stretches(stacked: Stacked, out: Matrices | None = None) -> Matrices:
    """The stretch; damping has to be relative to the largest eigenvalue.

    ``out``: see :class:`~kfac_optim.stacks.matrices.Matrices`.
    """
    assert stacked.steepest is not None
    multipliers = stacked.steepest.multipliers  # which turn the directions into (L + gamma) P m
    if stacked.updates is stacked.moments:  # c is 1
        found = stacked.directions.times(multipliers, out)
        return found.minus(stacked.moments, out=found)
    c = stacked.projections
    found = stacked.directions.times(multipliers * c, out)
    return found.minus_multiples_(stacked.moments, c)
