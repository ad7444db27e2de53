"""The ranks of a run: which of them work on which layers, and whether all still have the same engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..blocks import Block
from ..distributed import (
    Assignment,
    AssignmentStrategy,
    Communicator,
    LayerCost,
    LocalCommunicator,
    agreement,
    default_communicator,
)
from ..factors import FactorSpec
from ..solvers import Solver, part_dtype
from .factor_owners import move_factors


class Ranks:
    """The processes that train together.

    Args:
        given: Their communicator; None: torch.distributed's default group if it is initialised by the first step, else
            one process.

    Attributes:
        comm: Their communicator.
        given: Whether it was given.
        assignment: Which ranks decompose and precondition which layers; known after :meth:`assign`.
        left_out: The indices of the layers for which this rank's statistics do not count, likewise.
    """

    assignment: Assignment
    left_out: set[int]

    def __init__(self, given: Communicator | None) -> None:
        self.given = given is not None
        self.comm = default_communicator() if given is None else given
        self._prepared_for: Assignment | None = None  # the assignment whose groups exist
        self._unconfirmed_skips = 0  # steps that this rank, perhaps alone, has skipped since the last comparison

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self.comm.world_size == 1

    def assign(
        self, strategy: AssignmentStrategy, blocks: Sequence[Block], solver: Solver, inv_dtype: torch.dtype
    ) -> None:
        """Lets the strategy assign the work to the ranks, and tells the blocks who works on them."""
        specs = [block.specs for block in blocks]
        costs = [LayerCost((a.cost, g.cost), decomposed_bytes((a, g), solver, inv_dtype)) for a, g in specs]
        rank, world_size = self.comm.rank, self.comm.world_size
        assignment: object = strategy.assign(costs, world_size)
        if not isinstance(assignment, Assignment):
            raise TypeError(
                f"assignment={strategy!r}: assign() has returned {assignment!r}: must be a kfac_optim.Assignment"
            )
        self.assignment = assignment
        self.assignment.check(len(costs), world_size)
        layers = assignment.layers
        routes = {workers.gradient_workers: workers.routes(world_size) for workers in layers}
        for block, workers in zip(blocks, layers, strict=True):
            own = [route for route in routes[workers.gradient_workers] if rank in route[1] and len(route[1]) > 1]
            block.set_workers(workers, own[0] if own else None)
        self.left_out = {i for i, each in enumerate(layers) if not (each.counts(0, rank) or each.counts(1, rank))}
        self.comm.check_groups(self.assignment.groups(world_size))

    def change(self, comm: Communicator, blocks: Sequence[Block]) -> bool:
        """Goes on with another communicator.

        Returns:
            Whether the number of this rank, or the number of ranks, has changed.

        Raises:
            RuntimeError: If one of them has, and some factors are only on one of the old ranks.
        """
        before, self.comm = self.comm, comm
        changed = (comm.rank, comm.world_size) != (before.rank, before.world_size)
        if changed and not all(block.has_all_factors for block in blocks):
            raise RuntimeError(
                f"this engine has only the factors of rank {before.rank} of {before.world_size}, as its strategy "
                "shares them out, and cannot go on elsewhere: build a new optimizer and load the full_state_dict() of "
                "the old one"
            )
        return changed

    def late_communicator(self) -> Communicator | None:
        """The communicator of torch.distributed, if it was initialised late and the user gave none; else None."""
        comm = default_communicator() if self.alone and not self.given else self.comm
        return None if comm.world_size == self.comm.world_size else comm

    @property
    def are_prepared(self) -> bool:
        """Whether :meth:`prepare` has prepared the ranks for :attr:`assignment`; a single one needs nothing."""
        return self.alone or self._prepared_for is self.assignment

    def prepare(self, blocks: Sequence[Block], factor_dtype: torch.dtype) -> None:
        """Makes the groups of :attr:`assignment`, and moves factors to where it wants them (a collective)."""
        self.comm.prepare(self.assignment.groups(self.comm.world_size))
        move_factors(blocks, factor_dtype, self.comm)
        self._prepared_for = self.assignment

    def check(self, built: Mapping[str, object], learned: Collection[str]) -> dict[str, Any]:
        """Raises RuntimeError, on all ranks, unless they have the same engine; see ``agreement`` (a collective)."""
        found = agreement.check(self.comm, built, learned)
        self._unconfirmed_skips = 0
        return found

    def common_step(self, step: int, *, skipped: bool) -> int:
        """The number of a step, the same on ranks that have diverged.

        A rank that has skipped steps that others took is behind them, and would miss their exchange. So this counts the
        steps that a rank would have taken, had it skipped none since the last comparison: that number is the same on
        all ranks, so that ranks that have diverged still meet. If all have skipped the same steps, they compare
        themselves too early, and once more when the exchange is due. ``skipped``: whether this rank skips this step.
        """
        found = step + self._unconfirmed_skips
        self._unconfirmed_skips += skipped
        return found

    def __getstate__(self) -> dict[str, Any]:
        """A pickle keeps only this rank's number and the number of ranks."""
        ranks = LocalCommunicator(self.comm.rank, self.comm.world_size)
        return {**self.__dict__, "comm": ranks, "_prepared_for": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """A copy has the same communicator."""
        copied = Ranks(self.comm)
        copied.__dict__.update(self.__dict__, _prepared_for=None)
        return copied

    def after_unpickling(self) -> Communicator:
        """The communicator with which an unpickled engine goes on.

        Raises:
            RuntimeError: If there are several ranks now and it had a communicator of its own.
        """
        comm = default_communicator()
        if comm.world_size > 1 and self.given:
            raise RuntimeError(
                "this engine was pickled with a communicator= of its own, which does not travel: build a new optimizer "
                "and load the state_dict()"
            )
        return comm


def decomposed_bytes(specs: Iterable[FactorSpec], solver: Solver, inv_dtype: torch.dtype) -> int:
    """The bytes that the decompositions of these factors take."""
    return sum(
        spec.matrices * math.prod(shape) * part_dtype(len(shape), inv_dtype).itemsize
        for spec in specs
        for shape in solver.shapes(spec.size, spec.diagonal)
    )
