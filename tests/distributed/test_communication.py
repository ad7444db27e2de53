"""What travels between ranks: the verbs, the bytes, lazily pooled factors, and who works for whom."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.distributed.fake_pg import FakeStore

from kfac_optim import (
    KAISA,
    KFACSGD,
    Assignment,
    EigenSolver,
    FactorWise,
    HorovodCommunicator,
    KLClip,
    LayerCost,
    LayerWise,
    OfMean,
    constant_then_scaled,
    growing,
)
from kfac_optim.averages import Unpooled, fold_
from kfac_optim.distributed import Broadcast, Communicator, LayerAssignment, LocalCommunicator, TorchCommunicator
from kfac_optim.factors import FactorSpec, read
from tests.helpers.compare import assert_all_near, assert_equal_on_ranks, values
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, OFTEN
from tests.helpers.training import data_of, share, train

STEPS = 7


# Local sums: exchanging lazily is exchanging at every update ---------------------------------------------------------


@dataclass(frozen=True)
class History:
    """Updates of ranks and layers: who had data, how the past decays, and after which updates the ranks pool."""

    present: list[list[list[bool]]]  # [update][rank][layer]
    decays: list[float]
    slack: float
    pooled_after: list[bool]
    seed: int


@st.composite
def histories(draw: st.DrawFn) -> History:
    updates, ranks, layers = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    flags = st.lists(st.lists(st.booleans(), min_size=layers, max_size=layers), min_size=ranks, max_size=ranks)
    return History(
        draw(st.lists(flags, min_size=updates, max_size=updates)),
        draw(st.lists(st.sampled_from([0.0, 0.5, 0.95]) | st.floats(0, 0.99), min_size=updates, max_size=updates)),
        draw(st.sampled_from([1.0, 3.0, math.inf])),
        [*draw(st.lists(st.booleans(), min_size=updates - 1, max_size=updates - 1)), True],
        draw(st.integers(0, 2**32 - 1)),
    )


def assert_running_sums(average: dict[str, Tensor], total: Tensor, weight: float) -> None:
    """A running average is ``S / w``."""
    assert float(average["weight"]) == pytest.approx(weight, rel=1e-12)
    # Sums of terms of both signs: rounding is relative to their size, which is 1, over at most 28 of them.
    torch.testing.assert_close(read(average), total / weight if weight else total, rtol=1e-12, atol=1e-12)


@given(histories())
def test_pooling_now_and_then_is_exchanging_at_every_update(history: History) -> None:
    """S <- xi S + sum_r m_r and w <- xi w + sum_r w_r; no decay where no rank had data, less past where it is large."""
    generator = torch.Generator().manual_seed(history.seed)
    ranks, layers = len(history.present[0]), len(history.present[0][0])
    specs = (FactorSpec(1, 3), FactorSpec(2, 2))
    lazy = [[spec.empty(torch.float64, torch.device("cpu")) for spec in specs] for _ in range(layers)]
    sums = [[spec.zeros(torch.float64, torch.device("cpu")) for spec in specs] for _ in range(layers)]
    weights, sizes = ([[0.0, 0.0] for _ in range(layers)] for _ in range(2))
    local = [[(Unpooled(), Unpooled()) for _ in range(layers)] for _ in range(ranks)]
    for present, decay, pools in zip(history.present, history.decays, history.pooled_after, strict=True):
        for layer in range(layers):
            users = [rank for rank in range(ranks) if present[rank][layer]]
            if not users:
                continue
            own = {
                rank: [torch.randn(s.shape, generator=generator, dtype=torch.float64) for s in sums[layer]]
                for rank in users
            }
            seen = torch.rand(2, 2, generator=generator, dtype=torch.float64).add(0.1).pow(4).tolist()
            for side, (count, trace) in enumerate(seen):
                mean = sizes[layer][side] / weights[layer][side] if weights[layer][side] else 0.0
                xi = decay * min(1.0, history.slack * trace / count / mean) if mean else decay
                sums[layer][side] = xi * sums[layer][side] + sum(moments[side] for moments in own.values())
                weights[layer][side] = xi * weights[layer][side] + count
                sizes[layer][side] = xi * sizes[layer][side] + trace
            for rank in range(ranks):
                for update, moment, average, of_side in zip(
                    local[rank][layer], own.get(rank, (None, None)), lazy[layer], seen, strict=True
                ):
                    update.add(moment, average, *of_side, decay, history.slack)
        if not pools:
            continue
        for layer in range(layers):
            for side in range(2):
                of_ranks = [one[layer][side] for one in local]
                numbers = {(one.past, one.count, one.trace) for one in of_ranks}
                assert len(numbers) == 1, "decays and weights are the same on all ranks"
                parts = [one.sum for one in of_ranks if one.sum is not None]
                if parts:
                    fold_([(lazy[layer][side], of_ranks[0], torch.stack(parts).sum(0))])
        local = [[(Unpooled(), Unpooled()) for _ in range(layers)] for _ in range(ranks)]
    for layer, side in itertools.product(range(layers), range(2)):
        assert_running_sums(lazy[layer][side], sums[layer][side], weights[layer][side])


# The verbs on real ranks ---------------------------------------------------------------------------------------------

BUCKETS = {"one bucket": 25 * 2**20, "some buckets": 64, "a bucket each": 1}
SUM_SHAPES = [(3, 4), (), (1, 1), (2, 5), (1, 0), (7, 1), (), (2, 30)]
HALVES = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # unit roundoff
MAGNITUDES = [1.0, 1e-12, 1e8, 0.0, 3e-5]


def whole_numbers(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Tensors whose sums over ranks are exact."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-999, 999, shape, generator=generator).to(dtype) for shape in SUM_SHAPES]


def owners_of(world_size: int) -> list[int]:
    """Who gets which sum: neighbours have one owner or several."""
    return [(i // 3) % world_size for i in range(len(SUM_SHAPES))]


def several_types(rank: int) -> list[Tensor]:
    """Neighbours of different types, exact sums."""
    types = itertools.cycle([torch.float64, torch.float32])
    return [tensor.to(dtype) for tensor, dtype in zip(whole_numbers(rank, torch.float64), types, strict=False)]


def of_every_magnitude(rank: int) -> list[Tensor]:
    """Rows that float16 could not hold, rows of zeros on all ranks or on rank 0 alone, and 0-dim tensors."""
    generator = torch.Generator().manual_seed(rank)
    scales = torch.tensor(MAGNITUDES)[:, None]
    rows = torch.randn(len(MAGNITUDES), 50, generator=generator) * scales
    uneven = torch.randn(2, 40, generator=generator) * torch.logspace(-6, 6, 40)
    alone = torch.randn(1, 20, generator=generator) * (rank > 0)
    return [rows, torch.tensor(1e-9 * (rank + 1)), uneven, alone, torch.zeros(())]


def ring(tensors: Sequence[Tensor], world_size: int, itemsize: int | None = None) -> float:
    """Bytes that an all-reduce sends from, and as many it brings to, every rank of a ring."""
    size = sum(tensor.numel() * (itemsize or tensor.itemsize) for tensor in tensors)
    return 2 * (world_size - 1) / world_size * size


def packet(source: int, salt: int) -> list[Tensor]:
    """Any bits, in every type, odd sizes and layouts: NaNs with a payload and denormals among them."""
    generator = torch.Generator().manual_seed(100 * source + salt)

    def bits(dtype: torch.dtype, *shape: int) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)

    return [
        bits(torch.bfloat16, 3, 5),
        bits(torch.uint8, 7),
        bits(torch.float32, 2, 3),
        bits(torch.float32, 1).view(()),
        bits(torch.float32, 4, 3).mT,
        bits(torch.float16, 1),
        bits(torch.float64, 5),
        bits(torch.float32, 0, 4),
    ]


def room_for(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of ones of the same shapes and types."""
    return [torch.full_like(t, 1, memory_format=torch.contiguous_format) for t in tensors]


