"""DistributedDataParallel in all its modes, on real Gloo ranks: every rank has the parameters of one process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import KFACSGD, CurvatureEngine, KFACAdam, LayerWise, TorchCommunicator
from kfac_optim.distributed import LocalCommunicator
from tests.helpers.compare import assert_all_near, assert_equal_on_ranks, values
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, SETTINGS
from tests.helpers.training import average_gradients, data_of, share, train

SHAPE = (8, 5)
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, **SETTINGS}


class Branches(nn.Module):
    """Two branches; a batch goes through the first, the second or both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, left: bool = True, right: bool = True) -> Tensor:
        h = torch.tanh(self.stem(x))
        return self.head(torch.tanh(h + (self.left(h) if left else 0) + (self.right(h) if right else 0)))


def make(seed: int = 0) -> Branches:
    torch.manual_seed(seed)
    return Branches().double()


def compressed(group: Any, bucket: Any) -> Any:
    """A compression hook, as users write them: gradients cross the wire in float32."""
    small = bucket.buffer().to(torch.float32).div_(dist.get_world_size())
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


# DDP reads the types themselves.
compressed.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


def trained(rank: int, world_size: int, how: str, options: dict[str, Any], steps: int = 7) -> list[Tensor]:
    """A loop as in every tutorial, with DDP set up in one of many ways."""
    model = make()
    wrapped: nn.Module = model
    ddp: dict[str, Any] = {"gradient_as_bucket_view": how == "bucket view", "static_graph": how == "static graph"}
    if how == "built first":
        optimizer = KFACSGD(model, **OPTIONS, **options)
    if world_size > 1:
        wrapped = DDP(model, **ddp)
    if how == "compression hook" and world_size > 1:
        wrapped.register_comm_hook(None, compressed)
    if how == "parameters":
        optimizer = KFACSGD(wrapped.parameters(), **OPTIONS, **options)
    elif how != "built first":
        optimizer = KFACSGD(wrapped, **OPTIONS, **options)
    for step in range(steps):
        inputs, classes = share(data_of(step, SHAPE), rank, world_size)
        optimizer.zero_grad()
        micro = 2 if how == "no_sync" else 1
        for i in range(micro):
            last = i == micro - 1 or world_size == 1
            with nullcontext() if last else wrapped.no_sync():
                x, y = inputs.chunk(micro)[i], classes.chunk(micro)[i]
                (F.cross_entropy(wrapped(x), y) / micro).backward()
        optimizer.step()
    return values(model)


def unfreeze(rank: int, world_size: int) -> list[Tensor]:
    """A layer is unfrozen in the middle of an interval, and the model wrapped anew, as DDP asks for."""
    model = make()
    model.left.requires_grad_(False)
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=20, inv_update_steps=100, spread=10, **FLOAT64)
    for step in range(8):
        if step in (0, 4):
            model.left.requires_grad_(step == 4)
            wrapped = DDP(model) if world_size > 1 else model
        train(wrapped, optimizer, [step], shape=SHAPE, rank=rank, world_size=world_size)
    assert optimizer.curvature.stages.refresher.refreshes == 2
    assert "left" in optimizer.curvature.report()["layers"]
    return values(model)


def test_ranks_meet_a_layer_that_is_unfrozen_in_the_same_step() -> None:
    found = run_ranks(2, unfreeze)
    assert_equal_on_ranks(found)
    assert_all_near(found, unfreeze(0, 1))


MODES = ("wrapped", "built first", "parameters", "bucket view", "static graph", "no_sync", "compression hook")


def train_all(rank: int, world_size: int, modes: tuple[str, ...]) -> list[list[Tensor]]:
    return [trained(rank, world_size, mode, {"assignment": LayerWise()}) for mode in modes]


def test_every_mode_of_ddp_equals_one_process() -> None:
    outcomes = run_ranks(2, train_all, MODES)
    for i, mode in enumerate(MODES):
        expected = trained(0, 1, mode, {})
        assert_all_near([found[i] for found in outcomes], expected, 1e-4 if mode == "compression hook" else 1e-9)


# Uneven ranks --------------------------------------------------------------------------------------------------------


