"""Norm layers, whose blocks are those of scale and shift per channel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import KroneckerLayer, Observation, Sharing
from .moments import second_moment
from .registry import register_layer

__all__ = ["BatchNormLayer", "GroupNormLayer", "LayerNormLayer", "RMSNormLayer", "SyncBatchNormLayer"]


class _NormLayer(KroneckerLayer):
    """Scale and shift of a norm layer: per channel the 2x2 Fisher ``F_c = M sum_n`` of per-example gradients.

    As a pair: ``W = [scale, shift]^T`` is ``[2, 1]``, A is the constant 1, G is ``F_c`` of the rows
    ``(sum_r g x_hat, sum_r g)``.
    """

    rule = "unit-wise"
    joint = True
    by_example = True

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        self.sharing: Sharing = "expand"
        return self.weight_shape.numel(), len(self.parameters), 1

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        return None  # always all: cheap, and normalised by the whole batch

    @abstractmethod
    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        """The input after normalisation in a mode (``module.training`` at the call), before scale and shift."""

    @abstractmethod
    def by_channel(self, x: Tensor) -> Tensor:
        """A tensor of the output's shape, summed over the positions of each example: ``[n, channels]``."""

    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        # A reference to what autograd saves for its own backward anyway; normalised again when the gradient is there.
        one = torch.ones((), dtype=dtype, device=a.device)
        return Observation(one, one, context=(a.detach(), module.training))

    def pool(self, calls: Sequence[tuple[Observation, Tensor]]) -> tuple[Tensor, int, Tensor]:
        g = sum((rows for _, rows in calls[1:]), calls[0][1])
        return g.new_ones(self.pairs, 1, 1), 1, second_moment(g[:, None], diagonal=self.diagonal[1])

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        a, training = context
        x_hat = self.normalized(module, a.to(g.dtype), training)
        return torch.stack([self.by_channel(g * x_hat), self.by_channel(g)][: self.d_out], dim=-1)[:, None]

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.stack([p.flatten() for p in (weight, bias) if p is not None], dim=-1)[..., None]

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return tuple(column.reshape(self.weight_shape) for column in matrix[..., 0].unbind(-1))


class _ChannelsLastNorm(_NormLayer):
    def by_channel(self, x: Tensor) -> Tensor:
        x = x.flatten(-len(self.weight_shape))
        return x.reshape(-1, x.shape[-1]) if x.dim() <= 2 else x.movedim(self.batch_dim, 0).flatten(1, -2).sum(1)


class _ChannelsFirstNorm(_NormLayer):
    def by_channel(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1).sum(2)


@register_layer(nn.LayerNorm)
class LayerNormLayer(_ChannelsLastNorm):
    """``nn.LayerNorm``; each entry of ``normalized_shape`` is a channel."""

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)


@register_layer(nn.RMSNorm)
class RMSNormLayer(_ChannelsLastNorm):
    """``nn.RMSNorm``: a scale and no shift, so 1x1 blocks."""

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)


@register_layer(nn.GroupNorm)
class GroupNormLayer(_ChannelsFirstNorm):
    """``nn.GroupNorm``."""

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormLayer(_ChannelsFirstNorm):
    """``nn.BatchNorm1d/2d/3d`` in train mode (batch statistics taken as given) and eval mode (running statistics)."""

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        if training or module.running_mean is None:
            return F.batch_norm(x, None, None, training=True, eps=module.eps)
        return F.batch_norm(x, module.running_mean.to(x), module.running_var.to(x), training=False, eps=module.eps)


@register_layer(nn.SyncBatchNorm)
class SyncBatchNormLayer(BatchNormLayer):
    """``nn.SyncBatchNorm``: in train mode the mean and variance are those of all ranks' batches together.

    They are read off the layer's output, which is linear in its input, so that nothing has to be sent.
    """

    def observe(self, module: Any, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        seen = super().observe(module, a, output, dtype)
        if module.training or module.running_mean is None:
            seen.context = (a.detach(), self._statistics(module, a.detach().to(dtype), output.detach().to(dtype)))
        return seen

    def _statistics(self, module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation per channel, from ``y = weight * inv * (x - mean) + bias``."""
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        weight, bias = (p.detach().to(x).view(shape) for p in (module.weight, module.bias))
        mean_x, mean_y = x.mean(dims, keepdim=True), y.mean(dims, keepdim=True)
        variance = (x - mean_x).square().mean(dims, keepdim=True)
        slope = ((x - mean_x) * (y - mean_y)).mean(dims, keepdim=True) / variance
        known = (variance > 0) & (weight != 0) & (slope != 0)
        # A channel whose weight is zero (a zero-initialised residual branch) tells nothing: its own batch has to do.
        mean = torch.where(known, mean_x - (mean_y - bias) / slope, mean_x)
        return mean, torch.where(known, slope / weight, (variance + module.eps).rsqrt())

    def normalized(self, module: Any, x: Tensor, training: Any) -> Tensor:
        if isinstance(training, bool):
            return super().normalized(module, x, training)
        mean, inverse = training
        return (x - mean) * inverse
