"""Saving and loading: everything is in the one ``state_dict()``, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from kfac_optim import (
    KFACSGD,
    CurvatureEngine,
    Graft,
    KFACAdam,
    KFACAdamW,
    KLClip,
    OfLargest,
    OfMean,
    constant_then_scaled,
    forgetting,
    growing,
    memory_estimate,
)
from tests.helpers.compare import assert_close, assert_identical, assert_same_state, assert_trained, leaves, values
from tests.helpers.files import through_a_file
from tests.helpers.settings import ALL_CLASSES, BASES, CLASSES, FLOAT64, OFTEN
from tests.helpers.training import assert_go_on_alike, assert_refused, backward, make_model, resumed_from, train
from tests.helpers.versions import FLATTENS_DICTS

K = 7  # steps before the interruption: not a multiple of an interval, and in the midst of a spread refresh
SETTINGS: dict[str, Any] = {**OFTEN, "scaling": KLClip(1e-2)}

OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "float64": FLOAT64,
    "spread": {"spread": 2},
    "spread inverse": {"spread": 2, "solver": "inverse"},
    "inverse": {"solver": "inverse"},
    "sampled": {"fisher": "categorical"},
    "growing": {"inv_update_steps": growing(0.3, 2), "factor_update_steps": None},
    "unit": {"scaling": "unit", "damping": OfMean(0.1)},
    "largest": {"damping": OfLargest(0.1)},
    "largest, spread inverse": {"damping": OfLargest(0.1), "spread": 2, "solver": "inverse"},
    # Every moment below the average takes weight from the past, by a trace that has to be in the state.
    "forgetting": {"factor_decay": forgetting(0.95, slack=1.0), "scaling": Graft(trust=1.0), "factor_update_steps": 1},
    "half": {"factor_dtype": torch.float16, "inv_dtype": torch.bfloat16},
    "blocks": {"max_factor_dim": 4},
    "diagonal": {"max_factor_dim": 1},
    "skipped": {"skip_layers": ["0"]},
}
ONLY_SGD: dict[str, dict[str, Any]] = {
    "momentum mode": {"precondition": "momentum"},
    "momentum mode, nesterov, spread": {"precondition": "momentum", "nesterov": True, "spread": 2},
}
CASES = [(kfac, name) for kfac in CLASSES for name in OPTIONS] + [(KFACSGD, name) for name in ONLY_SGD]
CASES += [(KFACAdamW, "growing")]


def build(kfac: Any, options: str | dict[str, Any] = "paper", seed: int = 0) -> tuple[nn.Sequential, Any]:
    model = make_model(seed)
    chosen = {**OPTIONS, **ONLY_SGD}[options] if isinstance(options, str) else options
    return model, kfac(model, **ALL_CLASSES[kfac], **{**SETTINGS, **chosen})


# Resuming ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kfac", CLASSES)
def test_a_state_that_was_emptied_is_saved_with_the_curvature(kfac: Any) -> None:
    """Loops clear it to start the base class anew; curvature goes on all the same."""
    model, optimizer = build(kfac)
    train(model, optimizer, range(K))
    optimizer.state.clear()
    model2, optimizer2 = again_by_state(model, optimizer)
    assert_go_on_alike(range(K, 2 * K), (model, optimizer), (model2, optimizer2))


def test_training_goes_on_where_the_entries_of_layers_were_emptied() -> None:
    model, optimizer = build(KFACSGD)
    train(model, optimizer, range(K))
    for state in optimizer.state.values():
        if "kfac" in state:
            state["kfac"] = {}
    train(model, optimizer, range(K, 2 * K))
    assert all(block.has_data() for block in optimizer.curvature.stages.blocks)


def again_by_state(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    fresh = build(type(optimizer), seed=1)
    fresh[0][0].requires_grad_(model[0].weight.requires_grad)  # type: ignore[index, union-attr]
    return resumed_from(model, optimizer, fresh)


def again_by_copy(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return copy.deepcopy((model, optimizer))


def test_a_state_has_the_options_of_its_moment() -> None:
    """Not those of the last step."""
    _, optimizer = build(KFACSGD)
    optimizer.curvature.damping = 0.5
    for state in (optimizer.state_dict(), optimizer.full_state_dict()):
        _, resumed = build(KFACSGD)
        resumed.load_state_dict(through_a_file(state))
        assert resumed.curvature.damping == 0.5


@pytest.mark.parametrize("other", [{"spread": 0}, {"inv_update_steps": 5}])
def test_a_refresh_in_progress_ends_where_refreshes_are_not_spread(other: dict[str, Any]) -> None:
    model = make_model(0)
    optimizer = KFACSGD(model, lr=0.1)
    step = 0
    while optimizer.curvature.stages.refresher.in_progress is None:
        train(model, optimizer, [step])
        step += 1
    state = through_a_file(optimizer.state_dict())
    assert state["param_groups"][0]["kfac_pending_spread"] >= 0
    resumed = KFACSGD(model, lr=0.1, **other)
    resumed.load_state_dict(state)
    train(model, resumed, range(step, step + 12))
    assert resumed.curvature.stages.refresher.in_progress is None
    assert (
        resumed.curvature.stages.refresher.frozen_at is not None
        and resumed.curvature.stages.refresher.frozen_at >= step - 1
    )


def test_hooks_on_loading_are_heard_before_the_state_is_judged() -> None:
    """They may put in order what would be refused, and what they raise comes through."""

    def built() -> tuple[nn.Sequential, KFACSGD]:
        model = make_model(0)
        groups = [{"params": list(model[0].parameters()), "lr": 0.2}, {"params": list(model[2:].parameters())}]
        return model, KFACSGD(groups, model=model, **{**ALL_CLASSES[KFACSGD], **OFTEN})

    def in_order(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": state["param_groups"][::-1]}

    def raising(optimizer: Any, state: dict[str, Any]) -> None:
        raise KeyError("of the user's")

    model, optimizer = built()
    train(model, optimizer, range(K))
    reversed_groups = in_order(optimizer, through_a_file(optimizer.state_dict()))
    other, resumed = built()
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="groups of"):
        resumed.load_state_dict(reversed_groups)
    hook = resumed.register_load_state_dict_pre_hook(raising)
    with pytest.raises(KeyError, match="of the user's"):
        resumed.load_state_dict(reversed_groups)
    hook.remove()
    assert not resumed.state and not resumed._optimizer_load_state_dict_pre_hooks
    resumed.register_load_state_dict_pre_hook(in_order)
    resumed.load_state_dict(reversed_groups)
    assert_go_on_alike(range(K, 2 * K), (model, optimizer), (other, resumed))


def test_a_hook_on_loading_may_order_the_layers_by_their_names() -> None:
    """As torch proposes for parameters that have another order, or are joined by new ones."""

    def built(*order: int) -> tuple[nn.Sequential, KFACSGD]:
        model = make_model(0)
        params = [(f"{i}.{name}", p) for i in order for name, p in model[i].named_parameters()]
        return model, KFACSGD(params, model=model, **ALL_CLASSES[KFACSGD])

    def by_name(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        (own,), (saved,) = optimizer.state_dict()["param_groups"], state["param_groups"]
        numbers = dict(zip(saved["param_names"], saved["params"], strict=True))
        pairs = zip(own["params"], own["param_names"], strict=True)
        states = {i: state["state"][numbers[name]] for i, name in pairs if name in numbers}
        group = {**saved, "params": own["params"], "param_names": own["param_names"]}
        return {"state": states, "param_groups": [group]}

    layers = [i for i, module in enumerate(make_model(0)) if list(module.parameters())]
    model, optimizer = built(*layers)
    train(model, optimizer, range(K))
    other, resumed = built(*layers[::-1])
    other.load_state_dict(model.state_dict())
    resumed.register_load_state_dict_pre_hook(by_name)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for net, own in ((model, optimizer), (other, resumed)):
        train(net, own, range(K, 2 * K))
    assert_close(model, other, 1e-6)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kfac", CLASSES)
def test_a_state_that_was_loaded_in_inference_mode_can_be_trained_on(kfac: Any, alone: bool) -> None:
    (model, optimizer), (resumed, other) = (build(kfac, {"scaling": "graft"}, seed) for seed in range(2))
    train(model, optimizer, range(K))
    source, target = (x.curvature if alone else x for x in (optimizer, other))
    state = through_a_file((model.state_dict(), source.state_dict()))
    resumed.load_state_dict(state[0])
    with torch.inference_mode():
        target.load_state_dict(state[1])
    train(resumed, other, range(K, 14))
    train(model, optimizer, range(K, 14))
    if not alone:
        assert_identical(model, resumed)


@pytest.mark.fast("^KFAC(SGD|LAMB)-")
@pytest.mark.parametrize("wait", [0, 2])
@pytest.mark.parametrize("again", [again_by_state, again_by_copy])
@pytest.mark.parametrize("kfac", ALL_CLASSES)
def test_a_layer_that_has_not_trained_yet_is_resumed(
    kfac: Any, again: Callable[..., tuple[nn.Module, Any]], wait: int
) -> None:
    """Nothing is kept of it, neither by the base class nor here."""
    model, optimizer = build(kfac)
    model[0].requires_grad_(False)
    train(model, optimizer, range(K))
    assert model[0].weight not in optimizer.state
    model2, optimizer2 = again(model, optimizer)
    for net, own in ((model, optimizer), (model2, optimizer2)):
        train(net, own, range(K, K + wait))
        net[0].requires_grad_(True)  # type: ignore[index]
        train(net, own, range(K + wait, 2 * K))
    assert_identical(model, model2)


def test_a_frozen_layer_is_resumed_with_its_factors() -> None:
    model, optimizer = build(KFACSGD)
    train(model, optimizer, range(K))
    model[0].requires_grad_(False)
    model2, optimizer2 = again_by_state(model, optimizer)
    for net, own in ((model, optimizer), (model2, optimizer2)):
        net[0].requires_grad_(True)  # type: ignore[index]
        train(net, own, range(K, 2 * K))
    assert_identical(model, model2)


@pytest.mark.parametrize("again", [again_by_state, again_by_copy])
@pytest.mark.parametrize("kfac", ALL_CLASSES)
def test_a_run_is_resumed_all_of_whose_steps_were_skipped(
    kfac: Any, again: Callable[..., tuple[nn.Module, Any]]
) -> None:
    """The base class has no state yet, and takes one that is not empty for its own."""
    model, optimizer = build(kfac)
    train(model, optimizer, [0], loss=lambda output, _: output.sum() * math.nan)
    assert optimizer.curvature.skipped_steps == 1
    model2, optimizer2 = again(model, optimizer)
    assert_go_on_alike(range(K), (model, optimizer), (model2, optimizer2))


@pytest.mark.fast("^KFACSGD-(paper|spread$|inverse|sampled|growing|half|largest|momentum)|^KFACLAMB-paper|^KFACAdamW")
@pytest.mark.parametrize(("kfac", "options"), CASES)
def test_a_resumed_run_is_the_uninterrupted_one(kfac: Any, options: str) -> None:
    model, optimizer = build(kfac, options)
    before = values(model)
    train(model, optimizer, range(K))
    resumed, again = resumed_from(model, optimizer, build(kfac, options, seed=1))
    assert_same_state(again.state_dict(), optimizer.state_dict())
    assert_go_on_alike(range(K, 2 * K), (model, optimizer), (resumed, again))
    assert_trained(model, before)
    assert_same_state(again.state_dict(), optimizer.state_dict())


@pytest.mark.fast("eigen-[135]|[135]-eigen")
@pytest.mark.parametrize("interrupted_after", range(1, 9))
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_at_whatever_step_a_spread_refresh_is_interrupted(interrupted_after: int, solver: str) -> None:
    options = {"spread": 3, "inv_update_steps": 5, "factor_update_steps": 1, "solver": solver}
    model, optimizer = build(KFACSGD, options)
    train(model, optimizer, range(interrupted_after))
    resumed, again = resumed_from(model, optimizer, build(KFACSGD, options, seed=1))
    assert_go_on_alike(range(interrupted_after, 14), (model, optimizer), (resumed, again))


@pytest.mark.slow
def test_rolling_back_an_optimizer_in_use() -> None:
    """Loading an earlier state into the same optimizer: nothing of the later one is left."""
    model, optimizer = build(KFACSGD, "spread")
    train(model, optimizer, range(K))
    checkpoint = through_a_file([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(K, 2 * K))
    expected = values(model)
    train(model, optimizer, range(30, 35))
    backward(model, 99)
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    train(model, optimizer, range(K, 2 * K))
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))


def test_the_loaded_factors_are_copied() -> None:
    """One loaded dict serves several optimizers."""
    model, optimizer = build(KFACAdam)
    train(model, optimizer, range(K))
    checkpoint = through_a_file(optimizer.state_dict())
    kept = copy.deepcopy(checkpoint)
    resumed, again = build(KFACAdam)
    again.load_state_dict(checkpoint)
    train(resumed, again, range(3))
    for index, state in checkpoint["state"].items():
        assert_same_state(state.get("kfac", {}), kept["state"][index].get("kfac", {}))


def test_an_engine_that_stands_alone_resumes() -> None:
    def run(model: nn.Module, engine: CurvatureEngine, steps: range) -> None:
        for step in steps:
            backward(model, step)
            engine.precondition_(lr=0.1)
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    model, resumed = make_model(), make_model(1)
    engine, again = (CurvatureEngine(m, **SETTINGS, spread=2) for m in (model, resumed))
    run(model, engine, range(K))
    resumed_from(model, engine, (resumed, again))
    run(model, engine, range(K, 2 * K))
    run(resumed, again, range(K, 2 * K))
    assert_identical(model, resumed)


# What is in a state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kfac", CLASSES)
def test_state_exists_from_the_first_step_on(kfac: Any) -> None:
    model, optimizer = build(kfac)
    assert not optimizer.state
    assert optimizer.state_dict()["state"] == {}
    backward(model, 0)
    assert not optimizer.state
    optimizer.step()
    first = {path: value.shape for path, value in leaves(optimizer.state_dict()["state"]) if isinstance(value, Tensor)}
    train(model, optimizer, range(1, K))
    last = {path: value.shape for path, value in leaves(optimizer.state_dict()["state"]) if isinstance(value, Tensor)}
    assert first == last
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.fast("^KFACSGD-(paper|spread|half|growing|sampled)")
@pytest.mark.parametrize(("kfac", "options"), CASES)
def test_a_state_is_tensors_and_plain_numbers(kfac: Any, options: str) -> None:
    model, optimizer = build(kfac, options)
    train(model, optimizer, range(K))
    for path, value in leaves(optimizer.state_dict()["state"]):
        assert isinstance(value, (Tensor, int, float)), f"{path} is a {type(value).__name__}"
    for group in optimizer.state_dict()["param_groups"]:
        for key, value in group.items():
            if key.startswith("kfac"):
                assert isinstance(value, (int, float)), f"{key} is a {type(value).__name__}"


def test_numbers_of_numpy_are_saved_as_plain_ones() -> None:
    """Those of a search over ``np.logspace``; ``through_a_file`` loads with ``weights_only=True``."""
    number = np.float64(0.1)
    for damping in (number, OfMean(number), OfLargest(number)):
        options = {"damping": damping, "factor_decay": number, "factor_batch_fraction": number}
        model, optimizer = build(KFACSGD, {**options, "scaling": KLClip(number)})
        train(model, optimizer, range(K))
        state = through_a_file(optimizer.state_dict())
        assert state["param_groups"][0]["kfac_factor_decay"] == 0.1


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_a_schedule_may_set_numbers_of_numpy(kind: type) -> None:
    """The one-cycle schedule of fastai does; what is learned from the rates is saved."""
    model, optimizer = build(KFACSGD)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = kind(0.1 / (step + 1))
        train(model, optimizer, [step])
    optimizer.param_groups[0]["lr"] = 0.1
    state = through_a_file(optimizer.state_dict())
    assert state["param_groups"][0]["kfac_rate_fell"] == 1
    build(KFACSGD)[1].load_state_dict(state)


def test_rates_below_zero_count_by_their_size() -> None:
    """Groups that go uphill may have such, and torch checks no group's rate."""
    model = make_model()
    weight, *others = model.parameters()
    optimizer = KFACSGD([{"params": [weight], "lr": -0.1}, {"params": others, "lr": 0.05}], model=model)
    train(model, optimizer, range(3))
    optimizer.param_groups[1]["lr"] = -0.05
    train(model, optimizer, range(3, 6))
    state = through_a_file(optimizer.state_dict())
    assert (state["param_groups"][0]["kfac_rate"], state["param_groups"][0]["kfac_rate_fell"]) == (0.1, 0)
    optimizer.load_state_dict(state)


