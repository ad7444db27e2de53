"""Who decomposes and who preconditions what: properties of every policy over generated costs and world sizes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.models import BottleneckResNet
from benchmarks.common.works import WORKS
from kfac_optim import (
    KAISA,
    KFACSGD,
    Assignment,
    AssignmentStrategy,
    EigenSolver,
    FactorWise,
    LayerAssignment,
    LayerCost,
    LayerWise,
    TorchCommunicator,
    memory_estimate,
)
from kfac_optim.common.grouping import longest_first
from kfac_optim.distributed import Broadcast, Communicator, agreement
from kfac_optim.distributed.assignment import FactorPlace
from kfac_optim.placement import decomposed_bytes

ROUNDING = 1e-9  # loads are sums of integers up to 1e10 in floats, in another order

dims = st.integers(1, 600)
layer_costs = st.builds(
    lambda a, g, cubic: LayerCost((float(a**3 if cubic else a), float(g**3)), 8 * (a * a + g * g)),
    dims,
    dims,
    st.booleans(),
)
costs_of_models = st.lists(layer_costs, max_size=24)
world_sizes = st.integers(1, 12)
places: list[FactorPlace] = ["replicated", "sharded", "local"]


def divisors(world_size: int) -> list[int]:
    return [n for n in range(1, world_size + 1) if world_size % n == 0]


@st.composite
def strategies_on_ranks(draw: st.DrawFn) -> tuple[AssignmentStrategy, int, int]:
    """A strategy, a world size, and how many ranks are to precondition each layer."""
    ranks = draw(world_sizes)
    workers = draw(st.sampled_from(divisors(ranks)))
    factors = draw(st.sampled_from(places))
    return draw(
        st.sampled_from(
            [
                (LayerWise(factors), ranks, 1),
                (FactorWise(factors), ranks, ranks),
                (KAISA(grad_worker_fraction=workers / ranks, factors=factors), ranks, workers),
            ]
        )
    )


def held_bytes(costs: Sequence[LayerCost], assignment: Assignment, ranks: int) -> list[int]:
    """Bytes of decompositions on each rank."""
    pairs = list(zip(costs, assignment.layers, strict=True))
    return [sum(cost.memory for cost, layer in pairs if rank in layer.gradient_workers) for rank in range(ranks)]


@given(costs_of_models, strategies_on_ranks())
def test_every_factor_once_within_its_group(
    costs: list[LayerCost], chosen: tuple[AssignmentStrategy, int, int]
) -> None:
    strategy, ranks, workers = chosen
    assignment = strategy.assign(costs, ranks)
    assert len(assignment.layers) == len(costs)
    loads = [0.0] * ranks
    for cost, layer in zip(costs, assignment.layers, strict=True):
        assert len(layer.inverse_workers) == 2, "one rank for A, one for G"
        assert len(layer.gradient_workers) == len(set(layer.gradient_workers)) == workers
        assert set(layer.gradient_workers) <= set(range(ranks))
        assert set(layer.inverse_workers) <= set(layer.gradient_workers), "who decomposes also preconditions"
        for rank, factor in zip(layer.inverse_workers, cost.factor_costs, strict=True):
            loads[rank] += factor
        assert [layer.owner(side) for side in range(2)] == (
            [None, None] if strategy.factors == "replicated" else list(layer.inverse_workers)  # type: ignore[attr-defined]
        )
    assert assignment.loads == pytest.approx(loads, rel=ROUNDING)


@given(costs_of_models, strategies_on_ranks())
def test_deterministic(costs: list[LayerCost], chosen: tuple[AssignmentStrategy, int, int]) -> None:
    """Every rank computes the same without asking: from equal costs, by another instance of the strategy."""
    strategy, ranks, _ = chosen
    again = copy.deepcopy(strategy)
    assert strategy.assign(costs, ranks) == again.assign(
        tuple(LayerCost(c.factor_costs, c.memory) for c in costs), ranks
    )


@given(costs_of_models, world_sizes)
def test_greedy_load_is_at_most_mean_plus_largest_job(costs: list[LayerCost], ranks: int) -> None:
    """Of the ungrouped policies; the jobs are factors for FactorWise and whole layers for LayerWise."""
    for strategy, jobs in (
        (FactorWise(), [cost for layer in costs for cost in layer.factor_costs]),
        (LayerWise(), [sum(layer.factor_costs) for layer in costs]),
    ):
        loads = strategy.assign(costs, ranks).loads
        assert max(loads) <= (sum(jobs) / ranks + max(jobs, default=0.0)) * (1 + ROUNDING)
        if len(jobs) <= ranks:
            assert max(loads) == max(jobs, default=0.0), "with a rank for every job the dearest one decides"


@given(costs_of_models, world_sizes)
def test_the_ends_of_kaisa_are_the_paper_s_strategies(costs: list[LayerCost], ranks: int) -> None:
    """MEM-OPT is K-FAC-lw, COMM-OPT is K-FAC-opt, in who decomposes and who preconditions."""
    for factors in places:
        first, last = KAISA(1 / ranks, factors=factors), KAISA(1.0, factors=factors)
        assert first.assign(costs, ranks).layers == LayerWise(factors).assign(costs, ranks).layers
        assert last.assign(costs, ranks).layers == FactorWise(factors).assign(costs, ranks).layers


@given(costs_of_models, world_sizes)
def test_kaisa_s_gradient_workers_are_rows_of_a_grid(costs: list[LayerCost], ranks: int) -> None:
    """Two layers have the same workers or none in common, so that a rank needs one group per grid."""
    for workers in divisors(ranks):
        assignment = KAISA(grad_worker_fraction=workers / ranks).assign(costs, ranks)
        groups = {layer.gradient_workers for layer in assignment.layers}
        assert sum(map(len, groups)) == len({rank for group in groups for rank in group})


@given(st.lists(layer_costs, min_size=1, max_size=24), world_sizes, st.integers(0, 3 * 10**7))
def test_memory_budget_picks_the_largest_fraction_that_fits(costs: list[LayerCost], ranks: int, budget: int) -> None:
    needs = {}
    for workers in divisors(ranks):
        assignment = KAISA(grad_worker_fraction=workers / ranks).assign(costs, ranks)
        needs[workers] = max(held_bytes(costs, assignment, ranks))
    fitting = [workers for workers, need in needs.items() if need <= budget]
    strategy = KAISA(memory_budget=budget)
    if fitting:
        assert strategy.assign(costs, ranks) == KAISA(grad_worker_fraction=max(fitting) / ranks).assign(costs, ranks)
    else:
        with pytest.raises(ValueError, match=rf"smallest.*\b{min(needs.values())}\b"):
            strategy.assign(costs, ranks)
        KAISA(memory_budget=min(needs.values())).assign(costs, ranks)  # the budget that the message names works


def test_by_hand() -> None:
    """On 2 ranks, longest first: 8 -> 0, 6 -> 1, 5 -> 1, 3 -> 0 (11 = 11), 1 -> 0, 1 -> 1."""
    costs = [LayerCost((8.0, 1.0), 10), LayerCost((6.0, 5.0), 20), LayerCost((3.0, 1.0), 30)]
    factor_wise = FactorWise().assign(costs, 2)
    assert [layer.inverse_workers for layer in factor_wise.layers] == [(0, 0), (1, 1), (0, 1)]
    assert factor_wise.loads == (12.0, 12.0)
    assert factor_wise.imbalance == 1.0
    # Whole layers 9, 11, 4: 11 -> 0, 9 -> 1, 4 -> 1.
    layer_wise = LayerWise().assign(costs, 2)
    assert [layer.inverse_workers for layer in layer_wise.layers] == [(1, 1), (0, 0), (1, 1)]
    assert [layer.gradient_workers for layer in layer_wise.layers] == [(1,), (0,), (1,)]
    assert layer_wise.loads == (11.0, 13.0)
    assert layer_wise.imbalance == pytest.approx(13 / 12)
    assert held_bytes(costs, layer_wise, 2) == [20, 40]
    assert held_bytes(costs, factor_wise, 2) == [60, 60]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "grad_worker_fraction.*memory_budget"),
    ({"grad_worker_fraction": 0.5, "memory_budget": 100}, "grad_worker_fraction.*memory_budget"),
    ({"grad_worker_fraction": 0.0}, r"grad_worker_fraction=0.0.*\(0, 1\]"),
    ({"grad_worker_fraction": -0.5}, r"grad_worker_fraction=-0.5.*\(0, 1\]"),
    ({"grad_worker_fraction": 1.5}, r"grad_worker_fraction=1.5.*\(0, 1\]"),
    ({"grad_worker_fraction": float("nan")}, r"grad_worker_fraction=nan.*\(0, 1\]"),
    ({"memory_budget": "2 elephants"}, "memory_budget='2 elephants'.*GiB"),
    ({"memory_budget": "inf"}, "memory_budget='inf'.*GiB"),
    ({"memory_budget": "GiB"}, "memory_budget='GiB'.*GiB"),
    ({"memory_budget": -1}, "memory_budget=-1"),
    ({"memory_budget": "-2GiB"}, "memory_budget='-2GiB'"),
    ({"memory_budget": True}, "memory_budget=True"),
    ({"memory_budget": 1.5}, "memory_budget=1.5"),
    ({"grad_worker_fraction": 0.5, "factors": "shared"}, "KAISA.factors='shared'.*'replicated', 'sharded', 'local'"),
    ({"grad_worker_fraction": "half"}, "grad_worker_fraction='half'"),
]


@pytest.mark.parametrize(("keywords", "message"), BAD, ids=str)
def test_bad_values_are_refused_at_construction(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        KAISA(**keywords)


@pytest.mark.parametrize(("fraction", "ranks", "valid"), [(0.3, 8, "1/8, 2/8, 4/8, 8/8"), (0.5, 3, "1/3, 3/3")])
def test_an_invalid_fraction_lists_the_valid_ones(fraction: float, ranks: int, valid: str) -> None:
    with pytest.raises(ValueError, match=rf"grad_worker_fraction={fraction}.*{ranks}.*{valid}"):
        KAISA(grad_worker_fraction=fraction).assign([LayerCost((1.0, 1.0), 8)], ranks)


@pytest.mark.parametrize(
    ("text", "count"),
    [(100, 100), ("100", 100), ("100B", 100), ("1.5KiB", 1536), ("2 MB", 2 * 10**6), ("1GiB", 2**30), ("1gb", 10**9)],
)
def test_budgets_in_words(text: str | int, count: int) -> None:
    """One byte more than the budget does not fit, the budget itself does."""
    KAISA(memory_budget=text).assign([LayerCost((1.0, 1.0), count)], 2)
    with pytest.raises(ValueError, match="smallest"):
        KAISA(memory_budget=text).assign([LayerCost((1.0, 1.0), count + 1)], 2)


@pytest.mark.parametrize("world_size", [3, 6, 7, 12, 49, 96])
def test_a_fraction_may_be_a_quotient_or_written_with_six_digits(world_size: int) -> None:
    costs = [LayerCost((27.0, 8.0), 100)]
    for workers in divisors(world_size):
        rounded, assignment = (
            KAISA(round(workers / world_size, 6)),
            KAISA(workers / world_size).assign(costs, world_size),
        )
        assert rounded.assign(costs, world_size) == assignment
        assert len(assignment.layers[0].gradient_workers) == workers
    with pytest.raises(ValueError, match="valid fractions"):
        KAISA(round(1 / world_size, 6) + 2e-6).assign(costs, world_size)


# Many ranks ----------------------------------------------------------------------------------------------------------


@given(costs_of_models, world_sizes)
def test_as_few_inverse_workers_as_finish_in_the_same_time(costs: list[LayerCost], ranks: int) -> None:
    jobs = [cost for layer in costs for cost in layer.factor_costs]
    loads = [0.0] * ranks
    for cost, rank in zip(jobs, longest_first(jobs, range(ranks)), strict=True):
        loads[rank] += cost
    found = FactorWise().assign(costs, ranks)
    assert max(found.loads) <= max(loads)
    mean = sum(jobs) / max(found.loads, default=1.0) if jobs else 0.0
    used = sum(load > 0 for load in found.loads)
    assert used <= 2 * mean + 1 or used == ranks, "no two of them could do their work together"


@given(costs_of_models, world_sizes, st.sampled_from(places[1:]), st.data())
def test_all_gradient_workers_keep_factors_that_are_shared_out(
    costs: list[LayerCost], ranks: int, place: FactorPlace, data: st.DataObject
) -> None:
    """Not few of them, as decompose replicated ones: the fullest rank would hold more than it has to."""
    workers = data.draw(st.sampled_from(divisors(ranks)))
    assignment = KAISA(workers / ranks, factors=place).assign(costs, ranks)
    for group in {layer.gradient_workers for layer in assignment.layers}:
        own = [layer.inverse_workers for layer in assignment.layers if layer.gradient_workers == group]
        assert len({rank for pair in own for rank in pair}) == min(2 * len(own), workers)


def test_one_dear_factor_leaves_most_ranks_without_work() -> None:
    """8 on one rank, eight times 1 on another, in the middle of the group."""
    costs = [LayerCost((8.0, 1.0), 10), *[LayerCost((1.0, 1.0), 10)] * 3, LayerCost((1.0, 0.0), 10)]
    found = FactorWise().assign(costs, 6)
    assert found.loads == (8.0, 0.0, 0.0, 8.0, 0.0, 0.0)
    assert found.layers[0].inverse_workers == (0, 3)


WORLD = 4096


@pytest.fixture(scope="module", params=["resnet50", "bert-large"])
def large(request: pytest.FixtureRequest) -> list[LayerCost]:
    """The costs of a model's layers."""
    with torch.device("meta"):
        model = WORKS[request.param].make()
    return [
        LayerCost((a.cost, g.cost), decomposed_bytes((a, g), EigenSolver(), torch.float32))
        for a, g in (layer.specs for layer in KFACSGD(model, lr=0.1).curvature.layers)
    ]


