"""Compiled graphs: operators that stand for the hooks, and the bookkeeping of calls that run as graphs.

A graph cannot hold hooks on tensors. So while dynamo traces a model, each watched layer gets an operator in the place
of its hook: ``kfac_optim::record_input``, whose backward is ``kfac_optim::record_output_gradient``. Both return copies,
because an operator must not return its argument. The compiler keeps both operators because their results are used.

When a graph runs, its operators run first; the Python code that was traced with it, which opens and ends the model
call, takes effect afterwards. So a call goes through its states (see ``calls.py``) in another order::

    running    the first operator of a graph ran while no call was open: a stand-in for the call was made
      -> traced code done    the call itself is known, M included
      -> returned            the next event (a gradient, another graph, the end of the step): the stand-in gets M

If the graph breaks, the code traced before the break opens the call, and the operators after it find it open.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakTensorKeyDictionary

from .autograd import in_backward
from .calls import CONCURRENT, ModelCall, ModelCalls
from .microbatch import BackwardPasses

# A CUDA graph would replay the operators' kernels without their Python code; with this tag inductor leaves them out.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_OUTSIDE_CUDA_GRAPHS: dict[str, Any] = {} if _TAG is None else {"tags": (_TAG,)}

_HANDLES = itertools.count()
_WATCHERS: weakref.WeakValueDictionary[int, CompiledCalls] = weakref.WeakValueDictionary()
# The keys are tensors that graphs save for their backward, so that an observation lives as long as its graph.
_AWAITED: MutableMapping[Tensor, Callable[[Tensor], None] | None] = WeakTensorKeyDictionary()


def place_of(index: int, use: int) -> tuple[Tensor]:
    """The index of a layer and of one of its modules, as an input of a graph that serves for all layers alike.

    If they were constants of the graph, twelve blocks of a transformer that are compiled one by one would take twelve
    graphs, which is more than dynamo makes; the blocks would then run without being compiled.
    """
    return (torch.tensor((index, use), dtype=torch.int64, device="cpu"),)


class CompiledCalls:
    """The bookkeeping of one model's compiled graphs, while they are traced and when they run.

    Args:
        calls: The model calls, eager ones included: a compiled layer may be part of an eager model.
        passes: Takes output gradients; its recorder makes moments of inputs.
        sampled: Whether the Fisher is a sampled one, which compiled graphs do not support.
    """

    def __init__(self, calls: ModelCalls, passes: BackwardPasses, *, sampled: bool) -> None:
        self.calls, self.recorder, self.passes, self.sampled = calls, passes.recorder, passes, sampled
        self._running: ModelCall | None = None  # the stand-in for the call whose graph runs
        self._traced: ModelCall | None = None  # that call itself, which its Python code has made
        self._handle = next(_HANDLES)  # a number by which graphs refer to this object
        _WATCHERS[self._handle] = self

    # While a graph is traced.

    def trace_model_call_end(self, call: ModelCall) -> None:
        """Notes that a model call has returned and M is known."""
        self._traced = call

    def trace_layer_call(self, place: Tensor, a: Tensor, output: Tensor, details: Sequence[int]) -> Tensor:
        """Puts the operator into the graph; returns its result, which replaces the output."""
        return cast(Tensor, _record_input(a, output, place, self._handle, list(details))[0])

    # While a graph runs.

    def record_input(
        self, index: int, use: int, a: Tensor, output: Tensor, details: Sequence[int]
    ) -> Callable[[Tensor], None] | None:
        """Notes that a layer of the graph was applied; returns a function to call with the gradient of its output."""
        if self._traced is not None:  # even if this layer is frozen: the call that comes now has an M of its own
            self.finish_running_call()
        if not self.recorder.wants(index, a, output):
            return None
        # A copy, because an observation may keep its input, and compiled code overwrites what it no longer needs.
        layer_call = self.recorder.observe(index, use, a.clone(), output, details)
        call = self.calls.current
        if in_backward():  # a checkpoint that is recomputed
            call = self.calls.last
        elif call is None:
            self.passes.require_alone()
            if self._running is not None and self._running.is_of_other_thread:
                raise RuntimeError(CONCURRENT)
            call = self._running = self._running or ModelCall(thread=threading.current_thread())

        def take(g: Tensor) -> None:
            self.finish_running_call()
            self.passes.record_output_gradient(layer_call, call, g)

        return take

    def finish_running_call(self) -> None:
        """Ends a call whose graph has run: its stand-in gets M, which the Python code of the call has set."""
        if self._running is not None and self._traced is not None:
            self._running.set_terms(self._traced.terms)
            self.calls.note_return(self._running)
        self._running = self._traced = None


@torch.library.custom_op(
    "kfac_optim::record_input",
    mutates_args=(),
    schema="(Tensor a, Tensor output, Tensor place, int handle, SymInt[] details) -> (Tensor, Tensor)",
    **_OUTSIDE_CUDA_GRAPHS,
)
def _record_input(
    a: Tensor, output: Tensor, place: Tensor, handle: int, details: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """A copy of a layer's output, and a token that stands for the observation."""
    token, watcher = torch.zeros((), dtype=torch.int64, device="cpu"), _WATCHERS.get(handle)
    take = None
    if watcher is not None and watcher.recorder.enabled and output.numel():
        index, use = place.tolist()
        take = watcher.record_input(index, use, a, output, details)
    _AWAITED[token] = take
    return output.clone(), token


@_record_input.register_fake
def _(a: Tensor, output: Tensor, place: Tensor, handle: int, details: Sequence[int]) -> tuple[Tensor, Tensor]:
    if _WATCHERS[int(handle)].sampled:  # looked at here, so that it is found during compilation
        raise RuntimeError(
            "the sampled Fisher needs gradients of single layers before the backward pass, which a compiled graph "
            "doesn't give: use fisher='empirical' (in the place of KFAC another optimizer of this package), or don't "
            "compile the model"
        )
    return torch.empty_like(output), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "kfac_optim::record_output_gradient",
    mutates_args=(),
    schema="(Tensor g, Tensor token) -> Tensor",
    **_OUTSIDE_CUDA_GRAPHS,
)
def _record_output_gradient(g: Tensor, token: Tensor) -> Tensor:
    """A copy of the gradient of a layer's output."""
    take = _AWAITED[token]
    if take is not None:
        take(g)
    return g.clone()


@_record_output_gradient.register_fake
def _(g: Tensor, token: Tensor) -> Tensor:
    return torch.empty_like(g)


def _save_token(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


@_disable_dynamo
def _backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return None, _record_output_gradient(g, *ctx.saved_tensors), None, None, None


_record_input.register_autograd(_backward, setup_context=_save_token)
