"""Ranks that part without a word: all of them hear of it, at the next refresh at the latest, and of what differs."""

from __future__ import annotations

import copy
import math
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import (
    KFACSGD,
    FactorWise,
    KLClip,
    LocalCommunicator,
    OfLargest,
    OfMean,
    exponential_decay,
    forgetting,
)
from tests.helpers.compare import assert_all_near, assert_equal_on_ranks, values
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, SETTINGS
from tests.helpers.training import average_gradients, make_model, train
from tests.helpers.versions import needs_sharding_on_cpus

STEPS = 24
OPTIONS: dict[str, dict[str, Any]] = {
    "factor-wise": {"assignment": "factor-wise"},
    "layer-wise": {"assignment": "layer-wise"},
    "kaisa": {"assignment": "kaisa"},
    "spread": {"assignment": "factor-wise", "spread": 3},
    "layer-wise, spread": {"assignment": "layer-wise", "spread": 3},
    "sharded": {"assignment": FactorWise("sharded")},
}


def make(rank: int, options: dict[str, Any]) -> tuple[nn.Module, KFACSGD]:
    model = DDP(make_model())
    often = {"factor_update_steps": 2, "inv_update_steps": 5, "spread": 0}
    given = {**often, "factor_decay": 0.95, "damping": 0.1, **options}
    return model, KFACSGD(model, lr=0.05, momentum=0.9, **given)


def change(optimizer: KFACSGD, what: str) -> None:
    engine = optimizer.curvature
    if what == "damping":
        engine.damping = 0.4
    elif what == "function":
        engine.damping = exponential_decay(0.2, 0.5, 7).__call__  # no schedule that is known
    elif what == "schedule":
        engine.damping = exponential_decay(0.2, 0.5, 7)
    elif what == "kind":
        engine.damping = OfMean(0.1)
    elif what == "scaling":
        engine.scaling = KLClip(0.5)
    elif what == "decay":
        engine.factor_decay = 0.5
    elif what == "slack":
        engine.factor_decay = forgetting(0.95)


def train_changed(rank: int, world_size: int, name: str, what: str) -> int:
    """One rank changes a hyperparameter after the step of number 6; returns how many steps were taken."""
    model, optimizer = make(rank, OPTIONS[name])
    try:
        for step in range(STEPS):
            train(model, optimizer, [step], rank=rank, world_size=world_size)
            if step == 6 and rank == world_size - 1:
                change(optimizer, what)
    except RuntimeError as error:
        raise RuntimeError(f"at step {step}: {error}") from error
    return STEPS


@pytest.mark.parametrize("name", ["factor-wise", "layer-wise"])
def test_damping_set_on_one_rank_only(name: str) -> None:
    for story in run_ranks(2, train_changed, name, "damping", may_fail=True):
        assert "at step 8: the ranks have built different optimizers" in str(story), story
        assert "damping is 0.1 on rank 0, 0.4 on rank 1." in str(story), story


def test_damping_as_a_function_shows_its_value_at_the_step() -> None:
    for story in run_ranks(3, train_changed, "factor-wise", "function", may_fail=True):
        value = exponential_decay(0.2, 0.5, 7)(8)
        assert f"damping is 0.1 on rank 0, 1, {value!r} on rank 2." in str(story), story


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("kind", "damping is 0.1 on rank 0, ('OfMean', 0.1) on rank 1"),
        ("schedule", "damping is 0.1 on rank 0, ('exponential_decay', 0.2, 0.5, 7, 0.0) on rank 1"),
        ("scaling", "scaling is ('Graft', None, None) on rank 0, ('KLClip', 0.5) on rank 1"),
        ("decay", "factor_decay is 0.95 on rank 0, 0.5 on rank 1"),
        ("slack", "factor_decay is 0.95 on rank 0, ('forgetting', 0.95, 3.0) on rank 1"),
    ],
)
def test_whatever_is_set_on_one_rank_only(what: str, text: str) -> None:
    for story in run_ranks(2, train_changed, "factor-wise", what, may_fail=True):
        assert text in str(story), story


