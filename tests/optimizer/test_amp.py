"""Mixed precision: autocast, gradient scaling, models and curvature in half precision.

A loss scale that is a power of two changes nothing but exponents, so a scaled run equals the unscaled one to the little
that leaves float16's range.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, InverseSolver, KFACAdam, OfMean
from kfac_optim.capture.microbatch import MicroBatch
from kfac_optim.capture.statistics import StepStatistics
from kfac_optim.common.precision import full_precision
from kfac_optim.layers import RowsLayer
from kfac_optim.optimizers import KFACMixin
from kfac_optim.stacks.directions import by_parameter
from tests.helpers.compare import assert_near, assert_same_factors, assert_same_weights, factors_of, twins
from tests.helpers.ranks import run_ranks
from tests.helpers.training import Batch, clipping, train

BFLOAT16_TOL = 0.03  # 8 bits of mantissa (2^-9 relative rounding), through three layers and a square
FLOAT16_TOL = 3e-3  # 11 bits (2^-12), the same way
UNDERFLOW_TOL = 1e-3  # what a loss scale of 1 loses below 6e-8; the scaled run keeps it
FLOAT32_TOL = 1e-5  # the same float32 arithmetic after exact scaling, a few steps of it
# Storage in half precision rounds the largest eigenvalues (some ten times the mean) by 2^-12 or 2^-9, against a damping
# of one mean eigenvalue. Twice what was measured.
STORED_TOL = {torch.float16: 0.01, torch.bfloat16: 0.07}
SCALE = 2.0**8

Backward = Callable[[Tensor], None]


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int) -> list[Batch]:
    return [(torch.randn(8, 1, 6, 6), torch.randint(3, (8,))) for _ in range(count)]


def sgd(model: nn.Module, **keywords: object) -> KFACSGD:
    options = {"lr": 0.1, "momentum": 0.9, "damping": 0.03, "factor_update_steps": 1, "inv_update_steps": 1}
    return KFACSGD(model, **(options | keywords))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def test_bfloat16_autocast_gives_the_factors_of_float32() -> None:
    half, full = twins(network)
    first, second, data = sgd(half, lr=0.0), sgd(full, lr=0.0), batches(4)
    train(half, first, data, autocast=torch.bfloat16)
    train(full, second, data)
    assert_same_factors(first, second, BFLOAT16_TOL)
    assert_near(factors_of(first)["0.A"], factors_of(second)["0.A"], "the float32 input's A", FLOAT32_TOL)
    assert all(p.dtype is torch.float32 for p in half.parameters())
    assert {f.dtype for layer in first.curvature.layers for f in first.curvature.factors(layer)} == {torch.float32}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("later", [False, True])
def test_loss_scaling_leaves_no_trace(clip: float | None, later: bool) -> None:
    scaled, plain = twins(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)  # the scale doubles twice on the way
    first, second, data = sgd(scaled, grad_scaler=None if later else scaler), sgd(plain), batches(5)
    if later:
        first.curvature.grad_scaler = scaler
    train(scaled, first, data, autocast=torch.float16, scaler=scaler, before_step=clipping(scaled, clip))
    train(plain, second, data, autocast=torch.float16, before_step=clipping(plain, clip))
    assert scaler.get_scale() == 4 * SCALE
    assert_same_factors(first, second, UNDERFLOW_TOL)
    assert_same_weights(scaled, plain, UNDERFLOW_TOL)


def test_scaled_float16_gives_the_factors_of_float32() -> None:
    half, full = twins(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    first, second, data = sgd(half, lr=0.0, grad_scaler=scaler), sgd(full, lr=0.0), batches(4)
    train(half, first, data, autocast=torch.float16, scaler=scaler)
    train(full, second, data)
    assert_same_factors(first, second, FLOAT16_TOL)


def test_without_the_scaler_the_loss_counts_as_scaled() -> None:
    """What ``grad_scaler=`` is for: a scaled loss has a G that is the scale's square larger."""
    model, plain = twins(network)
    first, second, data = sgd(model, lr=0.0), sgd(plain, lr=0.0), batches(1)
    train(model, first, data, scaler=torch.amp.GradScaler("cpu", init_scale=SCALE))
    train(plain, second, data)
    for name, factor in factors_of(second).items():
        times = SCALE**2 if name.endswith("G") else 1.0
        assert_near(factors_of(first)[name], times * factor, name, FLOAT32_TOL)


