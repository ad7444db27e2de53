"""One small training: what its script builds, how a step goes, and a whole run by the base class or by the swap."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.common.optimizers import find, rate
from benchmarks.common.runs import PATIENCE, Clock, Line, finite
from benchmarks.common.settings import KFAC
from benchmarks.common.tasks import generator
from benchmarks.swap.judging import SHARES, first_window, thinned, window_before

T = TypeVar("T")
Handed = Callable[[nn.Module], Any]  # What an optimizer is given of a model
Split = tuple[Sequence[Tensor], Sequence[Tensor]]  # Tensors to train on, and those held out, with examples as rows

SWAPS = {base: name for name, base in KFAC.items()}  # by the name of a base class, that of the K-FAC class on it


# What a script hands to its optimizer --------------------------------------------------------------------------------


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters, as most scripts hand them over."""
    return list(model.parameters())


def whole(model: nn.Module) -> nn.Module:
    """Return the model itself; its parameters for a base class, which takes no modules."""
    return model


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, as GPT scripts do: weight decay (of 0.1) for matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


@torch.no_grad()
def nudge_(model: nn.Module, share: float) -> None:
    """Change each weight by a share of itself, of this size and at random."""
    for parameter in model.parameters():
        parameter.mul_(1 + share * torch.randn_like(parameter))


def with_weight_norm(make: Callable[[], Script]) -> Script:
    """Build a script, and give all of its plain Linear layers and convolutions weight norm."""
    script = make()
    for module in [module for part in script.parts for module in part.model.modules()]:
        if type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d):
            parametrizations.weight_norm(module)
    return script


# Scripts -------------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """A model with an optimizer of its own."""

    model: nn.Module
    loss: Callable[[int], Tensor]  # Of a step, from 0; draws its batch from torch's generator
    handed: Handed = parameters  # What the optimizer is given


@dataclass
class Script:
    """What one run of a training's script has built."""

    parts: Sequence[Part]  # Stepped one after the other; two for a GAN, else one
    held_out: Callable[[], Tensor] | None = None  # Loss on held-out data, in evaluation mode
    judged: Callable[[], Tensor] | None = None  # What is judged before each step; None: the first part's loss
    after: Callable[[int], None] | None = None  # Called after each step


def on_batches(
    model: nn.Module, split: Split, loss: Callable[..., Tensor], batch: int, handed: Handed = parameters
) -> Script:
    """Return the script that trains ``model`` by ``loss(*tensors)`` on random rows of the first tensors of a split."""
    train, others = split

    def of_step(step: int) -> Tensor:
        rows = torch.randint(len(train[0]), (batch,))
        return loss(*(part[rows] for part in train))

    return Script([Part(model, of_step, handed)], held_out=lambda: loss(*others))


@dataclass(frozen=True)
class Training:
    """A script with the settings its author chose for the base optimizer."""

    name: str  # Name on the command line
    half: str  # "choose": defaults are chosen by it; "judge": only looked at in the end
    make: Callable[[], Script]  # Builds model and data; torch is seeded before
    optimizer: str  # Name of the base class
    options: Mapping[str, Any]  # Its keywords, which the swap takes over
    rate: str  # The learning rate is "small" (too small), "usual", or at the "edge" of stability
    steps: int
    schedule: str = "constant"  # Of the learning rate, after the warm-up: "constant" or "cosine"
    warmup: int = 0  # Steps of linear warm-up
    clip: float | None = None  # Largest norm of the gradient
    # Slack is a share of the base's whole drop, as what is judged can be negative or ends in noise.
    of_drop: bool = False

    def settings(self) -> Line:
        """Return what must agree for a run of an earlier file to stand for one of this training."""
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()}
        return {
            "training": self.name,
            "optimizer": self.optimizer,
            "options": options,
            "steps": self.steps,
            "schedule": self.schedule,
            "warmup": self.warmup,
            "clip": self.clip,
        }

    @property
    def course(self) -> str:
        """The schedule in words."""
        words = [f"warm-up {self.warmup}"] if self.warmup else []
        return ", ".join([*words, *([self.schedule] if self.schedule != "constant" or not words else [])])


