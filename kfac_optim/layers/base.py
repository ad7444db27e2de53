"""What a layer is: one weight, its bias, and the Kronecker pairs of their Fisher block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .moments import second_moment, spread_examples, with_ones

__all__ = ["Declined", "KroneckerLayer", "LayerOptions", "Observation", "Sharing", "own_parameter"]

Sharing = Literal["expand", "reduce"]


class Declined(Exception):
    """Raised by a layer factory for a module that it can't treat exactly; the message is the reason in the table."""


@dataclass(frozen=True)
class LayerOptions:
    """The options of the engine that shape layers; documented there.

    ``trainable`` holds the parameters that the optimizer updates; None stands for all.
    """

    weight_sharing: Sharing | Callable[[str, nn.Module], Sharing] = "expand"
    batch_dim: int = 0
    max_factor_dim: int | None = 8192
    skip_layers: tuple[str, ...] = ()
    trainable: Container[nn.Parameter] | None = None

    def sharing(self, name: str, module: nn.Module) -> Sharing:
        """Expand or reduce, for one module.

        Raises:
            ValueError: If a callable ``weight_sharing`` returns anything else.
        """
        choice = self.weight_sharing(name, module) if callable(self.weight_sharing) else self.weight_sharing
        if choice not in ("expand", "reduce"):
            raise ValueError(f"weight_sharing returned {choice!r} for {name}: must be 'expand' or 'reduce'")
        return choice

    def trains(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer updates the parameter."""
        return self.trainable is None or parameter in self.trainable


@dataclass
class Observation:
    """What one call of a module told about A, and what it keeps until the output gradient arrives.

    Attributes:
        a: Raw sum over rows, ``[p, d_in, d_in]`` (``[p, d_in]`` where A is diagonal); for layers that pool their calls
            by example the sum over positions of each example, ``[n, p, d_in]``.
        count: Rows in the sum; for layers that pool by example, positions of each example (tensor ``[p]``).
        context: What :meth:`~kfac_optim.KroneckerLayer.output_rows` needs of the input; None for most types.
        pairs: The pairs that the call was about, the others being zero; None for all.
        subsample: Takes of the output gradient what ``a`` took of the input.
    """

    a: Tensor
    count: Any
    context: Any = None
    pairs: slice | None = None
    subsample: Callable[[Tensor], Tensor] = lambda g: g


class KroneckerLayer(ABC):
    """One weight, its bias, and the Kronecker pairs of their Fisher block.

    A subclass says how rows and matrices come about for its module type; the moments are the same for all.

    Attributes:
        name: Name of the (first) module.
        modules: The modules that use the weight.
        weight: The parameter whose block this is.
        bias: Its bias, or None where there is none or the optimizer does not update it.
        pairs: The number p of Kronecker pairs.
        d_out: Rows of ``W``.
        d_in: Columns of ``W``, bias included.
        diagonal: Whether A and G are kept as diagonals.
        joint: The pairs share one damping and one norm.
        sharing: "expand" or "reduce".
        host: The module during whose forward the projection runs by ``F.linear`` on the weight, where the module that
            owns the weight is never called itself (attention); else None.
        notes: What a user should know, shown in the table.
    """

    rule = "Kronecker"
    joint = False
    diagonal_input = False  # A is a diagonal by nature
    bias_part = slice(None)  # of a bias that several weights share, the part that is this weight's
    host: nn.Module | None = None

    def __init__(self, name: str, module: nn.Module, options: LayerOptions) -> None:
        self.name = name
        self.modules = [module]
        self.weight, self.bias = self.own_parameters(module)
        # Kept, because ZeRO 3 leaves an empty tensor in the parameter's place between uses.
        self.weight_shape: torch.Size = getattr(self.weight, "ds_shape", self.weight.shape)
        if self.bias is not None and not (
            options.trains(self.bias) and self.bias.requires_grad >= self.weight.requires_grad
        ):
            self.bias = None
        self.sharing = options.sharing(name, module)
        self.batch_dim = options.batch_dim
        self.notes: list[str] = []
        self.pairs, self.d_out, self.d_in = self.structure(module)
        limit = options.max_factor_dim
        too_large = [limit is not None and dim > limit for dim in (self.d_in, self.d_out)]
        self.diagonal = (self.diagonal_input or too_large[0], too_large[1])
        for side, dim, large in zip("AG", (self.d_in, self.d_out), too_large, strict=True):
            if large and not (side == "A" and self.diagonal_input):
                self.notes.append(f"{side} diagonal: {dim} > max_factor_dim={limit}")

    @property
    def rule_name(self) -> str:
        """What the table calls the rule, such as "Linear, expand"."""
        kind = type(self).__name__.strip("_").removesuffix("Layer")
        return f"{kind}, {self.sharing}" if self.rule == "Kronecker" else f"{kind}, {self.rule}"

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Weight and bias, as far as they are preconditioned here."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def rebind(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Goes on with other parameters, given by the old ones."""
        self.weight = new[self.weight]
        self.bias = None if self.bias is None else new[self.bias]

    # What a module type defines. Those that raise are not abstract: a type that observes and arranges its matrix
    # in a way of its own, as norm layers do, has no use for them.

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weight and bias of the module."""
        return own_parameter(module, "weight"), module._parameters.get("bias")

    @abstractmethod
    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        """``(pairs, d_out, d_in)``.

        Raises:
            Declined: If the module can't be treated exactly.
        """

    @abstractmethod
    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        """The output gradient of a call as rows ``[n, r, p, d_out]``."""

    # The next three are not abstract: a layer may define what uses them instead, as norm layers do.

    def input_rows(self, module: nn.Module, a: Tensor, output: Tensor) -> Iterable[Tensor]:
        """The input of a call as rows ``[n, r, p, d]`` without the bias's 1, in chunks over n."""
        raise NotImplementedError(f"{type(self).__name__} has to define input_rows, or an observe of its own")

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as ``[p, d_out, d]`` without the bias column."""
        raise NotImplementedError(f"{type(self).__name__} has to define weight_to_matrix, or a to_matrix of its own")

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`weight_to_matrix`."""
        raise NotImplementedError(f"{type(self).__name__} has to define matrix_to_weight, or a from_matrix of its own")

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        """The dimension of the examples in an input or output of the module; None for a single one without."""
        return 0 if x.dim() > 1 else None

    # The same for all.

    def subsample(self, module: nn.Module, x: Tensor, fraction: float) -> Tensor:
        """What statistics see of an input or output: ``fraction`` of the examples."""
        dim = self.batch_dim_of(module, x)
        return x if dim is None else spread_examples(x, dim, fraction)

    @property
    def by_example(self) -> bool:
        """Whether all calls in a backward pass make up one row of each example (reduce), or rows of their own."""
        return self.sharing == "reduce"

    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        """What one call tells about A, in ``dtype``: see :class:`~kfac_optim.layers.Observation`."""
        if self.by_example:
            return self._observe_examples(self.input_rows(module, a.detach().to(dtype), output))
        chunks = []
        for rows in self.input_rows(module, a.detach().to(dtype), output):
            total = rows.sum((0, 1)) if self.bias is not None else None
            chunks.append((second_moment(rows, diagonal=self.diagonal[0]), total, rows.shape[0] * rows.shape[1]))
        moments, totals, counts = zip(*chunks, strict=True)
        moment, count = sum(moments[1:], moments[0]), sum(counts)
        if self.bias is not None:
            moment = with_ones(moment, sum(totals[1:], totals[0]), count)
        return Observation(moment, count)

    def _observe_examples(self, chunks: Iterable[Tensor]) -> Observation:
        sums, positions = [], 0
        for rows in chunks:
            positions = rows.shape[1]
            sums.append(rows.sum(1))
        a = torch.cat(sums)
        if self.bias is not None:
            a = F.pad(a, (0, 1), value=positions)
        return Observation(a, torch.full(a.shape[1:2], float(positions), dtype=a.dtype, device=a.device))

    def output_moment(self, module: nn.Module, g: Tensor, observation: Observation) -> Tensor:
        """Sum of ``g g^T`` over the rows of one call: ``[p, d_out, d_out]``, or ``[p, d_out]`` where G is diagonal.

        For layers that pool their calls by example the sum over positions, ``[n, p, d_out]``.
        """
        rows = self.output_rows(module, g, observation.context)
        return rows.sum(1) if self.by_example else second_moment(rows, diagonal=self.diagonal[1])

    def pool(self, calls: Sequence[tuple[Observation, Tensor]]) -> tuple[Tensor, int, Tensor]:
        """The moments of the calls of a backward pass on the same examples: A's sum and count, and G's sum."""
        a = sum((seen.a for seen, _ in calls[1:]), calls[0][0].a)
        positions = sum((seen.count for seen, _ in calls[1:]), calls[0][0].count)
        g = sum((rows for _, rows in calls[1:]), calls[0][1])
        mean = a / positions.clamp(min=1)[:, None]
        moments = (second_moment(x[:, None], diagonal=d) for x, d in zip((mean, g), self.diagonal, strict=True))
        return next(moments), len(g), next(moments)

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Weight- and bias-shaped tensors as one matrix ``[p, d_out, d_in]``."""
        matrix = self.weight_to_matrix(weight)
        return matrix if bias is None else torch.cat((matrix, bias.reshape(self.pairs, self.d_out, 1)), dim=-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The inverse of :meth:`to_matrix`: one tensor per entry of :attr:`parameters`."""
        if self.bias is None:
            return (self.matrix_to_weight(matrix),)
        return self.matrix_to_weight(matrix[..., :-1]), matrix[..., -1].flatten()


def own_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter that the module owns and uses as it is.

    Raises:
        Declined: If there is none under that name (a parametrization computes it, say), or it is complex.
        ValueError: If it is not initialised yet.
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        raise Declined(f"{name} is not a plain parameter of the module")
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{type(module).__name__} is not initialised: run the model once before building the optimizer"
        )
    if parameter.is_complex():
        raise Declined("complex parameters")
    return parameter
