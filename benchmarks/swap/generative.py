"""Scripts that model data without targets: autoencoders, diffusion, flows, a GAN, embeddings of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.models import UNet
from benchmarks.swap import data
from benchmarks.swap.nets import VAE, Denoiser, RealNVP, mlp, replaced
from benchmarks.swap.training import Handed, Part, Script, on_batches, parameters, whole


def unsupervised(
    model: nn.Module, split: Sequence[Tensor], loss: Callable[[Tensor], Tensor], batch: int, handed: Handed = parameters
) -> Script:
    """Return the script that trains ``model`` by ``loss(inputs)`` on random batches."""
    train, others = split
    return on_batches(model, ([train], [others]), loss, batch, handed)


def vae() -> Script:
    """A variational autoencoder whose loss is a sum over pixels and batch, as the example of PyTorch has it."""
    model = VAE()

    def loss(x: Tensor) -> Tensor:
        pixels, mean, log_variance = model(x)
        divergence = -0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp())
        return F.binary_cross_entropy(pixels, x, reduction="sum") + divergence

    return unsupervised(model, data.curves(), loss, 64)


def autoencoder() -> Script:
    """A deep autoencoder of digits with a squared error."""
    (train, _), (test, _) = data.flat_digits()
    model = nn.Sequential(mlp(64, 256, 128, 16), mlp(16, 128, 256, 64))
    return unsupervised(model, (train, test), lambda x: F.mse_loss(model(x), x), 128, whole)


def noised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x`` at random times of a diffusion with a cosine schedule, the noise in it, and the times ``[n]``."""
    t, noise = torch.rand(len(x)), torch.randn_like(x)
    angle = (t * math.pi / 2).view(-1, *[1] * (x.ndim - 1))
    return angle.cos() * x + angle.sin() * noise, noise, t


def unet_diffusion() -> Script:
    """Noise in images of digits by a U-Net with GroupNorm, told the time by a channel of its own."""
    model = UNet(channels=2, widths=(8, 16, 32))
    replaced(model, nn.BatchNorm2d, lambda norm: nn.GroupNorm(4, len(norm.get_parameter("weight"))))
    (train, _), (test, _) = data.digits()

    def loss(x: Tensor) -> Tensor:
        x, noise, t = noised(x)
        return F.mse_loss(model(torch.cat([x, t.view(-1, 1, 1, 1).expand_as(x)], 1)), noise[:, 0])

    return unsupervised(model, (train, test), loss, 32)


def point_diffusion() -> Script:
    """Noise in points of a spiral by an MLP, as tiny-diffusion."""
    model = Denoiser()

    def loss(x: Tensor) -> Tensor:
        x, noise, t = noised(x)
        return F.mse_loss(model(x, t), noise)

    return unsupervised(model, data.roll(), loss, 256)


def flow_of_moons() -> Script:
    """The density of two moons by a flow of coupling layers."""
    model = RealNVP()
    return unsupervised(model, data.moons(), lambda x: -model(x).mean(), 256, whole)


def flow_of_sensors() -> Script:
    """The density of eight dependent measurements by a flow of coupling layers."""
    model = RealNVP(dimensions=8)
    return unsupervised(model, data.sensors(), lambda x: -model(x).mean(), 256)


def distance(x: Tensor, y: Tensor) -> Tensor:
    """Return the energy distance of two clouds of points, 0 where they are of one distribution."""
    return 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()


def gan() -> Script:
    """Points of two moons by a generator and a discriminator with squared errors (LSGAN).

    Judged by the distance of 512 points to the data: the losses of the two say little.
    """
    maker, critic = mlp(8, 128, 128, 2), mlp(2, 128, 128, 1, activation=lambda: nn.LeakyReLU(0.2))
    train, test = data.moons()

    def some(count: int) -> Tensor:
        return train[torch.randint(len(train), (count,))]

    def critical(step: int) -> Tensor:
        real, fake = critic(some(256)), critic(maker(torch.randn(256, 8)).detach())
        return F.mse_loss(real, torch.ones_like(real)) + F.mse_loss(fake, torch.zeros_like(fake))

    def made(step: int) -> Tensor:
        fake = critic(maker(torch.randn(256, 8)))
        return F.mse_loss(fake, torch.ones_like(fake))

    return Script(
        [Part(critic, critical), Part(maker, made)],
        judged=lambda: distance(maker(torch.randn(512, 8)), some(512)),
        held_out=lambda: distance(maker(torch.randn(2000, 8)), test),
    )


def augmented(x: Tensor) -> Tensor:
    """Return images shifted by up to a pixel each way, with noise and some pixels blank."""
    shifts = torch.randint(-1, 2, (2,)).tolist()
    x = torch.roll(x, shifts, (2, 3)) + 0.3 * torch.randn_like(x)
    return x * (torch.rand_like(x) > 0.15)


def image_encoder(width: int) -> nn.Sequential:
    """Return convolutions and a projection to ``width`` numbers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, width),
    )  # fmt: skip


def contrastive() -> Script:
    """Two views of each digit told from all others, as SimCLR (InfoNCE at a temperature of 0.5)."""
    (train, _), (test, _) = data.digits()
    model = image_encoder(32)

    def loss(x: Tensor) -> Tensor:
        codes = F.normalize(model(torch.cat([augmented(x), augmented(x)])), dim=1)
        likeness = codes @ codes.T / 0.5
        likeness.fill_diagonal_(-math.inf)
        return F.cross_entropy(likeness, torch.arange(len(codes)).roll(len(x)))

    return unsupervised(model, (train, test), loss, 64)


def siamese() -> Script:
    """Whether two digits are of one class, by the distance of their codes; the network is called twice in a step."""
    (train, labels), (test, answers) = data.digits()
    model = image_encoder(16)

    def loss(images: Tensor, classes: Tensor) -> Tensor:
        half = len(images) // 2
        gap = (model(images[:half]) - model(images[half : 2 * half])).norm(dim=1)
        same = classes[:half] == classes[half : 2 * half]
        return torch.where(same, gap**2, F.relu(1 - gap) ** 2).mean()

    def of_step(step: int) -> Tensor:
        first = torch.randint(len(train), (64,))
        equal = (labels[first][:, None] == labels).float().multinomial(1)[:, 0]
        second = torch.where(torch.rand(64) < 0.5, equal, torch.randint(len(train), (64,)))
        rows = torch.cat([first, second])
        return loss(train[rows], labels[rows])

    return Script([Part(model, of_step)], held_out=lambda: loss(test, answers))
