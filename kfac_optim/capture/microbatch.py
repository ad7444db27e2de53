"""Micro-batches: from the inputs and output gradients of layers to the moments of a backward pass.

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

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..common.precision import full_precision
from ..common.stopwatch import Stopwatch
from ..layers import AttentionInputLayer, KroneckerLayer, Observation, ProjectionCall
from .autograd import as_plain, in_backward, is_wrapped
from .calls import CONCURRENT, ModelCall
from .gradients import GradientWatch, destination
from .statistics import MicroBatch, StepStatistics, TakenStatistics

__all__ = ["BackwardPasses", "LayerCall", "Recorder", "positions_of"]

_COMPILED = (
    "gradients can't be watched under compiled autograd: call backward() without it "
    "(torch._dynamo.config.compiled_autograd = False); torch.compile(model) works"
)


@dataclass(eq=False)
class LayerCall:
    """One call of a layer, whose output gradient is awaited: the layer's index, the module and its observation.

    ``fraction`` is the share of the examples in the observation. ``shape`` is that of the output, with dimensions for
    examples and positions, which the gradient may lack (:func:`~.autograd.own_result`); None for nested tensors.
    """

    index: int
    module: nn.Module
    observation: Observation
    fraction: float
    shape: Sequence[int] | None


def positions_of(nested: Tensor) -> Tensor:
    """The positions of examples of different lengths, one after the other, ``[positions, d]``."""
    if nested.layout is torch.jagged:
        return nested.values()
    return torch.cat([example.reshape(-1, example.shape[-1]) for example in nested.unbind()])


class Recorder:
    """Turns the input and the output gradient of a layer's call into packed second moments.

    Args:
        layers: The layers.
        dtype: Precision of the moments.
        stopwatch: Where the time is noted.

    Attributes:
        enabled: Whether the step collects statistics.
    """

    def __init__(self, layers: Sequence[KroneckerLayer], dtype: torch.dtype, stopwatch: Stopwatch) -> None:
        self.layers, self.dtype, self.stopwatch = layers, dtype, stopwatch
        self.enabled, self._fraction = False, 1.0
        self._grad_scaler: torch.amp.GradScaler | None = None

    def prepare(self, *, enabled: bool, fraction: float, grad_scaler: torch.amp.GradScaler | None) -> None:
        """Sets what the coming step records: see :meth:`~kfac_optim.capture.hooks.Capture.prepare`."""
        self.enabled, self._fraction, self._grad_scaler = enabled, fraction, grad_scaler

    @property
    def has_scaler(self) -> bool:
        """Whether a grad scaler is set, even if it is disabled."""
        return self._grad_scaler is not None

    def loss_scale(self, device: torch.device) -> Tensor:
        """The current loss scale, without waiting for the device; 1 if no scaler is in use."""
        scaler = self._grad_scaler
        scale = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
        return torch.ones((), device=device) if scale is None else scale.to(device)

    def observe(
        self,
        index: int,
        use: int,
        a: Tensor,
        output: Tensor,
        projection: ProjectionCall | None,
    ) -> LayerCall:
        """Notes a call of a layer, and takes the moment of its input at once.

        Args:
            index: The layer's index.
            use: The module's index among those that share the layer's weight.
            a: The input.
            output: The output.
            projection: The use of a projection of attention; None if a module was called.
        """
        layer = self.layers[index]
        module = layer.modules[use]
        shape: Sequence[int] | None = None if output.is_nested else output.shape
        with self.stopwatch.stage("factor computation"), full_precision(a.device.type):
            if projection is not None:  # the output projection is applied to a matrix
                a = a.reshape(-1, projection.examples, a.shape[-1])
                shape = (-1, projection.examples, output.shape[-1])
            seen = layer.subsample(module, a, self._fraction)
            observation = layer.observe(module, seen, output, self.dtype)
            if isinstance(layer, AttentionInputLayer) and projection is not None:
                observation = layer.among_pairs(observation, projection, len(seen))
            if not layer.by_example:
                observation = replace(observation, a=layer.specs[0].pack(observation.a))
        return LayerCall(index, module, observation, self._fraction, shape)

    def output_moment(self, call: LayerCall, g: Tensor, *, scaled: bool) -> Tensor:
        """The packed moment of one call's output gradient; ``scaled``: the gradient carries the loss scale.

        For layers with ``by_example`` it returns rows ``[n, p, d_out]``, from which :meth:`pool` makes a moment when
        the pass ends.
        """
        layer, g = self.layers[call.index], as_plain(g)
        with self.stopwatch.stage("factor computation"), full_precision(g.device.type):
            if call.shape is None:
                g = positions_of(g)
            elif g.shape != call.shape:
                g = g.reshape(call.shape)
            seen = layer.subsample(call.module, g.detach(), call.fraction)
            scaled, part = scaled and self.has_scaler, seen.numel() < g.numel()
            seen = seen.to(self.dtype) if scaled or part else layer.multiplicand(seen, self.dtype)
            if part:  # the selected examples stand for all; the root, because squares are added up
                seen = seen * (g.numel() / seen.numel()) ** 0.5
            if scaled:  # only if there is a scaler, because dividing copies the gradient
                seen = seen / self.loss_scale(g.device)
            moment = layer.output_moment(call.module, seen, call.observation)
            return moment if layer.by_example else layer.specs[1].pack(moment)

    def pool(
        self, sums: Mapping[tuple[int, int], tuple[Tensor, Any, Tensor]]
    ) -> Iterator[tuple[int, Tensor, float, Tensor]]:
        """The moments of one backward pass for layers that pool their calls by example.

        Args:
            sums: The sums over the calls, by the index of the layer and the number of examples.

        Yields:
            The index of a layer, A, its number of rows, and G; A and G are packed.
        """
        together: dict[Hashable, list[tuple[int, int]]] = {}
        for index, examples in sums:
            together.setdefault((examples, self.layers[index].combined_with), []).append((index, examples))
        for keys in together.values():
            layers = [self.layers[index] for index, _ in keys]
            with self.stopwatch.stage("factor computation"), full_precision(sums[keys[0]][-1].device.type):
                a, count, g = layers[0].combine_layers(layers, [sums[key] for key in keys])
                of_a, of_g = zip(*(layer.specs for layer in layers), strict=True)
                packed_a, packed_g = (
                    specs[0].pack(moment).split([spec.matrices for spec in specs])
                    for specs, moment in ((of_a, a), (of_g, g))
                )
                parts = zip(keys, packed_a, packed_g, strict=True)
            yield from ((index, one_a, count, one_g) for (index, _), one_a, one_g in parts)


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
        # create_graph=True enables gradients: this is a gradient penalty or a higher derivative, not the loss.
        if torch.is_grad_enabled() or is_wrapped(g):
            return
        goes_to = destination(self.recorder.layers[layer_call.index])
        if goes_to is not None:
            moment = self.recorder.output_moment(layer_call, g, scaled=True)
            self.add(layer_call, call, moment, to_caller=goes_to == "caller")

    def add(self, layer_call: LayerCall, call: ModelCall | None, g: Tensor, *, to_caller: bool) -> None:
        """Adds a layer's call in some model call, with the moment of its output gradient.

        ``to_caller``: whether the pass returns the gradients of weights to its caller.
        """
        index, a = layer_call.index, layer_call.observation.a
        batch = self.micro_batch_of(call)
        # Another pass over a retained graph may add the same tensors again, and sums are changed in place.
        if torch._C._autograd._get_current_graph_task_keep_graph():
            a, g = a.clone(), g.clone()
        # A pass inside another one returns gradients to that: the backward of a user's function (adjoints), say.
        if to_caller and torch._C._current_graph_task_id() == batch.task:
            batch.note_caller()
        add = batch.add_examples if self.recorder.layers[index].by_example else batch.add
        add(index, a, layer_call.observation.count, g)

    def note_transform(self) -> None:
        """Notes that a layer was called inside a transform of ``torch.func``, where its input cannot be seen."""
        self.transformed = True

    def record_hidden_gradient(self, index: int, g: Tensor) -> None:
        """Notes that a backward pass has reached such a call of a layer."""
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
                try:
                    statistics.add(batch, scale, drop_overflowed=self.recorder.has_scaler)
                except BaseException:  # which may have come when half of it was added
                    self.statistics, self.to_caller = StepStatistics(), StepStatistics()
                    raise
        # A second callback, queued only now, so that it runs after those in which DDP and FSDP2 finish the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._remember_gradients)

    def _remember_gradients(self) -> None:
        self._watch.remember({**self.statistics.sums, **self.to_caller.sums})

    def take(self) -> TakenStatistics:
        """The statistics of the step that is being taken; :meth:`discard` has to follow."""
        seen, transformed = self.model_seen and not self.transformed, self.transformed
        return TakenStatistics(self.statistics, self.to_caller, self._watch, transformed=transformed, model_seen=seen)

    def discard(self) -> None:
        """Discards the micro-batches of this step; a backward pass that is running goes on."""
        if self.statistics.counts or self.to_caller.counts:  # most steps collect none
            self.statistics, self.to_caller = StepStatistics(), StepStatistics()
        self.hidden, self.transformed, self.model_seen = set(), False, False
        self._watch.remember(())
        if not in_backward():
            self._batch = None  # of a pass that raised
