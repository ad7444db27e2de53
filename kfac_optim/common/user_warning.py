"""Warnings that point to the line of the user's code that led to them, however deep inside a step they arise."""

from __future__ import annotations

import sys
import warnings

_PASSED_OVER = ("kfac_optim", "torch", "copy", "contextlib")  # packages and modules whose lines tell a user nothing


def warn_user(message: str) -> None:
    """Warns with the place of the innermost caller outside this package and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
