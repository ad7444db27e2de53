"""Tiles: the parts of a layer's matrices that one block of A and one block of G act on.

The Kronecker product of block-diagonal factors is block-diagonal: ``A_i (x) G_j`` acts on the rows of a matrix that
belong to ``G_j`` and on the columns that belong to ``A_i``, and on nothing else. A solver preconditions such a tile
like any other matrix. If both factors are whole or diagonal, the whole matrix is one tile::

               A_1   A_2
             +-----+-----+
        G_1  |     |     |
             +-----+-----+      4 tiles of W [d_out, d_in]
        G_2  |     |     |
             +-----+-----+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors import FactorSpec
from ..solvers import Decomposition, Solver

__all__ = ["Tile", "precondition", "tiles_of"]


@dataclass(frozen=True)
class Tile:
    """A tile of the matrices of some layers of one shape.

    Attributes:
        rows: The rows of the tile.
        columns: The columns of the tile.
        missing: How many more rows the blocks of G and of A have, because they are padded; their eigenvalues are 0.
        decomposed: The decompositions of the block of A and of that of G, or the relevant parts of them.
    """

    rows: slice
    columns: slice
    missing: tuple[int, int]
    decomposed: tuple[Decomposition, Decomposition]


def tiles_of(decomposed: tuple[Decomposition, Decomposition], specs: Sequence[FactorSpec]) -> list[Tile]:
    """The tiles of layers of one shape; nothing is copied.

    Args:
        decomposed: The decompositions of their A and of their G, of ``p b`` matrices each.
        specs: The shapes of A and G.
    """
    a, g = (_blocks_of(*side) for side in zip(decomposed, specs, strict=True))
    return [
        Tile(rows, columns, (missing_rows, missing_columns), (of_a, of_g))
        for rows, missing_rows, of_g in g
        for columns, missing_columns, of_a in a
    ]


def _blocks_of(parts: Decomposition, spec: FactorSpec) -> list[tuple[slice, int, Decomposition]]:
    """For each block of a factor, its rows, the number of rows that pad it, and its decomposition, ``[p, ...]``."""
    apart = zip(*(part.unflatten(0, (-1, spec.blocks)).unbind(1) for part in parts), strict=True)
    ends = [min(spec.dim, (number + 1) * spec.size) for number in range(spec.blocks)]
    starts = range(0, spec.blocks * spec.size, spec.size)
    found = zip(starts, ends, apart, strict=True)
    return [(slice(start, end), start + spec.size - end, block) for start, end, block in found]


def precondition(solver: Solver, gradient: Tensor, tiles: Sequence[Tile], gamma: Tensor) -> Tensor:
    """The preconditioned gradient ``[p, d_out, d_in]``, tile by tile (eqs. 8 and 11-13).

    Args:
        solver: The solver.
        gradient: ``[p, d_out, d_in]``; the result lies in memory as it does.
        tiles: The tiles, whose decompositions are converted to the gradient's dtype; if there are none, the result is
            room for what a gradient worker will send.
        gamma: The damping of each pair, ``[p]``.
    """
    if len(tiles) == 1:
        found = _applied(solver, gradient, tiles[0], gamma)
        return found if found.stride() == gradient.stride() else torch.empty_like(gradient).copy_(found)
    direction = torch.empty_like(gradient)
    for tile in tiles:
        part, (missing_rows, missing_columns) = gradient[:, tile.rows, tile.columns], tile.missing
        found = _applied(solver, F.pad(part, (0, missing_columns, 0, missing_rows)), tile, gamma)
        direction[:, tile.rows, tile.columns] = found[:, : part.shape[1], : part.shape[2]]
    return direction


def _applied(solver: Solver, gradient: Tensor, tile: Tile, gamma: Tensor) -> Tensor:
    """The preconditioned gradient of one tile."""
    a, g = tile.decomposed
    if any(part.dtype != gradient.dtype for part in (*a, *g)):
        a, g = (tuple(part.to(gradient.dtype) for part in side) for side in (a, g))
    found = solver.precondition(gradient, a, g, gamma)
    if (found.shape, found.dtype) != (gradient.shape, gradient.dtype):
        raise ValueError(
            f"solver={solver!r}: precondition() has returned a {found.dtype} tensor of the shape {tuple(found.shape)} "
            f"for a {gradient.dtype} gradient of the shape {tuple(gradient.shape)}: must be of the same kind"
        )
    return found
