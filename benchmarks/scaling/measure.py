"""Weak scaling on real ranks: milliseconds of every stage, bytes sent, by strategy.

A compute stage is measured on its slowest rank, a stage of communication on the rank that waits least in it: it is the
last to arrive and waits for nobody.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from benchmarks.common.models import ResNet, Transformer, autoencoder
from benchmarks.common.reports import table
from benchmarks.common.works import SMALL_TRANSFORMER, Schedule
from benchmarks.common.works import Work as Noise
from benchmarks.scaling.cluster import KINDS, STAGES, intervals
from benchmarks.scaling.workload import Workload, workload
from kfac_optim import KFACSGD
from kfac_optim.distributed import KAISA, AssignmentStrategy, FactorWise, LayerWise
from kfac_optim.solvers import Decomposition, EigenSolver

COMMUNICATION = tuple(name for name in STAGES if name.endswith("communication"))
SCHEDULE = Schedule(statistics=2, decompositions=4)
NO_NORMS = ("norm",)
Rows = list[dict[str, Any]]
T = TypeVar("T")


# What is measured ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject(Noise):
    """A model on noise."""

    fitted: bool = False  # The model of the costs is fitted to its runs

    def workload(self, name: str) -> Workload:
        """The model as the cost model sees it."""
        return workload(name, self.make, self.example, self.batch, tokens=bool(self.symbols), skip_layers=NO_NORMS)


SUBJECTS = {
    "ResNet-14, 32 images": Subject(partial(ResNet, 3, 2), (3, 32, 32), 32, 10, fitted=True),
    "autoencoder, 250 images": Subject(autoencoder, (784,), 250, 0, fitted=True),
    "2-layer transformer, d=128": Subject(Transformer, (128,), 8, 256, 256, fitted=True),
    "ResNet-32, 32 images": Subject(partial(ResNet, 3, 5), (3, 32, 32), 32, 10),
    "4-layer transformer, d=256": Subject(SMALL_TRANSFORMER, (128,), 4, 256, 256),
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


@dataclass(frozen=True)
class Timed(EigenSolver):
    """The eigen solver, with a note of dimension, pairs and seconds of each decomposition."""

    notes: list[tuple[int, int, float]] = field(default_factory=list, repr=False, compare=False)

    def decompose(self, factor: Tensor, shift: Tensor) -> Decomposition:
        """See :class:`kfac_optim.solvers.Solver`."""
        start = time.perf_counter()
        result = super().decompose(factor, shift)
        if factor.dim() == 3:
            self.notes.append((factor.shape[-1], len(factor), time.perf_counter() - start))
        return result


# One rank ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Everything that the ranks do together."""

    subjects: Mapping[str, Subject]
    periods: int
    device: str


def measure_here(job: Job) -> Rows:
    """Measure every subject with every strategy on the ranks of the default group; the rows are complete on rank 0."""
    ranks = dist.get_world_size()
    rows = []
    cases = list(itertools.product(job.subjects.items(), strategies_on(ranks)))
    for (name, subject), strategy in tqdm(cases, desc=f"{ranks} ranks", unit="run", disable=dist.get_rank() > 0):
        own = run(subject, STRATEGIES[strategy], job)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, own)
        rows.append(
            {"model": name, "strategy": strategy, "ranks": ranks, "fitted": subject.fitted, **combined(everyone)}
        )
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
    torch.manual_seed(0)
    device = torch.device(job.device)
    bare = subject.make().to(device)
    model = DistributedDataParallel(bare) if dist.get_world_size() > 1 else bare
    inputs, targets = (x.to(device) for x in subject.data(dist.get_rank()))
    solver = Timed()
    optimizer: Any
    if strategy is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = KFACSGD(
            model,
            lr=1e-3,
            momentum=0.9,
            factor_update_steps=SCHEDULE.statistics,
            inv_update_steps=SCHEDULE.decompositions,
            spread=0,  # the model predicts refreshes as wholes
            skip_layers=NO_NORMS,
            solver=solver,
            assignment=strategy,
        )
    curvature = getattr(optimizer, "curvature", None)
    period = SCHEDULE.decompositions
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
    return {**periods(marks, SCHEDULE), "memory": memory, "decompositions": list(solver.notes)}


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
    traffic = curvature.stages.comm.traffic
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


def on_ranks(ranks: int, work: Callable[[T], Rows], given: T) -> Rows:
    """Start Gloo ranks on this machine, call ``work`` on each of them, and return what it returns on the first."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, folder, work, given), nprocs=ranks)
        found: Rows = json.loads(Path(folder, "rows").read_text())
    return found


def _rank(rank: int, ranks: int, folder: str, work: Callable[[T], Rows], given: T) -> None:
    """A rank that :func:`on_ranks` has started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    rows = work(given)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    # At once: DDP's threads may abort an interpreter that exits in the ordinary way on a busy machine.
    dist.barrier()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)


def measure_under_torchrun(job: Job) -> Rows:
    """Measure on the ranks that torchrun has started."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if job.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    return measure_here(job)


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
