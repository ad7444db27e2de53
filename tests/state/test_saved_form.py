"""Through ``torch.distributed.checkpoint``, which reads what a fresh optimizer has keys for: bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from kfac_optim import KFACLAMB, KFACSGD, Graft, KFACAdam, KFACAdamW, KFACMixin
from tests.helpers.bases import KFACAdagrad, KFACRMSprop
from tests.helpers.compare import assert_identical

STEPS = 16


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (KFACSGD, {"lr": 0.05, "momentum": 0.9}),
    "plain": (KFACSGD, {"lr": 0.1}),
    "plain, paper": (KFACSGD, {"lr": 0.1, "precondition": "gradient"}),
    "Adam": (KFACAdam, {"lr": 3e-3}),
    "AdamW, not stretched": (KFACAdamW, {"lr": 3e-3, "scaling": Graft(stretch=False)}),
    "LAMB": (KFACLAMB, {"lr": 1e-2}),
    "RMSprop": (KFACRMSprop, {"lr": 1e-3}),
    "Adagrad": (KFACAdagrad, {"lr": 1e-2}),
    "spread": (KFACSGD, {"lr": 0.05, "momentum": 0.9, "spread": 3, "inv_update_steps": 5}),
}


def made(case: str) -> tuple[nn.Module, Any]:
    """A net with a parameter that no layer covers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    kfac, options = CASES[case]
    return model, kfac(model, **options)


def step(model: nn.Module, optimizer: Any, t: int) -> None:
    generator = torch.Generator().manual_seed(t)
    optimizer.zero_grad()
    x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def read(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """As the tutorials do it."""
    optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


@pytest.mark.fast("^momentum$|^plain$")
@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_and_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    """In a fresh optimizer, and in one that has trained on meanwhile."""
    model, optimizer = made(case)
    starts = (1, 2, 5, 6, 11, 12)
    for t in range(STEPS):
        if t:
            state = get_optimizer_state_dict(model, optimizer)
        if t in starts:
            dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / str(t))
        step(model, optimizer, t)
    expected = copy.deepcopy(model)
    for start in starts:
        resumed, again = made(case)
        for into in ((resumed, again), (model, optimizer)):
            read(tmp_path / str(start), *into)
            for t in range(start, STEPS):
                step(*into, t)
            assert_identical(into[0], expected)


def test_an_optimizer_that_trusts_directions_fully_goes_back_to_a_time_when_it_did_not(tmp_path: Path) -> None:
    """Its turn and its change are one tensor, those in the checkpoint two, which are read into what it shows."""
    model, optimizer = made("AdamW, not stretched")
    trust = optimizer.curvature.stages.steering.trust
    trust.notches = 5
    for t in range(STEPS):
        if t == 6:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=tmp_path)
        step(model, optimizer, t)
    expected = copy.deepcopy(model)
    trust.notches = 10
    for t in range(STEPS):
        step(model, optimizer, t)
        if optimizer.state[model[0].weight]["kfac_turn"] is optimizer.state[model[0].weight].get("kfac_change"):  # type: ignore[index]
            break
    else:
        raise AssertionError("never one tensor")
    read(tmp_path, model, optimizer)
    for t in range(6, STEPS):
        step(model, optimizer, t)
    assert_identical(model, expected)


@pytest.mark.parametrize("way", ["folder", "memory"])
def test_a_layer_that_was_frozen_on_the_way_does_not_make_a_state_look_damaged(way: str, tmp_path: Path) -> None:
    """Torch hands over no state of it."""
    model, optimizer = made("momentum")
    for t in range(STEPS):
        if t == 5:
            model[0].requires_grad_(False)
        if t == 10:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=tmp_path)
            kept = copy.deepcopy(state)
        step(model, optimizer, t)
    resumed, again = made("momentum")
    resumed[0].requires_grad_(False)
    if way == "folder":
        read(tmp_path, resumed, again)
    else:
        resumed.load_state_dict(kept["model"])
        set_optimizer_state_dict(resumed, again, kept["optimizer"])
    for t in range(10, STEPS):
        step(resumed, again, t)
    assert_identical(resumed, model)


