"""``KFAC``: a step without a learning rate.

Where to look::

    optimizer.py        the optimizer
    objective.py        the loss around the weights of a step, from the outputs of the model
    quadratic.py        quadratic models along a few directions, their minimum, adaptive damping
"""

from .optimizer import KFAC

__all__ = ["KFAC"]
