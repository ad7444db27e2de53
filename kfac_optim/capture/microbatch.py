"""Micro-batches: from what layers see to the moments of a backward pass, and to those of the step.

A micro-batch is one backward pass. Its states::

    none      no backward pass has reached a watched layer or the model's output
      -> open       the first output gradient of a watched layer arrives, or that of the model's output
    open      every pair (input, output gradient) of a layer is added to the micro-batch
      -> counted    the backward pass has ended: its moments are added to the step's, with weight 0 if one of them is
                    not finite (the decision stays on the device; the flags are read once, in ``step()``)
      -> abandoned  the pass raised and the next model call starts; the step's statistics are discarded between two
                    passes; capturing is switched off

A pass counts for a layer if it adds to the gradient of the layer's weight: see :func:`adds_to_gradient`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import KroneckerLayer, Observation, full_precision
from .calls import ModelCall, in_backward

__all__ = ["BackwardPasses", "LayerCall", "MicroBatch", "Moments", "Recorder", "StepStatistics", "adds_to_gradient"]


@dataclass(eq=False)
class LayerCall:
    """One call of a layer, whose output gradient is awaited: the layer's index, the module and what it saw."""

    index: int
    module: nn.Module
    observation: Observation


class Recorder:
    """Turns the input and the output gradient of a layer's call into packed second moments.

    Args:
        layers: The layers.
        packers: Per layer two functions, for A and for G: moment -> packed form.
        dtype: Precision of the moments.
        stage: Name of a stage -> context manager that times it.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        packers: Sequence[tuple[Callable[[Tensor], Tensor], ...]],
        dtype: torch.dtype,
        stage: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.layers, self.packers, self.dtype, self.stage = layers, packers, dtype, stage
        self._fraction = 1.0
        self._grad_scaler: torch.amp.GradScaler | None = None

    def plan(self, *, fraction: float, grad_scaler: torch.amp.GradScaler | None) -> None:
        """Sets the share of the examples that is looked at, and whose loss scale the gradients carry."""
        self._fraction, self._grad_scaler = fraction, grad_scaler

    @property
    def scaled(self) -> bool:
        """Whether a grad scaler is set, used or not."""
        return self._grad_scaler is not None

    def loss_scale(self, device: torch.device) -> Tensor:
        """The current loss scale, without waiting for the device; 1 where no scaler is in use."""
        scaler = self._grad_scaler
        scale = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
        return torch.ones((), device=device) if scale is None else scale.to(device)

    def observe(self, index: int, use: int, a: Tensor, output: Tensor, part: Sequence[int]) -> LayerCall:
        """The moment of one call's input.

        Args:
            index: Of the layer.
            use: Of the module, among those that share the layer's weight.
            a: The input.
            output: The output.
            part: Of a projection of attention: see :class:`~kfac_optim.capture.attention.ProjectionTap`.
        """
        layer = self.layers[index]
        module = layer.modules[use]
        how: dict[str, Any] = {"examples": part[0]} if part else {}
        pairs = {"pairs": slice(part[1], part[2])} if len(part) > 1 else {}
        subsample: Callable[[Tensor], Tensor] = functools.partial(
            layer.subsample, module, fraction=self._fraction, **how
        )
        with self.stage("factor computation"), full_precision(a.device.type):
            seen = subsample(a)
            observation = layer.observe(module, seen, output, self.dtype, **pairs)
            moment, count = observation.a, observation.count
            if not layer.by_example:
                moment = self.packers[index][0](moment)
                if pairs and part[1] > 0:  # keys and values count as many rows as the queries
                    moment, count = moment * (part[3] / count * (seen.numel() / a.numel())), 0.0
        observation = dataclasses.replace(observation, a=moment, count=count, subsample=subsample)
        return LayerCall(index, module, observation)

    def output_moment(self, call: LayerCall, g: Tensor, *, scaled: bool) -> Tensor:
        """The moment of one call's output gradient; ``scaled``: the gradient carries the loss scale."""
        layer = self.layers[call.index]
        with self.stage("factor computation"), full_precision(g.device.type):
            seen = call.observation.subsample(g.detach()).to(self.dtype)
            if seen.numel() < g.numel():  # G is M times a sum over all examples, of which these stand for more
                seen = seen * (g.numel() / seen.numel()) ** 0.5
            if scaled and self._grad_scaler is not None:  # a copy of the gradient: not for nothing
                seen = seen / self.loss_scale(g.device)
            moment = layer.output_moment(call.module, seen, call.observation)
            return moment if layer.by_example else self.packers[call.index][1](moment)

    def pool(self, index: int, calls: Sequence[tuple[Observation, Tensor]]) -> tuple[Tensor, float, Tensor]:
        """A, its rows and G of the calls in one backward pass, for a layer that pools its calls by example."""
        with self.stage("factor computation"), full_precision(calls[0][1].device.type):
            a, count, g = self.layers[index].combine_calls(calls)
            return self.packers[index][0](a), count, self.packers[index][1](g)


