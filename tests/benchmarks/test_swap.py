"""``python -m benchmarks.swap``: every training runs by both classes on the same data; what counts as behind."""

import json
import math
import time
from dataclasses import replace
from threading import Thread

import pytest
import torch

import kfac_optim
from benchmarks.common.optimizers import find
from benchmarks.swap import __main__ as swap
from benchmarks.swap import control, times
from benchmarks.swap.judging import SHARES, Pair, Verdict, is_behind, summary, thinned, window_before
from benchmarks.swap.training import SWAPS, Run
from benchmarks.swap.trainings import CHOOSE, HALVES, JUDGE, TRAININGS, UNDER_LAMB, WITH_WEIGHT_NORM


def steps(training, count, kfac=None, seed=0):
    run = Run(training, seed, kfac)
    for _ in range(count):
        run.step()
    return run


@pytest.mark.fast("^(mlp|gpt-characters|encoder-rows|resnet|gan|deep-q)$")
@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_runs_by_both_classes_on_the_same_data(name):
    base, other = steps(TRAININGS[name], 3), steps(TRAININGS[name], 3, {"scaling": kfac_optim.Graft(trust=1.0)})
    assert base.losses[0] == other.losses[0]
    assert all(map(math.isfinite, base.losses + other.losses))
    for plain, kfac in zip(base.optimizers, other.optimizers, strict=True):
        assert isinstance(kfac, type(plain)) and isinstance(kfac, kfac_optim.KFACMixin)
        assert kfac.curvature.layers and not hasattr(plain, "curvature")
        assert plain.defaults.items() <= {**kfac.defaults, "fused": plain.defaults.get("fused")}.items()
    parts = zip(base.script.parts, other.script.parts, strict=True)
    pairs = [pair for a, b in parts for pair in zip(a.model.parameters(), b.model.parameters(), strict=True)]
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_data_does_not_depend_on_what_the_optimizer_draws():
    training = TRAININGS["conv-dropout"]
    runs = [Run(replace(training, options={"lr": 0.0}), 0, None) for _ in range(2)]
    for _ in range(3):
        for run, draws in zip(runs, (0, 5), strict=True):
            run.step()
            torch.rand(draws)
    assert runs[0].losses == runs[1].losses
    assert len(set(runs[0].losses)) == 3


def test_another_seed_is_another_run():
    assert steps(TRAININGS["mlp"], 1, seed=1).losses != steps(TRAININGS["mlp"], 1, seed=2).losses


def test_the_halves_are_apart_and_alike():
    assert {t.name for t in CHOOSE}.isdisjoint(t.name for t in JUDGE)
    assert len(TRAININGS) == len(CHOOSE) + len(JUDGE) >= 24
    assert {t.half for t in CHOOSE} == {"choose"} and {t.half for t in JUDGE} == {"judge"}
    for half in (CHOOSE, JUDGE):
        assert {t.optimizer for t in half} == set(SWAPS)
        assert {t.rate for t in half} == {"small", "usual", "edge"}
        assert {"cosine", "constant"} == {t.schedule for t in half} and any(t.warmup for t in half)


def test_what_other_classes_train_is_trained_by_lamb_too(tmp_path):
    others = [training for training in TRAININGS.values() if training.optimizer != "Lamb"]
    assert len(UNDER_LAMB) == 3 * (len(others) - 3) and {*UNDER_LAMB}.isdisjoint(TRAININGS)
    training = UNDER_LAMB["resnet-edge"]
    assert training.settings()["options"] == {"lr": 0.03, "weight_decay": 1e-4} and training.half == "judge"
    assert isinstance(Run(training, 0, {}).optimizers[0], kfac_optim.KFACLAMB)
    words = ["--lamb", "--only", "mlp-edge", "--seeds", "0", "--smoke", "--label", "lamb", "--out", str(tmp_path)]
    assert swap.main(words) == 0
    base, swapped = json.loads((tmp_path / "lamb.json").read_text())["runs"]
    assert base["run"]["optimizer"] == "Lamb" and base["points"] != swapped["points"]


def test_networks_may_have_weight_norm(tmp_path):
    assert len(WITH_WEIGHT_NORM) == len(TRAININGS) - 4 and {*WITH_WEIGHT_NORM}.isdisjoint(TRAININGS)
    run = Run(WITH_WEIGHT_NORM["resnet-normed"], 0, {})
    rules = {layer.rule_name for layer in run.optimizers[0].curvature.layers}
    assert {"WeightNormConv, expand", "WeightNormLinear, expand"} <= rules
    words = ["--weight-norm", "--only", "mlp-normed", "--seeds", "0", "--smoke", "--label", "n", "--out", str(tmp_path)]
    assert swap.main(words) == 0
    base, swapped = json.loads((tmp_path / "n.json").read_text())["runs"]
    assert base["run"]["training"] == "mlp-normed" and base["points"] != swapped["points"]
    with pytest.raises(SystemExit):
        swap.main([*words, "--lamb"])


