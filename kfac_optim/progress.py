"""How many steps have been taken, and which was the last to collect statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .common.counters import Counted, counter


class Progress(Counted):
    """How far training has come.

    Attributes:
        step: The number of steps taken, with those of the run that this one resumes.
        taken: The number of steps taken without those.
        skipped_steps: The number of steps with a gradient that was not finite.
        last_statistics: The step that last added statistics; None: the next step collects some, whatever the interval.
        lacks_counters: Whether a new engine has got factors of an earlier run without its counters.
    """

    step: int = counter(0)
    skipped_steps: int = counter(0)
    last_statistics: int | None = counter(None)

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.lacks_counters = 0, False

    def load(self, counters: Mapping[str, Any]) -> None:
        """Restores saved counters."""
        super().load(counters)
        self.lacks_counters = False

    def advance(self) -> None:
        """Counts a step that was taken."""
        self.step += 1
        self.taken += 1

    def skip(self) -> None:
        """Counts a step that is not taken."""
        self.skipped_steps += 1

    def note_statistics(self) -> None:
        """Notes that this step has added statistics."""
        self.last_statistics = self.step

    def collect_next_step(self) -> None:
        """Has the next step collect statistics, whatever the interval."""
        self.last_statistics = None

    def note_foreign_factors(self) -> None:
        """Notes that factors of an earlier run came without its counters."""
        self.lacks_counters = True
