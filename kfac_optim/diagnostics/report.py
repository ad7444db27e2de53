"""What there is to say about the curvature, as plain data: the coverage table, spectra, flattened reports."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..blocks import SIDES, Block
from ..distributed import Communicator

__all__ = [
    "Row",
    "cosine",
    "damped_condition",
    "flatten",
    "human_bytes",
    "rank_list",
    "report_of",
    "row_of",
    "spectrum",
    "table",
    "workers_of",
]


@dataclass(frozen=True)
class Row:
    """One line of the coverage table: a layer, or a parameter without a Kronecker block.

    Attributes:
        name: Of the layer or parameter.
        rule: "Linear, expand", for instance, or "base".
        a: Shape of A as text.
        g: Shape of G.
        memory: Bytes of factors and decompositions on this rank.
        inverse_workers: Ranks that decompose A and G, as text; empty for one process.
        gradient_workers: Ranks that precondition.
        note: State of the layer, or the reason why the base rule applies.
    """

    name: str
    rule: str
    a: str = ""
    g: str = ""
    memory: int = 0
    inverse_workers: str = ""
    gradient_workers: str = ""
    note: str = ""


def table(rows: Sequence[Row], title: str, footer: str) -> str:
    """The rows as aligned text; columns that are empty everywhere are left out."""
    header = ("layer", "rule", "A", "G", "memory", "inverse workers", "gradient workers", "note")
    lines = [
        (r.name, r.rule, r.a, r.g, human_bytes(r.memory) if r.memory else "")
        + (r.inverse_workers, r.gradient_workers, r.note)
        for r in rows
    ]
    used = [i for i in range(len(header)) if i == 0 or any(line[i] for line in lines)]
    widths = {i: max(len(line[i]) for line in (header, *lines)) for i in used}
    text = ["  ".join(line[i].ljust(widths[i]) for i in used).rstrip() for line in (header, *lines)]
    rule = "-" * max(len(line) for line in text)
    return "\n".join((title, rule, text[0], rule, *text[1:], rule, footer))


def human_bytes(count: float) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def rank_list(ranks: Sequence[int]) -> str:
    """``(0, 1, 2, 5)`` as ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between two tensors, 0-dim, on their device; 0 if one of them is zero."""
    # From unit vectors: torch's own function takes products of norms below 1e-8 for that.
    return torch.dot(*(torch.nn.functional.normalize(v.flatten(), dim=0, eps=0.0).nan_to_num() for v in (x, y)))


def spectrum(values: Tensor, *, full: bool = False) -> dict[str, Any]:
    """Smallest, mean and largest of sorted eigenvalues, and condition number; ``full``: the eigenvalues too."""
    low, high = float(values[-1]), float(values[0])
    found = {"min": low, "mean": float(values.mean()), "max": high, "condition": high / low if low else math.inf}
    return {**found, "eigenvalues": values.tolist()} if full else found


def damped_condition(a: Mapping[str, float], g: Mapping[str, float], damping: float) -> float:
    """Condition number of ``A (x) G + damping I``, from the spectra of A and G: what the solver divides by.

    Near 1 the damping decides and the layer keeps its gradient's direction. Of a layer with several pairs it is about
    an upper bound: the extremes of A and of G may belong to different pairs, and ``damping`` is the mean over them.
    """
    return (a["max"] * g["max"] + damping) / (a["min"] * g["min"] + damping)


def flatten(report: Mapping[str, Any], prefix: str = "kfac") -> dict[str, float]:
    """Nested numbers as one level, for any logger.

    ``{"staleness": 3, "layers": {"conv1": {"A": {"max": 2.0}}}}`` becomes ``{"kfac/staleness": 3.0,
    "kfac/conv1/A/max": 2.0}``. What is None or a list (eigenvalues) is left out; characters that TensorBoard does not
    allow in a tag become "_".

    Args:
        report: What the engine's ``report()``, ``profile()`` or ``memory_estimate()`` returns.
        prefix: First part of every name.
    """
    flat: dict[str, float] = {}
    for key, value in report.items():
        name = prefix if key == "layers" else f"{prefix}/{re.sub(r'[^-./0-9A-Za-z_]', '_', key or 'model')}"
        if isinstance(value, Mapping):
            flat |= flatten(value, name)
        elif isinstance(value, (int, float)):
            flat[name] = float(value)
    return flat


def report_of(block: Block, gamma: Tensor, *, eigenvalues: bool) -> dict[str, Any]:
    """The layer's part of the engine's ``report()``; the layer has decompositions, and ``gamma`` is ``[p]``."""
    spectra = zip(SIDES, block.spectra(), strict=True)
    report: dict[str, Any] = {side: spectrum(values, full=eigenvalues) for side, values in spectra}
    report["damping"] = float(gamma.mean())
    report["condition"] = damped_condition(report["A"], report["G"], report["damping"])
    report["cosine"] = None if block.cosine is None else float(block.cosine)
    return report


def workers_of(block: Block) -> dict[str, Any]:
    """Its part of :meth:`~kfac_optim.CurvatureEngine.workers`."""
    inverse = dict(zip(SIDES, block.workers.inverse_workers, strict=True))
    return {**inverse, "precondition": list(block.workers.gradient_workers)}


def row_of(block: Block, memory: int, comm: Communicator) -> Row:
    """Its row of the table; ``memory`` in bytes."""
    layer, workers = block.layer, block.workers
    notes = list(layer.notes)
    if len(layer.modules) > 1:
        notes.append(f"shared by {len(layer.modules)} modules")
    if not layer.weight.requires_grad:
        notes.append("frozen")
    elif not block.has_direction:
        notes.append("raw gradient until its first decomposition")
    a, g = (f"{spec.pairs} x {spec.dim}" * (spec.pairs > 1) or str(spec.dim) for spec in block.specs)
    inverse, gradient = "", ""
    if comm.world_size > 1:
        inverse = "A {}, G {}".format(*workers.inverse_workers)
        gradient = rank_list(workers.gradient_workers)
    return Row(layer.name or "(model)", layer.rule_name, a, g, memory, inverse, gradient, "; ".join(notes))
