"""Steps and seconds to a target: K-FAC against other optimizers, all tuned with the same budget.

``python -m benchmarks.convergence`` (from the repository root) tunes every optimizer on every task, trains the best
setting with each seed, prints a table and writes ``convergence-TASK.json`` and ``.png``.

    tuned rows   ``--draws`` settings for each optimizer: draw 0 is the start (benchmarks.settings, for K-FAC the recipe
                 "practical"), every further one multiplies lr, rest_lr and what ``TUNED`` names by random factors of
                 their own, log-uniform in [1/4, 4]. A draw trains with seed 100, which is never reported, for
                 ``TUNING_STEPS``; the lowest training loss at its end wins.
    swap rows    K-FAC by its class name alone: the tuned settings of the class it is built on, nothing else changed,
                 not even ``loss_average``; the K-FAC options of the row are those of the recipe "swap".

Training losses are running averages (weight of the past 0.9). Held-out data chooses nothing. A run is written as soon
as it ends; started again, the command repeats no run whose settings and data are those of one in the result file,
whatever the commit (each run names its own). Optimizers whose package is missing are left out with a note.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import plots, summary
from benchmarks.common.optimizers import OPTIMIZERS, is_kfac
from benchmarks.common.runs import Line, Record, Trainer, facts, finite, seconds_key
from benchmarks.common.settings import Settings, differences, nearest, resolve
from benchmarks.common.tasks import TASKS, Task

RESULTS = Path("benchmarks/results")
SMOKE = Path("runs/smoke")

LENGTHS: dict[str, dict[str, int]] = {
    "digits": {"epochs": 5, "eval_every": 11},
    "curves": {"steps": 300, "eval_every": 10},
    "text": {"steps": 400, "eval_every": 20},
}
SHORT: dict[str, int] = {"steps": 4, "eval_every": 2}  # of --smoke
CONTENDERS = ("SGD", "Adam", "AdamW", "Lamb", "Muon", "KFACSGD", "KFACAdam", "KFACLAMB")
EXTRAS = ("SOAP", "Shampoo", "KFACPyTorch", "KFACJax")
RECIPE = "practical"  # of the tuned K-FAC rows
SWAP = "swap"

TUNING_SEED = 100
TUNING_STEPS = {"digits": 55, "curves": 50, "text": 80}  # of a draw
FACTOR = 4.0  # a drawn setting is its start times FACTOR**u, u uniform in [-1, 1]
STARTS: dict[tuple[str, str], dict[str, float]] = {  # where not those of benchmarks.settings
    **{(task, "AdamW"): {"weight_decay": 0.1} for task in LENGTHS},
    ("curves", "Muon"): {"rest_lr": 0.01},
    ("text", "Muon"): {"lr": 0.055, "rest_lr": 0.03},  # of a screening with seed 100, as KFACSGD's in "practical"
}
TUNED: dict[str, tuple[str, ...]] = {  # beside lr and, where a second optimizer has the rest, rest_lr
    "AdamW": ("weight_decay",),
    "KFACPyTorch": ("options.damping",),
    "KFACJax": ("options.initial_damping",),
    **{name: ("kfac.damping",) for name in ("KFACSGD", "KFACAdam", "KFACLAMB")},
}
FIXED_STEPS = (0.25, 0.5, 0.75, 1.0)  # of a run's length, where the table lists the losses


# Settings ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the table: an optimizer that is tuned, or one that takes over the settings tuned for another.

    Attributes:
        name: Of the optimizer.
        recipe: For K-FAC.
        settings_of: The optimizer whose tuned settings it takes; None: it is tuned itself.
    """

    name: str
    recipe: str | None = None
    settings_of: str | None = None

    @property
    def label(self) -> str:
        """Name of the row."""
        return f"{self.name} for {self.settings_of}" if self.settings_of else self.name

    def settings(self, task: Task, given: Mapping[str, Any]) -> Settings:
        """Return its settings on ``task``."""
        given = {**STARTS.get((task.name, self.name), {}), **given}
        return resolve(task, self.name, is_kfac=is_kfac(self.name), recipe=self.recipe, given=given)


