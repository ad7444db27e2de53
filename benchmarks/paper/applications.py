"""The parts about other models: Mask R-CNN (Figures 5b and 5c, Table 6), BERT (Tables 3 and 4), KAISA's U-Net."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from benchmarks.common.settings import KFAC
from benchmarks.common.tasks import Task, python_sources
from benchmarks.paper.bench import Bench, Options
from benchmarks.paper.study import Cells, Figure, Number, Run, Study, final, until
from benchmarks.paper.tasks import LONGEST, SHARE, detection, masked_text, segmentation

# Mask R-CNN: K-FAC on the heads --------------------------------------------------------------------------------------

HEADS: Options = {"inv_update_steps": 20, "factor_update_steps": 2, "damping": 0.1}
DETECTION: dict[str, Any] = {"epochs": 8, "lr": 0.02, "schedule": "cosine", "evaluations": 4}
GOALS = {"test_box": 0.4, "test_mask": 0.4}  # about what SGD ends with, as the paper's baseline is
detector = lru_cache(None)(detection)


HEADS_ALONE = ("KFACSGD", {**HEADS, "skip_layers": ["^backbone"]})
Way = tuple[str, Options | None]  # optimizer, K-FAC keywords
STEPS = Figure("steps to both baselines", until("step", GOALS), relative=True, digits=0)


def detector_study(bench: Bench, ways: dict[str, Way], columns: dict[str, int]) -> dict[str, Any]:
    """Return rows and runs of the detector, the columns on N GPUs' batch."""

    def make(seed: int, way: Way, gpus: int) -> Run:
        optimizer, kfac = way
        given = {**DETECTION, "batch_size": 32 * gpus, "lr": DETECTION["lr"] * math.sqrt(gpus), "kfac": kfac or {}}
        return bench.run(detector(), "detector", optimizer, seed, **given)

    return {"rows": list(ways), "runs": bench.crossed(ways, columns, make)}


def figure5b(bench: Bench) -> Study:
    """Partial K-FAC: on the two heads of a detector alone."""
    ways: dict[str, Way] = {
        "SGD": ("SGD", None),
        "K-FAC on all layers": ("KFACSGD", {**HEADS, "skip_layers": []}),
        "K-FAC on the heads": HEADS_ALONE,
    }
    box, mask = (
        Figure(f"{part} found, % (paper: mAP)", final(f"test_{part}", 100), more=True) for part in ("box", "mask")
    )
    return Study(
        title=f"Figures 5b, 5c: K-FAC on the two heads alone; baselines: {100 * GOALS['test_box']:g} % found",
        columns={"detector": "Mask R-CNN, 32 GPUs"},
        **detector_study(bench, ways, {"detector": 1}),
        figures=[box, mask, STEPS, Figure("seconds to both baselines", until("cpu_seconds", GOALS), relative=True)],
        paper={
            box.name: {"SGD": (37.8,), "K-FAC on the heads": (37.9,)},
            mask.name: {"SGD": (34.2,), "K-FAC on the heads": (35.0,)},
            STEPS.name: {"SGD": (25640,), "K-FAC on the heads": (21000,)},
        },
        claim="training converges with K-FAC on the box head and the mask head; 18.1 % fewer steps, 14.9 % less time",
        metrics=("test_box", "test_mask"),
    )


def table6(bench: Bench) -> Study:
    """Partial K-FAC: steps to the baselines, by batch size."""
    sizes = {1: "32 GPUs", 2: "64 GPUs", 4: "128 GPUs"}
    return Study(
        title="Table 6: steps to the baselines, by batch size",
        columns={f"batch {32 * n}": paper for n, paper in sizes.items()},
        **detector_study(
            bench, {"SGD": ("SGD", None), "K-FAC on the heads": HEADS_ALONE}, {f"batch {32 * n}": n for n in sizes}
        ),
        figures=[STEPS, Figure("seconds to both baselines", until("cpu_seconds", GOALS), relative=True)],
        paper={STEPS.name: {"SGD": (25640, 15000, 7320), "K-FAC on the heads": (21000, 12000, 6800)}},
        claim="14.9, 18.1 and 3.0 % less time on 32, 64 and 128 GPUs",
        metrics=("test_box",),
    )


# BERT: two phases ----------------------------------------------------------------------------------------------------

# Steps, bytes of a window, windows of a batch; the paper: 7038 and 1563 steps, 128 and 512 tokens, 64 Ki and 32 Ki.
PHASES = ((704, 32, 32), (156, 64, 16))
SHORTER = {156: 1563, 140: 1400, 120: 1200, 100: 1000}  # steps of phase 2, and the paper's
# Phase 1 with K-FAC takes 600 or 500 steps; the paper: 6000 and 5000.
LAMB_LR = 0.01
BERT_KFAC = {"inv_update_steps": 20, "factor_update_steps": 2, "fisher": "empirical"}


