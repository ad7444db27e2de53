"""The saved state of the blocks: room for it, checks of one that is to be loaded, copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import SIDES, Block
from .solvers import Solver, is_iterated

__all__ = ["check_states", "copy_state", "make_room"]


def make_room(blocks: Iterable[Block], dtype: torch.dtype, *, spreads: bool) -> None:
    """Running averages for every block that has none yet; ``spreads``: also those of a refresh in progress."""
    pending = ("_last", "", "_next") if spreads else ("_last", "")
    for block in blocks:
        for side, spec in zip(SIDES, block.specs, strict=True):
            for suffix in pending:
                if f"{side}{suffix}" not in block.average:
                    block.average[f"{side}{suffix}"] = spec.empty(dtype, block.layer.weight.device)
        block.average.setdefault("damping", torch.zeros((), dtype=torch.float64))


def check_states(blocks: Iterable[Block], states: Mapping[nn.Parameter, Any], solver: Solver, *, pending: bool) -> None:
    """Raises ValueError unless the averages could be loaded; ``pending``: with those of a refresh in progress."""
    weights = {block.layer.weight: block for block in blocks}
    if any(weight not in weights for weight in states):
        raise ValueError("the state has Kronecker factors for a parameter that has none here: another model?")
    if not states:
        return
    suffixes = ("", "_last", "_next") if pending else ("", "_last")
    for weight, block in weights.items():
        known = weight in states
        problem = _problem(block, states[weight], suffixes, solver) if known else "has no Kronecker factors"
        if problem:
            raise ValueError(
                f"the state of {block.layer.name!r} {problem}: damaged, or of another model or skip_layers?"
            )


def _problem(block: Block, state: Any, suffixes: Sequence[str], solver: Solver) -> str:
    """What keeps a layer's state from being loaded; empty if nothing."""
    for side, spec in zip(SIDES, block.specs, strict=True):
        for key in (f"{side}{suffix}" for suffix in suffixes):
            problem = spec.problem(state.get(key))
            if problem:
                return f"has a {key} that {problem}"
        parts = state.get(f"{side}_basis")
        if parts is not None and is_iterated(solver):  # it is missing from a state made with another solver
            shapes = {str(i): (spec.pairs, *shape) for i, shape in enumerate(solver.shapes(spec.dim, spec.diagonal))}
            if {key: part.shape for key, part in parts.items()} != shapes:
                return f"has in {side}_basis a decomposition of another shape"
            if not all(bool(part.isfinite().all()) for part in parts.values()):
                return f"has in {side}_basis a decomposition that is not finite"
    damping = state.get("damping")
    valid = isinstance(damping, Tensor) and damping.dim() == 0 and 0 <= float(damping) < math.inf
    return "" if valid else f"has a damping of {damping}"


def copy_state(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Copies saved tensors into fresh ones: own dtype, own device, nothing shared with the loaded dict."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            copy_state(target.setdefault(key, {k: torch.empty_like(v) for k, v in value.items()}), value)
        elif key in target and target[key].dim():
            target[key].copy_(value)
        elif key in target:
            target[key] = value.detach().to(target[key]).clone()
