"""Factor -> decomposition, and decompositions + damping + gradient -> preconditioned gradient.

Two solvers, both for stacks of ``p`` Kronecker pairs, ``V`` of shape ``[p, d_out, d_in]``::

    eigen    (paper, eqs. 11-13)  Q_G ((Q_G^T V Q_A) / (d_G d_A^T + gamma)) Q_A^T  =  (A (x) G + gamma I)^-1 V
    inverse  (paper, eqs. 8-10)   (G + sqrt(gamma)/pi I)^-1 V (A + pi sqrt(gamma) I)^-1

with ``pi^2 = mean eigenvalue(A) / mean eigenvalue(G)`` (Martens & Grosse 2015, section 6.3), a factored form of
the same Tikhonov damping. A diagonal factor is decomposed by its diagonal alone.

A solver may also start from its last result (:class:`Iterated`), or tell which part of its results matters at the
damping at hand (:class:`Truncating`).

A decomposition is a tuple of tensors, so that any solver's results can be sent between ranks. Matrices in it are stored
in ``inv_dtype``, vectors and scalars (which carry the magnitude) in float32 at least.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "Decomposition",
    "EigenSolver",
    "InverseSolver",
    "Iterated",
    "Solver",
    "Truncating",
    "Worker",
    "batches",
    "decompose_all",
    "decompose_safely",
    "is_iterated",
]

Decomposition = tuple[Tensor, ...]
Result = Decomposition | None
Item = TypeVar("Item")


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

        May raise ``torch.linalg.LinAlgError`` or return non-finite values; the engine then retries and falls back.
        """
        ...

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """The preconditioned gradient ``[p, d_out, d_in]``; ``gamma`` is ``[p]``."""
        ...


class Iterated(Solver, Protocol):
    """A solver whose decompositions may start from the last ones, which the engine then keeps in its state."""

    @property
    def iterated(self) -> bool:
        """Whether they do."""
        ...

    @property
    def every(self) -> int:
        """One refresh in this many starts anew, >= 1."""
        ...

    def refine(self, factor: Tensor, shift: Tensor, last: Decomposition) -> Decomposition:
        """As ``decompose``, from the last decomposition of the same factor."""
        ...


@runtime_checkable
class Truncating(Solver, Protocol):
    """A solver that can precondition by a part of its decompositions."""

    def relevant(self, a: Decomposition, g: Decomposition, gamma: Tensor) -> tuple[Decomposition, Decomposition]:
        """The parts of a stack's decompositions that matter at a damping: what ``precondition`` then gets.

        What a pair contributes must not depend on the others in its stack. May wait for the device: it is called when
        the decompositions are new, or the damping has become another.
        """
        ...


