"""README.rst and docs/results quote the figures that are in the files of ``benchmarks.swap``."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pages import ROOT

README, SWAP = ROOT / "README.rst", ROOT / "docs" / "results" / "swap.rst"
RESULTS = ROOT / "docs" / "results.rst"
SCRIPTS = ROOT / "docs" / "results" / "scripts.rst"
FILES = ROOT / "benchmarks" / "results" / "swap"
# By page: the first cell of a row of its table, the file, the half, and what the other cells are.
COLUMNS = ("behind", "behind, single seeds", "lower at the end", "held out not worse", "final loss", "time")
OF_ONE_SEED = ("behind", "lower at the end", "held out not worse", "final loss", "time")
SHORT = ("behind", "final loss", "held out not worse", "time")
ROWS = [
    (README, "used to choose the defaults", "main", "choose", SHORT),
    (README, "only evaluated", "main", "judge", SHORT),
    (README, "both, the base rerun (chance)", "again", "both", SHORT[:3]),
    (SWAP, "half that chose", "main", "choose", COLUMNS),
    (SWAP, "half only evaluated", "main", "judge", COLUMNS),
    (SWAP, "seeds 3 to 5, half that chose", "more-seeds", "choose", COLUMNS),
    (SWAP, "seeds 3 to 5, half only evaluated", "more-seeds", "judge", COLUMNS),
    (SWAP, "ten times the steps, half that chose", "longer", "choose", OF_ONE_SEED),
    (SWAP, "ten times the steps, half only evaluated", "longer", "judge", OF_ONE_SEED),
    (SWAP, "three rates each, half that chose", "lamb", "choose", OF_ONE_SEED),
    (SWAP, "three rates each, half only evaluated", "lamb", "judge", OF_ONE_SEED),
    (SWAP, "normed, half that chose", "weight-norm", "choose", COLUMNS),
    (SWAP, "normed, half evaluated", "weight-norm", "judge", COLUMNS),
    (SWAP, "the base again, from slightly other weights, both", "again", "both", COLUMNS),
    (SWAP, "the base again by LAMB, both", "lamb-again", "both", OF_ONE_SEED),
]

# The first cell of a row of the table of times: the training that it has.
TIMES = {
    "text, 400 steps, SGD, Adam": "text",
    "curves, 300 steps, SGD, Adam": "curves",
    "digits, 440 steps, SGD, Adam": "digits",
    "vocabulary of 30,000, 60 steps, AdamW: LSTM": "vocabulary, LSTM",
    "the same, GPT with tied weights": "vocabulary, tied GPT",
    "the same, GPT with a head of its own": "vocabulary, GPT",
    "ResNet-32, 128 images, 100 steps of noise, SGD": "ResNet-32, batch 128",
    "transformer, width 256, 100 steps of noise, SGD": "transformer, width 256",
}


def cells(page: Path, label: str) -> list[str]:
    """The cells of the row of a table, without the first one, which is ``label``."""
    rows = [re.split(" {2,}", line) for line in page.read_text(encoding="utf-8").splitlines()]
    (found,) = [row[1:] for row in rows if row[0] == label]
    return found


def summary(name: str, half: str) -> dict[str, Any]:
    """The sums of one half of the trainings, of a file."""
    found: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))["summary"][half]
    return found


def shown(column: str, value: Any) -> str:
    """A figure as the pages write it."""
    if isinstance(value, str):
        return value.replace(" / ", " of ")
    return f"x{value:.1f}" if column == "time" else f"x{value:.2f}"


@pytest.mark.parametrize(("page", "label", "name", "half", "columns"), ROWS)
def test_rows_of_the_swap_are_those_of_the_files(
    page: Path, label: str, name: str, half: str, columns: tuple[str, ...]
) -> None:
    sums = summary(name, half)
    assert cells(page, label) == [shown(column, sums[column]) for column in columns]


def test_readme_says_how_often_the_swap_is_behind_lower_and_sooner() -> None:
    sums = {column: shown(column, value) for column, value in summary("main", "both").items()}
    text = " ".join(README.read_text(encoding="utf-8").split())
    behind, points = sums["behind"].split(" of ")
    assert f"more than 2 % at {'none' if behind == '0' else behind} of {points} points" in text
    assert f"ended lower in {sums['lower at the end']} runs" in text
    assert f"final loss after {summary('main', 'both')['steps']:.0%}".replace("%", " %") in text
    assert f"final loss sooner in {sums['sooner']} trainings" in text
    assert f"with ten times the steps in {summary('longer', 'both')['sooner'].partition(' ')[0]}" in text
    better, runs = map(int, sums["held out not worse"].split(" of "))
    assert f"Held-out losses were worse in {runs - better} of {runs} runs" in text


def test_times_of_trainings_are_those_of_the_file() -> None:
    rows = json.loads((FILES / "times.json").read_text(encoding="utf-8"))["rows"]
    for label, name in TIMES.items():
        times = [row["time"] for row in rows if row["training"] == name]
        assert cells(SWAP, label)[0] == ", ".join(f"{time:.2f}" for time in times)
    suite = [row["time"] for row in rows if row["half"] in ("choose", "judge")]
    assert cells(SWAP, "the suite, geometric mean")[0] == f"{statistics.geometric_mean(suite):.2f}"


def libraries(rows: list[dict[str, Any]]) -> dict[str, int]:
    """What trainings of libraries add up to, with the first two seeds of each."""
    found = {"trainings": len(rows), "libraries": len({row["library"] for row in rows} - {"torch"})}
    pairs = [pair for row in rows for pair in list(zip(row["base losses"], row["swap losses"], strict=True))[:2]]
    points = [(base, swap) for pair in pairs for base, swap in zip(*pair, strict=True)]
    return found | {
        "behind": sum(swap - base > 0.02 * abs(base) for base, swap in points),
        "ahead": sum(base - swap > 0.02 * abs(base) for base, swap in points),
        "points": len(points),
        "lower": sum(swap[-1] < base[-1] for base, swap in pairs),
        "runs": len(pairs),
    }


def test_counts_of_libraries_are_those_of_the_file() -> None:
    rows = [row for row in json.loads((FILES / "libraries.json").read_text(encoding="utf-8"))["runs"] if row["counted"]]
    all_, own = libraries(rows), libraries([row for row in rows if "loop" not in row])
    readme, results, scripts = (
        " ".join(page.read_text(encoding="utf-8").split()) for page in (README, RESULTS, SCRIPTS)
    )
    assert "in {trainings} trainings with {libraries} libraries at {behind} of {points}".format(**all_) in readme
    assert "{trainings} trainings with {libraries} libraries".format(**all_) in results
    assert f"{own['trainings']} by their own loops" in results
    assert "{behind} of {points}; ahead at {ahead}".format(**all_) in results
    assert "behind at {behind} of {points} points, ahead at {ahead}".format(**all_) in scripts
    assert "lower at the end in {lower} of {runs} runs".format(**all_) in scripts
    assert "In {trainings} of them the loop is the library's own ({libraries} libraries)".format(**own) in scripts
    assert "behind at {behind} of {points} points, ahead at {ahead}, lower at the end".format(**own) in scripts
    assert "in {lower} of {runs} runs".format(**own) in scripts


def fresh(number: int) -> list[dict[str, Any]]:
    """The runs of a round of scripts that nobody had looked at; of the first one, those with the seeds that count."""
    name = "fresh" if number == 1 else f"fresh-{number}"
    runs: list[dict[str, Any]] = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))["runs"]
    return [run for run in runs if number > 1 or run["seed"] <= 2]


def points_of(runs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The losses by base and swap at all points; the shortest runs have none at a tenth of their steps."""
    return [(b, s) for run in runs for b, s in zip(run["base"], run["swap"], strict=True) if b is not None]


