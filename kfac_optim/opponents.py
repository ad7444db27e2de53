"""Networks that train against each other, as those of a GAN: none of them is stretched (:mod:`~kfac_optim.reach`).

A discriminator that trains faster wins at once, and the generator has nothing to learn from; a generator that trains
faster finds the discriminator's blind spots instead of the data. The discriminator is known by gradients that are
thrown away, those of the backward passes by which the generator trains. They are seen in two ways: what its layers had
captured is gone (:class:`~kfac_optim.capture.statistics.Taken`), and what a step has left in ``.grad`` has grown until
the optimizer clears it (:class:`Leftover`). Nothing tells of a generator. So an optimizer takes itself for an opponent
as long as such a network takes steps in the same process, between its own.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn

__all__ = ["OPPONENTS", "Leftover", "Opponents"]

_LATELY = 16  # steps of all optimizers of the process: several of one network may come before the next of the other


class Leftover:
    """What becomes of a gradient that a step has left in ``.grad``, as long as this object is held.

    Args:
        parameter: The parameter; it gets a hook.
        gradient: Its gradient after the step, held weakly.

    Attributes:
        has_grown: Whether another backward pass has added to it.
    """

    def __init__(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.has_grown = False
        if parameter.requires_grad:
            self._gradient, of_self = weakref.ref(gradient), weakref.ref(self)
            handle = parameter.register_post_accumulate_grad_hook(lambda p: _note(of_self, p))
            weakref.finalize(self, handle.remove)

    def look_at(self, parameter: Tensor) -> None:
        """A backward pass has added to the gradient of the parameter."""
        self.has_grown |= parameter.grad is not None and parameter.grad is self._gradient()


def _note(leftover: weakref.ref[Leftover], parameter: Tensor) -> None:
    known = leftover()
    if known is not None:
        known.look_at(parameter)


class Opponents:
    """Who has lately been seen to train against others; all of them are held weakly."""

    def __init__(self) -> None:
        self._steps = 0
        self._first_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._last_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def step(self, who: object, *, opposes: bool) -> None:
        """Somebody takes a step; ``opposes``: whether it is known to train against others."""
        self._steps += 1
        self._first_steps.setdefault(who, self._steps)
        self._note(who, opposes=opposes)

    def resume(self, who: object, *, opposes: bool) -> None:
        """Somebody goes on from a saved state.

        It counts as older than every step of this process, so that an opponent which is loaded beside it is seen.
        """
        self._first_steps[who] = -1
        self._note(who, opposes=opposes)

    def copy(self, who: object, copied: object) -> None:
        """Somebody was copied: the copy inherits its original's opponents, and its status as one."""
        for known in (self._first_steps, self._last_steps):
            if who in known:
                known[copied] = known[who]

    def _note(self, who: object, *, opposes: bool) -> None:
        if opposes:
            self._last_steps[who] = self._steps
        else:
            self._last_steps.pop(who, None)

    def are_there(self, who: object) -> bool:
        """Whether some network trains against others in these steps, and has since the first step of this one."""
        if not self._last_steps:
            return False
        first = self._first_steps.get(who, self._steps)
        return any(last > first and self._steps - last < _LATELY for last in list(self._last_steps.values()))


OPPONENTS = Opponents()  # of this process
