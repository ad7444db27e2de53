"""The length of a step: eq. 16 (``KLClip``), unit norm (``Unit``), or the base optimizer's own length (``Graft``).

A scaling sees all preconditioned layers of a step at once, those of one shape stacked, and returns one multiplier per
stack: a scalar, or ``[p]`` for the ``p`` Kronecker pairs in the stack. Everything stays on the device; nothing is read
on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .checks import is_number, require_number
from .flat_storage import FlatStorage, apart, as_one, each, is_launch_bound, times
from .schedules import Schedule, value_at

__all__ = [
    "Direction",
    "Graft",
    "KLClip",
    "Scaling",
    "Unit",
    "inners",
    "norms",
    "rates_followed",
    "ratios",
    "scaled",
    "shortened",
    "squares",
    "steepest_of",
    "update_norms",
]

_FEW_PARTS = 64  # up to so many parts of a stack are looked at one by one where launches count


@dataclass(frozen=True)
class Direction:
    """What a scaling knows of a stack of layers of one shape.

    Attributes:
        direction: The preconditioned matrices, ``[p, d_out, d_in]`` (bias as the last column).
        gradient: The matrices that were preconditioned (gradients or first moments), of the same shape.
        update: What the base optimizer itself would do with them, per unit of the learning rate, of the same shape.
        lr: The learning rate: a number, or a tensor that broadcasts to that shape where weights and biases have
            different ones.
        layer_of_pair: For norm layers, whose pairs (channels) are scaled together: the number of the layer that each
            pair belongs to, ``[p]``. None where every pair is scaled on its own.
        pairs_per_layer: Likewise how many pairs each layer has, one after the other; empty where every pair is scaled
            on its own.
        steepest: ``(L + gamma) / s``, ``[p]``, with the largest eigenvalue L of ``A (x) G`` and s, what the direction
            has been multiplied by since eqs. 11-13; the direction times it is ``(L + gamma) P m``. None where damping
            is not relative to L.
        bare: ``gamma P m``, the direction before it was multiplied by anything. None where ``steepest`` tells.
        contrast: ``(L + gamma) / gamma``, with the largest eigenvalue L: how much more the steepest components are
            damped than the flattest. None where damping is not relative to L.
        storage: Where the matrices of all stacks lie in one storage; None: each in its own.
        update_norms: The result of :func:`update_norms`, kept for later calls in this step.
        rates: Likewise that of ``rates_followed``.
    """

    direction: Tensor
    gradient: Tensor
    update: Tensor
    lr: Tensor | float
    layer_of_pair: Tensor | None = None
    pairs_per_layer: Sequence[int] = ()
    steepest: Tensor | None = None
    bare: Tensor | None = None
    contrast: float | None = None
    storage: FlatStorage | None = None
    update_norms: list[Tensor] = field(default_factory=list, repr=False)
    rates: list[Tensor] = field(default_factory=list, repr=False)

    def inner(self, one: Tensor, other: Tensor) -> Tensor:
        """For each pair the inner product of two matrices over all pairs scaled with it, ``[p]``."""
        products = (one * other).sum((1, 2))
        return products if self.layer_of_pair is None else self.over_layers(products)

    def norm(self, matrix: Tensor) -> Tensor:
        """For each pair the Frobenius norm of ``matrix [p, d_out, d_in]`` over all pairs scaled with it, ``[p]``."""
        norms = torch.linalg.matrix_norm(matrix)
        return norms if self.layer_of_pair is None else self.over_layers(norms.square()).sqrt()

    def parts(self, matrix: Tensor) -> Sequence[Tensor]:
        """The parts of ``matrix [p, d_out, d_in]`` that are scaled each on its own: pairs, or the layers' pairs."""
        return matrix.unbind() if self.layer_of_pair is None else matrix.split(list(self.pairs_per_layer))

    @property
    def few_parts(self) -> bool:
        """Whether there are so few of them that one after the other can be looked at."""
        known = self.layer_of_pair is None or bool(self.pairs_per_layer)
        return known and len(self.pairs_per_layer or self.direction) <= _FEW_PARTS

    @property
    def pairs(self) -> Tensor | int:
        """For each pair the number of pairs scaled together, ``[p]``; 1 where every pair is scaled on its own."""
        return 1 if self.layer_of_pair is None else self.over_layers(torch.ones_like(self.direction[:, 0, 0]))

    def over_layers(self, values: Tensor) -> Tensor:
        """Replaces each pair's value by the sum over its layer's pairs; ``[p]`` to ``[p]``."""
        assert self.layer_of_pair is not None
        return torch.zeros_like(values).index_add(0, self.layer_of_pair, values)[self.layer_of_pair]


