"""How far a step turns from the base optimizer's own update to the K-FAC direction, learned while training.

With the base's own update u and K-FAC's direction k, of the same length::

    step = (1 - trust) u + trust k,    as long as (1 - trust) |u| + trust |k|
    d loss(w - lr step) / d trust  ~  -lr <g', k - u>,    g': the gradient at the next step

This is hypergradient descent (Baydin et al. 2018) on one number for the whole model, with its sign alone: the next
gradient, of a batch that had no part in the step, tells whether more of k would have lowered the loss. Where rates are
too small for curvature to matter the base optimizer's own update wins and trust stays at 0; where they are large,
steep directions are exhausted by the step, and trust rises to 1. A sign depends on no scale, and costs one dot product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import gathered

__all__ = ["Trust", "alignment", "turned"]

_NOTCHES = 10  # trust moves by a tenth per step, which averages over the noise of about ten batches


class Trust:
    """The trust in K-FAC's directions, from 0 (the base optimizer's updates) to 1.

    Attributes:
        notches: Trust in tenths.
    """

    def __init__(self) -> None:
        self.notches = 0

    @property
    def value(self) -> float:
        """The trust, in [0, 1]."""
        return self.notches / _NOTCHES

    def learn(self, alignment: float) -> None:
        """Moves a tenth towards K-FAC's directions if the gradients say so, else a tenth towards the base's updates."""
        self.notches = min(_NOTCHES, self.notches + 1) if alignment > 0 else max(0, self.notches - 1)

    def counters(self) -> dict[str, int]:
        """Its part of the saved counters."""
        return {"trust": self.notches}

    def load(self, counters: Mapping[str, Any]) -> None:
        """Restores saved counters."""
        self.notches = int(counters.get("trust", 0))


def alignment(parameters: Sequence[tuple[Tensor, Tensor, float | Tensor]]) -> Tensor:
    """``lr <g', k - u>``, summed over all parameters, 0-dim: of each the gradient, the last turn, and the rate."""
    products = [gathered((g.float() * turn.float()).sum() * lr) for g, turn, lr in parameters]
    return torch.stack([product.to(products[0].device) for product in products]).sum()


def turned(
    updates: Mapping[nn.Parameter, Tensor], directions: Mapping[nn.Parameter, Tensor], trust: float
) -> dict[nn.Parameter, Tensor]:
    """The steps that turn from the base's updates to the directions as far as trust goes."""
    if trust == 1:
        return dict(directions)
    steps = {}
    for p, k in directions.items():
        u = updates[p]
        step = u.lerp(k, trust)
        length = u.norm() * (1 - trust) + k.norm() * trust
        steps[p] = step * (length / step.norm().clamp(min=torch.finfo(step.dtype).tiny))
    return steps
