"""Table and picture of the suite: where the swap is behind its base."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common.reports import grid, table
from benchmarks.common.runs import Line
from benchmarks.swap.judging import SHARES, Verdict, summary
from benchmarks.swap.trainings import HALVES

COLUMNS = 8  # panels beside one another
BASE, SWAP, BEHIND = "0.45", "C0", "#d62728"
TINT = "#fdecea"  # of a panel in which the swap is behind somewhere


def percent(value: float) -> str:
    """Return a difference with its sign."""
    return f"{100 * value:+.1f}%" if math.isfinite(value) else "failed"


def row(verdict: Verdict) -> Line:
    """Return a line of the table: differences of the means over the seeds, "*" where the swap is behind."""
    training, mean = verdict.training, verdict.mean
    flagged = zip(SHARES, mean.differences, mean.behind, strict=True)
    seeds = [sum(pair.behind) for pair in verdict.seeds]
    held_out = mean.held_out_difference
    return {
        "training": training.name,
        "optimizer": training.optimizer,
        "rate": training.rate,
        "schedule": training.course,
        **{f"{share:.0%}": percent(value) + ("*" if behind else " ") for share, value, behind in flagged},
        "seeds": ",".join(map(str, seeds)),
        "base": mean.base[-1],
        "swap": mean.swap[-1],
        "held out": "" if held_out is None else percent(held_out),
        "s": verdict.seconds,
        "time": verdict.time_ratio,
        "steps": verdict.steps_to_the_end,
        "seconds": verdict.seconds_to_the_end,
    }


def tables(verdicts: Sequence[Verdict]) -> str:
    """Return the tables of both halves, the summary, and what did not end well."""
    parts = []
    for half, found in by_half(verdicts).items():
        parts.append(table(f"{half}: {HALVES[half]}", list(map(row, found))))
    parts.append(table("summary", [{"half": half, **figures} for half, figures in summaries(verdicts).items()], NOTE))
    for verdict in verdicts:
        for run in (*verdict.base, *verdict.swap):
            if run["end"] != "finished":
                side = "base" if run["run"]["swap"] is None else "swap"
                parts.append(f"{verdict.training.name}, seed {run['run']['seed']}, {side}: {run['end']}")
    return "\n".join(parts)


NOTE = """
10% to 100%: swap less base as a share of the base's loss (of its whole drop for flows, returns and the GAN's
distance), means over seeds and over the last 5 % of all steps before the point, at least 10; *: behind, above by more
than 2 %. seeds: points behind, of each seed alone. held out: the same at the end. s: CPU seconds of a base run; time:
the swap's over the base's. steps, seconds: after which share of the base's the swap has the base's final loss, median
over seeds (inf: never). Summary: points behind of all points; runs lower at the end, and held out not above by more
than 2 %, of all runs; geometric means over the trainings, of steps and seconds medians; trainings in which the swap has
the base's final loss sooner in seconds."""


def summaries(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """Return the summary of each half that was run, and of both."""
    return {name: summary(found) for name, found in {**by_half(verdicts), "both": verdicts}.items()}


def by_half(verdicts: Sequence[Verdict]) -> dict[str, Sequence[Verdict]]:
    """Return the verdicts of each half that was run."""
    halves = {half: [verdict for verdict in verdicts if verdict.training.half == half] for half in HALVES}
    return {half: found for half, found in halves.items() if found}


def picture(verdicts: Sequence[Verdict], title: str) -> Figure:
    """Return a panel for each training: base grey, swap coloured, red where the swap is behind."""
    blocks = by_half(verdicts)
    heights: list[float] = []
    columns = min(COLUMNS, max(map(len, blocks.values())))
    for found in blocks.values():
        heights += [0.12, *[1.0] * math.ceil(len(found) / columns)]
    ratios = {"height_ratios": heights}
    figure, panels = grid(len(heights), columns, title, size=(2.6, 2.1), gridspec_kw=ratios)
    for axes in panels.flat:
        axes.set_axis_off()
    first = 0
    for half, found in blocks.items():
        figures = summary(found)
        words = f"{half} ({HALVES[half]}): behind at {figures['behind']} points, time x {figures['time']:.2f}"
        heading = panels[first, 0].text(
            0, 0, words, fontsize=12, fontweight="bold", transform=panels[first, 0].transAxes
        )
        heading.set_in_layout(False)
        for place, verdict in enumerate(found):
            line, column = divmod(place, columns)
            panel(panels[first + 1 + line, column], verdict)
        first += 1 + math.ceil(len(found) / columns)
    handles, labels = panels[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), fontsize=10, frameon=False)
    return figure


def panel(axes: Any, verdict: Verdict) -> None:
    """Draw one training: means and range over the seeds, the points that are compared, how much longer it took."""
    training, mean, bad = verdict.training, verdict.mean, any(verdict.mean.behind)
    axes.set_axis_on()
    for runs, colour, label in ((verdict.base, BASE, "base"), (verdict.swap, SWAP, "swap")):
        steps, values = curves(runs)
        axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, values.mean(0), color=colour, linewidth=1.2, label=label)
    places = [share * steps[-1] for share in SHARES]
    for behind, fill, label in ((False, "white", "swap not behind"), (True, BEHIND, "swap behind")):
        chosen = [(x, y) for x, y, is_so in zip(places, mean.swap, mean.behind, strict=True) if is_so == behind]
        style = {"markersize": 6 if behind else 4, "markerfacecolor": fill, "zorder": 5, "label": label}
        axes.plot(*(np.array(chosen).reshape(-1, 2).T), "o", color=BEHIND if behind else SWAP, **style)
    drawn = [line.get_ydata() for line in axes.get_lines()]
    least, largest = (reach(np.concatenate(drawn)) for reach in (np.nanmin, np.nanmax))
    if least > 0 and largest > 10 * least:
        axes.set_yscale("log")
    words = f"{training.name}\n{training.optimizer}, {training.rate}, time x {verdict.time_ratio:.1f}"
    axes.set_title(words, fontsize=8.5, color=BEHIND if bad else "black")
    axes.set_facecolor(TINT if bad else "white")
    axes.tick_params(labelsize=7, which="both")
    for spine in axes.spines.values():
        spine.set(color=BEHIND if bad else "0.7", linewidth=2 if bad else 0.8)


def curves(runs: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return the steps of the curves, and their losses ``[runs, places]``; NaN leaves a gap."""
    values = np.array([[math.nan if loss is None else loss for _, loss in run["curve"]] for run in runs])
    return [step for step, _ in runs[0]["curve"]], values
