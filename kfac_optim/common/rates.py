"""Learning rates, as the groups of an optimizer give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Scalar = float | Tensor  # a 0-dim tensor if only the device knows the number

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")


def rate_of(group: Mapping[str, Any]) -> Scalar:
    """The learning rate of a group, 0-dim if it is a tensor; 1 if the class has none, or finds it by itself (None).

    A number of numpy's, as some schedules set, becomes Python's: what is learned from rates is saved.
    """
    rate: Scalar | None = group.get("lr")
    if isinstance(rate, Tensor):
        return rate.view(()) if rate.dim() else rate
    return 1.0 if rate is None else float(rate)


def moves(group: Mapping[str, Any]) -> bool:
    """Whether the parameters of a group move; yes if the rate is a tensor, whose value the host does not know."""
    rate = rate_of(group)
    return isinstance(rate, Tensor) or rate != 0


def common_rate(rates: Sequence[Scalar]) -> Scalar | None:
    """The rate that all of these are equal to; None if they differ, there are none, or only the device knows them."""
    if not rates:  # every group was taken out of the optimizer
        return None
    first = rates[0]
    known = not isinstance(first, Tensor)  # comparing a tensor would wait for its device
    same = all(rate is first or known and not isinstance(rate, Tensor) and rate == first for rate in rates)
    return first if same else None


def rates_of(groups: Sequence[Mapping[str, Any]]) -> Scalar | dict[nn.Parameter, Scalar]:
    """The learning rate of all groups, or one for each parameter if they differ."""
    common = common_rate([rate_of(group) for group in groups])
    return {p: rate_of(group) for group in groups for p in group["params"]} if common is None else common


def scheduled(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The numbers of groups that schedulers change."""
    values = [group[name] for group in groups for name in _SCHEDULED if group.get(name) is not None]
    return [float(x) for value in values for x in (value if isinstance(value, tuple | list) else [value])]


def set_scheduled(groups: Sequence[dict[str, Any]], numbers: Sequence[float]) -> None:
    """Sets what :func:`scheduled` has returned for the groups of another rank."""
    left = iter(numbers)
    for group in groups:
        for name in [name for name in _SCHEDULED if group.get(name) is not None]:
            value = group[name]
            if isinstance(value, Tensor):
                value.fill_(next(left))
            else:
                group[name] = tuple(next(left) for _ in value) if isinstance(value, tuple | list) else next(left)
