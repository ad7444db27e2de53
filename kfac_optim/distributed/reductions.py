"""Sums and maxima, over all ranks, of numbers that each rank knows only for its own part of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..common.flat_storage import SMALL_NUMEL
from .sharding import is_sharded, mesh_of, own_part


def summed_over_shards(scalars: Sequence[Tensor]) -> list[Tensor]:
    """Sums 0-dim numbers that each rank has for its FSDP2 shards over the ranks; leaves all others as they are.

    This is a collective, one for all numbers that are laid out alike.
    """
    found = list(scalars)
    kinds: dict[Any, list[int]] = {}
    for i, scalar in enumerate(scalars):
        if is_sharded(scalar):
            kinds.setdefault((mesh_of(scalar), cast(Any, scalar).placements), []).append(i)
    for (mesh, placements), places in kinds.items():
        from torch.distributed.tensor import DTensor

        own = torch.stack([own_part(scalars[i]) for i in places])
        together = DTensor.from_local(own, mesh, placements, run_check=False).full_tensor()
        for i, number in zip(places, together.unbind(), strict=True):
            found[i] = number
    return found


def largest_entry(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute entry of all tensors, 0-dim; NaN or infinite if one of their entries is; 0 if there is none.

    For sharded tensors the parts on all ranks count (a collective).
    """
    if tensors and all(map(_is_plain_on_cpu, tensors)):  # soon told, as it is most often
        return _extremes_on_cpu(tensors).abs().max()
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_sparse:  # the gradient of an embedding with sparse=True, which the base class applies
            tensor = tensor.coalesce().values()
        if tensor.numel():
            kinds.setdefault(mesh_of(tensor), []).append(tensor)
    largest = [_largest_of_one_kind(alike, mesh) for mesh, alike in kinds.items()]
    if not largest:
        return torch.zeros((), device="cpu")
    return torch.stack([entry.to(largest[0].device) for entry in largest]).max() if len(largest) > 1 else largest[0]


def _largest_of_one_kind(tensors: Sequence[Tensor], mesh: Any) -> Tensor:
    """The largest absolute entry of tensors that are all plain, or all sharded over one device mesh."""
    if mesh is None:
        return _largest_of_plain(tensors)
    from torch.distributed.tensor import DTensor, Partial

    parts = [own_part(_without_partial_sums(tensor)) for tensor in tensors]
    there = [part for part in parts if part.numel()]  # a rank may have no row of a short tensor
    largest = _largest_of_plain(there) if there else parts[0].new_zeros(())
    largest = largest.float().nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks may lose NaNs
    return DTensor.from_local(largest, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()


def _without_partial_sums(tensor: Any) -> Any:
    """The DTensor with any partial sums added up."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    added = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=added)


def _largest_of_plain(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute entry of plain tensors, at least one, none of them empty; 0-dim."""
    if all(map(_is_plain_on_cpu, tensors)):
        return _extremes_on_cpu(tensors).abs().max()
    return torch.nn.utils.get_total_norm(tensors, float("inf"))


def _extremes_on_cpu(tensors: Sequence[Tensor]) -> Tensor:
    """Entries among which are the largest and the least; torch's maximum norm would take 15 times as long."""
    small = [t for t in tensors if t.numel() <= SMALL_NUMEL]
    parts = [t for t in tensors if t.numel() > SMALL_NUMEL]
    if len(small) > 1 and len({t.dtype for t in small}) == 1:
        parts.append(torch._utils._flatten_dense_tensors(small))
    else:
        parts += small
    return torch.stack([extreme for part in parts for extreme in part.aminmax()])


def _is_plain_on_cpu(tensor: Tensor) -> bool:
    """Whether this is an ordinary, dense tensor of real numbers on the CPU, and not empty."""
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return plain and not tensor.is_complex() and tensor.numel() > 0
