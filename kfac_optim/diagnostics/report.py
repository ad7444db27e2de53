"""Reports about the curvature, as plain data and text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from ..blocks import Block, InUse
from ..damping import value_of
from ..layers import KroneckerLayer
from ..snapshots import AG
from ..stages import Staged, Stages
from ..steering import LEAST_REACH
from .memory import memory_of


def factors(engine: Staged, layer: KroneckerLayer | str) -> tuple[Tensor, Tensor]:
    """The running averages A ``[p, d_in, d_in]`` and G ``[p, d_out, d_out]`` of a layer (diagonals: ``[p, d]``).

    A factor that is kept as b blocks of m rows is ``[p b, m, m]``; zeros may fill up the last block.

    Raises:
        ValueError: If no such layer is preconditioned.
        RuntimeError: Before the first step, for a layer that has been frozen since, or if another rank keeps one.
    """
    block = next((block for block in engine.stages.blocks if layer in (block.layer, block.layer.name)), None)
    if block is None:
        raise ValueError(f"layer={layer!r}: no such layer is preconditioned; print(optimizer.curvature) lists them")
    if not block.state:
        raise RuntimeError(
            f"the factors of {block.layer.name!r}: there are none before the first step(), nor for a frozen layer"
        )
    current = block.factors("current")
    if not (current.kept(0) and current.kept(1)):
        of_a, of_g = block.workers.inverse_workers
        raise RuntimeError(
            f"the factors of {block.layer.name!r} are on ranks {of_a} (A) and {of_g} (G): ask there, or take them from "
            "the full_state_dict() of the optimizer, which all ranks have to call"
        )
    return current.matrix(0), current.matrix(1)


def reach(engine: Staged) -> float:
    """The largest share of the stretch along flat directions that a layer's steps get (:mod:`~.reach`)."""
    stages = engine.stages
    return max((block.reach for block in stages.blocks), default=0.0) if stages.plan().stretches else 0.0


def workers(engine: Staged) -> dict[str, Any]:
    """Which ranks work on which layers; the same on every rank.

    Returns:
        ``layers``: by layer name the ranks that decompose ``A`` and ``G``, and the list of those that ``precondition``
        the layer; ``loads``: the decompositions' multiply-adds on each rank, up to a constant.
    """
    found = {}
    for block in engine.stages.blocks:
        inverse: dict[str, int] = dict(zip(AG, block.workers.inverse_workers, strict=True))
        found[block.layer.name] = {**inverse, "precondition": list(block.workers.gradient_workers)}
    return {"layers": found, "loads": list(engine.stages.ranks.assignment.loads)}


def report(engine: Staged, *, eigenvalues: bool = False) -> dict[str, Any]:
    """Plain floats and ints for logging, nested; :func:`.flatten` makes one level of them.

    The first call after a refresh computes the eigenvalues of each factor; others cost little. Nothing is sent.
    ``eigenvalues``: adds ``eigenvalues`` to the spectra, a list of floats, largest first, all pairs together.

    Returns:
        A nested dict with these entries.

        - ``step``: the number of steps taken.
        - ``trust``: how far the coming step turns from the base optimizer's own update to K-FAC's direction, in
          [0, 1] (:mod:`~.trust`).
        - ``brake``: what K-FAC's direction was multiplied by in the last step that computed one, in (0, 1].
        - ``graft``: how much of the base optimizer's length K-FAC's direction has in the coming step, in [0, 1].
        - ``reach``: the largest ``reach`` of a layer; 0 where steps are not stretched.
        - ``skipped_steps``: the number of steps with a gradient that was not finite.
        - ``skipped_batches``: the number of micro-batches with statistics that were not finite, in other steps.
        - ``failed_decompositions``: how many times a layer had to keep its last decompositions, over all refreshes.
        - ``staleness``: steps since the factors in use were frozen; None before the first refresh. It grows while
          networks seem to train against each other, as nothing is refreshed then (:mod:`~.opponents`).
        - ``traffic``: by kind, the bytes ``sent`` and ``received`` by this rank per step. The kinds are "counts",
          "factors", "decompositions", "directions", "gradients" (shards sent to the ranks that precondition them)
          and "state" (factors that were moved or gathered); see :mod:`kfac_optim.distributed`.
        - ``layers``: by layer name

          - ``A``, ``G``: ``min``, ``mean``, ``max`` and ``condition`` of the eigenvalues in use; None where another
            rank keeps the factor.
          - ``damping``: gamma of the coming step, the mean over the layer's pairs.
          - ``condition``: the condition number of ``A (x) G + gamma I``, from these extremes; None where a factor
            is on another rank.
          - ``cosine``: between the direction and what was preconditioned, a first moment or gradient, in the first
            step after the last refresh; None where its shards went to another rank.
          - ``reach``: the share of the stretch that a step gets, 0.0003 to 3 (recurrent layers: to 0.05); 0 where steps
            are not stretched (:mod:`~.reach`).
    """
    stages = engine.stages
    damping, progress, frozen_at = stages.config.damping_object, stages.progress, stages.refresher.frozen_at
    value, steps, plan = value_of(damping, progress.step), max(1, progress.taken), stages.plan()
    return {
        "step": progress.step,
        "trust": plan.trust,
        "brake": plan.brake.last,
        "graft": plan.graft,
        "reach": reach(engine),
        "skipped_steps": progress.skipped_steps,
        "skipped_batches": stages.averaging.skipped_batches,
        "failed_decompositions": stages.refresher.failed_decompositions,
        "staleness": None if frozen_at is None else progress.step - frozen_at,
        "traffic": {
            kind: {"sent": sent / steps, "received": received / steps}
            for kind, (sent, received) in stages.comm.traffic.items()
        },
        "layers": {
            block.layer.name: {
                **_report_of(used, value * used.damping_unit(damping), full=eigenvalues),
                "reach": block.reach if plan.stretches else 0.0,
            }
            for block in stages.blocks
            if (used := block.in_use) is not None
        },
    }


