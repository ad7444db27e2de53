"""Other base classes and other parameters than those of the tutorials: sparse, half precision, closures, odd states."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch_optimizer
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KFACLAMB, KFACSGD, CurvatureEngine, KFACAdam, KFACAdamW, KFACMixin
from kfac_optim.bases import buckets_of, keep_averages, rules, take_apart
from kfac_optim.bases.parameters import Member
from kfac_optim.bases.rules import DecoupledRule, rule_of
from tests.helpers.compare import assert_identical, values
from tests.helpers.files import through_a_file
from tests.helpers.settings import OFTEN
from tests.helpers.training import assert_go_on_alike, make_model, resumed_from, train


class KFACAdafactor(KFACMixin, torch.optim.Adafactor):
    """Its state of a matrix is a row and a column."""


class KFACShampoo(KFACMixin, torch_optimizer.Shampoo):
    """Its state of a matrix are two square ones."""


class KFACSWATS(KFACMixin, torch_optimizer.SWATS):
    """Its state has vectors with one entry."""


class Projected(torch.optim.Optimizer):
    """Sums up rows of gradients, as GaLore keeps moments of projected ones; counts its steps beside the parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["total_steps"] = self.state.get("total_steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                state, g = self.state[p], p.grad.flatten(1).sum(1) if p.dim() > 1 else p.grad
                state.setdefault("exp_avg", torch.zeros_like(g)).lerp_(g, 0.1)
                state["compensation"] = None
                moment = state["exp_avg"] / (1 - 0.9 ** self.state["total_steps"])
                p.sub_(moment.sign().view(-1, *[1] * (p.dim() - 1)), alpha=group["lr"])


class KFACProjected(KFACMixin, Projected):
    """Its first moment of a matrix is a vector."""


class Decaying(torch.optim.Optimizer):
    """Adds weight decay to the gradients in their place, as many classes of others do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.update(p), alpha=group["lr"])

    def update(self, p: Any) -> Tensor:
        return p.grad.add_(p, alpha=0.5)


class KFACDecaying(KFACMixin, Decaying):
    """It keeps no first moment."""


class DecayingRMSprop(torch.optim.RMSprop):
    """Does so around torch's own step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p.detach(), alpha=0.5)
        super().step(closure)


class KFACDecayingRMSprop(KFACMixin, DecayingRMSprop):
    """Its step is not torch's."""


@pytest.mark.parametrize("kfac", [KFACDecaying, KFACDecayingRMSprop])
def test_gradients_are_averaged_as_they_were_before_the_base_class_wrote_into_them(kfac: Any) -> None:
    model = make_model().double()
    optimizer = kfac(model, **OFTEN)
    averages: dict[Any, Tensor] = {}
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4).double()).square().mean().backward()
        for p in model.parameters():
            averages[p] = 0.9 * averages.get(p, p.grad) + 0.1 * p.grad
        optimizer.step()
    kept = [p for p in model.parameters() if "kfac_moment" in optimizer.state[p]]
    assert kept
    for p in kept:
        torch.testing.assert_close(optimizer.state[p]["kfac_moment"], averages[p], rtol=1e-12, atol=1e-15)


# Sparse gradients ----------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A sparse embedding below a Linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).mean(1))


def tokens_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(20, (8, 5), generator=generator), torch.randint(3, (8,), generator=generator)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_embeddings_train_by_the_base_rule(momentum: float) -> None:
    torch.manual_seed(0)
    model = Words()
    twin = copy.deepcopy(model)
    optimizer = KFACSGD(model, lr=0.1, momentum=momentum, **OFTEN)
    plain = torch.optim.SGD(twin.embedding.parameters(), lr=0.1, momentum=momentum)
    assert [layer.name for layer in optimizer.curvature.layers] == ["head"]
    assert "sparse=True" in repr(optimizer.curvature)
    for step in range(6):
        tokens, classes = tokens_of(step)
        optimizer.zero_grad()
        plain.zero_grad()
        F.cross_entropy(model(tokens), classes).backward()
        twin.head.load_state_dict(model.head.state_dict())
        F.cross_entropy(twin(tokens), classes).backward()
        assert model.embedding.weight.grad is not None and model.embedding.weight.grad.is_sparse
        optimizer.step()
        plain.step()
        torch.testing.assert_close(model.embedding.weight, twin.embedding.weight)
    assert "head" in optimizer.curvature.report()["layers"]


