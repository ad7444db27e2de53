"""Bad arguments: the error names the argument, the value and what is allowed, at construction."""

from __future__ import annotations

import copy
import inspect
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kfac_optim
from kfac_optim import (
    KAISA,
    KFAC,
    KFACLAMB,
    KFACSGD,
    Categorical,
    CurvatureEngine,
    EigenSolver,
    Gaussian,
    Graft,
    InverseSolver,
    KFACAdam,
    KFACMixin,
    KLClip,
    KroneckerLayer,
    OfLargest,
    OfMean,
    constant_then_scaled,
    exponential_decay,
    forgetting,
    growing,
    inverse_time_decay,
    memory_estimate,
    register_layer,
)
from kfac_optim.damping import Spectra
from tests.helpers.settings import ALL_CLASSES, BASES, CLASSES
from tests.helpers.training import backward, make_model

NAN, INF = float("nan"), float("inf")


class ComputedDamping:
    """A damping whose class has both of the protocol's names; only its instances are dampings."""

    value = property(lambda self: 0.1)

    def unit(self, spectra: Spectra) -> Tensor:
        """1."""
        return torch.ones_like(spectra.means()[0])


# Keyword -> its bad values, the error of each, and what the message has to say is allowed.
NUMBER_OR_CALLABLE = r"number.*callable"
INT_OR_CALLABLE = r"int.*callable"
TABLE: list[tuple[str, Any, type[Exception], str]] = [
    ("damping", 0, ValueError, "> 0"),
    ("damping", -0.1, ValueError, "> 0"),
    ("damping", NAN, ValueError, "> 0"),
    ("damping", INF, ValueError, "> 0"),
    ("damping", "0.1", TypeError, NUMBER_OR_CALLABLE),
    ("damping", None, TypeError, NUMBER_OR_CALLABLE),
    ("damping", True, TypeError, NUMBER_OR_CALLABLE),
    ("damping", OfMean, TypeError, r"OfMean\(...\)"),
    ("damping", ComputedDamping, TypeError, r"OfMean\(...\)"),
    ("damping", SimpleNamespace(value=0.1), TypeError, r"an object that has value and unit\(\)"),
    ("factor_decay", 1.0, ValueError, r"\[0, 1\)"),
    ("factor_decay", -0.1, ValueError, r"\[0, 1\)"),
    ("factor_decay", NAN, ValueError, r"\[0, 1\)"),
    ("factor_decay", "high", TypeError, NUMBER_OR_CALLABLE),
    ("factor_update_steps", 0, ValueError, ">= 1"),
    ("factor_update_steps", -3, ValueError, ">= 1"),
    ("factor_update_steps", 1.5, TypeError, "int"),
    ("factor_update_steps", True, TypeError, "int"),
    ("factor_update_steps", "often", TypeError, "int.*callable"),
    ("factor_batch_fraction", 0, ValueError, r"\(0, 1\]"),
    ("factor_batch_fraction", 1.5, ValueError, r"\(0, 1\]"),
    ("factor_batch_fraction", "half", TypeError, NUMBER_OR_CALLABLE),
    ("inv_update_steps", 0, ValueError, ">= 1"),
    ("inv_update_steps", 10.0, TypeError, INT_OR_CALLABLE),
    ("inv_update_steps", None, TypeError, INT_OR_CALLABLE),
    ("inv_update_steps", growing, TypeError, INT_OR_CALLABLE),  # the class
    ("scaling", "muon", ValueError, "'kl_clip'.*'unit'.*'graft'.*None"),
    ("scaling", 0.5, TypeError, "multipliers"),
    ("solver", "cholesky", ValueError, "'eigen'.*'inverse'"),
    ("solver", None, ValueError, "'eigen'.*'inverse'"),
    ("solver", 3, TypeError, "precondition"),
    ("solver", EigenSolver, TypeError, r"did you mean EigenSolver\(\)\?"),
    ("solver", SimpleNamespace(precondition=max), TypeError, "shifts.*shapes.*decompose.*precondition"),
    ("solver", SimpleNamespace(damps_factors=False, shapes=max, decompose=max), TypeError, "shapes.*precondition"),
    ("fisher", "true", ValueError, "'empirical'.*'categorical'.*'bernoulli'.*'gaussian'"),
    ("fisher", None, ValueError, "'empirical'.*'categorical'.*'bernoulli'.*'gaussian'"),
    ("fisher", 1, TypeError, "kfac_optim.Fisher"),
    ("fisher", SimpleNamespace(sample_gradient=max), TypeError, "kfac_optim.Fisher"),
    ("loss_average", "mean", ValueError, r"'batch'.*'batch\+sequence'.*'elements'.*None"),
    ("loss_average", True, ValueError, r"'batch'.*'batch\+sequence'.*'elements'.*None"),
    ("loss_average", 0, ValueError, ">= 1"),
    ("loss_average", 2.0, ValueError, "int.*callable"),
    ("batch_dim", 2, ValueError, "0, 1"),
    ("batch_dim", -1, ValueError, "0, 1"),
    ("batch_dim", True, ValueError, "0, 1"),
    ("batch_dim", torch.tensor([0, 1]), ValueError, "0, 1"),
    ("weight_sharing", "kfac", ValueError, "'expand'.*'reduce'.*callable"),
    ("weight_sharing", None, ValueError, "'expand'.*'reduce'.*callable"),
    ("skip_layers", "head", TypeError, r"sequence of regular expressions, such as \['head'\]"),
    ("skip_layers", [1], TypeError, "sequence of regular expressions"),
    ("skip_layers", 5, TypeError, "sequence of regular expressions"),
    ("skip_layers", None, TypeError, "sequence of regular expressions"),
    ("skip_layers", ["("], ValueError, "regular expression"),
    ("max_factor_dim", 0, ValueError, ">= 1"),
    ("max_factor_dim", 1e4, TypeError, "int.*None"),
    ("max_factor_dim", "8192", TypeError, "int.*'auto' or None, not str"),
    ("spread", -1, ValueError, r"an int >= 0 or a callable\(step\) or None"),
    ("spread", 1.5, TypeError, r"an int >= 0 or a callable\(step\) or None"),
    ("spread", True, TypeError, r"an int >= 0 or a callable\(step\) or None"),
    ("assignment", "random", ValueError, "'layer-wise'.*'factor-wise'.*'kaisa'"),
    ("assignment", 0.5, TypeError, "assign"),
    ("communicator", "horovod", TypeError, r"Communicator.*TorchCommunicator\(group\).* or None"),
    ("grad_scaler", 65536.0, TypeError, "GradScaler"),
    ("grad_scaler", torch.amp.GradScaler, TypeError, "GradScaler"),
    ("factor_dtype", "float32", (TypeError, ValueError), "torch.float32"),
    ("factor_dtype", torch.int64, ValueError, "torch.float32"),
    ("factor_dtype", None, ValueError, "torch.float32"),
    ("inv_dtype", torch.complex64, ValueError, "torch.float32"),
]


