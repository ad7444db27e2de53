"""The rules of the base classes that are known: their first moments, their updates and their weight decay.

SGD, Adam, NAdam, RAdam and Adamax add weight decay to the gradient ("coupled"), so that decay is a part of their first
moment and of their update, too. It is taken out of both. To add a class, extend :class:`~.parameters.Rule`, whose
docstrings say what each method returns, and add it to ``_RULES``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch_optimizer
from torch import Tensor

from ..common.flat_storage import Tensors
from ..common.machines import is_asynchronous
from ..common.rates import Scalar, rate_of
from ..distributed import is_sharded
from .lamb import debiasing
from .parameters import Bucket, Member, Rule
from .state_keys import GRADIENT_WEIGHT, MOMENT


class SGDRule(Rule):
    """Its first moment, the momentum buffer, is a sum of gradients, not an average; its update is the first moment."""

    moment_key, adds_decay = "momentum_buffer", True
    leaves_gradients = True  # what a step of a subclass makes of a gradient is the update; see also _holds_update

    def keeps_moment(self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        return bool(group["momentum"]) and state.get(self.moment_key) is not None

    def needs_average(self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        """A momentum buffer that is not there yet does not count as missing: SGD makes it in its next step."""
        return not group["momentum"] or self.decays_moment(group)

    def updates_grow(self, state: Mapping[str, Any]) -> bool:
        return True

    def weight_of_gradients(self, m: Member) -> float:
        """It grows from 1 to ``1 / (1 - momentum)``."""
        if not m.group["momentum"]:
            return 1.0
        weight: float = m.state.get(GRADIENT_WEIGHT, 1.0) or 1.0
        return 1 + m.group["momentum"] * weight if m.group["nesterov"] else weight

    def weight_of_average(self, m: Member) -> float:
        weight: float = m.state[GRADIENT_WEIGHT] if m.has_first_moment else 1.0
        return weight

    def share_of_gradient(self, m: Member) -> float:
        """The average is per unit of the weight of all gradients, and so starts as the first one."""
        weight = m.state[GRADIENT_WEIGHT] or 1.0
        if MOMENT in m.state:
            return float((1 - m.group["dampening"]) / weight)
        return 1.0 if weight == 1 else 0.0

    def first_average(self, m: Member, share: float) -> Tensor:
        """What the momentum buffer holds already, if it is not to start with the new gradient.

        If plain SGD, or SGD without decay, has filled the momentum buffer before, it is the average in the buffer, less
        the decay that would be in it if the weights had not moved. A single gradient, used as if it were the average of
        ten, would lead steps far astray.
        """
        if share or not m.has_first_moment:
            return super().first_average(m, share)
        average = m.state[self.moment_key] / (m.state[GRADIENT_WEIGHT] or 1.0) - m.p * m.group["weight_decay"]
        return (-average if m.group["maximize"] else average).to(m.p.dtype)

    @staticmethod
    def next_weight(m: Member) -> float:
        """The sum c of the weights of all gradients in the momentum buffer after the coming step.

        It is 1 after the first gradient, then ``momentum * c + 1 - dampening``. In a buffer that plain SGD has filled,
        c is taken as the limit of that.
        """
        momentum, kept = m.group["momentum"], 1 - m.group["dampening"]
        weight = m.state.get(GRADIENT_WEIGHT)
        if weight is not None:
            return float(momentum * weight + kept)
        return kept / (1 - momentum) if m.has_first_moment and momentum < 1 else 1.0

    def moments(self, bucket: Bucket, descent: Tensors) -> Tensors:
        """Under Nesterov's momentum ``g + momentum * buffer``."""
        moments, group = super().moments(bucket, descent), bucket[0].group
        if moments is descent or not group["nesterov"] or not all(m.has_first_moment for m in bucket):
            return moments
        if all(map(_holds_update, bucket)):
            return descent
        return torch._foreach_add(descent, moments, alpha=group["momentum"])

    def weights_before(self, bucket: Bucket) -> Tensors:
        """The weights themselves: no copies are needed."""
        return [m.p for m in bucket]

    def updates(self, bucket: Bucket, before: Tensors, moments: Tensors, descent: Tensors) -> Tensors:
        """Moments or gradients as they are: exact, unlike a difference of rounded weights."""
        return moments if bucket[0].group["momentum"] else descent


def _holds_update(m: Member) -> bool:
    """Whether SGD has left its update, ``g + momentum * buffer``, where the gradient g was.

    Torch's multi-tensor SGD, its default on GPUs, does that under Nesterov's momentum if it had no reason to copy g.
    """
    group = m.group
    if group["weight_decay"] or group.get("maximize") or group.get("fused"):
        return False
    foreach = group.get("foreach")
    if is_sharded(m.gradient):  # for these, torch takes them only if told to, and counts no versions
        return bool(foreach)
    if foreach is None:  # as torch decides
        foreach = not m.p.is_cpu
    return foreach and (m.gradient.is_inference() or m.gradient._version != m.version)  # inference tensors count none


