"""What is in ``.grad`` at the step decides which backward passes its statistics are of."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACSGD, CurvatureEngine
from tests.helpers.compare import assert_near, assert_same_factors, assert_same_weights
from tests.helpers.settings import OPTIONS

pytestmark = pytest.mark.usefixtures("float64")

Run = Callable[[nn.Module, KFACSGD], Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))


def loss_of(model: nn.Module, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 3, generator=generator), torch.randint(2, (6,), generator=generator)
    return scale * F.cross_entropy(model(scale * x), y)


def assert_as(run: Run, expected: Run, **keywords: Any) -> None:
    """Both leave the same factors."""
    found = []
    for loop in (run, expected):
        model = net()
        optimizer = KFACSGD(model, **(OPTIONS | {"lr": 0.0} | keywords))
        loop(model, optimizer)
        optimizer.step()
        found.append(optimizer)
    assert_same_factors(*found)


def passes(*seeds: int) -> Run:
    """Accumulates."""

    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        for seed in seeds:
            loss_of(model, seed).backward()

    return run


CLEARINGS: dict[str, Callable[[nn.Module], None]] = {
    "removed": lambda model: model.zero_grad(),
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
    "zeroed by a foreign optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
    "removed by a foreign optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "replaced by zeros": lambda model: [setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()] and None,
}


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
def test_an_abandoned_pass_leaves_no_trace(clear: Callable[[nn.Module], None], fisher: str) -> None:
    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss_of(model, 1, 7.0).backward()
        loss_of(model, 2, 7.0).backward()
        clear(model)
        loss_of(model, 3).backward()
        loss_of(model, 4).backward()

    if fisher == "empirical":
        assert_as(run, passes(3, 4))
        return
    found = []
    for loop in (run, passes(3, 4)):
        model = net()
        optimizer = KFACSGD(model, **OPTIONS, fisher=fisher)
        loop(model, optimizer)
        taken = optimizer.curvature.stages.capture._passes.take()
        found.append(taken.resolve(lambda flag: flag.view(-1).tolist()))
    assert found[0][1:] == found[1][1:]  # all but the sums, of which those for G are of samples
    for i, (a, _) in found[1].sums.items():
        torch.testing.assert_close(found[0].sums[i][0], a)


@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
def test_a_step_on_nothing_has_no_statistics(clear: Callable[[nn.Module], None]) -> None:
    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 2, 7.0).backward()
        clear(model)

    assert_as(run, passes(1))


@pytest.mark.parametrize("clear", CLEARINGS.values(), ids=CLEARINGS)
def test_one_layer_that_is_cleared_starts_anew_alone(clear: Callable[[nn.Module], None]) -> None:
    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss_of(model, 1).backward()
        clear(model[3])
        loss_of(model, 2).backward()

    model, both, last = net(), net(), net()
    optimizers = [KFACSGD(m, **(OPTIONS | {"lr": 0.0})) for m in (model, both, last)]
    run(model, optimizers[0])
    passes(1, 2)(both, optimizers[1])
    passes(2)(last, optimizers[2])
    for optimizer in optimizers:
        optimizer.step()
    found, two, one = ({layer: o.curvature.factors(layer) for layer in ("0", "3")} for o in optimizers)
    for layer, expected, other in (("0", two, one), ("3", one, two)):
        for mine, right, wrong in zip(found[layer], expected[layer], other[layer], strict=True):
            assert_near(mine, right, layer)
            assert not torch.allclose(mine, wrong)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def divide(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.div_(65536.0)  # type: ignore[union-attr]


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad.clone()  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [clip, divide, replace])
def test_other_changes_of_the_gradients_keep_the_statistics(change: Callable[[nn.Module], None]) -> None:
    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss_of(model, 1).backward()
        change(model)
        loss_of(model, 2).backward()
        change(model)

    assert_as(run, passes(1, 2))


def two_steps(model: nn.Module, optimizer: KFACSGD) -> None:
    """The second one is left to the caller."""
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 2).backward()


def test_gradients_from_before_the_step_are_no_clearing() -> None:
    """A loop that never clears: each step has the statistics of its own passes."""

    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss_of(model, 1).backward()
        optimizer.step()
        loss_of(model, 2).backward()

    assert_as(run, two_steps)


def test_a_closure_that_clears_through_the_model() -> None:
    model, twin = net(), net()
    first, second = (KFACSGD(m, **(OPTIONS | {"lr": 0.0})) for m in (model, twin))
    loss_of(model, 1, 7.0).backward()

    def closure() -> Tensor:
        model.zero_grad()
        loss = loss_of(model, 2)
        loss.backward()
        return loss

    first.step(closure)
    loss_of(twin, 2).backward()
    second.step()
    assert_same_factors(first, second)


class SAM(torch.optim.Optimizer):
    """The usual wrapper: it has a ``zero_grad`` of its own."""

    def __init__(self, base: torch.optim.Optimizer, rho: float = 0.05) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.rho = base, rho
        self.moves: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def climb(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.moves[p] = self.rho * p.grad / norm
            p.add_(self.moves[p])
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p, move in self.moves.items():
            p.sub_(move)
        self.base.step()
        self.zero_grad()


def test_sam_has_the_statistics_of_its_second_pass() -> None:
    model = net()
    optimizer = KFACSGD(model, **(OPTIONS | {"lr": 0.0}))
    sam = SAM(optimizer)
    loss_of(model, 1).backward()
    sam.climb()
    climbed = copy.deepcopy(model)
    loss_of(model, 1).backward()
    sam.descend()
    expected = KFACSGD(climbed, **(OPTIONS | {"lr": 0.0}))
    loss_of(climbed, 1).backward()
    expected.step()
    assert_same_factors(optimizer, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_beside_a_foreign_optimizer(set_to_none: bool) -> None:
    model, twin = net(), net()
    options = {name: OPTIONS[name] for name in OPTIONS if name not in ("lr", "momentum", "precondition")}
    engines = [CurvatureEngine(m, **options) for m in (model, twin)]
    foreign = torch.optim.SGD(model.parameters(), lr=0.0)
    for seed in range(3):
        loss_of(model, 10 + seed, 7.0).backward()
        foreign.zero_grad(set_to_none)
        loss_of(model, seed).backward()
        engines[0].precondition_(lr=0.1)
        foreign.step()
        foreign.zero_grad(set_to_none)
        twin.zero_grad()
        loss_of(twin, seed).backward()
        engines[1].precondition_(lr=0.1)
    for layer in ("0", "3"):
        for found, expected in zip(engines[0].factors(layer), engines[1].factors(layer), strict=True):
            assert_near(found, expected, layer)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_while_a_foreign_optimizer_trains_nothing_piles_up(fisher: str) -> None:
    """As where one warms the model up and ours, which was built already, takes over."""
    found = []
    for warm_up in (3, 3, 60):  # the first fills caches
        model = net()
        optimizer = KFACSGD(model, fisher=fisher, **(OPTIONS | {"lr": 0.0}))
        foreign = torch.optim.SGD(model.parameters(), lr=0.0)
        gc.collect()
        before = len([x for x in gc.get_objects() if isinstance(x, Tensor)])
        for seed in range(warm_up):
            foreign.zero_grad()
            loss_of(model, seed).backward()
            foreign.step()
        gc.collect()
        found.append(len([x for x in gc.get_objects() if isinstance(x, Tensor)]) - before)
        foreign.zero_grad()
        loss_of(model, 100).backward()
        optimizer.step()
    assert found[1] == found[2]


def test_under_a_grad_scaler() -> None:
    """Unscaling writes to the gradients, an overflow leaves infinite ones; neither is a clearing."""

    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer.curvature.grad_scaler = scaler
        scaler.scale(loss_of(model, 1, 7.0)).backward()
        model.zero_grad()
        scaler.scale(loss_of(model, 1)).backward()
        scaler.scale(loss_of(model, 2)).backward()
        scaler.unscale_(optimizer)
        clip(model)

    assert_as(run, passes(1, 2))


# torch.autograd.grad -------------------------------------------------------------------------------------------------


def gradient_norm(model: nn.Module, seed: int = 5) -> None:
    torch.autograd.grad(loss_of(model, seed, 7.0), list(model.parameters()))


def hessian_vector_product(model: nn.Module, seed: int = 5) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model, seed, 7.0), parameters, create_graph=True)
    torch.autograd.grad(sum(g.sum() for g in gradients), parameters)


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("monitor", [gradient_norm, hessian_vector_product])
def test_a_monitor_leaves_no_trace(monitor: Callable[[nn.Module], None], when: str) -> None:
    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        if when == "before":
            monitor(model)
        loss_of(model, 1).backward()
        if when == "between":
            monitor(model)
        loss_of(model, 2).backward()
        if when == "after":
            monitor(model)

    assert_as(run, passes(1, 2))


def test_a_monitor_on_the_graph_of_the_loss() -> None:
    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss = loss_of(model, 1)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()

    assert_as(run, passes(1))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_monitor_after_an_abandoned_pass(set_to_none: bool) -> None:
    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        gradient_norm(model)
        model.zero_grad(set_to_none)

    assert_as(run, passes(1))


@pytest.mark.parametrize("how", ["set", "copied", "added"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_loop_that_sets_the_gradients_itself(how: str, parts: int) -> None:
    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        if how == "copied":
            loss_of(model, 9, 7.0).backward()
            model.zero_grad(set_to_none=False)
        for seed in range(parts):
            gradients = torch.autograd.grad(loss_of(model, seed), list(model.parameters()))
            for p, g in zip(model.parameters(), gradients, strict=True):
                if p.grad is not None and (how == "copied" or seed):
                    p.grad.add_(g)
                else:
                    p.grad = g.clone() if how == "added" else g

    assert_as(run, passes(*range(parts)))


@pytest.mark.parametrize("how", ["copied", "replaced"])
def test_a_loop_that_writes_through_data(how: str) -> None:
    """Torch counts no such change: in the second step the tensors of the first one hold other numbers."""

    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        for seed in (1, 2):
            for p, g in zip(
                model.parameters(), torch.autograd.grad(loss_of(model, seed), list(model.parameters())), strict=True
            ):
                if p.grad is None:
                    p.grad = g.clone()
                elif how == "copied":
                    p.grad.data.copy_(g)
                else:
                    p.grad.data = g.clone()
            if seed == 1:
                optimizer.step()

    assert_as(run, two_steps)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_a_backward_pass_in_two_parts(fisher: str) -> None:
    """As gradient caching has it: the first part, which frees its graph, ends at the model's output."""

    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        outputs: list[Tensor] = []
        handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
        loss = loss_of(model, 1)
        handle.remove()
        (gradient,) = torch.autograd.grad(loss, outputs)
        outputs[0].backward(gradient)

    assert_as(run, passes(1), fisher=fisher)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_a_layer_that_is_frozen_between_forward_and_backward(fisher: str) -> None:
    """As one frozen before; the graph of the forward pass would still lead to its weight."""

    def run(model: nn.Module, optimizer: KFACSGD, *, before: bool) -> None:
        loss_of(model, 1).backward()
        if before:
            model[0].requires_grad_(False)
        loss = loss_of(model, 2)
        model[0].requires_grad_(False)
        loss.backward()
        model[0].requires_grad_(True)

    assert_as(functools.partial(run, before=False), functools.partial(run, before=True), fisher=fisher)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_a_layer_that_a_hook_has_cut_off_is_as_a_frozen_one(fisher: str) -> None:
    """The hook comes before those of the optimizer: to them the layer's output is a leaf."""

    def run(model: nn.Module, optimizer: KFACSGD, *, cut: bool) -> None:
        loss_of(model, 1).backward()
        if cut:
            model[0].register_forward_hook(lambda *call: call[2].detach().requires_grad_(), prepend=True)
        else:
            model[0].requires_grad_(False)
        loss_of(model, 2).backward()
        model[0].requires_grad_(True)

    assert_as(functools.partial(run, cut=True), functools.partial(run, cut=False), fisher=fisher)


