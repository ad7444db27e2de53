"""From vectors and decompositions to directions (eqs. 8 and 11-13), layers of one shape together, and their scaling."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Block
from .damping import Damping, kind_of, value_of
from .diagnostics import StageTimes, communicating, cosines
from .directions import Directions, StackedDirection
from .distributed import Broadcast, Communicator, ShardExchange, are_exchangeable, gathered, may_be_sharded
from .layers import KroneckerLayer
from .layout import Layout
from .precision import without_autocast
from .scaling import Direction, Scaling
from .solvers import Decomposition, Solver, Truncating, grouped_by_key
from .tiles import Tile, precondition, tiles_of

__all__ = ["Lr", "Preconditioner", "Stack", "common_rate", "stack_of"]

Lr = float | Tensor

# Layers of one shape are preconditioned together up to this many numbers in their gradients and decompositions (64 MiB
# in float32, 1 GiB where launches count), which are copied to lie side by side. Larger ones gain nothing on a CPU. On
# accelerators each stack costs a dozen launches in a step, and a refresh hardly needs more memory (docs/results.rst).
_STACK_NUMEL = {"cpu": 2**24, "accelerator": 2**28}


@dataclass
class Stack:
    """Layers of one shape, preconditioned as one.

    Attributes:
        blocks: The layers' blocks.
        decomposed: The decompositions of A and G; None where another rank preconditions.
        damping_unit: What gamma is a multiple of, for each pair, ``[p]``.
        layer_of_pair: See :class:`~kfac_optim.scaling.Direction`.
        tiles: The parts of the stack's matrices, each with decompositions of one block of A and of one of G.
        relevant: A damping, and the tiles with what matters of their decompositions at it; None: not yet computed.
        layout: Where the parameters lie in the stack's matrices.
        singles: Stacks of single blocks, of steps in which others of the stack have no vector.
    """

    blocks: list[Block]
    decomposed: tuple[Decomposition, Decomposition] | None
    damping_unit: Tensor
    layer_of_pair: Tensor | None
    tiles: list[Tile] = field(init=False)
    relevant: tuple[float, list[Tile]] | None = None
    layout: Layout = field(init=False)
    singles: dict[Block, Stack] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = Layout(self.layers)
        self.tiles = [] if self.decomposed is None else tiles_of(self.decomposed, self.blocks[0].specs)

    @property
    def layers(self) -> list[KroneckerLayer]:
        """The layers."""
        return [block.layer for block in self.blocks]

    @property
    def pairs_per_layer(self) -> list[int]:
        """The number of pairs of each layer."""
        return [block.layer.pairs for block in self.blocks]

    @property
    def scaled_together(self) -> list[int]:
        """The same of layers whose pairs are scaled together; none of others."""
        return [] if self.layer_of_pair is None else self.pairs_per_layer

    def single(self, block: Block, damping: Damping) -> Stack:
        """One of the blocks on its own; kept, because a layer without a vector seldom has one in the next step."""
        if block not in self.singles:
            self.singles[block] = stack_of([block], damping)
        return self.singles[block]

    def keep(self, value: float, tiles: list[Tile]) -> None:
        """Notes what matters of the tiles' decompositions at a damping of ``value`` units."""
        self.relevant = value, tiles


