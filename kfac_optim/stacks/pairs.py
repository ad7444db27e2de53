"""What belongs to single Kronecker pairs: their norms and inner products, and which of them are scaled together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Which pairs are scaled together, as the channels of a norm layer are, or which rows of numbers belong to a pair.

    Attributes:
        counts: The number of members of each group, which are consecutive.
        lengths: The same on the device of the matrices, ``[groups]``.
        group_of_pair: The number of the group that each pair belongs to, ``[p]``.
    """

    counts: list[int]
    lengths: Tensor = field(compare=False)
    group_of_pair: Tensor = field(compare=False)

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device, pairs: Sequence[int] | None = None) -> Groups:
        """Groups of so many members; ``pairs``: the number of pairs of each, if its members are something else."""
        lengths, places = torch.tensor(counts, device="cpu"), group_of_each(counts if pairs is None else pairs)
        return cls(list(counts), lengths.to(device, non_blocking=True), places.to(device, non_blocking=True))

    def sums(self, values: Tensor) -> Tensor:
        """The sum of the members' values over each group; ``[members]`` to ``[groups]``."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)

    def over_groups(self, values: Tensor) -> Tensor:
        """For each pair, the sum of values over its group; ``[members]`` to ``[p]``."""
        sums = self.sums(values)
        return sums if len(sums) == len(self.group_of_pair) else sums.index_select(0, self.group_of_pair)


def group_of_each(counts: Sequence[int]) -> Tensor:
    """For each member of groups of so many members, the number of its group, on the CPU.

    On a device, torch would have to wait for it to learn the length of the result.
    """
    lengths = torch.tensor(counts, dtype=torch.int64, device="cpu")
    return torch.arange(len(lengths), dtype=torch.int32, device="cpu").repeat_interleave(lengths)


def norm(matrix: Tensor, groups: Groups | None) -> Tensor:
    """For each pair, the Frobenius norm of ``matrix [p, d_out, d_in]`` over all pairs scaled with it, ``[p]``."""
    norms = torch.linalg.matrix_norm(matrix)
    return norms if groups is None else groups.over_groups(norms.square()).sqrt()


def inner(one: Tensor, other: Tensor, groups: Groups | None) -> Tensor:
    """For each pair, the inner product of two matrices ``[p, d_out, d_in]`` over all pairs scaled with it, ``[p]``."""
    if len(one) == 1:  # no copy of the products in memory
        one, other = (one, other) if one.is_contiguous() else (one.mT, other.mT)
        products = torch.dot(one.reshape(-1), other.reshape(-1)).view(1)
    else:
        products = (one * other).sum((1, 2))
    return products if groups is None else groups.over_groups(products)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 0 where the denominator is 0, so that zero directions stay zero."""
    return (numerator / denominator).nan_to_num_(nan=0.0, posinf=0.0)


def cosines(x: Tensor, y: Tensor, layers: Groups) -> Tensor:
    """The cosine of the angle between two vectors of each layer, ``[layers]``, on their device; 0 if one is zero.

    Args:
        x: The first vectors of all layers, as matrices ``[p, d_out, d_in]``.
        y: The second vectors, likewise.
        layers: The pairs of each layer.
    """

    def normalized(vector: Tensor) -> Tensor:  # before the product: one of small vectors underflows in float32
        return vector / norm(vector, layers).view(-1, 1, 1)

    return layers.sums((normalized(x) * normalized(y)).sum((1, 2))).nan_to_num_(nan=0.0)
