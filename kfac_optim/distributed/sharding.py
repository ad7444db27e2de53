"""Tensors and gradients of which a framework keeps a part on every rank: FSDP2's DTensors, DeepSpeed ZeRO."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..grouping import SMALL_NUMEL, grouped_by_key
from .communicator import Communicator

__all__ = [
    "all_gathered",
    "any_sharded",
    "are_rows",
    "full_gradient",
    "gathered",
    "summed_over_shards",
    "gradient_moves_away",
    "is_sharded",
    "largest_entry",
    "own_part",
    "own_shape",
    "refuse_flattened",
    "set_full_gradient_",
    "sharded_like",
    "sharding_problem",
]

_BUCKET_NUMEL = 2**25  # numbers that are gathered by one collective: 128 MiB in float32


def gradient_moves_away(parameter: Tensor) -> bool:
    """Whether DeepSpeed ZeRO 1-3 moves the gradient of a parameter out of ``.grad`` once a backward pass has ended."""
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def full_gradient(parameter: Tensor) -> Tensor | None:
    """The whole gradient, also where DeepSpeed ZeRO 1-3 keeps a part of it on every rank (then a collective)."""
    if parameter.grad is None and gradient_moves_away(parameter):
        import deepspeed.utils

        return deepspeed.utils.safe_get_full_grad(parameter)
    return parameter.grad


def set_full_gradient_(parameter: Tensor, gradient: Tensor) -> None:
    """Replaces the gradient that :func:`full_gradient` gave by another one, in place."""
    if parameter.grad is not None:
        parameter.grad.copy_(gradient)
    else:
        import deepspeed.utils

        if hasattr(parameter, "ds_id"):  # ZeRO 3 cuts it into equal parts, without padding it first
            ranks = dist.get_world_size(cast(Any, parameter).ds_process_group)
            gradient = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % ranks))
        deepspeed.utils.safe_set_full_grad(parameter, gradient)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return any_sharded((tensor,))


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of some tensors is a DTensor."""
    # Not imported for this: it takes longer than this whole package. Whoever has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor where FSDP2 has sharded it (a collective); any other tensor as it is."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """The part that this rank computes with where tensor parallelism has split a tensor; any other tensor as it is."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def all_gathered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each whole tensor where FSDP2 has sharded it; any other tensor as it is.

    A collective, one for as many as fit in a bucket, of those that are laid out alike. FSDP2 gives every rank as many
    rows, but the last ones, which may have fewer or none: each sends its rows as if it had all of them.
    """
    by_rows = [i for i, t in enumerate(tensors) if is_sharded(t) and are_rows(cast(Any, t).placements)]
    left = set(by_rows)
    found = [tensor if i in left else gathered(tensor) for i, tensor in enumerate(tensors)]

    def kind(i: int) -> Any:
        return cast(Any, tensors[i]).device_mesh, cast(Any, tensors[i]).placements, tensors[i].dtype

    for bucket in grouped_by_key(by_rows, kind, lambda i: tensors[i].numel(), _BUCKET_NUMEL):
        mesh, placements, _ = kind(bucket[0])
        wholes = _gathered_by_rows([tensors[i] for i in bucket], mesh, placements)
        for i, whole in zip(bucket, wholes, strict=True):
            found[i] = whole
    return found


def are_rows(placements: Sequence[Any]) -> bool:
    """Whether the ranks have rows, as FSDP2 shards: over the last dimension of its mesh, replicated over the others."""
    return placements[-1].is_shard(0) and all(placement.is_replicate() for placement in placements[:-1])


def _gathered_by_rows(tensors: Sequence[Tensor], mesh: Any, placements: Sequence[Any]) -> list[Tensor]:
    """Tensors of which every rank has some rows, whole (a collective)."""
    from torch.distributed.tensor import DTensor

    ranks = mesh.size(mesh.ndim - 1)
    own: list[Tensor] = []
    for tensor in tensors:
        part = cast(DTensor, tensor).to_local().reshape(-1)
        most = -(-tensor.shape[0] // ranks) * tensor.shape[1:].numel()
        own.append(torch.nn.functional.pad(part, (0, most - len(part))))
    lengths = list(map(len, own))
    together = DTensor.from_local(torch.cat(own), mesh, placements, run_check=False).full_tensor().view(ranks, -1)
    parts = zip(together.split(lengths, dim=1), tensors, strict=True)
    return [part.reshape(-1)[: tensor.numel()].view(tensor.shape) for part, tensor in parts]


def summed_over_shards(scalars: Sequence[Tensor]) -> list[Tensor]:
    """Numbers, 0-dim, as every rank is to have them: those that FSDP2's shards make up are summed (a collective).

    One for all that are laid out alike.
    """
    found = list(scalars)
    kinds: dict[Any, list[int]] = {}
    for i, scalar in enumerate(scalars):
        if is_sharded(scalar):
            kinds.setdefault((cast(Any, scalar).device_mesh, cast(Any, scalar).placements), []).append(i)
    for (mesh, placements), places in kinds.items():
        from torch.distributed.tensor import DTensor

        own = torch.stack([cast(Any, scalars[i]).to_local() for i in places])
        together = DTensor.from_local(own, mesh, placements, run_check=False).full_tensor()
        for i, number in zip(places, together.unbind(), strict=True):
            found[i] = number
    return found


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank holds, laid out as ``like``; nothing is sent.

    A tensor of another shape than ``like`` is that part already.
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = cast(DTensor, like).device_mesh, cast(DTensor, like).placements
    if tensor.shape != like.shape:
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=placements)


def own_shape(parameter: Tensor, roots: Iterable[nn.Module]) -> torch.Size:
    """The shape of what a rank computes with: of its shard, where tensor parallelism has split a parameter.

    FSDP2 and ZeRO 3, which leaves an empty tensor in the place of a parameter, gather their shards before use.
    """
    if _is_split(parameter, roots):
        return cast(torch.Size, cast(Any, parameter).to_local().shape)
    return cast(torch.Size, getattr(parameter, "ds_shape", parameter.shape))


def sharding_problem(parameter: Tensor, roots: Iterable[nn.Module], comm: Communicator | None = None) -> str:
    """Why a parameter cannot be preconditioned as a matrix of this rank; empty for plain tensors and for FSDP2's.

    Shards of tensor parallelism are matrices of their own if the ranks of ``comm``, which share all factors, hold the
    same one.
    """
    if not is_sharded(parameter):
        return ""
    placements, roots = cast(Any, parameter).placements, list(roots)
    if are_rows(placements) and _uses_fsdp(roots):
        return ""
    if not _is_split(parameter, roots):
        if all(placement.is_replicate() for placement in placements):
            return "a DTensor that every rank has whole: take DistributedDataParallel in place of replicate()"
        return f"split by tensor parallelism, or not by rows: {placements}"
    if _hold_one_shard(comm, cast(Any, parameter).device_mesh):
        return ""
    return (
        f"split by tensor parallelism: {placements}, and communicator= has ranks with other shards; take "
        "TorchCommunicator(group), the group of the ranks that hold the same shard"
    )


def _uses_fsdp(roots: Iterable[nn.Module]) -> bool:
    """Whether FSDP2 shards a part of these modules."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for root in roots for module in root.modules())


