"""How long the stages of a step take: the stages of the paper's Fig. 7."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["StageTimes", "communicating"]


class StageTimes:
    """Wall time per stage of the engine, and a ``torch.profiler`` range of the same name.

    On an accelerator the times are those of the host, which waits for the device once per step; use the profiler there.

    Attributes:
        seconds: Total time by stage.
        calls: Number of timed blocks by stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a ``with`` block as a part of the named stage."""
        start = time.perf_counter()
        # A range costs as much as a small operation, and only a profiler has a use for it.
        profiled = torch.autograd.profiler._is_profiler_enabled
        with torch.profiler.record_function(f"kfac: {name}") if profiled else nullcontext():
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.calls[name] = self.calls.get(name, 0) + 1

    def table(self) -> dict[str, dict[str, float]]:
        """Per stage: total milliseconds, calls, milliseconds per call."""
        return {
            name: {"ms": 1e3 * seconds, "calls": self.calls[name], "ms_per_call": 1e3 * seconds / self.calls[name]}
            for name, seconds in self.seconds.items()
        }


def communicating(what: str, stopwatch: StageTimes, world_size: int) -> AbstractContextManager[None]:
    """Times a ``with`` block as the stage "<what> communication"; a single process has no such stage."""
    return stopwatch.stage(f"{what} communication") if world_size > 1 else nullcontext()
