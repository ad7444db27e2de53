"""The projections of ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .base import KroneckerLayer, LayerOptions, Observation, own_parameter
from .linear import LinearLayer
from .registry import register_layer

__all__ = ["AttentionInputLayer", "AttentionLayer"]


class AttentionLayer(LinearLayer):
    """A projection of ``nn.MultiheadAttention``, which applies its weights by ``F.linear`` without calling a module.

    Inside attention tensors are sequence first, and flattened at the output projection.
    """

    def __init__(
        self, name: str, module: nn.Module, options: LayerOptions, host: nn.Module, weight: str, bias: str
    ) -> None:
        self.names, self.host = (weight, bias), host
        super().__init__(name, module, options)

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        weight, bias = self.names
        return own_parameter(module, weight), module._parameters.get(bias)

    def subsample(self, module: nn.Module, x: Tensor, fraction: float, *, examples: int = 1) -> Tensor:
        """As for any layer, of ``examples`` in a batch; with the dimension of the examples where the model has it."""
        x = x.reshape(-1, examples, x.shape[-1]).movedim(1, self.batch_dim)
        return super().subsample(module, x, fraction)


class AttentionInputLayer(AttentionLayer):
    """The packed q, k, v projections: three Kronecker pairs on one weight.

    A call of ``F.linear`` may concern all three (self-attention) or some of them (cross-attention).
    """

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        rows, d_in = self.weight_shape
        return 3, rows // 3, d_in + (self.bias is not None)

    def observe(
        self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype, *, pairs: slice = slice(0, 3)
    ) -> Observation:
        seen = super().observe(module, a, output, dtype)
        count = self._in_place_of(pairs, seen.count, 0) if self.by_example else seen.count
        return Observation(self._in_place_of(pairs, seen.a, self._pair_dim), count, pairs=pairs)

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        return super().output_rows(module, g, context).squeeze(2).unflatten(-1, (-1, self.d_out))

    def output_moment(self, module: nn.Module, g: Tensor, observation: Observation) -> Tensor:
        assert observation.pairs is not None
        return self._in_place_of(observation.pairs, super().output_moment(module, g, observation), self._pair_dim)

    @property
    def _pair_dim(self) -> int:
        return 1 if self.by_example else 0

    def _in_place_of(self, pairs: slice, part: Tensor, dim: int) -> Tensor:
        """What some pairs have (or one thing for each of them) among zeros for the others."""
        full = part.new_zeros(*part.shape[:dim], self.pairs, *part.shape[dim + 1 :])
        full.narrow(dim, pairs.start, pairs.stop - pairs.start).copy_(part)
        return full

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (3, -1))

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix.flatten(0, 1)


@register_layer(nn.MultiheadAttention)
def _attention(name: str, module: nn.Module, options: LayerOptions) -> Sequence[KroneckerLayer]:
    """In and out projections; q, k, v of different widths have weights of their own and each a part of one bias."""
    assert isinstance(module, nn.MultiheadAttention)
    out = AttentionLayer(f"{name}.out_proj", module.out_proj, options, module, "weight", "bias")
    if module.in_proj_weight is not None:
        return AttentionInputLayer(f"{name}.in_proj", module, options, module, "in_proj_weight", "in_proj_bias"), out
    layers = []
    for i, part in enumerate("qkv"):
        weight = f"{part}_proj_weight"
        layers.append(AttentionLayer(f"{name}.{part}_proj", module, options, module, weight, "in_proj_bias"))
        layers[-1].bias_part = slice(i * module.embed_dim, (i + 1) * module.embed_dim)
    return *layers, out