def test_a_sparse_gradient_that_is_not_finite_skips_the_step() -> None:
    model = Words()
    optimizer = KFACSGD(model, lr=0.1, **OFTEN)
    before = values(model)
    tokens, classes = tokens_of(0)
    F.cross_entropy(model(tokens), classes).backward()
    assert model.embedding.weight.grad is not None
    model.embedding.weight.grad._values()[0, 0] = torch.nan
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert optimizer.curvature.report()["skipped_steps"] == 1


def test_an_engine_beside_an_optimizer_of_sparse_parameters() -> None:
    model = Words()
    engine = CurvatureEngine(model, **OFTEN, scaling=None)
    optimizers = [torch.optim.SparseAdam(model.embedding.parameters()), torch.optim.SGD(model.head.parameters(), 0.1)]
    for step in range(3):
        tokens, classes = tokens_of(step)
        model.zero_grad()
        F.cross_entropy(model(tokens), classes).backward()
        assert engine.precondition_()
        for optimizer in optimizers:
            optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# Half precision ------------------------------------------------------------------------------------------------------


def test_lamb_on_float16_weights_is_torch_optimizers() -> None:
    """1 / eps is infinite in float16."""
    models = [make_model().half() for _ in range(2)]
    ours = KFACLAMB(models[0], lr=0.01, weight_decay=1e-3, skip_layers=("",))
    theirs = torch_optimizer.Lamb(models[1].parameters(), lr=0.01, weight_decay=1e-3)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            p.grad = (torch.randn(p.shape, generator=generator) * (torch.arange(p.numel()).view(p.shape) % 2)).half()
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert bool(p.isfinite().all())
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-3)


# Closures ------------------------------------------------------------------------------------------------------------


class KFACRprop(KFACMixin, torch.optim.Rprop):
    """Whose steps are not of the length of the gradient, nor of its moments."""


class KFACLBFGS(KFACMixin, torch.optim.LBFGS):
    """A base class that cannot be."""


def test_a_base_class_that_needs_a_closure_is_refused_at_construction() -> None:
    model = make_model()
    with pytest.raises(TypeError, match="KFACRprop: .*diverges.*SGD or Adam"):
        KFACRprop(model, lr=0.01)
    with pytest.raises(TypeError, match="KFACLBFGS: .*needs a closure.*without a closure"):
        KFACLBFGS(model, lr=0.1)
    assert not any(module._forward_hooks for module in model.modules())


# States of other shapes ----------------------------------------------------------------------------------------------

ODD: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    KFACAdafactor: {"lr": 0.01},
    KFACShampoo: {"lr": 0.01, "momentum": 0.9},
    KFACSWATS: {"lr": 0.01},
    KFACProjected: {"lr": 0.001},
}


@pytest.fixture(autouse=True)
def _without_deprecation_warnings() -> Any:
    """torch_optimizer calls ``addcmul_`` and ``add_`` in their old forms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("kfac", ODD)
def test_a_base_class_whose_state_has_other_shapes_resumes(kfac: Any, stepped: bool) -> None:
    model, resumed = make_model(), make_model(1)
    optimizer, again = (kfac(m, **ODD[kfac], **OFTEN) for m in (model, resumed))
    train(model, optimizer, range(4))
    if stepped:
        train(resumed, again, range(10, 12))
    resumed_from(model, optimizer, (resumed, again))
    assert_go_on_alike(range(4, 8), (model, optimizer), (resumed, again))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kfac", [*ODD, KFACSGD])
@pytest.mark.parametrize("width", [7, 12])
def test_and_refuses_the_state_of_another_model(kfac: Any, plain: bool, width: int) -> None:
    """Also that of the plain base class, where no factor tells."""
    options = ODD.get(kfac, {"lr": 0.1, "momentum": 0.9})
    other = nn.Sequential(nn.Linear(4, width), nn.PReLU(), nn.LayerNorm(width), nn.Linear(width, 3))
    first = kfac.__mro__[2](other.parameters(), **options) if plain else kfac(other, **options, **OFTEN)
    train(other, first, range(2))
    optimizer = kfac(make_model(), **options, **OFTEN)
    with pytest.raises(ValueError, match="another model"):
        optimizer.load_state_dict(through_a_file(first.state_dict()))
    assert not optimizer.state


def test_a_parameter_that_was_cut_takes_the_state_of_one_of_its_size() -> None:
    """Its own is of the size that it had."""
    scale, cut = (nn.Parameter(torch.ones(size)) for size in (5, 3))
    optimizer, first = (KFACAdam([*make_model().parameters(), p], lr=0.01) for p in (scale, cut))
    for p, trained in ((scale, optimizer), (cut, first)):
        p.grad = torch.ones_like(p)
        trained.step()
    scale.data, scale.grad = scale.data[:3], None
    optimizer.load_state_dict(through_a_file(first.state_dict()))
    assert torch.equal(optimizer.state[scale]["exp_avg"], first.state[cut]["exp_avg"])


# Loading ------------------------------------------------------------------------------------------------------------


class Noisy(Decaying):
    """Adds noise to its steps, as Langevin dynamics do."""

    def update(self, p: Any) -> Tensor:
        return p.grad + 1e-3 * torch.randn_like(p)


class KFACNoisy(KFACMixin, Noisy):
    """Draws random numbers."""


class Delegating(torch.optim.Optimizer):
    """Holds the optimizer that takes its steps, and a list with their number, in a tuple."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.held = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9), [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        inner, count = self.held
        count[0] += 1
        inner.step()


