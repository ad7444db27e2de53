"""Factors that one rank alone keeps: the same training, less memory, and states that go on anywhere."""

from __future__ import annotations

import copy
import gc
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import (
    KAISA,
    KFACSGD,
    CurvatureEngine,
    EigenSolver,
    FactorWise,
    KFACAdam,
    LayerAssignment,
    LayerWise,
    OfLargest,
    OfMean,
    memory_estimate,
)
from kfac_optim.diagnostics import plot_history, plot_spectrum
from tests.distributed.test_communication import Odd, train_branching
from tests.distributed.test_distributed import trained
from tests.helpers.compare import assert_all_near, assert_near, assert_same_state, factors_of, values
from tests.helpers.files import packed, unpacked
from tests.helpers.memory import reachable_bytes
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import END, FLOAT64, OFTEN, RESUMED, K
from tests.helpers.solvers import UndampedSolver
from tests.helpers.training import data_of, make_model, share, train
from tests.helpers.versions import FLATTENS_DICTS

SHARDED = {
    "factor-wise": FactorWise("sharded"),
    "layer-wise": LayerWise("sharded"),
    "kaisa-half": KAISA(0.5, factors="sharded"),
}


class OddSharded(Odd):
    """Who decomposes need not precondition; of three layers two are shared out."""

    LAYERS = (
        LayerAssignment((2, 0), (1,), "sharded"),
        LayerAssignment((1, 1), (2, 0)),
        LayerAssignment((0, 2), (2, 1, 0), "sharded"),
    )


SKIP = [r"body\.3", "words"]  # leaves three layers of the net


class Rounding(EigenSolver):
    """Tells the largest eigenvalues in another precision than it stores them in."""

    def largest(self, decomposition: tuple[Tensor, ...]) -> Tensor:
        return super().largest(decomposition).float()


# As one process ------------------------------------------------------------------------------------------------------

SPREAD: dict[str, Any] = {"spread": 2, "inv_update_steps": 4, "factor_update_steps": 1}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "eigen": ("sgd", {}),
    "inverse": ("sgd", {"solver": "inverse"}),
    "eigen, of mean, spread": ("sgd", {"damping": OfMean(0.1), **SPREAD}),
    "inverse, of largest, spread": ("sgd", {"solver": "inverse", "damping": OfLargest(0.01), **SPREAD}),
    "inverse, of mean": ("sgd", {"solver": "inverse", "damping": OfMean(0.1), "scaling": "graft"}),
    "adam": ("adam", {"damping": OfLargest(0.01), "scaling": "graft"}),
    "a solver of one's own": (
        "sgd",
        {"damping": OfLargest(0.01), "solver": Rounding(negligible=0.0), "scaling": "graft"},
    ),
    "undamped, of mean": ("sgd", {"damping": OfMean(0.1), "solver": UndampedSolver()}),
    "reduce, diagonal": ("sgd", {"weight_sharing": "reduce", "skip_layers": [r"body\.2"], "max_factor_dim": 20}),
}
BRANCHING: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 4}


def train_all(rank: int, world_size: int) -> dict[Any, list[Tensor]]:
    """On two ranks every strategy with all options; on more the strategies share the options out."""
    found: dict[Any, list[Tensor]] = {}
    # Three ranks have no half, and that of two is one, as in the layer-wise strategy.
    strategies = {name: each for name, each in SHARDED.items() if name != "kaisa-half" or world_size == 4}
    for i, (name, strategy) in enumerate(strategies.items()):
        for j, (case, (kind, options)) in enumerate(OPTIONS.items()):
            if world_size == 2 or j % len(strategies) == i:
                found[name, case] = trained(rank, world_size, kind, {**options, "assignment": strategy})
        if world_size == 2:
            found["branching", name] = train_branching(rank, world_size, BRANCHING | {"assignment": strategy})
    if world_size == 3:
        found["odd", "eigen"] = trained(rank, world_size, "sgd", {"assignment": OddSharded(), "skip_layers": SKIP})
    return found


@cache
def train_alone(case: str, skip: bool) -> list[Tensor]:
    """One process, which knows no strategies."""
    if case == "branching":
        return train_branching(0, 1, BRANCHING)
    kind, options = OPTIONS[case]
    return trained(0, 1, kind, options | ({"skip_layers": SKIP} if skip else {}))


