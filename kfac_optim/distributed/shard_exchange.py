"""The shards of FSDP2's parameters on their way to the ranks that precondition them, and back.

If only some ranks precondition a layer, no other rank needs its whole gradient. So every rank sends its rows to these
workers, and they send each rank its rows of the result::

      rows of   rank 0   rank 1   rank 2               rank 0   rank 1   rank 2
      layer a    [a0]     [a1]     [a2]                 [a0]
      layer b    [b0]     [b1]     [b2]      <---->     [a1]     [b0
      layer c    [c0]     [c1]     [c2]                 [a2]      b1       [c0
                                                                  b2]       c1  c2]

With R ranks and one worker for each layer, a rank sends, receives and holds ``1 / R`` of what it would if all of them
gathered all layers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.grouping import grouped_by_key
from .communicator import Communicator
from .sharding import are_rows, is_sharded


def are_exchangeable(parameters: Sequence[Any], comm: Communicator) -> bool:
    """Whether ``comm`` can exchange these parameters: they are shards by rows on all of its ranks (FSDP2, HSDP)."""
    return comm.can_exchange and all(
        is_sharded(p) and are_rows(p.placements) and _grid(p, comm) is not None for p in parameters
    )


@dataclass(frozen=True)
class _Grid:
    """The ranks of a communicator as they lie on a mesh.

    Attributes:
        replicas: Lists of ranks that together hold all rows of a parameter, in the order of the rows: a single list, or
            one for each replica of HSDP.
        place: For each rank, the number of its replica and its number there.
    """

    replicas: list[list[int]]
    place: dict[int, tuple[int, int]]

    def holders(self, rank: int) -> list[int]:
        """The ranks of the replica that ``rank`` is in."""
        return self.replicas[self.place[rank][0]]

    def rows(self, parameter: Any, rank: int) -> slice:
        """The rows of a parameter that a rank holds."""
        number, count = self.place[rank][1], len(self.holders(rank))
        size = -(-len(parameter) // count)  # as torch.chunk divides them; the last ranks may have none
        return slice(min(number * size, len(parameter)), min((number + 1) * size, len(parameter)))


def _grid(parameter: Any, comm: Communicator) -> _Grid | None:
    """The grid of a parameter's mesh; None if ``comm`` has other ranks, or is not one of torch.distributed."""
    return None if comm.group is None else _grid_of(parameter.device_mesh, comm.group)


@functools.lru_cache(maxsize=8)  # a model seldom has two grids; making one takes longer than all the rest of a step
def _grid_of(mesh: Any, group: Any) -> _Grid | None:
    number = {place: rank for rank, place in enumerate(dist.get_process_group_ranks(group))}
    rows = mesh.mesh.view(-1, mesh.mesh.shape[-1]).tolist()
    if sorted(place for row in rows for place in row) != sorted(number):
        return None
    replicas = [[number[place] for place in row] for row in rows]
    return _Grid(replicas, {rank: (i, j) for i, replica in enumerate(replicas) for j, rank in enumerate(replica)})


class ShardExchange:
    """Gathers tensors that are sharded like parameters on their workers, and scatters what the workers compute.

    Args:
        workers: For each parameter (see :func:`are_exchangeable`), the ranks that need it whole; in the same order on
            all ranks.
        comm: The ranks.
    """

    def __init__(self, workers: Mapping[Any, Sequence[int]], comm: Communicator) -> None:
        self.workers, self.comm = dict(workers), comm
        self._grids = {p: grid for p in workers if (grid := _grid(p, comm)) is not None}

    def gather(self, vectors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """The whole tensors of those parameters that this rank works on (a collective).

        Args:
            vectors: By parameter, a tensor that is laid out as the parameter is.
        """
        rank, whole = self.comm.rank, {}
        for batch in self._batches():
            sent: list[tuple[int, Tensor]] = []
            received: list[tuple[int, Tensor]] = []
            for p in batch:
                own = cast(Any, vectors[p]).redistribute(placements=p.placements).to_local()
                grid = self._grids[p]
                replica = grid.place[rank][0]
                sent += [(worker, own) for worker in self.workers[p] if grid.place[worker][0] == replica]
                if rank in self.workers[p]:
                    whole[p] = torch.empty(p.shape, dtype=own.dtype, device=own.device)
                    received += [(holder, whole[p][grid.rows(p, holder)]) for holder in grid.holders(rank)]
            self.comm.exchange(sent, received, "gradients")
        return whole

    def scatter(self, whole: Mapping[Any, Tensor], dtype: torch.dtype) -> dict[Any, Tensor]:
        """This rank's shards of the workers' tensors, laid out as the parameters are (a collective).

        Args:
            whole: By parameter that this rank works on, a whole tensor.
            dtype: The dtype of all tensors.
        """
        from torch.distributed.tensor import DTensor

        rank, shards = self.comm.rank, {}
        for batch in self._batches():
            sent: list[tuple[int, Tensor]] = []
            received: list[tuple[int, Tensor]] = []
            for p in batch:
                if rank in self.workers[p]:
                    grid, others = self._grids[p], range(self.comm.world_size)
                    sent += [(r, whole[p][grid.rows(p, r)]) for r in others if self._source(p, r) == rank]
                shape = p.to_local().shape
                shards[p] = torch.empty(shape, dtype=dtype, device=p.device)
                received.append((self._source(p, rank), shards[p]))
            self.comm.exchange(sent, received, "directions")
        return {
            p: DTensor.from_local(shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            for p, shard in shards.items()
        }

    def _source(self, parameter: Any, rank: int) -> int:
        """The worker that sends a rank its shard: the rank itself if it is a worker."""
        workers = self.workers[parameter]
        return rank if rank in workers else workers[rank % len(workers)]

    def _batches(self) -> list[list[Any]]:
        """The parameters in batches, each as large as one bucket on each rank."""
        limit = self.comm.bucket_bytes * self.comm.world_size
        return grouped_by_key(self.workers, lambda p: None, lambda p: 4 * p.numel(), limit)
