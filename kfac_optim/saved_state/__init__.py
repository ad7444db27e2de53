"""The saved state of an optimizer: the form it has, whether it is whole, and whether it is this model's.

Nothing here loads anything but what a turned step has left; :mod:`~kfac_optim.state` loads the engine's part.

Where to look::

    optimizer.py    where the engine's part stands in an optimizer's state; checks of the base class's part
    checks.py       checks of the engine's part, and its checksums
    step.py         the form in which the entries of a turned step are saved
"""

from .checks import check_counters, check_states, check_sums, checksums
from .optimizer import saved_parts, with_checksums
from .step import saved_form, take_saved_form

__all__ = [
    "check_counters",
    "check_states",
    "check_sums",
    "checksums",
    "saved_form",
    "saved_parts",
    "take_saved_form",
    "with_checksums",
]
