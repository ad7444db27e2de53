"""``EigenSolver(negligible=...)``: eigenvalues that the damping hides count as zero, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kfac_optim import KFACSGD, EigenSolver
from kfac_optim.solvers import Decomposition, eigen
from tests.helpers.compare import assert_near
from tests.helpers.reference import averaged, squared_error, take_step
from tests.helpers.settings import EXACT, SOLVERS, damping_of

pytestmark = pytest.mark.usefixtures("float64")

mean_loss = averaged(squared_error, "batch")


def decomposition(pairs: int, dim: int, diagonal: bool, decades: float) -> Decomposition:
    """Random eigenvectors, and eigenvalues spread over some decades, in one order or the other, as solvers do."""
    values = (10 ** (-decades * torch.rand(pairs, dim))).sort(-1).values  # as torch.linalg.eigh returns them
    return (values,) if diagonal else (values, torch.linalg.qr(torch.randn(pairs, dim, dim)).Q)


def matrix(side: Decomposition, pair: int, values: Tensor) -> Tensor:
    """A factor of given eigenvalues."""
    q = side[1][pair] if len(side) == 2 else torch.eye(len(values))
    return q @ values.diag() @ q.T


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Tensor, Decomposition, Decomposition, Tensor]:
    """A stack's gradient, decompositions of A and G, and dampings."""
    pairs, d_out, d_in = (draw(st.integers(1, top)) for top in (3, 6, 6))
    torch.manual_seed(draw(st.integers(0, 9999)))
    decades = draw(st.floats(0, 6))
    a, g = (decomposition(pairs, dim, draw(st.booleans()), decades) for dim in (d_in, d_out))
    return torch.randn(pairs, d_out, d_in), a, g, 10 ** draw(st.floats(-6, 2)) * (1 + torch.rand(pairs))


def relevant(
    solver: EigenSolver, a: Decomposition, g: Decomposition, gamma: Tensor
) -> tuple[Decomposition, Decomposition]:
    return solver.relevant(a, g, gamma, solver.count_relevant(a, g, gamma).tolist())


@given(stack=stacks(), negligible=st.sampled_from([0.0, 1e-6, 0.01, 0.5]))
def test_a_stack_against_the_dense_solve(
    stack: tuple[Tensor, Decomposition, Decomposition, Tensor], negligible: float
) -> None:
    """(A (x) G + gamma I)^-1 with the negligible eigenvalues zero, but for diagonal factors; each pair for itself."""
    gradient, a, g, gamma = stack
    solver = EigenSolver(negligible=negligible)
    found = solver.precondition(gradient, *relevant(solver, a, g, gamma), gamma)
    exact = solver.precondition(gradient, a, g, gamma)
    for pair, v in enumerate(gradient):
        in_a, in_g = a[0][pair], g[0][pair]
        kept_a = in_a if len(a) == 1 else in_a.where(in_a * in_g.max() > negligible * gamma[pair], 0.0)
        kept_g = in_g if len(g) == 1 else in_g.where(in_g * in_a.max() > negligible * gamma[pair], 0.0)
        fisher = torch.kron(matrix(a, pair, kept_a), matrix(g, pair, kept_g))
        solved = torch.linalg.solve(fisher + gamma[pair] * torch.eye(len(fisher)), v.T.flatten())
        assert_near(found[pair], solved.reshape(v.T.shape).T)
        # No component, in the eigenbasis, is off by more than the share that was promised.
        components = [_components(m, a, g, pair) for m in (found[pair], exact[pair])]
        off = (components[0] - components[1]).abs()
        assert bool((off <= negligible * components[1].abs() + 1e-9 * components[1].abs().max()).all())


def _components(direction: Tensor, a: Decomposition, g: Decomposition, pair: int) -> Tensor:
    """A direction in the eigenbasis of A (x) G."""
    q_a, q_g = (side[1][pair] if len(side) == 2 else torch.eye(side[0].shape[1]) for side in (a, g))
    return q_g.T @ direction @ q_a


