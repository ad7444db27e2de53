"""Multi-tensor operations on parameters, whole or sharded, with learning rates that are numbers or tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.machines import is_asynchronous
from ..common.rates import Scalar
from ..distributed import is_sharded

__all__ = ["multiplied", "subtract_", "subtract_multiples_"]


def subtract_(params: list[Tensor], changes: list[Tensor], lr: Scalar) -> None:
    """Subtracts ``lr`` times the changes, laid out as the parameters are, from parameters of one type and device."""
    if is_sharded(params[0]):
        for p, change in zip(params, changes, strict=True):
            p.sub_(change * lr)
    elif isinstance(lr, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(changes, lr))
    else:
        torch._foreach_sub_(params, changes, alpha=lr)


def subtract_multiples_(
    params: list[Tensor], vectors: list[Tensor], factors: list[float], shared: Scalar, lr: Scalar
) -> None:
    """As :func:`subtract_`, each vector times its factor and the ``shared`` one; on the CPU without a copy of each."""
    together = is_sharded(params[0]) or is_asynchronous(params[0].device)
    if together or isinstance(lr, Tensor) or isinstance(shared, Tensor):
        subtract_(params, multiplied(vectors, factors, shared), lr)
    else:
        for p, vector, factor in zip(params, vectors, factors, strict=True):
            p.sub_(vector, alpha=factor * shared * lr)


def multiplied(vectors: list[Tensor], factors: list[float], shared: Scalar) -> list[Tensor]:
    """Each vector times its factor and the ``shared`` factor, a number or a 0-dim tensor; all vectors on one device."""
    if is_sharded(vectors[0]):
        return [vector * (factor * shared) for vector, factor in zip(vectors, factors, strict=True)]
    if not isinstance(shared, Tensor):
        return list(torch._foreach_mul(vectors, [factor * shared for factor in factors]))
    found = torch._foreach_mul(vectors, factors)
    torch._foreach_mul_(found, shared.to(found[0].device))
    return list(found)
