"""How every study starts and ends: its command line, its folder of result files, tables, pictures, JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common.runs import Line, facts

Row = Mapping[str, Any]


# The command ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """Where a study's results go."""

    folder: Path  # The folder of the result files
    # First entries of each file: command, versions, commit and machine. They are taken before the first run: the
    # code that the runs use, whatever the checkout becomes meanwhile.
    head: Line

    def save(self, stem: str, result: Mapping[str, Any], tables: str) -> None:
        """Write ``STEM.txt`` and ``STEM.json``."""
        (self.folder / f"{stem}.txt").write_text(tables)
        content = json.dumps(plain({**self.head, **result}), indent=1, allow_nan=False)
        (self.folder / f"{stem}.json").write_text(content + "\n")

    def save_runs(self, stem: str, result: Mapping[str, Any], runs: Iterable[Line]) -> None:
        """Replace ``STEM.json`` at once: the head, ``result``, and the runs, a line each."""
        text = json.dumps({**self.head, **result, "runs": []}, indent=1, allow_nan=False)
        lines = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
        half = self.folder / f"{stem}.json.tmp"
        half.write_text(text.removesuffix("[]\n}") + f"[\n{lines}\n]}}\n")
        os.replace(half, self.folder / f"{stem}.json")

    def picture(self, stem: str, figure: Figure) -> None:
        """Write ``STEM.png``."""
        figure.savefig(self.folder / f"{stem}.png", dpi=100)


class Command(argparse.ArgumentParser):
    """The command line of a study.

    Args:
        name: What follows ``python -m benchmarks.``; results go to the folder of its first word.
        about: The text above the options.
        epilog: The text below them.
    """

    def __init__(self, name: str, about: str | None, epilog: str | None = None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"python -m benchmarks.{name}", description=about, formatter_class=layout, epilog=epilog)
        study = name.partition(".")[0]
        self.folders = Path("benchmarks/results", study), Path("runs/smoke", study)

    def start(self, arguments: Sequence[str] | None, smoke: str) -> tuple[argparse.Namespace, Output]:
        """Parse the command line and make the folder of the results.

        Args:
            arguments: The command line; None: that of the process.
            smoke: What ``--smoke`` does.
        """
        results, smoking = self.folders
        place = f"of the result files (default: {results}; with --smoke: {smoking})"
        self.add_argument("--smoke", action="store_true", help=f"{smoke}, to see that everything runs; no result")
        self.add_argument("--out", type=Path, metavar="FOLDER", help=place)
        options = self.parse_args(arguments)
        folder: Path = options.out or (smoking if options.smoke else results)
        try:
            make_folder(folder)
        except ValueError as error:
            self.error(str(error))
        words = sys.argv[1:] if arguments is None else arguments
        return options, Output(folder, {"command": " ".join([self.prog, *_without_folder(words)]), **facts()})


def make_folder(folder: Path) -> None:
    """Create the folder of ``--out`` and write a probe into it.

    Raises:
        ValueError: If that is impossible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot write there: {error.strerror or error}") from error


def whole_numbers(text: str) -> list[int]:
    """Parse whole numbers separated by commas, as the type of an option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"whole numbers separated by commas are needed ({error})") from error


def _without_folder(words: Iterable[str]) -> list[str]:
    """A command line without ``--out``, which is of one machine and changes no result."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out")
    return parser.parse_known_args(list(words))[1]


# Tables --------------------------------------------------------------------------------------------------------------


def table(title: str, rows: Sequence[Row], note: str = "") -> str:
    """Rows as aligned text; the first column is left-aligned, numbers have four digits."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = aligned([heads, *([text(row.get(head)) for head in heads] for row in rows)])
    rule = "-" * max(map(len, (title, *lines)))
    return "\n".join([title, rule, lines[0], rule, *lines[1:], *([note] * bool(note)), ""])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row; the first column is aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def text(value: Any) -> str:
    """A cell."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "" if value is None else str(value)


def grid(
    rows: int, columns: int, title: str, size: tuple[float, float] = (5.5, 4.2), **more: Any
) -> tuple[Figure, Any]:
    """A figure with a canvas of its own, which works without a display and leaves pyplot's state alone.

    Returns:
        The figure, and its axes ``[rows, columns]``, each of ``size`` inches.
    """
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def plain(value: Any) -> Any:
    """The value with what JSON cannot hold (infinity) as text."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.floating, np.integer)):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
