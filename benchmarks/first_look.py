"""The first table of results: what K-FAC gains per step.

``python -m benchmarks.first_look --part NAME`` (from the repository root) measures one part, prints its table and
writes ``first_look-NAME.json`` with every setting, the seeds, versions and machine. Parts:

    digits     epochs and CPU seconds to 97 % test accuracy, KFACSGD and SGD at the same learning rate and schedule
    curves     held-out loss after 100, 200, 300 steps, in the paper's mode and in the practical one, sampled Fisher
    text       held-out loss of the practical mode, AdamW and Muon after the same steps
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import summary
from benchmarks.optimizers import is_kfac
from benchmarks.reports import RESULTS, SMOKE
from benchmarks.runs import Line, Record, Trainer, facts
from benchmarks.settings import resolve
from benchmarks.tasks import TASKS, Task


@dataclass(frozen=True)
class Contender:
    """An optimizer with its settings.

    Attributes:
        name: Of the optimizer.
        recipe: For K-FAC.
        given: Settings that win over defaults and recipe.
    """

    name: str
    recipe: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def trainer(self, task: Task, **more: Any) -> Trainer:
        """Return a fresh run on ``task``; ``more``: settings unless its own say otherwise."""
        settings = resolve(
            task, self.name, is_kfac=is_kfac(self.name), recipe=self.recipe, given={**more, **self.given}
        )
        return Trainer(task, settings)

    @property
    def label(self) -> str:
        """Name and recipe."""
        return self.name + (f" {self.recipe}" if self.recipe else "")


@dataclass(frozen=True)
class Part:
    """Runs on one task.

    Attributes:
        contenders: The optimizers, on the same batches.
        seeds: One run of each contender for each.
        at: Steps whose held-out loss is listed.
        shared: Settings of all contenders.
    """

    contenders: Sequence[Contender]
    seeds: Sequence[int] = (0,)
    at: Sequence[int] = ()
    shared: Mapping[str, Any] = field(default_factory=dict)


PARTS: dict[str, Part] = {
    "digits": Part(
        # The practical mode has another unit of lr, so its row is an addition to the comparison at the same lr.
        contenders=(Contender("SGD"), Contender("KFACSGD", "paper"), Contender("KFACSGD", "practical", {"lr": 0.02})),
        seeds=(0, 1, 2),
        shared={"lr": 0.1, "momentum": 0.9, "schedule": "cosine", "eval_every": 11},
    ),
    "curves": Part(
        contenders=(
            Contender("KFACSGD", "paper"),
            Contender("KFACSGD", "practical"),
            Contender("AdamW"),
        ),
        at=(100, 200, 300),
        shared={"steps": 300, "eval_every": 20},
    ),
    "text": Part(
        contenders=(Contender("KFACSGD", "practical"), Contender("AdamW"), Contender("Muon")),
        at=(100, 200, 300, 400),
        shared={"steps": 400, "eval_every": 50},
    ),
}


# Losses --------------------------------------------------------------------------------------------------------------


def learn(name: str, seeds: Sequence[int] | None, smoke: bool) -> Line:
    """Measure a part of ``PARTS``: train every contender with every seed; print the table, return the result."""
    part, task = PARTS[name], TASKS[name]()
    more = {**part.shared, **({"steps": 2, "eval_every": 1} if smoke else {})}
    records: dict[str, Record] = {}
    rows = []
    for seed in part.seeds if seeds is None else seeds:
        for contender in part.contenders:
            label = f"{contender.label} seed {seed}"
            trainer = contender.trainer(task, **more, seed=seed)
            records[label] = record = Record(trainer.header())
            for line in tqdm(trainer.lines(), desc=f"{name} {label}", unit="line", mininterval=5):
                record.add(line)
            record.end = trainer.ended
            rows.append({"contender": contender.label, "seed": seed, **figures(task, record, part.at)})
    print(summary.table(task, records))
    for row in rows:
        if row["losses_at"]:
            losses = ", ".join(f"{step}: {loss:.4g}" for step, loss in row["losses_at"].items())
            print(f"{row['contender']} seed {row['seed']}, held-out loss after steps {losses}")
    return {"part": name, "target": task.target, "rows": rows}


def figures(task: Task, record: Record, at: Sequence[int]) -> Line:
    """Return what a run says: losses at the wanted steps, the way to the target, seconds, and all its evaluations."""
    reached = summary.first_reached(task, record)
    losses = {line["step"]: line["test_loss"] for line in record.evaluations if line["step"] in at}
    return {
        "settings": record.header["settings"],
        "end": record.end,
        "losses_at": losses,
        "reached": reached and {key: reached[key] for key in ("step", "epoch", "cpu_seconds")},
        "cpu_seconds": record.steps[-1]["cpu_seconds"],
        "evaluations": record.evaluations,
    }


# The command ---------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.first_look",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--part", action="append", choices=PARTS, help="what to measure; may be repeated (default: everything)")
    add("--seeds", metavar="N,...", help="seeds of the runs (default: 0,1,2 for digits, else 0)")
    add("--smoke", action="store_true", help="a handful of steps, to see that everything runs; no result")
    add("--out", type=Path, metavar="FOLDER", help=f"of the result files (default: {RESULTS}; with --smoke: {SMOKE})")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = parser()
    options = command.parse_args(arguments)
    folder = options.out or (SMOKE if options.smoke else RESULTS)
    try:
        seeds = [int(seed) for seed in options.seeds.split(",")] if options.seeds else None
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        command.error(str(error))
    words = sys.argv[1:] if arguments is None else list(arguments)
    importlib.import_module("kfac_optim")  # its version is one of the facts
    found = facts()  # before the runs: the code that they use, whatever the checkout becomes meanwhile
    for part in options.part or PARTS:
        result = learn(part, seeds, options.smoke)
        result = {"command": " ".join(["python -m benchmarks.first_look", *words]), **found, **result}
        path = folder / f"first_look-{part}.json"
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
