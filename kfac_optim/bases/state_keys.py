"""The entries that K-FAC adds to an optimizer's state of a parameter: what each is, and which module uses it.

They are kept beside the base class's own entries, so that they are saved, copied and moved with the optimizer. During a
run, a missing entry was not recorded; a saved state has zeros in its place (:mod:`~kfac_optim.saved_state.step`).

Base classes expect their own entries in every state that is not empty. But they have none for an unused layer, nor for
any layer if all steps so far were skipped. So while a base class works, no state may have only entries of ours:
averages are taken out for a step (:func:`take_out`), all entries for loading and unpickling (:func:`set_aside`).
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
    "without_counters",
]

PREFIX = "kfac_"  # of the keys of all entries but the first, and of the engine's numbers in every parameter group

# An entry of a layer, in the state of its weight. ``optimizers`` shows it there between steps, and hands it to the
# engine during steps. Saved, with checksums.
AVERAGES = "kfac"  # the layer's factors and learned numbers: the block's own dict

# Entries from the last step that computed directions. ``turning`` writes them; in the next step ``steering.lessons``
# judges them and ``turning`` repeats them. Saved, with zeros for missing ones.
TURN = "kfac_turn"  # K-FAC's direction minus the base's update, which the next gradients judge
CHANGE = "kfac_change"  # what was subtracted from the weights besides the base's update, for the next step to repeat
LENGTH = "kfac_length"  # the length of the whole update, in the state of one parameter
STRETCH = "kfac_stretch"  # the stretch at reach 1, which the next gradients judge and the next step repeats
DESCENT = "kfac_descent"  # the stretch's alignment with the gradients that it was made of
OF_STEP = (TURN, CHANGE, LENGTH, STRETCH, DESCENT)

# An entry from every step if the base class keeps no first moment, or one with weight decay in it. Saved as the above.
# ``first_moments`` writes it, ``Rule.moments`` reads it; if the base class has no first moment, ``lessons`` judges it.
MOMENT = "kfac_moment"  # the average of the gradients
RECORDED = (*OF_STEP, MOMENT)

# Entries that a single module writes and reads. Saved if they exist.
GRADIENT_WEIGHT = "kfac_gradient_weight"  # ``SGDRule``: the sum of the weights of all gradients in SGD's momentum
LAST_UPDATE = "kfac_last_update"  # ``selftuning``: the last update, along which the next step may move again

# Entries of saved states only. ``saved_state.step`` writes and reads them.
NOTED = "kfac_noted"  # which of RECORDED were recorded, one bit for each
NORM = "kfac_norm"  # the norm of the weight after the last step, to be compared; -1: it is not to be compared


def is_of_base(key: Any) -> bool:
    """Whether an entry of a parameter's state belongs to the base class, or to a wrapper, which may have other keys."""
    return not (isinstance(key, str) and (key == AVERAGES or key.startswith(PREFIX)))


def kept_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The states of the parameters, without the numbers that some base classes keep beside these."""
    return ((p, state) for p, state in optimizer.state.items() if isinstance(state, dict))


def take_out(optimizer: torch.optim.Optimizer, key: str) -> dict[Any, Any]:
    """Deletes an entry from the states of all parameters, as :func:`forget` does, and returns it by parameter."""
    found = {p: state.pop(key) for p, state in kept_states(optimizer) if key in state}
    for p in [p for p in found if not optimizer.state[p]]:
        del optimizer.state[p]
    return found


def forget(optimizer: torch.optim.Optimizer, keys: Collection[str]) -> None:
    """Deletes entries from the states of all parameters, and states that are empty after that."""
    for p, state in [(p, state) for p, state in kept_states(optimizer) if not state.keys().isdisjoint(keys)]:
        for key in keys:
            state.pop(key, None)
        if not state:
            del optimizer.state[p]  # torch cannot save it if the parameter has been replaced


@contextmanager
def set_aside(states: Mapping[Any, Any]) -> Iterator[None]:
    """Leaves only the base class's entries in some states during a ``with`` block."""
    own = [state for state in states.values() if isinstance(state, dict)]
    ours = [{key: state.pop(key) for key in list(state) if not is_of_base(key)} for state in own]
    try:
        yield
    finally:
        for state, of_ours in zip(own, ours, strict=True):
            state.update(of_ours)


def without_counters(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords without K-FAC's counters, which are among them if they are the entries of another optimizer's group."""
    is_group = PREFIX + "step" in keywords
    return {name: value for name, value in keywords.items() if not (is_group and name.startswith(PREFIX))}
