"""Measurements for a CUDA machine: ``python -m benchmarks.gpu --part NAME`` (from the repository root).

    resnet50, resnet101, resnet152    KFACSGD against SGD: time and memory of a step, every 50/500 and 10/100
    gpt-small                         KFACAdam against Adam, likewise
    bert-phase1, bert-phase2          KFACLAMB against Lamb on BERT-Large, sequences of 128 and of 512 tokens
    decompositions                    eigh, batched eigh, QR refresh, Cholesky by size; fp32, TF32, bf16 products

A part prints its tables and writes ``NAME.json`` (with settings, seeds, versions, machine), ``.txt`` and ``.png`` to
``benchmarks/results/gpu/``, the first two after each measurement, so that a run that is cut off keeps what it has.
Times are seconds of the wall between synchronisations; schedules are composed of their steps as in
``benchmarks.step_time``. ``--smoke`` runs tiny models, on the CPU where there is no GPU. Of the others only
``decompositions`` also runs there, on one thread, and writes ``decompositions-cpu``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.common.models import Bottleneck, BottleneckResNet, Encoder, StagedResNet
from benchmarks.common.reports import Command, table
from benchmarks.common.works import WORKS, Schedule, Work, images, tokens
from benchmarks.gpu import decompositions
from benchmarks.scaling.paper import BLOCKS
from benchmarks.step_time.contenders import contenders
from benchmarks.step_time.measure import draw, measure, summary
from benchmarks.step_time.timing import Place

SCHEDULES = (Schedule(50, 500), Schedule(10, 100))
SOLVERS = ("eigen", "inverse")
SMALL_RESNET = images("small ResNet", partial(StagedResNet, (1, 1), 10, 4, block=Bottleneck), 2, 32, 10)
SMALL_BERT = tokens("small BERT", partial(Encoder, 1, 16, 2, 64, 16), 2, 16, 64)


@dataclass(frozen=True)
class Steps:
    """A part that measures the steps of one model."""

    work: Work  # What is trained
    small: Work  # Takes its place under ``--smoke``
    optimizer: str  # Name of the K-FAC optimizer


def resnet(depth: int) -> Steps:
    """ImageNet's ResNet with 32 images, as many as each GPU has in the paper."""
    name = f"ResNet-{depth}"
    return Steps(images(name, partial(BottleneckResNet, BLOCKS[name]), 32, 224, 1000), SMALL_RESNET, "KFACSGD")


def bert(batch: int, positions: int) -> Steps:
    """BERT-Large with a prediction at every position."""
    return Steps(replace(WORKS["bert-large"], batch=batch, example=(positions,)), SMALL_BERT, "KFACLAMB")


PARTS: dict[str, Steps | None] = {
    **{f"resnet{depth}": resnet(depth) for depth in (50, 101, 152)},
    "gpt-small": Steps(replace(WORKS["gpt-small"], batch=8, example=(1024,)), SMALL_BERT, "KFACAdam"),
    "bert-phase1": bert(32, 128),
    "bert-phase2": bert(8, 512),
    "decompositions": None,
}


def steps(part: Steps, device: str, options: Any) -> Iterator[dict[str, Any]]:
    """Yield the result of each precision."""
    work = part.small if options.smoke else part.work
    work = replace(work, batch=options.batch) if options.batch else work
    chosen = contenders(work, part.optimizer, options.solver or SOLVERS, default=True)
    for dtype in ("float32", "bf16"):
        place = Place(device, dtype, options.seed)
        yield measure(work, chosen, SCHEDULES, place, 0 if options.smoke else options.seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("gpu", __doc__)
    add = command.add_argument
    add("--part", choices=PARTS, required=True, help="what to measure")
    add("--seconds", type=float, default=60, metavar="S", help="of rounds, for each table (default: 60)")
    add("--batch", type=int, metavar="N", help="examples per step (default: the part's own)")
    add("--solver", action="append", choices=SOLVERS, help="may be repeated (default: both)")
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    options, output = command.start(arguments, "tiny sizes")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part = PARTS[options.part]
    if device == "cpu" and not options.smoke and part:
        command.error("this torch sees no CUDA device; --smoke and --part decompositions run on the CPU")
    stem = options.part if part or device == "cuda" else f"{options.part}-cpu"
    if part:
        results = []
        for result in steps(part, device, options):
            results.append(result)
            print(summary(result))
            output.save(stem, {"results": results}, "\n".join(map(summary, results)))
        figure = draw(results)
    else:
        for rows in decompositions.measure(device, options.seed, options.smoke):
            shown = table("Decompositions by method, size and products", rows, decompositions.NOTE)
            output.save(stem, {"seed": options.seed, "damping": decompositions.DAMPING, "rows": rows}, shown)
        print(shown)
        figure = decompositions.draw(rows)
    output.picture(stem, figure)
    print(f"written: {output.folder / stem}.json, .txt, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
