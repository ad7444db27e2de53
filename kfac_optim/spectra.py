"""Eigenvalues of factors: all of them for reports, the largest for damping that is relative to it."""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT_DIM = 64  # up to this dimension all eigenvalues are computed to find the largest
_LANCZOS_STEPS = 32
_ROUNDINGS = 100  # the iteration has converged when the remainder is below this many rounding errors


def eigenvalues(factor: Tensor) -> Tensor:
    """All eigenvalues of a factor ``[p, n, n]`` or ``[p, n]``, largest first, ``[p n]``, on the CPU; NaN: not found."""
    values = factor.cpu() if factor.dim() == 2 else _all_eigenvalues(factor.cpu())
    return values.flatten().sort(descending=True).values.clamp_(min=0)  # only rounding makes any negative


def largest_eigenvalue(factor: Tensor) -> Tensor:
    """The largest eigenvalue of positive semi-definite matrices ``[p, n, n]``, or of diagonals ``[p, n]``: ``[p]``.

    Above 64 rows this is a Lanczos iteration with full reorthogonalisation (Golub & Van Loan, Matrix Computations,
    section 10.3) from a fixed vector, so that every rank and every resumed run finds the same number.
    """
    if factor.dim() == 2:
        return factor.amax(-1)
    n = factor.shape[-1]
    if n <= _EXACT_DIM:
        return _largest_of_small(factor)
    start = torch.randn(n, generator=torch.Generator().manual_seed(0), device="cpu").to(factor)
    q = (start / start.norm()).expand(len(factor), n)
    basis, diagonal, off_diagonal, scale = [q], [], [], factor.new_zeros(len(factor))
    for _ in range(_LANCZOS_STEPS):
        image = (factor @ q[..., None])[..., 0]
        diagonal.append((q * image).sum(-1))
        scale = torch.maximum(scale, image.norm(dim=-1))
        known = torch.stack(basis, -1)
        for _ in range(2):  # a single pass loses orthogonality when the iteration has converged
            image = image - (known @ (known.mT @ image[..., None]))[..., 0]
        length = image.norm(dim=-1)
        # The remainder is then rounding error, which would not be orthogonal to the basis once normalised.
        converged = length <= _ROUNDINGS * torch.finfo(factor.dtype).eps * scale
        off_diagonal.append(torch.where(converged, 0.0, length))
        q = torch.where(converged[:, None], 0.0, image / length.clamp(min=torch.finfo(factor.dtype).tiny)[:, None])
        basis.append(q)
    off = torch.stack(off_diagonal[:-1], -1)
    tridiagonal = torch.stack(diagonal, -1).diag_embed() + off.diag_embed(1) + off.diag_embed(-1)
    return _largest_of_small(tridiagonal)


def _all_eigenvalues(matrix: Tensor) -> Tensor:
    """All eigenvalues, computed in float64 if float32 does not converge; NaN if neither does."""
    for dtype in (matrix.dtype, torch.float64):
        try:
            return torch.linalg.eigvalsh(matrix.to(dtype)).to(matrix.dtype)
        except RuntimeError:  # a report must not end training, which goes on even without a decomposition
            continue
    return torch.full_like(matrix[..., 0], torch.nan)


def _largest_of_small(matrix: Tensor) -> Tensor:
    """The exact largest eigenvalue of small matrices; if that fails, Gershgorin's upper bound on it."""
    try:
        return torch.linalg.eigvalsh(matrix)[..., -1].clamp(min=0)
    except RuntimeError:  # a decomposition never ends training
        return matrix.abs().sum(-1).amax(-1)
