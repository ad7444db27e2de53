"""Who is ahead in seconds? K-FAC and a peer, tuned alike, side by side.

``python -m benchmarks.convergence.seconds`` (from the repository root) tunes the peer and K-FAC as
``benchmarks.convergence`` does, then trains them with each seed side by side, a step of each in turn, so that whatever
else the machine does slows all of them down. "shorter" is K-FAC once more, with fewer steps and its schedule as much
shorter. It prints a table and writes ``seconds-TASK.json`` and ``.png`` (``seconds-TASK-SIZE.*`` for batches of another
size) to ``benchmarks/results/convergence/``.

Losses are training losses, running averages (weight of the past 0.9). Held-out data chooses nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common import plots
from benchmarks.common.reports import Command, table, whole_numbers
from benchmarks.common.runs import Record, Trainer, column, smoothed
from benchmarks.common.settings import KFAC, Settings
from benchmarks.common.tasks import TASKS, Task
from benchmarks.convergence.__main__ import LENGTHS, RECIPE, SHORT, TUNING, Results, Row, tune

# The peer on each task: on curves and text the best in seconds in the table of ``benchmarks.convergence``, on digits
# the base class (there Adam and AdamW are at the target sooner).
PEERS = {"digits": "SGD", "curves": "Muon", "text": "Muon"}
CONTENDERS = {"digits": ("KFACSGD",), "curves": ("KFACSGD", "KFAC"), "text": ("KFACSGD",)}
SHORTER = 0.8  # of the peer's steps
EVALUATIONS = 25  # of a run, about
# In K-FAC's recipe for text statistics come from a quarter of the batch; of large ones 16 sequences are enough.
ENOUGH: dict[tuple[str, int | None], dict[str, float]] = {("text", 256): {"factor_batch_fraction": 1 / 16}}


def side_by_side(task: Task, contest: Mapping[str, Settings]) -> dict[str, Record]:
    """Train every contender, a step of each in turn; return their records by label."""
    trainers = {label: Trainer(task, settings) for label, settings in contest.items()}
    records = {label: Record(trainer.header()) for label, trainer in trainers.items()}
    first = next(iter(contest.values()))
    longest = max(settings.steps for settings in contest.values())
    for _ in tqdm(range(longest), desc=f"{task.name} seed {first.seed}", unit="step", leave=False):
        for label, trainer in trainers.items():
            if not trainer.ended:
                records[label].follow(trainer)
            records[label].end = trainer.ended
    return records


def judged(task: Task, peer: Record, own: Record) -> dict[str, Any]:
    """Return a contender's figures; times are shares of the peer's seconds for all of its steps."""
    losses, seconds = smoothed(column(own.steps, "loss")), column(own.steps, own.seconds)
    of_peer = smoothed(column(peer.steps, "loss"))[-1], column(peer.steps, peer.seconds)[-1]
    # Some batches are easier than others: what counts is from when on the loss stays as low as the peer's at its end.
    there = max((i + 1 for i, loss in enumerate(losses) if not loss <= of_peer[0]), default=0)
    in_time = [loss for loss, time in zip(losses, seconds, strict=True) if time <= of_peer[1]]
    reached, last = own.first_reached(task), own.evaluations[-1]
    return {
        "steps": len(own.steps),
        "loss": losses[-1],
        "held out": last["test_loss"],
        "time": seconds[-1] / of_peer[1],
        "peer's loss after": None if own is peer or there == len(losses) else seconds[there] / of_peer[1],
        "loss at peer's time": in_time[-1] if in_time else None,
        "steps to target": reached["step"] if reached else None,
        "target after": reached[own.seconds] / of_peer[1] if reached else None,
    }


def medians(task: Task, contests: Sequence[Mapping[str, Record]]) -> list[dict[str, Any]]:
    """Return the table: a row for each contender and seed, below them the medians."""
    peer = next(iter(contests[0]))
    found = {label: [judged(task, records[peer], records[label]) for records in contests] for label in contests[0]}
    seeds = [records[peer].header["settings"]["seed"] for records in contests]
    rows = [
        {"contender": label, "seed": str(seed), **figures}
        for label, of_seeds in found.items()
        for seed, figures in zip(seeds, of_seeds, strict=True)
    ]
    for label, of_seeds in found.items():
        columns = {name: [math.inf if each[name] is None else each[name] for each in of_seeds] for name in of_seeds[0]}
        middle = {name: float(np.median(values)) for name, values in columns.items()}
        shown = {name: value if math.isfinite(value) else None for name, value in middle.items()}
        rows.append({"contender": label, "seed": "median", **shown})
    return rows


def measure(results: Results, length: Mapping[str, Any], draws: int, seeds: Sequence[int]) -> str:
    """Tune the contenders of one task, train them side by side, write the files; return the table."""
    task = results.task
    names = (PEERS[task.name], *CONTENDERS[task.name])
    enough = ENOUGH.get((task.name, length.get("batch_size")), {})
    rows = {name: Row(name, RECIPE, kfac=enough) if name in KFAC else Row(name) for name in names}
    given = {name: tune(results, row, draws, length)[0] for name, row in rows.items()}
    steps = rows[names[0]].settings(task, length).steps
    runs = [(name, name, steps) for name in names]
    runs += [(f"{name}, shorter", name, max(1, round(SHORTER * steps))) for name in CONTENDERS[task.name]]
    more = {name: value for name, value in length.items() if name != "epochs"}
    more["eval_every"] = max(1, steps // EVALUATIONS)
    contests = []
    for seed in seeds:
        contest = {
            label: rows[name].settings(task, {**more, "steps": count, "seed": seed, **given[name]})
            for label, name, count in runs
        }
        contests.append(side_by_side(task, contest))
    size = contests[0][names[0]].header["settings"]["batch_size"]
    title = f"{task.name}, batches of {size}: times are shares of {names[0]}'s; {task.goal}"
    shown = table(title, medians(task, contests))
    for label, record in ((label, record) for records in contests for label, record in records.items()):
        run = {"settings": record.header["settings"], "data_checksum": task.digest, "evaluations": record.evaluations}
        results.store.add({"of": label, "draw": None, **run, "end": record.end})
    results.write(seeds=list(seeds), draws=draws, chosen=given, table=shown.splitlines())
    by_label = {label: [records[label] for records in contests] for label in contests[0]}
    results.output.picture(results.stem, plots.of_medians(task, by_label))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("convergence.seconds", __doc__)
    add = command.add_argument
    add("--task", action="append", choices=tuple(TASKS), help="may be repeated (default: all)")
    add("--batch-size", type=int, metavar="N", help="examples per step (default: by task)")
    add("--steps", type=int, metavar="N", help="of a run (default: as in benchmarks.convergence)")
    add("--draws", type=int, default=4, metavar="N", help="settings tried for each optimizer (default: 4)")
    add("--seeds", type=whole_numbers, default=[0, 1, 2], metavar="N,...", help="of the reported runs (default: 0,1,2)")
    options, output = command.start(arguments, "a handful of steps")
    if options.draws < 1:
        command.error(f"--draws: {options.draws} is not allowed, must be at least 1")
    for name in options.task or TASKS:
        length: dict[str, Any] = dict(SHORT if options.smoke else LENGTHS[name])
        if options.steps:
            length = {"steps": options.steps, "eval_every": options.steps}
        stem = f"seconds-{name}"
        if options.batch_size:
            length["batch_size"], stem = options.batch_size, f"{stem}-{options.batch_size}"
        results = Results(output, TASKS[name](), stem, tuning=TUNING)
        print(measure(results, length, options.draws, options.seeds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
