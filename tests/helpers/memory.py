"""What an engine keeps in memory, counted from outside."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kfac_optim import CurvatureEngine


def reachable_bytes(engine: CurvatureEngine) -> int:
    """Bytes of all tensors of the engine's factors and decompositions, each storage once, the model's own left out."""
    seen: dict[int, int] = {}
    known = {
        p.data_ptr()
        for p in (engine.stages.trained.model.parameters() if engine.stages.trained.model is not None else [])
    }
    stack: list[Any] = [vars(engine)]
    visited: set[int] = set()
    while stack:
        thing = stack.pop()
        if id(thing) in visited:
            continue
        visited.add(id(thing))
        if isinstance(thing, Tensor):
            if not isinstance(thing, nn.Parameter) and thing.data_ptr() not in known:
                seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            stack += [*thing.values()]
        elif isinstance(thing, (list, tuple, set)):
            stack += list(thing)
        elif hasattr(thing, "__dict__") and type(thing).__module__.startswith("kfac_optim"):
            stack.append(vars(thing))
    return sum(seen.values())
