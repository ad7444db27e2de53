"""Communication between ranks: the only package that knows of process groups.

Who calls what is the same on all ranks by construction: buckets follow from shapes and from the assignment alone.

Where to look::

    communicator.py     what the engine calls: sums and sends of lists of tensors, in buckets, with the traffic counted
    assignment.py       who decomposes and who preconditions what: pure policy
    torch.py            torch.distributed
    horovod.py          Horovod
    agreement.py        whether all ranks have built the same
    join.py             ranks that have run out of inputs
    sharding.py         tensors and gradients of which every rank holds a part
"""

from .agreement import require_agreement
from .assignment import (
    KAISA,
    Assignment,
    AssignmentStrategy,
    FactorWise,
    LayerAssignment,
    LayerCost,
    LayerWise,
    longest_first,
)
from .communicator import Communicator, LocalCommunicator, Parcel
from .horovod import HorovodCommunicator
from .join import joinable, notify_join_context, shadowing, share_gradients
from .sharding import (
    full_gradient,
    gathered,
    largest_entry,
    refuse_flattened,
    set_full_gradient_,
    sharded_like,
    sharding_problem,
)
from .torch import TorchCommunicator, make_communicator

__all__ = [
    "KAISA",
    "Assignment",
    "AssignmentStrategy",
    "FactorWise",
    "LayerAssignment",
    "LayerCost",
    "LayerWise",
    "longest_first",
    "require_agreement",
    "Communicator",
    "HorovodCommunicator",
    "LocalCommunicator",
    "Parcel",
    "TorchCommunicator",
    "full_gradient",
    "gathered",
    "joinable",
    "largest_entry",
    "make_communicator",
    "notify_join_context",
    "refuse_flattened",
    "set_full_gradient_",
    "shadowing",
    "share_gradients",
    "sharded_like",
    "sharding_problem",
]
