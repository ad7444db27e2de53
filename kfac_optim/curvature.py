"""The curvature engine: conducts capture, factors, solvers, assignment and scaling once per step.

What a step does, in order:

    fold the captured moments into the running averages          (statistics steps; drop non-finite micro-batches)
    if due: pool the factors of all ranks, decompose them on their inverse workers (eqs. 11-13 or 8-10), exchange
    precondition on the gradient workers; exchange
    scale (kl_clip, unit, graft)

With several ranks everything that communicates happens in ``step()``, in an order that all ranks share whatever layers
they used: what is due depends on the step alone, what is sent on the assignment alone.

The engine returns directions and leaves ``.grad`` alone; whoever owns it (an optimizer of this package, or the caller
of :meth:`CurvatureEngine.precondition_`) applies them.

References: Pauloski et al., "Deep Neural Network Training with Distributed K-FAC" (the paper; its equation numbers are
used throughout); Martens & Grosse 2015, arXiv:1503.05671; Grosse & Martens 2016, arXiv:1602.01407; Eschenhagen et al.
2023, arXiv:2311.00636.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import diagnostics
from .assignment import (
    KAISA,
    AssignmentStrategy,
    FactorWise,
    LayerAssignment,
    LayerCost,
    LayerWise,
    longest_first,
)
from .capture import Bernoulli, Capture, Categorical, Fisher, Gaussian, LossAverage, LossTerms, StepStatistics
from .comm import (
    Communicator,
    LocalCommunicator,
    Parcel,
    full_gradient,
    gathered,
    joinable,
    largest_entry,
    make_communicator,
    notify_join_context,
    set_full_gradient_,
    shadowing,
    sharded_like,
    sharding_problem,
)
from .factors import FactorSpec, LocalSums, fold_, snapshot_
from .layers import KroneckerLayer, LayerOptions, Sharing, find_layers, full_precision, owners_of, unwrap
from .scaling import Direction, Graft, KLClip, Scaling, Unit
from .schedules import (
    Schedule,
    due,
    flag,
    growing,
    instance,
    one_of,
    optional_callable,
    optional_count,
    patterns,
    scheduled,
    value_at,
)
from .solvers import Decomposition, EigenSolver, InverseSolver, Result, Solver, Worker, batches, decompose_all

__all__ = ["CurvatureEngine", "growing", "joinable", "memory_estimate", "owning_engine"]

Lr = float | Tensor
SIDES = ("A", "G")

# Short names of instances; anything else passed for these options must be an instance with the protocol's method.
_SOLVERS = {"eigen": EigenSolver(), "inverse": InverseSolver()}
_SCALINGS = {"unit": Unit(), "graft": Graft()}
_FISHERS = {"categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}
_ASSIGNMENTS = {"layer-wise": LayerWise(), "factor-wise": FactorWise(), "kaisa": KAISA(grad_worker_fraction=1.0)}

_ENGINES: weakref.WeakSet[CurvatureEngine] = weakref.WeakSet()

Job = tuple[KroneckerLayer, int]  # the decomposition of a side

# Up to this many numbers factors of one shape are decomposed together (128 MiB in float32), and layers of one shape are
# preconditioned together (64 MiB), so that the copies that takes stay small beside the factors themselves.
_BATCH_NUMEL, _STACK_NUMEL = 2**25, 2**24


# Checks of arguments that need torch ---------------------------------------------------------------------------------


def _dtype(name: str, *, optional: bool = False) -> Callable[[Any], Any]:
    allowed = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *((None,) if optional else ()))
    return one_of(name, allowed)


def _grad_scaler(value: Any) -> Any:
    if value is not None and not isinstance(value, torch.amp.GradScaler):
        raise TypeError(f"grad_scaler={value!r}: must be a torch.amp.GradScaler or None")
    return value


class _Refresh:
    """A refresh in progress: factors frozen at ``start``, decomposed over ``spread`` steps, used from then on.

    ``source`` names the averages that are decomposed: "{}" at once, "{}_next" when spread, "{}_last" when the
    decompositions in use are rebuilt; then every layer has the damping of its last refresh (``damping`` is None).
    """

    def __init__(self, start: int, spread: int, damping: float | None, source: str) -> None:
        self.start, self.spread, self.damping, self.source = start, spread, damping, source
        self.layers: list[KroneckerLayer] = []
        self.steps: dict[Job, int] = {}  # this rank's share: how long after the start each job is due
        self.beside: list[Job] = []  # those of them that run beside the training
        self.running: dict[Job, Callable[[], Result]] = {}
        self.done: dict[Job, Result] = {}

    def plan(self, layers: list[KroneckerLayer], share: Mapping[Job, FactorSpec], *, overlap: bool) -> None:
        """Shares this rank's decompositions out to the steps: evenly by cost, and same shapes together.

        One that exceeds a step's share (any, if ``overlap``) has all steps: it runs beside the training.
        """
        self.layers = layers
        steps = max(1, self.spread)
        budget = sum(spec.cost for spec in share.values()) / steps
        aside = [job for job, spec in share.items() if self.spread and (overlap or spec.cost > budget)]
        self.beside = sorted(aside, key=lambda job: -share[job].cost)
        rest = [job for job in share if job not in aside]
        together = batches(rest, lambda job: share[job].shape[1:], lambda job: share[job].cost, budget)
        costs = [sum(share[job].cost for job in batch) for batch in together]
        when = longest_first(costs, [range(steps)] * len(together), [0.0] * steps)
        self.steps = {job: step for step, batch in zip(when, together, strict=True) for job in batch}
        self.steps |= dict.fromkeys(self.beside, self.spread)
        self.done = {job: result for job, result in self.done.items() if job in share}
        self.running = {job: result for job, result in self.running.items() if job in share}

    def due(self, elapsed: int) -> list[Job]:
        """What has to be done by now, and is not."""
        return [job for job, step in self.steps.items() if step <= elapsed and job not in self.done]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "running": {}}


@dataclass
class _Stack:
    """Layers of one shape, preconditioned as one.

    Attributes:
        layers: The layers.
        decomposed: Of A and of G; None where another rank preconditions.
        means: Mean eigenvalues of A and G, ``[p]`` each.
        units: See :class:`~kfac_optim.scaling.Direction`.
    """

    layers: list[KroneckerLayer]
    decomposed: tuple[Decomposition, Decomposition] | None
    means: tuple[Tensor, Tensor]
    units: Tensor | None

    @property
    def sizes(self) -> list[int]:
        """Pairs of each layer."""
        return [layer.pairs for layer in self.layers]


class CurvatureEngine:
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
        inv_update_steps: Steps between decompositions ("kfac-update-freq" of the paper), >= 1; int or callable.
        scaling: "kl_clip" (eq. 16), "unit", "graft", None, or an object with ``multipliers(directions)``.
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
        comm_dtype: Of factors on the wire; None: as stored.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a value is out of range, or no module owns the parameters.
    """

    # Checked at construction and whenever they are set. The first group may be changed during training.
    _hyperparameters: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "damping": scheduled("damping", float, "> 0", lambda x: 0 < x < math.inf),
        "relative_damping": flag("relative_damping"),
        "factor_decay": scheduled("factor_decay", float, "in [0, 1)", lambda x: 0 <= x < 1),
        "factor_update_steps": optional_count("factor_update_steps", or_callable=True),
        "inv_update_steps": scheduled("inv_update_steps", int, ">= 1", lambda x: x >= 1),
        "scaling": instance("scaling", _SCALINGS, "multipliers", ("kl_clip", None)),
        "kl_clip": scheduled("kl_clip", float, "> 0", lambda x: 0 < x < math.inf),
        "spread": optional_count("spread", or_callable=True, least=0),
        "grad_scaler": _grad_scaler,
        "skip_nonfinite": flag("skip_nonfinite"),
    }
    _fixed: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "solver": instance("solver", _SOLVERS, "precondition"),
        "fisher": instance("fisher", _FISHERS, "sample_gradient", ("empirical",)),
        "loss_average": one_of("loss_average", ("batch", "batch+sequence", "elements", None)),
        "loss_terms": optional_count("loss_terms", or_callable=True),
        "batch_dim": one_of("batch_dim", (0, 1)),
        "weight_sharing": one_of("weight_sharing", ("expand", "reduce"), or_callable=True),
        "skip_layers": patterns("skip_layers"),
        "max_factor_dim": optional_count("max_factor_dim"),
        "assignment": instance("assignment", _ASSIGNMENTS, "assign"),
        "output_fn": optional_callable("output_fn"),
        "seed": scheduled("seed", int, "an int", lambda x: True),
        "factor_dtype": _dtype("factor_dtype"),
        "inv_dtype": _dtype("inv_dtype"),
        "comm_dtype": _dtype("comm_dtype", optional=True),
    }

    damping: Schedule[float]
    relative_damping: bool
    factor_decay: Schedule[float]
    factor_update_steps: Schedule[int] | None
    inv_update_steps: Schedule[int]
    scaling: Scaling | str | None
    kl_clip: Schedule[float]
    spread: Schedule[int] | None
    grad_scaler: torch.amp.GradScaler | None
    skip_nonfinite: bool
    solver: Solver
    fisher: Fisher | str
    loss_average: LossAverage | None
    loss_terms: int | Callable[[Any, Any], int] | None
    batch_dim: int
    weight_sharing: Sharing | Callable[[str, nn.Module], Sharing]
    skip_layers: tuple[str, ...]
    max_factor_dim: int | None
    assignment: AssignmentStrategy
    output_fn: Callable[[Any], Tensor] | None
    seed: int
    factor_dtype: torch.dtype
    inv_dtype: torch.dtype
    comm_dtype: torch.dtype | None

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        params: Iterable[nn.Parameter] | None = None,
        *,
        damping: Schedule[float] = 0.03,
        relative_damping: bool = False,
        factor_decay: Schedule[float] = 0.95,
        factor_update_steps: Schedule[int] | None = None,
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
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        arguments = locals()
        for name in (*self._hyperparameters, *self._fixed):
            object.__setattr__(self, name, self._check(name, arguments[name]))
        self.comm = make_communicator(process_group) if communicator is None else communicator
        if not isinstance(self.comm, Communicator):
            raise TypeError(f"communicator={communicator!r}: must be a kfac_optim.Communicator")
        # Without its wrapper, which may refuse to be copied (DDP in a group of its own).
        self.model = unwrap(model) if isinstance(model, nn.Module) else None
        self._refresh: _Refresh | None = None
        self._worker = Worker()
        self._trained = dict.fromkeys(_parameters_of(model if params is None else params))
        self._own_steps = 0  # steps taken by this object, not by the run that it resumes
        self._met = False  # a first step has been taken
        self._default_ranks = communicator is None and process_group is None
        self.layers: list[KroneckerLayer] = []
        self._find_layers()

        self._owner: weakref.ref[Any] | None = None
        self.step_count = 0
        self.last_statistics: int | None = None
        self.last_refresh: int | None = None
        self.frozen_at: int | None = None  # the step whose factors are in use
        self.skipped_steps = 0
        self.skipped_batches = 0
        self.failed_decompositions = 0
        self._stale = False  # decompositions have to be rebuilt
        self._local = LocalSums()
        self._local_skips = 0  # non-finite micro-batches of this rank, not yet in skipped_batches
        self._averages: dict[KroneckerLayer, dict[str, Any]] = {}
        self._decomposed: dict[KroneckerLayer, tuple[Decomposition, Decomposition]] = {}
        self._means: dict[KroneckerLayer, tuple[Tensor, Tensor]] = {}
        self._stacks: list[_Stack] | None = None  # of the layers that have decompositions
        self._cosines: dict[KroneckerLayer, Tensor] = {}
        self._stages = diagnostics.StageTimes()
        self._warned: set[str] = set()
        self._dry = self._closed = False
        self._attach()
        _ENGINES.add(self)

    # Construction ---------------------------------------------------------------------------------------------------

    @classmethod
    def _check(cls, name: str, value: Any) -> Any:
        return (cls._hyperparameters.get(name) or cls._fixed[name])(value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed and hasattr(self, name):
            changeable = ", ".join(self._hyperparameters)
            raise AttributeError(f"{name} is fixed at construction; what can be changed during training: {changeable}")
        if name in self._hyperparameters:
            value = self._check(name, value)
        object.__setattr__(self, name, value)
        if name in self._hyperparameters and "_capture" in self.__dict__:
            self._plan()

    def _find_layers(self) -> None:
        """Finds the layers of the trained parameters, and who works on them; known ones keep their identity."""
        known = {layer.weight: layer for layer in self.layers}
        self._roots = [self.model] if self.model is not None else owners_of(self._trained)
        options = LayerOptions(
            weight_sharing=self.weight_sharing,
            batch_dim=self.batch_dim,
            max_factor_dim=self.max_factor_dim,
            skip_layers=self.skip_layers,
            trainable=self._trained,
        )
        coverage = find_layers(self._roots, options)
        self.layers[:] = [known.get(layer.weight, layer) for layer in coverage.layers]
        self.uncovered = coverage.uncovered
        for layer in list(self.layers):
            problem = sharding_problem(layer.weight, self._roots)
            if problem:
                self.layers.remove(layer)
                self.uncovered.update(dict.fromkeys(layer.parameters, (layer.name, problem)))
        covered = {parameter for layer in self.layers for parameter in layer.parameters}
        for i, parameter in enumerate(self._trained):
            if parameter not in covered and parameter not in self.uncovered:
                self.uncovered[parameter] = (f"parameter {i}", "no module of the model owns it")
        self._specs = {layer: specs_of(layer) for layer in self.layers}
        self._assign()

    def _assign(self) -> None:
        """Who decomposes and who preconditions what."""
        costs = [_cost_of(self._specs[layer], self.solver, self.inv_dtype) for layer in self.layers]
        self.work = self.assignment.assign(costs, self.comm.world_size)
        self.work.check(len(costs), self.comm.world_size)
        self._workers = dict(zip(self.layers, self.work.layers, strict=True))
        rank, ranks = self.comm.rank, self.comm.world_size
        routes = {workers.gradient_workers: workers.routes(ranks) for workers in self.work.layers}
        self._groups = {members for known in routes.values() for _, members in known if len(members) > 1}
        self._groups |= {workers.holders(side) for workers in self.work.layers for side in range(2)}
        # How the preconditioned gradient of a layer comes to this rank, or leaves it; None if it doesn't travel.
        self._routes = {
            layer: next((r for r in routes[w.gradient_workers] if rank in r[1] and len(r[1]) > 1), None)
            for layer, w in self._workers.items()
        }
        self._agreed = False  # the ranks know that they have built the same
        self._stacks = None
        self.comm.check_groups(self._groups)
        if self.layers:
            self.comm.device = self.layers[0].weight.device
        if self._refresh is not None:
            self._plan_refresh(self._refresh, self._refresh.layers)

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
            packers=[tuple(spec.pack for spec in self._specs[layer]) for layer in self.layers],
            dtype=torch.promote_types(self.factor_dtype, torch.float32),
            stage=self._stages.stage,
            seed=(self.seed, self.comm.rank),
        )
        self._plan()

    def extend(self, params: Iterable[Any]) -> None:
        """Takes more trained parameters (``add_param_group``); their layers start without statistics."""
        new = [p for p in _parameters_of(params) if p not in self._trained]
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
            RuntimeError: If the parameters are no module's any more (DeepSpeed ZeRO 1-3: flat partitions), or if the
                model has other parameters than the optimizer.
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
                layer.weight = new[layer.weight]
                layer.bias = None if layer.bias is None else new[layer.bias]
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

    def close(self) -> None:
        """Removes every hook; from then on the optimizer is its base class. With several ranks, on all of them."""
        self._capture.close()
        self._closed = True
        self._decomposed.clear()
        self._means.clear()
        self._refresh = self._stacks = None
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

    def _now(self, name: str) -> Any:
        """A scheduled hyperparameter at this step; what a callable returns is checked like a number that is given."""
        return self._check(name, value_at(getattr(self, name), self.step_count))

    def _plan(self) -> None:
        """Decides whether the coming step collects statistics; its forward has not run yet."""
        interval = self.factor_update_steps
        if interval is None:
            growth = self.inv_update_steps
            interval = max(1, growth(self.step_count) // 5) if isinstance(growth, growing) else 10
        self._capture.step = self.step_count
        self._capture.grad_scaler = self.grad_scaler
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
        self._ensure_state()
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
            self._fold(statistics, values)
        if self._stale:
            self._rebuild()
        trained = norm > 0 and any(map(float, lrs))
        self._refresh_if_due(trained)
        return True

    def _move(self, comm: Communicator) -> None:
        """Goes on among other ranks than before."""
        moved = (comm.rank, comm.world_size) != (self.comm.rank, self.comm.world_size)
        self.comm = comm
        if moved:
            self._capture.seed = (self.seed, comm.rank)
            self._assign()
            self._stale = True

    def _communicating(self, what: str) -> AbstractContextManager[None]:
        """Times a stage of communication, which one process has not."""
        return self._stages.stage(f"{what} communication") if self.comm.world_size > 1 else nullcontext()

    def _meet_ranks(self) -> None:
        """Before the first step of several ranks: they must have built the same, and need groups to send in."""
        first, self._met = not self._met, True
        if first and self._default_ranks and self.comm.world_size == 1:  # torch.distributed may be up by now
            self._move(make_communicator())
        if self._agreed or self.comm.world_size == 1:
            return
        built = [(layer.name, specs, self._workers[layer]) for layer, specs in self._specs.items()]
        # Not the repr of an object of the user's, which may have its address in it.
        options = [getattr(self.solver, f.name) for f in fields(self.solver)] if is_dataclass(self.solver) else ()
        solver = (type(self.solver).__qualname__, *options)
        same = repr((built, solver, self.factor_dtype, self.inv_dtype, self.comm_dtype, self.counters()))
        checksum = zlib.crc32(same.encode())
        # Halves, so that float64 holds their sums over any number of ranks; squares, because sums may agree by chance.
        halves = torch.tensor([checksum >> 16, checksum & 0xFFFF], dtype=torch.float64)
        mine = torch.cat([halves, halves.square()])
        (total,) = self.comm.sum([mine], "counts")
        if not torch.equal(total, mine * self.comm.world_size):
            raise RuntimeError(
                "the ranks have built different optimizers: layers, solver, dtypes and assignment must be the same on "
                "every rank of the process group, and so must hyperparameters and loaded state"
            )
        self.comm.prepare(sorted(members for members in self._groups if len(members) > 1))
        self._agreed = True

    def _fold(self, statistics: StepStatistics, flags: Sequence[float]) -> None:
        """Eqs. 14-15: running averages of A, and of G = M sum g g^T over the M terms of the step's loss."""
        if not self._capture.enabled:
            return
        taken, finite = statistics.counted(flags)
        self.last_statistics = self.step_count
        self._local_skips += sum(taken) - sum(finite)
        all_terms = sum(terms for terms, use in zip(statistics.terms, taken, strict=True) if use)
        terms = sum(terms for terms, use in zip(statistics.terms, finite, strict=True) if use)
        per_term, m = self._terms_of_rank(all_terms)
        m *= terms / max(1, all_terms)
        self._local.begin(self._now("factor_decay"), m)
        for index, sums in statistics.sums.items():
            rows = sum(count for count, use in zip(sums.counts, finite, strict=False) if use)
            if rows:
                self._local.add(self.layers[index], (sums.a, sums.g.mul_(per_term)), (rows, m))
        if self.comm.world_size == 1:
            self._pool()

    def _terms_of_rank(self, terms: int) -> tuple[float, float]:
        """This rank's part in ``G = M sum g g^T``: the factor of its ``sum g g^T``, and its part of M.

        A local g counts as g / R where the ranks' gradients are averaged. Of a mean over M = R ``terms`` terms that
        gives ``terms^2`` (g carries the 1 / terms of the mean; sampled gradients are those of the sum). A sum has
        M = 1, in however many backward passes and on however many ranks it was taken.
        """
        ranks = self.comm.world_size
        share = 1 / ranks if self.comm.average_gradients else 1.0
        if self.loss_average is None and self.loss_terms is None:
            return share**2, 1 / ranks
        return (share * ranks) ** 2 * (terms**2 if isinstance(self.fisher, str) else 1), terms

    def _pool(self) -> None:
        """Adds up what the ranks saw since the last time, into the running averages of all of them (a collective)."""
        local, self._local = self._local, LocalSums()
        if not local.decays:
            return
        with self._communicating("factor"):
            skips = torch.tensor(float(self._local_skips), dtype=torch.float64)
            weights, skips = self.comm.sum([local.weights(self.layers), skips], "counts")
            self.skipped_batches, self._local_skips = self.skipped_batches + int(skips), 0
            decays, totals = local.pool(self.layers, weights)
            jobs, sums = [], []
            dtype = torch.promote_types(self.factor_dtype, torch.float32)
            for layer, decay, weight in zip(self.layers, decays, totals, strict=True):
                if weight[0]:
                    own = local.sums(layer) or [spec.zeros(dtype, layer.weight.device) for spec in self._specs[layer]]
                    jobs += [(self._averages[layer][side], w, decay) for side, w in zip(SIDES, weight, strict=True)]
                    sums += own
            pooled = self.comm.sum(sums, "factors", self.comm_dtype)
            for (average, count, decay), total in zip(jobs, pooled, strict=True):
                fold_(average, total, count, decay)

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
            source = "{}_next" if spread else "{}"
            self._refresh = _Refresh(step, spread, self._now("damping"), source)
            self.last_refresh = step
            for layer in self.layers:
                for side in SIDES if spread else ():
                    snapshot_(self._averages[layer][f"{side}_next"], self._averages[layer][side])
            self._plan_refresh(self._refresh, ready)
        if self._refresh is not None:
            self._work_off(self._refresh, step - self._refresh.start)

    def _spread(self) -> int:
        spread = self._now("spread")
        return int(self._now("inv_update_steps") // 10 if spread is None else spread)

    @property
    def _ever_spreads(self) -> bool:
        """Whether refreshes may be spread, under the present schedules."""
        interval = self.inv_update_steps
        return self.spread != 0 and (self.spread is not None or callable(interval) or interval >= 10)

    def _plan_refresh(self, refresh: _Refresh, layers: list[KroneckerLayer]) -> None:
        share = {
            (layer, side): self._specs[layer][side]
            for layer in layers
            for side in range(2)
            if self._workers[layer].inverse_workers[side] == self.comm.rank
        }
        refresh.plan(layers, share, overlap=getattr(self.solver, "overlap", False))

    def _work_off(self, refresh: _Refresh, elapsed: int) -> None:
        with self._stages.stage("decomposition"):
            for job in refresh.beside if elapsed < refresh.spread else ():
                if job not in refresh.running and job not in refresh.done:
                    refresh.running[job] = self._decompose_beside(job, refresh)
            self._decompose_due(refresh, elapsed)
        if elapsed < refresh.spread:
            return
        self._refresh, self.frozen_at = None, refresh.start
        for layer, a, g in self._exchange(refresh):
            average = self._averages[layer]
            for side in SIDES:
                snapshot_(average[f"{side}_last"], average[refresh.source.format(side)])
            average["damping"] = torch.tensor(refresh.damping, dtype=torch.float64)
            self._install(layer, a, g)

    def _exchange(self, refresh: _Refresh) -> list[tuple[KroneckerLayer, Decomposition, Decomposition]]:
        """Sends the decompositions from their inverse workers to the gradient workers.

        Returns:
            The layers with new decompositions (empty tuples on ranks that do not precondition the layer).
        """
        with self._communicating("decomposition"):
            done = [[float(refresh.done.get((layer, i)) is not None) for i in range(2)] for layer in refresh.layers]
            (flags,) = self.comm.sum([torch.tensor(done, dtype=torch.float64).view(-1, 2)], "counts")
            parcels, found = [], []
            for layer, good in zip(refresh.layers, flags.bool().all(1).tolist(), strict=True):
                if not good:
                    self._keep_last(layer)
                    continue
                workers, sides = self._workers[layer], []
                for i in range(2):
                    parts, holders = refresh.done.get((layer, i)), workers.holders(i)  # only jobs of this rank are done
                    if parts is None:
                        parts = self._empty(layer, i) if self.comm.rank in holders else ()
                    if self.comm.rank in holders:
                        parcels.append(Parcel(parts, workers.inverse_workers[i], holders))
                    sides.append(parts if self.comm.rank in workers.gradient_workers else ())
                found.append((layer, sides[0], sides[1]))
            self.comm.send(parcels, "decompositions")
        return found

    def _empty(self, layer: KroneckerLayer, side: int) -> Decomposition:
        """Room for a decomposition that another rank makes."""
        spec = self._specs[layer][side]
        shapes = self.solver.shapes(spec.dim, spec.diagonal)
        return tuple(
            torch.empty(spec.pairs, *shape, dtype=self._part_dtype(len(shape)), device=layer.weight.device)
            for shape in shapes
        )

    def _part_dtype(self, dims: int) -> torch.dtype:
        """Of a part of a decomposition: vectors and scalars carry the magnitude."""
        return self.inv_dtype if dims == 2 else torch.promote_types(self.inv_dtype, torch.float32)

    def _install(self, layer: KroneckerLayer, a: Decomposition, g: Decomposition) -> None:
        """Takes decompositions into use; that a layer has some is known on all ranks, by its entry in ``_means``."""
        self._decomposed.pop(layer, None)
        if self.comm.rank in self._workers[layer].gradient_workers:
            self._decomposed[layer] = (a, g)
        self._means[layer] = self._mean_eigenvalues(layer, "{}_last")
        self._cosines.pop(layer, None)
        self._stacks = None

    def _decompose_due(self, refresh: _Refresh, elapsed: int) -> None:
        """Decomposes what is due, same shapes together, and collects what has run beside the training."""
        due = refresh.due(elapsed)
        alone = [job for job in due if job not in refresh.running]
        shapes = {(layer, side): self._specs[layer][side].shape for layer, side in alone}
        # On the CPU each on its own: LAPACK takes one matrix after the other anyway, and the last bits of its results
        # depend on the matrix's place in memory. A resumed run has other batches, and is to continue bit for bit.
        limit = 0 if self.layers[0].weight.device.type == "cpu" else _BATCH_NUMEL
        for jobs in batches(alone, lambda job: shapes[job][1:], lambda job: math.prod(shapes[job]), limit):
            factors, shifts = zip(*(self._factor_of(job, refresh) for job in jobs), strict=True)
            with full_precision(factors[0].device.type):
                found = decompose_all(self.solver, factors, shifts)
            refresh.done |= {job: self._as_stored(result) for job, result in zip(jobs, found, strict=True)}
        for job in due:
            if job in refresh.running:
                refresh.done[job] = refresh.running.pop(job)()

    def _decompose_beside(self, job: Job, refresh: _Refresh) -> Callable[[], Result]:
        """Starts a decomposition on the worker; returns what waits for its result."""
        factor, shift = self._factor_of(job, refresh)

        def work() -> Result:
            with self._stages.stage("decomposition beside training"):
                return self._as_stored(decompose_all(self.solver, [factor], [shift])[0])

        return self._worker.submit(factor.device, work)

    def _factor_of(self, job: Job, refresh: _Refresh) -> tuple[Tensor, Tensor]:
        """The factor of a job, and what is added to its diagonal."""
        layer, side = job
        average, key = self._averages[layer], refresh.source
        damping = float(average["damping"]) if refresh.damping is None else refresh.damping
        factor = self._specs[layer][side].matrix(average[key.format(SIDES[side])])
        means = self._mean_eigenvalues(layer, key)
        gamma = self._gamma(means, damping)
        # Where A is the constant 1 there is nothing to split the damping between.
        shifts = (torch.zeros_like(gamma), gamma) if layer.joint else self.solver.shifts(gamma, *means)
        dtype = torch.promote_types(factor.dtype, torch.promote_types(self.inv_dtype, torch.float32))
        return factor.to(dtype), shifts[side].to(dtype)

    def _as_stored(self, result: Result) -> Result:
        if result is None:
            return None
        # Contiguous, as they arrive on other ranks: products round differently with the layout, and ranks drift apart.
        return tuple(part.to(self._part_dtype(part.dim() - 1)).contiguous() for part in result)

    def _mean_eigenvalues(self, layer: KroneckerLayer, key: str) -> tuple[Tensor, Tensor]:
        """Of A and of G, per pair ``[p]``; of all pairs together where they are joint."""
        means = []
        for side, spec in zip(SIDES, self._specs[layer], strict=True):
            mean = spec.mean_eigenvalue(self._averages[layer][key.format(side)])
            means.append(mean.mean().expand_as(mean) if layer.joint else mean)
        return means[0], means[1]

    def _gamma(self, means: tuple[Tensor, Tensor], damping: float) -> Tensor:
        """The damping of each pair, ``[p]``."""
        product = means[0] * means[1]
        if not self.relative_damping:
            return torch.full_like(product, damping)
        return damping * torch.where(product > 0, product, 1.0)

    def _keep_last(self, layer: KroneckerLayer) -> None:
        """A decomposition failed for good: the layer goes on with the last good one, or with its raw gradient."""
        self.failed_decompositions += 1
        if layer.name not in self._warned:
            self._warned.add(layer.name)
            instead = "its last good decomposition" if layer in self._means else "its raw gradient"
            warnings.warn(f"the factors of {layer.name!r} could not be decomposed; using {instead}", stacklevel=2)

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
        known = [layer for layer in self.layers if layer in self._means]
        whole = {p: gathered(vectors[p]) for layer in known for p in layer.parameters if p in vectors}
        if self._stacks is None:
            self._stacks = self._stacks_of(known)
        stacks = [part for stack in self._stacks for part in self._with_vectors(stack, whole)]
        with self._stages.stage("preconditioning"):
            found = [self._direction(stack, whole, lr) for stack in stacks]
        if any(self._routes.values()):
            with self._communicating("gradient"):
                self._share(known, stacks, found)
        with self._stages.stage("scaling"):
            scaling = KLClip(self._now("kl_clip")) if self.scaling == "kl_clip" else self.scaling
            if scaling is not None:
                assert not isinstance(scaling, str)
                multipliers = scaling.multipliers(found)
            result: dict[nn.Parameter, Tensor] = {}
            for i, (stack, d) in enumerate(zip(stacks, found, strict=True)):
                self._note_cosines(stack, d)
                scaled = d.direction if scaling is None else d.direction * multipliers[i].reshape(-1, 1, 1)
                for layer, matrix in zip(stack.layers, scaled.split(stack.sizes), strict=True):
                    self._unstack(layer, matrix, whole, result)
        return {parameter: sharded_like(direction, vectors[parameter]) for parameter, direction in result.items()}

    def _unstack(
        self,
        layer: KroneckerLayer,
        matrix: Tensor,
        vectors: Mapping[nn.Parameter, Tensor],
        result: dict[nn.Parameter, Tensor],
    ) -> None:
        """Writes a layer's matrix into the directions of its parameters."""
        for parameter, direction in zip(layer.parameters, layer.from_matrix(matrix), strict=True):
            vector = vectors[parameter]
            if parameter is layer.bias and layer.bias_part != slice(None):
                result.setdefault(parameter, vector.clone())[layer.bias_part] = direction
            elif direction.dtype is vector.dtype and direction.stride() == vector.stride():
                result[parameter] = direction
            else:  # fused kernels expect the layout of the parameter
                result[parameter] = torch.empty_like(vector).copy_(direction)

    def _note_cosines(self, stack: _Stack, d: Direction) -> None:
        if all(layer in self._cosines for layer in stack.layers):
            return
        parts = zip(d.gradient.split(stack.sizes), d.direction.split(stack.sizes), strict=True)
        for layer, (gradient, direction) in zip(stack.layers, parts, strict=True):
            if layer not in self._cosines:
                self._cosines[layer] = diagnostics.cosine(gradient, direction)

    def _stacks_of(self, layers: Sequence[KroneckerLayer]) -> list[_Stack]:
        """Layers of one shape together; their decompositions move into the stack and become views of it.

        All ranks make the same stacks, whatever they hold, or their sums would differ in the last bits.
        """

        def kind(layer: KroneckerLayer) -> tuple[Any, ...]:
            shape = (layer.d_out, layer.d_in, layer.diagonal, layer.joint, layer.weight.device)
            return (*shape, self._workers[layer].gradient_workers)

        groups = batches(layers, kind, lambda layer: layer.pairs * layer.d_out * layer.d_in, _STACK_NUMEL)
        return [self._stack(group) for group in groups]

    def _stack(self, layers: list[KroneckerLayer]) -> _Stack:
        sizes = torch.tensor([layer.pairs for layer in layers])
        units = None
        if layers[0].joint:
            units = torch.arange(len(layers)).repeat_interleave(sizes).to(layers[0].weight.device)
        a, g = (torch.cat(means) for means in zip(*(self._means[layer] for layer in layers), strict=True))
        if layers[0] not in self._decomposed:
            return _Stack(layers, None, (a, g), units)
        sides = [[self._decomposed[layer][side] for layer in layers] for side in range(2)]
        whole = [tuple(_cat(parts) for parts in zip(*side, strict=True)) for side in sides]
        stack = _Stack(layers, (whole[0], whole[1]), (a, g), units)
        views = [zip(*(part.split(stack.sizes) for part in side), strict=True) for side in whole]
        self._decomposed |= dict(zip(layers, zip(*views, strict=True), strict=True))
        return stack

    def _with_vectors(self, stack: _Stack, vectors: Mapping[nn.Parameter, Tensor]) -> list[_Stack]:
        """The stack if all of its layers have a vector in this step, else those that have one, each on its own."""
        present = [layer for layer in stack.layers if all(p in vectors for p in layer.parameters)]
        return [stack] if len(present) == len(stack.layers) else [self._stack([layer]) for layer in present]

    def _share(
        self, layers: Sequence[KroneckerLayer], stacks: Sequence[_Stack], directions: Sequence[Direction]
    ) -> None:
        """Sends preconditioned gradients from the gradient workers to the other ranks, in place.

        All known layers travel, also those without a gradient here: what is sent must not depend on what a rank has.
        """
        found = {
            layer: part
            for stack, d in zip(stacks, directions, strict=True)
            for layer, part in zip(stack.layers, d.direction.split(stack.sizes), strict=True)
        }
        parcels = []
        dtype = torch.promote_types(self.inv_dtype, torch.float32)
        for layer in layers:
            route = self._routes[layer]
            if route is None:
                continue
            if layer in found:
                tensor = found[layer]
            else:
                shape = (layer.pairs, layer.d_out, layer.d_in)
                tensor = torch.zeros(shape, dtype=dtype, device=layer.weight.device)
            parcels.append(Parcel([tensor], *route))
        self.comm.send(parcels, "directions")

    def _direction(
        self, stack: _Stack, vectors: Mapping[nn.Parameter, Tensor], lr: Mapping[nn.Parameter, Lr]
    ) -> Direction:
        dtype = torch.promote_types(self.inv_dtype, torch.float32)
        gradient = _cat([_matrix_of(layer, vectors, dtype) for layer in stack.layers])
        if stack.decomposed is not None:
            a, g = (tuple(part.to(dtype) for part in side) for side in stack.decomposed)
            gamma = self._gamma(stack.means, self._now("damping")).to(dtype)
            with full_precision(gradient.device.type):
                direction = self.solver.precondition(gradient, a, g, gamma).contiguous()
        else:  # a gradient worker sends it
            direction = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
        rates = [lr[p] for layer in stack.layers for p in layer.parameters]
        rate: Lr = rates[0]
        if any(r is not rate and (isinstance(r, Tensor) or r != rate) for r in rates):
            filled = {p: torch.ones_like(vectors[p]) * lr[p] for layer in stack.layers for p in layer.parameters}
            rate = _cat([_matrix_of(layer, filled, dtype) for layer in stack.layers])
        return Direction(direction, gradient, rate, stack.units)

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
        return shadowing(step)

    @property
    def process_group(self) -> Any:
        """The ranks that train together, as torch.distributed knows them; None for its default group."""
        return getattr(self.comm, "group", None)

    def share_gradients(self, parameters: Sequence[nn.Parameter], *, joined: bool) -> None:
        """Gives the ranks that have run out of inputs the gradients of the others (a collective, under ``Join``).

        They go on stepping with these, because they may be the inverse or gradient workers of a layer.
        """
        if self.comm.world_size == 1:
            return
        active = torch.zeros(self.comm.world_size, dtype=torch.float64)
        active[self.comm.rank] = not joined
        (active,) = self.comm.sum([active], "counts")
        if bool(active.all()):
            return
        source, everyone = int(active.argmax()), tuple(range(self.comm.world_size))
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        self.comm.send([Parcel([present], source, everyone)], "counts")
        trained = [p for p, there in zip(parameters, present.tolist(), strict=True) if there]
        like = torch.contiguous_format
        wires = [torch.empty_like(p, memory_format=like) if p.grad is None else p.grad.contiguous() for p in trained]
        self.comm.send([Parcel([wire], source, everyone) for wire in wires], "gradients")
        if joined:
            received = dict(zip(trained, wires, strict=True))
            for parameter in parameters:
                parameter.grad = received.get(parameter)

    def discard(self) -> None:
        """Forgets what this step has captured so far (``zero_grad()`` does it)."""
        self._capture.discard()

    # State ----------------------------------------------------------------------------------------------------------

    def _ensure_state(self) -> None:
        """Running averages for every layer that has none yet."""
        pending = ("_last", "", "_next") if self._ever_spreads else ("_last", "")
        for layer in self.layers:
            average = self._averages.setdefault(layer, {})
            for side, spec in zip(SIDES, self._specs[layer], strict=True):
                for suffix in pending:
                    if f"{side}{suffix}" not in average:
                        average[f"{side}{suffix}"] = spec.empty(self.factor_dtype, layer.weight.device)
            average.setdefault("damping", torch.zeros((), dtype=torch.float64))

    def layer_states(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The running averages by weight, the tensors themselves; empty before the first step."""
        return {layer.weight: self._averages[layer] for layer in self.layers if layer in self._averages}

    def adopt_states(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Takes running averages that somebody moved or replaced (Lightning moves optimizer state between devices)."""
        for layer in self.layers:
            if layer.weight in states:
                self._averages[layer] = states[layer.weight]

    def counters(self) -> dict[str, float | int]:
        """Plain numbers that belong to the state: counters (-1: never) and the hyperparameters that are numbers."""
        refresh = self._refresh
        found: dict[str, float | int] = {
            "step": self.step_count,
            "last_statistics": -1 if self.last_statistics is None else self.last_statistics,
            "last_refresh": -1 if self.last_refresh is None else self.last_refresh,
            "frozen_at": -1 if self.frozen_at is None else self.frozen_at,
            "pending_spread": -1 if refresh is None else refresh.spread,
            "pending_damping": -1.0 if refresh is None or refresh.damping is None else refresh.damping,
            "skipped_steps": self.skipped_steps,
            "skipped_batches": self.skipped_batches,
            "failed_decompositions": self.failed_decompositions,
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
        weights = {layer.weight: layer for layer in self.layers}
        if any(weight not in weights for weight in states):
            raise ValueError("the state has Kronecker factors for a parameter that has none here: another model?")
        if not states:
            return
        suffixes = ("", "_last", "_next") if counters.get("pending_spread", -1) >= 0 else ("", "_last")
        for weight, layer in weights.items():
            problem = (
                "has no Kronecker factors" if weight not in states else self._problem(layer, states[weight], suffixes)
            )
            if problem:
                raise ValueError(f"the state of {layer.name!r} {problem}: damaged, or of another model or skip_layers?")

    def _problem(self, layer: KroneckerLayer, state: Any, suffixes: Sequence[str]) -> str:
        """What keeps a layer's state from being loaded; empty if nothing."""
        for side, spec in zip(SIDES, self._specs[layer], strict=True):
            for key in (f"{side}{suffix}" for suffix in suffixes):
                problem = spec.problem(state.get(key))
                if problem:
                    return f"has a {key} that {problem}"
        damping = state.get("damping")
        valid = isinstance(damping, Tensor) and damping.dim() == 0 and 0 <= float(damping) < math.inf
        return "" if valid else f"has a damping of {damping}"

    def load(self, states: Mapping[nn.Parameter, dict[str, Any]], counters: Mapping[str, Any]) -> None:
        """Loads checked states; copies, keeps the engine's own precision, and rebuilds the decompositions."""
        self._averages, self._decomposed, self._refresh = {}, {}, None
        self._means, self._cosines = {}, {}
        self._capture.discard()
        for name in self._hyperparameters:
            if name in counters and not callable(getattr(self, name)):
                setattr(self, name, counters[name])
        self.step_count = int(counters.get("step", 0))
        self.last_statistics = _never_if_negative(counters.get("last_statistics", -1))
        self.last_refresh = _never_if_negative(counters.get("last_refresh", -1))
        self.frozen_at = _never_if_negative(counters.get("frozen_at", -1))
        for name in ("skipped_steps", "skipped_batches", "failed_decompositions"):
            setattr(self, name, int(counters.get(name, 0)))
        self._local, self._local_skips = LocalSums(), 0
        self._agreed = False
        if states:
            self._ensure_state()
            for layer in self.layers:
                _copy_state(self._averages[layer], states[layer.weight])
            spread, damping = int(counters.get("pending_spread", -1)), float(counters.get("pending_damping", -1.0))
            if spread >= 0 and self.last_refresh is not None:
                self._refresh = _Refresh(self.last_refresh, spread, damping, "{}_next")
                self._plan_refresh(self._refresh, self._with_data("_next"))
            self._stale = True
            if self.comm.world_size == 1:  # several ranks do it together, in their next step
                self._rebuild()
        self._plan()

    def _with_data(self, suffix: str) -> list[KroneckerLayer]:
        return [
            layer
            for layer in self.layers
            if all(float(self._averages[layer][f"{side}{suffix}"]["weight"]) for side in SIDES)
        ]

    def _rebuild(self) -> None:
        """Decompositions from the factors they were made of, never from the current sums."""
        self._stale = False
        refresh = _Refresh(self.step_count, 0, None, "{}_last")
        self._plan_refresh(refresh, self._with_data("_last"))
        self._decompose_due(refresh, 0)
        for layer, a, g in self._exchange(refresh):
            self._install(layer, a, g)

    def state_dict(self) -> dict[str, Any]:
        """State of an engine that stands alone: averages by layer name, and counters."""
        return {
            "layers": {layer.name: self._averages[layer] for layer in self.layers if layer in self._averages},
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
        dropped = ("_capture", "_owner", "comm", "grad_scaler", "_worker", "_stacks")
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
        self.__dict__.update(state, grad_scaler=None, _owner=None, _agreed=False, _worker=Worker(), _stacks=None)
        self._attach()
        _ENGINES.add(self)

    # Views ----------------------------------------------------------------------------------------------------------

    def factors(self, layer: KroneckerLayer | str) -> tuple[Tensor, Tensor]:
        """The running averages A ``[p, d_in, d_in]`` and G ``[p, d_out, d_out]`` of a layer (diagonals: ``[p, d]``)."""
        if isinstance(layer, str):
            layer = next(known for known in self.layers if known.name == layer)
        a, g = (spec.matrix(self._averages[layer][s]) for s, spec in zip(SIDES, self._specs[layer], strict=True))
        return a, g

    def memory_estimate(self) -> dict[str, int]:
        """Bytes on this rank by kind: see :func:`kfac_optim.memory_estimate`."""
        return _total(self._memory_of(layer) for layer in self.layers)

    def _memory_of(self, layer: KroneckerLayer) -> dict[str, int]:
        """Bytes of a layer on this rank by kind, from shapes alone."""
        specs = self._specs[layer]
        numbers = sum(spec.packed_numel for spec in specs)
        stored, exact = self.factor_dtype.itemsize, torch.promote_types(self.factor_dtype, torch.float32).itemsize
        workers, rank = self._workers[layer], self.comm.rank
        here = specs if rank in workers.gradient_workers else ()
        share = [spec for spec, worker in zip(specs, workers.inverse_workers, strict=True) if worker == rank]
        pending = numbers * stored + _decomposed_bytes(share, self.solver, self.inv_dtype)
        return {
            "factors": numbers * stored,
            "snapshots": numbers * stored,
            "local sums": numbers * exact if self.comm.world_size > 1 else 0,
            "decompositions": _decomposed_bytes(here, self.solver, self.inv_dtype),
            "refresh": pending if self._ever_spreads else 0,
        }

    def report(self) -> dict[str, Any]:
        """Numbers for logging, plain floats and ints.

        Returns:
            ``step``, ``skipped_steps`` (gradients not finite), ``skipped_batches`` (statistics not finite),
            ``failed_decompositions``, ``staleness`` (steps since the factors in use were frozen, None before the first
            refresh), ``traffic`` (by kind, bytes ``sent`` and ``received`` by this rank per step: "counts", "factors",
            "decompositions", "directions"; see :mod:`kfac_optim.comm`) and ``layers``: per layer name the spectra of A
            and G in use (``min``, ``mean``, ``max``, ``condition``), and ``cosine`` between gradient and direction at
            the last refresh. Spectra are computed when asked for, an eigenvalue computation per factor.
        """
        layers: dict[str, dict[str, Any]] = {}
        for layer in self._means:
            average = self._averages[layer]
            layers[layer.name] = {
                side: diagnostics.spectrum(spec.matrix(average[f"{side}_last"]))
                for side, spec in zip(SIDES, self._specs[layer], strict=True)
            }
            layers[layer.name]["cosine"] = float(self._cosines[layer]) if layer in self._cosines else None
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
            "layers": layers,
        }

    def profile(self) -> dict[str, dict[str, float]]:
        """Milliseconds and calls per stage since construction, the stages of the paper's Fig. 7."""
        return self._stages.table()

    def __repr__(self) -> str:
        rows = [self._row(layer, workers) for layer, workers in zip(self.layers, self.work.layers, strict=True)]
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

    def _row(self, layer: KroneckerLayer, workers: LayerAssignment) -> diagnostics.Row:
        notes = list(layer.notes)
        if len(layer.modules) > 1:
            notes.append(f"shared by {len(layer.modules)} modules")
        if not layer.weight.requires_grad:
            notes.append("frozen")
        elif layer not in self._means:
            notes.append("raw gradient until its first decomposition")
        a, g = (f"{spec.pairs} x {spec.dim}" * (spec.pairs > 1) or str(spec.dim) for spec in self._specs[layer])
        memory = sum(self._memory_of(layer).values())
        inverse, gradient = "", ""
        if self.comm.world_size > 1:
            inverse = "A {}, G {}".format(*workers.inverse_workers)
            gradient = diagnostics.rank_list(workers.gradient_workers)
        return diagnostics.Row(
            layer.name or "(model)", layer.rule_name, a, g, memory, inverse, gradient, "; ".join(notes)
        )


# Functions beside the engine -----------------------------------------------------------------------------------------


def _parameters_of(source: nn.Module | Iterable[Any]) -> list[nn.Parameter]:
    """The parameters of a module, or of anything torch's optimizers take: tensors, named tensors, groups of them."""
    if isinstance(source, nn.Module):
        return list(source.parameters())
    found: list[nn.Parameter] = []
    for item in source:
        if isinstance(item, dict):
            found += _parameters_of([item["params"]] if isinstance(item["params"], Tensor) else item["params"])
        else:
            found.append(item[1] if isinstance(item, tuple) else item)
    return found


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other along the first dimension; a single one as it is."""
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def _matrix_of(layer: KroneckerLayer, vectors: Mapping[nn.Parameter, Tensor], dtype: torch.dtype) -> Tensor:
    """What a layer's weight and bias have in ``vectors``, as ``[p, d_out, d_in]``."""
    weight = vectors[layer.weight].to(dtype)
    return layer.to_matrix(weight, None if layer.bias is None else vectors[layer.bias][layer.bias_part].to(dtype))


def specs_of(layer: KroneckerLayer) -> tuple[FactorSpec, FactorSpec]:
    """The shapes of A and G."""
    a, g = zip((layer.d_in, layer.d_out), layer.diagonal, strict=True)
    return FactorSpec(layer.pairs, *a), FactorSpec(layer.pairs, *g)


def _cost_of(specs: tuple[FactorSpec, FactorSpec], solver: Solver, inv_dtype: torch.dtype) -> LayerCost:
    a, g = specs
    return LayerCost((a.cost, g.cost), _decomposed_bytes(specs, solver, inv_dtype))


def _decomposed_bytes(specs: Iterable[FactorSpec], solver: Solver, inv_dtype: torch.dtype) -> int:
    exact = torch.promote_types(inv_dtype, torch.float32)
    return sum(
        spec.pairs * math.prod(shape) * (inv_dtype if len(shape) == 2 else exact).itemsize
        for spec in specs
        for shape in solver.shapes(spec.dim, spec.diagonal)
    )


def _never_if_negative(step: Any) -> int | None:
    return None if step < 0 else int(step)


def _copy_state(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    """Copies saved tensors into fresh ones: own dtype, own device, nothing shared with the loaded dict."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            _copy_state(target.setdefault(key, {k: torch.empty_like(v) for k, v in value.items()}), value)
        elif key in target and target[key].dim():
            target[key].copy_(value)
        elif key in target:
            target[key] = value.detach().to(target[key]).clone()


def _total(kinds: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums = {kind: 0 for kind in ("factors", "snapshots", "local sums", "decompositions", "refresh")}
    for layer in kinds:
        for kind, count in layer.items():
            sums[kind] += count
    return {**sums, "total": sum(sums.values())}


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
        Bytes by kind: ``factors`` (running averages), ``snapshots`` (what the decompositions were made of), ``local
        sums`` (what a rank has seen since the ranks last pooled their factors), ``decompositions``, ``refresh`` (while
        one is worked off: its snapshot and the new decompositions), and their ``total``. On statistics steps one more
        copy of the factors comes and goes.
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
