"""``KFAC``: what a step does, what it refuses, and what it leaves alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from kfac_optim import KFAC, Gaussian, InverseSolver
from kfac_optim.capture import replay as replay_module
from kfac_optim.selftuning.objective import Objective
from tests.helpers.compare import assert_near, assert_same_weights, assert_trained, values
from tests.helpers.fishers import FixedTargets
from tests.helpers.settings import FLOAT64
from tests.helpers.training import assert_go_on_alike, data_of, make_model, resumed_from, train


def make(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Sequential, KFAC]:
    model = make_model().to(dtype)
    storage = FLOAT64 if dtype == torch.float64 else {}
    return model, KFAC(model, **{"fisher": "categorical", **storage, **options})


def learnable(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and classes that follow from them."""
    inputs, _ = data_of(0, (64, 4), dtype=dtype)
    return inputs, inputs[:, :3].argmax(1)


def loss_now(model: nn.Module) -> float:
    inputs, classes = learnable(next(model.parameters()).dtype)
    with torch.no_grad():
        return float(F.cross_entropy(model(inputs), classes))


pytestmark = pytest.mark.usefixtures("float64")
BATCH = {"shape": (64, 4)}


# The step ------------------------------------------------------------------------------------------------------------


def test_a_quadratic_problem_is_solved_in_one_step() -> None:
    x, t = torch.randn(50, 6) @ torch.randn(6, 6), torch.randn(50, 1)
    model = nn.Linear(6, 1)
    optimizer = KFAC(model, fisher="gaussian", damping=1e-12, least_damping=1e-12, **FLOAT64)
    train(model, optimizer, [(x, t)], loss=lambda z, y: (z - y).square().sum() / 2 / len(y))
    design = torch.cat([x, torch.ones(50, 1)], 1)
    solution = torch.linalg.lstsq(design, t).solution
    with torch.no_grad():
        assert_near(torch.cat([model.weight.T, model.bias[:, None]]), solution, rel=1e-6)
    assert optimizer.param_groups[0]["reduction_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_the_steps_are_invariant_under_affine_maps_of_the_inputs() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))

    matrix, shift = torch.randn(3, 3) + 3 * torch.eye(3), torch.randn(3)
    model, mapped = build(), build()
    with torch.no_grad():
        inverse = torch.linalg.inv(matrix)
        mapped[0].weight.copy_(model[0].weight @ inverse)
        mapped[0].bias.copy_(model[0].bias - mapped[0].weight @ shift)
    options: dict[str, Any] = {"fisher": "gaussian", "damping": 1e-11, "least_damping": 1e-11, **FLOAT64}
    one, other = KFAC(model, **options), KFAC(mapped, **options)
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(400, 3)
        t = (x @ x[:3, :].T @ torch.ones(3, 4) / 3).sin()
        for m, optimizer, inputs in ((model, one, x), (mapped, other, x @ matrix.T + shift)):
            train(m, optimizer, [(inputs, t)], loss=lambda z, y: (z - y).square().sum() / 2 / len(y))
        with torch.no_grad():
            assert_near(mapped(x @ matrix.T + shift), model(x), rel=2e-3)
    assert not torch.allclose(model[0].weight, build()[0].weight, rtol=0.1)


def test_training_lowers_the_loss_without_any_rate() -> None:
    model, optimizer = make(torch.float32)
    before = loss_now(model)
    train(model, optimizer, [learnable()] * 12)
    assert loss_now(model) < before / 2
    group = optimizer.param_groups[0]
    assert group["lr"] == 1.0 and group["damping"] > 0 and group["learning_rate"] != 0 and group["momentum"] != 0
    assert group["reduction_ratio"] > 0


def test_factors_are_kept_in_larger_blocks_than_elsewhere() -> None:
    def blocks(**options: Any) -> list[int]:
        (layer,) = KFAC(nn.Sequential(nn.Linear(400, 5)), fisher="gaussian", **options).curvature.layers
        return [spec.blocks for spec in layer.specs]

    assert blocks() == [1, 1] and blocks(max_factor_dim="auto") == [2, 1]


def test_a_scheduler_shortens_the_step_that_was_found() -> None:
    steps = []
    for share in (1.0, 0.25, 0.0):
        model, optimizer = make()
        train(model, optimizer, range(2), **BATCH)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch, share=share: share)  # type: ignore[misc]
        before = values(model)
        train(model, optimizer, [2], **BATCH)
        scheduler.step()
        steps.append([after - w for after, w in zip(values(model), before, strict=True)])
    for whole, quarter, none in zip(*steps, strict=True):
        assert_near(quarter, whole / 4)
        assert not none.any()
    assert any(whole.any() for whole in steps[0])


