"""What a step takes of the host: ResNet-50 of tiny tensors, on which arithmetic takes no time.

``python -m benchmarks.step_time.host`` (from the repository root) trains a ResNet-50 with two channels for each 64 by
SGD and by KFACSGD, on one thread of the CPU, prints the median CPU milliseconds of each kind of step, and writes
``host.json`` and ``host.txt`` to ``benchmarks/results/step_time/``. On a GPU it is what the host takes to launch, with
the code for CPUs: there stacks are not put side by side.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.common.models import BottleneckResNet
from benchmarks.common.reports import Command, table
from benchmarks.step_time.contenders import NEVER, hold_trust
from kfac_optim import KFACSGD

# What torch takes by default on a GPU, for both.
OPTIONS: dict[str, Any] = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 1e-4, "foreach": True}
NOTE = "ms, median; step(): the optimizer's; passes: forward and backward. Trust is held at 0.5, every layer stretched."


class Loop:
    """A training, step by step."""

    def __init__(self, make: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = BottleneckResNet(width=2, classes=10)
        self.inputs, self.targets = torch.randn(2, 3, 32, 32), torch.randint(10, (2,))
        self.optimizer = make(self.model)

    def step(self) -> tuple[float, float]:
        """Take a step; return the milliseconds of the passes and of ``step()``."""
        self.optimizer.zero_grad()
        start = time.process_time()
        F.cross_entropy(self.model(self.inputs), self.targets).backward()
        between = time.process_time()
        self.optimizer.step()
        return 1e3 * (between - start), 1e3 * (time.process_time() - between)


def measure(count: int) -> list[dict[str, Any]]:
    """Return the rows, each of ``count`` steps."""
    base = Loop(lambda model: torch.optim.SGD(model.parameters(), **OPTIONS))
    swap = Loop(lambda model: KFACSGD(model, **OPTIONS))
    engine = swap.optimizer.curvature  # type: ignore[attr-defined]
    hold_trust(engine, 0.5)
    engine.inv_update_steps, engine.factor_update_steps, engine.spread = NEVER, 1, 0
    for _ in range(3):  # the first refresh; what opposes is known
        base.step()
        swap.step()
    rows = []

    def time_kind(name: str, loop: Loop, counts: Callable[[], bool] = lambda: True) -> None:
        taken: list[tuple[float, float]] = []
        gc.collect()
        with tqdm(total=count, desc=name, unit="step", leave=False, mininterval=5) as bar:
            while len(taken) < count:
                wanted = counts()
                step = loop.step()
                if wanted:
                    taken.append(step)
                    bar.update()
        passes, steps = (statistics.median(column) for column in zip(*taken, strict=True))
        rows.append({"step": name, "passes": passes, "step()": steps})

    def repeats() -> bool:
        return bool(engine.stages.plan().repeats)

    time_kind("SGD", base)
    engine.factor_update_steps = NEVER
    swap.step()
    time_kind("KFACSGD, computing directions", swap, lambda: not repeats())
    time_kind("KFACSGD, repeating them", swap, repeats)
    engine.factor_update_steps = 1
    swap.step()
    time_kind("KFACSGD, statistics, repeating", swap, repeats)
    engine.factor_update_steps, engine.inv_update_steps = NEVER, 1
    time_kind("KFACSGD, a refresh at once, computing", swap, lambda: not repeats())
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options, output = Command("step_time.host", __doc__).start(arguments, "two steps of each kind")
    torch.set_num_threads(1)
    rows = measure(2 if options.smoke else 40)
    text = table("ResNet-50, width 2, two images of 32 x 32 pixels: host time", rows, NOTE)
    output.save("host", {"rows": rows}, text)
    print(f"{text}\nwritten: {output.folder / 'host'}.json, .txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
