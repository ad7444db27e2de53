"""Layers through which other parameters are trained while they are frozen themselves.

Many GANs freeze their discriminator for the time in which the generator trains through it (``requires_grad_(False)``,
``toggle_optimizer()`` of Lightning). It then gets no gradients that could be thrown away, and is known by this instead
(:mod:`kfac_optim.steering.opponents`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from .calls import ModelCall
from .graphs import leaves_reached

__all__ = ["FrozenPasses"]


class FrozenPasses:
    """The layers, by index, that have served others so since the last step with statistics."""

    def __init__(self) -> None:
        self._layers: set[int] = set()
        self._looked_at: ModelCall | None = None  # inputs of one call come from one place, so the first layer is asked
        self._serves = False

    def __bool__(self) -> bool:
        return bool(self._layers)

    def note_call(self, index: int, call: ModelCall | None, a: Tensor) -> None:
        """A frozen layer was called; others train through it if parameters have made its input.

        Not if the input alone is wanted, as an adversarial example is: gradients then end at a tensor.
        """
        if call is None or not a.requires_grad or torch.compiler.is_compiling():
            return
        if call is not self._looked_at:
            self._looked_at = call
            self._serves = any(isinstance(leaf, nn.Parameter) for leaf in leaves_reached([a.grad_fn]))
        if self._serves:
            self._layers.add(index)

    def take(self, trained: Collection[int]) -> bool:
        """A step is taken, with these layers: whether one of them has served others. Starts anew."""
        served, self._layers, self._looked_at = not self._layers.isdisjoint(trained), set(), None
        return served
