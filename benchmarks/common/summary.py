"""The closing table of the runs on one task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.common.runs import Line, Record, seconds_key
from benchmarks.common.tasks import Task

HEADS = ["optimizer", "end", "steps", "loss", "held out", "accuracy", "s/step", "worst", "to target", "seconds"]


def table(task: Task, records: Mapping[str, Record]) -> str:
    """Return the table of final losses, accuracy, seconds per step and the way to the target."""
    rows = [HEADS] + [row(task, label, record) for label, record in records.items()]
    return "\n".join([*aligned(rows), note(task, records)])


def note(task: Task, records: Mapping[str, Record]) -> str:
    """Return what the table's target and seconds mean."""
    kinds = {seconds_key(record)[:-8] for record in records.values()}
    return f"{goal(task)}; seconds: {' or '.join(sorted(kinds))}, without evaluation"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with cells of a column to the right of equal widths."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows]


def goal(task: Task) -> str:
    """Return what the way to the target is about."""
    sign = ">=" if task.scores else "<="
    return f"target: held-out {task.metric.removeprefix('test_')} {sign} {task.target:g}"


def row(task: Task, label: str, record: Record) -> list[str]:
    """Return the row of one run; "-" where there is no figure."""
    last = record.evaluations[-1] if record.evaluations else {}
    key = seconds_key(record)
    ends = [0.0, *(line[key] for line in record.steps)]
    seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    recent = [line["loss"] for line in record.steps[-20:] if line["loss"] is not None]
    reached = first_reached(task, record)
    return [
        label,
        record.end or "interrupted",
        str(len(record.steps)),
        number(sum(recent) / len(recent) if recent else None),
        number(last.get("test_loss")),
        number(last.get("test_accuracy")),
        number(sum(seconds) / len(seconds) if seconds else None),
        number(max(seconds, default=None)),
        f"epoch {reached['epoch']:g}" if reached else "-",
        number(reached[key] if reached else None),
    ]


def first_reached(task: Task, record: Record) -> Line | None:
    """Return the first evaluation that reached the target."""
    lines = (line for line in record.evaluations if line[task.metric] is not None)
    return next((line for line in lines if task.reached(line[task.metric])), None)


def number(value: float | None) -> str:
    """Return four digits of ``value``."""
    return "-" if value is None else f"{value:.4g}"
