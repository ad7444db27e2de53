"""Communication between ranks: the only module that knows of process groups. One process is the no-op case.

The engine needs two verbs. ``sum`` adds tensors over all ranks (factors and counts travel so), ``send`` copies
tensors from one rank to some others (decompositions, preconditioned gradients). Both work on lists, put them into flat
buckets, start all buckets at once and wait for them in order::

    a communicator needs        from torch.distributed       from Horovod
    _start_sum                  all_reduce                   allreduce_async_
    _start_max                  all_reduce                   allreduce_async_
    _start_broadcast            broadcast                    broadcast_async_

Who calls what is the same on all ranks by construction: buckets follow from shapes and from the assignment alone.

Traffic is counted per kind as an ideal network would carry it: an all-reduce of b bytes over R ranks is
``2 (R - 1) / R b`` sent and as much received by each (ring), a broadcast b sent by its source and b received by every
other member.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "Communicator",
    "HorovodCommunicator",
    "LocalCommunicator",
    "Parcel",
    "TorchCommunicator",
    "joinable",
    "make_communicator",
]

BUCKET_BYTES = 25 * 2**20
_IN_FLIGHT = 4  # buckets on the wire at a time: enough to overlap packing with sending, without a copy of everything
_T = TypeVar("_T")


@dataclass(frozen=True)
class Parcel:
    """Tensors that ``source`` holds and every rank in ``members`` is to have; elsewhere they are overwritten."""

    tensors: Sequence[Tensor]
    source: int
    members: tuple[int, ...]


class _Work(Protocol):
    def wait(self) -> Any: ...


class Communicator(ABC):
    """The other processes; a subclass for another library is passed as ``communicator=``.

    Args:
        rank: This process, 0 <= rank < world_size.
        world_size: Number of processes that train together.
        average_gradients: Whether the wrapper averages the ranks' gradients (True: DDP, FSDP, Horovod's Average) or
            adds them up.
        bucket_bytes: Size of a flat bucket, > 0. Default 25 MiB, as DDP.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        average_gradients: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.average_gradients, self.bucket_bytes = average_gradients, bucket_bytes
        self.device = torch.device("cpu")  # of the parameters; the engine sets it
        self.traffic: dict[str, list[float]] = {}

    @abstractmethod
    def _start_sum(self, tensor: Tensor) -> _Work:
        """Starts to replace a flat tensor by its sum over all ranks."""

    @abstractmethod
    def _start_max(self, tensor: Tensor) -> _Work:
        """Starts to replace a flat tensor by its elementwise maximum over all ranks."""

    @abstractmethod
    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> _Work:
        """Starts to copy a flat tensor from ``source`` to ``members``, who all call this."""

    def wire_device(self, device: torch.device) -> torch.device:
        """Where a tensor of this device has to be to travel."""
        return device

    def check_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Raises ValueError if parcels could not travel within these sub-groups."""
        return

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Makes the sub-groups that parcels will travel in; all ranks call this with the same groups in one order."""
        return

    # Verbs ----------------------------------------------------------------------------------------------------------

    def sum(self, tensors: Sequence[Tensor], kind: str, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """Sums over all ranks.

        Args:
            tensors: The same shapes on every rank, ``[rows, numbers]`` or 0-dim.
            kind: Under which their traffic is counted.
            dtype: Precision on the wire; None: as they are. float16 is scaled by the largest entry of each row, because
                sums of squares leave its range.

        Yields:
            The sums in order, each as soon as it has arrived.

        Raises:
            RuntimeError: If another rank has died, or the group's time-out passed.
        """
        if self.world_size == 1:
            yield from tensors
            return
        scales = self._common_scales(tensors, kind) if dtype is torch.float16 else []
        what = f"the all-reduce of {kind}"

        def start(chosen: list[tuple[int, Tensor]]) -> tuple[list[tuple[int, Tensor]], Tensor, _Work]:
            parts = [(t / scales[i] if scales else t).reshape(-1) for i, t in chosen]
            flat = self._to_wire(torch.cat([part.to(dtype or part.dtype) for part in parts]))
            self._count_sum(kind, flat)
            return chosen, flat, self._call(self._start_sum, flat, what=what)

        for chosen, flat, work in _ahead(map(start, self._filled(tensors, dtype, alike=True))):
            self._call(work.wait, what=what)
            pieces = flat.split([t.numel() for _, t in chosen])
            for (i, t), piece in zip(chosen, pieces, strict=True):
                total = piece.to(t).view_as(t)
                yield total * scales[i] if scales else total

    def send(self, parcels: Iterable[Parcel], kind: str) -> None:
        """Copies every parcel's tensors from its source to its members, bit for bit.

        Args:
            parcels: Those that concern this rank, in an order that all ranks share.
            kind: Under which their traffic is counted.

        Raises:
            RuntimeError: If another rank has died, or the group's time-out passed.
        """
        routes: dict[tuple[int, tuple[int, ...], torch.device], list[Tensor]] = {}
        for parcel in parcels:
            for tensor in parcel.tensors if len(parcel.members) > 1 else ():
                routes.setdefault((parcel.source, parcel.members, tensor.device), []).append(tensor)

        def start() -> Iterator[tuple[int, list[Tensor], Tensor, _Work, str]]:
            for (source, members, _), tensors in routes.items():
                for chosen in self._filled(tensors):
                    bucket = [tensor for _, tensor in chosen]
                    flat = self._to_wire(self._packed(bucket, source == self.rank, kind))
                    what = f"the broadcast of {kind} from rank {source}"
                    yield (
                        source,
                        bucket,
                        flat,
                        self._call(self._start_broadcast, flat, source, members, what=what),
                        what,
                    )

        for source, bucket, flat, work, what in _ahead(start()):
            self._call(work.wait, what=what)
            pieces = flat.split([tensor.nbytes for tensor in bucket])
            for tensor, piece in zip(bucket, pieces, strict=True) if source != self.rank else ():
                _bytes(tensor).copy_(piece)

    def _packed(self, tensors: list[Tensor], sends: bool, kind: str) -> Tensor:
        """Room for the tensors, filled on the source: bytes, so that types share a bucket and nothing is rounded."""
        if sends:
            flat = torch.cat([_bytes(tensor.contiguous()) for tensor in tensors])
            self._count(kind, flat.nbytes, 0)
            return flat
        flat = torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8, device=tensors[0].device)
        self._count(kind, 0, flat.nbytes)
        return flat

    # Parts of the verbs ---------------------------------------------------------------------------------------------

    def _filled(
        self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None, *, alike: bool = False
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """Neighbours on one device (and ``alike`` in type), with their index, up to the size of a bucket."""
        bucket: list[tuple[int, Tensor]] = []
        size = 0
        for i, tensor in enumerate(tensors):
            new = tensor.numel() * (dtype or tensor.dtype).itemsize
            other = bucket and (
                bucket[0][1].device != tensor.device or (alike and bucket[0][1].dtype is not tensor.dtype)
            )
            if other or (bucket and size + new > self.bucket_bytes):
                yield bucket
                bucket, size = [], 0
            bucket.append((i, tensor))
            size += new
        if bucket:
            yield bucket

    def _common_scales(self, tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
        """Per row the largest entry on any rank: no sum of quotients exceeds the number of ranks."""
        if not tensors:
            return []
        largest = [tensor.abs().amax(-1, keepdim=True) for tensor in tensors]
        flat = self._to_wire(torch.cat([rows.reshape(-1).to(largest[0].device) for rows in largest]))
        self._count_sum(kind, flat)
        work = self._call(self._start_max, flat, what=f"the all-reduce of {kind}")
        self._call(work.wait, what=f"the all-reduce of {kind}")
        pieces = flat.split([rows.numel() for rows in largest])
        scales = [piece.to(rows).view_as(rows) for piece, rows in zip(pieces, largest, strict=True)]
        return [torch.where(scale > 0, scale, 1.0) for scale in scales]

    def _to_wire(self, flat: Tensor) -> Tensor:
        return flat.to(self.wire_device(flat.device))

    def _count_sum(self, kind: str, flat: Tensor) -> None:
        share = 2 * (self.world_size - 1) / self.world_size * flat.nbytes
        self._count(kind, share, share)

    def _count(self, kind: str, sent: float, received: float) -> None:
        total = self.traffic.setdefault(kind, [0.0, 0.0])
        total[0] += sent
        total[1] += received

    def _call(self, operation: Callable[..., Any], *args: Any, what: str) -> Any:
        try:
            return operation(*args)
        except RuntimeError as error:
            # Of the same type, by which elastic launchers know what to do.
            raise type(error)(
                f"{what} failed on rank {self.rank} of {self.world_size}: another rank has died, raised, or fallen out "
                f"of step, or the time-out of the process group has passed ({error})"
            ) from error


def _ahead(started: Iterator[_T]) -> Iterator[_T]:
    """Draws a few items ahead of the one it yields: their operations run meanwhile."""
    drawn: deque[_T] = deque()
    for item in started:
        drawn.append(item)
        if len(drawn) > _IN_FLIGHT:
            yield drawn.popleft()
    yield from drawn


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat."""
    return tensor.detach().view(-1).view(torch.uint8)


class LocalCommunicator(Communicator):
    """One process: nobody to talk to."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)

    def _start_sum(self, tensor: Tensor) -> _Work:
        raise RuntimeError("this communicator has no other processes")

    _start_max = _start_sum

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> _Work:
        return self._start_sum(tensor)


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

    def _start_sum(self, tensor: Tensor) -> _Work:
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def _start_max(self, tensor: Tensor) -> _Work:
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, op: Any) -> _Work:
        work: Any = dist.all_reduce(tensor, op, group=self.group, async_op=True)
        return work

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> _Work:
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

    def _start_sum(self, tensor: Tensor) -> _Work:
        return self._all_reduce(tensor, self._hvd.Sum)

    def _start_max(self, tensor: Tensor) -> _Work:
        return self._all_reduce(tensor, self._hvd.Max)

    def _all_reduce(self, tensor: Tensor, op: Any) -> _Work:
        if tensor.dtype is torch.bfloat16:
            raise TypeError("comm_dtype=torch.bfloat16: Horovod can't send it; use torch.float16 or None")
        members = tuple(range(self.world_size))
        handle = self._hvd.allreduce_async_(tensor, name=self._name(members), op=op)
        return _HorovodWork(self._hvd.synchronize, handle)

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> _Work:
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


# Uneven inputs -------------------------------------------------------------------------------------------------------


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


# Gradients that a framework has sharded -------------------------------------------------------------------------------


def full_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient, whole: also where DeepSpeed ZeRO 1-3 keeps a part of it on every rank (then a collective)."""
    if parameter.grad is None and (hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")):
        import deepspeed.utils

        return deepspeed.utils.safe_get_full_grad(parameter)
    return parameter.grad


def set_full_gradient_(parameter: Tensor, gradient: Tensor) -> None:
    """Puts back what :func:`full_gradient` gave, changed."""
    if parameter.grad is not None:
        parameter.grad.copy_(gradient)
    else:
        import deepspeed.utils

        if hasattr(parameter, "ds_id"):  # ZeRO 3 cuts it into equal parts, without padding it first
            ranks = dist.get_world_size(cast(Any, parameter).ds_process_group)
            gradient = torch.nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % ranks))
        deepspeed.utils.safe_set_full_grad(parameter, gradient)


# Sharded tensors -----------------------------------------------------------------------------------------------------


def _is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; whoever has one has imported them, which takes longer than all of this package."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP2 has sharded (a collective); any other tensor itself."""
    return cast(Any, tensor).full_tensor() if _is_sharded(tensor) else tensor


def sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank holds, laid out as ``like``; nothing is sent."""
    if not _is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = cast(DTensor, like).device_mesh, cast(DTensor, like).placements
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=placements)


def sharding_problem(parameter: Tensor, roots: Iterable[nn.Module]) -> str:
    """What keeps a parameter from being treated as a whole; empty for plain tensors and for the shards of FSDP2.

    Tensor parallelism shards activations as well, of which the hooks would see a part only.
    """
    if not _is_sharded(parameter):
        return ""
    from torch.distributed.fsdp import FSDPModule

    placements = cast(Any, parameter).placements
    by_fsdp = any(isinstance(module, FSDPModule) for root in roots for module in root.modules())
    # FSDP2 shards rows over the last dimension of its mesh and replicates over the others (HSDP).
    if by_fsdp and placements[-1].is_shard(0) and all(placement.is_replicate() for placement in placements[:-1]):
        return ""
    return f"split by tensor parallelism, or not by rows: {placements}"


def refuse_flattened(roots: Iterable[nn.Module]) -> None:
    """Raises TypeError for torch's first FSDP: it keeps pieces of flattened weights, in which no matrix is left."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for root in roots for module in root.modules()):
        raise TypeError(
            "FullyShardedDataParallel (FSDP1) flattens the weights, so that no layer's matrix is left to precondition: "
            "shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def largest_entry(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute entry of all tensors, 0-dim; NaN or infinite if one of them is. Sharded ones count whole."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    norms = [gathered(_largest_alike(alike)) for alike in kinds.values()]
    return torch.stack([norm.to(norms[0].device) for norm in norms]).max() if norms else torch.zeros(())


def _largest_alike(tensors: Sequence[Tensor]) -> Tensor:
    simple = all(type(t) is Tensor and t.device.type == "cpu" and t.numel() and not t.is_complex() for t in tensors)
    if simple and not any(t.is_sparse for t in tensors):
        # On the CPU torch takes 15 times as long for the maximum norm as for both extremes.
        return torch.stack([extreme for t in tensors for extreme in t.aminmax()]).abs().max()
    return torch.nn.utils.get_total_norm(tensors, float("inf"))
