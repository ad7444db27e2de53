"""Checks that all ranks have the same engine: otherwise they would wait for each other in different collectives."""

from __future__ import annotations

import math
import zlib
from ast import literal_eval
from collections.abc import Collection, Mapping, Sequence
from os.path import commonprefix
from typing import Any

import torch

from .communicator import Communicator

_SHOWN = 60  # how many characters of a long value are shown
_ROUNDING = 1e-3  # the relative difference allowed between numbers that each rank has learned by itself


def check(comm: Communicator, built: Mapping[str, object], learned: Collection[str]) -> dict[str, Any]:
    """Compares what the ranks have built, and where they are in training (a collective).

    Args:
        comm: The ranks.
        built: By name, everything that must be the same on every rank; it is compared by its ``repr``.
        learned: The names of numbers, or lists of them, that each rank has learned from the same gradients. Machines of
            different kinds, or with different numbers of threads, round them differently.

    Returns:
        By name, what rank 0 has learned, for those numbers that differ by rounding alone.

    Raises:
        RuntimeError: On every rank, if one of them differs; it says in what, and which ranks have what.
    """
    texts = [f"{name} = {value!r}" for name, value in built.items()]
    checksum = zlib.crc32("\n".join(texts).encode())
    # Halves, so that float64 holds their sums over any number of ranks; squares, because sums may agree by chance.
    halves = torch.tensor([checksum >> 16, checksum & 0xFFFF], dtype=torch.float64, device="cpu")
    mine = torch.cat([halves, halves.square()])
    (total,) = comm.sum([mine], "counts")
    if torch.equal(total, mine * comm.world_size):
        return {}
    # The halves differ on some rank, hence their mean square and squared mean: every rank comes here.
    everyone = [text.split("\n") for text in _gathered(comm, "\n".join(texts))]
    differing = [values for values in zip(*everyone, strict=False) if len(set(values)) > 1]
    names = [values[0].partition(" = ")[0] for values in differing]
    if set(names) <= set(learned):
        numbers = [[_numbers(value.partition(" = ")[2]) for value in values] for values in differing]
        if all(_differ_by_rounding(each) for each in numbers):
            return {name: each[0] for name, each in zip(names, numbers, strict=True)}
    found = "; ".join(_described(values) for values in differing[:3])
    if "skipped_steps" in names:
        raise RuntimeError(
            "the ranks have diverged: a gradient was not finite on some ranks only, which skipped a step that the "
            f"others took, so that the weights differ ({found}). Gradients must be the same on all ranks when step() "
            "is called: find what changes them after they were averaged, and go on from the last checkpoint"
        )
    remedy = ""
    if "layers" in names:
        remedy = (
            ". If each rank has a part of the model (pipeline stages, ZeroRedundancyOptimizer), give it the ranks "
            "that have the same: communicator=TorchCommunicator(group), or LocalCommunicator() if there is no other"
        )
    elif "rate" in names:
        remedy = (
            ". Give a scheduler that looks at the loss (ReduceLROnPlateau) the mean over all ranks, and step "
            "schedulers equally often on all of them"
        )
    elif set(names) & set(learned):
        remedy = (
            ". If some ranks train a model of their own, give each the ranks that train the same one: "
            "communicator=TorchCommunicator(group), or LocalCommunicator() for a rank alone (local SGD, too); layers "
            "that each rank has for itself (experts) belong in skip_layers"
        )
    raise RuntimeError(
        f"the ranks have built different optimizers, or have changed them differently since: {found}. Layers, solver, "
        "dtypes and assignment must be the same on every rank of the process group, and so must hyperparameters, "
        f"whenever they are set, and loaded state{remedy}"
    )


def _numbers(text: str) -> Any:
    """The number or list of numbers in a text; nan, which is close to no number, if one of them is not finite."""
    try:
        return literal_eval(text)
    except ValueError:
        return math.nan


def _differ_by_rounding(of_ranks: Sequence[Any]) -> bool:
    """Whether the numbers, or lists of numbers, of all ranks are close to those of the first."""
    lists = [value if isinstance(value, list) else [value] for value in of_ranks]
    alike = all(len(numbers) == len(lists[0]) for numbers in lists)
    pairs = [pair for numbers in lists for pair in zip(numbers, lists[0], strict=False)]
    return alike and all(math.isclose(own, first, rel_tol=_ROUNDING) for own, first in pairs)


def _gathered(comm: Communicator, text: str) -> list[str]:
    """The texts of all ranks (a collective)."""
    data = torch.tensor(list(text.encode()), dtype=torch.float64, device="cpu")
    lengths = torch.zeros(comm.world_size, dtype=torch.float64, device="cpu")
    lengths[comm.rank] = len(data)
    (lengths,) = comm.sum([lengths], "counts")
    table = torch.zeros(comm.world_size, int(lengths.max()), dtype=torch.float64, device="cpu")
    table[comm.rank, : len(data)] = data
    (table,) = comm.sum([table], "counts")
    sizes = [int(length) for length in lengths.tolist()]
    return [bytes(map(int, row[:size])).decode() for row, size in zip(table.tolist(), sizes, strict=True)]


def _described(values: tuple[str, ...]) -> str:
    """Says which ranks have which values, each ``name = value``; of long values only the part that differs."""
    name = values[0].partition(" = ")[0]
    start = max(len(name) + 3, len(commonprefix(values)) - _SHOWN // 2)
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value[start : start + _SHOWN], []).append(rank)
    return f"{name} is " + ", ".join(f"{shown} on rank {', '.join(map(str, r))}" for shown, r in ranks.items())
