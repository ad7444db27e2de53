"""Takes the base class's own step apart: its first moment m, its update u and its weight decay D.

    w <- w - D - lr u

By default the base class takes this step on the raw gradients, with its own state; K-FAC then preconditions m, and
changes u (:mod:`~kfac_optim.steering`). Weight decay is not preconditioned, and does not count towards the length of
the update, even if the base class adds it to the gradient, as SGD and Adam do (:mod:`~kfac_optim.bases.first_moments`).

If m is an average kept by this package, K-FAC's direction comes from m, its length from the base class's own update.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_optimizer
from torch import Tensor, nn

from ..common.flat_storage import Tensors
from ..common.machines import is_asynchronous
from ..common.rates import Scalar, rate_of
from ..distributed import any_sharded, is_sharded, summed_over_shards
from .first_moments import first_moments
from .lamb import debiasing
from .parameters import Bucket, Member, is_decoupled

__all__ = [
    "BaseStep",
    "base_step",
    "bias_correction",
    "multiplied",
    "refuse_base",
    "refuse_order",
    "subtract_",
    "subtract_multiples_",
    "update_length",
    "weights_before",
]


def refuse_base(cls: type, step: Callable[..., Any]) -> None:
    """Raises TypeError if K-FAC can't be put in front of the base class of an optimizer.

    Args:
        cls: The optimizer's class.
        step: The base class's ``step``.
    """
    instead = "Take a base class such as torch.optim.SGD or Adam"
    needed = inspect.signature(step).parameters.get("closure")
    if needed is not None and needed.default is inspect.Parameter.empty:
        raise TypeError(
            f"{cls.__name__}: its base class's step() needs a closure, to take several gradients in one step; K-FAC "
            f"preconditions the one that stands in .grad. {instead}, whose step() works without a closure"
        )
    if issubclass(cls, torch.optim.Rprop):
        raise TypeError(
            f"{cls.__name__}: Rprop lets the step of each weight grow while its gradients keep their sign, which is no "
            f"answer to steps that K-FAC has turned; it diverges. {instead}"
        )


def refuse_order(cls: type, mixin: type) -> None:
    """Raises TypeError if a class has an optimizer in front of the mixin, whose methods it would then never call.

    Those of torch and of torch_optimizer do all by themselves; others may hand over to the next class.
    """
    before = cls.__mro__[: cls.__mro__.index(mixin)]
    for base in before:
        is_known = base.__module__.startswith(("torch.", "torch_optimizer."))
        if is_known and issubclass(base, torch.optim.Optimizer) and not issubclass(base, mixin):
            raise TypeError(
                f"{cls.__name__}: {base.__name__} comes before {mixin.__name__} among its bases, so that it would train"
                f" as {base.__name__} alone: write class {cls.__name__}({mixin.__name__}, {base.__name__})"
            )


@dataclass(frozen=True)
class BaseStep:
    """The parts of the base class's step, by parameter.

    Attributes:
        moments: The first moments of the raw gradients, negated under ``maximize``; the gradients themselves where no
            moment is kept.
        updates: What the base class subtracted from the weights because of the gradients, per unit of the learning
            rate. If it is the moment itself, it is the same tensor; if all are, it is the same dict.
    """

    moments: dict[nn.Parameter, Tensor]
    updates: dict[nn.Parameter, Tensor]


def base_step(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], before: Sequence[Tensors]) -> BaseStep:
    """Takes apart the step that the base class has just taken, after :func:`~.first_moments.keep_averages`.

    Args:
        optimizer: The optimizer, after its step.
        buckets: The parameters of interest, with their states after the step.
        before: What :func:`weights_before` returned before the step.
    """
    moments_of: dict[nn.Parameter, Tensor] = {}
    updates_of: dict[nn.Parameter, Tensor] = {}
    alike = True
    for bucket, weights in zip(buckets, before, strict=True):
        moments, updates = _take_apart(optimizer, bucket, weights)
        params, alike = [m.p for m in bucket], alike and updates is moments
        moments_of.update(zip(params, moments, strict=True))
        updates_of.update(zip(params, updates, strict=True))
    return BaseStep(moments_of, moments_of if alike else updates_of)


def _take_apart(optimizer: torch.optim.Optimizer, bucket: Bucket, before: Tensors) -> tuple[Tensors, Tensors]:
    """The first moments and the updates of some parameters."""
    group, is_sgd = bucket[0].group, bucket[0].is_sgd
    gradients = [m.gradient for m in bucket]
    descent: Tensors = torch._foreach_neg(gradients) if group.get("maximize") else gradients
    moments = first_moments(bucket, descent)
    if is_sgd:
        return moments, moments if group["momentum"] else descent  # exact, unlike a difference of rounded weights
    lr = rate_of(group)
    updates = list(_less_decay(optimizer, bucket, before, moments))  # copies, which may be overwritten
    torch._foreach_sub_(updates, [m.p for m in bucket])
    # At a rate of 0 the differences are 0, and dividing them by 1 leaves them so.
    torch._foreach_div_(updates, torch.where(lr == 0, 1.0, lr) if isinstance(lr, Tensor) else lr or 1.0)
    return moments, updates


def update_length(
    buckets: Sequence[Bucket], updates: Sequence[Tensor], known_length: Callable[[], Tensor | None]
) -> Tensor:
    """The norm of all updates together, 0-dim, per unit of the weight that gradients have in the momentum of SGD.

    That weight grows from 1 to ``1 / (1 - momentum)``. A collective if updates are sharded.

    Args:
        buckets: The parameters, with their states after the step.
        updates: Their updates, in the same order.
        known_length: Returns the norm of all updates if it is known at little cost, else None.
    """
    weights = [m.moment_weight for bucket in buckets for m in bucket]
    if len(set(weights)) == 1 and (length := known_length()) is not None:
        return length / weights[0]
    dtype = torch.float64 if any(update.dtype == torch.float64 for update in updates) else torch.float32
    if any_sharded(updates):
        squares = summed_over_shards([update.to(dtype).square().sum() for update in updates])
        norms: Tensors = torch._foreach_sqrt(squares)
    else:
        norms = torch._foreach_norm(list(updates), 2, dtype=dtype)
    if any(weight != 1 for weight in weights):
        norms = torch._foreach_div(norms, weights)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _less_decay(optimizer: torch.optim.Optimizer, bucket: Bucket, before: Tensors, moments: Tensors) -> Tensors:
    """Weights before a step, less the weight decay that the base class added to the gradient or to the update.

    Decay stays a part of the update for base classes whose first moment is not known to contain it, unless their groups
    set ``decoupled_weight_decay``.
    """
    group, lr = bucket[0].group, rate_of(bucket[0].group)
    if not group.get("weight_decay"):
        return before
    if isinstance(optimizer, torch_optimizer.Lamb):
        ratios = [1.0 if optimizer.adam else m.state["trust_ratio"] for m in bucket]
        sizes = [lr * debiasing(optimizer, group, m.state) for m in bucket]
        shares = [size * ratio * group["weight_decay"] for size, ratio in zip(sizes, ratios, strict=True)]
        return torch._foreach_sub(before, _scaled(before, shares))
    if not all(m.decay_in_moment and m.has_first_moment for m in bucket):
        return before
    decays = [
        _decay_in_update(optimizer, m, m.state["exp_avg"] - moment, weight).mul_(lr)
        for m, moment, weight in zip(bucket, moments, before, strict=True)
    ]
    return torch._foreach_sub(before, decays)


def _decay_in_update(optimizer: torch.optim.Optimizer, m: Member, in_moment: Tensor, weight: Tensor) -> Tensor:
    """The part of an update of Adam, NAdam, RAdam or Adamax that is due to decay, per unit of the learning rate.

    Args:
        optimizer: The optimizer.
        m: The parameter, with its state after the step.
        in_moment: The decay in its first moment; overwritten.
        weight: The parameter's value before the step; NAdam also uses the decay in the last gradient.
    """
    steps, (beta1, beta2) = m.state["step"], m.group["betas"]
    if not (isinstance(steps, Tensor) and is_asynchronous(steps.device)):
        steps = float(steps)  # not from a device, where fused kernels count steps: that would wait for it
    weight1, weight2 = bias_correction(beta1, steps), bias_correction(beta2, steps)
    if isinstance(optimizer, torch.optim.Adamax):
        return in_moment.div_(m.state["exp_inf"]).div_(weight1)
    second = m.state["max_exp_avg_sq"] if m.group.get("amsgrad") else m.state["exp_avg_sq"]
    if isinstance(optimizer, torch.optim.RAdam):
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * steps * beta2**steps / weight2
        if length <= 5:
            return in_moment.div_(weight1)
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return in_moment.div_(second.sqrt().add_(m.group["eps"])).mul_((rectified * weight2) ** 0.5 / weight1)
    denominator = (second / weight2).sqrt_().add_(m.group["eps"])
    if isinstance(optimizer, torch.optim.NAdam):
        now, later = (beta1 * (1 - 0.5 * 0.96 ** (n * m.group["momentum_decay"])) for n in (steps, steps + 1))
        product = float(m.state["mu_product"])
        of_weight = m.group["weight_decay"] * (1 - now) / (1 - product)
        return (weight * of_weight).add_(in_moment.mul_(later / (1 - product * later))).div_(denominator)
    return in_moment.div_(denominator).div_(weight1)


def bias_correction(beta: float, steps: float | Tensor) -> Scalar:
    """``1 - beta^steps``, the weight of all gradients so far in a moment; on the device of ``steps``, if a tensor."""
    if not isinstance(steps, Tensor):
        return 1 - beta**steps
    return -torch.expm1(steps * math.log(beta)) if beta else 1.0  # float32 would round 1 - beta^steps


def weights_before(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> list[Tensors]:
    """Copies of the weights before the step, less the decay that the step subtracts apart from its update.

    Under SGD, which needs no copies, the weights themselves.
    """
    before: list[Tensors] = []
    for bucket in buckets:
        params: list[Tensor] = [m.p for m in bucket]
        group = bucket[0].group
        kept: Scalar = 1.0
        decay = group.get("weight_decay") or 0.0
        if decay and is_decoupled(optimizer, group):
            kept = 1 - rate_of(group) * decay
        if bucket[0].is_sgd:
            before.append(params)
        elif isinstance(kept, Tensor):
            before.append(multiplied(params, [1.0] * len(params), kept))
        else:
            before.append(torch._foreach_mul(params, kept))
    return before


def subtract_(params: list[Tensor], changes: list[Tensor], lr: Scalar) -> None:
    """Subtracts ``lr`` times the changes, laid out as the parameters are, from parameters of one type and device."""
    if is_sharded(params[0]):
        for p, change in zip(params, changes, strict=True):
            p.sub_(change * lr)
    elif isinstance(lr, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(changes, lr))
    else:
        torch._foreach_sub_(params, changes, alpha=lr)


def subtract_multiples_(params: list[Tensor], vectors: list[Tensor], factors: list[float], lr: Scalar) -> None:
    """As :func:`subtract_`, with a factor for each vector; on the CPU without a copy of each."""
    if not params:
        return
    if isinstance(lr, Tensor) or is_sharded(params[0]) or is_asynchronous(params[0].device):
        subtract_(params, multiplied(vectors, factors, 1.0), lr)
    else:
        for p, vector, factor in zip(params, vectors, factors, strict=True):
            p.sub_(vector, alpha=lr * factor)


def multiplied(vectors: list[Tensor], factors: list[float], shared: Scalar) -> list[Tensor]:
    """Each vector times its factor and the ``shared`` factor, a number or a 0-dim tensor; all vectors on one device."""
    if not vectors:
        return []
    if is_sharded(vectors[0]):
        return [vector * (factor * shared) for vector, factor in zip(vectors, factors, strict=True)]
    if not isinstance(shared, Tensor):
        return list(torch._foreach_mul(vectors, [factor * shared for factor in factors]))
    found = torch._foreach_mul(vectors, factors)
    torch._foreach_mul_(found, shared.to(found[0].device))
    return list(found)


def _scaled(tensors: Sequence[Tensor], scales: Sequence[Scalar]) -> Tensors:
    """Each tensor times its scale."""
    numbers = [scale for scale in scales if not isinstance(scale, Tensor)]
    if len(numbers) == len(scales):
        return torch._foreach_mul(list(tensors), numbers)
    return [tensor * scale for tensor, scale in zip(tensors, scales, strict=True)]