class KFACDelegating(KFACMixin, Delegating):
    """What it holds is no copy."""


@pytest.mark.parametrize("kfac", [KFACNoisy, KFACDelegating])
def test_loading_a_state_trains_nothing(kfac: Any) -> None:
    model = make_model()
    optimizer = kfac(model, **OFTEN)
    train(model, optimizer, range(3))
    before, drawn = copy.deepcopy(model), torch.get_rng_state()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_identical(model, before)
    assert torch.equal(torch.get_rng_state(), drawn)
    if isinstance(optimizer, Delegating):
        assert optimizer.held[1] == [3]


# No learning rate ----------------------------------------------------------------------------------------------------


class Relative(torch.optim.Optimizer):
    """Knows no learning rate, or finds its own, as transformers' Adafactor does."""

    def __init__(self, params: Any, *, lr: float | None = None, named: bool = False) -> None:
        super().__init__(params, {"lr": lr} if named else {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.05 * p.grad / p.grad.norm() * p.norm())


class KFACRelative(KFACMixin, Relative):
    """Steps of the length of the weights."""


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", [{}, {"precondition": "gradient", "scaling": None}])
def test_a_base_without_a_learning_rate(named: bool, mode: dict[str, Any]) -> None:
    model = make_model()
    twin = copy.deepcopy(model)
    optimizer = KFACRelative(model, named=named, **mode, **OFTEN)
    turned = False
    for step in range(12):
        train(model, optimizer, [step])
        turned |= any("kfac_turn" in state for state in optimizer.state.values())
    assert turned != bool(mode)
    train(twin, Relative(twin.parameters()), range(12))
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


class Renamed(torch.optim.AdamW):
    """AdamW that calls its first moment by another name."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for state in self.state.values():
            state["exp_avg"] = state.pop("m")
        super().step(closure)
        for state in self.state.values():
            state["m"] = state.pop("exp_avg")


class KFACRenamed(KFACMixin, Renamed):
    """Has a rule that knows the name."""


class RenamedRule(DecoupledRule):
    moment_key = "m"


def test_a_rule_tells_the_name_of_the_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_RULES", [(Renamed, RenamedRule), *rules._RULES])
    models = [make_model(), make_model()]
    for model, kfac in zip(models, (KFACRenamed, KFACAdamW), strict=True):
        optimizer = kfac(model, lr=0.3, weight_decay=0.1)
        train(model, optimizer, range(30))
        assert optimizer.curvature.trust > 0.6, "further than it rises where updates grow with the gradient"
    assert_identical(*models)


def moments_after_three_steps(kfac: Any, **how: Any) -> list[tuple[Member, Tensor]]:
    """The parameters of a small net, and what is preconditioned of each."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = kfac(model, lr=0.001, **how)
    train(model, optimizer, range(3), shape=(8, 6))
    (bucket,) = buckets_of(optimizer)
    return list(zip(bucket, bucket[0].rule.moments(bucket, [m.gradient for m in bucket]), strict=True))


def test_a_moment_that_a_subclass_of_adam_projects_does_not_count() -> None:
    adam = torch.optim.AdamW([weight := nn.Parameter(torch.ones(3, 4))])
    rule, (group,) = rule_of(adam), adam.param_groups
    assert rule.keeps_moment(weight, group, {"exp_avg": torch.zeros(3, 4)})
    assert not rule.keeps_moment(weight, group, {"exp_avg": torch.zeros(3)})


class KFACAdamP(KFACMixin, torch_optimizer.AdamP):
    """Its ``nesterov`` is no matter of a momentum in its groups."""


class KFACSGDP(KFACMixin, torch_optimizer.SGDP):
    """It has a momentum, but not that of SGD: averages are kept for it."""


@pytest.mark.parametrize("kfac", [KFACAdamP, KFACSGDP, KFACProjected])
def test_what_a_base_of_others_calls_its_moment_or_nesterov_is_its_own_matter(kfac: Any) -> None:
    """Averages are kept for it, since its moments may be of gradients that it has divided, multiplied or projected."""
    how: dict[str, Any] = {} if kfac is KFACProjected else {"nesterov": True}
    for m, moment in moments_after_three_steps(kfac, **how, **({"momentum": 0.9} if kfac is KFACSGDP else {})):
        assert moment is m.state["kfac_moment"]


def test_changes_of_a_base_of_others_are_repeated_where_it_steps_on_a_moment() -> None:
    """Then its updates differ little from step to step."""
    for kfac, repeats in ((KFACAdamP, True), (KFACSGDP, False)):
        model = make_model()
        optimizer = kfac(model, lr=0.01, **OFTEN)
        optimizer.curvature.stages.steering.trust.notches = 5
        train(model, optimizer, range(3))
        assert any("kfac_change" in state for state in optimizer.state.values()) == repeats


COUPLED: list[tuple[Any, dict[str, bool]]] = [
    (base, how)
    for base in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
    for how in ({}, {"maximize": True}, {"decoupled_weight_decay": True})
    if how.keys() <= inspect.signature(base).parameters.keys()  # not all versions of torch know the last one
]


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1)])
def test_whether_gradients_are_averaged_is_known_before_sgd_has_a_buffer(momentum: float, decay: float) -> None:
    """A state that is saved then has room for an average only if there will be one."""
    weight = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=momentum, weight_decay=decay)
    (group,) = sgd.param_groups
    assert rule_of(sgd).needs_average(weight, group, {}) == (not momentum or decay > 0)


