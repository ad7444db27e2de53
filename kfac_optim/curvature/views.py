"""What there is to say about a block: numbers, workers, its row of the table."""

from __future__ import annotations

from typing import Any

from .. import diagnostics
from ..comm import Communicator
from .blocks import SIDES, Block, gamma_of

__all__ = ["report_of", "row_of", "workers_of"]


def report_of(block: Block, damping: float, *, relative: bool, eigenvalues: bool) -> dict[str, Any]:
    """The layer's part of :meth:`~kfac_optim.CurvatureEngine.report`; it has decompositions."""
    assert block.means is not None
    if block.spectra is None:
        block.spectra = tuple(diagnostics.eigenvalues(block.factor(side, "_last")) for side in range(2))
    spectra = zip(SIDES, block.spectra, strict=True)
    report: dict[str, Any] = {side: diagnostics.spectrum(values, full=eigenvalues) for side, values in spectra}
    report["damping"] = float(gamma_of(block.means, damping, relative=relative).mean())
    report["condition"] = diagnostics.damped_condition(report["A"], report["G"], report["damping"])
    report["cosine"] = None if block.cosine is None else float(block.cosine)
    return report


def workers_of(block: Block) -> dict[str, Any]:
    """Its part of :meth:`~kfac_optim.CurvatureEngine.workers`."""
    inverse = dict(zip(SIDES, block.workers.inverse_workers, strict=True))
    return {**inverse, "precondition": list(block.workers.gradient_workers)}


def row_of(block: Block, memory: int, comm: Communicator) -> diagnostics.Row:
    """Its row of the table; ``memory`` in bytes."""
    layer, workers = block.layer, block.workers
    notes = list(layer.notes)
    if len(layer.modules) > 1:
        notes.append(f"shared by {len(layer.modules)} modules")
    if not layer.weight.requires_grad:
        notes.append("frozen")
    elif block.means is None:
        notes.append("raw gradient until its first decomposition")
    a, g = (f"{spec.pairs} x {spec.dim}" * (spec.pairs > 1) or str(spec.dim) for spec in block.specs)
    inverse, gradient = "", ""
    if comm.world_size > 1:
        inverse = "A {}, G {}".format(*workers.inverse_workers)
        gradient = diagnostics.rank_list(workers.gradient_workers)
    return diagnostics.Row(layer.name or "(model)", layer.rule_name, a, g, memory, inverse, gradient, "; ".join(notes))
