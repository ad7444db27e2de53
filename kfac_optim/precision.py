"""The precision of products of matrices: full for moments and decompositions, the user's own for directions.

Autocast belongs to a thread, the precision of products in float32 to the process: torch has one switch for all threads,
which lets GPUs compute with TF32, and CPUs that can with bfloat16. Statistics are computed in autograd's threads and
decompositions in a worker's, so the first ``with`` block that opens sets the switch, and the last one that closes puts
it back. Meanwhile products in other threads are more precise than the user asked for. Directions are computed in every
step, and rounding hurts them less (docs/precision.rst): they leave the switch alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["full_precision", "without_autocast"]


class _Switch:
    """The precision of matrix products in float32 of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._restore: Callable[[], None] = _nothing

    def hold(self) -> None:
        """Keeps the switch at the highest precision; the first of all threads sets it."""
        with self._lock:
            if not self._holders:
                self._restore = self._set()
            self._holders += 1

    def release(self) -> None:
        """The last one to let go of it puts it back."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._restore()

    @staticmethod
    def _set() -> Callable[[], None]:
        """Sets it to the highest precision; returns what undoes that, unless the user has chosen again meanwhile."""
        try:
            before = torch.get_float32_matmul_precision()
            if before == "highest":
                return _nothing
            # CPUs have an attribute of their own from torch 2.9 on.
            of_cpu = getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None)
            torch.set_float32_matmul_precision("highest")
        except RuntimeError:  # the user has set torch 2.9's attributes, and then these functions refuse to work
            return _set_attributes()
        return lambda: _undo(before, of_cpu)


def _nothing() -> None:
    """What there is to undo where the user's precision is the highest."""


def _undo(before: str, of_cpu: str | None) -> None:
    if torch.get_float32_matmul_precision() == "highest":
        torch.set_float32_matmul_precision(before)
        # That sets the attribute of CPUs as well; cuda.matmul.allow_tf32, which the user may have set, leaves it alone.
        if of_cpu is not None:
            _attribute(torch.backends.mkldnn)[1](of_cpu)


def _set_attributes() -> Callable[[], None]:
    """As :meth:`_Switch._set`, by torch 2.9's attributes: one for GPUs, one for CPUs."""
    devices: tuple[Any, ...] = (torch.backends.cuda, torch.backends.mkldnn)
    ways = [_attribute(device) for device in devices]
    before = [read() for read, _ in ways]
    for _, choose in ways:
        choose("ieee")

    def undo() -> None:
        for (read, choose), precision in zip(ways, before, strict=True):
            if read() == "ieee":
                choose(precision)

    return undo


def _attribute(device: Any) -> tuple[Callable[[], str], Callable[[str], None]]:
    """How the attribute of one kind of device is read and set."""
    name = "fp32_precision"
    return functools.partial(getattr, device.matmul, name), functools.partial(setattr, device.matmul, name)


_SWITCH = _Switch()


class full_precision:
    """Switches autocast, gradients and fast products off in a ``with`` block: second moments need all of float32.

    Entered some hundred times in a step; a generator would take three times as long.

    Args:
        device_type: Where the block computes, such as "cuda".
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        _SWITCH.hold()  # first: if that fails, nothing is left switched off
        self._grad = torch.is_grad_enabled()
        self._autocast = without_autocast(self._device_type)
        self._autocast.__enter__()
        torch.set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch.set_grad_enabled(self._grad)
        self._autocast.__exit__(*error)
        _SWITCH.release()


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switches autocast off in a ``with`` block; products in float32 are as precise as the user lets them be.

    Args:
        device_type: Where the block computes, such as "cuda".
    """
    mixed = torch.is_autocast_enabled(device_type)  # if not, there is nothing to switch off, which takes time
    return torch.autocast(device_type, enabled=False) if mixed else nullcontext()
