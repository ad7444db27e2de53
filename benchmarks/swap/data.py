"""Data of the trainings: scikit-learn's digits, the texts of Python's own help, generated points, tables, graphs."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from pydoc_data.topics import topics

import torch
from sklearn.datasets import make_friedman1, make_moons, make_swiss_roll
from torch import Tensor

from benchmarks.common import tasks
from benchmarks.common.tasks import SPLIT_SEED, Batch, Windows

Split = tuple[Batch, Batch]  # Training and held-out data


def divided(inputs: Tensor, targets: Tensor) -> Split:
    """Return the last fifth of the examples apart from all others."""
    count = round(0.8 * len(inputs))
    return (inputs[:count], targets[:count]), (inputs[count:], targets[count:])


@cache
def digits() -> Split:
    """Return images ``[n, 1, 8, 8]``, standardized, and classes."""
    task = tasks.digits()
    return task.held_out["train"], task.held_out["test"]


@cache
def flat_digits() -> Split:
    """Return the digits as rows of 64."""
    (train, labels), (test, others) = digits()
    return (train.flatten(1), labels), (test.flatten(1), others)


@cache
def curves() -> tuple[Tensor, Tensor]:
    """Return grey images of curves, ``[n, 784]`` in [0, 1], to train on and held out."""
    images = tasks.curve_images(2500, SPLIT_SEED)
    return images[:2000], images[2000:]


@cache
def characters() -> tuple[Tensor, int]:
    """Return the help texts as numbers of characters, and how many characters there are."""
    text = "\n".join(topics[name] for name in sorted(topics))
    symbols = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
    return torch.tensor([symbols[symbol] for symbol in text]), len(symbols)


@cache
def words(vocabulary: int = 2000) -> Tensor:
    """Return the help texts as numbers of words, by falling frequency; the rarest share the last number."""
    found = re.findall(r"\w+|[^\w\s]", "\n".join(topics[name] for name in sorted(topics)).lower())
    numbers = {word: number for number, (word, _) in enumerate(Counter(found).most_common(vocabulary - 1))}
    return torch.tensor([numbers.get(word, vocabulary - 1) for word in found])


@cache
def bags(count: int = 12, length: int = 40) -> Split:
    """Return passages of ``length`` words, and which of the ``count`` longest help texts each is from."""
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[:count]
    numbers = {word: number for number, (word, _) in enumerate(Counter(_plain(longest)).most_common(1999))}
    passages, labels = [], []
    for label, name in enumerate(longest):
        symbols = torch.tensor([numbers.get(word, 1999) for word in _plain([name])])
        pieces = symbols[: len(symbols) // length * length].view(-1, length)
        passages.append(pieces)
        labels += [label] * len(pieces)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return divided(torch.cat(passages)[order], torch.tensor(labels)[order])


def _plain(names: list[str]) -> list[str]:
    return re.findall(r"[a-z]+", "\n".join(topics[name] for name in names).lower())


def windows(symbols: Tensor, context: int) -> tuple[Windows, Batch]:
    """Return the first nine tenths of a text, and 32 windows of the rest."""
    count = round(0.9 * len(symbols))
    rest = Windows(symbols[count:], context)
    return Windows(symbols[:count], context), rest.at(torch.linspace(0, len(rest.symbols) - context - 1, 32).long())


@cache
def sums() -> Split:
    """Return additions of two numbers below 100 as digits: terms, then the sum from its last digit on.

    Targets are the next digits of the sums; -100, which a cross entropy ignores, where terms are read.
    """
    pairs = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(SPLIT_SEED))
    left, right = pairs[order].T
    total = left + right
    columns = [left // 10, left % 10, right // 10, right % 10, total % 10, total // 10 % 10, total // 100]
    sequences = torch.stack(columns, 1)
    targets = sequences[:, 1:].clone()
    targets[:, :3] = -100
    return divided(sequences[:, :-1], targets)


@cache
def friedman() -> Split:
    """Return Friedman's first regression problem, its target standardized."""
    inputs, targets = (
        torch.from_numpy(part).float() for part in make_friedman1(4000, noise=0.5, random_state=SPLIT_SEED)
    )
    return divided(inputs, ((targets - targets.mean()) / targets.std())[:, None])


