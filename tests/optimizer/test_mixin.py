"""``KFACMixin`` over any optimizer preconditions in front of it: the base step on preconditioned gradients."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch_optimizer
from torch import Tensor

from kfac_optim import KFACLAMB, KFACSGD, CurvatureEngine, KFACAdam, KFACMixin, KLClip
from tests.helpers.bases import KFACRMSprop
from tests.helpers.compare import assert_close, assert_trained, values
from tests.helpers.settings import FLOAT64, OFTEN
from tests.helpers.training import backward, make_model, train

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 8
TOL = 1e-12  # both sides do the same operations, but multi-tensor kernels may group them differently


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rates (You et al. 2017), as its paper has it."""

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0, eta: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:  # a non-empty state is an initialised one, as in many optimizers
                    state["buffer"] = torch.zeros_like(p)
                decay = group["weight_decay"]
                weight, gradient = p.norm(), p.grad.norm()
                trust = group["eta"] * weight / (gradient + decay * weight + 1e-9) if weight > 0 else 1.0
                state["buffer"].mul_(group["momentum"]).add_((p.grad + decay * p) * (trust * group["lr"]))
                p -= state["buffer"]
        return loss


class LION(torch.optim.Optimizer):
    """EvoLved Sign Momentum (Chen et al. 2023)."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(first * moment + (1 - first) * p.grad), alpha=-group["lr"])
                moment.lerp_(p.grad, 1 - second)
        return loss


class KFACLARS(KFACMixin, LARS):
    pass


class KFACLION(KFACMixin, LION):
    pass


PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    (KFACRMSprop, torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    (KFACLARS, LARS, {"lr": 0.1, "weight_decay": 1e-2}),
    (KFACLION, LION, {"lr": 1e-2, "weight_decay": 0.1}),
    (KFACSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    (KFACAdam, torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (KFACLAMB, torch_optimizer.Lamb, {"lr": 1e-2, "weight_decay": 1e-2}),
]


@pytest.mark.parametrize("scaling", ["kl_clip", "unit", "orthogonal", "graft", None])
@pytest.mark.parametrize(("kfac", "base", "keywords"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_step_is_the_base_step_on_preconditioned_gradients(
    kfac: Any, base: Any, keywords: dict[str, Any], scaling: str | None
) -> None:
    curvature = {**FLOAT64, **OFTEN, "solver": "eigen", "scaling": KLClip(1e-2) if scaling == "kl_clip" else scaling}
    ours, theirs, plain = make_model(), make_model(), make_model()
    before = values(ours)
    train(ours, kfac(ours, **keywords, **curvature, precondition="gradient"), range(STEPS))

    engine, reference = CurvatureEngine(theirs, **curvature), base(theirs.parameters(), **keywords)
    for step in range(STEPS):
        backward(theirs, step)
        engine.precondition_(lr=reference.param_groups[0]["lr"] if scaling == "kl_clip" else None)
        reference.step()
    assert_trained(ours, before)
    assert_close(ours, theirs, TOL)

    train(plain, base(plain.parameters(), **keywords), range(STEPS))
    changes = [float((p - q).norm()) for p, q in zip(values(ours), values(plain), strict=True)]
    assert min(changes[:2]) > 1e-4, "preconditioning made no difference"


@pytest.mark.parametrize(("kfac", "base", "keywords"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_is_an_instance_of_its_base_class(kfac: Any, base: Any, keywords: dict[str, Any]) -> None:
    optimizer = kfac(make_model(), **keywords)
    assert isinstance(optimizer, base)
    assert isinstance(optimizer, KFACMixin)
    assert optimizer.defaults.items() >= keywords.items()


@pytest.mark.parametrize(("kfac", "base", "keywords"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_grad_after_the_step_is_the_raw_gradient(kfac: Any, base: Any, keywords: dict[str, Any]) -> None:
    model = make_model()
    optimizer = kfac(model, **keywords, **FLOAT64, **OFTEN, scaling="unit", precondition="gradient")
    train(model, optimizer, range(2))
    backward(model, 2)
    tensors = [p.grad for p in model.parameters()]
    raw = [tensor.clone() for tensor in tensors if tensor is not None]
    optimizer.step()
    for p, tensor, gradient in zip(model.parameters(), tensors, raw, strict=True):
        assert p.grad is tensor
        assert torch.equal(p.grad, gradient)


def test_grad_is_restored_when_the_base_step_raises() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError

    class KFACFailing(KFACMixin, Failing):
        pass

    model = make_model()
    optimizer = KFACFailing(model, lr=0.1, precondition="gradient")
    backward(model, 0)
    raw = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(ArithmeticError):
        optimizer.step()
    for p, gradient in zip(model.parameters(), raw, strict=True):
        assert torch.equal(p.grad if p.grad is not None else torch.empty(0), gradient)


@pytest.mark.parametrize("mixin", [KFACMixin, KFACSGD])
def test_an_optimizer_in_front_of_the_mixin_is_refused(mixin: type) -> None:
    """Its own ``__init__`` and ``step`` would be called, so that it would be that optimizer alone, without a word."""
    with pytest.raises(TypeError, match=r"RMSprop comes before .*: write class Mine\(KFACMixin, RMSprop\)"):
        type("Mine", (torch.optim.RMSprop, mixin), {})


@pytest.mark.parametrize("name", ["model", "damping"])
def test_a_base_class_with_an_argument_of_the_same_name_is_refused(name: str) -> None:
    """AdamMini of pytorch_optimizer takes the model, BSAM a damping."""
    names: dict[str, Any] = {"torch": torch}
    exec(f"class Own(torch.optim.SGD):\n    def __init__(self, params, {name}=None): super().__init__(params)", names)
    with pytest.raises(TypeError, match=rf"Own.__init__ has an argument '{name}', .* put a CurvatureEngine in front"):
        type("KFACOwn", (KFACMixin, names["Own"]), {})


class Passing(torch.optim.SGD):
    """Leaves its arguments to its base class."""

    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, **keywords)


class KFACPassing(KFACMixin, Passing):
    pass


class KFACOwnConstructor(KFACMixin, torch.optim.SGD):
    """Sets arguments of its base class and of K-FAC by itself."""

    def __init__(self, params: Any, lr: float = 0.1, **keywords: Any) -> None:
        super().__init__(params, **{"lr": lr, "momentum": 0.9, "damping": 0.1, **keywords})


@pytest.mark.parametrize("cls", [KFACPassing, KFACOwnConstructor])
def test_arguments_pass_through_constructors_and_typos_do_not(cls: Any) -> None:
    optimizer = cls(torch.nn.Linear(3, 2), lr=0.1, momentum=0.9, damping=0.1)
    assert (optimizer.defaults["momentum"], optimizer.curvature.damping) == (0.9, 0.1)
    for typo, meant in (("momentun", "momentum"), ("dampng", "damping")):
        with pytest.raises(TypeError, match=rf"{cls.__name__} got an unexpected .* '{typo}'; did you mean '{meant}'"):
            cls(torch.nn.Linear(3, 2), lr=0.1, **{typo: 0.1})


@pytest.mark.parametrize(
    ("name", "meant"), [("trust", "scaling=Graft(trust=...)"), ("negligible", "solver=EigenSolver(negligible=...)")]
)
def test_an_argument_of_a_part_is_told_to_belong_there(name: str, meant: str) -> None:
    for cls in (KFACPassing, CurvatureEngine):
        with pytest.raises(TypeError, match=rf"'{name}'; did you mean {re.escape(meant)}\?"):
            cls(torch.nn.Linear(3, 2), **{name: 0.1})


class Swallowing(torch.optim.SGD):
    """Takes any keyword, and makes a default of the groups of it, as pytorch_optimizer's GaLore does."""

    def __init__(self, params: Any, lr: float = 0.1, **kwargs: Any) -> None:
        super().__init__(params, lr=lr)
        self.defaults.update(kwargs)
        self.param_groups[0].update(kwargs)


