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

from kfac_optim.distributed import full_gradient, set_full_gradient_

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
