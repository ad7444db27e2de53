"""How an engine is built from the layers of a model, the ranks and the stages of the pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..averages import Averaging
from ..blocks import Block
from ..capture import Capture, Fisher, GameSigns, LossTerms
from ..common.counters import Counter, saved_values
from ..common.machines import refuse_cuda_graphs
from ..common.stopwatch import Stopwatch
from ..config import Config, compared, compared_options, options, refuse_unknown
from ..coverage import TrainedModel
from ..distributed import Communicator, communicator_of, is_sharded
from ..layers import KroneckerLayer
from ..placement import Ranks
from ..preconditioning import Preconditioner
from ..refresh import Pace, Refresher
from ..scaling import traits_of
from ..schedules import due, growing
from ..sightings import Sightings
from ..steering import Steering

__all__ = ["COUNTERS", "OWN_COUNTERS", "BuiltEngine"]

OWN_COUNTERS = {
    "step": Counter(0, attribute="step_count"),
    "last_statistics": Counter(None, attribute="last_statistics"),
    "skipped_steps": Counter(0, attribute="skipped_steps"),
}
COUNTERS = {**OWN_COUNTERS, **Averaging.COUNTERS, **Refresher.COUNTERS, **Pace.COUNTERS, **Steering.COUNTERS}
_FEW = 16  # how many weights of a layer are compared before the first step


class BuiltEngine(Config):
    """The part of the engine that builds the stages, and rebuilds them when the model or the ranks change."""

    def __init__(
        self, model: nn.Module | Iterable[Any], params: Iterable[nn.Parameter] | None = None, **given: Any
    ) -> None:
        refuse_unknown(type(self).__name__, given, list(options()))
        super().__init__(**given)
        self.ranks = Ranks(self.communicator or communicator_of(model))
        self.trained = TrainedModel(model, params)
        self.step_count = 0
        self.skipped_steps = 0
        self.last_statistics: int | None = None
        self._steps_taken = 0  # without those of the run that this one resumes
        self._lacks_counters = False  # whether factors came without them, see adopt_states()
        self._is_noop = False  # the step in progress changes nothing; see update()
        self._closed = False
        self._owner: weakref.ref[Any] | None = None
        self._stopwatch = Stopwatch()
        self._averaging = Averaging(
            self.factor_dtype,
            self._stopwatch,
            summed=self.loss_average is None,
            sampled=self._sampled_fisher is not None,
        )
        self._refresher = Refresher(self.solver, self.inv_dtype, self._stopwatch)
        self._signs = GameSigns()  # that networks train against each other, seen between steps
        self._steering = Steering(self.ranks, self._signs)
        self._sightings = Sightings()
        self._find_layers()
        self.trained.warn_if_uncovered(self.skip_layers)
        self._restore()
        self._end_construction()

    @property
    def layers(self) -> list[KroneckerLayer]:
        """The layers that are preconditioned."""
        return [block.layer for block in self.trained.blocks]

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks."""
        return self.ranks.comm

    def refresh_interval(self, step: int) -> int:
        """Steps between refreshes at ``step``; more than scheduled if the schedule limits their share of the work."""
        return self._refresher.pace.interval(self, step)

    def statistics_interval(self, step: int) -> int:
        """Steps between statistics updates at ``step``."""
        given = self.at("factor_update_steps", step)
        if given is not None:
            return int(given)
        interval = self.refresh_interval(step)
        return max(1, interval // 2) if isinstance(self.inv_update_steps, growing) else min(10, interval)

    def spread_at(self, step: int) -> int:
        """The number of steps over which the work of a refresh that starts at ``step`` is spread."""
        spread = self.at("spread", step)
        return int(self.refresh_interval(step) // 10 if spread is None else spread)

    def _find_layers(self) -> None:
        """Finds the layers of the trained parameters, and assigns them to ranks; known layers keep their blocks."""
        self.trained.find_blocks(self, self.comm)
        self._check_scaling()
        self._assign()

    def _check_scaling(self) -> None:
        """Raises ValueError if layers are split over ranks and the scaling needs whole ones."""
        if not traits_of(self.scaling).by_layer and any(layer.is_shard for layer in self.layers):
            raise ValueError(
                f"scaling={self.scaling!r} looks at all layers at once, of which a rank has only shards: ranks would "
                "scale weights that all of them have differently. Take scaling='graft', 'unit' or 'orthogonal', set "
                "by_layer = True on a scaling of your own that treats each layer alone, or leave split layers out by "
                "skip_layers"
            )

    def _assign(self) -> None:
        """Decides which ranks decompose and precondition each layer."""
        self.ranks.assign(self.assignment, self.trained.blocks, self.solver, self.inv_dtype)
        self._refresher.reschedule(self.comm.rank)

    def _restore(self) -> None:
        """Builds the stages that copies and pickles leave out, and registers the hooks."""
        self._preconditioner = Preconditioner(self.solver, self.inv_dtype, self._stopwatch)
        self._capture = Capture(
            self.layers,
            self.trained.roots,
            loss_terms=self.loss_terms,
            fisher=self._sampled_fisher,
            dtype=torch.promote_types(self.factor_dtype, torch.float32),
            stage=self._stopwatch.stage,
            signs=self._signs,
        )
        if self._closed:
            self._capture.close()
        self._prepare_statistics()

    @property
    def _sampled_fisher(self) -> Fisher | None:
        """The distribution that targets are sampled from; None for the empirical Fisher."""
        return None if isinstance(self.fisher, str) else self.fisher

    @property
    def loss_terms(self) -> LossTerms:
        """The object that counts the terms over which the loss takes its mean."""
        fisher = self._sampled_fisher
        return LossTerms(self.loss_average, self.batch_dim, -1 if fisher is None else fisher.class_dim)

    def _join_ranks(self, comm: Communicator) -> None:
        """Goes on with the ranks of another communicator."""
        if self.ranks.change(comm, self.trained.blocks):
            self._assign()
            self._prepare_statistics()
            for block in self.trained.blocks:
                block.take_factors(block.state, comm.rank)
            self._refresher.invalidate()

    def extend(self, params: Iterable[Any]) -> None:
        """Adds trained parameters (``add_param_group``), whose layers start without statistics."""
        have_room = any(block.state for block in self.trained.blocks)
        self.trained.extend(params)
        self._find_layers()
        if have_room:  # now, because a state may be saved before the next step makes room
            self.make_room([block for block in self.trained.blocks if not block.state])
        self._sightings.note_lost()
        self._rebuild_stages()

    def make_room(self, blocks: Iterable[Block]) -> None:
        """Makes room for the factors of layers that train and have no room yet."""
        spreads = self.may_spread
        for block in blocks:
            if block.needs_room:
                block.make_room(self.factor_dtype, self.comm.rank, spreads=spreads)

    def _rebuild_stages(self) -> None:
        """Rebuilds what depends on the layers, after these have changed."""
        if not self.ranks.alone:  # the known layers may have other workers now
            self._refresher.invalidate()
        self._capture.close()
        self._restore()

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes sure that the parameters an optimizer steps on are the model's own; see :mod:`~kfac_optim.coverage`.

        A closed engine does nothing. If a layer's parameters were replaced in both the model and the optimizer, the
        layer goes on with the new ones. A layer whose weight is now computed from other parameters (parametrizations,
        pruning) is declined, with a warning.

        Raises:
            RuntimeError: If the parameters are not, or no longer, weights of the model, if they are no longer matrices,
                or if a layer's parameters were replaced in the model alone.
        """
        if not self._closed and self.trained.follow(parameters, first=not self._steps_taken):
            self._renew_layers()

    def _renew_layers(self) -> None:
        """Finds the layers anew, after parameters were replaced or moved inside the model."""
        before, layers = self.trained.blocks, self.layers
        self._find_layers()
        self._preconditioner.clear()
        if before == self.trained.blocks and layers == self.layers:
            return
        self._rebuild_stages()
        self._prepare_statistics(collects=False)  # what this step has captured went with the old hooks
        self.trained.warn_of_declined(before)

    @property
    def owner(self) -> Any:
        """The optimizer of this package that calls the engine; None for an engine used by itself."""
        return None if self._owner is None else self._owner()

    def belong_to(self, optimizer: Any) -> None:
        """Makes an optimizer the owner of the engine, which refers to it weakly."""
        self._owner = weakref.ref(optimizer)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Removes all hooks, which leaves the plain base optimizer. With several ranks, call it on all of them."""
        self._capture.close()
        self._signs.note_left(None)
        self._closed = True
        for block in self.trained.blocks:
            block.drop()
        self._preconditioner.clear()
        self._refresher.close()

    def _prepare_ranks(self) -> None:
        """Joins the ranks if torch.distributed was initialised late, and makes the groups that a step needs."""
        refuse_cuda_graphs()
        late_communicator = self.ranks.late_communicator()
        if late_communicator is not None:
            if self._steps_taken and any(block.has_data() for block in self.trained.blocks):  # not from a state
                raise RuntimeError(
                    "torch.distributed was initialised after the first steps of this optimizer, in which each rank has "
                    "learned on its own: build the optimizer after init_process_group() and load the state_dict(), or "
                    "give communicator=LocalCommunicator() if the ranks train apart"
                )
            self._join_ranks(late_communicator)
        if self.trained.parameters:  # the model may have moved since it was built
            self.comm.use_device(next(iter(self.trained.parameters)).device)
        self.ranks.prepare(
            self.trained.blocks, self.factor_dtype, lambda: self._compare(weights=_first_weights(self.layers))
        )

    def stage_counters(self) -> dict[str, float]:
        """The counters of the engine and of its stages; -1 means never."""
        return {
            **saved_values(self, OWN_COUNTERS),
            **self._averaging.counters(),
            **self._refresher.counters(),
            **self._steering.counters(),
        }

    def _compare(self, **more: Any) -> None:
        """Compares the ranks; learned numbers that rounding made different are taken from rank 0 (a collective).

        ``more``: further numbers that may differ, but only by rounding.
        """
        found = self.ranks.check({**self._built(), **more}, {*Steering.COUNTERS, "reach", *more})
        self._steering.take_over(found)
        for block, reach in zip(self.trained.blocks, found.get("reach", ()), strict=False):
            if reach != block.reach:
                block.set_reach(reach)

    def _built(self) -> dict[str, Any]:
        """The values that have to be the same on all ranks, by name."""
        return {
            **self.stage_counters(),
            "reach": [block.reach for block in self.trained.blocks],
            "constrained": [block.is_constrained for block in self.trained.blocks],
            **compared_options(self, self.step_count),
            "layers": [block.layer.name for block in self.trained.blocks],
            "factors and workers": [(block.specs, block.workers) for block in self.trained.blocks],
            "solver": compared(self.solver, self.step_count),
            "factor_dtype": self.factor_dtype,
            "inv_dtype": self.inv_dtype,
            "comm_dtype": self.comm.comm_dtype,
        }

    def _prepare_statistics(self, *, collects: bool = True) -> None:
        """Decides, before the forward pass of the coming step, whether it collects statistics, if ``collects``."""
        step, collects = self.step_count, collects and not self._closed
        self._capture.prepare(
            step=step,
            rank=self.comm.rank,
            left_out=self.ranks.left_out,
            enabled=collects and due(self.statistics_interval(step), step, self.last_statistics),
            fraction=self.at("factor_batch_fraction", step),
            grad_scaler=self.grad_scaler,
        )

    def _option_changed(self) -> None:
        self._check_scaling()
        self._prepare_statistics()


def _first_weights(layers: Iterable[KroneckerLayer]) -> list[float]:
    """The norm of a few weights of each layer that is not sharded; it differs between ranks that train apart."""
    weights = [layer.weight.detach() for layer in layers if not is_sharded(layer.weight)]
    sizes = [torch.linalg.vector_norm(weight.flatten()[:_FEW].float()) for weight in weights]
    return torch.stack([size.to(sizes[0].device) for size in sizes]).tolist() if sizes else []
