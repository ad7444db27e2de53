"""Muon at the speed that it should have on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Float32(TorchFunctionMode):
    """Meanwhile ``tensor.bfloat16()`` is a copy in float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


class Muon(torch.optim.Muon):
    """``torch.optim.Muon``, whose Newton-Schulz iteration on a CPU is taken in float32 instead of bfloat16.

    Many CPUs emulate products in bfloat16: where the result files were made a step took 3 to 10 times as long so.
    """

    def step(self, closure: Any = None) -> Any:
        """Take one step."""
        if self.param_groups[0]["params"][0].device.type != "cpu":
            return super().step(closure)
        with _Float32():
            return super().step(closure)
