"""Lightning's Trainer trains like a plain loop: ``configure_optimizers`` returns ``KFACSGD(self, ...)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader

from kfac_optim import KFACSGD
from tests.helpers.compare import assert_close, assert_identical, assert_trained, values
from tests.helpers.frameworks import LIMIT, PAPER, TOL, Build, as_torchrun, assert_ranks_are_one, builder
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, KINDS
from tests.helpers.training import data_of, make_model, share, train

L = pytest.importorskip("lightning")
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS, PER_EPOCH = 3, 4
STEPS = EPOCHS * PER_EPOCH


class Module(L.LightningModule):
    """The usual module; its loader gives step numbers, and the data are those of the plain loop.

    Args:
        build: Makes the optimizer.
        schedule: Makes the scheduler, which Lightning calls in every step.
        parts: Micro-batches of a step.
        rank: Of ``ranks``, which share each micro-batch.
        ranks: See ``rank``.
    """

    def __init__(
        self, build: Build, schedule: Callable[..., Any] | None = None, parts: int = 1, rank: int = 0, ranks: int = 1
    ) -> None:
        super().__init__()
        self.model = make_model()
        self.build, self.schedule, self.parts, self.rank, self.ranks = build, schedule, parts, rank, ranks
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def train_dataloader(self) -> DataLoader[tuple[int, int]]:
        return DataLoader([(step, part) for step in range(PER_EPOCH) for part in range(self.parts)], batch_size=None)

    def part(self, batch: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """This rank's share of a micro-batch."""
        step = PER_EPOCH * self.current_epoch + batch[0]
        number = batch[1] * self.ranks + self.rank
        return share(data_of(step, dtype=next(self.parameters()).dtype), number, self.parts * self.ranks)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: tuple[int, int], index: int) -> Tensor:
        return self.loss(*self.part(batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    def configure_optimizers(self) -> Any:
        optimizer = self.build(self)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}


class Manual(Module):
    """Its own loop: ``zero_grad``, ``manual_backward`` for every micro-batch, ``step``."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[int, int], index: int) -> None:
        optimizer = self.optimizers()
        if batch[1] == 0:
            optimizer.zero_grad()
        last = batch[1] == self.parts - 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(*self.part(batch)) / self.parts)
        if last:
            optimizer.step()


def fit(module: Module, folder: Path | None = None, resume: Path | None = None, **options: Any) -> Any:
    """Trains and returns the trainer."""
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, "logger": False, **quiet, **options}
    trainer = L.Trainer(default_root_dir=folder, **options)
    trainer.fit(module, ckpt_path=resume)
    return trainer


class Plain:
    """The loop of every PyTorch tutorial, on the same model and data."""

    def __init__(self, build: Build, schedule: Callable[..., Any] | None = None, dtype: torch.dtype | None = None):
        self.model = make_model() if dtype is None else make_model().to(dtype)
        self.before = values(self.model)
        self.optimizer = build(self.model)
        self.scheduler = None if schedule is None else schedule(self.optimizer)
        self.norms: list[float] = []

    def train(
        self,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        clip: Callable[[Iterator[nn.Parameter]], Any] | None = None,
    ) -> nn.Module:
        def before_step() -> None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.norms.append(float(nn.utils.get_total_norm(gradients)))
            if clip is not None:
                clip(self.model.parameters())

        after = None if self.scheduler is None else self.scheduler.step
        how = {"before_step": before_step, "autocast": autocast, "scaler": scaler}
        train(self.model, self.optimizer, range(STEPS), after, **how)
        assert_trained(self.model, self.before)
        return self.model


# Loops ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [Module, Manual])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_plain_loop_s(kind: str, module: type[Module]) -> None:
    """Forward and backward run inside ``optimizer.step(closure=...)`` in the automatic way."""
    trained = module(builder(kind))
    fit(trained)
    plain = Plain(builder(kind))
    assert_identical(trained.model, plain.train())
    if module is Module:
        assert trained.norms == plain.norms, "what is logged is the norm of the raw gradient"


@pytest.mark.fast("^(sgd|lamb)")
@pytest.mark.parametrize("module", [Module, Manual])
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_is_the_large_batch(kind: str, module: type[Module]) -> None:
    build = builder(kind, **FLOAT64)
    trained = module(build, parts=4).double()
    fit(trained, accumulate_grad_batches=4 if module is Module else 1)
    assert_close(trained.model, Plain(build, dtype=torch.float64).train(), TOL)


@pytest.mark.fast("^(sgd-norm|adam-value|lamb-norm)")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("kind", KINDS)
def test_clipping_acts_on_the_raw_gradient(kind: str, algorithm: str) -> None:
    largest = 0.02 if algorithm == "value" else 0.2
    clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
    trained, plain = Module(builder(kind)), Plain(builder(kind))
    fit(trained, gradient_clip_val=largest, gradient_clip_algorithm=algorithm)
    assert_identical(trained.model, plain.train(clip=lambda parameters: clip(parameters, largest)))
    assert trained.norms == plain.norms
    assert min(plain.norms) > 0.2, "it clipped in every step"


def test_two_optimizers_side_by_side() -> None:
    """KFACSGD over the hidden weights and AdamW over the rest, each with its own step."""

    def build(module: nn.Module) -> list[torch.optim.Optimizer]:
        hidden = [p for layer in module.modules() if isinstance(layer, nn.Linear) for p in layer.parameters()]
        rest = [p for p in module.parameters() if all(p is not q for q in hidden)]
        return [KFACSGD(hidden, model=module, lr=0.05, **PAPER), torch.optim.AdamW(rest, lr=0.01)]

    class Both(Manual):
        def training_step(self, batch: tuple[int, int], index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.loss(*self.part(batch)))
            for optimizer in self.optimizers():
                optimizer.step()

    trained, model = Both(build), make_model()
    fit(trained)
    optimizers = build(model)
    for step in range(STEPS):
        x, y = data_of(step, dtype=next(model.parameters()).dtype)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_identical(trained.model, model)


def test_zero_grad_forgets_a_pass_whose_step_is_not_taken() -> None:
    """What ``self.optimizers()`` returns is an instance of the optimizer's class that has nothing of it in ``vars``."""

    class Penalized(Manual):
        def training_step(self, batch: tuple[int, int], index: int) -> None:
            x, y = self.part(batch)
            self.manual_backward(self.loss(x + 1, y))
            super().training_step(batch, index)

    trained = Penalized(builder("sgd"))
    fit(trained)
    assert_identical(trained.model, Plain(builder("sgd")).train())


SCHEDULES: dict[str, Callable[..., Any]] = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
}


