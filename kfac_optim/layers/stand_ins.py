"""Stand-ins for modules whose ``forward`` is tried when layers are found: the modules themselves are not touched."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Hashable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import whole_shape

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that its class has given it."""
    return {name: value for name, value in vars(module).items() if name not in _of_all_modules()}


@functools.cache
def _of_all_modules() -> frozenset[str]:
    """The attributes that every module has, and the one that watched modules have (``capture/copies.py``)."""
    return frozenset({*vars(nn.Module()), "__getstate__"})


def key_of(module: nn.Module) -> Hashable:
    """What modules of one class that compute the same have in common.

    None if that is unknown, because a module or one inside it has buffers, or attributes other than plain values.
    """
    attributes = own_attributes(module)
    flat = itertools.chain.from_iterable(v if isinstance(v, (tuple, list)) else (v,) for v in attributes.values())
    parts = tuple((name, type(part), key_of(part)) for name, part in module._modules.items() if part is not None)
    if module._buffers or not all(isinstance(value, _PLAIN) for value in flat) or any(key is None for *_, key in parts):
        return None
    shapes = {name: None if p is None else tuple(whole_shape(p)) for name, p in module._parameters.items()}
    functions = tuple(getattr(type(module), name, None) for name in ("forward", "_conv_forward"))
    return functions, repr(shapes), repr(sorted(attributes.items())), parts


def stand_in(module: nn.Module, known: dict[Any, Any], *, training: bool) -> Any:
    """A module of the same class without hooks, with random parameters and copies of buffers on the CPU.

    Args:
        module: The module. Modules inside it get stand-ins, too.
        known: Modules and parameters that have a stand-in already, each with it; others are added.
        training: Whether it is in train mode.

    Raises:
        TypeError: For a scripted module, whose state would be that of the original.
    """
    if module in known:
        return known[module]
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("a scripted module has no stand-in")
    own = known[module] = object.__new__(type(module))
    nn.Module.__init__(own)
    for name, value in own_attributes(module).items():
        own.__dict__[name] = _copied(value, module, own)
    own.__dict__["training"] = training
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in known:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            known[parameter] = nn.Parameter(torch.randn(tuple(whole_shape(parameter)), dtype=dtype, device="cpu"))
        own._parameters[name] = None if parameter is None else known[parameter]
    for name, buffer in module._buffers.items():
        own._buffers[name] = _copied(buffer, module, own)
    for name, part in module._modules.items():
        own._modules[name] = None if part is None else stand_in(part, known, training=training)
    return own


def _copied(value: Any, module: nn.Module, own: nn.Module) -> Any:
    """An attribute of a stand-in: tensors are on the CPU, containers are copies, methods are bound to it."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, dict, set)):
        return value.copy()
    return MethodType(value.__func__, own) if inspect.ismethod(value) and value.__self__ is module else value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """For a forward pass without traces: no global random numbers, no warnings, no compiler, no autocast.

    New tensors are on the CPU, even if the user has set another default device.
    """
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.compiler.set_stance("force_eager"),
        torch.device("cpu"),
    ):
        warnings.simplefilter("ignore")
        yield
