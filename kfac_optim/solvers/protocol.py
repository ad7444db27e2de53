"""What a solver is: the protocol behind ``solver=``, and the shape of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Decomposition", "Failure", "Joint", "MaybeDecomposition", "Solver", "Spectral"]

Decomposition = tuple[Tensor, ...]


@dataclass(frozen=True)
class Failure:
    """Takes the place of a decomposition that could not be computed.

    Attributes:
        reason: What went wrong in the last attempt.
    """

    reason: str


MaybeDecomposition = Decomposition | Failure


class Solver(Protocol):
    """Anything with these methods can be passed as ``solver=``."""

    def shifts(self, gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the diagonals of A and of G before they are decomposed.

        Args:
            gamma: Damping of each pair, ``[p]``.
            mean_a: Mean eigenvalue of A of each pair, ``[p]``.
            mean_g: The same of G.

        Returns:
            The shifts of A and of G, ``[p]`` each.
        """
        ...

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors in the decomposition of one factor, without the leading ``p``."""
        ...

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """Decomposes ``factor + shift I``; the factor is ``[p, n, n]``, or ``[p, n]`` where diagonal.

        The blocks of a block-diagonal factor count as pairs here and in ``shapes``; ``precondition`` then sees one tile
        of the gradient at a time, with a block of A and a block of G (:mod:`kfac_optim.tiles`).

        Runs without autocast and, but for a solver by eigendecompositions, without TF32; perhaps in another thread,
        beside training.

        May raise ``torch.linalg.LinAlgError`` or return non-finite values; the engine then retries and falls back.
        """
        ...

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """The preconditioned gradient ``[p, d_out, d_in]``; ``gamma`` is ``[p]``."""
        ...


class Joint(Protocol):
    """The decompositions of several stacks, which precondition all of them by few operations."""

    def precondition(self, gradients: Sequence[Tensor], value: float, out: Sequence[Tensor]) -> None:
        """Writes gamma times the preconditioned gradients ``[p, d_out, d_in]`` to ``out``; gamma: ``value`` units."""
        ...


@runtime_checkable
class Spectral(Solver, Protocol):
    """A solver by eigendecompositions, such as :class:`~kfac_optim.EigenSolver`.

    It ignores damping when it decomposes, so that eigenvalues are known afterwards, and calls nothing but routines of
    libraries, which do not follow TF32's switch.
    """

    def largest(self, decomposition: Decomposition) -> Tensor:
        """The largest eigenvalue of each pair of the factor that was decomposed, ``[p]``."""
        ...

    def is_valid(self, decomposition: Decomposition) -> Tensor:
        """Whether a decomposition of some pairs is what it claims to be, a 0-dim bool; does not wait for the device.

        What is not counts as failed.
        """
        ...

    def decompose_padded(self, factors: Sequence[Tensor]) -> list[Decomposition]:
        """What ``decompose`` gives for each of some factors ``[p, n, n]``, each with its own p and n.

        By one call of a library, for which the host waits once.
        """
        ...

    def count_relevant(self, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """How much of a stack's decompositions matters at a damping: some counts, ``[c]``; waits for nothing.

        Asked for when the decompositions are new, or the damping has crossed a quarter octave.
        """
        ...

    def relevant(
        self, a: Decomposition, g: Decomposition, gamma: Tensor, counts: Sequence[int]
    ) -> tuple[Decomposition, Decomposition]:
        """The parts that matter, which ``precondition`` then gets; ``counts``: those of ``count_relevant``.

        A pair's contribution must not depend on other pairs in the stack.
        """
        ...

    def joint(self, decomposed: Sequence[tuple[Decomposition, Decomposition]], units: Sequence[Tensor]) -> Joint:
        """Some stacks together, where launches count.

        Args:
            decomposed: What ``relevant`` has given, for each stack.
            units: What gamma is a multiple of, ``[p]`` of each stack.
        """
        ...
