"""Checks that the saved state of an optimizer is whole and belongs to this model.

:mod:`~kfac_optim.engine.state` loads the engine's part, :mod:`~kfac_optim.bases.records` what the last step recorded.

Where to look::

    optimizer.py    where an optimizer's state holds the engine's part; checks of the base class's part
    checks.py       checks of the engine's part, and its checksums
"""

from .checks import check_counters, check_states, check_sums, checksums
from .optimizer import saved_parts, with_checksums

__all__ = [
    "check_counters",
    "check_states",
    "check_sums",
    "checksums",
    "saved_parts",
    "with_checksums",
]
