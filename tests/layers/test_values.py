"""Values, layer type by layer type.

Norms and embeddings against per-example gradients, attention and grouped
convolutions against an explicit equivalent.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KFACSGD, LayerOptions, OfMean
from kfac_optim.layers import FoundLayers
from tests.helpers.compare import assert_applied, assert_near, parameters
from tests.helpers.reference import (
    Inputs,
    LossFunction,
    Named,
    Oracle,
    averaged,
    backward,
    gradient,
    matrix,
    per_example_gradients,
    squared_error,
    take_step,
)
from tests.helpers.settings import EXACT, SOLVERS, damping_of

pytestmark = pytest.mark.usefixtures("float64")

Passes = list[tuple[Inputs, Tensor]]
seeds = st.integers(0, 9999)
mean_loss = averaged(squared_error, "batch")


def disturbed(model: nn.Module, size: float = 0.3) -> nn.Module:
    """Move every parameter away from its initial value: norms start at one and zero, which hides mistakes."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(size * torch.randn_like(p))
    return model


def twins(factory: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two equal models."""
    model, twin = disturbed(factory()), factory()
    twin.load_state_dict(model.state_dict())
    return model, twin


def check_with_oracle(
    factory: Callable[[], nn.Module], passes: Passes, options: dict[str, object], relative_size: float = 0.1
) -> None:
    """One applied change against the oracle, at a damping that leaves the curvature visible."""
    model, twin = twins(factory)
    sharing = str(options.get("weight_sharing", "expand"))
    oracle = Oracle(twin, sharing=sharing, largest_block=options.get("max_factor_dim"))
    step = oracle.observe(passes, mean_loss)
    oracle.refresh(step)
    gamma = relative_size * oracle.typical_eigenvalue()
    solver = str(options.get("solver", "eigen"))
    keywords = EXACT | {"damping": gamma} | options | {"solver": SOLVERS[solver]}
    changes = take_step(model, KFACSGD(model, **keywords), passes, mean_loss)
    assert_applied(oracle, changes, oracle.directions(step.gradients, gamma, solver=solver), step.gradients)


# ---------------------------------------------------------------------------------------------------------------------
# Norm layers
# ---------------------------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """A norm between two uncovered maps, so that its own change is all there is to compare."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then something that is not linear."""
        return self.norm(x).tanh()


def trained(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> nn.Module:
    """In eval mode, with running statistics of some past data."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm.eval()


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(4), (4,)),
    "LayerNorm on tokens": (lambda: nn.LayerNorm(4), (3, 4)),
    "LayerNorm on two token dimensions": (lambda: nn.LayerNorm(4), (2, 3, 4)),
    "LayerNorm over two dimensions": (lambda: nn.LayerNorm((3, 4)), (3, 4)),
    "LayerNorm without shift": (lambda: nn.LayerNorm(4, bias=False), (3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (6,)),
    "GroupNorm on images": (lambda: nn.GroupNorm(2, 6), (6, 2, 3)),
    "BatchNorm1d in eval mode": (lambda: trained(nn.BatchNorm1d(4)), (4,)),
    "BatchNorm1d on sequences in eval mode": (lambda: trained(nn.BatchNorm1d(4)), (4, 3)),
    "BatchNorm2d in eval mode": (lambda: trained(nn.BatchNorm2d(4)), (4, 2, 3)),
    "BatchNorm3d in eval mode": (lambda: trained(nn.BatchNorm3d(4)), (4, 2, 1, 3)),
}
BATCH_NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "BatchNorm1d on sequences": (lambda: nn.BatchNorm1d(3), (3, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (3, 2, 1, 2)),
    "BatchNorm2d without running statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 2, 2)),
    "BatchNorm2d without running statistics in eval mode": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(),
        (3, 2, 2),
    ),
}


def channel_blocks(norm: nn.Module, gradients: list[Named], prefix: str = "norm.") -> tuple[Tensor, Tensor]:
    """``F_c = (1/N) sum_n`` of outer products, and the mean gradient, both per channel."""
    bias = f"{prefix}bias"
    rows = [matrix(norm, g[f"{prefix}weight"], g.get(bias)) for g in gradients]
    blocks = sum(torch.stack([torch.outer(channel, channel) for channel in row]) for row in rows) / len(rows)
    return blocks, sum(rows) / len(rows)


def check_norm(
    model: Between,
    passes: Passes,
    blocks: Tensor,
    mean: Tensor,
    keywords: dict[str, object],
    loss: LossFunction = mean_loss,
) -> None:
    """Every channel moves by minus its own damped 2 x 2 (or 1 x 1) solve."""
    trace = float(sum(block.trace() for block in blocks))
    relative = isinstance(keywords["damping"], OfMean)
    damping = float(keywords["damping"].value if relative else keywords["damping"])
    gamma = damping * trace / blocks[:, 0].numel() if relative else damping
    changes = take_step(model, KFACSGD(model, **EXACT | keywords), passes, loss)
    moved = matrix(model.norm, changes["norm.weight"], changes.get("norm.bias"))
    identity = torch.eye(blocks.shape[-1])
    for channel, (block, v) in enumerate(zip(blocks, mean, strict=False)):
        wanted = torch.linalg.solve(block + gamma * identity, v)
        assert_near(moved[channel], -wanted, f"channel {channel}", scale=10)


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_norm_layers_use_the_blocks_of_per_example_gradients(
    case: tuple[Callable[[], nn.Module], tuple[int, ...]], solver: str, relative: bool
) -> None:
    factory, shape = case
    model = disturbed(Between(factory()))
    passes = [((torch.randn(5, *shape),), torch.randn(5, *shape))]
    blocks, mean = channel_blocks(model.norm, per_example_gradients(model, passes, squared_error))
    gamma = 0.1 if relative else 0.01
    check_norm(model, passes, blocks, mean, {"damping": damping_of(gamma, relative), "solver": SOLVERS[solver]})


@pytest.mark.parametrize("case", BATCH_NORMS.values(), ids=BATCH_NORMS)
def test_batch_norm_in_training_uses_each_examples_share_of_the_gradient(
    case: tuple[Callable[[], nn.Module], tuple[int, ...]],
) -> None:
    """In training an example's gradient is its share: a scale and shift of its own, shared statistics."""
    factory, shape = case
    model = disturbed(Between(factory()))
    x, target = torch.randn(5, *shape), torch.randn(5, *shape)
    axes = [0, *range(2, x.dim())]
    broadcast = (1, -1, *[1] * len(shape[1:]))
    normalised = (x - x.mean(axes).view(broadcast)) / (x.var(axes, unbiased=False).view(broadcast) + 1e-5).sqrt()
    gradients = []
    for n in range(5):
        scale, shift = (p.detach().clone().requires_grad_() for p in (model.norm.weight, model.norm.bias))
        output = (normalised[n : n + 1] * scale.view(broadcast) + shift.view(broadcast)).tanh()
        weight, bias = gradient(squared_error(output, target[n : n + 1]), [scale, shift])
        gradients.append({"norm.weight": weight, "norm.bias": bias})
    blocks, mean = channel_blocks(model.norm, gradients)
    check_norm(model, [((x,), target)], blocks, mean, {"damping": 0.01})


@given(
    batches=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    case=st.sampled_from(sorted(NORMS)),
    damping=st.sampled_from([1e-3, 0.1, 1.0]),
    seed=seeds,
)
def test_norm_blocks_over_micro_batches(batches: list[int], case: str, damping: float, seed: int) -> None:
    """Every example counts the same, whatever micro-batch it came in."""
    torch.manual_seed(seed)
    factory, shape = NORMS[case]
    model = disturbed(Between(factory()))
    passes = [((torch.randn(n, *shape),), torch.randn(n, *shape)) for n in batches]
    blocks, mean = channel_blocks(model.norm, per_example_gradients(model, passes, squared_error))
    total = sum(batches)
    check_norm(model, passes, blocks, mean, {"damping": damping}, lambda output, y: squared_error(output, y) / total)


# ---------------------------------------------------------------------------------------------------------------------
# Embedding
# ---------------------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Token embeddings, mixed, and a head."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3, padding_idx=padding_idx)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """From ``[n, t]`` to ``[n, 2]``."""
        return self.head(self.embed(tokens).sum(1).tanh())


@pytest.mark.fast("^(None-eigen-relative|None-inverse-absolute|4-eigen-absolute|0-inverse-relative)")
@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("padding_idx", [None, 0, 4])
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=2), seed=seeds)
def test_embedding_uses_token_frequencies(
    padding_idx: int | None, solver: str, relative: bool, sizes: list[int], seed: int
) -> None:
    """``A = diag(token frequency)`` by counting; padded positions are no rows: neither in A nor in G."""
    torch.manual_seed(seed)
    model = disturbed(Classifier(padding_idx))
    passes = [((torch.randint(6, (n, 3)),), torch.randn(n, 2)) for n in sizes]
    tokens = torch.cat([x.flatten() for (x,), _ in passes])
    kept = torch.tensor([int(token) != padding_idx for token in tokens])
    total = sum(sizes)
    rows = []
    for (x,), target in passes:
        embedded = model.embed(x).detach().requires_grad_()
        output = model.head(embedded.sum(1).tanh())
        rows.append(gradient(squared_error(output, target) / total, [embedded])[0].reshape(-1, 3))
    g = torch.cat(rows)[kept]
    count = max(1, int(kept.sum()))
    frequency = torch.tensor([float((tokens[kept] == token).sum()) / count for token in range(6)])
    g_factor = total * g.T @ g
    mean_eigenvalue = float(frequency.mean() * g_factor.trace() / 3)
    if mean_eigenvalue == 0:
        return  # only padding: nothing moves, see below
    gamma = 0.1 * mean_eigenvalue
    keywords = {"damping": damping_of(0.1 if relative else gamma, relative), "solver": SOLVERS[solver]}
    optimizer = KFACSGD(model, **EXACT | keywords)
    changes = take_step(model, optimizer, passes, lambda output, y: squared_error(output, y) / total)
    raw = model.embed.weight.grad
    for token in range(6):
        if solver == "eigen":
            left, right = frequency[token] * g_factor + gamma * torch.eye(3), 1.0
        else:
            pi = math.sqrt(float(frequency.mean()) / float(g_factor.trace() / 3))
            left = g_factor + math.sqrt(gamma) / pi * torch.eye(3)
            right = float(frequency[token]) + pi * math.sqrt(gamma)
        wanted = torch.linalg.solve(left, raw[token]) / right
        assert_near(changes["embed.weight"][token], -wanted, f"token {token}", scale=10)


