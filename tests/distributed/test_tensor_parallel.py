"""Weights split by tensor parallelism: each shard is a block of its own, as in one process that has these blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_optimizer
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import KFACLAMB, KFACSGD, EigenSolver, Graft, KFACAdamW, LayerWise, TorchCommunicator
from kfac_optim.bases import MultiTensorLamb
from kfac_optim.blocks import Block
from kfac_optim.distributed import LocalCommunicator, largest_entry
from kfac_optim.steering import plan, reach
from tests.helpers.compare import assert_all_near
from tests.helpers.files import packed, unpacked
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64
from tests.helpers.versions import needs_sharding_on_cpus

WIDTH, STEPS, BATCH = 8, 10, 12
SETTINGS: dict[str, Any] = FLOAT64 | {"factor_update_steps": 1, "inv_update_steps": 3, "spread": 2}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (KFACSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam, inverse": (KFACAdamW, {"lr": 0.01, "solver": "inverse"}),
    "adam, truncated": (KFACAdamW, {"lr": 0.01, "solver": EigenSolver(0.3), "max_factor_dim": 3}),
    "gradients": (KFACSGD, {"lr": 0.1, "precondition": "gradient", "scaling": "unit", "damping": 0.1}),
}


def network() -> nn.Sequential:
    """A pair of layers that tensor parallelism splits, and two that every rank has whole."""
    torch.manual_seed(0)
    body = (nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    return nn.Sequential(*body).double()


class Shards(nn.Module):
    """The same network, with a Linear for each shard and a bias that belongs to none."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        whole = network()
        columns, _, rows, self.norm, self.head = whole
        size = WIDTH // parts
        self.columns = nn.ModuleList(nn.Linear(5, size).double() for _ in range(parts))
        self.rows = nn.ModuleList(nn.Linear(size, 4, bias=False).double() for _ in range(parts))
        self.bias = nn.Parameter(rows.bias.detach().clone())
        with torch.no_grad():
            for number, (column, row) in enumerate(zip(self.columns, self.rows, strict=True)):
                part = slice(number * size, (number + 1) * size)
                column.weight.copy_(columns.weight[part])
                column.bias.copy_(columns.bias[part])
                row.weight.copy_(rows.weight[:, part])

    def forward(self, x: Tensor) -> Tensor:
        parts = [row(column(x).tanh()) for column, row in zip(self.columns, self.rows, strict=True)]
        return self.head(self.norm(sum(parts[1:], parts[0]) + self.bias))

    def shard(self, number: int) -> list[Tensor]:
        """What a rank has, in the order of the parallel network's parameters."""
        column, row = self.columns[number], self.rows[number]
        found = [column.weight, column.bias, row.weight, self.bias, *self.norm.parameters(), *self.head.parameters()]
        return [p.detach() for p in found]