@pytest.mark.fast("^(sgd-CosineAnnealingLR|adam-OneCycleLR|lamb-OneCycleLR)")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_run_by_the_trainer(kind: str, schedule: str) -> None:
    """The learning rate, and with OneCycleLR momentum or betas."""
    trained = Module(builder(kind), SCHEDULES[schedule])
    fit(trained)
    plain = Plain(builder(kind), SCHEDULES[schedule])
    assert_identical(trained.model, plain.train())
    assert plain.optimizer.param_groups[0]["lr"] != KINDS[kind][1]["lr"]


# Precision -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_mixed(kind: str) -> None:
    trained = Module(builder(kind))
    fit(trained, precision="bf16-mixed", gradient_clip_val=0.2)
    plain = Plain(builder(kind))
    assert_identical(
        trained.model, plain.train(autocast=torch.bfloat16, clip=lambda p: nn.utils.clip_grad_norm_(p, 0.2))
    )


def test_bfloat16_true() -> None:
    trained = Module(builder("sgd"))
    fit(trained, precision="bf16-true")
    assert_identical(trained.model, Plain(builder("sgd"), dtype=torch.bfloat16).train())


@pytest.mark.fast("^(sgd-0.2|lamb-0.0)")
@pytest.mark.parametrize("clip", [0.0, 0.2])
@pytest.mark.parametrize("kind", KINDS)
def test_float16_mixed_with_a_scaler(kind: str, clip: float) -> None:
    """The scaler overflows twice at first, and those steps leave nothing behind.

    The Trainer's own "16-mixed" turns into bfloat16 on the CPU; its plugin does not.
    """
    module = Module(lambda m: builder(kind, grad_scaler=m.trainer.precision_plugin.scaler)(m))
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=6) for _ in range(2)]
    fit(module, plugins=[MixedPrecision("16-mixed", "cpu", scalers[0])], gradient_clip_val=clip)
    plain = Plain(builder(kind, grad_scaler=scalers[1]))
    clipping = (lambda p: nn.utils.clip_grad_norm_(p, clip)) if clip else None
    assert_identical(module.model, plain.train(scalers[1], torch.float16, clipping))
    curvature = plain.optimizer.curvature
    assert 0 < STEPS - curvature.step_count < 4, "some steps overflowed"
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**17


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast("^(sgd|lamb)")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_is_the_uninterrupted_one(kind: str, precision: str, tmp_path: Path) -> None:
    """From the Trainer's own checkpoint, with a refresh under way, a scheduler and a scaler."""

    def parts() -> tuple[Module, dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=6)
        plugins = [] if precision == "32-true" else [MixedPrecision("16-mixed", "cpu", scaler)]
        options = {"spread": 2, "inv_update_steps": 4} if precision == "32-true" else {}
        given = scaler if plugins else None
        return Module(builder(kind, grad_scaler=given, **options), SCHEDULES["OneCycleLR"]), {"plugins": plugins}

    whole, options = parts()
    fit(whole, **options)
    first, options = parts()
    stopped = fit(first, tmp_path, **{**options, "max_epochs": 2})
    assert stopped.optimizers[0].curvature.step_count == 2 * PER_EPOCH
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    second, options = parts()
    with torch.no_grad():
        for p in second.parameters():
            p.add_(1.0)
    resumed = fit(second, tmp_path, tmp_path / "last.ckpt", **options)
    assert resumed.optimizers[0].curvature.step_count == STEPS
    assert_identical(second.model, whole.model)
    with pytest.raises(AssertionError):
        assert_identical(first.model, whole.model)


