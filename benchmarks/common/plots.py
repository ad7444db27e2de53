"""Pictures of runs on one task: loss and accuracy, over steps and over seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common.reports import grid
from benchmarks.common.runs import Record, column, smoothed
from benchmarks.common.tasks import Task


def of_runs(task: Task, records: Mapping[str, Record]) -> Figure:
    """Return the plot of single runs.

    The upper row shows the training loss (faint: each step; full: running average) and the held-out loss (dashed, with
    dots); the lower row the held-out accuracy, or the held-out loss alone for a task without accuracy.
    """
    first = next(iter(records.values()))
    settings = first.header["settings"]
    title = f"{task.name}: seed {settings['seed']}, batch size {settings['batch_size']}"
    figure, panels = _panels(task, title, first.seconds)
    for (upper, lower), key in zip(panels.T, ("step", first.seconds), strict=True):
        for index, (label, record) in enumerate(records.items()):
            style = {"color": f"C{index}", "label": _described(label, record)}
            steps, losses = column(record.steps, key), column(record.steps, "loss")
            upper.plot(steps, losses, color=f"C{index}", alpha=0.2, linewidth=0.8)
            upper.plot(steps, smoothed(losses), **style)
            places = column(record.evaluations, key)
            upper.plot(places, column(record.evaluations, "test_loss"), ".--", color=f"C{index}", alpha=0.7)
            lower.plot(places, column(record.evaluations, task.metric), ".-", **style)
    panels[0][0].legend(fontsize="small")
    return figure


def of_medians(task: Task, records: Mapping[str, Sequence[Record]]) -> Figure:
    """Return the plot of contenders that ran with several seeds.

    Lines are medians of the evaluations, shades reach from the least to the largest; above the averaged training loss,
    below the held-out metric. Runs that did not finish are left out.
    """
    first = next(iter(records.values()))
    title = f"{task.name}: median and range of {len(first)} seeds"
    figure, panels = _panels(task, title, first[0].seconds)
    for (upper, lower), key in zip(panels.T, ("step", first[0].seconds), strict=True):
        for index, (label, runs) in enumerate(records.items()):
            ended = [run.evaluations[1:] for run in runs if run.end == "finished"]
            style: dict[str, Any] = {"color": f"C{index % 10}", "linestyle": ("-", "--")[index // 10]}
            for axes, name in ((upper, "train_loss"), (lower, task.metric)) if ended else ():
                places = np.median([column(lines, key) for lines in ended], axis=0)
                values = np.array([column(lines, name) for lines in ended])
                axes.plot(places, np.median(values, axis=0), label=label, **style)
                axes.fill_between(places, values.min(0), values.max(0), color=style["color"], alpha=0.12)
    panels[0][0].legend(fontsize="small")
    return figure


def _panels(task: Task, title: str, seconds: str) -> tuple[Figure, Any]:
    """Return a figure of losses above and the metric below, over steps and over seconds."""
    figure, panels = grid(2, 2, title, size=(6.5, 4.5), sharex="col", sharey="row")
    upper, lower = panels[:, 0]
    upper.set(yscale="log", ylabel="training loss (dashed: held out)")
    lower.set_ylabel(f"held-out {task.metric.removeprefix('test_')} (dotted: target)")
    if task.scores:
        lower.set_ylim(max(0.0, 1 - 5 * (1 - task.target)), 1.005)
    else:
        lower.set_yscale("log")
    for below, name in zip(panels[1], ("steps", f"{seconds.replace('_', ' ')} of training"), strict=True):
        below.axhline(task.target, color="grey", linewidth=1, linestyle=":")
        below.set_xlabel(name)
    for axes in panels.flat:
        axes.grid(alpha=0.25, which="both")
    return figure, panels


def _described(label: str, record: Record) -> str:
    """Return the legend's entry: the settings in which runs on one task usually differ."""
    settings = record.header["settings"]
    words = [label.partition(":")[0], f"lr {settings['lr']:g}"]
    if settings["momentum"]:
        words.append(f"momentum {settings['momentum']:g}")
    kfac = settings["kfac"]
    words += [f"{name} {kfac[name]}" for name in ("damping", "scaling", "fisher") if name in kfac]
    return ", ".join([*words, *([f"rest {settings['rest']}"] if settings["rest"] else [])])
