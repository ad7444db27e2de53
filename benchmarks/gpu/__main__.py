"""Measurements for a CUDA machine: ``python -m benchmarks.gpu --part NAME``, each within ten minutes.

    resnet50, resnet101, resnet152    KFACSGD against SGD: time and memory of a step, every 50/500 and 10/100
    bert-phase1, bert-phase2          KFACLAMB against Lamb on BERT-Large, sequences of 128 and of 512 tokens
    mask-rcnn                         KFACSGD on the box and mask heads of Mask R-CNN alone (needs torchvision)
    decompositions                    eigh, batched eigh, QR refresh, Cholesky by size; fp32, TF32, bf16 products
    curves                            seconds of training to a held-out loss of 66 on the CURVES autoencoder

A part prints its tables and writes ``gpu-NAME.json`` (with settings, seeds, versions, machine), ``.txt`` and ``.png``
to ``benchmarks/results/``, the first two after each measurement, so that a run that is cut off keeps what it has. Times
are seconds of the wall between synchronisations; schedules are composed of their steps as in
``benchmarks/step_time.py``. Models are those of torchvision and transformers where these are installed, else of the
same shapes; kfac-pytorch takes part where ``kfac`` can be imported. ``--smoke`` runs tiny models, on the CPU where
there is no GPU. Of the others only ``decompositions`` also runs there, on one thread, and writes ``cpu-NAME``.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.common import plots
from benchmarks.common import summary as runs_summary
from benchmarks.common.models import Bottleneck, BottleneckResNet, Encoder, StagedResNet
from benchmarks.common.optimizers import is_kfac
from benchmarks.common.reports import RESULTS, SMOKE, grid, save, table
from benchmarks.common.runs import Record, Trainer, facts
from benchmarks.common.settings import resolve
from benchmarks.common.tasks import TASKS
from benchmarks.common.works import BERT_LARGE, WORDS, Work, images, tokens
from benchmarks.scaling.cluster import Schedule
from benchmarks.scaling.paper import BLOCKS
from benchmarks.step_time import timing
from kfac_optim.layers import full_precision
from kfac_optim.solvers import Decomposition, EigenSolver, InverseSolver, Solver

SCHEDULES = (Schedule(50, 500), Schedule(10, 100))
SOLVERS = ("eigen", "inverse")
DAMPING = 0.01  # of the decompositions, in mean eigenvalues


T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What the command line says.

    Attributes:
        device: "cuda" or "cpu".
        seconds: Of rounds, for each table.
        limit: Seconds after which no further measurement begins.
        batch: Examples per step, or None for a part's own.
        solvers: Of K-FAC.
        seed: Of weights and data.
        smoke: Tiny sizes.
        stem: Result files without their ending.
    """

    device: str
    seconds: float
    limit: float
    batch: int | None
    solvers: Sequence[str]
    seed: int
    smoke: bool
    stem: Path

    def in_time(self, names: Iterable[T]) -> Iterator[T]:
        """Yield ``names`` until the time is up."""
        end = time.perf_counter() + self.limit
        for name in names:
            if time.perf_counter() > end:
                print(f"{name}: left out, --limit {self.limit:g} seconds have passed")
            else:
                yield name


Result = tuple[dict[str, Any], str]  # for JSON, and as text: all there is so far


# Steps of large models -----------------------------------------------------------------------------------------------


def installed(package: str) -> bool:
    """Say whether a package can be imported (one built for another torch cannot)."""
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError):
        return False
    return True


def resnet(depth: int) -> Work:
    """ImageNet's ResNet with 32 images, as many as each GPU has in the paper."""
    if installed("torchvision"):
        models = importlib.import_module("torchvision.models")
        return images(f"ResNet-{depth} of torchvision", getattr(models, f"resnet{depth}"), 32, 224, 1000)
    return images(f"ResNet-{depth}", partial(BottleneckResNet, BLOCKS[f"ResNet-{depth}"]), 32, 224, 1000)


def bert(batch: int, positions: int) -> Work:
    """BERT-Large with a prediction at every position."""
    if installed("transformers"):
        return tokens("BERT-Large of transformers", hugging_bert, batch, positions, WORDS)
    return tokens("BERT-Large", BERT_LARGE, batch, positions, WORDS)


def hugging_bert() -> nn.Module:
    """BERT-Large as the package transformers has it."""
    package = importlib.import_module("transformers")
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return package.BertForMaskedLM(package.BertConfig(vocab_size=WORDS, **shape))


