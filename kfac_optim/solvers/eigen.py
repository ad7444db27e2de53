"""The eigen solver: Tikhonov damping of ``A (x) G`` itself (eqs. 11-13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.checks import require_number
from ..common.machines import is_asynchronous
from .protocol import Decomposition, Sides

# How far the squared length of a row of Q may be from 1. Rounding causes far less (1e-5 at 4,608 rows in float32); an
# eigenvector that appears twice, once in the place of another, causes more than 1 / n.
_ORTHONORMAL = 1e-4
# GPUs decompose matrices with this many rows by Jacobi's method if they are in float32. It has returned vectors that
# are not orthonormal, and takes three times as long as another method does in float64.
_JACOBI_ROWS = range(32, 513)
# The number of eigenvectors that are kept is a multiple of this, or all: on a CPU ``v Q`` with 16 columns takes a third
# of its time with 9, and with 32 half of that with 31. GPUs want aligned columns as well.
_COLUMNS = 16
_ROWS = 512  # that are multiplied at once where a matrix has many more


@dataclass(frozen=True)
class EigenSolver:
    """Eigendecomposition: Tikhonov damping of ``A (x) G`` itself, which may change at every step. The default.

    Args:
        negligible: Truncation threshold, in [0, 1). An eigenvalue of A or G whose products with all eigenvalues of the
            other factor are at most ``negligible * gamma`` counts as zero, and its eigenvector is left out of the
            products of eqs. 11-13. No component of the direction changes by more than this share. Default 0.01: in the
            paper's mode a transformer's ordinary step then takes 1.08 times SGD's instead of 1.35 ("What a step costs"
            in docs/results/costs.rst). 0: exact.

    Raises:
        TypeError: If the argument is not a number.
        ValueError: If it is out of range.
    """

    negligible: float = 0.01
    damps_factors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_number("negligible", self.negligible, "in [0, 1)", lambda x: 0 <= x < 1, owner="EigenSolver")

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """The shapes of eigenvalues and eigenvectors; for a diagonal factor, of eigenvalues alone."""
        return ((dim,),) if diagonal else ((dim,), (dim, dim))

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """``(eigenvalues [p, n],)`` for a diagonal factor, else ``(eigenvalues [p, n], eigenvectors [p, n, n])``."""
        if factor.dim() == 2:
            return (factor.clamp(min=0),)
        if factor.shape[-1] == 1:
            return factor[:, 0].clamp(min=0), torch.ones_like(factor)
        values, vectors = _eigh_of_two_rows(factor) if factor.shape[-1] == 2 else _eigh(factor)
        # A factor is positive semi-definite; eigenvalues that rounding makes negative would cancel the damping.
        return values.clamp_(min=0), vectors

    def decompose_padded(self, factors: Sequence[Tensor]) -> list[Decomposition]:
        """Pads factors ``[p, n, n]`` of different n and decomposes them in one call, for which the host waits once."""
        sizes, pairs = [factor.shape[-1] for factor in factors], [len(factor) for factor in factors]
        whole = torch.cat([_padded(factor, max(sizes)) for factor in factors])
        values, vectors = (part.split(pairs) for part in self.decompose(whole, whole.new_zeros(())))
        return [(d[:, -n:], q[:, :n, -n:]) for d, q, n in zip(values, vectors, sizes, strict=True)]

    def largest(self, decomposition: Decomposition) -> Tensor:
        """The largest eigenvalue of each pair, ``[p]``."""
        return decomposition[0].amax(-1)

    def is_valid(self, decomposition: Decomposition) -> Tensor:
        """Whether the eigenvectors are orthonormal, judged by the diagonal of ``Q Q^T``; a 0-dim bool.

        GPU libraries have returned others without an error. The diagonal takes one pass over Q and no matrix product.
        Where a subclass has left some eigenvectors out, ``Q^T Q`` is computed.
        """
        values, *vectors = decomposition
        if not vectors:
            return values.new_ones((), dtype=torch.bool)
        q = vectors[0]
        if values.shape[-1] < q.shape[-2]:
            error = q.mT @ q - torch.eye(values.shape[-1], dtype=q.dtype, device=q.device)
        else:
            error = torch.linalg.vector_norm(q, dim=-1).square() - 1
        return error.abs().amax() < _ORTHONORMAL

    def count_relevant(self, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """How many eigenvalues of A and of G are not negligible in some pair, ``[2]``; does not wait for the device."""
        of_a, of_g = self._limits(a, g, gamma)
        return torch.stack([_count_above(a, of_a), _count_above(g, of_g)])

    def relevant(self, a: Decomposition, g: Decomposition, gamma: Tensor, counts: Sequence[int]) -> Sides:
        """The parts of both decompositions that matter, for ``precondition``; negligible eigenvalues in them are 0.

        ``counts`` are those of :meth:`count_relevant`; up to 15 more are kept, as zeros. The result of a pair does not
        depend on other pairs in the stack.
        """
        of_a, of_g = self._limits(a, g, gamma)
        return _largest(a, of_a, counts[0]), _largest(g, of_g, counts[1])

    def _limits(self, a: Decomposition, g: Decomposition, gamma: Tensor) -> list[Tensor]:
        """The limits above which eigenvalues of A and of G matter, ``[p b]`` for b blocks."""
        limit, found = self.negligible * gamma, []
        for own, other in ((a, g), (g, a)):
            of_pairs = limit / other[0].reshape(len(limit), -1).amax(-1)
            # Unlike repeat_interleave(), this launches nothing where factors are whole.
            found.append(of_pairs[:, None].expand(-1, len(own[0]) // len(limit)).flatten())
        return found

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """Eqs. 11-13 for one stack; ``joint.py`` computes them for all stacks at once, on GPUs.

        Eigenvectors that were left out have an eigenvalue of zero. ``(A (x) G + gamma I)^-1`` then is ``I / gamma``,
        except for a correction in the span of the eigenvectors that were kept.
        """
        if gradient.stride(-1) > gradient.stride(-2):  # a transpose: (A (x) G) V is (G (x) A) V^T, transposed
            return EigenSolver.precondition(self, gradient.mT, g, a, gamma).mT  # not once more that of a subclass
        (values_a, *vectors_a), (values_g, *vectors_g) = a, g
        gamma = gamma.view(-1, 1, 1)
        damped = torch.addcmul(gamma, values_g.unsqueeze(2), values_a.unsqueeze(1))
        whole = damped.shape[-2:] == gradient.shape[-2:]
        sides, v = in_order(vectors_g, vectors_a), gradient
        for q, left in sides:
            v = torch.bmm(q.mT, v) if left else _times(v, q)
        v = v / damped if whole else (v / damped).addcdiv_(v, gamma, value=-1)
        for q, left in reversed(sides):
            v = torch.bmm(q, v) if left else _times(v, q.mT)
        return v if whole else v.addcdiv_(gradient, gamma)


def in_order(vectors_g: Sequence[Tensor], vectors_a: Sequence[Tensor]) -> list[tuple[Tensor, bool]]:
    """The eigenvectors to multiply by, in the cheaper of the two orders, each with whether it multiplies from the left.

    Args:
        vectors_g: The kept eigenvectors of G, ``[p, d_out, k]``; empty if G is diagonal.
        vectors_a: Those of A, ``[p, d_in, k]``, likewise.
    """
    sides = [*((q, True) for q in vectors_g), *((q, False) for q in vectors_a)]
    if len(sides) == 2:
        (d_out, kept_out), (d_in, kept_in) = (q.shape[-2:] for q, _ in sides)
        if kept_out * d_in * (d_out + kept_in) > d_out * kept_in * (d_in + kept_out):
            sides.reverse()
    return sides


def _times(v: Tensor, q: Tensor) -> Tensor:
    """``v q``; on a CPU in blocks of rows: 30,000 rows of 129 columns then take little more than half the time."""
    if len(v) > 1 or v.shape[1] < 8 * _ROWS or is_asynchronous(v.device):
        return torch.bmm(v, q)
    product = v.new_empty(1, v.shape[1], q.shape[2])
    for rows, out in zip(v.split(_ROWS, 1), product.split(_ROWS, 1), strict=True):
        torch.bmm(rows, q, out=out)
    return product


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, smallest first, and eigenvectors of symmetric matrices ``[p, n, n]``."""
    slow = matrices.device.type == "cuda" and matrices.shape[-1] in _JACOBI_ROWS
    values, vectors = torch.linalg.eigh(matrices.double() if slow else matrices)
    return values.to(matrices), vectors.to(matrices)


