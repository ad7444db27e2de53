"""The parameters of a step, and what the base class does with their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .state_keys import GRADIENT_WEIGHT

__all__ = ["Bucket", "Member", "averages_gradients", "buckets_of", "gradients_of", "is_decoupled", "needs_average"]

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
