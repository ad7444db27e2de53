"""How many bytes the curvature takes on a rank, by kind (:func:`kfac_optim.memory_estimate`), from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..blocks import Block
from ..config import Config
from ..placement import decomposed_bytes

__all__ = ["memory_of", "total"]

_KINDS = ("factors", "snapshots", "local sums", "decompositions", "refresh")


def memory_of(block: Block, rank: int, world_size: int, config: Config) -> dict[str, int]:
    """The bytes that a layer takes on one of ``world_size`` ranks, by kind."""
    if not block.needs_room:
        return {}
    specs, workers = block.specs, block.workers
    numbers = sum(spec.packed_numel for side, spec in enumerate(specs) if workers.keeps(side, rank))
    waits = world_size > 1 and not workers.shares_factors  # else moments are pooled at once
    stored, exact = config.factor_dtype.itemsize, torch.promote_types(config.factor_dtype, torch.float32).itemsize
    here = specs if rank in workers.gradient_workers else ()
    share = [spec for spec, worker in zip(specs, workers.inverse_workers, strict=True) if worker == rank]
    pending = numbers * stored + decomposed_bytes(share, config.solver, config.inv_dtype)
    return {
        "factors": numbers * stored,
        "snapshots": numbers * stored,
        "local sums": numbers * exact if waits else 0,
        "decompositions": decomposed_bytes(here, config.solver, config.inv_dtype),
        "refresh": pending if config.may_spread else 0,
    }


def total(layers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums over all layers, by kind, and their ``total``."""
    layers = list(layers)
    sums = {kind: sum(layer.get(kind, 0) for layer in layers) for kind in _KINDS}
    return {**sums, "total": sum(sums.values())}
