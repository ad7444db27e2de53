"""The second moment of what sliding windows see, from products of shifted images, without copying any window."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.machines import machine_of
from ..common.tensor_cache import tensor_cache
from .moments import GRAM_DIM, product
from .windows import CHUNK_NUMEL, Windows

# How many numbers of the moment's blocks are put in their places at once. For large moments this takes most memory.
_BLOCK_NUMEL = {"cpu": 2**18, "accelerator": 2**24, "meta": 2**18}


@dataclass(frozen=True)
class _Axis:
    """The taps of a kernel along one spatial dimension, and what they slide over.

    Attributes:
        count: The number of taps.
        dilation: How far they are apart.
        padding: Zeros before the image.
        outputs: The number of windows.
        length: The length of the image, without padding.
    """

    count: int
    dilation: int
    padding: int
    outputs: int
    length: int

    def strips(self, distance: int) -> tuple[int, list[tuple[int, int]], dict[int, range]]:
        """How to multiply the image with itself for all pairs of taps at one distance.

        The block of a pair of taps is a sum over those positions under the first tap whose partners, under the second
        tap, are inside the image. For different pairs at one distance these positions differ only at the border. They
        are therefore cut into strips, each of which belongs to a pair's sum as a whole or not at all.

        Args:
            distance: The number of the second tap minus that of the first.

        Returns:
            The distance in positions; the strips, each as its first position and last + 1 under the first tap; and, by
            the number of the first tap, the positions in the pair's sum.
        """
        shift = distance * self.dilation
        reaches = {}
        for tap in range(max(0, -distance), self.count - max(0, distance)):
            start = tap * self.dilation - self.padding
            first, last = max(0, -shift, start), min(self.length, self.length - shift, start + self.outputs)
            reaches[tap] = range(first, last)
        ends = sorted({end for reach in reaches.values() if reach for end in (reach.start, reach.stop)})
        return shift, list(itertools.pairwise(ends)), reaches


@dataclass(frozen=True)
class _Product:
    """A part of an image times the part at some distance from it, summed over the positions of each line.

    A line is a set of positions that differ in the last spatial dimension alone.

    Attributes:
        parts: For each spatial dimension the left part's first position and last + 1, and the distance from there to
            the right part.
        strips: Which lines are summed together, as ones and zeros, ``[strips, lines]``.
        first: The number of the first strip's sum among the sums of the whole plan.
    """

    parts: tuple[tuple[int, int, int], ...]
    strips: Tensor
    first: int

    def line_by_line(self, rows: Tensor) -> Tensor:
        """Multiplies the two parts of an image ``[*lines, p, last, n, c]``: ``left^T right``, ``[*lines, p, c, c]``.

        ``last`` are the positions in the last spatial dimension.
        """
        left = right = rows
        for dim, (start, stop, shift) in zip((*range(len(self.parts) - 1), -3), self.parts, strict=True):
            left, right = left.narrow(dim, start, stop - start), right.narrow(dim, start + shift, stop - start)
        return product(left.flatten(-3, -2).mT, right.flatten(-3, -2))


@dataclass(frozen=True)
class _Plan:
    """Which products of an image with itself to take, and which of their sums make up the block of two taps.

    Attributes:
        products: The products.
        sums: The number of sums that they give.
        taps: The pairs of taps, the second not before the first; the blocks of all other pairs are transposes.
        members: The numbers of the sums that make up each pair's block, one pair after the other.
        offsets: Where in ``members`` each pair begins, and the length of ``members``: ``[pairs + 1]``.
    """

    products: list[_Product]
    sums: int
    taps: list[tuple[int, int]]
    members: list[int]
    offsets: list[int]


def _products(
    shifts: Sequence[int], strips: Sequence[Sequence[tuple[int, int]]], count: int
) -> tuple[list[_Product], dict[tuple[int, ...], int]]:
    """The products for one distance, and the numbers of their sums, by the index of the strip along each dimension.

    Args:
        shifts: The distance in positions, by dimension.
        strips: The strips, by dimension.
        count: The number of the first sum.
    """
    if not all(strips):
        return [], {}
    *others, last = strips
    spans = [(of_axis[0][0], of_axis[-1][1]) for of_axis in others]
    lines = functools.reduce(torch.kron, map(_membership, others, spans), torch.ones(1, 1, device="cpu"))
    indices = itertools.product(range(len(last)), *map(range, map(len, others)))
    numbers = {(*line, i): number for number, (i, *line) in enumerate(indices, count)}
    products = []
    for i, part in enumerate(last):
        parts = tuple((*span, shift) for span, shift in zip((*spans, part), shifts, strict=True))
        products.append(_Product(parts, lines, count + i * len(lines)))
    return products, numbers


def _membership(strips: Sequence[tuple[int, int]], span: tuple[int, int]) -> Tensor:
    """Which positions of a span belong to which strip, ``[strips, positions]``, as ones and zeros."""
    return torch.tensor([[float(first <= at < last) for at in range(*span)] for first, last in strips], device="cpu")


@functools.lru_cache(maxsize=1024)
def _plan(windows: Windows, lengths: tuple[int, ...]) -> _Plan:
    """The plan for windows of stride 1 over an image whose spatial dimensions have some lengths."""
    axes = _axes(windows, lengths)
    counts = [axis.count for axis in axes]
    number_of = {tap: number for number, tap in enumerate(itertools.product(*map(range, counts)))}
    zero = (0,) * len(axes)
    products: list[_Product] = []
    pairs: dict[tuple[int, int], list[int]] = {}
    count = 0
    for distances in (d for d in itertools.product(*(range(1 - n, n) for n in counts)) if d >= zero):
        found = [axis.strips(distance) for axis, distance in zip(axes, distances, strict=True)]
        shifts, strips, reaches = zip(*found, strict=True)
        meets = [  # by the number of the first tap, the indices of the strips in the pair's sum
            {tap: [i for i, (at, _) in enumerate(of_axis) if at in reach] for tap, reach in of_taps.items()}
            for of_axis, of_taps in zip(strips, reaches, strict=True)
        ]
        of_distance, numbers = _products(shifts, strips, count)
        products += of_distance
        count += len(numbers)
        for first in itertools.product(*meets):
            second = tuple(i + d for i, d in zip(first, distances, strict=True))
            met = itertools.product(*(meet[tap] for meet, tap in zip(meets, first, strict=True)))
            pairs[number_of[first], number_of[second]] = [numbers[choice] for choice in met]
    members = list(itertools.chain.from_iterable(pairs.values()))
    offsets = list(itertools.accumulate(map(len, pairs.values()), initial=0))
    return _Plan(products, count, list(pairs), members, offsets)


def _axes(windows: Windows, lengths: tuple[int, ...]) -> list[_Axis]:
    """The dimensions of windows of stride 1 over an image."""
    before = [zeros for zeros, _ in windows.padding]
    config = zip(windows.size, windows.dilation, before, windows.positions(lengths), lengths, strict=True)
    return [_Axis(*axis) for axis in config]


@tensor_cache(1024)
def _tensors(
    windows: Windows, lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The ``taps``, ``members``, ``offsets`` and ``strips`` of a plan as tensors, kept on the device between steps."""
    plan = _plan(windows, lengths)
    of_plan = (torch.tensor(part, device="cpu") for part in (plan.taps, plan.members, plan.offsets))
    taps, members, offsets = (part.to(device, non_blocking=True) for part in of_plan)
    strips = [product.strips.to(device, dtype, non_blocking=True) for product in plan.products]
    return taps.T, members, offsets, strips


