"""Checks that the saved state of an optimizer is whole and belongs to this model.

What the last step recorded is saved and loaded by :mod:`~kfac_optim.bases.records`.

Where to look::

    optimizer.py    where an optimizer's state holds the engine's part; checks of the base class's part
    engine.py       the engine's part: what is saved, and how it is loaded
    checks.py       checks of that part, and its checksums
"""

from .optimizer import saved_parts, with_checksums

__all__ = ["saved_parts", "with_checksums"]
