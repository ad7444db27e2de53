"""Stand-ins for modules whose ``forward`` is tried when layers are found: the modules themselves are not touched."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import random
import sys
import warnings
from collections import deque
from collections.abc import Hashable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import whole_shape

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_MOST_HIDDEN = 2**22  # parameters of a module that another one holds as an attribute: it may be the whole model


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that its class has given it."""
    return {name: value for name, value in vars(module).items() if name not in _of_all_modules()}


@functools.cache
def _of_all_modules() -> frozenset[str]:
    """The attributes that every module has, and those that watched (``capture/copies.py``) and compiled ones have."""
    return frozenset({*vars(nn.Module()), "__getstate__", "_compiled_call_impl"})


def key_of(module: nn.Module) -> Hashable:
    """What modules of one class that compute the same have in common.

    None if that is unknown, because a module or one inside it has buffers, or attributes other than plain values.
    """
    attributes = own_attributes(module)
    flat = itertools.chain.from_iterable(v if isinstance(v, (tuple, list)) else (v,) for v in attributes.values())
    parts = tuple((name, type(part), key_of(part)) for name, part in module._modules.items() if part is not None)
    if module._buffers or not all(isinstance(value, _PLAIN) for value in flat) or any(key is None for *_, key in parts):
        return None
    shapes = {n: None if p is None else (tuple(whole_shape(p)), p.dtype) for n, p in module._parameters.items()}
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
    own.__dict__["training"] = training
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in known:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            known[parameter] = nn.Parameter(torch.randn(tuple(whole_shape(parameter)), dtype=dtype, device="cpu"))
        own._parameters[name] = None if parameter is None else known[parameter]
    for name, buffer in module._buffers.items():
        own._buffers[name] = None if buffer is None else buffer.detach().to("cpu", copy=True)
    for name, part in module._modules.items():
        own._modules[name] = None if part is None else stand_in(part, known, training=training)
    for name, value in own_attributes(module).items():
        own.__dict__[name] = _copied(value, known, training)
    return own


def _copied(value: Any, known: dict[Any, Any], training: bool) -> Any:
    """An attribute of a stand-in, which its forward may change: all but objects of other kinds is copied.

    Tensors are on the CPU. Modules that are in no ``_modules``, perhaps in a list or behind a method, have stand-ins.
    """
    kind, copied = type(value), functools.partial(_copied, known=known, training=training)
    if issubclass(kind, nn.Module):  # not a weak proxy of one
        if value not in known and sum(math.prod(whole_shape(p)) for p in value.parameters()) > _MOST_HIDDEN:
            raise TypeError("a module that another one holds as an attribute is too large for a stand-in")
        return stand_in(value, known, training=training)
    if isinstance(value, Tensor):
        return known[value] if value in known else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        mapping = copy.copy(value)  # of a class that may have attributes of its own
        mapping.update({key: copied(item) for key, item in value.items()})
        return mapping
    if isinstance(value, (list, deque)):
        items = copy.copy(value)
        items.clear()
        items.extend(map(copied, value))
        return items
    if kind is tuple or kind is set:
        return kind(map(copied, value))
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).set_state(value.get_state())
    if kind.__module__.partition(".")[0] in ("numpy", "random"):  # arrays and generators
        return copy.deepcopy(value)
    if inspect.ismethod(value) and issubclass(type(value.__self__), nn.Module):
        return MethodType(value.__func__, copied(value.__self__))
    return value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """For a forward pass without traces: no warnings, no compiler, no autocast, and global generators do not move.

    New tensors are on the CPU, even if the user has set another default device.
    """
    with (
        torch.random.fork_rng(devices=[]),
        _generators_kept(),
        warnings.catch_warnings(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.compiler.set_stance("force_eager"),
        torch.device("cpu"),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Restores the global generators of Python and, if anybody has imported it, NumPy."""
    numpy = sys.modules.get("numpy")
    state, its = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(its)