def shifted_moment(x: Tensor, windows: Windows, groups: int) -> Tensor:
    """``sum a a^T`` over all windows of stride 1, ``[p, d, d]``.

    The block of two taps is the product of the image with itself, shifted by their distance, over those positions that
    windows reach with the first tap. So a 3x3 kernel takes 13 products over the whole image instead of 81: those of
    opposite distances are transposes. A few of the 13 are split at the border.

    Args:
        x: ``[n, c, *spatial]``.
        windows: How the kernel slides; the stride must be 1.
        groups: The number p of Kronecker pairs.
    """
    lengths = tuple(x.shape[2:])
    plan = _plan(windows, lengths)
    dtype = torch.promote_types(x.dtype, torch.float32)
    pairs, members, offsets, strips = _tensors(windows, lengths, x.device, dtype)
    taps, c = math.prod(windows.size), x.shape[1] // groups
    if not plan.products:
        return x.new_zeros(groups, c * taps, c * taps, dtype=dtype)
    sums = _sums(x, plan, strips, groups)
    moment = x.new_empty(groups, c, taps, c, taps, dtype=dtype)
    blocks = moment.permute(2, 4, 0, 1, 3)
    at_once = max(1, _BLOCK_NUMEL[machine_of(x.device)] // (groups * c * c))
    for start in range(0, len(plan.taps), at_once):
        bags = offsets[start : start + at_once + 1]
        own = members[plan.offsets[start] : plan.offsets[min(len(plan.taps), start + at_once)]]
        added = F.embedding_bag(own, sums, bags - bags[0], mode="sum", include_last_offset=True).view(-1, groups, c, c)
        left, right = pairs[:, start : start + at_once]
        blocks[left, right], blocks[right, left] = added, added.mT
    return moment.view(groups, c * taps, c * taps)


def _sums(x: Tensor, plan: _Plan, strips: Sequence[Tensor], groups: int) -> Tensor:
    """The sums of a plan's products, ``[sums, p * c * c]``.

    Args:
        x: ``[n, c, *spatial]``.
        plan: The plan.
        strips: The strips of its products, on the device of ``x``.
        groups: The number p of Kronecker pairs.
    """
    lengths, c = x.shape[2:], x.shape[1] // groups
    sums = x.new_zeros(plan.sums, groups * c * c, dtype=strips[0].dtype)
    for chunk in x.split(max(1, CHUNK_NUMEL[machine_of(x.device)] // x[:1].numel())):
        # Transposed as a matrix, which is several times faster than permuted; then [*lines, p, last, n, c].
        rows = chunk.flatten(0, 1).flatten(1).T.contiguous().view(*lengths, len(chunk), groups, c)
        rows = rows.movedim(-2, -4).contiguous()
        for planned, lines in zip(plan.products, strips, strict=True):
            of_lines = planned.line_by_line(rows).reshape(lines.shape[1], -1)
            sums[planned.first : planned.first + len(lines)].addmm_(lines, of_lines)
    return sums


# The choice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rates:
    """Seconds per unit of work of the two ways to compute the moment of a convolution.

    Work that depends only on the size of the moment is left out, because both ways have to write its entries.

    Attributes:
        flop: For each operation in products of shifted images.
        product: For each of these products.
        element: For each number of an image that a product reads.
        patch_flop: For each operation in the product of unfolded patches.
        patch: For each number of a patch that is written.
    """

    flop: float
    product: float
    element: float
    patch_flop: float
    patch: float


# The CPU's rates are fitted to the times of both ways at 36 shapes on one thread; where they choose the slower way, it
# takes less than 1.6 times as long. Those of accelerators are an H200's, where a product of shifted images takes three
# launches, which cost the host more time than the device.
_ON_CPU = _Rates(7.4e-12, 6e-5, 1.5e-9, 1.1e-11, 4.4e-9)
_RATES = {"cpu": _ON_CPU, "accelerator": _Rates(2.4e-14, 8e-5, 1e-12, 2.4e-14, 8e-12), "meta": _ON_CPU}
_IN_HALF = _Rates(1.7e-15, 8e-5, 5e-13, 1.7e-15, 5e-12)  # in half precision on an accelerator


@functools.lru_cache(maxsize=4096)
def shift_pays(shape: torch.Size, windows: Windows, groups: int, device: torch.device, *, half: bool) -> bool:
    """Whether ``shifted_moment`` is expected to be faster than a product of unfolded patches.

    It is slower for few channels, and for images that are little larger than the kernel, so that most of them is
    border. It is impossible for a stride above 1, and pointless for kernels of one tap, whose patches are the image.

    Args:
        shape: The shape of the image, ``[n, c, *spatial]``.
        windows: How the kernel slides.
        groups: The number p of Kronecker pairs.
        device: The image's device.
        half: Whether the image is multiplied in half precision.
    """
    if max(windows.stride) > 1 or max(windows.size) == 1:
        return False
    kind, (n, channels, *lengths) = machine_of(device), shape
    c, taps, outputs = channels // groups, math.prod(windows.size), windows.positions(lengths)
    chunks = math.ceil(math.prod(shape) / CHUNK_NUMEL[kind])
    products, positions = _work(_axes(windows, tuple(lengths)))
    elements, patches = n * positions * channels, n * math.prod(outputs) * channels * taps
    rates = _IN_HALF if half else _RATES[kind]
    shifted = (2 * rates.flop * c + rates.element) * elements + rates.product * chunks * products
    symmetric = 0.6 if c * taps >= GRAM_DIM else 1.0
    return shifted < (2 * rates.patch_flop * symmetric * c * taps + rates.patch) * patches


def _work(axes: Sequence[_Axis]) -> tuple[int, int]:
    """The numbers of a plan's products and of the positions in all of them together.

    They are counted without the plan, which lists all pairs of taps: the kernels of a network for texts, which are as
    wide as the embedding, have some hundred thousand pairs, and each batch may have another length.
    """
    *others, last = extents = [_extents(axis) for axis in axes]
    if not all(extents):
        return 0, 0
    products = math.prod(map(len, others)) * sum(strips for strips, _ in last)
    positions = math.prod(sum(positions for _, positions in of_axis) for of_axis in extents)
    # Opposite distances have as many of both, and a plan takes one of them.
    return (products + last[0][0]) // 2, (positions + math.prod(of_axis[0][1] for of_axis in extents)) // 2


@functools.lru_cache(maxsize=4096)
def _extents(axis: _Axis) -> list[tuple[int, int]]:
    """For each distance at which there are any, the number of strips and of positions in them; distance 0 first."""
    distances = sorted(range(1 - axis.count, axis.count), key=abs)
    found = [strips for _, strips, _ in map(axis.strips, distances) if strips]
    return [(len(strips), strips[-1][1] - strips[0][0]) for strips in found]
