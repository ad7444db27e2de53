"""eigh, batched eigh, QR refresh and Cholesky by size: seconds, and the error of what they precondition."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.common.reports import grid, table
from benchmarks.step_time.timing import Place
from kfac_optim.common.precision import full_precision
from kfac_optim.solvers import Decomposition, EigenSolver, InverseSolver, Solver, damps_factors

DAMPING = 0.01  # in mean eigenvalues
NOTE = f"error: of a preconditioned gradient against float64, damping {DAMPING:g} mean eigenvalues"


@dataclass(frozen=True)
class Method:
    """A way to decompose factors."""

    name: str  # Name in the table
    solver: Solver  # Applies the result
    # Takes factors ``[p, n, n]``, what the solver adds to their diagonals ``[p]``, and the eigenbases of the
    # factors as they were at the last refresh ``[p, n, n]``, in ascending order.
    decompose: Callable[[Tensor, Tensor, Tensor], Decomposition]
    products: bool = False  # Whether it multiplies matrices, so that the precision of products matters


def one_by_one(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """Eigendecompositions in separate calls."""
    parts = [EigenSolver().decompose(factor[None], shift) for factor in factors]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def batched(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """Eigendecompositions in one call."""
    return EigenSolver().decompose(factors, shift)


def old_basis(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """No new basis, only ``diag(Q^T F Q)``: what a refresh has to be better than."""
    return (basis * (factors @ basis)).sum(-2).float().clamp(min=0), basis


def qr_refresh(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """One step of orthogonal iteration from the last basis, ``Q' = qr(F Q)``, with ``diag(Q'^T F Q')`` (as in SOAP).

    The largest eigenvalues must come first: each column is cleared of those before it, and only of those.
    """
    q, _ = torch.linalg.qr((factors @ basis.flip(-1)).float())
    return old_basis(factors, shift, q)


def cholesky(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """Inverses."""
    return InverseSolver().decompose(factors, shift)


METHODS = (
    Method("eigh, one by one", EigenSolver(), one_by_one),
    Method("eigh, batched", EigenSolver(), batched),
    Method("old basis", EigenSolver(), old_basis, products=True),
    Method("QR refresh", EigenSolver(), qr_refresh, products=True),
    Method("Cholesky inverse", InverseSolver(), cholesky),
)
SIZES = (64, 256, 576, 1024, 1152, 2048, 2304, 4096, 4608)  # of the factors of the models above
ENTRIES = 2**26  # at most this many numbers in the factors of one call


@contextmanager
def precision(products: str, device: str) -> Iterator[None]:
    """Matrix products in "fp32", "TF32" or "bf16"; what goes in and the other operators stay float32."""
    with full_precision(device):
        torch.set_float32_matmul_precision("high" if products == "TF32" else "highest")
        with torch.autocast(device, torch.bfloat16, enabled=products == "bf16"):
            yield


def drifted(n: int, pairs: int, device: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors ``[pairs, n, n]`` at a refresh and ten statistics steps later, and a gradient of their kind.

    The ``2 n`` rows of a batch come from one distribution, whose standard deviations fall like ``k^-0.5``: the factors
    drift by its sampling noise, with ``factor_decay=0.95``. The gradient is a sum of products of rows.
    """
    random = torch.Generator(device).manual_seed(seed)
    noise = partial(torch.randn, device=device, generator=random)
    deviations = torch.arange(1, n + 1, device=device) ** -0.5
    mixing = torch.linalg.qr(noise(pairs, n, n)).Q
    first, second = (noise(pairs, 2 * n, n) * deviations @ mixing for _ in range(2))
    before, new, gradient = ((x.mT @ y) / (2 * n) for x, y in ((first, first), (second, second), (first, second)))
    return before, torch.lerp(new, before, 0.95**10), gradient


