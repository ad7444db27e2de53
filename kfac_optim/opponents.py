"""Networks that train against each other, as those of a GAN: none of them is stretched (:mod:`~kfac_optim.reach`).

A discriminator that trains faster wins at once, and the generator has nothing to learn from; a generator that trains
faster finds the discriminator's blind spots instead of the data. The discriminator is known by gradients that are
thrown away, those of the backward passes by which the generator trains. Nothing tells of a generator. So an optimizer
takes itself for an opponent as long as such a network takes steps in the same process, between its own.
"""

from __future__ import annotations

import weakref

__all__ = ["OPPONENTS", "Opponents"]

_LATELY = 16  # steps of all optimizers of the process: several of one network may come before the next of the other


class Opponents:
    """Who has lately been seen to train against others."""

    def __init__(self) -> None:
        self._steps = 0
        self._last_steps: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def step(self, who: object, *, opposes: bool) -> None:
        """Somebody takes a step; ``opposes``: whether it is known to train against others."""
        self._steps += 1
        if opposes:
            self._last_steps[who] = self._steps
        else:
            self._last_steps.pop(who, None)

    def are_there(self) -> bool:
        """Whether some network trains against others in these steps."""
        return any(self._steps - last < _LATELY for last in self._last_steps.values())


OPPONENTS = Opponents()  # of this process
