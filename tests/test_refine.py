"""``EigenSolver(refresh="qr")``: eigenvectors that follow the factors from refresh to refresh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim import EigenSolver
from kfac_optim.solvers import Decomposition, decompose_all, decompose_safely

ALWAYS = EigenSolver(refresh="qr", tolerance=float("inf"))  # never falls back


def factors(pairs: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Factors with eigenvalues 1, 1/2, 1/4, ... in random bases, and the same after a small change."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(2, pairs, n, n, generator=generator, dtype=torch.float64)
    bases = torch.linalg.qr(random[0]).Q
    before = bases @ torch.diag(2.0 ** -torch.arange(n, dtype=torch.float64)) @ bases.mT
    change = 0.1 * random[1] @ before @ random[1].mT / n
    return before, before + change


def rebuilt(found: Decomposition) -> Tensor:
    values, vectors = found
    return vectors @ torch.diag_embed(values) @ vectors.mT


def step(solver: EigenSolver, factor: Tensor, last: Decomposition) -> Decomposition:
    return solver.refine(factor, factor.new_zeros(len(factor)), last)


def anew(factor: Tensor) -> Decomposition:
    return EigenSolver().decompose(factor, factor.new_zeros(len(factor)))


@given(st.integers(1, 3), st.integers(1, 8), st.integers(0, 9999))
def test_an_unchanged_factor_keeps_its_decomposition(pairs: int, n: int, seed: int) -> None:
    factor, _ = factors(pairs, n, seed)
    torch.testing.assert_close(rebuilt(step(ALWAYS, factor, anew(factor))), factor, rtol=0, atol=1e-10)


@given(st.integers(1, 3), st.integers(2, 8), st.integers(0, 9999))
def test_steps_converge_to_the_decomposition_of_the_new_factor(pairs: int, n: int, seed: int) -> None:
    """Orthogonal iteration shrinks what is left by the ratio of neighbouring eigenvalues in every step."""
    before, after = factors(pairs, n, seed)
    found = anew(before)
    for _ in range(40):
        found = step(ALWAYS, after, found)
    assert (rebuilt(found) - after).norm() < 0.05 * (before - after).norm()


@given(st.integers(2, 8), st.integers(0, 9999))
def test_a_step_keeps_vectors_orthonormal_and_gives_their_rayleigh_quotients(n: int, seed: int) -> None:
    before, after = factors(2, n, seed)
    values, vectors = step(ALWAYS, after, anew(before))
    identity = torch.eye(n, dtype=torch.float64).expand(2, n, n)
    torch.testing.assert_close(vectors.mT @ vectors, identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(values, (vectors.mT @ after @ vectors).diagonal(dim1=-2, dim2=-1), rtol=0, atol=1e-12)


@given(st.integers(0, 9999), st.randoms())
def test_the_order_of_the_last_vectors_does_not_matter(seed: int, random: Any) -> None:
    before, after = factors(1, 6, seed)
    values, vectors = anew(before)
    order = list(range(6))
    random.shuffle(order)
    shuffled = step(ALWAYS, after, (values[:, order], vectors[:, :, order]))
    torch.testing.assert_close(rebuilt(shuffled), rebuilt(step(ALWAYS, after, (values, vectors))), rtol=0, atol=1e-9)


def test_a_step_is_nearer_to_the_new_factor_than_the_old_vectors() -> None:
    before, after = factors(1, 8, seed=3)
    values, vectors = anew(before)
    old = rebuilt(((vectors * (after @ vectors)).sum(-2), vectors))
    new = rebuilt(step(ALWAYS, after, (values, vectors)))
    assert (new - after).norm() < 0.6 * (old - after).norm()


def test_what_exceeds_the_tolerance_is_decomposed_anew_and_nothing_else() -> None:
    before, after = factors(3, 6, seed=1)
    lasts = anew(before)
    changed = torch.stack([before[0], after[1].flip(0, 1), before[2]])  # the second pair has little to do with its last
    solver = EigenSolver(refresh="qr", tolerance=0.05)
    values, vectors = step(solver, changed, lasts)
    alone = step(ALWAYS, changed, lasts)
    for pair in (0, 2):
        assert torch.equal(vectors[pair], alone[1][pair])
    exact = anew(changed[1:2])
    assert torch.equal(vectors[1], exact[1][0]) and torch.equal(values[1], exact[0][0])
    assert not torch.allclose(alone[1][1].abs(), exact[1][0].abs())


def test_no_tolerance_is_eigh() -> None:
    before, after = factors(2, 5, seed=2)
    found, exact = step(EigenSolver(refresh="qr", tolerance=0.0), after, anew(before)), anew(after)
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


def test_diagonal_factors_need_no_vectors() -> None:
    factor = torch.tensor([[0.5, -1e-9, 2.0]])
    (values,) = ALWAYS.refine(factor, torch.zeros(1), (torch.zeros(1, 3),))
    assert values.tolist() == [[0.5, 0.0, 2.0]]


def test_batches_are_refined_pair_by_pair() -> None:
    before, after = factors(4, 5, seed=4)
    lasts = [anew(before[i : i + 1]) for i in range(4)]
    pieces = list(after.split(1))
    shifts = [torch.zeros(1, dtype=torch.float64)] * 4
    together = decompose_all(ALWAYS, pieces, shifts, lasts)
    for found, piece, last in zip(together, pieces, lasts, strict=True):
        assert found is not None
        torch.testing.assert_close(rebuilt(found), rebuilt(step(ALWAYS, piece, last)), rtol=0, atol=1e-10)


def test_a_step_that_fails_is_decomposed_anew() -> None:
    factor, _ = factors(1, 4, seed=5)
    values, vectors = anew(factor)
    found = decompose_safely(ALWAYS, factor, torch.zeros(1), (values, torch.full_like(vectors, torch.nan)))
    assert found is not None
    torch.testing.assert_close(rebuilt(found), factor, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refresh": "svd"}, r"EigenSolver\(refresh='svd'\): must be 'eigh' or 'qr'"),
        ({"every": 0}, r"EigenSolver\(every=0\): must be >= 1"),
        ({"tolerance": -1.0}, r"EigenSolver\(tolerance=-1.0\): must be >= 0"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EigenSolver(**options)
