"""The form in which the entries of a turned step are saved: a parameter always has the same ones.

``torch.distributed.checkpoint`` reads the keys that a fresh optimizer has, and fails if the checkpoint lacks one. So a
saved state has zeros for entries that were not recorded, and ``NOTED`` tells which ones were.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..bases import rule_of
from ..bases.state_keys import CHANGE, DESCENT, LENGTH, MOMENT, NORM, NOTED, OF_STEP, RECORDED, TURN, is_of_base

__all__ = ["saved_form", "take_saved_form"]

_NUMBERS = (LENGTH, DESCENT)  # 0-dim; the others are like the parameter


def saved_form(
    state_dict: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    turned: Collection[nn.Parameter],
    norms: Mapping[nn.Parameter, float],
) -> dict[str, Any]:
    """Returns a state in the form in which it is saved; before the first step it is left as it is.

    Args:
        state_dict: The state as the base class saves it.
        optimizer: The optimizer.
        turned: The parameters whose steps trust may turn, which are saved with all keys.
        norms: The norms of the weights that the next step is to compare.
    """
    states, rule = dict(state_dict["state"]), rule_of(optimizer)
    base_keeps = any(_has_base_state(state) for state in states.values() if isinstance(state, dict))
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, i in zip(group["params"], saved["params"], strict=True):
            state = states.get(i, {})
            # Base classes expect their own entries in a state that is not empty, so none is added where they have none.
            if not states or not p.requires_grad or (base_keeps and not _has_base_state(state)):
                continue
            found: dict[str, Any] = {NOTED: sum(1 << n for n, key in enumerate(RECORDED) if key in state)}
            if p in turned:
                keys = RECORDED if rule.needs_average(p, group, state) else OF_STEP
                found |= {key: _zeros(p, key) for key in keys if key not in state} | {NORM: norms.get(p, -1.0)}
            if CHANGE in state and state[CHANGE] is state.get(TURN):  # a checkpoint with two tensors is read into both
                found[CHANGE] = state[CHANGE].clone()
            states[i] = {**state, **found}
    return {**state_dict, "state": states}


def take_saved_form(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, float]:
    """Removes from a loaded state the entries that were not recorded.

    Returns:
        The norms of the weights that the next step is to compare.
    """
    norms: dict[nn.Parameter, float] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    for p, state in [(p, optimizer.state[p]) for p in parameters]:
        noted, norm = state.pop(NOTED, None), float(state.pop(NORM, -1.0))
        for n, key in enumerate(RECORDED):
            if noted is not None and not int(noted) >> n & 1:
                state.pop(key, None)
        if MOMENT in state:  # it is changed in place, and torch may have loaded the very tensor of another optimizer
            state[MOMENT] = state[MOMENT].clone()
        if norm >= 0:
            norms[p] = norm
        if not state:
            del optimizer.state[p]
    return norms


def _has_base_state(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state has an entry of the base class."""
    return any(map(is_of_base, state))


def _zeros(p: nn.Parameter, key: str) -> Tensor:
    return torch.zeros((), dtype=p.dtype, device=p.device) if key in _NUMBERS else torch.zeros_like(p.detach())
