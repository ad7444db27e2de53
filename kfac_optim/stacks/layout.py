"""Where the parameters of layers of one shape lie in the matrices of these layers.

A step processes the vectors of all layers of one shape (gradients, first moments, updates) at once, in one tensor
``[p, d_out, d_in]``. All weights together are a strided part of that tensor, and so are all biases. To fill such a part
takes one operation. To read it takes none if it is contiguous, otherwise one that copies it. The vectors that are read
are laid out as the parameters are, so that a multi-tensor operation can take all of them at once. If weights are the
transposes of their matrices (embeddings, transformers' ``Conv1D``), the tensor is a transpose as well.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from ..layers import KroneckerLayer

# A parameter, the slice of it that a layer covers, and a tensor of the shape of that slice.
Part = tuple[nn.Parameter, slice, Tensor]
_WHOLE = slice(None)


class _Run:
    """Parameters, or slices of them that layers cover, which lie in the matrices one after the other.

    Concatenated along their first dimension, they are a strided part of the matrices.

    Args:
        first: The part of the matrices where the first parameter lies.

    Attributes:
        parameters: The parameters.
        indices: The slice of each parameter.
        lengths: The lengths of the slices in the first dimension.
        length: The sum of ``lengths``.
        shape: The shape of the slices in the other dimensions.
        stride: The stride of the run's part of the matrices.
        offset: The index of the run's first number in the matrices.
    """

    def __init__(self, first: Tensor) -> None:
        self.parameters: list[nn.Parameter] = []
        self.indices: list[slice] = []
        self.lengths: list[int] = []
        self.length, self.shape, self.stride = 0, first.shape[1:], first.stride()
        self.offset = int(first.storage_offset())

    def is_followed_by(self, part: Tensor) -> bool:
        """Whether a part of the matrices lies where the next parameter of the run would."""
        alike = part.shape[1:] == self.shape and part.stride() == self.stride
        return alike and part.storage_offset() == self.offset + self.length * self.stride[0]

    def append(self, parameter: nn.Parameter, index: slice, length: int) -> None:
        """Adds the next parameter."""
        self.parameters.append(parameter)
        self.indices.append(index)
        self.lengths.append(length)
        self.length += length

    def of(self, whole: Tensor) -> Tensor:
        """The run's part of matrices in memory order (:class:`Layout`), as a view."""
        offset = whole.storage_offset() + self.offset
        return whole.as_strided((self.length, *self.shape), self.stride, offset)

    @property
    def is_contiguous(self) -> bool:
        """Whether the run's part of the matrices is contiguous."""
        return self.stride == tuple(torch.empty((self.length, *self.shape), device="meta").stride())

    def read(
        self, wholes: Sequence[Tensor], parameters: Collection[nn.Parameter], copies: bool
    ) -> Iterator[list[Part]]:
        """These parameters' parts of matrices in memory order, at equal distances in one storage, contiguous.

        They are views if the run is contiguous, unless ``copies`` are wanted.
        """
        together: Sequence[Tensor] | Tensor = [self.of(whole) for whole in wholes]
        first = together[0]
        if copies or not first.is_contiguous():
            distance = wholes[1].storage_offset() - wholes[0].storage_offset() if len(wholes) > 1 else 0
            strided = first.as_strided((len(wholes), *first.shape), (distance, *self.stride), first.storage_offset())
            together = strided.clone(memory_format=torch.contiguous_format)
        for whole in together:
            found = zip(self.parameters, self.indices, whole.split_with_sizes(self.lengths), strict=True)
            yield [part for part in found if part[0] in parameters]


def _part(vector: Tensor, index: slice) -> Tensor:
    """A slice of a vector; if it is the whole vector, the comparison is faster than slicing."""
    return vector if index == _WHOLE else vector[index]


def _flat(whole: Tensor) -> Tensor:
    """Matrices in memory order (:class:`Layout`) as one vector."""
    return whole.as_strided((whole.numel(),), (1,), whole.storage_offset())


