"""Takes the base class's own step apart: its first moment m, its update u and its weight decay D.

    w <- w - D - lr u

By default the base class takes this step on the raw gradients, with its own state; K-FAC then preconditions m, and
changes u (:mod:`~kfac_optim.steering`).

Weight decay is not preconditioned, and does not count towards the length of the update. SGD and Adam add it to the
gradient ("coupled"), so that it is part of their first moment too. There it is taken to be ``b D'``, with D' the decay
in one gradient and b the total weight of all gradients in the moment, as if the weights had not moved meanwhile.

Base classes whose first moment is not known here (SGD without momentum, Adagrad, RMSprop, Adadelta, Muon) get an
average of the gradients, kept here while trust is learned. K-FAC's direction comes from the average, its length from
the base class's own update.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch_optimizer
from torch import Tensor, nn

from .distributed import any_sharded, is_sharded, summed_over_shards
from .flat_storage import Tensors, is_launch_bound
from .lamb import debiasing
from .rates import Scalar, rate_of
from .state_keys import GRADIENT_WEIGHT, MOMENT

__all__ = [
    "Bucket",
    "BaseStep",
    "Member",
    "averages_gradients",
    "base_step",
    "bias_correction",
    "gradient_weight_tracked",
    "gradients_of",
    "keep_first_moments",
    "keeps_first_moment",
    "members_of",
    "multiplied",
    "refuse_base",
    "subtract_",
    "update_length",
    "weights_before",
]

# Classes of torch that shrink the weights by lr * weight_decay beside their update; Muon is not in every version.
_DECOUPLED = tuple(getattr(torch.optim, name) for name in ("AdamW", "Adafactor", "Muon") if hasattr(torch.optim, name))


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
    """

    p: nn.Parameter
    gradient: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    is_sgd: bool

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks its state up again, which the base class may have made; makes one where there is none."""
        self.state = optimizer.state[self.p]

    @property
    def has_first_moment(self) -> bool:
        """Whether there is one that the base class keeps (:func:`keeps_first_moment`)."""
        kept = keeps_first_moment(self.p, self.group, self.state, is_sgd=self.is_sgd)
        return kept and (not self.is_sgd or self.state.get("momentum_buffer") is not None)

    @property
    def moment_weight(self) -> float:
        """The sum of the weights that gradients have in the first moment of SGD; of averages of gradients 1."""
        if not self.is_sgd or not self.group["momentum"]:
            return 1.0
        weight: float = self.state.get(GRADIENT_WEIGHT, 1.0)
        return 1 + self.group["momentum"] * weight if self.group["nesterov"] else weight


def keeps_first_moment(p: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], *, is_sgd: bool) -> bool:
    """Whether the base class keeps a first moment of a parameter that is known here; SGD from its next step on.

    Other classes than SGD have something else in their momentum: RMSprop gradients that it has divided already.
    """
    if is_sgd:
        return bool(group["momentum"])
    moment = state.get("exp_avg")  # that of projected or masked gradients has another shape
    return isinstance(moment, Tensor) and moment.shape == p.shape


Bucket = list[Member]  # of one group, device and type: what multi-tensor operations take together


def members_of(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """The parameters that have a gradient."""
    found: list[Bucket] = []
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    for group in optimizer.param_groups:
        kinds: dict[Any, Bucket] = {}
        for p in group["params"]:
            if (gradient := p.grad) is not None:
                kind = type(p), p.device, p.dtype, gradient.dtype
                kinds.setdefault(kind, []).append(Member(p, gradient, group, optimizer.state.get(p) or {}, is_sgd))
        found += kinds.values()
    return found


def gradients_of(members: Sequence[Bucket]) -> dict[nn.Parameter, Tensor]:
    """Their gradients, by parameter."""
    return {m.p: m.gradient for bucket in members for m in bucket}


@dataclass(frozen=True)
class BaseStep:
    """The base class's step, taken apart; by parameter.

    Attributes:
        moments: The first moments of the raw gradients, in the direction of descent; the gradients themselves where
            none is kept.
        updates: What the base class took off the weights because of the gradients, per unit of the learning rate. Where
            that is the moment itself it is the same tensor, and the same dict if it is so for all parameters.
    """

    moments: dict[nn.Parameter, Tensor]
    updates: dict[nn.Parameter, Tensor]


def base_step(optimizer: torch.optim.Optimizer, members: Sequence[Bucket], before: Sequence[Tensors]) -> BaseStep:
    """Takes apart the step that the base class has just taken, in :func:`gradient_weight_tracked`.

    Args:
        optimizer: The optimizer, after its step.
        members: The parameters of interest, with their states after it.
        before: What :func:`weights_before` has found before it.
    """
    moments_of: dict[nn.Parameter, Tensor] = {}
    updates_of: dict[nn.Parameter, Tensor] = {}
    alike = True
    for bucket, weights in zip(members, before, strict=True):
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
    moments = _first_moments(bucket, descent)
    decayed = before
    if group.get("weight_decay") and not _is_decoupled(optimizer, group):
        shares = [_decay(optimizer, group, m.state) for m in bucket]
        in_moment, in_update = (list(share) for share in zip(*shares, strict=True))
        known, share = not any(isinstance(of_one, Tensor) for of_one in in_moment), in_moment[0]
        if known and is_launch_bound(before[0].device) and all(of_one == share for of_one in in_moment):
            moments = torch._foreach_sub(moments, before, alpha=share) if share else moments
        elif not known or any(in_moment):
            moments = torch._foreach_sub(moments, _scaled(before, in_moment))
        if not is_sgd:
            decayed = torch._foreach_sub(before, _scaled(before, in_update))
    if is_sgd:
        return moments, moments if group["momentum"] else descent  # exactly; a difference of weights would be rounded
    lr = rate_of(group)
    updates = list(decayed)  # our own copies, which are overwritten here
    torch._foreach_sub_(updates, [m.p for m in bucket])
    # At a rate of 0 nothing has moved, whatever it is divided by.
    torch._foreach_div_(updates, torch.where(lr == 0, 1.0, lr) if isinstance(lr, Tensor) else lr or 1.0)
    return moments, updates


def _first_moments(bucket: Bucket, descent: Tensors) -> Tensors:
    """The first moments, in the direction of descent; ``descent``: the gradients, in that direction."""
    group, states = bucket[0].group, [m.state for m in bucket]
    if not all(m.has_first_moment for m in bucket):
        known = [m.has_first_moment and not m.is_sgd for m in bucket]  # of some: others are projected
        if not all(there or MOMENT in state for there, state in zip(known, states, strict=True)):
            return descent
        kept = [state["exp_avg" if there else MOMENT] for there, state in zip(known, states, strict=True)]
        if group.get("maximize"):
            kept = [moment if there else -moment for there, moment in zip(known, kept, strict=True)]
        return kept
    if not bucket[0].is_sgd:  # Adam and its kin, LAMB
        return [state["exp_avg"] for state in states]
    buffers = [state["momentum_buffer"] for state in states]
    return torch._foreach_add(descent, buffers, alpha=group["momentum"]) if group.get("nesterov") else buffers


def averages_gradients(group: Mapping[str, Any]) -> bool:
    """Whether first moments that a base class keeps are averages: at a first beta of 0 each is a single gradient."""
    beta = (group.get("betas") or (1.0,))[0]
    return isinstance(beta, Tensor) or beta != 0  # a tensor may be on a device, which would be waited for


def keep_first_moments(members: Sequence[Bucket], decay: float) -> None:
    """Takes gradients into averages in the optimizer's state, after a step of a base class that keeps none.

    Args:
        members: The parameters of interest.
        decay: How much of the last average is left, in [0, 1).
    """
    for bucket in members:
        without: Bucket = []
        for m in bucket:
            if m.has_first_moment:
                m.state.pop(MOMENT, None)  # a scheduler has given the base class one
            else:
                without.append(m)
        if without:
            last = [m.state[MOMENT].to(m.p) if MOMENT in m.state else torch.zeros_like(m.p) for m in without]
            # New tensors: torch's load_state_dict() makes two optimizers share those of a state that is not copied.
            moments: Tensors = torch._foreach_mul(last, 1.0)
            # In place: before torch 2.12 shards know no other. A gradient may have another type (``grad_dtype``).
            torch._foreach_lerp_(moments, [m.gradient.to(m.p.dtype) for m in without], 1 - decay)
            for m, moment in zip(without, moments, strict=True):
                m.state[MOMENT] = moment


def update_length(
    members: Sequence[Bucket], updates: Sequence[Tensor], known_length: Callable[[], Tensor | None]
) -> Tensor:
    """The norm of all updates together, 0-dim, per unit of the weight that gradients have in the momentum of SGD.

    That weight grows from 1 to ``1 / (1 - momentum)``. A collective where updates are sharded.

    Args:
        members: The parameters, with their states after the step.
        updates: Their updates, in this order.
        known_length: Gives the norm of all updates, where that takes less than to compute it here.
    """
    weights = [m.moment_weight for bucket in members for m in bucket]
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


def _is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weights shrink by ``lr * weight_decay`` of themselves, and moments have nothing of it."""
    return bool(group.get("decoupled_weight_decay")) or isinstance(optimizer, _DECOUPLED)


