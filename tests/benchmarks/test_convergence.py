"""``python -m benchmarks.convergence``: draws, resuming, what is left out; the size of a figure is never checked."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.common.models import ResNet
from benchmarks.common.optimizers import OPTIMIZERS
from benchmarks.common.runs import Trainer
from benchmarks.common.tasks import digits, text
from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence import seconds, width
from benchmarks.convergence.__main__ import FACTOR, LENGTHS, Row, drawn, factors, middle, rows_of, swapped


@pytest.fixture(scope="module")
def task():
    """The digits with a narrow network, few of them held out."""
    whole = digits()
    held_out = {split: (inputs[:20], targets[:20]) for split, (inputs, targets) in whole.held_out.items()}
    return replace(whole, model=lambda: ResNet(channels=1, blocks=1, width=2), held_out=held_out)


@pytest.fixture(scope="module", autouse=True)
def small(task):
    """The command trains ``task`` as the digits, in batches of 8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(convergence.TASKS, "digits", lambda: task)
        patch.setitem(convergence.SHORT, "batch_size", 8)
        yield


def smoke(folder, *more):
    """Run the command on a few steps of the cheapest task."""
    shared = ["--smoke", "--task", "digits", "--draws", "2", "--seeds", "0,1", "--out", str(folder)]
    assert convergence.main([*shared, *more]) == 0
    return json.loads((folder / "digits.json").read_text())


@pytest.fixture(scope="module")
def first(small, folder):
    """What a first run of the command has written to ``folder``."""
    return smoke(folder, "--optimizer", "SGD", "KFACSGD")


def test_the_command_writes_json_and_plot(first, folder):
    result = first
    assert (folder / "digits.png").stat().st_size > 0
    assert {"versions", "commit", "machine", "seeds", "draws", "tuning", "command"} <= result.keys()
    counts = {row: sum(run["of"] == row for run in result["runs"]) for row in result["chosen"]}
    # Two draws and two seeds. The swap is not tuned; its runs are those of the defaults if draw 0 is the best.
    assert counts.pop("KFACSGD, defaults") in (2, 4)
    assert counts == {"SGD": 4, "KFACSGD for SGD": 2, "KFACSGD": 4}


def test_the_swap_takes_over_what_was_tuned_for_its_base_class(first):
    settings = {run["of"]: run["settings"] for run in first["runs"] if run["draw"] is None}
    base, swap = settings["SGD"], settings["KFACSGD for SGD"]
    assert {**base, "optimizer": "", "kfac": {}} == {**swap, "optimizer": "", "kfac": {}}
    assert swap["kfac"]["loss_average"] == "batch"


def test_started_again_nothing_is_repeated_and_the_table_is_printed(first, folder, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "train_step", lambda self: pytest.fail("a run was repeated"))
    again = smoke(folder, "--optimizer", "SGD", "KFACSGD")
    assert again["runs"] == first["runs"]
    printed = capsys.readouterr().out
    assert all(line in printed for line in again["table"])


def test_a_draw_whose_decomposition_fails_loses_and_the_others_go_on(tmp_path, monkeypatch):
    step = Trainer.train_step

    def failing(self):
        if self.settings.lr != 0.1 and self.step:  # every draw but the start, and there the last seed
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        if self.settings.seed == 1 and self.step:
            raise torch.linalg.LinAlgError("nor did it here")
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", failing)
    result = smoke(tmp_path, "--optimizer", "SGD")
    ends = {(run["draw"], run["end"]) for run in result["runs"]}
    failed = {(1, "failed: the algorithm failed to converge"), (None, "failed: nor did it here")}
    assert ends == {(0, "finished"), (None, "finished")} | failed
    assert " 1/2 " in result["table"][1]
    assert result["chosen"]["SGD"] == {"lr": 0.1}


def test_more_draws_are_added_to_those_there_are(tmp_path):
    smoke(tmp_path, "--optimizer", "SGD")
    runs = smoke(tmp_path, "--optimizer", "SGD", "--draws", "3")["runs"]
    assert [run["draw"] for run in runs if run["draw"] is not None] == [0, 1, 2]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "KFACSGD", "KFACPyTorch"])
