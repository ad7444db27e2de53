"""Layers with weight norm (Salimans & Kingma 2016): row i of the weight is ``w_i = gain_i v_i / |v_i|``, and v trains.

A change of v moves the output ``s_i = gain_i / |v_i|`` times as far as one of w, but for its part along v, which moves
nothing. So the block of v is that of w, with the rows of output gradients multiplied by s::

    grad v_i  =  s_i (I - v_i v_i^T / |v_i|^2) grad w_i,    block of v  ~  A (x) S G S

The projection is left out, because it would give each row an A of its own. The gains, and the bias, whose gradients are
not multiplied by s, train by the base rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..distributed import is_sharded
from .base import Declined, RowsLayer
from .convolution import ConvLayer
from .linear import LinearLayer
from .registry import LayerFactory


class _Normed(NamedTuple):
    """The parameters behind a weight that has weight norm, and the module that owns them."""

    owner: nn.Module
    v: nn.Parameter
    gain: nn.Parameter


def _normed(module: nn.Module) -> _Normed | None:
    """What is behind the weight of a module; None if it has no weight norm of torch's, or more than that."""
    owner, names, kind = module, ("weight_v", "weight_g"), "WeightNorm"  # torch.nn.utils.weight_norm()
    norms: list[Any] = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ == kind]
    if parametrize.is_parametrized(module, "weight"):  # torch.nn.utils.parametrizations.weight_norm()
        owner, names, kind = module.parametrizations["weight"], ("original1", "original0"), "_WeightNorm"  # type: ignore[index,assignment]
        norms = list(owner.children())
    # By name, because torch has deprecated the class of the hook, and that of the parametrization is private.
    if [(type(norm).__name__, type(norm).__module__.partition(".")[0]) for norm in norms] != [(kind, "torch")]:
        return None
    v, gain = (owner._parameters.get(name) for name in names)
    return None if v is None or gain is None else _Normed(owner, v, gain)  # they may be pruned or parametrized in turn


class _WeightNormLayer(RowsLayer):
    """What layers with weight norm share: their parameter is v."""

    copies_rows = False  # rows are computed: in full precision under autocast
    reparametrized = "the gain or the bias of a layer with weight norm, of which v alone is preconditioned"

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, None]:
        normed = _normed(module)
        assert normed is not None  # with_weight_norm() has seen it
        _, v, gain = normed
        if is_sharded(v):
            raise Declined("weight norm of a sharded weight")
        if gain.numel() > 1 and gain.shape[0] != gain.numel():
            raise Declined("weight norm along another dimension than the first")
        return v, None

    @property
    def owners(self) -> Sequence[nn.Module]:
        return [module if (normed := _normed(module)) is None else normed.owner for module in self.modules]

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        rows, normed = super().output_rows(module, g, context), _normed(module)  # type: ignore[safe-super]
        if normed is None:  # removed since the forward pass
            return rows
        dtype = torch.promote_types(normed.v.dtype, torch.float32)
        v, gain = normed.v.detach().to(dtype), normed.gain.detach().to(dtype).flatten()  # of each row, or one for all
        scales = gain / torch.linalg.vector_norm(v.reshape(len(gain), -1), dim=1)
        return rows * scales.expand(len(v)).view(self.pairs, self.d_out).to(rows)


class WeightNormLinearLayer(_WeightNormLayer, LinearLayer):
    """``nn.Linear`` with weight norm."""


class WeightNormConvLayer(_WeightNormLayer, ConvLayer):
    """``nn.Conv1d/2d/3d`` with weight norm."""


_TYPES: dict[LayerFactory, LayerFactory] = {LinearLayer: WeightNormLinearLayer, ConvLayer: WeightNormConvLayer}


def with_weight_norm(factory: LayerFactory, module: nn.Module) -> LayerFactory:
    """The factory for a module, given that of its type: another one if its weight has weight norm, and has a rule."""
    return factory if factory not in _TYPES or _normed(module) is None else _TYPES[factory]
