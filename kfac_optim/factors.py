"""Storage of Kronecker factors: one triangle of each symmetric matrix, packed.

A factor is a stack of ``p`` symmetric matrices (one per Kronecker pair; ``p = 1`` except for grouped layers) of which
one triangle is stored: ``[p, n (n + 1) / 2]``, or ``[p, n]`` for a diagonal factor. This halves memory, state and
traffic. If a factor is kept block-diagonal, its ``b`` blocks are such matrices, ``p b`` in all, so that code that
packs, sends or decomposes matrices need not know of blocks. ``averages.py`` updates the running averages.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from .common.tensor_cache import tensor_cache

_INDEXED = 1024  # matrices of up to so many rows are packed by an index, which is kept for each size
ELSEWHERE = (
    "is on another rank (this is the part of one rank of a state that is shared out: save full_state_dict(), or the "
    "parts of all ranks by torch.distributed.checkpoint)"
)


class Average(TypedDict, total=False):
    """A running average of a factor, as the state of its layer's weight holds it.

    Attributes:
        weight: The decayed count of the rows or terms in the average, 0-dim, float64; on the CPU, as reading it must
            not wait, and on every rank.
        trace: The factor's trace, likewise.
        value: The factor, packed; missing if another rank keeps it.
        scale: In float16, the largest entry of each matrix, ``[p b, 1]``, by which ``value`` is divided, because second
            moments of gradients lie below float16's range; missing in other types.
    """

    weight: Tensor
    trace: Tensor
    value: Tensor
    scale: Tensor


def pack(matrix: Tensor) -> Tensor:
    """Packs one triangle of symmetric matrices ``[..., n, n]`` into ``[..., n (n + 1) / 2]``.

    Rectangular full packed format (Gustavson et al. 2010, LAPACK Working Note 199): the triangle of the trailing half
    is folded into the empty corner beside the leading half. Packing then takes two block copies, each a single
    operation, and no index; small matrices are packed by an index, in one operation. The lower triangle of a 4 x 4
    matrix becomes::

        a00                      a22 a32
        a10 a11                  a00 a33
        a20 a21 a22        ->    a10 a11
        a30 a31 a32 a33          a20 a21
                                 a30 a31
    """
    n = matrix.shape[-1]
    if n <= _INDEXED:
        return matrix.flatten(-2).index_select(-1, _places(n, matrix.device))
    return _pack_by_blocks(matrix)


def _pack_by_blocks(matrix: Tensor) -> Tensor:
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


def _rectangle(n: int) -> tuple[int, int, int]:
    """The rows and columns of the rectangle that holds a packed triangle, and the row where its leading half starts.

    That first row is 1 for even n, so that both triangles fit, and 0 for odd n.
    """
    even = int(n % 2 == 0)
    return n + even, (n + 1) // 2, even


@tensor_cache(64)
def _upper(n: int, device: torch.device) -> Tensor:
    """The mask of the upper triangle of an ``n x n`` matrix; it takes an eighth of the bytes of the packed factor."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu()


@tensor_cache(64)
def _places(n: int, device: torch.device) -> Tensor:
    """Which entries of a flattened ``n x n`` matrix :func:`pack` takes; as large as a packed factor in float32."""
    return _pack_by_blocks(torch.arange(n * n, dtype=torch.int32, device=device).view(n, n))