def train_on_plateaus(rank: int, world_size: int) -> None:
    """A scheduler that sees a rank's own loss, which falls on the first rank alone."""
    model, optimizer = make(rank, {})
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    losses = iter([9.0 - (1 - rank) * step for step in range(STEPS)])
    train(model, optimizer, range(STEPS), lambda: scheduler.step(next(losses)), rank=rank, world_size=world_size)


def test_rates_that_differ_are_told_apart() -> None:
    for story in run_ranks(2, train_on_plateaus, may_fail=True):
        assert "rate is 0.05 on rank 0, 0.005" in str(story) and "ReduceLROnPlateau" in str(story), story


def build_differently(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(20)]
    skip = ["^17$"] if rank else []
    model = DDP(nn.Sequential(*layers))
    train(model, KFACSGD(model, lr=0.1, skip_layers=skip), [0], rank=rank, world_size=world_size)


def test_layers_that_differ_are_named() -> None:
    for story in run_ranks(2, build_differently, may_fail=True):
        assert "layers is" in str(story) and "17" in str(story), story
        assert "pipeline stages" in str(story) and "communicator=TorchCommunicator(group)" in str(story), story


def train_with_nan(rank: int, world_size: int, name: str, when: int, everywhere: bool) -> Any:
    """A gradient becomes NaN after the all-reduce."""
    model, optimizer = make(rank, OPTIONS[name])
    seen: list[int] = []

    def poison() -> None:
        if len(seen) == when and (everywhere or rank == world_size - 1):
            weight = model.module[0].weight  # type: ignore[index, union-attr]
            weight.grad[0, 0] = math.nan
        seen.append(0)

    try:
        train(model, optimizer, range(STEPS), rank=rank, world_size=world_size, before_step=poison)
    except RuntimeError as error:
        raise RuntimeError(f"at step {len(seen) - 1}: {error}") from error
    return values(model), optimizer.curvature.stages.counters()


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *(("factor-wise", when) for when in (0, 6, 10)),
        *(("layer-wise", when) for when in (6, 10)),
        ("kaisa", 6),
        *(("spread", when) for when in (6, 13)),
        ("layer-wise, spread", 13),
        *(("sharded", when) for when in (0, 6, 7)),
    ],
)
def test_a_nan_on_one_rank_only(name: str, when: int) -> None:
    """Before, at and after a refresh, and while one is worked off."""
    outcomes = run_ranks(2, train_with_nan, name, when, False, may_fail=True, group_timeout=timedelta(seconds=20))
    for story in outcomes:
        assert "the ranks have diverged: a gradient was not finite on some ranks only" in str(story), story
        assert "skipped_steps is 0 on rank 0, 1 on rank 1" in str(story), story
        step = int(str(story).split("RuntimeError: at step ")[1].split(":")[0])
        assert when <= step <= when + 5 + (when == 0), story


def train_with_nans(rank: int, world_size: int) -> list[Any]:
    return [train_with_nan(rank, world_size, name, when, True) for name in OPTIONS for when in (0, 6, 10, 13)]


@pytest.mark.slow
def test_a_nan_on_all_ranks_is_a_skipped_step_as_ever() -> None:
    for first, second in zip(*run_ranks(2, train_with_nans), strict=True):
        assert all(torch.equal(p, q) and bool(p.isfinite().all()) for p, q in zip(first[0], second[0], strict=True))
        assert first[1] == second[1]
        assert (first[1]["skipped_steps"], first[1]["step"]) == (1, STEPS - 1)


def train_and_change(rank: int, world_size: int, change: str) -> tuple[list[torch.Tensor], list[float]]:
    """All ranks constrain a layer, or one puts other weights in, as for an evaluation, and its own back."""
    model = DDP(make_model())
    optimizer = KFACSGD(model, lr=0.01, momentum=0.9)
    for step in range(STEPS):
        train(model, optimizer, [step], rank=rank, world_size=world_size)
        with torch.no_grad():
            for p in model.parameters() if change == "evaluates" and rank == 0 else ():
                own = p.clone()
                p.mul_(0.9)
                p.copy_(own)
            if change == "constrains":
                next(model.parameters()).data.clamp_(-0.1, 0.1)
    return values(model), [block.reach for block in optimizer.curvature.stages.blocks]


