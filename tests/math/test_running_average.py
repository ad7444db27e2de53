"""Running averages and intervals, in the smallest model there is: ``s = w x`` with one weight.

There ``A`` and ``G`` are numbers. With a loss ``(1/N) sum_n c_n s_n`` the weight's gradient is ``mean(c x)``,
``A = mean(x^2)`` and ``G = N sum (c / N)^2 = mean(c^2)``, so a step with ``lr=1`` moves ``w`` by
``- mean(c x) / (A G + gamma)``: the running averages are read off the weight change.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kfac_optim import KFACSGD, forgetting
from kfac_optim.factors import FactorSpec, pack
from tests.helpers.compare import factors_of
from tests.helpers.settings import EXACT

pytestmark = pytest.mark.usefixtures("float64")

TOL = 1e-10  # scalar arithmetic
GAMMA = 0.25

numbers = st.floats(0.25, 3.0)
batches = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4)
Batch = Sequence[tuple[float, float]]  # pairs (x, c)


def build(without: str = "", **keywords: object) -> tuple[nn.Module, KFACSGD]:
    """One weight under the optimizer, and nothing else; ``without`` leaves a keyword at its default."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    options = EXACT | {"damping": GAMMA} | keywords
    return model, KFACSGD(model, **{name: value for name, value in options.items() if name != without})


def backward(model: nn.Module, batch: Batch, parts: int = 1) -> None:
    """Backward of ``(1/N) sum c s``, divided by the number of micro-batches."""
    x, c = (torch.tensor(column).unsqueeze(1) for column in zip(*batch, strict=False))
    ((c * model(x)).mean() / parts).backward()


def change(model: nn.Module, optimizer: KFACSGD) -> float:
    """The weight change of one step; the gradients are cleared."""
    before = model[0].weight.item()
    optimizer.step()
    optimizer.zero_grad()
    return model[0].weight.item() - before


def step(model: nn.Module, optimizer: KFACSGD, batch: Batch) -> float:
    """Backward and step: the weight change."""
    backward(model, batch)
    return change(model, optimizer)


def curvature_of(moved: float, batch: Batch) -> float:
    """``A G`` as the optimizer used it, from the weight change."""
    return -mean_gradient(batch) / moved - GAMMA


def mean_gradient(batch: Batch) -> float:
    """``mean(c x)``."""
    return sum(x * c for x, c in batch) / len(batch)


@dataclass
class Sums:
    """Two running sums for each factor, written out."""

    decay: float
    slack: float = math.inf
    a: float = 0.0
    g: float = 0.0
    weight_a: float = 0.0
    weight_g: float = 0.0
    seen: list[float] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """``S <- xi S + sum``, ``w <- xi w + count``."""
        a, g = sum(x * x for x, _ in batch), sum(c * c for _, c in batch)
        xi_a, xi_g = self.xi(a / len(batch), self.a, self.weight_a), self.xi(g / len(batch), self.g, self.weight_g)
        self.a, self.weight_a = xi_a * self.a + a, xi_a * self.weight_a + len(batch)
        self.g, self.weight_g = xi_g * self.g + g, xi_g * self.weight_g + len(batch)

    def xi(self, new: float, total: float, weight: float) -> float:
        """The weight of the past, which is less where it is more than ``slack`` times as large as what is new."""
        return self.decay * min(1.0, self.slack * new * weight / total) if total else self.decay

    @property
    def curvature(self) -> float:
        """``A G``."""
        return self.a / self.weight_a * self.g / self.weight_g


# ---------------------------------------------------------------------------------------------------------------------
# Averages
# ---------------------------------------------------------------------------------------------------------------------


@given(steps=st.lists(batches, min_size=1, max_size=6), decay=st.floats(0.0, 0.99))
def test_weighted_running_averages_of_unequal_batches(steps: list[Batch], decay: float) -> None:
    model, optimizer = build(factor_decay=decay)
    sums = Sums(decay)
    for batch in steps:
        sums.add(batch)
        wanted = -mean_gradient(batch) / (sums.curvature + GAMMA)
        assert step(model, optimizer, batch) == pytest.approx(wanted, rel=TOL)


@pytest.mark.parametrize("without", ["", "factor_decay"])
def test_the_decay_of_the_paper_and_the_default_one(without: str) -> None:
    """The latter falls with the step."""
    model, optimizer = build(without)
    step(model, optimizer, [(1.0, 1.0)])
    batch = [(2.0, 1.0)]
    decay = 0.95 * 250 / 251 if without else 0.95
    wanted = (decay * 1 + 4) / (1 + decay)
    assert curvature_of(step(model, optimizer, batch), batch) == pytest.approx(wanted, rel=TOL)


smaller_batches = st.builds(
    lambda batch, x, c: [(x * x_, c * c_) for x_, c_ in batch], batches, *[st.sampled_from([1.0, 0.1, 1e-3])] * 2
)


@given(
    first=batches, steps=st.lists(smaller_batches, max_size=5), decay=st.floats(0.0, 0.99), slack=st.floats(1.0, 5.0)
)
def test_what_is_too_large_for_new_moments_is_forgotten(
    first: Batch, steps: list[Batch], decay: float, slack: float
) -> None:
    """The weight of the past is ``xi min(1, slack r)``, with r the new moment's trace over the average's, by factor."""
    model, optimizer = build(factor_decay=forgetting(decay, slack), scaling="graft")
    sums = Sums(decay, slack)
    for batch in [first, *steps]:
        sums.add(batch)
        step(model, optimizer, batch)
        assert product_of(optimizer) == pytest.approx(sums.curvature, rel=TOL)


