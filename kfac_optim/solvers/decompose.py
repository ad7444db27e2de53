"""Decomposes factors of one shape together, and retries where a decomposition fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..common.grouping import grouped_by_key
from ..common.precision import full_precision
from .eigen import EigenSolver
from .protocol import Decomposition, Failure, MaybeDecomposition, Solver, part_dtype

# The most numbers in a batch of factors (256 MiB in float32). Large batches save time, because the host waits for each
# library call, but a batch is held three times: as the input, as the library's output, and in the stored form.
BATCH_NUMEL = 2**26
# Factors are padded to the size of larger ones if that multiplies the operations by at most this much.
_PADDED_COST = 1.6

# What each attempt decomposes, the cheapest first; the CPU's LAPACK is the most robust.
_ATTEMPTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t.double(),
    lambda t: _jittered(t.double().cpu()),
)


@dataclass(frozen=True, eq=False)
class Batch:
    """Factors of one shape on one device, which are decomposed in one call.

    Attributes:
        make: Returns the concatenated factors, ``[p, n, n]`` or ``[p, n]``, in float32 or float64, and what the solver
            adds to their diagonals, ``[p]``. It is called again if the decomposition fails.
        sizes: The number of pairs of each factor, p in all.
        rows: The number of rows n and the device, if these factors may be decomposed together with others of nearly as
            many rows; None: they may not.
    """

    make: Callable[[], tuple[Tensor, Tensor]]
    sizes: Sequence[int]
    rows: tuple[int, torch.device] | None = None


class _Attempt(NamedTuple):
    """The result of an attempt, with checks of it that have not been read from the device yet.

    Attributes:
        result: The decomposition in its stored form, or the error.
        checks: 0-dim bools, each with what is wrong if it is false.
    """

    result: MaybeDecomposition
    checks: Sequence[tuple[Tensor, str]] = ()


def decompose_all(solver: Solver, batches: Iterable[Batch], inv_dtype: torch.dtype) -> list[list[MaybeDecomposition]]:
    """Decomposes batches of factors; if a batch fails, its factors one by one. Matrices are stored in ``inv_dtype``.

    The checks of all results are read from the device at once, after the last batch.

    Returns:
        For each batch a list with what :func:`decompose_safely` returns for each of its factors.
    """
    batches = list(batches)
    attempts: dict[Batch, _Attempt] = {}
    for group in _padded_together(batches) if isinstance(solver, EigenSolver) else [[batch] for batch in batches]:
        attempts.update(zip(group, _attempt(solver, [batch.make() for batch in group], inv_dtype), strict=True))
    found: list[list[MaybeDecomposition]] = []
    for batch, result in zip(batches, _judged([attempts[batch] for batch in batches]), strict=True):
        if isinstance(result, Failure):
            each = zip(*(tensor.split(list(batch.sizes)) for tensor in batch.make()), strict=True)
            found.append([decompose_safely(solver, factor, shift, inv_dtype) for factor, shift in each])
        else:
            found.append(list(zip(*(part.split(list(batch.sizes)) for part in result), strict=True)))
    return found


def decompose_safely(solver: Solver, factor: Tensor, shift: Tensor, inv_dtype: torch.dtype) -> MaybeDecomposition:
    """Decomposes a factor; if that fails, tries again in float64, then on the CPU with jitter on the diagonal.

    Args:
        solver: The solver.
        factor: ``[p, n, n]`` or ``[p, n]``, float32 or float64.
        shift: What the solver adds to the diagonals, ``[p]``.
        inv_dtype: The dtype in which matrices of the decomposition are stored.

    Returns:
        The stored form of the decomposition, or why the last attempt failed.
    """
    result: MaybeDecomposition = Failure("")
    for prepare in _ATTEMPTS:
        prepared = prepare(factor)
        (result,) = _judged(_attempt(solver, [(prepared, shift.to(prepared))], inv_dtype, like=factor))
        if not isinstance(result, Failure):
            break
    return result


def _padded_together(batches: Sequence[Batch]) -> list[list[Batch]]:
    """Groups batches whose factors have similar numbers of rows; batches without ``rows`` stay alone."""
    padded: dict[int, int] = {}  # from the number of rows to that after padding
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
    solver: Solver, inputs: Sequence[tuple[Tensor, Tensor]], inv_dtype: torch.dtype, like: Tensor | None = None
) -> list[_Attempt]:
    """One attempt at decomposing each of some factors, with their shifts, by a single call of the solver.

    ``like``: the factor as it was before it was prepared for this attempt.
    """
    # Eigendecompositions ignore the switch for TF32, which belongs to the whole process: turning it off for one in the
    # background would slow the model down, and a compiled model would be compiled again.
    try:
        with nullcontext() if isinstance(solver, EigenSolver) else full_precision(inputs[0][0].device.type):
            if len(inputs) == 1:
                found = [solver.decompose(*inputs[0])]
            else:
                assert isinstance(solver, EigenSolver)
                found = solver.decompose_padded([factor for factor, _ in inputs])
    except RuntimeError as error:  # LinAlgError, GPU libraries' own, and out of memory, where the CPU may succeed
        return [_Attempt(Failure(f"{type(error).__name__}: {error}"))] * len(inputs)
    pairs = zip(inputs, found, strict=True)
    return [_checked(solver, factor, result, inv_dtype, like) for (factor, _), result in pairs]


def _checked(
    solver: Solver, factor: Tensor, result: Decomposition, inv_dtype: torch.dtype, like: Tensor | None
) -> _Attempt:
    shapes = [(len(factor), *shape) for shape in solver.shapes(factor.shape[-1], factor.dim() == 2)]
    if [tuple(part.shape) for part in result] != shapes:
        raise ValueError(
            f"solver={solver!r}: decompose() has returned tensors of the shapes {[tuple(p.shape) for p in result]} for "
            f"a factor of the shape {tuple(factor.shape)}, of which shapes() says {shapes}"
        )
    kept = tuple(_stored(part if like is None else part.to(like), inv_dtype) for part in result)
    # The stored form is checked: a retry computes in float64, and a number that is finite there may not be in float32.
    checks = [(part.isfinite().all(), "the result is not finite") for part in kept]
    if isinstance(solver, EigenSolver):
        checks.append((solver.is_valid(result), "eigenvectors are not orthonormal"))
    return _Attempt(kept, checks)


def _stored(part: Tensor, inv_dtype: torch.dtype) -> Tensor:
    """A tensor of a decomposition in the form in which it is stored."""
    # Contiguous, as on the ranks that receive it: rounding depends on the layout, and ranks would drift apart.
    return part.to(part_dtype(part.dim() - 1, inv_dtype)).contiguous()


def _judged(attempts: Sequence[_Attempt]) -> list[MaybeDecomposition]:
    """The decomposition that each attempt found, or why it is not valid; all checks are read by one transfer."""
    checks = [check for attempt in attempts for check, _ in attempt.checks]
    passed = iter(torch.stack([check.to(checks[0].device) for check in checks]).tolist() if checks else ())
    found: list[MaybeDecomposition] = []
    for attempt in attempts:
        wrong = [reason for _, reason in attempt.checks if not next(passed)]
        found.append(Failure(wrong[0]) if wrong else attempt.result)
    return found


def _jittered(factor: Tensor) -> Tensor:
    """A symmetrised copy with 1e-6 of its largest diagonal entry added to the diagonal."""
    if factor.dim() == 2:
        return factor
    factor = (factor + factor.mT) / 2
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(1e-6 * diagonal.abs().amax(-1, keepdim=True))
    return factor
