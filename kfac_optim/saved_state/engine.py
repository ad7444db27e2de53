"""An engine's part of a saved state: what is saved, how it is checked and loaded.

The factors of a layer are saved in the state of its weight, the counters in every parameter group of the optimizer: the
two places that survive torch.distributed.checkpoint. Counters are plain numbers; -1 stands for "never".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..common.checks import is_int, is_number
from ..config import CHANGEABLE, Config, checked
from ..damping import OfLargest, OfMean
from ..distributed import shard_number
from ..factors import copy_average_
from ..placement import whole_state
from ..scaling import KLClip
from ..snapshots import AG, LEARNED, Snapshot, State
from ..stages import Staged, Stages
from .checks import check_counters, check_states, check_sums, checksums


def adopt_states(stages: Stages, states: Mapping[nn.Parameter, State]) -> None:
    """Adopts factors that were moved or replaced from outside (Lightning moves optimizer state between devices).

    Raises:
        RuntimeError: If a new engine gets factors of a run, of which it does not have the counters.
    """
    progress = stages.progress
    for block in stages.blocks:
        given = states.get(block.layer.weight, block.state)
        if given is not block.state and block.fits(given):
            is_new = not (progress.step or progress.taken or block.has_data())
            block.adopt(given)
            if is_new and block.has_data():
                progress.note_foreign_factors()
    if progress.lacks_counters:
        raise RuntimeError(
            "the optimizer has got factors from an earlier run, but not by its load_state_dict(), so that its "
            "counters are missing. ZeroRedundancyOptimizer does so with a consolidated state: save "
            "optimizer.optim.state_dict() on every rank, each in a file of its own, and load that by "
            "optimizer.optim.load_state_dict()"
        )


def counters_of(stages: Stages) -> dict[str, float | int]:
    """The plain numbers of the state: counters, and the hyperparameters that are numbers."""
    return {**stages.counters(), **_saved_options(stages.config), **_shard(stages)}


def _shard(stages: Stages) -> dict[str, int]:
    """The number of this rank's shard of weights that tensor parallelism has split; empty if there are none."""
    split = [layer.weight for layer in stages.layers if layer.is_shard]
    return {"shard": shard_number(split[0])} if split else {}


# Options that are objects around one number: the number's key in a saved state, which restores the object's class; the
# option, the class, and the name of the number in it.
_INSIDE: dict[str, tuple[str, type, str]] = {
    "damping_of_mean": ("damping", OfMean, "value"),
    "damping_of_largest": ("damping", OfLargest, "value"),
    "kl_clip": ("scaling", KLClip, "kappa"),
}


def _saved_options(config: Config) -> dict[str, int | float]:
    """The hyperparameters that are plain numbers, for the saved state; functions of the step are never saved."""
    given = {name: getattr(config, name) for name in CHANGEABLE}
    inside = {
        key: getattr(given[name], number) for key, (name, kind, number) in _INSIDE.items() if type(given[name]) is kind
    }
    # Converted, because torch.load(weights_only=True) refuses NumPy's numbers.
    return {key: int(x) if is_int(x) else float(x) for key, x in (given | inside).items() if is_number(x)}


