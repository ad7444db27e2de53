"""Where the parameters of layers of one shape lie in their matrices: as the layers themselves would put them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kfac_optim.layers import FoundLayers, LayerOptions
from kfac_optim.layers.convolution import ConvTransposeLayer
from kfac_optim.layers.linear import LinearLayer, TransposedLinearLayer
from kfac_optim.layers.norm import RMSNormLayer
from kfac_optim.stacks.layout import Layout

CASES = {
    "biases": [nn.Linear(4, 3) for _ in range(3)],
    "no biases": [nn.Linear(4, 3, bias=False) for _ in range(3)],
    "norms of several sizes": [nn.LayerNorm(5), nn.BatchNorm1d(2), nn.LayerNorm(5)],
    "groups": [nn.Conv2d(4, 6, 3, groups=2) for _ in range(2)],
    "transposed": [nn.ConvTranspose2d(4, 6, 2) for _ in range(2)],
    "on their side": [],  # weights that transposes of the matrices are made of
    "upright and on their side": [],
    "embeddings": [nn.Embedding(5, 3) for _ in range(3)],
    "padded": [],  # the matrices have a column that belongs to no parameter
    "numbers": [],  # parameters without a dimension
    "transposed, one bias": [],
    "transposed, after one on its side": [],
    "attention": [nn.MultiheadAttention(4, 2, kdim=3, vdim=3)],  # three weights, one bias
}


class PaddedLayer(LinearLayer):
    """A Linear without bias, whose matrices have a column of zeros."""

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        d_out, d_in = self.weight_shape
        return 1, d_out, d_in + 1

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix[0, :, :-1]


def scale() -> nn.RMSNorm:
    module = nn.RMSNorm(1)
    module.weight = nn.Parameter(torch.ones(()))
    return module


def layers_of(name: str) -> list[Any]:
    options = LayerOptions()
    if name == "on their side":
        return [TransposedLinearLayer("", nn.Linear(4, 4), options) for _ in range(3)]
    if name == "upright and on their side":
        kinds = (LinearLayer, LinearLayer, TransposedLinearLayer, TransposedLinearLayer, LinearLayer)
        return [kind("", nn.Linear(4, 4, bias=False), options) for kind in kinds]
    if name == "transposed, after one on its side":
        transposed = ConvTransposeLayer("", nn.ConvTranspose1d(2, 3, 2, bias=False), options)
        return [TransposedLinearLayer("", nn.Linear(3, 4, bias=False), options), transposed]
    if name == "padded":
        return [PaddedLayer("", nn.Linear(4, 3, bias=False), options) for _ in range(2)]
    if name == "numbers":
        return [RMSNormLayer("", scale(), options) for _ in range(2)]
    if name == "transposed, one bias":
        layers = FoundLayers([nn.ModuleList([nn.ConvTranspose1d(4, 3, 2) for _ in range(2)])], options).layers
        bias = nn.Parameter(torch.zeros(7))
        for i, layer in enumerate(layers):
            layer.bias, layer.bias_part = bias, slice(1 + 3 * i, 4 + 3 * i)
        return layers
    layers = FoundLayers([nn.ModuleList(CASES[name])], LayerOptions()).layers
    return [layer for layer in layers if (layer.d_out, layer.d_in) == (layers[-1].d_out, layers[-1].d_in)]


def vectors_of(layers: list[Any]) -> dict[nn.Parameter, Tensor]:
    torch.manual_seed(0)
    return {p: torch.randn(p.shape, dtype=torch.float64) for layer in layers for p in layer.parameters}


def matrices(layers: list[Any], vectors: dict[nn.Parameter, Tensor]) -> Tensor:
    """Layer by layer, by the transpose of the linear map from matrices to parameters."""
    found = []
    for layer in layers:
        biases = () if layer.bias is None else (vectors[layer.bias][layer.bias_part],)
        parts = (vectors[layer.weight], *biases)
        zeros = parts[0].new_zeros(layer.pairs, layer.d_out, layer.d_in)
        found.append(torch.autograd.functional.vjp(layer.from_matrix, zeros, parts)[1])
    return torch.cat(found)


@pytest.fixture
def not_a_number() -> Iterator[None]:
    """torch.empty fills its tensors with NaN, so that what nobody writes to is told from zero."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("not_a_number")
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
        assert torch.equal(part, vectors[p] if index == slice(None) else vectors[p][index])
        assert part.is_contiguous(), "multi-tensor operations would take it one by one"


