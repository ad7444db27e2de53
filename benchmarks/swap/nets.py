"""Small networks in the manner of public scripts, beside those of ``benchmarks.common.models``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for d_in, d_out in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(d_in, d_out), activation()]
    return nn.Sequential(*layers[:-1])


def replaced(model: nn.Module, kind: type[nn.Module], make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return ``model`` with what ``make`` makes of each submodule of ``kind`` in its place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                setattr(module, name, make(child))
    return model


def sinusoids(t: Tensor, width: int) -> Tensor:
    """Return sines and cosines of ``t`` ``[n]`` in [0, 1]: ``[n, width]``."""
    angles = 1000 * t[:, None] * torch.exp(-math.log(10_000) * torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], 1)


class VAE(nn.Module):
    """The variational autoencoder of the examples of PyTorch, one hidden layer on each side."""

    def __init__(self, pixels: int = 784, width: int = 200, code: int = 20) -> None:
        super().__init__()
        self.encode = nn.Linear(pixels, width)
        self.mean, self.log_variance = nn.Linear(width, code), nn.Linear(width, code)
        self.decode, self.out = nn.Linear(code, width), nn.Linear(width, pixels)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map images ``[n, pixels]`` to probabilities of their pixels, and mean and log variance of their codes."""
        hidden = F.relu(self.encode(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.out(F.relu(self.decode(code)))), mean, log_variance


class RecurrentModel(nn.Module):
    """Embedding, LSTM and a decoder over the vocabulary, with dropout between them."""

    def __init__(self, symbols: int, width: int, hidden: int, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(hidden, symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map ``[n, positions]`` to logits ``[n, positions, symbols]``."""
        return self.decoder(self.drop(self.lstm(self.drop(self.symbol(symbols)))[0]))


class WordBag(nn.Module):
    """Embeddings averaged over a passage, and a classifier."""

    def __init__(self, symbols: int = 2000, width: int = 64, classes: int = 12) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.classify = mlp(width, 64, classes)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map passages ``[n, words]`` to logits."""
        return self.classify(self.symbol(symbols).mean(1))


def convolutional(dropout: float = 0.0, width: int = 16) -> nn.Sequential:
    """Return the network of the MNIST example in small: two convolutions, pooling, two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout),
        nn.Flatten(), nn.Linear(32 * width, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10),
    )  # fmt: skip


class MixerBlock(nn.Module):
    """An MLP over the patches, then one over the channels, each behind a LayerNorm (Tolstikhin et al., 2021)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = mlp(patches, 2 * patches, patches, activation=nn.GELU)
        self.within = mlp(width, 2 * width, width, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, patches, width]`` to the same shape."""
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer over patches of 2x2 pixels."""

    def __init__(self, layers: int = 2, width: int = 48, side: int = 8, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 2, stride=2)
        self.body = nn.Sequential(*(MixerBlock((side // 2) ** 2, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[n, channels, side, side]`` to logits."""
        return self.head(self.norm(self.body(self.patches(x).flatten(2).mT)).mean(1))


class RowEncoder(nn.Module):
    """PyTorch's own transformer encoder over the rows of an image."""

    def __init__(self, side: int = 8, width: int = 48, classes: int = 10) -> None:
        super().__init__()
        self.row = nn.Linear(side, width)
        self.position = nn.Parameter(0.02 * torch.randn(side, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[n, 1, side, side]`` to logits."""
        return self.head(self.body(self.row(x[:, 0]) + self.position).mean(1))


class Denoiser(nn.Module):
    """The network of tiny-diffusion: embedded coordinates and time through residual linear layers."""

    def __init__(self, width: int = 128, layers: int = 3, embedding: int = 64) -> None:
        super().__init__()
        self.embedding = embedding
        self.enter = nn.Linear(3 * embedding, width)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.leave = nn.Linear(width, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Map points ``[n, 2]`` at times ``[n]`` to the noise in them."""
        parts = [sinusoids(part, self.embedding) for part in (x[:, 0] / 40, x[:, 1] / 40, t)]
        x = F.gelu(self.enter(torch.cat(parts, 1)))
        for layer in self.body:
            x = x + F.gelu(layer(x))
        return self.leave(x)


class Coupling(nn.Module):
    """An affine coupling layer (Dinh et al., 2016): one part of the coordinates scales and shifts the other."""

    def __init__(self, mask: Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.scale = nn.Sequential(mlp(len(mask), width, width, len(mask), activation=nn.LeakyReLU), nn.Tanh())
        self.shift = mlp(len(mask), width, width, len(mask), activation=nn.LeakyReLU)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``[n, d]`` to the same shape, and the logarithms of the volumes' changes ``[n]``."""
        mask = self.get_buffer("mask")
        scale, shift = (net(x * mask) * (1 - mask) for net in (self.scale, self.shift))
        return x * mask + (1 - mask) * (x * torch.exp(scale) + shift), scale.sum(1)


class RealNVP(nn.Module):
    """Coupling layers in turn over both halves of the coordinates, to a standard normal distribution."""

    def __init__(self, dimensions: int = 2, layers: int = 6, width: int = 64) -> None:
        super().__init__()
        mask = (torch.arange(dimensions) % 2).float()
        self.layers = nn.ModuleList(Coupling(mask if number % 2 else 1 - mask, width) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, d]`` to their log densities ``[n]``."""
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, change = layer(x)
            total = total + change
        return total - 0.5 * (x**2).sum(1) - 0.5 * x.shape[1] * math.log(2 * math.pi)


class TwoHeads(nn.Module):
    """A trunk with several linear heads, whose outputs are returned as a tuple."""

    def __init__(self, trunk: nn.Module, width: int, heads: Sequence[int]) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in heads)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map inputs to the outputs of all heads."""
        hidden = self.trunk(x)
        return tuple(head(hidden) for head in self.heads)


class GraphNet(nn.Module):
    """Two graph convolutions (Kipf & Welling, 2016) with dropout; messages are added up along the edges."""

    def __init__(self, width_in: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width_in, width), nn.Linear(width, classes)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Map features ``[nodes, width_in]`` to logits."""
        x = F.relu(self._passed(self.first(F.dropout(x, training=self.training)), edges))
        return self._passed(self.second(F.dropout(x, training=self.training)), edges)

    def _passed(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degrees = torch.bincount(target, minlength=len(x)).float().rsqrt()
        messages = x[source] * (degrees[source] * degrees[target])[:, None]
        return torch.zeros_like(x).index_add(0, target, messages)


class Recommender(nn.Module):
    """Neural collaborative filtering: product and MLP of a user's and an item's embedding (He et al., 2017)."""

    def __init__(self, users: int = 600, items: int = 400, width: int = 32) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
        self.joint = mlp(2 * width, 64, 32)
        self.out = nn.Linear(width + 32, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Map pairs of numbers ``[n, 2]`` to ratings ``[n]``."""
        user, item = self.user(pairs[:, 0]), self.item(pairs[:, 1])
        joint = F.relu(self.joint(torch.cat([user, item], 1)))
        return self.out(torch.cat([user * item, joint], 1))[:, 0]
