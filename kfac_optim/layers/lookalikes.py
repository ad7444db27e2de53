"""Recognises modules with a ``forward`` of their own that compute what a known layer does, by comparing results.

Many models bring their own LayerNorm, RMSNorm, GroupNorm or Linear. Such a module is covered if on random inputs it
returns what a reference returns, and the same gradients of input, weight and bias: for inputs of 2, 3 and 4 dimensions,
of magnitudes from 1e-6 to 1e3, in train and eval mode, in float32 and float64. The comparison runs on the CPU, on a
stand-in with parameters of its own: the module and its hooks are not touched, and the user's random number generators
do not move. Behaviour that depends on anything else (the device, autocast, an attribute that changes later) goes
unnoticed.

A module is compared only if its ``forward`` takes one argument, it has no parameters other than ``weight`` and
``bias``, no buffers and no submodules, and its other attributes are plain values.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed import whole_shape
from .base import require_initialised
from .linear import LinearLayer, TransposedLinearLayer
from .norm import ChannelsFirstLayerNormLayer, GroupNormLayer, LayerNormLayer, RMSNormLayer
from .registry import LayerFactory
from .stand_ins import key_of, own_attributes, quiet, stand_in

_TOLERANCE = 1e-4  # relative to the largest entry, for modules that use float32 inside; other functions differ by more
_MAGNITUDES = (1.0, 1e3, 1e-2, 1e-3, 1e-4, 1e-6)  # the small ones show what eps is
_EPS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, torch.finfo(torch.float32).eps)  # tried beside the module's own numbers
_MAX_NUMEL = 2**22  # the largest weight that is compared at its own size


@dataclass(frozen=True)
class Reference:
    """What a module may turn out to compute.

    Attributes:
        name: Its name, for the table.
        factory: How it becomes a layer.
        apply: What it computes from the input, the weight and, if there is one, the bias.
        shapes: The shapes of the inputs to compare, without the features unless ``features`` is None.
        features: The dimension of the weight, a matrix, that belongs to the input's features; the bias has the length
            of the other one. None: ``shapes`` are complete, and a bias has the shape of the weight.
    """

    name: str
    factory: LayerFactory
    apply: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    features: int | None = None


_known: weakref.WeakKeyDictionary[type, dict[Hashable, Reference | None]] = weakref.WeakKeyDictionary()


def lookalike(module: nn.Module) -> tuple[LayerFactory, str] | None:
    """The factory for a module with a ``forward`` of its own, and a note on what it computes; None if unknown.

    Raises:
        ValueError: If the weight is not initialised yet, as what the module computes cannot be known before.
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None:
        return None
    require_initialised(module, weight)
    key = key_of(module) if _is_simple(module) else None
    shape = tuple(whole_shape(weight))
    if key is None or bias is not None and tuple(whole_shape(bias)) not in {(size,) for size in shape}:
        return None
    known = _known.setdefault(type(module), {})
    if key not in known:
        known[key] = _matching_reference(module, shape, bias is not None, own_attributes(module))
    found = known[key]
    return None if found is None else (found.factory, f"as {found.name}")


