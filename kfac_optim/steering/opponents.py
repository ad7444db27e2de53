"""Networks that train against each other, as those of a GAN: their steps are left to the base optimizers.

They are neither stretched (:mod:`~.reach`) nor turned (:mod:`~.trust`).

A discriminator that trains faster wins at once, and the generator has nothing to learn from; a generator that trains
faster finds the discriminator's blind spots instead of the data. The discriminator is known by gradients that are
thrown away, those of the backward passes by which the generator trains. They are seen in two ways: what its layers had
captured is gone (:class:`~kfac_optim.capture.statistics.TakenStatistics`), and what a step has left in ``.grad`` has
grown until the optimizer clears it (:class:`Leftover`). Where it is frozen for these passes there are none, and they
are seen themselves (:mod:`kfac_optim.capture.frozen_passes`). Nothing tells of a generator. So an optimizer takes
itself for an opponent as long as such a network takes steps in the same process, between its own.

Gradients are thrown away where one network trains, too: those by which adversarial examples are made, or the first ones
of SAM. A game has two optimizers. So they count only as long as another optimizer, of any kind, has lately taken a step
between those of this one.

Several ranks tell each other what they have seen in the steps that collect statistics, and what all of them have seen
counts: a game that is on one rank alone must not decide how the others go on.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..counters import Counter

__all__ = ["OPPONENTS", "Leftover", "Opponents", "Opposition", "Signs"]

_LATELY = 16  # steps: several of one network may come before the next of the other
_THROWS = 2**16 - 1  # bits: so many steps are remembered
_NUMBERS = itertools.count(1)


class Leftover:
    """Watches whether a later backward pass adds to a gradient that ``step()`` has left in ``.grad``.

    It watches for as long as it is held.

    Args:
        parameter: The parameter; it gets a hook.
        gradient: Its gradient after the step, which gets a number as an attribute. It is not held, not even weakly:
            torch could not swap it then, as ``model.to()`` does under
            ``torch.__future__.set_swap_module_params_on_conversion(True)``; attributes are swapped along.

    Attributes:
        has_grown: Whether another backward pass has added to it.
    """

    def __init__(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.has_grown = False
        if parameter.requires_grad:
            self._number, of_self = next(_NUMBERS), weakref.ref(self)
            gradient._kfac_left = self._number  # type: ignore[attr-defined]
            handle = parameter.register_post_accumulate_grad_hook(lambda p: _note(of_self, p))
            weakref.finalize(self, handle.remove)

    def on_gradient_added(self, parameter: Tensor) -> None:
        """A backward pass has added to the gradient of the parameter."""
        self.has_grown |= getattr(parameter.grad, "_kfac_left", 0) == self._number


def _note(leftover: weakref.ref[Leftover], parameter: Tensor) -> None:
    known = leftover()
    if known is not None:
        known.on_gradient_added(parameter)


class Opponents:
    """The optimizers of a process that have lately been seen to train against others; held weakly.

    Attributes:
        taken: The number of steps that have ended, of all optimizers of the process, torch's own included. One in which
            another was taken, as by a SAM that wraps its base optimizer, does not count beside that.
    """

    def __init__(self) -> None:
        self.taken = self._steps = 0
        self._begun: dict[int, int] = {}  # by identity: others' optimizers need not be hashable
        self._first_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._last_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def begin(self, who: object) -> None:
        """A step of some optimizer begins."""
        self._begun[id(who)] = self.taken

    def end(self, who: object) -> None:
        """A step of some optimizer has ended."""
        self.taken += self._begun.pop(id(who), self.taken) == self.taken

    def step(self, who: object, *, opposes: bool) -> None:
        """An optimizer takes a step; ``opposes``: whether it is known to train against others."""
        self._steps += 1
        self._first_steps.setdefault(who, self._steps)
        self.note(who, opposes=opposes)

    def resume(self, who: object, *, opposes: bool) -> None:
        """An optimizer goes on from a saved state.

        It counts as older than every step of this process, so that an opponent which is loaded beside it is seen.
        """
        self._first_steps[who] = -1
        self.note(who, opposes=opposes)

    def copy(self, who: object, copied: object) -> None:
        """An optimizer was copied: the copy inherits its original's opponents, and its status as one."""
        for known in (self._first_steps, self._last_steps):
            if who in known:
                known[copied] = known[who]

    def note(self, who: object, *, opposes: bool) -> None:
        """Notes whether an optimizer is known to train against others."""
        if opposes:
            self._last_steps[who] = self._steps
        else:
            self._last_steps.pop(who, None)

    def exist_for(self, who: object) -> bool:
        """Whether another optimizer has lately trained against others, and did so after the first step of this one."""
        if not self._last_steps:
            return False
        first = self._first_steps.get(who, self._steps)
        others = [last for other, last in list(self._last_steps.items()) if other is not who]
        return any(last > first and self._steps - last < _LATELY for last in others)