def _report_of(used: InUse, gamma: Tensor, *, full: bool) -> dict[str, Any]:
    """A layer's part of :func:`report`, at a damping of ``gamma``, ``[p]``; None for what only another rank knows."""
    spectra = zip(AG, used.eigenvalues(), strict=True)
    report: dict[str, Any] = {name: None if values is None else spectrum(values, full=full) for name, values in spectra}
    (a, g), damping = (report[name] for name in AG), float(gamma.mean())
    # For a layer with several pairs this is roughly an upper bound: the extremes may belong to different pairs.
    damped = (a["max"] * g["max"] + damping) / (a["min"] * g["min"] + damping) if a and g else None
    report["damping"], report["condition"] = damping, damped
    report["cosine"] = None if used.cosine is None else float(used.cosine)
    return report


def spectrum(values: Tensor, *, full: bool = False) -> dict[str, Any]:
    """Eigenvalues, largest first, as ``min``, ``mean``, ``max`` and ``condition``, infinite if the smallest is 0.

    ``full``: whether to add all of them, as the list ``eigenvalues``.
    """
    low, high = float(values[-1]), float(values[0])
    found = {"min": low, "mean": float(values.mean()), "max": high, "condition": high / low if low else math.inf}
    return {**found, "eigenvalues": values.tolist()} if full else found


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


def overview(engine: Staged) -> str:
    """The text of ``print(engine)``: a title, the coverage table, and remarks."""
    stages = engine.stages
    config, at, plan, comm = stages.config, stages.progress.step, stages.plan(), stages.comm
    title, largest = f"Curvature after {_count(at, 'step')}", reach(engine)
    if any(block.layer.weight.requires_grad for block in stages.blocks):  # else there is nothing to turn or stretch
        title += f", trust {plan.trust:.1f}" if plan.learns else ""
        if plan.stretches:
            title += f", reach up to {largest:.2g}" if largest > LEAST_REACH else ", reach at its least"
    if stages.closed:
        title += ", closed: steps are the base class's own"
    elif stages.sits_out:
        title += ", steps left to the base optimizer: two networks seem to train against each other"
        title += " (if actor and critic: scaling=Graft(stretch=True))"
    remarks = []
    if not stages.ranks.alone:
        balance = f"largest / mean = {stages.ranks.assignment.imbalance:.2f}"
        remarks.append(f"rank {comm.rank} of {comm.world_size}, load of the decompositions: {balance}")
    pace = stages.refresher.pace
    interval = pace.interval(config, at)
    if interval > config.at("inv_update_steps", at) and not stages.closed:
        first = f", from step {pace.least(config)} on" if stages.refresher.frozen_at is None else ""
        remarks.append(f"a refresh is as much work as {pace.work} steps: one in {interval} steps{first}")
    return "\n".join((title, *_table(stages), *remarks))


def _table(stages: Stages) -> list[str]:
    """The coverage table as lines of aligned text; columns that are empty in all rows are left out."""
    comm, uncovered = stages.comm, stages.trained.uncovered
    memory = {block: sum(memory_of(stages, block, comm.rank).values()) for block in stages.blocks}
    lines = [_HEADER, *(_row_of(stages, block, nbytes) for block, nbytes in memory.items())]
    lines += [(name, "base", *[""] * 5, reason) for name, reason in uncovered.values()]
    used = [i for i in range(len(_HEADER)) if i == 0 or any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in used}
    head, *rows = ("  ".join(line[i].ljust(widths[i]) for i in used).rstrip() for line in lines)
    dashes = "-" * max(map(len, (head, *rows)))
    never_seen = stages.sightings.has_never_seen
    resting = [b for b in memory if stages.closed or never_seen(b) or not b.layer.weight.requires_grad]
    own = [p for block in resting for p in block.layer.parameters]
    base = sum(p.requires_grad for p in (*uncovered, *own))
    footer = [f"{_count(len(memory) - len(resting), 'layer')} preconditioned"]
    waiting = sum(not block.has_direction for block in memory if block not in resting)
    if waiting and stages.progress.step:
        footer.append(f"{waiting} of them not yet")
    footer += [f"{_count(base, 'parameter')} by the base rule", human_bytes(sum(memory.values()))]
    return [dashes, head, dashes, *rows, dashes, ", ".join(footer)]


def _row_of(stages: Stages, block: Block, memory: int) -> tuple[str, ...]:
    """A layer's row of the table: a text for each column."""
    layer, workers, comm = block.layer, block.workers, stages.comm
    notes = list(layer.notes)
    if len(layer.modules) > 1:
        notes.append(f"shared by {len(layer.modules)} modules")
    if not layer.weight.requires_grad:
        others = any(parameter.requires_grad for parameter in layer.parameters)
        notes.append("frozen, its bias trains by the base rule" if others else "frozen")
    elif stages.closed:
        notes.append("by the base rule, as the curvature is closed")
    elif stages.sightings.has_never_seen(block):
        notes.append("never seen in a backward pass, so by the base rule (a warning lists what may be the cause)")
    elif stages.sightings.has_lost(block):
        notes.append("no longer seen in backward passes, so the factors are old ones")
    elif not block.has_direction:
        unseen = stages.progress.step and not block.has_data()
        notes.append(
            "by the base rule until its first decomposition" + ("; nothing seen of it so far" if unseen else "")
        )
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
