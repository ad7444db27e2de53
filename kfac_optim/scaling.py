"""Direction -> scaled direction: kl_clip (eq. 16), unit, graft.

A scaling sees all preconditioned layers of a step at once and returns one multiplier per layer: a scalar, or ``[p]``
for the ``p`` Kronecker pairs of a grouped layer. Everything stays on the device; nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Direction", "Graft", "KLClip", "Scaling", "Unit"]


@dataclass(frozen=True)
class Direction:
    """What a scaling knows of a layer.

    Attributes:
        direction: ``[p, d_out, d_in]``, the preconditioned matrix (bias as the last column).
        gradient: The matrix that was preconditioned, the same shape.
        lr: Learning rates of the columns, ``[d_in]`` or a number: weight and bias may be in different groups.
        joint: The pairs are one unit (norm layers) rather than separate layers (groups of a convolution).
    """

    direction: Tensor
    gradient: Tensor
    lr: Tensor | float
    joint: bool

    def norm(self, matrix: Tensor) -> Tensor:
        """Frobenius norm of each pair, ``[p]``, or of all pairs together where they are joint, 0-dim."""
        return torch.linalg.vector_norm(matrix) if self.joint else torch.linalg.matrix_norm(matrix)


class Scaling(Protocol):
    """Anything with this method can be passed as ``scaling=``."""

    def multipliers(self, directions: Sequence[Direction]) -> list[Tensor]:
        """One multiplier per layer, 0-dim or ``[p]``; finite for zero gradients and zero learning rates."""
        ...


def _ratio(numerator: Tensor | float, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and 0 where the denominator is 0 (a zero direction stays zero)."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


@dataclass(frozen=True)
class KLClip:
    """Eq. 16: one scalar ``nu = min(1, sqrt(kappa / sum_layers lr^2 |<v, grad>|))`` for all layers.

    Args:
        kappa: Bound on the (second-order estimate of the) KL divergence of a step, > 0. Default 1e-3, as the paper.
    """

    kappa: float = 1e-3

    def multipliers(self, directions: Sequence[Direction]) -> list[Tensor]:
        """See :class:`Scaling`."""
        if not directions:
            return []
        products = [(d.direction * d.gradient * (d.lr * d.lr)).sum().abs() for d in directions]
        total = torch.stack([product.to(products[0]) for product in products]).sum()
        nu = torch.where(total > 0, self.kappa / total, 1.0).sqrt().clamp(max=1.0)
        return [nu.to(d.direction) for d in directions]


@dataclass(frozen=True)
class Unit:
    """Each pair's direction gets the norm of a semi-orthogonal update, ``sqrt(min(d_out, d_in) max(1, d_out / d_in))``.

    ``lr`` then has the units of Muon's (0.01 to 0.05) and one value serves all layers; every global scale of the loss
    or of G drops out. The pairs of a norm layer together get ``sqrt(C)``.
    """

    def multipliers(self, directions: Sequence[Direction]) -> list[Tensor]:
        """See :class:`Scaling`."""
        return [_ratio(self.target(d), d.norm(d.direction)) for d in directions]

    @staticmethod
    def target(d: Direction) -> float:
        """The norm that a direction is brought to."""
        pairs, d_out, d_in = d.direction.shape
        return pairs**0.5 if d.joint else (min(d_out, d_in) * max(1.0, d_out / d_in)) ** 0.5


@dataclass(frozen=True)
class Graft:
    """Each pair's direction gets the norm of the matrix that was preconditioned: the base optimizer's step length."""

    def multipliers(self, directions: Sequence[Direction]) -> list[Tensor]:
        """See :class:`Scaling`."""
        return [_ratio(d.norm(d.gradient), d.norm(d.direction)) for d in directions]
