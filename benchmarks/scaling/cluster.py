"""A model of distributed K-FAC: seconds of every stage, bytes sent and held, for a cluster that need not exist.

    what the layers take, costs        Workload     (``workload.py``)
    who does what                      assign()     (the strategies of kfac_optim.distributed, the very same objects)
    how fast a rank computes           Device       seconds = operations * launch + flops / rate + bytes / bandwidth
    how fast ranks talk                Network      seconds = hops * latency + bytes / bandwidth, node by node
    how often                          Schedule     statistics every a steps, decompositions every b
    what is sent when, in which form   Exchange     ours, or that of kfac-pytorch

:func:`predict` puts them together. An eigendecomposition takes ``a + b n^2 + c n^3`` seconds. Compute stages take as
long as their slowest rank; waiting for that rank is charged to it, not to the communication that follows.

Bytes follow the convention of ``report()["traffic"]``: an all-reduce of b bytes over R ranks is ``2 (R - 1) / R b``
sent and received by each, a broadcast b sent by its source and b received by every other member.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.common.works import Schedule
from benchmarks.scaling.workload import FLOAT, Work, Workload, total
from kfac_optim.distributed import Assignment, AssignmentStrategy, LayerAssignment
from kfac_optim.distributed.communicator import BUCKET_BYTES
from kfac_optim.factors import FactorSpec

STAGES = (
    "factor computation",
    "factor update",
    "factor communication",
    "decomposition",
    "decomposition communication",
    "preconditioning",
    "gradient communication",
    "scaling",
)
KINDS = ("counts", "factors", "decompositions", "directions")

Floats = np.ndarray[Any, np.dtype[np.float64]]


# What it runs on -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What one rank computes with."""

    name: str  # Name in tables
    product_flops: float  # Flops per second in products of matrices
    training_flops: float  # Flops per second that forward and backward passes sustain
    bandwidth: float  # Bytes per second of memory
    launch: float  # Seconds per kernel or operator call, whatever its size
    eigh: tuple[float, float, float]  # ``(a, b, c)``: an eigendecomposition takes ``a + b n^2 + c n^3`` seconds
    layer: float = 0.0  # Seconds per layer and stage of the engine's own bookkeeping
    # How many ranks of a node compute at full speed at once; infinity if each has its own device.
    cores: float = math.inf
    # Measured over modelled seconds by stage, where something was measured.
    corrections: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, work: Work) -> float:
        """Seconds of some work on a rank that has the device to itself."""
        return work.operations * self.launch + work.flops / self.product_flops + work.bytes / self.bandwidth

    def decomposition_seconds(self, spec: FactorSpec) -> float:
        """Seconds of decomposing one factor; a diagonal is its own decomposition."""
        if spec.diagonal:
            return self.launch
        a, b, c = self.eigh
        return spec.pairs * (a + b * spec.dim**2 + c * spec.dim**3)


@dataclass(frozen=True)
class Network:
    """What ranks talk over."""

    ranks_per_node: int  # Ranks ``0 .. ranks_per_node - 1`` share the first node, and so on
    node_bandwidth: float  # Bytes per second into a node, and as many out of it
    rank_bandwidth: float  # Bytes per second into a rank within its node, and as many out of it
    latency: float  # Seconds per hop of a message
    # A broadcast streams along a ring of its members, ``n - 1`` hops, each byte passing each member once (NCCL).
    # False: whole messages go down a binary tree, ``log2 n`` hops (Gloo).
    pipelined: bool = True

    def hops(self, members: int) -> int:
        """Hops of a broadcast among so many ranks."""
        return members - 1 if self.pipelined else math.ceil(math.log2(members))


@dataclass(frozen=True)
class Exchange:
    """What is sent when, and in which form."""

    packed: bool = True  # Factors travel as one triangle instead of as full matrices
    at_refresh: bool = True  # Factors are summed when a refresh is due, instead of at every statistics step
    unfolded: bool = False  # Statistics of convolutions by im2col
    # The decomposition of G comes with the ``d_out x d_in`` table of eigenvalue products.
    eigenvalue_products: bool = False
    bucket_bytes: int = 25 * 2**20  # What is summed travels in buckets of this size
    # What is broadcast from one source to the same ranks travels in buckets of this size; 0: each tensor alone.
    broadcast_bytes: int = 25 * 2**20
    factor_bytes: int = FLOAT  # Bytes of a factor's number on the wire; 2 with ``comm_dtype=torch.bfloat16``


