"""How a refresh is worked off: same shapes as one batch, evenly over the steps, what is large in the background."""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import os
import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import KFACSGD, CurvatureEngine, EigenSolver, Graft, InverseSolver, growing
from kfac_optim.common.grouping import grouped_by_key
from kfac_optim.factors import FactorSpec
from kfac_optim.layers.moments import gram
from kfac_optim.refresh.jobs import FactorJob, Refresh, batch_of, grouped_by_shape
from kfac_optim.refresh.refresher import Refresher
from kfac_optim.solvers import Batch, Failure, decompose_all, decompose_safely
from kfac_optim.stacks.directions import by_parameter
from kfac_optim.stacks.stack import _cat, stack_of
from tests.helpers.files import through_a_file
from tests.helpers.reference import Conv1D

specs = st.builds(FactorSpec, st.integers(1, 3), st.sampled_from([3, 4, 10]), st.booleans())


@dataclass(eq=False)
class Block:
    """Stands in for a block whose A is decomposed by rank 0, and G by rank 1."""

    spec: FactorSpec
    layer: Any = None
    workers: ClassVar[Any] = SimpleNamespace(inverse_workers=(0, 1))

    @property
    def specs(self) -> tuple[FactorSpec, FactorSpec]:
        return self.spec, self.spec


def scheduled(shapes: list[FactorSpec], spread: int) -> tuple[Refresh, dict[Any, FactorSpec]]:
    """A refresh of factors of these shapes by one rank, and its jobs."""
    blocks: list[Any] = [Block(spec) for spec in shapes]
    refresh = Refresh(0, spread, "pending", blocks, 0)
    return refresh, {(block, 0): block.spec for block in blocks}


# Sharing out ---------------------------------------------------------------------------------------------------------


@given(st.lists(specs, min_size=1, max_size=12), st.integers(0, 6))
def test_every_job_is_due_once_within_the_spread(shapes: list[FactorSpec], spread: int) -> None:
    refresh, share = scheduled(shapes, spread)
    due: list[object] = []
    for step in range(spread + 1):
        now = refresh.due(step)
        refresh.finish(now, [()] * len(now))
        due += now
    assert Counter(due) == Counter(list(share))


@given(st.lists(specs, min_size=1, max_size=12), st.integers(1, 6))
def test_a_step_has_its_share_and_at_most_one_batch_more(shapes: list[FactorSpec], spread: int) -> None:
    """Greedy bound: no step exceeds the mean by more than the largest batch, and no batch exceeds a step's share.

    The step that begins, which has collected statistics, is idle where two others or more are left.
    """
    refresh, share = scheduled(shapes, spread)
    working = range(1, spread) if spread > 2 else range(spread)
    mean = sum(spec.cost for spec in shapes) / len(working)
    background = set(refresh.background)
    assert background == {job for job, spec in share.items() if spec.cost > mean}
    for step in range(spread):
        jobs = [job for job, when in refresh.steps.items() if when == step and job not in background]
        assert sum(share[job].cost for job in jobs) <= (2 * mean * (1 + 1e-9) if step in working else 0)


@pytest.mark.parametrize("pairs", [(1, 1, 1, 1, 1, 1), (1, 3, 2, 1, 3, 1)])
def test_same_shapes_are_due_together_as_far_as_the_share_goes(pairs: tuple[int, ...]) -> None:
    """However many pairs they have."""
    shapes = [FactorSpec(p, dim) for p, dim in zip(pairs, (4, 8, 4, 4, 8, 4), strict=True)]
    refresh, share = scheduled(shapes, 4)
    steps = {refresh.steps[job] for job, spec in share.items() if spec.dim == 4}
    assert len(steps) == 1, "all of 4 rows cost less than one of 8"


@given(st.lists(specs, min_size=1, max_size=12), st.integers(0, 6))
@example([FactorSpec(1, 10), FactorSpec(2, 10), FactorSpec(1, 3)], 6)  # the first two in the background
def test_the_largest_is_made_first(shapes: list[FactorSpec], spread: int) -> None:
    refresh, share = scheduled(shapes, spread)
    for jobs in (refresh.background, refresh.due(spread)):
        costs = [share[job].cost for job in jobs]
        assert costs == sorted(costs, reverse=True)