class Scaling(Protocol):
    """Anything with this method can be passed as ``scaling=``.

    A scaling may also have these attributes; where they are missing they count as False, ``trust`` as 1:

    - ``by_layer``: each multiplier depends on its own layer alone. Layers then need not be on every rank: under FSDP2
      gradients go only to the ranks that precondition them, and shards of tensor parallelism are allowed.
    - ``of_any_length``: the scaled direction does not depend on how long the given one is.
    - ``needs_lr``: it reads ``Direction.lr``, so that ``precondition_()`` has to be given the learning rate.
    - ``trust``: how far steps turn, in [0, 1], or None to learn it; see :class:`Graft`.
    - ``stretch``: whether steps are stretched while trust is learned.
    """

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """What to multiply the directions by.

        Args:
            directions: The stacks of this step.
            step: The number of steps taken so far.

        Returns:
            One multiplier per stack, 0-dim or ``[p]``; finite for zero gradients and zero learning rates.
        """
        ...


@dataclass(frozen=True)
class Traits:
    """The attributes that a :class:`Scaling` may have, with what they count as where they are missing."""

    by_layer: bool = False
    of_any_length: bool = False
    needs_lr: bool = False
    trust: float | None = 1.0
    stretch: bool = False


def traits_of(scaling: Scaling | None) -> Traits:
    """The traits of a scaling; None leaves directions as they are, each layer on its own."""
    if scaling is None:
        return Traits(by_layer=True)
    given: dict[str, Any] = {each.name: getattr(scaling, each.name, each.default) for each in fields(Traits)}
    return Traits(**given)


@dataclass(frozen=True)
class KLClip:
    """Bounds the KL divergence of a step (eq. 16): one multiplier nu for all layers, at most 1.

    With the learning rate, direction and gradient of each layer::

        nu = min(1, sqrt(kappa / sum_layers lr^2 |<direction, gradient>|))

    Args:
        kappa: Bound on the second-order estimate of the KL divergence, > 0; a number or a function of the step. Default
            1e-3, as in the paper.

    Raises:
        TypeError: If ``kappa`` is neither a number nor callable.
        ValueError: If it is not positive and finite; if a function returns such a value, in that step.
    """

    kappa: Schedule[float] = 1e-3
    needs_lr: ClassVar[bool] = True  # of the step, which precondition_() has to be given

    def __post_init__(self) -> None:
        if not callable(self.kappa):
            _check_kappa(self.kappa)

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        kappa = _check_kappa(value_at(self.kappa, step), step if callable(self.kappa) else None)
        if not directions:
            return []
        products = [(d.direction * d.gradient * (d.lr * d.lr)).sum().abs() for d in directions]
        total = torch.stack([product.to(products[0]) for product in products]).sum()
        nu = torch.where(total > 0, kappa / total, 1.0).sqrt().clamp(max=1.0)
        return [nu.to(d.direction) for d in directions]


def _check_kappa(kappa: Any, step: int | None = None) -> float:
    """Returns a valid kappa; ``step``: the one at which a function returned it."""
    what = f"KLClip(kappa={kappa!r})" if step is None else f"KLClip(kappa=...) at step {step}: {kappa!r}"
    if not is_number(kappa):
        raise TypeError(f"{what}: must be a number > 0, or a function of the step, not {type(kappa).__name__}")
    if not 0 < kappa < math.inf:
        raise ValueError(f"{what}: must be > 0 and finite, or a function of the step")
    return kappa


def norms(directions: Sequence[Direction], matrices: Sequence[Tensor]) -> list[Tensor]:
    """For each direction the ``norm`` of a matrix, ``[p]``; where launches count by few operations."""
    devices = {matrix.device for matrix in matrices}
    if len(devices) != 1 or not is_launch_bound(devices.pop()):
        return [d.norm(matrix) for d, matrix in zip(directions, matrices, strict=True)]
    return _few_norms(directions, matrices)


