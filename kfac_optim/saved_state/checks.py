"""Checks, which change nothing, that a saved state of an engine is whole and belongs to this model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..bases.state_keys import PREFIX
from ..blocks import Block
from ..common.counters import Counter
from ..factors import ELSEWHERE
from ..snapshots import AG, LEARNED, SOURCES

_LAYERS = "checksum_layers"  # how many layers the checksums cover
_CAUSES = (
    ". It is damaged, of an earlier version, of another model, of an optimizer with other skip_layers or "
    "max_factor_dim (whose default depends on the device), or of one that was built while other biases were frozen: "
    "build the optimizer as it was then, or load another state"
)
_PRIME = 2**53 - 111  # by a power of two, squares of different sums too often leave the same remainder


def check_states(
    blocks: Iterable[Block],
    states: Mapping[nn.Parameter, Any],
    rank: int,
    without: Collection[nn.Parameter] | None,
    *,
    pending: bool,
) -> None:
    """Raises ValueError unless a rank could load its factors from a state of all ranks or of its own.

    ``without``: weights that may lack factors; None: all. ``pending``: whether factors of a refresh in progress must be
    there; else they may be missing, but not damaged.
    """
    weights = {block.layer.weight: block for block in blocks}
    if any(weight not in weights for weight in states):
        raise ValueError(
            "the state has Kronecker factors for a parameter that has none here: it is of another model, or was saved "
            "with other skip_layers. Build the optimizer as it was then"
        )
    for weight, block in weights.items() if states else ():
        known = weight in states
        if not known and (without is None or weight in without):
            continue
        problem = _problem(block, states[weight], rank, pending=pending) if known else "has no Kronecker factors"
        if problem:
            causes = "" if problem.endswith(ELSEWHERE) else _CAUSES
            raise ValueError(f"the state of {block.layer.name!r} {problem}{causes}")


def _problem(block: Block, state: Any, rank: int, *, pending: bool) -> str:
    """Why a layer's state cannot be loaded; empty if it can."""
    if not isinstance(state, Mapping):
        return f"is {state!r}"
    for source in SOURCES:
        if source == "pending" and not pending and source not in state:
            continue
        tensors = state.get(source)
        if not isinstance(tensors, dict):
            return f"has no factors that are {source.replace('_', ' ')}"
        for side, (name, spec) in enumerate(zip(AG, block.specs, strict=True)):
            problem = spec.problem(tensors.get(name), kept=block.workers.keeps(side, rank))
            if problem:
                return f"has a factor {name} ({source.replace('_', ' ')}) that {problem}"
        for key, learned in LEARNED.items() if source == "current" else ():
            if not learned.allows(tensors.get(key)):
                return f"has {key}={tensors.get(key)!r}, which must be in 0 to {learned.largest}"
        if source != "current" and not _is_damping(tensors.get("gamma"), block.specs[0].pairs):
            return f"has a damping of {tensors.get('gamma')}"
    return ""


def _is_damping(gamma: Any, pairs: int) -> bool:
    """Whether a loaded object is a damping for this number of pairs."""
    shaped = isinstance(gamma, Tensor) and gamma.shape == (pairs,)
    return shaped and bool(((gamma >= 0) & gamma.isfinite()).all())


# Damage --------------------------------------------------------------------------------------------------------------


def check_counters(known: Mapping[str, Counter], counters: Mapping[str, Any]) -> None:
    """Raises ValueError unless the saved counters are complete and in range; ``known``: all counters."""
    for name in known:
        if name not in counters:
            raise ValueError(f"the state is damaged: it has no counter {name!r}")
    for name, value in counters.items():
        unknown_sum = value is None and name.startswith("checksum")
        number = isinstance(value, int | float) and math.isfinite(value)
        if not (unknown_sum or number and (name not in known or known[name].allows(value))):
            raise ValueError(f"the state is damaged: its counter {name!r} is {value!r}")
    for name in ("last_statistics", "last_refresh", "frozen_at"):
        if counters[name] > counters["step"]:
            after = f"after the last step {counters['step']}"
            raise ValueError(f"the state is damaged: its counter {name!r} is {counters[name]}, {after}")


