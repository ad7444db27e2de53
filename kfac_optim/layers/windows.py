"""Windows that slide over an image, and the second moment of what they see without a copy of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .moments import GRAM_DIM, gram

__all__ = ["Windows", "shift_pays", "shifted_moment"]

# Patches of a convolution are unfolded for a few examples at a time: this many numbers at once (16 MiB in float32)
# instead of a copy of the activations as many times larger as the kernel has taps.
_CHUNK_NUMEL = 2**22


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

    def taps(self, lengths: Sequence[int]) -> list[_Taps]:
        """The taps along each dimension of an image of some lengths."""
        before = [zeros for zeros, _ in self.padding]
        return [_Taps(*taps) for taps in zip(self.size, self.dilation, before, self.positions(lengths), strict=True)]

    def positions(self, lengths: Sequence[int]) -> list[int]:
        """Number of windows along each dimension of an image of some lengths."""
        config = zip(lengths, self.size, self.stride, self.dilation, self.padding, strict=True)
        return [(length + sum(padding) - (k - 1) * d - 1) // s + 1 for length, k, s, d, padding in config]

    def examples_at_once(self, x: Tensor) -> int:
        """How many examples to unfold together, so that the copy stays small and the products large."""
        taps = math.prod(self.size)
        d = x.shape[1] * taps
        return max(1, max(_CHUNK_NUMEL, d * d // taps) // max(1, math.prod(self.positions(x.shape[2:])) * d))


@dataclass(frozen=True)
class _Rates:
    """Seconds per unit of work of the two ways to the moment of a convolution.

    Attributes:
        flop: Of the products of shifted images.
        product: For each of these products.
        block: For each number in their results, which are subtracted and put in order several times.
        element: For each number of an image that a product reads; in brackets, with groups.
        patch_flop: Of the product of unfolded patches.
        patch: For each number of a patch that is written.
    """

    flop: float
    product: float
    block: float
    element: tuple[float, float]
    patch_flop: float
    patch: float


# Fitted to both ways at 24 shapes, one thread of a CPU; errors are up to a factor of 2. On an accelerator guessed from
# data sheets: what matters there is that many small products are slow.
_CPU = _Rates(1.2e-11, 8e-5, 3.3e-8, (1.6e-9, 6e-9), 2e-11, 4.3e-9)
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
    chunks = math.ceil(math.prod(shape) / _CHUNK_NUMEL)
    products, positions = _shifted_work(windows.taps(lengths), lengths)
    elements, patches = n * positions * channels, n * math.prod(outputs) * channels * taps
    rates = _CPU if device_type in ("cpu", "meta") else _ACCELERATOR  # on meta tensors work is only counted
    shifted = 2 * rates.flop * elements * c + rates.element[groups > 1] * elements
    shifted += chunks * products * (rates.product + rates.block * groups * c * c)
    symmetric = 0.6 if c * taps >= GRAM_DIM else 1.0
    return shifted < 2 * rates.patch_flop * symmetric * patches * c * taps + rates.patch * patches


def _shifted_work(dims: Sequence[_Taps], lengths: Sequence[int], same: bool = True) -> tuple[int, int]:
    """How many products :func:`_tap_products` takes, and over how many positions of an image in all."""
    if not dims:
        return 1, 1
    products = positions = 0
    for _, shift, first, last, missed in dims[0].distances(lengths[0], same):
        inner = _shifted_work(dims[1:], lengths[1:], same and shift == 0)
        beyond = len(set().union(*missed.values()))
        products += inner[0] * (1 + beyond)
        positions += inner[1] * (last - first + beyond)
    return products, positions


def shifted_moment(x: Tensor, windows: Windows, groups: int) -> Tensor:
    """``sum a a^T`` over all windows of stride 1, ``[p, d, d]``, without a copy of them.

    The block of two taps is the product of the image with itself, shifted by their distance, less the rows and columns
    that one of the two windows does not reach at the border: of a 3x3 kernel 13 products over the whole image (those of
    opposite distances are transposes) and some over single rows and columns, instead of 81.

    Args:
        x: ``[n, c, *spatial]``.
        windows: How the kernel slides; the stride is taken for 1.
        groups: p.
    """
    dims = windows.taps(x.shape[2:])
    moment: Tensor | float = 0.0
    for chunk in x.split(max(1, _CHUNK_NUMEL // x[:1].numel())):
        # [p, *spatial, n, c]: transposed as a matrix, which is several times faster than permuted.
        rows = chunk.flatten(0, 1).flatten(1).T.contiguous().view(*chunk.shape[2:], len(chunk), groups, -1)
        rows = rows.movedim(-2, 0)
        moment = moment + _tap_products(rows, rows, dims)
    assert isinstance(moment, Tensor)
    # From [p, *taps, c, *taps, c] to the order of the weight, channels first.
    middle = 1 + len(dims)
    moment = moment.movedim(-1, middle + 1).movedim(middle, 1)
    d = x.shape[1] // groups * math.prod(windows.size)
    return moment.reshape(groups, d, d)


@dataclass(frozen=True)
class _Taps:
    """The taps of a kernel along one spatial dimension: how many, how far apart, and what they slide over."""

    count: int
    dilation: int
    padding: int
    outputs: int

    def reach(self, tap: int) -> tuple[int, int]:
        """First and last + 1 of the positions that a tap would see without the border of the image."""
        start = tap * self.dilation - self.padding
        return start, start + self.outputs

    def distances(self, length: int, same: bool) -> Iterator[tuple[int, int, int, int, dict[int, list[int]]]]:
        """For each distance between two taps what is to be multiplied, of an image of a length.

        Args:
            length: Of the image along the dimension.
            same: Whether it is multiplied with itself; opposite distances are then transposes.

        Yields:
            The distance in taps and in positions; the first and last + 1 of the positions under the first tap; and by
            first tap those of them that its windows, or the second tap's, do not reach.
        """
        for distance in range(0 if same else 1 - self.count, self.count):
            shift = distance * self.dilation
            first, last = max(0, -shift), min(length, length - shift)
            if first >= last:  # the taps are further apart than the image is long
                first = last = shift = 0
            missed = {}
            for tap in range(max(0, -distance), self.count - max(0, distance)):
                start, stop = self.reach(tap)
                missed[tap] = [*range(first, min(start, last)), *range(max(stop, first), last)]
            yield distance, shift, first, last, missed


def _tap_products(left: Tensor, right: Tensor, dims: Sequence[_Taps], axis: int = 1) -> Tensor:
    """``[p, *taps, c, *taps, c]``: for any two taps the sum over windows of (left under one) (right under the other)^T.

    Args:
        left: ``[p, ..., *spatial, n, c]``; sums run over what stands between p and c.
        right: The same shape. ``right is left`` halves the work.
        dims: The taps along the spatial dimensions.
        axis: The first spatial dimension.
    """
    same = left is right
    if not dims:
        rows = left.flatten(-3, -2)
        products = gram(rows) if same else rows.mT @ right.flatten(-3, -2)
        return products.reshape(len(rows), -1, *products.shape[-2:]).sum(1)
    taps = dims[0]
    blocks: dict[tuple[int, int], Tensor] = {}
    for distance, shift, first, last, missed in taps.distances(left.shape[axis], same):

        def product(start: int, stop: int, shift: int = shift) -> Tensor:
            part = left.narrow(axis, start, stop - start)
            other = part if same and shift == 0 else right.narrow(axis, start + shift, stop - start)
            return _tap_products(part, other, dims[1:], axis + 1)

        whole = product(first, last)
        beyond = {row: product(row, row + 1) for row in set().union(*missed.values())}
        for i, rows_missed in missed.items():
            blocks[i, i + distance] = whole - sum(beyond[row] for row in rows_missed)
    inner = len(dims)  # the other spatial dimensions' taps, and the channels
    if same:
        mirrored = {
            (j, i): b.movedim(tuple(range(1, 1 + inner)), tuple(range(-inner, 0))) for (i, j), b in blocks.items()
        }
        blocks = mirrored | blocks
    lines = [torch.stack([blocks[i, j] for j in range(taps.count)], 1 + inner) for i in range(taps.count)]
    return torch.stack(lines, 1)
