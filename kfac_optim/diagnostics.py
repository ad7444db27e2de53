"""Read-only views of the curvature, from plain data: coverage table, spectra, stage times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Row", "StageTimes", "cosine", "rank_list", "spectrum", "table"]


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
    return torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0)


def spectrum(factor: Tensor) -> dict[str, float]:
    """Smallest, mean and largest eigenvalue and condition number of a factor ``[p, n, n]`` or ``[p, n]``."""
    values = factor if factor.dim() == 2 else torch.linalg.eigvalsh(factor.cpu())
    low, high = float(values.min().clamp(min=0)), float(values.max())
    return {"min": low, "mean": float(values.mean()), "max": high, "condition": high / low if low else float("inf")}


class StageTimes:
    """Wall time per stage of the engine, and a ``torch.profiler`` range of the same name.

    On an accelerator the times are those of the host, which waits for the device once per step; use the profiler there.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a ``with`` block."""
        start = time.perf_counter()
        with torch.profiler.record_function(f"kfac: {name}"):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.calls[name] = self.calls.get(name, 0) + 1

    def table(self) -> dict[str, dict[str, float]]:
        """Per stage: total milliseconds, calls, milliseconds per call."""
        return {
            name: {"ms": 1e3 * seconds, "calls": self.calls[name], "ms_per_call": 1e3 * seconds / self.calls[name]}
            for name, seconds in self.seconds.items()
        }
