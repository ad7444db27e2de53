"""The directions of a step, with all that a scaling knows about the layers: together, and stack by stack."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from .matrices import Matrices
from .pairs import Groups, inner, norm, ratio


@dataclass(frozen=True)
class Steepest:
    """The numbers that turn a scaled direction into ``(L + gamma) P m``.

    Attributes:
        multipliers: ``(L + gamma) / s``, ``[pairs]``, with the largest eigenvalue L of ``A (x) G`` and the product s of
            all scales that the direction has been multiplied by since eqs. 11-13. If the solver damps A and G apart,
            the product of their largest damped eigenvalues takes the place of ``L + gamma``.
        contrast: ``(L + gamma) / gamma``: how many times more the steepest components are damped than the flattest.
    """

    multipliers: Tensor
    contrast: float


@dataclass(frozen=True)
class Direction:
    """What a scaling knows about a stack of layers of one shape.

    The matrices of embeddings and transformers' ``Conv1D`` are transposes of contiguous tensors, as their weights are.

    Attributes:
        direction: The preconditioned matrices, ``[p, d_out, d_in]`` (bias as the last column).
        moment: The matrices m that were preconditioned (first moments or gradients), of the same shape.
        update: The base optimizer's own update from them, per unit of the learning rate, of the same shape.
        lr: The learning rate: a number, or a tensor that broadcasts to that shape if weights and biases have different
            rates.
        groups: For norm layers, whose pairs (channels) are scaled together: which pairs belong to one layer. None:
            every pair is scaled on its own.
    """

    direction: Tensor
    moment: Tensor
    update: Tensor
    lr: Tensor | float
    groups: Groups | None = None

    def inner(self, one: Tensor, other: Tensor) -> Tensor:
        """For each pair, the inner product of two matrices over all pairs scaled with it, ``[p]``."""
        return inner(one, other, self.groups)

    def norm(self, matrix: Tensor) -> Tensor:
        """For each pair, the Frobenius norm of ``matrix [p, d_out, d_in]`` over all pairs scaled with it, ``[p]``."""
        return norm(matrix, self.groups)


class Stacked(Sequence[Direction]):
    """The directions of a step. As a sequence it has a :class:`Direction` for each stack.

    Args:
        directions: The preconditioned matrices ``P m``.
        moments: The matrices m that were preconditioned (first moments or gradients).
        updates: The base optimizer's own updates u from them, per unit of the learning rate; the same object as
            ``moments`` if each update is what was preconditioned.
        lr: The learning rate of each stack; see :class:`Direction`.
        steepest: Relates the directions to their unscaled form; None if damping is not relative to the largest
            eigenvalue.
    """

    def __init__(
        self,
        directions: Matrices,
        moments: Matrices,
        updates: Matrices,
        lr: Sequence[Tensor | float],
        steepest: Steepest | None,
    ) -> None:
        self.directions, self.moments, self.updates = directions, moments, updates
        self.lr, self.steepest = lr, steepest

    @classmethod
    def of(cls, each: Sequence[Direction]) -> Stacked:
        """A sequence of directions as ``Stacked``: itself if it is one already."""
        if isinstance(each, Stacked):
            return each
        groups = [d.groups for d in each]
        k, m, u = (Matrices([getattr(d, name) for d in each], groups) for name in ("direction", "moment", "update"))
        return cls(k, m, u, [d.lr for d in each], None)

    def __len__(self) -> int:
        return len(self.directions.tensors)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        k, m, u = (of.tensors[index] for of in (self.directions, self.moments, self.updates))
        return Direction(k, m, u, self.lr[index], self.directions.groups[index])

    def replaced(self, directions: Matrices, steepest: Steepest | None) -> Stacked:
        """The same moments and updates with other directions, and with what relates these to their unscaled form."""
        found = copy(self)
        found.directions, found.steepest = directions, steepest
        return found

    def times(self, multipliers: Tensor) -> Stacked:
        """The directions, each pair's multiplied by its multiplier, ``[pairs]``."""
        steepest = self.steepest
        if steepest is not None:
            steepest = Steepest(ratio(steepest.multipliers, multipliers), steepest.contrast)
        return self.replaced(self.directions.times(multipliers), steepest)

    @cached_property
    def update_norms(self) -> Tensor:
        """The norm of each pair's update, ``[pairs]``."""
        return self.updates.norms()

    @cached_property
    def projections(self) -> Tensor:
        """The coefficient ``c = <u, m> / <m, m>`` of the base's update u projected on m, at least 0, ``[pairs]``."""
        lengths = self.moments.norms()
        return ratio(self.updates.inners(self.moments), lengths * lengths).clamp_min(0)