class Preconditioner:
    """Preconditions and scales vectors.

    Args:
        solver: That of the decompositions.
        inv_dtype: Storage of the decompositions; vectors are preconditioned in float32 at least.
        stages: Where the time is noted.
    """

    def __init__(self, solver: Solver, inv_dtype: torch.dtype, stages: StageTimes) -> None:
        self.solver, self.dtype, self.stages = solver, torch.promote_types(inv_dtype, torch.float32), stages
        self._stacks: list[Stack] = []
        self._truncating = solver if isinstance(solver, Truncating) else None  # the check takes long for a step
        self._made_of: Any = None  # versions of the decompositions that the stacks hold, and the kind of damping

    def directions(
        self,
        blocks: Sequence[Block],
        vectors: Mapping[nn.Parameter, Tensor],
        lr: Lr | Mapping[nn.Parameter, Lr],
        updates: Mapping[nn.Parameter, Tensor],
        comm: Communicator,
        *,
        damping: Damping,
        scaling: Scaling | None,
        step: int,
    ) -> Directions:
        """The preconditioned and scaled vectors (a collective).

        Args:
            blocks: All there are.
            vectors: What to precondition, by parameter.
            lr: The current learning rate, for the scaling; by parameter where there are several.
            updates: What the base optimizer itself would do with the vectors, per unit of the learning rate.
            comm: The ranks.
            damping: What is added to the eigenvalues.
            scaling: How long the directions are; None: as they are.
            step: The step, of which damping and scaling may be functions.

        Returns:
            Directions of the layers that have a decomposition and a vector.
        """
        known = [block for block in blocks if block.has_direction]
        value = value_of(damping, step)
        exchanged = _exchanged(known, scaling, comm)
        with communicating("gradient", self.stages, comm.world_size) if exchanged else nullcontext():
            vectors, updates, exchange = _gathered(known, exchanged, vectors, updates, comm)
        stacks = [part for stack in self._current(known, damping) for part in _with_vectors(stack, vectors, damping)]
        device = stacks[0].damping_unit.device.type if stacks else "cpu"
        self._select(stacks, value)
        with self.stages.stage("preconditioning"), without_autocast(device):
            gammas = torch._foreach_mul([stack.damping_unit for stack in stacks], value) if stacks else ()
            found = [
                self._direction(stack, vectors, lr, updates, gamma.to(self.dtype))
                for stack, gamma in zip(stacks, gammas, strict=True)
            ]
        if any(block.route for block in blocks if block not in exchanged):
            with communicating("gradient", self.stages, comm.world_size):
                self._send_directions([block for block in known if block not in exchanged], stacks, found, comm)
        with self.stages.stage("scaling"):
            for stack, d in zip(stacks, found, strict=True):
                _note_cosines(stack, d)
            if scaling is not None:
                multipliers = scaling.multipliers(found, step)
                found = [d.times(by) for d, by in zip(found, multipliers, strict=True)]
            scaled = [StackedDirection(stack.layout, vectors, d) for stack, d in zip(stacks, found, strict=True)]
            return Directions(scaled, self.dtype, exchange)

    def _select(self, stacks: Sequence[Stack], value: float) -> None:
        """Selects the parts of the decompositions that matter at a damping of ``value`` units.

        Only when the damping has crossed a quarter octave (rounding down makes a resumed run decide alike), or the
        decompositions are new. What decides is read from the device once for all stacks.
        """
        solver = self._truncating
        if solver is None:
            return
        floor = 2 ** (math.floor(4 * math.log2(value)) / 4)
        old = [s for s in stacks if s.decomposed is not None and (s.relevant is None or s.relevant[0] != floor)]
        given = [(*t.decomposed, (floor * s.damping_unit).to(self.dtype)) for s in old for t in s.tiles]
        counts = [solver.count_relevant(*of_tile) for of_tile in given]
        found = iter(torch.cat([count.to(counts[0].device) for count in counts]).tolist() if counts else ())
        lengths = [len(count) for count in counts]
        parts = (solver.relevant(*t, list(islice(found, n))) for t, n in zip(given, lengths, strict=True))
        for stack in old:
            stack.keep(floor, [tile.with_parts(next(parts)) for tile in stack.tiles])

    def send_zeros(self, blocks: Sequence[Block], scaling: Scaling | None, comm: Communicator) -> None:
        """Takes part in the exchange of directions where this rank has none to send (a collective)."""
        if not any(block.route for block in blocks):
            return
        known = [block for block in blocks if block.has_direction]
        exchanged = _exchanged(known, scaling, comm)
        if any(block.route for block in blocks if block not in exchanged):
            self._send_directions([block for block in known if block not in exchanged], [], [], comm)

    def _current(self, known: Sequence[Block], damping: Damping) -> list[Stack]:
        """The stacks of the blocks that have decompositions, made anew when one of these has changed."""
        made_of = _made_of(known, damping)
        if made_of != self._made_of:
            self._stacks, self._made_of = _stacks_of(known, damping), made_of
        return self._stacks

    def release(self, blocks: Sequence[Block], damping: Damping) -> None:
        """Lets go of decompositions that are no longer in use."""
        known = [block for block in blocks if block.has_direction]
        if self._made_of != _made_of(known, damping):
            self.clear()

    def clear(self) -> None:
        """Lets go of all decompositions."""
        self._stacks, self._made_of = [], None

    def _direction(
        self,
        stack: Stack,
        vectors: Mapping[nn.Parameter, Tensor],
        lr: Lr | Mapping[nn.Parameter, Lr],
        updates: Mapping[nn.Parameter, Tensor],
        gamma: Tensor,
    ) -> Direction:
        """The preconditioned gradient of a stack (eqs. 8 and 11-13); ``gamma``: the damping of its pairs, ``[p]``."""
        gradient = stack.layout.fill(vectors, self.dtype)
        if stack.decomposed is not None:
            tiles = stack.tiles if stack.relevant is None else stack.relevant[1]
            direction = precondition(self.solver, gradient, tiles, gamma)
        else:  # buffer for the direction that a gradient worker will send
            direction = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        update = gradient if updates[stack.layers[0].weight] is vectors[stack.layers[0].weight] else None
        if update is None:
            update = stack.layout.fill(updates, self.dtype)
        if not isinstance(lr, Mapping):
            return Direction(direction, gradient, update, lr, stack.layer_of_pair, stack.scaled_together)
        moved = [p for layer in stack.layers for p in layer.parameters if p in vectors]
        rate = common_rate([lr[p] for p in moved])
        if rate is None:
            rate = stack.layout.fill({p: torch.ones_like(vectors[p]) * lr[p] for p in moved}, self.dtype)
        return Direction(direction, gradient, update, rate, stack.layer_of_pair, stack.scaled_together)

    def _send_directions(
        self, blocks: Sequence[Block], stacks: Sequence[Stack], directions: Sequence[Direction], comm: Communicator
    ) -> None:
        """Sends preconditioned gradients from the gradient workers to the other ranks, in place.

        All known layers travel, also those without a gradient here: what is sent must not depend on what a rank has.
        """
        found = {
            block: part
            for stack, d in zip(stacks, directions, strict=True)
            for block, part in zip(stack.blocks, d.direction.split(stack.pairs_per_layer), strict=True)
        }
        broadcasts = []
        for block in blocks:
            if block.route is None:
                continue
            if block in found:
                tensor = found[block]
            else:
                layer = block.layer
                shape = (layer.pairs, layer.d_out, layer.d_in)
                tensor = torch.zeros(shape, dtype=self.dtype, device=layer.weight.device)
            broadcasts.append(Broadcast([tensor], *block.route))
        comm.send(broadcasts, "directions")


