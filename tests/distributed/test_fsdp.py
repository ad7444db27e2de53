"""FSDP2: layers are gathered for preconditioning and every rank steps on its shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from kfac_optim import KAISA, KFACLAMB, KFACSGD, Graft, KFACAdamW, LayerWise, TorchCommunicator
from kfac_optim.distributed import Communicator, sharding
from kfac_optim.steering import trust
from tests.helpers.compare import assert_all_near, assert_equal_on_ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, KINDS, OFTEN
from tests.helpers.training import average_gradients, data_of, share, train, trusts_of
from tests.helpers.versions import needs_flat_dicts, needs_ignored_parameters, needs_sharding_on_cpus

pytestmark = needs_sharding_on_cpus

SHAPE = (12, 4)
OPTIONS: dict[str, Any] = {**OFTEN, **FLOAT64}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    # 5 and 7 do not divide by the number of ranks: shards of unequal sizes. PReLU's one number is on one rank alone.
    return nn.Sequential(
        nn.Linear(4, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5), nn.PReLU(), nn.Linear(5, 3)
    ).double()


def whole(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor().clone() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def shard(model: nn.Sequential, how: str) -> None:
    for layer in model if how == "per layer" else ():
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)


def trained(rank: int, world_size: int, kind: str, how: str, options: dict[str, Any], steps: int = 7) -> list[Tensor]:
    model = make()
    if world_size > 1:
        shard(model, how)
    cls, base = KINDS[kind]
    optimizer = cls(model, **{**base, **OPTIONS, **options})
    train(model, optimizer, range(steps), shape=SHAPE, rank=rank, world_size=world_size)
    if world_size > 1:
        assert all(isinstance(p, DTensor) for p in model.parameters())
    return whole(model)


class Plain(TorchCommunicator):
    """One that cannot exchange shards, so that all ranks gather all layers."""

    _start_exchange = Communicator._start_exchange  # as of a class that has none


class Small(TorchCommunicator):
    """With buckets of few numbers."""

    bucket_bytes = 100


# Layer-wise, by SGD on directions.
MORE: dict[str, Callable[[], dict[str, Any]]] = {
    "sharded factors": lambda: {"assignment": LayerWise("sharded")},
    "all layers at once": lambda: {"scaling": "kl_clip"},
    "everything gathered": lambda: {"communicator": Plain()},
    "small buckets": lambda: {"communicator": Small()},
}


def train_all(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    found = {}
    for kind in KINDS:
        for how, assignment in (("per layer", "factor-wise"), ("root", "layer-wise")):
            found[f"{kind}, {how}"] = trained(rank, world_size, kind, how, {"assignment": assignment})
    for name, options in MORE.items():
        found[f"sgd, {name}"] = trained(rank, world_size, "sgd", "per layer", {"assignment": LayerWise(), **options()})
    return found


@pytest.mark.fast("2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_equal_one_process(world_size: int) -> None:
    outcomes = run_ranks(world_size, train_all)
    for kind in KINDS:
        expected = trained(0, 1, kind, "", {})
        for how in ("per layer", "root"):
            assert_all_near([found[f"{kind}, {how}"] for found in outcomes], expected)
    for name in MORE:
        options = {"scaling": "kl_clip"} if name == "all layers at once" else {}
        assert_all_near([found[f"sgd, {name}"] for found in outcomes], trained(0, 1, "sgd", "", options))


def train_by_multi_tensor_nesterov(rank: int, world_size: int) -> list[Tensor]:
    options = {"nesterov": True, "momentum": 0.8, "weight_decay": 0.0, "precondition": "momentum"}
    more = {"scaling": Graft(trust=1.0), "foreach": world_size > 1}
    return trained(rank, world_size, "sgd", "per layer", options | more)


def test_nesterov_that_torch_writes_over_the_gradients_of_shards() -> None:
    expected = train_by_multi_tensor_nesterov(0, 1)
    assert_all_near(run_ranks(2, train_by_multi_tensor_nesterov), expected)


def narrow_head(rank: int, world_size: int) -> list[Tensor]:
    """One output: the bias has one row on the first rank and none on the others, the weight likewise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 1)).double()
    if world_size > 1:
        shard(model, "per layer")
    optimizer = KFACSGD(
        model, lr=0.05, momentum=0.9, assignment=LayerWise("sharded"), scaling=Graft(trust=1.0), **OPTIONS
    )

    def loss(output: Tensor, classes: Tensor) -> Tensor:
        return F.mse_loss(output.squeeze(-1), classes.double())

    train(model, optimizer, range(7), shape=SHAPE, loss=loss, rank=rank, world_size=world_size)
    return whole(model)


