"""The part ``target``: steps and seconds to a held-out loss on the task ``text``.

Settings are those that ``benchmarks.convergence`` starts from; the swap has those of AdamW with the class name changed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import plots
from benchmarks.common.runs import Record, train
from benchmarks.common.settings import Settings
from benchmarks.common.tasks import TASKS, Task
from benchmarks.convergence.__main__ import LENGTHS, SHORT, Row, obstacle, rows_of, swapped, table
from benchmarks.gpu.parts import LeftOut

LOSS = 2.25  # held out; AdamW reached it on a CPU at step 280 of the 400
CONTENDERS = ("AdamW", "KFACAdamW:swap", "Muon", "KFACSGD:tuned", "SOAP")
SEEDS = 3
WARM = {"steps": 2, "eval_every": 2}  # of a run that loads the device's libraries


Run = tuple[str, Record]  # of an optimizer, by the label of its row


@cache
def text_task() -> Task:
    """Return the task ``text`` with a loss for a target."""
    return replace(TASKS["text"](), scores={}, target=LOSS)


def settings_of(row: Row, task: Task, **given: Any) -> Settings:
    """Return the settings of a row; a swap has those of the optimizer that it replaces."""
    if row.settings_of is None:
        return row.settings(task, given)
    return row.settings(task, {**given, **swapped(Row(row.settings_of).settings(task, given))})


def run(task: Task, row: Row, options: Namespace, seed: int) -> Run:
    """Train, after a few steps off the clock.

    Raises:
        LeftOut: If the optimizer is not installed.
    """
    if reason := obstacle(task, row):
        raise LeftOut(reason)
    length = SHORT if options.smoke else LENGTHS["text"]
    place = {"device": options.device, "seed": seed}
    train(task, settings_of(row, task, **place, **WARM), row.label, quiet=True)
    _, record = train(task, settings_of(row, task, **place, **length), f"{row.label} seed {seed}")
    return row.label, record


class Target:
    """Time to a target loss."""

    def measurements(self, options: Namespace) -> dict[str, Callable[[], Run]]:
        """A run of each optimizer with the first seed, then with the others."""
        task, rows = text_task(), [rows_of(word)[0] for word in CONTENDERS]
        seeds = range(options.seed, options.seed + (1 if options.smoke else SEEDS))
        return {f"{row.label} seed {seed}": partial(run, task, row, options, seed) for seed in seeds for row in rows}

    def content(self, results: Sequence[Run]) -> dict[str, Any]:
        """Settings and evaluations of all runs."""
        runs = [
            {"of": label, "settings": run.header["settings"], "end": run.end, "evaluations": run.evaluations}
            for label, run in results
        ]
        return {"target": text_task().goal, "runs": runs}

    def text(self, results: Sequence[Run]) -> str:
        """Medians over the seeds."""
        seconds = results[0][1].seconds.replace("_", " ")
        return f"{table(text_task(), by_label(results))}; seconds: {seconds} of training\n"

    def draw(self, results: Sequence[Run]) -> Figure:
        """Losses over steps and over seconds."""
        return plots.of_medians(text_task(), by_label(results))


def by_label(results: Sequence[Run]) -> dict[str, list[Record]]:
    """Return the records of each optimizer."""
    found: dict[str, list[Record]] = {}
    for label, run in results:
        found.setdefault(label, []).append(run)
    return found