def test_draws_are_reproducible_and_within_the_range(name, task):
    start = rows_of(name)[-1].settings(task, {})
    assert set(factors(start, 0).values()) == {1.0}
    draws = [factors(start, draw) for draw in range(1, 200)]
    assert draws == [factors(start, draw) for draw in range(1, 200)]
    values = [value for draw in draws for value in draw.values()]
    assert 1 / FACTOR <= min(values) < 0.5 and 2 < max(values) <= FACTOR
    assert draws != [factors(replace(start, task="text"), draw) for draw in range(1, 200)]


def test_the_second_optimizer_is_tuned_where_there_is_one(task):
    start = Row("Muon").settings(task, {})
    assert factors(start, 1).keys() == {"lr", "rest_lr"}
    assert factors(replace(start, rest=None), 1).keys() == {"lr"}


def test_a_draw_changes_only_what_is_tuned(task):
    row = rows_of("KFACSGD")[-1]
    start = row.settings(task, LENGTHS["digits"])
    other = row.settings(task, {**LENGTHS["digits"], **drawn(start, 1)})
    lr, damping = factors(start, 1).values()
    assert other.lr == pytest.approx(start.lr * lr, rel=0.01)
    assert other.kfac == {**start.kfac, "damping": pytest.approx(start.kfac["damping"] * damping, rel=0.01)}


def test_a_base_without_momentum_hands_over_none(task):
    assert "momentum" not in swapped(Row("Adam").settings(task, {}))


def test_the_swap_keeps_the_weight_decay_that_was_tuned(task):
    given = swapped(Row("AdamW").settings(task, {"weight_decay": 0.2}))
    assert rows_of("KFACAdamW:swap")[0].settings(task, given).weight_decay == 0.2


def test_a_missing_package_is_skipped_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    monkeypatch.setitem(sys.modules, "kfac", None)
    monkeypatch.setitem(sys.modules, "kfac_jax", None)
    for adapter in ("benchmarks.peers.kfac_pytorch", "benchmarks.peers.kfac_jax"):
        monkeypatch.delitem(sys.modules, adapter, raising=False)
    missing = ("SOAP", "KFACPyTorch", "KFACJax")
    result = smoke(tmp_path, "--optimizer", "SGD", *missing)
    assert tuple(result["skipped"]) == missing and result["chosen"].keys() == {"SGD"}
    assert "SOAP left out: SOAP needs pytorch_optimizer" in capsys.readouterr().out


def test_what_can_not_train_the_task_is_skipped(tmp_path):
    assert "2-dimensional" in smoke(tmp_path, "--optimizer", "SGD", "Muon")["skipped"]["Muon"]


def test_a_median_shows_its_range_and_what_is_missing():
    assert middle([3.0]) == "3"
    assert middle([2.0, 1.0, 4.0]) == "2 (1 - 4)"
    assert middle([2.0, None, 1.0]) == "2 (1 - -)"
    assert middle([None, None, None]) == "-"


def test_a_row_can_be_named_alone():
    rows = rows_of("KFACAdam")
    assert [row.label for row in rows] == ["KFACAdam for Adam", "KFACAdam, defaults", "KFACAdam"]
    assert [row for kind in ("swap", "defaults", "tuned") for row in rows_of(f"KFACAdam:{kind}")] == rows


def test_by_the_defaults_the_learning_rate_alone_is_tuned_from_where_the_base_starts():
    task, (row,) = text(), rows_of("KFACAdam:defaults")
    start = row.settings(task, {})
    assert start.lr == Row("Adam").settings(task, {}).lr and start.kfac == {"loss_average": task.loss_average}
    assert factors(start, 1).keys() == {"lr"}


def test_every_contender_is_known():
    assert {*convergence.CONTENDERS, *convergence.EXTRAS} <= OPTIMIZERS.keys()


@pytest.mark.parametrize(
    "words",
    [["--optimizer", "Sdg"], ["--optimizer", "SGD:swap"], ["--draws", "0"], ["--seeds", "a"], ["--task", "images"]],
)
def test_wrong_words_end_the_command_before_training(words, tmp_path):
    with pytest.raises(SystemExit):
        convergence.main([*words, "--out", str(tmp_path)])


