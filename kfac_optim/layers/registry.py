"""Modules -> layers: the registry of module types, and the layers of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .base import Declined, KroneckerLayer, LayerOptions

__all__ = ["Coverage", "LayerFactory", "find_layers", "register_layer"]

LayerFactory = Callable[[str, nn.Module, LayerOptions], KroneckerLayer | Sequence[KroneckerLayer]]
_FACTORIES: dict[type[nn.Module] | str, LayerFactory] = {}


def register_layer(*module_types: type[nn.Module] | str) -> Callable[[Any], Any]:
    """Registers how modules of a type (and of its subclasses that keep its ``forward``) become Kronecker layers.

    Decorates a :class:`KroneckerLayer` subclass, or any ``factory(name, module, options)`` that returns one layer or
    several. A type of a package that is not to be imported is given by its qualified name,
    ``"transformers.pytorch_utils.Conv1D"``.
    """

    def register(factory: LayerFactory) -> LayerFactory:
        for module_type in module_types:
            _FACTORIES[module_type] = factory
        return factory

    return register


def _factory_for(module: nn.Module) -> tuple[LayerFactory | None, str]:
    """The factory registered for a module's type or the nearest base of it, else the reason why there is none."""
    for cls in type(module).__mro__:
        factory = _FACTORIES.get(cls) or _FACTORIES.get(f"{cls.__module__}.{cls.__qualname__}")
        if factory is None:
            continue
        if type(module).forward is not getattr(cls, "forward", None):
            return None, f"{type(module).__name__} overrides {cls.__name__}.forward; see register_layer"
        return factory, ""
    return None, f"no Kronecker rule for {type(module).__name__}"


@dataclass
class Coverage:
    """What :func:`find_layers` found: the layers, and for every parameter without one its name and the reason."""

    layers: list[KroneckerLayer]
    uncovered: dict[nn.Parameter, tuple[str, str]]


def find_layers(roots: Iterable[nn.Module], options: LayerOptions) -> Coverage:
    """The Kronecker layers of some modules.

    Weights used by several modules under the same rule and with the same bias are one layer; under different rules, or
    where one of them has none, the weight is declined, because its Fisher block is no Kronecker product. Names are
    those of ``root.named_modules()``, behind the root's number where an earlier root has the same.
    """
    layers: dict[nn.Parameter, KroneckerLayer] = {}
    reasons: dict[nn.Parameter, tuple[str, str]] = {}
    visited: set[nn.Module] = set()
    names: set[str] = set()
    for number, root in enumerate(roots):
        new = {name: module for name, module in root.named_modules() if module not in visited}
        owners = {name for name, module in new.items() if module._parameters}
        prefix = f"{number}." if owners & names else ""
        names |= {prefix + name for name in owners}
        for name, module in new.items():
            if module in visited:
                continue
            name = (prefix + name).rstrip(".")
            parts = list(module.modules()) if isinstance(module, nn.MultiheadAttention) else [module]
            visited.update(parts)
            found, reason = _layers_of(name, module, options)
            for layer in found:
                _join(layer, layers, reasons)
            own = module.named_parameters(name, recurse=len(parts) > 1)
            for parameter_name, parameter in own:
                known = reasons.setdefault(parameter, (parameter_name, reason))
                if reason and not known[1]:
                    _withdraw(parameter, layers.values(), reasons, f"shared with {parameter_name}: {reason}")
    kept = [layer for layer in layers.values() if not reasons[layer.weight][1] and options.trains(layer.weight)]
    covered = {parameter for layer in kept for parameter in layer.parameters}
    uncovered = {
        parameter: (name, reason or "frozen when the optimizer was built")
        for parameter, (name, reason) in reasons.items()
        if parameter not in covered and options.trains(parameter)
    }
    return Coverage(kept, uncovered)


def _layers_of(name: str, module: nn.Module, options: LayerOptions) -> tuple[Sequence[KroneckerLayer], str]:
    """The layers of one module, or none and the reason."""
    for pattern in options.skip_layers:
        if re.search(pattern, name):
            return (), f"skip_layers matches {pattern!r}"
    factory, reason = _factory_for(module)
    if factory is None:
        return (), reason
    try:
        made = factory(name, module, options)
    except Declined as declined:
        return (), str(declined)
    return (made,) if isinstance(made, KroneckerLayer) else tuple(made), ""


def _join(
    layer: KroneckerLayer, layers: dict[nn.Parameter, KroneckerLayer], reasons: dict[nn.Parameter, tuple[str, str]]
) -> None:
    """Adds a layer, or its module to the layer that has the same weight already."""
    first = layers.setdefault(layer.weight, layer)
    if first is layer:
        return
    if type(first) is type(layer) and first.bias is layer.bias and first.sharing == layer.sharing:
        first.modules += layer.modules
        return
    reason = f"weight shared by {first.name} ({first.rule_name}) and {layer.name} ({layer.rule_name})"
    for parameter in (*first.parameters, *layer.parameters):
        name, _ = reasons.get(parameter, (f"{layer.name}.bias", ""))
        reasons[parameter] = (name, reason)


def _withdraw(
    parameter: nn.Parameter,
    layers: Iterable[KroneckerLayer],
    reasons: dict[nn.Parameter, tuple[str, str]],
    reason: str,
) -> None:
    """Declines the layers of a parameter that turns out to have another use."""
    for layer in layers:
        if any(own is parameter for own in layer.parameters):
            for own in layer.parameters:
                reasons[own] = (reasons[own][0], reason)
