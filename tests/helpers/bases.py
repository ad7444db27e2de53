"""Base classes of others that K-FAC is put in front of."""

from __future__ import annotations

import torch

from kfac_optim import KFACMixin


class KFACRMSprop(KFACMixin, torch.optim.RMSprop):
    """A base class that keeps no first moment, unless it has a momentum, and divides by the size of gradients."""


class KFACAdagrad(KFACMixin, torch.optim.Adagrad):
    """A base class that keeps no first moment."""
