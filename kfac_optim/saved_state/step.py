"""What a turned step leaves in the state of the parameters for the next one, and the form in which that is saved.

In a run a key that is not there says that nothing was recorded. ``torch.distributed.checkpoint`` reads from a
checkpoint what a fresh optimizer has keys for, and it must have all of them. So in a saved state a parameter has the
same keys at all times: what was not recorded is there as zeros, and ``NOTED`` tells what was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..bases import MOMENT
from .optimizer import is_of_base, kept_states

__all__ = [
    "CHANGE",
    "DESCENT",
    "LENGTH",
    "OF_STEP",
    "STRETCH",
    "TURN",
    "forget",
    "forget_all",
    "saved_form",
    "take_saved_form",
]

# Keys in the state of a parameter, of the step that last computed directions.
TURN = "kfac_turn"  # K-FAC's direction less the base's update, which the next gradients judge
CHANGE = "kfac_change"  # what was taken off the weights besides the base's update, for the next step to repeat
LENGTH = "kfac_length"  # the length of the whole update, in the state of one parameter
STRETCH = "kfac_stretch"  # the stretch at reach 1, which the next gradients judge and the next step repeats
DESCENT = "kfac_descent"  # its alignment with the gradients that it was made of
OF_STEP = (TURN, CHANGE, LENGTH, STRETCH, DESCENT)

# Keys of a saved state.
NOTED = "kfac_noted"  # which of OF_STEP and MOMENT were recorded, a bit each
NORM = "kfac_norm"  # the norm of the weight that the last step has left, to be compared; -1: it is not
_ALL = (*OF_STEP, MOMENT)
_NUMBERS = (LENGTH, DESCENT)  # 0-dim; the others are like the parameter


def forget(optimizer: torch.optim.Optimizer, keys: Sequence[str]) -> None:
    """Deletes some of what earlier steps recorded in the optimizer's state."""
    for p, state in list(kept_states(optimizer)):
        noted = [key for key in keys if key in state]
        for key in noted:
            del state[key]
        if noted and not state:
            del optimizer.state[p]  # the base class keeps nothing of it


def forget_all(optimizer: torch.optim.Optimizer) -> None:
    """Deletes all that earlier steps recorded in the optimizer's state."""
    forget(optimizer, _ALL)


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
            found: dict[str, Any] = {NOTED: sum(1 << n for n, key in enumerate(_ALL) if key in state)}
            if p in turned:
                keys = OF_STEP if _keeps_first_moment(optimizer, group, state, p) else _ALL
                found |= {key: _zeros(p, key) for key in keys if key not in state} | {NORM: norms.get(p, -1.0)}
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
        for key in () if noted is None else [key for n, key in enumerate(_ALL) if not int(noted) >> n & 1]:
            state.pop(key, None)
        if norm >= 0:
            norms[p] = norm
        if not state:
            del optimizer.state[p]
    return norms


def _has_base_state(state: Mapping[str, Any]) -> bool:
    """Whether something in a parameter's state is the base class's."""
    return any(map(is_of_base, state))


def _keeps_first_moment(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], state: Mapping[str, Any], p: nn.Parameter
) -> bool:
    moment = state.get("exp_avg")  # as for Member.has_first_moment
    like = isinstance(moment, Tensor) and moment.shape == p.shape
    return bool(group["momentum"]) if isinstance(optimizer, torch.optim.SGD) else like


def _zeros(p: nn.Parameter, key: str) -> Tensor:
    return torch.zeros((), dtype=p.dtype, device=p.device) if key in _NUMBERS else torch.zeros_like(p.detach())