def ids(value: object) -> str:
    return str(value) if not isinstance(value, tuple) else ""


def refusal(error: Any, made: Any) -> str:
    """The message of the error on one line, without the name of a class or a path in it."""
    with pytest.raises(error) as caught:
        made()
    return " ".join(str(caught.value).split())


@pytest.mark.parametrize(("name", "value", "error", "allowed"), TABLE, ids=ids)
def test_every_bad_value_is_refused(name: str, value: Any, error: Any, allowed: str) -> None:
    for kind in (KFACSGD, CurvatureEngine):
        message = refusal(error, lambda kind=kind: kind(make_model(), **{name: value}))
        assert name in message
        assert repr(value) in message or str(value) in message
        assert re.search(allowed, message), message


def test_the_table_is_complete() -> None:
    """A keyword added to the engine needs rows above."""
    keywords = {n for n, p in inspect.signature(CurvatureEngine).parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert {name for name, *_ in TABLE} == keywords


@pytest.mark.parametrize("kfac", CLASSES)
@pytest.mark.parametrize(("name", "value"), [("damping", -1.0), ("solver", "newton"), ("spread", 0.5)])
def test_every_class_refuses(kfac: Any, name: str, value: Any) -> None:
    message = refusal((TypeError, ValueError), lambda: kfac(make_model(), **{name: value}))
    assert name in message and repr(value) in message


# Unknown keywords ----------------------------------------------------------------------------------------------------

TYPOS = [("dampling", "damping"), ("momentun", "momentum"), ("inv_update_step", "inv_update_steps")]


@pytest.mark.parametrize(("typo", "meant"), TYPOS)
def test_a_typo_is_answered_with_what_was_meant(typo: str, meant: str) -> None:
    message = refusal(TypeError, lambda: KFACSGD(make_model(), lr=0.1, **{typo: 1}))
    assert f"'{typo}'" in message and f"'{meant}'" in message and "KFACSGD" in message


@pytest.mark.parametrize(("kfac", "foreign"), [(KFACSGD, "betas"), (KFACAdam, "momentum"), (KFACLAMB, "amsgrad")])
def test_an_unknown_keyword_and_one_of_another_base_class_are_refused(kfac: Any, foreign: str) -> None:
    """By us, under our name, not by the base class under its."""
    for keyword in ("xyzzy", foreign):
        message = refusal(TypeError, lambda keyword=keyword: kfac(make_model(), **{keyword: 0.9}))
        assert f"'{keyword}'" in message and kfac.__name__ in message


def test_curvature_arguments_are_keyword_only() -> None:
    """SGD takes lr, momentum, dampening, weight_decay, nesterov by position and nothing after them."""
    refusal(TypeError, lambda: KFACSGD(make_model(), 0.1, 0.9, 0, 0, False, None))
    refusal(TypeError, lambda: KFACLAMB(make_model(), 0.1, (0.9, 0.99), 1e-6, 0, 10, False, False, None))


def test_an_unknown_keyword_of_the_engine_is_refused() -> None:
    assert "dampling" in refusal(TypeError, lambda: CurvatureEngine(make_model(), dampling=0.1))
    assert "dampling" in refusal(TypeError, lambda: kfac_optim.memory_estimate(make_model(), dampling=0.1))


@pytest.mark.parametrize(
    ("typo", "meant"), [("dampning", "damping"), ("scalling", "scaling"), ("inv_update_step", "inv_update_steps")]
)
def test_a_misspelt_attribute_is_answered_with_what_was_meant(typo: str, meant: str) -> None:
    """Set on the engine it would otherwise do nothing, in silence; also on a copy."""
    optimizer = KFACSGD(make_model(), lr=0.1)
    for engine in (optimizer.curvature, CurvatureEngine(make_model()), copy.deepcopy(optimizer).curvature):
        message = refusal(AttributeError, lambda engine=engine: setattr(engine, typo, getattr(engine, meant)))
        assert f"'{typo}'" in message and f"'{meant}'" in message and "CurvatureEngine" in message
        assert not hasattr(engine, typo)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("factor_batch_fraction", lambda step: 2.0, ValueError),
        ("factor_batch_fraction", lambda step: "a half", TypeError),
        ("factor_update_steps", lambda step: 2.5, TypeError),
        ("factor_update_steps", lambda step: step[0], TypeError),
    ],
)
def test_a_function_that_fails_when_it_is_set_does_not_stay(name: str, value: Any, error: Any) -> None:
    engine = KFACSGD(nn.Linear(3, 2), lr=0.1).curvature
    before = getattr(engine, name)
    with pytest.raises(error):
        setattr(engine, name, value)
    assert getattr(engine, name) is before


