"""The paper's clusters and figures, and the scaling model beside them.

Figures 7 to 9 of the paper are plots without numbers; what is compared are the numbers of its Table 5 and of its text
(sections 6.3.4 and 6.4). Public figures of the machines:

    Longhorn     nodes of 4 V100 (15.7 TFLOP/s fp32, 900 GB/s, NVLink 75 GB/s), EDR InfiniBand 12.5 GB/s per node
    ThetaGPU     nodes of 8 A100 (156 TFLOP/s TF32, 1555 GB/s, NVLink 300 GB/s), 8 x HDR InfiniBand 200 GB/s per node

Assumed: products reach 90 % of the fp32 peak on V100 and half of the TF32 peak on A100 (which PyTorch 1.9 uses by
default), memory and networks 80 % of theirs, 5 us per kernel, 6 us per hop.

Fitted, and therefore no prediction:

    V100    seconds per flop of training, and a constant per step at 64 GPUs         Table 5, row SGD (3 numbers)
            exponent of that constant's growth with the number of GPUs               SGD's scaling efficiency, 68.6 %
            seconds of an eigendecomposition, c n^3                                   Table 5, ResNet-50, 100 less 500
    A100    seconds per flop of training                                              111,059 s for 7038 steps
            seconds of an eigendecomposition, c n^3                                   a refresh takes 25 s on 16 GPUs

Everything else about K-FAC is computed from these. Two choices were made with the paper's figures in sight, so that
the rows they touch are checks rather than blind predictions: that a broadcast of NCCL is a ring whose latency grows
with its members, at 6 us per hop (the factor 3.4 between broadcasts; K-FAC-lw on 256 GPUs), and that statistics of BERT
run in TF32 (in fp32 they alone would take longer than the 25 s).

The text does not say at how many GPUs the scaling efficiencies of ResNet hold, only that at 256 they are below 50 %;
they are read as 128 GPUs against 16.

What the model misses: on 64 V100 the paper's K-FAC step grows faster from ResNet-50 to -101 and -152 (1.18, 1.32, 1.47
of SGD's) than the work in it does, for which the text gives no reason; and of BERT's scaling efficiency only the part
of K-FAC and of the gradients' all-reduce is modelled, not how Fused-LAMB itself scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from scipy.optimize import brentq

from benchmarks.common.models import BottleneckResNet, ResNet
from benchmarks.common.works import BERT_BASE, BERT_LARGE, Schedule
from benchmarks.scaling.cluster import (
    KFAC_PYTORCH,
    OURS,
    PAPER,
    Device,
    Exchange,
    Network,
    Prediction,
    all_reduce_seconds,
    buckets,
    predict,
)
from benchmarks.scaling.workload import FLOAT, Workload, workload
from kfac_optim.distributed import KAISA, AssignmentStrategy, FactorWise, LayerWise

# The paper's numbers -------------------------------------------------------------------------------------------------

BLOCKS = {"ResNet-50": (3, 4, 6, 3), "ResNet-101": (3, 4, 23, 3), "ResNet-152": (3, 8, 36, 3)}
IMAGES = 1_281_167
EPOCHS = {"SGD": 90, "K-FAC": 55}
# Table 5: minutes of training on 64 V100, batch 32 each, by interval between decompositions.
MINUTES = {
    "ResNet-50": {"SGD": 178, 100: 152, 500: 128, 1000: 124},
    "ResNet-101": {"SGD": 244, 100: 227, 500: 197, 1000: 195},
    "ResNet-152": {"SGD": 345, 100: 369, 500: 310, 1000: 300},
}
# Section 6.4.1: interval between decompositions by number of GPUs; statistics are taken ten times as often (5.3).
INTERVALS = {16: 2000, 32: 1000, 64: 500, 128: 250, 256: 125}
SGD_EFFICIENCY = 0.686
BERT_STEPS = {"Fused-LAMB": (7038, 1563), "K-FAC": (5000, 1400)}
BERT_SECONDS = 111_059
BERT_REFRESH = 25.0

BATCH = 32
GRID = (16, 32, 64, 128, 256)
BERT_GRID = (8, 16, 32, 64, 128)
Rows = list[dict[str, Any]]

LONGHORN = Network(ranks_per_node=4, node_bandwidth=0.8 * 12.5e9, rank_bandwidth=0.8 * 75e9, latency=6e-6)
THETA = Network(ranks_per_node=8, node_bandwidth=0.8 * 200e9, rank_bandwidth=0.8 * 300e9, latency=6e-6)
V100 = Device("V100", 0.9 * 15.7e12, 8e12, 0.8 * 900e9, 5e-6, (0.0, 0.0, 3e-11))
A100 = Device("A100", 0.5 * 156e12, 60e12, 0.8 * 1555e9, 5e-6, (0.0, 0.0, 3e-11))

# The paper preconditions Linear and Conv2d; of BERT neither embeddings nor the head of the language model.
NO_NORMS = ("norm", r"shortcut\.1")
NO_HEAD = ("norm", "symbol", "position", "head", "transform")


@lru_cache(None)
def resnet(name: str) -> Workload:
    """ResNet-50, -101 or -152 with the paper's local batch of 32 images."""
    return workload(name, partial(BottleneckResNet, BLOCKS[name]), (3, 224, 224), BATCH, skip_layers=NO_NORMS)


