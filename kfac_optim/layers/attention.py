"""The projections of ``nn.MultiheadAttention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .base import KroneckerLayer, Observation, own_parameter
from .hosted import Application, HostedLayer
from .linear import LinearLayer
from .options import LayerOptions
from .registry import register_layer


class ProjectionCall(NamedTuple):
    """One use of a projection."""

    examples: int  # in the call
    # The others are for packed q, k, v projections, three Kronecker pairs:
    first_pair: int = 0  # the first pair that the call applies
    end_pair: int = 0  # the pair after the last one
    queries: int = 0  # how many queries each example has


class AttentionLayer(HostedLayer, LinearLayer):
    """A projection of ``nn.MultiheadAttention``, which applies weights by ``F.linear`` and does not call a module.

    Inputs and output gradients are ``[positions, n, d]``, whatever the dimension of the examples outside of attention.
    ``module`` is the one that owns the weight, in the methods about single calls a :class:`ProjectionCall`.

    Args:
        host: The attention module.
        weight: The name of the weight in ``module``.
        bias: The name of the bias in ``module``.
        bias_part: The slice of the bias that belongs to this weight.
    """

    host: nn.Module

    def __init__(
        self,
        name: str,
        module: nn.Module,
        options: LayerOptions,
        *,
        host: nn.Module,
        weight: str,
        bias: str,
        bias_part: slice = slice(None),
    ) -> None:
        self._names, self.host, self.bias_part = (weight, bias), host, bias_part
        super().__init__(name, module, replace(options, batch_dim=1))

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        weight, bias = self._names
        return own_parameter(module, weight), module._parameters.get(bias)

    def is_applied(self, host: nn.Module, application: Application) -> bool:
        tensor, now = application.weight, getattr(self.modules[0], self._names[0])
        if tensor is now or tensor._base is now:  # packed weights are applied part by part
            return True
        if now._base is None or tensor._base is not now._base:
            return False
        return bool(now.storage_offset() <= tensor.storage_offset() < now.storage_offset() + now.numel())

    def as_applied(self, module: nn.Module, details: Sequence[int]) -> ProjectionCall:
        return ProjectionCall(*details)

    def with_examples(self, module: ProjectionCall, x: Tensor) -> Tensor:
        return x.reshape(-1, module.examples, x.shape[-1])  # the output projection is applied to a matrix


class AttentionInputLayer(AttentionLayer):
    """The packed q, k and v projections: three Kronecker pairs on one weight.

    A call of ``F.linear`` uses all three pairs (self-attention) or some of them (cross-attention).
    """

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        rows, d_in = self.weight_shape
        return 3, rows // 3, d_in + (self.bias is not None)

    def observe(self, module: Any, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        """A call's contribution to all three pairs, from that to the pairs that it uses."""
        seen = super().observe(module, a, output, dtype)
        pairs, moment, count = slice(module.first_pair, module.end_pair), seen.a, seen.count
        if self.by_example:
            count = count.new_zeros(self.pairs)
            count[pairs] = seen.count
        elif module.first_pair > 0:  # keys and values, weighted as if there were as many as queries, whose rows count
            moment, count = moment * (module.queries / len(a)), 0.0
        return Observation(self._among_zeros(pairs, moment, side=0), count, context=pairs)

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        return super().output_rows(module, g, context).squeeze(2).unflatten(-1, (-1, self.d_out))

    def output_moment(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        return self._among_zeros(context, super().output_moment(module, g, context), side=1)

    def _among_zeros(self, pairs: slice, part: Tensor, *, side: int) -> Tensor:
        """Widens an observation's ``a`` (side 0) or an output moment (side 1) to all pairs.

        ``pairs`` get ``part`` (if it is one pair's, all get the same), the others zeros.
        """
        dim, blocks = (1, 1) if self.by_example else (0, self.specs[side].blocks)
        part = part.unflatten(dim, (-1, blocks))
        full = part.new_zeros(*part.shape[:dim], self.pairs, *part.shape[dim + 1 :])
        full.narrow(dim, pairs.start, pairs.stop - pairs.start).copy_(part)
        return full.flatten(dim, dim + 1)

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix.flatten(0, 1)


@register_layer(nn.MultiheadAttention)
def _attention(name: str, module: Any, options: LayerOptions) -> Sequence[KroneckerLayer]:
    """The input and output projections; q, k, v of different widths have three weights that share one bias."""
    prefix = f"{name}." if name else ""
    out = AttentionLayer(f"{prefix}out_proj", module.out_proj, options, host=module, weight="weight", bias="bias")
    own: dict[str, Any] = {"host": module, "bias": "in_proj_bias"}
    if module.in_proj_weight is not None:
        return AttentionInputLayer(f"{prefix}in_proj", module, options, weight="in_proj_weight", **own), out
    layers = []
    for i, part in enumerate("qkv"):
        own |= {"weight": f"{part}_proj_weight", "bias_part": slice(i * module.embed_dim, (i + 1) * module.embed_dim)}
        layers.append(AttentionLayer(f"{prefix}{part}_proj", module, options, **own))
    return *layers, out
