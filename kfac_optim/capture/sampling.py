"""The sampled Fisher's own backward pass, and its moments, which wait for the user's.

When a model call returns, targets are drawn from the model's predictive distribution, and a backward pass from the
output gives the gradients of the layers' outputs for these targets. Their moments are *pending*: they are added to a
micro-batch when the user's backward pass reaches the model's output, and lost if it never does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..common.user_warning import warn_user
from .autograd import as_plain, gradients_at, in_backward, is_of_loss, when_gradient_arrives
from .calls import ModelCall
from .fisher import Fisher
from .microbatch import BackwardPasses
from .recorder import LayerCall

_REENTRANT = (
    "the sampled Fisher can't pass re-entrant activation checkpoints{}: use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or fisher='empirical' (in the place of KFAC another "
    "optimizer of this package)"
)

# For the gradient of a tensor, the calls of the layers that have computed it, each with its output gradient.
_Calls = Callable[[Tensor], Iterable[tuple[LayerCall, Tensor]]]


class SampledBackward:
    """Draws targets for model calls, and holds their moments until the user's backward pass.

    Args:
        fisher: The distribution.
        passes: Receives the moments when the user's backward pass has reached the model's output.
        roots: The modules that contain the layers' modules.
    """

    def __init__(self, fisher: Fisher, passes: BackwardPasses, roots: Sequence[nn.Module]) -> None:
        self.fisher, self.recorder, self.passes, self.roots = fisher, passes.recorder, passes, roots
        self._step = self._rank = 0
        self._samples = 0  # how many were drawn in this step
        # Of a model call that goes on: layers, their calls once a gradient is known, and the graph edge of that tensor.
        self._awaited: WeakKeyDictionary[ModelCall, list[tuple[Sequence[int], _Calls, Any]]] = WeakKeyDictionary()
        self._seen: set[int] = set()  # the layers that model calls have reached with gradients enabled
        self._checked = False  # whether the loss's gradient was checked

    def prepare(self, step: int, rank: int) -> None:
        """Sets the number of the step and that of this process, which seed the samples."""
        self._step, self._rank = step, rank

    def restart(self) -> None:
        """Starts the step anew, with its first sample."""
        self._samples = 0

    def leaves_out(self, index: int, call: ModelCall | None) -> bool:
        """Whether a layer's call is not sampled: it is in no call of the model, or repeated in a backward pass.

        Raises:
            RuntimeError: If a layer runs with gradients in a re-entrant checkpoint alone. If no layer in front of it
                needs the sampled pass, torch raises no error of its own.
        """
        if not in_backward():
            return call is None
        # A user's function that computes its layers anew (adjoints) may be passed, and these train by the base rule.
        in_checkpoint = "Checkpoint" in type(torch._C._current_autograd_node()).__name__
        if in_checkpoint and index not in self._seen:
            name = self.recorder.layers[index].name
            raise RuntimeError(_REENTRANT.format(f", and {name!r} runs with gradients in backward passes alone"))
        return True

    def await_gradient(self, call: ModelCall, layers: Sequence[int], layer_calls: _Calls, result: Tensor) -> None:
        """Notes the tensor that one layer, or several together, have computed in a model call.

        ``layer_calls``: returns, for the gradient of ``result``, the layers' calls, each with its output gradient.
        """
        # The edge, because after an in-place activation the tensor itself stands for the activation's output.
        edge = torch.autograd.graph.get_gradient_edge(result)
        self._awaited.setdefault(call, []).append((layers, layer_calls, edge))

    def run(self, call: ModelCall, output: Any) -> None:
        """Takes the gradients of the layers' outputs for a model call that has just returned ``output``."""
        fisher = self.fisher
        logits = fisher.parameters_of(output)
        awaited = self._awaited.pop(call, [])
        if not (isinstance(logits, Tensor) and logits.requires_grad) or logits.dim() == 0 or not awaited:
            return
        self._require_whole_model(call)
        self._seen.update(index for layers, _, _ in awaited for index in layers)
        seed = hash((fisher.seed, self._rank, self._step, self._samples)) % 2**63
        self._samples += 1
        with self.recorder.stopwatch.stage("sampled backward"), torch.autocast(logits.device.type, enabled=False):
            target = self._sampled_gradient(logits, torch.Generator(logits.device).manual_seed(seed))
            try:
                gradients = gradients_at([edge for _, _, edge in awaited], logits, target)
            except RuntimeError as error:
                if "heckpoint" not in str(error):
                    raise
                raise RuntimeError(_REENTRANT.format("")) from error
        pending = {
            layer_call: self.recorder.output_moment(layer_call, own, scaled=False)
            for (_, layer_calls, _), g in zip(awaited, gradients, strict=True)
            if g is not None
            for layer_call, own in layer_calls(g)
        }
        when_gradient_arrives(logits, functools.partial(self._commit, call, pending), of_loss=True)

    @torch.no_grad()
    def _sampled_gradient(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        parameters = as_plain(logits).detach().to(torch.promote_types(logits.dtype, torch.float32))
        # Nothing can be drawn from NaNs. They are passed on to the moments, so that these do not count.
        finite = self.fisher.can_sample(parameters)
        target = self.fisher.sample_gradient(torch.where(finite, parameters, 0.0), generator)
        if getattr(target, "shape", None) != parameters.shape:  # torch would not say which method has returned it
            returned = f"a tensor of shape {list(target.shape)}" if isinstance(target, Tensor) else repr(target)
            raise ValueError(
                f"{type(self.fisher).__name__}.sample_gradient(output, generator) returned {returned}: must be a "
                f"tensor of the output's shape, {list(parameters.shape)}"
            )
        return torch.where(finite, target, torch.nan).to(logits.dtype)

    def _commit(self, call: ModelCall, pending: dict[LayerCall, Tensor], g: Tensor) -> None:
        """Adds the moments of a call, because the user's backward pass has reached the model's output."""
        if is_of_loss(g):
            self._check_loss(g)
            for layer_call in pending:
                self.passes.add(layer_call, call, functools.partial(pending.__getitem__, layer_call))

    def _check_loss(self, g: Tensor) -> None:
        """Warns, once, if the gradient of the user's loss cannot be that of the distribution's likelihood."""
        if self._checked:
            return
        self._checked = True  # only once, because it reads from the device
        problem = self.fisher.misfit(g)
        if problem:
            name = type(self.fisher).__name__.lower()
            warn_user(
                f"fisher={name!r} samples targets of that distribution, but the gradient of the loss with respect to "
                f"the model's output {problem}: choose the fisher that fits the loss (categorical: cross-entropy, "
                "bernoulli: binary cross-entropy, gaussian: squared error), or fisher='empirical'. If the loss is not "
                "computed from this output, give the distribution an output_fn"
            )

    def _require_whole_model(self, call: ModelCall) -> None:
        assert call.module is not None
        inside = set(call.module.modules())
        outside = [layer for layer in self.recorder.layers if inside.isdisjoint(layer.modules)]
        there = {module for root in self.roots for module in root.modules()} if outside else set()
        called_apart = [layer.name for layer in outside if not there.isdisjoint(layer.modules)]  # not taken out since
        if called_apart:
            raise RuntimeError(
                f"the sampled Fisher needs the model's output, but {type(call.module).__name__} was called on its own, "
                f"without {called_apart[0]!r}: call the model as one module, or use fisher='empirical'"
            )
