"""Factors that one rank alone keeps: what the other ranks have to know about them, and how they move.

A strategy may share the factors out (``factors="sharded"`` or ``"local"``, ``distributed/assignment.py``). The factor
itself is then kept by its inverse worker, which decomposes it. Every rank still knows how much each running average has
seen (``weight``), and the damping and the mean and largest eigenvalues of each snapshot. A factor moves when another
rank takes over its layer, and is sent to all ranks for a whole state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..blocks import Block
from ..distributed import Broadcast, Communicator
from ..snapshots import AG, KnownSpectra, Source, State


def known_spectra(
    blocks: Sequence[Block], source: Source, comm: Communicator, largest: Callable[[Block, int], Tensor] | None = None
) -> dict[Block, KnownSpectra]:
    """Tells all ranks the eigenvalues of factors that only some of them know (a collective if there are any).

    Args:
        blocks: The same on all ranks.
        source: Which of the blocks' factors to look at.
        comm: The ranks.
        largest: Returns the largest eigenvalues of A (side 0) or G (side 1) of a block, ``[p]``; zeros on ranks that do
            not know them. None: those of factors that are shared out are found by some 32 products of each factor with
            a vector.

    Returns:
        The eigenvalues by block, the same on all ranks. They are the mean and the largest ones if the factors are
        shared out, and the largest ones alone if ``largest`` is given. Other blocks are left out.
    """
    shared = {block for block in blocks if comm.world_size > 1 and block.workers.shares_factors}
    told = [block for block in blocks if largest is not None or block in shared]
    own: list[Tensor] = []
    for block, side in itertools.product(told, range(2)):
        factors, gamma = block.factors(source), block.state["in_use"]["gamma"]
        if largest is not None:
            own.append(largest(block, side))
        else:
            own.append(factors.largest_of(side) if factors.kept(side) else torch.zeros_like(gamma))
        if block in shared:
            own.append(factors.mean(side) if factors.kept(side) else torch.zeros_like(gamma))
    found = iter(comm.sum(own, "counts"))

    def of(block: Block) -> KnownSpectra:
        a, g = ([next(found) for _ in range(1 + (block in shared))] for _ in range(2))
        return KnownSpectra(means=(a[1], g[1]) if block in shared else None, largest=(a[0], g[0]))

    return {block: of(block) for block in told}


def whole_state(block: Block, dtype: torch.dtype, comm: Communicator) -> State:
    """A layer's state including the factors, of this dtype, that other ranks keep (a collective).

    The block is not changed; the result holds its tensors, not copies of them.
    """
    whole: State = {source: snapshot.copy() for source, snapshot in block.state.items()}
    broadcasts = []
    for source in sorted(whole):
        for side, (name, spec) in enumerate(zip(AG, block.specs, strict=True)):
            owner = None if block.kept_by is None else block.kept_by.owner(side)
            if owner is None:
                continue
            average = whole[source][name]
            if "value" not in average:
                average = {**spec.empty(dtype, block.layer.weight.device), **average}
                whole[source][name] = average
            tensors = [average[key] for key in ("value", "scale") if key in average]
            broadcasts.append(Broadcast(tensors, owner, tuple(range(comm.world_size))))
    if comm.world_size > 1:
        comm.send(broadcasts, "state")
    return whole


def move_factors(blocks: Sequence[Block], dtype: torch.dtype, comm: Communicator) -> None:
    """Moves factors, layer by layer, to the ranks that now have to keep them (a collective)."""
    for block in blocks:
        before, now = block.kept_by, block.workers
        if block.state and before is not None and any(before.owner(side) != now.owner(side) for side in range(2)):
            block.take_factors(whole_state(block, dtype, comm), comm.rank)
