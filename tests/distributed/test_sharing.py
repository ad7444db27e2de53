"""Factors that one rank alone keeps: the same training, less memory, and states that go on anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from kfac_optim import (
    KAISA,
    FactorWise,
    LayerWise,
    OfLargest,
    OfMean,
)
from kfac_optim.distributed import LayerAssignment
from tests.distributed.test_communication import Odd, train_branching
from tests.distributed.test_distributed import trained
from tests.helpers.compare import assert_all_near
from tests.helpers.ranks import run_ranks

SHARDED = {
    "factor-wise": FactorWise("sharded"),
    "layer-wise": LayerWise("sharded"),
    "kaisa-half": KAISA(0.5, factors="sharded"),
}


class OddSharded(Odd):
    """Who decomposes need not precondition; of three layers two are shared out."""

    LAYERS = (
        LayerAssignment((2, 0), (1,), "sharded"),
        LayerAssignment((1, 1), (2, 0)),
        LayerAssignment((0, 2), (2, 1, 0), "sharded"),
    )


SKIP = [r"body\.3"]  # leaves three layers of the net


# As one process ------------------------------------------------------------------------------------------------------

SPREAD: dict[str, Any] = {"spread": 2, "inv_update_steps": 4, "factor_update_steps": 1}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "eigen": ("sgd", {}),
    "inverse": ("sgd", {"solver": "inverse"}),
    "eigen, of mean, spread": ("sgd", {"damping": OfMean(0.1), **SPREAD}),
    "inverse, of largest, spread": ("sgd", {"solver": "inverse", "damping": OfLargest(0.01), **SPREAD}),
    "inverse, of mean": ("sgd", {"solver": "inverse", "damping": OfMean(0.1), "scaling": "graft"}),
    "adam": ("adam", {"damping": OfLargest(0.01)}),
    "reduce, diagonal": ("sgd", {"weight_sharing": "reduce", "skip_layers": [r"body\.2"], "max_factor_dim": 20}),
}


def train_all(rank: int, world_size: int) -> dict[Any, list[Tensor]]:
    found: dict[Any, list[Tensor]] = {}
    for name, strategy in SHARDED.items():
        if name == "kaisa-half" and world_size == 3:
            continue
        for case, (kind, options) in OPTIONS.items():
            found[name, case] = trained(rank, world_size, kind, {**options, "assignment": strategy})
        if world_size == 2:
            branching = {"factor_update_steps": 1, "inv_update_steps": 4, "assignment": strategy}
            found["branching", name] = train_branching(rank, world_size, branching)
    if world_size == 3:
        found["odd", "eigen"] = trained(rank, world_size, "sgd", {"assignment": OddSharded(), "skip_layers": SKIP})
    return found


@pytest.mark.fast("2")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_share_factors_out_equal_one_process(world_size: int) -> None:
    outcomes = run_ranks(world_size, train_all)
    for name, case in outcomes[0]:
        if name == "branching":
            alone = train_branching(0, 1, {"factor_update_steps": 1, "inv_update_steps": 4})
        else:
            kind, options = OPTIONS[case]
            alone = trained(0, 1, kind, {**options, **({"skip_layers": SKIP} if name == "odd" else {})})
        assert_all_near([found[name, case] for found in outcomes], alone, case=f"{name}, {case}")