@pytest.mark.parametrize("base", SWAPS)
def test_the_swap_is_a_subclass_with_k_fac(base):
    cls = find(SWAPS[base])
    assert issubclass(cls, find(base)) and issubclass(cls, kfac_optim.KFACMixin)
    assert cls.__name__ == ("KFACLAMB" if base == "Lamb" else f"KFAC{base}")


def test_the_learning_rate_follows_the_schedule():
    training = TRAININGS["gpt-adder"]
    run = Run(training, 0, None)
    top = training.options["lr"]
    assert run.optimizers[0].param_groups[0]["lr"] < 0.1 * top
    assert [rate > 0.9 for rate in map(run._rate, (0, training.warmup, training.steps - 1))] == [False, True, False]


# Judging -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "swap", "scale", "expected"),
    [
        (1.0, 1.019, 1.0, False),
        (1.0, 1.021, 1.0, True),
        (1.0, 0.5, 1.0, False),
        (-2.0, -1.9, 4.0, True),  # dropped by 4, so the slack is 0.08
        (-2.0, -1.93, 4.0, False),
        (-2.0, -2.5, -4.0, False),  # a base that rose by 4
        (1.0, math.nan, 1.0, True),
        (1.0, math.inf, 1.0, True),
        (math.nan, 1.0, 1.0, False),
        (math.nan, math.nan, 1.0, False),
    ],
)
def test_behind_is_above_by_more_than_the_slack(base, swap, scale, expected):
    assert is_behind(base, swap, scale) == expected


def test_points_are_means_over_the_window_before_them():
    losses = [float(step) for step in range(1, 401)]
    assert [window_before(losses, share) for share in SHARES] == [30.5, 90.5, 190.5, 390.5]  # the last 20 steps
    assert window_before(losses[:60], 0.25) == sum(range(6, 16)) / 10  # at least 10
    assert window_before(losses[:12], 0.1) == 1.0  # as many as there are
    assert math.isnan(window_before([*losses[:399], math.inf], 1.0))


def test_curves_are_thinned_to_means():
    assert thinned([1.0, 3.0]) == [(1, 1.0), (2, 3.0)]
    curve = thinned([float(step) for step in range(400)])
    assert len(curve) == 100 and curve[0] == (4, 1.5) and curve[-1] == (400, 397.5)


def test_where_losses_can_be_negative_the_slack_is_a_share_of_the_drop():
    below = {"base": [1.0, 0.0, -1.0, -3.0], "swap": [1.05, 0.09, -0.91, -2.93], "first": 1.0}
    assert Pair(**below, of_drop=True).behind == [False, True, True, False]  # 2 % of 4
    assert Pair(**below, of_drop=True).differences == pytest.approx([0.0125, 0.0225, 0.0225, 0.0175])
    above = {"base": [4.0, 2.0, 1.0, 1.0], "swap": [4.1, 2.03, 1.01, 0.9], "first": 5.0}
    assert Pair(**above, of_drop=False).behind == [True, False, False, False]
    assert Pair(**above, of_drop=False).lower_at_the_end


def line(points, held_out, seconds, curve=()):
    return {"first": 2.0, "points": points, "held_out": held_out, "cpu_seconds": seconds, "curve": curve}


def test_the_summary_counts_points_and_runs():
    base = [line([1.0, 1.0, 1.0, 1.0], 1.0, 1.0), line([1.0, 1.0, 1.0, 1.0], 1.0, 1.0)]
    other = [line([1.1, 0.9, 1.0, 0.4], 1.01, 2.0), line([1.1, 1.05, None, 0.6], 1.1, 4.0)]
    figures = summary([Verdict(TRAININGS["mlp"], base, other)])
    assert figures["behind"] == "2 / 4"  # the first; the third, of which a seed is missing
    assert figures["behind, single seeds"] == "4 / 8"
    assert figures["lower at the end"] == "2 / 2"
    assert figures["held out not worse"] == "1 / 2"
    assert figures["final loss"] == pytest.approx(0.5)
    assert figures["time"] == pytest.approx(3.0)
    assert (figures["steps"], figures["seconds"], figures["sooner"]) == (None, None, "0 / 1"), "it never gets there"


def test_the_final_loss_of_a_half_in_which_a_swap_fails_is_not_that_of_the_others():
    base = line([1.0, 1.0, 1.0, 1.0], 1.0, 1.0)
    good, failed = line([1.0, 1.0, 1.0, 0.5], 1.0, 1.0), line([1.0, None, None, None], None, 1.0)
    verdicts = [Verdict(TRAININGS["mlp"], [base], [swap]) for swap in (good, failed)]
    assert summary(verdicts[:1])["final loss"] == pytest.approx(0.5) and summary(verdicts)["final loss"] is None


def test_the_swap_is_there_when_a_mean_over_the_window_is():
    """Ten steps of 100, in which the curve has a point every four: twelve of them."""
    base = line([4.0, 3.0, 2.0, 1.0], 1.0, 1.0)
    curve = [(step, 0.5 if step == 20 else 3.0 if step <= 40 else 0.9) for step in range(4, 101, 4)]
    swap = line([4.0, 3.0, 0.9, 0.9], 1.0, 1.5, curve)
    figures = summary([Verdict(TRAININGS["mlp"], [base], [swap])])
    assert (figures["steps"], figures["sooner"]) == (pytest.approx(0.52), "1 / 1")
    assert figures["seconds"] == pytest.approx(0.78)