def test_an_attribute_like_no_other_is_refused_without_a_guess() -> None:
    message = refusal(AttributeError, lambda: setattr(CurvatureEngine(make_model()), "xyzzy", 1))
    assert "'xyzzy'" in message and "mean" not in message


def test_every_other_attribute_can_be_set() -> None:
    """Those that are there, private ones, and what a subclass declares."""

    class Engine(CurvatureEngine):
        note: str = ""

    engine = Engine(make_model(), damping=0.1)
    engine.note, engine.damping, engine.grad_scaler, engine._mark = "seen", 0.2, None, 1
    assert (engine.note, engine.damping, engine._mark) == ("seen", 0.2, 1)


# Modes that can't be honoured ----------------------------------------------------------------------------------------

REFUSED = [(KFACAdam, "capturable"), (KFACAdam, "differentiable"), (KFACSGD, "differentiable")]


@pytest.mark.parametrize(("kfac", "flag"), REFUSED)
def test_capturable_and_differentiable_are_refused(kfac: Any, flag: str) -> None:
    assert flag in refusal(ValueError, lambda: kfac(make_model(), **{flag: True}))
    model = make_model()
    groups = [{"params": model.parameters(), flag: True}]
    assert flag in refusal(ValueError, lambda: kfac(groups, model=model))
    optimizer = kfac(model[0].parameters(), model=model)
    assert flag in refusal(ValueError, lambda: optimizer.add_param_group({"params": model[3].parameters(), flag: True}))


