"""Learns from the next gradients how far to turn and stretch a base optimizer's step, and plans each step.

With the base optimizer's update u, K-FAC's direction k and the stretch s of a layer::

    step = u + trust (k - u) + reach s

Most learned numbers move by the sign of an inner product: that of the next gradient with a change that was made to the
step. :mod:`~kfac_optim.turning` carries out the plan.

Where to look::

    plan.py             all that was learned, and how it changes a step
    trust.py            how far a step turns
    reach.py            how far the step of each layer is stretched along flat directions
    graft.py            how much of the length of the base's update K-FAC's direction has
    brake.py            how much a step is shortened if the base's update is unusually long
    lessons.py          what the new gradients say about the last step, compared on the device and read at once
    inner_products.py   inner products of many gradients with as many vectors
    constraints.py      whether the training loop changes weights between steps
    opponents.py        whether networks train against each other
"""

from .constraints import compares_weights
from .graft import grafted
from .inner_products import Compared, alignments
from .lessons import Lessons, Readings, lessons_of
from .plan import Plan, Steering
from .reach import LEAST_REACH, stretches
from .trust import changes_at, turns

__all__ = [
    "LEAST_REACH",
    "Compared",
    "Lessons",
    "Plan",
    "Readings",
    "Steering",
    "alignments",
    "changes_at",
    "compares_weights",
    "grafted",
    "lessons_of",
    "stretches",
    "turns",
]
