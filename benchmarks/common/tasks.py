"""What is trained: data, model and loss of each task, behind the dictionary ``TASKS``.

Data is deterministic and never downloaded; the batch of a step is a pure function of the seed and the step, so that
every optimizer sees the same batches and an interrupted run continues with the batch it would have had.
"""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.models import ResNet, Transformer, autoencoder

SPLIT_SEED = 20  # of test splits and generated data: independent of a run's own seed
EVALUATION_BATCH = 500  # examples at a time, to bound memory

Batch = tuple[Tensor, Tensor]
Score = Callable[[Tensor, Tensor], tuple[float, float]]  # (output, target) -> numerator and denominator, to be summed


class Source(Protocol):
    """Training data: gives the batch of any step without having given the ones before."""

    def steps_per_epoch(self, size: int) -> int:
        """Return the number of batches of ``size`` examples in one pass over the data."""

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """Return inputs and targets of ``step``."""


def generator(seed: int, counter: int) -> torch.Generator:
    """Return a random generator of its own for each ``counter`` (an epoch, a step) of a run with ``seed``."""
    return torch.Generator().manual_seed(seed * 1_000_003 + counter)


@dataclass(frozen=True)
class Examples:
    """Separate examples, visited in a new random order each epoch; an incomplete last batch is left out."""

    inputs: Tensor
    targets: Tensor

    def steps_per_epoch(self, size: int) -> int:
        """Return the number of complete batches."""
        if not 1 <= size <= len(self.inputs):
            raise ValueError(f"batch size must be from 1 to {len(self.inputs)} (the training examples), got {size}")
        return len(self.inputs) // size

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """Return the examples of ``step``."""
        epoch, position = divmod(step, self.steps_per_epoch(size))
        order = torch.randperm(len(self.inputs), generator=generator(seed, epoch))
        rows = order[position * size : (position + 1) * size]
        return self.inputs[rows], self.targets[rows]


@dataclass(frozen=True)
class Windows:
    """Windows of ``context`` symbols of one long text, each with the same window one symbol later as its target."""

    symbols: Tensor
    context: int

    def steps_per_epoch(self, size: int) -> int:
        """Return how many batches hold as many symbols as the text."""
        if size < 1:
            raise ValueError(f"batch size must be at least 1, got {size}")
        return math.ceil((len(self.symbols) - 1) / (size * self.context))

    def at(self, starts: Tensor) -> Batch:
        """Return the windows that begin at ``starts``."""
        window = self.symbols[starts[:, None] + torch.arange(self.context + 1)].long()
        return window[:, :-1], window[:, 1:]

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """Return ``size`` windows at random places (with replacement)."""
        return self.at(torch.randint(len(self.symbols) - self.context, (size,), generator=generator(seed, step)))


