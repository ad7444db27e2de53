"""The saved state of an optimizer: its form, and checks that it is whole and belongs to this model.

The only entries loaded here are those of a turned step; :mod:`~kfac_optim.engine.state` loads the engine's part.

Where to look::

    optimizer.py    where an optimizer's state holds the engine's part; checks of the base class's part
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
