"""Predictive distributions: the sampled Fisher draws targets from them, KFAC multiplies by their Fisher matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.checks import is_int, is_positive, require_number
from .loss_terms import main_tensor

_ROUNDING = 0.02  # the error allowed in a target, which may come from a half-precision gradient


@dataclass(frozen=True)
class Fisher(ABC):
    """A sampled Fisher: the predictive distribution of the model. Subclass it for a distribution of your own.

    Attributes:
        output_fn: Model output -> tensor of the distribution's parameters. None (default): the output itself if it is a
            tensor, ``.logits`` of an output that has it, else the first tensor in the output.
        seed: The seed of the sampled targets, an int, default 0. Every rank draws its own samples from it.

    Raises:
        TypeError: If ``output_fn`` is neither callable nor None, or ``seed`` is not an int.
    """

    output_fn: Callable[[Any], Tensor] | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.output_fn is not None and not callable(self.output_fn):
            raise TypeError(f"output_fn={self.output_fn!r}: must be callable(output) -> tensor, or None")
        if not is_int(self.seed):
            raise TypeError(f"seed={self.seed!r}: must be an int")

    @property
    def class_dim(self) -> int:
        """The dimension of a model's output along which one prediction lies; all others count predictions."""
        return -1

    def parameters_of(self, output: Any) -> Any:
        """The distribution's parameters in a model's output; not a tensor if the output has none."""
        return main_tensor(output) if self.output_fn is None else self.output_fn(output)

    def can_sample(self, output: Tensor) -> Tensor:
        """Whether targets can be drawn, a 0-dim bool: only if all parameters are finite."""
        return output.isfinite().all()

    @abstractmethod
    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Gradient of the negative log likelihood of sampled targets with respect to the output.

        Args:
            output: The distribution's parameters, as :attr:`output_fn` gives them.
            generator: The source of randomness, on the output's device.

        Returns:
            The gradient of the sum over all loss terms, not of their mean; of the output's shape.
        """

    def misfit(self, gradient: Tensor) -> str:
        """Why the loss's gradient cannot come from this distribution's likelihood; empty if it may.

        It is called once, in the first backward pass, and the user is warned of the problem.

        Args:
            gradient: The gradient of the user's own loss with respect to the output, up to a factor.
        """
        return ""

    # What KFAC needs beside samples; it asks for the first two of these methods when it is built ----------------------

    def root(self, output: Tensor, u: Tensor) -> Tensor:
        """``R u`` with ``R' R = F``, where F is the Fisher matrix of the distribution of each loss term.

        Inner products ``u' F v`` over all loss terms are those of ``R u`` and ``R v``.

        Args:
            output: The distribution's parameters.
            u: A change of them, of the same shape.

        Raises:
            NotImplementedError: If a distribution of the user's own leaves it out, as it may without ``KFAC``.
        """
        raise NotImplementedError(f"{type(self).__name__}.root(): define it to use this distribution with KFAC")

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        """The KL divergence of the distribution at ``other`` from that at ``output``, summed over all terms; 0-dim.

        Raises:
            NotImplementedError: See :meth:`root`.
        """
        raise NotImplementedError(f"{type(self).__name__}.divergence(): define it to use this distribution with KFAC")

    def target_problem(self, output: Tensor, gradient: Tensor) -> str:
        """Why a gradient cannot be that of the negative log likelihood, because targets are bounded.

        It is empty if there is no problem, as always if targets are unbounded.

        Args:
            output: The distribution's parameters.
            gradient: The gradient of the sum of the loss terms with respect to them.
        """
        return ""

    @classmethod
    def lacks(cls, *methods: str) -> list[str]:
        """Which of these methods the distribution does not define."""
        return [name for name in methods if getattr(cls, name) is getattr(Fisher, name)]


@dataclass(frozen=True)
class Categorical(Fisher):
    """Softmax over logits (cross-entropy).

    Attributes:
        dim: The dimension of the classes: -1 (default), or 1 for ``[N, C, H, W]``.

    Raises:
        TypeError: If ``dim`` is not an int; also as :class:`Fisher` does.
    """

    dim: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_int(self.dim):
            raise TypeError(f"Categorical(dim={self.dim!r}): must be an int")

    @property
    def class_dim(self) -> int:
        """See :class:`Fisher`."""
        return self.dim

    def can_sample(self, output: Tensor) -> Tensor:
        """Classes may be masked by logits of minus infinity, but not all of them."""
        return (output < torch.inf).all() & (output > -torch.inf).any(self.dim).all()

    def misfit(self, gradient: Tensor) -> str:
        """The gradient of a cross-entropy sums to zero over the classes."""
        if float(_share_of_sums(gradient, self.dim)) > 0.01:
            other = ""
            if gradient.dim() > 2:
                other = f" (taken for dimension {self.dim}; of an output [N, C, ...] pass Categorical(dim=1))"
            return f"does not sum to zero over the classes{other}, as that of every cross-entropy after a softmax does"
        return ""

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``softmax(output) - one_hot(sample)``."""
        probabilities = output.movedim(self.dim, -1).softmax(-1)
        flat = probabilities.reshape(-1, probabilities.shape[-1])
        sample = torch.multinomial(flat, 1, generator=generator)
        return (
            flat.scatter_add(1, sample, flat.new_full(sample.shape, -1.0)).view_as(probabilities).movedim(-1, self.dim)
        )

    def root(self, output: Tensor, u: Tensor) -> Tensor:
        """The root of ``diag(p) - p p'``, p the softmax, times u: ``sqrt(p) (u - p'u)``."""
        p = output.softmax(self.dim)
        return p.sqrt() * (u - (p * u).sum(self.dim, keepdim=True))

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        """``sum p (log p - log q)``."""
        log_p, log_q = output.log_softmax(self.dim), other.log_softmax(self.dim)
        return (log_p.exp() * (log_p - log_q)).sum()

    def target_problem(self, output: Tensor, gradient: Tensor) -> str:
        """The targets, ``p - gradient``, are probabilities."""
        target = output.softmax(self.dim) - gradient
        if bool((target.sum(self.dim) - 1).abs().max() > _ROUNDING) or bool(target.min() < -_ROUNDING):
            return "is not softmax(output) minus class probabilities, as that of a cross-entropy is"
        return ""


