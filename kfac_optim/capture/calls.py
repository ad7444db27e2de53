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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .autograd import in_backward

CONCURRENT = (
    "two threads are in forward or backward passes of one model at the same time, and its statistics can't tell them "
    "apart: let one thread after the other run forward and backward (a lock around both), give each a copy of the "
    "model (copy.deepcopy) and an optimizer of its own, or use processes (DistributedDataParallel instead of "
    "DataParallel). If a pass of another thread was interrupted, call zero_grad() of the optimizer first"
)


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
        if torch.compiler.is_compiling() or self.forward is None:  # a graph must not depend on the bound method
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
        if torch.compiler.is_compiling():  # to ask which module has opened the call would tie the graph to this one
            return call is not None
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


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The input of a layer's call: the first argument, or the one named ``input``, or the first tensor among others."""
    if args:
        return args[0]
    return kwargs.get("input", next((given for given in kwargs.values() if isinstance(given, Tensor)), None))
