"""Calls of recurrent modules as scripts make them: by name, scaled, in autocast, compiled, hooked, sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from kfac_optim import KFACSGD
from kfac_optim.layers import RecurrentCall, tensors_of
from tests.helpers.compare import assert_all_near, assert_near, assert_same_factors, assert_same_weights
from tests.helpers.ranks import run_ranks
from tests.helpers.reads import HostReads
from tests.helpers.recurrent import KINDS, Unrolled
from tests.helpers.settings import SETTINGS
from tests.helpers.versions import needs_sharding_on_cpus

D_IN, HIDDEN = 3, 4

double = pytest.mark.usefixtures("double")


class Tagger(nn.Module):
    """A recurrent module, or what stands for it, under a Linear."""

    def __init__(self, rnn: Any) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        """``x``: ``[T, n, d]``; returns ``[T, n, 2]``."""
        y: Tensor = self.head(self.rnn(x, state)[0])
        return y


class Named(Tagger):
    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        y: Tensor = self.head(self.rnn(hx=state, input=x)[0])
        return y


def made(model: nn.Module, **options: Any) -> KFACSGD:
    return KFACSGD(model, lr=0.05, **{**SETTINGS, "max_factor_dim": None, **options})


def assert_alike(model: nn.Module, twin: nn.Module, *ways: Callable[[nn.Module, Tensor, Any], Tensor]) -> None:
    """Both have the same factors and weights after steps on the loss that a way makes; the last way is the twin's."""
    runs = [(model, made(model), ways[0]), (twin, made(twin), ways[-1])]
    for own, optimizer, way in runs:
        generator = torch.Generator().manual_seed(2)
        for _ in range(5):
            x, h, c = (
                torch.randn(*shape, generator=generator) for shape in ((6, 5, D_IN), (2, 5, HIDDEN), (2, 5, HIDDEN))
            )
            optimizer.zero_grad()
            way(own, x, (h, c)).backward()
            optimizer.step()
    assert_same_factors(runs[0][1], runs[1][1], rel=1e-8)
    pairs = zip(runs[0][1].curvature.layers, runs[1][1].curvature.layers, strict=True)
    for p, q in ((p, q) for one, its in pairs for p, q in zip(one.parameters, its.parameters, strict=True)):
        assert_near(p.detach(), q.detach(), rel=1e-8)


def loss(model: nn.Module, x: Tensor, state: Any) -> Tensor:
    return model(x, state).square().mean()


@double
def test_input_and_state_may_be_given_by_name() -> None:
    model = Named(nn.LSTM(D_IN, HIDDEN, 2))
    twin = Tagger(copy.deepcopy(model.rnn))
    twin.load_state_dict(model.state_dict())
    assert_alike(model, twin, loss)


def with_other_weights(model: nn.Module, x: Tensor, state: Any) -> Tensor:
    own = {name: 1.5 * p for name, p in model.named_parameters()}
    return torch.func.functional_call(model, own, (x, state)).square().mean()


@double
def test_functional_call_computes_with_the_weights_that_it_is_given() -> None:
    model = Tagger(nn.LSTM(D_IN, HIDDEN, 2))
    twin = copy.deepcopy(model)
    twin.rnn = Unrolled(model.rnn)
    assert_alike(model, twin, with_other_weights)


@double
def test_hooks_that_change_the_output_run_later() -> None:
    """Gradients are those of what the module itself has returned."""
    model = Tagger(nn.LSTM(D_IN, HIDDEN, 2))
    twin = copy.deepcopy(model)
    twin.rnn = Unrolled(model.rnn)
    for own in (model, twin):
        own.rnn.register_forward_hook(lambda _, args, output: (3 * output[0], output[1]))
    assert_alike(model, twin, loss)


@double
def test_a_loss_scale_is_divided_out() -> None:
    model = Tagger(nn.LSTM(D_IN, HIDDEN))
    twin, x = copy.deepcopy(model), torch.randn(6, 5, D_IN)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, other = made(model, grad_scaler=scaler), made(twin)
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    twin(x).square().mean().backward()
    other.step()
    assert_same_factors(optimizer, other)


def test_factors_are_computed_outside_of_autocast() -> None:
    """Even if the backward pass runs inside; states may have less precision than the weights."""
    model = Tagger(nn.LSTM(D_IN, HIDDEN, 2))
    state, x = torch.randn(2, 2, 5, HIDDEN).bfloat16(), torch.randn(6, 5, D_IN)
    optimizers = []
    for inside in (False, True):
        own = copy.deepcopy(model)
        optimizers.append(made(own, factor_dtype=torch.float32))  # autocast leaves float64 alone
        with torch.autocast("cpu", torch.bfloat16):
            value = own(x, tuple(state if inside else state.float())).float().square().mean()
            if inside:
                value.backward()
        if not inside:
            value.backward()
        optimizers[-1].step()
    assert_same_factors(*optimizers)


