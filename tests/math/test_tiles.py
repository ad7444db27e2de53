"""Factors that are kept block-diagonal: their storage, their eigenvalues, and directions tile by tile."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_optim import KFACSGD, CurvatureEngine, LayerOptions, OfLargest, OfMean
from kfac_optim.factors import FactorSpec
from kfac_optim.layers import FoundLayers, moments
from kfac_optim.layers.moments import second_moment
from kfac_optim.solvers import Decomposition, EigenSolver, InverseSolver, Solver, damps_factors
from kfac_optim.stacks import tiles
from kfac_optim.stacks.tiles import precondition
from tests.helpers.compare import assert_near

pytestmark = pytest.mark.usefixtures("float64")


@st.composite
def specs(draw: st.DrawFn, pairs: int) -> FactorSpec:
    """A factor that is whole, diagonal, or in blocks as large as a limit allows."""
    dim = draw(st.integers(1, 9))
    blocks = -(-dim // draw(st.integers(1, 10)))
    return FactorSpec(pairs, dim, diagonal=blocks == 1 and draw(st.booleans()), blocks=blocks)


@st.composite
def sides(draw: st.DrawFn) -> tuple[FactorSpec, FactorSpec]:
    """A and G of one layer."""
    pairs = draw(st.integers(1, 3))
    return draw(specs(pairs)), draw(specs(pairs))


def dense(spec: FactorSpec, moment: Tensor) -> list[Tensor]:
    """The matrices ``[n, n]`` of a factor's pairs, of its moment as it is stored."""
    if spec.diagonal:
        return [values.diag() for values in moment]
    return [torch.block_diag(*blocks)[: spec.dim, : spec.dim] for blocks in moment.split(spec.blocks)]


def some_moment(spec: FactorSpec, rows: int) -> Tensor:
    """The second moment of random rows of different sizes; of few rows it is singular."""
    x = torch.randn(rows, 1, spec.pairs, spec.dim) * torch.logspace(0, -2, spec.dim)
    return second_moment(x, diagonal=spec.diagonal, blocks=spec.blocks)


