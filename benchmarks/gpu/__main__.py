"""Measurements for a CUDA machine: ``python -m benchmarks.gpu`` (from the repository root), or some by ``--part NAME``.

    resnet50, resnet101, resnet152    KFACSGD against SGD: time and memory of a step
    gpt-small                         KFACAdam against Adam, likewise
    bert-phase1, bert-phase2          KFACLAMB against Lamb on BERT-Large, sequences of 128 and of 512 tokens
    target                            steps and seconds to a held-out loss on the task text, beside AdamW, Muon, SOAP
    decompositions                    eigh, batched eigh, QR refresh, Cholesky by size; fp32, TF32, bf16 products

Steps are measured in float32, under bf16 autocast, and there with TF32 in the products that are left in float32
("bf16-tf32"); or in one precision, or with another batch: ``--part gpt-small --dtype bf16 --batch 32`` writes
``gpt-small-bf16-32``. Of the package's defaults (class name changed only) the first steps are taken as they come, and
sorted by what they do (:mod:`benchmarks.step_time.first`): refreshes get rarer, and may wait. One more row has the
defaults where they are dearest, with trust held at 0.5 and refreshes that do not wait. The paper's mode, with each
solver every 50/500 and 10/100, is composed of its kinds of step as in ``benchmarks.step_time``.

A part prints its tables and writes ``NAME.json`` (with settings, seeds, versions, machine), ``.txt`` and ``.png`` to
``benchmarks/results/gpu/``, the first two after each measurement, so that a run that is cut off keeps what it has.
``--limit`` seconds after its start a part begins no further measurement; which are missing stands in the files. So do
those that the device has no memory for, or whose package is not installed. Times are seconds of the wall between
synchronisations. ``--smoke`` runs everything tiny, on the CPU where there is no GPU. Of the others only
``decompositions`` also runs there, on one thread, and writes ``decompositions-cpu``.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common.reports import Command, Output
from benchmarks.gpu.decompositions import Decompositions
from benchmarks.gpu.parts import LeftOut, Part
from benchmarks.gpu.steps import DTYPES, SOLVERS, STEPS
from benchmarks.gpu.target import Target

PARTS: dict[str, Part] = {**STEPS, "target": Target(), "decompositions": Decompositions()}
LIMIT = 360  # seconds; a part then ends within nine minutes, if what it is at takes at most three


def run(part: Part, stem: str, options: Namespace, output: Output) -> None:
    """Make the measurements of a part until its limit, and write files after each."""
    results: list[Any] = []
    missing: dict[str, str] = {}
    begin = time.perf_counter()
    for name, measure in part.measurements(options).items():
        if results and time.perf_counter() > begin + options.limit:
            missing[name] = f"not begun within --limit {options.limit:g}"
        else:
            try:
                results.append(measure())
            except (LeftOut, torch.OutOfMemoryError) as reason:
                missing[name] = str(reason).splitlines()[0]
        notes = "".join(f"missing: {each}, {reason}\n" for each, reason in missing.items())
        shown = (part.text(results) if results else "") + notes
        content = part.content(results) if results else {}
        output.save(stem, {"seed": options.seed, "missing": missing, **content}, shown)
    if results:
        output.picture(stem, part.draw(results))
    print(f"{shown}written: {output.folder / stem}.json, .txt, .png", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("gpu", __doc__)
    add = command.add_argument
    add("--part", action="append", choices=PARTS, help="what to measure; may be repeated (default: everything)")
    add("--limit", type=float, default=LIMIT, metavar="S", help=f"after which a part begins nothing new ({LIMIT})")
    add(
        "--seconds",
        type=float,
        default=30,
        metavar="S",
        help="of steps, for each table; a 30th for each time in decompositions (default: 30)",
    )
    add("--steps", type=int, default=200, metavar="N", help="first steps of the defaults, at most (default: 200)")
    add("--dtype", action="append", choices=DTYPES, help="of steps; may be repeated (default: all)")
    add("--batch", type=int, metavar="N", help="examples per step (default: the part's own)")
    add("--solver", action="append", choices=SOLVERS, help="of the paper's mode; may be repeated (default: both)")
    add("--seed", type=int, default=0, help="of weights and data, target: the first of three (default: 0)")
    options, output = command.start(arguments, "tiny sizes")
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = options.part or list(PARTS)
    if options.device == "cpu" and not options.smoke and chosen != ["decompositions"]:
        command.error("this torch sees no CUDA device; --smoke and --part decompositions run on the CPU")
    for name in chosen:
        words = [*(options.dtype or ()), *([str(options.batch)] if options.batch else ())] if name in STEPS else []
        if name == "decompositions" and options.device == "cpu":
            words.append("cpu")
        run(PARTS[name], "-".join([name, *words]), options, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
