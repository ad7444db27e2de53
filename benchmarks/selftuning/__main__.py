"""KFAC, which has no learning rate, beside optimizers with one: large batches, where it belongs, and small ones.

``python -m benchmarks.selftuning`` (from the repository root) trains every contender of a study with each seed, prints
a table of medians with their range, and writes ``STUDY.json`` and ``.png`` to ``benchmarks/results/selftuning/``.
Nothing is tuned for KFAC: it runs with its defaults. The others have the settings that ``benchmarks.convergence`` has
chosen (curves), those of ``benchmarks.common.settings``, or the best of five learning rates by the training loss at
the end (AdamW, one seed). Runs of one seed are made one after the other, so that their seconds compare.

    curves      deep autoencoder, batches of 1000
    pictures    deep autoencoder of scikit-learn's digits (8x8 pixels), batches of 479, a third of the data
    whole       digits by a perceptron, all 1437 images in every batch
    digits-N    digits by the ResNet of ``digits`` with BatchNorm, batches of N
    text-N      bytes by the transformer of ``text``, N sequences of 128

Training losses are running averages (weight of the past 0.9).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from benchmarks.common import plots
from benchmarks.common.models import autoencoder
from benchmarks.common.reports import Command, Output, whole_numbers
from benchmarks.common.runs import Line, Record
from benchmarks.common.settings import resolve
from benchmarks.common.tasks import SPLIT_SEED, Examples, Task, curves, digits, pixel_cross_entropy, text
from benchmarks.convergence.__main__ import FIXED_STEPS, Results, lines_of, record_of
from benchmarks.swap.nets import mlp

RATES = (0.001, 0.003, 0.01, 0.03, 0.1)  # of AdamW where none was chosen
MUON = {"lr": 0.02, "rest_lr": 0.01}  # on curves, as benchmarks.convergence has chosen
# KFACSGD's, as it had chosen when the recipe had the eigen solver
PRACTICAL = {"lr": 0.05, "kfac": {"damping": 0.01, "solver": "eigen"}}
WIDTHS = (64, 48, 32, 16, 6)  # of the small autoencoder, from the image to the code
PICTURES_TARGET = 20.0


def pictures() -> Task:
    """The images of ``digits``, each pixel a probability, by an autoencoder."""
    pixels = torch.from_numpy(load_digits().images).float().flatten(1) / 16
    train, test = train_test_split(np.arange(len(pixels)), test_size=0.2, random_state=SPLIT_SEED)
    return Task(
        name="pictures",
        model=partial(autoencoder, WIDTHS),
        loss=pixel_cross_entropy,
        source=Examples(pixels[train], pixels[train]),
        held_out={"test": (pixels[test], pixels[test])},
        fisher="bernoulli",
        loss_average="batch",
        outer=(),
        target=PICTURES_TARGET,
        scores={},
    )


def perceptron() -> nn.Module:
    """Three hidden layers of tanh."""
    return nn.Sequential(nn.Flatten(), *mlp(64, 64, 48, 32, 10, activation=nn.Tanh))


def whole() -> Task:
    """The classes of ``digits`` by a perceptron."""
    return replace(digits(), name="whole", model=perceptron, outer=())


Contender = tuple[str, str | None, Mapping[str, Any]]  # optimizer, recipe, settings


@dataclass(frozen=True)
class Study:
    """A task, how it is trained, and by what."""

    task: Callable[[], Task]
    length: Mapping[str, Any]  # Settings of all runs
    contenders: Mapping[str, Contender]  # By label
    rates: tuple[float, ...] = ()  # Of which AdamW has the best


KFAC: Contender = ("KFAC", None, {"lr": 0.0, "schedule": "constant"})
UNKNOWN: dict[str, Contender] = {"KFAC": KFAC, "AdamW": ("AdamW", None, {})}
KNOWN: dict[str, Contender] = {**UNKNOWN, "KFACSGD for SGD": ("KFACSGD", "swap", {})}
CURVES: dict[str, Contender] = {
    "KFAC": KFAC,
    "Muon": ("Muon", None, MUON),
    "KFACSGD": ("KFACSGD", "practical", PRACTICAL),
    "KFACJax": ("KFACJax", None, {}),
}
PLAIN = {"schedule": "constant"}
STUDIES: dict[str, Study] = {
    "curves": Study(curves, {"steps": 200, "eval_every": 10}, CURVES),
    "pictures": Study(pictures, {"steps": 150, "eval_every": 10, "batch_size": 479, **PLAIN}, UNKNOWN, RATES),
    "whole": Study(whole, {"steps": 60, "eval_every": 5, "batch_size": 1437, **PLAIN}, UNKNOWN, RATES),
    **{f"digits-{n}": Study(digits, {"steps": 110, "eval_every": 22, "batch_size": n}, KNOWN) for n in (16, 64, 359)},
    **{f"text-{n}": Study(text, {"steps": 80, "eval_every": 20, "batch_size": n}, KNOWN) for n in (4, 16, 64)},
}


class Runs:
    """The runs of a study.

    Args:
        output: The folder of its file.
        name: Of the study.
        smoke: Whether to take two steps only.
    """

    def __init__(self, output: Output, name: str, smoke: bool) -> None:
        self.study = STUDIES[name]
        self.results = Results(output, self.study.task(), name)
        self.length = {**self.study.length, **({"steps": 2, "eval_every": 1} if smoke else {})}

    def run(self, label: str, seed: int, **more: Any) -> Line:
        """Return the run of a contender with a seed."""
        optimizer, recipe, given = self.study.contenders[label]
        given = {**self.length, **given, **more, "seed": seed}
        settings = resolve(self.results.task, optimizer, recipe=recipe, given=given)
        return self.results.run(f"{label} seed {seed}", settings, of=label)

    def rate(self, label: str, seed: int) -> dict[str, Any]:
        """Return AdamW's learning rate with the lowest training loss at the end; nothing for the others."""
        if label != "AdamW" or not self.study.rates:
            return {}
        losses = {lr: self.run(label, seed, lr=lr)["evaluations"][-1]["train_loss"] for lr in self.study.rates}
        return {"lr": min(losses, key=lambda lr: math.inf if losses[lr] is None else losses[lr])}

    def measure(self, seeds: Sequence[int]) -> str:
        """Train everything, write file and picture; return the table."""
        rates: dict[str, dict[str, Any]] = {}
        skipped: dict[str, str] = {}
        records: dict[str, list[Record]] = {}
        for seed in seeds:
            for label in self.study.contenders:
                if label in skipped:
                    continue
                try:
                    if label not in rates:
                        rates[label] = self.rate(label, seeds[0])
                    records.setdefault(label, []).append(record_of(self.run(label, seed, **rates[label])))
                except ValueError as error:  # its package is missing
                    skipped[label] = str(error)
        records = {label: found for label, found in records.items() if label not in skipped}
        results, lines = self.results, table(self.results.task, records)
        results.write(seeds=list(seeds), chosen=rates, skipped=skipped, table=lines)
        results.output.picture(results.stem, plots.of_medians(results.task, records))
        return "\n".join([*lines, *(f"{label} left out: {reason}" for label, reason in skipped.items())])


def table(task: Task, records: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return the table, and what it is about."""
    steps = next(iter(records.values()))[0].header["settings"]["steps"]
    note = f"{task.name}, {steps} steps, {task.goal}; loss: training, running average"
    return [*lines_of(task, records, [f"{share:.0%}" for share in FIXED_STEPS]), note]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("selftuning", __doc__)
    command.add_argument("--study", action="append", choices=tuple(STUDIES), help="may be repeated (default: all)")
    seeds = "of the runs (default: 0,1,2)"
    command.add_argument("--seeds", type=whole_numbers, default=[0, 1, 2], metavar="N,...", help=seeds)
    options, output = command.start(arguments, "two steps of each run")
    for name in options.study or STUDIES:
        print(Runs(output, name, options.smoke).measure(options.seeds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