def test_a_head_of_one_row_with_sharded_factors() -> None:
    assert_all_near(run_ranks(2, narrow_head), narrow_head(0, 1))


class Decoder(nn.Module):
    """Attention of all kinds: to itself, to another sequence (packed weights, in parts), with widths of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.wide = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(1, (3, 4))
        rows = self.layer(rows, rows.flip(1).sin())
        keys, values = rows[..., :3].cos(), F.pad(rows, (0, 1))
        return self.head(self.wide(rows, keys, values)[0].mean(1))


def attends(rank: int, world_size: int) -> tuple[list[Tensor], str]:
    torch.manual_seed(0)
    model = Decoder().double()
    if world_size > 1:
        fully_shard(model.layer)
        fully_shard(model)
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9, scaling=Graft(trust=1.0), **OPTIONS)
    train(model, optimizer, range(7), shape=(12, 12), rank=rank, world_size=world_size)
    return whole(model), str(optimizer.curvature)


def test_attention_is_seen() -> None:
    """While a module runs FSDP2 has other parameters in the places of those that the optimizer steps on."""
    expected, _ = attends(0, 1)
    outcomes = run_ranks(2, attends)
    assert_all_near([weights for weights, _ in outcomes], expected)
    assert all("14 layers preconditioned" in table and "never seen" not in table for _, table in outcomes)


class Words(nn.Module):
    """Token numbers have one dimension less than what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 5, padding_idx=0), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words((2 * x).abs().long().clamp(max=6)).mean(1))


