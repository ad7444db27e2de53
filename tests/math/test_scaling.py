"""Lengths of directions: which norms are taken, how often, and how where launches count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kfac_optim import Graft
from kfac_optim.scaling import Direction, _few_norms, norms, scaled
from kfac_optim.trust import brake, changes_at


def direction(layers: list[int] | None, shape: tuple[int, ...] = (3, 2)) -> Direction:
    """A stack of 6 pairs; of norm layers with so many pairs each."""
    k, u = torch.randn(2, 6, *shape, dtype=torch.float64)
    if layers is None:
        return Direction(k, u, u, 0.1)
    return Direction(k, u, u, 0.1, torch.arange(len(layers)).repeat_interleave(torch.tensor(layers)), layers)


def test_norms_of_parts_are_those_of_stacks() -> None:
    """Pair by pair, and layer by layer where the pairs of a layer are scaled together."""
    plain = direction([1, 3, 2], (2, 1))
    unknown = Direction(plain.direction, plain.gradient, plain.update, 0.1, plain.layer_of_pair)
    stacks = [direction(None), plain, unknown, direction(None, (5, 4))]
    matrices = [d.update for d in stacks]
    for found, expected in zip(_few_norms(stacks, matrices), norms(stacks, matrices), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_the_norm_of_an_update_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scaling, and not again to bring the turned update to that length."""
    taken: list[Tensor] = []
    matrix_norm = torch.linalg.matrix_norm
    monkeypatch.setattr(torch.linalg, "matrix_norm", lambda x: (taken.append(x), matrix_norm(x))[1])
    d = direction([2, 4])
    (multiplier,) = Graft().multipliers([d], 0)
    (longer,) = scaled([d], [multiplier])
    (change,) = changes_at([longer], 0.3)
    assert [x is d.update for x in taken] == [True, False, False]
    torch.testing.assert_close(longer.norm(d.update + change), d.norm(d.update), rtol=1e-12, atol=0)


@pytest.mark.parametrize("trust", [0.3, 1.0])
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25)], ids=["cpu", "device"])
def test_a_brake_shortens_what_trust_gives_to_the_direction(trust: float, factor: float | torch.Tensor) -> None:
    d = direction([2, 4])
    (multiplier,) = Graft().multipliers([d], 0)
    (longer,) = scaled([d], [multiplier])
    (free,) = changes_at([longer], trust)
    (braked,) = changes_at([longer], trust, factor)
    step = (1 - trust + 0.25 * trust) * (d.update + free)
    torch.testing.assert_close(d.update + braked, step, rtol=1e-12, atol=1e-12)


def test_a_brake_acts_where_an_update_is_longer_than_usual() -> None:
    length = torch.tensor(2.6)
    assert brake(length, 0.0) is None, "nothing is known yet"
    assert brake(length, 2.0) is None, "1.3 times as long is not much"
    assert brake(length, 1.0) == pytest.approx(0.25)
    assert brake(torch.tensor(0.0), 1.0) is None
