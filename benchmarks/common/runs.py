"""One run: trains step by step, says in lines what happened, and continues exactly from what it saved.

The first line holds the settings, versions and machine; then there is one for every step and every evaluation. JSON has
no NaN: a loss that is not finite is null. Seconds are those of the steps alone, of CPU time and of the wall.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import kfac_optim
from benchmarks.common import optimizers
from benchmarks.common.settings import Settings
from benchmarks.common.tasks import Task

PATIENCE = 10  # steps in a row without a finite loss before a run counts as diverged; K-FAC skips single bad batches

Line = dict[str, Any]


def facts() -> Line:
    """Return versions and machine, as every result file holds them."""
    packages = "torch torch_optimizer numpy scikit-learn transformers kfac_pytorch kfac_jax jax".split()
    versions: Line = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    versions["kfac_optim"] = kfac_optim.__version__
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
        settings: How it is trained.

    Raises:
        ValueError, TypeError: If the settings do not fit the task or the optimizer.
    """

    def __init__(self, task: Task, settings: Settings) -> None:
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: this torch sees no CUDA device")
        torch.set_num_threads(settings.threads)
        torch.set_flush_denormal(True)  # of curves' pixels, with which products take ten times as long on some CPUs
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

    def train_step(self) -> Line:
        """Take one step on the batch that belongs to it."""
        lr = self.optimizers[0].param_groups[0].get("lr")  # KFAC has none
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


MEMORY = 0.9  # of the running average of the training loss


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running average, without the bias of a start at zero; NaNs are left out of it."""
    total = weight = 0.0
    averages = []
    for value in values:
        if math.isfinite(value):
            total, weight = MEMORY * total + value, MEMORY * weight + 1
        averages.append(total / weight if weight else math.nan)
    return averages


def column(lines: Iterable[Line], key: str) -> list[float]:
    """Return the values of ``key`` over all lines; null (not finite) as NaN, which leaves a gap in a plot."""
    return [math.nan if line[key] is None else line[key] for line in lines]


@dataclass
class Record:
    """What a run's lines say."""

    header: Line  # The first line: settings, versions, machine
    steps: list[Line] = field(default_factory=list)  # Lines of the steps
    evaluations: list[Line] = field(default_factory=list)  # Lines of the evaluations
    curvature: list[Line] = field(default_factory=list)  # What the curvature engine reported
    end: str | None = None  # How the run ended, or None if it did not yet

    def add(self, line: Line) -> None:
        """Sort one line in."""
        if line["kind"] == "end":
            self.end = line["reason"]
        else:
            {"step": self.steps, "evaluation": self.evaluations, "curvature": self.curvature}[line["kind"]].append(line)

    def follow(self, trainer: Trainer) -> None:
        """Sort in the lines of another step; evaluations get the running average of the training loss as well."""
        for line in trainer.advance():
            self.add(line)
            if line["kind"] == "evaluation":
                line["train_loss"] = finite(smoothed([math.nan, *column(self.steps, "loss")])[-1])

    @property
    def seconds(self) -> str:
        """Which seconds a run is judged by: of CPU time, or the wall's where a GPU does the work."""
        return "cpu_seconds" if self.header["settings"]["device"] == "cpu" else "wall_seconds"

    @property
    def recent_loss(self) -> float | None:
        """The mean training loss of the last 20 steps, of those that were finite."""
        losses = [line["loss"] for line in self.steps[-20:] if line["loss"] is not None]
        return sum(losses) / len(losses) if losses else None

    def first_reached(self, task: Task) -> Line | None:
        """Return the first evaluation that reached the task's target."""
        lines = (line for line in self.evaluations if line[task.metric] is not None)
        return next((line for line in lines if task.reached(line[task.metric])), None)


def progress(total: int, label: str, unit: str = "step", **more: Any) -> Any:
    """Return a progress bar; updates are rare where it does not go to a terminal."""
    return tqdm(total=total, desc=label, unit=unit, mininterval=0.5 if sys.stderr.isatty() else 10.0, **more)


def train(task: Task, settings: Settings, label: str, *, quiet: bool = False) -> tuple[Trainer, Record]:
    """Train to the end.

    Args:
        task: What is trained.
        settings: How it is trained.
        label: Text before the progress bar.
        quiet: No progress bar.

    Returns:
        The trainer, and its record, in which every evaluation has the running average of the training loss as well.
    """
    trainer = Trainer(task, settings)
    record = Record(trainer.header())
    with progress(settings.steps, label, leave=False, disable=quiet) as bar:
        try:
            while not trainer.ended:
                record.follow(trainer)
                bar.update()
            record.end = trainer.ended
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # as Shampoo ends when it diverges
            record.end = f"failed: {error}"
    return trainer, record


def comparable(run: Line) -> Line:
    """Return what must agree for a run to continue or to stand for another: its settings and its data."""
    return {**run["settings"], "data_checksum": run["data_checksum"]}


def identity(settings: Settings, task: Task, **more: Any) -> Line:
    """Return what must agree for a finished run to stand for another: settings, data, and what else is given."""
    return {**asdict(settings), "data_checksum": task.digest, **more}


class Store:
    """Finished runs, found again by their identity.

    Args:
        paths: Result files, with runs under ``"runs"``; those that are missing are left out.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.runs: dict[str, Line] = {}
        for path in paths:
            for run in json.loads(path.read_text()).get("runs", ()) if path.exists() else ():
                self.add(run)

    def add(self, run: Line) -> None:
        """Keep a run: its identity is the entry ``"run"``, or the entries ``"settings"`` and ``"data_checksum"``."""
        self.runs[self.key(run["run"] if "run" in run else comparable(run))] = run

    def find(self, wanted: Line) -> Line | None:
        """Return the run with an identity, or None if it is not finished."""
        return self.runs.get(self.key(wanted))

    @staticmethod
    def key(known: Line) -> str:
        """Return an identity as text; the same before and after it went through a file."""
        return json.dumps(known, sort_keys=True)
