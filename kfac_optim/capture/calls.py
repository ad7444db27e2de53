"""Calls of a model: which one is in progress, and which one a layer's call belongs to.

The states of a model call::

    open       the outermost watched module was entered with gradients enabled; layers that run now belong to it
      -> returned   its forward has returned: M is known
      -> dropped    its forward raised, was interrupted, or has returned without gradients
    returned   the last call: layers that run again during its backward pass (activation checkpoints) belong to it
      -> forgotten  another call has returned, or the step is over

If the code of a model is traced for a compiled graph, a call goes through these states when the graph has run; see
``compiled.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = [
    "CONCURRENT",
    "ModelCall",
    "ModelCalls",
    "as_plain",
    "in_backward",
    "is_wrapped",
    "own_result",
    "when_gradient_arrives",
]

CONCURRENT = (
    "two threads are in forward or backward passes of one model at the same time, and its statistics can't tell them "
    "apart: let one thread after the other run forward and backward (a lock around both), give each a copy of the "
    "model (copy.deepcopy) and an optimizer of its own, or use processes (DistributedDataParallel instead of "
    "DataParallel). If a pass of another thread was interrupted, call zero_grad() of the optimizer first"
)

_COPIED = "ToCopyBackward0"  # the node of a tensor that is a copy in another precision


@dataclass(eq=False)
class ModelCall:
    """One call of the outermost module.

    Attributes:
        module: The module; None for a call whose compiled graph runs before its Python code takes effect.
        forward: The module's ``forward`` when it was called; None if the call is traced for a compiled graph.
        thread: The thread that made the call; None if the call is traced.
        terms: M; until the call returns, as far as the inputs tell.
    """

    module: nn.Module | None = None
    forward: Any = None
    thread: threading.Thread | None = None
    terms: int = 0

    def set_terms(self, terms: int) -> None:
        """Sets M."""
        self.terms = terms

    @property
    def is_of_other_thread(self) -> bool:
        """Whether another thread, which is still running, made the call."""
        thread = self.thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    @property
    def is_training_loop(self) -> bool:
        """Whether the module's ``forward`` was another method when the call began.

        Under DDP Lightning runs ``training_step`` in this way, which contains the backward pass and the step. No graph
        holds a whole step, and torch 2.9 could not trace the comparison.
        """
        if self.forward is None or torch.compiler.is_compiling():
            return False
        return bool(cast(nn.Module, self.module).forward != self.forward)


class ModelCalls:
    """The model call in progress and the last one that returned.

    Attributes:
        current: The open call, or None.
        last: The call that returned last in this step, or None.
    """

    def __init__(self) -> None:
        self.current: ModelCall | None = None
        self.last: ModelCall | None = None
        self._depth = 0  # how many calls of the open call's module are in progress: it may call itself

    def is_inner(self, module: nn.Module) -> bool:
        """Whether a call of this module lies inside that of another one, so that no model call begins or ends here."""
        call = self.current
        return not (call is None or call.module is module or call.is_of_other_thread or call.is_training_loop)

    def enter(self, module: nn.Module, forward: Any) -> ModelCall | None:
        """Notes that a watched module was called; returns the model call that it opens, or None.

        Raises:
            RuntimeError: If another thread is in a call of the model.
        """
        call = self.current
        if call is not None and forward is not None and call.is_of_other_thread:
            if not torch.is_grad_enabled():  # the model is evaluated while it trains
                return None
            raise RuntimeError(CONCURRENT)
        if in_backward() and self.last is not None:  # a checkpoint recomputes part of a call that was counted
            return None
        if call is not None and not call.is_training_loop:
            if call.module is module:
                self._depth += 1
            return None
        self.current = None
        if not torch.is_grad_enabled():
            return None
        self.current = ModelCall(module, forward, None if forward is None else threading.current_thread())
        self._depth = 1
        return self.current

    def leave(self, module: nn.Module) -> ModelCall | None:
        """Notes that a watched module was left, by a return or an exception; if it opened the call, the call is over.

        Returns that call if gradients are enabled, else None.
        """
        call = self.current
        if call is None or call.module is not module:
            return None
        if not torch.compiler.is_compiling() and call.is_of_other_thread:
            return None
        if in_backward() and self.last is not None:  # a checkpoint recomputes part of a call that was counted
            return None
        self._depth -= 1
        if self._depth > 0:
            return None
        self.current = None
        return call if torch.is_grad_enabled() else None

    def outer_call_of(self, module: nn.Module) -> ModelCall | None:
        """The open call of a module that was just left: it calls itself, or that call was interrupted; else None."""
        call = self.current
        return call if call is not None and call.module is module and torch.is_grad_enabled() else None

    def note_return(self, call: ModelCall) -> None:
        """Notes that a call has returned and M is known."""
        self.last = call

    def require_alone(self) -> None:
        """Raises if another thread is in a call of the model."""
        if self.current is not None and self.current.is_of_other_thread:
            raise RuntimeError(CONCURRENT)

    def forget_current(self) -> None:
        """Forgets the open call, which was interrupted, as a notebook's cell may be."""
        self.current = None

    def forget_last(self) -> None:
        """Forgets the last call, because the step is over."""
        self.last = None


