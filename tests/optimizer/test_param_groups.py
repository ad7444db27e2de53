"""Parameters in any grouping, from any source: what is trained, by which rule, at which learning rate."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, CurvatureEngine, KFACAdam, KLClip
from kfac_optim.common import machines
from kfac_optim.stacks.directions import Directions, by_parameter
from tests.helpers.compare import assert_close, assert_identical, assert_trained, values
from tests.helpers.settings import CLASSES, FLOAT64, OFTEN, SETTINGS
from tests.helpers.training import backward, data_of, make_model, train

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 7
TOL = 1e-12  # the same arithmetic on both sides, up to the order of multi-tensor kernels
EVERY_STEP: dict[str, Any] = {**FLOAT64, **OFTEN, "factor_update_steps": 1, "inv_update_steps": 1}


def decay_groups(model: nn.Module, **of_the_rest: Any) -> list[dict[str, Any]]:
    """Weights with decay, biases and norms without: the split of transformers' Trainer."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, **of_the_rest}]


def changes(model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> dict[str, Tensor]:
    """What one step changes, by parameter name."""
    before = values(model)
    train(model, optimizer, [step])
    return {n: p.detach() - old for (n, p), old in zip(model.named_parameters(), before, strict=True)}


# Groups --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kfac", CLASSES)
def test_equal_groups_are_no_groups(kfac: Any) -> None:
    """The split itself changes nothing: weight and bias stay one Kronecker block."""
    keywords = {**CLASSES[kfac], "weight_decay": 0.0, **SETTINGS}
    split, whole = make_model(), make_model()
    before = values(split)
    groups = [{"params": group["params"]} for group in decay_groups(split)]
    train(split, kfac(groups, **keywords, model=split), range(STEPS))
    train(whole, kfac(whole, **keywords), range(STEPS))
    assert_trained(split, before)
    assert_close(split, whole, TOL)


@pytest.mark.parametrize("precondition", ["gradient", "momentum"])
def test_each_group_has_its_own_lr_and_weight_decay(precondition: str) -> None:
    """Weight change = -lr (direction + decay * weight) with lr and decay of its own group, direction the joint one."""
    model, twin = make_model(), make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {**EVERY_STEP, "scaling": None, "precondition": precondition}
    optimizer = KFACSGD(decay_groups(model, lr=0.5), lr=0.2, model=model, **options)
    found = changes(model, optimizer)
    directions = changes(twin, KFACSGD(twin, lr=1.0, **options))
    for name, old in before.items():
        lr, decay = (0.2, 0.1) if old.dim() > 1 else (0.5, 0.0)
        torch.testing.assert_close(found[name], lr * (directions[name] - decay * old), rtol=TOL, atol=TOL)


def test_kl_clip_reads_the_current_lr_of_each_group() -> None:
    kappa, lr_weight, lr_bias = 1e-4, 0.3, 0.7
    twin = make_model()
    directions = changes(twin, KFACSGD(twin, lr=1.0, scaling=None, **EVERY_STEP))
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}

    model = make_model()
    groups = [{**group, "weight_decay": 0.0} for group in decay_groups(model)]
    optimizer = KFACSGD(groups, lr=1.0, model=model, scaling=KLClip(kappa), **EVERY_STEP)
    for group, lr in zip(optimizer.param_groups, (lr_weight, lr_bias), strict=True):
        group["lr"] = lr  # as a scheduler does, after construction
    found = changes(model, optimizer)

    rates = {name: lr_weight if p.dim() > 1 else lr_bias for name, p in model.named_parameters()}
    per_layer: dict[str, Tensor] = {}
    for layer in optimizer.curvature.layers:
        names = [name for name, p in model.named_parameters() if any(p is q for q in layer.parameters)]
        products = [rates[n] ** 2 * (directions[n] * gradients[n]).sum() for n in names]
        per_layer[layer.name] = torch.stack(products).sum().abs()
    nu = min(1.0, float((kappa / torch.stack(list(per_layer.values())).sum()).sqrt()))
    assert nu < 0.5, "the bound must be active"
    for name, _ in model.named_parameters():
        scale = 1.0 if name == "1.weight" else nu  # the PReLU takes the base rule
        torch.testing.assert_close(found[name], rates[name] * scale * directions[name], rtol=TOL, atol=TOL)


