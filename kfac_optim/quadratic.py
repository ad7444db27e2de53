"""A quadratic model of the loss along a few directions, its minimum, and the damping that follows from its errors.

With directions ``v_i`` and their coefficients ``c_i`` (Martens & Grosse 2015, sections 6.4, 6.5 and 7)::

    L(w + sum_i c_i v_i) - L(w)  ~  b'c + c' (C + lambda P) c / 2
    b_i = <gradient, v_i>,    C_ij = v_i' F v_j,    P_ij = <v_i, v_j>

Along a preconditioned gradient and the last update, the coefficients are a learning rate and a momentum. F is the exact
Fisher matrix of the batch here, no Kronecker product: the model is only as good as its curvature.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LevenbergMarquardt", "QuadraticModel", "SecantCheck"]

# Of the eigenvalues of the scaled matrix: directions that agree to three digits are taken for one.
_SINGULAR = 1e-6


@dataclass(frozen=True)
class QuadraticModel:
    """The model along k directions, all in float64 on the CPU.

    Attributes:
        slopes: b, ``[k]``.
        curvatures: C, ``[k, k]``, positive semidefinite.
        products: P, ``[k, k]``.
    """

    slopes: Tensor
    curvatures: Tensor
    products: Tensor

    def minimum(self, damping: float) -> Tensor:
        """The coefficients of the lowest point, ``[k]``; 0 of directions that are zero or add nothing to the others."""
        matrix = self.curvatures + damping * self.products
        lengths = matrix.diagonal().clamp(min=0).sqrt()
        scales = torch.where(lengths > 0, 1 / lengths, 0.0)
        inverse = torch.linalg.pinv(scales[:, None] * matrix * scales, rtol=_SINGULAR, hermitian=True)
        return -scales * (inverse @ (scales * self.slopes))

    def change(self, coefficients: Tensor, damping: float) -> float:
        """By how much the loss changes according to the model; the damping's term is part of it."""
        matrix = self.curvatures + damping * self.products
        return float(coefficients @ (self.slopes + matrix @ coefficients / 2))


class LevenbergMarquardt:
    """The damping lambda: falls where the model predicts well, rises where it does not (section 6.5).

    It is a function of the step, which the preconditioner can take for its own damping.

    Args:
        floor: The smallest value, > 0.

    Attributes:
        value: lambda; 0 before it was set.
    """

    decay = 0.95  # in every step; the paper changes it by the fifth power in every fifth step
    rejection = 2.0  # where the loss rose, and the step was wasted

    def __init__(self, floor: float) -> None:
        self.floor, self.value = float(floor), 0.0

    def __call__(self, step: int) -> float:
        """lambda; 1 before it was set."""
        return self.value or 1.0

    def set(self, value: float) -> None:
        """Goes on from a value."""
        self.value = value

    def learn(self, actual: float, predicted: float, steps: int = 1) -> None:
        """Takes in how a step went.

        Args:
            actual: By how much the loss changed.
            predicted: By how much it was to change, <= 0; where that is 0, nothing was learned.
            steps: How many steps it stands for.
        """
        if predicted >= 0:
            return
        ratio = actual / predicted
        if not ratio >= 0:
            self.value *= self.rejection
        elif ratio < 1 / 4:
            self.value /= self.decay**steps
        elif ratio > 3 / 4:
            self.value = max(self.floor, self.value * self.decay**steps)


class SecantCheck:
    """Compares the curvature of the model with how the slopes along the updates change from one gradient to the next.

    Where any gradient may be that of a likelihood, as with squared errors, a loss with another factor shows in nothing
    else. The gradients are those of two batches, so that small batches differ, too.
    """

    steps = 7  # that are looked at
    usual = (0.6, 1.25)  # the range that the median of their ratios has in networks, which are not linear

    def __init__(self) -> None:
        self._expected: tuple[float, float] | None = None
        self._ratios: list[float] = []

    def expect(self, slope: float, curvature: float) -> None:
        """An update was made: the slope along it at its start, and its curvature according to the model."""
        self._expected = slope, curvature

    def observe(self, slope: float) -> float | None:
        """The slope along the last update at its end, in the next gradient.

        Returns:
            Once, after so many steps, the curvature that was found over the one predicted, if that is unusual.
        """
        if self._expected is None or len(self._ratios) == self.steps:
            return None
        (before, curvature), self._expected = self._expected, None
        if curvature > 0:
            self._ratios.append((slope - before) / curvature)
        if len(self._ratios) < self.steps:
            return None
        ratio = statistics.median(self._ratios)
        return None if self.usual[0] <= ratio <= self.usual[1] else ratio