def as_plain(tensor: Tensor) -> Tensor:
    """The same numbers without the methods of a subclass (images, labelled tensors), which may refuse to be reshaped.

    Tensors that store their numbers in another way define ``__torch_dispatch__``, and stay as they are.
    """
    if type(tensor) is Tensor or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(tensor, Tensor)


def is_wrapped(g: Tensor) -> bool:
    """Whether a gradient is of several passes at once (``is_grads_batched=True``), or of one inside ``torch.func``."""
    functorch = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(g) or functorch.is_legacy_batchedtensor(g))


def own_result(output: Tensor) -> Tensor:
    """The tensor that a layer has computed: its output, or the tensor of which the output is a reshaped view.

    ``F.linear`` with a bias returns a view of a matrix for inputs of three and more dimensions. If a view is changed in
    place, by ``ReLU(inplace=True)`` say, autograd replaces its node, and the old one never runs; the matrix's does.
    """
    result = None if output.is_nested or not output._is_view() else output._base
    if result is None or result.grad_fn is None or result.numel() != output.numel() or result.dtype != output.dtype:
        return output
    return result if result.is_contiguous() and output.is_contiguous() else output


def in_backward() -> bool:
    """Whether a backward pass is running; while a graph is traced, none is."""
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)


def when_gradient_arrives(output: Tensor, take: Callable[[Tensor], None], *, of_loss: bool = False) -> None:
    """Calls ``take`` with the gradient of a tensor: once, or as often as the graph is kept for another backward pass.

    It gets what the operation that made the tensor gets, after all hooks that the user may put on the tensor later.
    These may change the gradient (those that clip it in a recurrent loop), and the weight's gradient is made of the
    changed one. A training loop holds its last loss, and with it the graph and its hooks, until the next forward pass
    has ended; so ``take`` is released at once.

    Args:
        output: A tensor of the graph.
        take: Called with the gradient.
        of_loss: Whether to go back to the tensor that ``output`` is a copy of in another precision. Accelerate's mixed
            precision returns a float32 copy of the model's output, whereas a model that also returns its loss has
            computed that from the original.
    """
    node: Any = output.grad_fn
    number = output.output_nr
    if node is None:
        node = torch.autograd.graph.get_gradient_edge(output).node
    while of_loss and node.name() == _COPIED:
        node, number = node.next_functions[0]
    waiting = [take]

    def on_gradients(gradients: tuple[Tensor | None, ...]) -> None:
        g = gradients[number]
        if g is None or not waiting:
            return
        waiting[0](g)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            waiting.clear()

    node.register_prehook(on_gradients)
