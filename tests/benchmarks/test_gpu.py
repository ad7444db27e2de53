"""``benchmarks.gpu``: its parts run, end at their limit, and measure what they say."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from benchmarks.common.reports import Output, grid
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import decompositions, target
from benchmarks.gpu.parts import LeftOut
from benchmarks.gpu.steps import Steps


@pytest.mark.fast("^decompositions")
@pytest.mark.parametrize("part", ["resnet50", "bert-phase1", "target", "decompositions"])
def test_gpu(tmp_path: Path, part: str) -> None:
    assert gpu.main(["--part", part, "--smoke", "--out", str(tmp_path)]) == 0
    stem = "decompositions-cpu" if part == "decompositions" and not torch.cuda.is_available() else part
    found = json.loads((tmp_path / f"{stem}.json").read_text())
    assert {"command", "versions", "commit", "machine"} <= found.keys() and found.keys() & {"results", "rows", "runs"}
    assert (tmp_path / f"{stem}.txt").read_text() and (tmp_path / f"{stem}.png").exists()


def test_errors_of_decompositions() -> None:
    """Exact methods to rounding, a refresh of the basis nearer than the old basis, and bf16 products visible."""
    rows = list(decompositions.compare_methods(32, 2, "cpu", enough=0))
    error = {(row["method"], row["products"]): row["error"] for row in rows}
    for method in ("eigh, one by one", "eigh, batched", "Cholesky inverse"):
        assert error[method, "fp32"] < 1e-4 < error[method, "bf16"] < 0.1
    assert 1e-3 < error["QR refresh", "fp32"] < 0.8 * error["old basis", "fp32"]


@pytest.mark.parametrize("part", ["resnet50", "resnet101", "resnet152", "bert-phase1", "bert-phase2"])
def test_gpu_models_have_their_published_sizes(part: str) -> None:
    """Parameters in millions: He et al. 2015 by way of torchvision; BERT-Large with its masked-language head."""
    sizes = {"resnet50": 25.6, "resnet101": 44.5, "resnet152": 60.2, "bert-phase1": 335.2, "bert-phase2": 335.2}
    steps = gpu.PARTS[part]
    assert isinstance(steps, Steps)
    work = steps.work
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in work.make().parameters())
    assert round(parameters / 1e6, 1) == sizes[part]
    assert work.example == {"bert-phase1": (128,), "bert-phase2": (512,)}.get(part, (3, 224, 224))


@pytest.mark.slow
def test_gpt_small_in_bf16_alone_with_three_texts(tmp_path: Path) -> None:
    words = ["--part", "gpt-small", "--dtype", "bf16", "--batch", "3", "--solver", "eigen", "--smoke"]
    assert gpu.main([*words, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "gpt-small-bf16-3.json").read_text())["results"]
    assert [result["place"]["dtype"] for result in results] == ["bf16", "bf16"]
    assert [result["work"] for result in results] == ["small BERT, 3x16 tokens"] * 2
    assert [result["rows"][0]["contender"] for result in results] == ["KFACAdam defaults", "KFACAdam eigen"]


class Three:
    """A part of three measurements, the second of which cannot be made."""

    def measurements(self, options: Namespace) -> dict[str, Callable[[], int]]:
        def refuse() -> int:
            raise LeftOut("no such package\nhere")

        return {"one": lambda: 1, "two": refuse, "three": lambda: 3}

    def content(self, results: Sequence[int]) -> dict[str, Any]:
        return {"results": results}

    def text(self, results: Sequence[int]) -> str:
        return f"{sum(results)}\n"

    def draw(self, results: Sequence[int]) -> Figure:
        return grid(1, 1, "")[0]


@pytest.mark.parametrize(("limit", "results"), [(1e9, [1, 3]), (0, [1])])
def test_a_part_ends_at_its_limit(tmp_path: Path, limit: float, results: list[int]) -> None:
    """What it has stays; what it has not begun, and what it could not do, is named."""
    gpu.run(Three(), "three", Namespace(limit=limit, seed=0), Output(tmp_path, {}))
    found = json.loads((tmp_path / "three.json").read_text())
    assert found["results"] == results
    late = "not begun within --limit 0"
    missing = {"two": "no such package"} if limit else {"two": late, "three": late}
    assert found["missing"] == missing
    text = (tmp_path / "three.txt").read_text()
    assert text.startswith(f"{sum(results)}\n") and all(f"missing: {name}, {missing[name]}" in text for name in missing)


def test_everything_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stems: list[str] = []
    monkeypatch.setattr(gpu, "run", lambda part, stem, *_: stems.append(stem.removesuffix("-cpu")))
    assert gpu.main(["--smoke", "--out", str(tmp_path)]) == 0
    assert stems == list(gpu.PARTS)


def test_most_parts_need_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--part", "target", "--out", str(tmp_path)])
    assert "no CUDA device" in capsys.readouterr().err


def test_the_swap_has_the_settings_of_adamw() -> None:
    task, rows = target.text_task(), [target.rows_of(word)[0] for word in target.CONTENDERS]
    settings = {row.label: target.settings_of(row, task, steps=400, device="cuda") for row in rows}
    base, swap = settings["AdamW"], settings["KFACAdamW for AdamW"]
    assert (swap.lr, swap.weight_decay, swap.rest) == (base.lr, base.weight_decay, base.rest) == (0.005, 0.1, None)
    assert swap.kfac == {"loss_average": "batch"}
    assert (settings["KFACSGD"].lr, settings["KFACSGD"].kfac["factor_batch_fraction"]) == (0.06, 0.25)
    assert {each.device for each in settings.values()} == {"cuda"} and {each.steps for each in settings.values()} == {
        400
    }
    assert task.reached(target.LOSS) and not task.reached(target.LOSS + 0.01)