def hooked_loss(model: nn.Module, layer: nn.Module, hook: Callable[[Tensor], None], seed: int) -> Tensor:
    """A loss in whose backward pass the hook gets the gradient of the layer's output."""
    handle = layer.register_forward_hook(lambda module, args, output: output.register_hook(hook) and None)
    loss = loss_of(model, seed)
    handle.remove()
    return loss


def test_a_backward_pass_that_raised_leaves_no_trace_if_its_graph_is_used_again() -> None:
    """No call of the model comes between the two passes."""
    raised = []

    def out_of_memory(g: Tensor) -> None:
        if not raised:
            raised.append(True)
            raise RuntimeError("out of memory")

    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss = hooked_loss(model, model[1], out_of_memory, 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss.backward(retain_graph=True)
        optimizer.zero_grad()
        loss.backward()

    assert_as(run, passes(1))


def test_a_backward_pass_that_raised_leaves_no_trace_in_that_of_an_earlier_forward() -> None:
    """Nothing is called and nothing cleared between the two passes."""

    def out_of_memory(g: Tensor) -> None:
        raise RuntimeError("out of memory")

    def run(model: nn.Module, optimizer: KFACSGD) -> None:
        loss = loss_of(model, 1)
        other = hooked_loss(model, model[0], out_of_memory, 2)
        with pytest.raises(RuntimeError, match="out of memory"):
            other.backward()
        model.zero_grad()
        loss.backward()

    assert_as(run, passes(1))


# Retained graphs, and inputs of other layouts -------------------------------------------------------------------------


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("count", [1, 3, 10])
def test_passes_over_one_retained_graph_leave_the_inputs_as_they_were(count: int, zeroed: bool) -> None:
    """A of each pass is that of the same inputs, and so is their mean."""
    model, x = nn.Linear(3, 2, bias=False), torch.randn(8, 3)
    engine = CurvatureEngine(model)
    y = model(x)
    for _ in range(count):
        if zeroed:
            model.zero_grad(set_to_none=False)
        y.square().sum(1).mean().backward(retain_graph=True)
    engine.precondition_(lr=1.0)
    assert_near(engine.factors("")[0][0], x.T @ x / 8, rel=1e-6)


def test_sparse_inputs_are_those_of_the_dense_matrix() -> None:
    def run(model: nn.Module, x: Tensor) -> CurvatureEngine:
        engine = CurvatureEngine(model)
        F.cross_entropy(model(x), torch.tensor([0, 1, 1])).backward()
        engine.precondition_(lr=1.0)
        return engine

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 2)), torch.eye(5)[:3]
    sparse, dense = run(copy.deepcopy(model), x.to_sparse()), run(model, x)
    for found, expected in zip(sparse.factors("0"), dense.factors("0"), strict=True):
        assert_near(found, expected, rel=1e-6)


