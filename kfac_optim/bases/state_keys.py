"""The entries that K-FAC adds to an optimizer's state of a parameter: what each is, and which module uses it.

They are kept beside the base class's own entries, so that they are saved, copied and moved with the optimizer. Those
that a step records for the next ones are in :mod:`.records`.

Base classes expect their own entries in every state that is not empty. But they have none for an unused layer, nor for
any layer if all steps so far were skipped. So while a base class works, no state may have only entries of ours:
those of layers are taken out for a step (:func:`take_out_layers`), all for loading and unpickling (:func:`set_aside`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

PREFIX = "kfac_"  # of the keys of all entries but LAYER_STATE, and of the engine's numbers in every parameter group

# An entry of a layer, in the state of its weight. ``optimizers`` shows it there between steps, and hands it to the
# engine during steps. Saved, with checksums.
LAYER_STATE = "kfac"  # the layer's factors and learned numbers: the block's own dict

# ``first_moments`` writes it, ``Rule`` reads it; outside this package it is one of the entries of ``records``.
MOMENT = "kfac_moment"  # the average of the gradients

# Entries that a single module writes and reads. Saved if they exist.
GRADIENT_WEIGHT = "kfac_gradient_weight"  # ``SGDRule``: the sum of the weights of all gradients in SGD's momentum
LAST_UPDATE = "kfac_last_update"  # ``selftuning``: the last update, along which the next step may move again


def is_of_base(key: Any) -> bool:
    """Whether an entry of a parameter's state belongs to the base class, or to a wrapper, which may have other keys."""
    return not (isinstance(key, str) and (key == LAYER_STATE or key.startswith(PREFIX)))


def kept_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The states of the parameters, without the numbers that some base classes keep beside these."""
    return ((p, state) for p, state in optimizer.state.items() if isinstance(state, dict))


def take_out_layers(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Deletes the layers' entries from the states of their weights, and then empty states; returns them by weight."""
    found = {p: state.pop(LAYER_STATE) for p, state in kept_states(optimizer) if LAYER_STATE in state}
    for p in [p for p in found if not optimizer.state[p]]:
        del optimizer.state[p]
    return found


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