def test_momentum_mode_keeps_the_groups_as_schedulers_see_them() -> None:
    model = make_model()
    optimizer = KFACSGD(
        decay_groups(model, momentum=0.5, nesterov=True),
        lr=0.1,
        momentum=0.9,
        model=model,
        precondition="momentum",
        **SETTINGS,
    )
    groups, members = optimizer.param_groups, [list(map(id, g["params"])) for g in optimizer.param_groups]
    identities = list(map(id, groups))
    train(model, optimizer, range(4))
    assert optimizer.param_groups is groups
    assert list(map(id, groups)) == identities
    assert [list(map(id, g["params"])) for g in groups] == members
    assert [(g["momentum"], g["nesterov"]) for g in groups] == [(0.9, False), (0.5, True)]


# Later groups, frozen parameters -------------------------------------------------------------------------------------


def test_a_group_added_before_training_is_as_one_from_the_start() -> None:
    late, whole = make_model(), make_model()
    optimizer = KFACSGD(late[0].parameters(), lr=0.1, momentum=0.9, model=late, **SETTINGS)
    assert [layer.name for layer in optimizer.curvature.layers] == ["0"]
    optimizer.add_param_group({"params": [p for m in late[1:] for p in m.parameters()]})
    train(late, optimizer, range(STEPS))
    train(whole, KFACSGD(whole, lr=0.1, momentum=0.9, **SETTINGS), range(STEPS))
    assert_close(late, whole, TOL)


def test_a_group_added_during_training_joins_and_leaves_the_others_their_statistics() -> None:
    model = make_model()
    optimizer = KFACSGD(model[0].parameters(), lr=0.1, model=model, scaling=None, **EVERY_STEP)
    rest = [p for m in model[1:] for p in m.parameters()]
    before = values(model[1:])
    train(model, optimizer, range(3))
    assert all(torch.equal(p, old) for p, old in zip(rest, before, strict=True)), "not trained yet"
    factors = [factor.clone() for factor in optimizer.curvature.factors("0")]
    optimizer.add_param_group({"params": rest, "lr": 0.05})
    for kept, factor in zip(optimizer.curvature.factors("0"), factors, strict=True):
        assert torch.equal(kept, factor)

    twin = make_model()  # the same weights under an optimizer that starts now: its directions for the new layers
    twin.load_state_dict(model.state_dict())
    directions = changes(twin, KFACSGD(twin, lr=1.0, scaling=None, **EVERY_STEP), step=3)
    found = changes(model, optimizer, step=3)
    for name, p in model.named_parameters():
        if any(p is q for q in rest):
            torch.testing.assert_close(found[name], 0.05 * directions[name], rtol=TOL, atol=TOL)
    assert [layer.name for layer in optimizer.curvature.layers] == ["0", "2", "3"]


@pytest.mark.parametrize("kept", [0, 1])
def test_biases_added_during_training_are_saved_with_their_layers(kept: int) -> None:
    """Whose factors start anew, one row larger: of all layers, or of all but one."""
    models, optimizers = [], []
    for steps in (3, 0):
        model = make_model()
        biases = [p for p in model.parameters() if p.dim() == 1][kept:]
        others = [p for p in model.parameters() if all(p is not q for q in biases)]
        optimizer = KFACSGD(others, lr=0.1, model=model, momentum=0.9, **EVERY_STEP)
        train(model, optimizer, range(steps))
        optimizer.add_param_group({"params": biases})
        models.append(model)
        optimizers.append(optimizer)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3, 9))
    assert_identical(*models)


