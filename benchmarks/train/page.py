"""The closing table of the runs on one task, as text and in a single HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import plots, reports
from benchmarks.common.runs import Line, Record
from benchmarks.common.tasks import Task
from kfac_optim import diagnostics

# The closing table ---------------------------------------------------------------------------------------------------


def summary(task: Task, records: Mapping[str, Record]) -> str:
    """Return the table of final losses, accuracy, seconds per step and the way to the target."""
    rows = [row(task, label, record) for label, record in records.items()]
    return "\n".join([*reports.aligned([list(rows[0]), *(list(each.values()) for each in rows)]), note(task, records)])


def note(task: Task, records: Mapping[str, Record]) -> str:
    """Return what the table's target and seconds mean."""
    kinds = {record.seconds.removesuffix("_seconds") for record in records.values()}
    return f"{task.goal}; seconds: {' or '.join(sorted(kinds))}, without evaluation"


def row(task: Task, label: str, record: Record) -> dict[str, str]:
    """Return the row of one run; "-" where there is no figure."""
    last = record.evaluations[-1] if record.evaluations else {}
    key = record.seconds
    ends = [0.0, *(line[key] for line in record.steps)]
    seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    reached = record.first_reached(task)
    return {
        "optimizer": label,
        "end": record.end or "interrupted",
        "steps": str(len(record.steps)),
        "loss": number(record.recent_loss),
        "held out": number(last.get("test_loss")),
        "accuracy": number(last.get("test_accuracy")),
        "s/step": number(sum(seconds) / len(seconds) if seconds else None),
        "worst": number(max(seconds, default=None)),
        "to target": f"epoch {reached['epoch']:g}" if reached else "-",
        "seconds to it": number(reached[key] if reached else None),
        "seconds in all": number(ends[-1] if seconds else None),
    }


def number(value: float | None) -> str:
    """Return four digits of ``value``."""
    return "-" if value is None else f"{value:.4g}"


# The page ------------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.5 sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em }
h2 { margin-top: 2em; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: 1em 0 }
th, td { border: 1px solid #ccc; padding: 3px 9px; text-align: right; vertical-align: top }
th { background: #f2f2f2 } th:first-child, td:first-child { text-align: left }
pre { background: #f6f6f6; padding: 0.8em; overflow-x: auto; font-size: 13px }
figure { margin: 1.5em 0 } img { max-width: 100% } figcaption { color: #555 }
"""


def write(task: Task, records: Mapping[str, Record], command: str, path: Path) -> None:
    """Write the page of all runs to ``path``: what was run, figures, plots, and a look inside every K-FAC optimizer."""
    parts = [
        f"<h1>{escape(task.name)}: {escape(', '.join(records))}</h1>",
        f"<pre>{escape(command)}</pre>",
        "<h2>Results</h2>",
        *results(task, records),
        "<h2>Settings</h2>",
        *settings(records),
    ]
    for label, record in records.items():
        if record.curvature:
            parts += [f"<h2>Curvature of {escape(label)}</h2>", *curvature(record)]
    head = f'<meta charset="utf-8"><title>{escape(task.name)}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    path.write_text(f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n')


def results(task: Task, records: Mapping[str, Record]) -> Iterator[str]:
    """Yield the closing table, and the plot of losses and accuracy."""
    rows = [row(task, label, record) for label, record in records.items()]
    yield table([list(rows[0]), *(list(each.values()) for each in rows)])
    yield f"<p>{escape(note(task, records))}. <i>loss</i>: training, mean of the last 20 steps.</p>"
    yield picture(plots.of_runs(task, records), "Loss and held-out figures, over steps and over seconds of training")


def settings(records: Mapping[str, Record]) -> Iterator[str]:
    """Yield the settings of all runs side by side, then versions and machine."""
    headers = [record.header for record in records.values()]
    names = dict.fromkeys(name for header in headers for name in header["settings"])
    rows = [[name, *(text(header["settings"].get(name)) for header in headers)] for name in names]
    rows.append(["parameters", *(text(header["parameters"]) for header in headers)])
    yield table([["", *records], *rows])
    first = headers[0]
    facts = {**first["versions"], "commit": first["commit"], **first["machine"]}
    yield table([["versions and machine", ""], *([name, text(value)] for name, value in facts.items() if value)])


def curvature(record: Record) -> Iterator[str]:
    """Yield tables and pictures of a K-FAC optimizer."""
    last = record.curvature[-1]
    if last["report"]["layers"]:
        yield picture(
            diagnostics.plot_history(history(record)),
            "Condition numbers at the evaluations, and the age of the factors in use after each step. The damped "
            "condition number is that of what the gradient is divided by: near 1 the gradient keeps its direction.",
        )
        yield picture(
            diagnostics.plot_spectrum(last["report"]),
            "Eigenvalues at the end, in units of the damping: above the mark curvature decides, below it the damping.",
        )
    yield picture(diagnostics.plot_profile(last["profile"]), f"Time from step {last['since']} to {last['step']}")
    memory = [[kind, diagnostics.human_bytes(count)] for kind, count in last["memory"].items()]
    yield table([["memory of the curvature", ""], *memory])
    counts = [[name.replace("_", " "), text(last["report"][name])] for name in COUNTS]
    yield table([["steps, and what was left out", ""], *counts])
    yield f"<pre>{escape(last['table'])}</pre>"


COUNTS = ("step", "skipped_steps", "skipped_batches", "failed_decompositions")


def history(record: Record) -> list[Line]:
    """Return the reports by the step of the run, and between them the staleness after each step."""
    stale = [line for line in record.steps if "staleness" in line]
    full = [{**line["report"], "step": line["step"]} for line in record.curvature]
    return sorted([*stale, *full], key=lambda line: line["step"])


def picture(figure: Figure, caption: str) -> str:
    """Return the figure as part of the page."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as a table, the first as its head."""
    lines = []
    for index, row in enumerate(rows):
        tag = "td" if index else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def text(value: Any) -> str:
    """Return a cell: the entries of a dictionary in words, nothing for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {json.dumps(item)}" for name, item in value.items())
    return "" if value is None else str(value)