def product_of(optimizer: KFACSGD) -> float:
    """``A G``, which a step that is as long as the gradient does not show."""
    return math.prod(map(float, factors_of(optimizer).values()))


def test_by_default_a_plateau_ends_the_averages_of_the_first_steps() -> None:
    """With slack 3: a past 25 times as large counts 3/25 as much."""
    model, optimizer = build("factor_decay", scaling="graft")
    step(model, optimizer, [(5.0, 1.0)])
    step(model, optimizer, [(1.0, 1.0)])
    past = 0.95 * 250 / 251 * 3 / 25
    assert product_of(optimizer) == pytest.approx((past * 25 + 1) / (past + 1), rel=TOL)


@pytest.mark.parametrize("scaling", [None, "kl_clip"])
def test_nothing_is_forgotten_where_directions_would_grow(scaling: str | None) -> None:
    """Steps of these scalings are as long as the direction; a single small batch would make them far too long."""
    model, optimizer = build(factor_decay=forgetting(0.5), scaling=scaling)
    step(model, optimizer, [(1.0, 1.0)])
    step(model, optimizer, [(1.0, 1e-3)])
    assert product_of(optimizer) == pytest.approx((0.5 + 1e-6) / 1.5, rel=TOL)


def test_a_batch_without_gradients_forgets_nothing() -> None:
    """Moments of zero say nothing of what the past is worth: they only decay it."""
    model, optimizer = build(factor_decay=forgetting(0.5), scaling="graft")
    step(model, optimizer, [(1.0, 2.0)])
    backward(model, [(1.0, 0.0)])
    change(model, optimizer)
    step(model, optimizer, [(1.0, 2.0)])
    assert product_of(optimizer) == pytest.approx((0.25 * 4 + 4) / 1.75, rel=TOL)


def test_forgetting_may_begin_during_training() -> None:
    """What the past is worth is known from the first step on, whatever the decay is."""
    model, optimizer = build(factor_decay=0.5, scaling="graft")
    step(model, optimizer, [(5.0, 1.0)])
    optimizer.curvature.factor_decay = forgetting(0.5, slack=1.0)
    step(model, optimizer, [(1.0, 1.0)])
    past = 0.5 / 25
    assert product_of(optimizer) == pytest.approx((past * 25 + 1) / (past + 1), rel=TOL)


@pytest.mark.parametrize("size", [1e-10, 1e-19, 1e-21, 1e-30])
@pytest.mark.parametrize("scaling", ["graft", "unit"])
def test_a_batch_of_tiny_gradients_leaves_weights_finite(size: float, scaling: str) -> None:
    """In float32 their second moments underflow; the first moment, of earlier batches, is then divided by gamma."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, scaling=scaling, factor_update_steps=1, inv_update_steps=2)
    for t in range(12):
        optimizer.zero_grad()
        (model(torch.randn(8, 4)).square().mean() * (size if t == 6 else 1.0)).backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# What is data and what is not
# ---------------------------------------------------------------------------------------------------------------------


def test_a_step_without_data_decays_neither_sum() -> None:
    """A decay of both sums would show as soon as new data is weighed against them."""
    model, optimizer = build(factor_decay=0.5)
    step(model, optimizer, [(1.0, 1.0)])
    for _ in range(2):  # at the third, training that nothing is seen of is an error
        model[0].weight.grad = torch.ones(1, 1)
        assert change(model, optimizer) == pytest.approx(-1 / (1.0 + GAMMA), rel=TOL)
    batch = [(2.0, 1.0)]
    assert curvature_of(step(model, optimizer, batch), batch) == pytest.approx((0.5 * 1 + 4) / 1.5, rel=TOL)


# ---------------------------------------------------------------------------------------------------------------------
# Intervals
# ---------------------------------------------------------------------------------------------------------------------


@given(
    steps=st.lists(batches, min_size=1, max_size=8),
    decay=st.sampled_from([0.0, 0.5, 0.95]),
    factor_every=st.integers(1, 4),
    decompose_every=st.integers(1, 4),
    as_callables=st.booleans(),
)
def test_intervals_of_statistics_and_decompositions(
    steps: list[Batch], decay: float, factor_every: int, decompose_every: int, as_callables: bool
) -> None:
    """Data of other steps never enters; between decompositions the old one is used."""
    intervals: list[object] = [factor_every, decompose_every]
    if as_callables:
        intervals = [lambda step: factor_every, lambda step: decompose_every]
    model, optimizer = build(factor_decay=decay, factor_update_steps=intervals[0], inv_update_steps=intervals[1])
    sums, used = Sums(decay), 0.0
    for t, batch in enumerate(steps):
        if t % factor_every == 0:
            sums.add(batch)
        if t % decompose_every == 0:
            used = sums.curvature
        wanted = -mean_gradient(batch) / (used + GAMMA)
        assert step(model, optimizer, batch) == pytest.approx(wanted, rel=TOL), f"step {t}"


def test_a_pickle_grows_no_faster_than_the_number_of_layers() -> None:
    sizes = []
    for layers in (16, 64):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        optimizer = KFACSGD(model, lr=0.1)
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        sizes.append(
            len(pickle.dumps(optimizer.state_dict()))
        )  # unlike torch.save, this writes a storage for each view
    assert sizes[1] < 4.1 * sizes[0]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
def test_the_diagonal_of_a_packed_matrix(n: int) -> None:
    matrix = torch.randn(2, n, n)
    matrix = matrix + matrix.mT
    assert torch.equal(torch.cat(FactorSpec(2, n).diagonals(pack(matrix)), -1), matrix.diagonal(dim1=-2, dim2=-1))
