"""Pictures of the stages of a step: by strategy, by number of ranks, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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


def draw_measured(rows: Sequence[Row]) -> Figure:
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
        panel = axes[1][column]
        for index, (label, points) in enumerate(series.items()):
            panel.plot(list(points), list(points.values()), ".-", color=f"C{index}", label=label)
        panel.set(xscale="log", yscale="log", xlabel="ranks", ylabel="ms per step, mean")
        panel.legend(fontsize="small")
    return figure


def draw_validated(rows: Sequence[Row]) -> Figure:
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
    return figure