def test_layers_that_the_collector_no_longer_lists_are_still_there() -> None:
    """Loops that call ``gc.freeze()`` after their first step, for speed, and add a group later."""
    model = make_model()
    optimizer = KFACSGD(model[0].parameters(), lr=0.1, **EVERY_STEP)
    train(model, optimizer, range(1))
    gc.freeze()
    try:
        head = nn.Linear(3, 2)
        optimizer.add_param_group({"params": [*model[3].parameters(), *head.parameters()]})
    finally:
        gc.unfreeze()
    assert [layer.modules for layer in optimizer.curvature.layers] == [[model[0]], [model[3]], [head]]


@pytest.mark.parametrize("change", ["a group is added", "a state is loaded"])
@pytest.mark.parametrize("passed", ["forward", "backward"])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_was_seen_may_be_lost_in_the_midst_of_the_first_step(compiled: bool, passed: str, change: str) -> None:
    """As by a loop that makes a head when it meets the first example of it: the base class takes that step."""
    model, twin = make_model(), make_model()
    optimizer = KFACSGD(model[0].parameters(), lr=0.1, model=model, **EVERY_STEP)
    plain = torch.optim.SGD(twin[0].parameters(), lr=0.1)
    for trained, over in ((model, optimizer), (twin, plain)):
        if compiled:
            trained.compile(backend="eager")
        loss = trained(torch.ones(6, 4)).square().sum()
        if passed == "backward":
            loss.backward()
        if change == "a group is added":
            over.add_param_group({"params": [p for m in trained[1:] for p in m.parameters()]})
        else:
            over.load_state_dict(over.state_dict())
        if passed == "forward":
            loss.backward()
        over.step()
    assert_close(model, twin, TOL)
    train(model, optimizer, range(3))
    assert optimizer.curvature.report()["layers"]


@pytest.mark.parametrize("kfac", CLASSES)
def test_frozen_parameters_stay_and_the_rest_trains_as_without_them(kfac: Any) -> None:
    model, twin = make_model(), make_model()
    for made in (model, twin):
        made[0].requires_grad_(False)
    before = values(model)
    train(model, kfac(model, **CLASSES[kfac], **SETTINGS), range(STEPS))
    trained = [p for p in twin.parameters() if p.requires_grad]
    train(twin, kfac(trained, **CLASSES[kfac], **SETTINGS, model=twin), range(STEPS))
    assert all(torch.equal(p, old) for p, old in zip(model[0].parameters(), before, strict=False))
    assert_trained(model[1:], before[2:])
    assert_close(model, twin, TOL)


def test_unfrozen_parameters_start_training_with_curvature() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = KFACSGD(model, lr=0.1, scaling=None, **EVERY_STEP)
    train(model, optimizer, range(3))
    model[0].requires_grad_(True)

    twin = make_model()
    twin.load_state_dict(model.state_dict())
    directions = changes(twin, KFACSGD(twin, lr=1.0, scaling=None, **EVERY_STEP), step=3)
    found = changes(model, optimizer, step=3)
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(found[name], 0.1 * directions[name], rtol=TOL, atol=TOL)


@pytest.mark.parametrize("kfac", [KFACSGD, KFACAdam])
def test_a_state_that_is_saved_before_the_first_step_of_a_new_group_loads(kfac: Any) -> None:
    courses = []
    for resumes in (False, True):
        model = make_model()
        first, rest = list(model[0].parameters()), [p for layer in model[1:] for p in layer.parameters()]
        options = {**CLASSES[kfac], **EVERY_STEP}
        optimizer = kfac(rest, model=model, **options)
        train(model, optimizer, range(3))
        optimizer.add_param_group({"params": first})
        if resumes:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = kfac([{"params": rest}, {"params": first}], model=model, **options)
            optimizer.load_state_dict(state)
        train(model, optimizer, range(3, 6))
        assert "0" in optimizer.curvature.report()["layers"]
        courses.append(model)
    assert_identical(*courses)


