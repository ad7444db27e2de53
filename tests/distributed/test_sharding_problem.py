"""Which sharded weights are whole matrices to K-FAC, in one process that stands for one rank of eight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.utils import parametrizations
from torch.testing._internal.distributed.fake_pg import FakeStore

from kfac_optim import LayerOptions, LocalCommunicator, TorchCommunicator
from kfac_optim.distributed import are_exchangeable, sharding_problem
from kfac_optim.layers import FoundLayers


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two by four ranks, none of which sends anything."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return DTensor.from_local(torch.ones(8, 8), mesh, placements, run_check=False)


ALONE = LocalCommunicator()
ROWS: tuple[Placement, ...] = (Replicate(), Shard(0))
OTHERS: list[tuple[Placement, ...]] = [
    (Replicate(), Shard(1)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (Shard(0), Replicate()),
    (Replicate(), Replicate()),
]


def test_rows_split_by_fsdp2_are_no_problem(mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    plain = nn.Linear(8, 8)
    assert sharding_problem(model.weight, [plain, nn.Sequential(model)], ALONE) == ""
    assert sharding_problem(sharded(mesh, *ROWS), [model], ALONE) == ""
    assert sharding_problem(plain.weight, [plain], ALONE) == ""


def test_without_fsdp2_they_are_split_by_tensor_parallelism(mesh: DeviceMesh) -> None:
    assert "split by tensor parallelism" in sharding_problem(sharded(mesh, *ROWS), [nn.Linear(8, 8)], ALONE)


def test_rows_that_do_not_lie_in_the_order_of_the_ranks_are_a_problem(mesh: DeviceMesh) -> None:
    """FSDP2 gives rows to the ranks of a process group in ascending order, a DTensor in the order of the mesh."""
    names = ("outer", "inner")
    columns, turned = (DeviceMesh("cpu", ranks, mesh_dim_names=names) for ranks in ([[0, 4], [1, 5]], [[4, 0], [5, 1]]))
    model, other = (fully_shard(nn.Linear(8, 8), mesh=each) for each in (columns, turned))
    assert sharding_problem(model.weight, [model], ALONE) == ""
    assert "take one of init_device_mesh()" in sharding_problem(other.weight, [other], ALONE)


@pytest.mark.parametrize("placements", OTHERS, ids=str)
def test_anything_but_rows_is_a_problem_under_fsdp2_too(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    roots = [fully_shard(nn.Linear(8, 8), mesh=mesh)]
    whole = placements == (Replicate(), Replicate())
    said = "in place of replicate()" if whole else "or not by rows"
    assert said in sharding_problem(sharded(mesh, *placements), roots, ALONE)


def test_weight_norm_of_shards_is_declined(mesh: DeviceMesh) -> None:
    model = fully_shard(parametrizations.weight_norm(nn.Linear(8, 8)), mesh=mesh)
    found = FoundLayers([model], LayerOptions())
    assert not found.layers
    assert "weight norm of a sharded weight" in {why for _, why in found.uncovered.values()}


def test_shards_are_exchanged_among_the_ranks_that_hold_them_alone(mesh: DeviceMesh) -> None:
    on_all, on_some = sharded(mesh, *ROWS), sharded(mesh["inner"], Shard(0))
    assert are_exchangeable([on_all], TorchCommunicator())
    assert not are_exchangeable([on_all, on_some], TorchCommunicator())
    assert are_exchangeable([on_some], TorchCommunicator(mesh.get_group("inner")))
