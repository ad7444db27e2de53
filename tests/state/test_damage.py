"""Damaged states, states of other classes: refused whole, whatever was damaged."""

from __future__ import annotations

import copy
import functools
import math
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kfac_optim import KFACLAMB, KFACSGD, CurvatureEngine, KFACAdam, KFACAdamW
from kfac_optim.bases.records import RECORDED
from kfac_optim.refresh import Refresher
from kfac_optim.saved_state.checks import checksums
from tests.helpers.bases import KFACRMSprop
from tests.helpers.compare import assert_near, assert_same_factors
from tests.helpers.files import packed, through_a_file, unpacked
from tests.helpers.settings import CLASSES, OFTEN
from tests.helpers.training import assert_go_on_alike, assert_refused, backward, make_model, train
from tests.helpers.versions import needs_decay_in_states

K, NAN = 7, math.nan


def build(kfac: Any = KFACSGD, seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model(seed)
    return model, kfac(model, **CLASSES.get(kfac, {"lr": 0.01}), **{**OFTEN, "spread": 2, **options})


@functools.cache
def file_of(kfac: Any, steps: int, **options: Any) -> bytes:
    model, optimizer = build(kfac, **options)
    train(model, optimizer, range(steps))
    return packed(optimizer.state_dict())


def trained(kfac: Any = KFACSGD, steps: int = K, **options: Any) -> Any:
    """A saved state."""
    return unpacked(file_of(kfac, steps, **options))


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def without_checksums(state: dict[str, Any]) -> dict[str, Any]:
    """As a tool may leave it that knows numbers of its own alone."""
    for group in state["param_groups"]:
        for name in [name for name in group if name.startswith("kfac_checksum")]:
            del group[name]
    return state


def refused(state: dict[str, Any], kfac: Any = KFACSGD, **options: Any) -> str:
    """The message with which an optimizer in use refuses a state."""
    model, optimizer = build(kfac, seed=1, **options)
    train(model, optimizer, range(20, 23))
    return assert_refused(model, optimizer, state)


# Flipped bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_flipped_bit_is_refused(dtype: torch.dtype) -> None:
    """Of the averages' tensors, each as likely as the others; 1,000 over the four dtypes."""
    state = trained(factor_dtype=dtype)
    _, optimizer = build(factor_dtype=dtype)
    tensors = [t for s in state["state"].values() for t in tensors_of(s.get("kfac", {}))]
    chosen = random.Random(0)
    for _ in range(250):
        bits = chosen.choice(tensors).view(-1).view(torch.uint8)
        place, bit = chosen.randrange(bits.numel()), 1 << chosen.randrange(8)
        bits[place] ^= bit
        with pytest.raises(ValueError, match="damaged|not finite"):
            optimizer.load_state_dict(state)
        bits[place] ^= bit
    optimizer.load_state_dict(state)


def test_swapped_tensors_are_refused() -> None:
    state = trained()
    averages = state["state"][0]["kfac"]
    current, in_use = averages["current"], averages["in_use"]
    current["A"]["value"], in_use["A"]["value"] = in_use["A"]["value"], current["A"]["value"]
    assert "checksum" in refused(state)


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_entry_of_the_base_class_is_missed_by_a_fresh_optimizer(scheduled: bool) -> None:
    """Schedulers, which are built before a state is loaded, wrap its ``step``."""
    model, optimizer = build(KFACAdam)
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["exp_avg_sq"]
    _, fresh = build(KFACAdam)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(fresh, 10)
    with pytest.raises(ValueError, match="exp_avg_sq"):
        fresh.load_state_dict(state)


def test_a_state_that_was_not_copied_before_training_went_on_is_refused_with_the_remedy() -> None:
    model, optimizer = build(KFACSGD)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    train(model, optimizer, range(3, 6))
    with pytest.raises(ValueError, match="copy.deepcopy"):
        optimizer.load_state_dict(state)


def test_swapped_tensors_of_two_layers_show() -> None:
    layers = [{"current": {side: {"value": torch.randn(3)} for side in "AG"}} for _ in range(2)]
    before = checksums(layers)
    first, second = (layer["current"]["A"] for layer in layers)
    first["value"], second["value"] = second["value"], first["value"]
    assert checksums(layers) != before


def test_an_engine_that_stands_alone_has_a_checksum_too() -> None:
    model = make_model()
    engine = CurvatureEngine(model, **OFTEN)
    backward(model, 0)
    engine.precondition_(lr=0.1)
    state = through_a_file(engine.state_dict())
    engine.load_state_dict(state)
    state["layers"]["0"]["current"]["A"]["value"][0, 0] += 1
    with pytest.raises(ValueError, match="checksum"):
        engine.load_state_dict(state)


PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("before", PRECISIONS, ids=str)
@pytest.mark.parametrize("after", PRECISIONS, ids=str)
def test_factors_in_another_precision_load(before: torch.dtype, after: torch.dtype) -> None:
    """They are the same numbers, rounded: in float16 a factor is stored divided by a scale."""
    model, optimizer = build(factor_dtype=before)
    train(model, optimizer, range(K))
    _, resumed = build(factor_dtype=after)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_factors(resumed, optimizer, rel=2 * torch.finfo(after).eps)
    for name in ("in_use", "pending"):
        for block, twin in zip(optimizer.curvature.stages.blocks, resumed.curvature.stages.blocks, strict=True):
            for side in range(2):
                expected, found = (b.factors(name).matrix(side).double() for b in (block, twin))  # type: ignore[arg-type]
                assert_near(found, expected, f"{block.layer.name}, {name}", rel=2 * torch.finfo(after).eps)
    resumed.load_state_dict(through_a_file(resumed.state_dict()))


def test_a_factor_in_float16_needs_its_scale() -> None:
    state = trained(factor_dtype=torch.float16)
    entry = next(entry["kfac"] for entry in state["state"].values() if "kfac" in entry)
    del entry["current"]["G"]["scale"]
    _, optimizer = build(factor_dtype=torch.float16)
    with pytest.raises(ValueError, match="factor G .* has no scale"):
        optimizer.load_state_dict(state)


def test_a_factor_with_something_else_than_tensors_is_refused() -> None:
    state = without_checksums(trained())
    entry = next(entry["kfac"] for entry in state["state"].values() if "kfac" in entry)
    entry["current"]["G"]["scale"] = 3
    assert "factor G (current) that is not finite" in refused(state)


def test_a_state_without_its_refresh_in_progress_loads_where_none_is_in_progress() -> None:
    """torch.distributed.checkpoint loads what the fresh optimizer has room for."""
    state = trained(steps=6, inv_update_steps=5)
    if state["param_groups"][0]["kfac_pending_spread"] >= 0:
        state = trained(steps=9, inv_update_steps=5)
    for entry in state["state"].values():
        entry.get("kfac", {}).pop("pending", None)
    assert state["param_groups"][0]["kfac_pending_spread"] == -1
    _, optimizer = build(spread=0)
    optimizer.load_state_dict(state)


def test_a_damaged_snapshot_is_refused_where_no_refresh_is_in_progress() -> None:
    state = without_checksums(trained(steps=3))
    assert state["param_groups"][0]["kfac_pending_spread"] == -1
    entry = next(entry["kfac"] for entry in state["state"].values() if "kfac" in entry)
    del entry["pending"]["A"]
    assert "factor A (pending) that is missing" in refused(state)


def test_a_float_holds_a_checksum_exactly() -> None:
    """The bits of -1 are a negative number; each tensor counts times its place, each layer squared."""
    state = {"current": {"A": {"value": -torch.ones(3)}, "G": {"value": -torch.ones(5)}}}
    bits = torch.tensor(-1.0).view(torch.int32).item()
    (found,) = (number for name, number in checksums([state]).items() if name == "checksum_current")
    assert found == ((3 + 2 * 5) * bits) ** 2 % (2**53 - 111) and found == int(float(found))


def test_tensors_that_are_views_of_others_load() -> None:
    def column(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, tensor], -1)[..., 0]

    state = trained(factor_dtype=torch.float64)
    for of_parameter in state["state"].values():
        if "kfac" in of_parameter:
            of_parameter["kfac"] = tree_map_only(Tensor, column, of_parameter["kfac"])
    build(factor_dtype=torch.float64)[1].load_state_dict(state)


