"""Read-only views: the coverage table, the report, stage times, and memory as estimated and as held."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import kfac_optim
from kfac_optim import KAISA, KFACSGD, CurvatureEngine, KFACAdam
from kfac_optim.diagnostics import human_bytes
from kfac_optim.distributed import LocalCommunicator
from tests.helpers.bases import KFACRMSprop
from tests.helpers.compare import values
from tests.helpers.memory import reachable_bytes
from tests.helpers.settings import FLOAT64
from tests.helpers.training import make_model, train

pytestmark = pytest.mark.usefixtures("float64")

TOL = 1e-9  # eigenvalues of well-conditioned float64 matrices by another route
WITHIN = 0.05  # the issue's promise for memory estimates
EVERY_STEP: dict[str, Any] = {**FLOAT64, "factor_update_steps": 1, "inv_update_steps": 1}


class Zoo(nn.Module):
    """Three rules, a large factor, a shared weight, an unsupported module and a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 4)
        self.conv = nn.Conv1d(4, 6, 3, groups=2)
        self.norm = nn.LayerNorm(6)
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 5, bias=False)
        self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.second.weight
        self.bilinear = nn.Bilinear(5, 5, 3)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.conv(self.embedding(tokens).mT).mT
        hidden = torch.tanh(self.first(self.norm(hidden))).mean(1)
        hidden = torch.tanh(self.again(torch.tanh(self.second(hidden))))
        return self.bilinear(hidden, hidden) * self.temperature


def step_zoo(model: Zoo, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randint(11, (8, 7))).square().mean().backward()
        optimizer.step()


def rows_of(text: str) -> dict[str, str]:
    """The lines between the second and the third rule of the table, by layer."""
    lines = text.splitlines()
    rules = [i for i, line in enumerate(lines) if set(line) == {"-"}]
    return {line.split()[0]: line for line in lines[rules[1] + 1 : rules[2]]}


# The table -----------------------------------------------------------------------------------------------------------


def test_one_row_per_layer_and_per_uncovered_parameter() -> None:
    model = Zoo()
    text = str(KFACSGD(model, lr=0.1, max_factor_dim=10, skip_layers=["first"]).curvature)
    rows = rows_of(text)
    uncovered = {"bilinear.weight", "bilinear.bias", "temperature", "first.weight", "first.bias"}
    assert set(rows) == {"embedding", "conv", "norm", "second"} | uncovered
    assert "4 layers preconditioned, 5 parameters by the base rule" in text.splitlines()[-1]
    for name in uncovered:
        assert re.search(r"\bbase\b", rows[name]), rows[name]


def test_rules_factor_sizes_and_reasons() -> None:
    rows = rows_of(str(KFACSGD(Zoo(), lr=0.1, max_factor_dim=10, skip_layers=["first"]).curvature))
    assert re.search(r"Embedding.*\b11\b.*\b4\b", rows["embedding"])
    assert re.search(r"Conv, expand.*2 x 7.*2 x 3", rows["conv"]), "two groups; 2 channels x 3 taps + bias = 7"
    assert re.search(r"LayerNorm", rows["norm"]) and re.search(r"6 x 2", rows["norm"])
    assert re.search(r"Linear, expand.*\b5\b.*\b5\b", rows["second"]) and "shared by 2 modules" in rows["second"]
    assert "skip_layers" in rows["first.weight"]
    assert "Bilinear" in rows["bilinear.weight"]
    assert rows["temperature"].split()[-1] != "base", "a reason follows the rule"


def test_a_large_factor_is_split_and_says_why() -> None:
    model = nn.Sequential(nn.Linear(20, 3))

    def row(limit: int | None) -> str:
        return rows_of(str(KFACSGD(model, lr=0.1, max_factor_dim=limit).curvature))["0"]

    assert "A in 3 blocks of 7 (max_factor_dim=10)" in row(10) and "G " not in row(10)
    assert "A diagonal (max_factor_dim=1); G diagonal (max_factor_dim=1)" in row(1)
    assert "max_factor_dim" not in row(21) + row(None)


