"""Tensors and gradients of which a framework keeps a part on every rank: FSDP2's DTensors, DeepSpeed ZeRO."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..common.grouping import grouped_by_key

_BUCKET_NUMEL = 2**25  # the most numbers that one collective gathers: 128 MiB in float32


def gradient_moves_away(parameter: Tensor) -> bool:
    """Whether DeepSpeed ZeRO 1-3 moves the gradient of a parameter out of ``.grad`` once a backward pass has ended."""
    return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def full_gradient(parameter: Tensor) -> Tensor | None:
    """The whole gradient, even if DeepSpeed ZeRO 1-3 keeps a part of it on every rank (then a collective)."""
    if parameter.grad is None and gradient_moves_away(parameter):
        import deepspeed.utils

        return deepspeed.utils.safe_get_full_grad(parameter)
    return parameter.grad


def set_full_gradient_(parameter: Tensor, gradient: Tensor) -> None:
    """Replaces the gradient that :func:`full_gradient` returned, in place."""
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
    # The class is not imported for this: it takes longer than this whole package.
    return hasattr(tensor, "device_mesh")


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of some tensors is a DTensor."""
    # A program that has one has imported the module; all others need not look at each tensor in every step.
    return "torch.distributed.tensor" in sys.modules and any(map(is_sharded, tensors))


def mesh_of(tensor: Tensor) -> Any:
    """The device mesh over which a tensor is sharded; None for any other tensor."""
    return getattr(tensor, "device_mesh", None)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which autograd does not track; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def whole_shape(parameter: Tensor) -> torch.Size:
    """The shape of a parameter, even while ZeRO 3 has an empty tensor in its place."""
    return getattr(parameter, "ds_shape", parameter.shape)


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor if FSDP2 has sharded it (a collective); any other tensor as it is."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def gathered_weight(weight: Tensor, modules: Iterable[nn.Module]) -> nn.Parameter | None:
    """The whole parameter that FSDP2 has in the place of a sharded weight while its modules run, if it has one there.

    Otherwise the weight itself is in its place. Parameters of one shape in a module are gathered together, and take
    part in the same passes: any of them will do.
    """
    parameters = [own for module in modules for own in module._parameters.values() if own is not None]
    if not is_sharded(weight) or any(own is weight for own in parameters):
        return None
    found = (own for own in parameters if own.requires_grad and own.shape == weight.shape and not is_sharded(own))
    return next(found, None)


def all_gathered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gathers the tensors that FSDP2 has sharded; leaves any other tensor as it is.

    This is a collective, one for as many tensors of one layout as fit in a bucket. FSDP2 gives every rank the same
    number of rows, except that the last ranks may have fewer or none: these pad their rows before they send them.
    """
    by_rows = [i for i, t in enumerate(tensors) if is_sharded(t) and are_rows(cast(Any, t).placements)]
    left = set(by_rows)
    found = [tensor if i in left else gathered(tensor) for i, tensor in enumerate(tensors)]

    def kind(i: int) -> Any:
        return mesh_of(tensors[i]), cast(Any, tensors[i]).placements, tensors[i].dtype

    for bucket in grouped_by_key(by_rows, kind, lambda i: tensors[i].numel(), _BUCKET_NUMEL):
        mesh, placements, _ = kind(bucket[0])
        wholes = _gathered_by_rows([tensors[i] for i in bucket], mesh, placements)
        for i, whole in zip(bucket, wholes, strict=True):
            found[i] = whole
    return found


def are_rows(placements: Sequence[Any]) -> bool:
    """Whether ranks hold rows, as FSDP2 shards: along the last dimension of its mesh, replicated along the others."""
    return placements[-1].is_shard(0) and all(placement.is_replicate() for placement in placements[:-1])


def _gathered_by_rows(tensors: Sequence[Tensor], mesh: Any, placements: Sequence[Any]) -> list[Tensor]:
    """The whole tensors, of which every rank has some rows (a collective)."""
    from torch.distributed.tensor import DTensor

    ranks = mesh.size(mesh.ndim - 1)
    own: list[Tensor] = []
    for tensor in tensors:
        part = own_part(tensor).reshape(-1)
        most = -(-tensor.shape[0] // ranks) * tensor.shape[1:].numel()
        own.append(torch.nn.functional.pad(part, (0, most - len(part))))
    lengths = list(map(len, own))
    together = DTensor.from_local(torch.cat(own), mesh, placements, run_check=False).full_tensor().view(ranks, -1)
    parts = zip(together.split(lengths, dim=1), tensors, strict=True)
    return [part.reshape(-1)[: tensor.numel()].view(tensor.shape) for part, tensor in parts]


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank holds, laid out as ``like``; nothing is sent.

    If the tensor does not have the shape of ``like``, it is that part already.
    """
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = mesh_of(like), cast(DTensor, like).placements
    if tensor.shape != like.shape:
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=placements)
