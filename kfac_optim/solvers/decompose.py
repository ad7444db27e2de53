"""Decomposes factors of one shape together, and retries where a decomposition fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..grouping import grouped_by_key
from ..precision import full_precision
from .eigen import EigenSolver
from .protocol import Decomposition, Failure, MaybeDecomposition, Solver

__all__ = ["BATCH_NUMEL", "Batch", "decompose_all", "decompose_safely"]

# Up to this many numbers factors are decomposed together (256 MiB in float32). The host waits for each call of a
# library, but a batch is held three times: as it was, as the library leaves it, and as it is stored.
BATCH_NUMEL = 2**26
# Factors are decomposed with larger ones if that takes at most so many times as many operations.
_PADDED_COST = 1.6

# Cheapest first; the CPU's LAPACK is the most robust.
_ATTEMPTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t.double(),
    lambda t: _jittered(t.double().cpu()),
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Factors of one shape on one device, which are decomposed as one.

    Attributes:
        make: Makes them, one after the other, ``[p, n, n]`` or ``[p, n]``, in float32 or float64, and what the solver
            adds to their diagonals, ``[p]``. Called again if their decomposition fails.
        sizes: The pairs of each factor, p in all.
        rows: How many each has, n, and their device, where they may be decomposed with others of nearly as many rows;
            None: they may not.
    """

    make: Callable[[], tuple[Tensor, Tensor]]
    sizes: Sequence[int]
    rows: tuple[int, torch.device] | None = None


@dataclass(frozen=True)
class _Attempt:
    """What an attempt has given, and what has to be read from the device to know whether that is a decomposition.

    Attributes:
        result: The decomposition as it is kept, or the error.
        checks: 0-dim bools, and what is wrong where one of them is false.
    """

    result: MaybeDecomposition
    checks: Sequence[tuple[Tensor, str]] = ()

    def judged(self, passed: Sequence[bool]) -> MaybeDecomposition:
        """The decomposition, or why it is none; ``passed``: the values of the checks."""
        wrong = [reason for (_, reason), good in zip(self.checks, passed, strict=True) if not good]
        return Failure(wrong[0]) if wrong else self.result


def decompose_all(
    solver: Solver, batches: Iterable[Batch], stored: Callable[[Tensor], Tensor] = lambda part: part
) -> list[list[MaybeDecomposition]]:
    """Decomposes batches of factors, and the factors of a batch one by one if that fails.

    Whether the results are decompositions is read from the device once, after the last batch.

    Args:
        solver: The solver.
        batches: The batches.
        stored: What to keep of each part of a decomposition.

    Returns:
        For each factor of each batch what :func:`decompose_safely` returns.
    """
    batches = list(batches)
    attempts: dict[Batch, _Attempt] = {}
    for group in _called_together(batches) if isinstance(solver, EigenSolver) else [[batch] for batch in batches]:
        attempts.update(zip(group, _attempt(solver, [batch.make() for batch in group], stored), strict=True))
    passed = iter(_read([attempts[batch] for batch in batches]))
    found: list[list[MaybeDecomposition]] = []
    for batch in batches:
        attempt = attempts[batch]
        result = attempt.judged([next(passed) for _ in attempt.checks])
        if isinstance(result, Failure):
            factors, shifts = (of_all.split(list(batch.sizes)) for of_all in batch.make())
            pairs = zip(factors, shifts, strict=True)
            found.append([decompose_safely(solver, factor, shift, stored) for factor, shift in pairs])
        else:
            found.append(list(zip(*(part.split(list(batch.sizes)) for part in result), strict=True)))
    return found


def decompose_safely(
    solver: Solver, factor: Tensor, shift: Tensor, stored: Callable[[Tensor], Tensor] = lambda part: part
) -> MaybeDecomposition:
    """Decomposes, and where that fails retries in float64, then on the CPU with jitter on the diagonal.

    Args:
        solver: The solver.
        factor: ``[p, n, n]`` or ``[p, n]``, float32 or float64.
        shift: What the solver adds to the diagonals, ``[p]``.
        stored: What to keep of each part of the decomposition.

    Returns:
        The decomposition in the factor's dtype and on its device, or why the last attempt failed.
    """
    result: MaybeDecomposition = Failure("")
    for prepare in _ATTEMPTS:
        prepared = prepare(factor)
        (attempt,) = _attempt(solver, [(prepared, shift.to(prepared))], lambda part: stored(part.to(factor)))
        result = attempt.judged(_read([attempt]))
        if not isinstance(result, Failure):
            break
    return result


def _called_together(batches: Sequence[Batch]) -> list[list[Batch]]:
    """Batches of nearly one number of rows together, and each of the others alone."""
    padded: dict[int, int] = {}  # by number of rows, to how many they are filled up
    most = 0
    for rows in sorted({batch.rows[0] for batch in batches if batch.rows is not None}, reverse=True):
        if most**3 > _PADDED_COST * rows**3 or not padded:
            most = rows
        padded[rows] = most

    def kind(batch: Batch) -> Hashable:
        return batch if batch.rows is None else (padded[batch.rows[0]], batch.rows[1])

    def numel(batch: Batch) -> int:
        return 0 if batch.rows is None else sum(batch.sizes) * padded[batch.rows[0]] ** 2

    return grouped_by_key(batches, kind, numel, BATCH_NUMEL)


def _attempt(
    solver: Solver, inputs: Sequence[tuple[Tensor, Tensor]], stored: Callable[[Tensor], Tensor]
) -> list[_Attempt]:
    """One attempt at each of some inputs, by a single call of the solver, with the checks of what it gives."""
    try:
        with _precision_of(solver, inputs[0][0].device.type):
            if len(inputs) == 1:
                found = [solver.decompose(*inputs[0])]
            else:
                assert isinstance(solver, EigenSolver)
                found = solver.decompose_padded([factor for factor, _ in inputs])
    except RuntimeError as error:  # LinAlgError, GPU libraries' own errors, and out of memory, which the CPU may solve
        return [_Attempt(Failure(f"{type(error).__name__}: {error}"))] * len(inputs)
    return [_checked(solver, result, stored) for result in found]


def _checked(solver: Solver, result: Decomposition, stored: Callable[[Tensor], Tensor]) -> _Attempt:
    kept = tuple(map(stored, result))
    # As it is kept: what is finite in float64, in which a failure is retried, may be none in float32.
    checks = [(part.isfinite().all(), "the result is not finite") for part in kept]
    if isinstance(solver, EigenSolver):
        checks.append((solver.is_valid(result), "the result is no decomposition"))
    return _Attempt(kept, checks)


def _read(attempts: Sequence[_Attempt]) -> list[bool]:
    """The values of the checks of some attempts, by one transfer."""
    checks = [check for attempt in attempts for check, _ in attempt.checks]
    if not checks:
        return []
    values: list[bool] = torch.stack([check.to(checks[0].device) for check in checks]).tolist()
    return values


def _precision_of(solver: Solver, device_type: str) -> AbstractContextManager[None]:
    """Full precision, but for eigendecompositions: libraries do not follow TF32's switch there.

    The switch is the whole process's. Beside training, in the background, it would slow the model down, and a compiled
    one would be compiled again.
    """
    return nullcontext() if isinstance(solver, EigenSolver) else full_precision(device_type)


def _jittered(factor: Tensor) -> Tensor:
    """A symmetrised copy with 1e-6 of its largest diagonal entry added to the diagonal."""
    if factor.dim() == 2:
        return factor
    factor = (factor + factor.mT) / 2
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(1e-6 * diagonal.abs().amax(-1, keepdim=True))
    return factor
