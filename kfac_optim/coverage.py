"""Which of the trained parameters are preconditioned, as weight or bias of which layer, and why the others are not."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .blocks import Block, specs_of
from .distributed import sharding_problem
from .layers import LayerOptions, find_layers

__all__ = ["check_model", "check_parameters", "find_blocks", "parameters_of", "replacements"]


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


def check_model(model: nn.Module, trained: Sequence[nn.Parameter] | dict[nn.Parameter, None]) -> None:
    """Raises ValueError if a model that was given owns none of the trained parameters."""
    if trained and not any(p in trained for p in model.parameters()):
        raise ValueError(
            f"model={type(model).__name__}: it owns none of the {len(trained)} parameters that the optimizer got. Pass "
            "the model whose parameters these are, or leave model= out: the modules are then found by themselves"
        )


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


def replacements(
    trained: Iterable[nn.Parameter], roots: Sequence[nn.Module], stepped: Sequence[nn.Parameter]
) -> dict[nn.Parameter, nn.Parameter]:
    """The parameters that a framework has put in the place of the trained ones, in the same order.

    Frameworks that shard a model after the optimizer was built may replace the parameters of both before the first step
    (Accelerate does so for FSDP2).

    Args:
        trained: The parameters that the engine knows.
        roots: The modules that own them.
        stepped: The parameters that the optimizer steps on.

    Returns:
        New parameters by old ones; empty if none were replaced, or not all by weights of the model.
    """
    trained, known = list(trained), set(trained)
    own = {p for root in roots for p in root.parameters()}
    replaced = any(p not in known for p in stepped) and len(stepped) == len(trained) and own.issuperset(stepped)
    return dict(zip(trained, stepped, strict=True)) if replaced else {}


def check_parameters(
    trained: Container[nn.Parameter],
    roots: Sequence[nn.Module],
    blocks: Iterable[Block],
    stepped: Sequence[nn.Parameter],
) -> None:
    """Raises unless the parameters that an optimizer steps on are still the model's own.

    Args:
        trained: The parameters that the engine knows.
        roots: The modules that own them.
        blocks: Those of the layers.
        stepped: The parameters that the optimizer steps on.

    Raises:
        RuntimeError: If the parameters are no module's any more (DeepSpeed ZeRO 1-3: flat partitions), if the model
            has other parameters than the optimizer, or if they are no matrices any more (FSDP1).
    """
    own = {p for root in roots for p in root.parameters()}
    if any(p not in trained for p in stepped):
        raise RuntimeError(
            "the optimizer's parameters have been replaced by others that are no weights of the model, as DeepSpeed "
            "does with ZeRO stages 1-3 (flat partitions) and half precision. Give the framework its own optimizer "
            "instead, build engine = CurvatureEngine(model, ...) before wrapping the model, and call "
            "engine.precondition_(lr) between its backward and its step"
        )
    if own and not any(p in trained for p in own):
        raise RuntimeError(
            "the model's parameters have been replaced since the optimizer was built: build it after fully_shard(), "
            "to_empty() or whatever made new ones"
        )
    if any(getattr(b.layer.weight, "ds_shape", b.layer.weight.shape) != b.layer.weight_shape for b in blocks):
        raise RuntimeError(
            "the model's weights have changed their shape since the optimizer was built, as under "
            "FullyShardedDataParallel (FSDP1): shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
