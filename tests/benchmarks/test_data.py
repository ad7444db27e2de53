"""The loaders of the benchmarks' data sets, on small files in the formats of the real ones."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common import data

Image = pytest.importorskip("PIL.Image")
IMAGES = 7  # per file


def batches() -> dict[str, data.Labelled]:
    random = np.random.default_rng(0)
    names = [name for split in data.CIFAR10_FILES.values() for name in split]
    images = [random.integers(0, 256, (IMAGES, 3072), dtype=np.uint8) for _ in names]
    return {name: (part, random.integers(0, 10, IMAGES)) for name, part in zip(names, images, strict=True)}


def python2(value: object) -> bytes:
    """Pickle as the real files are: protocol 2 of Python 2, whose module names are numpy's old ones."""
    return pickle.dumps(value, protocol=2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.fixture(name="pickled")
def a_pickled_folder(tmp_path: Path) -> Path:
    for name, (images, labels) in batches().items():
        content = {b"batch_label": b"part", b"labels": labels.tolist(), b"data": images, b"filenames": [b"x.png"]}
        (tmp_path / name).write_bytes(python2(content))
    return tmp_path


def write_binary(folder: Path) -> None:
    for name, (images, labels) in batches().items():
        (folder / f"{name}.bin").write_bytes(np.column_stack([labels.astype(np.uint8), images]).tobytes())


def test_both_versions_of_cifar10_hold_the_same_images(pickled: Path, tmp_path: Path) -> None:
    binary = tmp_path / "binary" / "cifar-10-batches-bin"
    binary.mkdir(parents=True)
    write_binary(binary)
    assert data.kind(pickled) == data.kind(binary.parent) == "cifar10"
    read = [data.read_cifar10(pickled), data.read_cifar10(binary.parent)]
    for split, files in data.CIFAR10_FILES.items():
        expected = np.concatenate([batches()[name][0] for name in files]).reshape(-1, 3, 32, 32)
        labels = np.concatenate([batches()[name][1] for name in files])
        for version in read:
            assert np.array_equal(version[split][0], expected)
            assert np.array_equal(version[split][1], labels)


def test_a_pickle_of_a_newer_protocol_is_read(pickled: Path) -> None:
    for path in pickled.iterdir():
        images, labels = batches()[path.name]
        path.write_bytes(pickle.dumps({"data": images, "labels": labels}, protocol=5))
    assert len(data.read_cifar10(pickled)["train"][0]) == 5 * IMAGES


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("run by the unpickler",)


def test_a_pickle_that_runs_code_is_refused(pickled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pickled / "data_batch_3").write_bytes(pickle.dumps({"data": Evil(), "labels": []}))
    with pytest.raises(ValueError, match=r"data_batch_3.*builtins\.print.*cifar\.html"):
        data.read_cifar10(pickled)
    assert "run by" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps([1]), pickle.dumps({"data": 1, "labels": [1]})])
def test_damaged_files_are_named(pickled: Path, content: bytes) -> None:
    (pickled / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=r"test_batch.*unpack the archive"):
        data.read_cifar10(pickled)


def test_damaged_and_missing_binary_files_are_named(tmp_path: Path) -> None:
    write_binary(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: 3 bytes"):
        data.read_cifar10(tmp_path)
    (tmp_path / "data_batch_2.bin").unlink()
    with pytest.raises(ValueError, match=r"data_batch_2\.bin missing"):
        data.read_cifar10(tmp_path)


def test_the_cifar10_task_is_normalised_and_augmented_alike_every_time(pickled: Path) -> None:
    task = data.cifar10(pickled, blocks=1)
    images, labels = task.source.batch(0, 3, 5)
    again, _ = task.source.batch(0, 3, 5)
    other, _ = task.source.batch(0, 3 + task.source.steps_per_epoch(5), 5)
    assert images.shape == (5, 3, 32, 32) and labels.shape == (5,)
    assert torch.equal(images, again) and not torch.equal(images, other)
    assert task.model()(images).shape == (5, 10)
    assert isinstance(task.source, data.Augmented)
    assert task.source.inputs.mean().abs() < 1e-3


def test_augmentation_shifts_and_mirrors_whole_images() -> None:
    image = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    source = data.Augmented(image, torch.zeros(1), padding=1)
    padded = [torch.nn.functional.pad(x, (1, 1, 1, 1)) for x in (image, image.flip(3))]
    corners = [(x[0, 0], top, left) for x in padded for top in range(3) for left in range(3)]
    windows = {tuple(x[top : top + 4, left : left + 4].flatten().tolist()) for x, top, left in corners}
    seen = {tuple(source.batch(0, step, 1)[0].flatten().tolist()) for step in range(200)}
    assert seen == windows


@pytest.fixture(name="pictures")
def an_image_folder(tmp_path: Path) -> Path:
    for part, count in (("train", 3), ("val", 2)):
        for shade, name in ((40, "n01"), (200, "n02")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (20 + index, 12), (shade, shade, 0)).save(folder / f"{index}.JPEG")
    return tmp_path


def test_an_image_folder_is_read(pictures: Path) -> None:
    assert data.kind(pictures) == "imagenet"
    task = data.imagenet(pictures, blocks=(1, 1, 1, 1), side=8)
    images, labels = task.source.batch(0, 0, 6)
    assert images.shape == (6, 3, 8, 8)
    red = images[:, 0].mean(dim=(1, 2)) * data.IMAGENET_STD[0] + data.IMAGENET_MEAN[0]
    assert torch.allclose(red, torch.where(labels == 0, 40.0, 200.0) / 255, atol=0.02)  # JPEG is not exact
    assert sorted(task.held_out["test"][1].tolist()) == [0, 0, 1, 1]
    assert task.model()(images).shape == (6, 2)


def test_problems_of_an_image_folder_are_named(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pictures / "val" / "n02" / "0.JPEG").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"0\.JPEG: no picture"):
        data.imagenet(pictures, side=8)
    (pictures / "val" / "n02").rename(pictures / "val" / "n03")
    with pytest.raises(ValueError, match="lacks: n03"):
        data.imagenet(pictures, side=8)
    for path in pictures.glob("val/*/*"):
        path.unlink()
    with pytest.raises(ValueError, match="holds no pictures"):
        data.imagenet(pictures, side=8)
    train, _ = data.Pictures(tuple(pictures.glob("train/*/*")), torch.zeros(6), 8), None
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        train.batch(0, 0, 1)


def test_wikitext_is_read_as_bytes(tmp_path: Path) -> None:
    for name, content in (("train", b" = Robert = \n"), ("valid", b"valid"), ("test", "é".encode())):
        (tmp_path / f"wiki.{name}.tokens").write_bytes(content)
    assert data.kind(tmp_path) == "wikitext"
    train, held_out = data.read_text(tmp_path)
    assert bytes(train.numpy()) == b" = Robert = \n"
    assert bytes(held_out.numpy()) == "é".encode()
    (tmp_path / "wiki.test.tokens").unlink()
    assert bytes(data.read_text(tmp_path)[1].numpy()) == b"valid"
    (tmp_path / "wiki.train.tokens").write_bytes(b"")
    with pytest.raises(ValueError, match=r"no text in \*train\*"):
        data.read_text(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds neither data_batch_1"):
        data.kind(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        data.kind(tmp_path / "missing")
