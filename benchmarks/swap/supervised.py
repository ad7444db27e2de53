"""Scripts that learn targets: classifiers, regressions, language models, recommendations, graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.models import ResNet, Transformer, VisionTransformer, convolutions
from benchmarks.common.tasks import token_cross_entropy
from benchmarks.swap import data
from benchmarks.swap.nets import (
    GraphNet,
    Mixer,
    Recommender,
    RecurrentModel,
    RowEncoder,
    TwoHeads,
    WordBag,
    convolutional,
    mlp,
    replaced,
)
from benchmarks.swap.training import Handed, Part, Script, decay_groups, on_batches, parameters, whole

Loss = Callable[[Tensor, Tensor], Tensor]


def supervised(model: nn.Module, split: data.Split, loss: Loss, batch: int, handed: Handed = parameters) -> Script:
    """Return the script that trains ``model`` on random batches of a split."""
    return on_batches(model, split, lambda x, y: loss(model(x), y), batch, handed)


def classified_digits(model: nn.Module, handed: Handed = parameters) -> Script:
    """Return the script that trains a network of images on the digits, 64 in a batch."""
    return supervised(model, data.digits(), F.cross_entropy, 64, handed)


def digits_mlp() -> Script:
    """Digits by an MLP."""
    return supervised(mlp(64, 256, 256, 10), data.flat_digits(), F.cross_entropy, 256)


def deep_digits_mlp() -> Script:
    """Digits by a deeper MLP with tanh."""
    model = mlp(64, 200, 200, 200, 10, activation=nn.Tanh)
    return supervised(model, data.flat_digits(), F.cross_entropy, 256, whole)


def friedman() -> Script:
    """A regression on a table of independent inputs."""
    return supervised(mlp(10, 256, 256, 1), data.friedman(), F.mse_loss, 512)


def teacher() -> Script:
    """A regression on a table whose columns differ in size and are correlated."""
    return supervised(mlp(20, 256, 256, 3), data.teacher(), F.mse_loss, 256, whole)


def batchnorm_net() -> Script:
    """Digits by convolutions with BatchNorm."""
    body = [convolutions(1, 16, 1), convolutions(16, 32, 1, stride=2), convolutions(32, 32, 1)]
    return classified_digits(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), whole)


def resnet() -> Script:
    """Digits by a residual network with BatchNorm."""
    return classified_digits(ResNet(channels=1, blocks=1, width=8))


def plain_convolutions() -> Script:
    """Digits by convolutions without norm layers."""
    return classified_digits(convolutional(), whole)


def convolutions_with_dropout() -> Script:
    """Digits by convolutions, pooling and dropout, as the MNIST example."""
    return classified_digits(convolutional(dropout=0.25))


def mixer() -> Script:
    """Digits by an MLP-Mixer."""
    return classified_digits(Mixer())


class Grey(VisionTransformer):
    """A vision transformer of grey images."""

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[n, 1, side, side]`` to logits."""
        return super().forward(x.expand(-1, 3, -1, -1))


def vision_transformer() -> Script:
    """Digits by a vision transformer over patches of 2x2 pixels."""
    return classified_digits(Grey(layers=2, width=48, heads=4, patch=2, side=8, classes=10), decay_groups)


def encoder() -> Script:
    """Digits, as eight rows, by PyTorch's transformer encoder with dropout."""
    return classified_digits(RowEncoder())


def two_tasks() -> Script:
    """Class and brightness of a digit by one trunk with two heads."""
    trunk = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 96), nn.ReLU()
    )
    model = TwoHeads(trunk, 96, (10, 1))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logits, brightness = model(x)
        return F.cross_entropy(logits, y) + F.mse_loss(brightness[:, 0], 4 * x.mean((1, 2, 3)))

    return on_batches(model, data.digits(), loss, 128)


def language(model: nn.Module, symbols: Tensor, context: int, batch: int, handed: Handed = parameters) -> Script:
    """Return the script that trains a language model on random windows of a text."""
    windows, (inputs, targets) = data.windows(symbols, context)

    def of_step(step: int) -> Tensor:
        x, y = windows.at(torch.randint(len(windows.symbols) - context, (batch,)))
        return token_cross_entropy(model(x), y)

    return Script([Part(model, of_step, handed)], held_out=lambda: token_cross_entropy(model(inputs), targets))


def character_gpt() -> Script:
    """Characters by a GPT with LayerNorm and a head of its own."""
    symbols, count = data.characters()
    model = Transformer(layers=2, width=64, heads=4, context=48, symbols=count)
    return language(model, symbols, 48, 8, decay_groups)


def adder_gpt() -> Script:
    """Sums of two-digit numbers by a GPT with RMSNorm whose head is the embedding."""
    model = Transformer(layers=2, width=48, heads=3, context=6, symbols=10, tied=True)
    replaced(model, nn.LayerNorm, lambda _: nn.RMSNorm(48))
    return supervised(model, data.sums(), token_cross_entropy, 64, decay_groups)


def character_lstm() -> Script:
    """Characters by two layers of LSTM with dropout."""
    symbols, count = data.characters()
    return language(RecurrentModel(count, 48, 96, layers=2, dropout=0.2), symbols, 24, 16)


def word_lstm() -> Script:
    """Words of a vocabulary of 2000 by an LSTM."""
    return language(RecurrentModel(2000, 48, 64), data.words(), 16, 16)


def word_bag() -> Script:
    """Which text a passage is from, by the mean of its words' embeddings."""
    return supervised(WordBag(), data.bags(), F.cross_entropy, 64)


def recommender() -> Script:
    """Ratings by embeddings of users and items."""
    return supervised(Recommender(), data.ratings(), F.mse_loss, 1024)


def graph_net() -> Script:
    """Classes of a graph's nodes, a third of them labelled, all in each step."""
    features, labels, edges = data.graph()
    known = len(labels) // 3
    model = GraphNet(features.shape[1], int(labels.max()) + 1)
    return Script(
        [Part(model, lambda step: F.cross_entropy(model(features, edges)[:known], labels[:known]))],
        held_out=lambda: F.cross_entropy(model(features, edges)[known:], labels[known:]),
    )
