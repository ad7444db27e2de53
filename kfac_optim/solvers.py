"""Factor -> decomposition, and decompositions + damping + gradient -> preconditioned gradient.

Two solvers, both for stacks of ``p`` Kronecker pairs, ``V`` of shape ``[p, d_out, d_in]``:

    eigen    (paper, eqs. 11-13)  Q_G ((Q_G^T V Q_A) / (d_G d_A^T + gamma)) Q_A^T  =  (A (x) G + gamma I)^-1 V
    inverse  (paper, eqs. 8-10)   (G + sqrt(gamma)/pi I)^-1 V (A + pi sqrt(gamma) I)^-1

with ``pi^2 = mean eigenvalue(A) / mean eigenvalue(G)`` (Martens & Grosse 2015, section 6.3), a factored form of
the same Tikhonov damping. A diagonal factor is decomposed by its diagonal alone.

A decomposition is a tuple of tensors, so that any solver's results can be sent between ranks. Matrices in it are stored
in ``inv_dtype``, vectors and scalars (which carry the magnitude) in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Decomposition", "EigenSolver", "InverseSolver", "Solver", "decompose_safely"]

Decomposition = tuple[Tensor, ...]


class Solver(Protocol):
    """Anything with these methods can be passed as ``solver=``."""

    def shifts(self, gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the diagonals of A and of G before they are decomposed.

        Args:
            gamma: Damping of each pair, ``[p]``.
            mean_a: Mean eigenvalue of A of each pair, ``[p]``.
            mean_g: The same of G.

        Returns:
            The shifts of A and of G, ``[p]`` each.
        """
        ...

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors in the decomposition of one factor, without the leading ``p``."""
        ...

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """Decomposes ``factor + shift I``; the factor is ``[p, n, n]``, or ``[p, n]`` where diagonal.

        May raise ``torch.linalg.LinAlgError`` or return non-finite values; the engine then retries and falls back.
        """
        ...

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """The preconditioned gradient ``[p, d_out, d_in]``; ``gamma`` is ``[p]``."""
        ...


@dataclass(frozen=True)
class EigenSolver:
    """Eigendecomposition: exact Tikhonov damping of ``A (x) G``, which may change at every step. The default."""

    def shifts(self, gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
        """None: the damping enters when the gradient is preconditioned."""
        return torch.zeros_like(gamma), torch.zeros_like(gamma)

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """Eigenvalues and eigenvectors; of a diagonal factor eigenvalues alone."""
        return ((dim,),) if diagonal else ((dim,), (dim, dim))

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """``(eigenvalues [p, n],)`` of a diagonal factor, else ``(eigenvalues [p, n], eigenvectors [p, n, n])``."""
        if factor.dim() == 2:
            return (factor.clamp(min=0),)
        values, vectors = torch.linalg.eigh(factor)
        # A factor is positive semi-definite; what rounding pushes below zero would eat up the damping.
        return values.clamp_(min=0), vectors

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """Eqs. 11-13."""
        (values_a, *vectors_a), (values_g, *vectors_g) = a, g
        v = gradient
        for q in vectors_g:
            v = q.mT @ v
        for q in vectors_a:
            v = v @ q
        v = v / torch.addcmul(gamma[:, None, None], values_g[:, :, None], values_a[:, None, :])
        for q in vectors_g:
            v = q @ v
        for q in vectors_a:
            v = v @ q.mT
        return v


@dataclass(frozen=True)
class InverseSolver:
    """Explicit inverses by Cholesky: cheaper to compute and to apply; damping is factored and fixed at the refresh.

    Args:
        pi: True (default) splits the damping by the ratio of the factors' mean eigenvalues. False adds gamma to both
            factors, eqs. 9-10 of the paper to the letter.
    """

    pi: bool = True

    def shifts(self, gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
        """``pi sqrt(gamma)`` for A and ``sqrt(gamma) / pi`` for G; pi is 1 where a factor is zero."""
        if not self.pi:
            return gamma, gamma
        pi = torch.where((mean_a > 0) & (mean_g > 0), (mean_a / mean_g).sqrt(), 1.0)
        root = gamma.sqrt()
        return pi * root, root / pi

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """The inverse and its scale; of a diagonal factor the inverse alone."""
        return ((dim,),) if diagonal else ((dim, dim), ())

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """``(inverse [p, n],)`` of a diagonal factor, else ``(inverse / scale [p, n, n], scale [p])``.

        The scale, its largest entry, keeps the inverses of small factors within the range of half precision.
        """
        if factor.dim() == 2:
            return ((factor + shift[:, None]).reciprocal(),)
        damped = factor.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        scale = inverse.diagonal(dim1=-2, dim2=-1).amax(-1)
        return inverse / scale[:, None, None], scale

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """Eq. 8 with the damped inverses."""
        (a_inverse, *a_scale), (g_inverse, *g_scale) = a, g
        v = gradient * g_inverse[:, :, None] if g_inverse.dim() == 2 else g_inverse @ gradient
        v = v * a_inverse[:, None, :] if a_inverse.dim() == 2 else v @ a_inverse
        for scale in (*a_scale, *g_scale):
            v = v * scale[:, None, None]
        return v


def decompose_safely(solver: Solver, factor: Tensor, shift: Tensor) -> Decomposition | None:
    """Decomposes, and where that fails retries in float64, then on the CPU with jitter on the diagonal.

    Args:
        solver: The solver.
        factor: ``[p, n, n]`` or ``[p, n]``, float32 or float64.
        shift: ``[p]``.

    Returns:
        The decomposition in the factor's dtype and on its device, or None if every attempt failed.
    """
    attempts: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t.double(),
        lambda t: _jittered(t.double().cpu()),
    ]
    for attempt in attempts:
        try:
            input_ = attempt(factor)
            result = solver.decompose(input_, shift.to(input_))
        except RuntimeError:
            continue
        if all(bool(part.isfinite().all()) for part in result):
            return tuple(part.to(factor) for part in result)
    return None


def _jittered(factor: Tensor) -> Tensor:
    """A symmetrised copy with 1e-6 of its largest diagonal entry added to the diagonal."""
    if factor.dim() == 2:
        return factor
    factor = (factor + factor.mT) / 2
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(1e-6 * diagonal.abs().amax(-1, keepdim=True))
    return factor