def test_squares_are_added_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of many rows on a CPU; the last part has fewer."""
    rows = torch.randn(7, 3, 2, 5)
    whole = second_moment(rows, diagonal=True)
    monkeypatch.setitem(moments._SQUARES, "cpu", 40)  # four of 21 rows
    assert_near(second_moment(rows, diagonal=True), whole)


class LiveSums(TorchDispatchMode):
    """How many of the sums that torch computes are alive at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._sums = 0, list[weakref.ref[Tensor]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if func.overloadpacket is torch.ops.aten.sum:
            self._sums.append(weakref.ref(found))
            self.most = max(self.most, sum(reference() is not None for reference in self._sums))
        return found


def test_the_sums_of_parts_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary they are as many numbers as the rows."""
    monkeypatch.setitem(moments._SQUARES, "cpu", 10)
    with LiveSums() as live:
        second_moment(torch.randn(7, 3, 2, 5), diagonal=True)
    assert live.most == 2  # one of a part, and that of all before it


@given(pairs=st.integers(1, 3), data=st.data(), seed=st.integers(0, 99))
def test_the_moment_is_that_of_the_blocks(pairs: int, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    spec = data.draw(specs(pairs))
    rows = torch.randn(4, 2, pairs, spec.dim)
    moment = second_moment(rows, diagonal=spec.diagonal, blocks=spec.blocks)
    assert moment.shape == spec.shape
    block = torch.arange(spec.dim) // (1 if spec.diagonal else spec.size)
    whole = second_moment(rows, diagonal=False) * (block[:, None] == block)
    assert_near(torch.stack(dense(spec, moment)), whole)


@given(pairs=st.integers(1, 3), data=st.data(), seed=st.integers(0, 99))
def test_zeros_that_fill_up_a_block_are_in_no_mean(pairs: int, data: st.DataObject, seed: int) -> None:
    torch.manual_seed(seed)
    spec = data.draw(specs(pairs))
    moment = some_moment(spec, 5)
    average = spec.empty(torch.float64, torch.device("cpu"))
    average["value"].copy_(spec.pack(moment))
    torch.testing.assert_close(spec.matrix(average), moment)
    assert_near(spec.mean_eigenvalue(average), torch.stack([m.trace() / spec.dim for m in dense(spec, moment)]))


def solved(solver: Solver, v: Tensor, a: Tensor, g: Tensor, gamma: Tensor, shifts: tuple[Tensor, Tensor]) -> Tensor:
    """What the solver stands for, by dense solves: of (A (x) G + gamma I), or of both damped factors."""
    if isinstance(solver, EigenSolver):
        fisher = torch.kron(a, g) + gamma * torch.eye(len(a) * len(g))
        return torch.linalg.solve(fisher, v.T.flatten()).reshape(v.T.shape).T
    a, g = (factor + shift * torch.eye(len(factor)) for factor, shift in zip((a, g), shifts, strict=True))
    return torch.linalg.solve(g, torch.linalg.solve(a, v.T).T)


@pytest.mark.parametrize("solver", [EigenSolver(0.0), InverseSolver()], ids=["eigen", "inverse"])
@given(sides=sides(), rows=st.integers(1, 12), at_once=st.sampled_from([1, 20, 100]), seed=st.integers(0, 99))
def test_directions_against_the_dense_solve(
    solver: Any, sides: tuple[FactorSpec, FactorSpec], rows: int, at_once: int, seed: int
) -> None:
    """All tiles at once, some of them, or one by one."""
    torch.manual_seed(seed)
    moments = [some_moment(spec, rows) for spec in sides]
    a, g = (dense(spec, moment) for spec, moment in zip(sides, moments, strict=True))
    pairs = sides[0].pairs
    gamma = 10 ** (-2 * torch.rand(pairs))
    means = (torch.stack([m.diagonal().mean() for m in side]) for side in (a, g))
    shifts = solver.shifts(gamma, *means) if damps_factors(solver) else (torch.zeros_like(gamma),) * 2
    decomposed = [
        solver.decompose(moment, spec.for_blocks(shift))
        for spec, moment, shift in zip(sides, moments, shifts, strict=True)
    ]
    v = torch.randn(pairs, sides[1].dim, sides[0].dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "_AT_ONCE", at_once)
        found = precondition(solver, v, (decomposed[0], decomposed[1]), sides, gamma)
    for pair in range(pairs):
        of_pair = (shifts[0][pair], shifts[1][pair])
        assert_near(found[pair], solved(solver, v[pair], a[pair], g[pair], gamma[pair], of_pair))


class LargestTensor(TorchDispatchMode):
    """How many numbers the largest tensor has that torch computes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.constant_pad_nd, torch.ops.aten.clone):
            self.largest = max(self.largest, found.numel())
        return found


def test_tiles_of_very_large_layers_take_no_room_together() -> None:
    """A feed-forward layer of Llama-70B in four blocks: none of what is computed is as large as the gradient."""
    sides = FactorSpec(1, 8192), FactorSpec(1, 28672, blocks=4)
    a, g = ((torch.empty(s.matrices, s.size, device="meta"), torch.empty(s.shape, device="meta")) for s in sides)
    with LargestTensor() as computed:
        precondition(
            EigenSolver(), torch.empty(1, 28672, 8192, device="meta"), (a, g), sides, torch.ones(1, device="meta")
        )
    assert computed.largest == 7168 * 8192


class Turned(InverseSolver):
    """Returns what it has computed with its dimensions in another order in memory."""

    def precondition(self, gradient: Tensor, a: Decomposition, g: Decomposition, gamma: Tensor) -> Tensor:
        return super().precondition(gradient, a, g, gamma).mT.contiguous().mT


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("inv_dtype", [torch.bfloat16, torch.float64])
def test_directions_can_be_sent_and_have_the_gradient_s_dtype(blocks: int, inv_dtype: torch.dtype) -> None:
    """Whatever a solver returns; half of the precision of the decompositions is lost before, not here."""
    sides = FactorSpec(2, 4, blocks=blocks), FactorSpec(2, 3)
    shift, v = torch.full((2,), 0.1), torch.randn(2, 3, 4)
    a, g = (Turned().decompose(some_moment(spec, 9), spec.for_blocks(shift)) for spec in sides)
    stored = tuple(part.to(inv_dtype) for part in a), tuple(part.to(inv_dtype) for part in g)
    found = precondition(Turned(), v, stored, sides, shift)
    exact = tuple(part.double() for part in stored[0]), tuple(part.double() for part in stored[1])
    assert found.is_contiguous() and found.dtype is v.dtype
    assert_near(found, precondition(Turned(), v, exact, sides, shift))


