"""The options of the engine: each is declared once, as a field of :class:`Config`.

A field holds the option's default, its check and its description. The signatures and docstrings of the optimizers and
of the engine, the checks at construction and at every later assignment, and the tables of the documentation come from
it. Hyperparameters may be changed during training; what a layer is, how it is stored and who works on it may not.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from . import checks
from .capture import Bernoulli, Categorical, Fisher, Gaussian, LossAverage
from .damping import Damping, OfLargest, OfMean, as_damping, check_damping
from .distributed import KAISA, AssignmentStrategy, Communicator, FactorWise, LayerWise
from .layers import Sharing
from .scaling import Graft, KLClip, Scaling, Unit, traits_of
from .schedules import OWN_SCHEDULES, Schedule, forgetting
from .solvers import EigenSolver, InverseSolver, Solver, damps_factors

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


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SOLVERS = {"eigen": EigenSolver(), "inverse": InverseSolver()}
_SCALINGS = {"kl_clip": KLClip(), "unit": Unit(), "graft": Graft(), None: None}
_FISHERS = {"empirical": "empirical", "categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}
_ASSIGNMENTS = {"layer-wise": LayerWise(), "factor-wise": FactorWise(), "kaisa": KAISA(grad_worker_fraction=1.0)}


# Options -------------------------------------------------------------------------------------------------------------


def _check_solver(value: Any) -> Any:
    shifts = ["shifts"] if damps_factors(value) else []
    return checks.instance("solver", _SOLVERS, *shifts, "shapes", "decompose", "precondition")(value)


def _option(default: Any, check: checks.Check, doc: str, *, fixed: bool = False, accepts: str = "") -> Any:
    """Declares an option; ``accepts``: the type users may pass, if the check converts it."""
    metadata = {"check": check, "doc": " ".join(doc.split()), "fixed": fixed, "accepts": accepts}
    return dataclasses.field(default=default, metadata=metadata)


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
        check_damping,
        """gamma of eqs. 9-13, > 0: a number or a function of the step, or an object that says what it is relative to,
        :class:`~kfac_optim.OfMean` or :class:`~kfac_optim.OfLargest`.""",
    )
    factor_decay: Schedule[float] = _option(
        0.95,
        checks.number("factor_decay", "in [0, 1)", lambda x: 0 <= x < 1),
        """xi of eqs. 14-15, the weight of the past in the running averages, in [0, 1); a number or a function of the
        step, such as :class:`~kfac_optim.forgetting`.""",
    )
    factor_update_steps: Schedule[int] | None = _option(
        None,
        checks.count("factor_update_steps", or_callable=True),
        """Steps between statistics updates, >= 1; an int or a function of the step. None: 10, or half the
        interval where ``inv_update_steps`` is :class:`~kfac_optim.growing`.""",
    )
    factor_batch_fraction: Schedule[float] = _option(
        1.0,
        checks.number("factor_batch_fraction", "in (0, 1]", lambda x: 0 < x <= 1),
        """The share of a batch's examples that statistics are collected from, evenly spread over the batch, in (0, 1];
        a number or a function of the step. 1: all, as in eqs. 14-15. A smaller share costs less; the estimate stays
        unbiased but is noisier. Norm layers always see all.""",
    )
    inv_update_steps: Schedule[int] = _option(
        100,
        checks.count("inv_update_steps", or_callable=True, or_none=False),
        """Steps between decompositions ("kfac-update-freq" of the paper), >= 1; an int or a function of the step, such
        as :class:`~kfac_optim.growing`.""",
    )
    scaling: Scaling | None = _option(
        "kl_clip",
        checks.instance("scaling", _SCALINGS, "multipliers"),
        """"kl_clip" (eq. 16 with kappa = 1e-3; ``KLClip(kappa)`` for another), "unit", "graft", None, or an object with
        ``multipliers(directions, step)``.""",
        accepts="Scaling | str | None",
    )
    spread: Schedule[int] | None = _option(
        None,
        checks.count("spread", or_callable=True, least=0),
        """Number of steps over which the work of a refresh is spread, >= 0; an int or a function of the step. 0: at
        once. None: a tenth of the interval of ``inv_update_steps``, at once where that is less than 10. The first
        refresh is always at once.""",
    )
    grad_scaler: torch.amp.GradScaler | None = _option(
        None,
        checks.optional("grad_scaler", torch.amp.GradScaler, "a torch.amp.GradScaler"),
        """The ``torch.amp.GradScaler`` of fp16 autocast training; may be set later.""",
    )
    solver: Solver = _option(
        "eigen",
        _check_solver,
        """"eigen" (eqs. 11-13), "inverse" (eqs. 8-10), or an object with the methods of
        :class:`~kfac_optim.Solver`.""",
        fixed=True,
        accepts="Solver | str",
    )
    fisher: Fisher | str = _option(
        "empirical",
        checks.instance("fisher", _FISHERS, kind=Fisher),
        """"empirical" (the gradients of the training loss itself), or, with targets sampled from the model's own output
        distribution at the price of one more backward pass on statistics steps, "categorical", "bernoulli", "gaussian"
        or a :class:`~kfac_optim.Fisher`.""",
        fixed=True,
    )
    loss_average: LossAverage | None = _option(
        "batch",
        checks.loss_average,
        """Over what the loss takes its mean: "batch", "batch+sequence" (token-mean language models), "elements"
        (MSELoss), None (a sum). Where none of these can tell (ignored targets, masked tokens): the number of averaged
        loss terms itself, an int >= 1 or callable(inputs, output) -> int, with ``inputs`` the tuple of the model's
        positional arguments, or the dict of its keyword arguments if there are none.""",
        fixed=True,
    )
    batch_dim: int = _option(
        0,
        checks.one_of("batch_dim", (0, 1)),
        """Dimension of the examples in the model's output and in the layers' inputs: 0, or 1 for sequence-first
        models.""",
        fixed=True,
    )
    weight_sharing: Sharing | Callable[[str, nn.Module], Sharing] = _option(
        "expand",
        checks.one_of("weight_sharing", ("expand", "reduce"), or_callable=True),
        """"expand" or "reduce" over shared positions (Eschenhagen et al. 2023), or callable(name, module) that returns
        one of them.""",
        fixed=True,
    )
    skip_layers: tuple[str, ...] = _option(
        (),
        checks.patterns,
        """Regular expressions; layers whose name contains a match train by the base rule.""",
        fixed=True,
        accepts="Sequence[str]",
    )
    max_factor_dim: int | str | None = _option(
        "auto",
        checks.count("max_factor_dim", or_word="auto"),
        """The most rows of a factor that is kept whole; a larger one is kept as equal diagonal blocks of at most this
        many rows. An int >= 1 (1 keeps the diagonals), "auto" (8192, on a CPU 2100) or None (always whole). Unless
        None, a factor of more than 1024 rows that is at least 10 times as large as the other factor of its layer is
        cut further: G (a vocabulary) to its diagonal, A to blocks as large as the other factor, but at least 256.""",
        fixed=True,
    )
    assignment: AssignmentStrategy = _option(
        "factor-wise",
        checks.instance("assignment", _ASSIGNMENTS, "assign"),
        """Who decomposes and preconditions what: "layer-wise", "factor-wise", "kaisa", or an object with
        ``assign(costs, world_size)``.""",
        fixed=True,
        accepts="AssignmentStrategy | str",
    )
    communicator: Communicator | None = _option(
        None,
        checks.optional("communicator", Communicator, "a kfac_optim.Communicator"),
        """The processes that train together: ``TorchCommunicator(process_group)``, ``HorovodCommunicator()`` or one of
        your own. None: torch.distributed's default group if it is initialised, else one process.""",
        fixed=True,
    )
    factor_dtype: torch.dtype = _option(
        torch.float32, checks.one_of("factor_dtype", _DTYPES), """Storage of the factors.""", fixed=True
    )
    inv_dtype: torch.dtype = _option(
        torch.float32, checks.one_of("inv_dtype", _DTYPES), """Storage of the decompositions.""", fixed=True
    )

    # True from the end of the engine's construction on: fixed options refuse to change then, and a public name that
    # does not exist is taken for a misspelt one.
    _constructed: ClassVar[bool] = False

    def __setattr__(self, name: str, value: Any) -> None:
        field, constructed = _FIELDS.get(name), self._constructed
        if field is not None:
            if constructed and field.metadata["fixed"]:
                changeable = ", ".join(_CHANGEABLE)
                raise AttributeError(
                    f"{name} is fixed at construction: build a new optimizer. During training you can set {changeable}"
                )
            value = field.metadata["check"](value)
        elif constructed and not name.startswith("_") and not hasattr(self, name):
            hint = _did_you_mean(name, [known for known in dir(self) if not known.startswith("_")])
            raise AttributeError(f"{type(self).__name__} has no {name!r} to set{hint}")
        before = self.__dict__.get(name)
        super().__setattr__(name, value)
        if field is not None and constructed:
            try:
                self._option_changed()
            except Exception:
                super().__setattr__(name, before)
                raise

    def _end_construction(self) -> None:
        self.__dict__["_constructed"] = True

    def _option_changed(self) -> None:
        """Called after an option was set during training; an error takes it back."""

    def at(self, name: str, step: int) -> Any:
        """The value of an option at ``step``; what a function of the step returns is checked like a given value."""
        given = getattr(self, name)
        if not callable(given):
            return given
        value = given(step)
        if callable(value):
            raise TypeError(f"{name}: the function of the step has returned another function at step {step}")
        try:
            return _FIELDS[name].metadata["check"](value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (the function of the step has returned it at step {step})") from None

    @property
    def damping_rule(self) -> Damping:
        """``damping`` as an object, also where a number or a function of the step was given."""
        return as_damping(self.damping)

    @property
    def slack(self) -> float:
        """The ``slack`` of :class:`~kfac_optim.forgetting`; infinite without it, and where it has no effect."""
        if isinstance(self.factor_decay, forgetting) and traits_of(self.scaling).of_any_length:
            return self.factor_decay.slack
        return math.inf

    @property
    def may_spread(self) -> bool:
        """Whether refreshes may be spread over steps, under the present schedules."""
        interval = self.inv_update_steps
        return self.spread != 0 and (self.spread is not None or callable(interval) or interval >= 10)


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_CHANGEABLE = [name for name, field in _FIELDS.items() if not field.metadata["fixed"]]


def options() -> dict[str, inspect.Parameter]:
    """The options as keyword-only parameters, for signatures."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=field.default, annotation=field.metadata["accepts"] or field.type)
        for name, field in _FIELDS.items()
    }


def signature(
    function: Callable[..., Any], *more: inspect.Parameter, defaults: Mapping[str, Any] | None = None
) -> inspect.Signature:
    """The signature of a constructor, with more parameters and its ``**options`` spelt out.

    Args:
        function: The constructor.
        *more: The parameters that come before the options.
        defaults: The options that have other defaults here, with these.
    """
    given = inspect.signature(function).parameters.values()
    own = [p for p in given if p.name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
    spelt = [p.replace(default=(defaults or {}).get(name, p.default)) for name, p in options().items()]
    return inspect.Signature([*own, *more, *spelt])


def describe() -> str:
    """The options as lines of a Google-style ``Args:`` section."""
    lines, indent = [], " " * 8
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
    for name in _CHANGEABLE:
        value = getattr(config, name)
        if isinstance(value, OfMean):
            name, value = "damping_of_mean", value.value
        elif isinstance(value, OfLargest):
            name, value = "damping_of_largest", value.value
        elif isinstance(value, KLClip):
            name, value = "kl_clip", value.kappa
        if checks.is_number(value):  # NumPy's are floats too, but torch.load(weights_only=True) refuses them
            found[name] = int(value) if checks.is_int(value) else float(value)
    return found


def compared_options(config: Config, step: int) -> dict[str, Any]:
    """What the hyperparameters are at ``step``, to compare the ranks of a run."""
    return {name: compared(getattr(config, name), step) for name in _CHANGEABLE if name != "grad_scaler"}


def compared(value: Any, step: int) -> Any:
    """A value of an option, of which the ``repr`` is the same in every process: no addresses, no functions."""
    if callable(value) and not isinstance(value, OWN_SCHEDULES):
        value = value(step)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, tuple):
        return tuple(compared(each, step) for each in value)
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
        elif name == "kl_clip" and isinstance(config.scaling, KLClip) and not callable(config.scaling.kappa):
            name, value = "scaling", KLClip(value)
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
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{_did_you_mean(name, known)}")


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    """What follows a name that does not exist: the one that was probably meant, if there is one."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
