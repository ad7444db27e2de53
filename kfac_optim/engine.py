"""The engine itself: construction, the conduct of a step, state, copies and views."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import diagnostics
from .averages import Averaging
from .blocks import SIDES, Block, assign, groups_of
from .capture import Capture, Fisher, LossTerms
from .config import Options
from .coverage import find_blocks, parameters_of
from .distributed import (
    AssignmentStrategy,
    Communicator,
    LocalCommunicator,
    agreement,
    full_gradient,
    join_hook,
    largest_entry,
    make_communicator,
    notify_join_context,
    refuse_flattened,
    set_full_gradient_,
    share_gradients,
)
from .layers import KroneckerLayer, LayerOptions, owners_of, unwrap
from .preconditioning import Lr, Preconditioner
from .refresh import Refresh, Refresher
from .scaling import KLClip, Scaling
from .schedules import Schedule, due, growing
from .solvers import Solver, is_iterated
from .state import check_states, copy_state, make_room

__all__ = ["CurvatureEngine", "memory_estimate", "owning_engine"]

# Attributes that are saved as they are: at which step something was done last (None: never), and how often.
_STEPS = ("last_statistics", "last_refresh", "frozen_at")
_COUNTS = ("refreshes", "skipped_steps", "skipped_batches", "failed_decompositions")

_ENGINES: weakref.WeakSet[CurvatureEngine] = weakref.WeakSet()


class CurvatureEngine(Options):
    """Everything about curvature for one model; ``optimizer.curvature`` of the optimizers of this package.

    Args:
        model: The module to watch, raw or wrapped (DDP, torch.compile), or the parameters (or parameter groups) whose
            owning modules are then found by identity.
        params: The parameters that are trained; default: all of the model's. Layers whose weight is not among them get
            no hooks.
        damping: gamma of eqs. 9-13, > 0; float or callable(step).
        relative_damping: True: gamma is ``damping`` times the mean eigenvalue of the layer's ``A (x) G``.
        factor_decay: xi of eqs. 14-15, the weight of the past in the running averages, in [0, 1); float or callable.
        factor_update_steps: Steps between statistics updates, >= 1; int or callable. None (default): 10, or a fifth of
            the interval where ``inv_update_steps`` is :class:`~kfac_optim.growing`.
        factor_batch_fraction: The share of a batch's examples that statistics are collected from, evenly spread over
            the batch, in (0, 1]; float or callable. 1 (default): all, as in eqs. 14-15. Fewer are as unbiased and
            noisier, and cost less; norm layers always see all.
        inv_update_steps: Steps between decompositions ("kfac-update-freq" of the paper), >= 1; int or callable.
        scaling: "kl_clip" (eq. 16), "unit", "graft", None, or an object with ``multipliers(directions, step)``.
        kl_clip: kappa of eq. 16 for scaling="kl_clip", > 0; float or callable.
        solver: "eigen" (eqs. 11-13), "inverse" (eqs. 8-10), or an object with the protocol of
            :class:`~kfac_optim.solvers.Solver`.
        fisher: "empirical" (default: the gradients of the training loss itself), or, with targets sampled from the
            model's own output distribution at the price of one more backward pass on statistics steps, "categorical",
            "bernoulli", "gaussian" or an object with ``sample_gradient(output, generator)``.
        loss_average: Over what the loss takes its mean: "batch" (default), "batch+sequence" (token-mean language
            models), "elements" (MSELoss), None (a sum).
        loss_terms: The number of averaged loss terms itself, where ``loss_average`` can't tell (ignored targets, masked
            tokens): an int >= 1 or callable(inputs, output) -> int. ``inputs`` is the tuple of the model's positional
            arguments, or the dict of its keyword arguments if there are none.
        batch_dim: Dimension of the examples in the model's output and in the layers' inputs: 0 (default), or 1 for
            sequence-first models.
        weight_sharing: "expand" (default) or "reduce" over shared positions, or callable(name, module) returning one.
        skip_layers: Regular expressions; layers whose name contains a match train by the base rule.
        max_factor_dim: Larger factors are kept diagonal; int or None for no limit.
        spread: Steps over which a refresh is worked off, >= 0; int or callable. 0: at once. None (default): a tenth of
            the interval of ``inv_update_steps``, at once where that is less than 10. The first refresh is always at
            once.
        assignment: "layer-wise", "factor-wise" (default), "kaisa", or an object with ``assign(costs, world_size)``.
        process_group: Processes that train together; default: torch.distributed's default group, if initialised.
        communicator: Replaces the process group.
        grad_scaler: The ``torch.amp.GradScaler`` of fp16 autocast training; may be set later.
        skip_nonfinite: True (default): a step whose final gradients are not all finite is not taken, and counted.
        output_fn: Model output -> tensor of the sampled Fisher; default: the tensor itself, or ``.logits``.
        seed: Of the sampled targets.
        factor_dtype: Storage of the factors.
        inv_dtype: Storage of the decompositions.

    Raises:
        TypeError: If an argument is of the wrong kind, or the model is wrapped in torch's first FSDP.
        ValueError: If a value is out of range, or no module owns the parameters.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        params: Iterable[nn.Parameter] | None = None,
        *,
        damping: Schedule[float] = 0.03,
        relative_damping: bool = False,
        factor_decay: Schedule[float] = 0.95,
        factor_update_steps: Schedule[int] | None = None,
        factor_batch_fraction: Schedule[float] = 1.0,
        inv_update_steps: Schedule[int] = 100,
        scaling: Scaling | str | None = "kl_clip",
        kl_clip: Schedule[float] = 1e-3,
        solver: Solver | str = "eigen",
        fisher: Fisher | str = "empirical",
        loss_average: str | None = "batch",
        loss_terms: int | Callable[[Any, Any], int] | None = None,
        batch_dim: int = 0,
        weight_sharing: str | Callable[[str, nn.Module], str] = "expand",
        skip_layers: Sequence[str] = (),
        max_factor_dim: int | None = 8192,
        spread: Schedule[int] | None = None,
        assignment: AssignmentStrategy | str = "factor-wise",
        process_group: Any = None,
        communicator: Communicator | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        skip_nonfinite: bool = True,
        output_fn: Callable[[Any], Tensor] | None = None,
        seed: int = 0,
        factor_dtype: torch.dtype = torch.float32,
        inv_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(locals())
        self.comm = make_communicator(process_group) if communicator is None else communicator
        if not isinstance(self.comm, Communicator):
            raise TypeError(f"communicator={communicator!r}: must be a kfac_optim.Communicator")
        # Without its wrapper, which may refuse to be copied (DDP in a group of its own).
        self.model = unwrap(model) if isinstance(model, nn.Module) else None
        self._trained = dict.fromkeys(parameters_of(model if params is None else params))
        self._own_steps = 0  # steps taken by this object, not by the run that it resumes
        self._met = False  # a first step has been taken
        self._default_ranks = communicator is None and process_group is None
        self._stages = diagnostics.StageTimes()
        self._averaging = Averaging(
            self.factor_dtype,
            summed=self.loss_average is None and self.loss_terms is None,
            sampled=not isinstance(self.fisher, str),
        )
        self._refresh: Refresh | None = None  # in progress
        self._hire()
        self._blocks: list[Block] = []
        self._find_layers()

        self._owner: weakref.ref[Any] | None = None
        self.last_statistics: int | None = None
        self.last_refresh: int | None = None
        self._training: set[nn.Parameter] | None = None  # the weights that did, when last looked
        self.frozen_at: int | None = None  # the step whose factors are in use
        self.refreshes = 0  # begun so far
        self.skipped_steps = 0
        self.skipped_batches = 0
        self.failed_decompositions = 0
        self._stale = False  # decompositions have to be rebuilt
        self._warned: set[str] = set()
        self._dry = self._closed = False
        self._attach()
        self._built = True
        _ENGINES.add(self)

    # Construction ---------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[KroneckerLayer]:
        """The layers that are preconditioned."""
        return [block.layer for block in self._blocks]

    def _hire(self) -> None:
        """Those who work for the engine, without a state of their own."""
        self._refresher = Refresher(self.solver, self.inv_dtype, self._stages)
        self._preconditioner = Preconditioner(self.solver, self.inv_dtype, self._stages)

    def _find_layers(self) -> None:
        """Finds the layers of the trained parameters, and who works on them; known ones keep their identity."""
        self._roots = [self.model] if self.model is not None else owners_of(self._trained)
        refuse_flattened(self._roots)
        options = LayerOptions(
            weight_sharing=self.weight_sharing,
            batch_dim=self.batch_dim,
            max_factor_dim=self.max_factor_dim,
            skip_layers=self.skip_layers,
            trainable=self._trained,
        )
        self._blocks, self.uncovered = find_blocks(self._trained, self._roots, options, self._blocks)
        self._assign()

    def _assign(self) -> None:
        """Who decomposes and who preconditions what."""
        self.work = assign(self.assignment, self._blocks, self.comm, self.solver, self.inv_dtype)
        self._agreed = False  # the ranks know that they have built the same
        self._preconditioner.stacks = None
        everyone = range(self.comm.world_size)
        if is_iterated(self.solver) and any(set(everyone) - set(b.workers.gradient_workers) for b in self._blocks):
            raise ValueError(
                f"solver={self.solver!r}: starts from its last decompositions, which are in the state and so on every "
                "rank; use assignment='factor-wise' or KAISA(grad_worker_fraction=1.0)"
            )
        self.comm.check_groups(groups_of(self.work, self.comm.world_size))
        if self._blocks:
            self.comm.use_device(self._blocks[0].layer.weight.device)
        if self._refresh is not None:
            self._refresher.plan(self._refresh, self._refresh.blocks, self.comm.rank)

    def _attach(self) -> None:
        """Puts the hooks on."""
        sampled = None if isinstance(self.fisher, str) else self.fisher
        terms = LossTerms(self.loss_average, self.loss_terms, self.batch_dim, getattr(sampled, "dim", -1))
        self._capture = Capture(
            self.layers,
            self._roots,
            loss_terms=terms,
            fisher=sampled,
            output_fn=self.output_fn,
            packers=[tuple(spec.pack for spec in block.specs) for block in self._blocks],
            dtype=torch.promote_types(self.factor_dtype, torch.float32),
            stage=self._stages.stage,
            seed=(self.seed, self.comm.rank),
        )
        self._plan()

    def extend(self, params: Iterable[Any]) -> None:
        """Takes more trained parameters (``add_param_group``); their layers start without statistics."""
        new = [p for p in parameters_of(params) if p not in self._trained]
        self._trained.update(dict.fromkeys(new))
        self._find_layers()
        self._stale = self.comm.world_size > 1  # other ranks work for the known layers now
        self._capture.close()
        self._attach()

    def require(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes sure that the parameters an optimizer steps on are the model's own.

        Frameworks that shard a model after the optimizer was built may replace both before the first step (Accelerate
        does so for FSDP2); the layers then go on with the new ones, in the order of the old.

        Raises:
            RuntimeError: If the parameters are no module's any more (DeepSpeed ZeRO 1-3: flat partitions), if the
                model has other parameters than the optimizer, or if they are no matrices any more (FSDP1).
        """
        replaced = any(p not in self._trained for p in parameters)
        if self._met and not replaced:
            return
        own = {p for root in self._roots for p in root.parameters()}
        new = dict(zip(self._trained, parameters, strict=False))
        if replaced and not self._met and len(parameters) == len(self._trained) and own.issuperset(parameters):
            self._trained = dict.fromkeys(parameters)
            self.uncovered = {new[p]: reason for p, reason in self.uncovered.items()}
            for layer in self.layers:
                layer.replace_parameters(new)
        elif replaced:
            raise RuntimeError(
                "the optimizer's parameters have been replaced by others that are no weights of the model, as "
                "DeepSpeed does with ZeRO stages 1-3 (flat partitions) and half precision. Give the framework its own "
                "optimizer instead, build engine = CurvatureEngine(model, ...) before wrapping the model, and call "
                "engine.precondition_(lr) between its backward and its step"
            )
        elif own and not any(p in own for p in self._trained):
            raise RuntimeError(
                "the model's parameters have been replaced since the optimizer was built: build it after "
                "fully_shard(), to_empty() or whatever made new ones"
            )
        elif any(getattr(layer.weight, "ds_shape", layer.weight.shape) != layer.weight_shape for layer in self.layers):
            raise RuntimeError(
                "the model's weights have changed their shape since the optimizer was built, as under "
                "FullyShardedDataParallel (FSDP1): shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
            )

    def close(self) -> None:
        """Removes every hook; from then on the optimizer is its base class. With several ranks, on all of them."""
        self._capture.close()
        self._closed = True
        for block in self._blocks:
            block.drop()
        self._refresh = self._preconditioner.stacks = None
        self._refresher.close()
        _ENGINES.discard(self)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def owner(self) -> Any:
        """The optimizer of this package that conducts the engine; None for an engine that stands alone."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, optimizer: Any) -> None:
        self._owner = weakref.ref(optimizer)

    # The step -------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Decides whether the coming step collects statistics; its forward has not run yet."""
        interval = self.factor_update_steps
        if interval is None:
            growth = self.inv_update_steps
            interval = max(1, growth(self.step_count) // 5) if isinstance(growth, growing) else 10
        self._capture.step = self.step_count
        self._capture.grad_scaler, self._capture.fraction = self.grad_scaler, self._now("factor_batch_fraction")
        self._capture.enabled = not self._closed and due(interval, self.step_count, self.last_statistics)

    def update(self, gradients: Sequence[Tensor], lrs: Iterable[Lr] = (1.0,)) -> bool:
        """The first half of a step: takes up what was captured and refreshes the decompositions if that is due.

        Args:
            gradients: The gradients of all trained parameters.
            lrs: The learning rates of the step. A step on zero gradients with all of them 0 and nothing captured, as
                torch.distributed.checkpoint takes it, changes nothing.

        Returns:
            Whether the step is to be taken; False if a gradient is not finite and ``skip_nonfinite`` is set.

        Raises:
            RuntimeError: If the model was trained but none of its layers was seen.
        """
        if self._closed:
            self._dry = False
            return True
        self._meet_ranks()
        self._make_room()
        statistics = self._capture.take()
        largest = largest_entry(gradients)
        flags = [largest, *statistics.flags]
        norm, *values = torch.stack([flag.to(largest.device, torch.float32) for flag in flags]).tolist()  # the one sync
        # Of what only this rank has seen nothing may decide here: the ranks have to go the same way.
        alone = self.comm.world_size == 1
        self._dry = norm == 0 and not (alone and statistics.terms) and not any(float(lr) for lr in lrs)
        if self._dry:
            return True
        if self.skip_nonfinite and not math.isfinite(norm):
            self.skipped_steps += 1
            return False
        with self._stages.stage("factor update"):
            if self._capture.enabled:
                self.last_statistics = self.step_count
                self._averaging.fold(self._blocks, statistics, values, self._now("factor_decay"), self.comm)
                if self.comm.world_size == 1:
                    self._pool()
            del statistics  # as large as the factors: not to lie beside a refresh
        if self._stale:
            self._rebuild()
        trained = norm > 0 and any(map(float, lrs))
        self._refresh_if_due(trained)
        self._meet_latecomers()
        return True

    def _meet_latecomers(self) -> None:
        """Layers were unfrozen or added: the next step collects statistics and refreshes, as the first step did.

        What trains is the same on all ranks, unlike what they have seen of it.
        """
        if self._refresh is not None or self.last_refresh is None:
            return
        training = {layer.weight for layer in self.layers if layer.weight.requires_grad}
        if self._training is not None and training - self._training:
            self.last_statistics = self.last_refresh = None
        self._training = training

    def _move(self, comm: Communicator) -> None:
        """Goes on among other ranks than before."""
        moved = (comm.rank, comm.world_size) != (self.comm.rank, self.comm.world_size)
        self.comm = comm
        if moved:
            self._capture.seed = (self.seed, comm.rank)
            self._assign()
            self._stale = True

    def _meet_ranks(self) -> None:
        """Before the first step of several ranks: they must have built the same, and need groups to send in."""
        first, self._met = not self._met, True
        if first and self._default_ranks and self.comm.world_size == 1:  # torch.distributed may be up by now
            self._move(make_communicator())
        if self._agreed or self.comm.world_size == 1:
            return
        built = [(block.layer.name, block.specs, block.workers) for block in self._blocks]
        # Not the repr of an object of the user's, which may have its address in it.
        options = [getattr(self.solver, f.name) for f in fields(self.solver)] if is_dataclass(self.solver) else ()
        solver = (type(self.solver).__qualname__, *options)
        same = (built, solver, self.factor_dtype, self.inv_dtype, self.comm.comm_dtype, self.counters())
        agreement.check(self.comm, repr(same))
        self.comm.prepare(self.work.groups(self.comm.world_size))
        self._agreed = True

    def _pool(self) -> None:
        """Adds up what the ranks saw since the last time, into the running averages of all of them (a collective)."""
        self.skipped_batches += self._averaging.pool(self._blocks, self.comm, self._stages)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Pools what the ranks saw since the last refresh, so that the state holds it (a collective: call it on all).

        Without it, a state saved between two refreshes lacks at most that one interval of statistics. One process has
        nothing to pool.
        """
        self._meet_ranks()
        self._pool()

    def _require_statistics(self) -> None:
        if any(layer.weight.grad is not None for layer in self.layers) and not self._closed:
            raise RuntimeError(
                "the model has gradients, but none of its layers was seen in a forward and backward pass. Build the "
                "optimizer before the first call of a compiled model (or call torch._dynamo.reset()), and call the "
                "model's modules rather than their forward methods; statistics come from the backward passes since the "
                "last zero_grad()"
            )

    # Refreshes ------------------------------------------------------------------------------------------------------

    def _refresh_if_due(self, trained: bool) -> None:
        """Starts a refresh if one is due, works on it, and installs its results when its time is up."""
        step = self.step_count
        if self._refresh is None and due(self.inv_update_steps, step, self.last_refresh):
            self._pool()
            ready = self._with_data("")
            if not ready:
                seen_nothing = self.last_statistics == step and not self.skipped_batches
                self.last_statistics = None  # every step collects until there is something
                if trained and seen_nothing:
                    self._require_statistics()
                return
            spread = 0 if self.last_refresh is None else self._spread()
            self.refreshes += 1
            if not spread:
                self._refresh_at_once(ready, self._now("damping"), "", anew=self._anew)
                self.last_refresh = step  # not before: an interrupted one is due again
                return
            self.last_refresh = step
            self._refresh = Refresh(step, spread, self._now("damping"), "_next", anew=self._anew)
            for block in self._blocks:
                block.freeze("_next")
            self._refresher.plan(self._refresh, ready, self.comm.rank)
        if self._refresh is not None:
            self._work_off(self._refresh, step - self._refresh.start)

    @property
    def _anew(self) -> bool:
        """Whether the refresh that was begun last starts from nothing, also with an iterated solver."""
        return not is_iterated(self.solver) or (self.refreshes - 1) % self.solver.every == 0

    def _make_room(self) -> None:
        make_room(self._blocks, self.factor_dtype, spreads=self._ever_spreads)
        self._refresher.make_room(self._blocks)

    def _spread(self) -> int:
        spread = self._now("spread")
        return int(self._now("inv_update_steps") // 10 if spread is None else spread)

    @property
    def _ever_spreads(self) -> bool:
        """Whether refreshes may be spread, under the present schedules."""
        interval = self.inv_update_steps
        return self.spread != 0 and (self.spread is not None or callable(interval) or interval >= 10)

    def _with_data(self, suffix: str) -> list[Block]:
        return [block for block in self._blocks if block.has_data(suffix)]

    def _work_off(self, refresh: Refresh, elapsed: int) -> None:
        with self._stages.stage("decomposition"):
            self._refresher.work_off(refresh, elapsed, relative=self.relative_damping)
        if elapsed >= refresh.spread:
            self._finish(refresh)

    def _rebuild(self) -> None:
        """Decompositions from the factors they were made of, never from the current sums."""
        self._stale = False
        self._refresh_at_once(self._with_data("_last"), None, "_last")

    def _refresh_at_once(self, blocks: list[Block], damping: float | None, source: str, *, anew: bool = True) -> None:
        refresh = Refresh(self.step_count, 0, damping, source, anew=anew)
        self._refresher.plan(refresh, blocks, self.comm.rank)
        self._work_off(refresh, 0)

    def _finish(self, refresh: Refresh) -> None:
        if refresh is self._refresh:
            self._refresh = None
        if refresh.damping is not None:  # not of one that was only made again
            self.frozen_at = refresh.start
        failed = self._refresher.finish(refresh, self.comm)
        self._preconditioner.stacks = None
        for block in failed:
            self._keep_last(block)

    def _keep_last(self, block: Block) -> None:
        """A decomposition failed for good: the layer goes on with the last good one, or with its raw gradient."""
        self.failed_decompositions += 1
        name = block.layer.name
        if name not in self._warned:
            self._warned.add(name)
            instead = "its last good decomposition" if block.means else "its raw gradient"
            warnings.warn(f"the factors of {name!r} could not be decomposed; using {instead}", stacklevel=2)

    # Directions -----------------------------------------------------------------------------------------------------

    def directions(
        self, vectors: Mapping[nn.Parameter, Tensor], lr: Mapping[nn.Parameter, Lr]
    ) -> dict[nn.Parameter, Tensor]:
        """The second half of a step: the preconditioned and scaled vectors.

        Args:
            vectors: What to precondition (gradients or momentum), by parameter.
            lr: The current learning rate of each parameter, for the scaling.

        Returns:
            Directions for the parameters whose layer has a decomposition; the others keep their vector.
        """
        scaling = KLClip(self._now("kl_clip")) if self.scaling == "kl_clip" else self.scaling
        assert not isinstance(scaling, str)
        return self._preconditioner.directions(
            self._blocks,
            vectors,
            lr,
            self.comm,
            damping=self._now("damping"),
            relative=self.relative_damping,
            scaling=scaling,
            step=self.step_count,
        )

    def advance(self) -> None:
        """The step is over."""
        if not self._dry:
            self.step_count += 1
            self._own_steps += 1
        self._plan()

    @torch.no_grad()
    def precondition_(self, lr: Lr | None = None) -> bool:
        """Replaces ``.grad`` by the direction, between ``backward()`` and the ``step()`` of a foreign optimizer.

        Args:
            lr: The foreign optimizer's learning rate; needed for scaling="kl_clip".

        Returns:
            False if the gradients are not finite; they are then left as they are.

        Raises:
            RuntimeError: If an optimizer of this package owns the engine and calls it itself.
            ValueError: If the scaling needs a learning rate and none is given.
        """
        if self.owner is not None:
            raise RuntimeError("this engine belongs to an optimizer, whose step() preconditions; call that alone")
        if lr is None and self.scaling == "kl_clip":
            raise ValueError("precondition_(lr=None): scaling='kl_clip' needs the learning rate of the step, lr=...")
        gradients = {p: g for p in self._trained if (g := full_gradient(p)) is not None}
        taken = self.update(list(gradients.values()), () if lr is None else (lr,))
        if taken:
            rates = dict.fromkeys(gradients, 1.0 if lr is None else lr)
            for parameter, direction in self.directions(gradients, rates).items():
                set_full_gradient_(parameter, direction)
            self.advance()
        return taken

    # Uneven inputs --------------------------------------------------------------------------------------------------

    def notify_join(self, optimizer: Any) -> bool:
        """Tells ``torch.distributed.algorithms.Join``, if it is in use, that this rank takes a step."""
        return notify_join_context(optimizer)

    def join_hook(self, step: Callable[[], Any]) -> Any:
        """What ``Join`` calls on a rank that has run out of inputs, for every step of the others."""
        return join_hook(step)

    @property
    def process_group(self) -> Any:
        """The ranks that train together, as torch.distributed knows them; None for its default group."""
        return getattr(self.comm, "group", None)

    def share_gradients(self, parameters: Sequence[nn.Parameter], *, joined: bool) -> None:
        """Gives the ranks that have run out of inputs the gradients of the others (a collective, under ``Join``).

        They go on stepping with these, because they may be the inverse or gradient workers of a layer.
        """
        share_gradients(self.comm, parameters, joined=joined)

    def discard(self) -> None:
        """Forgets what this step has captured so far (``zero_grad()`` does it)."""
        self._capture.discard()

    # State ----------------------------------------------------------------------------------------------------------

    def layer_states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The running averages by weight, the tensors themselves; empty before the first step."""
        return {block.layer.weight: block.average for block in self._blocks if block.average}

    def adopt_states(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Takes running averages that somebody moved or replaced (Lightning moves optimizer state between devices)."""
        for block in self._blocks:
            block.average = states.get(block.layer.weight, block.average)

    def counters(self) -> dict[str, float | int]:
        """Plain numbers that belong to the state: counters (-1: never) and the hyperparameters that are numbers."""
        refresh = self._refresh
        found: dict[str, float | int] = {
            "step": self.step_count,
            **{name: -1 if (step := getattr(self, name)) is None else step for name in _STEPS},
            "pending_spread": -1 if refresh is None else refresh.spread,
            "pending_damping": -1.0 if refresh is None or refresh.damping is None else refresh.damping,
            **{name: getattr(self, name) for name in _COUNTS},
        }
        for name in self._hyperparameters:
            value = getattr(self, name)
            if isinstance(value, (bool, int, float)):
                found[name] = value
        return found

    def check(self, states: Mapping[nn.Parameter, Any], counters: Mapping[str, Any]) -> None:
        """Raises unless the state could be loaded; changes nothing.

        Raises:
            ValueError: If a layer's averages are missing, of another shape, not finite, or there is one too many; if
                the counters are missing or one of them is out of range.
            TypeError: If a hyperparameter among the counters is of the wrong kind.
        """
        for name, value in counters.items():
            if name in self._hyperparameters:
                self._check(name, value)
            elif not math.isfinite(value):
                raise ValueError(f"the state is damaged: its counter {name!r} is {value}")
        if states and any(name not in counters for name in ("step", "last_refresh", "last_statistics")):
            raise ValueError("the state is damaged: it has Kronecker factors but no counters")
        check_states(self._blocks, states, self.solver, pending=counters.get("pending_spread", -1) >= 0)

    def load(self, states: Mapping[nn.Parameter, dict[str, Any]], counters: Mapping[str, Any]) -> None:
        """Loads checked states; copies, keeps the engine's own precision, and rebuilds the decompositions."""
        for block in self._blocks:
            block.average = {}
            block.drop()
        self._refresh = self._preconditioner.stacks = None
        self._capture.discard()
        for name in self._hyperparameters:
            if name in counters and not callable(getattr(self, name)):
                setattr(self, name, counters[name])
        self.step_count = int(counters.get("step", 0))
        for name in _STEPS:
            step = int(counters.get(name, -1))
            setattr(self, name, None if step < 0 else step)
        for name in _COUNTS:
            setattr(self, name, int(counters.get(name, 0)))
        self._averaging.clear()
        self._agreed = False
        if states:
            self._make_room()
            for block in self._blocks:
                other = {f"{side}_basis" for side in SIDES} - block.average.keys()  # of a solver that is not in use
                saved = states[block.layer.weight]
                copy_state(block.average, {key: value for key, value in saved.items() if key not in other})
            spread, damping = int(counters.get("pending_spread", -1)), float(counters.get("pending_damping", -1.0))
            if spread >= 0 and self.last_refresh is not None:
                self._refresh = Refresh(self.last_refresh, spread, damping, "_next", anew=self._anew)
                self._refresher.plan(self._refresh, self._with_data("_next"), self.comm.rank)
            self._stale = True
            if self.comm.world_size == 1:  # several ranks do it together, in their next step
                self._rebuild()
        self._plan()

    def state_dict(self) -> dict[str, Any]:
        """State of an engine that stands alone: averages by layer name, and counters."""
        return {
            "layers": {block.layer.name: block.average for block in self._blocks if block.average},
            "counters": self.counters(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads :meth:`state_dict`.

        Raises:
            ValueError: If the state is damaged or of another model; nothing is changed then.
        """
        weights = {layer.name: layer.weight for layer in self.layers}
        unknown = set(state_dict["layers"]) - set(weights)
        if unknown:
            raise ValueError(f"the state has layers that the model has not: {', '.join(sorted(unknown))}")
        states = {weights[name]: state for name, state in state_dict["layers"].items()}
        self.check(states, state_dict["counters"])
        self.load(states, state_dict["counters"])

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the model; hooks, scaler and communicator stay behind."""
        dropped = ("_capture", "_owner", "comm", "grad_scaler", "_refresher", "_preconditioner")
        state = {key: value for key, value in self.__dict__.items() if key not in dropped}
        return {**state, "comm": LocalCommunicator(self.comm.rank, self.comm.world_size)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._wake(state)
        comm = make_communicator()
        if comm.world_size > 1 and not self._default_ranks:
            raise RuntimeError(
                "this engine was pickled with a process_group= or communicator= of its own, which does not travel: "
                "build a new optimizer and load the state_dict()"
            )
        self._move(comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> CurvatureEngine:
        """A copy for a copy of the model, among the same ranks."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied._wake(copy.deepcopy(self.__getstate__(), memo))
        copied.comm, copied._agreed = self.comm, self._agreed
        return copied

    def _wake(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, grad_scaler=None, _owner=None, _agreed=False)
        self._hire()
        self._attach()
        _ENGINES.add(self)

    # Views ----------------------------------------------------------------------------------------------------------

    def factors(self, layer: KroneckerLayer | str) -> tuple[Tensor, Tensor]:
        """The running averages A ``[p, d_in, d_in]`` and G ``[p, d_out, d_out]`` of a layer (diagonals: ``[p, d]``)."""
        block = next(block for block in self._blocks if layer in (block.layer, block.layer.name))
        return block.factor(0), block.factor(1)

    def memory_estimate(self) -> dict[str, int]:
        """Bytes on this rank by kind, as :func:`kfac_optim.memory_estimate` gives them for the fullest one."""
        return diagnostics.total(map(self._memory_of, self._blocks))

    def _memory_of(self, block: Block) -> dict[str, int]:
        """Bytes of a layer on this rank by kind."""
        return diagnostics.memory_of(
            block, self.comm, self.solver, self.factor_dtype, self.inv_dtype, spreads=self._ever_spreads
        )

    def report(self, *, eigenvalues: bool = False) -> dict[str, Any]:
        """Numbers for logging, plain floats and ints; :func:`~kfac_optim.diagnostics.flatten` puts them in one level.

        Costs an eigenvalue computation per factor after each refresh, when asked for; otherwise little. No
        communication.

        Args:
            eigenvalues: Adds ``eigenvalues`` to the spectra: a list of floats, largest first, all pairs together.

        Returns:
            ``step``, ``skipped_steps`` (gradients not finite), ``skipped_batches`` (statistics not finite),
            ``failed_decompositions``, ``staleness`` (steps since the factors in use were frozen, None before the first
            refresh), ``traffic`` (by kind, bytes ``sent`` and ``received`` by this rank per step: "counts", "factors",
            "decompositions", "directions"; see :mod:`kfac_optim.distributed`) and ``layers``: per layer name the spectra
            of A and G in use (``min``, ``mean``, ``max``, ``condition``), ``damping`` (gamma of the coming step, the mean
            over the layer's pairs), ``condition`` (of ``A (x) G + gamma I``, from these extremes) and ``cosine``
            between gradient and direction at the last refresh.
        """
        damping = self._now("damping")
        reports = {
            block.layer.name: diagnostics.report_of(block, damping, relative=self.relative_damping, full=eigenvalues)
            for block in self._blocks
            if block.means is not None
        }
        return {
            "step": self.step_count,
            "skipped_steps": self.skipped_steps,
            "skipped_batches": self.skipped_batches,
            "failed_decompositions": self.failed_decompositions,
            "staleness": None if self.frozen_at is None else self.step_count - self.frozen_at,
            "traffic": {
                kind: {"sent": sent / max(1, self._own_steps), "received": received / max(1, self._own_steps)}
                for kind, (sent, received) in self.comm.traffic.items()
            },
            "layers": reports,
        }

    def profile(self) -> dict[str, dict[str, float]]:
        """Milliseconds and calls per stage since construction, the stages of the paper's Fig. 7."""
        return self._stages.table()

    def workers(self) -> dict[str, Any]:
        """Who works on what, the same on every rank.

        Returns:
            ``layers``: per layer name the ranks that decompose ``A`` and ``G``, and the list of those that
            ``precondition``; ``loads``: the decompositions' multiply-adds on each rank, up to a constant.
        """
        return {
            "layers": {b.layer.name: diagnostics.workers_of(b) for b in self._blocks},
            "loads": list(self.work.loads),
        }

    def __repr__(self) -> str:
        rows = [diagnostics.row_of(block, sum(self._memory_of(block).values()), self.comm) for block in self._blocks]
        rows += [diagnostics.Row(name, "base", note=reason) for name, reason in self.uncovered.values()]
        memory = diagnostics.human_bytes(self.memory_estimate()["total"])
        footer = (
            f"{len(self.layers)} layers preconditioned, {len(self.uncovered)} parameters by the base rule, {memory}"
        )
        if self.comm.world_size > 1:
            footer += (
                f"\nrank {self.comm.rank} of {self.comm.world_size}, load of the decompositions: "
                f"largest / mean = {self.work.imbalance:.2f}"
            )
        return diagnostics.table(rows, f"Curvature after {self.step_count} steps", footer)


# Functions beside the engine -----------------------------------------------------------------------------------------


def memory_estimate(
    model: nn.Module, *, world_size: int = 1, assignment: AssignmentStrategy | str = "factor-wise", **options: Any
) -> dict[str, int]:
    """Bytes that curvature takes on the fullest rank, before anything is trained.

    Args:
        model: The module.
        world_size: Number of processes.
        assignment: As for the optimizers.
        **options: Any other keyword of :class:`CurvatureEngine` that matters to memory.

    Returns:
        Bytes by kind; the kinds are ``factors`` (running averages), ``snapshots`` (what the decompositions were made
        of), ``local sums`` (what a rank has seen since the ranks last pooled their factors), ``decompositions``,
        ``refresh`` (while one is worked off: its snapshot and the new decompositions), and their ``total``. On
        statistics steps one more copy of the factors comes and goes.
    """
    with torch.no_grad():
        engine = CurvatureEngine(model, assignment=assignment, communicator=LocalCommunicator(0, world_size), **options)
    engine.close()
    ranks = []
    for rank in range(world_size):
        engine.comm = LocalCommunicator(rank, world_size)
        ranks.append(engine.memory_estimate())
    return max(ranks, key=lambda kinds: kinds["total"])


def owning_engine(params: Iterable[nn.Parameter]) -> CurvatureEngine | None:
    """The live engine of an optimizer over exactly these parameters, if there is one."""
    wanted = set(params)
    return next((engine for engine in _ENGINES if engine.owner is not None and set(engine._trained) == wanted), None)
