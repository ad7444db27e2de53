"""Trust: how far a step turns from the base optimizer's update to K-FAC's direction, learned during training.

With the base optimizer's update u and K-FAC's direction k, scaled to the same length::

    step = (1 - trust) u + trust k,    rescaled to the length of u
    d loss(w - lr step) / d trust  ~  -lr <g', k - u>,    g': the gradient at the next step

This is hypergradient descent (Baydin et al. 2018) on a single number for the whole model, and only the sign of the
derivative is used. The next gradient comes from a batch that had no part in the step, so it tells whether more of k
would have lowered the loss. Where learning rates are too small for curvature to matter, u wins and trust stays at 0;
where they are large, the step exhausts the steep directions, and trust rises. A sign depends on no scale and costs one
inner product.

Where k is neither better nor worse than u, the sign is random, and trust would wander around one half. Adam and its
relatives already scale their updates by a kind of curvature; there k may be worse in the long run even where single
gradients do not show it. With these base classes trust rises by one tenth and falls by two, so that it rises only where
more than two gradients in three agree with k - u.

Decay of averaged gradients. A base class without a first moment steps on single gradients. K-FAC then preconditions an
average ``m = decay m + (1 - decay) g``, whose decay is learned in the same way: while ``<g', m> > 0``, gradients differ
by noise, and a longer average is better; once they oscillate between steep walls, a step along old gradients would
leave the valley.

Brake. What the factors call flat is not always flat. A step that was too long there raises the gradient; a base class
whose updates grow with the gradient then takes a longer step, and K-FAC's direction, scaled to that length, leads
further astray. K-FAC's share of a step is therefore shortened where the base's update is much longer than usual. This
is not done for base classes that keep ``exp_avg``; the updates of all others are assumed to grow with the gradient::

    length of the step = |u| (1 - trust + trust brake),    brake = min(1, 1.3 usual / |u|)^2

``usual`` is the running average of ``|u|`` over the steps in which k was computed. The base optimizer's share keeps its
full length, because the base optimizer copes with its own steps. With these base classes some of that share always
remains: trust goes up to 0.6.

Graft. Of the base's length, k has less along steep components, and so more along flat ones. Once only noise is left
there, that does harm, and trust does not fall: taking less of what is steep still agrees with the next gradient. So it
is learned, too, how much of that length is good, where the base class keeps a first moment that grows with the
gradient, as SGD's momentum does. Without any, k is the base's step with steep components shortened by the damping, the
flattest left as they are::

    k = (|u| / |P m|)^graft (c gamma)^(1 - graft) P m,    c: the rate at which u follows m
    the step is brought back to the length of u by that share alone, (|u| / |mixture|)^graft

graft starts at 1 and moves by the sign of ``<g', stretch>`` (:mod:`~kfac_optim.reach`), over all layers whose stretch
has not been found too long before: whether the loss falls along what is flat. It moves by three hundredths: slowly,
because the sign is almost a coin's where all is well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from .counters import Counted, Counter
from .flat_storage import Tensors, each, times
from .scaling import Direction, norms, ratios, update_norms

__all__ = ["Trust", "brake", "changes_at", "turns"]

_NOTCHES = 10  # trust moves by a tenth per step, which averages over the noise of about ten batches
_MOST_WHERE_UPDATES_GROW = 6  # tenths, where the base's update grows with the gradient
_FALL = 2  # tenths, where it does not
_LONGEST = 9  # tenths: the average remembers some ten gradients, as the usual momentum of 0.9
_REMEMBERED = 10  # lengths of updates that their running average remembers
_SLACK, _POWER = 1.3, 2  # steps are braked where the update is longer than 1.3 times the usual, by that squared
_YOUNG = 20  # steps until k is repeated once, and so many more until it is repeated twice
_PATIENCE = 4  # while steps do not turn, k is computed in one of so many or more


class Trust(Counted):
    """The trust in K-FAC's directions, from 0 (the base optimizer's updates) to 1.

    Attributes:
        notches: Trust in tenths.
        memory: The decay of averaged gradients in tenths, where the base optimizer keeps no first moment.
        hundredths: The graft in hundredths.
        usual: The usual length of the base optimizer's update, per unit of the learning rate and of the gradients in
            its momentum; 0 before the first.
        seen: The number of updates that this is an average of, at most 10.
        brake: The brake of the last step in which k was computed, in (0, 1]; 1: none.
    """

    COUNTERS: ClassVar[Mapping[str, Counter]] = {
        "trust": Counter("notches", 0, _NOTCHES),
        "memory": Counter("memory", 0, _LONGEST),
        "graft": Counter("hundredths", 100, 100),
        "usual_length": Counter("usual", 0.0),
        "lengths": Counter("seen", 0, _REMEMBERED),
        "brake": Counter("brake", 1.0, 1),
    }
    notches: int
    memory: int
    hundredths: int
    usual: float
    seen: int
    brake: float

    @property
    def value(self) -> float:
        """The trust, in [0, 1]."""
        return self.notches / _NOTCHES

    @property
    def decay(self) -> float:
        """The decay of averaged gradients, in [0, 0.9]."""
        return self.memory / 10

    @property
    def graft(self) -> float:
        """How much of the base optimizer's length directions have, in [0, 1]."""
        return self.hundredths / 100

    def is_measured(self, step: int, *, stretches: bool) -> bool:
        """Whether k is computed at this step.

        Always while steps are turned or stretched, otherwise now and then, to find out whether they should be. At first
        that is every fourth step. Later the interval doubles to 8, 16 and so on, so that it stays between 1/32 and 1/16
        of the steps taken. A step in between is the base optimizer's own, and costs no more. ``stretches``: whether
        steps are stretched.
        """
        return self.notches > 0 or stretches or step % max(_PATIENCE, 2 ** max(0, step.bit_length() - 5)) == 0

    def repeats(self, step: int, *, stretches: bool) -> bool:
        """Whether this step changes the base's update as the step before did, if that is known.

        First moments hardly differ between two steps once they are averages of many gradients, and neither does what
        K-FAC makes of them. So k is computed in every step at first, then in every second, and later in every third;
        while trust is 1, in every fourth at last, as there is nothing to learn that could move it further. A stretch
        that was too long is forgotten: its layer goes without one until k is computed anew.
        """
        most = 4 if self.notches == _NOTCHES else 3
        return (self.notches > 0 or stretches) and step % min(most, 1 + step // _YOUNG) != 0

    def learn(self, turn: float = 0.0, average: float = 0.0, length: float = 0.0, flat: float | None = None) -> None:
        """Moves a tenth towards K-FAC's directions if the gradients say so, else one or two towards the base's updates.

        Args:
            turn: The alignment of the gradients with the last k - u. 0 (the rate was 0, say) tells nothing.
            average: ``<g', m>``, m the average of the gradients before, whose sign moves the decay by a tenth.
            length: The length of the base's update in the step before, if it was turned.
            flat: The alignment of the gradients with the last stretches, whose sign moves the graft. None: the base
                class keeps no first moment that is known.
        """
        grows = bool(self.usual or length)
        most, fall = (_MOST_WHERE_UPDATES_GROW, 1) if grows else (_NOTCHES, _FALL)
        self.hundredths = _moved(self.hundredths, flat, 100, 3, 3) if grows and flat is not None else 100
        self.notches = _moved(self.notches, turn, most, fall)
        self.memory = _moved(self.memory, average, _LONGEST)
        if 0 < length < math.inf:
            self.brake = min(1.0, _SLACK * self.usual / length) ** _POWER if self.usual else 1.0
            self.seen = min(_REMEMBERED, self.seen + 1)
            self.usual += (length - self.usual) / self.seen


def _moved(notches: int, alignment: float, most: int, fall: int = 1, rise: int = 1) -> int:
    """So many notches up or down, by the sign of an alignment, between 0 and ``most``."""
    if alignment == 0:
        return notches
    return min(most, notches + rise) if alignment > 0 else max(0, notches - fall)


def turns(directions: Sequence[Direction], out: Sequence[Tensor] | None = None) -> Tensors:
    """``k - u`` of each stack of layers, ``[p, d_out, d_in]``; ``out``: see :func:`~kfac_optim.flat_storage.each`."""
    if not directions:
        return []
    return each("sub", [d.direction for d in directions], [d.update for d in directions], out=out)


def brake(length: Tensor, usual: float) -> Tensor | float | None:
    """The brake where the base's update is so long; None: there is none.

    A device is not waited for: there it is a 0-dim tensor, which may turn out to be 1.
    """
    if not usual:
        return None
    if length.device.type != "cpu":
        return (_SLACK * usual / length).clamp(max=1.0) ** _POWER
    known = float(length)
    return (_SLACK * usual / known) ** _POWER if known > _SLACK * usual else None


def changes_at(
    directions: Sequence[Direction],
    trust: float,
    braked: Tensor | float | None = None,
    graft: float = 1.0,
    out: Sequence[Tensor] | None = None,
) -> Tensors:
    """The step of each stack less u, ``[p, d_out, d_in]``: u is turned towards k by the share ``trust``.

    It is brought back to the length of u, where k has that: mixtures of two directions are shorter than either, and
    without this 3 of the 64 points of ``benchmarks.swap`` ended behind their base optimizer instead of none. At 1 it is
    :func:`turns`.

    Args:
        directions: The stacks.
        trust: In [0, 1].
        braked: What :func:`brake` has found.
        graft: How much of the length of u their k has, in [0, 1].
        out: See :func:`~kfac_optim.flat_storage.each`.
    """
    if not directions:
        return []
    if trust == 1 and braked is None:
        return turns(directions, out)
    updates, towards = [d.update for d in directions], [d.direction for d in directions]
    steps = each("lerp", updates, towards, trust, out=out)
    if trust < 1:
        lengths = ratios(update_norms(directions), norms(directions, steps))
        lengths = lengths if graft == 1 else each("pow", lengths, graft)
        times(steps, lengths, directions[0].storage, out=steps)
    if braked is not None:
        braked = braked.to(steps[0].dtype) if isinstance(braked, Tensor) else braked
        share = 1 - trust * (1 - braked)
        for device in {step.device for step in steps}:
            by = share.to(device) if isinstance(share, Tensor) else share
            each("mul_", [step for step in steps if step.device == device], by)
    return each("sub_", steps, updates)
