"""Factors that one rank alone keeps: what the other ranks have to know about them, and how they move.

A strategy may share the factors out (``factors="sharded"`` or ``"local"``, ``distributed/assignment.py``). The factor
itself is then kept by its inverse worker, which decomposes it. Every rank still knows how much each running average has
seen (``weight``), and the damping and the mean and largest eigenvalues of each snapshot. A factor moves when another
rank takes over its layer, and is sent to all ranks for a whole state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .blocks import SIDES, Block, KnownSpectra, Source, part_dtype
from .distributed import Broadcast, Communicator
from .solvers import Decomposition, EigenSolver

__all__ = ["shared_spectra", "decomposed_spectra", "move_factors", "refuse_to_move", "whole_state"]


def shared_spectra(
    blocks: Sequence[Block], source: Source, comm: Communicator, *, largest: bool = True
) -> dict[Block, KnownSpectra]:
    """The mean and largest eigenvalues of factors that are shared out (a collective if there are such factors).

    Args:
        blocks: The same on all ranks; those whose factors every rank keeps are left out of the result.
        source: Which of the blocks' factors to look at.
        comm: The ranks.
        largest: Whether to compute the largest eigenvalues, too, by some 32 products of each factor with a vector.

    Returns:
        The mean and, if wanted, largest eigenvalues by block, the same on all ranks.
    """
    shared = [block for block in blocks if comm.world_size > 1 and block.workers.shares_factors]
    own = []
    for block in shared:
        factors, dtype = block.factors(source), block.state["in_use"]["gamma"].dtype
        elsewhere = torch.zeros(block.layer.pairs, dtype=dtype, device=block.layer.weight.device)
        for side in range(2):
            kept = factors.kept(side)
            own.append(factors.mean(side) if kept else elsewhere)
            own += [factors.largest_of(side) if kept else elsewhere] if largest else []
    found = iter(comm.sum(own, "counts"))

    def of(block: Block) -> KnownSpectra:
        a, g = ([next(found) for _ in range(1 + largest)] for _ in range(2))
        return KnownSpectra((a[0], g[0]), (a[1], g[1]) if largest else None)

    return {block: of(block) for block in shared}


def decomposed_spectra(
    blocks: Sequence[Block],
    source: Source,
    found: Callable[[Block, int], Decomposition | None],
    solver: EigenSolver,
    inv_dtype: torch.dtype,
    comm: Communicator,
) -> dict[Block, KnownSpectra]:
    """As :func:`shared_spectra`, but the largest eigenvalues come from decompositions, for all blocks (a collective).

    Args:
        blocks: The blocks that were decomposed, the same on all ranks.
        source: Which of their factors were decomposed.
        found: Returns the decomposition of A (0) or G (1) of a block; None if another rank made it.
        solver: The solver that made it.
        inv_dtype: The dtype of stored decompositions.
        comm: The ranks.

    Returns:
        By block, the largest eigenvalues and, if its factors are shared out, the means.
    """
    own, dtype = [], part_dtype(1, inv_dtype)
    for block, side in itertools.product(blocks, range(2)):
        parts = found(block, side)
        if parts is None:
            own.append(torch.zeros(block.layer.pairs, dtype=dtype, device=block.layer.weight.device))
        else:
            own.append(block.specs[side].largest_of_blocks(solver.largest(parts)).to(dtype))
    pairs = iter(comm.sum(own, "counts"))
    largest = dict(zip(blocks, zip(pairs, pairs, strict=True), strict=True))
    means = shared_spectra(blocks, source, comm, largest=False)
    return {block: replace(means.get(block, KnownSpectra()), largest=largest[block]) for block in blocks}


def whole_state(block: Block, dtype: torch.dtype, comm: Communicator) -> dict[str, Any]:
    """A layer's state including the factors that other ranks keep (a collective).

    Args:
        block: The layer's block, which is not changed; the result holds the block's tensors, not copies of them.
        dtype: The dtype of stored factors.
        comm: The ranks.
    """
    whole: dict[str, Any] = {source: dict(tensors) for source, tensors in block.state.items()}
    broadcasts = []
    for source in sorted(whole):
        for side, (name, spec) in enumerate(zip(SIDES, block.specs, strict=True)):
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


def refuse_to_move(blocks: Sequence[Block], comm: Communicator) -> None:
    """Raises RuntimeError if the blocks have only one rank's part of the factors; ``comm``: the ranks that had all."""
    if not all(block.has_all_factors for block in blocks):
        raise RuntimeError(
            f"this engine has only the factors of rank {comm.rank} of {comm.world_size}, as its strategy shares them "
            "out, and cannot go on elsewhere: build a new optimizer and load the full_state_dict() of the old one"
        )