@pytest.mark.parametrize("kfac", [KFACSGD, KFACAdam])
def test_a_resumed_run_may_be_given_the_groups_that_came_later(kfac: Any) -> None:
    """Lightning's BaseFinetuning sets ``param_groups`` before the state is loaded."""

    def begin() -> tuple[nn.Module, Any, dict[str, Any]]:
        model = make_model()
        later = {"params": list(model[0].parameters()), "lr": 0.01}
        return model, kfac(model[1:].parameters(), **CLASSES[kfac], **EVERY_STEP), later

    model, optimizer, later = begin()
    train(model, optimizer, range(2))
    optimizer.add_param_group(later)
    train(model, optimizer, range(2, 4))
    resumed, fresh, later = begin()
    fresh.param_groups = [*fresh.param_groups, {**fresh.param_groups[0], **later}]
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for of_one, trained in ((model, optimizer), (resumed, fresh)):
        train(of_one, trained, range(4, 6))
    assert len(fresh.curvature.layers) == 3
    assert_identical(model, resumed)


@pytest.mark.parametrize("added", [True, False])
def test_layers_that_join_late_do_not_wait_for_the_next_refresh(added: bool) -> None:
    """Gradual unfreezing: with an interval that grows with the steps they would train on raw gradients for long."""
    model = make_model()
    options = {"lr": 0.1, "factor_update_steps": 20, "inv_update_steps": 100, "spread": 10}
    first = list(model[0].parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in first)]
    if not added:
        model[0].requires_grad_(False)
    optimizer = KFACSGD(rest if added else model.parameters(), model=model, **options)
    train(model, optimizer, range(5))
    refreshes = optimizer.curvature.stages.refresher.refreshes
    if added:
        optimizer.add_param_group({"params": first})
    model[0].requires_grad_(True)
    train(model, optimizer, range(5, 7))
    assert optimizer.curvature.stages.refresher.refreshes == refreshes + 1
    assert "0" in optimizer.curvature.report()["layers"]
    train(model, optimizer, range(7, 12))
    assert optimizer.curvature.stages.refresher.refreshes == refreshes + 1
    assert optimizer.curvature.stages.refresher.last_refresh == 6


def test_layers_that_train_in_turn_cost_no_refresh_in_every_step() -> None:
    """They have decompositions from before, which are refreshed when it is due."""
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=2, inv_update_steps=10)
    for step in range(40):
        model[0].requires_grad_(step % 2 == 0)
        train(model, optimizer, [step])
    assert optimizer.curvature.stages.refresher.refreshes <= 5


@pytest.mark.parametrize("frozen", [True, False])
def test_a_bias_that_does_not_train_here_leaves_the_weight_its_own_block(frozen: bool) -> None:
    """The block of the weight alone, not the joint solve with its bias entry thrown away; also beside an optimizer."""
    model, twin = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3, bias=False))
    twin[0].weight.data.copy_(model[0].weight)
    model[0].bias.data.zero_()
    model[0].bias.requires_grad_(not frozen)
    train(model, KFACSGD(model if frozen else [model[0].weight], lr=0.1, **SETTINGS), range(STEPS))
    train(twin, KFACSGD(twin, lr=0.1, **SETTINGS), range(STEPS))
    torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=TOL, atol=TOL)
    assert torch.equal(model[0].bias, torch.zeros(3))


def test_a_bias_frozen_during_training_is_to_be_frozen_after_a_resumed_optimizer_is_built() -> None:
    model, resumed = make_model(), make_model()
    optimizer = KFACSGD(model, lr=0.1, **SETTINGS)
    model[3].bias.requires_grad_(False)
    train(model, optimizer, range(3))
    late = KFACSGD(resumed, lr=0.1, **SETTINGS)
    resumed[3].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="built while other biases were frozen"):
        KFACSGD(resumed, lr=0.1, **SETTINGS).load_state_dict(optimizer.state_dict())
    late.load_state_dict(optimizer.state_dict())


