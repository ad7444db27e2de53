"""Cases where the Kronecker product is the Fisher itself: compare with explicit Jacobians and per-example gradients.

Nothing here goes through rows or factors: the Fisher is the outer product of gradients that autograd gives the weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import KFACSGD
from tests.helpers.reference import (
    EXACT,
    LOSSES,
    Conv1D,
    Inputs,
    Layer,
    LossFunction,
    Oracle,
    assert_near,
    averaged,
    dense_fisher,
    find_layers,
    fisher_solve,
    gradient,
    input_rows,
    matrix,
    outer_sum,
    parameters,
    per_example_gradients,
    positions,
    squared_error,
    take_step,
)

pytestmark = pytest.mark.usefixtures("float64")

DERIVATIVE_TOL = 1e-6  # central differences with step 1e-5: truncation 1e-10, rounding 1e-11, relative to small entries

Passes = list[tuple[Inputs, Tensor]]
seeds = st.integers(0, 9999)
gammas = st.sampled_from([1e-3, 1e-2, 0.1, 1.0])


def check_against_fisher(
    model: nn.Module, passes: Passes, total: LossFunction, gamma: float, keywords: dict[str, object] | None = None
) -> None:
    """The applied change of every layer is minus ``(F + gamma I)^-1`` times its gradient."""
    layers = find_layers(model)
    gradients = per_example_gradients(model, passes, total)
    fishers = {layer.name: dense_fisher(layer, gradients) for layer in layers}
    examples = len(gradients)
    mean = {name: sum(g[name] for g in gradients) / examples for name in gradients[0]}
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma} | (keywords or {}))
    size = 1 + max(float(p.norm()) for p in parameters(model).values())
    changes = take_step(model, optimizer, passes, lambda output, y: total(output, y) / examples)
    for layer in layers:
        wanted = fisher_solve(fishers[layer.name], layer.of(mean), gamma)
        assert_near(layer.of(changes), -wanted, layer.name, scale=size)


# ---------------------------------------------------------------------------------------------------------------------
# One example without shared positions: the outer product of its gradient
# ---------------------------------------------------------------------------------------------------------------------


@given(
    widths=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    bias=st.booleans(),
    loss=st.sampled_from(sorted(LOSSES)),
    gamma=gammas,
    seed=seeds,
)
def test_one_example_through_linear_layers(widths: list[int], bias: bool, loss: str, gamma: float, seed: int) -> None:
    torch.manual_seed(seed)
    modules: list[nn.Module] = []
    for d_in, d_out in itertools.pairwise(widths):
        modules += [nn.Linear(d_in, d_out, bias=bias), nn.Tanh()]
    passes = [((torch.randn(1, widths[0]),), torch.randn(1, widths[-1]))]
    check_against_fisher(nn.Sequential(*modules[:-1]), passes, LOSSES[loss], gamma)


@given(nx=st.integers(1, 4), nf=st.integers(1, 4), gamma=gammas, seed=seeds)
def test_one_example_through_a_transposed_linear_layer(nx: int, nf: int, gamma: float, seed: int) -> None:
    torch.manual_seed(seed)
    passes = [((torch.randn(1, nx),), torch.randn(1, nf))]
    check_against_fisher(nn.Sequential(Conv1D(nf, nx)), passes, squared_error, gamma)


@st.composite
def covering_convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A convolution whose kernel covers the whole padded image: its output is 1 x 1."""
    dims = draw(st.integers(1, 3))
    channels, out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 3)) for _ in range(dims)]
    dilation = [draw(st.integers(1, 2)) for _ in range(dims)]
    padding = [draw(st.integers(0, 1)) for _ in range(dims)]
    sizes = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=False)]
    padding = [p if size >= 1 else 0 for p, size in zip(padding, sizes, strict=False)]
    sizes = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, padding, strict=False)]
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    options = {"padding": tuple(padding), "dilation": tuple(dilation), "bias": draw(st.booleans())}
    return cls(channels, out, tuple(kernel), **options), (channels, *sizes)


@given(drawn=covering_convolutions(), gamma=gammas, seed=seeds)
def test_one_example_through_a_convolution_with_one_output_position(
    drawn: tuple[nn.Module, tuple[int, ...]], gamma: float, seed: int
) -> None:
    conv, shape = drawn
    torch.manual_seed(seed)
    model = nn.Sequential(conv, nn.Flatten())
    for p in model.parameters():
        nn.init.normal_(p)
    passes = [((torch.randn(1, *shape),), torch.randn(1, conv.out_channels))]
    check_against_fisher(model, passes, squared_error, gamma)


