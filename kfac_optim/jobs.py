"""The decompositions of a refresh: who makes which in which step, and what they are made of."""

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
    """A refresh in progress: factors frozen at ``start``, decomposed over ``spread`` steps, used from then on.

    Args:
        start: The step at which it began.
        spread: Over how many steps it is worked off; 0: at once.
        source: Which factors are decomposed: "current" at once, "pending" when spread, "in_use" when the decompositions
            in use are only made again.
        gammas: The damping of each block's pairs, ``[p]``; that in its snapshot, or none, for the others.
        spectra: What is known of the eigenvalues of factors of which other ranks keep some, by block.
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
        self.steps: dict[FactorJob, int] = {}  # this rank's jobs: how many steps after the start each is due
        self.background: list[FactorJob] = []  # those of them that run in the background
        self._running: dict[FactorJob, Callable[[], MaybeDecomposition]] = {}
        self._done: dict[FactorJob, MaybeDecomposition] = {}

    def schedule(self, blocks: list[Block], rank: int) -> None:
        """Shares this rank's decompositions out to the steps: evenly by cost, and same shapes together.

        A job larger than one step's budget runs in the background and is due at the end.

        Args:
            blocks: Those to decompose, the same on all ranks. Again with other workers than before, results of jobs
                that are now another rank's are dropped.
            rank: This process.
        """
        self.blocks = blocks
        own_jobs: dict[FactorJob, FactorSpec] = {
            (block, side): block.specs[side]
            for block in blocks
            for side in range(2)
            if block.workers.inverse_workers[side] == rank
        }
        # The step that begins a refresh collects statistics as well, and is spared where there are enough others.
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
        """Whether its time is up at ``step``: the ranks then exchange its decompositions."""
        return step - self.start >= self.spread

    def due(self, step: int) -> list[FactorJob]:
        """Jobs that are due by ``step`` and not finished.

        Largest first, so that its scratch memory is needed while few results are held.
        """
        jobs = [job for job, after in self.steps.items() if after <= step - self.start and job not in self._done]
        return sorted(jobs, key=lambda job: -job[0].specs[job[1]].cost)

    def start_background(self, start: Callable[[FactorJob], Callable[[], MaybeDecomposition]]) -> None:
        """Starts the background jobs that are neither running nor done; ``start`` returns what waits for a result."""
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
        """Takes the results of other jobs."""
        self._done.update(zip(jobs, results, strict=True))

    def failure(self, block: Block, side: int) -> str:
        """Why a job of this rank has failed; empty if it has not."""
        result = self._done.get((block, side))
        return result.reason if isinstance(result, Failure) else ""

    def found(self, block: Block, side: int) -> Decomposition | None:
        """The decomposition of A (0) or G (1) of a block; None where another rank makes it, or it has failed."""
        result = self._done.get((block, side))
        return None if isinstance(result, Failure) else result

    def gamma(self, block: Block) -> Tensor | None:
        """The damping of a block's pairs, ``[p]``: zeros, or None for current factors, where damping comes later."""
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
        # On the CPU each on its own: LAPACK takes one matrix after the other anyway, and the last bits of its results
        # depend on the matrix's place in memory. A resumed run has other batches, and is to continue bit for bit.
        return math.inf if device(job).type == "cpu" else math.prod(shape(job))

    return grouped_by_key(jobs, lambda job: (shape(job)[1:], device(job)), size, BATCH_NUMEL)


def batch_of(jobs: Sequence[FactorJob], refresh: RefreshInProgress, solver: Solver, inv_dtype: torch.dtype) -> Batch:
    """The input of a decomposition of several factors at once.

    Args:
        jobs: Factors of one shape, on one device.
        refresh: The refresh that they belong to.
        solver: What decomposes.
        inv_dtype: Storage of the results; factors are decomposed in at least this precision, and in float32 at least.
    """

    def inputs() -> tuple[Tensor, Tensor]:
        packed = [block.factors(refresh.source).packed(side) for block, side in jobs]
        whole = packed[0] if len(packed) == 1 else torch.cat(packed)  # and unpacked together
        block, side = jobs[0]
        dtype = torch.promote_types(whole.dtype, torch.promote_types(inv_dtype, torch.float32))
        factors = block.specs[side].unpack(whole).to(dtype)
        if not damps_factors(solver):
            return factors, factors.new_zeros(len(factors))
        shifts = [block.specs[side].for_blocks(_shift_of(block, side, refresh, solver)) for block, side in jobs]
        return factors, torch.cat(shifts).to(factors)

    block, side = jobs[0]
    # On the CPU each on its own, see above; what is padded is rounded differently.
    device, spec = block.layer.weight.device, block.specs[side]
    rows = None if device.type == "cpu" or spec.diagonal else (spec.size, device)
    return Batch(inputs, [block.specs[side].matrices for block, side in jobs], rows)


def _shift_of(block: Block, side: int, refresh: RefreshInProgress, solver: Shifting) -> Tensor:
    """What the solver adds to the diagonal of a factor, ``[p]``."""
    factors, gamma = block.factors(refresh.source, refresh.spectra.get(block)), refresh.gamma(block)
    if gamma is None:
        return torch.zeros_like(factors.ones())
    if block.layer.pairs_share_scale:  # where A is the constant 1 there is nothing to split the damping between
        return gamma if side else torch.zeros_like(gamma)
    return solver.shifts(gamma, *factors.means())[side]
