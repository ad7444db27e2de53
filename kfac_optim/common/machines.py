"""The kinds of machine, and what one of them cannot do.

Constants in which the kinds differ are dictionaries by kind, each beside the code that uses it.
"""

from __future__ import annotations

from typing import Literal

import torch

Machine = Literal["cpu", "accelerator", "meta"]


def machine_of(device: torch.device) -> Machine:
    """The kind of machine that a device is; meta tensors serve to plan models for accelerators and to count work."""
    return "cpu" if device.type == "cpu" else "meta" if device.type == "meta" else "accelerator"


def is_asynchronous(device: torch.device) -> bool:
    """Whether the host goes on while a device computes.

    Launches, rather than arithmetic, then bound the time of a step on a small batch, and reading a number waits.
    """
    return machine_of(device) != "cpu"


def refuse_cuda_graphs() -> None:
    """Raises RuntimeError while a CUDA graph is recorded: it repeats kernels, but not the Python code of a step."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being recorded, but forward, backward and step() of a model with K-FAC can't be replayed: "
            "statistics are taken and factors decomposed in some steps only, by Python code. Let "
            "torch.compile(model, mode='reduce-overhead') record what can be, and call step() outside of it; or call "
            "optimizer.curvature.close() first, which leaves the base optimizer"
        )
