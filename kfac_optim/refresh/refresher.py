"""From running averages to the decompositions in use (eqs. 8-13): a refresh, at once or spread over some steps.

The factors of a refresh are frozen at its start. Each is decomposed by its inverse worker, and its decomposition is
sent to the gradient workers, which all use it from the same step on. What is due in a step depends on shapes and on
the assignment alone, so that all ranks communicate in the same order.

Two states are possible, also together. A refresh may be in progress: ``start`` begins it, and ``work_off`` does the
share of each step and ends it. The decompositions may be stale, after a state was loaded or layers went to other ranks:
``invalidate`` marks them, and ``rebuild`` recomputes them from the same factors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks import Block
from ..common.counters import Counted, Counter, counter
from ..common.stopwatch import Stopwatch
from ..common.user_warning import warn_user
from ..config import Config
from ..damping import Damping, unit_of, value_of
from ..distributed import Broadcast
from ..placement import Ranks, known_spectra
from ..schedules import due, growing
from ..snapshots import KnownSpectra, Source
from ..solvers import (
    Decomposition,
    EigenSolver,
    MaybeDecomposition,
    Sides,
    Solver,
    Worker,
    damps_factors,
    decompose_all,
    decompose_safely,
    part_dtype,
)
from .jobs import Refresh, batch_of, grouped_by_shape
from .pacing import Pace

# How many steps before a refresh collect statistics, if the interval is longer than _SHORT. If it grows meanwhile, more
# of them do: five if it is half of the steps so far.
_LATEST, _SHORT = 3, 12


class Refresher(Counted, pending_spread=Counter(None)):
    """Starts refreshes, does their work, and puts their results to use; ``inv_dtype`` is for stored decompositions.

    Attributes:
        last_refresh: Step at which the latest refresh began; None: none has begun, or another is to be made at once.
        frozen_at: Step at which the factors behind the current decompositions were copied; None: there are none.
        refreshes: How many refreshes have begun.
        failed_decompositions: How many layers had to keep their last decompositions, over all refreshes.
        in_progress: The refresh that is spread over steps and not finished yet, if any.
        pace: Says when a refresh is due.
    """

    last_refresh: int | None = counter(None)
    frozen_at: int | None = counter(None)
    refreshes: int = counter(0)
    failed_decompositions: int = counter(0)

    def __init__(self, solver: Solver, inv_dtype: torch.dtype, stopwatch: Stopwatch, ranks: Ranks) -> None:
        super().__init__()
        self.solver, self.inv_dtype, self.stopwatch, self.ranks = solver, inv_dtype, stopwatch, ranks
        self.in_progress: Refresh | None = None
        self.pace = Pace()
        self._stale = False
        self._warned: set[str] = set()
        self._worker = Worker()

    # When -----------------------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether there has been a refresh of the layers that train now, in this run or in the one that it resumes."""
        return bool(self.pace.work)

    def is_due(self, config: Config, step: int) -> bool:
        """Whether a refresh begins at ``step``."""
        return self.in_progress is None and self.pace.is_due(config, step, self.last_refresh)

    def collects(self, config: Config, step: int, last: int | None) -> bool:
        """Whether ``step`` collects statistics; ``last`` was the last one to do so, None if they are due at once."""
        given, interval = config.at("factor_update_steps", step), self.pace.interval(config, step)
        if given is not None:
            return due(int(given), step, last)
        if not isinstance(config.inv_update_steps, growing):
            return due(min(10, interval), step, last)
        # A game is not seen before the second statistics, and until then nothing is stretched.
        is_early = self.refreshes < 2 or interval <= _SHORT
        if is_early or last is None or self.last_refresh is None:
            return due(max(1, interval // 2), step, last)
        busy = 0 if self.in_progress is None else self.in_progress.spread + 1  # no other refresh can begin until then
        return due(max(interval, busy) - _LATEST + 1, step, self.last_refresh)

    def communicates(self, config: Config, step: int, *, may_begin: bool) -> bool:
        """Whether the ranks exchange something at ``step``; ``may_begin``: whether a refresh begins if it is due."""
        ends = self.in_progress is not None and self.in_progress.ends(step)
        return self._stale or ends or (may_begin and self.is_due(config, step))

    def refresh_next_step(self) -> None:
        """Makes a full refresh due at the next step."""
        self.last_refresh = None

    def start(self, step: int, blocks: list[Block], damping: Damping, spread: int) -> None:
        """Begins a refresh of blocks whose factors have data, and also ends it if it is not spread (a collective).

        ``spread``: the number of steps that share the work; the first refresh is always done at once.
        """
        rank, spectra = self.ranks.comm.rank, self._spectra_before(blocks, "current")
        gammas: dict[Block, Tensor] = {}
        if damps_factors(self.solver):
            value = value_of(damping, step)
            for block in blocks:
                factors = block.factors("current", spectra.get(block))
                gammas[block] = value * unit_of(damping, factors, block.specs[0].pairs)
        if self.last_refresh is None or not spread:
            goes_on = None
            self._work_off(Refresh(step, 0, "current", blocks, rank, gammas, spectra), step)
        else:
            goes_on = Refresh(step, spread, "pending", blocks, rank, spectra=spectra)
            for block in blocks:
                block.factors("pending").freeze(block.factors("current"), gammas.get(block))
        # Last, so that a refresh that is interrupted before is due again; in one line, so that they belong together.
        self.in_progress, self.last_refresh = goes_on, step
        self.refreshes += 1

    def work_off(self, step: int) -> None:
        """Does this step's share of a refresh in progress, and ends it when it is complete (then a collective)."""
        if self.in_progress is not None:
            self._work_off(self.in_progress, step)

    def invalidate(self) -> None:
        """Marks the decompositions as stale; :meth:`rebuild` recomputes them from the same factors."""
        self._stale = True

    def rebuild(self, step: int, blocks: Sequence[Block]) -> None:
        """Recomputes the decompositions if they are stale (then a collective)."""
        if self._stale:
            decomposed = [block for block in blocks if block.has_data("in_use")]
            refresh = Refresh(step, 0, "in_use", decomposed, self.ranks.comm.rank)
            for stale in (refresh, self.in_progress):
                if stale is not None:
                    stale.spectra.update(self._spectra_before(stale.blocks, stale.source))
            self._work_off(refresh, step)
            self._stale = False

    def _spectra_before(self, blocks: Sequence[Block], source: Source) -> dict[Block, KnownSpectra]:
        """What each rank has to know of factors to damp them (a collective); nothing for the eigen solver."""
        return {} if isinstance(self.solver, EigenSolver) else known_spectra(blocks, source, self.ranks.comm)

    def reschedule(self) -> None:
        """Reschedules a refresh in progress after the blocks' workers have changed."""
        if self.in_progress is not None:
            self.in_progress.schedule(self.ranks.comm.rank)

    # Work -----------------------------------------------------------------------------------------------------------

    def _work_off(self, refresh: Refresh, step: int) -> None:
        with self.stopwatch.stage("decomposition"):
            self._decompose_due(refresh, step)
        if refresh.ends(step):
            self._finish(refresh)

    def _decompose_due(self, refresh: Refresh, step: int) -> None:
        """Does the jobs that are due by ``step``, those of one shape together.

        Jobs that run in the background are started first, and collected when they are due.
        """
        batch = functools.partial(batch_of, refresh=refresh, solver=self.solver, inv_dtype=self.inv_dtype)
        if not refresh.ends(step):
            refresh.start_background(lambda job: self._decompose_in_background(*batch([job]).make()))
        jobs_due = refresh.due(step)
        alike = grouped_by_shape([job for job in jobs_due if not refresh.is_running(job)])
        results = decompose_all(self.solver, [batch(jobs) for jobs in alike], self.inv_dtype)
        for jobs, found in zip(alike, results, strict=True):
            refresh.finish(jobs, found)
        for job in jobs_due:
            if refresh.is_running(job):
                refresh.collect(job)

    def _decompose_in_background(self, factor: Tensor, shift: Tensor) -> Callable[[], MaybeDecomposition]:
        """Starts a decomposition on the worker; returns a function that waits for the result."""
        # work() must not refer to the refresher, or the worker's thread would keep it and all that it holds alive.
        stopwatch, solver, inv_dtype = self.stopwatch, self.solver, self.inv_dtype

        def work() -> MaybeDecomposition:
            with stopwatch.stage("decomposition in the background"):
                return decompose_safely(solver, factor, shift, inv_dtype)

        return self._worker.submit(factor.device, work)

    def _finish(self, refresh: Refresh) -> None:
        """Sends the decompositions to the gradient workers, and puts them to use (a collective)."""
        if refresh.source != "in_use":
            self.frozen_at = refresh.start
        found = self._exchange(refresh)
        spectra = refresh.spectra
        if isinstance(self.solver, EigenSolver):
            largest = functools.partial(self._largest, self.solver, refresh)
            spectra = known_spectra(refresh.blocks, refresh.source, self.ranks.comm, largest)
        for block, own in found.items():
            if refresh.source != "in_use":
                block.factors("in_use").freeze(block.factors(refresh.source), refresh.gamma(block))
            block.install(own, spectra.get(block))
        for block in refresh.blocks:
            if block not in found:
                self._keep_last(block, refresh)
        if refresh is self.in_progress:  # last, so that an interrupted refresh is ended in the next step
            self.in_progress = None

    def _exchange(self, refresh: Refresh) -> dict[Block, Sides | None]:
        """Sends the decompositions from their inverse workers to the gradient workers.

        Returns:
            The new decompositions of the blocks for which none has failed; None on ranks that do not precondition the
            layer.
        """
        comm = self.ranks.comm
        with self.stopwatch.communication("decomposition", comm.world_size):
            done = [[float(refresh.found(block, side) is not None) for side in range(2)] for block in refresh.blocks]
            (flags,) = comm.sum([torch.tensor(done, dtype=torch.float64, device="cpu").view(-1, 2)], "counts")
            good = flags.bool().all(1).tolist()
            broadcasts: list[Broadcast] = []
            found: dict[Block, Sides | None] = {}
            for block in itertools.compress(refresh.blocks, good):
                workers, sides = block.workers, []
                for side, holders in enumerate(map(workers.holders, range(2))):
                    if comm.rank not in holders:
                        continue
                    parts = refresh.found(block, side) or self._receive_buffers(block, side)
                    if len(holders) > 1:
                        broadcasts.append(Broadcast(parts, workers.inverse_workers[side], holders))
                    sides.append(parts)
                found[block] = (sides[0], sides[1]) if comm.rank in workers.gradient_workers else None
            comm.send(broadcasts, "decompositions")
        return found

    def _largest(self, solver: EigenSolver, refresh: Refresh, block: Block, side: int) -> Tensor:
        """The largest eigenvalues that a refresh has found, ``[p]``; zeros if another rank has found them."""
        parts, like = refresh.found(block, side), block.state["in_use"]["gamma"]
        found = torch.zeros_like(like) if parts is None else block.specs[side].largest_of_blocks(solver.largest(parts))
        return found.to(part_dtype(1, self.inv_dtype))

    def _receive_buffers(self, block: Block, side: int) -> Decomposition:
        """Uninitialised tensors to receive a decomposition from another rank."""
        spec, device = block.specs[side], block.layer.weight.device
        return tuple(
            torch.empty(spec.matrices, *shape, dtype=part_dtype(len(shape), self.inv_dtype), device=device)
            for shape in self.solver.shapes(spec.size, spec.diagonal)
        )

    def _keep_last(self, block: Block, refresh: Refresh) -> None:
        """Counts a failed decomposition and warns: the layer goes on with its last good one, or by the base rule."""
        self.failed_decompositions += 1
        name = block.layer.name
        if name not in self._warned:
            self._warned.add(name)
            instead = "goes on with its last good decomposition" if block.has_direction else "trains by the base rule"
            why = "".join(f" ({x})" for x in dict.fromkeys(refresh.failure(block, side) for side in range(2)) if x)
            warn_user(
                f"the factors of {name!r} could not be decomposed{why}, so that it {instead}. If it recurs, raise "
                "damping, or store the factors with factor_dtype=torch.float64",
            )

    # State ----------------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """Its part of the saved counters, without those of its pace."""
        spread = -1 if self.in_progress is None else self.in_progress.spread
        return {**super().counters(), "pending_spread": spread}

    def resume(self, counters: Mapping[str, Any], blocks: Sequence[Block]) -> None:
        """Goes on with the refresh that was in progress, after counters and the blocks' states have been restored."""
        if self.in_progress is not None:  # what is left of it would be decomposed before anything else
            self.close()
            self._worker = Worker()
        spread = int(counters.get("pending_spread", -1))
        if spread >= 0 and self.last_refresh is not None and any(block.state for block in blocks):
            pending = [block for block in blocks if block.has_data("pending")]
            self.in_progress = Refresh(self.last_refresh, spread, "pending", pending, self.ranks.comm.rank)

    def close(self) -> None:
        """Gives up a refresh in progress and ends the worker's thread."""
        self.in_progress = None
        self._worker.close()