def test_a_new_plan_keeps_what_is_done_of_its_own_jobs() -> None:
    """Other ranks take over layers in the midst of a refresh."""
    refresh, share = scheduled([FactorSpec(1, dim) for dim in (4, 4, 5, 5, 6)], 3)
    done, running, kept_done, kept_running, fresh = (block for block, _ in share)
    refresh.finish([FactorJob(done, 0), FactorJob(kept_done, 0)], [(), ()])
    refresh.background = [FactorJob(running, 0), FactorJob(kept_running, 0)]
    refresh.start_background(lambda job: tuple)
    for block in (done, running):
        vars(block)["workers"] = SimpleNamespace(inverse_workers=(1, 0))
    refresh.schedule(0)
    blocks = (done, kept_done, running, kept_running)
    assert [b for b in blocks if refresh.found(b, 0) is not None] == [kept_done]
    assert [b for b in blocks if refresh.is_running(FactorJob(b, 0))] == [kept_running]
    assert set(refresh.due(3)) == {(done, 1), (running, 1), (kept_running, 0), (fresh, 0)}
    assert refresh.found(kept_done, 0) == () and refresh.found(done, 0) is None


# Batches -------------------------------------------------------------------------------------------------------------


def batch(factors: list[Tensor], shifts: list[Tensor]) -> Batch:
    return Batch(lambda: (torch.cat(factors), torch.cat(shifts)), [len(f) for f in factors])


