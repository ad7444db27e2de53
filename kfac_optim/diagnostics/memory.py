"""How many bytes the curvature takes on a rank, by kind (:func:`kfac_optim.memory_estimate`), from shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..blocks import Block
from ..common.checks import is_int, require_number
from ..config import Config, engine_options, refuse_unknown
from ..distributed import AssignmentStrategy, LocalCommunicator
from ..placement import decomposed_bytes
from ..stages import Stages

_KINDS = ("factors", "snapshots", "local sums", "decompositions", "refresh")


def memory_of(stages: Stages, block: Block, rank: int) -> dict[str, int]:
    """The bytes that a layer takes on a rank, by kind."""
    config = stages.config
    if not block.needs_storage:
        return {}
    specs, workers = block.specs, block.workers
    numbers = sum(spec.packed_numel for side, spec in enumerate(specs) if workers.keeps(side, rank))
    waits = stages.comm.world_size > 1 and not workers.shares_factors  # else moments are pooled at once
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


def memory_on(stages: Stages, rank: int) -> dict[str, int]:
    """The bytes on a rank, by kind, and their ``total``."""
    layers = [memory_of(stages, block, rank) for block in stages.blocks]
    sums = {kind: sum(layer.get(kind, 0) for layer in layers) for kind in _KINDS}
    return {**sums, "total": sum(sums.values())}


def memory_estimate(
    model: nn.Module, *, world_size: int = 1, assignment: AssignmentStrategy | str = "factor-wise", **more: Any
) -> dict[str, int]:
    """Estimates, before training, how many bytes the curvature takes on the rank that needs most.

    Args:
        model: The module, on the device on which it is to train, or on the meta device in place of a GPU. On a CPU
            factors are kept in smaller blocks (``max_factor_dim``). For :class:`~kfac_optim.KFAC` add its default,
            ``max_factor_dim=2100``.
        world_size: Number of processes.
        assignment: As for the optimizers.
        **more: Any other keyword of :class:`~kfac_optim.CurvatureEngine` that matters to memory, such as ``params``.

    Returns:
        Bytes by kind; the kinds are ``factors`` (running averages), ``snapshots`` (the factors that the decompositions
        in use were made of), ``local sums`` (what a rank has seen since the ranks last pooled their factors; none for
        factors that one rank alone keeps, which are pooled at once), ``decompositions`` (on the ranks that precondition
        the layer), ``refresh`` (if it is spread over steps: its snapshot, and the decompositions that the rank makes),
        and their ``total``. On statistics steps one more copy of the factors is held for a while. Layers whose weight
        is frozen take nothing.
        The entries that an optimizer keeps to learn trust, as by default, are not counted: three numbers for each
        weight of a layer, or four if its base class keeps no first moment, or one that contains weight decay.

    Raises:
        TypeError: If a keyword is unknown or of the wrong kind.
        ValueError: If a value is out of range, or the strategy does not fit the number of processes.
    """
    require_number("world_size", world_size, "an int >= 1", lambda n: is_int(n) and n >= 1)
    params = more.pop("params", None)
    refuse_unknown("memory_estimate", more, list(engine_options()))
    config = Config(**dict(more, assignment=assignment), communicator=LocalCommunicator(0, world_size))
    with torch.no_grad():
        stages = Stages(config, model, params)
    stages.close()
    ranks = [memory_on(stages, rank) for rank in range(world_size)]
    return max(ranks, key=lambda kinds: kinds["total"])
