"""Decomposes factors of one shape together, and retries where a decomposition fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ..precision import full_precision
from .protocol import Failure, MaybeDecomposition, Solver, Verifying

__all__ = ["grouped_by_key", "decompose_all", "decompose_safely"]

Item = TypeVar("Item")


def decompose_safely(solver: Solver, factor: Tensor, shift: Tensor) -> MaybeDecomposition:
    """Decomposes, and where that fails retries in float64, then on the CPU with jitter on the diagonal.

    Args:
        solver: The solver.
        factor: ``[p, n, n]`` or ``[p, n]``, float32 or float64.
        shift: What the solver adds to the diagonals, ``[p]``.

    Returns:
        The decomposition in the factor's dtype and on its device, or why the last attempt failed.
    """
    # Cheapest first; the CPU's LAPACK is the most robust.
    attempts: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t.double(),
        lambda t: _jittered(t.double().cpu()),
    ]
    result: MaybeDecomposition = Failure("")
    for attempt in attempts:
        prepared = attempt(factor)
        result = _attempt(solver, prepared, shift.to(prepared))
        if not isinstance(result, Failure):
            return tuple(part.to(factor) for part in result)
    return result


def _attempt(solver: Solver, factor: Tensor, shift: Tensor) -> MaybeDecomposition:
    """The decomposition, or what keeps it from being one: an error, numbers that are not finite, the solver's check."""
    try:
        with _precision_of(solver, factor.device.type):
            result = solver.decompose(factor, shift)
    except RuntimeError as error:  # LinAlgError, GPU libraries' own errors, and out of memory, which the CPU may solve
        return Failure(f"{type(error).__name__}: {error}")
    checks = [part.isfinite().all() for part in result]
    if isinstance(solver, Verifying):
        checks.append(solver.is_valid(result))
    passed = torch.stack(checks).tolist()
    if all(passed):
        return result
    return Failure("the result is not finite" if not all(passed[: len(result)]) else "the result is no decomposition")


def _precision_of(solver: Solver, device_type: str) -> AbstractContextManager[None]:
    """Full precision, but for solvers that call libraries alone: these do not follow TF32's switch.

    The switch is the whole process's. Beside training, in the background, it would slow the model down, and a compiled
    one would be compiled again.
    """
    return nullcontext() if getattr(solver, "calls_libraries_only", False) else full_precision(device_type)


def grouped_by_key(
    items: Iterable[Item], key: Callable[[Item], Hashable], size: Callable[[Item], float], limit: float
) -> list[list[Item]]:
    """Items of one key together, in their order, as long as their sizes add up to ``limit`` at most.

    An item that exceeds the limit alone is a batch of its own.
    """
    found: list[list[Item]] = []
    latest: dict[Hashable, tuple[list[Item], float]] = {}
    for item in items:
        kind, weight = key(item), size(item)
        batch, so_far = latest.get(kind, ([], 0.0))
        if not batch or so_far + weight > limit:
            batch, so_far = [], 0.0
            found.append(batch)
        batch.append(item)
        latest[kind] = (batch, so_far + weight)
    return found


def decompose_all(solver: Solver, factors: Sequence[Tensor], shifts: Sequence[Tensor]) -> list[MaybeDecomposition]:
    """Decomposes factors of one shape as one batch, or one by one if that fails.

    Args:
        solver: The solver.
        factors: ``[p, n, n]`` or ``[p, n]`` each, with its own p.
        shifts: What the solver adds to their diagonals, ``[p]`` each.

    Returns:
        For each factor what :func:`decompose_safely` returns.
    """
    together = _attempt(solver, torch.cat(list(factors)), torch.cat(list(shifts))) if len(factors) > 1 else None
    if together is None or isinstance(together, Failure):
        return [decompose_safely(solver, factor, shift) for factor, shift in zip(factors, shifts, strict=True)]
    sizes = [len(factor) for factor in factors]
    return list(zip(*(part.split(sizes) for part in together), strict=True))


def _jittered(factor: Tensor) -> Tensor:
    """A symmetrised copy with 1e-6 of its largest diagonal entry added to the diagonal."""
    if factor.dim() == 2:
        return factor
    factor = (factor + factor.mT) / 2
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(1e-6 * diagonal.abs().amax(-1, keepdim=True))
    return factor
