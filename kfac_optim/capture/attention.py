"""The projections of attention, which are applied by ``F.linear`` without calling a module.

While a module with such projections runs, a :class:`ProjectionTap` is on torch's stack of function modes and reports
each use of a watched weight. That stack belongs to the thread: other threads, and other modules before and after, call
torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from ..layers import AttentionInputLayer, AttentionLayer, ProjectionCall

# Called with one use of a projection: its input, its output and the use itself. Returns a replacement for the output,
# or None.
Record = Callable[[Tensor, Tensor, ProjectionCall], Tensor | None]


class ProjectionTap(TorchFunctionMode):
    """Reports the projections of one call of a module, from ``with`` on until it ends, or until :func:`remove_taps`.

    Args:
        module: The module that runs.
        query: Its first input.
    """

    def __init__(self, module: nn.Module, query: Tensor) -> None:
        super().__init__()
        self.module = module
        # The layers whose weights the module applies, each with what is called with each of its uses.
        self.projections: list[tuple[Record, AttentionLayer]] = []
        self.examples = query.shape[0 if module.batch_first else 1] if query.dim() == 3 else 1
        self.rows_applied = 0  # how many rows of a packed weight the module has applied so far
        self.queries = 0  # how many queries each example has
        self.has_begun = False  # whether the call has got as far as torch's function

    def add(self, projections: Iterable[tuple[Record, AttentionLayer]]) -> None:
        """Reports to one more engine; there are several if an optimizer has a part of the module's weights only."""
        self.projections.extend(projections)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch; inside it this mode is off."""
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output, call = F.linear(input, weight, bias), None
        for record, layer in self.projections:
            if layer.applies(weight):
                call = call or self._call(layer, input, weight)
                replaced = record(input, output, call)
                output = output if replaced is None else replaced
        return output

    def _call(self, layer: AttentionLayer, input: Tensor, weight: Tensor) -> ProjectionCall:
        """Which use this is: packed projections are applied all at once, or part by part in the order q, k, v."""
        if not isinstance(layer, AttentionInputLayer):
            return ProjectionCall(self.examples)
        first, self.rows_applied = self.rows_applied // layer.d_out, self.rows_applied + weight.shape[0]
        if first == 0:
            self.queries = input.shape[0]
        return ProjectionCall(self.examples, first, self.rows_applied // layer.d_out, self.queries)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        """``F.multi_head_attention_forward`` with :meth:`_linear` in the place of ``F.linear``.

        A mode is off inside the function that it runs, and that function hands itself to every mode that is on. So a
        copy of its code runs instead, which looks ``linear`` up elsewhere.
        """
        self.has_begun = True
        if not torch.compiler.is_compiling():
            functions = _functions_with(self._linear)
            try:
                return functions["multi_head_attention_forward"](*args, **kwargs)
            finally:
                functions.clear()  # breaks the cycle with the functions that hold it
        # dynamo accepts no functions made while it traces, so this one exists already, and finds the tap in a list.
        _TRACED_TAPS.append(self)
        try:
            return _TRACEABLE_ATTENTION(*args, **kwargs)
        finally:
            _TRACED_TAPS.pop()


def tap_of(module: nn.Module, layers: Collection[AttentionLayer]) -> ProjectionTap | None:
    """The tap that another engine has put on this thread's stack for the call of ``module`` that begins.

    One that has begun, or reports to ``layers`` already, is of an earlier call, which was interrupted.
    """
    tap = _get_current_function_mode()
    if not isinstance(tap, ProjectionTap) or tap.module is not module or tap.has_begun:
        return None
    return None if any(own is known for own in layers for _, known in tap.projections) else tap


def remove_taps() -> None:
    """Takes all taps off this thread's stack: that of a call that ends, and those that interrupted calls have left."""
    if torch.compiler.is_compiling():
        if isinstance(_get_current_function_mode(), ProjectionTap):
            _pop_mode()
        return
    others = []
    for _ in range(torch._C._len_torch_function_stack()):
        mode = _pop_mode()
        if not isinstance(mode, ProjectionTap):
            others.append(mode)
    for mode in reversed(others):
        _push_mode(mode)


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
_TRACED_TAPS: list[ProjectionTap] = []  # used only while dynamo traces, which sees a list of its own
_TRACEABLE_ATTENTION = _functions_with(lambda *args: _TRACED_TAPS[-1]._linear(*args))["multi_head_attention_forward"]
