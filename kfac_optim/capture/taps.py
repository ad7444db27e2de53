"""Functions of torch that are given a layer's weight inside the call of a module, the layer's host.

While a host runs, a :class:`Tap` is on torch's stack of function modes and reports each use of a watched weight. That
stack belongs to the thread: other threads, and other modules before and after, call torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from ..layers import Application, AttentionInputLayer, AttentionLayer, HostedLayer, ProjectionCall, application_of

# Called with one use of a weight: the function's input, its output and, as numbers, how it was applied. Returns a
# replacement for the output, or None.
Record = Callable[[Tensor, Tensor, Sequence[int]], Tensor | None]


class Tap(TorchFunctionMode):
    """Reports the uses of weights in one call of a host, from ``with`` on until it ends, or until :func:`remove_taps`.

    Args:
        host: The module that runs.
    """

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host
        # The layers whose weights the host applies, each with what is called with each of its uses.
        self.watched: list[tuple[Record, HostedLayer]] = []
        self.has_begun = False  # whether the call has got as far as one of the functions
        self.is_traced = torch.compiler.is_compiling()
        # Of attention: how many rows of a packed weight it has applied so far, and how many queries each example has.
        self._examples, self._rows_applied, self._queries = 1, 0, 0

    def add(self, watched: Iterable[tuple[Record, HostedLayer]]) -> None:
        """Reports to one more engine; there are several if an optimizer has a part of the host's weights only."""
        self.watched.extend(watched)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch; inside it this mode is off."""
        if torch.compiler.is_compiling() and not self.is_traced:  # a compiled part of the host, not all of it
            return func(*args, **(kwargs or {}))
        if isinstance(self.watched[0][1], AttentionLayer):  # whatever else uses its weights, hooks for instance
            return (self._attend if func is F.multi_head_attention_forward else func)(*args, **(kwargs or {}))
        output, application = func(*args, **(kwargs or {})), application_of(func, args, kwargs or {})
        return output if application is None else self.report(application, output)

    def report(self, application: Application, output: Tensor) -> Tensor:
        """Reports a use of a weight, if it is watched; returns the output or what replaces it."""
        details: Sequence[int] | None = None
        for record, layer in self.watched:
            if layer.is_applied(self.host, application):
                self.has_begun = True
                details = self.details_of(layer, application) if details is None else details
                replaced = record(application.input, output, details)
                output = output if replaced is None else replaced
        return output

    def details_of(self, layer: HostedLayer, application: Application) -> Sequence[int]:
        """How a weight was applied, as numbers that the layer knows to read.

        Attention applies packed projections all at once, or part by part in the order q, k, v.
        """
        if not isinstance(layer, AttentionLayer):
            return application.windows
        if not isinstance(layer, AttentionInputLayer):
            return ProjectionCall(self._examples)
        rows, before = application.weight.shape[0], self._rows_applied
        first, self._rows_applied = before // layer.d_out, before + rows
        if first == 0:
            self._queries = application.input.shape[0]
        return ProjectionCall(self._examples, first, self._rows_applied // layer.d_out, self._queries)

    def _attend(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``F.multi_head_attention_forward`` with :meth:`_linear` in the place of ``F.linear``.

        A mode is off inside the function that it runs, and that function hands itself to every mode that is on. So a
        copy of its code runs instead, which looks ``linear`` up elsewhere.
        """
        self.has_begun = True
        self._examples = query.shape[1] if query.dim() == 3 else 1
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

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.report(Application(input, weight, bias), F.linear(input, weight, bias))


def tap_of(host: nn.Module, layers: Collection[HostedLayer]) -> Tap | None:
    """The tap that another engine has put on this thread's stack for the call of ``host`` that begins.

    One that has begun, or reports to ``layers`` already, is of an earlier call, which was interrupted.
    """
    tap = _get_current_function_mode()
    if not isinstance(tap, Tap) or tap.host is not host or tap.has_begun:
        return None
    return None if any(own is known for own in layers for _, known in tap.watched) else tap


def remove_taps(host: nn.Module | None = None) -> None:
    """Takes taps off this thread's stack, of a call that ends and of those that were interrupted.

    Args:
        host: The module whose taps are meant; hosts may call other hosts. None: of all modules.
    """
    if torch.compiler.is_compiling():
        tap = _get_current_function_mode()
        if isinstance(tap, Tap) and (host is None or tap.host is host):
            _pop_mode()
        return
    others = []
    for _ in range(torch._C._len_torch_function_stack()):
        mode = _pop_mode()
        if not isinstance(mode, Tap) or host not in (None, mode.host):
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
_TRACED_TAPS: list[Tap] = []  # used only while dynamo traces, which sees a list of its own
_TRACEABLE_ATTENTION = _functions_with(lambda *args: _TRACED_TAPS[-1]._linear(*args))["multi_head_attention_forward"]
