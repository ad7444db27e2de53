"""The communicator of torch.distributed, and the choice of the default one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .communicator import Communicator, LocalCommunicator, Work
from .shard_matrices import uses_fsdp
from .sharding import any_sharded, mesh_of


class TorchCommunicator(Communicator):
    """Sends tensors by torch.distributed: Gloo, NCCL or MPI; the tests cover Gloo, and NCCL on one GPU.

    Args:
        process_group: The processes that train together; None (default): torch.distributed's default group.
        comm_dtype: See :class:`Communicator`.
        average_gradients: See :class:`Communicator`.

    Raises:
        TypeError: If ``process_group`` is not a process group.
        ValueError: If torch.distributed is not initialised, this process is not in the group, or ``comm_dtype`` is not
            allowed.
    """

    # Sub-groups by their ranks, shared by all communicators of a group: torch keeps each with its threads and
    # connections until the process ends, and a process may build one optimizer after another.
    _made: ClassVar[WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]] = (
        WeakKeyDictionary()
    )

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        comm_dtype: torch.dtype | None = None,
        average_gradients: bool = True,
    ) -> None:
        if not _is_group(process_group):
            raise TypeError(
                f"process_group={process_group!r}: must be a torch.distributed.ProcessGroup (a DeviceMesh has "
                "get_group()) or None"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("TorchCommunicator: call torch.distributed.init_process_group() first")
        rank = dist.get_rank(process_group)
        if rank < 0:
            raise ValueError("process_group: this process is not in it; build the optimizer on its members only")
        size = dist.get_world_size(process_group)
        super().__init__(rank, size, comm_dtype=comm_dtype, average_gradients=average_gradients)
        self.group: dist.ProcessGroup = process_group or dist.group.WORLD  # type: ignore[assignment]
        self._groups = self._made.setdefault(self.group, {})

    def _start_sum(self, tensor: Tensor) -> Work:
        return dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.group, async_op=True)

    def _start_reduce(self, tensor: Tensor, owner: int) -> Work:
        return dist.reduce(tensor, self._global(owner), dist.ReduceOp.SUM, group=self.group, async_op=True)

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        group = self.group if len(members) == self.world_size else self._prepared(self._groups, members)
        return dist.broadcast(tensor, self._global(source), group=group, async_op=True)

    def _start_exchange(self, sent: Tensor, sizes: Sequence[int], received: Tensor, into: Sequence[int]) -> Work:
        return dist.all_to_all_single(received, sent, list(into), list(sizes), group=self.group, async_op=True)

    def use_device(self, device: torch.device) -> None:
        """See :meth:`Communicator.use_device`.

        Raises:
            RuntimeError: If the process group has been destroyed.
        """
        try:
            self._global(0)
        except ValueError as error:
            # Its connections may still be open, or lead to processes that have been restarted.
            raise RuntimeError(
                "the process group of this optimizer was destroyed, by dist.destroy_process_group(), perhaps to make "
                "another one: build a new optimizer and load the state_dict() of this one"
            ) from error
        super().use_device(device)

    def _global(self, rank: int) -> int:
        """The number that a rank of this group has in the default group."""
        return dist.get_global_rank(self.group, rank)

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Makes a process group for each group of ranks that has none yet.

        All processes of the default group must make this call; see :meth:`check_groups`.
        """
        for members in groups:
            if members in self._groups or len(members) == self.world_size:
                continue
            self._groups[members] = dist.new_group(
                [self._global(rank) for rank in members],
                timeout=self._timeout(),
                backend=dist.get_backend(self.group),
                group_desc="kfac_optim",
            )

    def check_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Raises ValueError if sub-groups are needed while ``process_group`` is only part of the default group.

        ``dist.new_group`` must be called by every process of the default group.
        """
        subgroups = [members for members in groups if 1 < len(members) < self.world_size]
        if subgroups and self.world_size < dist.get_world_size():
            raise ValueError(
                f"assignment: it needs groups of some of the ranks, such as {subgroups[0]}, but process_group is only "
                "a part of the default group, all processes of which would have to make them. Use "
                "assignment='factor-wise' or 'layer-wise' there"
            )

    def _timeout(self) -> Any:
        """The group's time-out, None if unknown, for its sub-groups, which would otherwise wait for half an hour."""
        backend: Any = self.group._get_backend(self.wire_device(torch.device("cpu")))
        return getattr(getattr(backend, "options", None), "_timeout", None)

    def wire_device(self, device: torch.device) -> torch.device:
        """Sends tensors on the CPU via the parameters' device if the group (NCCL) cannot send from the CPU."""
        carried = {carried.type for carried in self.group._device_types}
        return self._device if device.type == "cpu" and "cpu" not in carried else device


def _is_group(process_group: Any) -> bool:
    """Whether this is a process group, None (the default group), or what ``new_group`` returns to non-members."""
    if process_group is None or process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return True
    return isinstance(process_group, dist.ProcessGroup)


def communicator_of(
    model: Any, parameters: Collection[Tensor], find_roots: Callable[[], Iterable[nn.Module]]
) -> Communicator | None:
    """A communicator for the ranks that DDP or FSDP2 has put a model on, if these are not all ranks; else None.

    ``parameters``: the trained ones, which tell of FSDP2 without a model; ``find_roots`` finds the modules around them.
    """
    group = None
    model = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
    elif any_sharded(parameters) and uses_fsdp(find_roots()):
        meshes = [mesh for p in parameters if (mesh := mesh_of(p)) is not None]
        if len(set(meshes)) == 1 and meshes[0].ndim == 1:  # a mesh with more dimensions has no group of all its ranks
            group = meshes[0].get_group()
    return None if group is None or group.size() == dist.get_world_size() else TorchCommunicator(group)


def wrappers_of(parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """The live DDP modules of the process that contain any of some parameters, which are compared by identity."""
    own = set(map(id, parameters))
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [each for each in found if any(id(p) in own for p in each.parameters())]


def require_all_in_wrapper(parameters: Iterable[Tensor], comm: Communicator) -> None:
    """Raises RuntimeError if DDP has parameters on fewer ranks: the others might take no steps, and be waited for."""
    sizes = [wrapper.process_group.size() for wrapper in wrappers_of(parameters)]
    if sizes and max(sizes) < comm.world_size:
        raise RuntimeError(
            f"DistributedDataParallel has put the model on {max(sizes)} of {comm.world_size} ranks, but the optimizer "
            "got it, or its parameters, without this wrapper, and would exchange with all ranks: pass it the wrapped "
            "model, or communicator=TorchCommunicator(group) with the group of the ranks that train together"
        )


def default_communicator() -> Communicator:
    """The communicator of torch.distributed's default group; that of a single process if it is not initialised."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return TorchCommunicator() if several else LocalCommunicator()
