"""The hooks as objects, the modules that get them, and how they get to their places.

A hook holds its owner weakly, so that a model keeps no optimizer alive, and does nothing once the owner is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Set
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from ..common.machines import refuse_cuda_graphs
from .calls import CONCURRENT
from .copies import leave_hooks_behind


class Hook:
    """Calls a method of a capture or a replay while that is enabled; in copies and pickles it does nothing.

    Args:
        method: The method, bound to its owner; None in copies and pickles.
        *args: The method's first arguments; those of the hook follow.
        traced: Its first arguments while dynamo traces a graph. Dynamo makes a new graph for each Python number that it
            meets in them, but the same graph serves for all tensors of one shape.
    """

    def __init__(self, method: Any, *args: Any, traced: tuple[Any, ...] = ()) -> None:
        self.owner = None if method is None else weakref.ref(method.__self__)
        self.function: Any = getattr(method, "__func__", None)
        self.args, self.traced = args, traced
        self.module: Callable[[], Any] | None = None
        self.unwatched = ""

    def of(self, module: nn.Module, unwatched: str) -> Hook:
        """Binds the hook to a module: tools that swap modules move its hooks to the new one, perhaps without flags.

        ``unwatched``: see :meth:`Hooks.begin`.
        """
        self.module, self.unwatched = weakref.ref(module), unwatched
        return self

    def __call__(self, *args: Any) -> Any:
        owner = self.owner() if self.owner is not None else None
        if owner is None or not owner.enabled or _exporting():
            return None
        if self.module is not None and self.module() is not args[0]:
            if getattr(args[0], "_is_replica", False) and torch.is_grad_enabled():  # nn.DataParallel on several GPUs
                raise RuntimeError(CONCURRENT)
            return None
        if torch.compiler.is_compiling():
            len(self.unwatched)  # read, so that the graph is for modules with the same text alone
            return self.function(owner, *self.traced, *args)
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

    def __init__(self, method: Any, *args: Any, traced: tuple[Any, ...] = (), in_every_step: Any = None) -> None:
        super().__init__(method, *args, traced=traced)
        self.in_every_step = getattr(in_every_step, "__func__", None)

    def __call__(self, *args: Any) -> Any:
        if self.owner is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            refuse_cuda_graphs()
            here = self.module is not None and self.module() is args[0]
            if here and self.in_every_step is not None and (owner := self.owner()) is not None:
                self.in_every_step(owner, *self.args, *args)
        return super().__call__(*args)


class EagerHook(FirstHook):
    """A hook of a module that dynamo does not trace, and must not meet as an argument of a hook either (recurrent)."""

    def __call__(self, *args: Any) -> Any:
        owner = self.owner() if self.owner is not None else None
        watches = owner is not None and owner.enabled and torch.is_grad_enabled()
        # Else nothing is done, and a break in the graph would cost time, or be an error.
        if torch.compiler.is_compiling() and not watches or _exporting():
            return None
        return self._call_eagerly(*args)

    @_disable_dynamo
    def _call_eagerly(self, *args: Any) -> Any:
        return super().__call__(*args)


class Hooks:
    """The hooks that call one owner's methods. They are removed together, at the latest when the owner is gone.

    The n-th hook of each module has the same number: dynamo makes a graph for each number that it meets, and blocks of
    a model that are compiled one by one are to share graphs.
    """

    def __init__(self, owner: Any) -> None:
        self._handles: list[Any] = []
        self._numbers: list[int] = []  # of the n-th hook of a module
        self._counts: MutableMapping[nn.Module, int] = weakref.WeakKeyDictionary()  # how many hooks a module has got
        self._unwatched: MutableMapping[nn.Module, str] = weakref.WeakKeyDictionary()
        weakref.finalize(owner, self.remove)

    def begin(self, module: nn.Module, unwatched: str = "") -> None:
        """Has to come before the hooks of a module: copies and pickles of it will have none.

        Args:
            module: The module.
            unwatched: Which parts in it and around it get no hooks, as any text. Dynamo asks no module whether it has
                hooks, so the graph of a block in which a layer is left out would serve for other blocks of its class,
                and that layer would not be seen there. A graph serves only where this text is the same.
        """
        self._unwatched[module] = unwatched
        state = leave_hooks_behind(module, Hook)
        if state is not None:
            self._handles.append(state)

    def before(self, module: nn.Module, hook: Hook, *, first: bool = False) -> None:
        """Puts a hook before the calls of a module; ``first``: before all others."""
        hook = hook.of(module, self._unwatched[module])
        self._keep(module.register_forward_pre_hook(hook, with_kwargs=True), module)
        if first:
            _put_last_first(module._forward_pre_hooks)

    def after(self, module: nn.Module, hook: Hook, *, first: bool = False, always_call: bool = False) -> None:
        """As :meth:`before`, after the calls; ``always_call``: also if they end with an exception."""
        hook = hook.of(module, self._unwatched[module])
        self._keep(module.register_forward_hook(hook, with_kwargs=True, always_call=always_call), module)
        if first:
            _put_last_first(module._forward_hooks)

    def _keep(self, handle: Any, module: nn.Module) -> None:
        """Keeps a hook that was put on a module as its last, under its number in the place of torch's."""
        n = self._counts.get(module, 0)
        self._counts[module] = n + 1
        if n == len(self._numbers):
            self._numbers.append(handle.id)
        for hooks in (handle.hooks_dict_ref(), *(reference() for reference in handle.extra_dict_ref)):
            if handle.id in hooks:
                hooks[self._numbers[n]] = hooks.pop(handle.id)
        vars(handle)["id"] = self._numbers[n]  # by which torch removes it
        self._handles.append(handle)

    def remove(self) -> None:
        """Removes all hooks."""
        while self._handles:
            self._handles.pop().remove()


def modules_to_hook(watched: Set[nn.Module], roots: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The modules in ``roots`` that are watched or contain one that is.

    Each comes with the text for :meth:`Hooks.begin`: which parts of it, and of the modules around it, have weights but
    no hooks.
    """
    every = dict.fromkeys(module for root in roots for module in root.modules())
    # torch.compile(part) wraps the part: only the part is hooked, as dynamo takes the two for one module.
    unwrapped = [module for module in every if "_orig_mod" not in module._modules]
    hooked = dict.fromkeys(module for module in unwrapped if any(child in watched for child in module.modules()))
    own: dict[nn.Module, str] = {}
    around: dict[nn.Module, set[str]] = {module: set() for module in every}  # a module may be in several
    for module in every:
        parts = [(name, part) for name, part in module.named_children() if part not in hooked]
        own[module] = " ".join(name for name, part in parts if next(nn.Module.parameters(part), None) is not None)
        for part in module.children():
            around[part].add(own[module])
    return {module: "/".join([own[module], *sorted(around[module])]) for module in hooked}


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
