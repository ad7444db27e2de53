"""Weights that are used more than once in a step, and modules that are not used at all in one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, Graft, KFACAdamW
from tests.helpers.compare import (
    assert_near,
    assert_same_factors,
    assert_same_weights,
    factors_of,
    snapshot,
)
from tests.helpers.reference import Oracle, assert_steps_as, averaged, cross_entropy, log_cosh, take_step
from tests.helpers.settings import OFTEN, OPTIONS

pytestmark = pytest.mark.usefixtures("float64")

DAMPING, EXACTLY = 0.1, 1e-14  # the last: the same operations in the same order
loss = averaged(log_cosh, "batch")


class Shared(nn.Module):
    """Two Linears with one weight, with or without one bias, or with one bias alone."""

    def __init__(self, bias: str = "shared") -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=bias != "none") for _ in range(2))
        if bias != "alone":
            self.second.weight = self.first.weight
        if bias in ("shared", "alone"):
            self.second.bias = self.first.bias
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Branches(nn.Module):
    """Either branch, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, which: str) -> Tensor:
        x = torch.tanh(self.stem(x))
        return sum(getattr(self, name)(x) for name in which.split("+"))


class Language(nn.Module):
    """Embedding and output head on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def test_pooled_layers_are_named_in_the_table() -> None:
    table = print_of(KFACSGD(Shared(), **OPTIONS))
    assert "shared by 2 modules" in table["first"]
    assert "second" not in table


def print_of(optimizer: KFACSGD) -> dict[str, str]:
    """The rows of the coverage table by their first column."""
    return {line.split()[0]: line for line in str(optimizer.curvature).splitlines() if line.split()}


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdamW, KFACLAMB])
def test_weights_in_one_place_of_memory_train_by_the_base_rule(cls: type[torch.optim.Optimizer]) -> None:
    """Parameters of their own, as many autoencoders tie them. A turn away from the steps of both was taken twice."""

    def weights(**more: object) -> tuple[nn.Module, dict[str, str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        model[2].weight.data = model[0].weight.data.T
        optimizer = cls(model, lr=0.1, scaling=Graft(trust=1.0), **OFTEN, **more)
        for _ in range(4):
            take_step(model, optimizer, [((torch.randn(8, 6),), torch.randn(8, 2))], loss)
        return model, print_of(optimizer)

    model, rows = weights()
    for name, other in (("0", "2"), ("2", "0")):
        assert f"lies in the memory of {other}.weight, too" in rows[f"{name}.weight"]
    assert_same_weights(weights(skip_layers=["^0$", "^2$"])[0], model, rel=0)


@pytest.mark.parametrize(
    ("factory", "declined", "reason"),
    [
        (lambda: Shared("different"), ("first.weight", "first.bias", "second.bias"), "whose biases differ"),
        (lambda: Shared("alone"), ("first.weight", "first.bias", "second.weight"), "bias shared by first and second"),
        (Language, ("embed.weight",), "weight shared by embed"),
    ],
    ids=["different biases", "a bias alone", "embedding and head"],
)
def test_declined_sharing_trains_by_the_base_rule(
    factory: Callable[[], nn.Module], declined: tuple[str, ...], reason: str
) -> None:
    """The declined parameters move exactly as SGD with momentum and weight decay moves them."""
    model = factory()
    options = OPTIONS | {"momentum": 0.9, "weight_decay": 0.01}
    optimizer = KFACSGD(model, **options)
    table = print_of(optimizer)
    for name in declined:
        assert reason in table[name] and "base" in table[name]
    own = dict(model.named_parameters())
    plain = [nn.Parameter(own[name].detach().clone()) for name in declined]
    sgd = torch.optim.SGD(plain, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(4):
        x = torch.randint(6, (3, 5)) if factory is Language else torch.randn(5, 4)
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        for p, name in zip(plain, declined, strict=True):
            p.grad = own[name].grad.clone()
        optimizer.step()
        sgd.step()
        for p, name in zip(plain, declined, strict=True):
            assert_near(own[name].detach(), p.detach(), name, EXACTLY)
    assert sorted(layer.name for layer in optimizer.curvature.layers) == (["mix"] if factory is Language else ["head"])


class OwnHead(nn.Module):
    """A layer type that has no rule."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return 2 * (x @ self.weight.mT)