OURS = Exchange(bucket_bytes=BUCKET_BYTES, broadcast_bytes=BUCKET_BYTES)
# kfac-pytorch 0.4.2 with its defaults, as read in its source (base_preconditioner.py, layers/eigen.py).
KFAC_PYTORCH = Exchange(packed=False, at_refresh=False, unfolded=True, eigenvalue_products=True, broadcast_bytes=0)
# The paper's own experiments: eqs. 11-13 without the table; Horovod fuses all-reduces up to 64 MiB, broadcasts not.
PAPER = replace(KFAC_PYTORCH, eigenvalue_products=False, bucket_bytes=64 * 2**20)


# Per packed number: the running average times its decay (read, write) plus the new data (read, read, write).
FOLD = Work(0, 0, 5 * FLOAT)


# Messages ------------------------------------------------------------------------------------------------------------


def buckets(sizes: Iterable[int], bucket_bytes: int) -> list[int]:
    """Sizes of the flat buckets that tensors of these sizes fill, in order, as ``communicator.py`` fills them."""
    filled: list[int] = []
    for size in sizes:
        if filled and bucket_bytes and filled[-1] + size <= bucket_bytes:
            filled[-1] += size
        else:
            filled.append(size)
    return filled


Routes = dict[tuple[int, tuple[int, ...]], list[int]]  # (source, members with the source) -> sizes of its tensors


def decomposition_routes(work: Workload, assignment: Assignment, exchange: Exchange) -> Routes:
    """Every decomposition from its inverse worker to the gradient workers."""
    routes: Routes = {}
    for layer, assigned in zip(work.layers, assignment.layers, strict=True):
        for side, spec in enumerate(layer.factors):
            members = assigned.holders(side)
            sizes = [FLOAT * spec.pairs * spec.dim]
            if not spec.diagonal:
                sizes.append(FLOAT * spec.pairs * spec.dim**2)
            if exchange.eigenvalue_products:
                sizes[0] = layer.direction_bytes if side == 1 else 0
            if len(members) > 1:
                routes.setdefault((assigned.inverse_workers[side], members), []).extend(sizes)
    return routes


def direction_routes(work: Workload, assignment: Assignment, world_size: int) -> Routes:
    """Every preconditioned gradient from the gradient workers to the other ranks."""
    # Most layers share their gradient workers with others; the list of routes is long on a large cluster.
    routes_of = lru_cache(None)(lambda workers: LayerAssignment((workers[0],) * 2, workers).routes(world_size))
    routes: Routes = {}
    for layer, assigned in zip(work.layers, assignment.layers, strict=True):
        for source, members in routes_of(assigned.gradient_workers):
            if len(members) > 1:
                routes.setdefault((source, members), []).append(layer.direction_bytes)
    return routes


def broadcast_bytes(routes: Routes, world_size: int) -> tuple[Floats, Floats]:
    """Bytes that each rank sends and receives."""
    sent, received = np.zeros(world_size), np.zeros(world_size)
    for (source, members), sizes in routes.items():
        size = sum(sizes)
        sent[source] += size
        received[list(members)] += size
        received[source] -= size
    return sent, received


