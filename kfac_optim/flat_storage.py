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
    "needs_own_launch",
    "scale_pairs",
]

Tensors = list[Tensor] | tuple[Tensor, ...]  # what multi-tensor operations take

_CHEAP_LAUNCHES = {"cpu"}  # types of devices on which launches cost little
_FEW_PAIRS = 64  # stacks of more pairs, as norm layers have them, get their factors by a kernel of their own
_LEAST_ROW = 8  # numbers that share a factor; with fewer, all factors together would take too much memory


def is_launch_bound(device: torch.device) -> bool:
    """Whether steps are short of launches on a device, rather than of arithmetic."""
    return device.type not in _CHEAP_LAUNCHES


def needs_own_launch(shape: tuple[int, int, int]) -> bool:
    """Whether a stack gets its factors by a kernel of its own: of many pairs, or of an odd number of entries."""
    p, d_out, d_in = shape
    return p > _FEW_PAIRS or d_out * d_in % _LEAST_ROW != 0


class FlatStorage:
    """Where the matrices ``[p, d_out, d_in]`` of some stacks lie in one storage.

    Args:
        shapes: The shape of each stack's matrices; stacks that need a kernel of their own come last.
        device: Where they are.

    Attributes:
        shared: How many stacks are multiplied by their factors in one kernel: all before the first that needs its own
            (:func:`needs_own_launch`).
        row: The numbers in a row, which all belong to one pair, in each of these stacks.
        rows: How many rows they have.
    """

    def __init__(self, shapes: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self.shapes, self.device = list(shapes), device
        self.shared = next((i for i, shape in enumerate(shapes) if needs_own_launch(shape)), len(shapes))
        self.row = math.gcd(*(d_out * d_in for _, d_out, d_in in shapes[: self.shared])) if self.shared else 0
        pairs = [(p, d_out * d_in) for p, d_out, d_in in shapes[: self.shared]]
        self.rows = sum(p * numel for p, numel in pairs) // self.row if self.row else 0
        self._pair_of_row: Tensor | None = None

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

    def by_row(self, of_pairs: Sequence[Tensor]) -> Tensor:
        """Values of the pairs of the first stacks, ``[p]`` each, for each row of :attr:`row` numbers, ``[rows, 1]``."""
        if self._pair_of_row is None:  # computed once, on the host: it would wait for a device
            lengths = [d_out * d_in // self.row for p, d_out, d_in in self.shapes[: self.shared] for _ in range(p)]
            index = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
            self._pair_of_row = index.to(self.device, non_blocking=True)
        return torch.cat(list(of_pairs)).index_select(0, self._pair_of_row)[:, None]


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
    together = [flat_view(given) if isinstance(given, (list, tuple)) else given for given in (first, *others)]
    if all(given is not None for given in together):
        if out is not None:
            getattr(torch, operation)(*together, out=flat_view(out))
            return list(out)
        found = getattr(torch.Tensor, operation)(*together)
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
    given, found = flat_view(matrices), flat_view(results)
    assert given is not None and found is not None
    of_few = slice(0, storage.rows * storage.row)
    of_pairs = [f if f.dim() else f.expand(len(m)) for m, f in zip(matrices, factors[: storage.shared], strict=False)]
    if storage.rows:
        rows = storage.by_row(of_pairs)
        torch.mul(given[of_few].view(-1, storage.row), rows, out=found[of_few].view(-1, storage.row))
    for i in range(storage.shared, len(matrices)):
        torch.mul(matrices[i], factors[i].reshape(-1, 1, 1), out=results[i])
    return results