@pytest.mark.parametrize("option", ["damping", "scaling", "skip_layers"])
def test_an_option_of_the_whole_optimizer_is_refused_in_a_group(option: str) -> None:
    """A key that the base class does not know is kept in the group as it is, and would be ignored."""
    model = make_model()
    message = refusal(TypeError, lambda: KFACSGD([{"params": model.parameters(), option: 0.1}], lr=0.1))
    assert option in message and "not of a group" in message
    optimizer = KFACSGD(model[0].parameters(), model=model, lr=0.1)
    refusal(TypeError, lambda: optimizer.add_param_group({"params": model[3].parameters(), option: 0.1}))
    optimizer.add_param_group({"params": model[3].parameters(), "layer": 3})


@pytest.mark.parametrize("value", ["update", None, 1])
def test_precondition_lists_its_alternatives(value: Any) -> None:
    message = refusal((TypeError, ValueError), lambda: KFACSGD(make_model(), precondition=value))
    assert f"precondition={value!r}" in message and "'gradient'" in message and "'momentum'" in message
    optimizer = KFACSGD(make_model(), precondition="gradient")
    assert refusal(ValueError, lambda: setattr(optimizer, "precondition", value)) == message
    assert optimizer.precondition == "gradient"


# Parameters and model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["resnet", 3, [nn.Linear(2, 2)]])
def test_model_must_be_a_module(model: Any) -> None:
    message = refusal(TypeError, lambda: KFACSGD(make_model().parameters(), lr=0.1, model=model))
    assert "model" in message and "Module" in message


def test_params_of_a_wrong_kind_are_refused_as_by_torch() -> None:
    refusal(TypeError, lambda: KFACSGD(3, lr=0.1))
    refusal(TypeError, lambda: KFACSGD([3], lr=0.1))
    refusal(TypeError, lambda: KFACSGD(torch.zeros(3), lr=0.1))
    assert "empty" in refusal(ValueError, lambda: KFACSGD([], lr=0.1))


def test_an_optimizer_can_be_made_of_the_entries_of_anothers_group() -> None:
    """Loops that start anew do that (pykeen); with torch's classes it works as well."""
    model = make_model()
    group = KFACSGD(model, lr=0.1, momentum=0.9, damping=0.5).state_dict()["param_groups"][0]
    settings = {name: value for name, value in group.items() if name != "params"}
    optimizer = KFACSGD(model.parameters(), **settings)
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["kfac_step"] == 0
    assert "kfac_damping" in refusal(TypeError, lambda: KFACSGD(model, lr=0.1, kfac_damping=0.5))


def test_what_weight_sharing_returns_is_checked() -> None:
    message = refusal(ValueError, lambda: KFACSGD(nn.Linear(3, 2), lr=0.1, weight_sharing=lambda name, module: "kfac"))
    assert "weight_sharing returned 'kfac'" in message and "'expand' or 'reduce'" in message


