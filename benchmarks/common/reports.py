"""Tables, figures and result files, as all benchmarks write them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS = Path("benchmarks/results")
SMOKE = Path("runs/smoke")

Row = Mapping[str, Any]


def table(title: str, rows: Sequence[Row], note: str = "") -> str:
    """Rows as aligned text; the first column is left-aligned, numbers have four digits."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [heads, *([text(row.get(head)) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    rule = "-" * max(map(len, (title, *lines)))
    return "\n".join(
        [title, rule, lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:]), *([note] * bool(note)), ""]
    )


def text(value: Any) -> str:
    """A cell."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value)


def grid(rows: int, columns: int, title: str) -> tuple[Figure, Any]:
    """A figure with a canvas of its own: works without a display and leaves pyplot's state alone."""
    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False)


def write(folder: Path, stem: str, result: Mapping[str, Any], tables: str) -> None:
    """Print the tables; write them and the result."""
    print(tables)
    save(folder, stem, result, tables)
    print(f"written: {folder / stem}.json, .txt")


def save(folder: Path, stem: str, result: Mapping[str, Any], tables: str) -> None:
    """Write the tables and the result."""
    (folder / f"{stem}.txt").write_text(tables)
    (folder / f"{stem}.json").write_text(json.dumps(finite(result), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The value with what JSON cannot hold (infinity) as text."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, (np.floating, np.integer)):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
