"""The second moment of what sliding windows see, from products of shifted images: no window is ever copied."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .moments import GRAM_DIM
from .windows import CHUNK_NUMEL, Windows

__all__ = ["shift_pays", "shifted_moment"]


@dataclass(frozen=True)
class _Axis:
    """The taps of a kernel along one spatial dimension: how many, how far apart, and what they slide over."""

    count: int
    dilation: int
    padding: int
    outputs: int
    length: int

    def strips(self, distance: int) -> tuple[int, list[tuple[int, int]], dict[int, list[int]]]:
        """How to multiply the image with itself for all pairs of taps at some distance.

        A pair meets the positions that its first tap reaches and whose partners are inside the image. Pairs of one
        distance differ in that only at the border: the positions fall into strips that a pair has as a whole or not.

        Returns:
            The distance in positions; the strips, first and last + 1 of the positions under the first tap; and by first
            tap the numbers of the strips it meets.
        """
        shift = distance * self.dilation
        reaches = {}
        for tap in range(max(0, -distance), self.count - max(0, distance)):
            start = tap * self.dilation - self.padding
            first, last = max(0, -shift, start), min(self.length, self.length - shift, start + self.outputs)
            reaches[tap] = range(first, last)
        ends = sorted({end for reach in reaches.values() if reach for end in (reach.start, reach.stop)})
        strips = list(itertools.pairwise(ends))
        return shift, strips, {tap: [i for i, (a, _) in enumerate(strips) if a in r] for tap, r in reaches.items()}


@dataclass(frozen=True)
class _Plan:
    """Products of parts of an image with parts of itself, and which of them make up the block of two taps.

    Attributes:
        products: Per product and spatial dimension first and last + 1 of the left part's positions, and how far to the
            right of it the right part lies.
        members: The numbers of the products of each pair of taps, one pair after the other. Numbers from
            ``len(products)`` on stand for the transposes: opposite distances need not be multiplied twice.
        offsets: Where in ``members`` each pair of taps begins, and its end, ``[taps * taps + 1]``.
    """

    products: list[tuple[tuple[int, int, int], ...]]
    members: list[int]
    offsets: list[int]

    @classmethod
    def of(cls, axes: Sequence[_Axis]) -> _Plan:
        """The products over some spatial dimensions."""
        counts = [axis.count for axis in axes]
        taps = list(itertools.product(*map(range, counts)))
        zero = (0,) * len(axes)
        products: list[tuple[tuple[int, int, int], ...]] = []
        pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for distances in (d for d in itertools.product(*(range(1 - n, n) for n in counts)) if d >= zero):
            shifts, strips, meets = zip(*(axis.strips(d) for axis, d in zip(axes, distances, strict=True)), strict=True)
            numbers = {}
            for choice in itertools.product(*(range(len(found)) for found in strips)):
                numbers[choice] = len(products)
                parts = (found[i] for found, i in zip(strips, choice, strict=True))
                products.append(tuple((a, b, shift) for (a, b), shift in zip(parts, shifts, strict=True)))
            for first in itertools.product(*meets):
                second = tuple(i + d for i, d in zip(first, distances, strict=True))
                met = itertools.product(*(meet[tap] for meet, tap in zip(meets, first, strict=True)))
                pairs[first, second] = [numbers[choice] for choice in met]
        count = len(products)
        bags = [pairs[i, j] if i <= j else [n + count for n in pairs[j, i]] for i, j in itertools.product(taps, taps)]
        offsets = list(itertools.accumulate(map(len, bags), initial=0))
        return cls(products, [number for bag in bags for number in bag], offsets)

    @property
    def positions(self) -> int:
        """Positions of all products together."""
        return sum(math.prod(stop - start for start, stop, _ in product) for product in self.products)


@functools.lru_cache(maxsize=1024)
def _plan(windows: Windows, lengths: tuple[int, ...]) -> _Plan:
    """The plan for windows that slide by 1 over an image of some lengths."""
    before = [zeros for zeros, _ in windows.padding]
    config = zip(windows.size, windows.dilation, before, windows.positions(lengths), lengths, strict=True)
    return _Plan.of([_Axis(*axis) for axis in config])


@functools.lru_cache(maxsize=1024)
def _bags(windows: Windows, lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Members and offsets of a plan on a device, which keeps them from being sent there in every step."""
    plan = _plan(windows, lengths)
    return torch.tensor(plan.members, device=device), torch.tensor(plan.offsets, device=device)


