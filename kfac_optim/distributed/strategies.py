"""The strategies of this package: pure policy, no processes.

    ============  ============================  ==============================
    strategy      inverse workers of a layer    gradient workers of a layer
    ============  ============================  ==============================
    LayerWise     one rank for A and G          that rank
    FactorWise    one rank for A, one for G     every rank
    KAISA(f)      among its gradient workers    ``f * world_size`` ranks
    ============  ============================  ==============================

All three arrange the ranks as a grid, a row of which (1, all, or some of the ranks) are the gradient workers of a
layer. LayerWise is K-FAC-lw and FactorWise is K-FAC-opt of the distributed K-FAC paper (section 6.4.1). In the terms of
Pauloski et al. 2021, KAISA(1/R) is MEM-OPT, KAISA(1) is COMM-OPT, and everything between is HYBRID-OPT. LayerWise with
``factors="local"`` is DP-KFAC (Zhang et al. 2022, Scalable K-FAC Training for Deep Neural Networks with Distributed
Preconditioning).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.checks import is_int, require_number
from ..common.grouping import longest_first
from .assignment import Assignment, FactorPlace, LayerAssignment, LayerCost, check_place


def _few_ranks(costs: Sequence[float], group: Sequence[int]) -> list[int]:
    """Distributes jobs to as few ranks of a group as finish in the time of :func:`longest_first`.

    A rank sends all that it has decomposed together, so that fewer ranks mean fewer broadcasts. Often this loses no
    time: a few matrices cost more than all others together, and most ranks would wait for the ranks that have those.

    Returns:
        The rank of each job. The chosen ranks are spread evenly over the group, to share the network of its nodes.
    """
    evenly, even = longest_first(costs, group), dict.fromkeys(group, 0.0)
    for rank, cost in zip(evenly, costs, strict=True):
        even[rank] += cost
    limit = max(even.values())
    loads: list[float] = []
    places = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        place = next((i for i, load in enumerate(loads) if load + costs[job] <= limit), len(loads))
        if place == len(loads):
            loads.append(0.0)
        loads[place] += costs[job]
        places[job] = place
    if len(loads) > len(group):
        return evenly
    return [group[place * len(group) // len(loads)] for place in places]


def _weights(costs: Sequence[LayerCost], factors: FactorPlace) -> list[float]:
    """The load of each layer when whole layers are balanced over ranks: the cost of its decompositions.

    Where a rank also has to keep the factors of its layers, their memory counts as much, each as a share of the total.
    Costs grow with the cube of a dimension and memory with its square: balanced by cost alone, 3 of 4 ranks get the
    three costliest layers of ResNet-50, and the fourth gets all others, 1.44 times the mean memory. Balanced by both,
    it is 1.19 times, and refreshes take 7 % longer.
    """
    work = [sum(layer.factor_costs) for layer in costs]
    if factors == "replicated":
        return work
    memory = [layer.memory for layer in costs]
    return [w / max(1.0, sum(work)) + m / max(1, sum(memory)) for w, m in zip(work, memory, strict=True)]


def _grid(costs: Sequence[LayerCost], world_size: int, workers: int, factors: FactorPlace) -> Assignment:
    """Arranges the ranks as a grid of ``world_size / workers`` rows, and gives every layer to one row.

    Layers go to the row with the least load so far. The ranks of a row are the layer's gradient workers, and each of
    its factors is decomposed by one of them. As few of them as possible decompose, unless they have to keep the
    factors: then all do, because factors are shared out to save memory. Ranks are numbered down the columns.
    Preconditioned gradients travel within a column at every step, and so a column is a run of neighbours (one node, if
    it fits). Decompositions travel within rows, and only at refreshes.

    Args:
        costs: The layers.
        world_size: The number of ranks.
        workers: The number of gradient workers of a layer, a divisor of the number of ranks.
        factors: Which ranks keep factors.
    """
    rows = [range(row, world_size, world_size // workers) for row in range(world_size // workers)]
    row_of = longest_first(_weights(costs, factors), range(len(rows)))
    distribute = _few_ranks if factors == "replicated" else longest_first
    loads = [0.0] * world_size
    layers: dict[int, LayerAssignment] = {}
    for row in set(row_of):
        own, everyone = [i for i, other in enumerate(row_of) if other == row], tuple(rows[row])
        ranks = distribute([cost for i in own for cost in costs[i].factor_costs], everyone)
        for i, of_a, of_g in zip(own, ranks[::2], ranks[1::2], strict=True):
            layers[i] = LayerAssignment((of_a, of_g), everyone, factors)
            for rank, cost in zip((of_a, of_g), costs[i].factor_costs, strict=True):
                loads[rank] += cost
    return Assignment(tuple(layers[i] for i in range(len(costs))), tuple(loads))


@dataclass(frozen=True)
class FactorWise:
    """K-FAC-opt: A and G of a layer may be decomposed on different ranks, and every rank preconditions every layer.

    Nothing travels in steps without a refresh. This is the default.

    Args:
        factors: Who keeps factors: "replicated" (default), "sharded" or "local" (:mod:`kfac_optim.distributed`).

    Raises:
        ValueError: If ``factors`` is something else.
    """

    factors: FactorPlace = "replicated"

    def __post_init__(self) -> None:
        check_place("FactorWise", self.factors)

    def assign(self, costs: Sequence[LayerCost], world_size: int) -> Assignment:
        """See :class:`AssignmentStrategy`."""
        return _grid(costs, world_size, world_size, self.factors)


@dataclass(frozen=True)
class LayerWise:
    """K-FAC-lw (Osawa et al. 2019): one rank decomposes both factors of a layer and preconditions it for all others.

    With ``factors="local"`` this is DP-KFAC (Zhang et al. 2022).

    Args:
        factors: Who keeps factors: "replicated" (default), "sharded" or "local" (:mod:`kfac_optim.distributed`).

    Raises:
        ValueError: If ``factors`` is something else.
    """

    factors: FactorPlace = "replicated"

    def __post_init__(self) -> None:
        check_place("LayerWise", self.factors)

    def assign(self, costs: Sequence[LayerCost], world_size: int) -> Assignment:
        """See :class:`AssignmentStrategy`."""
        return _grid(costs, world_size, 1, self.factors)


@dataclass(frozen=True)
class KAISA:
    """KAISA: ``grad_worker_fraction`` of the ranks precondition a layer and send the result to the others.

    Args:
        grad_worker_fraction: f in [1/R, 1], where ``f * R`` divides the world size R. More gradient workers take more
            memory and need fewer broadcasts of preconditioned gradients.
        memory_budget: Instead of a fraction, the bytes ("2GiB", "500MB" or an int) that decompositions may take on each
            rank; the largest fraction that fits is chosen.
        factors: Who keeps factors: "replicated" (default), "sharded" or "local" (:mod:`kfac_optim.distributed`).

    Raises:
        TypeError: If the fraction is not a number, or the budget neither an int nor text.
        ValueError: At construction if both or neither are given, or a value is out of range. In ``assign`` if the world
            size does not allow the fraction (the error lists the allowed ones), or if no fraction fits the budget (the
            error names the smallest budget that works).
    """

    grad_worker_fraction: float | None = None
    memory_budget: str | int | None = None
    factors: FactorPlace = "replicated"

    def __post_init__(self) -> None:
        check_place("KAISA", self.factors)
        if (self.grad_worker_fraction is None) == (self.memory_budget is None):
            raise ValueError("KAISA takes exactly one of grad_worker_fraction= and memory_budget=")
        if self.grad_worker_fraction is not None:
            given = self.grad_worker_fraction
            require_number("grad_worker_fraction", given, "in (0, 1]", lambda x: 0 < x <= 1, owner="KAISA")
        if self.memory_budget is not None:
            _parse_bytes(self.memory_budget)  # called only for its errors

    def assign(self, costs: Sequence[LayerCost], world_size: int) -> Assignment:
        """See :class:`AssignmentStrategy`."""
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        if self.memory_budget is not None:
            return self._largest_that_fits(costs, world_size, divisors)
        assert self.grad_worker_fraction is not None
        # One process accepts any fraction, so that a script for several ranks also runs alone.
        workers = self.grad_worker_fraction * world_size if world_size > 1 else 1
        if round(workers) not in divisors or abs(workers - round(workers)) > 1e-6 * world_size:
            valid = ", ".join(f"{n}/{world_size}" for n in divisors)
            raise ValueError(
                f"KAISA(grad_worker_fraction={self.grad_worker_fraction!r}) does not divide {world_size} ranks evenly; "
                f"valid fractions: {valid}"
            )
        return _grid(costs, world_size, round(workers), self.factors)

    def _largest_that_fits(self, costs: Sequence[LayerCost], world_size: int, divisors: Sequence[int]) -> Assignment:
        """The grid with the most gradient workers (one of the divisors) whose fullest rank stays within the budget."""
        assert self.memory_budget is not None
        budget, smallest = _parse_bytes(self.memory_budget), None
        for workers in reversed(divisors):
            assignment = _grid(costs, world_size, workers, self.factors)
            needed = max(_bytes_per_rank(costs, assignment))
            if needed <= budget:
                return assignment
            smallest = needed if smallest is None else min(smallest, needed)
        ranks = "one rank" if world_size == 1 else f"{world_size} ranks"
        raise ValueError(
            f"KAISA(memory_budget={self.memory_budget!r}): no fraction fits on {ranks}; the smallest budget that works "
            f"is {smallest} bytes"
        )


def _bytes_per_rank(costs: Sequence[LayerCost], assignment: Assignment) -> list[int]:
    """Bytes of the decompositions that each rank holds as a gradient worker."""
    groups: dict[tuple[int, ...], int] = {}
    for cost, layer in zip(costs, assignment.layers, strict=True):
        groups[layer.gradient_workers] = groups.get(layer.gradient_workers, 0) + cost.memory
    held = [0] * len(assignment.loads)
    for ranks, memory in groups.items():
        for rank in ranks:
            held[rank] += memory
    return held


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _parse_bytes(text: str | int) -> int:
    """The number of bytes that ``"2GiB"``, ``"500 MB"`` or an int stands for.

    Raises:
        TypeError: If it is neither text nor an int.
        ValueError: If it is negative, or no number with one of the units B, KB, MB, GB, KiB, MiB, GiB.
    """
    allowed = "must be bytes as an int >= 0, or text such as '500MB' or '2GiB'"
    if not (is_int(text) or isinstance(text, str)):
        raise TypeError(f"memory_budget={text!r}: {allowed}")
    number = str(text).strip().rstrip("BbGgIiKkMm").strip()
    unit = str(text).strip()[len(number) :].strip().upper()
    try:
        count = int(float(number) * _UNITS[unit])
    except (KeyError, OverflowError, ValueError):
        count = -1
    if count < 0:
        raise ValueError(f"memory_budget={text!r}: {allowed}")
    return count
