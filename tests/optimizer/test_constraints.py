"""Weights that a training loop constrains: masked gradients, and projections after the step."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KFACSGD, Graft, KFACAdam, KFACAdamW
from kfac_optim.common import machines
from kfac_optim.steering.constraints import WeightWatch
from tests.helpers.bases import KFACRMSprop
from tests.helpers.compare import assert_identical, values
from tests.helpers.training import train

Case = tuple[Any, Any, dict[str, Any]]


CASES: list[Case] = [
    (KFACSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (KFACSGD, torch.optim.SGD, {"lr": 0.2}),
    (KFACAdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (KFACRMSprop, torch.optim.RMSprop, {"lr": 0.005}),
]
IDS = ["momentum", "plain", "AdamW", "RMSprop"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(32, 6, generator=generator) for _ in range(count)]
    return [(x, (x[:, :3] * x[:, 3:]).argmax(1)) for x in made]


# Masked gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launches_count", [False, True])
@pytest.mark.parametrize(("kfac", "base", "options"), CASES, ids=IDS)
def test_weights_whose_gradients_are_masked_move_as_those_of_the_base(
    kfac: Any, base: Any, options: dict[str, Any], launches_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By weight decay alone, or not at all; the others train by K-FAC's directions."""
    if launches_count:
        monkeypatch.setattr(machines, "machine_of", lambda _: "accelerator")
    model = net()
    other = copy.deepcopy(model)
    optimizers = [kfac(model, **options), base(other.parameters(), **options)]
    torch.manual_seed(2)
    masks = [torch.rand_like(p) < 0.6 for p in model.parameters()]

    def mask(of: nn.Module) -> None:
        for p, masked in zip(of.parameters(), masks, strict=True):
            p.grad.masked_fill_(masked, 0.0)  # type: ignore[union-attr]

    for of, optimizer in zip((model, other), optimizers, strict=True):
        train(of, optimizer, batches(40), before_step=partial(mask, of))
    differences = []
    for p, q, masked in zip(model.parameters(), other.parameters(), masks, strict=True):
        torch.testing.assert_close(p[masked], q[masked], rtol=1e-6, atol=1e-7)  # AdamW's decay is taken apart, rounded
        differences.append(float((p - q)[~masked].abs().max()))
    assert max(differences) > 1e-3


