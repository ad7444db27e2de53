"""What is saved of an engine and how it is loaded, once it is known to be whole and of this model.

What the last step recorded for the next one is saved and loaded by :mod:`~kfac_optim.bases.records`.

Where to look::

    optimizer.py    where an optimizer's state holds the engine's part; how the base class's part is checked and loaded
    engine.py       the engine's part: what is saved, and how it is loaded
    checks.py       checks of that part, and its checksums
"""

from .optimizer import saved_parts, unchanged_on_errors, with_checksums

__all__ = ["saved_parts", "unchanged_on_errors", "with_checksums"]
