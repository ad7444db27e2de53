"""What an engine reports about itself: factors, memory, numbers for logging, and the coverage table."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..blocks import Block
from ..damping import value_of
from ..diagnostics import memory_of, report_of, table, total, workers_of
from ..layers import KroneckerLayer
from ..steering import LEAST, Plan
from .state import StatefulEngine

__all__ = ["ViewedEngine"]


class ViewedEngine(StatefulEngine):
    """The read-only part of the engine."""

    def plan(self) -> Plan:
        """How the base optimizer's step is changed: the step in progress or, between steps, the coming one."""
        return self._steering.plan(
            self.trained.blocks,
            self.step_count,
            self.scaling,
            self.damping_rule,
            turns=self._turns,
        )

    @property
    def is_opposed(self) -> bool:
        """Whether :meth:`plan` leaves steps to the base optimizer because networks seem to train against each other."""
        return self._steering.is_opposed(self.scaling, turns=self._turns)

    @property
    def _turns(self) -> bool:
        """Whether the steps of an optimizer are turned; else gradients are preconditioned."""
        return bool(getattr(self.owner, "precondition", "gradient") == "momentum")

    @property
    def skipped_batches(self) -> int:
        """The number of micro-batches, on all ranks, that were left out because their statistics were not finite."""
        return self._averaging.skipped_batches

    @property
    def last_refresh(self) -> int | None:
        """The step at which the last refresh began; None before the first, and if another is to be made at once."""
        return self._refresher.last_refresh

    @property
    def frozen_at(self) -> int | None:
        """The step whose factors are in use, or None if none are."""
        return self._refresher.frozen_at

    @property
    def refreshes(self) -> int:
        """How many refreshes have begun."""
        return self._refresher.refreshes

    @property
    def failed_decompositions(self) -> int:
        """How many times a layer had to keep its last decompositions, over all refreshes."""
        return self._refresher.failed_decompositions

    @property
    def trust(self) -> float:
        """How far the coming step turns from the base optimizer's own update to K-FAC's direction, in [0, 1]."""
        return self.plan().trust

    @property
    def reach(self) -> float:
        """The largest share of the stretch along flat directions that a layer's steps get (:mod:`~.reach`)."""
        return max((block.reach for block in self.trained.blocks), default=0.0) if self.plan().stretches else 0.0

    def factors(self, layer: KroneckerLayer | str) -> tuple[Tensor, Tensor]:
        """The running averages A ``[p, d_in, d_in]`` and G ``[p, d_out, d_out]`` of a layer (diagonals: ``[p, d]``).

        A factor that is kept as b blocks of m rows is ``[p b, m, m]``; zeros may fill up the last block.

        Raises:
            ValueError: If no such layer is preconditioned.
            RuntimeError: Before the first step, for a layer that has been frozen since, or if another rank keeps one.
        """
        block = next((block for block in self.trained.blocks if layer in (block.layer, block.layer.name)), None)
        if block is None:
            raise ValueError(f"layer={layer!r}: no such layer is preconditioned; print(optimizer.curvature) lists them")
        if not block.state:
            raise RuntimeError(
                f"the factors of {block.layer.name!r}: there are none before the first step(), nor for a frozen layer"
            )
        current = block.factors("current")
        if not (current.kept(0) and current.kept(1)):
            raise RuntimeError(
                f"the factors of {block.layer.name!r} are on ranks {block.workers.inverse_workers}: ask there, or take "
                "them from the full_state_dict() of the optimizer, a collective"
            )
        return current.matrix(0), current.matrix(1)

    def memory_estimate(self) -> dict[str, int]:
        """Bytes on this rank by kind; :func:`kfac_optim.memory_estimate` gives those of the fullest rank."""
        return self.memory_on(self.comm.rank)

    def memory_on(self, rank: int) -> dict[str, int]:
        """Bytes on a rank by kind."""
        return total(self._memory_of(block, rank) for block in self.trained.blocks)

    def _memory_of(self, block: Block, rank: int) -> dict[str, int]:
        """Bytes of a layer on a rank by kind."""
        return memory_of(block, rank, self.comm.world_size, self)

    def report(self, *, eigenvalues: bool = False) -> dict[str, Any]:
        """Plain floats and ints for logging, nested; :func:`~kfac_optim.diagnostics.flatten` makes one level of them.

        The first call after a refresh computes the eigenvalues of each factor; others cost little. Nothing is sent.

        Args:
            eigenvalues: Adds ``eigenvalues`` to the spectra: a list of floats, largest first, all pairs together.

        Returns:
            A nested dict with these entries.

            - ``step``: the number of steps taken.
            - ``trust``: how far the coming step turns from the base optimizer's own update to K-FAC's direction, in
              [0, 1] (:mod:`~.trust`).
            - ``brake``: what K-FAC's direction was multiplied by in the last step that computed one, in (0, 1].
            - ``graft``: how much of the base optimizer's length K-FAC's direction has in the coming step, in [0, 1].
            - ``reach``: the largest ``reach`` of a layer; 0 where steps are not stretched.
            - ``skipped_steps``: the number of steps with a gradient that was not finite.
            - ``skipped_batches``: the number of micro-batches with statistics that were not finite, in other steps.
            - ``failed_decompositions``: how many times a layer had to keep its last decompositions, over all refreshes.
            - ``staleness``: steps since the factors in use were frozen; None before the first refresh. It grows while
              networks seem to train against each other, as nothing is refreshed then (:mod:`~.opponents`).
            - ``traffic``: by kind, the bytes ``sent`` and ``received`` by this rank per step. The kinds are "counts",
              "factors", "decompositions", "directions", "gradients" (shards sent to the ranks that precondition them)
              and "state" (factors that were moved or gathered); see :mod:`kfac_optim.distributed`.
            - ``layers``: by layer name

              - ``A``, ``G``: ``min``, ``mean``, ``max`` and ``condition`` of the eigenvalues in use; None where another
                rank keeps the factor.
              - ``damping``: gamma of the coming step, the mean over the layer's pairs.
              - ``condition``: the condition number of ``A (x) G + gamma I``, from these extremes; None where a factor
                is on another rank.
              - ``cosine``: between gradient and direction in the first step after the last refresh; None where the
                gradient's shards went to another rank.
              - ``reach``: the share of the stretch that a step gets, 0.0003 to 3; 0 where steps are not stretched
                (:mod:`~.reach`).
        """
        damping = self.damping_rule
        value, steps = value_of(damping, self.step_count), max(1, self._steps_taken)
        plan = self.plan()
        return {
            "step": self.step_count,
            "trust": plan.trust,
            "brake": plan.last_brake,
            "graft": plan.graft,
            "reach": self.reach,
            "skipped_steps": self.skipped_steps,
            "skipped_batches": self.skipped_batches,
            "failed_decompositions": self.failed_decompositions,
            "staleness": None if self.frozen_at is None else self.step_count - self.frozen_at,
            "traffic": {
                kind: {"sent": sent / steps, "received": received / steps}
                for kind, (sent, received) in self.comm.traffic.items()
            },
            "layers": {
                block.layer.name: {
                    **report_of(block, value * block.damping_unit(damping), full=eigenvalues),
                    "reach": block.reach if plan.stretches else 0.0,
                }
                for block in self.trained.blocks
                if block.has_direction
            },
        }

    def profile(self) -> dict[str, dict[str, float]]:
        """Milliseconds and calls per stage since construction, the stages of the paper's Fig. 7."""
        return self._stopwatch.table()

    def workers(self) -> dict[str, Any]:
        """Which ranks work on which layers; the same on every rank.

        Returns:
            ``layers``: by layer name the ranks that decompose ``A`` and ``G``, and the list of those that
            ``precondition`` the layer; ``loads``: the decompositions' multiply-adds on each rank, up to a constant.
        """
        return {
            "layers": {b.layer.name: workers_of(b) for b in self.trained.blocks},
            "loads": list(self.ranks.assignment.loads),
        }

    def __repr__(self) -> str:
        at, plan = self.step_count, self.plan()
        title = f"Curvature after {at} steps"
        title += f", trust {plan.trust:.1f}" if plan.learns else ""
        if plan.stretches:
            title += f", reach up to {self.reach:.2g}" if self.reach > LEAST else ", not stretched"
        if plan.opposed:
            title += ", steps left to the base optimizer: two networks seem to train against each other"
        remarks = []
        if not self.ranks.alone:
            balance = f"largest / mean = {self.ranks.assignment.imbalance:.2f}"
            remarks.append(f"rank {self.comm.rank} of {self.comm.world_size}, load of the decompositions: {balance}")
        interval = self.refresh_interval(at)
        if interval > self.at("inv_update_steps", at):
            first = f", from step {interval} on" if self.frozen_at is None else ""
            work = self._refresher.pace.work
            remarks.append(f"a refresh is as much work as {work} steps: one in {interval} steps{first}")
        memory = {block: sum(self._memory_of(block, self.comm.rank).values()) for block in self.trained.blocks}
        return table(title, memory, self.trained.uncovered, self.comm, remarks)
