"""Optimizers by name, built from a run's settings."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.common.settings import Settings, nearest
from benchmarks.common.tasks import Task
from kfac_optim import (
    Bernoulli,
    Categorical,
    Fisher,
    Gaussian,
    InverseSolver,
    KLClip,
    OfLargest,
    OfMean,
    growing,
)


@dataclass(frozen=True)
class Entry:
    """Where an optimizer class is found and what it takes."""

    module: str  # Module that holds the class
    # Settings passed on, beside the learning rate.
    keywords: tuple[str, ...] = ("weight_decay",)
    matrices_only: bool = False  # It refuses parameters that are not 2-dimensional
    takes_model: bool = False  # The class wants the module too, as ``model``
    has_rate: bool = True  # It takes a learning rate; else the module is all that it takes


OPTIMIZERS: dict[str, Entry] = {
    "SGD": Entry("torch.optim", ("momentum", "weight_decay")),
    "Adam": Entry("torch.optim"),
    "AdamW": Entry("torch.optim"),
    "Muon": Entry("benchmarks.peers.muon", ("momentum", "weight_decay"), matrices_only=True),
    "Lamb": Entry("torch_optimizer"),
    "SOAP": Entry("pytorch_optimizer"),
    "Shampoo": Entry("pytorch_optimizer", ("momentum", "weight_decay")),
    "KFACPyTorch": Entry("benchmarks.peers.kfac_pytorch", ("momentum", "weight_decay"), takes_model=True),
    "KFACJax": Entry("benchmarks.peers.kfac_jax", (), takes_model=True),
    "KFAC": Entry("kfac_optim", (), has_rate=False),
    "KFACSGD": Entry("kfac_optim", ("momentum", "weight_decay"), takes_model=True),
    "KFACAdam": Entry("kfac_optim", takes_model=True),
    "KFACAdamW": Entry("kfac_optim", takes_model=True),
    "KFACLAMB": Entry("kfac_optim", takes_model=True),
}
REST = tuple(
    name for name, entry in OPTIMIZERS.items() if entry.has_rate and not (entry.takes_model or entry.matrices_only)
)


def find(name: str) -> Callable[..., Optimizer]:
    """Return the class of an optimizer, by name.

    Raises:
        ValueError: If the name is unknown, or its package lacks it.
    """
    module = OPTIMIZERS[nearest("optimizer", name, OPTIMIZERS)].module
    try:
        found: Callable[..., Optimizer] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} needs {module}: {error}") from error
    return found


def interval(text: str) -> growing:
    """Return the schedule that ``"growing[:fraction[:minimum]]"`` names.

    Raises:
        ValueError: If the text names none.
    """
    word, *numbers = text.split(":")
    if word != "growing" or len(numbers) > 2:
        raise ValueError(f"{text!r} is neither a number of steps nor growing[:fraction[:minimum]]")
    kinds = {"fraction": float, "minimum": int}
    return growing(**{name: kind(number) for (name, kind), number in zip(kinds.items(), numbers, strict=False)})


DAMPINGS: dict[str, Callable[[float], Any]] = {"absolute": float, "mean": OfMean, "largest": OfLargest}
FISHERS: dict[str, type[Fisher]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


def kfac_keywords(settings: Settings) -> dict[str, Any]:
    """Return the K-FAC keywords of ``settings``, with the objects that its plain values stand for.

    The solver "inverse-plain" is the explicit inverse of eqs. 9-10 of the paper to the letter, without pi.

    Raises:
        ValueError: If a value stands for nothing.
    """
    given = dict(settings.kfac)
    for name in ("factor_update_steps", "inv_update_steps"):
        if isinstance(given.get(name), str):
            given[name] = interval(given[name])
    if relative := given.pop("damping_of", None):
        if "damping" not in given:
            raise ValueError("damping_of says what damping is relative to; give damping too")
        given["damping"] = DAMPINGS[nearest("unit of damping", relative, DAMPINGS)](given["damping"])
    word, _, number = str(given.get("scaling")).partition(":")
    if word == "kl_clip" and number:
        given["scaling"] = KLClip(float(number))
    if given.get("fisher") in FISHERS:
        given["fisher"] = FISHERS[given["fisher"]](seed=settings.seed)
    if given.get("solver") == "inverse-plain":
        given["solver"] = InverseSolver(pi=False)
    return given


def build(settings: Settings, task: Task, model: nn.Module) -> list[Optimizer]:
    """Return the optimizer of ``model`` and, if ``settings.rest`` names one, that of everything but hidden matrices.

    Raises:
        ValueError: If a name is unknown or the optimizer refuses the model or a value.
        TypeError: If the optimizer refuses a keyword.
    """
    entry, parameters = OPTIMIZERS[settings.optimizer], list(model.parameters())
    first = task.hidden(model) if settings.rest else parameters
    if entry.matrices_only and any(parameter.ndim != 2 for parameter in first):
        known = f"{task.name} has others among its hidden weights"
        reason = known if settings.rest else "give the others to --rest NAME"
        raise ValueError(f"{settings.optimizer} takes 2-dimensional weights only: {reason}")
    if not entry.has_rate:
        return [find(settings.optimizer)(model, **settings.options, **kfac_keywords(settings))]
    keywords = {"lr": settings.lr, **{name: getattr(settings, name) for name in entry.keywords}, **settings.options}
    keywords |= ({"model": model} if entry.takes_model else {}) | kfac_keywords(settings)
    built = [find(settings.optimizer)(first, **keywords)]
    if settings.rest:
        taken = {id(parameter) for parameter in first}
        others = [parameter for parameter in parameters if id(parameter) not in taken]
        decay = {"weight_decay": settings.weight_decay}
        built.append(find(nearest("rest optimizer", settings.rest, REST))(others, lr=settings.rest_lr, **decay))
    return built


def rate(schedule: str, warmup: int, steps: int, step: int) -> float:
    """Return the factor on the learning rate at ``step`` of ``steps``: 1 at the top of the schedule."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / (steps - warmup))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return 1 - progress
    if schedule == "step":
        return 0.1 ** ((progress >= 0.5) + (progress >= 0.75))
    return 1.0


def schedulers(settings: Settings, optimizers: list[Optimizer]) -> list[LambdaLR]:
    """Return one scheduler for each optimizer that has a learning rate, all with the same course."""
    course = partial(rate, settings.schedule, settings.warmup, settings.steps)
    return [LambdaLR(optimizer, course) for optimizer in optimizers if "lr" in optimizer.param_groups[0]]