@pytest.mark.parametrize("workers", divisors(WORLD))
def test_at_most_300_groups_on_4096_ranks(large: list[LayerCost], workers: int) -> None:
    assignment = KAISA(workers / WORLD).assign(large, WORLD)
    assert len(assignment.groups(WORLD)) <= 300
    for layer in {layer.gradient_workers: layer for layer in assignment.layers}.values():
        routes = layer.routes(WORLD)
        members = [rank for _, some in routes for rank in some]
        assert len(members) == len(set(members)), "nobody gets a gradient twice"
        assert set(members).union(layer.gradient_workers) == set(range(WORLD))
        assert all(source in some and source in layer.gradient_workers for source, some in routes)


def test_groups_are_made_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.distributed, on ranks that it only pretends to have."""
    made: list[Any] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(tuple(ranks)))
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=WORLD)
    try:
        assignment = KAISA(0.5).assign([LayerCost((1.0, 2.0), 8)] * 100, WORLD)
        for _ in range(2):  # optimizers that are built one after the other
            comm = TorchCommunicator()
            comm.check_groups(assignment.groups(WORLD))
            for _ in range(2):
                comm.prepare(assignment.groups(WORLD))
    finally:
        dist.destroy_process_group()
    assert len(made) == len(set(made)) == 2 + 64, "two rows; the columns, in 64 groups"


class Counting(Communicator):
    """Notes what a rank of many starts; the others have the same."""

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size)
        self.started: list[str] = []

    def _start_sum(self, tensor: Tensor) -> Any:
        self.started.append("sum")
        tensor.mul_(self.world_size)
        if tensor.dtype is torch.float64:  # counts: somebody has decomposed each factor
            tensor.clamp_(min=1)
        return SimpleNamespace(wait=lambda: None)

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Any:
        self.started.append("broadcast")
        if source != self.rank:
            tensor.zero_()
        return SimpleNamespace(wait=lambda: None)


def test_collectives_of_a_refresh_of_resnet50() -> None:
    """All factors and decompositions of the default strategy, without their storage."""
    with torch.device("meta"):
        layers = KFACSGD(WORKS["resnet50"].make(), lr=0.1).curvature.layers
    solver, specs = EigenSolver(), [layer.specs for layer in layers]
    costs = [LayerCost((a.cost, g.cost), decomposed_bytes((a, g), solver, torch.float32)) for a, g in specs]
    for ranks in (8, 64):
        comm, broadcasts = Counting(ranks), []
        for pair, workers in zip(specs, FactorWise().assign(costs, ranks).layers, strict=True):
            for side, spec in enumerate(pair):
                parts = [torch.empty(spec.pairs, *s, device="meta") for s in solver.shapes(spec.dim, spec.diagonal)]
                broadcasts.append(Broadcast(parts, workers.inverse_workers[side], workers.holders(side)))
        comm.send(broadcasts, "decompositions")
        factors = [spec.zeros(torch.float32, torch.device("meta")) for pair in specs for spec in pair]
        assert len(list(comm.sum(factors, "factors", compressed=True))) == 2 * len(layers) == 214
        assert len(comm.started) <= 18, "and two sums: who has succeeded, and the largest eigenvalues"


@pytest.mark.slow
def test_collectives_of_a_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-50 with narrow layers: 214 factors, whose costs stand in the same proportions, on 256 ranks."""
    # The sums of a checksum depend on the other ranks.
    monkeypatch.setattr(agreement, "check", lambda comm, built, learned: {})
    model = BottleneckResNet(width=2, classes=32)
    comm = Counting(256)
    optimizer = KFACSGD(model, lr=0.1, communicator=comm, spread=0)
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    optimizer.curvature.update([p.grad for p in model.parameters() if p.grad is not None], [1.0])
    assert len(optimizer.curvature.layers) == 107
    assert comm.started.count("broadcast") <= 8 and len(comm.started) <= 20, comm.started


@pytest.mark.parametrize("name", ["resnet50", "bert-base"])
def test_layer_wise_shares_memory_out_evenly(name: str) -> None:
    """By what one process holds, on 4 and 8 ranks: at most 1.2 times its share, dearest layers and all."""
    with torch.device("meta"):
        model = WORKS[name].make()
    whole = memory_estimate(model)["total"]
    for ranks in (4, 8):
        sharded = memory_estimate(model, world_size=ranks, assignment=LayerWise("sharded"))
        assert sharded["total"] <= 1.2 / ranks * whole
        assert sharded["local sums"] == 0


def test_workers_are_tuples() -> None:
    for inverse, gradient in (([0, 0], (0,)), ((0, 0), [0])):
        made = Assignment((LayerAssignment(inverse, gradient),), loads=(1.0,))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="layer 0 has workers .* must be tuples of ranks"):
            made.check(1, 1)


def test_a_layer_s_factors_stand_in_a_place_that_is_known() -> None:
    layer = LayerAssignment((0, 1), (0,), "elsewhere")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer 0.factors='elsewhere'"):
        Assignment((layer,), (1.0, 1.0)).check(1, 2)
