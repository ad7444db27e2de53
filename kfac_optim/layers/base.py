"""What a layer is: one weight, its bias, and the Kronecker pairs of their Fisher block.

Shapes: n examples, r shared positions, p Kronecker pairs; the package's docstring defines rows and pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .moments import second_moment, spread_examples, with_ones

__all__ = ["Declined", "KroneckerLayer", "LayerOptions", "Observation", "RowsLayer", "Sharing", "own_parameter"]

Sharing = Literal["expand", "reduce"]


class Declined(Exception):
    """Raised by a layer factory for a module that it cannot treat exactly; its message is shown as the reason."""


@dataclass(frozen=True)
class LayerOptions:
    """The engine's options that decide what the layers of a model are; :class:`~kfac_optim.CurvatureEngine` has more.

    Attributes:
        weight_sharing: "expand" or "reduce" over shared positions, or a function of a module's name and the module that
            returns one of them.
        batch_dim: The dimension of the examples in inputs with shared positions: 0, or 1 for sequence-first models.
        max_factor_dim: Factors of a larger dimension, and lopsided ones, are kept diagonal; None: none is.
        skip_layers: Regular expressions; modules whose name contains a match have no layer.
        trainable: The parameters that the optimizer updates; None: all.
    """

    weight_sharing: Sharing | Callable[[str, nn.Module], Sharing] = "expand"
    batch_dim: int = 0
    max_factor_dim: int | None = 8192
    skip_layers: tuple[str, ...] = ()
    trainable: Container[nn.Parameter] | None = None

    def sharing(self, name: str, module: nn.Module) -> Sharing:
        """Whether one module expands or reduces.

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
    """One module call's contribution to A, and what has to be kept until the output gradient arrives.

    Attributes:
        a: The sum of ``a a^T`` over the rows of the call, ``[p, d_in, d_in]`` (``[p, d_in]`` where A is diagonal). For
            layers with ``by_example`` the sum of a over the positions of each example,
            ``[n, p, d_in]``.
        count: The number of rows in the sum. For layers with ``by_example`` the number of positions of each example, a
            tensor ``[p]``.
        context: What :meth:`~kfac_optim.KroneckerLayer.output_rows` needs of the input; None for most types.
        pairs: The pairs that the call has used, the sums of the others being zero; None for all.
        subsample: Selects from the output gradient the examples that ``a`` was made of.
    """

    a: Tensor
    count: Any
    context: Any = None
    pairs: slice | None = None
    subsample: Callable[[Tensor], Tensor] = lambda g: g


