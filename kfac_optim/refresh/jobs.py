"""The decompositions of a refresh: which rank makes each of them, in which step, and from which input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks import Block
from ..common.grouping import grouped_by_key, longest_first
from ..factors import FactorSpec
from ..snapshots import KnownSpectra, Source
from ..solvers import BATCH_NUMEL, Batch, Decomposition, Failure, MaybeDecomposition, Shifting, Solver, damps_factors


class FactorJob(NamedTuple):
    """The decomposition of A (side 0) or G (side 1) of a block."""

    block: Block
    side: int

    @property
    def spec(self) -> FactorSpec:
        """The shape of the factor."""
        return self.block.specs[self.side]

    @property
    def device(self) -> torch.device:
        """Where the factor is."""
        return self.block.layer.weight.device


@dataclass(eq=False)
class Refresh:
    """A refresh: the factors at ``start`` are decomposed over ``spread`` steps, and then used.

    Args:
        rank: The rank of this process.

    Attributes:
        start: The step at which it began.
        spread: The number of steps that share the work; 0: all at once.
        source: The factors that are decomposed: "current" if all at once, "pending" if spread, "in_use" if the
            decompositions in use are recomputed.
        blocks: The blocks to decompose, the same on all ranks.
        gammas: The damping of the pairs of some blocks, ``[p]``; other blocks take it from their snapshots, if at all.
        spectra: What is known about the eigenvalues of factors that are shared out among the ranks, by block.
        background: This rank's jobs that run in the background.
        steps: How many steps after the start each of this rank's jobs is due.
    """

    start: int
    spread: int
    source: Source
    blocks: Sequence[Block]
    rank: InitVar[int]
    gammas: dict[Block, Tensor] = field(default_factory=dict)
    spectra: dict[Block, KnownSpectra] = field(default_factory=dict)

    def __post_init__(self, rank: int) -> None:
        self._running: dict[FactorJob, Callable[[], MaybeDecomposition]] = {}
        self._done: dict[FactorJob, MaybeDecomposition] = {}
        self.schedule(rank)

    def schedule(self, rank: int) -> None:
        """Distributes this rank's jobs over the steps: evenly by cost, with those of one shape together.

        A job larger than one step's budget runs in the background and is due at the end. If this is called again after
        the blocks' workers have changed, results of jobs that now belong to another rank are dropped.
        """
        jobs = [FactorJob(block, side) for block in self.blocks for side in range(2)]
        own_jobs = [job for job in jobs if job.block.workers.inverse_workers[job.side] == rank]
        # The step that begins a refresh also collects statistics, so it gets no job if there are enough other steps.
        steps = range(1 if self.spread > 2 else 0, max(1, self.spread))
        budget = sum(job.spec.cost for job in own_jobs) / len(steps)
        self.background = _costliest_first(job for job in own_jobs if job.spec.cost > budget)
        rest = [job for job in own_jobs if job.spec.cost <= budget]
        batches = grouped_by_key(rest, lambda job: job.spec.shape[1:], lambda job: job.spec.cost, budget)
        when = longest_first([sum(job.spec.cost for job in batch) for batch in batches], steps)
        self.steps = {job: step for step, batch in zip(when, batches, strict=True) for job in batch}
        self.steps |= dict.fromkeys(self.background, self.spread)
        self._done = {job: result for job, result in self._done.items() if job in self.steps}
        self._running = {job: result for job, result in self._running.items() if job in self.steps}

    def ends(self, step: int) -> bool:
        """Whether the refresh ends at ``step``, in which the ranks then exchange its decompositions."""
        return step - self.start >= self.spread

    def due(self, step: int) -> list[FactorJob]:
        """Jobs that are due by ``step`` and not finished.

        The largest job is first, so that its scratch memory is needed while few results are held.
        """
        due = (job for job, after in self.steps.items() if after <= step - self.start)
        return _costliest_first(job for job in due if job not in self._done)

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
        result = self._done.get(FactorJob(block, side))
        return result.reason if isinstance(result, Failure) else ""

    def found(self, block: Block, side: int) -> Decomposition | None:
        """The decomposition of A (0) or G (1) of a block; None if another rank makes it or it has failed."""
        result = self._done.get(FactorJob(block, side))
        return None if isinstance(result, Failure) else result

    def gamma(self, block: Block) -> Tensor | None:
        """The damping of a block's pairs, ``[p]``; zeros or, for current factors, None if damping is added later."""
        return self.gammas.get(block, block.state[self.source].get("gamma"))

    def shift(self, block: Block, side: int, solver: Shifting) -> Tensor:
        """What the solver adds to the diagonal of each matrix of A (0) or G (1) of a block, ``[p]``."""
        gamma = self.gamma(block)
        assert gamma is not None  # the solver damps factors
        return block.factors(self.source, self.spectra.get(block)).shifts(solver, gamma)[side]

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts the background jobs again."""
        return {**self.__dict__, "_running": {}}


def _costliest_first(jobs: Iterable[FactorJob]) -> list[FactorJob]:
    return sorted(jobs, key=lambda job: -job.spec.cost)


def grouped_by_shape(jobs: Sequence[FactorJob]) -> list[list[FactorJob]]:
    """Batches of jobs whose factors have one shape and one device; on a CPU each job is a batch of its own."""

    def size(job: FactorJob) -> float:
        # On the CPU, batches hold one job each. LAPACK takes one matrix at a time anyway, and the last bits of its
        # results depend on the matrix's place in memory: a resumed run, whose batches differ, has to be bit-identical.
        return math.inf if job.device.type == "cpu" else math.prod(job.spec.shape)

    return grouped_by_key(jobs, lambda job: (job.spec.shape[1:], job.device), size, BATCH_NUMEL)


def batch_of(jobs: Sequence[FactorJob], refresh: Refresh, solver: Solver, inv_dtype: torch.dtype) -> Batch:
    """The batch for decomposing the factors of some jobs of a refresh, of one shape and device, in one call.

    They are decomposed in at least the precision of ``inv_dtype``, in which results are stored, and of float32.
    """

    def inputs() -> tuple[Tensor, Tensor]:
        packed = [job.block.factors(refresh.source).packed(job.side) for job in jobs]
        whole = packed[0] if len(packed) == 1 else torch.cat(packed)  # unpacked all together
        dtype = torch.promote_types(whole.dtype, torch.promote_types(inv_dtype, torch.float32))
        factors = spec.unpack(whole).to(dtype)
        if not damps_factors(solver):
            return factors, factors.new_zeros(len(factors))
        shifts = [job.spec.for_blocks(refresh.shift(*job, solver)) for job in jobs]
        return factors, torch.cat(shifts).to(factors)

    spec, device = jobs[0].spec, jobs[0].device
    # Not padded on the CPU, because padding changes the rounding; see grouped_by_shape().
    rows = None if device.type == "cpu" or spec.diagonal else (spec.size, device)
    return Batch(inputs, [job.spec.matrices for job in jobs], rows)
