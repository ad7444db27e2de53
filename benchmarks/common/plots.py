"""Draws the logs of runs on one task: loss and accuracy, over steps and over seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common.runs import Line, Record, seconds_key
from benchmarks.common.tasks import Task

MEMORY = 0.9  # of the running average of the training loss


def draw(task: Task, records: Mapping[str, Record], path: Path) -> None:
    """Write the plot of all runs to ``path``."""
    figure_of(task, records).savefig(path, dpi=110)


def figure_of(task: Task, records: Mapping[str, Record]) -> Figure:
    """Return the plot of all runs.

    The upper row shows the training loss (faint: each step; full: running average) and the held-out loss (dashed, with
    dots); the lower row the held-out accuracy, or the held-out loss alone for a task without accuracy.
    """
    settings = next(iter(records.values())).header["settings"]
    seconds = seconds_key(next(iter(records.values())))
    columns = {"step": "steps", seconds: f"{seconds.replace('_', ' ')} of training, without evaluation"}
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: works without a display and leaves pyplot's state alone
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for (upper, lower), (key, title) in zip(grid.T, columns.items(), strict=True):
        for index, (label, record) in enumerate(records.items()):
            style = {"color": f"C{index}", "label": describe(label, record)}
            draw_losses(upper, record, key, style)
            lower.plot(*columns_of(record.evaluations, key, task.metric), ".-", **style)
        lower.axhline(task.target, color="grey", linewidth=1, linestyle=":")
        lower.set_xlabel(title)
    name_axes(grid, task)
    figure.suptitle(f"{task.name}: seed {settings['seed']}, batch size {settings['batch_size']}")
    return figure


def draw_medians(task: Task, records: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Write the plot of contenders that ran with several seeds to ``path``.

    Lines are medians of the evaluations, shades reach from the least to the largest; above the averaged training loss
    (as ``train_loss`` in the evaluations), below the held-out metric. Runs that did not finish are left out.
    """
    columns = {"step": "steps", seconds_key(next(iter(records.values()))[0]): "seconds of training, median"}
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 2, sharex="col", sharey="row")
    for (upper, lower), (key, title) in zip(grid.T, columns.items(), strict=True):
        for index, (label, runs) in enumerate(records.items()):
            found = [
                columns_of(run.evaluations[1:], key, "train_loss", task.metric) for run in runs if run.end == "finished"
            ]
            style = {"color": f"C{index % 10}", "label": label, "linestyle": ("-", "--")[index // 10]}
            if found:
                middle, least, largest = (reduce(found, axis=0) for reduce in (np.median, np.min, np.max))
                for axes, row in ((upper, 1), (lower, 2)):
                    axes.plot(middle[0], middle[row], **style)
                    axes.fill_between(middle[0], least[row], largest[row], color=style["color"], alpha=0.12)
        lower.axhline(task.target, color="grey", linewidth=1, linestyle=":")
        lower.set_xlabel(title)
    name_axes(grid, task)
    grid[0][0].set_ylabel("training loss")
    figure.suptitle(f"{task.name}: median and range of {len(next(iter(records.values())))} seeds")
    figure.savefig(path, dpi=110)


def name_axes(grid: Sequence[Sequence[Axes]], task: Task) -> None:
    """Set scales, names and the legend."""
    upper, lower = grid[0][0], grid[1][0]
    upper.set_yscale("log")
    upper.set_ylabel("loss (dashed: held out)")
    lower.set_ylabel(f"held-out {task.metric.removeprefix('test_')} (dotted: target)")
    if task.scores:
        lower.set_ylim(max(0.0, 1 - 5 * (1 - task.target)), 1.005)
    else:
        lower.set_yscale("log")
    for axes in (axes for row in grid for axes in row):
        axes.grid(alpha=0.25, which="both")
    upper.legend(fontsize="small")


def draw_losses(axes: Axes, record: Record, key: str, style: Mapping[str, Any]) -> None:
    """Draw training and held-out loss of one run over ``key``."""
    position, loss = columns_of(record.steps, key, "loss")
    axes.plot(position, loss, color=style["color"], alpha=0.2, linewidth=0.8)
    axes.plot(position, smoothed(loss), **style)
    axes.plot(*columns_of(record.evaluations, key, "test_loss"), ".--", color=style["color"], alpha=0.7)


def columns_of(lines: Sequence[Line], *keys: str) -> tuple[list[float], ...]:
    """Return the values of each of ``keys`` over all lines; null (not finite) as NaN, which leaves a gap."""
    return tuple([math.nan if line[key] is None else line[key] for line in lines] for key in keys)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running average, without the bias of a start at zero; NaNs are left out of it."""
    total = weight = 0.0
    averages = []
    for value in values:
        if math.isfinite(value):
            total, weight = MEMORY * total + value, MEMORY * weight + 1
        averages.append(total / weight if weight else math.nan)
    return averages


def describe(label: str, record: Record) -> str:
    """Return the legend's entry: the settings in which runs on one task usually differ."""
    settings = record.header["settings"]
    words = [label.partition(":")[0], f"lr {settings['lr']:g}"]
    if settings["momentum"]:
        words.append(f"momentum {settings['momentum']:g}")
    kfac = settings["kfac"]
    words += [f"{name} {kfac[name]}" for name in ("damping", "scaling", "fisher") if name in kfac]
    if settings["rest"]:
        words.append(f"rest {settings['rest']}")
    return ", ".join(words)
