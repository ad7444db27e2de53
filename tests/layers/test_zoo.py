"""The model zoo.

Every architecture family trains with each class, all of its Linear and convolution weights have
curvature or a listed reason, and every factor and direction equals what single examples give.

``python -m tests.layers.test_zoo`` prints what is covered as a table.
"""

from __future__ import annotations

import copy
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from kfac_optim import KFACLAMB, KFACSGD, CurvatureEngine, Graft, KFACAdam, OfMean, growing
from kfac_optim.layers import KroneckerLayer
from kfac_optim.optimizers import KFACMixin
from tests.helpers import reference
from tests.helpers.compare import REL_TOL, assert_near
from tests.helpers.recurrent import Unrolled
from tests.helpers.reference import NORMS, Curvature, Pair, gradient, is_norm, matrix, watched
from tests.helpers.settings import BASES, EXACT, FLOAT64, SOLVERS
from tests.helpers.zoo import FAMILIES, GAN, TRANSFORMERS, Batch, Experts, Family, discriminate, generate

os.environ["HF_HUB_OFFLINE"] = "1"  # models come from configurations

STEPS, BATCHES = 20, 2
FALL = 0.5  # of what the base optimizer's loss falls; 0.77 was the least of 63
BASE_RULE_TOL = 1e-5  # float32, 20 steps of the same rule; Lamb's norms are summed in another order

CLASSES: dict[type[KFACMixin], dict[str, float]] = {
    KFACSGD: {"lr": 0.05, "momentum": 0.9},
    KFACAdam: {"lr": 0.01},
    KFACLAMB: {"lr": 0.02},
}
ZOO = FAMILIES | TRANSFORMERS


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Family:
    """A family by its name."""
    if request.param in TRANSFORMERS:
        pytest.importorskip("transformers")
    return ZOO[request.param]


def batches(family: Family) -> list[Batch]:
    """The fixed set of data of a family."""
    generator = torch.Generator().manual_seed(0)
    return [family.batch(generator) for _ in range(BATCHES)]


