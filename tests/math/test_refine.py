"""``EigenSolver(refresh="qr")``: eigenvectors that follow the factors from refresh to refresh."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import KAISA, KFACSGD, EigenSolver, memory_estimate
from kfac_optim.solvers import Decomposition, decompose_all, decompose_safely
from tests.helpers.compare import assert_all_near, assert_identical, values
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64
from tests.helpers.training import make_model, train

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


# In training ---------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_steps": 1, "inv_update_steps": 4, "damping": 0.1}
SPREADS = [0, 3]


class Watched(EigenSolver):
    """Notes what is made, of what."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "log", [])

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        found = super().decompose(factor, shift)
        self.log.append(("decompose", factor.clone(), None, found))
        return found

    def refine(self, factor: Tensor, shift: Tensor, last: Decomposition) -> Decomposition:
        found = super().refine(factor, shift, last)
        self.log.append(("refine", factor.clone(), last, found))
        return found


def trained(solver: EigenSolver, steps: int, **options: Any) -> tuple[nn.Module, KFACSGD]:
    model = make_model()
    optimizer = KFACSGD(model, solver=solver, **{**OPTIONS, **options})
    train(model, optimizer, range(steps))
    return model, optimizer


def test_without_tolerance_training_is_that_of_eigh() -> None:
    model, _ = trained(EigenSolver(refresh="qr", tolerance=0.0), 14, spread=0)
    other, _ = trained(EigenSolver(), 14, spread=0)
    assert_identical(model, other)


@pytest.mark.parametrize("spread", SPREADS)
def test_every_refresh_starts_from_the_one_before_and_some_anew(spread: int) -> None:
    """Refreshes at 0, 4, 8, ...: those at 0 and 12 anew. The Linear layers have factors of 5 and 6, and of 7 and 3."""
    solver = Watched(refresh="qr", every=3, tolerance=float("inf"))
    trained(solver, 20, spread=spread)
    for size in (5, 6, 7, 3):
        kinds, factors, lasts, results = zip(*(e for e in solver.log if e[1].shape[-2:] == (size, size)), strict=True)
        assert kinds == ("decompose", "refine", "refine", "decompose", "refine")
        for i in (1, 2, 4):
            assert all(torch.equal(x, y) for x, y in zip(lasts[i], results[i - 1], strict=True))
            assert not torch.equal(factors[i], factors[i - 1])


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("steps", [3, 5, 6, 9, 13])
def test_a_resumed_run_continues_bit_for_bit(spread: int, steps: int) -> None:
    solver = EigenSolver(refresh="qr", every=3, tolerance=float("inf"))
    model, optimizer = trained(solver, steps, spread=spread)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = make_model(seed=1)
    other.load_state_dict(weights)
    resumed = KFACSGD(other, solver=solver, **{**OPTIONS, "spread": spread})
    resumed.load_state_dict(state)
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, range(steps, steps + 12))
    assert_identical(model, other)
    eigh, _ = trained(EigenSolver(), steps + 12, spread=spread)
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), eigh.parameters(), strict=True))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_a_copy_continues_bit_for_bit(way: Callable[[Any], Any]) -> None:
    model, optimizer = trained(EigenSolver(refresh="qr", tolerance=float("inf")), 6, spread=3)
    other, copied = way((model, optimizer))
    for m, o in ((model, optimizer), (other, copied)):
        train(m, o, range(6, 18))
    assert_identical(model, other)


def test_overlap_changes_no_bit() -> None:
    models = [
        trained(EigenSolver(refresh="qr", tolerance=float("inf"), overlap=overlap), 18, spread=3)[0]
        for overlap in (False, True)
    ]
    assert_identical(*models)


@pytest.mark.parametrize("first", ["qr", "eigh"])
def test_the_solver_may_change_when_a_run_is_resumed(first: str) -> None:
    """Decompositions are rebuilt from the factors where the state has none, and left out where nobody uses them."""
    solvers = {name: EigenSolver(refresh=name, tolerance=0.0) for name in ("qr", "eigh")}  # type: ignore[arg-type]
    second = "eigh" if first == "qr" else "qr"
    model, optimizer = trained(solvers[first], 6, spread=0)
    other = copy.deepcopy(model)
    resumed = KFACSGD(other, solver=solvers[second], **{**OPTIONS, "spread": 0})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, range(6, 12))
    assert_identical(model, other)
    has = {name for state in resumed.state.values() for name in state.get("kfac", {}) if name.endswith("basis")}
    assert has == ({"A_basis", "G_basis"} if second == "qr" else set())


