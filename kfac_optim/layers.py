"""Kronecker structure of each module type.

One canonical shape serves every layer: a call computes::

    s[n, r] = W a[n, r],     n examples, r shared positions (pixels, tokens; 1 for a plain Linear),

the bias being the last column of ``W`` with a 1 appended to ``a``; ``g[n, r] = dL/ds[n, r]``. A layer here turns what a
module saw into *rows* of that form, ``[n, r, p, d]``, and gradients into matrices ``[p, d_out, d_in]`` and back. ``p``
is the number of Kronecker pairs: 1, the groups of a grouped convolution, q/k/v of attention, the channels of a norm
layer. From rows the raw second moments follow, the same for every type (Eschenhagen et al. 2023)::

    expand:  sum_{n,r} a a^T  (count n r)                     sum_{n,r} g g^T
    reduce:  a~ = mean_r a, g~ = sum_r g;  sum_n a~ a~^T  (count n)    sum_n g~ g~^T

For convolutions expand is KFC (Grosse & Martens 2016). Norm layers have no such product structure: their block is the
Fisher of scale and shift per channel, which is the pair (1, F_c) with ``W = [scale, shift]^T`` and ``a = 1``.

``register_layer`` adds a module type; a type that cannot be treated exactly as above is declined with its reason
(:class:`Declined`) and trains by the base rule.
"""

from __future__ import annotations

import functools
import gc
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "Declined",
    "KroneckerLayer",
    "LayerOptions",
    "LinearLayer",
    "Observation",
    "find_layers",
    "full_precision",
    "register_layer",
]

Sharing = Literal["expand", "reduce"]

# Patches of a convolution are unfolded for a few examples at a time: this many numbers at once (16 MiB in float32)
# instead of a copy of the activations as many times larger as the kernel has taps.
_CHUNK_NUMEL = 2**22

# From this dimension on strips of a symmetric product save more than smaller products lose. Measured against the whole
# product, single thread: 1.1 at 257, 0.8 at 288, 0.6 at 1025.
_GRAM_DIM = 280


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
        """expand or reduce, for one module.

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


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Autocast, gradients and TF32 off: second moments need every bit of float32."""
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        if device_type != "cuda":
            yield
            return
        matmul: Any = torch.backends.cuda.matmul
        try:
            precision, choose = torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision
            choose("highest")
        except RuntimeError:  # chosen by the attribute of torch 2.9, beside which the functions refuse to work
            precision, choose = matmul.fp32_precision, functools.partial(setattr, matmul, "fp32_precision")
            choose("ieee")
        try:
            yield
        finally:
            choose(precision)


