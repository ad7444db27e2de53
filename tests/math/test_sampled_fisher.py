"""The sampled Fisher against its expectation, which the oracle adds up over all outcomes.

Every input stands in the batch ``COPIES`` times: each copy draws its own targets, so one step averages over many
samples while gradient and input factor stay those of the few distinct inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACSGD, Bernoulli, Categorical, Fisher, Gaussian
from tests.helpers.compare import assert_near, parameters, twins
from tests.helpers.reference import (
    Inputs,
    LossFunction,
    Named,
    Oracle,
    apply,
    averaged,
    backward,
    bernoulli_roots,
    categorical_roots,
    cross_entropy,
    expected_step,
    gaussian_roots,
    squared_error,
    take_step,
)
from tests.helpers.settings import EXACT

pytestmark = pytest.mark.usefixtures("float64")

COPIES = 4000
MONTE_CARLO_TOL = 0.05  # relative; 4000 copies of 4 inputs: a second moment of 16000 draws is off by about 1 %
POWER = 0.2  # the wrong Fisher must be off by more than this, or the test would show nothing

Roots = Callable[[Tensor], Iterator[Tensor]]


def perceptron() -> nn.Module:
    """Two Linear layers; outputs of some size, so that the distributions are far from uniform."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        model[2].weight.mul_(3)
    return model


def convolutional() -> nn.Module:
    """An image of logits, classes in dimension 1."""
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), nn.Conv2d(3, 3, 1))


