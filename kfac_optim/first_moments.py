"""The parameters of a step, and the first moments of their gradients, which K-FAC preconditions.

SGD, Adam and its kin add weight decay to the gradient ("coupled"), so that it is a part of their first moment too.
There the gradients alone are averaged here as well, as the base class averages them. What its moment has of decay could
not be told from the weights as they are now: these move, and K-FAC would take what is left over for a gradient, and go
far along it where true ones are small. (With a decay of 0.1 under SGD rows of an embedding grew a thousandfold so.)

Base classes whose first moment is not known (SGD without momentum, Adagrad, RMSprop, Adadelta, Muon) get an average of
the gradients, kept here while trust is learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .flat_storage import Tensors
from .rates import Scalar
from .state_keys import GRADIENT_WEIGHT, MOMENT

__all__ = [
    "Bucket",
    "Member",
    "averages_gradients",
    "bias_correction",
    "first_moments",
    "gradient_weight_tracked",
    "gradients_of",
    "is_decoupled",
    "keep_averages",
    "members_of",
    "needs_average",
]

# Classes of torch that shrink the weights by lr * weight_decay beside their update; Muon is not in every version.
_DECOUPLED = tuple(getattr(torch.optim, name) for name in ("AdamW", "Adafactor", "Muon") if hasattr(torch.optim, name))
# Those that add it to the gradient, unless their groups say otherwise, and keep an average of the sum.
_COUPLED = (torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


@dataclass(slots=True)
class Member:
    """A parameter in a step.

    Attributes:
        p: The parameter.
        gradient: Its gradient.
        group: Its group.
        state: What the optimizer's state has of it; where that is nothing an empty dict, and what is written to it
            before :meth:`take_state` is lost.
        is_sgd: Whether the base class is SGD.
        decay_in_moment: Whether weight decay is a part of the first moment that the base class keeps.
        has_first_moment: Whether there is one in the state that the base class keeps.
    """

    p: nn.Parameter
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    is_sgd: bool
    decay_in_moment: bool
    has_first_moment: bool = field(init=False)

    def __post_init__(self) -> None:
        self._look_at_state()

    def _look_at_state(self) -> None:
        kept = _keeps_first_moment(self.p, self.group, self.state, is_sgd=self.is_sgd)
        self.has_first_moment = kept and (not self.is_sgd or self.state.get("momentum_buffer") is not None)

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks its state up again, which the base class may have made; makes one where there is none."""
        self.state = optimizer.state[self.p]
        self._look_at_state()

    @property
    def moment_weight(self) -> float:
        """The sum of the weights of gradients in the first moment of SGD; of averages of gradients, and of none, 1."""
        if not self.is_sgd or not self.group["momentum"]:
            return 1.0
        weight: float = self.state.get(GRADIENT_WEIGHT, 1.0) or 1.0
        return 1 + self.group["momentum"] * weight if self.group["nesterov"] else weight


Bucket = list[Member]  # of one group, device and type: what multi-tensor operations take together


