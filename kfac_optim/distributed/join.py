"""Uneven inputs, ``torch.distributed.algorithms.Join``: ranks that have run out of inputs step along with the others.

They have to, because they may be the inverse or gradient workers of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..common.rates import scheduled, set_scheduled
from .communicator import Broadcast, Communicator
from .torch import wrappers_of

_T = TypeVar("_T")


def register_joinable(cls: type[_T]) -> type[_T]:
    """A class decorator that tells ``Join`` that the class has the methods of a ``Joinable``."""
    if dist.is_available():
        from torch.distributed.algorithms.join import Joinable

        Joinable.register(cls)
    return cls


def take_part_in_join(
    optimizer: Any, comm: Communicator, find_parameters: Callable[[], Sequence[nn.Parameter]], *, first: bool
) -> None:
    """Tells ``Join``, if it is in use, that this rank takes a step, and shares its gradients and rates.

    Raises:
        RuntimeError: If ``Join`` has a DDP model without the optimizer; it is checked in the ``first`` step.
    """
    config = getattr(optimizer, "_join_config", None)
    if config is not None and config.enable:
        from torch.distributed.algorithms.join import Join

        Join.notify_join_context(optimizer)
        share_gradients(comm, find_parameters(), optimizer.param_groups, exhausted=False)
    elif first and any(wrapper._join_config.enable for wrapper in wrappers_of(find_parameters())):
        raise RuntimeError(
            "Join, or the model's join(), has the model without the optimizer, which exchanges statistics: a rank that "
            "runs out of inputs would take no part. Put both into it: with Join([model, optimizer])"
        )


def join_hook(step: Callable[[], Any]) -> Any:
    """A ``JoinHook`` that calls ``step`` on a rank without inputs, once for every step of the others."""
    from torch.distributed.algorithms.join import JoinHook

    class StepAlong(JoinHook):
        def main_hook(self) -> None:
            step()

    return StepAlong()


def share_gradients(
    comm: Communicator, parameters: Sequence[nn.Parameter], groups: Sequence[dict[str, Any]], *, exhausted: bool
) -> None:
    """Copies the gradients of the first rank that still has inputs to the ranks that have none (a collective).

    So are the numbers that schedulers change, because those of ranks without inputs are not stepped. DDP has made the
    gradients equal on all active ranks.

    Args:
        comm: The ranks.
        parameters: The optimizer's parameters, in an order that all ranks share.
        groups: Its parameter groups.
        exhausted: Whether this rank has run out of inputs; its ``.grad`` are then replaced.
    """
    comm.use_device(parameters[0].device)
    active = torch.zeros(comm.world_size, dtype=torch.float64, device="cpu")
    active[comm.rank] = not exhausted
    (active,) = comm.sum([active], "counts")
    if bool(active.all()):
        return
    source, everyone = int(active.argmax()), tuple(range(comm.world_size))  # the first rank that has inputs
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device="cpu")
    numbers = torch.tensor(scheduled(groups), dtype=torch.float64, device="cpu")
    comm.send([Broadcast([present, numbers], source, everyone)], "counts")
    trained = [p for p, there in zip(parameters, present.tolist(), strict=True) if there]
    dense = torch.contiguous_format
    buffers = [torch.empty_like(p, memory_format=dense) if p.grad is None else p.grad.contiguous() for p in trained]
    comm.send([Broadcast([buffer], source, everyone) for buffer in buffers], "gradients")
    if exhausted:
        set_scheduled(groups, numbers.tolist())
        received = dict(zip(trained, buffers, strict=True))
        for parameter in parameters:
            buffer = received.get(parameter)
            # In the layout that DDP gives the gradient on the other ranks: sums in another order round differently.
            parameter.grad = None if buffer is None else torch.empty_like(parameter).copy_(buffer)