def data(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 5, generator=generator), torch.randint(3, (BATCH,), generator=generator)
    return x.double(), y


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def on_a_mesh(rank: int, world_size: int, kind: str, data_ranks: int) -> list[Tensor]:
    """Training on ``data_ranks`` shares of each batch, whose gradients are averaged by hand, over all other ranks."""
    shape = (data_ranks, world_size // data_ranks)
    mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
    model = network()
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    cls, options = KINDS[kind]
    group = mesh["data"].get_group()
    communicator = TorchCommunicator(group) if data_ranks > 1 else LocalCommunicator()
    optimizer = cls(model, communicator=communicator, **{**SETTINGS, **options})
    share = slice(mesh["data"].get_local_rank(), None, data_ranks)
    for step in range(STEPS):
        if step == STEPS // 2:  # goes on from a file of this rank's own, in the midst of a refresh
            optimizer.curvature.synchronize()
            file = packed(optimizer.state_dict())
            optimizer = cls(model, communicator=communicator, **{**SETTINGS, **options})
            optimizer.load_state_dict(unpacked(file))
        optimizer.zero_grad()
        x, y = data(step)
        F.cross_entropy(model(x[share]), y[share]).backward()
        for p in model.parameters():
            gradient = local(p.grad)  # type: ignore[arg-type]
            dist.all_reduce(gradient, group=group)
            gradient /= data_ranks
        optimizer.step()
    if kind == "sgd":
        assert optimizer.curvature.trust > 0, "or K-FAC would have changed nothing"
        assert len(set(optimizer.curvature.stages.trained.reaches().values())) > 1, (
            "or all layers might share what they learn"
        )
    return [local(p) for p in model.parameters()]


def learn_together(
    blocks: Sequence[Block],
    slopes: Mapping[nn.Parameter, tuple[float, float]],
    undone: Set[nn.Parameter],
    *,
    warms_up: bool,
    grows: bool,
) -> set[nn.Parameter]:  # as reach.learn_reaches
    """Shards of one layer have one reach, which they learn from all of them."""
    whole: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for block in blocks:
        for p in block.layer.parameters:
            for side, value in enumerate(slopes.get(p, ())):
                whole[block.layer.name.partition(".")[0]][side] += value
    together = {block.layer.weight: whole[block.layer.name.partition(".")[0]] for block in blocks}
    slopes = {p: (after, before) for p, (after, before) in together.items()}
    return reach.learn_reaches(blocks, slopes, undone, warms_up=warms_up, grows=grows)


def in_one_process(kind: str, parts: int) -> Shards:
    model = Shards(parts)
    cls, options = KINDS[kind]
    optimizer = cls(model, communicator=LocalCommunicator(), **{**SETTINGS, **options})
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = data(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def all_kinds(rank: int, world_size: int, data_ranks: int) -> dict[str, list[Tensor]]:
    """Every case in one launch: starting processes costs seconds."""
    return {kind: on_a_mesh(rank, world_size, kind, data_ranks) for kind in KINDS}


@pytest.mark.fast("1-2")
@pytest.mark.parametrize(("data_ranks", "parts"), [(1, 2), (1, 4), (2, 2)])
def test_shards_equal_one_process_with_these_blocks(
    data_ranks: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "learn_reaches", learn_together)
    outcomes = run_ranks(data_ranks * parts, all_kinds, data_ranks)
    for kind in KINDS:
        model = in_one_process(kind, parts)
        for rank, found in enumerate(outcomes):
            assert_all_near([found[kind]], model.shard(rank % parts), case=f"{kind}, rank {rank}")


def lamb_by_class(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """The weights by torch_optimizer's Lamb, by ours, and by K-FAC's, of a model with split and with whole layers."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for cls in (torch_optimizer.Lamb, MultiTensorLamb, KFACLAMB):
        model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if cls is KFACLAMB:
            optimizer: Any = cls(model, lr=0.01, weight_decay=0.1, communicator=LocalCommunicator(), **SETTINGS)
        else:
            optimizer = cls(model.parameters(), lr=0.01, weight_decay=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found[cls.__name__] = [local(p) for p in model.parameters()]
    return found


def test_lamb_takes_split_and_whole_weights_in_one_group() -> None:
    """Its norms are those of whole weights, as in torch_optimizer, which steps through single ones."""
    for found in run_ranks(2, lamb_by_class):
        assert_all_near([found["MultiTensorLamb"]], found["Lamb"])
        assert all(bool(p.isfinite().all()) for p in found["KFACLAMB"])
        pairs = zip(found["KFACLAMB"], found["Lamb"], strict=True)
        assert not any(torch.equal(a, b) for a, b in pairs)


def with_layout(rank: int, world_size: int, name: str) -> dict[str, bool]:
    """Whether the layers of a split network have been seen, by name."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).double()
    parallelize_module(model, mesh, LAYOUTS[name])
    optimizer = KFACSGD(model, lr=0.1, communicator=LocalCommunicator(), **SETTINGS)
    for step in range(2):
        optimizer.zero_grad()
        output = model(data(step)[0])
        (output.to_local() if isinstance(output, DTensor) else output).square().mean().backward()
        optimizer.step()
    return {block.layer.name: block.has_data() for block in optimizer.curvature.stages.blocks}


LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "a part of the rows": {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Shard(0))},
    "DTensors": {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)},
    "whole outputs": {"0": ColwiseParallel(output_layouts=Replicate())},
}
UNSEEN = {"a part of the rows": "2", "DTensors": "2", "whole outputs": "0"}


