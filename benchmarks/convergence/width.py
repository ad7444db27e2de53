"""Does the best learning rate depend on the width of the model?

``python -m benchmarks.convergence.width`` (from the repository root) trains the task ``text`` with transformers of
several widths and five learning rates for each optimizer, and prints for each width the rate with the lowest training
loss and what the best rate of the narrowest model costs there. It writes ``width.json``, ``.txt`` and ``.png`` to
``benchmarks/results/convergence/``. One seed; the loss is the running average (weight of the past 0.9) at the last
step. The optimizer of head, embeddings and norms (Muon, and KFACSGD by the recipe "practical") keeps its rate.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.common.models import Transformer
from benchmarks.common.reports import Command, grid, table
from benchmarks.common.runs import train
from benchmarks.common.settings import LEARNING_RATES, resolve
from benchmarks.common.tasks import text

WIDTHS = (32, 64, 128)
STEPS = 60
POWERS = (-2, -1, 0, 1, 2)  # of 2, that the middle rate is multiplied by
# Optimizer and recipe, by label, and the middle rate.
CONTENDERS: dict[str, tuple[str, str | None, float]] = {
    "KFACSGD, practical": ("KFACSGD", "practical", 0.06),
    "KFACSGD, swap": ("KFACSGD", "swap", LEARNING_RATES["text"]["SGD"]),
    "KFACAdam, swap": ("KFACAdam", "swap", LEARNING_RATES["text"]["Adam"]),
    "Muon": ("Muon", None, 0.04),
    "Adam": ("Adam", None, LEARNING_RATES["text"]["Adam"]),
    "SGD": ("SGD", None, LEARNING_RATES["text"]["SGD"]),
}
REST_LR = 0.02


def losses(label: str, widths: Sequence[int], steps: int) -> dict[int, dict[float, float | None]]:
    """Return the training loss at the end by width and learning rate; None where a run did not get there."""
    optimizer, recipe, middle = CONTENDERS[label]
    found: dict[int, dict[float, float | None]] = {}
    for width in widths:
        task = replace(text(), model=partial(Transformer, width=width))
        found[width] = {}
        for rate in (middle * 2.0**power for power in POWERS):
            given = {"lr": rate, "steps": steps, "eval_every": steps, "rest_lr": REST_LR}
            settings = resolve(task, optimizer, recipe=recipe, given=given)
            _, record = train(task, settings, f"{label}, width {width}, lr {rate:g}")
            found[width][rate] = record.evaluations[-1]["train_loss"] if record.end == "finished" else None
    return found


def best(curve: Mapping[float, float | None]) -> tuple[float, float]:
    """Return the rate with the lowest loss, and the loss."""
    reached = {rate: loss for rate, loss in curve.items() if loss is not None}
    rate = min(reached, key=lambda each: reached[each])
    return rate, reached[rate]


def row(label: str, curves: Mapping[int, Mapping[float, float | None]]) -> dict[str, Any]:
    """Return an optimizer's row: its best rates, and the loss of the widest model there and at the narrowest's."""
    chosen = {width: best(curve) for width, curve in curves.items()}
    narrow, wide = min(curves), max(curves)
    kept = curves[wide][chosen[narrow][0]]
    rates = {f"lr at {width}": rate for width, (rate, _) in chosen.items()}
    loss = chosen[wide][1]
    return {"optimizer": label, **rates, f"loss at {wide}": loss, f"with the lr of {narrow}": kept}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("convergence.width", __doc__)
    command.add_argument("--optimizer", action="append", choices=CONTENDERS, help="may be repeated (default: all)")
    options, output = command.start(arguments, "two steps of two small models")
    steps, widths = (2, (8, 16)) if options.smoke else (STEPS, WIDTHS)
    found = {label: losses(label, widths, steps) for label in options.optimizer or CONTENDERS}
    rows = [row(label, curves) for label, curves in found.items()]
    shown = table(f"text, {steps} steps: best learning rate by width of the transformer", rows)
    output.save("width", {"steps": steps, "seed": 0, "rest_lr": REST_LR, "losses": found}, shown)
    figure, axes = grid(-(-len(found) // 3), 3, f"text: training loss after {steps} steps, by width of the transformer")
    for panel, (label, curves) in zip(axes.flat, found.items(), strict=False):
        for width, curve in curves.items():
            reached = {rate: loss for rate, loss in curve.items() if loss is not None}
            panel.plot(list(reached), list(reached.values()), marker="o", label=f"width {width}")
        panel.set(title=label, xscale="log", xlabel="lr", ylabel="training loss")
        panel.legend(fontsize="small")
    output.picture("width", figure)
    print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
