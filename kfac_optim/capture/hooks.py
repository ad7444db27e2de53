"""The hooks of a model: on its outermost call, on its layers and on their outputs."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..layers import KroneckerLayer, Observation, full_precision
from .attention import start_tapping, stop_tapping
from .compiled import register, see_in_graph
from .distributions import Fisher
from .loss_terms import LossTerms, main_tensor
from .statistics import MicroBatch, ModelCall, Moments, StepStatistics

__all__ = ["Capture"]


class Capture:
    """Watches the layers of a model. One for an engine.

    Args:
        layers: The layers.
        roots: The modules that contain them.
        loss_terms: Counts M.
        fisher: None for the empirical Fisher, else the distribution to sample from.
        output_fn: Model output -> tensor of the distribution's parameters.
        packers: Per layer two functions, for A and for G: moment -> packed form.
        dtype: Precision of the moments.
        stage: Name of a stage -> context manager that times it.
        seed: (seed, rank) of the sampled targets.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        roots: Iterable[nn.Module],
        *,
        loss_terms: LossTerms,
        fisher: Fisher | None,
        output_fn: Callable[[Any], Tensor] | None,
        packers: Sequence[tuple[Callable[[Tensor], Tensor], ...]],
        dtype: torch.dtype,
        stage: Callable[[str], AbstractContextManager[None]],
        seed: tuple[int, int],
    ) -> None:
        self.layers = list(layers)
        self.loss_terms, self.fisher, self.output_fn = loss_terms, fisher, output_fn
        self.packers, self.dtype, self.stage, self.seed = packers, dtype, stage, seed
        self.enabled = False
        self.fraction = 1.0  # of the examples, those that statistics are collected from
        self.grad_scaler: torch.amp.GradScaler | None = None
        self.statistics = StepStatistics()
        self.step = 0
        self._samples = 0
        self._call: ModelCall | None = None
        self._last_call: ModelCall | None = None
        self._running: ModelCall | None = None  # stands for the call whose compiled graph runs ...
        self._left: ModelCall | None = None  # ... until this one, which its Python code makes afterwards, tells M
        self._batch: MicroBatch | None = None
        self._handles: list[Any] = []
        self._handle = register(self)
        self._attach(roots)
        weakref.finalize(self, _remove, self._handles)

    # Hooks ----------------------------------------------------------------------------------------------------------

    def _attach(self, roots: Iterable[nn.Module]) -> None:
        """Hooks on every layer, and on every module that contains one (any of them may be the outermost call)."""
        own = [(i, layer.modules) for i, layer in enumerate(self.layers) if layer.host is None]
        called = {module: (i, use) for i, modules in own for use, module in enumerate(modules)}
        hosts = {layer.host for layer in self.layers if layer.host is not None}
        watched = set(called) | hosts
        containers: dict[nn.Module, None] = {}
        for root in roots:
            for module in root.modules():
                if any(child in watched for child in module.modules()):
                    containers[module] = None
        for module in containers:
            hook = functools.partial(module.register_forward_pre_hook, with_kwargs=True)
            self._handles.append(hook(_Hook(self, "_enter"), prepend=True))
            if module in hosts:
                self._handles.append(hook(_Hook(self, "_start_tapping")))
                after = _Hook(self, "_stop_tapping")
                self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
            if module in called:
                after = _Hook(self, "_after_layer", *called[module])
                self._handles.append(module.register_forward_hook(after, with_kwargs=True))
            after = _Hook(self, "_leave")
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def close(self) -> None:
        """Removes every hook and forgets what was captured."""
        self.enabled = False
        self.discard()
        _remove(self._handles)

    def discard(self) -> None:
        """Forgets the micro-batches of this step; a forward that still awaits its backward is kept."""
        self.statistics, self._samples = StepStatistics(), 0
        if not _in_backward():
            self._batch = self._call = None  # a call that is still open was interrupted, as in a notebook's cell

    def take(self) -> StepStatistics:
        """The statistics of this step, which start anew."""
        statistics = self.statistics
        self.discard()
        self._settle()
        self._last_call = None
        return statistics

    # Outermost calls ------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recomputed = _in_backward()
        if recomputed and self._last_call is not None:  # a checkpointed part of a call that was counted
            return
        if self._call is not None and self._call.lent:
            self._call = None
        if self._call is None:
            if not torch.is_grad_enabled():
                return
            if not (recomputed or torch.compiler.is_compiling()):
                self._batch = None  # left behind by a backward pass that raised
            self._call = ModelCall(module, None if torch.compiler.is_compiling() else module.forward)
        if self._call.module is module:
            self._call.entered += 1

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = self._call
        if call is None or (_in_backward() and self._last_call is not None) or call.module is not module:
            return
        call.entered -= 1
        if call.entered > 0:
            return
        self._call = None
        if output is None or not torch.is_grad_enabled():  # the forward raised, or returned nothing
            return
        call.terms = self.loss_terms.count(args, kwargs, output)
        if torch.compiler.is_compiling():
            self._left = call
            return
        if not _in_backward():
            self._last_call = call
        if self.fisher is not None:
            self._sample(call, output)
            return
        tensor = main_tensor(output)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(functools.partial(self._reach, call))

    def _reach(self, call: ModelCall, g: Tensor) -> None:
        """The backward pass reached the model output."""
        if not torch.is_grad_enabled():
            self._open(call)

    # Layer calls ----------------------------------------------------------------------------------------------------

    def _after_layer(
        self, index: int, use: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        a = args[0] if args else next(iter(kwargs.values()), None)
        return self._see(index, use, a, output)

    def _see(self, index: int, use: int, a: Any, output: Any, part: tuple[int, ...] = ()) -> Tensor | None:
        """A call of a layer. Returns what has to take the place of the output in a graph that is being compiled."""
        layer = self.layers[index]
        if not (self.enabled and torch.is_grad_enabled() and layer.weight.requires_grad):
            return None
        if not (isinstance(output, Tensor) and output.requires_grad and isinstance(a, Tensor)):
            return None
        if torch.compiler.is_compiling():
            return cast(Tensor, see_in_graph(a, output, self._handle, index, use, part)[0])
        if output.numel() == 0:  # an expert to which no token was routed: nothing was seen
            return None
        recomputed = _in_backward()
        if self.fisher is not None and (recomputed or self._call is None):
            return None
        module = layer.modules[use]
        observation = self._observe(index, module, a, output, part)
        call = self._call or self._last_call
        if self.fisher is not None:
            assert call is not None
            # The edge, not the tensor: after an in-place activation the tensor stands for the activation's output.
            edge = torch.autograd.graph.get_gradient_edge(output)
            call.layers.append((index, module, observation, edge))
        else:
            output.register_hook(_Pending(functools.partial(self._arrive, index, module, observation, call)))
        return None

    def _observe(self, index: int, module: nn.Module, a: Tensor, output: Tensor, part: Sequence[int]) -> Observation:
        """``part``, of attention: number of examples; for packed projections first and last pair and query rows."""
        layer = self.layers[index]
        how: dict[str, Any] = {"examples": part[0]} if part else {}
        pairs = {"pairs": slice(part[1], part[2])} if len(part) > 1 else {}
        subsample: Callable[[Tensor], Tensor] = functools.partial(
            layer.subsample, module, fraction=self.fraction, **how
        )
        with self.stage("factor computation"), full_precision(a.device.type):
            seen = subsample(a)
            observation = layer.observe(module, seen, output, self.dtype, **pairs)
            observation.subsample = subsample
            if not layer.by_example:
                observation.a = self.packers[index][0](observation.a)
        if pairs and part[1] > 0 and not layer.by_example:  # keys and values count as many rows as the queries
            observation.a *= part[3] / observation.count * (seen.numel() / a.numel())
            observation.count = 0.0
        return observation

    def _arrive(
        self, index: int, module: nn.Module, observation: Observation, call: ModelCall | None, g: Tensor
    ) -> None:
        """The gradient of a layer's output: the pair (a, g) is complete."""
        if torch.is_grad_enabled():  # create_graph=True: a gradient penalty or a higher derivative, not the loss
            return
        if _trains(self.layers[index]):
            self._add(self._open(call), index, observation, self._output_moment(index, module, observation, g))

    def _add(self, batch: MicroBatch, index: int, observation: Observation, g: Tensor) -> None:
        if self.layers[index].by_example:  # calls on as many examples are taken for calls on the same examples
            observation = dataclasses.replace(observation, context=None)  # has served; of norm layers it is an image
            batch.by_example.setdefault((index, len(g)), []).append((observation, g))
        else:
            batch.add(index, observation.a, observation.count, g)

    def _pool_calls(self, batch: MicroBatch) -> None:
        for (index, _), calls in batch.by_example.items():
            device = calls[0][1].device
            with self.stage("factor computation"), full_precision(device.type):
                a, count, g = self.layers[index].pool(calls)
                batch.add(index, self.packers[index][0](a), count, self.packers[index][1](g))

    def _output_moment(self, index: int, module: nn.Module, observation: Observation, g: Tensor) -> Tensor:
        with self.stage("factor computation"), full_precision(g.device.type):
            seen = observation.subsample(g.detach()).to(self.dtype)
            if seen.numel() < g.numel():  # G is M times a sum over all examples, of which these stand for more
                seen = seen * (g.numel() / seen.numel()) ** 0.5
            if self.fisher is None and self.grad_scaler is not None:  # a copy of the gradient: not for nothing
                seen = seen / _scale_of(self.grad_scaler, g.device)
            moment = self.layers[index].output_moment(module, seen, observation)
            return moment if self.layers[index].by_example else self.packers[index][1](moment)

    # Compiled graphs ------------------------------------------------------------------------------------------------

    def see_compiled(
        self, index: int, use: int, a: Tensor, output: Tensor, part: Sequence[int]
    ) -> Callable[[Tensor], None]:
        """What ``_see`` does, while a compiled graph runs; returns what its backward graph has to call.

        The Python code of the graph's modules, with it ``_enter`` and ``_leave``, takes effect when the graph has run.
        """
        module = self.layers[index].modules[use]
        # A copy, because an observation may keep its input, and compiled code writes over what it needs no more.
        observation = self._observe(index, module, a.clone(), output, part)
        if self._left is not None:
            self._settle()
        call = self._call
        if _in_backward():  # recomputed
            call = self._last_call
        elif call is None:
            self._batch = None  # left behind by a backward pass that raised
            call = self._running = self._running or ModelCall()
        return functools.partial(self._arrive_compiled, index, module, observation, call)

    def _arrive_compiled(
        self, index: int, module: nn.Module, observation: Observation, call: ModelCall | None, g: Tensor
    ) -> None:
        self._settle()
        self._arrive(index, module, observation, call, g)

    def _settle(self) -> None:
        """A call whose graph has run is over: gives it what ``_leave`` told."""
        if self._running is not None and self._left is not None:
            self._running.terms, self._last_call = self._left.terms, self._running
        self._running = self._left = None

    # Micro-batches --------------------------------------------------------------------------------------------------

    def _open(self, call: ModelCall | None) -> MicroBatch:
        """The micro-batch of the backward pass in progress."""
        if self._batch is None:
            self._batch = MicroBatch()
            close = _Hook(self, "_close")
            torch.autograd.Variable._execution_engine.queue_callback(close)
        if call is not None:
            self._batch.calls.add(call)
        return self._batch

    def _close(self) -> None:
        """The backward pass has ended: adds its moments to the step's if all of them are finite."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        self._pool_calls(batch)
        if not batch.sums:
            return
        step = self.statistics
        sums = [tensor.sum() for entry in batch.sums.values() for tensor in (entry.a, entry.g)]
        kept = torch.stack([s.to(sums[0].device) for s in sums]).isfinite().all()
        self._drop_overflowed(_scale_of(self.grad_scaler, sums[0].device))
        for index, new in batch.sums.items():
            # In place: all of them together are as large as the factors.
            a, g = (t.masked_fill_(~kept.to(t.device), 0.0) for t in (new.a, new.g))
            counts = [0.0] * len(step.terms) + new.counts
            if index in step.sums:
                entry = step.sums[index]
                entry.a.add_(a)
                entry.g.add_(g)
                entry.counts += counts[len(entry.counts) :]
            else:
                step.sums[index] = Moments(a, g, counts)
        step.terms.append(max((call.terms for call in batch.calls), default=1))
        step.kept.append(kept)

    def _drop_overflowed(self, scale: Tensor) -> None:
        """A loss scale that fell says that the micro-batches before it belong to a step that was not taken."""
        step = self.statistics
        if step.scales:
            valid = (scale >= step.scales[-1].to(scale)).to(self.dtype)
            for entry in step.sums.values() if self.grad_scaler is not None else ():
                entry.a.mul_(valid.to(entry.a.device))
                entry.g.mul_(valid.to(entry.g.device))
        step.scales.append(scale.clone())

    # The sampled Fisher ---------------------------------------------------------------------------------------------

    def _sample(self, call: ModelCall, output: Any) -> None:
        """Output moments for targets drawn from the model, pending until the user's backward reaches the output."""
        logits = self.output_fn(output) if self.output_fn is not None else main_tensor(output)
        if not (isinstance(logits, Tensor) and logits.requires_grad) or logits.dim() == 0 or not call.layers:
            call.layers.clear()
            return
        self._require_whole_model(call)
        generator = torch.Generator(logits.device).manual_seed(hash((*self.seed, self.step, self._samples)) % 2**63)
        self._samples += 1
        with self.stage("sampled backward"), torch.autocast(logits.device.type, enabled=False):
            with torch.no_grad():
                parameters = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
                # Nothing can be drawn from NaNs; they go on to the moments, so that these are left out.
                finite = parameters.isfinite().all()
                target = cast(Fisher, self.fisher).sample_gradient(torch.where(finite, parameters, 0.0), generator)
                target = torch.where(finite, target, torch.nan).to(logits.dtype)
            edges = [edge for *_, edge in call.layers]
            try:
                gradients = torch.autograd.grad(logits, edges, target, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                if "heckpoint" not in str(error):
                    raise
                raise RuntimeError(
                    "the sampled Fisher can't pass re-entrant activation checkpoints: use "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or fisher='empirical'"
                ) from error
        pending = [
            (index, observation, self._output_moment(index, module, observation, g))
            for (index, module, observation, _), g in zip(call.layers, gradients, strict=True)
            if g is not None
        ]
        call.layers.clear()
        logits.register_hook(_Pending(functools.partial(self._commit, call, pending)))

    def _commit(self, call: ModelCall, pending: list[tuple[int, Observation, Tensor]], g: Tensor) -> None:
        if torch.is_grad_enabled():
            return
        reached = [seen for seen in pending if _trains(self.layers[seen[0]])]
        for index, observation, g_sum in reached:
            self._add(self._open(call), index, observation, g_sum)

    def _require_whole_model(self, call: ModelCall) -> None:
        assert call.module is not None
        inside = set(call.module.modules())
        outside = [layer.name for layer in self.layers if not any(m in inside for m in layer.modules)]
        if outside:
            raise RuntimeError(
                f"the sampled Fisher needs the model's output, but {type(call.module).__name__} was called on its own, "
                f"without {outside[0]!r}: call the model as one module, or use fisher='empirical'"
            )

    # Attention ------------------------------------------------------------------------------------------------------

    def _start_tapping(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.enabled and torch.is_grad_enabled():
            tapped = [(i, layer) for i, layer in enumerate(self.layers) if layer.host is module]
            start_tapping(module, args[0] if args else kwargs["query"], tapped, self._see)

    def _stop_tapping(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        stop_tapping()


class _Pending:
    """What waits in a graph for a gradient: once, or as often as the graph is kept for another backward pass.

    A training loop holds its last loss, and with it graph and hooks, until the next forward pass has ended. What they
    hold is not to live as long.
    """

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self.take: Callable[[Tensor], None] | None = take

    def __call__(self, g: Tensor) -> None:
        if self.take is None:
            return
        self.take(g)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.take = None


class _Hook:
    """A method of a capture, held weakly: copies and pickles of a hooked model carry hooks that do nothing."""

    def __init__(self, capture: Capture | None, method: str = "", *args: Any) -> None:
        self.capture = weakref.ref(capture) if capture is not None else None
        self.method, self.args = method, args

    def __call__(self, *args: Any) -> Any:
        capture = self.capture() if self.capture is not None else None
        if capture is None or not capture.enabled or _exporting():
            return None
        return getattr(capture, self.method)(*self.args, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None,)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _in_backward() -> bool:
    """Whether a backward pass is running; while a graph is traced, none is."""
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)


def _exporting() -> bool:
    """Whether the model is traced for use elsewhere, which is no training."""
    # The flag, not is_exporting(): to several versions of dynamo that one is true in torch.compile, too.
    return torch.jit.is_tracing() or getattr(torch.compiler, "_is_exporting_flag", False)  # type: ignore[attr-defined]


def _trains(layer: KroneckerLayer) -> bool:
    """Whether the backward pass in progress adds to the gradient of a layer's weight.

    ``torch.autograd.grad(loss, inputs)`` does not: adversarial examples and saliency maps are no training.
    """
    owned = any(own is layer.weight for module in layer.modules for own in module._parameters.values())
    if not owned or hasattr(layer.weight, "device_mesh"):  # FSDP2 (DTensors): in its graph another tensor stands for it
        return True
    try:
        node = torch.autograd.graph.get_gradient_edge(layer.weight).node
        return bool(torch._C._will_engine_execute_node(node))
    except (RuntimeError, AttributeError):  # autograd.grad() was asked for the weight's own; a compiled graph runs
        return True


def _scale_of(scaler: torch.amp.GradScaler | None, device: torch.device) -> Tensor:
    """The current loss scale, without waiting for the device; 1 where no scaler is in use."""
    scale = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
    return torch.ones((), device=device) if scale is None else scale.to(device)
