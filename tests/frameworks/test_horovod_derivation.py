"""How Horovod derives its optimizer, without Horovod: a class of the same name, over the optimizer's own groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kfac_optim import KFACSGD, KFACAdam
from tests.helpers.compare import assert_identical
from tests.helpers.settings import CLASSES, OFTEN, SETTINGS
from tests.helpers.training import make_model, train


class _DistributedOptimizer(torch.optim.Optimizer):
    """As ``horovod.torch.optimizer._DistributedOptimizer``, with nobody to send gradients to."""

    def __init__(self, params: Any, named_parameters: Any, compression: Any = None) -> None:
        super(self.__class__, self).__init__(params)  # type: ignore[call-arg]
        self._compression = compression
        self._parameter_names = {v: k for k, v in sorted(named_parameters)}
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.synchronize()
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        return super(self.__class__, self).zero_grad(*args, **kwargs)


def derived(optimizer: Any, model: nn.Module) -> Any:
    """``horovod.torch.DistributedOptimizer``."""
    cls = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_DistributedOptimizer.__dict__))
    return cls(optimizer.param_groups, model.named_parameters())


@pytest.mark.parametrize("kfac", CLASSES)
def test_the_derived_optimizer_goes_on_with_the_engine(kfac: Any) -> None:
    models = [make_model() for _ in range(2)]
    plain, inner = (kfac(m, **CLASSES[kfac], **SETTINGS) for m in models)
    optimizer = derived(inner, models[1])
    assert optimizer.curvature is inner.curvature
    del inner
    for model, trained in zip(models, (plain, optimizer), strict=True):
        train(model, trained, range(8))
    assert optimizer.synchronized == 8
    assert_identical(*models)


def test_also_of_a_copy_of_an_optimizer_in_several_groups() -> None:
    model = make_model()
    groups = [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(model.parameters())]
    model, inner = copy.deepcopy((model, KFACSGD(groups, lr=0.1, model=model, precondition="gradient", **OFTEN)))
    optimizer = derived(inner, model)
    assert optimizer.curvature is inner.curvature
    assert optimizer.precondition == "gradient"
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in groups]


class Mine(KFACSGD):
    """A user's subclass."""


class KFACOther(KFACAdam):
    """Another one."""


@pytest.mark.parametrize("kfac", [Mine, type("KFACSGD", (KFACSGD,), {})])
def test_no_other_subclass_takes_an_engine_over(kfac: Any) -> None:
    model = make_model()
    first = KFACSGD(model, lr=0.1, **OFTEN)
    second = kfac(model.parameters())
    assert second.curvature is not first.curvature
    assert first.curvature.damping != second.curvature.damping


@pytest.mark.parametrize("kfac", [Mine, KFACOther])
def test_not_even_over_the_same_groups(kfac: Any) -> None:
    model = make_model()
    first = KFACSGD(model, lr=0.1, **OFTEN)
    second = kfac(first.param_groups)
    assert second.curvature is not first.curvature