def reads(rank: int, world_size: int, how: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Words().double()
    if world_size > 1:
        for module in (model.words, model) if how == "per layer" else (model,):
            fully_shard(module)
    optimizer = KFACSGD(model, lr=0.5, momentum=0.9, scaling=Graft(trust=1.0), **OPTIONS)
    train(model, optimizer, range(7), shape=SHAPE, rank=rank, world_size=world_size)
    assert all(block.has_data() for block in optimizer.curvature.stages.blocks)
    return whole(model)


@pytest.mark.parametrize("how", ["per layer", "root"])
def test_embeddings_are_seen(how: str) -> None:
    assert_all_near(run_ranks(2, reads, how), reads(0, 1, how))


def scales(rank: int, world_size: int) -> list[Tensor]:
    """Two parameters of one number each, which LAMB would treat side by side."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 3)).double()
    if world_size > 1:
        fully_shard(model)
    optimizer = KFACLAMB(model, lr=0.01, scaling=Graft(trust=1.0), **OPTIONS)
    train(model, optimizer, range(4), shape=SHAPE, rank=rank, world_size=world_size)
    numbers = [state[key] for state in optimizer.state.values() for key in ("weight_norm", "adam_norm", "trust_ratio")]
    assert not any(isinstance(number, DTensor) for number in numbers), "parts of norms can't be saved"
    return whole(model)


def test_lamb_with_parameters_of_one_number() -> None:
    assert_all_near(run_ranks(2, scales), scales(0, 1))


def exchanged(rank: int, world_size: int) -> dict[str, bool]:
    """Whether only shards travelled, as many bytes as it takes, while nothing was gathered on all ranks."""
    model = make()
    shard(model, "per layer")
    optimizer = KFACSGD(model, lr=0.1, precondition="gradient", assignment="layer-wise", **OPTIONS)
    engine, gather = optimizer.curvature, DTensor.full_tensor

    def refuse(tensor: DTensor) -> Tensor:
        assert tensor.dim() == 0, "gathered on every rank"
        return gather(tensor)

    with mock.patch.object(DTensor, "full_tensor", refuse):
        train(model, optimizer, range(5), shape=SHAPE, rank=rank, world_size=world_size)
    own = others = 0
    for layer, work in zip(engine.layers, engine.stages.ranks.assignment.layers, strict=True):
        for p in layer.parameters:
            here = p.to_local().numel() * 8
            own += (p.numel() * 8 - here) if work.gradient_workers == (rank,) else 0
            others += here if work.gradient_workers != (rank,) else 0
    traffic = engine.stages.comm.traffic
    return {
        "to the workers": traffic["gradients"] == [5.0 * others, 5.0 * own],
        "back": traffic["directions"] == [5.0 * own, 5.0 * others],
    }


def test_only_gradient_workers_gather_a_layer() -> None:
    assert run_ranks(3, exchanged) == [{"to the workers": True, "back": True}] * 3


TURNING: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (KFACSGD, {"lr": 1.2, "momentum": 0.9}),
    "without momentum": (KFACSGD, {"lr": 2.0}),
    "adamw": (KFACAdamW, {"lr": 0.1, "weight_decay": 0.1}),
}


def without_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's as versions before 2.12 have it."""

    def strict(tensors: list[Tensor], *args: Any) -> Any:
        assert not any(isinstance(tensor, DTensor) for tensor in tensors)
        return function(tensors, *args)

    return strict


def train_turning(
    rank: int, world_size: int, assignment: str, skipped: Sequence[str]
) -> dict[str, tuple[list[Tensor], list[float], float]]:
    """At rates so large that trust rises, and two of three steps repeat the change of the one before."""
    trust._YOUNG, found = 1, {}
    for kind, (cls, options) in TURNING.items():
        model = make()
        if world_size > 1:
            shard(model, "per layer")
            torch._foreach_lerp = without_shards(torch._foreach_lerp)
        optimizer = cls(model, **options, **OPTIONS, assignment=assignment, skip_layers=skipped)
        trusts = trusts_of(model, optimizer, 10, shape=SHAPE, rank=rank, world_size=world_size)
        plan = optimizer.curvature.stages.plan()
        found[kind] = whole(model), [*trusts, plan.graft], plan.brake.usual
    return found


@pytest.mark.fast("layer-wise")
@pytest.mark.usefixtures("soon_grown")
@pytest.mark.parametrize(
    ("assignment", "skipped"),
    [("factor-wise", ()), ("layer-wise", ()), ("layer-wise", ("0", "2", "3"))],
    ids=["factor-wise", "layer-wise", "one rank has no directions"],
)
def test_turned_and_repeated_steps_on_shards(assignment: str, skipped: Sequence[str]) -> None:
    outcomes = run_ranks(2, train_turning, assignment, skipped)
    expected = train_turning(0, 1, assignment, skipped)
    for kind, (weights, trusts, usual) in expected.items():
        repeated = [step for step in range(2, 10, 3) if min(trusts[step - 1 : step + 1]) > 0]
        assert repeated, trusts
        assert all(found[kind][1] == trusts for found in outcomes)
        assert usual > 0
        assert all(found[kind][2] == pytest.approx(usual, rel=1e-5) for found in outcomes)
        assert_all_near([found[kind][0] for found in outcomes], weights)


def gather_shards(rank: int, world_size: int, limit: int) -> tuple[bool, int, bool]:
    """Rows that do not divide by the ranks, and fewer than there are ranks; of two types and on a mesh of two kinds."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("rows",))
    shapes = [(7, 4), (1,), (5, 2, 3), (2, 3), (3,)]
    wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    wholes.append(wholes[0].double())
    shards: list[Tensor] = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in wholes]
    columns = distribute_tensor(wholes[0], mesh, [Shard(1)])
    with mock.patch.object(sharding, "_BUCKET_NUMEL", limit), CommDebugMode() as counted:
        found = sharding.all_gathered([*shards, wholes[3], columns])
    equal = all(torch.equal(a, b) for a, b in zip(found, [*wholes, wholes[3], wholes[0]], strict=True))
    return equal, sum(counted.get_comm_counts().values()), found[6] is wholes[3]


@pytest.mark.parametrize(("world_size", "limit", "expected"), [(2, 2**20, 3), (3, 2**20, 3), (3, 30, 5)])
def test_shards_are_gathered_together(world_size: int, limit: int, expected: int) -> None:
    """Those of one type by one collective for each bucket; columns, which FSDP2 does not make, on their own."""
    assert run_ranks(world_size, gather_shards, limit) == [(True, expected, True)] * world_size


def count_gathers(rank: int, world_size: int) -> list[int]:
    model, counts = make(), []
    shard(model, "whole")
    optimizer = KFACAdamW(model, lr=0.1, **OPTIONS)
    directions = optimizer.curvature.directions

    def counted(*args: Any, **keywords: Any) -> Any:
        with CommDebugMode() as seen:
            found = directions(*args, **keywords)
        counts.append(sum(seen.get_comm_counts().values()))
        return found

    with mock.patch.object(type(optimizer.curvature), "directions", staticmethod(counted)):
        trusts_of(model, optimizer, 3, shape=SHAPE, rank=rank, world_size=world_size)
    return counts


def test_a_step_gathers_all_layers_by_one_collective() -> None:
    """Moments and updates, factor-wise, where every rank preconditions each layer."""
    for counts in run_ranks(2, count_gathers):
        assert counts and set(counts) == {1}


def train_bf16(rank: int, world_size: int) -> list[Tensor]:
    model = make().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = KFACSGD(model, lr=0.1, damping=0.1, factor_update_steps=1, inv_update_steps=2)
    losses = []
    for _ in range(12):
        inputs, classes = share(data_of(0, SHAPE), rank, world_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.float()).float(), classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < losses[0]
    assert all(
        state["kfac"]["current"]["A"]["value"].dtype is torch.float32
        for state in optimizer.state.values()
        if "kfac" in state
    )
    return whole(model)


@pytest.mark.slow
def test_mixed_precision() -> None:
    assert_equal_on_ranks(run_ranks(2, train_bf16))


def resume(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Four steps, a state through torch.distributed.checkpoint's helpers, three more steps."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
        train(model, optimizer, which, shape=SHAPE, rank=rank, world_size=world_size)

    model = make()
    shard(model, "per layer")
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **OPTIONS)
    steps(model, optimizer, range(4))
    optimizer.curvature.synchronize()
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))  # loading shares its tensors
    other = make()
    shard(other, "per layer")
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    resumed = KFACSGD(other, lr=0.1, momentum=0.9, **OPTIONS)
    set_optimizer_state_dict(other, resumed, state)
    steps(model, optimizer, range(4, 9))
    steps(other, resumed, range(4, 9))
    return whole(model), whole(other)


def with_a_nan(rank: int, world_size: int) -> tuple[int, bool]:
    """One rank's part of a gradient is NaN: the steps skipped, and whether the weights have stayed."""
    model = make()
    shard(model, "per layer")
    optimizer = KFACSGD(model, lr=0.1, **OPTIONS)
    before = whole(model)

    def poison() -> None:
        if rank == world_size - 1:
            model[0].weight.grad.to_local()[0, 0] = torch.nan

    train(model, optimizer, [0], shape=SHAPE, rank=rank, world_size=world_size, before_step=poison)
    same = all(torch.equal(p, q) for p, q in zip(whole(model), before, strict=True))
    return optimizer.curvature.skipped_steps, same


@pytest.mark.slow
def test_a_nan_in_one_shard_is_a_skipped_step_everywhere() -> None:
    assert run_ranks(2, with_a_nan) == [(1, True)] * 2


def train_after_probes(rank: int, world_size: int) -> list[Tensor]:
    """Before every step a pass whose gradients somebody looks at and zeroes in place."""
    model = make()
    if world_size > 1:
        shard(model, "per layer")
    optimizer = KFACSGD(model, lr=0.1, **OPTIONS)
    for step in range(5):
        inputs, classes = share(data_of(step, SHAPE), rank, world_size)
        F.cross_entropy(model(10 * inputs), classes).backward()
        model.zero_grad(set_to_none=False)
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def test_shards_of_gradients_that_are_zeroed_are_thrown_away() -> None:
    assert_all_near(run_ranks(2, train_after_probes), train_after_probes(0, 1))


def train_with_hooks(rank: int, world_size: int) -> list[Tensor]:
    """A layer has a hook of the user's that replaces its output."""
    model = make()
    if world_size > 1:
        shard(model, "per layer")
    model[3].register_forward_hook(lambda module, args, output: 3 * output)
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, scaling=Graft(trust=1.0), **OPTIONS)
    train(model, optimizer, range(7), shape=SHAPE, rank=rank, world_size=world_size)
    return whole(model)


