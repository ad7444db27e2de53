"""The networks of the tasks, and those whose cost is measured or predicted.

Residual network, deep autoencoder, causal transformer, U-Net, a detector with two heads; and ResNet-18 to -152, ViT-S,
GPT-small, BERT-Base and -Large.

All of them use plain ``nn`` modules (Linear, Conv2d, Embedding, BatchNorm2d, LayerNorm), so that an optimizer that
looks at modules sees every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def projection(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    """Return the shortcut of a block: a 1x1 convolution with BatchNorm where it changes the shape, else nothing."""
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    convolution = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))


class Padding(nn.Module):
    """A shortcut without weights: skips pixels and adds channels of zeros (He et al., 2015, option A)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, channels_out - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, channels_in, h, w]`` to ``[n, channels_out, h / stride, w / stride]``."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions (the first carries the stride) around a shortcut, each with BatchNorm."""

    expansion = 1

    def __init__(
        self, channels_in: int, width: int, stride: int, shortcut: Callable[[int, int, int], nn.Module] = projection
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = shortcut(channels_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, channels_in, h, w]`` to ``[n, width, h / stride, w / stride]``."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """The CIFAR form of the residual network: three stages of ``blocks`` blocks, ``6 blocks + 2`` weight layers.

    Args:
        channels: Channels of the input image.
        blocks: Per stage; 2 gives ResNet-14, 5 gives ResNet-32.
        classes: Number of classes.
        width: Channels of the first stage; the second and third have two and four times as many.
    """

    def __init__(self, channels: int, blocks: int, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width * 2**stage for stage in range(3) for _ in range(blocks)]
        pairs = zip([width, *widths], widths, strict=False)
        body = (BasicBlock(c_in, c_out, 1 if c_in == c_out else 2, Padding) for c_in, c_out in pairs)
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[n, channels, h, w]`` to logits ``[n, classes]``."""
        x = self.body(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean(dim=(2, 3)))


def autoencoder(widths: Sequence[int] = (784, 400, 200, 100, 50, 25, 6), incoming: int = 15) -> nn.Sequential:
    """Return the deep autoencoder of Hinton & Salakhutdinov (2006) with the sparse start of Martens (2010).

    Hidden units are tanh, the code (the narrowest layer) is linear, the output is the logits of the pixels.

    Args:
        widths: Units of each layer from the image to the code; the decoder mirrors them.
        incoming: Weights per unit drawn from N(0, 0.3^2); all others, and the biases, start at 0.
    """
    sizes = [*widths, *reversed(widths[:-1])]
    code = len(widths) - 1
    layers: list[nn.Module] = []
    for position, (d_in, d_out) in enumerate(zip(sizes, sizes[1:], strict=False), start=1):
        linear = nn.Linear(d_in, d_out)
        with torch.no_grad():
            chosen = torch.rand(d_out, d_in).argsort(dim=1) < incoming
            linear.weight.copy_(torch.randn(d_out, d_in) * 0.3 * chosen)
            linear.bias.zero_()
        layers.append(linear)
        if position not in (code, len(sizes) - 1):
            layers.append(nn.Tanh())
    return nn.Sequential(*layers)


class TransformerBlock(nn.Module):
    """Self-attention (causal or not) and a feed-forward layer of four times the width, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, positions, width]`` to the same shape."""
        n, positions, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, positions, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, positions, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A causal language model with learned positions; over bytes, small and with untied output weights by default."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        symbols: int = 256,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.position = nn.Embedding(context, width)
        self.body = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=not tied)
        if tied:
            nn.init.normal_(self.symbol.weight, std=0.02)
            self.head.weight = self.symbol.weight

    def forward(self, symbols: Tensor) -> Tensor:
        """Map token numbers ``[n, positions]`` to logits ``[n, positions, symbols]``."""
        x = self.symbol(symbols) + self.position(torch.arange(symbols.shape[1], device=symbols.device))
        return self.head(self.norm(self.body(x)))


