"""What is special about attention: it applies parts of packed weights, inside a function of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import Application, AttentionInputLayer, HostedLayer, ProjectionCall
from .taps import Tap


class AttentionTap(Tap):
    """Reports the projections of one call of ``nn.MultiheadAttention``."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__(host)
        self.examples = 1
        self.rows_applied = 0  # how many rows of a packed weight the module has applied so far
        self.queries = 0  # how many queries each example has

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a function; projections are reported where attention applies them."""
        return (self._attend if func is F.multi_head_attention_forward else func)(*args, **kwargs)

    def details_of(self, layer: HostedLayer, application: Application) -> Sequence[int]:
        """Which use this is: packed projections are applied all at once, or part by part in the order q, k, v."""
        if not isinstance(layer, AttentionInputLayer):
            return ProjectionCall(self.examples)
        rows, before = application.weight.shape[0], self.rows_applied
        first, self.rows_applied = before // layer.d_out, before + rows
        if first == 0:
            self.queries = application.input.shape[0]
        return ProjectionCall(self.examples, first, self.rows_applied // layer.d_out, self.queries)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.report(Application(input, weight, bias), F.linear(input, weight, bias))

    def _attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``F.multi_head_attention_forward`` with :meth:`_linear` in the place of ``F.linear``.

        A mode is off inside the function that it runs, and that function hands itself to every mode that is on. So a
        copy of its code runs instead, which looks ``linear`` up elsewhere.
        """
        self.has_begun = True
        self.examples = query.shape[1] if query.dim() == 3 else 1
        if not torch.compiler.is_compiling():
            functions = _functions_with(self._linear)
            try:
                return functions["multi_head_attention_forward"](query, *args, **kwargs)
            finally:
                functions.clear()  # breaks the cycle with the functions that hold it
        # dynamo accepts no functions made while it traces, so this one exists already, and finds the tap in a list.
        _TRACED_TAPS.append(self)
        try:
            return _TRACEABLE_ATTENTION(query, *args, **kwargs)
        finally:
            _TRACED_TAPS.pop()


def _functions_with(linear: Callable[..., Tensor]) -> dict[str, Any]:
    """The functions of ``torch.nn.functional`` with another ``linear``, called by a copy of the attention function."""
    functions: dict[str, Any] = {**vars(F), "linear": linear}
    for name, original in _ORIGINALS.items():
        functions[name] = FunctionType(original.__code__, functions, name, original.__defaults__)
    return functions


# torch's own functions, even if they are wrapped later: a wrapper has run by the time that the mode is asked.
_ORIGINALS = {
    name: getattr(F, name) for name in ("_in_projection", "_in_projection_packed", "multi_head_attention_forward")
}
_TRACED_TAPS: list[AttentionTap] = []  # used only while dynamo traces, which sees a list of its own
_TRACEABLE_ATTENTION = _functions_with(lambda *args: _TRACED_TAPS[-1]._linear(*args))["multi_head_attention_forward"]
