"""Networks that train against each other on several ranks: as in one process, their steps are the base's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from kfac_optim import KFACAdam
from kfac_optim.capture.signs import Leftover
from tests.helpers.compare import assert_all_near, assert_equal_on_ranks, values
from tests.helpers.files import through_a_file
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64
from tests.helpers.training import data_of, share, train
from tests.helpers.versions import needs_sharding_on_cpus

EVERY_SECOND: dict[str, Any] = {"factor_update_steps": 2, "inv_update_steps": 4, "spread": 0}
STEPS = 20


class Game:
    """A small GAN, its two players wrapped by DDP where there are several ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        self.rank, self.world_size = rank, world_size
        self.generator = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 6)).double()
        self.discriminator = nn.Sequential(nn.Linear(6, 10), nn.LeakyReLU(), nn.Linear(10, 1)).double()
        players = (self.generator, self.discriminator)
        self.g, self.d = (DDP(player) for player in players) if world_size > 1 else players
        self.build()

    def build(self) -> None:
        """New optimizers, as a run that goes on has."""
        self.optimizers = [KFACAdam(player, lr=0.01, **EVERY_SECOND, **FLOAT64) for player in (self.g, self.d)]

    def play(self, first: int, last: int, *, generator_first: bool, generates: bool = True) -> None:
        """Both players take some steps, or the discriminator alone."""
        for step in range(first, last):
            for optimizer in self.optimizers:
                optimizer.curvature.stages.steering.trust.notches = 5  # which would fall to 0, where no step is K-FAC's
            source = torch.Generator().manual_seed(step)
            batch = torch.randn(16, 10, generator=source, dtype=torch.float64).chunk(self.world_size)[self.rank]
            turns = (self._generate, self._discriminate) if generator_first else (self._discriminate, self._generate)
            for turn in turns if generates else (self._discriminate,):
                turn(batch[:, :6] + 1, batch[:, 6:])

    def _discriminate(self, real: Tensor, noise: Tensor) -> None:
        self.optimizers[1].zero_grad()
        with torch.no_grad():
            fake = self.generator(noise)
        (F.softplus(-self.d(real)).mean() + F.softplus(self.d(fake)).mean()).backward()
        self.optimizers[1].step()

    def _generate(self, real: Tensor, noise: Tensor) -> None:
        self.optimizers[0].zero_grad()
        F.softplus(-self.d(self.g(noise))).mean().backward()
        self.optimizers[0].step()

    def weights(self) -> list[Tensor]:
        """Of both players."""
        return values(self.generator) + values(self.discriminator)


def assert_neither_is_stretched(game: Game) -> None:
    for optimizer in game.optimizers:
        assert optimizer.curvature.reach == 0
        assert "steps left to the base optimizer: two networks seem to train against each other" in repr(
            optimizer.curvature
        )


def played(rank: int, world_size: int, generator_first: bool) -> list[Tensor]:
    game = Game(rank, world_size)
    game.play(0, STEPS, generator_first=generator_first)
    assert_neither_is_stretched(game)
    return game.weights()


@pytest.mark.parametrize("generator_first", [False, True])
def test_players_on_several_ranks_are_not_stretched(generator_first: bool) -> None:
    """Nor in one process. There an opponent that moves later is known at once, here at the next statistics."""
    found = run_ranks(2, played, generator_first)
    assert_equal_on_ranks(found)
    if not generator_first:
        assert_all_near(found, played(0, 1, generator_first))


