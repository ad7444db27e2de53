"""The matrices of all stacks of a step, in two forms: stack by stack on a CPU, side by side where launches cost much.

On an accelerator the time of a step on a small batch is bound by kernel launches. There the matrices share one storage
(:class:`FlatMatrices`): an operation takes them as one vector or, where it is by pair, as rows that each belong to one
pair. On the CPU a launch costs little, and long vectors do not fit the cache. So each stack's matrices have their own
storage, and operations loop over stacks (:class:`Matrices`).

What belongs to pairs, like norms and multipliers, is one vector ``[pairs]`` in both forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.flat_storage import split_flat
from ..common.machines import is_asynchronous
from .pairs import Groups, group_of_each, inner, norm

_FEW_PAIRS = 64  # stacks of more pairs (grouped convolutions) are multiplied in a kernel of their own
_LEAST_ROW = 8  # numbers that share a multiplier; with shorter rows, those of all rows would take too much memory


class Matrices:
    """The matrices of several stacks, each with storage of its own.

    Where a method takes ``out``, the result is written there and returned: to the matrices themselves, or to what
    :meth:`empty_sets` has given; None: it is new.

    Args:
        tensors: Those of each stack, ``[p, d_out, d_in]``.
        groups: For each stack, which of its pairs are scaled together; None: each is scaled on its own.
    """

    def __init__(self, tensors: Sequence[Tensor], groups: Sequence[Groups | None]) -> None:
        self.tensors, self.groups = list(tensors), groups
        # The same numbers, cut up as operations loop over them: entry by entry, pair by pair, and where they sum up.
        self.parts = self.multiplied = self.summed = self.tensors
        self.groups_of_summed = groups

    def empty(self) -> Matrices:
        """Uninitialised matrices like these."""
        return Matrices([torch.empty_like(tensor) for tensor in self.tensors], self.groups)

    def empty_sets(self, n: int) -> Sequence[Matrices] | None:
        """``n`` sets of uninitialised matrices in one storage; None where matrices do not share one."""
        return None

    def split(self, of_pairs: Tensor) -> list[Tensor]:
        """The parts ``[p]`` of a vector ``[pairs]`` that belong to each stack."""
        return list(of_pairs.split_with_sizes([len(tensor) for tensor in self.tensors]))

    def minus(self, others: Matrices, out: Matrices | None = None) -> Matrices:
        """The difference."""
        return self._elementwise("sub", others, out=out)

    def lerp(self, others: Matrices, weight: float, out: Matrices | None = None) -> Matrices:
        """The mixture ``(1 - weight) self + weight others``."""
        return self._elementwise("lerp", others, weight, out=out)

    def times(self, by: Tensor | float, out: Matrices | None = None) -> Matrices:
        """The product with the multiplier of each pair, ``[pairs]``, or with one for all, a number or 0-dim."""
        result = self.empty() if out is None else out
        multipliers = self._multipliers(by) if isinstance(by, Tensor) and by.dim() else [by] * len(self.multiplied)
        for part, multiplier, to in zip(self.multiplied, multipliers, result.multiplied, strict=True):
            torch.mul(part, multiplier.to(part.device) if isinstance(multiplier, Tensor) else multiplier, out=to)
        return result

    def minus_multiples_(self, others: Matrices, by: Tensor) -> Matrices:
        """Subtracts other matrices, each times the multiplier of its pair, ``[pairs]``, in place; returns these."""
        for part, other, multiplier in zip(self.multiplied, others.multiplied, self._multipliers(by), strict=True):
            part.addcmul_(other, multiplier.to(part.device), value=-1)
        return self

    def norms(self) -> Tensor:
        """The Frobenius norm of each pair's matrix, over all pairs scaled with it, ``[pairs]``."""
        return _joined(list(map(norm, self.summed, self.groups_of_summed)))

    def inners(self, others: Matrices) -> Tensor:
        """The inner product of each pair's matrix with another, over all pairs scaled with it, ``[pairs]``."""
        return _joined(list(map(inner, self.summed, others.summed, self.groups_of_summed)))

    def length(self, norms: Tensor) -> Tensor:
        """The norm of all matrices together, 0-dim, given their :meth:`norms`."""
        of_stacks = list(zip(self.tensors, self.groups, self.split(norms), strict=True))
        of_pairs = [norms for _, groups, norms in of_stacks if groups is None]
        of_norm_layers = [torch.linalg.vector_norm(m).view(1) for m, groups, _ in of_stacks if groups is not None]
        return torch.linalg.vector_norm(_joined(of_pairs + of_norm_layers))

    def keep_zeros_(self, moments: Matrices) -> None:
        """Sets entries to zero, in place, where ``moments`` have zeros."""
        for matrix, moment in zip(self.parts, moments.parts, strict=True):
            if is_asynchronous(matrix.device):
                matrix.masked_fill_(moment == 0, 0.0)
            elif float(moment.abs().amin()) == 0:  # most have no zeros
                # ``ne`` writes numbers, not bools, because torch's loops over bools take several times as long.
                matrix.mul_(torch.ne(moment, 0, out=torch.empty_like(moment)))

    def _multipliers(self, by: Tensor) -> list[Tensor]:
        """The multipliers ``[pairs]`` of pairs, as ``multiplied`` is multiplied by them."""
        return [part.view(-1, 1, 1) for part in self.split(by)]

    def _elementwise(self, operation: str, others: Matrices, *numbers: float, out: Matrices | None) -> Matrices:
        if not self.tensors:
            return self
        if out is None:
            found = getattr(torch, f"_foreach_{operation}")(self.tensors, others.tensors, *numbers)
            return Matrices(found, self.groups)
        if out is not self:
            torch._foreach_copy_(out.tensors, self.tensors)
        getattr(torch, f"_foreach_{operation}_")(out.tensors, others.tensors, *numbers)
        return out