def losses_of(model: nn.Module, family: Family, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """The usual loop; yields each loss before the step."""
    data = batches(family)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = family.loss(model, data[step % BATCHES])
        loss.backward()
        yield float(loss.detach())
        optimizer.step()


class PlainRule:
    """Copies of some parameters that the base class moves by the same gradients."""

    def __init__(self, cls: type[KFACMixin], parameters: Sequence[nn.Parameter]) -> None:
        self.copies = [(p, nn.Parameter(p.detach().clone())) for p in parameters]
        self.optimizer = BASES[cls]([own for _, own in self.copies], **CLASSES[cls]) if self.copies else None

    def step(self) -> None:
        """One step on the gradients that the originals have now."""
        for p, own in self.copies:
            own.grad = None if p.grad is None else p.grad.clone()
        if self.optimizer is not None:
            self.optimizer.step()


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.fast("^KFACSGD-(LSTM|GPT$|UNet)|^KFAC(Adam|LAMB)-Mixture")
@pytest.mark.parametrize("family", ZOO, indirect=True)
@pytest.mark.parametrize("cls", CLASSES)
def test_trains_like_the_base_optimizer_or_better(family: Family, cls: type[KFACMixin]) -> None:
    """Default options, but refreshes wait for nothing; what has no curvature moves exactly by the base rule."""
    model = family.make()
    twin = copy.deepcopy(model)
    optimizer = cls(family.part(model), **CLASSES[cls], inv_update_steps=growing(0.5, 10))
    base = BASES[cls](family.part(twin).parameters(), **CLASSES[cls])
    plain = PlainRule(cls, list(optimizer.curvature.stages.trained.uncovered))
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in losses_of(model, family, optimizer):
            losses.append(loss)
            plain.step()
    others = list(losses_of(twin, family, base))
    assert all(map(math.isfinite, losses))
    fall, base_fall = (sum(ls[:BATCHES]) - sum(ls[-BATCHES:]) for ls in (losses, others))
    assert fall > 0 and fall > FALL * base_fall, f"{losses}\n{others}"
    for (p, own), (name, _) in zip(plain.copies, optimizer.curvature.stages.trained.uncovered.values(), strict=True):
        assert_near(p.detach(), own.detach(), name, BASE_RULE_TOL)
    assert_everything_was_seen(optimizer)


def assert_everything_was_seen(optimizer: KFACMixin) -> None:
    """Every layer that trains has a decomposition, and its direction goes downhill."""
    report = optimizer.curvature.report()
    assert report["failed_decompositions"] == report["skipped_batches"] == report["skipped_steps"] == 0
    assert set(report["layers"]) == {layer.name for layer in optimizer.curvature.layers if layer.weight.requires_grad}
    for name, row in report["layers"].items():
        assert 0 < row["cosine"] < 1 + 1e-5, f"{name}: {row['cosine']}"


@pytest.mark.fast("^KFACSGD")
@pytest.mark.parametrize("cls", CLASSES)
def test_a_gan_of_two_optimizers_trains_and_the_players_leave_each_other_alone(cls: type[KFACMixin]) -> None:
    """Each player's steps lower its own loss, and are those it would take against opponents that nobody watches."""
    model = GAN()
    apart = copy.deepcopy(model)
    games = [
        {
            part: cls(getattr(own, part), **CLASSES[cls], scaling=Graft(trust=1.0))
            for part in ("discriminator", "generator")
        }
        for own in (model, apart)
    ]
    data = batches(FAMILIES["GAN, generator"])
    losses: dict[str, list[float]] = {"discriminator": [], "generator": []}
    gains = dict.fromkeys(losses, 0.0)
    for step in range(STEPS):
        batch = data[step % BATCHES]
        for part, loss_of in (("discriminator", discriminate), ("generator", generate)):
            alone = GAN()
            for name in losses:
                own = getattr(apart, name)
                setattr(alone, name, own if name == part else copy.deepcopy(own))
            for players, table in zip(games, (model, alone), strict=True):
                players[part].zero_grad()
                loss = loss_of(table, batch)
                loss.backward()
                players[part].step()
            losses[part].append(float(loss.detach()))
            with torch.no_grad():
                gains[part] += losses[part][-1] - float(loss_of(model, batch))
    for p, q in zip(model.parameters(), apart.parameters(), strict=True):
        assert_near(p.detach(), q.detach(), "weights", BASE_RULE_TOL)
    assert all(math.isfinite(loss) for course in losses.values() for loss in course)
    assert min(gains.values()) > 1, f"{gains}\n{losses}"
    assert sum(losses["discriminator"][-BATCHES:]) < FALL * sum(losses["discriminator"][:BATCHES])
    for player in games[0].values():
        assert_everything_was_seen(player)


# Coverage ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Linear and convolution weights of a family: how many there are, have curvature, and the reasons of the rest."""

    weights: dict[nn.Parameter, str]
    covered: set[nn.Parameter]
    rows: dict[str, str]  # what has no curvature, and why: the rows of the table

    def share(self, *, elements: bool, without: Sequence[nn.Parameter] = ()) -> float:
        """The part that has curvature, by number of weights or of their elements."""
        size = {p: p.numel() if elements else 1 for p in self.weights.keys() - set(without)}
        return sum(n for p, n in size.items() if p in self.covered) / sum(size.values())


def linear_weights(model: nn.Module) -> dict[nn.Parameter, str]:
    """The weights of Linear layers, convolutions, attention and LSTMs, and the name of the first module."""
    found: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            found |= {p: f"{name}.{own}" for own, p in module.named_parameters(recurse=False) if "weight" in own}
        elif isinstance(module, (nn.Linear, _ConvNd)) or reference.is_conv1d(module):
            found.setdefault(module.weight, name)
    return found


def counts(family: Family) -> Counts:
    """One step of training, and what then has curvature."""
    model = family.make()
    optimizer = KFACSGD(family.part(model), **CLASSES[KFACSGD])
    family.loss(model, batches(family)[0]).backward()
    optimizer.step()
    engine = optimizer.curvature
    parameters = set(family.part(model).parameters())
    covered = {p for layer in engine.layers for p in layer.parameters}
    assert covered | set(engine.stages.trained.uncovered) == parameters and not covered & set(
        engine.stages.trained.uncovered
    )
    seen = {layer.weight for layer in engine.layers if layer.name in engine.report()["layers"]}
    table = [line for line in str(engine).splitlines() if line]
    rows = {}
    for parameter, (name, reason) in engine.stages.trained.uncovered.items():
        assert parameter.requires_grad != reason.startswith("frozen"), f"{name}: {reason}"
        (row,) = (line for line in table if line.split()[0] == name)
        assert reason and row.endswith(reason) and row.split()[1] == "base", row
        rows[name] = reason
    return Counts(linear_weights(family.part(model)), seen, rows)


@pytest.mark.parametrize("family", ZOO, indirect=True)
def test_linear_and_convolution_weights_are_covered_except_for_listed_reasons(family: Family) -> None:
    found = counts(family)
    listed = {}
    for parameter, name in found.weights.items():
        pattern = next((p for p in family.declined if re.fullmatch(p, name)), None)
        assert (parameter in found.covered) == (pattern is None), name
        if pattern is not None:
            listed[parameter] = pattern
    assert set(listed.values()) == set(family.declined), "listed, but there is no such weight"
    for reason in family.declined.values():
        assert any(reason in row for row in found.rows.values())
    for elements in (False, True):
        assert found.share(elements=elements, without=list(listed)) >= 0.9


# Values --------------------------------------------------------------------------------------------------------------

FLOAT32_TOL = 1e-6
DAMPING = 0.1  # relative: neither hides the curvature nor leaves it alone, whatever a layer's scale
VALUES: dict[str, object] = FLOAT64 | {
    "solver": SOLVERS["eigen"],
    "damping": OfMean(DAMPING),
    "scaling": None,
    "factor_update_steps": 1,
    "inv_update_steps": 1,
    "spread": 0,
    "max_factor_dim": None,
}


class Projections(nn.Module):
    """``nn.MultiheadAttention`` as four Linear layers that can be watched."""

    batch_first, in_proj_bias = True, None  # what nn.TransformerEncoderLayer asks before it takes its short cut

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = attention.num_heads
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        for name, weight, bias in zip("qkv", weights, biases, strict=True):
            layer = nn.Linear(*weight.T.shape, dtype=weight.dtype)
            layer.load_state_dict({"weight": weight, "bias": bias})
            self.add_module(name, layer)
        self.out_proj = nn.Linear(*weight.shape, dtype=weight.dtype)
        self.out_proj.load_state_dict(attention.out_proj.state_dict())

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None, **_: object
    ) -> tuple[Tensor, None]:
        """Self-attention, from its equation."""
        layers = (self.q, self.k, self.v)
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, x in zip(layers, (query, key, value), strict=True)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if key_padding_mask is not None:
            scores = scores + key_padding_mask[:, None, None]
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None


