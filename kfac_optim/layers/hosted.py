"""Layers whose weight is given to a function of torch inside the call of a module, their *host*.

It is that function's input and output that such a layer has seen, whatever the host does before and after. The layers
are the projections of attention (``attention.py``), and Linear layers and convolutions with a ``forward`` of their own
(``own_forward.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .base import RowsLayer
from .windows import for_each, zeros_around


class Application(NamedTuple):
    """One call of ``F.linear`` or ``F.conv1d`` to ``F.conv3d``."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    groups: int = 1
    # How the kernel of a convolution slides: its size, stride, dilation, the zeros before and those after, each for all
    # dimensions. Numbers, because graphs hold nothing else.
    windows: tuple[int, ...] = ()


def application_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Application | None:
    """A call of a function, if it is one of those that apply weights; else None."""
    if function is F.linear:
        return Application(*args, **kwargs)
    if function is F.conv1d or function is F.conv2d or function is F.conv3d:
        return _convolution(*args, **kwargs)
    return None


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Application:
    size = tuple(weight.shape[2:])
    stride, dilation = for_each(stride, len(size)), for_each(dilation, len(size))
    zeros = zeros_around(size, dilation, padding)
    before, after = [first for first, _ in zeros], [last for _, last in zeros]
    return Application(input, weight, bias, groups, (*size, *stride, *dilation, *before, *after))


class HostedLayer(RowsLayer):
    """A layer whose weight is given to a function of torch inside the call of a host."""

    @property
    def hosts(self) -> Sequence[nn.Module]:
        """The modules in whose calls the weight is used, which are one for all ``modules``, or these themselves."""
        return self.modules if self.host is None else (self.host,)

    def is_applied(self, host: nn.Module, application: Application) -> bool:
        """Whether a function that is called by a host is given the weight that the host has now.

        During a forward pass FSDP2 and ``torch.func.functional_call`` put another tensor in the parameter's place.
        """
        return applies_its_weight(host, application)


def applies_its_weight(module: nn.Module, application: Application) -> bool:
    """Whether a function is given the weight of a module, and its bias if it has one, in as many groups."""
    if application.weight is not module.weight or application.groups != getattr(module, "groups", 1):
        return False
    bias = module._parameters.get("bias")
    return bias is None or application.bias is bias
