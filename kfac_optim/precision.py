"""Full precision for moments and decompositions: without autocast, without TF32.

Autocast belongs to a thread, TF32 to the process: torch has one switch for all threads. Statistics are computed in
autograd's threads and decompositions in a worker's, so the first ``with`` block that opens sets the switch, and the
last one that closes puts it back. Meanwhile products in other threads are more precise than the user asked for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["full_precision"]


class _Switch:
    """The precision of matrix products in float32 on GPUs, of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._restore: Callable[[], None] = lambda: None

    @contextmanager
    def highest(self) -> Iterator[None]:
        """Keeps the switch at the highest precision.

        The first block of any thread sets it, the last one to close puts it back.
        """
        with self._lock:
            if not self._holders:
                self._restore = self._set()
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._restore()

    @staticmethod
    def _set() -> Callable[[], None]:
        """Sets it to the highest precision; returns what undoes that, unless the user has chosen again meanwhile."""
        matmul: Any = torch.backends.cuda.matmul
        read: Callable[[], str] = torch.get_float32_matmul_precision
        choose: Callable[[str], None] = torch.set_float32_matmul_precision
        try:
            before, highest = read(), "highest"
            choose(highest)
        except RuntimeError:  # the user has set torch 2.9's attribute, and then these functions refuse to work
            read = functools.partial(getattr, matmul, "fp32_precision")
            choose = functools.partial(setattr, matmul, "fp32_precision")
            before, highest = read(), "ieee"
            choose(highest)
        return lambda: choose(before) if read() == highest else None


_SWITCH = _Switch()


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Switches autocast, gradients and TF32 off in a ``with`` block: second moments need every bit of float32.

    Args:
        device_type: Where the block computes: "cuda", or any other, where there is no TF32.
    """
    mixed = torch.is_autocast_enabled(device_type)  # if not, there is nothing to switch off, which takes time
    with torch.no_grad(), torch.autocast(device_type, enabled=False) if mixed else nullcontext():
        if device_type != "cuda":
            yield
            return
        with _SWITCH.highest():
            yield
