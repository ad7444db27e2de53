"""Gradients that DeepSpeed's ZeRO keeps elsewhere, without DeepSpeed: a pretended ``deepspeed.utils`` holds them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from kfac_optim import CurvatureEngine
from kfac_optim.distributed import LocalCommunicator, full_gradient, set_full_gradient_
from tests.helpers.settings import SETTINGS
from tests.helpers.training import data_of

Kept = dict[nn.Parameter, Tensor]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """What a pretended DeepSpeed holds; there are four ranks, to none of which anything is sent."""
    gradients: Kept = {}
    package, utils = types.ModuleType("deepspeed"), types.ModuleType("deepspeed.utils")
    functions: dict[str, Any] = {
        "safe_get_full_grad": gradients.get,
        "safe_set_full_grad": lambda p, value: gradients.update({p: value}),
    }
    vars(utils).update(functions)
    vars(package).update(utils=utils)
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield gradients
    dist.destroy_process_group()


@pytest.mark.parametrize("mark", ["_hp_mapping", "ds_id"])  # stages 1 and 2; stage 3
def test_they_are_read_and_written_where_they_are(kept: Kept, mark: str) -> None:
    p = nn.Parameter(torch.zeros(2, 3))
    setattr(p, mark, 1)
    p.ds_process_group = None  # type: ignore[attr-defined]
    assert full_gradient(p) is None
    kept[p] = torch.arange(6.0).view(2, 3)
    assert torch.equal(full_gradient(p), kept[p])  # type: ignore[arg-type]
    set_full_gradient_(p, torch.ones(2, 3))
    # Stage 3 cuts what it is given into four equal parts.
    assert torch.equal(kept[p], torch.ones(2, 3) if mark == "_hp_mapping" else torch.tensor([1.0] * 6 + [0.0] * 2))
    assert p.grad is None


@pytest.mark.parametrize("mark", ["_hp_mapping", "ds_id", "other"])
def test_a_gradient_in_its_place_is_taken_from_there(kept: Kept, mark: str) -> None:
    p = nn.Parameter(torch.zeros(2, 3))
    setattr(p, mark, 1)
    if mark == "other":
        assert full_gradient(p) is None
    p.grad = before = torch.ones(2, 3)
    assert full_gradient(p) is before
    set_full_gradient_(p, torch.full((2, 3), 5.0))
    assert p.grad is before and before.tolist() == [[5.0] * 3] * 2
    assert not kept


@pytest.mark.parametrize("mark", ["_hp_mapping", "ds_id"])
def test_passes_count_whose_gradients_are_moved_away(kept: Kept, mark: str) -> None:
    found: dict[bool, list[list[Tensor]]] = {}
    for moved in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()  # in four equal parts
        engine = CurvatureEngine(model, **SETTINGS, communicator=LocalCommunicator())
        for p in model.parameters() if moved else ():
            setattr(p, mark, 1)
            p.ds_process_group = None  # type: ignore[attr-defined]
        found[moved] = []
        for step in range(8):
            inputs, classes = data_of(step)
            nn.functional.cross_entropy(model(inputs), classes).backward()
            for p in model.parameters() if moved else ():
                kept[p], p.grad = p.grad, None  # type: ignore[assignment]
            before = [full_gradient(p).clone() for p in model.parameters()]  # type: ignore[union-attr]
            engine.precondition_(lr=0.1)
            after = [full_gradient(p).view_as(p).clone() for p in model.parameters()]  # type: ignore[union-attr]
            assert step < 2 or not any(map(torch.equal, before, after))
            found[moved].append(after)
            with torch.no_grad():
                for p, direction in zip(model.parameters(), after, strict=True):
                    p -= 0.1 * direction
                    p.grad = None
    assert all(torch.equal(a, b) for of in zip(*found.values(), strict=True) for a, b in zip(*of, strict=True))
