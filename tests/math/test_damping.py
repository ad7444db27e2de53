"""Damping that is relative to the largest eigenvalue: against dense eigenvalues, over time, and resumed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACSGD, Graft, OfLargest, OfMean, exponential_decay
from kfac_optim.spectra import largest_eigenvalue
from tests.helpers.compare import assert_applied, assert_identical, assert_trained, values
from tests.helpers.reference import Curvature, Oracle, averaged, squared_error, take_step
from tests.helpers.settings import EXACT, SOLVERS
from tests.helpers.training import assert_go_on_alike, resumed_from, train

pytestmark = pytest.mark.usefixtures("float64")

VALUE = 0.03
WITHIN = 1e-3  # of the largest eigenvalue: what 32 Lanczos steps may miss


def stack() -> nn.Module:
    """Two groups of a convolution, a norm layer, and a Linear layer; no factor of more than 64 rows."""
    conv, norm = nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6)
    return nn.Sequential(conv, norm, nn.Tanh(), nn.Flatten(), nn.Linear(54, 3))


def largest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh(matrix).max())


def gammas(curvature: Curvature, value: float) -> list[float]:
    """By pair: the largest eigenvalue of ``A (x) G`` itself; for a norm layer that of all its blocks."""
    if curvature.blocks is not None:
        return [value * largest(curvature.blocks)]
    return [value * largest(torch.kron(pair.a, pair.g)) for pair in curvature.pairs]


def expected_direction(curvature: Curvature, v: Tensor, value: float, solver: str) -> Tensor:
    found = gammas(curvature, value)
    if curvature.blocks is not None:
        return curvature.solve(v, found[0])
    parts = zip(curvature.pairs, v, found, strict=True)
    return torch.stack([pair.solve(part, gamma, False, solver) for pair, part, gamma in parts])


# Against dense eigenvalues -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_gamma_is_a_multiple_of_each_pairs_largest_eigenvalue(solver: str, scheduled: bool) -> None:
    model, twin = stack(), stack()
    twin.load_state_dict(model.state_dict())
    schedule = exponential_decay(VALUE, 0.5, 1) if scheduled else VALUE
    optimizer = KFACSGD(model, **EXACT | {"lr": 0.1, "damping": OfLargest(schedule), "solver": SOLVERS[solver]})
    oracle, loss = Oracle(twin), averaged(squared_error, "batch")
    for step in range(3):
        passes = [((torch.randn(5, 4, 3, 3),), torch.randn(5, 3))]
        seen = oracle.observe(passes, loss, copy.deepcopy(model.state_dict()))
        oracle.refresh(seen)
        changes = take_step(model, optimizer, passes, loss)
        value = VALUE * 0.5**step if scheduled else VALUE
        directions = {
            layer.name: expected_direction(oracle.curvature[layer.name], layer.of(seen.gradients), value, solver)
            for layer in oracle.layers
        }
        assert_applied(oracle, changes, directions, seen.gradients, lr=0.1)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_the_report_and_the_state_have_gamma(solver: str) -> None:
    """The state only where factors are decomposed with it."""
    model, twin = stack(), stack()
    twin.load_state_dict(model.state_dict())
    optimizer = KFACSGD(model, **EXACT | {"damping": OfLargest(VALUE), "solver": solver})
    oracle, loss = Oracle(twin), averaged(squared_error, "batch")
    passes = [((torch.randn(5, 4, 3, 3),), torch.randn(5, 3))]
    oracle.refresh(oracle.observe(passes, loss))
    take_step(model, optimizer, passes, loss)
    for name, row in optimizer.curvature.report()["layers"].items():
        expected = torch.tensor(gammas(oracle.curvature[name], VALUE))
        assert row["damping"] == pytest.approx(float(expected.mean()), rel=1e-10)
        kept = optimizer.state[model.get_submodule(name).weight]["kfac"]["in_use"]["gamma"]
        saved = expected if solver == "inverse" else torch.zeros_like(expected)
        torch.testing.assert_close(kept, saved.expand_as(kept), rtol=1e-10, atol=0)


class Own:
    """A damping of the user's own; ``unit``: of the means of A and G and of ones, ``[p]``."""

    value = 0.1

    def __init__(self, unit: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        self._unit = unit

    def unit(self, spectra: Any) -> Any:
        return self._unit(*spectra.means(), spectra.ones())

    def __repr__(self) -> str:
        return "Own()"


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_own_damping_has_a_unit_for_each_pair(solver: str) -> None:
    models = [stack(), stack()]
    models[1].load_state_dict(models[0].state_dict())
    dampings = (Own(lambda a, g, ones: torch.where(a * g > 0, a * g, ones)), OfMean(0.1))
    options = {"lr": 0.1, "scaling": Graft(trust=1.0), "solver": SOLVERS[solver]}
    for model, damping in zip(models, dampings, strict=True):
        train(model, KFACSGD(model, damping=damping, **options), range(4), shape=(8, 4, 3, 3))
    assert_identical(*models)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("unit", "shown"), [(lambda *_: 2.0, "2.0"), (lambda a, g, ones: (a * g).sum(), r"a tensor of shape \[\]")]
)
def test_another_unit_is_refused(unit: Any, shown: str, solver: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = KFACSGD(model, lr=0.1, damping=Own(unit), solver=SOLVERS[solver])
    message = rf"damping=Own\(\): unit\(\) has returned {shown}: .*shape \[1\].*spectra.ones\(\)"
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, range(2))


