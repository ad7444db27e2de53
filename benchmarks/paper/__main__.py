"""The paper's Tables 1 to 6 and Figures 4 to 6 at the scale of one machine, each beside the paper's own figures.

``python -m benchmarks.paper`` (from the repository root) produces all of them, ``--part NAME`` one; ``--help`` says
which part answers what. Each part prints its table, says where K-FAC loses, and writes ``NAME.json`` (settings, seeds,
versions and machine of every run) and ``NAME.png`` to ``benchmarks/results/paper/``. Runs that the files hold already,
with the same settings, are not repeated; an interrupted command continues after the last finished run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.common.reports import Command, whole_numbers
from benchmarks.common.settings import nearest
from benchmarks.paper import applications, memory, resnets, study
from benchmarks.paper.bench import SEEDS, Bench

STUDIES: dict[str, tuple[tuple[str, ...], Callable[[Bench], study.Study]]] = {
    "table1": (("Table 1",), resnets.table1),
    "table2": (("Table 2", "Figure 4"), resnets.table2),
    "figure5a": (("Figure 5a",), resnets.figure5a),
    "figure5b": (("Figure 5b", "Figure 5c"), applications.figure5b),
    "table3": (("Table 3", "Table 4"), applications.table3),
    "table5": (("Table 5", "Figure 6"), resnets.table5),
    "table6": (("Table 6",), applications.table6),
    "interval": (("Section 6.4.1",), resnets.interval),
    "unet": (("KAISA, U-Net",), applications.unet),
    "memory": (("KAISA, equal memory",), memory.memory),
}


def learn(name: str, bench: Bench, results: study.Results) -> str:
    """Do a part of ``STUDIES``; return its tables."""
    answers, make = STUDIES[name]
    asked = make(bench)
    runs = [run for cell in asked.runs.values() for run in cell]
    started = {run.key: run for run in runs}

    def save(text: str = "") -> None:
        found = [results.get(run) for run in started.values() if results.has(run)]
        head = {"part": name, "answers": answers, "paper": asked.paper, "claim": asked.claim}
        known = {name: {", ".join(place): value for place, value in at.items()} for name, at in asked.known.items()}
        head |= {"known": known, "tables": text.splitlines()}
        results.output.save_runs(name, head, found)

    results.complete(name, runs, save)
    cells = asked.cells(results)
    text = study.tables(asked, cells)
    save(text)
    results.output.picture(name, study.draw(asked, results))
    return text


# "figure4" is "table2": any table or figure names the part that answers it.
NAMES = {word.lower().replace(" ", ""): name for name, (answers, _) in STUDIES.items() for word in (name, *answers)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parts = [f"{name:10} {', '.join(answers):22} {make.__doc__}" for name, (answers, make) in STUDIES.items()]
    parts.append("Figure 7 (stages of a step): python -m benchmarks.scaling --part measure")
    command = Command("paper", __doc__, epilog="\n".join(["parts:", *parts]))
    add = command.add_argument
    part = "which part; may be repeated; a table or figure is as good as the part's name (default: all)"
    add("--part", action="append", metavar="NAME", help=part)
    seeds = f"seeds of the runs (default: {','.join(map(str, SEEDS))})"
    add("--seeds", type=whole_numbers, default=SEEDS, metavar="N,...", help=seeds)
    add("--again", action="store_true", help="repeat the runs that the result files hold")
    add("--quiet", action="store_true", help="no progress bars")
    options, output = command.start(arguments, "two steps of every run")
    try:
        wanted = [NAMES[nearest("part", part.lower(), NAMES)] for part in options.part or STUDIES]
    except ValueError as error:
        command.error(str(error))
    bench = Bench(options.seeds, options.smoke)
    results = study.Results(output, again=options.again, quiet=options.quiet)
    for name in dict.fromkeys(wanted):
        print(learn(name, bench, results))
        print(f"written: {output.folder / name}.json, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
