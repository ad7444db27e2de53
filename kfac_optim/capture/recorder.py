"""From the input and the output gradient of a layer's call to the call's moments."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.precision import full_precision
from ..common.stopwatch import Stopwatch
from ..distributed import is_sharded
from ..layers import KroneckerLayer, LinearLayer
from .autograd import as_plain

Layout = tuple[Sequence[int], Sequence[int]]  # a shape and strides


@dataclass(eq=False)
class LayerCall:
    """One call of a layer, whose output gradient is awaited: the layer's index, the module and what it has observed.

    ``a``, packed unless the layer has ``by_example``, ``count`` and ``context`` are those of the layer's
    :class:`~kfac_optim.layers.base.Observation`, in which ``fraction`` is the share of the examples. ``layout`` is
    the shape and the strides of the output in the tensor whose gradient arrives (:func:`~.autograd.own_result`); None
    if that is the output. ``module`` is what :meth:`~kfac_optim.KroneckerLayer.as_applied` has put in its place.
    """

    index: int
    module: Any
    a: Tensor
    count: Any
    context: Any
    fraction: float
    layout: Layout | None


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
        self._left_out: Collection[int] = ()

    def prepare(
        self,
        *,
        enabled: bool,
        fraction: float = 1.0,
        grad_scaler: torch.amp.GradScaler | None = None,
        left_out: Collection[int] = (),
    ) -> None:
        """Sets what the coming step records: see :meth:`~kfac_optim.capture.hooks.Capture.prepare`."""
        self.enabled, self._fraction, self._grad_scaler, self._left_out = enabled, fraction, grad_scaler, left_out

    def wants(self, index: int, a: Tensor, output: Tensor) -> bool:
        """Whether a call of a layer is to be recorded; see :meth:`observe` for the arguments."""
        layer = self.layers[index]
        return index not in self._left_out and layer.weight.requires_grad and _is_local(layer, a, output)

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
        self, index: int, use: int, a: Tensor, output: Tensor, details: Sequence[int], layout: Layout | None = None
    ) -> LayerCall:
        """Notes a call of a layer, and takes the moment of its input at once.

        Args:
            index: The layer's index.
            use: The module's index among those that share the layer's weight.
            a: The input.
            output: The output.
            details: How the weight was applied, if inside the call of a host; empty if the layer's module was called.
            layout: See :class:`LayerCall`.
        """
        layer = self.layers[index]
        module = layer.as_applied(layer.modules[use], details)
        with self.stopwatch.stage("factor computation"), full_precision(a.device.type):
            seen = layer.subsample(module, layer.with_examples(module, a), self._fraction)
            found = layer.observe(module, seen, output, self.dtype)
            a = found.a if layer.by_example else layer.specs[0].pack(found.a)
        return LayerCall(index, module, a, found.count, found.context, self._fraction, layout)

    def output_moment(self, call: LayerCall, g: Tensor, *, scaled: bool) -> Tensor:
        """The packed moment of one call's output gradient; ``scaled``: the gradient carries the loss scale.

        For layers with ``by_example`` it returns rows ``[n, p, d_out]``, from which :meth:`pool` makes a moment when
        the pass ends.
        """
        layer, g = self.layers[call.index], as_plain(g)
        with self.stopwatch.stage("factor computation"), full_precision(g.device.type):
            if g.is_nested:
                g = _positions_of(g)
            elif call.layout is not None:
                g = g.contiguous().as_strided(*call.layout)
            seen = layer.subsample(call.module, layer.with_examples(call.module, g.detach()), call.fraction)
            scaled, part = scaled and self.has_scaler, seen.numel() < g.numel()
            seen = seen.to(self.dtype) if scaled or part else layer.multiplicand(seen, self.dtype)
            if part:  # the selected examples stand for all; the root, because squares are added up
                seen = seen * (g.numel() / seen.numel()) ** 0.5
            if scaled:  # only if there is a scaler, because dividing copies the gradient
                seen = seen / self.loss_scale(g.device)
            moment = layer.output_moment(call.module, seen, call.context)
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


def dense_input(layer: KroneckerLayer, a: Tensor) -> Tensor | None:
    """An input as a dense tensor; None if it has examples of different lengths, of which the layer makes no rows."""
    if a.is_nested:  # the positions of all examples, one after the other
        return _positions_of(a) if isinstance(layer, LinearLayer) and layer.sharing == "expand" else None
    return a if a.layout is torch.strided else a.to_dense()


def _is_local(layer: KroneckerLayer, a: Tensor, output: Tensor) -> bool:
    """Whether the output is a plain tensor with a row for each row of the input; tensor parallelism makes others."""
    # The shapes are those of an nn.Linear. With FSDP2 a layer's outputs are its own, and may have other shapes.
    if layer.is_shard and (output.shape[-1] != layer.d_out or a.shape[:-1] != output.shape[:-1]):
        return False
    return not is_sharded(output)


def _positions_of(nested: Tensor) -> Tensor:
    """The positions of examples of different lengths, one after the other, ``[positions, d]``."""
    if nested.layout is torch.jagged:
        return nested.values()
    return torch.cat([example.reshape(-1, example.shape[-1]) for example in nested.unbind()])
