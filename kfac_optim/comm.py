"""Communication between ranks: the only module that knows of process groups. One process is the no-op case."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist

__all__ = ["Communicator", "LocalCommunicator", "make_communicator"]


class Communicator(Protocol):
    """What the engine needs to know of the other processes."""

    @property
    def rank(self) -> int:
        """This process, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        ...


class LocalCommunicator:
    """One process: nobody to talk to."""

    rank = 0
    world_size = 1


def make_communicator(process_group: Any = None) -> Communicator:
    """The communicator for a process group (default: torch.distributed's default group if it is initialised).

    Raises:
        TypeError: If ``process_group`` is not a group.
        RuntimeError: If the group has more than one process.
    """
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group={process_group!r}: must be a torch.distributed.ProcessGroup or None")
    size = dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
    if size > 1:
        raise RuntimeError(
            f"the process group has {size} processes; this version of kfac_optim trains on one process only (its "
            "ranks would drift apart). Pass process_group= a group of one process, or train with "
            "the base optimizer"
        )
    return LocalCommunicator()
