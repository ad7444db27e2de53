"""The stages of the pipeline: how they are put together, and again when the model or the ranks change.

Each stage owns its state. The engine calls them in the order of a step; what it saves and reports is asked of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from .averages import Averaging
from .blocks import Block
from .capture import Capture, GameSigns, LossTerms, when_whole
from .common.counters import Counted
from .common.machines import refuse_cuda_graphs
from .common.stopwatch import Stopwatch
from .config import CHANGEABLE, Config, compared
from .coverage import TrainedModel
from .distributed import Communicator, communicator_of, is_sharded, require_all_in_wrapper
from .layers import KroneckerLayer
from .placement import Ranks
from .preconditioning import Preconditioner
from .progress import Progress
from .refresh import Refresher
from .scaling import traits_of
from .sightings import Sightings
from .steering import Plan, Steering

_FEW = 16  # how many weights of a layer are compared before the first step


class Stages:
    """The stages of the pipeline, and what they share.

    Args:
        config: The options, held weakly: they are those of the engine that holds the stages.
        model, params: As for the engine.

    Attributes:
        config: The options.
        ranks: The ranks, and which of them work on which layers.
        trained: The trained parameters, and the blocks of their layers.
        fisher: The distribution that targets are sampled from; None for the empirical Fisher.
        progress: How far training has come.
        stopwatch: How long the stages take.
        capture: What was captured in backward passes since the last step. A copy gets a new one.
        averaging: What this rank has seen since the ranks last pooled their sums (eqs. 14-15).
        refresher: The refresh in progress, and when the next one is due (eqs. 8-13).
        preconditioner: Stacks of layers that have one shape (eqs. 8-13). A copy gets a new one.
        steering: How far steps turn. How far a layer's steps are stretched is kept in its block.
        signs: Whether networks train against each other, seen between steps.
        sightings: Whether training is seen at all.
        closed: Whether :meth:`close` was called.
    """

    config: Config
    capture: Capture
    preconditioner: Preconditioner

    def __init__(self, config: Config, model: nn.Module | Iterable[Any], params: Iterable[nn.Parameter] | None) -> None:
        self.config = weakref.proxy(config)  # a cycle would keep hooks and a thread until Python collects garbage
        self.trained = TrainedModel(model, params)
        parameters, find_roots = self.trained.parameters, self.trained.find_roots
        self.ranks = Ranks(config.communicator or communicator_of(model, parameters, find_roots))
        self.fisher = None if isinstance(config.fisher, str) else config.fisher
        self.progress, self.stopwatch = Progress(), Stopwatch()
        self.averaging = Averaging(
            config.factor_dtype,
            self.stopwatch,
            self.ranks,
            summed=config.loss_average is None,
            sampled=self.fisher is not None,
        )
        self.refresher = Refresher(config.solver, config.inv_dtype, self.stopwatch, self.ranks)
        self.signs = GameSigns()
        self.steering = Steering(self.ranks, self.signs)
        self.sightings = Sightings()
        self.closed = False
        self._find_layers()
        self.trained.warn_if_uncovered(config.skip_layers)
        self._restore()

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the layers that are preconditioned."""
        return self.trained.blocks

    @property
    def layers(self) -> list[KroneckerLayer]:
        """The layers that are preconditioned."""
        return [block.layer for block in self.trained.blocks]

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks."""
        return self.ranks.comm

    # The model ------------------------------------------------------------------------------------------------------

    def _find_layers(self) -> None:
        """Finds the layers of the trained parameters, and assigns them to ranks; known layers keep their blocks."""
        self.trained.find_blocks(self.config, self.comm)
        self.check_scaling()
        self._assign()

    def check_scaling(self) -> None:
        """Raises ValueError if layers are split over ranks and the scaling needs whole ones."""
        scaling = self.config.scaling
        if not traits_of(scaling).by_layer and any(layer.is_shard for layer in self.layers):
            raise ValueError(
                f"scaling={scaling!r} looks at all layers at once, of which a rank has only shards: ranks would "
                "scale weights that all of them have differently. Take scaling='graft', 'unit' or 'orthogonal', set "
                "by_layer = True on a scaling of your own that treats each layer alone, or leave split layers out by "
                "skip_layers"
            )

    @property
    def loss_terms(self) -> LossTerms:
        """The object that counts the terms over which the loss takes its mean."""
        class_dim = -1 if self.fisher is None else self.fisher.class_dim
        return LossTerms(self.config.loss_average, self.config.batch_dim, class_dim)

    def _restore(self) -> None:
        """Builds the stages that copies and pickles leave out, and registers the hooks."""
        config = self.config
        self.preconditioner = Preconditioner(config, self.stopwatch, self.ranks)
        self.capture = Capture(
            self.layers,
            self.trained.roots,
            loss_terms=self.loss_terms,
            fisher=self.fisher,
            dtype=torch.promote_types(config.factor_dtype, torch.float32),
            stopwatch=self.stopwatch,
            signs=self.signs,
        )
        if self.closed:
            self.capture.close()
        self.prepare_statistics()

    def _rebuild(self) -> None:
        """Rebuilds what depends on the layers, after these have changed."""
        if not self.ranks.alone:  # the known layers may have other workers now
            self.refresher.invalidate()
        self.capture.close()
        self._restore()

    def extend(self, params: Iterable[Any]) -> None:
        """Adds trained parameters, whose layers start without statistics."""
        allocated = any(block.state for block in self.blocks)
        self.trained.extend(params)
        self._find_layers()
        if allocated:  # now, because a state may be saved before the next step allocates them
            self.allocate([block for block in self.blocks if not block.state])
        self.sightings.note_lost()
        self._rebuild()

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes sure that the parameters an optimizer steps on are the model's own; see :mod:`~kfac_optim.coverage`.

        A closed engine does nothing. If a layer's parameters were replaced in both the model and the optimizer, the
        layer goes on with the new ones. A layer whose weight is now computed from other parameters (parametrizations,
        pruning) is declined, with a warning.

        Raises:
            RuntimeError: If the parameters are not, or no longer, weights of the model, if they are no longer matrices,
                or if a layer's parameters were replaced in the model alone.
        """
        if self.closed or not self.trained.follow(parameters, first=not self.progress.taken):
            return
        before, layers = self.blocks, self.layers
        self._find_layers()
        self.preconditioner.clear()
        if before == self.blocks and layers == self.layers:
            return
        self._rebuild()
        self.prepare_statistics(collects=False)  # what this step has captured went with the old hooks
        self.trained.warn_of_declined(before)

    def follow_model(self) -> None:
        """:meth:`follow` for an engine without an optimizer, if the model was changed, or moved before a first step."""
        trained = self.trained
        if not trained.is_intact or (not self.progress.taken and trained.has_moved):
            self.follow(trained.present_parameters())

    def allocate(self, blocks: Iterable[Block]) -> None:
        """Allocates the factors of layers that train and have none yet."""
        spreads = self.config.may_spread
        for block in blocks:
            if block.needs_storage:
                block.allocate(self.config.factor_dtype, self.comm.rank, spreads=spreads)

    def close(self) -> None:
        """Removes all hooks and drops what directions are made of."""
        self.capture.close()
        self.signs.note_left(None)
        self.closed = True
        for block in self.blocks:
            block.drop()
        self.preconditioner.clear()
        self.refresher.close()

    # The coming step ------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """How the base optimizer's step is changed: the step in progress or, between steps, the coming one."""
        return Plan() if self.closed else self.steering.plan(self.blocks, self.progress.step, self.config)

    @property
    def sits_out(self) -> bool:
        """Whether steps are left to the base optimizer because networks seem to train against each other."""
        return self.steering.sits_out(self.config)

    def prepare_statistics(self, *, collects: bool = True) -> None:
        """Decides, before the forward pass of the coming step, whether it collects statistics, if ``collects``."""
        step, config, collects = self.progress.step, self.config, collects and not self.closed
        self.capture.prepare(
            step=step,
            rank=self.comm.rank,
            left_out=self.ranks.left_out,
            enabled=collects and self.refresher.collects(config, step, self.progress.last_statistics),
            fraction=config.at("factor_batch_fraction", step),
            grad_scaler=config.grad_scaler,
        )

    def restart_for_new_layers(self) -> None:
        """If layers were unfrozen or added, has the next step collect statistics and refresh, as the first step did.

        This depends on which layers train, which is the same on all ranks, and not on which of them a rank has seen.
        """
        if self.refresher.in_progress is not None or not self.refresher.has_begun:
            return
        changed = [block for block in self.blocks if block.layer.weight.requires_grad != block.learned("trains")]
        for block in changed:
            block.note_trains()
        # Layers that had trained before go on with their decompositions.
        if not all(block.has_direction for block in changed if block.layer.weight.requires_grad):
            self.progress.collect_next_step()
            self.refresher.pace.forget()
            self.refresher.refresh_next_step()

    def recover(self) -> None:
        """Makes the stages usable after an exception anywhere in a step, with what a saved state would hold.

        The state holds the factors behind the decompositions, so the next step makes those again. Several ranks cannot
        go on after an exception on one of them; there, only what this rank keeps to itself is put in order.
        """
        blocks, alone, progress = self.blocks, self.ranks.alone, self.progress
        self.steering.watch.note(())
        self.steering.game.recover()
        self.sightings.note_lost()
        if any(block.state for block in blocks):  # a state with the factors of some layers is not whole
            self.allocate(blocks)
        if alone:
            self.averaging.clear()
            for block in blocks:
                block.drop()
                block.note_rows(0.0)
            self.refresher.invalidate()
        if self.capture.layers != self.layers:
            self._rebuild()
        # The step was not taken, so its statistics are due again. Ranks that have seen no layer all get that error.
        if progress.last_statistics == progress.step and (alone or self.sightings.blind):
            progress.collect_next_step()
        self.prepare_statistics()

    # The ranks ------------------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Decides which ranks decompose and precondition each layer."""
        self.ranks.assign(self.config.assignment, self.blocks, self.config.solver, self.config.inv_dtype)
        self.refresher.reschedule()

    def _join(self, comm: Communicator) -> None:
        """Goes on with the ranks of another communicator."""
        if self.ranks.change(comm, self.blocks):
            self._assign()
            self.prepare_statistics()
            for block in self.blocks:
                block.take_factors(block.state, comm.rank)
            self.refresher.invalidate()

    def prepare_ranks(self) -> None:
        """Joins the ranks if torch.distributed was initialised late, and makes the groups that a step needs."""
        refuse_cuda_graphs()
        late_communicator = self.ranks.late_communicator()
        if late_communicator is not None:
            if self.progress.taken and any(block.has_data() for block in self.blocks):  # not from a state
                raise RuntimeError(
                    "torch.distributed was initialised after the first steps of this optimizer, in which each rank has "
                    "learned on its own: build the optimizer after init_process_group() and load the state_dict(), or "
                    "give communicator=LocalCommunicator() if the ranks train apart"
                )
            self._join(late_communicator)
        if self.trained.parameters:  # the model may have moved since it was built
            self.comm.use_device(next(iter(self.trained.parameters)).device)
        if not self.ranks.are_prepared:
            if not self.ranks.given:
                require_all_in_wrapper([p for layer in self.layers for p in layer.parameters], self.comm)
            self.compare(weights=_first_weights(self.layers))
            self.ranks.prepare(self.blocks, self.config.factor_dtype)

    def compare_if_due(self, *, finite: bool) -> None:
        """Compares the ranks if they exchange something in this step (then a collective).

        ``finite``: whether the step is taken.
        """
        if self.ranks.alone:
            return
        step, refresher = self.ranks.common_step(self.progress.step, skipped=not finite), self.refresher
        pools = refresher.collects(self.config, step, self.progress.last_statistics)
        if pools or refresher.communicates(self.config, step, may_begin=not self.sits_out):
            self.compare()

    def compare(self, **more: Any) -> None:
        """Compares the ranks; learned numbers that rounding made different are taken from rank 0 (a collective).

        ``more``: further numbers that may differ, but only by rounding.
        """
        learned = [name for part in self.steering.parts for name in part.COUNTERS]
        found = self.ranks.check({**self.built(), **more}, {*learned, "reach", "fell", *more})
        self.steering.take_over(found)
        for block, reach in zip(self.blocks, found.get("reach", ()), strict=False):
            if reach != block.reach:
                block.set_learned(reach=reach)

    def built(self) -> dict[str, Any]:
        """The values that have to be the same on all ranks, by name."""
        config, step = self.config, self.progress.step
        return {
            **self.counters(),
            **{name: compared(getattr(config, name), step) for name in CHANGEABLE if name != "grad_scaler"},
            "layers": [block.layer.name for block in self.blocks],
            "reach": [block.reach for block in self.blocks],
            "fell": [block.learned("fell") for block in self.blocks],
            "constrained": [block.is_constrained for block in self.blocks],
            "factors and workers": [(block.specs, block.workers) for block in self.blocks],
            "solver": compared(config.solver, step),
            "factor_dtype": config.factor_dtype,
            "inv_dtype": config.inv_dtype,
            "comm_dtype": self.comm.comm_dtype,
        }

    def counters(self) -> dict[str, float]:
        """The counters of all stages; -1 means never."""
        return {name: value for part in self.counted for name, value in part.counters().items()}

    @property
    def counted(self) -> list[Counted]:
        """The stages, and parts of them, that have counters."""
        return [self.progress, self.averaging, self.refresher, self.refresher.pace, *self.steering.parts]

    # Copies and pickles ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """What belongs to the process, or can be made from the rest, stays behind."""
        return {**self.__dict__, "config": None, "capture": None, "preconditioner": None}

    def finish_copy(self, config: Config, *, joins: bool) -> None:
        """Makes what a copy or a pickle lacks; ``joins``: whether it goes on among the ranks of this process."""
        self.config = weakref.proxy(config)

        def finish() -> None:
            self._restore()
            if joins:
                self._join(self.ranks.after_unpickling())

        # A model that holds its optimizer is copied along with it, and cannot take hooks before it is complete.
        when_whole(self.trained.roots, finish)


class Staged(Protocol):
    """An engine, as functions beside it know it."""

    @property
    def stages(self) -> Stages:
        """Its stages."""


def _first_weights(layers: Iterable[KroneckerLayer]) -> list[float]:
    """The norm of a few weights of each layer that is not sharded; it differs between ranks that train apart."""
    weights = [layer.weight.detach() for layer in layers if not is_sharded(layer.weight)]
    sizes = [torch.linalg.vector_norm(weight.flatten()[:_FEW].float()) for weight in weights]
    return torch.stack([size.to(sizes[0].device) for size in sizes]).tolist() if sizes else []