def test_state_dict_does_not_depend_on_the_assignment() -> None:
    states = []
    for assignment in ("layer-wise", "factor-wise", "kaisa"):
        model, optimizer = build(KFACSGD, {"assignment": assignment})
        train(model, optimizer, range(K))
        states.append(optimizer.state_dict())
    assert_same_state(states[0], states[1])
    assert_same_state(states[0], states[2])


# Adam and LAMB have no float16: their eps is zero in it.
@pytest.mark.parametrize(("kfac", "dtype"), [*[(kfac, torch.bfloat16) for kfac in CLASSES], (KFACSGD, torch.float16)])
def test_float32_factors_stay_float32_on_a_half_precision_model(kfac: Any, dtype: torch.dtype) -> None:
    """Torch casts loaded state to the parameter's dtype."""
    (model, optimizer), fresh = build(kfac), build(kfac, seed=1)
    for each in (model, fresh[0]):
        each.to(dtype)
    train(model, optimizer, range(K))
    resumed, again = resumed_from(model, optimizer, fresh)
    for name in ("0", "2", "3"):
        for ours, theirs in zip(again.curvature.factors(name), optimizer.curvature.factors(name), strict=True):
            assert ours.dtype is torch.float32
            assert torch.equal(ours, theirs)
    curvature = [v for path, v in leaves(again.state_dict()["state"]) if path.endswith("value")]
    assert curvature
    assert {value.dtype for value in curvature} == {torch.float32}
    assert_go_on_alike(range(K, 2 * K), (model, optimizer), (resumed, again))


