"""The quadratic model behind ``KFAC``: its coefficients, its minimum, the identity that gives the loss, the damping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from kfac_optim import KFAC, Bernoulli, Categorical, Fisher, Gaussian
from kfac_optim.capture import replay as replay_module
from kfac_optim.selftuning import objective as objective_module
from kfac_optim.selftuning.objective import Objective
from kfac_optim.selftuning.quadratic import LevenbergMarquardt, QuadraticModel, SecantCheck
from tests.helpers.compare import assert_near

pytestmark = pytest.mark.usefixtures("float64")

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(z: Tensor, t: Tensor) -> Tensor:
    """Summed, with soft targets, over the last dimension."""
    return -(t * z.log_softmax(-1)).sum()


def image_cross_entropy(z: Tensor, t: Tensor) -> Tensor:
    """The same over dimension 1."""
    return -(t * z.log_softmax(1)).sum()


def binary(z: Tensor, t: Tensor) -> Tensor:
    """Summed, with soft targets."""
    return F.binary_cross_entropy_with_logits(z, t, reduction="sum")


def squares(z: Tensor, t: Tensor) -> Tensor:
    """``nn.MSELoss``, but for the mean."""
    return (z - t).square().sum()


KINDS: dict[str, tuple[Fisher, Loss, Callable[[Tensor], Tensor]]] = {
    "categorical": (Categorical(), cross_entropy, lambda t: t.softmax(-1)),
    "categorical images": (Categorical(dim=1), image_cross_entropy, lambda t: t.softmax(1)),
    "bernoulli": (Bernoulli(), binary, torch.sigmoid),
    "gaussian": (Gaussian(variance=0.5), squares, lambda t: t),
}


# The output distributions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**31), size=st.floats(1e-3, 30.0))
def test_the_loss_follows_from_the_outputs_alone(kind: str, seed: int, size: float) -> None:
    fisher, loss, squash = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    z, other, t = (torch.randn(5, 4, 3, generator=generator) for _ in range(3))
    z, target = (size * z).requires_grad_(), squash(t)
    value = loss(z, target)
    (gradient,) = torch.autograd.grad(value, z)
    with torch.no_grad():
        change = fisher.divergence(z, other) + (gradient * (other - z)).sum()
        assert torch.allclose(change, loss(other, target) - value, rtol=1e-9, atol=1e-9 * float(value + 1))
        assert not fisher.target_problem(z, gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fisher_of_the_output_is_the_hessian_of_its_loss(kind: str) -> None:
    fisher, loss, squash = KINDS[kind]
    z, u, v = torch.randn(3, 2, 4, 3)
    target = squash(torch.randn(2, 4, 3))
    hessian = torch.autograd.functional.hessian(lambda x: loss(x, target), z).reshape(z.numel(), z.numel())
    assert_near((fisher.root(z, u) * fisher.root(z, v)).sum(), u.flatten() @ hessian @ v.flatten())


@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
def test_gradients_of_no_likelihood_are_told_apart(kind: str) -> None:
    fisher, loss, squash = KINDS[kind]
    z = torch.randn(5, 4, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(z, squash(torch.randn(5, 4, 3)).round()), z)
    assert not fisher.target_problem(z, gradient)
    assert fisher.target_problem(z, 5 * gradient)
    assert fisher.target_problem(z, gradient + 0.1)
    assert fisher.target_problem(z, gradient - 1)  # targets of more than 1, though none is negative


def test_a_distribution_without_products_says_so() -> None:
    class Noise(Fisher):
        def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
            return torch.randn(output.shape, generator=generator)

    with pytest.raises(TypeError, match=r"fisher=Noise: .*lacks root\(\) and divergence\(\)"):
        KFAC(nn.Linear(2, 1), fisher=Noise())
    one = torch.ones(1)
    for name in ("root", "divergence"):
        with pytest.raises(NotImplementedError, match=rf"Noise\.{name}\(\): define it .* KFAC"):
            getattr(Noise(), name)(one, one)


# The coefficients ----------------------------------------------------------------------------------------------------


def perceptron(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, outputs))


def images(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, outputs, 1))


CASES: dict[str, tuple[str, Callable[[int], nn.Module], tuple[int, ...], str]] = {
    "categorical": ("categorical", perceptron, (6, 3), "batch"),
    "categorical images": ("categorical images", images, (4, 2, 3, 3), "batch"),
    "bernoulli": ("bernoulli", perceptron, (6, 3), "batch"),
    "bernoulli over elements": ("bernoulli", images, (4, 2, 3, 3), "elements"),
    "gaussian over elements": ("gaussian", perceptron, (6, 3), "elements"),
}


def dense_fisher(model: nn.Module, x: Tensor, fisher: Fisher) -> Tensor:
    """``J' H J`` summed over all loss terms, over all parameters in their order, ``[P, P]``."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    z = functional_call(model, {**parameters, **buffers}, (x,))
    jacobians = jacrev(lambda ps: functional_call(model, {**ps, **buffers}, (x,)))(parameters)
    jacobian = torch.cat([jacobians[name].reshape(z.numel(), -1) for name in parameters], 1)
    unit = torch.eye(z.numel()).reshape(-1, *z.shape)
    roots = torch.stack([fisher.root(z, u).flatten() for u in unit])
    hessian = roots @ roots.T
    return jacobian.T @ hessian @ jacobian


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_coefficients_are_those_of_the_dense_fisher(case: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective_module, "_FIRST_STEP", 1e-7)
    monkeypatch.setattr(objective_module, "_STEP", 1e-7)
    monkeypatch.setattr(objective_module, "_SMALLEST_STEP", 0.0)
    kind, build, shape, average = CASES[case]
    fisher, loss, squash = KINDS[kind]
    model, x = build(2), torch.randn(shape)
    target = squash(torch.randn_like(model(x)))
    model.eval()
    m = x.shape[0] if average == "batch" else target.numel()
    optimizer = KFAC(model, fisher=fisher, loss_average=average)
    value = 0.0
    for inputs, targets in zip(x.chunk(parts), target.chunk(parts), strict=True):
        part = loss(model(inputs), targets) / m
        part.backward()
        value += float(part.detach())
    seen, terms = optimizer._replay.take(0.25, 1.0)
    assert terms == m
    parameters = list(model.parameters())
    vs = [[torch.randn_like(p) for p in parameters] for _ in range(3)]
    before = flat(parameters)
    objective = Objective({p: p.grad for p in parameters}, seen, terms, fisher, optimizer.curvature.stages.comm)
    found = objective.model(vs[:2], vs[2])
    dense = dense_fisher(model, x, fisher) / m
    rows = torch.stack([flat(v) for v in vs])
    assert_near(found.slopes, rows @ flat(p.grad for p in parameters))
    assert_near(found.products, rows @ rows.T)
    assert torch.allclose(found.curvatures, rows @ dense @ rows.T, rtol=1e-5)
    assert torch.equal(flat(parameters), before)

    c = torch.tensor([0.3, -0.2, 0.1])
    objective.place(c)
    with torch.no_grad():
        actual = float(loss(model(x), target) / m) - value
    assert objective.change(c) == pytest.approx(actual, rel=1e-5)
    assert torch.allclose(flat(parameters), before + c @ rows)
    objective.put_back()
    assert torch.equal(flat(parameters), before)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian"])
