"""Gradient accumulation: the statistics of K micro-batches are those of the batch they make up."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, KFACAdam
from kfac_optim.capture.microbatch import MicroBatch
from kfac_optim.capture.recorder import LayerCall
from kfac_optim.capture.statistics import StepStatistics
from kfac_optim.optimizers import KFACMixin
from tests.helpers.compare import (
    SAME,
    assert_near,
    assert_same_factors,
    assert_same_weights,
    assert_step_alike,
    factors_of,
)
from tests.helpers.settings import OPTIONS

pytestmark = pytest.mark.usefixtures("float64")

Loss = Callable[[Tensor, Tensor], Tensor]  # a sum over the examples
STEPS = 2
EXAMPLES = 12
NAN = float("nan")


class Tokens(nn.Module):
    """Embedding, LayerNorm, Linear on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 3).long() % 7
        return self.head(self.norm(self.embed(tokens.flatten(1))))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(2, 4, 2, stride=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 1, groups=2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Tanh(), nn.RMSNorm(5), nn.Linear(5, 3))


MODELS = {"linear": linear, "convolutional": convolutional, "tokens": Tokens}


def squares(output: Tensor, target: Tensor) -> Tensor:
    error = output - target.reshape(-1, *[1] * (output.dim() - 1))
    return (error.square() + error.pow(4) / 4).sum()


def mean_over(average: str | None, output: Tensor) -> int:
    """How many terms a loss divides by."""
    counts = {None: 1, "batch": len(output), "batch+sequence": output[..., 0].numel(), "elements": output.numel()}
    return counts[average]


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(EXAMPLES, 2, 4, 4), torch.randn(EXAMPLES)


def run(model: nn.Module, optimizer: KFACMixin, average: str | None, parts: int, divided: bool = True) -> None:
    """A few steps on the same data, however they are split."""
    torch.manual_seed(1)
    for _ in range(STEPS):
        x, y = data()
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            output = model(part_x)
            loss = squares(output, part_y) / mean_over(average, output)
            (loss / parts if divided and average is not None else loss).backward()
        optimizer.step()


def pair(kind: str, **keywords: object) -> tuple[nn.Module, KFACSGD, nn.Module, KFACSGD]:
    model = MODELS[kind]()
    other = copy.deepcopy(model)
    options = OPTIONS | {"lr": 0.01} | keywords
    return model, KFACSGD(model, **options), other, KFACSGD(other, **options)


@pytest.mark.parametrize("average", ["batch", "batch+sequence", "elements", None])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("parts", [2, EXAMPLES])
def test_micro_batches_equal_one_batch(average: str | None, solver: str, kind: str, parts: int) -> None:
    split, first, whole, second = pair(kind, solver=solver, loss_average=average)
    run(split, first, average, parts)
    run(whole, second, average, 1)
    assert_same_factors(first, second)
    assert_same_weights(split, whole)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("terms", [EXAMPLES, lambda inputs, output: len(output)])
