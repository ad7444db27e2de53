"""Norm layers: a Fisher block for the scale and shift of each channel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.machines import machine_of
from .base import KroneckerLayer, Observation
from .moments import second_moment
from .options import LayerOptions
from .registry import register_layer

_TINY_EPS = torch.finfo(torch.float64).tiny  # an epsilon that changes no variance; torch 2.11 refuses 0

# Torch's own mean and variance take less time than five operations for so many numbers, or if channels come last.
_FEW = 2**14
_ONE = torch.ones((), device="cpu")  # a placeholder that is never read

Statistics = tuple[Tensor, Tensor]  # the mean of an input, and its variance with epsilon added


class _NormLayer(KroneckerLayer):
    """Scale and shift of a norm layer, whose block for channel c is ``F_c = M sum_n v v^T``, 2x2.

    v is the gradient of one example with respect to scale and shift, ``(sum_r g x_hat, sum_r g)`` for the normalised
    input x_hat. Each channel is a Kronecker pair in form: ``W = [scale, shift]^T`` is ``[2, 1]``, A is the constant 1,
    and G is F_c, made of the rows v.
    """

    rule = "unit-wise"
    pairs_share_scale = True
    by_example = True
    always_expands = True

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        return self.weight_shape.numel(), len(self.parameters), 1

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        return None  # never subsampled: it is cheap, and batch norm normalises by the whole batch

    @abstractmethod
    def gradient_sums(self, module: Any, x: Tensor, g: Tensor, statistics: Statistics | None) -> Tensor:
        """``sum_r g x_hat`` and ``sum_r g`` over the positions of each example, ``[n, channels, 2]``.

        Args:
            module: The norm module.
            x: Its input.
            g: The gradient of its output, of the same shape.
            statistics: What ``known_statistics`` returned at the call.
        """

    def known_statistics(self, module: Any, a: Tensor, output: Tensor, dtype: torch.dtype) -> Statistics | None:
        """The statistics of each channel that a call normalises by; None if they follow from its input ``a``."""
        return None

    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        # The input is normalised again once the gradient arrives. If autograd saves it, nothing may write over it.
        kept = a.detach() if self.is_saved(a) and not _is_packed() else a.detach().clone()
        return Observation(_ONE, _ONE, context=(kept, self.known_statistics(module, a, output, dtype)))

    def is_saved(self, a: Tensor) -> bool:
        """Whether autograd saves the input of a call; autocast makes it save a copy in float32 instead."""
        return a.dtype.itemsize >= 4 or not torch.is_autocast_enabled(a.device.type)

    @property
    def combined_with(self) -> Hashable:
        """All norm layers of one form on one device: there are many, and their moments are small."""
        return _NormLayer, self.d_out, self.specs[1].diagonal, self.weight.device

    @classmethod
    def combine_layers(
        cls, layers: Sequence[KroneckerLayer], sums: Sequence[tuple[Tensor, Any, Tensor]]
    ) -> tuple[Tensor, int, Tensor]:
        g = torch.cat([g for _, _, g in sums], 1)
        return g.new_ones(g.shape[1], 1, 1), 1, second_moment(g[:, None], diagonal=layers[0].specs[1].diagonal)

    def output_moment(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        a, statistics = context
        sums = self.gradient_sums(module, a.to(g.dtype), g, statistics)
        return sums if self.d_out == 2 else sums[..., :1]

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return tuple(column.reshape(self.weight_shape) for column in matrix[..., 0].unbind(-1))


class _ChannelsLastNorm(_NormLayer):
    """Norms over the last dimensions, whose entries are the channels.

    ``eps``: the epsilon of modules that have no attribute ``eps``; None: that attribute.
    """

    def __init__(self, name: str, module: nn.Module, options: LayerOptions, eps: float | None = None) -> None:
        self.eps = eps
        super().__init__(name, module, options)

    def eps_of(self, module: Any) -> Any:
        """The number that is added to the variance."""
        return module.eps if self.eps is None else self.eps

    def is_saved(self, a: Tensor) -> bool:
        # Modules that need self.eps compute step by step: autograd may save only the input minus its mean.
        return self.eps is None and super().is_saved(a)

    @abstractmethod
    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """The input after normalisation, before scale and shift."""

    def gradient_sums(self, module: Any, x: Tensor, g: Tensor, statistics: Statistics | None) -> Tensor:
        return torch.stack((self._by_channel(g * self.normalized(module, x)), self._by_channel(g)), dim=-1)

    def _by_channel(self, x: Tensor) -> Tensor:
        """The sums of ``x`` over the positions of each example, ``[n, channels]``."""
        x = x.flatten(-len(self.weight_shape))
        return x.reshape(-1, x.shape[-1]) if x.dim() <= 2 else x.movedim(self.batch_dim, 0).flatten(1, -2).sum(1)


class _ChannelsFirstNorm(_NormLayer):
    """Norms of ``[n, channels, *positions]`` that use one mean and deviation for all positions of a channel.

    Then ``sum g x_hat = (sum g x - mean sum g) / deviation``, which needs no normalised copy of the activations. On a
    CPU writing that copy would take longer than everything else; on accelerators making it takes the fewest launches.
    """

    @abstractmethod
    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """The input ``[n, channels, positions]`` after normalisation by its own statistics, before scale and shift."""

    @abstractmethod
    def statistics(self, module: Any, x: Tensor) -> Statistics:
        """The statistics of ``x [n, channels, positions]``; they broadcast to ``[n, channels]``."""

    def gradient_sums(self, module: Any, x: Tensor, g: Tensor, statistics: Statistics | None) -> Tensor:
        x, g = (part.reshape(*part.shape[:2], -1) for part in (x, g))
        sums = g.new_empty(2, *g.shape[:2])
        scaled, total = sums.unbind()
        torch.sum(g, 2, out=total)
        if machine_of(x.device) == "accelerator":
            if statistics is None:
                normalized = self.normalized(module, x)
            else:
                normalized = F.batch_norm(x, statistics[0].to(x), statistics[1].to(x), eps=_TINY_EPS)
            torch.linalg.vecdot(g, normalized, out=scaled)
        else:
            mean, variance = statistics or self.statistics(module, x)
            torch.linalg.vecdot(g, x, out=scaled).addcmul_(mean, total, value=-1).mul_(variance.rsqrt())
        return sums.movedim(0, -1)


def _is_packed() -> bool:
    """Whether hooks take what autograd saves (offloading, checkpoints), so that it lets it be written over."""
    hooks_on_top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # not in torch 2.6
    return hooks_on_top is not None and hooks_on_top(True) is not None


def _mean_and_variance(x: Tensor, eps: float, shape: Sequence[int], dim: int) -> Statistics:
    """The statistics of ``x [n, channels, positions]`` over its positions and one more dimension.

    Args:
        x: The input.
        eps: The module's epsilon.
        shape: The shape that the means over positions, ``[n, channels]``, are viewed in.
        dim: The dimension of that shape to average over; it is kept, with length 1.
    """
    sums = (x.sum(2), torch.linalg.vector_norm(x, dim=2).square())  # 15 times as fast as var_mean
    mean, square = ((part / x.shape[2]).reshape(shape).mean(dim, keepdim=True) for part in sums)
    # A deviation below a thousandth of the mean is lost in the rounding of the squares.
    variance = (square - mean.square()).clamp_(min=1e-6 * square)
    return mean, variance + eps


@register_layer(nn.LayerNorm)
class LayerNormLayer(_ChannelsLastNorm):
    """``nn.LayerNorm``; each entry of ``normalized_shape`` is a channel."""

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight_shape, eps=self.eps_of(module))


class ChannelsFirstLayerNormLayer(LayerNormLayer):
    """A LayerNorm over dimension 1 of ``[n, channels, *positions]``, as in ConvNeXt."""

    def __init__(self, name: str, module: nn.Module, options: LayerOptions, **more: Any) -> None:
        super().__init__(name, module, replace(options, batch_dim=0), **more)

    def gradient_sums(self, module: Any, x: Tensor, g: Tensor, statistics: Statistics | None) -> Tensor:
        return super().gradient_sums(module, x.movedim(1, -1), g.movedim(1, -1), statistics)


@register_layer(nn.RMSNorm)
class RMSNormLayer(_ChannelsLastNorm):
    """``nn.RMSNorm``: it has a scale and no shift, so that its blocks are 1x1."""

    def is_saved(self, a: Tensor) -> bool:
        return super().is_saved(a) and a.dtype.itemsize >= 4  # in half precision a float32 copy is saved instead

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight_shape, eps=self.eps_of(module))


@register_layer(nn.GroupNorm)
class GroupNormLayer(_ChannelsFirstNorm):
    """``nn.GroupNorm``, with the statistics of each group of channels."""

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)

    def statistics(self, module: Any, x: Tensor) -> Statistics:
        n, channels = x.shape[:2]
        groups = (n, module.num_groups, channels // module.num_groups)
        mean, variance = _mean_and_variance(x, module.eps, groups, 2)
        return mean.expand(groups).flatten(1), variance.expand(groups).flatten(1)


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormLayer(_ChannelsFirstNorm):
    """``nn.BatchNorm1d/2d/3d``: batch statistics, taken as constants, in train mode; running ones in eval mode."""

    def is_saved(self, a: Tensor) -> bool:
        return True  # autocast leaves its input alone

    def known_statistics(self, module: Any, a: Tensor, output: Tensor, dtype: torch.dtype) -> Statistics | None:
        if module.training or module.running_mean is None:
            return None
        return module.running_mean.to(dtype, copy=True), module.running_var.to(dtype) + module.eps

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True, eps=module.eps)

    def statistics(self, module: Any, x: Tensor) -> Statistics:
        if x.is_cpu and (x.numel() <= _FEW or x.stride(1) == 1):
            mean, variance = torch.batch_norm_update_stats(x.unsqueeze(2), None, None, 0.0)
            return mean, variance + module.eps
        return _mean_and_variance(x, module.eps, x.shape[:2], 0)


@register_layer(nn.SyncBatchNorm)
class SyncBatchNormLayer(BatchNormLayer):
    """``nn.SyncBatchNorm``: in train mode the mean and variance are those of all ranks' batches together.

    They are computed from the layer's output, which is linear in its input, so that nothing has to be sent.
    """

    def known_statistics(self, module: Any, a: Tensor, output: Tensor, dtype: torch.dtype) -> Statistics | None:
        statistics = super().known_statistics(module, a, output, dtype)
        return statistics or self._global_statistics(module, a.detach().to(dtype), output.detach().to(dtype))

    def _global_statistics(self, module: Any, x: Tensor, y: Tensor) -> Statistics:
        """The statistics of all ranks together, from ``y = weight / deviation * (x - mean) + bias``."""
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        weight, bias = (p.detach().to(x).view(shape) for p in (module.weight, module.bias))
        mean_x, mean_y = x.mean(dims, keepdim=True), y.mean(dims, keepdim=True)
        variance = (x - mean_x).square().mean(dims, keepdim=True)
        slope = ((x - mean_x) * (y - mean_y)).mean(dims, keepdim=True) / variance
        invertible = (variance > 0) & (weight != 0) & (slope != 0)
        # If a channel's weight is zero, its output carries no information, and this rank's own batch has to do.
        mean = torch.where(invertible, mean_x - (mean_y - bias) / slope, mean_x)
        return mean.flatten(), torch.where(invertible, (weight / slope).square(), variance + module.eps).flatten()