def test_hooks_that_replace_the_outputs_of_sharded_layers() -> None:
    assert_all_near(run_ranks(2, train_with_hooks), train_with_hooks(0, 1))


def look_at_inputs(rank: int, world_size: int, how: str) -> list[list[Tensor]]:
    """Trained as it is, and with a derivative by the inputs before every step, as adversarial examples take it."""
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        model = Decoder().double()
        if how == "per layer":
            for part in model.children():
                fully_shard(part)
        fully_shard(model)
        optimizer = KFACSGD(model, lr=0.05, momentum=0.9, scaling=Graft(trust=1.0), **OPTIONS)
        for step in range(5):
            inputs, classes = share(data_of(step, (12, 12)), rank, world_size)
            optimizer.zero_grad()
            if looks:
                given = (3 * inputs).requires_grad_()
                torch.autograd.grad(F.cross_entropy(model(given), classes), given)
            F.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
        found.append(whole(model))
    return found


@pytest.mark.parametrize("how", ["per layer", "root"])
def test_derivatives_by_inputs_leave_no_trace_on_shards(how: str) -> None:
    for without, found in run_ranks(2, look_at_inputs, how):
        assert_all_near([found], without, tolerance=0.0)


def train_hybrid(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """HSDP: shards over two ranks, replicated over two."""
    found = {}
    for assignment in ("factor-wise", "layer-wise", KAISA(grad_worker_fraction=0.5)):
        model = make()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for part in (model[0], model):
            fully_shard(part, mesh=mesh)
        optimizer = KFACSGD(model, lr=0.1, momentum=0.9, assignment=assignment, **OPTIONS)
        assert len(optimizer.curvature.layers) == 4
        train(model, optimizer, range(7), shape=SHAPE, rank=rank, world_size=world_size)
        found[str(assignment)] = whole(model)
    return found


@pytest.mark.slow
def test_hybrid_shards_equal_one_process() -> None:
    outcomes = run_ranks(4, train_hybrid)
    expected = trained(0, 1, "sgd", "", {"weight_decay": 0})
    for assignment in outcomes[0]:
        assert_all_near([found[assignment] for found in outcomes], expected)


class Container:
    """Optimizers as torchtitan keeps them: made of parameters, in groups with names; one flat state, for any ranks.

    It has a state from the beginning: torch.distributed.checkpoint takes a step on zero gradients.
    """

    FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model: nn.Module, **options: Any) -> None:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "name": "matrices"}, {"params": rest, "name": "rest", "weight_decay": 0.0}]
        self.model, self.optimizer = model, KFACAdamW(groups, lr=0.01, **options)
        self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts, by names of parameters."""
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it up."""
        set_optimizer_state_dict(self.model, self.optimizer, state, options=self.FLAT)


