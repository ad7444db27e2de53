"""A stack's direction, what a scaling knows about it, and the algebra of stacks: norms, inner products, multiples.

A stack holds the matrices of all layers of one shape. Norms and inner products are taken over single pairs, or over all
pairs that are scaled together (the channels of a norm layer). On devices where launches cost much, all stacks share one
storage, and few operations process all of them (:mod:`~kfac_optim.common.flat_storage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..common.flat_storage import FlatStorage, elementwise, flat_view, scale_pairs
from ..common.machines import is_asynchronous

__all__ = [
    "Direction",
    "Steepest",
    "at_largest",
    "cosines",
    "inners",
    "keep_zeros_",
    "length_of_updates",
    "norms",
    "rates_followed",
    "ratios",
    "relative_lengths",
    "scaled",
    "update_norms",
]


@dataclass(frozen=True)
class Steepest:
    """The factors that turn a scaled direction into ``(L + gamma) P m``.

    Attributes:
        factor: ``(L + gamma) / s``, ``[p]``, where L is the largest eigenvalue of ``A (x) G`` and s the product of all
            scales that the direction has been multiplied by since eqs. 11-13. If the solver damps A and G apart, the
            product of their largest damped eigenvalues takes the place of ``L + gamma``.
        contrast: ``(L + gamma) / gamma``: how many times more the steepest components are damped than the flattest.
    """

    factor: Tensor
    contrast: float


@dataclass(frozen=True)
class Direction:
    """What a scaling knows about a stack of layers of one shape.

    Attributes:
        direction: The preconditioned matrices, ``[p, d_out, d_in]`` (bias as the last column).
        gradient: The matrices that were preconditioned (gradients or first moments), of the same shape.
        update: The base optimizer's own update from them, per unit of the learning rate, of the same shape.
        lr: The learning rate: a number, or a tensor that broadcasts to that shape if weights and biases have different
            rates.
        layer_of_pair: For norm layers, whose pairs (channels) are scaled together: the number of the layer that each
            pair belongs to, ``[p]``. None: every pair is scaled on its own.
        pairs_per_layer: For norm layers, the number of pairs of each layer, whose pairs are consecutive, ``[layers]``.
        steepest: Relates the direction to its unscaled form; None if damping is not relative to the largest eigenvalue.
        storage: Where the matrices of all stacks lie in one storage; None: each stack has its own storage.
        cache: The results of ``update_norms`` and ``rates_followed``, for later calls in the step. The copies that
            ``scaled`` makes share the cache, because it depends on ``gradient`` and ``update`` only.
    """

    direction: Tensor
    gradient: Tensor
    update: Tensor
    lr: Tensor | float
    layer_of_pair: Tensor | None = None
    pairs_per_layer: Tensor | None = None
    steepest: Steepest | None = None
    storage: FlatStorage | None = None
    cache: dict[Callable[..., Any], Tensor] = field(default_factory=dict, repr=False)

    def inner(self, one: Tensor, other: Tensor) -> Tensor:
        """For each pair, the inner product of two matrices over all pairs scaled with it, ``[p]``."""
        if len(one) == 1:  # no copy of the products in memory
            return torch.dot(one.reshape(-1), other.reshape(-1)).view(1)
        products = (one * other).sum((1, 2))
        return products if self.layer_of_pair is None else self.over_layers(products)

    def norm(self, matrix: Tensor) -> Tensor:
        """For each pair, the Frobenius norm of ``matrix [p, d_out, d_in]`` over all pairs scaled with it, ``[p]``."""
        norms = torch.linalg.matrix_norm(matrix)
        return norms if self.layer_of_pair is None else self.over_layers(norms.square()).sqrt()

    def over_layers(self, values: Tensor) -> Tensor:
        """Replaces each pair's value by the sum over its layer's pairs; ``[p]`` to ``[p]``."""
        sums = torch.segment_reduce(values, "sum", lengths=self.pairs_per_layer, unsafe=True)
        return sums[self.layer_of_pair]


def norms(directions: Sequence[Direction], matrices: Sequence[Tensor]) -> list[Tensor]:
    """For each direction, the ``norm`` of its matrix, ``[p]``; in few operations if the matrices share one storage."""
    storage = directions[0].storage if directions else None
    if storage is None or not storage.summed or not storage.fits(matrices):
        return [d.norm(matrix) for d, matrix in zip(directions, matrices, strict=True)]
    n = storage.summed
    of_rows = torch.linalg.vector_norm(storage.in_rows(matrices, n), dim=1)
    together = storage.by_pair(storage.sums(of_rows.square_()).sqrt_())
    return together + [d.norm(matrix) for d, matrix in zip(directions[n:], matrices[n:], strict=True)]


def inners(directions: Sequence[Direction], matrices: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """For each direction, the ``inner`` product of two matrices, ``[p]``, in few operations as for :func:`norms`."""
    storage = directions[0].storage if directions else None
    if storage is None or not storage.summed or not (storage.fits(matrices) and storage.fits(others)):
        return [d.inner(*both) for d, *both in zip(directions, matrices, others, strict=True)]
    n = storage.summed
    of_rows = (storage.in_rows(matrices, n) * storage.in_rows(others, n)).sum(1)
    alone = zip(directions[n:], matrices[n:], others[n:], strict=True)
    return storage.by_pair(storage.sums(of_rows)) + [d.inner(*both) for d, *both in alone]


def cosines(x: Tensor, y: Tensor, layer_of_pair: Tensor, layers: int) -> Tensor:
    """The cosine of the angle between two vectors of each layer, ``[layers]``, on their device; 0 if one is zero.

    Args:
        x: The first vectors of all layers, as matrices ``[p, d_out, d_in]``.
        y: The second vectors, likewise.
        layer_of_pair: The number of the layer that each pair belongs to, ``[p]``.
        layers: The number of layers.
    """

    def over_layers(values: Tensor) -> Tensor:
        return values.new_zeros(layers).index_add_(0, layer_of_pair, values)

    def normalized(vector: Tensor) -> Tensor:  # before the product: one of small vectors underflows in float32
        norms = over_layers(torch.linalg.matrix_norm(vector).square()).sqrt()
        return vector / norms[layer_of_pair].reshape(-1, 1, 1)

    return over_layers((normalized(x) * normalized(y)).sum((1, 2))).nan_to_num_(nan=0.0)


def scaled(directions: Sequence[Direction], multipliers: Sequence[Tensor]) -> list[Direction]:
    """Directions multiplied by multipliers, ``[p]`` or 0-dim."""
    if not directions:
        return []
    matrices = scale_pairs([d.direction for d in directions], multipliers, directions[0].storage)
    steepest = [d.steepest for d in directions]
    if known := _steepest_of(directions):
        by_pair = [by.expand(len(of.factor)) for by, of in zip(multipliers, known, strict=True)]
        factors = ratios([of.factor for of in known], by_pair)
        steepest = [Steepest(factor, of.contrast) for factor, of in zip(factors, known, strict=True)]
    parts = zip(directions, matrices, steepest, strict=True)
    return [replace(d, direction=matrix, steepest=of) for d, matrix, of in parts]


def keep_zeros_(directions: Sequence[Direction]) -> None:
    """Sets entries of directions to zero, in place, where the preconditioned gradient or moment has zeros."""
    matrices, vectors = [d.direction for d in directions], [d.gradient for d in directions]
    whole, given = flat_view(matrices), flat_view(vectors)
    if whole is not None and given is not None:
        matrices, vectors = [whole], [given]
    for matrix, vector in zip(matrices, vectors, strict=True):
        if is_asynchronous(matrix.device):
            matrix.masked_fill_(vector == 0, 0.0)
        elif float(vector.abs().amin()) == 0:  # most vectors have no zeros
            # ``ne`` writes numbers, not bools, because torch's loops over bools take several times as long.
            matrix.mul_(torch.ne(vector, 0, out=torch.empty_like(vector)))


def update_norms(directions: Sequence[Direction]) -> list[Tensor]:
    """For each direction, the ``norm`` of the base optimizer's update, ``[p]``; computed only once in a step."""
    new = [d for d in directions if update_norms not in d.cache]
    for d, norm in zip(new, norms(new, [d.update for d in new]), strict=True):
        d.cache[update_norms] = norm
    return [d.cache[update_norms] for d in directions]


