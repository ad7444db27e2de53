"""K-FAC as ordinary ``torch.optim`` optimizers.

One line of a training script changes::

    optimizer = KFACSGD(model, lr=0.1, momentum=0.9)      # instead of torch.optim.SGD(model.parameters(), ...)

How data flows, and what each module does::

    model --capture--> a, g --layers--> moments --averages--> A, G --distributed--> solvers: (Q_A, d_A), (Q_G, d_G)
                                                                                                |
    weights <--turning: turned as far as trust says, and stretched as far as reach says---- preconditioning
       ^                                                                                        |
       +------ base class's step on .grad --> its first moment, and the length of its update ---+

In the paper's order (``precondition="gradient"``), the base class steps on preconditioned gradients.
"""

from .capture import Bernoulli, Categorical, Fisher, Gaussian
from .damping import Damping, OfLargest, OfMean
from .diagnostics import memory_estimate
from .distributed import (
    KAISA,
    Assignment,
    AssignmentStrategy,
    Communicator,
    FactorWise,
    HorovodCommunicator,
    LayerAssignment,
    LayerCost,
    LayerWise,
    LocalCommunicator,
    TorchCommunicator,
)
from .engine import CurvatureEngine
from .layers import Declined, KroneckerLayer, LayerOptions, register_layer
from .optimizers import KFACLAMB, KFACSGD, KFACAdam, KFACAdamW, KFACMixin
from .scaling import Graft, KLClip, Orthogonal, Scaling, Unit
from .schedules import constant_then_scaled, exponential_decay, forgetting, growing, inverse_time_decay
from .selftuning import KFAC
from .solvers import EigenSolver, InverseSolver, Solver
from .stacks import Direction

__version__ = "0.1.0"

__all__ = [
    # optimizers
    "KFAC",
    "KFACSGD",
    "KFACAdam",
    "KFACAdamW",
    "KFACLAMB",
    "KFACMixin",
    "CurvatureEngine",
    "memory_estimate",
    # damping
    "Damping",
    "OfLargest",
    "OfMean",
    # values over time
    "constant_then_scaled",
    "exponential_decay",
    "forgetting",
    "growing",
    "inverse_time_decay",
    # module types
    "Declined",
    "KroneckerLayer",
    "LayerOptions",
    "register_layer",
    # solvers
    "EigenSolver",
    "InverseSolver",
    "Solver",
    # scalings
    "Direction",
    "Graft",
    "KLClip",
    "Orthogonal",
    "Scaling",
    "Unit",
    # sampled Fisher
    "Bernoulli",
    "Categorical",
    "Fisher",
    "Gaussian",
    # distribution
    "KAISA",
    "Assignment",
    "AssignmentStrategy",
    "Communicator",
    "FactorWise",
    "HorovodCommunicator",
    "LayerAssignment",
    "LayerCost",
    "LayerWise",
    "LocalCommunicator",
    "TorchCommunicator",
]
