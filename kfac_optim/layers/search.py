"""The layers of a model: which modules have one, and why others have none."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..distributed import own_part
from .base import COMPUTED, Declined, KroneckerLayer
from .lookalikes import lookalike
from .options import LayerOptions
from .own_forward import OWN_FORWARD, unwrapped, with_own_forward
from .registry import LayerFactory, factory_of
from .weight_norm import with_weight_norm

_LISTS = (nn.ParameterList, nn.ParameterDict)


def _factory_for(module: nn.Module) -> tuple[LayerFactory | None, str]:
    """The factory registered for a module's type or its nearest base, else None and the reason why there is none.

    If the module merely computes what another type does, the factory comes with a note that says so.
    """
    for cls in type(module).__mro__:
        factory = factory_of(cls)
        if factory is None:
            continue
        # A convolution's forward calls _conv_forward, in which some subclasses standardise or modulate the weights.
        names = ("forward", "_conv_forward")
        own = [name for name in names if getattr(type(module), name, None) is not getattr(cls, name, None)]
        for name in names:
            chosen = vars(module).get(name)
            if chosen is not None and not _is_method_of(type(module) if own else cls, unwrapped(chosen)):
                return None, f"{name} was replaced on this {type(module).__name__} alone; see register_layer"
        if not own:
            return factory, ""
        found, note = lookalike(module) or with_own_forward(factory, module)
        problem = f"{_path(type(module))} overrides {cls.__name__}.{own[0]}{note}; see register_layer"
        return found, problem if found is None else note
    if isinstance(module, _LISTS):
        return None, (
            f"in a {type(module).__name__}: layers are found as submodules alone, put them in an nn.ModuleList; "
            "weights that are used without a layer have no rule"
        )
    if isinstance(module, ParametrizationList):
        return None, f"what its layer uses {COMPUTED} (spectral_norm, orthogonal), of which this is one"
    return lookalike(module) or (None, f"no Kronecker rule for {_path(type(module))}")


def _is_method_of(cls: type, function: Any) -> bool:
    """Whether a class or a base of it defines a function: a module may choose one of its own in ``__init__``."""
    return any(own is function for base in cls.__mro__ for own in vars(base).values())


def _path(cls: type) -> str:
    """The name of a class, with its module unless that is torch's."""
    return cls.__qualname__ if cls.__module__.startswith("torch.nn") else f"{cls.__module__}.{cls.__qualname__}"


