"""Bytes that the curvature takes on a rank, by kind, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..blocks import Block, decomposed_bytes
from ..distributed import Communicator
from ..solvers import Solver

__all__ = ["memory_of", "total"]


def memory_of(
    block: Block,
    comm: Communicator,
    solver: Solver,
    factor_dtype: torch.dtype,
    inv_dtype: torch.dtype,
    *,
    spreads: bool,
) -> dict[str, int]:
    """Bytes of a layer on this rank by kind; ``spreads``: whether refreshes may be spread over steps."""
    specs, workers = block.specs, block.workers
    numbers = sum(spec.packed_numel for spec in specs)
    stored, exact = factor_dtype.itemsize, torch.promote_types(factor_dtype, torch.float32).itemsize
    here = specs if comm.rank in workers.gradient_workers else ()
    share = [spec for spec, worker in zip(specs, workers.inverse_workers, strict=True) if worker == comm.rank]
    pending = numbers * stored + decomposed_bytes(share, solver, inv_dtype)
    return {
        "factors": numbers * stored,
        "snapshots": numbers * stored,
        "local sums": numbers * exact if comm.world_size > 1 else 0,
        "decompositions": decomposed_bytes(here, solver, inv_dtype),
        "refresh": pending if spreads else 0,
    }


def total(layers: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Over all layers by kind, and over all kinds."""
    sums = {kind: 0 for kind in ("factors", "snapshots", "local sums", "decompositions", "refresh")}
    for layer in layers:
        for kind, count in layer.items():
            sums[kind] += count
    return {**sums, "total": sum(sums.values())}
