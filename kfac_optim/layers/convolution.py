"""Convolutions and transposed convolutions."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Observation, RowsLayer
from .moments import with_ones
from .registry import register_layer
from .shifts import shift_pays, shifted_moment
from .windows import Windows, for_each, pixels, unfolded_moment, zeros_around

_PerDimension = int | str | tuple[int, ...]  # of a convolution's attribute: one for all dimensions, or for each


class _ConvNdLayer(RowsLayer):
    """What convolutions and transposed convolutions share.

    Groups are Kronecker pairs, and the shared positions are the output pixels. A row of the input is the patch that the
    kernel sees there: both types slide a kernel over an image, the transposed one over its zero-stuffed input.
    """

    copies_rows = True

    def structure(self, module: Any) -> tuple[int, int, int]:
        d_in = module.in_channels // module.groups * math.prod(module.kernel_size)
        return module.groups, module.out_channels // module.groups, d_in + (self.bias is not None)

    def batch_dim_of(self, module: Any, x: Tensor) -> int | None:
        return 0 if x.dim() == len(self.weight_shape) else None

    @abstractmethod
    def windows(self, module: Any, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        """The image that the kernel slides over, and how it slides.

        Args:
            module: The convolution.
            a: Its input, ``[n, c, *spatial]``.
            output: Its output.
        """

    def observe(self, module: Any, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        spec, channels = self.specs[0], (self.d_in - (self.bias is not None)) // math.prod(self.weight_shape[2:])
        in_groups = spec.blocks == 1 or (self.bias is None and channels % spec.blocks == 0)
        if self.by_example or spec.diagonal or not in_groups:
            return super().observe(module, a, output, dtype)
        image, windows = self._batched(module, self.multiplicand(a.detach(), dtype), output)
        # Gives what the base class would, but does not unfold patches where that is faster. Blocks of whole channels
        # are like groups.
        groups = self.pairs * spec.blocks
        shifted = shift_pays(image.shape, windows, groups, a.device, half=image.dtype != dtype)
        moment = (shifted_moment if shifted else unfolded_moment)(image, windows, groups)
        count = len(image) * math.prod(windows.positions(image.shape[2:]))
        if self.bias is not None:
            total = windows.unfold(image.sum(0, keepdim=True, dtype=dtype)).flatten(2, -1 - len(windows.size)).sum(2)
            moment = with_ones(moment, total.reshape(self.pairs, -1), count)
        return Observation(moment, count)

    def input_rows(self, module: Any, a: Tensor, output: Tensor) -> Iterable[Tensor]:
        image, windows = self._batched(module, a, output)
        for chunk in image.split(windows.examples_at_once(image)):
            patches = windows.unfold(chunk)
            patches = patches.movedim(1, len(windows.size) + 1).flatten(1, len(windows.size))
            yield patches.reshape(*patches.shape[:2], self.pairs, -1)

    def _batched(self, module: Any, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        """:meth:`windows` of an input that may be a single example without a batch dimension."""
        unbatched = a.dim() < len(self.weight_shape)
        return self.windows(module, a[None], output[None]) if unbatched else self.windows(module, a, output)

    def output_rows(self, module: Any, g: Tensor, context: Any) -> Tensor:
        if g.dim() < len(self.weight_shape):
            g = g[None]
        return pixels(g, self.pairs)


@functools.lru_cache(maxsize=1024)
def _sliding(size: _PerDimension, stride: _PerDimension, dilation: _PerDimension, padding: _PerDimension) -> Windows:
    """The windows of a convolution, whose attributes users may have set to all that ``torch.conv2d`` takes."""
    assert isinstance(size, tuple)
    stride, dilation = for_each(stride, len(size)), for_each(dilation, len(size))
    return Windows(size, stride, dilation, zeros_around(size, dilation, padding))  # "same": for the present dilation


def _hashable(setting: Any) -> _PerDimension:
    return tuple(setting) if isinstance(setting, list) else setting


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvLayer(_ConvNdLayer):
    """``nn.Conv1d/2d/3d`` with any stride, padding, padding mode, dilation and groups."""

    def windows(self, module: Any, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        padding: Any = module.padding  # not what the constructor made of it: users may have set it anew
        if module.padding_mode != "zeros":
            a, padding = F.pad(a, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0
        return a, _sliding(*map(_hashable, (module.kernel_size, module.stride, module.dilation, padding)))

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.weight_shape)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeLayer(_ConvNdLayer):
    """``nn.ConvTranspose1d/2d/3d``: a convolution of the zero-stuffed input with the flipped kernel."""

    def windows(self, module: Any, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        padding: list[int] = []
        size = tuple(module.kernel_size)
        settings = (module.stride, module.padding, module.dilation)
        config = (size, *(for_each(setting, len(size)) for setting in settings))
        for dim, (k, s, p, d) in enumerate(zip(*config, strict=True), start=2):
            stuffed = a.new_zeros(*a.shape[:dim], (a.shape[dim] - 1) * s + 1, *a.shape[dim + 1 :])
            stuffed[(slice(None),) * dim + (slice(None, None, s),)] = a
            a, reach = stuffed, (k - 1) * d
            before = reach - p
            padding[:0] = [before, output.shape[dim] + reach - before - a.shape[dim]]
        ones = (1,) * len(size)
        none = ((0, 0),) * len(ones)
        return F.pad(a, padding), Windows(size, ones, config[-1], none)

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        shape = self.weight_shape
        flipped = matrix.unflatten(-1, (shape[0] // self.pairs, *shape[2:])).transpose(1, 2).reshape(shape)
        return flipped.flip(tuple(range(2, len(shape))))
