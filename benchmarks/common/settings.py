"""The settings of a run: what each optimizer and task starts from, named recipes, and how they combine.

Later wins: common defaults, the task's, the optimizer's on that task, the recipe, the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.tasks import Task

KFAC = {
    "KFACSGD": "SGD",
    "KFACAdam": "Adam",
    "KFACAdamW": "AdamW",
    "KFACLAMB": "Lamb",
}  # and the class that each is built on
SCHEDULES = ("constant", "cosine", "linear", "step")

COMMON: dict[str, Any] = {"weight_decay": 0.0, "seed": 0, "threads": 1, "device": "cpu", "warmup": 0, "rest_lr": 0.003}

TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 20, "batch_size": 64, "schedule": "cosine", "eval_every": None},
    "curves": {"steps": 300, "batch_size": 1000, "schedule": "constant", "eval_every": 20},
    "text": {"steps": 400, "batch_size": 16, "schedule": "cosine", "eval_every": 50},
}

OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "KFACSGD": {"momentum": 0.9},
    "Muon": {"momentum": 0.95, "rest": "AdamW"},
    "Shampoo": {"momentum": 0.9},  # with rarer roots than its default, one per step, it diverges in ten steps
    "KFACPyTorch": {"momentum": 0.9, "options": {"damping": 0.001, "inv_update_steps": 10}},
    "KFACJax": {"options": {"initial_damping": 1.0}},
    "KFAC": {"kfac": {"fisher": "sampled"}},
}

_RATES = {
    "SGD": 0.1,
    "Adam": 0.003,
    "AdamW": 0.003,
    "Muon": 0.02,
    "Lamb": 0.01,
    "SOAP": 0.003,
    "Shampoo": 0.1,
    "KFACPyTorch": 0.1,
    "KFACJax": 1.0,  # not used
    "KFAC": 0.0,  # has none
    "KFACSGD": 0.1,
    "KFACAdam": 0.003,
    "KFACAdamW": 0.003,
    "KFACLAMB": 0.01,
}
LEARNING_RATES: dict[str, dict[str, float]] = {
    "digits": _RATES,
    "curves": {**_RATES, "SGD": 0.01},
    "text": {**_RATES, "SGD": 0.3, "Adam": 0.005, "AdamW": 0.005, "KFACSGD": 0.3},
}


@dataclass(frozen=True)
class Recipe:
    """A named set of settings for the K-FAC optimizers."""

    about: str  # One line for ``--help``
    kfac: Mapping[str, Any]  # K-FAC options for every optimizer and task
    # Settings for one task (with every optimizer).
    by_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Settings for one optimizer (on every task).
    by_optimizer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Settings for one task with one optimizer.
    by_both: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    def settings(self, task: str, optimizer: str) -> list[Mapping[str, Any]]:
        """Return what the recipe says of an optimizer on a task, the more special last."""
        both = self.by_both.get((task, optimizer), {})
        return [{"kfac": self.kfac}, self.by_task.get(task, {}), self.by_optimizer.get(optimizer, {}), both]


# KFACAdam and KFACLAMB take their momentum after preconditioning; they did better with the empirical Fisher and more
# damping.
_DIRECT = {"kfac": {"precondition": "gradient", "damping": 0.3, "fisher": "empirical"}}
_DIRECT_ON_CURVES = {"damping": 1.0, "inv_update_steps": "growing:0.3:3", "solver": "eigen"}  # inverses fail there

RECIPES: dict[str, Recipe] = {
    "paper": Recipe(
        about="the paper's method: preconditioned gradients, kl_clip, statistics every 10 and decompositions every 100 "
        "steps (curves: sampled Fisher, every 1 and 10)",
        kfac={
            "max_factor_dim": None,
            "precondition": "gradient",
            "scaling": "kl_clip",
            "damping": 0.03,
            "factor_decay": 0.95,
            "factor_update_steps": 10,
            "inv_update_steps": 100,
            "solver": "eigen",
        },
        by_task={
            "digits": {"kfac": {"damping": 0.3}},
            "curves": {"kfac": {"fisher": "sampled", "factor_update_steps": 1, "inv_update_steps": 10}},
        },
    ),
    "swap": Recipe(
        about="for K-FAC by the class name alone, at the learning rate of the class it is built on",
        kfac={},
    ),
    "practical": Recipe(
        about="preconditioned Nesterov momentum and (but for text) the sampled Fisher for KFACSGD, explicit inverses, "
        "unit scaling, relative damping, a refresh interval that grows with the step; on text statistics from a "
        "quarter of the batch, orthogonal scaling for KFACSGD, and AdamW has the head, embeddings and norms",
        kfac={
            "precondition": "momentum",
            "scaling": "unit",
            "damping_of": "mean",
            "damping": 0.03,
            "factor_decay": 0.95,
            "inv_update_steps": "growing:0.5:10",
            "solver": "inverse",
            "fisher": "sampled",
        },
        by_optimizer={
            "KFACSGD": {"options": {"nesterov": True}},
            "KFACAdam": _DIRECT,
            "KFACAdamW": _DIRECT,
            "KFACLAMB": _DIRECT,
        },
        by_task={
            "curves": {"kfac": {"damping": 0.001, "inv_update_steps": "growing:0.1:5"}},
            "text": {
                "rest": "AdamW",
                "rest_lr": 0.01,
                "kfac": {"fisher": "empirical", "inv_update_steps": "growing:0.1:2", "factor_batch_fraction": 0.25},
            },
        },
        by_both={
            ("digits", "KFACSGD"): {"lr": 0.02, "kfac": {"damping": 0.1}},
            ("digits", "KFACLAMB"): {"lr": 0.02, "kfac": {"damping": 1.0}},
            ("curves", "KFACSGD"): {"lr": 0.05},
            ("curves", "KFACAdam"): {"lr": 0.006, "kfac": _DIRECT_ON_CURVES},
            ("curves", "KFACLAMB"): {"lr": 0.04, "kfac": _DIRECT_ON_CURVES},
            ("text", "KFACSGD"): {"lr": 0.06, "rest_lr": 0.03, "kfac": {"scaling": "orthogonal"}},
        },
    ),
}


@dataclass(frozen=True)
class Settings:
    """Everything that determines a run; plain values only, so that it can be logged and compared."""

    task: str  # Name in ``TASKS``
    optimizer: str  # Name in ``OPTIMIZERS``
    lr: float  # Learning rate at the top of the schedule
    momentum: float | None  # None for optimizers without one
    weight_decay: float  # Left out for optimizers that take none
    schedule: str  # One of ``SCHEDULES``
    warmup: int  # Steps of linear increase before the schedule
    steps: int  # Length of the run
    batch_size: int  # Examples per step
    seed: int  # Seed of the initial weights, the order of the data and sampled targets
    threads: int  # CPU threads that torch uses
    device: str  # "cpu" or "cuda"
    eval_every: int  # Steps between evaluations
    rest: str | None  # Optimizer of everything but the hidden matrices, or None: one optimizer for all parameters
    rest_lr: float  # Learning rate of ``rest``
    options: dict[str, Any]  # Further keywords of the optimizer's base rule
    # K-FAC keywords as plain values, which ``benchmarks.common.optimizers`` builds the objects from:
    # ``growing(...)`` is written "growing:fraction:minimum", ``KLClip(k)`` "kl_clip:k", and "damping_of" says what the
    # damping is relative to.
    kfac: dict[str, Any]

    def __post_init__(self) -> None:
        checks = {
            "lr": (self.lr >= 0, "at least 0"),
            "momentum": (self.momentum is None or 0 <= self.momentum < 1, "in [0, 1)"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "warmup": (0 <= self.warmup < max(self.steps, 1), f"from 0 to fewer than the run's {self.steps} steps"),
            "steps": (self.steps >= 1, "at least 1"),
            "seed": (self.seed >= 0, "at least 0"),
            "threads": (self.threads >= 1, "at least 1"),
            "eval_every": (self.eval_every >= 1, "at least 1"),
            "rest_lr": (self.rest_lr >= 0, "at least 0"),
        }
        for name, (holds, allowed) in checks.items():
            if not holds:
                raise ValueError(f"--{name.replace('_', '-')}: {getattr(self, name)} is not allowed, must be {allowed}")
        nearest("schedule", self.schedule, SCHEDULES)


def nearest(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is known.

    Raises:
        ValueError: With the list of known names and, if one is similar, a suggestion.
    """
    known = list(known)
    if name in known:
        return name
    spelled = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.5)
    hint = f" (did you mean {spelled[close[0]]!r}?)" if close else ""
    raise ValueError(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}")