def test_a_disabled_scaler_is_no_scaler() -> None:
    model, plain = twins(network)
    scaler, data = torch.amp.GradScaler("cpu", enabled=False), batches(2)
    first, second = sgd(model, grad_scaler=scaler), sgd(plain)
    train(model, first, data, scaler=scaler)
    train(plain, second, data)
    assert_same_factors(first, second, FLOAT32_TOL)
    assert_same_weights(model, plain, FLOAT32_TOL)


# Overflow ------------------------------------------------------------------------------------------------------------


def overflow_in_the_gradient(model: nn.Module, loss: Tensor) -> None:
    """All the layers' own gradients are finite: their moments can't tell."""
    loss.backward()
    next(model.parameters()).grad[0] = torch.inf


def overflow_in_the_loss(model: nn.Module, loss: Tensor) -> None:
    (loss * torch.inf).backward()


@pytest.mark.parametrize("overflow", [overflow_in_the_gradient, overflow_in_the_loss])
@pytest.mark.parametrize("whose_zero_grad", ["optimizer", "model", "model in place"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_overflowed_steps_leave_no_trace(
    overflow: Callable[[nn.Module, Tensor], None], whose_zero_grad: str, fused: bool, clip: float | None
) -> None:
    """A run with overflows at its first step, and twice in a row later, equals the run without those batches."""
    model, plain = twins(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    first, second = sgd(model, grad_scaler=scaler, fused=fused), sgd(plain)
    data, bad = batches(8), (0, 4, 5)
    for i, batch in enumerate(data):
        (first if whose_zero_grad == "optimizer" else model).zero_grad(set_to_none="in place" not in whose_zero_grad)
        loss = scaler.scale(loss_of(model, batch))
        overflow(model, loss) if i in bad else loss.backward()
        if clip is not None:
            scaler.unscale_(first)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(first)
        scaler.update()
    train(plain, second, [batch for i, batch in enumerate(data) if i not in bad], before_step=clipping(plain, clip))
    assert scaler.get_scale() == SCALE / 2 ** len(bad)
    assert_same_factors(first, second, FLOAT32_TOL)
    assert_same_weights(model, plain, FLOAT32_TOL)
    assert first.curvature.report()["skipped_batches"] == 0
    assert first.curvature.report()["step"] == len(data) - len(bad)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
@pytest.mark.parametrize("enabled", [False, True])
def test_fused_base_class(cls: type[KFACMixin], enabled: bool) -> None:
    """Torch's fused kernels unscale by themselves; ours must leave that, and skipping, to the scaler."""
    model, plain = twins(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if enabled else None
    options = {"lr": 0.01, "factor_update_steps": 1, "inv_update_steps": 1}
    first, second = cls(model, fused=True, grad_scaler=scaler, **options), cls(plain, **options)
    assert first._step_supports_amp_scaling is False
    data = batches(3)
    train(model, first, data, scaler=scaler)
    train(plain, second, data)
    assert_same_factors(first, second, FLOAT32_TOL)
    assert_same_weights(model, plain, FLOAT32_TOL)


def test_overflowed_micro_batch_of_an_accumulated_step() -> None:
    """The scaler takes all micro-batches of a step or none, and so do the statistics."""
    model, plain = twins(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    first, second = sgd(model, grad_scaler=scaler), sgd(plain)
    data = batches(6)
    for step, pair in enumerate(zip(data[::2], data[1::2], strict=True)):
        model.zero_grad()
        for half, batch in enumerate(pair):
            loss = scaler.scale(loss_of(model, batch) / 2)
            ((loss * torch.inf) if (step, half) == (1, 1) else loss).backward()
        scaler.step(first)
        scaler.update()
    for pair in (data[:2], data[4:]):
        plain.zero_grad()
        for batch in pair:
            (loss_of(plain, batch) / 2).backward()
        second.step()
    assert_same_factors(first, second, FLOAT32_TOL)
    assert_same_weights(model, plain, FLOAT32_TOL)


def test_a_smaller_loss_scale_leaves_out_what_came_before() -> None:
    """Those micro-batches are of a step that was not taken, whether or not anybody clears the gradients."""
    statistics = StepStatistics()
    for scale, value in ((4.0, 1.0), (4.0, 2.0), (2.0, 3.0), (2.0, 4.0)):
        batch = MicroBatch()
        batch.add(0, torch.tensor([[value]]), 5, torch.tensor([[10 * value]]))
        statistics.add(batch.sums, batch.terms, batch.rows, torch.tensor(scale), drop_overflowed=True)
    settled = statistics.resolve(lambda flag: flag.view(-1).tolist())
    assert settled.any_taken and settled.all_terms == (2, 2) and settled.skipped == 0
    assert tuple(map(float, settled.sums[0])) == (7.0, 70.0)
    assert settled.rows[0] == 10 and settled.terms[0] == (2, 2)


def test_scaler_given_between_two_micro_batches() -> None:
    """A late scaler counts from the next backward pass on."""
    model, plain = twins(network)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    first, second, data = sgd(model, lr=0.0), sgd(plain, lr=0.0), batches(2)
    (loss_of(model, data[0]) / 2).backward()
    first.curvature.grad_scaler = scaler
    scaler.scale(loss_of(model, data[1]) / 2).backward()
    first.step()
    for batch in data:
        (loss_of(plain, batch) / 2).backward()
    second.step()
    assert_same_factors(first, second, FLOAT32_TOL)


# Half precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam, KFACLAMB])
def test_models_in_half_precision_keep_float32_factors(dtype: torch.dtype, cls: type[KFACMixin]) -> None:
    full = network()
    half = copy.deepcopy(full).to(dtype)
    options: dict[str, object] = {"lr": 0.02, "factor_update_steps": 1, "inv_update_steps": 2, "scaling": "unit"}
    if cls is not KFACSGD:
        options["eps"] = 1e-3  # float16 rounds the usual 1e-8 to 0, in the base class too
    x, y = batches(1)[0]
    first, second = cls(half, **options), cls(full, **options)
    losses = []
    for step in range(20):
        first.zero_grad()
        loss = F.cross_entropy(half(x.to(dtype)).float(), y)
        loss.backward()
        first.step()
        losses.append(float(loss.detach()))
        if step == 0:
            F.cross_entropy(full(x), y).backward()
            second.step()
            assert_same_factors(first, second, {torch.float16: FLOAT16_TOL, torch.bfloat16: BFLOAT16_TOL}[dtype])
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.dtype is dtype for p in half.parameters())
    stored = [first.state[layer.weight]["kfac"]["current"]["G"]["value"] for layer in first.curvature.layers]
    assert {value.dtype for value in stored} == {torch.float32}


def directions(size: float, keywords: dict[str, object]) -> dict[str, Tensor]:
    """Direction of every layer in the first step, whose gradients are of a given size."""
    torch.manual_seed(0)
    model, batch = network(), batches(1)[0]
    engine = sgd(model, damping=OfMean(1.0), **keywords).curvature
    (size * loss_of(model, batch)).backward()
    gradients = {p: p.grad for p in model.parameters()}
    assert engine.update(list(gradients.values()), [1.0])
    found = by_parameter(engine.directions(gradients, 1.0), gradients)
    return {layer.name: torch.cat([found[p].double().flatten() for p in layer.parameters]) for layer in engine.layers}


@pytest.mark.parametrize("size", [1.0, 1e-5])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("scaling", [None, "unit"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("what", [("factor_dtype",), ("inv_dtype",), ("factor_dtype", "inv_dtype")])
def test_curvature_in_half_precision(
    size: float, solver: str, scaling: str | None, dtype: torch.dtype, what: tuple[str, ...]
) -> None:
    """Stored in half precision and decomposed in float32, the directions stay close to those of float32."""
    common: dict[str, object] = {"solver": solver, "scaling": scaling}
    exact = directions(size, common)
    rounded = directions(size, common | dict.fromkeys(what, dtype))
    for name, expected in exact.items():
        assert float(expected.norm()) > 0
        assert_near(rounded[name], expected, name, STORED_TOL[dtype])


@pytest.mark.parametrize("scaling", ["graft", "orthogonal"])
def test_steps_under_autocast_are_the_steps_outside(scaling: str) -> None:
    inside, outside = twins(network)
    first, second = (sgd(model, scaling=scaling) for model in (inside, outside))
    for batch in batches(3):
        for model, optimizer, mixed in ((inside, first, True), (outside, second, False)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                optimizer.step()
    assert_same_weights(inside, outside, rel=0.0)


# TF32 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["high", "medium"])
def test_factors_are_exact_and_directions_as_the_user_chose(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs as well: some compute with bfloat16 where they may."""
    noted: dict[str, set[str]] = {}

    def note(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def noting(*args: Any, **keywords: Any) -> Any:
            noted.setdefault(name, set()).add(torch.get_float32_matmul_precision())
            return method(*args, **keywords)

        monkeypatch.setattr(owner, name, noting)

    for owner, name in WATCHED:
        note(owner, name)
    model = network()
    try:
        torch.set_float32_matmul_precision(chosen)
        train(model, sgd(model, solver="inverse"), batches(2))
        assert torch.get_float32_matmul_precision() == chosen
    finally:
        torch.set_float32_matmul_precision("highest")
    assert noted == {name: {chosen if name == "precondition" else "highest"} for _, name in WATCHED}


WATCHED = [
    (RowsLayer, "observe"),
    (RowsLayer, "output_moment"),
    (InverseSolver, "decompose"),
    (InverseSolver, "precondition"),
]

# Ways to turn it on, and to read what is chosen: torch refuses to have them mixed, so each has a process of its own.
TF32 = {
    "function": ("torch.set_float32_matmul_precision('medium')", "torch.get_float32_matmul_precision()"),
    "flag": ("matmul.allow_tf32 = True", "matmul.allow_tf32"),
    "attribute of matmul": ("matmul.fp32_precision = 'tf32'", "matmul.fp32_precision"),
    "attribute of CPUs": ("mkldnn.fp32_precision = 'bf16'", "mkldnn.fp32_precision"),
    "flag of GPUs, and the attribute of CPUs": ("matmul.allow_tf32 = True", "mkldnn.fp32_precision"),
    "attribute of all": ("torch.backends.fp32_precision = 'tf32'", "matmul.fp32_precision"),
}
if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # before torch 2.9 there are no such attributes
    TF32 = {how: statements for how, statements in TF32.items() if "attribute" not in how}


class Flags:
    """Of this process: the two statements of a way, run, and what was read so far."""

    def __init__(self, choose: str, read: str) -> None:
        self._names: dict[str, Any] = {"torch": torch, "matmul": torch.backends.cuda.matmul}
        self._names["mkldnn"] = getattr(torch.backends.mkldnn, "matmul", None)
        self._choose, self._read = choose, read
        self.seen: list[str] = []

    def choose(self) -> None:
        exec(self._choose, self._names)

    def read(self) -> None:
        self.seen.append(str(eval(self._read, self._names)))


def switch_off(rank: int, world_size: int, choose: str, read: str) -> list[str]:
    flags = Flags(choose, read)
    flags.choose()
    flags.read()
    with contextlib.suppress(ZeroDivisionError), full_precision("cuda"):
        flags.read()
        raise ZeroDivisionError
    flags.read()
    return flags.seen


@pytest.mark.fast("^(flag|attribute of all)")
@pytest.mark.parametrize("how", TF32)
def test_tf32_is_off_for_factors_and_back_afterwards(how: str) -> None:
    """A property of the process, so it can be looked at without a GPU."""
    ((before, inside, after),) = run_ranks(1, switch_off, *TF32[how])
    assert before == after
    exact = {"medium": "highest", "True": "False", "tf32": "ieee", "bf16": "ieee", "none": "ieee"}
    assert inside == exact[before]


def overlap(rank: int, world_size: int, choose: str, read: str) -> list[str]:
    flags = Flags(choose, read)
    flags.choose()
    inside, left = threading.Event(), threading.Event()

    def second() -> None:
        with full_precision("cuda"):
            inside.set()
            left.wait()
            flags.read()

    flags.read()
    thread = threading.Thread(target=second)
    with full_precision("cuda"):
        thread.start()
        inside.wait()
    left.set()
    thread.join()
    flags.read()
    with full_precision("cuda"):
        flags.choose()  # the user's own choice of that moment stays
    flags.read()
    return flags.seen


@pytest.mark.fast("^flag")
@pytest.mark.parametrize("how", [how for how in ("flag", "attribute of matmul") if how in TF32])
def test_tf32_of_overlapping_threads(how: str) -> None:
    """One thread enters, another enters, the first leaves: off until the second leaves, too; then as the user chose."""
    ((before, meanwhile, after, at_last),) = run_ranks(1, overlap, *TF32[how])
    assert before == after == at_last != meanwhile


def test_a_block_that_cannot_be_entered_switches_nothing_off() -> None:
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(RuntimeError, match="device type"), full_precision("meta"):  # it has no autocast
            pass
        assert torch.get_float32_matmul_precision() == "medium"
        with full_precision("cpu"):
            assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(chosen)
