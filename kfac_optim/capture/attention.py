"""Attention applies its projections by ``F.linear`` without calling a module: listen in during its forward."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import AttentionInputLayer, KroneckerLayer

__all__ = ["start_tapping", "stop_tapping"]

# Told of a projection: its index, use, input, output and part. Returns what has to take the output's place, or None.
See = Callable[[int, int, Tensor, Tensor, tuple[int, ...]], Tensor | None]


def start_tapping(module: nn.Module, query: Tensor, tapped: list[tuple[int, KroneckerLayer]], see: See) -> None:
    """At the start of a forward: tells of the projections, given with their indices, from now on."""
    stop_tapping()  # an interrupted forward did not
    examples = query.shape[0 if module.batch_first else 1] if query.dim() == 3 else 1
    F.linear = _Tap(see, tapped, examples)
    if torch.compiler.is_compiling():
        F.multi_head_attention_forward = _TRACEABLE["multi_head_attention_forward"]


def stop_tapping() -> None:
    """At the end of a forward."""
    if isinstance(F.linear, _Tap):
        F.linear = F.linear.original
        if torch.compiler.is_compiling():
            F.multi_head_attention_forward = _ATTENTION


class _Tap:
    """Stands in for ``F.linear`` while one attention module runs."""

    def __init__(self, see: See, tapped: list[tuple[int, KroneckerLayer]], examples: int) -> None:
        self.see, self.tapped, self.examples, self.original = see, tapped, examples, F.linear
        self.rows = self.queries = 0  # of a packed weight that were applied, of the queries

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = self.original(input, weight, bias)
        for index, layer in self.tapped:
            if weight is layer.weight or weight._base is layer.weight:
                part = (self.examples, *self._pairs(layer, input, weight))
                replaced = self.see(index, 0, input, output, part)
                output = output if replaced is None else replaced
        return output

    def _pairs(self, layer: KroneckerLayer, input: Tensor, weight: Tensor) -> tuple[int, ...]:
        """q, k, v at once or, in this order, part by part."""
        if not isinstance(layer, AttentionInputLayer):
            return ()
        first, self.rows = self.rows // layer.d_out, self.rows + weight.shape[0]
        if first == 0:
            self.queries = input.numel() // input.shape[-1]
        return first, self.rows // layer.d_out, self.queries


# torch.compile takes attention for one operator. Copies of its Python code are ordinary functions to it, which it
# follows to F.linear, and so to the tap.
_ATTENTION = F.multi_head_attention_forward
_TRACEABLE: dict[str, Any] = {**vars(F), "linear": lambda *args: F.linear(*args)}
for _name in ("_in_projection", "_in_projection_packed", "multi_head_attention_forward"):
    _original = getattr(F, _name)
    _TRACEABLE[_name] = FunctionType(_original.__code__, _TRACEABLE, _name, _original.__defaults__)
