"""Hyperparameters that are a number or a function of the step.

A schedule is a plain number or any ``callable(step) -> number``, where ``step`` counts optimizer steps from 0. The
classes below make the schedules of the papers; they can be pickled, and so can an optimizer that uses them.
``Config.at`` has the checked value of an option, :func:`positive_at` that of a number inside a damping or a scaling.

Work that is done at intervals is due at step ``t`` if ``t - last >= interval(t)``, where ``last`` is the step at which
it was last done. Work that was never done is due at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar, Union

from .common.checks import is_int, is_number, is_positive, require_number, require_schedule

_LASTING = 10  # intervals that have grown to their maximum are at least so many times what a refresh costs

Number = TypeVar("Number", int, float)
Schedule = Union[Number, Callable[[int], Number]]  # noqa: UP007  (mypy takes no | here)


def value_at(schedule: Schedule[Number], step: int) -> Number:
    """The value of a schedule at ``step``."""
    return schedule(step) if callable(schedule) else schedule


def positive_at(name: str, schedule: Schedule[float], step: int, *, owner: str = "") -> float:
    """The value of a schedule at ``step``; raises TypeError or ValueError unless it is a number > 0 and finite."""
    value = value_at(schedule, step)
    require_number(f"{name} at step {step}", value, "> 0 and finite", is_positive, owner=owner)
    return value


def due(interval: int, step: int, last: int | None) -> bool:
    """Whether work that was last done at step ``last`` (None: never) is due at ``step``."""
    return last is None or step - last >= interval


@dataclass(frozen=True)
class growing:
    """An interval that grows with the step, because curvature changes fast at first and slowly later.

    The interval at step ``t`` is ``max(minimum, fraction * t)`` steps, rounded down, but no more than ``maximum``.

    Args:
        fraction: The interval as a fraction of the step, >= 0. Default 0.1: every 100 steps at step 1000.
        minimum: Smallest interval in steps, >= 1. Default 5.
        most_work: Upper bound, > 0, on the cost of a refresh relative to that of the training steps between two
            refreshes, both counted in multiply-adds (:mod:`~kfac_optim.refresh.pacing`). The interval is lengthened
            until the bound holds: with 1.0 a refresh costs at most as much as those steps. None (default): cost is
            ignored.
        maximum: Largest interval in steps, >= ``minimum``. An interval that has grown to it is longer still if a
            refresh costs more than a tenth of ``maximum`` steps: ten times as long as what a refresh costs, unless
            ``most_work`` is None. None (default): intervals grow without an end.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If one is out of range.
    """

    fraction: float = 0.1
    minimum: int = 5
    most_work: float | None = field(default=None, kw_only=True)
    maximum: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        allowed = ">= 0 and finite"
        require_number("fraction", self.fraction, allowed, lambda x: 0 <= x < math.inf, owner="growing")
        require_number("minimum", self.minimum, "an int >= 1", lambda x: is_int(x) and x >= 1, owner="growing")
        if self.most_work is not None:
            require_number("most_work", self.most_work, "> 0, or None", lambda x: x > 0, owner="growing")
        if self.maximum is not None:
            allowed = f"an int >= minimum={self.minimum}, or None"
            require_number("maximum", self.maximum, allowed, lambda x: is_int(x) and x >= self.minimum, owner="growing")

    def __call__(self, step: int) -> int:
        grown = self._grown(step)
        return grown if self.maximum is None else min(grown, self.maximum)

    def demanded(self, step: int, work: int) -> int:
        """The interval that the work of a refresh demands at ``step``, if it costs as much as ``work`` steps."""
        lasting = 0 if self.maximum is None or self.most_work is None else min(self._grown(step), _LASTING * work)
        return max(lasting, self.least(work))

    def least(self, work: int) -> int:
        """The fewest steps that ``most_work`` allows between refreshes which cost as much as ``work`` steps."""
        return 0 if self.most_work is None else int(work / self.most_work)

    def _grown(self, step: int) -> int:
        return max(self.minimum, int(self.fraction * step))


@dataclass(frozen=True)
class _Decay:
    def __post_init__(self) -> None:
        for each in fields(self):
            allowed, test = ("> 0", lambda x: x > 0) if each.name == "steps" else ("finite", math.isfinite)
            require_number(each.name, getattr(self, each.name), allowed, test, owner=type(self).__name__)


@dataclass(frozen=True)
class exponential_decay(_Decay):
    """A value that decays exponentially: ``initial * rate ** (step / steps)``, but never below ``final``.

    For instance damping: "larger damping values early account for rapid changes in the FIM at the start of training"
    (paper, section 5.3).

    Args:
        initial: The value at step 0.
        rate: What the value is multiplied by over every ``steps`` steps, usually in (0, 1).
        steps: The number of steps that ``rate`` refers to, > 0.
        final: The smallest value. Default 0: no limit.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If one is not finite, or ``steps`` is not positive.
    """

    initial: float
    rate: float
    steps: int
    final: float = 0.0

    def __call__(self, step: int) -> float:
        return max(self.final, self.initial * self.rate ** (step / self.steps))


@dataclass(frozen=True)
class inverse_time_decay(_Decay):
    """A value that falls with the inverse of the step: ``initial * steps / (steps + step)``, but never below ``final``.

    Args:
        initial: The value at step 0.
        steps: The number of steps after which the value has halved, > 0.
        final: The smallest value. Default 0: no limit.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If one is not finite, or ``steps`` is not positive.
    """

    initial: float
    steps: int
    final: float = 0.0

    def __call__(self, step: int) -> float:
        return max(self.final, self.initial * self.steps / (self.steps + step))


@dataclass(frozen=True)
class forgetting:
    """A factor decay that falls where new moments are small compared with the running average.

    On a plateau, gradients may shrink a thousandfold within a few steps, and the second moments that G averages a
    millionfold. With a constant xi the old moments then dominate the average for hundreds of statistics updates. Here
    the weight of the past is ``xi min(1, slack * r)``, where r is the trace of the new moment divided by that of the
    average. The weight is xi as long as new moments are at least ``1 / slack`` of the average, as they are for batches
    of one distribution. This is the variable forgetting factor of recursive least squares (Fortescue et al. 1981),
    applied to A and G of each layer.

    It has an effect only with scalings that ignore the length of directions ("graft", "unit", "orthogonal"). With
    others a single batch of small gradients would be followed by steps that are far too long.

    Args:
        decay: xi of eqs. 14-15, in [0, 1); a number or a function of the step. Default 0.95.
        slack: How many times as large as the new moment the average may be without losing weight, >= 1. Default 3.

    Raises:
        TypeError: If ``decay`` is neither a number nor another schedule, or ``slack`` is not a number.
        ValueError: If one is out of range.
    """

    decay: Schedule[float] = 0.95
    slack: float = 3.0

    def __post_init__(self) -> None:
        if isinstance(self.decay, forgetting):
            raise TypeError(f"forgetting(decay={self.decay!r}): must be a number or a function of the step")
        require_schedule("decay", self.decay, "in [0, 1)", lambda x: 0 <= x < 1, owner="forgetting")
        require_number("slack", self.slack, ">= 1", lambda x: x >= 1, owner="forgetting")

    def __call__(self, step: int) -> float:
        return value_at(self.decay, step)


@dataclass(frozen=True)
class constant_then_scaled:
    """A value that is multiplied by ``factor`` at each milestone, "at fixed iterations" (paper, section 5.3).

    The paper decays damping (``factor < 1``) and the update frequency (``factor > 1`` for the interval) in this way.

    Args:
        initial: The value before the first milestone. If it is an int, all values are rounded to ints >= 1.
        milestones: The steps at which it changes.
        factor: What it is multiplied by at each of them.

    Raises:
        TypeError: If ``initial`` or ``factor`` is not a number, or ``milestones`` is not a sequence of steps.
        ValueError: If ``initial`` or ``factor`` is not finite.
    """

    initial: float
    milestones: tuple[int, ...]
    factor: float

    def __post_init__(self) -> None:
        for name in ("initial", "factor"):
            require_number(name, getattr(self, name), "finite", math.isfinite, owner="constant_then_scaled")
        if not isinstance(self.milestones, Sequence) or not all(map(is_number, self.milestones)):
            raise TypeError(f"constant_then_scaled(milestones={self.milestones!r}): must be a sequence of steps")

    def __call__(self, step: int) -> float:
        value = self.initial * self.factor ** sum(step >= milestone for milestone in self.milestones)
        return max(1, round(value)) if isinstance(self.initial, int) else value


# The fields of these schedules determine what they return in later steps, so that ranks can compare them.
OWN_SCHEDULES = (growing, exponential_decay, inverse_time_decay, forgetting, constant_then_scaled)