@pytest.mark.filterwarnings("ignore:.*K-FAC")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_whose_output_is_not_their_own_train_by_the_base_rule(name: str) -> None:
    for seen in run_ranks(2, with_layout, name):
        assert seen == {layer: layer != UNSEEN.get(name) for layer in seen}


def look_at_inputs(rank: int, world_size: int) -> list[list[Tensor]]:
    """Trained as it is, and with a derivative by the inputs before every step."""
    mesh, found = init_device_mesh("cpu", (world_size,)), []
    for looks in (False, True):
        model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = KFACSGD(model, lr=0.1, communicator=LocalCommunicator(), **SETTINGS)
        for step in range(4):
            optimizer.zero_grad()
            x, y = data(step)
            if looks:
                given = (3 * x).requires_grad_()
                torch.autograd.grad(F.cross_entropy(model(given), y), given)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append([optimizer.curvature.factors(layer)[1] for layer in optimizer.curvature.layers])
    return found


def test_derivatives_by_inputs_leave_no_trace_on_split_layers() -> None:
    for without, found in run_ranks(2, look_at_inputs):
        assert_all_near([found], without, tolerance=0.0)


def wrap_split_layers(rank: int, world_size: int) -> dict[str, Any]:
    """Split layers in the wrapper that puts their weights elsewhere: left out of K-FAC, or not."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model")), {}
    for skipped in ((), ("0", "2")):
        model = parallelize_module(network(), mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        wrapped = DDP(model, device_mesh=mesh["data"])
        optimizer = KFACSGD(wrapped, lr=0.1, scaling=Graft(trust=1.0), skip_layers=skipped, **SETTINGS)
        parameters = list(
            optimizer.param_groups[0]["params"]
        )  # the wrapper leaves those of split layers out of modules
        try:
            for step in range(4):
                optimizer.zero_grad()
                x, y = data(step)
                share = slice(mesh["data"].get_local_rank(), None, 2)
                F.cross_entropy(wrapped(x[share]), y[share]).backward()
                optimizer.step()
            found["skipped"] = [p.detach() for p in parameters[4:]]
        except RuntimeError as error:
            found["refused"] = str(error)
    return found


def test_split_layers_in_a_wrapper_with_a_mesh() -> None:
    """They are refused with the remedy, and left out they train by the base rule beside the others."""
    outcomes, model = run_ranks(4, wrap_split_layers), network()
    optimizer = KFACSGD(model, lr=0.1, scaling=Graft(trust=1.0), skip_layers=["0", "2"], **SETTINGS)
    for step in range(4):
        optimizer.zero_grad()
        x, y = data(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert all("skip_layers" in found["refused"] and "device_mesh" in found["refused"] for found in outcomes)
    assert_all_near([found["skipped"] for found in outcomes], [p.detach() for p in list(model.parameters())[4:]])


def lamb_on_two_meshes(rank: int, world_size: int) -> list[Tensor]:
    """The whole weights after training on the same batches everywhere."""
    model = network()
    if world_size > 1:
        fully_shard(model[2], mesh=init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard")))
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = KFACLAMB(model, lr=0.01, weight_decay=0.1, scaling=Graft(trust=1.0), **SETTINGS)
    for step in range(3):
        x, y = data(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


@needs_sharding_on_cpus
def test_lamb_on_two_meshes() -> None:
    assert_all_near(run_ranks(2, lamb_on_two_meshes), lamb_on_two_meshes(0, 1))


# What is declined or refused -----------------------------------------------------------------------------------------


def table_of(model: nn.Module, mesh: DeviceMesh, plan: dict[str, Any], **options: Any) -> str:
    """The table of a model that is split over two ranks."""
    parallelize_module(model, mesh, plan)
    return str(KFACSGD(model, lr=0.1, **options).curvature)


class OfAllLayers:
    """A user's scaling that needs no learning rate and looks at all layers."""

    def multipliers(self, directions: Any, step: int) -> list[Tensor]:
        largest = max(float(d.direction.abs().max()) for d in directions)
        return [d.direction.new_tensor(1 / largest) for d in directions]


class OfEach(OfAllLayers):
    by_layer = True


