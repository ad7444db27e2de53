"""Lengths of directions: which norms are taken, how often, and how where launches count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kfac_optim import KFACSGD, Graft, Orthogonal, Unit
from kfac_optim.scaling import scaled_by
from kfac_optim.stacks import Direction, Groups, Matrices, Stacked
from kfac_optim.stacks.matrices import FlatStorage
from kfac_optim.stacks.stacked import Steepest
from kfac_optim.steering.brake import Brake
from kfac_optim.steering.graft import grafted
from kfac_optim.steering.reach import stretches
from kfac_optim.steering.trust import changes_at
from tests.helpers.training import train

CPU = torch.device("cpu")


def direction(layers: list[int] | None, shape: tuple[int, ...] = (3, 2)) -> Direction:
    """A stack of 6 pairs; of norm layers with so many pairs each."""
    k, u = torch.randn(2, 6, *shape, dtype=torch.float64)
    return Direction(k, u, u, 0.1, None if layers is None else Groups.of(layers, CPU))


def stacked(k: Tensor, m: Tensor, u: Tensor, steepest: Steepest | None = None, groups: Groups | None = None) -> Stacked:
    """A single stack."""
    gradients, updates = Matrices([m], [groups]), Matrices([u], [groups])
    return Stacked(Matrices([k], [groups]), gradients, gradients if u is m else updates, [0.1], steepest)


def test_norms_and_products_of_matrices_side_by_side_are_those_of_stacks() -> None:
    """Pair by pair, and layer by layer where the pairs of a layer are scaled together."""
    stacks = [direction(None, (4, 4)), direction(None, (2, 12)), direction([4, 2], (2, 2)), direction(None, (5, 3))]
    shapes, groups = [(6, *d.update.shape[1:]) for d in stacks], [d.groups for d in stacks]
    storage = FlatStorage(shapes, groups, CPU, [False] * len(shapes))
    assert (storage.stacks_multiplied, storage.stacks_summed) == (2, 3)
    assert storage.multiplied_shape == (30, 1, 8) and storage.summed_shape == (33, 1, 8)
    beside, others = storage.several(2, torch.float64)
    apart = Stacked.of(stacks)
    for flat, matrices in ((beside, apart.updates), (others, apart.directions)):
        torch._foreach_copy_(flat.tensors, matrices.tensors)
    for found, expected in (
        (beside.norms(), [d.norm(d.update) for d in stacks]),
        (beside.inners(others), [d.inner(d.update, d.direction) for d in stacks]),
        (apart.updates.norms(), [d.norm(d.update) for d in stacks]),
        (apart.updates.inners(apart.directions), [d.inner(d.update, d.direction) for d in stacks]),
    ):
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-12, atol=0)
    lengths = [matrices.length(matrices.norms()) for matrices in (beside, apart.updates)]
    whole = torch.cat([d.update.flatten() for d in stacks]).norm()
    torch.testing.assert_close(lengths, [whole] * 2, rtol=1e-12, atol=0)


def test_a_scaling_may_look_at_some_stacks() -> None:
    stacks = [direction(None) for _ in range(3)]
    for found, own in zip(Stacked.of(stacks)[1:], stacks[1:], strict=True):
        assert found.direction is own.direction


def as_long_as_update(d: Direction) -> Stacked:
    """A direction as long as the update."""
    return scaled_by(Graft(), Stacked.of([d]), 0)


def test_the_norm_of_an_update_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scaling, and not again to bring the turned update to that length."""
    taken: list[Tensor] = []
    matrix_norm = torch.linalg.matrix_norm
    monkeypatch.setattr(torch.linalg, "matrix_norm", lambda x: (taken.append(x), matrix_norm(x))[1])
    d = direction([2, 4])
    longer = as_long_as_update(d)
    (change,) = changes_at(longer, 0.3).tensors
    assert [x is d.update for x in taken] == [True, False, False]
    torch.testing.assert_close(d.norm(d.update + change), d.norm(d.update), rtol=1e-12, atol=0)


@pytest.mark.parametrize("trust", [0.3, 1.0])
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25, dtype=torch.float64)], ids=["cpu", "device"])
def test_a_brake_shortens_what_trust_gives_to_the_direction(trust: float, factor: float | torch.Tensor) -> None:
    d = direction([2, 4])
    longer = as_long_as_update(d)
    (free,) = changes_at(longer, trust).tensors
    (braked,) = changes_at(longer, trust, Brake().share(trust, factor)).tensors
    step = (1 - trust + 0.25 * trust) * (d.update + free)
    torch.testing.assert_close(d.update + braked, step, rtol=1e-12, atol=1e-12)


