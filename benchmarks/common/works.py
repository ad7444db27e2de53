"""What steps are timed on: models by name, on noise of the right shape; and how often K-FAC does what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.models import BottleneckResNet, Encoder, ResNet, StagedResNet, Transformer, VisionTransformer

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Schedule:
    """How often K-FAC collects statistics and decomposes."""

    statistics: int = 10  # Steps between statistics, ``factor_update_steps``
    decompositions: int = 100  # Steps between refreshes, ``inv_update_steps``
    micro_batches: int = 1  # Per step (gradient accumulation); each takes part in the statistics of its step

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read "a/b": statistics every a, decompositions every b steps."""
        statistics, _, decompositions = text.partition("/")
        parsed = cls(int(statistics), int(decompositions))
        if min(parsed.statistics, parsed.decompositions) < 1:
            raise ValueError(text)
        return parsed

    def __str__(self) -> str:
        return f"{self.statistics}/{self.decompositions}"


@dataclass(frozen=True)
class Work:
    """A model on noise: the time of a step does not depend on the pixels."""

    make: Callable[[], nn.Module]  # Builds the model
    example: tuple[int, ...]  # Shape of one example
    batch: int  # Examples per process
    classes: int  # Number of classes; 0: the model reproduces its input
    symbols: int = 0  # The examples are token numbers below this; 0: they are floats
    label: str = ""  # Name of the model in tables

    @property
    def title(self) -> str:
        """Label and shape of the batch."""
        shape = "x".join(map(str, (self.batch, *self.example)))
        return f"{self.label}, {shape}{' tokens' if self.symbols else ''}"

    @property
    def loss_average(self) -> str:
        """What :meth:`loss` is the mean over, in the optimizers' own words."""
        if not self.classes:
            return "elements"
        return "batch+sequence" if self.symbols else "batch"

    def data(self, seed: int) -> Batch:
        """One batch, inputs and targets."""
        random = torch.Generator().manual_seed(seed)
        shape = (self.batch, *self.example)
        inputs = (
            torch.randint(self.symbols, shape, generator=random)
            if self.symbols
            else torch.randn(shape, generator=random)
        )
        if not self.classes:
            return inputs, torch.rand(shape, generator=random)
        positions = shape if self.symbols else (self.batch,)
        return inputs, torch.randint(self.classes, positions, generator=random)

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        """Cross-entropy, or that of the pixels; the output may be an object with ``.logits``."""
        output = getattr(output, "logits", output)
        if not self.classes:
            return nn.functional.binary_cross_entropy_with_logits(output, targets)
        return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def images(label: str, make: Callable[[], nn.Module], batch: int, side: int, classes: int) -> Work:
    """Classification of RGB images of ``side x side`` pixels."""
    return Work(make, (3, side, side), batch, classes, label=label)


def tokens(label: str, make: Callable[[], nn.Module], batch: int, positions: int, symbols: int) -> Work:
    """Prediction of a token at every position."""
    return Work(make, (positions,), batch, symbols, symbols, label)


def gpt_small() -> nn.Module:
    """GPT-2's smallest shape (Radford et al., 2019): 12 layers of width 768, output weights tied to the embedding."""
    return Transformer(layers=12, width=768, heads=12, context=1024, symbols=50257, tied=True)


SMALL_TRANSFORMER = partial(Transformer, layers=4, width=256, heads=8)
BERT_BASE, BERT_LARGE = partial(Encoder, 12, 768, 12), partial(Encoder, 24, 1024, 16)
WORDS = 30522  # of BERT

WORKS = {
    "resnet32": images("ResNet-32", partial(ResNet, channels=3, blocks=5), 128, 32, 10),
    "transformer": tokens("4-layer transformer, d=256", SMALL_TRANSFORMER, 16, 128, 256),
    "resnet18": images("ResNet-18", partial(StagedResNet, classes=10, small_images=True), 64, 32, 10),
    "resnet18-224": images("ResNet-18", StagedResNet, 8, 224, 1000),
    "resnet50": images("ResNet-50", BottleneckResNet, 4, 224, 1000),
    "vit-s": images("ViT-S/16", VisionTransformer, 8, 224, 1000),
    "gpt-small": tokens("GPT-small", gpt_small, 2, 128, 50257),
    "bert-base": tokens("BERT-Base", BERT_BASE, 2, 128, WORDS),
    "bert-large": tokens("BERT-Large", BERT_LARGE, 1, 128, WORDS),
}
DEFAULT_WORKS = ("resnet32", "transformer")  # those whose goals stand in the design
SMOKE_WORKS = {
    "resnet8": images("ResNet-8", partial(ResNet, channels=3, blocks=1, width=4), 4, 8, 10),
    "transformer1": tokens("1-layer transformer, d=16", partial(Transformer, 1, 16, 2), 2, 8, 256),
}
