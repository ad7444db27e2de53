"""Which of the trained parameters are preconditioned, as weight or bias of which layer, and why the others are not."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from .blocks import Block, specs_of
from .distributed import Communicator, sharding_problem
from .layers import LayerOptions, LinearLayer, find_layers

__all__ = [
    "Slot",
    "check_model",
    "check_parameters",
    "find_blocks",
    "in_slots",
    "intact",
    "parameters_of",
    "replacements",
    "slots_of",
]

Slot = tuple[nn.Module, str, nn.Parameter]  # a module, the name of a parameter, and the parameter that is to be there


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
    trained: Iterable[nn.Parameter],
    roots: Sequence[nn.Module],
    options: LayerOptions,
    known: Iterable[Block],
    comm: Communicator,
) -> tuple[list[Block], dict[nn.Parameter, tuple[str, str]]]:
    """Finds the blocks of the trained parameters.

    Args:
        trained: The parameters.
        roots: The modules that own them.
        options: Of the layers.
        known: Blocks found before, which keep their identity.
        comm: The ranks that share factors.

    Returns:
        The blocks, and for every other parameter its name and the reason why it has none.
    """
    before = {block.layer.weight: block for block in known}
    coverage = find_layers(roots, options)
    blocks, uncovered = [], coverage.uncovered
    for layer in coverage.layers:
        problem = sharding_problem(layer.weight, roots, comm)
        if layer.is_shard:
            problem = problem if type(layer) is LinearLayer else "split by tensor parallelism, and no nn.Linear"
            names = {p: uncovered[p][0] for module in layer.modules for p in module.parameters() if p in uncovered}
            uncovered.update((p, (name, "one bias for all shards of a weight")) for p, name in names.items())
        if problem:
            uncovered.update(dict.fromkeys(layer.parameters, (layer.name, problem)))
        else:
            old = before.get(layer.weight)
            same = old is not None and set(old.layer.parameters) <= set(layer.parameters)
            blocks.append(old if old is not None and same else Block(layer, specs_of(layer)))
    covered = {parameter for block in blocks for parameter in block.layer.parameters}
    for i, parameter in enumerate(trained):
        if parameter not in covered and parameter not in uncovered:
            uncovered[parameter] = (f"parameter {i}", "no module of the model owns it")
    return blocks, uncovered


def slots_of(blocks: Iterable[Block]) -> list[Slot]:
    """Where in their modules the parameters of all layers are; not those that are sharded, which come and go."""
    return [
        (module, name, own)
        for layer in (block.layer for block in blocks)
        for module in layer.modules
        for name, own in module._parameters.items()
        if own is not None and not hasattr(own, "device_mesh") and any(own is p for p in layer.parameters)
    ]


def intact(slots: Iterable[Slot]) -> bool:
    """Whether all parameters are where they were; some microseconds for a large model."""
    return all(module._parameters.get(name) is parameter for module, name, parameter in slots)


def in_slots(trained: Iterable[nn.Parameter], roots: Sequence[nn.Module], slots: Iterable[Slot]) -> list[nn.Parameter]:
    """The trained parameters, with those that have taken the place of others in a layer."""
    own = {p for root in roots for p in root.parameters()}
    now = {p: module._parameters.get(name) for module, name, p in slots}
    present = (p if p in own else now.get(p, p) for p in trained)
    return [p for p in present if p is not None]


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
        New parameters by old ones; empty if none were replaced, or not all by weights of the model of the same shape.
    """
    trained, known = list(trained), set(trained)
    own = {p for root in roots for p in root.parameters()}
    replaced = any(p not in known for p in stepped) and len(stepped) == len(trained) and own.issuperset(stepped)
    pairs = dict(zip(trained, stepped, strict=True)) if replaced else {}
    return pairs if all(old.shape == new.shape for old, new in pairs.items()) else {}


def check_parameters(
    trained: Container[nn.Parameter],
    roots: Sequence[nn.Module],
    blocks: Sequence[Block],
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
            has other parameters than the optimizer, if they are no matrices any more (FSDP1), or if some layer has
            other parameters than those that the optimizer steps on.
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
            "to_empty(), load_state_dict(assign=True) or whatever made new ones"
        )
    matrices = [block.layer for block in blocks if not block.layer.is_shard]
    if any(getattr(layer.weight, "ds_shape", layer.weight.shape) != layer.weight_shape for layer in matrices):
        raise RuntimeError(
            "the model's weights have changed their shape since the optimizer was built, as under "
            "FullyShardedDataParallel (FSDP1): shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    gone = set(stepped) - own
    lost = [b.layer.name for b in blocks if own and any(p in gone for p in b.layer.parameters)]
    if lost:
        raise RuntimeError(
            f"the optimizer steps on parameters that the model no longer has, of {', '.join(map(repr, lost))}: they "
            "have been replaced since the optimizer was built, by load_state_dict(assign=True), weight_norm(), .to() "
            "under torch.__future__.set_overwrite_module_params_on_conversion(True) or an assignment. Build the "
            "optimizer after that, or put the new parameters in the place of the old ones in optimizer.param_groups"
        )
