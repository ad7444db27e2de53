"""The curvature engine: sequences the stages of the pipeline once per step.

What a step does, in order::

    learn trust and reach from what the new gradients say about the last step
    fold the captured moments into the running averages          (statistics steps; drop non-finite micro-batches)
    if due: pool the factors of all ranks, decompose them on their inverse workers (eqs. 11-13 or 8-10), exchange
    precondition on the gradient workers; exchange
    scale (kl_clip, unit, orthogonal, graft)

``update`` does the first three lines, ``directions`` the last two, ``advance`` ends the step. Each stage owns its
state::

    steering/           how far steps turn (how far a layer's steps stretch is kept in its block)
    capture/            what was captured in backward passes since the last step
    averages.py         what this rank has seen since the ranks last pooled their sums   (eqs. 14-15)
    refresh/            the refresh in progress, and when the next one is due            (eqs. 8-13, by the solver)
    preconditioning.py  stacks of layers that have one shape, see stacks/                (eqs. 8-13, by the solver)
    scaling.py          nothing                                                          (eq. 16)
    sightings.py        whether training is seen at all

``update`` and ``directions`` leave ``.grad`` alone: an optimizer of this package or
:meth:`~kfac_optim.CurvatureEngine.precondition_` applies the directions.

``inv_`` in names of options is the paper's prefix; it refers to decompositions by any solver.

With several ranks, all communication takes place within a step, in the same order on all ranks, whichever layers they
have used: what is due depends on the step alone, and what is sent depends on the assignment alone.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import TakenStatistics
from ..common.checks import is_int, require_number
from ..common.rates import Scalar
from ..config import describe, signature
from ..distributed import AssignmentStrategy, LocalCommunicator, full_gradient, set_full_gradient_
from ..scaling import traits_of
from ..schedules import due
from ..stacks import Directions, StepVectors, by_parameter
from ..steering import Lessons, Readings, WeightWatch
from .views import ViewedEngine

__all__ = ["CurvatureEngine", "memory_estimate"]


class CurvatureEngine(ViewedEngine):
    __doc__ = f"""Everything about curvature for one model; ``optimizer.curvature`` of the optimizers of this package.

    Args:
        model: The module to watch, raw or wrapped (DDP, torch.compile), or the parameters (or parameter groups) whose
            owning modules are then found by identity.
        params: The parameters that are trained; default: all of the model's. Layers whose weight is not among them get
            no hooks.
{describe()}

    Raises:
        TypeError: If an argument is unknown or of the wrong kind, or the model is wrapped in torch's first FSDP.
        ValueError: If a value is out of range, or the model owns none of ``params``.

    Warns:
        UserWarning: If no module owns any of the parameters: all of them then train by the base rule.
    """

    __signature__ = signature(ViewedEngine.__init__)

    def update(
        self,
        gradients: Sequence[Tensor],
        lrs: Iterable[Scalar] = (1.0,),
        lessons: Lessons | None = None,
    ) -> bool:
        """The first half of a step: takes up what was captured and refreshes the decompositions if that is due.

        Args:
            gradients: The gradients of all trained parameters.
            lrs: The learning rates of the step. If all of them and all gradients are 0, the step only makes room for
                factors; torch.distributed.checkpoint takes such a step.
            lessons: What the gradients say about the last step; None: nothing is to be learned from it.

        Returns:
            Whether the step is to be taken; False if a gradient is not finite.

        Raises:
            RuntimeError: If the model was trained but none of its layers was seen; on all ranks, if they have built
                different optimizers, their hyperparameters differ, or a gradient was not finite on some of them only.
        """
        self._is_noop = False
        if self._closed:
            return True
        self._prepare_ranks()
        # Also in a step that is a no-op: torch.distributed.checkpoint takes one to make the state exist.
        self.make_room(self.trained.blocks)
        if not self._refresher.has_begun:  # no layer counts as new yet
            for block in self.trained.blocks:
                block.note_trains()
        statistics = self._capture.take()
        self._steering.opposition.begin_step(self.step_count, collects=self._capture.enabled)
        read = Readings(gradients, list(lrs), lessons, statistics.flags)
        moves = read.rate != 0
        trains = read.largest > 0 and moves
        self._is_noop = read.largest == 0 and not moves
        if self._is_noop:
            return True
        finite = math.isfinite(read.largest)
        self.skipped_steps += not finite
        self._compare_ranks(finite)
        if not finite:
            self._skip()
            return False
        self._steering.learn(self.trained.blocks, read)
        if not self.trained.blocks:  # everything trains by the base rule
            return True
        if self._capture.enabled:
            self._take_up(statistics, read.flags, trains=trains)
        del statistics  # as large as the factors, so freed before a refresh needs memory
        self._refresher.rebuild(self.step_count, self.trained.blocks, self.comm)
        if self._refresher.is_due(self, self.step_count):
            if self.is_opposed:  # nobody needs directions: it is put off until they do
                self._refresher.refresh_next_step()
            else:
                self._refresh(trains)
        self._refresher.work_off(self.step_count, self.comm)
        self._preconditioner.release(self.trained.blocks, self.damping_rule)
        self._restart_for_new_layers()
        return True

    def directions(
        self,
        vectors: Mapping[nn.Parameter, Tensor],
        lr: Scalar | Mapping[nn.Parameter, Scalar],
        updates: Mapping[nn.Parameter, Tensor] | None = None,
        *,
        keeps_zeros: bool = False,
    ) -> Directions:
        """The second half of a step: the preconditioned and scaled vectors.

        Args:
            vectors: What to precondition (gradients or first moments), by parameter.
            lr: The current learning rate, for the scaling; by parameter if there are several.
            updates: What the base optimizer would make of the vectors, per unit of the learning rate; where it is left
                out: the vectors themselves.
            keeps_zeros: Whether directions are zero wherever the vectors are.

        Returns:
            Directions of the layers that have a decomposition and a vector.
        """
        return self._preconditioner.directions(
            self.trained.blocks,
            StepVectors(vectors, updates or {}, lr),
            self.comm,
            damping=self.damping_rule,
            scaling=self.scaling,
            step=self.step_count,
            keeps_zeros=keeps_zeros,
        )

    def skip_directions(self) -> None:
        """Takes the place of :meth:`directions` in a step that is not turned (a collective).

        Ranks that exchange directions do so in every step: what is sent must not depend on what one rank has learned.
        """
        self._preconditioner.send_zeros(self.trained.blocks, self.scaling, self.comm)

    def advance(self, left: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Ends the step; ``left``: the gradients that it leaves in ``.grad``, for :meth:`discard`."""
        self._signs.note_left(None if self._closed else left)
        if not self._is_noop:
            self.step_count += 1
            self._steps_taken += 1
        self._prepare_statistics()

    def recover(self) -> None:
        """Makes the engine usable after an exception anywhere in a step, with what a saved state would hold.

        The state holds the factors behind the decompositions, so the next step makes those again. Several ranks cannot
        go on after an exception on one of them; there, only what this rank keeps to itself is put in order.
        """
        self.watch.note(())
        self._steering.opposition.recover()
        self._sightings.note_lost()
        if any(block.state for block in self.trained.blocks):  # a state with the factors of some layers is not whole
            self.make_room(self.trained.blocks)
        if self.ranks.alone and not self._closed:
            self._averaging.clear()
            for block in self.trained.blocks:
                block.drop()
                block.note_rows(0.0)
            self._refresher.invalidate()
        if self._capture.layers != self.layers:
            self._rebuild_stages()
        # The step was not taken, so its statistics are due again. Ranks that have seen no layer all get that error.
        if self.last_statistics == self.step_count and (self.ranks.alone or self._sightings.blind):
            self._collect_next_step()
        self._prepare_statistics()

    @property
    def watch(self) -> WeightWatch:
        """Compares the weights with those that the last step has left."""
        return self._steering.watch

    @torch.no_grad()
    def precondition_(self, lr: Scalar | None = None) -> bool:
        """Replaces ``.grad`` by the directions, between ``backward()`` and the ``step()`` of a foreign optimizer.

        Args:
            lr: The foreign optimizer's learning rate; needed for scaling="kl_clip".

        Returns:
            False if the gradients are not finite; they are then left as they are.

        Raises:
            RuntimeError: If an optimizer of this package owns the engine, since its step preconditions already.
            TypeError: If the learning rate is no number.
            ValueError: If the scaling needs a learning rate and none is given.
        """
        if self.owner is not None:
            raise RuntimeError(
                "this engine belongs to an optimizer, whose step() already preconditions: call that only"
            )
        if not isinstance(lr, Tensor | numbers.Real | None):  # a list, as schedulers' get_last_lr() returns
            raise TypeError(f"precondition_(lr={lr!r}): must be a number, or a tensor of one")
        if lr is None and traits_of(self.scaling).needs_lr:
            raise ValueError(f"precondition_(lr=None): scaling={self.scaling!r} needs the learning rate; pass lr=")
        if not self.trained.is_intact:
            self.follow(self.trained.present_parameters())
        gradients = {p: g for p in self.trained.parameters if (g := full_gradient(p)) is not None}
        lr = 1.0 if lr is None else lr
        try:
            taken = self.update(list(gradients.values()), (lr,))
            if taken:
                directions = self.directions(gradients, lr)
                for parameter, direction in by_parameter(directions, gradients).items():
                    set_full_gradient_(parameter, direction)
                self.advance()
        except BaseException:
            self.recover()
            raise
        return taken

    def discard(self) -> None:
        """Discards what was captured since the last step, because ``zero_grad()`` is about to clear the gradients."""
        self._signs.note_clearing()
        self._capture.discard()

    # Parts of a step ------------------------------------------------------------------------------------------------

    def _compare_ranks(self, finite: bool) -> None:
        """Compares the ranks if they exchange something in this step (then a collective)."""
        if self.ranks.alone:
            return
        step = self.ranks.common_step(self.step_count, skipped=not finite)
        pools = due(self.statistics_interval(step), step, self.last_statistics)
        if pools or self._refresher.communicates(self, step, refreshes=not self.is_opposed):
            self._compare()

    def _skip(self) -> None:
        """Ends a step that is not taken; still sends what other ranks may be waiting for."""
        self._restart_for_new_layers()
        self.skip_directions()
        self._prepare_statistics()

    def _take_up(self, statistics: TakenStatistics, flags: Iterable[float], *, trains: bool) -> None:
        """Adds the statistics of this step to the running averages (a collective).

        Args:
            statistics: What was captured.
            flags: The flags of the statistics, read from the device.
            trains: See :meth:`_refresh`.
        """
        resolved, blocks = statistics.resolve(flags), self.trained.blocks
        unseen = self._sightings.count_step(statistics, resolved, trains=trains)
        with self._stopwatch.stage("factor update"):
            decay = self.at("factor_decay", self.step_count)
            reports = [unseen, *self._steering.opposition.report()]
            anything, (blind, *reported) = self._averaging.fold(blocks, resolved, decay, self.slack, self.comm, reports)
            self._steering.opposition.hear(reported)
            self._sightings.note(blocks, resolved, blind=blind > 0 and not anything, alone=self.ranks.alone)
            if self.ranks.alone or self.ranks.assignment.shares_factors:
                self._averaging.pool(blocks, self.comm)
        self.last_statistics = self.step_count
        self._sightings.require()

    def _refresh(self, trains: bool) -> None:
        """Starts a refresh of the layers seen, if it is still due; ``trains``: whether this step changes weights."""
        self._averaging.pool(self.trained.blocks, self.comm)
        ready = [block for block in self.trained.blocks if block.has_data()]
        if ready:
            self._refresher.pace.measure(ready, self.at("factor_batch_fraction", self.step_count), self.comm.world_size)
            if not self._refresher.is_due(self, self.step_count):
                return
            self._sightings.warn(self.trained.blocks)
            step = self.step_count
            self._refresher.start(step, ready, self.damping_rule, self.spread_at(step), self.comm)
            return
        seen_nothing = self.last_statistics == self.step_count and not self.skipped_batches
        # Every step collects statistics until there are some. Several ranks do not stop because of what one has seen:
        # they would disagree.
        if not (self.ranks.alone and all(block.never_seen for block in self.trained.blocks)):
            self._collect_next_step()
        has_gradients = any(layer.weight.grad is not None for layer in self.layers)
        self._sightings.warn(self.trained.blocks)
        self._sightings.require(missing=trains and seen_nothing and has_gradients)

    def _collect_next_step(self) -> None:
        """Has the next step collect statistics, whatever the interval."""
        self.last_statistics = None

    def _restart_for_new_layers(self) -> None:
        """If layers were unfrozen or added, has the next step collect statistics and refresh, as the first step did.

        This depends on which layers train, which is the same on all ranks, and not on which of them a rank has seen.
        """
        if self._refresher.in_progress is not None or not self._refresher.has_begun:
            return
        changed = [block for block in self.trained.blocks if block.layer.weight.requires_grad != block.trains]
        for block in changed:
            block.note_trains()
        # Layers that had trained before go on with their decompositions.
        if not all(block.has_direction for block in changed if block.layer.weight.requires_grad):
            self._collect_next_step()
            self._refresher.pace.forget()
            self._refresher.refresh_next_step()