def test_parameters_without_a_layer_are_trained_too() -> None:
    model, optimizer = make()
    before = model[1].weight.detach().clone()  # PReLU's
    train(model, optimizer, range(2), **BATCH)
    assert not torch.equal(model[1].weight, before)


def test_a_step_that_raises_the_loss_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    train(model, optimizer, range(2), **BATCH)
    before, damping = values(model), optimizer.param_groups[0]["damping"]
    update = optimizer.state[model[0].weight]["kfac_last_update"].clone()
    monkeypatch.setattr("kfac_optim.selftuning.objective.Objective.change", lambda self, c: 1.0)
    train(model, optimizer, [2], **BATCH)
    assert all(map(torch.equal, values(model), before))
    assert torch.equal(optimizer.state[model[0].weight]["kfac_last_update"], update)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(2 * damping)
    assert optimizer.param_groups[0]["reduction_ratio"] < 0


@pytest.mark.parametrize(
    ("changes", "more", "chosen"),
    [
        ([-1.0, -2.0, -2.1], 0, 2),  # hardly better: the last counts
        ([-1.0, -2.0, -1.1], 0, 2),  # more than half as good: it counts, too
        ([-1.0, -2.0, -0.9], 2, 1),
        ([-1.0, -2.0, 3.0], 2, 1),
        ([-1.0, -2.0, float("nan")], 2, 1),
        ([-1.0, 0.5, -2.0, -1.5], 0, 3),  # a bump
        ([0.5, 0.1, -1.0, -1.05], 0, 3),
        ([-1.0, 0.5, -0.9], 1, 0),
        ([0.5], 2, -1),  # nothing is good
    ],
)
def test_the_first_damping_is_found_by_trials(
    changes: list[float], more: int, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    tried: list[float] = []

    rest = [-1e-9 if min(changes) < 0 else 1.0] * (more + 1)

    def change(self: Objective, c: Tensor) -> float:
        tried.append(optimizer.lambda_.value)
        return [*changes, *rest][len(tried) - 1]

    monkeypatch.setattr(Objective, "change", change)
    train(model, optimizer, [0], **BATCH)
    *trials, used = tried
    assert len(trials) == len(changes) + more
    assert all(a / b == pytest.approx(10) for a, b in zip(trials, trials[1:], strict=False))
    assert used == pytest.approx(trials[chosen] if chosen >= 0 else 10 * trials[0])


def test_a_given_damping_is_where_it_starts_and_may_be_set() -> None:
    model, optimizer = make(damping=0.3)
    train(model, optimizer, [0], **BATCH)
    assert optimizer.param_groups[0]["damping"] in (0.3, pytest.approx(0.3 * 0.95), pytest.approx(0.3 / 0.95))
    optimizer.param_groups[0]["damping"] = 7.0
    train(model, optimizer, [1], **BATCH)
    assert 6 < optimizer.param_groups[0]["damping"] < 8


# What is replayed ----------------------------------------------------------------------------------------------------


def noisy(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def test_dropout_and_batch_norm_are_seen_as_they_were() -> None:
    model = noisy()
    optimizer = KFAC(model, fisher="categorical", **FLOAT64)
    inputs, classes = data_of(0, (64, 4))
    for look in (True, False):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        torch.rand(3)
        statistics, random = [b.clone() for b in model.buffers()], torch.get_rng_state()
        if look:
            ((part,), terms) = optimizer._replay.take(1.0, 1.0)
            assert terms == 64
            assert torch.equal(part.evaluate(), part.output)  # the same units are left out
        else:
            optimizer.step()
        assert all(map(torch.equal, model.buffers(), statistics))
        assert torch.equal(torch.get_rng_state(), random)


def test_training_with_dropout_and_batch_norm_goes_well() -> None:
    model = noisy(torch.float32)
    optimizer = KFAC(model, fisher="categorical")
    before = loss_now(model.eval())
    train(model.train(), optimizer, [learnable()] * 15)
    assert loss_now(model.eval()) < 0.8 * before


def test_a_part_of_a_large_batch_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_LEAST", 1)
    model, optimizer = make()
    seen: list[int] = []
    train(model, optimizer, [0], **BATCH)
    model.register_forward_hook(lambda _, args, output: seen.append(len(args[0])))
    train(model, optimizer, [1], **BATCH)
    assert seen == [64, 16, 16, 16, 16, 16]  # as it is, and along three directions; the step
    inputs, classes = data_of(1, (64, 4))
    F.cross_entropy(model(inputs), classes).backward()
    ((part,), terms) = optimizer._replay.take(0.25, 1.0)
    assert terms == 64 and part.weight == 4.0
    with torch.no_grad():
        assert_near(part.output, model(inputs)[::4])


def test_a_model_that_mixes_its_examples_is_told_of_model_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_LEAST", 1)

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).repeat(2, 1)[: x.shape[0] + 1]

    model = Repeats().double()
    optimizer = KFAC(model, fisher="categorical", **FLOAT64)
    inputs, classes = data_of(0, (33, 4))
    optimizer.zero_grad()
    F.cross_entropy(model(inputs[:32]), classes).backward()
    with pytest.raises(RuntimeError, match="model_fraction=1.0"):
        optimizer._replay.take(0.25, 1.0)[0][0].evaluate()


class Wrapped(nn.Module):
    """As models of transformers: keywords in, an object with logits out; part of it checkpointed."""

    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body = body

    def forward(self, *, scale: float, inputs: Tensor) -> SimpleNamespace:
        hidden = checkpoint(self.body[:3], inputs * scale, use_reentrant=False)
        return SimpleNamespace(logits=self.body[3](hidden), hidden=hidden)


def test_keywords_outputs_and_checkpoints_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_LEAST", 1)
    model, optimizer = make(fisher=FixedTargets())
    wrapped = Wrapped(make_model().double())
    again = KFAC(wrapped, fisher=FixedTargets(), **FLOAT64)
    for step in range(4):
        inputs, classes = data_of(step, (64, 4))
        train(model, optimizer, [(inputs, classes)])
        again.zero_grad()
        F.cross_entropy(wrapped(scale=1.0, inputs=inputs).logits, classes).backward()
        again.step()
    assert_same_weights(wrapped.body, model, 1e-6)


class Recurrent(nn.Module):
    """Applies its first part three times, by calls of itself or by its forward."""

    def __init__(self, by_call: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.part, self.head, self.by_call = nn.Linear(4, 4), nn.Linear(4, 3), by_call

    def forward(self, x: Tensor, times: int = 3) -> Tensor:
        if times == 0:
            return self.head(x)
        return (self if self.by_call else self.forward)(self.part(x).tanh(), times - 1)


def test_a_model_that_calls_itself_is_repeated_from_its_outermost_call() -> None:
    found = []
    for by_call in (False, True):
        model = Recurrent(by_call).double()
        train(model, KFAC(model, fisher=FixedTargets(), **FLOAT64), range(3), **BATCH)
        found.append(model)
    assert_same_weights(found[1], found[0], 1e-6)


def test_several_calls_under_one_pass_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    terms, take = [], replay_module.Replay.take

    def noted(*arguments: Any) -> Any:
        found = take(*arguments)
        terms.append(found[1])
        return found

    monkeypatch.setattr(replay_module.Replay, "take", noted)
    model, optimizer = make(fisher=FixedTargets())
    for step in range(3):
        inputs, classes = data_of(step, (64, 4))
        optimizer.zero_grad()
        parts = zip(inputs.chunk(2), classes.chunk(2), strict=True)
        torch.stack([F.cross_entropy(model(x), y) for x, y in parts]).mean().backward()
        optimizer.step()
    assert terms == [64] * 3


def test_micro_batches_are_one_batch() -> None:
    (model, optimizer), (parted, again) = make(fisher=FixedTargets()), make(fisher=FixedTargets())
    train(model, optimizer, range(4), **BATCH)
    train(parted, again, range(4), parts=4, **BATCH)
    assert_same_weights(parted, model, 1e-6)
    assert again.param_groups[0]["damping"] == pytest.approx(optimizer.param_groups[0]["damping"])


def test_what_a_loop_does_beside_training_is_left_alone() -> None:
    (model, optimizer), (bothered, other) = make(fisher=FixedTargets()), make(fisher=FixedTargets())
    train(model, optimizer, range(3), **BATCH)
    for step in range(3):
        inputs, classes = data_of(step, (64, 4))
        loss = F.cross_entropy(bothered(inputs), classes)
        other.zero_grad()
        bothered(inputs.flip(0))  # never used
        with torch.no_grad():
            bothered(inputs)
        F.cross_entropy(bothered(inputs.flip(0)), classes).backward()
        bothered.zero_grad()
        loss = F.cross_entropy(bothered(inputs), classes)
        loss.backward()
        image = inputs.clone().requires_grad_()
        torch.autograd.grad(F.cross_entropy(bothered(image), classes), image)
        other.step()
    assert_same_weights(bothered, model, 1e-6)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("late", [False, True], ids=["before the forward", "after it"])
def test_passes_whose_gradients_were_cleared_do_not_count(to_none: bool, late: bool) -> None:
    """By whichever ``zero_grad()``, with or without a forward pass in between; without one they add up."""
    (model, optimizer), (other, again) = make(fisher=FixedTargets()), make(fisher=FixedTargets())
    train(model, optimizer, range(3), parts=2, **BATCH)
    for step in range(3):
        inputs, classes = data_of(step, (64, 4))
        F.cross_entropy(other(inputs.flip(0)), classes).backward()
        if not late:
            other.zero_grad(to_none)
        for x, y in zip(inputs.chunk(2), classes.chunk(2), strict=True):
            loss = F.cross_entropy(other(x), y) / 2
            if late and x[0, 0] == inputs[0, 0]:
                other.zero_grad(to_none)
            loss.backward()
        again.step()
        again.zero_grad()
    assert_same_weights(other, model, 1e-6)


def test_gradients_of_a_graph_that_is_kept_count_as_often_as_they_are_in_grad() -> None:
    (model, optimizer), (other, again) = make(fisher=FixedTargets()), make(fisher=FixedTargets())
    train(model, optimizer, range(3), **BATCH)
    for step in range(3):
        inputs, classes = data_of(step, (64, 4))
        loss = F.cross_entropy(other(inputs), classes)
        loss.backward(retain_graph=True)
        other.zero_grad()
        for _ in range(2):
            (loss / 2).backward(retain_graph=True)
        again.step()
        again.zero_grad()
    assert_same_weights(other, model, 1e-6)


# A closure -----------------------------------------------------------------------------------------------------------


def test_a_closure_serves_losses_that_are_no_likelihood() -> None:
    model, optimizer = make(torch.float32)
    inputs, classes = learnable()
    gradients: list[list[Tensor]] = []

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(inputs), classes, label_smoothing=0.1) ** 2
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        return loss

    losses, calls = [], [0]
    for _ in range(6):
        losses.append(float(optimizer.step(closure).detach()))
        assert all(map(torch.equal, [p.grad for p in model.parameters()], gradients[calls[-1]]))
        calls.append(len(gradients))
    assert losses[-1] < losses[0] / 2
    extra = [after - before - 1 for before, after in zip(calls, calls[1:], strict=False)]
    assert extra[0] >= 3 and extra[1:] == [0, 0, 0, 0, 1]  # the search; a look back


def test_a_closure_is_repeated_with_the_same_random_numbers() -> None:
    model = noisy()
    optimizer = KFAC(model, fisher="categorical", **FLOAT64)
    inputs, classes = data_of(0, (64, 4))
    seen: list[tuple[Tensor, ...]] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        noise = torch.randn(64, 4)
        loss = F.cross_entropy(model(inputs + noise), classes)
        loss.backward()
        seen.append((noise, torch.get_rng_state(), *(b.clone() for b in model.buffers())))
        return loss

    optimizer.step(closure)
    assert len(seen) > 3
    assert all(torch.equal(noise, seen[0][0]) for noise, *_ in seen)
    assert all(map(torch.equal, (torch.get_rng_state(), *model.buffers()), seen[0][1:]))


def test_a_closure_of_the_likelihood_finds_the_same_steps() -> None:
    (model, optimizer), (other, again) = make(), make()
    for step in range(3):
        inputs, classes = data_of(step, (64, 4))

        def closure() -> Tensor:
            again.zero_grad()
            loss = F.cross_entropy(other(inputs), classes)  # noqa: B023
            loss.backward()
            return loss

        train(model, optimizer, [(inputs, classes)])
        again.step(closure)
        again.param_groups[0]["damping"] = optimizer.param_groups[0]["damping"]
        assert_same_weights(other, model, 1e-5)


# Refusals ------------------------------------------------------------------------------------------------------------


WRONG_LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "another distribution": (lambda z, t: (z - F.one_hot(t, 3)).square().sum() / len(t), {}),
    "sum instead of mean": (lambda z, t: F.cross_entropy(z, t, reduction="sum"), {}),
    "another mean": (F.cross_entropy, {"loss_average": 640}),
    "a loss scale": (lambda z, t: 1024 * F.cross_entropy(z, t), {}),
    "class weights": (
        lambda z, t: F.cross_entropy(z, t, torch.tensor([3.0, 1, 1]).to(z), reduction="sum") / len(t),
        {},
    ),
    "half the loss": (lambda z, t: 0.5 * F.mse_loss(z, z.detach() + 1), {"fisher": "bernoulli"}),
}


