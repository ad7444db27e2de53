"""The second half of a step: decompositions are applied to first moments or gradients, and the results scaled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .blocks import Block
from .common.precision import without_autocast
from .common.stopwatch import Stopwatch
from .config import Config
from .damping import is_of_largest, value_of
from .distributed import Broadcast
from .placement import Ranks, exchanged_blocks, gathered_vectors
from .scaling import scaled_by, traits_of
from .stacks import (
    Directions,
    Groups,
    Stack,
    Stacked,
    StackPreconditioner,
    StepVectors,
    cosines,
    stack_key,
    stacks_of,
)


class Preconditioner:
    """Preconditions and scales moments.

    Args:
        config: The options. Moments are preconditioned in the dtype of decompositions, but in float32 at least.
        stopwatch: Where the time is noted.
        ranks: Those that exchange directions.
    """

    def __init__(self, config: Config, stopwatch: Stopwatch, ranks: Ranks) -> None:
        self.config, self.stopwatch, self.ranks = config, stopwatch, ranks
        self.dtype = torch.promote_types(config.inv_dtype, torch.float32)
        self._of_stacks = StackPreconditioner(config.solver, self.dtype)
        self._stacks: list[Stack] = []
        self._stack_key: Any = None  # what the stacks were made of

    def directions(self, blocks: Sequence[Block], vectors: StepVectors, step: int, *, keeps_zeros: bool) -> Directions:
        """The moments, preconditioned and scaled (a collective).

        Args:
            blocks: All there are.
            vectors: The moments, with the updates and the learning rate.
            step: The step, of which damping and scaling may be functions.
            keeps_zeros: Whether the directions are zero wherever the moments are: the base optimizer leaves these
                weights alone, perhaps because the user masks their gradients.

        Returns:
            Directions of the layers that have a decomposition and a moment.
        """
        damping, scaling, comm = self.config.damping_object, self.config.scaling, self.ranks.comm
        ready = [block for block in blocks if block.has_direction]
        value = value_of(damping, step)
        exchanged = exchanged_blocks(ready, scaling, comm)
        with self.stopwatch.communication("gradient", comm.world_size) if exchanged else nullcontext():
            vectors, exchange = gathered_vectors(ready, exchanged, vectors, comm)
        moments = vectors.moments
        stacks = [part for stack in self._current_stacks(ready) for part in stack.with_moments(moments, damping)]
        self._of_stacks.select(stacks, value)
        # Where the scaling ignores a factor per pair, gamma P m serves as well as P m, and costs less. Directions that
        # are sent to other ranks have to be P m itself, which the receivers take them for.
        any_length = traits_of(scaling).of_any_length and not any(block.route for block in blocks)
        contrast = 1 + 1 / value if is_of_largest(damping) else None
        device = stacks[0].layout.device.type if stacks else "cpu"
        with self.stopwatch.stage("preconditioning"), without_autocast(device):
            found = self._of_stacks.precondition(stacks, vectors, value, contrast, any_length=any_length)
        if any(block.route for block in blocks if block not in exchanged):
            with self.stopwatch.communication("gradient", comm.world_size):
                self._send_directions(ready, exchanged, stacks, found.directions.tensors)
        with self.stopwatch.stage("scaling"), without_autocast(device):
            if keeps_zeros:
                found.directions.keep_zeros_(found.moments)
            _note_cosines(stacks, found)
            found = scaled_by(scaling, found, step)
        return Directions([stack.layout for stack in stacks], found, moments.keys(), self.dtype, exchange)

    def send_zeros(self, blocks: Sequence[Block]) -> None:
        """Takes part in the exchange of directions where this rank has none to send (a collective)."""
        if any(block.route for block in blocks):
            ready = [block for block in blocks if block.has_direction]
            self._send_directions(ready, exchanged_blocks(ready, self.config.scaling, self.ranks.comm), [], [])

    def release(self, blocks: Sequence[Block]) -> None:
        """Lets go of decompositions that are no longer in use."""
        ready = [block for block in blocks if block.has_direction]
        if self._stack_key != stack_key(ready, self.config.damping_object):
            self.clear()

    def clear(self) -> None:
        """Lets go of all decompositions."""
        self._stacks, self._stack_key = [], None
        self._of_stacks.clear()

    def _current_stacks(self, ready: Sequence[Block]) -> list[Stack]:
        """The stacks of the blocks that have decompositions, made anew when one of these has changed."""
        damping = self.config.damping_object
        current = stack_key(ready, damping)
        if current != self._stack_key:
            self.clear()
            self._stacks, self._stack_key = stacks_of(ready, damping), current
        return self._stacks

    def _send_directions(
        self,
        ready: Sequence[Block],
        exchanged: Collection[Block],
        stacks: Sequence[Stack],
        directions: Sequence[Tensor],
    ) -> None:
        """Sends preconditioned gradients from the gradient workers to the other ranks, in place.

        All ready layers travel but those that are exchanged, also layers without a gradient here: what is sent must not
        depend on what a rank has.
        """
        found: dict[Block, Tensor] = {}
        for stack, direction in zip(stacks, directions, strict=True):
            parts = stack.layout.memory_view(direction).split(stack.pair_counts)
            found.update(zip(stack.blocks, parts, strict=True))
        broadcasts = []
        for block in ready:
            if block.route is not None and block not in exchanged:
                if block not in found:  # the layer has no gradient here
                    shape, device = (block.layer.pairs, block.layer.d_out, block.layer.d_in), block.layer.weight.device
                    found[block] = torch.zeros(shape, dtype=self.dtype, device=device)
                broadcasts.append(Broadcast([found[block]], *block.route))
        self.ranks.comm.send(broadcasts, "directions")


def _note_cosines(stacks: Sequence[Stack], found: Stacked) -> None:
    """Notes the cosine between moment and direction for layers that use new decompositions."""
    for stack, d in zip(stacks, found, strict=True):
        if any(used.cosine is None for used in stack.in_use):
            groups = Groups.of(stack.pair_counts, stack.layout.device)
            for used, value in zip(stack.in_use, cosines(d.moment, d.direction, groups).unbind(), strict=True):
                used.note_cosine(value)
