"""Running averages of Kronecker factors, in packed storage.

A factor is a stack of ``p`` symmetric matrices (one per Kronecker pair; ``p = 1`` but for grouped layers) of which one
triangle is stored: shape ``[p, n (n + 1) / 2]``, or ``[p, n]`` for a diagonal factor. Packed storage halves memory,
state and traffic.

Each running average is two sums, value and weight (eqs. 14-15 of the paper without their initial bias)::

    S <- xi S + sum of the new moments,   w <- xi w + their count,   factor = S / w.

What is stored is the quotient S / w and w, which is the same algebra and keeps half precision from overflowing. There
is no identity initialisation and so nothing to correct; unequal batches are weighted exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FactorSpec", "LocalSums", "fold_", "pack", "packed_diagonal", "read", "snapshot_", "unpack"]

_STRIP = 128  # rows that are packed at once: large factors are what most memory is needed for


def pack(matrix: Tensor) -> Tensor:
    """One triangle of symmetric matrices ``[..., n, n]`` as ``[..., n (n + 1) / 2]``.

    Rectangular full packed format (Gustavson et al. 2010, LAPACK Working Note 199): the triangle of the trailing half
    is folded into the empty corner beside the leading half, so that packing is two block copies and needs no index.
    """
    n = matrix.shape[-1]
    rows, cols, shift = _rectangle(n)
    rectangle = matrix.new_zeros(*matrix.shape[:-2], rows, cols)
    corner, trailing = rectangle[..., : n - cols, 1 - shift :], matrix[..., cols:, cols:]
    for row in range(0, n, _STRIP):
        strip = slice(row, row + _STRIP)
        rectangle[..., row + shift : row + shift + _STRIP, :] = matrix[..., strip, :cols].tril(row)
        corner[..., strip, :] += trailing[..., strip, :].triu(row)
    return rectangle.flatten(-2)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack`: symmetric matrices ``[..., n, n]``."""
    rows, cols, shift = _rectangle(n)
    rectangle = packed.unflatten(-1, (rows, cols))
    matrix = packed.new_zeros(*packed.shape[:-1], n, n)
    matrix[..., :, :cols] = rectangle[..., shift : shift + n, :].tril()
    matrix[..., cols:, cols:] = rectangle[..., : n - cols, 1 - shift :].triu().mT
    return matrix.add_(matrix.tril(-1).mT)


