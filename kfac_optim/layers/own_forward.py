"""Linear layers and convolutions whose class has a ``forward`` of its own around torch's function.

Many pad, crop, fold dimensions or normalise around ``F.linear`` or ``F.conv2d``, which gets the weight itself. Such a
module is the host of its own layer (``hosted.py``). Classes that give the function something else (a standardised,
masked or scaled weight) are declined.

Which it is, is tried when layers are found, on a stand-in with random inputs of several shapes. Whatever it takes has
to reach the function with the weight itself, must not change the weight, and must not use it or the bias elsewhere.
Behaviour that depends on anything else (the device, an attribute that changes later) goes unnoticed.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..distributed import whole_shape
from .convolution import ConvLayer
from .hosted import HostedLayer, application_of, applies_its_weight
from .linear import LinearLayer
from .registry import LayerFactory
from .stand_ins import key_of, quiet, stand_in
from .windows import Windows, for_each


class OwnForwardLinearLayer(HostedLayer, LinearLayer):
    """A subclass of ``nn.Linear``, as ``F.linear`` in its forward sees it."""


class OwnForwardConvLayer(HostedLayer, ConvLayer):
    """A subclass of ``nn.Conv1d/2d/3d``, as ``F.conv1d/2d/3d`` in its forward sees it, with that call's options."""

    def structure(self, module: Any) -> tuple[int, int, int]:
        rows, *patch = self.weight_shape
        return module.groups, rows // module.groups, math.prod(patch) + (self.bias is not None)

    def as_applied(self, module: nn.Module, details: Sequence[int]) -> Windows:
        return _windows_of(tuple(details))

    def windows(self, module: Windows, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        return a, module


_MAX_NUMEL = 2**26  # the largest weight that is tried
_known: weakref.WeakKeyDictionary[type, dict[Hashable, str]] = weakref.WeakKeyDictionary()  # problems, by key
_TYPES: dict[LayerFactory, LayerFactory] = {LinearLayer: OwnForwardLinearLayer, ConvLayer: OwnForwardConvLayer}
OWN_FORWARD = tuple(_TYPES.values())


@functools.lru_cache(maxsize=1024)
def _windows_of(numbers: tuple[int, ...]) -> Windows:
    """The windows that an :class:`~.hosted.Application` describes."""
    dims = len(numbers) // 5
    size, stride, dilation, before, after = (numbers[i * dims : (i + 1) * dims] for i in range(5))
    return Windows(size, stride, dilation, tuple(zip(before, after, strict=True)))


def with_own_forward(factory: LayerFactory, module: nn.Module) -> tuple[LayerFactory | None, str]:
    """The factory for a module that overrides its forward, and a note on it, given the factory of its base class.

    None and the reason if there is none; the reason continues a sentence on the class.
    """
    if factory not in _TYPES:
        return None, ""
    weight = module._parameters.get("weight")
    if weight is None:  # the factory knows why
        return _TYPES[factory], ""
    key, known = key_of(module), _known.setdefault(type(module), {})
    problem = known.get(key)
    if problem is None:
        problem = _problem_of(module)
        if key is not None:
            known[key] = problem
    if problem:
        return None, f" and {problem}"
    function = "linear" if weight.dim() == 2 else f"conv{weight.dim() - 2}d"
    return _TYPES[factory], f"at F.{function} in {type(module).__name__}"


# The trial -----------------------------------------------------------------------------------------------------------


class _Trial(TorchFunctionMode):
    """Counts the uses of a module's weight, and cuts it and the bias off there, so that gradients show other uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.uses = module, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch; inside it this mode is off."""
        application = application_of(func, args, kwargs or {})
        if application is not None and applies_its_weight(self.module, application):
            self.uses += 1
            args = [self._cut(given) for given in args]
            kwargs = {name: self._cut(given) for name, given in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _cut(self, given: Any) -> Any:
        """A weight or bias without its history; what else a function is given as it is."""
        return given.detach() if any(given is p for p in self.module._parameters.values() if p is not None) else given


def _problem_of(module: nn.Module) -> str:
    """Why calls of a module's own forward are no uses of a layer; empty if they are."""
    chosen = vars(module).get("forward")  # a method that the module has chosen, perhaps wrapped
    forward = type(module).forward if chosen is None else unwrapped(chosen)
    weight = module.get_parameter("weight")
    if math.prod(whole_shape(weight)) > _MAX_NUMEL:
        return "is too large to be tried"
    with quiet():
        torch.default_generator.manual_seed(0)
        for training in (True, False):  # eval mode is for what needs a GPU in train mode (SyncBatchNorm)
            try:
                own = stand_in(module, {}, training=training)
                problems = [problem for shape in _shapes(own) for problem in _found(forward, own, shape)]
                if own.weight.dtype != weight.dtype:  # it has half precision, which not all CPUs compute with
                    own.to(weight.dtype)
                    problems += [problem for shape in _shapes(own) for problem in _found(forward, own, shape)]
            except Exception:  # the class is not made as others are
                break
            if problems:
                return next(filter(None, problems), "")
    return "takes none of the inputs that were tried"


def _found(forward: Any, own: Any, shape: Sequence[int]) -> Iterator[str]:
    """What is wrong with a call for an input of a shape, or an empty text; nothing if it takes none of that shape."""
    weight = own.weight
    before, trial = weight.detach().clone(), _Trial(own)
    try:
        with trial:
            output = forward(own, torch.randn(shape, dtype=weight.dtype, device="cpu"))
        outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
        ones = [torch.ones_like(y) for y in outputs]
        parts = {name: p for name in ("weight", "bias") if (p := own._parameters.get(name)) is not None}
        others = torch.autograd.grad(outputs, [*parts.values()], ones, allow_unused=True) if outputs else ()
        elsewhere = [name for name, g in zip(parts, others, strict=False) if g is not None]
    except Exception:  # whatever the user's forward raises
        return
    if own.weight is not weight or not torch.equal(weight.detach(), before):
        yield "changes its weight there"
    elif not trial.uses:
        yield "does not give its own weight and bias to torch's function"
    else:
        yield f"uses its {' and '.join(elsewhere)} elsewhere, too" if elsewhere else ""


def _shapes(module: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of inputs to try: features or channels come last or second, or after the frames of a video."""
    shape = module.weight.shape
    if len(shape) == 2:
        features = shape[1]
        yield from ((2, features), (2, 3, features), (2, 3, 5, features), (2, features, 3), (2, features, 3, 5))
        return
    dims, channels = len(shape) - 2, shape[1] * module.groups
    options = (shape[2:], for_each(module.stride, dims), for_each(module.dilation, dims))
    lengths = tuple((k - 1) * d + 4 * s + i for i, (k, s, d) in enumerate(zip(*options, strict=True), start=3))
    yield 2, channels, *lengths
    yield 2, *lengths, channels
    yield 2, channels, 3, *lengths
    yield 2, 3, channels, *lengths


def unwrapped(method: Any) -> Any:
    """The function behind a method and behind wrappers that name what they wrap (autocast, hooks that move tensors)."""
    while (inner := getattr(method, "__func__", None) or getattr(method, "__wrapped__", None)) is not None:
        method = inner
    return method