def test_ranks_do_not_part_where_one_of_them_evaluates_other_weights() -> None:
    found, expected = (run_ranks(2, train_and_change, change) for change in ("evaluates", ""))
    for (weights, reaches), (without, others) in zip(found, expected, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(weights, without, strict=True))
        assert reaches == others and len(set(reaches)) > 1, "nothing was learned of stretches"


def test_ranks_that_constrain_a_layer_alike_learn_that_together() -> None:
    (weights, reaches), (others, same) = run_ranks(2, train_and_change, "constrains")
    assert all(torch.equal(p, q) for p, q in zip(weights, others, strict=True))
    assert reaches == same and reaches[0] <= 0.01 and len(set(reaches)) > 1


class Masked(torch.nn.Module):
    """Its weight is used without calling the layer that holds it."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(d_in, d_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.inner.weight, self.inner.bias)


def train_unseen(rank: int, world_size: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(Masked(4, 6), torch.nn.Tanh(), Masked(6, 3)))
    optimizer = KFACSGD(model, lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))).square().mean().backward()
        optimizer.step()
    return values(model)


@pytest.mark.filterwarnings("ignore:.*never seen")
def test_ranks_whose_layers_are_never_called_go_on_together() -> None:
    first, second = run_ranks(2, train_unseen)
    assert all(torch.equal(p, q) and bool(p.isfinite().all()) for p, q in zip(first, second, strict=True))


# Ranks that may differ -----------------------------------------------------------------------------------------------


def round_differently(rank: int, world_size: int, by: float, notches: int, fell: bool | None = None) -> list[Any]:
    """The last rank changes what it has learned as other roundings do, or by more; returns what all know in the end."""
    model, optimizer = make(rank, {"damping": OfLargest(0.03)})
    engine = optimizer.curvature
    for step in range(STEPS):
        train(model, optimizer, [step], rank=rank, world_size=world_size)
        if step in (6, 13) and rank == world_size - 1:
            engine.stages.steering.brake.usual *= by
            engine.stages.steering.trust.notches += notches
            for block in engine.stages.blocks:
                block.set_learned(reach=block.reach * by, fell=block.learned("fell") if fell is None else fell)
    return [engine.stages.built()["usual_length"], [block.reach for block in engine.stages.blocks], values(model)]


def test_what_ranks_round_differently_becomes_that_of_the_first() -> None:
    known, *others = run_ranks(3, round_differently, 1 + 1e-6, 0)
    for other in others:
        assert known[:2] == other[:2]
        torch.testing.assert_close(other[2], known[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("by", "notches", "fell", "named"),
    [
        (1.01, 0, None, "usual_length is"),
        (1.0, 1, None, "trust is"),
        (math.inf, 0, None, "usual_length is"),
        (1.0, 0, False, "fell is"),
    ],
)
def test_what_differs_by_more_is_no_rounding(by: float, notches: int, fell: bool | None, named: str) -> None:
    for story in run_ranks(2, round_differently, by, notches, fell, may_fail=True):
        assert named in str(story) and "LocalCommunicator() for a rank alone" in str(story), story


def train_apart(rank: int, world_size: int, options: dict[str, Any]) -> None:
    model = make_model(seed=rank)
    train(model, KFACSGD(model, lr=0.05, **options), range(2))


@pytest.mark.parametrize("options", [{}, {"precondition": "gradient", "scaling": "kl_clip", "damping": 0.1}])
def test_models_of_their_own_are_no_ranks_of_one_training(options: dict[str, Any]) -> None:
    for story in run_ranks(2, train_apart, options, may_fail=True):
        assert "weights is" in str(story) and "train a model of their own" in str(story), story


def train_alone(rank: int, world_size: int) -> list[Tensor]:
    """A model of one rank, with the communicator that the error names."""
    model = make_model(seed=rank).double()
    train(model, KFACSGD(model, lr=0.05, momentum=0.9, communicator=LocalCommunicator(), **FLOAT64), range(8))
    return values(model)


def test_ranks_that_train_apart_take_a_local_communicator() -> None:
    for rank, found in enumerate(run_ranks(2, train_alone)):
        assert_all_near([found], train_alone(rank, 1))


SHARED_OUT: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "communicator": LocalCommunicator(), **SETTINGS}


def train_partitioned(rank: int, world_size: int) -> tuple[list[Tensor], list[str], list[bool]]:
    """Each rank steps on the parameters that are its own, and sends them to the others; all have the same batches."""
    model = make_model().double()
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=KFACSGD, **SHARED_OUT)
    train(DDP(model), optimizer, range(8))
    own = {id(p) for p in optimizer.optim.param_groups[0]["params"]}
    layers = [layer.name for layer in optimizer.optim.curvature.layers]
    return values(model), layers, [id(p) in own for p in model.parameters()]


def test_ranks_that_share_out_the_steps() -> None:
    """As two optimizers in one process, of which each has a part of the parameters."""
    (weights, layers, own), (others, their_layers, _) = run_ranks(2, train_partitioned)
    assert sorted([*layers, *their_layers]) == ["0", "2", "3"]
    model = make_model().double()
    first, second = (
        KFACSGD(
            [p for p, here in zip(model.parameters(), own, strict=True) if here == first], model=model, **SHARED_OUT
        )
        for first in (True, False)
    )
    train(model, first, range(8), lambda: (second.step(), second.zero_grad()))
    assert_all_near([weights, others], values(model))


def resume_partitioned(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], str]:
    """Trained on, and resumed from each rank's own state; and the error of one resumed from a consolidated state."""
    model, other, third = (make_model().double() for _ in range(3))
    first, second, last = (
        ZeroRedundancyOptimizer(m.parameters(), optimizer_class=KFACSGD, **SHARED_OUT) for m in (model, other, third)
    )
    train(DDP(model), first, range(5))
    first.consolidate_state_dict(0)
    consolidated = [first.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(consolidated)
    other.load_state_dict(model.state_dict())
    resumed: Any = second
    resumed.optim.load_state_dict(copy.deepcopy(first.optim.state_dict()))
    train(DDP(model), first, range(5, 9))
    train(DDP(other), second, range(5, 9))
    last.load_state_dict(consolidated[0])
    try:
        train(DDP(third), last, range(5, 6))
    except RuntimeError as error:
        return values(model), values(other), str(error)
    return values(model), values(other), "trained"


def test_ranks_that_share_out_the_steps_resume_from_states_of_their_own() -> None:
    for expected, found, story in run_ranks(2, resume_partitioned):
        assert_all_near([found], expected, tolerance=0.0)
        assert "optim.state_dict()" in story


def train_in_pairs(rank: int, world_size: int, wrap: str) -> list[Tensor]:
    """Two pairs of ranks train two models; with one process the model of the first pair."""
    pair = rank // 2 if world_size > 1 else 0
    model: Any = make_model(seed=pair).double()
    if world_size > 1 and wrap.endswith("DDP"):
        model = DDP(model, process_group=[dist.new_group([0, 1]), dist.new_group([2, 3])][pair])
    elif world_size > 1:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))["data"])
    options = {"scaling": "unit", "damping": OfMean(0.1), **FLOAT64, "assignment": "layer-wise"}
    given = torch.compile(model) if wrap == "compiled DDP" else model  # it is not run
    given = model.parameters() if wrap == "parameters of FSDP2" else given
    optimizer = KFACSGD(given, lr=0.05, momentum=0.9, factor_update_steps=1, inv_update_steps=2, **options)
    assert optimizer.curvature.stages.comm.world_size == min(world_size, 2)
    train(model, optimizer, range(8), rank=rank % 2, world_size=min(world_size, 2))
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


