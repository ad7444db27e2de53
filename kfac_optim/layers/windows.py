"""Windows that slide over an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

__all__ = ["CHUNK_NUMEL", "Windows"]

# Patches of a convolution are unfolded for a few examples at a time: this many numbers at once (16 MiB in float32)
# instead of a copy of the activations as many times larger as the kernel has taps.
CHUNK_NUMEL = 2**22


@dataclass(frozen=True)
class Windows:
    """Windows of ``size`` taps, ``dilation`` apart, that slide by ``stride`` over spatial dimensions.

    ``padding`` are the zeros that are yet to be added before and after each dimension.
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
        """Number of windows along each dimension of an image of some lengths."""
        config = zip(lengths, self.size, self.stride, self.dilation, self.padding, strict=True)
        return [(length + sum(padding) - (k - 1) * d - 1) // s + 1 for length, k, s, d, padding in config]

    def examples_at_once(self, x: Tensor) -> int:
        """How many examples to unfold together, so that the copy stays small and the products large."""
        taps = math.prod(self.size)
        d = x.shape[1] * taps
        return max(1, max(CHUNK_NUMEL, d * d // taps) // max(1, math.prod(self.positions(x.shape[2:])) * d))
