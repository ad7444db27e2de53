"""Train a task with any optimizer: ``python -m benchmarks.train TASK --optimizer NAME`` (from the repository root)."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from benchmarks.common import plots
from benchmarks.common.optimizers import OPTIMIZERS
from benchmarks.common.reports import make_folder
from benchmarks.common.runs import Line, Trainer, comparable, progress
from benchmarks.common.settings import KFAC, Settings, nearest, resolve
from benchmarks.common.tasks import TASKS, Task
from benchmarks.train import page
from benchmarks.train.options import RUNS, parser
from benchmarks.train.runfiles import RunFiles, differences

# Settings that --compare shares only with the class that --optimizer is built on: they mean another thing elsewhere.
OWN = ("lr", "momentum", "options")
SHOWN = {"loss": "loss", "train_accuracy": "train acc", "test_accuracy": "test acc", "test_loss": "test loss"}


Plans = Mapping[RunFiles, Settings]  # of the runs of a command


# From the options to the runs ----------------------------------------------------------------------------------------


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that were given on the command line, in the form that ``resolve`` takes."""
    names = {*Settings.__dataclass_fields__, "epochs"} - {"task", "optimizer"}
    given = {name: value for name, value in options.items() if name in names}
    return given | {"kfac": dict(options.get("kfac", ())), "options": dict(options.get("option", ()))}


def compared(text: str) -> list[tuple[str, float | None]]:
    """Parse ``--compare`` into names and learning rates.

    Raises:
        ValueError: If a name is unknown or a learning rate is no number.
    """
    pairs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, lr = part.partition(":")
        try:
            pairs.append((nearest("optimizer", name, OPTIMIZERS), float(lr) if colon else None))
        except ValueError as error:
            raise ValueError(f"--compare {part}: {error}") from error
    return pairs


def check_fit(main: str, others: Sequence[str], given: Mapping[str, Any], recipe: str | None) -> None:
    """Refuse options that no optimizer of this command would use.

    Raises:
        ValueError: Naming the option and the optimizer.
    """
    for option, value, known in (("--kfac", given["kfac"], {*KFAC, "KFAC"}), ("--recipe", recipe, {*KFAC})):
        if value and known.isdisjoint({main, *others}):
            raise ValueError(f"{option}: for {', '.join(sorted(known))} only, not for {main}")
    if "momentum" in given and "momentum" not in OPTIMIZERS[main].keywords:
        raise ValueError(f"--momentum: {main} has none (for betas: --option 'betas=(0.9, 0.999)')")


def all_settings(task: Task, options: Mapping[str, Any]) -> dict[str, Settings]:
    """Return the settings of every run by its label: that of ``--optimizer`` first, then those of ``--compare``.

    Raises:
        ValueError: If an option does not fit the optimizers.
    """
    main, recipe, given = options["optimizer"], options.get("recipe"), given_settings(options)
    others = compared(options.get("compare", ""))
    check_fit(main, [name for name, _ in others], given, recipe)
    runs = {main: resolve(task, main, recipe=recipe, given=given)}
    shared = {name: value for name, value in given.items() if name not in OWN}
    for name, lr in others:
        own = dict(given if name == KFAC.get(main) else shared)
        if lr is not None:
            own["lr"] = lr
        label = name if lr is None else f"{name}:{lr:g}"
        if label in runs:
            raise ValueError(f"--compare {label}: is trained already; give it a learning rate of its own, {name}:LR")
        runs[label] = resolve(task, name, recipe=recipe, given=own)
    return runs


def default_folder(options: Mapping[str, Any]) -> Path:
    """Return ``runs/TASK-OPTIMIZER-N``: the next number, or with ``--resume`` the highest there is."""
    stem = f"{options['task']}-{options['optimizer']}-"
    taken = [path.name.removeprefix(stem) for path in RUNS.glob(f"{stem}*")]
    latest = max((int(number) for number in taken if number.isdigit()), default=0)
    return RUNS / f"{stem}{max(latest, 1) if options['resume'] else latest + 1}"


# Checks before training ----------------------------------------------------------------------------------------------


def check_previous(headers: Mapping[RunFiles, Line], *, resume: bool) -> None:
    """Refuse to overwrite earlier runs, and to resume where nothing, or something else, was begun.

    Raises:
        ValueError: Naming the file and, on ``--resume``, each setting that differs.
    """
    found = {files: record for files in headers if (record := files.record())}
    for files, record in found.items():
        state = f"{files.log} holds {'an unfinished' if record.end is None else 'a finished'} run"
        if not resume:
            ways = "--resume continues it, --overwrite" if record.end is None else "--overwrite"
            raise ValueError(f"{state}; {ways} replaces it, or choose another --out")
        differing = differences(comparable(record.header), comparable(headers[files]))
        if differing:
            raise ValueError(f"--resume: {state} with other settings: {'; '.join(differing)}")
    if resume and not any(record.end or files.checkpoint.exists() for files, record in found.items()):
        raise ValueError(
            f"--resume: no checkpoint of this command in {next(iter(headers)).folder}; start without --resume"
        )


