"""Finds weights that are used beside the calls of their module, which no hook on the module shows.

An example is ``h @ embedding.weight.T`` in a model's ``forward``. What such a use adds to the gradient of the weight is
missing from the layer's factors. Autograd's graph shows it as an edge to the weight that comes from none of the layer's
own operations. Each layer is examined once, in the first call of the model that it takes part in, and once for each
part of the model that a loop calls by itself, because such a call does not show what the rest does with the weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..common.user_warning import warn_user
from ..layers import KroneckerLayer
from .autograd import Edge, leaves_of, nodes_behind, nodes_reached
from .gradients import is_used_itself
from .loss_terms import tensors_in

_USED_BESIDE = "its weight is used beside its calls, too, which its factors do not show"
_MOST_RESHAPES = 8  # the most casts, transposes and views between a layer's operation and its weight or its result


class WeightUses:
    """Looks for uses of the layers' weights beside their calls."""

    def __init__(self, layers: Sequence[KroneckerLayer]) -> None:
        self._layers = layers
        self._looked_at: set[tuple[int, int]] = set()  # the number of a layer, and the id of the module that was called
        self._results: dict[tuple[int, int], list[Any]] = {}

    def forget_calls(self) -> None:
        """Releases the graph of the last call of the model, as the next one begins or it was interrupted."""
        self._results = {}

    def note_call(self, index: int, called: nn.Module | None, result: Tensor) -> None:
        """Notes that a layer was called in a call of the module ``called``, and returned ``result``."""
        layer, key = self._layers[index], (index, id(called))
        # Weight norm may have v in the graph twice (dim=None), and both are the layer's own use.
        if key not in self._looked_at and not layer.reparametrized and is_used_itself(layer):
            node = torch.autograd.graph.get_gradient_edge(result).node
            node.register_prehook(functools.partial(self._on_derivative, key))
            self._results.setdefault(key, []).append(node)

    def _on_derivative(self, key: tuple[int, int], gradients: Any) -> None:
        """Skips the layer after a backward pass inside the model (from an energy to forces), which uses the weight."""
        self._looked_at.add(key)
        self._results.pop(key, None)

    def look(self, output: Any) -> None:
        """Warns, once the model has returned, of all layers whose weights it has used beside their calls."""
        if not self._results:
            return
        results, self._results = self._results, {}
        self._looked_at |= set(results)
        known: dict[Edge, int] = {}
        for (index, _), nodes in results.items():
            edges = [_edge_to(self._layers[index].weight, node) for node in nodes]
            if None not in edges:  # else the graph hides the layer's own use (a checkpoint, FSDP2)
                known.update((edge, index) for edge in edges if edge is not None)
        reached = set(nodes_reached((tensor.grad_fn for tensor in tensors_in(output)), known))
        # A user's autograd function that takes the weight may call the layer inside: the graph then has no such call.
        called = {index for (node, _), index in known.items() if node in reached}
        leaves = set(leaves_of(reached))
        layers = [layer for layer in (self._layers[i] for i in sorted(called)) if layer.weight in leaves]
        new = [layer for layer in layers if _USED_BESIDE not in layer.notes]
        for layer in new:
            layer.notes.append(_USED_BESIDE)
        if new:
            warn_user(
                f"{', '.join(repr(layer.name) for layer in new)}: the model uses the weight beside the calls of the "
                "module, too, as in h @ embedding.weight.T, and what that adds to its gradient is not in the layer's "
                "factors. That is right for a penalty on the weight. For any other use, tie a module instead "
                "(head.weight = embedding.weight), call the module for each use, or name the layer in skip_layers, so "
                "that the base rule trains it"
            )


def _edge_to(weight: nn.Parameter, node: Any) -> Edge | None:
    """The edge by which a layer uses its weight, found from the node of its result; None if there is none."""
    for _ in range(_MOST_RESHAPES):
        leaves = {number: _leaf_behind(after) for number, after in nodes_behind(node)}
        own = [(reshapes, number) for number, (leaf, reshapes) in leaves.items() if leaf is weight]
        if own:  # the nearest one, because an earlier call may have made the input from the weight alone
            return node, min(own)[1]
        further = [after for number, after in nodes_behind(node) if leaves[number][0] is None]  # without the bias
        if len(further) != 1:
            return None
        node = further[0]
    return None


def _leaf_behind(node: Any) -> tuple[Tensor | None, int]:
    """The parameter behind a node, or None, and the number of casts and reshapes in between."""
    for reshapes in range(_MOST_RESHAPES):
        behind = nodes_behind(node)
        if len(behind) != 1:
            return getattr(node, "variable", None), reshapes
        node = behind[0][1]
    return None, _MOST_RESHAPES
