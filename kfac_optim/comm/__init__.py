"""Communication between ranks: the only package that knows of process groups.

Who calls what is the same on all ranks by construction: buckets follow from shapes and from the assignment alone.

Where to look::

    communicator.py     what the engine calls: sums and sends of lists of tensors, in buckets, with the traffic counted
    transports.py       torch.distributed and Horovod
    joining.py          ranks that have run out of inputs
    sharding.py         tensors and gradients of which every rank holds a part
"""

from .communicator import Communicator, LocalCommunicator, Parcel
from .joining import joinable, notify_join_context, shadowing, share_gradients
from .sharding import (
    full_gradient,
    gathered,
    largest_entry,
    refuse_flattened,
    set_full_gradient_,
    sharded_like,
    sharding_problem,
)
from .transports import HorovodCommunicator, TorchCommunicator, make_communicator

__all__ = [
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
