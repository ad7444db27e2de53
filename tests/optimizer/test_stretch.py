"""Steps that go further in flat directions, against a dense solve beside torch's optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACSGD, EigenSolver, Graft, KFACAdam, KFACAdamW, OfLargest, OfMean, trust, turning
from kfac_optim.trust import Trust
from tests.helpers.compare import assert_near, snapshot
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
        self.reach, self.falling, self.steps = 0.01, True, 0
        self.stretch: dict[str, Tensor] = {}
        self.descent = 0.0

    def step(self, passes: list[tuple[tuple[Tensor], Tensor]]) -> None:
        seen = self.oracle.observe(passes, loss, snapshot(self.model))
        self.oracle.update(seen)
        self.oracle.decompose()
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        backward(self.model, passes, loss)
        if self.stretch:
            slope = sum(float((seen.gradients[name] * along).sum()) for name, along in self.stretch.items())
            self.learn(slope / self.descent)
        self.optimizer.step()
        added = self.reach > 3e-4  # else, while it does not turn, steps are the base's own, but for every fourth
        repeats = added and self.falling and self.how.get("momentum", 0.9) > 0 and self.steps % 2 == 1
        if not repeats:
            self.stretch = {}
        if not repeats and (added or self.steps % 4 == 0):
            self.look(seen.gradients, before)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p -= self.lr * self.reach * self.stretch.get(name, torch.zeros(()))
        self.steps += 1

    def learn(self, slope: float) -> None:
        self.falling = slope > 0
        if slope > 0:
            self.reach = min(1 / 3, self.reach * 1.1)
        else:
            self.reach = max(3e-4, self.reach / max(1.1, min(30.0, 1.1 * (slope / 0.3) ** 2)))

    def look(self, gradients: dict[str, Tensor], before: dict[str, Tensor]) -> None:
        moments, updates = {}, {}
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            if self.how.get("nesterov"):
                moment = gradients[name] + self.how["momentum"] * moment
            moments[name] = (gradients[name] if moment is None else moment).detach().clone()
            decay = self.lr * self.how.get("weight_decay", 0.0) * before[name]
            updates[name] = (before[name] - decay - p.detach()) / self.lr
        self.descent = 0.0
        for layer in self.oracle.layers:
            (pair,), m, u = self.oracle.curvature[layer.name].pairs, layer.of(moments)[0], layer.of(updates)[0]
            steepest = float(torch.linalg.eigvalsh(pair.a)[-1] * torch.linalg.eigvalsh(pair.g)[-1])
            gain = (1 + DAMPING) * steepest * pair.solve(m, DAMPING * steepest, False, "eigen") - m
            stretch = max(0.0, float((u * m).sum() / (m * m).sum())) * gain
            self.descent += float((m * stretch).sum())
            self.stretch[f"{layer.name}.weight"], self.stretch[f"{layer.name}.bias"] = stretch[:, :-1], stretch[:, -1]


def options(lr: float, **more: Any) -> dict[str, Any]:
    exact = {name: value for name, value in OPTIONS.items() if name != "momentum"}
    mode = {"precondition": "momentum", "scaling": "graft", "solver": EigenSolver(0.0)}
    return exact | mode | {"lr": lr, "damping": OfLargest(DAMPING)} | more


@pytest.fixture
def never_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_moved", lambda *_: 0)
    monkeypatch.setattr(turning, "brake", lambda *_: None)


@pytest.mark.usefixtures("never_turned")
@pytest.mark.parametrize(("kfac", "base", "how"), CASES)
@pytest.mark.parametrize("rate", [0.02, 1.0])
def test_steps_go_further_where_it_is_flat(kfac: Any, base: Any, how: dict[str, Any], rate: float) -> None:
    """Reach grows at a small rate; at a large one it also falls."""
    model, batch = net(), data()
    textbook, optimizer = Stretched(model, base, how, rate), kfac(model, **options(rate, **how))
    seen = []
    for _ in range(8):
        textbook.step(batch)
        backward(model, batch, loss)
        optimizer.step()
        for (name, p), q in zip(model.named_parameters(), textbook.model.parameters(), strict=True):
            assert_near(p.detach(), q.detach(), name, 1e-5)  # how far a gradient has turned is known in float32
        seen.append(optimizer.curvature.report()["reach"])
        assert seen[-1] == pytest.approx(textbook.reach, rel=1e-5)
    assert seen[0] == 0.01 and (seen[-1] == pytest.approx(0.01 * 1.1**7)) == (rate < 0.1)
    assert f"reach {seen[-1]:.2g}" in repr(optimizer.curvature)


def test_stretch_is_a_switch() -> None:
    with pytest.raises(TypeError, match=r"Graft\(stretch=0.5\): must be True or False"):
        Graft(stretch=0.5)  # type: ignore[arg-type]


def test_reach_falls_by_as_much_as_the_gradient_has_turned_round() -> None:
    for slope, expected in [(0.5, 1.1), (1e-9, 1.1), (-0.1, 1 / 1.1), (-0.3, 1 / 1.1), (-0.6, 1 / 4.4), (-9.0, 1 / 30)]:
        learned = Trust()
        learned.learn(stretch=2 * slope, descent=2.0)
        assert learned.reach == pytest.approx(0.01 * expected)
        assert learned.calm == (slope > 0)
    for slope, bound in [(1.0, 1 / 3), (-1.0, 3e-4)]:
        for _ in range(200):
            learned.learn(stretch=slope, descent=1.0)
        assert learned.reach == bound


def test_a_stretch_of_nothing_teaches_nothing() -> None:
    """At a rate of 0, or on gradients of 0."""
    learned = Trust()
    learned.learn(stretch=0.0, descent=0.0)
    assert (learned.reach, learned.calm) == (0.01, True)


@pytest.mark.parametrize(
    "how",
    [{"damping": OfMean(0.1)}, {"damping": 0.1}, {"scaling": Graft(trust=0.0)}, {"scaling": Graft(stretch=False)}],
)
def test_who_is_not_stretched(how: dict[str, Any]) -> None:
    model = net()
    optimizer = KFACSGD(model, **options(0.1, momentum=0.9, **how))
    backward(model, data(), loss)
    optimizer.step()
    assert optimizer.curvature.report()["reach"] == 0
    assert "reach" not in repr(optimizer.curvature)
    assert not any("kfac_stretch" in state for state in optimizer.state.values())


@pytest.mark.parametrize("before", [3, 4])
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
        assert resumed.curvature.reach == optimizer.curvature.reach > 0.01
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def test_the_stretch_is_braked_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the base's update is much longer than usual."""
    monkeypatch.setattr(trust, "_moved", lambda *_: 0)
    model, batch = net(), data()
    other = copy.deepcopy(model)
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    optimizer = KFACSGD(model, **options(0.1, momentum=0.9))
    optimizer.curvature._trust.usual = 1e-3
    backward(model, batch, loss)
    backward(other, batch, loss)
    length = torch.cat([p.grad.flatten() for p in other.parameters()]).norm()
    optimizer.step()
    plain.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        shortened = 0.1 * 0.01 * (1.3e-3 / length) ** 2 * optimizer.state[p]["kfac_stretch"]
        torch.testing.assert_close(q - p, shortened, rtol=1e-4, atol=1e-12)
