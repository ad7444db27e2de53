"""Factor -> decomposition, and decompositions + damping + gradient -> preconditioned gradient.

There are two solvers, both for stacks of ``p`` Kronecker pairs, with gradients ``V`` of shape ``[p, d_out, d_in]``::

    eigen    (paper, eqs. 11-13)  Q_G ((Q_G^T V Q_A) / (d_G d_A^T + gamma)) Q_A^T  =  (A (x) G + gamma I)^-1 V
    inverse  (paper, eqs. 8-10)   (G + sqrt(gamma)/pi I)^-1 V (A + pi sqrt(gamma) I)^-1

with pi as in :mod:`~kfac_optim.damping`. The inverse solver's damping is a factored form of the same Tikhonov damping.
For a diagonal factor, only the diagonal is decomposed.

The eigen solver decomposes factors without damping, and so finds their own eigenvalues. It can therefore tell which
part of a decomposition matters at the present damping, check a decomposition, and decompose factors of nearly the same
size in one call.

A decomposition is a tuple of tensors, so that any solver's results can be sent between ranks. Its matrices are stored
in ``inv_dtype``, its vectors and scalars, which carry the magnitude, in float32 or more.

Where to look::

    protocol.py     the interface of solvers, with its optional parts
    eigen.py        eqs. 11-13
    joint.py        eqs. 11-13 for several stacks at once, which saves kernel launches
    inverse.py      eqs. 8-10
    decompose.py    factors of equal or similar shape in one call; retries
    worker.py       decompositions in the background
"""

from .decompose import BATCH_NUMEL, Batch, decompose_all, decompose_safely
from .eigen import EigenSolver
from .inverse import InverseSolver
from .protocol import Decomposition, Failure, MaybeDecomposition, Shifting, Sides, Solver, damps_factors, part_dtype
from .worker import Worker

__all__ = [
    "BATCH_NUMEL",
    "Batch",
    "Decomposition",
    "EigenSolver",
    "Failure",
    "InverseSolver",
    "MaybeDecomposition",
    "Shifting",
    "Sides",
    "Solver",
    "Worker",
    "damps_factors",
    "decompose_all",
    "decompose_safely",
    "part_dtype",
]
