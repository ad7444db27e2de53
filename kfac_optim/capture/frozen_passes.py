"""Layers through which other parameters are trained while they are frozen themselves.

Many GANs freeze their discriminator for the time in which the generator trains through it (``requires_grad_(False)``,
``toggle_optimizer()`` of Lightning). It then gets no gradients that could be thrown away, and is known by this instead
(:mod:`kfac_optim.steering.opponents`). It is looked for in every step, because the generator may train in few of them;
not in compiled networks, in re-entrant checkpoints and in layers of attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..layers import KroneckerLayer
from .graphs import leaves_of, nodes_reached

__all__ = ["FrozenPasses"]


class FrozenPasses:
    """The layers, by index, that have served others so since the last step.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[KroneckerLayer]) -> None:
        self._layers = layers
        self._served: set[int] = set()
        self._serves: bool | None = None  # the first layer is asked: walks from each one would take too long

    def __bool__(self) -> bool:
        return bool(self._served)

    def note_call(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A layer was called; if it is frozen others train through it where parameters have made its input.

        Not if the input alone is wanted, as an adversarial example is: gradients then end at a tensor.
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
        """A step is taken: whether a layer that trains in it has served others. Starts anew."""
        weights = [self._layers[index].weight for index in self._served]
        self._served, self._serves = set(), None
        return any(weight.requires_grad and weight.grad is not None for weight in weights)
