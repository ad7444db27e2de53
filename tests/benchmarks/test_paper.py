"""The paper's tables at small scale: every part runs, stands beside the paper's figures, and repeats nothing."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.common import runs
from benchmarks.common.models import ResNet
from benchmarks.common.reports import Output
from benchmarks.common.runs import facts
from benchmarks.paper import __main__ as paper
from benchmarks.paper import applications, bench, memory, study
from benchmarks.paper import tasks as paper_tasks
from benchmarks.paper.__main__ import STUDIES
from benchmarks.paper.bench import Bench
from benchmarks.paper.study import Cell, Figure, Results, until

Values = tuple[float | None, ...]
ONE_SEED = Bench(seeds=(0,), smoke=True)


@pytest.fixture(scope="module", name="folder")
def a_folder_with_all_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do every part once, with narrow ResNets: their decompositions are what takes time."""
    folder = tmp_path_factory.mktemp("results")
    bench.digits_by.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ResNet", partial(ResNet, width=4))
        assert paper.main(["--smoke", "--seeds", "0", "--quiet", "--out", str(folder)]) == 0
    bench.digits_by.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Runs set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def content(folder: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    return found


def test_every_part_writes_its_result_with_facts_and_a_plot(folder: Path) -> None:
    for part in STUDIES:  # one test, so that a single process trains
        result = content(folder, part)
        assert {"versions", "machine", "commit", "command", "tables"} <= result.keys(), part
        assert (folder / f"{part}.png").stat().st_size > 5000, part
        for run in result.get("runs", ()):
            assert run["run"]["seed"] == 0 and run["end"] == "finished", part
            assert run["versions"]["torch"] == importlib.metadata.version("torch")
            assert run["evaluations"][-1]["step"] == run["run"]["steps"] == 2


def test_no_run_is_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ("table3", "figure5a")
    before = {part: content(folder, part) for part in parts}

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("repeated")

    monkeypatch.setattr(Results, "train", fail)
    words = ["--smoke", "--seeds", "0", "--quiet", "--out", str(folder)]
    assert paper.main([*words, *(word for part in parts for word in ("--part", part))]) == 0
    for part, old in before.items():
        new = content(folder, part)
        assert [new.get("runs"), new["tables"]] == [old.get("runs"), old["tables"]]
    with pytest.raises(AssertionError, match="repeated"):
        paper.main(["--smoke", "--seeds", "0,1", "--quiet", "--out", str(folder), "--part", "unet"])


def test_an_interrupted_command_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["--smoke", "--seeds", "0", "--quiet", "--out", str(tmp_path), "--part", "unet"]
    trained: list[str] = []
    train = Results.train

    def once(self: Results, run: study.Run, label: str) -> Any:
        if trained:
            raise KeyboardInterrupt
        trained.append(run.settings.optimizer)
        return train(self, run, label)

    monkeypatch.setattr(Results, "train", once)
    with pytest.raises(KeyboardInterrupt):
        paper.main(command)
    assert [run["run"]["optimizer"] for run in content(tmp_path, "unet")["runs"]] == trained == ["Adam"]
    monkeypatch.setattr(Results, "train", train)
    assert paper.main(command) == 0
    assert [run["run"]["optimizer"] for run in content(tmp_path, "unet")["runs"]] == ["Adam", "KFACAdam"]


@pytest.mark.parametrize("part", STUDIES)
def test_the_papers_figures_stand_beside_ours(part: str) -> None:
    made = STUDIES[part][1](ONE_SEED)
    assert made.claim
    assert made.paper or part in ("unet", "memory")  # KAISA's page has ratios of times only
    names = {figure.name for figure in made.figures} | made.known.keys()
    for name, rows in made.paper.items():
        assert name in names
        for row, numbers in rows.items():
            assert row in made.rows and len(numbers) == len(made.columns)
    assert {row for row, _ in made.runs} == set(made.rows)
    assert {column for _, column in made.runs} == set(made.columns)


def test_every_table_and_figure_has_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paper.main(["--help"])
    text = capsys.readouterr().out
    tables = [f"Table {number}" for number in range(1, 7)]
    for name in (*tables, "Figure 4", "Figure 5a", "Figure 5b", "Figure 5c", "Figure 6"):
        assert name in text
        assert name.lower().replace(" ", "") in paper.NAMES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "tabel1"], "did you mean 'table1'"),
        (["--seeds", "x"], "invalid literal"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        paper.main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# Judgement -----------------------------------------------------------------------------------------------------------


def test_cells_say_who_got_there() -> None:
    assert Cell((1.0, 2.0)).text(1) == "1.5 (1.0-2.0)"
    assert Cell((1.0,)).text(0) == "1"
    assert Cell((1.0, None)).text(1) == "1 of 2 seeds"
    assert Cell((1.0, None)).mean is None


@pytest.mark.parametrize(
    ("more", "relative", "own", "base", "words"),
    [
        (True, False, (97.0, 97.0), (98.0, 98.0), "LOSES (-1.0)"),
        (True, False, (99.0, 97.0), (97.0, 98.0), "ahead (+0.5, ranges overlap)"),
        (False, True, (80.0,), (100.0,), "ahead (-20 %)"),
        (False, True, (150.0,), (100.0,), "LOSES (+50 %)"),
        (False, False, (2.0, 3.0), (3.0, 2.0), "even"),
        (False, True, (100.0, None), (100.0, 100.0), "LOSES, did not get there"),
        (False, True, (100.0,), (None,), "ahead, the base did not get there"),
        (False, True, (None,), (None,), "neither got there"),
    ],
)
def test_verdicts(more: bool, relative: bool, own: Values, base: Values, words: str) -> None:
    figure = Figure("figure", lambda run: None, more=more, relative=relative)
    assert study.verdict(figure, Cell(own), Cell(base)) == words


def test_goals_are_all_reached_at_once() -> None:
    lines = [{"step": 1, "test_a": 0.5, "test_loss": 3.0}, {"step": 2, "test_a": None, "test_loss": 1.0}]
    lines += [{"step": 3, "test_a": 0.6, "test_loss": 1.0}]
    result = {"evaluations": lines}
    assert until("step", {"test_a": 0.5})(result) == 1
    assert until("step", {"test_a": 0.5, "test_loss": 1.0})(result) == 3
    assert until("step", {"test_a": 0.7})(result) is None


# What is trained -----------------------------------------------------------------------------------------------------


def test_phase_two_starts_from_the_weights_of_phase_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = applications.bert_run(ONE_SEED, "Lamb", 0, 0, 2)
    second = applications.bert_run(ONE_SEED, "KFACLAMB", 0, 1, 2, after=first)
    results = Results(Output(tmp_path, facts()), quiet=True)
    starts: list[Tensor] = []
    make = runs.Trainer

    def noting(task: Any, settings: Any) -> Any:
        trainer = make(task, settings)
        starts.append(trainer.model.symbol.weight.detach().clone())
        return trainer

    monkeypatch.setattr(runs, "Trainer", noting)
    results.train(second, "")
    assert len(starts) == 2 and results.has(first)
    assert torch.equal(starts[1], results.weights(first)["symbol.weight"])
    assert results.get(second)["before"]["step"] == 2
    assert second.key != applications.bert_run(ONE_SEED, "KFACLAMB", 0, 1, 2).key


def test_masked_windows_mask_the_same_number_and_nothing_else() -> None:
    task = applications.encoder_task(32)
    inputs, targets = task.source.batch(0, 5, 4)
    hidden = inputs == paper_tasks.MASK
    assert hidden.sum(dim=1).tolist() == [8] * 4
    assert torch.equal(hidden, targets >= 0) and (targets[hidden] < 256).all()
    assert applications.bert_run(Bench(), "KFACLAMB", 0, 0, 10).settings.kfac["loss_average"] == 32 * 8


def test_a_box_is_the_frame_of_its_mask() -> None:
    mask = torch.zeros(2, 10, 10)
    mask[0, 2:5, 3:9] = 1
    mask[1, 0, 9] = 1
    assert torch.allclose(paper_tasks.boxes(mask), torch.tensor([[0.2, 0.3, 0.5, 0.9], [0.0, 0.9, 0.1, 1.0]]))
    own = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    assert paper_tasks.box_overlap(own, own).item() == pytest.approx(1)
    assert paper_tasks.box_overlap(own, own + 0.25).item() == pytest.approx(1 / 7)
    assert paper_tasks.box_overlap(own, own + 0.6).item() == 0


def test_scenes_hold_their_digits_and_are_the_same_every_time() -> None:
    one, two = (paper_tasks.split_scenes(20, objects=1, scraps=2)[1] for _ in range(2))
    assert torch.equal(one.images, two.images)
    inside = one.masks[:, 0] > 0
    assert one.images[:, 0][inside].min() > paper_tasks.INK - 1e-6
    assert (inside.sum(dim=(1, 2)) > 5).all()


def test_dice_and_found_of_perfect_answers() -> None:
    task = applications.unet_task()
    target = task.held_out["test"][1]
    top, bottom = paper_tasks.dice(2 * target - 1, target)
    assert top == bottom > 0
    target = applications.detector().held_out["test"][1]
    classes = nn.functional.one_hot(target[:, 0].long(), paper_tasks.CLASSES)
    output = torch.cat([classes, target[:, 1:5], 2 * target[:, 5:] - 1], dim=1)
    for part in ("box", "mask"):
        assert paper_tasks.found_by(part, output, target) == (len(target), len(target))
        assert paper_tasks.found_by(part, -output, target)[0] < len(target) / 5


def test_equal_memory_is_equal() -> None:
    made = STUDIES["memory"][1](Bench(seeds=(0,)))
    sizes, megabytes = made.known["batch"], made.known["megabytes"]
    for column in made.columns:
        base, filled, kfac = (megabytes[row, column] for row in made.rows)
        assert base < filled <= kfac
        per_example = (filled - base) / (sizes[made.rows[1], column] - sizes[made.rows[0], column])
        capped = column == "ResNet-14"  # by the number of digits
        assert capped or kfac - filled < per_example


def test_activations_are_counted_once_and_without_the_weights() -> None:
    images = bench.digits_by("ResNet-8")
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    kept = 4 * 64 + 4 * 10 + 8  # of the image for the weight's gradient, of the log-probabilities, of the label (int64)
    assert memory.bytes_per_example(images, model) == kept
    twice = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    assert memory.bytes_per_example(images, twice) == kept + 4 * 64  # the tanh and the layer above share it
