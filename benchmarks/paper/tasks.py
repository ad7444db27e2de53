"""The tasks that stand for Mask R-CNN, BERT and KAISA's U-Net on one CPU; deterministic, made of what is installed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common.models import Detector, Encoder, UNet
from benchmarks.common.tasks import SPLIT_SEED, Batch, Examples, Task, Windows, generator, token_cross_entropy

# Scenes: digits on a noisy ground ------------------------------------------------------------------------------------

NOISE = 0.15  # standard deviation; ink is 1
INK = 0.3  # a pixel darker than this belongs to the digit
TRAIN, TEST = 2000, 400  # scenes


@dataclass(frozen=True)
class Scenes:
    """Digits of 8 to 12 pixels, pasted at random places without overlap, among scraps of other digits."""

    images: Tensor  # ``[n, 1, side, side]``
    masks: Tensor  # ``[n, objects, side, side]``, 1 where the digit has ink
    labels: Tensor  # ``[n, objects]``


def scenes(digits: np.ndarray, labels: np.ndarray, count: int, side: int, objects: int, scraps: int) -> Scenes:
    """Return ``count`` scenes of the given digits, ``[m, 8, 8]`` in [0, 1]; the same ones every time."""
    random = np.random.default_rng([SPLIT_SEED, count])
    images = random.normal(0, NOISE, (count, side, side))
    masks = np.zeros((count, objects, side, side))
    chosen = random.integers(len(digits), size=(count, objects + scraps))
    for image, mask, rows in zip(images, masks, chosen, strict=True):
        for scrap in digits[rows[objects:]]:
            top, left = random.integers(side - 3, size=2)
            corner = random.integers(6, size=2)
            image[top : top + 3, left : left + 3] += scrap[corner[0] : corner[0] + 3, corner[1] : corner[1] + 3]
        for index, digit in enumerate(digits[rows[:objects]]):
            size = random.integers(8, 13)
            source = np.arange(size) * 8 // size
            large = digit[np.ix_(source, source)]
            for _ in range(50):  # tries to find a free place; then it may cover others
                top, left = random.integers(side - size + 1, size=2)
                place = np.s_[top : top + size, left : left + size]
                if not mask[:index][:, place[0], place[1]].any():
                    break
            image[place] = np.maximum(image[place], large)
            mask[:index][:, place[0], place[1]] *= large <= INK
            mask[index][place] = large > INK
    pixels, ink = (torch.from_numpy(array).float() for array in (images[:, None], masks))
    return Scenes(pixels, ink, torch.from_numpy(labels[chosen[:, :objects]]))


def split_scenes(side: int, objects: int, scraps: int) -> tuple[Scenes, Scenes]:
    """Return scenes to train on and, of other digits, held-out ones."""
    data = load_digits()
    rows = train_test_split(np.arange(len(data.images)), test_size=0.2, stratify=data.target, random_state=SPLIT_SEED)
    train, test = (
        scenes(data.images[part] / 16, data.target[part], count, side, objects, scraps)
        for part, count in zip(rows, (TRAIN, TEST), strict=True)
    )
    return train, test


# Mask R-CNN: one object, its class, its box, its mask ----------------------------------------------------------------

SIDE, CLASSES = 20, 10
BOX = slice(CLASSES, CLASSES + 4)  # columns of the output; those of the target begin behind the label
MASK_WEIGHT = 5.0
OVERLAP = 0.5  # of the box or the mask with the true one, from which on an object counts as found


def boxes(masks: Tensor) -> Tensor:
    """Return top, left, bottom, right of the ink of each mask ``[n, side, side]``, as shares of the side."""
    side = masks.shape[-1]
    edges = []
    for lines in (masks.amax(2), masks.amax(1)):
        first, behind = lines.argmax(1), side - lines.flip(1).argmax(1)
        edges.append(torch.stack([first, behind], dim=1))
    return torch.stack(edges, dim=2).flatten(1).float() / side


def detection_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the sum of Mask R-CNN's losses: of the class, the box and the mask, each the mean over the images.

    That of the mask counts several times: here it is over the whole image, of which the object is a small part.
    """
    label, box, mask = target[:, 0].long(), target[:, 1:5], target[:, 5:]
    of_class = F.cross_entropy(output[:, :CLASSES], label)
    of_box = F.smooth_l1_loss(output[:, BOX], box, beta=0.05, reduction="sum") / len(output)
    of_mask = F.binary_cross_entropy_with_logits(output[:, BOX.stop :], mask)
    return of_class + of_box + MASK_WEIGHT * of_mask