def in_a_container(rank: int, world_size: int, folder: str) -> list[list[Tensor]]:
    """Trained without a stop, and resumed from a folder."""

    def begin() -> Container:
        model = make()
        if world_size > 1:
            shard(model, "per layer")
        return Container(model, **OPTIONS, assignment=LayerWise("sharded"))

    def steps(container: Container, which: range) -> None:
        train(container.model, container.optimizer, which, shape=SHAPE, rank=rank, world_size=world_size)

    first = begin()
    steps(first, range(4))
    first.optimizer.curvature.synchronize()
    if world_size > 1:
        dcp.save({"model": first.model.state_dict(), "optimizer": first.state_dict()}, checkpoint_id=folder)
    steps(first, range(4, 9))
    if world_size == 1:
        return [whole(first.model)]
    second = begin()
    state = {"model": second.model.state_dict(), "optimizer": second.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    second.model.load_state_dict(state["model"])
    second.load_state_dict(state["optimizer"])
    assert second.optimizer.curvature.step_count == 4
    steps(second, range(4, 9))
    return [whole(first.model), whole(second.model)]


@needs_flat_dicts
@pytest.mark.slow
def test_an_optimizer_container(tmp_path: Path) -> None:
    (expected,) = in_a_container(0, 1, "")
    for found in run_ranks(2, in_a_container, str(tmp_path)):
        assert_all_near(found, expected)


@pytest.mark.slow
def test_state_through_distributed_checkpoint() -> None:
    for uninterrupted, resumed in run_ranks(2, resume):
        assert_all_near([uninterrupted], resumed)


def go_on_in_shards(rank: int, world_size: int) -> list[list[Tensor]]:
    """Trained by ranks that all have the same batches, whole, and gone on from there, whole and in shards."""
    model = make()
    optimizer = KFACAdamW(model, lr=0.01, **FLOAT64)
    train(model, optimizer, range(6), shape=SHAPE)
    weights, state = copy.deepcopy((model.state_dict(), get_optimizer_state_dict(model, optimizer)))
    train(model, optimizer, range(6, 10), shape=SHAPE)
    other = make()
    other.load_state_dict(weights)
    shard(other, "per layer")
    resumed = KFACAdamW(other, lr=0.01, **FLOAT64)
    set_optimizer_state_dict(other, resumed, state, options=StateDictOptions(full_state_dict=True))
    train(other, resumed, range(6, 10), shape=SHAPE)
    return [whole(model), whole(other)]


def test_a_state_of_whole_weights_is_gone_on_from_in_shards() -> None:
    for expected, found in run_ranks(2, go_on_in_shards):
        assert_all_near([found], expected)


def build_before(rank: int, world_size: int, swap: bool) -> str:
    """The optimizer first, ``fully_shard`` after it; with ``swap`` the groups get the new parameters (Accelerate)."""
    model = make()
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **OPTIONS)
    names = {p: name for name, p in model.named_parameters()}
    shard(model, "per layer")
    new = dict(model.named_parameters())
    for group in optimizer.param_groups if swap else ():
        group["params"] = [new[names[p]] for p in group["params"]]
    try:
        for step in range(7):
            inputs, classes = share(data_of(step, SHAPE), rank, world_size)
            model.zero_grad()
            F.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    expected = trained(rank, world_size, "sgd", "per layer", {"weight_decay": 0})
    for p, q in zip(whole(model), expected, strict=True):
        torch.testing.assert_close(p, q)
    return "trained"


