"""The curvature engine: conducts capture, factors, solvers, assignment and scaling once per step.

What a step does, in order::

    fold the captured moments into the running averages          (statistics steps; drop non-finite micro-batches)
    if due: pool the factors of all ranks, decompose them on their inverse workers (eqs. 11-13 or 8-10), exchange
    precondition on the gradient workers; exchange
    scale (kl_clip, unit, graft)

Where to look::

    engine.py           the step, what is saved, copies
    options.py          what may be set, when, and how it is checked
    coverage.py         parameters -> blocks, one per layer
    blocks.py           A and G of a layer, its mean eigenvalues and its damping gamma
    averages.py         captured moments -> running averages, of all ranks        (eqs. 14-15)
    refresh.py          running averages -> decompositions in use                 (eqs. 8-13, by the solver)
    preconditioning.py  gradients and decompositions -> directions                (eqs. 8-13, by the solver; eq. 16)
    ranks.py            who works on what
    state.py            checks and copies of what is loaded
    memory.py           bytes
    views.py            what is told of a block

With several ranks everything that communicates happens in ``step()``, in an order that all ranks share whatever layers
they used: what is due depends on the step alone, what is sent on the assignment alone.

The engine returns directions and leaves ``.grad`` alone; whoever owns it (an optimizer of this package, or the caller
of :meth:`~kfac_optim.CurvatureEngine.precondition_`) applies them.

References: Pauloski et al., "Deep Neural Network Training with Distributed K-FAC" (the paper; its equation numbers are
used throughout); Martens & Grosse 2015, arXiv:1503.05671; Grosse & Martens 2016, arXiv:1602.01407; Eschenhagen et al.
2023, arXiv:2311.00636.
"""

from ..comm import joinable
from ..schedules import growing
from .blocks import specs_of
from .engine import CurvatureEngine, memory_estimate, owning_engine

__all__ = ["CurvatureEngine", "growing", "joinable", "memory_estimate", "owning_engine", "specs_of"]