def explicit(model: nn.Module) -> nn.Module:
    """A copy that nobody watches, with the layers of attention and of recurrent modules as modules."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, Projections(child))
            elif isinstance(child, nn.RNNBase):
                setattr(module, name, Unrolled(child))
    return twin


def parts_of(name: str, twin: nn.Module) -> list[reference.Layer]:
    """The layers of the explicit copy that a layer of the engine stands for: itself, or q, k and v."""
    host, _, last = name.rpartition(".")
    names = [f"{host}.{part}" for part in "qkv"] if last == "in_proj" else [name]
    weights = [twin.get_submodule(own).weight for own in names]
    return [
        reference.Layer(own, [m for m in twin.modules() if getattr(m, "weight", None) is weight])
        for own, weight in zip(names, weights, strict=True)
    ]


@dataclass
class Explicit:
    """Sums over runs: of ``a a^T`` and its rows, of ``g g^T``, of ``g a^T``; see ``reference.Sums``."""

    a: Tensor | float | None = 0.0
    rows: int = 0
    g: Tensor | float = 0.0
    v: Tensor | float = 0.0

    def add(self, sums: reference.Sums) -> None:
        """One more run."""
        self.a = None if sums.a is None else self.a + sums.a
        self.rows, self.g, self.v = self.rows + sums.rows, self.g + sums.g, self.v + sums.v


def observe(
    family: Family, twin: nn.Module, layers: Sequence[reference.Layer], runs: Sequence[Batch], examples: int
) -> dict[str, Explicit]:
    """Runs examples (one by one, or together), whose losses are parts of a mean over all of them."""
    result = {layer.name: Explicit() for layer in layers}
    modules = [module for layer in layers for module in layer.modules]
    for run in runs:
        with watched(modules) as uses:
            loss = family.loss(twin, run) * (len(run[0]) / examples)
        gradients = gradient(loss, [use.output for use in uses])
        for layer in layers:
            mine = [pair for pair in zip(uses, gradients, strict=True) if pair[0].module in layer.modules]
            if mine:
                result[layer.name].add(reference.layer_sums(layer, mine, "expand", 0))
    return result


def columns(layer: KroneckerLayer, module: nn.Module) -> Tensor:
    """Where the engine's columns of the canonical weight stand in the reference: transposed kernels are flipped."""
    numbers = torch.arange(layer.weight.numel()).view(layer.pairs, layer.d_out, -1)
    theirs = reference.weight_index(module)[0, 0]
    ours = layer.matrix_to_weight(numbers).flatten().argsort()[: len(theirs)]
    order = (ours[:, None] == theirs).nonzero()[:, 1]
    return order if layer.bias is None else F.pad(order, (0, 1), value=len(order))


