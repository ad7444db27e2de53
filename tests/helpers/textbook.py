"""Scalings of directions and update rules of optimizers, as in the books."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.helpers.reference import is_norm


def kl_clip_factor(terms: Sequence[tuple[Tensor, Tensor, float]], kappa: float) -> float:
    """``nu = min(1, sqrt(kappa / sum lr^2 |<v, grad>|))`` over (direction, gradient, lr) of all layers."""
    total = sum(lr**2 * abs(float((v * grad).sum())) for v, grad, lr in terms)
    return min(1.0, math.sqrt(kappa / total)) if total > 0 else 1.0


def unit_norm(d_out: int, d_in: int) -> float:
    """Frobenius norm of a semi-orthogonal update."""
    return math.sqrt(min(d_out, d_in) * max(1.0, d_out / d_in))


def unit_scaled(module: nn.Module, direction: Tensor) -> Tensor:
    """Every Kronecker pair at its unit norm; a norm layer at ``sqrt(C)``."""
    if is_norm(module):
        return direction * math.sqrt(len(direction)) / direction.norm()
    return torch.stack([d * unit_norm(*d.shape) / d.norm() for d in direction])


def grafted(direction: Tensor, gradient_: Tensor) -> Tensor:
    """The direction at the norm of the raw gradient."""
    return direction * gradient_.norm() / direction.norm()


class TextbookMomentum:
    """SGD's own recurrence: ``buf = mu buf + (1 - dampening) g``, first ``buf = g``; Nesterov ``g + mu buf``."""

    def __init__(self, momentum: float, dampening: float = 0.0, nesterov: bool = False) -> None:
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov
        self.buffer: Tensor | None = None

    def __call__(self, g: Tensor) -> Tensor:
        """What SGD multiplies by the learning rate."""
        if self.buffer is None:
            self.buffer = g.clone()
        else:
            self.buffer = self.momentum * self.buffer + (1 - self.dampening) * g
        return g + self.momentum * self.buffer if self.nesterov else self.buffer


class TextbookAdam:
    """Adam with bias correction; LAMB without it, at the trust ratio of its authors."""

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.m, self.v, self.t = 0.0, 0.0, 0

    def moments(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Update and return both moments, uncorrected."""
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g * g
        return self.m, self.v

    def adam(self, g: Tensor) -> Tensor:
        """The update that Adam multiplies by the learning rate."""
        m, v = self.moments(g)
        return (m / (1 - self.beta1**self.t)) / ((v / (1 - self.beta2**self.t)).sqrt() + self.eps)

    def lamb(self, g: Tensor, p: Tensor) -> Tensor:
        """The update that LAMB multiplies by the learning rate, its trust ratio included."""
        m, v = self.moments(g)
        update = m / (v.sqrt() + self.eps)
        weight_norm, update_norm = min(float(p.norm()), 10.0), float(update.norm())
        return update * (weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0)