class Labelled(Tensor):
    """A tensor whose results lack what its methods need, as labelled tensors of libraries have it."""

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AttributeError("this tensor has no labels")

    detach = clone = reshape = sum = to


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_inputs_of_a_subclass_count_as_plain_ones(fisher: str) -> None:
    def run(cls: type[Tensor], model: nn.Module, optimizer: KFACSGD) -> None:
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
        F.cross_entropy(model(x.as_subclass(cls)), torch.arange(6) % 2).backward()

    assert_as(functools.partial(run, Labelled), functools.partial(run, Tensor), fisher=fisher)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_inputs_are_those_of_all_positions(layout: torch.layout) -> None:
    torch.manual_seed(0)
    model, parts = nn.Linear(5, 2), [torch.randn(3, 5), torch.randn(7, 5)]
    other = copy.deepcopy(model)
    engines = [CurvatureEngine(net, loss_average=1) for net in (model, other)]
    torch.cat(model(torch.nested.nested_tensor(parts, layout=layout)).unbind()).square().sum().backward()
    other(torch.cat(parts)).square().sum().backward()
    for engine in engines:
        engine.precondition_(lr=1.0)
    for found, expected in zip(*(engine.factors("") for engine in engines), strict=True):
        assert_near(found, expected, rel=1e-6)