def test_the_kind_may_change_during_training() -> None:
    """At once with the eigen solver, which adds gamma when it preconditions: also where no refresh is due."""
    model, twin = stack(), stack()
    twin.load_state_dict(model.state_dict())
    optimizer = KFACSGD(model, **EXACT | {"lr": 0.0, "damping": OfMean(1.0), "inv_update_steps": 100})
    oracle, loss = Oracle(twin), averaged(squared_error, "batch")
    passes = [((torch.randn(5, 4, 3, 3),), torch.randn(5, 3))]
    seen = oracle.observe(passes, loss)
    oracle.refresh(seen)
    take_step(model, optimizer, passes, loss)
    model.load_state_dict(twin.state_dict())
    optimizer.param_groups[0]["lr"], optimizer.curvature.damping = 1.0, OfLargest(VALUE)
    changes = take_step(model, optimizer, passes, loss)
    directions = {
        layer.name: expected_direction(oracle.curvature[layer.name], layer.of(seen.gradients), VALUE, "eigen")
        for layer in oracle.layers
    }
    assert_applied(oracle, changes, directions, seen.gradients)


@dataclass(frozen=True)
class OfPower(OfLargest):
    """A damping of the user's own that is made from one of the package's."""

    power: float

    def unit(self, spectra: Any) -> Tensor:
        unit: Tensor = super().unit(spectra) ** self.power
        return unit


def test_a_subclass_of_a_damping_is_a_kind_of_its_own() -> None:
    """Its unit takes effect at once, nothing is stretched as if it were the largest eigenvalue, and no state has it."""
    model = nn.Linear(4, 3)
    optimizer = KFACSGD(model, lr=0.1, damping=OfPower(VALUE, 1.0), inv_update_steps=100, factor_update_steps=1)
    train(model, optimizer, range(4))
    curvature = optimizer.curvature
    for power in (1.0, 2.0):
        curvature.damping = OfPower(VALUE, power)
        a, g = curvature.report()["layers"][""]["A"]["max"], curvature.report()["layers"][""]["G"]["max"]
        assert curvature.report()["layers"][""]["damping"] == pytest.approx(VALUE * (a * g) ** power)
    assert not curvature.stages.plan().stretches
    optimizer.load_state_dict(optimizer.state_dict())
    assert isinstance(curvature.damping, OfPower)


# Lanczos -------------------------------------------------------------------------------------------------------------


def of_rank(rank: int, n: int, seed: int) -> Tensor:
    """What a factor is after few examples: a Gram matrix of fewer rows than it has."""
    rows = torch.randn(2, rank, n, generator=torch.Generator().manual_seed(seed))
    return rows.mT @ rows / rank


def with_spectrum(values: Tensor, seed: int) -> Tensor:
    n = len(values)
    q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed))).Q
    return ((q * values) @ q.mT)[None]


