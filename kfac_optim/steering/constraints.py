"""Whether a training loop changes weights between two steps, as a projection (``clamp_``) does.

A projection may undo what a step has done along flat directions. The next gradient then still points that way, the
stretch seems to have been too short (:mod:`~.reach`), and stretches would grow without end. So what gradients
say of a stretch does not count where the weights are not those that the step has left. A layer of which that is found
twice in a row counts as constrained from then on: its reach stays where it began, and no step repeats its stretch.

Norms of the weights tell, in float64, after a step and before the next one: at first in every step, then in every
eighth. Ranks whose loops do the same find the same; one that has put other weights in for the time of an evaluation
finds nothing. Parts of sharded weights are not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import is_sharded

__all__ = ["WeightWatch", "compares_weights"]

_AT_FIRST, _INTERVAL = 16, 8  # steps in which all stretched weights are compared: so many, then one in so many


def compares_weights(step: int) -> bool:
    """Whether this step compares the stretched weights with what the last one has left."""
    return step < _AT_FIRST or step % _INTERVAL == 0


class WeightWatch:
    """Compares weights with what the last step has left. Copies and pickles know of no last step.

    Attributes:
        watched: The parameters that it compares.
    """

    def __init__(self) -> None:
        self.watched: list[nn.Parameter] = []
        self._norms: Sequence[Tensor] = ()

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step leaves these parameters as they are now."""
        self.watched = [p for p in parameters if not is_sharded(p)]
        self._norms = _norms(self.watched)

    def changes(self) -> Tensor | None:
        """1 for each of :attr:`watched` that has changed since, else 0, ``[n]``; None if there are none."""
        if not self.watched:
            return None
        device = self.watched[0].device
        left, now = (torch.stack([norm.to(device) for norm in norms]) for norms in (self._norms, _norms(self.watched)))
        # Numbers at once, as they are read with others: on a GPU a launch less.
        return torch.ne(left, now, out=now.new_empty(now.shape, dtype=torch.float32))

    def changed(self) -> Collection[nn.Parameter]:
        """Those that have changed since; waits for the device."""
        changes = self.changes()
        return () if changes is None else [p for p, c in zip(self.watched, changes.tolist(), strict=True) if c]

    def forget(self) -> None:
        """Takes the weights as they are for those that the last step left: a state has been loaded."""
        self.watched, self._norms = [], ()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightWatch, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightWatch:
        return WeightWatch()


def _norms(parameters: list[nn.Parameter]) -> Sequence[Tensor]:
    """The norm of each parameter, in float64, 0-dim."""
    return torch._foreach_norm([p.detach() for p in parameters], 2, dtype=torch.float64) if parameters else ()