def _is_simple(module: nn.Module) -> bool:
    """Whether the module is compared at all; the conditions are at the top of this file, with those of a key."""
    cls = type(module)
    plain_call = cls.__call__ is nn.Module.__call__
    known = set(module._parameters) <= {"weight", "bias"} and not module._modules
    if not (plain_call and known) or any(p is not None and p.is_complex() for p in module._parameters.values()):
        return False
    try:
        arguments = list(inspect.signature(cls.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(arguments) == 2 and arguments[1].kind in kinds


def _matching_reference(
    module: nn.Module, shape: tuple[int, ...], bias: bool, attributes: dict[str, Any]
) -> Reference | None:
    """The reference that a module equals, if there is one."""
    if 0 in shape or len(shape) not in (1, 2):
        return None
    sized = {"in_features", "out_features"} <= set(attributes) and isinstance(module, nn.Linear)
    sizes = [(shape, attributes)]
    if sized:  # a smaller stand-in can be made, so that large ones can be compared, too
        small = [(3, 5), (6, 4), (4, 4)]
        sizes = [(s, attributes | {"in_features": s[1], "out_features": s[0]}) for s in small]
        sizes += [(shape, attributes)] if shape[0] * shape[1] <= _MAX_NUMEL else []
    elif math.prod(shape) > _MAX_NUMEL:
        return None
    for reference in _references(module, shape, attributes):
        if all(_computes_the_same(module, reference, s, bias, own) for s, own in sizes):
            return reference
    return None


def _references(module: nn.Module, shape: tuple[int, ...], attributes: dict[str, Any]) -> Iterator[Reference]:
    """What a module with a weight of this shape could be."""
    if len(shape) == 2:
        leading = [(7,), (3, 5), (2, 3, 4)]
        if isinstance(module, nn.Embedding):
            return  # its inputs are indices, not features, and its options matter, too
        yield Reference("nn.Linear", LinearLayer, F.linear, leading, features=1)
        if not isinstance(module, nn.Linear):
            yield Reference("nn.Linear, transposed", TransposedLinearLayer, _transposed, leading, features=0)
        return
    channels = shape[0]
    first = [(2, channels, 3, 4), (3, channels, 5, 2)]
    if isinstance(module, nn.GroupNorm):
        same = functools.partial(_group_norm, groups=module.num_groups, eps=module.eps)
        yield Reference("nn.GroupNorm", GroupNormLayer, same, [(3, channels, 5), *first])
    own = [v for v in attributes.values() if isinstance(v, float) and 0 <= v < 0.1]
    for eps in dict.fromkeys([*own, *_EPS]):
        last = [(5, channels), (3, 4, channels), (2, 3, 4, channels)]
        layer = functools.partial(LayerNormLayer, eps=eps)
        yield Reference("nn.LayerNorm", layer, functools.partial(_layer_norm, eps=eps), last)
        rms = functools.partial(RMSNormLayer, eps=eps)
        yield Reference("nn.RMSNorm", rms, functools.partial(_rms_norm, eps=eps), last)
        images = functools.partial(ChannelsFirstLayerNormLayer, eps=eps)
        yield Reference("nn.LayerNorm, channels first", images, functools.partial(_channels_first, eps=eps), first)


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.T, bias)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, groups: int, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


def _rms_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y if bias is None else y + bias


def _channels_first(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    return _layer_norm(x.movedim(1, -1), weight, bias, eps=eps).movedim(-1, 1)


# The comparison ------------------------------------------------------------------------------------------------------


def _computes_the_same(
    module: nn.Module, reference: Reference, shape: tuple[int, ...], bias: bool, attributes: dict[str, Any]
) -> bool:
    """Whether a stand-in for the module equals the reference in all cases, in float32 at least."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes, outputs = reference.shapes, shape[0]
    if reference.features is not None:
        shapes = [(*leading, shape[reference.features]) for leading in shapes]
        outputs = shape[1 - reference.features]
    sizes = {"weight": shape, "bias": (outputs,)} if bias else {"weight": shape}
    with quiet():
        for dtype in (torch.float32, torch.float64):
            for size, magnitude, training in itertools.product(shapes, _MAGNITUDES, (True, False)):
                x, *values = (
                    torch.randn(s, generator=generator, dtype=dtype, device="cpu") for s in (size, *sizes.values())
                )
                parameters = {name: nn.Parameter(value) for name, value in zip(sizes, values, strict=True)}
                offset = magnitude if magnitude < 1 else 0.5 * magnitude
                x = (x + (0.5 if training else 0.0)) * magnitude if len(shape) == 2 else x * magnitude + offset
                given = {module._parameters[name]: nn.Parameter(value.clone()) for name, value in parameters.items()}
                own = stand_in(module, given, training=training)
                own.__dict__.update({k: v for k, v in attributes.items() if isinstance(v, int)})  # its sizes
                try:
                    forward = functools.partial(type(module).forward, own)
                    found = _outcome(forward, x, [own.get_parameter(name) for name in parameters])
                except Exception:  # whatever the user's forward raises: it does not compute what the reference does
                    return dtype == torch.float64  # then it casts to float32 inside, which such a weight does not fit
                wanted = _outcome(functools.partial(reference.apply, **parameters), x, list(parameters.values()))
                if not _agree(found, wanted):
                    return False
    return True


def _outcome(forward: Callable[[Tensor], Any], x: Tensor, parameters: Sequence[Tensor]) -> list[Any]:
    """The output, and the gradients of its inner product with random numbers; raises if it is no tensor."""
    x = x.clone().requires_grad_()
    output = forward(x)
    product = torch.randn(
        output.shape, generator=torch.Generator("cpu").manual_seed(1), dtype=output.dtype, device="cpu"
    )
    return [output, *torch.autograd.grad((output * product).sum(), [x, *parameters], allow_unused=True)]


def _agree(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Whether two outcomes are the same, up to rounding in float32."""
    for a, b in zip(found, wanted, strict=True):
        if not (isinstance(a, Tensor) and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device):
            return False
        if not bool((a - b).detach().abs().max() <= _TOLERANCE * b.detach().abs().max()):
            return False
    return True
