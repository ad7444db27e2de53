"""How much of a factor is kept: all of it, blocks along its diagonal, or the diagonal."""

from __future__ import annotations

from dataclasses import replace

from ..factors import FactorSpec

__all__ = ["LARGEST", "kept_of"]

# The rows of a block, unless the user says how many. A core of a CPU decomposes 2,100 rows, 2,048 and a bias, in less
# than a second; of 8,192 it would take 64 times as long.
LARGEST = {"cpu": 2100, "cuda": 8192}
# A factor of so many rows, so many times as large as the other one of its layer, costs more than all others of a model
# together. Among outputs these are vocabularies: an entry of G belongs to one row of the weight, and next to nothing is
# lost by its diagonal. Inputs are pixels or features, which are correlated: their blocks are as large as the other
# factor, so that the layer costs what a square one does. The taps of a 3 x 3 kernel make inputs 9 times as large.
_LOPSIDED_DIM, _LOPSIDED_RATIO, _LEAST_BLOCK = 1024, 10, 256


def kept_of(side: str, whole: FactorSpec, other: int, limit: int | None) -> tuple[FactorSpec, str]:
    """What is kept of a factor A or G, and why, if that is not all of it.

    Args:
        side: "A" or "G".
        whole: The factor; one that is diagonal by nature is kept as it is.
        other: The rows of the other factor of the layer.
        limit: The most rows of a block; None: no limit.
    """
    if limit is None or whole.diagonal:
        return whole, ""
    dim = whole.dim
    why = f"{dim} > max_factor_dim={limit}"
    if dim > _LOPSIDED_DIM and dim >= _LOPSIDED_RATIO * other:
        why = f"{dim} is {dim // other} times {other} (max_factor_dim=None: whole)"
        limit = 1 if side == "G" else min(limit, max(_LEAST_BLOCK, other))
    blocks = -(-dim // limit)
    if blocks == 1:
        return whole, ""
    if blocks == dim:
        return replace(whole, diagonal=True), f"diagonal: {why}"
    return replace(whole, blocks=blocks), f"block-diagonal, {blocks} blocks of {-(-dim // blocks)}: {why}"