@dataclass
class Moments:
    """One layer's share of a micro-batch or of a step: packed sums and the rows behind A."""

    a: Tensor
    g: Tensor
    counts: list[float] = field(default_factory=list)  # per micro-batch

    def add_call(self, a: Tensor, count: float, g: Tensor) -> None:
        """Adds another call in the same micro-batch; the tensors may be somebody else's."""
        self.a, self.g, self.counts = self.a + a, self.g + g, [self.counts[0] + count]

    def add_batch(self, a: Tensor, g: Tensor, counts: list[float]) -> None:
        """Adds another micro-batch, in place; ``counts`` has an entry for each one of the step."""
        self.a.add_(a)
        self.g.add_(g)
        self.counts += counts[len(self.counts) :]

    def scale_(self, factor: Tensor) -> None:
        """Multiplies the sums, in place."""
        self.a.mul_(factor.to(self.a))
        self.g.mul_(factor.to(self.g))


@dataclass
class MicroBatch:
    """One backward pass in progress.

    Attributes:
        sums: Packed raw sums by layer index.
        by_example: Of layers that pool their calls by example, the calls, by layer index and number of examples.
        calls: The model calls that the backward pass has reached.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    by_example: dict[tuple[int, int], list[tuple[Observation, Tensor]]] = field(default_factory=dict)
    calls: set[ModelCall] = field(default_factory=set)

    def add(self, layer: int, a: Tensor, count: float, g: Tensor) -> None:
        """Adds one layer call; several calls within a backward pass add rows."""
        if layer in self.sums:
            self.sums[layer].add_call(a, count, g)
        else:
            self.sums[layer] = Moments(a, g, [count])


@dataclass
class StepStatistics:
    """The micro-batches of a step so far.

    Attributes:
        sums: Packed raw sums by layer index, over the finite micro-batches.
        terms: M of each micro-batch.
        kept: Per micro-batch a 0-dim tensor, 1.0 if all of its moments were finite, else 0.0.
        scales: Per micro-batch the loss scale, a 0-dim tensor.
    """

    sums: dict[int, Moments] = field(default_factory=dict)
    terms: list[int] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)

    def add(self, batch: MicroBatch, scale: Tensor, *, drop_overflowed: bool) -> None:
        """Adds a backward pass that has ended, with weight 0 if one of its moments is not finite.

        Args:
            batch: Its moments, which are overwritten.
            scale: The loss scale of the pass.
            drop_overflowed: Whether a smaller loss scale than before takes the earlier micro-batches out of the sums:
                they belong to a step that was not taken.
        """
        totals = [tensor.sum() for entry in batch.sums.values() for tensor in (entry.a, entry.g)]
        kept = torch.stack([total.to(totals[0].device) for total in totals]).isfinite().all()
        if self.scales and drop_overflowed:
            valid = scale >= self.scales[-1].to(scale)
            for entry in self.sums.values():
                entry.scale_(valid)
        for index, new in batch.sums.items():
            # In place: all of them together are as large as the factors.
            a, g = (t.masked_fill_(~kept.to(t.device), 0.0) for t in (new.a, new.g))
            counts = [0.0] * len(self.terms) + new.counts
            if index in self.sums:
                self.sums[index].add_batch(a, g, counts)
            else:
                self.sums[index] = Moments(a, g, counts)
        self.terms.append(max((call.terms for call in batch.calls), default=1))
        self.kept.append(kept)
        self.scales.append(scale.clone())

    @property
    def flags(self) -> list[Tensor]:
        """What has to be read from the device to know which micro-batches count."""
        return [*self.kept, *self.scales]

    def counted(self, flags: Sequence[float]) -> tuple[list[bool], list[bool]]:
        """From the values of :attr:`flags`: which micro-batches belong to the step, and which of those are finite."""
        kept, scales = flags[: len(self.kept)], flags[len(self.kept) :]
        taken = [all(later >= scale for later in scales[i + 1 :]) for i, scale in enumerate(scales)]
        return taken, [belongs and bool(finite) for belongs, finite in zip(taken, kept, strict=True)]


class BackwardPasses:
    """Adds up what the backward passes of a step deliver.

    Args:
        recorder: Makes moments of output gradients.

    Attributes:
        statistics: Of the step so far.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.statistics = StepStatistics()
        self._batch: MicroBatch | None = None

    def record_output_gradient(self, layer_call: LayerCall, call: ModelCall | None, g: Tensor) -> None:
        """The gradient of a layer's output has arrived: the pair (a, g) of its call is complete."""
        # Gradients are enabled by create_graph=True: a gradient penalty or a higher derivative, not the loss.
        if not torch.is_grad_enabled() and adds_to_gradient(self.recorder.layers[layer_call.index]):
            self.add(layer_call, call, self.recorder.output_moment(layer_call, g, scaled=True))

    def add(self, layer_call: LayerCall, call: ModelCall | None, g: Tensor) -> None:
        """Adds a layer's call in some model call, with the moment of its output gradient."""
        index, observation = layer_call.index, layer_call.observation
        batch = self.reach(call)
        if self.recorder.layers[index].by_example:  # calls on as many examples are taken for calls on the same examples
            observation = dataclasses.replace(observation, context=None)  # has served; of norm layers it is an image
            batch.by_example.setdefault((index, len(g)), []).append((observation, g))
        else:
            batch.add(index, observation.a, observation.count, g)

    def reach(self, call: ModelCall | None) -> MicroBatch:
        """The backward pass in progress has reached a model call: its micro-batch, which is opened if there is none."""
        if self._batch is None:
            self._batch = MicroBatch()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        if call is not None:
            self._batch.calls.add(call)
        return self._batch

    def _on_backward_end(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        for (index, _), calls in batch.by_example.items():
            batch.add(index, *self.recorder.pool(index, calls))
        if batch.sums:
            scale = self.recorder.loss_scale(next(iter(batch.sums.values())).a.device)
            self.statistics.add(batch, scale, drop_overflowed=self.recorder.scaled)

    def abandon(self) -> None:
        """Forgets the open micro-batch: its backward pass raised, or nobody wants its moments any more."""
        self._batch = None

    def discard(self) -> None:
        """Forgets the micro-batches of this step; a backward pass that is running goes on."""
        self.statistics = StepStatistics()
        if not in_backward():
            self.abandon()


def adds_to_gradient(layer: KroneckerLayer) -> bool:
    """Whether the backward pass in progress adds to the gradient of a layer's weight.

    ``torch.autograd.grad(loss, inputs)`` does not: adversarial examples and saliency maps are no training.
    """
    owned = any(own is layer.weight for module in layer.modules for own in module._parameters.values())
    if not owned or hasattr(layer.weight, "device_mesh"):  # FSDP2 (DTensors): in its graph another tensor stands for it
        return True
    try:
        node = torch.autograd.graph.get_gradient_edge(layer.weight).node
        return bool(torch._C._will_engine_execute_node(node))
    except (RuntimeError, AttributeError):  # autograd.grad() was asked for the weight's own; a compiled graph runs
        return True
