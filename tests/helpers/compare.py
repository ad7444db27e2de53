"""Comparisons: of tensors, parameters and states, of two runs side by side, of a step with what the oracle expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kfac_optim import CurvatureEngine
from kfac_optim.optimizers import KFACMixin

if TYPE_CHECKING:
    from tests.helpers.reference import Named, Oracle

REL_TOL = 1e-8  # exact arithmetic in float64: what is left is rounding, amplified by the condition number of the solve
ROUNDING = 1e-14  # a weight change is a difference of two weights, so it carries the rounding of the weights
SAME = 1e-10  # the same float64 arithmetic in another order, a few steps of it


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two models with the same weights."""
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    return model, twin


def factors_of(source: KFACMixin | CurvatureEngine) -> dict[str, Tensor]:
    """Every factor by layer and side, ``"0.A"`` for instance."""
    engine = source if isinstance(source, CurvatureEngine) else source.curvature
    return {
        f"{layer.name}.{side}": factor.double()
        for layer in engine.layers
        for side, factor in zip("AG", engine.factors(layer), strict=True)
    }


def assert_same_factors(actual: KFACMixin, expected: KFACMixin, rel: float = SAME) -> None:
    """The running averages of both optimizers are equal."""
    found, wanted = factors_of(actual), factors_of(expected)
    assert list(found) == list(wanted)
    for name, factor in wanted.items():
        assert float(factor.norm()) > 0, f"{name} is zero: nothing to compare"
        assert_near(found[name], factor, name, rel, scale=0.0)


def assert_same_weights(actual: nn.Module, expected: nn.Module, rel: float = SAME) -> None:
    """All parameters and buffers of both models are equal."""
    found, wanted = actual.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert_near(found[name].double(), value.double(), name, rel)


def assert_step_alike(*runs: tuple[nn.Module, KFACMixin, Tensor], rel: float = SAME) -> None:
    """A step of each model on its loss, after which all have the same factors and weights, and no gradients."""
    for _, optimizer, loss in runs:
        loss.backward()
        optimizer.step()
    (model, optimizer, _), *others = runs
    for other, its, _ in others:
        assert_same_factors(optimizer, its, rel)
        assert_same_weights(model, other, rel)
    for _, each, _ in runs:
        each.zero_grad()


def snapshot(model: nn.Module) -> Named:
    """A copy of the state of the model."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def parameters(model: nn.Module) -> Named:
    """A copy of the parameters, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_near(actual: Tensor, expected: Tensor, what: str = "", rel: float = REL_TOL, scale: float = 1.0) -> None:
    """Compare in the Frobenius norm; ``scale`` is the size of the weights whose difference ``actual`` is."""
    assert actual.shape == expected.shape, f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)}"
    assert bool(actual.isfinite().all()), f"{what}: not finite: {actual}"
    error, allowed = float((actual - expected).norm()), rel * float(expected.norm()) + ROUNDING * scale
    assert error <= allowed, f"{what}: error {error:.3g} > {allowed:.3g}\nactual {actual}\nexpected {expected}"


def assert_applied(
    oracle: Oracle,
    changes: Named,
    directions: dict[str, Tensor],
    gradients: Named,
    lr: float = 1.0,
) -> None:
    """Every layer moved by ``-lr`` times its direction, every other parameter by ``-lr`` times its gradient."""
    size = 1.0 + max(float(p.detach().norm()) for p in oracle.model.parameters())
    for layer in oracle.layers:
        expected = -lr * directions[layer.name]
        for k, (moved, wanted) in enumerate(zip(layer.of(changes), expected, strict=False)):
            assert_near(moved, wanted, f"layer {layer.name!r}, block {k}", scale=size)
    for name in oracle.uncovered():
        assert_near(changes[name], -lr * gradients[name], name, scale=size)


def values(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def assert_identical(model: nn.Module, other: nn.Module) -> None:
    """The same parameters, bit for bit, and finite."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert bool(p.isfinite().all()), f"{name} is not finite"
        assert torch.equal(p, q), f"{name} differs by up to {float((p - q).detach().abs().max()):.3g}"


def assert_close(model: nn.Module, other: nn.Module, tolerance: float) -> None:
    """The same parameters up to a tolerance, relative and absolute."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def assert_equal_on_ranks(outcomes: list[list[Tensor]]) -> None:
    """Bit for bit: ranks that differ at all drift apart."""
    for found in outcomes[1:]:
        for p, q in zip(found, outcomes[0], strict=True):
            assert torch.equal(p, q) and bool(p.isfinite().all())


def assert_all_near(
    outcomes: Iterable[list[Tensor]], expected: list[Tensor], tolerance: float = 1e-9, case: str = ""
) -> None:
    """Every rank has the expected parameters, up to the order of sums."""
    for rank, found in enumerate(outcomes):
        for p, q in zip(found, expected, strict=True):
            torch.testing.assert_close(
                p, q, rtol=tolerance, atol=tolerance, msg=lambda text, r=rank: f"{case}, rank {r}: {text}"
            )


def assert_trained(model: nn.Module, before: list[Tensor]) -> None:
    """Every parameter has changed: a comparison of two models that both stood still proves nothing."""
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert not torch.equal(p, old), f"{name} has not changed"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts and lists, with where it stands."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from leaves(item, f"{path}.{key}")


def assert_same_state(state: Any, other: Any) -> None:
    """The same keys, dtypes and values, bit for bit."""
    found, expected = dict(leaves(state)), dict(leaves(other))
    assert found.keys() == expected.keys()
    for path, value in found.items():
        if isinstance(value, Tensor):
            assert value.dtype == expected[path].dtype, path
            assert torch.equal(value, expected[path]), path
        else:
            assert value == expected[path] or value != value, path