def rows_of(word: str) -> list[Row]:
    """Return the rows of ``NAME`` (for K-FAC swap and tuned), or of ``NAME:swap`` or ``NAME:tuned`` that alone.

    Raises:
        ValueError: If there is no such optimizer or row.
    """
    name, colon, kind = word.partition(":")
    rows = {"tuned": Row(nearest("optimizer", name, OPTIMIZERS))}
    if is_kfac(name):
        rows = {"swap": Row(name, SWAP, OPTIMIZERS[name].base), "tuned": Row(name, RECIPE)}
    return [rows[nearest("row", kind, rows)]] if colon else list(rows.values())


def factors(start: Settings, draw: int) -> dict[str, float]:
    """Return what draw number ``draw`` multiplies each tuned setting of ``start`` by; draw 0 is the start itself."""
    settings = ("lr", *(("rest_lr",) if start.rest else ()), *TUNED.get(start.optimizer, ()))
    if draw == 0:
        return dict.fromkeys(settings, 1.0)
    source = random.Random(f"{start.task} {start.optimizer} {draw}")
    return {setting: FACTOR ** source.uniform(-1, 1) for setting in settings}


def drawn(start: Settings, draw: int) -> dict[str, Any]:
    """Return the tuned settings of draw number ``draw``, three digits each, in the form that ``resolve`` takes."""
    given: dict[str, Any] = {}
    for setting, factor in factors(start, draw).items():
        group, dot, name = setting.rpartition(".")
        values, target = (getattr(start, group), given.setdefault(group, {})) if dot else (asdict(start), given)
        target[name] = float(f"{values[name] * factor:.3g}")
    return given


def swapped(base: Settings) -> dict[str, Any]:
    """Return the settings of a user who tuned ``base`` and then replaced the class name."""
    momentum = {} if base.momentum is None else {"momentum": base.momentum}
    return {"lr": base.lr, **momentum, "kfac": {"loss_average": "batch"}}


# Runs ----------------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """The runs of one task, kept in a file.

    Attributes:
        path: Of the file.
        task: What is trained.
        about: Facts at the head of the file.
        runs: Finished runs; ``of`` and ``draw`` say what each is for.
    """

    path: Path
    task: Task
    about: Line
    runs: list[Line] = field(default_factory=list)

    def load(self) -> None:
        """Take over the runs of an earlier start, if there are any."""
        if self.path.exists():
            self.runs = json.loads(self.path.read_text())["runs"]

    def write(self, **more: Any) -> None:
        """Replace the file at once."""
        half = self.path.with_suffix(".json.tmp")
        half.write_text(json.dumps({**self.about, **more, "runs": self.runs}, indent=1, allow_nan=False) + "\n")
        os.replace(half, self.path)

    def run(self, label: str, settings: Settings, **purpose: Any) -> Line:
        """Return the run with these settings: the one there is, else train it now.

        Args:
            label: Of the progress bar.
            settings: Of the run.
            purpose: Entries that say what the run is for.
        """
        wanted = {**asdict(settings), "data_checksum": self.task.digest}
        for run in self.runs:
            if not differences({**run["settings"], "data_checksum": run["data_checksum"]}, wanted):
                return run
        record = trained(self.task, settings, label)
        ends = {"end": record.end, "evaluations": record.evaluations}
        run = {**purpose, "settings": asdict(settings), "data_checksum": self.task.digest, **ends}
        self.runs.append({**run, "commit": self.about["commit"]})
        self.write()
        return self.runs[-1]


def trained(task: Task, settings: Settings, label: str) -> Record:
    """Train to the end; return the record, in which every evaluation has the averaged training loss as well."""
    trainer = Trainer(task, settings)
    record = Record(trainer.header())
    try:
        for line in tqdm(trainer.lines(), desc=f"{task.name} {label}", unit="line", mininterval=5, leave=False):
            record.add(line)
            if line["kind"] == "evaluation":
                losses = [math.nan if step["loss"] is None else step["loss"] for step in record.steps]
                line["train_loss"] = finite(plots.smoothed(losses)[-1]) if losses else None
        record.end = trainer.ended
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # as Shampoo ends when it diverges
        record.end = f"failed: {error}"
    return record


def final_loss(run: Line) -> float:
    """Return the training loss that a draw is judged by; infinite where it diverged."""
    loss = run["evaluations"][-1]["train_loss"]
    return math.inf if run["end"] != "finished" or loss is None else loss


def tune(results: Results, row: Row, draws: int, length: Mapping[str, int]) -> tuple[dict[str, Any], Settings]:
    """Train every draw of ``row``; return what the best was given, and all its settings."""
    start = row.settings(results.task, length)
    steps = min(TUNING_STEPS[start.task], start.steps)
    shared = {"steps": steps, "eval_every": start.eval_every, "seed": TUNING_SEED}
    losses = {}
    for draw in range(draws):
        settings = row.settings(results.task, {**shared, **drawn(start, draw)})
        losses[draw] = final_loss(results.run(f"{row.label} draw {draw}", settings, of=row.label, draw=draw))
    given = drawn(start, min(losses, key=losses.__getitem__))
    return given, row.settings(results.task, given)


def chosen(results: Results, row: Row, draws: int, length: Mapping[str, int]) -> dict[str, Any]:
    """Return what ``row`` is given in its reported runs, beside seed and length."""
    if row.settings_of is None:
        return tune(results, row, draws, length)[0]
    return swapped(tune(results, Row(row.settings_of), draws, length)[1])


def obstacle(task: Task, row: Row) -> str | None:
    """Say why ``row`` can't run on ``task``; None if it can."""
    try:
        Trainer(task, row.settings(task, {"steps": 1}))
    except ValueError as error:
        return str(error)
    return None