SPECTRA: dict[str, Callable[[int, int], Tensor]] = {
    "random": lambda n, seed: of_rank(2 * n, n, seed),
    "of few examples": lambda n, seed: of_rank(n // 4, n, seed),
    "rank 3": lambda n, seed: of_rank(3, n, seed),
    "rank 1": lambda n, seed: of_rank(1, n, seed),
    "zero": lambda n, seed: torch.zeros(1, n, n),
    "identity": lambda n, seed: torch.eye(n)[None],
    "geometric": lambda n, seed: with_spectrum(0.5 ** torch.arange(n), seed),
    "1 / k": lambda n, seed: with_spectrum(1 / torch.arange(1, n + 1), seed),
    "one far above the others": lambda n, seed: with_spectrum(torch.ones(n).index_fill(0, torch.tensor(0), 1e4), seed),
    "two equal": lambda n, seed: with_spectrum(torch.tensor([1.0, 1.0] + [0.1] * (n - 2)), seed),
}


@pytest.mark.fast("-(64|65|200)$|^of few examples-700")
@pytest.mark.parametrize("n", [64, 65, 200, 700])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_largest_eigenvalue_is_found(spectrum: str, n: int) -> None:
    for seed in range(2):
        factor = SPECTRA[spectrum](n, seed)
        exact = torch.linalg.eigvalsh(factor)[:, -1].clamp(min=0)  # what takes the time
        for dtype in (torch.float32, torch.float64):
            for scale in (1e-12, 1.0, 1e6):  # of gradients, and of pixels
                found = largest_eigenvalue((factor * scale).to(dtype))
                assert found.dtype is dtype
                within = WITHIN * exact * scale
                assert bool(((found.double() - exact * scale).abs() <= within).all()), (dtype, scale)


def test_each_pair_has_its_own() -> None:
    """Those of a batch that converge early do not disturb the others."""
    factors = torch.cat([of_rank(rank, 80, seed=rank) for rank in (1, 2, 40, 160)] + [torch.zeros(1, 80, 80)])
    together = largest_eigenvalue(factors)
    alone = torch.cat([largest_eigenvalue(factor[None]) for factor in factors])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=0)


def test_the_largest_of_a_diagonal_factor_is_its_largest_entry() -> None:
    assert largest_eigenvalue(torch.tensor([[0.5, 3.0, 1.0], [0.0, 0.0, 0.0]])).tolist() == [3.0, 0.0]


@pytest.mark.parametrize("n", [3, 70])
def test_a_factor_that_has_overflowed_ends_no_training(n: int) -> None:
    assert not bool(largest_eigenvalue(torch.full((1, n, n), torch.inf)).isfinite())


# Resumed -------------------------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    """Factors of 71 and 90 rows, whose largest eigenvalues come from Lanczos iteration."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 3))


STEPS = 7  # in the midst of the refresh that is spread over the steps 6 and 7


@pytest.mark.fast("^(number-inverse-2|function-eigen-0)")
@pytest.mark.parametrize("spread", [0, 2])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("schedule", [VALUE, exponential_decay(VALUE, 0.5, 5)], ids=["number", "function"])
def test_a_resumed_run_is_the_uninterrupted_one(schedule: Any, solver: str, spread: int) -> None:
    intervals = {"factor_update_steps": 2, "inv_update_steps": 3, "spread": spread}

    def build(damping: Any) -> tuple[nn.Module, KFACSGD]:
        model = wide()
        return model, KFACSGD(model, lr=0.1, momentum=0.9, damping=damping, solver=solver, **intervals)

    model, optimizer = build(OfLargest(schedule))
    before = values(model)
    train(model, optimizer, range(STEPS), shape=(8, 70))
    resumed, again = resumed_from(model, optimizer, build(OfLargest(schedule)))
    assert_go_on_alike(range(STEPS, 2 * STEPS), (model, optimizer), (resumed, again), shape=(8, 70))
    assert_trained(model, before)
    other, _ = build(OfMean(schedule))
    train(other, _, range(2 * STEPS), shape=(8, 70))
    assert not torch.equal(other[0].weight, model[0].weight), "the kind tells"


@pytest.mark.parametrize("fails", [(torch.float32,), (torch.float32, torch.float64)], ids=["float32", "both"])
def test_a_report_survives_a_solver_that_does_not_converge(
    fails: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training does, too: the layer keeps its last decomposition."""
    solve = torch.linalg.eigvalsh

    def eigvalsh(matrix: Tensor) -> Tensor:
        if matrix.dtype in fails:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return solve(matrix)

    model = torch.nn.Linear(4, 3).float()
    optimizer = KFACSGD(model, lr=0.1)
    model(torch.randn(8, 4, dtype=torch.float32)).square().sum().backward()
    optimizer.step()
    expected = optimizer.curvature.report()["layers"][""]["A"]["max"]
    used = optimizer.curvature.stages.blocks[0].in_use
    assert used is not None
    used._eigenvalues = None
    monkeypatch.setattr(torch.linalg, "eigvalsh", eigvalsh)
    found = optimizer.curvature.report()["layers"][""]["A"]["max"]
    assert found == pytest.approx(expected, rel=1e-5) if len(fails) == 1 else math.isnan(found)
