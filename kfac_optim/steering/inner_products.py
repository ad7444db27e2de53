"""Inner products of gradients with vectors of the same shapes, in few operations for many parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..distributed import is_sharded, summed_over_shards
from ..flat_storage import is_launch_bound
from ..grouping import SMALL_NUMEL, grouped_by_key

__all__ = ["Compared", "Copies", "alignment", "alignments"]

Copies = dict[tuple[int, ...], Tensor]  # from the ids of some gradients to these gradients as one vector

_BATCH_NUMEL = 2**25  # the most numbers in such a vector on a GPU
_FEW = 3  # on the CPU only small gradients are copied into such a vector, if there are more than this many


@dataclass(frozen=True)
class Compared:
    """Gradients of one device and one type, the vector for each, and a factor, ``rate``, for their inner products."""

    gradients: Sequence[Tensor]
    vectors: Sequence[Tensor]
    rate: float | Tensor = 1.0

    @property
    def are_shards(self) -> bool:
        """Whether the gradients are shards, the rest of which other ranks hold."""
        return is_sharded(self.gradients[0])


def alignment(compared: Sequence[Compared], copies: Copies | None = None) -> Tensor:
    """``rate <g, v>``, summed over all parameters, 0-dim (a collective if they are sharded).

    ``copies``: gradients that were copied into one vector before; new copies are added to it.
    """
    copies = {} if copies is None else copies
    products = _of_shards(compared)
    for of_one_kind in compared:
        if not of_one_kind.are_shards:
            batches = _batches_of(of_one_kind).batches
            dots = [torch.dot(*_side_by_side(of_one_kind, places, copies)) for places, _ in batches]
            products.append(_times(_sum(dots), of_one_kind.rate))
    return _sum([product.to(products[0].device) for product in products])


def alignments(compared: Sequence[Compared], copies: Copies | None = None) -> Tensor:
    """``rate <g, v>`` of each parameter, ``[n]``; ``copies``: see :func:`alignment`."""
    copies = {} if copies is None else copies
    of_shards = iter(_of_shards(compared))
    found: list[Tensor] = []
    for of_one_kind in compared:
        if of_one_kind.are_shards:
            found.append(torch.stack([next(of_shards) for _ in of_one_kind.gradients]))
        else:
            found.append(_times(_each_dot(of_one_kind, copies), of_one_kind.rate))
    return found[0] if len(found) == 1 else torch.cat([part.to(found[0].device) for part in found])


def _of_shards(compared: Sequence[Compared]) -> list[Tensor]:
    """The inner product of each sharded gradient with its vector, times the rate, 0-dim (a collective)."""
    sharded = [some for some in compared if some.are_shards]
    if not sharded:
        return []
    pairs = [(g, v, some.rate) for some in sharded for g, v in zip(some.gradients, some.vectors, strict=True)]
    summed = summed_over_shards([torch.mul(*_widened(g, v)).sum() for g, v, _ in pairs])
    # The rates come after the sum: torch 2.6 would multiply every part by the number it multiplied such parts by first.
    return [_times(product, rate) for product, (_, _, rate) in zip(summed, pairs, strict=True)]


def _each_dot(compared: Compared, copies: Copies) -> Tensor:
    """The dot product of each gradient with its vector, ``[n]``."""
    shared = _batches_of(compared)
    found: list[Tensor] = []
    for places, lengths in shared.batches:
        g, v = _side_by_side(compared, places, copies)
        alone = len(places) == 1
        found.append(
            torch.dot(g, v).view(1) if alone else torch.segment_reduce(g * v, "sum", lengths=lengths, unsafe=True)
        )
    whole = found[0] if len(found) == 1 else torch.cat(found)
    return whole if shared.back is None else whole.index_select(0, shared.back)


@dataclass(frozen=True)
class _Batches:
    """Which tensors are copied into one vector.

    Attributes:
        batches: For each vector, the list indices of its tensors, and their lengths as a tensor on their device.
        back: For each tensor, the index of its result in the order of the batches; None: the order is the same.
    """

    batches: Sequence[tuple[Sequence[int], Tensor]]
    back: Tensor | None


def _batches_of(compared: Compared) -> _Batches:
    return _batches(tuple(map(Tensor.numel, compared.gradients)), compared.gradients[0].device)


@lru_cache(maxsize=64)
def _batches(numels: tuple[int, ...], device: torch.device) -> _Batches:
    """Batches of tensors of these sizes; cached, so that index tensors are sent to the device only once."""
    places = range(len(numels))
    if is_launch_bound(device):
        batches = grouped_by_key(places, lambda i: None, numels.__getitem__, _BATCH_NUMEL)
    else:
        small = [i for i in places if numels[i] <= SMALL_NUMEL]
        small = small if len(small) > _FEW else []
        batches = [[i] for i in places if i not in small] + ([small] if small else [])
    order = [i for batch in batches for i in batch]
    back = None if order == list(places) else _sent(sorted(places, key=order.__getitem__), device)
    return _Batches([(batch, _sent([numels[i] for i in batch], device)) for batch in batches], back)


def _sent(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers).to(device, non_blocking=True)


def _side_by_side(compared: Compared, places: Sequence[int], copies: Copies) -> tuple[Tensor, Tensor]:
    """The gradients of a batch, and the vectors they are compared with, as two long vectors."""
    gradients = [compared.gradients[i] for i in places]
    key = tuple(map(id, gradients))
    if key not in copies:
        copies[key] = _flat(gradients)
    return _widened(copies[key], _flat([compared.vectors[i] for i in places]))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch._utils._flatten_dense_tensors(tensors)


def _widened(g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in float32, or in float64 if one of them is."""
    if g.dtype == v.dtype == torch.float32:
        return g, v
    dtype = torch.promote_types(torch.promote_types(g.dtype, v.dtype), torch.float32)
    return g.to(dtype), v.to(dtype)


def _times(product: Tensor, lr: float | Tensor) -> Tensor:
    return product * lr if isinstance(lr, Tensor) or lr != 1 else product


def _sum(numbers: Sequence[Tensor]) -> Tensor:
    return numbers[0] if len(numbers) == 1 else torch.stack(list(numbers)).sum()
