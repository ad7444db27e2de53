r"""Scaling of distributed K-FAC: measured on real ranks, predicted for clusters.

``python -m benchmarks.scaling --part NAME`` (from the repository root) does one part, prints its tables and writes them
to ``benchmarks/results/scaling/`` as text, drawings and JSON with settings, seeds, versions and machine. Parts:

    measure     weak scaling on real Gloo ranks here: each strategy, milliseconds of every stage, bytes sent
    validate    fits the model of ``cluster.py`` to some of the measured runs and predicts the others
    predict     the paper's clusters beside its figures (``paper.py``), and the bytes that every strategy sends
    factors     one training on 4 Gloo ranks for each ``factors=``: loss, bytes, memory (``places.py``)

Without torchrun ``measure`` starts its own ranks on this machine. Under torchrun it uses the ranks it is given, and
writes ``measure-RANKS.json``. One machine, four ranks:

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=4 -m benchmarks.scaling --part measure

A Slurm cluster, two nodes of four GPUs (``--device cuda`` takes NCCL; omit it for Gloo on CPUs):

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=32 --time=00:30:00
    export OMP_NUM_THREADS=8
    srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=4 --rdzv_id=$SLURM_JOB_ID --rdzv_backend=c10d \
        --rdzv_endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500 \
        -m benchmarks.scaling --part measure --device cuda
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from benchmarks.common.reports import Command, Output, table
from benchmarks.scaling import paper, plots
from benchmarks.scaling.measure import (
    SCHEDULE,
    SMALL,
    SUBJECTS,
    Job,
    measure_here,
    measure_under_torchrun,
    measured_tables,
    on_ranks,
)
from benchmarks.scaling.places import Training, compared_table, run_all
from benchmarks.scaling.validate import validate

TITLES = {
    "compared": "The paper's numbers and the model's (fitted: the model's constants come from these)",
    "figure 8": "Hours to the baseline's accuracy (90 epochs of SGD, 55 of K-FAC)",
    "traffic": "Bytes sent per step and rank, 4 ranks, every 10/100; shares: of kfac-pytorch's way, same strategy",
}


def predictions(smoke: bool) -> tuple[dict[str, Any], str]:
    """Return everything that needs no measurement, and its tables."""
    if smoke:
        result: dict[str, Any] = {"traffic": paper.traffic([paper.cifar_resnet()])}
    else:
        with tqdm(total=4, desc="predicting", unit="table") as bar:
            v100, a100 = paper.fit_longhorn(), paper.fit_theta()
            bar.update()
            hours = paper.time_to_solution(v100)
            bar.update()
            compared = [*paper.compare_longhorn(v100, hours), *paper.compare_theta(a100)]
            bar.update()
            result = {"clusters": {"V100": asdict(v100), "A100": asdict(a100)}, "figure 8": hours}
            result["compared"] = [asdict(each) for each in compared]
            result["traffic"] = paper.traffic([paper.cifar_resnet(), paper.bert("BERT-Base", 128, 16)])
            bar.update()
    return result, "\n".join(table(title, result[name]) for name, title in TITLES.items() if name in result)


def written(output: Output, stem: str, result: dict[str, Any], tables: str) -> None:
    """Print the tables; write them and the result."""
    print(tables)
    output.save(stem, result, tables)
    print(f"written: {output.folder / stem}.json, .txt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("scaling", __doc__)
    add = command.add_argument
    parts = ("measure", "validate", "predict", "factors", "all")
    add("--part", choices=parts, default="all", help="what to do (default: all)")
    add("--periods", type=int, default=3, metavar="N", help="timed periods of the schedule in each run (default: 3)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of measure, under torchrun (default: cpu)")
    options, output = command.start(arguments, "a small model and few tables")
    distributed = dist.is_torchelastic_launched()
    if options.device == "cuda" and not distributed:
        command.error("--device cuda needs torchrun")
    if options.part in ("measure", "all"):
        subjects, count = (SMALL, 1) if options.smoke else (SUBJECTS, options.periods)
        job = Job(subjects, count, options.device)
        worlds = (1, 2) if options.smoke else (1, 2, 4)
        if distributed:
            rows = measure_under_torchrun(job)
        else:
            rows = [row for ranks in worlds for row in on_ranks(ranks, measure_here, job)]
        first = not distributed or dist.get_rank() == 0
        if distributed:
            dist.destroy_process_group()
        if not first:
            return 0
        settings = {"periods": job.periods, "seed": 0, "device": job.device, "schedule": asdict(SCHEDULE)}
        stem = f"measure-{rows[0]['ranks']}" if distributed else "measure"
        written(output, stem, {"settings": settings, "rows": rows}, measured_tables(rows))
        output.picture(stem, plots.draw_measured(rows))
    if distributed:
        return 0
    if options.part in ("validate", "all"):
        source = output.folder / "measure.json"
        if not source.exists():
            command.error(f"{source} is missing: run --part measure first")
        result, tables = validate(json.loads(source.read_text()))
        written(output, "validate", result, tables)
        output.picture("validate", plots.draw_validated(result["cells"]))
    if options.part in ("predict", "all"):
        written(output, "predict", *predictions(options.smoke))
    if options.part in ("factors", "all"):
        training = Training(steps=2, batch=8, ranks=2, seeds=(0,)) if options.smoke else Training()
        rows = on_ranks(training.ranks, run_all, training)
        written(output, "factors", {"settings": asdict(training), "rows": rows}, compared_table(rows, training))
    return 0


if __name__ == "__main__":
    sys.exit(main())