class Detector(nn.Module):
    """torchvision's Mask R-CNN, trained on noise with the same eight boxes in each image; its output is the loss."""

    def __init__(self, side: int, regions: int, classes: int = 91, boxes: int = 8) -> None:
        super().__init__()
        detection = importlib.import_module("torchvision.models.detection")
        self.detector = detection.maskrcnn_resnet50_fpn(
            weights=None,
            weights_backbone=None,
            num_classes=classes,
            min_size=side,
            max_size=side,
            box_batch_size_per_image=regions,
        )
        random = torch.Generator().manual_seed(0)
        corners = torch.rand(boxes, 2, generator=random) * side / 2
        sizes = side / 8 + torch.rand(boxes, 2, generator=random) * side / 4
        self.register_buffer("boxes", torch.cat([corners, corners + sizes], 1))
        self.register_buffer("labels", torch.randint(1, classes, (boxes,), generator=random))
        self.register_buffer("masks", torch.ones(boxes, side, side, dtype=torch.uint8))

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images ``[n, 3, side, side]`` to the sum of the losses."""
        target = {"boxes": self.boxes, "labels": self.labels, "masks": self.masks}
        losses = self.detector(list(pixels), [target] * len(pixels))
        return sum(losses.values(), torch.zeros((), device=pixels.device))


class Detection(Work):
    """A model that returns its loss."""

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        """The output itself."""
        return output


def mask_rcnn(side: int, batch: int, regions: int, **options: Any) -> Work:
    """Mask R-CNN with K-FAC on its box and mask heads; the box head's loss is a mean over ``regions`` per image."""
    kfac = {"skip_layers": [r"\bbackbone\b", r"\brpn\b"], "loss_terms": batch * regions, **options}
    make = partial(Detector, side, regions)
    return Detection(make, (3, side, side), batch, 91, label="Mask R-CNN, heads", kfac=kfac)


SMALL_RESNET = images("small ResNet", partial(StagedResNet, (1, 1), 10, 4, block=Bottleneck), 2, 32, 10)
SMALL_BERT = tokens("small BERT", partial(Encoder, 1, 16, 2, 64, 16), 2, 16, 64)
SMALL_MASK_RCNN = mask_rcnn(64, 1, 16, max_factor_dim=256)


@dataclass(frozen=True)
class Steps:
    """A part that measures the steps of one model.

    Attributes:
        work: Makes it.
        small: Takes its place under ``--smoke``.
        optimizer: Of kfac_optim.
        dtypes: A table for each.
        needs: Package without which there is nothing to measure.
    """

    work: Callable[[], Work]
    small: Work
    optimizer: str = "KFACSGD"
    dtypes: Sequence[str] = ("float32", "bf16")
    needs: str | None = None

    def __call__(self, job: Job) -> Iterator[Result]:
        """Measure with every solver."""
        if self.needs and not installed(self.needs):
            yield {"missing": self.needs}, f"nothing measured: the package {self.needs} is not installed\n"
            return
        work = self.small if job.smoke else self.work()
        if job.batch:
            work = replace(work, batch=job.batch)
        chosen = timing.contenders(work, self.optimizer, job.solvers)
        results: list[dict[str, Any]] = []
        for dtype in job.in_time(self.dtypes):
            place = timing.Place(job.device, dtype, seed=job.seed)
            results.append(timing.measure(work, chosen, SCHEDULES, place, job.seconds))
            yield {"results": results}, "\n".join(map(timing.summary, results))
        timing.draw(results, job.stem.with_suffix(".png"))


