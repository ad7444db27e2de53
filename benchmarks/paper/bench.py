"""What all parts share: the data, the seeds, and how "GPUs" become batch sizes and learning rates.

The paper trains ResNets on CIFAR-10 and ImageNet, Mask R-CNN on COCO, BERT-Large on WikiText; KAISA adds a U-Net and
equal memory. Here stand ResNets on digits, a small detector with two heads, a small BERT on bytes and a small U-Net.
N GPUs become N times the batch; methods and ratios of lengths are the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeVar

from benchmarks.common.models import ResNet
from benchmarks.common.settings import resolve
from benchmarks.common.tasks import Task, digits
from benchmarks.paper.study import Figure, Place, Run, final

SEEDS = (0, 1)
Options = Mapping[str, Any]  # K-FAC keywords
SGD, CIFAR, LONG = 10, 5, 6  # epochs of SGD, of K-FAC on CIFAR-10 (half as many), and on ImageNet (55 for 90)
ACCURACY = Figure("accuracy, %", final("test_accuracy", 100), more=True, digits=2)
SECONDS = Figure("seconds", lambda run: run["cpu_seconds"], relative=True)  # of a whole run

W = TypeVar("W")
V = TypeVar("V")


# Blocks per stage; the first model is that of all parts but Table 5.
MODELS = {"ResNet-14": 2, "ResNet-8": 1, "ResNet-20": 3}
MODEL = next(iter(MODELS))
BATCH, LR = 32, 0.05  # of one "GPU"; N GPUs take N times as much of both


@lru_cache(None)
def digits_by(model: str) -> Task:
    """Digits by one of ``MODELS``; only the test split is evaluated."""
    task = digits()
    make = partial(ResNet, channels=1, blocks=MODELS[model])
    return replace(task, model=make, held_out={"test": task.held_out["test"]})


@dataclass(frozen=True)
class Bench:
    """What all parts share."""

    seeds: Sequence[int] = SEEDS  # One run of every cell for each
    smoke: bool = False  # Two steps of every run, on small batches

    def batch(self, size: int) -> int:
        """Return a batch size; small in a smoke run."""
        return max(2, size // 16) if self.smoke else size

    def run(self, task: Task, model: str, optimizer: str, seed: int, *, after: Run | None = None, **given: Any) -> Run:
        """Return a run; ``given``: settings, with "epochs" or "steps", "recipe" and "evaluations" (per epoch)."""
        recipe, evaluations = given.pop("recipe", "paper"), given.pop("evaluations", 2)
        batch = self.batch(given.pop("batch_size"))
        per_epoch = task.source.steps_per_epoch(batch)
        given = {"schedule": "step", "eval_every": max(1, per_epoch // evaluations), "warmup": per_epoch, **given}
        if self.smoke:
            given = {name: value for name, value in given.items() if name != "epochs"} | {"steps": 2, "warmup": 0}
            few = {split: (inputs[:16], targets[:16]) for split, (inputs, targets) in task.held_out.items()}
            task = replace(task, held_out=few)
        given |= {"batch_size": batch, "seed": seed}
        settings = resolve(task, optimizer, recipe=recipe, given=given)
        return Run(task, settings, model, after)

    def image_run(
        self, optimizer: str, seed: int, gpus: float, epochs: int, model: str = MODEL, kfac: Options | None = None
    ) -> Run:
        """Return a run of a ResNet on N GPUs' batch and learning rate."""
        options: dict[str, Any] = {"kfac": kfac} if kfac else {}
        options |= {"batch_size": round(gpus * BATCH), "lr": gpus * LR, "epochs": epochs}
        return self.run(digits_by(model), model, optimizer, seed, **options)

    def crossed(
        self, rows: Mapping[str, W], columns: Mapping[str, V], make: Callable[[int, W, V], Run]
    ) -> dict[Place, list[Run]]:
        """Return the runs of every place: ``make(seed, way, value)`` for each seed, row and column."""
        return {
            (row, column): [make(seed, way, value) for seed in self.seeds]
            for (row, way), (column, value) in product(rows.items(), columns.items())
        }
