"""The entries that K-FAC adds to an optimizer's state of a parameter: what each is, who writes and who reads it.

They stand beside the base class's own, because what is there is saved, copied and moved with the optimizer. In a run
an entry that is missing was not recorded; a saved state has zeros in its place (:mod:`~kfac_optim.saved_state.step`).

Base classes look for their own entries in every state that is not empty; an unused layer has none of them, and no layer
has any where all steps so far were skipped. So no state may have ours alone while they look: for a step averages are
taken out (:func:`take_out`), and all entries where a state is loaded or unpickled (:func:`set_aside`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "AVERAGES",
    "CHANGE",
    "DESCENT",
    "GRADIENT_WEIGHT",
    "LAST_UPDATE",
    "LENGTH",
    "MOMENT",
    "NORM",
    "NOTED",
    "OF_STEP",
    "PREFIX",
    "RECORDED",
    "STRETCH",
    "TURN",
    "forget",
    "is_of_base",
    "kept_states",
    "set_aside",
    "take_out",
]

PREFIX = "kfac_"  # of all entries but the first, and of the engine's numbers in every parameter group

# Of a layer, in the state of its weight. Shown there by ``optimizers`` between steps, and handed to the engine for each
# of them. Saved, with checksums.
AVERAGES = "kfac"  # its factors and what it has learned: the block's own dict

# Of the step that last computed directions. Written by ``turning``, which reads them in the next step. Saved, as zeros
# where they are missing.
TURN = "kfac_turn"  # K-FAC's direction less the base's update, which the next gradients judge
CHANGE = "kfac_change"  # what was taken off the weights besides the base's update, for the next step to repeat
LENGTH = "kfac_length"  # the length of the whole update, in the state of one parameter
STRETCH = "kfac_stretch"  # the stretch at reach 1, which the next gradients judge and the next step repeats
DESCENT = "kfac_descent"  # its alignment with the gradients that it was made of
OF_STEP = (TURN, CHANGE, LENGTH, STRETCH, DESCENT)

# Of every step, where the base class keeps no first moment, or has weight decay in it. Written by ``first_moments``,
# which reads it as one; ``turning`` judges the former. Saved like those above.
MOMENT = "kfac_moment"  # the average of the gradients
RECORDED = (*OF_STEP, MOMENT)

# Written and read by one module. Saved where they are there.
GRADIENT_WEIGHT = "kfac_gradient_weight"  # ``first_moments``: the sum of the weights of all gradients in SGD's momentum
LAST_UPDATE = "kfac_last_update"  # ``selftuning``: the update that the next step goes along once more

# Of a saved state alone. Written and read by ``saved_state.step``.
NOTED = "kfac_noted"  # which of RECORDED were recorded, a bit each
NORM = "kfac_norm"  # the norm of the weight that the last step has left, to be compared; -1: it is not


def is_of_base(key: str) -> bool:
    """Whether an entry of a parameter's state is the base class's."""
    return key != AVERAGES and not key.startswith(PREFIX)


def kept_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The states of the parameters; under keys of their own some base classes keep numbers beside them."""
    return ((p, state) for p, state in optimizer.state.items() if isinstance(state, dict))


def take_out(optimizer: torch.optim.Optimizer, key: str) -> dict[Any, Any]:
    """Takes an entry out of the states of all parameters, as :func:`forget`."""
    found = {p: state.pop(key) for p, state in kept_states(optimizer) if key in state}
    for p in [p for p in found if not optimizer.state[p]]:
        del optimizer.state[p]
    return found


def forget(optimizer: torch.optim.Optimizer, keys: Collection[str]) -> None:
    """Deletes entries from the states of all parameters, and the states that have no others."""
    for p, state in [(p, state) for p, state in kept_states(optimizer) if not state.keys().isdisjoint(keys)]:
        for key in keys:
            state.pop(key, None)
        if not state:
            del optimizer.state[p]  # torch cannot save it if the parameter has been replaced


@contextmanager
def set_aside(states: Mapping[Any, Any]) -> Iterator[None]:
    """Leaves only what is the base class's in some states meanwhile."""
    own = [state for state in states.values() if isinstance(state, dict)]
    ours = [{key: state.pop(key) for key in list(state) if not is_of_base(key)} for state in own]
    try:
        yield
    finally:
        for state, of_ours in zip(own, ours, strict=True):
            state.update(of_ours)
