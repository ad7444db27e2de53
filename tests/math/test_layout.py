"""Where the parameters of layers of one shape lie in their matrices: as the layers themselves would put them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_optim.layers import LayerOptions, find_layers
from kfac_optim.layers.linear import TransposedLinearLayer
from kfac_optim.layout import Layout

CASES = {
    "biases": [nn.Linear(4, 3) for _ in range(3)],
    "no biases": [nn.Linear(4, 3, bias=False) for _ in range(3)],
    "norms of several sizes": [nn.LayerNorm(5), nn.BatchNorm1d(2), nn.LayerNorm(5)],
    "groups": [nn.Conv2d(4, 6, 3, groups=2) for _ in range(2)],
    "transposed": [nn.ConvTranspose2d(4, 6, 2) for _ in range(2)],
    "on their side": [],  # weights that transposes of the matrices are made of
    "attention": [nn.MultiheadAttention(4, 2, kdim=3, vdim=3)],  # three weights, one bias
}


def layers_of(name: str) -> list[Any]:
    if name == "on their side":
        return [TransposedLinearLayer("", nn.Linear(4, 4), LayerOptions()) for _ in range(3)]
    layers = find_layers([nn.ModuleList(CASES[name])], LayerOptions()).layers
    return [layer for layer in layers if (layer.d_out, layer.d_in) == (layers[-1].d_out, layers[-1].d_in)]


def vectors_of(layers: list[Any]) -> dict[nn.Parameter, Tensor]:
    torch.manual_seed(0)
    return {p: torch.randn(p.shape, dtype=torch.float64) for layer in layers for p in layer.parameters}


def matrices(layers: list[Any], vectors: dict[nn.Parameter, Tensor]) -> Tensor:
    """As the layers make them, one by one."""
    found = []
    for layer in layers:
        bias = None if layer.bias is None else vectors[layer.bias][layer.bias_part]
        found.append(layer.to_matrix(vectors[layer.weight], bias))
    return torch.cat(found)


@pytest.mark.parametrize("name", CASES)
def test_what_is_filled_in_can_be_read(name: str) -> None:
    layers = layers_of(name)
    vectors = vectors_of(layers)
    layout = Layout(layers)
    whole = layout.fill(vectors, torch.float64)
    assert torch.equal(whole, matrices(layers, vectors))
    parts = layout.read(whole, vectors)
    assert len(parts) == sum(len(layer.parameters) for layer in layers)
    for p, index, part in parts:
        assert torch.equal(part, vectors[p][index])
        assert part.is_contiguous() or name == "transposed", "multi-tensor operations would take it one by one"


@pytest.mark.parametrize("name", ["biases", "norms of several sizes", "attention"])
def test_parameters_without_a_vector_have_zeros(name: str) -> None:
    layers = layers_of(name)
    vectors = vectors_of(layers)
    missing = layers[0].bias
    present = {p: vector for p, vector in vectors.items() if p is not missing}
    layout = Layout(layers)
    whole = layout.fill(present, torch.float64)
    assert torch.equal(whole, matrices(layers, present | {missing: torch.zeros_like(vectors[missing])}))
    assert missing not in {p for p, _, _ in layout.read(whole, present)}


class Operations(TorchDispatchMode):
    """Counts the operations that would launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count += not (func.is_view or name.startswith("aten::empty") or name == "aten::detach")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "reads"), [("biases", 2), ("no biases", 0), ("norms of several sizes", 2)])
def test_all_weights_are_one_operation_and_so_are_all_biases(name: str, reads: int) -> None:
    layers = layers_of(name)
    vectors, layout = vectors_of(layers), Layout(layers)
    with torch.no_grad(), Operations() as operations:
        whole = layout.fill(vectors, torch.float64)
        assert operations.count == len(layers[0].parameters)
        layout.read(whole, vectors)
        assert operations.count == len(layers[0].parameters) + reads