# In an engine --------------------------------------------------------------------------------------------------------


def engine_of(model: nn.Module, **options: Any) -> CurvatureEngine:
    """The engine of a model after one step at learning rate 0, which leaves the model as it is."""
    optimizer = KFACSGD(model, **{"lr": 0.0, "inv_update_steps": 1, "factor_update_steps": 1} | options)
    for p in model.parameters():
        p.grad = None
    model(torch.randn(30, 10)).square().sum(1).mean().backward()
    optimizer.step()
    return optimizer.curvature


@pytest.mark.parametrize("damping", [OfMean(0.1), OfLargest(0.1)], ids=["mean", "largest"])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_damping_and_reports_are_of_the_block_diagonal_matrix(solver: str, damping: Any) -> None:
    """11 and 7 rows in blocks of at most 3: 4 of 3 rows and 3 of 3, with a row and two that belong to nobody."""
    engine = engine_of(nn.Sequential(nn.Linear(10, 7)), max_factor_dim=3, solver=solver, damping=damping)
    (layer,) = engine.layers
    sides = (FactorSpec(1, 11, blocks=4), FactorSpec(1, 7, blocks=3))
    assert layer.specs == sides
    factors = engine.factors(layer)
    spectra = [
        torch.linalg.eigvalsh(dense(spec, factor)[0]).clamp(min=0) for spec, factor in zip(sides, factors, strict=True)
    ]
    report = engine.report(eigenvalues=True)["layers"]["0"]
    for side, values in zip("AG", spectra, strict=True):
        assert_near(torch.tensor(report[side]["eigenvalues"]), values.flip(0), rel=1e-5)
    of = torch.mean if isinstance(damping, OfMean) else torch.amax
    assert report["damping"] == pytest.approx(0.1 * float(of(spectra[0]) * of(spectra[1])), rel=1e-5)


def kept(d_in: int, d_out: int, device: str, **options: Any) -> tuple[Any, Any, list[str]]:
    """Of a Linear without bias: which factors are diagonal, in how many blocks the others are, and what the table says.

    ``options`` are those for layers.
    """
    layer = FoundLayers([nn.Linear(d_in, d_out, bias=False, device=device)], LayerOptions(**options)).layers[0]
    a, g = layer.specs
    return (a.diagonal, g.diagonal), (a.blocks, g.blocks), layer.notes


def test_wide_factors_are_split_as_far_as_the_device_asks_for() -> None:
    assert kept(300, 257, "cpu") == ((False, False), (1, 1), [])
    notes = ["A in 2 blocks of 151 (max_factor_dim=300)", "G in 3 blocks of 257 (max_factor_dim=300)"]
    assert kept(301, 769, "cpu") == ((False, False), (2, 3), notes)
    assert kept(8192, 8193, "meta") == (
        (False, False), (1, 2), ["G in 2 blocks of 4097 (max_factor_dim=8192)"]
    )  # fmt: skip
    assert kept(2101, 6400, "cpu", max_factor_dim=None) == ((False, False), (1, 1), [])
    assert kept(10, 7, "cpu", max_factor_dim=4)[:2] == ((False, False), (3, 2))
    assert kept(10, 7, "cpu", max_factor_dim=1)[:2] == ((True, True), (1, 1))


def test_vocabularies_are_diagonal() -> None:
    """Of GPT-2, Llama-8B, Llama-70B and an LSTM; a feed-forward layer's four times, and ResNet's classes, are not."""
    for d_in, d_out in ((768, 50257), (4096, 128256), (8192, 128256), (1000, 10000)):
        diagonal, blocks, notes = kept(d_in, d_out, "meta")
        assert (diagonal, blocks) == ((False, True), (1, 1))
        assert notes == [f"G diagonal ({d_out} is {d_out // d_in} times {d_in}; max_factor_dim=None: whole)"]
    assert kept(1024, 4096, "meta")[:2] == kept(100, 1024, "meta")[:2] == ((False, False), (1, 1))
    assert kept(2048, 1000, "meta")[:2] == ((False, False), (1, 1))
    assert kept(768, 50257, "cpu", max_factor_dim=None)[:2] == ((False, False), (1, 1))