def gram(rows: Tensor) -> Tensor:
    """``x^T x`` of ``[..., rows, d]``: in strips from the diagonal on, as the rest is symmetric."""
    d = rows.shape[-1]
    if d < _GRAM_DIM:
        return rows.mT @ rows
    product = rows.new_empty(*rows.shape[:-2], d, d)
    strip = max(_GRAM_DIM // 2, d // 8)
    for start in range(0, d, strip):
        stop = start + strip
        product[..., start:stop, start:] = rows[..., start:stop].mT @ rows[..., start:]
        product[..., stop:, start:stop] = product[..., start:stop, stop:].mT
    return product


def spread_examples(x: Tensor, dim: int, fraction: float) -> Tensor:
    """``fraction`` of the examples along ``dim``, rounded up and evenly spread.

    Evenly, so that parts of a batch (ranks, micro-batches) give the examples that the whole would give.
    """
    examples = x.shape[dim]
    kept = math.ceil(fraction * examples)
    if kept == examples:
        return x
    return x.index_select(dim, torch.arange(kept, device=x.device) * examples // kept)


def second_moment(rows: Tensor, *, diagonal: bool) -> Tensor:
    """``sum x x^T`` over rows ``[n, r, p, d]``: ``[p, d, d]``, or its diagonal ``[p, d]``."""
    rows = rows.flatten(0, 1)
    return rows.square().sum(0) if diagonal else gram(rows.transpose(0, 1))


def _with_ones(moment: Tensor, total: Tensor, count: float) -> Tensor:
    """The moment of rows with a 1 appended, from the moment and the sum ``[p, d]`` of the rows without it."""
    if moment.dim() == 2:
        return F.pad(moment, (0, 1), value=count)
    moment = F.pad(moment, (0, 1, 0, 1), value=count)
    moment[:, :-1, -1] = moment[:, -1, :-1] = total
    return moment


class KroneckerLayer:
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

    # What a module type defines. Not abstract methods: a type that observes in a way of its own, as norm layers do, has
    # no use for all of them. One that is missing and needed raises, never passes in silence.

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Weight and bias of the module."""
        return own_parameter(module, "weight"), module._parameters.get("bias")

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        """``(pairs, d_out, d_in)``.

        Raises:
            Declined: If the module can't be treated exactly.
        """
        raise NotImplementedError

    def input_rows(self, module: nn.Module, a: Tensor, output: Tensor) -> Iterable[Tensor]:
        """The input of a call as rows ``[n, r, p, d]`` without the bias's 1, in chunks over n."""
        raise NotImplementedError

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        """The output gradient of a call as rows ``[n, r, p, d_out]``."""
        raise NotImplementedError

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as ``[p, d_out, d]`` without the bias column."""
        raise NotImplementedError

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`weight_to_matrix`."""
        raise NotImplementedError

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
            moment = _with_ones(moment, sum(totals[1:], totals[0]), count)
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


LayerFactory = Callable[[str, nn.Module, LayerOptions], "KroneckerLayer | Sequence[KroneckerLayer]"]
_FACTORIES: dict[type[nn.Module] | str, LayerFactory] = {}


def register_layer(*module_types: type[nn.Module] | str) -> Callable[[Any], Any]:
    """Registers how modules of a type (and of its subclasses that keep its ``forward``) become Kronecker layers.

    Decorates a :class:`KroneckerLayer` subclass, or any ``factory(name, module, options)`` that returns one layer or
    several. A type of a package that is not to be imported is given by its qualified name,
    ``"transformers.pytorch_utils.Conv1D"``.
    """

    def register(factory: LayerFactory) -> LayerFactory:
        for module_type in module_types:
            _FACTORIES[module_type] = factory
        return factory

    return register


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


@register_layer(nn.Linear)
class LinearLayer(KroneckerLayer):
    """``nn.Linear`` on inputs of any rank, features last."""

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        d_out, d_in = self.weight_to_matrix(torch.empty(self.weight_shape, device="meta")).shape[1:]
        return 1, d_out, d_in + (self.bias is not None)

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        return None if x.dim() < 2 else self.batch_dim if x.dim() > 2 else 0

    def input_rows(self, module: nn.Module, a: Tensor, output: Tensor) -> Iterable[Tensor]:
        yield self._rows(a)

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        return self._rows(g)

    def _rows(self, x: Tensor) -> Tensor:
        if x.dim() <= 2 or self.sharing == "expand":
            return x.reshape(-1, 1, 1, x.shape[-1])
        return x.movedim(self.batch_dim, 0).flatten(1, -2)[:, :, None]

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight[None]

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix[0]


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedLinearLayer(LinearLayer):
    """transformers' ``Conv1D``: a Linear whose weight is stored ``[d_in, d_out]``."""

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.T[None]

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix[0].T


@register_layer(nn.Embedding)
class EmbeddingLayer(LinearLayer):
    """``nn.Embedding``: a Linear on one-hot inputs, so that A is the diagonal of token frequencies.

    Rows at ``padding_idx`` don't reach the weight and count neither in A nor in G. Always expand.
    """

    diagonal_input = True

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        assert isinstance(module, nn.Embedding)
        for option in ("sparse", "scale_grad_by_freq", "max_norm"):
            if getattr(module, option):
                raise Declined(f"{option}={getattr(module, option)}")
        self.sharing: Sharing = "expand"
        return 1, module.embedding_dim, module.num_embeddings

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        return super().batch_dim_of(module, x if x.is_floating_point() else x[..., None])  # tokens have no features

    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        assert isinstance(module, nn.Embedding)
        frequency = torch.bincount(a.flatten(), minlength=module.num_embeddings).to(dtype)[None]
        if module.padding_idx is None:
            return Observation(frequency, a.numel())
        frequency[:, module.padding_idx] = 0
        # The one count that only the data know; waiting for it costs a synchronisation, on statistics steps only.
        return Observation(frequency, float(frequency.sum()), context=a != module.padding_idx)

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        return self._rows(g if context is None else g * context[..., None])

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.T[None]

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix[0].T


class _ConvNdLayer(KroneckerLayer):
    """What convolutions and transposed convolutions share: groups are Kronecker pairs, positions are output pixels."""

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        assert isinstance(module, nn.modules.conv._ConvNd)
        d_in = module.in_channels // module.groups * math.prod(module.kernel_size)
        return module.groups, module.out_channels // module.groups, d_in + (self.bias is not None)

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        assert isinstance(module, nn.modules.conv._ConvNd)
        return 0 if x.dim() == len(module.kernel_size) + 2 else None

    def windows(self, module: nn.modules.conv._ConvNd, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        """The image over which the kernel slides, and how it slides."""
        raise NotImplementedError

    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        assert isinstance(module, nn.modules.conv._ConvNd)
        image, windows = self._batched(module, a.detach().to(dtype), output)
        if self.by_example or self.diagonal[0] or not shift_pays(image.shape, windows, module.groups, a.device.type):
            return super().observe(module, a, output, dtype)
        moment = shifted_moment(image, windows, module.groups)
        count = len(image) * math.prod(windows.positions(image.shape[2:]))
        if self.bias is not None:
            taps = tuple(range(-len(windows.size), 0))
            total = windows.unfold(image.sum(0, keepdim=True)).flatten(2, -1 + taps[0]).sum(2)
            moment = _with_ones(moment, total.reshape(module.groups, -1), count)
        return Observation(moment, count)

    def input_rows(self, module: nn.Module, a: Tensor, output: Tensor) -> Iterable[Tensor]:
        assert isinstance(module, nn.modules.conv._ConvNd)
        image, windows = self._batched(module, a, output)
        for chunk in image.split(windows.examples_at_once(image)):
            patches = windows.unfold(chunk)
            patches = patches.movedim(1, len(windows.size) + 1).flatten(1, len(windows.size))
            yield patches.reshape(*patches.shape[:2], module.groups, -1)

    def _batched(self, module: nn.modules.conv._ConvNd, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        unbatched = a.dim() == len(module.kernel_size) + 1
        return self.windows(module, a[None], output[None]) if unbatched else self.windows(module, a, output)

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        assert isinstance(module, nn.modules.conv._ConvNd)
        if g.dim() == len(module.kernel_size) + 1:
            g = g[None]
        return g.flatten(2).mT.unflatten(-1, (self.pairs, self.d_out))


@dataclass(frozen=True)
class Windows:
    """Windows of ``size`` taps, ``dilation`` apart, that slide by ``stride`` over spatial dimensions.

    ``padding`` are the zeros that are yet to be added before and after each dimension.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def unfold(self, x: Tensor) -> Tensor:
        """``[n, c, *spatial]`` as ``[n, c, *positions, *taps]``; a view where there is no padding."""
        if any(map(any, self.padding)):
            x = F.pad(x, [zeros for pair in reversed(self.padding) for zeros in pair])
        for dim, (k, s, d) in enumerate(zip(self.size, self.stride, self.dilation, strict=True), start=2):
            x = x.unfold(dim, (k - 1) * d + 1, s)[..., ::d]
        return x

    def taps(self, lengths: Sequence[int]) -> list[_Taps]:
        """The taps along each dimension of an image of some lengths."""
        before = [zeros for zeros, _ in self.padding]
        return [_Taps(*taps) for taps in zip(self.size, self.dilation, before, self.positions(lengths), strict=True)]

    def positions(self, lengths: Sequence[int]) -> list[int]:
        """Number of windows along each dimension of an image of some lengths."""
        config = zip(lengths, self.size, self.stride, self.dilation, self.padding, strict=True)
        return [(length + sum(padding) - (k - 1) * d - 1) // s + 1 for length, k, s, d, padding in config]

    def examples_at_once(self, x: Tensor) -> int:
        """How many examples to unfold together, so that the copy stays small and the products large."""
        taps = math.prod(self.size)
        d = x.shape[1] * taps
        return max(1, max(_CHUNK_NUMEL, d * d // taps) // max(1, math.prod(self.positions(x.shape[2:])) * d))


@dataclass(frozen=True)
class _Rates:
    """Seconds per unit of work of the two ways to the moment of a convolution.

    Attributes:
        flop: Of the products of shifted images.
        product: For each of these products.
        block: For each number in their results, which are subtracted and put in order several times.
        element: For each number of an image that a product reads; in brackets, with groups.
        patch_flop: Of the product of unfolded patches.
        patch: For each number of a patch that is written.
    """

    flop: float
    product: float
    block: float
    element: tuple[float, float]
    patch_flop: float
    patch: float


# Fitted to both ways at 24 shapes, one thread of a CPU; errors are up to a factor of 2. On an accelerator guessed from
# data sheets: what matters there is that many small products are slow.
_RATES = {"cpu": _Rates(1.2e-11, 8e-5, 3.3e-8, (1.6e-9, 6e-9), 2e-11, 4.3e-9)}
_ACCELERATOR = _Rates(3e-14, 3e-5, 2e-11, (1e-12, 4e-12), 3e-14, 8e-12)


@functools.lru_cache(maxsize=4096)
def shift_pays(shape: torch.Size, windows: Windows, groups: int, device_type: str) -> bool:
    """Whether :func:`shifted_moment` is expected to be faster than a product of unfolded patches.

    It is not where the image is small beside the kernel, so that most of it is border, nor for few channels and many
    groups. It needs stride 1.

    Args:
        shape: Of the image.
        windows: How the kernel slides.
        groups: p.
        device_type: Where.
    """
    if max(windows.stride) > 1:
        return False
    n, channels, *lengths = shape
    c, taps, outputs = channels // groups, math.prod(windows.size), windows.positions(lengths)
    chunks = math.ceil(math.prod(shape) / _CHUNK_NUMEL)
    products, positions = _shifted_work(windows.taps(lengths), lengths)
    elements, patches = n * positions * channels, n * math.prod(outputs) * channels * taps
    rates = _RATES.get(device_type, _ACCELERATOR)
    shifted = 2 * rates.flop * elements * c + rates.element[groups > 1] * elements
    shifted += chunks * products * (rates.product + rates.block * groups * c * c)
    symmetric = 0.6 if c * taps >= _GRAM_DIM else 1.0
    return shifted < 2 * rates.patch_flop * symmetric * patches * c * taps + rates.patch * patches


def _shifted_work(dims: Sequence[_Taps], lengths: Sequence[int], same: bool = True) -> tuple[int, int]:
    """How many products :func:`_tap_products` takes, and over how many positions of an image in all."""
    if not dims:
        return 1, 1
    products = positions = 0
    for _, shift, first, last, missed in dims[0].distances(lengths[0], same):
        inner = _shifted_work(dims[1:], lengths[1:], same and shift == 0)
        beyond = len(set().union(*missed.values()))
        products += inner[0] * (1 + beyond)
        positions += inner[1] * (last - first + beyond)
    return products, positions


def shifted_moment(x: Tensor, windows: Windows, groups: int) -> Tensor:
    """``sum a a^T`` over all windows of stride 1, ``[p, d, d]``, without a copy of them.

    The block of two taps is the product of the image with itself, shifted by their distance, less the rows and columns
    that one of the two windows does not reach at the border: of a 3x3 kernel 13 products over the whole image (those of
    opposite distances are transposes) and some over single rows and columns, instead of 81.

    Args:
        x: ``[n, c, *spatial]``.
        windows: How the kernel slides; the stride is taken for 1.
        groups: p.
    """
    dims = windows.taps(x.shape[2:])
    moment: Tensor | float = 0.0
    for chunk in x.split(max(1, _CHUNK_NUMEL // x[:1].numel())):
        # [p, *spatial, n, c]: transposed as a matrix, which is several times faster than permuted.
        rows = chunk.flatten(0, 1).flatten(1).T.contiguous().view(*chunk.shape[2:], len(chunk), groups, -1)
        rows = rows.movedim(-2, 0)
        moment = moment + _tap_products(rows, rows, dims)
    assert isinstance(moment, Tensor)
    # From [p, *taps, c, *taps, c] to the order of the weight, channels first.
    middle = 1 + len(dims)
    moment = moment.movedim(-1, middle + 1).movedim(middle, 1)
    d = x.shape[1] // groups * math.prod(windows.size)
    return moment.reshape(groups, d, d)


@dataclass(frozen=True)
class _Taps:
    """The taps of a kernel along one spatial dimension: how many, how far apart, and what they slide over."""

    count: int
    dilation: int
    padding: int
    outputs: int

    def reach(self, tap: int) -> tuple[int, int]:
        """First and last + 1 of the positions that a tap would see without the border of the image."""
        start = tap * self.dilation - self.padding
        return start, start + self.outputs

    def distances(self, length: int, same: bool) -> Iterator[tuple[int, int, int, int, dict[int, list[int]]]]:
        """For each distance between two taps what is to be multiplied, of an image of a length.

        Args:
            length: Of the image along the dimension.
            same: Whether it is multiplied with itself; opposite distances are then transposes.

        Yields:
            The distance in taps and in positions; the first and last + 1 of the positions under the first tap; and by
            first tap those of them that its windows, or the second tap's, do not reach.
        """
        for distance in range(0 if same else 1 - self.count, self.count):
            shift = distance * self.dilation
            first, last = max(0, -shift), min(length, length - shift)
            if first >= last:  # the taps are further apart than the image is long
                first = last = shift = 0
            missed = {}
            for tap in range(max(0, -distance), self.count - max(0, distance)):
                start, stop = self.reach(tap)
                missed[tap] = [*range(first, min(start, last)), *range(max(stop, first), last)]
            yield distance, shift, first, last, missed


def _tap_products(left: Tensor, right: Tensor, dims: Sequence[_Taps], axis: int = 1) -> Tensor:
    """``[p, *taps, c, *taps, c]``: for any two taps the sum over windows of (left under one) (right under the other)^T.

    Args:
        left: ``[p, ..., *spatial, n, c]``; sums run over what stands between p and c.
        right: The same shape. ``right is left`` halves the work.
        dims: The taps along the spatial dimensions.
        axis: The first spatial dimension.
    """
    same = left is right
    if not dims:
        rows = left.flatten(-3, -2)
        products = gram(rows) if same else rows.mT @ right.flatten(-3, -2)
        return products.reshape(len(rows), -1, *products.shape[-2:]).sum(1)
    taps = dims[0]
    blocks: dict[tuple[int, int], Tensor] = {}
    for distance, shift, first, last, missed in taps.distances(left.shape[axis], same):

        def product(start: int, stop: int, shift: int = shift) -> Tensor:
            part = left.narrow(axis, start, stop - start)
            other = part if same and shift == 0 else right.narrow(axis, start + shift, stop - start)
            return _tap_products(part, other, dims[1:], axis + 1)

        whole = product(first, last)
        beyond = {row: product(row, row + 1) for row in set().union(*missed.values())}
        for i, rows_missed in missed.items():
            blocks[i, i + distance] = whole - sum(beyond[row] for row in rows_missed)
    inner = len(dims)  # the other spatial dimensions' taps, and the channels
    if same:
        mirrored = {
            (j, i): b.movedim(tuple(range(1, 1 + inner)), tuple(range(-inner, 0))) for (i, j), b in blocks.items()
        }
        blocks = mirrored | blocks
    lines = [torch.stack([blocks[i, j] for j in range(taps.count)], 1 + inner) for i in range(taps.count)]
    return torch.stack(lines, 1)


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvLayer(_ConvNdLayer):
    """``nn.Conv1d/2d/3d`` with any stride, padding, padding mode, dilation and groups."""

    def windows(self, module: nn.modules.conv._ConvNd, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        zeros = module._reversed_padding_repeated_twice
        padding = tuple(zip(zeros[-2::-2], zeros[::-2], strict=True))
        if module.padding_mode != "zeros":
            a, padding = F.pad(a, zeros, mode=module.padding_mode), ((0, 0),) * len(padding)
        return a, Windows(module.kernel_size, module.stride, module.dilation, padding)

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.pairs, self.d_out, -1)

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.weight_shape)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeLayer(_ConvNdLayer):
    """``nn.ConvTranspose1d/2d/3d``: a convolution of the zero-stuffed input with the flipped kernel."""

    def windows(self, module: nn.modules.conv._ConvNd, a: Tensor, output: Tensor) -> tuple[Tensor, Windows]:
        padding: list[int] = []
        config = (module.kernel_size, module.stride, cast(tuple[int, ...], module.padding), module.dilation)
        for dim, (k, s, p, d) in enumerate(zip(*config, strict=True), start=2):
            stuffed = a.new_zeros(*a.shape[:dim], (a.shape[dim] - 1) * s + 1, *a.shape[dim + 1 :])
            stuffed[(slice(None),) * dim + (slice(None, None, s),)] = a
            a, reach = stuffed, (k - 1) * d
            before = reach - p
            padding[:0] = [before, output.shape[dim] + reach - before - a.shape[dim]]
        ones = (1,) * len(module.kernel_size)
        none = ((0, 0),) * len(ones)
        return F.pad(a, padding), Windows(module.kernel_size, ones, module.dilation, none)

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        flipped = weight.flip(tuple(range(2, weight.dim())))
        return flipped.unflatten(0, (self.pairs, -1)).transpose(1, 2).flatten(2)

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        shape = self.weight_shape
        flipped = matrix.unflatten(-1, (shape[0] // self.pairs, *shape[2:])).transpose(1, 2).reshape(shape)
        return flipped.flip(tuple(range(2, len(shape))))


class _NormLayer(KroneckerLayer):
    """Scale and shift of a norm layer: per channel the 2x2 Fisher ``F_c = M sum_n`` of per-example gradients.

    As a pair: ``W = [scale, shift]^T`` is ``[2, 1]``, A is the constant 1, G is ``F_c`` of the rows
    ``(sum_r g x_hat, sum_r g)``.
    """

    rule = "unit-wise"
    joint = True
    by_example = True

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        self.sharing: Sharing = "expand"
        return self.weight_shape.numel(), len(self.parameters), 1

    def batch_dim_of(self, module: nn.Module, x: Tensor) -> int | None:
        return None  # always all: cheap, and normalised by the whole batch

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        """The input after normalisation in a mode (``module.training`` at the call), before scale and shift."""
        raise NotImplementedError

    def by_channel(self, x: Tensor) -> Tensor:
        """A tensor of the output's shape, summed over the positions of each example: ``[n, channels]``."""
        raise NotImplementedError

    def observe(self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        # A reference to what autograd saves for its own backward anyway; normalised again when the gradient is there.
        one = torch.ones((), dtype=dtype, device=a.device)
        return Observation(one, one, context=(a.detach(), module.training))

    def pool(self, calls: Sequence[tuple[Observation, Tensor]]) -> tuple[Tensor, int, Tensor]:
        g = sum((rows for _, rows in calls[1:]), calls[0][1])
        return g.new_ones(self.pairs, 1, 1), 1, second_moment(g[:, None], diagonal=self.diagonal[1])

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        a, training = context
        x_hat = self.normalized(module, a.to(g.dtype), training)
        return torch.stack([self.by_channel(g * x_hat), self.by_channel(g)][: self.d_out], dim=-1)[:, None]

    def to_matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.stack([p.flatten() for p in (weight, bias) if p is not None], dim=-1)[..., None]

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor, ...]:
        return tuple(column.reshape(self.weight_shape) for column in matrix[..., 0].unbind(-1))


class _ChannelsLastNorm(_NormLayer):
    def by_channel(self, x: Tensor) -> Tensor:
        x = x.flatten(-len(self.weight_shape))
        return x.reshape(-1, x.shape[-1]) if x.dim() <= 2 else x.movedim(self.batch_dim, 0).flatten(1, -2).sum(1)


class _ChannelsFirstNorm(_NormLayer):
    def by_channel(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1).sum(2)


@register_layer(nn.LayerNorm)
class LayerNormLayer(_ChannelsLastNorm):
    """``nn.LayerNorm``; each entry of ``normalized_shape`` is a channel."""

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)


@register_layer(nn.RMSNorm)
class RMSNormLayer(_ChannelsLastNorm):
    """``nn.RMSNorm``: a scale and no shift, so 1x1 blocks."""

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        return F.rms_norm(x, module.normalized_shape, eps=module.eps)


@register_layer(nn.GroupNorm)
class GroupNormLayer(_ChannelsFirstNorm):
    """``nn.GroupNorm``."""

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormLayer(_ChannelsFirstNorm):
    """``nn.BatchNorm1d/2d/3d`` in train mode (batch statistics taken as given) and eval mode (running statistics)."""

    def normalized(self, module: Any, x: Tensor, training: bool) -> Tensor:
        if training or module.running_mean is None:
            return F.batch_norm(x, None, None, training=True, eps=module.eps)
        return F.batch_norm(x, module.running_mean.to(x), module.running_var.to(x), training=False, eps=module.eps)


class AttentionLayer(LinearLayer):
    """A projection of ``nn.MultiheadAttention``, which applies its weights by ``F.linear`` without calling a module.

    Inside attention tensors are sequence first, and flattened at the output projection.
    """

    def __init__(
        self, name: str, module: nn.Module, options: LayerOptions, host: nn.Module, weight: str, bias: str
    ) -> None:
        self.names, self.host = (weight, bias), host
        super().__init__(name, module, options)

    def own_parameters(self, module: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
        weight, bias = self.names
        return own_parameter(module, weight), module._parameters.get(bias)

    def subsample(self, module: nn.Module, x: Tensor, fraction: float, *, examples: int = 1) -> Tensor:
        """As for any layer, of ``examples`` in a batch; with the dimension of the examples where the model has it."""
        x = x.reshape(-1, examples, x.shape[-1]).movedim(1, self.batch_dim)
        return super().subsample(module, x, fraction)


class AttentionInputLayer(AttentionLayer):
    """The packed q, k, v projections: three Kronecker pairs on one weight.

    A call of ``F.linear`` may concern all three (self-attention) or some of them (cross-attention).
    """

    def structure(self, module: nn.Module) -> tuple[int, int, int]:
        rows, d_in = self.weight_shape
        return 3, rows // 3, d_in + (self.bias is not None)

    def observe(
        self, module: nn.Module, a: Tensor, output: Tensor, dtype: torch.dtype, *, pairs: slice = slice(0, 3)
    ) -> Observation:
        seen = super().observe(module, a, output, dtype)
        count = self._in_place_of(pairs, seen.count, 0) if self.by_example else seen.count
        return Observation(self._in_place_of(pairs, seen.a, self._pair_dim), count, pairs=pairs)

    def output_rows(self, module: nn.Module, g: Tensor, context: Any) -> Tensor:
        return super().output_rows(module, g, context).squeeze(2).unflatten(-1, (-1, self.d_out))

    def output_moment(self, module: nn.Module, g: Tensor, observation: Observation) -> Tensor:
        assert observation.pairs is not None
        return self._in_place_of(observation.pairs, super().output_moment(module, g, observation), self._pair_dim)

    @property
    def _pair_dim(self) -> int:
        return 1 if self.by_example else 0

    def _in_place_of(self, pairs: slice, part: Tensor, dim: int) -> Tensor:
        """What some pairs have (or one thing for each of them) among zeros for the others."""
        full = part.new_zeros(*part.shape[:dim], self.pairs, *part.shape[dim + 1 :])
        full.narrow(dim, pairs.start, pairs.stop - pairs.start).copy_(part)
        return full

    def weight_to_matrix(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (3, -1))

    def matrix_to_weight(self, matrix: Tensor) -> Tensor:
        return matrix.flatten(0, 1)


@register_layer(nn.SyncBatchNorm)
class SyncBatchNormLayer(BatchNormLayer):
    """``nn.SyncBatchNorm``: in train mode the mean and variance are those of all ranks' batches together.

    They are read off the layer's output, which is linear in its input, so that nothing has to be sent.
    """

    def observe(self, module: Any, a: Tensor, output: Tensor, dtype: torch.dtype) -> Observation:
        seen = super().observe(module, a, output, dtype)
        if module.training or module.running_mean is None:
            seen.context = (a.detach(), self._statistics(module, a.detach().to(dtype), output.detach().to(dtype)))
        return seen

    def _statistics(self, module: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and inverse standard deviation per channel, from ``y = weight * inv * (x - mean) + bias``."""
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        weight, bias = (p.detach().to(x).view(shape) for p in (module.weight, module.bias))
        mean_x, mean_y = x.mean(dims, keepdim=True), y.mean(dims, keepdim=True)
        variance = (x - mean_x).square().mean(dims, keepdim=True)
        slope = ((x - mean_x) * (y - mean_y)).mean(dims, keepdim=True) / variance
        known = (variance > 0) & (weight != 0) & (slope != 0)
        # A channel whose weight is zero (a zero-initialised residual branch) tells nothing: its own batch has to do.
        mean = torch.where(known, mean_x - (mean_y - bias) / slope, mean_x)
        return mean, torch.where(known, slope / weight, (variance + module.eps).rsqrt())

    def normalized(self, module: Any, x: Tensor, training: Any) -> Tensor:
        if isinstance(training, bool):
            return super().normalized(module, x, training)
        mean, inverse = training
        return (x - mean) * inverse


@register_layer(nn.MultiheadAttention)
def _attention(name: str, module: nn.Module, options: LayerOptions) -> Sequence[KroneckerLayer]:
    """In and out projections; q, k, v of different widths have weights of their own and each a part of one bias."""
    assert isinstance(module, nn.MultiheadAttention)
    out = AttentionLayer(f"{name}.out_proj", module.out_proj, options, module, "weight", "bias")
    if module.in_proj_weight is not None:
        return AttentionInputLayer(f"{name}.in_proj", module, options, module, "in_proj_weight", "in_proj_bias"), out
    layers = []
    for i, part in enumerate("qkv"):
        weight = f"{part}_proj_weight"
        layers.append(AttentionLayer(f"{name}.{part}_proj", module, options, module, weight, "in_proj_bias"))
        layers[-1].bias_part = slice(i * module.embed_dim, (i + 1) * module.embed_dim)
    return *layers, out


def _factory_for(module: nn.Module) -> tuple[LayerFactory | None, str]:
    """The factory registered for a module's type or the nearest base of it, else the reason why there is none."""
    for cls in type(module).__mro__:
        factory = _FACTORIES.get(cls) or _FACTORIES.get(f"{cls.__module__}.{cls.__qualname__}")
        if factory is None:
            continue
        if type(module).forward is not getattr(cls, "forward", None):
            return None, f"{type(module).__name__} overrides {cls.__name__}.forward; see register_layer"
        return factory, ""
    return None, f"no Kronecker rule for {type(module).__name__}"


@dataclass
class Coverage:
    """What :func:`find_layers` found: the layers, and for every parameter without one its name and the reason."""

    layers: list[KroneckerLayer]
    uncovered: dict[nn.Parameter, tuple[str, str]]


def find_layers(roots: Iterable[nn.Module], options: LayerOptions) -> Coverage:
    """The Kronecker layers of some modules.

    Weights used by several modules under the same rule and with the same bias are one layer; under different rules the
    weight is declined, because its Fisher block is no Kronecker product.
    """
    layers: dict[nn.Parameter, KroneckerLayer] = {}
    reasons: dict[nn.Parameter, tuple[str, str]] = {}
    visited: set[nn.Module] = set()
    for root in roots:
        for name, module in root.named_modules():
            if module in visited:
                continue
            parts = list(module.modules()) if isinstance(module, nn.MultiheadAttention) else [module]
            visited.update(parts)
            found, reason = _layers_of(name, module, options)
            for layer in found:
                _join(layer, layers, reasons)
            own = module.named_parameters(name, recurse=len(parts) > 1)
            for parameter_name, parameter in own:
                reasons.setdefault(parameter, (parameter_name, reason))
    kept = [layer for layer in layers.values() if not reasons[layer.weight][1] and options.trains(layer.weight)]
    covered = {parameter for layer in kept for parameter in layer.parameters}
    uncovered = {
        parameter: (name, reason or "frozen when the optimizer was built")
        for parameter, (name, reason) in reasons.items()
        if parameter not in covered and options.trains(parameter)
    }
    return Coverage(kept, uncovered)


def _layers_of(name: str, module: nn.Module, options: LayerOptions) -> tuple[Sequence[KroneckerLayer], str]:
    """The layers of one module, or none and the reason."""
    for pattern in options.skip_layers:
        if re.search(pattern, name):
            return (), f"skip_layers matches {pattern!r}"
    factory, reason = _factory_for(module)
    if factory is None:
        return (), reason
    try:
        made = factory(name, module, options)
    except Declined as declined:
        return (), str(declined)
    return (made,) if isinstance(made, KroneckerLayer) else tuple(made), ""


def _join(
    layer: KroneckerLayer, layers: dict[nn.Parameter, KroneckerLayer], reasons: dict[nn.Parameter, tuple[str, str]]
) -> None:
    """Adds a layer, or its module to the layer that has the same weight already."""
    first = layers.setdefault(layer.weight, layer)
    if first is layer:
        return
    if type(first) is type(layer) and first.bias is layer.bias and first.sharing == layer.sharing:
        first.modules += layer.modules
        return
    reason = f"weight shared by {first.name} ({first.rule_name}) and {layer.name} ({layer.rule_name})"
    for parameter in (*first.parameters, *layer.parameters):
        name, _ = reasons.get(parameter, (f"{layer.name}.bias", ""))
        reasons[parameter] = (name, reason)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel (torch's or Apex's), DataParallel and torch.compile."""
    while True:
        if type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            model = model.module  # type: ignore[assignment]
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def owners_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The outermost live modules that contain the modules that own some parameters, found by identity.

    Raises:
        ValueError: If no live module owns any of them.
    """
    parameters = list(parameters)
    wanted = {id(parameter) for parameter in parameters}
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.__dict__.get("_modules", {}).values():
            parents.setdefault(id(child), []).append(module)
    pending = [m for m in modules if any(id(p) in wanted for p in m.__dict__.get("_parameters", {}).values())]
    tops: dict[nn.Module, None] = {}
    seen: set[int] = set()
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            above = parents.get(id(module), [])
            pending += above
            if not above:
                tops[unwrap(module)] = None
    if not tops:
        raise ValueError(
            "no module was found that owns these parameters: pass the model, model=... or as first argument"
        )
    order = {id(parameter): i for i, parameter in enumerate(parameters)}

    def rank(top: nn.Module) -> tuple[int, int]:
        """By what it owns, so that every process finds the modules in the same order."""
        owned = [order[id(p)] for p in top.parameters() if id(p) in order]
        return -len(owned), min(owned)

    return sorted(tops, key=rank)
