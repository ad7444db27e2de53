"""Which rank decomposes which factor, and which ranks precondition which layer: what a strategy decides.

A strategy maps layer costs and a world size to an :class:`Assignment`. It is deterministic, so that all ranks compute
the same one without communication. An *inverse worker* decomposes a factor; a *gradient worker* of a layer holds its
decompositions and preconditions its gradient. :mod:`kfac_optim.distributed` says which ranks may keep factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

FactorPlace = Literal["replicated", "sharded", "local"]

_ROUTES = 64  # the most broadcasts of a layer's preconditioned gradient


@dataclass(frozen=True)
class LayerCost:
    """What a strategy is told about a layer.

    Attributes:
        factor_costs: Cost of decomposing A and G, in multiply-adds up to a constant: n^3 for each dense n x n matrix of
            the factor (one per Kronecker pair), n for each diagonal one.
        memory: Bytes that the layer's decompositions take on each of its gradient workers.
    """

    factor_costs: tuple[float, float]
    memory: int


@dataclass(frozen=True)
class LayerAssignment:
    """The ranks that work on one layer.

    Attributes:
        inverse_workers: The rank that decomposes A, and the rank that decomposes G.
        gradient_workers: The ranks that precondition its gradient, at least one.
        factors: "replicated" (default), "sharded" or "local"; see :mod:`kfac_optim.distributed`.
    """

    inverse_workers: tuple[int, int]
    gradient_workers: tuple[int, ...]
    factors: FactorPlace = "replicated"

    @property
    def shares_factors(self) -> bool:
        """Whether A and G are each kept by a single rank."""
        return self.factors != "replicated"

    def owner(self, side: int) -> int | None:
        """The only rank that keeps A (side 0) or G (side 1); None if every rank keeps it."""
        return self.inverse_workers[side] if self.shares_factors else None

    def keeps(self, side: int, rank: int) -> bool:
        """Whether a rank keeps A (side 0) or G (side 1)."""
        return self.owner(side) in (None, rank)

    def counts(self, side: int, rank: int) -> bool:
        """Whether a rank's statistics go into A (side 0) or G (side 1)."""
        return self.factors != "local" or self.keeps(side, rank)

    def holders(self, side: int) -> tuple[int, ...]:
        """The ranks that need the decomposition of A (side 0) or G (side 1), its inverse worker among them."""
        worker, members = self.inverse_workers[side], self.gradient_workers
        return tuple(sorted(members if worker in members else (*members, worker)))

    def routes(self, world_size: int) -> list[tuple[int, tuple[int, ...]]]:
        """How the preconditioned gradient gets from the gradient workers to all other ranks.

        The other ranks are divided among the gradient workers in equal runs of neighbours; for KAISA these are the
        columns of its grid. If there are many workers, neighbouring runs are joined, and the first of their workers
        sends to all of them, other workers included: otherwise every worker would need a process group.

        Returns:
            The broadcasts, each as its source (a worker) and its members (the source among them).
        """
        workers = sorted(self.gradient_workers)
        receivers = sorted(set(range(world_size)).difference(workers))
        if not receivers:
            return [(worker, (worker,)) for worker in workers]
        count = min(len(workers), _ROUTES)
        ends = [len(workers) * i // count for i in range(count + 1)]
        found = []
        for start, end in zip(ends, ends[1:], strict=False):
            share = receivers[len(receivers) * start // len(workers) : len(receivers) * end // len(workers)]
            found.append((workers[start], tuple(sorted((*workers[start:end], *share)))))
        return found


@dataclass(frozen=True)
class Assignment:
    """What a strategy decided.

    Attributes:
        layers: The ranks that work on each layer, in the order of the costs.
        loads: The cost of the decompositions that each rank makes, in the units of :class:`LayerCost`.
    """

    layers: tuple[LayerAssignment, ...]
    loads: tuple[float, ...]

    @property
    def shares_factors(self) -> bool:
        """Whether some factors are kept by one rank alone."""
        return any(layer.shares_factors for layer in self.layers)

    @property
    def imbalance(self) -> float:
        """Largest load divided by the mean load; 1.0 is perfect."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def groups(self, world_size: int) -> list[tuple[int, ...]]:
        """The groups of at least two ranks in which decompositions and preconditioned gradients travel, sorted."""
        distinct = {layer.gradient_workers: layer for layer in self.layers}.values()
        groups = {members for layer in distinct for _, members in layer.routes(world_size)}
        groups |= {layer.holders(side) for layer in self.layers for side in range(2)}
        return sorted(members for members in groups if len(members) > 1)

    def check(self, layers: int, world_size: int) -> None:
        """Raises ValueError unless there are exactly ``layers`` layers and every worker is a valid rank."""
        if len(self.layers) != layers:
            raise ValueError(f"assignment: it has {len(self.layers)} layers instead of {layers}")
        for i, layer in enumerate(self.layers):
            if not (isinstance(layer.inverse_workers, tuple) and isinstance(layer.gradient_workers, tuple)):
                raise ValueError(
                    f"assignment: layer {i} has workers {layer.inverse_workers!r} and {layer.gradient_workers!r}; they "
                    "must be tuples of ranks"
                )
        distinct = {layer: i for i, layer in enumerate(self.layers)}
        for layer, i in distinct.items():
            check_place(f"assignment: layer {i}", layer.factors)
            ranks = (*layer.inverse_workers, *layer.gradient_workers)
            if len(layer.inverse_workers) != 2 or not layer.gradient_workers:
                raise ValueError(
                    f"assignment: layer {i} needs an inverse worker for A, one for G, and gradient workers"
                )
            if len(set(layer.gradient_workers)) < len(layer.gradient_workers):
                raise ValueError(f"assignment: layer {i} has a gradient worker twice: {layer.gradient_workers}")
            if not all(0 <= rank < world_size for rank in ranks):
                raise ValueError(f"assignment: layer {i} has ranks {ranks}; there are {world_size}, from 0")


class AssignmentStrategy(Protocol):
    """Anything with this method can be passed as ``assignment=``."""

    def assign(self, costs: Sequence[LayerCost], world_size: int) -> Assignment:
        """Returns the assignment; must be deterministic and the same on every rank."""
        ...


def check_place(whose: str, factors: object) -> None:
    """Raises ValueError unless ``factors`` is one of ``FactorPlace``; ``whose`` names its owner in the message."""
    if factors not in get_args(FactorPlace):
        raise ValueError(f"{whose}(factors={factors!r}): must be one of {', '.join(map(repr, get_args(FactorPlace)))}")
