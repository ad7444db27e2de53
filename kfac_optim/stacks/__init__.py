"""Layers of one shape as one stack of matrices: what a step preconditions and scales at once.

Where to look::

    stack.py            which layers form a stack, and their decompositions side by side
    tiles.py            the tiles of block-diagonal factors, as pairs
    layout.py           where the parameters of the layers lie in the matrices of a stack
    pairs.py            norms and inner products of Kronecker pairs, and which are scaled together
    matrices.py         the matrices of all stacks and their algebra, in two forms: for CPUs and for accelerators
    stacked.py          the directions of a step, with all that a scaling knows about the layers
    preconditioner.py   applies the decompositions of all stacks to the moments of a step
    directions.py       what a step preconditions, and its directions by parameter
"""

from .directions import Directions, Maker, StepVectors, by_parameter
from .matrices import Matrices
from .pairs import Groups, cosines, ratio
from .preconditioner import StackPreconditioner
from .stack import Stack, stack_key, stacks_of
from .stacked import Direction, Stacked

__all__ = [
    "Direction",
    "Directions",
    "Maker",
    "Matrices",
    "Stack",
    "StackPreconditioner",
    "Stacked",
    "StepVectors",
    "Groups",
    "by_parameter",
    "cosines",
    "ratio",
    "stack_key",
    "stacks_of",
]
