"""Pictures and flat numbers: what figures, loggers and the summary page hold against the engine's own values."""

from __future__ import annotations

import base64
import html.parser
import io
import json
import math
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KAISA, KFACSGD, Assignment, CurvatureEngine, FactorWise, LayerAssignment, LayerWise, diagnostics
from kfac_optim.distributed import LocalCommunicator
from kfac_optim.spectra import eigenvalues
from tests.helpers.files import through_a_file
from tests.helpers.settings import FLOAT64, damping_of
from tests.helpers.training import make_model, train

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
image = pytest.importorskip("matplotlib.image")

EVERY: dict[str, Any] = {"factor_update_steps": 1, "inv_update_steps": 1, "damping": 0.02}
TOL = 1e-9  # float64 by another route


def trained(steps: int = 4, model: nn.Module | None = None, **options: Any) -> CurvatureEngine:
    """The engine of a small model after some steps, in float64 where that is the default."""
    model = make_model() if model is None else model
    wide = FLOAT64 if torch.get_default_dtype() is torch.float64 else {}
    optimizer = KFACSGD(model, lr=0.05, **{**EVERY, **wide, **options})
    train(model, optimizer, range(steps))
    return optimizer.curvature


def deep(layers: int = 12) -> nn.Sequential:
    """More layers than are drawn as lines."""
    torch.manual_seed(0)
    inner = [part for _ in range(layers - 2) for part in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 5), *inner, nn.Linear(5, 3))


def sorted_eigenvalues(factor: Tensor) -> np.ndarray[Any, Any]:
    """Of all pairs together, largest first."""
    return np.sort(np.linalg.eigvalsh(factor.numpy()).clip(min=0).ravel())[::-1]


def shares(a: Any, g: Any, gamma: float) -> tuple[float, float]:
    """How the damping is split between A and G: by their mean eigenvalues."""
    pi = math.sqrt(a.mean() / g.mean())
    return pi * math.sqrt(gamma), math.sqrt(gamma) / pi


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


# Numbers of the report -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("relative", [False, True])
def test_report_has_all_eigenvalues_on_request_and_the_damped_condition(relative: bool) -> None:
    engine = trained(damping=damping_of(0.3, relative))
    report = engine.report(eigenvalues=True)
    for layer in engine.layers:
        factors, row = engine.factors(layer), report["layers"][layer.name]
        a, g = (sorted_eigenvalues(factor) for factor in factors)
        gamma = 0.3 * (a.mean() * g.mean() if relative else 1.0)
        assert row["A"]["eigenvalues"] == pytest.approx(a.tolist(), rel=TOL, abs=1e-12)
        assert row["G"]["eigenvalues"] == pytest.approx(g.tolist(), rel=TOL, abs=1e-12)
        assert row["damping"] == pytest.approx(gamma, rel=TOL)
        if layer.pairs == 1:
            dense = np.kron(factors[1][0].numpy(), factors[0][0].numpy())
            expected = np.linalg.cond(dense + gamma * np.eye(len(dense)))
            assert row["condition"] == pytest.approx(expected, rel=1e-7)
    assert not any("eigenvalues" in row[side] for row in engine.report()["layers"].values() for side in "AG")


def test_eigenvalues_below_zero_are_rounding() -> None:
    """Of a diagonal and of a dense factor, two pairs each; their condition number is infinite, never negative."""
    diagonal = torch.tensor([[3.0, -1e-9], [2.0, 5.0]])
    for factor in (diagonal, torch.diag_embed(diagonal)):
        values = eigenvalues(factor)
        assert values.tolist() == pytest.approx([5.0, 3.0, 2.0, 0.0]) and values[-1] >= 0
        found = diagnostics.spectrum(values)
        assert found == {"min": 0.0, "mean": pytest.approx(2.5), "max": pytest.approx(5.0), "condition": math.inf}
    assert diagonal[0, 1] < 0, "a view does not change what it shows"


