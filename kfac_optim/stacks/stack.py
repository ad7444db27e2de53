"""Stacks: layers of one shape that are preconditioned as one, with their decompositions side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import Block, InUse
from ..common.flat_storage import are_adjacent
from ..common.grouping import grouped_by_key
from ..common.machines import is_asynchronous, machine_of
from ..damping import Damping, kind_of
from ..factors import FactorSpec
from ..solvers import Decomposition, Shifting, Sides
from .layout import Layout
from .matrices import storage_order
from .pairs import Groups

# The most numbers in the gradients and decompositions of a stack, which are copied to lie side by side (64 MiB in
# float32; 1 GiB on accelerators, where launches count). Larger stacks gain nothing on a CPU. On accelerators each stack
# costs a dozen launches in a step, and large ones hardly add to the memory of a refresh (docs/results/costs.rst).
_STACK_NUMEL = {"cpu": 2**24, "accelerator": 2**28, "meta": 2**28}


@dataclass
class Stack:
    """Layers of one shape, preconditioned as one.

    Attributes:
        blocks: The layers' blocks.
        in_use: What each of them has in use; the stack is made anew when that changes.
        decomposed: The decompositions of A and of G of all layers, one after the other; None if only other ranks
            precondition these layers.
        damping_unit: What gamma is a multiple of, for each pair, ``[p]``.
        groups: Which pairs are scaled together; None: each is scaled on its own.
        relevant: A damping, and the parts of the decompositions that matter at it; None: not computed.
        layout: Where the parameters lie in the stack's matrices.
        singles: Stacks of a single block, for steps in which other layers of the stack have no moment.
    """

    blocks: list[Block]
    in_use: list[InUse]
    decomposed: Sides | None
    damping_unit: Tensor
    groups: Groups | None
    relevant: tuple[float, Sides] | None = None
    layout: Layout = field(init=False)
    singles: dict[Block, Stack] = field(default_factory=dict)
    _largest_damped: Tensor | None = None

    def __post_init__(self) -> None:
        self.layout = Layout([block.layer for block in self.blocks])

    @property
    def pair_counts(self) -> list[int]:
        """The number of pairs of each layer."""
        return [block.layer.pairs for block in self.blocks]

    @property
    def specs(self) -> tuple[FactorSpec, FactorSpec]:
        """The shapes of A and G."""
        return self.blocks[0].specs

    @property
    def applied(self) -> Sides | None:
        """The decompositions, or the relevant parts of them if these are known."""
        return self.decomposed if self.relevant is None else self.relevant[1]

    def with_moments(self, moments: Mapping[nn.Parameter, Tensor], damping: Damping) -> list[Stack]:
        """The stack if all of its layers have a moment in this step, else a stack for each layer that has one.

        Those are kept, because a layer without a moment seldom has one in the next step. Their decompositions are views
        of this stack's.
        """
        present = [block for block in self.blocks if block.layer.weight in moments]
        if len(present) == len(self.blocks):
            return [self]
        new = [block for block in present if block not in self.singles]
        self.singles.update({block: stack_of([block], damping, block.in_use.sides) for block in new if block.in_use})
        return [self.singles[block] for block in present]

    def largest_damped(self, solver: Shifting) -> Tensor:
        """The product of the largest eigenvalues of the damped A and the damped G that a solver inverts, ``[p]``."""
        if self._largest_damped is None:
            found = []
            for used in self.in_use:
                (a, g), (of_a, of_g) = used.largest(), used.shifts(solver, used.snapshot["gamma"])
                found.append((a + of_a) * (g + of_g))
            self._largest_damped = _cat(found)
        return self._largest_damped

    def note_relevant(self, value: float, parts: Sides) -> None:
        """Notes the parts of the decompositions that matter at a damping of ``value`` units."""
        self.relevant = value, parts


def stacks_of(blocks: Sequence[Block], damping: Damping) -> list[Stack]:
    """Stacks layers of one shape; their decompositions move into the stack and become views of it.

    All ranks make the same stacks, whatever they hold: otherwise their sums would differ in the last bits.
    """

    def kind(block: Block) -> tuple[Any, ...]:
        layer = block.layer
        kept = [(spec.dim, spec.diagonal, spec.blocks) for spec in block.specs]
        form = (layer.pairs_share_scale, layer.stored_transposed, layer.weight.device)
        return (*kept, *form, block.workers.gradient_workers)

    def size(block: Block) -> int:
        layer = block.layer
        return layer.pairs * layer.d_out * layer.d_in + sum(math.prod(spec.shape) for spec in block.specs)

    limit = max((_STACK_NUMEL[machine_of(block.layer.weight.device)] for block in blocks), default=0)
    groups = grouped_by_key(blocks, kind, size, limit)
    stacks = [stack_of(group, damping, _moved_together(group)) for group in groups]
    if any(is_asynchronous(stack.layout.device) for stack in stacks):
        stacks.sort(key=lambda stack: storage_order(stack.layout.shape, stack.groups))
    return stacks


def stack_of(blocks: list[Block], damping: Damping, decomposed: Sides | None) -> Stack:
    """A stack of blocks of one shape, whose decompositions these are."""
    groups = None
    if blocks[0].layer.pairs_share_scale:
        groups = Groups.of([block.layer.pairs for block in blocks], blocks[0].layer.weight.device)
    in_use = _in_use(blocks)
    return Stack(blocks, in_use, decomposed, _cat([used.damping_unit(damping) for used in in_use]), groups)


def _in_use(blocks: Sequence[Block]) -> list[InUse]:
    return [block.in_use for block in blocks if block.in_use is not None]


def _moved_together(blocks: Sequence[Block]) -> Sides | None:
    """Moves the decompositions of blocks of one shape, if they have any, into a stack; theirs become views of it."""
    in_use = _in_use(blocks)
    decomposed = [used.sides for used in in_use if used.sides is not None]
    if not decomposed:
        return None
    (a, of_a), (g, of_g) = (_joined(of_side) for of_side in zip(*decomposed, strict=True))
    for used, own_a, own_g in zip(in_use, of_a, of_g, strict=True):
        used.share_storage((own_a, own_g))
    return a, g


def _joined(several: Sequence[Decomposition]) -> tuple[Decomposition, Sequence[Decomposition]]:
    """Decompositions of one shape, one after the other, and each of them as views of the whole."""
    whole = tuple(_cat(parts) for parts in zip(*several, strict=True))
    lengths = [len(parts[0]) for parts in several]
    return whole, list(zip(*(part.split(lengths) for part in whole), strict=True))


def stack_key(blocks: Sequence[Block], damping: Damping) -> Any:
    """A key that changes when the stacks must be rebuilt: the kind of damping, and the decompositions in use."""
    return kind_of(damping), [(block, block.in_use) for block in blocks]


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates along the first dimension.

    Returns a view if the tensors fill one storage exactly, as the factors of this stack do after they were decomposed
    as one batch. A view of part of a storage would keep the rest of it alive.
    """
    first = tensors[0]
    if are_adjacent(tensors) and sum(tensor.nbytes for tensor in tensors) == first.untyped_storage().nbytes():
        return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())
    return torch.cat(list(tensors))
