"""Factor -> decomposition, and decompositions + damping + gradient -> preconditioned gradient.

Two solvers, both for stacks of ``p`` Kronecker pairs, ``V`` of shape ``[p, d_out, d_in]``::

    eigen    (paper, eqs. 11-13)  Q_G ((Q_G^T V Q_A) / (d_G d_A^T + gamma)) Q_A^T  =  (A (x) G + gamma I)^-1 V
    inverse  (paper, eqs. 8-10)   (G + sqrt(gamma)/pi I)^-1 V (A + pi sqrt(gamma) I)^-1

with pi as in :mod:`~kfac_optim.damping`, a factored form of the same Tikhonov damping. A diagonal factor is decomposed
by its diagonal alone.

The eigen solver ignores damping when it decomposes, so that eigenvalues are known afterwards. So it can also tell which
part of a decomposition matters at the damping at hand, check it, and decompose factors of nearly one size as one.

A decomposition is a tuple of tensors, so that any solver's results can be sent between ranks. Matrices in it are stored
in ``inv_dtype``, vectors and scalars (which carry the magnitude) in float32 at least.

Where to look::

    protocol.py     what a solver is, and what the package may ask of it
    eigen.py        eqs. 11-13
    joint.py        the same for several stacks at once, where launches count
    inverse.py      eqs. 8-10
    decompose.py    batches of one shape or nearly so, retries
    worker.py       decompositions in the background
"""

from .decompose import BATCH_NUMEL, Batch, decompose_all, decompose_safely
from .eigen import EigenSolver
from .inverse import InverseSolver
from .protocol import Decomposition, Failure, MaybeDecomposition, Shifting, Solver, damps_factors
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
    "Solver",
    "Worker",
    "damps_factors",
    "decompose_all",
    "decompose_safely",
]
