"""Where the parameters of layers of one shape lie in the matrices of these layers.

Everything that a step does to the vectors of a layer (gradient, first moment, update) it does to all layers of one
shape at once, in one tensor ``[p, d_out, d_in]``. Each weight and bias is a strided part of that tensor, so that
filling it is one multi-tensor copy, and reading it none at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import KroneckerLayer

__all__ = ["Layout", "Part"]

# A parameter, the slice of it that a layer covers, and a tensor of that shape.
Part = tuple[nn.Parameter, slice, Tensor]
_WHOLE = slice(None)


@dataclass(frozen=True)
class _Place:
    """Where a parameter, or the slice of it that a layer covers, lies in the matrices."""

    parameter: nn.Parameter
    index: slice
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """The part of contiguous matrices."""
        return whole.as_strided(self.size, self.stride, self.offset)


class Layout:
    """The matrices of some layers side by side.

    Args:
        layers: Layers of one shape on one device.
    """

    def __init__(self, layers: Sequence[KroneckerLayer]) -> None:
        self.shape = (sum(layer.pairs for layer in layers), layers[0].d_out, layers[0].d_in)
        self.device = layers[0].weight.device
        self._strided: list[_Place] = []
        self._computed: list[tuple[KroneckerLayer, slice]] = []  # and their pairs
        whole, start = torch.empty(self.shape, device="meta"), 0
        self._unused = whole.numel()  # entries that belong to no parameter
        for layer in layers:
            pairs = slice(start, start := start + layer.pairs)
            parts = layer.from_matrix(whole[pairs])
            if any(part.untyped_storage()._cdata != whole.untyped_storage()._cdata for part in parts):
                self._unused -= whole[pairs].numel()
                self._computed.append((layer, pairs))  # in another order, as the weight of a transposed convolution
                continue
            places = zip(layer.parameters, (_WHOLE, layer.bias_part), parts, strict=False)
            self._unused -= sum(part.numel() for part in parts)
            self._strided += [_Place(p, i, x.shape, x.stride(), int(x.storage_offset())) for p, i, x in places]

    def fill(self, vectors: Mapping[nn.Parameter, Tensor], dtype: torch.dtype) -> Tensor:
        """The matrices of the parameters' vectors, ``[p, d_out, d_in]``; parameters without one have zeros."""
        taking = [place for place in self._strided if place.parameter in vectors]
        make = torch.zeros if self._unused or len(taking) < len(self._strided) else torch.empty
        whole = make(self.shape, dtype=dtype, device=self.device)
        if taking:
            given = [_at(vectors[place.parameter], place.index) for place in taking]
            torch._foreach_copy_([place.of(whole) for place in taking], given)
        for layer, pairs in self._computed:
            bias = None if layer.bias is None else whole.new_zeros(layer.bias.shape)[layer.bias_part]
            if layer.bias is not None and layer.bias in vectors:
                bias = vectors[layer.bias][layer.bias_part].to(dtype)
            whole[pairs] = layer.to_matrix(vectors[layer.weight].to(dtype), bias)
        return whole

    def read(self, matrices: Tensor, parameters: Collection[nn.Parameter]) -> list[Part]:
        """What each of these parameters has in some matrices ``[p, d_out, d_in]``; views of them where possible."""
        whole = matrices.contiguous()
        taking = [place for place in self._strided if place.parameter in parameters]
        found: list[Part] = [(place.parameter, place.index, place.of(whole)) for place in taking]
        for layer, pairs in self._computed:
            parts = zip(layer.parameters, (_WHOLE, layer.bias_part), layer.from_matrix(whole[pairs]), strict=False)
            found += [part for part in parts if part[0] in parameters]
        return found


def _at(vector: Tensor, index: slice) -> Tensor:
    return vector if index is _WHOLE else vector[index]