# Two processes -------------------------------------------------------------------------------------------------------


class Teacher(Module):
    """Calls the model without gradients before it trains, and returns a dict."""

    def training_step(self, batch: tuple[int, int], index: int) -> Any:
        x, y = self.part(batch)
        with torch.no_grad():
            self(x[:3])
        return {"loss": self.loss(x, y), "examples": x}


class Elements(Module):
    """A loss that is a mean over the elements of an output which ``training_step`` does not return."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), F.one_hot(y, 3).to(x))


class Unused(Module):
    """A layer that never runs: DDP has to be told to look for it."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.spare = nn.Linear(2, 2)


def count(inputs: Any, output: Tensor) -> int:
    """What ``loss_terms`` sees is the model's call, in one process as in several."""
    assert isinstance(inputs[0], Tensor) and output.shape == (len(inputs[0]), 3)
    return len(output)


CASES: dict[str, tuple[type[Module], str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # module, kind, options of the optimizer, of the module, of the trainer
    **{f"{kind}, automatic": (Module, kind, {}, {}, {}) for kind in KINDS},
    "manual": (Manual, "sgd", {}, {}, {}),
    "layer-wise": (Module, "sgd", {"assignment": "layer-wise"}, {}, {"gradient_clip_val": 0.2}),
    "accumulation": (Module, "sgd", {}, {"parts": 2}, {"accumulate_grad_batches": 2}),
    "manual accumulation": (Manual, "lamb", {}, {"parts": 2}, {}),
    "loss_average": (Module, "adam", {"loss_average": count}, {}, {}),
    "without gradients first": (Teacher, "sgd", {}, {}, {}),
    "mean over elements": (Elements, "sgd", {"loss_average": "elements"}, {}, {}),
    "unused": (Unused, "sgd", {}, {}, {"find_unused_parameters": True}),
}


def in_lightning(rank: int, ranks: int, name: str, resume: str | None = None) -> list[Tensor]:
    """One rank of a case; with ``resume`` a folder, interrupted after two epochs and resumed."""
    module, kind, options, own, training = CASES[name]
    wrapper = {key: value for key, value in training.items() if key == "find_unused_parameters"}
    training = {key: value for key, value in training.items() if key not in wrapper}

    def made() -> Module:
        training["strategy"] = DDPStrategy(**wrapper) if ranks > 1 else "auto"
        return module(builder(kind, **FLOAT64, **options), rank=rank, ranks=ranks, **own).double()

    training |= {"devices": ranks, "use_distributed_sampler": False}
    trained = made()
    if resume is not None:
        stopped = fit(trained, Path(resume), **{**training, "max_epochs": 2})
        stopped.optimizers[0].curvature.synchronize()
        stopped.save_checkpoint(f"{resume}/last.ckpt")
        trained = made()
    fit(trained, None, None if resume is None else Path(resume) / "last.ckpt", **training)
    return values(trained.model)


def all_cases(rank: int, ranks: int, folder: str) -> dict[str, list[Tensor]]:
    """As torchrun starts them: everything in one start of the processes."""
    as_torchrun(rank, ranks, GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    found = {name: in_lightning(rank, ranks, name) for name in CASES}
    found["resumed"] = in_lightning(rank, ranks, "sgd, automatic", folder)
    return found


@pytest.mark.slow
def test_two_processes_are_one_on_the_whole_batch(tmp_path: Path) -> None:
    found = run_ranks(2, all_cases, str(tmp_path), limit=LIMIT)
    expected = {name: in_lightning(0, 1, name) for name in CASES}
    expected["resumed"] = expected["sgd, automatic"]
    for name, parameters in expected.items():
        assert_ranks_are_one(found, name, parameters)


def test_lightning_s_stand_in_loads_a_state_as_that_of_torch_s_classes_does() -> None:
    """It looks attributes up in the optimizer behind it, and has no groups of its own."""
    saved = KFACSGD(torch.nn.Linear(3, 2), lr=2.0).state_dict()
    stand_in = LightningOptimizer(KFACSGD(torch.nn.Linear(3, 2), lr=0.1))
    stand_in.load_state_dict(saved)
    assert stand_in.param_groups[0]["lr"] == 2.0
