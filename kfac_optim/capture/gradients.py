"""Which backward passes of a step count: those whose gradient is in ``.grad`` when the step is taken.

The rule, layer by layer; "gradient" means that of the layer's weight:

- A pass counts for a layer if it adds to the layer's gradient (:func:`destination`).
- A layer whose gradient was removed (None) or zeroed in place since the last pass, by whatever ``zero_grad()``, starts
  its statistics anew when the next pass begins.
- At the step everything is dropped if that has happened to all layers that were seen. If it has happened to some of
  them only, these are held still, and the passes count.
- ``torch.autograd.grad(loss, weights)`` adds to no gradient. What it shows is kept apart, and counts only if no pass of
  ``backward()`` does and the loop has set the gradients itself.

Other changes of a gradient (accumulation, clipping, unscaling, a reduction over ranks, a new tensor in its place) leave
the statistics as they are. Where a framework keeps the gradients elsewhere (FSDP2 without synchronization), or moves
them there after the pass (ZeRO), none is remembered, and nothing is taken for removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..distributed import gradient_moves_away, is_sharded, own_part
from ..layers import KroneckerLayer

__all__ = ["GradientWatch", "destination", "is_used_itself"]

Mark = tuple[int, int, int]


def destination(layer: KroneckerLayer) -> Literal["gradient", "caller"] | None:
    """Where the backward pass in progress brings the gradient of a layer's weight.

    Returns:
        "gradient" for ``.grad``, "caller" where ``torch.autograd.grad()`` returns it, None for a pass that does not
        compute it: ``torch.autograd.grad(loss, inputs)`` for adversarial examples and saliency maps is no training.
    """
    if not layer.weight.requires_grad:  # frozen since the forward pass
        return None
    if not is_used_itself(layer) or is_sharded(layer.weight):  # FSDP2: another tensor stands for a DTensor
        return "gradient"
    # An operator of a compiled graph runs without autograd, which here has to say where the weight's gradient goes.
    keys = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys - keys), torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    try:
        return "gradient" if torch._C._will_engine_execute_node(node) else None
    except RuntimeError as error:  # raised for leaves whose gradient the pass returns instead of adding it to .grad
        return "caller" if "autograd.grad()" in str(error) else "gradient"


def is_used_itself(layer: KroneckerLayer) -> bool:
    """Whether modules of the layer have its weight as a parameter, and do not compute with another tensor instead."""
    return any(own is layer.weight for module in layer.modules for own in module._parameters.values())


class GradientWatch:
    """Remembers the gradients as the last backward pass has left them, and compares.

    Nothing is read from the device but by :meth:`all_cleared`: a gradient that was changed in place is looked at there.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[KroneckerLayer]) -> None:
        self.layers = layers
        self._marks: dict[int, Mark] = {}

    def remember(self, layers: Iterable[int]) -> None:
        """Notes the gradients of these layers, by index, and forgets the others."""
        weights = ((i, self.layers[i].weight) for i in layers)
        found = ((i, weight.grad) for i, weight in weights if not gradient_moves_away(weight))
        self._marks = {i: _mark(gradient) for i, gradient in found if gradient is not None}

    def removed(self, layers: Iterable[int]) -> list[int]:
        """The layers whose weight had a gradient and has none now."""
        return [i for i in layers if i in self._marks and self.layers[i].weight.grad is None]

    def changed(self, layers: Iterable[int]) -> list[int]:
        """The layers whose gradient is not as it was: another tensor, or written to in place."""
        pairs = ((i, self.layers[i].weight.grad) for i in layers if i in self._marks)
        return [i for i, g in pairs if g is not None and _comparable(own_part(g)) and _mark(g) != self._marks[i]]

    def all_cleared(self) -> bool:
        """Whether every gradient that was noted has been removed or zeroed; if all were changed, reads them."""
        gone, changed = self.removed(self._marks), self.changed(self._marks)
        if not self._marks or len(gone) + len(changed) < len(self._marks):
            return False
        return not (changed and bool(self.largest(changed).any()))

    def written(self, layers: Iterable[int]) -> list[int]:
        """The layers whose weight has a gradient that it did not have, or not with these values."""
        pairs = ((i, self.layers[i].weight.grad) for i in layers)
        return [i for i, g in pairs if g is not None and _mark(g) != self._marks.get(i)]

    def largest(self, layers: Iterable[int]) -> Tensor:
        """The largest absolute entry of each gradient, ``[layers]``: 0 where it was zeroed; stays on the device."""
        gradients = [own_part(g) for i in layers if (g := self.layers[i].weight.grad) is not None]
        if all(g.device.type == "cpu" for g in gradients):  # where torch takes long for the maximum norm
            norms = [torch.stack(g.detach().aminmax()).abs().max() for g in gradients]
        else:
            norms = list(torch._foreach_norm([g.detach() for g in gradients], float("inf")))
        return torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])

    def comparable(self, layers: Iterable[int]) -> list[int]:
        """The layers with a gradient that :meth:`largest` can look at."""
        return [i for i in layers if (g := self.layers[i].weight.grad) is not None and _comparable(own_part(g))]


def _mark(gradient: Tensor) -> Mark:
    """What tells a gradient from another one, and from itself with other values."""
    # What a loop does to a sharded one counts as a version of the whole, what FSDP2 adds as one of the part.
    part = own_part(gradient)
    return id(part), _version(gradient), _version(part)


def _version(gradient: Tensor) -> int:
    return -1 if gradient.is_inference() else gradient._version


def _comparable(gradient: Tensor) -> bool:
    return gradient.layout == torch.strided and gradient.numel() > 0 and not gradient.is_complex()