def test_a_bias_frozen_during_training_leaves_the_weight_preconditioned() -> None:
    """As if the bias had a gradient of zero; it stays where it is."""
    model, twin = make_model(), make_model()
    optimizer, other = (KFACSGD(m, lr=0.1, **SETTINGS) for m in (model, twin))
    train(model, optimizer, range(3))
    train(twin, other, range(3))
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    kept = [bias.clone() for bias in biases]
    for bias in biases:
        bias.requires_grad_(False)
    for m, o in ((model, optimizer), (twin, other)):
        o.zero_grad()
        backward(m, 3)
        for name, parameter in m.named_parameters():
            if name.endswith("bias") and parameter.grad is not None:
                parameter.grad.zero_()
        gradients = {p: p.grad for p in m.parameters() if p.grad is not None}
        found = by_parameter(o.curvature.directions(gradients, 0.1), gradients)
        directions = {name: found[p] for name, p in m.named_parameters() if p in found}
        if m is model:
            first = directions
    assert first and set(first) == {name for name in directions if not name.endswith("bias")}
    for name, direction in first.items():
        assert not torch.equal(direction, dict(model.named_parameters())[name].grad)
        torch.testing.assert_close(direction, directions[name], rtol=TOL, atol=TOL)
    optimizer.step()
    assert all(torch.equal(bias, before) for bias, before in zip(biases, kept, strict=True))


def test_hidden_weights_beside_adamw_over_the_rest() -> None:
    """Each optimizer moves its own parameters as it would alone, given the other one's."""
    model = make_model()
    hidden = [model[0].weight]
    rest = [p for p in model.parameters() if p is not model[0].weight]
    first = KFACSGD(hidden, lr=0.05, momentum=0.9, precondition="momentum", scaling="unit", **EVERY_STEP)
    second = torch.optim.AdamW(rest, lr=0.01)
    assert [layer.name for layer in first.curvature.layers] == ["0"]
    assert first.curvature.layers[0].bias is None

    twin = make_model()
    lone = KFACSGD([twin[0].weight], lr=0.05, momentum=0.9, precondition="momentum", scaling="unit", **EVERY_STEP)
    for step in range(STEPS):
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            if p is not twin[0].weight:
                p.data.copy_(q)
        train(twin, lone, [step])
        backward(model, step)
        first.step()
        second.step()
        torch.testing.assert_close(twin[0].weight, model[0].weight, rtol=TOL, atol=TOL)
    assert set(first.state) == set(hidden)


# Where the parameters come from --------------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Looks as torch's does to whoever unwraps it, and names its parameters ``module.…`` too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


SOURCES: dict[str, Any] = {
    "parameters": lambda model: (model.parameters(), None),
    "list": lambda model: (list(model.parameters()), None),
    "named_parameters": lambda model: (model.named_parameters(), None),
    "groups": lambda model: ([{"params": model[0].parameters()}, {"params": list(model[1:].parameters())}], None),
    "named groups": lambda model: ([{"params": list(model.named_parameters())}], None),
    "one tensor per group": lambda model: ([{"params": p} for p in model.parameters()], None),
    "module": lambda model: (model, None),
    "parameters and model": lambda model: (model.parameters(), model),
    "wrapped": lambda model: (DistributedDataParallel(model), None),
    "parameters and wrapped": lambda model: (model.parameters(), DistributedDataParallel(model)),
    "compiled": lambda model: (torch.compile(model, backend="eager"), None),
    "wrapped, compiled": lambda model: (torch.compile(DistributedDataParallel(model), backend="eager"), None),
    "parameters of wrapped": lambda model: (DistributedDataParallel(model).parameters(), None),
}


@pytest.mark.fast("KFACSGD")
@pytest.mark.parametrize("kfac", [KFACSGD, KFACAdam, KFACLAMB])
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_of_parameters_gives_the_same_training(source: str, kfac: Any) -> None:
    gc.collect()
    model, twin = make_model(), make_model()
    params, owner = SOURCES[source](model)
    optimizer = kfac(params, **CLASSES[kfac], **SETTINGS, model=owner)
    names = [layer.name for layer in optimizer.curvature.layers]
    assert names == ["0", "2", "3"], "names are those of the user's own module"
    train(model, optimizer, range(STEPS))
    train(twin, kfac(twin, **CLASSES[kfac], **SETTINGS), range(STEPS))
    assert_close(model, twin, TOL)