def factor(pairs: int, n: int, seed: int) -> Tensor:
    rows = torch.randn(pairs, 2 * n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.mT @ rows / n


@pytest.mark.parametrize("solver", [EigenSolver(), InverseSolver()])
@given(st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_a_batch_gives_what_each_factor_gives_alone(
    solver: EigenSolver | InverseSolver, n: int, pairs: list[int]
) -> None:
    factors = [factor(count, n, i) for i, count in enumerate(pairs)]
    shifts = [torch.full((len(f),), 0.1, dtype=f.dtype) for f in factors]
    (found,) = decompose_all(solver, [batch(factors, shifts)], torch.float64)
    for f, shift, parts in zip(factors, shifts, found, strict=True):
        alone = decompose_safely(solver, f, shift, torch.float64)
        assert isinstance(parts, tuple) and isinstance(alone, tuple)
        for part, expected in zip(parts, alone, strict=True):
            torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", [EigenSolver(), InverseSolver()])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 3)])
def test_a_factor_that_has_overflowed_ends_no_training(
    solver: EigenSolver | InverseSolver, shape: tuple[int, ...]
) -> None:
    assert isinstance(decompose_safely(solver, torch.full(shape, torch.nan), torch.zeros(2), torch.float32), Failure)


NEAR = ((1, 10), (2, 9), (3, 9), (1, 4))  # pairs and rows; 4 are too few to go with the others


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_of_nearly_one_size_are_decomposed_by_one_call(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those without full rank, and zeros."""
    factors = [factor(pairs, n, n).to(dtype) for pairs, n in NEAR]
    factors[1][0] = torch.eye(9)[:2].mT @ torch.eye(9)[:2] * 1e-12
    factors[2][1] = 0.0
    device = factors[0].device
    batches = [
        Batch(lambda f=f: (f, f.new_zeros(len(f))), [1] * len(f), (n, device))  # type: ignore[misc]
        for f, (_, n) in zip(factors, NEAR, strict=True)
    ]
    shapes: list[torch.Size] = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (shapes.append(matrix.shape), eigh(matrix))[1])
    found = decompose_all(EigenSolver(), batches, dtype)
    assert shapes == [(1 + 2 + 3, 10, 10), (1, 4, 4)], "none was retried"
    accuracy = 100 * torch.finfo(dtype).eps
    for f, of_batch in zip(factors, found, strict=True):
        for matrix, parts in zip(f, of_batch, strict=True):
            assert isinstance(parts, tuple)
            (values,), (q,) = parts
            scale = float(matrix.abs().max())
            torch.testing.assert_close(values, eigh(matrix)[0].clamp(min=0), rtol=0, atol=accuracy * scale)
            torch.testing.assert_close(q @ values.diag() @ q.mT, matrix, rtol=0, atol=accuracy * scale)
            torch.testing.assert_close(q.mT @ q, torch.eye(len(q), dtype=dtype), rtol=0, atol=accuracy)


def test_a_bad_factor_does_not_take_those_of_other_sizes_along() -> None:
    bad, good = factor(1, 9, 0) * math.nan, factor(1, 10, 1)
    shift = torch.zeros(1, dtype=torch.float64)
    batches = [
        Batch(lambda f=f: (f, shift), [1], (f.shape[-1], f.device))  # type: ignore[misc]
        for f in (bad, good)
    ]
    (failed,), (found,) = decompose_all(EigenSolver(), batches, torch.float64)
    assert isinstance(failed, Failure) and isinstance(found, tuple)
    alone = decompose_safely(EigenSolver(), good, shift, torch.float64)
    assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True))


class Counting(InverseSolver):
    """Counts the pairs in each call."""

    def decompose(self, factor: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        calls.append(len(factor))
        return super().decompose(factor, shift)


calls: list[int] = []


def test_one_call_for_a_batch() -> None:
    calls.clear()
    factors = [factor(1, 4, 0), factor(2, 4, 2)]
    decompose_all(Counting(), [batch(factors, [torch.ones(len(f), dtype=f.dtype) for f in factors])], torch.float64)
    assert calls == [3]


def test_all_batches_are_judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read would wait for an accelerator."""
    reads: list[int] = []
    inner = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        reads.append(tensor.numel())
        return inner(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    batches = [batch([factor(1, n, n)] * 2, [torch.zeros(1, dtype=torch.float64)] * 2) for n in (3, 4, 5)]
    decompose_all(EigenSolver(), batches, torch.float64)
    assert reads == [3 * 3], "are eigenvalues and eigenvectors finite, and these orthonormal"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=12), st.integers(0, 20))
def test_batches_are_of_one_key_and_of_bounded_size(items: list[tuple[int, int]], limit: int) -> None:
    found = grouped_by_key(items, lambda item: item[0], lambda item: item[1], limit)
    assert sorted(item for batch in found for item in batch) == sorted(items)
    for batch in found:
        assert len({key for key, _ in batch}) == 1
        assert len(batch) == 1 or sum(size for _, size in batch) <= limit
    for key in range(3):
        own = [batch for batch in found if batch[0][0] == key]
        for batch, after in zip(own, own[1:], strict=False):
            assert sum(size for _, size in batch) + after[0][1] > limit, "there was room for one more"


@given(st.lists(st.tuples(specs, st.sampled_from(["cpu", "cuda:0", "cuda:1"])), max_size=12))
def test_what_is_decomposed_together_is_of_one_shape_on_one_device(factors: list[tuple[FactorSpec, str]]) -> None:
    """Layers of a model that is spread over devices; on the CPU each on its own."""
    jobs: list[Any] = []
    for spec, device in factors:
        layer = SimpleNamespace(weight=SimpleNamespace(device=torch.device(device)))
        jobs.append(FactorJob(Block(spec, layer), len(jobs) % 2))  # type: ignore[arg-type]
    found = grouped_by_shape(dict.fromkeys(jobs))
    assert Counter(job for batch in found for job in batch) == Counter(jobs)
    on_gpu = []
    for batch in found:
        (kind,) = {(block.specs[0].shape[1:], block.layer.weight.device) for block, _ in batch}
        if kind[1].type == "cuda":
            on_gpu.append(kind)
        else:
            assert len(batch) == 1
    assert len(on_gpu) == len(set(on_gpu)), "as few batches as can be"


def test_only_on_accelerators_sizes_are_mixed() -> None:
    refresh = Refresh(0, 0, "current", [], 0)
    rows = {}
    for device in ("cpu", "cuda:0"):
        layer = SimpleNamespace(weight=SimpleNamespace(device=torch.device(device)))
        for spec in (FactorSpec(1, 9), FactorSpec(1, 9, diagonal=True)):
            block: Any = Block(spec, layer)
            rows[device, spec.diagonal] = batch_of([FactorJob(block, 0)], refresh, EigenSolver(), torch.float32).rows
    assert rows.pop(("cuda:0", False)) == (9, torch.device("cuda:0"))
    assert set(rows.values()) == {None}


@pytest.mark.parametrize("max_factor_dim", [None, 4])
def test_a_batch_is_made_of_what_its_jobs_are_made_of(max_factor_dim: int | None) -> None:
    """Each factor is shifted by its own layer's damping, and each of its blocks alike."""
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.LayerNorm(6))
    engine = CurvatureEngine(net, max_factor_dim=max_factor_dim, damping=1.0)
    net(torch.randn(8, 6)).square().mean().backward()
    engine.precondition_(lr=0.1)
    gammas = {block: 10.0 ** -(1 + torch.arange(block.layer.pairs) + i) for i, block in enumerate(engine.stages.blocks)}
    refresh, solver = Refresh(0, 0, "current", engine.stages.blocks, 0, gammas), InverseSolver()

    def made(jobs: list[Any]) -> tuple[Tensor, Tensor]:
        batch = batch_of(jobs, refresh, solver, torch.float32)
        factors, shifts = batch.make()
        assert len(factors) == len(shifts) == sum(batch.sizes)
        return factors, shifts

    *linear, norm = engine.stages.blocks
    for side in range(2):
        jobs = [FactorJob(block, side) for block in linear]
        for found, expected in zip(made(jobs), zip(*(made([job]) for job in jobs), strict=True), strict=True):
            assert torch.equal(found, torch.cat(expected))
        for job, shifts in zip(jobs, (made([job])[1] for job in jobs), strict=True):
            expected = solver.shifts(gammas[job.block], *job.block.factors("current").means())[side]
            assert shifts.tolist() == expected.tolist() * job.spec.blocks
    assert made([FactorJob(norm, 0)])[1].tolist() == [0.0] * 6, "A is the constant 1"
    assert torch.equal(made([FactorJob(norm, 1)])[1], gammas[norm])
    assert batch_of([FactorJob(norm, 1)], refresh, solver, torch.float64).make()[0].dtype is torch.float64


def test_on_the_cpu_every_factor_is_decomposed_on_its_own() -> None:
    """Where a run is resumed other factors are due together; each has the same bits all the same."""
    calls.clear()
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    optimizer = KFACSGD(net, lr=0.1, solver=Counting())
    net(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    assert calls == [1] * 6


def test_a_bad_factor_does_not_take_its_batch_along() -> None:
    factors = [factor(1, 4, 0), -factor(1, 4, 1), factor(1, 4, 2)]
    shifts = [torch.full((1,), 0.1, dtype=torch.float64)] * 3
    ok, found = decompose_all(InverseSolver(), [batch(factors[:1], shifts[:1]), batch(factors, shifts)], torch.float64)
    assert not any(isinstance(result, Failure) for result in ok), "another batch"
    assert isinstance(found[1], Failure) and "linalg.cholesky" in found[1].reason
    for i in (0, 2):
        parts, alone = found[i], decompose_safely(InverseSolver(), factors[i], shifts[i], torch.float64)
        assert isinstance(parts, tuple) and isinstance(alone, tuple)
        assert all(torch.equal(x, y) for x, y in zip(parts, alone, strict=True))


@given(st.integers(1, 700), st.integers(1, 2))
def test_gram_is_the_product(d: int, pairs: int) -> None:
    rows = torch.randn(pairs, 5, d, dtype=torch.float64)
    product = gram(rows)
    torch.testing.assert_close(product, rows.mT @ rows, rtol=1e-12, atol=1e-12)


# Beside the training -------------------------------------------------------------------------------------------------

BESIDE = {"factor_update_steps": 1, "inv_update_steps": 4, "spread": 3}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def steps(net: nn.Module, optimizer: KFACSGD, first: int, last: int) -> list[Tensor]:
    """Weights after each step."""
    seen = []
    for step in range(first, last):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten().clone() for p in net.parameters()]))
    return seen


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of every decomposition."""
    names: list[str] = []
    for solver in (EigenSolver, InverseSolver):

        def decompose(self: Any, factor: Tensor, shift: Tensor, inner: Any = solver.decompose) -> tuple[Tensor, ...]:
            names.append(threading.current_thread().name)
            return inner(self, factor, shift)

        monkeypatch.setattr(solver, "decompose", decompose)
    return names


def test_what_exceeds_a_steps_share_runs_on_the_worker(threads: list[str]) -> None:
    net = model()
    optimizer = KFACSGD(net, lr=0.1, **BESIDE)
    steps(net, optimizer, 0, 4)
    assert set(threads) == {"MainThread"}, "the first refresh is immediate"
    steps(net, optimizer, 4, 8)
    beside = [name for name in threads if name.startswith("kfac-decomposition")]
    assert len(beside) == 1, "the 41 x 41 factor"
    assert len(threads) == 12
    assert "decomposition in the background" in optimizer.curvature.profile()


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_work_in_the_background_changes_no_bit(
    solver: str, threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    courses = []
    for beside in (True, False):
        net = model()
        threads.clear()
        if not beside:
            monkeypatch.setattr(Refresher, "_decompose_in_background", at_once)
        courses.append(steps(net, KFACSGD(net, lr=0.1, solver=solver, **BESIDE), 0, 12))
        assert any(name.startswith("kfac") for name in threads) == beside
    assert all(torch.equal(x, y) for x, y in zip(*courses, strict=True))


def at_once(self: Refresher, factor: Tensor, shift: Tensor) -> Any:
    """In the place of ``Refresher._decompose_in_background``: nothing runs in the background."""
    ((result,),) = decompose_all(self.solver, [batch([factor], [shift])], self.inv_dtype)
    return lambda: result


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_refresh_under_way_survives(way: str) -> None:
    net = model()
    optimizer = KFACSGD(net, lr=0.1, **BESIDE)
    steps(net, optimizer, 0, 6)
    assert (pending := optimizer.curvature.stages.refresher.in_progress) is not None
    assert any(map(pending.is_running, pending.background))
    if way == "state_dict":
        other = copy.deepcopy(net)
        resumed = KFACSGD(other, lr=0.1, **BESIDE)
        resumed.load_state_dict(optimizer.state_dict())
    elif way == "deepcopy":
        other, resumed = copy.deepcopy((net, optimizer))
    else:
        other, resumed = through_a_file((net, optimizer), plain=False)
    expected, found = steps(net, optimizer, 6, 12), steps(other, resumed, 6, 12)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork processes")
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's optimizers ask CUDA, which fails in a forked process")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("taken", [8, 10])  # between two refreshes, and in the midst of one
def test_a_forked_process_has_a_worker_of_its_own(taken: int) -> None:
    net = model()
    optimizer = KFACSGD(net, lr=0.1, **BESIDE)
    steps(net, optimizer, 0, taken)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def go_on() -> None:
        torch.set_num_threads(1)
        sender.send([weights.tolist() for weights in steps(net, optimizer, taken, 20)])

    child = multiprocessing.get_context("fork").Process(target=go_on, daemon=True)
    child.start()
    try:
        assert receiver.poll(120), "it waits for a thread that it does not have"
        assert receiver.recv() == [weights.tolist() for weights in steps(net, optimizer, taken, 20)]
    finally:
        child.kill()
        child.join()


def test_a_failure_in_the_background_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    optimizer = KFACSGD(net, lr=0.1, **BESIDE)
    steps(net, optimizer, 0, 4)
    monkeypatch.setattr(EigenSolver, "decompose", lambda self, factor, shift: (factor[..., 0] * math.nan, factor))
    with pytest.warns(UserWarning, match="could not be decomposed"):
        steps(net, optimizer, 4, 8)
    assert optimizer.curvature.report()["failed_decompositions"] == 3


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kfac-decomposition")]


class Held(EigenSolver):
    """Waits for a signal where it decomposes in the background."""

    begun, go_on = threading.Event(), threading.Event()
    made: ClassVar[list[int]] = []

    def decompose(self, factor: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.go_on.wait(60)
            self.made.append(factor.shape[-1])
        return super().decompose(factor, shift)


@pytest.mark.parametrize("end", ["close", "last reference", "loading"])
def test_the_thread_ends_with_the_engine(end: str) -> None:
    """Or the refresh. It finishes what it has begun; of the factors that wait for it nothing else is decomposed."""
    before = workers()
    for signal in (Held.begun, Held.go_on, Held.made):
        signal.clear()
    net = model()
    engine = CurvatureEngine(net, scaling=None, solver=Held(), **BESIDE)
    for step in range(5):
        net.zero_grad()
        net(torch.randn(8, 40, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        engine.precondition_()
    (thread,) = [thread for thread in workers() if thread not in before]
    assert Held.begun.wait(60)
    watched = weakref.ref(engine)
    gc.collect()
    gc.disable()  # an engine in a cycle would keep its hooks and its thread until the collector runs
    try:
        if end == "close":
            engine.close()
        elif end == "loading":
            engine.load_state_dict(engine.state_dict())
        else:
            del engine
            assert watched() is None
    finally:
        gc.enable()
    Held.go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert Held.made == [41]


# Stacks --------------------------------------------------------------------------------------------------------------


class Repeated(nn.Module):
    """Layers of the same shape; one of them is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(5) for _ in range(3))

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            if i != skip:
                x = norm(layer(x)).tanh()
        return x


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_decompositions_of_a_stack_are_held_once(solver: str) -> None:
    """Also those that were made in different steps; then each has a storage of its own at first."""
    net = Repeated()
    optimizer = KFACSGD(net, lr=0.1, solver=solver, factor_update_steps=1, inv_update_steps=8, spread=6)
    for _ in range(15):
        optimizer.zero_grad()
        net(torch.randn(7, 5)).square().mean().backward()
        optimizer.step()
    preconditioner = optimizer.curvature.stages.preconditioner
    preconditioner._current_stacks(optimizer.curvature.stages.blocks)
    assert len(preconditioner._stacks) == 2
    for stack in preconditioner._stacks:
        assert stack.decomposed is not None
        held = [{part.untyped_storage().data_ptr() for part in side} for side in stack.decomposed]
        for used in stack.in_use:
            assert used.sides is not None
            assert [{part.untyped_storage().data_ptr() for part in side} for side in used.sides] == held


