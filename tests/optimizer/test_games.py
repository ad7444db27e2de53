"""What the optimizers of networks that train against each other leave out, and what happens when the game ends."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KFACSGD, Graft, KFACAdam
from kfac_optim.steering import opponents
from tests.helpers.files import through_a_file
from tests.helpers.settings import FLOAT64

pytestmark = pytest.mark.usefixtures("float64")

SOMETIMES: dict[str, Any] = {"factor_update_steps": 3, "inv_update_steps": 6, "spread": 0, **FLOAT64}
KNOWN = 4  # steps until it is known: the second one with statistics is the fourth
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (KFACAdam, {"lr": 0.01}),
    (KFACSGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    (KFACSGD, {"lr": 0.05}),
]


class Game:
    """A small GAN.

    Args:
        kfac: The class of both optimizers.
        how: Its keywords.
        zeroed_at_once: Whether gradients are cleared after each step as well as before it, so that none are left for
            the other's backward pass to add to. Such a game is seen in steps with statistics only.
        detached: Whether the discriminator's passes end at its inputs; else the generator gets gradients to throw away.
    """

    def __init__(self, kfac: Any, how: dict[str, Any], *, zeroed_at_once: bool = False, detached: bool = True) -> None:
        torch.manual_seed(0)
        self.kfac, self.how = kfac, {**SOMETIMES, **how}
        self.zeroed_at_once, self.detached = zeroed_at_once, detached
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 6), nn.LeakyReLU(), nn.Linear(6, 1))
        self.steps, self.optimizers = 0, self.new_optimizers()

    def new_optimizers(self) -> list[Any]:
        return [self.kfac(player.parameters(), **self.how) for player in (self.generator, self.discriminator)]

    def play(self, rounds: int, *, generates: bool = True, discriminates: bool = True) -> None:
        """Both take some steps by turns, or only one of them does."""
        for _ in range(rounds):
            source = torch.Generator().manual_seed(self.steps)
            real, noise = torch.randn(8, 7, generator=source).split([3, 4], 1)
            self.steps += 1
            if discriminates:
                self._step(1, self._judged, real + 1, noise)
            if generates:
                self._step(0, self._made, noise)

    def _judged(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = self.generator(noise)
        fake = fake.detach() if self.detached else fake
        return F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()

    def _made(self, noise: Tensor) -> Tensor:
        return F.softplus(-self.discriminator(self.generator(noise))).mean()

    def train_apart(self, rounds: int) -> None:
        """Both take steps by turns, and neither throws gradients away."""
        for _ in range(rounds):
            self._step(1, lambda: self.discriminator(torch.randn(8, 3)).square().mean())
            self._step(0, lambda: self.generator(torch.randn(8, 4)).square().mean())

    def _step(self, player: int, loss: Callable[..., Tensor], *given: Tensor) -> None:
        optimizer = self.optimizers[player]
        optimizer.zero_grad()
        loss(*given).backward()
        optimizer.step()
        if self.zeroed_at_once:
            optimizer.zero_grad()

    @property
    def engines(self) -> list[Any]:
        return [optimizer.curvature for optimizer in self.optimizers]

    @property
    def done(self) -> list[tuple[int, int | None]]:
        """For each player, how many refreshes have begun, and the last step with statistics."""
        return [(engine.stages.refresher.refreshes, engine.stages.progress.last_statistics) for engine in self.engines]

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for player in (self.generator, self.discriminator) for p in player.parameters()]


@pytest.mark.parametrize(("kfac", "how"), CLASSES)
def test_players_neither_refresh_nor_learn(kfac: Any, how: dict[str, Any]) -> None:
    game = Game(kfac, how)
    game.play(KNOWN)
    assert game.done == [(1, 3)] * 2 and all(engine.stages.sits_out for engine in game.engines)
    for engine in game.engines:
        engine.stages.steering.graft.hundredths = 50
    game.play(20)
    assert game.done == [(1, 21)] * 2
    for engine in game.engines:
        assert engine.stages.steering.graft.hundredths == 50
        assert engine.report()["staleness"] == 24 and engine.stages.refresher.last_refresh is None


@pytest.mark.parametrize(
    "keywords", [{"scaling": Graft(stretch=True)}, {"scaling": Graft(0.5)}, {"scaling": "kl_clip"}]
)
def test_who_turns_in_games_refreshes_in_them(keywords: dict[str, Any]) -> None:
    game = Game(KFACAdam, {"lr": 0.01, **keywords})
    game.play(20)
    assert game.done == [(4, 18)] * 2


def test_so_does_who_preconditions_gradients() -> None:
    game = Game(KFACSGD, {"lr": 0.01, "precondition": "gradient"})
    game.play(20)
    assert game.done == [(4, 18)] * 2


@pytest.mark.parametrize("player", [0, 1])
@pytest.mark.parametrize(("kfac", "how"), CLASSES[:2])  # plain SGD would learn the decay of averages a step later
def test_a_refresh_at_once_when_the_game_ends(
    kfac: Any, how: dict[str, Any], player: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an optimizer for which one is due in that step."""
    game = Game(kfac, how)
    game.play(20)
    engine, alone = game.engines[player], {"generates": player == 0, "discriminates": player == 1}
    before = pickle.dumps(game)
    while engine.stages.sits_out:
        assert engine.stages.refresher.refreshes == 1 and engine.step_count <= 20 + opponents._LATELY
        before = pickle.dumps(game)
        game.play(1, **alone)
    last, weights = engine.step_count - 1, game.weights
    assert (
        engine.stages.refresher.refreshes == 2
        and engine.stages.refresher.frozen_at == engine.stages.refresher.last_refresh == last
    )
    for block in engine.stages.blocks:
        for side in range(2):
            assert torch.equal(block.factors("in_use").matrix(side), block.factors("current").matrix(side))
    game.play(6, **alone)
    assert engine.stages.refresher.refreshes == 3 and engine.stages.refresher.last_refresh == last + 6, (
        "as scheduled from then on"
    )
    other: Game = pickle.loads(before)
    other.engines[player].stages.steering.game.load({"opposes": 0})  # nor is anybody else known to be in a game
    other.engines[player].stages.refresher.refresh_next_step()
    monkeypatch.setattr(opponents, "OPPONENTS", opponents.Opponents())
    other.play(1, **alone)
    torch.testing.assert_close(other.weights, weights, rtol=0, atol=0)


