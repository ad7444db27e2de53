"""Whether a training loop changes weights between two steps, as a projection (``clamp_``) does.

A projection may undo what a step has done along flat directions. The next gradient then still points that way, so that
the stretch seems to have been too short (:mod:`~.reach`), and stretches would grow without end. So nothing is learned
from a stretch if the weights have been changed since the step. A layer whose weights are found changed twice in a row
counts as constrained from then on: its reach stays at its start value or below, and no step repeats its stretch. The
reach may fall, because what a mask leaves of a stretch need not be flat, and a gradient that has turned round along it
shows a wall, whatever was undone.

Changes are found by comparing a number for each parameter, its *mark*, after a step and before the next one: at first
in every step, then in every seventh. Ranks whose loops do the same find the same. A rank that puts other weights in for
an evaluation, and then the old ones back, finds no change. Sharded weights are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..blocks import Block
from ..distributed import is_sharded

_ROUNDING = 1e-12  # the relative error of sums of millions of squares in float64; of sums of bits, far less than 1
_AT_FIRST = 16  # all stretched weights are compared before this step, and then in one step of every _INTERVAL
# A prime that loops hardly use, so that what happens in every second step is found at times, and what averages weights
# in every fifth, eighth or tenth (Lookahead, periodic averages) is not found twice in a row, as constraints are.
_INTERVAL = 7
# A prime: doubling n float32 weights adds n * 2 ** 23 to a sum of bits, which may be 0 modulo a power of two.
_MODULUS = 2**31 - 1


def compares_weights(step: int) -> bool:
    """Whether this step checks that the stretched weights are as the last step left them."""
    return step < _AT_FIRST or step % _INTERVAL == 0


class WeightWatch:
    """Finds weights that were changed since the last step.

    Attributes:
        watched: The parameters whose weights are compared.
    """

    def __init__(self) -> None:
        self.watched: list[nn.Parameter] = []
        self._marks: Sequence[Tensor] = ()
        self._rounding = 0.0  # the relative difference between marks that counts as rounding

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Records these parameters as the step leaves them; only these are compared before the next step."""
        watched = [p for p in parameters if not is_sharded(p)]
        self._marks, self._rounding, self.watched = _marks_of(watched), 0.0, watched

    def marks(self) -> dict[nn.Parameter, float]:
        """The marks recorded after the last step, at least 0, to be saved; waits for the device."""
        return dict(zip(self.watched, map(float, self._marks), strict=True))

    def restore(self, marks: Mapping[nn.Parameter, float]) -> None:
        """Restores saved marks. Norms may have been computed on another processor, in another order of summation.

        On a device where marks are computed in the other way, the next comparison finds a change.
        """
        marks = {p: mark for p, mark in marks.items() if not is_sharded(p)}  # parameters may have been whole when saved
        self._marks = [torch.tensor(mark, dtype=torch.float64, device=p.device) for p, mark in marks.items()]
        self._rounding, self.watched = _ROUNDING, list(marks)

    def edits(self) -> Tensor | None:
        """1 for each of :attr:`watched` changed since the last step, else 0, ``[n]``; None if nothing is watched."""
        if not self.watched:
            return None
        device = self.watched[0].device
        left, now = (torch.stack([m.to(device) for m in marks]) for marks in (self._marks, _marks_of(self.watched)))
        if self._rounding:
            return ((left - now).abs() > self._rounding * left).float()
        # ``ne`` writes numbers, not bools, because they are read with others: on a GPU this saves a launch.
        return torch.ne(left, now, out=now.new_empty(now.shape, dtype=torch.float32))

    def learn(self, blocks: Iterable[Block], edits: Sequence[float]) -> set[nn.Parameter]:
        """Records in which layers weights were changed between two steps; ``edits``: :meth:`edits`, as read.

        Returns:
            The parameters of layers whose last stretch the training loop may have undone.
        """
        compared, undone = set(self.watched), set[nn.Parameter]()
        edited = {p for p, is_edited in zip(self.watched, edits, strict=True) if is_edited}
        for block in blocks:
            is_edited = bool(edited) and not edited.isdisjoint(block.layer.parameters)
            is_compared = compared and not compared.isdisjoint(block.layer.parameters)
            if is_compared and not block.is_constrained:  # once constrained, it stays so
                block.set_learned(changes=block.learned("changes") + 1 if is_edited else 0)
            if is_edited or block.is_constrained:
                undone.update(block.layer.parameters)
        return undone


def _marks_of(parameters: Sequence[nn.Parameter]) -> Sequence[Tensor]:
    """The mark of each parameter, 0-dim: the sum of its weights' bits modulo a prime, or its norm in float64."""
    weights = [p.detach() for p in parameters]
    if all(w.is_cpu and w.dtype == torch.float32 for w in weights):  # there, norms in float64 take ten times as long
        return [_bits_of(w).sum(dtype=torch.int64).remainder(_MODULUS) for w in weights]
    return torch._foreach_norm(weights, 2, dtype=torch.float64)


def _bits_of(weight: Tensor) -> Tensor:
    """The bits of float32 numbers as integers; where they lie so, of two in each int64, as sums of int32 are slower."""
    in_pairs = weight.is_contiguous() and weight.numel() % 2 == 0 and weight.storage_offset() % 2 == 0
    return weight.view(-1).view(torch.int64) if in_pairs else weight.view(torch.int32)
