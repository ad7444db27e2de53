"""Learning-rate schedulers of torch, and curvature hyperparameters that change over time."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from kfac_optim import (
    KFACSGD,
    CurvatureEngine,
    KLClip,
    OfLargest,
    OfMean,
    constant_then_scaled,
    damping,
    exponential_decay,
    growing,
    scaling,
)
from tests.helpers.compare import assert_close, assert_identical, assert_trained, values
from tests.helpers.settings import BASES, CLASSES, FLOAT64, OFTEN
from tests.helpers.training import backward, make_model, train

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 12
TOL = 1e-12  # the same arithmetic on both sides, up to the order of multi-tensor kernels
SCALAR_TOL = 1e-10  # the closed form of a one-weight model, after a division
SETTINGS: dict[str, Any] = {**FLOAT64, **OFTEN, "scaling": KLClip(1e-2)}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: min(1.0, step / 4)),  # from 0
    "MultiplicativeLR": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, step_size=3, gamma=0.5),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, milestones=[2, 7], gamma=0.5),
    "ConstantLR": lambda optimizer: schedulers.ConstantLR(optimizer, factor=0.5, total_iters=5),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, 0.1, total_iters=8),
    "ExponentialLR": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.8),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, total_iters=STEPS, power=2.0),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, T_max=STEPS),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=4),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "ReduceLROnPlateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=4), schedulers.ExponentialLR(optimizer, 0.8)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.1, total_iters=4), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.02, anneal_epochs=6),
}


def advance(scheduler: Any) -> None:
    """A step of a scheduler; the metric that one of them takes never improves."""
    scheduler.step(*[1.0] * isinstance(scheduler, schedulers.ReduceLROnPlateau))


def test_all_of_torch_s_schedulers_are_here() -> None:
    assert set(SCHEDULERS) == set(schedulers.__all__) - {"LRScheduler"} | {"SWALR"}


# Learning rates ------------------------------------------------------------------------------------------------------


@pytest.mark.fast("KFACSGD")
@pytest.mark.parametrize("kfac", CLASSES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduled_training_is_the_base_optimizer_s_on_preconditioned_gradients(name: str, kfac: Any) -> None:
    """The other side: a preconditioner that is told each step's learning rate, before the scheduled base optimizer."""
    ours, theirs = make_model(), make_model()
    before = values(ours)
    optimizer = kfac(ours, **CLASSES[kfac], **SETTINGS, precondition="gradient", solver="eigen")
    scheduler = SCHEDULERS[name](optimizer)
    rates, momenta = [], []

    def after() -> None:
        group = optimizer.param_groups[0]
        rates.append(group["lr"])
        momenta.append(group.get("momentum", group.get("betas")))
        advance(scheduler)

    train(ours, optimizer, range(STEPS), after)

    reference, engine = BASES[kfac](theirs.parameters(), **CLASSES[kfac]), CurvatureEngine(theirs, **SETTINGS)
    scheduler = SCHEDULERS[name](reference)
    for step in range(STEPS):
        backward(theirs, step)
        group = reference.param_groups[0]
        assert group["lr"] == rates[step]
        assert group.get("momentum", group.get("betas")) == momenta[step]
        engine.precondition_(lr=reference.param_groups[0]["lr"])
        reference.step()
        advance(scheduler)
    assert len(set(rates)) > 1
    assert (len(set(momenta)) > 4) == (name in ("OneCycleLR", "CyclicLR")), "momentum is cycled by those two"
    assert_trained(ours, before)
    assert_close(ours, theirs, TOL)


# Curvature hyperparameters over time ---------------------------------------------------------------------------------

GAMMAS = {
    "constant": (0.25, [0.25] * 6),
    "constant_then_scaled": (constant_then_scaled(0.8, (2, 4), 0.5), [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]),
    "exponential_decay": (exponential_decay(0.8, 0.25, 2, final=0.1), [0.8, 0.4, 0.2, 0.1, 0.1, 0.1]),
    "callable": (lambda step: 1.0 / (step + 1), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]),
}


