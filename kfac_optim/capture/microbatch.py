"""Micro-batches: the moments of layers, added up over a backward pass.

A micro-batch is one backward pass. Its states::

    none      no backward pass has reached a watched layer or the model's output
      -> open       the first output gradient of a watched layer arrives, or that of the model's output
    open      every pair (input, output gradient) of a layer is added to the micro-batch
      -> counted    the backward pass has ended: its moments are added to the step's, with weight 0 if one of them is
                    not finite (the decision stays on the device; the flags are read once, in ``step()``)
      -> abandoned  the pass raised and another one reaches a layer or the output, or the step's statistics are
                    discarded between two passes

``gradients.py`` says which of the counted micro-batches still belong to the step when it is taken.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .autograd import in_backward, is_of_loss
from .calls import CONCURRENT, ModelCall
from .gradients import GradientWatch, destination
from .recorder import LayerCall, Recorder
from .statistics import Moments, StepStatistics, TakenStatistics

_COMPILED = (
    "gradients can't be watched under compiled autograd: call backward() without it "
    "(torch._dynamo.config.compiled_autograd = False); torch.compile(model) works"
)


@dataclass
class MicroBatch:
    """One backward pass in progress.

    Attributes:
        sums: Packed raw sums by layer index.
        rows: The number of rows in A, by layer index.
        by_example: For layers that pool their calls by example, the sums over calls of ``a``, ``count`` and output
            gradients, by layer index and number of examples.
        calls: The model calls that the backward pass has reached.
        task: The number of the backward pass.
        to_caller: Whether it returns the gradients (``torch.autograd.grad``) instead of adding them to ``.grad``.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    rows: dict[int, float] = field(default_factory=dict)
    by_example: dict[tuple[int, int], tuple[Tensor, Any, Tensor]] = field(default_factory=dict)
    calls: set[ModelCall] = field(default_factory=set)
    task: int = -1
    to_caller: bool = False

    @property
    def terms(self) -> int:
        """M, once the pass has ended."""
        return max((call.terms for call in self.calls), default=1)

    def note_caller(self) -> None:
        """Notes that the pass returns the gradients to its caller."""
        self.to_caller = True

    def add(self, layer: int, a: Tensor, count: float, g: Tensor) -> None:
        """Adds one layer call; the calls in a backward pass add their rows."""
        if layer in self.sums:  # not in place, because the tensors may be used elsewhere
            a, g = self.sums[layer][0] + a, self.sums[layer][1] + g
        self.sums[layer] = a, g
        self.rows[layer] = self.rows.get(layer, 0.0) + count

    def add_examples(self, layer: int, a: Tensor, count: Any, g: Tensor) -> None:
        """Adds one call of a layer that pools its calls; those with equally many examples are taken to share them."""
        known = self.by_example.get((layer, len(g)))
        if known is not None:
            a, count, g = known[0] + a, known[1] + count, known[2] + g
        self.by_example[layer, len(g)] = a, count, g


