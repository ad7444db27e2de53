"""Copies and pickles of a watched model, which leave the hooks out.

``copy``, ``pickle`` and ``torch.save`` ask a module for its state by ``__getstate__``. A watched module has a
``__getstate__`` of its own, which leaves the hooks of this package out. So a saved model can be loaded where this
package is not installed, or with ``weights_only=True``, and a copy is an ordinary model, which another optimizer may
watch.

If a module holds its optimizer, the optimizer is copied first, and must wait for the module's state to put hooks on it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# A module's tables of hooks, each with the tables that torch keeps beside it under the same ids.
_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


class StateWithoutHooks:
    """Stands in for a module's ``__getstate__``; several captures of one module share it.

    Args:
        module: The module, held weakly.
        kind: The type of the hooks that are left out.
    """

    def __init__(self, module: nn.Module, kind: type) -> None:
        self._module, self._kind = weakref.ref(module), kind

    def __call__(self) -> Any:
        """The module's state as its class gives it, in new dictionaries without the hooks."""
        module = self._module()
        assert module is not None
        state: Any = type(module).__getstate__(module)
        if isinstance(state, tuple):  # of a class with slots
            return self._without_hooks(state[0]), *state[1:]
        return self._without_hooks(state) if isinstance(state, dict) else state

    def _without_hooks(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state without this object and without hooks of the kind."""
        state = {name: value for name, value in state.items() if value is not self}
        for name, marks in _HOOKS.items():
            ours = {number for number, hook in state.get(name, {}).items() if isinstance(hook, self._kind)}
            for changed in (name, *marks):
                if ours and changed in state:
                    entries = state[changed]
                    state[changed] = type(entries)((n, entry) for n, entry in entries.items() if n not in ours)
        return state

    def remove(self) -> None:
        """Gives the module the state of its class again, once it has no hook of the kind any more."""
        module = self._module()
        if module is None or vars(module).get("__getstate__") is not self:
            return
        if not any(isinstance(hook, self._kind) for name in _HOOKS for hook in vars(module)[name].values()):
            del vars(module)["__getstate__"]


def leave_hooks_behind(module: nn.Module, kind: type) -> StateWithoutHooks | None:
    """Keeps hooks of a type out of copies and pickles of a module, until they and then the result are removed.

    Modules that define how they are copied, and scripted ones, are left alone: None is returned.
    """
    if hasattr(type(module), "__deepcopy__") or isinstance(module, torch.jit.ScriptModule):
        return None
    present = vars(module).setdefault("__getstate__", StateWithoutHooks(module, kind))
    return present if isinstance(present, StateWithoutHooks) else None


class _StateTaker:
    """Stands in for the ``__setstate__`` of a module that is being copied or unpickled, until it is called."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.afterwards = module, list[Callable[[], None]]()

    def __call__(self, state: Any) -> None:
        vars(self._module).pop("__setstate__")
        self._module.__setstate__(state)
        for call in self.afterwards:
            call()


def when_whole(roots: Sequence[nn.Module], call: Callable[[], None]) -> None:
    """Calls ``call`` as soon as modules and those in them have their state: at once, unless they are being copied.

    A copy or a pickle first restores what a module's state holds, such as an optimizer, and then sets that state.
    """
    for module in itertools.chain.from_iterable(root.modules() for root in roots):  # each before those in it
        if vars(module).keys() <= {"__setstate__"}:
            taker = vars(module).setdefault("__setstate__", _StateTaker(module))
            taker.afterwards.append(functools.partial(when_whole, roots, call))  # others may not be whole then
            return
    call()
