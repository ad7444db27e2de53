"""The hooks as objects, and how they get to their places.

A hook holds its owner weakly, so that a model keeps no optimizer alive, and does nothing once the owner is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.machines import refuse_cuda_graphs
from .calls import CONCURRENT
from .copies import leave_hooks_behind

__all__ = ["FirstHook", "Hook", "Hooks"]


class Hook:
    """Calls a method of a capture or a replay while that is enabled; in copies and pickles it does nothing.

    Args:
        method: The method, bound to its owner; None in copies and pickles.
        *args: The method's first arguments; those of the hook follow.
    """

    def __init__(self, method: Any, *args: Any) -> None:
        self.owner = None if method is None else weakref.ref(method.__self__)
        self.function: Any = getattr(method, "__func__", None)
        self.args = args
        self.module: Callable[[], Any] | None = None

    def of(self, module: nn.Module) -> Hook:
        """Binds the hook to a module: tools that swap modules move its hooks to the new one, perhaps without flags."""
        self.module = weakref.ref(module)
        return self

    def __call__(self, *args: Any) -> Any:
        owner = self.owner() if self.owner is not None else None
        if owner is None or not owner.enabled or _exporting():
            return None
        if self.module is not None and self.module() is not args[0]:
            if getattr(args[0], "_is_replica", False) and torch.is_grad_enabled():  # nn.DataParallel on several GPUs
                raise RuntimeError(CONCURRENT)
            return None
        return self.function(owner, *self.args, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (None,)

    @property
    def __name__(self) -> str:
        """Only read by ``torch.jit.script``, which would compile the hook.

        Raises:
            AttributeError: Always; the message says what to do instead.
        """
        raise AttributeError(
            "torch.jit.script can't compile the hooks that kfac_optim has put on this model: script a copy, "
            "torch.jit.script(copy.deepcopy(model)), or call optimizer.curvature.close() first"
        )


class FirstHook(Hook):
    """The first hook of a module, which looks at calls with gradients in steps without statistics, too.

    It refuses CUDA graphs that are being recorded. ``in_every_step``: another method of the owner, for such calls.
    """

    def __init__(self, method: Any, *args: Any, in_every_step: Any = None) -> None:
        super().__init__(method, *args)
        self.in_every_step = getattr(in_every_step, "__func__", None)

    def __call__(self, *args: Any) -> Any:
        if self.owner is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            refuse_cuda_graphs()
            here = self.module is not None and self.module() is args[0]
            if here and self.in_every_step is not None and (owner := self.owner()) is not None:
                self.in_every_step(owner, *self.args, *args)
        return super().__call__(*args)


class Hooks:
    """The hooks that call one owner's methods. They are removed together, at the latest when the owner is gone."""

    def __init__(self, owner: Any) -> None:
        self._handles: list[Any] = []
        weakref.finalize(owner, self.remove)

    def before(self, module: nn.Module, hook: Hook, *, first: bool = False) -> None:
        """Puts a hook before the calls of a module; ``first``: before all others."""
        self._handles.append(module.register_forward_pre_hook(hook.of(module), with_kwargs=True))
        if first:
            _put_last_first(module._forward_pre_hooks)

    def after(self, module: nn.Module, hook: Hook, *, first: bool = False, always_call: bool = False) -> None:
        """As :meth:`before`, after the calls; ``always_call``: also if they end with an exception."""
        handle = module.register_forward_hook(hook.of(module), with_kwargs=True, always_call=always_call)
        self._handles.append(handle)
        if first:
            _put_last_first(module._forward_hooks)

    def leave_behind(self, module: nn.Module) -> None:
        """Keeps the hooks out of copies and pickles of a module."""
        state = leave_hooks_behind(module, Hook)
        if state is not None:
            self._handles.append(state)

    def remove(self) -> None:
        """Removes all hooks."""
        while self._handles:
            self._handles.pop().remove()


def _put_last_first(hooks: dict[int, Any]) -> None:
    """Does what torch does for ``prepend=True``, but in the order of plain dicts as well.

    Torch changes that of ``OrderedDict`` alone. Graphs that torch 2.9 compiles then look for hooks in the wrong places,
    and fail where two optimizers watch a model.
    """
    *before, last = hooks.items()
    hooks.clear()
    hooks.update([last, *before])


def _exporting() -> bool:
    """Whether the model is being traced for use elsewhere, and not for training."""
    # The flag is read because is_exporting() is also true within torch.compile in several versions of torch.
    return torch.jit.is_tracing() or getattr(torch.compiler, "_is_exporting_flag", False)  # type: ignore[attr-defined]