# Hyperparameters in a state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fresh", "saved_value"),
    [
        ("damping", 1, 0.5),
        ("factor_decay", 0, 0.5),
        ("factor_update_steps", None, 3),
        ("inv_update_steps", 100, 2),
        ("spread", 0, 2),
    ],
)
def test_a_saved_number_is_loaded_as_it_is(name: str, fresh: Any, saved_value: Any) -> None:
    """As ``lr`` is, whatever type of number the new optimizer was given: 1 for a damping, None for an interval."""
    model, optimizer = build(KFACSGD, {name: saved_value})
    train(model, optimizer, range(K))
    _, again = build(KFACSGD, {name: fresh})
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    found = getattr(again.curvature, name)
    assert found == saved_value and type(found) is type(saved_value)


NO_SCHEDULE = [0.7, OfMean(0.7), OfLargest(0.7)]


@pytest.mark.fast("^0.7-OfMean|^OfMean.*-OfLargest|^OfLargest.*-0.7$")
@pytest.mark.parametrize("fresh", NO_SCHEDULE, ids=str)
@pytest.mark.parametrize("kept", NO_SCHEDULE, ids=str)
def test_the_kind_of_a_damping_is_part_of_the_state(kept: Any, fresh: Any) -> None:
    """Changed during training, it goes on, whatever the new optimizer was given."""
    model, optimizer = build(KFACSGD)
    train(model, optimizer, range(K - 2))
    optimizer.curvature.damping = kept
    train(model, optimizer, range(K - 2, K))
    state = through_a_file(optimizer.state_dict())
    names = {key for group in state["param_groups"] for key in group if key.startswith("kfac_damping")}
    kind = {OfMean: "_of_mean", OfLargest: "_of_largest"}.get(type(kept), "")
    assert names == {f"kfac_damping{kind}"}, "and no other"
    resumed, again = resumed_from(model, optimizer, build(KFACSGD, {"damping": fresh}, seed=1))
    assert again.curvature.damping == kept and type(again.curvature.damping) is type(kept)
    assert_go_on_alike(range(K, 2 * K), (model, optimizer), (resumed, again))
    alone = CurvatureEngine(make_model(), damping=fresh)
    alone.load_state_dict(through_a_file(optimizer.curvature.state_dict()))
    assert alone.damping == kept and type(alone.damping) is type(kept)