@lru_cache(None)
def bert(name: str, positions: int, batch: int) -> Workload:
    """BERT-Base or BERT-Large."""
    make = {"BERT-Base": BERT_BASE, "BERT-Large": BERT_LARGE}[name]
    return workload(name, make, (positions,), batch, tokens=True, skip_layers=NO_HEAD)


@lru_cache(None)
def cifar_resnet() -> Workload:
    """ResNet-32 on 128 images of 32 x 32."""
    return workload("ResNet-32", partial(ResNet, 3, 5), (3, 32, 32), 128, skip_layers=NO_NORMS)


# The clusters, fitted ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Device, network, and what a training step costs without K-FAC."""

    device: Device  # What a rank computes with
    network: Network  # What ranks talk over
    constant: float = 0.0  # Seconds per step beside the passes, at 64 ranks
    growth: float = 0.0  # Exponent with which ``constant`` grows with the number of ranks

    def step(self, work: Workload, ranks: int, micro_batches: float = 1.0) -> float:
        """Seconds of a step without K-FAC: three forward passes' worth of flops, and the constant."""
        passes = micro_batches * 3 * work.forward.flops / self.device.training_flops
        return passes + self.constant * (ranks / 64) ** self.growth

    def kfac(
        self,
        work: Workload,
        ranks: int,
        strategy: AssignmentStrategy,
        schedule: Schedule,
        exchange: Exchange = PAPER,
    ) -> Prediction:
        """What K-FAC adds."""
        return predict(work, ranks, strategy, self.device, self.network, schedule, exchange)


def table_step(model: str, interval: int | str) -> float:
    """Seconds of a step on 64 GPUs, from the minutes of Table 5."""
    epochs = EPOCHS["SGD" if interval == "SGD" else "K-FAC"]
    return 60 * MINUTES[model][interval] / (epochs * IMAGES / (BATCH * 64))


