"""Steps and seconds to a target: K-FAC against other optimizers, all tuned with the same budget.

``python -m benchmarks.convergence`` (from the repository root) tunes every optimizer on every task, trains the best
setting with each seed, prints a table and writes ``TASK.json`` and ``.png`` to
``benchmarks/results/convergence/``.

    tuned rows   ``--draws`` settings for each optimizer: draw 0 is the start (``benchmarks.common.settings``; for K-FAC
                 the recipe "practical"), every further one multiplies lr, rest_lr and what ``TUNED`` names by random
                 factors, log-uniform in [1/4, 4]. A draw trains with seed 100, which is never reported, for
                 ``TUNING_STEPS``; the lowest training loss at its end wins.
    swap rows    K-FAC by its class name alone: the tuned settings of the class it is built on, nothing else changed,
                 not even ``loss_average``; the K-FAC options of the row are those of the recipe "swap".
    default rows the same, but lr tuned for K-FAC itself, with as many draws, from where the base class starts.

Training losses are running averages (weight of the past 0.9). Held-out data chooses nothing. A run is written as soon
as it ends; started again, the command repeats no run whose settings and data are those of one in the result file,
whatever the commit (each run names its own). Optimizers whose package is missing are left out with a note.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.common import plots
from benchmarks.common.optimizers import OPTIMIZERS
from benchmarks.common.reports import Command, Output, aligned, whole_numbers
from benchmarks.common.runs import Line, Record, Store, Trainer, identity, train
from benchmarks.common.settings import KFAC, LEARNING_RATES, Settings, nearest, resolve
from benchmarks.common.tasks import TASKS, Task

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
TUNING_STEPS = {"digits": 55, "curves": 50, "text": 400}  # of a draw; on text 80 had picked rates too high for 400
FACTOR = 4.0  # a drawn setting is its start times FACTOR**u, u uniform in [-1, 1]
STARTS: dict[tuple[str, str], dict[str, float]] = {  # where not those of benchmarks.common.settings
    **{(task, "AdamW"): {"weight_decay": 0.1} for task in LENGTHS},
    ("curves", "Muon"): {"rest_lr": 0.01},
    ("text", "Muon"): {"lr": 0.055, "rest_lr": 0.03},  # of a screening with seed 100, as KFACSGD's in "practical"
}
TUNED: dict[str, tuple[str, ...]] = {  # beside lr and, where a second optimizer has the rest, rest_lr
    "AdamW": ("weight_decay",),
    "KFACPyTorch": ("options.damping",),
    "KFACJax": ("options.initial_damping",),
    **dict.fromkeys(KFAC, ("kfac.damping",)),
}
TUNING = {"seed": TUNING_SEED, "steps": TUNING_STEPS, "factor": FACTOR, "more": TUNED}  # as files name it
FIXED_STEPS = (0.25, 0.5, 0.75, 1.0)  # of a run's length, where the table lists the losses


# Settings ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the table: an optimizer that is tuned, or one that takes over the settings tuned for another."""

    name: str  # Name of the optimizer
    recipe: str | None = None  # Recipe of the K-FAC options
    settings_of: str | None = None  # The optimizer whose tuned settings it takes; None: it is tuned itself
    kfac: Mapping[str, Any] = field(default_factory=dict)  # K-FAC options in place of the recipe's

    @property
    def label(self) -> str:
        """Name of the row."""
        if self.settings_of:
            return f"{self.name} for {self.settings_of}"
        return f"{self.name}, defaults" if self.recipe == SWAP else self.name

    def settings(self, task: Task, given: Mapping[str, Any]) -> Settings:
        """Return its settings on ``task``."""
        start = {"lr": LEARNING_RATES[task.name][KFAC[self.name]]} if self.recipe == SWAP else {}
        given = {**start, **STARTS.get((task.name, self.name), {}), **given}
        given["kfac"] = {**self.kfac, **given.get("kfac", {})}
        return resolve(task, self.name, recipe=self.recipe, given=given)


def rows_of(word: str) -> list[Row]:
    """Return the rows of ``NAME``, for K-FAC swap, defaults and tuned, or of ``NAME:KIND`` that one alone.

    Raises:
        ValueError: If there is no such optimizer or row.
    """
    name, colon, kind = word.partition(":")
    rows = {"tuned": Row(nearest("optimizer", name, OPTIMIZERS))}
    if name in KFAC:
        rows = {"swap": Row(name, SWAP, KFAC[name]), "defaults": Row(name, SWAP), "tuned": Row(name, RECIPE)}
    return [rows[nearest("row", kind, rows)]] if colon else list(rows.values())


def factors(start: Settings, draw: int) -> dict[str, float]:
    """Return what draw number ``draw`` multiplies each tuned setting of ``start`` by; draw 0 is the start itself."""
    rates = (*(("lr",) if start.lr else ()), *(("rest_lr",) if start.rest else ()))
    more = TUNED.get(start.optimizer, ())
    settings = (*rates, *(name for name in more if name != "kfac.damping" or "damping" in start.kfac))
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
    return {"lr": base.lr, "weight_decay": base.weight_decay, **momentum, "kfac": {"loss_average": "batch"}}


