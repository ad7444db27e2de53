"""How much longer a whole training takes by the swap, base and swap taking turns step by step.

``python -m benchmarks.swap.times`` (from the repository root) runs the trainings of the suite and some larger works,
with one seed and on one thread, prints a table, and writes ``times.json`` and ``times.txt`` to
``benchmarks/results/swap/``. A base step and a swap step follow one another in one process, so that what disturbs the
machine hits both alike, and neither has the caches to itself. ``time`` is the ratio of their CPU seconds over the whole
training; the other columns say which part of the base's seconds each stage of the swap takes beside the base's own
step: ``decompositions`` with those in the background, ``the rest`` hooks, feedback and the turned step itself. Stages
are timed by the wall: other work on the machine makes them longer, and the rest shorter.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common.models import Transformer
from benchmarks.common.reports import Command, table
from benchmarks.common.settings import LEARNING_RATES, TASK_DEFAULTS
from benchmarks.common.tasks import TASKS
from benchmarks.common.works import WORKS
from benchmarks.swap import data
from benchmarks.swap.nets import RecurrentModel
from benchmarks.swap.supervised import language
from benchmarks.swap.training import Part, Run, Script, Training
from benchmarks.swap.trainings import HALVES, TRAININGS

WORDS = 30_000
NOISE = 4  # batches of noise that a work goes through in turn
STAGES = {
    "factor computation": "statistics",
    "factor update": "statistics",
    "decomposition": "decompositions",
    "decomposition in the background": "decompositions",
    "preconditioning": "preconditioning",
    "scaling": "preconditioning",
}
NOTE = "time: the swap's CPU seconds over the base's, of a whole training. Stages: in parts of the base's seconds."


def of_task(name: str) -> Script:
    """Return the script of a task of ``benchmarks.train``."""
    task = TASKS[name]()
    model = task.model()

    def loss(step: int) -> Any:
        inputs, targets = task.source.batch(0, step, TASK_DEFAULTS[name]["batch_size"])
        return task.loss(model(inputs), targets)

    return Script([Part(model, loss)])


def of_work(name: str) -> Script:
    """Return the script of a work of ``benchmarks.step_time``, on noise."""
    work = WORKS[name]
    model = work.make()

    def loss(step: int) -> Any:
        inputs, targets = work.data(step % NOISE)
        return work.loss(model(inputs), targets)

    return Script([Part(model, loss)])


def vocabulary(kind: str) -> Script:
    """Return the script of a language model with a vocabulary of 30,000 words, of which the text uses 3,594."""
    text, context = data.words(WORDS), 35
    if kind == "lstm":
        return language(RecurrentModel(WORDS, 128, 128), text, context, 20)
    model = Transformer(layers=2, width=128, heads=4, context=context, symbols=WORDS, tied=kind == "tied")
    return language(model, text, context, 20)


def larger(name: str, make: Callable[[], Script], optimizer: str, rate: float, steps: int, **options: Any) -> Training:
    """Return a work that is no part of the suite."""
    return Training(name, "larger", make, optimizer, {"lr": rate, **options}, "tuned", steps)


LARGER = [
    *(
        larger(task, partial(of_task, task), base, LEARNING_RATES[task][base], steps, **options)
        for task, base, steps, options in (
            ("digits", "SGD", 440, {"momentum": 0.9}),
            ("digits", "Adam", 440, {}),
            ("curves", "SGD", 300, {"momentum": 0.9}),
            ("curves", "Adam", 300, {}),
            ("text", "SGD", 400, {"momentum": 0.9}),
            ("text", "Adam", 400, {}),
        )
    ),
    larger("ResNet-32, batch 128", partial(of_work, "resnet32"), "SGD", 0.1, 100, momentum=0.9),
    larger("transformer, width 256", partial(of_work, "transformer"), "SGD", 0.1, 100, momentum=0.9),
    larger("vocabulary, LSTM", partial(vocabulary, "lstm"), "AdamW", 1e-3, 60),
    larger("vocabulary, GPT", partial(vocabulary, "untied"), "AdamW", 1e-3, 60),
    larger("vocabulary, tied GPT", partial(vocabulary, "tied"), "AdamW", 1e-3, 60),
]


def measure(training: Training) -> dict[str, Any]:
    """Return the row of a training."""
    base, swap = Run(training, 0, None), Run(training, 0, {})
    for run in (base, swap):
        run.script.judged = None  # which is no part of the training
    whole, begin = 0.0, time.process_time()
    for _ in tqdm(range(training.steps), desc=training.name, unit="step", leave=False, mininterval=5):
        start = time.thread_time()
        base.step()
        whole += time.thread_time() - start
        swap.step()
    # What ran in the background is the swap's, also where it ran while the base took its step.
    with_kfac = time.process_time() - begin - whole
    engines = [optimizer.curvature for optimizer in swap.optimizers]  # type: ignore[attr-defined]
    shares = dict.fromkeys(STAGES.values(), 0.0)
    for stage, of_stage in (item for engine in engines for item in engine.profile().items()):
        shares[STAGES[stage]] += of_stage["ms"] / 1e3 / whole
    ratio = with_kfac / whole
    return {
        "training": training.name,
        "half": training.half,
        "base": training.optimizer,
        "steps": training.steps,
        "ms": 1e3 * whole / training.steps,
        "time": ratio,
        "refreshes": max(engine.stages.refresher.refreshes for engine in engines),
        **shares,
        "the rest": ratio - 1 - sum(shares.values()),
    }


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for each group, and the geometric mean over the suite."""
    parts = []
    for group in (*HALVES, "larger"):
        if own := [{k: v for k, v in row.items() if k != "half"} for row in rows if row["half"] == group]:
            parts.append(table(group, own, NOTE))
    of_suite = [row["time"] for row in rows if row["half"] in HALVES]
    if of_suite:
        parts.append(
            f"the suite, {len(of_suite)} trainings, geometric mean: {statistics.geometric_mean(of_suite):.3f}\n"
        )
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("swap.times", __doc__)
    known = {f"{each.name}, {each.optimizer}" if each.half == "larger" else each.name: each for each in LARGER}
    known = {**TRAININGS, **known}
    command.add_argument("--only", action="append", choices=known, metavar="NAME", help=f"of {'; '.join(known)}")
    options, output = command.start(arguments, "a dozen steps of one training")
    chosen = [known[name] for name in options.only or (["mlp"] if options.smoke else known)]
    if options.smoke:
        chosen = [replace(each, steps=12) for each in chosen]
    torch.set_flush_denormal(True)  # of pixels, with which products take ten times as long on some CPUs
    rows: list[dict[str, Any]] = []
    for training in tqdm(chosen, desc="trainings", unit="training"):
        rows.append(measure(training))
        output.save("times", {"rows": rows}, tables(rows))
    print(f"{tables(rows)}\nwritten: {output.folder / 'times'}.json, .txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
