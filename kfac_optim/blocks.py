"""One layer's block of the Fisher matrix, ``A (x) G``: its state, its decompositions and the ranks that work on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .damping import Damping, kind_of, unit_of
from .distributed import LayerAssignment
from .factors import FactorSpec
from .layers import KroneckerLayer
from .snapshots import AG, CONSTRAINED, SOURCES, START_REACH, UNLEARNED, Factors, KnownSpectra, Snapshot, Source, State
from .solvers import Sides
from .spectra import eigenvalues


class InUse(Factors):
    """The factors in use and their decompositions, with all that is found out about them until the next refresh.

    Attributes:
        sides: The decompositions of A and of G; None on ranks that do not precondition the layer.
        cosine: The cosine between moment and direction in the first step that used the decompositions, 0-dim.
    """

    def __init__(
        self, layer: KroneckerLayer, snapshot: Snapshot, spectra: KnownSpectra | None, sides: Sides | None
    ) -> None:
        super().__init__(layer, snapshot, spectra)
        self.sides = sides
        self.cosine: Tensor | None = None
        self._unit: tuple[Any, Tensor] | None = None
        self._eigenvalues: tuple[Tensor | None, ...] | None = None

    def share_storage(self, sides: Sides) -> None:
        """Replaces the decompositions with equal ones that are views of a larger tensor."""
        self.sides = sides

    def note_cosine(self, cosine: Tensor) -> None:
        """Keeps the cosine between moment and direction of the first step."""
        if self.cosine is None:
            self.cosine = cosine

    def damping_unit(self, damping: Damping) -> Tensor:
        """The unit of gamma, ``[p]``."""
        kind = kind_of(damping)
        if self._unit is None or self._unit[0] != kind:
            self._unit = kind, unit_of(damping, self, self.specs[0].pairs)
        return self._unit[1]

    def eigenvalues(self) -> tuple[Tensor | None, ...]:
        """All eigenvalues of A and of G, largest first, ``[p n]`` each, on the CPU; None on other ranks."""
        if self._eigenvalues is None:
            found = (eigenvalues(self.matrix(side)) if self.kept(side) else None for side in range(2))
            # Padding of blocks adds eigenvalues of 0, which come last.
            kept = zip(self.specs, found, strict=True)
            self._eigenvalues = tuple(None if v is None else v[: s.pairs * s.dim] for s, v in kept)
        return self._eigenvalues


@dataclass(eq=False, repr=False)
class Block:
    """One layer's block, and the ranks that work on it.

    Attributes:
        layer: The layer.
        workers: The ranks that decompose its factors, and those that precondition its gradient.
        route: The broadcast by which its preconditioned gradient reaches or leaves this rank, as source and members;
            None if it does not travel.
        state: The layer's part of the optimizer's state, by source: "current" (the running averages, and the
            ``LEARNED`` numbers), "in_use" (what the decompositions in use were made of) and, where refreshes may be
            spread over steps, "pending" (what a refresh in progress decomposes). Empty before the first step, and as
            long as the weight is frozen from then on.
        kept_by: The assignment by which the factors in the state lie on the ranks; None before there are any.
        in_use: The decompositions in use, a new object after each refresh; None as long as no rank has any.
        rows: The number of rows that all ranks saw in the last step with statistics; 0 if none has come since loading.
    """

    layer: KroneckerLayer
    workers: LayerAssignment = field(init=False)
    route: tuple[int, tuple[int, ...]] | None = None
    state: State = field(default_factory=dict)
    kept_by: LayerAssignment | None = None
    in_use: InUse | None = None
    rows: float = 0.0

    # Factors --------------------------------------------------------------------------------------------------------

    @property
    def specs(self) -> tuple[FactorSpec, FactorSpec]:
        """The shapes of A and G."""
        return self.layer.specs

    @property
    def needs_storage(self) -> bool:
        """Whether its factors have or need storage; those of a weight that is frozen from the first step on do not."""
        return bool(self.state) or self.layer.weight.requires_grad

    def allocate(self, dtype: torch.dtype, rank: int, *, spreads: bool) -> None:
        """Allocates what is missing: factors in ``dtype`` that ``rank``, this process, has to keep.

        ``spreads``: whether those of a spread refresh are needed, too.
        """
        if self.kept_by is None or not self.state:  # else its factors are still where other workers have kept them
            self.kept_by = self.workers
        for source in SOURCES[: 2 + spreads]:
            if source in self.state:
                continue
            device, kept = self.layer.weight.device, (self.kept_by.keeps(side, rank) for side in range(2))
            a, g = (spec.empty(dtype, device, kept=here) for spec, here in zip(self.specs, kept, strict=True))
            snapshot: Snapshot = {"A": a, "G": g}
            if source == "current":
                snapshot.update(UNLEARNED)
            else:
                precision = torch.promote_types(dtype, torch.float32)
                snapshot["gamma"] = torch.zeros(self.specs[0].pairs, dtype=precision, device=device)
            self.state[source] = snapshot

    def factors(self, source: Source, spectra: KnownSpectra | None = None) -> Factors:
        """The factors of one source; ``spectra``: see :class:`~kfac_optim.snapshots.Factors`."""
        return Factors(self.layer, self.state[source], spectra)

    def has_data(self, source: Source = "current") -> bool:
        """Whether both factors of a source have seen something."""
        return bool(self.state) and self.factors(source).has_data

    def learned(self, name: str) -> Any:
        """One of the ``LEARNED`` numbers; its start value while there is no state."""
        numbers: Any = self.state.get("current", UNLEARNED)
        return numbers[name]

    def set_learned(self, **numbers: float) -> None:
        """Sets some of them."""
        current: Any = self.state["current"]
        current.update(numbers)

    @property
    def reach(self) -> float:
        """The learned share of the stretch along flat directions that its steps get (:mod:`~.reach`)."""
        numbers: Any = self.state.get("current", UNLEARNED)  # asked for once, as each layer is in each step
        reach = float(numbers["reach"])
        return min(reach, START_REACH) if numbers["changes"] == CONSTRAINED else reach

    @property
    def is_constrained(self) -> bool:
        """Whether the training loop keeps changing its weights between steps (:mod:`~.constraints`)."""
        return bool(self.learned("changes") == CONSTRAINED)

    def note_trains(self) -> None:
        """Notes whether the weight requires gradients now."""
        if self.state:
            self.set_learned(trains=self.layer.weight.requires_grad)

    def adopt(self, state: State) -> None:
        """Replaces the state."""
        self.state = state
        if self.in_use is not None and "in_use" in state:  # else what the decompositions were made of is gone
            self.in_use.adopt(state["in_use"])

    def fits(self, state: State) -> bool:
        """Whether factors have this layer's shapes: not if they are older than a change of its width or bias."""
        named = list(zip(AG, self.specs, strict=True))
        return not any(spec.problem(snapshot.get(x), kept=False) for snapshot in state.values() for x, spec in named)

    def take_layer(self, layer: KroneckerLayer) -> bool:
        """Becomes the block of a layer that a new search has found, if its factors fit; returns whether they do."""
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
        return all("value" in snapshot[name] for snapshot in self.state.values() for name in AG)

    def take_factors(self, whole: State, rank: int) -> None:
        """Keeps, out of the factors in ``whole``, those that ``rank``, this process, now has to keep; in place."""
        for source, snapshot in self.state.items():
            for side, name in enumerate(AG):
                kept, average = self.workers.keeps(side, rank), whole[source][name]
                snapshot[name] = average if kept else {"weight": average["weight"], "trace": average["trace"]}
        self.kept_by = self.workers

    def note_rows(self, rows: float) -> None:
        """Notes how many rows of the layer's input all ranks together saw in a statistics step."""
        self.rows = rows

    # Decompositions -------------------------------------------------------------------------------------------------

    @property
    def has_direction(self) -> bool:
        """Whether the layer is preconditioned, because some rank has decompositions."""
        return self.in_use is not None

    def install(self, sides: Sides | None, spectra: KnownSpectra | None) -> None:
        """Starts using decompositions of the factors in use; None if only other ranks precondition the layer.

        ``spectra``: the known eigenvalues of these factors.
        """
        self.in_use = InUse(self.layer, self.state["in_use"], spectra, sides)

    def drop(self) -> None:
        """Drops the decompositions."""
        self.in_use = None

    # Workers --------------------------------------------------------------------------------------------------------

    def set_workers(self, workers: LayerAssignment, route: tuple[int, tuple[int, ...]] | None) -> None:
        """Sets the ranks that work on this block."""
        self.workers, self.route = workers, route