def table_of_rounds() -> dict[int, list[str]]:
    """By round of scripts that nobody had looked at, the other cells of its row."""
    section = SCRIPTS.read_text(encoding="utf-8").partition("\nround  chosen for")[2].partition("\n\n")[0]
    rows = [re.split(" {2,}", line) for line in section.splitlines() if line[:1].isdigit()]
    return {int(row[0]): row[2:] for row in rows}


ROUNDS = len(list(FILES.glob("fresh*.json")))
# Of these scripts of the second round a difference is a share of the whole drop, which the file does not have.
BY_DROP = {
    *(f"minimalRL {name}" for name in ("REINFORCE", "actor_critic", "ppo", "dqn", "sac")),
    *("pytorch-flows glow", "WassersteinGAN mlp"),
}


@pytest.mark.parametrize("number", range(1, ROUNDS + 1))
def test_counts_of_public_scripts_are_those_of_the_file(number: int) -> None:
    runs = fresh(number)
    points = points_of(runs)
    behind, ahead = (sum(sign * (s - b) > 0.02 * abs(b) for b, s in points) for sign in (1, -1))
    lower = sum(run["swap"][-1] < run["base"][-1] for run in runs)
    times: dict[str, list[float]] = {}
    for run in runs:
        times.setdefault(run["name"], []).append(run.get("CPU time of the process", run.get("time of training")))
    means = [statistics.mean(values) for values in times.values()]
    found = table_of_rounds()[number]
    expected = [
        str(
            len({run.get("script") if number == 1 else run["name"] for run in runs})
        ),  # makemore is one, of five models
        f"{behind} of {len(points)}",
        str(ahead),
        f"{lower} of {len(runs)}",
        f"x{statistics.median(means):.1f}, x{max(means):.1f}",
    ]
    if any(run["name"] in BY_DROP for run in runs):
        found[2] = expected[2]
    assert found == expected