def tables(rank: int, world_size: int) -> dict[str, str]:
    """By case the table, or the error's message."""
    mesh, pair = init_device_mesh("cpu", (world_size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    alone: dict[str, Any] = {"communicator": LocalCommunicator()}
    embedding = nn.Sequential(nn.Embedding(6, 4))
    found = {
        "covered": table_of(network(), mesh, pair, **alone),
        "with all ranks": table_of(network(), mesh, pair),
        "uneven": table_of(nn.Sequential(nn.Linear(4, 7)), mesh, {"0": ColwiseParallel()}, **alone),
        "no Linear": table_of(embedding, mesh, {"0": ColwiseParallel()}, **alone),
    }
    try:
        table_of(network(), mesh, pair, scaling="kl_clip", **alone)
    except ValueError as error:
        found["kl_clip"] = str(error)
    try:
        table_of(network(), mesh, pair, scaling=OfAllLayers(), **alone)
    except ValueError as error:
        found["of all layers"] = str(error)
    found["by layer"] = table_of(network(), mesh, pair, scaling=OfEach(), **alone)
    optimizer = KFACSGD(parallelize_module(network(), mesh, pair), lr=0.1, scaling="unit", **alone)
    try:
        optimizer.curvature.scaling = "kl_clip"  # type: ignore[assignment]
    except ValueError as error:
        found["kl_clip later"] = f"{error}, as before: {optimizer.curvature.scaling}"
    return found


def test_what_of_a_split_model_is_covered() -> None:
    for found in run_ranks(2, tables):
        covered = found["covered"].splitlines()
        rows = {line.split()[0]: line for line in covered if line.split()}
        assert rows["0"].split()[3:5] == ["6", "4"], "A of all columns and the bias, G of half of 8 rows"
        assert rows["2"].split()[3:5] == ["4", "4"], "A of half of 8 columns, without the bias, which is everyone's"
        assert all("this rank's shard" in rows[name] for name in ("0", "2"))
        assert "one bias for all shards" in rows["2.bias"] and "base" in rows["2.bias"]
        assert "shard" not in rows["3"] + rows["4"]
        declined = found["with all ranks"]
        assert declined.count("communicator= has ranks with other shards") == 3 and "one bias for all" in declined
        assert "split by tensor parallelism" in found["uneven"] and "split by tensor parallelism" in found["no Linear"]
        assert all("scaling=KLClip" in found[when] and "graft" in found[when] for when in ("kl_clip", "kl_clip later"))
        assert "as before: Unit" in found["kl_clip later"]
        assert "by_layer = True" in found["of all layers"] and "this rank's shard" in found["by layer"]


def through_one_folder(rank: int, world_size: int, folder: str) -> str:
    """A state of shards, saved and loaded by ``torch.distributed.checkpoint``: what became of it."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data", "model"))
    model = network()
    parallelize_module(model, mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    communicator = TorchCommunicator(mesh["data"].get_group())
    optimizers = [
        KFACSGD(model, lr=0.1, communicator=communicator, assignment=LayerWise("sharded"), **SETTINGS) for _ in range(2)
    ]
    fresh = get_optimizer_state_dict(model, optimizers[1])
    x, y = data(0)
    F.cross_entropy(model(x), y).backward()
    optimizers[0].step()
    dcp.save(get_optimizer_state_dict(model, optimizers[0]), checkpoint_id=folder)
    dcp.load(fresh, checkpoint_id=folder)
    try:
        set_optimizer_state_dict(model, optimizers[1], fresh)
    except ValueError as error:
        return str(error)
    return "loaded"


@needs_sharding_on_cpus
def test_a_folder_that_keeps_one_shard_s_factors_is_refused(tmp_path: Path) -> None:
    found = run_ranks(4, through_one_folder, str(tmp_path))
    told = [story for story in found if "a file of its own" in story]
    assert len(told) == 2 and len(set(found)) == 2, "those that have the other shard"


def largest_of_partial_sums(rank: int, world_size: int) -> float:
    mesh = init_device_mesh("cpu", (world_size,))
    parts = torch.tensor([[3.0, 1.0], [-3.0, 1.0]])
    return float(largest_entry([DTensor.from_local(parts[rank], mesh, [Partial()])]))


def test_the_largest_entry_of_a_gradient_that_ranks_have_to_add_up() -> None:
    assert run_ranks(2, largest_of_partial_sums) == [2.0, 2.0]