def test_a_part_of_the_examples_stands_for_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_LEAST", 1)
    fisher, loss, squash = KINDS[kind]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, t = torch.randn(5, 3).repeat_interleave(4, 0), squash(torch.randn(5, 2)).repeat_interleave(4, 0)
    optimizer = KFAC(model, fisher=fisher)
    parameters = list(model.parameters())
    vs = [[torch.randn_like(p) for p in parameters] for _ in range(2)]
    found = []
    for fraction in (1.0, 0.25):
        optimizer.zero_grad()
        (loss(model(x), t) / len(x)).backward()
        parts, terms = optimizer._replay.take(fraction, 1.0)
        assert len(parts[0].output) == fraction * len(x)
        objective = Objective({p: p.grad for p in parameters}, parts, terms, fisher, optimizer.curvature.stages.comm)
        curvatures = objective.model(vs, None).curvatures
        objective.place(c := torch.tensor([0.1, 0.2]))
        found.append((curvatures, objective.change(c)))
        objective.put_back()
    assert_near(found[1][0], found[0][0])
    assert found[1][1] == pytest.approx(found[0][1])


# The minimum and the damping -----------------------------------------------------------------------------------------


def test_the_minimum_is_that_of_the_damped_quadratic() -> None:
    root, vs = torch.randn(2, 5, 3)
    model = QuadraticModel(torch.randn(3), root.T @ root, vs.T @ vs)
    c = model.minimum(0.3)
    assert_near((model.curvatures + 0.3 * model.products) @ c, -model.slopes)
    assert model.change(c, 0.3) == pytest.approx(float(model.slopes @ c) / 2)
    for offset in torch.eye(3):
        assert model.change(c + 1e-3 * offset, 0.3) > model.change(c, 0.3)