def members_of(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """The parameters that have a gradient."""
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


def gradients_of(members: Sequence[Bucket]) -> dict[nn.Parameter, Tensor]:
    """Their gradients, by parameter."""
    return {m.p: m.gradient for bucket in members for m in bucket}


def first_moments(bucket: Bucket, descent: Tensors) -> Tensors:
    """The first moments of the raw gradients, in the direction of descent, after :func:`keep_averages`.

    ``descent``: the gradients, in that direction; what is found where some parameters have no first moment.
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
    if bucket[0].is_sgd and group["nesterov"] and all(m.has_first_moment for m in bucket):  # in others it is theirs
        return torch._foreach_add(descent, moments, alpha=group["momentum"])
    return moments


def keep_averages(members: Sequence[Bucket], decay: float | None) -> None:
    """Takes gradients into averages in the optimizer's state, after a step of the base class.

    Args:
        members: The parameters of interest, with their states after it.
        decay: How much of the last average is left where the base class keeps none, in [0, 1); None: there none is kept
            here either. Where weight decay is a part of the base class's, gradients are averaged as it averages them.
    """
    for bucket in members:
        by_share: dict[float, Bucket] = {}
        for m in bucket:
            share = _share_of_gradient(m, decay)
            if share is None:
                m.state.pop(MOMENT, None)  # a scheduler has given the base class one
            else:
                by_share.setdefault(share, []).append(m)
        for share, some in by_share.items():
            averages = [m.state[MOMENT].to(m.p) if MOMENT in m.state else _first_average(m, share) for m in some]
            gradients, dtype = [m.gradient for m in some], some[0].p.dtype
            if gradients[0].dtype != dtype:  # ``grad_dtype``
                gradients = [gradient.to(dtype) for gradient in gradients]
            torch._foreach_lerp_(averages, gradients, share)  # in place: before torch 2.12 shards know no other
            for m, average in zip(some, averages, strict=True):
                m.state[MOMENT] = average


def _share_of_gradient(m: Member, decay: float | None) -> float | None:
    """The share of a gradient in the average that is kept here; None: none is. ``decay``: see :func:`keep_averages`."""
    if not m.has_first_moment:
        return None if decay is None else 1 - decay
    if not m.decay_in_moment:
        return None
    if m.is_sgd:  # per unit of the weight of all gradients; of the first one all
        weight = m.state[GRADIENT_WEIGHT] or 1.0
        if MOMENT in m.state:
            return (1 - m.group["dampening"]) / weight
        return 1.0 if weight == 1 else 0.0
    return 1 - float(m.group["betas"][0])  # from zero, as Adam's own


def _first_average(m: Member, share: float) -> Tensor:
    """What the first average goes on from; ``share``: that of the gradient.

    Where SGD's buffer has been filled before, by plain SGD or without decay, it is what that holds, less the decay that
    it would have if the weights had not moved. From a single gradient, which stands for ten, steps would go far astray.
    """
    if share or not (m.is_sgd and m.has_first_moment):
        return torch.zeros_like(m.p)
    average = m.state["momentum_buffer"] / (m.state[GRADIENT_WEIGHT] or 1.0) - m.p * m.group["weight_decay"]
    return (-average if m.group["maximize"] else average).to(m.p.dtype)


@contextmanager
def gradient_weight_tracked(optimizer: torch.optim.Optimizer, members: Sequence[Bucket]) -> Iterator[None]:
    """Keeps ``state[GRADIENT_WEIGHT]`` through a step of SGD.

    It is the sum of the weights with which gradients stand in the momentum buffer: 1 after the first, then
    ``momentum * c + 1 - dampening``; in a buffer that plain SGD has filled, its limit.
    """
    weights: list[tuple[Member, float]] = []
    for bucket in members if isinstance(optimizer, torch.optim.SGD) else ():
        momentum, kept = bucket[0].group["momentum"], 1 - bucket[0].group["dampening"]
        for m in bucket if momentum else ():
            known = m.state.get(GRADIENT_WEIGHT)
            if known is not None:
                weights.append((m, momentum * known + kept))
            else:
                weights.append((m, kept / (1 - momentum) if m.has_first_moment and momentum < 1 else 1.0))
    try:
        yield
    finally:  # not before: base classes take a state that is not empty for their own
        for m, weight in weights:
            if optimizer.state.get(m.p):  # else the step was interrupted before it had made a buffer
                optimizer.state[m.p][GRADIENT_WEIGHT] = weight


# What base classes do ------------------------------------------------------------------------------------------------


def needs_average(
    optimizer: torch.optim.Optimizer, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]
) -> bool:
    """Whether the gradients of a parameter may be averaged here: the base class does not, or averages decay too."""
    kept = _keeps_first_moment(p, group, state, is_sgd=isinstance(optimizer, torch.optim.SGD))
    return not kept or _has_decay_in_moment(optimizer, group)


def _keeps_first_moment(p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], *, is_sgd: bool) -> bool:
    """Whether the base class keeps a first moment of a parameter that is known here; SGD from its next step on.

    Other classes than SGD have something else in their momentum: RMSprop gradients that it has divided already.
    """
    if is_sgd:
        return bool(group["momentum"])
    moment = state.get("exp_avg")  # that of projected or masked gradients has another shape
    return isinstance(moment, Tensor) and moment.shape == p.shape


def _has_decay_in_moment(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay becomes a part of the first moment; in classes that are not known here it stays one."""
    return bool(group.get("weight_decay")) and isinstance(optimizer, _COUPLED) and not is_decoupled(optimizer, group)


def is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weights shrink by ``lr * weight_decay`` of themselves, and moments have nothing of it."""
    return bool(group.get("decoupled_weight_decay")) or isinstance(optimizer, _DECOUPLED)


def averages_gradients(group: Mapping[str, Any]) -> bool:
    """Whether first moments that a base class keeps are averages: at a first beta of 0 each is a single gradient."""
    beta = (group.get("betas") or (1.0,))[0]
    return isinstance(beta, Tensor) or beta != 0  # a tensor may be on a device, which would be waited for


def bias_correction(beta: float, steps: float | Tensor) -> Scalar:
    """``1 - beta^steps``, the weight of all gradients so far in a moment; computed where a tensor of steps is."""
    if not isinstance(steps, Tensor):
        return 1 - beta**steps
    return -torch.expm1(steps * math.log(beta)) if beta else 1.0  # float32 would round 1 - beta^steps