# Runs ----------------------------------------------------------------------------------------------------------------


class Results:
    """The runs of one task, kept in a file from which they are found again.

    Args:
        output: The folder of the file.
        task: What is trained.
        stem: The file's name without its ending.
        head: Entries of the file beside the runs.
    """

    def __init__(self, output: Output, task: Task, stem: str, **head: Any) -> None:
        self.output, self.task, self.stem = output, task, stem
        self.head = {"target": task.target, **head}
        self.store = Store([output.folder / f"{stem}.json"])

    def write(self, **more: Any) -> None:
        """Replace the file."""
        self.output.save_runs(self.stem, {**self.head, **more}, self.store.runs.values())

    def run(self, label: str, settings: Settings, **purpose: Any) -> Line:
        """Return the run with these settings: the one there is, else train it now.

        Args:
            label: Text before the progress bar.
            settings: The settings of the run.
            purpose: Entries that say what the run is for: ``of`` a row, as its ``draw`` (None: a reported run).
        """
        if found := self.store.find(identity(settings, self.task)):
            return found
        _, record = train(self.task, settings, f"{self.stem} {label}")
        own = {"settings": asdict(settings), "data_checksum": self.task.digest}
        run = {**purpose, **own, "end": record.end, "evaluations": record.evaluations}
        self.store.add({**run, "commit": self.output.head["commit"]})
        self.write()
        return run


def final_loss(run: Line) -> float:
    """Return the training loss that a draw is judged by; infinite where it diverged."""
    loss = run["evaluations"][-1]["train_loss"]
    return math.inf if run["end"] != "finished" or loss is None else loss


def tune(results: Results, row: Row, draws: int, length: Mapping[str, int]) -> tuple[dict[str, Any], Settings]:
    """Train every draw of ``row``, in batches of the size in ``length`` if that gives one.

    Returns:
        What the best was given, and all its settings.
    """
    start = row.settings(results.task, length)
    steps = min(TUNING_STEPS[start.task], start.steps)
    more = {name: value for name, value in length.items() if name != "epochs"}
    shared = {**more, "steps": steps, "eval_every": start.eval_every, "seed": TUNING_SEED}
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
    reached = [record.first_reached(task) for record in records]
    key = records[0].seconds
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


def lines_of(task: Task, records: Mapping[str, Sequence[Record]], places: Sequence[object]) -> list[str]:
    """Return the lines of the table, medians over the seeds with the range; the head calls ``FIXED_STEPS`` places."""
    losses = [f"loss at {place}" for place in places]
    heads = ["optimizer", "ended", "steps", "seconds", *losses, "held out", "accuracy", "s/step"]
    return aligned([heads, *(cells(task, label, found) for label, found in records.items())])


def table(task: Task, records: Mapping[str, Sequence[Record]]) -> str:
    """Return the table, and what it is about."""
    finished = [record for found in records.values() for record in found if record.end == "finished"]
    places = [nearest_evaluation(finished[0], share)["step"] if finished else "-" for share in FIXED_STEPS]
    note = f"{task.name}, {task.goal}; loss: training, running average"
    return "\n".join([*lines_of(task, records, places), note])


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
    results.output.picture(task.name, plots.of_medians(task, records))
    print("\n".join([text, *notes, f"written: {results.output.folder / task.name}.json, .png"]), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("convergence", __doc__)
    add = command.add_argument
    add("--task", action="append", choices=tuple(TASKS), help="may be repeated (default: all)")
    everything = f"{', '.join(CONTENDERS)}; if installed: {', '.join(EXTRAS)}"
    kinds = "NAME:swap, NAME:defaults or NAME:tuned is one row alone"
    which = f"which to compare; of a K-FAC optimizer {kinds} (default: {everything})"
    add("--optimizer", nargs="+", metavar="NAME", help=which)
    add("--draws", type=int, default=4, metavar="N", help="settings tried for each optimizer (default: 4)")
    add("--seeds", type=whole_numbers, default=[0, 1, 2], metavar="N,...", help="of the reported runs (default: 0,1,2)")
    options, output = command.start(arguments, "a handful of steps")
    try:
        rows = [row for word in options.optimizer or (*CONTENDERS, *EXTRAS) for row in rows_of(word)]
        if options.draws < 1:
            raise ValueError(f"--draws: {options.draws} is not allowed, must be at least 1")
    except ValueError as error:
        command.error(str(error))
    for name in options.task or TASKS:
        measure(Results(output, TASKS[name](), name, tuning=TUNING), rows, options.draws, options.seeds, options.smoke)
    return 0


if __name__ == "__main__":
    sys.exit(main())
