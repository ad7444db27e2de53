"""Tensors of any dtypes as one flat tensor of bytes, and back, so that they share a bucket and nothing is rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as flat uint8."""
    # A tensor of at most one entry is contiguous whatever its stride, but only stride 1 can be viewed as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of some tensors, one after the other."""
    return torch.cat([_bytes(tensor.contiguous()) for tensor in tensors])


def empty_for(tensors: Sequence[Tensor]) -> Tensor:
    """An uninitialised flat tensor of the size of what :func:`packed` returns for such tensors."""
    return torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=tensors[0].device)


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies packed bytes into contiguous tensors, in place."""
    for tensor, piece in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True):
        _bytes(tensor).copy_(piece)


def by_rank(tensors: Sequence[tuple[int, Tensor]], world_size: int) -> list[list[Tensor]]:
    """The tensors that belong to each rank, in their order; ``tensors`` has each with its rank."""
    found: list[list[Tensor]] = [[] for _ in range(world_size)]
    for rank, tensor in tensors:
        found[rank].append(tensor)
    return found
