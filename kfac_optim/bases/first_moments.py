"""Averages of gradients, which K-FAC preconditions where the base class keeps no first moment of them alone.

SGD, Adam, NAdam, RAdam and Adamax add weight decay to the gradient ("coupled"), so that decay is a part of their first
moment too. For them the gradients alone are averaged here as well, in the same way as the base class averages the sum.
The decay in its moment cannot be computed from the present weights, because weights move: K-FAC would take the error
for a gradient, and go far along it where true gradients are small. (With a decay of 0.1 under SGD, rows of an embedding
grew a thousandfold.) For base classes without a first moment that is known here (SGD without momentum, Adagrad,
RMSprop, Adadelta, Muon, all that are neither torch's nor LAMB) the gradients are averaged here while trust is learned::

    m <- 0.9 m + 0.1 g,    at first m = g
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .parameters import Bucket, Member
from .rules import SGDRule
from .state_keys import GRADIENT_WEIGHT, MOMENT

_DECAY = 0.9  # that of the usual momentum, where the base class keeps no first moment


def keep_averages(buckets: Sequence[Bucket], *, stand_in: bool) -> None:
    """Updates the averages of gradients in the optimizer's state, after a step of the base class.

    Args:
        buckets: The parameters of interest, with their states after the step.
        stand_in: Whether an average is also kept where the base class keeps no first moment. If the base class's moment
            has weight decay in it, gradients are averaged as they are in that moment.
    """
    for bucket in buckets:
        by_share: dict[float, Bucket] = {}
        for m in bucket:
            share = _share_of_gradient(m, stand_in=stand_in)
            if share is None:
                m.state.pop(MOMENT, None)  # it was kept before a scheduler switched the base class's momentum on
            else:
                by_share.setdefault(share, []).append(m)
        for share, some in by_share.items():
            averages = [_kept_average(m) if MOMENT in m.state else m.rule.first_average(m, share) for m in some]
            gradients, dtype = [m.gradient for m in some], some[0].p.dtype
            if gradients[0].dtype != dtype:  # ``grad_dtype``
                gradients = [gradient.to(dtype) for gradient in gradients]
            torch._foreach_lerp_(averages, gradients, share)  # before torch 2.12 shards have only the in-place version
            for m, average in zip(some, averages, strict=True):
                m.state[MOMENT] = average


def _share_of_gradient(m: Member, *, stand_in: bool) -> float | None:
    """The new gradient's share in the average kept here; None: none is kept. ``stand_in``: :func:`keep_averages`."""
    if not m.has_first_moment:
        return (1 - _DECAY if MOMENT in m.state else 1.0) if stand_in else None
    return m.rule.share_of_gradient(m) if m.rule.decays_moment(m.group) else None


def _kept_average(m: Member) -> Tensor:
    """The average so far, as the parameter is now; comparing takes less time than ``to`` does."""
    average: Tensor = m.state[MOMENT]
    return average if average.dtype is m.p.dtype and average.device == m.p.device else average.to(m.p)


@contextmanager
def gradient_weight_tracked(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Updates ``state[GRADIENT_WEIGHT]`` after a step of SGD with momentum (:meth:`~.rules.SGDRule.next_weight`)."""
    members = [m for bucket in buckets for m in bucket if isinstance(m.rule, SGDRule) and m.group["momentum"]]
    weights = [(m, SGDRule.next_weight(m)) for m in members]
    try:
        yield
    finally:  # not before the step: base classes expect their own entries in a state that is not empty
        for m, weight in weights:
            if state := m.rule.optimizer.state.get(m.p):  # else the step was interrupted before there was a buffer
                state[GRADIENT_WEIGHT] = weight
