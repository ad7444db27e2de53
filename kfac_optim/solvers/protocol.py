"""What a solver is: the protocols behind ``solver=``, and the shape of its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

Decomposition = tuple[Tensor, ...]
Sides = tuple[Decomposition, Decomposition]  # of A and of G


@dataclass(frozen=True)
class Failure:
    """Takes the place of a decomposition that could not be computed; ``reason``: why the last attempt failed."""

    reason: str


MaybeDecomposition = Decomposition | Failure


class Solver(Protocol):
    """Anything with these methods and those of :class:`.Shifting` can be passed as ``solver=``.

    A solver that adds gamma in ``precondition`` instead, so that damping may change between refreshes, has an attribute
    ``damps_factors = False`` and needs no ``shifts``. If it is a subclass of :class:`~kfac_optim.EigenSolver`, its
    decompositions are also checked, and the largest eigenvalues are taken from them.
    """

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors in the decomposition of one factor, without the leading ``p``."""

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """Decomposes ``factor + shift I``; the factor is ``[p, n, n]``, or ``[p, n]`` if it is diagonal.

        The blocks of a block-diagonal factor count as pairs here and in ``shapes``; in ``precondition`` so do the tiles
        of the gradient, each with a block of A and a block of G (:mod:`kfac_optim.stacks.tiles`).

        The engine calls it without autocast and, unless the solver is an :class:`~kfac_optim.EigenSolver`, without
        TF32. The call may come from another thread while the model trains.
        It may raise ``torch.linalg.LinAlgError`` or return non-finite values: the engine then retries and falls back.
        """

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """The preconditioned gradient ``[p, d_out, d_in]``; ``gamma`` is ``[p]``.

        The gradients of layers whose weight is stored transposed (embeddings, transformers' ``Conv1D``) are transposes
        of contiguous tensors, which ``reshape`` can flatten, but ``view`` cannot. The result may lie in memory as it
        likes.
        """


class Shifting(Solver, Protocol):
    """A solver that damps the factors before they are decomposed."""

    def shifts(self, gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the diagonals of A and of G before they are decomposed.

        Args:
            gamma: Damping of each pair, ``[p]``.
            mean_a: Mean eigenvalue of A of each pair, ``[p]``.
            mean_g: Mean eigenvalue of G of each pair, ``[p]``.

        Returns:
            The shifts of A and of G, ``[p]`` each.
        """


def damps_factors(solver: Solver) -> TypeGuard[Shifting]:
    """Whether damping is added to the factors, by ``shifts``, rather than in ``precondition``."""
    return getattr(solver, "damps_factors", True)


def part_dtype(dims: int, inv_dtype: torch.dtype) -> torch.dtype:
    """The dtype of a part of a decomposition with ``dims`` dimensions: vectors and scalars carry the magnitude."""
    return inv_dtype if dims == 2 else torch.promote_types(inv_dtype, torch.float32)
