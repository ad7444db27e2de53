"""What a layer is: one weight, its bias, and the Kronecker pairs of their Fisher block.

Shapes: n examples, r shared positions, p Kronecker pairs; the package's docstring defines rows and pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common.machines import machine_of
from ..distributed import whole_shape
from ..factors import FactorSpec
from .moments import multiplicand, second_moment, spread_examples, with_ones
from .options import LayerOptions, Sharing, kept_of

COMPUTED = "is computed from other parameters"  # coverage/ looks for this in reasons: the layer may come back


class Declined(Exception):
    """Raised by a layer factory for a module that it cannot treat exactly; its message is shown as the reason."""


@dataclass
class Observation:
    """One module call's contribution to A, and what its output gradient will need besides.

    Attributes:
        a: The sum of ``a a^T`` over the rows of the call, ``[p, d_in, d_in]`` (``[p, d_in]`` where A is diagonal,
            ``[p b, m, m]`` where it has b blocks of m rows). For layers with ``by_example``, instead, the sum of a over
            the positions of each example, ``[n, p, d_in]``.
        count: The number of rows in the sum. For layers with ``by_example``, instead, the number of positions of each
            example, a tensor ``[p]``.
        context: What :meth:`~kfac_optim.layers.base.RowsLayer.output_rows` and
            :meth:`~kfac_optim.KroneckerLayer.output_moment` need to know of the call; None for most types.
    """

    a: Tensor
    count: Any
    context: Any = None


class KroneckerLayer(ABC):
    """One weight, its bias, and the Kronecker pairs of their Fisher block.

    A subclass says what a call contributes to A and G, and which entries of matrices are those of the weight. Most
    types do this in terms of rows; they derive from :class:`~kfac_optim.layers.base.RowsLayer`.

    Args:
        name: The module's name.
        module: The module.
        options: The engine's options for layers.

    Attributes:
        name: The name of the (first) module.
        modules: The modules that use the weight.
        weight: The parameter whose block this is.
        weight_shape: Its shape, or that of this rank's shard of it.
        is_shard: Whether tensor parallelism has split the weight, so that the layer is a part of it.
        bias: The bias, or None where there is none or the optimizer does not update it.
        bias_part: The slice of the bias that belongs to this weight: all of it, unless several weights share one bias.
        pairs: The number p of Kronecker pairs.
        d_out: The number of rows of ``W``, so that G is ``[p, d_out, d_out]``.
        d_in: The number of columns of ``W``, bias included, so that A is ``[p, d_in, d_in]``.
        machine: The kind of machine that the weight was on when the layer was found, for which the specs are.
        specs: What is kept of A and of G, a :class:`~kfac_optim.factors.FactorSpec` each: all of it, blocks along the
            diagonal, or the diagonal.
        diagonal_input: Whether A is diagonal by nature (embeddings).
        always_expands: Whether ``sharing`` is "expand" whatever the options say.
        copies_rows: Whether the entries of rows are those of inputs and output gradients, unchanged, so that half
            precision can hold them.
        pairs_share_scale: Whether the pairs share one damping and one norm.
        stored_transposed: Whether the weight is the transpose of its matrix in memory; vectors of such layers are then
            kept as transposes too, which need no copying.
        sharing: "expand" or "reduce".
        batch_dim: The dimension of the examples in inputs with shared positions.
        host: For the projections of attention and the layers of recurrent modules, which are not modules that are
            called, the module that uses the weight; else None.
        gates: How many gates of a recurrent cell the outputs are; G keeps a block for each.
        most_reach: How far its steps may be stretched along flat directions (:mod:`~kfac_optim.steering.reach`).
        notes: What a user should know about the layer, shown in the table.
        reparametrized: If its modules compute their weight from ``weight``, in operations of their own: why their other
            parameters are no part of the block; else empty.
    """

    rule = "Kronecker"
    reparametrized = ""
    pairs_share_scale = False
    diagonal_input = False
    always_expands = False
    copies_rows = False
    stored_transposed = False
    gates = 1
    most_reach = 3.0
    bias_part = slice(None)
    host: nn.Module | None = None

    def __init__(self, name: str, module: nn.Module, options: LayerOptions) -> None:
        self.name = name
        self.modules = [module]
        self.weight, self.bias = self.own_parameters(module)
        # Not read from the weight later, because ZeRO 3 leaves an empty tensor in its place between uses.
        self.weight_shape = options.own_shape(self.weight)
        self.is_shard = self.weight_shape != whole_shape(self.weight)
        if not self.weight_shape.numel():
            raise Declined("the weight is empty")
        if self.bias is not None and not self._trains_bias(self.bias, options):
            self.bias = None
        self.sharing: Sharing = "expand" if self.always_expands else options.sharing(name, module)
        self.batch_dim = options.batch_dim
        self.notes = ["this rank's shard"] if self.is_shard else []
        self.pairs, self.d_out, self.d_in = self.structure(module)
        self.machine = machine_of(self.weight.device)
        limit = options.largest_block(self.machine)
        a, why_a = kept_of("A", FactorSpec(self.pairs, self.d_in, self.diagonal_input), self.d_out, limit)
        g, why_g = kept_of("G", FactorSpec(self.pairs, self.d_out), self.d_in, limit, self.gates)
        self.specs = a, g
        self.notes += [f"{side} {why}" for side, why in (("A", why_a), ("G", why_g)) if why]

    def _trains_bias(self, bias: nn.Parameter, options: LayerOptions) -> bool:
        """Whether the bias belongs to the block: it is trained if the weight is, and not that of several shards."""
        # If the weight is split by columns, its shards have one bias together.
        shared = self.is_shard and options.own_shape(bias) == bias.shape
        return not shared and options.trains(bias) and bias.requires_grad >= self.weight.requires_grad

    @property
    def rule_name(self) -> str:
        """The name of the rule in the table, such as "Linear, expand"."""
        kind = type(self).__name__.strip("_").removesuffix("Layer")
        return f"{kind}, {self.sharing}" if self.rule == "Kronecker" else f"{kind}, {self.rule}"

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The weight, and the bias unless it is None."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def owners(self) -> Sequence[nn.Module]:
        """The modules whose parameters weight and bias are; most often they also use them."""
        return self.modules

    def add_modules(self, modules: Iterable[nn.Module]) -> None:
        """Adds modules that use the same weight and bias."""
        self.modules = [*self.modules, *modules]

    def replace_parameters(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Switches to the parameters with which a framework has replaced old ones; ``new`` has them by the old."""
        self.weight = new[self.weight]
        self.bias = None if self.bias is None else new[self.bias]

    # What a module type defines -------------------------------------------------------------------------------------

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        """The weight and the bias of the module; None in place of the bias if it has none."""
        return own_parameter(module, "weight"), module._parameters.get("bias")

    @abstractmethod
    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        """The values of ``pairs``, ``d_out`` and ``d_in`` for the module.

        Raises:
            Declined: If the module cannot be treated exactly.
        """

    @abstractmethod
    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        """One call's contribution to A.

        Args:
            module: The module that was called.
            a: Its first input.
            output: Its output.
            dtype: The precision to compute in.
        """

    @abstractmethod
    def output_moment(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        """The sum of ``g g^T`` over the rows of one call, ``[p, d_out, d_out]`` (``[p, d_out]`` where G is diagonal).

        It is ``[p b, m, m]`` where G has b blocks of m rows. For layers with ``by_example`` it is, instead, the sum of
        g over the positions of each example, ``[n, p, d_out]``.

        Args:
            module: The module that was called.
            g: The gradient of its output, of the output's shape.
            context: The ``context`` of the call's :class:`~kfac_optim.layers.base.Observation`.
        """

    @abstractmethod
    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The parts of matrices ``[p, d_out, d_in]``, of any dtype, that are those of ``parameters``, in their shapes.

        Each part has entries of the matrices, best as a view. So this also says where those of a gradient belong in
        its matrix, whose other entries are zero.
        """

    def as_applied(self, module: nn.Module, details: Sequence[int]) -> Any:
        """What :meth:`~kfac_optim.KroneckerLayer.observe` and the like get as the module: for most types it itself.

        ``details``: how the weight was applied, if inside the call of a host (``hosted.py``); else empty.
        """
        return module

    def with_examples(self, module: Any, x: Tensor) -> Tensor:
        """An input or output gradient with a dimension for the examples, which that of attention may lack."""
        return x

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        """The dimension of the examples in an input or output ``x``; None if ``x`` is a single example without one."""
        return 0 if x.dim() > 1 else None

    # The same for all types -----------------------------------------------------------------------------------------

    def subsample(self, module: nn.Module, x: Tensor, fraction: float) -> Tensor:
        """Selects the fraction of the examples of an input or output from which statistics are collected."""
        if fraction == 1:
            return x
        dim = self.batch_dim_of(module, x)
        return x if dim is None else spread_examples(x, dim, fraction)

    def multiplicand(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Converts an input or output gradient to the precision in which its rows are multiplied or summed."""
        return multiplicand(x, dtype) if self.copies_rows and not self.by_example else x.to(dtype)

    @property
    def by_example(self) -> bool:
        """Whether an example has one row for all calls of a backward pass (reduce), rather than rows for each call."""
        return self.sharing == "reduce"

    @property
    def combined_with(self) -> Hashable:
        """A key that layers share if one call of :meth:`combine_layers` handles them all; by default no two do."""
        return self

    @classmethod
    def combine_layers(
        cls, layers: Sequence[KroneckerLayer], sums: Sequence[tuple[Tensor, Any, Tensor]]
    ) -> tuple[Tensor, int, Tensor]:
        """The moments of a backward pass, for layers with ``by_example``.

        Args:
            layers: Layers with the same ``combined_with``; by default a single one.
            sums: For each layer the sums over its calls, all on the same examples, of ``a`` and ``count`` of its
                observations, and of its output moments.

        Returns:
            The sum of ``a~ a~^T`` over examples, the number of examples, and the sum of ``g~ g~^T``; the pairs of one
            layer follow those of the other.
        """
        (layer,), ((a, positions, g),) = layers, sums
        mean = a / positions.clamp(min=1)[:, None]
        sides = zip((mean, g), layer.specs, strict=True)
        moments = (second_moment(x[:, None], diagonal=spec.diagonal, blocks=spec.blocks) for x, spec in sides)
        return next(moments), len(g), next(moments)


class RowsLayer(KroneckerLayer):
    """A layer whose outputs are its weight times rows of its input, ``s = W a``: all types but norm layers.

    A follows from the rows; the bias is the last column of the matrices.
    """

    @abstractmethod
    def input_rows(self, module: nn.Module, a: Tensor, output: Tensor) -> Iterable[Tensor]:
        """The first input of a call as rows ``[n, r, p, d]``, in chunks over n; d is d_in without the bias's column."""

    @abstractmethod
    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        """The output gradient ``g`` of a call as rows ``[n, r, p, d_out]``.

        With "expand" examples and positions may be merged, ``[n r, 1, p, d_out]``.

        Args:
            module: The module that was called.
            g: The gradient of its output, of the output's shape.
            context: The ``context`` of the call's :class:`~kfac_optim.layers.base.Observation`.
        """

    @abstractmethod
    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        """Matrices ``[p, d_out, d]``, without the bias's column, in the shape of the weight.

        See :meth:`~kfac_optim.KroneckerLayer.from_matrix`.
        """

    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        all_rows = self.input_rows(module, self.multiplicand(a.detach(), dtype), output)
        if self.by_example:
            return self._observe_examples(all_rows)
        moments, totals, count, spec = [], [], 0, self.specs[0]
        for rows in all_rows:
            if self.bias is not None and spec.blocks > 1:  # the 1 belongs to the last block
                rows = F.pad(rows, (0, 1), value=1.0)
            elif self.bias is not None:
                totals.append(rows.sum((0, 1), dtype=dtype))
            moments.append(second_moment(rows, diagonal=spec.diagonal, blocks=spec.blocks))
            count += rows.shape[0] * rows.shape[1]
        moment = sum(moments[1:], moments[0])
        if totals:
            moment = with_ones(moment, sum(totals[1:], totals[0]), count)
        return Observation(moment, count)

    def _observe_examples(self, chunks: Iterable[Tensor]) -> Observation:
        """Sums the rows of each example over positions; they come as ``[n, r, p, d]``, in chunks over n."""
        sums, positions = [], 0
        for rows in chunks:
            positions = rows.shape[1]
            sums.append(rows.sum(1))
        a = torch.cat(sums)
        if self.bias is not None:
            a = F.pad(a, (0, 1), value=positions)
        return Observation(a, torch.full(a.shape[1:2], float(positions), dtype=a.dtype, device=a.device))

    def output_moment(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        rows = self.output_rows(module, g, context)
        if self.by_example:
            return rows.sum(1)
        return second_moment(rows, diagonal=self.specs[1].diagonal, blocks=self.specs[1].blocks)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
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
        raise Declined(f"{name} {COMPUTED} (spectral_norm, pruning) or missing")
    require_initialised(module, parameter)
    if parameter.is_complex():
        raise Declined("complex parameters")
    return parameter


def require_initialised(module: nn.Module, parameter: nn.Parameter) -> None:
    """Raises ValueError for a parameter of a lazy module that has no shape yet."""
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{type(module).__name__} is not initialised: run the model once before building the optimizer"
        )
