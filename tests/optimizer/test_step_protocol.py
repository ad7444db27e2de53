"""What ``torch.optim`` promises of ``step()`` and ``zero_grad()``: closures, hooks, gradients that are not there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kfac_optim import KFACSGD, CurvatureEngine, KFACMixin
from kfac_optim.bases import buckets_of, take_apart
from kfac_optim.bases.rules import bias_correction
from kfac_optim.common.rates import rates_of
from kfac_optim.steering import lessons
from tests.helpers.compare import assert_close, assert_identical, assert_trained, values
from tests.helpers.reads import HostReads
from tests.helpers.settings import BASES, CLASSES, SETTINGS
from tests.helpers.training import assert_go_on_alike, backward, loss_of, make_model, train

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 7
TOL = 1e-12  # a scale of 2^k is exact; dividing a loss by it again is too, up to the order of sums


def build(kfac: Any, seed: int = 0, **options: Any) -> tuple[nn.Sequential, Any]:
    model = make_model(seed)
    return model, kfac(model, **CLASSES[kfac], **{**SETTINGS, **options})


# Closures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kfac", CLASSES)
def test_closure_is_evaluated_first_with_gradients_enabled_and_its_loss_returned(kfac: Any) -> None:
    (model, optimizer), (twin, plain) = build(kfac), build(kfac)
    before = values(model)
    losses = []
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            """As Lightning runs a training step: forward, zero_grad and backward all in here."""
            assert torch.is_grad_enabled()
            loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss)
            return loss

        with torch.set_grad_enabled(step % 2 == 0):
            returned = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        assert returned is losses[-1]
    train(twin, plain, range(STEPS))
    assert len(losses) == STEPS, "once per step"
    assert_trained(model, before)
    assert_identical(model, twin)


@pytest.mark.parametrize("kfac", CLASSES)
def test_without_a_closure_step_returns_none(kfac: Any) -> None:
    model, optimizer = build(kfac)
    backward(model, 0)
    assert optimizer.step() is None
    assert optimizer.step(None) is None


@pytest.mark.parametrize("kfac", CLASSES)
def test_an_error_in_the_closure_leaves_everything_as_it_was(kfac: Any) -> None:
    (model, optimizer), (twin, plain) = build(kfac), build(kfac)

    def closure() -> Tensor:
        raise ZeroDivisionError

    train(model, optimizer, range(3))
    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    train(model, optimizer, range(3, STEPS))
    train(twin, plain, range(STEPS))
    assert_identical(model, twin)


@pytest.mark.parametrize("kfac", CLASSES)
def test_grad_scaler_passes_its_closure_positionally(kfac: Any) -> None:
    """``scaler.step(optimizer, None)``, as Accelerate calls it; a scale that is a power of two drops out exactly."""
    (model, _), (twin, plain) = build(kfac), build(kfac)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=1000)
    optimizer = kfac(model, **CLASSES[kfac], **SETTINGS, grad_scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer, None)
        scaler.update()
    train(twin, plain, range(STEPS))
    assert_close(model, twin, TOL)


# Step hooks ----------------------------------------------------------------------------------------------------------


class Inheriting(KFACSGD):
    """A user's subclass."""


class Mixed(KFACMixin, torch.optim.Adagrad):
    """A user's own combination."""


