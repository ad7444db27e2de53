"""The paper's data sets, read from a folder the user has; nothing is downloaded.

    CIFAR-10     the unpacked archive, python version (``data_batch_1``, ...) or binary one (``data_batch_1.bin``, ...)
    ImageNet     ``train/CLASS/*.JPEG`` and ``val/CLASS/*.JPEG``, one folder per class, as torchvision's ImageFolder
    WikiText     text files whose names hold "train" and "test" (or "valid"), read as bytes

A folder that holds none of them, or a file that is not what its name says, is a ``ValueError`` that names the file and
what to do. The pickles of CIFAR-10 are read by an unpickler that knows numpy arrays and nothing else.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.models import BottleneckResNet, ResNet
from benchmarks.common.tasks import Batch, Examples, Task, digits, generator

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10_FILES = {"train": [f"data_batch_{part}" for part in range(1, 6)], "test": ["test_batch"]}
CIFAR10_SHAPE = (3, 32, 32)
PICTURES = {".jpeg", ".jpg", ".png"}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HELD_OUT = 5000  # pictures of an image folder that are evaluated, spread evenly over its validation part
TEXTS = {".raw", ".text", ".tokens", ".txt"}

Labelled = tuple[np.ndarray, np.ndarray]  # uint8 images [n, 3, 32, 32] and labels [n]


# Which data it is ----------------------------------------------------------------------------------------------------


def kind(folder: Path) -> str:
    """Say what ``folder`` holds: "cifar10", "imagenet" or "wikitext".

    Raises:
        ValueError: If it is no folder or holds none of them.
    """
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: is no folder")
    if _cifar10_folder(folder):
        return "cifar10"
    if (folder / "train").is_dir():
        return "imagenet"
    if any(path.suffix in TEXTS for path in folder.iterdir()):
        return "wikitext"
    raise ValueError(
        f"--data {folder}: holds neither data_batch_1 or data_batch_1.bin (CIFAR-10), nor train/CLASS/*.JPEG and "
        f"val/CLASS/*.JPEG (ImageNet), nor text files such as wiki.train.tokens (WikiText); give the folder of one"
    )


# CIFAR-10 ------------------------------------------------------------------------------------------------------------


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for ``_codecs.encode``, by which pickles of protocol 2 write bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


def _numpy_names() -> Mapping[tuple[str, str], Any]:
    """Return all that a pickled dictionary of numpy arrays may name, under numpy's module names old and new."""
    names: dict[tuple[str, str], Any] = {("_codecs", "encode"): _encode}
    names |= {("numpy", "dtype"): np.dtype, ("numpy", "ndarray"): np.ndarray}
    for module, function in (("multiarray", "_reconstruct"), ("numeric", "_frombuffer")):
        found = getattr(importlib.import_module(f"numpy._core.{module}"), function)
        names |= {(f"numpy.{core}.{module}", function): found for core in ("core", "_core")}
    return names


class ArraysOnly(pickle.Unpickler):
    """Reads plain values and numpy arrays; refuses a pickle that names anything else, as one that runs code would."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what the pickle names.

        Raises:
            pickle.UnpicklingError: If that is nothing a numpy array needs.
        """
        try:
            return _numpy_names()[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no CIFAR-10 file does") from None


def _cifar10_folder(folder: Path) -> Path | None:
    """Return where the batches lie: in the folder or in the one that the archive unpacks to."""
    for inner in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        if (inner / "data_batch_1").exists() or (inner / "data_batch_1.bin").exists():
            return inner
    return None


def _pickled(path: Path) -> Labelled:
    """Read a batch of the python version."""
    try:
        with path.open("rb") as file:
            read = ArraysOnly(file, encoding="bytes").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in read.items()}
        return np.asarray(batch["data"], np.uint8).reshape(-1, *CIFAR10_SHAPE), np.asarray(batch["labels"], np.int64)
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, TypeError, ValueError, ImportError) as error:
        raise ValueError(f"{path}: no batch of CIFAR-10 ({error}); unpack the archive of {CIFAR10_URL} anew") from error


