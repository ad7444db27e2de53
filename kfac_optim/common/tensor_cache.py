"""Caches of tensors, such as indices that are kept on a device between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def tensor_cache(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """``functools.lru_cache`` for functions that make tensors.

    Under ``FakeTensorMode``, by which users estimate the memory of a training, tensors have no numbers. Those that are
    made then serve that mode alone.
    """

    def decorate(make: Callable[..., T]) -> Callable[..., T]:
        @functools.lru_cache(maxsize)
        def of_mode(mode: Any, *arguments: Hashable) -> T:
            return make(*arguments)

        @functools.wraps(make)
        def cached(*arguments: Hashable) -> T:
            return of_mode(torch._C._get_dispatch_mode(_FAKE), *arguments)

        return cached

    return decorate


@tensor_cache(128)
def sent_once(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Whole numbers as a tensor, which is sent to the device once and kept there."""
    return torch.tensor(numbers, device="cpu").to(device, non_blocking=True)
