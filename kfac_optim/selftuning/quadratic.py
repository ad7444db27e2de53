"""A quadratic model of the loss along a few directions, its minimum, and the damping that follows from its errors.

With directions ``v_i`` and coefficients ``c_i`` (Martens & Grosse 2015, sections 6.4, 6.5 and 7)::

    L(w + sum_i c_i v_i) - L(w)  ~  b'c + c' (C + lambda P) c / 2
    b_i = <gradient, v_i>,    C_ij = v_i' F v_j,    P_ij = <v_i, v_j>

For the preconditioned gradient and the last update, the coefficients are a learning rate and a momentum. Here F is the
exact Fisher matrix of the batch, and not a Kronecker product, because the model is only as good as its curvature.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

# Smaller eigenvalues of the scaled matrix, relative to the largest, count as 0: directions alike to 3 digits are one.
_SINGULAR = 1e-6


@dataclass(frozen=True)
class QuadraticModel:
    """The model along k directions, with all tensors in float64 on the CPU.

    Attributes:
        slopes: b, ``[k]``.
        curvatures: C, ``[k, k]``, positive semidefinite.
        products: P, ``[k, k]``.
    """

    slopes: Tensor
    curvatures: Tensor
    products: Tensor

    def minimum(self, damping: float) -> Tensor:
        """The coefficients of the minimum, ``[k]``; 0 for zero directions, shared by directions that coincide."""
        matrix = self.curvatures + damping * self.products
        lengths = matrix.diagonal().clamp(min=0).sqrt()
        scales = torch.where(lengths > 0, 1 / lengths, 0.0)
        inverse = torch.linalg.pinv(scales[:, None] * matrix * scales, rtol=_SINGULAR, hermitian=True)
        return -scales * (inverse @ (scales * self.slopes))

    def change(self, coefficients: Tensor, damping: float) -> float:
        """The change of the loss that the model predicts, including the damping term."""
        matrix = self.curvatures + damping * self.products
        return float(coefficients @ (self.slopes + matrix @ coefficients / 2))


class LevenbergMarquardt:
    """The damping lambda: falls if the model predicts well, and rises if it does not (section 6.5).

    It is a function of the step, so that the preconditioner can use it as its own damping.

    Args:
        floor: The value below which lambda does not fall, > 0.

    Attributes:
        value: lambda; 0 before it is set.
    """

    decay = 0.95  # in every step; the paper applies its fifth power in every fifth step
    rejection = 2.0  # the factor if the loss rose, so that the step was wasted

    def __init__(self, floor: float) -> None:
        self.floor, self.value = float(floor), 0.0

    def __call__(self, step: int) -> float:
        """lambda; 1 before it is set."""
        return self.value or 1.0

    def set(self, value: float) -> None:
        """Sets lambda."""
        self.value = value

    def learn(self, actual: float, predicted: float, steps: int = 1) -> None:
        """Changes lambda by the outcome of a step.

        Args:
            actual: The change of the loss.
            predicted: The change that the model predicted, <= 0; if it is 0, lambda stays as it is.
            steps: How many steps this outcome stands for.
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
    """Compares the model's curvature with the change of the slope along an update from one gradient to the next.

    This detects a loss with another factor. Nothing else does if any gradient could be that of a likelihood, as with
    squared errors. The two gradients come from two batches, so the slopes also differ if batches are small.
    """

    steps = 7  # how many steps are examined
    usual = (0.6, 1.25)  # the range of the median ratio of these steps in networks, which are not linear

    def __init__(self) -> None:
        self._expected: tuple[float, float] | None = None
        self._ratios: list[float] = []

    def expect(self, slope: float, curvature: float) -> None:
        """Notes an update: the slope along it at its start, and the model's curvature along it."""
        self._expected = slope, curvature

    def observe(self, slope: float) -> float | None:
        """Takes the slope along the last update at its end, found from the next gradient.

        Returns:
            Once, after ``steps`` steps, the median ratio of observed to predicted curvature, if it is unusual.
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
