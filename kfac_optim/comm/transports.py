"""The operations that a communicator needs, from torch.distributed and from Horovod::

a communicator needs        from torch.distributed       from Horovod
_start_sum                  all_reduce                   allreduce_async_
_start_max                  all_reduce                   allreduce_async_
_start_broadcast            broadcast                    broadcast_async_
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import BUCKET_BYTES, Communicator, LocalCommunicator, Work

__all__ = ["HorovodCommunicator", "TorchCommunicator", "make_communicator"]


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


class _HorovodWork:
    def __init__(self, synchronize: Callable[[int], Any], handle: int) -> None:
        self.synchronize, self.handle = synchronize, handle

    def wait(self) -> None:
        self.synchronize(self.handle)


class HorovodCommunicator(Communicator):
    """Horovod, after ``hvd.init()``. Gradients are Horovod's business (``hvd.DistributedOptimizer``).

    Strategies in which some ranks precondition for others need process sets of Horovod, which it makes during training
    only if ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` is set when it starts.

    Args:
        average_gradients: True (default) with Horovod's Average, False with its Sum.
        bucket_bytes: See :class:`Communicator`.

    Raises:
        ImportError: If Horovod is not installed.
        ValueError: If ``hvd.init()`` has not been called.
    """

    # Horovod makes a set of the same ranks once.
    _sets: ClassVar[dict[tuple[int, ...], Any]] = {}

    def __init__(self, *, average_gradients: bool = True, bucket_bytes: int = BUCKET_BYTES) -> None:
        import horovod.torch as hvd

        if not hvd.is_initialized():
            raise ValueError("HorovodCommunicator: call hvd.init() first")
        super().__init__(hvd.rank(), hvd.size(), average_gradients=average_gradients, bucket_bytes=bucket_bytes)
        self._hvd: Any = hvd
        self._sets[tuple(range(self.world_size))] = hvd.global_process_set
        self._names: dict[tuple[int, ...], int] = {}

    def _start_sum(self, tensor: Tensor) -> Work:
        return self._all_reduce(tensor, self._hvd.Sum)

    def _start_max(self, tensor: Tensor) -> Work:
        return self._all_reduce(tensor, self._hvd.Max)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Work:
        if tensor.dtype is torch.bfloat16:
            raise TypeError("comm_dtype=torch.bfloat16: Horovod can't send it; use torch.float16 or None")
        members = tuple(range(self.world_size))
        handle = self._hvd.allreduce_async_(tensor, name=self._name(members), op=op)
        return _HorovodWork(self._hvd.synchronize, handle)

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        handle = self._hvd.broadcast_async_(tensor, source, name=self._name(members), process_set=self._sets[members])
        return _HorovodWork(self._hvd.synchronize, handle)

    def _name(self, members: tuple[int, ...]) -> str:
        """Horovod matches operations of different ranks by name."""
        self._names[members] = self._names.get(members, 0) + 1
        return f"kfac_optim.{members}.{self._names[members]}"

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Process sets are made by all ranks."""
        for members in groups:
            if members in self._sets:
                continue
            try:
                self._sets[members] = self._hvd.add_process_set(list(members))
            except Exception as error:
                raise RuntimeError(
                    f"Horovod could not make the process set {members} that this assignment needs: set "
                    "HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment, or use assignment='factor-wise'"
                ) from error


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
