"""Decides how far a base optimizer's step is turned and stretched, and in which steps directions are computed.

Everything learned for these decisions is kept here, except each layer's reach, which its block holds.
:mod:`~kfac_optim.turning` carries out the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..blocks import Block
from ..capture import GameSigns
from ..common.counters import Counted
from ..config import Config
from ..damping import is_of_largest
from ..placement import Ranks
from ..scaling import traits_of
from .brake import Brake
from .constraints import WeightWatch
from .graft import GraftShare
from .lessons import Readings
from .opponents import Game
from .reach import LEAST_REACH, RateHistory, learn_reaches, lower_reaches
from .trust import Trust


@dataclass(frozen=True)
class Plan:
    """How one step of the base optimizer is changed; by default it is not.

    Attributes:
        trust: How far the step turns from the base optimizer's own update to K-FAC's direction, in [0, 1].
        learns: Whether trust is learned.
        computes: Whether K-FAC's directions are computed, unless the step repeats the last change.
        repeats: Whether the step may be changed as the last one was.
        stretches: Whether the step is also stretched along flat directions (:mod:`~.reach`).
        graft: How far directions are scaled to the length of the base optimizer's update, in [0, 1] (:mod:`~.graft`).
        brake: How much the step is shortened if the base optimizer's update is unusually long.
    """

    trust: float = 0.0
    learns: bool = False
    computes: bool = False
    repeats: bool = False
    stretches: bool = False
    graft: float = 1.0
    brake: Brake = field(default_factory=Brake)


class Steering:
    """Everything learned so far about how closely steps should follow K-FAC.

    Attributes:
        trust: How far steps turn.
        graft: How far K-FAC's directions are scaled to the length of the base optimizer's updates.
        brake: How long the base optimizer's updates usually are.
        rate_history: How the learning rate has changed; reaches are tied to it.
        game: Whether the network trains against another one; then its steps are the base optimizer's own.
        watch: Finds weights that were changed since the last step; nothing is learned from their stretches.
        too_long: The parameters of layers whose last stretch was too long or undone. No other step may repeat it.
    """

    def __init__(self, ranks: Ranks, signs: GameSigns) -> None:
        self.trust, self.graft, self.brake = Trust(), GraftShare(), Brake()
        self.rate_history, self.game, self.watch = RateHistory(), Game(ranks, signs), WeightWatch()
        self.too_long: set[nn.Parameter] = set()

    def learn(self, blocks: Sequence[Block], readings: Readings) -> None:
        """Learns from what the gradients of a step say about the last step; also moves the reaches of the blocks."""
        self.game.learn()
        if (lessons := readings.lessons) is not None:
            self.brake.learn(readings.number(lessons.length), readings.entry, grows=lessons.grows)
            self.trust.learn(readings.number(lessons.turn), grows=lessons.grows)
            undone = self.watch.learn(blocks, readings.numbers(lessons.edits))
            slopes = readings.slopes(lessons)
            along = sum(after for p, (after, _) in slopes.items() if p not in undone)
            self.graft.learn(along if lessons.grows and lessons.has_moments else None)
            warms_up = readings.rate > self.rate_history.last
            self.too_long = learn_reaches(blocks, slopes, undone, warms_up=warms_up, grows=lessons.grows) | undone
        lower_reaches(blocks, self.rate_history.rise(readings.rate))

    def sits_out(self, config: Config) -> bool:
        """Whether networks seem to train against each other (:mod:`~.opponents`) where trust is learned.

        The step is then the base optimizer's own, and trust does not move.
        """
        if not (config.turns_steps and self.game.is_on):
            return False
        traits = traits_of(config.scaling)
        return traits.trust is None and traits.stretch is not True

    def plan(self, blocks: Iterable[Block], step: int, config: Config) -> Plan:
        """The plan of a step that comes after ``step`` others.

        Gradients that are preconditioned, in place of turning steps, count as a trust of 1. Steps are stretched only if
        the damping is relative to the largest eigenvalue.
        """
        traits = traits_of(config.scaling)
        given = traits.trust if config.turns_steps else 1.0
        learns, fixed = given is None, 0.0 if given is None else float(given)
        wanted = learns and traits.stretch is not False and is_of_largest(config.damping_object)
        stretches = wanted and (traits.stretch is True or self.game.is_on is False)
        steers = learns and not self.sits_out(config)
        changed = stretches and any(block.has_direction and block.reach > LEAST_REACH for block in blocks)
        return Plan(
            trust=self.trust.value if steers else fixed,
            learns=learns,
            computes=self.trust.computes(step, stretches=changed) if steers else fixed > 0,
            repeats=steers and not self.brake.is_outsized and self.trust.repeats(step, stretches=changed),
            stretches=stretches,
            graft=self.graft.value if wanted else 1.0,
            brake=self.brake,
        )

    @property
    def parts(self) -> list[Counted]:
        """Its attributes that have numbers to save."""
        return [part for part in vars(self).values() if isinstance(part, Counted)]

    def take_over(self, counters: Mapping[str, Any]) -> None:
        """Takes over some counters from another rank; the game has none that rounding could make different."""
        for part in self.parts:
            if part is not self.game:
                part.load({**part.counters(), **counters})
