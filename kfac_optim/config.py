"""What may be set on an engine, when, and how it is checked.

Hyperparameters may be changed during training; what a layer is, how it is stored and who works on it may not.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .capture import Bernoulli, Categorical, Fisher, Gaussian, LossAverage
from .distributed import KAISA, AssignmentStrategy, FactorWise, LayerWise
from .layers import Sharing
from .scaling import Graft, Scaling, Unit
from .schedules import (
    Schedule,
    flag,
    instance,
    one_of,
    optional_callable,
    optional_count,
    patterns,
    scheduled,
    value_at,
)
from .solvers import EigenSolver, InverseSolver, Solver

__all__ = ["Options"]

# Short names of instances; anything else passed for these options must be an instance with the protocol's method.
_SOLVERS = {"eigen": EigenSolver(), "inverse": InverseSolver()}
_SCALINGS = {"unit": Unit(), "graft": Graft()}
_FISHERS = {"categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}
_ASSIGNMENTS = {"layer-wise": LayerWise(), "factor-wise": FactorWise(), "kaisa": KAISA(grad_worker_fraction=1.0)}


def _dtype(name: str) -> Callable[[Any], Any]:
    return one_of(name, (torch.float16, torch.bfloat16, torch.float32, torch.float64))


def _grad_scaler(value: Any) -> Any:
    if value is not None and not isinstance(value, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler={value!r}: must be a torch.amp.GradScaler or None")
    return value


class Options:
    """The options of an engine, as attributes: checked at construction and whenever they are set.

    Args:
        given: A value for each.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If it is out of range.
    """

    _built: bool

    # May be changed during training.
    _hyperparameters: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "damping": scheduled("damping", float, "> 0", lambda x: 0 < x < math.inf),
        "relative_damping": flag("relative_damping"),
        "factor_decay": scheduled("factor_decay", float, "in [0, 1)", lambda x: 0 <= x < 1),
        "factor_update_steps": optional_count("factor_update_steps", or_callable=True),
        "factor_batch_fraction": scheduled("factor_batch_fraction", float, "in (0, 1]", lambda x: 0 < x <= 1),
        "inv_update_steps": scheduled("inv_update_steps", int, ">= 1", lambda x: x >= 1),
        "scaling": instance("scaling", _SCALINGS, "multipliers", ("kl_clip", None)),
        "kl_clip": scheduled("kl_clip", float, "> 0", lambda x: 0 < x < math.inf),
        "spread": optional_count("spread", or_callable=True, least=0),
        "grad_scaler": _grad_scaler,
        "skip_nonfinite": flag("skip_nonfinite"),
    }
    # May not.
    _fixed: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "solver": instance("solver", _SOLVERS, "precondition"),
        "fisher": instance("fisher", _FISHERS, "sample_gradient", ("empirical",)),
        "loss_average": one_of("loss_average", ("batch", "batch+sequence", "elements", None)),
        "loss_terms": optional_count("loss_terms", or_callable=True),
        "batch_dim": one_of("batch_dim", (0, 1)),
        "weight_sharing": one_of("weight_sharing", ("expand", "reduce"), or_callable=True),
        "skip_layers": patterns("skip_layers"),
        "max_factor_dim": optional_count("max_factor_dim"),
        "assignment": instance("assignment", _ASSIGNMENTS, "assign"),
        "output_fn": optional_callable("output_fn"),
        "seed": scheduled("seed", int, "an int", lambda x: True),
        "factor_dtype": _dtype("factor_dtype"),
        "inv_dtype": _dtype("inv_dtype"),
    }

    damping: Schedule[float]
    relative_damping: bool
    factor_decay: Schedule[float]
    factor_update_steps: Schedule[int] | None
    factor_batch_fraction: Schedule[float]
    inv_update_steps: Schedule[int]
    scaling: Scaling | str | None
    kl_clip: Schedule[float]
    spread: Schedule[int] | None
    grad_scaler: torch.amp.GradScaler | None
    skip_nonfinite: bool
    solver: Solver
    fisher: Fisher | str
    loss_average: LossAverage | None
    loss_terms: int | Callable[[Any, Any], int] | None
    batch_dim: int
    weight_sharing: Sharing | Callable[[str, nn.Module], Sharing]
    skip_layers: tuple[str, ...]
    max_factor_dim: int | None
    assignment: AssignmentStrategy
    output_fn: Callable[[Any], Tensor] | None
    seed: int
    factor_dtype: torch.dtype
    inv_dtype: torch.dtype

    def __init__(self, given: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_built", False)  # from then on a new public name is a misspelt one
        self.step_count = 0
        for name in (*self._hyperparameters, *self._fixed):
            object.__setattr__(self, name, self._check(name, given[name]))

    @classmethod
    def _check(cls, name: str, value: Any) -> Any:
        return (cls._hyperparameters.get(name) or cls._fixed[name])(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed and hasattr(self, name):
            changeable = ", ".join(self._hyperparameters)
            raise AttributeError(f"{name} is fixed at construction; what can be changed during training: {changeable}")
        if name in self._hyperparameters:
            value = self._check(name, value)
        elif self._built and not name.startswith("_") and not hasattr(self, name):
            close = difflib.get_close_matches(name, [known for known in dir(self) if not known.startswith("_")], 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AttributeError(f"{type(self).__name__} has no {name!r} to set{hint}")
        object.__setattr__(self, name, value)
        if name in self._hyperparameters and self._built:
            self._plan()

    def _plan(self) -> None:
        """Called when a hyperparameter was changed."""

    def _now(self, name: str) -> Any:
        """A scheduled hyperparameter at this step; what a callable returns is checked like a number that is given."""
        return self._check(name, value_at(getattr(self, name), self.step_count))
