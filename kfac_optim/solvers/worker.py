"""Decompositions in a thread of their own, while training goes on."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from .protocol import Failure, MaybeDecomposition


class Worker:
    """Decomposes in one thread, which has its own stream on a GPU, while training goes on.

    A stream alone would not do, because a decomposition waits for the device to learn whether it has failed. A forked
    process does not inherit its parent's thread: it starts its own, and repeats the work whose results it waits for.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kfac-decomposition")
        self._finalizer = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def __reduce__(self) -> tuple[type[Worker], tuple[()]]:
        return Worker, ()  # copies and pickles start their own thread

    def close(self) -> None:
        """Ends the thread after its current job, as garbage collection of the worker does if no job refers to it."""
        self._finalizer()

    def submit(self, device: torch.device, work: Callable[[], MaybeDecomposition]) -> Callable[[], MaybeDecomposition]:
        """Starts ``work``, which may use everything that ``device`` was told to compute before.

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
                    part.record_stream(current)  # or the memory could be reused while the current stream needs it
            return found

        return result
