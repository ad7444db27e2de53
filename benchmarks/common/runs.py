"""One run: trains step by step, logs JSON lines, keeps a checkpoint from which it continues exactly.

A log's first line holds the settings, versions and machine; then one line per step and per evaluation, and of K-FAC
optimizers one on the curvature beside each evaluation and at the end; a last line says how the run ended. JSON has no
NaN: a loss that is not finite is logged as null.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from benchmarks.common import optimizers
from benchmarks.common.settings import Settings
from benchmarks.common.tasks import Task

PATIENCE = 10  # steps in a row without a finite loss before a run counts as diverged; K-FAC skips single bad batches

Line = dict[str, Any]


def facts() -> Line:
    """Return versions and machine, as every result file holds them."""
    packages = (
        "torch",
        "torch_optimizer",
        "numpy",
        "scikit-learn",
        "torchvision",
        "transformers",
        "kfac_pytorch",
        "kfac_jax",
        "jax",
    )
    versions: Line = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    versions["kfac_optim"] = getattr(sys.modules.get("kfac_optim"), "__version__", None)
    machine = {"system": platform.platform(), "processor": processor(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "commit": commit(), "machine": machine}


def version(package: str) -> str | None:
    """Return the version of an installed package; None: there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str | None:
    """Return the commit of the checkout, marked if the package or the benchmarks have changes; None outside git."""
    folder = Path(__file__).parent
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass
class Clock:
    """Seconds spent inside ``with clock:``, summed over all entries: of all threads' CPU time, and of the wall's."""

    cpu: float = 0.0
    wall: float = 0.0
    _entered: tuple[float, float] = (0.0, 0.0)

    def __enter__(self) -> None:
        self._entered = time.process_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.cpu += time.process_time() - self._entered[0]
        self.wall += time.perf_counter() - self._entered[1]


class Trainer:
    """Model, optimizers and position of one run.

    Args:
        task: What is trained.
        settings: How.

    Raises:
        ValueError, TypeError: If the settings do not fit the task or the optimizer.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: this torch sees no CUDA device")
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.task, self.settings = task, settings
        self.device = torch.device(settings.device)
        self.model = task.model().to(self.device)
        self.optimizers = optimizers.build(settings, task, self.model)
        self.schedulers = optimizers.schedulers(settings, self.optimizers)
        self.clock = Clock()
        self.step = 0
        self.bad_steps = 0

    @property
    def ended(self) -> str | None:
        """Why there is no further step: "finished", "diverged", or None while there is one."""
        if self.bad_steps >= PATIENCE:
            return "diverged"
        return "finished" if self.step >= self.settings.steps else None

    def advance(self) -> list[Line]:
        """Take one step; return its line and those of the evaluations before and after it."""
        lines = [] if self.step else [self.evaluation()]
        lines.append(self.train_step())
        if self.step % self.settings.eval_every == 0 or self.ended:
            lines.append(self.evaluation())
        return lines

    def lines(self) -> Iterator[Line]:
        """Train to the end, yielding every line."""
        while not self.ended:
            yield from self.advance()

    def train_step(self) -> Line:
        """Take one step on the batch that belongs to it."""
        lr = self.optimizers[0].param_groups[0]["lr"]
        with self.clock:
            inputs, targets = self.task.source.batch(self.settings.seed, self.step, self.settings.batch_size)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.task.loss(self.model(inputs.to(self.device)), targets.to(self.device))
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            value = loss.item()  # after the step, so that a GPU has finished it when the clock stops
        for scheduler in self.schedulers:
            scheduler.step()
        self.step += 1
        self.bad_steps = 0 if math.isfinite(value) else self.bad_steps + 1
        return {"kind": "step", **self.position(), "lr": lr, "loss": finite(value)}

    def evaluation(self) -> Line:
        """Evaluate the model on the held-out data, off the clock."""
        figures = self.task.evaluate(self.model, self.device)
        return {"kind": "evaluation", **self.position(), **{name: finite(value) for name, value in figures.items()}}

    def position(self) -> Line:
        """Return steps, epochs and seconds so far."""
        epoch = self.step / self.task.source.steps_per_epoch(self.settings.batch_size)
        seconds = {"cpu_seconds": round(self.clock.cpu, 4), "wall_seconds": round(self.clock.wall, 4)}
        return {"step": self.step, "epoch": round(epoch, 4), **seconds}

    def header(self) -> Line:
        """Return the first line of the log."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        figures = {"parameters": parameters, "data_checksum": self.task.digest}
        return {"kind": "settings", "settings": asdict(self.settings), **figures, **facts()}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run continues from: tensors and plain values only."""
        return {
            "step": self.step,
            "bad_steps": self.bad_steps,
            "seconds": [self.clock.cpu, self.clock.wall],
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``."""
        self.model.load_state_dict(state["model"])
        for kind in ("optimizers", "schedulers"):
            for own, saved in zip(getattr(self, kind), state[kind], strict=True):
                own.load_state_dict(saved)
        self.step, self.bad_steps = state["step"], state["bad_steps"]
        self.clock = Clock(*state["seconds"])
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu())


def finite(value: float) -> float | None:
    """Return ``value``, or None where JSON could not hold it."""
    return value if math.isfinite(value) else None


@dataclass
class Record:
    """What a log says.

    Attributes:
        header: The first line.
        steps: Lines of the steps.
        evaluations: Lines of the evaluations.
        curvature: What the curvature engine reported.
        end: How the run ended, or None if it did not yet.
    """

    header: Line
    steps: list[Line] = field(default_factory=list)
    evaluations: list[Line] = field(default_factory=list)
    curvature: list[Line] = field(default_factory=list)
    end: str | None = None

    def add(self, line: Line) -> None:
        """Sort one line in."""
        if line["kind"] == "step":
            self.steps.append(line)
        elif line["kind"] == "evaluation":
            self.evaluations.append(line)
        elif line["kind"] == "curvature":
            self.curvature.append(line)
        else:
            self.end = line["reason"]


def seconds_key(record: Record) -> str:
    """Return which seconds a run is judged by: of CPU time, or the wall's where a GPU does the work."""
    return "cpu_seconds" if record.header["settings"]["device"] == "cpu" else "wall_seconds"


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


def comparable(header: Line) -> Line:
    """Return what must agree for a run to continue: its settings and its data."""
    return {**header["settings"], "data_checksum": header["data_checksum"]}
