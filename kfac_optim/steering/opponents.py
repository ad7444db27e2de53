"""Finds networks that train against each other, such as those of a GAN, and leaves their steps to the base optimizers.

Such steps are neither stretched (:mod:`~.reach`) nor turned (:mod:`~.trust`). Nothing is learned from them, and a
refresh that falls due waits for the end of the game, for which statistics look.

A discriminator that trains faster wins at once, and leaves the generator nothing to learn from; a generator that trains
faster finds the discriminator's blind spots instead of the data. A discriminator is recognised by gradients that are
thrown away: those of the backward passes by which the generator trains (:mod:`kfac_optim.capture.signs`). A generator
has no such signs. So an optimizer counts as an opponent while a discriminator takes steps between its own, in one
process.

A single network may throw gradients away, too: those that make adversarial examples, or the first ones of SAM. But a
game has two optimizers. So these gradients count only if another optimizer, of any kind, has lately taken a step
between those of this one.

Several ranks tell each other what they have seen in the steps that collect statistics, and only what all of them have
seen counts: a game on one rank must not decide the steps of the others.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..capture import GameSigns
from ..common.counters import Counted, Counter, counter
from ..placement import Ranks

_LATELY = 16  # steps: one network may take several before the other takes one
_THROWS = 2**16 - 1  # all bits of ``throws``, one for each step that it remembers


class Opponents:
    """The optimizers of a process that have lately been seen to train against others, kept by weak references.

    Attributes:
        taken: The number of finished steps of all optimizers of the process, torch's own included. A step inside which
            another one was taken, as by a SAM that wraps its base optimizer, does not count; the inner one does.
    """

    def __init__(self) -> None:
        self.taken = self._steps = 0
        self._begun: dict[int, int] = {}  # by id, because optimizers of other classes need not be hashable
        self._first_steps, self._last_steps = (weakref.WeakKeyDictionary[object, int]() for _ in range(2))

    def begin(self, who: object) -> None:
        """Called when a step of any optimizer begins."""
        self._begun[id(who)] = self.taken

    def end(self, who: object) -> None:
        """Called when a step of any optimizer has ended."""
        if self._begun.pop(id(who), self.taken) == self.taken:  # none was taken inside it
            self.taken += 1

    def step(self, who: object, *, is_opponent: bool) -> None:
        """Counts a step of an optimizer; ``is_opponent``: whether it is known to train against others."""
        self._steps += 1
        self._first_steps.setdefault(who, self._steps)
        self.note(who, is_opponent=is_opponent)

    def resume(self, who: object, *, is_opponent: bool) -> None:
        """Registers an optimizer that goes on from a saved state.

        It counts as older than every step of this process, so that an opponent loaded beside it is seen.
        """
        self._first_steps[who] = -1
        self.note(who, is_opponent=is_opponent)

    def copy(self, who: object, copied: object) -> None:
        """Registers a copy of an optimizer, which inherits the original's opponents and its status as an opponent."""
        for steps in (self._first_steps, self._last_steps):
            if who in steps:
                steps[copied] = steps[who]

    def note(self, who: object, *, is_opponent: bool) -> None:
        """Records whether an optimizer is known to train against others."""
        if is_opponent:
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


