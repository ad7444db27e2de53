"""The moments of all norm layers of a model are made at once: they are those of each layer alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import CurvatureEngine
from kfac_optim.capture.microbatch import MicroBatch
from kfac_optim.layers import FoundLayers, LayerOptions
from kfac_optim.layers.norm import _NormLayer
from tests.helpers.compare import assert_near, factors_of
from tests.helpers.settings import FLOAT64


@given(
    channels=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    examples=st.integers(1, 5),
    bias=st.booleans(),
    diagonal=st.booleans(),
)
def test_each_channel_has_the_moment_of_its_own_gradients(
    channels: list[tuple[int, int]], examples: int, bias: bool, diagonal: bool
) -> None:
    """``channels``: of each layer their number, and how often it is called; an example's gradients are added up."""
    options = LayerOptions(max_factor_dim=1 if diagonal else None)
    layers = FoundLayers([nn.ModuleList(nn.LayerNorm(c, bias=bias) for c, _ in channels)], options).layers
    assert len({layer.combined_with for layer in layers}) == 1
    d_out = 1 + bias
    rows = [[torch.randn(examples, c, d_out, dtype=torch.float64) for _ in range(calls)] for c, calls in channels]
    batch = MicroBatch()
    for index, of_layer in enumerate(rows):
        for of_call in of_layer:
            batch.add_examples(index, torch.ones(()), torch.ones(()), of_call)
    a, count, g = type(layers[0]).combine_layers(layers, list(batch.by_example.values()))
    expected = []
    for of_layer in rows:
        v = torch.stack(of_layer).sum(0)
        for channel in v.unbind(1):
            moment = sum(torch.outer(row, row) for row in channel)
            assert isinstance(moment, torch.Tensor)
            expected.append(moment.diagonal() if diagonal and bias else moment)
    torch.testing.assert_close(g, torch.stack(expected).view_as(g), rtol=1e-12, atol=1e-12)
    assert (a / count == 1).all() and len(a) == len(g) == sum(c for c, _ in channels)


def test_norms_of_other_shapes_are_not_pooled() -> None:
    """Some have a shift, some are on another device; or with ``max_factor_dim=1`` diagonal blocks."""
    models = nn.ModuleList([nn.LayerNorm(3), nn.RMSNorm(3), nn.LayerNorm(3, device="meta")])
    layers = FoundLayers([models], LayerOptions()).layers
    layers += FoundLayers([nn.LayerNorm(3)], LayerOptions(max_factor_dim=1)).layers
    assert len({layer.combined_with for layer in layers}) == len(layers) == 4


class Halves(nn.Module):
    """Norm layers of several types and sizes; some see all examples, some only half of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.LayerNorm(4), nn.RMSNorm(4), nn.BatchNorm1d(4)
        self.fourth, self.fifth, self.sixth = nn.LayerNorm(4), nn.LayerNorm(2), nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(self.second(self.first(x).tanh()))
        half = self.fourth(x[::2] * x[1::2])
        return torch.cat([self.sixth(x[:, :2]), self.fifth(half[:, 2:].exp())])


def test_an_engine_has_the_factors_of_layers_that_are_not_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for pooled in (True, False):
        if not pooled:
            monkeypatch.setattr(_NormLayer, "combined_with", property(lambda layer: layer))
        torch.manual_seed(0)
        model = Halves().double()
        engine = CurvatureEngine(model, **FLOAT64)
        for _ in range(2):  # micro-batches
            model(torch.randn(8, 4, dtype=torch.float64)).square().sum(1).mean().backward()
        engine.precondition_(lr=0.1)
        assert len(engine.layers) == 6
        found.append(factors_of(engine))
    for name, factor in found[1].items():
        assert_near(found[0][name], factor, name, rel=1e-12)
        assert float(factor.norm()) > 0
