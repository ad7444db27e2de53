"""What is known of one layer: its block of the Fisher matrix, ``A (x) G``, and the damping of that block.

gamma = damping,  or  damping * mean eigenvalue(A (x) G)  if it is relative                  (gamma of eqs. 9-13)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .distributed import Assignment, AssignmentStrategy, Communicator, LayerAssignment, LayerCost
from .factors import FactorSpec, snapshot_
from .layers import KroneckerLayer
from .solvers import Decomposition, Solver

__all__ = ["SIDES", "Block", "assign", "decomposed_bytes", "gamma_of", "groups_of", "part_dtype", "specs_of"]

SIDES = ("A", "G")


@dataclass(eq=False, repr=False)
class Block:
    """One layer's block, and who works on it.

    Attributes:
        layer: The layer.
        specs: The shapes of A and G.
        workers: The ranks that decompose its factors, and those that precondition its gradient.
        route: How its preconditioned gradient comes to this rank, or leaves it: source and members; None if it doesn't
            travel.
        average: Its state. Running averages "A" and "G"; "A_last" and "G_last", of which the decompositions in use were
            made, with their "damping"; "A_next" and "G_next", of which a refresh in progress makes new ones; with an
            iterated solver "A_basis" and "G_basis", the decompositions in use. Empty before the first step.
        decomposed: The decompositions of A and G in use; None on ranks that do not precondition.
        means: The mean eigenvalues that belong to them, ``[p]`` each; not None on any rank once there are some.
        cosine: Between gradient and direction in the first step that used them, 0-dim.
        spectra: Eigenvalues of the factors that they were made of, once asked for.
    """

    layer: KroneckerLayer
    specs: tuple[FactorSpec, FactorSpec]
    workers: LayerAssignment = field(init=False)
    route: tuple[int, tuple[int, ...]] | None = None
    average: dict[str, Any] = field(default_factory=dict)
    decomposed: tuple[Decomposition, Decomposition] | None = None
    means: tuple[Tensor, Tensor] | None = None
    cosine: Tensor | None = None
    spectra: tuple[Tensor, ...] | None = None

    def has_data(self, suffix: str) -> bool:
        """Whether the averages of both sides have seen something."""
        return all(float(self.average[f"{side}{suffix}"]["weight"]) for side in SIDES)

    def factor(self, side: int, suffix: str = "") -> Tensor:
        """A (side 0) or G (side 1), ``[p, n, n]`` (diagonal: ``[p, n]``)."""
        return self.specs[side].matrix(self.average[f"{SIDES[side]}{suffix}"])

    def mean_eigenvalues(self, suffix: str) -> tuple[Tensor, Tensor]:
        """Of A and of G, per pair ``[p]``; of all pairs together where they are joint."""
        means = []
        for side, spec in zip(SIDES, self.specs, strict=True):
            mean = spec.mean_eigenvalue(self.average[f"{side}{suffix}"])
            means.append(mean.mean().expand_as(mean) if self.layer.joint else mean)
        return means[0], means[1]

    def freeze(self, suffix: str, source: str = "") -> None:
        """Copies the averages: what is decomposed over several steps, or was, does not change meanwhile."""
        for side in SIDES:
            snapshot_(self.average[f"{side}{suffix}"], self.average[f"{side}{source}"])

    def basis(self, side: int) -> Decomposition | None:
        """The decomposition that the state holds; None if there is none, or only room for it."""
        parts = tuple(self.average.get(f"{SIDES[side]}_basis", {}).values())
        return parts if any(bool(part.any()) for part in parts) else None

    def install(self, decomposed: tuple[Decomposition, Decomposition] | None) -> None:
        """Takes decompositions of the "_last" averages into use."""
        self.drop()
        self.decomposed, self.means = decomposed, self.mean_eigenvalues("_last")

    def drop(self) -> None:
        """Has no decompositions any more."""
        self.decomposed = self.means = self.cosine = self.spectra = None


def gamma_of(means: tuple[Tensor, Tensor], damping: float, *, relative: bool) -> Tensor:
    """The damping of each pair, ``[p]``, given the mean eigenvalues of A and G."""
    product = means[0] * means[1]
    if not relative:
        return torch.full_like(product, damping)
    return damping * torch.where(product > 0, product, 1.0)


def specs_of(layer: KroneckerLayer) -> tuple[FactorSpec, FactorSpec]:
    """The shapes of A and G."""
    a, g = zip((layer.d_in, layer.d_out), layer.diagonal, strict=True)
    return FactorSpec(layer.pairs, *a), FactorSpec(layer.pairs, *g)


def part_dtype(dims: int, inv_dtype: torch.dtype) -> torch.dtype:
    """How a part of a decomposition is stored: vectors and scalars carry the magnitude."""
    return inv_dtype if dims == 2 else torch.promote_types(inv_dtype, torch.float32)


def decomposed_bytes(specs: Iterable[FactorSpec], solver: Solver, inv_dtype: torch.dtype) -> int:
    """What the decompositions of these factors take."""
    return sum(
        spec.pairs * math.prod(shape) * part_dtype(len(shape), inv_dtype).itemsize
        for spec in specs
        for shape in solver.shapes(spec.dim, spec.diagonal)
    )


def assign(
    strategy: AssignmentStrategy, blocks: Sequence[Block], comm: Communicator, solver: Solver, inv_dtype: torch.dtype
) -> Assignment:
    """Asks the strategy who decomposes and who preconditions what, and enters it in the blocks."""
    costs = []
    for block in blocks:
        a, g = block.specs
        costs.append(LayerCost((a.cost, g.cost), decomposed_bytes(block.specs, solver, inv_dtype)))
    work = strategy.assign(costs, comm.world_size)
    work.check(len(costs), comm.world_size)
    routes = {workers.gradient_workers: workers.routes(comm.world_size) for workers in work.layers}
    for block, workers in zip(blocks, work.layers, strict=True):
        own = [route for route in routes[workers.gradient_workers] if comm.rank in route[1] and len(route[1]) > 1]
        block.workers, block.route = workers, own[0] if own else None
    return work


def groups_of(work: Assignment, world_size: int) -> set[tuple[int, ...]]:
    """The groups of ranks in which decompositions and preconditioned gradients travel."""
    return set(work.groups(world_size))