def matches(output: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return the right answers, and all answers."""
    return int((output.argmax(-1) == targets).sum()), targets.numel()


@dataclass(frozen=True)
class Task:
    """A model, its loss and its data."""

    name: str  # Name on the command line
    model: Callable[[], nn.Module]  # Builds the freshly initialised model; the caller seeds torch before
    loss: Callable[[Tensor, Tensor], Tensor]  # ``(output, target) -> scalar``, the mean over ``loss_average``
    source: Source  # The training data
    held_out: Mapping[str, Batch]  # Inputs and targets of each evaluated split; ``"test"`` always exists
    fisher: str  # Kind of the model's output distribution, which the sampled Fisher draws targets from
    loss_average: str  # What ``loss`` is the mean over, in the optimizers' own words
    outer: tuple[str, ...]  # Names of the modules whose weights are not hidden ones: the output layers
    target: float  # Held-out score (or loss, for tasks without scores) that the summary reports the time to
    # What is evaluated beside the loss, by name, the one that ``target`` is about first; more is better.
    scores: Mapping[str, Score] = field(default_factory=lambda: {"accuracy": matches})

    @property
    def metric(self) -> str:
        """Name of the evaluation figure that ``target`` is about."""
        return f"test_{next(iter(self.scores), 'loss')}"

    @property
    def goal(self) -> str:
        """What the way to the target is about, in words."""
        return f"target: held-out {self.metric.removeprefix('test_')} {'>=' if self.scores else '<='} {self.target:g}"

    def reached(self, value: float) -> bool:
        """Say whether ``value`` of the metric is as good as the target."""
        return value >= self.target if self.scores else value <= self.target

    @cached_property
    def digest(self) -> int:
        """A checksum of the data, so that runs on different data (another Python's library) are not taken for equal."""
        return zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in self.held_out["test"]))

    def hidden(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the weight matrices (and convolution kernels) of ``model`` between its input and its output layer."""
        inner = (module for name, module in model.named_modules() if name not in self.outer)
        return [
            p for layer in inner if isinstance(layer, nn.Linear | nn.Conv2d) for p in layer.parameters() if p.ndim > 1
        ]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Return loss and scores on every split of ``held_out``, with ``model`` in evaluation mode meanwhile."""
        was_training = model.training
        model.eval()
        figures: dict[str, float] = {}
        for split, (inputs, targets) in self.held_out.items():
            chunks = zip(inputs.split(EVALUATION_BATCH), targets.split(EVALUATION_BATCH), strict=True)
            figures |= {f"{split}_{name}": value for name, value in self._figures(model, chunks, device).items()}
        model.train(was_training)
        return figures

    def _figures(self, model: nn.Module, chunks: Iterator[Batch], device: torch.device) -> dict[str, float]:
        examples, loss = 0, 0.0
        sums = {name: (0.0, 0.0) for name in self.scores}
        for inputs, targets in chunks:
            output, targets = model(inputs.to(device)), targets.to(device)
            examples += len(inputs)
            loss += len(inputs) * self.loss(output, targets).item()
            for name, score in self.scores.items():
                top, bottom = score(output, targets)
                sums[name] = sums[name][0] + top, sums[name][1] + bottom
        return {"loss": loss / examples} | {name: top / bottom for name, (top, bottom) in sums.items()}


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over all answers: ``[..., classes]`` logits against ``[...]`` classes."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def pixel_cross_entropy(logits: Tensor, pixels: Tensor) -> Tensor:
    """Return the Bernoulli loss: summed over the pixels of an image, averaged over the images."""
    return F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum") / len(pixels)


def digits() -> Task:
    """Handwritten digits, real 8x8 images of scikit-learn, by a ResNet-14 (13 convolutions with BatchNorm)."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(data.target)
    rows = np.arange(len(images))
    train, test = train_test_split(rows, test_size=0.2, stratify=data.target, random_state=SPLIT_SEED)
    splits = {name: (images[part], labels[part]) for name, part in {"train": train, "test": test}.items()}
    return Task(
        name="digits",
        model=lambda: ResNet(channels=1, blocks=2),
        loss=token_cross_entropy,
        source=Examples(*splits["train"]),
        held_out=splits,
        fisher="categorical",
        loss_average="batch",
        outer=("head",),
        target=0.97,
    )


def curve_images(count: int, seed: int, side: int = 28, stroke: float = 0.6, points: int = 64) -> Tensor:
    """Return ``[count, side * side]`` images in [0, 1] of quadratic Bezier curves with three random control points.

    A pixel's value is the line integral of a Gaussian brush of ``stroke`` pixels along the curve, 1 on its midline. The
    brush is a product of a row and a column profile, so one batched product draws all images. At this stroke AdamW and
    Muon reach the losses that the table of the project's design quotes for them; a perfect model would reach 29.1, the
    entropy of the grey pixels.
    """
    random = torch.Generator().manual_seed(seed)
    control = torch.rand(count, 3, 2, generator=random) * side
    t = (torch.arange(points) + 0.5) / points
    weights = torch.stack([(1 - t) ** 2, 2 * t * (1 - t), t**2])  # of the control points, along the curve
    speeds = torch.stack([2 * t - 2, 2 - 4 * t, 2 * t])  # their derivatives
    path, velocity = (torch.einsum("nkd,kt->ntd", control, basis) for basis in (weights, speeds))
    centres = torch.arange(side) + 0.5
    profile = torch.exp(-((path[..., None] - centres) ** 2) / (2 * stroke**2))  # [count, points, 2, side]
    ink = velocity.norm(dim=-1) / (points * stroke * math.sqrt(2 * math.pi))
    images = (profile[:, :, 0] * ink[..., None]).transpose(1, 2) @ profile[:, :, 1]
    return images.clamp(max=1).flatten(1)


def curves() -> Task:
    """Generated CURVES images by a deep autoencoder, 9000 to train on and 1000 held out; no accuracy."""
    images = curve_images(10_000, seed=SPLIT_SEED)
    train, test = images[:9000], images[9000:]
    return Task(
        name="curves",
        model=autoencoder,
        loss=pixel_cross_entropy,
        source=Examples(train, train),
        held_out={"test": (test, test)},
        fisher="bernoulli",
        loss_average="batch",
        outer=("21",),
        target=66.0,
        scores={},
    )


def python_sources() -> tuple[Tensor, Tensor]:
    """Return the bytes of the installed Python's own library for training and, of other files, for evaluation.

    The library includes ``pydoc_data/topics.py``, half a megabyte of English documentation. One file in ten is held
    out, chosen by its name, not by chance.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - skipped)
        for path in (Path(folder, file) for file in sorted(files) if file.endswith(".py")):
            held_out = zlib.crc32(path.relative_to(library).as_posix().encode()) % 10 == 0
            parts[held_out].append(path.read_bytes())
    train, test = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, test


def text() -> Task:
    """Bytes of Python's own library by a small causal transformer (2 layers, width 128, 4 heads, context 128)."""
    train, test = python_sources()
    context = 128
    windows = Windows(test, context)
    starts = torch.linspace(0, len(test) - context - 1, 128).long()
    return Task(
        name="text",
        model=lambda: Transformer(context=context),
        loss=token_cross_entropy,
        source=Windows(train, context),
        held_out={"test": windows.at(starts)},
        fisher="categorical",
        loss_average="batch+sequence",
        outer=("head",),
        target=0.5,
    )


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "curves": curves, "text": text}