@pytest.mark.fast("2")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_share_factors_out_equal_one_process(world_size: int) -> None:
    outcomes = run_ranks(world_size, train_all)
    for name, case in outcomes[0]:
        alone = train_alone("branching" if name == "branching" else case, skip=name == "odd")
        assert_all_near([found[name, case] for found in outcomes], alone, case=f"{name}, {case}")


# What is held and what is sent ---------------------------------------------------------------------------------------

WIDTH, DEPTH, EVERY = 24, 12, {"factor_update_steps": 1, "inv_update_steps": 6}
PACKED = 4 * (25 * 26 // 2 + 24 * 25 // 2)  # A with the bias, and G, in float32
DECOMPOSED = 4 * (25 * 25 + 25 + 24 * 24 + 24)
HELD: dict[str, tuple[Any, dict[str, Any]]] = {
    "layer-wise, spread": (LayerWise("sharded"), {"spread": 3}),
    "layer-wise, inverse": (LayerWise("sharded"), {"spread": 0, "solver": "inverse"}),
    "factor-wise, float16": (FactorWise("sharded"), {"spread": 0, "factor_dtype": torch.float16}),
    "local": (LayerWise("local"), {"spread": 0}),
}


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def hold(rank: int, world_size: int) -> dict[str, Any]:
    """Bytes of tensors in the engine between two steps, its own estimate, and what one step of statistics sends."""
    found: dict[str, Any] = {}
    for name, (strategy, options) in HELD.items():
        model = deep()
        optimizer = KFACSGD(DDP(model), lr=0.01, assignment=strategy, **EVERY, **options)
        sent: list[float] = []
        for step in range(EVERY["inv_update_steps"] + options["spread"]):
            before = optimizer.curvature.stages.comm.traffic.get("factors", [0.0, 0.0])[:]
            train(model, optimizer, [(torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long))])
            sent = [
                now - then
                for now, then in zip(
                    optimizer.curvature.stages.comm.traffic.get("factors", (0, 0)), before, strict=True
                )
            ]
            assert step < EVERY["inv_update_steps"] or optimizer.curvature.stages.refresher.in_progress is not None
        gc.collect()
        found[name] = (reachable_bytes(optimizer.curvature), optimizer.curvature.memory_estimate(), sent)
        found["owners", name] = [layer.inverse_workers for layer in optimizer.curvature.stages.ranks.assignment.layers]
    return found


@pytest.fixture(scope="module")
def held() -> list[dict[str, Any]]:
    return run_ranks(4, hold)


@pytest.mark.parametrize("name", HELD)
def test_a_rank_holds_what_the_estimate_says(held: list[dict[str, Any]], name: str) -> None:
    for found in held:
        there, estimate, _ = found[name]
        sources = 3 if HELD[name][1]["spread"] else 2
        numbers = DEPTH * sources * 2 * 2 * 8  # weight and trace of A and of G, on every rank
        if (
            name != "layer-wise, inverse"
        ):  # the eigenvalues of the layers that this rank preconditions, without small ones
            numbers += DEPTH // (1 if name.startswith("factor-wise") else 4) * 4 * (25 + 24)
        assert there == pytest.approx(estimate["total"] + numbers, rel=0.025), "gamma and the like come on top"
        assert estimate["local sums"] == 0


@pytest.mark.parametrize("name", ["layer-wise, spread", "layer-wise, inverse", "local"])
def test_layer_wise_a_rank_holds_its_share(held: list[dict[str, Any]], name: str) -> None:
    """At most 1.2 / R of what one process holds of the same curvature; ahead of training the estimate is the same."""
    strategy, options = HELD[name]
    whole = memory_estimate(deep(), **EVERY, **options)["total"]
    assert whole >= 2 * DEPTH * (PACKED + (DECOMPOSED if name != "layer-wise, inverse" else 0) / 2)
    for found in held:
        assert found[name][0] <= 1.2 / 4 * whole
    ahead = memory_estimate(deep(), world_size=4, assignment=strategy, **EVERY, **options)
    assert ahead in [found[name][1] for found in held]