@pytest.mark.parametrize("number", range(1, ROUNDS + 1))
def test_each_public_script_is_told_with_what_its_file_has(number: int) -> None:
    page = SCRIPTS.read_text(encoding="utf-8")
    rows: list[list[str]] = []
    for line in page.partition("\nno.  script")[2].partition("\n\n")[0].splitlines()[2:-1]:
        if line.startswith(" "):  # further seeds
            rows[-1][2] += f" {line.strip()}"
        else:
            rows.append(re.split(" {2,}", line))
    behind: list[tuple[Any, ...]] = [
        (*re.findall(r"\(([\w ]+), (\d+)\)$", script)[0], [seed.split(", ") for seed in losses.split("; ")])
        for first, script, losses, _ in rows
        if first == str(number) and "*" not in script
    ]
    text = " ".join(page.partition(f"**Round {number}:**")[2].partition("\n-")[0].partition("\n\n")[0].split())
    rest: list[tuple[Any, ...]] = [
        (base, steps, ends.split(", "))
        for script, base, steps, ends in re.findall(r"(\S+) \(([\w ]+), (\d+)\) ([-+\d, ]+)[;.]", text)
        if script != r"\*"
    ]
    scripts: dict[str, list[dict[str, Any]]] = {}
    for run in fresh(number):
        if run["name"] not in BY_DROP:
            scripts.setdefault(run["name"], []).append(run)
    assert len(behind) + len(rest) == len(scripts)
    for runs in scripts.values():
        losses = [[percent(b, s) for b, s in points_of([run])] for run in runs]
        steps, base = str(runs[0]["steps"]), runs[0].get("base class", runs[0].get("becomes"))
        if any(s - b > 0.02 * abs(b) for b, s in points_of(runs)):
            (entry, *_) = [entry for entry in behind if entry[1:] == (steps, losses)]
            behind.remove(entry)
        else:
            (entry, *_) = [entry for entry in rest if entry[1:] == (steps, [seed[-1] for seed in losses])]
            rest.remove(entry)
        assert entry[0].split()[-1] in base


def percent(base: float, swap: float) -> str:
    """By how much a loss is above the base's, as the page writes it."""
    rounded = round(100 * (swap - base) / abs(base))
    return f"{rounded:+d}" if rounded else "0"


