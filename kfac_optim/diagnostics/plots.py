"""Pictures of what the engine reports.

They are matplotlib figures, made without pyplot, that need no display: save one by ``figure.savefig(path)``, or show it
in a notebook or by TensorBoard's ``add_figure``. The functions that draw import matplotlib, or raise ImportError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..damping import split

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which people with a colour vision deficiency can tell apart.
_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
_COLOURS = (_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PURPLE, "#000000", "#999999")
_LINES = 8  # more layers than this are drawn as an image, or as median and range


def _figure(width: float, height: float) -> Figure:
    """An empty figure with a canvas of its own, of a width and height in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib, or kfac_optim[plots]") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Labels the rows of an image, from the top; if there are very many, only every n-th."""
    every = math.ceil(len(names) / 120)
    shown = [name or "(model)" for name in names[::every]]
    axes.set_yticks(range(0, len(names), every), shown, fontsize=9 if len(names) <= 30 else 6)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _height(rows: int) -> float:
    """Height in inches of an image with this many rows."""
    return min(22.0, 0.25 * rows if rows <= 30 else 4.0 + 0.12 * rows)


def _in_damping(layer: Mapping[str, Any], side: str) -> list[float]:
    """The eigenvalues of A or G in a layer's report, divided by the factor's share of the layer's damping (eq. 9)."""
    numbers = layer["damping"], layer["A"]["mean"], layer["G"]["mean"]
    share = float(split(*torch.tensor(numbers, dtype=torch.float64, device="cpu"))["AG".index(side)])
    return [value / share for value in layer[side]["eigenvalues"]]


def _known(layers: Mapping[str, Any]) -> dict[str, Any]:
    """The layers of a report whose factors are both on its rank."""
    return {name: layer for name, layer in layers.items() if layer["A"] and layer["G"]}


def plot_spectrum(report: Mapping[str, Any]) -> Figure:
    """The eigenvalues of A and G of every layer, largest first, on a log scale, against the damping.

    Eigenvalues are divided by their factor's share of the layer's damping, so that a single mark at 1 is right for all
    layers: the quotients of an eigenvalue a of A and an eigenvalue g of G multiply to ``a g / gamma``. Above the mark
    the curvature dominates, below it the damping. Up to 8 layers are drawn as lines, more as rows of an image, with the
    mark as a black line.

    Args:
        report: ``engine.report(eigenvalues=True)``; layers of which other ranks keep a factor are left out.

    Raises:
        ValueError: If it has no eigenvalues.
    """
    layers = _known(report["layers"])
    if not all("eigenvalues" in layer[side] for layer in layers.values() for side in "AG") or not layers:
        raise ValueError("no eigenvalues to draw: pass engine.report(eigenvalues=True), after the first refresh")
    few = len(layers) <= _LINES
    figure = _figure(11, 5 if few else 1.5 + _height(len(layers)))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, side in zip(panels, "AG", strict=True):
        spectra = {name: _in_damping(layer, side) for name, layer in layers.items()}
        axes.set_title(f"eigenvalues of {side}")
        axes.set_xlabel("position in the spectrum: 0 largest, 1 smallest")
        image = _spectrum_lines(axes, spectra) if few else _spectrum_image(axes, spectra)
    if few:
        panels[0].set_ylabel("eigenvalue / its share of the damping")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    else:
        _rows(panels[0], list(layers))
        label = "eigenvalue / its share of the damping (black line: 1)"
        bar = figure.colorbar(image, ax=list(panels), label=label, aspect=40, extend="both", extendfrac=0.02)
        bar.set_ticks(range(-3, 4), labels=[f"$10^{{{power}}}$" for power in range(-3, 4)])
    figure.suptitle(f"Spectra of the factors in use, step {report['step']}")
    return figure


def _spectrum_lines(axes: Axes, spectra: Mapping[str, Sequence[float]]) -> Any:
    """Draws a few spectra (by layer name, largest eigenvalue first) as lines."""
    for colour, (name, values) in zip(_COLOURS, spectra.items(), strict=False):
        places = [(i + 0.5) / len(values) for i in range(len(values))]
        marker = "." if len(values) <= 20 else ""
        axes.plot(places, values, color=colour, marker=marker, label=f"{name or '(model)'} ({len(values)})")
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1.2, label="damping")
    axes.set_yscale("log", nonpositive="clip")
    highest = max(10.0, *(values[0] for values in spectra.values()))
    lowest = min(0.1, *(values[-1] for values in spectra.values()))
    axes.set_ylim(max(lowest / 2, 1e-6), 2 * highest)  # anything smaller is effectively zero
    axes.set_xlim(0, 1)
    axes.grid(alpha=0.25)