def one_weight(**options: Any) -> tuple[nn.Module, KFACSGD]:
    """``s = w x`` and nothing else: A and G are numbers."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    every_step = {
        "factor_update_steps": 1,
        "inv_update_steps": 1,
        "scaling": None,
        **FLOAT64,
    }
    return model, KFACSGD(model, lr=1.0, **{**every_step, **options})


def scalar_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: float) -> float:
    """One step on the loss ``w x`` of one example: A = x^2, G = 1, gradient x; returns minus the weight change."""
    optimizer.zero_grad()
    before = float(next(model.parameters()).detach())
    model(torch.full((1, 1), x)).sum().backward()
    optimizer.step()
    return before - float(next(model.parameters()).detach())


@pytest.mark.parametrize("name", GAMMAS)
def test_damping_over_time(name: str) -> None:
    """The change at step t is ``x / (A G + gamma(t))``."""
    schedule, expected = GAMMAS[name]
    model, optimizer = one_weight(damping=schedule)
    for gamma in expected:
        assert math.isclose(scalar_step(model, optimizer, 2.0), 2.0 / (4.0 + gamma), rel_tol=SCALAR_TOL)


def test_factor_decay_over_time() -> None:
    """Step 0: A = 4. Step 1 forgets everything: A = 1. Step 2 with xi = 1/2: A = (1/2 1 + 9) / (1/2 + 1)."""
    model, optimizer = one_weight(damping=0.5, factor_decay=lambda step: [0.9, 0.0, 0.5][step])
    for x, a in ((2.0, 4.0), (1.0, 1.0), (3.0, (0.5 + 9.0) / 1.5)):
        assert math.isclose(scalar_step(model, optimizer, x), x / (a + 0.5), rel_tol=SCALAR_TOL)


def test_kl_clip_over_time() -> None:
    """Undamped direction d = 1/x, ``nu = sqrt(kappa / (d x)) = sqrt(kappa)``."""
    kappas = [0.25, 0.01, 0.04]
    model, optimizer = one_weight(damping=1e-14, scaling=KLClip(lambda step: kappas[step]))
    for kappa in kappas:
        assert math.isclose(scalar_step(model, optimizer, 2.0), math.sqrt(kappa) / 2.0, rel_tol=SCALAR_TOL)


def refreshed_at(optimizer: KFACSGD, model: nn.Module, steps: int) -> list[int]:
    """The steps at which the decompositions were made anew."""
    found = []
    for step in range(steps):
        scalar_step(model, optimizer, 1.0)
        if optimizer.curvature.report()["staleness"] == 1:
            found.append(step)
    return found


class Limited(growing):
    """A limit of one's own."""

    def __call__(self, step: int) -> int:
        return min(4, super().__call__(step))


