"""The options of the engine: each is declared once, as a field of :class:`Config`.

A field holds the option's default, its check and its description. The signatures and docstrings of the optimizers and
of the engine, the checks at construction and at every later assignment, and the tables of the documentation come from
it. Hyperparameters may be changed during training; what a layer is, how it is stored and who works on it may not.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .capture import Bernoulli, Categorical, Fisher, Gaussian
from .damping import Damping, OfLargest, OfMean, check_damping
from .distributed import KAISA, AssignmentStrategy, Communicator, FactorWise, LayerWise
from .scaling import Graft, KLClip, Scaling, Unit
from .schedules import Schedule, growing, value_at
from .solvers import EigenSolver, InverseSolver, Solver

__all__ = [
    "Config",
    "compared",
    "compared_options",
    "describe",
    "loaded_options",
    "options",
    "refuse_unknown",
    "saved_options",
    "signature",
]

# A check takes the value that was given and returns the value to use; it raises TypeError or ValueError naming the
# argument, the value and what is allowed.
Check = Callable[[Any], Any]


# Checks --------------------------------------------------------------------------------------------------------------


def _number(name: str, kind: type, allowed: str, test: Callable[[Any], bool]) -> Check:
    """A check for a number of ``kind``, or a function of the step."""

    def check(value: Any) -> Any:
        if callable(value):
            return value
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            expected = f"{'an int' if kind is int else 'a number'} or a callable(step)"
            raise TypeError(f"{name}={value!r}: must be {expected}, {allowed}, not {type(value).__name__}")
        if not test(value):
            raise ValueError(f"{name}={value!r}: must be {allowed}, or a callable(step)")
        return value

    return check


def _count(name: str, *, or_callable: bool = False, least: int = 1) -> Check:
    """A check for an int >= ``least``, None, or perhaps a function of the step."""
    allowed = f"an int >= {least}, a callable or None" if or_callable else f"an int >= {least} or None"

    def check(value: Any) -> Any:
        if value is None or (or_callable and callable(value)):
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: must be {allowed}, not {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}={value!r}: must be {allowed}")
        return value

    return check


def _instance(name: str, names: Mapping[Any, Any], method: str) -> Check:
    """A check for a short name of an instance, or an object that has the protocol's method."""

    def check(value: Any) -> Any:
        if value is None or isinstance(value, str):
            if value in names:
                return names[value]
            listed = ", ".join(map(repr, names))
            raise ValueError(f"{name}={value!r}: must be one of {listed}, or an object with a {method}() method")
        if isinstance(value, type) or not hasattr(value, method):
            raise TypeError(f"{name}={value!r}: an object given here needs a {method}() method")
        return value

    return check


def _one_of(name: str, choices: Sequence[Any], *, or_callable: bool = False) -> Check:
    def check(value: Any) -> Any:
        if (or_callable and callable(value)) or value in choices:
            return value
        listed = ", ".join(map(repr, choices)) + " or a callable" * or_callable
        raise ValueError(f"{name}={value!r}: must be one of {listed}")

    return check


def _loss_average(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if value in ("batch", "batch+sequence", "elements", None) or callable(value):
        return value
    raise ValueError(
        f"loss_average={value!r}: must be one of 'batch', 'batch+sequence', 'elements', None, the number of loss terms "
        "(an int >= 1), or a callable(inputs, output) that returns it"
    )


def _patterns(value: Any) -> tuple[str, ...]:
    listed = isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(item, str) for item in value)
    if not listed:
        raise TypeError(f"skip_layers={value!r}: must be a sequence of regular expressions (str)")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"skip_layers={value!r}: {pattern!r} is not a regular expression: {error}") from None
    return tuple(value)


