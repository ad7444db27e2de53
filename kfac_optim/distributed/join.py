"""Uneven inputs: ranks that have run out of them take part in the steps of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .communicator import Communicator, Parcel

__all__ = ["joinable", "notify_join_context", "shadowing", "share_gradients"]

_T = TypeVar("_T")


def shadowing(step: Callable[[], Any]) -> Any:
    """The hook of ``torch.distributed.algorithms.Join`` of a rank without inputs: takes part in the others' steps."""
    from torch.distributed.algorithms.join import JoinHook

    class Shadow(JoinHook):
        def main_hook(self) -> None:
            step()

    return Shadow()


def notify_join_context(optimizer: Any) -> bool:
    """Whether a step happens under ``Join``, which is told of it."""
    config = getattr(optimizer, "_join_config", None)
    if config is None or not config.enable:
        return False
    from torch.distributed.algorithms.join import Join

    Join.notify_join_context(optimizer)
    return True


def joinable(cls: type[_T]) -> type[_T]:
    """Makes a class with a ``join_hook`` known to ``Join``."""
    if dist.is_available():
        from torch.distributed.algorithms.join import Joinable

        Joinable.register(cls)
    return cls


def share_gradients(comm: Communicator, parameters: Sequence[nn.Parameter], *, joined: bool) -> None:
    """Gives the ranks that have run out of inputs (``joined``) the gradients of the others (a collective)."""
    if comm.world_size == 1:
        return
    active = torch.zeros(comm.world_size, dtype=torch.float64)
    active[comm.rank] = not joined
    (active,) = comm.sum([active], "counts")
    if bool(active.all()):
        return
    source, everyone = int(active.argmax()), tuple(range(comm.world_size))
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    comm.send([Parcel([present], source, everyone)], "counts")
    trained = [p for p, there in zip(parameters, present.tolist(), strict=True) if there]
    like = torch.contiguous_format
    wires = [torch.empty_like(p, memory_format=like) if p.grad is None else p.grad.contiguous() for p in trained]
    comm.send([Parcel([wire], source, everyone) for wire in wires], "gradients")
    if joined:
        received = dict(zip(trained, wires, strict=True))
        for parameter in parameters:
            parameter.grad = received.get(parameter)