def test_the_table_follows_training() -> None:
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1, **EVERY_STEP)
    first = rows_of(str(optimizer.curvature))
    assert all("by the base rule until" in first[name] for name in ("0", "2", "3"))
    model[0].requires_grad_(False)
    train(model, optimizer, range(3))
    assert "after 3 steps" in str(optimizer.curvature).splitlines()[0]
    rows = rows_of(str(optimizer.curvature))
    assert "frozen" in rows["0"]
    assert not any("by the base rule until" in rows[name] for name in ("2", "3"))


def test_layers_that_wait_for_their_first_decomposition_are_counted_apart() -> None:
    """They were counted as preconditioned, although a layer much wider than its batch waits for hundreds of steps."""
    model = nn.Sequential(nn.Linear(784, 10), nn.Linear(10, 3))
    optimizer = KFACSGD(model, lr=0.01)
    assert str(optimizer.curvature).splitlines()[-1].startswith("2 layers preconditioned, 0 parameters")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(16, 784)).square().mean().backward()
        optimizer.step()
    *_, footer, remark = str(optimizer.curvature).splitlines()
    assert "one in" in remark
    assert footer.startswith("2 layers preconditioned, 2 of them not yet, 0 parameters by the base rule")


def test_a_layer_that_no_step_has_used_is_named() -> None:
    """It has no gradient, so no warning tells of it, and its row promised a decomposition that never came."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model.spare = nn.Linear(8, 8)
    model.forward = lambda x: model[1](model[0](x))
    optimizer = KFACSGD(model, lr=0.1, **EVERY_STEP)
    assert not any("nothing seen of it so far" in row for row in rows_of(str(optimizer.curvature)).values())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    rows = rows_of(str(optimizer.curvature))
    assert [name for name, row in rows.items() if "nothing seen of it so far" in row] == ["spare"]


def test_what_is_shown_of_a_closed_optimizer_is_that_it_is_closed() -> None:
    """It showed what had been learned, and promised a first decomposition."""
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1, **EVERY_STEP)
    train(model, optimizer, range(4))
    assert optimizer.curvature.reach > 0
    optimizer.curvature.stages.steering.take_over({"graft": 50, "brake": 0.5})
    assert (optimizer.curvature.report()["graft"], optimizer.curvature.report()["brake"]) == (0.5, 0.5)
    optimizer.curvature.close()
    title, *_, footer = str(optimizer.curvature).splitlines()
    assert title == "Curvature after 4 steps, closed: steps are the base class's own"
    rows = rows_of(str(optimizer.curvature))
    assert all(rows[name].endswith("by the base rule, as the curvature is closed") for name in ("0", "2", "3"))
    assert footer.startswith(f"0 layers preconditioned, {len(list(model.parameters()))} parameters by the base rule")
    report = optimizer.curvature.report()
    assert (report["trust"], report["reach"], optimizer.curvature.trust) == (0, 0, 0)
    assert (report["graft"], report["brake"]) == (1, 1)


def test_a_bias_whose_weight_is_frozen_trains_by_the_base_rule() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    model[3].requires_grad_(False)
    table = str(KFACSGD(model, lr=0.1).curvature)
    assert "frozen, its bias trains by the base rule" in rows_of(table)["0"]
    assert rows_of(table)["3"].endswith("frozen")
    assert "1 layer preconditioned, 2 parameters by the base rule" in table.splitlines()[-1]


def test_the_title_has_no_trust_where_no_layer_could_turn() -> None:
    model = nn.Bilinear(3, 3, 2)
    with pytest.warns(UserWarning, match="preconditions none"):
        optimizer = KFACAdam(model, lr=0.01)
    assert str(optimizer.curvature).splitlines()[0] == "Curvature after 0 steps"
    model(*torch.randn(2, 4, 3)).sum().backward()
    optimizer.step()
    assert str(optimizer.curvature).splitlines()[0] == "Curvature after 1 step"


def test_the_title_has_no_trust_and_no_reach_while_all_layers_are_frozen() -> None:
    model = make_model().requires_grad_(requires_grad=False)
    optimizer = KFACAdam(model, lr=0.01)
    assert str(optimizer.curvature).splitlines()[0] == "Curvature after 0 steps"
    model.requires_grad_(requires_grad=True)
    assert str(optimizer.curvature).splitlines()[0].startswith("Curvature after 0 steps, trust 0.0")


def test_bytes_as_text() -> None:
    found = [human_bytes(number) for number in (0, 1023, 1024, 1536, 3 * 2**20, 2.5 * 2**30, 2**41)]
    assert found == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "3.0 MiB", "2.5 GiB", "2048.0 GiB"]


def test_memory_of_the_rows_and_of_the_footer() -> None:
    engine = KFACSGD(make_model(), lr=0.1, spread=0).curvature
    units = {"B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2}
    found = {name: re.search(r"([\d.]+) (B|KiB|MiB)\b", row) for name, row in rows_of(str(engine)).items()}
    sizes = [float(m[1]) * units[m[2]] for name, m in found.items() if m is not None and name in ("0", "2", "3")]
    assert sum(sizes) == pytest.approx(engine.memory_estimate()["total"], rel=0.02)  # rows are rounded to 0.1 KiB
    # Layer 0: A is 5 x 5, G is 6 x 6: packed 15 + 21 numbers twice, eigenvectors and eigenvalues 30 + 42, 4 bytes each.
    assert sizes[0] == pytest.approx(4 * (2 * (15 + 21) + 30 + 42), rel=0.01)


# The report ----------------------------------------------------------------------------------------------------------


def test_report_before_the_first_step() -> None:
    optimizer = KFACSGD(make_model(), lr=0.1)
    assert optimizer.curvature.report() == {
        "step": 0,
        "trust": 0.0,
        "brake": 1.0,
        "graft": 1.0,
        "reach": 0.0,
        "skipped_steps": 0,
        "skipped_batches": 0,
        "failed_decompositions": 0,
        "staleness": None,
        "traffic": {},
        "layers": {},
    }


def test_factors_of_a_layer_that_is_not_there() -> None:
    model = Zoo()
    optimizer = KFACSGD(model, lr=0.1, **EVERY_STEP)
    with pytest.raises(RuntimeError, match=r"'first'.*before the first step"):
        optimizer.curvature.factors("first")
    step_zoo(model, optimizer)
    assert optimizer.curvature.factors("first")[0].shape == (1, 7, 7)
    for name in ("frist", "bilinear"):
        with pytest.raises(ValueError, match=f"layer='{name}': no such layer.*print"):
            optimizer.curvature.factors(name)


@pytest.mark.parametrize(
    ("spread", "expected"),
    # Frozen at 0, 4, 8; if spread, those of 4 are in use from step 6 on, and up to then those of step 0.
    [(None, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]), (2, [1, 2, 3, 4, 5, 6, 3, 4, 5, 6])],
)
def test_staleness_is_the_age_of_the_factors_in_use(spread: int | None, expected: list[int]) -> None:
    """Counted from the step at which the factors were frozen, also while a refresh is worked off."""
    model, found = make_model(), []
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=1, inv_update_steps=4, spread=spread)
    train(model, optimizer, range(10), lambda: found.append(optimizer.curvature.report()["staleness"]))
    assert found == expected


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_spectra_are_those_of_the_factors_in_use(solver: str) -> None:
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1, **{**EVERY_STEP, "inv_update_steps": 3}, solver=solver)
    train(model, optimizer, range(4))
    in_use = {
        layer.name: [f.clone() for f in optimizer.curvature.factors(layer)] for layer in optimizer.curvature.layers
    }
    train(model, optimizer, range(4, 6))  # the running averages go on, the decompositions stay
    for name, factors in in_use.items():
        for side, factor in zip(("A", "G"), factors, strict=True):
            now = dict(zip(("A", "G"), optimizer.curvature.factors(name), strict=True))[side]
            assert name == "2" and side == "A" or not torch.equal(factor, now)
            eigenvalues = torch.linalg.eigvalsh(factor).flatten()
            low, mean, high = (float(x) for x in (eigenvalues.min(), eigenvalues.mean(), eigenvalues.max()))
            found = optimizer.curvature.report()["layers"][name][side]
            assert set(found) == {"min", "mean", "max", "condition"}
            assert found["max"] == pytest.approx(high, rel=TOL)
            assert found["mean"] == pytest.approx(mean, rel=TOL)
            assert found["min"] == pytest.approx(max(low, 0.0), abs=TOL * high)
            if low > 1e-6 * high:
                assert found["condition"] == pytest.approx(high / low, rel=1e-3)


@pytest.mark.parametrize("scaling", [None, "unit"])
def test_cosine_is_that_of_gradient_and_direction(scaling: str | None) -> None:
    """At the last refresh, of weight and bias together; a scale does not change it."""
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1, **{**EVERY_STEP, "inv_update_steps": 5}, scaling=scaling, damping=0.01)
    before = values(model)
    train(model, optimizer, [0])
    changes = {n: p.detach() - old for (n, p), old in zip(model.named_parameters(), before, strict=True)}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    report = optimizer.curvature.report()["layers"]
    for name in ("0", "2", "3"):
        x, y = (torch.cat([t[f"{name}.weight"].flatten(), t[f"{name}.bias"]]) for t in (gradients, changes))
        cosine = -float(x @ y / (x.norm() * y.norm()))
        assert 0 < cosine < 0.999
        assert report[name]["cosine"] == pytest.approx(cosine, rel=TOL)
    train(model, optimizer, range(1, 4))
    assert {n: layer["cosine"] for n, layer in optimizer.curvature.report()["layers"].items()} == {
        n: layer["cosine"] for n, layer in report.items()
    }


def test_reports_are_plain_numbers() -> None:
    model = make_model()
    optimizer = KFACAdam(model, lr=0.1, **EVERY_STEP)
    train(model, optimizer, range(2))

    def check(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                check(item)
        else:
            assert value is None or type(value) in (int, float), value

    check(optimizer.curvature.report())
    check(optimizer.curvature.profile())
    check(optimizer.curvature.memory_estimate())


# Stage times ---------------------------------------------------------------------------------------------------------


def test_profile_counts_calls_and_adds_up() -> None:
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=2, inv_update_steps=3, scaling="unit")
    assert optimizer.curvature.profile() == {}
    computed = []
    for step in range(6):
        train(model, optimizer, [step])
        computed.append(optimizer.curvature.profile()["factor computation"]["calls"])
    statistics_steps = [step for step in range(6) if computed[step] > ([0, *computed])[step]]
    assert statistics_steps == [0, 2, 4], "on other steps nothing is captured"
    profile = optimizer.curvature.profile()
    assert set(profile) == {"factor computation", "factor update", "decomposition", "preconditioning", "scaling"}
    calls = {"factor update": 3, "decomposition": 2, "preconditioning": 6, "scaling": 6}
    assert {stage: profile[stage]["calls"] for stage in calls} == calls
    for row in profile.values():
        assert row["ms"] > 0
        assert row["ms_per_call"] == pytest.approx(row["ms"] / row["calls"])


def test_profile_knows_the_sampled_backward() -> None:
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1, fisher="categorical", factor_update_steps=2)
    train(model, optimizer, range(4))
    assert optimizer.curvature.profile()["sampled backward"]["calls"] == 2


# Memory --------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough that factors, and not bookkeeping, decide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, padding=1, groups=3)
        self.bn = nn.BatchNorm2d(24)
        self.hidden = nn.Linear(24, 70)
        self.head = nn.Linear(70, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.bn(self.conv(x)).mean((2, 3)))))


MEMORY_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "inverse": {"solver": "inverse"},
    "float64 factors": {"factor_dtype": torch.float64},
    "half": {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16},
    "spread": {"spread": 2},
    "default interval": {"inv_update_steps": 10},
    "blocks": {"max_factor_dim": 60},
    "blocks, inverse": {"max_factor_dim": 17, "solver": "inverse"},
    "diagonal": {"max_factor_dim": 1},
    "skipped": {"skip_layers": ["hidden"]},
    "layer-wise": {"assignment": "layer-wise"},
}


def test_memory_is_estimated_for_some_of_the_parameters() -> None:
    model = make_model()
    some = list(model[0].parameters())
    estimate = kfac_optim.memory_estimate(model, params=some)
    assert estimate == CurvatureEngine(model, some).memory_estimate()
    assert 0 < estimate["total"] < kfac_optim.memory_estimate(model)["total"]


@pytest.mark.fast("^(default$|half)")
@pytest.mark.parametrize("options", MEMORY_OPTIONS)
def test_estimated_memory_is_what_is_then_held(options: str) -> None:
    """Both estimates, before training, against the tensors found in the engine and in the state after it."""
    chosen, model = {"inv_update_steps": 6, "factor_update_steps": 1, **MEMORY_OPTIONS[options]}, Wide().float()
    ahead = kfac_optim.memory_estimate(model, **chosen)
    gc.collect()
    assert not any(module._forward_hooks for module in model.modules()), "asking leaves the model as it was"
    optimizer = KFACSGD(model, lr=0.1, **chosen)
    assert optimizer.curvature.memory_estimate() == ahead
    # To the midst of a refresh, if it is spread: all decompositions are made, none is in use.
    for _ in range(chosen["inv_update_steps"] + chosen.get("spread", 1)):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 5, 5, dtype=torch.float32)).square().mean().backward()
        optimizer.step()
    # The estimates leave out the weights of averages and the cosine of each layer, gamma, the unit of damping and the
    # two largest eigenvalues of each pair, and of channels the layer that they belong to; and, in the steps that look
    # whether somebody changes them, a norm of each parameter.
    optimizer.curvature.stages.steering.watch.note(())
    layers = optimizer.curvature.layers
    weights, gammas = 4 * 8 * len(layers), 4 * sum(layer.pairs for layer in layers)
    cosines, channels = 4 * len(layers), 8 * model.bn.num_features
    held = reachable_bytes(optimizer.curvature)
    assert held == pytest.approx(ahead["total"] + weights + cosines + 4 * gammas + channels, rel=WITHIN)
    assert ahead["total"] == ahead["factors"] + ahead["snapshots"] + ahead["decompositions"] + ahead["refresh"]
    assert bool(ahead["refresh"]) == (options in ("spread", "default interval"))

    leaves = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state.get("kfac", {}))]
    in_state = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    pending = ahead["factors"] if ahead["refresh"] else 0  # its snapshot; the decompositions are no state
    expected = ahead["factors"] + ahead["snapshots"] + pending + weights + gammas
    assert in_state == pytest.approx(expected, rel=WITHIN)


def test_layers_of_one_shape_that_are_used_in_turn_hold_their_decompositions_once() -> None:
    heads = nn.ModuleList([nn.Linear(40, 30), nn.Linear(40, 30)])
    optimizer = KFACSGD(heads, lr=0.01, momentum=0.9, factor_update_steps=1, inv_update_steps=100)
    held = []
    for step in range(5):
        optimizer.zero_grad()
        sum(heads[i](torch.randn(8, 40)).square().mean() for i in range(2) if step == 0 or i == step % 2).backward()
        optimizer.step()
        optimizer.curvature.stages.steering.watch.note(())
        held.append(reachable_bytes(optimizer.curvature))
    smallest = 4 * 30 * 30  # the eigenvectors of one G
    assert held[-1] < held[0] + smallest


def test_estimate_by_hand_for_several_ranks() -> None:
    """Four Linear(8, 8) without bias: packed 36 numbers per factor, 72 per decomposition, 8 of each kind."""
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]).float()
    factors, decompositions = 4 * 8 * 36, 4 * 8 * 72

    def estimate(ranks: int, assignment: Any) -> dict[str, int]:
        return kfac_optim.memory_estimate(model, world_size=ranks, assignment=assignment)

    for ranks in (1, 2, 4):
        for assignment, fraction in (
            ("factor-wise", 1.0),
            ("layer-wise", 1 / ranks),
            (KAISA(grad_worker_fraction=1.0), 1.0),
            (KAISA(grad_worker_fraction=1 / ranks), 1 / ranks),
        ):
            found = estimate(ranks, assignment)
            assert (found["factors"], found["snapshots"]) == (factors, factors), "every rank stores all factors"
            assert found["decompositions"] == decompositions * fraction
    assert estimate(4, KAISA(grad_worker_fraction=0.5))["decompositions"] == decompositions / 2
    assert estimate(4, KAISA(memory_budget=decompositions // 2))["decompositions"] == decompositions / 2
    # Three ranks, four equal layers: one rank has two of them, and the estimate is that of the fullest rank.
    assert estimate(3, "layer-wise")["decompositions"] == decompositions / 2


def test_estimates_need_no_gradients_and_train_nothing() -> None:
    model = make_model()
    before = values(model)
    kfac_optim.memory_estimate(model, world_size=8, assignment=KAISA(grad_worker_fraction=0.25))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


# Nothing captured ----------------------------------------------------------------------------------------------------


CAUSES = r"(?s)before the forward pass.*before the first call of a compiled model.*torch\._dynamo\.reset"


@pytest.mark.parametrize("kfac", [KFACSGD, KFACAdam, KFACRMSprop])
def test_training_without_statistics_is_an_error_with_its_remedy(kfac: Any) -> None:
    """Gradients are there, but the modules were never called: here their ``forward`` was, past the hooks."""
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = kfac(model, lr=0.1)
    before = values(model)
    model[0].forward(torch.randn(8, 4)).square().mean().backward()
    with pytest.raises(RuntimeError, match=CAUSES):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_table_of_several_ranks() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 30), nn.PReLU())
    engine = CurvatureEngine(model, communicator=LocalCommunicator(1, 4), assignment=KAISA(grad_worker_fraction=0.5))
    lines = repr(engine).splitlines()
    rows = {line.split()[0]: line for line in lines if line[:2] in ("0 ", "1 ")}
    for i, workers in enumerate(engine.stages.ranks.assignment.layers):
        assert "A {}, G {}".format(*workers.inverse_workers) in rows[str(i)]
        assert "{}, {}".format(*workers.gradient_workers) in rows[str(i)]
    costs = [11.0**3, 20.0**3, 21.0**3, 30.0**3]  # the second layer is dearer: one row of the grid each
    expected = max(costs) / (sum(costs) / 4)
    assert lines[-1] == f"rank 1 of 4, load of the decompositions: largest / mean = {expected:.2f}"


def test_memory_of_a_rank_that_does_not_precondition() -> None:
    model = nn.Linear(9, 5)
    per_rank = [
        CurvatureEngine(model, communicator=LocalCommunicator(rank, 2), assignment="layer-wise").memory_estimate()
        for rank in range(2)
    ]
    packed = 4 * (10 * 11 // 2 + 5 * 6 // 2)
    for kinds in per_rank:
        assert kinds["factors"] == kinds["snapshots"] == kinds["local sums"] == packed
    assert [kinds["decompositions"] for kinds in per_rank] == [4 * (10 * 10 + 10 + 5 * 5 + 5), 0]
