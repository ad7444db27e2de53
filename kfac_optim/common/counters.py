"""Numbers that are learned and saved with the state: the name, the start value and the largest value of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

__all__ = ["Counted", "Counter", "moved"]


class Counter(NamedTuple):
    """A learned number, which is an attribute of some object.

    Attributes:
        attribute: The name of that attribute.
        start: The value before anything is learned; all values are of its type.
        largest: The largest value.
    """

    attribute: str
    start: float
    largest: float = math.inf

    def allows(self, value: Any, least: float = 0) -> bool:
        """Whether a saved value is a possible value of this number."""
        in_range = isinstance(value, int | float) and math.isfinite(value) and least <= value <= self.largest
        return in_range and (isinstance(self.start, float) or value == int(value))

    def restored(self, value: Any) -> Any:
        """A saved value, converted back to the type of the number."""
        return type(self.start)(value)


class Counted:
    """An object whose state is in its counters.

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
    """Moves ``notches`` up by ``rise`` or down by ``fall``, by the sign of an alignment, between 0 and ``most``."""
    if alignment == 0:
        return notches
    return min(most, notches + rise) if alignment > 0 else max(0, notches - fall)