def test_a_refresh_that_was_not_due_in_a_game_is_made_when_it_is_due() -> None:
    game = Game(KFACAdam, {"lr": 0.01, "inv_update_steps": 60, "factor_update_steps": 4})
    game.play(10)
    game.play(30, generates=False)
    assert not game.engines[1].stages.sits_out and game.engines[1].stages.refresher.refreshes == 1
    game.play(22, generates=False)
    assert game.done[1][0] == 2 and game.engines[1].stages.refresher.last_refresh == 60


def test_a_game_is_known_once_gradients_were_thrown_away_twice() -> None:
    """Before the second step that collects statistics, which is the fourth."""
    game = Game(KFACAdam, {"lr": 0.01})
    game.play(2)
    assert not any("two networks" in str(player.curvature) for player in game.optimizers)
    game.play(1)
    assert all("two networks" in str(player.curvature) for player in game.optimizers)


def test_a_game_that_only_statistics_show_is_watched_by_them() -> None:
    """The discriminator's. A generator knows of its opponent without them."""
    game = Game(KFACAdam, {"lr": 0.01}, zeroed_at_once=True)
    game.play(22)
    assert all(engine.stages.sits_out for engine in game.engines)
    game.play(2, generates=False)
    assert game.engines[1].stages.sits_out
    game.play(1, generates=False)  # the next step with statistics
    assert not game.engines[1].stages.sits_out and game.done[1] == (2, 24)


