"""The paper's Tables 1 to 6 and Figures 4 to 7 at the scale of one machine, each beside the paper's own figures.

``python -m benchmarks.paper`` (from the repository root) produces all of them, ``--part NAME`` one; ``--list`` says
which part answers what. Each part prints its table, says where K-FAC loses, and writes ``paper-NAME.json`` (settings,
seeds, versions and machine of every run) and ``paper-NAME.png``. Runs that the files hold already, with the same
settings, are not repeated; an interrupted command continues after the last finished run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from benchmarks.common import data
from benchmarks.common.reports import grid
from benchmarks.common.runs import Line
from benchmarks.common.settings import nearest
from benchmarks.paper import study
from benchmarks.paper.parts import SEEDS, STUDIES, Bench, images_of
from benchmarks.scaling.__main__ import SCHEDULE, SMALL, SUBJECTS, Job, measure
from benchmarks.scaling.cluster import STAGES
from benchmarks.scaling.plots import stage_bars

RESULTS = Path("benchmarks/results")
SMOKE = Path("runs/smoke")
FIGURE7 = "figure7"
SUBJECT = "ResNet-14, 32 images"


@dataclass(frozen=True)
class Place:
    """Where results come from and go to.

    Attributes:
        folder: Of the result files.
        head: First entries of each file.
        results: Finished runs.
        again: Repeat what the files hold.
    """

    folder: Path
    head: Line
    results: study.Results
    again: bool

    def path(self, part: str, ending: str = "json") -> Path:
        """Return a file of a part."""
        return self.folder / f"paper-{part}.{ending}"


def learn(name: str, bench: Bench, place: Place) -> str:
    """Do a part of ``STUDIES``; return its tables."""
    answers, make = STUDIES[name]
    asked = make(bench)
    runs = [run for cell in asked.runs.values() for run in cell]
    started = {run.key: run for run in runs}

    def save(text: str = "") -> None:
        found = [place.results.get(run) for run in started.values() if place.results.has(run)]
        head = {**place.head, "part": name, "answers": answers, "paper": asked.paper, "claim": asked.claim}
        study.save(place.path(name), {**head, "known": study.plain(asked.known), "tables": text.splitlines()}, found)

    place.results.complete(name, runs, save)
    cells = asked.cells(place.results)
    text = study.tables(asked, cells)
    save(text)
    study.draw(asked, cells, place.results, place.path(name, "png"))
    return text


def stages(bench: Bench, place: Place) -> str:
    """Figure 7: milliseconds of every stage of a step on two ranks of this machine, opt and lw; return its table."""
    job = Job(SMALL if bench.smoke else {SUBJECT: SUBJECTS[SUBJECT]}, 1 if bench.smoke else 5, "cpu", 0)
    settings = {"model": next(iter(job.subjects)), "ranks": 2, "periods": job.periods, "seed": job.seed}
    settings |= {"statistics": SCHEDULE.statistics, "decompositions": SCHEDULE.decompositions, "threads": 1}
    path = place.path(FIGURE7)
    before = json.loads(path.read_text()) if path.exists() and not place.again else {}
    if before.get("settings") == settings:
        rows, head = before["rows"], {key: before[key] for key in place.head}
    else:
        rows, head = measure(job, [2]), dict(place.head)
    events = {row["strategy"]: row["events"] for row in rows}
    opt, layered = ({name: events[kind][name] for name in STAGES} for kind in ("factor-wise", "layer-wise"))
    text = stages_table(opt, layered)
    content = {**head, "part": FIGURE7, "settings": settings, "tables": text.splitlines(), "rows": rows}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    drawing, axes = grid(1, 1, "Figure 7: stages of a step on two ranks")
    stage_bars(axes[0][0], {"K-FAC-opt": opt, "K-FAC-lw": layered})
    axes[0][0].legend()
    drawing.savefig(place.path(FIGURE7, "png"), dpi=90)
    return text


PAPER_STAGES = {
    "factor computation": "within 2 %",
    "factor communication": "within 2 %",
    "decomposition": "within 2 %",
    "decomposition communication": "opt only; 3.4 x lw's gradient communication",
    "preconditioning": "opt longer",
    "gradient communication": "lw only, every step",
    "scaling": "within 2 %",
}


def stages_table(opt: Line, layered: Line) -> str:
    """Return the table of Figure 7."""
    title = "Figure 7: milliseconds of each stage, each time it happens; the paper: ResNet-50 on 64 V100"
    lines = [["stage", "K-FAC-opt", "K-FAC-lw", "the paper"]]
    for name in STAGES:
        lines.append([name, *(f"{1e3 * row[name]:.2f}" for row in (opt, layered)), PAPER_STAGES.get(name, "-")])
    often = layered["gradient communication"]
    ratio = f"{opt['decomposition communication'] / often:.1f}" if often else "-"
    note = f"broadcast of decompositions in opt over that of gradients in lw: {ratio}; the paper: 3.4"
    return "\n".join([title, "=" * len(title), *study.aligned(lines), "", note, ""])


ANSWERS = {**{name: answers for name, (answers, _) in STUDIES.items()}, FIGURE7: ("Figure 7",)}
# "figure4" is "table2": any table or figure names the part that answers it.
NAMES = {
    word.lower().replace(" ", ""): name
    for name, answers in ANSWERS.items()
    for word in (name, *answers)
}  # fmt: skip


def listed() -> str:
    """Return the parts and what they answer."""
    abouts = {name: make.__doc__ for name, (_, make) in STUDIES.items()} | {
        FIGURE7: "Milliseconds of every stage of a step, K-FAC-opt and K-FAC-lw, on two ranks."
    }
    return "\n".join(f"{name:10} {', '.join(ANSWERS[name]):22} {about}" for name, about in abouts.items())


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + listed(),
    )
    add = command.add_argument
    part = "which part; may be repeated; a table or figure is as good as the part's name (default: all)"
    add("--part", action="append", metavar="NAME", help=part)
    add("--list", action="store_true", help="say which part answers what, and stop")
    add("--seeds", metavar="N,...", help=f"seeds of the runs (default: {','.join(map(str, SEEDS))})")
    folders = "CIFAR-10, an image folder or WikiText in place of digits and of Python's sources (default: neither)"
    add("--data", action="append", type=Path, metavar="FOLDER", help=f"{folders}; may be repeated")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default: cpu, on one thread)")
    add("--again", action="store_true", help="repeat the runs that the result files hold")
    add("--smoke", action="store_true", help="two steps of every run, to see that everything works; no result")
    add("--quiet", action="store_true", help="no progress bars")
    add("--out", type=Path, metavar="FOLDER", help=f"of the result files (default: {RESULTS}; with --smoke: {SMOKE})")
    return command


def bench_of(options: argparse.Namespace) -> Bench:
    """Return what the parts share.

    Raises:
        ValueError: If a seed is no number or a folder of data is not usable.
    """
    given: Line = {"smoke": options.smoke, "device": options.device}
    if options.seeds:
        given["seeds"] = tuple(int(seed) for seed in options.seeds.split(","))
    for folder in options.data or ():
        kind = data.kind(folder)
        if kind == "wikitext":
            data.read_text(folder)
            given["text"] = lru_cache(None)(partial(data.read_text, folder))
        else:
            given["images"] = images_of(folder, kind)
    return Bench(**given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = parser()
    options = command.parse_args(arguments)
    if options.list:
        print(listed())
        return 0
    folder = options.out or (SMOKE if options.smoke else RESULTS)
    try:
        wanted = [NAMES[nearest("part", part.lower(), NAMES)] for part in options.part or ANSWERS]
        bench = bench_of(options)
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        command.error(str(error))
    words = sys.argv[1:] if arguments is None else list(arguments)
    importlib.import_module("kfac_optim")  # its version is one of the facts
    results = study.Results(folder, again=options.again, quiet=options.quiet)
    head = {"command": " ".join(["python -m benchmarks.paper", *words]), **results.facts}
    place = Place(folder, head, results, options.again)
    for name in dict.fromkeys(wanted):
        do: Callable[[Bench, Place], str] = stages if name == FIGURE7 else partial(learn, name)
        print(do(bench, place))
        print(f"written: {place.path(name)}, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