@pytest.mark.parametrize("wrap", ["wrapped", "wrapped, compiled", "compiled"])
def test_the_forward_may_go_through_the_wrapper(wrap: str) -> None:
    model, twin = make_model(), make_model()
    wrapper, _ = SOURCES[wrap](model)
    optimizer = KFACSGD(wrapper, lr=0.1, **SETTINGS)
    train(wrapper, optimizer, range(3))
    train(twin, KFACSGD(twin, lr=0.1, **SETTINGS), range(3))
    torch._dynamo.reset()
    assert_close(model, twin, TOL)


class Grouped(nn.Sequential):
    """Gives an optimizer groups instead of parameters, as models with several learning rates do."""

    def parameters(self, recurse: bool = True) -> Any:
        return [{"params": list(nn.Module.parameters(self, recurse)), "lr": 0.05}]


@pytest.mark.parametrize("source", ["parameters", "module", "parameters and model", "by hand"])
def test_a_model_may_return_groups_as_its_parameters(source: str) -> None:
    model, twin = (nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.PReLU()), nn.Linear(6, 3)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    grouped = Grouped(model[0], Grouped(*model[1]), model[2])
    del model
    params, owner = SOURCES[source](grouped) if source in SOURCES else (nn.Module.parameters(grouped), None)
    optimizer = KFACSGD(params, lr=0.1 if source != "by hand" else 0.05, model=owner, **SETTINGS)
    assert [layer.name for layer in optimizer.curvature.layers] == ["0", "2"]
    train(grouped, optimizer, [data_of(step) for step in range(STEPS)])
    train(twin, KFACSGD(twin, lr=0.05, **SETTINGS), range(STEPS))
    assert_close(twin, nn.Sequential(*grouped), TOL)
    assert [layer.name for layer in CurvatureEngine(grouped).layers] == ["0", "2"]


def test_a_layer_may_return_groups_as_its_parameters() -> None:
    class GroupedLinear(nn.Linear):
        parameters: Any = Grouped.parameters

    model = nn.Sequential(GroupedLinear(4, 6), nn.Linear(6, 3))
    optimizer = KFACSGD([model[0].bias, *model[1].parameters()], lr=0.1, model=model)
    assert [layer.name for layer in optimizer.curvature.layers] == ["1"]
    ((_, reason),) = optimizer.curvature.stages.trained.uncovered.values()
    assert reason == "the weight of its layer is not among the optimizer's parameters"


@pytest.mark.parametrize("given", ["parameters", "compiled"])
def test_a_model_may_leave_out_parameters_where_it_names_them(given: str) -> None:
    class Unbiased(nn.Sequential):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if "bias" not in name)

    model, twin = Unbiased(*make_model()), make_model()
    call = torch.compile(model, backend="eager") if given == "compiled" else model
    every = [p for part in model for p in part.parameters()]
    train(call, KFACSGD(call if given == "compiled" else every, lr=0.1, **SETTINGS), range(STEPS))
    train(twin, KFACSGD(twin, lr=0.1, **SETTINGS), range(STEPS))
    assert_close(twin, nn.Sequential(*model), TOL)


def test_parameters_of_two_models() -> None:
    """One optimizer over two networks: each of them is found, and is trained as both of them are in one module."""
    first, second, both = make_model(), make_model(), nn.ModuleList([make_model(), make_model()])
    apart = KFACSGD([*first.parameters(), *second.parameters()], lr=0.1, **SETTINGS)
    together = KFACSGD(both, lr=0.1, **SETTINGS)
    for step in range(STEPS):
        for optimizer, pair in ((apart, (first, second)), (together, both)):
            optimizer.zero_grad()
            for i, model in enumerate(pair):
                inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + i))
                model(inputs).square().mean().backward()
            optimizer.step()
    assert_close(nn.ModuleList([first, second]), both, TOL)


