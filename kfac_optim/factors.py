"""Running averages of Kronecker factors, in packed storage.

A factor is a stack of ``p`` symmetric matrices (one per Kronecker pair; ``p = 1`` but for grouped layers) of which one
triangle is stored: shape ``[p, n (n + 1) / 2]``, or ``[p, n]`` for a diagonal factor. Packed storage halves memory,
state and traffic.

Each running average is two sums, value and weight (eqs. 14-15 of the paper without their initial bias):

    S <- xi S + sum of the new moments,   w <- xi w + their count,   factor = S / w.

What is stored is the quotient S / w and w, which is the same algebra and keeps half precision from overflowing. There
is no identity initialisation and so nothing to correct; unequal batches are weighted exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FactorSpec", "fold_", "pack", "read", "snapshot_", "unpack"]


def pack(matrix: Tensor) -> Tensor:
    """One triangle of symmetric matrices ``[..., n, n]`` as ``[..., n (n + 1) / 2]``.

    Rectangular full packed format (Gustavson et al. 2010, LAPACK Working Note 199): the triangle of the trailing half
    is folded into the empty corner beside the leading half, so that packing is two block copies and needs no index.
    """
    n = matrix.shape[-1]
    rows, cols, shift = _rectangle(n)
    rectangle = matrix.new_zeros(*matrix.shape[:-2], rows, cols)
    rectangle[..., shift : shift + n, :] = matrix[..., :, :cols].tril()
    rectangle[..., : n - cols, 1 - shift :] += matrix[..., cols:, cols:].triu()
    return rectangle.flatten(-2)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack`: symmetric matrices ``[..., n, n]``."""
    rows, cols, shift = _rectangle(n)
    rectangle = packed.unflatten(-1, (rows, cols))
    matrix = packed.new_zeros(*packed.shape[:-1], n, n)
    matrix[..., :, :cols] = rectangle[..., shift : shift + n, :].tril()
    matrix[..., cols:, cols:] = rectangle[..., : n - cols, 1 - shift :].triu().mT
    return matrix + matrix.tril(-1).mT


def _rectangle(n: int) -> tuple[int, int, int]:
    """Rows and columns of the rectangle that holds a packed triangle, and the row where its leading half starts."""
    even = int(n % 2 == 0)
    return n + even, (n + 1) // 2, even


@dataclass(frozen=True)
class FactorSpec:
    """Shape of a factor: ``pairs`` matrices of ``dim x dim``, or their diagonals."""

    pairs: int
    dim: int
    diagonal: bool = False

    @property
    def packed_numel(self) -> int:
        """Stored numbers of one running average."""
        return self.pairs * (self.dim if self.diagonal else self.dim * (self.dim + 1) // 2)

    @property
    def cost(self) -> float:
        """Multiply-adds of a decomposition, up to a constant."""
        return float(self.pairs * (self.dim if self.diagonal else self.dim**3))

    def empty(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """A running average that has seen nothing.

        Returns:
            ``value`` (packed), ``weight`` (0-dim, float64, on the CPU, so that reading it never waits for a device)
            and, in float16 only, ``scale``: the largest entry of each pair, by which ``value`` is divided, because
            second moments of gradients lie below float16's range.
        """
        average = {
            "value": torch.zeros(self.pairs, self.packed_numel // self.pairs, dtype=dtype, device=device),
            "weight": torch.zeros((), dtype=torch.float64),
        }
        if dtype is torch.float16:
            average["scale"] = torch.zeros(self.pairs, 1, dtype=torch.float32, device=device)
        return average

    def pack(self, moment: Tensor) -> Tensor:
        """A moment ``[p, n, n]`` (diagonal: ``[p, n]``) in packed form."""
        return moment if self.diagonal else pack(moment)

    def matrix(self, average: dict[str, Tensor]) -> Tensor:
        """The factor ``[p, n, n]`` (diagonal: ``[p, n]``) of a running average, in at least float32."""
        value = read(average)
        return value if self.diagonal else unpack(value, self.dim)

    def mean_eigenvalue(self, average: dict[str, Tensor]) -> Tensor:
        """Trace divided by dimension of each pair, ``[p]``."""
        matrix = self.matrix(average)
        return (matrix if self.diagonal else matrix.diagonal(dim1=-2, dim2=-1)).mean(-1)

    def problem(self, average: object) -> str:
        """What keeps a loaded object from being a running average of this shape; empty if nothing."""
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
    """The packed factor ``S / w`` in at least float32."""
    value = average["value"].to(torch.promote_types(average["value"].dtype, torch.float32))
    return value * average["scale"] if "scale" in average else value


def fold_(average: dict[str, Tensor], moment: Tensor, count: float, decay: float) -> None:
    """Folds new data into a running average, in place: ``S <- xi S + moment``, ``w <- xi w + count``.

    Args:
        average: As made by :meth:`FactorSpec.empty`.
        moment: Packed sum of the new data.
        count: How many rows or loss terms the sum holds; 0 leaves the average as it is.
        decay: xi, weight of the past.
    """
    if count == 0:
        return
    past = decay * float(average["weight"])
    weight = past + count
    value = average["value"]
    if value.dtype in (torch.float16, torch.bfloat16):
        _write_(average, read(average).mul_(past / weight).add_(moment, alpha=1 / weight))
    else:
        value.mul_(past / weight).add_(moment, alpha=1 / weight)
    average["weight"] = torch.tensor(weight, dtype=torch.float64)


def _write_(average: dict[str, Tensor], value: Tensor) -> None:
    if "scale" in average:
        scale = value.abs().amax(-1, keepdim=True)
        average["scale"].copy_(scale)
        value = value / torch.where(scale > 0, scale, 1.0)
    average["value"].copy_(value)


def snapshot_(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    """Copies a running average into another one of the same shape."""
    for key, tensor in source.items():
        if key == "weight":
            target[key] = tensor.clone()
        else:
            target[key].copy_(tensor)