def test_wide_inputs_are_in_blocks_as_large_as_the_outputs() -> None:
    """Of the MNIST example, a classifier of few classes, a net on large images; 784 pixels, and 9 taps, are whole."""
    diagonal, blocks, notes = kept(9216, 128, "meta")
    assert (diagonal, blocks) == ((False, False), (36, 1))
    assert notes == ["A in 36 blocks of 256 (9216 is 72 times 128; max_factor_dim=None: whole)"]
    assert kept(2048, 10, "meta")[:2] == ((False, False), (8, 1))
    assert kept(50_000, 500, "meta")[:2] == ((False, False), (100, 1))
    assert kept(9216, 128, "cpu", max_factor_dim=100)[:2] == ((False, False), (93, 2))
    assert kept(784, 10, "meta")[:2] == kept(9 * 512, 512, "meta")[:2] == ((False, False), (1, 1))


def test_blocks_follow_a_model_that_moves_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a GPU, whose blocks are larger: also if a state of such a run is loaded there."""
    torch.manual_seed(0)

    def moved() -> KFACSGD:
        monkeypatch.undo()
        optimizer = KFACSGD(nn.Sequential(nn.Linear(301, 3)), lr=0.1, inv_update_steps=1, factor_update_steps=1)
        assert [spec.blocks for spec in optimizer.curvature.layers[0].specs] == [2, 1]
        for module in ("layers.base", "coverage.trained_model"):
            monkeypatch.setattr(f"kfac_optim.{module}.machine_of", lambda device: "accelerator")
        return optimizer

    def train(optimizer: KFACSGD) -> None:
        model = optimizer.curvature.stages.trained.model
        assert model is not None
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 301)).square().mean().backward()
            optimizer.step()
        assert [spec.blocks for spec in optimizer.curvature.layers[0].specs] == [1, 1]
        assert all(block.has_direction for block in optimizer.curvature.stages.blocks)

    first, second = moved(), moved()
    train(first)
    second.load_state_dict(first.state_dict())
    train(second)
    assert second.curvature.step_count == 6


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has all models that exist be on a GPU from then on."""

    def move() -> None:
        for module in ("layers.base", "coverage.trained_model"):
            monkeypatch.setattr(f"kfac_optim.{module}.machine_of", lambda device: "accelerator")

    return move


def test_blocks_of_an_engine_alone_follow_a_model_that_moves(moves: Callable[[], None]) -> None:
    """As those of an optimizer do: under DeepSpeed, which moves the model, it is built before."""
    engines = [
        CurvatureEngine(nn.Sequential(nn.Linear(301, 3)), inv_update_steps=1, factor_update_steps=1) for _ in range(2)
    ]
    moves()
    for engine in engines:
        model = engine.stages.trained.model
        assert model is not None
        if engine is engines[1]:
            engine.load_state_dict(engines[0].state_dict())
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8, 301)).square().mean().backward()
            engine.precondition_(0.1)
        assert [spec.blocks for spec in engine.layers[0].specs] == [1, 1]
        assert all(block.has_direction for block in engine.stages.blocks)
    assert engines[1].step_count == 6


def test_a_loaded_state_outlives_a_move(moves: Callable[[], None]) -> None:
    """Its factors stay in the blocks that they were loaded in."""
    first, second = (
        KFACSGD(nn.Sequential(nn.Linear(301, 3)), lr=0.1, inv_update_steps=1, factor_update_steps=1) for _ in range(2)
    )
    for optimizer in (first, second):
        model = optimizer.curvature.stages.trained.model
        assert model is not None
        if optimizer is second:
            second.load_state_dict(first.state_dict())
            moves()
            before = optimizer.curvature.stages.blocks[0]
        model(torch.randn(8, 301)).square().mean().backward()
        optimizer.step()
    assert second.curvature.stages.blocks == [before]
    assert float(before.state["current"]["A"]["weight"]) > 8
