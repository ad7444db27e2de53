"""Counts one model's kinds of step; a process of its own, because the device has to be there before torch.

``python -m benchmarks.launches.count '{"name": "resnet50", ...}'`` prints the counts as a line of JSON. The kinds::

    base         a step of the base optimizer
    first        statistics and a refresh at once, which are always in the first step
    ordinary     the gradient, or the moment, is preconditioned
    damping      likewise, and the damping has fallen far enough for other eigenvalues to matter
    statistics   factors are updated as well
    refresh      factors are decomposed as well, in this step alone

Trust is held between 0 and 1, so that steps are turned in part.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from benchmarks.launches import device

device.load()

import torch  # noqa: E402

import kfac_optim  # noqa: E402
from benchmarks.common.works import SMOKE_WORKS, WORKS  # noqa: E402
from benchmarks.launches.simulate import simulated  # noqa: E402
from benchmarks.step_time.contenders import NEVER, hold_trust  # noqa: E402
from kfac_optim import OfLargest, growing  # noqa: E402

DAMPING, TRUST = 0.01, 0.5
BASE_OPTIONS = {"SGD": {"momentum": 0.9, "weight_decay": 1e-4}}
Counts = dict[str, dict[str, Any]]  # by "passes" (forward and backward) and "step"


def count(name: str, batch: int | None, optimizer: str) -> dict[str, Counts]:
    """Return the counts by kind of step.

    Args:
        name: The model.
        batch: Examples; None: as many as the model's work has.
        optimizer: Name of the K-FAC optimizer.
    """
    work = {**WORKS, **SMOKE_WORKS}[name]
    work = replace(work, batch=batch or work.batch)
    cls: Any = getattr(kfac_optim, optimizer)
    base = cls.__bases__[1]
    options: dict[str, Any] = {"lr": 1e-3, **BASE_OPTIONS.get(base.__name__, {})}
    with simulated() as simulation:
        with torch.device("cuda"):
            model = work.make()
        inputs, targets = (part.cuda() for part in work.data(0))

        def step(optimizer: torch.optim.Optimizer) -> Counts:
            optimizer.zero_grad()
            simulation.take()
            work.loss(model(inputs), targets).backward()
            passes = simulation.take()
            optimizer.step()
            return {"passes": vars(passes), "step": vars(simulation.take())}

        plain = base(model.parameters(), **options)
        step(plain)
        found = {"base": step(plain)}
        del plain
        options |= {"loss_average": work.loss_average, "damping": OfLargest(DAMPING), "spread": 0}
        own = cls(model, inv_update_steps=growing(0.5, 10), **options)  # never waits
        found["first"] = step(own)
        engine = own.curvature
        hold_trust(engine, TRUST)

        def coming(*, repeats: bool) -> Counts:
            while engine.stages.plan().repeats != repeats:
                step(own)
            return step(own)

        engine.factor_update_steps = engine.inv_update_steps = NEVER
        step(own)
        found["ordinary"] = coming(repeats=False)
        found["repeated"] = coming(repeats=True)  # as two of three are; the others are ordinary ones
        engine.damping = OfLargest(DAMPING / 2)
        found["damping"] = coming(repeats=False)
        engine.factor_update_steps = 1
        found["statistics"] = coming(repeats=False)
        engine.factor_update_steps = NEVER
        step(own)
        engine.inv_update_steps = 1
        found["refresh"] = coming(repeats=False)
    return found


if __name__ == "__main__":
    print(json.dumps(count(**json.loads(sys.argv[1]))))
    device.leave()
