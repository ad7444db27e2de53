"""What is decomposed, copied or sent at once: items of one kind together, up to a size; jobs evenly over workers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

__all__ = ["SMALL_NUMEL", "grouped_by_key", "longest_first"]

SMALL_NUMEL = 2**12  # on the CPU tensors of so few numbers are copied side by side: an operation takes longer than that

Item = TypeVar("Item")


def grouped_by_key(
    items: Iterable[Item], key: Callable[[Item], Hashable], size: Callable[[Item], float], limit: float
) -> list[list[Item]]:
    """Items of one key together, in their order, as long as their sizes add up to ``limit`` at most.

    An item that exceeds the limit alone is a batch of its own.
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


def longest_first(costs: Sequence[float], candidates: Sequence[Sequence[int]], loads: list[float]) -> list[int]:
    """Distributes jobs greedily (longest processing time): the dearest first, each to its least loaded candidate.

    Args:
        costs: Cost of each job.
        candidates: The workers that may take each job: ranks, or steps.
        loads: The load of each worker so far; the costs of the jobs are added to it in place.

    Returns:
        The worker of each job. Ties go to the earlier job and the lower worker, so the result is deterministic.
    """
    workers = [0] * len(costs)
    heaps = {id(group): [(loads[worker], worker) for worker in group] for group in candidates}
    for heap in heaps.values():
        heapq.heapify(heap)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        heap = heaps[id(candidates[job])]
        while heap[0][0] < loads[heap[0][1]]:  # has got jobs as a candidate of another group
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        workers[job] = heap[0][1]
        loads[workers[job]] += costs[job]
        heapq.heapreplace(heap, (loads[workers[job]], workers[job]))
    return workers