class FlatStorage:
    """How the matrices ``[p, d_out, d_in]`` of some stacks lie in one storage.

    One kernel multiplies the first ``stacks_multiplied`` stacks, and one computes the norms of the first
    ``stacks_summed``, which are as many or more. These kernels take the numbers of their stacks as rows, all of one
    length, each of which belongs to a single group of pairs.

    Args:
        shapes: The shape of each stack's matrices in the storage, sorted by :func:`storage_order`, because only the
            first stacks, up to one that shares less, can share kernels.
        groups: For each stack, which of its pairs are scaled together.
        device: The device of the matrices.
        transposed: For each stack, whether its matrices are the transposes of those in the storage (:class:`~.Layout`).

    Attributes:
        stacks_multiplied, stacks_summed: How many stacks, from the first on, each of the two kernels takes.
        multiplied_shape, summed_shape: The shape of their rows, ``[rows, 1, length]``.
        pair_of_row: For each row that is multiplied, the pair whose multiplier it takes.
        groups_of_rows: Which rows add up to the norm of which group of pairs.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        groups: Sequence[Groups | None],
        device: torch.device,
        transposed: Sequence[bool],
    ) -> None:
        self.shapes, self.groups, self.device, self.transposed = list(shapes), list(groups), device, list(transposed)
        kinds = list(map(storage_order, shapes, groups))
        self.stacks_multiplied, self.stacks_summed = (
            next((i for i, kind in enumerate(kinds) if kind > most), len(kinds)) for most in range(2)
        )
        pairs = [_pairs_of_groups(*of_stack) for of_stack in zip(shapes, groups, strict=True)]

        def rows(stacks: int) -> tuple[tuple[int, int, int], list[int]]:
            """The first stacks as matrices of one row each, and the number of these in each group."""
            of_stacks = zip(pairs[:stacks], shapes, strict=False)
            numels = [n * d_out * d_in for of_stack, (_, d_out, d_in) in of_stacks for n in of_stack]
            row = math.gcd(*numels) or 1
            return (sum(numels) // row, 1, row), [numel // row for numel in numels]

        self.multiplied_shape, counts = rows(self.stacks_multiplied)
        self.pair_of_row = group_of_each(counts).to(device, non_blocking=True)
        self.summed_shape, counts = rows(self.stacks_summed)
        self.groups_of_rows = Groups.of(counts, device, sum(pairs[: self.stacks_summed], []))

    def split(self, whole: Tensor) -> list[Tensor]:
        """The matrices of each stack in the storage ``whole``, as views."""
        views = zip(split_flat(whole, self.shapes), self.transposed, strict=True)
        return [view.mT if is_transposed else view for view, is_transposed in views]

    def several(self, n: int, dtype: torch.dtype) -> list[FlatMatrices]:
        """``n`` uninitialised sets of matrices, all in one storage."""
        whole = torch.empty((n, sum(map(math.prod, self.shapes))), dtype=dtype, device=self.device)
        return [FlatMatrices(part, self) for part in whole]


class FlatMatrices(Matrices):
    """The matrices of several stacks in one storage.

    Args:
        whole: All of them, one after the other, as one vector.
        storage: How they lie there.
    """

    def __init__(self, whole: Tensor, storage: FlatStorage) -> None:
        super().__init__(storage.split(whole), storage.groups)
        self.whole, self.storage, self.parts = whole, storage, [whole]
        if n := storage.stacks_multiplied:
            self.multiplied = [self._in_rows(storage.multiplied_shape), *self.tensors[n:]]
        if n := storage.stacks_summed:
            self.summed = [self._in_rows(storage.summed_shape), *self.tensors[n:]]
            self.groups_of_summed = [storage.groups_of_rows, *self.groups[n:]]

    def _in_rows(self, shape: tuple[int, int, int]) -> Tensor:
        return self.whole.as_strided(shape, (shape[2], shape[2], 1), self.whole.storage_offset())

    def empty(self) -> Matrices:
        """See :class:`Matrices`."""
        return self.storage.several(1, self.whole.dtype)[0]

    def empty_sets(self, n: int) -> Sequence[Matrices]:
        """See :class:`Matrices`."""
        return self.storage.several(n, self.whole.dtype)

    def length(self, norms: Tensor) -> Tensor:
        """See :class:`Matrices`."""
        return torch.linalg.vector_norm(self.whole)

    def _multipliers(self, by: Tensor) -> list[Tensor]:
        n = self.storage.stacks_multiplied
        shared = [by.index_select(0, self.storage.pair_of_row).view(-1, 1, 1)] if n else []
        return shared + super()._multipliers(by)[n:]

    def _elementwise(self, operation: str, others: Matrices, *numbers: float, out: Matrices | None) -> Matrices:
        result = self.empty() if out is None else out
        getattr(torch, operation)(self.whole, *others.parts, *numbers, out=result.parts[0])
        return result


def storage_order(shape: tuple[int, int, int], groups: Groups | None) -> int:
    """The place of a stack in one storage: the more kernels it can share with other stacks, the lower the number.

    Args:
        shape: The shape of the stack's matrices, ``[p, d_out, d_in]``.
        groups: Which of its pairs are scaled together.

    Returns:
        0 if the stack shares the kernels that multiply and those that compute norms; 1 if it shares only
        those for norms, by group; 2 if it shares neither, because its numbers do not divide into rows.
    """
    p, d_out, d_in = shape
    counts = _pairs_of_groups(shape, groups)
    if any(pairs * d_out * d_in % _LEAST_ROW for pairs in counts):
        return 2
    return 0 if len(counts) == p <= _FEW_PAIRS else 1


def _pairs_of_groups(shape: tuple[int, int, int], groups: Groups | None) -> list[int]:
    """The number of pairs in each group of pairs that are scaled together."""
    return [1] * shape[0] if groups is None else groups.counts


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors of stacks as one vector, on the device of the first."""
    if len(vectors) == 1:
        return vectors[0]
    return torch.cat([v.to(vectors[0].device) for v in vectors]) if vectors else torch.empty(0, device="cpu")
