"""The model zoo: one tiny network of each architecture family, written out here, and transformers' own classes.

A batch is a tuple of tensors with the examples first, so that a slice of each is a batch of fewer examples. The losses
are means over equally many terms of every example; the tasks can be learned in a few steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.models import Bottleneck, StagedResNet, Transformer, UNet
from benchmarks.swap.nets import Mixer

Batch = tuple[Tensor, ...]

EXAMPLES, CLASSES, SIDE = 6, 4, 8  # images are [3, SIDE, SIDE]
TOKENS, SYMBOLS, WIDTH = 6, 11, 8
PAD, MASK = 0, 1  # symbols

TIED = "weight shared by"


@dataclass(frozen=True)
class Family:
    """One kind of network, its data and its loss.

    Attributes:
        make: Builds the network, randomly initialised.
        batch: Draws a batch.
        loss: Mean loss of the network on a batch.
        average: The engine's ``loss_average`` that describes it.
        terms: Loss terms of an example, as the engine counts them from the output.
        declined: Patterns of the names of Linear and convolution weights that have no curvature, and the reason that
            the coverage table shows.
        once: Pattern of the layers that run once for all examples: the gradient at their output is a sum over them.
        part: The module that the optimizer trains; the whole by default.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Batch], Tensor]
    average: str = "batch"
    terms: int = 1
    declined: dict[str, str] = field(default_factory=dict)
    once: str = "(?!)"
    part: Callable[[Any], nn.Module] = lambda model: model


# Data ----------------------------------------------------------------------------------------------------------------


def images(generator: torch.Generator) -> Batch:
    """Four striped patterns in noise, and which of them it is."""
    labels = torch.arange(EXAMPLES) % CLASSES
    grid = torch.arange(SIDE * SIDE * 3).reshape(3, SIDE, SIDE)
    patterns = torch.stack([torch.sin(0.7 * (k + 1) * grid) for k in range(CLASSES)])
    return patterns[labels] + 0.3 * torch.randn(EXAMPLES, 3, SIDE, SIDE, generator=generator), labels


def blobs(generator: torch.Generator) -> Batch:
    """Noise with a bright rectangle, and where that is."""
    mask = torch.zeros(EXAMPLES, SIDE, SIDE)
    for n, (row, column) in enumerate(torch.randint(SIDE // 2, (EXAMPLES, 2), generator=generator).tolist()):
        mask[n, row : row + 4, column : column + 4] = 1.0
    return (mask + 0.3 * torch.randn(EXAMPLES, SIDE, SIDE, generator=generator))[:, None], mask


def counting(generator: torch.Generator, length: int = TOKENS) -> Tensor:
    """Sequences that count from a random symbol on; neither ``PAD`` nor ``MASK`` occurs."""
    start = torch.randint(SYMBOLS - 2, (EXAMPLES, 1), generator=generator)
    return 2 + (start + torch.arange(length)) % (SYMBOLS - 2)


def next_symbols(generator: torch.Generator) -> Batch:
    """Symbols and those that follow."""
    symbols = counting(generator, TOKENS + 1)
    return symbols[:, :-1], symbols[:, 1:]


def masked_symbols(generator: torch.Generator) -> Batch:
    """Padded sequences with two hidden symbols, and what they hide (-100 elsewhere)."""
    symbols = counting(generator)
    symbols[::2, -1] = PAD
    hidden = torch.rand(EXAMPLES, TOKENS - 1, generator=generator).argsort(1)[:, :2]
    labels = torch.full_like(symbols, -100).scatter(1, hidden, symbols.gather(1, hidden))
    return symbols.scatter(1, hidden, MASK), labels


def reversing(generator: torch.Generator) -> Batch:
    """Sequences, and the same backwards."""
    symbols = counting(generator)
    return symbols, symbols.flip(1)


def sequence_classes(generator: torch.Generator) -> Batch:
    """Padded sequences, and the class of their first symbol."""
    symbols = counting(generator)
    symbols[::2, -1] = PAD
    return symbols, symbols[:, 0] % CLASSES


def bright_images_and_noise(generator: torch.Generator) -> Batch:
    """For a GAN: real images, and two draws of noise."""
    real, _ = images(generator)
    z = torch.randn(2, EXAMPLES, WIDTH, 1, 1, generator=generator)
    return 0.5 + 0.1 * real, z[0], z[1]


# Losses --------------------------------------------------------------------------------------------------------------


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the output, one class per example."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def label_symbols(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the output, one class per token."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


def segment(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross-entropy per pixel."""
    inputs, mask = batch
    return F.binary_cross_entropy_with_logits(model(inputs), mask)


def translate(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a decoder that sees the targets before the one to predict."""
    source, target = batch
    output = model(source, F.pad(target[:, :-1], (1, 0), value=PAD))
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


# Images --------------------------------------------------------------------------------------------------------------


def resnet() -> nn.Module:
    """Bottleneck blocks with and without stride, a projection as shortcut."""
    return StagedResNet((1, 1), CLASSES, width=4, block=Bottleneck, small_images=True)


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, 1x1, BatchNorm, ReLU, 3x3; the output is appended to the input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, 2 * growth, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(2 * growth), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))], 1)


