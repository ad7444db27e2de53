"""Weights that a model uses beside their module's calls: half of their gradient, say, is not in the factors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kfac_optim import CurvatureEngine

TOKENS = torch.tensor([[1, 2, 3], [4, 0, 2]])


class Net(nn.Module):
    """Every kind of layer, all of which are called; ``use`` may use their weights besides."""

    def __init__(self, use: Callable[[Any, Tensor], Any] = lambda net, h: h, *, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.reentrant = use, reentrant
        self.tokens, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.plain, self.biased = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def body(self, h: Tensor) -> Tensor:
        h = F.relu(self.biased(self.plain(h)), inplace=True)
        h = self.plain(h) + self.conv(h.mT).mT  # called twice
        return h + self.attention(h, h, h)[0]

    def forward(self, tokens: Tensor) -> Any:
        h = self.norm(self.tokens(tokens))
        h = self.body(h) if self.reentrant is None else checkpoint(self.body, h, use_reentrant=self.reentrant)
        return self.use(self, h)


def first_of(output: Any) -> Tensor:
    """The tensor that the loss is made of."""
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, Tensor)
    return tensor


def named(net: Net, engine: CurvatureEngine, *, steps: int = 3, autocast: bool = False, penalty: float = 0.0) -> str:
    """Some steps; the layers that the one warning about them names, or an empty text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = first_of(net(TOKENS))
            (output.float().square().mean() + penalty * net.plain.weight.square().sum()).backward()
            engine.precondition_(lr=0.1)
    texts = [str(w.message) for w in caught if "uses the weight beside" in str(w.message)]
    assert len(texts) <= 1
    assert all("right for a penalty on the weight" in text for text in texts)
    return texts[0].partition(":")[0] if texts else ""


USES = {
    "head": (lambda net, h: h @ net.tokens.weight.T, "'tokens'"),
    "two": (lambda net, h: F.linear(F.linear(h, net.plain.weight), net.biased.weight), "'plain', 'biased'"),
    "filter": (lambda net, h: F.conv1d(h.mT, net.conv.weight).mT, "'conv'"),
    "scale": (lambda net, h: h * net.norm.weight, "'norm'"),
    "beside": (lambda net, h: (h, net.tokens.weight.norm()), "'tokens'"),
    "projection": (lambda net, h: h @ net.attention.in_proj_weight[:4], "'attention.in_proj'"),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("use", USES)
def test_uses_beside_calls_are_named_in_one_warning_and_in_the_table(use: str, autocast: bool) -> None:
    function, names = USES[use]
    net = Net(function)
    engine = CurvatureEngine(net, factor_update_steps=1)
    found = named(net, engine, autocast=autocast)
    assert found == names
    noted = [line.split()[0] for line in repr(engine).splitlines() if "used beside its calls" in line]
    assert noted == found.replace("'", "").split(", ")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_calls_alone_are_no_other_use(reentrant: bool | None, autocast: bool) -> None:
    """Not the second call of a module, nor a penalty in the loss."""
    net = Net(reentrant=reentrant)
    assert not named(net, CurvatureEngine(net, factor_update_steps=1), autocast=autocast, penalty=0.1)


@pytest.mark.parametrize("part", ["tokens", "conv"])
def test_a_part_that_was_called_by_itself_before_the_model_is_examined_in_the_model_too(part: str) -> None:
    """As where an encoder is trained by itself first."""
    net = Net(lambda net, h: h @ net.tokens.weight.T + h @ net.conv.weight.sum(2).T @ net.plain.weight[:, :1])
    net.alone = nn.Sequential(net.tokens, net.plain, net.biased)
    engine = CurvatureEngine(net, factor_update_steps=1)
    (net.alone(TOKENS) if part == "tokens" else net.conv(torch.randn(2, 4, 3))).square().mean().backward()
    engine.precondition_(lr=0.1)
    assert named(net, engine) == "'tokens', 'plain', 'conv'"


def test_a_use_within_a_checkpoint_is_seen_where_the_graph_shows_it() -> None:
    for reentrant, names in ((False, "'plain'"), (True, "")):
        net = Net(reentrant=reentrant)
        net.body = lambda h, net=net: F.linear(net.plain(h), net.plain.weight)  # type: ignore[method-assign, misc]
        assert named(net, CurvatureEngine(net, factor_update_steps=1)) == names


class Shared(nn.Module):
    """A layer that is called twice, on an input that no parameter has made: the second time it makes its own input."""

    def __init__(self, layer: nn.Module, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.between = layer, between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.between(self.layer(x)))
        return y


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("between", [lambda h: h, F.relu])
@pytest.mark.parametrize("layer", [nn.Linear, nn.Conv1d, nn.LayerNorm])
def test_a_layer_whose_input_comes_from_its_own_weight_alone(layer: Any, between: Any, autocast: bool) -> None:
    sizes = {nn.Linear: (4, 4), nn.Conv1d: (4, 4, 1), nn.LayerNorm: (4,)}[layer]
    model = Shared(layer(*sizes, bias=False), between)
    engine = CurvatureEngine(model, factor_update_steps=1)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        warnings.simplefilter("error")
        model(torch.randn(2, 4, 4))
    assert "used beside" not in repr(engine)


def test_a_call_on_nothing_is_no_other_use() -> None:
    """An expert may get no token in one of its calls."""
    net = Net(lambda net, h: h + net.plain(h[:0]).sum())
    assert not named(net, CurvatureEngine(net, factor_update_steps=1))


def test_derivatives_within_the_model_are_no_other_use() -> None:
    """Such as forces, which are those of an energy."""

    def forces(net: Net, h: Tensor) -> Tensor:
        x = torch.randn(3, 4, requires_grad=True)
        energy = net.biased(torch.sin(net.plain(x))).square().sum()
        return h.sum() + torch.autograd.grad(energy, x, create_graph=True)[0].square().sum()

    net = Net(forces)
    assert not named(net, CurvatureEngine(net, factor_update_steps=1))


class Invertible(torch.autograd.Function):
    """As in reversible networks: it runs layers on a graph of its own, and takes their weights for the outer one."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, net: Net, *weights: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inside = [h.detach().requires_grad_(), *weights]
            ctx.output = net.biased(net.plain(ctx.inside[0]))
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        h, *weights = torch.autograd.grad(ctx.output, ctx.inside, g)
        return h, None, *weights


def test_a_call_inside_a_function_of_the_users_is_no_other_use() -> None:
    net = Net(lambda net, h: Invertible.apply(h, net, net.plain.weight, net.biased.weight, net.biased.bias))
    net.body = lambda h: h  # type: ignore[method-assign]
    engine = CurvatureEngine(net, factor_update_steps=1)
    assert not named(net, engine)
    assert all(engine.factors(name)[1].any() for name in ("plain", "biased"))


def test_an_interrupted_call_leaves_no_graph_behind() -> None:
    def fail(net: Net, h: Tensor) -> Tensor:
        raise ArithmeticError

    net = Net(fail)
    engine = CurvatureEngine(net, factor_update_steps=1)
    with pytest.raises(ArithmeticError):
        net(TOKENS)
    assert not engine.stages.capture._uses._results, "the next call may never come"
    net.use = lambda net, h: h @ net.tokens.weight.T
    assert named(net, engine) == "'tokens'"
    net.use = USES["scale"][0]
    assert not named(net, engine), "each layer is looked at once"
