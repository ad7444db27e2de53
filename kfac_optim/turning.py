"""A step of the base optimizer, turned towards K-FAC's directions as far as trust goes (``precondition="momentum"``).

The base class takes its own step on the raw gradients. Its part in the layers is then changed by the difference between
the turned update and its own (:mod:`~kfac_optim.bases`, :mod:`~kfac_optim.trust`). What a step leaves for the next one
stands in the state of the parameters, so that a resumed run goes on as if it had not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .bases import (
    MOMENT,
    base_step,
    gradient_weight_tracked,
    has_first_moment,
    keep_first_moments,
    moment_weight,
    multiplied,
    of_one_kind,
    subtract_,
    update_length,
    weights_before,
)
from .beside import joined
from .directions import Maker
from .engine import CurvatureEngine
from .lessons import Compared, Copies, Lessons, alignment, alignments
from .preconditioning import Lr
from .reach import stretches
from .trust import brake, changes_at, turns

__all__ = ["CHANGE", "DESCENT", "LENGTH", "STRETCH", "TURN", "forget", "lessons_of", "take_turned_step"]

# Keys in the state of a parameter, of the step that last computed directions: K-FAC's direction less the base's update,
# which the next gradients judge; and what the base's update was changed by, which the next step may repeat. In the
# state of one of them: the length of the whole update, which the next step takes into the usual one. Likewise the
# stretch, and the alignment with it of the gradients that it was made of.
TURN, CHANGE, LENGTH = "kfac_turn", "kfac_change", "kfac_length"
STRETCH, DESCENT = "kfac_stretch", "kfac_descent"
_OF_STEP = (TURN, CHANGE, LENGTH, STRETCH, DESCENT)


def take_turned_step(
    optimizer: torch.optim.Optimizer,
    engine: CurvatureEngine,
    gradients: Mapping[nn.Parameter, Tensor],
    take_base_step: Callable[[], None],
    lr: Lr | Mapping[nn.Parameter, Lr],
) -> None:
    """The base class's step, and what changes it (a collective).

    Args:
        optimizer: The optimizer.
        engine: Its engine, after :meth:`~kfac_optim.CurvatureEngine.update`.
        gradients: The gradients, which the base class finds in ``.grad``.
        take_base_step: Takes the base class's step.
        lr: The learning rate; by parameter where there are several.
    """
    covered = {p: None for layer in engine.layers for p in layer.parameters if p in gradients}
    for state in [optimizer.state[p] for p in engine.overstretched if p in optimizer.state]:
        for key in (STRETCH, DESCENT):
            state.pop(key, None)
    changes = _changes_to_repeat(optimizer, engine, covered)
    computes = changes is None and engine.computes_directions
    before = weights_before(optimizer, covered) if computes else {}
    with gradient_weight_tracked(optimizer, covered):
        take_base_step()
    if engine.learns_trust:
        keep_first_moments(optimizer, covered, gradients, engine.moment_decay)
    else:
        forget(optimizer, MOMENT)
    forget(optimizer, *(_OF_STEP if changes is None else (LENGTH,)))  # that has been learned
    if not computes:
        _subtract(optimizer, changes or {})
        engine.skip_directions()
        return
    base = base_step(optimizer, gradients, before)
    del before
    directions, trust = engine.directions(base.moments, lr, base.updates), engine.trust
    if directions.are_none:
        return
    of_stacks = directions.scaled
    if not engine.learns_trust:
        matrices = turns(of_stacks) if trust == 1 else changes_at(of_stacks, trust)
        _subtract(optimizer, directions.laid_out(matrices) if trust > 0 else {})
        return
    length = update_length(optimizer, base.updates, directions.updates_together(base.updates))
    braked = None if length is None else brake(length, engine.usual_length)
    makers: dict[str, Maker] = {CHANGE: lambda out: changes_at(of_stacks, trust, braked, out)} if trust > 0 else {}
    makers[TURN] = lambda out: turns(of_stacks, out)
    if engine.stretches:
        makers[STRETCH] = lambda out: stretches(of_stacks, out)
    judged = directions.several_laid_out(makers)
    changes = judged.pop(CHANGE, {})
    _subtract(optimizer, changes)
    if engine.stretches:
        _subtract(optimizer, multiplied(judged[STRETCH], engine.reaches(), 1.0 if braked is None else braked))
        judged[DESCENT] = _descents(optimizer, base.moments, judged[STRETCH])
    _remember(optimizer, judged, changes)
    if length is not None:
        first = next(iter(base.updates))
        optimizer.state[first][LENGTH] = length.to(first.dtype)  # as torch's load_state_dict() would round it


def lessons_of(optimizer: torch.optim.Optimizer, gradients: Mapping[nn.Parameter, Tensor]) -> Lessons:
    """What gradients say of the last step, where directions were computed lately."""
    turns: list[Compared] = []
    stretches: list[Compared] = []
    averages: list[Compared] = []
    lengths: list[Tensor] = []
    descents: list[Tensor] = []
    stretched: list[nn.Parameter] = []
    rates: list[float] = []
    unit = _unit(optimizer.param_groups)
    for group in optimizer.param_groups:
        states = ((p, gradients.get(p), optimizer.state.get(p, {})) for p in group["params"])
        known = [(p, g, state) for p, g, state in states if g is not None]
        lr = -group["lr"] if group.get("maximize") else group.get("lr", 1.0)
        of_turns = lr if isinstance(lr, Tensor) else lr / unit
        turns += [(g, state[TURN], of_turns) for _, g, state in known if TURN in state]
        averages += [(g, state[MOMENT], 1.0) for _, g, state in known if MOMENT in state]
        noted = (optimizer.state.get(p, {}) for p in group["params"])
        lengths += [state[LENGTH] for state in noted if LENGTH in state]
        along = [(p, g, state) for p, g, state in known if STRETCH in state]
        stretched += [p for p, _, _ in along]
        if isinstance(lr, Tensor):
            rates += [1.0] * len(along)
            stretches += [(g, state[STRETCH], lr) for _, g, state in along]
            descents += [state[DESCENT] * abs(lr) for _, _, state in along]
        else:
            rates += [abs(lr)] * len(along)
            stretches += [(g, state[STRETCH], -1.0 if lr < 0 else 1.0) for _, g, state in along]
            descents += [state[DESCENT] for _, _, state in along]
    copies: Copies = {}
    return Lessons(
        turn=alignment(turns, copies) if turns else None,
        average=alignment(averages, copies) if averages else None,
        length=lengths[0] if lengths else None,
        stretch=alignments(stretches, copies) if stretches else None,
        descent=_together(descents) if descents else None,
        stretched=stretched,
        rates=rates,
    )


def _unit(groups: Sequence[Mapping[str, Any]]) -> float:
    """The rate of all groups, if it is one: of a sum over all parameters only the sign tells, which stays."""
    rates = {0.0 if isinstance(group.get("lr", 1.0), Tensor) else abs(group.get("lr", 1.0)) for group in groups}
    return (rates.pop() if len(rates) == 1 else 0.0) or 1.0


def _together(numbers: Sequence[Tensor]) -> Tensor:
    """0-dim tensors as one, which they were before a state was loaded."""
    known = joined(numbers)
    return torch.stack([number.to(numbers[0]) for number in numbers]) if known is None else known


def _descents(
    optimizer: torch.optim.Optimizer, moments: Mapping[nn.Parameter, Tensor], stretch: Mapping[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    """``<g, stretch>`` of each parameter, 0-dim, of the gradients that its moment is an average of.

    A collective where they are sharded.
    """
    shares = {
        p: 1 / moment_weight(optimizer, group, optimizer.state[p])
        for group in optimizer.param_groups
        for p in group["params"]
        if p in stretch
    }
    found = alignments([(moments[p], stretch[p], share) for p, share in shares.items()])
    return dict(zip(shares, found.unbind(), strict=True))  # side by side in the order in which they will be read


def _subtract(optimizer: torch.optim.Optimizer, changes: Mapping[nn.Parameter, Tensor]) -> None:
    """Takes the changes, per unit of the learning rate, off the weights."""
    for group in optimizer.param_groups if changes else ():
        subtract_([(p, changes[p]) for p in group["params"] if p in changes], group["lr"])


def _remember(
    optimizer: torch.optim.Optimizer,
    judged: Mapping[str, Mapping[nn.Parameter, Tensor]],
    changes: Mapping[nn.Parameter, Tensor],
) -> None:
    """Notes what is judged and changes of this step; at a rate of 0 nothing has moved, and they may be of no update."""
    for group in optimizer.param_groups:
        for p in [p for p in group["params"] if p in judged[TURN] and _moves(group)]:
            state = optimizer.state[p]
            state.update((key, of_key[p].to(p.dtype)) for key, of_key in judged.items())
            if changes and has_first_moment(optimizer, group, state):
                state[CHANGE] = changes[p].to(p.dtype)


def _moves(group: Mapping[str, Any]) -> bool:
    """Whether parameters of a group move, as far as the host knows."""
    return isinstance(group["lr"], Tensor) or group["lr"] != 0


def forget(optimizer: torch.optim.Optimizer, *keys: str) -> None:
    """Drops what earlier steps have noted, all of it by default."""
    keys = keys or (*_OF_STEP, MOMENT)
    for p, state in list(optimizer.state.items()):
        noted = [key for key in keys if key in state]
        for key in noted:
            del state[key]
        if noted and not state:
            del optimizer.state[p]  # the base class keeps nothing of it


def _changes_to_repeat(
    optimizer: torch.optim.Optimizer, engine: CurvatureEngine, covered: Mapping[nn.Parameter, None]
) -> dict[nn.Parameter, Tensor] | None:
    """The changes of the last step, with the stretch as far as reach goes now; None where this one repeats nothing.

    So where a layer had no gradient when directions were computed last: of heads that are used in turn each has some.
    Of a base class that keeps no first moment updates differ from step to step. There only the stretch is repeated,
    which is made of an average of gradients, if that is what it is of. With nothing to repeat a step that does not turn
    is the base class's own.
    """
    if not engine.repeats_turn:
        return None
    ready = engine.weights_with_directions()
    known: dict[nn.Parameter, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        for p in [p for p in group["params"] if p in covered]:
            state = optimizer.state.get(p, {})
            if TURN not in state:
                if p in ready and _moves(group):
                    return None
                continue
            if not has_first_moment(optimizer, group, state) and not engine.moment_decay:
                return None
            known[p] = state
    if not known:
        return None
    turned = {p: state[CHANGE] for p, state in known.items() if CHANGE in state}
    stretched = {p: state[STRETCH] for p, state in known.items() if STRETCH in state and engine.stretches}
    changes = {**turned, **multiplied(stretched, engine.reaches(), engine.brake)}
    both = [p for p in stretched if p in turned]
    for alike in of_one_kind(both):
        torch._foreach_add_([changes[p] for p in alike], [turned[p] for p in alike])
    if not changes and engine.trust > 0:
        return None
    return {p: changes[p] for p in known if p in changes}