@pytest.mark.parametrize("first", ["embed", "head"])
@pytest.mark.parametrize("unruled", [True, False])
def test_a_weight_with_a_use_that_no_rule_covers_is_declined(first: str, unruled: bool) -> None:
    """Whichever of the two comes first: the factors of one use would be taken for those of both."""
    embed = nn.Embedding(7, 4)
    head = OwnHead(embed.weight) if unruled else nn.Linear(4, 7)
    head.weight = embed.weight
    parts = {"embed": embed, "head": head}
    model = nn.ModuleDict({name: parts[name] for name in sorted(parts, key=lambda name: name != first)})
    optimizer = KFACSGD(model, lr=0.1, skip_layers=() if unruled else ("head",))
    assert not optimizer.curvature.layers
    reason = optimizer.curvature.stages.trained.uncovered[embed.weight][1]
    assert (
        re.search(r"no Kronecker rule for \S*test_weight_tying\.OwnHead", reason)
        if unruled
        else "skip_layers" in reason
    )


class Named(nn.Module):
    """A layer with the weight of the layer inside it as an attribute; ``how`` it computes."""

    def __init__(self, how: str = "inside") -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 2), how
        self.weight, self.bias = self.linear.weight, self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        own = 2 * (x @ self.weight.mT) if self.how != "inside" else 0.0
        return own + self.linear(x) if self.how != "own" else own


def test_a_weight_that_is_named_by_the_module_around_its_layer_is_covered() -> None:
    model = Named()
    found: list[Tensor] = []
    for module in (model, copy.deepcopy(model.linear)):
        optimizer = KFACSGD(module, **(OPTIONS | {"lr": 1.0, "damping": DAMPING}))
        assert len(optimizer.curvature.layers) == 1 and not optimizer.curvature.stages.trained.uncovered
        take_step(module, optimizer, [((torch.eye(6)[:, :4],), torch.ones(6, 2))], loss)
        found.append(module.weight)
    assert_near(*found, rel=EXACTLY)


@pytest.mark.parametrize(("how", "text"), [("own", "never seen"), ("both", "beside")])
def test_a_use_of_the_named_weight_itself_is_told(how: str, text: str) -> None:
    model = Named(how)
    optimizer = KFACSGD(model, **(OPTIONS | {"lr": 0.01}))
    with pytest.warns(UserWarning, match=text):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
    assert text in str(optimizer.curvature)