@pytest.mark.usefixtures("not_a_number")
@pytest.mark.parametrize("name", ["biases", "norms of several sizes", "attention", "transposed, one bias"])
def test_parameters_without_a_vector_have_zeros(name: str) -> None:
    layers = layers_of(name)
    vectors = vectors_of(layers)
    missing = layers[0].bias
    present = {p: vector for p, vector in vectors.items() if p is not missing}
    layout = Layout(layers)
    whole = layout.fill(present, torch.float64)
    assert torch.equal(whole, matrices(layers, present | {missing: torch.zeros_like(vectors[missing])}))
    assert missing not in {p for p, _, _ in layout.read(whole, present)}


# Modules whose matrices are [p, 3, 5]: weights and biases that lie there as they are, and such that are computed.
OF_ONE_SHAPE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "linear without bias": lambda: nn.Linear(5, 3, bias=False),
    "convolution": lambda: nn.Conv2d(2, 3, (1, 2)),
    "groups": lambda: nn.Conv1d(8, 6, 1, groups=2),
    "groups without biases": lambda: nn.Conv1d(10, 6, 1, groups=2, bias=False),
    "transposed": lambda: nn.ConvTranspose1d(4, 3, 1),
    "transposed groups": lambda: nn.ConvTranspose1d(8, 6, 1, groups=2),
    "attention": lambda: nn.MultiheadAttention(3, 1, kdim=4, vdim=4),
}


@given(
    names=st.lists(st.sampled_from(sorted(OF_ONE_SHAPE)), min_size=1, max_size=5),
    missing=st.sets(st.integers(0, 9)),
    wanted=st.sets(st.integers(0, 9)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@example(names=["linear", "attention"], missing={0}, wanted={0, 1, 2}, dtype=torch.float64)
@example(names=["transposed", "linear", "linear"], missing={0, 2}, wanted={0, 3}, dtype=torch.float32)
def test_layers_of_any_types_side_by_side(
    names: list[str], missing: set[int], wanted: set[int], dtype: torch.dtype
) -> None:
    """Some biases have no vector, only some parameters are asked for, and matrices come as parts of larger tensors."""
    found = FoundLayers([nn.ModuleList(OF_ONE_SHAPE[name]() for name in names)], LayerOptions()).layers
    layers = [layer for layer in found if (layer.d_out, layer.d_in) == (3, 5)]
    vectors = {p: vector.to(dtype) for p, vector in vectors_of(layers).items()}
    biases = [p for p in vectors if all(p is not layer.weight for layer in layers)]
    absent = {p for i, p in enumerate(biases) if i in missing}
    zeros = {p: torch.zeros_like(vectors[p]) for p in absent}
    layout = Layout(layers)
    whole = layout.fill({p: vector for p, vector in vectors.items() if p not in absent}, torch.float64)
    assert whole.dtype is torch.float64 and torch.equal(whole, matrices(layers, {**vectors, **zeros}).double())
    chosen = {p for i, p in enumerate(vectors) if i in wanted}
    for given_matrices in (torch.randn(len(whole) + 1, 3, 5)[1:], torch.randn(len(whole), 5, 3).mT):
        expected = []
        for layer, own in zip(layers, given_matrices.split([layer.pairs for layer in layers]), strict=True):
            indices = (slice(None), layer.bias_part)
            expected += list(zip(layer.parameters, indices, layer.from_matrix(own), strict=False))
        parts = {(id(p), index.start): part for p, index, part in layout.read(given_matrices, chosen)}
        assert parts.keys() == {(id(p), index.start) for p, index, _ in expected if p in chosen}
        for p, index, part in expected:
            assert p not in chosen or torch.equal(parts[id(p), index.start], part)


class Operations(TorchDispatchMode):
    """Counts the operations that would launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count += not (func.is_view or name.startswith("aten::empty") or name == "aten::detach")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "reads"), [("biases", 2), ("no biases", 0), ("embeddings", 0), ("norms of several sizes", 2)]
)
def test_all_weights_are_one_operation_and_so_are_all_biases(name: str, reads: int) -> None:
    layers = layers_of(name)
    vectors, layout = vectors_of(layers), Layout(layers)
    with torch.no_grad(), Operations() as operations:
        whole = layout.fill(vectors, torch.float64)
        assert operations.count == len(layers[0].parameters)
        layout.read(whole, vectors)
        assert operations.count == len(layers[0].parameters) + reads