def broadcasts_of(world_size: int) -> list[tuple[int, tuple[int, ...]]]:
    """(source, members), in an order all ranks share: every group of ranks, from each of its members."""
    sizes = range(2, world_size + 1)
    groups = [members for size in sizes for members in itertools.combinations(range(world_size), size)]
    return [(source, members) for members in groups for source in members]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
    )


def use_the_verbs(rank: int, world_size: int) -> dict[Any, Any]:
    """Everything that the tests of the verbs look at, in one launch."""
    found: dict[Any, Any] = {}
    groups = sorted({members for _, members in broadcasts_of(world_size)})
    for name, bucket_bytes in BUCKETS.items():
        comm = TorchCommunicator()
        comm.bucket_bytes = bucket_bytes
        for dtype in (torch.float32, torch.float64):
            own = whole_numbers(rank, dtype)
            found["sum", name, dtype] = list(comm.sum(own, f"sum {dtype}"))
            found["reduce", name, dtype] = list(comm.sum(own, f"reduce {dtype}", owners=owners_of(world_size)))
            found["unchanged", name, dtype] = own
        found["several types", name] = list(comm.sum(several_types(rank), "several types"))
        for dtype in HALVES:
            half = TorchCommunicator(comm_dtype=dtype)
            half.bucket_bytes = bucket_bytes
            found["half", name, dtype] = list(half.sum(of_every_magnitude(rank), "half", compressed=True))
            found["half traffic", name, dtype] = half.traffic["half"]
            rows = of_every_magnitude(rank)
            owners = [i % world_size for i in range(len(rows))]
            found["half reduce", name, dtype] = list(half.sum(rows, "half reduce", owners=owners, compressed=True))
        comm.prepare(groups)
        broadcasts, received = [], []
        for salt, (source, members) in enumerate(broadcasts_of(world_size)):
            tensors = packet(source, salt)
            if source != rank:
                tensors = room_for(tensors)
            if rank in members:
                broadcasts.append(Broadcast(tensors, source, members))
            received.append(tensors)
        comm.send(broadcasts, "send")
        found["send", name] = received
        sent = [(to, t) for to in range(world_size) for t in packet(rank, 50 + to) if (rank + to) % 3 != 2]
        filled = [room_for(packet(rank, 0)) for _ in range(world_size)]
        into = [(source, t) for source, tensors in enumerate(filled) for t in tensors if (rank + source) % 3 != 2]
        comm.exchange(sent, into, "exchange")
        found["exchange", name] = filled
        before = {kind: list(totals) for kind, totals in comm.traffic.items()}
        comm.send([Broadcast([], 0, tuple(range(world_size)))], "nothing")
        found["nothing", name] = comm.traffic == before or comm.traffic
        found["traffic", name] = before
    if world_size == 3:
        group = dist.new_group([0, 2])
        if rank != 1:
            comm = TorchCommunicator(group)
            tensor = torch.full((2,), float(rank))
            comm.send([Broadcast([tensor], 1, (0, 1))], "send")
            found["group"] = (comm.rank, comm.world_size, tensor, *comm.sum([torch.tensor(10.0**rank)], "sum"))
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def verbs(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    """What every rank found."""
    return run_ranks(request.param, use_the_verbs)


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_order_whatever_the_buckets(verbs: list[dict[Any, Any]], bucket: str, dtype: torch.dtype) -> None:
    own = [whole_numbers(rank, dtype) for rank in range(len(verbs))]
    expected = [sum(parts[1:], parts[0]) for parts in zip(*own, strict=True)]
    for rank, found in enumerate(verbs):
        sums = found["sum", bucket, dtype]
        assert len(sums) == len(expected)
        for total, wanted in zip(sums, expected, strict=True):
            assert total.dtype == dtype and total.shape == wanted.shape
            assert torch.equal(total, wanted)
        for tensor, before in zip(found["unchanged", bucket, dtype], own[rank], strict=True):
            assert torch.equal(tensor, before), "what is summed stays as it was"


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_for_one_rank_is_the_sum_there(verbs: list[dict[Any, Any]], bucket: str, dtype: torch.dtype) -> None:
    own = [whole_numbers(rank, dtype) for rank in range(len(verbs))]
    expected = [sum(parts[1:], parts[0]) for parts in zip(*own, strict=True)]
    for rank, found in enumerate(verbs):
        for owner, total, wanted in zip(owners_of(len(verbs)), found["reduce", bucket, dtype], expected, strict=True):
            assert owner != rank or torch.equal(total, wanted)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_sums_of_several_types_keep_their_types(verbs: list[dict[Any, Any]], bucket: str) -> None:
    own = [several_types(rank) for rank in range(len(verbs))]
    expected = [sum(parts[1:], parts[0]) for parts in zip(*own, strict=True)]
    for found in verbs:
        for total, wanted in zip(found["several types", bucket], expected, strict=True):
            assert total.dtype == wanted.dtype
            assert torch.equal(total, wanted)


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_on_the_wire(verbs: list[dict[Any, Any]], bucket: str, dtype: torch.dtype) -> None:
    """Within what the format can hold, whatever the magnitude of a row; the same on every rank; zeros stay zeros."""
    ranks, roundoff = len(verbs), HALVES[dtype]
    own = [of_every_magnitude(rank) for rank in range(ranks)]
    for i, parts in enumerate(zip(*own, strict=True)):
        stacked = torch.stack(parts).double()
        total, size = stacked.sum(0), stacked.abs().sum(0)
        # Each part is rounded once on the wire, and R - 1 additions round once each what is at most the sum of sizes.
        bound = 1.01 * ranks * roundoff * size
        if dtype is torch.float16:  # below 2^-14 of what is sent, numbers are multiples of 2^-24
            largest = stacked.abs().amax((0, -1) if stacked.dim() > 1 else 0)
            bound = bound + 1.01 * ranks * 2.0**-25 * ranks * (largest[:, None] if largest.dim() else largest)
        for_one = verbs[i % ranks]["half reduce", bucket, dtype][i]
        assert bool(((for_one.double() - total).abs() <= bound).all()), (i, for_one, total)
        for found in verbs:
            result = found["half", bucket, dtype][i]
            assert result.dtype == torch.float32
            assert bool(((result.double() - total).abs() <= bound).all()), (i, result, total)
            assert torch.equal(result, verbs[0]["half", bucket, dtype][i]), "every rank has the same sum"
    everything = torch.cat([sum_.reshape(-1) for sum_ in verbs[0]["half", bucket, dtype]]).double()
    exact = torch.cat([torch.stack(parts).double().sum(0).reshape(-1) for parts in zip(*own, strict=True)])
    assert not torch.equal(everything, exact.float().double()), "it was rounded: the wire carries the format asked for"


@pytest.mark.parametrize("bucket", BUCKETS)
def test_what_is_sent_arrives_bit_for_bit(verbs: list[dict[Any, Any]], bucket: str) -> None:
    """From every rank to every group that it is in; ranks outside keep what they have."""
    for rank, found in enumerate(verbs):
        for salt, (source, members) in enumerate(broadcasts_of(len(verbs))):
            tensors, sent = found["send", bucket][salt], packet(source, salt)
            for tensor, wanted in zip(tensors, sent, strict=True):
                expected = wanted if rank in members else torch.full_like(wanted, 1)
                assert same_bits(tensor, expected), f"from {source} to {members} on {rank}: {tensor} is not {expected}"


@pytest.mark.parametrize("bucket", BUCKETS)
def test_what_is_exchanged_arrives_bit_for_bit(verbs: list[dict[Any, Any]], bucket: str) -> None:
    """From every rank to every rank, itself among them; some pairs have nothing for each other."""
    for rank, found in enumerate(verbs):
        for source, tensors in enumerate(found["exchange", bucket]):
            for tensor, wanted in zip(tensors, packet(source, 50 + rank), strict=True):
                expected = wanted if (rank + source) % 3 != 2 else torch.full_like(wanted, 1)
                assert same_bits(tensor, expected), f"from {source} on {rank}: {tensor} is not {expected}"


@pytest.mark.parametrize("bucket", BUCKETS)
def test_to_send_nothing_costs_nothing(verbs: list[dict[Any, Any]], bucket: str) -> None:
    for found in verbs:
        assert found["nothing", bucket] is True, found["nothing", bucket]


@pytest.mark.parametrize("bucket", BUCKETS)
def test_traffic_is_what_an_ideal_network_carries(verbs: list[dict[Any, Any]], bucket: str) -> None:
    ranks = len(verbs)
    for rank, found in enumerate(verbs):
        expected = {}
        for dtype in (torch.float32, torch.float64):
            share = ring(whole_numbers(rank, dtype), ranks)
            expected[f"sum {dtype}"] = [share, share]
            kept = [owner == rank for owner in owners_of(ranks)]
            sizes = [tensor.nbytes for tensor in whole_numbers(rank, dtype)]
            received = sum(size for size, here in zip(sizes, kept, strict=True) if here)
            expected[f"reduce {dtype}"] = [sum(sizes) - received, received]
        halves = of_every_magnitude(rank)
        share = ring(halves, ranks, 2)
        assert found["half traffic", bucket, torch.bfloat16] == pytest.approx([share, share], rel=1e-12)
        # The largest entries go before, one float32 for each row.
        share += ring([torch.empty(t.shape[0] if t.dim() else 1) for t in halves], ranks)
        assert found["half traffic", bucket, torch.float16] == pytest.approx([share, share], rel=1e-12)
        sent = received = 0
        for salt, (source, members) in enumerate(broadcasts_of(ranks)):
            size = sum(tensor.nbytes for tensor in packet(source, salt))
            sent += size * (source == rank)
            received += size * (rank in members and source != rank)
        expected["send"] = [sent, received]
        others = [source for source in range(ranks) if source != rank and (rank + source) % 3 != 2]
        size = sum(tensor.nbytes for tensor in packet(rank, 0)) * len(others)
        expected["exchange"] = [size, size]
        for kind, totals in expected.items():
            assert found["traffic", bucket][kind] == pytest.approx(totals, rel=1e-12), kind


@pytest.mark.parametrize("verbs", [3], indirect=True)  # with two ranks there is nobody outside
def test_ranks_of_a_process_group_are_counted_within_it(verbs: list[dict[Any, Any]]) -> None:
    """Ranks 0 and 2 of three are ranks 0 and 1 of their group."""
    for place, rank in enumerate((0, 2)):
        own_rank, size, sent, total = verbs[rank]["group"]
        assert (own_rank, size) == (place, 2)
        assert sent.tolist() == [2.0, 2.0]
        assert float(total) == 101.0
    assert "group" not in verbs[1]


def test_one_process_has_nobody_to_talk_to() -> None:
    comm = LocalCommunicator()
    own = whole_numbers(0, torch.float32)
    assert all(a is b for a, b in zip(comm.sum(own, "x", compressed=True), own, strict=True))
    comm.send([], "x")
    copy = torch.zeros_like(own[0])
    comm.exchange([(0, own[0])], [(0, copy)], "x")
    assert torch.equal(copy, own[0])
    assert comm.traffic == {}


def test_a_library_that_cannot_exchange_says_so() -> None:
    comm = LocalCommunicator(0, world_size=2)
    assert not comm.can_exchange
    with pytest.raises(TypeError, match="LocalCommunicator.exchange: needs _start_exchange"):
        comm.exchange([(1, torch.ones(2))], [(1, torch.ones(2))], "x")


def test_one_process_that_stands_for_a_rank_of_many_cannot_train() -> None:
    comm = LocalCommunicator(0, world_size=2)
    with pytest.raises(RuntimeError, match=r"LocalCommunicator sends nothing, .* for estimates alone"):
        list(comm.sum([torch.ones(2)], "x"))
    with pytest.raises(RuntimeError, match=r"LocalCommunicator sends nothing, .* for estimates alone"):
        comm.send([Broadcast([torch.ones(2)], 0, (0, 1))], "x")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """torch.distributed with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "half", 16])
def test_comm_dtype_is_checked_at_construction(dtype: Any) -> None:
    allowed = "must be one of None, torch.float16, torch.bfloat16, torch.float32, torch.float64"
    with pytest.raises(ValueError, match=re.escape(f"comm_dtype={dtype!r}: {allowed}")):
        TorchCommunicator(comm_dtype=dtype)
    for good in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert TorchCommunicator(comm_dtype=good).comm_dtype is good


def test_some_processes_can_make_no_groups_among_them() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        comm = TorchCommunicator(dist.new_group([0, 1, 2]))
        comm.check_groups([(0, 1, 2), (2,)])
        TorchCommunicator().check_groups([(0, 1)])
        with pytest.raises(
            ValueError, match=r"such as \(0, 1\), but process_group is only a part.*'factor-wise' or 'layer"
        ):
            comm.check_groups([(0, 1)])
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_communicator_that_nobody_has_prepared_says_so() -> None:
    """One inside a user's own that does not pass ``prepare`` on."""
    with pytest.raises(TypeError, match=r"TorchCommunicator.prepare: was not called for the ranks \(0, 1\); a commun"):
        TorchCommunicator().send([Broadcast([torch.ones(2)], 0, (0, 1))], "x")


def test_horovod_refuses_bfloat16_at_construction() -> None:
    with pytest.raises(ValueError, match="comm_dtype=torch.bfloat16: Horovod cannot send it; use torch.float16 or"):
        HorovodCommunicator(comm_dtype=torch.bfloat16)


def test_torch_communicator_needs_a_group() -> None:
    with pytest.raises(ValueError, match=r"init_process_group\(\) first"):
        TorchCommunicator(comm_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"process_group='default': must be a torch.*get_group\(\).* or None"):
        TorchCommunicator("default")  # type: ignore[arg-type]


# Bytes of a training run ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Linear with and without bias, and a grouped convolution: pairs, bias columns, sizes that all differ."""

    # (pairs, d_in with the bias column, d_out) of each layer
    SHAPES = ((2, 10, 3), (1, 25, 5), (1, 5, 4))

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, groups=2)
        self.hidden = nn.Linear(24, 5)
        self.head = nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(torch.tanh(self.conv(x)).flatten(1))))