def _few_norms(directions: Sequence[Direction], matrices: Sequence[Tensor]) -> list[Tensor]:
    """:func:`norms` by one operation on a list of all that has a norm, but for stacks of many pairs."""
    stacks = list(zip(directions, _by_rows(directions, matrices), strict=True))
    parts = [d.parts(matrix) if d.few_parts else () for d, matrix in stacks]
    listed = [part for of_stack in parts for part in of_stack]
    of_parts = torch.stack(torch._foreach_norm(listed)) if listed else matrices[0].new_empty(0)
    found: list[Tensor] = []
    for (d, matrix), own in zip(stacks, of_parts.split([len(of_stack) for of_stack in parts]), strict=True):
        if not d.few_parts:
            found.append(d.norm(matrix))
        else:
            found.append(own if d.layer_of_pair is None else own[d.layer_of_pair])
    return found


def _by_rows(directions: Sequence[Direction], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Matrices of the same norms, with one number for each row where they lie side by side."""
    storage = directions[0].storage
    if storage is None or not storage.rows or not storage.fits(matrices):
        return list(matrices)
    whole = as_one(matrices[: storage.shared])
    if whole is None:
        return list(matrices)
    of_rows = torch.linalg.vector_norm(whole.view(-1, storage.row), dim=1)
    shapes = [(p, d_out * d_in // storage.row, 1) for p, d_out, d_in in storage.shapes[: storage.shared]]
    return [*apart(of_rows, shapes), *matrices[storage.shared :]]


def inners(directions: Sequence[Direction], matrices: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """For each direction the ``inner`` product of two matrices, ``[p]``; where launches count by few operations."""
    storage = directions[0].storage if directions else None
    if storage is None or not storage.rows or not (storage.fits(matrices) and storage.fits(others)):
        return [d.inner(*both) for d, *both in zip(directions, matrices, others, strict=True)]
    products = each("mul", matrices, others)
    whole = as_one(products)
    assert whole is not None
    of_rows = whole[: storage.rows * storage.row].view(-1, storage.row).sum(1)
    found: list[Tensor] = []
    for d, product in zip(directions, products, strict=True):
        if len(found) < storage.shared:
            rows = product.numel() // storage.row
            of_pairs, of_rows = of_rows[:rows].view(len(product), -1).sum(1), of_rows[rows:]
        else:
            of_pairs = product.sum((1, 2))
        found.append(of_pairs if d.layer_of_pair is None else d.over_layers(of_pairs))
    return found


def squares(directions: Sequence[Direction], matrices: Sequence[Tensor]) -> list[Tensor]:
    """For each direction the ``inner`` product of a matrix with itself, ``[p]``."""
    return list(torch._foreach_mul(found := norms(directions, matrices), found)) if directions else []


def scaled(directions: Sequence[Direction], multipliers: Sequence[Tensor]) -> list[Direction]:
    """Directions times multipliers, ``[p]`` or 0-dim."""
    if not directions:
        return []
    matrices = times([d.direction for d in directions], multipliers, directions[0].storage)
    steepest: Sequence[Tensor | None] = [None] * len(directions)
    known = steepest_of(directions)
    if len(known) == len(directions):
        steepest = ratios(known, [by.expand(len(of)) for by, of in zip(multipliers, known, strict=True)])
    parts = zip(directions, matrices, steepest, strict=True)
    return [replace(d, direction=matrix, steepest=of) for d, matrix, of in parts]


def update_norms(directions: Sequence[Direction]) -> list[Tensor]:
    """For each direction the ``norm`` of the base optimizer's update, ``[p]``; computed once in a step."""
    new = [d for d in directions if not d.update_norms]
    for d, found in zip(new, norms(new, [d.update for d in new]), strict=True):
        d.update_norms.append(found)
    return [d.update_norms[0] for d in directions]


def rates_followed(directions: Sequence[Direction]) -> list[Tensor]:
    """The rate at which the base optimizer follows what was preconditioned, ``<u, m> / <m, m>``, or 0, ``[p]``.

    Computed once in a step.
    """
    new = [d for d in directions if not d.rates]
    if new:
        moments = [d.gradient for d in new]
        found = ratios(inners(new, [d.update for d in new], moments), squares(new, moments))
        for d, rate in zip(new, each("clamp_min", found, 0), strict=True):
            d.rates.append(rate)
    return [d.rates[0] for d in directions]


def steepest_of(directions: Sequence[Direction]) -> list[Tensor]:
    """What is known of the steepest curvature, of each that knows it."""
    return [d.steepest for d in directions if d.steepest is not None]


def shortened(directions: Sequence[Direction], graft: float) -> Sequence[Direction]:
    """Directions of the base's length, brought towards ``gamma P m`` at the base's own rate.

    Along the flattest components that is the base's own step, along all others less. Left alone where damping is not
    relative to the largest eigenvalue.

    Args:
        directions: The stacks.
        graft: How much of the base's length they keep, in [0, 1]; 1: all.
    """
    contrast = directions[0].contrast if directions else None
    if graft == 1 or contrast is None:
        return directions
    bare = [d.bare for d in directions if d.bare is not None]
    shares = ratios(norms(directions, bare), update_norms(directions)) if bare else steepest_of(directions)
    shares = shares if bare else each("div", shares, contrast)
    if any(d.update is not d.gradient for d in directions):  # else it follows at a rate of 1
        shares = each("mul", shares, rates_followed(directions))
    return scaled(directions, each("pow", shares, 1 - graft))


def ratios(numerators: Sequence[Tensor], denominators: Sequence[Tensor]) -> list[Tensor]:
    """Each numerator by its denominator, ``[p]``, and 0 where that is 0: a zero direction stays zero."""
    if len({tensor.device for tensor in denominators}) != 1:
        return [_ratio(*of_stack) for of_stack in zip(numerators, denominators, strict=True)]
    found = _ratio(torch.cat(list(numerators)), torch.cat(list(denominators)))
    return list(found.split([len(tensor) for tensor in denominators]))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator / denominator).nan_to_num_(nan=0.0, posinf=0.0)