def test_counts_of_scripts_on_which_the_rules_were_tried_are_those_of_the_file() -> None:
    runs = json.loads((FILES / "public.json").read_text(encoding="utf-8"))["runs"]
    runs = [run for run in runs if run.get("counted")]
    points = [point for run in runs for point in zip(run["base"], run["swap"], strict=True)]
    behind, ahead = (sum(sign * (s - b) > 0.02 * abs(b) for b, s in points) for sign in (1, -1))
    lower = sum(run["swap"][-1] < run["base"][-1] for run in runs)
    drop = 1 - statistics.geometric_mean(run["swap"][-1] / run["base"][-1] for run in runs)
    time, training = (
        statistics.geometric_mean(run[f"time of {of}"] for run in runs) for of in ("the process", "training")
    )
    readme, results, scripts = (
        " ".join(page.read_text(encoding="utf-8").split()) for page in (README, RESULTS, SCRIPTS)
    )
    assert f"public repositories it was behind at {behind} of {len(points)} points" in readme
    assert f"{behind} of {len(points)}; ahead at {ahead} " in results
    found = f"Behind by more than 2 % at {behind} of {len(points)} points, ahead by more than 2 % at {ahead}.** "
    assert found in scripts
    assert f"{lower} of {len(runs)} runs end lower, by {100 * drop:.0f} % in the geometric mean" in scripts
    assert f"takes {time:.2f} times the base's seconds, {training:.2f} times without" in scripts


def test_counts_of_scripts_that_nobody_had_looked_at_are_added_up() -> None:
    rows = table_of_rounds()
    assert sorted(rows) == list(range(1, ROUNDS + 1))
    scripts, _, ahead, *_ = zip(*rows.values(), strict=True)
    behind, points = (sum(int(row[1].split(" of ")[i]) for row in rows.values()) for i in (0, 1))
    lower, runs = (sum(int(row[3].split(" of ")[i]) for row in rows.values()) for i in (0, 1))
    number, ahead_ = (sum(map(int, column)) for column in (scripts, ahead))
    readme, results, page = (" ".join(of.read_text(encoding="utf-8").split()) for of in (README, RESULTS, SCRIPTS))
    assert f"on {number} scripts nobody had seen before at {behind} of {points}" in readme
    assert f"{number} public scripts that nobody had looked at before" in results
    assert f"{behind} of {points}; ahead at {ahead_} " in results
    assert f"behind by more than 2 % at {behind} of {points} points, ahead by more than 2 % at {ahead_}" in page
    assert f"lower at the end in {lower} of {runs} runs" in page
    sooner = re.findall(r"(\d+) of (\d+)", page.partition("comes sooner in seconds in")[2].partition(". All")[0])
    first, of = (sum(int(pair[i]) for pair in sooner) for i in (0, 1))
    assert f"in {first} of {of} runs of unseen scripts" in readme
    assert f"in {first} of the {of} runs of unseen scripts" in results


def test_counts_of_scripts_that_were_run_with_the_rule_of_today_are_added_up() -> None:
    files = [json.loads((FILES / f"fresh-{number}.json").read_text(encoding="utf-8")) for number in (9, 10, 11, 12)]
    runs = [run for file in files for run in file["runs"]]
    points = [point for run in runs for point in zip(run["base"], run["swap"], strict=True)]
    behind, ahead = (sum(sign * (s - b) > 0.02 * abs(b) for b, s in points) for sign in (1, -1))
    scripts = len({run["name"] for run in runs})
    shown = f"({scripts} of them with the rule of e36b9879: {behind} of {len(points)}; ahead at {ahead})"
    assert shown in " ".join(RESULTS.read_text(encoding="utf-8").split())


# By row of the table of docs/results/peers: the optimizer's name in the files.
TUNED = {
    "SGD": "SGD",
    "``KFACSGD``, swap": "KFACSGD for SGD",
    "Adam": "Adam",
    "``KFACAdam``, swap": "KFACAdam for Adam",
    "Lamb": "Lamb",
    "``KFACLAMB``, swap": "KFACLAMB for Lamb",
    "AdamW": "AdamW",
    "Muon, AdamW for the rest": "Muon",
    "``KFACSGD``, ``PRACTICAL``, tuned": "KFACSGD",
    "``KFACAdam``, tuned": "KFACAdam",
    "``KFACLAMB``, tuned": "KFACLAMB",
    "``KFAC``, nothing to tune": "KFAC",
    "SOAP (pytorch-optimizer)": "SOAP",
    "Shampoo (pytorch-optimizer)": "Shampoo",
    "kfac-pytorch, SGD": "KFACPyTorch",
    "kfac-jax, automatic": "KFACJax",
}


