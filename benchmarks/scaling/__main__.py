r"""Scaling of distributed K-FAC: measured on real ranks, predicted for clusters.

``python -m benchmarks.scaling --part NAME`` (from the repository root) does one part, prints its tables and writes them
to ``benchmarks/results/`` as text, drawings and JSON with settings, seeds, versions and machine. Parts:

    measure     weak scaling on real Gloo ranks here: each strategy, milliseconds of every stage, bytes sent
    validate    fits the model of ``benchmarks/cluster.py`` to some of the measured runs and predicts the others
    predict     the paper's clusters beside its figures (``benchmarks/paper_figures.py``); bytes, memory and balance of
                every strategy; up to 4,096 GPUs

Without torchrun ``measure`` starts its own ranks on this machine. Under torchrun it uses the ranks it is given, and
writes ``scaling-measure-RANKS.json``. One machine, four ranks:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=4 -m benchmarks.scaling --part measure

A Slurm cluster, two nodes of four GPUs (``--device cuda`` takes NCCL; leave it away for Gloo on CPUs):

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=32 --time=00:30:00
    export OMP_NUM_THREADS=8
    srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d \\
        --rdzv_endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500 \\
        -m benchmarks.scaling --part measure --device cuda

A compute stage is measured on its slowest rank, a stage of communication on the rank that waits least in it: it is the
last to arrive and waits for nobody. Fitted to some of the models are launch, flops, bytes and bookkeeping of one rank,
an eigendecomposition's ``a + b n^2 + c n^3``, the cores that ranks share, latency and bandwidth, and one correction per
stage; the other models, larger ones, are predicted.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from benchmarks.common.models import ResNet, Transformer, autoencoder
from benchmarks.common.reports import RESULTS, SMOKE, table, write
from benchmarks.common.runs import facts
from benchmarks.common.works import Work as Noise
from benchmarks.scaling import paper as paper_figures
from benchmarks.scaling import plots as scaling_plots
from benchmarks.scaling.cluster import (
    FOLD,
    KINDS,
    STAGES,
    Device,
    Network,
    Schedule,
    Work,
    Workload,
    intervals,
    predict,
    total,
    workload,
)
from kfac_optim import KFACSGD
from kfac_optim.distributed import KAISA, AssignmentStrategy, FactorWise, LayerWise
from kfac_optim.solvers import Decomposition, EigenSolver

COMMUNICATION = tuple(name for name in STAGES if name.endswith("communication"))
SCHEDULE = Schedule(statistics=2, decompositions=4)
NO_NORMS = ("norm",)


# What is measured ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject(Noise):
    """A model on noise.

    Attributes:
        fitted: The model of the costs is fitted to its runs.
    """

    fitted: bool = False

    def workload(self, name: str) -> Workload:
        """The model as the cost model sees it."""
        return workload(name, self.make, self.example, self.batch, tokens=bool(self.symbols), skip_layers=NO_NORMS)


SUBJECTS = {
    "ResNet-14, 32 images": Subject(partial(ResNet, 3, 2), (3, 32, 32), 32, 10, fitted=True),
    "autoencoder, 250 images": Subject(autoencoder, (784,), 250, 0, fitted=True),
    "2-layer transformer, d=128": Subject(Transformer, (128,), 8, 256, 256, fitted=True),
    "ResNet-32, 32 images": Subject(partial(ResNet, 3, 5), (3, 32, 32), 32, 10),
    "4-layer transformer, d=256": Subject(partial(Transformer, layers=4, width=256, heads=8), (128,), 4, 256, 256),
}
SMALL = {"ResNet-8, 8 images": replace(SUBJECTS["ResNet-14, 32 images"], make=partial(ResNet, 3, 1, 10, 8), batch=8)}

STRATEGIES: dict[str, AssignmentStrategy | None] = {
    "SGD": None,
    "layer-wise": LayerWise(),
    "KAISA 1/2": KAISA(grad_worker_fraction=0.5),
    "factor-wise": FactorWise(),
}


def strategies_on(ranks: int) -> list[str]:
    """The strategies that differ on so many ranks."""
    return {1: ["SGD", "factor-wise"], 2: ["SGD", "layer-wise", "factor-wise"]}.get(ranks, list(STRATEGIES))


@dataclass
class Timed:
    """The eigen solver, with a note of dimension, pairs and seconds of each decomposition."""

    solver: EigenSolver = field(default_factory=EigenSolver)
    notes: list[tuple[int, int, float]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "solver"), name)

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """See :class:`kfac_optim.solvers.Solver`."""
        start = time.perf_counter()
        result = self.solver.decompose(factor, shift)
        if factor.dim() == 3:
            self.notes.append((factor.shape[-1], factor.shape[0], time.perf_counter() - start))
        return result

    def __repr__(self) -> str:
        return repr(self.solver)  # ranks compare it


# One rank ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Everything that the ranks do together."""

    subjects: Mapping[str, Subject]
    periods: int
    device: str
    seed: int = 0
    schedule: Schedule = SCHEDULE