def every(interval: int) -> Schedule:
    """The paper's schedule: statistics ten times as often as decompositions."""
    return Schedule(max(1, interval // 10), interval)


def fit_longhorn() -> Cluster:
    """The four constants of the V100 cluster; see the module's docstring."""
    flops = np.array([3 * resnet(name).forward.flops for name in MINUTES])
    seconds = np.array([table_step(name, "SGD") for name in MINUTES])
    (slope, constant), *_ = np.linalg.lstsq(np.stack([flops, np.ones(3)], 1), seconds, rcond=None)
    passes = slope * flops[0]

    def efficiency(growth: float) -> float:
        return (passes + constant * (16 / 64) ** growth) / (passes + constant * (128 / 64) ** growth)

    growth = brentq(lambda x: SGD_EFFICIENCY - efficiency(x), 0.0, 2.0)
    start = Cluster(replace(V100, training_flops=1 / slope), LONGHORN, float(constant), growth)
    wanted = table_step("ResNet-50", 100) - table_step("ResNet-50", 500)

    def excess(c: float) -> float:
        short, long = (with_eigh(start, c).kfac(resnet("ResNet-50"), 64, FactorWise(), every(n)) for n in (100, 500))
        return short.overhead - long.overhead - wanted

    return with_eigh(start, brentq(excess, 0.0, 1e-9, xtol=1e-20))


def fit_theta() -> Cluster:
    """The two constants of the A100 cluster; see the module's docstring."""
    work = bert("BERT-Large", 128, 90)
    micro_batches = round(65536 / 16 / 90)

    def kfac(c: float) -> Prediction:
        return with_eigh(Cluster(A100, THETA), c).kfac(work, 16, FactorWise(), Schedule(50, 50, micro_batches))

    c = brentq(lambda c: kfac(c).refresh - BERT_REFRESH, 0.0, 1e-8, xtol=1e-20)
    passes = BERT_SECONDS / BERT_STEPS["Fused-LAMB"][0] - kfac(c).overhead
    training_flops = micro_batches * 3 * work.forward.flops / passes
    return with_eigh(Cluster(replace(A100, training_flops=training_flops), THETA), c)


def with_eigh(found: Cluster, c: float) -> Cluster:
    """The same cluster with eigendecompositions of ``c n^3`` seconds."""
    return replace(found, device=replace(found.device, eigh=(0.0, 0.0, c)))


# Side by side --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One number of the paper beside the model's."""

    what: str  # In words
    paper: str  # As printed; a range as text
    model: str  # The model's
    fitted: bool = False  # The model was fitted to it: no prediction


def compare_longhorn(found: Cluster, hours: Rows) -> list[Compared]:
    """Table 5 and section 6.4.1, the latter from :func:`time_to_solution`."""
    rows = []
    for model in MINUTES:
        base = found.step(resnet(model), 64)
        rows.append(Compared(f"{model}, 64 V100: SGD step", ms(table_step(model, "SGD")), ms(base), True))
        for interval in (100, 500, 1000):
            ratio = table_step(model, interval) / table_step(model, "SGD")
            added = found.kfac(resnet(model), 64, FactorWise(), every(interval)).overhead
            what = f"{model}, 64 V100: K-FAC-opt every {interval // 10}/{interval}, step over SGD's"
            rows.append(Compared(what, f"{ratio:.2f}", f"{1 + added / base:.2f}"))
    short, long = (found.kfac(resnet("ResNet-50"), 64, FactorWise(), every(n)).overhead for n in (100, 500))
    printed = table_step("ResNet-50", 100) - table_step("ResNet-50", 500)
    what = "ResNet-50, 64 V100: step every 10/100 less step every 50/500"
    rows.append(Compared(what, ms(printed), ms(short - long), True))
    opt, layered = (found.kfac(resnet("ResNet-50"), 64, s, every(500)) for s in (FactorWise(), LayerWise()))
    longer = opt.events["decomposition communication"] / layered.events["gradient communication"]
    what = "ResNet-50, 64 V100: broadcast of decompositions over broadcast of gradients"
    rows.append(Compared(what, "3.4", f"{longer:.1f}"))
    same = ("factor computation", "factor communication", "decomposition", "scaling")
    worst = max(abs(opt.events[name] / layered.events[name] - 1) for name in same)
    rows.append(Compared("stages without a difference between opt and lw, within", "2 %", percent(worst)))
    fifty = {row["GPUs"]: row for row in hours if row["model"] == "ResNet-50"}
    for label, (span, most) in {"opt": ("17.7 to 25.2 %", "18.3 %"), "lw": ("2.8 to 19.1 %", "2.8 %")}.items():
        gains = [1 - row[f"K-FAC-{label}"] / row["SGD"] for row in hours]
        what = f"ResNets, 16 to 256 V100: time to solution, K-FAC-{label} less than SGD by"
        rows.append(Compared(what, span, f"{100 * min(gains):.1f} to {percent(max(gains))}"))
        what = f"ResNet-50, 256 V100: K-FAC-{label} less than SGD by"
        rows.append(Compared(what, most, percent(1 - fifty[256][f"K-FAC-{label}"] / fifty[256]["SGD"])))

    def efficiency(name: str, ranks: int) -> float:
        return fifty[16][name] * 16 / (fifty[ranks][name] * ranks)

    for name, paper in {"SGD": "68.6 %", "K-FAC-opt": "71.8 %", "K-FAC-lw": "62.4 %"}.items():
        what = f"ResNet-50, scaling efficiency of {name} (read as 128 against 16)"
        rows.append(Compared(what, paper, percent(efficiency(name, 128)), name == "SGD"))
    worst = max(efficiency(name, 256) for name in ("K-FAC-opt", "K-FAC-lw"))
    rows.append(Compared("ResNet-50, scaling efficiency at 256 V100", "below 50 %", percent(worst)))
    return rows


def bert_seconds(found: Cluster, phase: int, ranks: int) -> dict[str, float]:
    """Seconds of a step of BERT-Large with a fixed local and global batch: Fused-LAMB, and K-FAC-opt on top."""
    positions, batch, total = ((128, 60, 65536), (512, 12, 32768))[phase - 1]
    work = bert("BERT-Large", positions, batch)
    micro_batches = total / ranks / batch
    sizes = buckets([FLOAT * work.parameters], 0)
    base = found.step(work, ranks, micro_batches) + all_reduce_seconds(sizes, ranks, found.device, found.network)
    schedule = Schedule(50, 50, max(1, round(micro_batches)))
    added = found.kfac(work, ranks, FactorWise(), schedule)
    return {"Fused-LAMB": base, "K-FAC": base + added.overhead}


def compare_theta(found: Cluster) -> list[Compared]:
    """Sections 6.3.4 and 6.4.3."""
    work, micro_batches = bert("BERT-Large", 128, 90), round(65536 / 16 / 90)
    kfac = found.kfac(work, 16, FactorWise(), Schedule(50, 50, micro_batches))
    steps = BERT_STEPS["Fused-LAMB"][0]
    total = steps * (found.step(work, 16, micro_batches) + kfac.overhead)
    rows = [
        Compared("BERT-Large, 16 A100: a refresh adds", "25 s", f"{kfac.refresh:.1f} s", True),
        Compared("BERT-Large, 16 A100: phase 1, 7038 steps", "111059 s", f"{total:.0f} s", True),
        Compared(
            "the same, interval 100 instead of 50, shorter by", "1.58 %", percent(steps * kfac.refresh * 0.01 / total)
        ),
    ]
    table = {(phase, ranks): bert_seconds(found, phase, ranks) for phase in (1, 2) for ranks in BERT_GRID}
    for phase, paper in {1: "78.9 %", 2: "78.3 %"}.items():
        value = table[phase, 8]["K-FAC"] * 8 / (table[phase, 128]["K-FAC"] * 128)
        rows.append(
            Compared(f"BERT-Large, phase {phase}: scaling efficiency, 128 A100 against 8", paper, percent(value))
        )
    gains = []
    for ranks in BERT_GRID:
        seconds = {
            name: sum(count * table[phase, ranks][name] for phase, count in zip((1, 2), counts, strict=True))
            for name, counts in BERT_STEPS.items()
        }
        gains.append(1 - seconds["K-FAC"] / seconds["Fused-LAMB"])
    model = f"{100 * min(gains):.1f} to {100 * max(gains):.1f} %"
    rows.append(Compared("BERT-Large, 8 to 128 A100: K-FAC less than Fused-LAMB by", "16.1 to 16.9 %", model))
    return rows


def strategies(ranks: int) -> dict[str, AssignmentStrategy]:
    """Layer-wise, KAISA's fractions, factor-wise."""
    fractions = [f for f in (1 / 16, 1 / 4, 1 / 2) if ranks * f > 1 and (ranks * f).is_integer()]
    named: dict[str, AssignmentStrategy] = {f"KAISA 1/{round(1 / f)}": KAISA(grad_worker_fraction=f) for f in fractions}
    return {"layer-wise": LayerWise(), **named, "factor-wise": FactorWise()}


def ms(seconds: float) -> str:
    """Milliseconds as text."""
    return f"{1e3 * seconds:.1f} ms"


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f} %"


# Results -------------------------------------------------------------------------------------------------------------

BEFORE = "kfac-pytorch's way"


def time_to_solution(found: Cluster) -> Rows:
    """Figure 8: hours to the baseline's accuracy, by model and number of GPUs."""
    rows: Rows = []
    for model in BLOCKS:
        for ranks in GRID:
            row: dict[str, Any] = {"model": model, "GPUs": ranks}
            steps = IMAGES / (BATCH * ranks) / 3600
            base = found.step(resnet(model), ranks)
            row["SGD"] = EPOCHS["SGD"] * steps * base
            named: dict[str, tuple[AssignmentStrategy, Exchange]] = {
                "K-FAC-lw": (LayerWise(), PAPER),
                "K-FAC-opt": (FactorWise(), PAPER),
            }
            named |= {f"ours, {label}": (strategy, OURS) for label, strategy in strategies(ranks).items()}
            for label, (strategy, exchange) in named.items():
                added = found.kfac(resnet(model), ranks, strategy, every(INTERVALS[ranks]), exchange).overhead
                row[label] = EPOCHS["K-FAC"] * steps * (base + added)
            rows.append(row)
    return rows


def traffic(works: Sequence[Workload]) -> Rows:
    """Bytes sent per step and rank, mean over 4 ranks, every 10/100, beside kfac-pytorch's."""
    rows: Rows = []
    half = replace(OURS, factor_bytes=2)
    for work in works:
        for label, strategy in strategies(4).items():
            before = _sent(work, strategy, KFAC_PYTORCH)
            for name, exchange in {"ours": OURS, "ours, comm_dtype=bfloat16": half, BEFORE: KFAC_PYTORCH}.items():
                sent = _sent(work, strategy, exchange)
                shares = {
                    "total": sum(sent.values()),
                    "factors, share": sent["factors"] / before["factors"],
                    "total, share": sum(sent.values()) / sum(before.values()),
                }
                rows.append({"model": work.name, "strategy": label, "implementation": name, **sent, **shares})
    return rows


def _sent(work: Workload, strategy: AssignmentStrategy, exchange: Exchange) -> dict[str, float]:
    made = predict(work, 4, strategy, V100, LONGHORN, Schedule(10, 100), exchange)
    return {kind: float(sent.mean()) for kind, sent in made.sent.items()}
