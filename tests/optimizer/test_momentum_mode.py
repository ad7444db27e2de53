"""``precondition="momentum"``: SGD's own recurrence on raw gradients, preconditioned afterwards (DESIGN section 3b)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, KFACAdam
from tests.helpers.compare import OPTIONS, SAME, assert_same_weights
from tests.helpers.reference import (
    Named,
    Oracle,
    TextbookMomentum,
    assert_near,
    averaged,
    backward,
    grafted,
    kl_clip_factor,
    log_cosh,
    snapshot,
    unit_scaled,
)

pytestmark = pytest.mark.usefixtures("float64")

DAMPING, LR = 0.1, 0.2
MODE = OPTIONS | {"precondition": "momentum", "lr": LR, "damping": DAMPING}
loss = averaged(log_cosh, "batch")


class Net(nn.Module):
    """Two covered layers and a parameter that no layer covers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def data() -> list[tuple[tuple[Tensor], Tensor]]:
    return [((torch.randn(6, 3),), torch.randn(6, 2))]


def named(model: nn.Module, per_layer: dict[str, Tensor], oracle: Oracle) -> Named:
    """Canonical matrices ``[1, d_out, d_in + 1]`` as weights and biases."""
    result = {}
    for layer in oracle.layers:
        result[f"{layer.name}.weight"] = per_layer[layer.name][0, :, :-1]
        result[f"{layer.name}.bias"] = per_layer[layer.name][0, :, -1]
    return result


class Textbook:
    """The mode written out for one model: momentum, dense solve, scaling, decoupled-from-momentum weight decay."""

    def __init__(self, model: Net, scaling: str | None = None, decay: float = 0.0, interval: int = 1, **how: object):
        self.model, self.oracle = copy.deepcopy(model), Oracle(copy.deepcopy(model))
        self.scaling, self.decay, self.interval, self.steps = scaling, decay, interval, 0
        self.momenta = {name: TextbookMomentum(**how) for name, _ in model.named_parameters()}

    def step(self, passes: list[tuple[tuple[Tensor], Tensor]], lr: float = LR) -> None:
        state = snapshot(self.model)
        step = self.oracle.observe(passes, loss, state)
        self.oracle.update(step)
        if self.steps % self.interval == 0:
            self.oracle.decompose()
        self.steps += 1
        covered = {name: momentum(step.gradients[name]) for name, momentum in self.momenta.items() if name != "scale"}
        found = self.oracle.directions(covered, DAMPING)
        vectors = {layer.name: layer.of(covered) for layer in self.oracle.layers}
        if self.scaling == "unit":
            found = {layer.name: unit_scaled(layer.module, found[layer.name]) for layer in self.oracle.layers}
        if self.scaling == "graft":
            found = {name: grafted(d, vectors[name]) for name, d in found.items()}
        if self.scaling == "kl_clip":
            nu = kl_clip_factor([(d, vectors[name], lr) for name, d in found.items()], 1e-3)
            assert nu < 1, "nothing was clipped"
            found = {name: nu * d for name, d in found.items()}
        directions = named(self.model, found, self.oracle)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                decayed = self.decay * p
                if name == "scale":  # the base rule: decay goes through the momentum
                    p -= lr * self.momenta[name](step.gradients[name] + decayed)
                else:
                    p -= lr * (directions[name] + decayed)


def assert_trains_as(textbook: Textbook, model: Net, optimizer: KFACSGD) -> None:
    for _ in range(4):
        passes = data()
        textbook.step(passes)
        backward(model, passes, loss)
        optimizer.step()
        assert_same_weights(model, textbook.model)


