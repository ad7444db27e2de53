"""The cost model fitted to some of the measured runs, and what it then predicts of the others.

Fitted are launch, flops, bytes and bookkeeping of one rank, an eigendecomposition's ``a + b n^2 + c n^3``, the cores
that ranks share, latency and bandwidth, and one correction per stage; larger models than the fitted ones are predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.common.reports import table
from benchmarks.scaling import paper
from benchmarks.scaling.cluster import FOLD, KINDS, STAGES, Device, Network, predict
from benchmarks.scaling.measure import COMMUNICATION, SCHEDULE, SMALL, STRATEGIES, SUBJECTS
from benchmarks.scaling.workload import Work, Workload, total


def nonnegative(columns: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Non-negative coefficients of the columns with the least squared relative error."""
    matrix = np.asarray(columns, float).T / np.asarray(wanted)[:, None]
    sizes = np.linalg.norm(matrix, axis=0)  # of very different units
    return (nnls(matrix / sizes, np.ones(len(wanted)))[0] / sizes).tolist()


def fit(rows: Sequence[Mapping[str, Any]], works: Mapping[str, Workload], cores: int) -> tuple[Device, Network]:
    """The constants of this machine, from the rows marked as fitted."""
    rows = [row for row in rows if row["fitted"] and row["strategy"] != "SGD"]
    alone = [row for row in rows if row["ranks"] == 1]
    device = fit_device(alone, works)
    together = [row for row in rows if row["ranks"] > 1]
    everyone = max(row["ranks"] for row in rows)
    network = Network(everyone, 1e12, 1e12, 0.0, pipelined=False)

    def error(candidate: float) -> float:
        shared = replace(device, cores=candidate)
        same = ("factor computation", "preconditioning")
        return sum(
            abs(np.log(events[name] / row["events"][name]))
            for row in together
            for events in (predicted(row, works, shared, network),)
            for name in same
        )

    if together:
        device = replace(device, cores=float(min((cores * share for share in np.linspace(0.5, 1, 26)), key=error)))
        network = fit_network(together, works, device, network)
    ratios: dict[str, list[float]] = {name: [] for name in STAGES}
    for cell in compare(rows, works, device, network):
        ratios[cell["stage"]].append(cell["measured"] / cell["predicted"])
    corrections = {name: statistics.median(found) for name, found in ratios.items() if found}
    return replace(device, corrections=corrections), network


def fit_device(rows: Sequence[Mapping[str, Any]], works: Mapping[str, Workload]) -> Device:
    """What one rank computes with, from runs of a single one."""
    notes = [note for row in rows for note in row["decompositions"]]
    per_pair = [seconds / pairs for _, pairs, seconds in notes]
    a, b, c = nonnegative([[1.0] * len(notes), *([n**power for n, *_ in notes] for power in (2, 3))], per_pair)
    equations: list[tuple[Work, int, float]] = []
    for row in rows:
        layers = works[row["model"]].layers
        kinds = {
            "factor computation": total(layer.statistics for layer in layers),
            "factor update": FOLD * works[row["model"]].packed_numbers,
            "preconditioning": total(layer.preconditioning for layer in layers),
            "scaling": total(layer.scaling for layer in layers),
        }
        equations += [(work, len(layers), row["events"][name]) for name, work in kinds.items()]
    works_, counts, seconds = zip(*equations, strict=True)
    columns = [[w.operations for w in works_], [w.flops for w in works_], [w.bytes for w in works_], counts]
    launch, flop, byte, layer = (max(x, 1e-15) for x in nonnegative(columns, seconds))
    return Device("this machine", 1 / flop, 1 / flop, 1 / byte, launch, (a, b, c), layer)


def fit_network(
    rows: Sequence[Mapping[str, Any]], works: Mapping[str, Workload], device: Device, start: Network
) -> Network:
    """Latency and bandwidth, in which the seconds of communication are linear."""
    zero = replace(start, latency=0.0, rank_bandwidth=1e18)
    probes = (zero, replace(zero, latency=1.0), replace(zero, rank_bandwidth=1.0))
    columns: list[list[float]] = [[], []]
    wanted = []
    for row in rows:
        base, hops, load = (predicted(row, works, device, probe) for probe in probes)
        for name in COMMUNICATION:
            if load[name] - base[name] > 0 and row["events"][name] > base[name]:
                wanted.append(row["events"][name] - base[name])
                columns[0].append(hops[name] - base[name])
                columns[1].append(load[name] - base[name])
    latency, byte = nonnegative(columns, wanted)
    return replace(start, latency=latency, rank_bandwidth=1 / max(byte, 1e-18))


