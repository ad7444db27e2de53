"""Numbers that are saved with the state: the start value, the largest value and the name of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple


class Counter(NamedTuple):
    """A number that is saved.

    Attributes:
        start: The value at first; all values are of its type. None, for never, is saved as -1; other values are ints.
        largest: The largest value.
        name: The name under which it is saved; empty: that of the attribute.
        attribute: The attribute of its owner; empty if the owner saves and restores it by itself.
    """

    start: float | None
    largest: float = math.inf
    name: str = ""
    attribute: str = ""

    def allows(self, value: Any) -> bool:
        """Whether a saved value is a possible value of this number."""
        least = -1 if self.start is None else 0
        in_range = isinstance(value, int | float) and math.isfinite(value) and least <= value <= self.largest
        return in_range and (isinstance(self.start, float) or value == int(value))

    def restored(self, value: Any) -> Any:
        """A saved value, converted back to the type of the number; the start value for None, where none was saved."""
        if self.start is None:
            return None if value is None or value < 0 else int(value)
        return self.start if value is None else type(self.start)(value)


def counter(start: float | None, largest: float = math.inf, name: str = "") -> Any:
    """Declares a saved attribute of a :class:`Counted`; see :class:`Counter`."""
    return Counter(start, largest, name)


class Counted:
    """An object whose state is in its counters: ``seen: int = counter(0, largest=10, name="lengths")``.

    Attributes:
        COUNTERS: Its counters, by the names under which they are saved; keywords of a class are counters that it saves
            and restores by itself.
    """

    COUNTERS: ClassVar[Mapping[str, Counter]] = {}

    def __init_subclass__(cls, **others: Counter) -> None:
        own = {name: each._replace(attribute=name) for name, each in vars(cls).items() if isinstance(each, Counter)}
        cls.COUNTERS = {**cls.COUNTERS, **{each.name or name: each for name, each in own.items()}, **others}

    def __init__(self) -> None:
        Counted.load(self, {})

    def counters(self) -> dict[str, float]:
        """Its part of the saved counters."""
        values = {name: getattr(self, each.attribute) for name, each in self.COUNTERS.items() if each.attribute}
        return {name: -1 if x is None else int(x) if isinstance(x, bool) else x for name, x in values.items()}

    def load(self, counters: Mapping[str, Any]) -> None:
        """Restores saved counters; those that are missing start anew."""
        for name, each in self.COUNTERS.items():
            if each.attribute:
                setattr(self, each.attribute, each.restored(counters.get(name)))


def moved(notches: int, alignment: float, most: int, *, fall: int = 1, rise: int = 1) -> int:
    """Moves ``notches`` up by ``rise`` or down by ``fall``, by the sign of an alignment, between 0 and ``most``."""
    if alignment == 0:
        return notches
    return min(most, notches + rise) if alignment > 0 else max(0, notches - fall)
