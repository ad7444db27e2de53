"""What the tests of Accelerate, Lightning and transformers' Trainer share: settings, the state of a process, ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim import KLClip
from tests.helpers.training import KINDS, OFTEN, assert_all_near

# The paper's way, in which the scale of the loss and so M, the number of loss terms, tells: a wrong one is seen.
PAPER = OFTEN | {"precondition": "gradient", "scaling": KLClip(1e-2), "damping": 0.03, "spread": 0}
LIMIT = 240.0  # seconds: every rank imports the framework
TOL = 1e-9  # the same float64 arithmetic in another order
Build = Callable[[nn.Module], Any]


def builder(kind: str, **options: Any) -> Build:
    """Makes the optimizer of a kind, with the paper's settings."""
    kfac, own = KINDS[kind]
    return lambda model: kfac(model, **{**PAPER, **own, **options})


def forget() -> None:
    """Accelerate, which the Trainer uses too, keeps its state in singletons."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def as_torchrun(rank: int, ranks: int, **more: str) -> None:
    """The environment of a rank that torchrun has started."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", **more)


def assert_ranks_are_one(outcomes: list[dict[str, list[Tensor]]], case: str, expected: Iterable[Tensor]) -> None:
    """The ranks have the same parameters, bit for bit, and up to rounding those of one process."""
    found = [of_rank[case] for of_rank in outcomes]
    assert all(torch.equal(p, q) for other in found for p, q in zip(found[0], other, strict=True)), case
    assert_all_near(found, list(expected), TOL, case)