def test_width_reads_rates_and_losses_off_the_curves():
    curves = {32: {0.1: 3.0, 0.2: 2.5, 0.4: None}, 64: {0.1: 2.4, 0.2: 2.6, 0.4: None}}
    found = width.row("SGD", curves)
    assert (found["lr at 32"], found["lr at 64"]) == (0.2, 0.1)
    assert (found["loss at 64"], found["with the lr of 32"]) == (2.4, 2.6)


@pytest.mark.slow
def test_width_trains_every_width_and_rate(tmp_path):
    assert width.main(["--smoke", "--optimizer", "SGD", "--out", str(tmp_path)]) == 0
    losses = json.loads((tmp_path / "width.json").read_text())["losses"]["SGD"]
    assert list(losses) == ["8", "16"]
    assert [list(map(float, curve)) for curve in losses.values()] == 2 * [[0.075, 0.15, 0.3, 0.6, 1.2]]
    assert len({loss for curve in losses.values() for loss in curve.values()}) == 10, "every run is another"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".txt", ".png"}


def line(step, loss, cpu):
    return {"kind": "step", "step": step, "loss": loss, "cpu_seconds": cpu, "wall_seconds": cpu}


def record_of_losses(losses, seconds_per_step, reached):
    """A record of steps that took the same time, and of one evaluation at the end."""
    steps = [line(i + 1, loss, (i + 1) * seconds_per_step) for i, loss in enumerate(losses)]
    held_out = {"test_loss": 0.5, "test_accuracy": 0.99 if reached else 0.5}
    evaluation = {**steps[-1], "kind": "evaluation", **held_out}
    return convergence.Record({"settings": {"device": "cpu"}}, steps, [evaluation], end="finished")


def test_side_by_side_times_are_shares_of_the_peers(task):
    peer = record_of_losses([2.5, 2.5, 2.5, 2.5], seconds_per_step=1.0, reached=False)
    own = record_of_losses([1.0, 9.0, 0.1, 0.1], seconds_per_step=2.0, reached=True)
    found = seconds.judged(task, peer, own)
    averages = seconds.smoothed([1.0, 9.0, 0.1, 0.1])
    assert found["time"] == 8 / 4
    assert averages[0] < 2.5 < averages[1] == found["loss at peer's time"]
    assert averages[2] > 2.5 > averages[3] == found["loss"]
    assert found["peer's loss after"] == 8 / 4  # from where on its average stays below 2.5: not in the first step
    assert (found["steps to target"], found["target after"]) == (4, 8 / 4)
    behind = seconds.judged(task, own, peer)
    assert (behind["peer's loss after"], behind["target after"]) == (None, None)


def test_side_by_side_every_run_is_the_run_alone(tmp_path, task, capsys, monkeypatch):
    monkeypatch.delitem(convergence.SHORT, "batch_size")
    monkeypatch.setitem(seconds.ENOUGH, ("digits", 8), {"factor_batch_fraction": 0.5})
    shared = ["--smoke", "--task", "digits", "--draws", "2", "--seeds", "0,1", "--batch-size", "8"]
    assert seconds.main([*shared, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "seconds-digits-8.json").read_text())
    printed = capsys.readouterr().out
    assert all(row in printed for row in result["table"])
    runs = [run for run in result["runs"] if run["draw"] is None]
    assert [run["of"] for run in runs] == ["SGD", "KFACSGD", "KFACSGD, shorter"] * 2
    for run in runs[:3]:
        _, alone = convergence.train(task, convergence.Settings(**run["settings"]), "alone", quiet=True)
        assert [e["train_loss"] for e in alone.evaluations] == [e["train_loss"] for e in run["evaluations"]]
    assert runs[2]["settings"]["steps"] == 3 < runs[1]["settings"]["steps"] == 4
    assert {run["settings"]["batch_size"] for run in result["runs"]} == {8}  # when they are tuned as well
    fractions = {run["settings"]["kfac"].get("factor_batch_fraction") for run in result["runs"] if run["of"] != "SGD"}
    assert fractions == {0.5}
