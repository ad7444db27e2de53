"""Contenders take turns on a work; what their steps cost by schedule, as a table and as a picture."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common.reports import grid, table
from benchmarks.common.works import Schedule, Work
from benchmarks.step_time.contenders import LR, PEER, Contender
from benchmarks.step_time.timing import ORDINARY, Place, Run, Seconds, begin, compose, take_period, take_turns

HEADROOM = 1.2  # of the bound on memory: on the base optimizer's peak


@dataclass(frozen=True)
class Cost:
    """Seconds of a step under a schedule: their mean, and the worst step's."""

    mean: float
    worst: float

    @classmethod
    def observed(cls, seconds: Sequence[float]) -> Cost:
        """Return the cost of steps that were all timed."""
        return cls(statistics.fmean(seconds), max(seconds))


def around(seconds: Sequence[float]) -> list[float]:
    """For each step the median of up to eleven around it: a machine's speed drifts in the minutes of a period."""
    return [statistics.median(seconds[max(0, i - 5) : i + 6]) for i in range(len(seconds))]


def beside(seconds: Sequence[float], base: Sequence[float]) -> Cost:
    """Return the cost of steps taken in turns with the base optimizer's, the worst by those around it."""
    slowest = max(map(operator.truediv, seconds, around(base)))
    return replace(Cost.observed(seconds), worst=slowest * statistics.fmean(base))


def begin_all(work: Work, chosen: Sequence[Contender], place: Place) -> tuple[dict[str, Run], dict[str, int]]:
    """Start all runs that can be started.

    Returns:
        The runs, and their peaks, by label. kfac-pytorch is left out, with a word, where it is not installed or cannot
        train the model.
    """
    runs, peaks = {}, {}
    for contender in chosen:
        try:
            runs[contender.label], peaks[contender.label] = begin(work, contender, place)
        except (RuntimeError, ValueError) as error:  # memory, or backward hooks that bear no in-place activations
            if contender.optimizer != PEER:
                raise
            print(f"{contender.label} on {work.title}: left out, {str(error).splitlines()[0]}")
    return runs, peaks


# By contender and schedule: its cost, and that of the base optimizer beside it.
Costs = dict[tuple[str, Schedule], tuple[Cost, Cost]]


def by_rounds(
    runs: Mapping[str, Run], base: str, schedules: Sequence[Schedule], budget: float
) -> tuple[Costs, dict[str, Seconds]]:
    """Time rounds for ``budget`` seconds; return the composed costs, and every step's seconds."""
    measured = take_turns(runs, budget)
    plain = Cost.observed(measured[base][ORDINARY])
    costs: Costs = {}
    for label in [label for label in runs if label != base]:
        means = {kind: statistics.fmean(each) for kind, each in measured[label].items()}
        for schedule in schedules:
            costs[label, schedule] = Cost(*compose(schedule, means)), plain
    return costs, measured


def by_periods(
    runs: Mapping[str, Run], base: str, schedules: Sequence[Schedule]
) -> tuple[Costs, dict[str, dict[str, list[float]]]]:
    """Time one period of each schedule; return the costs, and every step's seconds."""
    costs: Costs = {}
    measured = {}
    for schedule in schedules:
        seconds = take_period(runs, schedule)
        plain = Cost.observed(seconds[base])
        for label in [label for label in runs if label != base]:
            costs[label, schedule] = beside(seconds[label], seconds[base]), plain
        measured[str(schedule)] = seconds
    return costs, measured


def measure(
    work: Work, chosen: Sequence[Contender], schedules: Sequence[Schedule], place: Place, budget: float | None
) -> dict[str, Any]:
    """Measure the contenders, the base optimizer first, on one work.

    Args:
        work: Model and batch.
        chosen: The contenders, the base optimizer first.
        schedules: The schedules; each is a row.
        place: Device, precision, threads, seed.
        budget: Seconds for the rounds; None: run one period of each schedule, instead of composing it.

    Returns:
        ``base``: seconds and peak memory of the base optimizer; ``rows``: for each other contender and schedule the
        ratios to them; ``how`` they were found; ``measured``: the seconds of all steps.
    """
    base = chosen[0].label
    runs, peaks = begin_all(work, chosen, place)
    costs: Costs
    measured: Mapping[str, Any]
    costs, measured = by_periods(runs, base, schedules) if budget is None else by_rounds(runs, base, schedules, budget)
    rows = []
    for (label, schedule), (cost, plain) in costs.items():
        run = runs[label]
        run.check()
        named = {"contender": label, "every": str(schedule), "spread": run.spread_under(schedule)}
        rows.append(named | figures(run, cost, plain, peaks[label], peaks[base]))
    how = "one period" if budget is None else "composed"
    return result_of(work, chosen, place, how, peaks[base], rows, measured)


