"""Compiled graphs: operators that stand for the hooks, and the bookkeeping of calls that run as graphs.

A graph can't hold hooks on tensors. So while dynamo traces a model, each watched layer gets an operator in the place of
its hook: ``kfac_optim::record_input``, whose backward is ``kfac_optim::record_output_gradient``. Both return copies,
because an operator's result may not be its argument, and are kept because their results are used.

When a graph runs, its operators run first; the Python code that was traced with it, which opens and ends the model
call, takes effect afterwards. So the states of a call (see ``calls.py``) are passed through in another order::

    running    the first operator of a graph ran while no call was open: a stand-in for the call was made
      -> traced code done    the call itself is known, M included
      -> returned            the next event (a gradient, another graph, the end of the step): the stand-in gets M

With a graph break, what was traced before it opens the call; the operators after it find it open.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..layers import ProjectionCall
from .calls import CONCURRENT, ModelCall, ModelCalls, in_backward
from .microbatch import BackwardPasses

__all__ = ["CompiledCalls"]

# A CUDA graph would replay the operators' kernels without their Python; inductor then leaves them out of it.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_OUTSIDE_CUDA_GRAPHS: dict[str, Any] = {} if _TAG is None else {"tags": (_TAG,)}

_HANDLES = itertools.count()
_WATCHERS: weakref.WeakValueDictionary[int, CompiledCalls] = weakref.WeakValueDictionary()
# By a tensor that the graph saves for its backward, so that an observation lives as long as the graph needs it.
_AWAITED: MutableMapping[Tensor, Callable[[Tensor], None] | None] = WeakTensorKeyDictionary()


class CompiledCalls:
    """The bookkeeping of one model's compiled graphs, while they are traced and when they run.

    Args:
        calls: The model calls, eager ones included: a compiled layer may be part of an eager model.
        passes: Takes output gradients; its recorder makes moments of inputs.
        sampled: Whether the Fisher is a sampled one, which compiled graphs can't serve.
    """

    def __init__(self, calls: ModelCalls, passes: BackwardPasses, *, sampled: bool) -> None:
        self.calls, self.recorder, self.passes, self.sampled = calls, passes.recorder, passes, sampled
        self._running: ModelCall | None = None  # stands for the call whose graph runs
        self._traced: ModelCall | None = None  # that call itself, as its Python code made it
        self._handle = next(_HANDLES)  # by which graphs know this object
        _WATCHERS[self._handle] = self

    @property
    def has_begun(self) -> bool:
        """Whether a compiled call is in progress, or awaits its backward pass."""
        return self._running is not None or self._traced is not None

    # While a graph is traced.

    def trace_model_call_end(self, call: ModelCall) -> None:
        """A model call has returned and M is known."""
        self._traced = call

    def trace_layer_call(
        self, index: int, use: int, a: Tensor, output: Tensor, projection: ProjectionCall | None
    ) -> Tensor:
        """Puts the operator into the graph; returns what takes the output's place."""
        return cast(Tensor, _record_input(a, output, self._handle, index, use, list(projection or ()))[0])

    def require_empirical(self) -> None:
        """Raises for a sampled Fisher."""
        if self.sampled:
            raise RuntimeError(
                "the sampled Fisher needs gradients of single layers before the backward pass, which a compiled graph "
                "doesn't give: use fisher='empirical' (in the place of KFAC another optimizer of this package), or "
                "don't compile the model"
            )

    # While a graph runs.

    def record_input(
        self, index: int, use: int, a: Tensor, output: Tensor, projection: ProjectionCall | None
    ) -> Callable[[Tensor], None]:
        """A layer of the graph was applied; returns what takes the gradient of its output."""
        # A copy, because an observation may keep its input, and compiled code writes over what it needs no more.
        layer_call = self.recorder.observe(index, use, a.clone(), output, projection)
        if self._traced is not None:
            self.finish_running_call()
        call = self.calls.current
        if in_backward():  # recomputed
            call = self.calls.last
        elif call is None:
            self.passes.require_alone()
            self.passes.abandon()  # left behind by a backward pass that raised
            if self._running is not None and self._running.is_elsewhere:
                raise RuntimeError(CONCURRENT)
            call = self._running = self._running or ModelCall(thread=threading.current_thread())

        def take(g: Tensor) -> None:
            self.finish_running_call()
            self.passes.record_output_gradient(layer_call, call, g)

        return take

    def finish_running_call(self) -> None:
        """A call whose graph has run is over: its stand-in gets M, which its Python code has told."""
        if self._running is not None and self._traced is not None:
            self._running.finish(self._traced.terms)
            self.calls.returned(self._running)
        self._running = self._traced = None


@torch.library.custom_op(
    "kfac_optim::record_input",
    mutates_args=(),
    schema="(Tensor a, Tensor output, int capture, int index, int use, int[] projection) -> (Tensor, Tensor)",
    **_OUTSIDE_CUDA_GRAPHS,
)
def _record_input(
    a: Tensor, output: Tensor, capture: int, index: int, use: int, projection: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The output of a layer, and what stands for the observation."""
    token, watcher = torch.zeros((), dtype=torch.int64), _WATCHERS.get(capture)
    take = None
    if watcher is not None and watcher.recorder.enabled and output.numel():
        watcher.require_empirical()
        take = watcher.record_input(index, use, a, output, ProjectionCall(*projection) if projection else None)
    _AWAITED[token] = take
    return output.clone(), token


@_record_input.register_fake
def _(
    a: Tensor, output: Tensor, capture: int, index: int, use: int, projection: Sequence[int]
) -> tuple[Tensor, Tensor]:
    _WATCHERS[int(capture)].require_empirical()  # here, so that it is raised during compilation
    return torch.empty_like(output), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op(
    "kfac_optim::record_output_gradient",
    mutates_args=(),
    schema="(Tensor g, Tensor token) -> Tensor",
    **_OUTSIDE_CUDA_GRAPHS,
)
def _record_output_gradient(g: Tensor, token: Tensor) -> Tensor:
    """The gradient of a layer's output."""
    take = _AWAITED[token]
    if take is not None:
        take(g)
    return g.clone()


@_record_output_gradient.register_fake
def _(g: Tensor, token: Tensor) -> Tensor:
    return torch.empty_like(g)


def _save_token(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return None, _record_output_gradient(g, *ctx.saved_tensors), None, None, None, None


_record_input.register_autograd(_backward, setup_context=_save_token)
