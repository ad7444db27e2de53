"""KAISA's equal memory: the base optimizer gets the batch that fills K-FAC's budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.common.runs import Line, Trainer
from benchmarks.common.tasks import Task
from benchmarks.paper.applications import PHASES, bert_run
from benchmarks.paper.bench import BATCH, LONG, MODEL, SGD, Bench, digits_by
from benchmarks.paper.resnets import scaled_interval
from benchmarks.paper.study import Figure, Place, Run, Study, until

BERT_GOAL = 3.05  # nats per masked byte


def bytes_per_example(task: Task, model: nn.Module, few: int = 8, many: int = 16) -> float:
    """Return what a forward pass keeps for the backward pass, for each example more: weights drop out."""
    return (saved_bytes(task, model, many) - saved_bytes(task, model, few)) / (many - few)


def saved_bytes(task: Task, model: nn.Module, examples: int) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, each storage once."""
    kept: dict[int, Tensor] = {}  # held, so that no storage's address is used again meanwhile

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs, targets = task.source.batch(0, 0, examples)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        task.loss(model(inputs), targets)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@dataclass(frozen=True)
class Footprint:
    """Bytes that a training takes."""

    fixed: int  # Weights, gradients, the base optimizer's state
    curvature: int  # K-FAC's state at its highest, when a statistics step holds the factors once more
    example: float  # Activations of one example

    def total(self, batch: int) -> float:
        """Return the bytes at a batch size."""
        return self.fixed + self.curvature + self.example * batch

    def fitting(self, budget: float) -> int:
        """Return the largest batch within a budget."""
        return int((budget - self.fixed - self.curvature) // self.example)


def footprint(run: Run) -> Footprint:
    """Measure a run of a base optimizer, or of K-FAC on top of it, after one step."""
    trainer = Trainer(run.task, run.settings)
    trainer.train_step()
    optimizer = trainer.optimizers[0]
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    own = (state for per in optimizer.state.values() for name, state in per.items() if not name.startswith("kfac"))
    fixed = 2 * weights + sum(state.nbytes for state in own if isinstance(state, Tensor))
    curvature = 0
    if hasattr(optimizer, "curvature"):
        estimate = optimizer.curvature.memory_estimate()
        curvature = estimate["total"] + estimate["factors"]
        optimizer.curvature.close()
    return Footprint(fixed, curvature, bytes_per_example(run.task, trainer.model))


@dataclass(frozen=True)
class Contest:
    """A base optimizer and K-FAC on it, of which the first may have a larger batch."""

    base: Callable[[int, int], Run]  # Batch size and seed -> run of the base optimizer over as many examples as K-FAC's
    kfac: Callable[[int], Run]  # Seed -> run of K-FAC
    goals: Mapping[str, float]  # The value of each metric that must be reached
    batch: int  # The batch size of K-FAC
    most: int  # Largest batch that is tried


def contests(bench: Bench) -> dict[str, Contest]:
    """Return the two applications that KAISA compares."""
    steps, usual, interval = 600, PHASES[0][2], scaled_interval(bench, 500, 2)
    return {
        MODEL: Contest(
            lambda batch, seed: bench.image_run("SGD", seed, batch / BATCH, SGD),
            lambda seed: bench.image_run("KFACSGD", seed, 2, LONG, kfac=interval),
            {"test_accuracy": digits_by(MODEL).target},
            batch=2 * BATCH,
            most=8 * BATCH,
        ),
        "BERT": Contest(
            lambda batch, seed: bert_run(bench, "Lamb", seed, 0, max(2, round(steps * usual / batch)), batch=batch),
            lambda seed: bert_run(bench, "KFACLAMB", seed, 0, steps),
            {"test_loss": BERT_GOAL},
            batch=usual,
            most=8 * usual,
        ),
    }


def memory(bench: Bench) -> Study:
    """Equal memory: the base optimizer gets the batch that fills K-FAC's budget."""
    rows = ["base, same batch", "base, same memory", "K-FAC"]
    runs: dict[Place, list[Run]] = {}
    known: dict[str, dict[Place, float]] = {"batch": {}, "megabytes": {}}
    found = contests(bench)
    for column, contest in found.items():
        with_kfac, without = footprint(contest.kfac(0)), footprint(contest.base(contest.batch, 0))
        larger = min(without.fitting(with_kfac.total(contest.batch)), contest.most)
        batches, sizes = (contest.batch, larger, contest.batch), (without, without, with_kfac)
        for row, batch, taken in zip(rows, batches, sizes, strict=True):
            make = contest.kfac if taken is with_kfac else partial(contest.base, batch)
            runs[row, column] = [make(seed) for seed in bench.seeds]
            known["batch"][row, column] = batch
            known["megabytes"][row, column] = taken.total(batch) / 1e6

    def seconds(run: Line) -> float | None:
        return until("cpu_seconds", found[run["run"]["model"]].goals)(run)

    return Study(
        title="KAISA: equal memory, the base optimizer (SGD, LAMB) with the batch that fills K-FAC's budget",
        rows=rows,
        columns=dict(zip(found, ("ResNet-50", "BERT-Large"), strict=True)),
        runs=runs,
        figures=[Figure("seconds to the goal", seconds, relative=True)],
        paper={},
        claim="under a fixed memory budget K-FAC needs 32.5 % (ResNet-50) and 41.6 % (BERT-Large) less time",
        base=lambda row, column: (rows[1], column),
        known=known,
        metrics=("test_loss",),
    )