class Listed(nn.Module):
    """Two layers whose weights are in lists beside them, for a penalty say, and a parameter that only a list has."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        layers, lone = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 2)]), nn.Parameter(torch.ones(2))
        lists = [nn.ParameterList([layers[0].weight, layers[0].bias, lone]), nn.ParameterDict({"w": layers[1].weight})]
        for name, part in enumerate([*lists, layers] if first else [layers, *lists]):
            self.add_module(f"part{name}", part)
        self.layers, self.lone = [*layers], [lone]

    def forward(self, x: Tensor) -> Tensor:
        return self.lone[0] * self.layers[1](torch.tanh(self.layers[0](x)))


@pytest.mark.parametrize("given", ["model", "parameters"])
@pytest.mark.parametrize("first", [True, False])
def test_layers_whose_parameters_are_in_a_list_too_are_covered(first: bool, given: str) -> None:
    model, plain = Listed(first=first), Listed(first=first)
    plain.load_state_dict(model.state_dict())
    listed = nn.ParameterList(model.parameters())  # which is alive meanwhile
    sources = {"model": model, "parameters": listed.parameters()}
    part = "part2" if first else "part0"
    optimizer = KFACSGD(sources[given], lr=0.1, **OFTEN)
    assert [layer.name for layer in optimizer.curvature.layers] == [f"{part}.0", f"{part}.1"]
    ((_, reason),) = optimizer.curvature.stages.trained.uncovered.values()
    assert "in a ParameterList" in reason
    alone = KFACSGD(nn.ModuleDict({part: nn.ModuleList(plain.layers)}), lr=0.1, **OFTEN)
    x = torch.randn(6, 4)
    for each, trained in ((model, optimizer), (plain, alone)):
        each(x).square().mean().backward()
        trained.step()
    assert_same_factors(optimizer, alone)


def test_a_module_keeps_its_own_parameter_that_it_also_lists() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.PReLU())
    model[1].listed = nn.ParameterList([model[1].weight])
    ((name, reason),) = KFACSGD(model, lr=0.1).curvature.stages.trained.uncovered.values()
    assert (name, reason) == ("1.weight", "no Kronecker rule for PReLU")


def test_skip_layers_may_name_the_module_around_a_layer() -> None:
    model = nn.Sequential(Named())
    assert not KFACSGD(model, lr=0.1, skip_layers=["^0$"]).curvature.layers


def test_the_layers_beside_a_declined_weight_keep_their_block() -> None:
    model, twin = Language(), Language()
    optimizer = KFACSGD(model, **(OPTIONS | {"lr": 1.0, "damping": DAMPING}))
    oracle = Oracle(twin)
    oracle.layers = [layer for layer in oracle.layers if layer.name == "mix"]
    entropy = averaged(cross_entropy, "batch")
    passes = [((torch.randint(6, (3, 5)),), torch.randn(3, 5, 6))]
    assert_steps_as(oracle, model, optimizer, passes, entropy, DAMPING)


class Chosen(nn.Module):
    """The branch as part of the input, for the oracle: 0 left, 1 right, 2 both."""

    def __init__(self, branches: Branches) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        return self.branches(x, ("left", "right", "left+right")[int(which)])


def test_layers_called_in_some_steps_keep_their_statistics() -> None:
    """A layer that was not used decays neither sum and does not move; one used now and then equals the dense rule."""
    model, twin = Chosen(Branches()), Chosen(Branches())
    optimizer = KFACSGD(model, **(OPTIONS | {"lr": 1.0, "damping": DAMPING, "factor_decay": 0.5}))
    oracle = Oracle(twin, decay=0.5)
    unused = {0: "branches.right", 1: "branches.left"}
    for which in (2, 0, 0, 1, 2, 1, 0):
        passes = [((torch.randn(5, 4), torch.tensor(which)), torch.randn(5, 2))]
        kept = factors_of(optimizer) if optimizer.curvature.step_count else {}
        step = oracle.observe(passes, loss, snapshot(model))
        used = [layer for layer in oracle.layers if layer.name != unused.get(which)]
        oracle.refresh(step)
        changes = take_step(model, optimizer, passes, loss)
        directions = oracle.directions(step.gradients, DAMPING)
        for layer in used:
            assert_near(layer.of(changes), -directions[layer.name], layer.name)
        if which in unused:
            name = unused[which]
            assert torch.equal(changes[f"{name}.weight"], torch.zeros(2, 4))
            for side in "AG":
                assert torch.equal(factors_of(optimizer)[f"{name}.{side}"], kept[f"{name}.{side}"])


def test_micro_batches_that_use_different_layers() -> None:
    """Each A is normalised by the rows its layer saw."""
    model = Branches()
    optimizer = KFACSGD(model, **OPTIONS)
    data = [(torch.randn(n, 4), torch.randn(n, 2)) for n in (3, 5)]
    expected = {}
    for (x, y), which in zip(data, ("left", "right"), strict=True):
        (loss(model(x, which), y) / 2).backward()
        rows = torch.cat([torch.tanh(model.stem(x)).detach(), torch.ones(len(x), 1)], 1)
        expected[f"{which}.A"] = rows.T @ rows / len(x)
    optimizer.step()
    for name, factor in expected.items():
        assert_near(factors_of(optimizer)[name][0], factor, name)


def test_a_module_that_is_never_called_is_only_a_row_of_the_table() -> None:
    model = Branches()
    plain = copy.deepcopy(model)
    optimizer, other = KFACSGD(model, **OPTIONS), KFACSGD(plain, skip_layers=("right",), **OPTIONS)
    for _ in range(2):
        x, y = torch.randn(5, 4), torch.randn(5, 2)
        for m, o in ((model, optimizer), (plain, other)):
            o.zero_grad()
            loss(m(x, "left"), y).backward()
            o.step()
    assert_same_weights(model, plain)
    assert "by the base rule until" in print_of(optimizer)["right"]
    assert optimizer.curvature.report()["failed_decompositions"] == 0


NO_EXAMPLES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(4, 4), (4,)),
    "Linear on tokens": (lambda: nn.Linear(4, 4), (3, 4)),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1), (4, 3, 3)),
    "Conv2d with stride": (lambda: nn.Conv2d(4, 4, 2, stride=2), (4, 4, 4)),
    "depthwise Conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 3, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 4, 2, stride=2), (4, 2, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (4,)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 2, 2)),
    "BatchNorm2d in eval mode": (lambda: nn.BatchNorm2d(4).eval(), (4, 2, 2)),
    "attention": (lambda: Attended(), (3, 4)),
}


class Attended(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Routed(nn.Module):
    """Sends the first examples through an expert, and adds up what it says."""

    def __init__(self, expert: nn.Module, call_always: bool) -> None:
        super().__init__()
        self.stem, self.expert, self.call_always = nn.Linear(4, 4), expert, call_always

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        y = self.stem(x.movedim(1, -1)).movedim(-1, 1) if x.dim() > 3 else self.stem(x)
        n = int(first)
        said = self.expert(y[:n]).sum() if n or self.call_always else 0.0
        return y + said


@pytest.mark.fast("expand")
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", NO_EXAMPLES.values(), ids=NO_EXAMPLES)
def test_a_call_on_no_examples_is_no_call(case: tuple[Callable[[], nn.Module], tuple[int, ...]], sharing: str) -> None:
    """An expert to which a router sends nothing: averages and weights are those of an expert that was left out."""
    make, shape = case
    expert = make()
    models = [Routed(copy.deepcopy(expert), call_always) for call_always in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [KFACSGD(m, weight_sharing=sharing, **(OPTIONS | {"factor_decay": 0.5})) for m in models]
    for first in (0, 2, 0, 3):
        x, y = torch.randn(4, *shape), torch.randn(4, *shape)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss(model(x, torch.tensor(first)), y).backward()
            optimizer.step()
        if first:
            assert_same_factors(*optimizers)
    assert_same_weights(*models)


@pytest.mark.parametrize("shared", ["two modules", "keys and values"])
def test_shared_projections_of_attention_train_by_the_base_rule(shared: str) -> None:
    """The calls of one module alone would be seen, and values have another part of the bias than keys."""
    own = shared == "keys and values"
    model = nn.ModuleList(nn.MultiheadAttention(4, 2, **({"kdim": 3, "vdim": 3} if own else {})) for _ in range(2))
    first, second = model
    if own:
        first.v_proj_weight = first.k_proj_weight
    else:
        second.in_proj_weight, second.in_proj_bias, second.out_proj = (
            first.in_proj_weight,
            first.in_proj_bias,
            first.out_proj,
        )
    optimizer = KFACSGD(model, **OPTIONS)
    reasons = dict(optimizer.curvature.stages.trained.uncovered.values())
    expected = (
        {"0.k_proj_weight", "0.q_proj_weight", "0.in_proj_bias"}
        if own
        else {"0.in_proj_weight", "0.in_proj_bias", "0.out_proj.weight", "0.out_proj.bias"}
    )
    assert set(reasons) == expected and all("weight shared by 0." in reason for reason in reasons.values())


def test_a_bias_of_a_declined_layer_declines_the_other_layer_that_has_it() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[1].weight, model[2].bias = model[0].weight, model[1].bias
    optimizer = KFACSGD(model, **OPTIONS)
    assert [layer.name for layer in optimizer.curvature.layers] == ["3"]
    reasons = dict(optimizer.curvature.stages.trained.uncovered.values())
    assert sorted(reasons) == ["0.bias", "0.weight", "1.bias", "2.weight"]
    assert all("weight shared by 0" in reason for reason in reasons.values())


@pytest.mark.parametrize("last", [False, True])
def test_a_bias_tells_why_its_layer_is_declined(last: bool) -> None:
    """Wherever the module without a rule stands that uses the layer's weight, too."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Bilinear(2, 2, 4)])
    model[1].weight = model[0].weight
    optimizer = KFACSGD(nn.ModuleList(reversed(model)) if last else model, **OPTIONS)
    reasons = dict(optimizer.curvature.stages.trained.uncovered.values())
    assert len(reasons) == 3
    assert all("no Kronecker rule for Bilinear" in reason for reason in reasons.values())