def scheduled(step: int) -> float:
    return 0.3 / (1 + step)


@pytest.mark.parametrize(
    "schedule", [scheduled, OfMean(scheduled), OfLargest(scheduled)], ids=["absolute", "mean", "largest"]
)
@pytest.mark.parametrize("number", NO_SCHEDULE, ids=str)
def test_a_saved_number_of_any_kind_does_not_override_a_function(number: Any, schedule: Any) -> None:
    model, optimizer = build(KFACSGD, {"damping": number})
    train(model, optimizer, range(K))
    resumed, again = build(KFACSGD, {"damping": schedule})
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    assert again.curvature.damping is schedule
    train(resumed, again, range(2))
    assert not any(key.startswith("kfac_damping") for key in again.param_groups[0])

    _, with_number = build(KFACSGD, {"damping": number})
    with_number.load_state_dict(through_a_file(again.state_dict()))
    assert with_number.curvature.damping is number, "the state has no number for it"


@pytest.mark.parametrize("name", ["damping_of_mean", "damping_of_largest"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_a_damaged_relative_damping_is_refused(name: str, value: float) -> None:
    model, optimizer = build(KFACSGD, {"damping": OfMean(0.1)})
    train(model, optimizer, range(K))
    state = through_a_file(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["kfac_damping_of_mean"]
        group[f"kfac_{name}"] = value
    _, again = build(KFACSGD, {"damping": OfMean(0.2)})
    with pytest.raises(ValueError, match="damping"):
        again.load_state_dict(state)
    assert again.curvature.damping == OfMean(0.2) and again.curvature.step_count == 0


@pytest.mark.fast("^(damping|inv)")
@pytest.mark.parametrize(
    ("name", "schedule", "number"),
    [
        ("damping", constant_then_scaled(0.3, (3,), 0.5), 0.9),
        ("factor_decay", lambda step: 0.5, 0.9),
        ("factor_update_steps", constant_then_scaled(2, (3,), 2), 5),
        ("inv_update_steps", growing(0.5, 2), 5),
        ("spread", lambda step: 0, 0),
    ],
)
def test_callables_are_not_saved_and_not_overridden(name: str, schedule: Callable[[int], Any], number: Any) -> None:
    model, optimizer = build(KFACSGD, {name: schedule})
    train(model, optimizer, range(K))
    state = through_a_file(optimizer.state_dict())
    assert not any(callable(value) for _, value in leaves(state) if not isinstance(value, Tensor))

    _, with_number = build(KFACSGD, {name: number})
    with_number.load_state_dict(state)
    assert getattr(with_number.curvature, name) == number, "the state has no number for it"

    model, optimizer = build(KFACSGD, {name: number})
    train(model, optimizer, range(K))
    _, with_schedule = build(KFACSGD, {name: schedule})
    with_schedule.load_state_dict(through_a_file(optimizer.state_dict()))
    assert getattr(with_schedule.curvature, name) is schedule


# Loading what is not a state of this optimizer -----------------------------------------------------------------------


@pytest.mark.fast("KFACSGD")
@pytest.mark.parametrize("kfac", CLASSES)
def test_the_base_class_s_state_starts_the_curvature_anew(kfac: Any) -> None:
    """Moments are those of the base run, statistics start as in a new optimizer; also in one that has trained."""
    model = make_model()
    base = BASES[kfac](model.parameters(), **CLASSES[kfac])
    train(model, base, range(K))
    state = through_a_file(base.state_dict())

    runs = []
    for trained in (0, 5):
        resumed, optimizer = build(kfac, seed=1)
        train(resumed, optimizer, range(50, 50 + trained))
        resumed.load_state_dict(model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(state))  # torch's own moments go on living in the dict that is loaded
        report = optimizer.curvature.report()
        assert (report["step"], report["staleness"], report["layers"]) == (0, None, {})
        for p, q in zip(resumed.parameters(), model.parameters(), strict=True):
            for key, value in base.state[q].items():
                if isinstance(value, Tensor):
                    assert torch.equal(optimizer.state[p][key], value), key
        train(resumed, optimizer, range(K, 2 * K))
        runs.append(resumed)
    assert_identical(*runs)


@pytest.mark.parametrize("kfac", CLASSES)
def test_the_base_class_loads_our_state(kfac: Any) -> None:
    """Going back to the base optimizer is possible too: it ignores what it does not know."""
    model, optimizer = build(kfac)
    train(model, optimizer, range(K))
    before = values(model)
    base = BASES[kfac](model.parameters(), **CLASSES[kfac])
    base.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, base, range(K, K + 3))
    assert_trained(model, before)


def other_models() -> dict[str, nn.Module]:
    instance_norm = nn.InstanceNorm1d(6, affine=True)
    return {
        "wider": nn.Sequential(nn.Linear(4, 7), nn.PReLU(), nn.LayerNorm(7), nn.Linear(7, 3)),
        "fewer": nn.Sequential(nn.Linear(4, 3)),
        "another layer type": nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.LayerNorm(6), nn.Bilinear(6, 1, 3)),
        "norm without blocks": nn.Sequential(nn.Linear(4, 6), nn.PReLU(), instance_norm, nn.Linear(6, 3)),
    }


@pytest.mark.fast("wider|fewer")
@pytest.mark.parametrize("name", other_models())
def test_a_state_of_another_model_is_refused(name: str) -> None:
    other = other_models()[name]
    optimizer = KFACSGD(other, **CLASSES[KFACSGD], **SETTINGS)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in other.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # the dry step creates all state
    model, again = build(KFACSGD)
    train(model, again, range(3))
    assert_refused(model, again, through_a_file(optimizer.state_dict()))


def test_a_state_with_other_skipped_layers_is_refused() -> None:
    model, optimizer = build(KFACSGD, {"skip_layers": ["^0$"]})
    train(model, optimizer, range(K))
    resumed, again = build(KFACSGD)
    train(resumed, again, range(3))
    assert_refused(resumed, again, through_a_file(optimizer.state_dict()))


@pytest.mark.parametrize("key", ["state", "param_groups"])
def test_a_dict_that_is_no_optimizer_state_is_refused(key: str) -> None:
    model, optimizer = build(KFACSGD)
    train(model, optimizer, range(K))
    state = through_a_file(optimizer.state_dict())
    del state[key]
    assert_refused(model, optimizer, state)


def test_the_engine_refuses_too() -> None:
    model = make_model()
    engine = CurvatureEngine(model, **SETTINGS)
    backward(model, 0)
    engine.precondition_(lr=0.1)
    state = through_a_file(engine.state_dict())
    damages: list[Callable[[dict[str, Any]], Any]] = [
        lambda layers: layers.update(x={}),
        lambda layers: layers.pop("0"),
        lambda layers: layers["0"]["current"].pop("G"),
    ]
    for damage in damages:
        damaged, before = copy.deepcopy(state), copy.deepcopy(engine.state_dict())
        damage(damaged["layers"])
        with pytest.raises(ValueError):
            engine.load_state_dict(damaged)
        assert_same_state(engine.state_dict(), before)
    with pytest.raises(ValueError, match="not the state of an engine: it has no 'layers'"):
        engine.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())