@dataclass(frozen=True)
class EigenSolver:
    """Eigendecomposition: Tikhonov damping of ``A (x) G`` itself, which may change at every step. The default.

    Args:
        refresh: "eigh" (default) decomposes anew at every refresh. "qr" takes one step of orthogonal iteration from the
            last eigenvectors, ``Q <- qr(F Q)``, with the diagonal of ``Q^T F Q`` for eigenvalues (Golub & Van Loan,
            Matrix Computations, section 8.2.4; Vyas et al. 2024, arXiv:2409.11321). The eigenvectors are then part of
            the optimizer's state, so every rank has to hold all of them.
        every: With "qr", one refresh in this many is an "eigh" all the same, >= 1. Default 10.
        tolerance: With "qr", a factor whose residual ``|F Q - Q diag(d)| / |F|`` (Frobenius norms) exceeds this is
            decomposed by "eigh" in the same refresh, >= 0. Default 0.1.
        overlap: Where a refresh is spread over steps, True runs all of its decompositions beside the training, on a
            thread (with a stream of its own on a GPU), instead of only those that exceed a step's share (default).
        negligible: Eigenvalues of A or G count as zero where all of their products with those of the other factor are
            at most this multiple of the damping, in [0, 1). There eq. 13 divides by ``gamma`` instead of up to ``(1 +
            negligible) gamma``, so no component of the direction is off by more than this share; the products of eqs.
            11-13 then need the other eigenvectors alone. Default 0.01, at which the paper's mode adds 0.08 instead of
            0.35 to a transformer's step (``benchmarks/results/step_time.txt``); 0: exact.

    Raises:
        ValueError: If an argument is out of range.
    """

    refresh: Literal["eigh", "qr"] = "eigh"
    every: int = 10
    tolerance: float = 0.1
    overlap: bool = False
    negligible: float = 0.01

    def __post_init__(self) -> None:
        if self.refresh not in ("eigh", "qr"):
            raise ValueError(f"EigenSolver(refresh={self.refresh!r}): must be 'eigh' or 'qr'")
        if self.every < 1:
            raise ValueError(f"EigenSolver(every={self.every!r}): must be >= 1")
        if not self.tolerance >= 0:
            raise ValueError(f"EigenSolver(tolerance={self.tolerance!r}): must be >= 0")
        if not 0 <= self.negligible < 1:
            raise ValueError(f"EigenSolver(negligible={self.negligible!r}): must be in [0, 1)")

    @property
    def iterated(self) -> bool:
        """Whether decompositions start from the last ones."""
        return self.refresh == "qr"

    def shifts(self, gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
        """None: the damping enters when the gradient is preconditioned."""
        return torch.zeros_like(gamma), torch.zeros_like(gamma)

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """Eigenvalues and eigenvectors; of a diagonal factor eigenvalues alone."""
        return ((dim,),) if diagonal else ((dim,), (dim, dim))

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """``(eigenvalues [p, n],)`` of a diagonal factor, else ``(eigenvalues [p, n], eigenvectors [p, n, n])``."""
        if factor.dim() == 2:
            return (factor.clamp(min=0),)
        values, vectors = torch.linalg.eigh(factor)
        # A factor is positive semi-definite; what rounding pushes below zero would eat up the damping.
        return values.clamp_(min=0), vectors

    def refine(self, factor: Tensor, shift: Tensor, last: Decomposition) -> Decomposition:
        """As :meth:`decompose`, from the last decomposition of the same factor: one step of orthogonal iteration."""
        if factor.dim() == 2:
            return self.decompose(factor, shift)
        vectors = last[1].to(factor)
        image = factor @ vectors
        # Columns of large eigenvalues first: in orthogonal iteration a column has to stay clear of those before it.
        order = (vectors * image).sum(-2, keepdim=True).argsort(-1, descending=True)
        vectors = torch.linalg.qr(image.gather(-1, order.expand_as(image))).Q
        image = factor @ vectors
        values = (vectors * image).sum(-2)
        residual = (image - vectors * values[:, None, :]).norm(dim=(-2, -1))
        bad = residual > self.tolerance * factor.norm(dim=(-2, -1))
        if bool(bad.any()):
            values[bad], vectors[bad] = self.decompose(factor[bad], shift[bad])
        return values.clamp_(min=0), vectors

    def relevant(self, a: Decomposition, g: Decomposition, gamma: Tensor) -> tuple[Decomposition, Decomposition]:
        """Eigenvalues, negligible ones set to zero, and the eigenvectors of the others."""
        if not self.negligible:
            return a, g
        limit = self.negligible * gamma
        return _above(a, limit / g[0].amax(-1)), _above(g, limit / a[0].amax(-1))

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """Eqs. 11-13.

        Where eigenvectors are missing their eigenvalues are zero, and ``(A (x) G + gamma I)^-1`` is ``I / gamma`` but
        for a correction in the span of the others.
        """
        (values_a, *vectors_a), (values_g, *vectors_g) = a, g
        gamma, values_g, values_a = gamma[:, None, None], values_g[:, :, None], values_a[:, None, :]
        damped = torch.addcmul(gamma, values_g, values_a)
        (d_out, d_in), (kept_out, kept_in) = gradient.shape[-2:], damped.shape[-2:]
        g_first = kept_out * d_in * (d_out + kept_in) <= d_out * kept_in * (d_in + kept_out)
        whole = (kept_out, kept_in) == (d_out, d_in)
        v = gradient
        for q, left in _in_order(vectors_g, vectors_a, g_first):
            v = q.mT @ v if left else v @ q
        v = v / damped if whole else v * (values_g * values_a / damped / -gamma)
        for q, left in _in_order(vectors_g, vectors_a, not g_first):
            v = q @ v if left else v @ q.mT
        return v if whole else v.addcdiv_(gradient, gamma)


def _above(side: Decomposition, limit: Tensor) -> Decomposition:
    """What belongs to the eigenvalues above a limit, ``[p]``, of any pair; eigenvalues below their own become zero."""
    values, *vectors = side
    if not vectors:  # of a diagonal factor nothing would be saved
        return side
    above = values > limit[:, None]
    kept = above.any(0).nonzero()  # neighbours, as eigenvalues are sorted
    part = slice(int(kept[0]), int(kept[-1]) + 1) if len(kept) else slice(0)
    values, above = values[:, part], above[:, part]
    return values if bool(above.all()) else values * above, *(q[..., part] for q in vectors)


def _in_order(vectors_g: list[Tensor], vectors_a: list[Tensor], g_first: bool) -> list[tuple[Tensor, bool]]:
    """The eigenvectors to multiply by, each with whether it stands on the left."""
    g, a = [(q, True) for q in vectors_g], [(q, False) for q in vectors_a]
    return g + a if g_first else a + g


@dataclass(frozen=True)
class InverseSolver:
    """Explicit inverses by Cholesky: cheaper to compute and to apply; damping is factored and fixed at the refresh.

    Args:
        pi: True (default) splits the damping by the ratio of the factors' mean eigenvalues. False adds gamma to both
            factors, eqs. 9-10 of the paper to the letter.
        overlap: As for :class:`EigenSolver`.
    """

    pi: bool = True
    overlap: bool = False

    def shifts(self, gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
        """``pi sqrt(gamma)`` for A and ``sqrt(gamma) / pi`` for G; pi is 1 where a factor is zero."""
        if not self.pi:
            return gamma, gamma
        pi = torch.where((mean_a > 0) & (mean_g > 0), (mean_a / mean_g).sqrt(), 1.0)
        root = gamma.sqrt()
        return pi * root, root / pi

    def shapes(self, dim: int, diagonal: bool) -> tuple[tuple[int, ...], ...]:
        """The inverse and its scale; of a diagonal factor the inverse alone."""
        return ((dim,),) if diagonal else ((dim, dim), ())

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """``(inverse [p, n],)`` of a diagonal factor, else ``(inverse / scale [p, n, n], scale [p])``.

        The scale, its largest entry, keeps the inverses of small factors within the range of half precision.
        """
        if factor.dim() == 2:
            return ((factor + shift[:, None]).reciprocal(),)
        matrix = factor.clone()  # one name for all: of large factors as few copies as possible are held
        matrix.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
        matrix = torch.linalg.cholesky(matrix)
        matrix = torch.cholesky_inverse(matrix)
        scale = matrix.diagonal(dim1=-2, dim2=-1).amax(-1)
        return matrix.div_(scale[:, None, None]), scale

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        """Eq. 8 with the damped inverses."""
        (a_inverse, *a_scale), (g_inverse, *g_scale) = a, g
        v = gradient * g_inverse[:, :, None] if g_inverse.dim() == 2 else g_inverse @ gradient
        v = v * a_inverse[:, None, :] if a_inverse.dim() == 2 else v @ a_inverse
        for scale in (*a_scale, *g_scale):
            v = v * scale[:, None, None]
        return v


def is_iterated(solver: Solver) -> TypeGuard[Iterated]:
    """Whether a solver's decompositions start from the last ones."""
    return bool(getattr(solver, "iterated", False))


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


class Worker:
    """Decomposes while training goes on: one thread, with a stream of its own on a GPU.

    A thread there too, because decompositions wait for the device to learn whether they failed.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kfac-decomposition")
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def close(self) -> None:
        """Ends the thread after what it is doing; so does the collection of the worker, if its jobs do not hold it."""
        self._finalizer()

    def submit(self, device: torch.device, work: Callable[[], Result]) -> Callable[[], Result]:
        """Starts ``work``, which may use what is computed on ``device`` so far.

        Returns:
            A function that waits for the result and makes it usable in the caller's stream.
        """
        stream = None
        if device.type == "cuda":
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))

        def run() -> Result:
            with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
                return work()

        future = self._pool.submit(run)

        def result() -> Result:
            found = future.result()
            if stream is not None:
                current = torch.cuda.current_stream(device)
                current.wait_stream(stream)
                for part in found or ():
                    part.record_stream(current)  # or the side stream would take its memory for free too early
            return found

        return result


def _jittered(factor: Tensor) -> Tensor:
    """A symmetrised copy with 1e-6 of its largest diagonal entry added to the diagonal."""
    if factor.dim() == 2:
        return factor
    factor = (factor + factor.mT) / 2
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(1e-6 * diagonal.abs().amax(-1, keepdim=True))
    return factor