@pytest.mark.parametrize("name", HELD)
def test_statistics_go_to_the_owner_alone(held: list[dict[str, Any]], name: str) -> None:
    """Bytes of one step: every rank sends what others keep, and gets what it keeps; of local factors nothing."""
    sizes = (4 * 25 * 26 // 2, 4 * 24 * 25 // 2)
    for rank, found in enumerate(held):
        kept = sum(
            size for owners in found["owners", name] for owner, size in zip(owners, sizes, strict=True) if owner == rank
        )
        expected = [0.0, 0.0] if name == "local" else [DEPTH * sum(sizes) - kept, kept]
        assert found[name][2] == expected


# What others know of them --------------------------------------------------------------------------------------------


def look(rank: int, world_size: int) -> dict[str, Any]:
    model = deep()
    optimizer = KFACSGD(DDP(model), lr=0.01, assignment=FactorWise("sharded"), damping=OfMean(0.1), **EVERY)
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)), torch.zeros(4, dtype=torch.long)
    train(model, optimizer, [batch])
    engine = optimizer.curvature
    said = ""
    for layer in engine.layers:
        try:
            engine.factors(layer)
        except RuntimeError as error:
            said = str(error)
    engine.damping = OfLargest(0.1)  # of which the ranks have to know something else
    return {
        "report": engine.report(eigenvalues=True),
        "said": said,
        "owners": [w.inverse_workers for w in engine.stages.ranks.assignment.layers],
    }


def test_reports_are_of_the_factors_that_are_here() -> None:
    both = run_ranks(2, look)
    for rank, found in enumerate(both):
        assert "are on ranks" in found["said"] and "(G)" in found["said"] and "full_state_dict()" in found["said"]
        for owners, (name, layer) in zip(found["owners"], found["report"]["layers"].items(), strict=True):
            assert [layer[side] is not None for side in "AG"] == [owner == rank for owner in owners]
            assert layer["damping"] == both[0]["report"]["layers"][name]["damping"] > 0
            a, g = (both[owner]["report"]["layers"][name][side] for owner, side in zip(owners, "AG", strict=True))
            assert layer["damping"] == pytest.approx(0.1 * a["max"] * g["max"], rel=1e-4)
            assert (layer["condition"] is None) == (owners != (rank, rank))
        plot_history([found["report"]])
        plot_spectrum(found["report"])


# States --------------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd, inverse, spread": (KFACSGD, {"lr": 0.1, "momentum": 0.9, "solver": "inverse", "spread": 3}),
    "adam": (KFACAdam, {"lr": 0.01, "spread": 0, "damping": OfLargest(0.1)}),
    "sgd, replicated": (KFACSGD, {"lr": 0.1, "momentum": 0.9}),
}
SAVED_WITH = dict(zip(CASES, [FactorWise("sharded"), LayerWise("sharded"), FactorWise()], strict=True))
ELSEWHERE = {"replicated": FactorWise(), **SHARDED}


