"""Raw second moments of rows, and what they are taken of: full precision, and a part of the examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["GRAM_DIM", "full_precision", "gram", "second_moment", "spread_examples", "with_ones"]

# From this dimension on strips of a symmetric product save more than smaller products lose. Measured against the whole
# product, single thread: 1.1 at 257, 0.8 at 288, 0.6 at 1025.
GRAM_DIM = 280


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Autocast, gradients and TF32 off: second moments need every bit of float32."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        if device_type != "cuda":
            yield
            return
        matmul: Any = torch.backends.cuda.matmul
        try:
            precision, choose = torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision
            choose("highest")
        except RuntimeError:  # chosen by the attribute of torch 2.9, beside which the functions refuse to work
            precision, choose = matmul.fp32_precision, functools.partial(setattr, matmul, "fp32_precision")
            choose("ieee")
        try:
            yield
        finally:
            choose(precision)


def gram(rows: Tensor) -> Tensor:
    """``x^T x`` of ``[..., rows, d]``: in strips from the diagonal on, as the rest is symmetric."""
    d = rows.shape[-1]
    if d < GRAM_DIM:
        return rows.mT @ rows
    product = rows.new_empty(*rows.shape[:-2], d, d)
    strip = max(GRAM_DIM // 2, d // 8)
    for start in range(0, d, strip):
        stop = start + strip
        product[..., start:stop, start:] = rows[..., start:stop].mT @ rows[..., start:]
        product[..., stop:, start:stop] = product[..., start:stop, stop:].mT
    return product


def second_moment(rows: Tensor, *, diagonal: bool) -> Tensor:
    """``sum x x^T`` over rows ``[n, r, p, d]``: ``[p, d, d]``, or its diagonal ``[p, d]``."""
    if diagonal:
        return rows.flatten(0, 1).square().sum(0)
    if rows.stride(-1) > 1 and rows.shape[-1] <= min(rows.shape[1], GRAM_DIM):  # images, channels first: as they lie
        images = rows.permute(0, 2, 3, 1)
        return (images @ images.mT).sum(0)
    return gram(rows.flatten(0, 1).transpose(0, 1))


def with_ones(moment: Tensor, total: Tensor, count: float) -> Tensor:
    """The moment of rows with a 1 appended, from the moment and the sum ``[p, d]`` of the rows without it."""
    if moment.dim() == 2:
        return F.pad(moment, (0, 1), value=count)
    moment = F.pad(moment, (0, 1, 0, 1), value=count)
    moment[:, :-1, -1] = moment[:, -1, :-1] = total
    return moment


def spread_examples(x: Tensor, dim: int, fraction: float) -> Tensor:
    """``fraction`` of the examples along ``dim``, rounded up and evenly spread.

    Evenly, so that parts of a batch (ranks, micro-batches) give the examples that the whole would give.
    """
    examples = x.shape[dim]
    kept = math.ceil(fraction * examples)
    if kept == examples:
        return x
    return x.index_select(dim, torch.arange(kept, device=x.device) * examples // kept)