INTERVALS: dict[str, tuple[Any, list[int]]] = {
    "fixed": (4, [0, 4, 8, 12, 16, 20]),
    "paper's decay of the update frequency": (constant_then_scaled(2, (5, 12), 2), [0, 2, 4, 8, 16]),
    "growing": (growing(fraction=0.5, minimum=2), [0, 2, 4, 7, 13]),
    "growing to a maximum": (growing(fraction=0.5, minimum=2, maximum=4), [0, 2, 4, 7, 11, 15, 19]),
    "growing, as a subclass says": (Limited(fraction=0.5, minimum=2), [0, 2, 4, 7, 11, 15, 19]),
    "callable": (lambda step: 1 if step < 3 else 10, [0, 1, 2, 12, 22]),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_inv_update_steps_over_time(name: str) -> None:
    """Due when the steps since the last refresh reach the interval of the present step."""
    interval, expected = INTERVALS[name]
    model, optimizer = one_weight(inv_update_steps=interval, spread=0)
    assert refreshed_at(optimizer, model, 23) == expected


@pytest.mark.parametrize(
    ("interval", "statistics", "expected"),
    [
        (1, 3, [*range(0, 32, 3)]),
        (1, constant_then_scaled(1, (4,), 4), [0, 1, 2, *range(3, 32, 4)]),
        (1, None, [*range(32)]),
        (4, None, [*range(0, 32, 4)]),
        (30, None, [0, 10, 20, 30]),
        (growing(fraction=0.0, minimum=7), None, [*range(0, 31, 3)]),
        (growing(fraction=0.0, minimum=15), 5, [*range(0, 31, 5)]),
        (growing(fraction=0.0, minimum=3), None, [*range(32)]),
        (growing(fraction=0.0, minimum=12), None, [*range(0, 31, 6)]),
        (growing(fraction=0.0, minimum=13), None, [0, 6, 12, 24, 25, 26]),
    ],
)
def test_factor_update_steps_over_time(interval: Any, statistics: Any, expected: list[int]) -> None:
    """A statistics step is one after which A has changed; growing intervals have two, later ones their last three."""
    model, optimizer = one_weight(inv_update_steps=interval, factor_update_steps=statistics)
    found, last = [], -1.0
    for step in range(32):
        scalar_step(model, optimizer, float(step + 1))
        a = float(optimizer.curvature.factors("0")[0])
        found += [step] * (a != last)
        last = a
    assert found == expected


@pytest.mark.parametrize(
    ("fraction", "spread", "refreshes", "statistics"),
    [
        (0.0, 20, [0, 13, 34, 55, 76], [0, 6, 12, 32, 33, 34, 53, 54, 55, 74, 75, 76]),
        (0.5, 0, [0, 13, 26, 51], [0, 6, 12, 24, 25, 26, 47, 48, 49, 50, 51]),
    ],
)
def test_statistics_just_before_refreshes(
    fraction: float, spread: int, refreshes: list[int], statistics: list[int]
) -> None:
    """A refresh that takes longer than the interval puts the next one off, and with it the statistics."""
    model, optimizer = one_weight(
        inv_update_steps=growing(fraction, minimum=13), factor_update_steps=None, spread=spread
    )
    engine = optimizer.curvature
    found: list[list[int]] = [[], []]
    for step in range(80):
        scalar_step(model, optimizer, 1.0)
        found[0] += [step] * (engine.stages.refresher.last_refresh == step)
        found[1] += [step] * (engine.stages.progress.last_statistics == step)
    assert found == [refreshes, statistics]


def test_spread_over_time() -> None:
    """Frozen at the first step, used ``spread(first)`` steps later; until then the old decomposition serves."""
    model, optimizer = one_weight(
        damping=0.5, factor_decay=0.0, inv_update_steps=4, spread=lambda step: 2 if step < 8 else 0
    )
    in_use = [0, 0, 0, 0, 0, 0, 4, 4, 8, 8]  # whose A the step at this place uses; xi = 0: A is the last x^2
    for step, source in enumerate(in_use):
        x = float(step + 1)
        assert math.isclose(scalar_step(model, optimizer, x), x / ((source + 1.0) ** 2 + 0.5), rel_tol=SCALAR_TOL), step


# What each hyperparameter that may be a callable is given, beside the intervals that make it tell. After the
# interruption every one of them changes, and none is what it would be if its clock started anew.
OVER_TIME: dict[str, dict[str, Any]] = {
    "damping": {"damping": exponential_decay(0.5, 0.5, 4)},
    "factor_decay": {"factor_decay": lambda step: 0.9 / (1 + step / 4)},
    "factor_update_steps": {"factor_update_steps": lambda step: max(1, 1 + step // 5)},
    "factor_batch_fraction": {"factor_batch_fraction": lambda step: 1.0 if step % 5 < 2 else 0.3},
    "inv_update_steps": {"inv_update_steps": growing(fraction=0.3, minimum=2)},
    "spread": {"spread": lambda step: step % 3, "inv_update_steps": 4},
}
# Objects that hold a function of the step: by the option and the name of their class.
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "damping=OfMean": OfMean,
    "damping=OfLargest": OfLargest,
    "scaling=KLClip": KLClip,
}
INTERRUPTED = 7


def test_all_schedulable_hyperparameters_are_here() -> None:
    found = {name for name, p in inspect.signature(CurvatureEngine).parameters.items() if "Schedule[" in p.annotation}
    assert set(OVER_TIME) == found
    modules = {"damping": damping, "scaling": scaling}
    holders = {
        f"{option}={name}"
        for option, module in modules.items()
        for name, kind in vars(module).items()
        if not name.startswith("_") and is_dataclass(kind) and any("Schedule[" in str(f.type) for f in fields(kind))
    }
    assert set(HOLDERS) == holders


@pytest.mark.fast("KFACSGD")
@pytest.mark.parametrize("name", [*OVER_TIME, *HOLDERS])
@pytest.mark.parametrize("kfac", CLASSES)
def test_resumed_in_the_midst_of_a_schedule(kfac: Any, name: str) -> None:
    """Equal to the uninterrupted run, bit for bit; frozen at the interruption, or begun anew, it would not be."""
    hold, option = HOLDERS.get(name, lambda schedule: schedule), name.partition("=")[0]
    varied = OVER_TIME[name] if name in OVER_TIME else {option: exponential_decay(1e-3, 0.5, 4)}
    schedule = varied[option]
    options = {**CLASSES[kfac], **SETTINGS, "precondition": "gradient", **varied, option: hold(schedule)}
    whole, stopped = make_model(), make_model()
    train(whole, kfac(whole, **options), range(2 * INTERRUPTED))
    optimizer = kfac(stopped, **options)
    train(stopped, optimizer, range(INTERRUPTED))
    given: dict[str, Any] = {
        "same": schedule,
        "frozen": lambda step: schedule(INTERRUPTED),
        "anew": lambda step: schedule(step - INTERRUPTED),
    }
    for how, resumed_schedule in given.items():
        model = make_model(seed=1)
        model.load_state_dict(stopped.state_dict())
        resumed = kfac(model, **{**options, option: hold(resumed_schedule)})
        resumed.load_state_dict(optimizer.state_dict())
        train(model, resumed, range(INTERRUPTED, 2 * INTERRUPTED))
        if how == "same":
            assert_identical(model, whole)
        else:
            different = [not torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True)]
            assert any(different), how


def test_schedules_of_the_package_can_be_pickled() -> None:
    for schedule in (constant_then_scaled(0.03, (2, 4), 0.5), exponential_decay(0.1, 0.5, 10), growing(0.2, 1)):
        copied = pickle.loads(pickle.dumps(schedule))
        assert [copied(step) for step in range(60)] == [schedule(step) for step in range(60)]


# A schedule's values are checked when they come up: each of these would turn every weight into NaN, or the step around.

BAD_VALUES = [
    *[("damping", -1.0), ("damping", float("nan")), ("kappa", -1.0), ("factor_decay", float("nan"))],
    *[("factor_batch_fraction", 0.0), ("factor_update_steps", 0), ("inv_update_steps", 0), ("spread", -1)],
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_callable_s_bad_value_is_refused(name: str, value: Any) -> None:
    bad = lambda step: value  # noqa: E731
    options = {"scaling": KLClip(bad)} if name == "kappa" else {name: bad}
    with pytest.raises(ValueError, match=rf"{name}.* at step 0"):
        model, optimizer = one_weight(**options)
        for _ in range(3):
            scalar_step(model, optimizer, 1.0)


def test_a_function_of_the_step_that_returns_another_is_refused() -> None:
    for name in ("damping", "factor_decay"):
        with pytest.raises(TypeError, match=rf"{name}.* at step 0"):
            model, optimizer = one_weight(**{name: lambda step: exponential_decay(0.1, 0.5, 10)})
            scalar_step(model, optimizer, 1.0)


# Changes during training ---------------------------------------------------------------------------------------------


def test_changed_damping_takes_effect_at_the_next_step() -> None:
    model, optimizer = one_weight(damping=0.5)
    assert math.isclose(scalar_step(model, optimizer, 2.0), 2 / 4.5, rel_tol=SCALAR_TOL)
    optimizer.curvature.damping = 2.0
    assert math.isclose(scalar_step(model, optimizer, 2.0), 2 / 6, rel_tol=SCALAR_TOL)
    optimizer.curvature.damping = OfMean(2.0)  # gamma = 2 * mean eigenvalue = 2 * 4
    assert math.isclose(scalar_step(model, optimizer, 2.0), 2 / 12, rel_tol=SCALAR_TOL)
    optimizer.curvature.damping = OfMean(lambda step: float(step))
    assert math.isclose(scalar_step(model, optimizer, 2.0), 2 / (4 + 3 * 4), rel_tol=SCALAR_TOL)


def test_changed_scaling_decay_and_intervals_take_effect() -> None:
    model, optimizer = one_weight(damping=0.5)
    engine = optimizer.curvature
    scalar_step(model, optimizer, 2.0)
    engine.scaling = "unit"
    assert math.isclose(scalar_step(model, optimizer, 2.0), 1.0, rel_tol=SCALAR_TOL)
    engine.scaling = "graft"
    assert math.isclose(scalar_step(model, optimizer, 2.0), 2.0, rel_tol=SCALAR_TOL)
    engine.scaling = KLClip(1e-6)
    expected = 2 / 4.5 * math.sqrt(1e-6 / (2 * 2 / 4.5))
    assert math.isclose(scalar_step(model, optimizer, 2.0), expected, rel_tol=SCALAR_TOL)
    engine.scaling, engine.factor_decay = None, 0.0
    assert math.isclose(scalar_step(model, optimizer, 3.0), 3 / 9.5, rel_tol=SCALAR_TOL)
    engine.inv_update_steps = 2
    assert math.isclose(scalar_step(model, optimizer, 1.0), 1 / 9.5, rel_tol=SCALAR_TOL), "not due yet"
    assert math.isclose(scalar_step(model, optimizer, 1.0), 1 / 1.5, rel_tol=SCALAR_TOL)
    engine.inv_update_steps, engine.factor_update_steps = 1, 5
    assert math.isclose(scalar_step(model, optimizer, 7.0), 7 / 1.5, rel_tol=SCALAR_TOL), "no statistics any more"


def test_changed_spread_takes_effect() -> None:
    model, optimizer = one_weight(damping=0.5, factor_decay=0.0, inv_update_steps=3)
    scalar_step(model, optimizer, 1.0)
    optimizer.curvature.spread = 1
    in_use = [1.0, 1.0, 1.0, 4.0]  # due at step 3, used from step 4
    for x, source in zip((2.0, 3.0, 4.0, 5.0), in_use, strict=True):
        assert math.isclose(scalar_step(model, optimizer, x), x / (source**2 + 0.5), rel_tol=SCALAR_TOL)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("damping", 0.0, ValueError),
        ("damping", "0.1", TypeError),
        ("factor_decay", 1.0, ValueError),
        ("factor_update_steps", 0, ValueError),
        ("factor_batch_fraction", 2, ValueError),
        ("inv_update_steps", 2.5, TypeError),
        ("scaling", "muon", ValueError),
        ("spread", -1, ValueError),
        ("grad_scaler", 2.0, TypeError),
    ],
)
def test_a_change_is_checked_and_a_refused_one_changes_nothing(name: str, value: Any, error: type[Exception]) -> None:
    _, optimizer = one_weight()
    before = getattr(optimizer.curvature, name)
    with pytest.raises(error, match=name):
        setattr(optimizer.curvature, name, value)
    assert getattr(optimizer.curvature, name) is before


FIXED = ["solver", "fisher", "loss_average", "batch_dim", "weight_sharing", "skip_layers"]
FIXED += ["max_factor_dim", "assignment", "communicator", "factor_dtype", "inv_dtype"]


@pytest.mark.parametrize("name", FIXED)
def test_what_is_fixed_says_so(name: str) -> None:
    _, optimizer = one_weight()
    before = getattr(optimizer.curvature, name)
    with pytest.raises(AttributeError, match=rf"{name}.*fixed.*damping"):
        setattr(optimizer.curvature, name, before)
    assert getattr(optimizer.curvature, name) is before