# Shards --------------------------------------------------------------------------------------------------------------


def _exchanged(known: Sequence[Block], scaling: Scaling | None, comm: Communicator) -> set[Block]:
    """The layers whose shards go to their gradient workers alone; those of others are gathered on every rank.

    That follows from how the parameters are laid out and from who works for them, so all ranks find the same.
    """
    if not may_be_sharded() or not getattr(scaling, "by_layer", scaling is None):
        return set()
    workers: dict[nn.Parameter, set[tuple[int, ...]]] = {}
    for block in known:
        for p in block.layer.parameters:
            workers.setdefault(p, set()).add(block.workers.gradient_workers)

    def is_exchanged(block: Block) -> bool:
        layer = block.layer
        some = len(block.workers.gradient_workers) < comm.world_size and not layer.is_shard
        alone = layer.bias_part == slice(None) and all(len(workers[p]) == 1 for p in layer.parameters)
        return some and alone and are_exchangeable(layer.parameters, comm)

    return {block for block in known if is_exchanged(block)}


def _gathered(
    known: Sequence[Block],
    exchanged: Collection[Block],
    vectors: Mapping[nn.Parameter, Tensor],
    updates: Mapping[nn.Parameter, Tensor],
    comm: Communicator,
) -> tuple[Mapping[nn.Parameter, Tensor], Mapping[nn.Parameter, Tensor], ShardExchange | None]:
    """Whole vectors and updates of what this rank works on, and how the others' get there (a collective)."""
    if not may_be_sharded():
        return vectors, updates, None
    present = [block for block in known if block.layer.weight in vectors]
    sent = [block for block in present if block in exchanged]
    moving = {p: b.layer.is_shard for b in present if b not in exchanged for p in b.layer.parameters if p in vectors}
    whole = {p: gathered(vectors[p], shard=shard) for p, shard in moving.items()}
    same = {p for p in moving if updates[p] is vectors[p]}
    of_updates = {p: whole[p] if p in same else gathered(updates[p], shard=shard) for p, shard in moving.items()}
    if not sent:
        return whole, of_updates, None
    places = {p: b.workers.gradient_workers for b in sent for p in b.layer.parameters if p in vectors}
    exchange = ShardExchange(places, comm)
    own = exchange.gather(vectors)
    alike = all(updates[p] is vectors[p] for p in places)
    return {**whole, **own}, {**of_updates, **(own if alike else exchange.gather(updates))}, exchange


