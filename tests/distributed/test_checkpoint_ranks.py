"""Saved on some ranks, resumed on others: the run goes on as if nothing had happened."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import KAISA, KFACLAMB, KFACSGD, FactorWise, KFACAdam, LayerWise
from tests.helpers.compare import assert_all_near, assert_same_state, leaves, values
from tests.helpers.files import packed, unpacked
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import CLASSES, END, RESUMED, K
from tests.helpers.training import make_model, train
from tests.helpers.versions import FLATTENS_DICTS

HALF = KAISA(grad_worker_fraction=0.5)
STRATEGIES = {"factor-wise": FactorWise(), "layer-wise": LayerWise(), "kaisa": HALF}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (KFACSGD, {}),
    "sgd, inverse, spread": (KFACSGD, {"solver": "inverse", "spread": 3}),
    "adam, spread": (KFACAdam, {"spread": 3}),
    "lamb, inverse": (KFACLAMB, {"solver": "inverse"}),
}
SAVED_WITH = dict(zip(CASES, [FactorWise(), LayerWise(), HALF, HALF], strict=True))


def build(case: str, strategy: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    model = make_model(seed).double()
    cls, options = CASES[case]
    return model, cls(model, **{**CLASSES[cls], **RESUMED, "assignment": strategy, **options})


def differ(found: list[Tensor], expected: list[Tensor]) -> bool:
    """By far more than rounding, somewhere."""
    return any(float((p - q).abs().max()) > 1e-6 for p, q in zip(found, expected, strict=True))


# What is saved on four ranks -----------------------------------------------------------------------------------------


def save(rank: int, world_size: int) -> dict[Any, Any]:
    """Per case: an uninterrupted run and its state on the way; a run that is saved, by rank 0, on the way."""
    found: dict[Any, Any] = {}
    for case, strategy in SAVED_WITH.items():
        model, optimizer = build(case, strategy)
        wrapped = DDP(model)
        train(wrapped, optimizer, range(K), rank=rank, world_size=world_size)
        found["lost", case] = packed([model.state_dict(), optimizer.state_dict()])
        train(wrapped, optimizer, range(K, END), rank=rank, world_size=world_size)
        found["final", case] = values(model)

        model, optimizer = build(case, strategy)
        wrapped = DDP(model)
        train(wrapped, optimizer, range(K), rank=rank, world_size=world_size)
        optimizer.curvature.synchronize()
        if rank == 0:  # alone; the others go on
            found["saved", case] = packed([model.state_dict(), optimizer.state_dict()])
        train(wrapped, optimizer, range(K, K + 1), rank=rank, world_size=world_size)
        optimizer.curvature.synchronize()
        found["state of all", case] = packed(optimizer.state_dict())
        train(wrapped, optimizer, range(K + 1, END), rank=rank, world_size=world_size)
        found["final after saving", case] = values(model)
    return found


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[Any, Any]]:
    return run_ranks(4, save)


def resume(checkpoint: bytes, case: str, strategy: Any, rank: int, world_size: int) -> tuple[list[Tensor], Any]:
    """The second half of a run, in an optimizer that was built for other weights."""
    model, optimizer = build(case, strategy, seed=1)
    weights, state = unpacked(checkpoint)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(DDP(model) if world_size > 1 else model, optimizer, range(K, END), rank=rank, world_size=world_size)
    return values(model), optimizer.curvature.report()


def resume_all(rank: int, world_size: int, checkpoints: dict[Any, bytes]) -> dict[Any, Any]:
    """With every strategy what was saved after synchronising; what was not, with one of them."""
    found = {}
    for (kind, case), checkpoint in checkpoints.items():
        for name, strategy in STRATEGIES.items():
            if kind == "saved" or name == "layer-wise":
                found[kind, case, name] = resume(checkpoint, case, strategy, rank, world_size)
    return found


@pytest.fixture(scope="module")
def checkpoints(four_ranks: list[dict[Any, Any]]) -> dict[Any, bytes]:
    """By ("saved" or "lost", case)."""
    return {key: value for key, value in four_ranks[0].items() if key[0] in ("saved", "lost")}


@pytest.fixture(scope="module", params=[1, 2, 4])
def resumed(request: pytest.FixtureRequest, checkpoints: dict[Any, bytes]) -> list[dict[Any, Any]]:
    if request.param > 1:
        return run_ranks(request.param, resume_all, checkpoints)
    return [{(*key, "factor-wise"): resume(file, key[1], FactorWise(), 0, 1) for key, file in checkpoints.items()}]


@pytest.mark.fast("^2")
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_on_any_ranks_with_any_strategy(
    four_ranks: list[dict[Any, Any]], resumed: list[dict[Any, Any]], case: str
) -> None:
    """After ``synchronize()``: as on the four ranks that were not interrupted."""
    expected = four_ranks[0]["final", case]
    names = [name for kind, name_of_case, name in resumed[0] if kind == "saved" and name_of_case == case]
    assert len(names) == (1 if len(resumed) == 1 else 3)
    for found in resumed:
        for name in names:
            assert_all_near([found["saved", case, name][0]], expected)


@pytest.mark.parametrize("case", CASES)
def test_saving_changes_nothing(four_ranks: list[dict[Any, Any]], case: str) -> None:
    """Rank 0 asks for its state alone, and nobody waits; synchronising is exchanging earlier."""
    for found in four_ranks:
        assert_all_near([found["final after saving", case]], four_ranks[0]["final", case])
        assert_all_near([found["final", case]], four_ranks[0]["final", case])


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_same_state(four_ranks: list[dict[Any, Any]], case: str) -> None:
    """Key by key, bit for bit, with and without ``synchronize()``: what a rank alone has seen is not in it."""
    for found in four_ranks[1:]:
        assert_same_state(unpacked(found["state of all", case]), unpacked(four_ranks[0]["state of all", case]))
        assert_same_state(unpacked(found["lost", case])[1], unpacked(four_ranks[0]["lost", case])[1])


@pytest.mark.parametrize("case", CASES)
def test_a_synchronised_state_is_that_of_one_process(four_ranks: list[dict[Any, Any]], case: str) -> None:
    """All values; a state that was not synchronised has the sums of the last refresh instead."""
    model, optimizer = build(case, FactorWise())
    train(model, optimizer, range(K))
    expected = dict(leaves(unpacked(packed(optimizer.state_dict()))))
    saved, lost = (dict(leaves(unpacked(four_ranks[0][kind, case])[1])) for kind in ("saved", "lost"))
    assert saved.keys() == lost.keys() == expected.keys()
    # A of the LayerNorm (parameter 3) is the constant 1, whatever it is counted with.
    # Checksums tell the last bits, which the order of sums changes.
    varying = [p for p in expected if not (p.startswith(".state.3.kfac") and ".A." in p) and "checksum" not in p]
    pooled = [path for path in varying if ".current.A." in path or ".current.G." in path]
    assert len(pooled) == 3 * (2 * 2 + 1), "value, weight and trace"
    for path in varying:
        torch.testing.assert_close(saved[path], expected[path], rtol=1e-9, atol=1e-9, equal_nan=True)
        if path not in pooled:
            torch.testing.assert_close(lost[path], expected[path], rtol=1e-9, atol=1e-9, equal_nan=True)
    frozen = "pending" if "spread" in case else "in_use"
    for path in pooled:
        assert torch.equal(lost[path], lost[path.replace(".current.", f".{frozen}.")]), path
        assert differ([lost[path]], [saved[path]]), path


def train_without_the_last_statistics(case: str) -> list[Tensor]:
    """One process that collects nothing between the refresh at step 4 and the interruption."""
    model, optimizer = build(case, FactorWise())
    for step in range(END):
        train(model, optimizer, range(step, step + 1))
        optimizer.curvature.factor_update_steps = 10**6 if 4 <= step < K - 1 else 1
    return values(model)


@pytest.mark.fast("^1")
@pytest.mark.parametrize("case", CASES)
def test_without_synchronising_one_interval_of_statistics_is_lost(
    four_ranks: list[dict[Any, Any]], resumed: list[dict[Any, Any]], case: str
) -> None:
    """And nothing else: as if they had never been collected."""
    expected = train_without_the_last_statistics(case)
    assert differ(expected, four_ranks[0]["final", case])
    for found in resumed:
        name = "factor-wise" if len(resumed) == 1 else "layer-wise"
        assert_all_near([found["lost", case, name][0]], expected)


@pytest.mark.slow
def test_traffic_is_reported_per_step_of_this_run(resumed: list[dict[Any, Any]]) -> None:
    """A resumed run has sent nothing in the steps before."""
    if len(resumed) == 1:
        assert resumed[0]["saved", "sgd", "factor-wise"][1]["traffic"] == {}, "one process sends nothing"
        return
    # Linear layers and a LayerNorm of 6 channels, [d_out, d_in] with the bias column, float64: each travels every step.
    total = 8 * (6 * 5 + 3 * 7 + 6 * 2)
    traffic = [found["saved", "sgd", "layer-wise"][1]["traffic"]["directions"] for found in resumed]
    assert sum(found["sent"] for found in traffic) == pytest.approx(total, rel=1e-12)
    assert sum(found["received"] for found in traffic) == pytest.approx(total * (len(resumed) - 1), rel=1e-12)


def load_on_one_rank(rank: int, world_size: int, checkpoint: bytes) -> str:
    """What the next step says."""
    model, optimizer = build("sgd", FactorWise())
    if rank == 0:
        optimizer.load_state_dict(unpacked(checkpoint)[1])
    try:
        train(DDP(model), optimizer, range(K, K + 1), rank=rank, world_size=world_size)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_that_loaded_different_states_are_told() -> None:
    """A state that is loaded on rank 0 alone: an error on every rank rather than a hang or a crash."""
    model, optimizer = build("sgd", FactorWise())
    train(model, optimizer, range(K))
    checkpoint = packed([model.state_dict(), optimizer.state_dict()])
    for said in run_ranks(2, load_on_one_rank, checkpoint, group_timeout=timedelta(seconds=10), limit=40):
        assert "different" in said and "every rank" in said, said


# Keys and shapes -----------------------------------------------------------------------------------------------------


def keys_and_shapes(state: Any) -> dict[str, Any]:
    """Where what stands."""
    return {
        path: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)
        for path, value in leaves(state)
    }


def states_of_all_strategies(rank: int, world_size: int, at: tuple[int, ...]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    names = STRATEGIES if world_size > 1 else ["factor-wise"]
    for name in names:
        for case in ("sgd", "adam, spread"):
            model, optimizer = build(case, STRATEGIES[name])
            wrapped = DDP(model) if world_size > 1 else model
            found[name, case, "before"] = keys_and_shapes(optimizer.state_dict())
            for steps in at:
                first = optimizer.curvature.step_count
                train(wrapped, optimizer, range(first, steps), rank=rank, world_size=world_size)
                state = optimizer.state_dict()
                found[name, case, steps] = keys_and_shapes(state)
                found["counters", name, case, steps] = {
                    key: value for key, value in state["param_groups"][0].items() if key.startswith("kfac")
                }
    return found


def without_checksums(counters: dict[str, Any]) -> dict[str, Any]:
    """They tell the last bits of the factors, which the order of sums over ranks changes."""
    return {name: value for name, value in counters.items() if "checksum" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_keys_and_shapes_do_not_depend_on_ranks_or_strategy(world_size: int) -> None:
    """Nor do the counters' values; there is nothing before the first step."""
    at = (1, 5)
    (expected,) = [states_of_all_strategies(0, 1, at)]
    for found in run_ranks(world_size, states_of_all_strategies, at):
        assert len(found) == 3 * len(expected)
        for name in STRATEGIES:
            for case in ("sgd", "adam, spread"):
                assert not any(path.startswith(".state.") for path in found[name, case, "before"])
                assert found[name, case, "before"] == expected["factor-wise", case, "before"]
                for steps in at:
                    assert found[name, case, steps] == expected["factor-wise", case, steps]
                    assert any(path.endswith(".kfac.current.A.value") for path in found[name, case, steps])
                    counters = without_checksums(expected["counters", "factor-wise", case, steps])
                    assert counters["kfac_step"] == steps
                    assert without_checksums(found["counters", name, case, steps]) == counters