OPPONENTS = Opponents()  # of this process
register_optimizer_step_pre_hook(lambda who, *_: OPPONENTS.begin(who))
register_optimizer_step_post_hook(lambda who, *_: OPPONENTS.end(who))


@dataclass(frozen=True)
class Signs:
    """Signs of a game, since the ranks last told each other of them.

    Attributes:
        captured_lost: Whether captured gradients were thrown away before this step.
        added_lost: Whether gradients were that had been added to those which a step had left.
        opponents: Whether other networks are known to train against each other.
    """

    captured_lost: bool
    added_lost: bool
    opponents: bool


class Opposition:
    """Whether the network of one optimizer trains against another one.

    Attributes:
        opposes: Whether captured gradients were thrown away before both of the last two steps that collected
            statistics. The very first step, before which nobody looks, counts as such a step. None until the second.
        suspected: Whether gradients were thrown away before the last of these steps. A step that was skipped, because
            its gradients had overflowed for instance, makes nobody an opponent.
        throws: For each of the last 16 steps, whether gradients were cleared before it that had been added to those of
            the step before; one bit each, the last one lowest. Two of them make an opponent: it may take several steps
            for one of the other network's. Of several ranks only those steps count in which they told each other.
        all_see_opponents: Of several ranks, whether all of them knew of other networks that train against each other
            when they last told each other.
        since_lost: The steps since gradients were last thrown away, the one after that included, at most 16; 0: none
            were yet.
        alone_for: How many steps it had taken, when gradients were last thrown away, with none of another optimizer in
            between; 16: so many that what is thrown away does not count.
    """

    COUNTERS: ClassVar[Mapping[str, Counter]] = {
        "opposes": Counter("opposes", -1, 1),
        "suspected": Counter("suspected", 1, 1),
        "throws": Counter("throws", 0, _THROWS),
        "captured_lost": Counter("_captured_lost", 0, 1),
        "added_lost": Counter("_added_lost", 0, 1),
        "all_see_opponents": Counter("all_see_opponents", 0, 1),
        "since_lost": Counter("since_lost", 0, _LATELY),
        "alone_for": Counter("alone_for", 0, _LATELY),
    }

    def __init__(self) -> None:
        self.opposes: bool | None = None
        self.suspected = True
        self.throws = 0
        self.all_see_opponents = False
        self.since_lost = self.alone_for = 0
        self._others = OPPONENTS.taken  # steps of other optimizers, and its own before gradients were last thrown away
        self._leftover: Leftover | None = None
        # Since the last step gradients were thrown away: captured ones, and ones that were added to that step's.
        self._captured_lost = self._added_lost = False

    @property
    def is_seen(self) -> bool:
        """Whether it is known that the network trains against another one."""
        return bool(self.opposes) or self.throws.bit_count() > 1

    def note_left(self, gradients: Mapping[nn.Parameter, Tensor] | None) -> None:
        """A step leaves these gradients in ``.grad``."""
        self._leftover = Leftover(*next(iter(gradients.items()))) if gradients else None

    def note_clearing(self) -> None:
        """Notes, before gradients are cleared, whether others have been added to those that the step had left."""
        self._added_lost = self._added_would_be_lost
        self._leftover = None  # what is cleared twice was thrown away once

    @property
    def _added_would_be_lost(self) -> bool:
        """What :meth:`note_clearing` would find."""
        return self._added_lost or (self._leftover is not None and self._leftover.has_grown)

    def recover(self) -> None:
        """A step was left by an exception, so that it is not counted: neither are those of others so far."""
        self._others = OPPONENTS.taken

    def note_captured_lost(self) -> None:
        """Captured gradients are thrown away."""
        self._captured_lost = True

    def note_served(self) -> None:
        """The network was frozen since the last step, and others have trained through it.

        As if both kinds of gradients had been thrown away: it may take several steps for one of the other network's.
        """
        self._captured_lost = self._added_lost = True

    def take_captured_lost(self) -> bool:
        """Whether captured gradients were thrown away in a game before this step, whether or not it is taken."""
        self._others += 1  # is to go on with OPPONENTS.taken, where this step is counted when it ends
        if self._captured_lost or self._added_lost:
            is_alone = OPPONENTS.taken < self._others
            self.alone_for = min(self.alone_for + self.since_lost, _LATELY) if is_alone else 0
            self.since_lost, self._others = 1, OPPONENTS.taken + 1
        elif self.since_lost:
            self.since_lost = min(self.since_lost + 1, _LATELY)
        lost, self._captured_lost = self._captured_lost, False
        return lost and self._may_be_a_game

    @property
    def _may_be_a_game(self) -> bool:
        return self.alone_for < _LATELY

    def learn(self, captured_lost: bool | None, *, alone: bool) -> None:
        """Takes in what has happened since the last step.

        Args:
            captured_lost: Whether captured gradients were thrown away; None: nobody has looked.
            alone: Whether there is one rank; several learn by :meth:`learn_of_ranks`.
        """
        if alone:
            self._judge(captured_lost, self._added_lost and self._may_be_a_game)
        OPPONENTS.step(self, opposes=self.is_seen)

    def signs(self, captured_lost: bool) -> Signs:
        """What this rank has to tell the others; ``captured_lost``: see :class:`Signs`."""
        return Signs(captured_lost, self._added_lost and self._may_be_a_game, OPPONENTS.exist_for(self))

    def learn_of_ranks(self, seen_by_all: Signs, *, looked: bool) -> None:
        """Takes in what all of several ranks have seen; ``looked``: whether this is not the very first step."""
        self._judge(seen_by_all.captured_lost if looked else None, seen_by_all.added_lost)
        self.all_see_opponents = seen_by_all.opponents
        OPPONENTS.note(self, opposes=self.is_seen)

    def _judge(self, captured_lost: bool | None, added_lost: bool) -> None:
        if captured_lost is not None:
            self.opposes, self.suspected = captured_lost and self.suspected, captured_lost
        self.throws, self._added_lost = (2 * self.throws + added_lost) & _THROWS, False

    def may_stretch(self, *, alone: bool) -> bool:
        """Whether steps may be stretched: it is known that no two networks train against each other.

        That is known in the second step that collects statistics. ``alone``: whether there is one rank.
        """
        if self.opposes is None or self.is_seen:
            return False
        return not (OPPONENTS.exist_for(self) if alone else self.all_see_opponents)

    def counters(self, *, captured: bool, served: bool, alone: bool) -> dict[str, float]:
        """Its part of the saved counters.

        Gradients are not saved. Whoever goes on from there has lost those of the passes since the last step.

        Args:
            captured: Whether some of them are captured.
            served: Whether others have trained through the network since, while it was frozen.
            alone: Whether there is one rank. Of several the state is the same, whatever each has seen since they last
                told each other: an opponent is taken to have lost gradients again.
        """
        return {
            "opposes": -1 if self.opposes is None else int(self.opposes),
            "suspected": int(self.suspected),
            "throws": self.throws,
            "captured_lost": int((captured or served or self._captured_lost) if alone else bool(self.opposes)),
            "added_lost": int(alone and (served or self._added_would_be_lost)),
            "all_see_opponents": int(self.all_see_opponents),
            "since_lost": self.since_lost if alone else 0,
            "alone_for": self.alone_for if alone else 0,
        }

    def load(self, counters: Mapping[str, Any]) -> None:
        """Restores saved counters."""
        known = {name: int(counters.get(name, each.start)) for name, each in self.COUNTERS.items()}
        self.opposes = None if known["opposes"] < 0 else bool(known["opposes"])
        self.suspected, self.throws, self._leftover = bool(known["suspected"]), known["throws"], None
        self._captured_lost, self._added_lost = bool(known["captured_lost"]), bool(known["added_lost"])
        self.all_see_opponents = bool(known["all_see_opponents"])
        self.since_lost, self.alone_for, self._others = known["since_lost"], known["alone_for"], OPPONENTS.taken
        OPPONENTS.resume(self, opposes=self.is_seen)

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle; the hook on the leftover gradient stays behind."""
        return {**self.__dict__, "_leftover": None, "_added_lost": self._added_would_be_lost}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _others=OPPONENTS.taken)
        OPPONENTS.resume(self, opposes=self.is_seen)

    def __deepcopy__(self, memo: dict[int, Any]) -> Opposition:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__getstate__(), _others=OPPONENTS.taken)
        OPPONENTS.copy(self, copied)
        return copied