class VisionTransformer(nn.Module):
    """A ViT (Dosovitskiy et al., 2020) that averages its patches instead of keeping a class token; ViT-S by default."""

    def __init__(
        self, layers: int = 12, width: int = 384, heads: int = 6, patch: int = 16, side: int = 224, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.body = nn.Sequential(*(TransformerBlock(width, heads, causal=False) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[n, 3, side, side]`` to logits ``[n, classes]``."""
        x = self.patches(x).flatten(2).mT + self.position
        return self.head(self.norm(self.body(x)).mean(dim=1))


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 (which carries the stride) and a 1x1 convolution around a shortcut, each with BatchNorm."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = self.expansion * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels_out)
        self.shortcut = projection(channels_in, channels_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, channels_in, h, w]`` to ``[n, 4 width, h / stride, w / stride]``."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class StagedResNet(nn.Module):
    """The ImageNet form of the residual network (He et al., 2015): four stages, each of twice the channels.

    Args:
        blocks: Per stage; the default gives ResNet-18.
        classes: Number of classes.
        width: Channels inside the blocks of the first stage.
        block: ``BasicBlock``, or ``Bottleneck`` with the stride in its 3x3 convolution.
        small_images: A 3x3 stem without stride and pooling, as usual on CIFAR.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (2, 2, 2, 2),
        classes: int = 1000,
        width: int = 64,
        *,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_images else (7, 2)
        self.stem = nn.Conv2d(3, width, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        body: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for position in range(count):
                stride = 2 if stage > 0 and position == 0 else 1
                body.append(block(channels, width * 2**stage, stride))
                channels = block.expansion * width * 2**stage
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[n, 3, h, w]`` to logits ``[n, classes]``."""
        x = self.pool(F.relu(self.norm(self.stem(x))))
        return self.head(self.body(x).mean(dim=(2, 3)))


class BottleneckResNet(StagedResNet):
    """(3, 4, 6, 3) blocks give ResNet-50, (3, 4, 23, 3) ResNet-101, (3, 8, 36, 3) ResNet-152."""

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000, width: int = 64) -> None:
        super().__init__(blocks, classes, width, block=Bottleneck)


class EncoderBlock(nn.Module):
    """Self-attention with separate projections and a feed-forward layer, each before a LayerNorm, as in BERT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, positions, width]`` to the same shape."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT (Devlin et al., 2018) with the head of its masked language model.

    Args:
        layers: 12 in BERT-Base, 24 in BERT-Large.
        width: 768 and 1024.
        heads: 12 and 16.
        symbols: Size of the vocabulary.
        context: Longest sequence.
    """

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, symbols: int = 30522, context: int = 512
    ) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.position = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.body = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(layers)))
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)
        self.head.weight = self.symbol.weight

    def forward(self, symbols: Tensor) -> Tensor:
        """Map token numbers ``[n, positions]`` to logits ``[n, positions, symbols]``."""
        x = self.symbol(symbols) + self.position(torch.arange(symbols.shape[1], device=symbols.device))
        x = self.body(self.norm(x))
        return self.head(self.transform_norm(F.gelu(self.transform(x))))


def convolutions(channels_in: int, channels_out: int, count: int, stride: int = 1) -> nn.Sequential:
    """Return ``count`` 3x3 convolutions with BatchNorm and ReLU, the first of which carries the stride."""
    layers: list[nn.Module] = []
    for position in range(count):
        incoming = channels_out if position else channels_in
        step = 1 if position else stride
        layers += [nn.Conv2d(incoming, channels_out, 3, stride=step, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(channels_out), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """The U-Net (Ronneberger et al., 2015): down and up again, with a bridge between the halves at each size.

    Args:
        channels: Channels of the input image.
        widths: Channels at each size, each half of the one before.
    """

    def __init__(self, channels: int = 1, widths: Sequence[int] = (8, 16, 32)) -> None:
        super().__init__()
        pairs = list(zip((channels, *widths), widths, strict=False))
        self.down = nn.ModuleList(convolutions(c_in, c_out, 2) for c_in, c_out in pairs)
        steps = list(zip(widths, widths[1:], strict=False))[::-1]
        self.widen = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in steps)
        self.up = nn.ModuleList(convolutions(2 * above, above, 2) for above, _ in steps)
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[n, channels, h, w]`` to the logits of a mask, ``[n, h, w]``; h and w are divided by 4."""
        bridges: list[Tensor] = []
        for position, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if position else x)
            bridges.append(x)
        bridges.pop()
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([bridges.pop(), widen(x)], dim=1))
        return self.head(x)[:, 0]


class Detector(nn.Module):
    """Mask R-CNN (He et al., 2017) in miniature, for one object per image: a backbone, a box head and a mask head.

    Args:
        side: Pixels of the square image, a multiple of 4.
        classes: Number of classes of objects.
        width: Channels of the first convolution.
    """

    def __init__(self, side: int = 24, classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            convolutions(1, width, 2),
            convolutions(width, 2 * width, 2, stride=2),
            convolutions(2 * width, 32, 2, stride=2),
        )
        self.box = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, classes + 4)
        )
        self.mask = nn.Sequential(
            convolutions(32, 32, 2), nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ReLU(), nn.Conv2d(8, 1, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[n, 1, side, side]`` to ``[n, classes + 4 + side * side]``: classes, box, logits of the mask."""
        features = self.backbone(x)
        return torch.cat([self.box(features), self.mask(features).flatten(1)], dim=1)