def bert_run(
    bench: Bench, optimizer: str, seed: int, phase: int, steps: int, after: Run | None = None, batch: int | None = None
) -> Run:
    """Return a run of the small BERT in a phase (0 or 1)."""
    _, context, usual = PHASES[phase]
    batch = batch or usual
    task = encoder_task(context)
    given: dict[str, Any] = {"steps": steps, "batch_size": batch, "lr": LAMB_LR * math.sqrt(batch / usual)}
    given |= {"schedule": "linear", "warmup": steps // 20, "eval_every": 20, "recipe": "practical"}
    if optimizer in KFAC:
        given["kfac"] = {**BERT_KFAC, "loss_average": bench.batch(batch) * (context // SHARE)}
    return bench.run(task, "BERT", optimizer, seed, after=after, **given)


@lru_cache(None)
def encoder_task(context: int) -> Task:
    """Masked bytes of Python's sources; the models of all lengths have the positions of the longest."""
    return masked_text(python_sources(), min(context, LONGEST))


def table3(bench: Bench) -> Study:
    """Two phases of BERT, K-FAC in one or both: fewest steps that reach LAMB's loss."""
    full = PHASES[0][0]
    ways = {
        f"LAMB {full}, LAMB": ("Lamb", full, "Lamb"),
        f"LAMB {full}, K-FAC": ("Lamb", full, "KFACLAMB"),
        "K-FAC 600, LAMB": ("KFACLAMB", 600, "Lamb"),
        "K-FAC 500, K-FAC": ("KFACLAMB", 500, "KFACLAMB"),
    }
    columns = {f"phase 2: {steps}": steps for steps in SHORTER}

    def chained(seed: int, way: tuple[str, int, str], steps: int) -> Run:
        first, length, second = way
        return bert_run(bench, second, seed, 1, steps, after=bert_run(bench, first, seed, 0, length))

    rows, goal = list(ways), (next(iter(ways)), next(iter(columns)))
    loss = Figure("held-out loss, nats per masked byte (paper: F1)", final("test_loss"), digits=3)
    seconds = Figure(
        "seconds of both phases", lambda run: run["cpu_seconds"] + run["before"]["cpu_seconds"], relative=True
    )

    def fewest(cells: Cells) -> list[str]:
        """Say in how many steps of phase 2 each way reaches LAMB's loss."""
        losses = cells[loss.name]
        wanted = losses[goal].mean
        lines = []
        for row in rows[1:]:
            means = {steps: losses[row, column].mean for column, steps in columns.items()}
            enough = [s for s, mean in means.items() if mean is not None and wanted is not None and mean <= wanted]
            lines.append(
                f"{row}: reaches LAMB's loss in {min(enough)} steps of phase 2"
                if enough
                else f"{row}: LOSES, never reaches LAMB's loss"
            )
        return lines

    f1: dict[str, Sequence[Number]] = {
        rows[0]: (90.1, "89.94*", "89.87*", None),
        rows[1]: (90.54, 90.35, 90.18, 90.12),
        rows[2]: (90.17, 90.26, 90.52, "89.95*"),
        rows[3]: (90.15, 90.25, "89.94*", "89.81*"),
    }
    return Study(
        title="Tables 3 and 4: K-FAC in one phase of BERT or in both, and how few steps of phase 2 are enough",
        rows=rows,
        columns={column: str(SHORTER[steps]) for column, steps in columns.items()},
        runs=bench.crossed(ways, columns, chained),
        figures=[loss, seconds],
        paper={loss.name: f1},
        claim="LAMB needs all 1563 steps, K-FAC in phase 2 1000; 6.2 % less time in all (9.0 % with K-FAC in phase 1, "
        "4.7 % with K-FAC in both); *: below the baseline",
        base=lambda row, column: goal,
        metrics=("test_loss",),
        conclude=fewest,
    )


# KAISA: U-Net and equal memory ---------------------------------------------------------------------------------------

UNET: dict[str, Any] = {"epochs": 4, "lr": 0.015, "batch_size": 32, "schedule": "cosine", "evaluations": 6}
unet_task = lru_cache(None)(segmentation)


def unet(bench: Bench) -> Study:
    """A U-Net: steps and seconds to a Dice score, Adam and K-FAC."""
    goals = {"test_dice": unet_task().target}
    kfac = {"inv_update_steps": 20, "factor_update_steps": 2, "fisher": "empirical"}
    ways: dict[str, dict[str, Any]] = {"Adam": {}, "KFACAdam": {"recipe": "practical", "kfac": kfac}}
    rows = {"Adam": "Adam", "K-FAC": "KFACAdam"}

    def make(seed: int, name: str, column: str) -> Run:
        return bench.run(unet_task(), column, name, seed, **ways[name], **UNET)

    percent = f"a Dice of {100 * goals['test_dice']:g} %"
    return Study(
        title=f"KAISA: a U-Net on the way to {percent}",
        rows=list(rows),
        columns={"U-Net": "KAISA"},
        runs=bench.crossed(rows, {"U-Net": "U-Net"}, make),
        figures=[
            Figure("Dice, %", final("test_dice", 100), more=True),
            Figure(f"steps to {percent}", until("step", goals), relative=True, digits=0),
            Figure(f"seconds to {percent}", until("cpu_seconds", goals), relative=True),
        ],
        paper={},
        claim="at the same global batch K-FAC needs 18.1 to 36.3 % less time (ResNet-50, Mask R-CNN, U-Net, BERT)",
        metrics=("test_dice",),
    )