class MomentRule(Rule):
    """The rule of classes whose ``exp_avg`` is an average of the gradients."""

    def keeps_moment(self, p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        """One of another shape does not count: a subclass may project it."""
        moment = state.get(self.moment_key)
        return isinstance(moment, Tensor) and moment.shape == p.shape


class DecoupledRule(MomentRule):
    """The rule of torch's classes whose weight decay is decoupled, whatever their groups say."""

    def is_decoupled(self, group: Mapping[str, Any]) -> bool:
        return True


class AdamRule(MomentRule):
    """Adam's, and what Adam has in common with its relatives."""

    adds_decay = True

    def less_decay(self, bucket: Bucket, before: Tensors, moments: Tensors) -> Tensors:
        """The decay in a moment is the moment minus the average of gradients alone."""
        if not (self.decays_moment(bucket[0].group) and all(m.has_first_moment for m in bucket)):
            return before
        lr = rate_of(bucket[0].group)
        parts = zip(bucket, moments, before, strict=True)
        decays = [self.decay_in_update(m, m.state[self.moment_key] - moment, w).mul_(lr) for m, moment, w in parts]
        return torch._foreach_sub(before, decays)

    def decay_in_update(self, m: Member, in_moment: Tensor, weight: Tensor) -> Tensor:
        """The part of an update that is due to decay, per unit of the learning rate.

        Args:
            m: The parameter, with its state after the step.
            in_moment: The decay in its first moment; overwritten.
            weight: The parameter's value before the step.
        """
        _, weight1, weight2 = _corrections(m)
        return in_moment.div_(_denominator(m, weight2)).div_(weight1)


class NAdamRule(AdamRule):
    """NAdam also uses the decay in the last gradient."""

    def decay_in_update(self, m: Member, in_moment: Tensor, weight: Tensor) -> Tensor:
        steps, _, weight2 = _corrections(m)
        beta, falls = m.group["betas"][0], m.group["momentum_decay"]
        now, later = (beta * (1 - 0.5 * 0.96 ** (n * falls)) for n in (steps, steps + 1))
        product = float(m.state["mu_product"])
        of_weight = m.group["weight_decay"] * (1 - now) / (1 - product)
        found = (weight * of_weight).add_(in_moment.mul_(later / (1 - product * later)))
        return found.div_(_denominator(m, weight2))


class RAdamRule(AdamRule):
    """RAdam divides by the second moment only after some steps."""

    def decay_in_update(self, m: Member, in_moment: Tensor, weight: Tensor) -> Tensor:
        (steps, weight1, weight2), beta = _corrections(m), m.group["betas"][1]
        longest = 2 / (1 - beta) - 1
        length = longest - 2 * steps * beta**steps / weight2
        if length <= 5:
            return in_moment.div_(weight1)
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return in_moment.div_(_second(m).sqrt().add_(m.group["eps"])).mul_((rectified * weight2) ** 0.5 / weight1)


class AdamaxRule(AdamRule):
    """Adamax divides by the largest gradients instead of a second moment."""

    def decay_in_update(self, m: Member, in_moment: Tensor, weight: Tensor) -> Tensor:
        return in_moment.div_(m.state["exp_inf"]).div_(_corrections(m)[1])


class LambRule(MomentRule):
    """LAMB adds decay to the update, before it multiplies by the trust ratio."""

    leaves_gradients = True

    def less_decay(self, bucket: Bucket, before: Tensors, moments: Tensors) -> Tensors:
        group, lamb = bucket[0].group, self.optimizer
        assert isinstance(lamb, torch_optimizer.Lamb)
        ratios = [1.0 if lamb.adam else m.state["trust_ratio"] for m in bucket]
        sizes = [rate_of(group) * debiasing(lamb, group, m.state) for m in bucket]
        parts = zip(before, sizes, ratios, strict=True)
        return torch._foreach_sub(before, [w * (size * ratio * group["weight_decay"]) for w, size, ratio in parts])


def _second(m: Member) -> Tensor:
    """The second moment that the update was divided by."""
    found: Tensor = m.state["max_exp_avg_sq"] if m.group.get("amsgrad") else m.state["exp_avg_sq"]
    return found


def _denominator(m: Member, weight: Scalar) -> Tensor:
    """``sqrt(second moment / weight) + eps``."""
    return (_second(m) / weight).sqrt_().add_(m.group["eps"])


def _corrections(m: Member) -> tuple[Any, Scalar, Scalar]:
    """The number of steps, and the weights of all gradients so far in the first and in the second moment."""
    steps = m.state["step"]
    if not (isinstance(steps, Tensor) and is_asynchronous(steps.device)):
        steps = float(steps)  # not from a device, where fused kernels count steps: that would wait for it
    weight1, weight2 = (bias_correction(beta, steps) for beta in m.group["betas"])
    return steps, weight1, weight2


def bias_correction(beta: float, steps: float | Tensor) -> Scalar:
    """``1 - beta^steps``, the weight of all gradients so far in a moment; on the device of ``steps``, if a tensor."""
    if not isinstance(steps, Tensor):
        return 1 - beta**steps
    return -torch.expm1(steps * math.log(beta)) if beta else 1.0  # float32 would round 1 - beta^steps


# The rules by class; the first that fits counts. Not every version of torch has Muon, and in some AdamW is an Adam.
_DECOUPLED = tuple(getattr(torch.optim, name) for name in ("AdamW", "Adafactor", "Muon") if hasattr(torch.optim, name))
_RULES: list[tuple[Any, type[Rule]]] = [
    (torch.optim.SGD, SGDRule),
    (_DECOUPLED, DecoupledRule),
    (torch.optim.NAdam, NAdamRule),
    (torch.optim.RAdam, RAdamRule),
    (torch.optim.Adamax, AdamaxRule),
    (torch.optim.Adam, AdamRule),
    (torch_optimizer.Lamb, LambRule),
]


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer's base class."""
    return next((rule for base, rule in _RULES if isinstance(optimizer, base)), Rule)(optimizer)


def buckets_of(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """The parameters that have a gradient, in buckets."""
    found: list[Bucket] = []
    rule = rule_of(optimizer)
    for group in optimizer.param_groups:
        kinds: dict[Any, Bucket] = {}
        for p in group["params"]:
            if (gradient := p.grad) is not None:
                kind = type(p), p.device, p.dtype, gradient.dtype
                kinds.setdefault(kind, []).append(Member(p, gradient, group, optimizer.state.get(p) or {}, rule))
        found += kinds.values()
    return found