class Layout:
    """Where the parameters of some layers lie in a tensor that holds the matrices of these layers one after the other.

    Args:
        layers: Layers of one shape on one device.

    Attributes:
        shape: The shape of the matrices, ``[p, d_out, d_in]``.
        device: The device of the parameters.
        parameters: The parameters.
        is_transposed: Whether the matrices are the transposes of contiguous ones ("matrices in memory order" below),
            because the first layer's weight is the transpose of its matrix.
        memory_shape: The shape of those contiguous ones.
    """

    def __init__(self, layers: Sequence[KroneckerLayer]) -> None:
        count, d_out, d_in = sum(layer.pairs for layer in layers), layers[0].d_out, layers[0].d_in
        self.device, self.is_transposed = layers[0].weight.device, layers[0].stored_transposed
        self.shape = (count, d_out, d_in)
        self.memory_shape = (count, d_in, d_out) if self.is_transposed else self.shape
        self._runs: list[_Run] = []
        # Parts that are no views, as those of transposed convolutions: where each entry is among those of the matrices.
        self._scattered: list[Part] = []
        whole, start = self.memory_view(torch.empty(self.memory_shape, device="meta")), 0
        self.parameters = {p for layer in layers for p in layer.parameters}
        self._unused = whole.numel()  # entries that belong to no parameter
        growing: dict[int, _Run] = {}  # the last run of weights (0), and of biases (1)
        for layer in layers:
            pairs = slice(start, start := start + layer.pairs)
            parts = layer.from_matrix(whole[pairs])
            storages = {part.untyped_storage()._cdata for part in parts}
            self._unused -= sum(part.numel() for part in parts)
            indices = (_WHOLE, layer.bias_part)
            if storages != {whole.untyped_storage()._cdata} or not all(part.dim() for part in parts):
                numbers = torch.arange(pairs.start * d_out * d_in, pairs.stop * d_out * d_in, device=self.device)
                entries = layer.from_matrix(self.memory_view(numbers.view(-1, *self.memory_shape[1:])))
                self._scattered += zip(layer.parameters, indices, map(Tensor.contiguous, entries), strict=False)
                continue
            for kind, (p, index, part) in enumerate(zip(layer.parameters, indices, parts, strict=False)):
                if kind not in growing or not growing[kind].is_followed_by(part):
                    growing[kind] = _Run(part)
                    self._runs.append(growing[kind])
                growing[kind].append(p, index, len(part))

    def memory_view(self, matrices: Tensor) -> Tensor:
        """Matrices ``[p, d_out, d_in]`` as they lie in memory: transposed if the weights are; also the way back."""
        return matrices.mT if self.is_transposed else matrices

    def fill(self, vectors: Mapping[nn.Parameter, Tensor], dtype: torch.dtype) -> Tensor:
        """The matrices of the parameters' vectors, ``[p, d_out, d_in]``, with zeros for parameters without a vector."""
        whole = torch.empty(self.memory_shape, dtype=dtype, device=self.device)
        fill_all([self], vectors, [whole])
        return self.memory_view(whole)

    def fill_or_defer(self, whole: Tensor, vectors: Mapping[nn.Parameter, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Fills matrices in memory order like :meth:`fill`, but leaves contiguous parts to :func:`fill_all`.

        Returns:
            Those parts, each with the vector to be copied there.
        """
        if self._unused or not all(p in vectors for p in self.parameters):
            whole.zero_()
        deferred: list[tuple[Tensor, Tensor]] = []
        for run in self._runs:
            parts = zip(run.parameters, run.indices, run.of(whole).split_with_sizes(run.lengths), strict=True)
            given = [(part, _part(vectors[p], index)) for p, index, part in parts if p in vectors]
            if all(part.stride() == vector.stride() and part.is_contiguous() for part, vector in given):
                deferred += given
            elif 1 < len(given) == len(run.parameters):
                torch.cat([vector for _, vector in given], out=run.of(whole))
            else:
                for part, vector in given:
                    part.copy_(vector)
        for p, index, places in self._scattered:
            if p in vectors:
                _flat(whole)[places] = _part(vectors[p], index).to(whole.dtype)
        return deferred

    def read(self, matrices: Tensor, parameters: Collection[nn.Parameter]) -> list[Part]:
        """Reads the part of each of these parameters out of matrices ``[p, d_out, d_in]``, as a view where possible."""
        return self.read_several([self.memory_view(matrices).contiguous()], parameters, copies=False)[0]

    @cached_property
    def viewable_numel(self) -> int:
        """How many entries of the matrices can be read by views."""
        return sum(run.length * math.prod(run.shape) for run in self._runs if run.is_contiguous)

    def read_several(
        self, matrices: Sequence[Tensor], parameters: Collection[nn.Parameter], *, copies: bool
    ) -> list[list[Part]]:
        """Like :meth:`read`, for matrices in memory order, at equal distances in one storage, by fewer operations.

        ``copies``: whether to avoid views, which would keep the storage in memory.
        """
        found: list[list[Part]] = [[] for _ in matrices]
        for run in self._runs:
            for of_whole, parts in zip(found, run.read(matrices, parameters, copies), strict=True):
                of_whole += parts
        for p, index, places in [part for part in self._scattered if part[0] in parameters]:
            for of_whole, whole in zip(found, matrices, strict=True):
                part = _flat(whole).index_select(0, places.view(-1))  # in less time than by places in their shape
                of_whole.append((p, index, part.view(places.shape)))
        return found


def fill_all(layouts: Sequence[Layout], vectors: Mapping[nn.Parameter, Tensor], matrices: Sequence[Tensor]) -> None:
    """Fills matrices of several layouts, in memory order; one multi-tensor operation copies all contiguous parts."""
    each = zip(layouts, matrices, strict=True)
    deferred = [part for layout, whole in each for part in layout.fill_or_defer(whole, vectors)]
    if deferred:
        torch._foreach_copy_([part for part, _ in deferred], [vector for _, vector in deferred])