@pytest.mark.usefixtures("double")
def test_eigenvalues_are_computed_once_per_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report every step costs little between refreshes, and never shows the numbers of an earlier refresh."""
    model = make_model()
    optimizer = KFACSGD(model, lr=0.05, **{**EVERY, **FLOAT64, "inv_update_steps": 3})
    calls, eigvalsh = [], torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda factor: calls.append(1) or eigvalsh(factor))
    counts, largest, saved = [], [], {}
    for step in range(6):
        train(model, optimizer, [step])
        if step in (0, 3):  # just refreshed: the averages of this step are in use
            in_use = {name: optimizer.curvature.factors(name) for name in ("0", "2", "3")}
            expected = {name: [sorted_eigenvalues(f)[0] for f in factors] for name, factors in in_use.items()}
        rows = optimizer.curvature.report()["layers"]
        assert {name: [rows[name][s]["max"] for s in "AG"] for name in rows} == {
            name: pytest.approx(values, rel=TOL) for name, values in expected.items()
        }
        counts.append(len(calls))
        largest.append(rows["3"]["G"]["max"])
        if step == 2:
            saved = through_a_file(optimizer.state_dict())
    assert counts == [6, 6, 6, 12, 12, 12]
    assert largest[0] == largest[2] != largest[3]
    optimizer.load_state_dict(saved)
    assert optimizer.curvature.report()["layers"]["3"]["G"]["max"] == pytest.approx(largest[2], rel=TOL)


# Spectrum ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("double")
def test_spectrum_of_few_layers_are_lines_in_units_of_the_damping() -> None:
    engine = trained()
    left, right = diagnostics.plot_spectrum(engine.report(eigenvalues=True)).axes[:2]
    assert left.get_yscale() == "log" and len(left.lines) == len(right.lines) == 4
    for layer in engine.layers:
        spectra = [sorted_eigenvalues(factor) for factor in engine.factors(layer)]
        for axes, values, share in zip((left, right), spectra, shares(*spectra, 0.02), strict=True):
            places, drawn = lines_of(axes)[f"{layer.name} ({len(values)})"]
            assert places == pytest.approx([(i + 0.5) / len(values) for i in range(len(values))])
            assert drawn == pytest.approx((values / share).tolist(), rel=TOL, abs=1e-9)
    assert lines_of(left)["damping"][1] == [1.0, 1.0]


@pytest.mark.usefixtures("double")
def test_spectrum_of_many_layers_is_an_image_with_the_damping_as_its_line() -> None:
    engine = trained(model=deep())
    figure = diagnostics.plot_spectrum(engine.report(eigenvalues=True))
    for side, axes in enumerate(figure.axes[:2]):
        (drawn,) = axes.images
        (boundary,) = axes.lines
        table = np.asarray(drawn.get_array())
        columns = table.shape[1]
        for row, layer in enumerate(engine.layers):
            spectra = [sorted_eigenvalues(factor) for factor in engine.factors(layer)]
            values = spectra[side] / shares(*spectra, 0.02)[side]
            expected = [values[math.floor((c + 0.5) / columns * len(values))] for c in range(columns)]
            assert 10 ** table[row] == pytest.approx(np.array(expected), rel=1e-6, abs=1e-9)
            assert boundary.get_xdata()[2 * row] == pytest.approx(float((values > 1).mean()))
        assert min(boundary.get_xdata()) < max(boundary.get_xdata()) <= 1
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [layer.name for layer in engine.layers]


def test_spectrum_of_a_layer_without_gradient_can_be_drawn() -> None:
    zero = {"min": 0.0, "mean": 0.0, "max": 0.0, "condition": math.inf, "eigenvalues": [0.0, 0.0]}
    row = {"A": {**zero, "mean": 1.5, "eigenvalues": [2.0, 1.0]}, "G": zero, "damping": 0.25}
    figure = diagnostics.plot_spectrum({"step": 1, "layers": {"": row}})
    assert lines_of(figure.axes[0])["(model) (2)"][1] == [4.0, 2.0]
    assert lines_of(figure.axes[1])["(model) (2)"][1] == [0.0, 0.0]
    figure.savefig(io.BytesIO())


def test_what_can_not_be_drawn_says_what_to_pass() -> None:
    engine = trained()
    with pytest.raises(ValueError, match="eigenvalues=True"):
        diagnostics.plot_spectrum(engine.report())
    with pytest.raises(ValueError, match="first refresh"):
        diagnostics.plot_spectrum(KFACSGD(make_model(), lr=0.1).curvature.report(eigenvalues=True))
    with pytest.raises(ValueError, match="append"):
        diagnostics.plot_history([])


# History -------------------------------------------------------------------------------------------------------------


def history_of(model: nn.Module, steps: int, **options: Any) -> list[dict[str, Any]]:
    optimizer = KFACSGD(model, lr=0.05, **{**EVERY, **options})
    history: list[dict[str, Any]] = []
    train(model, optimizer, range(steps), after=lambda: history.append(optimizer.curvature.report()))
    return history


def test_history_of_few_layers_over_refreshes() -> None:
    history = history_of(make_model(), 10, inv_update_steps=4, spread=2)
    panels = diagnostics.plot_history(history).axes
    pick = [lambda row: row["A"]["condition"], lambda row: row["G"]["condition"], lambda row: row["condition"]]
    for axes, number in zip(panels[:3], pick, strict=True):
        drawn = lines_of(axes)
        found = {name: [number(entry["layers"][name]) for entry in history] for name in ("0", "2", "3")}
        top = 10 * max(value for curve in found.values() for value in curve if value < math.inf)
        for name, curve in found.items():
            assert drawn[name] == (list(range(1, 11)), [min(value, top) for value in curve])
    (staleness,) = panels[3].lines
    assert list(staleness.get_ydata()) == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6]  # frozen at 0 and 4, the latter used from 6 on
    assert panels[2].get_yscale() == "log"


def test_history_of_many_layers_is_median_range_and_the_worst() -> None:
    history = history_of(deep(), 7, inv_update_steps=3)
    axes = diagnostics.plot_history(history).axes[2]
    curves = {name: [entry["layers"][name]["condition"] for entry in history] for name in history[0]["layers"]}
    assert len(curves) == 12
    worst = max(curves, key=lambda name: curves[name][-1])
    drawn = lines_of(axes)
    assert set(drawn) == {f"{worst} (worst)", "median of the layers"}
    assert drawn[f"{worst} (worst)"][1] == curves[worst]
    columns = list(zip(*curves.values(), strict=True))
    assert drawn["median of the layers"][1] == [median(column) for column in columns]
    corners = axes.collections[0].get_paths()[0].vertices
    for step, column in enumerate(columns, 1):
        heights = corners[corners[:, 0] == step, 1]
        assert (heights.min(), heights.max()) == (min(column), max(column))
    better = min(curves, key=lambda name: curves[name][-1])
    history[-1]["layers"][better]["condition"] = 1e9
    assert f"{better} (worst)" in lines_of(diagnostics.plot_history(history).axes[2]), "at the end, not at first"


@pytest.mark.parametrize("infinite", [math.inf, None], ids=["as reported", "through JSON"])
def test_a_singular_factor_is_a_triangle_above_the_others(infinite: float | None) -> None:
    def entry(step: int, *numbers: float | None) -> dict[str, Any]:
        rows = {
            f"l{i}": {"A": {"condition": n}, "G": {"condition": 7.0}, "condition": 3.0} for i, n in enumerate(numbers)
        }
        return {"step": step, "staleness": step, "layers": rows}

    between = {"step": 2, "staleness": 2}  # staleness alone
    panels = diagnostics.plot_history([entry(1, infinite, 20.0), between, entry(3, 50.0, infinite)]).axes
    drawn = lines_of(panels[0])
    assert drawn["l0"] == ([1, 3], [500.0, 50.0]) and drawn["l1"] == ([1, 3], [20.0, 500.0])
    assert drawn["singular (at the end: 1)"] == ([1, 3], [500.0, 500.0])
    assert not any("singular" in label for label in lines_of(panels[1]))
    assert list(panels[3].lines[0].get_ydata()) == [1, 2, 3]


# Profile -------------------------------------------------------------------------------------------------------------


def test_profile_bars_are_milliseconds_of_the_stages() -> None:
    profile = trained(steps=3).profile()
    (axes,) = diagnostics.plot_profile(profile).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    widths = dict(zip(names, (bar.get_width() for bar in axes.patches), strict=True))
    assert widths == {stage: row["ms"] for stage, row in profile.items()}
    assert list(widths.values()) == sorted(widths.values(), reverse=True) and axes.yaxis_inverted()
    note = axes.texts[names.index("preconditioning")].get_text()
    assert note.endswith(f"{profile['preconditioning']['calls']} × {profile['preconditioning']['ms_per_call']:.3g}")


# Assignment ----------------------------------------------------------------------------------------------------------


class Apart:
    """Ranks 0 and 1 decompose, rank 2 preconditions."""

    def assign(self, costs: Any, world_size: int) -> Assignment:
        return Assignment(tuple(LayerAssignment((0, i % 2), (2,)) for i in range(len(costs))), (3.0, 1.0, 0.0))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [(LayerWise(), 1), (LayerWise(), 3), (FactorWise(), 2), (FactorWise(), 4), (KAISA(0.5), 4), (Apart(), 3)],
    ids=["LayerWise-1", "LayerWise-3", "FactorWise-2", "FactorWise-4", "KAISA-4", "apart-3"],
)
def test_assignment_is_that_of_the_policy(strategy: Any, ranks: int) -> None:
    engine = CurvatureEngine(deep(), assignment=strategy, communicator=LocalCommunicator(0, ranks))
    workers = engine.workers()
    assert json.loads(json.dumps(workers)) == workers, "plain data"
    figure = diagnostics.plot_assignment(workers)
    upper, lower = figure.axes
    table = np.asarray(lower.images[0].get_array())
    assert table.shape == (12, ranks)
    for row, work in zip(table, engine.stages.ranks.assignment.layers, strict=True):
        assert {rank for rank in range(ranks) if row[rank] & 1} == set(work.gradient_workers)
        assert [rank for rank in range(ranks) if row[rank] & 2] == [work.inverse_workers[0]]
        assert [rank for rank in range(ranks) if row[rank] & 4] == [work.inverse_workers[1]]
    assert [label.get_text() for label in lower.get_yticklabels()] == [layer.name for layer in engine.layers]
    mean = sum(engine.stages.ranks.assignment.loads) / ranks
    assert [bar.get_height() for bar in upper.patches] == pytest.approx(
        [load / mean for load in engine.stages.ranks.assignment.loads]
    )
    # The legend names exactly what is drawn, in the colour it is drawn in.
    (legend,) = figure.legends
    colour = {t.get_text(): p.get_facecolor() for t, p in zip(legend.get_texts(), legend.get_patches(), strict=True)}
    meaning = {1: "preconditions", 2: "decomposes A", 4: "decomposes G", 6: "decomposes A and G"}
    meaning |= {bits + 1: f"{meaning[bits]}, preconditions" for bits in (2, 4, 6)}
    drawn = {meaning[bits]: lower.images[0].to_rgba(np.array([[bits]]))[0, 0] for bits in np.unique(table) if bits}
    assert colour.keys() == drawn.keys()
    assert all(tuple(drawn[name]) == pytest.approx(colour[name], abs=0.01) for name in drawn)


def test_names_of_very_many_layers_are_thinned_out() -> None:
    rows = {f"layer{i}": {"A": 0, "G": 1, "precondition": [0, 1]} for i in range(300)}
    axes = diagnostics.plot_assignment({"layers": rows, "loads": [1.0, 1.0]}).axes[1]
    ticks = dict(zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels()), strict=True))
    assert 50 < len(ticks) <= 120 and all(name == f"layer{place}" for place, name in ticks.items())


@pytest.mark.filterwarnings("ignore:K-FAC preconditions none")
def test_an_assignment_of_no_layers_is_refused() -> None:
    engine = KFACSGD(torch.nn.PReLU(), lr=0.1).curvature
    with pytest.raises(ValueError, match="no layers to draw"):
        diagnostics.plot_assignment(engine.workers())


# Loggers -------------------------------------------------------------------------------------------------------------


def test_flat_names_and_values() -> None:
    engine = trained(steps=5)
    report, flat = engine.report(eigenvalues=True), diagnostics.flatten(engine.report())
    assert diagnostics.flatten(report) == flat, "lists are left out"
    for name, row in report["layers"].items():
        for side in "AG":
            for number in ("min", "mean", "max", "condition"):
                assert flat.pop(f"kfac/{name}/{side}/{number}") == row[side][number]
        for number in ("damping", "condition", "cosine", "reach"):
            assert flat.pop(f"kfac/{name}/{number}") == row[number]
    counts = (
        "step",
        "trust",
        "brake",
        "graft",
        "reach",
        "staleness",
        "skipped_steps",
        "skipped_batches",
        "failed_decompositions",
    )
    assert flat == {f"kfac/{name}": float(report[name]) for name in counts}
    assert all(type(value) is float for value in flat.values())
    memory = diagnostics.flatten(engine.memory_estimate(), "memory")
    assert memory["memory/local_sums"] == 0 and memory["memory/total"] == engine.memory_estimate()["total"]
    assert diagnostics.flatten({"staleness": None, "layers": {"": {"cosine": 0.5}}}) == {"kfac/model/cosine": 0.5}


def test_tensorboard_shows_the_same_numbers_and_pictures(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    model = make_model()
    optimizer = KFACSGD(model, lr=0.05, **{**EVERY, "inv_update_steps": 2})
    written: dict[int, dict[str, float]] = {}
    with SummaryWriter(tmp_path) as writer:
        for step in range(5):
            train(model, optimizer, [step])
            engine = optimizer.curvature
            written[step] = diagnostics.flatten(engine.report()) | diagnostics.flatten(engine.profile(), "time")
            for name, value in written[step].items():
                writer.add_scalar(name, value, step)
        writer.add_figure("spectrum", diagnostics.plot_spectrum(engine.report(eigenvalues=True)), 4)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(written[4])
    for name in written[4]:
        read = {event.step: event.value for event in events.Scalars(name)}
        assert read == {step: float(np.float32(flat[name])) for step, flat in written.items() if name in flat}
    (shown,) = events.Images("spectrum")
    assert (shown.width, shown.height) == (1100, 500)


# Without matplotlib --------------------------------------------------------------------------------------------------


def test_without_matplotlib_only_pictures_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    for draw in (
        lambda: diagnostics.plot_spectrum(engine.report(eigenvalues=True)),
        lambda: diagnostics.plot_history([engine.report()]),
        lambda: diagnostics.plot_profile(engine.profile()),
        lambda: diagnostics.plot_assignment(engine.workers()),
    ):
        with pytest.raises(ImportError, match=r"pip install matplotlib"):
            draw()
    assert diagnostics.flatten(engine.report())


# The summary page ----------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Tables as rows of cells, pictures as arrays, text; every tag has to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.pictures: list[Any] = []
        self.links: list[str] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag in ("meta", "img"):
            return
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.text.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text[self._open[-1]][-1] += data
            if self._open[-1] in ("td", "th"):
                self.tables[-1][-1][-1] += data

    def decoded(self) -> list[Any]:
        """The pictures; all are inside the page."""
        found = []
        for link in self.links:
            head, _, data = link.partition(",")
            assert head == "data:image/png;base64"
            found.append(image.imread(io.BytesIO(base64.b64decode(data, validate=True)), format="png"))
        return found

    def columns(self, index: int) -> dict[str, dict[str, str]]:
        """A table by the first cell of its rows."""
        heads, *rows = self.tables[index]
        return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``benchmarks.train`` with a network and data of which two epochs are short."""
    pytest.importorskip("sklearn")
    pytest.importorskip("tqdm")
    from benchmarks.common import tasks
    from benchmarks.common.models import ResNet
    from benchmarks.train import __main__ as train

    whole = tasks.digits()
    small = replace(
        whole,
        model=lambda: ResNet(channels=1, blocks=1, width=2),
        source=tasks.Examples(whole.source.inputs[:128], whole.source.targets[:128]),  # type: ignore[attr-defined]
        held_out={split: (inputs[:40], targets[:40]) for split, (inputs, targets) in whole.held_out.items()},
    )

    def digits() -> tasks.Task:
        """Few digits."""
        return small

    monkeypatch.setitem(train.TASKS, "digits", digits)
    words = ["digits", "--optimizer", "KFACSGD", "--epochs", "2", "--batch-size", "16", "--quiet"]
    return lambda folder, *more: train.main([*words, "--out", str(folder), *more])