def left_alone(rank: int, world_size: int) -> list[Tensor]:
    """A discriminator that loses its opponent; in the game ranks compare in steps with statistics only."""
    game = Game(rank, world_size)
    game.play(0, 5, generator_first=False)
    engine, compared = game.optimizers[1].curvature, []
    compare, sent = engine.stages.compare, copy.deepcopy(engine.stages.comm.traffic)
    engine.stages.compare = lambda **more: (compared.append(engine.step_count), compare(**more))
    game.play(5, STEPS, generator_first=False)
    assert compared == list(range(6, STEPS, 2)) and engine.stages.progress.last_statistics == STEPS - 2
    assert [optimizer.curvature.stages.refresher.refreshes for optimizer in game.optimizers] == [1, 1]
    assert all(engine.stages.comm.traffic[kind] == sent[kind] for kind in ("factors", "decompositions"))
    step = STEPS
    while engine.stages.sits_out:
        assert engine.stages.refresher.refreshes == 1 and step < STEPS + 40
        game.play(step, step + 1, generator_first=False, generates=False)
        step += 1
    assert (
        engine.stages.refresher.refreshes == 2
        and engine.stages.refresher.frozen_at == engine.stages.progress.last_statistics == step - 1
    )
    game.play(step, step + 4, generator_first=False, generates=False)
    assert engine.stages.refresher.refreshes == 3 and engine.stages.refresher.last_refresh == step + 3
    return game.weights()


def test_ranks_refresh_again_when_a_game_has_ended() -> None:
    assert_equal_on_ranks(run_ranks(2, left_alone))


def resumed(rank: int, world_size: int) -> list[Tensor]:
    """A game that goes on from a file is one from its first step on."""
    game = Game(rank, world_size)
    game.play(0, 7, generator_first=False)
    for optimizer in game.optimizers:
        optimizer.curvature.synchronize()
    states = [through_a_file(optimizer.state_dict()) for optimizer in game.optimizers]
    game.build()
    for optimizer, state in zip(game.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    for step in range(7, STEPS):
        game.play(step, step + 1, generator_first=False)
        assert_neither_is_stretched(game)
    return game.weights()


def test_players_go_on_as_they_were() -> None:
    found = run_ranks(2, resumed)
    assert_equal_on_ranks(found)
    assert_all_near(found, played(0, 1, False))


def left_by_one(rank: int, world_size: int) -> list[Tensor]:
    """Gradients that one rank alone throws away make no game."""
    game = Game(rank, world_size)
    optimizer = game.optimizers[1]
    for step in range(STEPS):
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        if rank == 0:
            game.discriminator(batch).square().mean().backward()
        optimizer.zero_grad()
        game.d(batch).square().mean().backward()
        optimizer.step()
    assert optimizer.curvature.stages.plan().stretches and optimizer.curvature.reach > 0
    return game.weights()


def test_what_one_rank_throws_away_decides_nothing() -> None:
    assert_equal_on_ranks(run_ranks(2, left_by_one))


def gone_back_once(rank: int, world_size: int) -> list[Tensor]:
    """Gradients are thrown away before the second step with statistics, as when a loss scale overflows at first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    wrapped = DDP(model) if world_size > 1 else model
    optimizer = KFACAdam(wrapped, lr=0.01, **EVERY_SECOND, **FLOAT64)
    for step in range(10):
        if step == 2:
            inputs, classes = share(data_of(step), rank, world_size)
            F.cross_entropy(wrapped(inputs), classes).backward()
        train(wrapped, optimizer, [step], rank=rank, world_size=world_size)
    assert optimizer.curvature.stages.plan().stretches
    return values(model)


def test_a_step_that_was_not_taken_is_forgotten_as_soon_as_in_one_process() -> None:
    found = run_ranks(2, gone_back_once)
    assert_equal_on_ranks(found)
    assert_all_near(found, gone_back_once(0, 1))


@needs_sharding_on_cpus
def test_what_is_added_to_a_shard_is_seen() -> None:
    """FSDP2 adds to the local part of a gradient, of which the DTensor itself does not tell."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = nn.Linear(4, 4)
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        layer(torch.ones(3, 4)).sum().backward()
        assert layer.weight.grad is not None
        left = Leftover(layer.weight, layer.weight.grad)
        layer(torch.ones(3, 4)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert left.has_grown


def test_a_new_gradient_has_not_grown() -> None:
    """Even if it takes the place of the old one in memory, and is written to more often."""
    weight = nn.Parameter(torch.ones(2))
    for _ in range(100):
        lefts = []
        for uses in (2, 5):
            weight.grad = None
            sum((weight.sum() for _ in range(uses)), torch.zeros(())).backward()
            assert weight.grad is not None
            lefts.append(Leftover(weight, weight.grad))
        assert not any(left.has_grown for left in lefts)
