"""Tiles: the parts of a layer's matrices that one block of A and one block of G act on.

The Kronecker product of block-diagonal factors is block-diagonal: ``A_i (x) G_j`` acts on the rows of a matrix that
belong to ``G_j`` and on the columns that belong to ``A_i``, and on nothing else. So a solver is given the tiles of a
matrix as if they were the matrices of so many pairs. If both factors are whole or diagonal, the whole matrix is one
tile::

               A_1   A_2
             +-----+-----+
        G_1  |     |     |
             +-----+-----+      4 tiles of W [d_out, d_in]
        G_2  |     |     |
             +-----+-----+
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors import FactorSpec
from ..solvers import Decomposition, Sides, Solver

# Tiles of more numbers than this are not preconditioned all at once, which takes memory for seven times as many.
_AT_ONCE = 2**22


def precondition(
    solver: Solver, gradient: Tensor, decomposed: Sides | None, specs: Sequence[FactorSpec], gamma: Tensor
) -> Tensor:
    """The preconditioned gradient ``[p, d_out, d_in]`` of layers of one shape (eqs. 8 and 11-13).

    Args:
        solver: The solver.
        gradient: ``[p, d_out, d_in]``; the result lies in memory as it does.
        decomposed: The decompositions of A and of G, or the relevant parts of them, of ``p b`` matrices each; they are
            converted to the gradient's dtype. None: the result is uninitialised, for what a gradient worker will send.
        specs: The shapes of A and G.
        gamma: The damping of each pair, ``[p]``.
    """
    if decomposed is None:
        return torch.empty_like(gradient)
    if all(spec.blocks == 1 for spec in specs):
        found = _applied(solver, gradient, *decomposed, gamma)
    else:
        found = _tiled(specs, solver, gradient, *decomposed, gamma)
    return found if found.stride() == gradient.stride() else torch.empty_like(gradient).copy_(found)


def _tiled(
    specs: Sequence[FactorSpec], solver: Solver, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor
) -> Tensor:
    """What the solver makes of the tiles, all at once unless they are many numbers."""
    of_a, of_g = specs
    row_of_tiles = gradient.numel() // of_g.blocks
    rows = max(1, min(of_g.blocks, _AT_ONCE // row_of_tiles))
    columns = max(1, min(of_a.blocks, _AT_ONCE * of_a.blocks // (rows * row_of_tiles)))
    sizes = of_a.size, of_g.size
    a, g = (tuple(part.unflatten(0, (len(gradient), -1)) for part in side) for side in (a, g))
    if (rows, columns) == (of_g.blocks, of_a.blocks):
        return _at_once(sizes, solver, gradient, a, g, gamma)
    direction = torch.empty_like(gradient)
    for i, j in itertools.product(range(0, of_g.blocks, rows), range(0, of_a.blocks, columns)):
        down, along = slice(i * of_g.size, (i + rows) * of_g.size), slice(j * of_a.size, (j + columns) * of_a.size)
        some_a, some_g = tuple(part[:, j : j + columns] for part in a), tuple(part[:, i : i + rows] for part in g)
        direction[:, down, along] = _at_once(sizes, solver, gradient[:, down, along], some_a, some_g, gamma)
    return direction


def _at_once(
    sizes: tuple[int, int], solver: Solver, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor
) -> Tensor:
    """What the solver makes of tiles, as pairs; ``a`` and ``g`` are ``[p, b, ...]``, their blocks of ``sizes`` rows."""
    pairs, d_out, d_in = gradient.shape
    grid = pairs, g[0].shape[1], a[0].shape[1]
    # The last blocks of G and A may be padded by rows whose eigenvalues are 0.
    padded = F.pad(gradient, (0, grid[2] * sizes[0] - d_in, 0, grid[1] * sizes[1] - d_out))
    tiles = padded.unflatten(2, (grid[2], -1)).unflatten(1, (grid[1], -1)).transpose(2, 3).flatten(0, 2)
    a = tuple(part.unsqueeze(1).expand(*grid, *part.shape[2:]).flatten(0, 2) for part in a)
    g = tuple(part.unsqueeze(2).expand(*grid, *part.shape[2:]).flatten(0, 2) for part in g)
    applied = _applied(solver, tiles, a, g, gamma.repeat_interleave(grid[1] * grid[2]))
    return applied.unflatten(0, grid).transpose(2, 3).flatten(3).flatten(1, 2)[:, :d_out, :d_in]


def _applied(solver: Solver, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
    """What the solver makes of matrices that have one block of A and one of G each."""
    a, g = (tuple(part.to(gradient.dtype) for part in side) for side in (a, g))
    found = solver.precondition(gradient, a, g, gamma)
    if (found.shape, found.dtype) != (gradient.shape, gradient.dtype):
        raise ValueError(
            f"solver={solver!r}: precondition() has returned a {found.dtype} tensor of the shape {tuple(found.shape)} "
            f"for a {gradient.dtype} gradient of the shape {tuple(gradient.shape)}: must be of the same kind"
        )
    return found