def box_overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return intersection over union of boxes ``[n, 4]``, row by row."""
    edges = torch.minimum(one[:, 2:], other[:, 2:]) - torch.maximum(one[:, :2], other[:, :2])
    both = edges.clamp(min=0).prod(1)
    areas = [(box[:, 2:] - box[:, :2]).clamp(min=0).prod(1) for box in (one, other)]
    return both / (areas[0] + areas[1] - both)


def mask_overlap(one: Tensor, other: Tensor) -> Tensor:
    """Return intersection over union of masks ``[n, pixels]``, row by row."""
    return (one & other).sum(1) / (one | other).sum(1).clamp(min=1)


def found_by(part: str, output: Tensor, target: Tensor) -> tuple[float, float]:
    """Return how many objects have the right class and a "box" or "mask" that overlaps enough, and how many there are.

    With one object per image and the threshold of 0.5 this is what COCO's AP50 comes to without a ranking.
    """
    right = output[:, :CLASSES].argmax(1) == target[:, 0]
    if part == "box":
        overlap = box_overlap(output[:, BOX], target[:, 1:5])
    else:
        overlap = mask_overlap(output[:, BOX.stop :] > 0, target[:, 5:] > 0)
    return int((right & (overlap >= OVERLAP)).sum()), len(output)


def detection() -> Task:
    """One digit in a scene of 20 x 20: class, box and mask, by a backbone with a box head and a mask head."""
    splits = split_scenes(SIDE, objects=1, scraps=3)
    train, test = ((s.images, torch.cat([s.labels, boxes(s.masks[:, 0]), s.masks.flatten(1)], dim=1)) for s in splits)
    return Task(
        name="detection",
        model=partial(Detector, SIDE, CLASSES),
        loss=detection_loss,
        source=Examples(*train),
        held_out={"test": test},
        fisher="empirical",
        loss_average="batch",
        outer=("box.3", "mask.7"),
        target=0.8,
        scores={"box": partial(found_by, "box"), "mask": partial(found_by, "mask")},
    )


# KAISA's U-Net -------------------------------------------------------------------------------------------------------


def dice(output: Tensor, target: Tensor) -> tuple[float, float]:
    """Return twice the intersection of the masks, and the sum of their areas."""
    found, wanted = output > 0, target > 0
    return 2 * int((found & wanted).sum()), int(found.sum() + wanted.sum())


def segmentation() -> Task:
    """Three digits in a scene of 32 x 32, by a small U-Net that marks the ink of even digits and of no others."""
    splits = split_scenes(32, objects=3, scraps=6)
    train, test = ((s.images, (s.masks * (s.labels % 2 == 0)[..., None, None]).amax(1)) for s in splits)
    return Task(
        name="segmentation",
        model=UNet,
        loss=F.binary_cross_entropy_with_logits,
        source=Examples(*train),
        held_out={"test": test},
        fisher="bernoulli",
        loss_average="elements",
        outer=("head",),
        target=0.8,
        scores={"dice": dice},
    )


# BERT: masked bytes --------------------------------------------------------------------------------------------------

MASK = 256  # the symbol behind the 256 bytes
SHARE = 4  # one byte in so many is masked
LONGEST = 128


@dataclass(frozen=True)
class MaskedWindows:
    """Windows of a text in which the same number of bytes, at random places, is replaced by ``MASK``.

    Targets are the bytes at these places, -100 (which the cross-entropy ignores) elsewhere.
    """

    windows: Windows

    def steps_per_epoch(self, size: int) -> int:
        """Return how many batches hold as many bytes as the text."""
        return self.windows.steps_per_epoch(size)

    def masked(self, symbols: Tensor, random: torch.Generator) -> Batch:
        """Return ``symbols`` with masks, and the targets."""
        places = torch.rand(symbols.shape, generator=random).argsort(dim=1)[:, : symbols.shape[1] // SHARE]
        hidden = torch.zeros(symbols.shape, dtype=torch.bool).scatter_(1, places, True)
        return symbols.where(~hidden, MASK), symbols.where(hidden, -100)

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """Return ``size`` windows at random places."""
        symbols, _ = self.windows.batch(seed, step, size)
        return self.masked(symbols, generator(seed, -1 - step))


def masked_bytes(output: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return the right answers, and all masked bytes."""
    return int((output.argmax(-1) == targets).sum()), int((targets >= 0).sum())


def small_encoder() -> nn.Module:
    """Return BERT's shape and initialisation with two layers of width 64."""
    model = Encoder(layers=2, width=64, heads=4, symbols=MASK + 1, context=LONGEST)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


def masked_text(text: tuple[Tensor, Tensor], context: int) -> Task:
    """Masked bytes of a text (training and held-out bytes) in windows of ``context`` by a small BERT."""
    train, test = text
    held_out = MaskedWindows(Windows(test, context))
    starts = torch.linspace(0, len(test) - context - 1, 256).long()
    return Task(
        name="masked",
        model=small_encoder,
        loss=token_cross_entropy,
        source=MaskedWindows(Windows(train, context)),
        held_out={"test": held_out.masked(held_out.windows.at(starts)[0], generator(SPLIT_SEED, context))},
        fisher="categorical",
        loss_average="batch+sequence",
        outer=("head",),
        target=0.4,
        scores={"accuracy": masked_bytes},
    )
