"""The kinds of machine. Constants in which they differ are dictionaries by kind, each beside the code that uses it."""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["is_asynchronous", "machine_of"]


def machine_of(device: torch.device) -> Literal["cpu", "accelerator", "meta"]:
    """The kind of machine that a device is; meta tensors serve to plan models for accelerators and to count work."""
    return "cpu" if device.type == "cpu" else "meta" if device.type == "meta" else "accelerator"


def is_asynchronous(device: torch.device) -> bool:
    """Whether the host goes on while a device computes.

    Launches, rather than arithmetic, then bound the time of a step on a small batch, and reading a number waits.
    """
    return machine_of(device) != "cpu"