@cache
def teacher() -> Split:
    """Return 20 inputs of very different sizes, correlated, with what a random network makes of them."""
    random = torch.Generator().manual_seed(SPLIT_SEED)
    mixing = torch.randn(20, 20, generator=random) * torch.logspace(0, -1.5, 20)
    inputs = torch.randn(4000, 20, generator=random) @ mixing
    hidden = torch.tanh(inputs @ torch.randn(20, 40, generator=random) / 4)
    targets = hidden @ torch.randn(40, 3, generator=random) / math.sqrt(40)
    return divided(inputs, targets + 0.05 * torch.randn(4000, 3, generator=random))


@cache
def moons() -> tuple[Tensor, Tensor]:
    """Return points of two half moons, to train on and held out."""
    points = torch.from_numpy(make_moons(4000, noise=0.07, random_state=SPLIT_SEED)[0]).float()
    points = (points - points.mean(0)) / points.std(0)
    return points[:3200], points[3200:]


@cache
def roll() -> tuple[Tensor, Tensor]:
    """Return points of a spiral, to train on and held out."""
    points = torch.from_numpy(make_swiss_roll(4000, noise=0.3, random_state=SPLIT_SEED)[0][:, [0, 2]]).float() / 7
    return points[:3200], points[3200:]


@cache
def sensors() -> tuple[Tensor, Tensor]:
    """Return rows of eight dependent measurements with heavy tails, to train on and held out."""
    random = torch.Generator().manual_seed(SPLIT_SEED)
    causes = torch.randn(4000, 3, generator=random)
    mixed = torch.tanh(causes @ torch.randn(3, 8, generator=random)) + 0.5 * causes[:, :1] ** 2
    rows = mixed + 0.2 * torch.randn(4000, 8, generator=random)
    rows = (rows - rows.mean(0)) / rows.std(0)
    return rows[:3200], rows[3200:]


@cache
def graph(nodes: int = 1200, classes: int = 6, width: int = 100) -> tuple[Tensor, Tensor, Tensor]:
    """Return a citation-like graph: features ``[nodes, width]``, classes, and edges ``[2, count]``, both ways."""
    random = torch.Generator().manual_seed(SPLIT_SEED)
    labels = torch.randint(classes, (nodes,), generator=random)
    topic = 0.02 + 0.08 * (torch.rand(classes, width, generator=random) < 0.2)
    features = (torch.rand(nodes, width, generator=random) < topic[labels]).float()
    same = labels[:, None] == labels
    chances = torch.where(same, 8 * classes / nodes, 2.0 / nodes) / 4
    edges = (torch.rand(nodes, nodes, generator=random) < chances).triu(1).nonzero().T
    return features, labels, torch.cat([edges, edges.flip(0), torch.arange(nodes).expand(2, -1)], 1)


@cache
def ratings(users: int = 600, items: int = 400) -> Split:
    """Return pairs of a user and an item, popular ones more often, with the rating of the one by the other."""
    random = torch.Generator().manual_seed(SPLIT_SEED)
    count = 24_000
    tastes, kinds = torch.randn(users, 4, generator=random), torch.randn(items, 4, generator=random)
    user = torch.randint(users, (count,), generator=random)
    item = (items * torch.rand(count, generator=random) ** 2).long()
    scores = 3 + (tastes[user] * kinds[item]).sum(1) / 2 + 0.5 * torch.randn(items, generator=random)[item]
    return divided(torch.stack([user, item], 1), (scores + 0.3 * torch.randn(count, generator=random)).clamp(1, 5))
