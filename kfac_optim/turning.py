"""A step of the base optimizer, turned towards K-FAC's directions as far as trust allows (``precondition="momentum"``).

The base class takes its own step on the raw gradients. The weights of layers are then changed by the difference between
the turned update and the base class's own (:mod:`~kfac_optim.bases.base_step`, :mod:`~.trust`). What a step records for
the next one is kept in the state of the parameters, so that a resumed run goes on as if it had not been interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from .bases import (
    BaseStep,
    Bucket,
    gradient_weight_tracked,
    keep_averages,
    multiplied,
    subtract_,
    subtract_multiples_,
    take_apart,
    update_length,
)
from .bases.state_keys import CHANGE, DESCENT, LENGTH, MOMENT, OF_STEP, STRETCH, TURN, forget
from .common.rates import Scalar, rate_of
from .engine import CurvatureEngine
from .stacks import Directions, Maker
from .steering import Compared, Plan, alignments, brake_of, changes_at, compares_weights, shortened, stretches, turns

__all__ = ["take_turned_step"]

# For each bucket: its members, and the vector to subtract from each of them, per unit of the learning rate.
Changes = list[tuple[Bucket, list[Tensor]]]


def take_turned_step(
    optimizer: torch.optim.Optimizer,
    engine: CurvatureEngine,
    buckets: Sequence[Bucket],
    take_base_step: Callable[[], None],
    lr: Scalar | Mapping[nn.Parameter, Scalar],
) -> None:
    """Takes the base class's step, then turns and stretches it (a collective).

    Args:
        optimizer: The optimizer.
        engine: Its engine, after :meth:`~kfac_optim.CurvatureEngine.update`.
        buckets: The parameters that have a gradient, which the base class finds in ``.grad``.
        take_base_step: Takes the base class's step.
        lr: The learning rate; a mapping by parameter if there are several.
    """
    reaches = engine.trained.reaches()  # by parameter, of all layers
    covered = [some for bucket in buckets if (some := [m for m in bucket if m.p in reaches])]
    plan = engine.plan()
    for state in [optimizer.state[p] for p in plan.too_long if p in optimizer.state]:
        for key in (STRETCH, DESCENT):
            state.pop(key, None)
    repeats = plan.repeats and _can_repeat(engine, plan, covered)
    computes = plan.computes and not repeats
    before = [bucket[0].rule.weights_before(bucket) for bucket in covered] if computes else []
    with gradient_weight_tracked(covered):
        take_base_step()
    if plan.learns or computes:
        for m in chain.from_iterable(covered):
            m.take_state()
        keep_averages(covered, plan.moment_decay if plan.learns else None)
    else:
        forget(optimizer, (MOMENT,))
    forget(optimizer, (LENGTH,) if repeats else OF_STEP)  # this step has learned from these; some are still repeated
    if computes:
        base = take_apart(covered, before)
        del before
        directions = engine.directions(base.moments, lr, base.updates, keeps_zeros=plan.learns)
        _turn_and_stretch(plan, covered, base, directions, reaches)
    else:
        if repeats:
            _repeat_change(plan, covered, reaches)
        engine.skip_directions()
    is_watched = compares_weights(engine.step_count + 1)
    engine.watch.note(m.p for m in chain.from_iterable(covered) if is_watched and STRETCH in m.state)


def _turn_and_stretch(
    plan: Plan,
    covered: Sequence[Bucket],
    base: BaseStep,
    directions: Directions,
    reaches: Mapping[nn.Parameter, float],
) -> None:
    """Turns and stretches the base class's step; records what the next step learns from, if trust is learned."""
    if directions.are_none:
        return
    if not plan.learns:
        _subtract(_changes_of(covered, directions.laid_out(changes_at(directions.scaled, plan.trust))))
        return
    of_stacks, trust = shortened(directions.scaled, plan.graft), plan.trust
    length = update_length(covered, list(base.updates.values()), lambda: directions.update_length(base.updates))
    brake = brake_of(length, plan.usual_length)
    makers: dict[str, Maker] = {TURN: lambda out: turns(of_stacks, out)}
    whole = trust == 1 and brake is None  # then the change is the whole turn
    if trust > 0 and not whole:
        makers[CHANGE] = lambda out: changes_at(of_stacks, trust, brake, plan.graft, out)
    if plan.stretches:
        makers[STRETCH] = lambda out: stretches(of_stacks, out)
    found = directions.several_laid_out(makers)
    if whole:
        found[CHANGE] = found[TURN]
    _subtract(_changes_of(covered, found.get(CHANGE, {})))
    if STRETCH in found:
        stretched = _changes_of(covered, found[STRETCH])
        shared = 1.0 if brake is None else brake
        _subtract([(bucket, multiplied(of, [reaches[m.p] for m in bucket], shared)) for bucket, of in stretched])
        found[DESCENT] = _descents(base.moments, stretched)
    _remember(covered, found)
    first = covered[0][0]
    first.state[LENGTH] = length.to(first.p.dtype)  # torch's load_state_dict() would round it to this type as well


