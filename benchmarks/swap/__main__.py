"""One line changed: many small trainings by their base optimizer and by its K-FAC class, with the same settings.

``python -m benchmarks.swap`` (from the repository root) runs every training of benchmarks.swap.trainings with each seed
by both, prints a table, and writes ``LABEL.json``, ``.txt`` and ``.png`` to ``benchmarks/results/swap/``. Half of the
trainings are for choosing defaults ("choose"), the others are only looked at in the end ("judge").

    losses      training loss of each step, mean over the last 5 % of all steps (at least 10) before 10, 25, 50 and
                100 % of the run; of the GAN the distance to the data, of the two loops of reinforcement learning minus
                the exact return of the policy. The base and the swap see the same weights, batches and noise.
    behind      the swap is above the base by more than 2 % of the base's loss; where that can be negative (flows,
                returns) or ends in noise (the GAN's distance) by more than 2 % of what the base drops by in the run
    seconds     CPU time of the steps on one thread; base and swap take turns, a run each. With --reuse the base ran at
                another time: read ratios with care.

A variant of the defaults is tried by ``--option``, once for each keyword, in terms of kfac_optim's names:
``--option 'damping=OfLargest(0.03)' --option scaling='"graft"' --label largest --reuse
benchmarks/results/swap/main.json`` runs the swap alone, beside the base runs of the first command.

``--longer 10 --label longer`` gives every training ten times its steps. ``--lamb --label lamb`` trains by LAMB, at
three rates each, what other classes train by default, ``--weight-norm --label weight-norm`` networks whose layers have
weight norm.

How much of a difference is chance is told by ``--again --label again``: in the place of the swap the base class runs
once more, from weights that a thousandth of noise has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import kfac_optim
from benchmarks.common.reports import Command, Output
from benchmarks.common.runs import Line, Store, progress
from benchmarks.common.settings import nearest
from benchmarks.swap import report
from benchmarks.swap.judging import Verdict
from benchmarks.swap.training import Run, Training
from benchmarks.swap.trainings import HALVES, TRAININGS, UNDER_LAMB, WITH_WEIGHT_NORM

NUDGE = 1e-3  # the share by which the weights of a base that runs again are changed
AGAIN = (f"the base again, weights changed by {NUDGE:g}",)  # in the place of the swap's options


def keywords(options: Sequence[str]) -> dict[str, Any]:
    """Return the keywords that ``NAME=EXPRESSION`` stand for, in terms of kfac_optim's names, torch and math.

    Raises:
        ValueError: If one has no "=" or its expression cannot be evaluated.
    """
    names = {name: getattr(kfac_optim, name) for name in kfac_optim.__all__} | {
        "torch": torch,
        "kfac_optim": kfac_optim,
    }
    given = {}
    for option in options:
        name, equals, expression = option.partition("=")
        try:
            given[name] = eval(expression, dict(names))
        except Exception as error:
            raise ValueError(f"--option {option}: {error or 'must be NAME=EXPRESSION'}") from error
    return given


def identity(training: Training, seed: int, options: Sequence[str] | None) -> Line:
    """Return what must agree for a run of a file to stand for one of this command; ``options`` None: the base's."""
    return {**training.settings(), "seed": seed, "swap": None if options is None else list(options)}


def work(training: Training, seed: int, swap: tuple[str, ...], with_base: bool) -> list[Line]:
    """Run one training with one seed by the base, if asked to, and by the swap; return their lines."""
    lines = []
    for kfac in (None, swap) if with_base else (swap,):
        if kfac == AGAIN:
            run = Run(training, seed, None, nudge=NUDGE)
        else:
            run = Run(training, seed, None if kfac is None else keywords(kfac))
        lines.append({"run": identity(training, seed, kfac), **run.finish()})
    return lines


def measure(output: Output, options: Any, given: Sequence[Training]) -> None:
    """Run what no file has; print the tables, write files and picture."""
    swap, seeds = AGAIN if options.again else tuple(options.option), options.seeds
    trainings = [replace(t, steps=options.longer * (12 if options.smoke else t.steps)) for t in given]
    known, found = Store([options.reuse] if options.reuse else []), Store([])
    with progress(len(trainings) * len(seeds), "swap", "pair", leave=False) as bar:
        for training, seed in product(trainings, seeds):
            bar.set_postfix_str(f"{training.name} seed {seed}")
            base = known.find(identity(training, seed, None))
            for line in ([base] if base else []) + work(training, seed, swap, base is None):
                found.add(line)
            output.save_runs(options.label, {}, found.runs.values())
            bar.update()

    def runs(training: Training, of: Sequence[str] | None) -> list[Line]:
        return [found.runs[Store.key(identity(training, seed, of))] for seed in seeds]

    verdicts = [Verdict(t, runs(t, None), runs(t, swap)) for t in trainings]
    text = report.tables(verdicts)
    head = {"options": swap, "summary": report.summaries(verdicts), "table": text.splitlines()}
    output.save_runs(options.label, head, found.runs.values())
    (output.folder / f"{options.label}.txt").write_text(text)
    title = f"training loss, base and swap ({', '.join(swap) or 'defaults'}); {len(seeds)} seeds, mean and range"
    output.picture(options.label, report.picture(verdicts, title))
    print(f"{text}\nwritten: {output.folder / options.label}.json, .txt, .png", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("swap", __doc__)
    add = command.add_argument
    add("--option", action="append", default=[], metavar="NAME=EXPR", help="a keyword of the swap; may be repeated")
    add("--again", action="store_true", help="not the swap, but the base again from slightly other weights")
    add("--half", choices=(*HALVES, "both"), default="both", help="which trainings (default: both)")
    add("--only", nargs="+", metavar="NAME", help=f"some trainings alone: {', '.join(TRAININGS)}")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(default: 0 1 2)")
    add("--lamb", action="store_true", help="trainings of other classes by LAMB, NAME-small, NAME-usual and NAME-edge")
    add(
        "--weight-norm", action="store_true", help="with weight norm in all Linear layers and convolutions, NAME-normed"
    )
    add("--longer", type=int, default=1, metavar="N", help="times the steps of each training (default: 1)")
    add("--label", default="main", metavar="NAME", help="of the result files (default: main)")
    add("--reuse", type=Path, metavar="FILE", help="JSON of an earlier run whose base runs are taken over")
    options, output = command.start(arguments, "twelve steps of each")
    try:
        if options.again and options.option:
            raise ValueError("--again runs no swap, for which --option is meant")
        keywords(options.option)
        if options.lamb and options.weight_norm:
            raise ValueError("--lamb and --weight-norm have trainings of their own: give one of them")
        known = UNDER_LAMB if options.lamb else WITH_WEIGHT_NORM if options.weight_norm else TRAININGS
        chosen = [known[nearest("training", name, known)] for name in options.only or known]
        wanted = [training for training in chosen if options.half in ("both", training.half)]
        if not wanted:
            raise ValueError(f"--half {options.half}: {', '.join(options.only)} belong to the other one")
        if options.reuse and not options.reuse.exists():
            raise ValueError(f"--reuse {options.reuse}: no such file")
    except ValueError as error:
        command.error(str(error))
    measure(output, options, wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