# torch.distributed.checkpoint, Accelerate, Lightning -----------------------------------------------------------------


@pytest.mark.fast("spread|growing")
@pytest.mark.parametrize("options", ["paper", "spread", "half", "growing"])
@pytest.mark.parametrize("kfac", CLASSES)
def test_the_dry_step_creates_all_state_and_changes_nothing(kfac: Any, options: str) -> None:
    """torch.distributed.checkpoint's: zero gradients, lr 0, no forward."""
    without_decay = {**CLASSES[kfac], "weight_decay": 0.0}  # SGD's first momentum buffer is weight_decay * weight
    model, again = make_model(), make_model()
    optimizer, fresh = (kfac(m, **without_decay, **{**SETTINGS, **OPTIONS[options]}) for m in (model, again))
    weights, counters = values(model), {k: v for k, v in optimizer.param_groups[0].items() if k.startswith("kfac")}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0) if kfac is KFACSGD else 0.0
    optimizer.step(closure=None)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))
    assert {k: v for k, v in optimizer.param_groups[0].items() if k.startswith("kfac")} == counters
    assert optimizer.curvature.report()["step"] == 0

    real = make_model()
    trained = kfac(real, **without_decay, **{**SETTINGS, **OPTIONS[options]})
    train(real, trained, range(1))
    dry, wet = (
        {path: (v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for path, v in leaves(o.state_dict()["state"])}
        for o in (optimizer, trained)
    )
    assert dry == wet

    optimizer.param_groups[0]["lr"] = CLASSES[kfac]["lr"]
    if kfac is KFACSGD:  # Adam and LAMB count the dry step in their own bias corrections, as they do in torch
        assert_go_on_alike(range(K), (model, optimizer), (again, fresh))


def test_a_dry_step_after_a_backward_pass_does_not_count_either() -> None:
    """Its gradients may have been dropped by hand."""
    model, optimizer = build(KFACSGD)
    counters = optimizer.curvature.stages.counters()
    backward(model, 0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert optimizer.curvature.stages.counters() == counters


@pytest.mark.fast("^KFACSGD-(paper|spread-)|^KFACLAMB-half-True")
@pytest.mark.parametrize("flatten", [False, True] if FLATTENS_DICTS else [False])
@pytest.mark.parametrize(("kfac", "options"), CASES)
def test_distributed_checkpoint_round_trip(kfac: Any, options: str, flatten: bool) -> None:
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = build(kfac, options)
    train(model, optimizer, range(K))
    weights, state = (
        through_a_file(model.state_dict()),
        through_a_file(get_optimizer_state_dict(model, optimizer, options=how)),
    )
    train(model, optimizer, range(K, 2 * K))

    resumed, again = build(kfac, options, seed=1)
    resumed.load_state_dict(weights)
    set_optimizer_state_dict(resumed, again, state, options=how)
    train(resumed, again, range(K, 2 * K))
    assert_identical(resumed, model)


def test_distributed_checkpoint_that_got_the_optimizer_itself_is_told_the_remedy(tmp_path: Path) -> None:
    """A fresh one has no factors to read into; torch hands it the counters alone."""
    model, optimizer = build(KFACSGD)
    train(model, optimizer, range(K))
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    _, fresh = build(KFACSGD)
    with pytest.raises(ValueError, match=r"no room for them: .* read it into what get_optimizer_state_dict"):
        dcp.load({"optimizer": fresh}, checkpoint_id=tmp_path, no_dist=True)
    assert fresh.curvature.step_count == 0


@pytest.mark.fast("KFACLAMB")
@pytest.mark.parametrize("kfac", CLASSES)
def test_accelerate_loads_the_state_of_the_fresh_optimizer_into_itself(kfac: Any) -> None:
    (model, optimizer), (twin, plain) = build(kfac), build(kfac)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(K))
    optimizer.load_state_dict(tree_map_only(Tensor, Tensor.clone, optimizer.state_dict()))
    train(model, optimizer, range(K, 2 * K))
    train(twin, plain, range(2 * K))
    assert_identical(model, twin)


@pytest.mark.fast("momentum")
@pytest.mark.parametrize("options", ["paper", "spread", "half", "momentum mode"])
def test_moved_state_tensors_are_what_training_goes_on_with(options: str) -> None:
    """Lightning walks ``optimizer.state`` and puts new dicts of moved tensors in the place of the old."""
    (model, optimizer), (twin, plain) = build(KFACSGD, options), build(KFACSGD, options)
    train(model, optimizer, range(K))
    for parameter, state in list(optimizer.state.items()):
        optimizer.state[parameter] = tree_map_only(Tensor, Tensor.clone, state)
    first = {path: value for path, value in leaves(dict(optimizer.state_dict()["state"])) if path.endswith("value")}
    train(model, optimizer, range(K, 2 * K))
    moved = dict(leaves(dict(optimizer.state_dict()["state"])))
    assert first, "there are factors"
    assert all(moved[path] is tensor for path, tensor in first.items()), "the new tensors are the ones in use"
    train(twin, plain, range(2 * K))
    assert_identical(model, twin)


def test_lists_of_parameter_names_survive() -> None:
    """Named parameters: torch keeps the names in the groups, and so do we."""
    model = make_model()
    optimizer = KFACSGD(model.named_parameters(), lr=0.1, **SETTINGS)
    train(model, optimizer, range(K))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
    fresh = make_model(1)
    resumed, again = resumed_from(model, optimizer, (fresh, KFACSGD(fresh.named_parameters(), lr=0.1, **SETTINGS)))
    assert_go_on_alike(range(K, 2 * K), (model, optimizer), (resumed, again))


def test_the_number_in_klclip_is_saved_and_loaded_and_does_not_replace_a_function() -> None:
    model, optimizer = build(KFACSGD, {"scaling": KLClip(1e-4)})
    train(model, optimizer, range(K))
    state = through_a_file(optimizer.state_dict())
    _, number = build(KFACSGD, {"scaling": KLClip(0.5)})
    number.load_state_dict(state)
    assert number.curvature.scaling == KLClip(1e-4)
    function = KLClip(lambda step: 0.5)
    for scaling in (function, "unit"):
        _, other = build(KFACSGD, {"scaling": scaling})
        before = other.curvature.scaling
        other.load_state_dict(state)
        assert other.curvature.scaling is before


@pytest.mark.parametrize("kfac", CLASSES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_state_comes_back_from_the_base_class(kfac: Any, steps: int) -> None:
    """Which keeps the curvature as it was, but for numbers that it makes of the parameters' type."""
    model, optimizer = build(kfac)
    train(model, optimizer, range(K))
    base = BASES[kfac](model.parameters(), **CLASSES[kfac])
    base.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, base, range(K, K + steps))
    twin, other = build(kfac)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(base.state_dict()))
    for found, expected in zip(other.curvature.factors("0"), optimizer.curvature.factors("0"), strict=True):
        torch.testing.assert_close(found, expected)
    train(twin, other, range(K + steps, 2 * K))