@pytest.mark.slow
def test_sharding_after_the_optimizer_is_refused_or_followed() -> None:
    for story in run_ranks(2, build_before, False):
        assert "fully_shard" in story and "replaced" in story
    assert run_ranks(2, build_before, True) == ["trained", "trained"]


def evaluate(rank: int, world_size: int) -> dict[str, str]:
    """An evaluation, after which FSDP2 keeps whole weights, before the optimizer is built or right before a step."""
    stories = {}
    for when in ("built after it", "before the step", "resharded"):
        model = make()
        fully_shard(model)
        inputs, classes = share(data_of(0, SHAPE), rank, world_size)
        if when == "built after it":
            with torch.no_grad():
                model(inputs)
        optimizer = KFACSGD(model, lr=0.1, **OPTIONS)
        F.cross_entropy(model(inputs), classes).backward()
        with torch.no_grad():
            model(inputs)
        if when != "before the step":
            model.reshard()
        try:
            optimizer.step()
            stories[when] = "trained"
        except RuntimeError as error:
            stories[when] = str(error)
    return stories


def test_whole_weights_in_the_places_of_shards_are_refused_with_the_remedy() -> None:
    """Torch's own optimizers would change the shards, and the next forward pass use the whole weights of before."""
    for stories in run_ranks(2, evaluate):
        assert stories.pop("resharded") == "trained"
        assert all("reshard()" in story for story in stories.values()), stories
        assert "of '0', '2', '3', '5'" in stories["before the step"]


