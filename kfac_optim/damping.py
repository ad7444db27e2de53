"""gamma, the damping of a block (eqs. 9-13), and pi, which splits it between the two factors.

    gamma = value * unit,    unit = 1,  mean eigenvalue of A (x) G,  or largest eigenvalue of A (x) G
    A + pi sqrt(gamma) I,    G + sqrt(gamma) / pi I,    pi^2 = mean eigenvalue(A) / mean eigenvalue(G)

The second line is the factored damping of the inverse solver (Martens & Grosse 2015, section 6.3); the eigen solver
adds gamma to the eigenvalues of ``A (x) G`` itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .common.checks import is_number, is_positive, require_schedule
from .schedules import Schedule, positive_at


class Spectra(Protocol):
    """The eigenvalues that a damping may be relative to, for the Kronecker pairs of one layer."""

    def means(self) -> tuple[Tensor, Tensor]:
        """The mean eigenvalues of A and of G, ``[p]`` each."""

    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues of A and of G, ``[p]`` each."""

    def ones(self) -> Tensor:
        """1 for each pair, ``[p]``, of the same dtype and on the same device; costs nothing."""


class Damping(Protocol):
    """Anything with ``value`` and ``unit`` can be passed as ``damping=``, as can a number or a function of the step."""

    @property
    def value(self) -> Schedule[float]:
        """The multiple of the unit, a number > 0 or a function of the step."""

    def unit(self, spectra: Spectra) -> Tensor:
        """The unit in which ``value`` measures gamma, for each Kronecker pair, ``[p]``, > 0."""


@dataclass(frozen=True)
class _Absolute:
    """gamma itself, as in the paper: the meaning of a plain number or function of the step."""

    value: Schedule[float]

    def unit(self, spectra: Spectra) -> Tensor:
        """1."""
        return spectra.ones()


@dataclass(frozen=True)
class _Relative:
    value: Schedule[float]

    def __post_init__(self) -> None:
        require_schedule("value", self.value, "> 0 and finite", is_positive, owner=type(self).__name__)


class OfMean(_Relative):
    """gamma is a multiple of the mean eigenvalue of the layer's ``A (x) G``: ``damping=OfMean(0.3)``.

    Args:
        value: The multiple, > 0: a number, or a function of the step.

    Raises:
        TypeError: If the value is neither a number nor callable.
        ValueError: If it is not positive and finite.
    """

    def unit(self, spectra: Spectra) -> Tensor:
        """The product of the factors' mean eigenvalues; 1 where a factor is zero."""
        a, g = spectra.means()
        return _positive(a * g)


class OfLargest(_Relative):
    """gamma is a multiple of the largest eigenvalue of the layer's ``A (x) G``: ``damping=OfLargest(0.03)``.

    The eigen solver finds these eigenvalues anyway. With others, that of a factor with more than 64 rows comes from
    32 Lanczos steps, which cost 32 products with a vector at each refresh; their error is too small to matter.

    Args:
        value: The multiple, > 0: a number, or a function of the step.

    Raises:
        TypeError: If the value is neither a number nor callable.
        ValueError: If it is not positive and finite.
    """

    def unit(self, spectra: Spectra) -> Tensor:
        """The product of the factors' largest eigenvalues; 1 where a factor is zero."""
        a, g = spectra.largest()
        return _positive(a * g)


def as_damping(given: Schedule[float] | Damping) -> Damping:
    """The damping that an option stands for: a plain number or function of the step is gamma itself."""
    return cast(Damping, given) if hasattr(given, "unit") else _Absolute(given)


def check_damping(name: str, given: object) -> object:
    """The check of the option ``damping`` (:mod:`kfac_optim.common.checks`)."""
    is_class = isinstance(given, type)
    if not is_class and hasattr(given, "unit") and hasattr(given, "value"):
        return given
    if is_class or not (is_number(given) or callable(given)):
        allowed = "a number > 0, a callable(step), OfMean(...), OfLargest(...) or an object that has value and unit()"
        raise TypeError(f"{name}={given!r}: must be {allowed}, not {type(given).__name__}")
    if is_number(given) and not is_positive(given):
        raise ValueError(f"{name}={given!r}: must be > 0 and finite, or a callable(step)")
    return given


def kind_of(damping: Damping) -> Any:
    """A key for the unit of a damping: its ``unit()`` if that is one of this package's, else the object itself."""
    unit = getattr(type(damping), "unit", None)
    return unit if unit in (_Absolute.unit, OfMean.unit, OfLargest.unit) else damping


def is_of_largest(damping: Damping) -> bool:
    """Whether the unit is the largest eigenvalue, so that it is known how flat the components of a direction are."""
    return kind_of(damping) is OfLargest.unit


def value_of(damping: Damping, step: int) -> float:
    """The multiple of the unit at ``step``."""
    return positive_at("damping", damping.value, step)


def unit_of(damping: Damping, spectra: Spectra, pairs: int) -> Tensor:
    """The unit of gamma for the p Kronecker pairs of a layer, ``[p]``.

    Raises:
        ValueError: If a damping of the user's own returns anything else.
    """
    unit: object = damping.unit(spectra)
    if not (isinstance(unit, Tensor) and unit.shape == (pairs,)):
        shown = f"a tensor of shape {list(unit.shape)}" if isinstance(unit, Tensor) else repr(unit)
        raise ValueError(
            f"damping={damping!r}: unit() has returned {shown}: must be a tensor of shape [{pairs}], one number "
            "for each Kronecker pair; if all pairs share a number, return it times spectra.ones()"
        )
    return unit


def split(gamma: Tensor, mean_a: Tensor, mean_g: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to the diagonals of A and of G, ``pi sqrt(gamma)`` and ``sqrt(gamma) / pi``, ``[p]`` each.

    pi is 1 where a factor is zero.
    """
    # The quotient of roots, not the root of the quotient, which overflows where gradients have all but vanished.
    pi = torch.where((mean_a > 0) & (mean_g > 0), mean_a.sqrt() / mean_g.sqrt(), 1.0)
    root = gamma.sqrt()
    return pi * root, root / pi


def _positive(unit: Tensor) -> Tensor:
    """Replaces a unit of 0 by 1, and one so small that a gradient divided by gamma would overflow by a larger one."""
    return torch.where(unit > 0, unit.clamp(min=2.0**26 * torch.finfo(unit.dtype).tiny), 1.0)
