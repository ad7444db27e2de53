"""Repeats the calls of a step at other weights, to find what the model would have returned.

Two hooks on the model note, for every call with gradients enabled, its arguments, the state of the random number
generators, and the gradient of the loss with respect to the tensor that parametrizes the output distribution. A call
counts once that gradient has arrived. It is repeated without gradients, so that nothing is captured, with the same
random numbers (dropout leaves out the same units), and buffers are put back afterwards (the running statistics of
BatchNorm stay as they were). Autocast is off: half precision would leave nothing of the differences of outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..layers import KroneckerLayer, spread_examples
from .autograd import in_backward, when_gradient_arrives
from .fisher import Fisher
from .gradients import GradientWatch, destination
from .hook_objects import Hook, Hooks
from .loss_terms import LossTerms

_LEAST = 256  # a part has at least this many examples, or all of a smaller batch, whatever the fraction
_HALF = (torch.bfloat16, torch.float16)
_AUTOCAST_INSIDE = (
    "the model computes in {} though it was called without autocast: it turns that on in its own forward, as "
    "Accelerate's mixed_precision and the Trainer's bf16 make it do. KFAC takes differences of outputs, of which half "
    "precision would leave nothing: prepare the model without mixed precision and call it under torch.autocast, which "
    "KFAC turns off when it calls the model itself, or use KFACSGD, KFACAdam, KFACAdamW or KFACLAMB"
)


class RandomState:
    """The state of torch's random number generators on the CPU and on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cpu = device, torch.get_rng_state()
        self.own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def restore(self) -> None:
        """Puts the generators back into this state."""
        torch.set_rng_state(self.cpu)
        if self.own is not None:
            torch.get_device_module(self.device).set_rng_state(self.own, self.device)


@contextmanager
def repeating(module: nn.Module, random: RandomState) -> Iterator[None]:
    """For running a module again with given random numbers; afterwards generators and buffers are as they were."""
    before = RandomState(random.device)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]  # BatchNorm changes them without a new version
    random.restore()
    try:
        yield
    finally:
        before.restore()
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of the model that has returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    autocast: bool
    output: Tensor  # the parameters of the distribution
    terms: int


@dataclass(eq=False)
class Part:
    """Some or all examples of a call, at which the model is evaluated again.

    Attributes:
        output: The parameters of the output distribution as they were, at least in float32.
        gradient: The gradient of the loss with respect to them.
        weight: How many examples of the call each example of this part stands for, >= 1.
        run: Calls the model with these examples.
    """

    output: Tensor
    gradient: Tensor
    weight: float
    run: Callable[[], Tensor]

    def evaluate(self) -> Tensor:
        """The parameters of the output distribution at the present weights.

        Raises:
            RuntimeError: If they do not belong to the examples of this part.
        """
        output = self.run()
        if output.shape != self.gradient.shape:
            raise RuntimeError(
                f"the model's output for every {self.weight:g}th example has the shape {tuple(output.shape)} instead "
                f"of {tuple(self.gradient.shape)}: the model can't be evaluated at some of its examples only; pass "
                "model_fraction=1.0"
            )
        return output