def figures(run: Run, cost: Cost, plain: Cost, peak: int, base_peak: int) -> dict[str, Any]:
    """Return the figures of a row: the cost of a contender beside that of the base optimizer, and their memory."""
    times = {"mean": cost.mean / plain.mean, "worst": cost.worst / plain.mean, "seconds": cost.mean}
    sizes = {"peak_bytes": peak, "curvature_bytes": run.curvature_bytes}
    sizes["bound_bytes"] = int(HEADROOM * base_peak + run.curvature_bytes)
    return {**times, "base": asdict(plain), **sizes}


def result_of(
    work: Work,
    chosen: Sequence[Contender],
    place: Place,
    how: str,
    base_peak: int,
    rows: Sequence[Mapping[str, Any]],
    measured: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the result of a measurement, which :func:`summary` and :func:`draw` show."""
    return {
        "work": work.title,
        "place": asdict(place),
        "how": how,
        "options": {c.label: {"lr": LR, **c.options} for c in chosen},
        "base": {"contender": chosen[0].label, "peak_bytes": base_peak},
        "rows": rows,
        "measured": measured,
    }


def summary(result: Mapping[str, Any]) -> str:
    """Return the table of what :func:`measure` returned."""
    base, place = result["base"], result["place"]
    rows = []
    for row in result["rows"]:
        line = {"contender": row["contender"], "every": row["every"], "spread": row["spread"] or None}
        of_steps = {key: row[key] for key in ("mean", "worst", "trust") if key in row} | row.get("kinds", {})
        line |= {key: None if value is None else f"{value:.2f}" for key, value in of_steps.items()}
        peak, bound = row["peak_bytes"], row["bound_bytes"]
        sizes = {"peak MiB": peak, "bound MiB": bound, "curvature MiB": row["curvature_bytes"]}
        rows.append({**line, **{key: value / 2**20 for key, value in sizes.items()}, "within": peak <= bound})
    seconds = dict.fromkeys(tuple(row["base"].values()) for row in result["rows"])
    listed = "; ".join(", ".join(f"{each:.4g}" for each in times) for times in seconds)
    peak = base["peak_bytes"] / 2**20
    note = f"{base['contender']} = 1.00: mean and worst step {listed} s, peak {peak:.4g} MiB"
    return table(f"{result['work']}: {place['dtype']} on {place['device']}, {result['how']}", rows, note)


def draw(results: Sequence[Mapping[str, Any]]) -> Figure:
    """Return the picture: for each work the ratios of mean and worst step, and the peaks beside their bounds."""
    figure, axes = grid(len(results), 2, "Steps with K-FAC over those of the base optimizer")
    for (left, right), result in zip(axes, results, strict=True):
        rows = result["rows"]
        places = range(len(rows))
        left.barh(places, [row["mean"] for row in rows], label="mean")
        left.plot([row["worst"] for row in rows], places, "k|", markersize=12, label="worst step")
        left.axvline(1, color="grey", linewidth=1, linestyle=":")
        left.set(xlabel=f"seconds over {result['base']['contender']}'s mean")
        left.set_title(f"{result['work']}, {result['place']['dtype']}", fontsize="medium")
        right.barh(places, [row["peak_bytes"] / 2**20 for row in rows], label="peak")
        right.plot([row["bound_bytes"] / 2**20 for row in rows], places, "k|", markersize=12, label="bound")
        right.axvline(result["base"]["peak_bytes"] / 2**20, color="grey", linewidth=1, linestyle=":")
        right.set(xlabel=f"MiB (dotted: {result['base']['contender']})")
        left.set_yticks(places, [f"{row['contender']} {row['every']}" for row in rows], fontsize="small")
        right.set_yticks(places, ["" for _ in rows])
        for panel in (left, right):
            panel.invert_yaxis()
            panel.legend(fontsize="small")
    return figure
