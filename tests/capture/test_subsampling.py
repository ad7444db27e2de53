"""factor_batch_fraction: statistics from a part of the batch.

The oracle needs no formula: where every example stands k times in a row, 1/k of the batch are all its examples once,
and an unbiased estimate from them is the statistics of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACSGD
from kfac_optim.layers import spread_examples

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS = {"factor_decay": 0.95, "factor_update_steps": 1, "inv_update_steps": 1, "spread": 0, "damping": 0.1}


class Tokens(nn.Module):
    """Embedding, attention with packed or separate projections, a norm; examples first or second."""

    def __init__(self, batch_first: bool, **widths: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **widths)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        """Attend from every token to the first three, so that there are fewer keys than queries."""
        x = self.embedding(ids)
        keys = x[:, :3] if self.attention.batch_first else x[:3]
        attended, _ = self.attention(x, keys, keys + 1.0)
        return self.head(self.norm(x + attended))


def convolutions() -> nn.Module:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, groups=2)
    return nn.Sequential(*layers, nn.ConvTranspose2d(4, 2, 2), nn.Flatten(), nn.Linear(32, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, object]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), lambda: torch.randn(6, 5), {}),
    "images": (convolutions, lambda: torch.randn(6, 2, 8, 8), {}),
    "tokens": (lambda: Tokens(True), lambda: torch.randint(7, (6, 5)), {}),
    "tokens, projections apart": (lambda: Tokens(True, kdim=8, vdim=8), lambda: torch.randint(7, (6, 5)), {}),
    "tokens, reduce": (lambda: Tokens(True), lambda: torch.randint(7, (6, 5)), {"weight_sharing": "reduce"}),
    "sequence first": (lambda: Tokens(False), lambda: torch.randint(7, (5, 6)), {"batch_dim": 1}),
    "sequence first, reduce": (
        lambda: Tokens(False),
        lambda: torch.randint(7, (5, 6)),
        {"batch_dim": 1, "weight_sharing": "reduce"},
    ),
}


def factors_after(
    model: nn.Module, micro_batches: list[Tensor], fraction: float, **options: object
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of every layer after one step on a loss of the model's outputs alone."""
    model = model.double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    settings = OPTIONS | {"factor_dtype": torch.float64} | options
    optimizer = KFACSGD(model, lr=0.1, factor_batch_fraction=fraction, **settings)
    for x in micro_batches:
        output = model(x)
        loss = (output.sin() * torch.linspace(0.5, 2.0, output.shape[-1])).square().mean()
        (loss / len(micro_batches)).backward()
    optimizer.step()
    engine = optimizer.curvature
    found = {layer.name: engine.factors(layer) for layer in engine.layers}
    engine.close()
    optimizer.zero_grad()
    model.load_state_dict(state)
    return found


def assert_same(found: dict[str, tuple[Tensor, Tensor]], expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        for side, one, other in zip("AG", found[name], expected[name], strict=True):
            assert other.norm() > 0
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12 * float(other.norm()), msg=f"{side} {name}")


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("case", MODELS)
def test_a_share_of_repeated_examples_gives_the_statistics_of_all(case: str, copies: int) -> None:
    factory, data, options = MODELS[case]
    model, x = factory(), data()
    x = x.repeat_interleave(copies, int(options.get("batch_dim", 0)))
    assert_same(factors_after(model, [x], 1 / copies, **options), factors_after(model, [x], 1.0, **options))


def test_only_the_share_is_seen() -> None:
    """A is the mean over the examples that were kept, and nothing but them."""
    model, x = nn.Sequential(nn.Linear(4, 3, bias=False)), torch.randn(10, 4)
    kept = x[[0, 3, 6]]  # ceil(0.25 * 10) = 3 of 10, evenly spread
    found = factors_after(model, [x], 0.25)["0"][0]
    torch.testing.assert_close(found[0], kept.T @ kept / 3)


@pytest.mark.parametrize("case", MODELS)
def test_micro_batches_keep_the_examples_that_the_whole_batch_keeps(case: str) -> None:
    """Batch statistics aside: of 8 examples 0 and 4, whether they come at once or four at a time."""
    factory, data, options = MODELS[case]
    model, dim = factory().eval(), int(options.get("batch_dim", 0))
    x = torch.cat([data(), data()], dim).narrow(dim, 0, 8)
    whole = factors_after(model, [x], 0.25, **options)
    assert_same(factors_after(model, list(x.split(4, dim)), 0.25, **options), whole)


@pytest.mark.parametrize("shape", [(5,), (1, 5)])
def test_a_single_example_is_always_seen(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert_same(factors_after(layer := nn.Linear(5, 3), [x], 0.1), factors_after(layer, [x], 1.0))


def test_an_image_without_a_batch_is_seen_whole() -> None:
    x = torch.randn(4, 6, 6)
    assert_same(factors_after(layer := nn.Conv2d(4, 3, 3), [x], 0.25), factors_after(layer, [x], 1.0))


def test_norm_layers_see_all_examples() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), torch.randn(8, 4)
    assert_same(factors_after(model, [x], 0.25), factors_after(model, [x], 1.0))


def test_the_sampled_fisher_keeps_the_same_share() -> None:
    """The gradients of samples differ, those of kept examples don't depend on the share: G is of rank 2 of 6."""
    model, x = nn.Sequential(nn.Linear(4, 6)), torch.randn(8, 4)
    _, g = factors_after(model, [x], 0.25, fisher="gaussian")["0"]
    assert torch.linalg.matrix_rank(g[0]) == 2


@pytest.mark.parametrize("fraction", [1.0, 0.999, 0.5, 0.26, 0.01])
def test_kept_examples_are_evenly_spread(fraction: float) -> None:
    kept = spread_examples(torch.arange(12)[None], 1, fraction)[0].tolist()
    assert len(kept) == max(1, -(-12 * fraction // 1))
    gaps = [later - sooner for sooner, later in zip(kept, [*kept[1:], 12], strict=True)]
    assert kept[0] == 0 and max(gaps) - min(gaps) <= 1


def test_it_is_a_schedule_and_part_of_the_state() -> None:
    model, x = nn.Linear(4, 3, bias=False), torch.randn(8, 4)
    optimizer = KFACSGD(model, lr=0.1, factor_batch_fraction=lambda step: 1.0 if step == 0 else 0.25, **OPTIONS)
    weights = []
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        weights.append(float(optimizer.curvature.stages.blocks[0].state["current"]["A"]["weight"]))
        optimizer.zero_grad()
    assert weights == [8.0, 0.95 * 8.0 + 2.0]
    optimizer.curvature.factor_batch_fraction = 0.5
    optimizer.step()
    other = KFACSGD(nn.Linear(4, 3, bias=False), lr=0.1, **OPTIONS)
    other.load_state_dict(optimizer.state_dict())
    assert other.curvature.factor_batch_fraction == 0.5
