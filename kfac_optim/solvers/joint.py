"""Eqs. 11-13 for several stacks at once: matrix products run stack by stack, elementwise work takes one launch.

Eigenvalues are measured in the unit of the damping, ``gamma = value unit``, and only relevant eigenvectors are kept::

    P = d_G d_A^T / unit,   V' = Q_G^T V Q_A
    gamma direction = V - Q_G (V' P / (P + value)) Q_A^T      if some eigenvectors, with eigenvalues of 0, are left out
                    = Q_G (V' value / (P + value)) Q_A^T      if none are

This is what :meth:`~kfac_optim.EigenSolver.precondition` computes for one stack.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.flat_storage import split_flat
from .eigen import in_order
from .protocol import Decomposition, Sides

_KEPT_NUMEL = 2**22  # the most products of eigenvalues that a stack keeps between steps (16 MiB in float32)


class JointEigen:
    """The eigendecompositions of several stacks.

    Args:
        decomposed: For each stack, the relevant parts of the decompositions of A and of G.
        units: For each stack, what gamma is a multiple of, ``[p]``.
    """

    def __init__(self, decomposed: Sequence[Sides], units: Sequence[Tensor]) -> None:
        stacks = [_EigenStack(*sides, unit) for sides, unit in zip(decomposed, units, strict=True)]
        order = sorted(range(len(stacks)), key=lambda i: stacks[i].is_whole)  # truncated stacks come first
        small = [i for i in order if stacks[i].numel <= _KEPT_NUMEL]
        large = [i for i in order if stacks[i].numel > _KEPT_NUMEL]
        self._stacks = stacks
        self._groups = [(small, _products([stacks[i] for i in small])), (large, None)]

    def precondition(self, gradients: Sequence[Tensor], value: float, out: Sequence[Tensor]) -> None:
        """Writes ``gamma`` times the preconditioned gradient of each stack.

        Args:
            gradients: The gradients of the stacks, ``[p, d_out, d_in]`` each.
            value: Gamma divided by the unit.
            out: Where the results go; of the same shapes.
        """
        for members, kept in self._groups:
            if not members:
                continue
            stacks = [self._stacks[i] for i in members]
            products = _products(stacks) if kept is None else kept
            rotated = torch.empty_like(products)
            by_stack = split_flat(rotated, [stack.shape for stack in stacks])
            for i, stack, v in zip(members, stacks, by_stack, strict=True):
                stack.rotate(gradients[i], v)
            truncated = slice(0, sum(stack.numel for stack in stacks if not stack.is_whole))
            rotated[truncated].mul_(products[truncated])
            rotated.div_(products + value if products is kept else products.add_(value))
            for i, stack, v in zip(members, stacks, by_stack, strict=True):
                stack.rotate_back(gradients[i], v, value, out[i])


class _EigenStack:
    """The eigenvectors of a stack, and its eigenvalues, those of G divided by the unit."""

    def __init__(self, a: Decomposition, g: Decomposition, unit: Tensor) -> None:
        (values_a, *vectors_a), (values_g, *vectors_g) = a, g
        self.values_a, self.values_g = values_a, values_g / unit[:, None]
        self.shape = (len(values_a), values_g.shape[-1], values_a.shape[-1])
        self.numel = self.shape[0] * self.shape[1] * self.shape[2]
        sides = in_order(vectors_g, vectors_a)
        self.is_whole = all(q.shape[-1] == q.shape[-2] for q, _ in sides)
        self.sides = [(q, left) for q, left in sides if q.shape[-2:] != (1, 1)]  # a 1 x 1 factor's eigenvector is 1

    def rotate(self, gradient: Tensor, out: Tensor) -> None:
        """Writes ``V'`` to ``out``."""
        v = gradient
        for q, left in self.sides[:-1]:
            v = torch.bmm(q.mT, v) if left else torch.bmm(v, q)
        for q, left in self.sides[-1:]:
            torch.bmm(q.mT if left else v, v if left else q, out=out)
        if not self.sides:
            out.copy_(gradient)

    def rotate_back(self, gradient: Tensor, v: Tensor, value: float, out: Tensor) -> None:
        """Writes gamma times the direction, given ``V' P / (P + value)`` or, of a whole stack, ``V' / (P + value)``."""
        beta, alpha = (0.0, value) if self.is_whole else (1.0, -1.0)
        for q, left in self.sides[:0:-1]:
            v = torch.bmm(q, v) if left else torch.bmm(v, q.mT)
        for q, left in self.sides[:1]:
            torch.baddbmm(gradient, q if left else v, v if left else q.mT, beta=beta, alpha=alpha, out=out)
        if not self.sides:
            torch.mul(v, value, out=out)


def _products(stacks: Sequence[_EigenStack]) -> Tensor:
    """The products ``d_G d_A^T / unit`` of all stacks, concatenated into one vector."""
    if not stacks:
        return torch.empty(0, device="cpu")
    whole = stacks[0].values_a.new_empty(sum(stack.numel for stack in stacks))
    for stack, part in zip(stacks, split_flat(whole, [stack.shape for stack in stacks]), strict=True):
        torch.mul(stack.values_g[:, :, None], stack.values_a[:, None, :], out=part)
    return whole