@dataclass(frozen=True)
class Unit:
    """Gives each pair's direction the Frobenius norm of a semi-orthogonal update.

    That norm is ``sqrt(min(d_out, d_in) max(1, d_out / d_in))``.
    ``lr`` then has the units of Muon's (0.01 to 0.06), and one value suits all layers; a global scale of the loss or of
    G has no effect. All C channels of a norm layer together get the norm ``sqrt(C)``.
    """

    by_layer: ClassVar[bool] = True
    of_any_length: ClassVar[bool] = True

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        return ratios([self.target(d) for d in directions], norms(directions, [d.direction for d in directions]))

    @staticmethod
    def target(d: Direction) -> Tensor:
        """The norm that a direction is brought to, ``[p]``."""
        p, d_out, d_in = d.direction.shape
        pairs = d.pairs
        if isinstance(pairs, int):
            return d.direction.new_full((p,), (min(d_out, d_in) * max(1.0, d_out / d_in)) ** 0.5)
        return pairs.sqrt()


@dataclass(frozen=True)
class Graft:
    """Gives each pair's direction the norm of the base optimizer's own update ("grafting", Agarwal et al. 2020).

    Where gradients are preconditioned, before the base optimizer's step, that is the norm of the gradient, and the step
    goes all the way to K-FAC's direction.

    Args:
        trust: How far the step turns from the base's own update to K-FAC's direction, in [0, 1]; 1: all the way. None
            (default): learned while training, from 0 on (:mod:`kfac_optim.trust`).
        stretch: Whether steps are also stretched along flat directions, where trust is learned and damping is relative
            to the largest eigenvalue; steps are then longer than the base optimizer's own. Default True.

    Raises:
        ValueError: If trust is out of range.
        TypeError: If trust is neither a number nor None, or stretch is no bool.
    """

    trust: float | None = None
    stretch: bool = True
    by_layer: ClassVar[bool] = True
    of_any_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.trust is not None:
            require_number("trust", self.trust, "in [0, 1], or None to learn it", lambda x: 0 <= x <= 1, owner="Graft")
        if not isinstance(self.stretch, bool):
            raise TypeError(f"Graft(stretch={self.stretch!r}): must be True or False")

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        return ratios(update_norms(directions), norms(directions, [d.direction for d in directions]))