def train_uneven(rank: int, world_size: int, how: str, options: dict[str, Any]) -> list[Tensor]:
    """Ranks see different layers, batches of different sizes, or a batch that is not finite."""
    model = make()
    wrapped = DDP(model, find_unused_parameters=True)
    optimizer = KFACSGD(wrapped, **OPTIONS, **options)
    for step in range(8):
        inputs, classes = data_of(step * world_size + rank, SHAPE if how != "sizes" else (3 + 2 * rank, 5))
        flags: dict[str, bool] = {}
        if how == "layers":
            flags = {"left": rank == 0, "right": rank != 0 and step % 2 == 0}
        if how == "rank without" and rank == 1:
            flags = {"left": False, "right": False}
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(inputs, **flags), classes)
        if how == "nonfinite loss" and rank == 1 and step in (0, 3, 4):
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
    if how == "nonfinite loss":
        assert optimizer.curvature.report()["skipped_steps"] == 3
    return values(model)


def uneven(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    return {
        f"{how}, {name}": train_uneven(rank, world_size, how, {"assignment": name})
        for how in ("layers", "rank without", "sizes", "nonfinite loss")
        for name in ("factor-wise", "layer-wise")
    }


@pytest.mark.fast("2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_ranks_keep_the_same_parameters(world_size: int) -> None:
    outcomes = run_ranks(world_size, uneven)
    initial = values(make())
    for how in outcomes[0]:
        assert_equal_on_ranks([found[how] for found in outcomes])
        assert not any(torch.equal(p, q) for p, q in zip(outcomes[0][how], initial, strict=True)), how
    for how in ("layers", "rank without", "sizes", "nonfinite loss"):
        assert_all_near([outcomes[0][f"{how}, factor-wise"]], outcomes[0][f"{how}, layer-wise"])


def train_poisoned_statistics(rank: int, world_size: int) -> tuple[list[Tensor], int]:
    """One rank's output gradients overflow in a statistics step while the gradients of the weights stay finite."""
    model = make()
    wrapped = DDP(model)
    optimizer = KFACSGD(wrapped, **{**OPTIONS, "inv_update_steps": 2})
    engine = optimizer.curvature

    def drop() -> None:
        if rank == 1 and engine.step_count == 2:
            for ended in engine.stages.capture._passes.statistics.passes:
                ended.finite.fill_(False)

    train(wrapped, optimizer, range(rank, 6 * world_size, world_size), shape=SHAPE, before_step=drop)
    return values(model), engine.report()["skipped_batches"]


def test_a_dropped_micro_batch_is_counted_on_every_rank() -> None:
    outcomes = run_ranks(2, train_poisoned_statistics)
    assert_equal_on_ranks([weights for weights, _ in outcomes])
    assert [count for _, count in outcomes] == [1, 1]


# Join ----------------------------------------------------------------------------------------------------------------


def train_joined(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Rank r has 4 + 3 r batches."""
    model = make()
    wrapped = DDP(model)
    optimizer = KFACSGD(wrapped, **OPTIONS, **options)
    assert isinstance(optimizer, Joinable)
    with Join([wrapped, optimizer]):
        train(wrapped, optimizer, (step * world_size + rank for step in range(4 + 3 * rank)), shape=SHAPE)
    factors = [f for layer in optimizer.curvature.layers for f in optimizer.curvature.factors(layer)]
    train(wrapped, optimizer, [(3 + 3 * rank) * world_size + rank], shape=SHAPE)  # as if nothing had been
    assert optimizer.curvature.step_count == 4 + 3 * (world_size - 1) + 1
    return values(model), factors


def joined(rank: int, world_size: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    options: list[dict[str, Any]] = [
        {"assignment": "factor-wise"},
        {"assignment": "layer-wise"},
        {"assignment": "layer-wise", "precondition": "momentum"},
    ]
    return [train_joined(rank, world_size, chosen) for chosen in options]


@pytest.mark.fast("2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_end_early_under_join(world_size: int) -> None:
    outcomes = run_ranks(world_size, joined)
    for i in range(len(outcomes[0])):
        assert_equal_on_ranks([found[i][0] for found in outcomes])
        assert_equal_on_ranks([found[i][1] for found in outcomes])
    assert_all_near([outcomes[0][0][0]], outcomes[0][1][0])


def train_joined_alone(rank: int, world_size: int) -> list[list[Tensor]]:
    """One rank without DDP, and the same training without Join."""
    models = [make(), make()]
    for model in models:
        optimizer = KFACSGD(model, **OPTIONS)
        with Join([optimizer], enable=model is models[0]):
            train(model, optimizer, range(4), shape=SHAPE)
    return [values(model) for model in models]


def test_join_of_the_optimizer_alone_on_one_rank() -> None:
    ((found, expected),) = run_ranks(1, train_joined_alone)
    assert_all_near([found], expected)


def train_joined_apart(rank: int, world_size: int) -> list[list[Tensor]]:
    """Rank r has 2 + 2 r batches and a model of its own; and the same training without Join."""
    models = [make(), make()]
    for model in models:
        optimizer = KFACSGD(model, **OPTIONS, communicator=LocalCommunicator())
        with Join([optimizer], enable=model is models[0]):
            train(model, optimizer, range(2 + 2 * rank), shape=SHAPE)
    return [values(model) for model in models]


def test_a_rank_that_trains_apart_takes_no_steps_along_with_others() -> None:
    for found, expected in run_ranks(2, train_joined_apart):
        assert_all_near([found], expected)


def train_joined_on_schedule(rank: int, world_size: int, schedule: str) -> tuple[list[Tensor], list[float]]:
    """Rank r has 4 + 3 r batches, and a scheduler that is stepped after each; returns the numbers of the last step."""
    model = make()
    wrapped = DDP(model)
    groups = [
        {"params": model.stem.parameters(), "lr": 0.05},
        {"params": [*model.left.parameters(), model.head.weight]},
    ]
    options = {"model": wrapped, **SETTINGS, "scaling": "graft"}
    optimizer: Any
    scheduler: Any
    if schedule.startswith("one cycle"):  # which changes momentum or the first beta, too
        momentum = {"momentum": 0.9} if schedule.endswith("momentum") else {}
        optimizer = (KFACSGD if momentum else KFACAdam)(groups, lr=0.1, **momentum, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=20)
    else:
        optimizer = KFACSGD(groups, lr=torch.tensor(0.1), **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def numbers() -> list[float]:
        groups = optimizer.param_groups
        assert isinstance(groups[1]["lr"], Tensor) == (schedule == "exponential")
        return [float(x) for group in groups for x in (group["lr"], group.get("momentum", 0), *group.get("betas", ()))]

    last: list[float] = []

    def after() -> None:
        last[:] = numbers()
        scheduler.step()

    with Join([wrapped, optimizer]):
        batches = (step * world_size + rank for step in range(4 + 3 * rank))
        train(wrapped, optimizer, batches, after, shape=SHAPE)
    return values(model), last if rank else numbers()


@pytest.mark.parametrize("schedule", ["one cycle", "one cycle, momentum", "exponential"])
def test_ranks_that_end_early_follow_the_schedule_of_the_others(schedule: str) -> None:
    (weights, numbers), (others, theirs) = run_ranks(2, train_joined_on_schedule, schedule)
    assert_equal_on_ranks([weights, others])
    assert numbers == theirs


def train_with_the_model_in_join_alone(rank: int, world_size: int, closed: bool) -> None:
    wrapped = DDP(make())
    optimizer = KFACSGD(wrapped.parameters(), **OPTIONS)
    if closed:
        optimizer.curvature.close()
    with wrapped.join():
        train(wrapped, optimizer, range(1 + rank), shape=SHAPE)


def test_join_without_the_optimizer_is_refused() -> None:
    for story in run_ranks(2, train_with_the_model_in_join_alone, False, may_fail=True):
        assert "Join([model, optimizer])" in str(story), story
    run_ranks(2, train_with_the_model_in_join_alone, True)  # then nothing is exchanged


# Sub-groups and foreign optimizers ---------------------------------------------------------------------------------


def train_in_subgroups(rank: int, world_size: int) -> list[Tensor]:
    """Two independent pairs of ranks."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, inner = pairs[rank // 2], rank % 2
    model = make(seed=rank // 2)
    wrapped = DDP(model, process_group=mine)
    optimizer = KFACSGD(wrapped, **OPTIONS, assignment="layer-wise", communicator=TorchCommunicator(mine))
    assert optimizer.curvature.stages.comm.rank == inner
    _, copied = copy.deepcopy((model, optimizer))
    assert copied.curvature.stages.comm.group is mine, "a copy stays among its ranks"
    train(wrapped, optimizer, range(7), shape=SHAPE, rank=inner, world_size=2)
    return values(model)


def test_process_groups_train_apart() -> None:
    outcomes = run_ranks(4, train_in_subgroups)
    for pair in range(2):
        model = make(seed=pair)
        train(model, KFACSGD(model, **OPTIONS), range(7), shape=SHAPE)
        assert_all_near(outcomes[2 * pair : 2 * pair + 2], values(model))


def outside(rank: int, world_size: int) -> str:
    group = dist.new_group([0])
    try:
        KFACSGD(make(), lr=0.1, communicator=TorchCommunicator(group))
    except ValueError as error:
        return str(error)
    return "built"


def test_a_rank_outside_the_group_is_told_so() -> None:
    first, second = run_ranks(2, outside)
    assert first == "built"
    assert "process_group" in second and "not in it" in second


def train_foreign(rank: int, world_size: int) -> list[Tensor]:
    """RMSprop of torch behind an engine that stands alone."""
    model = make()
    wrapped = DDP(model) if world_size > 1 else model
    options = {name: value for name, value in OPTIONS.items() if name not in ("lr", "momentum")}
    engine = CurvatureEngine(wrapped, **options, assignment="layer-wise")
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    everyone = {"shape": SHAPE, "rank": rank, "world_size": world_size}
    train(wrapped, optimizer, range(7), before_step=lambda: engine.precondition_(lr=0.01), **everyone)
    return values(model)


def test_precondition_in_front_of_a_foreign_optimizer() -> None:
    # RMSprop divides by the root of what it squares: tiny differences grow where gradients are near zero.
    assert_all_near(run_ranks(2, train_foreign), train_foreign(0, 1), 1e-7)


LOSSES: dict[str, tuple[str | None, Callable[[Tensor, Tensor], Tensor]]] = {
    "mean": ("batch", lambda output, classes: F.cross_entropy(output, classes)),
    "sum": (None, lambda output, classes: F.cross_entropy(output, classes, reduction="sum")),
    "elements": ("elements", lambda output, classes: F.mse_loss(output, F.one_hot(classes, 3).to(output))),
}


def train_loss(rank: int, world_size: int, name: str) -> list[Tensor]:
    average, loss = LOSSES[name]
    model = make()
    wrapped = DDP(model) if world_size > 1 else model
    optimizer = KFACSGD(wrapped, **{**OPTIONS, "loss_average": average, "lr": 0.01})
    # DDP averages: the sum over both ranks' examples, as one process would take it, comes out halved.
    scale = 2 if name == "sum" and world_size == 1 else 1
    everyone = {"shape": SHAPE, "rank": rank, "world_size": world_size}
    train(wrapped, optimizer, range(5), loss=lambda output, classes: loss(output, classes) / scale, **everyone)
    return values(model)


def train_losses(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    return {name: train_loss(rank, world_size, name) for name in LOSSES}


def test_every_kind_of_loss_average() -> None:
    outcomes = run_ranks(2, train_losses)
    for name in LOSSES:
        assert_all_near([found[name] for found in outcomes], train_loss(0, 1, name))


# Before and after ----------------------------------------------------------------------------------------------------


def build_before_the_group(rank: int, world_size: int, store: str) -> list[Tensor]:
    """The optimizer exists before torch.distributed is initialised."""
    dist.destroy_process_group()
    model = make()
    optimizer = KFACSGD(model, **OPTIONS, assignment="layer-wise")
    assert optimizer.curvature.stages.comm.world_size == 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    train(DDP(model), optimizer, range(7), shape=SHAPE, rank=rank, world_size=world_size)
    assert optimizer.curvature.stages.comm.world_size == world_size
    return values(model)


def test_a_group_that_is_initialised_after_the_optimizer_was_built(tmp_path: Path) -> None:
    outcomes = run_ranks(2, build_before_the_group, str(tmp_path / "store"))
    assert_all_near(outcomes, trained(0, 1, "wrapped", {}))


def copy_and_go_on(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], bytes]:
    """A deep copy trains on like the original; a pickle is taken along."""
    model = make()
    optimizer = KFACSGD(model, **OPTIONS, assignment="layer-wise")

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
        everyone = {"shape": SHAPE, "rank": rank, "world_size": world_size}
        train(model, optimizer, which, before_step=lambda: average_gradients(model.parameters()), **everyone)

    steps(model, optimizer, range(4))
    optimizer.curvature.synchronize()
    pickled = pickle.dumps((model, optimizer))
    other, copied = copy.deepcopy((model, optimizer))
    steps(model, optimizer, range(4, 9))
    steps(other, copied, range(4, 9))
    return values(model), values(other), pickled


@pytest.mark.slow
def test_copies_and_pickles_of_a_rank() -> None:
    outcomes = run_ranks(2, copy_and_go_on)
    for original, copied, pickled in outcomes:
        assert_all_near([copied], original)
        model, optimizer = pickle.loads(pickled)  # on one process now, which has to decompose everything itself
        train(model, optimizer, range(4, 9), shape=SHAPE)
        assert_all_near([values(model)], original)


# What a training script has beside: BatchNorm, AMP, odd layouts, closed engines --------------------------------------


class Images(nn.Module):
    """BatchNorm and an in-place activation, in float32 and widths whose products round by layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10)
        self.hidden, self.head = nn.Linear(10 * 4 * 4, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.norm(self.conv(x)))
        return self.head(torch.relu(self.hidden(h.flatten(1))))


def images_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 3, 6, 6, generator=generator), torch.randint(5, (8,), generator=generator)


def train_images(rank: int, world_size: int, how: str, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Images().to(memory_format=torch.channels_last if how == "channels_last" else torch.contiguous_format)
    wrapped = DDP(model)
    decay = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decay, "weight_decay": 1e-3}, {"params": [p for p in model.parameters() if p.dim() == 1]}]
    optimizer = KFACSGD(groups, lr=0.05, momentum=0.9, factor_update_steps=2, inv_update_steps=4, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler", init_scale=2.0**12)
    for step in range(30):
        inputs, classes = images_of(step, rank)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=how == "scaler"):
            loss = F.cross_entropy(wrapped(inputs), classes)
        if how == "scaler" and rank == 0 and step in (4, 9):
            loss = loss * 1e30  # overflows on this rank alone
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if how == "closed" and step == 17:
            optimizer.curvature.close()
    if how == "scaler":
        assert optimizer.curvature.step_count == 28
    return values(model)


IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{how}, {name}": (how, {"assignment": name, "solver": solver})
    for how in ("plain", "scaler", "channels_last", "closed")
    for name, solver in (("factor-wise", "eigen"), ("layer-wise", "inverse"))
}


def train_all_images(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    return {name: train_images(rank, world_size, how, options) for name, (how, options) in IMAGES.items()}


def train_dense(rank: int, world_size: int) -> list[Tensor]:
    """Widths at which products with a transposed eigenbasis round differently."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 5))
    wrapped = DDP(model)
    options = {"damping": 0.003, "factor_update_steps": 1, "inv_update_steps": 5}
    optimizer = KFACSGD(wrapped, lr=0.05, momentum=0.9, **options)
    for step in range(60):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(16, 20, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(inputs), inputs[:, :5].sin().argmax(1)).backward()
        optimizer.step()
    return values(model)


@pytest.mark.slow
def test_dense_ranks_stay_bit_for_bit_equal() -> None:
    assert_equal_on_ranks(run_ranks(2, train_dense))


@pytest.mark.slow
def test_ranks_stay_bit_for_bit_equal_in_float32() -> None:
    outcomes = run_ranks(2, train_all_images)
    for name in IMAGES:
        assert_equal_on_ranks([found[name] for found in outcomes])


def join_channels_last(rank: int, world_size: int, assignment: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Images().to(memory_format=torch.channels_last)
    wrapped = DDP(model)
    optimizer = KFACSGD(wrapped, lr=0.05, factor_update_steps=1, inv_update_steps=2, assignment=assignment)
    with Join([wrapped, optimizer]):
        for step in range(3 + 2 * rank):
            inputs, classes = images_of(step, rank)
            F.cross_entropy(wrapped(inputs), classes).backward()
            optimizer.step()
            optimizer.zero_grad()  # so that a rank that ends early has no gradient left
    # Sums in another order would end in other digits.
    assert rank or all(p.grad.stride() == p.stride() for p in model.parameters())
    return values(model)


@pytest.mark.slow
def test_join_with_channels_last_and_no_gradients_left() -> None:
    layer_wise, factor_wise = (run_ranks(2, join_channels_last, name) for name in ("layer-wise", "factor-wise"))
    assert_equal_on_ranks(layer_wise)
    for p, q in zip(layer_wise[0], factor_wise[0], strict=True):  # DDP makes ranks equal, right or wrong
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def stand_still(rank: int, world_size: int) -> int:
    """A step with lr 0 on zero gradients, before which one rank alone has run the model."""
    model = make()
    optimizer = KFACSGD(model, **{**OPTIONS, "lr": 0.0})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if rank == 0:
        (model(data_of(0, SHAPE)[0]).sum() * 0.0).backward()
    optimizer.step()
    return optimizer.curvature.step_count


def test_what_one_rank_has_seen_decides_nothing() -> None:
    assert run_ranks(2, stand_still, group_timeout=timedelta(seconds=10)) == [0, 0]


def mask_everything_on_one_rank(rank: int, world_size: int) -> list[Tensor]:
    """``loss_terms`` counts 0 on one rank in one step: a micro-batch of padding alone."""
    model = make()
    wrapped = DDP(model)
    masked = [False]
    optimizer = KFACSGD(wrapped, **OPTIONS, loss_average=lambda inputs, output: 0 if masked[0] else len(output))
    for step in range(6):
        masked[0] = rank == 1 and step in (0, 2)
        inputs, classes = data_of(step * world_size + rank, SHAPE)
        optimizer.zero_grad()
        (F.cross_entropy(wrapped(inputs), classes) * (0.0 if masked[0] else 1.0)).backward()
        optimizer.step()
    return values(model)


def test_a_rank_without_loss_terms() -> None:
    assert_equal_on_ranks(run_ranks(2, mask_everything_on_one_rank))


def pickle_in_a_spread_refresh(rank: int, world_size: int) -> tuple[list[Tensor], bytes]:
    model = make()
    options = {**OPTIONS, "factor_update_steps": 1, "inv_update_steps": 4, "spread": 3}
    optimizer = KFACSGD(model, **options, assignment="layer-wise")
    pickled = b""
    for step in range(12):
        everyone = {"shape": SHAPE, "rank": rank, "world_size": world_size}
        train(model, optimizer, [step], before_step=lambda: average_gradients(model.parameters()), **everyone)
        if step == 5:  # the refresh of step 4 is half done
            optimizer.curvature.synchronize()
            pickled = pickle.dumps((model, optimizer))
    return values(model), pickled


def test_a_pickle_in_a_spread_refresh_goes_on_alone() -> None:
    for expected, pickled in run_ranks(2, pickle_in_a_spread_refresh):
        model, optimizer = pickle.loads(pickled)
        train(model, optimizer, range(6, 12), shape=SHAPE)
        assert optimizer.curvature.stages.refresher.failed_decompositions == 0
        assert_all_near([values(model)], expected)


def sampled_factor(rank: int, world_size: int) -> list[float]:
    """The mean eigenvalue of G of a squared error under sampled targets, gradients averaged and added up."""
    found = []
    for averages in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False)
        communicator = TorchCommunicator(average_gradients=averages)
        engine = CurvatureEngine(model, fisher="gaussian", communicator=communicator)
        loss = 0.5 * (model(torch.randn(5000, 3)) - torch.randn(5000, 2)).square().sum(1).mean()
        (loss / (1 if averages else world_size)).backward()
        assert model.weight.grad is not None
        dist.all_reduce(model.weight.grad)
        model.weight.grad /= world_size if averages else 1
        engine.precondition_(lr=1.0)
        found.append(float(engine.factors("")[1].diagonal(dim1=-2, dim2=-1).mean()))
    return found


def test_sampled_targets_do_not_care_how_gradients_are_combined() -> None:
    for found in run_ranks(2, sampled_factor):
        assert found == pytest.approx([1.0, 1.0], rel=0.05)


def train_beside_a_player(rank: int, world_size: int) -> list[Tensor]:
    """On one rank a local optimizer takes part in a game, in which gradients are thrown away."""
    torch.manual_seed(0)
    model, player = DDP(nn.Linear(6, 6)), nn.Linear(6, 6)
    optimizer = KFACAdam(model, lr=0.01, factor_update_steps=1, inv_update_steps=2)
    local = KFACAdam(player, lr=0.01, communicator=LocalCommunicator(), factor_update_steps=1)
    x = torch.randn(64, 6)
    for _ in range(16):
        for _ in range(2 if rank == 0 else 0):
            local.zero_grad()
            player(x).square().mean().backward()
        if rank == 0:
            local.step()
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    assert rank or local.curvature.stages.steering.game.is_opponent
    assert optimizer.curvature.stages.plan().stretches
    return values(model)


def test_a_game_on_one_rank_decides_nothing_for_all() -> None:
    assert_equal_on_ranks(run_ranks(2, train_beside_a_player))
