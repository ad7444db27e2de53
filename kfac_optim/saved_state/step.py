"""The form in which the entries of a turned step are saved: a parameter has the same ones at all times.

``torch.distributed.checkpoint`` reads from a checkpoint what a fresh optimizer has keys for, and it must have all of
them. So in a saved state what was not recorded is there as zeros, and ``NOTED`` tells what was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..first_moments import needs_average
from ..state_keys import CHANGE, DESCENT, LENGTH, MOMENT, NORM, NOTED, OF_STEP, RECORDED, TURN, is_of_base

__all__ = ["saved_form", "take_saved_form"]

_NUMBERS = (LENGTH, DESCENT)  # 0-dim; the others are like the parameter


def saved_form(
    state_dict: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    turned: Collection[nn.Parameter],
    norms: Mapping[nn.Parameter, float],
) -> dict[str, Any]:
    """A state in the form in which it is saved; before the first step as it is.

    Args:
        state_dict: What the base class saves of the optimizer.
        optimizer: The optimizer.
        turned: The parameters whose steps may be turned as far as trust goes, so that they have all keys.
        norms: The norms of the weights that the next step is to compare.
    """
    states = dict(state_dict["state"])
    base_keeps = any(_has_base_state(state) for state in states.values() if isinstance(state, dict))
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for p, i in zip(group["params"], saved["params"], strict=True):
            state = states.get(i, {})
            # Base classes take a state that is not empty for their own: where they have none yet nothing is added.
            if not states or not p.requires_grad or (base_keeps and not _has_base_state(state)):
                continue
            found: dict[str, Any] = {NOTED: sum(1 << n for n, key in enumerate(RECORDED) if key in state)}
            if p in turned:
                keys = RECORDED if needs_average(optimizer, p, group, state) else OF_STEP
                found |= {key: _zeros(p, key) for key in keys if key not in state} | {NORM: norms.get(p, -1.0)}
            if CHANGE in state and state[CHANGE] is state.get(TURN):  # a checkpoint that has two is read into both
                found[CHANGE] = state[CHANGE].clone()
            states[i] = {**state, **found}
    return {**state_dict, "state": states}


def take_saved_form(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, float]:
    """Takes what was not recorded out of a state that has been loaded.

    Returns:
        The norms of the weights that are to be compared.
    """
    norms: dict[nn.Parameter, float] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    for p, state in [(p, optimizer.state[p]) for p in parameters]:
        noted, norm = state.pop(NOTED, None), float(state.pop(NORM, -1.0))
        for key in () if noted is None else [key for n, key in enumerate(RECORDED) if not int(noted) >> n & 1]:
            state.pop(key, None)
        if MOMENT in state:  # changed in place, and torch makes two optimizers share a state that is not copied
            state[MOMENT] = state[MOMENT].clone()
        if norm >= 0:
            norms[p] = norm
        if not state:
            del optimizer.state[p]
    return norms


def _has_base_state(state: Mapping[str, Any]) -> bool:
    """Whether something in a parameter's state is the base class's."""
    return any(map(is_of_base, state))


def _zeros(p: nn.Parameter, key: str) -> Tensor:
    return torch.zeros((), dtype=p.dtype, device=p.device) if key in _NUMBERS else torch.zeros_like(p.detach())