@given(dim=st.integers(2, 50), kept=st.integers(0, 50))
@example(dim=33, kept=17)
def test_only_the_eigenvectors_that_matter_are_used(dim: int, kept: int) -> None:
    """What is passed on holds as many eigenvectors as the pair with the most of them has, up to a multiple of 16."""
    kept = min(kept, dim)
    values = torch.full((2, dim), 1e-9)  # ascending, as torch.linalg.eigh returns them
    values[0, dim - kept :], values[1, min(dim - kept + 1, dim) :] = 1, 1
    a = (values, torch.eye(dim).expand(2, -1, -1))
    g = (torch.ones(2, 3), torch.eye(3).expand(2, -1, -1))
    (in_a, q_a), (in_g, q_g) = relevant(EigenSolver(negligible=0.01), a, g, torch.full((2,), 0.1))
    room = min(dim, -(-kept // 16) * 16)
    assert in_a.shape == (2, room) and q_a.shape == (2, dim, room)
    assert in_a.count_nonzero(1).tolist() == [kept, max(0, min(kept - 1, dim))]
    assert in_g.shape == (2, 3 if kept else 0) and q_g.shape == (2, 3, in_g.shape[-1])


def make_model() -> nn.Module:
    """Two layers of one shape, one of another, and a grouped convolution."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv1d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(),
        nn.Linear(12, 2),
    )  # fmt: skip


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of some steps."""
    source = torch.Generator().manual_seed(5)
    return [(torch.randn(6, 2, 4, generator=source), torch.randn(6, 2, generator=source)) for _ in range(count)]


def changes(steps: int, **options: object) -> list[dict[str, Tensor]]:
    """What each step changes, from the same weights each, with statistics and a refresh in the first alone."""
    model = make_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    given = EXACT | {"factor_update_steps": 1000, "inv_update_steps": 1000} | options
    optimizer = KFACSGD(model, **given)  # type: ignore[arg-type]
    found = []
    for inputs, targets in batches(steps):
        model.load_state_dict(start)
        found.append(take_step(model, optimizer, [((inputs,), targets)], mean_loss))
    return found


@pytest.mark.parametrize("relative", [False, True])
def test_training_is_off_by_no_more_than_promised(relative: bool) -> None:
    """The default against the exact solver, where something is negligible; they are not the same."""
    damping = 30.0 if relative else 1.0
    options = {"damping": damping_of(damping, relative)}
    exact = changes(3, **options, solver=SOLVERS["eigen"])
    found = changes(3, **options, solver=EigenSolver())
    assert EigenSolver().negligible == 0.01
    differences = []
    for name, change in exact[2].items():
        differences.append(float((found[2][name] - change).norm() / change.norm()))
    assert 1e-6 < max(differences) <= 0.01


def test_what_is_negligible_follows_the_damping() -> None:
    """A damping that falls between refreshes brings back what it had hidden."""

    def damping(step: int) -> float:
        return [10.0, 1e-6, 10.0][step]

    exact, found = (changes(3, damping=damping, solver=solver) for solver in (SOLVERS["eigen"], EigenSolver()))
    for step in range(3):
        for name, change in exact[step].items():
            # At a damping of 1e-6 whatever is not null counts, so that a wrong decision shows by orders of magnitude.
            assert float((found[step][name] - change).norm() / change.norm()) <= 0.01, (step, name)


def test_what_is_negligible_follows_the_kind_of_damping() -> None:
    """From absolute to relative during training: the same number means another damping."""
    model, twin = make_model(), make_model()
    options = EXACT | {"factor_update_steps": 1000, "inv_update_steps": 1000, "damping": 1.0}
    ours = KFACSGD(model, **options | {"solver": EigenSolver()})  # type: ignore[arg-type]
    exact = KFACSGD(twin, **options | {"solver": SOLVERS["eigen"]})  # type: ignore[arg-type]
    for step, (inputs, targets) in enumerate(batches(2)):
        twin.load_state_dict(model.state_dict())
        ours.curvature.damping = exact.curvature.damping = damping_of(1.0, step == 1)
        found, expected = (
            take_step(m, o, [((inputs,), targets)], mean_loss) for m, o in ((model, ours), (twin, exact))
        )
    for name, change in expected.items():
        assert float((found[name] - change).norm() / change.norm()) <= 0.01


def test_layers_of_one_shape_of_which_some_have_no_gradient_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting what matters waits for the device: not in every step because a layer was frozen, or is not used."""
    model = make_model()
    options = EXACT | {"factor_update_steps": 1000, "inv_update_steps": 1000, "damping": 1.0, "solver": EigenSolver()}
    optimizer = KFACSGD(model, **options)  # type: ignore[arg-type]
    count, asked = EigenSolver.count_relevant, []
    monkeypatch.setattr(EigenSolver, "count_relevant", lambda self, *args: asked.append(step) or count(self, *args))
    for step, (inputs, targets) in enumerate(batches(6)):
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        if step in (2, 3, 5):  # model[4] has the same shape
            model[2].zero_grad()
        optimizer.step()
    assert set(asked) == {0, 2}


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tall_matrix_is_multiplied_in_blocks_of_rows(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of them has fewer rows."""
    solver, gradient, gamma = EigenSolver(), torch.randn(1, 21, 5), torch.ones(1)
    a, g = decomposition(1, 5, False, 2.0), decomposition(1, 21, True, 2.0)
    expected = solver.precondition(gradient, a, g, gamma)
    monkeypatch.setattr(eigen, "_ROWS", 2)
    if transposed:  # as that of an embedding is
        found = solver.precondition(gradient.mT, g, a, gamma).mT
    else:
        found = solver.precondition(gradient, a, g, gamma)
    assert_near(found, expected)


@pytest.mark.parametrize("kept", [(1, 9), (7, 2), (3, 3), (7, 9)])
def test_the_products_come_in_the_cheaper_order(kept: tuple[int, int]) -> None:
    """There and back, each by the order that takes the fewer multiply-adds."""
    (d_out, d_in), (kept_out, kept_in) = (7, 9), kept
    a, g = ((torch.rand(1, k), torch.randn(1, d, k)) for d, k in ((d_in, kept_in), (d_out, kept_out)))
    with FlopCounterMode(display=False) as counter:
        EigenSolver().precondition(torch.randn(1, d_out, d_in), a, g, torch.ones(1))
    g_first, a_first = kept_out * d_in * (d_out + kept_in), d_out * kept_in * (d_in + kept_out)
    assert counter.get_total_flops() == 2 * 2 * min(g_first, a_first)
