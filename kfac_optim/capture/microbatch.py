"""Micro-batches: from what layers see to the moments of a backward pass.

A micro-batch is one backward pass. Its states::

    none      no backward pass has reached a watched layer or the model's output
      -> open       the first output gradient of a watched layer arrives, or that of the model's output
    open      every pair (input, output gradient) of a layer is added to the micro-batch
      -> counted    the backward pass has ended: its moments are added to the step's, with weight 0 if one of them is
                    not finite (the decision stays on the device; the flags are read once, in ``step()``)
      -> abandoned  the pass raised and the next model call starts; the step's statistics are discarded between two
                    passes

Which of the counted micro-batches are still those of the step when it is taken, ``gradients.py`` says.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..layers import KroneckerLayer, Observation, ProjectionCall
from ..precision import full_precision
from .calls import CONCURRENT, ModelCall, in_backward
from .gradients import GradientWatch, destination
from .statistics import MicroBatch, StepStatistics, TakenStatistics

__all__ = ["BackwardPasses", "LayerCall", "Recorder", "positions_of"]

_COMPILED = (
    "gradients can't be watched under compiled autograd: call backward() without it "
    "(torch._dynamo.config.compiled_autograd = False); torch.compile(model) works"
)


@dataclass(eq=False)
class LayerCall:
    """One call of a layer, whose output gradient is awaited: the layer's index, the module and what it saw.

    ``fraction``: the share of the examples that was looked at. ``shape``: the one in which the output gradient has
    examples and positions; it may come in another (:func:`~.calls.own_result`). None of nested tensors.
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
        stage: Name of a stage -> context manager that times it.

    Attributes:
        enabled: Whether the step collects statistics.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        dtype: torch.dtype,
        stage: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.layers, self.dtype, self.stage = layers, dtype, stage
        self.enabled, self._fraction = False, 1.0
        self._grad_scaler: torch.amp.GradScaler | None = None

    def prepare(self, *, enabled: bool, fraction: float, grad_scaler: torch.amp.GradScaler | None) -> None:
        """Sets what the coming step records: see :meth:`~kfac_optim.capture.Capture.prepare`."""
        self.enabled, self._fraction, self._grad_scaler = enabled, fraction, grad_scaler

    @property
    def scaled(self) -> bool:
        """Whether a grad scaler is set, used or not."""
        return self._grad_scaler is not None

    def loss_scale(self, device: torch.device) -> Tensor:
        """The current loss scale, without waiting for the device; 1 where no scaler is in use."""
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
        """A layer was called: what it saw, with the moment of its input already taken.

        Args:
            index: The layer's index.
            use: The module's index among those that share the layer's weight.
            a: The input.
            output: The output.
            projection: Which use of a projection of attention it was; None where a module was called.
        """
        layer = self.layers[index]
        module = layer.modules[use]
        shape: Sequence[int] | None = None if output.is_nested else output.shape
        more = {"call": projection} if projection is not None and projection.is_packed else {}
        with self.stage("factor computation"), full_precision(a.device.type):
            if projection is not None:  # the output projection is applied to a matrix
                a = a.reshape(-1, projection.examples, a.shape[-1])
                shape = (-1, projection.examples, output.shape[-1])
            seen = layer.subsample(module, a, self._fraction)
            observation = layer.observe(module, seen, output, self.dtype, **more)
            moment = observation.a if layer.by_example else layer.specs[0].pack(observation.a)
        return LayerCall(index, module, dataclasses.replace(observation, a=moment), self._fraction, shape)

    def output_moment(self, call: LayerCall, g: Tensor, *, scaled: bool) -> Tensor:
        """The packed moment of one call's output gradient; ``scaled``: the gradient carries the loss scale.

        For layers with ``by_example`` the rows ``[n, p, d_out]``, which :meth:`pool` makes a moment of when the pass
        ends.
        """
        layer = self.layers[call.index]
        with self.stage("factor computation"), full_precision(g.device.type):
            g = positions_of(g) if call.shape is None else g.reshape(call.shape)
            seen = layer.subsample(call.module, g.detach(), call.fraction)
            scaled, part = scaled and self.scaled, seen.numel() < g.numel()
            seen = seen.to(self.dtype) if scaled or part else layer.multiplicand(seen, self.dtype)
            if part:  # the examples kept stand for all, and their squares are added up
                seen = seen * (g.numel() / seen.numel()) ** 0.5
            if scaled:  # dividing copies the gradient: only where there is a scaler
                seen = seen / self.loss_scale(g.device)
            moment = layer.output_moment(call.module, seen, call.observation)
            return moment if layer.by_example else layer.specs[1].pack(moment)

    def pool(
        self, sums: Mapping[tuple[int, int], tuple[Tensor, Any, Tensor]]
    ) -> Iterator[tuple[int, Tensor, float, Tensor]]:
        """The moments of one backward pass, of layers that pool their calls by example.

        Args:
            sums: The sums over the calls, by the index of the layer and the number of examples.

        Yields:
            The index of a layer, A, its rows, and G; packed.
        """
        together: dict[Hashable, list[tuple[int, int]]] = {}
        for index, examples in sums:
            together.setdefault((examples, self.layers[index].combined_with), []).append((index, examples))
        for keys in together.values():
            layers = [self.layers[index] for index, _ in keys]
            with self.stage("factor computation"), full_precision(sums[keys[0]][-1].device.type):
                a, count, g = layers[0].combine_layers(layers, [sums[key] for key in keys])
                of_a, of_g = zip(*(layer.specs for layer in layers), strict=True)
                packed_a, packed_g = (
                    specs[0].pack(moment).split([spec.matrices for spec in specs])
                    for specs, moment in ((of_a, a), (of_g, g))
                )
                parts = zip(keys, packed_a, packed_g, strict=True)
            yield from ((index, one_a, count, one_g) for (index, _), one_a, one_g in parts)