def _binary(path: Path) -> Labelled:
    """Read a batch of the binary version: per image a byte for the label, then the three planes of bytes."""
    content = np.frombuffer(path.read_bytes(), np.uint8)
    record = 1 + int(np.prod(CIFAR10_SHAPE))
    if not len(content) or len(content) % record:
        raise ValueError(
            f"{path}: {len(content)} bytes are no whole number of {record}-byte records; unpack the archive of "
            f"{CIFAR10_URL} anew"
        )
    rows = content.reshape(-1, record)
    return rows[:, 1:].reshape(-1, *CIFAR10_SHAPE), rows[:, 0].astype(np.int64)


def read_cifar10(folder: Path) -> dict[str, Labelled]:
    """Return the images and labels of the splits "train" and "test".

    Raises:
        ValueError: Naming the file that is missing or damaged.
    """
    inner = _cifar10_folder(folder) or folder
    binary = (inner / "data_batch_1.bin").exists()
    splits = {}
    for split, names in CIFAR10_FILES.items():
        paths = [inner / f"{name}{'.bin' if binary else ''}" for name in names]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise ValueError(f"{inner}: {', '.join(missing)} missing; unpack the archive of {CIFAR10_URL} anew")
        parts = [(_binary if binary else _pickled)(path) for path in paths]
        for path, (images, labels) in zip(paths, parts, strict=True):
            if len(images) != len(labels) or labels.min() < 0 or labels.max() > 9:
                raise ValueError(f"{path}: its labels do not fit its images; unpack the archive of {CIFAR10_URL} anew")
        images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        splits[split] = images, labels
    return splits


@dataclass(frozen=True)
class Augmented(Examples):
    """Examples, each shifted by up to ``padding`` pixels and mirrored by chance: the usual augmentation of CIFAR-10."""

    padding: int = 4

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """Return the examples of ``step``; the chances are those of the seed and the step."""
        images, labels = super().batch(seed, step, size)
        random = generator(seed, -1 - step)
        shifts = torch.randint(2 * self.padding + 1, (2, size, 1), generator=random)
        mirrored = torch.rand(size, generator=random) < 0.5
        height, width = images.shape[2:]
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        columns = torch.where(mirrored[:, None], torch.arange(width - 1, -1, -1), torch.arange(width))
        rows, columns = shifts[0] + torch.arange(height), shifts[1] + columns
        chosen = padded.permute(0, 2, 3, 1)[torch.arange(size)[:, None, None], rows[:, :, None], columns[:, None]]
        return chosen.permute(0, 3, 1, 2).contiguous(), labels


def cifar10(folder: Path, blocks: int = 5) -> Task:
    """CIFAR-10 by a ResNet of ``6 blocks + 2`` layers (5: ResNet-32, the paper's)."""
    read = read_cifar10(folder)
    raw = torch.from_numpy(read["train"][0]).float()
    mean, std = (figure(dim=(0, 2, 3), keepdim=True) for figure in (raw.mean, raw.std))
    splits = {name: ((torch.from_numpy(x).float() - mean) / std, torch.from_numpy(y)) for name, (x, y) in read.items()}
    return replace(
        digits(),
        name="cifar10",
        model=partial(ResNet, channels=3, blocks=blocks),
        source=Augmented(*splits["train"]),
        held_out={"test": splits["test"]},
        target=0.9249,
    )


# ImageNet ------------------------------------------------------------------------------------------------------------