def _padded(factor: Tensor, size: int) -> Tensor:
    """Factors ``[p, n, n]`` as the first rows and columns of larger matrices ``[p, size, size]``.

    The other rows are zero except for the diagonal, so that no eigenvector mixes them with the factor's. That diagonal
    is negative, so that its eigenvalues come first and those of the factor last.
    """
    n = factor.shape[-1]
    if n == size:
        return factor
    largest = factor.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    whole = F.pad(factor, (0, size - n, 0, size - n))
    whole.diagonal(dim1=-2, dim2=-1)[:, n:] = -largest.clamp(min=torch.finfo(factor.dtype).tiny)
    return whole


def _eigh_of_two_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`_eigh` in closed form for 2 x 2 matrices, of which norm layers have one for each channel."""
    (a, b), (_, d) = (row.unbind(-1) for row in matrix.unbind(-2))
    mean, radius = (a + d) / 2, torch.hypot((a - d) / 2, b)
    angle = torch.atan2(2 * b, a - d) / 2
    sine, cosine = angle.sin(), angle.cos()
    vectors = torch.stack([torch.stack([-sine, cosine], -1), torch.stack([cosine, sine], -1)], -1)
    return torch.stack([mean - radius, mean + radius], -1), vectors


def _count_above(side: Decomposition, limit: Tensor) -> Tensor:
    """How many eigenvalues exceed the limit ``[p]`` in some pair; all for a diagonal factor, which leaves none out."""
    values, *vectors = side
    if not vectors:
        return values.new_full((), values.shape[-1], dtype=torch.int64)
    return (values > limit[:, None]).any(0).sum()


def _largest(side: Decomposition, limit: Tensor, count: int) -> Decomposition:
    """The ``count`` largest eigenvalues, or a few more, and their eigenvectors; values below a pair's limit are 0."""
    values, *vectors = side
    n = values.shape[-1]
    if not vectors or (count == n and len(values) == 1):
        return side
    part = slice(max(0, n - math.ceil(count / _COLUMNS) * _COLUMNS), None)
    values = values[:, part]
    return values * (values > limit[:, None]), *(q[..., part] for q in vectors)