class BackwardPasses:
    """Adds up what the backward passes of a step deliver.

    Args:
        recorder: Makes moments of output gradients.
        on_thrown_away: Called when gradients that passes have added to were removed before another pass.

    Attributes:
        statistics: The statistics of the step so far.
        to_caller: The statistics of passes that have returned gradients to their caller instead of adding them to
            ``.grad``.
        hidden: The layers, by index, whose gradients have come through calls inside ``torch.func``.
        transformed: Whether a layer was called inside ``torch.func``.
        model_seen: Whether a backward pass has come through a call of the model.
    """

    def __init__(self, recorder: Recorder, on_thrown_away: Callable[[], None]) -> None:
        self.recorder, self._on_thrown_away = recorder, on_thrown_away
        self.statistics, self.to_caller = StepStatistics(), StepStatistics()
        self.hidden: set[int] = set()
        self.transformed = self.model_seen = False
        self._watch = GradientWatch(recorder.layers)
        self._batch: MicroBatch | None = None
        self._end: Callable[[], Any] = lambda: None  # what its pass calls at the end, held weakly
        self._lock = threading.RLock()  # one thread's pass may begin while another's is being added

    def record_output_gradient(self, layer_call: LayerCall, call: ModelCall | None, g: Tensor) -> None:
        """The gradient of a layer's output has arrived: the pair (a, g) of its call is complete."""
        # Gradients are enabled by create_graph=True: a gradient penalty or a higher derivative, not the loss.
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(g):
            return
        goes_to = destination(self.recorder.layers[layer_call.index])
        if goes_to is not None:
            moment = self.recorder.output_moment(layer_call, g, scaled=True)
            self.add(layer_call, call, moment, to_caller=goes_to == "caller")

    def add(self, layer_call: LayerCall, call: ModelCall | None, g: Tensor, *, to_caller: bool) -> None:
        """Adds a layer's call in some model call, with the moment of its output gradient.

        ``to_caller``: the pass returns the gradients of weights.
        """
        index, a = layer_call.index, layer_call.observation.a
        batch = self.micro_batch_of(call)
        # Another pass over a retained graph may bring both again, and sums are changed in place.
        if torch._C._autograd._get_current_graph_task_keep_graph():
            a, g = a.clone(), g.clone()
        # A pass inside this one returns them to it: the backward of a function of the user's (adjoints), for instance.
        if to_caller and torch._C._current_graph_task_id() == batch.task:
            batch.note_caller()
        add = batch.add_examples if self.recorder.layers[index].by_example else batch.add
        add(index, a, layer_call.observation.count, g)

    def note_transform(self) -> None:
        """A layer was called inside a transform of ``torch.func``, where its input can't be seen."""
        self.transformed = True

    def record_hidden_gradient(self, index: int, g: Tensor) -> None:
        """A backward pass has reached such a call of a layer."""
        if not torch.is_grad_enabled() and destination(self.recorder.layers[index]) == "gradient":
            self.hidden.add(index)

    @_disable_dynamo
    def micro_batch_of(self, call: ModelCall | None) -> MicroBatch:
        """The backward pass in progress has reached a model call: its micro-batch, which is opened if there is none.

        Raises:
            RuntimeError: If the open micro-batch is another thread's, or under compiled autograd.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or torch._C._current_autograd_node() is None:
            raise RuntimeError(_COMPILED)
        with self._lock:
            if self._batch is None or self._end() is None:  # a pass that raised lets go of what it was to call
                self._compare_gradients()
                self._batch, end = MicroBatch(task=task), functools.partial(self._on_backward_end)
                self._end = weakref.ref(end)
                torch.autograd.Variable._execution_engine.queue_callback(end)
            batch = self._batch
            self.model_seen |= call is not None
            if call is not None and call not in batch.calls:
                # The hooks of a pass on a GPU run in a thread of torch's own; the calls know whose pass it is. A
                # backward pass inside another one (checkpoints) has another number, but the thread is the same.
                threads = {known.thread for known in batch.calls if known.thread and known.thread.is_alive()}
                if batch.task != task and threads - {call.thread} and call.thread:
                    raise RuntimeError(CONCURRENT)
                batch.calls.add(call)
            return batch

    def require_alone(self) -> None:
        """Raises if another thread is in a backward pass."""
        if self._batch is not None and self._batch.is_elsewhere:
            raise RuntimeError(CONCURRENT)

    def _compare_gradients(self) -> None:
        """A backward pass begins: layers whose gradient was removed or zeroed start their statistics anew."""
        statistics, watch = self.statistics, self._watch
        removed = watch.removed(statistics.sums)
        if removed:
            self._on_thrown_away()
        statistics.restart(removed)
        if removed and not statistics.sums:  # while another optimizer trains the model its passes must not pile up
            self.statistics = statistics = StepStatistics()
        changed = watch.changed(statistics.sums)
        if changed:
            statistics.check(changed, watch.largest(changed))

    def _on_backward_end(self) -> None:
        """The backward pass has ended: adds its micro-batch to the step's."""
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is None:
                return
            for pooled in self.recorder.pool(batch.by_example):
                batch.add(*pooled)
            if batch.sums:
                scale = self.recorder.loss_scale(next(iter(batch.sums.values())).a.device)
                statistics = self.to_caller if batch.to_caller else self.statistics
                statistics.add(batch, scale, drop_overflowed=self.recorder.scaled)
        # A second callback, queued only now, so that it runs after those in which DDP and FSDP2 finish the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._remember_gradients)

    def _remember_gradients(self) -> None:
        self._watch.remember({**self.statistics.sums, **self.to_caller.sums})

    def abandon(self) -> None:
        """Forgets the open micro-batch: its backward pass raised, or nobody wants its moments any more."""
        self._batch = None

    def take(self) -> TakenStatistics:
        """The statistics of the step, which is being taken; :meth:`forget` follows."""
        seen, transformed = self.model_seen and not self.transformed, self.transformed
        return TakenStatistics(self.statistics, self.to_caller, self._watch, transformed=transformed, model_seen=seen)

    def forget(self) -> None:
        """Forgets the micro-batches of this step; a backward pass that is running goes on."""
        self.statistics, self.to_caller = StepStatistics(), StepStatistics()
        self.hidden, self.transformed, self.model_seen = set(), False, False
        self._watch.remember(())
        if not in_backward():
            self.abandon()