@dataclass(frozen=True)
class Bernoulli(Fisher):
    """Independent sigmoids of logits (binary cross-entropy)."""

    def misfit(self, gradient: Tensor) -> str:
        """The gradient of independent terms does not sum to zero over the last dimension."""
        return _like_softmax(gradient)

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``sigmoid(output) - sample``."""
        probabilities = output.sigmoid()
        return probabilities - torch.bernoulli(probabilities, generator=generator)

    def root(self, output: Tensor, u: Tensor) -> Tensor:
        """The root of ``p (1 - p)``, p the sigmoid, times u; the root is ``1 / (2 cosh(output / 2))``."""
        return u / (2 * (output / 2).cosh())

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        """``softplus(other) - softplus(output) - p (other - output)``."""
        return (F.softplus(other) - F.softplus(output) - output.sigmoid() * (other - output)).sum()

    def target_problem(self, output: Tensor, gradient: Tensor) -> str:
        """The targets, ``p - gradient``, are probabilities."""
        target = output.sigmoid() - gradient
        if bool(target.min() < -_ROUNDING) or bool(target.max() > 1 + _ROUNDING):
            return "is not sigmoid(output) minus probabilities, as that of a binary cross-entropy is"
        return ""


@dataclass(frozen=True)
class Gaussian(Fisher):
    """Normal distribution around the output (half squared error divided by the variance).

    Attributes:
        variance: > 0, default 1.

    Raises:
        TypeError: If the variance is not a number; also as :class:`Fisher` does.
        ValueError: If it is not positive and finite.
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("variance", self.variance, "> 0 and finite", is_positive, owner="Gaussian")

    def misfit(self, gradient: Tensor) -> str:
        """The gradient of independent terms does not sum to zero over the last dimension."""
        return _like_softmax(gradient)

    def sample_gradient(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """``(output - sample) / variance``."""
        noise = torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        return noise / self.variance**0.5

    def root(self, output: Tensor, u: Tensor) -> Tensor:
        """The root of the identity divided by the variance, times u."""
        return u / self.variance**0.5

    def divergence(self, output: Tensor, other: Tensor) -> Tensor:
        """Half the squared difference divided by the variance."""
        return (other - output).square().sum() / (2 * self.variance)


def _share_of_sums(gradient: Tensor, dim: int) -> Tensor:
    """``(sum g)^2 / sum g^2`` over all rows along ``dim``: about 1 for independent entries, 0 if all rows sum to 0."""
    g = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
    g = g / g.abs().max()  # squares of a gradient that is scaled for float16 may overflow, those of a mean underflow
    return g.sum(dim).square().sum() / g.square().sum()


def _like_softmax(gradient: Tensor) -> str:
    """Why a gradient looks like a softmax's: every row sums to zero, though its entries should be independent."""
    if gradient.shape[-1] > 1 and _share_of_sums(gradient, -1) < 1e-4:
        return "sums to zero over the last dimension, as that of a cross-entropy after a softmax does"
    return ""
