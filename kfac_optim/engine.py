"""The curvature engine, which calls the stages of the pipeline in order.

What a step does, in order::

    learn trust and reach from what the new gradients say about the last step
    fold the captured statistics into the running averages       (statistics steps; drop non-finite micro-batches)
    if due: pool the factors of all ranks, decompose them on their inverse workers (eqs. 11-13 or 8-10), exchange
    precondition on the gradient workers; exchange
    scale (kl_clip, unit, orthogonal, graft)

``update`` does the first three lines, ``directions`` the last two, ``advance`` ends the step. The stages, each of which
owns its state, are put together in :mod:`~kfac_optim.stages`. ``update`` and ``directions`` leave ``.grad`` alone:
an optimizer of this package or :meth:`~kfac_optim.CurvatureEngine.precondition_` applies the directions.

``inv_`` in names of options is the paper's prefix; it refers to decompositions by any solver.

With several ranks, all communication takes place within a step, in the same order on all ranks, whichever layers they
have used: what is due depends on the step alone, and what is sent depends on the assignment alone.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture import TakenStatistics
from .common.rates import Scalar
from .common.user_warning import warn_user
from .config import Config, describe, engine_options, refuse_unknown, signature
from .diagnostics import report as reports
from .diagnostics.memory import memory_on
from .distributed import full_gradient, set_full_gradient_
from .layers import KroneckerLayer
from .saved_state import engine as engine_state
from .scaling import traits_of
from .stacks import Directions, StepVectors, by_parameter
from .stages import Stages
from .steering import Lessons, Readings


class CurvatureEngine(Config):
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

    _turns_steps: bool | None = None  # None: the engine is used by itself, without an optimizer of this package

    def __init__(
        self, model: nn.Module | Iterable[Any], params: Iterable[nn.Parameter] | None = None, **given: Any
    ) -> None:
        refuse_unknown(type(self).__name__, given, list(engine_options()))
        super().__init__(**given)
        self.stages = Stages(self, model, params)
        self._is_noop = False  # the step in progress changes nothing; see update()
        self._constructed = True

    __signature__ = signature(__init__)

    @property
    def turns_steps(self) -> bool:
        return bool(self._turns_steps)

    def serve(self, *, turns_steps: bool) -> None:
        """Makes it the engine of an optimizer of this package, which turns its steps or preconditions gradients."""
        self._turns_steps = turns_steps

    def _option_changed(self) -> None:
        self.stages.check_scaling()
        self.stages.prepare_statistics()

    # The step -------------------------------------------------------------------------------------------------------

    def update(self, gradients: Sequence[Tensor], lrs: Sequence[Scalar], lessons: Lessons | None = None) -> bool:
        """The first half of a step: takes up what was captured and refreshes the decompositions if that is due.

        Args:
            gradients: The gradients of all trained parameters.
            lrs: The learning rates of the step. If all of them and all gradients are 0, the step only allocates
                factors; torch.distributed.checkpoint takes such a step.
            lessons: What the gradients say about the last step; None: nothing is to be learned from it.

        Returns:
            Whether the step is to be taken; False if a gradient is not finite.

        Raises:
            RuntimeError: If the model was trained but none of its layers was seen; on all ranks, if they have built
                different optimizers, their hyperparameters differ, or a gradient was not finite on some of them only.
        """
        self._is_noop, stages = False, self.stages
        if stages.closed:
            return True
        blocks, capture, refresher, step = stages.blocks, stages.capture, stages.refresher, stages.progress.step
        # Also in a step that is a no-op: torch.distributed.checkpoint takes one to make the state exist.
        stages.allocate(blocks)
        if not refresher.has_begun:  # no layer counts as new yet
            for block in blocks:
                block.note_trains()
        statistics = capture.take()
        stages.steering.game.begin_step(step, collects=capture.enabled)
        readings = Readings(gradients, lrs, lessons, statistics.flags)
        self._is_noop = readings.largest == readings.rate == 0
        if self._is_noop:  # which one rank may take alone, to save a state
            return True
        stages.prepare_ranks()
        if not math.isfinite(readings.largest):
            self._skip_step()
            return False
        stages.compare_if_due(finite=True)
        stages.steering.learn(blocks, readings)
        if not blocks:  # everything trains by the base rule
            return True
        if capture.enabled:
            self._take_up(statistics, readings)
        del statistics  # as large as the factors, so freed before a refresh needs memory
        refresher.rebuild(step, blocks)
        self._refresh_if_due(readings)
        refresher.work_off(step)
        stages.preconditioner.release(blocks)
        stages.restart_for_new_layers()
        return True

    def _skip_step(self) -> None:
        """Ends a step with a gradient that is not finite, which is not taken (a collective)."""
        stages = self.stages
        stages.progress.skip()
        stages.compare_if_due(finite=False)
        stages.restart_for_new_layers()
        self.skip_directions()  # other ranks may be waiting for them
        stages.prepare_statistics()

    def _take_up(self, statistics: TakenStatistics, readings: Readings) -> None:
        """Adds what was captured to the running averages (a collective); ``readings`` have the statistics' flags."""
        stages = self.stages
        blocks, alone, progress = stages.blocks, stages.ranks.alone, stages.progress
        averaging, sightings, game = stages.averaging, stages.sightings, stages.steering.game
        resolved = statistics.resolve(readings.numbers)
        unseen = sightings.count_step(statistics, resolved, trains=readings.trains)
        with stages.stopwatch.stage("factor update"):
            decay, reports = self.at("factor_decay", progress.step), [unseen, *game.report()]
            anything, (blind, *reported) = averaging.add(blocks, resolved, decay, self.slack, reports)
            game.hear(reported)
            sightings.note(blocks, resolved, blind=blind > 0 and not anything, alone=alone)
            if alone or stages.ranks.assignment.shares_factors:
                averaging.pool(blocks)
        progress.note_statistics()
        sightings.require()

    def _refresh_if_due(self, readings: Readings) -> None:
        """Starts a refresh of the layers seen, if it is due."""
        stages, progress, refresher = self.stages, self.stages.progress, self.stages.refresher
        step = progress.step
        if not refresher.is_due(self, step):
            return
        if stages.sits_out:  # nobody needs directions: it is put off until they do
            refresher.refresh_next_step()
            return
        blocks, pace = stages.blocks, refresher.pace
        stages.averaging.pool(blocks)
        if ready := [block for block in blocks if block.has_data()]:
            pace.measure(ready, self.at("factor_batch_fraction", step), stages.comm.world_size)
            if refresher.is_due(self, step):
                stages.sightings.warn(blocks)
                refresher.start(step, ready, self.damping_object, pace.spread(self, step))
            return
        seen_nothing = progress.last_statistics == step and not stages.averaging.skipped_batches
        # Every step collects statistics until there are some. Several ranks do not stop because of what one has seen:
        # they would disagree.
        if not (stages.ranks.alone and all(map(stages.sightings.has_never_seen, blocks))):
            progress.collect_next_step()
        has_gradients = any(layer.weight.grad is not None for layer in self.layers)
        stages.sightings.warn(blocks)
        stages.sightings.require(missing=readings.trains and seen_nothing and has_gradients)

    def directions(
        self,
        moments: Mapping[nn.Parameter, Tensor],
        lr: Scalar | Mapping[nn.Parameter, Scalar],
        other_updates: Mapping[nn.Parameter, Tensor] | None = None,
        *,
        keeps_zeros: bool = False,
    ) -> Directions:
        """The second half of a step: the moments, preconditioned and scaled.

        Args:
            moments: What to precondition (first moments or gradients), by parameter.
            lr: The current learning rate, for the scaling; by parameter if there are several.
            other_updates: What the base optimizer makes of the moments, per unit of the learning rate, where that is
                not the moments themselves.
            keeps_zeros: Whether directions are zero wherever the moments are.

        Returns:
            Directions of the layers that have a decomposition and a moment.
        """
        stages = self.stages
        vectors = StepVectors(moments, other_updates or {}, lr)
        return stages.preconditioner.directions(stages.blocks, vectors, stages.progress.step, keeps_zeros=keeps_zeros)

    def skip_directions(self) -> None:
        """Takes the place of :meth:`directions` in a step that is not turned (a collective).

        Ranks that exchange directions do so in every step: what is sent must not depend on what one rank has learned.
        """
        self.stages.preconditioner.send_zeros(self.stages.blocks)

    def advance(self, left: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Ends the step; ``left``: the gradients that it leaves in ``.grad``, for :meth:`discard`."""
        stages = self.stages
        stages.signs.note_left(None if stages.closed else left)
        if not self._is_noop:
            stages.progress.advance()
        stages.prepare_statistics()

    def discard(self) -> None:
        """Discards what was captured since the last step, because ``zero_grad()`` is about to clear the gradients."""
        self.stages.signs.note_clearing()
        self.stages.capture.discard()

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
        stages, trained = self.stages, self.stages.trained
        if self._turns_steps is not None:
            raise RuntimeError(
                "this engine belongs to an optimizer, whose step() already preconditions: call that only"
            )
        if not isinstance(lr, Tensor | numbers.Real | None):  # a list, as schedulers' get_last_lr() returns
            raise TypeError(f"precondition_(lr={lr!r}): must be a number, or a tensor of one")
        if lr is None and traits_of(self.scaling).needs_lr:
            raise ValueError(f"precondition_(lr=None): scaling={self.scaling!r} needs the learning rate; pass lr=")
        stages.follow_model()
        gradients = {p: g for p in trained.parameters if (g := full_gradient(p)) is not None}
        lr = 1.0 if lr is None else lr
        try:
            taken = self.update(list(gradients.values()), (lr,))
            if taken:
                directions = self.directions(gradients, lr)
                for parameter, direction in by_parameter(directions, gradients).items():
                    set_full_gradient_(parameter, direction)
                self.advance()
        except BaseException:
            stages.recover()
            raise
        return taken

    def extend(self, params: Iterable[Any]) -> None:
        """Adds trained parameters (``add_param_group``), whose layers start without statistics."""
        self.stages.extend(params)

    def close(self) -> None:
        """Removes all hooks, which leaves the plain base optimizer. With several ranks, call it on all of them."""
        self.stages.close()

    # What users ask for ---------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[KroneckerLayer]:
        """The layers that are preconditioned."""
        return self.stages.layers

    @property
    def step_count(self) -> int:
        """The number of steps taken, with those of the run that this one resumes."""
        return self.stages.progress.step

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were not taken, because a gradient was not finite."""
        return self.stages.progress.skipped_steps

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.stages.closed

    @property
    def trust(self) -> float:
        """How far the coming step turns from the base optimizer's own update to K-FAC's direction, in [0, 1]."""
        return self.stages.plan().trust

    reach = property(reports.reach)

    def profile(self) -> dict[str, dict[str, float]]:
        """Milliseconds and calls per stage since construction, the stages of the paper's Fig. 7."""
        return self.stages.stopwatch.table()

    def memory_estimate(self) -> dict[str, int]:
        """Bytes on this rank by kind; :func:`kfac_optim.memory_estimate` gives those of the fullest rank."""
        return memory_on(self.stages, self.stages.comm.rank)

    # Functions of which the engine is the first argument, under their own names, by which bound ones are pickled.
    factors, report, workers = reports.factors, reports.report, reports.workers
    __repr__ = reports.overview
    state_dict, full_state_dict = engine_state.state_dict, engine_state.full_state_dict
    load_state_dict, synchronize = engine_state.load_state_dict, engine_state.synchronize

    # Copies and pickles ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the model; hooks, scaler, communicator and what is captured stay behind."""
        return {**self.__dict__, "grad_scaler": None, "communicator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, stages=copy.copy(state["stages"]))  # copy.copy() passes those of the original
        self.stages.finish_copy(self, joins=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> CurvatureEngine:
        """A copy for a copy of the model, among the same ranks."""
        if self.grad_scaler is not None:
            warn_user(
                "the copy of this optimizer has no grad_scaler, so that its statistics would count the loss as scaled: "
                "set that of its own loop on copied.curvature.grad_scaler"
            )
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo), communicator=self.communicator)
        copied.stages.finish_copy(copied, joins=False)
        return copied
