"""Linear layers, and the types that are Linear in disguise: transformers' ``Conv1D``, and embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .base import Declined, Observation, RowsLayer
from .registry import register_layer


@register_layer(nn.Linear)
class LinearLayer(RowsLayer):
    """``nn.Linear`` on inputs of any rank: features last, one dimension for the examples, all others shared."""

    copies_rows = True

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        d_out, d_in = reversed(self.weight_shape) if self.stored_transposed else self.weight_shape
        return 1, d_out, d_in + (self.bias is not None)

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        return None if x.dim() < 2 else self.batch_dim if x.dim() > 2 else 0

    def input_rows(self, module: nn.Module, a: Tensor, output: Tensor) -> Iterable[Tensor]:
        yield self._rows(a)

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        return self._rows(g)

    def _rows(self, x: Tensor) -> Tensor:
        """An input or output gradient as rows: ``[n, r, 1, d]``, with expand ``[n r, 1, 1, d]``."""
        if x.dim() <= 2 or self.sharing == "expand":
            return x.reshape(-1, 1, 1, x.shape[-1])
        return x.movedim(self.batch_dim, 0).flatten(1, -2)[:, :, None]

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix[0]


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedLinearLayer(LinearLayer):
    """transformers' ``Conv1D``: a Linear whose weight is stored ``[d_in, d_out]``."""

    stored_transposed = True

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix[0].T


@register_layer(nn.Embedding)
class EmbeddingLayer(TransposedLinearLayer):
    """``nn.Embedding``: a Linear on one-hot inputs, so that A is the diagonal of token frequencies.

    Tokens equal to ``padding_idx`` do not train the weight and count neither in A nor in G. Sharing is always expand.
    """

    diagonal_input = True
    always_expands = True

    def structure(self, module: Any) -> tuple[int, int, int]:
        for option in ("sparse", "scale_grad_by_freq", "max_norm"):
            if getattr(module, option):
                raise Declined(f"{option}={getattr(module, option)}")
        return 1, module.embedding_dim, module.num_embeddings

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        return super().batch_dim_of(module, x if x.is_floating_point() else x[..., None])  # tokens have no features

    def observe(self, module: Any, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        # This is bincount, which would wait for the device, to know the length of its result.
        frequency = torch.zeros(1, module.num_embeddings, dtype=dtype, device=a.device)
        frequency[0].index_add_(0, a.flatten(), frequency.new_ones(()).expand(a.numel()))
        if module.padding_idx is None:
            return Observation(frequency, a.numel())
        frequency[:, module.padding_idx] = 0
        # This count depends on the data; waiting for it costs a synchronisation, on statistics steps only.
        return Observation(frequency, float(frequency.sum()), context=a != module.padding_idx)

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        return self._rows(g if context is None else g * context[..., None])
