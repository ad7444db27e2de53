"""The hooks of a model: on its outermost call, on its layers and on their outputs.

``_on_model_call_start`` and ``_on_model_call_end`` open and end a model call (its states: ``calls.py``). A backward
pass that reaches the output of the model or of a layer opens a micro-batch (its states: ``microbatch.py``). Between two
steps, ``discard`` and ``take`` forget an open call, which was interrupted; ``take`` also forgets the last call.

For the sampled Fisher, ``sampling.py`` comes between the model's output and the micro-batch. While a graph is traced,
each hook hands over to ``compiled.py``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..common.stopwatch import Stopwatch
from ..distributed import is_sharded, own_part
from ..layers import HostedLayer, KroneckerLayer, RecurrentLayer
from .autograd import (
    as_plain,
    beneath_transforms,
    in_backward,
    is_transformed,
    outside_jvp,
    own_result,
    when_gradient_arrives,
)
from .calls import ModelCall, ModelCalls, input_of
from .compiled import CompiledCalls, place_of
from .fisher import Fisher
from .hook_objects import EagerHook, FirstHook, Hook, Hooks, modules_to_hook
from .loss_terms import LossTerms, main_tensor
from .microbatch import BackwardPasses
from .recorder import Recorder, dense_input
from .recurrent import RecurrentCalls
from .sampling import SampledBackward
from .signs import GameSigns
from .statistics import TakenStatistics
from .taps import Tap, remove_taps, tap_of
from .weight_uses import WeightUses


class Capture:
    """Watches the layers of a model for an engine; nothing is captured before :meth:`prepare` enables it.

    Args:
        layers: The layers.
        roots: The modules that contain the layers' modules.
        loss_terms: Counts M.
        fisher: The distribution to sample targets from; None for the empirical Fisher.
        dtype: Precision of the moments.
        stopwatch: Where the time is noted.
        signs: Is told of calls of frozen layers, and of gradients that are removed although they were captured.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        roots: Sequence[nn.Module],
        *,
        loss_terms: LossTerms,
        fisher: Fisher | None,
        dtype: torch.dtype,
        stopwatch: Stopwatch,
        signs: GameSigns,
    ) -> None:
        self.layers = list(layers)
        self._signs, self._loss_terms = signs, loss_terms
        self._calls, self._uses = ModelCalls(), WeightUses(self.layers)
        self._recorder = Recorder(self.layers, dtype, stopwatch)
        self._passes = BackwardPasses(self._recorder, signs.note_captured_lost)
        signs.watch(self._passes)
        self._sampling = None if fisher is None else SampledBackward(fisher, self._passes, roots)
        self._compiled = CompiledCalls(self._calls, self._passes, sampled=fisher is not None)
        self._recurrent = RecurrentCalls(self._calls, self._passes, self._sampling)
        self._hooks = Hooks(self)
        self._attach(roots)

    @property
    def enabled(self) -> bool:
        """Whether the step collects statistics."""
        return self._recorder.enabled

    def prepare(
        self,
        *,
        step: int,
        rank: int,
        left_out: Collection[int],
        enabled: bool,
        fraction: float,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Sets what the coming step captures.

        Args:
            step: The number of the step.
            rank: This process's rank; every rank draws its own samples in every step.
            left_out: The indices of layers whose statistics are taken by other ranks only.
            enabled: Whether the step collects statistics.
            fraction: The share of the examples that statistics are collected from.
            grad_scaler: The scaler whose loss scale the gradients carry, if any.
        """
        self._recorder.prepare(enabled=enabled, fraction=fraction, grad_scaler=grad_scaler, left_out=left_out)
        if self._sampling is not None:
            self._sampling.prepare(step, rank)

    def close(self) -> None:
        """Removes every hook and forgets what was captured."""
        self._recorder.prepare(enabled=False)
        self.discard()
        self._hooks.remove()

    def discard(self) -> None:
        """Discards the micro-batches of this step, but not a forward pass that still awaits its backward pass."""
        self._passes.discard()
        if self._sampling is not None:
            self._sampling.restart()
        if not in_backward():  # an interrupted call may have left these
            self._calls.forget_current()
            remove_taps()

    def take(self) -> TakenStatistics:
        """Returns the statistics of this step and starts those of the next.

        Raises:
            RuntimeError: If gradients have passed through calls of layers inside ``torch.func``, or if another thread
                is in a forward or backward pass.
        """
        self._calls.require_alone()
        self._passes.require_alone()
        statistics, hidden = self._passes.take(), self._passes.hidden
        self.discard()
        self._compiled.finish_running_call()
        self._calls.forget_last()
        if hidden:
            raise RuntimeError(
                "the model has gradients, but some of them came through torch.func (vmap, grad, jacrev, hessian), "
                f"inside which none of its layers was seen ({self.layers[min(hidden)].name!r} is one of them). Take "
                "derivatives by torch.autograd.grad(..., create_graph=True), call the model outside of torch.func, or "
                "leave these layers out by skip_layers"
            )
        return statistics

    def _attach(self, roots: Iterable[nn.Module]) -> None:
        """Hooks every layer, and every module that contains one, as any of them may be the outermost call."""
        uses: dict[nn.Module, list[tuple[int, int]]] = {}  # a module may have several layers
        hosted: dict[nn.Module, list[tuple[tuple[int, int], HostedLayer]]] = {}
        recurrent: dict[nn.Module, list[tuple[int, RecurrentLayer]]] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, HostedLayer):
                for number, host in enumerate(layer.hosts):
                    hosted.setdefault(host, []).append(((index, number), layer))
            elif isinstance(layer, RecurrentLayer):
                recurrent.setdefault(layer.host, []).append((index, layer))
            else:
                for number, module in enumerate(layer.modules):
                    uses.setdefault(module, []).append((index, number))
        for module, unwatched in modules_to_hook({*uses, *hosted, *recurrent}, roots).items():
            self._hooks.begin(module, unwatched)
            own = uses.get(module, [])  # places: the index of a layer, and of the module among the layer's own
            # Those of layers run first, because other hooks may change the output. Only the hooks of tensor parallelism
            # run before them, since they turn DTensors into local tensors.
            first = not (own and self.layers[own[0][0]].is_shard)
            if len(own) == 1 and not list(module.children()):  # one hook: three can take as long as a small layer
                traced: tuple[Any, ...] = (place_of(*own[0]),)
                of_layer = FirstHook(self._on_layer_call, own[0], traced=traced, in_every_step=self._note_if_frozen)
                self._hooks.after(module, of_layer, first=first)
                continue
            for place in own:
                self._hooks.after(module, Hook(self._record_input, place, traced=(place_of(*place),)), first=first)
            start, end = (EagerHook, EagerHook) if module in recurrent else (FirstHook, Hook)
            self._hooks.before(module, start(self._on_model_call_start), first=True)
            if module in recurrent:
                self._hooks.after(module, EagerHook(self._recurrent.on_call, recurrent[module]), first=True)
            if layers := hosted.get(module):
                traced = ([(place_of(*place), layer) for place, layer in layers],)
                of_host = FirstHook(self._on_host_start, layers, traced=traced, in_every_step=self._note_frozen_inside)
                self._hooks.before(module, of_host)
                self._hooks.after(module, Hook(self._on_host_end), always_call=True)
            self._hooks.after(module, end(self._on_model_call_end), always_call=True)

    # Model calls ----------------------------------------------------------------------------------------------------

    def _on_model_call_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            self._calls.enter(module, None)
        elif (call := self._calls.enter(module, module.forward)) is not None:
            if not in_backward():
                self._passes.require_alone()
            self._uses.forget_calls()
            # M is needed now: the backward pass may begin before the call returns, or an exception may end the call.
            call.set_terms(self._loss_terms.of_inputs(args, kwargs))

    def _on_model_call_end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = self._calls.leave(module)
        if call is None:
            # If the open call was interrupted, this one stands for it, and M is this one's. If the module calls itself,
            # the outermost call sets M once more. A user's callable is asked about outermost calls alone.
            if (outer := self._calls.outer_call_of(module)) is not None and not callable(self._loss_terms.average):
                outer.set_terms(self._loss_terms.count(args, kwargs, output))
        elif output is None and sys.exc_info()[0] is not None:  # this hook also runs when an exception ends the call
            self._uses.forget_calls()
        else:
            call.set_terms(self._loss_terms.count(args, kwargs, output))
            if torch.compiler.is_compiling():
                self._compiled.trace_model_call_end(call)
            else:
                self._on_model_output(call, output)

    def _on_model_output(self, call: ModelCall, output: Any) -> None:
        """Takes the sampled Fisher's backward pass; for the empirical one, waits for the user's to reach the output."""
        if not in_backward():
            self._calls.note_return(call)
            self._uses.look(output)
        if self._sampling is not None:
            if output is not None:
                self._sampling.run(call, output)
        elif (tensor := main_tensor(output)) is not None and tensor.requires_grad:
            tensor.register_hook(functools.partial(self._on_output_gradient, call))

    def _on_output_gradient(self, call: ModelCall, g: Tensor) -> None:
        """Opens a micro-batch when a backward pass reaches the model's output: M counts whichever layers follow."""
        if not torch.is_grad_enabled():
            self._passes.micro_batch_of(call)

    # Layer calls ----------------------------------------------------------------------------------------------------

    def _on_layer_call(
        self, place: tuple[Any, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        """Does the work of all three hooks for a layer without submodules, which may be the outermost call itself."""
        if self._calls.is_inner(module):  # as most are
            return self._record_input(place, module, args, kwargs, output)
        self._on_model_call_start(module, args, kwargs)
        replaced = self._record_input(place, module, args, kwargs, output)
        self._on_model_call_end(module, args, kwargs, output if replaced is None else replaced)
        return replaced

    def _note_if_frozen(
        self, place: tuple[int, int], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any
    ) -> None:
        layer = self.layers[place[0]]
        if not layer.weight.requires_grad:
            self._signs.note_frozen_call(layer, input_of(args, kwargs))

    def _record_input(
        self, place: tuple[Any, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        """Records a layer's call; ``place``: as :meth:`_record` or, while it is traced, :meth:`_trace` gets it."""
        record: Callable[..., Tensor | None] = self._trace if torch.compiler.is_compiling() else self._record
        return record(*place, input_of(args, kwargs), output)

    def _record(self, index: int, use: int, a: Any, output: Any, details: Sequence[int] = ()) -> Tensor | None:
        """Records a layer's call."""
        if not _needs_gradient(a, output):
            if torch.is_grad_enabled() and isinstance(output, Tensor):  # inside jvp no tensor says that it needs one
                self._record_transformed(index, use, a, output, details)
            return None
        a = own_part(a)  # with tensor parallelism, this rank's part: all columns, or its own
        if self._recorder.wants(index, a, output):
            if is_transformed(output):
                self._record_transformed(index, use, a, output, details)
            else:
                self._record_call(index, use, as_plain(a), output, details)
        return None

    @_disable_dynamo  # it does not know these functions
    def _record_transformed(self, index: int, use: int, a: Any, output: Tensor, details: Sequence[int]) -> None:
        """Records a call inside ``torch.func.jvp``, which gives values as ever, and their derivatives beside these.

        Inside other transforms, only whether the loss's gradient passes through the call is watched.
        """
        if not is_transformed(output):
            return
        value, outside = beneath_transforms(output), outside_jvp()
        if outside is not None:
            with outside:
                self._record(index, use, beneath_transforms(a) if isinstance(a, Tensor) else a, value, details)
        elif _needs_gradient(a, output) and self._recorder.wants(index, a, output):
            self._passes.watch_transformed(index, value)

    def _trace(self, place: Tensor, a: Any, output: Any, details: Sequence[int] = ()) -> Tensor | None:
        """As :meth:`_record`, in a graph that is being traced; returns what takes the place of the output."""
        if not _needs_gradient(a, output) or is_sharded(output):
            return None
        return self._compiled.trace_layer_call(place, own_part(a), output, details)

    def _record_call(self, index: int, use: int, a: Tensor, output: Tensor, details: Sequence[int]) -> None:
        """Takes the moment of a layer's input now, and that of its output's gradient when this arrives."""
        call, result = self._calls.current, own_result(output)
        if call is not None and not in_backward():
            self._uses.note_call(index, call.module, result)
        dense = dense_input(self.layers[index], a)
        if dense is None or output.numel() == 0:  # an expert to which no token was routed has seen nothing
            return
        if self._sampling is not None and self._sampling.leaves_out(index, call):
            return
        layout = None if result is output else (output.shape, output.stride())
        layer_call = self._recorder.observe(index, use, dense, output, details, layout)
        if self._sampling is not None and call is not None:
            self._sampling.await_gradient(call, [index], lambda g: [(layer_call, g)], result)
        else:
            take = functools.partial(self._passes.record_output_gradient, layer_call, call or self._calls.last)
            when_gradient_arrives(result, take)

    # Hosts ----------------------------------------------------------------------------------------------------------

    def _on_host_start(
        self,
        layers: Sequence[tuple[tuple[Any, ...], HostedLayer]],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Watches the functions that one call of a host gives weights to.

        ``layers``: each with the first arguments of :meth:`_record` or, while it is traced, of :meth:`_trace`.
        """
        is_traced = torch.compiler.is_compiling()
        if is_traced and module._compiled_call_impl is not None:  # a graph of this hook alone can't leave a mode on
            return
        tap = tap_of(module, [layer for _, layer in layers])
        if tap is None and not is_traced:
            remove_taps(module)  # an interrupted call may have left its tap
        if torch.is_grad_enabled() and any(layer.weight.requires_grad for _, layer in layers):
            if tap is None:
                tap = Tap(module)
                tap.__enter__()
            record: Callable[..., Any] = self._trace if is_traced else self._record
            tap.add([(functools.partial(record, *place), layer) for place, layer in layers])

    def _note_frozen_inside(self, layers: Sequence[tuple[tuple[int, int], HostedLayer]], *call: Any) -> None:
        for place, _ in layers:
            self._note_if_frozen(place, *call)

    def _on_host_end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        remove_taps(module)


def _needs_gradient(a: Any, output: Any) -> bool:
    """Whether a layer was applied to a tensor, and a gradient of its output will be computed."""
    if not (torch.is_grad_enabled() and isinstance(output, Tensor) and isinstance(a, Tensor)):
        return False
    return output.requires_grad
