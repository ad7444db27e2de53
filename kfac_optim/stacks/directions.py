"""What a step preconditions, and its directions: matrices by shape of layer, and each parameter's part."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..common.rates import Scalar
from ..distributed import ShardExchange, any_sharded, gathered, sharded_like
from .layout import Layout, Part
from .matrices import Matrices
from .stacked import Stacked

# Makes the matrices of all stacks, in the given ones if there are any.
Maker = Callable[[Matrices | None], Matrices]


@dataclass(frozen=True)
class StepVectors:
    """What a step preconditions, by parameter.

    Attributes:
        moments: First moments or gradients.
        other_updates: The base optimizer's own updates from them, per unit of the learning rate, where these are not
            the moments themselves.
        lr: The learning rate, for the scaling; a mapping by parameter if there are several.
    """

    moments: Mapping[nn.Parameter, Tensor]
    other_updates: Mapping[nn.Parameter, Tensor]
    lr: Scalar | Mapping[nn.Parameter, Scalar]

    @cached_property
    def updates(self) -> Mapping[nn.Parameter, Tensor]:
        """The base optimizer's updates of all parameters."""
        return {**self.moments, **self.other_updates}

    def are_alike(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether the updates of these parameters are the moments themselves."""
        return self.other_updates.keys().isdisjoint(parameters)


@dataclass(frozen=True)
class Directions:
    """The moments of a step, preconditioned and scaled, for the layers that have a decomposition and a moment.

    Layers whose shards have been sent to other ranks are left out.

    Attributes:
        layouts: For each stack of layers of one shape, where the parameters lie in its matrices.
        scaled: The scaled directions, with all that a scaling knows about the layers.
        parameters: Those that have a moment; the layers' other parameters take no part in the step.
        dtype: The dtype of all matrices.
        exchange: Sends back the directions of layers whose shards went to only some ranks; None: there are none.
    """

    layouts: Sequence[Layout]
    scaled: Stacked
    parameters: Collection[nn.Parameter]
    dtype: torch.dtype
    exchange: ShardExchange | None = None

    @cached_property
    def _has_shards(self) -> bool:
        """Whether some parameters are laid out over several ranks."""
        return self.exchange is not None or any_sharded(p for layout in self.layouts for p in layout.parameters)

    def norm_of_updates(self, updates: Collection[nn.Parameter]) -> Tensor | None:
        """The norm of the base optimizer's updates of these parameters together, 0-dim.

        None if some of them belong to no layer here, or ranks hold different ones: then the caller has to add up.
        """
        covered = set[nn.Parameter]().union(*(layout.parameters for layout in self.layouts))
        if self._has_shards or not covered.issuperset(updates):
            return None
        return self.scaled.updates.length(self.scaled.update_norms)

    def laid_out(
        self, matrices: Matrices, elsewhere: Mapping[nn.Parameter, Tensor] | None = None
    ) -> dict[nn.Parameter, Tensor]:
        """Each parameter's part of matrices of the stacks' shapes, laid out as the parameter is.

        A collective if shards have been sent to other ranks: those ranks send the results back.

        Args:
            matrices: The matrices.
            elsewhere: The values of parameters in slices that no layer covers; None: 0.
        """
        whole: dict[nn.Parameter, Tensor] = {}
        for layout, of_stack in zip(self.layouts, matrices.tensors, strict=True):
            _assemble(whole, layout.read(of_stack, self.parameters), elsewhere)
        if not self._has_shards:
            return whole
        back = {} if self.exchange is None else self.exchange.scatter(whole, self.dtype)
        return {**{p: sharded_like(part, p) for p, part in whole.items() if p not in back}, **back}

    def several_laid_out(self, makers: Mapping[str, Maker]) -> dict[str, dict[nn.Parameter, Tensor]]:
        """The results of :meth:`laid_out` for several sets of matrices, by name.

        Args:
            makers: By name, a function that makes the matrices of all stacks. If the stacks share one storage, it is
                given matrices to fill, so that few operations read all sets.
        """
        outs = None if self._has_shards else self.scaled.updates.empty_sets(len(makers))
        if outs is None:
            return {name: self.laid_out(make(None)) for name, make in makers.items()}
        made = [make(out).tensors for make, out in zip(makers.values(), outs, strict=True)]
        found: list[dict[nn.Parameter, Tensor]] = [{} for _ in makers]
        # A view in the state of one parameter keeps all matrices in memory, so it is used only if most can be views.
        viewable = sum(layout.viewable_numel for layout in self.layouts)
        copies = 2 * viewable < sum(math.prod(layout.shape) for layout in self.layouts)
        for layout, *wholes in zip(self.layouts, *made, strict=True):
            several = layout.read_several(wholes, self.parameters, copies=copies)
            for result, parts in zip(found, several, strict=True):
                _assemble(result, parts)
        return dict(zip(makers, found, strict=True))


def _assemble(
    result: dict[nn.Parameter, Tensor], parts: Sequence[Part], elsewhere: Mapping[nn.Parameter, Tensor] | None = None
) -> None:
    """Writes parts of parameters to their places in ``result``; ``elsewhere``: see :meth:`Directions.laid_out`."""
    for p, index, part in parts:
        if index == slice(None):
            result[p] = part
            continue
        if p not in result:
            result[p] = part.new_zeros(p.shape) if elsewhere is None else gathered(elsewhere[p]).clone()
        result[p][index] = part


def by_parameter(directions: Directions, moments: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """The direction of each parameter, laid out as its moment; slices that no layer covers keep their moment.

    A collective, like :meth:`Directions.laid_out`.
    """
    found = directions.laid_out(directions.scaled.directions, moments)
    return {p: _laid_out_as(moments[p], direction) for p, direction in found.items()}


def _laid_out_as(moment: Tensor, direction: Tensor) -> Tensor:
    """A direction in the dtype and memory layout of its moment, as fused kernels expect."""
    if (direction.dtype, direction.stride()) == (moment.dtype, moment.stride()):
        return direction
    return torch.empty_like(moment).copy_(direction)
