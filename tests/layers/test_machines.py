"""Which devices are taken for which kind of machine, and how the work on meta tensors is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_optim import LayerOptions
from kfac_optim.common.machines import is_asynchronous, machine_of
from kfac_optim.layers import FoundLayers


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", "cpu"), ("cuda:1", "accelerator"), ("mps", "accelerator"), ("meta", "meta")]
)
def test_only_cpus_compute_while_the_host_waits(device: str, kind: str) -> None:
    assert machine_of(torch.device(device)) == kind
    assert is_asynchronous(torch.device(device)) == (kind != "cpu")


class Operators(TorchDispatchMode):
    """Lists the operators that are called, with the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.called.append((str(func), result.shape if isinstance(result, Tensor) else None))
        return result


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Linear(700, 300), (64, 700)), (nn.Conv2d(3, 8, 5), (40, 3, 40, 40)), (nn.GroupNorm(2, 6), (8, 6, 5))],
)
def test_work_on_meta_tensors_is_that_of_a_cpu(module: nn.Module, shape: tuple[int, ...]) -> None:
    """A product in strips, patches unfolded in chunks, no normalised copy."""
    called = []
    for device in ("cpu", "meta"):
        (layer,) = FoundLayers([module.to(device)], LayerOptions(max_factor_dim=None)).layers
        x = torch.zeros(shape, device=device)
        with torch.no_grad():
            y = module(x)
            for _ in range(2):  # the first time some tensors are made that are kept
                with Operators() as operators:
                    observation = layer.observe(layer.modules[0], x, y, torch.float32)
                    layer.output_moment(layer.modules[0], torch.zeros_like(y), observation.context)
        called.append(operators.called)
    assert called[0] == called[1]
