"""Which backward passes of a step count: those whose gradient is in ``.grad`` when the step is taken.

The rules for each layer, where "gradient" means that of the layer's weight:

- A pass counts for a layer if it adds to the layer's gradient (:func:`destination`).
- If a layer's gradient was removed (None) or zeroed in place since the last pass, by ``zero_grad()`` of any kind, the
  layer's statistics start anew when the next pass begins.
- If at the step this has happened to all layers that were seen, everything is dropped. If it has happened to some of
  them only, the loop holds these still, and the passes count.
- ``torch.autograd.grad(loss, weights)`` adds to no gradient. Its statistics are kept apart, and count only if those of
  no ``backward()`` do and the loop has set the gradients itself.

Other changes of a gradient (accumulation, clipping, unscaling, a reduction over ranks, a new tensor in its place) leave
the statistics as they are. If a framework keeps the gradients elsewhere (FSDP2 without synchronization), or moves them
elsewhere after the pass (ZeRO), no gradient is remembered, and so none is found to be removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..distributed import gathered_weight, gradient_moves_away, is_sharded, own_part
from ..layers import KroneckerLayer
from .autograd import nodes_behind

Mark = tuple[int, int, int]


def destination(layer: KroneckerLayer) -> Literal["gradient", "caller"] | None:
    """Where the backward pass in progress puts the gradient of a layer's weight.

    Returns:
        "gradient" for ``.grad``, "caller" if ``torch.autograd.grad()`` returns it, None if the pass does not compute
        it: ``torch.autograd.grad(loss, inputs)`` for adversarial examples and saliency maps is not training.
    """
    if not layer.weight.requires_grad:  # frozen since the forward pass
        return None
    if is_sharded(layer.weight) and not layer.is_shard:
        weight = gathered_weight(layer.weight, layer.modules)
    else:
        weight = layer.weight if is_used_itself(layer) else None
    if weight is None:
        return "gradient"
    node = _accumulator_ahead(weight)
    if node is None:
        # An operator of a compiled graph runs with autograd off, but autograd knows where the weight's gradient goes.
        include, keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with torch._C._ForceDispatchKeyGuard(include, keys - keys), torch.enable_grad():
            node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        return "gradient" if torch._C._will_engine_execute_node(node) else None
    except RuntimeError as error:  # raised for leaves whose gradient the pass returns instead of adding it to .grad
        return "caller" if "autograd.grad()" in str(error) else "gradient"


def _accumulator_ahead(weight: Tensor) -> Any:
    """The node that accumulates a weight's gradient, if few nodes lie between it and the one that runs; else None."""
    node = torch._C._current_autograd_node()
    waiting = [] if node is None else nodes_behind(node)
    for _, behind in waiting:
        if getattr(behind, "variable", None) is weight:
            return behind
    for _, node in waiting:  # a transpose, or a cast
        behind = nodes_behind(node)
        if len(behind) == 1 and getattr(behind[0][1], "variable", None) is weight:
            return behind[0][1]
    return None


def is_used_itself(layer: KroneckerLayer) -> bool:
    """Whether the layer's modules have the weight as a parameter, and do not compute with another tensor instead."""
    weight = layer.weight
    for module in layer.owners:  # loops, because this is asked for each layer, and generators take longer
        for own in module._parameters.values():
            if own is weight:
                return True
    return False


class GradientWatch:
    """Remembers the gradients of layers as the last backward pass has left them, and compares the present ones.

    Only :meth:`all_cleared` reads from the device, to look at gradients that were changed in place.
    """

    def __init__(self, layers: Sequence[KroneckerLayer]) -> None:
        self.layers = layers
        self._marks: dict[int, Mark] = {}

    def remember(self, layers: Iterable[int]) -> None:
        """Notes the gradients of these layers, by index, and forgets the others."""
        kept = (i for i in layers if not gradient_moves_away(self.layers[i].weight))
        self._marks = {i: _mark(g) for i, g in self._present(kept)}

    def removed(self, layers: Iterable[int]) -> list[int]:
        """The layers whose remembered gradient has been removed (None)."""
        return [i for i in layers if i in self._marks and self.layers[i].weight.grad is None]

    def changed(self, layers: Iterable[int]) -> list[int]:
        """The layers whose remembered gradient was replaced by another tensor, or written to in place."""
        known = self._present(i for i in layers if i in self._marks)
        return [i for i, g in known if _is_comparable(g) and _mark(g) != self._marks[i]]

    def all_cleared(self) -> bool:
        """Whether every remembered gradient has been removed or zeroed; reads the changed ones if none is as it was."""
        gone, changed = self.removed(self._marks), self.changed(self._marks)
        if not self._marks or len(gone) + len(changed) < len(self._marks):
            return False
        return not (changed and bool(self.largest(changed).any()))

    def written(self, layers: Iterable[int]) -> list[int]:
        """The layers whose gradient was set, or changed, since the last backward pass has left it."""
        return [i for i, g in self._present(layers) if _mark(g) != self._marks.get(i)]

    def largest(self, layers: Iterable[int]) -> Tensor:
        """The largest absolute entry of each gradient, ``[layers]``: 0 if it was zeroed; stays on the device."""
        gradients = [own_part(g) for _, g in self._present(layers)]
        if all(g.is_cpu for g in gradients):  # torch's maximum norm is slow on the CPU
            norms = [torch.stack(g.detach().aminmax()).abs().max() for g in gradients]
        else:
            norms = list(torch._foreach_norm([g.detach() for g in gradients], float("inf")))
        return torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])

    def comparable(self, layers: Iterable[int]) -> list[int]:
        """The layers with a gradient that :meth:`largest` can read."""
        return [i for i, g in self._present(layers) if _is_comparable(g)]

    def _present(self, layers: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """The gradients of these layers, each with the layer's index, where there is one."""
        return ((i, g) for i in layers if (g := self.layers[i].weight.grad) is not None)


def _mark(gradient: Tensor) -> Mark:
    """A mark that changes if a gradient is replaced by another tensor, or gets other values."""
    # Changes that a loop makes to a sharded gradient count in the version of the whole, FSDP2's in that of the part.
    part = own_part(gradient)
    return id(part), _version(gradient), _version(part)


def _version(gradient: Tensor) -> int:
    return -1 if gradient.is_inference() else gradient._version


def _is_comparable(gradient: Tensor) -> bool:
    part = own_part(gradient)
    return part.layout == torch.strided and part.numel() > 0 and not part.is_complex()
