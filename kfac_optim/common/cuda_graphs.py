"""CUDA graphs are refused: a recording repeats kernels, but not the Python code of the hooks and of the step."""

from __future__ import annotations

import torch

__all__ = ["refuse_cuda_graphs"]


def refuse_cuda_graphs() -> None:
    """Raises RuntimeError while a CUDA graph is recorded (``torch.cuda.graph``)."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being recorded, but forward, backward and step() of a model with K-FAC can't be replayed: "
            "statistics are taken and factors decomposed in some steps only, by Python code. Let "
            "torch.compile(model, mode='reduce-overhead') record what can be, and call step() outside of it; or call "
            "optimizer.curvature.close() first, which leaves the base optimizer"
        )