@pytest.mark.parametrize("second", [[0.0, 0.0], [2.0, 4.0]])
def test_directions_that_add_nothing_do_no_harm(second: list[float]) -> None:
    vs, matrix, gradient = torch.tensor([[1.0, 2.0], second]), torch.diag(torch.tensor([1.0, 3.0])), torch.ones(2)
    model = QuadraticModel(vs @ gradient, vs @ matrix @ vs.T, vs @ vs.T)
    alone = QuadraticModel(vs[:1] @ gradient, vs[:1] @ matrix @ vs[:1].T, vs[:1] @ vs[:1].T)
    both, one = model.minimum(0.1), alone.minimum(0.1)
    assert_near(both @ vs, one @ vs[:1])
    assert model.change(both, 0.1) == pytest.approx(alone.change(one, 0.1))


@pytest.mark.parametrize(
    ("actual", "factor"),
    [
        (-2.0, 0.95),
        (-0.8, 0.95),
        (-0.5, 1.0),
        (-0.2, 1 / 0.95),
        (0.1, 2.0),
        (float("nan"), 2.0),
        (float("inf"), 2.0),
    ],
)
def test_damping_follows_the_reduction_ratio(actual: float, factor: float) -> None:
    damping = LevenbergMarquardt(1e-5)
    damping.set(0.5)
    damping.learn(actual, predicted=-1.0)
    assert damping.value == pytest.approx(0.5 * factor)
    assert damping(7) == damping.value


def test_damping_has_a_floor_and_learns_nothing_from_nothing() -> None:
    damping = LevenbergMarquardt(1e-5)
    damping.set(1.01e-5)
    damping.learn(-1.0, -1.0, steps=5)
    assert damping.value == 1e-5
    damping.learn(0.0, 0.0)
    assert damping.value == 1e-5


@pytest.mark.parametrize(("actual", "factor"), [(-2.0, 0.95**5), (-0.2, 0.95**-5), (0.1, 2.0)])
def test_damping_of_a_step_that_stands_for_five(actual: float, factor: float) -> None:
    damping = LevenbergMarquardt(1e-5)
    damping.set(0.5)
    damping.learn(actual, predicted=-1.0, steps=5)
    assert damping.value == pytest.approx(0.5 * factor)


def test_an_unusual_curvature_is_told_once_after_some_steps() -> None:
    """Slopes of -1 before and 1 after a step, whose curvature the model said was 1."""
    check, found = SecantCheck(), []
    for _ in range(2 * SecantCheck.steps):
        check.expect(-1.0, 1.0)
        found.append(check.observe(1.0))
    assert [(i, ratio) for i, ratio in enumerate(found, 1) if ratio is not None] == [(SecantCheck.steps, 2.0)]
