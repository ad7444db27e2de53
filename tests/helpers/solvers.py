"""Solvers of one's own."""

from __future__ import annotations

from kfac_optim import EigenSolver


class UndampedSolver:
    """Of what the eigen solver does no more than it has to."""

    damps_factors = False

    def __init__(self) -> None:
        eigen = EigenSolver(negligible=0.0)
        self.shapes, self.decompose, self.precondition = eigen.shapes, eigen.decompose, eigen.precondition
