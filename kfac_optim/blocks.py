"""One layer's block of the Fisher matrix, ``A (x) G``: its factors, their snapshots, decompositions and workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from .counters import Counter
from .damping import Damping, kind_of, unit_of
from .distributed import LayerAssignment
from .factors import FactorSpec, copy_average_, numbers_of, read
from .layers import KroneckerLayer
from .precision import full_precision
from .solvers import Decomposition, Solver
from .spectra import eigenvalues, largest_eigenvalue

__all__ = [
    "LEARNED",
    "SIDES",
    "UNSEEN_STEPS",
    "Block",
    "KnownSpectra",
    "Factors",
    "Source",
    "decomposed_bytes",
    "part_dtype",
]

SIDES = ("A", "G")
Source = Literal["current", "pending", "in_use"]
CONSTRAINED = 2  # comparisons in a row that have found a layer changed, from which on it counts as constrained
# What is learned of a layer; saved beside its running averages.
LEARNED: Mapping[str, Counter] = {
    "reach": Counter("reach", 0.01),
    "trains": Counter("trains", False, 1),
    "changes": Counter("changes", 0, CONSTRAINED),
}
# Statistics steps in a row with gradients after which a layer that was never seen is called so; a model of which
# nothing was seen stops training.
UNSEEN_STEPS = 3


@dataclass(frozen=True)
class KnownSpectra:
    """How large the eigenvalues of A and of G are, ``[p]`` each, where it is known without looking at the factors."""

    means: tuple[Tensor, Tensor] | None = None
    largest: tuple[Tensor, Tensor] | None = None


class Factors:
    """A and G of one layer at one point in time, over the tensors that the optimizer's state holds.

    Args:
        layer: The layer.
        tensors: The running averages "A" and "G" (see :meth:`~kfac_optim.factors.FactorSpec.empty`) and, of a snapshot
            that decompositions are made of, "gamma": the damping of each pair with which they were, ``[p]``; 0 where
            damping comes later. Of a factor that another rank keeps only its weight.
        known: What is known of the eigenvalues; all of it where another rank keeps a factor.
    """

    def __init__(self, layer: KroneckerLayer, tensors: dict[str, Any], known: KnownSpectra | None) -> None:
        self.pairs_share_scale, self.specs, self.tensors = layer.pairs_share_scale, layer.specs, tensors
        self._known_spectra = known or KnownSpectra()

    @property
    def has_data(self) -> bool:
        """Whether both running averages have seen something."""
        return all(float(self.tensors[side]["weight"]) for side in SIDES)

    @property
    def gamma(self) -> Tensor:
        """The damping of each pair, ``[p]``, of a snapshot."""
        gamma: Tensor = self.tensors["gamma"]
        return gamma

    def kept(self, side: int) -> bool:
        """Whether A (side 0) or G (side 1) is here; else another rank keeps it."""
        return "value" in self.tensors[SIDES[side]]

    def packed(self, side: int) -> Tensor:
        """A (side 0) or G (side 1), packed, in at least float32."""
        return read(self.tensors[SIDES[side]])

    def matrix(self, side: int) -> Tensor:
        """A (side 0) or G (side 1), ``[p b, m, m]`` (diagonal: ``[p, n]``)."""
        return self.specs[side].matrix(self.tensors[SIDES[side]])

    def means(self) -> tuple[Tensor, Tensor]:
        """The mean eigenvalues of A and of G, ``[p]`` each; those of joint pairs are averaged."""
        a, g = self._known_spectra.means or (self.mean(0), self.mean(1))
        return (a.mean().expand_as(a), g.mean().expand_as(g)) if self.pairs_share_scale else (a, g)

    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues of A and of G, ``[p]`` each; joint pairs share the largest of all of them."""
        a, g = self._known_spectra.largest or (self.largest_of(0), self.largest_of(1))
        return (a.amax().expand_as(a), g.amax().expand_as(g)) if self.pairs_share_scale else (a, g)

    def mean(self, side: int) -> Tensor:
        """The mean eigenvalue of each pair of a factor that is here, ``[p]``."""
        return self.specs[side].mean_eigenvalue(self.tensors[SIDES[side]])

    def largest_of(self, side: int) -> Tensor:
        """The largest eigenvalue of each pair of a factor that is here, ``[p]``."""
        matrix = self.matrix(side)
        with full_precision(matrix.device.type):
            return self.specs[side].largest_of_blocks(largest_eigenvalue(matrix))

    def ones(self) -> Tensor:
        """1 for each pair, ``[p]``."""
        if self._known_spectra.means is not None:
            return torch.ones_like(self._known_spectra.means[0])
        value: Tensor = self.tensors["A"]["value"]
        return value.new_ones(self.specs[0].pairs, dtype=torch.promote_types(value.dtype, torch.float32))

    def freeze(self, source: Factors, gamma: Tensor | None) -> None:
        """Becomes a copy of ``source``, to be decomposed with the damping ``gamma``, ``[p]``; None: without."""
        for side in SIDES:
            copy_average_(self.tensors[side], source.tensors[side])
        if gamma is not None:
            self.gamma.copy_(gamma)


