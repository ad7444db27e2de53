"""Tensors side by side in one storage, so that one kernel launch processes all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tensor_cache import tensor_cache

Tensors = list[Tensor] | tuple[Tensor, ...]  # what multi-tensor operations take

# On a CPU, tensors of at most this many numbers are copied side by side, which takes less time than an operation each.
SMALL_NUMEL = 2**12


def split_flat(whole: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Splits a vector into consecutive views of these shapes."""
    # In a tenth of the host time of a Python loop.
    return list(torch._utils._unflatten_dense_tensors(whole, _templates(tuple(shapes))))


@tensor_cache(64)
def _templates(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]  # cached: making these takes longer than the views


def are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors, at least one, are contiguous and lie one after the other in one storage."""
    storage, dtype, start = tensors[0].untyped_storage()._cdata, tensors[0].dtype, tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.dtype == dtype and tensor.storage_offset() == start and tensor.is_contiguous()
        if not same or tensor.untyped_storage()._cdata != storage:
            return False
        start += tensor.numel()
    return True
