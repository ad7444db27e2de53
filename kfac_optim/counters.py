"""Numbers that are learned and saved with the state: each named, with where it starts and how large it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

__all__ = ["Counted", "Counter", "moved"]


class Counter(NamedTuple):
    """A number of some object.

    Attributes:
        attribute: Its name there.
        start: What it is before anything is learned; all its values are of that type.
        largest: What it is at most.
    """

    attribute: str
    start: float
    largest: float = math.inf

    def allows(self, value: Any, least: float = 0) -> bool:
        """Whether a saved value can be one of its own."""
        in_range = isinstance(value, int | float) and math.isfinite(value) and least <= value <= self.largest
        return in_range and (isinstance(self.start, float) or value == int(value))

    def restored(self, value: Any) -> Any:
        """A saved value, as the number it was."""
        return type(self.start)(value)


class Counted:
    """An object that is known by its counters.

    Attributes:
        COUNTERS: Its counters, by the names under which they are saved.
    """

    COUNTERS: ClassVar[Mapping[str, Counter]]

    def __init__(self) -> None:
        self.load({})

    def counters(self) -> dict[str, float]:
        """Its part of the saved counters."""
        found = {name: getattr(self, each.attribute) for name, each in self.COUNTERS.items()}
        return {name: int(value) if isinstance(value, bool) else value for name, value in found.items()}

    def load(self, counters: Mapping[str, Any]) -> None:
        """Restores saved counters; those that are missing start anew."""
        self.take_over({name: counters.get(name, each.start) for name, each in self.COUNTERS.items()})

    def take_over(self, counters: Mapping[str, Any]) -> None:
        """Restores some counters; the others stay as they are."""
        for name in self.COUNTERS.keys() & counters.keys():
            each = self.COUNTERS[name]
            setattr(self, each.attribute, each.restored(counters[name]))


def moved(notches: int, alignment: float, most: int, *, fall: int = 1, rise: int = 1) -> int:
    """So many notches up or down, by the sign of an alignment, between 0 and ``most``."""
    if alignment == 0:
        return notches
    return min(most, notches + rise) if alignment > 0 else max(0, notches - fall)