# Tables and plots ----------------------------------------------------------------------------------------------------


def record_of(run: Line) -> Record:
    """Return a run of the file in the form that tables and plots take."""
    return Record({"settings": run["settings"]}, evaluations=run["evaluations"], end=run["end"])


def middle(values: Sequence[float | None]) -> str:
    """Return "median (least - largest)"; a value that is missing counts as infinite and is shown as "-"."""
    ordered = sorted(math.inf if value is None else value for value in values)
    shown = ["-" if math.isinf(value) else f"{value:.4g}" for value in (statistics.median(ordered), *ordered)]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} ({shown[1]} - {shown[-1]})"


def nearest_evaluation(record: Record, share: float) -> Line:
    """Return the evaluation nearest to ``share`` of the run's length."""
    step = share * record.header["settings"]["steps"]
    return min(record.evaluations, key=lambda line: abs(line["step"] - step))


def at(record: Record, share: float, key: str) -> float | None:
    """Return a figure of the evaluation nearest to ``share`` of the run's length; None after a divergence."""
    return None if record.end != "finished" else nearest_evaluation(record, share)[key]


def cells(task: Task, label: str, records: Sequence[Record]) -> list[str]:
    """Return the row of the table for all seeds of one contender."""
    reached = [summary.first_reached(task, record) for record in records]
    key = seconds_key(records[0])
    last = [record.evaluations[-1] for record in records]
    return [
        label,
        f"{sum(record.end == 'finished' for record in records)}/{len(records)}",
        *(middle([line[name] if line else None for line in reached]) for name in ("step", key)),
        *(middle([at(record, share, "train_loss") for record in records]) for share in FIXED_STEPS),
        middle([at(record, 1.0, "test_loss") for record in records]),
        middle([at(record, 1.0, "test_accuracy") for record in records]) if "accuracy" in task.scores else "-",
        middle([line[key] / line["step"] if line["step"] else None for line in last]),
    ]