@pytest.mark.parametrize("scaling", [None, "unit", "graft", "kl_clip"])
@pytest.mark.parametrize(
    "how",
    [{"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.0}],
)
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_against_the_textbook(scaling: str | None, how: dict[str, float], decay: float) -> None:
    model = Net()
    textbook = Textbook(model, scaling, decay, interval=2, **how)
    optimizer = KFACSGD(model, **(MODE | {"scaling": scaling, "weight_decay": decay, "inv_update_steps": 2} | how))
    assert_trains_as(textbook, model, optimizer)
    if how["momentum"]:
        for name, p in model.named_parameters():
            assert_near(optimizer.state[p]["momentum_buffer"], textbook.momenta[name].buffer, name, SAME)


def test_every_group_has_its_own_momentum() -> None:
    """Weight and bias of one layer in different groups, one of them with Nesterov."""
    model = Net()
    textbook = Textbook(model, momentum=0.9)
    textbook.momenta["first.bias"] = TextbookMomentum(0.5, nesterov=True)
    textbook.momenta["second.weight"] = TextbookMomentum(0.0)
    own = dict(model.named_parameters())
    special = ("first.bias", "second.weight")
    groups = [
        {"params": [p for name, p in own.items() if name not in special], "momentum": 0.9},
        {"params": [own["first.bias"]], "momentum": 0.5, "nesterov": True},
        {"params": [own["second.weight"]], "momentum": 0.0},
    ]
    optimizer = KFACSGD(groups, model=model, **MODE)
    shown = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    assert_trains_as(textbook, model, optimizer)
    for group, before in zip(optimizer.param_groups, shown, strict=True):
        assert {key: group[key] for key in ("lr", "momentum", "nesterov")} == {
            key: before[key] for key in ("lr", "momentum", "nesterov")
        }


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_fixed_curvature_both_modes_are_identical(nesterov: bool) -> None:
    """The solve is linear, so it may come before or after the momentum."""
    model = Net()
    other = copy.deepcopy(model)
    fixed = {"momentum": 0.9, "nesterov": nesterov, "inv_update_steps": 1000}
    after = KFACSGD(model, **(MODE | fixed))
    before = KFACSGD(other, **(MODE | fixed | {"precondition": "gradient"}))
    for _ in range(6):
        passes = data()
        for m, optimizer in ((model, after), (other, before)):
            backward(m, passes, loss)
            optimizer.step()
    assert_same_weights(model, other)


def test_a_layer_without_a_decomposition_moves_by_its_buffer() -> None:
    """Its buffer counts from the first step, as in SGD, whether the decomposition exists yet or not."""

    class Late(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.first(x))[:, :2] + (0 * self.second.weight.sum() + self.second.weight[:, 0])

    model = Late()  # the second weight has a gradient, but its module is never called
    plain = nn.Parameter(model.second.weight.detach().clone())
    optimizer = KFACSGD(model, **(MODE | {"momentum": 0.9}))
    sgd = torch.optim.SGD([plain], lr=LR, momentum=0.9)
    for _ in range(3):
        backward(model, data(), loss)
        plain.grad = model.second.weight.grad.clone()
        optimizer.step()
        sgd.step()
        assert_near(model.second.weight.detach(), plain.detach(), "second.weight", SAME)


def test_schedulers_that_change_the_momentum() -> None:
    """OneCycleLR cycles lr and momentum of the groups; both are read at every step."""
    model = Net()
    textbook = Textbook(model, momentum=0.9)
    optimizer = KFACSGD(model, **(MODE | {"momentum": 0.9}))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=6)
    seen = set()
    for _ in range(6):
        group = optimizer.param_groups[0]
        seen.add(group["momentum"])
        for momentum in textbook.momenta.values():
            momentum.momentum = group["momentum"]
        passes = data()
        textbook.step(passes, group["lr"])
        backward(model, passes, loss)
        optimizer.step()
        scheduler.step()
        assert_same_weights(model, textbook.model)
    assert len(seen) > 2


def test_skipped_steps_leave_the_buffers_untouched() -> None:
    model = Net()
    other = copy.deepcopy(model)
    first, second = (KFACSGD(m, **(MODE | {"momentum": 0.9})) for m in (model, other))
    for step in range(5):
        passes = data()
        backward(model, passes, loss)
        if step in (0, 2):
            kept = {p: dict(state) for p, state in first.state.items()}
            model.first.weight.grad[0, 0] = torch.nan
            first.step()
            for p, state in kept.items():
                if "momentum_buffer" in state:
                    assert torch.equal(first.state[p]["momentum_buffer"], state["momentum_buffer"])
            assert any("momentum_buffer" in state for state in first.state.values()) == (step > 0)
            continue
        first.step()
        backward(other, passes, loss)
        second.step()
    assert_same_weights(model, other)
    assert first.curvature.report()["skipped_steps"] == 2


def test_the_buffer_of_plain_sgd_goes_on() -> None:
    """A state of torch.optim.SGD loads: its momentum is the same recurrence of the same raw gradients."""
    model = Net()
    other = copy.deepcopy(model)
    first = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    second = KFACSGD(other, **(MODE | {"momentum": 0.9}))
    passes = data()
    backward(model, passes, loss)
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    backward(other, passes, loss)
    second.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if name == "scale":
            continue
        assert_near(second.state[q]["momentum_buffer"], 0.9 * first.state[p]["momentum_buffer"] + q.grad, name, SAME)


@pytest.mark.parametrize("cls", [KFACAdam, KFACLAMB])
def test_the_other_classes_refuse(cls: type[KFACAdam] | type[KFACLAMB]) -> None:
    with pytest.raises(ValueError, match=r"precondition='momentum'.*'gradient'"):
        cls(Net(), precondition="momentum")
