"""The options of the engine: each is declared once, as a field of :class:`Config`.

A field holds the option's default, its check and its description. The signatures and docstrings of the optimizers and
of the engine, the checks at construction and at every later assignment, and the tables of the documentation are made
from these fields. Hyperparameters may be changed during training; options that decide what a layer is, how it is
stored and which rank works on it may not.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .capture import Bernoulli, Categorical, Fisher, Gaussian, LossAverage
from .common import checks
from .damping import Damping, as_damping, check_damping
from .distributed import KAISA, AssignmentStrategy, Communicator, FactorWise, LayerWise
from .layers import Sharing
from .scaling import Graft, KLClip, Orthogonal, Scaling, Unit, traits_of
from .schedules import OWN_SCHEDULES, Schedule, forgetting
from .solvers import EigenSolver, InverseSolver, Solver, damps_factors

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SOLVERS = {"eigen": EigenSolver(), "inverse": InverseSolver()}
_SCALINGS = {"kl_clip": KLClip(), "unit": Unit(), "orthogonal": Orthogonal(), "graft": Graft(), None: None}
_FISHERS = {"empirical": "empirical", "categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}
_ASSIGNMENTS = {"layer-wise": LayerWise(), "factor-wise": FactorWise(), "kaisa": KAISA(grad_worker_fraction=1.0)}


# Options -------------------------------------------------------------------------------------------------------------


def _check_solver(name: str, value: Any) -> Any:
    shifts = ["shifts"] if damps_factors(value) else []
    return checks.instance(_SOLVERS, *shifts, "shapes", "decompose", "precondition")(name, value)


def _option(default: Any, check: checks.Check, doc: str, *, fixed: bool = False, accepts: str = "") -> Any:
    """Declares an option. ``accepts`` is the type that users may pass, if the check converts it to the field's."""
    metadata = {"check": check, "doc": " ".join(doc.split()), "fixed": fixed, "accepts": accepts}
    return dataclasses.field(default=default, metadata=metadata)


_fixed_option = functools.partial(_option, fixed=True)  # fixed at construction


