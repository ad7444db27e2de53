"""The precision of matrix products: full for moments and decompositions, the user's choice for directions.

Autocast belongs to a thread. The precision of products in float32 belongs to the process: torch has one switch for all
threads, which lets GPUs compute with TF32, and CPUs that can do so with bfloat16. Statistics are computed in autograd's
threads and decompositions in a worker's. So the first ``with`` block that opens sets the switch, and the last one that
closes puts it back. Meanwhile products in other threads are more precise than the user asked for. Directions are
computed in every step, and rounding hurts them less (docs/precision.rst), so that they leave the switch alone.
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
    """This process's switch for the precision of matrix products in float32."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._restore: Callable[[], None] = _nothing

    def hold(self) -> None:
        """Keeps the switch at the highest precision; the first thread to hold it sets it."""
        with self._lock:
            if not self._holders:
                self._restore = self._set()
            self._holders += 1

    def release(self) -> None:
        """Lets go of the switch; the last thread to do so puts it back."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                self._restore()

    @staticmethod
    def _set() -> Callable[[], None]:
        """Sets the highest precision; returns a function that undoes this, unless the user has chosen again since."""
        try:
            before = torch.get_float32_matmul_precision()
            if before == "highest":
                return _nothing
            # From torch 2.9 on, CPUs have an attribute of their own.
            of_cpu = getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", None)
            torch.set_float32_matmul_precision("highest")
        except RuntimeError:  # once the user has set torch 2.9's attributes, these functions refuse to work
            return _set_attributes()
        return lambda: _restore_precision(before, of_cpu)


def _nothing() -> None:
    """Undoes nothing, because the user's own precision is the highest."""


def _restore_precision(before: str, of_cpu: str | None) -> None:
    if torch.get_float32_matmul_precision() == "highest":
        torch.set_float32_matmul_precision(before)
        # This sets the CPUs' attribute as well, which the user's own way (cuda.matmul.allow_tf32) may have left alone.
        if of_cpu is not None:
            _access_to(torch.backends.mkldnn)[1](of_cpu)


def _set_attributes() -> Callable[[], None]:
    """As :meth:`_Switch._set`, by torch 2.9's attributes: one for GPUs, one for CPUs."""
    devices: tuple[Any, ...] = (torch.backends.cuda, torch.backends.mkldnn)
    attributes = [_access_to(device) for device in devices]
    before = [read() for read, _ in attributes]
    for _, choose in attributes:
        choose("ieee")

    def undo() -> None:
        for (read, choose), precision in zip(attributes, before, strict=True):
            if read() == "ieee":
                choose(precision)

    return undo


def _access_to(device: Any) -> tuple[Callable[[], str], Callable[[str], None]]:
    """Functions that read and set the attribute of one kind of device."""
    name = "fp32_precision"
    return functools.partial(getattr, device.matmul, name), functools.partial(setattr, device.matmul, name)


_SWITCH = _Switch()


class full_precision:
    """Switches autocast, gradients and fast products off in a ``with`` block: second moments need all of float32.

    It is entered some hundred times in a step; a generator would take three times as long.

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
    """Switches autocast off in a ``with`` block; products in float32 are as precise as the user has chosen.

    Args:
        device_type: Where the block computes, such as "cuda".
    """
    mixed = torch.is_autocast_enabled(device_type)  # switching off what is off already would take time
    return torch.autocast(device_type, enabled=False) if mixed else nullcontext()
