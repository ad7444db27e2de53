"""``precondition="momentum"``: the base class on raw gradients, its first moment preconditioned, its length kept."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, CurvatureEngine, Graft, KFACAdam, KFACAdamW, KFACMixin
from kfac_optim.bases import buckets_of, take_apart
from kfac_optim.steering.brake import Brake
from kfac_optim.steering.graft import GraftShare
from kfac_optim.steering.trust import Trust
from tests.helpers.bases import KFACAdagrad, KFACRMSprop
from tests.helpers.compare import (
    SAME,
    assert_identical,
    assert_near,
    assert_same_weights,
    assert_trained,
    snapshot,
    values,
)
from tests.helpers.reference import Named, Oracle, averaged, backward, log_cosh
from tests.helpers.settings import ALL_CLASSES, BASES, KINDS, OPTIONS
from tests.helpers.textbook import TextbookAdam, TextbookMomentum, grafted, kl_clip_factor, unit_scaled
from tests.helpers.training import make_model, train
from tests.helpers.versions import ADAM_DECOUPLES, needs_rates_of_one_dimension

pytestmark = pytest.mark.usefixtures("float64")

DAMPING, LR = 0.1, 0.2
FULL = Graft(trust=1.0)
MODE = OPTIONS | {"precondition": "momentum", "lr": LR, "damping": DAMPING}
OTHERS = {name: value for name, value in MODE.items() if name != "momentum"}  # for base classes that know none
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


Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Sgd:
    """SGD's part of a step: its moment, its update without decay, and its decay, per unit of the learning rate.

    Without decay the moment is what its own recurrence makes of the gradients alone, and the weight of all gradients so
    far in it what that makes of ones.
    """

    def __init__(self, decay: float = 0.0, **how: float) -> None:
        self.decay, self.moment, self.pure, self.ones = decay, *(TextbookMomentum(**how) for _ in range(3))

    def __call__(self, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moment, pure = self.moment(g + self.decay * w), self.pure(g)
        self.ones(torch.ones(()))
        self.weight = self.ones.buffer
        return pure, pure, moment - pure


class Adam:
    """Adam's, with decay in the gradient (Adam) or beside it (AdamW), to minimise or to maximise."""

    def __init__(self, decay: float = 0.0, coupled: bool = True, amsgrad: bool = False, sign: float = 1.0) -> None:
        self.decay, self.coupled, self.amsgrad, self.sign = decay, coupled, amsgrad, sign
        self.book, self.pure, self.largest = TextbookAdam(), 0.0, torch.zeros(())

    def __call__(self, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        decayed = self.decay * w
        self.pure = self.book.beta1 * self.pure + (1 - self.book.beta1) * self.sign * g
        m, v = self.book.moments(self.sign * g + self.coupled * decayed)
        if self.amsgrad:
            v = self.largest = torch.maximum(self.largest, v)
        weight1, weight2 = (1 - beta**self.book.t for beta in (self.book.beta1, self.book.beta2))
        root = (v / weight2).sqrt() + self.book.eps
        if not self.coupled:
            return m, m / weight1 / root, decayed
        return self.pure, self.pure / weight1 / root, (m - self.pure) / weight1 / root


class Lamb:
    """LAMB's, whose trust ratio is that of the update with its decay; without one it is called adam."""

    def __init__(self, decay: float = 0.0, debias: bool = False, adam: bool = False) -> None:
        self.decay, self.debias, self.adam, self.book = decay, debias, adam, TextbookAdam(eps=1e-6)

    def __call__(self, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, v = self.book.moments(g)
        update = m / (v.sqrt() + self.book.eps)
        whole = (update + self.decay * w).norm()
        ratio = min(float(w.norm()), 10.0) / whole if w.norm() > 0 and not self.adam else torch.ones(())
        if self.debias:
            ratio = ratio * (1 - self.book.beta2**self.book.t) ** 0.5 / (1 - self.book.beta1**self.book.t)
        return m, ratio * update, ratio * self.decay * w


def turned(u: Tensor, k: Tensor, trust: float) -> Tensor:
    """Between two updates of one length, and as long."""
    step = (1 - trust) * u + trust * k
    return step * u.norm() / step.norm()


def usual(lengths: list[float]) -> float:
    """The mean of the first ten, and from then on an average in which a new one counts a tenth."""
    mean = sum(lengths[:10]) / len(lengths[:10])
    for length in lengths[10:]:
        mean = 0.9 * mean + 0.1 * length
    return mean


def usual_since_first(values: list[float]) -> float:
    """An average that begins with the first value, and in which each new one counts a tenth."""
    mean = values[0]
    for value in values[1:]:
        mean = 0.9 * mean + 0.1 * value
    return mean


class Textbook:
    """The mode written out for one model: the base rule, the dense solve of its moment, scaling, and decay apart."""

    def __init__(self, model: Net, rule: Callable[[], Rule], scaling: Any = None, interval: int = 1) -> None:
        self.model, self.oracle = copy.deepcopy(model), Oracle(copy.deepcopy(model))
        self.scaling, self.interval, self.steps = scaling, interval, 0
        self.trust: float | None = None  # in tenths, where it is learned
        self.turns: Named = {}
        self.changes: Named = {}
        self.length: float | None = None  # of the base's update in the last step, where that was turned
        self.lengths: list[float] = []  # the same of those before it, none more than five times as long as usual
        self.entries: list[float] = []  # the largest entries of all gradients so far, likewise
        self.learns_size = True  # of gradients and updates
        self.capped = False  # whether the base's part of a step has ever been shortened
        self.factor = 1.0  # by which K-FAC's direction was shortened in the last turned step
        self.averages_gradients = False  # where the rule has no momentum
        self.averages: Named = {}
        self.rules = {name: rule() for name, _ in model.named_parameters()}

    def step(self, passes: list[tuple[tuple[Tensor], Tensor]], lr: float = LR) -> None:
        step = self.oracle.observe(passes, loss, snapshot(self.model))
        self.oracle.update(step)
        if self.steps % self.interval == 0:
            self.oracle.decompose()
        self.steps += 1
        weights = dict(self.model.named_parameters())
        parts = {name: rule(step.gradients[name], weights[name].detach()) for name, rule in self.rules.items()}
        covered = {name: moment for name, (moment, _, _) in parts.items() if name != "scale"}
        updates = {name: update for name, (_, update, _) in parts.items() if name != "scale"}
        if self.averages_gradients:
            gradients = {name: step.gradients[name] for name in covered}
            old = self.averages or gradients
            covered = self.averages = {name: 0.9 * old[name] + 0.1 * g for name, g in gradients.items()}
        found = self.oracle.directions(covered, DAMPING)
        moments = {layer.name: layer.of(covered) for layer in self.oracle.layers}
        if self.scaling == "unit":
            found = {layer.name: unit_scaled(layer.module, found[layer.name]) for layer in self.oracle.layers}
        if isinstance(self.scaling, Graft):
            found = {layer.name: grafted(found[layer.name], layer.of(updates)) for layer in self.oracle.layers}
        if self.scaling == "kl_clip":
            nu = kl_clip_factor([(d, moments[name], lr) for name, d in found.items()], 1e-3)
            assert nu < 1, "nothing was clipped"
            found = {name: nu * d for name, d in found.items()}
        directions = named(self.model, found, self.oracle)
        if self.trust is not None:
            if self.turns:
                product = sum(float((step.gradients[name] * turn).sum()) for name, turn in self.turns.items())
                self.trust = min(6, self.trust + 1) if product > 0 else max(0, self.trust - 1)
            step_number = self.steps - 1
            if self.length is not None:
                self.lengths.append(min(self.length, 5 * usual(self.lengths)) if self.lengths else self.length)
            self.length = None
            largest = max(float(step.gradients[name].abs().max()) for name in covered)
            usually = usual_since_first(self.entries) if self.entries else largest
            outsized = self.learns_size and (largest > 5 * usually or self.factor < (1.3 / 5) ** 2)
            self.entries += [min(largest, 5 * usually)] if self.lengths else []  # not before there are directions
            if (
                not outsized
                and self.trust > 0
                and step_number % min(4 if self.trust == 10 else 3, 1 + step_number)
                and self.changes
            ):
                directions = {name: updates[name] + change for name, change in self.changes.items()}
            else:
                measured = self.trust > 0 or step_number % 4 == 0
                self.turns = {name: k - updates[name] for name, k in directions.items() if measured}
                whole = {layer.name: layer.of(updates) for layer in self.oracle.layers}
                steps = {name: turned(whole[name], k, self.trust / 10) for name, k in found.items()}
                if measured:
                    weight = next(float(getattr(rule, "weight", 1.0)) for rule in self.rules.values())
                    self.length = math.sqrt(sum(float(u.square().sum()) for u in whole.values())) / weight
                    self.factor = min(1.0, 1.3 * usual(self.lengths) / self.length) ** 2 if self.lengths else 1.0
                    own = min(1.0, 5 * usual(self.lengths) / self.length) if outsized and self.lengths else 1.0
                    self.capped |= own < 1
                    share = (1 - self.trust / 10) * own + self.trust / 10 * self.factor
                    steps = {name: share * step for name, step in steps.items()}
                directions = named(self.model, steps, self.oracle)
                repeatable = self.trust > 0 and not self.averages_gradients
                self.changes = {name: d - updates[name] for name, d in directions.items() if repeatable}
        with torch.no_grad():
            for name, p in weights.items():  # "scale" moves by the base rule
                _, update, decay = parts[name]
                p -= lr * (directions.get(name, update) + decay)


def assert_trains_as(textbook: Textbook, model: Net, optimizer: KFACMixin, steps: int = 4) -> None:
    for _ in range(steps):
        passes = data()
        textbook.step(passes)
        backward(model, passes, loss)
        optimizer.step()
        assert_same_weights(model, textbook.model)


def train_alike(*runs: tuple[Net, torch.optim.Optimizer], steps: int = 4, batch: Any = None) -> None:
    """Some steps of each on the same data: on one batch, or another in each step."""
    for _ in range(steps):
        passes = batch or data()
        for model, optimizer in runs:
            backward(model, passes, loss)
            optimizer.step()


@pytest.mark.parametrize("scaling", [None, "unit", FULL, "kl_clip"])
@pytest.mark.parametrize(
    "how",
    [{"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.0}],
)
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_sgd_against_the_textbook(scaling: Any, how: dict[str, float], decay: float) -> None:
    model = Net()
    textbook = Textbook(model, lambda: Sgd(decay, **how), scaling, interval=2)
    optimizer = KFACSGD(model, **(MODE | {"scaling": scaling, "weight_decay": decay, "inv_update_steps": 2} | how))
    assert_trains_as(textbook, model, optimizer)
    if how["momentum"]:
        for name, p in model.named_parameters():
            assert_near(optimizer.state[p]["momentum_buffer"], textbook.rules[name].moment.buffer, name, SAME)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("how", [{}, {"weight_decay": 0.05}, {"maximize": True}])
@pytest.mark.parametrize("scaling", [None, FULL, "graft"])
def test_nesterov_is_the_same_by_multi_tensor_operations(scaling: Any, how: dict[str, Any], foreach: bool) -> None:
    """Torch's write the update over the gradients, unless these have been copied for another reason."""
    model = Net()
    options = MODE | {"scaling": scaling, "momentum": 0.8, "nesterov": True} | how
    runs = [
        (own, KFACSGD(own, **options, foreach=given)) for given in (foreach, None) for own in [copy.deepcopy(model)]
    ]
    train_alike(*runs)
    assert_same_weights(runs[0][0], runs[1][0])


def test_nesterov_on_gradients_made_in_inference_mode() -> None:
    """Torch's multi-tensor operations write over these as well, but they count no versions."""
    model = Net()
    options = MODE | {"scaling": None, "momentum": 0.8, "nesterov": True}
    runs = [(own, KFACSGD(own, **options, foreach=given)) for given in (True, False) for own in [copy.deepcopy(model)]]
    for _ in range(4):
        passes = data()
        for net, optimizer in runs:
            backward(net, passes, loss)
            with torch.inference_mode():
                for p in net.parameters():
                    p.grad = None if p.grad is None else p.grad.clone()
                optimizer.step()
    assert_same_weights(runs[0][0], runs[1][0])


RULES: list[tuple[Any, Callable[[float], Rule]]] = [
    (KFACAdam, Adam),
    (KFACAdamW, lambda decay: Adam(decay, coupled=False)),
    (KFACLAMB, Lamb),
]


@pytest.mark.parametrize("scaling", [None, "unit", FULL])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize(("kfac", "rule"), RULES)
def test_adam_and_its_kin_against_the_textbook(
    kfac: Any, rule: Callable[[float], Rule], scaling: Any, decay: float
) -> None:
    model = Net()
    textbook = Textbook(model, lambda: rule(decay), scaling, interval=2)
    optimizer = kfac(model, **(OTHERS | {"scaling": scaling, "weight_decay": decay, "inv_update_steps": 2}))
    assert_trains_as(textbook, model, optimizer)
    for name, p in model.named_parameters():
        assert_near(optimizer.state[p]["exp_avg"], textbook.rules[name].book.m, name, SAME)


WAYS: list[tuple[Any, Callable[[float], Rule], dict[str, Any]]] = [
    (KFACAdam, lambda decay: Adam(decay, amsgrad=True), {"amsgrad": True, "betas": (0.9, 0.5)}),
    *[(KFACAdam, lambda decay: Adam(decay, coupled=False), {"decoupled_weight_decay": True})] * ADAM_DECOUPLES,
    (KFACAdam, lambda decay: Adam(decay, sign=-1.0), {"maximize": True}),
    (KFACLAMB, lambda decay: Lamb(decay, debias=True), {"debias": True}),
    (KFACLAMB, lambda decay: Lamb(decay, adam=True), {"adam": True}),
]


@pytest.mark.parametrize(
    ("kfac", "rule", "how"), WAYS, ids=lambda value: next(iter(value), "") if isinstance(value, dict) else ""
)
def test_the_ways_of_the_base_classes_against_the_textbook(
    kfac: Any, rule: Callable[[float], Rule], how: dict[str, Any]
) -> None:
    def made() -> Rule:
        found = rule(0.05)
        found.book.beta1, found.book.beta2 = how.get("betas", (0.9, 0.999))
        return found

    model = Net()
    optimizer = kfac(model, **(OTHERS | {"scaling": FULL, "weight_decay": 0.05} | how))
    assert_trains_as(Textbook(model, made, FULL), model, optimizer)


def test_a_base_without_moments_has_its_gradients_preconditioned() -> None:
    """Adagrad keeps no first moment: the direction is that of the gradient, the length Adagrad's."""

    class Rule:
        def __init__(self) -> None:
            self.total = torch.zeros(())

        def __call__(self, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.total = self.total + g * g
            return g, g / (self.total.sqrt() + 1e-10), torch.zeros_like(w)

    model = Net()
    optimizer = KFACAdagrad(model, **(OTHERS | {"scaling": FULL}))
    assert_trains_as(Textbook(model, Rule, FULL), model, optimizer)


def test_momentum_of_divided_gradients_is_no_first_moment() -> None:
    """RMSprop's: the direction is that of the gradient, the length RMSprop's; while trust is learned of an average."""

    class Rule:
        def __init__(self) -> None:
            self.squares, self.buffer = torch.zeros(()), torch.zeros(())

        def __call__(self, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            self.squares = 0.99 * self.squares + 0.01 * g * g
            self.buffer = 0.9 * self.buffer + g / (self.squares.sqrt() + 1e-8)
            return g, self.buffer, torch.zeros_like(w)

    model = Net()
    optimizer = KFACRMSprop(model, **(MODE | {"momentum": 0.9, "scaling": FULL}))
    assert_trains_as(Textbook(model, Rule, FULL), model, optimizer)
    learning = KFACRMSprop(model, **(MODE | {"momentum": 0.9, "scaling": "graft"}))
    backward(model, data(), loss)
    learning.step()
    for p in (p for layer in learning.curvature.layers for p in layer.parameters):
        assert torch.equal(learning.state[p]["kfac_moment"], p.grad)


def test_every_group_has_its_own_momentum() -> None:
    """Weight and bias of one layer in different groups, one of them with Nesterov."""
    model = Net()
    textbook = Textbook(model, lambda: Sgd(momentum=0.9))
    textbook.rules["first.bias"] = Sgd(momentum=0.5, nesterov=True)
    textbook.rules["second.weight"] = Sgd(momentum=0.0)
    own = dict(model.named_parameters())
    special = ("first.bias", "second.weight")
    groups = [
        {"params": [p for name, p in own.items() if name not in special], "momentum": 0.9},
        {"params": [own["first.bias"]], "momentum": 0.5, "nesterov": True},
        {"params": [own["second.weight"]], "momentum": 0.0},
    ]
    optimizer = KFACSGD(groups, model=model, **MODE)
    assert_trains_as(textbook, model, optimizer)


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_fixed_curvature_both_modes_are_identical(nesterov: bool) -> None:
    """The solve is linear, so it may come before or after the momentum."""
    model = Net()
    other = copy.deepcopy(model)
    fixed = {"momentum": 0.9, "nesterov": nesterov, "inv_update_steps": 1000}
    after = KFACSGD(model, **(MODE | fixed))
    before = KFACSGD(other, **(MODE | fixed | {"precondition": "gradient"}))
    train_alike((model, after), (other, before), steps=6)
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


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_schedulers_that_change_the_momentum(decay: float) -> None:
    """OneCycleLR cycles lr and momentum of the groups; both are read at every step."""
    model = Net()
    textbook = Textbook(model, lambda: Sgd(decay, momentum=0.9))
    optimizer = KFACSGD(model, **(MODE | {"momentum": 0.9, "weight_decay": decay}))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=6)
    seen = set()
    for _ in range(6):
        group = optimizer.param_groups[0]
        seen.add(group["momentum"])
        for rule in textbook.rules.values():
            for recurrence in (rule.moment, rule.pure, rule.ones):
                recurrence.momentum = group["momentum"]
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
    second.load_state_dict(first.state_dict())
    assert second.curvature.report()["skipped_steps"] == 2


@pytest.mark.parametrize("momentum", [0.9, 1.0])
def test_the_buffer_of_plain_sgd_goes_on(momentum: float) -> None:
    """A state of torch.optim.SGD loads: its momentum is the same recurrence of the same raw gradients.

    Of momentum 1 it is their sum, whose weights grow without end.
    """
    model = Net()
    other = copy.deepcopy(model)
    first = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    second = KFACSGD(other, **(MODE | {"momentum": momentum}))
    passes = data()
    backward(model, passes, loss)
    first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    backward(other, passes, loss)
    second.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if name == "scale":
            continue
        expected = momentum * first.state[p]["momentum_buffer"] + q.grad
        assert_near(second.state[q]["momentum_buffer"], expected, name, SAME)


@pytest.mark.parametrize(
    ("how", "weight"), [({"momentum": 0.9}, 10), ({"momentum": 0.8, "dampening": 0.3}, 3.5), ({"momentum": 0.0}, 1)]
)
def test_the_decay_in_a_mature_buffer_of_plain_sgd_is_known(how: dict[str, float], weight: float) -> None:
    """In the limit each gradient, and the decay that was added to it, stands in the buffer with a weight known."""
    model, passes = Net(), data()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, weight_decay=0.5, **how)
    backward(model, passes, loss)
    for _ in range(300):
        sgd.step()
    ours = KFACSGD(model, **(MODE | how | {"weight_decay": 0.5, "lr": 0.0}))
    ours.load_state_dict(copy.deepcopy(sgd.state_dict()))
    covered = {p for layer in ours.curvature.layers for p in layer.parameters}
    for _ in range(2):
        backward(model, passes, loss)
        ours.step()
        buckets = [[m for alike in buckets_of(ours) for m in alike if m.p in covered]]
        moments, _ = take_apart(buckets, [[m.p.data for m in buckets[0]]])
        for p in covered:
            assert_near(moments[p], weight * p.grad, rel=1e-9)


@pytest.mark.parametrize("how", [{}, {"nesterov": True}, {"maximize": True}, {"dampening": 0.3}])
def test_a_decay_that_comes_late_does_not_begin_the_moment_anew(how: dict[str, Any]) -> None:
    """So small a decay is as good as none."""
    model = Net()
    models = model, copy.deepcopy(model)
    options = MODE | {"momentum": 0.9, "lr": 0.01, "scaling": FULL} | how
    optimizers = [KFACSGD(model, **options) for model in models]
    for step in range(8):
        optimizers[1].param_groups[0]["weight_decay"] = 1e-15 * (step > 3)
        passes = data()
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, passes, loss)
            optimizer.step()
    assert_same_weights(*models)


def test_a_dampening_that_lets_no_more_gradients_in() -> None:
    """The weights of gradients in the moment fall to nothing; in that of plain SGD there are none from the start."""
    model = Net()
    optimizer = KFACSGD(model, lr=LR, momentum=1e-200, dampening=1.0, factor_update_steps=2)
    train_alike((model, optimizer))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_base_that_decouples_its_decay_shrinks_the_weights_as_much() -> None:
    class KFACAdafactor(KFACMixin, torch.optim.Adafactor):
        pass

    model, batch = Net(), data()
    start = copy.deepcopy(model)
    moved = []
    for decay in (0.0, 0.1):
        own = copy.deepcopy(model)
        optimizer = KFACAdafactor(own, **(OTHERS | {"scaling": FULL, "weight_decay": decay}))
        backward(own, batch, loss)
        optimizer.step()
        moved.append(dict(own.named_parameters()))
    for name, p in start.named_parameters():
        assert_near(moved[1][name].detach(), moved[0][name].detach() - LR * 0.1 * p.detach(), name, 1e-9)


# Trust ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize(("momentum", "rate"), [(0.0, 0.01), (0.0, 2.0), (0.9, 0.01), (0.9, 3.0)])
def test_trust_is_learned_from_the_next_gradient(rate: float, momentum: float) -> None:
    """At a small rate the base's own updates win, at a large one the steps turn; the textbook takes the same ones."""
    model = Net()
    textbook = Textbook(model, lambda: Sgd(momentum=momentum), FULL)
    textbook.trust, textbook.averages_gradients = 0, not momentum
    optimizer = KFACSGD(model, **(MODE | {"momentum": momentum, "scaling": "graft", "lr": rate}))
    batch, seen, factors = data(), [], []
    for _ in range(12):
        last, known = textbook.factor, len(textbook.lengths)
        textbook.step(batch, rate)
        backward(model, batch, loss)
        optimizer.step()
        assert_same_weights(model, textbook.model)
        seen.append(optimizer.curvature.report()["trust"])
        assert seen[-1] == textbook.trust / 10
        if len(textbook.lengths) > known:  # told when its length is learned, one step later
            factors.append(optimizer.curvature.report()["brake"])
            assert factors[-1] == pytest.approx(last, rel=1e-5)
        for name, p in model.named_parameters():
            if name in textbook.turns:
                assert_near(optimizer.state[p]["kfac_turn"], textbook.turns[name], name, 1e-9)
            else:  # of no use to the next step
                assert "kfac_turn" not in optimizer.state[p]
    assert factors[0] == 1 and (min(factors) < 0.9) == (rate > 0.1)
    assert f"trust {seen[-1]:.1f}" in repr(optimizer.curvature)
    assert seen[0] == 0 and (max(seen) == 0 if rate < 0.1 else max(seen) >= 0.3)


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize("jump", [10.0, 200.0])
@pytest.mark.parametrize(("momentum", "rate"), [(0.0, 0.01), (0.0, 2.0), (0.9, 0.01), (0.9, 0.5)])
def test_a_step_whose_gradient_is_many_times_as_large_as_usual_is_shortened(
    momentum: float, rate: float, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes directions, and so do those after it, as long as the momentum is long; the textbook does the same."""
    model, given = Net(), loss
    textbook = Textbook(model, lambda: Sgd(momentum=momentum), FULL)
    textbook.trust, textbook.averages_gradients = 0, not momentum
    optimizer = KFACSGD(model, **(MODE | {"momentum": momentum, "scaling": "graft", "lr": rate}))
    batch, brake = data(), optimizer.curvature.stages.steering.brake
    outsized = []
    for number in range(20):
        by = jump if number == 8 else 1.0
        monkeypatch.setitem(globals(), "loss", lambda output, target, by=by: by * given(output, target))
        textbook.step(batch, rate)
        backward(model, batch, loss)
        optimizer.step()
        assert_same_weights(model, textbook.model, 1e-8)
        outsized.append(brake.is_outsized)
        assert brake.entry == (pytest.approx(usual_since_first(textbook.entries), rel=1e-6) if textbook.entries else 0)
    assert outsized.index(True) == 8 and not all(outsized[8:])
    assert textbook.capped == (jump > 100 or not momentum)
    resumed = KFACSGD(model, **(MODE | {"momentum": momentum, "scaling": "graft", "lr": rate}))
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.curvature.stages.steering.brake.entry == brake.entry


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize("known", [[], [0.1]], ids=["free", "braked"])
def test_at_trust_1_three_steps_repeat_the_one_before_them(known: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust is held at 1, at which on this net it would not stay for so long, and so is the usual length."""
    for learned in (Trust, Brake, GraftShare):
        monkeypatch.setattr(learned, "learn", lambda *_, **__: None)
    model, batch = Net(), data()
    textbook = Textbook(model, lambda: Sgd(momentum=0.9), FULL)
    optimizer = KFACSGD(model, **(MODE | {"momentum": 0.9, "scaling": "graft", "lr": 0.5}))
    textbook.trust = optimizer.curvature.stages.steering.trust.notches = 10
    textbook.learns_size = False
    optimizer.curvature.stages.steering.brake.usual = sum(known)
    for _ in range(10):
        textbook.turns, textbook.lengths, textbook.length = {}, known, None  # from which it would learn
        textbook.step(batch, 0.5)
        backward(model, batch, loss)
        optimizer.step()
        assert_same_weights(model, textbook.model)
    assert optimizer.curvature.trust == 1 and (textbook.factor < 0.9) == bool(known)


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_first_moment_no_step_repeats_another(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is made for one update, and the gradients of two batches have little in common."""
    monkeypatch.setattr(Trust, "learn", lambda *_, **__: None)
    model = Net()
    optimizer = KFACSGD(model, **(MODE | {"scaling": "graft", "momentum": momentum}))
    optimizer.curvature.stages.steering.trust.notches = 10
    turns = []
    for _ in range(5):
        backward(model, data(), loss)
        optimizer.step()
        turns.append(optimizer.state[model.first.weight]["kfac_turn"])
    repeats = [now is last for last, now in itertools.pairwise(turns)]
    assert any(repeats) == (momentum > 0)


@pytest.mark.usefixtures("soon_grown")
def test_what_adam_makes_of_a_single_gradient_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a first beta of 0 its first moment is the last gradient."""
    monkeypatch.setattr(Trust, "learn", lambda *_, **__: None)
    model = Net()
    other = copy.deepcopy(model)
    learned, full = (
        KFACAdam(net, **(OTHERS | {"scaling": scaling, "betas": (0.0, 0.999)}))
        for net, scaling in ((model, "graft"), (other, FULL))
    )
    learned.curvature.stages.steering.trust.notches = 10
    train_alike((model, learned), (other, full))
    assert_same_weights(model, other)


def test_where_a_gradient_is_orthogonal_to_everything_nothing_is_learned() -> None:
    """As at a rate of 0, at which a schedule may begin."""
    trust = Trust()
    for turn, expected in [(1.0, 1), (1.0, 2), (0.0, 2), (-1e-9, 0)]:
        trust.learn(turn, grows=False)
        assert trust.notches == expected
    for _ in range(20):
        trust.learn(1.0, grows=False)
    assert trust.value == 1.0


def test_something_is_left_of_updates_that_grow_with_the_gradient() -> None:
    """Those of Adam's do not, and trust in K-FAC's directions may be full."""
    for grows, most in [(True, 0.6), (False, 1.0)]:
        trust = Trust()
        for _ in range(20):
            trust.learn(1.0, grows=grows)
        assert trust.value == most


def test_how_often_steps_repeat_what_changed_the_last_one() -> None:
    """Once first moments are averages of many gradients."""
    trust = Trust()
    assert not any(trust.repeats(step, stretches=False) for step in range(100))
    trust.notches = 3
    computed = [step for step in range(61) if not trust.repeats(step, stretches=False)]
    assert computed == [*range(20), *range(20, 40, 2), *range(42, 61, 3)]
    trust.notches = 10
    assert [step for step in range(40, 73) if not trust.repeats(step, stretches=False)] == [
        *range(42, 60, 3),
        *range(60, 73, 4),
    ]


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize("base", [KFACSGD, KFACAdam])
def test_a_step_at_a_rate_of_0_teaches_nothing_and_is_not_repeated(base: type[KFACMixin]) -> None:
    """Nothing has moved in it; Adam's update of it, the way that the weights have gone by the rate, is 0."""
    model = Net()
    momentum = {"momentum": 0.9} if base is KFACSGD else {}
    optimizer: Any = base(model, **(OTHERS | {"scaling": "graft"} | momentum))
    trust = optimizer.curvature.stages.steering.trust
    for rate in (0.05, 0.05, 0.05, 0.0, 0.05):
        trust.notches = 6  # at which the last of these steps would repeat the one before
        optimizer.param_groups[0]["lr"] = rate
        backward(model, data(), loss)
        optimizer.step()
        for key in ("kfac_turn", "kfac_change"):
            sizes = [float(state[key].norm()) for state in optimizer.state.values() if key in state]
            assert bool(sizes) == (rate > 0)
            assert all(size > 0 for size in sizes)
    assert optimizer.curvature.trust == 0.6


def test_a_schedule_that_brings_momentum_takes_over_from_the_average() -> None:
    model = Net()
    optimizer = KFACSGD(model, **(MODE | {"momentum": 0.0, "scaling": "graft"}))
    covered = {p for layer in optimizer.curvature.layers for p in layer.parameters}
    for momentum in (0.0, 0.0, 0.9, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        backward(model, data(), loss)
        optimizer.step()
        kept = {p for p, state in optimizer.state.items() if "kfac_moment" in state}
        assert kept == (set() if momentum else covered)


def test_an_average_is_not_kept_where_no_step_turns() -> None:
    """Beside a momentum that has weight decay in it."""
    model = Net()
    optimizer = KFACSGD(model, **(MODE | {"momentum": 0.9, "weight_decay": 0.1, "scaling": "graft"}))
    for trust in (None, None, 0.0, 0.0):
        optimizer.curvature.scaling = Graft(trust=trust)
        backward(model, data(), loss)
        optimizer.step()
        kept = sum("kfac_moment" in state for state in optimizer.state.values())
        assert (kept > 0) == (trust is None)


@pytest.mark.usefixtures("soon_grown")
def test_what_a_momentum_has_changed_is_not_repeated_once_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was up to ten times as long as a gradient."""
    monkeypatch.setattr(Trust, "learn", lambda *_, **__: None)
    model = Net()
    optimizer = KFACSGD(model, **(MODE | {"scaling": "graft", "momentum": 0.9}))
    optimizer.curvature.stages.steering.trust.notches = 5
    turns = []
    for momentum in (0.9, 0.9, 0.9, 0.9, 0.0):  # the last would repeat the fourth, as two do the first
        optimizer.param_groups[0]["momentum"] = momentum
        backward(model, data(), loss)
        optimizer.step()
        turns.append(optimizer.state[model.first.weight]["kfac_turn"])
    assert [now is last for last, now in itertools.pairwise(turns)] == [True, True, False, False]


def test_gradients_of_another_type_are_averaged_in_that_of_the_parameter() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    runs = [(net, KFACSGD(net, **(MODE | {"momentum": 0.0, "scaling": "graft", "lr": 2.0}))) for net in (model, twin)]
    train_alike(*runs)
    assert_same_weights(model, twin, 1e-5)
    moments = [state["kfac_moment"] for state in runs[0][1].state.values() if "kfac_moment" in state]
    assert moments and {moment.dtype for moment in moments} == {torch.float64}


def test_while_steps_do_not_turn_directions_are_computed_ever_more_rarely() -> None:
    trust = Trust()
    measured = [step for step in range(1025) if trust.computes(step, stretches=False)]
    expected = [*range(0, 128, 4), *range(128, 256, 8), *range(256, 512, 16), *range(512, 1024, 32), 1024]
    assert measured == expected
    trust.notches = 1
    assert all(trust.computes(step, stretches=False) for step in range(100))


@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("before", [4, 5, 6, 7])
def test_a_resumed_run_repeats_what_the_other_would_have(before: int, momentum: float) -> None:
    options = MODE | {"momentum": momentum, "scaling": "graft", "lr": 2.5 if momentum else 2.0}
    model, batch, trusts = Net(), data(), []
    optimizer = KFACSGD(model, **options)

    def step(model: Net, optimizer: KFACSGD) -> None:
        backward(model, batch, loss)
        optimizer.step()
        trusts.append(optimizer.curvature.trust)

    for _ in range(before):
        step(model, optimizer)
    other = copy.deepcopy(model)
    resumed = KFACSGD(other, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(4):
        step(model, optimizer)
        step(other, resumed)
        assert_identical(model, other)
    assert min(trusts[before - 1 :]) > 0, "no step was turned"


@pytest.mark.parametrize("key", ["kfac_turn", "kfac_change", "kfac_moment", "kfac_length"])
@pytest.mark.parametrize(
    "damage", [lambda saved: saved.flatten()[:1], lambda saved: saved * float("nan"), lambda saved: None]
)
def test_a_damaged_turn_is_refused(key: str, damage: Callable[[Tensor], Any]) -> None:
    options = MODE | {"momentum": 0.0 if key == "kfac_moment" else 0.9, "scaling": "graft", "lr": 2.0}
    model = Net()
    optimizer = KFACSGD(model, **options)
    train_alike((model, optimizer), steps=7, batch=data())
    state = copy.deepcopy(optimizer.state_dict())
    saved = next(own for own in state["state"].values() if key in own and own[key].dim() != 1)
    saved[key] = damage(saved[key])
    fresh = KFACSGD(copy.deepcopy(model), **options)
    before = str(fresh.state_dict())
    with pytest.raises(ValueError, match=key):
        fresh.load_state_dict(state)
    assert str(fresh.state_dict()) == before


def test_without_momentum_a_step_that_does_not_turn_leaves_nothing_behind() -> None:
    model = Net()
    optimizer = KFACSGD(model, **(MODE | {"momentum": 0.0, "scaling": "graft", "lr": 0.01}))
    covered = {p for layer in optimizer.curvature.layers for p in layer.parameters}
    for step in range(6):
        backward(model, data(), loss)
        optimizer.step()
        turned = {p for p, state in optimizer.state.items() if "kfac_turn" in state}
        assert turned == (covered if step % 4 == 0 or optimizer.curvature.trust > 0 else set())
        assert sum("kfac_length" in state for state in optimizer.state.values()) == bool(turned)
        assert all(optimizer.state.values())


@pytest.mark.parametrize("kfac", ALL_CLASSES)
def test_without_trust_it_is_the_base_class_bit_for_bit(kfac: Any) -> None:
    model = Net()
    other = copy.deepcopy(model)
    ours = kfac(model, **(ALL_CLASSES[kfac] | {"scaling": Graft(trust=0.0), "damping": 0.1}))
    theirs = (BASES | {KFACLAMB: KFACLAMB.__mro__[2]})[kfac](other.parameters(), **ALL_CLASSES[kfac])
    train_alike((model, ours), (other, theirs))
    assert_identical(model, other)


@pytest.mark.parametrize("how", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.0}])
def test_a_maximised_objective_turns_the_other_way(how: dict[str, Any]) -> None:
    """Minus the objective, maximised, is trained as the objective is."""
    model = Net()
    other = copy.deepcopy(model)
    options = MODE | {"scaling": "graft", "lr": 2.0} | how
    first, second = KFACSGD(model, **options), KFACSGD(other, **options, maximize=True)
    batch = data()
    for _ in range(8):
        backward(model, batch, loss)
        backward(other, batch, lambda output, target: -loss(output, target))
        first.step()
        second.step()
        assert first.curvature.trust == second.curvature.trust
    assert first.curvature.trust > 0
    assert_same_weights(model, other)


def test_preconditioned_gradients_are_not_turned() -> None:
    """In the paper's order, and in an engine of its own, directions are K-FAC's whatever grafting says of trust."""
    for trust in (None, 0.5):
        options = {"scaling": Graft(trust=trust), "precondition": "gradient", "lr": 0.1}
        optimizer = KFACSGD(Net(), **options)
        assert optimizer.curvature.report()["trust"] == 1 and "trust" not in repr(optimizer.curvature)
        assert CurvatureEngine(Net(), scaling=Graft(trust=trust)).report()["trust"] == 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_pause_of_the_momentum_brakes_nothing(nesterov: bool) -> None:
    """Lengths are per unit of the weight that gradients have in an update, which is 1 without momentum."""
    torch.manual_seed(0)
    model = Net()
    optimizer = KFACSGD(model, **(MODE | {"momentum": 0.9, "nesterov": nesterov, "scaling": "graft", "lr": 1e-4}))
    steering, batch, usual = optimizer.curvature.stages.steering, data(), []
    for step in range(40):
        for group in optimizer.param_groups:
            group["momentum"] = 0.0 if 12 <= step < 24 and not nesterov else 0.9
        steering.trust.notches = 5
        backward(model, batch, loss)
        optimizer.step()
        usual.append(steering.brake.usual)
        assert steering.brake.last == 1
    known = [length for length in usual if length]
    assert max(known) < 1.1 * min(known)  # the gradient hardly changes


@needs_rates_of_one_dimension
@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_may_be_a_tensor_of_one_element(kind: str) -> None:
    cls, base = KINDS[kind]
    models = []
    for shape in ((), (1,)):
        model = make_model(seed=0)
        optimizer = cls(model, **{**base, "lr": torch.full(shape, base["lr"]), "precondition": "momentum"})
        train(model, optimizer, range(12))
        models.append(model)
    assert_identical(*models)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_model_may_change_its_precision_between_steps(momentum: float) -> None:
    model = make_model(seed=0).float()
    optimizer = KFACSGD(model, lr=0.05, momentum=momentum)
    train(model, optimizer, range(12))
    model.double()
    before = values(model)
    train(model, optimizer, range(12, 20))
    assert_trained(model, before)


def test_a_layer_without_a_direction_counts_in_the_usual_length() -> None:
    """One that trains before a refresh takes it up: without it, steps would be braked from that refresh on."""
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    how = {"momentum": 0.0, "scaling": "graft", "lr": 1e-3, "inv_update_steps": 100}
    optimizer, lengths = KFACSGD(model, **(MODE | how)), []
    for step in range(6):
        optimizer.curvature.stages.steering.trust.notches = 5  # every step is turned
        optimizer.zero_grad()
        output = sum(layer(torch.randn(6, 3)) for layer in model[: 1 if step < 2 else 2])
        loss(output, torch.randn(6, 2)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        if lengths:  # a length is learned one step later
            assert optimizer.curvature.stages.steering.brake.usual == pytest.approx(usual(lengths), rel=1e-6)
        lengths.append(float(torch.cat([g.flatten() for g in gradients]).norm()))
    assert len(gradients) == 4