class FoundLayers:
    """The Kronecker layers of some modules, and the reasons why other parameters have none.

    A weight that several modules use under the same rule and with the same bias is one layer. If the rules differ, or
    one of the modules has none, the weight is declined, because its Fisher block is not a Kronecker product. Layers
    with different weights and the same bias are declined as well. Names are those of ``root.named_modules()``, with the
    root's class in front if several roots have the same names.

    Args:
        roots: The user's modules.
        options: The engine's options for layers.

    Attributes:
        layers: The layers whose weight the optimizer updates.
        uncovered: For every other parameter that it updates, the parameter's name and the reason why it has no layer.
    """

    def __init__(self, roots: Sequence[nn.Module], options: LayerOptions) -> None:
        self._options = options
        self._layers: dict[nn.Parameter, KroneckerLayer] = {}  # by weight
        self._names: dict[nn.Parameter, str] = {}  # of all parameters
        self._reasons: dict[nn.Parameter, str] = {}  # why parameters are declined
        self._beside: dict[nn.Parameter, KroneckerLayer] = {}  # by parameters that are no part of it, but its modules'
        self._owners: set[nn.Module] = set()  # of the layers' parameters
        # A ParameterList only lists parameters: those of layers, perhaps, for an optimizer or a penalty.
        owners = (module for root in roots for module in root.modules() if not isinstance(module, _LISTS))
        self._unlisted = {p for module in owners for p in module._parameters.values() if p is not None}
        visited: set[nn.Module] = set()
        for prefix, root in zip(_prefixes(roots), roots, strict=True):
            for name, module in root.named_modules(visited):  # adds each module to those visited
                self._add_module((prefix + name).rstrip("."), module)
                if isinstance(module, nn.MultiheadAttention):
                    visited.update(module.modules())
        self._decline_shared_memory()
        self._decline_whole_layers()
        trains, layers = options.trains, self._layers.values()
        self.layers = [layer for layer in layers if layer.weight not in self._reasons and trains(layer.weight)]
        covered = {parameter for layer in self.layers for parameter in layer.parameters}
        others = {p: name for p, name in self._names.items() if p not in covered and trains(p)}
        self.uncovered = {p: (name, self._reason(p)) for p, name in others.items()}

    def _add_module(self, name: str, module: nn.Module) -> None:
        """Adds a module's layers, or the reason why it has none; an attention module stands for its parts as well."""
        layers, reason = _layers_of(name, module, self._options)
        recurse = isinstance(module, nn.MultiheadAttention)
        lent: Collection[nn.Parameter] = ()
        if reason and module._parameters and not recurse:
            lent = self._unlisted if isinstance(module, _LISTS) else _lent_by_parts(module)
        for parameter_name, parameter in module.named_parameters(name, recurse=recurse):
            if parameter in lent and not _skipped(name, self._options):
                continue
            if isinstance(module, ParametrizationList) and module in self._owners and not _skipped(name, self._options):
                self._names.setdefault(parameter, parameter_name)  # of a layer with weight norm
                continue
            if reason and parameter not in self._names:
                self._reasons[parameter] = reason
            elif reason:
                self._reasons.setdefault(parameter, f"shared with {parameter_name}: {reason}")
            self._names.setdefault(parameter, parameter_name)
        for layer in layers:
            self._add(layer)
            self._owners.update(layer.owners)
            if layer.reparametrized or not self._options.trains(layer.weight):
                self._beside.update(dict.fromkeys(nn.Module.parameters(module), layer))
        for layer in layers:
            if reason := _skipped(layer.name, self._options):
                self._reasons.update(dict.fromkeys(layer.parameters, reason))

    def _reason(self, parameter: nn.Parameter) -> str:
        """Why a parameter has no layer."""
        if parameter in self._reasons:
            return self._reasons[parameter]
        if parameter in self._beside:
            layer = self._beside[parameter]
            if not self._options.trains(layer.weight):
                return "the weight of its layer is not among the optimizer's parameters"
            return self._reasons.get(layer.weight, layer.reparametrized)
        return (
            "neither weight nor bias of a layer" if parameter.requires_grad else "frozen when the optimizer was built"
        )

    def _add(self, layer: KroneckerLayer) -> None:
        """Adds a layer. If another one has its weight already, that gets its modules, or both are declined."""
        first = self._layers.setdefault(layer.weight, layer)
        if first is layer:
            return
        # Some norm layers have an eps. Of attention, one module's calls are watched, and projections share their bias.
        # Of recurrent modules, the rows of one level and direction (suffix) are taken.
        both = (first, layer)
        options = [tuple(getattr(x, name, None) for name in ("eps", "suffix")) for x in both]
        rules = [
            (type(x), x.sharing, x.host, id(x.bias), x.bias_part, *own) for x, own in zip(both, options, strict=True)
        ]
        if rules[0] == rules[1]:
            first.add_modules(layer.modules)
            return
        reason = f"weight shared by {first.name} ({first.rule_name}) and {layer.name} ({layer.rule_name})"
        if type(first) is type(layer) and first.bias is not layer.bias:
            reason += ", whose biases differ"
        self._reasons.update(dict.fromkeys((*first.parameters, *layer.parameters), reason))

    def _decline_shared_memory(self) -> None:
        """Declines trained parameters with the same numbers, as after ``decoder.weight.data = encoder.weight.data.T``.

        What a step of the base class has done to one of them cannot be told from the weights: it moves both.
        """
        first: dict[int, nn.Parameter] = {}
        for parameter in filter(self._options.trains, self._names):
            address = _address(parameter)
            other = first.setdefault(address, parameter)
            if address and other is not parameter:
                for one, its in ((other, parameter), (parameter, other)):
                    self._reasons.setdefault(one, f"lies in the memory of {self._names[its]}, too: steps move both")

    def _decline_whole_layers(self) -> None:
        """Declines layers that have a declined parameter, or share a bias or (attention) the same part of it."""
        users: dict[tuple[nn.Parameter, int | None], KroneckerLayer] = {}
        for layer in self._layers.values():
            if layer.bias is not None:
                first = users.setdefault((layer.bias, layer.bias_part.start), layer)
                if first is not layer:
                    self._reasons.setdefault(layer.bias, f"bias shared by {first.name} and {layer.name}")
        for layer in self._layers.values():
            found = [self._reasons[parameter] for parameter in layer.parameters if parameter in self._reasons]
            for parameter in layer.parameters if found else ():
                self._reasons.setdefault(parameter, found[0])


