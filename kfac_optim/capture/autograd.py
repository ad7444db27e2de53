"""What is asked of autograd: the graph behind a tensor, the backward pass in progress, the gradients that arrive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch.autograd.graph import GradientEdge

Edge = tuple[Any, int]  # a node, and the number of one of the nodes that a backward pass goes to from it

_COPIED = "ToCopyBackward0"  # the node of a tensor that is a copy in another precision


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


def gradients_at(edges: Sequence[GradientEdge], output: Tensor, gradient: Tensor) -> list[Tensor | None]:
    """The gradients at some edges in a backward pass from ``output``, after all hooks on the tensors there.

    ``torch.autograd.grad`` returns those before the hooks where the pass goes on to another of the edges.
    """
    arrived: dict[int, Tensor] = {}
    passes: list[int] = []  # this one is the first; users' hooks may begin others inside it

    def note(index: int, gradients: tuple[Tensor | None, ...]) -> None:
        g = gradients[edges[index].output_nr]
        if g is not None and torch._C._current_graph_task_id() in passes[:1]:
            arrived[index] = g

    handles: list[Any] = [output.register_hook(lambda _: passes.append(torch._C._current_graph_task_id()))]
    try:
        handles += [edge.node.register_prehook(functools.partial(note, index)) for index, edge in enumerate(edges)]
        found = torch.autograd.grad(output, edges, gradient, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return [arrived.get(index, g) for index, g in enumerate(found)]


def own_result(output: Tensor) -> Tensor:
    """The tensor that a layer has computed: its output, or the contiguous tensor of which the output is a whole view.

    ``F.linear`` with a bias returns a view of a matrix for inputs of three and more dimensions, and a norm over
    channels that come first a permuted one. If a view is changed in place, by ``ReLU(inplace=True)`` say, autograd
    replaces its node, and the old one never runs; that of what it is a view of does.
    """
    result = None if output.is_nested or not output._is_view() else output._base
    if result is None or result.grad_fn is None or result.numel() != output.numel() or result.dtype != output.dtype:
        return output
    repeats = not all(output.stride())  # an expanded part of it, which has as many entries
    return result if result.is_contiguous() and not repeats else output


def as_plain(tensor: Tensor) -> Tensor:
    """The same numbers without the methods of a subclass (images, labelled tensors), which may refuse to be reshaped.

    Tensors that store their numbers in another way define ``__torch_dispatch__``, and stay as they are.
    """
    if type(tensor) is Tensor or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(tensor, Tensor)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of ``torch.func`` in progress."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def beneath_transforms(tensor: Tensor) -> Tensor:
    """The tensor that the transforms of ``torch.func`` have wrapped; under ``jvp`` that is the value."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def outside_jvp() -> AbstractContextManager[Any] | None:
    """Leaves ``torch.func.jvp`` for a ``with`` block; None if another transform is in progress."""
    kinds = {interpreter.key() for interpreter in pyfunctorch.retrieve_all_functorch_interpreters()}
    only_jvp = kinds == {torch._C._functorch.TransformType.Jvp}
    return pyfunctorch.temporarily_clear_interpreter_stack() if only_jvp else None


def is_of_loss(g: Tensor) -> bool:
    """Whether a gradient may be that of the loss, rather than a derivative in it.

    ``create_graph=True`` enables gradients: this is a gradient penalty or a higher derivative. Nor is it one of several
    passes at once (``is_grads_batched=True``), or of a pass inside ``torch.func``.
    """
    is_wrapped = is_transformed(g) or torch._C._functorch.is_legacy_batchedtensor(g)
    return not (torch.is_grad_enabled() or is_wrapped)


def nodes_behind(node: Any) -> list[tuple[int, Any]]:
    """The nodes that a backward pass goes to from this one, each with its number among them."""
    return [(number, after) for number, (after, _) in enumerate(node.next_functions) if after is not None]


def nodes_reached(starts: Iterable[Any], without: Collection[Edge] = ()) -> Iterator[Any]:
    """The nodes that a backward pass from some nodes goes through, these included.

    Args:
        starts: The nodes; None, which tensors without a graph have, is ignored.
        without: Edges that are not followed.
    """
    nodes = {node for node in starts if node is not None}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        for number, after in nodes_behind(node):
            if after not in nodes and (node, number) not in without:
                nodes.add(after)
                waiting.append(after)


def leaves_of(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """The leaf tensors, mostly parameters, that some of the nodes stand for."""
    return (node.variable for node in nodes if getattr(node, "variable", None) is not None)
