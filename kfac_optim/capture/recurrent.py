"""Calls of recurrent modules, whose layers are inside one operation of torch.

The tensors that such a module returns become parts of one, so that their gradients arrive together; then inputs and
output gradients of its layers are computed (``layers/recurrent.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..common.precision import full_precision
from ..layers import RecurrentCall, RecurrentLayer, tensors_of, with_tensors
from .autograd import beneath_transforms, is_of_loss, is_transformed, when_gradient_arrives
from .calls import ModelCall, ModelCalls, input_of
from .gradients import destination
from .microbatch import BackwardPasses
from .recorder import LayerCall
from .sampling import SampledBackward

LayerCalls = Iterable[tuple[LayerCall, Tensor]]  # each with its output gradient


class RecurrentCalls:
    """Records the calls of recurrent modules.

    Args:
        calls: The model calls.
        passes: Takes output gradients; its recorder makes moments.
        sampling: The sampled Fisher's backward pass, if there is one.
    """

    def __init__(self, calls: ModelCalls, passes: BackwardPasses, sampling: SampledBackward | None) -> None:
        self._calls, self._recorder, self._passes, self._sampling = calls, passes.recorder, passes, sampling

    @property
    def enabled(self) -> bool:
        """Whether the step collects statistics."""
        return self._recorder.enabled

    def on_call(
        self,
        layers: Sequence[tuple[int, RecurrentLayer]],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        """The hook of a module; returns its output as copies of the parts of one tensor."""
        if not torch.is_grad_enabled():
            return None
        tensors, given = tensors_of(output), input_of(args, kwargs)
        wanted = [(i, layer) for i, layer in layers if self._recorder.wants(i, given, tensors[0])]
        if isinstance(given, PackedSequence):  # an example is a row: without lengths no mean over the positions of one
            wanted = [(i, layer) for i, layer in wanted if not layer.by_example]
        if not wanted or not tensors[0].requires_grad or tensors[0].numel() == 0:  # a batch without examples
            return None
        if is_transformed(tensors[0]):
            for index, _ in wanted:
                self._passes.watch_transformed(index, beneath_transforms(tensors[0]))
            return None
        state = args[1] if len(args) > 1 else kwargs.get("hx")
        recurrent = RecurrentCall(module, given, state, output, self._recorder.dtype)
        together, call = torch.cat([_in_memory(tensor).reshape(-1) for tensor in tensors]), self._calls.current
        views = functools.partial(_views, like=[tensor.detach() for tensor in tensors])
        layer_calls = functools.partial(self._layer_calls, wanted, recurrent, views)
        if self._sampling is None:
            take = functools.partial(self._add, wanted, layer_calls, call or self._calls.last)
            when_gradient_arrives(together, take)
        elif not any(self._sampling.leaves_out(i, call) for i, _ in wanted) and call is not None:
            self._sampling.await_gradient(call, [i for i, _ in wanted], layer_calls, together)
        # Copies, because views of one tensor must not be changed in place as separate tensors may.
        return with_tensors(output, (view.clone() for view in views(together)))

    def _layer_calls(
        self,
        wanted: Sequence[tuple[int, RecurrentLayer]],
        recurrent: RecurrentCall,
        views: Callable[[Tensor], Sequence[Tensor]],
        g: Tensor,
    ) -> Iterator[tuple[LayerCall, Tensor]]:
        """The calls of a module's layers, each with its output gradient; ``g``: the gradient of all it has returned."""
        with self._recorder.stopwatch.stage("factor computation"), full_precision(g.device.type):
            rows = recurrent.rows(views(g))
        for index, layer in wanted:
            a, g_rows = rows[layer.suffix]
            yield self._recorder.observe(index, 0, a, g_rows, ()), g_rows

    def _add(
        self,
        wanted: Sequence[tuple[int, RecurrentLayer]],
        layer_calls: Callable[[Tensor], LayerCalls],
        call: ModelCall | None,
        g: Tensor,
    ) -> None:
        """Takes the gradient of what a module has returned, if the pass computes that of a layer's weight."""
        if is_of_loss(g) and any(destination(layer) for _, layer in wanted):
            for layer_call, g_rows in layer_calls(g):
                self._passes.record_output_gradient(layer_call, call, g_rows)


def _order(tensor: Tensor) -> list[int]:
    """The dimensions of a tensor as they lie in memory, the outermost first."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)


def _in_memory(tensor: Tensor) -> Tensor:
    """A tensor with its dimensions in that order."""
    return tensor.permute(_order(tensor))


def _views(flat: Tensor, *, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that lie one after the other in a flat one, in memory as ``like``: dropout numbers entries so."""
    ends, parts = itertools.accumulate(tensor.numel() for tensor in like), []
    for end, tensor in zip(ends, like, strict=True):
        order = _order(tensor)
        part = flat[end - tensor.numel() : end].view([tensor.shape[dim] for dim in order])
        parts.append(part.permute([order.index(dim) for dim in range(tensor.dim())]))
    return parts