def seconds_of(work: Callable[[], object], device: str, enough: float) -> float:
    """Return the median seconds of a call, of three at least and of as many as ``enough`` seconds hold."""
    place = Place(device)
    seconds: list[float] = []
    work()  # libraries set up their handles at the first call
    while len(seconds) < 3 or sum(seconds) < enough:
        begin = place.now()
        work()
        seconds.append(place.now() - begin)
    return statistics.median(seconds)


def compare_methods(n: int, pairs: int, device: str, seed: int = 0, enough: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield seconds and error of each method on ``pairs`` factors of size ``n``.

    The error is that of the preconditioned gradient, against the same solver in float64.
    """
    before, factors, gradient = drifted(n, pairs, device, seed)
    basis = torch.linalg.eigh(before).eigenvectors
    means = factors.diagonal(dim1=-2, dim2=-1).mean(-1)
    gamma = DAMPING * means**2
    exact: dict[Solver, Tensor] = {}
    for method in METHODS:
        solver = method.solver
        shift = solver.shifts(gamma, means, means)[0] if damps_factors(solver) else torch.zeros_like(gamma)
        if solver not in exact:
            wide = solver.decompose(factors.double(), shift.double())
            exact[solver] = solver.precondition(gradient.double(), wide, wide, gamma.double())
        for products in ("fp32", "TF32", "bf16") if device == "cuda" else ("fp32", "bf16"):
            with precision(products, device):
                if products == "fp32" or method.products:
                    decompose = partial(method.decompose, factors, shift, basis)
                    seconds, found = seconds_of(decompose, device, enough), decompose()
                apply = partial(solver.precondition, gradient, found, found, gamma)
                applying, direction = seconds_of(apply, device, enough), apply()
            error = (direction.double() - exact[solver]).norm() / exact[solver].norm()
            row = {"method": method.name, "size": n, "factors": pairs, "products": products}
            times = {"ms per factor": 1e3 * seconds / pairs, "ms to apply": 1e3 * applying / pairs}
            yield {**row, **times, "error": float(error)}


def measure(n: int, options: Namespace) -> list[dict[str, Any]]:
    """Return the rows of one size."""
    torch.set_num_threads(1)  # of the CPU
    pairs, enough = max(1, min(16, ENTRIES // n**2)), 0.0 if options.smoke else options.seconds / 30
    return list(compare_methods(n, pairs, options.device, options.seed, enough))


class Decompositions:
    """Decompositions by method, size and products."""

    def measurements(self, options: Namespace) -> dict[str, Callable[[], list[dict[str, Any]]]]:
        """One for each size."""
        return {f"size {n}": partial(measure, n, options) for n in ((8, 16) if options.smoke else SIZES)}

    def content(self, results: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
        """All rows."""
        return {"damping": DAMPING, "rows": list(chain(*results))}

    def text(self, results: Sequence[list[dict[str, Any]]]) -> str:
        """One table."""
        return table("Decompositions by method, size and products", list(chain(*results)), NOTE)

    def draw(self, results: Sequence[list[dict[str, Any]]]) -> Figure:
        """Milliseconds and errors over the size."""
        rows = list(chain(*results))
        figure, axes = grid(1, 2, "Decompositions of factors")
        colours = {method.name: f"C{index}" for index, method in enumerate(METHODS)}
        for method, products in dict.fromkeys((row["method"], row["products"]) for row in rows):
            own = [row for row in rows if (row["method"], row["products"]) == (method, products)]
            style = {"color": colours[method], "linestyle": {"fp32": "-", "TF32": "--", "bf16": ":"}[products]}
            sizes, label = [row["size"] for row in own], f"{method}, {products}"
            for panel, key in zip(axes[0], ("ms per factor", "error"), strict=True):
                panel.plot(sizes, [row[key] for row in own], ".", label=label, **style)
                panel.set(xscale="log", yscale="log", xlabel="size", ylabel=key)
                panel.grid(alpha=0.25, which="both")
        axes[0][1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        return figure
