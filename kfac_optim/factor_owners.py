"""Factors that one rank alone keeps: what the other ranks have to know of them, and how they move.

A strategy may share the factors out (``factors="sharded"`` or ``"local"``, ``distributed/assignment.py``).
Every rank then still knows how much each running average has seen (``weight``), of each snapshot the damping, and how
large its eigenvalues are; the factor itself stands on its inverse worker, which decomposes it. It moves when other
ranks take over layers, and comes to all ranks for a whole state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .blocks import SIDES, Block, KnownSpectra, Source, part_dtype
from .distributed import Broadcast, Communicator
from .solvers import Decomposition, EigenSolver

__all__ = ["shared_spectra", "decomposed_spectra", "move_factors", "on_cpu", "refuse_to_move", "whole_state"]


def shared_spectra(
    blocks: Sequence[Block], source: Source, comm: Communicator, *, largest: bool = True
) -> dict[Block, KnownSpectra]:
    """How large the eigenvalues of factors are that are shared out (a collective if there are such factors).

    Args:
        blocks: The same on all ranks; those whose factors every rank keeps are left out of the result.
        source: Which factors.
        comm: The ranks.
        largest: Whether the largest eigenvalues are wanted as well as the means: some 32 products of each factor with
            a vector.

    Returns:
        Mean and, if wanted, largest eigenvalues by block, the same on all ranks.
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
    """As :func:`shared_spectra`, for all blocks; the largest eigenvalues are those of decompositions (a collective).

    Args:
        blocks: Those that were decomposed, the same on all ranks.
        source: Which factors were.
        found: The decomposition of A (0) or G (1) of a block; None where another rank made it.
        solver: What made it.
        inv_dtype: Storage of the decompositions.
        comm: The ranks.

    Returns:
        Largest eigenvalues by block; means, too, of those whose factors are shared out.
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
    """A layer's state with the factors that are on other ranks (a collective).

    Args:
        block: The layer's block, which is not changed; the result holds its own tensors, not copies.
        dtype: Storage of the factors.
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
    """Brings factors to the ranks that are now to keep them (a collective), layer by layer; see :func:`whole_state`."""
    for block in blocks:
        before, now = block.kept_by, block.workers
        if block.state and before is not None and any(before.owner(side) != now.owner(side) for side in range(2)):
            block.take_factors(whole_state(block, dtype, comm), comm.rank)


def refuse_to_move(blocks: Sequence[Block], comm: Communicator) -> None:
    """Raises RuntimeError if the blocks have only one rank's part of the factors; ``comm``: the ranks it was of."""
    if not all(block.has_all_factors for block in blocks):
        raise RuntimeError(
            f"this engine has only the factors of rank {comm.rank} of {comm.world_size}, as its strategy shares them "
            "out, and cannot go on elsewhere: build a new optimizer and load the full_state_dict() of the old one"
        )


def on_cpu(value: Any) -> Any:
    """Nested dicts with their tensors on the CPU."""
    if isinstance(value, Mapping):
        return {key: on_cpu(inner) for key, inner in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value
