"""Raw second moments of rows ``[n, r, p, d]``, and the selection of the examples that they are made of.

A product of two numbers in half precision is exact in float32. Where a device adds such products in float32, moments of
rows in half precision need no copy of the rows in float32, and a GPU's tensor cores take an eighth of the time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.machines import machine_of

# From this dimension on it pays to compute only about half of a symmetric product, in strips. The time relative to the
# whole product, on one thread: 1.1 at dimension 257, 0.8 at 288, 0.6 at 1025. On accelerators a strip also has to save
# more than its launch costs, so that there are fewer, and the whole product must take at least so many operations.
GRAM_DIM = 280
_STRIPS = {"cpu": (8, 0.0), "accelerator": (4, 3e10), "meta": (8, 0.0)}  # how many, from how many operations on
# How many squares are computed before they are added up: on a CPU they should stay in the cache.
_SQUARES = {"cpu": 2**18, "accelerator": 2**28, "meta": 2**28}
_HALF = (torch.bfloat16, torch.float16)
_SUMS_IN_FLOAT32 = "dtype" in torch.ops.aten.bmm.overloads() and torch.version.hip is None  # torch 2.8 and later


def multiplicand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts to ``dtype``, except tensors in half precision for which :func:`product` gives the same result."""
    exact = x.dtype in _HALF and dtype == torch.float32 and x.device.type == "cuda" and _SUMS_IN_FLOAT32
    return x if exact else x.to(dtype)


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x y`` for stacks of matrices; the product of matrices in half precision is in float32."""
    precision: dict[str, Any] = {"out_dtype": torch.float32} if x.dtype in _HALF else {}
    if x.dim() == 3:
        return torch.bmm(x, y, **precision)
    if not precision:
        return x @ y
    x_stack, y_stack = (of.reshape(math.prod(of.shape[:-2]), *of.shape[-2:]) for of in (x, y))
    return torch.bmm(x_stack, y_stack, **precision).view(*x.shape[:-1], y.shape[-1])


def gram(rows: Tensor) -> Tensor:
    """``x^T x`` for ``x [..., rows, d]``; for large d the upper triangle is computed in strips and the rest copied.

    In half precision there are no strips, because the whole product takes no longer.
    """
    d, (strips, least) = rows.shape[-1], _STRIPS[machine_of(rows.device)]
    if rows.dtype in _HALF or d < GRAM_DIM or 2 * rows.numel() * d < least:
        return product(rows.mT, rows)
    whole = rows.new_empty(*rows.shape[:-2], d, d)
    strip = max(GRAM_DIM // 2, d // strips)
    for start in range(0, d, strip):
        length, rest = min(strip, d - start), d - start
        upper = whole.narrow(-2, start, length)
        left, right = rows.narrow(-1, start, length), rows.narrow(-1, start, rest)
        torch.matmul(left.mT, right, out=upper.narrow(-1, start, rest))
        if rest > length:
            beyond = upper.narrow(-1, start + length, rest - length)
            whole.narrow(-2, start + length, rest - length).narrow(-1, start, length).copy_(beyond.mT)
    return whole


def second_moment(rows: Tensor, *, diagonal: bool, blocks: int = 1) -> Tensor:
    """``sum x x^T`` over rows ``[n, r, p, d]``, in float32 at least: ``[p, d, d]``, or only its diagonal ``[p, d]``.

    If b = ``blocks`` > 1, only blocks of m rows along its diagonal, ``[p b, m, m]``; zeros may fill up the last one.
    """
    if diagonal:
        dtype, most = torch.promote_types(rows.dtype, torch.float32), _SQUARES[machine_of(rows.device)]
        first, *others = rows.flatten(0, 1).split(max(1, most // rows.shape[-2:].numel()))
        total = first.to(dtype).square().sum(0)
        for part in others:  # in place: the sums of all parts, kept until the end, might be as large as the rows
            total += part.to(dtype).square().sum(0)
        return total
    if blocks > 1:
        rows = F.pad(rows, (0, -rows.shape[-1] % blocks)).unflatten(-1, (blocks, -1)).flatten(2, 3)
    if rows.stride(-1) > 1 and rows.shape[-1] <= min(rows.shape[1], GRAM_DIM):
        # The rows are views of channels-first images, which need not be copied.
        n, _, pairs, d = rows.shape
        images = rows.permute(0, 2, 3, 1).flatten(0, 1)
        return product(images, images.mT).view(n, pairs, d, d).sum(0)
    return gram(rows.flatten(0, 1).transpose(0, 1))


def with_ones(moment: Tensor, total: Tensor, count: float) -> Tensor:
    """The moment of rows with a 1 appended, ``[p, d + 1, d + 1]`` or its diagonal ``[p, d + 1]``.

    Args:
        moment: The moment of the rows without it, ``[p, d, d]`` or ``[p, d]``.
        total: The sum of those rows, ``[p, d]``.
        count: Their number.
    """
    if moment.dim() == 2:
        return F.pad(moment, (0, 1), value=count)
    moment = F.pad(moment, (0, 1, 0, 1), value=count)
    moment[:, :-1, -1] = moment[:, -1, :-1] = total
    return moment


def spread_examples(x: Tensor, dim: int, fraction: float) -> Tensor:
    """Selects ``fraction`` of the examples along ``dim``, rounded up.

    They are evenly spread, so that the parts of a batch (ranks, micro-batches) yield those that the whole would yield.
    """
    examples = x.shape[dim]
    kept = math.ceil(fraction * examples)
    if kept == examples:
        return x
    return x.index_select(dim, torch.arange(kept, device=x.device) * examples // kept)
