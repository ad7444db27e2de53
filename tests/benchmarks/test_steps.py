"""Benchmarks of steps: arithmetic of schedules, kinds of step, memory that is known beforehand, commands that run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common.models import Transformer, VisionTransformer
from benchmarks.common.works import SMOKE_WORKS, WORKS, Schedule
from benchmarks.step_time import __main__ as step_time
from benchmarks.step_time import contenders as contenders_module
from benchmarks.step_time import first, host, measure, timing
from benchmarks.step_time.contenders import contenders, defaults
from kfac_optim import KFACAdam

MIB = 2**20


# Schedules -----------------------------------------------------------------------------------------------------------


def test_a_schedule_is_composed_of_its_steps() -> None:
    seconds = {"ordinary": 1.0, "statistics": 3.0, "refresh": 6.0}
    assert timing.compose(Schedule(1, 10), seconds) == pytest.approx((3 + 5 / 10, 8))
    assert timing.compose(Schedule(10, 100), seconds) == pytest.approx((1 + 2 / 10 + 5 / 100, 8))
    # Statistics at 0, 2, 4, refreshes at 0, 3 of six steps: they meet at 0 alone.
    assert timing.compose(Schedule(2, 3), seconds) == pytest.approx((1 + 2 / 2 + 5 / 3, 8))
    assert timing.compose(Schedule(3, 2), seconds) == pytest.approx((1 + 2 / 3 + 5 / 2, 8))


def test_the_worst_step_is_measured_by_the_base_steps_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the base's mean, where the machine slows down in between."""
    base = [1.0] * 50 + [2.0] * 50
    ours = [1.5 * seconds for seconds in base]
    ours[20] = 3.0
    monkeypatch.setattr(measure, "take_period", lambda *_: {"SGD": base, "KFACSGD": ours})
    schedule = Schedule(10, 100)
    costs, _ = measure.by_periods({"SGD": None, "KFACSGD": None}, "SGD", [schedule])  # type: ignore[dict-item]
    cost, plain = costs["KFACSGD", schedule]
    assert cost.worst / plain.mean == pytest.approx(3.0)
    assert cost.mean / plain.mean == pytest.approx((1.5 * 150 + 1.5) / 150)


def test_kinds_of_step_are_what_the_engine_does() -> None:
    """Statistics and refreshes happen at the turns that are named after them, and at no others."""
    work, place = SMOKE_WORKS["resnet8"], timing.Place()
    run = timing.Run(work, contenders(work, "KFACSGD", ["eigen"])[1], place)
    engine = run.keeper
    run.step()
    for turn in timing.TURNS * 2:
        step, in_use = engine.step_count, engine.stages.refresher.frozen_at
        run.take(turn)
        assert (engine.stages.progress.last_statistics == step) == (turn.kind == "statistics"), turn
        assert (engine.stages.refresher.last_refresh == step) == (turn.kind == "refresh"), turn
        assert (engine.stages.refresher.frozen_at != in_use) == (turn.kind == "refresh"), turn


# Defaults as they come -----------------------------------------------------------------------------------------------


def test_first_steps_are_sorted_by_what_they_do() -> None:
    """With trust in between statistics come at 0, 5, 10, refreshes at 0, 10, and two of three steps repeat a change."""
    work = SMOKE_WORKS["transformer1"]
    runs = {contender.label: timing.Run(work, contender, timing.Place()) for contender in defaults("KFACAdam")}
    base, _, held = first.take_first(runs, most=15, budget=1e9).values()
    assert {step.kind for step in base} == {"base"} and len(base) == 15
    found = [step.kind for step in held]
    assert found[:6] == ["refresh", "repeated", "repeated", "ordinary", "repeated", "statistics"]
    assert found[6:10] == ["ordinary", "repeated", "repeated", "ordinary"]
    assert found[10:12] == ["refresh", "refresh"]  # it is spread over two steps
    assert {step.trust for step in held} == {0.5}


def test_steps_that_do_not_turn_are_the_base_optimizers_own() -> None:
    """Without trust directions are computed in every fourth step, to see whether steps should turn."""
    work = SMOKE_WORKS["transformer1"]
    run = timing.Run(work, replace(defaults("KFACAdam")[1], trust=0.0), timing.Place())
    assert [first.take(run).kind for _ in range(5)] == ["refresh", "base", "base", "base", "ordinary"]


def test_defaults_are_the_packages_own() -> None:
    work = SMOKE_WORKS["transformer1"]
    model = work.make()
    _, measured = defaults("KFACAdam")[1].build(model, work)
    own = KFACAdam(model, lr=1e-3).curvature
    for name in ("solver", "inv_update_steps", "factor_update_steps", "spread", "damping", "scaling"):
        assert getattr(measured, name) == getattr(own, name), name


def test_few_steps_are_taken_whatever_the_budget() -> None:
    work = SMOKE_WORKS["resnet8"]
    result = first.measure_first(work, defaults("KFACSGD"), timing.Place(), 100, 0)
    assert result["how"] == f"first {first.FEWEST} steps"
    assert [row["contender"] for row in result["rows"]] == ["KFACSGD defaults", "KFACSGD defaults, trust 0.5, no waits"]
    for row in result["rows"]:
        assert sum(row["counts"].values()) == first.FEWEST
        assert row["mean"] > 0 and row["kinds"]["refresh"] > 0 and row["peak_bytes"] > row["curvature_bytes"]