def test_batched_gradients_are_left_alone() -> None:
    """Those of ``torch.autograd.grad(..., is_grads_batched=True)`` are no passes of a loss."""
    model = nn.Linear(5, 2)
    optimizer = KFACSGD(model, lr=0.1)
    y, directions = model(torch.randn(3, 5)), torch.eye(6).view(6, 3, 2)
    found = torch.autograd.grad(y, list(model.parameters()), directions, is_grads_batched=True, retain_graph=True)
    for i, direction in enumerate(directions):
        for whole, one in zip(
            found, torch.autograd.grad(y, model.parameters(), direction, retain_graph=True), strict=True
        ):
            assert_near(whole[i], one)
    assert optimizer.curvature.layers


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_a_step_on_gradients_of_a_pass_inside_vmap_says_what_to_do(fisher: str) -> None:
    """One pass for all losses, as torchjd takes it unless it is told otherwise."""
    model = net()
    optimizer = KFACSGD(model, lr=0.1, fisher=fisher)
    told: Any = pytest.raises(RuntimeError, match="parallel_chunk_size=1")
    with told if fisher == "categorical" else pytest.warns(UserWarning, match="parallel_chunk_size=1"):
        for _ in range(6):
            losses = F.cross_entropy(model(torch.randn(6, 3)), torch.arange(6) % 2, reduction="none").view(2, 3).mean(1)
            gradients = functools.partial(torch.autograd.grad, losses, list(model.parameters()), retain_graph=True)
            for parameter, found in zip(model.parameters(), torch.vmap(gradients)(torch.eye(2)), strict=True):
                parameter.grad = found.mean(0)
            optimizer.step()


