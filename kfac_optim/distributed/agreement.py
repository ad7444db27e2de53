"""Whether all ranks have built the same."""

from __future__ import annotations

import zlib

import torch

from .communicator import Communicator

__all__ = ["require_agreement"]


def require_agreement(comm: Communicator, built: str) -> None:
    """Compares what the ranks have built (a collective).

    Raises:
        RuntimeError: If a rank has another text than this one.
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
