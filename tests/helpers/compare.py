"""Two runs side by side: what both optimizers know of the curvature, and where their models are."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from kfac_optim import CurvatureEngine
from kfac_optim.optimizers import KFACMixin
from tests.helpers.reference import EXACT, assert_near

# EXACT, at a damping that neither hides the curvature nor leaves it alone, and a step that keeps training stable.
OPTIONS: dict[str, object] = EXACT | {"lr": 0.1, "damping": 0.1}
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
