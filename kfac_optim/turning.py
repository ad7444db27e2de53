"""A step of the base optimizer, turned towards K-FAC's directions as far as trust allows (``precondition="momentum"``).

The base class takes its own step on the raw gradients. The weights of layers are then changed by the difference between
the turned update and the base class's own (:mod:`~kfac_optim.bases.base_step`, :mod:`~.trust`). A step *computes* that
difference, *repeats* the last one, or is *plain*: the base class's own. :mod:`~kfac_optim.bases.records` says what each
of them records for the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter

import torch
from torch import Tensor, nn

from .bases import Bucket, gradient_weight_tracked, keep_averages, records, take_apart, update_length
from .bases.multi_tensor import subtract_, subtract_multiples_
from .bases.state_keys import MOMENT
from .common.rates import Scalar, moves, rate_of, rates_of
from .engine import CurvatureEngine
from .stacks import Directions, Maker
from .steering import Compared, Plan, alignments, changes_at, compares_weights, grafted, stretches, turns

# For some members of each bucket, what to subtract from each of them, per unit of the learning rate.
Changes = list[tuple[Bucket, list[Tensor]]]


def take_turned_step(
    optimizer: torch.optim.Optimizer,
    engine: CurvatureEngine,
    buckets: Sequence[Bucket],
    take_base_step: Callable[[], None],
) -> None:
    """Takes the base class's step, then turns and stretches it (a collective).

    Args:
        optimizer: The optimizer.
        engine: Its engine, after :meth:`~kfac_optim.CurvatureEngine.update`.
        buckets: The parameters that have a gradient, which the base class finds in ``.grad``.
        take_base_step: Takes the base class's step.
    """
    reaches = engine.stages.trained.reaches()  # by parameter, of all layers
    covered = [some for bucket in buckets if (some := [m for m in bucket if m.p in reaches])]
    plan, steering = engine.stages.plan(), engine.stages.steering
    records.forget(optimizer, (records.STRETCH, records.DESCENT), of=steering.too_long)
    repeats = plan.repeats and _can_repeat(engine, plan, covered)
    computes = plan.computes and not repeats
    before = [bucket[0].rule.weights_before(bucket) for bucket in covered] if computes else []
    members = [*chain.from_iterable(covered)] if plan.learns or computes else []
    if members and not members[0].rule.leaves_gradients:
        for m in members:
            m.keep_gradient()
    with gradient_weight_tracked(covered):
        take_base_step()
    if plan.learns or computes:
        for m in members:
            m.take_state()
        keep_averages(covered, stand_in=plan.learns)
    else:
        records.forget(optimizer, (MOMENT,))
    # This step has learned from what the last one recorded; it may still repeat it.
    records.forget(optimizer, (records.LENGTH,) if repeats else records.OF_STEP)
    if computes:
        moments, other_updates = take_apart(covered, before)
        del before
        lr = rates_of(optimizer.param_groups)
        directions = engine.directions(moments, lr, other_updates, keeps_zeros=plan.learns)
        _turn_and_stretch(plan, covered, moments, other_updates, directions, reaches)
    else:
        if repeats:  # each stretch is multiplied by its layer's present reach
            _subtract(records.recorded(covered, records.CHANGE))
            if plan.stretches:
                _subtract_stretches(records.recorded(covered, records.STRETCH), reaches, plan.brake.last)
        engine.skip_directions()
    watched = covered if compares_weights(engine.step_count + 1) else ()
    steering.watch.note(m.p for bucket in watched for m in records.having(bucket, records.STRETCH))


def _turn_and_stretch(
    plan: Plan,
    covered: Sequence[Bucket],
    moments: Mapping[nn.Parameter, Tensor],
    other_updates: Mapping[nn.Parameter, Tensor],
    directions: Directions,
    reaches: Mapping[nn.Parameter, float],
) -> None:
    """Turns and stretches the base class's step; records what the next step learns from, if trust is learned."""
    if not directions.scaled and directions.exchange is None:  # no rank has directions
        return
    if not plan.learns:
        _subtract(_by_bucket(covered, directions.laid_out(changes_at(directions.scaled, plan.trust))))
        return
    scaled, trust = grafted(directions.scaled, plan.graft), plan.trust
    updates = {**moments, **other_updates}
    length = update_length(covered, list(updates.values()), directions.norm_of_updates(updates))
    brake = plan.brake.of(length)
    share = plan.brake.share(trust, brake)
    makers: dict[str, Maker] = {records.TURN: lambda out: turns(scaled, out)}
    takes_whole_turn = trust == 1 and share is None  # then turn and change are the same vectors
    if (trust > 0 or share is not None) and not takes_whole_turn:
        makers[records.CHANGE] = lambda out: changes_at(scaled, trust, share, plan.graft, out)
    if plan.stretches:
        makers[records.STRETCH] = lambda out: stretches(scaled, out)
    found = directions.several_laid_out(makers)
    if takes_whole_turn:
        found[records.CHANGE] = found[records.TURN]
    _subtract(_by_bucket(covered, found.get(records.CHANGE, {})))
    if records.STRETCH in found:
        stretched = _by_bucket(covered, found[records.STRETCH])
        _subtract_stretches(stretched, reaches, 1.0 if brake is None else brake)
        found[records.DESCENT] = _descents(moments, stretched)
    records.record(covered, found, length)


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


def _by_bucket(buckets: Sequence[Bucket], changes: Mapping[nn.Parameter, Tensor]) -> Changes:
    """The changes by bucket; parameters without one are left out."""
    parts = ([m for m in bucket if m.p in changes] for bucket in buckets)
    return [(some, [changes[m.p] for m in some]) for some in parts if some]


def _subtract(changes: Changes) -> None:
    """Subtracts changes from the weights."""
    for bucket, vectors in changes:
        subtract_([m.p for m in bucket], vectors, rate_of(bucket[0].group))


def _subtract_stretches(stretches: Changes, reaches: Mapping[nn.Parameter, float], brake: Scalar) -> None:
    """Subtracts stretches, each times its layer's reach and the brake, from the weights."""
    for bucket, vectors in stretches:
        multipliers = [reaches[m.p] for m in bucket]
        subtract_multiples_([m.p for m in bucket], vectors, multipliers, brake, rate_of(bucket[0].group))


def _can_repeat(engine: CurvatureEngine, plan: Plan, buckets: Sequence[Bucket]) -> bool:
    """Whether this step may be changed as the last one was.

    It may not if a layer that has a gradient now had none when directions were last computed, as happens to heads that
    are used in turn. The updates of a base class that steps on single gradients differ too much to be repeated, so only
    the stretch is repeated there, which was made from an average of gradients. What was made from a single gradient, as
    with Adam at a first beta of 0, is never repeated, nor is what was made from a momentum that has been switched off.
    Where no change is recorded, only a step at trust 0 may repeat: it is then the base class's own.
    """
    turned = [some for bucket in buckets if (some := records.having(bucket, records.TURN))]
    others = {m.p for m in set(chain.from_iterable(buckets)).difference(*turned) if moves(m.group)}
    if not turned or (others and any(b.has_direction and b.layer.weight in others for b in engine.stages.blocks)):
        return False
    for some in turned:
        averaged = [m for m in some if not m.has_first_moment]
        if not some[0].rule.averages_gradients(some[0].group) or len(records.having(averaged, MOMENT)) < len(averaged):
            return False
    repeated = (records.CHANGE, records.STRETCH) if plan.stretches else (records.CHANGE,)
    return plan.trust == 0 or any(records.having(some, key) for some in turned for key in repeated)
