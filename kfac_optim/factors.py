"""Storage of Kronecker factors: one triangle of each symmetric matrix, packed.

A factor is a stack of ``p`` symmetric matrices (one per Kronecker pair; ``p = 1`` except for grouped layers) of which
one triangle is stored: ``[p, n (n + 1) / 2]``, or ``[p, n]`` for a diagonal factor. This halves memory, state and
traffic. How the running averages are updated is in ``averages.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FactorSpec", "pack", "packed_diagonal", "read", "snapshot_", "unpack", "write_"]


def pack(matrix: Tensor) -> Tensor:
    """Packs one triangle of symmetric matrices ``[..., n, n]`` into ``[..., n (n + 1) / 2]``.

    Rectangular full packed format (Gustavson et al. 2010, LAPACK Working Note 199): the triangle of the trailing half
    is folded into the empty corner beside the leading half. Packing is then two block copies, an operation each, and
    needs no index. The lower triangle of a 4 x 4 matrix becomes::

        a00                      a22 a32
        a10 a11                  a00 a33
        a20 a21 a22        ->    a10 a11
        a30 a31 a32 a33          a20 a21
                                 a30 a31
    """
    n = matrix.shape[-1]
    rows, cols, first_row = _rectangle(n)
    rectangle = matrix.new_empty(*matrix.shape[:-2], rows, cols)
    leading, corner = rectangle[..., first_row:, :], rectangle[..., : n - cols, 1 - first_row :]
    torch.tril(matrix[..., :cols], out=leading)
    torch.where(_upper(n - cols, matrix.device), matrix[..., cols:, cols:], corner, out=corner)
    return rectangle.flatten(-2)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack`: gives the symmetric matrices ``[..., n, n]``."""
    rows, cols, first_row = _rectangle(n)
    rectangle = packed.unflatten(-1, (rows, cols))
    matrix = packed.new_zeros(*packed.shape[:-1], n, n)
    matrix[..., :, :cols] = rectangle[..., first_row : first_row + n, :].tril()
    matrix[..., cols:, cols:] = rectangle[..., : n - cols, 1 - first_row :].triu().mT
    return matrix.add_(matrix.tril(-1).mT)


def packed_diagonal(packed: Tensor, n: int) -> Tensor:
    """The diagonals ``[..., n]`` of packed matrices ``[..., n (n + 1) / 2]``, without unpacking them."""
    rows, cols, first_row = _rectangle(n)
    rectangle = packed.unflatten(-1, (rows, cols))
    leading, trailing = rectangle[..., first_row:, :], rectangle[..., 1 - first_row :]
    return torch.cat([part.diagonal(dim1=-2, dim2=-1) for part in (leading, trailing)], -1)


def _rectangle(n: int) -> tuple[int, int, int]:
    """The rows and columns of the rectangle that holds a packed triangle, and the row where its leading half starts.

    That first row is 1 for even n, so that both triangles fit, and 0 for odd n.
    """
    even = int(n % 2 == 0)
    return n + even, (n + 1) // 2, even


@functools.lru_cache(maxsize=64)
def _upper(n: int, device: torch.device) -> Tensor:
    """The upper triangle of an ``n x n`` matrix, as booleans: an eighth of the bytes of the factor that it packs."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu()


@dataclass(frozen=True)
class FactorSpec:
    """The shape of a factor.

    Attributes:
        pairs: The number p of its matrices, one per Kronecker pair.
        dim: Their dimension n.
        diagonal: Whether only their diagonals are kept.
    """

    pairs: int
    dim: int
    diagonal: bool = False

    @property
    def packed_numel(self) -> int:
        """How many numbers are stored of the factor."""
        return self.pairs * (self.dim if self.diagonal else self.dim * (self.dim + 1) // 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(p, n, n)``, the shape of the unpacked factor, or ``(p, n)`` if diagonal."""
        return (self.pairs, self.dim) if self.diagonal else (self.pairs, self.dim, self.dim)

    @property
    def cost(self) -> float:
        """The multiply-adds of a decomposition, up to a constant."""
        return float(self.pairs * (self.dim if self.diagonal else self.dim**3))

    def empty(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """A running average that has seen nothing yet.

        Returns:
            ``value``: the factor, packed. ``weight``: the decayed count of the rows or terms in it, 0-dim, float64, on
            the CPU so that reading it never waits for a device. In float16 also ``scale``: the largest entry of each
            pair, ``[p, 1]``, by which ``value`` is divided, because second moments of gradients lie below float16's
            range.
        """
        average = {"value": self.zeros(dtype, device), "weight": torch.zeros((), dtype=torch.float64)}
        if dtype is torch.float16:
            average["scale"] = torch.zeros(self.pairs, 1, dtype=torch.float32, device=device)
        return average

    def zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A packed factor of zeros."""
        return torch.zeros(self.pairs, self.packed_numel // self.pairs, dtype=dtype, device=device)

    def pack(self, moment: Tensor) -> Tensor:
        """Packs a moment ``[p, n, n]`` (diagonal: ``[p, n]``, as it is)."""
        return moment if self.diagonal else pack(moment)

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return packed if self.diagonal else unpack(packed, self.dim)

    def matrix(self, average: dict[str, Tensor]) -> Tensor:
        """Unpacks a running average: the factor ``[p, n, n]`` (diagonal: ``[p, n]``), in at least float32."""
        return self.unpack(read(average))

    def mean_eigenvalue(self, average: dict[str, Tensor]) -> Tensor:
        """The mean eigenvalue of each pair of a running average, its trace divided by n: ``[p]``."""
        value = read(average)
        return (value if self.diagonal else packed_diagonal(value, self.dim)).mean(-1)

    def problem(self, average: object) -> str:
        """Why a loaded object is no running average of this shape, as the end of a sentence; empty if it is one."""
        if not isinstance(average, dict) or not all(
            isinstance(average.get(key), Tensor) for key in ("value", "weight")
        ):
            return "is missing"
        shape = (self.pairs, self.packed_numel // self.pairs)
        if average["value"].shape != shape:
            return f"has shape {tuple(average['value'].shape)} instead of {shape}"
        if average["weight"].dim() != 0 or not float(average["weight"]) >= 0:
            return f"has a weight of {average['weight']}"
        if not all(bool(tensor.isfinite().all()) for tensor in average.values()):
            return "is not finite"
        return ""


def read(average: dict[str, Tensor]) -> Tensor:
    """The packed factor of a running average, in at least float32."""
    value = average["value"].to(torch.promote_types(average["value"].dtype, torch.float32))
    return value * average["scale"] if "scale" in average else value


def write_(average: dict[str, Tensor], value: Tensor) -> None:
    """Replaces the packed factor of a running average, in place; the inverse of :func:`read`."""
    if "scale" in average:
        scale = value.abs().amax(-1, keepdim=True)
        average["scale"].copy_(scale)
        value = value / torch.where(scale > 0, scale, 1.0)
    average["value"].copy_(value)


def snapshot_(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Copies a running average into another one of the same shape, in place."""
    for key, tensor in source.items():
        if key == "weight":
            target[key] = tensor.clone()
        else:
            target[key].copy_(tensor)
