"""Applies decompositions to gradients or first moments (eqs. 8 and 11-13), equal shapes at once, and scales them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from .blocks import Block
from .common.flat_storage import FlatStorage, Tensors, scale_pairs
from .common.machines import is_asynchronous
from .common.precision import without_autocast
from .common.rates import Scalar, common_rate
from .common.stopwatch import Stopwatch
from .damping import Damping, OfLargest, value_of
from .distributed import Broadcast, Communicator
from .placement import exchanged_blocks, gathered_vectors
from .scaling import Scaling, scaled_by, traits_of
from .solvers import EigenSolver, Solver, damps_factors
from .solvers.joint import JointEigen
from .stacks import (
    Direction,
    Directions,
    Stack,
    Steepest,
    StepVectors,
    Tile,
    cosines,
    fill_all,
    keep_zeros_,
    layer_of_pair,
    precondition,
    stack_key,
    stacks_of,
)

__all__ = ["Preconditioner"]

_MOST_NUMEL = 2**30  # numbers that are put side by side; some operations take no more than 2^31


class Preconditioner:
    """Preconditions and scales vectors.

    Args:
        solver: Made the decompositions, and applies them.
        inv_dtype: Storage of the decompositions; vectors are preconditioned in float32 at least.
        stopwatch: Where the time is noted.
    """

    def __init__(self, solver: Solver, inv_dtype: torch.dtype, stopwatch: Stopwatch) -> None:
        self.solver, self.dtype, self.stopwatch = solver, torch.promote_types(inv_dtype, torch.float32), stopwatch
        self._eigen = solver if isinstance(solver, EigenSolver) else None  # whose eqs. 11-13 are also applied in part
        self._stacks: list[Stack] = []
        self._storage: FlatStorage | None = None
        self._joint: tuple[list[list[Tile]], JointEigen] | None = None  # with the tiles that it was made of
        self._stack_key: Any = None  # versions of the decompositions that the stacks hold, and the kind of damping

    def directions(
        self,
        blocks: Sequence[Block],
        vectors: StepVectors,
        comm: Communicator,
        *,
        damping: Damping,
        scaling: Scaling | None,
        step: int,
        keeps_zeros: bool = False,
    ) -> Directions:
        """The preconditioned and scaled vectors (a collective).

        Args:
            blocks: All there are.
            vectors: What to precondition.
            comm: The ranks.
            damping: What is added to the eigenvalues.
            scaling: How long the directions are; None: as they are.
            step: The step, of which damping and scaling may be functions.
            keeps_zeros: Whether the directions are zero wherever the vectors are: the base optimizer leaves these
                weights alone, perhaps because the user masks their gradients.

        Returns:
            Directions of the layers that have a decomposition and a vector.
        """
        known = [block for block in blocks if block.has_direction]
        value = value_of(damping, step)
        exchanged = exchanged_blocks(known, scaling, comm)
        with self.stopwatch.communication("gradient", comm.world_size) if exchanged else nullcontext():
            vectors, exchange = gathered_vectors(known, exchanged, vectors, comm)
        given = vectors.given
        stacks = [part for stack in self._current_stacks(known, damping) for part in stack.with_vectors(given, damping)]
        self._select(stacks, value)
        # Where the scaling ignores a factor per pair, gamma P m serves as well as P m, and costs less. Directions that
        # are sent to other ranks have to be P m itself, which the receivers take them for.
        any_length = traits_of(scaling).of_any_length and not any(block.route for block in blocks)
        device = stacks[0].damping_unit.device.type if stacks else "cpu"
        with self.stopwatch.stage("preconditioning"), without_autocast(device):
            contrast = 1 + 1 / value if isinstance(damping, OfLargest) else None
            found = self._precondition(stacks, vectors, value, contrast, any_length=any_length)
        if any(block.route for block in blocks if block not in exchanged):
            with self.stopwatch.communication("gradient", comm.world_size):
                self._send_directions(known, exchanged, stacks, found, comm)
        with self.stopwatch.stage("scaling"), without_autocast(device):
            if keeps_zeros:
                keep_zeros_(found)
            for stack, d in zip(stacks, found, strict=True):
                _note_cosines(stack, d)
            found = scaled_by(scaling, found, step)
            return Directions([stack.layout for stack in stacks], found, given, self.dtype, exchange)

    def _select(self, stacks: Sequence[Stack], value: float) -> None:
        """Selects the parts of the decompositions that matter at a damping of ``value`` units.

        Only when the damping has crossed a quarter octave (rounding down makes a resumed run decide alike), or the
        decompositions are new. What decides is read from the device once for all stacks.
        """
        solver = self._eigen
        if solver is None or not solver.negligible:
            return
        floor = 2 ** (math.floor(4 * math.log2(value)) / 4)
        old = [s for s in stacks if s.tiles and (s.relevant is None or s.relevant[0] != floor)]
        given = [(*t.decomposed, (floor * s.damping_unit).to(self.dtype)) for s in old for t in s.tiles]
        counts = [solver.count_relevant(*of_tile) for of_tile in given]
        found = iter(torch.cat([count.to(counts[0].device) for count in counts]).tolist() if counts else ())
        lengths = [len(count) for count in counts]
        parts = (solver.relevant(*t, list(islice(found, n))) for t, n in zip(given, lengths, strict=True))
        for stack in old:
            stack.note_relevant(floor, [replace(tile, decomposed=next(parts)) for tile in stack.tiles])

    def send_zeros(self, blocks: Sequence[Block], scaling: Scaling | None, comm: Communicator) -> None:
        """Takes part in the exchange of directions where this rank has none to send (a collective)."""
        if any(block.route for block in blocks):
            known = [block for block in blocks if block.has_direction]
            self._send_directions(known, exchanged_blocks(known, scaling, comm), [], [], comm)

    def _current_stacks(self, known: Sequence[Block], damping: Damping) -> list[Stack]:
        """The stacks of the blocks that have decompositions, made anew when one of these has changed."""
        current = stack_key(known, damping)
        if current != self._stack_key:
            self.clear()
            self._stacks, self._stack_key = stacks_of(known, damping), current
        return self._stacks

    def release(self, blocks: Sequence[Block], damping: Damping) -> None:
        """Lets go of decompositions that are no longer in use."""
        known = [block for block in blocks if block.has_direction]
        if self._stack_key != stack_key(known, damping):
            self.clear()

    def clear(self) -> None:
        """Lets go of all decompositions."""
        self._stacks, self._stack_key, self._joint = [], None, None

    def _precondition(
        self,
        stacks: Sequence[Stack],
        vectors: StepVectors,
        value: float,
        contrast: float | None,
        *,
        any_length: bool,
    ) -> list[Direction]:
        """The directions of the stacks, not yet scaled (eqs. 8 and 11-13).

        Args:
            stacks: Those that have a vector.
            vectors: What to precondition.
            value: gamma, in units of the damping.
            contrast: See :class:`~kfac_optim.stacks.algebra.Steepest`.
            any_length: Whether the directions may be gamma times as long, which saves launches.
        """
        joint = self._joint_of(stacks)
        undivided = any_length and joint is not None
        gammas = torch._foreach_mul([stack.damping_unit for stack in stacks], value) if stacks and not undivided else ()
        if joint is None:
            by_stack = zip(stacks, gammas, strict=True)
            matrices = [self._precondition_stack(stack, gamma.to(self.dtype), vectors) for stack, gamma in by_stack]
        else:
            matrices = self._precondition_jointly(stacks, joint, value, gammas, vectors)
        factors: Sequence[Tensor] = ()
        if contrast and undivided:
            pairs = [len(stack.damping_unit) for stack in stacks]
            whole = torch.full((sum(pairs),), contrast, dtype=self.dtype, device=stacks[0].layout.device)
            factors = whole.split(pairs)
        elif contrast and stacks:
            found: Tensors
            if damps_factors(self.solver):
                found = [stack.largest_damped(self.solver) for stack in stacks]
            else:
                found = torch._foreach_add([stack.damping_unit for stack in stacks], list(gammas))
            factors = [largest.to(self.dtype) for largest in found]  # factors may be in more precision
        steepest = [Steepest(factor, contrast) for factor in factors] if contrast else [None] * len(stacks)
        return [
            Direction(
                *of_stack,
                self._rate(stack, vectors),
                stack.layer_of_pair,
                stack.pairs_per_layer,
                steepest=of_steepest,
                storage=self._storage,
            )
            for stack, of_stack, of_steepest in zip(stacks, matrices, steepest, strict=True)
        ]

    def _precondition_jointly(
        self,
        stacks: Sequence[Stack],
        joint: JointEigen,
        value: float,
        gammas: Sequence[Tensor],
        vectors: StepVectors,
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The preconditioned matrices of each stack (eqs. 8 and 11-13), what was preconditioned, and the updates.

        They lie side by side. Without ``gammas``, ``[p]`` for each stack, they are gamma times as long.
        """
        assert self._storage is not None
        layouts = [stack.layout for stack in stacks]
        gradients, directions = (self._storage.empty(self.dtype) for _ in range(2))
        fill_all(layouts, vectors.given, gradients)
        joint.precondition(gradients, value, directions)
        if gammas:
            by = torch._foreach_reciprocal([gamma.to(self.dtype) for gamma in gammas])
            scale_pairs(directions, by, self._storage, out=directions)
        filled = gradients
        if not all(vectors.are_alike(layout.parameters) for layout in layouts):
            filled = self._storage.empty(self.dtype)
            fill_all(layouts, vectors.updates, filled)
        return list(zip(directions, gradients, filled, strict=True))

    def _joint_of(self, stacks: Sequence[Stack]) -> JointEigen | None:
        """The decompositions of all stacks together, where launches count; then their matrices lie side by side."""
        tiles = [stack.current_tiles for stack in stacks]
        if self._eigen is None or not self._can_join(stacks, tiles):
            self._storage = self._joint = None
            return None
        if self._storage is None or self._joint is None or list(map(id, self._joint[0])) != list(map(id, tiles)):
            shapes, groups = [stack.layout.shape for stack in stacks], [stack.groups for stack in stacks]
            known, device = self._storage, stacks[0].layout.device
            if known is None or (known.shapes, known.groups, known.device) != (shapes, groups, device):
                self._storage = FlatStorage(shapes, groups, device)
            units = [stack.damping_unit.to(self.dtype) for stack in stacks]
            self._joint = tiles, JointEigen([of_stack[0].decomposed for of_stack in tiles], units)
        return self._joint[1]

    def _can_join(self, stacks: Sequence[Stack], tiles: Sequence[Sequence[Tile]]) -> bool:
        """Whether launches count, and the stacks are few numbers of one device and type, of one tile each."""
        devices = {stack.layout.device for stack in stacks}
        if len(stacks) < 2 or len(devices) > 1 or not is_asynchronous(*devices):
            return False
        if sum(math.prod(stack.layout.shape) for stack in stacks) > _MOST_NUMEL or any(len(of) != 1 for of in tiles):
            return False
        return all(part.dtype == self.dtype for (tile,) in tiles for side in tile.decomposed for part in side)

    def _precondition_stack(self, stack: Stack, gamma: Tensor, vectors: StepVectors) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`_precondition_jointly`, for one stack whose matrices have storage of their own."""
        gradient = stack.layout.fill(vectors.given, self.dtype)
        if stack.tiles:
            direction = precondition(self.solver, gradient, stack.current_tiles, gamma)
        else:  # buffer for the direction that a gradient worker will send
            direction = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        if vectors.are_alike(stack.layout.parameters):
            return direction, gradient, gradient
        return direction, gradient, stack.layout.fill(vectors.updates, self.dtype)

    def _rate(self, stack: Stack, vectors: StepVectors) -> Scalar:
        """The learning rate of a stack; where weights and biases have different ones a tensor of the stack's shape."""
        lr, given = vectors.lr, vectors.given
        if not isinstance(lr, Mapping):
            return lr
        moved = [p for layer in stack.layers for p in layer.parameters if p in given]
        rate = common_rate([lr[p] for p in moved])
        if rate is None:
            return stack.layout.fill({p: torch.ones_like(given[p]) * lr[p] for p in moved}, self.dtype)
        return rate

    def _send_directions(
        self,
        known: Sequence[Block],
        exchanged: Collection[Block],
        stacks: Sequence[Stack],
        directions: Sequence[Direction],
        comm: Communicator,
    ) -> None:
        """Sends preconditioned gradients from the gradient workers to the other ranks, in place.

        All known layers travel but those that are exchanged, also layers without a gradient here: what is sent must not
        depend on what a rank has.
        """
        found = {
            block: part
            for stack, d in zip(stacks, directions, strict=True)
            for block, part in zip(stack.blocks, d.direction.split(stack.pair_counts), strict=True)
        }
        broadcasts = []
        for block in known:
            if block.route is None or block in exchanged:
                continue
            if block in found:
                tensor = found[block]
            else:
                layer = block.layer
                shape = (layer.pairs, layer.d_out, layer.d_in)
                tensor = torch.zeros(shape, dtype=self.dtype, device=layer.weight.device)
            broadcasts.append(Broadcast([tensor], *block.route))
        comm.send(broadcasts, "directions")


def _note_cosines(stack: Stack, d: Direction) -> None:
    if all(block.cosine is not None for block in stack.blocks):
        return
    found = cosines(d.gradient, d.direction, layer_of_pair(stack.blocks), len(stack.blocks))
    for block, value in zip(stack.blocks, found.unbind(), strict=True):
        block.note_cosine(value)
