"""Flat storage for the matrices of several stacks, so that one kernel launch processes all of them.

On an accelerator a step on a small batch is bound by kernel launches. There the matrices of a step share one storage,
and an elementwise operation treats them as a single vector, whatever their shapes. On the CPU a launch costs little and
long vectors leave the cache, so each matrix has storage of its own and operations loop over the list.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "FlatStorage",
    "Tensors",
    "are_adjacent",
    "split_flat",
    "flat_view",
    "elementwise",
    "is_launch_bound",
    "sharing",
    "scale_pairs",
]

Tensors = list[Tensor] | tuple[Tensor, ...]  # what multi-tensor operations take

_CHEAP_LAUNCHES = {"cpu"}  # types of devices on which launches cost little
_FEW_PAIRS = 64  # stacks of more pairs (grouped convolutions) get their factors by a kernel of their own
_LEAST_ROW = 8  # numbers that share a factor; with fewer, all factors together would take too much memory


def is_launch_bound(device: torch.device) -> bool:
    """Whether steps are short of launches on a device, rather than of arithmetic."""
    return device.type not in _CHEAP_LAUNCHES


def sharing(shape: tuple[int, int, int], groups: Sequence[int]) -> int:
    """How far the matrices of a stack share kernels with those of others, which decides their order in one storage.

    Args:
        shape: That of the stack's matrices, ``[p, d_out, d_in]``.
        groups: How many pairs each group has that is scaled together: 1, or all of a norm layer.

    Returns:
        Nought if they get their factors and norms by the same kernels; 1 if only their norms, by group; and 2 if
        neither, because their numbers do not divide into rows.
    """
    p, d_out, d_in = shape
    if any(pairs * d_out * d_in % _LEAST_ROW for pairs in groups):
        return 2
    return 0 if len(groups) == p <= _FEW_PAIRS else 1


class FlatStorage:
    """Where the matrices ``[p, d_out, d_in]`` of some stacks lie in one storage.

    Args:
        shapes: The shape of each stack's matrices; those that share most come first (:func:`sharing`), as far as they
            can: what comes after one that shares less shares no more.
        groups: How many pairs each group has that is scaled together, for each stack.
        device: Where they are.

    Attributes:
        scaled: How many stacks are multiplied by their factors in one kernel.
        summed: How many stacks have their norms in one kernel.
        row: For either number of stacks, how many numbers there are in a row, which all belong to one group.
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
        """Matrices without values."""
        return self.several(1, dtype)[0]

    def several(self, n: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """``n`` uninitialised sets of matrices, all in one storage."""
        whole = torch.empty((n, sum(map(math.prod, self.shapes))), dtype=dtype, device=self.device)
        return [split_flat(part, self.shapes) for part in whole]

    def fits(self, matrices: Sequence[Tensor]) -> bool:
        """Whether these are matrices of all stacks, side by side."""
        return [tuple(m.shape) for m in matrices] == self.shapes and are_adjacent(matrices)

    def in_rows(self, matrices: Sequence[Tensor], stacks: int) -> Tensor:
        """The matrices of the first stacks, ``scaled`` or ``summed``, in rows, ``[rows, row]``; a view.

        They have to fit.
        """
        rows = sum(map(math.prod, self.shapes[:stacks])) // self.row[stacks]
        return matrices[0].as_strided((rows, self.row[stacks]), (self.row[stacks], 1), matrices[0].storage_offset())

    def _numels(self, stacks: int) -> list[int]:
        """The numbers of each group of the first stacks."""
        known = zip(self.groups[:stacks], self.shapes, strict=False)
        return [pairs * d_out * d_in for of_stack, (_, d_out, d_in) in known for pairs in of_stack]

    def by_row(self, of_pairs: Sequence[Tensor]) -> Tensor:
        """Values of the pairs of the stacks that are scaled together, ``[p]`` each, for each row, ``[rows, 1]``."""
        return torch.cat(list(of_pairs)).index_select(0, self._index[0])[:, None]

    def sums(self, of_rows: Tensor) -> Tensor:
        """The sums over the rows of each group, of values ``[rows]`` of the stacks whose norms are taken together."""
        return torch.segment_reduce(of_rows, "sum", lengths=self._index[1], unsafe=True)

    def by_pair(self, of_groups: Tensor) -> list[Tensor]:
        """Values of groups as values of their pairs, by stack, ``[p]`` each; all side by side."""
        of_pairs = of_groups.index_select(0, self._index[2]) if self.summed > self.scaled else of_groups
        return list(of_pairs.split_with_sizes([p for p, _, _ in self.shapes[: self.summed]]))

    @property
    def _index(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pair of each row that is scaled, the number of rows of each group, and the group of each pair.

        Computed once, on the host: to know their lengths torch would wait for a device.
        """
        if self._known_index is None:
            of_scaled, of_summed = (
                torch.tensor(self._numels(stacks), dtype=torch.int64) // max(1, self.row[stacks])
                for stacks in (self.scaled, self.summed)
            )
            pairs = torch.tensor([pairs for of_stack in self.groups[: self.summed] for pairs in of_stack])
            found = (_places(of_scaled), of_summed, _places(pairs))
            pair_of_row, rows, group_of_pair = (index.to(self.device, non_blocking=True) for index in found)
            self._known_index = pair_of_row, rows, group_of_pair
        return self._known_index


def _places(lengths: Tensor) -> Tensor:
    """For each number of a vector that has parts of these lengths, in which part it is."""
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)


def split_flat(whole: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The parts of a vector that have these shapes, views."""
    return views_like(whole, _templates(tuple(shapes)))


@functools.lru_cache(maxsize=64)
def _templates(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]  # to make them takes longer than the views


def views_like(whole: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a vector that have the shapes of some tensors, views; on the host a tenth of what Python takes."""
    return list(torch._utils._unflatten_dense_tensors(whole, tensors))


def flat_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors as one vector, a view; None where they do not lie side by side in one storage."""
    if len(tensors) < 2 or not are_adjacent(tensors):
        return None
    return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,), tensors[0].storage_offset())


def are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors, at least one, lie side by side in one storage."""
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
    """Applies an elementwise torch operation to each tensor of a list: in one launch where they share one storage.

    Args:
        operation: The name of the method: ``lerp``, or ``sub_`` in place.
        first: The tensors; the results lie side by side where these, and those of the other lists, do.
        others: What else the operation takes: lists of tensors of the same shapes, or numbers.
        out: Where the results go, if all lie side by side; None: new tensors.
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
            return list(first) if operation.endswith("_") else views_like(found, first)
    found = getattr(torch, f"_foreach_{operation}")(list(first), *others)
    return list(first) if operation.endswith("_") else list(found)


def scale_pairs(
    matrices: Sequence[Tensor],
    factors: Sequence[Tensor],
    storage: FlatStorage | None = None,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Each stack of matrices ``[p, d_out, d_in]`` times factors of its pairs, ``[p]`` or 0-dim.

    Args:
        matrices: The matrices of each stack.
        factors: The factors of each stack.
        storage: Where the matrices lie.
        out: Where the results go: the matrices themselves, or others that lie as they do; None: new ones.
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