def tuned(task: str) -> dict[str, dict[str, str]]:
    """By optimizer, the medians of a task: of K-FAC those of today's code, but the time of a step of the first file."""
    found: dict[str, dict[str, str]] = {}
    for name in (task, f"again-{task}"):
        path = ROOT / "benchmarks" / "results" / "convergence" / f"{name}.json"
        head, *rows = [
            re.split(" {2,}", line.strip()) for line in json.loads(path.read_text(encoding="utf-8"))["table"][:-1]
        ]
        for row in rows:
            medians = {column: cell.partition(" (")[0] for column, cell in zip(head, row, strict=True)}
            found[row[0]] = medians | {"s/step": found.get(row[0], medians)["s/step"]}
    return found


def rows_of_peers(table: str) -> dict[str, list[str]]:
    """By the optimizer's name in the files, the other cells of a table of docs/results/peers."""
    page = (ROOT / "docs" / "results" / "peers.rst").read_text(encoding="utf-8")
    lines = page.partition(f"\n{table}  ")[2].partition("\n\n")[0].splitlines()
    rows = {row[0]: row[1:] for row in (re.split(" {2,}", line) for line in lines) if row[0] in TUNED}
    assert rows.keys() == TUNED.keys()
    return {TUNED[label]: row for label, row in rows.items()}


def says(text: str, value: str) -> bool:
    """Whether a figure of a page is that of a file, rounded."""
    return float(text) == pytest.approx(float(value), abs=0.51 * 10.0 ** -len(text.partition(".")[2]))


@pytest.mark.parametrize(("column", "task"), list(enumerate(("digits", "curves", "text"))))
def test_losses_of_tuned_optimizers_are_those_of_the_files(column: int, task: str) -> None:
    files = tuned(task)
    for name, cells in rows_of_peers("training loss after").items():
        text = cells[column].rpartition(" / ")[2]
        assert (name in files) == bool(re.fullmatch(r"[\d.]+", text)), name
        if name in files:
            last = [value for label, value in files[name].items() if label.startswith("loss at")][-1]
            assert says(text, last), name


@pytest.mark.parametrize(("column", "task"), list(enumerate(("digits", "curves", "text"))))
def test_steps_to_the_target_and_their_times_are_those_of_the_files(column: int, task: str) -> None:
    files = tuned(task)
    for name, cells in rows_of_peers("target").items():
        assert (name in files) == (";" in cells[column]), name
        if name in files:
            steps, held_out, time = cells[column].split("; ")
            assert steps == files[name]["steps"].replace("-", "not reached"), name
            assert says(held_out, files[name]["held out"]), name
            assert says(time.removesuffix(" ms"), str(1000 * float(files[name]["s/step"]))), name


SIDE_BY_SIDE = {  # By row of docs/results/peers: a column of the files, and whether the peer is told after ours.
    "seconds for as many steps": ("time", False),
    "training loss at the end; peer": ("loss", True),
    "at the peer's seconds": ("loss at peer's time", False),
    "at the peer's last loss, to stay": ("peer's loss after", False),
    "at the target; peer": ("target after", True),
    "held out at the end; peer": ("held out", True),
}


def side_by_side(name: str) -> dict[str, dict[str, list[str]]]:
    """The table of a file of ``benchmarks.convergence.seconds``: by contender and column, three seeds and the median.

    The peer is the last contender.
    """
    path = ROOT / "benchmarks" / "results" / "convergence" / f"seconds-{name}.json"
    head, _, *lines = json.loads(path.read_text(encoding="utf-8"))["table"][2:]
    titles = [*re.finditer(r"\S+( \S+)*", head)][1:]  # cells are aligned with their ends
    found: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        contender = re.split(" {2,}", line)[0]
        for before, title in zip(titles, titles[1:], strict=False):
            cell = line[before.end() : title.end()].strip()
            found.setdefault(contender, {}).setdefault(title[0], []).append(cell)
    peer = next(iter(found))
    return {contender: of for contender, of in found.items() if "shorter" not in contender} | {peer: found.pop(peer)}