@pytest.mark.parametrize("launches_count", [False, True])
def test_weights_that_are_masked_later_stay_from_then_on(launches_count: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a base without a momentum; no new decompositions are waited for."""
    if launches_count:
        monkeypatch.setattr(machines, "machine_of", lambda _: "accelerator")
    model = net()
    optimizer = KFACSGD(model, lr=0.1, inv_update_steps=100)
    mask = torch.rand(16, 16, generator=torch.Generator().manual_seed(2)) < 0.6
    for step, (x, y) in enumerate(batches(20)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if step >= 5:
            model[2].weight.grad[mask] = 0.0  # type: ignore[union-attr, index]
        if step == 12:  # the average of gradients that directions are made of has forgotten those of before
            before = model[2].weight.detach().clone()
            optimizer.state[model[2].weight]["kfac_moment"][mask] = 0.0  # type: ignore[index]
            optimizer.state[model[2].weight].pop("kfac_change", None)  # type: ignore[index]
            optimizer.state[model[2].weight].pop("kfac_stretch", None)  # type: ignore[index]
        optimizer.step()
    assert bool((model[2].weight[mask] == before[mask]).all())  # type: ignore[index]
    assert not bool((model[2].weight[~mask] == before[~mask]).any())  # type: ignore[index]


# Projections ---------------------------------------------------------------------------------------------------------


def cubic(x: Tensor) -> Tensor:
    return (2 * x[:, :1]).sigmoid() + x[:, 1:2] ** 3 + x[:, 2:]


def steep(x: Tensor) -> Tensor:
    """Of a normal variable, made of the uniform one."""
    return (x.mul(0.999).erfinv() * math.sqrt(2)).sum(1, keepdim=True).exp().clamp(max=20) / 5


def train_clamped(
    optimizer: Any, model: nn.Module, steps: int, *, limit: float = math.inf, every: int = 1, target: Any = cubic
) -> list[float]:
    losses, generator = [], torch.Generator().manual_seed(3)
    for step in range(steps):
        x = torch.rand(64, 3, generator=generator) * 2 - 1
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target(x))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1 and step % every == 0:
                    p.clamp_(min=0, max=limit)
        losses.append(float(loss.detach()))
    return losses


def monotone(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.abs_() if p.dim() > 1 else None
    return model


@pytest.mark.parametrize("seed", range(3))
def test_stretches_that_a_projection_undoes_do_not_grow(seed: int) -> None:
    """Gradients go on pointing along them; with reach at its most this network diverged."""
    model, other = monotone(seed), monotone(seed)
    optimizer = KFACAdam(model, lr=1e-3)
    losses = train_clamped(optimizer, model, 400)
    base = train_clamped(torch.optim.Adam(other.parameters(), lr=1e-3), other, 400)
    assert sum(losses[-20:]) < 1.02 * sum(base[-20:])
    assert optimizer.curvature.reach <= 0.0101, "it has learned from them"


@pytest.mark.parametrize("seed", range(2))
def test_a_projection_in_every_second_step_is_found(seed: int) -> None:
    """Also where weights are seldom compared; in every eighth step nothing was found: seed 1 ended above its base."""
    ends = []
    for kind in (KFACAdam, torch.optim.Adam):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))
        model.requires_grad_(False).apply(lambda m: m.weight.abs_() if isinstance(m, nn.Linear) else None)
        optimizer = kind(model.requires_grad_().parameters(), lr=3e-3)
        ends.append(sum(train_clamped(optimizer, model, 600, every=2, target=steep)[-60:]))
    assert ends[0] < ends[1]


def test_stretches_of_a_pruned_network_fall_where_they_meet_a_wall() -> None:
    """What the masks leave of a stretch is not along flat directions any more; at a fixed reach it diverged.

    The median of six seeds is judged, because at this rate the loss jumps in about one run of twenty.
    """
    ends: dict[Any, list[float]] = {KFACSGD: [], torch.optim.SGD: []}
    for kind, seed in itertools.product(ends, range(6)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        weights = [p for p in model.parameters() if p.dim() > 1]
        masks = [torch.rand_like(p) < 0.1 for p in weights]
        spread, centres = torch.randn(4, 64) / 2, torch.randn(10, 4)
        optimizer, losses = kind(model.parameters(), lr=0.1, momentum=0.9), []
        for _ in range(300):
            for p, mask in zip(weights, masks, strict=True):
                p.data = p.data * mask
            y = torch.randint(10, (64,))
            x = ((centres[y] + 0.4 * torch.randn(64, 4)) @ spread).sigmoid()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        ends[kind].append(sum(losses[-50:]))
    ratios = [ours / base for ours, base in zip(*ends.values(), strict=True)]
    assert statistics.median(ratios) < 0.6


def reaches_after(change: Callable[[nn.Sequential, int], object], steps: int = 40) -> dict[str, float]:
    """The reaches after a training on one batch, in which they grow; ``change``: what each step ends with."""
    model, (x, y) = net(), batches(1)[0]
    optimizer = KFACSGD(model, lr=1e-3, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            change(model, step)
    return {name: of_layer["reach"] for name, of_layer in optimizer.curvature.report()["layers"].items()}


def clamp(model: nn.Sequential, step: int) -> None:
    model[2].bias.clamp_(min=-1e-3, max=1e-3)  # type: ignore[operator, union-attr]


def clamp_data(model: nn.Sequential, step: int) -> None:
    model[2].bias.data.clamp_(min=-1e-3, max=1e-3)  # type: ignore[operator, union-attr]


def clamp_later(model: nn.Sequential, step: int) -> None:
    if step > 20:
        clamp(model, step)


@pytest.mark.parametrize("change", [clamp, clamp_data])
def test_a_weight_that_is_left_alone_goes_on_learning(change: Any) -> None:
    """A projection of one layer says nothing about the others; also one through ``.data``, which torch counts not."""
    found = reaches_after(change)
    assert found["2"] == 0.01 and found["0"] > 0.02 < found["4"]


def test_a_projection_that_begins_later_is_found() -> None:
    found = reaches_after(clamp_later)
    assert found["2"] == 0.01 < reaches_after(clamp_later, 20)["2"]


def average_for_a_while(model: nn.Sequential, step: int) -> None:
    """Other weights are put in to evaluate the model, and its own again."""
    kept = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.mul_(0.5)
    for p, own in zip(model.parameters(), kept, strict=True):
        p.copy_(own)


def look_ahead(model: nn.Sequential, step: int, every: int = 5) -> None:
    """As optimizers do that go half of the way back in every fifth step."""
    if step % every == every - 1:
        model[2].weight.mul_(1.001)  # type: ignore[operator, union-attr]


def bound_far_away(model: nn.Sequential, step: int) -> None:
    for p in model.parameters():
        p.clamp_(-100, 100)


look_ahead_seldom = partial(look_ahead, every=8)


@pytest.mark.parametrize("change", [average_for_a_while, look_ahead, look_ahead_seldom, bound_far_away])
def test_what_undoes_no_step_does_not_stop_the_stretching(change: Any) -> None:
    free = reaches_after(lambda model, step: None)
    found = reaches_after(change)
    if change in (look_ahead, look_ahead_seldom):
        assert found["2"] > 0.02
    else:
        assert found == free and min(free.values()) > 0.02


def test_state_and_table_know_of_a_constrained_layer() -> None:
    model, (x, y) = net(), batches(1)[0]
    optimizer = KFACSGD(model, lr=1e-3, momentum=0.9)
    train(model, optimizer, [(x, y)] * 12, lambda: clamp_data(model, 0))
    told = ["changed between steps" in line for line in repr(optimizer.curvature).splitlines() if "Linear" in line]
    assert told == [False, True, False]
    state, resumed = copy.deepcopy(optimizer.state_dict()), KFACSGD(net(), lr=1e-3, momentum=0.9)
    resumed.load_state_dict(state)
    known = [of["kfac"]["current"] for of in resumed.state_dict()["state"].values() if "kfac" in of]
    assert [of_layer["changes"] for of_layer in known] == [0, 2, 0]
    state["state"][2]["kfac"]["current"]["changes"] = 3
    with pytest.raises(ValueError, match="changes=3"):
        resumed.load_state_dict(state)


@pytest.mark.parametrize("saved_after", [7, 8, 9, 24, 25])
def test_a_resumed_run_forgets_what_the_other_forgets(saved_after: int) -> None:
    """What a step has left means nothing in another process: what it tells is in the state."""
    model = monotone()
    optimizer = KFACAdam(model, lr=1e-2)
    train_clamped(optimizer, model, saved_after, limit=0.5)
    other = copy.deepcopy(model)
    resumed = KFACAdam(other, lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for of, by in ((model, optimizer), (other, resumed)):
        train_clamped(by, of, 12, limit=0.5)
    assert_identical(model, other)


@pytest.mark.parametrize("whole", [False, True])
def test_to_save_a_state_changes_nothing(whole: bool) -> None:
    """Also while averaged weights are in the model's place, as some loops save them; and under a projection."""
    ends = []
    for saves in (False, True):
        model = net()
        optimizer = KFACSGD(model, lr=1e-2, momentum=0.9)
        for step, (x, y) in enumerate(batches(40)):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                clamp_later(model, step)
            if saves and step % 3 == 0:
                own = copy.deepcopy(model.state_dict())
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.9)
                optimizer.full_state_dict() if whole else optimizer.state_dict()
                model.load_state_dict(own)
        ends.append(model)
    assert_identical(*ends)


