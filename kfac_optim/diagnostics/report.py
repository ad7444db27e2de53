"""Reports about the curvature, as plain data and text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from ..blocks import SIDES, Block
from ..distributed import Communicator

__all__ = ["flatten", "human_bytes", "report_of", "spectrum", "table", "workers_of"]


def report_of(block: Block, gamma: Tensor, *, full: bool) -> dict[str, Any]:
    """A layer's part of the engine's ``report()``, in which entries of a factor that another rank keeps are None.

    The block has decompositions. ``gamma``: the damping of its pairs, ``[p]``; ``full``: whether to list eigenvalues.
    """
    spectra = zip(SIDES, block.eigenvalues(), strict=True)
    report: dict[str, Any] = {side: None if values is None else spectrum(values, full=full) for side, values in spectra}
    (a, g), damping = (report[side] for side in SIDES), float(gamma.mean())
    # For a layer with several pairs this is roughly an upper bound: the extremes may belong to different pairs.
    damped = (a["max"] * g["max"] + damping) / (a["min"] * g["min"] + damping) if a and g else None
    report["damping"], report["condition"] = damping, damped
    report["cosine"] = None if block.cosine is None else float(block.cosine)
    return report


def spectrum(values: Tensor, *, full: bool = False) -> dict[str, Any]:
    """Eigenvalues, largest first, as ``min``, ``mean``, ``max`` and ``condition``, infinite if the smallest is 0.

    ``full``: whether to add all of them, as the list ``eigenvalues``.
    """
    low, high = float(values[-1]), float(values[0])
    found = {"min": low, "mean": float(values.mean()), "max": high, "condition": high / low if low else math.inf}
    return {**found, "eigenvalues": values.tolist()} if full else found


def workers_of(block: Block) -> dict[str, Any]:
    """A layer's part of :meth:`~kfac_optim.CurvatureEngine.workers`."""
    inverse: dict[str, int] = dict(zip(SIDES, block.workers.inverse_workers, strict=True))
    return {**inverse, "precondition": list(block.workers.gradient_workers)}


def flatten(report: Mapping[str, Any], prefix: str = "kfac") -> dict[str, float]:
    """Nested numbers as one level, for any logger.

    ``{"staleness": 3, "layers": {"conv1": {"A": {"max": 2.0}}}}`` becomes ``{"kfac/staleness": 3.0,
    "kfac/conv1/A/max": 2.0}``. None and lists (eigenvalues) are left out; characters that TensorBoard does not allow in
    a tag become "_".

    Args:
        report: What the engine's ``report()``, ``profile()`` or ``memory_estimate()`` returns.
        prefix: The first part of every name.
    """
    flat: dict[str, float] = {}
    for key, value in report.items():
        name = prefix if key == "layers" else f"{prefix}/{re.sub(r'[^-./0-9A-Za-z_]', '_', key or 'model')}"
        if isinstance(value, Mapping):
            flat |= flatten(value, name)
        elif isinstance(value, (int, float)):
            flat[name] = float(value)
    return flat


_HEADER = ("layer", "rule", "A", "G", "memory", "inverse workers", "gradient workers", "note")


def table(
    title: str,
    memory: Mapping[Block, int],
    uncovered: Mapping[nn.Parameter, tuple[str, str]],
    comm: Communicator,
    remarks: Sequence[str],
) -> str:
    """The coverage table as aligned text; columns that are empty in all rows are left out.

    Args:
        title: The line above it.
        memory: By block, the bytes that it takes on this rank; 0 is not shown.
        uncovered: For every parameter without a block, its name and the reason.
        comm: The ranks; for one process no workers are shown.
        remarks: More lines below it.
    """
    lines = [_HEADER, *(_row_of(block, nbytes, comm) for block, nbytes in memory.items())]
    lines += [(name, "base", *[""] * 5, reason) for name, reason in uncovered.values()]
    used = [i for i in range(len(_HEADER)) if i == 0 or any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in used}
    head, *rows = ("  ".join(line[i].ljust(widths[i]) for i in used).rstrip() for line in lines)
    rule = "-" * max(map(len, (head, *rows)))
    idle = [block.layer for block in memory if block.never_seen or not block.layer.weight.requires_grad]
    base = sum(p.requires_grad for p in (*uncovered, *(p for layer in idle for p in layer.parameters)))
    counts = f"{_count(len(memory) - len(idle), 'layer')} preconditioned, {_count(base, 'parameter')} by the base rule"
    footer = f"{counts}, {human_bytes(sum(memory.values()))}"
    return "\n".join((title, rule, head, rule, *rows, rule, footer, *remarks))


def _row_of(block: Block, memory: int, comm: Communicator) -> tuple[str, ...]:
    """A layer's row of the table: a text for each column."""
    layer, workers = block.layer, block.workers
    notes = list(layer.notes)
    if len(layer.modules) > 1:
        notes.append(f"shared by {len(layer.modules)} modules")
    if not layer.weight.requires_grad:
        others = any(parameter.requires_grad for parameter in layer.parameters)
        notes.append("frozen, its bias trains by the base rule" if others else "frozen")
    elif block.never_seen:
        notes.append("never seen in a backward pass, so raw gradient (a warning lists what may be the cause)")
    elif block.out_of_sight:
        notes.append("no longer seen in backward passes, so the factors are old ones")
    elif not block.has_direction:
        notes.append("raw gradient until its first decomposition")
    elif block.is_constrained:
        notes.append("hardly stretched: its weights are changed between steps")
    a, g = (f"{spec.pairs} x {spec.dim}" if spec.pairs > 1 else str(spec.dim) for spec in block.specs)
    inverse, gradient = "", ""
    if comm.world_size > 1:
        inverse = "A {}, G {}".format(*workers.inverse_workers)
        gradient = _rank_list(workers.gradient_workers)
    size = human_bytes(memory) if memory else ""
    return layer.name or "(model)", layer.rule_name, a, g, size, inverse, gradient, "; ".join(notes)


def _count(number: int, noun: str) -> str:
    """``"1 layer"``, ``"2 layers"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(count: float) -> str:
    """A number of bytes as text: ``1536`` as ``"1.5 KiB"``."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def _rank_list(ranks: Sequence[int]) -> str:
    """Ranks as text: ``(0, 1, 2, 5)`` as ``"0-2, 5"``."""
    # In a run of consecutive ranks, the difference between rank and place is the same.
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
