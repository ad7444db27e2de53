"""The parameters of a step, and the first moments of their gradients, which K-FAC preconditions.

SGD, Adam, NAdam, RAdam and Adamax add weight decay to the gradient ("coupled"), so that decay is a part of their first
moment too. For them the gradients alone are averaged here as well, in the same way as the base class averages the sum.
The decay in its moment cannot be computed from the present weights, because weights move: K-FAC would take the error
for a gradient, and go far along it where true gradients are small. (With a decay of 0.1 under SGD, rows of an embedding
grew a thousandfold.) For base classes without a first moment that is known here (SGD without momentum, Adagrad,
RMSprop, Adadelta, Muon) the gradients are averaged here while trust is learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import is_sharded
from .flat_storage import Tensors
from .rates import Scalar
from .state_keys import GRADIENT_WEIGHT, MOMENT

__all__ = [
    "Bucket",
    "Member",
    "averages_gradients",
    "bias_correction",
    "buckets_of",
    "first_moments",
    "gradient_weight_tracked",
    "gradients_of",
    "is_decoupled",
    "keep_averages",
    "needs_average",
]

# Torch's classes that shrink weights by lr * weight_decay, apart from the update; not every version has Muon.
_DECOUPLED = tuple(getattr(torch.optim, name) for name in ("AdamW", "Adafactor", "Muon") if hasattr(torch.optim, name))
# Those that add weight decay to the gradient, unless their groups say otherwise, and keep an average of the sum.
_COUPLED = (torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


@dataclass(slots=True, eq=False)
class Member:
    """A parameter in a step; equal to itself alone.

    Attributes:
        p: The parameter.
        gradient: Its gradient.
        group: Its group.
        state: Its state in the optimizer. If there is none yet, an empty dict; entries written to that before
            :meth:`take_state` are lost.
        is_sgd: Whether the base class is SGD.
        decay_in_moment: Whether weight decay is a part of the first moment that the base class keeps.
        has_first_moment: Whether the state holds a first moment of the base class.
        version: Of the gradient, counted by torch; looked up for Nesterov's momentum alone.
    """

    p: nn.Parameter
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    is_sgd: bool
    decay_in_moment: bool
    has_first_moment: bool = field(init=False)
    version: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._look_at_state()
        if self.is_sgd and self.group["nesterov"] and not self.gradient.is_inference():
            self.version = self.gradient._version

    def _look_at_state(self) -> None:
        if self.is_sgd:
            self.has_first_moment = bool(self.group["momentum"]) and self.state.get("momentum_buffer") is not None
        else:
            self.has_first_moment = _has_average(self.p, self.state)

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks up the state again, which the base class may have created; creates it if there is none."""
        self.state = optimizer.state[self.p]
        self._look_at_state()

    @property
    def moment_weight(self) -> float:
        """The sum of the weights of all gradients in the first moment, which is 1 except for the momentum of SGD."""
        if not self.is_sgd or not self.group["momentum"]:
            return 1.0
        weight: float = self.state.get(GRADIENT_WEIGHT, 1.0) or 1.0
        return 1 + self.group["momentum"] * weight if self.group["nesterov"] else weight


Bucket = list[Member]  # of one group, device and type, so that one multi-tensor operation can take all of them


def buckets_of(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """The parameters that have a gradient, in buckets."""
    found: list[Bucket] = []
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    for group in optimizer.param_groups:
        kinds: dict[Any, Bucket] = {}
        has_decay = _has_decay_in_moment(optimizer, group)
        for p in group["params"]:
            if (gradient := p.grad) is not None:
                kind = type(p), p.device, p.dtype, gradient.dtype
                member = Member(p, gradient, group, optimizer.state.get(p) or {}, is_sgd, has_decay)
                kinds.setdefault(kind, []).append(member)
        found += kinds.values()
    return found


def gradients_of(buckets: Sequence[Bucket]) -> dict[nn.Parameter, Tensor]:
    """The gradients, by parameter."""
    return {m.p: m.gradient for bucket in buckets for m in bucket}


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
        foreach = m.p.device.type != "cpu"
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


# What base classes do ------------------------------------------------------------------------------------------------


def needs_average(
    optimizer: torch.optim.Optimizer, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> bool:
    """Whether gradients may be averaged here: the base class keeps no first moment, or one with weight decay in it."""
    # SGD may create its first moment only in its next step.
    kept = bool(group["momentum"]) if isinstance(optimizer, torch.optim.SGD) else _has_average(p, state)
    return not kept or _has_decay_in_moment(optimizer, group)


def _has_average(p: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether a base class other than SGD keeps a first moment that is known here.

    In some of them ``momentum`` means something else: RMSprop averages gradients that it has already divided.
    """
    moment = state.get("exp_avg")  # a moment of projected or masked gradients has another shape and does not count
    return isinstance(moment, Tensor) and moment.shape == p.shape


def _has_decay_in_moment(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay gets into the first moment and is kept out here; for unknown classes it is not kept out."""
    return bool(group.get("weight_decay")) and isinstance(optimizer, _COUPLED) and not is_decoupled(optimizer, group)


def is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weights shrink by the factor ``1 - lr * weight_decay``, and moments have no decay in them."""
    return bool(group.get("decoupled_weight_decay")) or isinstance(optimizer, _DECOUPLED)


def averages_gradients(group: Mapping[str, Any]) -> bool:
    """Whether the base class's first moments are averages; at a first beta of 0 each is a single gradient."""
    beta = (group.get("betas") or (1.0,))[0]
    return isinstance(beta, Tensor) or beta != 0  # reading a tensor could mean waiting for a device


def bias_correction(beta: float, steps: float | Tensor) -> Scalar:
    """``1 - beta^steps``, the weight of all gradients so far in a moment; on the device of ``steps``, if a tensor."""
    if not isinstance(steps, Tensor):
        return 1 - beta**steps
    return -torch.expm1(steps * math.log(beta)) if beta else 1.0  # float32 would round 1 - beta^steps
