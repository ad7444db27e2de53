"""Predictive distributions, from which the sampled Fisher draws its targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Bernoulli", "Categorical", "Fisher", "Gaussian"]


class Fisher(Protocol):
    """A sampled Fisher: the model's predictive distribution. Anything with this method can be passed as ``fisher=``."""

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Gradient with respect to the output of the negative log likelihood, summed over all terms, of a sample."""
        ...


@dataclass(frozen=True)
class Categorical:
    """Softmax over logits (cross-entropy); classes in dimension ``dim``: -1 by default, 1 for ``[N, C, H, W]``."""

    dim: int = -1

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``softmax(output) - one_hot(sample)``."""
        probabilities = output.movedim(self.dim, -1).softmax(-1)
        flat = probabilities.reshape(-1, probabilities.shape[-1])
        sample = torch.multinomial(flat, 1, generator=generator)
        return (
            flat.scatter_add(1, sample, flat.new_full(sample.shape, -1.0)).view_as(probabilities).movedim(-1, self.dim)
        )


@dataclass(frozen=True)
class Bernoulli:
    """Independent sigmoids of logits (binary cross-entropy)."""

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``sigmoid(output) - sample``."""
        probabilities = output.sigmoid()
        return probabilities - torch.bernoulli(probabilities, generator=generator)


@dataclass(frozen=True)
class Gaussian:
    """Normal distribution around the output: half squared error divided by ``variance`` (> 0, default 1)."""

    variance: float = 1.0

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``(output - sample) / variance``."""
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        return noise / self.variance**0.5