class Game(Counted, captured_lost=Counter(False, 1), added_lost=Counter(False, 1)):  # kept by signs
    """Whether the network of one optimizer trains against another one.

    Attributes:
        opposes: Whether captured gradients were thrown away before both of the last two steps that collected
            statistics; assumed of the very first one, before which nobody looks. None until there have been two.
        suspected: Whether gradients were thrown away before the last of these steps. A step that was skipped, because
            its gradients had overflowed for instance, does not make the network an opponent.
        throws: One bit for each of the last 16 steps, the latest lowest: whether, before that step, gradients were
            thrown away that had been added to those which the step before it had left. Any two set bits make an
            opponent, because the network may take several steps per step of the other. With several ranks, only steps
            in which they report have a bit.
        all_see_opponents: With several ranks, whether all of them knew, at their last reports, of other networks that
            train against each other.
        since_lost: The number of steps since gradients were last thrown away, at most 16. The first step after that
            has 1. 0: none have been thrown away yet.
        alone_for: How many steps this optimizer had taken in a row, with none of any other in between, when gradients
            were last thrown away, at most 16. At 16 thrown-away gradients no longer count.
    """

    opposes: bool | None = counter(None, 1)
    suspected: bool = counter(True, 1)
    throws: int = counter(0, _THROWS)
    all_see_opponents: bool = counter(False, 1)
    since_lost: int = counter(0, _LATELY)
    alone_for: int = counter(0, _LATELY)

    def __init__(self, ranks: Ranks, signs: GameSigns) -> None:
        super().__init__()
        self._ranks, self._signs = ranks, signs
        self._captured: bool | None = None  # whether captured gradients were thrown away before this step
        self._added = False  # whether added gradients were thrown away since signs were last judged
        self._taken_if_alone = OPPONENTS.taken  # had nobody else taken a step since gradients were last thrown away

    def begin_step(self, step: int, *, collects: bool) -> None:
        """Takes what :class:`.GameSigns` noted since the last step, even if this changes nothing.

        Args:
            step: The number of earlier steps. Before the first step, a loss is often tried out and its gradients are
                thrown away.
            collects: Whether the step collects statistics. Else it is not known whether captured gradients were lost.
        """
        captured, added = self._signs.take()
        self._added |= added
        self._taken_if_alone += 1  # keeps pace with OPPONENTS.taken, which counts this step when it ends
        if captured or self._added:
            is_alone = OPPONENTS.taken < self._taken_if_alone
            self.alone_for = min(self.alone_for + self.since_lost, _LATELY) if is_alone else 0
            self.since_lost, self._taken_if_alone = 1, OPPONENTS.taken + 1
        elif self.since_lost:
            self.since_lost = min(self.since_lost + 1, _LATELY)
        self._captured = captured and self.alone_for < _LATELY if collects and step > 0 else None

    def recover(self) -> None:
        """Called after an exception in a step. That step did not count; nor do those of others up to now."""
        self._taken_if_alone = OPPONENTS.taken

    def learn(self) -> None:
        """Learns from what was seen before this step, which is not skipped; several ranks do by :meth:`hear`."""
        if self._ranks.alone:
            self._judge(*self._seen)
        OPPONENTS.step(self, is_opponent=self.is_opponent)

    def report(self) -> list[bool]:
        """What this rank reports to the others: both signs, and whether other networks train against each other."""
        return [*map(bool, self._seen), OPPONENTS.exist_for(self)]

    def hear(self, reports: Sequence[int]) -> None:
        """Learns from the reports of several ranks; ``reports``: how many of them have set each flag."""
        if not self._ranks.alone:
            captured, added, self.all_see_opponents = (ranks == self._ranks.comm.world_size for ranks in reports)
            self._judge(None if self._captured is None else captured, added)
            OPPONENTS.note(self, is_opponent=self.is_opponent)

    @property
    def _seen(self) -> tuple[bool | None, bool]:
        """Whether captured gradients and added ones were thrown away, perhaps by the other one of two optimizers."""
        return self._captured, self._added and self.alone_for < _LATELY

    def _judge(self, captured: bool | None, added: bool) -> None:
        if captured is not None:
            self.opposes, self.suspected = captured and self.suspected, captured
        self.throws, self._added = (2 * self.throws + added) & _THROWS, False

    @property
    def is_opponent(self) -> bool:
        """Whether the network is known to train against another one."""
        return self.opposes or self.throws.bit_count() > 1

    @property
    def is_on(self) -> bool | None:
        """Whether networks, this one or others, are known to train against each other.

        None: that is not known yet, before the second step that collects statistics.
        """
        if self.is_opponent or (OPPONENTS.exist_for(self) if self._ranks.alone else self.all_see_opponents):
            return True
        return None if self.opposes is None else False

    def counters(self) -> dict[str, float]:
        """The counters to save.

        Several ranks save the same, whatever each has seen since their last reports: an opponent counts as having
        thrown gradients away again.
        """
        own = super().counters()
        if not self._ranks.alone:
            return {**own, "captured_lost": int(bool(self.opposes)), "added_lost": 0, "since_lost": 0, "alone_for": 0}
        captured, added = self._signs.if_resumed
        return {**own, "captured_lost": int(captured), "added_lost": int(added or self._added)}

    def load(self, counters: Mapping[str, Any]) -> None:
        """Restores saved counters."""
        super().load(counters)
        self._added, self._taken_if_alone = False, OPPONENTS.taken
        captured, added = (bool(counters.get(name)) for name in ("captured_lost", "added_lost"))
        self._signs.restore(captured=captured, added=added)
        OPPONENTS.resume(self, is_opponent=self.is_opponent)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _taken_if_alone=OPPONENTS.taken)
        OPPONENTS.resume(self, is_opponent=self.is_opponent)

    def __deepcopy__(self, memo: dict[int, Any]) -> Game:
        copied = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo), _taken_if_alone=OPPONENTS.taken)
        OPPONENTS.copy(self, copied)
        return copied