@given(
    channels=st.integers(1, 3),
    config=st.sampled_from([(1, 1, 0, 1), (1, 3, 1, 1), (2, 2, 1, 1), (2, 2, 2, 3)]),
    gamma=gammas,
    seed=seeds,
)
def test_one_example_through_a_transposed_convolution_with_one_output_position(
    channels: int, config: tuple[int, int, int, int], gamma: float, seed: int
) -> None:
    """Padding crops the output to 1 x 1; with a kernel of 2 on an image of 2 its entries are seen in reverse."""
    torch.manual_seed(seed)
    size, kernel, padding, stride = config
    model = nn.Sequential(nn.ConvTranspose2d(channels, 2, kernel, stride, padding), nn.Flatten())
    passes = [((torch.randn(1, channels, size, size),), torch.randn(1, 2))]
    check_against_fisher(model, passes, squared_error, gamma)


@given(gamma=gammas, seed=seeds)
def test_one_token_through_an_embedding(gamma: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    passes = [((torch.randint(4, (1,)),), torch.randn(1, 2))]
    check_against_fisher(model, passes, squared_error, gamma)


@given(sharing=st.sampled_from(["expand", "reduce"]), gamma=gammas, seed=seeds)
def test_one_example_with_a_frozen_bias(sharing: str, gamma: float, seed: int) -> None:
    """Only what is trained has a Fisher: the gradient has no bias column then."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    passes = [((torch.randn(1, 3),), torch.randn(1, 2))]
    layers = find_layers(model)
    inputs, target = passes[0]
    names, params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=False)
    own = dict(zip(names, gradient(squared_error(model(*inputs), target), params), strict=False))
    fishers = {layer.name: dense_fisher(layer, [own]) for layer in layers}
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma, "weight_sharing": sharing})
    changes = take_step(model, optimizer, passes, squared_error)
    for layer in layers:
        assert_near(layer.of(changes), -fisher_solve(fishers[layer.name], layer.of(own), gamma), layer.name, scale=10)


# ---------------------------------------------------------------------------------------------------------------------
# "reduce" is exact where the output gradient is the same at all positions
# ---------------------------------------------------------------------------------------------------------------------


class MeanOverTokens(nn.Module):
    """From ``[n, t, d]`` to ``[n, d]``."""

    def forward(self, x: Tensor) -> Tensor:
        """Mean."""
        return x.mean(1)


@given(tokens=st.integers(1, 5), gamma=gammas, seed=seeds)
def test_reduce_is_exact_for_one_example_pooled_behind_the_layer(tokens: int, gamma: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), MeanOverTokens(), nn.Tanh(), nn.Linear(4, 2))
    passes = [((torch.randn(1, tokens, 3),), torch.randn(1, 2))]
    check_against_fisher(model, passes, squared_error, gamma, {"weight_sharing": "reduce"})


@given(size=st.integers(2, 4), gamma=gammas, seed=seeds)
def test_reduce_is_exact_for_one_example_of_a_pooled_convolution(size: int, gamma: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    passes = [((torch.randn(1, 2, size, size),), torch.randn(1, 2))]
    check_against_fisher(model, passes, squared_error, gamma, {"weight_sharing": "reduce"})


# ---------------------------------------------------------------------------------------------------------------------
# Deep linear networks with squared error: exact for every batch, with the targets of a sampled Fisher
# ---------------------------------------------------------------------------------------------------------------------


def ideal_samples(model: nn.Module, x: Tensor) -> Passes:
    """A batch whose empirical Fisher *is* the Gaussian sampled Fisher in expectation.

    Every input stands in it once per output k, with residual ``sqrt(d) e_k``: the residuals average to the identity.
    """
    with torch.no_grad():
        output = model(x)
    d = output.shape[-1]
    residuals = math.sqrt(d) * torch.eye(d)
    return [((x.repeat(d, *[1] * (x.dim() - 1)),), output.repeat(d, 1) + residuals.repeat_interleave(len(x), dim=0))]


def gauss_newton(model: nn.Module, layer: Layer, x: Tensor) -> Tensor:
    """``(1/N) sum_n J_n^T J_n`` of the outputs with respect to one layer's canonical weight."""
    names, params = zip(*model.named_parameters(), strict=False)
    rows = []
    for n in range(len(x)):
        for value in model(x[n : n + 1]).flatten():
            rows.append(layer.of(dict(zip(names, gradient(value, params, keep=True), strict=False))).flatten())
    jacobian = torch.stack(rows)
    return jacobian.T @ jacobian / len(x)


@given(widths=st.lists(st.integers(1, 4), min_size=2, max_size=4), n=st.integers(1, 4), gamma=gammas, seed=seeds)
def test_deep_linear_network_with_squared_error_is_the_gauss_newton_matrix(
    widths: list[int], n: int, gamma: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))
    check_gauss_newton(model, torch.randn(n, widths[0]), gamma, "expand")


@given(n=st.integers(1, 4), tokens=st.integers(1, 4), gamma=gammas, seed=seeds)
def test_deep_linear_network_pooled_over_tokens_is_exact_under_reduce(
    n: int, tokens: int, gamma: float, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), MeanOverTokens(), nn.Linear(3, 2))
    check_gauss_newton(model, torch.randn(n, tokens, 3), gamma, "reduce")