@pytest.mark.parametrize("scaling", [None, "kl_clip", "unit", "graft"])
def test_embedding_that_saw_only_padding_does_not_move(scaling: str | None) -> None:
    model = disturbed(Classifier(padding_idx=0))
    optimizer = KFACSGD(model, **EXACT | {"damping": 0.1, "scaling": scaling})
    passes = [((torch.zeros(2, 3, dtype=torch.long),), torch.randn(2, 2))]
    changes = take_step(model, optimizer, passes, mean_loss)
    assert torch.equal(changes["embed.weight"], torch.zeros(6, 3))
    assert bool(changes["head.weight"].isfinite().all())


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    """``nn.MultiheadAttention`` as users call it."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, query: Tensor, memory: Tensor | None = None) -> Tensor:
        """Self-attention, or cross-attention when there is a memory."""
        memory = query if memory is None else memory
        return self.attention(query, memory, memory)[0]


class ExplicitAttention(nn.Module):
    """The same function, of four Linear layers; batch first or sequence first."""

    def __init__(self, bias: bool = True, batch_first: bool = False, kdim: int = 4, vdim: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4, bias), nn.Linear(kdim, 4, bias), nn.Linear(vdim, 4, bias)
        self.out, self.batch_first = nn.Linear(4, 4, bias), batch_first

    def forward(self, query: Tensor, memory: Tensor | None = None) -> Tensor:
        """Self-attention, or cross-attention when there is a memory."""
        memory = query if memory is None else memory
        heads = [self.heads(layer(x)) for layer, x in ((self.q, query), (self.k, memory), (self.v, memory))]
        q, k, v = heads
        mixed = (q @ k.transpose(2, 3) / math.sqrt(2)).softmax(-1) @ v
        joined = mixed.transpose(1, 2).flatten(2)
        return self.out(joined if self.batch_first else joined.transpose(0, 1))

    def heads(self, x: Tensor) -> Tensor:
        """To ``[n, heads, t, 2]``."""
        x = x if self.batch_first else x.transpose(0, 1)
        return x.reshape(*x.shape[:2], 2, 2).transpose(1, 2)


def projections(values: Named) -> Named:
    """Parameters (or changes) of ``Attend`` under the names of ``ExplicitAttention``."""
    values = {name.removeprefix("attention."): value for name, value in values.items()}
    result = {name.replace("out_proj", "out"): value for name, value in values.items() if "out_proj" in name}
    if "in_proj_weight" in values:
        weights = values["in_proj_weight"].chunk(3)
    else:
        weights = tuple(values[f"{name}_proj_weight"] for name in "qkv")
    result |= {f"{name}.weight": w for name, w in zip("qkv", weights, strict=False)}
    if "in_proj_bias" in values:
        result |= {f"{name}.bias": b for name, b in zip("qkv", values["in_proj_bias"].chunk(3), strict=False)}
    return result


ATTENTION: dict[str, tuple[dict[str, object], bool]] = {
    "self-attention": ({"batch_first": True}, False),
    "self-attention, sequence first": ({}, False),
    "self-attention without bias": ({"batch_first": True, "bias": False}, False),
    "cross-attention": ({"batch_first": True}, True),
    "cross-attention, other widths": ({"batch_first": True, "kdim": 3, "vdim": 3}, True),
}


def attention_passes(options: dict[str, object], cross: bool, sizes: tuple[int, ...] = (3,)) -> Passes:
    """Queries of 5 tokens, memories of 2."""
    result = []
    for n in sizes:
        tensors = [torch.randn(n, 5, 4)] + ([torch.randn(n, 2, int(str(options.get("kdim", 4))))] if cross else [])
        target = torch.randn(n, 5, 4)
        if not options.get("batch_first"):
            tensors, target = [t.transpose(0, 1) for t in tensors], target.transpose(0, 1)
        result.append((tuple(tensors), target))
    return result


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("limit", [None, 3])
def test_attention_projections_are_four_linear_layers(
    limit: int | None, case: tuple[dict[str, object], bool], sharing: str, solver: str
) -> None:
    options, cross = case
    batch_dim = 0 if options.get("batch_first") else 1
    model, twin = disturbed(Attend(**options)), ExplicitAttention(**options)
    twin.load_state_dict(projections(parameters(model)))
    passes = attention_passes(options, cross, (3, 2))
    loss = averaged(squared_error, "batch", batch_dim)
    oracle = Oracle(twin, sharing=sharing, batch_dim=batch_dim, largest_block=limit)
    step = oracle.observe(passes, loss)
    oracle.refresh(step)
    # Softmax ignores a constant in the keys: under "reduce" their G is zero, and takes no part in choosing gamma.
    gamma = 0.1 * oracle.curvature["v"].mean_eigenvalue
    keywords = {"damping": gamma, "weight_sharing": sharing, "batch_dim": batch_dim, "solver": SOLVERS[solver]}
    keywords["max_factor_dim"] = limit
    changes = projections(take_step(model, KFACSGD(model, **EXACT | keywords), passes, loss))
    assert_applied(oracle, changes, oracle.directions(step.gradients, gamma, solver=solver), step.gradients)


def test_attention_gives_the_same_output_and_gradients_under_the_optimizer() -> None:
    torch.manual_seed(1)
    model, plain = twins(lambda: Attend(batch_first=True))
    KFACSGD(model, **EXACT | {"damping": 0.1})
    passes = attention_passes({"batch_first": True}, cross=False)
    assert_near(model(*passes[0][0]).detach(), plain(*passes[0][0]).detach(), rel=1e-12)
    backward(model, passes, mean_loss)
    backward(plain, passes, mean_loss)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=False):
        assert_near(ours.grad, theirs.grad, rel=1e-12)


def test_uses_of_its_weights_beside_attention_do_not_count() -> None:
    """As those of a user's hook; only what attention itself applies is in the factors."""
    passes, changes = attention_passes({"batch_first": True}, cross=False), []
    for each, has_hook in zip(twins(lambda: Attend(batch_first=True)), (True, False), strict=True):
        optimizer = KFACSGD(each, **EXACT | {"damping": 0.1})
        if has_hook:
            each.attention.register_forward_pre_hook(lambda m, args: (F.linear(args[0], m.in_proj_weight), None)[1])
        changes.append(take_step(each, optimizer, passes, mean_loss))
    for name, change in changes[0].items():
        assert torch.equal(change, changes[1][name]), name


