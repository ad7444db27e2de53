"""Scripts without a data set: two of reinforcement learning on a grid, and a differential equation."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.swap.nets import TwoHeads, mlp
from benchmarks.swap.training import Part, Script

SIDE, DISCOUNT, SLIP = 8, 0.95, 0.1  # of the grid: a move goes into a random direction with probability SLIP
STATES, GOAL = SIDE * SIDE, SIDE * SIDE - 1


@cache
def moves() -> Tensor:
    """Return the state that each of four moves leads to: ``[states, 4]``; walls and borders stop it.

    The goal pays 1 and leads to a random state. Two walls leave a winding way.
    """
    rows, columns = torch.arange(STATES) // SIDE, torch.arange(STATES) % SIDE
    walls = ((rows == 2) & (columns < 6)) | ((rows == 5) & (columns > 1))
    after = []
    for down, right in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        there = (rows + down).clamp(0, SIDE - 1) * SIDE + (columns + right).clamp(0, SIDE - 1)
        after.append(torch.where(walls[there], torch.arange(STATES), there))
    return torch.stack(after, 1)


@cache
def features() -> Tensor:
    """Return what a network sees of each state: row and column, one-hot."""
    numbers = torch.arange(STATES)
    return torch.cat([F.one_hot(numbers // SIDE, SIDE), F.one_hot(numbers % SIDE, SIDE)], 1).float()


def moved(states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states after ``actions``, and what they pay."""
    actions = torch.where(torch.rand(len(states)) < SLIP, torch.randint(4, actions.shape), actions)
    after = moves()[states, actions]
    after = torch.where(states == GOAL, torch.randint(STATES, states.shape), after)
    return after, (states == GOAL).float()


def cost(policy: Tensor) -> Tensor:
    """Return minus the exact discounted return of a policy ``[states, 4]``, the mean over all states to start in."""
    policy = (1 - SLIP) * policy + SLIP / 4
    chances = torch.zeros(STATES, STATES).scatter_add_(1, moves(), policy)
    chances[GOAL] = 1 / STATES
    pay = (torch.arange(STATES) == GOAL).float()
    return -torch.linalg.solve(torch.eye(STATES) - DISCOUNT * chances, pay).mean()


def actor_critic() -> Script:
    """Advantage actor-critic: 64 walkers, 16 moves a step; judged by the exact return of the policy."""
    model = TwoHeads(mlp(2 * SIDE, 128, 128, activation=nn.Tanh), 128, (4, 1))
    walkers = torch.randint(STATES, (64,))

    def of_step(step: int) -> Tensor:
        nonlocal walkers
        seen, done, paid = [], [], []
        with torch.no_grad():
            for _ in range(16):
                actions = torch.distributions.Categorical(logits=model(features()[walkers])[0]).sample()
                seen.append(walkers)
                done.append(actions)
                walkers, reward = moved(walkers, actions)
                paid.append(reward)
            returns = [model(features()[walkers])[1][:, 0]]
            for reward in reversed(paid):
                returns.append(reward + DISCOUNT * returns[-1])
        target = torch.cat(returns[:0:-1])
        logits, values = model(features()[torch.cat(seen)])
        policy = torch.distributions.Categorical(logits=logits)
        gain = policy.log_prob(torch.cat(done)) * (target - values[:, 0].detach())
        return -gain.mean() + 0.5 * F.mse_loss(values[:, 0], target) - 0.01 * policy.entropy().mean()

    return Script([Part(model, of_step)], judged=lambda: cost(model(features())[0].softmax(1)))


def deep_q() -> Script:
    """Q-learning with replay and a target network; judged by the exact return of its policy with a tenth of chance."""
    model, target = (mlp(2 * SIDE, 128, 128, 4) for _ in range(2))
    target.load_state_dict(model.state_dict())
    walkers = torch.randint(STATES, (64,))
    memory: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def of_step(step: int) -> Tensor:
        nonlocal walkers
        with torch.no_grad():
            for _ in range(2):
                greedy = model(features()[walkers]).argmax(1)
                chance = torch.rand(len(walkers)) < max(0.1, 1 - step / 100)
                actions = torch.where(chance, torch.randint(4, greedy.shape), greedy)
                after, reward = moved(walkers, actions)
                memory.append((walkers, actions, reward, after))
                walkers = after
            states, actions, rewards, following = map(torch.cat, zip(*memory[-400:], strict=True))
            rows = torch.randint(len(states), (256,))
            best = target(features()[following[rows]]).amax(1)
        chosen = model(features()[states[rows]]).gather(1, actions[rows][:, None])[:, 0]
        return F.smooth_l1_loss(chosen, rewards[rows] + DISCOUNT * best)

    def copy(step: int) -> None:
        if step % 10 == 9:
            target.load_state_dict(model.state_dict())

    def judged() -> Tensor:
        return cost(0.9 * F.one_hot(model(features()).argmax(1), 4) + 0.1 / 4)

    return Script([Part(model, of_step)], judged=judged, after=copy)


def heat_equation() -> Script:
    """A physics-informed network: u_t = 0.1 u_xx on [-1, 1] from -sin(pi x), derivatives by double backward."""
    model = mlp(2, 64, 64, 64, 1, activation=nn.Tanh)

    def exact(points: Tensor) -> Tensor:
        x, t = points.T
        return -torch.sin(math.pi * x) * torch.exp(-0.1 * math.pi**2 * t)

    def of_step(step: int) -> Tensor:
        points = torch.rand(256, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
        points.requires_grad_()
        u = model(points)
        slope = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        bend = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)[0][:, 0]
        edge = torch.cat([points.detach()[:128] * torch.tensor([1.0, 0.0]), points.detach()[128:]])
        edge[128:, 0] = torch.sign(edge[128:, 0])
        return F.mse_loss(slope[:, 1], 0.1 * bend) + F.mse_loss(model(edge)[:, 0], exact(edge))

    grid = torch.cartesian_prod(torch.linspace(-1, 1, 41), torch.linspace(0, 1, 21))
    return Script([Part(model, of_step)], held_out=lambda: F.mse_loss(model(grid)[:, 0], exact(grid)))
