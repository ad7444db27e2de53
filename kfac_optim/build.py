"""How an engine is built: the layers of a model, the ranks, and the stages of the pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from .averages import Averaging
from .blocks import Block, assign
from .capture import Capture, LossTerms
from .config import options, refuse_unknown
from .coverage import check_parameters, find_blocks, parameters_of, replacements
from .diagnostics import StageTimes
from .distributed import Assignment, Communicator, agreement, make_communicator, refuse_flattened
from .layers import LayerOptions, owners_of, unwrap
from .preconditioning import Preconditioner
from .refresh import Refresher
from .views import ViewedEngine

__all__ = ["BuiltEngine", "owning_engine"]

_ENGINES: weakref.WeakSet[BuiltEngine] = weakref.WeakSet()


class BuiltEngine(ViewedEngine):
    """The part of the engine that builds the stages, and builds them anew when the model or the ranks change."""

    def __init__(
        self, model: nn.Module | Iterable[Any], params: Iterable[nn.Parameter] | None = None, **given: Any
    ) -> None:
        refuse_unknown(type(self).__name__, given, list(options()))
        super().__init__(**given)
        self._communicator_given = self.communicator is not None
        self.comm = make_communicator() if self.communicator is None else self.communicator
        # Without its wrapper, which may refuse to be copied (DDP in a group of its own).
        self.model = unwrap(model) if isinstance(model, nn.Module) else None
        self._trained = dict.fromkeys(parameters_of(model if params is None else params))
        self.step_count = 0
        self.skipped_steps = 0
        self.last_statistics: int | None = None
        self._unseen_steps = 0  # statistics steps in a row with gradients, but no backward pass that was seen
        self._steps_taken = 0  # by this object, not by the run that it resumes
        self._first_step_seen = False
        self._prepared_for: Assignment | None = None  # whose groups of ranks exist
        self._is_noop = False  # the step in progress changes nothing; see update()
        self._closed = False
        self._training: set[nn.Parameter] | None = None  # the weights that required gradients in the last step
        self._owner: weakref.ref[Any] | None = None
        self._stages = StageTimes()
        self._averaging = Averaging(
            self.factor_dtype, summed=self.loss_average is None, sampled=self._sampled_fisher is not None
        )
        self._refresher = Refresher(self.solver, self.inv_dtype, self._stages)  # type: ignore[arg-type]
        self._blocks: list[Block] = []
        self._find_layers()
        self._restore()
        self._end_construction()

    def _find_layers(self) -> None:
        """Finds the layers of the trained parameters, and who works on them; known ones keep their identity."""
        self._roots = [self.model] if self.model is not None else owners_of(self._trained)
        refuse_flattened(self._roots)
        layer_options = LayerOptions(
            weight_sharing=self.weight_sharing,  # type: ignore[arg-type]
            batch_dim=self.batch_dim,
            max_factor_dim=self.max_factor_dim,
            skip_layers=tuple(self.skip_layers),
            trainable=self._trained,
        )
        self._blocks, self.uncovered = find_blocks(self._trained, self._roots, layer_options, self._blocks)
        self._assign()

    def _assign(self) -> None:
        """Decides who decomposes and who preconditions what."""
        self.work = assign(self.assignment, self._blocks, self.comm, self.solver, self.inv_dtype)  # type: ignore[arg-type]
        self.comm.check_groups(self.work.groups(self.comm.world_size))
        if self._blocks:
            self.comm.use_device(self._blocks[0].layer.weight.device)
        self._refresher.replan(self.comm.rank)

    def _restore(self) -> None:
        """Builds what a copy or a pickle leaves behind, and puts the hooks on."""
        self._owner = None
        self._preconditioner = Preconditioner(self.solver, self.inv_dtype, self._stages)  # type: ignore[arg-type]
        fisher = self._sampled_fisher
        self._capture = Capture(
            self.layers,
            self._roots,
            loss_terms=LossTerms(self.loss_average, self.batch_dim, getattr(fisher, "dim", -1)),  # type: ignore[arg-type]
            fisher=fisher,
            packers=[tuple(spec.pack for spec in block.specs) for block in self._blocks],
            dtype=torch.promote_types(self.factor_dtype, torch.float32),
            stage=self._stages.stage,
            rank=self.comm.rank,
        )
        self._plan_statistics()
        _ENGINES.add(self)

    @property
    def _sampled_fisher(self) -> Any:
        """The distribution that targets are sampled from; None for the empirical Fisher."""
        return None if isinstance(self.fisher, str) else self.fisher

    def _join_ranks(self, comm: Communicator) -> None:
        """Goes on among other ranks than before."""
        moved = (comm.rank, comm.world_size) != (self.comm.rank, self.comm.world_size)
        self.comm = comm
        if moved:
            self._capture.change_rank(comm.rank)
            self._assign()
            self._refresher.invalidate()

    def extend(self, params: Iterable[Any]) -> None:
        """Takes more trained parameters (``add_param_group``); their layers start without statistics."""
        self._trained.update(dict.fromkeys(parameters_of(params)))
        self._find_layers()
        if self.comm.world_size > 1:  # other ranks work for the known layers now
            self._refresher.invalidate()
        self._capture.close()
        owner = self._owner
        self._restore()
        self._owner = owner

    def require(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes sure that the parameters an optimizer steps on are the model's own; see :mod:`~kfac_optim.coverage`.

        Before the first step, layers go on with the parameters that a framework has put in the place of theirs.

        Raises:
            RuntimeError: If the parameters are no weights of the model, or no matrices any more.
        """
        known = all(p in self._trained for p in parameters)
        if self._first_step_seen and known:
            return
        new = {} if self._first_step_seen else replacements(self._trained, self._roots, parameters)
        if new:
            self._trained = dict.fromkeys(parameters)
            self.uncovered = {new[p]: reason for p, reason in self.uncovered.items()}
            for layer in self.layers:
                layer.replace_parameters(new)
        check_parameters(self._trained, self._roots, self._blocks, parameters)

    @property
    def owner(self) -> Any:
        """The optimizer of this package that conducts the engine; None for an engine that stands alone."""
        return None if self._owner is None else self._owner()

    def belong_to(self, optimizer: Any) -> None:
        """Takes an optimizer for its owner; it is held weakly."""
        self._owner = weakref.ref(optimizer)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Removes every hook; from then on the optimizer is its base class. With several ranks, on all of them."""
        self._capture.close()
        self._closed = True
        for block in self._blocks:
            block.drop()
        self._preconditioner.clear()
        self._refresher.close()
        _ENGINES.discard(self)

    def _prepare_ranks(self) -> None:
        """Before anything is sent: torch.distributed may be up by now, and sub-groups have to exist."""
        first, self._first_step_seen = not self._first_step_seen, True
        if first and not self._communicator_given and self.comm.world_size == 1:
            self._join_ranks(make_communicator())
        if self.comm.world_size > 1 and self._prepared_for is not self.work:
            agreement.check(self.comm, repr(self._built()))
            self.comm.prepare(self.work.groups(self.comm.world_size))
            self._prepared_for = self.work

    def _built(self) -> tuple[Any, ...]:
        """What has to be the same on all ranks."""
        # Not the repr of an object of the user's, which may have its address in it.
        settings = [getattr(self.solver, f.name) for f in fields(self.solver)] if is_dataclass(self.solver) else ()
        return (
            [(block.layer.name, block.specs, block.workers) for block in self._blocks],
            (type(self.solver).__qualname__, *settings),
            (self.factor_dtype, self.inv_dtype, self.comm.comm_dtype),
            self.counters(),
        )

    def _plan_statistics(self) -> None:
        """Decides what the coming step captures."""
        raise NotImplementedError


def owning_engine(params: Iterable[nn.Parameter]) -> Any:
    """The live engine of an optimizer over exactly these parameters, if there is one."""
    wanted = set(params)
    return next((engine for engine in _ENGINES if engine.owner is not None and set(engine._trained) == wanted), None)
