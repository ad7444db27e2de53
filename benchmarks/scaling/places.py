"""Where factors stand (``factors=`` of a layer-wise strategy): loss, bytes, memory and time of one training on ranks.

The task is ``curves`` (a deep autoencoder), where K-FAC pays most, with the practical recipe's settings. A rank that
decomposes statistics of its own alone (DP-KFAC, Zhang et al. 2022) sees 1 / R of the batch; what that costs in loss
is what is looked at.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from benchmarks.common.reports import table
from benchmarks.common.tasks import TASKS
from benchmarks.scaling.cluster import KINDS
from kfac_optim import KFACSGD, LayerWise, OfMean, growing
from kfac_optim.distributed.assignment import FactorPlace


@dataclass(frozen=True)
class Training:
    """What every rank trains.

    Attributes:
        steps: How many.
        batch: Examples of all ranks together.
        ranks: How many.
        seeds: Of weights and data, one run each.
    """

    steps: int = 200
    batch: int = 1000
    ranks: int = 4
    seeds: tuple[int, ...] = (0, 1)


def run(training: Training, place: FactorPlace, seed: int) -> dict[str, Any]:
    """Train on this rank's share of every batch; returns the losses, seconds per step and bytes of this rank."""
    task = TASKS["curves"]()
    torch.manual_seed(seed)
    model = task.model()
    wrapped = DistributedDataParallel(model)
    optimizer = KFACSGD(
        wrapped,
        lr=0.05,
        momentum=0.9,
        nesterov=True,
        scaling="unit",
        damping=OfMean(0.01),
        inv_update_steps=growing(0.1, minimum=5),
        solver="eigen",
        fisher=task.fisher,
        loss_average=task.loss_average,
        assignment=LayerWise(place),
    )
    seconds = []
    for step in range(training.steps):
        batch = task.source.batch(seed, step, training.batch)
        inputs, targets = (part.chunk(training.ranks)[dist.get_rank()] for part in batch)
        start = time.perf_counter()
        optimizer.zero_grad()
        task.loss(wrapped(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    engine = optimizer.curvature
    sent = {kind: engine.stages.comm.traffic.get(kind, [0.0, 0.0])[0] / training.steps for kind in KINDS}
    memory = engine.memory_estimate()["total"]
    engine.close()
    return {
        "loss": task.evaluate(model, torch.device("cpu"))["test_loss"],
        "seconds": statistics.fmean(seconds),
        "sent": sent,
        "memory": memory,
    }


def run_all(training: Training) -> list[dict[str, Any]]:
    """Train in every way; one row for each run, with what every rank found."""
    torch.set_flush_denormal(True)  # of curves' pixels, with which products take ten times as long on some CPUs
    rows = []
    cases = [(place, seed) for place in get_args(FactorPlace) for seed in training.seeds]
    for place, seed in tqdm(cases, desc=f"{training.ranks} ranks", unit="run", disable=dist.get_rank() > 0):
        everyone: list[Any] = [None] * training.ranks
        dist.all_gather_object(everyone, run(training, place, seed))
        rows.append({"factors": place, "seed": seed, "ranks": everyone})
    return rows


def compared_table(rows: Sequence[Mapping[str, Any]], training: Training) -> str:
    """Means over the seeds; of bytes over the ranks, of memory the fullest rank, of time the slowest."""
    lines = []
    for place in get_args(FactorPlace):
        runs = [row["ranks"] for row in rows if row["factors"] == place]
        losses = [ranks[0]["loss"] for ranks in runs]
        sent = {kind: statistics.fmean(r["sent"][kind] for ranks in runs for r in ranks) for kind in KINDS}
        lines.append(
            {
                "factors": place,
                "loss": statistics.fmean(losses),
                "from": min(losses),
                "to": max(losses),
                **{f"{kind}, KB": value / 1e3 for kind, value in sent.items()},
                "memory, MB": max(r["memory"] for ranks in runs for r in ranks) / 1e6,
                "ms": 1e3 * statistics.fmean(max(r["seconds"] for r in ranks) for ranks in runs),
            }
        )
    title = f"curves, layer-wise, {training.steps} steps of {training.batch} examples on {training.ranks} ranks"
    return table(
        title,
        lines,
        f"held-out loss over {len(training.seeds)} seeds; KB sent per step and rank, mean; memory of the fullest rank",
    )