def test_a_state_that_is_loaded_beside_the_weights_keeps_its_stretches() -> None:
    """Going back to an earlier point of the run is no projection."""
    model = net()
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9)
    train(model, optimizer, batches(24)[:12])
    state, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    ends = []
    for _ in range(2):
        train(model, optimizer, batches(24)[12:])
        ends.append(values(model))
        optimizer.load_state_dict(state)
        model.load_state_dict(weights)
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def test_without_a_stretch_nothing_is_kept_of_the_weights() -> None:
    model = net()
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9, scaling=Graft(stretch=False))
    train(model, optimizer, batches(3))
    assert not any("kfac_stretch" in state for state in optimizer.state.values())


def test_weights_are_compared_in_every_step_at_first_and_then_in_every_seventh() -> None:
    """To compare them takes a pass over all that are stretched."""
    model = net()
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9)
    compared = []
    for i, (x, y) in enumerate(batches(42)):
        if optimizer.curvature.stages.steering.watch.watched:
            compared.append(i)
        train(model, optimizer, [(x, y)])
    assert compared[compared.index(10) :] == [*range(10, 16), 21, 28, 35]


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("difference", [0.0, 1e-14, -1e-14, 1e-10, -1e-10])
def test_of_saved_norms_roundings_are_no_changes(is_saved: bool, difference: float) -> None:
    """Another processor may have added them up in another order; the process that goes on adds them up again."""
    watch, weights = WeightWatch(), [nn.Parameter(torch.randn(30, 40, dtype=torch.float64)) for _ in range(2)]
    watch.note(weights)
    if is_saved:
        watch.restore(watch.marks())
    with torch.no_grad():
        weights[1].mul_(1 + difference)
    assert watch.edits().tolist() == [0, abs(difference) > (1e-12 if is_saved else 0)]