# Decompositions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A way to decompose factors.

    Attributes:
        name: Of the table.
        solver: That applies the result.
        decompose: From factors ``[p, n, n]``, what the solver adds to their diagonals ``[p]``, and the eigenbases of
            the factors as they were at the last refresh ``[p, n, n]``, in ascending order.
        products: The method multiplies matrices, so that the precision of products matters to it.
    """

    name: str
    solver: Solver
    decompose: Callable[[Tensor, Tensor, Tensor], Decomposition]
    products: bool = False


def one_by_one(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """Eigendecompositions in separate calls."""
    parts = [EigenSolver().decompose(factor[None], shift) for factor in factors]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def batched(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """Eigendecompositions in one call."""
    return EigenSolver().decompose(factors, shift)


def old_basis(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """No new basis, only ``diag(Q^T F Q)``: what a refresh has to be better than."""
    return (basis * (factors @ basis)).sum(-2).float().clamp(min=0), basis


def qr_refresh(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """One step of orthogonal iteration from the last basis, ``Q' = qr(F Q)``, with ``diag(Q'^T F Q')`` (as in SOAP).

    As ``EigenSolver(refresh="qr")`` takes it, but with products in any precision and no look at the residual. The
    largest eigenvalues must come first: each column is cleared of those before it, and only of those.
    """
    q, _ = torch.linalg.qr((factors @ basis.flip(-1)).float())
    return old_basis(factors, shift, q)


def cholesky(factors: Tensor, shift: Tensor, basis: Tensor) -> Decomposition:
    """Inverses."""
    return InverseSolver().decompose(factors, shift)


METHODS = (
    Method("eigh, one by one", EigenSolver(), one_by_one),
    Method("eigh, batched", EigenSolver(), batched),
    Method("old basis", EigenSolver(), old_basis, products=True),
    Method("QR refresh", EigenSolver(), qr_refresh, products=True),
    Method("Cholesky inverse", InverseSolver(), cholesky),
)
SIZES = (64, 256, 576, 1024, 1152, 2048, 2304, 4096, 4608)  # of the factors of the models above
ENTRIES = 2**26  # at most this many numbers in the factors of one call


@contextmanager
def precision(products: str, device: str) -> Iterator[None]:
    """Matrix products in "fp32", "TF32" or "bf16"; what goes in and the other operators stay float32."""
    with full_precision(device):
        torch.set_float32_matmul_precision("high" if products == "TF32" else "highest")
        with torch.autocast(device, torch.bfloat16, enabled=products == "bf16"):
            yield


def drifted(n: int, pairs: int, job: Job) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors ``[pairs, n, n]`` at a refresh and ten statistics steps later, and a gradient of their kind.

    The ``2 n`` rows of a batch come from one distribution, whose standard deviations fall like ``k^-0.5``: the factors
    drift by its sampling noise, with ``factor_decay=0.95``. The gradient is a sum of products of rows.
    """
    random = torch.Generator(job.device).manual_seed(job.seed)
    noise = partial(torch.randn, device=job.device, generator=random)
    deviations = torch.arange(1, n + 1, device=job.device) ** -0.5
    mixing = torch.linalg.qr(noise(pairs, n, n)).Q
    first, second = (noise(pairs, 2 * n, n) * deviations @ mixing for _ in range(2))
    before, new, gradient = ((x.mT @ y) / (2 * n) for x, y in ((first, first), (second, second), (first, second)))
    return before, torch.lerp(new, before, 0.95**10), gradient


def seconds_of(work: Callable[[], object], job: Job) -> float:
    """Return the median seconds of a call, of three at least and of as many as a second holds."""
    place = timing.Place(job.device)
    seconds: list[float] = []
    work()  # libraries set up their handles at the first call
    while len(seconds) < 3 or (sum(seconds) < 1 and not job.smoke):
        begin = place.now()
        work()
        seconds.append(place.now() - begin)
    return statistics.median(seconds)


def compare_methods(n: int, pairs: int, job: Job) -> Iterator[dict[str, Any]]:
    """Yield seconds and error of each method on ``pairs`` factors of size ``n``.

    The error is that of the preconditioned gradient, against the same solver in float64.
    """
    before, factors, gradient = drifted(n, pairs, job)
    basis = torch.linalg.eigh(before).eigenvectors
    means = factors.diagonal(dim1=-2, dim2=-1).mean(-1)
    gamma = DAMPING * means**2
    exact: dict[Solver, Tensor] = {}
    for method in METHODS:
        solver = method.solver
        shift, _ = solver.shifts(gamma, means, means)
        if solver not in exact:
            wide = solver.decompose(factors.double(), shift.double())
            exact[solver] = solver.precondition(gradient.double(), wide, wide, gamma.double())
        for products in ("fp32", "TF32", "bf16") if job.device == "cuda" else ("fp32", "bf16"):
            with precision(products, job.device):
                if products == "fp32" or method.products:
                    decompose = partial(method.decompose, factors, shift, basis)
                    seconds, found = seconds_of(decompose, job), decompose()
                apply = partial(solver.precondition, gradient, found, found, gamma)
                applying, direction = seconds_of(apply, job), apply()
            error = (direction.double() - exact[solver]).norm() / exact[solver].norm()
            row = {"method": method.name, "size": n, "factors": pairs, "products": products}
            times = {"ms per factor": 1e3 * seconds / pairs, "ms to apply": 1e3 * applying / pairs}
            yield {**row, **times, "error": float(error)}