def test_a_second_optimizer_over_the_same_parameters_has_its_own_curvature() -> None:
    """Also without any argument, and of a derived class; what Horovod derives is in test_horovod_derivation."""
    model = make_model()
    first = KFACSGD(model.parameters(), lr=0.1, damping=5.0)
    train(model, first, range(2))
    for cls in (KFACAdam, KFACSGD):
        second = cls(model.parameters())
        assert second.curvature is not first.curvature
        assert second.curvature.step_count == 0
        assert second.curvature.damping == cls(make_model().parameters()).curvature.damping
    del second
    gc.collect()
    derived = type("Distributed", (KFACSGD,), {})(model.parameters())
    assert derived.curvature is not first.curvature


def test_an_optimizer_that_dies_in_a_cycle_leaves_no_hooks() -> None:
    """Also if the garbage collector finds it late, as it has cleared the weak references in the cycle by then."""
    model, gc_was_on = make_model(), gc.isenabled()
    gc.disable()
    try:
        optimizer = KFACSGD(model, lr=0.1, momentum=0.9)
        optimizer.itself = optimizer  # type: ignore[attr-defined]
        train(model, optimizer, range(50))
        assert any(p._post_accumulate_grad_hooks for p in model.parameters())
        del optimizer
        gc.collect()
    finally:
        if gc_was_on:
            gc.enable()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_parameters_outside_the_model_train_by_the_base_rule_and_are_listed() -> None:
    model, extra = make_model(), nn.Parameter(torch.ones(2))
    optimizer = KFACSGD([*model.parameters(), extra], lr=0.1, model=model, scaling=None, **EVERY_STEP)
    optimizer.zero_grad()
    (model(torch.randn(8, 4)).square().mean() + extra.sum()).backward()
    optimizer.step()
    torch.testing.assert_close(extra.detach(), torch.full((2,), 0.9), rtol=TOL, atol=TOL)
    assert "no module of the model owns it" in str(optimizer.curvature)


@pytest.mark.parametrize("kind", ["cpu", "accelerator"])
@pytest.mark.parametrize("of_weights", [0.9, 0.0])
def test_a_layer_whose_weight_and_bias_have_other_momenta(
    of_weights: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the base has taken off one of them is its moment, what it has taken off the other is not."""
    monkeypatch.setattr(machines, "machine_of", lambda _: kind)
    noted: list[tuple[dict[nn.Parameter, Tensor], Directions]] = []
    directions = CurvatureEngine.directions

    def note(engine: CurvatureEngine, moments: Any, lr: Any, other_updates: Any, **more: Any) -> Directions:
        copies = {p: update.clone() for p, update in {**moments, **other_updates}.items()}
        noted.append((copies, directions(engine, moments, lr, other_updates, **more)))
        return noted[-1][1]

    monkeypatch.setattr(CurvatureEngine, "directions", note)
    model = make_model()
    groups = decay_groups(model, momentum=0.9 - of_weights)
    train(model, KFACSGD(groups, model=model, lr=0.01, momentum=of_weights, **OFTEN), range(STEPS))
    assert len(noted) > 1
    for updates, found in noted:
        for layout, direction in zip(found.layouts, found.scaled, strict=True):
            for p, index, part in layout.read(direction.update, found.parameters):
                torch.testing.assert_close(part, updates[p][index].to(part.dtype), rtol=0, atol=0)


def test_a_group_that_is_no_dict_is_refused_as_by_torch() -> None:
    model = make_model()
    optimizer = KFACSGD(model, lr=0.1)
    for given in (list(model.parameters()), model):
        with pytest.raises(TypeError, match="param_group must be a dict"):
            optimizer.add_param_group(given)  # type: ignore[arg-type]