def flatten(rank: int, world_size: int) -> dict[tuple[bool, str], str]:
    """Torch's first FSDP, in both of its modes, around the model before and after the optimizer was built."""
    stories = {}
    for original in (False, True):
        for when in ("wrapped first", "its parameters", "built first"):
            model: nn.Module = make()
            try:
                optimizer = KFACSGD(model, lr=0.1) if when == "built first" else None
                model = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
                if optimizer is None:
                    optimizer = KFACSGD(model if when == "wrapped first" else model.parameters(), lr=0.1)
                inputs, classes = data_of(rank, SHAPE)
                F.cross_entropy(model(inputs), classes).backward()
                optimizer.step()
            except (TypeError, RuntimeError) as error:
                stories[original, when] = str(error)
    return stories


@pytest.mark.slow
def test_the_first_fsdp_is_refused_with_the_remedy() -> None:
    """Its flattened pieces are no matrices; all of it would train by the base rule, or fail somewhere deep inside."""
    for stories in run_ranks(2, flatten):
        assert len(stories) == 6
        assert all("fully_shard" in story for story in stories.values()), stories


def tensor_parallel(rank: int, world_size: int) -> tuple[list[str], bool]:
    """Weights split by tensor parallelism are declined with the reason and train by the base rule."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = KFACSGD(model, lr=0.1)
    before = [p.full_tensor().clone() for p in model.parameters()]
    torch.manual_seed(1)
    F.mse_loss(model(torch.randn(6, 4)), torch.randn(6, 4)).backward()
    gradients = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    optimizer.step()
    for p, old, grad in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(p.full_tensor(), old - 0.1 * grad)
    return [note for _, note in optimizer.curvature.stages.trained.uncovered.values()], bool(optimizer.curvature.layers)


@pytest.mark.slow
def test_tensor_parallel_layers_are_declined() -> None:
    for notes, any_layers in run_ranks(2, tensor_parallel):
        assert not any_layers
        assert any("tensor parallel" in note for note in notes)


def partly_sharded(rank: int, world_size: int, assignment: str) -> list[Tensor]:
    """Only the first layer is sharded; the others' gradients are averaged by hand."""
    model = make()
    fully_shard(model[0])
    optimizer = KFACSGD(
        model, lr=0.1, momentum=0.9, weight_decay=1e-3, scaling=Graft(trust=1.0), **OPTIONS, assignment=assignment
    )
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    everyone = {"shape": SHAPE, "rank": rank, "world_size": world_size}
    train(model, optimizer, range(7), before_step=lambda: average_gradients(plain), **everyone)
    return whole(model)


@pytest.mark.fast("layer-wise")
@pytest.mark.parametrize("assignment", ["factor-wise", "layer-wise"])
def test_sharded_and_plain_parameters_in_one_model(assignment: str) -> None:
    assert_all_near(run_ranks(2, partly_sharded, assignment), trained(0, 1, "sgd", "", {"scaling": Graft(trust=1.0)}))


def train_beside_what_stays_whole(rank: int, world_size: int) -> list[Tensor]:
    """A parameter of a sharded one's shape, in the same module, that FSDP2 is told to leave alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 4)).double()
    left = model[1].bias
    if world_size > 1:
        fully_shard(model, ignored_params={left})
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9, **FLOAT64, **OFTEN)
    for step in range(5):
        inputs, classes = share(data_of(step, (16, 8)), rank, world_size)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.double()), classes % 4).backward()
        if world_size > 1:
            torch.distributed.all_reduce(left.grad)
            left.grad.div_(world_size)
        optimizer.step()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


@needs_ignored_parameters
def test_parameters_that_stay_whole_beside_shards() -> None:
    assert_all_near(run_ranks(2, train_beside_what_stays_whole), train_beside_what_stays_whole(0, 1))