SHARDED = [pytest.param(wrap, marks=needs_sharding_on_cpus) for wrap in ("FSDP2", "parameters of FSDP2")]


@pytest.mark.parametrize("wrap", ["DDP", "compiled DDP", *SHARDED])
def test_a_wrapper_says_which_ranks_train_together(wrap: str) -> None:
    expected = train_in_pairs(0, 1, wrap)
    for found in run_ranks(4, train_in_pairs, wrap)[:2]:
        assert_all_near([found], expected)


def train_on_some_ranks(rank: int, world_size: int, given: str) -> None:
    """DDP has the model on all ranks but the last, which does something else."""
    group = dist.new_group(range(world_size - 1))
    if rank < world_size - 1:
        model = make_model().double()
        early = KFACSGD(model, lr=0.05)
        wrapped = DDP(model, process_group=group)
        optimizer = (
            early if given == "before" else KFACSGD(model if given == "inside" else wrapped.parameters(), lr=0.05)
        )
        train(wrapped, optimizer, range(3), rank=rank, world_size=world_size - 1)


@pytest.mark.parametrize("given", ["parameters", "inside", "before"])
def test_ranks_of_a_wrapper_that_the_optimizer_did_not_get_are_named(given: str) -> None:
    """They would wait for the others until the time-out."""
    for story in run_ranks(3, train_on_some_ranks, given, may_fail=True)[:2]:
        assert "2 of 3 ranks" in str(story) and "pass it the wrapped model" in str(story), story