# Models that hand their output over in another way -------------------------------------------------------------------


class Teller(nn.Module):
    """Returns its output, keeps it, calls the backward pass itself, or is left by an exception."""

    class Left(Exception):
        """Carries the output away."""

    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body, self.how = body, how

    def forward(self, x: Tensor, y: Tensor) -> Any:
        output = self.body(x)
        if self.how == "returns":
            return output
        if self.how == "raises":
            raise self.Left(output)
        if self.how == "keeps":
            self.output = output
            return None
        F.cross_entropy(output, y).backward()
        return None if self.how == "steps" else 0.0


@pytest.mark.parametrize("average", ["batch", 6, None])
@pytest.mark.parametrize("how", ["raises", "keeps", "goes back", "steps"])
def test_a_model_that_returns_no_output_is_seen(how: str, average: Any) -> None:
    teller, twin = Teller(net(), how), Teller(net(), "returns")
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    optimizers = [KFACSGD(m, **(OPTIONS | {"loss_average": average})) for m in (teller, twin)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        try:
            teller(x, y)
            if how == "keeps":
                F.cross_entropy(teller.output, y).backward()
        except Teller.Left as left:
            F.cross_entropy(left.args[0], y).backward()
        F.cross_entropy(twin(x, y), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_same_factors(*optimizers)


class Field(nn.Module):
    """A vector field, whose first input is the time."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, time: Any, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("returns", ["output", "loss"])
@pytest.mark.parametrize("average", ["batch", "batch+sequence", "elements"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["real", "whole", "nested"])
def test_a_number_that_comes_first_is_not_counted(kind: str, average: Any, returns: str) -> None:
    """Nor is what has no shape."""
    time = {"real": torch.tensor(0.5), "whole": torch.tensor(3)}.get(kind)
    if time is None:
        time = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)])
    field, twin = Field(net()), Field(net())
    if returns == "loss":
        for model in (field, twin):
            model.body = nn.Sequential(model.body, Mean())
    x = torch.randn(6, 3)
    optimizers = [KFACSGD(model, **(OPTIONS | {"loss_average": average})) for model in (field, twin)]
    for model, optimizer, first in zip((field, twin), optimizers, (time, None), strict=True):
        model(first, x).square().mean().backward()
        optimizer.step()
    assert_same_factors(*optimizers)


class Mean(nn.Module):
    """A model's own loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Adjoint(torch.autograd.Function):
    """Computes a layer again in its backward pass, by a pass of its own that returns the gradients of its weights."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
            return None, *torch.autograd.grad(y, (x, *ctx.layer.parameters()), g)


class Computed(nn.Module):
    """Three layers, the second of which is computed again in the backward pass if ``adjoint``."""

    def __init__(self, adjoint: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.adjoint = adjoint

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = Adjoint.apply(self.inner, x, *self.inner.parameters()) if self.adjoint else self.inner(x)
        return self.last(x)


def step_each(models: Sequence[nn.Module], optimizers: Sequence[KFACSGD], step: int) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def test_a_pass_inside_another_takes_no_statistics_away() -> None:
    """Those of layers whose gradients it returns to the outer pass count, too."""
    models = [Computed(adjoint) for adjoint in (True, False)]
    optimizers = [KFACSGD(model, **OPTIONS) for model in models]
    for step in range(3):
        step_each(models, optimizers, step)
        assert_same_factors(*optimizers)


def test_a_sampled_fisher_passes_what_is_computed_in_a_pass_inside_another() -> None:
    """Such a layer trains by the base rule, with a warning; the others are preconditioned as without it."""
    models = [Computed(adjoint) for adjoint in (True, False)]
    options = OPTIONS | {"fisher": "categorical"}
    optimizers = [KFACSGD(models[0], **options), KFACSGD(models[1], **options, skip_layers=["inner"])]
    with pytest.warns(UserWarning, match="'inner': .* never seen"):
        for step in range(4):
            step_each(models, optimizers, step)
    assert_same_weights(*models)


@pytest.mark.filterwarnings("ignore:K-FAC preconditions none")
def test_steps_inside_the_backward_pass_know_of_the_passes_before() -> None:
    """An optimizer for each parameter; the pass that a step is taken in has not ended, and counts in the next step."""
    runs: list[dict[nn.Parameter, KFACSGD]] = []
    for inside in (True, False):
        model = net()
        optimizers = {p: KFACSGD([p], model=model, **(OPTIONS | {"lr": 0.0})) for p in model.parameters()}

        def step(p: nn.Parameter, optimizers: dict[nn.Parameter, KFACSGD] = optimizers) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters() if inside else ():
            p.register_post_accumulate_grad_hook(step)
        for seed in range(4 if inside else 3):
            loss_of(model, seed).backward()
            for p in () if inside else model.parameters():
                step(p)
        runs.append(optimizers)
    for own, expected in zip(*(run.values() for run in runs), strict=True):
        assert_same_factors(own, expected)


@pytest.mark.filterwarnings("ignore:K-FAC preconditions none")
def test_steps_inside_the_backward_pass_are_told_what_they_need() -> None:
    """With longer intervals, what collects statistics is the pass after the one whose statistics a step takes."""
    model = net()
    optimizers = {p: KFACSGD([p], model=model, lr=0.01, factor_update_steps=2) for p in model.parameters()}

    def step(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    with pytest.warns(UserWarning, match=r"inside the backward pass need factor_update_steps=1"):
        for seed in range(30):
            loss_of(model, seed).backward()