def tokens() -> nn.Module:
    """A model of tokens ``[n, t]`` with logits ``[n, t, classes]``."""
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm."""
    return float((actual - expected).norm() / expected.norm())


def copied(x: Tensor, copies: int = COPIES) -> Tensor:
    """The batch, over and over."""
    return x.repeat(copies, *[1] * (x.dim() - 1))


def expected_directions(
    oracle: Oracle, x: Tensor, target: Tensor, loss: LossFunction, roots: Roots, size: float = 0.3
) -> tuple[dict[str, Tensor], float]:
    """Directions under the expected factors, and the damping; the empirical Fisher would give something else."""
    gradients = oracle.observe([((x,), target)], loss).gradients
    empirical = Oracle(oracle.model, average=oracle.average)
    empirical.refresh(empirical.observe([((x,), target)], loss))
    oracle.refresh(expected_step(oracle, (x,), roots))
    gamma = size * oracle.typical_eigenvalue()
    directions, others = oracle.directions(gradients, gamma), empirical.directions(gradients, gamma)
    assert max(relative_error(others[name], directions[name]) for name in directions) > POWER
    return directions, gamma


def assert_close_to(oracle: Oracle, changes: Named, directions: dict[str, Tensor]) -> None:
    """Every layer moved by minus its expected direction, up to Monte-Carlo noise."""
    for layer in oracle.layers:
        error = relative_error(layer.of(changes), -directions[layer.name])
        assert error < MONTE_CARLO_TOL, f"{layer.name}: {error}"


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str | Fisher, Roots, str]] = {
    "categorical": (perceptron, (4, 3), "categorical", categorical_roots, "batch"),
    "categorical over elements": (perceptron, (4, 3), "categorical", categorical_roots, "elements"),
    "bernoulli": (perceptron, (4, 3), "bernoulli", bernoulli_roots, "batch"),
    "bernoulli over elements": (perceptron, (4, 3), "bernoulli", bernoulli_roots, "elements"),
    "gaussian": (perceptron, (4, 3), "gaussian", gaussian_roots, "batch"),
    "gaussian over elements": (perceptron, (4, 3), "gaussian", gaussian_roots, "elements"),
    "categorical tokens": (tokens, (4, 3), "categorical", categorical_roots, "batch"),
    "categorical tokens, token mean": (tokens, (4, 3), "categorical", categorical_roots, "batch+sequence"),
    "gaussian images": (convolutional, (4, 2, 3, 3), "gaussian", gaussian_roots, "batch"),
    "bernoulli images": (convolutional, (4, 2, 3, 3), "bernoulli", bernoulli_roots, "elements"),
    "classes in dimension 1": (
        convolutional,
        (4, 2, 3, 3),
        Categorical(dim=1),
        partial(categorical_roots, dim=1),
        "batch",
    ),
    **{
        f"variance {v}": (perceptron, (4, 3), Gaussian(variance=v), partial(gaussian_roots, variance=v), "batch")
        for v in (0.25, 4.0)
    },
}


def inputs_for(factory: Callable[[], nn.Module], shape: tuple[int, ...]) -> Tensor:
    """Tokens for the model of tokens, else noise."""
    return torch.randint(5, shape) if factory is tokens else torch.randn(shape)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sampled_factors_converge_to_their_expectation(
    case: tuple[Callable[[], nn.Module], tuple[int, ...], str | Fisher, Roots, str], sharing: str
) -> None:
    factory, shape, fisher, roots, average = case
    if factory is tokens and sharing == "reduce":
        factory = partial(token_features)  # "reduce" has no diagonal form for an embedding
    model, twin = twins(factory)
    x = torch.randn(*shape, 4) if isinstance(factory, partial) else inputs_for(factory, shape)
    target = 3 * torch.randn_like(model(x)).detach()
    loss = averaged(squared_error, average)
    oracle = Oracle(twin, average=average, sharing=sharing)
    directions, gamma = expected_directions(oracle, x, target, loss, roots)
    keywords = {"damping": gamma, "fisher": fisher, "loss_average": average, "weight_sharing": sharing}
    changes = take_step(model, KFACSGD(model, **EXACT | keywords), [((copied(x),), copied(target))], loss)
    assert_close_to(oracle, changes, directions)


def token_features() -> nn.Module:
    """The model of tokens behind its embedding."""
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))


@pytest.mark.parametrize("parts", [1, 4])
def test_a_summed_loss_has_the_fisher_of_the_sum(parts: int) -> None:
    """M is 1 for a sum, in however many passes it is taken; gradient, factors and damping are COPIES times as large."""
    model, twin = twins(perceptron)
    x, target = torch.randn(4, 3), 3 * torch.randn(4, 3)
    oracle = Oracle(twin, average=None)
    directions, gamma = expected_directions(oracle, x, target, squared_error, categorical_roots)
    keywords = {"damping": COPIES * gamma, "fisher": "categorical", "loss_average": None}
    passes = [((copied(x, COPIES // parts),), copied(target, COPIES // parts))] * parts
    changes = take_step(model, KFACSGD(model, **EXACT | keywords), passes, squared_error)
    assert_close_to(oracle, changes, directions)


def test_many_statistics_steps_average_the_samples() -> None:
    """The running average does what many copies do: 400 steps of 10 copies with a decay close to 1, at ``lr=0``."""
    model, twin = twins(perceptron)
    x, target, loss = torch.randn(4, 3), 3 * torch.randn(4, 3), averaged(squared_error, "batch")
    oracle = Oracle(twin)
    directions, gamma = expected_directions(oracle, x, target, loss, categorical_roots)
    keywords = {"damping": gamma, "fisher": "categorical", "factor_decay": 0.9999, "lr": 0.0}
    optimizer = KFACSGD(model, **EXACT | keywords | {"inv_update_steps": 400})
    passes = [((copied(x, 10),), copied(target, 10))]
    for _ in range(400):
        take_step(model, optimizer, passes, loss)
    optimizer.param_groups[0]["lr"] = 1.0
    assert_close_to(oracle, take_step(model, optimizer, passes, loss), directions)


def test_micro_batches_of_a_divided_loss_sample_the_fisher_of_one_batch() -> None:
    model, twin = twins(perceptron)
    x, target, loss = torch.randn(4, 3), 3 * torch.randn(4, 3), averaged(squared_error, "batch")
    oracle = Oracle(twin)
    directions, gamma = expected_directions(oracle, x, target, loss, categorical_roots)
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma, "fisher": "categorical"})
    passes = [((copied(x, COPIES // 4),), copied(target, COPIES // 4))] * 4
    changes = take_step(model, optimizer, passes, lambda output, y: loss(output, y) / 4)
    assert_close_to(oracle, changes, directions)


class Wrapped(nn.Module):
    """A model whose logits stand in an object or a dictionary."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.body = way, perceptron()

    def forward(self, x: Tensor) -> object:
        """From ``[n, 3]`` to something that holds logits ``[n, 3]``."""
        logits = self.body(x)
        return SimpleNamespace(logits=logits) if self.way == "logits" else {"extra": x, "scores": logits}


