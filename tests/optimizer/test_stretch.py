"""Steps that go further in flat directions, against a dense solve beside torch's optimizers."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACSGD, EigenSolver, Graft, InverseSolver, KFACAdam, KFACAdamW, OfLargest, OfMean
from kfac_optim.bases import buckets_of
from kfac_optim.common import machines
from kfac_optim.steering import Readings, brake, graft, inner_products, lessons_of, opponents, plan, reach, trust
from tests.helpers.compare import assert_identical, assert_near, assert_same_weights, snapshot
from tests.helpers.files import through_a_file
from tests.helpers.reference import Oracle, averaged, backward, log_cosh
from tests.helpers.settings import OPTIONS

pytestmark = pytest.mark.usefixtures("float64")

DAMPING = 0.1
CASES: list[tuple[Any, Any, dict[str, Any]]] = [
    (KFACSGD, torch.optim.SGD, {"momentum": 0.9}),
    (KFACSGD, torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    (KFACSGD, torch.optim.SGD, {"momentum": 0.0}),
    (KFACAdam, torch.optim.Adam, {}),
    (KFACAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
]
PARTS = ("weight", "bias")
loss = averaged(log_cosh, "batch")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data() -> list[tuple[tuple[Tensor], Tensor]]:
    return [((torch.randn(6, 3),), torch.randn(6, 2))]


class Stretched:
    """The rule written out for a model: torch's own step, and a dense solve with its first moment."""

    def __init__(self, model: nn.Module, base: Any, how: dict[str, Any], lr: float) -> None:
        self.model, self.oracle = copy.deepcopy(model), Oracle(copy.deepcopy(model))
        self.optimizer, self.how, self.lr = base(self.model.parameters(), lr=lr, **how), how, lr
        self.noted, self.steps = False, 0
        self.reach = {layer.name: 0.01 for layer in self.oracle.layers}
        self.fell: set[str] = set()
        self.descent: dict[str, float] = {}
        self.stretch: dict[str, Tensor] = {}
        self.averages: dict[str, Tensor] = {}  # of the gradients, in place of a first moment

    def step(self, passes: list[tuple[tuple[Tensor], Tensor]]) -> None:
        seen = self.oracle.observe(passes, loss, snapshot(self.model))
        self.oracle.update(seen)
        self.oracle.decompose()
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        backward(self.model, passes, loss)
        if self.stretch:
            self.learn(seen.gradients)
        self.optimizer.step()
        old = self.averages or seen.gradients
        self.averages = {name: 0.9 * old[name] + 0.1 * g for name, g in seen.gradients.items()}
        added = max(self.reach.values()) > 3e-4  # else, while it does not turn, steps are the base's own, mostly
        due = self.steps % min(3, 1 + self.steps) == 0
        repeats = self.noted and self.steps and added and not due
        if not repeats:
            self.stretch, self.noted = {}, added or self.steps % 4 == 0
        if not repeats and self.steps and self.noted:
            self.look(seen.gradients, before)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                reach = self.reach[name.rpartition(".")[0]]
                p -= self.lr * reach * self.stretch.get(name, torch.zeros(()))
        self.steps += 1

    def learn(self, gradients: dict[str, Tensor]) -> None:
        slopes = {
            layer: sum(float((gradients[f"{layer}.{p}"] * self.stretch[f"{layer}.{p}"]).sum()) for p in PARTS)
            for layer in self.reach
            if f"{layer}.weight" in self.stretch and self.descent[layer] > 0  # 0: nothing was stretched
        }
        for layer, slope in slopes.items():
            share = slope / self.descent[layer]
            excess = abs(share - 0.5) - 0.5
            if share > 0.05 and (layer not in self.fell or excess <= 1):
                faster = 0.0 if layer in self.fell else min(max(2 * share - 1, 0.0), 1.0)
                self.reach[layer] = min(3.0, self.reach[layer] * 1.1 ** (1 - faster) * 1.4**faster)
            else:
                self.fell.add(layer)
                self.reach[layer] = max(3e-4, self.reach[layer] / max(1.1, min(30.0, 1.1 * excess**2)))
            if share <= 0:
                self.stretch = {name: s for name, s in self.stretch.items() if not name.startswith(f"{layer}.")}

    def look(self, gradients: dict[str, Tensor], before: dict[str, Tensor]) -> None:
        moments, updates, weight = {}, {}, 1.0
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            if self.how.get("nesterov"):
                moment = gradients[name] + self.how["momentum"] * moment
            if momentum := self.how.get("momentum"):  # the weights of all gradients so far in the moment
                weight = (1 - momentum ** (self.steps + 1)) / (1 - momentum)
                weight = 1 + momentum * weight if self.how.get("nesterov") else weight
            moments[name] = (self.averages[name] if moment is None else moment).detach().clone()
            decay = self.lr * self.how.get("weight_decay", 0.0) * before[name]
            updates[name] = (before[name] - decay - p.detach()) / self.lr
        for layer in self.oracle.layers:
            (pair,), m, u = self.oracle.curvature[layer.name].pairs, layer.of(moments)[0], layer.of(updates)[0]
            steepest = float(torch.linalg.eigvalsh(pair.a)[-1] * torch.linalg.eigvalsh(pair.g)[-1])
            gain = (1 + DAMPING) * steepest * pair.solve(m, DAMPING * steepest, False, "eigen") - m
            stretch = max(0.0, float((u * m).sum() / (m * m).sum())) * gain
            self.descent[layer.name] = float((m * stretch).sum()) / weight
            self.stretch[f"{layer.name}.weight"], self.stretch[f"{layer.name}.bias"] = stretch[:, :-1], stretch[:, -1]


def options(lr: float, **more: Any) -> dict[str, Any]:
    exact = {name: value for name, value in OPTIONS.items() if name != "momentum"}
    mode = {"precondition": "momentum", "scaling": "graft", "solver": EigenSolver(0.0)}
    return exact | mode | {"lr": lr, "damping": OfLargest(DAMPING)} | more


def hold_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trust, graft):
        monkeypatch.setattr(module, "moved", lambda notches, *_, **__: notches)


@pytest.fixture
def never_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_what_is_learned(monkeypatch)
    monkeypatch.setattr(brake, "_SLACK", math.inf)
    monkeypatch.setattr(brake, "_OUTSIZED", math.inf)


@pytest.mark.usefixtures("never_turned", "soon_grown")
@pytest.mark.parametrize(("kfac", "base", "how"), CASES)
@pytest.mark.parametrize("rate", [0.02, 3.0])
def test_steps_go_further_where_it_is_flat(kfac: Any, base: Any, how: dict[str, Any], rate: float) -> None:
    """Reach grows at a small rate; at a large one it also falls."""
    model, batch = net(), data()
    textbook, optimizer = Stretched(model, base, how, rate), kfac(model, **options(rate, **how))
    seen, differ = [], False
    least, most = (0.01 * growth**4 for growth in (1.1, 1.4))  # the first steps repeat one that had no stretch yet
    for _ in range(8):
        textbook.step(batch)
        backward(model, batch, loss)
        optimizer.step()
        assert_same_weights(model, textbook.model, 1e-5)  # how far a gradient has turned is known in float32
        report = optimizer.curvature.report()
        for layer, reached in textbook.reach.items() if seen else ():
            assert report["layers"][layer]["reach"] == pytest.approx(reached, rel=1e-5)
        differ |= textbook.reach["0"] != textbook.reach["2"]
        seen.append(report["reach"])
        if len(seen) > 1:
            assert seen[-1] == pytest.approx(max(textbook.reach.values()), rel=1e-5)
    assert seen[:2] == [0.0, 0.01] and (least < seen[-1] < most and not textbook.fell) == (rate < 0.1)
    assert differ or rate < 0.1
    shown = f"reach up to {seen[-1]:.2g}" if seen[-1] > reach.LEAST_REACH else "reach at its least"
    assert shown in repr(optimizer.curvature)
    for layer in optimizer.curvature.stages.blocks:
        layer.set_learned(reach=reach.LEAST_REACH)
    assert "reach at its least" in repr(optimizer.curvature)