def predicted(
    row: Mapping[str, Any], works: Mapping[str, Workload], device: Device, network: Network
) -> Mapping[str, float]:
    """Seconds of the stages of a measured row, on the cores that other processes left."""
    strategy = STRATEGIES[row["strategy"]]
    assert strategy is not None
    left = replace(device, cores=max(0.1, device.cores - row["others"]))
    return predict(works[row["model"]], row["ranks"], strategy, left, network, SCHEDULE).events


def compare(
    rows: Sequence[Mapping[str, Any]], works: Mapping[str, Workload], device: Device, network: Network
) -> Iterator[dict[str, Any]]:
    """Every stage of every row: measured and predicted milliseconds."""
    for row in rows:
        if row["strategy"] == "SGD":
            continue
        events = predicted(row, works, device, network)
        for name in STAGES:
            measured = row["events"][name]
            if measured > 0 and (name not in COMMUNICATION or works_to_send(row, name)):
                head = {key: row[key] for key in ("model", "strategy", "ranks", "fitted")}
                error = events[name] / measured - 1
                yield {
                    **head,
                    "stage": name,
                    "measured": 1e3 * measured,
                    "predicted": 1e3 * events[name],
                    "error": error,
                }


def works_to_send(row: Mapping[str, Any], stage: str) -> bool:
    """Whether anything is sent in a stage."""
    kind = {"factor": "factors", "decomposition": "decompositions", "gradient": "directions"}[stage.split()[0]]
    return any(row["received"][kind])


def validate(measurements: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Fit to some runs, predict the others.

    Returns:
        The result, and its tables.
    """
    rows = measurements["rows"]
    names = dict.fromkeys(row["model"] for row in rows)
    works = {name: {**SUBJECTS, **SMALL}[name].workload(name) for name in names}
    device, network = fit(rows, works, measurements["machine"]["cores"])
    cells = list(compare(rows, works, device, network))
    by_stage = []
    for name in (*STAGES, "all stages"):
        chosen = [cell for cell in cells if name in (cell["stage"], "all stages")]
        line: dict[str, Any] = {"stage": name}
        for label, fitted in {"runs used for fitting": True, "other runs": False}.items():
            errors = [abs(cell["error"]) for cell in chosen if cell["fitted"] == fitted]
            line[label] = len(errors)
            line[f"{label}: median error"] = paper.percent(statistics.median(errors)) if errors else None
        by_stage.append(line)
    others = [abs(cell["error"]) for cell in cells if not cell["fitted"]]
    traffic = [check_traffic(row, works) for row in rows if row["ranks"] > 1 and row["strategy"] != "SGD"]
    result = {
        "device": asdict(device),
        "network": asdict(network),
        "median error, other runs": statistics.median(others) if others else None,
        "by stage": by_stage,
        "traffic": traffic,
        "cells": cells,
    }
    tables = [
        table("Error of a stage's predicted time", by_stage),
        table("Largest difference between predicted and counted bytes of a rank", traffic),
    ]
    return result, "\n".join(tables)


def check_traffic(row: Mapping[str, Any], works: Mapping[str, Workload]) -> dict[str, Any]:
    """Predicted less counted bytes per step, of the rank where they differ most."""
    strategy = STRATEGIES[row["strategy"]]
    assert strategy is not None
    made = predict(works[row["model"]], row["ranks"], strategy, paper.V100, paper.LONGHORN, SCHEDULE)
    differences = {
        kind: max(
            float(np.abs(np.asarray(row[side][kind]) - getattr(made, side)[kind]).max())
            for side in ("sent", "received")
        )
        for kind in KINDS
    }
    head = {key: row[key] for key in ("model", "strategy", "ranks")}
    memory = max(abs(a - b) for a, b in zip(row["memory"], made.memory.tolist(), strict=True))
    return {**head, **differences, "memory": memory}