def _decay(optimizer: torch.optim.Optimizer, group: dict[str, Any], state: dict[str, Any]) -> tuple[Scalar, Scalar]:
    """The weight decay contained in a parameter's first moment and in its update, as multiples of the weight.

    Of SGD the second is not needed: its update is its moment or its gradient. Bases that are not known here and do not
    say ``decoupled_weight_decay`` in their groups are taken for coupled ones, in which decay stays a part of the
    moment.
    """
    lr, decay = rate_of(group), group["weight_decay"]
    if isinstance(optimizer, torch.optim.SGD):
        weight = state[GRADIENT_WEIGHT] if group["momentum"] else 1.0
        if group["nesterov"]:  # of the gradient itself the decay is not yet a part
            return group["momentum"] * weight * decay, 0.0
        return (weight * decay if group["momentum"] else 0.0), 0.0
    if isinstance(optimizer, torch_optimizer.Lamb):
        ratio = 1.0 if optimizer.adam else state["trust_ratio"]
        return 0.0, lr * debiasing(optimizer, group, state) * ratio * decay
    if isinstance(optimizer, torch.optim.Adam):
        steps = state["step"]
        if not (isinstance(steps, Tensor) and steps.device.type != "cpu"):
            steps = float(steps)  # a device, where fused kernels count them, would be waited for
        weight1, weight2 = (bias_correction(beta, steps) for beta in group["betas"])
        second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
        denominator = (second / weight2).sqrt_().add_(group["eps"])
        return decay * weight1, lr * decay / denominator
    return 0.0, 0.0


