"""A grid of training runs beside the paper's figures: trains what is missing, tabulates, judges and draws it.

A study has rows (methods), columns (batch sizes, models, ...) and figures (accuracy, seconds, ...); every cell is the
mean over the seeds. Finished runs are kept in the result files and found again by their settings, whichever study asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing
from torch import Tensor, nn

from benchmarks.common.reports import Output, aligned, grid
from benchmarks.common.runs import Line, Store, identity, train
from benchmarks.common.runs import column as values_of
from benchmarks.common.settings import Settings
from benchmarks.common.tasks import Task

# Runs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run."""

    task: Task  # What is trained
    settings: Settings  # How it is trained
    model: str  # Name of the model, which tells those of one task apart
    after: Run | None = None  # The run whose final weights it starts from

    @property
    def identity(self) -> Line:
        """What must agree for a finished run to stand for this one: settings, model, data and the run before."""
        before = {"after": self.after.identity} if self.after else {}
        return identity(self.settings, self.task, model=self.model, **before)

    @property
    def key(self) -> str:
        """The identity as text."""
        return Store.key(self.identity)


def loaded(make: Callable[[], nn.Module], weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a model with given weights."""
    model = make()
    model.load_state_dict(weights)
    return model


class Results:
    """Finished runs: those of the result files in a folder, and new ones.

    Args:
        output: The folder.
        again: Repeat the runs that the files hold.
        quiet: No progress bar.
    """

    def __init__(self, output: Output, *, again: bool = False, quiet: bool = False) -> None:
        self.output, self.again, self.quiet = output, again, quiet
        self.store = Store(() if again else sorted(output.folder.glob("*.json")))
        self._weights: dict[str, dict[str, Tensor]] = {}

    def has(self, run: Run) -> bool:
        """Return whether a run is finished."""
        return self.store.find(run.identity) is not None

    def get(self, run: Run) -> Line:
        """Return the result of a finished run."""
        found = self.store.find(run.identity)
        assert found is not None
        return found

    def complete(self, name: str, runs: Iterable[Run], save: Callable[[], object]) -> None:
        """Train those of ``runs`` that are not finished; call ``save`` after each."""
        missing = {run.key: run for run in runs if not self.has(run)}
        for number, run in enumerate(missing.values(), 1):
            self.train(run, f"{name} {number}/{len(missing)}")
            save()

    def train(self, run: Run, label: str) -> Line:
        """Train to the end and keep the result: its settings, versions and machine, seconds and evaluations."""
        task, settings = run.task, run.settings
        if run.after:
            task = replace(task, model=partial(loaded, task.model, self.weights(run.after)))
        words = f"{label}: {settings.optimizer}, {run.model}, seed {settings.seed}"
        trainer, record = train(task, settings, words, quiet=self.quiet)
        facts = {name: self.output.head[name] for name in ("versions", "commit", "machine")}
        result: Line = {"run": run.identity, **facts, "end": record.end, **trainer.position()}
        if run.after:
            before = self.get(run.after)
            result["before"] = {name: before[name] for name in ("step", "cpu_seconds", "wall_seconds", "loss")}
        result |= {"loss": record.recent_loss, "evaluations": record.evaluations}
        self.store.add(result)
        self._weights[run.key] = trainer.model.state_dict()
        return result

    def weights(self, run: Run) -> dict[str, Tensor]:
        """Return the final weights of a run; they are in no file, so that a run of an earlier command is repeated."""
        if run.key not in self._weights:
            self.train(run, "the phase before")
        return self._weights[run.key]


# Figures -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A number that a run is judged by."""

    name: str  # What the number is, with its unit
    read: Callable[[Line], float | None]  # Finds it in a run's result; None: the run never got there
    more: bool = False  # Whether more is better
    digits: int = 1  # Decimals that are printed
    relative: bool = False  # Whether rows are compared by their ratio, not their difference
    judged: bool = True  # Whether rows are compared by it


def final(metric: str, scale: float = 1.0) -> Callable[[Line], float | None]:
    """Return a reader of the last evaluation."""

    def read(result: Line) -> float | None:
        value = result["evaluations"][-1][metric]
        return None if value is None else scale * value

    return read


def until(what: str, goals: Mapping[str, float]) -> Callable[[Line], float | None]:
    """Return a reader of the "step", "epoch" or seconds at the first evaluation that reached all ``goals``.

    A metric named ``..._loss`` reaches a goal from above, all others from below.
    """

    def reached(line: Line) -> bool:
        return all(
            line[name] is not None and (line[name] <= goal if name.endswith("loss") else line[name] >= goal)
            for name, goal in goals.items()
        )

    def read(result: Line) -> float | None:
        return next((line[what] for line in result["evaluations"] if reached(line)), None)

    return read


@dataclass(frozen=True)
class Cell:
    """A figure over the seeds; None for a run that never got there."""

    values: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """The mean, if every seed got there."""
        known = [value for value in self.values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(self.values) else None

    @property
    def low(self) -> float:
        """The smallest value of the seeds that got there."""
        return min(value for value in self.values if value is not None)

    @property
    def high(self) -> float:
        """The largest value of the seeds that got there."""
        return max(value for value in self.values if value is not None)

    def text(self, digits: int) -> str:
        """Mean and, in brackets, the seeds' range; or how many of them got there."""
        if self.mean is None:
            return f"{sum(value is not None for value in self.values)} of {len(self.values)} seeds"
        spread = f" ({self.low:.{digits}f}-{self.high:.{digits}f})" if len(self.values) > 1 else ""
        return f"{self.mean:.{digits}f}{spread}"


# Studies -------------------------------------------------------------------------------------------------------------

Place = tuple[str, str]  # row and column
Number = float | str | None


@dataclass(frozen=True)
class Study:
    """Rows, columns and figures of a table, and the paper's own."""

    title: str  # The question
    rows: Sequence[str]  # The methods, the base optimizer first
    columns: Mapping[str, str]  # Our columns, each with the paper's that it stands for
    runs: Mapping[Place, Sequence[Run]]  # The runs of a cell; places without an entry stay empty
    figures: Sequence[Figure]  # What is read off the runs
    paper: Mapping[str, Mapping[str, Sequence[Number]]]  # By figure and row, the paper's numbers for each column
    claim: str  # What the paper concludes
    base: Callable[[str, str], Place] | None = None  # The row that a row is compared with, where it is not the first
    # Figures that are known without a run, by name and place.
    known: Mapping[str, Mapping[Place, float]] = field(default_factory=dict)
    metrics: Sequence[str] = ("test_accuracy",)  # The held-out metrics whose curves are drawn
    conclude: Callable[[Cells], list[str]] = lambda cells: []  # Further lines, from the cells

    def cells(self, results: Results) -> Cells:
        """Return every figure of every place."""
        found = {name: {place: Cell((value,)) for place, value in at.items()} for name, at in self.known.items()}
        for figure, (place, runs) in product(self.figures, self.runs.items()):
            values = tuple(figure.read(results.get(run)) for run in runs)
            found.setdefault(figure.name, {})[place] = Cell(values)
        return found

    def digits(self, name: str) -> int:
        """Return the digits behind the point of a figure."""
        whole = all(value == round(value) for value in self.known.get(name, {}).values())
        return next((figure.digits for figure in self.figures if figure.name == name), 0 if whole else 1)


Cells = Mapping[str, Mapping[Place, Cell]]


def tables(study: Study, cells: Cells) -> str:
    """Return all tables, the verdicts and the paper's claim as text; "-" where the paper prints nothing."""
    blocks = [study.title, "=" * len(study.title)]
    for name, places in cells.items():
        printed = study.paper.get(name, {})
        pairs = [(ours, *([f"paper: {paper}"] if printed else [])) for ours, paper in study.columns.items()]
        lines = [[name, *(word for pair in pairs for word in pair)]]
        for row in study.rows:
            numbers = printed.get(row, [None] * len(study.columns))
            line = [row]
            for column, number in zip(study.columns, numbers, strict=True):
                cell = places.get((row, column))
                line.append(cell.text(study.digits(name)) if cell else "")
                line += ["-" if number is None else str(number)] * bool(printed)
            lines.append(line)
        blocks += ["", *aligned(lines)]
    blocks += ["", *verdicts(study, cells), *study.conclude(cells), f"The paper: {study.claim}", ""]
    return "\n".join(blocks)


def verdicts(study: Study, cells: Cells) -> list[str]:
    """Return for every row and judged figure where it is ahead of its base, and where it LOSES to it."""
    lines = []
    for figure, row in product((f for f in study.figures if f.judged), study.rows):
        words = []
        for column in study.columns:
            base = study.base(row, column) if study.base else (study.rows[0], column)
            own, other = (cells[figure.name].get(place) for place in ((row, column), base))
            if own and other and base != (row, column):
                words.append(f"{column}: {verdict(figure, own, other)}")
        if words:
            lines.append(f"{row}, {figure.name} - {'; '.join(words)}")
    return lines


def verdict(figure: Figure, own: Cell, base: Cell) -> str:
    """Say who is ahead; a run that never got there is behind every one that did."""
    if own.mean is None:
        return "neither got there" if base.mean is None else "LOSES, did not get there"
    if base.mean is None:
        return "ahead, the base did not get there"
    if own.mean == base.mean:
        return "even"
    ahead = (own.mean > base.mean) == figure.more
    by = (
        f"{100 * (own.mean / base.mean - 1):+.0f} %"
        if figure.relative
        else f"{own.mean - base.mean:+.{figure.digits}f}"
    )
    apart = own.low > base.high or own.high < base.low
    return f"{'ahead' if ahead else 'LOSES'} ({by}{'' if apart else ', ranges overlap'})"


# Drawing -------------------------------------------------------------------------------------------------------------


def draw(study: Study, results: Results) -> Drawing:
    """Draw the curves of each metric (rows) and column."""
    columns = [column for column in study.columns if any((row, column) in study.runs for row in study.rows)]
    figure, panels = grid(len(study.metrics), len(columns), study.title, size=(4.5, 4))
    for metric, line in zip(study.metrics, panels, strict=True):
        for axes, column in zip(line, columns, strict=True):
            curves(axes, study, results, metric, column)
    return figure


def curves(axes: Axes, study: Study, results: Results, metric: str, column: str) -> None:
    """Draw a held-out metric over the epochs (the steps, if no run sees all data); a line for each row and seed."""
    ends = [results.get(run)["epoch"] for row in study.rows for run in study.runs.get((row, column), ())]
    key = "epoch" if max(ends) >= 1 else "step"
    for index, row in enumerate(study.rows):
        for number, run in enumerate(study.runs.get((row, column), ())):
            lines = results.get(run)["evaluations"]
            style: dict[str, Any] = {
                "color": f"C{index}",
                "alpha": 0.7,
                "linewidth": 1,
                "label": None if number else row,
            }
            axes.plot(values_of(lines, key), values_of(lines, metric), **style)
    axes.set(title=column, xlabel=f"{key}s", ylabel=f"held-out {metric.removeprefix('test_')}")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="x-small")
