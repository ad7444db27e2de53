"""What the engine calls, in terms of three operations of a transport; one process is the no-op case.

There are two verbs. ``sum`` adds tensors over all ranks (factors and counts travel so), ``send`` copies tensors from
one rank to some others (decompositions, preconditioned gradients). Both work on lists, put them into flat buckets,
start all buckets at once and wait for them in order.

Traffic is counted per kind as an ideal network would carry it: an all-reduce of b bytes over R ranks is
``2 (R - 1) / R b`` sent and as much received by each (ring), a broadcast b sent by its source and b received by every
other member.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["BUCKET_BYTES", "Communicator", "LocalCommunicator", "Parcel", "Work"]

BUCKET_BYTES = 25 * 2**20
_IN_FLIGHT = 4  # buckets on the wire at a time: enough to overlap packing with sending, without a copy of everything
_T = TypeVar("_T")


@dataclass(frozen=True)
class Parcel:
    """Tensors that ``source`` holds and every rank in ``members`` is to have; elsewhere they are overwritten."""

    tensors: Sequence[Tensor]
    source: int
    members: tuple[int, ...]


class Work(Protocol):
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
    def _start_sum(self, tensor: Tensor) -> Work:
        """Starts to replace a flat tensor by its sum over all ranks."""

    @abstractmethod
    def _start_max(self, tensor: Tensor) -> Work:
        """Starts to replace a flat tensor by its elementwise maximum over all ranks."""

    @abstractmethod
    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
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

        def start(chosen: list[tuple[int, Tensor]]) -> tuple[list[tuple[int, Tensor]], Tensor, Work]:
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

        def start() -> Iterator[tuple[int, list[Tensor], Tensor, Work, str]]:
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

    def _start_sum(self, tensor: Tensor) -> Work:
        raise RuntimeError("this communicator has no other processes")

    _start_max = _start_sum

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        return self._start_sum(tensor)