@dataclass(eq=False, repr=False)
class Block:
    """One layer's block, and who works on it.

    Attributes:
        layer: The layer.
        workers: The ranks that decompose its factors, and those that precondition its gradient.
        route: How its preconditioned gradient comes to this rank, or leaves it: the source and the members of the
            broadcast; None if it does not travel.
        state: What the optimizer's state holds of the layer: the tensors of its :class:`Factors` "current" (the
            running averages; beside them its ``LEARNED`` numbers), "in_use" (what the decompositions in use were made
            of) and, where refreshes may be spread over steps, "pending" (what a refresh in progress decomposes). Empty
            before the first step, and as long as the weight is frozen from then on.
        kept_by: The workers under whom the factors of the state were shared out; None before there are any.
        decomposed: The decompositions of A and G in use; None on ranks that do not precondition the layer, and before
            the first refresh.
        has_direction: Whether some rank has decompositions: the layer is preconditioned.
        version: Counts the changes of its decompositions, for whoever keeps something made of them.
        cosine: The cosine between gradient and direction in the first step that used the decompositions, 0-dim.
        rows: The rows that all ranks saw in the last step with statistics; 0 where that was before a checkpoint.
        unseen: The statistics steps in a row in which the weight had a gradient, but this rank has not seen the layer.
    """

    layer: KroneckerLayer
    workers: LayerAssignment = field(init=False)
    route: tuple[int, tuple[int, ...]] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    kept_by: LayerAssignment | None = None
    decomposed: tuple[Decomposition, Decomposition] | None = None
    has_direction: bool = False
    version: int = 0
    cosine: Tensor | None = None
    rows: float = 0.0
    unseen: int = 0
    _unit: tuple[Any, Tensor] | None = None
    _known_spectra: KnownSpectra | None = None
    _eigenvalues: tuple[Tensor | None, ...] | None = None

    # Factors --------------------------------------------------------------------------------------------------------

    @property
    def specs(self) -> tuple[FactorSpec, FactorSpec]:
        """The shapes of A and G."""
        return self.layer.specs

    @property
    def needs_room(self) -> bool:
        """Whether its factors have or need room; those of a weight that is frozen from the first step on do not."""
        return bool(self.state) or self.layer.weight.requires_grad

    def make_room(self, dtype: torch.dtype, rank: int, *, spreads: bool) -> None:
        """Makes room where there is none: for factors in ``dtype`` that ``rank``, this process, is to keep.

        ``spreads``: also for those of a spread refresh.
        """
        self.kept_by = self.workers
        if len(self.state) >= 2 + spreads:  # as in all steps but the first
            return
        device = self.layer.weight.device
        sources: tuple[Source, ...] = ("current", "in_use", "pending") if spreads else ("current", "in_use")
        for source in sources:
            if source not in self.state:
                tensors: dict[str, Any] = {
                    name: spec.empty(dtype, device, kept=self.workers.keeps(side, rank))
                    for side, (name, spec) in enumerate(zip(SIDES, self.specs, strict=True))
                }
                if source == "current":
                    tensors.update({name: learned.start for name, learned in LEARNED.items()})
                else:
                    precision = torch.promote_types(dtype, torch.float32)
                    tensors["gamma"] = torch.zeros(self.specs[0].pairs, dtype=precision, device=device)
                self.state[source] = tensors

    def factors(self, source: Source, known: KnownSpectra | None = None) -> Factors:
        """The factors at one of the three stages; ``known``: eigenvalues, in place of those that the block keeps."""
        known = known or (self._known_spectra if source == "in_use" else None)
        return Factors(self.layer, self.state[source], known)

    def has_data(self, source: Source = "current") -> bool:
        """Whether both factors at one of the stages have seen something."""
        return bool(self.state) and self.factors(source).has_data

    @property
    def reach(self) -> float:
        """The share of the stretch along flat directions that its steps get, learned (:mod:`~.reach`)."""
        learned = self.state.get("current")  # asked for in every step
        if learned is None:
            return LEARNED["reach"].start
        reach = float(learned["reach"])
        return min(reach, LEARNED["reach"].start) if learned["changes"] == CONSTRAINED else reach

    def set_reach(self, value: float) -> None:
        """Sets the reach to what has been learned."""
        self.state["current"]["reach"] = value

    @property
    def trains(self) -> bool:
        """Whether the weight required gradients when this was noted last."""
        return bool(self.state) and bool(self.state["current"]["trains"])

    def note_trains(self) -> None:
        """Notes whether the weight requires gradients now."""
        if self.state:
            self.state["current"]["trains"] = self.layer.weight.requires_grad

    @property
    def changes(self) -> int:
        """Comparisons in a row that found its weights changed between steps (:mod:`~.constraints`)."""
        return int(self.state["current"]["changes"]) if self.state else 0

    def note_comparison(self, *, changed: bool) -> None:
        """Counts one more comparison; the count stays once the layer counts as constrained."""
        if not self.is_constrained:
            self.state["current"]["changes"] = self.changes + 1 if changed else 0

    @property
    def is_constrained(self) -> bool:
        """Whether the training loop keeps changing its weights between steps."""
        return self.changes == CONSTRAINED

    def adopt(self, state: dict[str, Any]) -> None:
        """Replaces the state."""
        self.state = state

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether factors are of this layer's shapes: not those from before it was narrowed, or had a bias."""
        sides = list(zip(SIDES, self.specs, strict=True))
        return not any(spec.problem(tensors.get(s), kept=False) for tensors in state.values() for s, spec in sides)

    def take_layer(self, layer: KroneckerLayer) -> bool:
        """Becomes the block of a layer that was found anew, if its factors fit; returns whether they do."""
        same = type(layer) is type(self.layer) and set(layer.parameters) == set(self.layer.parameters)
        if not same or layer.specs != self.specs:
            return False
        own = self.layer
        if (layer.name, layer.modules) != (own.name, own.modules) or layer.host is not own.host:
            self.layer = layer
        return True

    @property
    def has_all_factors(self) -> bool:
        """Whether no factor is on another rank."""
        return all("value" in tensors[side] for tensors in self.state.values() for side in SIDES)

    def take_factors(self, whole: dict[str, Any], rank: int) -> None:
        """Takes what ``rank``, this process, is now to keep of all factors, in place."""
        for source, tensors in self.state.items():
            for side, name in enumerate(SIDES):
                kept, average = self.workers.keeps(side, rank), whole[source][name]
                tensors[name] = average if kept else numbers_of(average)
        self.kept_by = self.workers

    def note_rows(self, rows: float) -> None:
        """Notes how many rows of the layer's input all ranks together saw in a statistics step."""
        self.rows = rows

    def note_statistics(self, *, seen: bool) -> None:
        """Notes whether this rank saw the layer in a statistics step."""
        gradient = self.layer.weight.grad
        if seen:
            self.unseen = 0
        elif gradient is not None:
            self.unseen += 1
            if self.unseen == UNSEEN_STEPS and not bool(gradient.count_nonzero()):  # zero_grad(set_to_none=False)
                self.unseen = 0

    @property
    def never_seen(self) -> bool:
        """Whether the weight trains, but no rank has ever seen the layer in a forward and backward pass."""
        return self.unseen >= UNSEEN_STEPS and not (self.has_direction or self.has_data())

    @property
    def out_of_sight(self) -> bool:
        """Whether the weight still trains, but the layer, seen before, was not in the last steps with statistics."""
        return self.unseen >= UNSEEN_STEPS and not self.never_seen

    # Decompositions -------------------------------------------------------------------------------------------------

    def install(
        self, decomposed: tuple[Decomposition, Decomposition] | None, known: KnownSpectra | None = None
    ) -> None:
        """Takes decompositions of the factors in use; None where other ranks precondition the layer.

        ``known``: what is known of the factors' eigenvalues.
        """
        self.drop()
        self.decomposed, self.has_direction, self._known_spectra = decomposed, True, known

    def share_storage(self, decomposed: tuple[Decomposition, Decomposition]) -> None:
        """Replaces the decompositions by equal ones that are views of a larger tensor."""
        self.decomposed = decomposed

    def drop(self) -> None:
        """Discards the decompositions."""
        self.decomposed = self.cosine = self._unit = self._known_spectra = self._eigenvalues = None
        self.has_direction = False
        self.version += 1

    def note_cosine(self, cosine: Tensor) -> None:
        """Keeps the cosine between gradient and direction of the first step that uses the decompositions."""
        if self.cosine is None:
            self.cosine = cosine

    def damping_unit(self, damping: Damping) -> Tensor:
        """The unit of gamma for the decompositions in use, ``[p]``."""
        kind = kind_of(damping)
        if self._unit is None or self._unit[0] != kind:
            self._unit = kind, unit_of(damping, self.factors("in_use"), self.specs[0].pairs)
        return self._unit[1]

    def eigenvalues(self) -> tuple[Tensor | None, ...]:
        """All eigenvalues of A and of G in use, largest first, ``[p n]`` each, on the CPU; None on other ranks."""
        if self._eigenvalues is None:
            used = self.factors("in_use")
            found = (eigenvalues(used.matrix(side)) if used.kept(side) else None for side in range(2))
            # What fills up blocks has eigenvalues of 0, the last ones.
            kept = zip(self.specs, found, strict=True)
            self._eigenvalues = tuple(None if v is None else v[: s.pairs * s.dim] for s, v in kept)
        return self._eigenvalues

    # Workers --------------------------------------------------------------------------------------------------------

    def set_workers(self, workers: LayerAssignment, route: tuple[int, tuple[int, ...]] | None) -> None:
        """Sets the ranks that work on this block."""
        self.workers, self.route = workers, route


def part_dtype(dims: int, inv_dtype: torch.dtype) -> torch.dtype:
    """How a part of a decomposition is stored: vectors and scalars carry the magnitude."""
    return inv_dtype if dims == 2 else torch.promote_types(inv_dtype, torch.float32)


def decomposed_bytes(specs: Iterable[FactorSpec], solver: Solver, inv_dtype: torch.dtype) -> int:
    """The bytes that the decompositions of these factors take."""
    return sum(
        spec.matrices * math.prod(shape) * part_dtype(len(shape), inv_dtype).itemsize
        for spec in specs
        for shape in solver.shapes(spec.size, spec.diagonal)
    )
