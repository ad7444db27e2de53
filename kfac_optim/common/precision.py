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
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_ATTRIBUTE = "fp32_precision"


class _ByFunction:
    """The highest precision, set by torch's function for all devices, which from torch 2.9 on may refuse to work."""

    def __init__(self, before: str) -> None:
        self._before = before
        # From torch 2.9 on, CPUs have an attribute of their own.
        self._of_cpu = getattr(getattr(torch.backends.mkldnn, "matmul", None), _ATTRIBUTE, None)
        torch.set_float32_matmul_precision("highest")

    def restore(self) -> None:
        """Puts the user's precision back, unless they have chosen again since."""
        if torch.get_float32_matmul_precision() == "highest":
            torch.set_float32_matmul_precision(self._before)
            # This sets the CPUs' attribute as well, which the user's way (cuda.matmul.allow_tf32) may have left alone.
            if self._of_cpu is not None:
                _choose(torch.backends.mkldnn, self._of_cpu)


class _ByAttribute:
    """As :class:`_ByFunction`, by torch 2.9's attributes: one for GPUs, one for CPUs."""

    def __init__(self) -> None:
        devices: tuple[Any, ...] = (torch.backends.cuda, torch.backends.mkldnn)
        self._before = [(device, getattr(device.matmul, _ATTRIBUTE)) for device in devices]
        for device in devices:
            _choose(device, "ieee")

    def restore(self) -> None:
        """Puts the user's precision back, unless they have chosen again since."""
        for device, before in self._before:
            if getattr(device.matmul, _ATTRIBUTE) == "ieee":
                _choose(device, before)


def _choose(device: Any, precision: str) -> None:
    functools.partial(setattr, device.matmul, _ATTRIBUTE)(precision)


class _Switch:
    """This process's switch for the precision of matrix products in float32."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._refused = False  # whether torch's function has refused to work, so that the attributes are set
        self._highest: _ByFunction | _ByAttribute | None = None  # None if the user has chosen the highest one

    def hold(self) -> None:
        """Keeps the switch at the highest precision; the first thread to hold it sets it."""
        with self._lock:
            if not self._holders:
                self._highest = self._set_highest()
            self._holders += 1

    def release(self) -> None:
        """Lets go of the switch; the last thread to do so puts it back."""
        with self._lock:
            self._holders -= 1
            if self._highest is not None and not self._holders:
                self._highest.restore()

    def _set_highest(self) -> _ByFunction | _ByAttribute | None:
        if not self._refused:
            try:
                before = torch.get_float32_matmul_precision()
                return None if before == "highest" else _ByFunction(before)
            except RuntimeError:  # the user has set torch 2.9's attributes
                self._refused = True  # an exception takes longer than all the rest
        return _ByAttribute()


_SWITCH = _Switch()


class full_precision:
    """Switches autocast, gradients and fast products off in a ``with`` block: second moments need all of float32.

    It is entered some hundred times in a step, so that it leaves alone what is off already; a generator would take
    several times as long. ``device_type``: where the block computes, such as "cuda".
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        self._autocast = torch.is_autocast_enabled(self._device_type)  # first: it may raise, and nothing is off yet
        _SWITCH.hold()
        if self._autocast:  # torch.autocast does the same, and takes several times as long
            torch.set_autocast_enabled(self._device_type, False)
        self._grad = torch.is_grad_enabled()
        if self._grad:
            torch.set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        if self._grad:
            torch.set_grad_enabled(True)
        if self._autocast:
            torch.set_autocast_enabled(self._device_type, True)
        _SWITCH.release()


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switches autocast off in a ``with`` block; products in float32 are as precise as the user has chosen."""
    mixed = torch.is_autocast_enabled(device_type)  # switching off what is off already would take time
    return torch.autocast(device_type, enabled=False) if mixed else nullcontext()
