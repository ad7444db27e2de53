"""Solvers and scalings in detail: explicit inverses, limits of the damping, zero gradients and factors, pi, kl_clip."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import KFACSGD, EigenSolver, InverseSolver, KLClip, OfLargest, OfMean
from kfac_optim.common import machines
from kfac_optim.solvers import Decomposition
from kfac_optim.solvers.decompose import _jittered
from tests.helpers.compare import assert_applied, assert_near
from tests.helpers.reference import (
    SOLVES,
    Inputs,
    Named,
    Oracle,
    apply,
    averaged,
    backward,
    log_cosh,
    squared_error,
    take_step,
)
from tests.helpers.settings import EXACT, SOLVERS, damping_of
from tests.helpers.solvers import UndampedSolver
from tests.helpers.textbook import grafted, kl_clip_factor, unit_norm, unit_scaled

pytestmark = pytest.mark.usefixtures("float64")

LIMIT_TOL = 1e-5  # the first neglected term is curvature / sqrt(damping), and the curvature is at most of order 100
SCALINGS: list[str | None] = [None, "kl_clip", "unit", "graft"]

Passes = list[tuple[Inputs, Tensor]]
mean_loss = averaged(squared_error, "batch")
seeds = st.integers(0, 9999)


class Mixed(nn.Module):
    """Every kind of block: embedding, convolution (grouped), norm, Linear."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 6, 2, groups=groups)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """From ``[n, t]`` to ``[n, 2]``."""
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x.tanh()).mean(1))


def linear_model(d_in: int = 3, hidden: int = 4, d_out: int = 2, bias: bool = True) -> nn.Module:
    """Two Linear layers."""
    return nn.Sequential(nn.Linear(d_in, hidden, bias), nn.Tanh(), nn.Linear(hidden, d_out, bias))


def twins(factory: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal models, away from their initial values."""
    model, twin = factory(), factory()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    twin.load_state_dict(model.state_dict())
    return model, twin


def token_passes(n: int = 4) -> Passes:
    """Data for ``Mixed``."""
    return [((torch.randint(5, (n, 3)),), torch.randn(n, 2))]


def linear_passes(n: int = 5, d_in: int = 3, d_out: int = 2) -> Passes:
    """Data for ``linear_model``."""
    return [((torch.randn(n, d_in),), 3 * torch.randn(n, d_out))]


def set_gradients(model: nn.Module, values: Named) -> None:
    """Replace what stands in ``.grad``."""
    for name, p in model.named_parameters():
        p.grad = values[name].clone()


# ---------------------------------------------------------------------------------------------------------------------
# Solvers
# ---------------------------------------------------------------------------------------------------------------------