def test_numbers_that_a_tool_made_floats_of_load() -> None:
    """Counters and checksums do; options keep their types."""
    state, optimizer = trained(), build()[1]
    counters = tuple(f"kfac_{name}" for name in (*optimizer.curvature.stages.counters(), "checksum"))
    for group in state["param_groups"]:
        group.update({k: float(v) for k, v in group.items() if k.startswith(counters)})
    optimizer.load_state_dict(state)


# Ranges --------------------------------------------------------------------------------------------------------------


def set_counter(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def damage(state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group[f"kfac_{name}"] = value

    damage.__name__ = f"{name} {value}"
    return damage


def drop_counter(name: str) -> Callable[[dict[str, Any]], None]:
    def damage(state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            del group[f"kfac_{name}"]

    damage.__name__ = f"no {name}"
    return damage


def on_entry(change: Callable[[Any, Any], None], named: str, path: tuple[Any, ...]) -> Callable[[dict[str, Any]], None]:
    """``change`` gets what has the last key of a path through the states of the parameters, and this key."""

    def damage(state: dict[str, Any]) -> None:
        change(functools.reduce(operator.getitem, path[:-1], state["state"]), path[-1])

    damage.__name__ = " ".join(map(str, (*path, named)))
    return damage


def lost(*path: Any) -> Callable[[dict[str, Any]], None]:
    return on_entry(operator.delitem, "lost", path)


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    named = "of another shape" if isinstance(value, Tensor) else str(value)
    return on_entry(lambda owner, key: owner.update({key: value}), named, path)


def filled(value: float, *path: Any) -> Callable[[dict[str, Any]], None]:
    """In the first number of a tensor."""
    return on_entry(lambda owner, key: owner[key].view(-1)[:1].fill_(value), str(value), path)


def cut(*path: Any) -> Callable[[dict[str, Any]], None]:
    return on_entry(lambda owner, key: owner.update({key: owner[key][..., :-1].clone()}), "cut", path)


def no_factors(state: dict[str, Any]) -> None:
    for entry in state["state"].values():
        entry.pop("kfac", None)


def no_counters(state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        for key in [key for key in group if key.startswith("kfac")]:
            del group[key]


def a_parameter_too_many(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].append(99)


def a_group_too_many(state: dict[str, Any]) -> None:
    state["param_groups"].append(dict(state["param_groups"][0], params=[99]))


def factors_for_a_parameter_without(state: dict[str, Any]) -> None:
    state["state"][2]["kfac"] = copy.deepcopy(state["state"][0]["kfac"])


COUNTERS = [
    *(set_counter(name, 10**6) for name in ("last_refresh", "last_statistics", "frozen_at")),
    *(set_counter(name, -3) for name in ("step", "skipped_steps", "skipped_batches", "refreshes", "last_refresh")),
    *(set_counter(name, value) for name, value in (("trust", 11), ("lengths", 11), ("brake", 1.5))),
    set_counter("graft", 101),
    set_counter("throws", 2**16),
    set_counter("step", 3.5),
    set_counter("step", NAN),
    set_counter("damping", -1.0),
    set_counter("inv_update_steps", 0),
    set_counter("step", None),
    set_counter("refreshes", "many"),
    *(drop_counter(name) for name in ("step", "frozen_at", "pending_spread", "skipped_steps", "refreshes")),
]
PARTS = [
    no_factors, no_counters, a_parameter_too_many, a_group_too_many, factors_for_a_parameter_without,
    lost(0, "exp_avg"), put(torch.zeros(2, 2), 0, "exp_avg"), put(None, 0, "exp_avg"), filled(NAN, 0, "exp_avg"),
    filled(NAN, 1, "exp_avg_sq"), filled(-5.0, 0, "step"), filled(NAN, 0, "step"), put(None, 1),
    lost(0, "kfac"), put(None, 0, "kfac"), put(None, 0, "kfac", "in_use"),
    put("perhaps", 0, "kfac", "current", "trains"), put(math.inf, 0, "kfac", "current", "reach"),
    lost(0, "kfac", "current", "A"), lost(0, "kfac", "in_use", "G"), lost(0, "kfac", "pending", "A"),
    lost(0, "kfac", "current", "A", "weight"), put(torch.ones(3), 0, "kfac", "current", "A", "weight"),
    filled(-1.0, 0, "kfac", "current", "A", "weight"),
    lost(0, "kfac", "in_use", "gamma"), filled(-1.0, 0, "kfac", "in_use", "gamma"),
    cut(0, "kfac", "current", "A", "value"), cut(0, "kfac", "pending", "A", "value"),
    filled(NAN, 5, "kfac", "current", "G", "value"), filled(NAN, 5, "kfac", "pending", "A", "value"),
    filled(math.inf, 5, "kfac", "in_use", "A", "value"), put("lost", 0, "kfac", "current", "A", "value"),
]  # fmt: skip


@pytest.mark.parametrize("damage", [*COUNTERS, *PARTS], ids=lambda damage: damage.__name__)
def test_what_no_run_can_have_saved_is_refused(damage: Callable[[dict[str, Any]], None]) -> None:
    """Without the checksums, so that the ranges alone have to tell."""
    state = without_checksums(trained(KFACAdam))
    assert "pending" in state["state"][0]["kfac"]
    damage(state)
    refused(state, KFACAdam)


@pytest.mark.parametrize("key", RECORDED)
def test_what_a_step_has_recorded_may_be_deleted(key: str) -> None:
    model = make_model()
    optimizer = KFACSGD(model, lr=0.01, momentum=0.9, weight_decay=0.01)
    train(model, optimizer, range(9))
    state = unpacked(packed(optimizer.state_dict()))
    assert [own.pop(key) for own in state["state"].values() if key in own]
    optimizer.load_state_dict(state)
    train(model, optimizer, range(9, 12))
    assert any(key in own for own in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"max_factor_dim": 4}, {"max_factor_dim": 1}], ids=["full", "blocks", "diagonal"]
)
def test_a_state_without_checksums_loads(dtype: torch.dtype, options: dict[str, Any]) -> None:
    state = without_checksums(trained(factor_dtype=dtype, **options))
    model, optimizer = build(factor_dtype=dtype, **options)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(3))


def test_a_state_of_other_blocks_is_refused() -> None:
    message = refused(trained(max_factor_dim=4))
    assert "has a factor A" in message and "max_factor_dim" in message


def test_state_dict_leaves_the_groups_alone() -> None:
    """A checksum in a group would be old after the next step."""
    model, optimizer = build()
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    assert any("checksum" in name for name in state["param_groups"][0])
    optimizer.load_state_dict(through_a_file(state))
    assert not any("checksum" in name for group in optimizer.param_groups for name in group)


# Another base class --------------------------------------------------------------------------------------------------


@pytest.mark.fast("^False|^True-KFACSGD")
@pytest.mark.parametrize(
    ("kfac", "other"),
    [
        (KFACAdam, KFACSGD), (KFACLAMB, KFACSGD), (KFACRMSprop, KFACSGD), (KFACSGD, KFACAdam), (KFACSGD, KFACLAMB),
        (KFACRMSprop, KFACAdam), (KFACAdam, KFACRMSprop), (KFACSGD, KFACRMSprop), (KFACLAMB, KFACRMSprop),
    ],
)  # fmt: skip
@pytest.mark.parametrize("plain", [False, True])
def test_a_state_of_another_base_class_leaves_nothing_half_loaded(kfac: Any, other: Any, plain: bool) -> None:
    state = trained(other)
    if plain:
        no_factors(state)
        no_counters(state)
    message = refused(state, kfac)
    assert "another class of optimizers" in message


@needs_decay_in_states
@pytest.mark.parametrize(("kfac", "other"), [(KFACAdam, KFACAdamW), (KFACAdamW, KFACAdam)])
def test_weight_decay_does_not_change_its_meaning(kfac: Any, other: Any) -> None:
    """Where there is some; Adam takes the state of AdamW if it is told to decouple it."""
    message = refused(trained(other, weight_decay=0.1), kfac, weight_decay=0.1)
    assert f"give decoupled_weight_decay={other is KFACAdamW}" in message
    build(kfac)[1].load_state_dict(trained(other, weight_decay=0.0))
    if kfac is KFACAdam:
        model, optimizer = build(kfac, decoupled_weight_decay=True, weight_decay=0.1)
        twin, theirs = build(other, weight_decay=0.1)
        for own in (optimizer, theirs):
            own.load_state_dict(trained(other, weight_decay=0.1))
        assert_go_on_alike(range(3), (model, optimizer), (twin, theirs))


@needs_decay_in_states
def test_weight_decay_of_a_state_that_does_not_say_how_it_is_meant_is_adams() -> None:
    """As of torch's versions before the flag."""
    state = trained(KFACAdam, weight_decay=0.1)
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"]
    _, optimizer = build(KFACAdam, weight_decay=0.1)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is False


def move_state_of(optimizer: torch.optim.Optimizer) -> None:
    """As Lightning moves the state to another device."""
    for p, state in optimizer.state.items():
        optimizer.state[p] = tree_map_only(Tensor, Tensor.clone, state)


def test_factors_without_their_counters_are_refused_until_a_state_is_loaded() -> None:
    """As by frameworks that hand over the states of parameters alone."""
    (model, first), (other, second) = build(), build()
    train(model, first, range(3))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        second.state[q] = copy.deepcopy(first.state[p])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"counters are missing.*optim\.load_state_dict"):
            train(other, second, range(1))
    second.load_state_dict(first.state_dict())
    train(other, second, range(1))


def test_factors_of_an_interrupted_first_step_may_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    with monkeypatch.context() as patch:
        patch.setattr(Refresher, "start", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer, range(1))
    move_state_of(optimizer)
    train(model, optimizer, range(1))
    assert optimizer.curvature.stages.refresher.refreshes == 1
