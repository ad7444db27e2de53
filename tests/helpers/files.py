"""States and models as files, which hold them as they were when they were written."""

from __future__ import annotations

import io
from typing import Any

import torch


def packed(value: Any) -> bytes:
    """The content of a file that holds it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(content: bytes, *, plain: bool = True, **options: Any) -> Any:
    """What a file holds; ``plain``: nothing but tensors, numbers, strings and containers of them is allowed in it."""
    return torch.load(io.BytesIO(content), weights_only=plain, **options)


def through_a_file(value: Any, *, plain: bool = True) -> Any:
    """A copy by way of a file."""
    return unpacked(packed(value), plain=plain)
