"""Finds networks that train against each other, such as those of a GAN, and leaves their steps to the base optimizers.

Such steps are neither stretched (:mod:`~.reach`) nor turned (:mod:`~.trust`). Nothing is learned from them, and a
refresh that falls due waits for the end of the game, for which statistics look.

A discriminator that trains faster wins at once, and leaves the generator nothing to learn from; a generator that trains
faster finds the discriminator's blind spots instead of the data. A discriminator is recognised by gradients that are
thrown away: those of the backward passes by which the generator trains. They are seen in two ways: what its layers had
captured is dropped (:meth:`Opposition.note_captured_lost`), or the gradients that a step left in ``.grad`` have grown
by the time the optimizer clears them (:class:`Leftover`). A discriminator that is frozen for these passes gets no
gradients; then the passes themselves are seen (:mod:`kfac_optim.capture.frozen_passes`). A generator has no such signs.
So an optimizer counts as an opponent while a discriminator takes steps between its own, in one process.

A single network may throw gradients away, too: those that make adversarial examples, or the first ones of SAM. But a
game has two optimizers. So these gradients count only if another optimizer, of any kind, has lately taken a step
between those of this one.

Several ranks tell each other what they have seen in the steps that collect statistics, and only what all of them have
seen counts: a game on one rank must not decide the steps of the others.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..counters import Counter

__all__ = ["OPPONENTS", "Leftover", "Opponents", "Opposition", "Signs"]

_LATELY = 16  # steps: one network may take several before the other takes one
_THROWS = 2**16 - 1  # all bits of ``throws``, one for each step that it remembers
_NUMBERS = itertools.count(1)


class Leftover:
    """Watches whether a later backward pass adds to a gradient that ``step()`` has left in ``.grad``.

    It watches for as long as somebody holds a reference to it.

    Args:
        parameter: The parameter; it gets a hook.
        gradient: Its gradient after the step, which gets a number as an attribute. No reference to the gradient is
            kept, not even a weak one: torch could not swap it then, as ``model.to()`` does under
            ``torch.__future__.set_swap_module_params_on_conversion(True)``. Attributes are swapped as well.

    Attributes:
        has_grown: Whether another backward pass has added to the gradient.
    """

    def __init__(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.has_grown = False
        if parameter.requires_grad:
            self._number, of_self = next(_NUMBERS), weakref.ref(self)
            gradient._kfac_left = self._number  # type: ignore[attr-defined]
            handle = parameter.register_post_accumulate_grad_hook(lambda p: _note(of_self, p))
            # Not in __del__: when a cycle is collected, the handle has lost its hooks by then.
            weakref.finalize(self, handle.remove)

    def on_gradient_added(self, parameter: Tensor) -> None:
        """Called when a backward pass has added to the gradient of the parameter."""
        self.has_grown |= getattr(parameter.grad, "_kfac_left", 0) == self._number


def _note(leftover: weakref.ref[Leftover], parameter: Tensor) -> None:
    known = leftover()
    if known is not None:
        known.on_gradient_added(parameter)


class Opponents:
    """The optimizers of a process that have lately been seen to train against others, kept by weak references.

    Attributes:
        taken: The number of finished steps of all optimizers of the process, torch's own included. A step inside which
            another one was taken, as by a SAM that wraps its base optimizer, does not count; the inner one does.
    """

    def __init__(self) -> None:
        self.taken = self._steps = 0
        self._begun: dict[int, int] = {}  # by id, because optimizers of other classes need not be hashable
        self._first_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._last_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def begin(self, who: object) -> None:
        """Called when a step of any optimizer begins."""
        self._begun[id(who)] = self.taken

    def end(self, who: object) -> None:
        """Called when a step of any optimizer has ended."""
        self.taken += self._begun.pop(id(who), self.taken) == self.taken

    def step(self, who: object, *, opposes: bool) -> None:
        """Counts a step of an optimizer; ``opposes``: whether the optimizer is known to train against others."""
        self._steps += 1
        self._first_steps.setdefault(who, self._steps)
        self.note(who, opposes=opposes)

    def resume(self, who: object, *, opposes: bool) -> None:
        """Registers an optimizer that goes on from a saved state.

        It counts as older than every step of this process, so that an opponent loaded beside it is seen.
        """
        self._first_steps[who] = -1
        self.note(who, opposes=opposes)

    def copy(self, who: object, copied: object) -> None:
        """Registers a copy of an optimizer, which inherits the original's opponents and its status as an opponent."""
        for known in (self._first_steps, self._last_steps):
            if who in known:
                known[copied] = known[who]

    def note(self, who: object, *, opposes: bool) -> None:
        """Records whether an optimizer is known to train against others."""
        if opposes:
            self._last_steps[who] = self._steps
        else:
            self._last_steps.pop(who, None)

    def exist_for(self, who: object) -> bool:
        """Whether another optimizer trained against others in the last 16 steps, and after this one's first step."""
        if not self._last_steps:
            return False
        first = self._first_steps.get(who, self._steps)
        others = [last for other, last in list(self._last_steps.items()) if other is not who]
        return any(last > first and self._steps - last < _LATELY for last in others)


