"""Accelerate's ``prepare``d optimizers train like a plain loop."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from kfac_optim import Categorical
from tests.helpers.compare import assert_close, assert_identical, assert_trained, values
from tests.helpers.frameworks import LIMIT, TOL, Build, as_torchrun, assert_ranks_are_one, builder, forget
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, KINDS
from tests.helpers.training import clipping, data_of, make_model, train

pytest.importorskip("accelerate")
from accelerate import Accelerator

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_accelerate")]

STEPS, SAVED_AFTER = 12, 7
Batch = tuple[Tensor, Tensor]


def loader(size: int, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    """The data of all steps, in micro-batches of a size."""
    x, y = map(torch.cat, zip(*(data_of(step, dtype=dtype) for step in range(STEPS)), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=size)


def cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)


def accelerated(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    data: Iterable[Batch],
    scheduler: Any,
    clip: float | None,
) -> None:
    """The loop of Accelerate's documentation."""
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()


def prepared_and_trained(
    build: Build,
    size: int = 8,
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    accelerator: Accelerator | None = None,
    **options: Any,
) -> nn.Module:
    """Trains a prepared model and returns what is inside."""
    accelerator = accelerator or Accelerator(cpu=True, **options)
    model = make_model().to(dtype)
    optimizer = build(model)
    prepared = accelerator.prepare(model, optimizer, loader(size, dtype), cycle(optimizer))
    accelerated(accelerator, *prepared, clip)
    return accelerator.unwrap_model(prepared[0])


def plain(
    build: Build,
    clip: float | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> tuple[nn.Module, Any]:
    """The loop of every PyTorch tutorial; Accelerate casts the outputs of a model under autocast to float32."""
    model = make_model().to(dtype)
    before = values(model)
    optimizer = build(model)
    scheduler = cycle(optimizer)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    scales = [scaler.get_scale()]

    def after() -> None:
        scales.append(scaler.get_scale())
        if scales[-1] >= scales[-2]:  # Accelerate leaves out the scheduler's steps with the optimizer's
            scheduler.step()

    train(model, optimizer, range(STEPS), after, before_step=clipping(model, clip), autocast=autocast, scaler=scaler)
    assert_trained(model, before)
    return model, optimizer


@pytest.mark.fast("-0.2$")
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_plain_loop_s(kind: str, clip: float | None) -> None:
    """``prepare`` loads the state of the fresh optimizer into itself; clipping acts on the raw gradient."""
    assert_identical(prepared_and_trained(builder(kind), clip=clip), plain(builder(kind), clip)[0])


@pytest.mark.fast("-0.2$")
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_is_the_large_batch(kind: str, clip: float | None) -> None:
    """``accumulate`` leaves out ``step`` and ``zero_grad`` of all micro-batches but the last and divides the loss."""
    build = builder(kind, **FLOAT64)
    split = prepared_and_trained(build, 2, clip, torch.float64, gradient_accumulation_steps=4)
    assert_close(split, plain(build, clip, torch.float64)[0], TOL)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind: str) -> None:
    trained = prepared_and_trained(builder(kind), clip=0.2, mixed_precision="bf16")
    assert_identical(trained, plain(builder(kind), 0.2, autocast=torch.bfloat16)[0])


class WithLoss(nn.Module):
    """Returns its loss beside its logits, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.float(), y)}


@pytest.mark.parametrize("inside", [False, True])
def test_sampled_targets_in_bfloat16(inside: bool) -> None:
    """The loss of a model that returns it is of its own logits, Accelerate hands out those in float32."""
    build = builder("sgd", fisher=Categorical(output_fn=lambda out: out["logits"] if isinstance(out, dict) else out))
    accelerator, original = Accelerator(cpu=True, mixed_precision="bf16"), WithLoss()
    model, optimizer = accelerator.prepare(original, build(original))
    for x, y in loader(8):
        output = model(x, y)
        accelerator.backward(output["loss"] if inside else F.cross_entropy(output["logits"], y))
        optimizer.step()
        optimizer.zero_grad()
    reference = make_model()
    train(reference, build(reference), range(STEPS), autocast=torch.bfloat16)
    assert_identical(original.net, reference)


def float16(scaler: torch.amp.GradScaler) -> Accelerator:
    """float16 as on a GPU; on the CPU Accelerate itself does without a scaler and without autocast."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert accelerator.scaler is None and not accelerator.native_amp
    accelerator.scaler, accelerator.native_amp = scaler, True
    return accelerator


