"""Operators for compiled graphs, which can't hold hooks on tensors.

Both return copies because an operator's result may not be its argument, and are kept because their results are used.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .distributions import Fisher

__all__ = ["Watcher", "register", "see_in_graph"]


class Watcher(Protocol):
    """What is told of the layers of a graph, when it runs."""

    enabled: bool
    fisher: Fisher | None

    def see_compiled(
        self, index: int, use: int, a: Tensor, output: Tensor, part: Sequence[int]
    ) -> Callable[[Tensor], None]:
        """Takes note of a call of a layer; returns what takes the gradient of its output."""
        ...


_HANDLES = itertools.count()
_WATCHERS: weakref.WeakValueDictionary[int, Watcher] = weakref.WeakValueDictionary()
# By a tensor that the graph saves for its backward, so that an observation lives as long as the graph needs it.
_AWAITED: MutableMapping[Tensor, Callable[[Tensor], None] | None] = WeakTensorKeyDictionary()


def register(watcher: Watcher) -> int:
    """The number by which graphs know a watcher; it is held weakly."""
    handle = next(_HANDLES)
    _WATCHERS[handle] = watcher
    return handle


def _require_empirical(watcher: Watcher) -> None:
    if watcher.fisher is not None:
        raise RuntimeError(
            "the sampled Fisher needs gradients of single layers before the backward pass, which a compiled graph "
            "doesn't give: use fisher='empirical', or don't compile the model"
        )


@torch.library.custom_op(
    "kfac_optim::see",
    mutates_args=(),
    schema="(Tensor a, Tensor output, int capture, int index, int use, int[] part) -> (Tensor, Tensor)",
)
def see_in_graph(
    a: Tensor, output: Tensor, capture: int, index: int, use: int, part: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The output of a layer, and what stands for the observation."""
    token, watching = torch.zeros((), dtype=torch.int64), _WATCHERS.get(capture)
    arrive = None
    if watching is not None and watching.enabled and output.numel():
        _require_empirical(watching)
        arrive = watching.see_compiled(index, use, a, output, part)
    _AWAITED[token] = arrive
    return output.clone(), token


@see_in_graph.register_fake
def _(a: Tensor, output: Tensor, capture: int, index: int, use: int, part: Sequence[int]) -> tuple[Tensor, Tensor]:
    _require_empirical(_WATCHERS[int(capture)])  # here, so that it is raised during compilation
    return torch.empty_like(output), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("kfac_optim::arrive", mutates_args=(), schema="(Tensor g, Tensor token) -> Tensor")
def _arrive_in_graph(g: Tensor, token: Tensor) -> Tensor:
    """The gradient of a layer's output."""
    arrive = _AWAITED[token]
    if arrive is not None:
        arrive(g)
    return g.clone()


@_arrive_in_graph.register_fake
def _(g: Tensor, token: Tensor) -> Tensor:
    return torch.empty_like(g)


def _save_token(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _compiled_backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return None, _arrive_in_graph(g, *ctx.saved_tensors), None, None, None, None


see_in_graph.register_autograd(_compiled_backward, setup_context=_save_token)
