"""The parameters of a step, and the rule by which the base class takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..common.flat_storage import Tensors
from ..common.rates import Scalar, rate_of
from .state_keys import MOMENT


class Rule:
    """What a base class does with gradients; this one is for classes of which nothing else is known.

    Its update is what it has subtracted from the weights, weight decay included unless its groups say
    ``decoupled_weight_decay``. Rules of classes that are known extend it (:mod:`~kfac_optim.bases.rules`).

    Args:
        optimizer: The optimizer.
    """

    moment_key = "exp_avg"  # of a first moment in a parameter's state
    adds_decay = False  # whether the class adds weight decay to the gradient, unless its groups say otherwise

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def leaves_gradients(self) -> bool:
        """Whether the base's step leaves gradients as they are, as torch's do; others may add weight decay to them."""
        steps = (cls.__module__ for cls in type(self.optimizer).__mro__ if "step" in vars(cls))
        return next(name for name in steps if not name.startswith("kfac_optim.")).startswith("torch.optim.")

    # Moments --------------------------------------------------------------------------------------------------------

    def keeps_moment(self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        """Whether the state holds a first moment of the raw gradients. That of an unknown class may be of others.

        RMSprop's momentum and NovoGrad's ``exp_avg`` are of gradients that have been divided before; other classes
        multiply or project them.
        """
        return False

    def needs_average(self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        """Whether gradients may be averaged here: the class keeps no first moment, or one with weight decay in it."""
        return not self.keeps_moment(p, group, state) or self.decays_moment(group)

    def averages_gradients(self, group: Mapping[str, Any]) -> bool:
        """Whether first moments are averages; at a first beta of 0 each is a single gradient."""
        beta = (group.get("betas") or (1.0,))[0]
        return isinstance(beta, Tensor) or beta != 0  # reading a tensor could mean waiting for a device

    def updates_grow(self, state: Mapping[str, Any]) -> bool:
        """Whether updates grow with the gradient: not those that are made from a moment, as Adam makes them."""
        return self.moment_key not in state

    def weight_of_gradients(self, m: Member) -> float:
        """The sum of the weights of all gradients in the update."""
        return 1.0

    def weight_of_average(self, m: Member) -> float:
        """How many times as large the first moment is as the average of gradients that is kept here."""
        return 1.0

    def share_of_gradient(self, m: Member) -> float:
        """The new gradient's share in an average that is kept beside a first moment with weight decay in it."""
        return 1 - float(m.group["betas"][0])  # this average starts at zero, as Adam's own moment does

    def first_average(self, m: Member, share: float) -> Tensor:
        """The average of gradients before its first update; ``share``: that of the new gradient."""
        return torch.zeros_like(m.p)

    def moments(self, bucket: Bucket, descent: Tensors) -> Tensors:
        """The first moments of the raw gradients, to be subtracted from the weights.

        Args:
            bucket: Parameters, after the step and after :func:`~kfac_optim.bases.first_moments.keep_averages`.
            descent: The gradients, negated under ``maximize``; returned if some parameters have no first moment.
        """
        sign = -1.0 if bucket[0].group.get("maximize") else 1.0
        found: list[Tensor] = []
        multipliers: list[float] = []
        for m in bucket:
            if MOMENT in m.state:
                found.append(m.state[MOMENT])
                multipliers.append(sign * self.weight_of_average(m))
            elif m.has_first_moment:
                found.append(m.state[self.moment_key])
                multipliers.append(1.0)
            else:
                return descent
        return torch._foreach_mul(found, multipliers) if any(x != 1 for x in multipliers) else found

    # Updates --------------------------------------------------------------------------------------------------------

    def weights_before(self, bucket: Bucket) -> Tensors:
        """Copies of the weights before the step, less the decay that the step subtracts apart from its update."""
        params: list[Tensor] = [m.p for m in bucket]
        group = bucket[0].group
        kept: Scalar = 1.0
        if (decay := group.get("weight_decay")) and self.is_decoupled(group):
            kept = 1 - rate_of(group) * decay
        if isinstance(kept, Tensor):
            return [p * kept for p in params]
        return torch._foreach_mul(params, kept)

    def updates(self, bucket: Bucket, before: Tensors, moments: Tensors, descent: Tensors) -> Tensors:
        """What the class has subtracted from the weights because of gradients, per unit of the learning rate.

        Args:
            bucket: Parameters, after the step.
            before: What :meth:`weights_before` returned before the step.
            moments: Their first moments, see :meth:`moments`; returned if they are the updates.
            descent: The gradients, negated under ``maximize``.
        """
        group, lr = bucket[0].group, rate_of(bucket[0].group)
        updates = list(self.less_decay(bucket, before, moments) if group.get("weight_decay") else before)
        torch._foreach_sub_(updates, [m.p for m in bucket])
        # At a rate of 0 the differences are 0, and dividing them by 1 leaves them so.
        torch._foreach_div_(updates, torch.where(lr == 0, 1.0, lr) if isinstance(lr, Tensor) else lr or 1.0)
        return updates

    # Weight decay ---------------------------------------------------------------------------------------------------

    def is_decoupled(self, group: Mapping[str, Any]) -> bool:
        """Whether weights shrink by the factor ``1 - lr * weight_decay``, and moments have no decay in them."""
        return bool(group.get("decoupled_weight_decay"))

    def decays_moment(self, group: Mapping[str, Any]) -> bool:
        """Whether weight decay gets into the first moment and is kept out here; for unknown classes it is not."""
        return self.adds_decay and bool(group.get("weight_decay")) and not self.is_decoupled(group)

    def less_decay(self, bucket: Bucket, before: Tensors, moments: Tensors) -> Tensors:
        """Weights before a step, less the decay that the class has added to the gradient or to the update; copies."""
        return before


@dataclass(slots=True, eq=False)
class Member:
    """A parameter in a step; equal to itself alone.

    Attributes:
        p: The parameter.
        gradient: Its gradient.
        group: Its group.
        state: Its state in the optimizer. If there is none yet, an empty dict; entries written to that before
            :meth:`take_state` are lost.
        rule: What the base class does with the gradient.
        has_first_moment: Whether the state holds a first moment of the base class.
        version: Of the gradient before the step, counted by torch.
    """

    p: nn.Parameter
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    rule: Rule
    has_first_moment: bool = field(init=False)
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.has_first_moment = self.rule.keeps_moment(self.p, self.group, self.state)
        self.version = 0 if self.gradient.is_inference() else self.gradient._version

    def keep_gradient(self) -> None:
        """Keeps a copy of the gradient, because the base class's step may write into it."""
        self.gradient = self.gradient.clone()

    def take_state(self) -> None:
        """Looks up the state again, which the base class may have created; creates it if there is none."""
        self.state = self.rule.optimizer.state[self.p]
        self.has_first_moment = self.rule.keeps_moment(self.p, self.group, self.state)


Bucket = list[Member]  # of one group, device and type, so that one multi-tensor operation can take all of them


def gradients_of(buckets: Sequence[Bucket]) -> dict[nn.Parameter, Tensor]:
    """The gradients, by parameter."""
    return {m.p: m.gradient for bucket in buckets for m in bucket}
