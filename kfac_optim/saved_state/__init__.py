"""The saved state of an optimizer: the form it has, whether it is whole, and whether it is this model's.

Nothing here loads anything but what a turned step has left; :mod:`~kfac_optim.state` loads the engine's part.

Where to look::

    optimizer.py    where the engine's part stands in an optimizer's state; checks of the base class's part
    checks.py       checks of the engine's part, and its checksums
    step.py         what a turned step leaves in the state for the next one, and how that is saved
"""

from .checks import check_counters, check_states, check_sums, checksums
from .optimizer import AVERAGES, PREFIX, kept_states, saved_parts, set_aside, with_checksums
from .step import CHANGE, DESCENT, LENGTH, OF_STEP, STRETCH, TURN, forget, forget_all, saved_form, take_saved_form

__all__ = [
    "AVERAGES",
    "CHANGE",
    "DESCENT",
    "LENGTH",
    "OF_STEP",
    "PREFIX",
    "STRETCH",
    "TURN",
    "check_counters",
    "check_states",
    "check_sums",
    "checksums",
    "forget",
    "forget_all",
    "kept_states",
    "saved_form",
    "saved_parts",
    "set_aside",
    "take_saved_form",
    "with_checksums",
]