def lora(trains: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].requires_grad_(trains)
    return model


def test_frozen_layers_take_no_memory_until_they_train() -> None:
    """Nor do they in a saved state, which goes on in a model of which all layers train by now."""

    def kept(optimizer: Any) -> list[str]:
        states = optimizer.state_dict()["state"]
        return [name for i, (name, _) in enumerate(model.named_parameters()) if "kfac" in states.get(i, {})]

    options: dict[str, Any] = {"lr": 0.01, "inv_update_steps": 4, "factor_update_steps": 2, "spread": 1}
    model, whole = lora(trains=False), lora(trains=True)
    alone = memory_estimate(nn.ModuleList([whole[0], whole[4]]))
    assert memory_estimate(model) == alone and memory_estimate(whole)["total"] > alone["total"]
    optimizer = KFACAdam(model, **options)
    train(model, optimizer, range(6), shape=(16, 6))
    assert kept(optimizer) == ["0.weight", "4.weight"]
    row = next(line for line in repr(optimizer.curvature).splitlines() if line.startswith("2 "))
    assert "frozen" in row and " B" not in row
    assert "2 layers preconditioned, 0 parameters by the base rule" in repr(optimizer.curvature)
    whole.load_state_dict(model.state_dict())
    resumed = KFACAdam(whole, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model[2].requires_grad_(True)
    for trained, by in ((model, optimizer), (whole, resumed)):
        train(trained, by, range(6, 14), shape=(16, 6))
        assert kept(by) == ["0.weight", "2.weight", "4.weight"]
        assert all(block.has_direction for block in by.curvature.stages.blocks)
    assert_identical(model, whole)
    state = optimizer.state_dict()
    del state["state"][0]["kfac"]
    with pytest.raises(ValueError, match="'0' has no Kronecker factors"):
        KFACAdam(lora(trains=True), **options).load_state_dict(state)


def test_zeros_of_gradients_decide_nothing_for_later_steps() -> None:
    """Units that no example of a small batch reaches have gradients of zero in some steps, and in others not."""

    def made() -> tuple[nn.Module, KFACSGD]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
        return model, KFACSGD(model, lr=0.1)

    model, optimizer = made()
    states = []
    for t in range(24):
        states.append(through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        train(model, optimizer, [t], shape=(4, 12))
    for start in range(0, 24, 3):
        resumed, again = made()
        resumed.load_state_dict(states[start]["model"])
        again.load_state_dict(states[start]["optimizer"])
        train(resumed, again, range(start, 24), shape=(4, 12))
        assert_identical(model, resumed)