@given(
    solver=st.sampled_from(sorted(SOLVERS)),
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    n=st.integers(1, 8),
    damping=st.sampled_from([1e-4, 1e-2, 1.0, 100.0]),
    relative=st.booleans(),
    seed=seeds,
)
def test_solvers_against_explicit_inverses(
    solver: str, shape: tuple[int, int], n: int, damping: float, relative: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    d_in, d_out = shape
    model, twin = twins(lambda: nn.Sequential(nn.Linear(d_in, d_out)))
    passes, oracle = linear_passes(n, d_in, d_out), Oracle(twin)
    oracle.refresh(oracle.observe(passes, mean_loss))
    optimizer = KFACSGD(model, **EXACT | {"damping": damping_of(damping, relative), "solver": SOLVERS[solver]})
    backward(model, passes, mean_loss)
    chosen = {name: torch.randn_like(p) for name, p in model.named_parameters()}  # any gradient, in range or not
    set_gradients(model, chosen)
    directions = oracle.directions(chosen, damping, relative, solver)
    assert_applied(oracle, apply(model, optimizer), directions, chosen)


def test_pi_splits_the_damping_by_the_mean_eigenvalues() -> None:
    """By hand: ``A = 4 I``, ``G = I / 9`` give ``pi^2 = 36``, so A gets ``6 sqrt(gamma)`` and G ``sqrt(gamma) / 6``."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    x = math.sqrt(8) * torch.eye(2).repeat(3, 1)
    g = torch.eye(3).repeat_interleave(2, dim=0) / math.sqrt(108)
    assert_near(x.T @ x / 6, 4 * torch.eye(2))
    assert_near(6 * g.T @ g, torch.eye(3) / 9)
    gamma = 0.25
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma, "solver": InverseSolver(pi=True)})
    model.zero_grad()
    (model(x) * g).sum().backward()
    v = model[0].weight.grad.clone()
    change = apply(model, optimizer)["0.weight"]
    assert_near(change, -v / ((1 / 9 + 0.5 / 6) * (4 + 6 * 0.5)), scale=10)


def test_damping_beyond_all_curvature_gives_the_gradient() -> None:
    """``damping * direction -> gradient``, for every solver and every kind of block."""
    damping = 1e16
    for name, solver in SOLVERS.items():
        model, _ = twins(Mixed)
        optimizer = KFACSGD(model, **EXACT | {"damping": damping, "solver": solver})
        backward(model, token_passes(), mean_loss)
        gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
        for p in model.parameters():
            p.data.zero_()  # tiny changes of weights of size one would drown in rounding
        factor = damping**2 if name == "inverse without pi" else damping  # gamma in each of the two factors there
        for key, change in apply(model, optimizer).items():
            own_factor = damping if key.startswith("norm") else factor
            assert_near(own_factor * change, -gradients[key], f"{name} {key}", LIMIT_TOL)


@given(solver=st.sampled_from(["eigen", "inverse"]), damping=st.sampled_from([1e-6, 1e-3, 1.0]), seed=seeds)
def test_the_direction_is_a_descent_direction_shorter_than_gradient_over_damping(
    solver: str, damping: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model, _ = twins(Mixed)
    optimizer = KFACSGD(model, **EXACT | {"damping": damping, "solver": SOLVERS[solver]})
    backward(model, token_passes(), mean_loss)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    changes = apply(model, optimizer)
    for layer in ("embed", "conv", "norm", "head"):
        names = [name for name in changes if name.startswith(layer)]
        slope = sum(float((changes[name] * gradients[name]).sum()) for name in names)
        length = math.sqrt(sum(float(changes[name].square().sum()) for name in names))
        bound = math.sqrt(sum(float(gradients[name].square().sum()) for name in names)) / damping
        assert slope < 0
        assert length <= bound * (1 + 1e-8) + 1e-12


@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize("unit", [OfMean, OfLargest])
def test_a_solver_of_ones_own_may_damp_late(unit: Callable[..., Any], spread: int) -> None:
    """Damping that changes between refreshes is that of the step; nothing is asked that the solver need not have."""
    models, passes = twins(Mixed), [token_passes() for _ in range(6)]
    for model, solver in zip(models, (UndampedSolver(), EigenSolver(negligible=0.0)), strict=True):
        late = {"solver": solver, "damping": unit(lambda step: 0.5**step), "inv_update_steps": 4, "spread": spread}
        optimizer = KFACSGD(model, **EXACT | late | {"lr": 0.01})
        for of_step in passes:
            take_step(model, optimizer, of_step, mean_loss)
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert_near(p.detach(), q.detach())


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "narrow": (lambda v: v[..., :1], r"float64 tensor of the shape \(1, 2, 1\)"),  # it would be broadcast
    "half": (lambda v: v.to(torch.bfloat16), r"bfloat16 tensor of the shape \(1, 2, 4\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("block", [None, 2], ids=["whole", "in blocks"])
def test_what_a_solver_returns_has_to_be_like_the_gradient(block: int | None, wrong: str) -> None:
    solver, (change, found) = UndampedSolver(), WRONG[wrong]
    if block is not None:  # the two tiles of 2 x 2 count as pairs
        found = found.replace("(1,", "(2,").replace(", 4", ", 2")
    right = solver.precondition
    solver.precondition = lambda *given: change(right(*given))  # type: ignore[method-assign]
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = KFACSGD(model, **EXACT | {"solver": solver, "max_factor_dim": block})
    backward(model, [((torch.randn(4, 3),), torch.randn(4, 2))], mean_loss)
    with pytest.raises(ValueError, match=rf"solver=.*UndampedSolver.*: precondition\(\) has returned a torch.{found}"):
        optimizer.step()


class Doubled(EigenSolver):
    """Its directions are twice as long."""

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        return 2 * super().precondition(gradient, a, g, gamma)


@pytest.mark.parametrize("kind", ["cpu", "accelerator"])
def test_what_a_subclass_adds_to_the_eigen_solver_is_done_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to an embedding, whose vectors are kept as transposes, and where stacks are preconditioned together."""
    monkeypatch.setattr(machines, "machine_of", lambda _: kind)
    models, of_step = twins(Mixed), token_passes()
    plain = EXACT | {"lr": 0.01, "precondition": "gradient", "scaling": None, "damping": 0.1}
    starts = [p.detach().clone() for p in models[0].parameters()]
    for model, solver in zip(models, (EigenSolver(), Doubled()), strict=True):
        take_step(model, KFACSGD(model, **plain | {"solver": solver}), of_step, mean_loss)
    for start, p, q in zip(starts, *(model.parameters() for model in models), strict=True):
        assert_near(q.detach() - start, 2 * (p.detach() - start))


def test_factors_of_several_sizes_are_decomposed_by_one_call() -> None:
    """As on GPUs. An optimizer would not show a wrong result: it is noticed there, and each factor decomposed alone."""
    factors = [torch.randn(pairs, n, 3 * n) for pairs, n in ((2, 4), (1, 6), (3, 5), (1, 6))]
    factors = [a @ a.mT for a in (*factors, torch.randn(2, 5, 2))] + [torch.zeros(1, 4, 4)]
    for factor, (values, vectors) in zip(factors, EigenSolver().decompose_padded(factors), strict=True):
        torch.testing.assert_close(vectors * values.unsqueeze(1) @ vectors.mT, factor)
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(factor.shape[-1]).expand_as(factor))


