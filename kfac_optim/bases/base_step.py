"""Takes the base class's own step apart: its first moment m, its update u and its weight decay D.

    w <- w - D - lr u

By default the base class takes this step on the raw gradients, with its own state; K-FAC then preconditions m, and
changes u (:mod:`~kfac_optim.steering`). Weight decay is not preconditioned, and does not count towards the length of
the update, even if the base class adds it to the gradient, as SGD and Adam do (:mod:`~kfac_optim.bases.rules`).

If m is an average kept by this package, K-FAC's direction comes from m, its length from the base class's own update.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..common.flat_storage import Tensors
from ..distributed import any_sharded, summed_over_shards
from .parameters import Bucket


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
        if is_known and issubclass(base, torch.optim.Optimizer):
            raise TypeError(
                f"{cls.__name__}: {base.__name__} comes before {mixin.__name__} among its bases, so that it would train"
                f" as {base.__name__} alone: write class {cls.__name__}({mixin.__name__}, {base.__name__})"
            )


def take_apart(
    buckets: Sequence[Bucket], before: Sequence[Tensors]
) -> tuple[dict[nn.Parameter, Tensor], dict[nn.Parameter, Tensor]]:
    """Takes apart the step that the base class has just taken, after :func:`~.first_moments.keep_averages`.

    Args:
        buckets: The parameters of interest, with their states after the step.
        before: For each bucket, what :meth:`.Rule.weights_before` returned before the step.

    Returns:
        By parameter, the first moment m of the raw gradients, negated under ``maximize``; the gradient itself where no
        moment is kept. And the update u, per unit of the learning rate, where that is not m.
    """
    found: dict[nn.Parameter, Tensor] = {}
    other_updates: dict[nn.Parameter, Tensor] = {}
    for bucket, weights in zip(buckets, before, strict=True):
        gradients, rule = [m.gradient for m in bucket], bucket[0].rule
        descent: Tensors = torch._foreach_neg(gradients) if bucket[0].group.get("maximize") else gradients
        moments = rule.moments(bucket, descent)
        updates = rule.updates(bucket, weights, moments, descent)
        params = [m.p for m in bucket]
        found.update(zip(params, moments, strict=True))
        if updates is not moments:
            other_updates.update(zip(params, updates, strict=True))
    return found, other_updates


def update_length(buckets: Sequence[Bucket], updates: Sequence[Tensor], together: Tensor | None) -> Tensor:
    """The norm of all updates together, 0-dim.

    SGD's momentum buffer sums up gradients, so each update is first divided by the sum of their weights, which grows
    from 1 to ``1 / (1 - momentum)``. A collective if updates are sharded.

    Args:
        buckets: The parameters, with their states after the step.
        updates: Their updates, in the same order.
        together: The norm of all updates as they are; None: it is not known.
    """
    weights = [m.rule.weight_of_gradients(m) for bucket in buckets for m in bucket]
    if together is not None and len(set(weights)) == 1:
        return together / weights[0]
    dtype = torch.float64 if any(update.dtype == torch.float64 for update in updates) else torch.float32
    if any_sharded(updates):
        squares = summed_over_shards([update.to(dtype).square().sum() for update in updates])
        norms: Tensors = torch._foreach_sqrt(squares)
    else:
        norms = torch._foreach_norm(list(updates), 2, dtype=dtype)
    if any(weight != 1 for weight in weights):
        norms = torch._foreach_div(norms, weights)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