@pytest.mark.parametrize("reaches", [(reach.LEAST_REACH, reach.LEAST_REACH), (reach.LEAST_REACH, 0.1), (0.1, 0.1)])
def test_directions_are_computed_in_every_step_while_a_layer_is_stretched(reaches: tuple[float, float]) -> None:
    """At the least reach, with steps that are not turned either, they are computed now and then."""
    model = net()
    optimizer = KFACSGD(model, **options(0.02, momentum=0.9))
    for _ in range(6):
        backward(model, data(), loss)
        optimizer.step()
    optimizer.curvature.stages.steering.trust.notches = 0
    for block, reached in zip(optimizer.curvature.stages.blocks, reaches, strict=True):
        block.set_learned(reach=reached)
    assert optimizer.curvature.stages.plan().stretches
    assert optimizer.curvature.stages.plan().computes == (max(reaches) > reach.LEAST_REACH)


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize(("kfac", "momentum"), [(KFACSGD, 0.9), (KFACSGD, 0.0), (KFACAdam, None)])
def test_the_graft_follows_the_sign_along_the_stretches(kfac: Any, momentum: float | None) -> None:
    """Of all layers together, where the base keeps a momentum that grows with the gradient; it is part of the state."""
    model, batch = net(), data()
    how: dict[str, Any] = {"lr": 0.1} if momentum is None else {"lr": 1.0, "momentum": momentum}
    optimizer: Any = kfac(model, **options(**how))
    sums, expected, seen = [], [100], [1.0]
    for _ in range(14):
        noted = {
            p: optimizer.state[p]["kfac_stretch"] for p in model.parameters() if "kfac_stretch" in optimizer.state[p]
        }
        backward(model, batch, loss)
        sums.append(float(sum((p.grad * noted[p]).sum() for p in noted)))
        optimizer.step()
        told = expected[-1] + 3 * ((sums[-1] > 0) - (sums[-1] < 0))
        expected.append(min(100, max(0, told)) if momentum else 100)
        seen.append(optimizer.curvature.report()["graft"])
    assert seen == pytest.approx([hundredths / 100 for hundredths in expected])
    assert (min(seen) < 1) == bool(momentum) and min(sums) < 0 < max(sums)
    other: Any = kfac(net(), **options(**how))
    other.load_state_dict(optimizer.state_dict())
    assert other.curvature.report()["graft"] == seen[-1]
    optimizer.curvature.damping = OfMean(DAMPING)  # directions keep their length, nothing is stretched
    assert optimizer.curvature.stages.plan().graft == 1
    optimizer.curvature.damping = OfLargest(DAMPING)
    optimizer.param_groups[0]["momentum"] = 0.0
    for _ in range(4):
        backward(model, batch, loss)
        optimizer.step()
    assert optimizer.curvature.report()["graft"] == 1


