"""The options that decide what a layer is, and how much of its factors is kept: all of it, blocks or the diagonal."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..common.machines import Machine
from ..factors import FactorSpec

Sharing = Literal["expand", "reduce"]

# The most rows of a block, unless the user gives another number. The time of a decomposition grows with their cube, and
# blocks lose next to nothing (docs/results/rule.rst, "How large blocks are"). On a CPU, the factors of layers with 256
# inputs and of 3 x 3 kernels on 32 channels are still whole. On a GPU, many small blocks would take more launches.
_LARGEST: dict[Machine, int] = {"cpu": 300, "accelerator": 8192, "meta": 8192}
# A lopsided factor has more rows than the first of these numbers, and at least so many times as many as the other one
# of its layer. It costs more than all others of a model together. A lopsided G belongs to a vocabulary: an entry of its
# diagonal is that of one row of the weight, and next to nothing is lost by the diagonal alone. A lopsided A belongs to
# pixels or features, which are correlated: blocks as large as the other factor let the layer cost what a square one
# does. The ratio exceeds 9, because the taps of a 3 x 3 kernel make inputs 9 times as large.
_LOPSIDED_DIM, _LOPSIDED_RATIO, _LEAST_BLOCK = 1024, 10, 256


@dataclass(frozen=True)
class LayerOptions:
    """The engine's options that decide what the layers of a model are; :class:`~kfac_optim.CurvatureEngine` has more.

    Attributes:
        weight_sharing: "expand" (default) or "reduce" over shared positions, or a function of a module's name and the
            module that returns one of them.
        batch_dim: The dimension of the examples in inputs with shared positions: 0 (default), or 1 for sequence-first
            models.
        max_factor_dim: The most rows of a factor, or of a block of it; "auto" (default): it depends on the device of
            the weight; None: all factors are whole.
        skip_layers: Regular expressions, none by default; modules whose name contains a match have no layer.
        trainable: The parameters that the optimizer updates; None (default): all.
        own_shape: Returns the shape of what this rank computes with: that of a parameter, or of its shard.
    """

    weight_sharing: Sharing | Callable[[str, nn.Module], Sharing] = "expand"
    batch_dim: int = 0
    max_factor_dim: int | str | None = "auto"
    skip_layers: tuple[str, ...] = ()
    trainable: Container[nn.Parameter] | None = None
    own_shape: Callable[[Tensor], torch.Size] = lambda parameter: parameter.shape

    def sharing(self, name: str, module: nn.Module) -> Sharing:
        """Whether one module expands or reduces.

        Raises:
            ValueError: If a callable ``weight_sharing`` returns anything else.
        """
        choice = self.weight_sharing(name, module) if callable(self.weight_sharing) else self.weight_sharing
        if choice not in ("expand", "reduce"):
            raise ValueError(f"weight_sharing returned {choice!r} for {name}: must be 'expand' or 'reduce'")
        return choice

    def largest_block(self, machine: Machine) -> int | None:
        """The most rows of a block of a factor on a kind of machine; None if factors are whole."""
        return _LARGEST[machine] if isinstance(self.max_factor_dim, str) else self.max_factor_dim

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.trainable is None or parameter in self.trainable


def kept_of(side: str, whole: FactorSpec, other: int, limit: int | None, gates: int = 1) -> tuple[FactorSpec, str]:
    """What is kept of a factor A or G, and the reason if that is not all of it (else an empty text).

    Args:
        side: "A" or "G".
        whole: The factor; one that is diagonal by nature is kept as it is.
        other: The number of rows of the other factor of the layer.
        limit: The most rows of a block; None: no limit.
        gates: How many gates the rows of G belong to; a block has the rows of one gate at most.
    """
    if limit is None or whole.diagonal:
        return whole, ""
    dim = whole.dim
    why = f"max_factor_dim={limit}"
    if gates > 1 and dim <= limit * gates:
        limit, why = -(-dim // gates), f"{gates} gates; max_factor_dim=None: whole"
    elif gates == 1 and dim > _LOPSIDED_DIM and dim >= _LOPSIDED_RATIO * other:
        why = f"{dim} is {dim // other} times {other}; max_factor_dim=None: whole"
        limit = 1 if side == "G" else min(limit, max(_LEAST_BLOCK, other))
    blocks = -(-dim // limit)
    if blocks == 1:
        return whole, ""
    if blocks == dim:
        return replace(whole, diagonal=True), f"diagonal ({why})"
    return replace(whole, blocks=blocks), f"in {blocks} blocks of {-(-dim // blocks)} ({why})"
