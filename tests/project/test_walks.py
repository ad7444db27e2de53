"""The walks of docs/walks.rst: the functions it names are called, in this order, and events do what it says."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import kfac_optim
from kfac_optim import KFACSGD, KFACAdam, LocalCommunicator
from kfac_optim.bases.records import TURN
from tests.helpers.pages import ROOT

PACKAGE = Path(kfac_optim.__file__).parent
PAGE = (ROOT / "docs" / "walks.rst").read_text(encoding="utf-8")
Call = tuple[str, str]


class Twin(LocalCommunicator):
    """Rank 0 of two, the other of which has the same numbers; what it would broadcast never comes."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def _start_sum(self, tensor: Tensor) -> Twin:
        tensor.mul_(2)
        return self

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Twin:
        return self

    def wait(self) -> None:
        """Returns: nothing is under way."""


def walk(name: str) -> list[Call]:
    """The rows of a walk: file and function."""
    _, after = PAGE.split(f".. _walk-{name}:\n")
    return re.findall(r"^``([\w/]+\.py)`` +``([\w.]+)``", after.split("\n.. _")[0], re.MULTILINE)


def calls_of(train: Callable[[], object]) -> list[Call]:
    """Every function of the package that is called meanwhile, in this order: file and name."""
    found: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
            classes = () if owner is None else (owner if isinstance(owner, type) else type(owner)).__mro__
            of_class = (c.__name__ for c in classes if getattr(vars(c).get(code.co_name), "__code__", None) is code)
            name = ".".join([*of_class, code.co_name])
            found.append((Path(code.co_filename).relative_to(PACKAGE).as_posix(), name))

    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(None)
    return found


def train(**options: object) -> None:
    """Builds an optimizer and takes a step, which collects statistics and refreshes."""
    model = nn.Linear(8, 4)  # with a second layer, each call would have a second chance to be found
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **options)
    model(torch.randn(32, 8)).square().mean().backward()
    optimizer.step()


def require_in_order(rows: list[Call], calls: list[Call]) -> None:
    """Fails unless the calls contain the rows of a walk, in this order."""
    assert len(rows) > 8
    left = iter(calls)
    for row in rows:
        assert row in left, f"{row} is not called after the rows above it"


@pytest.mark.parametrize(
    ("name", "options"),
    [("activation", {}), ("damping", {}), ("assignment", {"assignment": "layer-wise", "communicator": Twin()})],
    ids=["activation", "damping", "assignment"],
)
def test_the_page_names_the_calls_of_a_step_in_order(name: str, options: dict[str, object]) -> None:
    require_in_order(walk(name), calls_of(lambda: train(**options)))


@pytest.mark.parametrize(("name", "before"), [("step", 8), ("repeat", 21)], ids=["step", "repeat"])
def test_the_page_names_the_calls_of_a_later_step_in_order(name: str, before: int) -> None:
    """One that learns from the step before; the first steps are not stretched yet."""
    model = nn.Linear(8, 4)
    optimizer = KFACAdam(model, lr=0.01)
    for _ in range(before):
        optimizer.zero_grad()
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(torch.randn(32, 8)).square().mean().backward()
    require_in_order(walk(name), calls_of(optimizer.step))


def rows_of_events() -> dict[str, list[str]]:
    """What becomes of passes, decompositions and records, by event."""
    rows = re.findall(r"^(``[\w.]+\(\)``[^=]*?)  +(\w+)  +(\w+(?: again)?)  +(\w+)  +``", PAGE, re.MULTILINE)
    return {event: outcomes for event, *outcomes in rows}


class Interrupted(Exception):
    """Raised by a base class's step."""


def happen(event: str, model: nn.Sequential, optimizer: KFACAdam) -> None:
    """Has an event of docs/walks.rst happen."""
    if event == "``zero_grad()``":
        optimizer.zero_grad(set_to_none=False)  # passes whose gradients are None would count for nothing anyway
    elif event == "``add_param_group()``":
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": list(model[-1].parameters())})
    elif event == "``load_state_dict()``":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif event == "``curvature.close()``":
        optimizer.curvature.close()
    elif event == "``step()``, the base's raises":
        optimizer._base_step = Mock(side_effect=Interrupted)  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            optimizer.step()
    else:
        if event == "``step()``, gradient not finite":
            next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        elif event == "``step()``, new layer unfrozen":
            model[2].requires_grad_(True)
        else:
            assert event == "``step()``"
        optimizer.step()


@pytest.mark.parametrize("event", rows_of_events())
def test_what_an_event_throws_away(event: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[2].requires_grad_(False)
    options: dict[str, Any] = {"factor_update_steps": 5, "inv_update_steps": 1000}
    optimizer = KFACAdam([*model[0].parameters(), *model[4].parameters(), *model[2].parameters()], **options)
    stages = optimizer.curvature.stages
    head = next(block for block in stages.blocks if block.layer.weight is model[4].weight)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()

    def seen() -> Any:
        return head.in_use, float(head.state["current"]["A"]["weight"]), optimizer.state[model[4].weight].get(TURN)

    for _ in range(10):
        train()
        optimizer.step()
    train()  # its statistics are due
    in_use, weight, turn = seen()
    happen(event, model, optimizer)
    now_in_use, now_weight, now_turn = seen()
    passes = "used" if now_weight != weight else "kept" if stages.capture.take().flags else "dropped"
    again = now_in_use is not None or stages.refresher.communicates(
        optimizer.curvature, stages.progress.step, may_begin=False
    )
    decompositions = "kept" if now_in_use is in_use else "made again" if again else "dropped"
    records = "dropped" if now_turn is None else "kept" if now_turn is turn else "renewed"
    if records == "renewed" and torch.equal(now_turn, turn):
        records = "loaded"
    assert [passes, decompositions, records] == rows_of_events()[event]


def test_each_event_is_there() -> None:
    assert len(rows_of_events()) == 8