@pytest.mark.parametrize("scaling", ["kl_clip", "unit", "orthogonal", "graft", None])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_layers_of_one_shape_together_equal_each_on_its_own(
    scaling: str | None, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut into stacks of one layer each, the directions are the same."""

    def one_by_one(known: Any) -> Any:
        return [stack_of([block], engine.damping_object, block.in_use.sides) for block in known]

    torch.manual_seed(0)
    net = Repeated().double()
    options = {"factor_dtype": torch.float64, "inv_dtype": torch.float64}
    optimizer = KFACSGD(
        net, lr=0.1, scaling=scaling, solver=solver, factor_update_steps=1, inv_update_steps=2, **options
    )
    engine = optimizer.curvature
    for step in range(5):
        net(torch.randn(7, 5, dtype=torch.float64), 1 if step == 3 else None).square().mean().backward()
        moments = {p: p.grad.clone() for p in net.parameters() if p.grad is not None}
        if step:
            lr = dict.fromkeys(net.parameters(), 0.1)
            lr[net.layers[2].bias] = 0.3
            together = by_parameter(engine.directions(moments, lr), moments)
            preconditioner = engine.stages.preconditioner
            assert len(preconditioner._stacks) == 2
            with monkeypatch.context() as patch:
                patch.setattr(preconditioner, "_current_stacks", one_by_one)
                alone = by_parameter(engine.directions(moments, lr), moments)
            assert together.keys() == alone.keys()
            for p, direction in together.items():
                torch.testing.assert_close(direction, alone[p], rtol=1e-12, atol=1e-14)
        optimizer.step()
        optimizer.zero_grad()


def test_weights_that_are_transposes_make_stacks_of_their_own() -> None:
    """Each stack's matrices then lie in memory as all of its weights do."""
    net = nn.Sequential(nn.Linear(4, 4), Conv1D(4, 4), nn.Linear(4, 4), Conv1D(4, 4))
    optimizer = KFACSGD(net, lr=0.1, factor_update_steps=1)
    net(torch.randn(7, 4)).square().mean().backward()
    optimizer.step()
    stacks = optimizer.curvature.stages.preconditioner._stacks
    assert [[block.layer.name for block in stack.blocks] for stack in stacks] == [["0", "2"], ["1", "3"]]
    for stack in stacks:
        vectors = {p: torch.randn(p.shape) for p in stack.layout.parameters}
        whole = stack.layout.fill(vectors, torch.float32)
        assert stack.layout.memory_view(whole).is_contiguous()
        weights = [part for p, _, part in stack.layout.read(whole, vectors) if p.dim() == 2]
        assert all(
            torch.equal(weight, vectors[block.layer.weight])
            for weight, block in zip(weights, stack.blocks, strict=True)
        )


def test_a_refresh_frees_the_decompositions_that_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the step that ends it computes no directions: while none is turned, every fourth does."""
    monkeypatch.setattr("kfac_optim.steering.trust.moved", lambda notches, *_, **__: 0)
    net = Repeated()
    optimizer = KFACSGD(net, lr=0.1, scaling=Graft(stretch=False), factor_update_steps=1, inv_update_steps=5, spread=0)
    engine = optimizer.curvature
    for _ in range(6):
        before = [weakref.ref(stack) for stack in engine.stages.preconditioner._stacks]
        optimizer.zero_grad()
        net(torch.randn(7, 5)).square().mean().backward()
        optimizer.step()
    assert engine.stages.refresher.last_refresh == 5
    assert before and not any(stack() for stack in before)


def test_a_stack_of_what_was_decomposed_together_is_no_copy() -> None:
    """Else it is one: a part of a storage would keep all of it alive, and other orders are no tensor."""
    whole = torch.arange(24.0).view(6, 2, 2)
    parts = whole.split([1, 2, 3])
    stack = _cat(parts)
    assert torch.equal(stack, whole) and stack.data_ptr() == whole.data_ptr()
    for some in ([parts[1], parts[0], parts[2]], parts[:2], [parts[0]], [*parts[:2], parts[2].clone()], [whole, whole]):
        assert torch.equal(_cat(some), torch.cat(list(some))) and _cat(some).data_ptr() != whole.data_ptr()
    assert torch.equal(_cat([whole.mT]), whole.mT)


# The default ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "late"), [(9, 0), (10, 1), (25, 2), (growing(0.5, 4), 2)])
def test_by_default_a_refresh_takes_a_tenth_of_the_interval(interval: int | growing, late: int) -> None:
    """How many steps after its start a refresh is in use; the growing interval is 22 when it is due at step 44."""
    net = model()
    optimizer = KFACSGD(net, lr=0.01, inv_update_steps=interval, factor_update_steps=1)
    refreshed: dict[int, int] = {}
    for step in range(60):
        steps(net, optimizer, step, step + 1)
        start = optimizer.curvature.stages.refresher.frozen_at
        assert start is not None
        refreshed.setdefault(start, step - start)
    assert refreshed.pop(0) == 0, "the first refresh is immediate"
    last = max(start for start in refreshed)
    assert refreshed[last] == late
