"""Communication between ranks: the only package that knows of process groups.

All ranks make the same calls in the same order by construction, because what is sent depends on shapes and on the
assignment alone.

The strategy chooses which ranks keep the factors of a layer, and whose statistics they are made of:

    ==============  ==================  ===================  ============================
    ``factors=``    who keeps a factor  whose statistics     when these are sent
    ==============  ==================  ===================  ============================
    "replicated"    every rank          all ranks'           at refreshes, to every rank
    "sharded"       its inverse worker  all ranks'           when collected, to that rank
    "local"         its inverse worker  that rank's          nothing
    ==============  ==================  ===================  ============================

Traffic is counted per kind as an ideal network would carry it: an all-reduce of b bytes over R ranks costs every rank
``2 (R - 1) / R b`` bytes sent and as many received (a ring); a broadcast costs its source b bytes sent and every other
member b bytes received, and a reduction the reverse. What a rank exchanges with itself does not count.

Where to look::

    assignment.py       which ranks decompose a layer's factors, which precondition it, and which keep its factors
    strategies.py       the strategies, which make these assignments: pure policy, no processes
    communicator.py     what the engine calls: sum, send, exchange; traffic is counted here
    packing.py          tensors as flat bytes
    torch.py            the communicator of torch.distributed
    horovod.py          the communicator of Horovod
    agreement.py        whether all ranks have built the same engine
    join.py             uneven inputs: ranks that have run out of inputs
    sharding.py         tensors and gradients that are split over the ranks (FSDP2, DeepSpeed ZeRO)
    shard_matrices.py   which sharded weights can be preconditioned, and why others cannot
    reductions.py       sums and maxima over all parts
    shard_exchange.py   sends FSDP2's parts to the ranks that precondition a layer, and back
"""

from . import agreement
from .assignment import Assignment, AssignmentStrategy, LayerAssignment, LayerCost
from .communicator import Broadcast, Communicator, LocalCommunicator
from .horovod import HorovodCommunicator, derived_from_by_horovod
from .join import join_hook, register_joinable, share_gradients, take_part_in_join
from .reductions import largest_entry, summed_over_shards
from .shard_exchange import ShardExchange, are_exchangeable
from .shard_matrices import own_shape, refuse_flattened, shard_number, sharding_problem
from .sharding import (
    all_gathered,
    any_sharded,
    full_gradient,
    gathered,
    gathered_weight,
    gradient_moves_away,
    is_sharded,
    mesh_of,
    own_part,
    set_full_gradient_,
    sharded_like,
    whole_shape,
)
from .strategies import KAISA, FactorWise, LayerWise
from .torch import TorchCommunicator, communicator_of, default_communicator, require_all_in_wrapper

__all__ = [
    "KAISA",
    "Assignment",
    "AssignmentStrategy",
    "Broadcast",
    "Communicator",
    "FactorWise",
    "HorovodCommunicator",
    "LayerAssignment",
    "LayerCost",
    "LayerWise",
    "LocalCommunicator",
    "ShardExchange",
    "TorchCommunicator",
    "agreement",
    "all_gathered",
    "any_sharded",
    "are_exchangeable",
    "communicator_of",
    "default_communicator",
    "derived_from_by_horovod",
    "full_gradient",
    "gathered",
    "gathered_weight",
    "gradient_moves_away",
    "is_sharded",
    "join_hook",
    "largest_entry",
    "mesh_of",
    "own_part",
    "own_shape",
    "refuse_flattened",
    "register_joinable",
    "require_all_in_wrapper",
    "set_full_gradient_",
    "shard_number",
    "sharded_like",
    "sharding_problem",
    "share_gradients",
    "summed_over_shards",
    "take_part_in_join",
    "whole_shape",
]
