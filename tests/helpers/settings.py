"""The options that tests run with: every set of them stands here, once."""

from __future__ import annotations

from typing import Any

import torch
import torch_optimizer

from kfac_optim import KFACLAMB, KFACSGD, EigenSolver, Graft, InverseSolver, KFACAdam, KFACAdamW, KLClip, OfMean


def damping_of(value: Any, relative: bool) -> Any:
    """A damping that is absolute, or relative to the mean eigenvalue."""
    return OfMean(value) if relative else value


FLOAT64: dict[str, Any] = {"factor_dtype": torch.float64, "inv_dtype": torch.float64}
# Statistics and refreshes at intervals that do not divide each other, so that a few steps see every combination.
OFTEN: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 3, "factor_decay": 0.95, "damping": 0.1}
# Where trust is learned, the first steps are the base class's own: whatever K-FAC gets wrong, they would not show it.
SETTINGS: dict[str, Any] = {**FLOAT64, **OFTEN, "scaling": Graft(trust=1.0)}

CLASSES: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    KFACSGD: {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    KFACAdam: {"lr": 0.01},
    KFACLAMB: {"lr": 0.01, "weight_decay": 1e-3},
}
# KFACAdamW differs from KFACAdam in its base class alone: for tests of what base classes do.
ALL_CLASSES = {**CLASSES, KFACAdamW: {"lr": 0.01, "weight_decay": 0.1}}

# By a name that test parameters can have; SGD's other mode is a kind of its own.
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (KFACSGD, CLASSES[KFACSGD]),
    "momentum": (KFACSGD, {"lr": 0.02, "momentum": 0.9, "precondition": "momentum", "scaling": "unit"}),
    "adam": (KFACAdam, CLASSES[KFACAdam]),
    "adamw": (KFACAdamW, ALL_CLASSES[KFACAdamW]),
    "lamb": (KFACLAMB, CLASSES[KFACLAMB]),
}

BASES: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    KFACSGD: torch.optim.SGD,
    KFACAdam: torch.optim.Adam,
    KFACAdamW: torch.optim.AdamW,
    KFACLAMB: torch_optimizer.Lamb,
}

SOLVERS: dict[str, object] = {  # by the names of SOLVES
    "eigen": EigenSolver(negligible=0.0),
    "inverse": "inverse",
    "inverse without pi": InverseSolver(pi=False),
}

# The paper's own update with every convenience switched off: the applied weight change is minus the damped solve.
EXACT: dict[str, object] = {
    "lr": 1.0,
    "momentum": 0.0,
    "precondition": "gradient",
    "scaling": None,
    "factor_update_steps": 1,
    "inv_update_steps": 1,
    "factor_decay": 0.95,
    "factor_dtype": torch.float64,
    "inv_dtype": torch.float64,
    "spread": 0,
    "solver": SOLVERS["eigen"],
}

# EXACT, at a damping that neither hides the curvature nor leaves it alone, and a step that keeps training stable.
OPTIONS: dict[str, object] = EXACT | {"lr": 0.1, "damping": 0.1}

# The paper's way, in which the scale of the loss and so M, the number of loss terms, tells: a wrong one is seen.
PAPER = OFTEN | {"precondition": "gradient", "scaling": KLClip(1e-2), "damping": 0.03, "spread": 0}

# For states that are saved after K of END steps. Refreshes begin at 0, 4, 8 and 12: the statistics of step 5 are in no
# refresh yet, and one that is spread over 3 steps is in progress at 6, where the one before it is still in use.
K, END = 6, 13
RESUMED = FLOAT64 | {"damping": 0.1, "scaling": KLClip(1e-2), "factor_update_steps": 1, "inv_update_steps": 4}
