"""A look at the graph that autograd has made of a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor

__all__ = ["Edge", "leaves_of", "nodes_behind", "nodes_reached"]

Edge = tuple[Any, int]  # a node, and the number of one of the nodes that a backward pass goes to from it


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
