"""What a step of K-FAC costs: time and memory against the base optimizer.

``python -m benchmarks.step_time`` (from the repository root) measures two works, prints their tables, and writes
``main.json`` (with settings, seeds, versions, machine and the seconds of all steps), ``main.txt`` and ``main.png`` to
``benchmarks/results/step_time/``. More works by ``--work NAME``; schedules by ``--every STATISTICS/DECOMPOSITIONS``,
the intervals ``factor_update_steps`` and ``inv_update_steps``. Where work, optimizer or dtype are given, or
``--exact``, they become the files' name, ``vit-s-KFACAdam.json`` for

    python -m benchmarks.step_time --work vit-s --optimizer KFACAdam --every 10/100 --solver inverse

``mean`` and ``worst`` are ratios to the base optimizer's mean step. They belong to one period of the schedule, composed
of the mean seconds of each kind of step (``timing.py``) or, with ``--exact``, observed; the worst is then the largest
ratio to the base optimizer's steps around it. A refresh is one step; with ``--exact`` it is spread as by default.
``bound`` is 1.2 times the base optimizer's peak memory plus what ``optimizer.curvature.memory_estimate()`` says.
kfac-pytorch takes part where the package ``kfac`` can be imported.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from benchmarks.common.reports import Command
from benchmarks.common.settings import KFAC
from benchmarks.common.works import DEFAULT_WORKS, SMOKE_WORKS, WORKS, Schedule
from benchmarks.step_time.contenders import SOLVERS, contenders
from benchmarks.step_time.measure import draw, measure, summary
from benchmarks.step_time.timing import Place


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("step_time", __doc__)
    add = command.add_argument
    add("--work", action="append", choices=WORKS, help=f"may be repeated (default: {' and '.join(DEFAULT_WORKS)})")
    add("--optimizer", action="append", choices=KFAC, help="may be repeated (default: KFACSGD)")
    add("--every", action="append", type=Schedule.parse, metavar="A/B", help="repeatable (default: 1/10 and 10/100)")
    add("--solver", action="append", choices=SOLVERS, help="may be repeated (default: eigen)")
    share = "share of a batch's examples that statistics see; may be repeated (default: 1)"
    add("--fraction", action="append", type=float, metavar="X", help=share)
    add("--dtype", action="append", choices=("float32", "bf16"), help="bf16: autocast; may be repeated")
    add("--seconds", type=float, default=100, metavar="S", help="of rounds, for each table (default: 100)")
    add("--exact", action="store_true", help="run one whole period of every schedule instead of composing it")
    options, output = command.start(arguments, "tiny models, one round")
    schedules = options.every or [Schedule(1, 10), Schedule(10, 100)]
    given = (*(options.work or ()), *(options.optimizer or ()), *(options.dtype or ()))
    stem = "-".join((*given, *(["exact"] if options.exact else []))) or "main"
    works = list(SMOKE_WORKS.values()) if options.smoke else [WORKS[name] for name in options.work or DEFAULT_WORKS]
    solvers, fractions = options.solver or ["eigen"], options.fraction or [1.0]
    budget = None if options.exact else 0 if options.smoke else options.seconds
    results = []
    for work, dtype, optimizer in itertools.product(
        works, options.dtype or ["float32"], options.optimizer or ["KFACSGD"]
    ):
        chosen = contenders(work, optimizer, solvers, spread=None if options.exact else 0, fractions=fractions)
        results.append(measure(work, chosen, schedules, Place(dtype=dtype), budget))
        print(summary(results[-1]))
        # After each: a run that is cut off keeps what it has.
        output.save(stem, {"results": results}, "\n".join(map(summary, results)))
    output.picture(stem, draw(results))
    print(f"written: {output.folder / stem}.json, .txt, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