def prepare(options: Mapping[str, Any]) -> tuple[Task, Plans]:
    """Check everything that can be checked before training, so that nothing fails after it.

    Raises:
        ValueError: If a name, a value or a combination is wrong, or the folder can't be used.
        TypeError: If an optimizer refuses a keyword.
    """
    make = TASKS[nearest("task", options["task"], TASKS)]
    nearest("optimizer", options["optimizer"], OPTIMIZERS)
    if options["checkpoint_every"] < 1:
        raise ValueError("--checkpoint-every: must be at least 1")
    task, folder = make(), options.get("out") or default_folder(options)
    task = replace(task, target=options.get("target", task.target))
    plans = {RunFiles(folder, label): settings for label, settings in all_settings(task, options).items()}
    headers = {files: Trainer(task, settings).header() for files, settings in plans.items()}
    if not options["overwrite"]:
        check_previous(headers, resume=options["resume"])
    make_folder(folder)
    return task, plans


# Training ------------------------------------------------------------------------------------------------------------


class Signals:
    """The first Ctrl-C or SIGTERM asks for a stop after the current step; a second Ctrl-C stops at once."""

    received: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal."""
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle signals meanwhile."""
        before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(trainer: Trainer, files: RunFiles, signals: Signals, *, checkpoint_every: int, quiet: bool) -> None:
    """Train to the end or to a signal, from the checkpoint if there is one."""
    resumed = files.checkpoint.exists()
    if resumed:
        files.restore(trainer)
    engine, since = getattr(trainer.optimizers[0], "curvature", None), trainer.step
    more: Line = {"initial": trainer.step, "disable": quiet, "dynamic_ncols": True}
    with open(files.log, "a" if resumed else "w") as log, progress(trainer.settings.steps, files.label, **more) as bar:
        if not resumed:
            write(log, [trainer.header()])
        shown: Line = {}
        while not trainer.ended and signals.received is None:
            lines = trainer.advance()
            if engine is not None and engine.stages.refresher.frozen_at is not None:
                next(line for line in lines if line["kind"] == "step")["staleness"] = (
                    engine.step_count - engine.stages.refresher.frozen_at
                )
                if lines[-1]["kind"] == "evaluation" and not trainer.ended:
                    lines.append(curvature(trainer, engine.report()))
            write(log, lines)
            shown |= {SHOWN[name]: line[name] for line in lines for name in SHOWN if line.get(name) is not None}
            bar.set_postfix(shown, refresh=False)
            bar.update()
            if trainer.step % checkpoint_every == 0:
                files.save(trainer)
        if engine is not None and trainer.step:
            views = {"profile": engine.profile(), "memory": engine.memory_estimate(), "table": str(engine)}
            write(log, [{**curvature(trainer, engine.report(eigenvalues=True)), **views, "since": since}])
        if trainer.ended:
            write(log, [{"kind": "end", "reason": trainer.ended, **trainer.position()}])
        if trainer.step:
            files.save(trainer)


def curvature(trainer: Trainer, report: Line) -> Line:
    """Return a line of the log; an infinite condition number becomes null."""
    plain = json.loads(json.dumps(report), parse_constant=lambda name: None)
    return {"kind": "curvature", **trainer.position(), "report": plain}


def write(log: TextIO, lines: Sequence[Line]) -> None:
    """Append ``lines``, out of our hands before a checkpoint counts them."""
    log.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    log.flush()


def run(task: Task, plans: Plans, options: Mapping[str, Any], command: str) -> int:
    """Train what is not trained yet, draw and print everything; return the exit code."""
    folder, signals = next(iter(plans)).folder, Signals()
    if options["overwrite"]:
        for files in plans:
            files.remove()
    how = {name: options[name] for name in ("checkpoint_every", "quiet")}
    with signals.watched():
        for files, settings in plans.items():
            record = files.record()
            if signals.received is None and (record is None or record.end is None):
                train(Trainer(task, settings), files, signals, **how)
    records = {files.label: record for files in plans if (record := files.record())}
    plots.of_runs(task, records).savefig(folder / "plot.png", dpi=100)
    page.write(task, records, command, folder / "summary.html")
    print(page.summary(task, records))
    print(f"logs, checkpoints and plot.png: {folder}")
    print(f"summary with pictures: {folder / 'summary.html'}")
    if signals.received is None:
        return 0
    print("interrupted; the same command with --resume continues")
    return 128 + signals.received


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (2: refused before training, 130 or 143: interrupted)."""
    command = parser()
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = vars(command.parse_args(given))
    try:
        task, plans = prepare(options)
    except (ValueError, TypeError) as error:
        command.error(str(error))
    try:
        return run(task, plans, options, f"{command.prog} {shlex.join(given)}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