def lines(folder: Path, kind: str, label: str = "KFACSGD") -> list[dict[str, Any]]:
    found = map(json.loads, (folder / f"{label}.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


@pytest.mark.slow
def test_a_run_leaves_one_page_with_its_figures(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a & <b>"
    assert command(folder, "--compare", "SGD") == 0
    assert str(folder / "summary.html") in capsys.readouterr().out.splitlines()[-1]
    page = Page((folder / "summary.html").read_text())
    assert page.text["pre"][0].endswith(f"--out '{folder}' --compare SGD"), "what was typed, escaped"

    results = page.columns(0)
    assert set(results) == {"KFACSGD", "SGD"}
    for label, row in results.items():
        last, steps = lines(folder, "evaluation", label)[-1], lines(folder, "step", label)
        assert row["steps"] == "16" and row["end"] == "finished"
        assert row["held out"] == f"{last['test_loss']:.4g}" and row["accuracy"] == f"{last['test_accuracy']:.4g}"
        assert row["loss"] == f"{np.mean([step['loss'] for step in steps[-20:]]):.4g}"
        assert row["seconds in all"] == f"{steps[-1]['cpu_seconds']:.4g}"
    settings = page.columns(1)
    assert settings["lr"]["KFACSGD"] == "0.1" and settings["steps"]["SGD"] == "16"
    versions = dict(page.tables[2])
    assert versions["torch"] == torch.__version__ and versions["python"].startswith(f"{sys.version_info[0]}.")
    (state,) = lines(folder, "curvature")[-1:]
    memory = dict(page.tables[3])
    assert memory["total"] == diagnostics.human_bytes(state["memory"]["total"])
    assert page.text["pre"][1] == state["table"] and "Conv, expand" in state["table"]

    pictures = page.decoded()
    assert len(pictures) == 4, "the plot, history, spectrum and profile of KFACSGD; SGD has no curvature"
    assert all(min(picture.shape[:2]) > 150 and len(np.unique(picture)) > 10 for picture in pictures)
    assert page.text["h2"][2:] == ["Curvature of KFACSGD"]


def test_the_log_holds_what_the_engine_reports(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is made from the log: staleness of every step, reports at evaluations, spectra at the end."""
    drawn: dict[str, Any] = {}
    for name in ("plot_history", "plot_spectrum", "plot_profile"):
        empty = matplotlib.figure.Figure(figsize=(1, 1))
        monkeypatch.setattr(diagnostics, name, lambda data, n=name, e=empty: drawn.setdefault(n, data) and e)
    assert command(tmp_path, "--kfac", "inv_update_steps=3", "--kfac", "spread=1", "--eval-every", "4") == 0
    expected = [1, 2, 3, 4] + 4 * [2, 3, 4]  # frozen at 0, 3, 6 ..., used from 0, 4, 7 ... on
    assert [line["staleness"] for line in lines(tmp_path, "step")] == expected
    curvature = lines(tmp_path, "curvature")
    assert [line["step"] for line in curvature] == [4, 8, 12, 16]
    last = curvature[-1]
    assert drawn["plot_spectrum"] == last["report"] and drawn["plot_profile"] == last["profile"]
    stale = {entry["step"]: entry["staleness"] for entry in drawn["plot_history"]}
    assert stale == dict(enumerate(expected, 1))
    assert [e["step"] for e in drawn["plot_history"] if "layers" in e] == [4, 8, 12, 16]
    spectrum = last["report"]["layers"]["head"]["A"]
    assert len(spectrum["eigenvalues"]) == 9 and spectrum["eigenvalues"][0] == spectrum["max"]


@pytest.mark.slow
def test_an_interrupted_run_has_a_page_and_a_resumed_one_shows_all_of_it(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.common.runs import Trainer
    from benchmarks.train import page as pages

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    step, picture = Trainer.train_step, pages.picture
    monkeypatch.setattr(pages, "picture", lambda figure, caption: f"<figcaption>{caption}</figcaption>")  # takes long
    assert command(whole) == 0

    def interrupted(self: Trainer) -> dict[str, Any]:
        if self.step == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        assert command(halves) == 128 + signal.SIGTERM
    first = Page((halves / "summary.html").read_text())
    assert first.columns(0)["KFACSGD"]["end"] == "interrupted" and first.columns(0)["KFACSGD"]["steps"] == "10"
    assert "Time from step 0 to 10" in first.text["figcaption"]

    with monkeypatch.context() as patch:
        patch.setattr(pages, "picture", picture)
        assert command(halves, "--resume") == 0
    page = Page((halves / "summary.html").read_text())
    assert page.columns(0)["KFACSGD"]["steps"] == "16" and len(page.decoded()) == 4
    assert "Time from step 10 to 16" in page.text["figcaption"]
    assert page.text["pre"][0].endswith("--resume")
    for name in ("loss", "staleness"):
        assert [x[name] for x in lines(halves, "step")] == [x[name] for x in lines(whole, "step")]
    (expected,), (found,) = (lines(folder, "curvature")[-1:] for folder in (whole, halves))
    assert {k: v for k, v in found["report"].items() if k != "layers"} == {
        k: v for k, v in expected["report"].items() if k != "layers"
    }
    for name, row in expected["report"]["layers"].items():
        assert found["report"]["layers"][name]["A"] == row["A"] and found["report"]["layers"][name]["G"] == row["G"]

    before = (halves / "KFACSGD.jsonl").read_bytes()
    (halves / "summary.html").unlink()
    assert command(halves, "--resume") == 0, "nothing left to train: the page is made again from the log"
    assert Page((halves / "summary.html").read_text()).columns(0) == page.columns(0)
    assert (halves / "KFACSGD.jsonl").read_bytes() == before


def test_other_optimizers_have_a_page_without_curvature(command: Any, tmp_path: Path) -> None:
    assert command(tmp_path, "--optimizer", "Adam") == 0
    page = Page((tmp_path / "summary.html").read_text())
    assert page.text["h2"] == ["Results", "Settings"] and len(page.decoded()) == 1
    assert not re.search("curvature", "".join(page.text["td"]))
