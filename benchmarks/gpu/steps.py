"""Parts that measure steps of one model: the package's defaults as they come, the paper's mode composed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common.models import Bottleneck, BottleneckResNet, Encoder, StagedResNet
from benchmarks.common.works import WORKS, Schedule, Work, images, tokens
from benchmarks.scaling.paper import BLOCKS
from benchmarks.step_time.contenders import contenders, defaults
from benchmarks.step_time.first import measure_first
from benchmarks.step_time.measure import draw, measure, summary
from benchmarks.step_time.timing import Place

SCHEDULES = (Schedule(50, 500), Schedule(10, 100))  # of the paper's mode
SOLVERS = ("eigen", "inverse")
DTYPES = ("float32", "bf16", "bf16-tf32")
SMALL_RESNET = images("small ResNet", partial(StagedResNet, (1, 1), 10, 4, block=Bottleneck), 2, 32, 10)
SMALL_BERT = tokens("small BERT", partial(Encoder, 1, 16, 2, 64, 16), 2, 16, 64)


@dataclass(frozen=True)
class Steps:
    """A part that measures the steps of one model."""

    work: Work  # What is trained
    small: Work  # Takes its place under ``--smoke``
    optimizer: str  # Name of the K-FAC optimizer

    def measurements(self, options: Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
        """In each precision the defaults, then the paper's mode with each solver."""
        work = self.small if options.smoke else self.work
        work = replace(work, batch=options.batch) if options.batch else work
        seconds = 0.0 if options.smoke else options.seconds
        found: dict[str, Callable[[], dict[str, Any]]] = {}
        for dtype in options.dtype or DTYPES:
            place = Place(options.device, dtype, options.seed)
            chosen = defaults(self.optimizer)
            found[f"{dtype} defaults"] = partial(measure_first, work, chosen, place, options.steps, seconds)
            for solver in options.solver or SOLVERS:
                chosen = contenders(work, self.optimizer, [solver])
                found[f"{dtype} {solver}"] = partial(measure, work, chosen, SCHEDULES, place, seconds)
        return found

    def content(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The results."""
        return {"results": results}

    def text(self, results: Sequence[dict[str, Any]]) -> str:
        """A table for each."""
        return "\n".join(map(summary, results))

    def draw(self, results: Sequence[dict[str, Any]]) -> Figure:
        """A row of panels for each."""
        return draw(results)


def resnet(depth: int) -> Steps:
    """ImageNet's ResNet with 32 images, as many as each GPU has in the paper."""
    name = f"ResNet-{depth}"
    return Steps(images(name, partial(BottleneckResNet, BLOCKS[name]), 32, 224, 1000), SMALL_RESNET, "KFACSGD")


def bert(batch: int, positions: int) -> Steps:
    """BERT-Large with a prediction at every position."""
    return Steps(replace(WORKS["bert-large"], batch=batch, example=(positions,)), SMALL_BERT, "KFACLAMB")


STEPS: dict[str, Steps] = {
    **{f"resnet{depth}": resnet(depth) for depth in (50, 101, 152)},
    "gpt-small": Steps(replace(WORKS["gpt-small"], batch=8, example=(1024,)), SMALL_BERT, "KFACAdam"),
    "bert-phase1": bert(32, 128),
    "bert-phase2": bert(8, 512),
}
