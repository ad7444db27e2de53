"""Windows that slide over an image, and the second moment of what they see, computed from unfolded patches."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from .moments import machine, second_moment

__all__ = ["CHUNK_NUMEL", "Windows", "unfolded_moment"]

# How many numbers of patches are unfolded at once (16 MiB in float32; 128 MiB where launches count). Patches of the
# whole batch would take as many times the memory of the activations as the kernel has taps.
CHUNK_NUMEL = {"cpu": 2**22, "accelerator": 2**25}


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
        if any(map(any, self.padding)):
            x = F.pad(x, [zeros for pair in reversed(self.padding) for zeros in pair])
        for dim, (k, s, d) in enumerate(zip(self.size, self.stride, self.dilation, strict=True), start=2):
            x = x.unfold(dim, (k - 1) * d + 1, s)[..., ::d]
        return x

    def positions(self, lengths: Sequence[int]) -> list[int]:
        """The number of windows along each spatial dimension of an image of these lengths."""
        config = zip(lengths, self.size, self.stride, self.dilation, self.padding, strict=True)
        return [(length + sum(padding) - (k - 1) * d - 1) // s + 1 for length, k, s, d, padding in config]

    def examples_at_once(self, x: Tensor) -> int:
        """How many examples of ``x [n, c, *spatial]`` to unfold at once, for a small copy but large products."""
        taps = math.prod(self.size)
        d = x.shape[1] * taps
        numbers = max(CHUNK_NUMEL[machine(x.device.type)], d * d // taps)
        return max(1, numbers // max(1, math.prod(self.positions(x.shape[2:])) * d))


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
        # Channels last: a patch then consists of runs of adjacent numbers and is copied several times faster.
        chunk = chunk.flatten(2).mT.contiguous().mT.view(chunk.shape) if taps > 1 else chunk
        patches = windows.unfold(chunk).unflatten(1, (groups, c)).movedim((1, 2), (dims + 1, -1))
        return second_moment(patches.flatten(1, dims).flatten(3), diagonal=False)

    moment = functools.reduce(Tensor.add_, map(moment_of, x.split(windows.examples_at_once(x))))
    # Patches list the channels of each tap; the weight lists the taps of each channel.
    return moment.view(groups, taps, c, taps, c).permute(0, 2, 1, 4, 3).reshape(moment.shape)