class ExplicitEncoder(nn.Module):
    """``nn.TransformerEncoderLayer`` in its own words."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = ExplicitAttention(batch_first=True)
        self.linear1, self.linear2 = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        """Post-norm encoder layer."""
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.linear2(self.linear1(x).relu()))


def encoder_names(values: Named) -> Named:
    """Names of the explicit encoder."""
    inner = {n.removeprefix("self_attn."): v for n, v in values.items() if n.startswith("self_attn.")}
    outer = {n: v for n, v in values.items() if not n.startswith("self_attn.")}
    return outer | {f"self_attn.{name}": value for name, value in projections(inner).items()}


def test_transformer_encoder_layer_is_covered_completely() -> None:
    torch.manual_seed(1)
    model = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.0, batch_first=True)
    disturbed(model)
    twin = ExplicitEncoder()
    twin.load_state_dict(encoder_names(parameters(model)))
    passes = attention_passes({"batch_first": True}, cross=False)
    oracle = Oracle(twin)
    step = oracle.observe(passes, mean_loss)
    oracle.refresh(step)
    gamma = 0.1 * oracle.typical_eigenvalue()
    changes = encoder_names(take_step(model, KFACSGD(model, **EXACT | {"damping": gamma}), passes, mean_loss))
    assert_applied(oracle, changes, oracle.directions(step.gradients, gamma), step.gradients)


# ---------------------------------------------------------------------------------------------------------------------
# Convolutions
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolutions(dims: int, groups: int, solver: str) -> None:
    cls = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]

    def factory() -> nn.Module:
        return nn.Sequential(cls(4, 6, 3, stride=2, padding=1, output_padding=1, groups=groups), nn.Tanh())

    x = torch.randn(2, 4, *[2] * dims)
    check_with_oracle(factory, [((x,), torch.randn_like(factory()(x)))], {"solver": solver})


def test_depthwise_convolution() -> None:
    passes = [((torch.randn(2, 3, 4, 4),), torch.randn(2, 6, 4, 4))]
    check_with_oracle(lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.Tanh()), passes, {})


@pytest.mark.parametrize("in_place", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)], ids=["relu", "hardtanh"])
def test_activations_in_place_after_every_layer(in_place: nn.Module) -> None:
    def factory() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 3, 2), in_place, nn.GroupNorm(1, 3), in_place, nn.Flatten(), nn.Linear(12, 4), in_place
        )

    passes = [((torch.randn(4, 2, 3, 3),), torch.randn(4, 4))]
    check_with_oracle(factory, passes, {})


# ---------------------------------------------------------------------------------------------------------------------
# Large factors, and what does not take part
# ---------------------------------------------------------------------------------------------------------------------


@given(d_in=st.integers(1, 9), d_out=st.integers(1, 9), limit=st.integers(1, 9), bias=st.booleans(), seed=seeds)
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_blocks_of_linear_layers_of_any_width(
    d_in: int, d_out: int, limit: int, bias: bool, seed: int, sharing: str, solver: str
) -> None:
    torch.manual_seed(seed)
    passes = [((torch.randn(n, 2, d_in),), torch.randn(n, 2, d_out)) for n in (4, 3)]
    options = {"max_factor_dim": limit, "solver": solver, "weight_sharing": sharing}
    check_with_oracle(lambda: nn.Sequential(nn.Linear(d_in, d_out, bias=bias)), passes, options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("limit", [1, 4, 6])
def test_large_factors_of_convolutions_are_block_diagonal(limit: int, groups: int, bias: bool) -> None:
    """Without a bias and with 4 rows, blocks are whole channels, whose moments need no patches."""
    passes = [((torch.randn(3, 4, 3, 3),), torch.randn(3, 2, 2, 2))]
    make = functools.partial(nn.Conv2d, 4, 2, 2, groups=groups, bias=bias)
    check_with_oracle(lambda: nn.Sequential(make()), passes, {"max_factor_dim": limit})


@pytest.mark.parametrize("module", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4)], ids=["batch", "group"])
def test_norm_layers_of_inputs_far_from_zero(module: nn.Module) -> None:
    """In float32: three digits at a mean of 100 deviations; beyond 1000 it may come out too small, never too large."""
    (layer,) = FoundLayers([module], LayerOptions()).layers
    torch.manual_seed(0)
    x, g = torch.randn(16, 4, 8, 8), torch.randn(16, 4, 8, 8)

    def moment(mean: float, dtype: torch.dtype) -> Tensor:
        rounded = (x + mean).to(dtype)  # what float32 can hold of it, in both precisions
        return layer.output_moment(module, g.to(dtype), layer.observe(module, rounded, rounded, dtype).context).double()

    for mean in (0.0, -100.0):
        exact = moment(mean, torch.float64)
        torch.testing.assert_close(moment(mean, torch.float32), exact, rtol=2e-3, atol=2e-3 * float(exact.abs().max()))
    assert moment(1e5, torch.float32).norm() < 1.1 * moment(0.0, torch.float64).norm()


@pytest.mark.parametrize("positions", [(), (7,), (3, 2)])
@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4).eval(),
        nn.BatchNorm2d(4, track_running_stats=False).eval(),
        nn.SyncBatchNorm(4),
        nn.SyncBatchNorm(4).eval(),
        nn.GroupNorm(2, 4),
        nn.GroupNorm(2, 4, affine=True, eps=0.1),
    ],
    ids=["batch", "running", "untracked", "sync", "sync running", "group", "eps"],
)
def test_norm_layers_on_accelerators(module: Any, positions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inputs are normalised, by an operation of torch."""
    (layer,) = FoundLayers([module], LayerOptions()).layers
    module = copy.deepcopy(module).double()
    torch.manual_seed(0)
    for statistics, at_least in (
        (getattr(module, "running_mean", None), -1.0),
        (getattr(module, "running_var", None), 1.0),
    ):
        if statistics is not None:
            statistics.uniform_(at_least, 2.0)
    x, g = torch.randn(2, 5, 4, *positions, dtype=torch.float64)
    observation = layer.observe(module, x, 3 * x + 1, torch.float64)
    expected = layer.output_moment(module, g, observation.context)
    monkeypatch.setattr("kfac_optim.layers.norm.machine_of", lambda device: "accelerator")
    monkeypatch.setattr(type(layer), "statistics", None)
    batch_norm = nn.functional.batch_norm

    def strict(*args: Any, eps: float, **more: Any) -> Tensor:
        assert eps > 0, "torch 2.11 refuses it"
        return batch_norm(*args, eps=eps, **more)

    monkeypatch.setattr(nn.functional, "batch_norm", strict)
    torch.testing.assert_close(layer.output_moment(module, g, observation.context), expected)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 2, 3)])
