"""What is known of a model call, a micro-batch and a step: terms, raw moments, and which of them count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from ..layers import Observation

__all__ = ["MicroBatch", "ModelCall", "Moments", "StepStatistics"]


@dataclass
class Moments:
    """One layer's share of a micro-batch or of a step: packed sums and the rows behind A."""

    a: Tensor
    g: Tensor
    counts: list[float] = field(default_factory=list)  # per micro-batch


@dataclass(eq=False)
class ModelCall:
    """One call of the outermost module: M, and for the sampled Fisher what its layers did."""

    module: nn.Module | None = None
    forward: Any = None  # the module's own, when it was called; None while a graph is traced
    entered: int = 0  # the module may call itself
    terms: int = 0
    layers: list[tuple[int, nn.Module, Observation, Any]] = field(default_factory=list)

    @property
    def lent(self) -> bool:
        """Whether the call runs another method of its module, in which ``forward`` is another one again.

        Lightning runs ``training_step`` so under DDP, the backward pass and the step in it: that is the loop, no model.
        """
        return self.forward is not None and bool(cast(nn.Module, self.module).forward != self.forward)


@dataclass
class MicroBatch:
    """One backward pass in progress."""

    sums: dict[int, Moments] = field(default_factory=dict)
    by_example: dict[tuple[int, int], list[tuple[Observation, Tensor]]] = field(default_factory=dict)
    calls: set[ModelCall] = field(default_factory=set)

    def add(self, layer: int, a: Tensor, count: float, g: Tensor) -> None:
        """Adds one layer call; several calls within a backward pass add rows."""
        if layer in self.sums:
            entry = self.sums[layer]
            entry.a, entry.g, entry.counts = entry.a + a, entry.g + g, [entry.counts[0] + count]
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

    @property
    def flags(self) -> list[Tensor]:
        """What has to be read from the device to know which micro-batches count."""
        return [*self.kept, *self.scales]

    def counted(self, flags: Sequence[float]) -> tuple[list[bool], list[bool]]:
        """From the values of :attr:`flags`: which micro-batches belong to the step, and which of those are finite."""
        kept, scales = flags[: len(self.kept)], flags[len(self.kept) :]
        taken = [all(later >= scale for later in scales[i + 1 :]) for i, scale in enumerate(scales)]
        return taken, [belongs and bool(finite) for belongs, finite in zip(taken, kept, strict=True)]