# Memory --------------------------------------------------------------------------------------------------------------


def test_peak_of_a_known_pattern() -> None:
    def pattern() -> None:
        kept = torch.empty(MIB, dtype=torch.uint8)
        for size in (2, 5, 3):
            torch.ones(size * MIB, dtype=torch.uint8)
        view = kept.view(2, -1)
        view[0].fill_(1)

    before = torch.ones(7 * MIB, dtype=torch.uint8)
    assert timing.peak_bytes(pattern, "cpu") == 6 * MIB
    assert timing.peak_bytes(before.max, "cpu") < MIB  # not what was there already


def test_peak_counts_the_graph_and_buffers_inside_operators() -> None:
    x = torch.zeros(MIB // 4, requires_grad=True)  # a MiB

    def graph() -> None:
        y = x.exp()  # kept for its backward
        y.exp().sum().backward()  # likewise; then the gradients of both

    assert timing.peak_bytes(graph, "cpu") in range(3 * MIB, 5 * MIB)
    matrix = torch.eye(256)
    assert timing.peak_bytes(lambda: torch.linalg.eigvalsh(matrix), "cpu") >= 256 * 1024  # its copy to work on


# The commands --------------------------------------------------------------------------------------------------------


@pytest.mark.fast("^exact")
@pytest.mark.parametrize(
    ("way", "stem"),
    [
        (["--fraction", "1", "--fraction", "0.5"], "main"),
        (
            ["--exact", "--optimizer", "KFACSGD", "--solver", "eigen-exact"],
            "KFACSGD-exact",
        ),
    ],
    ids=["composed", "exact"],
)
def test_step_time(tmp_path: Path, way: list[str], stem: str) -> None:
    schedules = ["--every", "1/2", "--every", "2/4"]
    assert step_time.main(["--smoke", *schedules, "--out", str(tmp_path), *way]) == 0
    found = json.loads((tmp_path / f"{stem}.json").read_text())
    assert {"command", "versions", "commit", "machine", "results"} <= found.keys()
    assert len(found["results"]) == len(SMOKE_WORKS)
    for result in found["results"]:
        assert result["place"] == {"device": "cpu", "dtype": "float32", "seed": 0}
        assert [row["every"] for row in result["rows"] if "eigen" in row["contender"]][:2] == ["1/2", "2/4"]
        shares = [row["every"] for row in result["rows"] if row["contender"] == "KFACSGD eigen, 0.5 of the batch"]
        assert shares == (["1/2", "2/4"] if "--fraction" in way else [])
        for row in result["rows"]:
            assert row["worst"] >= row["mean"] > 0
            assert row["peak_bytes"] > row["curvature_bytes"] > 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".txt", ".png"}


def test_a_peer_that_cannot_train_the_model_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Peer:
        def __init__(self, *_: object, **__: object) -> None:
            raise RuntimeError("no in-place activations, please\n")

    find = contenders_module.find
    monkeypatch.setattr(contenders_module, "find", lambda name: Peer if name == "KFACPyTorch" else find(name))
    work = SMOKE_WORKS["resnet8"]
    chosen = contenders(work, "KFACSGD", ["eigen"])
    assert [contender.label for contender in chosen] == ["SGD", "KFACSGD eigen", "kfac-pytorch eigen + SGD"]
    result = measure.measure(work, chosen, [Schedule(1, 2)], timing.Place(), 0)
    assert [row["contender"] for row in result["rows"]] == ["KFACSGD eigen"]
    assert "left out, no in-place activations, please" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "millions"), [("resnet18", 11.2), ("resnet18-224", 11.7), ("vit-s", 22.0)])
def test_models_have_their_published_sizes(name: str, millions: float) -> None:
    """ResNet-18 with 10 and 1000 classes; ViT-S/16 (22.05) without its class token."""
    with torch.device("meta"):
        model = WORKS[name].make()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_gpt_small_is_tied_and_causal() -> None:
    model = WORKS["gpt-small"].make  # 124.4 million: what GPT-2 has, with the bias of its projections
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model().parameters()) == 124_439_808
    small = Transformer(layers=1, width=16, heads=2, symbols=32, tied=True)
    assert small.head.weight is small.symbol.weight
    symbols = torch.randint(32, (2, 8))
    changed = symbols.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    same = (small(symbols) - small(changed)).abs().amax((0, 2)) == 0
    assert same.tolist() == [True] * 5 + [False] * 3


def test_vision_transformer_sees_all_patches() -> None:
    model = VisionTransformer(layers=1, width=16, heads=2, patch=4, side=8, classes=3)
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    model(images)[:, 0].sum().backward()
    assert images.grad is not None and (images.grad != 0).all()


def test_host_times_have_a_row_for_each_kind_of_step(tmp_path):
    assert host.main(["--smoke", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert len(rows) == 5 and all(row["passes"] > 0 and row["step()"] > 0 for row in rows)
