"""Preconditioners of other projects as optimizers; imported only for one of its classes.

``KFACPyTorch`` needs kfac-pytorch (https://github.com/gpauloski/kfac-pytorch), which package indexes do not have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from kfac.preconditioner import KFACPreconditioner
from torch import nn


class KFACPyTorch(torch.optim.SGD):
    """kfac-pytorch's preconditioner in front of SGD. Its curvature is not in the state.

    Args:
        params: What is trained.
        model: The module that they belong to.
        lr: Learning rate; the preconditioner's kl_clip follows it when it is scheduled.
        momentum: The momentum of SGD, applied after preconditioning.
        weight_decay: The weight decay of SGD.
        options: Further keywords of ``KFACPreconditioner``.
    """

    def __init__(
        self, params: Any, *, model: nn.Module, lr: float, momentum: float, weight_decay: float, **options: Any
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)
        rate: Callable[[int], float] = lambda step: self.param_groups[0]["lr"]  # noqa: E731
        self.preconditioner = KFACPreconditioner(model, lr=rate, loglevel=logging.DEBUG, **options)

    def step(self, closure: Any = None) -> Any:
        """Precondition ``.grad`` in place and let SGD update."""
        self.preconditioner.step()
        return super().step(closure)