def test_sync_batch_norm_reads_the_statistics_of_all_ranks_off_its_output(shape: tuple[int, ...]) -> None:
    """Its block on one rank's half equals that half's part of BatchNorm's block on the whole batch."""
    torch.manual_seed(0)
    whole = torch.randn(shape, dtype=torch.float64) * 3 + 1
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(4).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
    output, g = norm(whole), torch.randn(shape, dtype=torch.float64)

    def moment(module: nn.Module, x: Tensor, y: Tensor, g: Tensor) -> Tensor:
        (layer,) = FoundLayers([module], LayerOptions()).layers
        return layer.output_moment(module, g, layer.observe(module, x, y, torch.float64).context)

    halves = [moment(synchronised, *(t.detach()[part] for t in (whole, output, g))) for part in (slice(3), slice(3, 6))]
    expected = moment(norm, whole, output, g)
    torch.testing.assert_close(torch.cat(halves), expected, rtol=1e-9, atol=1e-9)
    alone = moment(kind(4).double().train(), whole[:3], output[:3], g[:3])
    assert not torch.allclose(halves[0], alone), "the rank's own statistics are others"


def test_sync_batch_norm_with_a_zero_weight_falls_back_to_its_own_batch() -> None:
    module = nn.SyncBatchNorm(4).double()
    nn.init.zeros_(module.weight)
    x, g = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    (layer,) = FoundLayers([module], LayerOptions()).layers
    found = layer.output_moment(module, g, layer.observe(module, x, torch.zeros_like(x), torch.float64).context)
    x_hat = torch.nn.functional.batch_norm(x, None, None, training=True)
    expected = torch.stack([g * x_hat, g], dim=-1)[:, None].transpose(1, 2)
    torch.testing.assert_close(found, expected.reshape(found.shape))
