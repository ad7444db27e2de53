"""Layers through which other parameters are trained while they are frozen themselves.

Many GANs freeze their discriminator while the generator trains through it (``requires_grad_(False)``, Lightning's
``toggle_optimizer()``). The discriminator then gets no gradients that could be thrown away, and is recognised by this
instead (:mod:`kfac_optim.steering.opponents`). Every step looks for it, because the generator may train in few of them.
Compiled networks, re-entrant checkpoints and layers of attention are not searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..layers import KroneckerLayer
from .graphs import leaves_of, nodes_reached

__all__ = ["FrozenPasses"]


class FrozenPasses:
    """Notes layers that *serve*: other parameters train through them while they are frozen.

    It is true if a layer has served since the last step.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[KroneckerLayer]) -> None:
        self._layers = layers
        self._served: set[int] = set()
        self._serves: bool | None = None  # found from the first frozen layer, because walks from each take too long

    def __bool__(self) -> bool:
        return bool(self._served)

    def note_call(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a call of a layer, which serves if it is frozen and parameters have made its input.

        It does not serve if gradients end at a tensor other than a parameter, as for an adversarial example.
        """
        if self._layers[index].weight.requires_grad or self._serves is False or index in self._served:
            return
        a = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(a, Tensor) or not a.requires_grad:
            return
        if self._serves is None:
            self._serves = any(isinstance(leaf, nn.Parameter) for leaf in leaves_of(nodes_reached([a.grad_fn])))
        if self._serves:
            self._served.add(index)

    def take(self) -> bool:
        """Whether a layer that trains in this step has served others since the last one; starts anew."""
        weights = [self._layers[index].weight for index in self._served]
        self._served, self._serves = set(), None
        return any(weight.requires_grad and weight.grad is not None for weight in weights)