class Replay:
    """Remembers the calls of a model in a step.

    Args:
        module: The model, without a wrapper around it.
        fisher: The model's output distribution.
        loss_terms: Counts M.
        layers: Returns the model's layers; a backward pass counts if it adds to the gradient of one of their weights.

    Attributes:
        enabled: Whether calls are remembered.
    """

    def __init__(
        self, module: nn.Module, fisher: Fisher, loss_terms: LossTerms, layers: Callable[[], Sequence[KroneckerLayer]]
    ) -> None:
        self.module, self.fisher, self.loss_terms, self.layers = module, fisher, loss_terms, layers
        self.enabled = True
        # The calls in progress, the outermost first: the model may call itself.
        self._open: list[tuple[tuple[Any, ...], dict[str, Any], RandomState, bool]] = []
        self._calls: dict[_Call, Tensor] = {}  # the calls whose gradients have arrived, with these
        self._watch = GradientWatch(())
        self._task = -1  # the number of the last backward pass that has reached an output
        self._hooks = Hooks(self)
        self._hooks.begin(module)
        self._hooks.before(module, Hook(self._on_call), first=True)
        self._hooks.after(module, Hook(self._on_return), always_call=True)

    def close(self) -> None:
        """Removes the hooks."""
        self.enabled = False
        self.discard()
        self._hooks.remove()

    def discard(self) -> None:
        """Discards the calls of this step, except one that still awaits its backward pass."""
        self._calls = {}
        if not in_backward():
            self._open = []

    def take(self, fraction: float, loss_scale: float) -> tuple[list[Part], int]:
        """Ends the step.

        Args:
            fraction: The share of the examples to evaluate, in (0, 1].
            loss_scale: What the loss was multiplied by before the backward pass.

        Returns:
            The calls whose gradients have arrived, each as a :class:`Part` of its examples, and M of all of them. For a
            part that is smaller than its call, or of a call under autocast, this runs the model once.
        """
        calls = self._calls
        self.discard()
        # A loss that is a sum has M = 1, in however many calls.
        terms = 1 if self.loss_terms.average is None else sum(call.terms for call in calls)
        seen = [(call, g) for call, g in calls.items() if call.output.numel()]  # an empty batch has no part
        return [self._part(call, g, fraction, loss_scale) for call, g in seen], terms

    @torch.no_grad()
    def _run(self, random: RandomState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The parameters of the output distribution for these arguments, at the present weights."""
        with repeating(self.module, random), torch.autocast(random.device.type, enabled=False):
            return _precise(self.fisher.parameters_of(self.module(*args, **kwargs)))

    def _part(self, call: _Call, gradient: Tensor, fraction: float, loss_scale: float) -> Part:
        output = call.output
        if gradient.dtype in _HALF and not call.autocast:  # the weights themselves are not in half precision
            raise RuntimeError(_AUTOCAST_INSIDE.format(gradient.dtype))
        gradient = _precise(gradient) / loss_scale
        dim = self.loss_terms.dim_of_examples(output)
        examples = output.shape[dim]
        share = max(fraction, min(1.0, _LEAST / examples))

        def some(x: Tensor) -> Tensor:
            dim = self.loss_terms.dim_of_examples(x)
            return spread_examples(x, dim, share) if x.dim() > dim and x.shape[dim] == examples else x

        args, kwargs = call.args, call.kwargs
        if share < 1:
            args, kwargs = tree_map_only(Tensor, some, (args, kwargs))
            gradient = some(gradient)
        if call.autocast:  # inputs may be in half precision, as Lightning's Fabric makes them
            args, kwargs = tree_map_only(Tensor, lambda x: _precise(x) if x.dtype in _HALF else x, (args, kwargs))
        run = functools.partial(self._run, call.random, args, kwargs)
        if share < 1 or call.autocast:  # BatchNorm and dropout treat a part of the batch differently
            output = run()
        return Part(_precise(output), gradient, examples / gradient.shape[dim], run)

    # Hooks ----------------------------------------------------------------------------------------------------------

    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        device = next(nn.Module.parameters(module)).device
        self._open.append((args, kwargs, RandomState(device), torch.is_autocast_enabled(device.type)))

    def _on_return(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled() or in_backward() or not self._open:
            return
        begun = self._open.pop()
        if self._open:
            return
        parameters = None if output is None else self.fisher.parameters_of(output)
        if isinstance(parameters, Tensor) and parameters.requires_grad and parameters.dim():
            call = _Call(*begun, parameters.detach(), self.loss_terms.count(args, kwargs, output))
            # The graph of the output keeps the call until the gradient has arrived.
            when_gradient_arrives(parameters, functools.partial(self._on_gradient, call), of_loss=True)

    def _on_gradient(self, call: _Call, gradient: Tensor) -> None:
        """Notes the gradient of an output, if the pass is one of the loss (see ``gradients.py``)."""
        if torch.is_grad_enabled() or all(destination(layer) != "gradient" for layer in self.layers()):
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:  # the first output that the pass reaches, before it has changed a gradient
            self._task = task
            if self._calls and self._watch.all_cleared():  # by zero_grad() of some kind: a new step has begun
                self._calls = {}
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        known = self._calls.get(call)
        self._calls[call] = gradient.detach() if known is None else known + gradient.detach()

    def _on_backward_end(self) -> None:
        """Notes the gradients as the pass leaves them."""
        layers = self.layers()
        self._watch = GradientWatch(layers)
        self._watch.remember(range(len(layers)))


def _precise(x: Tensor) -> Tensor:
    """Converts a tensor to at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