def _descents(moments: Mapping[nn.Parameter, Tensor], stretched: Changes) -> dict[nn.Parameter, Tensor]:
    """``<g, stretch>`` of each parameter, 0-dim; g is its first moment, divided by the weight of all gradients in it.

    A collective if parameters are sharded.
    """
    params = [m.p for bucket, _ in stretched for m in bucket]
    compared: list[Compared] = []
    for bucket, vectors in stretched:
        weighted = [(m.rule.weight_of_gradients(m), m, v) for m, v in zip(bucket, vectors, strict=True)]
        for weight, of_weight in groupby(weighted, key=itemgetter(0)):
            _, some, along = zip(*of_weight, strict=True)
            compared.append(Compared([moments[m.p] for m in some], along, 1 / weight))
    # The numbers share one storage, in the order in which the next step reads them.
    return dict(zip(params, alignments(compared).unbind(), strict=True)) if params else {}


def _changes_of(buckets: Sequence[Bucket], changes: Mapping[nn.Parameter, Tensor]) -> Changes:
    """The changes, grouped by bucket; parameters without a change are left out."""
    found: Changes = []
    for bucket in buckets:
        some = [m for m in bucket if m.p in changes]
        if some:
            found.append((some, [changes[m.p] for m in some]))
    return found


def _subtract(changes: Changes) -> None:
    """Subtracts the changes, which are per unit of the learning rate, from the weights."""
    for bucket, vectors in changes:
        subtract_([m.p for m in bucket], vectors, rate_of(bucket[0].group))


def _remember(buckets: Sequence[Bucket], found: Mapping[str, Mapping[nn.Parameter, Tensor]]) -> None:
    """Records what the next step judges and repeats; changes only where a first moment keeps updates similar.

    Groups with a rate of 0 are left out: their weights did not move, and the vectors may belong to no update.
    """
    for bucket in [bucket for bucket in buckets if _moves(bucket[0].group)]:
        for key, of_key in found.items():
            for m in bucket:
                if (vector := of_key.get(m.p)) is not None and (key != CHANGE or m.has_first_moment):
                    # If the type is right already, comparing it is ten times as fast as calling ``to``.
                    m.state[key] = vector if vector.dtype == m.p.dtype else vector.to(m.p.dtype)


def _moves(group: Mapping[str, Any]) -> bool:
    """Whether the parameters of a group move; yes if the rate is a tensor, whose value the host does not know."""
    rate = rate_of(group)
    return isinstance(rate, Tensor) or rate != 0


def _can_repeat(engine: CurvatureEngine, plan: Plan, buckets: Sequence[Bucket]) -> bool:
    """Whether this step may be changed as the last one was.

    It may not if a layer that has a gradient now had none when directions were last computed, as happens to heads that
    are used in turn. The updates of a base class without a first moment differ too much between steps to be repeated,
    so only the stretch is repeated there, if it was made from an average of gradients. What was made from a single
    gradient, as with Adam at a first beta of 0, is never repeated. If nothing is recorded, only a step at trust 0 may
    repeat: it is then the base class's own.
    """
    turned = [m for bucket in buckets for m in bucket if TURN in m.state]
    others = {m.p for bucket in buckets for m in bucket if TURN not in m.state and _moves(m.group)}
    if not turned or (others and not others.isdisjoint(engine.trained.weights_with_directions())):
        return False
    for bucket in buckets:
        # Whether moments average many gradients.
        base, own = bucket[0].rule.averages_gradients(bucket[0].group), plan.moment_decay > 0
        if [m for m in bucket if TURN in m.state and not (base if m.has_first_moment else own)]:
            return False
    return plan.trust == 0 or any(CHANGE in m.state or (plan.stretches and STRETCH in m.state) for m in turned)


def _repeat_change(plan: Plan, buckets: Sequence[Bucket], reaches: Mapping[nn.Parameter, float]) -> None:
    """Changes the step as the last one was, with each stretch multiplied by its layer's present reach."""
    for bucket in buckets:
        lr = rate_of(bucket[0].group)
        turned = [m for m in bucket if CHANGE in m.state]
        if turned:
            subtract_([m.p for m in turned], [m.state[CHANGE] for m in turned], lr)
        stretched = [m for m in bucket if STRETCH in m.state] if plan.stretches else []
        factors = [reaches[m.p] * plan.last_brake for m in stretched]
        subtract_multiples_([m.p for m in stretched], [m.state[STRETCH] for m in stretched], factors, lr)
