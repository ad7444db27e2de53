"""What becomes of the base optimizer's step: how far it turns and stretches, and when directions are computed for it.

What is learned for that stands in :mod:`~kfac_optim.trust` and, by layer, in the blocks (:mod:`~kfac_optim.reach`);
:mod:`~kfac_optim.turning` takes the steps.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import nn

from .damping import OfLargest
from .opponents import OPPONENTS
from .reach import LEAST
from .state import StatefulEngine

__all__ = ["SteeredEngine"]


class SteeredEngine(StatefulEngine):
    """The part of the engine that decides how far, and when, a step follows K-FAC."""

    _overstretched: set[nn.Parameter]

    @property
    def trust(self) -> float:
        """How far the coming step turns from the base optimizer's own update to K-FAC's direction, in [0, 1]."""
        if self.learns_trust:
            return self._trust.value
        return float(getattr(self.scaling, "trust", 1.0)) if self._turns else 1.0

    @property
    def moment_decay(self) -> float:
        """The decay of the averaged gradients that give the direction where the base optimizer keeps no first moment.

        It is learned, in [0, 0.9].
        """
        return self._trust.decay

    @property
    def usual_length(self) -> float:
        """The usual length of the base optimizer's update; steps are braked by it (:func:`kfac_optim.trust.brake`)."""
        return self._trust.usual

    @property
    def brake(self) -> float:
        """What the last turned and stretched step was shortened by (:func:`kfac_optim.trust.brake`); 1: nothing."""
        return self._trust.brake

    @property
    def reach(self) -> float:
        """The largest share of the stretch along flat directions that a layer's steps get (:mod:`kfac_optim.reach`)."""
        return max((block.reach for block in self._blocks), default=0.0) if self.stretches else 0.0

    def covered_parameters(self) -> set[nn.Parameter]:
        """The parameters of layers."""
        return {p for block in self._blocks for p in block.layer.parameters}

    def reaches(self) -> dict[nn.Parameter, float]:
        """The share of the stretch that each parameter gets: its layer's, the first one's where several share it."""
        return {p: block.reach for block in reversed(self._blocks) for p in block.layer.parameters}

    def weights_with_directions(self) -> set[nn.Parameter]:
        """Those of the layers that have been decomposed somewhere."""
        return {block.layer.weight for block in self._blocks if block.has_direction}

    @property
    def stretches(self) -> bool:
        """Whether steps are stretched along flat directions; not where two networks train against each other.

        Nor before that is known, in the second step that collects statistics.
        """
        wanted = getattr(self.scaling, "stretch", False) and isinstance(self.damping, OfLargest)
        if not (self.learns_trust and wanted and self._trust.opposes is False):
            return False
        # Of several ranks one may have opponents that the others have not.
        return self.comm.world_size > 1 or not OPPONENTS.are_there(self._trust)

    @property
    def overstretched(self) -> set[nn.Parameter]:
        """The parameters of layers whose last stretch was too long, which no other step is to repeat."""
        return self._overstretched

    @property
    def learns_trust(self) -> bool:
        """Whether trust is learned."""
        return self._turns and getattr(self.scaling, "trust", 1.0) is None

    @property
    def computes_directions(self) -> bool:
        """Whether this step computes K-FAC's directions; else the base optimizer's own step is all."""
        if not self.learns_trust:
            return self.trust > 0
        return self._trust.is_measured(self.step_count, stretches=self.reach > LEAST)

    @property
    def repeats_turn(self) -> bool:
        """Whether this step may be changed as the last one was."""
        return self.learns_trust and self._trust.repeats(self.step_count, stretches=self.reach > LEAST)

    @property
    def _turns(self) -> bool:
        """Whether the steps of a base optimizer are turned; else gradients are preconditioned, all the way."""
        return getattr(self.owner, "precondition", "gradient") == "momentum"

    @property
    @abstractmethod
    def owner(self) -> Any:
        """The optimizer of this package that conducts the engine; None for an engine that stands alone."""
