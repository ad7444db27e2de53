"""How many kernels a step launches and how often it waits for the device: ``python -m benchmarks.launches``.

No GPU is needed and nothing is computed: the package's own code runs on simulated CUDA tensors (:mod:`.simulate` says
how they are counted, :mod:`.count` which steps there are). It needs g++, once. At small batches launches and waits are
what a step on a GPU costs. Prints a table for each model and the places in the package that launch most, and writes
both to ``STEM.txt`` and ``STEM.json`` in ``benchmarks/results/launches/``; STEM is ``main``, or names the models
that were asked for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.common.reports import Command, table
from benchmarks.common.works import SMOKE_WORKS, WORKS
from benchmarks.launches.device import obstacle
from benchmarks.launches.simulate import ELSEWHERE

# Model, batch, optimizer.
MODELS = {"resnet50": (32, "KFACSGD"), "gpt-small": (8, "KFACAdam"), "bert-base": (32, "KFACLAMB")}
SMALL = {"resnet8": (None, "KFACSGD"), "transformer1": (None, "KFACLAMB")}
TOP = 10  # places listed for each kind of step
PLAIN = ("base", "ordinary", "repeated")
NOTE = """\
passes: kernels launched by forward and backward; step: by the optimizer's step. share: what an ordinary step launches
beside the passes, and what the other kinds launch beyond an ordinary step with its passes; forward + backward = 1.
waits: how often the host waits for the device. ms: estimate for an H200, at 5 us a launch, without decompositions."""


def count(model: str, batch: int | None, optimizer: str) -> dict[str, Any]:
    """Return the counts of a model's kinds of step, from a process of its own."""
    given = json.dumps({"name": model, "batch": batch, "optimizer": optimizer})
    command = [sys.executable, "-m", "benchmarks.launches.count", given]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    counts: dict[str, Any] = json.loads(found)
    return counts


def rows_of(counts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of step."""
    base = counts["base"]["passes"]["launches"]
    ordinary = sum(part["launches"] for part in counts["ordinary"].values())
    for kind, parts in counts.items():
        passes, step = parts["passes"], parts["step"]
        beyond = step["launches"] if kind in PLAIN else passes["launches"] + step["launches"] - ordinary
        row = {"step of": kind, "passes": passes["launches"], "step": step["launches"], "share": f"{beyond / base:.2f}"}
        row["waits"] = passes["waits"] + step["waits"]
        row["ms"] = 1e3 * (passes["seconds"] + step["seconds"])
        yield {**row, "peak MiB": max(part["peak"] for part in parts.values()) / 2**20}


def places_of(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the places in the package that launch most in a kind of step, and those that wait most."""
    launches: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    for part in parts.values():
        launches.update(part["launched_at"])
        waits.update(part["waited_at"])
    del launches[ELSEWHERE]
    chosen = [place for found in (launches, waits) for place, _ in found.most_common(TOP)]
    return [
        {"place": place, "launches": launches[place], "waits": waits[place] or None} for place in dict.fromkeys(chosen)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    command = Command("launches", __doc__)
    models = f"{', '.join(MODELS)}; may be repeated"
    command.add_argument("--only", action="append", choices=MODELS, metavar="MODEL", help=models)
    options, output = command.start(arguments, "tiny models")
    if reason := obstacle():
        command.error(reason)
    works = SMALL if options.smoke else {name: MODELS[name] for name in options.only or MODELS}
    stem = "-".join(options.only or ["main"])
    results, tables = [], []
    for name, (batch, optimizer) in tqdm(works.items(), desc="models"):
        counts = count(name, batch, optimizer)
        work = {**WORKS, **SMOKE_WORKS}[name]
        title = f"{work.label}, {batch or work.batch} examples, {optimizer}"
        rows = list(rows_of(counts))
        places = {kind: places_of(parts) for kind, parts in counts.items() if kind not in ("base", "first")}
        results.append({"model": name, "batch": batch, "optimizer": optimizer, "rows": rows, "places": places})
        tables.append(table(title, rows, NOTE))
        tables += [table(f"{title}: {kind}, by place", found) for kind, found in places.items()]
        output.save(stem, {"results": results}, "\n".join(tables))
    print("\n".join(tables))
    print(f"written: {output.folder / stem}.json, .txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
