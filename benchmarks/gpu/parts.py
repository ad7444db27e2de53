"""What a part of ``benchmarks.gpu`` is: measurements by name, and what becomes of their results."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from matplotlib.figure import Figure


class LeftOut(Exception):
    """A measurement that cannot be made here; its text says why."""


class Part(Protocol):
    """A part; each of its measurements is made, or left out, by itself."""

    def measurements(self, options: Namespace) -> Mapping[str, Callable[[], Any]]:
        """Return the measurements by name, the most important first.

        Args:
            options: The command line, and the ``device``.
        """

    def content(self, results: Sequence[Any]) -> dict[str, Any]:
        """Return the entries of the result file."""

    def text(self, results: Sequence[Any]) -> str:
        """Return the tables."""

    def draw(self, results: Sequence[Any]) -> Figure:
        """Return the picture."""
