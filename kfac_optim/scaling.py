"""Direction -> scaled direction: kl_clip (eq. 16), unit, graft.

A scaling sees all preconditioned layers of a step at once, those of one shape stacked, and returns one multiplier per
stack: a scalar, or ``[p]`` for its ``p`` Kronecker pairs. Everything stays on the device; nothing is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .schedules import Schedule, value_at

__all__ = ["Direction", "Graft", "KLClip", "Scaling", "Unit"]


@dataclass(frozen=True)
class Direction:
    """What a scaling knows of a stack of layers of one shape.

    Attributes:
        direction: ``[p, d_out, d_in]``, the preconditioned matrices (bias as the last column).
        gradient: The matrices that were preconditioned, the same shape.
        lr: Learning rates, a number or a tensor that broadcasts: weights and biases may be in different groups.
        units: For norm layers, whose pairs are one unit: the number of the unit that each pair belongs to, ``[p]``.
            None where every pair is one of its own.
    """

    direction: Tensor
    gradient: Tensor
    lr: Tensor | float
    units: Tensor | None = None

    def norm(self, matrix: Tensor) -> Tensor:
        """Frobenius norm of the unit that each pair belongs to, ``[p]``."""
        norms = torch.linalg.matrix_norm(matrix)
        return norms if self.units is None else self._over_units(norms.square()).sqrt()

    @property
    def pairs(self) -> Tensor | int:
        """How many pairs make up the unit that each pair belongs to, ``[p]`` or 1."""
        return 1 if self.units is None else self._over_units(torch.ones_like(self.direction[:, 0, 0]))

    def _over_units(self, values: Tensor) -> Tensor:
        assert self.units is not None
        return torch.zeros_like(values).index_add(0, self.units, values)[self.units]


class Scaling(Protocol):
    """Anything with this method can be passed as ``scaling=``."""

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """One multiplier per stack, 0-dim or ``[p]``; finite for zero gradients and zero learning rates."""
        ...


def _ratio(numerator: Tensor | float, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and 0 where the denominator is 0 (a zero direction stays zero)."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


@dataclass(frozen=True)
class KLClip:
    """Eq. 16: one scalar ``nu = min(1, sqrt(kappa / sum_layers lr^2 |<v, grad>|))`` for all layers.

    Args:
        kappa: Bound on the (second-order estimate of the) KL divergence of a step, > 0; a number or a function of the
            step. Default 1e-3, as the paper.

    Raises:
        TypeError: If kappa is neither a number nor callable.
        ValueError: If it is not positive and finite.
    """

    kappa: Schedule[float] = 1e-3
    needs_lr: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.kappa):
            self._check(self.kappa)

    @staticmethod
    def _check(kappa: object) -> None:
        if isinstance(kappa, bool) or not isinstance(kappa, (int, float)):
            raise TypeError(f"KLClip(kappa={kappa!r}): must be a number > 0 or a callable(step)")
        if not 0 < kappa < math.inf:
            raise ValueError(f"KLClip(kappa={kappa!r}): must be > 0, or a callable(step)")

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        if not directions:
            return []
        kappa = value_at(self.kappa, step)
        self._check(kappa)
        products = [(d.direction * d.gradient * (d.lr * d.lr)).sum().abs() for d in directions]
        total = torch.stack([product.to(products[0]) for product in products]).sum()
        nu = torch.where(total > 0, kappa / total, 1.0).sqrt().clamp(max=1.0)
        return [nu.to(d.direction) for d in directions]


@dataclass(frozen=True)
class Unit:
    """Each pair's direction gets the norm of a semi-orthogonal update, ``sqrt(min(d_out, d_in) max(1, d_out / d_in))``.

    ``lr`` then has the units of Muon's (0.01 to 0.05) and one value serves all layers; every global scale of the loss
    or of G drops out. The pairs of a norm layer together get ``sqrt(C)``.
    """

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        return [_ratio(self.target(d), d.norm(d.direction)) for d in directions]

    @staticmethod
    def target(d: Direction) -> Tensor | float:
        """The norm that a direction is brought to, a number or ``[p]``."""
        _, d_out, d_in = d.direction.shape
        pairs = d.pairs
        return (min(d_out, d_in) * max(1.0, d_out / d_in)) ** 0.5 if isinstance(pairs, int) else pairs.sqrt()


@dataclass(frozen=True)
class Graft:
    """Each pair's direction gets the norm of the matrix that was preconditioned: the base optimizer's step length."""

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        return [_ratio(d.norm(d.gradient), d.norm(d.direction)) for d in directions]