def test_a_damaged_basis_is_refused_before_anything_is_changed() -> None:
    model, optimizer = trained(EigenSolver(refresh="qr"), 6, spread=0)
    damages: dict[str, Callable[[Any], Any]] = {
        "that is not finite": lambda basis: basis["1"].fill_(torch.nan),
        "of another shape": lambda basis: basis.update({"1": torch.zeros(1, 2, 2)}),
    }
    for message, damage in damages.items():
        state = copy.deepcopy(optimizer.state_dict())
        damage(state["state"][0]["kfac"]["A_basis"])
        fresh = KFACSGD(make_model(), solver=EigenSolver(refresh="qr"), **{**OPTIONS, "spread": 0})
        with pytest.raises(ValueError, match=f"has in A_basis a decomposition {message}"):
            fresh.load_state_dict(state)
        assert fresh.curvature.step_count == 0


def test_the_state_has_the_same_keys_from_the_first_step_on() -> None:
    """A step on zero gradients with lr = 0, as torch.distributed.checkpoint takes it, makes room for everything."""

    def keys(optimizer: KFACSGD) -> list[tuple[Any, ...]]:
        items = [
            (i, name, part, tuple(tensor.shape))
            for i, state in optimizer.state_dict()["state"].items()
            for name, value in state.get("kfac", {}).items()
            if isinstance(value, dict)
            for part, tensor in value.items()
        ]
        return sorted(items)

    solver = EigenSolver(refresh="qr")
    model = make_model()
    dry = KFACSGD(model, solver=solver, **{**OPTIONS, "lr": 0.0})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    dry.step()
    assert keys(dry) == keys(trained(solver, 9)[1])
    assert any(name == "G_basis" for _, name, *_ in keys(dry))


def test_the_bases_are_counted_as_memory() -> None:
    _, optimizer = trained(EigenSolver(refresh="qr"), 6)
    _, plain = trained(EigenSolver(), 6)
    bases = [
        tensor
        for state in optimizer.state.values()
        for side in "AG"
        for tensor in state.get("kfac", {}).get(f"{side}_basis", {}).values()
    ]
    more = {
        kind: count - plain.curvature.memory_estimate()[kind]
        for kind, count in optimizer.curvature.memory_estimate().items()
    }
    own = sum(tensor.numel() * tensor.element_size() for tensor in bases)
    assert own > 0 and more == {**dict.fromkeys(more, 0), "snapshots": own, "total": own}


# On several ranks ----------------------------------------------------------------------------------------------------


def on_ranks(rank: int, world_size: int, assignment: Any) -> list[Tensor]:
    model = make_model().double()
    wrapped: nn.Module = DDP(model) if world_size > 1 else model
    solver = EigenSolver(refresh="qr", every=4, tolerance=float("inf"))
    optimizer = KFACSGD(wrapped, solver=solver, assignment=assignment, spread=2, **{**OPTIONS, **FLOAT64})
    train(wrapped, optimizer, range(14), rank=rank, world_size=world_size)
    return values(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "assignment", ["factor-wise", KAISA(grad_worker_fraction=1.0)], ids=["factor-wise", "KAISA(1)"]
)
def test_two_ranks_give_what_one_process_gives(assignment: Any) -> None:
    assert_all_near(run_ranks(2, on_ranks, assignment), on_ranks(0, 1, "factor-wise"))


@pytest.mark.parametrize(
    "assignment", ["layer-wise", KAISA(grad_worker_fraction=0.5)], ids=["layer-wise", "KAISA(1/2)"]
)
def test_strategies_that_spread_the_decompositions_are_refused_with_the_remedy(assignment: Any) -> None:
    with pytest.raises(ValueError, match=r"on every rank; use assignment='factor-wise' or KAISA"):
        memory_estimate(make_model(), world_size=2, assignment=assignment, solver=EigenSolver(refresh="qr"))