def combine(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge settings, later ones first: ``kfac``, ``options`` by key; ``steps`` and ``epochs`` replace each other."""
    merged: dict[str, Any] = {"options": {}, "kfac": {}, "rest": None}
    for layer in layers:
        for length in {"steps", "epochs"} & layer.keys():
            merged.pop({"steps": "epochs", "epochs": "steps"}[length], None)
        merged |= {**layer, **{group: {**merged[group], **layer.get(group, {})} for group in ("kfac", "options")}}
    return merged


def resolve(
    task: Task, optimizer: str, *, recipe: str | None = None, given: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings of ``optimizer`` on ``task``: defaults, then the recipe, then what is ``given``.

    Recipe and ``given["kfac"]`` are for K-FAC optimizers and left out for all others.

    Raises:
        ValueError: If a name is unknown or a value is out of range.
    """
    name, is_kfac = task.name, optimizer in (*KFAC, "KFAC")
    layers: list[Mapping[str, Any]] = [COMMON, {"momentum": None}, OPTIMIZER_DEFAULTS.get(optimizer, {})]
    if name in TASK_DEFAULTS:  # others are given everything
        layers += [TASK_DEFAULTS[name], {"lr": LEARNING_RATES[name][optimizer]}]
    if recipe is not None and optimizer in KFAC:
        layers += RECIPES[nearest("recipe", recipe, RECIPES)].settings(name, optimizer)
    merged = combine([*layers, given or {}])

    per_epoch = task.source.steps_per_epoch(merged["batch_size"])
    if "epochs" in merged:
        merged["steps"] = merged.pop("epochs") * per_epoch
    if merged["eval_every"] is None:
        merged["eval_every"] = per_epoch
    kfac = {"loss_average": task.loss_average, **merged["kfac"]} if is_kfac else {}
    if kfac.get("fisher") == "sampled":
        kfac["fisher"] = task.fisher
    return Settings(task=name, optimizer=optimizer, **{**merged, "kfac": kfac})
