"""What a step of K-FAC costs: time and memory against the base optimizer.

``python -m benchmarks.step_time`` (from the repository root) measures two works, prints their tables, and writes
``step_time.json`` (with settings, seeds, versions, machine and the seconds of all steps), ``.txt`` and ``.png`` to
``benchmarks/results/``. More works by ``--work NAME``; schedules by ``--every STATISTICS/DECOMPOSITIONS``, the
intervals ``factor_update_steps`` and ``inv_update_steps``. Work, optimizer, dtype and device, where they are given, and
``--wall`` and ``--exact`` become part of the files' name:

    python -m benchmarks.step_time --work vit-s --optimizer KFACAdam --every 10/100 --solver inverse

``mean`` and ``worst`` are ratios to the base optimizer's mean step. They belong to one period of the schedule, composed
of the mean seconds of each kind of step (``benchmarks/timing.py``) or, with ``--exact``, observed; the worst is then
the largest ratio to the base optimizer's steps around it. ``medians`` is the mean composed of medians, over the base's
median; with ``--exact`` it is the median step. ``bound`` is 1.2 times the base optimizer's peak memory plus what
``optimizer.curvature.memory_estimate()`` says.

kfac-pytorch takes part where the package ``kfac`` can be imported.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common.optimizers import OPTIMIZERS
from benchmarks.common.reports import RESULTS, SMOKE, save
from benchmarks.common.runs import facts
from benchmarks.common.works import DEFAULT_WORKS, SMOKE_WORKS, WORKS
from benchmarks.scaling.cluster import Schedule
from benchmarks.step_time import timing

# Mean and worst step over SGD's on one CPU thread, as the project set them for itself.
GOALS = {
    ("KFACSGD", WORKS["resnet32"].title, "1/10"): "1.80",
    ("KFACSGD", WORKS["resnet32"].title, "10/100"): "1.10 (2)",
    ("KFACSGD", WORKS["transformer"].title, "1/10"): "1.60",
    ("KFACSGD", WORKS["transformer"].title, "10/100"): "1.20 (2)",
}


def schedule(text: str) -> Schedule:
    """Parse "a/b": statistics every a, decompositions every b steps."""
    statistics, _, decompositions = text.partition("/")
    parsed = Schedule(int(statistics), int(decompositions))
    if min(parsed.statistics, parsed.decompositions) < 1:
        raise ValueError(text)
    return parsed


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = command.add_argument
    ours = [label for label, entry in OPTIMIZERS.items() if entry.base]
    add("--work", action="append", choices=WORKS, help=f"may be repeated (default: {' and '.join(DEFAULT_WORKS)})")
    add("--batch", type=int, metavar="N", help="examples per step (default: the work's own)")
    add("--optimizer", action="append", choices=ours, help="may be repeated (default: KFACSGD)")
    add("--every", action="append", type=schedule, metavar="A/B", help="may be repeated (default: 1/10 and 10/100)")
    add("--solver", action="append", choices=timing.SOLVERS, help="may be repeated (default: eigen)")
    spread = (
        "steps over which a refresh is worked off (default: 0; with --exact the package's, a tenth of the interval)"
    )
    add("--spread", type=int, metavar="N", help=spread)
    share = "share of a batch's examples that statistics see; may be repeated (default: 1)"
    add("--fraction", action="append", type=float, metavar="X", help=share)
    add("--default", action="store_true", help="a row with the package's defaults; without --every no other")
    add("--dtype", action="append", choices=("float32", "bf16"), help="bf16: autocast; may be repeated")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--wall", action="store_true", help="on the CPU, too, time of the wall: for what runs beside the training")
    add("--threads", type=int, default=1, metavar="N", help="of torch (default: 1)")
    add("--seconds", type=float, default=100, metavar="S", help="of rounds, for each table (default: 100)")
    add("--exact", action="store_true", help="run one whole period of every schedule instead of composing it")
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add("--smoke", action="store_true", help="tiny models, one round, to see that everything runs; no result")
    add("--out", type=Path, metavar="FOLDER", help=f"of the result files (default: {RESULTS}; with --smoke: {SMOKE})")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = parser()
    options = command.parse_args(arguments)
    schedules = options.every or ([] if options.default else [Schedule(1, 10), Schedule(10, 100)])
    spread = 0 if options.spread is None and not options.exact else options.spread
    if spread is not None and any(spread >= each.decompositions for each in schedules):
        command.error(f"--spread {options.spread}: must be smaller than the interval between decompositions")
    if options.device == "cuda" and not torch.cuda.is_available():
        command.error("--device cuda: this torch sees no CUDA device")
    folder = options.out or (SMOKE if options.smoke else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    device = () if options.device == "cpu" else (options.device,)
    ways = [way for way in ("wall", "exact") if getattr(options, way)]
    given = (*(options.work or ()), *(options.optimizer or ()), *(options.dtype or ()), *device, *ways)
    stem = "-".join(("step_time", *given))
    works = list(SMOKE_WORKS.values()) if options.smoke else [WORKS[name] for name in options.work or DEFAULT_WORKS]
    if options.batch:
        works = [replace(work, batch=options.batch) for work in works]
    words = sys.argv[1:] if arguments is None else list(arguments)
    command_line = " ".join(["python -m benchmarks.step_time", *words])
    found = facts()  # before the runs: the code that they use, whatever the checkout becomes meanwhile
    solvers = (options.solver or ["eigen"]) if schedules else []
    results = []
    for work, dtype, optimizer in itertools.product(
        works, options.dtype or ["float32"], options.optimizer or ["KFACSGD"]
    ):
        place = timing.Place(options.device, dtype, options.threads, options.seed, options.wall)
        fractions = options.fraction or [1.0]
        chosen = timing.contenders(
            work, optimizer, solvers, spread=spread, fractions=fractions, default=options.default
        )
        budget = None if options.exact else 0 if options.smoke else options.seconds
        results.append(timing.measure(work, chosen, schedules, place, budget))
        print(timing.summary(results[-1], GOALS))
        # After each: a run that is cut off keeps what it has.
        tables = "\n".join(timing.summary(each, GOALS) for each in results)
        save(folder, stem, {"command": command_line, **found, "results": results}, tables)
    timing.draw(results, folder / f"{stem}.png")
    print(f"written: {folder / stem}.json, .txt, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