def build(case: str, strategy: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    model = make_model(seed).double()
    cls, options = CASES[case]
    return model, cls(model, **{**RESUMED, **options, "assignment": strategy})


def go_on(model: nn.Module, optimizer: Any, rank: int, world_size: int) -> list[Tensor]:
    train(DDP(model) if world_size > 1 else model, optimizer, range(K, END), rank=rank, world_size=world_size)
    return values(model)


def save(rank: int, world_size: int, folder: str) -> dict[Any, Any]:
    """Per case: a run that is saved in every way on its way, and a copy of it there."""
    found: dict[Any, Any] = {}
    for case, strategy in SAVED_WITH.items():
        model, optimizer = build(case, strategy)
        wrapped = DDP(model)
        train(wrapped, optimizer, range(K), rank=rank, world_size=world_size)
        optimizer.curvature.synchronize()  # for those who are not shared out
        found["part", case] = packed([model.state_dict(), optimizer.state_dict()])
        for how, options in HOW.items():
            state = {
                "model": model.state_dict(),
                "optimizer": get_optimizer_state_dict(wrapped, optimizer, options=options),
            }
            dcp.save(state, checkpoint_id=f"{folder}/{case}/{how}")
        found["whole", case] = packed([model.state_dict(), optimizer.full_state_dict()])
        twin, twin_model = copy.deepcopy((optimizer, model))
        found["final", case] = go_on(model, optimizer, rank, world_size)
        found["copy", case] = go_on(twin_model, twin, rank, world_size)
    return found


HOW = {"nested": StateDictOptions()}
if FLATTENS_DICTS:
    HOW["flat"] = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.fixture(scope="module")
def saved(folder: Path) -> list[dict[Any, Any]]:
    return run_ranks(4, save, str(folder))


def resumptions(world_size: int) -> list[tuple[str, str, str]]:
    """How, from which case and with which strategy: one process in every way, several so that all pairs occur."""
    ways = ["whole", *HOW]
    if world_size == 1:
        return [(how, case, "replicated") for how in ways for case in CASES]
    return [
        (ways[(i + j + world_size // 2) % len(ways)], case, other)
        for i, case in enumerate(CASES)
        for j, other in enumerate(ELSEWHERE)
    ]


def resume(rank: int, world_size: int, files: dict[str, bytes], folder: str) -> dict[Any, Any]:
    """From the whole state or the folder."""
    found: dict[Any, Any] = {}
    for how, case, other in resumptions(world_size):
        model, optimizer = build(case, ELSEWHERE[other], seed=1)
        if how == "whole":
            weights, state = unpacked(files[case])
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        else:
            wrapped, options = DDP(model) if world_size > 1 else model, HOW[how]
            fresh = {
                "model": model.state_dict(),
                "optimizer": get_optimizer_state_dict(wrapped, optimizer, options=options),
            }
            dcp.load(fresh, checkpoint_id=f"{folder}/{case}/{how}")
            model.load_state_dict(fresh["model"])
            set_optimizer_state_dict(wrapped, optimizer, fresh["optimizer"], options=options)
        found[how, case, other] = go_on(model, optimizer, rank, world_size)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.fast("^2")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_goes_on_on_any_ranks_with_any_strategy(
    saved: list[dict[Any, Any]], folder: Path, world_size: int
) -> None:
    """From the whole state as one file, and from the parts of all ranks in a folder of torch's checkpoints."""
    files = {case: saved[0]["whole", case] for case in CASES}
    if world_size == 1:
        outcomes = [resume(0, 1, files, str(folder))]
    else:
        outcomes = run_ranks(world_size, resume, files, str(folder))
    for key in resumptions(world_size):
        assert_all_near([found[key] for found in outcomes], saved[0]["final", key[1]], case=str(key))


@pytest.mark.parametrize("case", CASES)
def test_the_whole_state_is_the_same_on_every_rank(saved: list[dict[Any, Any]], case: str) -> None:
    states = [unpacked(found["whole", case])[1] for found in saved]
    for state in states[1:]:
        assert_same_state(state, states[0])
    assert isinstance(states[0]["param_groups"][0]["kfac_checksum_current"], int)
    model, optimizer = build(case, FactorWise())
    train(model, optimizer, range(K))
    alone = optimizer.full_state_dict()
    for i, expected in alone["state"].items():
        for side in "AG" if "kfac" in expected else ():
            factor = states[0]["state"][i]["kfac"]["current"][side]["value"]
            assert_near(factor, expected["kfac"]["current"][side]["value"], f"{side} of {i}")


@pytest.mark.parametrize("case", CASES)
def test_saving_and_copying_change_nothing(saved: list[dict[Any, Any]], case: str) -> None:
    model, optimizer = build(case, FactorWise())
    train(model, optimizer, range(K))
    expected = go_on(model, optimizer, 0, 1)
    for found in saved:
        assert all(map(torch.equal, found["final", case], found["copy", case]))
        assert_all_near([found["final", case]], expected)


def test_a_part_holds_its_share_and_is_refused_where_more_is_needed(saved: list[dict[Any, Any]]) -> None:
    """The factors of all parts are those of the whole, each once."""
    parts = [unpacked(found["part", "adam"]) for found in saved]
    whole = unpacked(saved[0]["whole", "adam"])[1]
    for i, state in whole["state"].items():
        for source, side in [(s, x) for s in ("current", "in_use") for x in "AG" if "kfac" in state]:
            there = [part[1]["state"][i]["kfac"][source][side] for part in parts]
            assert sum("value" in average for average in there) == 1
            assert all(average["weight"] == state["kfac"][source][side]["weight"] for average in there)
    assert any(part[1]["param_groups"][0]["kfac_checksum_current"] is None for part in parts)
    model, optimizer = build("adam", FactorWise())
    before = values(model)
    for part in parts:
        with pytest.raises(ValueError, match=r"full_state_dict\(\).*torch\.distributed\.checkpoint"):
            optimizer.load_state_dict(part[1])
    assert all(map(torch.equal, values(model), before))


def load_full_state_of_torch(rank: int, world_size: int) -> str:
    """What the optimizer says of a part that torch has filled up with the zeros of a fresh state."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = build("adam", LayerWise("sharded"))
    wrapped = DDP(model)
    train(wrapped, optimizer, range(K), rank=rank, world_size=world_size)
    state = get_optimizer_state_dict(wrapped, optimizer, options=options)
    model, optimizer = build("adam", FactorWise())
    try:
        set_optimizer_state_dict(DDP(model), optimizer, state, options=options)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_part_that_torch_takes_for_the_whole_is_refused() -> None:
    for said in run_ranks(2, load_full_state_of_torch):
        assert "is on another rank" in said and "full_state_dict()" in said and "damaged" not in said, said


# Other layers, other ranks -------------------------------------------------------------------------------------------


def move(rank: int, world_size: int) -> dict[str, Any]:
    """Layers that come later change who keeps the others: in the midst of a refresh, and with one asked for."""
    found: dict[str, Any] = {}
    for name, strategy in {"one": FactorWise(), **SHARDED}.items():
        if (name == "one") != (world_size == 1):
            continue
        for solver in ("eigen", "inverse"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
            later = list(model[2].parameters())
            for p in later:
                p.requires_grad_(False)
            optimizer = KFACSGD(
                [*model[0].parameters(), *model[4].parameters()],
                model=model,
                lr=0.1,
                assignment=strategy,
                solver=solver,
                precondition="gradient",
                **{**RESUMED, "spread": 3, "factor_decay": 0.9},
            )
            wrapped = DDP(model) if world_size > 1 else model
            train(wrapped, optimizer, range(6), rank=rank, world_size=world_size)
            before = [w.inverse_workers for w in optimizer.curvature.stages.ranks.assignment.layers]
            for p in later:
                p.requires_grad_(True)
            optimizer.add_param_group({"params": later})
            wrapped = DDP(model) if world_size > 1 else model
            after = {
                layer.name: w
                for layer, w in zip(
                    optimizer.curvature.layers, optimizer.curvature.stages.ranks.assignment.layers, strict=True
                )
            }
            found["moved", name, solver] = before != [after[i].inverse_workers for i in ("0", "4")]
            if solver == "inverse":  # moves them outside of a step, which else does so
                optimizer.curvature.synchronize()
            train(wrapped, optimizer, range(6, 12), rank=rank, world_size=world_size)
            found["weights", name, solver] = values(model)
    return found


@pytest.mark.slow
def test_factors_move_when_layers_come() -> None:
    alone, outcomes = move(0, 1), run_ranks(4, move)
    assert any(outcomes[0]["moved", name, "eigen"] for name in SHARDED)
    for name in SHARDED:
        for solver in ("eigen", "inverse"):
            found = [outcome["weights", name, solver] for outcome in outcomes]
            assert_all_near(found, alone["weights", "one", solver], case=f"{name}, {solver}")


def leave(rank: int, world_size: int) -> str:
    """A pickle of a rank's part, opened by one process alone; an engine that stands alone, saved and loaded."""
    model = make_model().double()
    optimizer = KFACSGD(model, lr=0.1, assignment=LayerWise("sharded"), **OFTEN, **FLOAT64)
    train(model, optimizer, range(2))
    state = optimizer.curvature.full_state_dict()
    other = CurvatureEngine(make_model().double(), assignment=FactorWise("sharded"), **OFTEN, **FLOAT64)
    other.load_state_dict(state)
    assert_same_state(other.full_state_dict()["layers"], state["layers"])
    file = pickle.dumps((model, optimizer))
    dist.destroy_process_group()
    try:
        pickle.loads(file)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_pickled_part_goes_on_nowhere_else() -> None:
    for rank, said in enumerate(run_ranks(2, leave)):
        assert f"only the factors of rank {rank} of 2" in said and "full_state_dict()" in said


def keep(rank: int, world_size: int) -> None:
    """A whole state that is kept while training goes on, as a thread that saves it does."""
    model = make_model().double()
    optimizer = KFACSGD(model, lr=0.1, assignment=LayerWise("sharded"), **OFTEN, **FLOAT64)
    train(model, optimizer, range(2))
    state = optimizer.curvature.full_state_dict()
    kept = copy.deepcopy(state)
    train(model, optimizer, range(2, 4))
    assert_same_state(state["layers"], kept["layers"])


def test_gathered_factors_are_copies() -> None:
    run_ranks(2, keep)


def join_late(rank: int, world_size: int, file: bytes, folder: str) -> list[list[Tensor]]:
    """Built and loaded as one process, before torch.distributed is up; from the first step on, rank of many."""
    dist.destroy_process_group()
    found = []
    for i, strategy in enumerate([LayerWise("sharded"), FactorWise("sharded")]):
        model, optimizer = build("adam", strategy, seed=1)
        weights, state = unpacked(file)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        dist.init_process_group("gloo", init_method=f"file://{folder}/late-{i}", rank=rank, world_size=world_size)
        found.append(go_on(model, optimizer, rank, world_size))
        states = [
            state["kfac"]["current"][side] for state in optimizer.state.values() if "kfac" in state for side in "AG"
        ]
        assert ["value" in state for state in states] == [
            owner == rank
            for layer in optimizer.curvature.stages.ranks.assignment.layers
            for owner in layer.inverse_workers
        ]
        dist.destroy_process_group()
    return found


def test_factors_are_shared_out_when_ranks_find_each_other(saved: list[dict[Any, Any]], tmp_path: Path) -> None:
    for found in run_ranks(2, join_late, saved[0]["whole", "adam"], str(tmp_path)):
        assert_all_near(found, saved[0]["final", "adam"])


# A rank's own statistics ---------------------------------------------------------------------------------------------


def of_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    """The factors that this rank keeps after steps on data of its own; and a training on data that all share."""
    found: dict[str, Any] = {}
    for name, strategy in {"layer-wise": LayerWise("local"), "factor-wise": FactorWise("local")}.items():
        model = make_model().double()
        optimizer = KFACSGD(model, lr=0.0, assignment=strategy, **OFTEN, **FLOAT64)
        wrapped = DDP(model)
        seen: list[set[int]] = []

        def look(into: list[set[int]] = seen, engine: Any = optimizer.curvature) -> None:
            into.append(set(engine.stages.capture._passes.statistics.sums))

        train(wrapped, optimizer, range(4), rank=rank, world_size=world_size, before_step=look)
        workers = optimizer.curvature.stages.ranks.assignment.layers
        own = {i for i, layer in enumerate(workers) if rank in layer.inverse_workers}
        assert seen == [own, set()] * 2, "moments of other ranks' layers are not even taken"
        kept = {}
        for block in optimizer.curvature.stages.blocks:
            current = block.factors("current")
            kept |= {f"{block.layer.name}.{'AG'[i]}": current.matrix(i) for i in range(2) if current.kept(i)}
        found["kept", name] = kept
        found["sent", name] = "factors" in optimizer.curvature.stages.comm.traffic
        model = make_model().double()
        optimizer = KFACSGD(model, lr=0.1, momentum=0.9, assignment=strategy, **OFTEN, **FLOAT64)
        train(DDP(model), optimizer, range(10))  # the same on all ranks
        found["shared", name] = values(model)
    return found


def test_local_factors_are_those_of_their_owner_s_statistics() -> None:
    ranks = 3
    outcomes = run_ranks(ranks, of_one_rank)
    own = []
    for rank in range(ranks):
        model = make_model().double()
        optimizer = KFACSGD(model, lr=0.0, **OFTEN, **FLOAT64)
        train(model, optimizer, [share(data_of(step), rank, ranks) for step in range(4)])
        own.append(factors_of(optimizer))
    for name in ("layer-wise", "factor-wise"):
        assert sorted(key for found in outcomes for key in found["kept", name]) == sorted(own[0])
        for rank, found in enumerate(outcomes):
            assert not found["sent", name]
            for key, factor in found["kept", name].items():
                assert_near(factor, own[rank][key], f"{key} on rank {rank}, {name}")


@pytest.mark.slow
def test_local_factors_of_equal_batches_train_as_one_process() -> None:
    model = make_model().double()
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **OFTEN, **FLOAT64)
    train(model, optimizer, range(10))
    outcomes = run_ranks(2, of_one_rank)
    for name in ("layer-wise", "factor-wise"):
        assert_all_near([found["shared", name] for found in outcomes], values(model), case=name)
