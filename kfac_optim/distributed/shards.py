"""The shards of FSDP2's parameters on their way to the ranks that precondition them, and back.

Where some ranks alone precondition a layer, nobody else needs its gradient as a whole. So every rank sends its rows to
these workers, and they send each rank its rows of the result::

      rows of   rank 0   rank 1   rank 2               rank 0   rank 1   rank 2
      layer a    [a0]     [a1]     [a2]                 [a0]
      layer b    [b0]     [b1]     [b2]      <---->     [a1]     [b0
      layer c    [c0]     [c1]     [c2]                 [a2]      b1       [c0
                                                                  b2]       c1  c2]

With R ranks and one worker for each layer a rank sends and receives ``1 / R`` of what it would if all of them gathered
all layers, and holds as little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Communicator
from .sharding import is_sharded

__all__ = ["ShardExchange", "are_exchangeable"]


def are_exchangeable(parameters: Sequence[Tensor], comm: Communicator) -> bool:
    """Whether these are shards by rows that lie on all ranks of ``comm`` (FSDP2, HSDP), which can exchange them."""
    return comm.can_exchange and all(is_sharded(p) and _lies_on(cast(Any, p), comm) for p in parameters)


def _lies_on(parameter: Any, comm: Communicator) -> bool:
    """Whether a DTensor is split by rows over the last dimension of a mesh of the ranks of ``comm``, and no other."""
    *others, last = parameter.placements
    by_rows = last.is_shard(0) and all(placement.is_replicate() for placement in others)
    return by_rows and sorted(parameter.device_mesh.mesh.flatten().tolist()) == sorted(_global_ranks(comm))


def _global_ranks(comm: Communicator) -> list[int]:
    """The number in the default group of each rank."""
    return dist.get_process_group_ranks(cast(Any, comm).group)


class ShardExchange:
    """Gathers tensors laid out as parameters are on their workers, and scatters what the workers make of them.

    Args:
        workers: For each parameter (see :func:`are_exchangeable`) the ranks that need it whole; in the same order on
            all ranks.
        comm: The ranks.
    """

    def __init__(self, workers: Mapping[Any, Sequence[int]], comm: Communicator) -> None:
        self.workers, self.comm = dict(workers), comm

    def gather(self, vectors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Whole tensors of those parameters that this rank works on (a collective).

        Args:
            vectors: By parameter a tensor that is laid out as the parameter is.
        """
        rank, whole = self.comm.rank, {}
        for batch in self._batches():
            sent: list[tuple[int, Tensor]] = []
            received: list[tuple[int, Tensor]] = []
            for p in batch:
                own = cast(Any, vectors[p]).redistribute(placements=p.placements).to_local()
                places = _Places(p, self.comm)
                sent += [(worker, own) for worker in self.workers[p] if rank in places.holders(worker)]
                if rank in self.workers[p]:
                    whole[p] = torch.empty(p.shape, dtype=own.dtype, device=own.device)
                    parts = zip(places.holders(rank), places.sections, strict=True)
                    received += [(holder, whole[p][section]) for holder, section in parts]
            self.comm.exchange(sent, received, "gradients")
        return whole

    def scatter(self, whole: Mapping[Any, Tensor], dtype: torch.dtype) -> dict[Any, Tensor]:
        """Every rank's shards of what the workers have, laid out as the parameters are (a collective).

        Args:
            whole: A tensor of each parameter that this rank works on.
            dtype: That of all of them.
        """
        from torch.distributed.tensor import DTensor

        rank, shards = self.comm.rank, {}
        for batch in self._batches():
            sent: list[tuple[int, Tensor]] = []
            received: list[tuple[int, Tensor]] = []
            for p in batch:
                places = _Places(p, self.comm)
                for other in range(self.comm.world_size):
                    if self._source(p, other) == rank:
                        sent.append((other, whole[p][places.section_of(other)]))
                shape = p.to_local().shape
                shards[p] = torch.empty(shape, dtype=dtype, device=p.device)
                received.append((self._source(p, rank), shards[p]))
            self.comm.exchange(sent, received, "directions")
        return {
            p: DTensor.from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            for p, shard in shards.items()
        }

    def _source(self, parameter: Any, rank: int) -> int:
        """The worker that sends a rank its shard: the rank itself where it is one."""
        workers = self.workers[parameter]
        return rank if rank in workers else workers[rank % len(workers)]

    def _batches(self) -> Iterator[list[Any]]:
        """The parameters, as many at a time as fill a bucket on each rank."""
        batch: list[Any] = []
        size = 0
        for p in self.workers:
            if batch and size + p.numel() * 4 > self.comm.bucket_bytes * self.comm.world_size:
                yield batch
                batch, size = [], 0
            batch.append(p)
            size += p.numel() * 4
        if batch:
            yield batch


class _Places:
    """Which rank holds which rows of a parameter.

    Args:
        parameter: Split by rows over the last dimension of its mesh.
        comm: The ranks of that mesh.
    """

    def __init__(self, parameter: Any, comm: Communicator) -> None:
        number = {place: rank for rank, place in enumerate(_global_ranks(comm))}
        mesh = parameter.device_mesh.mesh
        self._replicas = [[number[place] for place in row] for row in mesh.view(-1, mesh.shape[-1]).tolist()]
        rows, count = len(parameter), mesh.shape[-1]
        size = -(-rows // count)  # as torch.chunk divides them; the last ranks may have none
        self.sections = [slice(min(i * size, rows), min((i + 1) * size, rows)) for i in range(count)]

    def holders(self, rank: int) -> list[int]:
        """The ranks that hold all rows together, in order, ``rank`` among them."""
        return next(replica for replica in self._replicas if rank in replica)

    def section_of(self, rank: int) -> slice:
        """The rows that a rank holds."""
        return self.sections[self.holders(rank).index(rank)]
