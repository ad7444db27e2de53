"""Which sharded weights, or parts of them, a rank can precondition as matrices, and why it cannot do so with others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .communicator import Communicator
from .sharding import are_rows, is_sharded, mesh_of, own_part, whole_shape


def own_shape(parameter: Tensor, roots: Iterable[nn.Module]) -> torch.Size:
    """The shape of what a rank computes with: that of its shard if tensor parallelism has split a parameter.

    Otherwise it is that of the whole parameter, because FSDP2 and ZeRO 3 gather their shards before use.
    """
    return own_part(parameter).shape if _is_split(parameter, roots) else whole_shape(parameter)


def shard_number(parameter: Tensor) -> int:
    """Which shard this rank has of a parameter that tensor parallelism has split."""
    return int(mesh_of(parameter).get_local_rank())


def sharding_problem(parameter: Tensor, roots: Iterable[nn.Module], comm: Communicator) -> str:
    """Why a parameter cannot be preconditioned as a matrix of this rank; empty for plain tensors and for FSDP2's.

    A shard of tensor parallelism is a matrix of its own if all ranks of ``comm``, which share factors, hold that shard.
    """
    if not is_sharded(parameter):
        return ""
    placements, roots = cast(Any, parameter).placements, list(roots)
    if are_rows(placements) and uses_fsdp(roots):
        # FSDP2 gives rows to the ranks of a process group in ascending order, DTensor in the order of the mesh.
        rows = mesh_of(parameter).mesh.view(-1, mesh_of(parameter).size(-1)).tolist()
        ascending = all(row == sorted(row) for row in rows)
        return "" if ascending else "on a mesh whose ranks are not in ascending order: take one of init_device_mesh()"
    if not _is_split(parameter, roots):
        if all(placement.is_replicate() for placement in placements):
            return "a DTensor that every rank has whole: use DistributedDataParallel in place of replicate()"
        return f"split by tensor parallelism, or not by rows: {placements}"
    if _hold_one_shard(comm, mesh_of(parameter)):
        return ""
    return (
        f"split by tensor parallelism: {placements}, and communicator= has ranks with other shards; use "
        "TorchCommunicator(group) with the group of the ranks that hold the same shard"
    )


def uses_fsdp(roots: Iterable[nn.Module]) -> bool:
    """Whether FSDP2 shards a part of these modules."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for root in roots for module in root.modules())


def _is_split(parameter: Tensor, roots: Iterable[nn.Module]) -> bool:
    """Whether tensor parallelism alone has split a parameter, into equal shards."""
    if not is_sharded(parameter):
        return False
    from torch.distributed.tensor import Shard

    placement, *others = cast(Any, parameter).placements
    if others or type(placement) is not Shard or uses_fsdp(roots):
        return False
    return parameter.shape[placement.dim] % mesh_of(parameter).size() == 0


def _hold_one_shard(comm: Communicator, mesh: Any) -> bool:
    """Whether all ranks that train together hold one shard: only one of them is on the mesh that splits the weight."""
    if comm.world_size == 1:
        return True
    group = comm.group
    return group is not None and len(set(dist.get_process_group_ranks(group)) & set(mesh.mesh.flatten().tolist())) == 1


def refuse_flattened(roots: Iterable[nn.Module]) -> None:
    """Raises TypeError for modules wrapped in torch's first FSDP: it flattens weights, so that no matrices are left."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for root in roots for module in root.modules()):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) flattens the weights, so that no layer's matrix is left to precondition: "
            "shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
