"""From running averages to the decompositions in use (eqs. 8-13): a refresh, at once or spread over some steps.

Its factors are frozen at its start. Each is decomposed by its inverse worker, sent to the gradient workers, and used by
all of them from the same step on. What is due in which step depends on shapes and the assignment alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .blocks import SIDES, Block, gamma_of, part_dtype
from .diagnostics import StageTimes, communicating
from .distributed import Broadcast, Communicator, longest_first
from .factors import FactorSpec
from .layers import full_precision
from .solvers import Decomposition, Result, Solver, Worker, batches, decompose_all, is_iterated

__all__ = ["Refresh", "Refresher"]

Job = tuple[Block, int]  # the decomposition of a side

# Up to this many numbers factors of one shape are decomposed together (128 MiB in float32), so that the copy that takes
# stays small beside the factors themselves.
_BATCH_NUMEL = 2**25


class Refresh:
    """A refresh in progress: factors frozen at ``start``, decomposed over ``spread`` steps, used from then on.

    ``source`` names the averages that are decomposed: "" at once, "_next" when spread, "_last" when the decompositions
    in use are rebuilt; then every layer has the damping of its last refresh (``damping`` is None). ``anew``: nothing
    starts from the last decompositions, also with an iterated solver.
    """

    def __init__(self, start: int, spread: int, damping: float | None, source: str, *, anew: bool = True) -> None:
        self.start, self.spread, self.damping, self.source, self.anew = start, spread, damping, source, anew
        self.blocks: list[Block] = []
        self.steps: dict[Job, int] = {}  # this rank's share: how long after the start each job is due
        self.beside: list[Job] = []  # those of them that run beside the training
        self.running: dict[Job, Callable[[], Result]] = {}
        self.done: dict[Job, Result] = {}

    def plan(self, blocks: list[Block], share: Mapping[Job, FactorSpec], *, overlap: bool) -> None:
        """Shares this rank's decompositions out to the steps: evenly by cost, and same shapes together.

        One that exceeds a step's share (any, if ``overlap``) has all steps: it runs beside the training.
        """
        self.blocks = blocks
        # The step that begins a refresh collects statistics as well, and is spared where there are enough others.
        steps = range(1 if self.spread > 2 else 0, max(1, self.spread))
        budget = sum(spec.cost for spec in share.values()) / len(steps)
        aside = [job for job, spec in share.items() if self.spread and (overlap or spec.cost > budget)]
        self.beside = sorted(aside, key=lambda job: -share[job].cost)
        rest = [job for job in share if job not in aside]
        together = batches(rest, lambda job: share[job].shape[1:], lambda job: share[job].cost, budget)
        costs = [sum(share[job].cost for job in batch) for batch in together]
        when = longest_first(costs, [steps] * len(together), [0.0] * steps.stop)
        self.steps = {job: step for step, batch in zip(when, together, strict=True) for job in batch}
        self.steps |= dict.fromkeys(self.beside, self.spread)
        self.done = {job: result for job, result in self.done.items() if job in share}
        self.running = {job: result for job, result in self.running.items() if job in share}

    def due(self, elapsed: int) -> list[Job]:
        """What has to be done by now, and is not."""
        return [job for job, step in self.steps.items() if step <= elapsed and job not in self.done]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "running": {}}


class Refresher:
    """Works refreshes off.

    Args:
        solver: What decomposes.
        inv_dtype: Storage of the decompositions.
        stages: Where the time is noted.
    """

    def __init__(self, solver: Solver, inv_dtype: torch.dtype, stages: StageTimes) -> None:
        self.solver, self.inv_dtype, self.stages = solver, inv_dtype, stages
        self._worker = Worker()

    def plan(self, refresh: Refresh, blocks: list[Block], rank: int) -> None:
        """Decides when this rank makes its share of the decompositions of these blocks."""
        share = {
            (block, side): block.specs[side]
            for block in blocks
            for side in range(2)
            if block.workers.inverse_workers[side] == rank
        }
        refresh.plan(blocks, share, overlap=getattr(self.solver, "overlap", False))

    def work_off(self, refresh: Refresh, elapsed: int, *, relative: bool) -> None:
        """Does what is due ``elapsed`` steps after the start; ``relative``: whether damping is.

        Same shapes are decomposed together; what runs beside the training is started first, and collected when due.
        """
        for job in refresh.beside if elapsed < refresh.spread else ():
            if job not in refresh.running and job not in refresh.done:
                refresh.running[job] = self._decompose_beside(
                    *self._factor_of(job, refresh, relative), self._last_of(job, refresh)
                )
        if refresh.damping is None:  # what the state holds need not be made again
            refresh.done |= {job: basis for job in refresh.due(elapsed) if (basis := self._kept(job)) is not None}
        # Largest first: while what a large one needs besides its result is held, few results are.
        due = sorted(refresh.due(elapsed), key=lambda job: -job[0].specs[job[1]].cost)
        lasts = {job: self._last_of(job, refresh) for job in due if job not in refresh.running}
        for jobs in _together(lasts):
            factors, shifts = zip(*(self._factor_of(job, refresh, relative) for job in jobs), strict=True)
            with full_precision(factors[0].device.type):
                found = _decompose(self.solver, self.inv_dtype, factors, shifts, [lasts[job] for job in jobs])
            refresh.done |= dict(zip(jobs, found, strict=True))
        for job in due:
            if job in refresh.running:
                refresh.done[job] = refresh.running.pop(job)()

    def _factor_of(self, job: Job, refresh: Refresh, relative: bool) -> tuple[Tensor, Tensor]:
        """The factor of a job, and what is added to its diagonal."""
        block, side = job
        damping = float(block.average["damping"]) if refresh.damping is None else refresh.damping
        factor = block.factor(side, refresh.source)
        means = block.mean_eigenvalues(refresh.source)
        gamma = gamma_of(means, damping, relative=relative)
        # Where A is the constant 1 there is nothing to split the damping between.
        shifts = (torch.zeros_like(gamma), gamma) if block.layer.joint else self.solver.shifts(gamma, *means)
        dtype = torch.promote_types(factor.dtype, torch.promote_types(self.inv_dtype, torch.float32))
        return factor.to(dtype), shifts[side].to(dtype)

    def _last_of(self, job: Job, refresh: Refresh) -> Result:
        """The decomposition that a job starts from; None: it starts anew."""
        return None if refresh.anew else self._kept(job)

    def _kept(self, job: Job) -> Result:
        """The decomposition that the state holds; None where the solver is not iterated."""
        block, side = job
        return block.basis(side) if is_iterated(self.solver) else None

    def make_room(self, blocks: Sequence[Block]) -> None:
        """Room in the state for the decompositions of an iterated solver, as :func:`~.state.make_room` for averages."""
        for block in blocks if is_iterated(self.solver) else ():
            for side, spec in enumerate(block.specs):
                if not spec.diagonal and f"{SIDES[side]}_basis" not in block.average:
                    self._keep(block, side, tuple(torch.zeros_like(part) for part in self._empty(block, side)))

    def _keep(self, block: Block, side: int, parts: Decomposition) -> None:
        block.average[f"{SIDES[side]}_basis"] = {str(i): part for i, part in enumerate(parts)}

    def _decompose_beside(self, factor: Tensor, shift: Tensor, last: Result) -> Callable[[], Result]:
        """Starts a decomposition on the worker; returns what waits for its result."""
        # Nothing here may hold the worker: its thread would keep it, and all that waits in its queue, alive.
        stages, solver, inv_dtype = self.stages, self.solver, self.inv_dtype

        def work() -> Result:
            with stages.stage("decomposition beside training"):
                return _decompose(solver, inv_dtype, [factor], [shift], [last])[0]

        return self._worker.submit(factor.device, work)

    def finish(self, refresh: Refresh, comm: Communicator) -> list[Block]:
        """Sends the decompositions to those who precondition, and takes them into use (a collective).

        Returns:
            The blocks that have none, because a decomposition failed; they keep their last.
        """
        failed, found = self._exchange(refresh, comm)
        for block, a, g in found:
            if refresh.damping is not None:
                block.freeze("_last", refresh.source)
                block.average["damping"] = torch.tensor(refresh.damping, dtype=torch.float64)
            block.install((a, g) if comm.rank in block.workers.gradient_workers else None)
            for side, parts in enumerate((a, g)):
                if is_iterated(self.solver) and not block.specs[side].diagonal:
                    self._keep(block, side, parts)
        return failed

    def _exchange(
        self, refresh: Refresh, comm: Communicator
    ) -> tuple[list[Block], list[tuple[Block, Decomposition, Decomposition]]]:
        """Sends the decompositions from their inverse workers to the gradient workers.

        Returns:
            The blocks of which one failed, and the others with their new decompositions (empty tuples on ranks that do
            not precondition the layer).
        """
        with communicating("decomposition", self.stages, comm.world_size):
            done = [[float(refresh.done.get((block, i)) is not None) for i in range(2)] for block in refresh.blocks]
            (flags,) = comm.sum([torch.tensor(done, dtype=torch.float64).view(-1, 2)], "counts")
            broadcasts, failed, found = [], [], []
            for block, good in zip(refresh.blocks, flags.bool().all(1).tolist(), strict=True):
                if not good:
                    failed.append(block)
                    continue
                workers, sides = block.workers, []
                for i in range(2):
                    parts, holders = refresh.done.get((block, i)), workers.holders(i)  # only jobs of this rank are done
                    if parts is None:
                        parts = self._empty(block, i) if comm.rank in holders else ()
                    if comm.rank in holders:
                        broadcasts.append(Broadcast(parts, workers.inverse_workers[i], holders))
                    sides.append(parts if comm.rank in workers.gradient_workers else ())
                found.append((block, sides[0], sides[1]))
            comm.send(broadcasts, "decompositions")
        return failed, found

    def _empty(self, block: Block, side: int) -> Decomposition:
        """Room for a decomposition that another rank makes."""
        spec, device = block.specs[side], block.layer.weight.device
        return tuple(
            torch.empty(spec.pairs, *shape, dtype=part_dtype(len(shape), self.inv_dtype), device=device)
            for shape in self.solver.shapes(spec.dim, spec.diagonal)
        )

    def close(self) -> None:
        """Ends the thread; what it has not begun is left undone."""
        self._worker.close()


def _together(lasts: Mapping[Job, Result]) -> list[list[Job]]:
    """Jobs of one shape on one device in batches, those that start anew apart."""

    def shape(job: Job) -> tuple[int, ...]:
        return job[0].specs[job[1]].shape

    def device(job: Job) -> torch.device:
        return job[0].layer.weight.device

    def size(job: Job) -> float:
        # On the CPU each on its own: LAPACK takes one matrix after the other anyway, and the last bits of its results
        # depend on the matrix's place in memory. A resumed run has other batches, and is to continue bit for bit.
        return math.inf if device(job).type == "cpu" else math.prod(shape(job))

    return batches(lasts, lambda job: (shape(job)[1:], device(job), lasts[job] is None), size, _BATCH_NUMEL)


def _decompose(
    solver: Solver,
    inv_dtype: torch.dtype,
    factors: Sequence[Tensor],
    shifts: Sequence[Tensor],
    lasts: Sequence[Result],
) -> list[Result]:
    """Decomposes factors of one shape; the results as they are stored."""
    known = [last for last in lasts if last is not None]  # all of them, or none
    return [_as_stored(result, inv_dtype) for result in decompose_all(solver, factors, shifts, known or None)]


def _as_stored(result: Result, inv_dtype: torch.dtype) -> Result:
    if result is None:
        return None
    # Contiguous, as they arrive on other ranks: products round differently with the layout, and ranks drift apart.
    return tuple(part.to(part_dtype(part.dim() - 1, inv_dtype)).contiguous() for part in result)