def check_layer(engine: CurvatureEngine, layer: KroneckerLayer, parts: Sequence[tuple[nn.Module, Explicit]], terms: int,
                raw: dict[nn.Parameter, Tensor]) -> None:  # fmt: skip
    """Factors and direction of one layer of the engine; the direction stands in ``.grad``."""

    def stored(values: dict[nn.Parameter, Tensor]) -> Tensor:
        split = [values[p].chunk(len(parts)) for p in layer.parameters]
        whole = [matrix(module, *(*own, None)[:2]) for (module, _), *own in zip(parts, *split, strict=True)]
        return torch.cat(whole)

    # transformers' norm layers compute in float32 whatever the model's precision is.
    rel = REL_TOL if isinstance(parts[0][0], NORMS) or not is_norm(parts[0][0]) else FLOAT32_TOL
    v = torch.cat([seen.v for _, seen in parts])
    assert_near(v, stored(raw), f"{layer.name}: own rows against the gradient", rel, scale=0.0)
    g = terms * torch.cat([seen.g for _, seen in parts])
    if is_norm(parts[0][0]):
        a, curvature = torch.ones(len(g), 1, 1, dtype=g.dtype), Curvature(blocks=g)
    else:
        a = torch.cat([seen.a / seen.rows for _, seen in parts])
        curvature = Curvature(pairs=[Pair(*pair) for pair in zip(a, g, strict=True)])
        if len(parts) == 1:
            order = columns(layer, parts[0][0])
            a = a[:, order][:, :, order]
    for side, found, expected in zip("AG", engine.factors(layer), (a, g), strict=True):
        found = torch.diag_embed(found) if found.dim() == 2 else found
        assert_near(found, expected, f"{side} of {layer.name}", rel, scale=0.0)
    direction = stored({p: p.grad for p in layer.parameters})
    assert_near(direction, curvature.solve(v, DAMPING, True), f"direction of {layer.name}", rel, scale=0.0)


def check_values(family: Family, *, together: bool) -> None:
    """Every layer after one step; the examples one by one in eval mode, or all together in train mode."""
    model = family.make().double()
    batch, *_ = ([t.double() if t.is_floating_point() else t for t in batch] for batch in batches(family))
    with torch.no_grad():
        for p in model.parameters():  # norms start at one and zero, which hides mistakes
            p.add_(0.1 * p.abs().mean() * torch.randn_like(p))
        family.loss(model, batch)  # running statistics
    model.train(together)
    twin = explicit(model)
    examples = len(batch[0])
    engine = CurvatureEngine(family.part(model), loss_average=family.average, **VALUES)
    family.loss(model, batch).backward()
    raw = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    engine.precondition_(lr=1.0)

    layers = [layer for layer in engine.layers if layer.weight.requires_grad]
    parts = {layer: parts_of(layer.name, family.part(twin)) for layer in layers}
    alone = [tuple(t[n : n + 1] for t in batch) for n in range(examples)]
    seen: dict[str, Explicit] = {}
    for runs, once in (([batch] if together else alone, False), ([batch], True)):
        mine = [p for layer in layers for p in parts[layer] if bool(re.search(family.once, layer.name)) == once]
        if mine:
            seen |= observe(family, twin, mine, runs, examples)
    for layer in layers:
        check_layer(engine, layer, [(p.module, seen[p.name]) for p in parts[layer]], family.terms * examples,
                    raw)  # fmt: skip


@pytest.mark.fast("^(DenseNet|MobileNet|ConvNeXt|UNet|LSTM|GPT$|BERT$|T5$|Mixture|GAN, generator|GPT2)")
@pytest.mark.parametrize("family", ZOO, indirect=True)
def test_factors_and_directions_are_those_of_single_examples(family: Family) -> None:
    check_values(family, together=False)


@pytest.mark.parametrize("family", ["ResNet", "MobileNet", "GAN, generator"], indirect=True)
def test_factors_and_directions_under_batch_statistics(family: Family) -> None:
    """Where examples mix in the forward: each has the gradient that the loss of the batch has at its own rows."""
    assert any(isinstance(module, _BatchNorm) for module in family.part(family.make()).modules())
    check_values(family, together=True)


# Experts that see some of the tokens ---------------------------------------------------------------------------------


