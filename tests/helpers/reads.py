"""Reads of a tensor's value by the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Counts the reads of a tensor's value by the host, each of which would wait for an accelerator."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        if func is torch.ops.aten.index.Tensor:  # the length of what a mask selects is read
            self.count += any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))
