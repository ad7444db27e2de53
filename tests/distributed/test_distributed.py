"""Every strategy on real Gloo ranks gives the parameters of one process on the concatenated batch."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import KAISA, KFACSGD, EigenSolver, FactorWise, LayerWise, OfMean, forgetting
from kfac_optim.steering import trust
from tests.helpers.compare import assert_all_near, values
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, KINDS, OFTEN, SETTINGS
from tests.helpers.training import train, trusts_of

STEPS = 10
OPTIONS: dict[str, Any] = {**OFTEN, **FLOAT64}
STRATEGIES = {
    "factor-wise": FactorWise(),
    "layer-wise": LayerWise(),
    "kaisa-half": KAISA(grad_worker_fraction=0.5),
    "kaisa-memory": KAISA(memory_budget="15 KB"),  # of 25 KB of decompositions
}


class Net(nn.Module):
    """Convolution, grouped convolution, norm layer, embedding: pairs, unit-wise blocks, dense factors, a transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Tanh()
        )
        self.words, self.head = nn.Embedding(3, 5), nn.Linear(4 * 3 * 3 + 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        signs = x.mean((1, 2, 3)).sign().long() + 1
        return self.head(torch.cat([self.body(x).flatten(1), self.words(signs)], 1))


BATCH = 12  # every world size up to 4 divides it
SHAPE = (BATCH, 2, 5, 5)


def trained(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> list[Tensor]:
    """Ten steps on this rank's share of every batch."""
    torch.manual_seed(0)
    model = Net().double()
    wrapped: nn.Module = DDP(model) if world_size > 1 else model
    cls, base = KINDS[kind]
    optimizer = cls(model, **{**SETTINGS, **base, **options})
    train(wrapped, optimizer, range(STEPS), shape=SHAPE, rank=rank, world_size=world_size)
    return values(model)


def cases(world_size: int) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """By name: the optimizer, what the ranks and what one process gets; the former adds the strategy."""
    found: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for name, strategy in STRATEGIES.items():
        if name == "kaisa-half" and world_size == 3:
            continue  # 3 ranks have no half; the error is tested with the policy
        for solver in ("eigen", "inverse"):
            found[f"{name}, {solver}"] = ("sgd", {"assignment": strategy}, {"solver": solver})
    for name in ("factor-wise", "layer-wise"):
        found[f"{name}, spread"] = ("sgd", {"assignment": name}, {"spread": 2, "inv_update_steps": 4})
        found[f"{name}, relative"] = ("sgd", {"assignment": name}, {"damping": OfMean(0.1), "scaling": "graft"})
    # Every moment below the average takes weight from the past; four updates to a refresh.
    forgets = {
        "factor_decay": forgetting(0.9, slack=1.0),
        "factor_update_steps": 1,
        "inv_update_steps": 4,
        "scaling": "graft",
    }
    for strategy in (FactorWise(), LayerWise("sharded")):
        found[f"{strategy!r}, forgetting"] = ("sgd", {"assignment": strategy}, forgets)
    for kind in ("momentum", "adam", "lamb"):
        found[f"layer-wise, {kind}"] = (kind, {"assignment": "layer-wise"}, {})
    reduced = {"weight_sharing": "reduce", "skip_layers": [r"body\.2"], "max_factor_dim": 20}
    found["factor-wise, reduce, blocks"] = ("sgd", {}, reduced)
    for name in ("layer-wise", "kaisa-memory"):
        found[f"{name}, blocks"] = ("sgd", {"assignment": STRATEGIES[name]}, {"max_factor_dim": 3, "spread": 2})
    found["factor-wise, diagonal"] = ("sgd", {}, {"max_factor_dim": 1})
    found["factor-wise, one example of each rank"] = ("sgd", {}, {"factor_batch_fraction": world_size / BATCH})
    return found


def train_all(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """Every case in one launch: starting processes costs seconds."""
    return {
        name: trained(rank, world_size, kind, {**ranks, **both})
        for name, (kind, ranks, both) in cases(world_size).items()
    }


@pytest.mark.fast("2")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_equal_one_process(world_size: int) -> None:
    outcomes = run_ranks(world_size, train_all)
    alone: dict[str, list[Tensor]] = {}
    for name, (kind, _, both) in cases(world_size).items():
        key = repr((kind, both))
        if key not in alone:
            alone[key] = trained(0, 1, kind, both)
        assert_all_near([found[name] for found in outcomes], alone[key], case=name)


def workers_of(rank: int, world_size: int) -> set[int]:
    engine = KFACSGD(Net().double(), lr=0.1, assignment=STRATEGIES["kaisa-memory"], **OPTIONS).curvature
    assert engine.memory_estimate()["decompositions"] <= 15_000
    return {len(workers.gradient_workers) for workers in engine.stages.ranks.assignment.layers}


@pytest.mark.slow
def test_the_memory_budget_of_these_tests_bites() -> None:
    assert run_ranks(4, workers_of) == [{2}] * 4


class Counting(EigenSolver):
    """Counts the decompositions of this process."""

    made: ClassVar[int] = 0

    def decompose(self, factor: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        Counting.made += 1
        return super().decompose(factor, shift)


def spread_out(rank: int, world_size: int) -> list[list[int]]:
    """Decompositions made by this rank in each step of two spread refreshes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6))).double()
    optimizer = KFACSGD(DDP(model), lr=0.01, solver=Counting(), factor_update_steps=1, inv_update_steps=4, spread=3)
    counts = []
    for _ in range(9):
        Counting.made = 0
        optimizer.zero_grad()
        model(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        counts.append([Counting.made, optimizer.curvature.stages.refresher.frozen_at or 0])
    return counts


def test_a_spread_refresh_is_shared_by_ranks_and_steps() -> None:
    for counts in run_ranks(2, spread_out):
        made = [number for number, _ in counts]
        assert made[0] == 6, "the first refresh is immediate, half of the twelve factors on each rank"
        assert made[1:4] == [0, 0, 0]
        assert made[4] == 0 and sum(made[5:7]) == 6 and min(made[5:7]) >= 2, "six factors in two steps, none in a third"
        assert [frozen for _, frozen in counts] == [0, 0, 0, 0, 0, 0, 0, 4, 4], "all ranks use them at the same step"


def without_layers(rank: int, world_size: int) -> list[list[Tensor]]:
    """Weights after training by KFACSGD and by SGD, with a group added on the way."""
    found = []
    for cls, options in ((KFACSGD, {"skip_layers": [""]}), (torch.optim.SGD, {})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
        optimizer: Any = cls(model[0].parameters(), lr=0.1, **options)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": model[1].parameters()})
            optimizer.zero_grad()
            model(torch.randn(4, 5, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    return found


def test_ranks_without_a_layer_to_precondition_train_by_the_base_rule() -> None:
    for kfac, sgd in run_ranks(2, without_layers):
        assert all(torch.equal(p, q) for p, q in zip(kfac, sgd, strict=True))


def train_turning(rank: int, world_size: int) -> dict[str, tuple[list[Tensor], list[float]]]:
    """On one batch and at a large rate trust rises, and two of three steps repeat the change of the one before."""
    trust._YOUNG, found = 1, {}
    for name, strategy in STRATEGIES.items() if world_size > 1 else [("one", FactorWise())]:
        torch.manual_seed(0)
        model = Net().double()
        wrapped: nn.Module = DDP(model) if world_size > 1 else model
        optimizer = KFACSGD(model, lr=1.0, momentum=0.9, assignment=strategy, **OPTIONS)
        trusts = trusts_of(wrapped, optimizer, 12, shape=SHAPE, rank=rank, world_size=world_size)
        found[name] = values(model), trusts
    return found


@pytest.mark.usefixtures("soon_grown")
def test_ranks_turn_and_repeat_as_one_process() -> None:
    weights, trusts = train_turning(0, 1)["one"]
    assert any(min(trusts[step - 1 : step + 1]) > 0 for step in range(2, 12, 3)), trusts
    outcomes = run_ranks(2, train_turning)
    for name in STRATEGIES:
        assert all(found[name][1] == trusts for found in outcomes), name
        assert_all_near([found[name][0] for found in outcomes], weights)
