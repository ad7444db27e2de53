"""Horovod, the real package: gradients by its DistributedOptimizer, curvature by HorovodCommunicator.

Skipped where Horovod is not installed.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KAISA, KFACLAMB, KFACSGD, CurvatureEngine, Graft, HorovodCommunicator, LayerWise
from tests.helpers.compare import assert_all_near, values
from tests.helpers.settings import FLOAT64, OFTEN
from tests.helpers.training import data_of, share, train

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
    pytest.mark.timeout(300),
]

# Of optimizers and engines, whose solvers are others by default.
OPTIONS: dict[str, Any] = {**OFTEN, **FLOAT64, "solver": "eigen"}
TURNED = Graft(trust=1.0)
CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "factor-wise": (KFACSGD, {"lr": 0.1, "momentum": 0.9, "precondition": "gradient", "scaling": "kl_clip"}),
    "layer-wise": (KFACSGD, {"lr": 0.1, "momentum": 0.9, "scaling": TURNED, "assignment": LayerWise()}),
    "kaisa": (KFACSGD, {"lr": 0.1, "momentum": 0.9, "scaling": TURNED, "assignment": KAISA(0.5)}),
    "momentum": (KFACSGD, {"lr": 0.02, "momentum": 0.9, "precondition": "momentum", "scaling": "unit"}),
    "lamb": (
        KFACLAMB,
        {"lr": 0.01, "clamp_value": 2.0, "debias": True, "scaling": TURNED, "assignment": "layer-wise"},
    ),
}
STEPS = 8


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def trained(
    name: str, rank: int, world_size: int, wrap: Any = lambda model, optimizer: optimizer, **more: Any
) -> list[Tensor]:
    model = make()
    cls, options = CASES[name]
    optimizer = wrap(model, cls(model, **{**options, **OPTIONS, **more}))
    train(model, optimizer, range(STEPS), rank=rank, world_size=world_size)
    return values(model)


def on_a_rank() -> dict[str, Any]:
    """Everything on one rank of four: a launch takes seconds."""
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    found: dict[str, Any] = {"size": size}

    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        assert isinstance(wrapped, type(optimizer))
        assert wrapped.curvature is optimizer.curvature  # type: ignore[attr-defined]
        return wrapped

    for name in CASES:
        found[name] = trained(name, rank, size, wrap, communicator=HorovodCommunicator())
    half = HorovodCommunicator(comm_dtype=torch.float16)
    found["fp16"] = trained("factor-wise", rank, size, wrap, communicator=half)
    found["traffic"] = sorted(half.traffic)

    # The paper's form: between synchronize() and the foreign step.
    model = make()
    engine = CurvatureEngine(model, communicator=HorovodCommunicator(), **OPTIONS)
    foreign = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        inputs, classes = share(data_of(step), rank, size)
        foreign.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        foreign.synchronize()
        engine.precondition_(lr=0.1)
        with foreign.skip_synchronize():
            foreign.step()
    found["foreign"] = values(model)

    # Ranks that start apart: root's weights and optimizer state for all, before the first step and in between.
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, communicator=HorovodCommunicator(), **OPTIONS)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    wrapped = wrap(model, optimizer)
    train(model, wrapped, range(4), rank=rank, world_size=size)
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    train(model, wrapped, range(4, STEPS), rank=rank, world_size=size)
    found["broadcast"] = values(model)
    found["trained"] = len(wrapped.curvature.report()["layers"])  # type: ignore[attr-defined]

    hvd.shutdown()
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    import horovod

    places = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    added = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in added.items():
            patch.setenv(name, value)
        return horovod.run(on_a_rank, num_proc=4, use_gloo=True)


@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(outcomes: list[dict[str, Any]], name: str) -> None:
    expected = trained(name, 0, 1)
    assert [found["size"] for found in outcomes] == [4] * 4
    assert_all_near([found[name] for found in outcomes], expected)


def test_factors_in_half_precision(outcomes: list[dict[str, Any]]) -> None:
    expected = trained("factor-wise", 0, 1)
    assert "factors" in outcomes[0]["traffic"]
    for p, q, r in zip(outcomes[0]["fp16"], outcomes[1]["fp16"], expected, strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, r, rtol=1e-2, atol=1e-3)


def test_foreign_optimizer_between_synchronize_and_step(outcomes: list[dict[str, Any]]) -> None:
    expected = trained("factor-wise", 0, 1)
    assert_all_near([found["foreign"] for found in outcomes], expected)


def test_state_broadcast_from_the_root(outcomes: list[dict[str, Any]]) -> None:
    for found in outcomes[1:]:
        for p, q in zip(outcomes[0]["broadcast"], found["broadcast"], strict=True):
            assert torch.equal(p, q) and bool(p.isfinite().all())
    assert outcomes[0]["trained"] == 2
