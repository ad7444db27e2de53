"""First moments of gradients, which K-FAC preconditions.

SGD, Adam, NAdam, RAdam and Adamax add weight decay to the gradient ("coupled"), so that decay is a part of their first
moment too. For them the gradients alone are averaged here as well, in the same way as the base class averages the sum.
The decay in its moment cannot be computed from the present weights, because weights move: K-FAC would take the error
for a gradient, and go far along it where true gradients are small. (With a decay of 0.1 under SGD, rows of an embedding
grew a thousandfold.) For base classes without a first moment that is known here (SGD without momentum, Adagrad,
RMSprop, Adadelta, Muon) the gradients are averaged here while trust is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..common.flat_storage import Tensors
from ..distributed import is_sharded
from .parameters import Bucket, Member
from .state_keys import GRADIENT_WEIGHT, MOMENT

__all__ = ["first_moments", "gradient_weight_tracked", "keep_averages"]


def first_moments(bucket: Bucket, descent: Tensors) -> Tensors:
    """The first moments of the raw gradients, to be subtracted from the weights, after :func:`keep_averages`.

    ``descent``: the gradients, negated under ``maximize``; returned if some parameters have no first moment.
    """
    group = bucket[0].group
    found: list[Tensor] = []
    factors: list[float] = []
    for m in bucket:
        if MOMENT in m.state:
            weight = m.state[GRADIENT_WEIGHT] if m.is_sgd and m.has_first_moment else 1.0
            found.append(m.state[MOMENT])
            factors.append(-weight if group.get("maximize") else weight)
        elif m.has_first_moment:
            found.append(m.state["momentum_buffer" if m.is_sgd else "exp_avg"])
            factors.append(1.0)
        else:
            return descent
    moments: Tensors = torch._foreach_mul(found, factors) if any(factor != 1 for factor in factors) else found
    if bucket[0].is_sgd and group["nesterov"] and all(m.has_first_moment for m in bucket):  # not Muon's ``nesterov``
        if all(map(_holds_update, bucket)):
            return descent
        return torch._foreach_add(descent, moments, alpha=group["momentum"])
    return moments


def _holds_update(m: Member) -> bool:
    """Whether the base class has left its update, ``g + momentum * buffer``, where the gradient g was.

    Torch's multi-tensor SGD, its default on GPUs, does that under Nesterov's momentum if it had no reason to copy g.
    """
    group = m.group
    if not (m.is_sgd and group["nesterov"]) or group["weight_decay"] or group.get("maximize") or group.get("fused"):
        return False
    foreach = group.get("foreach")
    if is_sharded(m.gradient):  # for these, torch takes them only if told to, and counts no versions
        return bool(foreach)
    if foreach is None:  # as torch decides
        foreach = not m.p.is_cpu
    return foreach and (m.gradient.is_inference() or m.gradient._version != m.version)  # inference tensors count none


def keep_averages(buckets: Sequence[Bucket], decay: float | None) -> None:
    """Updates the averages of gradients in the optimizer's state, after a step of the base class.

    Args:
        buckets: The parameters of interest, with their states after the step.
        decay: The decay of the average if the base class keeps no first moment, in [0, 1); None: no average is kept
            then. If the base class's moment has weight decay in it, gradients are averaged as they are in that moment.
    """
    for bucket in buckets:
        by_share: dict[float, Bucket] = {}
        for m in bucket:
            share = _share_of_gradient(m, decay)
            if share is None:
                m.state.pop(MOMENT, None)  # it was kept before a scheduler switched the base class's momentum on
            else:
                by_share.setdefault(share, []).append(m)
        for share, some in by_share.items():
            averages = [_kept_average(m) if MOMENT in m.state else _first_average(m, share) for m in some]
            gradients, dtype = [m.gradient for m in some], some[0].p.dtype
            if gradients[0].dtype != dtype:  # ``grad_dtype``
                gradients = [gradient.to(dtype) for gradient in gradients]
            torch._foreach_lerp_(averages, gradients, share)  # before torch 2.12 shards have only the in-place version
            for m, average in zip(some, averages, strict=True):
                m.state[MOMENT] = average


def _share_of_gradient(m: Member, decay: float | None) -> float | None:
    """The new gradient's share in the average kept here; None: none is kept. ``decay``: see :func:`keep_averages`."""
    if not m.has_first_moment:
        return None if decay is None else 1 - decay
    if not m.decay_in_moment:
        return None
    if m.is_sgd:  # the average is per unit of the weight of all gradients, and so starts as the first gradient
        weight = m.state[GRADIENT_WEIGHT] or 1.0
        if MOMENT in m.state:
            return (1 - m.group["dampening"]) / weight
        return 1.0 if weight == 1 else 0.0
    return 1 - float(m.group["betas"][0])  # this average starts at zero, as Adam's own moment does


def _kept_average(m: Member) -> Tensor:
    """The average so far, as the parameter is now; comparing takes less time than ``to`` does."""
    average: Tensor = m.state[MOMENT]
    return average if average.dtype is m.p.dtype and average.device == m.p.device else average.to(m.p)


def _first_average(m: Member, share: float) -> Tensor:
    """The average before its first update; ``share``: that of the new gradient.

    If plain SGD, or SGD without decay, has filled the momentum buffer before, it is the average in the buffer, less the
    decay that would be in it if the weights had not moved. A single gradient, used as if it were the average of ten,
    would lead steps far astray.
    """
    if share or not (m.is_sgd and m.has_first_moment):
        return torch.zeros_like(m.p)
    average = m.state["momentum_buffer"] / (m.state[GRADIENT_WEIGHT] or 1.0) - m.p * m.group["weight_decay"]
    return (-average if m.group["maximize"] else average).to(m.p.dtype)


@contextmanager
def gradient_weight_tracked(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> Iterator[None]:
    """Updates ``state[GRADIENT_WEIGHT]`` after a step of SGD.

    It is the sum c of the weights of all gradients in the momentum buffer: 1 after the first gradient, then
    ``momentum * c + 1 - dampening``. In a buffer that plain SGD has filled, c is taken as the limit of that.
    """
    weights: list[tuple[Member, float]] = []
    for bucket in buckets if isinstance(optimizer, torch.optim.SGD) else ():
        momentum, kept = bucket[0].group["momentum"], 1 - bucket[0].group["dampening"]
        for m in bucket if momentum else ():
            known = m.state.get(GRADIENT_WEIGHT)
            if known is not None:
                weights.append((m, momentum * known + kept))
            else:
                weights.append((m, kept / (1 - momentum) if m.has_first_moment and momentum < 1 else 1.0))
    try:
        yield
    finally:  # not before the step: base classes expect their own entries in a state that is not empty
        for m, weight in weights:
            if state := optimizer.state.get(m.p):  # else the step was interrupted before it had created a buffer
                state[GRADIENT_WEIGHT] = weight
