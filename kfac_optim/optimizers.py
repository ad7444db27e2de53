"""``KFACSGD``, ``KFACAdam``, ``KFACAdamW``, ``KFACLAMB``: torch's optimizers with K-FAC, over one mixin.

By default a step is the base class's own on ``.grad``, and the updates of the layers are then turned and stretched
(:mod:`~kfac_optim.turning`). With ``precondition="gradient"``, as in the paper, ``.grad`` holds directions while the
base class steps. Momentum, weight decay, trust ratio, foreach and fused kernels are the base class's in both cases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .bases import Bucket, MultiTensorLamb, buckets_of, gradients_of, records, refuse_base, refuse_order
from .bases.state_keys import LAYER_STATE, PREFIX, set_aside, take_out_layers, without_counters
from .common.rates import rate_of, rates_of
from .config import engine_options, refuse_in_groups, refuse_unknown, signature
from .damping import OfLargest
from .distributed import derived_from_by_horovod, join_hook, register_joinable, share_gradients, take_part_in_join
from .engine import CurvatureEngine
from .saved_state import engine as engine_state
from .saved_state import saved_parts, unchanged_on_errors, with_checksums
from .schedules import forgetting, growing, inverse_time_decay
from .solvers import EigenSolver
from .stacks import by_parameter
from .steering import lessons_of
from .turning import take_turned_step

# Defaults of the optimizers, chosen on one half of benchmarks.swap and judged on the other (benchmarks/results/swap).
# None of them depends on the scale of the loss. An engine without an optimizer has the paper's defaults.
_DEFAULTS: dict[str, Any] = {
    "damping": OfLargest(inverse_time_decay(0.03, steps=10, final=1e-4)),
    "scaling": "graft",
    # The rarer statistics get, the more of the past each of their updates forgets; a past too large for the new moments
    # counts less.
    "factor_decay": forgetting(inverse_time_decay(0.95, steps=250, final=0.8), slack=3.0),
    "inv_update_steps": growing(fraction=0.5, minimum=10, most_work=1.0, maximum=100),
    "solver": EigenSolver(negligible=0.3),
}
_PRECONDITIONS = ("momentum", "gradient")

if TYPE_CHECKING:  # the class beside the mixin has to be an optimizer
    _Optimizer = torch.optim.Optimizer
else:
    _Optimizer = object


@register_joinable
class KFACMixin(_Optimizer):
    """Adds K-FAC to any ``torch.optim.Optimizer``: turns and stretches its updates, or preconditions its gradients.

    ``class KFACRMSprop(KFACMixin, torch.optim.RMSprop): pass`` is all it takes to make another optimizer.

    Args:
        params: An ``nn.Module`` (raw, or wrapped by DDP or torch.compile), or what the base class takes: parameters,
            named parameters, group dicts. Without a module, the modules that own the parameters are found.
        *args: The base class's positional arguments, in its order.
        model: The module, if ``params`` is not one.
        precondition: "momentum" (default): the base class steps on the raw gradients. Each layer's update is then
            turned towards its preconditioned first moment: the momentum buffer or ``exp_avg``. If the base class keeps
            neither, the first moment is an average of the gradients while trust is learned, and otherwise the gradient.
            With ``scaling="graft"`` (default) trust says how far the update turns. Its length is kept, so that ``lr``
            means what it means to the base class. The update is then lengthened along directions flatter than the
            steepest one, as far as reach says. Both are learned (:mod:`~.trust`, :mod:`~.reach`). Weight decay acts as
            in the base class and is not preconditioned, unless a base class other than SGD and Adam's family adds it to
            the gradient. "gradient": as in the paper, the base class steps on preconditioned gradients.
        **options: The keywords of the base class and of :class:`~kfac_optim.CurvatureEngine`, which documents its own.
            ``damping``, ``scaling``, ``factor_decay``, ``inv_update_steps`` and ``solver`` have other defaults here,
            which the signatures show.

    Raises:
        TypeError: For an unknown keyword, a value of the wrong kind, or a base class whose ``step()`` needs a closure
            (``torch.optim.LBFGS``): such a class takes several gradients per step, and K-FAC could precondition only
            the first of them.
        ValueError: For a value out of range, a ``model`` that owns none of the parameters, or options of the base class
            that can't be honoured (``capturable``, ``differentiable``).
    """

    curvature: CurvatureEngine
    _private: frozenset[str] = frozenset()  # names of attributes that hold options of the base class; not its hooks

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives the class a signature that shows the arguments of the base class and of the engine."""
        super().__init_subclass__(**kwargs)
        refuse_order(cls, KFACMixin)
        if "__init__" in cls.__dict__:
            return
        base = next(c for c in cls.__mro__ if "__init__" in c.__dict__ and not issubclass(c, KFACMixin))
        model = inspect.signature(KFACMixin.__init__).parameters["model"]
        precondition = model.replace(name="precondition", default=_PRECONDITIONS[0], annotation="str")
        shown = signature(base.__init__, model, precondition, defaults=_DEFAULTS)
        cls.__signature__ = shown  # type: ignore[attr-defined]

    def __init__(self, params: Any, *args: Any, model: nn.Module | None = None, **options: Any) -> None:
        refuse_base(type(self), self._base_function())
        precondition = _checked(options.pop("precondition", _PRECONDITIONS[0]))
        if not (model is None or isinstance(model, nn.Module)):
            raise TypeError(f"model={type(model).__name__}: must be an nn.Module")
        if isinstance(params, nn.Module):
            model, params = params if model is None else model, params.parameters()
        params = params if isinstance(params, Tensor) else list(params)  # the base class refuses a lone tensor
        if any(isinstance(given, nn.Module) for given in params):
            raise TypeError("params has modules in it: pass nn.ModuleList([...]) of them, or their parameters()")
        options = without_counters(options)
        curvature = {name: options.pop(name) for name in engine_options() if name in options}
        allowed = [x for c in type(self).__mro__ for x in inspect.signature(vars(c).get("__init__", object)).parameters]
        refuse_unknown(type(self).__name__, options, [*allowed, *engine_options(), "precondition"])
        derived_from, of_subclass = derived_from_by_horovod(type(self), params), set(vars(self))
        super().__init__(params, *args, **options)
        refuse_in_groups(self.param_groups, {*self.defaults, *curvature})
        # The gradient scaler unscales gradients and skips overflowed steps itself, even where a fused base class could.
        self._step_supports_amp_scaling = False
        added = {*vars(self), "_private"} - of_subclass
        self._private = frozenset(n for n in added if n.startswith("_") and not n.startswith("_optimizer_"))
        if isinstance(derived_from, KFACMixin):
            self.__dict__.update(derived_from._settings())
            self.curvature = derived_from.curvature
        else:
            trained = self._parameters()
            source = trained if model is None else model
            self.curvature = CurvatureEngine(source, trained, **_DEFAULTS | curvature)
            self.precondition = precondition
        if self.state:  # filled by Adagrad; torch.distributed.checkpoint then takes it to be complete
            self.curvature.stages.allocate(self.curvature.stages.blocks)
            self._show_layer_states()
        self._show_counters()

    @property
    def precondition(self) -> str:
        """What is preconditioned, "momentum" or "gradient", as in the constructor; may be set."""
        return "momentum" if self.curvature.turns_steps else "gradient"

    @precondition.setter
    def precondition(self, value: str) -> None:
        self.curvature.serve(turns_steps=_checked(value) == "momentum")

    # The step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: Evaluated first, with gradients enabled, if given.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: If the model trains but none of its layers was seen, or the parameters are no longer the
                model's; on all ranks, if they have diverged. The message says what to do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stages = self.curvature.stages
        take_part_in_join(self, stages.comm, self._parameters, first=not (stages.closed or stages.ranks.are_prepared))
        self._take_step(closure)
        return loss

    @_disable_dynamo  # a graph break where a whole training step is compiled
    def _take_step(self, closure: Callable[[], Any] | None = None) -> None:
        engine, stages = self.curvature, self.curvature.stages
        try:
            stages.follow(self._parameters())
            with self._layer_states_handed_over():
                buckets = buckets_of(self)
                gradients, lrs = gradients_of(buckets), [rate_of(group) for group in self.param_groups]
                learns = not (stages.closed or stages.sits_out)
                lessons = lessons_of(self, buckets, stages.steering.watch, stages.trained.covered()) if learns else None
                if engine.update(list(gradients.values()), lrs, lessons):
                    self._update_weights(buckets, closure)
                    engine.advance(gradients)
        except BaseException:  # after Ctrl-C or out of memory, the entries may be those of half a step
            records.forget(self, records.OF_STEP)
            stages.recover()
            raise

    def _update_weights(self, buckets: Sequence[Bucket], closure: Callable[[], Any] | None) -> None:
        """Updates the weights; ``closure``: evaluates the loss, if the loop has one; only ``KFAC`` uses it."""
        if self.precondition == "gradient" or self.curvature.closed:
            records.forget(self, records.RECORDED)
            self.curvature.stages.steering.watch.note(())
            self._precondition_gradients(gradients_of(buckets))
        else:
            take_turned_step(self, self.curvature, buckets, self._base_step)

    def _precondition_gradients(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Takes the base class's step on directions, then puts the gradients back, for logging and clipping."""
        directions = by_parameter(self.curvature.directions(gradients, rates_of(self.param_groups)), gradients)
        try:
            for parameter, direction in directions.items():
                parameter.grad = direction
            self._base_step()
        finally:
            for parameter in directions:
                parameter.grad = gradients[parameter]

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _base_step(self) -> None:
        """Takes the base class's step without its step hooks, which fire once, for our own step."""
        self._base_function()(self)

    @classmethod
    def _base_function(cls) -> Any:
        """The base class's ``step``, as it was before its step hooks were put around it."""
        step: Any = super().step
        while getattr(step, "hooked", False):
            step = step.__wrapped__
        return step

    # Uneven inputs: a torch.distributed.algorithms.join.Joinable ------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> Any:
        """The hook for ``with Join([ddp_model, optimizer])``, which needs one ``step()`` for every forward pass.

        A rank that has run out of inputs goes on stepping with the gradients of the others.
        """
        return join_hook(self._step_along)

    @torch.no_grad()
    def _step_along(self) -> None:
        comm = self.curvature.stages.comm
        if comm.world_size > 1:  # else the ranks that Join knows train apart
            share_gradients(comm, self._parameters(), self.param_groups, exhausted=True)
            self._take_step()

    @property
    def join_device(self) -> torch.device:
        """The device that ``Join`` communicates on."""
        return self._parameters()[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group that ``Join`` communicates in."""
        return self.curvature.stages.comm.group

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and the statistics of backward passes that no step has used."""
        if hasattr(self, "curvature"):  # not vars(self): Lightning calls this on a stand-in for the optimizer
            self.curvature.discard()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, whose layers are preconditioned from then on."""
        given = param_group if isinstance(param_group, dict) else {}  # torch refuses what is no dict
        for flag in ("capturable", "differentiable"):
            if given.get(flag, self.defaults.get(flag)):
                raise ValueError(f"{flag}=True: not possible, as K-FAC's step reads flags on the host; leave it out")
        if hasattr(self, "curvature"):  # __init__ checks the first groups
            refuse_in_groups([given], set().union(self.defaults, *self.param_groups))
        super().add_param_group(param_group)
        if hasattr(self, "curvature"):
            with self._layer_states_handed_over():
                self.curvature.extend(self.param_groups[-1]["params"])
            self._show_counters()

    def __repr__(self) -> str:
        return "\n".join(s for s in super().__repr__().splitlines() if not s.lstrip().startswith(PREFIX))

    # State ----------------------------------------------------------------------------------------------------------
    # A layer's state is in state[weight]["kfac"], counters are in every group: torch.distributed.checkpoint keeps both.

    @contextmanager
    def _layer_states_handed_over(self) -> Iterator[None]:
        """Hands the layers' states to the engine for a ``with`` block, and then shows them again, even on errors."""
        try:
            engine_state.adopt_states(self.curvature.stages, take_out_layers(self))
            yield
        finally:
            self._show_layer_states()

    def _show_layer_states(self) -> None:
        stepped = set(map(id, self._parameters()))  # a parameter's hash takes time
        for block in self.curvature.stages.blocks:
            if block.state and id(block.layer.weight) in stepped:  # torch saves the state of no other parameters
                self.state[block.layer.weight].setdefault(LAYER_STATE, block.state)

    def _show_counters(self) -> None:
        counters = {PREFIX + name: value for name, value in engine_state.counters_of(self.curvature.stages).items()}
        for group in self.param_groups:
            for name in [name for name in group if name.startswith(PREFIX) and name not in counters]:
                del group[name]
            group.update(counters)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the states of the layers, and with counters and the states' checksums in every group.

        Where the strategy shares factors out (``factors="sharded"``), it holds those of this rank alone, which is what
        ``torch.distributed.checkpoint`` needs; :meth:`full_state_dict` holds all of them.
        """
        self._show_layer_states()  # a training loop may have emptied the state to start the base class anew
        self._show_counters()
        return self._in_saved_form(super().state_dict())

    def full_state_dict(self) -> dict[str, Any]:
        """As :meth:`state_dict`, but whole and the same on every rank (a collective: call it on all of them).

        It holds all that the ranks have seen so far, and can be loaded on any number of ranks with any strategy.
        Factors that the strategy shares out are on the CPU in it. What FSDP2 has sharded of the base class's state
        stays sharded: for FSDP2, use ``torch.distributed.checkpoint``.
        """
        with self._layer_states_handed_over():
            whole = engine_state.whole_states(self.curvature)
        self._show_counters()
        state_dict: dict[str, Any] = super().state_dict()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, i in zip(group["params"], saved["params"], strict=True):
                if parameter in whole:
                    state_dict["state"][i] = {**state_dict["state"][i], LAYER_STATE: whole[parameter]}
        return self._in_saved_form(state_dict)

    def _in_saved_form(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        stages = self.curvature.stages
        turned = stages.trained.covered() if stages.plan().learns else ()
        return with_checksums(records.saved_form(state_dict, self, turned, stages.steering.watch.marks()))

    @torch.inference_mode(False)  # tensors made in inference mode could not be changed in place later
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this optimizer, or of its plain base class, in which case the curvature starts anew.

        Raises:
            ValueError: If the state is damaged, of another model or of another base class; then nothing is changed.
            RuntimeError: If the parameters are no longer the model's, as in :meth:`step`.
        """
        stages, checked = self.curvature.stages, list[tuple[Any, Any]]()

        def check(_: Any, given: dict[str, Any]) -> None:
            states, counters, without = saved_parts(self, given, self._base_function())
            if states or counters:
                engine_state.check_saved(stages, states, counters, without)
            checked.append((states, counters))

        stages.follow(self._parameters())  # a framework may have set the groups of the resumed run
        with unchanged_on_errors(self, checked):
            last = self.register_load_state_dict_pre_hook(check)  # last, as users' hooks may put the state in order
            try:
                super().load_state_dict(state_dict)
            finally:
                last.remove()
        take_out_layers(self)  # torch has cast these to the type of the weights; the engine loads the saved ones
        marks = records.take_saved_form(self)
        engine_state.load_checked(stages, *checked[0])
        stages.steering.watch.restore(marks)
        self._show_layer_states()
        self._show_counters()

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle: also the curvature with its model, and options in attributes of the object."""
        return {**super().__getstate__(), **self._settings(), "curvature": self.curvature}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with set_aside(state.get("state", {})):
            super().__setstate__(state)

    def _settings(self) -> dict[str, Any]:
        """The options that are attributes of the object rather than entries of its groups."""
        shared = ("defaults", "state", "param_groups", "curvature", "step")
        own = [key for key in vars(self) if key in self._private or not key.startswith("_")]
        return {key: vars(self)[key] for key in own if key not in shared}


def _checked(precondition: str) -> str:
    if precondition not in _PRECONDITIONS:
        raise ValueError(f"precondition={precondition!r}: must be {' or '.join(map(repr, _PRECONDITIONS))}")
    return precondition


class KFACSGD(KFACMixin, torch.optim.SGD):
    """``torch.optim.SGD`` with K-FAC; see :class:`KFACMixin` for the arguments."""


class KFACAdam(KFACMixin, torch.optim.Adam):
    """``torch.optim.Adam`` with K-FAC; see :class:`KFACMixin` for the arguments."""


class KFACAdamW(KFACMixin, torch.optim.AdamW):
    """``torch.optim.AdamW`` with K-FAC; see :class:`KFACMixin` for the arguments."""


class KFACLAMB(KFACMixin, MultiTensorLamb):
    """``torch_optimizer.Lamb`` with K-FAC; see :class:`KFACMixin` for the arguments."""