@given(n=st.integers(1, 4), gamma=gammas, seed=seeds)
def test_deep_linear_convolutional_network_with_one_output_position_is_exact(n: int, gamma: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 2))
    check_gauss_newton(model, torch.randn(n, 2, 3, 3), gamma, "expand")


def check_gauss_newton(model: nn.Module, x: Tensor, gamma: float, sharing: str) -> None:
    """The applied change is the damped solve with the generalised Gauss-Newton block of the layer."""
    passes = ideal_samples(model, x)
    layers = find_layers(model)
    blocks = {layer.name: gauss_newton(model, layer, x) for layer in layers}
    loss = averaged(squared_error, "batch")
    ((inputs, target),) = passes
    names, params = zip(*model.named_parameters(), strict=False)
    raw = dict(zip(names, gradient(loss(model(*inputs), target), params), strict=False))
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma, "weight_sharing": sharing})
    changes = take_step(model, optimizer, passes, loss)
    for layer in layers:
        wanted = fisher_solve(blocks[layer.name], layer.of(raw), gamma)
        assert_near(layer.of(changes), -wanted, layer.name, scale=10)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle of the other files, against the same definitions
# ---------------------------------------------------------------------------------------------------------------------

LAYER_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), (3,)),
    "transposed linear": (lambda: Conv1D(2, 3), (3,)),
    "covering conv": (lambda: nn.Conv2d(2, 3, (2, 3)), (2, 2, 3)),
    "transposed conv": (lambda: nn.ConvTranspose1d(2, 3, 3, padding=1), (2, 1)),
}


@pytest.mark.parametrize("case", LAYER_CASES.values(), ids=LAYER_CASES)
def test_oracle_is_the_fisher_for_one_example(case: tuple[Callable[[], nn.Module], tuple[int, ...]]) -> None:
    factory, shape = case
    model = nn.Sequential(factory(), nn.Flatten())
    x = torch.randn(1, *shape)
    passes = [((x,), torch.randn_like(model(x)))]
    oracle = Oracle(model)
    oracle.refresh(oracle.observe(passes, squared_error))
    (layer,) = oracle.layers
    (pair,) = oracle.curvature[layer.name].pairs
    fisher = dense_fisher(layer, per_example_gradients(model, passes, squared_error))
    assert_near(torch.kron(pair.g, pair.a), fisher, rel=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("stride", [1, 2])
def test_oracle_rows_are_the_patches_by_explicit_indexing(groups: int, mode: str, stride: int) -> None:
    conv = nn.Conv2d(4, 2, (3, 2), stride=stride, padding=1, dilation=(1, 2), groups=groups, padding_mode=mode)
    x = torch.randn(2, 4, 4, 5)
    rows = input_rows(conv, x)
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="constant" if mode == "zeros" else mode)
    height, width = conv(x).shape[2:]
    for n in range(2):
        for row in range(height):
            for col in range(width):
                for k in range(groups):
                    seen = [
                        float(padded[n, channel, row * stride + i, col * stride + 2 * j])
                        for channel in range(k * 4 // groups, (k + 1) * 4 // groups)
                        for i in range(3)
                        for j in range(2)
                    ]
                    assert rows[n, row * width + col, k].tolist() == pytest.approx([*seen, 1.0], rel=1e-14)


def test_oracle_gradient_agrees_with_finite_differences() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2))
    passes = [((torch.randn(2, 2, 2, 2),), torch.randn(2, 2))]
    loss = averaged(LOSSES["cross entropy"], "batch")
    step = Oracle(model).observe(passes, loss)
    h = 1e-5
    for name, p in model.named_parameters():
        change = torch.randn_like(p)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                p.add_(sign * h * change)
                values.append(float(loss(model(*passes[0][0]), passes[0][1])))
                p.sub_(sign * h * change)
        slope = (values[0] - values[1]) / (2 * h)
        assert slope == pytest.approx(float((step.gradients[name] * change).sum()), rel=DERIVATIVE_TOL)


def test_oracle_canonical_form_is_the_linear_map_of_the_layer() -> None:
    """``s = W a`` with the canonical W, for layers that store their weight differently."""
    modules = [nn.Linear(3, 2), Conv1D(2, 3), nn.Conv1d(4, 6, 2, groups=2), nn.ConvTranspose1d(4, 6, 2, groups=2)]
    shapes = [(2, 5, 3), (2, 5, 3), (2, 4, 5), (2, 4, 5)]
    for module, shape in zip(modules, shapes, strict=False):
        x = torch.randn(shape)
        weight = matrix(module, module.weight.detach(), module.bias.detach())
        made = torch.einsum("koi,nrki->nrko", weight, input_rows(module, x))
        assert_near(made, positions(module, module(x)).detach(), rel=1e-12)


def test_oracle_outer_sum_is_a_sum_of_outer_products() -> None:
    rows = torch.randn(3, 2, 4)
    for k in range(2):
        assert_near(outer_sum(rows)[k], sum(torch.outer(row[k], row[k]) for row in rows), rel=1e-14)
