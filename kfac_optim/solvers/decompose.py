"""Decomposes factors of one shape together, and retries where a decomposition fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from .protocol import Decomposition, Iterated, Result, Solver

__all__ = ["batches", "decompose_all", "decompose_safely"]

Item = TypeVar("Item")


def decompose_safely(solver: Solver, factor: Tensor, shift: Tensor, last: Result = None) -> Decomposition | None:
    """Decomposes, and where that fails retries in float64, then on the CPU with jitter on the diagonal.

    Args:
        solver: The solver.
        factor: ``[p, n, n]`` or ``[p, n]``, float32 or float64.
        shift: ``[p]``.
        last: The decomposition to start from; None: anew, as in all retries.

    Returns:
        The decomposition in the factor's dtype and on its device, or None if every attempt failed.
    """
    attempts: list[Callable[[Tensor], Tensor]] = [
        lambda t: t,
        lambda t: t.double(),
        lambda t: _jittered(t.double().cpu()),
    ]
    for attempt in attempts:
        input_ = attempt(factor)
        result, last = _attempt(solver, input_, shift.to(input_), last), None
        if result is not None:
            return tuple(part.to(factor) for part in result)
    return None


def _attempt(solver: Solver, factor: Tensor, shift: Tensor, last: Result) -> Decomposition | None:
    """The decomposition, or None if it failed or is not finite."""
    try:
        result = solver.decompose(factor, shift) if last is None else cast(Iterated, solver).refine(factor, shift, last)
    except RuntimeError:
        return None
    return result if all(bool(part.isfinite().all()) for part in result) else None


def batches(
    items: Iterable[Item], key: Callable[[Item], Hashable], size: Callable[[Item], float], limit: float
) -> list[list[Item]]:
    """Items of one key together, in their order, as long as their sizes add up to ``limit`` at most.

    An item that exceeds the limit alone is a batch of its own.
    """
    found: list[list[Item]] = []
    latest: dict[Hashable, tuple[list[Item], float]] = {}
    for item in items:
        batch, so_far = latest.get(key(item), ([], 0.0))
        if not batch or so_far + size(item) > limit:
            batch, so_far = [], 0.0
            found.append(batch)
        batch.append(item)
        latest[key(item)] = (batch, so_far + size(item))
    return found


def decompose_all(
    solver: Solver, factors: Sequence[Tensor], shifts: Sequence[Tensor], lasts: Sequence[Decomposition] | None = None
) -> list[Result]:
    """Decomposes factors of one shape as one batch, or one by one if that fails.

    Args:
        solver: The solver; :class:`Iterated` if there are ``lasts``.
        factors: ``[p, n, n]`` or ``[p, n]`` each, with its own p.
        shifts: ``[p]`` each.
        lasts: The decompositions to start from; None: anew.

    Returns:
        For each factor what :func:`decompose_safely` returns.
    """
    together = None
    if len(factors) > 1:
        last = None if lasts is None else tuple(torch.cat(parts) for parts in zip(*lasts, strict=True))
        together = _attempt(solver, torch.cat(list(factors)), torch.cat(list(shifts)), last)
    if together is None:
        each = zip(factors, shifts, [None] * len(factors) if lasts is None else lasts, strict=True)
        return [decompose_safely(solver, factor, shift, last) for factor, shift, last in each]
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