def train_experts(rank: int, world_size: int) -> list[Tensor]:
    """Every rank has an expert of its own, in a wrapper of its own, behind layers that all of them have."""
    groups = [dist.new_group([i]) for i in range(world_size)]
    dense, expert = make_model().double(), nn.Linear(3, 3).double()
    model = nn.Sequential(dense, DDP(expert, process_group=groups[rank]))
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9, skip_layers=["^1"], **SETTINGS)
    average = partial(average_gradients, list(dense.parameters()))
    train(model, optimizer, range(4), rank=rank, world_size=world_size, before_step=average)
    return values(dense)


def test_layers_that_are_skipped_may_be_wrapped_on_fewer_ranks() -> None:
    assert_equal_on_ranks(run_ranks(2, train_experts))


class Routed(nn.Module):
    """Each expert gets its part of the batch."""

    def __init__(self, dense: nn.Module, experts: list[nn.Module]) -> None:
        super().__init__()
        self.dense, self.experts = dense, nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.dense(x).chunk(len(self.experts))
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def train_experts_of_their_own(rank: int, world_size: int) -> list[list[Tensor]]:
    """Every expert has an optimizer of its own, beside that of the layers which all ranks have."""
    dense, experts = make_model().double(), [nn.Linear(3, 3).double() for _ in range(2)]
    model = Routed(dense, experts if world_size == 1 else [experts[rank]])
    options = {"lr": 0.05, "momentum": 0.9, **SETTINGS, "damping": OfLargest(0.03)}
    shared = KFACSGD(dense.parameters(), model=model, **options)
    own = [KFACSGD(expert, communicator=LocalCommunicator(), **options) for expert in model.experts]

    def average() -> None:
        if world_size > 1:
            average_gradients(dense.parameters())
            for p in model.experts.parameters():
                p.grad.div_(world_size)  # type: ignore[union-attr]

    def step() -> None:
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()

    train(model, shared, range(8), step, rank=rank, world_size=world_size, before_step=average)
    return [values(dense), *map(values, model.experts)]


def test_experts_may_have_optimizers_of_their_own() -> None:
    expected = train_experts_of_their_own(0, 1)
    for rank, (dense, expert) in enumerate(run_ranks(2, train_experts_of_their_own)):
        assert_all_near([dense], expected[0])
        assert_all_near([expert], expected[1 + rank])


def start_late(rank: int, world_size: int, folder: str, before: str) -> list[Tensor]:
    """The process group comes after the optimizer, which has done something before."""
    dist.destroy_process_group()
    model = make_model().double()
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9, **SETTINGS)
    if before == "a step":
        train(model, optimizer, range(1))
    else:
        get_optimizer_state_dict(model, optimizer)  # takes a step of length zero
    dist.init_process_group("gloo", init_method=f"file://{folder}/late", rank=rank, world_size=world_size)
    train(DDP(model), optimizer, range(1, 6), rank=rank, world_size=world_size)
    return values(model)


def test_a_process_group_may_come_before_anything_is_learned(tmp_path: Path) -> None:
    model = make_model().double()
    train(model, KFACSGD(model, lr=0.05, momentum=0.9, **SETTINGS), range(1, 6))
    assert_all_near(run_ranks(2, start_late, str(tmp_path), "its state"), values(model))


def test_a_process_group_that_comes_later_is_refused(tmp_path: Path) -> None:
    for story in run_ranks(2, start_late, str(tmp_path), "a step", may_fail=True):
        assert "initialised after the first steps" in str(story) and "load the state_dict()" in str(story), story