@pytest.mark.fast("-0.2$")
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_float16_with_a_scaler(kind: str, clip: float | None) -> None:
    """Overflowed steps leave nothing behind."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=6) for _ in range(2)]
    accelerator = float16(scalers[0])
    trained = prepared_and_trained(builder(kind, grad_scaler=accelerator.scaler), clip=clip, accelerator=accelerator)
    expected, optimizer = plain(builder(kind, grad_scaler=scalers[1]), clip, torch.float32, torch.float16, scalers[1])
    assert 0 < STEPS - optimizer.curvature.step_count < 4, "some steps overflowed"
    assert_identical(trained, expected)


def test_step_was_skipped() -> None:
    accelerator = float16(torch.amp.GradScaler("cpu", init_scale=2.0**8))
    plain_model = make_model()
    model, optimizer = accelerator.prepare(plain_model, builder("sgd", grad_scaler=accelerator.scaler)(plain_model))
    before = values(plain_model)
    for step, factor in enumerate((1.0, torch.inf, 1.0)):
        x, y = data_of(step, dtype=before[0].dtype)
        accelerator.backward(F.cross_entropy(model(x), y) * factor)
        optimizer.step()
        assert optimizer.step_was_skipped == (factor == torch.inf)
        optimizer.zero_grad()
    assert optimizer.optimizer.curvature.step_count == 2
    assert_trained(plain_model, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickled_optimizer_trains_on(kind: str) -> None:
    """With the model it belongs to, in one pickle."""
    accelerator, data = Accelerator(cpu=True), loader(8)
    original = make_model()
    model, optimizer = accelerator.prepare(original, builder(kind)(original))
    for i, (x, y) in enumerate(data):
        if i == SAVED_AFTER:
            other, copied = pickle.loads(pickle.dumps((model, optimizer)))
            assert type(copied) is type(optimizer) and copied.optimizer is not optimizer.optimizer
        pairs = [(model, optimizer)] if i < SAVED_AFTER else [(model, optimizer), (other, copied)]
        for trained, steps in pairs:
            accelerator.backward(F.cross_entropy(trained(x), y))
            steps.step()
            steps.zero_grad()
    assert copied.optimizer.curvature.step_count == STEPS
    assert_identical(other, model)


def test_a_closure_is_evaluated() -> None:
    accelerator, twin = Accelerator(cpu=True), make_model()
    original = make_model()
    model, optimizer = accelerator.prepare(original, builder("sgd")(original))
    reference = builder("sgd")(twin)
    for x, y in loader(8):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
        reference.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        reference.step()
    assert_identical(original, twin)


# Checkpoints and processes -------------------------------------------------------------------------------------------


def interrupted(
    build: Build, folder: Path, size: int = 8, dtype: torch.dtype = torch.float32, scaled: bool = False
) -> tuple[nn.Module, nn.Module]:
    """``save_state`` in the midst of a run; the model of the uninterrupted run and that of one from ``load_state``."""
    found = []
    for resumed in (False, True):
        forget()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        accelerator = float16(scaler) if scaled else Accelerator(cpu=True, step_scheduler_with_optimizer=False)
        model = make_model(seed=int(resumed)).to(dtype)
        optimizer = build(model)
        if scaled:
            optimizer.curvature.grad_scaler = accelerator.scaler
        prepared, steps, data, scheduler = accelerator.prepare(model, optimizer, loader(size, dtype), cycle(optimizer))
        if resumed:
            accelerator.load_state(str(folder))
            data = accelerator.skip_first_batches(data, SAVED_AFTER)
        for i, batch in enumerate(data):
            if i == SAVED_AFTER and not resumed:
                optimizer.curvature.synchronize()
                accelerator.save_state(str(folder))
                accelerator.wait_for_everyone()
            accelerated(accelerator, prepared, steps, [batch], scheduler, None)
        found.append(model)
        assert optimizer.curvature.step_count == STEPS
    return found[0], found[1]


@pytest.mark.fast("^(sgd|lamb)")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_load_state_is_the_uninterrupted_one(kind: str, scaled: bool, tmp_path: Path) -> None:
    """With a refresh under way, a scheduler and a scaler."""
    build = builder(kind, spread=2, inv_update_steps=4)
    whole, resumed = interrupted(build, tmp_path, scaled=scaled)
    assert_identical(resumed, whole)


OPTIONS: dict[str, Any] = {"assignment": "layer-wise", **FLOAT64}
CASES: dict[str, tuple[str, float | None, int]] = {  # kind, clip, micro-batches of a step
    **{kind: (kind, None, 1) for kind in KINDS},
    "clipped": ("sgd", 0.2, 1),
    "accumulated": ("adam", None, 2),
}


def all_cases(rank: int, ranks: int, folder: str) -> dict[str, list[Tensor]]:
    """As torchrun starts them: everything in one start of the processes."""
    as_torchrun(rank, ranks, ACCELERATE_USE_CPU="true")
    found: dict[str, nn.Module] = {}
    for name, (kind, clip, parts) in CASES.items():
        forget()
        # Accelerate's scheduler takes a step for every process; the plain one takes one.
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts, step_scheduler_with_optimizer=False)
        assert accelerator.num_processes == ranks
        found[name] = prepared_and_trained(builder(kind, **OPTIONS), 4 // parts, clip, torch.float64, accelerator)
    build = builder("sgd", **OPTIONS)
    found["uninterrupted"], found["resumed"] = interrupted(build, Path(folder), 4, torch.float64)
    return {name: values(model) for name, model in found.items()}


@pytest.mark.slow
def test_two_processes_are_one_on_the_whole_batch(tmp_path: Path) -> None:
    found = run_ranks(2, all_cases, str(tmp_path), limit=LIMIT)
    for name, (kind, clip, _) in CASES.items():
        expected, _ = plain(builder(kind, **FLOAT64), clip, torch.float64)
        assert_ranks_are_one(found, name, expected.parameters())
    assert_ranks_are_one(found, "resumed", found[0]["uninterrupted"])
