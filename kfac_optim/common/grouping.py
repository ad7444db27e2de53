"""Groups items of one kind, up to a size, to decompose, copy or send them at once; distributes jobs over workers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def grouped_by_key(
    items: Iterable[Item], key: Callable[[Item], Hashable], size: Callable[[Item], float], limit: float
) -> list[list[Item]]:
    """Batches of items with the same key, in their order, whose sizes add up to at most ``limit``.

    An item that exceeds the limit is a batch of its own.
    """
    found: list[list[Item]] = []
    latest: dict[Hashable, tuple[list[Item], float]] = {}
    for item in items:
        kind, weight = key(item), size(item)
        batch, so_far = latest.get(kind, ([], 0.0))
        if not batch or so_far + weight > limit:
            batch, so_far = [], 0.0
            found.append(batch)
        batch.append(item)
        latest[kind] = (batch, so_far + weight)
    return found


def longest_first(costs: Sequence[float], workers: Iterable[int]) -> list[int]:
    """The worker (rank, or step) of each job: the costliest first, each to the least loaded (longest processing time).

    Ties go to the earlier job and the lower worker, so the result is deterministic.
    """
    found = [0] * len(costs)
    heap = [(0.0, worker) for worker in workers]
    heapq.heapify(heap)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        load, found[job] = heap[0]
        heapq.heapreplace(heap, (load + costs[job], found[job]))
    return found
