"""The first steps of optimizers as they come: by their own schedules, and with the trust that they learn.

The package's defaults have no fixed period: refreshes get rarer with the steps, may wait for many of them, and what a
step does depends on trust. So their first steps are timed, beside those of the base optimizer, and sorted by what each
has done; a step is of the first kind that fits:

    refresh      a refresh begins or ends, or has a share of its work here (what runs in the background does not count)
    statistics   factors are updated
    base         the base optimizer's own step, which is all of it where directions are not called for
    repeated     the change of the step before is made once more
    ordinary     directions are computed
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from tqdm import tqdm

from benchmarks.common.works import Work
from benchmarks.step_time.contenders import Contender
from benchmarks.step_time.measure import Cost, beside, figures, result_of
from benchmarks.step_time.timing import ORDINARY, REFRESH, STATISTICS, Place, Run, peak_bytes
from kfac_optim import CurvatureEngine

BASE, REPEATED = "base", "repeated"
KINDS = (BASE, REPEATED, ORDINARY, STATISTICS, REFRESH)
WARM = 21  # steps before the timed run: if refreshes do not wait, the second begins in step 10 and ends by then
FEWEST = 12  # steps that are timed in any case


@dataclass(frozen=True)
class Step:
    """A step that was taken."""

    seconds: float
    kind: str
    trust: float | None  # With which it was taken; None: of the base optimizer


def last_turn(run: Run) -> Tensor | None:
    """Return what the optimizer has noted of its last turn, of one weight; None: it has noted nothing."""
    return next((state["kfac_turn"] for state in run.optimizer.state.values() if "kfac_turn" in state), None)


def take(run: Run) -> Step:
    """Take a step and see what it does."""
    engine = run.keeper
    if not isinstance(engine, CurvatureEngine):
        return Step(run.step(), BASE, None)
    step, turn, refresh = engine.step_count, last_turn(run), engine.stages.refresher.in_progress
    works = refresh is not None and (refresh.ends(step) or bool(refresh.due(step)))
    seconds, now = run.step(), last_turn(run)
    if works or engine.stages.refresher.last_refresh == step:
        kind = REFRESH
    elif engine.stages.progress.last_statistics == step:
        kind = STATISTICS
    else:
        kind = BASE if now is None else REPEATED if now is turn else ORDINARY
    return Step(seconds, kind, engine.trust)


def take_first(runs: Mapping[str, Run], most: int, budget: float) -> dict[str, list[Step]]:
    """Time the first steps, the runs taking turns.

    Args:
        runs: By label; none has taken a step yet.
        most: Number of steps at most.
        budget: Seconds after which no further step begins; ``FEWEST`` are taken in any case.
    """
    steps: dict[str, list[Step]] = {label: [] for label in runs}
    end = time.perf_counter() + budget
    for number in tqdm(range(most), desc="first steps", unit="step", mininterval=5):
        if number >= FEWEST and time.perf_counter() > end:
            break
        for label, run in runs.items():
            steps[label].append(take(run))
    return steps


def begin(work: Work, contender: Contender, place: Place) -> tuple[Run, int]:
    """Return a run that has taken no step; and the peak of another, whose first steps load the device's libraries."""

    def warm() -> None:
        run = Run(work, contender, place)
        for _ in range(WARM):
            run.step()

    peak = peak_bytes(warm, place.device)
    return Run(work, contender, place), peak


def measure_first(work: Work, chosen: Sequence[Contender], place: Place, most: int, budget: float) -> dict[str, Any]:
    """Measure the first steps of the contenders on one work.

    Args:
        work: Model and batch.
        chosen: The contenders, the base optimizer first.
        place: Device, precision, threads, seed.
        most: Number of steps at most.
        budget: Seconds for them.

    Returns:
        As :func:`~benchmarks.step_time.measure.measure`; each row also has the mean trust, and by kind the ratio
        of the mean step (``kinds``; None: there was none) and the number of steps (``counts``).
    """
    runs, peaks = {}, {}
    for contender in chosen:
        runs[contender.label], peaks[contender.label] = begin(work, contender, place)
    steps = take_first(runs, most, budget)
    base = chosen[0].label
    seconds = {label: [step.seconds for step in taken] for label, taken in steps.items()}
    plain = Cost.observed(seconds[base])
    rows = []
    for label, run in runs.items():
        if label == base:
            continue
        run.check()
        row: dict[str, Any] = {"contender": label, "every": "own", "spread": None}
        row |= figures(run, beside(seconds[label], seconds[base]), plain, peaks[label], peaks[base])
        row["trust"] = statistics.fmean(step.trust or 0.0 for step in steps[label])
        by_kind = {kind: [step.seconds for step in steps[label] if step.kind == kind] for kind in KINDS}
        row["kinds"] = {kind: statistics.fmean(own) / plain.mean if own else None for kind, own in by_kind.items()}
        rows.append({**row, "counts": {kind: len(own) for kind, own in by_kind.items()}})
    measured = {label: [vars(step) for step in taken] for label, taken in steps.items()}
    return result_of(work, chosen, place, f"first {len(seconds[base])} steps", peaks[base], rows, measured)
