"""The inverse solver: explicit inverses of the damped factors (eqs. 8-10)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..damping import split
from .protocol import Decomposition


@dataclass(frozen=True)
class InverseSolver:
    """Explicit inverses by Cholesky, cheaper to compute and to apply; damping is factored, and fixed at each refresh.

    Args:
        pi: True (default) splits the damping by the ratio of the factors' mean eigenvalues. False adds gamma to both
            factors, exactly as eqs. 9-10 of the paper say.

    Raises:
        TypeError: If the argument is not a bool.
    """

    pi: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pi, bool):
            raise TypeError(f"InverseSolver(pi={self.pi!r}): must be True or False")

    def shifts(self, gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
        """``pi sqrt(gamma)`` for A and ``sqrt(gamma) / pi`` for G; pi is 1 where a factor is zero."""
        if not self.pi:
            return gamma, gamma
        return split(gamma, mean_a, mean_g)

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inverse and its scale; for a diagonal factor, of the inverse alone."""
        return ((dim,),) if diagonal else ((dim, dim), ())

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """``(inverse [p, n],)`` for a diagonal factor, else ``(inverse / scale [p, n, n], scale [p])``.

        The scale, the largest entry of the inverse, keeps inverses of small factors in the range of half precision.
        """
        if factor.dim() == 2:
            return ((factor + shift[:, None]).reciprocal(),)
        matrix = factor.clone()  # reusing one name frees each intermediate at once, which counts for large factors
        matrix.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
        matrix = torch.linalg.cholesky(matrix)
        matrix = torch.cholesky_inverse(matrix)
        scale = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)
        return matrix.div_(scale[:, None, None]), scale

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """Eq. 8 with the damped inverses."""
        (a_inverse, *a_scale), (g_inverse, *g_scale) = a, g
        v = gradient * g_inverse[:, :, None] if g_inverse.dim() == 2 else g_inverse @ gradient
        v = v * a_inverse[:, None, :] if a_inverse.dim() == 2 else v @ a_inverse
        for scale in (*a_scale, *g_scale):
            v = v * scale[:, None, None]
        return v
