"""Drawings of the scaling model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.common.reports import Row, grid
from benchmarks.scaling.cluster import STAGES


def stage_bars(axes: Axes, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Draw milliseconds of the stages side by side, one colour per entry of ``bars``, on a logarithmic scale."""
    width = 0.8 / len(bars)
    for index, (label, events) in enumerate(bars.items()):
        positions = [position + (index - (len(bars) - 1) / 2) * width for position in range(len(STAGES))]
        axes.bar(positions, [1e3 * events[name] for name in STAGES], width, label=label)
    axes.set_yscale("log")
    axes.set_xticks(range(len(STAGES)), [name.replace(" ", "\n", 1) for name in STAGES], rotation=60, fontsize="small")
    axes.set_ylabel("ms each time")
    axes.grid(alpha=0.25, axis="y")
    axes.legend(fontsize="small")


def lines_over_ranks(axes: Axes, series: Mapping[str, Mapping[int, float]], ylabel: str, *, log: bool = True) -> None:
    """Draw curves over the number of ranks."""
    for index, (label, points) in enumerate(series.items()):
        axes.plot(list(points), list(points.values()), ".-", color=f"C{index}", label=label)
    ranks = sorted({rank for points in series.values() for rank in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25, which="both")
    axes.legend(fontsize="small")


def draw_paper(result: Mapping[str, Any], path: Path) -> None:
    """The model's picture of the paper's Figures 7, 8 and 9."""
    figure, axes = grid(
        2, 3, "The scaling model's picture of the paper's Figures 7 (stages), 8 (ResNets), 9 (BERT-Large)"
    )
    stage_bars(axes[0][0], {row["implementation"]: row["seconds"] for row in result["figure 7"]})
    axes[0][0].set_title("ResNet-50, 64 V100, every 50/500")
    models = list(dict.fromkeys(row["model"] for row in result["figure 8"]))
    for panel, model in zip((axes[0][1], axes[0][2], axes[1][0]), models, strict=True):
        rows = [row for row in result["figure 8"] if row["model"] == model]
        lines_over_ranks(panel, over(rows, "SGD"), "time to solution over SGD's", log=False)
        panel.set_title(f"{model}, V100")
    for panel, phase in zip(axes[1][1:], (1, 2), strict=True):
        rows = [row for row in result["figure 9"] if row["phase"] == phase]
        lines_over_ranks(panel, over(rows, "Fused-LAMB"), "time over Fused-LAMB's", log=False)
        panel.set_title(f"BERT-Large, phase {phase}, A100")
    figure.savefig(path, dpi=110)


def over(rows: Sequence[Row], base: str) -> dict[str, dict[int, float]]:
    """Every column of times as a curve over the number of GPUs, as multiples of the column ``base``."""
    names = dict.fromkeys(name for row in rows for name in row if name not in ("model", "phase", "GPUs", base))
    # A fraction of KAISA that is no whole number of ranks on few GPUs has no entry there.
    return {name: {row["GPUs"]: row[name] / row[base] for row in rows if row.get(name)} for name in names}


def draw_beyond(rows: Sequence[Row], path: Path) -> None:
    """Overhead, memory and refresh by strategy up to thousands of ranks."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = {"K-FAC per step, ms": "ms per step", "refresh, s": "s per refresh", "memory, GB": "GB, fullest rank"}
    figure, axes = grid(len(models), len(columns), "kfac_optim on large clusters, as the scaling model predicts it")
    for line, model in zip(axes, models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        for panel, (key, label) in zip(line, columns.items(), strict=True):
            series: dict[str, dict[int, float]] = {}
            for row in mine:
                series.setdefault(row["strategy"], {})[row["ranks"]] = row[key]
            lines_over_ranks(panel, series, label, log="GB" not in label)
            panel.set_title(f"{model}, {mine[0]['schedule']}", fontsize="medium")
    figure.savefig(path, dpi=110)


def draw_measured(rows: Sequence[Row], path: Path) -> None:
    """Weak scaling on real ranks: milliseconds of the stages by strategy and number of ranks."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    largest = max(row["ranks"] for row in rows)
    figure, axes = grid(2, len(models), "Weak scaling on Gloo ranks of one machine")
    for column, model in enumerate(models):
        mine = [row for row in rows if row["model"] == model]
        bars = {row["strategy"]: row["events"] for row in mine if row["ranks"] == largest}
        stage_bars(axes[0][column], bars)
        axes[0][column].set_title(f"{model}, {largest} ranks")
        series: dict[str, dict[int, float]] = {}
        for row in mine:
            series.setdefault(row["strategy"], {})[row["ranks"]] = 1e3 * row["step"]
        lines_over_ranks(axes[1][column], series, "ms per step, mean")
    figure.savefig(path, dpi=110)


def draw_validated(rows: Sequence[Row], path: Path) -> None:
    """Predicted over measured milliseconds, by stage."""
    figure, axes = grid(1, 2, "The model against measurements (dotted: 25 % either way)")
    for panel, fitted in zip(axes[0], (True, False), strict=True):
        mine = [row for row in rows if row["fitted"] == fitted]
        for index, name in enumerate(STAGES):
            points = [(row["measured"], row["predicted"]) for row in mine if row["stage"] == name]
            panel.plot(*zip(*points, strict=True) if points else ((), ()), ".", color=f"C{index}", label=name)
        ends = [min(row["measured"] for row in rows), max(row["measured"] for row in rows)]
        for factor, style in ((1.0, "-"), (1.25, ":"), (0.8, ":")):
            panel.plot(ends, [factor * end for end in ends], style, color="grey", linewidth=1)
        panel.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
        panel.set_title("runs used for fitting" if fitted else "other runs")
        panel.grid(alpha=0.25)
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=110)