@double
def test_evaluation_and_steps_without_statistics_break_no_graph_at_a_cell() -> None:
    """Torch traces cells, and would make a graph of each part between them."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(D_IN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            h = self.cell(x[0])
            for at in x[1:]:
                h = self.cell(at, h)
            return h

    model = Repeated()
    optimizer = KFACSGD(model, lr=0.05, **{**SETTINGS, "factor_update_steps": 10, "inv_update_steps": 10})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():  # the next step collects statistics
        compiled(torch.randn(3, 5, D_IN))
    for own in (model, compiled, compiled):
        optimizer.zero_grad()
        own(torch.randn(3, 5, D_IN)).square().mean().backward()
        optimizer.step()
    assert set(optimizer.curvature.report()["layers"]) == {"cell.ih", "cell.hh"}


@double
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRUCell])
def test_a_module_that_is_compiled_alone_trains_as_an_eager_one(cls: Any) -> None:
    model = cls(D_IN, HIDDEN)
    twin, x = copy.deepcopy(model), torch.randn(6, 5, D_IN)
    optimizers = [made(own) for own in (model, twin)]
    compiled = torch.compile(twin, backend="aot_eager")
    for given in x.unbind() if cls is nn.GRUCell else (x, -x, 2 * x, x):
        for own, optimizer in zip((model, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            own(given)[0].square().mean().backward()
            optimizer.step()
    assert_same_factors(*optimizers)
    assert_same_weights(model, twin)


def packed(lengths: Sequence[int]) -> PackedSequence:
    x = torch.randn(max(lengths), len(lengths), D_IN)
    return pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_lengths_of_packed_sequences(kind: str) -> None:
    """They are known on the host."""
    model = KINDS[kind](D_IN, HIDDEN, 2, bidirectional=True)
    optimizer = made(model)
    for given in (packed([2, 5, 1, 5]), packed([3, 3, 1])):
        y, state = model(given)
        with HostReads() as reads:
            (y.data.square().sum() + tensors_of(state)[0].sum()).backward()
        assert not reads.count
        optimizer.step()
    assert len(optimizer.curvature.report()["layers"]) == 8


@pytest.mark.parametrize("way", ["only the input's gradient", "no mean over positions"])
def test_no_pass_goes_back_through_time_for_nothing(way: str) -> None:
    """Nothing is computed where nothing is added."""
    model = nn.LSTM(D_IN, HIDDEN, 2)
    optimizer = made(model, weight_sharing="reduce" if "mean" in way else "expand")
    given = packed([2, 4, 1])
    given = given._replace(data=given.data.requires_grad_())
    with patch.object(RecurrentCall, "rows", autospec=True, side_effect=RecurrentCall.rows) as rows:
        loss = model(given)[0].data.square().sum()
        torch.autograd.grad(loss, given.data, retain_graph=True)
        assert not rows.called
        loss.backward()
    assert rows.called == ("mean" not in way)
    optimizer.step()


def replicated(rank: int, world_size: int) -> list[Tensor]:
    """The weights after training on packed sequences, one micro-batch for each of two ranks, or both in one process."""
    torch.manual_seed(0)
    model = nn.GRU(D_IN, HIDDEN, 2, bidirectional=True).double()
    optimizer = made(model)
    call: nn.Module = nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
    batches = [[packed([3, 5, 1]).to(torch.float64), packed([2, 2, 5]).to(torch.float64)] for _ in range(5)]
    for parts in batches:
        optimizer.zero_grad()
        for part in parts[rank:][::world_size]:
            y, state = call(part)
            ((y.data.square().sum() + state.sum()) * world_size / 2).backward()
        optimizer.step()
    assert len(optimizer.curvature.layers) == 8
    return [p.detach().clone() for p in model.parameters()]


def test_ranks_train_as_micro_batches_do() -> None:
    for found in run_ranks(2, replicated):
        for p, expected in zip(found, replicated(0, 1), strict=True):
            assert_near(p, expected)


def sharded(rank: int, world_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = Tagger(nn.LSTM(D_IN, HIDDEN)).double()
    if world_size > 1:
        fully_shard(model)
    optimizer = made(model, batch_dim=1, skip_layers=[] if world_size > 1 else ["rnn"])
    assert ("a sharded weight of a recurrent module" in str(optimizer.curvature)) == (world_size > 1)
    for x in torch.randn(4, 6, 8, D_IN, generator=torch.Generator().manual_seed(1)).double():
        optimizer.zero_grad()
        model(x.chunk(world_size, 1)[rank]).square().mean().backward()
        optimizer.step()
    return [(p.full_tensor() if world_size > 1 else p).detach().clone() for p in model.parameters()]  # type: ignore[operator]


@needs_sharding_on_cpus
def test_sharded_weights_are_declined() -> None:
    assert_all_near(run_ranks(2, sharded), sharded(0, 1))
