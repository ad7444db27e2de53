"""A thread that decomposes while training goes on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from .protocol import Failure, MaybeDecomposition

__all__ = ["Worker"]


class Worker:
    """Decomposes while training goes on: one thread, with a stream of its own on a GPU.

    A thread there too, because decompositions wait for the device to learn whether they failed. A process that was
    forked has no threads of its parent's: it starts one of its own, and does again what it waits for.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kfac-decomposition")
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def __reduce__(self) -> tuple[type[Worker], tuple[()]]:
        return Worker, ()  # copies and pickles start a thread of their own

    def close(self) -> None:
        """Ends the thread after what it is doing; so does the collection of the worker, if its jobs do not hold it."""
        self._finalizer()

    def submit(self, device: torch.device, work: Callable[[], MaybeDecomposition]) -> Callable[[], MaybeDecomposition]:
        """Starts ``work``, which may use what is computed on ``device`` so far.

        Returns:
            A function that waits for the result and makes it usable in the caller's stream.
        """
        stream = None
        if device.type == "cuda":
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))

        def run() -> MaybeDecomposition:
            with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
                return work()

        process = os.getpid()
        if process != self._process:
            self._start()
        future = self._pool.submit(run)

        def result() -> MaybeDecomposition:
            found = future.result() if process == os.getpid() else run()
            if stream is not None:
                current = torch.cuda.current_stream(device)
                current.wait_stream(stream)
                for part in () if isinstance(found, Failure) else found:
                    part.record_stream(current)  # or the side stream would take its memory for free too early
            return found

        return result