def decompositions(job: Job) -> Iterator[Result]:
    """Every method at every size."""
    torch.set_num_threads(1)  # of the CPU
    rows: list[dict[str, Any]] = []
    for n in job.in_time((8, 16) if job.smoke else SIZES):
        rows += compare_methods(n, max(1, min(16, ENTRIES // n**2)), job)
        note = f"error: of a preconditioned gradient against float64, damping {DAMPING:g} mean eigenvalues"
        yield {"damping": DAMPING, "rows": rows}, table("Decompositions by method, size and products", rows, note)
    draw_decompositions(rows, job.stem.with_suffix(".png"))


def draw_decompositions(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the plot: milliseconds and errors over the size."""
    figure, axes = grid(1, 2, "Decompositions of factors")
    colours = {method.name: f"C{index}" for index, method in enumerate(METHODS)}
    for method, products in dict.fromkeys((row["method"], row["products"]) for row in rows):
        own = [row for row in rows if (row["method"], row["products"]) == (method, products)]
        style = {"color": colours[method], "linestyle": {"fp32": "-", "TF32": "--", "bf16": ":"}[products]}
        sizes, label = [row["size"] for row in own], f"{method}, {products}"
        for panel, key in zip(axes[0], ("ms per factor", "error"), strict=True):
            panel.plot(sizes, [row[key] for row in own], ".", label=label, **style)
            panel.set(xscale="log", yscale="log", xlabel="size", ylabel=key)
            panel.grid(alpha=0.25, which="both")
    axes[0][1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110)


# Seconds to a loss ---------------------------------------------------------------------------------------------------

# Label: optimizer, recipe, settings. kfac-pytorch has the intervals that the paper's mode has on this task.
CONTENDERS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "KFACSGD practical": ("KFACSGD", "practical", {}),
    "KFACSGD paper": ("KFACSGD", "paper", {}),
    "AdamW": ("AdamW", None, {}),
    **{
        f"kfac-pytorch damping {damping:g} + SGD": (
            "KFACPyTorch",
            None,
            {"lr": 0.1, "options": {"factor_update_steps": 1, "inv_update_steps": 10, "damping": damping}},
        )
        for damping in (0.1, 0.03, 0.01)
    },
}


def curves(job: Job) -> Iterator[Result]:
    """Train everyone on CURVES, and see when they reach the target."""
    task = TASKS["curves"]()
    more = {"device": job.device, "seed": job.seed, "eval_every": 20, "steps": 2 if job.smoke else 600}
    records: dict[str, Record] = {}
    for label in job.in_time(CONTENDERS):
        name, recipe, own = CONTENDERS[label]
        settings = resolve(task, name, is_kfac=is_kfac(name), recipe=recipe, given={**more, **own})
        try:
            trainer = Trainer(task, settings)
        except ValueError as error:
            print(f"{label} left out: {error}")
            continue
        record = records[label] = Record(trainer.header())
        for line in tqdm(trainer.lines(), desc=label, unit="line", mininterval=5):
            record.add(line)
        record.end = trainer.ended
        found = {"target": task.target, "records": {label: asdict(each) for label, each in records.items()}}
        yield found, runs_summary.table(task, records) + "\n"
    plots.draw(task, records, job.stem.with_suffix(".png"))


# The command ---------------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Job], Iterator[Result]]] = {
    **{f"resnet{depth}": Steps(partial(resnet, depth), SMALL_RESNET) for depth in (50, 101, 152)},
    "bert-phase1": Steps(partial(bert, 32, 128), SMALL_BERT, "KFACLAMB", ("bf16", "float32")),
    "bert-phase2": Steps(partial(bert, 8, 512), SMALL_BERT, "KFACLAMB", ("bf16", "float32")),
    "mask-rcnn": Steps(partial(mask_rcnn, 800, 2, 512), SMALL_MASK_RCNN, dtypes=("float32",), needs="torchvision"),
    "decompositions": decompositions,
    "curves": curves,
}


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = command.add_argument
    add("--part", choices=PARTS, help="what to measure")
    add("--list", action="store_true", help="print the names of the parts and end")
    add("--seconds", type=float, default=60, metavar="S", help="of rounds, for each table (default: 60)")
    add("--limit", type=float, default=300, metavar="S", help="no measurement begins after these (default: 300)")
    add("--batch", type=int, metavar="N", help="examples per step (default: the part's own)")
    add("--solver", action="append", choices=SOLVERS, help="may be repeated (default: both)")
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add("--smoke", action="store_true", help="tiny sizes, to see that everything runs; no result")
    add("--out", type=Path, metavar="FOLDER", help=f"of the result files (default: {RESULTS}; with --smoke: {SMOKE})")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = parser()
    options = command.parse_args(arguments)
    if options.list:
        print("\n".join(PARTS))
        return 0
    if not options.part:
        command.error("--part NAME is missing; --list names them")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.smoke and options.part != "decompositions":
        command.error("this torch sees no CUDA device; --smoke and --part decompositions run on the CPU")
    folder = options.out or (SMOKE if options.smoke else RESULTS)
    stem = f"{'gpu' if device == 'cuda' or options.smoke else 'cpu'}-{options.part}"
    folder.mkdir(parents=True, exist_ok=True)
    seconds = 0 if options.smoke else options.seconds
    solvers = options.solver or SOLVERS
    job = Job(device, seconds, options.limit, options.batch, solvers, options.seed, options.smoke, folder / stem)
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Facts before the runs: the code that they use, whatever the checkout becomes meanwhile.
    found = {"command": " ".join(["python -m benchmarks.gpu", *words]), **facts()}
    tables = ""
    for result, tables in PARTS[options.part](job):
        save(folder, stem, {**found, "seed": job.seed, **result}, tables)
    print(tables)
    print(f"written: {job.stem}.json, .txt, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