def densenet() -> nn.Module:
    """Two dense blocks and the transition between them."""
    stem = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    transition = [nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.Conv2d(12, 6, 1, bias=False), nn.AvgPool2d(2)]
    blocks = [DenseLayer(4, 4), DenseLayer(8, 4), *transition, DenseLayer(6, 4), nn.BatchNorm2d(10)]
    return nn.Sequential(*stem, *blocks, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(10, CLASSES))  # fmt: skip


class SqueezeExcitation(nn.Module):
    """Weights the channels by what 1x1 convolutions make of their means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.hardsigmoid(self.fc2(F.relu(self.fc1(F.adaptive_avg_pool2d(x, 1))))) * x


class InvertedResidual(nn.Module):
    """MobileNetV3's block: expansion, depthwise convolution, squeeze-and-excitation, projection."""

    def __init__(self, channels: int, expanded: int, out: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        depthwise = nn.Conv2d(expanded, expanded, 3, stride, dilation, dilation, groups=expanded, bias=False)
        self.block = nn.Sequential(
            *(nn.Conv2d(channels, expanded, 1, bias=False), nn.BatchNorm2d(expanded), nn.Hardswish(inplace=True)),
            *(depthwise, nn.BatchNorm2d(expanded), nn.Hardswish(inplace=True)),
            SqueezeExcitation(expanded, 4),
            *(nn.Conv2d(expanded, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.residual else self.block(x)


def mobilenet() -> nn.Module:
    """Depthwise convolutions with stride, and dilated."""
    blocks = [InvertedResidual(4, 8, 6, stride=2), InvertedResidual(6, 12, 6, dilation=2)]
    stem = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Hardswish(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 12), nn.Hardswish(inplace=True)]
    return nn.Sequential(*stem, *blocks, *head, nn.Linear(12, CLASSES))


class LayerNorm2d(nn.LayerNorm):
    """torchvision's: a LayerNorm with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise, LayerNorm and a feed-forward layer on channels-last pixels; scaled by a bare parameter."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.mlp = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.layer_scale = nn.Parameter(torch.full((channels, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer_scale * self.mlp(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    """A patchifying stem, two stages of one block, the downsampling between them."""
    down = [LayerNorm2d(6), nn.Conv2d(6, 8, 2, stride=2)]
    stages = [ConvNeXtBlock(6, 7), *down, ConvNeXtBlock(8, 3)]
    head = [nn.AdaptiveAvgPool2d(1), LayerNorm2d(8), nn.Flatten(), nn.Linear(8, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, 6, 2, stride=2), LayerNorm2d(6), *stages, *head)


class EncoderBlock(nn.Module):
    """torchvision's ViT block: ``nn.MultiheadAttention`` and a feed-forward layer, each behind a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """Patches by a convolution, a class token and positions as bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, 5, WIDTH))
        self.layers = nn.Sequential(EncoderBlock(WIDTH), EncoderBlock(WIDTH))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.pos_embedding
        return self.head(self.ln(self.layers(x))[:, 0])


def mixer() -> nn.Module:
    """Feed-forward layers over the patches and over the channels, in turn."""
    return Mixer(channels=3, width=WIDTH, side=SIDE, classes=CLASSES)


# Sequences -----------------------------------------------------------------------------------------------------------


class LSTMClassifier(nn.Module):
    """Embedding, bidirectional LSTM, Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH, padding_idx=PAD)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(symbols))[0][:, -1])


def gpt() -> nn.Module:
    """Causal, with the output weight tied to the embedding."""
    return Transformer(layers=2, width=WIDTH, heads=2, context=TOKENS, symbols=SYMBOLS, tied=True)


class BERT(nn.Module):
    """``nn.TransformerEncoder`` with a padding mask, under the tied head of a masked language model."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, WIDTH, padding_idx=PAD)
        self.position, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.transform, self.transform_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)
        nn.init.normal_(self.symbol.weight, std=0.1)
        self.head.weight = self.symbol.weight

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.norm(self.symbol(symbols) + self.position(torch.arange(symbols.shape[1], device=symbols.device)))
        x = self.encoder(x, src_key_padding_mask=symbols == PAD)
        return self.head(self.transform_norm(F.gelu(self.transform(x))))


class T5Attention(nn.Module):
    """Four projections without bias; scores plus a bias of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            p(y).unflatten(-1, (2, -1)).transpose(1, 2) for p, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = (q @ k.mT + bias).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class T5Stack(nn.Module):
    """Encoder or decoder of T5 1.1: RMSNorm, gated feed-forward layer, relative positions in an Embedding."""

    def __init__(self, embed: nn.Embedding, decoder: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.embed_tokens.weight = embed.weight
        self.relative_attention_bias = nn.Embedding(2 * TOKENS, 2)
        self.attention, self.cross = T5Attention(), T5Attention() if decoder else None
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(4 if decoder else 3))
        self.wi_0, self.wi_1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.wo = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, symbols: Tensor, memory: Tensor | None = None) -> Tensor:
        x, places = self.embed_tokens(symbols), torch.arange(symbols.shape[1], device=symbols.device)
        distance = places[None] - places[:, None]
        bias = self.relative_attention_bias(distance + TOKENS).permute(2, 0, 1)
        if self.cross is not None:
            bias = bias.masked_fill(distance > 0, -torch.inf)
        y = self.norms[0](x)
        x = x + self.attention(y, y, bias)
        if self.cross is not None and memory is not None:
            x = x + self.cross(self.norms[3](x), memory, x.new_zeros(()))
        y = self.norms[1](x)
        return self.norms[2](x + self.wo(F.gelu(self.wi_0(y)) * self.wi_1(y)))


class T5(nn.Module):
    """Encoder and decoder on one embedding, the output head apart."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(SYMBOLS, WIDTH)
        self.encoder, self.decoder = T5Stack(self.shared, False), T5Stack(self.shared, True)
        self.lm_head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.lm_head(self.decoder(target, self.encoder(source)))


class Experts(nn.Module):
    """Sends each token to ``chosen`` of its experts, by a router, and adds up what they say.

    ``call_all`` also calls an expert to which no token was sent, with no rows; otherwise it is left out.
    """

    def __init__(self, experts: list[nn.Module], width: int, chosen: int = 2, call_all: bool = False) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, len(experts), bias=False), nn.ModuleList(experts)
        self.chosen, self.call_all = chosen, call_all

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        gates, choice = self.router(rows).softmax(-1).topk(self.chosen, dim=-1)
        y = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            token, slot = (choice == i).nonzero(as_tuple=True)
            if len(token) or self.call_all:
                y = y.index_add(0, token, gates[token, slot, None] * expert(rows[token]))
        return y.view_as(x)


class MixtureOfExperts(nn.Module):
    """A causal language model whose feed-forward layer is a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.norm = nn.Embedding(SYMBOLS, WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        experts: list[nn.Module] = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        ]
        self.moe, self.head = Experts(experts, WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        x = self.symbol(symbols)
        x = x + torch.tanh(self.mix(x.cumsum(1) / (1 + torch.arange(x.shape[1], device=x.device))[:, None]))
        return self.head(x + self.moe(self.norm(x)))


# A pair with two optimizers ------------------------------------------------------------------------------------------


class GAN(nn.Module):
    """DCGAN's generator and discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.ConvTranspose2d(WIDTH, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            *(nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(3, 6, 4, stride=2, padding=1), nn.LeakyReLU(0.2, inplace=True)),
            *(nn.Conv2d(6, 8, 4, stride=2, padding=1, bias=False), nn.GroupNorm(2, 8)),
            *(nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 2), nn.Flatten(0)),
        )


