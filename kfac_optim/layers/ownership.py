"""From parameters to the user's modules that own them, and from wrapped modules to the user's own."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["owners_of", "unwrap"]


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel (torch's or Apex's), DataParallel and torch.compile wrappers."""
    while True:
        # By name, so that Apex matches without being imported.
        if type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            model = model.module  # type: ignore[assignment]
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def owners_of(parameters: Iterable[Tensor], known: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """The outermost live modules of the process that contain any of some parameters, which are compared by identity.

    ``known``: more modules to search, because the garbage collector does not list what ``gc.freeze()`` has set aside.
    """
    parameters = list(parameters)
    wanted = {id(parameter) for parameter in parameters}
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    modules += [module for root in known for module in root.modules()]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
    pending = [m for m in modules if any(id(p) in wanted for p in m.__dict__.get("_parameters", {}).values())]
    tops: dict[nn.Module, None] = {}
    seen: set[int] = set()
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            above = parents.get(id(module), [])
            pending += above
            if not above:
                tops[unwrap(module)] = None
    order = {id(parameter): i for i, parameter in enumerate(parameters)}

    def sort_key(top: nn.Module) -> tuple[int, int]:
        """Sorts by what a module owns, the most first, so that every process lists the modules in the same order."""
        owned = [order[id(p)] for p in top.parameters() if id(p) in order]
        return -len(owned), min(owned)

    return sorted(tops, key=sort_key)