@pytest.mark.filterwarnings("ignore:fisher=")
@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_another_loss_is_noticed(case: str) -> None:
    loss, options = WRONG_LOSSES[case]
    model, optimizer = make(torch.float32, **options)
    before = values(model)
    with pytest.raises(RuntimeError, match="needs the loss to be the mean negative log likelihood"):
        train(model, optimizer, [0], loss=loss, **BATCH)
    assert all(map(torch.equal, values(model), before))


def test_gradients_that_are_not_those_of_the_outputs_are_noticed() -> None:
    model, optimizer = make()
    with pytest.raises(RuntimeError, match=r"clipped gradients.*step\(closure\)"):
        train(model, optimizer, [0], before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), **BATCH)
    model, optimizer = make()
    with pytest.raises(RuntimeError, match="penalties"):
        train(model, optimizer, [0], lambda: None, loss=penalised(model), **BATCH)


def penalised(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, t: F.cross_entropy(z, t) + sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize(
    ("loss", "options", "fits"),
    [
        (F.mse_loss, {"fisher": Gaussian(variance=0.5), "loss_average": "elements"}, True),
        (lambda z, t: (z - t).square().sum() / 2 / len(t), {"fisher": "gaussian"}, True),
        (F.mse_loss, {"fisher": Gaussian(variance=0.5)}, False),
        (F.mse_loss, {"fisher": "gaussian", "loss_average": "elements"}, False),
        (lambda z, t: (z - t).square().sum() / len(t), {"fisher": "gaussian"}, False),
    ],
)
def test_the_factor_of_a_squared_error_is_looked_at(loss: Any, options: dict[str, Any], fits: bool) -> None:
    model, optimizer = make(torch.float32, **options)
    inputs, _ = learnable()
    batch = inputs, inputs[:, :3].tanh() + 0.1 * torch.randn(64, 3, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, [batch] * 9, loss=loss)
    assert fits == (not [w for w in caught if "times the curvature that" in str(w.message)])


@pytest.mark.parametrize(
    ("fisher", "average", "fits"),
    [
        ("categorical", "batch+sequence", True),
        ("categorical", "batch", False),
        ("bernoulli", "elements", True),
        ("bernoulli", "batch", False),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mean_over_more_terms_than_said_is_noticed(fisher: str, average: Any, fits: bool, seed: int) -> None:
    """The default average is that of a classifier, and gradients that are too small are those of softer targets."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = KFAC(model, fisher=fisher, loss_average=average)
    inputs = torch.randn(64, 8, 6)
    scores = inputs @ torch.randn(6, 4)
    batch = (inputs, scores.argmax(-1)) if fisher == "categorical" else (inputs, (scores > 0).to(scores))

    def loss(z: Tensor, t: Tensor) -> Tensor:
        if fisher == "categorical":
            return F.cross_entropy(z.flatten(0, 1), t.flatten())
        return F.binary_cross_entropy_with_logits(z, t)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, [batch] * 9, loss=loss)
    assert fits == (not [w for w in caught if "loss_average: that of nn.CrossEntropyLoss" in str(w.message)])


@pytest.mark.parametrize("returns_all", [False, True])
def test_ignored_targets_are_noticed(returns_all: bool) -> None:
    """Outputs that the loss leaves out add to the curvature as well; a model may return only the others."""
    torch.manual_seed(0)
    inputs, counted = torch.randn(64, 8, 6), torch.rand(64, 8) < 0.25
    targets = (inputs @ torch.randn(6, 4)).argmax(-1).masked_fill(~counted, -100)

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if returns_all else x[counted])

    model = Net(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = KFAC(model, fisher="categorical", loss_average=int(counted.sum()))
    batch = inputs, targets.flatten() if returns_all else targets[counted]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, [batch] * 9, loss=lambda z, t: F.cross_entropy(z.flatten(0, -2), t))
    assert returns_all == bool([w for w in caught if "it ignores targets (let the model" in str(w.message)])


def test_outputs_without_a_target_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = KFAC(model, fisher="categorical", loss_average="batch+sequence")
    batch = torch.randn(16, 8, 6), torch.randint(4, (16, 7))
    with pytest.raises(RuntimeError, match="outputs without a target"):
        train(model, optimizer, [batch], loss=lambda z, t: F.cross_entropy(z[:, :-1].flatten(0, 1), t.flatten()))


@pytest.mark.parametrize("seed", range(3))
def test_a_warm_up_makes_no_loss_look_like_another(seed: int) -> None:
    model = make_model(seed).float()
    optimizer = KFAC(model, fisher="categorical")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    batches = [data_of(step, (256, 4), dtype=torch.float32)[0] for step in range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [(x, x[:, :3].argmax(1)) for x in batches], scheduler.step)


def test_a_closure_may_have_another_factor() -> None:
    """Losses that are no likelihood are what it is for: nobody is told that the curvature is another one."""
    model, optimizer = make(torch.float32, fisher="gaussian")
    inputs, _ = learnable()
    targets = inputs[:, :3].tanh() + 0.1 * torch.randn(64, 3, dtype=torch.float32)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 4 * F.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [float(optimizer.step(closure).detach()) for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("steps", "message"), [(0, "was called on its own"), (1, "seen no call of the model")])
def test_parts_of_a_model_are_no_calls_of_it(steps: int, message: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(steps), **BATCH)
    inputs, classes = data_of(1, (64, 4))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=message):
        F.cross_entropy(model[3](model[:3](inputs)), classes).backward()
        optimizer.step()


def test_what_hides_the_calls_of_a_model_is_named() -> None:
    model, optimizer = make()
    inputs, classes = data_of(1, (64, 4))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(inputs), classes), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with pytest.raises(RuntimeError, match=r"backward\(\) instead of torch.autograd.grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), classes).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="since the last step or zero_grad"):  # on the same gradients
        optimizer.step()
    optimizer.zero_grad()
    for layer in optimizer.curvature.layers:
        layer.weight.requires_grad_(False)
    F.cross_entropy(model(inputs), classes).backward()
    with pytest.raises(RuntimeError, match="do not freeze the weights of all its layers"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fisher": "empirical"}, ValueError, "fisher='empirical': must be the distribution"),
        ({"damping": 0.0}, ValueError, "damping=0.0: must be > 0"),
        ({"least_damping": -1.0}, ValueError, "least_damping=-1.0"),
        ({"damping": float("inf")}, ValueError, "damping=inf: must be > 0 and finite"),
        ({"model_fraction": 1.5}, ValueError, "model_fraction=1.5: must be > 0 and at most 1"),
        ({"lr": 0.1}, TypeError, "unexpected keyword argument 'lr': leave it out"),
        ({"solver": InverseSolver()}, TypeError, "unexpected keyword argument 'solver': leave it out"),
        ({"scaling": "unit"}, TypeError, "unexpected keyword argument 'scaling': leave it out"),
        ({"los_average": "batch"}, TypeError, "did you mean 'loss_average'"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_parameters_alone_and_half_precision_weights_are_refused() -> None:
    model = make_model()
    with pytest.raises(TypeError, match="must be an nn.Module"):
        KFAC(model.parameters(), fisher="categorical")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bfloat16: KFAC needs float32"):
        KFAC(model.bfloat16(), fisher="categorical")


def test_models_without_layers_and_sparse_gradients_are_refused() -> None:
    model = nn.PReLU()
    with pytest.warns(UserWarning, match="preconditions none"), pytest.raises(ValueError, match="KFAC preconditions"):
        KFAC(model, fisher="gaussian")
    assert not model._forward_hooks
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    optimizer = KFAC(model, fisher="categorical")
    F.cross_entropy(model(torch.tensor([1, 2])), torch.tensor([0, 1])).backward()
    with pytest.raises(TypeError, match="a gradient is sparse: .* sparse=False"):
        optimizer.step()


def test_compiled_models_are_refused() -> None:
    model, _ = make(torch.float32)
    with pytest.raises(RuntimeError, match="in the place of KFAC another optimizer.*don't compile the model"):
        torch.compile(model, backend="eager")(learnable()[0])
    torch._dynamo.reset()


def test_a_closed_curvature_ends_it() -> None:
    model, optimizer = make()
    optimizer.curvature.close()
    with pytest.raises(RuntimeError, match="is closed"):
        train(model, optimizer, [0], **BATCH)


@pytest.mark.parametrize(("name", "value", "own"), [("damping", 0.1, "optimizer.lambda_"), ("scaling", "unit", "None")])
def test_what_it_finds_by_itself_cannot_be_set(name: str, value: Any, own: str) -> None:
    model, optimizer = make()
    train(model, optimizer, range(2), **BATCH)
    setattr(optimizer.curvature, name, value)
    with pytest.raises(ValueError, match=f"curvature.{name} was set.*curvature.{name} = {own} again"):
        train(model, optimizer, [2], **BATCH)
    setattr(optimizer.curvature, name, optimizer.lambda_ if name == "damping" else None)
    train(model, optimizer, [2], **BATCH)
    assert optimizer.curvature.step_count == 3


# Precision -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_inputs", [torch.float32, torch.bfloat16])
def test_autocast_changes_little(of_inputs: torch.dtype) -> None:
    """Lightning's Fabric casts inputs, too. After more steps, what rounding has changed grows."""
    (model, optimizer), (half, other) = (make(torch.float32) for _ in range(2))
    inputs, classes = learnable()
    train(model, optimizer, [(inputs, classes)] * 4)
    train(half, other, [(inputs.to(of_inputs), classes)] * 4, autocast=torch.bfloat16)
    assert loss_now(half) == pytest.approx(loss_now(model), rel=0.1)


class Inside(nn.Module):
    """Turns autocast on itself and hands out float32, as Accelerate's mixed precision makes a model do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(x).float()


def test_autocast_inside_the_model_is_refused() -> None:
    """It can't be turned off where KFAC evaluates the model; the loss may look right all the same."""
    model = Inside(make_model().float())
    optimizer = KFAC(model, fisher="categorical")
    with pytest.raises(RuntimeError, match="computes in torch.bfloat16.*its own forward.*under torch.autocast"):
        train(model, optimizer, [learnable()])


def test_a_grad_scaler_that_is_given_changes_nothing() -> None:
    (model, optimizer), (scaled, other) = make(), make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    other.curvature.grad_scaler = scaler
    train(model, optimizer, range(4), **BATCH)
    train(scaled, other, range(4), scaler=scaler, **BATCH)
    assert_same_weights(scaled, model, 1e-6)


def test_a_batch_that_is_not_finite_is_skipped() -> None:
    model, optimizer = make()
    train(model, optimizer, range(2), **BATCH)
    before, group = values(model), dict(optimizer.param_groups[0])
    inputs, classes = data_of(2, (64, 4))
    train(model, optimizer, [(inputs.index_fill(0, torch.tensor([3]), torch.nan), classes)])
    assert all(map(torch.equal, values(model), before))
    assert optimizer.param_groups[0]["damping"] == group["damping"]
    train(model, optimizer, range(3, 5), **BATCH)
    assert_trained(model, before)


def test_steps_with_nothing_to_see_change_nothing() -> None:
    model, optimizer = make()
    before = values(model)
    optimizer.step()  # before any backward pass
    optimizer.zero_grad()
    F.cross_entropy(model(torch.zeros(0, 4)), torch.zeros(0, dtype=torch.long), reduction="sum").backward()
    optimizer.step()
    assert all(map(torch.equal, values(model), before))
    train(model, optimizer, range(3), **BATCH)
    assert_trained(model, before)


def test_a_closure_may_return_a_number_of_numpy_s() -> None:
    model, optimizer = make()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 3))
        if loss.requires_grad:
            loss.backward()
        return loss.detach().float().numpy()[()]  # float32, which is no float of Python's

    assert float(optimizer.step(closure)) > 0


def test_a_closure_has_to_return_the_loss() -> None:
    model, optimizer = make()
    with pytest.raises(TypeError, match="the closure returned None: it must return the loss"):
        optimizer.step(lambda: F.mse_loss(model(torch.zeros(2, 4)), torch.zeros(2, 3)).backward())


# State ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen", [0, 7])
def test_a_resumed_run_is_the_uninterrupted_one(seen: int) -> None:
    model, optimizer = make(torch.float32)
    train(model, optimizer, range(seen), **BATCH)
    resumed, again = resumed_from(model, optimizer, make(torch.float32))
    assert_go_on_alike(range(seen, 14), (model, optimizer), (resumed, again), **BATCH)
    assert {**again.param_groups[0], "params": 0} == {**optimizer.param_groups[0], "params": 0}


def test_a_copy_trains_on_its_own() -> None:
    model, optimizer = make()
    train(model, optimizer, range(3), **BATCH)
    twin, copied = copy.deepcopy((model, optimizer))
    assert_go_on_alike(range(3, 6), (model, optimizer), (twin, copied), **BATCH)
    assert copied.lambda_ is not optimizer.lambda_ and copied.curvature.damping is copied.lambda_


def test_averages_of_the_weights_are_torchs_own() -> None:
    model, optimizer = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    assert not average.module._forward_hooks and not average.module._forward_pre_hooks
    seen = []
    train(model, optimizer, range(3), lambda: (average.update_parameters(model), seen.append(values(model))), **BATCH)
    for i, p in enumerate(average.module.parameters()):
        assert_near(p.detach(), 0.25 * seen[0][i] + 0.25 * seen[1][i] + 0.5 * seen[2][i])