@pytest.mark.parametrize("edits", [False, True])
def test_the_graft_does_not_follow_a_stretch_that_may_be_undone(edits: bool) -> None:
    """The loss seems to rise along that of the first layer, and falls along that of the other one."""
    model, batch = net(), data()
    optimizer = KFACSGD(model, **options(0.1, momentum=0.9))
    for _ in range(4):
        backward(model, batch, loss)
        optimizer.step()
    optimizer.curvature.stages.steering.graft.hundredths = 50
    with torch.no_grad():
        model[0].weight.mul_(1.5 if edits else 1.0)  # type: ignore[operator]
    backward(model, batch, loss)
    for name, p in model.named_parameters():
        optimizer.state[p]["kfac_stretch"].copy_(p.grad).mul_(-1e3 if name.startswith("0") else 1.0)  # type: ignore[arg-type]
    optimizer.step()
    assert optimizer.curvature.stages.steering.graft.hundredths == (53 if edits else 47)


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize("launches_count", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_directions_without_graft_are_the_damped_steps_of_the_base(
    momentum: float, launches_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a dense solve: ``c gamma P m``."""
    if launches_count:
        monkeypatch.setattr(machines, "machine_of", lambda _: "accelerator")
    model, batch = net(), data()
    optimizer: Any = KFACSGD(model, **options(0.1, momentum=momentum))
    oracle = Oracle(copy.deepcopy(model))
    for learned in (trust.Trust, graft.GraftShare, brake.Brake):
        monkeypatch.setattr(learned, "learn", lambda *_, **__: None)
    steering = optimizer.curvature.stages.steering
    steering.trust.notches, steering.graft.hundredths = 5, 0
    monkeypatch.setattr(trust.Trust, "repeats", lambda *_, **__: False)
    for _ in range(3):
        oracle.update(oracle.observe(batch, loss, snapshot(model)))
        oracle.decompose()
        before = {p: p.detach().clone() for p in model.parameters()}
        backward(model, batch, loss)
        optimizer.step()
    for layer in oracle.layers:
        named = dict(model.named_parameters())
        own = [named[f"{layer.name}.{part}"] for part in PARTS]
        key = "momentum_buffer" if momentum else "kfac_moment"
        u, m, turn, change, stretch = (
            torch.cat([of[0], of[1][:, None]], 1)
            for of in (
                [optimizer.state[p]["momentum_buffer"] if momentum else p.grad for p in own],
                [optimizer.state[p][key] for p in own],
                [optimizer.state[p]["kfac_turn"] for p in own],
                [(before[p] - p.detach()) / 0.1 for p in own],
                [optimizer.state[p]["kfac_stretch"] for p in own],
            )
        )
        (pair,) = oracle.curvature[layer.name].pairs
        gamma = DAMPING * float(torch.linalg.eigvalsh(pair.a)[-1] * torch.linalg.eigvalsh(pair.g)[-1])
        rate = max(0.0, float((u * m).sum() / (m * m).sum()))
        k = rate * gamma * pair.solve(m, gamma, False, "eigen")
        assert_near(turn, k - u, layer.name, 1e-6)
        reached = optimizer.curvature.stages.trained.reaches()[own[0]]
        assert_near(change, 0.5 * (u + k) + reached * stretch, layer.name, 1e-6)


@pytest.mark.parametrize("launches_count", [False, True])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_factors_may_be_in_more_precision_than_the_steps(
    solver: str, launches_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launches_count:
        monkeypatch.setattr(machines, "machine_of", lambda _: "accelerator")
    for learned in (trust.Trust, graft.GraftShare):
        monkeypatch.setattr(learned, "learn", lambda *_, **__: None)
    trained = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = net().float()
        batch = [((inputs.float(),), targets.float()) for (inputs,), targets in data()]
        optimizer: Any = KFACSGD(model, lr=0.1, momentum=0.9, solver=solver, factor_dtype=dtype)
        steering = optimizer.curvature.stages.steering
        steering.trust.notches, steering.graft.hundredths = 5, 50
        for _ in range(4):
            backward(model, batch, loss)
            optimizer.step()
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_near(*trained, "weights", 1e-5)


def stepped() -> tuple[KFACSGD, nn.Parameter]:
    """An optimizer after a step, and the weight of its second layer."""
    model = net()
    optimizer = KFACSGD(model, **options(0.1))
    backward(model, data(), loss)
    optimizer.step()
    weight = model[2].weight
    assert isinstance(weight, nn.Parameter)
    return optimizer, weight


def learned(slope: float, descent: float, times: int = 1) -> tuple[float, bool]:
    """The reach of a layer that has learned this so often, and whether its stretch was too long."""
    optimizer, weight = stepped()
    blocks = optimizer.curvature.stages.blocks
    for _ in range(times):
        too_long = reach.learn_reaches(blocks, {weight: (slope, descent)}, set(), warms_up=False, grows=False)
    assert blocks[0].reach == 0.01, "that of another layer"
    assert not too_long or too_long == set(blocks[1].layer.parameters)
    return blocks[1].reach, bool(too_long)


def test_reach_falls_by_as_much_as_the_gradient_has_turned_round() -> None:
    rises = [(0.5, 1.1), (0.051, 1.1)]
    falls = [
        (0.049, 1 / 1.1),
        (1e-9, 1 / 1.1),
        (-0.1, 1 / 1.1),
        (-1.0, 1 / 1.1),
        (-2.0, 1 / 4.4),
        (-9.0, 1 / 30),
        (-1e200, 1 / 30),
    ]
    for slope, expected in rises + falls:
        assert learned(2 * slope, 2.0) == (pytest.approx(0.01 * expected), slope <= 0)
    assert learned(1.0, 1.0, 200) == (3.0, False)
    assert learned(-1.0, 1.0, 200) == (3e-4, True)


def test_after_its_first_fall_reach_falls_where_a_slope_is_noise() -> None:
    """By as much as where the gradient has turned round as far; the stretch is not too long, and may be repeated."""
    optimizer, weight = stepped()
    block = optimizer.curvature.stages.blocks[1]
    for slope, expected in [
        (-0.1, 1 / 1.1),
        (1.5, 1.1),
        (2.0, 1.1),
        (3.0, 1 / 4.4),
        (10.0, 1 / 30),
        (math.inf, 1 / 30),
    ]:
        block.set_learned(reach=0.1)
        too_long = reach.learn_reaches([block], {weight: (slope, 1.0)}, set(), warms_up=False, grows=False)
        assert (block.reach, bool(too_long)) == (pytest.approx(0.1 * expected), slope <= 0)


def test_before_its_first_fall_reach_rises_faster_where_the_slope_has_hardly_changed() -> None:
    """A fall with the rate is none: it says nothing about the loss. Whether it has fallen is part of the state."""
    optimizer, weight = stepped()
    block = optimizer.curvature.stages.blocks[1]
    for growth, slope in [(1.1, 0.4), (1.1, 0.5), ((1.1 * 1.4) ** 0.5, 0.75), (1.4, 1.0), (1.4, 5.0), (1.4, math.inf)]:
        before = block.reach
        reach.learn_reaches([block], {weight: (slope, 1.0)}, set(), warms_up=False, grows=False)
        reach.lower_reaches([block], 1.2)
        assert block.reach == pytest.approx(before * growth / 1.2) and not block.learned("fell")
    for before, grows, growth in [(0.09, True, 1.4), (0.1, True, 1.1), (1.0, True, 1.1), (1.0, False, 1.4)]:
        block.set_learned(reach=before)
        reach.learn_reaches([block], {weight: (1.0, 1.0)}, set(), warms_up=False, grows=grows)
        assert block.reach == pytest.approx(before * growth)
    before = block.reach
    reach.learn_reaches([block], {weight: (1.0, 1.0)}, set(), warms_up=True, grows=False)
    assert block.reach == pytest.approx(1.1 * before)
    reach.learn_reaches([block], {weight: (-0.1, 1.0)}, set(), warms_up=False, grows=False)
    other, same_weight = stepped()
    for each, of in [(optimizer, weight), (other, same_weight)]:
        if each is other:
            each.load_state_dict(optimizer.state_dict())
        block = each.curvature.stages.blocks[1]
        assert [b.learned("fell") for b in each.curvature.stages.blocks] == [False, True]
        before = block.reach
        reach.learn_reaches([block], {of: (1.0, 1.0)}, set(), warms_up=False, grows=False)
        assert block.reach == pytest.approx(1.1 * before)
        block.set_learned(reach=before)


def test_slopes_count_by_the_rates_of_their_groups() -> None:
    """Which may be numbers or tensors."""
    model = net()
    groups = [{"params": model[i].parameters(), "lr": lr} for i, lr in ((0, 0.02), (2, 0.1))]
    optimizer = KFACSGD(groups, model=model, **options(0.1, momentum=0.9))
    for _ in range(3):
        backward(model, data(), loss)
        optimizer.step()

    def slopes(rates: Sequence[Any]) -> Any:
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        lessons = lessons_of(
            optimizer, buckets_of(optimizer), optimizer.curvature.stages.steering.watch, set(model.parameters())
        )
        return Readings([p.grad for p in model.parameters()], rates, lessons, []).slopes(lessons)

    ones, found = slopes((1.0, 1.0)), slopes((0.02, torch.tensor(0.1)))
    assert len(ones) == 4
    for p, lr in zip(model.parameters(), (0.02, 0.02, 0.1, 0.1), strict=True):
        assert found[p] == pytest.approx(tuple(lr * slope for slope in ones[p]))


def test_a_state_that_does_not_say_whether_reaches_fell_is_refused() -> None:
    """As one that an earlier version has saved."""
    optimizer, _ = stepped()
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][2]["kfac"]["current"]["fell"]
    with pytest.raises(ValueError, match=r"state of '2' has fell=None.*of an earlier version"):
        optimizer.load_state_dict(state)


@pytest.mark.usefixtures("never_turned", "soon_grown")
@pytest.mark.parametrize("rise", [1.0, 1.05, 0.95])
def test_in_a_warm_up_reach_rises_slowly(rise: float) -> None:
    """Not so at a rate that is constant or falls."""
    model, batch = net(), data()
    optimizer = KFACSGD(model, **options(0.001, momentum=0.9))
    seen: list[float] = []
    for _ in range(8):
        backward(model, batch, loss)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= rise
        seen.append(optimizer.curvature.report()["reach"])
    growths = {round(after / before, 3) for before, after in zip(seen[1:], seen[2:], strict=False)}
    assert growths == ({1.0, 1.1} if rise > 1 else {1.0, 1.4})


def test_a_slope_that_is_not_a_number_is_that_of_a_wall() -> None:
    """Squares of large gradients may overflow where the gradients do not."""
    assert learned(float("nan"), 2.0) == (pytest.approx(0.01 / 30), True)


def test_a_stretch_of_nothing_teaches_nothing() -> None:
    """At a rate of 0, or on gradients of 0."""
    assert learned(0.0, 0.0) == (0.01, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alignments_do_not_depend_on_the_place_in_memory(dtype: torch.dtype) -> None:
    """What a step records are parts of matrices, and copies of these once a state has been loaded."""
    g, storage = torch.randn(1001, dtype=dtype), torch.randn(1033, dtype=dtype)
    for start in range(32):
        v = storage[start : start + 1001]
        (found, copied) = (inner_products.alignments([inner_products.Compared([g], [one])]) for one in (v, v.clone()))
        assert torch.equal(found, copied), f"from the number {start} of a storage on"


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_alignments_are_those_of_each_parameter(monkeypatch: pytest.MonkeyPatch, is_asynchronous: bool) -> None:
    """In their order, whatever their sizes, kinds and rates are; also where they lie side by side."""
    monkeypatch.setattr(inner_products, "is_asynchronous", lambda _: is_asynchronous)
    monkeypatch.setattr(inner_products, "_BATCH_NUMEL", 701)
    monkeypatch.setattr(inner_products, "SMALL_NUMEL", 20)
    monkeypatch.setattr(inner_products, "_batches", inspect.unwrap(inner_products._batches))  # without its cache
    shapes = [(3, 2), (700,), (4,), (2, 2), (1,), (5, 7), (20,)]
    g, v = ([torch.randn(*shape, dtype=torch.float64) for shape in shapes] for _ in range(2))
    expected = torch.stack([(a * b).sum() for a, b in zip(g, v, strict=True)])
    half = [vector.float() for vector in v]
    compared = [
        inner_products.Compared(g, v, 0.5),
        inner_products.Compared(g, half, torch.tensor(3.0)),
        inner_products.Compared(g[:2], v[:2]),
    ]
    expected = torch.cat([0.5 * expected, 3 * expected, expected[:2]])
    copies: inner_products.Copies = {}
    for _ in range(2):  # with what is side by side already
        assert_near(inner_products.alignments(compared, copies), expected, rel=1e-5)
        assert_near(inner_products.total_alignment(compared, copies), expected.sum(), rel=1e-5)


@pytest.mark.parametrize(
    "how",
    [{"damping": OfMean(0.1)}, {"damping": 0.1}, {"scaling": Graft(trust=0.0)}, {"scaling": Graft(stretch=False)}],
)
def test_who_is_not_stretched(how: dict[str, Any]) -> None:
    model = net()
    optimizer = KFACSGD(model, **options(0.1, momentum=0.9, **how))
    for _ in range(3):  # nobody is stretched before the second step
        backward(model, data(), loss)
        optimizer.step()
    assert optimizer.curvature.report()["reach"] == 0
    assert "reach" not in repr(optimizer.curvature)
    assert not any("kfac_stretch" in state for state in optimizer.state.values())


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize("before", [5, 7])
@pytest.mark.parametrize(("kfac", "base", "how"), CASES)
def test_a_resumed_run_stretches_alike(kfac: Any, base: Any, how: dict[str, Any], before: int) -> None:
    model, batch = net(), data()
    optimizer = kfac(model, **options(0.02, **how))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backward(model, batch, loss)
        optimizer.step()

    for _ in range(before):
        step(model, optimizer)
    other = copy.deepcopy(model)
    resumed = kfac(other, **options(0.02, **how))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(4):
        step(model, optimizer)
        step(other, resumed)
        ours, theirs = (
            list(engine.stages.trained.reaches().values()) for engine in (optimizer.curvature, resumed.curvature)
        )
        assert ours == theirs and max(ours) > 0.01
        assert_identical(model, other)


def test_adams_step_is_braked_after_a_gradient_that_is_unusually_large() -> None:
    """Where gradients have become small, a single large one makes its update many times as long."""
    model, batch = net(), data()
    optimizer = KFACAdam(model, **options(0.001, betas=(0.5, 0.999)))
    usual, expected, told = 0.0, 1.0, []
    for number in range(20):
        scale = 1.0 if number in (0, 1, 18) else 1e-3
        backward(model, batch, lambda output, target, by=scale: by * loss(output, target))  # type: ignore[misc]
        optimizer.step()
        told.append(optimizer.curvature.report()["brake"])  # of the step before
        assert told[-1] == pytest.approx(expected, rel=1e-5)
        updates = []
        for p in model.parameters():
            state = optimizer.state[p]
            size = (state["exp_avg_sq"] / (1 - 0.999 ** (number + 1))).sqrt() + 1e-8
            updates.append(state["exp_avg"] / (1 - 0.5 ** (number + 1)) / size)
        length = float(torch.cat([update.flatten() for update in updates]).norm())
        expected = min(1.0, 1.3 * usual / length) ** 2 if usual else 1.0
        usual += (length - usual) / min(10, number + 1)
    assert told[-1] < 0.5 and min(told[:-1]) == 1


@pytest.mark.parametrize(("seed", "rate", "momentum"), [(3, 0.1, 0.0), (4, 0.1, 0.0), (2, 0.05, 0.9), (4, 0.05, 0.9)])
def test_full_batches_do_not_run_away(seed: int, rate: float, momentum: float) -> None:
    """Near the edge of stability: reaches rise on a plateau, and where it ends gradients are at once a hundredfold."""
    torch.manual_seed(seed)
    layers = [nn.Linear(n, m, dtype=torch.float32) for n, m in ((1, 64), (64, 64), (64, 1))]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    x = torch.linspace(-3, 3, 200, dtype=torch.float32)[:, None]
    y = torch.sin(3 * x) + 0.3 * torch.cos(7 * x)
    optimizer = KFACSGD(model, lr=rate, momentum=momentum)
    for _ in range(150):
        optimizer.zero_grad()
        error = nn.functional.mse_loss(model(x), y)
        error.backward()
        optimizer.step()
    assert float(error.detach()) < 0.6  # as it was at first; without the last part of the brake it is 1e8 or more


def test_the_stretch_is_braked_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the base's update is much longer than usual."""
    hold_what_is_learned(monkeypatch)
    model, batch = net(), data()
    other = copy.deepcopy(model)
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    optimizer = KFACSGD(model, **options(0.1, momentum=0.9))
    backward(model, batch, loss)
    optimizer.step()  # nothing is stretched before the second step
    backward(other, batch, loss)
    plain.step()
    monkeypatch.setattr(brake.Brake, "of", lambda *_: 0.25)
    optimizer.curvature.stages.steering.brake.last = 0.25
    monkeypatch.setattr(brake.Brake, "learn", lambda *_, **__: None)  # that it is another one
    backward(model, batch, loss)
    backward(other, batch, loss)
    optimizer.step()
    plain.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        shortened = 0.1 * 0.01 * 0.25 * optimizer.state[p]["kfac_stretch"]
        torch.testing.assert_close(q - p, shortened, rtol=1e-4, atol=1e-12)
        q.data.copy_(p)
    monkeypatch.setattr(trust, "_YOUNG", 1)
    noted = {p: optimizer.state[p]["kfac_stretch"] for p in model.parameters()}
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, batch, loss)
    optimizer.step()
    reaches = optimizer.curvature.stages.trained.reaches()
    for p, last in zip(model.parameters(), before, strict=True):
        assert optimizer.state[p]["kfac_stretch"] is noted[p], "it repeats"
        moved = last - p - 0.1 * optimizer.state[p]["momentum_buffer"]
        torch.testing.assert_close(moved, 0.1 * reaches[p] * 0.25 * noted[p], rtol=1e-4, atol=1e-12)


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize(("momentum", "too_far"), [(0.9, False), (0.9, True), (0.0, False)])
def test_what_a_step_repeats(momentum: float, too_far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stretch that was too long; and of plain SGD no turn, which is of another gradient's update."""
    model, batch = net(), data()
    optimizer: Any = KFACSGD(model, **options(0.1, momentum=momentum))

    def step() -> None:
        backward(model, batch, loss)
        optimizer.step()

    for _ in range(3):
        step()
    learned = optimizer.curvature.stages.steering.trust
    learned.notches = 5
    monkeypatch.setattr(type(learned), "learn", lambda *_, **__: None)
    monkeypatch.setattr(brake.Brake, "of", lambda *_: None)
    step()  # computes
    noted = {p: dict(optimizer.state[p]) for p in model.parameters()}
    before = {p: p.detach().clone() for p in model.parameters()}
    monkeypatch.setattr(plan, "learn_reaches", lambda *_, **__: set(model.parameters()) if too_far else set())
    step()
    for p, reached in optimizer.curvature.stages.trained.reaches().items():
        update = optimizer.state[p]["momentum_buffer"] if momentum else p.grad
        turned, stretched = noted[p].get("kfac_change", torch.zeros_like(p)), noted[p]["kfac_stretch"]
        assert bool(turned.any()) == (momentum > 0) and bool(stretched.any())
        assert_near((before[p] - p.detach()) / 0.1 - update, turned + (not too_far) * reached * stretched, rel=1e-9)
        assert optimizer.state[p]["kfac_turn"] is noted[p]["kfac_turn"], "it was not computed anew"
        assert ("kfac_stretch" in optimizer.state[p]) != too_far


def zero_by_model(player: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    player.zero_grad()


def zero_by_optimizer(player: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


@pytest.mark.parametrize("zero", [zero_by_model, zero_by_optimizer])
@pytest.mark.parametrize("generator_first", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_discriminator_is_not_stretched(zero: Any, generator_first: bool, frozen: bool) -> None:
    """It gets gradients by which it does not step. Nor is its generator, or anybody who steps in between.

    Where the players are frozen by turns it gets none, but is seen to serve the generator.
    """
    generator, discriminator = net(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    players = {p: KFACAdam(p.parameters(), **options(0.01)) for p in (generator, discriminator)}

    def score(x: Tensor, sign: int) -> Tensor:
        return nn.functional.softplus(sign * discriminator(x)).mean()

    def generate() -> None:
        discriminator.requires_grad_(not frozen)
        zero(generator, players[generator])
        score(generator(torch.randn(6, 3)), -1).backward()
        players[generator].step()
        discriminator.requires_grad_(True)

    for _ in range(4):
        if generator_first:
            generate()
        zero(discriminator, players[discriminator])
        score(torch.randn(6, 2), -1).backward()
        score(generator(torch.randn(6, 3)).detach(), 1).backward()
        players[discriminator].step()
        if not generator_first:
            generate()
    copied = copy.deepcopy(((generator, discriminator), players))
    assert all(opponents.OPPONENTS.exist_for(player.curvature.stages.steering.game) for player in copied[1].values())
    for player in players.values():
        assert player.curvature.reach == 0
        title = repr(player.curvature).partition("\n")[0]
        assert "steps left to the base optimizer: two networks seem to train against each other" in title
        assert "if actor and critic: scaling=Graft(stretch=True)" in title
        assert not any("kfac_stretch" in state for state in player.state.values())
    resumed = KFACAdam(discriminator.parameters(), **options(0.01))
    resumed.load_state_dict(players[discriminator].state_dict())
    assert resumed.curvature.stages.steering.game.opposes
    players[discriminator] = resumed
    for _ in range(20):  # without the discriminator from now on
        zero(generator, players[generator])
        score(generator(torch.randn(6, 3)), -1).backward()
        players[generator].step()
    assert players[generator].curvature.reach > 0 == resumed.curvature.reach
    for _ in range(18):  # alone, until that is forgotten
        zero(discriminator, resumed)
        score(torch.randn(6, 2), 1).backward()
        resumed.step()
    assert resumed.curvature.reach > 0


@pytest.mark.parametrize("keywords", [{}, {"scaling": Graft(stretch=False)}, {"damping": 0.03}], ids=str)
@pytest.mark.parametrize(("kfac", "base", "how"), CASES)
def test_players_take_the_steps_of_the_base_class(
    kfac: Any, base: Any, how: dict[str, Any], keywords: dict[str, Any]
) -> None:
    """However far steps turned before it was known; afterwards they go on from there."""
    player, rival = net(), net()
    optimizer = kfac(player, **options(0.01, **how) | keywords)
    others = torch.optim.SGD(rival.parameters(), lr=0.01)

    def step(*, plays: bool) -> None:
        if plays:
            backward(player, data(), loss)
        optimizer.zero_grad()
        backward(player, data(), loss)
        optimizer.step()
        others.step()

    for _ in range(4):
        step(plays=True)
    assert optimizer.curvature.stages.sits_out
    steering = optimizer.curvature.stages.steering
    steering.trust.notches = 5
    twin = copy.deepcopy(player)
    reference = base(twin.parameters(), lr=0.01, **how)
    own = [{k: v for k, v in optimizer.state[p].items() if not k.startswith("kfac_")} for p in player.parameters()]
    reference.load_state_dict(reference.state_dict() | {"state": copy.deepcopy(dict(enumerate(own)))})
    for _ in range(5):
        step(plays=True)
        for p, q in zip(player.parameters(), twin.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        reference.step()
        assert_same_weights(player, twin)
        assert steering.trust.notches == 5 and optimizer.curvature.report()["trust"] == 0
    for _ in range(opponents._LATELY + 2):
        step(plays=False)
    assert not optimizer.curvature.stages.sits_out and optimizer.curvature.stages.plan().trust == steering.trust.value


class Chain(nn.Module):
    """The second part may be frozen while the first one trains through it."""

    def __init__(self, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = net(), second or nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def is_a_game(between: Any, second: nn.Module | None = None, *, steps: int = 6) -> bool:
    """Whether the second part takes itself for an opponent, if that happens between its steps."""
    torch.manual_seed(0)
    model = Chain(second)
    optimizer = KFACAdam(model.second.parameters(), **options(0.01))
    for _ in range(steps):
        between(model, torch.randn(6, 3))
        optimizer.zero_grad()
        model.second(torch.randn(6, 2)).square().mean().backward()
        optimizer.step()
    return optimizer.curvature.stages.steering.game.is_opponent


def train_the_first(model: Chain, x: Tensor) -> None:
    model.second.requires_grad_(False)
    model(x).sum().backward()
    model.second.requires_grad_(True)


def attack(model: Chain, x: Tensor) -> None:
    """Looks for an adversarial example."""
    model.requires_grad_(False)
    shift = torch.zeros_like(x).requires_grad_()
    model(x + shift).sum().backward()
    model.requires_grad_(True)


def evaluate(model: Chain, x: Tensor) -> None:
    model.second.requires_grad_(False)
    with torch.no_grad():
        model(x)
    model.second(model.first(x).detach()).sum()
    model.second.requires_grad_(True)


def freeze_for_good(model: Chain, x: Tensor) -> None:
    """What does not train any more while others do is no opponent."""
    model.second[0].requires_grad_(False)
    torch.autograd.grad(model(x).sum(), list(model.first.parameters()))


def test_who_serves_others_while_it_is_frozen_is_an_opponent() -> None:
    games = {between.__name__: is_a_game(between) for between in (train_the_first, attack, evaluate, freeze_for_good)}
    assert games == {"train_the_first": True, "attack": False, "evaluate": False, "freeze_for_good": False}


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Attending(nn.MultiheadAttention):
    """One sequence of examples that attend to each other."""

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = super().__call__(query=x, key=x, value=x)[0]
        return y


@pytest.mark.parametrize("make", [lambda: Doubled(2, 1), lambda: Attending(2, 1)], ids=["own forward", "attention"])
def test_so_is_one_whose_layers_are_applied_inside_their_modules(make: Any) -> None:
    games = {between.__name__: is_a_game(between, make()) for between in (train_the_first, attack, evaluate)}
    assert games == {"train_the_first": True, "attack": False, "evaluate": False}


def test_players_may_be_stretched_all_the_same() -> None:
    """``Graft(stretch=True)``, for actors and critics."""
    model = net()
    optimizer = KFACSGD(model, **options(0.01, momentum=0.9, scaling=Graft(stretch=True)))
    for _ in range(8):
        backward(model, data(), loss)
        optimizer.zero_grad()
        backward(model, data(), loss)
        optimizer.step()
    assert optimizer.curvature.stages.steering.game.opposes and optimizer.curvature.reach > 0
    assert "reach up to" in repr(optimizer.curvature)


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize(
    ("covered", "critic_steps", "frozen"),
    [(False, 1, False), (True, 3, False), (True, 5, False), (True, 1, True), (True, 3, True), (True, 5, True)],
)
def test_a_discriminator_is_known_by_what_is_added_to_its_last_gradients(
    covered: bool, critic_steps: int, frozen: bool, zeroed: bool
) -> None:
    """Also if none of its layers is preconditioned, or if it takes several steps for one of the generator's.

    Where it is frozen for the generator's steps nothing is added, but it is seen in every step to serve.

    A resumed or pickled pair knows it at once.
    """
    generator, discriminator = net(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    models = generator, discriminator
    how = options(0.01) | {"factor_update_steps": 50}  # its layers are not looked at often
    ours, theirs = (KFACAdam(model.parameters(), **how) for model in models)
    if not covered:
        theirs = KFACAdam(discriminator.parameters(), **how, skip_layers=[""])

    def play(models: Any, ours: KFACAdam, theirs: KFACAdam) -> None:
        generator, discriminator = models
        for _ in range(critic_steps):
            theirs.zero_grad(set_to_none=not zeroed)
            nn.functional.softplus(discriminator(torch.randn(6, 2))).mean().backward()
            theirs.step()
        discriminator.requires_grad_(not frozen)
        ours.zero_grad(set_to_none=not zeroed)
        nn.functional.softplus(-discriminator(generator(torch.randn(6, 3)))).mean().backward()
        ours.step()
        discriminator.requires_grad_(True)

    for _ in range(12):
        play(models, ours, theirs)
    again = [KFACAdam(model.parameters(), **how) for model in models]
    if not covered:
        again[1] = KFACAdam(discriminator.parameters(), **how, skip_layers=[""])
    for own, resumed in zip((ours, theirs), again, strict=True):
        resumed.load_state_dict(own.state_dict())
    loaded = through_a_file((models, ours, theirs), plain=False)
    for trio in ((models, ours, theirs), (models, *again), loaded):
        assert trio[2].curvature.stages.steering.game.is_opponent
        assert trio[1].curvature.reach == 0 and not trio[1].curvature.stages.steering.game.is_opponent
        play(*trio)
        assert trio[2].curvature.stages.steering.game.is_opponent and trio[1].curvature.reach == 0
    assert not any("kfac_stretch" in state for state in ours.state.values())


def test_what_is_cleared_twice_or_after_a_skipped_step_is_no_opponents() -> None:
    """In place, in which the numbers change without another pass."""
    model = net()
    optimizer = KFACSGD(model, **options(0.01))
    for step in range(8):
        model.zero_grad(set_to_none=False)
        backward(model, data(), loss)
        if step % 3 == 2:  # as a gradient scaler leaves out a step
            optimizer.zero_grad(set_to_none=False)
            continue
        optimizer.step()
        if step % 2:
            model.zero_grad(set_to_none=False)
        optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad(set_to_none=False)
    assert optimizer.curvature.stages.steering.game.throws == 0
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters() if p._post_accumulate_grad_hooks]
    assert len(hooks) == 0  # of no step that has passed


def test_micro_batches_are_no_other_player() -> None:
    """Nor are evaluations, and gradients that are zeroed twice or not at all."""
    model = net()
    optimizer = KFACSGD(model, **options(0.01))
    for step in range(4):
        for _ in range(3):
            loss(model(torch.randn(6, 3)), torch.randn(6, 2)).backward()
        with torch.no_grad():
            model(torch.randn(6, 3))
        optimizer.step()
        if step != 1:
            optimizer.zero_grad()
            optimizer.zero_grad()
    assert optimizer.curvature.reach > 0


@pytest.mark.parametrize("how", [{"maximize": True}, {"lr": torch.tensor(0.02)}, {"foreach": True}])
def test_reach_is_learned_alike_however_the_step_is_taken(how: dict[str, Any]) -> None:
    """Upwards on the negative loss, and at a rate that is a tensor; also from groups of different rates."""
    model, batch = net(), data()
    other = copy.deepcopy(model)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.01}]
    others = [{"params": list(other[0].parameters())}, {"params": list(other[2].parameters()), "lr": 0.01}]
    kept = {**options(0.02, momentum=0.9), "loss_average": "batch"}
    optimizer = KFACSGD(groups, model=model, **kept)
    changed = KFACSGD(others, model=other, **{**kept, **how})
    for _ in range(6):
        backward(model, batch, loss)
        backward(other, batch, (lambda *given: -loss(*given)) if how.get("maximize") else loss)
        optimizer.step()
        changed.step()
        assert_near(
            torch.tensor(list(changed.curvature.stages.trained.reaches().values())),
            torch.tensor(list(optimizer.curvature.stages.trained.reaches().values())),
        )
    assert optimizer.curvature.reach > 0.012


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize(("cls", "how"), [(KFACSGD, {"momentum": 0.9}), (KFACAdam, {})])
def test_rates_below_zero_go_uphill_as_maximize_does(cls: Any, how: dict[str, Any], kind: Any) -> None:
    model, batch = net(), data()
    other = copy.deepcopy(model)
    up, below = cls(model, **options(0.02, **how), maximize=True), cls(other, **options(0.02, **how))
    below.param_groups[0]["lr"] = kind(-0.02)
    for _ in range(12):
        for each, optimizer in ((model, up), (other, below)):
            backward(each, batch, lambda *given: -loss(*given))
            optimizer.step()
        assert below.curvature.trust == up.curvature.trust
    assert_same_weights(other, model)
    assert up.curvature.reach > 0.012


@pytest.mark.parametrize("on_device", [False, True])
def test_a_rate_that_rises_again_or_jumps_leaves_the_stretch_as_long_as_it_was(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As warm restarts and cycles let it; in a warm-up, and where a rate falls or rests at 0, nothing happens."""
    how = options(torch.tensor(0.01) if on_device else 0.01, momentum=0.9)
    model, batch = net(), data()
    optimizer = KFACSGD(model, **how)

    def reaches_at(rate: float, net: nn.Module, own: KFACSGD) -> Tensor:
        if on_device:
            own.param_groups[0]["lr"].fill_(rate)
        else:
            own.param_groups[0]["lr"] = rate
        backward(net, batch, loss)
        own.step()
        return torch.tensor(list(own.curvature.stages.trained.reaches().values()))

    rises = [(0.01, 1)] * 5 + [(0.02, 1), (0.06, 3), (0.002, 1), (0.003, 1.5), (0.0, 1), (0.02, 20 / 3), (0.02, 1)]
    for rate, rise in rises:
        twin, other = copy.deepcopy((model, optimizer))
        with monkeypatch.context() as alone:
            alone.setattr(plan, "lower_reaches", lambda *given: None)
            expected = reaches_at(rate, twin, other) / rise
        state = optimizer.state_dict()
        optimizer = KFACSGD(model, **how)
        optimizer.load_state_dict(state)
        assert_near(reaches_at(rate, model, optimizer), expected.clamp(min=reach.LEAST_REACH), str(rate), rel=1e-6)
        assert rise == 1 or bool((expected > reach.LEAST_REACH).any())


def test_a_rate_that_jumps_leaves_layers_alone_that_were_never_trained() -> None:
    model, batch = net(), data()
    model[0].requires_grad_(False)
    optimizer = KFACSGD(model, **options(0.01, momentum=0.9))
    for rate in (0.01, 0.01, 0.02, 0.1):
        before = [block.reach for block in optimizer.curvature.stages.blocks]
        optimizer.param_groups[0]["lr"] = rate
        backward(model, batch, loss)
        optimizer.step()
    frozen, trained = (block.reach for block in optimizer.curvature.stages.blocks)
    assert frozen == 0.01 and trained < before[1] / 4


def saved(model: nn.Sequential, optimizer: Any, used: bool = False) -> tuple[nn.Sequential, Any]:
    """Both from their states; ``used``: the optimizer has taken other steps before, and thrown gradients away."""
    other = copy.deepcopy(model)
    resumed = KFACSGD(other, **options(0.1, momentum=0.9))
    for _ in range(2 * used):
        for _ in range(2):
            backward(other, data(), loss)
            resumed.zero_grad()
        backward(other, data(), loss)
        resumed.step()
        backward(other, data(), loss)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    other.zero_grad(set_to_none=True)
    return other, resumed


def pickled(*pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


GOING_ON = {
    "saved": saved,
    "into a used one": lambda *pair: saved(*pair, used=True),
    "copied": lambda *pair: copy.deepcopy(pair),
    "pickled": pickled,
}


class Unhashable(torch.optim.SGD):
    """An optimizer of others that is known by its values, as a dataclass is."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("rival", [None, torch.optim.SGD, KFACAdam, Unhashable])
@pytest.mark.parametrize("go_on", [None, *GOING_ON.values()], ids=["on", *GOING_ON])
def test_who_throws_gradients_away_alone_has_no_opponent(rival: Any, go_on: Any) -> None:
    """Adversarial examples, for instance: a game has two optimizers, of any kind; who goes on knows what was seen."""
    model, other = net(), nn.Linear(3, 1)
    optimizer: Any = KFACSGD(model, **options(0.01, momentum=0.9))
    players = [] if rival is None else [rival(other.parameters(), lr=0.01)]
    seen = []
    for step in range(40):
        backward(model, data(), loss)  # thrown away
        for player in players if step % 3 == 0 else ():
            player.zero_grad()
            other(torch.randn(2, 3)).sum().backward()
            player.step()
        if go_on is not None and step == 20:
            model, optimizer = go_on(model, optimizer)
        optimizer.zero_grad()
        backward(model, data(), loss)
        optimizer.step()
        seen.append(optimizer.curvature.stages.steering.game.is_opponent)
    assert all(seen[2:15]) and seen[-1] == bool(players)
    assert (optimizer.curvature.reach > 0) == (not players)


@pytest.mark.parametrize("has_rival", [False, True])
def test_who_throws_gradients_away_now_and_then_has_no_opponent_after_16_steps_alone(has_rival: bool) -> None:
    """Those that were added to the gradients of its last step, in every fourth step."""
    model, other = net(), nn.Linear(3, 1)
    optimizer = KFACSGD(model, **options(0.01, momentum=0.9) | {"factor_update_steps": 50})
    rival = torch.optim.SGD(other.parameters(), lr=0.01)
    seen = []
    for step in range(30):
        if step % 4 == 1:
            for inputs, target in data():
                loss(model(*inputs), target).backward()
        if has_rival and step % 3 == 0:
            rival.step()
        optimizer.zero_grad()
        backward(model, data(), loss)
        optimizer.step()
        seen.append(optimizer.curvature.stages.steering.game.is_opponent)
    assert all(seen[5:17]) and seen[-1] == has_rival


class Wrapping(torch.optim.Optimizer):
    """Takes the steps of another optimizer, at the gradients of a closure, as SAM does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base

    def step(self, closure: Any = None) -> None:
        self.base.zero_grad()
        closure()
        self.base.step()


def test_an_optimizer_that_wraps_this_one_is_no_opponent() -> None:
    model = net()
    optimizer = KFACSGD(model, **options(0.01, momentum=0.9))
    wrapping = Wrapping(optimizer)
    for _ in range(40):
        optimizer.zero_grad()
        backward(model, data(), loss)  # thrown away
        wrapping.step(lambda: backward(model, data(), loss))
    assert optimizer.curvature.stages.plan().stretches


@pytest.mark.parametrize("go_on", GOING_ON.values(), ids=GOING_ON)
def test_whoever_goes_on_knows_that_frozen_layers_have_served_others(go_on: Any) -> None:
    model = net()
    optimizer: Any = KFACSGD(model, **options(0.1, momentum=0.9))
    for _ in range(4):
        source = nn.Linear(3, 3)
        model.requires_grad_(False)
        loss(model(source(torch.randn(6, 3))), torch.randn(6, 2)).backward()
        model.requires_grad_(True)
        model, optimizer = go_on(model, optimizer)
        optimizer.zero_grad()
        backward(model, data(), loss)
        optimizer.step()
        assert optimizer.curvature.stages.steering.game.opposes is not False


def test_loading_a_state_forgets_that_frozen_layers_have_served_others() -> None:
    model = net()
    optimizer = KFACSGD(model, **options(0.1, momentum=0.9))
    backward(model, data(), loss)
    optimizer.step()
    state, known = optimizer.state_dict(), optimizer.curvature.stages.counters()
    model.requires_grad_(False)
    loss(model(nn.Linear(3, 3)(torch.randn(6, 3))), torch.randn(6, 2)).backward()
    model.requires_grad_(True)
    assert optimizer.curvature.stages.counters()["added_lost"] == 1
    optimizer.load_state_dict(state)
    assert optimizer.curvature.stages.counters() == known


@pytest.mark.parametrize("ways", [("saved", "into a used one"), ("copied", "pickled")], ids=" or ".join)
@pytest.mark.parametrize("cleared", ["before the cut", "after the cut"])
@pytest.mark.parametrize("probes", [(0, 1, 2, 3, 4, 5), (3, 4), (4, 5), (2, 4), ()])
def test_whoever_goes_on_knows_what_was_thrown_away_since_the_last_step(
    probes: tuple[int, ...], cleared: str, ways: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit. A probe is a backward pass onto what the last step has left, whose gradients nobody takes.

    Where the cut is between both, whoever goes on from a state has no gradients that could be cleared. The two ways
    alternate from cut to cut.
    """
    start, batches = net(), [data() for _ in range(9)]

    def run(cut: int | None) -> list[Any]:
        monkeypatch.setattr(opponents, "OPPONENTS", opponents.Opponents())  # of the runs before nobody is left
        torch.manual_seed(0)
        model = copy.deepcopy(start)
        optimizer: Any = KFACSGD(model, **options(0.1, momentum=0.9))
        found: list[Any] = []
        for number, batch in enumerate(batches):
            if number in probes:
                (inputs,), targets = batch[0]
                loss(model(inputs[:3]), targets[:3]).backward()
            if cleared == "before the cut":
                optimizer.zero_grad()
            if number == cut:
                way = ways[(cut + (cleared == "before the cut")) % 2]
                model, optimizer = GOING_ON[way](model, optimizer)
            optimizer.zero_grad()
            backward(model, batch, loss)
            optimizer.step()
            known = optimizer.curvature.stages.counters()
            told = [known[name] for name in ("opposes", "suspected", "throws", "since_lost", "alone_for")]
            found.append([*told, *(p.tolist() for p in model.parameters())])
        return found

    whole = run(None)
    assert any(step[0] == 1 for step in whole) == (len(probes) > 1 and probes != (2, 4))
    for cut in (3, 4, 5, 6):
        for number, (ours, theirs) in enumerate(zip(run(cut), whole, strict=True)):
            assert ours == theirs, f"cut before step {cut}: step {number}"


def test_a_skipped_step_makes_no_opponent() -> None:
    """Whose gradients were thrown away once; nor does an optimizer that was one before this one began."""
    model = net()
    optimizer = KFACSGD(model, **options(0.01))
    known = []
    for step in range(6):
        backward(model, data(), loss)
        if step == 3:
            optimizer.zero_grad()
            backward(model, data(), loss)
        optimizer.step()
        known.append(optimizer.curvature.stages.steering.game.opposes)
    assert known == [None, False, False, False, False, False]
    registry, here, there = opponents.Opponents(), nn.Identity(), nn.Identity()
    registry.step(there, is_opponent=True)
    registry.step(here, is_opponent=False)
    assert not registry.exist_for(here)
    registry.step(there, is_opponent=True)
    assert registry.exist_for(here)
    for _ in range(20):
        registry.step(here, is_opponent=False)
    assert not registry.exist_for(here)


@pytest.mark.usefixtures("never_turned")
def test_a_stretch_that_was_too_long_is_left_out_until_the_next_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in between are the base's own, if they do not turn, and reach learns nothing of what was not done."""
    model, batch = net(), data()
    optimizer = KFACSGD(model, **options(0.1, momentum=0.9))

    def step() -> None:
        backward(model, batch, loss)
        optimizer.step()

    for _ in range(4):
        step()
    monkeypatch.setattr(trust, "_YOUNG", 1)
    assert all(optimizer.curvature.stages.steering.trust.repeats(step, stretches=True) for step in (4, 5))
    for p in model.parameters():  # as if every layer's stretch had led up a wall
        optimizer.state[p]["kfac_stretch"].neg_()
    before = {p: p.detach().clone() for p in model.parameters()}
    reached = optimizer.curvature.stages.trained.reaches()
    for _ in range(2):
        step()
        for p, old in before.items():
            assert_near((old - p.detach()) / 0.1, optimizer.state[p]["momentum_buffer"], rel=1e-9)
            assert "kfac_stretch" not in optimizer.state[p]
            old.copy_(p)
    fallen = optimizer.curvature.stages.trained.reaches()
    assert all(3e-4 <= fallen[p] < reached[p] for p in fallen)
    step()
    assert optimizer.curvature.stages.trained.reaches() == fallen
    assert all("kfac_stretch" in optimizer.state[p] for p in fallen)


@pytest.mark.usefixtures("never_turned")
def test_of_each_parameter_what_is_recorded_is_compared() -> None:
    """Also if as many have one record as have another, but others."""
    model, batch = net(), data()
    optimizer = KFACSGD(model, **options(0.1, momentum=0.9))
    for _ in range(4):
        backward(model, batch, loss)
        optimizer.step()
    first, second, *others = model.parameters()
    del optimizer.state[first]["kfac_turn"], optimizer.state[second]["kfac_stretch"]

    def along(p: nn.Parameter, key: str) -> float:
        assert p.grad is not None
        return float((p.grad * optimizer.state[p][key]).sum())

    found = lessons_of(
        optimizer, buckets_of(optimizer), optimizer.curvature.stages.steering.watch, set(model.parameters())
    )
    turned, stretched = [second, *others], [first, *others]
    assert found.turn == pytest.approx(sum(along(p, "kfac_turn") for p in turned), rel=1e-9)
    assert found.after is not None and list(found.stretched) == stretched
    assert found.after.tolist() == pytest.approx([along(p, "kfac_stretch") for p in stretched], rel=1e-9)


class Heads(nn.Module):
    """Heads that are used in turn, before the trunk in the order of parameters."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(heads))
        self.trunk = nn.Linear(3, 4)
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads[self.used](torch.tanh(self.trunk(x)))
        return found


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize(("kfac", "how"), [(KFACSGD, {"momentum": 0.9}), (KFACSGD, {}), (KFACAdam, {})])
def test_heads_that_are_used_in_turn_all_get_directions(kfac: Any, how: dict[str, Any], heads: int) -> None:
    """Also where they change in the rhythm of directions; and lengths are learned without the first parameter."""
    model = Heads(heads)
    optimizer = kfac(model, **options(0.1, **how))
    for number in range(12):
        model.used = number % heads
        optimizer.zero_grad(set_to_none=True)
        loss(model(torch.randn(6, 3)), torch.randn(6, 2)).backward()
        optimizer.step()
        if number >= heads:
            assert "kfac_turn" in optimizer.state[model.heads[model.used].weight]
        if number:
            assert optimizer.curvature.stages.plan().brake.usual > 0


def test_a_skipped_step_keeps_what_the_next_one_learns() -> None:
    """A gradient that is not finite teaches nothing; the length of the update before it is still to be learned."""
    model, batch = net(), data()
    optimizer: Any = KFACSGD(model, **options(0.1, momentum=0.9))
    seen = []
    for broken in (False, False, True, True, False):
        backward(model, batch, loss)
        if broken:
            model[0].weight.grad.fill_(float("nan"))  # type: ignore[union-attr, operator]
        optimizer.step()
        noted = sum("kfac_length" in state for state in optimizer.state.values())
        seen.append((noted, optimizer.curvature.stages.steering.brake.seen))
    assert seen == [(1, 0), (1, 1), (1, 1), (1, 1), (1, 2)]


@pytest.mark.parametrize("kind", ["linear", "norm"])
@pytest.mark.parametrize("solver", [EigenSolver(0.0), EigenSolver(), InverseSolver(), InverseSolver(pi=False)])
def test_no_solver_stretches_along_the_steepest_direction(solver: Any, kind: str) -> None:
    """One that damps A and G separately shortens that direction more than damping of ``A (x) G`` would."""
    torch.manual_seed(3)
    layer = nn.Linear(6, 5, bias=False) if kind == "linear" else nn.LayerNorm(6, dtype=torch.float64)
    model = nn.Sequential(layer.double())
    optimizer = KFACSGD(model, **options(0.0001, solver=solver))
    x = torch.randn(64, 6, dtype=torch.float64) * torch.logspace(0, -2, 6, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        (model(x) * torch.logspace(0, -1, model(x).shape[1], dtype=torch.float64)).square().sum(1).mean().backward()
        optimizer.step()
    a, g = (torch.linalg.eigh(factor) for factor in optimizer.curvature.factors("0"))
    values = g.eigenvalues[:, :, None] * a.eigenvalues[:, None, :]
    bases = torch.einsum("pik,pjl->pklij", g.eigenvectors, a.eigenvectors)
    found = {}
    for pair, row, column in values.gt(0).nonzero().tolist():
        matrix = torch.zeros(len(values), *bases.shape[-2:], dtype=torch.float64)
        matrix[pair] = bases[pair, row, column]
        moments = dict(zip(layer.parameters(), optimizer.curvature.layers[0].from_matrix(matrix), strict=True))
        (stretch,) = reach.stretches(optimizer.curvature.directions(moments, 1.0).scaled).tensors
        found[float(values[pair, row, column])] = float((stretch * matrix).sum())
    inexact = 0.02 if solver == EigenSolver() else 1e-9  # it leaves small eigenvalues out
    assert abs(found[max(found)]) < inexact
    assert all(found[value] > -inexact for value in found)
    assert max(found.values()) > 5