def discriminate(model: GAN, batch: Batch) -> Tensor:
    """The discriminator's loss."""
    real, z, _ = batch
    with torch.no_grad():
        fake = model.generator(z)
    return F.softplus(-model.discriminator(real)).mean() + F.softplus(model.discriminator(fake)).mean()


def generate(model: GAN, batch: Batch) -> Tensor:
    """The generator's loss."""
    return F.softplus(-model.discriminator(model.generator(batch[2]))).mean()


# transformers' own ---------------------------------------------------------------------------------------------------


def hugging_face(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Builds one of transformers' models from a tiny configuration."""

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return make


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The model computes its loss itself."""
    symbols, labels = batch
    return model(input_ids=symbols, labels=labels).loss


def padded_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The same with an attention mask."""
    symbols, labels = batch
    return model(input_ids=symbols, attention_mask=(symbols != PAD).long(), labels=labels).loss


def copies(generator: torch.Generator) -> Batch:
    """Symbols twice: causal models shift their labels themselves."""
    symbols = counting(generator)
    return symbols, symbols


def pixel_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Image classification."""
    pixels, labels = batch
    return model(pixel_values=pixels, labels=labels).loss


def speech(generator: torch.Generator) -> Batch:
    """Random spectra of 16 frames, and what is said."""
    return torch.randn(EXAMPLES, 4, 16, generator=generator), counting(generator, 4)


def speech_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Whisper's."""
    spectra, labels = batch
    return model(input_features=spectra, labels=labels).loss


_LLAMA = {
    "vocab_size": SYMBOLS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "pad_token_id": PAD,
}  # fmt: skip
_T5 = {
    "vocab_size": SYMBOLS, "d_model": WIDTH, "d_kv": 4, "d_ff": 2 * WIDTH, "num_layers": 1, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 8, "dropout_rate": 0.0,
    "decoder_start_token_id": PAD,
}  # fmt: skip
_SYMBOLS: dict[str, Any] = {"average": "batch+sequence", "terms": TOKENS}

FAMILIES: dict[str, Family] = {
    "ResNet": Family(resnet, images, classify),
    "DenseNet": Family(densenet, images, classify),
    "MobileNet": Family(mobilenet, images, classify),
    "ConvNeXt": Family(convnext, images, classify),
    "ViT": Family(ViT, images, classify),
    "MLP-Mixer": Family(mixer, images, classify),
    "UNet": Family(lambda: UNet(1, (4, 8)), blobs, segment, "elements", SIDE * SIDE),
    "LSTM classifier": Family(LSTMClassifier, sequence_classes, classify),
    "GPT": Family(gpt, next_symbols, label_symbols, **_SYMBOLS, declined={"head": TIED}, once="position"),
    "BERT": Family(BERT, masked_symbols, label_symbols, **_SYMBOLS, declined={"head": TIED}, once="position"),
    "T5": Family(T5, reversing, translate, **_SYMBOLS, once="relative_attention_bias"),
    "Mixture of Experts": Family(MixtureOfExperts, next_symbols, label_symbols, **_SYMBOLS),
    "GAN, discriminator": Family(GAN, bright_images_and_noise, discriminate, part=lambda model: model.discriminator),
    "GAN, generator": Family(GAN, bright_images_and_noise, generate, part=lambda model: model.generator),
}

TRANSFORMERS: dict[str, Family] = {
    "BertForMaskedLM": Family(
        hugging_face(
            "BertForMaskedLM", "BertConfig", vocab_size=SYMBOLS, hidden_size=WIDTH, num_hidden_layers=1,
            num_attention_heads=2, intermediate_size=2 * WIDTH, max_position_embeddings=8, pad_token_id=PAD,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ),
        masked_symbols, padded_loss, **_SYMBOLS, declined={r"cls\.predictions\.decoder": TIED}, once="position_embed",
    ),
    "GPT2LMHeadModel": Family(
        hugging_face(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=SYMBOLS, n_positions=8, n_embd=WIDTH, n_layer=1, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=PAD, eos_token_id=PAD,
        ),
        copies, own_loss, **_SYMBOLS, declined={"lm_head": TIED}, once="wpe",
    ),
    "T5ForConditionalGeneration": Family(
        hugging_face("T5ForConditionalGeneration", "T5Config", **_T5),
        reversing, own_loss, **_SYMBOLS, declined={"lm_head": TIED}, once="relative_attention_bias",
    ),
    "ViTForImageClassification": Family(
        hugging_face(
            "ViTForImageClassification", "ViTConfig", hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=2 * WIDTH, image_size=SIDE, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0.0,
        ),
        images, pixel_loss,
    ),
    "LlamaForCausalLM": Family(
        hugging_face("LlamaForCausalLM", "LlamaConfig", **_LLAMA), copies, own_loss, **_SYMBOLS
    ),
    "MistralForCausalLM": Family(
        hugging_face("MistralForCausalLM", "MistralConfig", **_LLAMA, sliding_window=4),
        copies, own_loss, **_SYMBOLS,
    ),
    "WhisperForConditionalGeneration": Family(
        hugging_face(
            "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=SYMBOLS, num_mel_bins=4, d_model=WIDTH,
            encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, max_source_positions=8, max_target_positions=8,
            pad_token_id=PAD, bos_token_id=MASK, eos_token_id=MASK, decoder_start_token_id=PAD, dropout=0.0,
        ),
        speech, speech_loss, "batch+sequence", 4, declined={"proj_out": TIED},
    ),
}  # fmt: skip
