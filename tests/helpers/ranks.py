"""Real Gloo processes for tests: start, feed, collect, read every exit code, never wait for ever."""

from __future__ import annotations

import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A server process that has imported torch and the tests once, and forks ranks without the pytest process's threads.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.preloaded"])

LIMIT = 90.0  # seconds for a group of ranks, start included
GROUP_TIMEOUT = timedelta(seconds=30)


class RanksFailed(AssertionError):
    """Some rank raised, died or did not end in time; the message has every rank's story."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    group_timeout: timedelta = GROUP_TIMEOUT,
    limit: float = LIMIT,
    may_fail: bool = False,
) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` in ``world_size`` processes of one Gloo group.

    Args:
        world_size: Number of processes.
        function: A module-level function.
        *args: Pickled for every rank.
        group_timeout: Of the process group.
        limit: Seconds after which all processes are killed.
        may_fail: Return what became of a failed rank instead of raising: the text of its exception, or its exit code.

    Returns:
        What the function returned, by rank.

    Raises:
        RanksFailed: If a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        receivers, processes = [], []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            arguments = (sender, f"{folder}/store", rank, world_size, group_timeout, function, args)
            process = _CONTEXT.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        outcomes = _collect(receivers, processes, time.monotonic() + limit)
    failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(outcomes) if not good]
    if failed and not may_fail:
        raise RanksFailed("\n".join(failed))
    return [torch.load(io.BytesIO(v), weights_only=False) if good else v for good, v in outcomes]


def _collect(receivers: list[Connection], processes: list[Any], deadline: float) -> list[tuple[bool, Any]]:
    outcomes: dict[int, tuple[bool, Any]] = {}
    pending = {receiver: rank for rank, receiver in enumerate(receivers)}
    while pending and time.monotonic() < deadline:
        for receiver in wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
            rank = pending.pop(receiver)  # type: ignore[arg-type]
            try:
                outcomes[rank] = receiver.recv()  # type: ignore[union-attr]
            except EOFError:  # died without a word; its exit code tells below
                pass
    for rank, process in enumerate(processes):
        process.join(max(0.0, min(10.0, deadline - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
            outcomes[rank] = (False, "was still running at the time limit and was killed")
        elif rank not in outcomes:
            outcomes[rank] = (False, f"exit code {process.exitcode}")
        elif process.exitcode != 0:
            outcomes[rank] = (False, f"exit code {process.exitcode} after {outcomes[rank][1]!r}")
    return [outcomes[rank] for rank in range(len(processes))]


def _rank(
    sender: Connection,
    store: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout
        )
        dist.barrier()  # one that left its group at once would break the connections that another still makes
        # As bytes: tensors would travel by file descriptors that end with this process.
        buffer = io.BytesIO()
        torch.save(function(rank, world_size, *args), buffer)
        sender.send((True, buffer.getvalue()))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    sender.close()
    # DDP's threads can abort an interpreter that exits in the ordinary way while the machine is busy.
    os._exit(0)