SHAPE = (12, 2, 4, 4)  # every world size up to 4 divides the batch


def build(world_size: int, options: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, nn.Module, KFACSGD]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    exact = FLOAT64 if dtype is torch.float64 else {}
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **{**OFTEN, **exact, **options})
    return model, DDP(model) if world_size > 1 else model, optimizer


def trained(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    after: Callable[[KFACSGD], Any] | None = None,
) -> tuple[nn.Module, KFACSGD]:
    """Some steps on this rank's share of every batch."""
    model, wrapped, optimizer = build(world_size, options, dtype)
    call = None if after is None else partial(after, optimizer)
    train(wrapped, optimizer, range(STEPS), call, shape=SHAPE, rank=rank, world_size=world_size)
    return model, optimizer


STRATEGIES = {"factor-wise": FactorWise(), "layer-wise": LayerWise(), "kaisa": KAISA(grad_worker_fraction=0.5)}
CASES = [(strategy, solver) for strategy in STRATEGIES for solver in ("eigen", "inverse")]


def train_and_count(rank: int, world_size: int) -> dict[Any, Any]:
    """Traffic of every strategy, after the first step and in the end, and who works."""
    found = {}
    for strategy, solver in CASES:
        options = {"assignment": STRATEGIES[strategy], "solver": solver}
        _, optimizer = trained(rank, world_size, options, torch.float32)
        engine = optimizer.curvature
        found[strategy, solver] = (
            engine.stages.comm.traffic,
            engine.stages.ranks.assignment,
            optimizer.curvature.report(),
        )
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def counted(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_ranks(request.param, train_and_count)


REFRESHES = len(range(0, STEPS, 3))


def decomposition_bytes(solver: str, pairs: int, dim: int) -> int:
    """Of float32: a matrix of eigenvectors and the eigenvalues, or an inverse and its scale."""
    return 4 * pairs * (dim * dim + (dim if solver == "eigen" else 1))


@pytest.mark.parametrize(("strategy", "solver"), CASES)
def test_factors_travel_as_triangles_when_a_refresh_is_due(
    counted: list[dict[Any, Any]], strategy: str, solver: str
) -> None:
    ranks = len(counted)
    numbers = sum(pairs * (a * (a + 1) + g * (g + 1)) // 2 for pairs, a, g in Net.SHAPES)
    share = REFRESHES * 2 * (ranks - 1) / ranks * 4 * numbers
    for found in counted:
        assert found[strategy, solver][0]["factors"] == pytest.approx([share, share], rel=1e-12)


@pytest.mark.parametrize(("strategy", "solver"), CASES)
def test_decompositions_go_to_those_who_precondition(counted: list[dict[Any, Any]], strategy: str, solver: str) -> None:
    ranks = len(counted)
    expected = [[0, 0] for _ in range(ranks)]
    for (pairs, *dims), layer in zip(Net.SHAPES, counted[0][strategy, solver][1].layers, strict=True):
        for dim, source in zip(dims, layer.inverse_workers, strict=True):
            size = REFRESHES * decomposition_bytes(solver, pairs, dim)
            others = [rank for rank in layer.gradient_workers if rank != source]
            expected[source][0] += size * bool(others)
            for rank in others:
                expected[rank][1] += size
    for rank, found in enumerate(counted):
        assert found[strategy, solver][0].get("decompositions", [0, 0]) == expected[rank]
    if strategy == "layer-wise" or (strategy == "kaisa" and ranks == 2):
        assert not any(map(any, expected)), "whoever decomposes is alone with it"
    else:
        assert any(map(any, expected))


@pytest.mark.parametrize(("strategy", "solver"), CASES)
def test_directions_go_to_those_who_do_not_precondition(
    counted: list[dict[Any, Any]], strategy: str, solver: str
) -> None:
    """At every step, from one rank each."""
    ranks = len(counted)
    layers = list(zip(Net.SHAPES, counted[0][strategy, solver][1].layers, strict=True))
    sizes = [STEPS * 4 * pairs * a * g for (pairs, a, g), _ in layers]
    for rank, found in enumerate(counted):
        received = sum(s for s, (_, who) in zip(sizes, layers, strict=True) if rank not in who.gradient_workers)
        sent = sum(
            size
            for size, (_, who) in zip(sizes, layers, strict=True)
            if rank in who.gradient_workers and len(who.gradient_workers) < ranks
        )
        assert found[strategy, solver][0].get("directions", [0, 0]) == [sent, received]
    if strategy == "factor-wise":
        assert "directions" not in counted[0][strategy, solver][0]


def test_beside_these_only_counts_travel(counted: list[dict[Any, Any]]) -> None:
    """float64: flags of what is decomposed; by update two numbers, and counts and traces of A and G by layer.

    Beside them, with the eigen solver, the largest eigenvalues of A and G, of at most 8 bytes.
    """
    ranks, layers, updates = len(counted), len(Net.SHAPES), len(range(0, STEPS, 2))
    numbers = REFRESHES * 2 * layers + updates * (4 * layers + 2)
    greeting = 4 * (1 + REFRESHES + updates)  # at first and whenever they exchange: whether all have built the same
    for found in counted:
        for traffic, _, _ in found.values():
            assert set(traffic) <= {"factors", "decompositions", "directions", "counts"}
            largest = REFRESHES * 2 * layers
            least, most = (8 * 2 * (ranks - 1) / ranks * count for count in (numbers, numbers + greeting + largest))
            assert least < traffic["counts"][0] <= most
            assert traffic["counts"][0] == traffic["counts"][1]


def test_the_report_shows_the_traffic(counted: list[dict[Any, Any]]) -> None:
    """Per step."""
    for found in counted:
        for traffic, _, report in found.values():
            assert report["traffic"].keys() == traffic.keys()
            for kind, (sent, received) in traffic.items():
                assert report["traffic"][kind]["sent"] * STEPS == pytest.approx(sent, rel=1e-12), kind
                assert report["traffic"][kind]["received"] * STEPS == pytest.approx(received, rel=1e-12), kind


# Layers that join later ----------------------------------------------------------------------------------------------


class Growing(nn.Module):
    """The later layer is the largest, so that the work is dealt out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later, self.last = nn.Linear(4, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.later(torch.tanh(self.first(x)))))


def train_growing(rank: int, world_size: int, joins_at: int, options: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Growing().double()
    wrapped = DDP(model) if world_size > 1 else model
    start = [*model.first.parameters(), *model.last.parameters()]
    optimizer = KFACSGD(start, lr=0.1, model=model, **{**OFTEN, **FLOAT64, "inv_update_steps": 4, **options})
    for step in range(10):
        if step == joins_at:
            optimizer.add_param_group({"params": list(model.later.parameters())})
        model.zero_grad()
        train(wrapped, optimizer, [step], rank=rank, world_size=world_size)
    return values(model)


def train_all_growing(rank: int, world_size: int, joins_at: int) -> dict[str, list[Tensor]]:
    strategies = ("factor-wise", "layer-wise")
    return {name: train_growing(rank, world_size, joins_at, {"assignment": name, "spread": 3}) for name in strategies}


@pytest.mark.fast("5")
@pytest.mark.parametrize("joins_at", [1, 5])
def test_layers_that_join_later_as_in_one_process(joins_at: int) -> None:
    """Also in the middle of a refresh (here from 4 to 7), which then is others' work than before."""
    expected = train_growing(0, 1, joins_at, {"spread": 3})
    for found in run_ranks(2, train_all_growing, joins_at):
        assert_all_near(found.values(), expected)


# Half precision on the wire ------------------------------------------------------------------------------------------


def train_in_half(rank: int, world_size: int) -> dict[Any, list[Tensor]]:
    found: dict[Any, list[Tensor]] = {"start": values(build(1, {}, torch.float32)[0])}
    for dtype in (None, *HALVES):
        for solver in ("eigen", "inverse"):
            comm = TorchCommunicator(comm_dtype=dtype)
            options = {"communicator": comm, "solver": solver, "precondition": "gradient", "scaling": KLClip(1e-2)}
            model, _ = trained(rank, world_size, options, torch.float32)
            found[dtype, solver] = values(model)
    return found


@pytest.fixture(scope="module")
def in_half() -> list[dict[Any, list[Tensor]]]:
    return run_ranks(2, train_in_half)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("dtype", HALVES)
def test_training_with_half_precision_on_the_wire(
    in_half: list[dict[Any, list[Tensor]]], dtype: torch.dtype, solver: str
) -> None:
    """Close to float32 on the wire, and no rank drifts away from another.

    A relative error e of A and of G changes ``(A (x) G + gamma)^-1`` by at most 2 e relatively in every eigendirection
    (to first order, errors aligned with the factors); the momentum of a few steps passes that on to the parameters'
    displacement. e is R roundoffs.
    """
    first, second = in_half
    assert_equal_on_ranks([first[dtype, solver], second[dtype, solver]])
    flat = [torch.cat([p.reshape(-1) for p in first[key]]) for key in ("start", (None, solver), (dtype, solver))]
    start, plain, half = flat
    error = float((half - plain).norm() / (plain - start).norm())
    assert 0 < error <= 2 * 2 * HALVES[dtype], error


# Lazily and at every step --------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """A layer that only some examples pass through, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.sometimes = nn.Linear(5, 5)
        self.here = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor, step: int, branching: int) -> Tensor:
        """The first ``branching`` examples pass through ``here``."""
        x = torch.tanh(self.first(x))
        if step % 2:
            x = torch.tanh(self.sometimes(x))
        if branching:
            x = torch.cat([x[:branching] + torch.tanh(self.here(x[:branching])), x[branching:]])
        return self.last(x)


def train_branching(rank: int, world_size: int, options: dict[str, Any], after: Any = None) -> list[Tensor]:
    """Of 8 examples the first 4 pass through ``here``: with two ranks, all of rank 0 and none of rank 1."""
    torch.manual_seed(0)
    model = Branching().double()
    wrapped: nn.Module = DDP(model, find_unused_parameters=True) if world_size > 1 else model
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **{**OFTEN, **FLOAT64, **options})
    for step in range(10):
        x, y = share(data_of(step), rank, world_size)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x, step, (4 if rank == 0 else 0)), y).backward()
        optimizer.step()
        if after is not None:
            after(optimizer)
    return values(model)