def bias_correction(beta: float, steps: float | Tensor) -> Scalar:
    """``1 - beta^steps``, the weight of all gradients so far in a moment; computed where a tensor of steps is."""
    if not isinstance(steps, Tensor):
        return 1 - beta**steps
    return -torch.expm1(steps * math.log(beta)) if beta else 1.0  # float32 would round 1 - beta^steps


def weights_before(optimizer: torch.optim.Optimizer, members: Sequence[Bucket]) -> list[Tensors]:
    """Copies of the weights before the step, less the decay that the step takes off them apart from its update.

    Under SGD without decay, which needs no copies, the weights themselves.
    """
    before: list[Tensors] = []
    for bucket in members:
        params: list[Tensor] = [m.p for m in bucket]
        group = bucket[0].group
        kept: Scalar = 1.0
        decay = group.get("weight_decay") or 0.0
        if decay and _is_decoupled(optimizer, group):
            kept = 1 - rate_of(group) * decay
        if bucket[0].is_sgd and not decay:
            before.append(params)
        elif isinstance(kept, Tensor):
            before.append(multiplied(params, [1.0] * len(params), kept))
        else:
            before.append(torch._foreach_mul(params, kept))
    return before


def subtract_(params: list[Tensor], changes: list[Tensor], lr: Scalar) -> None:
    """Takes ``lr`` times the changes, laid out as the parameters are, off parameters of one type and device."""
    if is_sharded(params[0]):
        for p, change in zip(params, changes, strict=True):
            p.sub_(change * lr)
    elif isinstance(lr, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(changes, lr))
    else:
        torch._foreach_sub_(params, changes, alpha=lr)


@contextmanager
def gradient_weight_tracked(optimizer: torch.optim.Optimizer, members: Sequence[Bucket]) -> Iterator[None]:
    """Keeps ``state[GRADIENT_WEIGHT]`` through a step of SGD: :func:`base_step` needs it to take its moments apart.

    It is the sum of the weights with which gradients, and the decay that was added to them, stand in the momentum
    buffer: 1 after the first, then ``momentum * c + 1 - dampening``; in a buffer that plain SGD has filled, its limit.
    """
    weights: dict[nn.Parameter, float] = {}
    for bucket in members if isinstance(optimizer, torch.optim.SGD) else ():
        momentum, kept = bucket[0].group["momentum"], 1 - bucket[0].group["dampening"]
        for m in bucket if momentum else ():
            known, filled = m.state.get(GRADIENT_WEIGHT), m.state.get("momentum_buffer") is not None
            if known is not None:
                weights[m.p] = momentum * known + kept
            else:
                weights[m.p] = kept / (1 - momentum) if filled and momentum < 1 else 1.0
    yield
    for p, weight in weights.items():  # not before: base classes take a state that is not empty for their own
        optimizer.state[p][GRADIENT_WEIGHT] = weight


def multiplied(vectors: list[Tensor], factors: list[float], shared: Scalar) -> list[Tensor]:
    """Vectors on one device times numbers, and all times a number or a 0-dim tensor."""
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