class KroneckerLayer(ABC):
    """One weight, its bias, and the Kronecker pairs of their Fisher block.

    A subclass says what a call contributes to A and G, and how gradients become matrices: for most types by rows, which
    :class:`~kfac_optim.layers.RowsLayer` is about.

    Args:
        name: The module's name.
        module: The module.
        options: The engine's options for layers.

    Attributes:
        name: The name of the (first) module.
        modules: The modules that use the weight.
        weight: The parameter whose block this is.
        weight_shape: Its shape.
        bias: The bias, or None where there is none or the optimizer does not update it.
        bias_part: Where several weights share one bias, the slice of it that belongs to this weight; else all of it.
        pairs: The number p of Kronecker pairs.
        d_out: The number of rows of ``W``, so that G is ``[p, d_out, d_out]``.
        d_in: The number of columns of ``W``, bias included, so that A is ``[p, d_in, d_in]``.
        diagonal: Whether A is kept as a diagonal ``[p, d_in]``, and whether G is, ``[p, d_out]``.
        diagonal_input: Whether A is diagonal by nature (embeddings).
        joint: Whether the pairs share one damping and one norm.
        sharing: "expand" or "reduce".
        batch_dim: The dimension of the examples in inputs with shared positions.
        host: For the projections of attention, which no module call shows, the module during whose forward ``F.linear``
            is called with the weight; else None.
        notes: What a user should know about the layer, shown in the table.
    """

    rule = "Kronecker"
    joint = False
    diagonal_input = False
    bias_part = slice(None)
    host: nn.Module | None = None

    def __init__(self, name: str, module: nn.Module, options: LayerOptions) -> None:
        self.name = name
        self.modules = [module]
        self.weight, self.bias = self.own_parameters(module)
        # Not read from the weight later, because ZeRO 3 leaves an empty tensor in its place between uses.
        self.weight_shape: torch.Size = getattr(self.weight, "ds_shape", self.weight.shape)
        if not self.weight_shape.numel():
            raise Declined("the weight is empty")
        if self.bias is not None and not (
            options.trains(self.bias) and self.bias.requires_grad >= self.weight.requires_grad
        ):
            self.bias = None
        self.sharing = options.sharing(name, module)
        self.batch_dim = options.batch_dim
        self.notes: list[str] = []
        self.pairs, self.d_out, self.d_in = self.structure(module)
        limit = options.max_factor_dim
        sides = ((self.d_in, self.d_out), (self.d_out, self.d_in))
        reasons = ["" if limit is None else _reason_for_diagonal(dim, other, limit) for dim, other in sides]
        self.diagonal = (self.diagonal_input or bool(reasons[0]), bool(reasons[1]))
        for side, reason in zip("AG", reasons, strict=True):
            if reason and not (side == "A" and self.diagonal_input):
                self.notes.append(f"{side} diagonal: {reason}")

    @property
    def rule_name(self) -> str:
        """The name of the rule in the table, such as "Linear, expand"."""
        kind = type(self).__name__.strip("_").removesuffix("Layer")
        return f"{kind}, {self.sharing}" if self.rule == "Kronecker" else f"{kind}, {self.rule}"

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The weight, and the bias unless it is None."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def add_modules(self, modules: Iterable[nn.Module]) -> None:
        """Takes more modules that use the same weight and bias."""
        self.modules = [*self.modules, *modules]

    def replace_parameters(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Goes on with other parameters in the place of weight and bias, where a framework has replaced them."""
        self.weight = new[self.weight]
        self.bias = None if self.bias is None else new[self.bias]

    # What a module type defines -------------------------------------------------------------------------------------

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        """The weight and the bias (None: there is none) of the module."""
        return own_parameter(module, "weight"), module._parameters.get("bias")

    @abstractmethod
    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        """The values of ``pairs``, ``d_out`` and ``d_in`` for the module.

        Raises:
            Declined: If the module cannot be treated exactly.
        """

    @abstractmethod
    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        """The output gradient ``g`` of a call as rows ``[n, r, p, d_out]``.

        With "expand" examples and positions may be merged, ``[n r, 1, p, d_out]``. p may be the pairs of this call
        alone (``pairs`` of its :class:`~kfac_optim.layers.Observation`).

        Args:
            module: The module that was called.
            g: The gradient of its output, of the output's shape.
            context: That of the call's :class:`~kfac_optim.layers.Observation`.
        """

    @abstractmethod
    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        """One call's contribution to A.

        Args:
            module: The module that was called.
            a: Its input.
            output: Its output.
            dtype: The precision to compute in.
        """

    @abstractmethod
    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors of the shapes of weight and bias as matrices ``[p, d_out, d_in]``."""

    @abstractmethod
    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The inverse of :meth:`~kfac_optim.KroneckerLayer.to_matrix`: one tensor per entry of ``parameters``."""

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        """The dimension of the examples in an input or output ``x``; None if ``x`` is a single example without one."""
        return 0 if x.dim() > 1 else None

    # The same for all types -----------------------------------------------------------------------------------------

    def subsample(self, module: nn.Module, x: Tensor, fraction: float) -> Tensor:
        """Selects the examples of an input or output that the statistics are made of, ``fraction`` of them."""
        if fraction == 1:
            return x
        dim = self.batch_dim_of(module, x)
        return x if dim is None else spread_examples(x, dim, fraction)

    @property
    def by_example(self) -> bool:
        """Whether all calls in a backward pass together give each example one row (reduce), not rows of their own."""
        return self.sharing == "reduce"

    def output_moment(self, module: nn.Module, g: Tensor, observation: Observation) -> Tensor:
        """The sum of ``g g^T`` over the rows of one call, ``[p, d_out, d_out]`` (``[p, d_out]`` where G is diagonal).

        For layers with ``by_example`` the sum of g over the positions of each example, ``[n, p, d_out]``.
        """
        rows = self.output_rows(module, g, observation.context)
        return rows.sum(1) if self.by_example else second_moment(rows, diagonal=self.diagonal[1])

    @property
    def combined_with(self) -> Hashable:
        """Layers in which this is equal are combined together, by :meth:`combine_layers`; by default none are."""
        return self

    @classmethod
    def combine_layers(
        cls, layers: Sequence[KroneckerLayer], calls: Sequence[Sequence[tuple[Observation, Tensor]]]
    ) -> tuple[Tensor, int, Tensor]:
        """:meth:`combine_calls` of some layers of the same ``combined_with``, one layer's pairs after the other's.

        Args:
            layers: The layers.
            calls: The calls of each, all on as many examples.
        """
        (layer,), (of_layer,) = layers, calls
        return layer.combine_calls(of_layer)

    def combine_calls(self, calls: Sequence[tuple[Observation, Tensor]]) -> tuple[Tensor, int, Tensor]:
        """Combines the calls of a backward pass on the same examples, for layers with ``by_example``.

        Args:
            calls: For each call its observation and its :meth:`~kfac_optim.KroneckerLayer.output_moment`.

        Returns:
            The sum of ``a~ a~^T`` over examples, their number, and the sum of ``g~ g~^T``.
        """
        a = sum((seen.a for seen, _ in calls[1:]), calls[0][0].a)
        positions = sum((seen.count for seen, _ in calls[1:]), calls[0][0].count)
        g = sum((rows for _, rows in calls[1:]), calls[0][1])
        mean = a / positions.clamp(min=1)[:, None]
        moments = (second_moment(x[:, None], diagonal=d) for x, d in zip((mean, g), self.diagonal, strict=True))
        return next(moments), len(g), next(moments)


class RowsLayer(KroneckerLayer):
    """A layer whose outputs are its weight times rows of its input, ``s = W a``: all types but norm layers.

    A follows from the rows; the bias is the last column of the matrices.
    """

    @abstractmethod
    def input_rows(self, module: nn.Module, a: Tensor, output: Tensor) -> Iterable[Tensor]:
        """The input ``a`` of a call as rows ``[n, r, p, d]``, in chunks over n; d is d_in without the bias's column."""

    @abstractmethod
    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as matrices ``[p, d_out, d]``, without the bias's column."""

    @abstractmethod
    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`~kfac_optim.layers.RowsLayer.weight_to_matrix`."""

    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
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
        """The sums over positions of each example, of rows ``[n, r, p, d]`` in chunks over n."""
        sums, positions = [], 0
        for rows in chunks:
            positions = rows.shape[1]
            sums.append(rows.sum(1))
        a = torch.cat(sums)
        if self.bias is not None:
            a = F.pad(a, (0, 1), value=positions)
        return Observation(a, torch.full(a.shape[1:2], float(positions), dtype=a.dtype, device=a.device))

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix = self.weight_to_matrix(weight)
        return matrix if bias is None else torch.cat((matrix, bias.reshape(self.pairs, self.d_out, 1)), dim=-1)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        if self.bias is None:
            return (self.matrix_to_weight(matrix),)
        return self.matrix_to_weight(matrix[..., :-1]), matrix[..., -1].flatten()


def own_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter of the module, which it owns and uses as it is.

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


# A vocabulary's factor costs as much as all others of a model together, and one entry of it belongs to one row of the
# weight: next to nothing is lost by its diagonal.
_LOPSIDED_DIM, _LOPSIDED_RATIO = 1024, 16


def _reason_for_diagonal(dim: int, other: int, limit: int) -> str:
    """Why a factor is kept diagonal, beside one of ``other`` rows; empty if it is not."""
    if dim > limit:
        return f"{dim} > max_factor_dim={limit}"
    if dim > _LOPSIDED_DIM and dim >= _LOPSIDED_RATIO * other:
        return f"{dim} is {dim // other} times {other} (max_factor_dim=None: whole)"
    return ""
