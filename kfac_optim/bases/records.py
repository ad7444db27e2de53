"""What a step records for the next ones, in the optimizer's state of each parameter; it is only used through here.

What a step (:mod:`~kfac_optim.turning`) does with the entries if it computes or repeats a change, or is plain::

                                                             computes   repeats   plain
    TURN      K-FAC's direction minus the base's update      writes     keeps     deletes
    CHANGE    what was subtracted besides that update        writes     uses      deletes
    STRETCH   the stretch at reach 1                         writes     uses      deletes
    DESCENT   the stretch's alignment with its gradients     writes     keeps     deletes
    LENGTH    of the whole update, kept by one parameter     writes     deletes   deletes
    MOMENT    the average of gradients                       updates    updates   updates; deletes at a given trust

Before that, every step learns from the entries that it finds (:mod:`~kfac_optim.steering.lessons`). The first five are
only written while trust is learned, MOMENT only where :mod:`.first_moments` says. A step that is interrupted deletes
the first five, one with ``precondition="gradient"`` all of them. Users may delete entries, too.

In a saved state a parameter always has the same entries, with zeros for those that were not recorded:
``torch.distributed.checkpoint`` reads the keys that a fresh optimizer has, and fails if the checkpoint lacks one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..common.rates import moves
from .parameters import Bucket
from .rules import rule_of
from .state_keys import MOMENT, PREFIX, is_of_base, kept_states

TURN, CHANGE, LENGTH, STRETCH, DESCENT = (PREFIX + name for name in ("turn", "change", "length", "stretch", "descent"))
OF_STEP = (TURN, CHANGE, LENGTH, STRETCH, DESCENT)
RECORDED = (*OF_STEP, MOMENT)

# In saved states only.
_NOTED = PREFIX + "noted"  # which of RECORDED were recorded, one bit for each
_MARK = PREFIX + "norm"  # the mark of the weight after the last step (constraints.py); -1: it is not to be compared


def record(buckets: Sequence[Bucket], found: Mapping[str, Mapping[nn.Parameter, Tensor]], length: Tensor) -> None:
    """Records what was computed, by key and parameter; changes only where a moment keeps updates similar.

    Groups with a rate of 0 are left out: their weights did not move, and the vectors may belong to no update.
    ``length``: that of all updates, 0-dim.
    """
    for bucket in [bucket for bucket in buckets if moves(bucket[0].group)]:
        similar = [m for m in bucket if m.has_first_moment or not m.rule.updates_grow(m.state)]
        for key, of_key in found.items():
            for m in similar if key == CHANGE else bucket:
                if (entry := of_key.get(m.p)) is not None:
                    # If the type is right already, comparing it is ten times as fast as calling ``to``.
                    m.state[key] = entry if entry.dtype == m.p.dtype else entry.to(m.p.dtype)
    first = buckets[0][0]
    first.state[LENGTH] = length.to(first.p.dtype)  # torch's load_state_dict() would round it to this type as well


def having(bucket: Bucket, *keys: str) -> Bucket:
    """The members of a bucket that have all of these entries."""
    for key in keys:
        bucket = [m for m in bucket if key in m.state]
    return bucket


def recorded(buckets: Iterable[Bucket], key: str) -> list[tuple[Bucket, list[Tensor]]]:
    """The members of each bucket that have an entry, if there are any, and their entries."""
    parts = (having(bucket, key) for bucket in buckets)
    return [(some, [m.state[key] for m in some]) for some in parts if some]


def last_length(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The length of the base's last update; the parameter that keeps it may have no gradient now."""
    return next((state[LENGTH] for _, state in kept_states(optimizer) if LENGTH in state), None)


def forget(optimizer: torch.optim.Optimizer, keys: Collection[str], of: Collection[nn.Parameter] | None = None) -> None:
    """Deletes entries from states, and states that are empty after that; ``of``: None: of all parameters."""
    states = kept_states(optimizer) if of is None else ((p, optimizer.state[p]) for p in of if p in optimizer.state)
    for p, state in [(p, state) for p, state in states if not state.keys().isdisjoint(keys)]:
        for key in keys:
            state.pop(key, None)
        if not state:
            del optimizer.state[p]  # torch cannot save it if the parameter has been replaced


def saved_form(
    state_dict: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    turned: Collection[nn.Parameter],
    marks: Mapping[nn.Parameter, float],
) -> dict[str, Any]:
    """Returns a state of the optimizer in the form in which it is saved; before the first step it is left as it is.

    ``turned``: the parameters whose steps trust may turn, which are saved with all keys; ``marks``: the marks of the
    weights that the next step is to compare.
    """
    states, rule = dict(state_dict["state"]), rule_of(optimizer)
    base_keeps = any(any(map(is_of_base, state)) for state in states.values() if isinstance(state, dict))
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, i in zip(group["params"], saved["params"], strict=True):
            state = states.get(i, {})
            # Base classes expect their own entries in a state that is not empty, so none is added where they have none.
            if not states or not p.requires_grad or (base_keeps and not any(map(is_of_base, state))):
                continue
            found: dict[str, Any] = {_NOTED: sum(1 << n for n, key in enumerate(RECORDED) if key in state)}
            if p in turned:
                keys = RECORDED if rule.needs_average(p, group, state) else OF_STEP
                found |= {key: _zeros(p, key) for key in keys if key not in state} | {_MARK: marks.get(p, -1.0)}
            if CHANGE in state and state[CHANGE] is state.get(TURN):  # a checkpoint with two tensors is read into both
                found[CHANGE] = state[CHANGE].clone()
            states[i] = {**state, **found}
    return {**state_dict, "state": states}


def take_saved_form(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, float]:
    """Removes from a loaded state the entries that were not recorded.

    Returns:
        The marks of the weights that the next step is to compare.
    """
    marks: dict[nn.Parameter, float] = {}
    for p in [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]:
        state = optimizer.state[p]
        noted, mark = state.pop(_NOTED, None), float(state.pop(_MARK, -1.0))
        for n, key in enumerate(RECORDED):
            if noted is not None and not int(noted) >> n & 1:
                state.pop(key, None)
        if MOMENT in state:  # it is changed in place, and torch may have loaded the very tensor of another optimizer
            state[MOMENT] = state[MOMENT].clone()
        if mark >= 0:
            marks[p] = mark
        if not state:
            del optimizer.state[p]
    return marks


def _zeros(p: nn.Parameter, key: str) -> Tensor:
    is_number = key in (LENGTH, DESCENT)
    return torch.zeros((), dtype=p.dtype, device=p.device) if is_number else torch.zeros_like(p.detach())