@pytest.mark.parametrize("way", ["logits", "output_fn"])
def test_logits_inside_an_output(way: str) -> None:
    model, twin = Wrapped(way), perceptron()
    twin.load_state_dict(model.body.state_dict())
    x, target, loss = torch.randn(4, 3), 3 * torch.randn(4, 3), averaged(squared_error, "batch")

    def logits(output: object) -> Tensor:
        return output.logits if way == "logits" else output["scores"]

    oracle = Oracle(twin)
    directions, gamma = expected_directions(oracle, x, target, loss, categorical_roots)
    output_fn = logits if way == "output_fn" else None
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma, "fisher": Categorical(output_fn=output_fn)})
    passes = [((copied(x),), copied(target))]
    changes = take_step(model, optimizer, passes, lambda output, y: loss(logits(output), y))
    assert_close_to(oracle, {name.removeprefix("body."): c for name, c in changes.items()}, directions)


def test_deep_linear_network_samples_the_gauss_newton_matrix() -> None:
    """There the Kronecker product of expected factors is no approximation: compare with explicit Jacobians."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    twin = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    twin.load_state_dict(model.state_dict())
    x, target, loss = torch.randn(4, 3), 3 * torch.randn(4, 2), averaged(squared_error, "batch")
    oracle = Oracle(twin)
    step = oracle.observe([((x,), target)], loss)
    gamma = 0.1
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma, "fisher": "gaussian"})
    changes = take_step(model, optimizer, [((copied(x),), copied(target))], loss)
    for layer in oracle.layers:
        rows = []
        for value in twin(x).flatten():
            names, params = zip(*twin.named_parameters(), strict=False)
            derivative = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
            rows.append(layer.of(dict(zip(names, derivative, strict=False))).flatten())
        jacobian = torch.stack(rows)
        damped = jacobian.T @ jacobian / len(x) + gamma * torch.eye(jacobian.shape[1])
        v = layer.of(step.gradients)
        wanted = torch.linalg.solve(damped, v.flatten()).reshape(v.shape)
        assert relative_error(layer.of(changes), -wanted) < MONTE_CARLO_TOL


# ---------------------------------------------------------------------------------------------------------------------
# What sampling must not disturb
# ---------------------------------------------------------------------------------------------------------------------

KINDS = ["categorical", "bernoulli", "gaussian"]


def small_passes(n: int = 5) -> list[tuple[Inputs, Tensor]]:
    """A small batch for the perceptron."""
    return [((torch.randn(n, 3),), torch.randn(n, 3))]


def run(model: nn.Module, passes: list[list[tuple[Inputs, Tensor]]], **keywords: object) -> Named:
    """Several steps: the final parameters."""
    optimizer = KFACSGD(model, **EXACT | {"damping": 0.1, "lr": 0.05} | keywords)
    for batch in passes:
        take_step(model, optimizer, batch, averaged(cross_entropy, "batch"))
    return parameters(model)


def same_start(factory: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """Equal models."""
    models = [factory() for _ in range(count)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    return models


@pytest.mark.parametrize("fisher", ["empirical", *KINDS])
def test_the_users_gradient_is_untouched(fisher: str) -> None:
    model, plain = same_start(perceptron, 2)
    optimizer = KFACSGD(model, **EXACT | {"damping": 0.1, "fisher": fisher})
    passes, loss = small_passes() + small_passes(), averaged(cross_entropy, "batch")
    for _ in range(2):
        plain.load_state_dict(model.state_dict())
        backward(model, passes, loss)
        backward(plain, passes, loss)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=False):
            assert torch.equal(ours.grad, theirs.grad)
        apply(model, optimizer)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=False):
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fisher", KINDS)
def test_a_batch_whose_output_is_not_finite_is_left_out(fisher: str, bad: float) -> None:
    """Nothing can be drawn from NaNs, and a user who skips such a batch, as GradScaler does, must get to do so."""
    model, twin = same_start(perceptron, 2)
    first, second = (KFACSGD(m, **EXACT | {"damping": 0.1, "fisher": fisher}) for m in (model, twin))
    passes, loss = small_passes(), averaged(cross_entropy, "batch")
    (x,), y = passes[0]
    for optimizer in (first, second):
        optimizer.curvature.stages.capture._sampling._samples = int(optimizer is second)  # the bad batch draws, too
    loss(model(torch.full_like(x, bad)), y).backward()
    model.zero_grad()
    for m, optimizer in ((model, first), (twin, second)):
        loss(m(x), y).backward()
        optimizer.step()
    assert first.curvature.report()["skipped_batches"] == 0  # its gradient was cleared: it is no part of the step
    for layer, other in zip(first.curvature.layers, second.curvature.layers, strict=True):
        for found, wanted in zip(first.curvature.factors(layer), second.curvature.factors(other), strict=True):
            torch.testing.assert_close(found, wanted)


OBJECTS: dict[str, type[Fisher]] = {"categorical": Categorical, "bernoulli": Bernoulli, "gaussian": Gaussian}


@pytest.mark.parametrize("fisher", KINDS)
def test_seeds_reproduce(fisher: str) -> None:
    """The seed is a field of the distribution; a short name has seed 0."""
    first, again, other, default = same_start(perceptron, 4)
    passes = [small_passes() for _ in range(3)]
    results = []
    kinds = [OBJECTS[fisher](seed=7), OBJECTS[fisher](seed=7), OBJECTS[fisher](seed=8), fisher]
    for model, kind in zip((first, again, other, default), kinds, strict=True):
        torch.manual_seed(len(results))  # the global generator has no say
        results.append(run(model, passes, fisher=kind))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value)
        assert not torch.equal(results[2][name], value)
        assert not torch.equal(results[3][name], value)


class Laplace(Fisher):
    """A distribution of the user's, with an attribute of its own."""

    def __init__(self, scale: float) -> None:
        super().__init__(seed=3, output_fn=lambda output: output["scores"])
        self.scale = scale

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        signs = 2 * torch.bernoulli(torch.full_like(output, 0.5), generator=generator) - 1
        return signs / self.scale