def _address(parameter: nn.Parameter) -> int:
    """Where this rank's numbers of a parameter are in memory; 0 if it has none or stores them in a way of its own."""
    part = own_part(parameter)
    is_plain = part.layout is torch.strided and type(part).__torch_dispatch__ is Tensor.__torch_dispatch__
    return part.data_ptr() if is_plain and not nn.parameter.is_lazy(part) and part.numel() else 0


def _lent_by_parts(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of a module that are those of a module inside it: ``self.weight = self.linear.weight``.

    A ParameterList inside it only lists them, and leaves them to the module.
    """
    parts = (part for part in module.modules() if part is not module and not isinstance(part, _LISTS))
    inside = {p for part in parts for p in part._parameters.values() if p is not None}
    return inside.intersection(p for p in module._parameters.values() if p is not None)


def _prefixes(roots: Sequence[nn.Module]) -> list[str]:
    """The prefix of the names in each root: empty, or the root's class if two roots have the same names."""
    visited: set[nn.Module] = set()
    modules = itertools.chain.from_iterable(root.named_modules(visited) for root in roots)
    names = [name for name, module in modules if module._parameters]
    if len(set(names)) == len(names):
        return [""] * len(roots)
    classes = [type(root).__name__ for root in roots]
    numbers = [f"-{classes[:i].count(c) + 1}" if classes.count(c) > 1 else "" for i, c in enumerate(classes)]
    return [f"{c}{number}." for c, number in zip(classes, numbers, strict=True)]


def skip_reason(pattern: str) -> str:
    """The reason given for a layer whose name a pattern of ``skip_layers`` matches."""
    return f"skip_layers matches {pattern!r}"


def _skipped(name: str, options: LayerOptions) -> str:
    """The reason given for a layer of this name if ``skip_layers`` matches it, else an empty text."""
    return next((skip_reason(pattern) for pattern in options.skip_layers if re.search(pattern, name)), "")


def _layers_of(name: str, module: nn.Module, options: LayerOptions) -> tuple[Sequence[KroneckerLayer], str]:
    """The layers of one module and an empty text, or no layers and the reason."""
    if skipped := _skipped(name, options):
        return (), skipped
    if isinstance(module, torch.jit.ScriptModule):
        return (), "compiled by torch.jit, whose modules call no hooks"
    factory, note = _factory_for(module)
    if factory is None:
        return (), note
    if factory in OWN_FORWARD and (name.endswith("_orig_mod") or module._compiled_call_impl is not None):
        return (), "compiled by itself, where its forward can't be watched: compile the module around it"
    try:
        made = with_weight_norm(factory, module)(name, module, options)
    except Declined as declined:
        return (), str(declined)
    layers = (made,) if isinstance(made, KroneckerLayer) else tuple(made)
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        raise ValueError(
            f"the layers of {name!r} ({type(module).__name__}) are named {', '.join(map(repr, names))}: the function "
            "given to register_layer has to give each a name of its own"
        )
    for layer in layers:
        _require_entries(layer)
    for layer in layers if note else ():
        layer.notes.append(note)
    return layers, ""


def _require_entries(layer: KroneckerLayer) -> None:
    """Raises TypeError if a layer computes what it should pick out of its matrices: gradients could not be put back."""
    shape = (layer.pairs, layer.d_out, layer.d_in)
    whole = torch.empty(shape, device="meta")
    if all(part.untyped_storage()._cdata == whole.untyped_storage()._cdata for part in layer.from_matrix(whole)):
        return  # views
    numbers = torch.arange(math.prod(shape), device="cpu").view(shape)
    one, other = (torch.cat([part.flatten() for part in layer.from_matrix(n)]) for n in (numbers, -1 - numbers))
    if one.dtype != numbers.dtype or (one + other + 1).any() or len(one.unique()) < len(one):
        raise TypeError(
            f"{type(layer).__name__}.from_matrix(), or matrix_to_weight(): must return entries of the matrices, each at"
            " most once, and compute nothing with them, because gradients are put where these entries are"
        )
