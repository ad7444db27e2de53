"""Learning rates, as the groups of an optimizer give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Scalar", "common_rate", "rate_of"]

Scalar = float | Tensor  # 0-dim where only the device knows the number


def rate_of(group: Mapping[str, Any]) -> Scalar:
    """The learning rate of a group, 0-dim if it is a tensor; 1 where the class has none, or finds it itself (None)."""
    rate: Scalar | None = group.get("lr")
    if isinstance(rate, Tensor):
        return rate.view(()) if rate.dim() else rate
    return 1.0 if rate is None else rate


def common_rate(rates: Sequence[Scalar]) -> Scalar | None:
    """The one learning rate that all of these are; None: there are several, or only the device knows."""
    first = rates[0]
    known = not isinstance(first, Tensor)  # to compare a tensor would be to wait for its device
    same = all(rate is first or known and not isinstance(rate, Tensor) and rate == first for rate in rates)
    return first if same else None