# torch.distributed.checkpoint ----------------------------------------------------------------------------------------

HOW = {"nested": StateDictOptions()}
if FLATTENS_DICTS:
    HOW["flat"] = StateDictOptions(flatten_optimizer_state_dict=True)


def dcp_state(model: nn.Module, optimizer: Any, how: str) -> dict[str, Any]:
    """What is put into a checkpoint: of the module without its wrapper."""
    inner = model.module if isinstance(model, DDP) else model
    return {"model": inner.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=HOW[how])}


def set_dcp_state(model: nn.Module, optimizer: Any, state: dict[str, Any], how: str) -> None:
    inner = model.module if isinstance(model, DDP) else model
    inner.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=HOW[how])


def round_trips(rank: int, world_size: int, folder: str) -> dict[Any, Any]:
    """Through memory and through a folder, on two ranks."""
    found: dict[Any, Any] = {}
    for case in CASES:
        for how in HOW:
            model, optimizer = build(case, LayerWise())
            wrapped = DDP(model)
            train(wrapped, optimizer, range(K), rank=rank, world_size=world_size)
            optimizer.curvature.synchronize()
            state = dcp_state(wrapped, optimizer, how)
            content = packed(state)
            dcp.save(state, checkpoint_id=f"{folder}/{case}/{how}")
            train(wrapped, optimizer, range(K, END), rank=rank, world_size=world_size)
            found["final", case, how] = values(model)

            resumed, again = build(case, FactorWise(), seed=1)
            wrapped = DDP(resumed)
            set_dcp_state(wrapped, again, unpacked(content), how)
            train(wrapped, again, range(K, END), rank=rank, world_size=world_size)
            found["memory", case, how] = values(resumed)
            found["folder", case, how] = resume_from_folder(rank, world_size, folder, case, how)
    return found


