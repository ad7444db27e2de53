"""What the state of a layer's weight holds: its factors at one point in time, and the layer's learned numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict, cast

import torch
from torch import Tensor

from .common.counters import Counter
from .common.precision import full_precision
from .factors import Average, copy_average_, read
from .layers import KroneckerLayer
from .solvers import Shifting
from .spectra import largest_eigenvalue

FactorName = Literal["A", "G"]
AG: tuple[FactorName, FactorName] = ("A", "G")  # by side
Source = Literal["current", "in_use", "pending"]
SOURCES: tuple[Source, Source, Source] = ("current", "in_use", "pending")
CONSTRAINED = 2  # a layer counts as constrained after this many comparisons in a row that found its weights changed
START_REACH = 0.01  # of a layer's reach
# The learned numbers of a layer, which are saved beside its running averages ("current").
LEARNED: Mapping[str, Counter] = {
    "reach": Counter(START_REACH),  # the share of the stretch along flat directions that its steps get (reach.py)
    "fell": Counter(False, 1),  # whether its reach has ever fallen
    "trains": Counter(False, 1),  # whether its weight required gradients when this was noted last
    "changes": Counter(0, CONSTRAINED),  # how many comparisons in a row have found its weights changed (constraints.py)
}


@dataclass(frozen=True)
class KnownSpectra:
    """The mean and largest eigenvalues of A and of G, ``[p]`` each, as far as they are known without the factors."""

    means: tuple[Tensor, Tensor] | None = None
    largest: tuple[Tensor, Tensor] | None = None


class Snapshot(TypedDict, total=False):
    """What the state of a layer's weight holds for one :data:`Source`; "current" also has the ``LEARNED`` numbers.

    Attributes:
        A: The running average A.
        G: The running average G.
        gamma: "in_use" and "pending": the damping of each pair with which the factors are decomposed, ``[p]``; 0 if the
            solver adds it when it applies them.
    """

    A: Average
    G: Average
    gamma: Tensor


State = dict[Source, Snapshot]

# What has been learned of a layer at first.
UNLEARNED = cast(Snapshot, {name: learned.start for name, learned in LEARNED.items()})


class Factors:
    """A and G of one layer at one point in time, over the tensors that the optimizer's state holds.

    Args:
        layer: The layer.
        snapshot: The tensors; gamma is a part of those that decompositions are made of.
        spectra: The known eigenvalues; if another rank keeps a factor, all that are asked for.
    """

    def __init__(self, layer: KroneckerLayer, snapshot: Snapshot, spectra: KnownSpectra | None) -> None:
        self.pairs_share_scale, self.specs, self.snapshot = layer.pairs_share_scale, layer.specs, snapshot
        self._known_spectra = spectra or KnownSpectra()
        self._largest: tuple[Tensor, Tensor] | None = None

    def adopt(self, snapshot: Snapshot) -> None:
        """Goes on with other tensors of the same numbers."""
        self.snapshot, self._largest = snapshot, None

    @property
    def has_data(self) -> bool:
        """Whether both running averages have seen something."""
        return all(float(self.snapshot[name]["weight"]) for name in AG)

    def kept(self, side: int) -> bool:
        """Whether this rank keeps A (side 0) or G (side 1)."""
        return "value" in self.snapshot[AG[side]]

    def packed(self, side: int) -> Tensor:
        """A (side 0) or G (side 1), packed, in at least float32."""
        return read(self.snapshot[AG[side]])

    def matrix(self, side: int) -> Tensor:
        """A (side 0) or G (side 1), ``[p b, m, m]`` (diagonal: ``[p, n]``)."""
        return self.specs[side].matrix(self.snapshot[AG[side]])

    def means(self) -> tuple[Tensor, Tensor]:
        """The mean eigenvalues of A and of G, ``[p]`` each; pairs that share a scale get their common mean."""
        a, g = self._known_spectra.means or (self.mean(0), self.mean(1))
        return (a.mean().expand_as(a), g.mean().expand_as(g)) if self.pairs_share_scale else (a, g)

    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues of A and of G, ``[p]`` each; pairs that share a scale get the largest of all."""
        if self._largest is None:  # found only once
            self._largest = self._known_spectra.largest or (self.largest_of(0), self.largest_of(1))
        a, g = self._largest
        return (a.amax().expand_as(a), g.amax().expand_as(g)) if self.pairs_share_scale else (a, g)

    def mean(self, side: int) -> Tensor:
        """The mean eigenvalue of each pair of A (side 0) or G (side 1), which this rank must keep, ``[p]``."""
        return self.specs[side].mean_eigenvalue(self.snapshot[AG[side]])

    def largest_of(self, side: int) -> Tensor:
        """The largest eigenvalue of each pair of A (side 0) or G (side 1), which this rank must keep, ``[p]``."""
        matrix = self.matrix(side)
        with full_precision(matrix.device.type):
            return self.specs[side].largest_of_blocks(largest_eigenvalue(matrix))

    def shifts(self, solver: Shifting, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """What a solver that damps factors adds to the diagonals of A and of G, ``[p]`` each."""
        if self.pairs_share_scale:  # A is the constant 1, so all damping goes to G
            return torch.zeros_like(gamma), gamma
        return solver.shifts(gamma, *self.means())

    def ones(self) -> Tensor:
        """1 for each pair, ``[p]``."""
        if self._known_spectra.means is not None:
            return torch.ones_like(self._known_spectra.means[0])
        value: Tensor = self.snapshot["A"]["value"]
        return value.new_ones(self.specs[0].pairs, dtype=torch.promote_types(value.dtype, torch.float32))

    def freeze(self, source: Factors, gamma: Tensor | None) -> None:
        """Becomes a copy of ``source``; ``gamma``: the damping to decompose it with, ``[p]``, or None for none."""
        for name in AG:
            copy_average_(self.snapshot[name], source.snapshot[name])
        if gamma is not None:
            self.snapshot["gamma"].copy_(gamma)
