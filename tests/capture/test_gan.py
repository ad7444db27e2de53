"""Two players, two optimizers: nobody's statistics take up what was computed for the other."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACSGD
from tests.helpers.compare import (
    SAME,
    assert_near,
    assert_same_factors,
    assert_same_weights,
    assert_step_alike,
    factors_of,
)
from tests.helpers.settings import OPTIONS

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 3


def players() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(2, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    discriminator = nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1))
    return generator, discriminator


def fool(output: Tensor) -> Tensor:
    return F.softplus(-output).mean()


def judge(real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-real).mean() + F.softplus(fake).mean()


class Game:
    """A GAN in the usual loop; ``apart`` computes each player's gradient on copies that have no hooks of the other."""

    def __init__(self, models: tuple[nn.Module, nn.Module], **keywords: object) -> None:
        self.g, self.d = copy.deepcopy(models)
        options = OPTIONS | {"momentum": 0.9} | keywords
        self.opt_g, self.opt_d = KFACSGD(self.g, **options), KFACSGD(self.d, **options)

    def step_d(self, real: Tensor, z: Tensor, detach: bool) -> None:
        self.opt_d.zero_grad()
        fake = self.g(z).detach() if detach else self.g(z)
        judge(self.d(real), self.d(fake)).backward()
        self.opt_d.step()

    def step_g(self, z: Tensor) -> None:
        self.opt_g.zero_grad()
        fool(self.d(self.g(z))).backward()
        self.opt_g.step()

    def step_d_alone(self, real: Tensor, z: Tensor) -> None:
        """The generator is a copy that nobody watches."""
        self.opt_d.zero_grad()
        fake = copy.deepcopy(self.g)(z).detach()
        judge(self.d(real), self.d(fake)).backward()
        self.opt_d.step()

    def step_g_alone(self, z: Tensor) -> None:
        self.opt_g.zero_grad()
        fool(copy.deepcopy(self.d)(self.g(z))).backward()
        self.opt_g.step()


def rounds() -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(torch.randn(6, 3), torch.randn(6, 2), torch.randn(6, 2)) for _ in range(STEPS)]


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("order", ["discriminator first", "generator first"])
@pytest.mark.parametrize("intervals", [1, 2])
def test_the_players_leave_each_other_alone(detach: bool, order: str, intervals: int) -> None:
    models = players()
    keywords = {"factor_update_steps": intervals, "inv_update_steps": intervals}
    game, apart = Game(models, **keywords), Game(models, **keywords)
    for real, z_d, z_g in rounds():
        for turn in ("dg", "gd")[order == "generator first"]:
            if turn == "d":
                game.step_d(real, z_d, detach)
                apart.step_d_alone(real, z_d)
            else:
                game.step_g(z_g)
                apart.step_g_alone(z_g)
    for ours, theirs in ((game.opt_g, apart.opt_g), (game.opt_d, apart.opt_d)):
        assert_same_factors(ours, theirs)
    assert_same_weights(game.g, apart.g)
    assert_same_weights(game.d, apart.d)


def test_the_other_players_gradients_are_forgotten_with_them() -> None:
    """Several generator steps between two of the discriminator: its own ``zero_grad`` clears what they left there."""
    models = players()
    game, apart = Game(models), Game(models)
    for real, z_d, z_g in rounds():
        for _ in range(3):
            game.step_g(z_g)
            apart.step_g_alone(z_g)
        game.step_d(real, z_d, detach=True)
        apart.step_d_alone(real, z_d)
    assert_same_factors(game.opt_d, apart.opt_d)
    assert_same_weights(game.d, apart.d)
    assert game.opt_d.curvature.step_count == STEPS


def test_the_other_player_frozen_by_requires_grad() -> None:
    models = players()
    game, apart = Game(models), Game(models)
    for real, z_d, z_g in rounds():
        game.step_d(real, z_d, detach=True)
        apart.step_d_alone(real, z_d)
        game.d.requires_grad_(False)
        game.step_g(z_g)
        game.d.requires_grad_(True)
        apart.step_g_alone(z_g)
    assert_same_factors(game.opt_g, apart.opt_g)
    assert_same_factors(game.opt_d, apart.opt_d)
    assert_same_weights(game.d, apart.d)


def penalty(d: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """WGAN-GP's: the norm of the gradient at points in between."""
    x = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(d(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("where", ["before", "after"])
def test_the_inner_backward_of_a_gradient_penalty_is_ignored(where: str) -> None:
    """At weight 0 the penalty gives no gradient; the backward pass inside it leaves no trace in the statistics."""
    _, model = players()
    plain = copy.deepcopy(model)
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(plain, **OPTIONS)
    for real, _, _ in rounds():
        fake = torch.randn(6, 3)
        if where == "before":
            penalty(model, real, fake)
        losses = [judge(m(real), m(fake)) for m in (model, plain)]
        if where == "after":
            penalty(model, real, fake)
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


def test_the_final_gradient_of_a_penalty_reaches_the_step() -> None:
    """The step preconditions the whole gradient, penalty included; G stays finite and the critic learns."""
    _, model = players()
    optimizer = KFACSGD(model, **(OPTIONS | {"lr": 0.05}))
    raw = None
    real, fake = torch.randn(32, 3) + 2, torch.randn(32, 3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(fake).mean() - model(real).mean() + 10 * penalty(model, real, fake)
        expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        raw = [p.grad.clone() for p in model.parameters()]
        for found, wanted in zip(raw, expected, strict=True):
            assert_near(found, wanted, "gradient", SAME)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1.0
    assert all(bool(factor.isfinite().all()) for factor in factors_of(optimizer).values())
