"""Which of the trained parameters are preconditioned, as weight or bias of which layer, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .blocks import Block, specs_of
from .distributed import sharding_problem
from .layers import LayerOptions, find_layers

__all__ = ["find_blocks", "parameters_of"]


def parameters_of(source: nn.Module | Iterable[Any]) -> list[nn.Parameter]:
    """The parameters of a module, or of anything torch's optimizers take: tensors, named tensors, groups of them."""
    if isinstance(source, nn.Module):
        return list(source.parameters())
    found: list[nn.Parameter] = []
    for item in source:
        if isinstance(item, dict):
            found += parameters_of([item["params"]] if isinstance(item["params"], Tensor) else item["params"])
        else:
            found.append(item[1] if isinstance(item, tuple) else item)
    return found


def find_blocks(
    trained: Iterable[nn.Parameter], roots: Sequence[nn.Module], options: LayerOptions, known: Iterable[Block]
) -> tuple[list[Block], dict[nn.Parameter, tuple[str, str]]]:
    """Finds the blocks of the trained parameters.

    Args:
        trained: The parameters.
        roots: The modules that own them.
        options: Of the layers.
        known: Blocks found before, which keep their identity.

    Returns:
        The blocks, and for every other parameter its name and the reason why it has none.
    """
    before = {block.layer.weight: block for block in known}
    coverage = find_layers(roots, options)
    blocks, uncovered = [], coverage.uncovered
    for layer in coverage.layers:
        problem = sharding_problem(layer.weight, roots)
        if problem:
            uncovered.update(dict.fromkeys(layer.parameters, (layer.name, problem)))
        else:
            blocks.append(before.get(layer.weight) or Block(layer, specs_of(layer)))
    covered = {parameter for block in blocks for parameter in block.layer.parameters}
    for i, parameter in enumerate(trained):
        if parameter not in covered and parameter not in uncovered:
            uncovered[parameter] = (f"parameter {i}", "no module of the model owns it")
    return blocks, uncovered
