"""Whether all ranks have built the same engine: otherwise they would wait for each other in different collectives."""

from __future__ import annotations

import zlib

import torch

from .communicator import Communicator

__all__ = ["check"]


def check(comm: Communicator, built: str) -> None:
    """Compares what the ranks have built (a collective).

    Args:
        comm: The ranks.
        built: A text that describes everything that must be the same on every rank.

    Raises:
        RuntimeError: On every rank, if one of them has another text.
    """
    checksum = zlib.crc32(built.encode())
    # Halves, so that float64 holds their sums over any number of ranks; squares, because sums may agree by chance.
    halves = torch.tensor([checksum >> 16, checksum & 0xFFFF], dtype=torch.float64)
    mine = torch.cat([halves, halves.square()])
    (total,) = comm.sum([mine], "counts")
    if not torch.equal(total, mine * comm.world_size):
        raise RuntimeError(
            "the ranks have built different optimizers: layers, solver, dtypes and assignment must be the same on "
            "every rank of the process group, and so must hyperparameters and loaded state"
        )