def shifted_moment(x: Tensor, windows: Windows, groups: int) -> Tensor:
    """``sum a a^T`` over all windows of stride 1, ``[p, d, d]``.

    The block of two taps is the product of the image with itself, shifted by their distance, over those positions that
    windows reach with the first tap. So a 3x3 kernel takes 13 products over the whole image (those of opposite
    distances are transposes), in some of which single rows and columns at the border stand apart, instead of 81.

    Args:
        x: ``[n, c, *spatial]``.
        windows: How the kernel slides; the stride is taken for 1.
        groups: p.
    """
    lengths = tuple(x.shape[2:])
    plan, (members, offsets) = _plan(windows, lengths), _bags(windows, lengths, x.device)
    taps, c = math.prod(windows.size), x.shape[1] // groups
    if not plan.products:
        return x.new_zeros(groups, c * taps, c * taps)
    sums = x.new_zeros(len(plan.products), groups, c, c)
    for chunk in x.split(max(1, CHUNK_NUMEL // x[:1].numel())):
        # [p, *spatial, n, c]: transposed as a matrix, which is several times faster than permuted.
        rows = chunk.flatten(0, 1).flatten(1).T.contiguous().view(*lengths, len(chunk), groups, c).movedim(-2, 0)
        for total, product in zip(sums, plan.products, strict=True):
            total += _product(rows, product)
    sums = torch.cat([sums, sums.mT]).flatten(1)
    moment = x.new_empty(groups, c, taps, c, taps)
    strip = max(1, CHUNK_NUMEL // (taps * groups * c * c))  # taps whose blocks are added up together
    for start in range(0, taps, strip):
        bags = offsets[start * taps : (start + strip) * taps + 1]
        first, last = plan.offsets[start * taps], plan.offsets[min(taps, start + strip) * taps]
        blocks = F.embedding_bag(members[first:last], sums, bags - first, mode="sum", include_last_offset=True)
        moment[:, :, start : start + strip] = blocks.view(-1, taps, groups, c, c).permute(2, 3, 0, 4, 1)
    return moment.view(groups, c * taps, c * taps)


def _product(rows: Tensor, product: tuple[tuple[int, int, int], ...]) -> Tensor:
    """``[p, c, c]``: sum of (left part)^T (right part) over positions and examples of ``[p, *spatial, n, c]``."""
    left = right = rows
    for dim, (start, stop, shift) in enumerate(product, start=1):
        left, right = left.narrow(dim, start, stop - start), right.narrow(dim, start + shift, stop - start)
    products = left.flatten(-3, -2).mT @ right.flatten(-3, -2)
    return products if products.dim() == 3 else products.flatten(1, -3).sum(1)


# The choice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rates:
    """Seconds per unit of work of the two ways to the moment of a convolution.

    Attributes:
        flop: Of the products of shifted images.
        product: For each of these products.
        entry: For each number of the moment, which the blocks are put in order for.
        element: For each number of an image that a product reads; in brackets, with groups.
        patch_flop: Of the product of unfolded patches.
        patch: For each number of a patch that is written.
    """

    flop: float
    product: float
    entry: float
    element: tuple[float, float]
    patch_flop: float
    patch: float


# Fitted to both ways at 24 shapes, one thread of a CPU; errors are up to a factor of 2. On an accelerator guessed from
# data sheets: what matters there is that many small products are slow.
_CPU = _Rates(1.3e-11, 4e-5, 1.3e-8, (8e-10, 5.6e-9), 1.8e-11, 4.2e-9)
_ACCELERATOR = _Rates(3e-14, 3e-5, 2e-11, (1e-12, 4e-12), 3e-14, 8e-12)


@functools.lru_cache(maxsize=4096)
def shift_pays(shape: torch.Size, windows: Windows, groups: int, device_type: str) -> bool:
    """Whether :func:`shifted_moment` is expected to be faster than a product of unfolded patches.

    It is not where the image is small beside the kernel, so that most of it is border, nor for few channels and many
    groups. It needs stride 1.

    Args:
        shape: Of the image.
        windows: How the kernel slides.
        groups: p.
        device_type: Where.
    """
    if max(windows.stride) > 1:
        return False
    n, channels, *lengths = shape
    c, taps, outputs = channels // groups, math.prod(windows.size), windows.positions(lengths)
    chunks = math.ceil(math.prod(shape) / CHUNK_NUMEL)
    plan = _plan(windows, tuple(lengths))
    elements, patches = n * plan.positions * channels, n * math.prod(outputs) * channels * taps
    rates = _CPU if device_type in ("cpu", "meta") else _ACCELERATOR  # on meta tensors work is only counted
    shifted = 2 * rates.flop * elements * c + rates.element[groups > 1] * elements
    shifted += rates.product * chunks * len(plan.products) + rates.entry * groups * (c * taps) ** 2
    symmetric = 0.6 if c * taps >= GRAM_DIM else 1.0
    return shifted < 2 * rates.patch_flop * symmetric * patches * c * taps + rates.patch * patches