class KFACSwallowing(KFACMixin, Swallowing):
    pass


class KFACNaming(KFACMixin, Swallowing):
    def __init__(self, params: Any, rank: int = 4, **keywords: Any) -> None:
        super().__init__(params, rank=rank, **keywords)


def test_a_keyword_that_only_kwargs_take_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'rank'; .* name it in a subclass's __init__"):
        KFACSwallowing(torch.nn.Linear(3, 2), rank=2)
    assert KFACNaming(torch.nn.Linear(3, 2), rank=2).param_groups[0]["rank"] == 2


def test_an_optimizer_that_hands_over_may_be_in_front_of_the_mixin() -> None:
    class Counting(torch.optim.Optimizer):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            return super().step(closure)

    class Mine(Counting, KFACSGD):  # type: ignore[misc]
        pass

    model = make_model()
    optimizer = Mine(model, lr=0.1)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert (optimizer.steps, optimizer.curvature.step_count) == (1, 1)


def test_an_owned_engine_refuses_to_be_called_by_hand() -> None:
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1)
    backward(model, 0)
    raw = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        optimizer.curvature.precondition_(lr=0.1)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), raw, strict=True) if p.grad is not None)


def test_kl_clip_asks_for_the_learning_rate_and_loses_nothing_by_it() -> None:
    def directions(ask_without_lr: bool) -> list[Tensor]:
        model = make_model()
        engine = CurvatureEngine(model, **FLOAT64, damping=0.1, scaling=KLClip(1e-2))
        backward(model, 0)
        if ask_without_lr:
            with pytest.raises(ValueError, match="lr"):
                engine.precondition_()
        assert engine.precondition_(lr=0.1)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for asked, direct in zip(directions(True), directions(False), strict=True):
        assert torch.equal(asked, direct)


def test_non_finite_gradients_are_left_alone_and_reported() -> None:
    model = make_model()
    engine = CurvatureEngine(model, scaling=None)
    backward(model, 0)
    weight = next(model.parameters())
    assert weight.grad is not None
    weight.grad[0, 0] = float("nan")
    raw = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert not engine.precondition_()
    for p, gradient in zip(model.parameters(), raw, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0, equal_nan=True)
    assert engine.report()["skipped_steps"] == 1
