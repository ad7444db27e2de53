"""How much of a factor is kept: all of it, blocks along its diagonal, or the diagonal."""

from __future__ import annotations

from dataclasses import replace

from ..common.machines import Machine
from ..factors import FactorSpec

__all__ = ["LARGEST", "kept_of"]

# The most rows of a block, unless the user gives another number. The time of a decomposition grows with their cube, and
# blocks lose next to nothing (docs/results/rule.rst, "How large blocks are"). On a CPU, the factors of layers with 256
# inputs and of 3 x 3 kernels on 32 channels are still whole. On a GPU, many small blocks would take more launches.
LARGEST: dict[Machine, int] = {"cpu": 300, "accelerator": 8192, "meta": 8192}
# A lopsided factor has more rows than the first of these numbers, and at least so many times as many as the other one
# of its layer. It costs more than all others of a model together. A lopsided G belongs to a vocabulary: an entry of its
# diagonal is that of one row of the weight, and next to nothing is lost by the diagonal alone. A lopsided A belongs to
# pixels or features, which are correlated: blocks as large as the other factor let the layer cost what a square one
# does. The ratio exceeds 9, because the taps of a 3 x 3 kernel make inputs 9 times as large.
_LOPSIDED_DIM, _LOPSIDED_RATIO, _LEAST_BLOCK = 1024, 10, 256


def kept_of(side: str, whole: FactorSpec, other: int, limit: int | None) -> tuple[FactorSpec, str]:
    """What is kept of a factor A or G, and the reason if that is not all of it (else an empty text).

    Args:
        side: "A" or "G".
        whole: The factor; one that is diagonal by nature is kept as it is.
        other: The number of rows of the other factor of the layer.
        limit: The most rows of a block; None: no limit.
    """
    if limit is None or whole.diagonal:
        return whole, ""
    dim = whole.dim
    why = f"max_factor_dim={limit}"
    if dim > _LOPSIDED_DIM and dim >= _LOPSIDED_RATIO * other:
        why = f"{dim} is {dim // other} times {other}; max_factor_dim=None: whole"
        limit = 1 if side == "G" else min(limit, max(_LEAST_BLOCK, other))
    blocks = -(-dim // limit)
    if blocks == 1:
        return whole, ""
    if blocks == dim:
        return replace(whole, diagonal=True), f"diagonal ({why})"
    return replace(whole, blocks=blocks), f"in {blocks} blocks of {-(-dim // blocks)} ({why})"