def checksums(states: Iterable[object]) -> dict[str, int | None]:
    """Checksums of the averages of all layers, one each for the current ones, those in use and the pending ones.

    The bits of each tensor are added up as integers and multiplied by its place in its layer, so that every flipped bit
    shows. The layers' sums are squared before they are added: tensors that were swapped show, but the order of the
    layers, which users may change as they load a state, does not. Each device is read once. Checksums are below 2^53,
    because some tools turn saved numbers into floats.

    Args:
        states: The states of the layers.

    Returns:
        The checksums, and how many layers they cover. A checksum is 0 for no averages, None if other ranks keep some.
    """
    states = list(states)
    found: dict[str, int | None] = {_LAYERS: len(states)}
    for source in SOURCES:
        by_device: dict[torch.device, list[tuple[int, int, Tensor]]] = defaultdict(list)
        averages = [state.get(source) for state in states if isinstance(state, Mapping)]
        if _is_part(averages):
            found[f"checksum_{source}"] = None
            continue
        for layer, of_layer in enumerate(averages):
            for place, tensor in enumerate(_tensors(of_layer), 1):
                by_device[tensor.device].append((layer, place, _sum_of_bits(tensor)))
        totals = [0] * len(averages)
        for sums in by_device.values():
            layers, places, bits = zip(*sums, strict=True)
            for layer, place, total in zip(layers, places, torch.stack(bits).tolist(), strict=True):
                totals[layer] += place * total
        found[f"checksum_{source}"] = sum(total**2 for total in totals) % _PRIME
    return found


def _is_part(averages: Iterable[Any]) -> bool:
    """Whether some factors are on other ranks."""
    there = [tensors for tensors in averages if isinstance(tensors, Mapping)]
    return any("value" not in tensors.get(name, ("value",)) for tensors in there for name in AG)


def check_sums(blocks: Sequence[Block], states: Mapping[nn.Parameter, Any], counters: Mapping[str, Any]) -> None:
    """Raises ValueError unless the checksums of checked states are those that were saved.

    States are not compared if the base class has cast them to its parameters' type, or if they lack frozen layers.
    """
    averages = [tensors[name] for state in states.values() for tensors in state.values() for name in AG]
    rounded = any(average["weight"].dtype != torch.float64 for average in averages)
    # torch.distributed.checkpoint leaves out the state of parameters that are now frozen.
    left_out = [block for block in blocks if block.layer.weight not in states]
    fewer = len(states) < (counters.get(_LAYERS) or 0) and not any(b.layer.weight.requires_grad for b in left_out)
    if rounded or fewer:
        return
    there = {f"checksum_{source}" for state in states.values() for source in state}
    for name, value in checksums(states.values()).items():
        saved = counters.get(name)
        if name in there and None not in (value, saved) and saved != value:
            raise ValueError(
                f"the state is damaged: the {name.replace('_', ' ')} of its Kronecker factors is {value} instead of "
                f"{saved}. Load another checkpoint; one that is kept in memory has to be a copy.deepcopy() of "
                "state_dict(), in whose own tensors training goes on. If factors were changed or left out on purpose, "
                f"delete the entries '{PREFIX}checksum_...' from the state's param_groups"
            )


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in nested dicts, in an order that does not depend on the order of the dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _tensors(value[key])


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's 32-bit (or narrower) words, 0-dim, int64."""
    words = {1: torch.uint8, 2: torch.int16}.get(tensor.element_size(), torch.int32)
    # Words of another size need a stride of 1, which the only number of a view may lack though it counts as contiguous.
    bits = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(words)
    # In parts, because on the CPU a sum in another dtype makes a converted copy of its input.
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(2**22)]).sum()