# Stacks --------------------------------------------------------------------------------------------------------------


def _stacks_of(blocks: Sequence[Block], damping: Damping) -> list[Stack]:
    """Layers of one shape together; their decompositions move into the stack and become views of it.

    All ranks make the same stacks, whatever they hold, or their sums would differ in the last bits.
    """

    def kind(block: Block) -> tuple[Any, ...]:
        layer = block.layer
        shape = (layer.d_out, layer.d_in, layer.diagonal, layer.blocks, layer.joint, layer.weight.device)
        return (*shape, block.workers.gradient_workers)

    def size(block: Block) -> int:
        layer = block.layer
        return layer.pairs * layer.d_out * layer.d_in + sum(math.prod(spec.shape) for spec in block.specs)

    limit = _STACK_NUMEL["cpu" if all(b.layer.weight.device.type == "cpu" for b in blocks) else "accelerator"]
    return [stack_of(group, damping) for group in grouped_by_key(blocks, kind, size, limit)]


def stack_of(blocks: list[Block], damping: Damping) -> Stack:
    """Stacks blocks of one shape. Side effect: their decompositions become views of the stack."""
    layer_of_pair = _layer_of_pair(blocks) if blocks[0].layer.joint else None
    damping_unit = _cat([block.damping_unit(damping) for block in blocks])
    decomposed = [block.decomposed for block in blocks if block.decomposed is not None]
    if not decomposed:
        return Stack(blocks, None, damping_unit, layer_of_pair)
    whole = [tuple(_cat(parts) for parts in zip(*side, strict=True)) for side in zip(*decomposed, strict=True)]
    stack = Stack(blocks, (whole[0], whole[1]), damping_unit, layer_of_pair)
    sizes = ([block.specs[side].matrices for block in blocks] for side in range(2))
    views = [zip(*(part.split(n) for part in side), strict=True) for side, n in zip(whole, sizes, strict=True)]
    for block, in_a, in_g in zip(blocks, *views, strict=True):
        block.share_storage((in_a, in_g))
    return stack


def _made_of(known: Sequence[Block], damping: Damping) -> Any:
    """What stacks of these blocks depend on: the kind of damping, and versions of the decompositions."""
    return kind_of(damping), [(block, block.version) for block in known]


def _with_vectors(stack: Stack, vectors: Mapping[nn.Parameter, Tensor], damping: Damping) -> list[Stack]:
    """The stack if all of its layers have a vector in this step, else those that have one, each on its own."""
    present = [block for block in stack.blocks if block.layer.weight in vectors]
    return [stack] if len(present) == len(stack.blocks) else [stack.single(block, damping) for block in present]


def _note_cosines(stack: Stack, d: Direction) -> None:
    if all(block.cosine is not None for block in stack.blocks):
        return
    found = cosines(d.gradient, d.direction, _layer_of_pair(stack.blocks), len(stack.blocks))
    for block, value in zip(stack.blocks, found.unbind(), strict=True):
        block.note_cosine(value)


def _layer_of_pair(blocks: Sequence[Block]) -> Tensor:
    """For each pair of some blocks the number of the block that it belongs to, ``[p]``."""
    pairs = torch.tensor([block.layer.pairs for block in blocks])
    # Repeated on the CPU: to know the length of the result, torch would wait for a device.
    return torch.arange(len(blocks)).repeat_interleave(pairs).to(blocks[0].layer.weight.device, non_blocking=True)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other along the first dimension.

    Not copied where they are all that their storage has, as where a batch of factors was decomposed for this stack. A
    part of a storage would keep the rest of it alive.
    """
    first, storage = tensors[0], tensors[0].untyped_storage()
    starts = accumulate((tensor.numel() for tensor in tensors), initial=0)
    places = [(tensor.untyped_storage()._cdata, tensor.storage_offset()) for tensor in tensors]
    adjacent = first.is_contiguous() and all(
        at == (storage._cdata, start) for at, start in zip(places, starts, strict=False)
    )
    if adjacent and sum(tensor.nbytes for tensor in tensors) == storage.nbytes():
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    return torch.cat(list(tensors))


def common_rate(rates: Sequence[Lr]) -> Lr | None:
    """The one learning rate that all of these are; None: there are several, or only the device knows."""
    first = rates[0]
    known = not isinstance(first, Tensor)  # to compare a tensor would be to wait for its device
    same = all(rate is first or known and not isinstance(rate, Tensor) and rate == first for rate in rates)
    return first if same else None
