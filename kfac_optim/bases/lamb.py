"""``torch_optimizer.Lamb`` as multi-tensor operations that never wait for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch_optimizer
from torch import Tensor

from ..distributed import gathered, is_sharded, mesh_of


class MultiTensorLamb(torch_optimizer.Lamb):
    """The update of ``torch_optimizer.Lamb`` for all parameters of a group at once, with the same options and state."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in params):
                raise RuntimeError("Lamb does not support sparse gradients, please consider SparseAdam instead")
            alike: dict[Hashable, list[Tensor]] = {}
            for p in params:  # multi-tensor operations take no mixture of types, nor norms of shards one of meshes
                alike.setdefault((type(p), p.device, mesh_of(p)), []).append(p)
            for same_kind in alike.values():
                self._update(same_kind, group)
        return loss

    @torch.no_grad()
    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        gradients, states = [p.grad for p in params if p.grad is not None], [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        updates = torch._foreach_sqrt(second)
        torch._foreach_add_(updates, group["eps"])
        updates = torch._foreach_div(first, updates)  # the reciprocal of eps is infinite in float16
        if group["weight_decay"] != 0:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])

        # Norms of sharded tensors are added up over ranks (a collective): parts of norms could not be saved.
        weight_norms = gathered(torch.stack(torch._foreach_norm(params))).clamp(0, self.clamp_value)
        adam_norms = gathered(torch.stack(torch._foreach_norm(updates)))
        ratios = torch.where((weight_norms == 0) | (adam_norms == 0), 1.0, weight_norms / adam_norms)
        found = zip(*(of_all.unbind() for of_all in (weight_norms, adam_norms, ratios)), strict=True)
        for state, (weight, adam, ratio) in zip(states, found, strict=True):
            state.update(weight_norm=weight, adam_norm=adam, trust_ratio=ratio)
        if not self.adam:
            updates = _times_own(updates, ratios)
        torch._foreach_mul_(updates, [-group["lr"] * debiasing(self, group, state) for state in states])
        torch._foreach_add_(params, updates)


def _times_own(tensors: Sequence[Tensor], factors: Tensor) -> tuple[Tensor, ...]:
    """Each tensor times its own factor, in place or not; vectors of the same length are multiplied together.

    A multi-tensor operation with factors on the device launches a kernel for each tensor, and two of three tensors of
    a transformer are vectors.
    """
    found, alike = list(tensors), dict[Hashable, list[int]]()
    for i, tensor in enumerate(tensors):
        # Not shards: they can be multiplied by a plain number that all ranks have, but not by a vector of numbers.
        is_vector = tensor.dim() == 1 and tensor.dtype is factors.dtype and not is_sharded(tensor)
        alike.setdefault((len(tensor), tensor.device) if is_vector else i, []).append(i)
    apart = factors.unbind()
    for places in alike.values():
        if len(places) == 1:
            found[places[0]].mul_(apart[places[0]])
            continue
        products = torch.stack([tensors[i] for i in places]) * torch.stack([apart[i] for i in places])[:, None]
        for i, product in zip(places, products.unbind(), strict=True):
            found[i] = product
    return tuple(found)


def debiasing(optimizer: torch_optimizer.Lamb, group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    """The factor by which LAMB multiplies the update of a parameter to debias its moments."""
    (beta1, beta2), t = group["betas"], state["step"]
    return math.sqrt(1 - beta2**t) / (1 - beta1**t) if optimizer.debias else 1.0
