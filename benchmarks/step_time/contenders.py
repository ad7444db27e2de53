"""The optimizers whose steps are compared: a base optimizer, K-FAC on it, and kfac-pytorch before it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.common.optimizers import find, interval
from benchmarks.common.settings import KFAC, OPTIMIZER_DEFAULTS, RECIPES
from benchmarks.common.works import Work
from kfac_optim import CurvatureEngine, EigenSolver, Graft
from kfac_optim.steering.trust import Trust

NEVER = 10**9  # an interval longer than any run
LARGEST = 8192  # factor that kfac-pytorch gets
LR = 1e-4  # no time depends on it
PEER = "KFACPyTorch"
SOLVERS: dict[str, Any] = {"eigen": "eigen", "inverse": "inverse", "eigen-exact": EigenSolver(negligible=0)}
LATER = 60  # By so many steps, at which directions are no longer computed more often than they are later on


class Held(Trust):
    """Trust that stays where it is, at the cost of one that is learned, and of steps later in a training.

    Args:
        value: The trust, in [0, 1].
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.load({"trust": round(10 * value)})

    def learn(self, *lessons: Any, **more: Any) -> None:
        """Learn nothing."""

    def repeats(self, step: int, *, stretches: bool) -> bool:
        """Say what a later step of the same place in the schedule would do."""
        return super().repeats(step + LATER, stretches=stretches)


def hold_trust(engine: CurvatureEngine, value: float) -> None:
    """Hold trust where it is, in [0, 1], and let it be known that the network trains against no other one."""
    steering = engine.stages.steering
    steering.trust = Held(value)
    for part in (steering.graft, steering.brake):
        vars(part)["learn"] = lambda *_, **__: None
    steering.game.load({"opposes": 0})


@dataclass(frozen=True)
class Contender:
    """An optimizer with its settings."""

    label: str  # Name in tables
    optimizer: str  # Name in ``OPTIMIZERS``
    options: Mapping[str, Any] = field(default_factory=dict)  # K-FAC keywords
    trust: float | None = None  # That is held instead of learned

    def build(self, model: nn.Module, work: Work) -> tuple[Any, Any]:
        """Return the optimizer, and what keeps its curvature: the engine, kfac-pytorch's preconditioner, or None."""
        keywords: dict[str, Any] = {"lr": LR, **OPTIMIZER_DEFAULTS.get(self.optimizer, {}), **self.options}
        if self.optimizer in KFAC:
            keywords = {"model": model, "loss_average": work.loss_average, **keywords}
            if "solver" in keywords:
                keywords["solver"] = SOLVERS[keywords["solver"]]
            if "inv_update_steps" in keywords:
                keywords["inv_update_steps"] = interval(keywords["inv_update_steps"])
        elif self.optimizer == PEER:
            keywords = {"model": model, "weight_decay": 0.0, **keywords.pop("options"), **keywords}
        optimizer: Any = find(self.optimizer)(model.parameters(), **keywords)
        if self.trust is not None:
            hold_trust(optimizer.curvature, self.trust)
            if not self.trust:  # steps that do not turn are not stretched either
                optimizer.curvature.scaling = Graft(stretch=False)
        return optimizer, getattr(optimizer, "curvature", getattr(optimizer, "preconditioner", None))


def contenders(
    work: Work,
    optimizer: str,
    solvers: Sequence[str],
    *,
    spread: int | None = 0,
    fractions: Sequence[float] = (1.0,),
) -> list[Contender]:
    """Return the base of a K-FAC optimizer, then that in the paper's mode with each solver, and kfac-pytorch likewise.

    Args:
        work: What they are to train.
        optimizer: Name of the K-FAC optimizer; kfac-pytorch takes part beside ``KFACSGD``.
        solvers: Names in ``SOLVERS``.
        spread: Steps of a refresh, in the paper's mode; None: a tenth of the interval, the package's default.
        fractions: Shares of a batch's examples that statistics see, in the paper's mode; each is a row.
    """
    base = KFAC[optimizer]
    paper = {name: value for name, value in RECIPES["paper"].kfac.items() if not name.endswith("_steps")}
    found = [Contender(base, base)]
    for solver, fraction in itertools.product(solvers, fractions):
        options = {**paper, "solver": solver, "spread": spread, "factor_batch_fraction": fraction}
        share = "" if fraction == 1 else f", {fraction:g} of the batch"
        found.append(Contender(f"{optimizer} {solver}{share}", optimizer, options))
    # A large vocabulary's factor, which ours keeps diagonal, kfac-pytorch could not decompose.
    skipped = ["head", "decoder"] if work.symbols > LARGEST else []
    for solver in ("eigen", "inverse"):
        if solver in solvers and base == "SGD":
            options = {"compute_method": solver, "skip_layers": skipped}
            found.append(Contender(f"kfac-pytorch {solver} + {base}", PEER, options))
    return found


def defaults(optimizer: str) -> list[Contender]:
    """Return the base of a K-FAC optimizer, what the package does by itself, and that where it is dearest.

    On noise trust stays near 0, where most steps are the base optimizer's own; and refreshes that take long wait. In
    the last row trust is held at 0.5, so that every third step computes directions, and no refresh waits.
    """
    options = {"inv_update_steps": "growing:0.5:10"}
    dearest = Contender(f"{optimizer} defaults, trust 0.5, no waits", optimizer, options, trust=0.5)
    return [Contender(KFAC[optimizer], KFAC[optimizer]), Contender(f"{optimizer} defaults", optimizer), dearest]