def test_a_distribution_of_the_users_finds_its_output_in_the_models() -> None:
    torch.manual_seed(0)
    model = Wrapped("dict")
    optimizer = KFACSGD(model, **EXACT | {"damping": 0.1, "fisher": Laplace(0.5)})
    model(torch.randn(6, 3))["scores"].square().mean().backward()
    optimizer.step()
    last = optimizer.curvature.layers[-1]
    squares = optimizer.curvature.factors(last)[1][0].diagonal()
    assert torch.equal(squares, torch.full((3,), 4.0)), "(1 / 0.5)^2, whatever the signs"


class OfWrongShape(Laplace):
    """A distribution whose gradient has the shape of a single example."""

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        return super().sample_gradient(output, generator).sum(0)


def test_a_sampled_gradient_of_another_shape_is_refused() -> None:
    model = Wrapped("dict")
    optimizer = KFACSGD(model, **EXACT | {"fisher": OfWrongShape(0.5)})
    with pytest.raises(ValueError, match=r"OfWrongShape.sample_gradient.*returned.*\[3\].*output's shape, \[6, 3\]"):
        model(torch.randn(6, 3))["scores"].square().mean().backward()
    optimizer.zero_grad()


def test_fields_of_the_distributions() -> None:
    assert (Categorical(1).dim, Gaussian(0.5).variance) == (1, 0.5)
    for fisher in (Categorical(1), Bernoulli(), Gaussian(0.5)):
        assert (fisher.output_fn, fisher.seed) == (None, 0)
    assert Categorical(seed=2) == Categorical(-1, seed=2) != Categorical()
    with pytest.raises(TypeError, match="positional"):
        Bernoulli(lambda output: output)  # type: ignore[misc]
    with pytest.raises(TypeError, match="output_fn='logits'.*callable"):
        Gaussian(output_fn="logits")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed=0.5: must be an int"):
        Gaussian(seed=0.5)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        Gaussian().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("fisher", KINDS)
def test_the_global_generator_is_not_touched(fisher: str) -> None:
    (model,) = same_start(perceptron, 1)
    passes = [small_passes() for _ in range(2)]
    before = torch.get_rng_state()
    run(model, passes, fisher=fisher)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_step_draws_new_targets() -> None:
    """With no weight of the past, equal data and frozen weights, only the samples differ between steps."""
    (model,) = same_start(perceptron, 1)
    optimizer = KFACSGD(model, **EXACT | {"damping": 0.1, "fisher": "categorical", "factor_decay": 0.0})
    passes, start = small_passes(), {name: value.clone() for name, value in model.state_dict().items()}
    changes = []
    for _ in range(2):
        model.load_state_dict(start)
        changes.append(take_step(model, optimizer, passes, averaged(cross_entropy, "batch")))
    assert not torch.allclose(changes[0]["0.weight"], changes[1]["0.weight"])


