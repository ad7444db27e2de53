"""What a loop does to modules and groups after the optimizer was built: others around the same weights, fewer, more."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

from kfac_optim import KFACSGD, KFACAdam
from tests.helpers.compare import assert_same_factors, assert_same_weights, factors_of
from tests.layers.test_replaced_parameters import OFTEN, Double, backward, make, train

STEPS = 6


class Tripled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, 3 * self.weight, self.bias)


class TripledBehind(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def around(cls: type[nn.Linear], old: nn.Linear) -> nn.Linear:
    """A module of a class with the parameters of another one."""
    new = cls(old.in_features, old.out_features)
    new.weight, new.bias = old.weight, old.bias
    return new


@pytest.mark.parametrize("nested", [False, True])
def test_another_module_around_the_same_weights_goes_on_with_their_statistics(nested: bool) -> None:
    """As ``convert_sync_batchnorm`` makes them: nothing but the module is new, also where a container is."""
    models = [nn.Sequential(make(), nn.Linear(3, 2).double()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [KFACSGD(model, lr=0.05, **OFTEN) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(STEPS))
    if nested:
        models[0][0] = nn.Sequential(*(around(nn.Linear, m) if isinstance(m, nn.Linear) else m for m in models[0][0]))
    else:
        models[0][1] = around(nn.Linear, models[0][1])
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        optimizer.step()  # notices, before anything is captured
        train(model, optimizer, range(STEPS, 2 * STEPS))
    assert_same_factors(*optimizers)
    assert_same_weights(*models)


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_module_of_another_class_around_the_same_weights_is_declined(cls: type) -> None:
    model = make()
    optimizer = cls(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(STEPS))
    model[0] = around(Tripled, model[0])
    with pytest.warns(UserWarning, match=r"'0' \(.*Linear\).*modules were changed.*base rule") as warned:
        train(model, optimizer, range(STEPS, 2 * STEPS))
    assert len(warned) == 1
    assert [layer.name for layer in optimizer.curvature.layers] == ["2"]
    assert "overrides Linear.forward" in repr(optimizer.curvature)


def test_one_that_does_something_around_the_function_is_seen_there() -> None:
    model = make()
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(STEPS))
    model[0] = around(TripledBehind, model[0])
    train(model, optimizer, range(STEPS, 2 * STEPS))
    assert [layer.name for layer in optimizer.curvature.layers] == ["0", "2"]
    assert "at F.linear in TripledBehind" in repr(optimizer.curvature)
    assert all(float(factor.norm()) > 0 for factor in factors_of(optimizer).values())


def test_hooks_that_a_tool_takes_over_to_another_module_do_nothing() -> None:
    """As ``torch.ao.quantization.prepare_qat`` does, without the flag that they take keywords."""
    model = make()
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(STEPS))
    old, model[0] = model[0], around(Tripled, model[0])
    for hook in old._forward_pre_hooks.values():
        model[0].register_forward_pre_hook(hook)
    for hook in old._forward_hooks.values():
        model[0].register_forward_hook(hook)
    with pytest.warns(UserWarning, match="base rule"):
        train(model, optimizer, range(STEPS, 2 * STEPS))


def pruned(layer: nn.Linear) -> None:
    prune.random_unstructured(layer, "bias", amount=0.5)


def parametrized(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "bias", Double())


@pytest.mark.parametrize("change", [pruned, parametrized])
@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_layer_whose_bias_is_computed_later_goes_on_without_it(
    cls: type, change: Callable[[nn.Linear], None]
) -> None:
    """With statistics of its own: the old ones have a column for the bias."""
    model = make()
    optimizer = cls(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(STEPS))
    change(model[0])
    train(model, optimizer, range(STEPS, 2 * STEPS))
    first, second = optimizer.curvature.layers
    assert (first.name, first.bias, second.name) == ("0", None, "2")
    assert optimizer.curvature.factors("0")[0].shape == (1, 4, 4)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_state_that_is_carried_over_to_a_narrower_weight(cls: type) -> None:
    """Structured pruning: what has the shape of the parameter is cut with it; the factors have others."""
    model = make()
    optimizer = cls(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(STEPS))

    def narrow(module: nn.Module, name: str, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        old = getattr(module, name)
        new, state = nn.Parameter(cut(old.detach()).clone()), optimizer.state.pop(old, {})
        optimizer.state[new] = {
            key: cut(value).clone() if torch.is_tensor(value) and value.shape == old.shape else value
            for key, value in state.items()
        }
        setattr(module, name, new)
        group = optimizer.param_groups[0]
        group["params"] = [new if p is old else p for p in group["params"]]

    narrow(model[0], "weight", lambda value: value[::2])
    narrow(model[0], "bias", lambda value: value[::2])
    narrow(model[2], "weight", lambda value: value[:, ::2])
    losses = train(model, optimizer, range(STEPS, 4 * STEPS))
    assert losses[-1] < losses[0]
    assert [len(f) and f.shape[-1] for f in optimizer.curvature.factors("2")] == [4, 3]


@pytest.mark.parametrize("trained", [False, True])
def test_a_bias_that_joins_its_weight_later_is_part_of_its_block(trained: bool) -> None:
    model = make()
    optimizer = KFACSGD([model[0].weight, *model[2].parameters()], lr=0.05, model=model, **OFTEN)
    if trained:
        train(model, optimizer, range(STEPS))
    optimizer.add_param_group({"params": [model[0].bias]})
    assert not optimizer.curvature.stages.trained.uncovered
    train(model, optimizer, range(STEPS, 2 * STEPS))
    assert optimizer.curvature.factors("0")[0].shape == (1, 5, 5)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_a_group_that_is_taken_out_of_the_optimizer_is_no_longer_covered(cls: type) -> None:
    model = make()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = cls(groups, lr=0.05, model=model, **OFTEN)
    train(model, optimizer, range(STEPS))
    for parameter in optimizer.param_groups.pop()["params"]:
        optimizer.state.pop(parameter, None)
    train(model, optimizer, range(STEPS, STEPS + 1))
    optimizer.state_dict()
    before = model[2].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, range(STEPS, 2 * STEPS))
    assert torch.equal(model[2].weight, before)
    assert [layer.name for layer in optimizer.curvature.layers] == ["0"]
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_without_any_group_a_step_does_nothing(cls: type) -> None:
    """As under torch's own classes."""
    model = make()
    optimizer = cls(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(STEPS))
    groups, before = list(optimizer.param_groups), [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups.clear()
    for _ in range(2 * STEPS):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.param_groups.extend(groups)
    train(model, optimizer, range(STEPS, 2 * STEPS))
    assert [block.has_direction for block in optimizer.curvature.stages.blocks] == [True] * 2


def test_groups_that_are_in_the_optimizer_by_turns_keep_their_statistics() -> None:
    model = make()
    optimizer = KFACSGD([{"params": list(model[i].parameters())} for i in (0, 2)], lr=0.05, model=model, **OFTEN)
    groups = list(optimizer.param_groups)
    for step in range(2 * STEPS):
        optimizer.param_groups[:] = groups[: 1 + step % 2]
        model.zero_grad()
        train(model, optimizer, range(step, step + 1))
    optimizer.state_dict()
    assert [block.has_direction for block in optimizer.curvature.stages.blocks] == [True] * 2
    assert optimizer.curvature.stages.progress.last_statistics == 2 * STEPS - 1


def test_while_nothing_changes_no_step_looks_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes as long as many steps of a small model."""
    model = make()
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    monkeypatch.setattr("kfac_optim.coverage.trained_model.FoundLayers", lambda *_: pytest.fail("it looks for layers"))
    train(model, optimizer, range(2 * STEPS))


@pytest.mark.parametrize("alone", [False, True])
def test_tensors_of_no_module_may_be_replaced(alone: bool) -> None:
    """Points of a scene that are split and pruned, as in Gaussian splatting: the base class asks for no more."""
    model, points = make(), nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
    groups = [{"params": [points]}] + ([] if alone else [{"params": list(model.parameters())}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no module owns any of them
        optimizer = KFACAdam(groups, lr=0.01, **({} if alone else OFTEN))
        for step in range(4 * STEPS):
            optimizer.zero_grad()
            (model(points) - 1).square().mean().backward()
            optimizer.step()
            if step % STEPS == STEPS - 1:
                state, points = optimizer.state.pop(points), nn.Parameter(points.detach()[:-1])
                optimizer.state[points] = {key: v[:-1] if v.dim() else v for key, v in state.items()}
                optimizer.param_groups[0]["params"] = [points]
    assert len(optimizer.curvature.layers) == (0 if alone else 2)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("fisher", ["empirical", "gaussian"])
def test_a_head_that_is_taken_out_of_the_model_leaves_the_rest_training(fisher: str) -> None:
    """Its parameters, still in the groups, have no gradients any more; it may come back."""
    model = make()
    optimizer = KFACSGD(model, lr=0.05, fisher=fisher, **OFTEN)
    train(model, optimizer, range(STEPS))
    model[2] = nn.Identity()
    train(model, optimizer, range(STEPS, 2 * STEPS))
    assert optimizer.curvature.stages.progress.last_statistics == 2 * STEPS - 1
    assert backward(model, 0).isfinite()


def test_modules_that_come_and_go_in_every_step_keep_their_statistics() -> None:
    """Layer drop, or heads that train by turns: the others collect statistics, too, and nobody is warned."""
    model = make()
    heads = model[2], nn.Linear(*reversed(model[2].weight.shape)).double()
    optimizer = KFACSGD([*model.parameters(), *heads[1].parameters()], lr=0.05, **OFTEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4 * STEPS):
            model[2] = heads[step % 2]
            train(model, optimizer, range(step, step + 1))
    blocks = optimizer.curvature.stages.blocks
    assert [block.has_direction for block in blocks] == [True] * 3
    assert optimizer.curvature.stages.progress.last_statistics == 4 * STEPS - 1


def test_layers_have_the_names_of_where_they_are_now() -> None:
    """A layer that is put in front of the others moves them on."""
    model = make()
    optimizer = KFACSGD(model, lr=0.05, **OFTEN)
    train(model, optimizer, range(STEPS))
    known = {id(layer.weight): optimizer.curvature.factors(layer.name) for layer in optimizer.curvature.layers}
    model.insert(0, nn.Linear(4, 4).double())
    optimizer.add_param_group({"params": list(model[0].parameters())})
    names = {layer.name: layer.weight for layer in optimizer.curvature.layers}
    assert {name: model.get_submodule(name).weight for name in names} == names and len(names) == 3
    for name, weight in names.items():
        if id(weight) in known:
            assert all(map(torch.equal, optimizer.curvature.factors(name), known[id(weight)]))
    train(model, optimizer, range(STEPS, 2 * STEPS))
    assert all(block.has_direction for block in optimizer.curvature.stages.blocks)