def packed_diagonal(packed: Tensor, n: int) -> Tensor:
    """The diagonals ``[..., n]`` of packed matrices, without unpacking them."""
    rows, cols, shift = _rectangle(n)
    rectangle = packed.unflatten(-1, (rows, cols))
    leading, trailing = rectangle[..., shift:, :], rectangle[..., 1 - shift :]
    return torch.cat([part.diagonal(dim1=-2, dim2=-1) for part in (leading, trailing)], -1)


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
    def shape(self) -> tuple[int, ...]:
        """Of the factor, unpacked."""
        return (self.pairs, self.dim) if self.diagonal else (self.pairs, self.dim, self.dim)

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
            "value": self.zeros(dtype, device),
            "weight": torch.zeros((), dtype=torch.float64),
        }
        if dtype is torch.float16:
            average["scale"] = torch.zeros(self.pairs, 1, dtype=torch.float32, device=device)
        return average

    def zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The packed sum of nothing."""
        return torch.zeros(self.pairs, self.packed_numel // self.pairs, dtype=dtype, device=device)

    def pack(self, moment: Tensor) -> Tensor:
        """A moment ``[p, n, n]`` (diagonal: ``[p, n]``) in packed form."""
        return moment if self.diagonal else pack(moment)

    def matrix(self, average: dict[str, Tensor]) -> Tensor:
        """The factor ``[p, n, n]`` (diagonal: ``[p, n]``) of a running average, in at least float32."""
        value = read(average)
        return value if self.diagonal else unpack(value, self.dim)

    def mean_eigenvalue(self, average: dict[str, Tensor]) -> Tensor:
        """Trace divided by dimension of each pair, ``[p]``."""
        value = read(average)
        return (value if self.diagonal else packed_diagonal(value, self.dim)).mean(-1)

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


class LocalSums:
    """What this rank saw of every layer since the ranks last pooled their factors.

    Running sums are linear: k updates ``S <- xi S + sum over ranks m_r`` are one update ``S <- xi^k S + sum over ranks
    s_r`` with local sums ``s_r <- xi s_r + m_r``. So ranks need to talk only when a refresh is due.

    What a rank cannot know alone is whether any rank used a layer in an update; where none did, the layer does not
    decay. Local sums are therefore kept in *runs* of consecutive updates with data, in which every decay is certain,
    and put together once the ranks have added up their :meth:`weights`. A layer that is always used has one run.

    The weight of G is M, which belongs to the loss: it counts the terms of all ranks, also of those that did not use
    the layer (its gradient there is zero).
    """

    def __init__(self) -> None:
        self.decays: list[float] = []
        self._terms: list[float] = []
        self._weights: list[dict[Hashable, tuple[float, float]]] = []
        self._runs: dict[Hashable, list[tuple[int, list[Tensor]]]] = {}

    def begin(self, decay: float, terms: float = 0.0) -> None:
        """A new update, on all ranks, with or without data; ``terms`` is this rank's part of M."""
        self.decays.append(decay)
        self._terms.append(terms)
        self._weights.append({})

    def add(self, layer: Hashable, sums: Sequence[Tensor], weights: tuple[float, float]) -> None:
        """This rank's packed sums of A and G in the current update, and their weights; takes the tensors over."""
        update, runs = len(self.decays) - 1, self._runs.setdefault(layer, [])
        self._weights[update][layer] = weights
        if runs and runs[-1][0] == update - 1:
            for total, new in zip(runs[-1][1], sums, strict=True):
                total.mul_(self.decays[update]).add_(new)
            runs[-1] = (update, runs[-1][1])
        else:
            runs.append((update, list(sums)))

    def weights(self, layers: Sequence[Hashable]) -> Tensor:
        """Weights of A and G by update and layer, ``[updates, layers, 2]``, float64; to be added up over the ranks."""
        updates = zip(self._weights, self._terms, strict=True)
        rows = [[update.get(layer, (0.0, terms)) for layer in layers] for update, terms in updates]
        return torch.tensor(rows, dtype=torch.float64).view(len(self.decays), len(layers), 2)

    def pool(self, layers: Sequence[Hashable], weights: Tensor) -> tuple[list[float], list[list[float]]]:
        """Puts the runs of every layer together, given the weights of all ranks.

        Args:
            layers: As given to :meth:`weights`.
            weights: Sum of :meth:`weights` over the ranks.

        Returns:
            Per layer the factor by which its past decays, and the pooled weights of A and G (0 if no rank has used it).
        """
        used = weights[:, :, :1] > 0
        weights = torch.where(used, weights, 0.0)
        decays = torch.tensor(self.decays, dtype=torch.float64)[:, None]
        since = torch.where(used[:, :, 0], decays, 1.0).flip(0).cumprod(0).flip(0)
        after = torch.cat([since[1:], torch.ones_like(since[:1])])  # of each update, until now
        for i, layer in enumerate(layers):
            runs = self._runs.get(layer, [])
            for update, sums in runs:
                factor = float(after[update, i])
                for total in sums if factor != 1 else ():
                    total.mul_(factor)
            if len(runs) > 1:
                pooled = [torch.stack(parts).sum(0) for parts in zip(*(sums for _, sums in runs), strict=True)]
                self._runs[layer] = [(runs[-1][0], pooled)]
        return since[0].tolist(), (weights * after[:, :, None]).sum(0).tolist()

    def sums(self, layer: Hashable) -> list[Tensor] | None:
        """The pooled runs of a layer; None where this rank did not use it."""
        runs = self._runs.get(layer)
        return runs[0][1] if runs else None