def tokens_for(experts: Sequence[int]) -> Tensor:
    """Two examples of tokens ``[2, n, 4]``, one after the other for each of the experts."""
    tokens = 0.3 * torch.randn(2, len(experts), 4, dtype=torch.float64)
    tokens[:, range(len(experts)), experts] += 5.0
    return tokens


@pytest.mark.parametrize(("average", "terms"), [("batch", 1), ("batch+sequence", 3)])
@pytest.mark.parametrize("call_all", [False, True], ids=["left out", "called on no rows"])
def test_the_curvature_of_an_expert_is_that_of_its_own_tokens(call_all: bool, average: str, terms: int) -> None:
    """What an expert has seen.

    A is the mean over its tokens, G is M times the sum over them with the M of the whole loss; a batch without a
    token for it adds nothing and lets nothing decay.
    """
    moe = Experts([nn.Linear(4, 4) for _ in range(3)], 4, chosen=1, call_all=call_all)
    model = nn.Sequential(moe, nn.Linear(4, 2)).double()
    moe.router.weight.data.copy_(5 * torch.eye(4)[:3])
    options = EXACT | {"lr": 0.01, "damping": DAMPING, "factor_decay": 0.5, "loss_average": average}
    optimizer = KFACSGD(model, **options)
    averages = [(reference.RunningAverage(0.5), reference.RunningAverage(0.5)) for _ in range(3)]
    for experts in ([0, 1, 2], [0, 1, 1], [2, 1, 2], [1, 1, 1], [0, 1, 2]):
        x = tokens_for(experts)
        m = terms * len(x)
        changes = [torch.zeros(4, 5, dtype=torch.float64) for _ in range(3)]
        for expert in set(experts):
            rows = x[:, [e == expert for e in experts]].reshape(-1, 4)
            a, g, v = own_moments(moe, model[1], expert, rows, m)
            mean_a, mean_g = averages[expert]
            mean_a.add(a, len(rows))
            mean_g.add(m * m * g, m)
            changes[expert] = -0.01 * reference.dense_solve(mean_a.mean, mean_g.mean, v, DAMPING)
        optimizer.zero_grad()
        (model(x).square().sum() / (2 * m)).backward()
        before = copy.deepcopy(moe.experts)
        optimizer.step()
        for i, (mean_a, mean_g) in enumerate(averages):
            found = optimizer.curvature.factors(f"0.experts.{i}")
            for side, factor, mean in zip("AG", found, (mean_a, mean_g), strict=True):
                assert_near(factor[0], mean.mean, f"{side} of expert {i}")
            old, new = (torch.cat([e.weight, e.bias[:, None]], 1).detach() for e in (before[i], moe.experts[i]))
            assert_near(new - old, changes[i], f"change of expert {i}")


def own_moments(moe: Experts, head: nn.Module, expert: int, rows: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """``sum a a^T``, ``sum g g^T`` and ``sum g a^T`` over the tokens of an expert, one by one."""
    a_sum, g_sum, v_sum = (torch.zeros(n, k, dtype=torch.float64) for n, k in ((5, 5), (4, 4), (4, 5)))
    for row in rows:
        gate = moe.router(row).softmax(-1)[expert].detach()
        output = moe.experts[expert](row).detach().requires_grad_()
        (g,) = torch.autograd.grad(head(gate * output).square().sum() / (2 * m), output)
        a = torch.cat([row, row.new_ones(1)])
        a_sum, g_sum, v_sum = a_sum + torch.outer(a, a), g_sum + torch.outer(g, g), v_sum + torch.outer(g, a)
    return a_sum, g_sum, v_sum


# The table -----------------------------------------------------------------------------------------------------------


def print_table() -> None:
    """What is covered, as reStructuredText."""
    print(".. list-table::\n   :header-rows: 1\n   :widths: 22 22 56\n")
    lines = [("family", "Linear and convolution weights, their elements", "by the base rule, and why")]
    for name, family in ZOO.items():
        torch.manual_seed(0)
        found = counts(family)
        share = f"{len(found.covered & set(found.weights))} of {len(found.weights)}, {found.share(elements=True):.0%}"
        reasons: dict[str, list[str]] = {}
        for row, reason in found.rows.items():
            reasons.setdefault(reason, []).append(row)
        whys = [f"``{rows[0]}``{', ...' * (len(rows) > 1)}: {why}" for why, rows in reasons.items()]
        lines.append((name, share, "; ".join(whys)))
    for cells in lines:
        print("\n".join(f"   {'  ' if i else '* '}- {cell}".rstrip() for i, cell in enumerate(cells)))


if __name__ == "__main__":
    print_table()