def broadcast_seconds(routes: Routes, world_size: int, device: Device, network: Network, exchange: Exchange) -> float:
    """All broadcasts at once: the time of the busiest node, link or rank."""
    nodes = math.ceil(world_size / network.ranks_per_node)
    at_node, at_rank, waits = np.zeros(nodes), np.zeros(world_size), np.zeros(world_size)
    for (_, members), sizes in routes.items():
        size, ranks = sum(sizes), np.asarray(members)
        hops = network.hops(len(members))
        touched = np.unique(ranks // network.ranks_per_node)
        if len(touched) > 1:
            at_node[touched] += size
        at_rank[ranks] += size * (1 if network.pipelined else hops)
        waits[ranks] += len(buckets(sizes, exchange.broadcast_bytes)) * hops * network.latency
    shared = sharing(world_size, device, network)
    return float(
        waits.max() + max(at_node.max() / network.node_bandwidth, shared * at_rank.max() / network.rank_bandwidth)
    )


def all_reduce_seconds(sizes: Sequence[int], world_size: int, device: Device, network: Network) -> float:
    """All-reduces of buckets of these sizes, one after the other."""
    if world_size == 1:
        return 0.0
    share = 2 * (world_size - 1) / world_size * sum(sizes)
    seconds = sharing(world_size, device, network) * share / network.rank_bandwidth
    if world_size > network.ranks_per_node:
        seconds = max(seconds, share / network.node_bandwidth)
    return len(sizes) * 2 * math.ceil(math.log2(world_size)) * network.latency + seconds


def sharing(world_size: int, device: Device, network: Network) -> float:
    """Factor by which work takes longer if all ranks of a node do it at once."""
    return max(1.0, min(world_size, network.ranks_per_node) / device.cores)


def finish_times(loads: Sequence[float], cores: float) -> list[float]:
    """When ranks finish that share the cores of a node fairly, given their seconds of work alone.

    While k ranks are busy, each runs at ``min(1, cores / k)`` of its speed; who finishes makes room for the others.
    """
    times = [0.0] * len(loads)
    now = done = 0.0
    order = sorted(range(len(loads)), key=loads.__getitem__)
    for position, rank in enumerate(order):
        now += (loads[rank] - done) * max(1.0, (len(order) - position) / cores)
        done = loads[rank]
        times[rank] = now
    return times


def intervals(schedule: Schedule, exchange: Exchange = OURS) -> dict[str, int]:
    """Steps between two events of each stage."""
    statistics, refresh = schedule.statistics, schedule.decompositions
    summed = refresh if exchange.at_refresh else statistics
    return dict(zip(STAGES, (statistics, statistics, summed, refresh, refresh, 1, 1, 1), strict=True))


# The prediction ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """What a run would take."""

    intervals: Mapping[str, int]  # Steps between two events of each stage
    events: Mapping[str, float]  # Seconds of a stage each time it happens, on the slowest rank
    sent: Mapping[str, Floats]  # Bytes per step and rank by kind, mean over the schedule
    received: Mapping[str, Floats]  # Likewise
    memory: Floats  # Bytes of factors, snapshots and decompositions on each rank

    @property
    def overhead(self) -> float:
        """Mean seconds that K-FAC adds to a step."""
        return sum(self.events[name] / every for name, every in self.intervals.items())

    @property
    def refresh(self) -> float:
        """Seconds that a refresh adds to its step: statistics, exchange, decompositions."""
        return sum(self.events[name] for name, every in self.intervals.items() if every > 1)


def predict(
    work: Workload,
    world_size: int,
    strategy: AssignmentStrategy,
    device: Device,
    network: Network,
    schedule: Schedule = Schedule(),  # noqa: B008  # frozen
    exchange: Exchange = OURS,
) -> Prediction:
    """Seconds, bytes and memory of K-FAC on a cluster.

    Args:
        work: What is trained.
        world_size: Number of ranks.
        strategy: Any strategy of :mod:`kfac_optim.distributed`.
        device: What a rank computes with.
        network: What ranks talk over.
        schedule: How often statistics and decompositions are due.
        exchange: What is sent when.
    """
    assignment = strategy.assign([layer.cost for layer in work.layers], world_size)
    decompositions = decomposition_routes(work, assignment, exchange)
    directions = direction_routes(work, assignment, world_size)
    sums = factor_sizes(work, exchange)
    events = {
        **compute_seconds(work, assignment, world_size, device, network, schedule, exchange),
        "factor communication": pooling_seconds(work, sums, world_size, device, network, schedule, exchange),
        "decomposition communication": broadcast_seconds(decompositions, world_size, device, network, exchange),
        "gradient communication": broadcast_seconds(directions, world_size, device, network, exchange),
    }
    ring = 2 * (world_size - 1) / world_size
    updates = schedule.decompositions / schedule.statistics
    # In float64 what an update takes, and which factors were decomposed; in float32 the largest eigenvalues.
    largest = FLOAT * sum(spec.pairs for layer in work.layers for spec in layer.factors)
    told = update_bytes(work) * updates + 8 * 2 * len(work.layers)
    counts = ring * (told + largest) if exchange.at_refresh else 0.0
    pooled = ring * sum(sums) * (1 if exchange.at_refresh else updates)
    sent, received = broadcast_bytes(decompositions, world_size)
    every = np.full(world_size, 1.0)
    refresh = {"counts": (counts * every,) * 2, "factors": (pooled * every,) * 2, "decompositions": (sent, received)}
    bytes_ = {kind: [side / schedule.decompositions for side in sides] for kind, sides in refresh.items()}
    bytes_["directions"] = list(broadcast_bytes(directions, world_size))
    return Prediction(
        intervals(schedule, exchange),
        {name: events[name] * device.corrections.get(name, 1.0) for name in STAGES},
        {kind: bytes_[kind][0] for kind in KINDS},
        {kind: bytes_[kind][1] for kind in KINDS},
        memory_per_rank(work, assignment, world_size),
    )


def update_bytes(work: Workload) -> int:
    """What ranks tell each other in a step with statistics, in float64.

    Counts and traces of A and of G by layer, five numbers for all of them, and four by which the ranks see that they
    have built the same.
    """
    return 8 * (4 * len(work.layers) + 5 + 4)


def factor_sizes(work: Workload, exchange: Exchange) -> list[int]:
    """Bytes of the buckets in which the factors are summed."""
    numbers = [
        spec.packed_numel if exchange.packed or spec.diagonal else spec.pairs * spec.dim**2
        for layer in work.layers
        for spec in layer.factors
    ]
    return buckets((exchange.factor_bytes * n for n in numbers), exchange.bucket_bytes)


def pooling_seconds(
    work: Workload,
    sizes: Sequence[int],
    world_size: int,
    device: Device,
    network: Network,
    schedule: Schedule,
    exchange: Exchange,
) -> float:
    """Summing the factors over the ranks: all-reduces of counts and of factors, and the copies around them."""
    if world_size == 1:
        return 0.0
    updates = schedule.decompositions // schedule.statistics
    small = [update_bytes(work)] * updates if exchange.at_refresh else []
    copies = FOLD * work.packed_numbers if exchange.at_refresh else Work()
    copies += Work(2 * len(work.layers), 0, 2 * sum(sizes))  # into the buckets
    shared = sharing(world_size, device, network)
    return all_reduce_seconds([*small, *sizes], world_size, device, network) + shared * device.seconds(copies)


def compute_seconds(
    work: Workload,
    assignment: Assignment,
    world_size: int,
    device: Device,
    network: Network,
    schedule: Schedule,
    exchange: Exchange,
) -> dict[str, float]:
    """The stages without communication, on the slowest rank."""
    shared, layers = sharing(world_size, device, network), work.layers
    book = device.layer * len(layers)
    statistics = device.seconds(total(layer.unfolded if exchange.unfolded else layer.statistics for layer in layers))
    # One rank folds every update into the running average; several add it to their local sums, but for the first one.
    added = 1.0 if world_size == 1 or not exchange.at_refresh else 1 - schedule.statistics / schedule.decompositions
    fold = device.seconds(FOLD * work.packed_numbers * added)
    decomposing = np.zeros(world_size)
    preconditioning = np.zeros(world_size)
    for layer, assigned in zip(layers, assignment.layers, strict=True):
        for rank, spec, handling in zip(assigned.inverse_workers, layer.factors, layer.handling, strict=True):
            decomposing[rank] += device.decomposition_seconds(spec) + device.seconds(handling)
        preconditioning[list(assigned.gradient_workers)] += device.seconds(layer.preconditioning) + device.layer
    return {
        "factor computation": shared * (statistics + book) * schedule.micro_batches,
        "factor update": shared * (fold + book),
        "decomposition": slowest(decomposing, device, network),
        "preconditioning": slowest(preconditioning, device, network),
        "scaling": shared * (device.seconds(total(layer.scaling for layer in layers)) + book),
    }


def slowest(loads: Floats, device: Device, network: Network) -> float:
    """When the last rank is done, if the ranks of a node share its cores."""
    if device.cores == math.inf:
        return float(loads.max())
    nodes = (loads[start : start + network.ranks_per_node] for start in range(0, len(loads), network.ranks_per_node))
    return max(max(finish_times(node.tolist(), device.cores)) for node in nodes)


def memory_per_rank(work: Workload, assignment: Assignment, world_size: int) -> Floats:
    """Bytes on each rank.

    Every rank holds the running averages, the snapshot of the last refresh and, beside others, its own sums; and it
    holds the decompositions of the layers that it preconditions.
    """
    held = np.full(world_size, (2.0 + (world_size > 1)) * FLOAT * work.packed_numbers)
    for layer, assigned in zip(work.layers, assignment.layers, strict=True):
        held[list(assigned.gradient_workers)] += layer.cost.memory
    return held
