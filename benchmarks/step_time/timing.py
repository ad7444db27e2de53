"""What a training step costs: seconds by kind of step, and peak memory, of optimizers that take turns.

A step of K-FAC is of one of few kinds: *ordinary* (the gradient is preconditioned), *statistics* (factors are updated
as well), *refresh* (all factors are decomposed as well). Each kind is timed by itself, by setting the engine's
intervals before the step; the cost of any schedule follows by arithmetic (:func:`compose`). One period of "every
50/500" so costs the time of a few steps instead of 500.

All optimizers take turns step by step, so that disturbances of the machine hit all of them alike. On the CPU seconds
are those of ``time.process_time``; on a GPU those of the wall, between synchronisations.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from benchmarks.common.works import Schedule, Work
from benchmarks.step_time.contenders import NEVER, Contender
from kfac_optim import CurvatureEngine

ORDINARY, STATISTICS, REFRESH = "ordinary", "statistics", "refresh"
BATCHES = 4  # that a run goes through in turn
LATE = 1000  # the step at which the spread is looked at, where that depends on the step

Seconds = dict[str, list[float]]  # by kind of step


# Schedules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A kind of step, and what has to begin at it."""

    kind: str
    statistics: bool = False
    refresh: bool = False


# One round over all kinds; ordinary steps, which are most of any schedule, twice.
TURNS = (Turn(ORDINARY), Turn(STATISTICS, statistics=True), Turn(ORDINARY), Turn(REFRESH, refresh=True))


def compose(schedule: Schedule, seconds: Mapping[str, float]) -> tuple[float, float]:
    """Return mean and largest seconds of a step over one period of ``schedule``.

    What a kind of step takes beyond an ordinary one adds up where statistics and a refresh fall on the same step.

    Args:
        schedule: The intervals.
        seconds: Seconds of one step of each kind.
    """
    ordinary = seconds[ORDINARY]
    steps = []
    for step in range(math.lcm(schedule.statistics, schedule.decompositions)):
        updates = seconds[STATISTICS] - ordinary if step % schedule.statistics == 0 else 0.0
        refresh = seconds[REFRESH] - ordinary if step % schedule.decompositions == 0 else 0.0
        steps.append(ordinary + updates + refresh)
    return statistics.fmean(steps), max(steps)


