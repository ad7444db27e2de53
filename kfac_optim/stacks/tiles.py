"""Tiles: the parts of a layer's matrices that one block of A and one block of G act on.

The Kronecker product of block-diagonal factors is block-diagonal: ``A_i (x) G_j`` acts on the rows of a matrix that
belong to ``G_j`` and on the columns that belong to ``A_i``, and on nothing else. So a solver is given the tiles of a
matrix as if they were the matrices of so many pairs, all at once. If both factors are whole or diagonal, the whole
matrix is one tile::

               A_1   A_2
             +-----+-----+
        G_1  |     |     |
             +-----+-----+      4 tiles of W [d_out, d_in]
        G_2  |     |     |
             +-----+-----+
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors import FactorSpec
from ..solvers import Decomposition, Solver

__all__ = ["Sides", "precondition"]

Sides = tuple[Decomposition, Decomposition]  # the decompositions of A and of G of some layers of one shape


def precondition(
    solver: Solver, gradient: Tensor, decomposed: Sides | None, specs: Sequence[FactorSpec], gamma: Tensor
) -> Tensor:
    """The preconditioned gradient ``[p, d_out, d_in]`` of layers of one shape (eqs. 8 and 11-13).

    Args:
        solver: The solver.
        gradient: ``[p, d_out, d_in]``; the result lies in memory as it does.
        decomposed: The decompositions of A and of G, or the relevant parts of them, of ``p b`` matrices each; they are
            converted to the gradient's dtype. None: the result is room for what a gradient worker will send.
        specs: The shapes of A and G.
        gamma: The damping of each pair, ``[p]``.
    """
    if decomposed is None:
        return torch.empty_like(gradient)
    a, g = (tuple(part.to(gradient.dtype) for part in side) for side in decomposed)
    if all(spec.blocks == 1 for spec in specs):
        found = _applied(solver, gradient, a, g, gamma)
    else:
        (pairs, d_out, d_in), (of_a, of_g) = gradient.shape, specs
        grid = pairs, of_g.blocks, of_a.blocks
        # The last blocks of G and A may be padded by rows whose eigenvalues are 0.
        padded = F.pad(gradient, (0, of_a.blocks * of_a.size - d_in, 0, of_g.blocks * of_g.size - d_out))
        tiles = padded.unflatten(2, (of_a.blocks, -1)).unflatten(1, (of_g.blocks, -1)).transpose(2, 3).flatten(0, 2)
        a = tuple(part.unflatten(0, (pairs, 1, -1)).expand(*grid, *part.shape[1:]).flatten(0, 2) for part in a)
        g = tuple(part.unflatten(0, (pairs, -1, 1)).expand(*grid, *part.shape[1:]).flatten(0, 2) for part in g)
        applied = _applied(solver, tiles, a, g, gamma.repeat_interleave(of_g.blocks * of_a.blocks))
        found = applied.unflatten(0, grid).transpose(2, 3).flatten(3).flatten(1, 2)[:, :d_out, :d_in]
    return found if found.stride() == gradient.stride() else torch.empty_like(gradient).copy_(found)


def _applied(solver: Solver, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
    """What the solver makes of matrices that have one block of A and one of G each."""
    found = solver.precondition(gradient, a, g, gamma)
    if (found.shape, found.dtype) != (gradient.shape, gradient.dtype):
        raise ValueError(
            f"solver={solver!r}: precondition() has returned a {found.dtype} tensor of the shape {tuple(found.shape)} "
            f"for a {gradient.dtype} gradient of the shape {tuple(gradient.shape)}: must be of the same kind"
        )
    return found