def _loaded_options(config: Config, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options to set from a saved state, checked; a number does not replace a function or another scaling.

    Raises:
        TypeError: If a saved value is of the wrong kind.
        ValueError: If it is out of range.
    """
    found: dict[str, Any] = {}
    for key, value in saved.items():
        name, kind, number = _INSIDE.get(key, (key, None, "value"))
        if name not in CHANGEABLE:
            continue
        now = getattr(config, name)
        if callable(getattr(now, number, now)) or (kind is KLClip and type(now) is not KLClip):
            continue
        value = value if kind is KLClip else checked(name, value)
        found[name] = value if kind is None else kind(value)
    return found


def check_saved(
    stages: Stages,
    states: Mapping[nn.Parameter, Any],
    counters: Mapping[str, Any],
    without: Collection[nn.Parameter] | None = None,
) -> None:
    """Raises ValueError or TypeError unless the state could be loaded; changes nothing.

    ``without``: weights of which nothing may have been saved, because they were frozen; None: all.
    """
    blocks = stages.blocks
    check_counters({name: each for part in stages.counted for name, each in part.COUNTERS.items()}, counters)
    if blocks and not states and counters["last_refresh"] >= 0:
        raise ValueError(
            "the state has counters but no Kronecker factors: it is damaged, or torch.distributed.checkpoint read "
            "it into an optimizer that had no room for them: before the first backward pass, read it into what "
            "get_optimizer_state_dict(model, optimizer) returns, and hand that to set_optimizer_state_dict()"
        )
    _loaded_options(stages.config, counters)
    for name, own in _shard(stages).items():
        if counters.get(name, own) != own:
            raise ValueError(
                f"the state has factors of shard {counters[name]} of weights that tensor parallelism has split, "
                f"but this rank has shard {own}: save the optimizer.state_dict() of every rank in a file of its "
                "own, and load that; torch.distributed.checkpoint takes them for copies, and keeps one"
            )
    check_states(blocks, states, stages.comm.rank, without, pending=counters["pending_spread"] >= 0)
    check_sums(blocks, states, counters)


def load_checked(stages: Stages, states: Mapping[nn.Parameter, State], counters: Mapping[str, Any]) -> None:
    """Copies checked states, in the engine's own precision, and rebuilds the decompositions."""
    config, blocks, refresher, comm = stages.config, stages.blocks, stages.refresher, stages.comm
    config.set_options(_loaded_options(config, counters))
    for part in stages.counted:
        part.load(counters)
    spreads = config.may_spread or counters.get("pending_spread", -1) >= 0
    stages.preconditioner.clear()  # its stacks hold the decompositions, and what these were made of
    for block in blocks:
        block.drop()
        block.adopt({})
        saved = states.get(block.layer.weight)
        if saved is not None or (states and block.needs_storage):
            block.allocate(config.factor_dtype, comm.rank, spreads=spreads)
        if saved is not None:
            _copy_state(block.state, saved)
    stages.averaging.clear()
    refresher.resume(counters, blocks)
    if states and not stages.closed:
        refresher.invalidate()
        if stages.ranks.alone:  # several ranks do it together, in their next step
            refresher.rebuild(stages.progress.step, blocks)
    stages.sightings.note_lost()
    stages.capture.discard()
    stages.prepare_statistics()


def _copy_state(target: State, saved: State) -> None:
    """Copies a layer's saved state into a fresh one, which keeps its dtype and device and shares nothing with it."""
    for source, snapshot in target.items():
        if source not in saved:  # no refresh was in progress, or its factors were not saved
            continue
        for name in AG:
            copy_average_(snapshot[name], saved[source][name])
        if "gamma" in snapshot:
            snapshot["gamma"].copy_(saved[source]["gamma"])
        else:
            numbers = cast(Mapping[str, Any], saved[source])
            restored = {name: learned.restored(numbers[name]) for name, learned in LEARNED.items()}
            snapshot.update(cast(Snapshot, restored))


def whole_states(engine: Staged) -> dict[nn.Parameter, State]:
    """The factors of all ranks by weight, with all statistics so far (a collective).

    Factors that the strategy shares out are gathered on the CPU, layer by layer; others are not copied.
    """
    synchronize(engine)
    stages, found = engine.stages, dict[nn.Parameter, State]()
    for block in stages.blocks:
        if block.state:
            whole = whole_state(block, stages.config.factor_dtype, stages.comm)
            # Copied, because the numbers of averages, which every rank has, go on changing.
            if block.workers.shares_factors:
                whole = tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), whole)
            found[block.layer.weight] = whole
    return found


# An engine without an optimizer of this package ----------------------------------------------------------------------


def state_dict(engine: Staged) -> dict[str, Any]:
    """The state of an engine without an optimizer of this package: factors by layer name, and counters.

    If the strategy shares factors out, they are those of this rank; see :meth:`full_state_dict`.
    """
    return _by_name(engine.stages, {block.layer.weight: block.state for block in engine.stages.blocks if block.state})


def full_state_dict(engine: Staged) -> dict[str, Any]:
    """The :meth:`state_dict` of all ranks together, the same on each (a collective: call it on all of them)."""
    return _by_name(engine.stages, whole_states(engine))


def _by_name(stages: Stages, states: Mapping[nn.Parameter, State]) -> dict[str, Any]:
    layers = {block.layer.name: states[block.layer.weight] for block in stages.blocks if block.state}
    return {"layers": layers, "counters": {**counters_of(stages), **checksums(layers.values())}}


@torch.no_grad()
def synchronize(engine: Staged) -> None:
    """Pools the statistics of all ranks since the last refresh (a collective: call it on all of them).

    Without it, a state saved between two refreshes lacks at most that one interval of statistics. One process has
    nothing to pool.
    """
    stages = engine.stages
    stages.prepare_ranks()
    stages.compare()
    stages.averaging.pool(stages.blocks)


@torch.inference_mode(False)  # whose tensors could not be changed in place later
@torch.no_grad()
def load_state_dict(engine: Staged, state_dict: Mapping[str, Any]) -> None:
    """Loads :meth:`state_dict`.

    Raises:
        ValueError: If the state is damaged or of another model; nothing is changed then.
    """
    for key in ("layers", "counters"):
        if not isinstance(state_dict.get(key), Mapping):
            raise ValueError(f"this is not the state of an engine: it has no {key!r}")
    engine.stages.follow_model()
    weights = {block.layer.name: block.layer.weight for block in engine.stages.blocks}
    unknown = set(state_dict["layers"]) - set(weights)
    if unknown:
        raise ValueError(
            f"the state has layers that this model lacks: {', '.join(sorted(unknown))}. Load the state of the same "
            "model, built with the same skip_layers"
        )
    states = {weights[name]: state for name, state in state_dict["layers"].items()}
    check_saved(engine.stages, states, state_dict["counters"])
    load_checked(engine.stages, states, state_dict["counters"])