OPPONENTS = Opponents()  # of this process
# Not compiled: else a compiled step of any optimizer would be compiled anew whenever these numbers change.
register_optimizer_step_pre_hook(_disable_dynamo(lambda who, *_: OPPONENTS.begin(who)))
register_optimizer_step_post_hook(_disable_dynamo(lambda who, *_: OPPONENTS.end(who)))


@dataclass(frozen=True)
class Signs:
    """Signs of a game that were seen since the ranks last told each other of them.

    Attributes:
        captured_lost: Whether captured gradients were thrown away before this step.
        added_lost: Whether gradients were thrown away that had been added to those left in ``.grad`` by a step.
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
            its gradients had overflowed for instance, does not make the network an opponent.
        throws: One bit for each of the last 16 steps, the latest lowest: whether gradients were cleared before the step
            that had been added to those of the step before. Any two set bits make an opponent, because the network may
            take several steps per step of the other. With several ranks, only steps in which they report have a bit.
        all_see_opponents: With several ranks, whether all of them knew, at their last reports, of other networks that
            train against each other.
        since_lost: The number of steps since gradients were last thrown away, at most 16. The first step after that
            has 1. 0: none have been thrown away yet.
        alone_for: How many steps this optimizer had taken, with none of any other in between, when gradients were last
            thrown away, at most 16; at 16 thrown-away gradients no longer count.
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
        self._taken_if_alone = OPPONENTS.taken  # had nobody else taken a step since gradients were last thrown away
        self._leftover: Leftover | None = None
        # Whether gradients were thrown away since the last step: captured ones, and ones added to that step's.
        self._captured_lost = self._added_lost = False

    @property
    def is_opponent(self) -> bool:
        """Whether the network is known to train against another one."""
        return bool(self.opposes) or self.throws.bit_count() > 1

    def note_left(self, gradients: Mapping[nn.Parameter, Tensor] | None) -> None:
        """Starts to watch the gradients that a step leaves in ``.grad``; None or empty: there are none."""
        self._leftover = Leftover(*next(iter(gradients.items()))) if gradients else None

    def note_clearing(self) -> None:
        """Records, before gradients are cleared, whether others were added to those that the step had left."""
        self._added_lost = self._added_would_be_lost
        self._leftover = None  # clearing gradients a second time throws nothing away

    @property
    def _added_would_be_lost(self) -> bool:
        """Whether gradients would be thrown away if they were cleared now; see :meth:`note_clearing`."""
        return self._added_lost or (self._leftover is not None and self._leftover.has_grown)

    def recover(self) -> None:
        """Called after an exception in a step. That step did not count; nor do those of others up to now."""
        self._taken_if_alone = OPPONENTS.taken

    def note_captured_lost(self) -> None:
        """Records that captured gradients are thrown away."""
        self._captured_lost = True

    def note_served(self) -> None:
        """Records that the network was frozen since the last step while others trained through it.

        Both kinds of gradients count as thrown away: the network may take several steps per step of the other.
        """
        self._captured_lost = self._added_lost = True

    def take_captured_lost(self) -> bool:
        """Whether captured gradients were thrown away in a game before this step; counts the step, even if skipped."""
        self._taken_if_alone += 1  # keeps pace with OPPONENTS.taken, which counts this step when it ends
        if self._captured_lost or self._added_lost:
            is_alone = OPPONENTS.taken < self._taken_if_alone
            self.alone_for = min(self.alone_for + self.since_lost, _LATELY) if is_alone else 0
            self.since_lost, self._taken_if_alone = 1, OPPONENTS.taken + 1
        elif self.since_lost:
            self.since_lost = min(self.since_lost + 1, _LATELY)
        lost, self._captured_lost = self._captured_lost, False
        return lost and self._may_be_a_game

    @property
    def _may_be_a_game(self) -> bool:
        return self.alone_for < _LATELY

    def learn(self, captured_lost: bool | None, *, alone: bool) -> None:
        """Learns from what has happened since the last step.

        Args:
            captured_lost: Whether captured gradients were thrown away; None: that is not known.
            alone: Whether there is only one rank; several ranks learn by :meth:`learn_of_ranks`.
        """
        if alone:
            self._judge(captured_lost, self._added_lost and self._may_be_a_game)
        OPPONENTS.step(self, opposes=self.is_opponent)

    def signs(self, captured_lost: bool) -> Signs:
        """What this rank reports to the others; ``captured_lost``: see :class:`Signs`."""
        return Signs(captured_lost, self._added_lost and self._may_be_a_game, OPPONENTS.exist_for(self))

    def learn_of_ranks(self, seen_by_all: Signs, *, looked: bool) -> None:
        """Learns from what all of several ranks have seen; ``looked``: whether this is not the very first step."""
        self._judge(seen_by_all.captured_lost if looked else None, seen_by_all.added_lost)
        self.all_see_opponents = seen_by_all.opponents
        OPPONENTS.note(self, opposes=self.is_opponent)

    def _judge(self, captured_lost: bool | None, added_lost: bool) -> None:
        if captured_lost is not None:
            self.opposes, self.suspected = captured_lost and self.suspected, captured_lost
        self.throws, self._added_lost = (2 * self.throws + added_lost) & _THROWS, False

    def may_stretch(self, *, alone: bool) -> bool:
        """Whether steps may be stretched: no networks are known to train against each other.

        Before the second step that collects statistics they may not. ``alone``: whether there is only one rank.
        """
        if self.opposes is None or self.is_opponent:
            return False
        return not (OPPONENTS.exist_for(self) if alone else self.all_see_opponents)

    def counters(self, *, captured: bool, served: bool, alone: bool) -> dict[str, float]:
        """The counters to save.

        Gradients are not saved, so a resumed run has lost those of the passes since the last step.

        Args:
            captured: Whether some of these gradients are captured.
            served: Whether others have trained through the network since the last step, while it was frozen.
            alone: Whether there is only one rank. Several ranks save the same, whatever each has seen since their last
                reports: an opponent counts as having thrown gradients away again.
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
        self.since_lost, self.alone_for, self._taken_if_alone = known["since_lost"], known["alone_for"], OPPONENTS.taken
        OPPONENTS.resume(self, opposes=self.is_opponent)

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle; the hook on the leftover gradient stays behind."""
        return {**self.__dict__, "_leftover": None, "_added_lost": self._added_would_be_lost}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _taken_if_alone=OPPONENTS.taken)
        OPPONENTS.resume(self, opposes=self.is_opponent)

    def __deepcopy__(self, memo: dict[int, Any]) -> Opposition:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__getstate__(), _taken_if_alone=OPPONENTS.taken)
        OPPONENTS.copy(self, copied)
        return copied
