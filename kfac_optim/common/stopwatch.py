"""How long the stages of a step take: the stages of the paper's Fig. 7."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Stopwatch:
    """Wall time per stage of the engine, and a ``torch.profiler`` range of the same name.

    On an accelerator the times are those of the host, which waits for the device once per step; use the profiler there.
    """

    def __init__(self) -> None:
        self._timed: dict[str, tuple[float, int]] = {}  # by stage, the seconds and the number of timed blocks

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Times a ``with`` block as a part of the named stage."""
        return _Stage(self, name)

    def communication(self, what: str, world_size: int) -> AbstractContextManager[None]:
        """Times a ``with`` block as the stage "<what> communication"; a single process has no such stage."""
        return self.stage(f"{what} communication") if world_size > 1 else nullcontext()

    def add(self, name: str, seconds: float) -> None:
        """Adds a timed block to a stage."""
        before, calls = self._timed.get(name, (0.0, 0))
        self._timed[name] = before + seconds, calls + 1

    def table(self) -> dict[str, dict[str, float]]:
        """Per stage: total milliseconds, calls, milliseconds per call."""
        return {
            name: {"ms": 1e3 * seconds, "calls": calls, "ms_per_call": 1e3 * seconds / calls}
            for name, (seconds, calls) in self._timed.items()
        }


class _Stage(AbstractContextManager[None]):
    """A timed block; some hundred of them in a step, so it is no generator, which would take twice as long."""

    def __init__(self, times: Stopwatch, name: str) -> None:
        self._times, self._name = times, name

    def __enter__(self) -> None:
        # A range costs as much as a small operation, and only a profiler has a use for it.
        profiled = torch.autograd.profiler._is_profiler_enabled
        self._range = torch.profiler.record_function(f"kfac: {self._name}") if profiled else None
        self._start = time.perf_counter()
        if self._range is not None:
            self._range.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._range is not None:
            self._range.__exit__(*error)
        if error[0] is None:
            self._times.add(self._name, time.perf_counter() - self._start)