@pytest.mark.parametrize("zeroed_at_once", [False, True])
def test_two_who_throw_gradients_away_do_not_keep_each_other_in_the_game(zeroed_at_once: bool) -> None:
    game = Game(KFACAdam, {"lr": 0.01}, zeroed_at_once=zeroed_at_once, detached=False)
    game.play(20)
    assert all(engine.stages.steering.game.opposes for engine in game.engines)
    game.train_apart(opponents._LATELY + 3)
    assert not any(engine.stages.sits_out for engine in game.engines)
    assert all(refreshes > 1 for refreshes, _ in game.done)


def saved(game: Game) -> Game:
    """Goes on from states; the generator's is loaded before its opponent is there."""
    states = [through_a_file(optimizer.state_dict()) for optimizer in game.optimizers]
    game.optimizers = game.new_optimizers()
    for optimizer, state in zip(game.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    return game


def pickled(game: Game) -> Game:
    found: Game = pickle.loads(pickle.dumps(game))
    return found


@pytest.mark.parametrize("go_on", [saved, copy.deepcopy, pickled])
@pytest.mark.parametrize("zeroed_at_once", [False, True])
@pytest.mark.parametrize("player", [0, 1])
def test_whoever_goes_on_from_a_game_does_what_it_would_have_done(
    player: int, zeroed_at_once: bool, go_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, wherever in the game; the discriminator at its end, too (a generator forgets others by counting)."""
    alone = {"generates": player == 0, "discriminates": player == 1}

    def run(cut: int | None) -> list[Any]:
        monkeypatch.setattr(opponents, "OPPONENTS", opponents.Opponents())  # of the runs before nobody is left
        game = Game(KFACAdam, {"lr": 0.01}, zeroed_at_once=zeroed_at_once)
        for step in range(36):
            if step == cut:
                game = go_on(game)
            game.play(1, **(alone if step >= 10 else {}))
        return [game.done[player], [p.tolist() for p in game.weights]]

    whole = run(None)
    assert whole[0][0] > 1, "it has refreshed since"
    for cut in (5, 9, 10, 11, 24, 25, 26, 27) if player else (5, 9):
        assert run(cut) == whole, f"cut before step {cut}"


def test_a_step_that_fails_is_none_that_was_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a network would seem to have taken two steps in a row, as one does that plays no game."""
    game = Game(*CLASSES[0])
    game.play(3)
    with monkeypatch.context() as patched:
        patched.setattr(game.optimizers[1], "_base_step", lambda: pytest.fail("out of memory"))
        with pytest.raises(pytest.fail.Exception, match="out of memory"):
            game.play(1)
    game.play(2)  # gradients are thrown away before the second step
    known = game.engines[1].stages.steering.game
    assert (known.since_lost, known.alone_for) == (1, 0)


def test_what_a_skipped_step_has_seen_of_a_game_is_saved() -> None:
    """The next step that is taken judges it, in a resumed run, too."""
    game = Game(*CLASSES[0])
    game.play(1)
    for parameter in game.discriminator.parameters():
        parameter.register_hook(lambda g: g * torch.nan)
    game.play(1)
    discriminator = game.optimizers[1]
    assert discriminator.curvature.skipped_steps == 1
    saved = through_a_file(discriminator.state_dict())
    assert [group["kfac_added_lost"] for group in saved["param_groups"]] == [1]


def test_a_dropped_player_is_forgotten_though_its_last_loss_is_kept() -> None:
    """The graph of the loss holds the hooks, which must not hold what the optimizer knows of the game."""
    game = Game(*CLASSES[0])
    game.play(6)
    generator = game.optimizers[0]
    assert generator.curvature.stages.sits_out
    loss = game._judged(torch.randn(8, 3), torch.randn(8, 4))
    game.optimizers, game.discriminator = [generator], nn.Linear(3, 1)
    gc.collect()
    assert not generator.curvature.stages.sits_out
    assert loss.requires_grad
