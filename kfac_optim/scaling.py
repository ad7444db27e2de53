"""The length of a step: eq. 16 (``KLClip``), unit norm (``Unit``), or the base optimizer's own length (``Graft``).

``Orthogonal`` also brings the singular values of directions together, before it gives them unit norm.

A scaling sees all preconditioned layers of a step at once, those of one shape stacked, and returns one multiplier per
stack: a scalar, or ``[p]`` for the ``p`` Kronecker pairs in the stack. Everything stays on the device; nothing is read
on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .common.checks import is_positive, require_number, require_schedule
from .schedules import Schedule, positive_at
from .stacks import Direction, Stacked, ratio


class Scaling(Protocol):
    """Anything with this method can be passed as ``scaling=``.

    A scaling may also have these attributes. Where ``trust`` is missing it counts as 1, any other as False:

    - ``by_layer``: each multiplier depends on its own layer alone. Not every rank then needs all layers: under FSDP2
      gradients go only to the ranks that precondition them, and shards of tensor parallelism are allowed.
    - ``of_any_length``: the scaled direction does not depend on the length of the given one.
    - ``needs_lr``: it reads ``Direction.lr``, so that ``precondition_()`` has to be given the learning rate.
    - ``trust``: how far steps turn, in [0, 1], or None to learn it; see :class:`Graft`.
    - ``stretch``: whether steps are stretched while trust is learned: True, False or None; see :class:`Graft`.

    It may also have a method ``turned(directions)``, which returns the stacks with other directions before
    ``multipliers`` sees them. Each pair's must be made from that pair's alone. See :class:`Orthogonal`.
    """

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """The multipliers of the directions of a step.

        Args:
            directions: The stacks of this step.
            step: The number of steps taken so far.

        Returns:
            One multiplier per stack, 0-dim or ``[p]``; finite for zero gradients and zero learning rates.
        """
        ...


@dataclass(frozen=True)
class Traits:
    """The attributes that a :class:`Scaling` may have, and what missing ones count as."""

    by_layer: bool = False
    of_any_length: bool = False
    needs_lr: bool = False
    trust: float | None = 1.0
    stretch: bool | None = False


_DEFAULTS = vars(Traits())


def traits_of(scaling: Scaling | None) -> Traits:
    """The traits of a scaling; those of None, which leaves directions as they are, include ``by_layer``."""
    if scaling is None:
        return Traits(by_layer=True)
    traits = Traits(**{name: getattr(scaling, name, default) for name, default in _DEFAULTS.items()})
    # How flat the components of a direction are is not known any more once it has been changed.
    return replace(traits, stretch=False) if hasattr(scaling, "turned") else traits


def scaled_by(scaling: Scaling | None, stacked: Stacked, step: int) -> Stacked:
    """The directions as a scaling makes them."""
    if scaling is None or not stacked:
        return stacked
    turned = getattr(scaling, "turned", None)
    if turned is not None:
        matrices = [d.direction for d in turned(stacked)]
        turned_to = stacked.directions.empty()
        torch._foreach_copy_(turned_to.tensors, matrices)
        stacked = stacked.replaced(turned_to, None)
    multipliers: object = scaling.multipliers(stacked, step)
    return stacked.times(_checked(scaling, multipliers, stacked.directions.tensors))


def _checked(scaling: Scaling, multipliers: object, matrices: Sequence[Tensor]) -> Tensor:
    """What a scaling has returned, for each pair; raises ValueError unless it is one multiplier per stack."""
    given = multipliers if isinstance(multipliers, list | tuple) else [multipliers]
    tensors, pairs = [m for m in given if isinstance(m, Tensor)], [(len(matrix),) for matrix in matrices]
    if len(given) == len(tensors) == len(pairs):
        if all(m.shape in ((), of) for m, of in zip(tensors, pairs, strict=True)):
            return torch.cat([m.to(matrices[0]).expand(of) for m, of in zip(tensors, pairs, strict=True)])
    shown = [f"tensor of shape {tuple(m.shape)}" if isinstance(m, Tensor) else m for m in given]
    raise ValueError(
        f"scaling={scaling!r}: multipliers() has returned {shown}: must be one tensor for each stack of layers, either "
        f"0-dim or of these shapes: {pairs}"
    )


@dataclass(frozen=True)
class KLClip:
    """Bounds the KL divergence of a step (eq. 16): one multiplier nu for all layers, at most 1.

    With the learning rate, direction and moment (eq. 16: the gradient) of each layer::

        nu = min(1, sqrt(kappa / sum_layers lr^2 |<direction, moment>|))

    Args:
        kappa: Bound on the second-order estimate of the KL divergence, > 0; a number or a function of the step. Default
            1e-3, as in the paper.

    Raises:
        TypeError: If ``kappa`` is neither a number nor callable.
        ValueError: If it is not positive and finite. What a function returns is checked in every step.
    """

    kappa: Schedule[float] = 1e-3
    needs_lr: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_schedule("kappa", self.kappa, "> 0 and finite", is_positive, owner="KLClip")

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        kappa = positive_at("kappa", self.kappa, step, owner="KLClip")
        # The absolute value may be taken of a stack's sum: <P m, m> >= 0 for each of its layers, up to rounding.
        products = [(d.direction * d.moment * (d.lr * d.lr)).sum().abs() for d in directions]
        total = torch.stack([product.to(products[0]) for product in products]).sum()
        nu = torch.where(total > 0, kappa / total, 1.0).sqrt().clamp(max=1.0)
        return [nu.to(d.direction) for d in directions]


@dataclass(frozen=True)
class Unit:
    """Gives each pair's direction the Frobenius norm of a semi-orthogonal update.

    That norm is ``sqrt(min(d_out, d_in) max(1, d_out / d_in))``. ``lr`` then has the same units as Muon's (0.01 to
    0.06), and one value suits all layers; a global scale of the loss or of G has no effect. The C channels of a norm
    layer get the norm ``sqrt(C)`` together.
    """

    by_layer: ClassVar[bool] = True
    of_any_length: ClassVar[bool] = True

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        matrices, targets = Stacked.of(directions).directions, torch.cat([self.target(d) for d in directions])
        return matrices.split(ratio(targets, matrices.norms()))

    @staticmethod
    def target(d: Direction) -> Tensor:
        """The norm that a direction is brought to, ``[p]``."""
        p, d_out, d_in = d.direction.shape
        if d.groups is None:
            return d.direction.new_full((p,), (min(d_out, d_in) * max(1.0, d_out / d_in)) ** 0.5)
        return d.groups.over_groups(d.direction.new_ones(p)).sqrt()


# Of the iteration s -> a s + b s^3 + c s^5 on singular values, which takes those of 0.03 to above 0.7 in three steps
# (Jordan et al. 2024, as in torch.optim.Muon).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 3  # on the squares of singular values; rounding grows by a^2 in each (to 0.3 % with TF32)


@dataclass(frozen=True)
class Orthogonal(Unit):
    """Brings the singular values of each pair's direction together; the norm is that of :class:`Unit`.

    This is what Muon does with the momentum (Jordan et al. 2024), done with K-FAC's direction. Norm layers are left as
    they are, and each shard of tensor parallelism is treated by itself. Three Newton-Schulz iterations take two
    products with the whole direction, and nine of square matrices with the rows of its smaller side.
    """

    def turned(self, directions: Sequence[Direction]) -> list[Direction]:
        """The stacks with directions whose singular values are closer together."""
        return [replace(d, direction=self._turned(d)) if d.groups is None else d for d in directions]

    def _turned(self, d: Direction) -> Tensor:
        matrix = d.direction
        wide = matrix.shape[1] <= matrix.shape[2]
        # Not a division by the norm: a direction may be zero.
        x = matrix * ratio(matrix.new_ones(len(matrix)), d.norm(matrix)).view(-1, 1, 1)
        by = _newton_schulz(x @ x.mT if wide else x.mT @ x)
        return by @ x if wide else x @ by


def _newton_schulz(gram: Tensor) -> Tensor:
    """What s is multiplied by in all iterations, as a function of ``s^2``, of the matrices ``gram [p, n, n]``."""
    by = product = _polynomial(gram)
    for _ in range(_ITERATIONS - 1):
        gram = by @ gram @ by
        by = _polynomial(gram)
        product = by @ product
    return product


def _polynomial(gram: Tensor) -> Tensor:
    a, b, c = _NEWTON_SCHULZ
    by = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    by.diagonal(dim1=1, dim2=2).add_(a)
    return by


@dataclass(frozen=True)
class Graft:
    """Gives each pair's direction the norm of the base optimizer's own update ("grafting", Agarwal et al. 2020).

    Where gradients are preconditioned before the base optimizer's step (``precondition="gradient"``), it is the norm of
    the gradient instead, and the step turns all the way to K-FAC's direction.

    Args:
        trust: How far the step turns from the base's own update to K-FAC's direction, in [0, 1]; 1: all the way. None
            (default): it starts at 0 and is learned while training (:mod:`~.trust`).
        stretch: Whether steps are also stretched along flat directions, where trust is learned and damping is relative
            to the largest eigenvalue; they are then longer than the base optimizer's own. None (default): unless two
            networks seem to train against each other (:mod:`~.opponents`), whose steps do not turn either. True: even
            then, for actor and critic.

    Raises:
        ValueError: If trust is out of range.
        TypeError: If trust is neither a number nor None, or stretch is neither a bool nor None.
    """

    trust: float | None = None
    stretch: bool | None = None
    by_layer: ClassVar[bool] = True
    of_any_length: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.trust is not None:
            require_number("trust", self.trust, "in [0, 1], or None to learn it", lambda x: 0 <= x <= 1, owner="Graft")
        if self.stretch is not None and not isinstance(self.stretch, bool):
            raise TypeError(f"Graft(stretch={self.stretch!r}): must be True, False or None")

    def multipliers(self, directions: Sequence[Direction], step: int) -> list[Tensor]:
        """See :class:`Scaling`."""
        of = Stacked.of(directions)
        return of.directions.split(ratio(of.update_norms, of.directions.norms()))