def pool(optimizer: KFACSGD) -> None:
    """The ranks tell each other what they have seen."""
    optimizer.curvature.synchronize()


def each_decay(step: int) -> float:
    """A different one for every update."""
    return 0.9 - 0.1 * (step % 5)


LAZY: dict[str, dict[str, Any]] = {
    "every step": {"factor_update_steps": 1, "inv_update_steps": 4},
    "every other step": {"factor_update_steps": 2, "inv_update_steps": 5},
    "layer-wise, spread, decay": {
        "factor_update_steps": 1,
        "inv_update_steps": 4,
        "assignment": LayerWise(),
        "spread": 2,
        "factor_decay": each_decay,
    },
}


def train_lazily_or_not(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, options in LAZY.items():
        for after in (None, pool):
            how = "lazily" if after is None else "every step"
            model, optimizer = trained(rank, world_size, options, after=after)
            found["all", name, how] = values(model)
            found["bytes", name, how] = optimizer.curvature.stages.comm.traffic["factors"][0]
            found["branching", name, how] = train_branching(rank, world_size, options, after)
    return found


@pytest.fixture(scope="module")
def lazily_or_not() -> list[dict[Any, Any]]:
    return run_ranks(2, train_lazily_or_not)


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("model", ["all", "branching"])
def test_exchanging_when_due_is_exchanging_at_every_step(
    lazily_or_not: list[dict[Any, Any]], model: str, name: str
) -> None:
    for found in lazily_or_not:
        assert_all_near([found[model, name, "lazily"]], found[model, name, "every step"])
        assert_all_near([found[model, name, "lazily"]], lazily_or_not[0][model, name, "lazily"])
        assert found["bytes", name, "lazily"] < found["bytes", name, "every step"], "they were exchanged more often"


@pytest.mark.parametrize("name", LAZY)
def test_a_layer_that_one_rank_uses_is_as_in_one_process(lazily_or_not: list[dict[Any, Any]], name: str) -> None:
    """M counts the loss terms of all ranks, also of those whose examples did not pass through the layer."""
    options = {k: v for k, v in LAZY[name].items() if k != "assignment"}
    assert_all_near([found["branching", name, "lazily"] for found in lazily_or_not], train_branching(0, 1, options))


# The policy on ranks -------------------------------------------------------------------------------------------------


class Odd:
    """Who decomposes need not precondition, and nobody has an order: three layers, three ranks."""

    LAYERS = (
        LayerAssignment((2, 0), (1,)),
        LayerAssignment((1, 1), (2, 0)),
        LayerAssignment((0, 2), (2, 1, 0)),
    )

    def assign(self, costs: Sequence[LayerCost], world_size: int) -> Assignment:
        return Assignment(self.LAYERS[: len(costs)], (1.0,) * world_size)


class Elsewhere(Odd):
    """Decomposed on a rank that preconditions nothing, preconditioned on ranks that decompose nothing."""

    LAYERS = (LayerAssignment((1, 1), (2,)), LayerAssignment((1, 1), (0,)), LayerAssignment((1, 1), (2, 0)))


OWN = {"odd": Odd(), "elsewhere": Elsewhere()}


def follow_the_policy(rank: int, world_size: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, strategy in {"factor": FactorWise(), "layer": LayerWise(), "kaisa": KAISA(1 / 3)}.items():
        mine = build(1, {"assignment": strategy}, torch.float64)[2].curvature.stages.ranks.assignment
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, mine)
        found["work", name] = everyone
    for name, strategy in OWN.items():
        for options in ({}, {"solver": "inverse", "spread": 1, "scaling": "graft"}):
            model, _ = trained(rank, world_size, {"assignment": strategy, **options})
            found["trained", name, bool(options)] = values(model)
    return found


@pytest.fixture(scope="module")
def policies() -> list[dict[Any, Any]]:
    return run_ranks(3, follow_the_policy)


@pytest.mark.parametrize("name", ["factor", "layer", "kaisa"])
def test_every_rank_computes_the_same_assignment(policies: list[dict[Any, Any]], name: str) -> None:
    for found in policies:
        assert len(found["work", name]) == 3
        assert all(work == found["work", name][0] for work in found["work", name])
        assert len(found["work", name][0].layers) == len(Net.SHAPES)


@pytest.mark.parametrize("other", [False, True], ids=["eigen", "inverse"])
@pytest.mark.parametrize("name", OWN)
def test_a_strategy_of_the_user_s_trains_as_one_process(policies: list[dict[Any, Any]], name: str, other: bool) -> None:
    options = {"solver": "inverse", "spread": 1, "scaling": "graft"} if other else {}
    expected = values(trained(0, 1, options)[0])
    assert_all_near([found["trained", name, other] for found in policies], expected)


GOOD = LayerAssignment((0, 1), (2,))
WRONG = {
    "no such rank": (GOOD, GOOD, LayerAssignment((0, 1), (3,))),
    "no such inverse worker": (GOOD, GOOD, LayerAssignment((0, 3), (2,))),
    "negative": (GOOD, LayerAssignment((-1, 0), (2,)), GOOD),
    "nobody preconditions": (GOOD, LayerAssignment((0, 1), ()), GOOD),
    "one inverse worker": (LayerAssignment((0,), (1,)), GOOD, GOOD),  # type: ignore[arg-type]
    "a layer too few": (GOOD, GOOD),
    "a layer too many": (GOOD,) * 4,
    "a rank twice": (GOOD, LayerAssignment((0, 1), (0, 0)), GOOD),
}


@dataclass(frozen=True)
class Given:
    """Assigns what it was given."""

    layers: tuple[LayerAssignment, ...]

    def assign(self, costs: Sequence[LayerCost], world_size: int) -> Assignment:
        return Assignment(self.layers, (1.0,) * world_size)


@pytest.mark.parametrize("name", WRONG)
def test_an_impossible_assignment_is_refused_at_construction(name: str) -> None:
    """By every rank, before any of them waits for another."""
    for rank in range(3):
        with pytest.raises(ValueError, match="assignment"):
            KFACSGD(Net(), lr=0.1, assignment=Given(WRONG[name]), communicator=LocalCommunicator(rank, 3))
        KFACSGD(Net(), lr=0.1, assignment=Given((GOOD,) * 3), communicator=LocalCommunicator(rank, 3))


def test_what_is_no_assignment_is_refused_by_name() -> None:
    class Forgetful:
        def assign(self, costs: Sequence[LayerCost], world_size: int) -> None:
            """Returns nothing."""

    with pytest.raises(TypeError, match=r"assign\(\) has returned None: must be a kfac_optim.Assignment"):
        KFACSGD(Net(), lr=0.1, assignment=Forgetful())


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_every_rank_outside_has_one_source(case: tuple[int, set[int]]) -> None:
    """Sources are the gradient workers, each once, and nobody has more than one receiver more than another."""
    world_size, workers = case
    for order in (tuple(workers), tuple(sorted(workers, reverse=True))):
        routes = LayerAssignment((0, 0), order).routes(world_size)
        assert sorted(source for source, _ in routes) == sorted(workers)
        assert all(source in members for source, members in routes)
        receivers = [rank for source, members in routes for rank in members if rank != source]
        assert sorted(receivers) == sorted(set(range(world_size)) - workers)
        sizes = [len(members) for _, members in routes]
        assert max(sizes) - min(sizes) <= 1
        assert routes == LayerAssignment((0, 0), tuple(sorted(workers))).routes(world_size), "whatever their order"


@given(st.integers(1, 24), st.data())
def test_kaisa_s_routes_are_the_columns_of_its_grid(world_size: int, data: st.DataObject) -> None:
    """A column of the grid of m rows holds neighbours, ranks j m .. j m + m - 1: those of one node, where they fit."""
    workers = data.draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    costs = [LayerCost((float(i), 1.0), 1) for i in range(4)]
    for layer in KAISA(grad_worker_fraction=workers / world_size).assign(costs, world_size).layers:
        for source, members in layer.routes(world_size):
            rows = world_size // workers
            assert list(members) == list(range(source // rows * rows, source // rows * rows + rows))


@given(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.sets(st.integers(0, 5), min_size=1))
def test_holders_are_the_gradient_workers_and_who_decomposes(inverse: tuple[int, int], workers: set[int]) -> None:
    for side in range(2):
        holders = LayerAssignment(inverse, tuple(workers)).holders(side)
        assert list(holders) == sorted(workers | {inverse[side]})


# Ranks that built different optimizers -------------------------------------------------------------------------------


class PlainSolver(EigenSolver):
    """A solver of the user's, known by its address alone."""

    __repr__ = object.__repr__


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layers": ({}, {"skip_layers": ["head"]}),
    "rule": ({}, {"max_factor_dim": 8}),
    "solver": ({"solver": "eigen"}, {"solver": "inverse"}),
    "factor_dtype": ({}, {"factor_dtype": torch.float64}),
    "inv_dtype": ({}, {"inv_dtype": torch.bfloat16}),
    "comm_dtype": ({}, {"comm_dtype": torch.bfloat16}),
    "inv_update_steps": (  # which are the same in the first steps
        {"inv_update_steps": growing(0.1, minimum=5, most_work=1.0)},
        {"inv_update_steps": growing(0.1, minimum=5, most_work=2.0)},
    ),
    "damping": (
        {"damping": OfMean(constant_then_scaled(0.3, (9,), 0.5))},
        {"damping": OfMean(constant_then_scaled(0.3, (8,), 0.5))},
    ),
    "assignment": ({}, {"assignment": "layer-wise"}),
}


def step_once(options: dict[str, Any]) -> str:
    """What the first step says."""
    if "comm_dtype" in options:
        options = {"communicator": TorchCommunicator(**options)}
    model, _, optimizer = build(1, options, torch.float32)
    inputs, classes = data_of(0, SHAPE, dtype=torch.float32)
    F.cross_entropy(model(inputs), classes).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def build_differently(rank: int, world_size: int) -> dict[str, str]:
    """The first step with one rank apart, on each in turn; and with the same solver at different addresses."""
    found = {}
    for name, (most, one) in DIFFERENT.items():
        for apart in range(world_size):
            found[f"{name}, {apart} apart"] = step_once(one if rank == apart else most)
    solvers = [PlainSolver() for _ in range(world_size)]
    found["own solver"] = step_once({"solver": solvers[rank]})
    found["the same"] = step_once({})
    return found


@pytest.fixture(scope="module")
def differently() -> list[dict[str, str]]:
    return run_ranks(3, build_differently, group_timeout=timedelta(seconds=20), limit=60)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_built_different_optimizers_are_told(differently: list[dict[str, str]], name: str) -> None:
    """All of them, at the first step, with what has to be the same."""
    for found in differently:
        for apart in range(len(differently)):
            message = found[f"{name}, {apart} apart"]
            assert "the ranks have built different optimizers" in message
            named = "factors and workers" if name in ("rule", "assignment") else name
            assert f"{named} is " in message, message


def test_ranks_that_built_the_same_are_not_told(differently: list[dict[str, str]]) -> None:
    for found in differently:
        assert found["the same"] == "no error"


def test_equal_solvers_of_the_user_s_are_the_same(differently: list[dict[str, str]]) -> None:
    """An object without a ``__repr__`` has another address in every process."""
    for found in differently:
        assert found["own solver"] == "no error"


class _Done:
    def wait(self) -> None:
        return


class Mirrors(Communicator):
    """Many ranks that hold the same as this one, added one after the other as a ring does."""

    def _start_sum(self, tensor: Tensor) -> _Done:
        own = tensor.clone()
        for _ in range(self.world_size - 1):
            tensor += own
        return _Done()

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> _Done:
        return _Done()


@pytest.mark.parametrize("world_size", [2, 6, 8, 64, 1000])
def test_many_ranks_that_built_the_same_are_not_told(world_size: int) -> None:
    """Whatever the checksum is: no rounding makes equal ranks look different."""
    for features in range(1, 13):
        model = nn.Linear(features, 2)
        optimizer = KFACSGD(model, lr=0.1, assignment=FactorWise(), communicator=Mirrors(0, world_size))
        optimizer.curvature.synchronize()