@pytest.mark.parametrize("base_first", [False, True])
@pytest.mark.parametrize("kfac", [*CLASSES, Inheriting, Mixed])
def test_step_hooks_fire_exactly_once(kfac: Any, base_first: bool) -> None:
    """Also where torch has wrapped the base class's ``step`` because an instance of it was made before."""
    bases = [*BASES.values(), torch.optim.Adagrad]
    if base_first:
        for base in bases:
            base(make_model().parameters(), lr=0.1).step()
    model = make_model()
    optimizer = kfac(model, lr=0.1, **SETTINGS)
    if not base_first:
        for base in bases:
            base(make_model().parameters(), lr=0.1).step()
    events: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: events.append("pre"))
    optimizer.register_step_post_hook(lambda *args: events.append("post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *args: events.append("global pre")),
        register_optimizer_step_post_hook(lambda *args: events.append("global post")),
    ]
    try:
        for step in range(4):
            backward(model, step)
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(events) == sorted(["pre", "post", "global pre", "global post"] * 4)
    assert events.index("pre") < events.index("post")


def test_hooks_see_raw_gradients_and_weights_before_and_after() -> None:
    model, optimizer = build(KFACSGD, precondition="gradient")
    train(model, optimizer, range(3))
    backward(model, 3)
    raw, seen = [p.grad.clone() for p in model.parameters() if p.grad is not None], []

    def look(*args: Any) -> None:
        seen.append((values(model), [p.grad.clone() for p in model.parameters() if p.grad is not None]))

    before = values(model)
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    optimizer.step()
    for (weights, gradients), expected in zip(seen, (before, values(model)), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(weights, expected, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(gradients, raw, strict=True))


def test_a_pre_hook_may_clip_the_gradients() -> None:
    (model, optimizer), (twin, plain) = build(KFACSGD), build(KFACSGD)

    def clip(*args: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    train(model, optimizer, range(STEPS))
    for step in range(STEPS):
        backward(twin, step)
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
    assert_identical(model, twin)


# Gradients that are not there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kfac", CLASSES)
def test_parameters_without_gradient_are_left_alone(kfac: Any) -> None:
    """As in torch: no gradient, no update, no state of the base class, and ``.grad`` stays None."""
    model, optimizer = build(kfac)
    last = model[3]
    before = values(last)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        last.weight.grad = last.bias.grad = None
        optimizer.step()
        assert last.weight.grad is None
    assert all(torch.equal(p, old) for p, old in zip(last.parameters(), before, strict=True))
    assert set(optimizer.state[last.weight]) <= {"kfac"}


def test_a_layer_whose_bias_has_no_gradient_trains_its_weight() -> None:
    model, optimizer = build(KFACSGD)
    before = values(model)
    backward(model, 0)
    model[0].bias.grad = None
    optimizer.step()
    assert not torch.equal(model[0].weight, before[0])
    assert torch.equal(model[0].bias, before[1])


@pytest.mark.parametrize("kfac", CLASSES)
def test_step_without_any_gradient_does_nothing(kfac: Any) -> None:
    model, optimizer = build(kfac)
    before = values(model)
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


# zero_grad -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kfac", CLASSES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_pass_whose_step_is_not_taken_is_forgotten(kfac: Any, set_to_none: bool) -> None:
    (model, optimizer), (twin, plain) = build(kfac), build(kfac)
    for step in range(STEPS):
        for abandoned in (100 + step, 200 + step):
            (1e3 * loss_of(model, abandoned)).backward()
        optimizer.zero_grad(set_to_none)
        loss_of(model, step).backward()
        optimizer.step()
    train(twin, plain, range(STEPS))
    assert_identical(model, twin)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
@pytest.mark.parametrize("kfac", CLASSES)
def test_a_forward_that_awaits_its_backward_survives_zero_grad(kfac: Any, fisher: str) -> None:
    (model, optimizer), (twin, plain) = build(kfac, fisher=fisher), build(kfac, fisher=fisher)
    for step in range(STEPS):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    train(twin, plain, range(STEPS))
    assert_identical(model, twin)


def test_a_loop_that_makes_a_graph_of_every_gradient_is_told_so() -> None:
    """As base classes like AdaHessian want it, and monitors of the Hessian."""
    model, optimizer = build(KFACSGD)
    with pytest.raises(RuntimeError, match="none of its layers was seen.*create_graph=True is taken for a derivative"):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward(create_graph=True)
            optimizer.step()


@pytest.mark.parametrize("fisher", ["empirical", "gaussian"])
def test_gradients_of_the_inputs_alone_are_no_statistics(fisher: str) -> None:
    """Adversarial examples and saliency maps: ``torch.autograd.grad(loss, inputs)``."""
    (model, optimizer), (twin, plain) = build(KFACSGD, fisher=fisher), build(KFACSGD, fisher=fisher)
    for step in range(STEPS):
        for trained in (optimizer, plain):
            trained.zero_grad()
        for trained, attacked in ((model, True), (twin, False)):
            inputs = torch.randn(4, 4, requires_grad=True)
            attack = trained(inputs).square().sum()  # both draw a sample
            if attacked:
                torch.autograd.grad(attack, inputs)
            loss_of(trained, step).backward()
        optimizer.step()
        plain.step()
    assert_identical(model, twin)


@pytest.mark.parametrize("spread", [0, 2])
def test_a_closed_engine_leaves_the_base_class(spread: int) -> None:
    """Also through the steps in which statistics and refreshes would have been due."""
    model = make_model()
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9, factor_update_steps=1, inv_update_steps=2, spread=spread)
    train(model, optimizer, range(3))
    optimizer.curvature.close()
    base_model = copy.deepcopy(model)
    base = torch.optim.SGD(base_model.parameters(), lr=0.05, momentum=0.9)
    for p, q in zip(model.parameters(), base_model.parameters(), strict=True):
        base.state[q]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].clone()
    assert_go_on_alike(range(3, 9), (model, optimizer), (base_model, base))


def test_a_closed_engine_hooks_nothing_and_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer steps on what it has, as the base class does, where other parameters stand in the model by now.

    It does not look at gradients either.
    """
    model = make_model()
    optimizer = KFACSGD(model, lr=0.05, **SETTINGS)
    train(model, optimizer, range(3))
    optimizer.curvature.close()
    monkeypatch.setattr(lessons, "largest_entry", None)
    stepped = list(model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in stepped)
    train(model, optimizer, range(3, 4))
    assert not any(p._post_accumulate_grad_hooks for p in stepped)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    before = stepped[0].detach().clone()
    optimizer.step()
    assert not torch.equal(stepped[0], before)


# Waits ---------------------------------------------------------------------------------------------------------------


def test_learning_rates_on_a_device_are_read_with_the_gradients() -> None:
    def reads(*lrs: float | Tensor) -> int:
        model = make_model()
        engine = CurvatureEngine(model, **SETTINGS)
        backward(model, 0)
        with HostReads() as counted, torch.no_grad():
            assert engine.update([p.grad for p in model.parameters() if p.grad is not None], lrs)
        assert engine.stages.refresher.refreshes == 1
        return counted.count

    assert reads(torch.tensor(0.0), 0.0, torch.tensor(0.1)) == reads(0.0, 0.0, 0.1)


@pytest.mark.parametrize(
    "rates", [(torch.tensor(0.1), 0.1), (0.1, torch.tensor(0.1)), (torch.tensor(0.1), torch.tensor(0.1))]
)
def test_learning_rates_of_groups_are_not_compared_on_the_device(rates: tuple[Any, Any]) -> None:
    """The steps are those of equal numbers, and no rate is read besides."""

    def trained(*lrs: Any) -> tuple[nn.Module, int]:
        model = make_model()
        parts = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": params, "lr": lr} for params, lr in zip(parts, lrs, strict=True)]
        optimizer = KFACSGD(groups, model=model, lr=0.1, foreach=False, **SETTINGS)
        train(model, optimizer, range(3))
        gradients = {p: torch.ones_like(p) for p in model.parameters()}
        with HostReads() as counted, torch.no_grad():
            optimizer.curvature.directions(gradients, rates_of(optimizer.param_groups))
        return model, counted.count

    model, reads = trained(*rates)
    other, fewest = trained(0.1, 0.1)
    assert reads == fewest
    assert_close(model, other, 1e-6)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_the_default_device_of_a_script_changes_nothing(fisher: str) -> None:
    """Scripts for GPUs begin with ``torch.set_default_device("cuda")``; of meta tensors nothing can be read."""

    def trained(default: str) -> nn.Module:
        convolutions = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten()
        model = nn.Sequential(*convolutions, nn.Linear(64, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        for number, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
        batches = [
            (torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(step)), torch.arange(8) % 3)
            for step in range(9)
        ]
        with torch.device(default):
            optimizer = KFACSGD(model, lr=0.05, momentum=0.9, fisher=fisher, inv_update_steps=4, spread=2)
            for inputs, classes in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), classes).backward()
                optimizer.step()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.curvature.report(eigenvalues=True)
        return model

    assert_identical(trained("cpu"), trained("meta"))


@pytest.mark.parametrize("still", [torch.tensor(0.0), torch.tensor([0.0]), 0.0])
def test_a_learning_rate_of_any_kind_can_make_a_step_that_changes_nothing(still: float | Tensor) -> None:
    """As torch.distributed.checkpoint takes it: on zero gradients, at a rate of 0."""
    model = make_model()
    engine = CurvatureEngine(model, **SETTINGS)
    zeros = [torch.zeros_like(p) for p in model.parameters()]
    for rates, counted in (([still], 0), ([still, torch.tensor(0.1)], 1)):
        assert engine.update(zeros, rates)
        engine.advance()
        assert engine.step_count == counted


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adams_decay_is_taken_apart_where_the_steps_are(amsgrad: bool) -> None:
    """On a device: that is where ``fused=True`` counts them. Meta tensors have no numbers that could be read."""
    weight = nn.Parameter(torch.randn(3, 2, device="meta"))
    adam = torch.optim.Adam([weight], weight_decay=0.1, amsgrad=amsgrad)
    moments = {"exp_avg": weight.data, "exp_avg_sq": weight.data, "max_exp_avg_sq": weight.data}
    adam.state[weight] = {"step": torch.ones((), device="meta"), **moments}
    weight.grad = weight.data
    for part in take_apart(buckets_of(adam), [[weight.data]]):
        assert part[weight].shape == weight.shape


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.9999])
@pytest.mark.parametrize("steps", [1, 30, 100_000])
def test_a_tensor_of_steps_gives_the_correction_of_their_number(beta: float, steps: int) -> None:
    found = bias_correction(beta, torch.tensor(steps, dtype=torch.float32))
    assert float(found) == pytest.approx(bias_correction(beta, steps), rel=1e-6)
