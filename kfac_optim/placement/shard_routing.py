"""Which layers' FSDP2 shards go to their gradient workers alone, and how whole vectors get there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from ..blocks import Block
from ..distributed import Communicator, ShardExchange, all_gathered, any_sharded, are_exchangeable, own_part
from ..scaling import Scaling, traits_of
from ..stacks import StepVectors


def exchanged_blocks(ready: Sequence[Block], scaling: Scaling | None, comm: Communicator) -> set[Block]:
    """Those of the preconditioned layers whose shards go to their gradient workers alone; others' go to every rank.

    This follows from the layout of the parameters and from the workers of their layers, so that all ranks agree.
    """
    sharded = any_sharded(p for block in ready for p in block.layer.parameters)
    if not sharded or not traits_of(scaling).by_layer:
        return set()
    workers: dict[nn.Parameter, set[tuple[int, ...]]] = {}
    for block in ready:
        for p in block.layer.parameters:
            workers.setdefault(p, set()).add(block.workers.gradient_workers)

    def is_exchanged(block: Block) -> bool:
        layer = block.layer
        some = len(block.workers.gradient_workers) < comm.world_size and not layer.is_shard
        alone = layer.bias_part == slice(None) and all(len(workers[p]) == 1 for p in layer.parameters)
        return some and alone and are_exchangeable(layer.parameters, comm)

    return {block for block in ready if is_exchanged(block)}


def gathered_vectors(
    ready: Sequence[Block], exchanged: Collection[Block], vectors: StepVectors, comm: Communicator
) -> tuple[StepVectors, ShardExchange | None]:
    """The whole vectors that this rank works on, and the exchange that sends directions back, if any (a collective)."""
    moments = vectors.moments
    if not exchanged and not any_sharded(moments):
        return vectors, None
    present = [block for block in ready if block.layer.weight in moments]
    sent = [block for block in present if block in exchanged]
    moving = {p: b.layer.is_shard for b in present if b not in exchanged for p in b.layer.parameters if p in moments}
    others = [p for p in moving if p in vectors.other_updates]
    parts = [(p, moments[p]) for p in moving] + [(p, vectors.other_updates[p]) for p in others]
    found = iter(all_gathered([own_part(part) if moving[p] else part for p, part in parts]))
    whole = {p: next(found) for p in moving}
    other_updates = {p: next(found) for p in others}
    if not sent:
        return StepVectors(whole, other_updates, vectors.lr), None
    places = {p: b.workers.gradient_workers for b in sent for p in b.layer.parameters if p in moments}
    exchange = ShardExchange(places, comm)
    own = exchange.gather(moments)
    if not vectors.are_alike(places):
        other_updates.update(exchange.gather(vectors.updates))
    return StepVectors({**whole, **own}, other_updates, vectors.lr), exchange