class BackwardPasses:
    """Adds up the moments of the backward passes of a step.

    Args:
        recorder: Makes moments of output gradients.
        on_captured_lost: Called when gradients were removed after a pass has added to them, and another pass begins.

    Attributes:
        statistics: The statistics of the step so far.
        to_caller: The statistics of passes that have returned gradients to their caller instead of adding them to
            ``.grad``.
        hidden: The layers, by index, whose gradients have come through calls inside ``torch.func``.
        transformed: Whether a layer was called inside ``torch.func``.
        model_seen: Whether a backward pass has come through a call of the model.
    """

    def __init__(self, recorder: Recorder, on_captured_lost: Callable[[], None]) -> None:
        self.recorder, self._on_captured_lost = recorder, on_captured_lost
        self.statistics, self.to_caller = StepStatistics(), StepStatistics()
        self.hidden: set[int] = set()
        self.transformed = self.model_seen = False
        self._watch = GradientWatch(recorder.layers)
        self._batch: MicroBatch | None = None
        self._end: Callable[[], Any] = lambda: None  # a weak reference to the callback that its pass alone holds
        self._lock = threading.RLock()  # a pass of one thread may begin while that of another is being added

    def record_output_gradient(self, layer_call: LayerCall, call: ModelCall | None, g: Tensor) -> None:
        """Takes the gradient of a layer's output, which completes the pair (a, g) of its call."""
        if is_of_loss(g):
            self.add(layer_call, call, functools.partial(self.recorder.output_moment, layer_call, g, scaled=True))

    def add(self, layer_call: LayerCall, call: ModelCall | None, output_moment: Callable[[], Tensor]) -> None:
        """Adds a layer's call in some model call, if the pass computes the gradient of the layer's weight.

        ``output_moment``: makes the moment of the call's output gradient.
        """
        index, a = layer_call.index, layer_call.a
        layer = self.recorder.layers[index]
        goes_to = destination(layer)
        if goes_to is None:
            return
        g, batch = output_moment(), self.micro_batch_of(call)
        # Another pass over a retained graph may add the same tensors again, and sums are changed in place.
        if torch._C._autograd._get_current_graph_task_keep_graph():
            a, g = a.clone(), g.clone()
        # A pass inside another one returns gradients to that: the backward of a user's function (adjoints), say.
        if goes_to == "caller" and torch._C._current_graph_task_id() == batch.task:
            batch.note_caller()
        add = batch.add_examples if layer.by_example else batch.add
        add(index, a, layer_call.count, g)

    def watch_transformed(self, index: int, value: Tensor) -> None:
        """Watches a call of a layer inside a transform of ``torch.func``, where its input cannot be seen.

        ``value``: what the call has returned, beneath the transform, by which the gradient of the loss may come.
        """
        self.transformed = True
        if value.requires_grad:
            value.register_hook(functools.partial(self._note_hidden_gradient, index))

    def _note_hidden_gradient(self, index: int, g: Tensor) -> None:
        if not torch.is_grad_enabled() and destination(self.recorder.layers[index]) == "gradient":
            self.hidden.add(index)

    @_disable_dynamo
    def micro_batch_of(self, call: ModelCall | None) -> MicroBatch:
        """The micro-batch of the backward pass in progress, which has reached a model call; opened if there is none.

        Raises:
            RuntimeError: If the open micro-batch is another thread's, or under compiled autograd.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or torch._C._current_autograd_node() is None:
            raise RuntimeError(_COMPILED)
        with self._lock:
            batch = self._open
            if batch is None:
                self._compare_gradients()
                batch, end = MicroBatch(task=task), self._on_backward_end
                self._batch, self._end = batch, weakref.ref(end)
                torch.autograd.Variable._execution_engine.queue_callback(end)
            self.model_seen |= call is not None
            if call is not None and call not in batch.calls:
                # On a GPU the hooks of a pass run in a thread of torch's own, so the calls tell whose pass it is. A
                # backward pass inside another one (checkpoints) has another number, but the same thread.
                threads = {known.thread for known in batch.calls if known.thread and known.thread.is_alive()}
                if batch.task != task and threads - {call.thread} and call.thread:
                    raise RuntimeError(CONCURRENT)
                batch.calls.add(call)
            return batch

    def require_alone(self) -> None:
        """Raises if another thread is in a backward pass."""
        batch = self._open
        if batch is not None and any(call.is_of_other_thread for call in batch.calls):
            raise RuntimeError(CONCURRENT)

    @property
    def _open(self) -> MicroBatch | None:
        """The micro-batch of the backward pass in progress; a pass that raised has released its callback."""
        return None if self._end() is None else self._batch

    def _compare_gradients(self) -> None:
        """Restarts the statistics of layers whose gradient was removed or zeroed before this backward pass."""
        statistics, watch = self.statistics, self._watch
        if removed := watch.removed(statistics.sums):
            self._on_captured_lost()
            statistics.restart(removed)
            if not statistics.sums:  # else passes would pile up while another optimizer trains the model
                self.statistics = statistics = StepStatistics()
        if changed := watch.changed(statistics.sums):
            statistics.restart_cleared(changed, watch.largest(changed))

    @_disable_dynamo  # or it would be compiled where a whole training step is
    def _on_backward_end(self) -> None:
        """Adds the micro-batch of the backward pass, which has ended, to the step's statistics."""
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is None:
                return
            for pooled in self.recorder.pool(batch.by_example):
                batch.add(*pooled)
            if batch.sums:
                scale = self.recorder.loss_scale(next(iter(batch.sums.values()))[0].device)
                statistics = self.to_caller if batch.to_caller else self.statistics
                drops = self.recorder.has_scaler
                try:
                    statistics.add(batch.sums, batch.terms, batch.rows, scale, drop_overflowed=drops)
                except BaseException:  # which may have come when half of it was added
                    self.statistics, self.to_caller = StepStatistics(), StepStatistics()
                    raise
        # A second callback, queued only now, so that it runs after those in which DDP and FSDP2 finish the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._remember_gradients)

    @_disable_dynamo
    def _remember_gradients(self) -> None:
        self._watch.remember({**self.statistics.sums, **self.to_caller.sums})

    def take(self) -> TakenStatistics:
        """The statistics of the step that is being taken; :meth:`discard` has to follow."""
        seen, transformed = self.model_seen and not self.transformed, self.transformed
        return TakenStatistics(self.statistics, self.to_caller, self._watch, transformed=transformed, model_seen=seen)

    def discard(self) -> None:
        """Discards the micro-batches of this step; a backward pass that is running goes on."""
        if self.statistics.passes or self.to_caller.passes:  # most steps collect none
            self.statistics, self.to_caller = StepStatistics(), StepStatistics()
        self.hidden, self.transformed, self.model_seen = set(), False, False
        self._watch.remember(())
        if not in_backward():
            self._batch = None  # of a pass that raised