def length_of_updates(directions: Sequence[Direction]) -> Tensor:
    """The norm of the base optimizer's updates of all layers together, 0-dim."""
    device = directions[0].update.device
    alone = [d.layer_of_pair is None for d in directions]
    of_pairs = [norm for norm, known in zip(update_norms(directions), alone, strict=True) if known]
    of_norm_layers = [torch.linalg.vector_norm(d.update).view(1) for d in directions if d.layer_of_pair is not None]
    return torch.linalg.vector_norm(torch.cat([norm.to(device) for norm in (*of_pairs, *of_norm_layers)]))


def rates_followed(directions: Sequence[Direction]) -> list[Tensor]:
    """The rate ``<u, m> / <m, m>``, at least 0, at which the base's update u follows the preconditioned m, ``[p]``.

    It is computed only once in a step.
    """
    new = [d for d in directions if rates_followed not in d.cache]
    if new:
        moments = [d.gradient for d in new]
        lengths = norms(new, moments)
        found = ratios(inners(new, [d.update for d in new], moments), torch._foreach_mul(lengths, lengths))
        for d, rate in zip(new, elementwise("clamp_min", found, 0), strict=True):
            d.cache[rates_followed] = rate
    return [d.cache[rates_followed] for d in directions]


def at_largest(directions: Sequence[Direction], out: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
    """``(L + gamma) P m`` of each stack; damping has to be relative to the largest eigenvalue L.

    ``out``: see :func:`~kfac_optim.common.flat_storage.elementwise`.
    """
    factors = [of.factor for of in _steepest_of(directions)]
    return scale_pairs([d.direction for d in directions], factors, directions[0].storage, out)


def relative_lengths(directions: Sequence[Direction]) -> list[Tensor]:
    """``|gamma P m| / |u|``, ``[p]``, of directions as long as the update u; for damping as in :func:`at_largest`."""
    steepest = _steepest_of(directions)
    return elementwise("div", [of.factor for of in steepest], steepest[0].contrast)


def _steepest_of(directions: Sequence[Direction]) -> list[Steepest]:
    return [d.steepest for d in directions if d.steepest is not None]


def ratios(numerators: Sequence[Tensor], denominators: Sequence[Tensor]) -> list[Tensor]:
    """Numerators divided by denominators, ``[p]``; 0 where the denominator is 0, so that zero directions stay zero."""
    if len({tensor.device for tensor in denominators}) != 1:
        return [_ratio(*of_stack) for of_stack in zip(numerators, denominators, strict=True)]
    found = _ratio(*(_together(list(tensors)) for tensors in (numerators, denominators)))
    return list(found.split_with_sizes([tensor.shape[0] for tensor in denominators]))


def _together(vectors: list[Tensor]) -> Tensor:
    """Vectors as one vector: a view if they share one storage, else a copy."""
    known = flat_view(vectors)
    return torch.cat(vectors) if known is None else known


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator / denominator).nan_to_num_(nan=0.0, posinf=0.0)