def test_forwards_without_backward_leave_no_trace() -> None:
    model, twin = same_start(perceptron, 2)
    x, target, loss = torch.randn(4, 3), 3 * torch.randn(4, 3), averaged(squared_error, "batch")
    oracle = Oracle(twin)
    directions, gamma = expected_directions(oracle, x, target, loss, categorical_roots)
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma, "fisher": "categorical"})
    for size in (0.0, 10.0):
        model(size * torch.ones(COPIES, 3))  # in training mode, gradients enabled, but never followed by a backward
    with torch.no_grad():
        model(10 * torch.ones(COPIES, 3))
    backward(model, [((copied(x),), copied(target))], loss)
    model(10 * torch.ones(COPIES, 3))
    assert_close_to(oracle, apply(model, optimizer), directions)


class WithBranch(nn.Module):
    """The perceptron, and a branch whose output it does not return; that of the last call is kept for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = perceptron(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, 3]`` to logits ``[n, 3]``."""
        self.aside = self.branch(x)
        return self.body(x)


@pytest.mark.parametrize("fisher", KINDS)
def test_layers_that_the_output_does_not_depend_on_get_no_samples(fisher: str) -> None:
    """The others go on as without them, bit for bit; these train by the base class, on the user's own gradient."""
    model, plain = WithBranch(), perceptron()
    plain.load_state_dict(model.body.state_dict())
    start = parameters(model.branch)
    first, second = (KFACSGD(m, **EXACT | {"damping": 0.1, "lr": 0.05, "fisher": fisher}) for m in (model, plain))
    loss, gradients = averaged(cross_entropy, "batch"), {name: torch.zeros_like(p) for name, p in start.items()}
    for _ in range(3):
        ((x,), y) = small_passes()[0]
        backward(model, [((x,), y)], lambda output, y: loss(output, y) + model.aside.square().mean())
        backward(plain, [((x,), y)], loss)
        for name, p in model.branch.named_parameters():
            gradients[name] += p.grad
        first.step()
        second.step()
    for ours, theirs in zip(model.body.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for name, p in model.branch.named_parameters():
        assert_near(p.detach(), start[name] - 0.05 * gradients[name], name, rel=1e-12)


class Counted(torch.autograd.Function):
    """The identity; its backward counts."""

    calls = 0

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        """Pass on."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        """Count, and pass on."""
        Counted.calls += 1
        return g


class CountingModel(nn.Module):
    """A network that counts the backward passes through its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, 3]`` to ``[n, 3]``."""
        return self.last(Counted.apply(self.first(x)))


def test_targets_are_sampled_on_statistics_steps_only() -> None:
    model = CountingModel()
    optimizer = KFACSGD(model, **EXACT | {"damping": 0.1, "fisher": "categorical", "factor_update_steps": 3})
    counts = []
    for _ in range(6):
        Counted.calls = 0
        take_step(model, optimizer, small_passes(), averaged(cross_entropy, "batch"))
        counts.append(Counted.calls)
    assert counts == [2, 1, 1, 2, 1, 1]


def test_masked_classes_are_never_drawn() -> None:
    """Logits of minus infinity, as masks of actions or vocabularies have them; a row of nothing else is left out."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.net(x).masked_fill(torch.tensor([False, False, False, True]), -torch.inf)
            return torch.where(x[:, :1] > 1e6, -torch.inf, logits)

    model = Masked()
    optimizer = KFACSGD(model, lr=0.0, fisher="categorical", factor_update_steps=1, inv_update_steps=1)
    x, y = torch.randn(4, 3).repeat(COPIES, 1), torch.randint(3, (4 * COPIES,))
    averaged_loss = nn.CrossEntropyLoss()
    averaged_loss(model(x), y).backward()
    optimizer.step()
    chances = model(x[:4]).softmax(-1).detach()
    expected = torch.stack([p.diag() - p.outer(p) for p in chances]).mean(0)
    assert_near(optimizer.curvature.factors("net")[1][0], expected, rel=MONTE_CARLO_TOL)
    optimizer.zero_grad()
    x[0] = 2e6
    model(x).softmax(-1).nan_to_num().square().sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.nan_to_num_()
    optimizer.step()
    assert optimizer.curvature.stages.averaging.skipped_batches == 1