# Steps ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where and in which precision steps run."""

    device: str = "cpu"  # "cpu" or "cuda"
    # "float32", with torch's own choice of TF32 (in convolutions on GPUs), "bf16": autocast to bfloat16, "bf16-tf32":
    # that with TF32 in the products that are left in float32.
    dtype: str = "float32"
    seed: int = 0  # Seed of weights and data

    def now(self) -> float:
        """Return the seconds of the clock: of this process's CPU time, or of the wall's once the GPU has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


class Run:
    """Model, batches and optimizer of one contender."""

    def __init__(self, work: Work, contender: Contender, place: Place) -> None:
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high" if place.dtype == "bf16-tf32" else "highest")
        torch.manual_seed(place.seed)
        self.work, self.place = work, place
        self.model = work.make().to(place.device)
        self.optimizer, self.keeper = contender.build(self.model, work)
        self.batches = [
            tuple(part.to(place.device) for part in work.data(place.seed + number)) for number in range(BATCHES)
        ]
        self.steps = 0
        self.loss = torch.zeros(())
        engine = self.keeper if isinstance(self.keeper, CurvatureEngine) else None
        self.spread = 0 if engine is None else engine.stages.refresher.pace.spread(engine, LATE)
        self.kinds = [ORDINARY] if self.keeper is None else [ORDINARY, STATISTICS, REFRESH]

    def set_schedule(self, schedule: Schedule) -> None:
        """Set the intervals from the coming step on."""
        if isinstance(self.keeper, CurvatureEngine):
            self.keeper.factor_update_steps = schedule.statistics
            self.keeper.inv_update_steps = schedule.decompositions
        elif self.keeper is not None:  # kfac-pytorch has properties without setters
            self.keeper._factor_update_steps = schedule.statistics
            self.keeper._inv_update_steps = schedule.decompositions

    def spread_under(self, schedule: Schedule) -> int:
        """Return over how many steps a refresh is worked off."""
        by_default = isinstance(self.keeper, CurvatureEngine) and self.keeper.spread is None
        return schedule.decompositions // 10 if by_default else self.spread

    def step(self) -> float:
        """Take one step; return its seconds."""
        inputs, targets = self.batches[self.steps % BATCHES]
        begin = self.place.now()
        self.optimizer.zero_grad()
        with torch.autocast(self.place.device, torch.bfloat16, enabled=self.place.dtype != "float32"):
            loss = self.work.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        seconds = self.place.now() - begin
        self.steps, self.loss = self.steps + 1, loss.detach()
        return seconds

    def take(self, turn: Turn) -> float:
        """Take one step of a kind; return its seconds."""
        self.set_schedule(Schedule(1 if turn.statistics else NEVER, 1 if turn.refresh else NEVER))
        return self.step()

    @property
    def curvature_bytes(self) -> int:
        """Bytes of factors and decompositions, as their keeper counts them."""
        if self.keeper is None:
            return 0
        of_engine = isinstance(self.keeper, CurvatureEngine)
        return (self.keeper.memory_estimate() if of_engine else self.keeper.memory_usage())["total"]

    def check(self) -> None:
        """Refuse to have timed steps that were skipped.

        Raises:
            RuntimeError: If the loss is not finite, or a step was left out because of its gradients.
        """
        if not self.loss.isfinite() or getattr(self.keeper, "skipped_steps", False):
            raise RuntimeError(f"{self.work.title}: training diverged, its times mean nothing")


def take_turns(runs: Mapping[str, Run], budget: float) -> dict[str, Seconds]:
    """Time rounds of ``TURNS``, every run one step at each turn.

    Args:
        runs: By label; refreshes are not spread.
        budget: Seconds after which no further round begins; the first begins in any case.

    Returns:
        The seconds of all steps, by run and kind.
    """
    seconds: dict[str, Seconds] = {label: {kind: [] for kind in run.kinds} for label, run in runs.items()}
    end = time.perf_counter() + budget
    with tqdm(desc="rounds", unit="round", mininterval=5) as bar:
        while not bar.n or time.perf_counter() < end:
            for turn in TURNS:
                for label, run in runs.items():
                    seconds[label][turn.kind if turn.kind in run.kinds else ORDINARY].append(run.take(turn))
            bar.update()
    return seconds


def take_period(runs: Mapping[str, Run], schedule: Schedule) -> dict[str, list[float]]:
    """Time every step of one period of ``schedule``, the runs taking turns.

    It begins ``spread`` steps after a refresh, so that it holds all steps of every refresh.
    """
    for run in runs.values():
        run.take(Turn("everything", statistics=True, refresh=True))
        run.set_schedule(schedule)
        for _ in range(run.spread):
            run.step()
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    for _ in tqdm(range(math.lcm(schedule.statistics, schedule.decompositions)), desc="period", mininterval=5):
        for label, run in runs.items():
            seconds[label].append(run.step())
    return seconds


# Memory --------------------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], object], device: str) -> int:
    """Return how many bytes ``work`` had allocated at once, at most; on the CPU within torch's operators, too."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    results: Any = trace.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # negative where memory is given back
        peak = max(peak, held)
    return peak


def begin(work: Work, contender: Contender, place: Place) -> tuple[Run, int]:
    """Start a run with a step of each kind; return it and its peak, of model, batches, optimizer and these steps."""
    started: list[Run] = []

    def every_kind() -> None:
        started.append(Run(work, contender, place))
        started[0].step()
        for turn in (*TURNS, *[Turn(ORDINARY)] * started[0].spread):
            started[0].take(turn)

    peak = peak_bytes(every_kind, place.device)
    return started[0], peak
