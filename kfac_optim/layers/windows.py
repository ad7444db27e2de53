"""Windows that slide over an image, and the second moment of what they see, computed from unfolded patches."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..common.machines import machine_of
from .moments import gram, second_moment

# How many numbers of patches are unfolded at once (16 MiB in float32; 128 MiB where launches count). Patches of the
# whole batch would take as many times the memory of the activations as the kernel has taps.
CHUNK_NUMEL = {"cpu": 2**22, "accelerator": 2**25, "meta": 2**22}


@dataclass(frozen=True)
class Windows:
    """How a window slides over an image; each attribute has an entry per spatial dimension.

    Attributes:
        size: The number of taps.
        stride: How far the window moves.
        dilation: How far its taps are apart.
        padding: The zeros to add before and after the image.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def unfold(self, x: Tensor) -> Tensor:
        """``[n, c, *spatial]`` as ``[n, c, *positions, *taps]``; a view where there is no padding."""
        if zeros := self._zeros:
            x = F.pad(x, zeros)
        for dim, (k, s, d) in enumerate(zip(self.size, self.stride, self.dilation, strict=True), start=2):
            x = x.unfold(dim, (k - 1) * d + 1, s)
            x = x if d == 1 else x[..., ::d]
        return x

    def positions(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """The number of windows along each spatial dimension of an image of these lengths."""
        return _positions(self, tuple(lengths))

    @functools.cached_property
    def are_pixels(self) -> bool:
        """Whether each window is one pixel, and each pixel has one."""
        return max(self.size) == max(self.stride) == 1 and not self._zeros

    @functools.cached_property
    def _zeros(self) -> list[int]:
        """The padding in torch's order; empty if there is none."""
        return [zeros for pair in reversed(self.padding) for zeros in pair] if any(map(any, self.padding)) else []

    def examples_at_once(self, x: Tensor) -> int:
        """How many examples of ``x [n, c, *spatial]`` to unfold at once, for a small copy but large products."""
        taps = math.prod(self.size)
        d = x.shape[1] * taps
        numbers = max(CHUNK_NUMEL[machine_of(x.device)], d * d // taps)
        return max(1, numbers // max(1, math.prod(self.positions(x.shape[2:])) * d))


def for_each(setting: Any, dims: int) -> tuple[int, ...]:
    """A setting for each of some dimensions, given one for all or for each."""
    of_dims = tuple(setting) if isinstance(setting, (tuple, list)) else (setting,)
    return of_dims * dims if len(of_dims) == 1 else of_dims


def zeros_around(size: Sequence[int], dilation: Sequence[int], padding: Any) -> tuple[tuple[int, int], ...]:
    """The zeros before and after an image in each dimension, given a padding as ``F.conv2d`` takes it."""
    if padding == "same":
        return tuple((d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in zip(size, dilation, strict=True))
    return tuple((n, n) for n in for_each(0 if padding == "valid" else padding, len(size)))


@functools.lru_cache(maxsize=4096)
def _positions(windows: Windows, lengths: tuple[int, ...]) -> tuple[int, ...]:
    config = zip(lengths, windows.size, windows.stride, windows.dilation, windows.padding, strict=True)
    return tuple((length + sum(padding) - (k - 1) * d - 1) // s + 1 for length, k, s, d, padding in config)


def pixels(x: Tensor, groups: int) -> Tensor:
    """The pixels of images ``[n, c, *spatial]`` as rows ``[n, r, p, c / p]``, a view."""
    return x.reshape(len(x), groups, x.shape[1] // groups, math.prod(x.shape[2:])).permute(0, 3, 1, 2)


def unfolded_moment(x: Tensor, windows: Windows, groups: int) -> Tensor:
    """``sum a a^T`` over all windows, ``[p, d, d]``, by a product of unfolded patches.

    Args:
        x: ``[n, c, *spatial]``.
        windows: How the kernel slides.
        groups: The number p of Kronecker pairs.
    """
    taps, c = math.prod(windows.size), x.shape[1] // groups
    dims = len(windows.size)

    def moment_of(chunk: Tensor) -> Tensor:
        if windows.are_pixels:
            return second_moment(pixels(chunk, groups), diagonal=False)
        # Channels last: a patch then consists of runs of adjacent numbers and is copied several times faster.
        chunk = chunk.flatten(2).mT.contiguous().mT.view(chunk.shape) if taps > 1 else chunk
        patches = windows.unfold(chunk).unflatten(1, (groups, c)).movedim((1, 2), (dims + 1, -1))
        if taps == 1:
            return second_moment(patches.flatten(1, dims).flatten(3), diagonal=False)
        return gram(patches.reshape(-1, groups, taps * c).transpose(0, 1))

    at_once = windows.examples_at_once(x)
    chunks = (x,) if len(x) <= at_once else x.split(at_once)
    moment = functools.reduce(Tensor.add_, map(moment_of, chunks))
    if taps == 1:
        return moment
    # Patches list the channels of each tap; the weight lists the taps of each channel.
    return moment.view(groups, taps, c, taps, c).permute(0, 2, 1, 4, 3).reshape(moment.shape)
