"""torch.distributed: Gloo, NCCL or MPI."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import BUCKET_BYTES, Communicator, LocalCommunicator, Work

__all__ = ["TorchCommunicator", "make_communicator"]


class TorchCommunicator(Communicator):
    """torch.distributed: Gloo, NCCL or MPI (NCCL and MPI are written for and not tested).

    Args:
        process_group: Default: the default group.
        average_gradients: See :class:`Communicator`.
        bucket_bytes: See :class:`Communicator`.

    Raises:
        ValueError: If this process is not in the group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        average_gradients: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ValueError("process_group: this process is not in it; build the optimizer on its members only")
        size = dist.get_world_size(process_group)
        super().__init__(rank, size, average_gradients=average_gradients, bucket_bytes=bucket_bytes)
        self.group: dist.ProcessGroup = process_group or dist.group.WORLD  # type: ignore[assignment]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(size)): self.group}

    def _start_sum(self, tensor: Tensor) -> Work:
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def _start_max(self, tensor: Tensor) -> Work:
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Work:
        work: Any = dist.all_reduce(tensor, op, group=self.group, async_op=True)
        return work

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        work: Any = dist.broadcast(tensor, self._global(source), group=self._groups[members], async_op=True)
        return work

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Made by all processes of the default group, as torch.distributed wants it."""
        for members in [members for members in groups if members not in self._groups]:
            self._groups[members] = dist.new_group(
                [self._global(rank) for rank in members],
                timeout=self._timeout(),
                backend=dist.get_backend(self.group),
                group_desc="kfac_optim",
            )

    def check_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Groups are made by the default group as a whole."""
        parts = [members for members in groups if 1 < len(members) < self.world_size]
        if parts and self.world_size < dist.get_world_size():
            raise ValueError(
                f"assignment: needs groups of some of the ranks, such as {parts[0]}, but process_group is only a part "
                "of the default group, which would have to make them as a whole. Use assignment='factor-wise' or "
                "'layer-wise' with process_group="
            )

    def _timeout(self) -> Any:
        """The group's own time-out (None: the backend's default): a new group would otherwise wait half an hour."""
        backend: Any = self.group._get_backend(self.wire_device(torch.device("cpu")))
        return getattr(getattr(backend, "options", None), "_timeout", None)

    def wire_device(self, device: torch.device) -> torch.device:
        """That of the parameters for what is on the CPU, if the group (NCCL) carries nothing from there."""
        carried = {carried.type for carried in self.group._device_types}
        return self.device if device.type == "cpu" and "cpu" not in carried else device


def make_communicator(process_group: Any = None) -> Communicator:
    """The communicator for a process group (default: torch.distributed's default group if it is initialised).

    Raises:
        TypeError: If ``process_group`` is not a group.
        ValueError: If this process is not in it.
    """
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return LocalCommunicator()
    outside = process_group is dist.GroupMember.NON_GROUP_MEMBER
    if not (process_group is None or outside or isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(f"process_group={process_group!r}: must be a torch.distributed.ProcessGroup or None")
    if outside or dist.get_world_size(process_group) > 1:
        return TorchCommunicator(process_group)
    return LocalCommunicator()