@pytest.mark.parametrize("kept", [5, 3])
def test_eigenvectors_that_are_not_orthonormal_are_noticed(kept: int) -> None:
    """Also where a subclass has left some out."""
    rows = torch.randn(2, 5, 8)
    values, vectors = EigenSolver().decompose(rows @ rows.mT, torch.zeros(()))
    values, vectors = values[:, -kept:], vectors[..., -kept:].clone()
    assert EigenSolver().is_valid((values, vectors))
    for wrong in (vectors[1, :, 1].clone(), torch.zeros(5)):
        vectors[1, :, 0] = wrong
        assert not EigenSolver().is_valid((values, vectors))


def test_jitter_is_relative_to_the_largest_diagonal_entry_of_each_matrix() -> None:
    factor = torch.randn(2, 3, 3)
    jitter = 1e-6 * factor.diagonal(dim1=1, dim2=2).abs().amax(1)
    expected = (factor + factor.mT) / 2 + jitter.view(2, 1, 1) * torch.eye(3)
    torch.testing.assert_close(_jittered(factor), expected, rtol=0, atol=1e-9)


def test_a_decomposition_of_other_shapes_than_said_is_refused_by_name() -> None:
    """Room is made and sent for those that the solver of the user's own has told."""
    solver = UndampedSolver()
    solver.decompose = lambda factor, shift: (factor,)  # type: ignore[assignment, misc, return-value]
    model, _ = twins(Mixed)
    optimizer = KFACSGD(model, **EXACT | {"solver": solver})
    backward(model, token_passes(), mean_loss)
    with pytest.raises(ValueError, match=r"UndampedSolver.*decompose\(\) has returned .*of which shapes\(\) says"):
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Zeros
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("precondition", ["gradient", "momentum"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("solver", SOLVERS)
def test_zero_gradient_gives_zero_direction(
    solver: str, scaling: str | None, precondition: str, relative: bool
) -> None:
    """Of curvature that an earlier step has seen: a step whose own gradients are zeroed has none."""
    model, _ = twins(Mixed)
    keywords = {"solver": SOLVERS[solver], "scaling": scaling, "precondition": precondition}
    optimizer = KFACSGD(model, **EXACT | keywords | {"damping": damping_of(0.1, relative)})
    take_step(model, optimizer, token_passes(), mean_loss)
    set_gradients(model, {name: torch.zeros_like(p) for name, p in model.named_parameters()})
    for name, change in apply(model, optimizer).items():
        assert torch.equal(change, torch.zeros_like(change)), name


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("zero", ["A", "G", "both"])
def test_factors_of_trace_zero(zero: str, solver: str, relative: bool) -> None:
    """Pi is 1 then, and relative damping takes a mean eigenvalue of 1, for any gradient that stands in ``.grad``."""
    model, twin = twins(lambda: nn.Sequential(nn.Linear(3, 2, bias=False)))
    oracle = Oracle(twin)
    passes = [((torch.zeros(4, 3) if zero in ("A", "both") else torch.randn(4, 3),), torch.randn(4, 2))]
    size = 0.0 if zero in ("G", "both") else 1.0

    def loss(output, y):
        return size * mean_loss(output, y)

    oracle.refresh(oracle.observe(passes, loss))
    (pair,) = oracle.curvature["0"].pairs
    assert pair.mean_eigenvalue == 0
    keywords = {"damping": damping_of(0.3, relative), "solver": SOLVERS[solver]}
    optimizer = KFACSGD(model, **EXACT | keywords)
    backward(model, passes, loss)
    v = torch.randn(2, 3)
    set_gradients(model, {"0.weight": v})
    wanted = SOLVES[solver](pair.a, pair.g, v, 0.3)
    assert_near(apply(model, optimizer)["0.weight"], -wanted, scale=10)


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_norm_blocks_of_trace_zero(relative: bool) -> None:
    model, _ = twins(lambda: nn.Sequential(nn.LayerNorm(3)))
    passes = [((torch.randn(4, 3),), torch.randn(4, 3))]
    optimizer = KFACSGD(model, **EXACT | {"damping": damping_of(0.3, relative)})
    backward(model, passes, lambda output, y: 0.0 * mean_loss(output, y))
    chosen = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    set_gradients(model, chosen)
    for name, change in apply(model, optimizer).items():
        assert_near(change, -chosen[name] / 0.3, scale=10)


# ---------------------------------------------------------------------------------------------------------------------
# Scalings
# ---------------------------------------------------------------------------------------------------------------------


def observed(
    factory: Callable[[], nn.Module], passes: Passes, damping: float
) -> tuple[nn.Module, Oracle, Named, Named]:
    """A model, the oracle, the raw gradients and the unscaled directions of one step."""
    model, twin = twins(factory)
    oracle = Oracle(twin)
    step = oracle.observe(passes, mean_loss)
    oracle.refresh(step)
    return model, oracle, step.gradients, oracle.directions(step.gradients, damping)


@given(
    lr=st.sampled_from([1e-3, 0.1, 1.0, 30.0]),
    kappa=st.sampled_from([1e-6, 1e-3, 1.0, 1e6]),
    damping=st.sampled_from([0.01, 1.0]),
    callable_=st.booleans(),
    seed=seeds,
)
def test_kl_clip_formula(lr: float, kappa: float, damping: float, callable_: bool, seed: int) -> None:
    torch.manual_seed(seed)
    passes = token_passes()
    model, oracle, gradients, directions = observed(Mixed, passes, damping)
    nu = kl_clip_factor([(directions[la.name], la.of(gradients), lr) for la in oracle.layers], kappa)
    keywords = {"scaling": KLClip((lambda step: kappa) if callable_ else kappa)}
    optimizer = KFACSGD(model, **EXACT | keywords | {"damping": damping, "lr": lr})
    changes = take_step(model, optimizer, passes, mean_loss)
    assert_applied(oracle, changes, {name: nu * d for name, d in directions.items()}, gradients, lr)


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    bias=st.booleans(),
    solver=st.sampled_from(["eigen", "inverse"]),
    seed=seeds,
)
def test_unit_scaling_gives_the_norm_of_a_semi_orthogonal_update(
    shape: tuple[int, int], bias: bool, solver: str, seed: int
) -> None:
    torch.manual_seed(seed)
    d_in, d_out = shape
    model, twin = twins(lambda: nn.Sequential(nn.Linear(d_in, d_out, bias)))
    passes, oracle = linear_passes(4, d_in, d_out), Oracle(twin)
    step = oracle.observe(passes, mean_loss)
    oracle.refresh(step)
    keywords = {"scaling": "unit", "damping": 0.1, "solver": SOLVERS[solver]}
    change = oracle.layers[0].of(take_step(model, KFACSGD(model, **EXACT | keywords), passes, mean_loss))[0]
    assert float(change.norm()) == pytest.approx(unit_norm(d_out, d_in + bias), rel=1e-9)
    direction = oracle.directions(step.gradients, 0.1, solver=solver)["0"][0]
    assert_near(change / change.norm(), -direction / direction.norm())


def test_unit_norm_values() -> None:
    """A semi-orthogonal d_out x d_in matrix has norm sqrt(min); wide outputs get Muon's factor on top."""
    assert unit_norm(4, 4) == 2
    assert unit_norm(4, 9) == 2
    assert unit_norm(9, 4) == 3
    assert unit_norm(1, 5) == 1


@pytest.mark.parametrize(("scaling", "groups"), [("unit", 1), ("unit", 2), ("graft", 1)])
def test_scaling_of_every_kind_of_block(scaling: str, groups: int) -> None:
    """For graft the design says "per layer", which groups of a convolution may or may not be: not tested."""
    passes = token_passes()
    model, oracle, gradients, directions = observed(partial(Mixed, groups), passes, 0.1)
    for layer in oracle.layers:
        v, raw = directions[layer.name], layer.of(gradients)
        directions[layer.name] = unit_scaled(layer.module, v) if scaling == "unit" else grafted(v, raw)
    optimizer = KFACSGD(model, **EXACT | {"damping": 0.1, "scaling": scaling})
    changes = take_step(model, optimizer, passes, mean_loss)
    for layer in oracle.layers:
        assert_near(layer.of(changes), -directions[layer.name], layer.name, scale=10)


@pytest.mark.parametrize("precondition", ["gradient", "momentum"])
@given(factor=st.sampled_from([1e-3, 7.0, 1e3]), seed=seeds)
def test_unit_scaling_with_relative_damping_ignores_the_scale_of_the_loss(
    precondition: str, factor: float, seed: int
) -> None:
    results = []
    for scale in (1.0, factor):
        torch.manual_seed(seed)
        model, _ = twins(Mixed)
        keywords = {"damping": OfMean(0.1), "scaling": "unit", "precondition": precondition}
        optimizer = KFACSGD(model, **EXACT | keywords | {"lr": 0.02, "momentum": 0.9})
        for _ in range(3):
            take_step(model, optimizer, token_passes(), lambda o, y, s=scale: s * averaged(log_cosh, "batch")(o, y))
        results.append(model)
    for first, second in zip(*(model.parameters() for model in results), strict=False):
        assert_near(second.detach(), first.detach(), rel=1e-7)  # three steps, each amplifies the rounding of the last