@pytest.mark.parametrize(("base", "how"), COUPLED)
def test_averages_have_nothing_of_the_decay_that_a_base_adds_to_the_gradient(base: Any, how: dict[str, bool]) -> None:
    """The base's own, which has it, stays as it is under the base class alone."""
    kfac: Any = type(f"KFAC{base.__name__}", (KFACMixin, base), {})
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = kfac(model, lr=0.01, weight_decay=0.5, betas=(0.8, 0.9), **how)
    raw = {p: torch.zeros_like(p) for p in model.parameters()}
    own = {p: torch.zeros_like(p) for p in model.parameters()}
    sign, coupled = -1 if "maximize" in how else 1, "decoupled_weight_decay" not in how
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 6, dtype=torch.float64)).square().mean().backward()
        for p in model.parameters():
            raw[p] = 0.8 * raw[p] + 0.2 * p.grad
            own[p] = 0.8 * own[p] + 0.2 * (sign * p.grad + coupled * 0.5 * p.detach())
        optimizer.step()
        (bucket,) = buckets_of(optimizer)
        moments = bucket[0].rule.moments(bucket, [sign * m.gradient for m in bucket])
        for m, moment in zip(bucket, moments, strict=True):
            torch.testing.assert_close(moment, sign * raw[m.p], rtol=1e-12, atol=1e-15)
            torch.testing.assert_close(m.state["exp_avg"], own[m.p], rtol=1e-12, atol=1e-15)
            assert ("kfac_moment" in m.state) == coupled


@pytest.mark.parametrize(("base", "how"), COUPLED)
def test_updates_have_nothing_of_the_decay_that_a_base_adds_to_the_gradient(base: Any, how: dict[str, bool]) -> None:
    """They are the moment's share of the base's; NAdam's, of the gradient too, are known where that is 0."""
    kfac: Any = type(f"KFAC{base.__name__}", (KFACMixin, base), {})
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = kfac(model, lr=0.01, weight_decay=0.5, betas=(0.8, 0.9), **how)
    for _ in range(8):  # RAdam's first steps are of another length
        optimizer.zero_grad()
        (model(torch.randn(8, 6).double()).square().mean() * (base is not torch.optim.NAdam)).backward()
        (bucket,) = buckets_of(optimizer)
        weights = bucket[0].rule.weights_before(bucket)
        with torch.no_grad():
            optimizer._base_step()
            for m in bucket:
                m.take_state()
            keep_averages([bucket], stand_in=False)
            moments, updates = take_apart([bucket], [[weight.clone() for weight in weights]])
        for m, weight in zip(bucket, weights, strict=True):
            share = 1.0 if "decoupled_weight_decay" in how else moments[m.p] / m.state["exp_avg"]
            expected = share * (weight - m.p.detach()) / 0.01
            torch.testing.assert_close(updates[m.p], expected, rtol=1e-8, atol=1e-10)