def test_micro_batches_with_reduce_and_loss_terms(sharing: str, terms: object) -> None:
    """An int ``loss_terms`` is M of one backward pass."""
    split, first, whole, second = pair("convolutional", weight_sharing=sharing, loss_average=terms)
    if terms == EXAMPLES:
        first = KFACSGD(split, **(OPTIONS | {"lr": 0.01, "weight_sharing": sharing, "loss_average": EXAMPLES // 3}))
    run(split, first, "batch", 3)
    run(whole, second, "batch", 1)
    assert_same_factors(first, second)
    assert_same_weights(split, whole)


@pytest.mark.parametrize("cls", [KFACAdam, KFACLAMB])
def test_micro_batches_under_the_other_classes(cls: type[KFACMixin]) -> None:
    options = {name: value for name, value in OPTIONS.items() if name not in ("momentum", "precondition")}
    model = convolutional()
    whole = copy.deepcopy(model)
    first, second = cls(model, **(options | {"lr": 1e-3})), cls(whole, **(options | {"lr": 1e-3}))
    run(model, first, "batch", 4)
    run(whole, second, "batch", 1)
    assert_same_weights(model, whole)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_undivided_micro_batches_have_a_larger_g(parts: int, kind: str) -> None:
    """L is then K times the mean loss, and its G K^2 times larger: documented, not corrected."""
    split, first, _, second = pair(kind, lr=0.0)
    run(split, first, "batch", parts, divided=False)
    run(split, second := KFACSGD(split, **(OPTIONS | {"lr": 0.0})), "batch", 1)
    for name, factor in factors_of(second).items():
        times = parts**2 if name.endswith("G") else 1
        assert_near(factors_of(first)[name], times * factor, name, SAME, scale=0.0)


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 999))
def test_unequal_micro_batches(sizes: list[int], seed: int) -> None:
    """Any split is exact if each loss is its share of the mean over the whole batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    whole = copy.deepcopy(model)
    n = sum(sizes)
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(whole, **OPTIONS)
    for _ in range(2):
        x, y = torch.randn(n, 3), torch.randn(n)
        *others, last = zip(x.split(sizes), y.split(sizes), strict=True)
        for part_x, part_y in others:
            (squares(model(part_x), part_y) / n).backward()
        losses = [squares(m(inputs), targets) / n for m, (inputs, targets) in ((model, last), (whole, (x, y)))]
        assert_step_alike((model, first, losses[0]), (whole, second, losses[1]))


def lightning(model: nn.Module, optimizer: KFACMixin, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """As Lightning: forward, ``zero_grad``, backward; those of the last micro-batch inside the closure of ``step``."""

    def closure(x: Tensor, y: Tensor, first: bool) -> Tensor:
        loss = squares(model(x), y) / len(x) / len(parts)
        if first:
            optimizer.zero_grad()
        loss.backward()
        return loss

    for i, (x, y) in enumerate(parts[:-1]):
        closure(x, y, i == 0)
    optimizer.step(lambda: closure(*parts[-1], len(parts) == 1))


def one_graph(model: nn.Module, optimizer: KFACMixin, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Every forward before the first backward, the backward passes in reverse order, ``zero_grad`` in between."""
    losses = [squares(model(x), y) / len(x) / len(parts) for x, y in parts]
    optimizer.zero_grad()
    for loss in reversed(losses):
        loss.backward()
    optimizer.step()


@pytest.mark.parametrize("loop", [lightning, one_graph])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_other_orders_of_the_loop(loop: Callable[..., None], parts: int, kind: str) -> None:
    split, first, whole, second = pair(kind)
    batches = [data() for _ in range(STEPS)]
    for x, y in batches:
        loop(split, first, list(zip(x.chunk(parts), y.chunk(parts), strict=True)))
        second.zero_grad()
        (squares(whole(x), y) / EXAMPLES).backward()
        second.step()
    assert_same_factors(first, second)
    assert_same_weights(split, whole)


def test_backward_twice_through_one_graph() -> None:
    """``retain_graph=True``: two backward passes of half the loss are two micro-batches of the same examples."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    doubled = copy.deepcopy(model)
    x, y = torch.randn(5, 3), torch.randn(5)
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(doubled, **OPTIONS)
    loss = squares(model(x), y) / 5 / 2
    loss.backward(retain_graph=True)
    loss.backward()
    first.step()
    for _ in range(2):
        (squares(doubled(x), y) / 5 / 2).backward()
    second.step()
    assert_same_factors(first, second)
    assert_same_weights(model, doubled)


def test_a_second_pass_through_a_freed_graph_is_torchs_own_error() -> None:
    model = nn.Linear(3, 2)
    optimizer = KFACSGD(model, **OPTIONS)
    loss = model(torch.randn(5, 3)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    optimizer.step()


class Halves(nn.Module):
    """Returns both halves of what it computes, two results of one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.second(self.first(x).tanh()).chunk(2, dim=1)


def test_an_output_that_the_loss_leaves_out_has_no_sampled_targets() -> None:
    """Although the operation that made it gets a gradient, that of its other result."""
    model = Halves()
    optimizer = KFACSGD(model, **OPTIONS, fisher="gaussian")
    model(torch.randn(5, 3))[1].square().sum().backward()
    with pytest.raises(RuntimeError, match="none of its layers was seen"):
        optimizer.step()


@pytest.mark.fast("empirical")
@pytest.mark.parametrize("fisher", ["empirical", "gaussian"])
def test_a_loss_that_is_kept_keeps_nothing_that_was_observed(fisher: str) -> None:
    """A loop's variable holds the last loss until the next forward pass has ended: images and moments must not wait."""

    def observed() -> int:
        gc.collect()
        return sum(type(thing) is LayerCall for thing in gc.get_objects())

    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    optimizer, before = KFACSGD(model, **OPTIONS, fisher=fisher), observed()
    loss = squares(model(torch.randn(EXAMPLES, 1, 3, 3)), torch.randn(EXAMPLES)) / EXAMPLES
    assert observed() == before + 3
    loss.backward(retain_graph=True)
    assert observed() == before + 3  # wanted again
    loss.backward()
    optimizer.step()
    assert observed() == before
    assert optimizer.curvature.report()["layers"]


def test_statistics_on_some_steps_take_all_micro_batches_of_those() -> None:
    split, first, whole, second = pair("linear", factor_update_steps=2, inv_update_steps=2)
    for _ in range(2):
        run(split, first, "batch", 4)
        run(whole, second, "batch", 1)
    assert first.curvature.stages.progress.last_statistics == 2
    assert_same_factors(first, second)
    assert_same_weights(split, whole)


@pytest.mark.parametrize(
    "sizes", [(NAN,), (NAN, 2.0), (1.0, NAN), (NAN, NAN, 3.0), (NAN, 1.0, 2.0), (1.0, 2.0, NAN), (1.0, 2.0, 3.0)]
)
def test_micro_batches_that_are_not_finite_are_left_out(sizes: tuple[float, ...]) -> None:
    """Whichever they are: the first one is changed only when a second one comes."""
    statistics = StepStatistics()
    for size in sizes:
        batch = MicroBatch()
        batch.add(0, torch.full((1, 3), size), size, torch.ones(1, 3))
        statistics.add(batch.sums, batch.terms, batch.rows, torch.ones(()), drop_overflowed=False)
    settled = statistics.resolve(lambda flag: flag.view(-1).tolist())
    finite = [size for size in sizes if size == size]
    assert settled.rows[0] == sum(finite)
    if finite:
        for sums, expected in zip(settled.sums[0], (sum(finite), len(finite)), strict=True):
            assert torch.equal(sums, torch.full((1, 3), float(expected)))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_micro_batch_whose_moments_overflow_does_not_count_in_g(order: tuple[int, int]) -> None:
    """Its gradient is finite, so that the step is taken; what is left is the mean over the other's examples."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = copy.deepcopy(model)
    both, alone = (KFACSGD(m, **(OPTIONS | {"lr": 0.0, "factor_dtype": torch.float32})) for m in (model, plain))
    x = torch.randn(4, 3)
    losses = [lambda m: m(x).square().sum(), lambda m: 1e-60 * m(1e25 * torch.ones(12, 3)).square().sum()]
    for i in order:
        (losses[i](model) / 16).backward()
    (losses[0](plain) / 4).backward()
    both.step()
    alone.step()
    assert both.curvature.stages.averaging.skipped_batches == 1 and both.curvature.skipped_steps == 0
    assert_same_factors(both, alone, 1e-6)


def test_where_the_first_statistics_were_left_out_the_next_step_collects() -> None:
    model = nn.Linear(3, 2)
    late = {"factor_update_steps": 10, "inv_update_steps": 10, "factor_dtype": torch.float32}
    optimizer = KFACSGD(model, **(OPTIONS | late))
    x = torch.randn(4, 3)
    for size, loss_scale in ((1e25, 1e-60), (1.0, 1.0), (1.0, 1.0)):
        optimizer.zero_grad()
        (loss_scale * model(size * x).square().sum()).backward()
        optimizer.step()
    assert optimizer.curvature.stages.progress.last_statistics == optimizer.curvature.stages.refresher.last_refresh == 1
