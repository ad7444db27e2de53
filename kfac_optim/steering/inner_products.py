"""Inner products of gradients with vectors of the same shapes, in few operations for many parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.flat_storage import SMALL_NUMEL
from ..common.grouping import grouped_by_key
from ..common.machines import is_asynchronous
from ..common.rates import Scalar
from ..common.tensor_cache import sent_once, tensor_cache
from ..distributed import is_sharded, summed_over_shards

# For gradients that were compared before, by their ids: their batches, each with its gradients copied into one vector.
# The gradients have to live as long as this, or others might get their ids.
Copies = dict[tuple[int, ...], list[tuple["_Batch", Tensor]]]

_BATCH_NUMEL = 2**25  # the most numbers in such a vector on a GPU
_ALIGNED = 64  # bytes; what torch allocates begins at a multiple of this
_FEW = 3  # on the CPU only small gradients are copied into such a vector, if there are more than this many

_segment_sums = functools.partial(torch.segment_reduce, reduce="sum", unsafe=True)


class Compared(NamedTuple):
    """Gradients of one device and one type, the vector for each, and what their inner products are multiplied by."""

    gradients: Sequence[Tensor]
    vectors: Sequence[Tensor]
    multiplier: Scalar = 1.0

    @property
    def are_shards(self) -> bool:
        """Whether the gradients are shards, the rest of which other ranks hold."""
        return is_sharded(self.gradients[0])


def total_alignment(compared: Sequence[Compared], copies: Copies) -> Tensor:
    """``multiplier <g, v>``, summed over all parameters, 0-dim (a collective if sharded).

    ``copies``: those of gradients that were compared before; new ones are added.
    """
    products = _of_shards(compared)
    for some in compared:
        if not some.are_shards:
            dots = [torch.dot(g, v) for _, g, v in _side_by_side(some, copies)]
            products.append(_times(torch.stack(dots).sum() if len(dots) > 1 else dots[0], some.multiplier))
    return torch.stack([each.to(products[0]) for each in products]).sum() if len(products) > 1 else products[0]


def alignments(compared: Sequence[Compared], copies: Copies | None = None) -> Tensor:
    """``multiplier <g, v>`` of each parameter, ``[n]``; ``copies``: see :func:`total_alignment`."""
    copies = {} if copies is None else copies
    of_shards = iter(_of_shards(compared))
    found: list[Tensor] = []
    for some in compared:
        if some.are_shards:
            found.append(torch.stack([next(of_shards) for _ in some.gradients]))
        else:
            found.append(_times(_each_dot(some, copies), some.multiplier))
    return found[0] if len(found) == 1 else torch.cat([part.to(found[0].device) for part in found])


def _of_shards(compared: Sequence[Compared]) -> list[Tensor]:
    """The inner product of each sharded gradient with its vector, times the multiplier, 0-dim (a collective)."""
    sharded = [some for some in compared if some.are_shards]
    if not sharded:
        return []
    pairs = [(g, v, some.multiplier) for some in sharded for g, v in zip(some.gradients, some.vectors, strict=True)]
    summed = summed_over_shards([torch.mul(*_widened(g, v)).sum() for g, v, _ in pairs])
    # Not before the sum: torch 2.6 would multiply every part by the number that it multiplied such parts by first.
    return [_times(product, multiplier) for product, (_, _, multiplier) in zip(summed, pairs, strict=True)]


def _each_dot(compared: Compared, copies: Copies) -> Tensor:
    """The dot product of each gradient with its vector, ``[n]``."""
    each = [
        (places, torch.dot(g, v).view(1) if lengths is None else _segment_sums(g * v, lengths=lengths))
        for (places, lengths), g, v in _side_by_side(compared, copies)
    ]
    first = each[0][1]
    if len(each) == 1:
        return first
    if is_asynchronous(first.device):
        return torch.cat([dots for _, dots in each])
    found = {i: number for places, dots in each for i, number in zip(places, dots.tolist(), strict=True)}
    return first.new_tensor([found[i] for i in range(len(found))])


class _Batch(NamedTuple):
    """Which tensors are copied into one vector: their list indices and, if there are several, their lengths."""

    places: Sequence[int]
    lengths: Tensor | None


@tensor_cache(64)
def _batches(numels: tuple[int, ...], device: torch.device) -> list[_Batch]:
    """Batches of tensors of these sizes, on an accelerator in their order.

    They are cached, so that lengths are sent to the device only once.
    """
    places = range(len(numels))
    if is_asynchronous(device):
        batches = grouped_by_key(places, lambda i: None, numels.__getitem__, _BATCH_NUMEL)
    else:
        small = [i for i in places if numels[i] <= SMALL_NUMEL]
        small = small if len(small) > _FEW else []
        batches = [[i] for i in places if i not in small] + ([small] if small else [])
    return [
        _Batch(batch, sent_once(tuple(numels[i] for i in batch), device) if len(batch) > 1 else None)
        for batch in batches
    ]


def _side_by_side(compared: Compared, copies: Copies) -> Iterator[tuple[_Batch, Tensor, Tensor]]:
    """The batches, each with its gradients and their vectors as two long vectors."""
    gradients, vectors, _ = compared
    ids = tuple(map(id, gradients))
    if ids not in copies:
        batches = _batches(tuple(map(Tensor.numel, gradients)), gradients[0].device)
        copies[ids] = [(batch, _flat(gradients, batch.places)) for batch in batches]
    for batch, g in copies[ids]:
        yield batch, *_widened(g, _flat(vectors, batch.places))


def _flat(tensors: Sequence[Tensor], places: Sequence[int]) -> Tensor:
    """Some of the tensors as one vector."""
    if len(places) == 1:
        return _vector(tensors[places[0]])
    return torch._utils._flatten_dense_tensors([tensors[i] for i in places])


def _vector(tensor: Tensor) -> Tensor:
    """A tensor as one vector; on the CPU at an address on which the last bits of inner products do not depend.

    A view that a step recorded lies elsewhere once a state has been loaded, and a resumed run has to be bit-identical.
    """
    vector = tensor.reshape(-1)
    return vector.clone() if vector.is_cpu and vector.data_ptr() % _ALIGNED else vector


def _widened(g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in float32, or in float64 if one of them is."""
    if g.dtype == v.dtype == torch.float32:
        return g, v
    dtype = torch.promote_types(torch.promote_types(g.dtype, v.dtype), torch.float32)
    return g.to(dtype), v.to(dtype)


def _times(product: Tensor, multiplier: Scalar) -> Tensor:
    return product * multiplier if isinstance(multiplier, Tensor) or multiplier != 1 else product
