"""The base class's own step: its parameters and their states, its first moment, its update, its weight decay.

Where to look::

    base_step.py        takes the step apart
    parameters.py       the parameters of a step, and what a base class does with their gradients
    rules.py            what SGD, Adam and its relatives, and LAMB do
    first_moments.py    averages of gradients, where the base class keeps none, or one with weight decay in it
    multi_tensor.py     multi-tensor operations on whole and sharded parameters
    state_keys.py       K-FAC's entries in the state of a parameter: who writes them, who reads them
    records.py          those that a step records for the next one, from the step that writes them to the saved state
    lamb.py             LAMB by multi-tensor operations
"""

from .base_step import refuse_base, refuse_order, take_apart, update_length
from .first_moments import gradient_weight_tracked, keep_averages
from .lamb import MultiTensorLamb
from .parameters import Bucket, gradients_of
from .rules import buckets_of

__all__ = [
    "Bucket",
    "MultiTensorLamb",
    "buckets_of",
    "gradient_weight_tracked",
    "gradients_of",
    "keep_averages",
    "refuse_base",
    "refuse_order",
    "take_apart",
    "update_length",
]