def _spectrum_image(axes: Axes, spectra: Mapping[str, Sequence[float]]) -> Any:
    """Draws many spectra as an image: a row per layer, places in the spectrum as columns, powers of ten as colours."""
    columns = 200
    table = [
        [math.log10(max(values[int((c + 0.5) / columns * len(values))], 1e-12)) for c in range(columns)]
        for values in spectra.values()
    ]
    extent = (0.0, 1.0, len(table) - 0.5, -0.5)
    image = axes.imshow(table, cmap="RdBu_r", vmin=-3, vmax=3, extent=extent, aspect="auto", interpolation="nearest")
    # The line at 1 is a staircase: in each row at the share of the eigenvalues that are above it.
    above = [sum(value > 1 for value in values) / len(values) for values in spectra.values()]
    edges = [edge - 0.5 for row in range(len(above)) for edge in (row, row + 1)]
    axes.plot([share for share in above for _ in range(2)], edges, color="black", linewidth=1.2)
    return image


def plot_history(history: Sequence[Mapping[str, Any]]) -> Figure:
    """Condition numbers and staleness over training.

    Up to 8 layers are drawn as a line each; for more, the median, the range over all layers, and the layer that is
    worst at the end. A singular factor (infinite condition number) is drawn as a triangle at 10 times the largest
    finite condition number.

    Args:
        history: What ``engine.report()`` returned at different steps, in order. Staleness shows its sawtooth only if
            there is one for every step; entries without ``layers`` count for staleness alone. Layers of which other
            ranks keep a factor are left out.

    Raises:
        ValueError: If it is empty.
    """
    if not history:
        raise ValueError("an empty history: append engine.report() to it during training")
    history = [{**entry, "layers": _known(entry.get("layers", {}))} for entry in history]
    figure = _figure(12, 7)
    (left, right), (damped, stale) = figure.subplots(2, 2, sharex=True)
    _conditions(left, "A", history, lambda layer: layer["A"]["condition"])
    _conditions(right, "G", history, lambda layer: layer["G"]["condition"])
    _conditions(damped, "A \u2297 G + damping", history, lambda layer: layer["condition"])
    points = [(entry["step"], entry["staleness"]) for entry in history if entry["staleness"] is not None]
    stale.plot(*zip(*points, strict=True) if points else ([], []), color=_BLUE, marker=".", markersize=3)
    stale.set_title("staleness: age of the factors in use")
    stale.set_ylabel("steps")
    stale.set_ylim(bottom=0)
    for axes in (left, right, damped, stale):
        axes.grid(alpha=0.25)
    for axes in (damped, stale):
        axes.set_xlabel("step")
    return figure


def _conditions(
    axes: Axes, matrix: str, history: Sequence[Mapping[str, Any]], condition_of: Callable[[Any], float | None]
) -> None:
    """Draws the condition number of a matrix, which is a part of each layer's report, over the steps."""
    axes.set_title(f"condition number of {matrix}")
    curves: dict[str, dict[int, float]] = {}
    style: dict[str, Any]
    for entry in history:
        for name, layer in entry["layers"].items():
            value = condition_of(layer)  # infinite numbers become None in JSON
            curves.setdefault(name or "(model)", {})[entry["step"]] = math.inf if value is None else value
    finite = [value for curve in curves.values() for value in curve.values() if value < math.inf]
    top = 10 * max(finite, default=1.0)
    curves = {name: {step: min(value, top) for step, value in curve.items()} for name, curve in curves.items()}
    if 0 < len(curves) <= _LINES:
        for colour, (name, curve) in zip(_COLOURS, curves.items(), strict=False):
            axes.plot(list(curve), list(curve.values()), color=colour, marker=".", markersize=4, label=name)
    elif curves:
        steps = sorted({step for curve in curves.values() for step in curve})
        columns = [[curve[step] for curve in curves.values() if step in curve] for step in steps]
        least, middle, most = ([reduce(column) for column in columns] for reduce in (min, median, max))
        # Layers whose curve ends earlier are never the worst.
        worst = max(curves, key=lambda name: list(curves[name].items())[-1])
        axes.fill_between(steps, least, most, color=_SKY, alpha=0.35, label=f"all {len(curves)}")
        style = {"color": _RED, "linestyle": "--", "marker": ".", "markersize": 4, "label": f"{worst} (worst)"}
        axes.plot(list(curves[worst]), list(curves[worst].values()), **style)
        axes.plot(steps, middle, color=_BLUE, linewidth=2, marker=".", label="median of the layers")
    # Only infinite values were cut to `top`.
    singular = sorted({step for curve in curves.values() for step, value in curve.items() if value == top})
    if singular:
        count = sum(list(curve.values())[-1] == top for curve in curves.values())
        style = {"color": "black", "markersize": 5, "zorder": 1.5, "label": f"singular (at the end: {count})"}
        axes.plot(singular, [top] * len(singular), "^", **style)
    if curves:
        axes.set_yscale("log")
        axes.legend(fontsize="small")


