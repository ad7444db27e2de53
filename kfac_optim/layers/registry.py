"""Which module types have layers, and what makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .base import KroneckerLayer
from .options import LayerOptions

LayerFactory = Callable[[str, nn.Module, LayerOptions], KroneckerLayer | Sequence[KroneckerLayer]]
_FACTORIES: dict[type[nn.Module] | str, LayerFactory] = {}


def register_layer(*module_types: type[nn.Module] | str) -> Callable[[Any], Any]:
    """A decorator that registers how modules of some types become Kronecker layers.

    It decorates a :class:`KroneckerLayer` subclass, or any ``factory(name, module, options)`` that returns one layer,
    or several with names of their own. The registration also holds for subclasses of the types that do not override
    ``forward``.

    Args:
        *module_types: Module classes, or qualified names of classes whose package should not be imported for this, such
            as ``"transformers.pytorch_utils.Conv1D"``.

    Raises:
        TypeError: If no type is given, or one is neither a module class nor a name.
    """
    for given in module_types or (None,):
        if not (isinstance(given, str) or isinstance(given, type) and issubclass(given, nn.Module)):
            raise TypeError(f"register_layer({given!r}): must be given the module classes, or their qualified names")

    def register(factory: LayerFactory) -> LayerFactory:
        for module_type in module_types:
            _FACTORIES[module_type] = factory
        return factory

    return register


def factory_of(cls: type) -> LayerFactory | None:
    """The factory registered for a class itself, not for its bases; None if there is none."""
    return _FACTORIES.get(cls) or _FACTORIES.get(f"{cls.__module__}.{cls.__qualname__}")
