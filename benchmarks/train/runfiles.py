"""Log and checkpoint of a run in an output folder, and whether a run may continue from them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from benchmarks.common.runs import Record, Trainer


@dataclass(frozen=True)
class RunFiles:
    """Log and checkpoint of one run in an output folder."""

    folder: Path
    label: str

    @property
    def log(self) -> Path:
        """JSON lines."""
        return self.folder / f"{self.stem}.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint; after the end, the trained model."""
        return self.folder / f"{self.stem}.pt"

    @property
    def stem(self) -> str:
        """The label as a file name."""
        return self.label.replace(":", "-lr")

    def record(self) -> Record | None:
        """Return the log, or None if there is none (or not a whole first line)."""
        try:
            text = self.log.read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if not lines:
            return None
        record = Record(lines[0])
        for line in lines[1:]:
            record.add(line)
        return record

    def remove(self) -> None:
        """Delete log and checkpoint."""
        self.log.unlink(missing_ok=True)
        self.checkpoint.unlink(missing_ok=True)

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint of ``trainer``: the old one is replaced only when the new one is complete."""
        half = self.checkpoint.with_suffix(".pt.tmp")
        torch.save({"log_bytes": self.log.stat().st_size, "run": trainer.state_dict()}, half)
        os.replace(half, self.checkpoint)

    def restore(self, trainer: Trainer) -> None:
        """Continue ``trainer`` from the checkpoint, and cut the log back to where it was written.

        Raises:
            ValueError: If the checkpoint is damaged, or the log is shorter than it was.
        """
        try:
            saved = torch.load(self.checkpoint, weights_only=True, map_location=trainer.device)
            trainer.load_state_dict(saved["run"])
        except (OSError, RuntimeError, KeyError, ValueError, EOFError, UnpicklingError) as error:
            raise ValueError(f"{self.checkpoint}: not a usable checkpoint: {error}") from error
        if not self.log.exists() or self.log.stat().st_size < saved["log_bytes"]:
            raise ValueError(f"{self.log}: missing or shorter than when {self.checkpoint.name} was written")
        os.truncate(self.log, saved["log_bytes"])


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each entry that differs between the settings of a log and the current ones."""
    there, now = flat(there), flat(now)
    names = [name for name in {**there, **now} if there.get(name) != now.get(name)]
    return [f"{name}: {there.get(name)!r} there, {now.get(name)!r} now" for name in names]


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with the entries of inner dictionaries as ``outer.inner``; tuples as lists, as in JSON."""
    rows: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            rows |= {f"{name}.{key}": inner for key, inner in flat(value).items()}
        else:
            rows[name] = list(value) if isinstance(value, tuple) else value
    return rows
