"""Multi-tensor operations on parameters, whole or sharded, with learning rates that are numbers or tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.flat_storage import Tensors
from ..common.machines import is_asynchronous
from ..common.rates import Scalar
from ..distributed import is_sharded


def subtract_(params: list[Tensor], changes: Tensors, lr: Scalar) -> None:
    """Subtracts ``lr`` times the changes, laid out as the parameters are, from parameters of one type and device."""
    if is_sharded(params[0]):
        for p, change in zip(params, changes, strict=True):
            p.sub_(change * lr)
    elif isinstance(lr, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(changes, lr))
    else:
        torch._foreach_sub_(params, changes, alpha=lr)


def subtract_multiples_(
    params: list[Tensor], vectors: list[Tensor], multipliers: list[float], shared: Scalar, lr: Scalar
) -> None:
    """As :func:`subtract_`, each vector times its multiplier and ``shared``; on the CPU without a copy of each."""
    if is_sharded(params[0]):
        subtract_(params, [vector * (x * shared) for vector, x in zip(vectors, multipliers, strict=True)], lr)
    elif isinstance(shared, Tensor):
        multiples = torch._foreach_mul(vectors, multipliers)
        torch._foreach_mul_(multiples, shared.to(params[0].device))
        subtract_(params, multiples, lr)
    elif isinstance(lr, Tensor) or is_asynchronous(params[0].device):
        subtract_(params, torch._foreach_mul(vectors, [x * shared for x in multipliers]), lr)
    else:
        for p, vector, x in zip(params, vectors, multipliers, strict=True):
            p.sub_(vector, alpha=x * shared * lr)
