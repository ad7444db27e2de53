"""How far a base optimizer's step is turned and stretched: what the next gradients teach, and the plan of a step.

With the base optimizer's update u, K-FAC's direction k and the stretch s of a layer::

    step = u + trust (k - u) + reach s

Everything learned moves by the sign of an inner product of the next gradient with what the step was changed by.
:mod:`~kfac_optim.turning` carries the plan out.

Where to look::

    plan.py             everything learned, and what becomes of a step
    trust.py            how far it turns; the average of gradients where the base keeps none
    reach.py            how far the step of each layer is stretched where it is flat
    graft.py            how much of the base's length a direction has
    brake.py            how much shorter a step is where the base's is much longer than usual
    lessons.py          what the new gradients say of the last step, read at once
    inner_products.py   of many gradients with as many vectors
    constraints.py      whether the loop changes weights between steps
    opponents.py        whether networks train against each other
"""

from .brake import brake_of
from .constraints import WeightWatch, compares_weights
from .graft import shortened
from .inner_products import Compared, Copies, alignment, alignments
from .lessons import Lessons, read_all
from .opponents import Signs
from .plan import Plan, Steering
from .reach import LEAST, stretches
from .trust import changes_at, turns

__all__ = [
    "LEAST",
    "Compared",
    "Copies",
    "Lessons",
    "Plan",
    "Signs",
    "Steering",
    "WeightWatch",
    "alignment",
    "alignments",
    "brake_of",
    "changes_at",
    "compares_weights",
    "read_all",
    "shortened",
    "stretches",
    "turns",
]
