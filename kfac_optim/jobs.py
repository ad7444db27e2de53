"""The decompositions of a refresh: which rank makes each of them, in which step, and from which input."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .blocks import Block, KnownSpectra, Source
from .factors import FactorSpec
from .grouping import grouped_by_key, longest_first
from .solvers import BATCH_NUMEL, Batch, Decomposition, Failure, MaybeDecomposition, Shifting, Solver, damps_factors

__all__ = ["FactorJob", "RefreshInProgress", "batch_of", "together"]

FactorJob = tuple[Block, int]  # the decomposition of A (0) or G (1) of a block


class RefreshInProgress:
    """A refresh in progress: the factors at ``start`` are decomposed over ``spread`` steps, and then used.

    Args:
        start: The step at which it began.
        spread: The number of steps that share the work; 0: all at once.
        source: The factors that are decomposed: "current" if all at once, "pending" if spread, "in_use" if the
            decompositions in use are recomputed.
        gammas: The damping of the pairs of some blocks, ``[p]``; other blocks take it from their snapshots, if at all.
        spectra: What is known about the eigenvalues of factors that are shared out among the ranks, by block.
    """

    def __init__(
        self,
        start: int,
        spread: int,
        source: Source,
        gammas: Mapping[Block, Tensor] | None = None,
        spectra: Mapping[Block, KnownSpectra] | None = None,
    ) -> None:
        self.start, self.spread, self.source, self.gammas = start, spread, source, dict(gammas or {})
        self.spectra = dict(spectra or {})
        self.blocks: list[Block] = []
        self.steps: dict[FactorJob, int] = {}  # how many steps after the start each of this rank's jobs is due
        self.background: list[FactorJob] = []  # this rank's jobs that run in the background
        self._running: dict[FactorJob, Callable[[], MaybeDecomposition]] = {}
        self._done: dict[FactorJob, MaybeDecomposition] = {}

    def schedule(self, blocks: list[Block], rank: int) -> None:
        """Distributes this rank's jobs over the steps: evenly by cost, with those of one shape together.

        A job larger than one step's budget runs in the background and is due at the end.

        Args:
            blocks: The blocks to decompose, the same on all ranks. If this is called again after their workers have
                changed, results of jobs that now belong to another rank are dropped.
            rank: The rank of this process.
        """
        self.blocks = blocks
        own_jobs: dict[FactorJob, FactorSpec] = {
            (block, side): block.specs[side]
            for block in blocks
            for side in range(2)
            if block.workers.inverse_workers[side] == rank
        }
        # The step that begins a refresh also collects statistics, so it gets no job if there are enough other steps.
        steps = range(1 if self.spread > 2 else 0, max(1, self.spread))
        budget = sum(spec.cost for spec in own_jobs.values()) / len(steps)
        large = [job for job, spec in own_jobs.items() if spec.cost > budget]
        self.background = sorted(large, key=lambda job: -own_jobs[job].cost)
        rest = [job for job in own_jobs if job not in large]
        batches = grouped_by_key(rest, lambda job: own_jobs[job].shape[1:], lambda job: own_jobs[job].cost, budget)
        costs = [sum(own_jobs[job].cost for job in batch) for batch in batches]
        when = longest_first(costs, steps)
        self.steps = {job: step for step, batch in zip(when, batches, strict=True) for job in batch}
        self.steps |= dict.fromkeys(self.background, self.spread)
        self._done = {job: result for job, result in self._done.items() if job in own_jobs}
        self._running = {job: result for job, result in self._running.items() if job in own_jobs}

    def ends(self, step: int) -> bool:
        """Whether the refresh ends at ``step``, in which the ranks then exchange its decompositions."""
        return step - self.start >= self.spread

    def due(self, step: int) -> list[FactorJob]:
        """Jobs that are due by ``step`` and not finished.

        The largest job is first, so that its scratch memory is needed while few results are held.
        """
        jobs = [job for job, after in self.steps.items() if after <= step - self.start and job not in self._done]
        return sorted(jobs, key=lambda job: -job[0].specs[job[1]].cost)

    def start_background(self, start: Callable[[FactorJob], Callable[[], MaybeDecomposition]]) -> None:
        """Starts the background jobs not yet started; ``start`` returns a function that waits for the result."""
        for job in self.background:
            if job not in self._running and job not in self._done:
                self._running[job] = start(job)

    def is_running(self, job: FactorJob) -> bool:
        """Whether a job runs in the background."""
        return job in self._running

    def collect(self, job: FactorJob) -> None:
        """Waits for a background job."""
        self._done[job] = self._running.pop(job)()

    def finish(self, jobs: Sequence[FactorJob], results: Sequence[MaybeDecomposition]) -> None:
        """Takes the results of jobs that did not run in the background."""
        self._done.update(zip(jobs, results, strict=True))

    def failure(self, block: Block, side: int) -> str:
        """The reason why a job of this rank has failed; empty if it has not."""
        result = self._done.get((block, side))
        return result.reason if isinstance(result, Failure) else ""

    def found(self, block: Block, side: int) -> Decomposition | None:
        """The decomposition of A (0) or G (1) of a block; None if another rank makes it or it has failed."""
        result = self._done.get((block, side))
        return None if isinstance(result, Failure) else result

    def gamma(self, block: Block) -> Tensor | None:
        """The damping of a block's pairs, ``[p]``; zeros or, for current factors, None if damping is added later."""
        return self.gammas.get(block, block.state[self.source].get("gamma"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": {}}


def together(jobs: Sequence[FactorJob]) -> list[list[FactorJob]]:
    """Batches of jobs whose factors have one shape and one device; on a CPU each job is a batch of its own."""

    def shape(job: FactorJob) -> tuple[int, ...]:
        return job[0].specs[job[1]].shape

    def device(job: FactorJob) -> torch.device:
        return job[0].layer.weight.device

    def size(job: FactorJob) -> float:
        # On the CPU, batches hold one job each. LAPACK takes one matrix at a time anyway, and the last bits of its
        # results depend on the matrix's place in memory: a resumed run, whose batches differ, has to be bit-identical.
        return math.inf if device(job).type == "cpu" else math.prod(shape(job))

    return grouped_by_key(jobs, lambda job: (shape(job)[1:], device(job)), size, BATCH_NUMEL)


def batch_of(jobs: Sequence[FactorJob], refresh: RefreshInProgress, solver: Solver, inv_dtype: torch.dtype) -> Batch:
    """The batch for decomposing several factors in one call.

    Args:
        jobs: Factors of one shape, on one device.
        refresh: The refresh that they belong to.
        solver: Decomposes the factors.
        inv_dtype: Storage of the results; factors are decomposed in at least this precision, and in float32 at least.
    """

    def inputs() -> tuple[Tensor, Tensor]:
        packed = [block.factors(refresh.source).packed(side) for block, side in jobs]
        whole = packed[0] if len(packed) == 1 else torch.cat(packed)  # unpacked all together
        block, side = jobs[0]
        dtype = torch.promote_types(whole.dtype, torch.promote_types(inv_dtype, torch.float32))
        factors = block.specs[side].unpack(whole).to(dtype)
        if not damps_factors(solver):
            return factors, factors.new_zeros(len(factors))
        shifts = [block.specs[side].for_blocks(_shift_of(block, side, refresh, solver)) for block, side in jobs]
        return factors, torch.cat(shifts).to(factors)

    block, side = jobs[0]
    # Not padded on the CPU, because padding changes the rounding; see together().
    device, spec = block.layer.weight.device, block.specs[side]
    rows = None if device.type == "cpu" or spec.diagonal else (spec.size, device)
    return Batch(inputs, [block.specs[side].matrices for block, side in jobs], rows)


def _shift_of(block: Block, side: int, refresh: RefreshInProgress, solver: Shifting) -> Tensor:
    """The number that the solver adds to the diagonal of each matrix of a factor, ``[p]``."""
    factors, gamma = block.factors(refresh.source, refresh.spectra.get(block)), refresh.gamma(block)
    if gamma is None:
        return torch.zeros_like(factors.ones())
    if block.layer.pairs_share_scale:  # A is the constant 1, so all damping goes to G
        return gamma if side else torch.zeros_like(gamma)
    return solver.shifts(gamma, *factors.means())[side]