def measure_here(job: Job, progress: Callable[[], object]) -> list[dict[str, Any]]:
    """Measure every subject with every strategy on the ranks of the default group; the rows are complete on rank 0."""
    ranks = dist.get_world_size()
    rows = []
    for (name, subject), strategy in itertools.product(job.subjects.items(), strategies_on(ranks)):
        own = run(subject, STRATEGIES[strategy], job)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, own)
        rows.append(
            {"model": name, "strategy": strategy, "ranks": ranks, "fitted": subject.fitted, **combined(everyone)}
        )
        progress()
    return rows


def combined(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of what all ranks measured: of each stage the rank that counts, and the median over the periods."""
    events = {}
    for name in STAGES:
        periods = zip(*([period.get(name, 0.0) for period in rank["events"]] for rank in ranks), strict=True)
        events[name] = statistics.median(min(each) if name in COMMUNICATION else max(each) for each in periods)
    return {
        "step": statistics.median(map(max, zip(*(rank["steps"] for rank in ranks), strict=True))),
        "events": events,
        # Cores that other processes kept busy meanwhile; not known if the ranks are on several machines.
        "others": max(0.0, ranks[0]["cpu"]["machine"] - sum(rank["cpu"]["own"] for rank in ranks)),
        "by_rank": [rank["events"] for rank in ranks],
        "sent": {kind: [rank["sent"].get(kind, 0.0) for rank in ranks] for kind in KINDS},
        "received": {kind: [rank["received"].get(kind, 0.0) for rank in ranks] for kind in KINDS},
        "memory": [rank["memory"] for rank in ranks],
        "decompositions": ranks[0]["decompositions"],
    }


def run(subject: Subject, strategy: AssignmentStrategy | None, job: Job) -> dict[str, Any]:
    """Train a few steps on this rank.

    The first period of the schedule, in which memory is allocated and groups are made, is not timed.

    Returns:
        For each period the mean seconds of a step and of each stage each time it happens; bytes per step; bytes of
        memory; dimension, pairs and seconds of the decompositions.
    """
    torch.manual_seed(job.seed)
    device = torch.device(job.device)
    bare = subject.make().to(device)
    model = DistributedDataParallel(bare) if dist.get_world_size() > 1 else bare
    inputs, targets = (x.to(device) for x in subject.data(job.seed + dist.get_rank()))
    solver = Timed()
    optimizer: Any
    if strategy is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = KFACSGD(
            model,
            lr=1e-3,
            momentum=0.9,
            factor_update_steps=job.schedule.statistics,
            inv_update_steps=job.schedule.decompositions,
            spread=0,  # the model predicts refreshes as wholes
            skip_layers=NO_NORMS,
            solver=solver,
            assignment=strategy,
        )
    curvature = getattr(optimizer, "curvature", None)
    period = job.schedule.decompositions
    marks: list[dict[str, dict[str, float]]] = []
    for step in range(period * (1 + job.periods) + 1):
        if step >= period and step % period == 0:
            if not marks:
                dist.barrier()
                solver.notes.clear()
            marks.append(counters(curvature, device))
        if step == period * (1 + job.periods):
            break
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        optimizer.step()
    memory = curvature.memory_estimate()["total"] if curvature else 0
    if curvature:
        curvature.close()
    return {**periods(marks, job.schedule), "memory": memory, "decompositions": list(solver.notes)}


def periods(marks: Sequence[Mapping[str, Mapping[str, float]]], schedule: Schedule) -> dict[str, Any]:
    """What the counters at the ends of the periods say, as :func:`run` returns it."""
    every, period = intervals(schedule), schedule.decompositions
    changes = [change(old, new) for old, new in itertools.pairwise(marks)]
    whole, steps = change(marks[0], marks[-1]), period * len(changes)
    return {
        "steps": [each["seconds"]["step"] / period for each in changes],
        "cpu": {name: whole["seconds"][name] / whole["seconds"]["step"] for name in ("own", "machine")},
        "events": [
            {name: each["seconds"].get(name, 0.0) * every[name] / period for name in STAGES} for each in changes
        ],
        "sent": {kind: value / steps for kind, value in whole["sent"].items()},
        "received": {kind: value / steps for kind, value in whole["received"].items()},
    }


def busy() -> float:
    """CPU seconds that this machine has spent on anything since it started; 0 where that is not known."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
    except OSError:
        return 0.0
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def counters(curvature: Any, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds by stage, and bytes by kind, so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    now = {"step": time.perf_counter(), "own": time.process_time(), "machine": busy()}
    if curvature is None:
        return {"seconds": now, "sent": {}, "received": {}}
    traffic = curvature.comm.traffic
    return {
        "seconds": {**now, **{name: row["ms"] / 1e3 for name, row in curvature.profile().items()}},
        "sent": {kind: sides[0] for kind, sides in traffic.items()},
        "received": {kind: sides[1] for kind, sides in traffic.items()},
    }


def change(
    old: Mapping[str, Mapping[str, float]], new: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """What was added to the counters."""
    return {key: {name: new[key][name] - old[key].get(name, 0.0) for name in new[key]} for key in new}


# All ranks -----------------------------------------------------------------------------------------------------------


def spawned(rank: int, ranks: int, store: str, out: str, job: Job) -> None:
    """A rank that :func:`measure` has started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    count = len(job.subjects) * len(strategies_on(ranks))
    with tqdm(total=count, desc=f"{ranks} ranks", unit="run", disable=rank > 0, mininterval=1) as bar:
        rows = measure_here(job, bar.update)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measure(job: Job, worlds: Sequence[int]) -> list[dict[str, Any]]:
    """Start ranks on this machine, and measure."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in worlds:
            out = Path(folder, f"rows-{ranks}")
            arguments = (ranks, str(Path(folder, f"store-{ranks}")), str(out), job)
            spawn(spawned, arguments, nprocs=ranks)
            rows += json.loads(out.read_text())
    return rows


def measure_under_torchrun(job: Job) -> list[dict[str, Any]]:
    """Measure on the ranks that torchrun has started."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    ranks = dist.get_world_size()
    count = len(job.subjects) * len(strategies_on(ranks))
    with tqdm(total=count, desc=f"{ranks} ranks", unit="run", disable=dist.get_rank() > 0) as bar:
        return measure_here(job, bar.update)


def measured_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds by stage, and bytes."""
    times, sent = [], []
    plain = {(row["model"], row["ranks"]): row["step"] for row in rows if row["strategy"] == "SGD"}
    for row in rows:
        head = {"model": row["model"], "strategy": row["strategy"], "ranks": row["ranks"]}
        stages = {name.replace("communication", "comm."): 1e3 * row["events"][name] for name in STAGES}
        over = row["step"] / plain[row["model"], row["ranks"]]
        times.append({**head, "step, mean": 1e3 * row["step"], "over SGD's": over, "others": row["others"], **stages})
        if row["ranks"] > 1 and row["strategy"] != "SGD":
            sent.append({**head, **{kind: statistics.mean(row["sent"][kind]) for kind in KINDS}})
    tables = [
        table(
            "Milliseconds of a step, and of each stage each time it happens",
            times,
            "others: cores that other processes kept busy meanwhile; a run on a quiet machine has less than 0.1",
        )
    ]
    if sent:
        tables.append(table("Bytes sent per step, mean over the ranks", sent))
    return "\n".join(tables)


# The model against the measurements ----------------------------------------------------------------------------------


def nonnegative(columns: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Non-negative coefficients of the columns with the least squared relative error (all subsets are tried)."""
    weights = 1 / np.asarray(wanted)
    matrix, ones = np.stack([np.asarray(column) * weights for column in columns], 1), np.ones(len(wanted))
    best, error = np.zeros(len(columns)), float(len(wanted))
    for active in itertools.product((False, True), repeat=len(columns)):
        chosen = np.flatnonzero(active)
        if len(chosen):
            solution = np.linalg.lstsq(matrix[:, chosen], ones, rcond=None)[0]
            left = float(((matrix[:, chosen] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and left < error:
                best, error = np.zeros(len(columns)), left
                best[chosen] = solution
    return best.tolist()


def fit(rows: Sequence[Mapping[str, Any]], works: Mapping[str, Workload], cores: int) -> tuple[Device, Network]:
    """The constants of this machine, from the rows marked as fitted."""
    rows = [row for row in rows if row["fitted"] and row["strategy"] != "SGD"]
    alone = [row for row in rows if row["ranks"] == 1]
    device = fit_device(alone, works)
    together = [row for row in rows if row["ranks"] > 1]
    everyone = max(row["ranks"] for row in rows)
    network = Network(everyone, 1e12, 1e12, 0.0, pipelined=False)

    def error(candidate: float) -> float:
        shared = replace(device, cores=candidate)
        same = ("factor computation", "preconditioning")
        return sum(
            abs(np.log(events[name] / row["events"][name]))
            for row in together
            for events in (predicted(row, works, shared, network),)
            for name in same
        )

    if together:
        device = replace(device, cores=float(min((cores * share for share in np.linspace(0.5, 1, 26)), key=error)))
        network = fit_network(together, works, device, network)
    ratios: dict[str, list[float]] = {name: [] for name in STAGES}
    for cell in compare(rows, works, device, network):
        ratios[cell["stage"]].append(cell["measured"] / cell["predicted"])
    corrections = {name: statistics.median(found) for name, found in ratios.items() if found}
    return replace(device, corrections=corrections), network


def fit_device(rows: Sequence[Mapping[str, Any]], works: Mapping[str, Workload]) -> Device:
    """What one rank computes with, from runs of a single one."""
    notes = [note for row in rows for note in row["decompositions"]]
    per_pair = [seconds / pairs for _, pairs, seconds in notes]
    a, b, c = nonnegative([[1.0] * len(notes), *([n**power for n, *_ in notes] for power in (2, 3))], per_pair)
    equations: list[tuple[Work, int, float]] = []
    for row in rows:
        layers = works[row["model"]].layers
        kinds = {
            "factor computation": total(layer.statistics for layer in layers),
            "factor update": FOLD * works[row["model"]].packed_numbers,
            "preconditioning": total(layer.preconditioning for layer in layers),
            "scaling": total(layer.scaling for layer in layers),
        }
        equations += [(work, len(layers), row["events"][name]) for name, work in kinds.items()]
    works_, counts, seconds = zip(*equations, strict=True)
    columns = [[w.operations for w in works_], [w.flops for w in works_], [w.bytes for w in works_], counts]
    launch, flop, byte, layer = (max(x, 1e-15) for x in nonnegative(columns, seconds))
    return Device("this machine", 1 / flop, 1 / flop, 1 / byte, launch, (a, b, c), layer)


def fit_network(
    rows: Sequence[Mapping[str, Any]], works: Mapping[str, Workload], device: Device, start: Network
) -> Network:
    """Latency and bandwidth, in which the seconds of communication are linear."""
    zero = replace(start, latency=0.0, rank_bandwidth=1e18)
    probes = (zero, replace(zero, latency=1.0), replace(zero, rank_bandwidth=1.0))
    columns: list[list[float]] = [[], []]
    wanted = []
    for row in rows:
        base, hops, load = (predicted(row, works, device, probe) for probe in probes)
        for name in COMMUNICATION:
            if load[name] - base[name] > 0 and row["events"][name] > base[name]:
                wanted.append(row["events"][name] - base[name])
                columns[0].append(hops[name] - base[name])
                columns[1].append(load[name] - base[name])
    latency, byte = nonnegative(columns, wanted)
    return replace(start, latency=latency, rank_bandwidth=1 / max(byte, 1e-18))


def predicted(
    row: Mapping[str, Any], works: Mapping[str, Workload], device: Device, network: Network
) -> Mapping[str, float]:
    """Seconds of the stages of a measured row, on the cores that other processes left."""
    strategy = STRATEGIES[row["strategy"]]
    assert strategy is not None
    left = replace(device, cores=max(0.1, device.cores - row["others"]))
    return predict(works[row["model"]], row["ranks"], strategy, left, network, SCHEDULE).events


def compare(
    rows: Sequence[Mapping[str, Any]], works: Mapping[str, Workload], device: Device, network: Network
) -> Iterator[dict[str, Any]]:
    """Every stage of every row: measured and predicted milliseconds."""
    for row in rows:
        if row["strategy"] == "SGD":
            continue
        events = predicted(row, works, device, network)
        for name in STAGES:
            measured = row["events"][name]
            if measured > 0 and (name not in COMMUNICATION or works_to_send(row, name)):
                head = {key: row[key] for key in ("model", "strategy", "ranks", "fitted")}
                error = events[name] / measured - 1
                yield {
                    **head,
                    "stage": name,
                    "measured": 1e3 * measured,
                    "predicted": 1e3 * events[name],
                    "error": error,
                }


def works_to_send(row: Mapping[str, Any], stage: str) -> bool:
    """Whether anything is sent in a stage."""
    kind = {"factor": "factors", "decomposition": "decompositions", "gradient": "directions"}[stage.split()[0]]
    return any(row["received"][kind])


def validate(measurements: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Fit to some runs, predict the others.

    Returns:
        The result, and its tables.
    """
    rows = measurements["rows"]
    names = dict.fromkeys(row["model"] for row in rows)
    works = {name: {**SUBJECTS, **SMALL}[name].workload(name) for name in names}
    device, network = fit(rows, works, measurements["machine"]["cores"])
    cells = list(compare(rows, works, device, network))
    by_stage = []
    for name in (*STAGES, "all stages"):
        chosen = [cell for cell in cells if name in (cell["stage"], "all stages")]
        line: dict[str, Any] = {"stage": name}
        for label, fitted in {"runs used for fitting": True, "other runs": False}.items():
            errors = [abs(cell["error"]) for cell in chosen if cell["fitted"] == fitted]
            line[label] = len(errors)
            line[f"{label}: median error"] = paper_figures.percent(statistics.median(errors)) if errors else None
        by_stage.append(line)
    others = [abs(cell["error"]) for cell in cells if not cell["fitted"]]
    traffic = [check_traffic(row, works) for row in rows if row["ranks"] > 1 and row["strategy"] != "SGD"]
    result = {
        "device": asdict(device),
        "network": asdict(network),
        "median error, other runs": statistics.median(others) if others else None,
        "by stage": by_stage,
        "traffic": traffic,
        "cells": cells,
    }
    tables = [
        table("Error of a stage's predicted time", by_stage),
        table("Largest difference between predicted and counted bytes of a rank", traffic),
    ]
    return result, "\n".join(tables)


def check_traffic(row: Mapping[str, Any], works: Mapping[str, Workload]) -> dict[str, Any]:
    """Predicted less counted bytes per step, of the rank where they differ most."""
    strategy = STRATEGIES[row["strategy"]]
    assert strategy is not None
    made = predict(works[row["model"]], row["ranks"], strategy, paper_figures.V100, paper_figures.LONGHORN, SCHEDULE)
    differences = {
        kind: max(
            float(np.abs(np.asarray(row[side][kind]) - getattr(made, side)[kind]).max())
            for side in ("sent", "received")
        )
        for kind in KINDS
    }
    head = {key: row[key] for key in ("model", "strategy", "ranks")}
    memory = max(abs(a - b) for a, b in zip(row["memory"], made.memory.tolist(), strict=True))
    return {**head, **differences, "memory": memory}


# The paper's clusters ------------------------------------------------------------------------------------------------


def predictions(smoke: bool) -> tuple[dict[str, Any], str]:
    """Everything that needs no measurement.

    Returns:
        The result, and its tables.
    """
    if smoke:
        rows = paper_figures.traffic([paper_figures.cifar_resnet()])
        return {"traffic": rows}, predicted_tables({"traffic": rows})
    steps: dict[str, Callable[[], paper_figures.Cluster]] = {
        "V100": paper_figures.fit_longhorn,
        "A100": paper_figures.fit_theta,
    }
    found = {name: make() for name, make in tqdm(steps.items(), desc="fitting", unit="cluster")}
    v100, a100 = found.values()
    makers: dict[str, Callable[[], Any]] = {
        "compared": lambda: [
            asdict(c) for c in (*paper_figures.compare_longhorn(v100), *paper_figures.compare_theta(a100))
        ],
        "figure 7": lambda: paper_figures.stages_table(v100),
        "figure 8": lambda: paper_figures.time_to_solution(v100),
        "figure 9": lambda: paper_figures.bert_hours(a100),
        "beyond": lambda: paper_figures.beyond(v100, a100),
        "traffic": lambda: paper_figures.traffic(
            [paper_figures.cifar_resnet(), paper_figures.bert("BERT-Base", 128, 16)]
        ),
        "memory": paper_figures.memory,
        "balance": paper_figures.balance,
    }
    result: dict[str, Any] = {"clusters": {name: asdict(cluster) for name, cluster in found.items()}}
    result |= {name: make() for name, make in tqdm(makers.items(), desc="predicting", unit="table")}
    return result, predicted_tables(result)


TITLES = {
    "compared": "The paper's numbers and the model's (fitted: the model's constants come from these)",
    "figure 7": "Milliseconds of each stage each time it happens: ResNet-50, 64 V100, every 50/500",
    "figure 8": "Hours to the baseline's accuracy (90 epochs of SGD, 55 of K-FAC)",
    "figure 9": "Hours of the phases of BERT-Large on A100",
    "beyond": "kfac_optim on large clusters: ResNets on V100, BERT-Large on A100",
    "traffic": "Bytes sent per step and rank, 4 ranks, every 10/100; shares: of kfac-pytorch's way, same strategy",
    "memory": "Memory of curvature per rank",
    "balance": "Decomposition load of the busiest rank over the mean",
}


def predicted_tables(result: Mapping[str, Any]) -> str:
    """All tables as text."""
    tables = []
    for name, title in TITLES.items():
        rows = result.get(name)
        if name == "figure 7" and rows:
            rows = [
                {"implementation": row["implementation"], **{key: 1e3 * value for key, value in row["seconds"].items()}}
                for row in rows
            ]
        if rows:
            tables.append(table(title, rows))
    return "\n".join(tables)


# The command ---------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = command.add_argument
    add("--part", choices=("measure", "validate", "predict", "all"), default="all", help="what to do (default: all)")
    add("--ranks", default="1,2,4", metavar="N,...", help="numbers of ranks that measure starts (default: 1,2,4)")
    add("--periods", type=int, default=3, metavar="N", help="timed periods of the schedule in each run (default: 3)")
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of measure, under torchrun (default: cpu)")
    add("--smoke", action="store_true", help="a small model and few tables, to see that everything runs; no result")
    add("--out", type=Path, metavar="FOLDER", help=f"of the result files (default: {RESULTS}; with --smoke: {SMOKE})")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = parser()
    options = command.parse_args(arguments)
    folder = options.out or (SMOKE if options.smoke else RESULTS)
    try:
        worlds = [int(ranks) for ranks in options.ranks.split(",")]
        folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        command.error(str(error))
    distributed = dist.is_torchelastic_launched()
    if options.device == "cuda" and not distributed:
        command.error("--device cuda needs torchrun")
    words = sys.argv[1:] if arguments is None else list(arguments)
    importlib.import_module("kfac_optim")  # its version is one of the facts
    found = {"command": " ".join(["python -m benchmarks.scaling", *words]), **facts()}
    if options.part in ("measure", "all"):
        job = Job(
            SMALL if options.smoke else SUBJECTS, 1 if options.smoke else options.periods, options.device, options.seed
        )
        rows = measure_under_torchrun(job) if distributed else measure(job, worlds[:2] if options.smoke else worlds)
        first = not distributed or dist.get_rank() == 0
        if distributed:
            dist.destroy_process_group()
        if not first:
            return 0
        settings = {"periods": job.periods, "seed": job.seed, "device": job.device, "schedule": asdict(SCHEDULE)}
        result = {**found, "settings": settings, "rows": rows}
        stem = f"scaling-measure-{rows[0]['ranks']}" if distributed else "scaling-measure"
        write(folder, stem, result, measured_tables(rows))
        scaling_plots.draw_measured(rows, folder / f"{stem}.png")
    if distributed:
        return 0
    if options.part in ("validate", "all"):
        source = folder / "scaling-measure.json"
        if not source.exists():
            command.error(f"{source} is missing: run --part measure first")
        result, tables = validate(json.loads(source.read_text()))
        write(folder, "scaling-validate", {**found, **result}, tables)
        scaling_plots.draw_validated(result["cells"], folder / "scaling-validate.png")
    if options.part in ("predict", "all"):
        result, tables = predictions(options.smoke)
        write(folder, "scaling-predict", {**found, **result}, tables)
        if not options.smoke:
            scaling_plots.draw_paper(result, folder / "scaling-paper.png")
            scaling_plots.draw_beyond(result["beyond"], folder / "scaling-beyond.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