@pytest.mark.parametrize("is_saved", [True, False])
@given(seed=st.integers(0, 2**20), shape=st.lists(st.integers(1, 30), max_size=3), is_transposed=st.booleans())
def test_in_single_precision_the_last_bit_of_one_weight_is_a_change(
    is_saved: bool, seed: int, shape: list[int], is_transposed: bool
) -> None:
    """The bits are added up as integers, which no order of summation rounds."""
    torch.manual_seed(seed)
    watch, weights = WeightWatch(), [nn.Parameter(torch.randn(shape)) for _ in range(3)]
    if is_transposed and len(shape) > 1:
        weights[1].data = weights[1].data.mT
    watch.note(weights)
    if is_saved:
        marks = watch.marks()
        assert min(marks.values()) >= 0  # a saved -1 stands for none
        watch.restore(marks)
    assert not any(watch.edits())
    with torch.no_grad():
        entry = weights[1][(-1,) * len(shape)]
        entry.copy_(torch.nextafter(entry, torch.tensor(torch.inf)))
    assert watch.edits().tolist() == [0, 1, 0]


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("shape", [(256,), (64, 64), (3, 512)])
def test_in_single_precision_weights_that_are_doubled_or_halved_are_changed(
    shape: tuple[int, ...], factor: float, is_transposed: bool
) -> None:
    """Each exponent moves by the same number, and a multiple of 256 of them cancelled out in sums of 31 bits."""
    watch, weight = WeightWatch(), nn.Parameter(torch.randn(shape))
    if is_transposed and len(shape) > 1:
        weight.data = weight.data.mT
    watch.note([weight])
    with torch.no_grad():
        weight.mul_(factor)
    assert watch.edits().tolist() == [1]


@pytest.mark.parametrize("closes", [True, False])
def test_whoever_turns_no_step_looks_at_no_weights(closes: bool) -> None:
    """An optimizer that was closed, or goes on by preconditioned gradients."""
    model = net()
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9)
    looks = []
    for i, (x, y) in enumerate(batches(14)):
        if i == 12 and closes:
            optimizer.curvature.close()
        elif i == 12:
            optimizer.precondition = "gradient"
        train(model, optimizer, [(x, y)])
        looks.append(bool(optimizer.curvature.stages.steering.watch.watched))
    assert looks[10:] == [True, True, False, False]