@dataclass(kw_only=True, eq=False, repr=False)
class Config:
    """The options, as attributes that are checked at construction and whenever they are set.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If it is out of range.
        AttributeError: If, after construction, a fixed option or an unknown public name is set.
    """

    damping: Schedule[float] | Damping = _option(
        0.03,
        check_damping,
        """gamma of eqs. 9-13, > 0: a number, a function of the step, or an object that makes gamma a multiple of an
        eigenvalue, :class:`~kfac_optim.OfMean` or :class:`~kfac_optim.OfLargest`.""",
    )
    factor_decay: Schedule[float] = _option(
        0.95,
        checks.number("in [0, 1)", lambda x: 0 <= x < 1),
        """xi of eqs. 14-15, the weight of the past in the running averages, in [0, 1); a number or a function of the
        step, such as :class:`~kfac_optim.forgetting`.""",
    )
    factor_update_steps: Schedule[int] | None = _option(
        None,
        checks.count(or_callable=True),
        """Steps between statistics updates, >= 1; an int or a function of the step. None: 10, but at most the
        refresh interval; if ``inv_update_steps`` is :class:`~kfac_optim.growing`, half of the first interval, and of
        those of up to 12 steps, and later the last three steps before a refresh, or a few more while intervals
        grow.""",
    )
    factor_batch_fraction: Schedule[float] = _option(
        1.0,
        checks.number("in (0, 1]", lambda x: 0 < x <= 1),
        """The share of a batch's examples that statistics are collected from, in (0, 1]; a number or a function of the
        step. The examples are evenly spread over the batch. 1 uses all of them, as in eqs. 14-15. A smaller share costs
        less; the estimate stays unbiased but is noisier. Norm layers always use all examples.""",
    )
    inv_update_steps: Schedule[int] = _option(
        100,
        checks.count(or_callable=True, or_none=False),
        """Steps between refreshes of the decompositions ("kfac-update-freq" of the paper), >= 1; an int or a function
        of the step, such as :class:`~kfac_optim.growing`.""",
    )
    scaling: Scaling | None = _option(
        "kl_clip",
        checks.instance(_SCALINGS, "multipliers"),
        """What decides the length of a step: "kl_clip" (eq. 16 with kappa = 1e-3; ``KLClip(kappa)`` for another),
        "unit", "orthogonal", "graft", None (directions stay as they are), or an object with
        ``multipliers(directions, step)``.""",
        accepts="Scaling | str | None",
    )
    spread: Schedule[int] | None = _option(
        None,
        checks.count(or_callable=True, least=0),
        """Number of steps over which the work of a refresh is spread, >= 0; an int or a function of the step. 0: all in
        one step. None: over a tenth of the refresh interval, but in one step if that interval is less than 10. The
        first refresh is always done in one step.""",
    )
    grad_scaler: torch.amp.GradScaler | None = _option(
        None,
        checks.optional(torch.amp.GradScaler, "a torch.amp.GradScaler"),
        """The ``torch.amp.GradScaler`` of fp16 autocast training; may be set later.""",
    )
    solver: Solver = _fixed_option(
        "eigen",
        _check_solver,
        """What decomposes the factors and applies them: "eigen" (eqs. 11-13), "inverse" (eqs. 8-10), or an object with
        the methods of :class:`~kfac_optim.Solver`.""",
        accepts="Solver | str",
    )
    fisher: Fisher | str = _fixed_option(
        "empirical",
        checks.instance(_FISHERS, kind=Fisher),
        """The gradients that G is made of. "empirical": those of the training loss itself. "categorical", "bernoulli",
        "gaussian" or a :class:`~kfac_optim.Fisher`: those of a loss whose targets are sampled from the model's own
        output distribution, which costs one more backward pass on statistics steps.""",
    )
    loss_average: LossAverage | None = _fixed_option(
        "batch",
        checks.loss_average,
        """What the loss is a mean over: "batch", "batch+sequence" (token-mean language models), "elements" (MSELoss),
        None (a sum). Where none of these is right (ignored targets, masked tokens), give the number of averaged loss
        terms itself: an int >= 1 or callable(inputs, output) -> int, where ``inputs`` is the tuple of the model's
        positional arguments, or the dict of its keyword arguments if there are no positional ones.""",
    )
    batch_dim: int = _fixed_option(
        0,
        checks.one_of(0, 1),
        """Dimension of the examples in the model's output and in the layers' inputs: 0, or 1 for sequence-first
        models.""",
    )
    weight_sharing: Sharing | Callable[[str, nn.Module], Sharing] = _fixed_option(
        "expand",
        checks.one_of("expand", "reduce", or_callable=True),
        """How shared positions (pixels, tokens) enter the factors: "expand" or "reduce" (Eschenhagen et al. 2023), or
        callable(name, module) that returns one of them.""",
    )
    skip_layers: tuple[str, ...] = _fixed_option(
        (),
        checks.patterns,
        """Regular expressions; layers whose name contains a match are left to the base class's own rule.""",
        accepts="Sequence[str]",
    )
    max_factor_dim: int | str | None = _fixed_option(
        "auto",
        checks.count(or_word="auto"),
        """The most rows that a factor may have and be kept whole. A larger factor is kept as equal blocks along its
        diagonal, of at most this many rows. An int >= 1 (1 keeps the diagonals), "auto" (8192, or 300 on a CPU) or
        None (always whole). Unless it is None, a factor of more than 1024 rows that is at least 10 times as large as
        the other factor of its layer is cut further: G (a vocabulary) to its diagonal, A to blocks as large as the
        other factor, but of at least 256 rows.""",
    )
    assignment: AssignmentStrategy = _fixed_option(
        "factor-wise",
        checks.instance(_ASSIGNMENTS, "assign"),
        """Which ranks decompose which factors and precondition which layers: "layer-wise", "factor-wise", "kaisa" (with
        a fraction of 1, which is the same as "factor-wise"; :class:`~kfac_optim.KAISA` takes others), or an object with
        ``assign(costs, world_size)``.""",
        accepts="AssignmentStrategy | str",
    )
    communicator: Communicator | None = _fixed_option(
        None,
        checks.optional(Communicator, "a kfac_optim.Communicator (of a process group: TorchCommunicator(group))"),
        """The processes that train together: ``TorchCommunicator(process_group)``, ``HorovodCommunicator()`` or one of
        your own. None: torch.distributed's default group if it is initialised, else one process.""",
    )
    factor_dtype: torch.dtype = _fixed_option(
        torch.float32, checks.one_of(*_DTYPES), """The dtype of stored factors."""
    )
    inv_dtype: torch.dtype = _fixed_option(
        torch.float32, checks.one_of(*_DTYPES), """The dtype of stored decompositions."""
    )

    # True once the engine is constructed. From then on fixed options refuse to change, and an unknown public name is
    # refused as a misspelt one.
    _constructed = False

    def __setattr__(self, name: str, value: Any) -> None:
        field, constructed = _FIELDS.get(name), self._constructed
        if field is None:
            if constructed and not (name in self.__dict__ or name.startswith("_") or hasattr(self, name)):
                hint = _did_you_mean(name, [own for own in dir(self) if not own.startswith("_")])
                raise AttributeError(f"{type(self).__name__} has no {name!r} to set{hint}")
            super().__setattr__(name, value)
            return
        if constructed and field.metadata["fixed"]:
            raise AttributeError(
                f"{name} is fixed at construction: build a new optimizer. During training you can set "
                + ", ".join(CHANGEABLE)
            )
        before = self.__dict__.get(name)
        super().__setattr__(name, checked(name, value))
        if constructed:
            try:
                self._option_changed()
            except Exception:
                super().__setattr__(name, before)
                raise

    def set_options(self, values: Mapping[str, Any]) -> None:
        """Sets several options."""
        for name, value in values.items():
            setattr(self, name, value)

    def _option_changed(self) -> None:
        """Called after an option was set during training; if it raises an error, the option gets its old value back."""

    def at(self, name: str, step: int) -> Any:
        """The value of an option at ``step``; what a function of the step returns is checked as a given value is."""
        given = getattr(self, name)
        if not callable(given):
            return given
        value = given(step)
        if callable(value):
            raise TypeError(f"{name}: the function of the step has returned a function at step {step}, not a value")
        try:
            return checked(name, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (the function of the step has returned it at step {step})") from None

    @property
    def damping_object(self) -> Damping:
        """``damping`` as an object, even if a number or a function of the step was given."""
        return as_damping(self.damping)

    @property
    def slack(self) -> float:
        """The ``slack`` of :class:`~kfac_optim.forgetting`; infinite if that is not used, or has no effect."""
        if isinstance(self.factor_decay, forgetting) and traits_of(self.scaling).of_any_length:
            return self.factor_decay.slack
        return math.inf

    @property
    def turns_steps(self) -> bool:
        """Whether the steps of an optimizer are turned; else, as where there is none, gradients are preconditioned."""
        return False

    @property
    def may_spread(self) -> bool:
        """Whether refreshes may be spread over steps, under the present schedules."""
        interval = self.inv_update_steps
        return self.spread != 0 and (self.spread is not None or callable(interval) or interval >= 10)


_FIELDS = {field.name: field for field in dataclasses.fields(Config)}
CHANGEABLE = [name for name, field in _FIELDS.items() if not field.metadata["fixed"]]


def checked(name: str, value: Any) -> Any:
    """An option's value as its check returns it; the check raises TypeError or ValueError."""
    return _FIELDS[name].metadata["check"](name, value)


def engine_options() -> dict[str, inspect.Parameter]:
    """The options as keyword-only parameters, for signatures."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default=field.default, annotation=field.metadata["accepts"] or field.type)
        for name, field in _FIELDS.items()
    }


def signature(
    function: Callable[..., Any], *more: inspect.Parameter, defaults: Mapping[str, Any] | None = None
) -> inspect.Signature:
    """The signature of a constructor, with more parameters, of other names, and its ``**options`` spelt out.

    Args:
        function: The constructor.
        *more: The parameters that come before the options.
        defaults: By option, the defaults that differ from those of :class:`Config`.
    """
    given = inspect.signature(function).parameters.values()
    own = [p for p in given if p.name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [*more, *(p.replace(default=(defaults or {}).get(name, p.default)) for name, p in engine_options().items())]
    if taken := [p.name for p in own if any(p.name == other.name for other in added)]:
        raise TypeError(
            f"{function.__qualname__} has an argument {taken[0]!r}, as K-FAC has: rename it in a subclass, or put a "
            "CurvatureEngine in front of the optimizer in the place of KFACMixin"
        )
    return inspect.Signature([*own, *added])


def describe() -> str:
    """The options as lines of a Google-style ``Args:`` section."""
    lines, indent = [], " " * 8
    for name, field in _FIELDS.items():
        text = f"{name}: {field.metadata['doc']} Default {field.default!r}."
        lines += textwrap.wrap(text, 116, initial_indent=indent, subsequent_indent=indent + "    ")
    return "\n".join(lines)


def compared(value: Any, step: int) -> Any:
    """An option's value as something whose ``repr`` is the same in every process: no addresses, no functions."""
    if callable(value) and not isinstance(value, OWN_SCHEDULES):
        value = value(step)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, tuple):
        return tuple(compared(each, step) for each in value)
    parts = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return (type(value).__qualname__, *(compared(getattr(value, part.name), step) for part in parts))


