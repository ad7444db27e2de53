"""Who works on which block, and whether all ranks agree on it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ..assignment import Assignment, AssignmentStrategy, LayerCost
from ..comm import Communicator
from ..diagnostics import StageTimes
from ..solvers import Solver
from .blocks import Block, decomposed_bytes

__all__ = ["assign", "communicating", "groups_of", "require_agreement"]


def assign(
    strategy: AssignmentStrategy, blocks: Sequence[Block], comm: Communicator, solver: Solver, inv_dtype: torch.dtype
) -> Assignment:
    """Asks the strategy who decomposes and who preconditions what, and enters it in the blocks."""
    costs = []
    for block in blocks:
        a, g = block.specs
        costs.append(LayerCost((a.cost, g.cost), decomposed_bytes(block.specs, solver, inv_dtype)))
    work = strategy.assign(costs, comm.world_size)
    work.check(len(costs), comm.world_size)
    routes = {workers.gradient_workers: workers.routes(comm.world_size) for workers in work.layers}
    for block, workers in zip(blocks, work.layers, strict=True):
        own = [route for route in routes[workers.gradient_workers] if comm.rank in route[1] and len(route[1]) > 1]
        block.workers, block.route = workers, own[0] if own else None
    return work


def groups_of(work: Assignment, world_size: int) -> set[tuple[int, ...]]:
    """The groups of ranks in which decompositions and preconditioned gradients travel."""
    routes = {members for workers in work.layers for _, members in workers.routes(world_size) if len(members) > 1}
    return routes | {workers.holders(side) for workers in work.layers for side in range(2)}


def require_agreement(comm: Communicator, built: str) -> None:
    """Compares what the ranks have built (a collective).

    Raises:
        RuntimeError: If a rank has another text than this one.
    """
    checksum = zlib.crc32(built.encode())
    # Halves, so that float64 holds their sums over any number of ranks; squares, because sums may agree by chance.
    halves = torch.tensor([checksum >> 16, checksum & 0xFFFF], dtype=torch.float64)
    mine = torch.cat([halves, halves.square()])
    (total,) = comm.sum([mine], "counts")
    if not torch.equal(total, mine * comm.world_size):
        raise RuntimeError(
            "the ranks have built different optimizers: layers, solver, dtypes and assignment must be the same on "
            "every rank of the process group, and so must hyperparameters and loaded state"
        )


def communicating(what: str, stages: StageTimes, comm: Communicator) -> AbstractContextManager[None]:
    """Times a stage of communication, which one process has not."""
    return stages.stage(f"{what} communication") if comm.world_size > 1 else nullcontext()