def test_a_brake_acts_where_an_update_is_longer_than_usual() -> None:
    length, brake = torch.tensor(2.6), Brake()
    assert brake.of(length) is None, "nothing is known yet"
    brake.usual = 2.0
    assert brake.of(length) is None, "1.3 times as long is not much"
    brake.usual = 1.0
    assert brake.of(length) == pytest.approx(0.25)
    assert brake.of(torch.tensor(0.0)) is None


def test_a_pause_without_gradients_makes_none_outsized() -> None:
    brake = Brake()
    for largest in (2.0, *[0.0] * 50, 2.0):
        brake.learn(1.0 if largest else 0.0, largest, grows=True)
        assert brake.entry == 2.0 and not brake.is_outsized
    brake.learn(1.0, 11.0, grows=True)
    assert brake.is_outsized


@pytest.mark.parametrize("is_tensor", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("excess", [2.0, 5.0, 50.0])
@pytest.mark.parametrize("trust", [0.0, 0.3, 0.6])
def test_an_outsized_step_has_five_times_the_usual_length_of_the_bases_update(
    trust: float, excess: float, is_tensor: bool
) -> None:
    brake, given = Brake(), (1.3 / excess) ** 2
    given = torch.tensor(given) if is_tensor else given
    assert (brake.share(trust, given) is None) == (trust == 0), "not outsized: the base copes with its own steps"
    brake.is_outsized = True
    expected = trust * (1.3 / excess) ** 2 + (1 - trust) * min(1.0, 5 / excess)
    assert float(brake.share(trust, given)) == pytest.approx(expected, rel=1e-6)
    assert brake.share(trust, None) is None


def test_no_step_is_outsized_where_updates_do_not_grow_with_the_gradient() -> None:
    """As under Adam: the base's share is left alone, and the usual length is the plain average, however long one is."""
    for grows in (False, True):
        brake = Brake()
        for length in (1.0, 100.0):
            brake.learn(length, length, grows=grows)
        assert brake.last < (1.3 / 5) ** 2
        assert brake.is_outsized == grows
        assert brake.usual == pytest.approx((1 + (5 if grows else 100)) / 2)
        assert brake.entry == (pytest.approx(0.9 + 0.1 * 5) if grows else 0), "of no use, and other ranks may differ"


@pytest.mark.parametrize("graft", [0.0, 0.3, 1.0])
def test_a_shortened_direction_shortens_each_component(graft: float) -> None:
    """Of 1 - graft = 1 nothing is left but the damping's share of each component of the base's step."""
    torch.manual_seed(0)
    eigenvalues = torch.rand(4, 3, 2, dtype=torch.float64) * torch.tensor([1.0, 10.0, 100.0, 0.0])[:, None, None]
    largest, m = eigenvalues.amax((1, 2)), torch.randn(4, 3, 2, dtype=torch.float64)
    largest[3] = 1.0  # nothing is steep: the base's own step
    gamma = 0.1 * largest[:, None, None]
    u = 0.5 * m
    flat = gamma / (eigenvalues + gamma) * m
    k = flat * (u.norm(dim=(1, 2)) / flat.norm(dim=(1, 2)))[:, None, None]
    steepest = ((largest + gamma[:, 0, 0]) / gamma[:, 0, 0]) * (flat.norm(dim=(1, 2)) / u.norm(dim=(1, 2)))
    found = grafted(stacked(k, m, u, Steepest(steepest, 11.0)), graft)
    (direction,) = found.directions.tensors
    shares = 0.5 * flat.norm(dim=(1, 2)) / u.norm(dim=(1, 2))
    torch.testing.assert_close(direction, k * (shares ** (1 - graft))[:, None, None], rtol=1e-12, atol=1e-12)
    if graft == 0:
        torch.testing.assert_close(direction, 0.5 * flat, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(direction[3], u[3], rtol=1e-12, atol=1e-12)
    elif graft == 1:
        assert direction is k
    assert found.steepest is not None
    (whole,) = found.directions.times(found.steepest.multipliers).tensors  # what the stretch begins with
    torch.testing.assert_close(whole, flat * 11.0, rtol=1e-12, atol=1e-12)


def test_directions_of_another_damping_are_not_grafted() -> None:
    of = Stacked.of([direction(None)])
    assert grafted(of, 0.0) is of and not grafted(Stacked.of([]), 0.0)


def test_a_step_is_brought_back_to_the_length_that_directions_have() -> None:
    """All of the update's length, none, or in between."""
    d = direction([2, 4])
    mixture = torch.lerp(d.update, d.direction, 0.3)
    for graft in (0.0, 0.4, 1.0):
        (change,) = changes_at(Stacked.of([d]), 0.3, graft=graft).tensors
        longer = (d.norm(d.update) / d.norm(mixture)) ** graft
        torch.testing.assert_close(d.update + change, mixture * longer[:, None, None], rtol=1e-12, atol=1e-12)


def test_the_rate_of_a_base_is_computed_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """To shorten the direction, and not again for the stretch."""
    taken: list[int] = []
    inners = Matrices.inners
    monkeypatch.setattr(Matrices, "inners", lambda *given: (taken.append(1), inners(*given))[1])
    k, m, u = torch.randn(3, 6, 3, 2, dtype=torch.float64)
    u = u + 3 * m
    shorter = grafted(stacked(k, m, u, Steepest(torch.full((6,), 2.0, dtype=torch.float64), 11.0)), 0.5)
    (found,) = stretches(shorter).tensors
    rate = (u * m).sum((1, 2)) / (m * m).sum((1, 2))
    torch.testing.assert_close(found, rate.clamp(min=0)[:, None, None] * (2 * k - m), rtol=1e-9, atol=1e-12)
    assert taken == [1]


def test_orthogonal_moves_singular_values_alone() -> None:
    """Each by Muon's polynomial; the singular vectors stay, and the norm is that of the unit scaling."""
    wide, zero = torch.randn(4, 3, 7, dtype=torch.float64), torch.zeros(1, 3, 7, dtype=torch.float64)
    for matrices in (torch.cat([wide, zero]), torch.cat([wide, zero]).mT):
        d = Direction(matrices, matrices, matrices, 0.1)
        (found,) = scaled_by(Orthogonal(), Stacked.of([d]), 0)
        u, s, v = torch.linalg.svd(wide if matrices.shape[1] == 3 else wide.mT, full_matrices=False)
        s = s / s.norm(dim=1, keepdim=True)
        for _ in range(3):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        expected = u * s[:, None] @ v
        expected *= Unit.target(d)[:4, None, None] / torch.linalg.matrix_norm(expected)[:, None, None]
        torch.testing.assert_close(found.direction, torch.cat([expected, matrices[4:]]), rtol=1e-10, atol=1e-12)


def test_what_changes_directions_is_not_stretched() -> None:
    """Because it is not known any more how flat their components are: trust alone is learned."""

    class Turned(Graft):
        def turned(self, directions: Any) -> Any:
            return Orthogonal().turned(directions)

    model = torch.nn.Linear(4, 3)
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, scaling=Turned())
    train(model, optimizer, range(12))
    assert optimizer.curvature.stages.plan().learns and not optimizer.curvature.stages.plan().stretches


def test_orthogonal_leaves_norm_layers_alone() -> None:
    """Their pairs are channels, 2 x 2 blocks that say nothing of one another."""
    d = direction([2, 4])
    (unit,), (found,) = (scaled_by(scaling, Stacked.of([d]), 0) for scaling in (Unit(), Orthogonal()))
    torch.testing.assert_close(found.direction, unit.direction, rtol=0, atol=0)


@pytest.mark.parametrize("returned", [None, [], [1.0], [()], [torch.ones(5)], [torch.ones(6, 1)], [torch.ones(())] * 2])
def test_what_are_no_multipliers_is_refused_by_name(returned: Any) -> None:
    """Of a scaling of the user's own, which returns one number, or one for each of the 6 pairs."""

    class Own:
        def multipliers(self, directions: Any, step: int) -> Any:
            return returned

    of = Stacked.of([direction(None)])
    with pytest.raises(ValueError, match=r"Own.*multipliers\(\) has returned \[.*must be one tensor.*\[\(6,\)\]"):
        scaled_by(Own(), of, 0)