def _is_split(parameter: Tensor, roots: Iterable[nn.Module]) -> bool:
    """Whether tensor parallelism alone has split a parameter, into equal shards."""
    if not is_sharded(parameter):
        return False
    from torch.distributed.tensor import Shard

    placement, *others = cast(Any, parameter).placements
    if others or type(placement) is not Shard or _uses_fsdp(roots):
        return False
    return parameter.shape[placement.dim] % cast(Any, parameter).device_mesh.size() == 0


def _hold_one_shard(comm: Communicator | None, mesh: Any) -> bool:
    """Whether no two of the ranks that train together are among those that have split a weight."""
    if comm is None or comm.world_size == 1:
        return comm is not None
    group = getattr(comm, "group", None)
    return group is not None and len(set(dist.get_process_group_ranks(group)) & set(mesh.mesh.flatten().tolist())) == 1


def refuse_flattened(roots: Iterable[nn.Module]) -> None:
    """Raises TypeError for modules wrapped in torch's first FSDP: it flattens weights, which are then no matrices."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for root in roots for module in root.modules()):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) flattens the weights, so that no layer's matrix is left to precondition: "
            "shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def largest_entry(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute entry of all tensors, 0-dim; NaN or infinite if one of their entries is.

    Of sharded tensors the parts of all ranks count (a collective).
    """
    if tensors and all(map(_is_plain_on_cpu, tensors)):
        return _largest_on_cpu(tensors)
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_sparse:  # those that sparse=True embeddings have; the base class updates by them
            tensor = tensor.coalesce().values()
        if tensor.numel():
            kinds.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    largest = [_largest_of_one_kind(alike, mesh) for mesh, alike in kinds.items()]
    if len(largest) == 1:
        return largest[0]
    return torch.stack([entry.to(largest[0].device) for entry in largest]).max() if largest else torch.zeros(())


def _largest_of_one_kind(tensors: Sequence[Tensor], mesh: Any) -> Tensor:
    """The largest absolute entry of tensors that are all plain, or all sharded over one device mesh."""
    if mesh is None:
        return _largest_of_plain(tensors)
    from torch.distributed.tensor import DTensor, Partial

    parts = [whole.to_local() for whole in map(_without_partial_sums, cast("Sequence[DTensor]", tensors))]
    there = [part for part in parts if part.numel()]  # a rank may have no row of a short tensor
    largest = _largest_of_plain(there) if there else parts[0].new_zeros(())
    largest = largest.float().nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks may lose NaNs
    return DTensor.from_local(largest, mesh, [Partial("max")] * mesh.ndim, run_check=False).full_tensor()


def _without_partial_sums(tensor: Any) -> Any:
    """The DTensor, added up where its parts are still to be."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    added = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=added)


def _largest_of_plain(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute entry of plain tensors, at least one, none of them empty; 0-dim."""
    if all(map(_is_plain_on_cpu, tensors)):
        return _largest_on_cpu(tensors)
    return torch.nn.utils.get_total_norm(tensors, float("inf"))


def _largest_on_cpu(tensors: Sequence[Tensor]) -> Tensor:
    """As :func:`_largest_of_plain`, on the CPU, where torch's maximum norm takes 15 times as long as ``aminmax``."""
    small = [t for t in tensors if t.numel() <= SMALL_NUMEL]
    parts = [t for t in tensors if t.numel() > SMALL_NUMEL]
    if len({t.dtype for t in small}) == 1:
        parts.append(torch._utils._flatten_dense_tensors(small))
    else:
        parts += small
    return torch.stack([extreme for part in parts for extreme in part.aminmax()]).abs().max()


def _is_plain_on_cpu(tensor: Tensor) -> bool:
    """Whether this is a tensor like any other, of real numbers, and not empty."""
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return plain and not tensor.is_complex() and tensor.numel() > 0