def plot_profile(profile: Mapping[str, Mapping[str, float]]) -> Figure:
    """The milliseconds that the engine's stages took, the longest on top.

    Args:
        profile: ``engine.profile()``.
    """
    figure = _figure(9, 1.2 + 0.4 * max(1, len(profile)))
    axes = figure.subplots()
    stages = sorted(profile.items(), key=lambda stage: -stage[1]["ms"])
    colours = [_ORANGE if name.endswith("communication") else _BLUE for name, _ in stages]
    bars = axes.barh(range(len(stages)), [row["ms"] for _, row in stages], color=colours)
    notes = [f"{row['ms']:.4g} ms = {row['calls']:.0f} \u00d7 {row['ms_per_call']:.3g}" for _, row in stages]
    axes.bar_label(bars, notes, padding=4, fontsize="small")
    axes.margins(x=0.3)
    axes.set_yticks(range(len(stages)), [name for name, _ in stages])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds in total")
    title = f"Time of the stages of curvature: {sum(row['ms'] for _, row in stages):.4g} ms"
    axes.set_title(title + " (orange: communication)" * (_ORANGE in colours))
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    return figure


# What a rank does for a layer, as the sum of 1 (preconditions), 2 (decomposes A) and 4 (decomposes G).
_DUTIES = {
    1: ("preconditions", "#D9D9D9"),
    2: ("decomposes A", _SKY),
    3: ("decomposes A, preconditions", _BLUE),
    4: ("decomposes G", "#F5D491"),
    5: ("decomposes G, preconditions", _ORANGE),
    6: ("decomposes A and G", "#E6BCD3"),
    7: ("decomposes A and G, preconditions", _PURPLE),
}


def plot_assignment(workers: Mapping[str, Any]) -> Figure:
    """Which rank decomposes and preconditions which layer, and above that the decomposition load of each rank.

    Args:
        workers: ``engine.workers()``.

    Raises:
        ValueError: If no layer is preconditioned.
    """
    layers, loads = workers["layers"], workers["loads"]
    if not layers:
        raise ValueError("no layers to draw: print(optimizer.curvature) says why none is preconditioned")
    figure = _figure(min(16.0, 6 + 0.25 * len(loads)), 2.8 + _height(len(layers)))
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.2, max(1.0, _height(len(layers)))))
    mean = sum(loads) / len(loads) or 1.0
    upper.bar(range(len(loads)), [load / mean for load in loads], color=_BLUE)
    upper.axhline(1.0, color="black", linewidth=1)
    upper.set_ylabel("load / mean")
    duties = [
        [(rank in row["precondition"]) + 2 * (rank == row["A"]) + 4 * (rank == row["G"]) for rank in range(len(loads))]
        for row in layers.values()
    ]
    colours = ListedColormap(["white", *(colour for _, colour in _DUTIES.values())])
    lower.imshow(duties, cmap=colours, vmin=-0.5, vmax=7.5, aspect="auto", interpolation="nearest")
    lower.hlines([row + 0.5 for row in range(len(layers))], -0.5, len(loads) - 0.5, color="white", linewidth=0.6)
    lower.vlines([rank + 0.5 for rank in range(len(loads))], -0.5, len(layers) - 0.5, color="white", linewidth=0.6)
    _rows(lower, list(layers))
    lower.set_xlim(-0.5, len(loads) - 0.5)
    lower.set_xticks(range(0, len(loads), math.ceil(len(loads) / 16)))
    lower.set_xlabel("rank")
    found = sorted({duty for row in duties for duty in row} - {0})
    patches = [Patch(color=_DUTIES[duty][1], label=_DUTIES[duty][0]) for duty in found]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, fontsize="small")
    figure.suptitle("Assignment of layers to ranks")
    return figure
