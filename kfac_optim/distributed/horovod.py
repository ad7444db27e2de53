"""The communicator of Horovod."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .communicator import Communicator, Work


def derived_from_by_horovod(cls: type, groups: Sequence[Any]) -> Any:
    """The optimizer from which Horovod is making a new one, which takes over its engine; None if it is not.

    ``hvd.DistributedOptimizer`` makes a subclass with the name of the optimizer's class, and calls its constructor with
    the optimizer's own groups. Nothing in these refers to the optimizer, which therefore has to be searched for.
    """
    parent, *others = cls.__bases__
    if not others and cls.__name__ == parent.__name__:
        for other in (found for found in gc.get_objects() if type(found) is parent):
            if list(map(id, groups)) == list(map(id, other.__dict__.get("param_groups", ()))):
                return other
    return None


class _HorovodWork:
    """An operation of Horovod that has been started; ``handle`` is Horovod's number for it."""

    def __init__(self, synchronize: Callable[[int], Any], handle: int) -> None:
        self.synchronize, self.handle = synchronize, handle

    def wait(self) -> None:
        self.synchronize(self.handle)


class HorovodCommunicator(Communicator):
    """Sends tensors by Horovod, and leaves the gradients to ``hvd.DistributedOptimizer``.

    Build it after ``hvd.init()``. Strategies in which some ranks precondition for others need process sets, which
    Horovod makes during training only if ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` is set when it starts.

    Args:
        comm_dtype: See :class:`Communicator`; Horovod cannot send torch.bfloat16.
        average_gradients: True (default) with Horovod's Average, False with its Sum.

    Raises:
        ImportError: If Horovod is not installed.
        ValueError: If ``hvd.init()`` has not been called, or ``comm_dtype`` is not allowed.
    """

    # Shared by all communicators, because Horovod refuses to make a second set of the same ranks.
    _sets: ClassVar[dict[tuple[int, ...], Any]] = {}

    def __init__(self, *, comm_dtype: torch.dtype | None = None, average_gradients: bool = True) -> None:
        if comm_dtype is torch.bfloat16:
            raise ValueError("comm_dtype=torch.bfloat16: Horovod cannot send it; use torch.float16 or None")
        import horovod.torch as hvd

        if not hvd.is_initialized():
            raise ValueError("HorovodCommunicator: call hvd.init() first")
        super().__init__(hvd.rank(), hvd.size(), comm_dtype=comm_dtype, average_gradients=average_gradients)
        self._hvd: Any = hvd
        self._sets[tuple(range(self.world_size))] = hvd.global_process_set
        self._names: dict[tuple[int, ...], int] = {}

    def _start_sum(self, tensor: Tensor) -> Work:
        members = tuple(range(self.world_size))
        handle = self._hvd.allreduce_async_(tensor, name=self._name(members), op=self._hvd.Sum)
        return _HorovodWork(self._hvd.synchronize, handle)

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        ranks = self._prepared(self._sets, members)
        handle = self._hvd.broadcast_async_(tensor, source, name=self._name(members), process_set=ranks)
        return _HorovodWork(self._hvd.synchronize, handle)

    def _name(self, members: tuple[int, ...]) -> str:
        """A new name for an operation of these ranks; Horovod matches operations of different ranks by name."""
        self._names[members] = self._names.get(members, 0) + 1
        return f"kfac_optim.{members}.{self._names[members]}"

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Makes a process set for each group that has none yet; all ranks have to do so together.

        Raises:
            RuntimeError: If Horovod refuses.
        """
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