def resume_from_folder(rank: int, world_size: int, folder: str, case: str, how: str) -> list[Tensor]:
    """As the tutorials do it: a fresh optimizer's state is what the checkpoint is read into."""
    model, optimizer = build(case, LayerWise(), seed=1)
    wrapped = DDP(model) if world_size > 1 else model
    state = dcp_state(wrapped, optimizer, how)
    dcp.load(state, checkpoint_id=f"{folder}/{case}/{how}")
    set_dcp_state(wrapped, optimizer, state, how)
    train(wrapped, optimizer, range(K, END), rank=rank, world_size=world_size)
    return values(model)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict[Any, Any]]:
    return run_ranks(2, round_trips, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_distributed_checkpoint_round_trip(two_ranks: list[dict[Any, Any]], case: str, how: str) -> None:
    for found in two_ranks:
        assert_all_near([found["memory", case, how]], found["final", case, how])
        assert_all_near([found["folder", case, how]], found["final", case, how])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_two_ranks_is_loaded_on_one(
    two_ranks: list[dict[Any, Any]], folder: Path, case: str, how: str
) -> None:
    assert_all_near([resume_from_folder(0, 1, str(folder), case, how)], two_ranks[0]["final", case, how])


def ask_for_the_state_of_a_fresh_optimizer(rank: int, world_size: int) -> dict[Any, Any]:
    """Parameters and counters after it, and training from there and without it."""
    found: dict[Any, Any] = {}
    for name, strategy in STRATEGIES.items():
        if name == "kaisa":
            continue
        for case in ("sgd", "sgd, inverse, spread"):
            plain = {"weight_decay": 0.0}  # SGD's first momentum buffer is weight_decay * weight
            model, optimizer = build(case, strategy)
            optimizer.param_groups[0].update(plain)
            wrapped = DDP(model)
            start, counters = values(model), keys_and_values(optimizer)
            state = get_optimizer_state_dict(wrapped, optimizer)
            found["unchanged", name, case] = all(map(torch.equal, values(model), start))
            found["counters", name, case] = (counters, keys_and_values(optimizer))
            found["state", name, case] = [path for path, _ in leaves(state) if path.endswith("kfac.current.A.value")]
            train(wrapped, optimizer, range(K), rank=rank, world_size=world_size)
            twin, other = build(case, strategy)
            other.param_groups[0].update(plain)
            train(DDP(twin), other, range(K), rank=rank, world_size=world_size)
            found["trained", name, case] = (values(model), values(twin))
    return found


def ask_on_one_rank(rank: int, world_size: int, strategy: Any) -> list[Tensor]:
    model, optimizer = build("sgd", strategy)
    wrapped = DDP(model)
    if rank == 0:
        get_optimizer_state_dict(wrapped, optimizer)
    optimizer.state.clear()  # SGD's first momentum buffer is weight_decay * weight
    train(wrapped, optimizer, range(K), rank=rank, world_size=world_size)
    return values(model)


@pytest.mark.parametrize("strategy", [FactorWise(), LayerWise(), LayerWise("sharded")], ids=repr)
def test_one_rank_may_ask_a_fresh_optimizer_for_its_state(strategy: Any) -> None:
    model, optimizer = build("sgd", FactorWise())
    train(model, optimizer, range(K))
    assert_all_near(run_ranks(2, ask_on_one_rank, strategy), values(model))


def keys_and_values(optimizer: Any) -> dict[str, Any]:
    return {key: value for key, value in optimizer.param_groups[0].items() if key.startswith("kfac")}


@pytest.mark.slow
def test_asking_for_the_state_of_a_fresh_optimizer_changes_nothing() -> None:
    """DCP takes a step on zero gradients to fill it; both ranks go on as if it had not been."""
    for found in run_ranks(2, ask_for_the_state_of_a_fresh_optimizer):
        for kind, name, case in found:
            value = found[kind, name, case]
            if kind == "unchanged":
                assert value is True
            elif kind == "counters":
                assert value[0] == value[1]
                assert value[0]["kfac_step"] == 0
            elif kind == "state":
                assert len(value) == 3, "the state of every layer is there"
            else:
                assert all(map(torch.equal, *value))
