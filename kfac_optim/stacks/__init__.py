"""Layers of one shape as one stack of matrices: what a step preconditions and scales at once.

Where to look::

    stack.py            which layers form a stack, and their decompositions side by side
    tiles.py            block-diagonal factors, tile by tile
    layout.py           where the parameters of the layers lie in the matrices of a stack
    algebra.py          norms, inner products and multiples of stacked matrices
    directions.py       the vectors of a step, and its directions by parameter
"""

from .algebra import (
    Direction,
    Steepest,
    at_largest,
    cosines,
    keep_zeros_,
    norms,
    rates_followed,
    ratios,
    relative_lengths,
    scaled,
    update_norms,
)
from .directions import Directions, Maker, StepVectors, by_parameter
from .layout import fill_all
from .stack import Stack, layer_of_pair, stack_key, stacks_of
from .tiles import Tile, precondition

__all__ = [
    "Direction",
    "Directions",
    "Maker",
    "Stack",
    "Steepest",
    "StepVectors",
    "Tile",
    "at_largest",
    "by_parameter",
    "cosines",
    "fill_all",
    "keep_zeros_",
    "layer_of_pair",
    "norms",
    "precondition",
    "rates_followed",
    "ratios",
    "relative_lengths",
    "scaled",
    "stack_key",
    "stacks_of",
    "update_norms",
]