class Run:
    """One run of a training, step by step.

    Args:
        training: What is trained.
        seed: Of the initial weights and, with the step, of everything drawn in a step: both sides see the same.
        kfac: Keywords of the swap beside the base's; None: the base class runs.
        nudge: The share by which each initial weight is changed at random.
    """

    def __init__(self, training: Training, seed: int, kfac: Mapping[str, Any] | None, nudge: float = 0.0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.training, self.seed = training, seed
        self.script = training.make()
        for part in self.script.parts if nudge else ():
            self._seeded(0, -2, partial(nudge_, part.model, nudge))
        self.optimizers = [self._optimizer(part, kfac) for part in self.script.parts]
        self.schedulers = [LambdaLR(optimizer, self._rate) for optimizer in self.optimizers]
        self.clock = Clock()
        self.losses: list[float] = []

    def _optimizer(self, part: Part, kfac: Mapping[str, Any] | None) -> Optimizer:
        handed, options = part.handed(part.model), dict(self.training.options)
        if kfac is None:
            handed = handed.parameters() if isinstance(handed, nn.Module) else handed
            return find(self.training.optimizer)(handed, **options)
        return find(SWAPS[self.training.optimizer])(handed, **options, **kfac)

    def _rate(self, step: int) -> float:
        return rate(self.training.schedule, self.training.warmup, self.training.steps, step)

    def step(self) -> None:
        """Take one step and note what is judged, at the weights before it."""
        number, values = len(self.losses), []
        if self.script.judged is not None:
            with torch.no_grad():
                values.append(self._seeded(number, -1, self.script.judged).item())
        with self.clock:
            for index, (part, optimizer) in enumerate(zip(self.script.parts, self.optimizers, strict=True)):
                optimizer.zero_grad()
                loss = self._seeded(number, index, partial(part.loss, number))
                loss.backward()
                if self.training.clip is not None:
                    nn.utils.clip_grad_norm_(part.model.parameters(), self.training.clip)
                optimizer.step()
                values.append(loss.item())
            for scheduler in self.schedulers:
                scheduler.step()
            if self.script.after is not None:
                self.script.after(number)
        self.losses.append(values[0])

    def _seeded(self, step: int, part: int, function: Callable[[], T]) -> T:
        """Return what ``function`` returns with torch seeded for this step, whatever was drawn before."""
        torch.set_rng_state(generator(self.seed, 10 * step + part + 2).get_state())
        return function()

    def finish(self) -> Line:
        """Take all steps; return the run's figures."""
        end = "finished"
        try:
            while len(self.losses) < self.training.steps:
                self.step()
                if len(self.losses) >= PATIENCE and not any(map(math.isfinite, self.losses[-PATIENCE:])):
                    end = "diverged"
                    break
            held_out = self.held_out()
        except Exception as error:  # the other trainings go on, and this one is behind
            end, held_out = f"failed at step {len(self.losses)}: {type(error).__name__}: {error}"[:300], None
        losses = [*self.losses, *[math.nan] * (self.training.steps - len(self.losses))]
        return {
            "end": end,
            "first": finite(first_window(losses)),
            "points": [finite(window_before(losses, share)) for share in SHARES],
            "held_out": held_out,
            "cpu_seconds": round(self.clock.cpu, 3),
            "curve": [(step, finite(loss)) for step, loss in thinned(losses)],
        }

    @torch.no_grad()
    def held_out(self) -> float | None:
        """Return the loss on held-out data; None where there is none."""
        if self.script.held_out is None:
            return None
        for part in self.script.parts:
            part.model.eval()
        return finite(self._seeded(0, 0, self.script.held_out).item())