@dataclass(frozen=True)
class FactorSpec:
    """The shape of a factor.

    Attributes:
        pairs: The number p of its matrices, one per Kronecker pair.
        dim: Their dimension n.
        diagonal: Whether only their diagonals are kept.
        blocks: The number b of equal blocks along the diagonal that are kept of each matrix; 1: all of it. Zeros fill
            up the last block if b does not divide n.
    """

    pairs: int
    dim: int
    diagonal: bool = False
    blocks: int = 1

    @property
    def matrices(self) -> int:
        """The number of stored matrices, p b."""
        return self.pairs * self.blocks

    @property
    def size(self) -> int:
        """How many rows m each stored matrix has, ``n / b`` rounded up."""
        return -(-self.dim // self.blocks)

    @property
    def packed_numel(self) -> int:
        """How many numbers are stored of the factor."""
        return self.matrices * (self.size if self.diagonal else self.size * (self.size + 1) // 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(p b, m, m)``, the shape of the unpacked factor, or ``(p, n)`` if diagonal."""
        return (self.matrices, self.size) if self.diagonal else (self.matrices, self.size, self.size)

    @property
    def cost(self) -> float:
        """The multiply-adds of a decomposition, up to a constant."""
        return float(self.matrices * (self.size if self.diagonal else self.size**3))

    def for_blocks(self, of_pairs: Tensor) -> Tensor:
        """Repeats a value per pair, ``[p]``, for each of the pair's blocks, ``[p b]``."""
        return of_pairs if self.blocks == 1 else of_pairs.repeat_interleave(self.blocks)

    def largest_of_blocks(self, of_blocks: Tensor) -> Tensor:
        """The largest of each pair's blocks, ``[p]``, from a value per block, ``[p b]``."""
        return of_blocks if self.blocks == 1 else of_blocks.unflatten(0, (self.pairs, self.blocks)).amax(1)

    def empty(self, dtype: torch.dtype, device: torch.device, *, kept: bool = True) -> Average:
        """A running average that has seen nothing yet; ``kept``: whether this rank keeps it, not another one."""
        weight, trace = (torch.zeros((), dtype=torch.float64, device="cpu") for _ in range(2))
        average: Average = {"weight": weight, "trace": trace}
        if not kept:
            return average
        average["value"] = self.zeros(dtype, device)
        if dtype is torch.float16:
            average["scale"] = torch.zeros(self.matrices, 1, dtype=torch.float32, device=device)
        return average

    def zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A packed factor of zeros."""
        return torch.zeros(self.matrices, self.packed_numel // self.matrices, dtype=dtype, device=device)

    def pack(self, moment: Tensor) -> Tensor:
        """Packs a moment ``[p b, m, m]`` (diagonal: ``[p, n]``, as it is)."""
        return moment if self.diagonal else pack(moment)

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return packed if self.diagonal else unpack(packed, self.size)

    def diagonals(self, packed: Tensor) -> list[Tensor]:
        """The diagonals of a packed factor, as views: one, or two for the two halves that :func:`pack` makes."""
        if self.diagonal:
            return [packed]
        step, *halves = self._halves
        matrices, stride, first = len(packed), packed.stride(0), packed.storage_offset()
        return [packed.as_strided((matrices, count), (stride, step), first + at) for at, count in halves]

    @functools.cached_property
    def _halves(self) -> tuple[int, tuple[int, int], tuple[int, int]]:
        """How far a packed diagonal's numbers are apart; where each of its halves begins, and how many these are."""
        _, cols, first_row = _rectangle(self.size)
        return cols + 1, (first_row * cols, cols), (1 - first_row, self.size - cols)

    def matrix(self, average: Average) -> Tensor:
        """Unpacks a running average: the factor ``[p b, m, m]`` (diagonal: ``[p, n]``), in at least float32."""
        return self.unpack(read(average))

    def mean_eigenvalue(self, average: Average) -> Tensor:
        """The mean eigenvalue of each pair of a running average, its trace divided by n: ``[p]``."""
        diagonal = torch.cat(self.diagonals(read(average)), -1)
        return diagonal.mean(-1) if self.blocks == 1 else diagonal.view(self.pairs, -1).sum(-1) / self.dim

    def problem(self, average: object, *, kept: bool) -> str:
        """What is wrong with a loaded running average, as the end of a sentence; empty if it has this shape.

        ``kept``: see :meth:`empty`.
        """
        parts = average if isinstance(average, dict) else {}
        value, weight, trace = parts.get("value"), parts.get("weight"), parts.get("trace")
        if not (isinstance(value, Tensor | None) and isinstance(weight, Tensor) and isinstance(trace, Tensor)):
            return "is missing"
        if value is None and kept:
            return ELSEWHERE
        if value is not None:
            shape = (self.matrices, self.packed_numel // self.matrices)
            if value.shape != shape:
                return f"has shape {tuple(value.shape)} instead of {shape}"
            if value.dtype is torch.float16 and getattr(parts.get("scale"), "shape", None) != (self.matrices, 1):
                return "is in float16, but has no scale"
        for name, number in (("weight", weight), ("trace", trace)):
            if number.dim() != 0 or not number >= 0:
                return f"has a {name} of {number}"
        if not all(isinstance(t, Tensor) and bool(t.isfinite().all()) for t in parts.values()):
            return "is not finite"
        if value is not None and kept and not bool(value.any()):
            # Torch's full_state_dict=True fills in what is not on this rank with the zeros of a fresh optimizer.
            least = torch.finfo(value.dtype).tiny * self.packed_numel  # less may round to 0
            return ELSEWHERE if trace > least else ""
        return ""


def read(average: Average) -> Tensor:
    """The packed factor of a running average, in at least float32."""
    value = average["value"]
    if value.dtype.itemsize < 4:
        value = value.to(torch.float32)
    return value * average["scale"] if "scale" in average else value


def write_(average: Average, value: Tensor) -> None:
    """Replaces the packed factor of a running average, in place; the inverse of :func:`read`."""
    if "scale" in average:
        scale = value.abs().amax(-1, keepdim=True)
        average["scale"].copy_(scale)
        value = value / torch.where(scale > 0, scale, 1.0)
    average["value"].copy_(value)


def copy_average_(target: Average, source: Average) -> None:
    """Copies a running average into another one of the same shape, in place; bit for bit if both have the same dtype.

    If another rank keeps the target, only weight and trace are copied.
    """
    if "value" in target and target["value"].dtype is not source["value"].dtype:
        write_(target, read(source))
    elif "value" in target:
        target["value"].copy_(source["value"])
        if "scale" in target:
            target["scale"].copy_(source["scale"])
    target["weight"].copy_(source["weight"])
    target["trace"].copy_(source["trace"])