def table(task: Task, records: Mapping[str, Sequence[Record]]) -> str:
    """Return the table: medians over the seeds, with the range."""
    finished = [record for found in records.values() for record in found if record.end == "finished"]
    places = [nearest_evaluation(finished[0], share)["step"] if finished else "-" for share in FIXED_STEPS]
    losses = [f"loss at {place}" for place in places]
    heads = ["optimizer", "ended", "steps", "seconds", *losses, "held out", "accuracy", "s/step"]
    rows = [heads, *(cells(task, label, found) for label, found in records.items())]
    return "\n".join([*summary.aligned(rows), f"{task.name}, {summary.goal(task)}; loss: training, running average"])


# The command ---------------------------------------------------------------------------------------------------------


def measure(results: Results, rows: Sequence[Row], draws: int, seeds: Sequence[int], smoke: bool) -> None:
    """Tune and train every contender on one task; print the table, write file and plot."""
    task, length = results.task, SHORT if smoke else LENGTHS[results.task.name]
    records: dict[str, list[Record]] = {}
    skipped: dict[str, str] = {}
    choices: dict[str, dict[str, Any]] = {}
    for row in rows:
        if reason := obstacle(task, row):
            skipped[row.label] = reason
            continue
        choices[row.label] = given = chosen(results, row, draws, length)
        every = [row.settings(task, {**length, "seed": seed, **given}) for seed in seeds]
        runs = [results.run(f"{row.label} seed {each.seed}", each, of=row.label, draw=None) for each in every]
        records[row.label] = [record_of(run) for run in runs]
    text = table(task, records)
    notes = [f"{label} left out: {reason}" for label, reason in skipped.items()]
    results.write(seeds=list(seeds), draws=draws, chosen=choices, skipped=skipped, table=text.splitlines())
    plots.draw_medians(task, records, results.path.with_suffix(".png"))
    print("\n".join([text, *notes, f"written: {results.path} and .png"]), flush=True)


def about(words: Sequence[str]) -> Line:
    """Return the head of a result file: versions, machine, and how the settings were found."""
    importlib.import_module("kfac_optim")  # its version is one of the facts
    tuning = {
        "seed": TUNING_SEED,
        "steps": TUNING_STEPS,
        "factor": FACTOR,
        "settings": ("lr", "rest_lr"),
        "more": TUNED,
    }
    return {"command": " ".join(["python -m benchmarks.convergence", *words]), **facts(), "tuning": tuning}


def whole(text: str) -> list[int]:
    """Parse seeds."""
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Callable[..., Any] = command.add_argument
    add("--task", action="append", choices=tuple(TASKS), help="may be repeated (default: all)")
    everything = f"{', '.join(CONTENDERS)}; if installed: {', '.join(EXTRAS)}"
    which = f"which to compare; of a K-FAC optimizer NAME:swap or NAME:tuned is one row alone (default: {everything})"
    add("--optimizer", nargs="+", metavar="NAME", help=which)
    add("--draws", type=int, default=4, metavar="N", help="settings tried for each optimizer (default: 4)")
    add("--seeds", type=whole, default=[0, 1, 2], metavar="N,...", help="of the reported runs (default: 0,1,2)")
    add("--smoke", action="store_true", help="a handful of steps, to see that everything runs; no result")
    add("--out", type=Path, metavar="FOLDER", help=f"of the result files (default: {RESULTS}; with --smoke: {SMOKE})")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = parser()
    options = command.parse_args(arguments)
    folder = options.out or (SMOKE if options.smoke else RESULTS)
    try:
        rows = [row for word in options.optimizer or (*CONTENDERS, *EXTRAS) for row in rows_of(word)]
        if options.draws < 1:
            raise ValueError(f"--draws: {options.draws} is not allowed, must be at least 1")
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        command.error(str(error))
    head = about(sys.argv[1:] if arguments is None else list(arguments))
    for name in options.task or TASKS:
        task = TASKS[name]()
        results = Results(folder / f"convergence-{name}.json", task, {**head, "target": task.target})
        results.load()
        measure(results, rows, options.draws, options.seeds, options.smoke)
    return 0


if __name__ == "__main__":
    sys.exit(main())