@pytest.mark.parametrize(("column", "name"), list(enumerate(("digits", "text", "text-64", "curves"))))
def test_figures_of_runs_side_by_side_are_those_of_the_files(column: int, name: str) -> None:
    peer, *ours = side_by_side(name).values()
    page = (ROOT / "docs" / "results" / "peers.rst").read_text(encoding="utf-8")
    for label, (title, tells_peer) in SIDE_BY_SIDE.items():
        cell = page.partition(f"   * - {label}\n")[2].splitlines()[column]
        cell = re.sub(r"; peer [\d., ]+|\d+( %)?: |[a-zA-Z`*]+|^ +- +", "", cell)
        for figures, of in zip(cell.split("; "), [*ours, peer][: len(ours) + tells_peer], strict=True):
            median, *seeds = re.findall(r"[\d.]+", figures)
            *of_seeds, of_median = of[title]
            assert says(median, of_median), (label, figures)
            assert not seeds or all(map(says, seeds, of_seeds)), (label, figures)


def test_aims_are_told_with_the_figures_of_the_files() -> None:
    text = " ".join(RESULTS.read_text(encoding="utf-8").split())
    main, more, again, lamb, lamb_again = (
        {column: shown(column, value).partition(" of ")[0] for column, value in summary(name, "both").items()}
        for name in ("main", "more-seeds", "again", "lamb", "lamb-again")
    )
    lower, held_out = "lower at the end", "held out not worse"
    assert f"- {main['behind']}; with other seeds {more['behind']} " in text
    assert f"- {main[lower]} of 96, equal in 3; with other seeds {more[lower]}, " in text
    assert f"- {main[held_out]} of 90; {more[held_out]} of 90. The base against itself: {again[held_out]} " in text
    assert re.search(rf"- {lamb['behind']}, 17 of .* The base against itself: {lamb_again['behind']} ", text)
    for label in ("the suite, geometric mean", *list(TIMES)[:3]):
        assert f"- {cells(SWAP, label)[0]}; another machine" in text, label


@pytest.mark.parametrize(("row", "task"), list(enumerate(("digits", "curves", "text"))))
def test_tuned_tasks_are_told_among_the_aims_with_the_figures_of_the_files(row: int, task: str) -> None:
    pattern = r"- ([\d.]+), ([\d.]+); bases ([\d.]+), ([\d.]+)"
    found, files = re.findall(pattern, RESULTS.read_text(encoding="utf-8"))[row], tuned(task)
    for text, name in zip(found, ("KFACSGD for SGD", "KFACAdam for Adam", "SGD", "Adam"), strict=True):
        assert says(text, [value for label, value in files[name].items() if label.startswith("loss at")][-1]), name


def test_runs_side_by_side_are_told_among_the_aims_with_the_figures_of_the_files() -> None:
    results, after = " ".join(RESULTS.read_text(encoding="utf-8").split()), "peer's loss after"

    def listed(values: list[float], digits: int) -> str:
        return ", ".join(f"{value:.{digits}f}" for value in values)

    muon, ours = side_by_side("text").values()
    assert f"- {listed([float(x) for x in ours[after][:3]], 2)}; another machine" in results
    pairs = zip(muon["loss"][:3], ours["loss at peer's time"], strict=False)
    assert f"- {listed([float(theirs) - float(own) for theirs, own in pairs], 3)}; another machine" in results
    shares = [float(side_by_side(name)["KFACSGD"][after][-1]) for name in ("text-64", "text-256")]
    assert f"- {shares[0]:.2f} and {shares[1]:.2f} of its seconds" in results
    curves, digits = side_by_side("curves"), side_by_side("digits")
    share, held_out = float(curves["KFAC"][after][-1]), [float(curves[x]["held out"][-1]) for x in ("KFAC", "Muon")]
    assert f"``KFAC``: {share:.2f}; {held_out[0]:.1f} held out, Muon {held_out[1]:.1f}; another" in results
    own, sgd = (float(digits[name]["target after"][-1]) for name in ("KFACSGD", "SGD"))
    assert f"- {own:.2f}, SGD {sgd:.2f} " in results