def test_uninitialised_layers_ask_for_a_first_run() -> None:
    assert "run the model once" in refusal(ValueError, lambda: KFACSGD(nn.Sequential(nn.LazyLinear(3)), lr=0.1))


def test_uninitialised_layers_of_ones_own_ask_for_a_first_run() -> None:
    """Such are those of torch_geometric: what they compute shows once they have shapes."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.parameter.UninitializedParameter()
            self.first = self.register_forward_pre_hook(type(self).initialise)

        def initialise(self, args: tuple[torch.Tensor]) -> None:
            self.weight.materialize((3, args[0].shape[-1]))
            nn.init.normal_(self.weight)
            self.first.remove()
            del self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight)

    model = nn.Sequential(Own(), nn.Linear(3, 2))
    assert "run the model once" in refusal(ValueError, lambda: KFACSGD(model, lr=0.1))
    assert len(KFACSGD(model, lr=0.1, skip_layers=["0"]).curvature.layers) == 1
    model(torch.zeros(4, 5))
    assert len(KFACSGD(model, lr=0.1).curvature.layers) == 2


@pytest.mark.parametrize(
    ("kfac", "keyword", "value"),
    [
        (KFACSGD, "lr", -1.0),
        (KFACSGD, "momentum", -1.0),
        (KFACSGD, "nesterov", True),  # without momentum
        (KFACAdam, "betas", (1.0, 0.9)),
        (KFACAdam, "eps", -1.0),
        (KFACLAMB, "clamp_value", -1.0),
    ],
)
def test_the_base_class_checks_its_own(kfac: Any, keyword: str, value: Any) -> None:
    base = refusal(ValueError, lambda: BASES[kfac](make_model().parameters(), **{keyword: value}))
    assert refusal(ValueError, lambda: kfac(make_model(), **{keyword: value})) == base


# Signatures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kfac", CLASSES)
def test_the_signature_shows_base_and_curvature_keywords(kfac: Any) -> None:
    found = inspect.signature(kfac).parameters
    base = [p for p in inspect.signature(BASES[kfac]).parameters.values() if p.kind is not p.VAR_KEYWORD]
    engine = {n: p for n, p in inspect.signature(CurvatureEngine).parameters.items() if p.kind is p.KEYWORD_ONLY}
    positional = [p.name for p in base if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(found)[: len(positional)] == positional, "the base class's positional arguments, in its order"
    for name, parameter in {**{p.name: p for p in base}, **engine}.items():
        assert found[name].default == DEFAULTS.get(name, parameter.default), name
    for name in [*engine, "model", "precondition"]:
        assert found[name].kind is inspect.Parameter.KEYWORD_ONLY, name
    assert found["precondition"].default == "momentum"
    assert all(p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in found.values())


NO_NUMBER = ": must be a number, .*, not"
OBJECTS: list[tuple[Any, Any, type[Exception], str]] = [
    (OfMean, 0.0, ValueError, r"OfMean\(value=0.0\): must be > 0"),
    (OfMean, INF, ValueError, r"OfMean\(value=inf\): must be > 0"),
    (OfLargest, "0.1", TypeError, r"OfLargest\(value='0.1'\): must be a number, > 0 and finite, or a callable"),
    (OfLargest, True, TypeError, r"OfLargest\(value=True\): must be a number, > 0 and finite, or a callable"),
    (KLClip, 0, ValueError, r"KLClip\(kappa=0\): must be > 0"),
    (KLClip, NAN, ValueError, r"KLClip\(kappa=nan\): must be > 0"),
    (KLClip, None, TypeError, r"KLClip\(kappa=None\): must be a number, > 0 and finite"),
    (growing, INF, ValueError, r"growing\(fraction=inf\): must be >= 0 and finite"),
    (InverseSolver, 3, TypeError, r"InverseSolver\(pi=3\): must be True or False"),
    (Categorical, "a", TypeError, r"Categorical\(dim='a'\): must be an int"),
    (lambda x: inverse_time_decay(x, 3), NAN, ValueError, r"inverse_time_decay\(initial=nan\): must be finite"),
    (lambda x: exponential_decay(0.1, x, 3), "b", TypeError, r"exponential_decay\(rate='b'\): must be a number"),
    (lambda x: constant_then_scaled(1, x, 2), "c", TypeError, r"constant_then_scaled\(milestones='c'\): must be"),
    (lambda x: constant_then_scaled(1, (2,), x), None, TypeError, r"constant_then_scaled\(factor=None\): must be"),
    (lambda x: constant_then_scaled(1, x, 2), 100, TypeError, r"constant_then_scaled\(milestones=100\): must be"),
    (register_layer, None, TypeError, r"register_layer\(None\): must be given the module classes"),
    (register_layer, KroneckerLayer, TypeError, r"register_layer\(.*KroneckerLayer'>\): must be given the module"),
    (lambda x: memory_estimate(nn.Linear(2, 2), world_size=x), 0, ValueError, r"world_size=0: must be an int >= 1"),
    (lambda x: growing(fraction=x), -0.1, ValueError, "fraction=.*must be"),
    (lambda x: growing(minimum=x), 0, ValueError, "minimum=.*must be"),
    (lambda x: growing(minimum=x), 2.5, ValueError, "minimum=.*must be"),
    (lambda x: growing(most_work=x), 0.0, ValueError, "most_work=.*must be"),
    (lambda x: growing(maximum=x), 4, ValueError, r"maximum=4\): must be an int >= minimum=5, or None"),
    (lambda x: growing(maximum=x), 10.5, ValueError, "maximum=.*must be an int"),
    *((Graft, x, ValueError, rf"Graft\(trust={x}.*must be in \[0, 1\], or None") for x in (-0.1, 1.5, NAN)),
    (lambda x: Graft(stretch=x), 0.5, TypeError, r"Graft\(stretch=0.5\): must be True, False or None"),
    *((Gaussian, x, ValueError, rf"Gaussian\(variance={x}.*must be > 0") for x in (0.0, -1.0, INF, NAN)),
    (lambda x: growing(fraction=x), "0.1", TypeError, rf"growing\(fraction='0.1'\){NO_NUMBER}"),
    (lambda x: growing(minimum=x), True, TypeError, rf"growing\(minimum=True\){NO_NUMBER}"),
    (lambda x: exponential_decay(0.1, 0.5, x), None, TypeError, rf"exponential_decay\(steps=None\){NO_NUMBER}"),
    (Graft, "1", TypeError, rf"Graft\(trust='1'\){NO_NUMBER}"),
    (lambda x: EigenSolver(negligible=x), None, TypeError, rf"EigenSolver\(negligible=None\){NO_NUMBER}"),
    (Gaussian, "1", TypeError, rf"Gaussian\(variance='1'\){NO_NUMBER}"),
    (KAISA, "half", TypeError, rf"KAISA\(grad_worker_fraction='half'\){NO_NUMBER}"),
    (OfMean, True, TypeError, rf"OfMean\(value=True\){NO_NUMBER}"),
    *((lambda x: inverse_time_decay(0.1, x), x, ValueError, rf"decay\(steps={x}\): must be > 0") for x in (0, -1)),
    *((lambda x: exponential_decay(0.1, 0.5, x), x, ValueError, rf"decay\(steps={x}\): must be > 0") for x in (0, -1)),
    (forgetting, 1.0, ValueError, r"forgetting\(decay=1.0\): must be in \[0, 1\)"),
    (forgetting, "x", TypeError, r"forgetting\(decay='x'\)"),
    (forgetting, forgetting(0.5), TypeError, "must be a number or a function of the step"),
    (lambda x: forgetting(0.9, slack=x), 0.5, ValueError, r"forgetting\(slack=0.5\): must be >= 1"),
    (lambda x: forgetting(0.9, slack=x), "x", TypeError, r"forgetting\(slack='x'\)"),
    *(
        (lambda x: EigenSolver(negligible=x), x, ValueError, r"EigenSolver\(negligible=.*\): must be in \[0, 1\)")
        for x in (-0.1, 1.0, NAN)
    ),
    (lambda x: KFAC(make_model(), fisher="gaussian", model_fraction=x), "1", TypeError, f"fraction='1'{NO_NUMBER}"),
]


@pytest.mark.parametrize(("kind", "value", "error", "message"), OBJECTS, ids=[case[-1] for case in OBJECTS])
def test_objects_given_for_options_check_their_values(
    kind: Any, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(value)


def test_there_are_19_options() -> None:
    found = inspect.signature(CurvatureEngine).parameters
    assert len([p for p in found.values() if p.kind is p.KEYWORD_ONLY]) == 19


def test_defaults_of_the_design() -> None:
    """Those that DESIGN section 2 fixes."""
    expected: dict[str, Any] = {
        "model": None,
        "fisher": "empirical", "loss_average": "batch", "batch_dim": 0, "weight_sharing": "expand",
        "skip_layers": (), "max_factor_dim": "auto", "assignment": "factor-wise",
        "communicator": None, "grad_scaler": None,
        "factor_dtype": torch.float32, "inv_dtype": torch.float32,
    }  # fmt: skip
    found = inspect.signature(KFACSGD).parameters
    assert {name: found[name].default for name in expected} == expected
    assert inspect.signature(CurvatureEngine).parameters["factor_decay"].default == 0.95


# Defaults ------------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "damping": OfLargest(inverse_time_decay(0.03, steps=10, final=1e-4)),
    "scaling": "graft",
    "factor_decay": forgetting(inverse_time_decay(0.95, steps=250, final=0.8), slack=3.0),
    "inv_update_steps": growing(0.5, 10, most_work=1.0, maximum=100),
    "solver": EigenSolver(negligible=0.3),
    "factor_update_steps": None,
    "spread": None,
}


@pytest.mark.parametrize("cls", [*ALL_CLASSES, type("KFACRMSprop", (KFACMixin, torch.optim.RMSprop), {})])
def test_defaults_are_those_of_the_signature(cls: Any) -> None:
    """One rule for all classes, other bases among them; what a signature shows is what an optimizer then does."""
    shown = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
    assert {name: shown[name] for name in DEFAULTS} == DEFAULTS
    assert shown["precondition"] == "momentum"
    implicit = cls(make_model(), lr=0.1)
    written = {name: shown[name] for name in DEFAULTS}
    explicit = cls(make_model(), lr=0.1, precondition=shown["precondition"], **written)
    assert implicit.precondition == explicit.precondition == "momentum"
    for name in DEFAULTS:
        assert getattr(implicit.curvature, name) == getattr(explicit.curvature, name), name


def test_an_engine_of_its_own_has_the_papers_defaults() -> None:
    engine = CurvatureEngine(make_model())
    assert (engine.damping, engine.scaling, engine.inv_update_steps) == (0.03, KLClip(1e-3), 100)


def test_a_list_of_modules_is_told_apart_from_parameters() -> None:
    with pytest.raises(TypeError, match=r"params has modules in it: pass nn.ModuleList"):
        KFACSGD([nn.Linear(2, 2), nn.Linear(2, 2)], lr=0.1)


@pytest.mark.parametrize("lr", [[0.1], "0.1"])
def test_a_rate_that_is_no_number_is_refused(lr: Any) -> None:
    """A scheduler's ``get_last_lr()`` is a list."""
    model = make_model()
    engine = CurvatureEngine(model)
    backward(model, 0)
    message = refusal(TypeError, lambda: engine.precondition_(lr))
    assert message == f"precondition_(lr={lr!r}): must be a number, or a tensor of one"
    for rate in (torch.tensor(0.1), np.float32(0.1)):
        assert engine.precondition_(rate)  # type: ignore[arg-type]
