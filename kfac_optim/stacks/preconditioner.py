"""Applies decompositions to the moments of a step (eqs. 8 and 11-13), to equal shapes at once.

Where launches count, the eigen solver preconditions all stacks together (``JointEigen``); their matrices then lie side
by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..common.machines import is_asynchronous
from ..common.rates import Scalar, common_rate
from ..solvers import EigenSolver, Sides, Solver, damps_factors
from ..solvers.joint import JointEigen
from .directions import StepVectors
from .layout import fill_all
from .matrices import FlatStorage, Matrices
from .stack import Stack
from .stacked import Stacked, Steepest
from .tiles import precondition

_MOST_NUMEL = 2**30  # numbers that are put side by side; some operations take no more than 2^31


class StackPreconditioner:
    """Preconditions all stacks of a step.

    Args:
        solver: Made the decompositions, and applies them.
        dtype: The dtype of the matrices.
    """

    def __init__(self, solver: Solver, dtype: torch.dtype) -> None:
        self.solver, self.dtype = solver, dtype
        # JointEigen computes what EigenSolver.precondition does, and knows nothing of a subclass's own.
        self._may_join = getattr(type(solver), "precondition", None) is EigenSolver.precondition
        self._storage: FlatStorage | None = None
        self._joint: tuple[list[Sides | None], JointEigen] | None = None  # with what it was made of

    def clear(self) -> None:
        """Lets go of all decompositions."""
        self._joint = None

    def select(self, stacks: Sequence[Stack], value: float) -> None:
        """Selects the parts of the decompositions that matter at a damping of ``value`` units.

        It selects anew only if the decompositions are new, or the damping has left its quarter of an octave. Parts are
        chosen for the lower end of that, so that a resumed run chooses alike. How many eigenvectors matter is read from
        the device once for all stacks.
        """
        solver = self.solver
        if not (isinstance(solver, EigenSolver) and solver.negligible):
            return
        floor = 2 ** (math.floor(4 * math.log2(value)) / 4)
        old = [(s, s.decomposed) for s in stacks if s.decomposed and (s.relevant is None or s.relevant[0] != floor)]
        inputs = [(*sides, (floor * s.damping_unit).to(self.dtype)) for s, sides in old]
        counts = [solver.count_relevant(*of_stack) for of_stack in inputs]
        found = torch.stack([count.to(counts[0].device) for count in counts]).tolist() if counts else []
        for (stack, _), of_stack, of_sides in zip(old, inputs, found, strict=True):
            stack.note_relevant(floor, solver.relevant(*of_stack, of_sides))

    def precondition(
        self, stacks: Sequence[Stack], vectors: StepVectors, value: float, contrast: float | None, *, any_length: bool
    ) -> Stacked:
        """The directions of the stacks, not yet scaled.

        Args:
            stacks: Those that have a moment.
            vectors: The moments, with the updates and the learning rate.
            value: gamma, in units of the damping.
            contrast: See :class:`~kfac_optim.stacks.stacked.Steepest`; None: damping is not relative to the largest
                eigenvalue.
            any_length: Whether the directions may be gamma times as long, which saves launches.
        """
        decomposed = [stack.applied for stack in stacks]
        joint = self._joint_of(stacks, decomposed)
        moments = self._filled(stacks, vectors.moments)
        gammas: list[Tensor] = []  # none if directions are gamma times as long
        if stacks and (joint is None or not any_length):
            gammas = list(torch._foreach_mul([stack.damping_unit for stack in stacks], value))
        of_dtype = [gamma.to(self.dtype) for gamma in gammas]
        if joint is None:
            specs = [stack.specs for stack in stacks]
            of_stacks = zip(moments.tensors, decomposed, specs, of_dtype, strict=True)
            directions = Matrices([precondition(self.solver, *of_stack) for of_stack in of_stacks], moments.groups)
        else:
            directions = moments.empty()
            joint.precondition(moments.tensors, value, directions.tensors)
            if gammas:
                directions.times(torch.cat(of_dtype).reciprocal(), out=directions)
        alike = all(vectors.are_alike(stack.layout.parameters) for stack in stacks)
        updates = moments if alike else self._filled(stacks, vectors.updates)
        steepest = None if contrast is None else Steepest(self._largest(stacks, gammas, contrast), contrast)
        return Stacked(directions, moments, updates, [self._rate(stack, vectors) for stack in stacks], steepest)

    def _filled(self, stacks: Sequence[Stack], vectors: Mapping[nn.Parameter, Tensor]) -> Matrices:
        """The matrices of vectors by parameter, side by side if the stacks are preconditioned together."""
        if self._storage is None:
            filled = [stack.layout.fill(vectors, self.dtype) for stack in stacks]
            return Matrices(filled, [stack.groups for stack in stacks])
        (flat,) = self._storage.several(1, self.dtype)
        fill_all([stack.layout for stack in stacks], vectors, flat.tensors)
        return flat

    def _largest(self, stacks: Sequence[Stack], gammas: Sequence[Tensor], contrast: float) -> Tensor:
        """``L + gamma`` of each pair, ``[pairs]``, divided by gamma if there are no ``gammas``."""
        if not gammas:
            pairs = sum(len(stack.damping_unit) for stack in stacks)
            device = stacks[0].layout.device if stacks else "cpu"
            return torch.full((pairs,), contrast, dtype=self.dtype, device=device)
        if damps_factors(self.solver):
            found = [stack.largest_damped(self.solver) for stack in stacks]
        else:
            found = list(torch._foreach_add([stack.damping_unit for stack in stacks], list(gammas)))
        return torch.cat([largest.to(gammas[0].device, self.dtype) for largest in found])

    def _joint_of(self, stacks: Sequence[Stack], decomposed: list[Sides | None]) -> JointEigen | None:
        """The decompositions of all stacks together, where launches count; then their matrices lie side by side."""
        if not (self._may_join and self._can_join(stacks)):
            self._storage = self._joint = None
            return None
        if self._storage is None or self._joint is None or list(map(id, self._joint[0])) != list(map(id, decomposed)):
            shapes, groups = [stack.layout.memory_shape for stack in stacks], [stack.groups for stack in stacks]
            transposed, device = [stack.layout.is_transposed for stack in stacks], stacks[0].layout.device
            wanted, storage = (shapes, groups, device, transposed), self._storage
            if storage is None or (storage.shapes, storage.groups, storage.device, storage.transposed) != wanted:
                self._storage = FlatStorage(*wanted)
            units = [stack.damping_unit.to(self.dtype) for stack in stacks]
            self._joint = decomposed, JointEigen([sides for sides in decomposed if sides is not None], units)
        return self._joint[1]

    def _can_join(self, stacks: Sequence[Stack]) -> bool:
        """Whether launches count, and the stacks are few numbers of one device and type, of one tile each."""
        devices = {stack.layout.device for stack in stacks}
        if len(stacks) < 2 or len(devices) > 1 or not is_asynchronous(*devices):
            return False
        if sum(math.prod(stack.layout.shape) for stack in stacks) > _MOST_NUMEL:
            return False
        if any(stack.applied is None or max(spec.blocks for spec in stack.specs) > 1 for stack in stacks):
            return False
        return all(part.dtype == self.dtype for stack in stacks for side in stack.applied or () for part in side)

    def _rate(self, stack: Stack, vectors: StepVectors) -> Scalar:
        """The learning rate of a stack; where weights and biases have different ones a tensor of the stack's shape."""
        lr, moments = vectors.lr, vectors.moments
        if not isinstance(lr, Mapping):
            return lr
        moved = [p for block in stack.blocks for p in block.layer.parameters if p in moments]
        rate = common_rate([lr[p] for p in moved])
        if rate is None:
            return stack.layout.fill({p: torch.ones_like(moments[p]) * lr[p] for p in moved}, self.dtype)
        return rate