def _opener(folder: Path) -> Any:
    """Return Pillow's module of images."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ValueError(f"--data {folder}: reading pictures needs Pillow: pip install pillow") from error


def _listed(folder: Path) -> list[tuple[str, Path]]:
    """Return class name and path of every picture below ``folder``, in a fixed order."""
    found = [
        (path.parent.name, path)
        for path in sorted(folder.glob("*/*"))
        if path.suffix.lower() in PICTURES and path.is_file()
    ]
    if not found:
        raise ValueError(f"{folder}: holds no pictures; put them into one folder per class: {folder}/CLASS/*.JPEG")
    return found


@dataclass(frozen=True)
class Pictures:
    """Pictures on disk, decoded when a batch asks for them.

    Attributes:
        paths: Of the pictures.
        labels: Of the pictures, ``[n]``.
        side: Pixels of the square they are brought to.
    """

    paths: tuple[Path, ...]
    labels: Tensor
    side: int

    def steps_per_epoch(self, size: int) -> int:
        """Return the number of complete batches."""
        if not 1 <= size <= len(self.paths):
            raise ValueError(f"batch size must be from 1 to {len(self.paths)} (the training pictures), got {size}")
        return len(self.paths) // size

    def read(self, rows: Tensor) -> Batch:
        """Return the pictures ``[n, 3, side, side]``, scaled and cut to the middle square, and their labels."""
        opener = _opener(self.paths[0].parent)
        pixels = torch.stack([self._pixels(opener, self.paths[row]) for row in rows.tolist()])
        mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
        return (pixels - mean) / std, self.labels[rows]

    def _pixels(self, opener: Any, path: Path) -> Tensor:
        try:
            with opener.open(path) as picture:
                square = min(picture.size)
                left, top = ((length - square) // 2 for length in picture.size)
                box = (left, top, left + square, top + square)
                small = picture.convert("RGB").resize((self.side, self.side), box=box)
        except OSError as error:
            raise ValueError(f"{path}: no picture that Pillow can read ({error}); replace or remove it") from error
        return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255

    def batch(self, seed: int, step: int, size: int) -> Batch:
        """Return the pictures of ``step``, each mirrored by chance; a new random order each epoch."""
        epoch, position = divmod(step, self.steps_per_epoch(size))
        order = torch.randperm(len(self.paths), generator=generator(seed, epoch))
        images, labels = self.read(order[position * size : (position + 1) * size])
        mirrored = torch.rand(size, generator=generator(seed, -1 - step)) < 0.5
        return torch.where(mirrored[:, None, None, None], images.flip(3), images), labels


def classes_of(folder: Path) -> dict[str, int]:
    """Return the number of each class of the training pictures."""
    return {name: number for number, name in enumerate(sorted({name for name, _ in _listed(folder / "train")}))}


def read_pictures(folder: Path, side: int) -> tuple[Pictures, Pictures]:
    """Return the training and the validation pictures of an image folder; a class's number is its name's rank.

    Raises:
        ValueError: If pictures are missing, or the validation part has classes that the training part lacks.
    """
    listed, classes = [_listed(folder / part) for part in ("train", "val")], classes_of(folder)
    unknown = sorted({name for name, _ in listed[1]} - classes.keys())
    if unknown:
        raise ValueError(f"{folder / 'val'}: classes that {folder / 'train'} lacks: {', '.join(unknown[:5])}")
    train, held_out = (
        Pictures(tuple(path for _, path in part), torch.tensor([classes[name] for name, _ in part]), side)
        for part in listed
    )
    return train, held_out


def imagenet(folder: Path, blocks: tuple[int, ...] = (3, 4, 6, 3), side: int = 64) -> Task:
    """An image folder at ``side`` pixels by a ResNet with bottlenecks, (3, 4, 6, 3): ResNet-50."""
    train, held_out = read_pictures(folder, side)
    rows = torch.linspace(0, len(held_out.paths) - 1, min(HELD_OUT, len(held_out.paths))).round().long()
    return replace(
        digits(),
        name="imagenet",
        model=partial(BottleneckResNet, blocks, classes=len(classes_of(folder))),
        source=train,
        held_out={"test": held_out.read(rows)},
        target=0.759,
    )


# WikiText ------------------------------------------------------------------------------------------------------------


def read_text(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the bytes of the training files and of the held-out ones (named "test", or "valid" without those).

    Raises:
        ValueError: If either is missing or empty.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in TEXTS)
    parts = []
    for words in (("train",), ("test", "valid")):
        named = next((found for word in words if (found := [path for path in files if word in path.name])), [])
        content = b"".join(path.read_bytes() for path in named)
        if not content:
            wanted = " or ".join(f"*{word}*.txt" for word in words)
            raise ValueError(f"{folder}: no text in {wanted} (nor .raw, .text, .tokens); put the file there")
        parts.append(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    train, held_out = parts
    return train, held_out