def _optional(name: str, kind: type, called: str) -> Check:
    def check(value: Any) -> Any:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name}={value!r}: must be {called} or None")
        return value

    return check


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SOLVERS = {"eigen": EigenSolver(), "inverse": InverseSolver()}
_SCALINGS = {"kl_clip": KLClip(), "unit": Unit(), "graft": Graft(), None: None}
_FISHERS = {"empirical": "empirical", "categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}
_ASSIGNMENTS = {"layer-wise": LayerWise(), "factor-wise": FactorWise(), "kaisa": KAISA(grad_worker_fraction=1.0)}


# Options -------------------------------------------------------------------------------------------------------------


def _option(default: Any, check: Check, doc: str, *, fixed: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"check": check, "doc": " ".join(doc.split()), "fixed": fixed})


@dataclass(kw_only=True, eq=False, repr=False)
class Config:
    """The options, as attributes that are checked at construction and whenever they are set.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If it is out of range.
        AttributeError: If, after construction, an option is set that is fixed, or a public name that does not exist.
    """

    damping: Schedule[float] | Damping = _option(
        0.03,
        check_damping("damping"),
        """gamma of eqs. 9-13, > 0: a number or a function of the step, or an object that says what it is relative to,
        :class:`~kfac_optim.OfMean` or :class:`~kfac_optim.OfLargest`.""",
    )
    factor_decay: Schedule[float] = _option(
        0.95,
        _number("factor_decay", float, "in [0, 1)", lambda x: 0 <= x < 1),
        """xi of eqs. 14-15, the weight of the past in the running averages, in [0, 1); a number or a function of the
        step.""",
    )
    factor_update_steps: Schedule[int] | None = _option(
        None,
        _count("factor_update_steps", or_callable=True),
        """Steps between statistics updates, >= 1; an int or a function of the step. None: 10, or a fifth of the
        interval where ``inv_update_steps`` is :class:`~kfac_optim.growing`.""",
    )
    factor_batch_fraction: Schedule[float] = _option(
        1.0,
        _number("factor_batch_fraction", float, "in (0, 1]", lambda x: 0 < x <= 1),
        """The share of a batch's examples that statistics are collected from, evenly spread over the batch, in (0, 1];
        a number or a function of the step. 1: all, as in eqs. 14-15. Fewer are as unbiased and noisier, and cost less;
        norm layers always see all.""",
    )
    inv_update_steps: Schedule[int] = _option(
        100,
        _number("inv_update_steps", int, ">= 1", lambda x: x >= 1),
        """Steps between decompositions ("kfac-update-freq" of the paper), >= 1; an int or a function of the step, such
        as :class:`~kfac_optim.growing`.""",
    )
    scaling: Scaling | str | None = _option(
        "kl_clip",
        _instance("scaling", _SCALINGS, "multipliers"),
        """"kl_clip" (eq. 16 with kappa = 1e-3; ``KLClip(kappa)`` for another), "unit", "graft", None, or an object with
        ``multipliers(directions, step)``.""",
    )
    spread: Schedule[int] | None = _option(
        None,
        _count("spread", or_callable=True, least=0),
        """Steps over which a refresh is worked off, >= 0; an int or a function of the step. 0: at once. None: a tenth
        of the interval of ``inv_update_steps``, at once where that is less than 10. The first refresh is always at
        once.""",
    )
    grad_scaler: torch.amp.GradScaler | None = _option(
        None,
        _optional("grad_scaler", torch.amp.GradScaler, "a torch.amp.GradScaler"),
        """The ``torch.amp.GradScaler`` of fp16 autocast training; may be set later.""",
    )
    solver: Solver | str = _option(
        "eigen",
        _instance("solver", _SOLVERS, "precondition"),
        """"eigen" (eqs. 11-13), "inverse" (eqs. 8-10), or an object with the methods of
        :class:`~kfac_optim.Solver`.""",
        fixed=True,
    )
    fisher: Fisher | str = _option(
        "empirical",
        _instance("fisher", _FISHERS, "sample_gradient"),
        """"empirical" (the gradients of the training loss itself), or, with targets sampled from the model's own output
        distribution at the price of one more backward pass on statistics steps, "categorical", "bernoulli", "gaussian"
        or a :class:`~kfac_optim.Fisher`.""",
        fixed=True,
    )
    loss_average: str | int | Callable[[Any, Any], int] | None = _option(
        "batch",
        _loss_average,
        """Over what the loss takes its mean: "batch", "batch+sequence" (token-mean language models), "elements"
        (MSELoss), None (a sum). Where none of these can tell (ignored targets, masked tokens): the number of averaged
        loss terms itself, an int >= 1 or callable(inputs, output) -> int, with ``inputs`` the tuple of the model's
        positional arguments, or the dict of its keyword arguments if there are none.""",
        fixed=True,
    )
    batch_dim: int = _option(
        0,
        _one_of("batch_dim", (0, 1)),
        """Dimension of the examples in the model's output and in the layers' inputs: 0, or 1 for sequence-first
        models.""",
        fixed=True,
    )
    weight_sharing: str | Callable[[str, nn.Module], str] = _option(
        "expand",
        _one_of("weight_sharing", ("expand", "reduce"), or_callable=True),
        """"expand" or "reduce" over shared positions (Eschenhagen et al. 2023), or callable(name, module) that returns
        one of them.""",
        fixed=True,
    )
    skip_layers: Sequence[str] = _option(
        (),
        _patterns,
        """Regular expressions; layers whose name contains a match train by the base rule.""",
        fixed=True,
    )
    max_factor_dim: int | None = _option(
        8192, _count("max_factor_dim"), """Larger factors are kept diagonal; None for no limit.""", fixed=True
    )
    assignment: AssignmentStrategy | str = _option(
        "factor-wise",
        _instance("assignment", _ASSIGNMENTS, "assign"),
        """Who decomposes and preconditions what: "layer-wise", "factor-wise", "kaisa", or an object with
        ``assign(costs, world_size)``.""",
        fixed=True,
    )
    communicator: Communicator | None = _option(
        None,
        _optional("communicator", Communicator, "a kfac_optim.Communicator"),
        """The processes that train together: ``TorchCommunicator(process_group)``, ``HorovodCommunicator()`` or one of
        your own. None: torch.distributed's default group if it is initialised, else one process.""",
        fixed=True,
    )
    factor_dtype: torch.dtype = _option(
        torch.float32, _one_of("factor_dtype", _DTYPES), """Storage of the factors.""", fixed=True
    )
    inv_dtype: torch.dtype = _option(
        torch.float32, _one_of("inv_dtype", _DTYPES), """Storage of the decompositions.""", fixed=True
    )

    # True from the end of the engine's construction on: fixed options refuse to change then, and a public name that
    # does not exist is taken for a misspelt one.
    _constructed: ClassVar[bool] = False

    def __setattr__(self, name: str, value: Any) -> None:
        field, constructed = _FIELDS.get(name), self._constructed
        if field is not None:
            if constructed and field.metadata["fixed"]:
                changeable = ", ".join(key for key, other in _FIELDS.items() if not other.metadata["fixed"])
                raise AttributeError(
                    f"{name} is fixed at construction; what can be changed during training: {changeable}"
                )
            value = field.metadata["check"](value)
        elif constructed and not name.startswith("_") and not hasattr(self, name):
            close = difflib.get_close_matches(name, [known for known in dir(self) if not known.startswith("_")], 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise AttributeError(f"{type(self).__name__} has no {name!r} to set{hint}")
        super().__setattr__(name, value)
        if field is not None and constructed:
            self._option_changed()

    def _end_construction(self) -> None:
        self.__dict__["_constructed"] = True

    def _option_changed(self) -> None:
        """Called after an option was set during training."""

    def at(self, name: str, step: int) -> Any:
        """The value of an option at ``step``; what a function of the step returns is checked like a given value."""
        return _FIELDS[name].metadata["check"](value_at(getattr(self, name), step))

    def statistics_interval(self, step: int) -> int:
        """Steps between statistics updates at ``step``."""
        if self.factor_update_steps is not None:
            return int(value_at(self.factor_update_steps, step))
        growth = self.inv_update_steps
        return max(1, growth(step) // 5) if isinstance(growth, growing) else 10

    def spread_at(self, step: int) -> int:
        """Over how many steps a refresh that starts at ``step`` is worked off."""
        spread = self.at("spread", step)
        return int(self.at("inv_update_steps", step) // 10 if spread is None else spread)

    @property
    def may_spread(self) -> bool:
        """Whether refreshes may be spread over steps, under the present schedules."""
        interval = self.inv_update_steps
        return self.spread != 0 and (self.spread is not None or callable(interval) or interval >= 10)


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def options() -> dict[str, inspect.Parameter]:
    """The options as keyword-only parameters, for signatures."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=field.default, annotation=field.type)
        for name, field in _FIELDS.items()
    }


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a constructor with its ``**options`` spelt out."""
    given = inspect.signature(function).parameters.values()
    own = [p for p in given if p.name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
    return inspect.Signature([*own, *options().values()])


def describe(indent: str = " " * 8) -> str:
    """The options as lines of a Google-style ``Args:`` section."""
    lines = []
    for name, field in _FIELDS.items():
        text = f"{name}: {field.metadata['doc']} Default {field.default!r}."
        lines += textwrap.wrap(text, 116, initial_indent=indent, subsequent_indent=indent + "    ")
    return "\n".join(lines)


# The saved state -----------------------------------------------------------------------------------------------------

# A damping that is relative to an eigenvalue is saved under a name of its own, so that loading it restores its kind.
_SAVED_DAMPINGS: dict[str, Callable[[float], Any]] = {
    "damping": float,
    "damping_of_mean": OfMean,
    "damping_of_largest": OfLargest,
}


def saved_options(config: Config) -> dict[str, int | float]:
    """The hyperparameters that are plain numbers, for the saved state; functions of the step are never saved."""
    found: dict[str, int | float] = {}
    for name, field in _FIELDS.items():
        value = getattr(config, name)
        if isinstance(value, OfMean | OfLargest):
            name, value = "damping_of_mean" if isinstance(value, OfMean) else "damping_of_largest", value.value
        if not field.metadata["fixed"] and isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = value
    return found


def compared_options(config: Config, step: int) -> dict[str, Any]:
    """What the hyperparameters are at ``step``, to compare the ranks of a run."""
    names = [name for name, field in _FIELDS.items() if not field.metadata["fixed"] and name != "grad_scaler"]
    return {name: compared(getattr(config, name), step) for name in names}


def compared(value: Any, step: int) -> Any:
    """A value of an option, of which the ``repr`` is the same in every process: no addresses, no functions."""
    if callable(value):
        value = value(step)
    if value is None or isinstance(value, int | float):
        return value
    parts = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return (type(value).__qualname__, *(compared(getattr(value, part.name), step) for part in parts))


def loaded_options(config: Config, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options to set from a saved state, checked; a saved number does not replace a function of the step.

    Raises:
        TypeError: If a saved value is of the wrong kind.
        ValueError: If it is out of range.
    """
    found: dict[str, Any] = {}
    for name, value in saved.items():
        if name in _SAVED_DAMPINGS:
            name, value = "damping", _SAVED_DAMPINGS[name](_FIELDS["damping"].metadata["check"](value))
        if name not in _FIELDS or _FIELDS[name].metadata["fixed"]:
            continue
        now = getattr(config, name)
        if not callable(getattr(now, "value", now)):
            found[name] = _FIELDS[name].metadata["check"](value)
    return found


def refuse_unknown(owner: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises TypeError for a keyword that nobody takes, with the name that was probably meant."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{hint}")