# Functions beside the engine -----------------------------------------------------------------------------------------


def memory_estimate(
    model: nn.Module, *, world_size: int = 1, assignment: AssignmentStrategy | str = "factor-wise", **options: Any
) -> dict[str, int]:
    """Estimates, before training, how many bytes the curvature takes on the rank that needs most.

    Args:
        model: The module.
        world_size: Number of processes.
        assignment: As for the optimizers.
        **options: Any other keyword of :class:`CurvatureEngine` that matters to memory.

    Returns:
        Bytes by kind; the kinds are ``factors`` (running averages), ``snapshots`` (what the decompositions were made
        of), ``local sums`` (what a rank has seen since the ranks last pooled their factors), ``decompositions``,
        ``refresh`` (if it is spread over steps: its snapshot and the new decompositions), and their ``total``. On
        statistics steps one more copy of the factors is held for a while. Layers whose weight is frozen take nothing.
        The entries that an optimizer keeps to learn trust, as by default, are not counted: three numbers for each
        weight of a layer, or four if its base class keeps no first moment, or one that contains weight decay.
    """
    require_number("world_size", world_size, "an int >= 1", lambda n: is_int(n) and n >= 1)
    with torch.no_grad():
        engine = CurvatureEngine(model, assignment=assignment, communicator=LocalCommunicator(0, world_size), **options)
    engine.close()
    ranks = [engine.memory_on(rank) for rank in range(world_size)]
    return max(ranks, key=lambda kinds: kinds["total"])
