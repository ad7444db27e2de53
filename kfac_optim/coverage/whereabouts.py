"""Where parameters and layers are: the modules that own them, their places there, and whether they are still there."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor, nn

from ..distributed import is_sharded
from ..layers import KroneckerLayer


class Whereabouts:
    """Records the places of layers and their parameters, except sharded parameters, which come and go.

    Weights of other layers are computed from the ``computed`` parameters (pruning), which may become weights again.
    """

    def __init__(
        self, roots: Sequence[nn.Module], layers: Sequence[KroneckerLayer], computed: Collection[nn.Parameter]
    ) -> None:
        self.roots, self.layers = roots, layers
        # Each is a module, the name of a parameter in it, and the parameter that should be there.
        self._computed = [
            (module, name, p)
            for module in (self._modules() if computed else ())
            for name, p in module._parameters.items()
            if p is not None and p in computed
        ]
        self._slots = self._computed + [
            (module, name, own)
            for layer in layers
            for module in layer.owners
            for name, own in module._parameters.items()
            if own is not None and not is_sharded(own) and any(own is p for p in layer.parameters)
        ]
        self._places = self._find_places()
        # A parametrization that is removed keeps its parameter, too.
        self._owners = [(layer, list(layer.owners)) for layer in layers if layer.reparametrized]

    @property
    def are_intact(self) -> bool:
        """Whether all layers and their parameters are still in their places; takes some 20 us for a ResNet-50."""
        return self._have_parameters() and all(parent._modules.get(name) is m for parent, name, m in self._places)

    def accept_moves(self) -> bool:
        """Accepts that modules were moved, taken out or put back, if the layers' parameters are in no other modules.

        Returns whether it has accepted the new places. Loops that drop layers, or train heads in turn, move modules in
        every step; a module that is out for now has no gradients.
        """
        if not self._have_parameters() or any(layer.owners != owners for layer, owners in self._owners):
            return False
        homes: dict[nn.Parameter, set[nn.Module | None]] = {}
        for layer in self.layers:
            for parameter in layer.parameters:
                homes.setdefault(parameter, set()).update((*layer.owners, layer.host))
        for owner, _, parameter in self._computed:  # a parametrization that is removed keeps its parameter
            homes.setdefault(parameter, set()).add(owner)
        present = ((p, module) for module in self._modules() for p in module._parameters.values() if p is not None)
        if any(p in homes and module not in homes[p] for p, module in present):
            return False
        self._places = self._find_places()
        return True

    def successors(self) -> dict[nn.Parameter, nn.Parameter | None]:
        """What is now in the place of each parameter; most often the parameter itself."""
        return {p: module._parameters.get(name) for module, name, p in self._slots}

    def _have_parameters(self) -> bool:
        return all(module._parameters.get(name) is parameter for module, name, parameter in self._slots)

    def _modules(self) -> list[nn.Module]:
        return [module for root in self.roots for module in root.modules()]

    def _find_places(self) -> list[tuple[nn.Module, str, nn.Module]]:
        """All modules that contain a module of interest, each as its parent, its name there, and itself."""
        watched = {module for layer in self.layers for module in (*layer.modules, *layer.owners, layer.host)}
        watched.update(owner for owner, _, _ in self._computed)
        return [
            (parent, name, module)
            for parent in self._modules()
            for name, module in parent._modules.items()
            if module is not None and any(part in watched for part in module.modules())
        ]


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


def parameters_in(module: nn.Module) -> Collection[nn.Parameter]:
    """All parameters of a module, even if its own ``parameters()`` or ``named_parameters()`` leave some out.

    Some models return groups for the optimizer from ``parameters()``.
    """
    return dict.fromkeys(p for part in module.modules() for p in part._parameters.values() if p is not None)


def owners_of(parameters: Iterable[Tensor], known: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost live modules of the process that contain any of some parameters, which are compared by identity.

    ``known``: more modules to search, because the garbage collector does not list what ``gc.freeze()`` has set aside.
    """
    order = {id(parameter): i for i, parameter in enumerate(parameters)}
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    modules += [module for root in known for module in root.modules()]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
    pending = [m for m in modules if any(id(p) in order for p in m.__dict__.get("_parameters", {}).values())]
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

    def sort_key(top: nn.Module) -> tuple[int, int]:
        """Sorts by what a module owns, the most first, so that every process lists the modules in the same order."""
        owned = [order[id(p)] for p in parameters_in(top) if id(p) in order]
        return -len(owned), min(owned)

    return sorted(tops, key=sort_key)