# The command ---------------------------------------------------------------------------------------------------------


def smoke(folder, *more):
    shared = ["--smoke", "--only", "mlp", "regression-friedman", "--out", str(folder)]
    assert swap.main([*shared, *more]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a first run of the command, with two seeds."""
    made = tmp_path_factory.mktemp("swap")
    smoke(made, "--seeds", "0", "1")
    return made


def test_the_command_writes_table_json_and_picture(folder):
    result = json.loads((folder / "main.json").read_text())
    assert (folder / "main.png").stat().st_size > 0
    assert {"versions", "commit", "machine", "command", "options", "summary", "table"} <= result.keys()
    assert len(result["runs"]) == 2 * 2 * 2 and set(result["summary"]) == {*HALVES, "both"}
    assert (folder / "main.txt").read_text().splitlines() == result["table"]


def test_base_runs_of_an_earlier_file_are_taken_over(folder, monkeypatch):
    started = []
    monkeypatch.setattr(swap, "Run", lambda *given: started.append(given[1:]) or Run(*given))
    more = ["--option", "damping=OfLargest(0.1)", "--option", 'scaling="graft"', "--label", "other", "--half", "choose"]
    smoke(folder, *more, "--seeds", "0", "1", "--reuse", str(folder / "main.json"))
    given = {"damping": kfac_optim.OfLargest(0.1), "scaling": "graft"}
    assert [seed for seed, _ in started] == [0, 1] and repr(started[0][1]) == repr(given)
    before, after = (json.loads((folder / name).read_text())["runs"] for name in ("main.json", "other.json"))
    assert [run for run in after if run["run"]["swap"] is None] == [
        run for run in before if run["run"]["swap"] is None and run["run"]["training"] == "mlp"
    ]


def test_chance_is_told_by_the_base_again_from_slightly_other_weights(folder):
    smoke(folder, "--again", "--label", "again", "--seeds", "0", "1", "--reuse", str(folder / "main.json"))
    runs = json.loads((folder / "again.json").read_text())["runs"]
    base, again = (
        [run["first"] for run in runs if (run["run"]["swap"] is None) == of_base] for of_base in (True, False)
    )
    assert len(base) == len(again) == 4
    assert all(a == pytest.approx(b, rel=0.02) and a != b for a, b in zip(again, base, strict=True))


def test_trainings_may_be_longer(tmp_path):
    smoke(tmp_path, "--seeds", "0", "--longer", "3", "--label", "longer")
    runs = json.loads((tmp_path / "longer.json").read_text())["runs"]
    assert {run["run"]["steps"] for run in runs} == {36}
    assert {len(run["curve"]) for run in runs} == {36}


def test_a_swap_that_fails_is_behind_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kfac_optim.KFACSGD, "step", lambda self: 1 / 0)
    smoke(tmp_path, "--seeds", "0")
    assert "mlp, seed 0, swap: failed at step 0: ZeroDivisionError" in capsys.readouterr().out
    result = json.loads((tmp_path / "main.json").read_text())
    assert result["summary"]["both"]["behind"] == "8 / 8"


@pytest.mark.parametrize(
    "words",
    [
        ["--option", "damping"],
        ["--option", "damping=Off(1)"],
        ["--only", "mpl"],
        ["--option", "lr=1", "--again"],
        ["--only", "mlp", "--half", "judge"],
    ],
)
def test_a_wrong_word_is_refused_before_anything_runs(words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        swap.main([*words, "--out", str(tmp_path)])
    assert words[-1] in capsys.readouterr().err


def test_times_write_a_row_whose_stages_add_up(tmp_path):
    assert times.main(["--smoke", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "times.json").read_text())["rows"]
    parts = [row[name] for name in (*dict.fromkeys(times.STAGES.values()), "the rest")]
    assert row["time"] == pytest.approx(1 + sum(parts)) and min(parts[:-1]) > 0
    assert "geometric mean" in (tmp_path / "times.txt").read_text()


def test_work_in_the_background_is_the_swaps_even_while_the_base_takes_its_step(monkeypatch):
    step, threads = Run.step, []

    def burn():
        while time.thread_time() < 0.3:
            pass

    def stepping(run):
        for thread in threads:
            thread.join()
        step(run)
        if hasattr(run.optimizers[0], "curvature"):
            threads.append(Thread(target=burn))
            threads[-1].start()

    monkeypatch.setattr(Run, "step", stepping)
    assert times.measure(replace(TRAININGS["mlp"], steps=3))["time"] > 5


def test_judging_a_policy_is_no_part_of_its_training(monkeypatch):
    monkeypatch.setattr(control, "cost", lambda policy: pytest.fail("judged"))
    assert times.measure(replace(TRAININGS["deep-q"], steps=2))["time"] > 1
