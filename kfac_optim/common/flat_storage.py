"""Flat storage for the matrices of several stacks, so that one kernel launch processes all of them.

On an accelerator the time of a step on a small batch is bound by kernel launches. There the matrices of a step share
one storage, and an elementwise operation treats them as a single vector, whatever their shapes. On the CPU a launch
costs little, and long vectors do not fit the cache. So each matrix has its own storage, and operations loop over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .tensor_cache import tensor_cache

__all__ = ["FlatStorage", "Tensors", "are_adjacent", "elementwise", "flat_view", "scale_pairs", "sharing", "split_flat"]

Tensors = list[Tensor] | tuple[Tensor, ...]  # what multi-tensor operations take

_FEW_PAIRS = 64  # stacks of more pairs (grouped convolutions) are multiplied by their factors in a kernel of their own
_LEAST_ROW = 8  # numbers that share a factor; with shorter rows, the factors of all rows would take too much memory


def sharing(shape: tuple[int, int, int], groups: Sequence[int]) -> int:
    """How far a stack shares kernels with other stacks, which decides its place in one storage.

    Args:
        shape: The shape of the stack's matrices, ``[p, d_out, d_in]``.
        groups: The number of pairs in each group that is scaled together: 1, or all pairs of a norm layer.

    Returns:
        0 if the stack shares the kernels that multiply by factors and those that compute norms; 1 if it shares only
        those for norms, by group; 2 if it shares neither, because its numbers do not divide into rows.
    """
    p, d_out, d_in = shape
    if any(pairs * d_out * d_in % _LEAST_ROW for pairs in groups):
        return 2
    return 0 if len(groups) == p <= _FEW_PAIRS else 1


class FlatStorage:
    """Where the matrices ``[p, d_out, d_in]`` of some stacks lie in one storage.

    Args:
        shapes: The shape of each stack's matrices. They have to be sorted by :func:`sharing`, because only the first
            stacks, up to one that shares less, can share kernels.
        groups: For each stack, the number of pairs in each group that is scaled together.
        device: The device of the matrices.

    Attributes:
        scaled: How many stacks, the first ones, are multiplied by their factors in one kernel.
        summed: How many stacks, the first ones, have their norms computed in one kernel.
        row: By either number of stacks, how many consecutive numbers form a row, all of which belong to one group: the
            greatest common divisor of the sizes of the groups.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], groups: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self.shapes, self.groups, self.device = list(shapes), list(map(list, groups)), device
        kinds = list(map(sharing, shapes, groups))
        self.scaled, self.summed = (
            next((i for i, kind in enumerate(kinds) if kind > most), len(kinds)) for most in range(2)
        )
        self.row = {stacks: math.gcd(*self._numels(stacks)) for stacks in (self.scaled, self.summed)}
        self._known_index: tuple[Tensor, Tensor, Tensor] | None = None

    def empty(self, dtype: torch.dtype) -> list[Tensor]:
        """Uninitialised matrices."""
        return self.several(1, dtype)[0]

    def several(self, n: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """``n`` uninitialised sets of matrices, all in one storage."""
        whole = torch.empty((n, sum(map(math.prod, self.shapes))), dtype=dtype, device=self.device)
        return [split_flat(part, self.shapes) for part in whole]

    def fits(self, matrices: Sequence[Tensor]) -> bool:
        """Whether these are matrices of all stacks, one after the other in one storage."""
        return [tuple(m.shape) for m in matrices] == self.shapes and are_adjacent(matrices)

    def in_rows(self, matrices: Sequence[Tensor], stacks: int) -> Tensor:
        """The matrices of the first stacks as a view in rows, ``[rows, row]``; ``stacks``: ``scaled`` or ``summed``.

        The matrices have to fit (:meth:`fits`).
        """
        rows = sum(map(math.prod, self.shapes[:stacks])) // self.row[stacks]
        return matrices[0].as_strided((rows, self.row[stacks]), (self.row[stacks], 1), matrices[0].storage_offset())

    def _numels(self, stacks: int) -> list[int]:
        """How many numbers each group of the first stacks has."""
        known = zip(self.groups[:stacks], self.shapes, strict=False)
        return [pairs * d_out * d_in for of_stack, (_, d_out, d_in) in known for pairs in of_stack]

    def by_row(self, of_pairs: Sequence[Tensor]) -> Tensor:
        """Copies values of the pairs of the first ``scaled`` stacks, ``[p]`` each, to their rows, ``[rows, 1]``."""
        return torch.cat(list(of_pairs)).index_select(0, self._index[0])[:, None]

    def sums(self, of_rows: Tensor) -> Tensor:
        """Sums values ``[rows]`` of the first ``summed`` stacks over the rows of each group, to ``[groups]``."""
        return torch.segment_reduce(of_rows, "sum", lengths=self._index[1], unsafe=True)

    def by_pair(self, of_groups: Tensor) -> list[Tensor]:
        """Copies values of groups to their pairs, by stack, ``[p]`` each; the results share one storage."""
        of_pairs = of_groups.index_select(0, self._index[2]) if self.summed > self.scaled else of_groups
        return list(of_pairs.split_with_sizes([p for p, _, _ in self.shapes[: self.summed]]))

    @property
    def _index(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pair of each scaled row, the number of rows in each group, and the group of each pair.

        They are computed once, on the host: on a device, torch would have to wait for it to learn their lengths.
        """
        if self._known_index is None:
            of_scaled, of_summed = (
                torch.tensor(self._numels(stacks), dtype=torch.int64, device="cpu") // max(1, self.row[stacks])
                for stacks in (self.scaled, self.summed)
            )
            pairs = torch.tensor([pairs for of_stack in self.groups[: self.summed] for pairs in of_stack], device="cpu")
            found = (_places(of_scaled), of_summed, _places(pairs))
            pair_of_row, rows, group_of_pair = (index.to(self.device, non_blocking=True) for index in found)
            self._known_index = pair_of_row, rows, group_of_pair
        return self._known_index


def _places(lengths: Tensor) -> Tensor:
    """For each entry of a vector that consists of parts of these lengths, the number of its part."""
    return torch.arange(len(lengths), dtype=torch.int32, device="cpu").repeat_interleave(lengths)


def split_flat(whole: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Splits a vector into consecutive views of these shapes."""
    return _views_like(whole, _templates(tuple(shapes)))


@tensor_cache(64)
def _templates(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]  # cached: making these takes longer than the views


def _views_like(whole: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Splits a vector into consecutive views shaped like some tensors, in a tenth of the host time of a Python loop."""
    return list(torch._utils._unflatten_dense_tensors(whole, tensors))


def flat_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Several tensors as a view of one vector; None if they do not lie one after the other in one storage."""
    if len(tensors) < 2 or not are_adjacent(tensors):
        return None
    return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,), tensors[0].storage_offset())


def are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors, at least one, are contiguous and lie one after the other in one storage."""
    storage, dtype, start = tensors[0].untyped_storage()._cdata, tensors[0].dtype, tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.dtype == dtype and tensor.storage_offset() == start and tensor.is_contiguous()
        if not same or tensor.untyped_storage()._cdata != storage:
            return False
        start += tensor.numel()
    return True


def elementwise(
    operation: str,
    first: Sequence[Tensor],
    *others: Sequence[Tensor] | Tensor | float,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Applies an elementwise torch operation to each tensor of a list, in one launch if they share one storage.

    Args:
        operation: The name of the method, such as ``lerp``, or ``sub_`` in place.
        first: The tensors; the results share one storage if these do, and those of every other list.
        others: The other arguments of the operation: lists of tensors of the same shapes, or numbers.
        out: Takes the results if the tensors of each list share one storage; None: the results are new tensors.
    """
    if not first:
        return []
    whole = flat_view(first)
    if whole is not None:
        together = [flat_view(given) if isinstance(given, (list, tuple)) else given for given in others]
        if all(given is not None for given in together):
            if out is not None:
                getattr(torch, operation)(whole, *together, out=flat_view(out))
                return list(out)
            found = getattr(torch.Tensor, operation)(whole, *together)
            return list(first) if operation.endswith("_") else _views_like(found, first)
    found = getattr(torch, f"_foreach_{operation}")(list(first), *others)
    return list(first) if operation.endswith("_") else list(found)


def scale_pairs(
    matrices: Sequence[Tensor],
    factors: Sequence[Tensor],
    storage: FlatStorage | None = None,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Each stack of matrices ``[p, d_out, d_in]`` times the factors of its pairs, ``[p]`` or 0-dim.

    Args:
        matrices: The matrices of each stack.
        factors: The factors of each stack.
        storage: Where the matrices lie in one storage; None: each stack has its own.
        out: Takes the results: the matrices themselves, or others that lie as they do; None: the results are new.
    """
    if storage is None or not storage.fits(matrices):
        by_pair = [factor.reshape(-1, 1, 1) for factor in factors]
        if out is matrices:
            return [matrix.mul_(by) for matrix, by in zip(matrices, by_pair, strict=True)]
        return [matrix * by for matrix, by in zip(matrices, by_pair, strict=True)]
    results = storage.empty(matrices[0].dtype) if out is None else list(out)
    if n := storage.scaled:
        of_pairs = [f if f.dim() else f.expand(len(m)) for m, f in zip(matrices[:n], factors[:n], strict=True)]
        torch.mul(storage.in_rows(matrices, n), storage.by_row(of_pairs), out=storage.in_rows(results, n))
    for matrix, factor, result in zip(matrices[n:], factors[n:], results[n:], strict=True):
        torch.mul(matrix, factor.reshape(-1, 1, 1), out=result)
    return results
