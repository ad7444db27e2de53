"""Without a layer that K-FAC covers, each class is its base class, step for step and bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_optimizer
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, KFACAdam, KFACAdamW
from kfac_optim.bases import MultiTensorLamb
from tests.helpers.bases import KFACRMSprop
from tests.helpers.compare import assert_close, assert_trained, values
from tests.helpers.reads import HostReads
from tests.helpers.settings import ALL_CLASSES, BASES, FLOAT64
from tests.helpers.training import backward, make_model, train
from tests.helpers.versions import ADAM_DECOUPLES, RATES_OF_ONE_DIMENSION

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 6
LAMB_TOL = 1e-12  # the multi-tensor update multiplies by a reciprocal where torch_optimizer divides

SGD_KEYWORDS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "foreach": True},
    {"momentum": 0.9, "foreach": False},
    {"momentum": 0.9, "fused": True},
    {"lr": torch.tensor(0.1), "momentum": 0.9},
    *[{"lr": torch.tensor([0.1]), "momentum": 0.9}] * RATES_OF_ONE_DIMENSION,
]
ADAM_KEYWORDS: list[dict[str, Any]] = [
    {},
    {"betas": (0.8, 0.9), "eps": 1e-3},
    {"weight_decay": 0.1},
    *[{"weight_decay": 0.1, "decoupled_weight_decay": True}] * ADAM_DECOUPLES,
    {"amsgrad": True},
    {"maximize": True},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"lr": torch.tensor(0.1)},
    *[{"lr": torch.tensor([0.1])}] * RATES_OF_ONE_DIMENSION,
]
LAMB_KEYWORDS: list[dict[str, Any]] = [
    {},
    {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1},
    {"clamp_value": 0.5},
    {"clamp_value": 1e3, "debias": True},
    {"adam": True},
    {"adam": True, "debias": True, "weight_decay": 0.1},
]
CASES = [
    *[(KFACSGD, torch.optim.SGD, keywords) for keywords in SGD_KEYWORDS],
    *[(KFACAdam, torch.optim.Adam, keywords) for keywords in ADAM_KEYWORDS],
    *[(KFACAdamW, torch.optim.AdamW, keywords) for keywords in ({}, {"weight_decay": 0.1}, {"amsgrad": True})],
    *[(KFACLAMB, torch_optimizer.Lamb, keywords) for keywords in LAMB_KEYWORDS],
    (KFACRMSprop, torch.optim.RMSprop, {}),
]


class Raw(nn.Module):
    """Two layers by hand, none that K-FAC covers; one tensor is zero, one is larger than LAMB's clamp."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 4) * 5)
        self.b = nn.Parameter(torch.zeros(6))
        self.v = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w.T + self.b) @ self.v.T


def ids(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "defaults"
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("kfac", "base", "keywords"), CASES, ids=ids)
def test_equal_to_the_base_class(
    kfac: type[torch.optim.Optimizer], base: type[torch.optim.Optimizer], keywords: dict[str, Any]
) -> None:
    keywords = {"lr": 0.1, **keywords}
    ours, theirs = Raw(), Raw()
    before = values(ours)
    optimizer, reference = kfac(ours, **keywords), base(theirs.parameters(), **keywords)
    train(ours, optimizer, range(STEPS))
    train(theirs, reference, range(STEPS))
    assert_trained(ours, before)
    assert_close(ours, theirs, LAMB_TOL if kfac is KFACLAMB else 0.0)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert set(optimizer.state[p]) == set(reference.state[q])
        for key, value in reference.state[q].items():
            torch.testing.assert_close(
                torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value), rtol=LAMB_TOL, atol=LAMB_TOL
            )


POSITIONAL: list[tuple[Any, Any, tuple[Any, ...]]] = [
    (KFACSGD, torch.optim.SGD, (0.1, 0.9, 0.2, 0.01)),
    (KFACSGD, torch.optim.SGD, (0.1, 0.9, 0, 0.01, True)),
    (KFACAdam, torch.optim.Adam, (0.1, (0.8, 0.9), 1e-4, 0.01, True)),
    (KFACLAMB, torch_optimizer.Lamb, (0.1, (0.8, 0.9), 1e-4, 0.01, 2.0, False, True)),
]


@pytest.mark.parametrize(("kfac", "base", "arguments"), POSITIONAL, ids=ids)
def test_positional_arguments_have_the_base_class_s_order(kfac: Any, base: Any, arguments: tuple[Any, ...]) -> None:
    ours, theirs = Raw(), Raw()
    train(ours, kfac(ours.parameters(), *arguments, model=ours), range(STEPS))
    train(theirs, base(theirs.parameters(), *arguments), range(STEPS))
    assert_close(ours, theirs, LAMB_TOL)


@pytest.mark.parametrize("kfac", ALL_CLASSES)
def test_closed_curvature_leaves_the_base_class(kfac: type[torch.optim.Optimizer]) -> None:
    ours, theirs = make_model(), make_model()
    optimizer = kfac(ours, **ALL_CLASSES[kfac], **FLOAT64)
    optimizer.curvature.close()
    train(ours, optimizer, range(STEPS))
    train(theirs, BASES[kfac](theirs.parameters(), **ALL_CLASSES[kfac]), range(STEPS))
    assert_close(ours, theirs, LAMB_TOL)


def host_reads(optimizer: type[torch.optim.Optimizer], tensors: int, **keywords: Any) -> int:
    model = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(tensors))
    made = optimizer(model.parameters(), lr=0.1, **keywords)
    for p in model.parameters():
        p.grad = torch.randn(3)
    made.step()  # state exists from here on
    with HostReads() as reads:
        made.step()
    return reads.count


def test_lamb_does_not_wait_for_the_device_per_tensor() -> None:
    keywords = {"weight_decay": 0.1, "debias": True}
    assert host_reads(torch_optimizer.Lamb, 20, **keywords) >= 3 * 20, "the counter does not count"
    assert host_reads(KFACLAMB, 20, **keywords) == host_reads(KFACLAMB, 1, **keywords) <= 1


def test_the_base_of_lamb_refuses_sparse_gradients() -> None:
    """As ``torch_optimizer.Lamb`` does."""
    p = nn.Parameter(torch.zeros(3, 2))
    p.grad = torch.ones(3, 2).to_sparse()
    told = []
    for cls in (MultiTensorLamb, torch_optimizer.Lamb):
        with pytest.raises(RuntimeError) as caught:
            cls([p], lr=0.1).step()
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_the_base_of_lamb_evaluates_a_closure_with_gradients() -> None:
    """As ``torch_optimizer.Lamb`` does, whose place it takes."""
    ours, theirs = make_model(), make_model()
    for model, optimizer in (
        (ours, MultiTensorLamb(ours.parameters(), lr=0.1)),
        (theirs, torch_optimizer.Lamb(theirs.parameters(), lr=0.1)),
    ):

        def closure(model: nn.Module = model) -> Tensor:
            backward(model, 0)
            return torch.ones(())

        assert float(optimizer.step(closure)) == 1.0
    assert_close(ours, theirs, LAMB_TOL)