@pytest.mark.parametrize("case", CASES)
def test_a_state_has_the_same_keys_at_any_time(case: str) -> None:
    """Those of the base class besides; and none of them is left in a run."""
    model, optimizer = made(case)
    known = None
    for t in range(STEPS):
        step(model, optimizer, t)
        states = optimizer.state_dict()["state"]
        keys = {i: sorted(state) for i, state in states.items()}
        known = known or keys
        assert keys == known and len(keys) == len(list(model.parameters()))
    live = {key for state in optimizer.state.values() for key in state}
    assert not {"kfac_noted", "kfac_norm"} & live
    again = made(case)[1]
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {p_key for state in again.state.values() for p_key in state} == live


def test_entries_of_a_parameter_may_have_any_keys() -> None:
    model, optimizer = made("Adam")
    step(model, optimizer, 0)
    saved = optimizer.state_dict()
    saved["state"][0][7] = torch.ones(2)
    again = made("Adam")[1]
    again.load_state_dict(saved)
    assert torch.equal(again.state[again.param_groups[0]["params"][0]][7], torch.ones(2))


def test_entries_of_a_wrapper_are_loaded() -> None:
    """TRAC of pytorch_optimizer keeps its tensors by parameter, under a name of its own."""
    model, optimizer = made("Adam")
    step(model, optimizer, 0)
    own = {parameter: torch.ones(()) for parameter in model.parameters()}
    saved = optimizer.state_dict()
    again = made("Adam")[1]
    again.load_state_dict({**saved, "state": {**saved["state"], "wrapper": own}})
    assert again.state["wrapper"] == own


class Totals(torch.optim.SGD):
    """Keeps a tensor in its groups that every step changes in place, as Prodigy of pytorch_optimizer does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("total", torch.zeros(())).add_(sum(p.grad.sum() for p in group["params"]))
        return super().step(closure)


class KFACTotals(KFACMixin, Totals):
    pass


def test_tensors_of_groups_are_loaded_as_they_were_saved() -> None:
    """Loading tries a step of the base class, to see what it keeps; that one counts nowhere."""
    model, _ = made("Adam")
    optimizer = KFACTotals(model, lr=0.1)
    step(model, optimizer, 0)
    saved, total = optimizer.state_dict(), optimizer.param_groups[0]["total"].clone()
    again = KFACTotals(made("Adam")[0], lr=0.1)
    again.load_state_dict(saved)
    assert torch.equal(saved["param_groups"][0]["total"], total)
    assert torch.equal(again.param_groups[0]["total"], total)


class ParametersOnly(torch.optim.SGD):
    """Refuses tensors that are not parameters."""

    def step(self, closure: Any = None) -> Any:
        assert all(isinstance(p, nn.Parameter) for group in self.param_groups for p in group["params"])
        return super().step(closure)


class KFACParametersOnly(KFACMixin, ParametersOnly):
    pass


def test_a_state_is_loaded_where_no_step_can_be_tried() -> None:
    (model, _), (other, _) = made("Adam"), made("Adam")
    optimizer, again = (KFACParametersOnly(own, lr=0.1, momentum=0.9) for own in (model, other))
    step(model, optimizer, 0)
    again.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(again.state[q]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


@pytest.mark.parametrize("way", ["deepcopy", "state"])
def test_a_projection_before_a_step_is_found_by_copies_and_resumed_runs(way: str) -> None:
    ends = []
    for copies in (False, True):
        model, optimizer = made("momentum")
        for t in range(STEPS):
            step(model, optimizer, t)
            if copies and t in (5, 6, 9):
                if way == "deepcopy":
                    model, optimizer = copy.deepcopy((model, optimizer))
                else:
                    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                    model, optimizer = made("momentum")
                    model.load_state_dict(state[0])
                    optimizer.load_state_dict(state[1])
            with torch.no_grad():
                model[3].weight.clamp_(-0.3, 0.3)  # type: ignore[index, operator, union-attr]
        assert optimizer.curvature.stages.blocks[2].is_constrained
        ends.append(model)
    assert_identical(*ends)
