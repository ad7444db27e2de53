"""How the ranks exchange tensors: :class:`Communicator` has three verbs, built from four operations of a transport.

``sum`` adds tensors over all ranks, for all of them (counts, factors) or for one (factors that one rank alone keeps).
``send`` copies tensors from one rank to some others (decompositions, preconditioned gradients). These two take lists of
tensors, pack them into flat buckets, start the transfer of a few buckets ahead, and wait for them in order.
``exchange`` copies tensors between any two ranks (shards of gradients and of directions), all at once. With one process
the verbs send nothing.

Traffic is counted per kind as an ideal network would carry it (:mod:`kfac_optim.distributed`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..common.grouping import grouped_by_key
from .packing import by_rank, empty_for, packed, unpack

BUCKET_BYTES = 100 * 2**20
_COMM_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IN_FLIGHT = 2  # buckets on the wire at a time: enough to overlap packing with sending, without a copy of everything


@dataclass(frozen=True)
class Broadcast:
    """Tensors to copy from one rank to others.

    Attributes:
        tensors: On the source the tensors to send; on the other members tensors of the same shapes and dtypes, which
            are overwritten.
        source: The rank that sends.
        members: All ranks that take part, at least two, in ascending order, the source among them.
    """

    tensors: Sequence[Tensor]
    source: int
    members: tuple[int, ...]


class Work(Protocol):
    """An operation that has been started."""

    def wait(self) -> Any:
        """Returns when the operation has finished."""
        ...


class _Transfer(NamedTuple):
    """A bucket on the wire."""

    flat: Tensor
    tensors: Sequence[Tensor]  # those that a sum has been packed from, or that a broadcast fills
    work: Work
    what: str  # its name, for errors


class Communicator(ABC):
    """The connection to the other processes; pass one as ``communicator=`` to replace the default.

    A subclass for another library implements ``_start_sum`` and ``_start_broadcast``. It overrides ``_start_reduce``
    and ``_start_exchange`` where the library has them, and ``prepare``, ``check_groups`` and ``wire_device`` where it
    needs them.

    Args:
        rank: This process, 0 <= rank < world_size.
        world_size: Number of processes that train together.
        comm_dtype: Precision in which factors travel: torch.float16, bfloat16, float32 or float64. None (default): the
            precision in which they are summed, at least float32. The 16-bit types halve the traffic of factors; counts,
            decompositions and directions always travel bit for bit.
        average_gradients: Whether the ranks' gradients are averaged (True, default: DDP, FSDP, Horovod's Average) or
            added up.

    Attributes:
        traffic: By kind, the bytes that this rank has sent and received so far, ``[sent, received]``.
        group: The ranks as a process group of torch.distributed; None if another library connects them.
        bucket_bytes: Size of a flat bucket, two of which are held at a time; may be set. Default 100 MiB, four times
            DDP's: decompositions need not overlap with a backward pass, and larger buckets are fewer.

    Raises:
        ValueError: If ``comm_dtype`` is none of these.
    """

    bucket_bytes = BUCKET_BYTES
    group: Any = None

    def __init__(
        self, rank: int, world_size: int, *, comm_dtype: torch.dtype | None = None, average_gradients: bool = True
    ) -> None:
        if comm_dtype not in _COMM_DTYPES:
            allowed = ", ".join(map(repr, _COMM_DTYPES))
            raise ValueError(f"comm_dtype={comm_dtype!r}: must be one of {allowed}")
        self.rank, self.world_size = rank, world_size
        self.comm_dtype, self.average_gradients = comm_dtype, average_gradients
        self.traffic: dict[str, list[float]] = {}
        self._device = torch.device("cpu")

    @abstractmethod
    def _start_sum(self, tensor: Tensor) -> Work:
        """Starts to replace a flat tensor by its sum over all ranks."""

    def _start_reduce(self, tensor: Tensor, owner: int) -> Work | None:
        """Starts to replace a flat tensor on ``owner`` by its sum over all ranks; on the others it may change.

        Returns None, as this default does, if the library can only sum for all ranks.
        """
        return None

    def _start_exchange(self, sent: Tensor, sizes: Sequence[int], received: Tensor, into: Sequence[int]) -> Work:
        """Starts to send each rank its part of a flat tensor, and to fill another with what each rank sends.

        Args:
            sent: The parts for all ranks, one after the other.
            sizes: Their lengths, by rank.
            received: What to fill, in the order of the ranks.
            into: The lengths of its parts.
        """
        raise TypeError(f"{type(self).__name__}.exchange: needs _start_exchange, which this communicator lacks")

    @property
    def can_exchange(self) -> bool:
        """Whether ``exchange`` is possible, because the class has a ``_start_exchange`` of its own."""
        return type(self)._start_exchange is not Communicator._start_exchange

    @abstractmethod
    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        """Starts to copy a flat tensor from ``source`` to ``members``, who all call this."""

    def use_device(self, device: torch.device) -> None:
        """Notes where the model's parameters are now: the engine calls this before it sends anything in a step."""
        self._device = device

    def wire_device(self, device: torch.device) -> torch.device:
        """The device to which a tensor on ``device`` has to be moved in order to travel; by default the same one."""
        return device

    def check_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Raises ValueError if broadcasts within these groups of ranks are impossible; by default it never does."""
        return

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Makes the groups of ranks in which broadcasts will travel; all ranks call this with the same list."""
        return

    def _prepared(self, groups: Mapping[tuple[int, ...], Any], members: tuple[int, ...]) -> Any:
        """The group among those that :meth:`prepare` has made; a TypeError if it was not called for these ranks."""
        if members not in groups:
            raise TypeError(
                f"{type(self).__name__}.prepare: was not called for the ranks {members}; a communicator that wraps "
                "this one, or overrides prepare(groups), has to call the prepare(groups) of this one"
            )
        return groups[members]

    # The verbs ------------------------------------------------------------------------------------------------------

    def sum(
        self,
        tensors: Sequence[Tensor],
        kind: str,
        *,
        owners: Sequence[int | None] | None = None,
        compressed: bool = False,
    ) -> Iterator[Tensor]:
        """Sums over all ranks (a collective).

        Args:
            tensors: ``[rows, numbers]`` or 0-dim, with the same shapes on every rank; they are not changed.
            kind: The kind under which their traffic is counted.
            owners: For each tensor, the only rank that gets its sum; None, as by default for all: every rank gets it.
                Adjacent tensors with the same owner share a bucket.
            compressed: Whether they travel as ``comm_dtype``. As float16, each row is first divided by its largest
                entry, averaged over the ranks, because sums of squares leave the range of float16.

        Yields:
            The sums in order and in the tensors' own dtypes, each as soon as it has arrived. What a rank gets in place
            of a sum that another one owns has the same shape, but no meaning.

        Raises:
            RuntimeError: If another rank has died, or the group's time-out has passed.
        """
        if self.world_size == 1:
            yield from tensors
            return
        owners = [None] * len(tensors) if owners is None else owners
        dtype = self.comm_dtype if compressed else None
        scales = self._row_scales(tensors, kind) if dtype is torch.float16 else None

        def started() -> Iterator[_Transfer]:
            for part in self._buckets(tensors, owners, dtype):
                bucket, owner = tensors[part], owners[part.start]
                if scales is not None:
                    bucket = [tensor / scale for tensor, scale in zip(bucket, scales[part], strict=True)]
                flat = self._to_wire(torch.cat([tensor.reshape(-1).to(dtype or tensor.dtype) for tensor in bucket]))
                what = f"the {'all-reduce' if owner is None else f'reduction to rank {owner}'} of {kind}"
                with self._explaining_errors(what):
                    work = None if owner is None else self._start_reduce(flat, owner)
                    if work is None:
                        share = 2 * (self.world_size - 1) / self.world_size * flat.nbytes
                        self._count(kind, share, share)
                        work = self._start_sum(flat)
                    else:
                        self._count(kind, *((0, flat.nbytes) if owner == self.rank else (flat.nbytes, 0)))
                yield _Transfer(flat, tensors[part], work, what)

        sums = (
            piece.to(tensor).view_as(tensor)
            for flat, bucket in self._arrived(started())
            for piece, tensor in zip(flat.split([tensor.numel() for tensor in bucket]), bucket, strict=True)
        )
        yield from sums if scales is None else map(torch.mul, sums, scales)

    def send(self, broadcasts: Iterable[Broadcast], kind: str) -> None:
        """Copies the tensors of every broadcast from its source to its members, bit for bit (a collective).

        Args:
            broadcasts: Those that this rank is a member of, in an order that all ranks share.
            kind: The kind under which their traffic is counted.

        Raises:
            RuntimeError: If another rank has died, or the group's time-out has passed.
        """
        sent = [(each.source, each.members, tensor) for each in broadcasts for tensor in each.tensors]
        buckets = grouped_by_key(
            sent, lambda one: (*one[:2], one[2].device), lambda one: one[2].nbytes, self.bucket_bytes
        )

        def started() -> Iterator[_Transfer]:
            for bucket in buckets:
                source, members, _ = bucket[0]
                tensors = [tensor for *_, tensor in bucket]
                what, sends = f"the broadcast of {kind} from rank {source}", source == self.rank
                # As bytes, so that dtypes share a bucket and nothing is rounded.
                flat = self._to_wire(packed(tensors) if sends else empty_for(tensors))
                self._count(kind, *((flat.nbytes, 0) if sends else (0, flat.nbytes)))
                with self._explaining_errors(what):
                    work = self._start_broadcast(flat, source, members)
                yield _Transfer(flat, [] if sends else tensors, work, what)

        for flat, received in self._arrived(started()):
            if received:
                unpack(flat, received)

    def exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], kind: str) -> None:
        """Copies tensors between single ranks, bit for bit (a collective).

        Args:
            sent: Tensors of this rank, each with the rank that gets it.
            received: Tensors to fill, each with the rank that sends it, which may be this one. Any two ranks list what
                travels between them in the same order.
            kind: The kind under which their traffic is counted.

        Raises:
            RuntimeError: If another rank has died, or the group's time-out has passed.
            TypeError: If the library cannot (see :attr:`can_exchange`).
        """
        by_target, by_source = by_rank(sent, self.world_size), by_rank(received, self.world_size)
        for tensor, own in zip(by_source[self.rank], by_target[self.rank], strict=True):
            tensor.copy_(own)
        if self.world_size == 1:
            return
        by_target[self.rank], by_source[self.rank] = [], []
        outgoing, incoming = ([tensor for of_rank in parts for tensor in of_rank] for parts in (by_target, by_source))
        device = next((tensor.device for _, tensor in (*sent, *received)), self._device)
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        flat = self._to_wire(packed(outgoing) if outgoing else nothing)
        filled = self._to_wire(empty_for(incoming) if incoming else nothing)
        self._count(kind, flat.nbytes, filled.nbytes)
        sizes, into = ([sum(tensor.nbytes for tensor in parts) for parts in of] for of in (by_target, by_source))
        with self._explaining_errors(f"the exchange of {kind}"):
            self._start_exchange(flat, sizes, filled, into).wait()
        unpack(filled, incoming)

    # Parts of the verbs ---------------------------------------------------------------------------------------------

    def _buckets(
        self, tensors: Sequence[Tensor], owners: Sequence[int | None], dtype: torch.dtype | None
    ) -> Iterator[slice]:
        """Cuts a list into slices of adjacent tensors that are summed together, at least one each.

        Those of a slice have one device, dtype and owner, and fill a bucket if they travel in ``dtype`` (None: their
        own).
        """
        kinds = [(tensor.device, tensor.dtype, owner) for tensor, owner in zip(tensors, owners, strict=True)]
        start = size = 0
        for i, tensor in enumerate(tensors):
            nbytes = tensor.numel() * (dtype or tensor.dtype).itemsize
            if i > start and (kinds[i] != kinds[start] or size + nbytes > self.bucket_bytes):
                yield slice(start, i)
                start, size = i, 0
            size += nbytes
        if tensors:
            yield slice(start, len(tensors))

    def _row_scales(self, tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
        """The largest absolute entry of each row, averaged over the ranks (1 if all are 0), ``[rows, 1]`` or 0-dim.

        Once rows are divided by it, neither their entries nor the sums over the ranks exceed the number of ranks.
        """
        largest = [tensor.abs().amax(-1, keepdim=True) for tensor in tensors]
        scales = [total / self.world_size for total in self.sum(largest, kind)]
        return [torch.where(scale > 0, scale, 1.0) for scale in scales]

    def _arrived(self, started: Iterator[_Transfer]) -> Iterator[tuple[Tensor, Sequence[Tensor]]]:
        """The bucket and the tensors of each transfer, in order and as soon as it has ended."""
        for transfer in _ahead(started):
            with self._explaining_errors(transfer.what):
                transfer.work.wait()
            yield transfer.flat, transfer.tensors

    def _to_wire(self, flat: Tensor) -> Tensor:
        return flat.to(self.wire_device(flat.device))

    def _count(self, kind: str, sent: float, received: float) -> None:
        """Adds bytes to :attr:`traffic`."""
        total = self.traffic.setdefault(kind, [0.0, 0.0])
        total[0] += sent
        total[1] += received

    @contextmanager
    def _explaining_errors(self, what: str) -> Iterator[None]:
        """Re-raises a transport error with the name of the failed operation and its usual cause."""
        try:
            yield
        except RuntimeError as error:
            # Keep the exception type: elastic launchers dispatch on it.
            raise type(error)(
                f"{what} failed on rank {self.rank} of {self.world_size}: another rank has died, raised, or fallen out "
                "of step, or does not train this model (communicator=TorchCommunicator(group) names the ranks that do, "
                f"LocalCommunicator() a rank alone), or the time-out of the process group has passed ({error})"
            ) from error


def _ahead(started: Iterator[_Transfer]) -> Iterator[_Transfer]:
    """Yields transfers, which start when they are drawn, but draws a few ahead, so that these run meanwhile."""
    drawn: deque[_Transfer] = deque()
    for item in started:
        drawn.append(item)
        if len(drawn) > _IN_FLIGHT:
            yield drawn.popleft()
    yield from drawn


class LocalCommunicator(Communicator):
    """A single process, which sends nothing.

    With ``world_size`` > 1 it stands for one rank of many, for memory estimates and pictures of an assignment, and
    cannot train.

    Args:
        rank: The rank that it stands for, default 0.
        world_size: The number of ranks, default 1.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rank, world_size)

    def _start_sum(self, tensor: Tensor) -> Work:
        raise RuntimeError("LocalCommunicator sends nothing, and with world_size > 1 is for estimates alone")

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        return self._start_sum(tensor)