def refuse_unknown(owner: str, given: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raises TypeError for an unknown keyword, and says which name was probably meant."""
    for name in given:
        if name not in allowed:
            swallowed = "; if a base class takes it as one of its **kwargs, name it in a subclass's __init__"
            hint = _did_you_mean(name, allowed) or swallowed * ("kwargs" in allowed)
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{hint}")


def refuse_in_groups(groups: Iterable[Iterable[str]], allowed: Collection[str]) -> None:
    """Raises TypeError for an option in a parameter group, where it would be ignored.

    ``allowed``: names that are not refused, as ZeroRedundancyOptimizer puts every keyword into the groups as well.
    """
    for name in itertools.chain.from_iterable(groups):
        if name in _FIELDS and name not in allowed:
            raise TypeError(f"{name}: an option of the whole optimizer, not of a group: pass it as a keyword")


def _did_you_mean(name: str, allowed: Sequence[str]) -> str:
    """The end of an error about an unknown name: what was probably meant, or nothing."""
    for option, values in (("scaling", _SCALINGS), ("solver", _SOLVERS)):
        for value in filter(dataclasses.is_dataclass, values.values()):
            if option in allowed and name in {part.name for part in dataclasses.fields(value)}:
                return f"; did you mean {option}={type(value).__name__}({name}=...)?"
    close = difflib.get_close_matches(name, allowed, 1)
    return f"; did you mean {close[0]!r}?" if close else ""
