"""A dense, slow and obvious oracle for the mathematics of K-FAC. It shares no code with the package.

Every layer is linear in its weight: ``s[n, r] = W a[n, r]`` with the bias as the last column of ``W``. Therefore the
output of a layer whose weight is the j-th unit row *is* the j-th component of ``a``: the rows of every layer type, with
any stride, padding or dilation, come from running the layer itself on unit weights, without any patch extraction.

Shapes: rows ``a [n, r, groups, d_in]``, ``g [n, r, groups, d_out]``; factors ``A [groups, d_in, d_in]``,
``G [groups, d_out, d_out]``; canonical weight ``W [groups, d_out, d_in]``; blocks of norm layers ``F [channels, k, k]``
with ``k = 2`` for scale and shift, 1 for scale alone, and their "weights" ``[channels, k]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from tests.helpers.compare import assert_applied, assert_near, parameters, snapshot

NOISE = 1e-8  # what should be of order one and is smaller than this may have lost half of its digits to cancellation
LARGEST_CONDITION = 1e6  # rounding of 1e-16 times this leaves two digits to spare below REL_TOL


Inputs = tuple[Tensor, ...]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Named = dict[str, Tensor]


class Conv1D(nn.Module):
    """The layer of transformers' GPT-2: a Linear that stores its weight transposed, ``[d_in, d_out]``."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / math.sqrt(nx))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        """Apply ``x @ weight + bias`` over the last dimension."""
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).reshape(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"  # where the real one lives: the package may not import transformers


# ---------------------------------------------------------------------------------------------------------------------
# Layers: where the entries of a weight stand in the canonical matrix, and the rows a layer sees
# ---------------------------------------------------------------------------------------------------------------------

NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
LINEARS = (nn.Linear, Conv1D, _ConvNd, nn.Embedding)


def is_norm(module: nn.Module) -> bool:
    """Tell whether the module has per-channel blocks instead of a Kronecker pair."""
    # Classes of transformers that compute what torch.nn.RMSNorm does have names of their own.
    return isinstance(module, NORMS) or type(module).__name__.endswith(("RMSNorm", "T5LayerNorm"))


def is_conv1d(module: nn.Module) -> bool:
    """Tell transformers' Conv1D, or its stand-in."""
    return f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D"


def weight_index(module: nn.Module) -> Tensor:
    """Where entry ``[group, out, in]`` of the canonical weight stands in the flattened stored weight."""
    flat = torch.arange(module.weight.numel()).reshape(module.weight.shape)
    if isinstance(module, _ConvNd) and module.transposed:  # stored [c_in, c_out / groups, *kernel]
        per_group = flat.reshape(module.groups, -1, *flat.shape[1:])
        return per_group.transpose(1, 2).flatten(2)
    if isinstance(module, _ConvNd):  # stored [c_out, c_in / groups, *kernel]
        return flat.reshape(module.groups, module.out_channels // module.groups, -1)
    if isinstance(module, nn.Embedding) or is_conv1d(module):  # stored [d_in, d_out]
        return flat.T[None]
    return flat[None]


def trainable_bias(module: nn.Module) -> Tensor | None:
    """The bias, if the layer has one and it is trained."""
    bias = getattr(module, "bias", None)
    return bias if bias is not None and bias.requires_grad else None


def matrix(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Bring stored values (weights, gradients, changes) to the canonical ``[groups, d_out, d_in]``."""
    if is_norm(module):
        parts = [weight.flatten()] + ([] if bias is None else [bias.flatten()])
        return torch.stack(parts, dim=-1)
    canonical = weight.flatten()[weight_index(module)]
    if bias is None:
        return canonical
    return torch.cat([canonical, bias.reshape(*canonical.shape[:2], 1)], dim=-1)


def positions(module: nn.Module, output: Tensor, batch_dim: int = 0) -> Tensor:
    """Bring an output of a layer to ``[n, r, groups, d_out]``."""
    if isinstance(module, _ConvNd):
        rows = output.flatten(2).transpose(1, 2)
        return rows.reshape(*rows.shape[:2], module.groups, -1)
    rows = output.movedim(batch_dim, 0)
    return rows.reshape(rows.shape[0], -1, 1, rows.shape[-1])


def with_weight(module: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Output of the layer with other parameters; its buffers stay as they are."""
    values = {name: buffer.clone() for name, buffer in module.named_buffers()} | {"weight": weight}
    if bias is not None:
        values["bias"] = bias
    with torch.no_grad():
        return functional_call(module, values, (x,))


def input_rows(module: nn.Module, x: Tensor, batch_dim: int = 0) -> Tensor:
    """The rows ``a [n, r, groups, d_in]``: component j is the output of the layer with the j-th unit row as weight."""
    index = weight_index(module)
    no_bias = None if getattr(module, "bias", None) is None else torch.zeros_like(module.bias)
    columns = []
    for j in range(index.shape[-1]):
        unit = torch.zeros(module.weight.numel(), dtype=module.weight.dtype)
        unit[index[:, 0, j]] = 1.0
        output = with_weight(module, unit.view_as(module.weight), no_bias, x)
        columns.append(positions(module, output, batch_dim)[..., 0])
    if trainable_bias(module) is not None:
        columns.append(torch.ones_like(columns[0]))
    rows = torch.stack(columns, dim=-1)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        rows[..., module.padding_idx] = 0.0
    return rows


def norm_rows(module: nn.Module, x: Tensor, g: Tensor, batch_dim: int = 0) -> Tensor:
    """Per-example gradients ``[n, channels, k]`` of scale and shift, summed over the positions."""
    no_shift = None if getattr(module, "bias", None) is None else torch.zeros_like(module.bias)
    normalised = with_weight(module, torch.ones_like(module.weight), no_shift, x)
    parts = [g * normalised] + ([] if trainable_bias(module) is None else [g])
    return torch.stack([per_channel(module, part, batch_dim) for part in parts], dim=-1)


def per_channel(module: nn.Module, values: Tensor, batch_dim: int) -> Tensor:
    """Sum over positions: ``[n, channels]``."""
    channels_first = values.dim() > 2 and values.shape[1] == module.weight.numel() != values.shape[-1]
    if isinstance(module, (_BatchNorm, nn.GroupNorm)) or channels_first:  # a LayerNorm over channels: ConvNeXt's
        return values.reshape(*values.shape[:2], -1).sum(-1)
    values = values.movedim(batch_dim, 0)
    return values.reshape(values.shape[0], -1, module.weight.numel()).sum(1)


# ---------------------------------------------------------------------------------------------------------------------
# Losses: L = (1/M) sum_m l_m
# ---------------------------------------------------------------------------------------------------------------------


def count_terms(output: Tensor, average: str | None, batch_dim: int = 0) -> int:
    """M of DESIGN section 3, from the output of the model."""
    if average is None:
        return 1
    if average == "elements":
        return output.numel()
    return output.shape[batch_dim] if average == "batch" else output.numel() // output.shape[-1]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Sum of half squared errors."""
    return 0.5 * (output - target).square().sum()


def log_cosh(output: Tensor, target: Tensor) -> Tensor:
    """Sum of a loss whose derivative is not linear in the output."""
    error = (output - target).abs()
    return (error + nn.functional.softplus(-2 * error) - math.log(2)).sum()  # the cosh itself would overflow


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Sum over positions of the cross entropy with soft targets, over the last dimension."""
    return -(target.softmax(-1) * output.log_softmax(-1)).sum()


LOSSES: dict[str, LossFunction] = {
    "squared error": squared_error,
    "log cosh": log_cosh,
    "cross entropy": cross_entropy,
}


def averaged(total: LossFunction, average: str | None, batch_dim: int = 0) -> LossFunction:
    """The loss ``L = (1/M) sum_m l_m``."""
    return lambda output, target: total(output, target) / count_terms(output, average, batch_dim)


# ---------------------------------------------------------------------------------------------------------------------
# One backward pass, seen by hooks of our own
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Use:
    """One call of one layer: its input, and its output before anything worked on it in place."""

    module: nn.Module
    x: Tensor
    output: Tensor


@contextmanager
def watched(modules: Sequence[nn.Module]) -> Iterator[list[Use]]:
    """Record every call of the modules."""
    uses: list[Use] = []

    def note(module: nn.Module, args: Inputs, output: Tensor) -> Tensor:
        uses.append(Use(module, args[0].detach().clone(), output))
        return output.clone()  # so that in-place operations downstream leave the recorded output alone

    handles = [module.register_forward_hook(note) for module in modules]
    try:
        yield uses
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Layer:
    """A weight, under the name of its first module, and all modules that share it."""

    name: str
    modules: list[nn.Module]

    @property
    def module(self) -> nn.Module:
        """The first module that owns the weight."""
        return self.modules[0]

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """This layer's part of values named like parameters, in canonical form."""
        prefix = f"{self.name}." if self.name else ""
        bias = None if trainable_bias(self.module) is None else values[f"{prefix}bias"]
        return matrix(self.module, values[f"{prefix}weight"], bias)


def find_layers(model: nn.Module) -> list[Layer]:
    """All layers with a trainable weight, tied ones together."""
    found: dict[int, Layer] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, LINEARS + NORMS) and weight is not None and weight.requires_grad:
            found.setdefault(id(weight), Layer(name, [])).modules.append(module)
    return list(found.values())


@dataclass
class Sums:
    """Sums over one backward pass for one layer.

    ``sum a a^T``, the count of rows, ``sum g g^T``; ``v = sum g a^T``, and ``size = |g| |a|``, which ``v`` would have
    if nothing cancelled; ``noise`` tells that ``g`` or ``v`` of some pair or channel cancelled down to mere rounding.
    """

    a: Tensor | None
    rows: int
    g: Tensor
    v: Tensor
    size: float
    noise: bool


def outer_sum(rows: Tensor) -> Tensor:
    """``sum_x v v^T`` for rows ``[x, groups, d]``."""
    return torch.einsum("xki,xkj->kij", rows, rows)


def cancelled(values: Tensor, sizes: Tensor) -> bool:
    """Whether some of the values are not zero, but nothing beside the sizes of what they were summed from."""
    return bool(((values > 0) & (values < NOISE * sizes)).any())


def layer_sums(layer: Layer, uses: Sequence[tuple[Use, Tensor]], sharing: str, batch_dim: int) -> Sums:
    """Moments of one layer in one backward pass: several calls add rows, not examples."""
    if is_norm(layer.module):
        return norm_sums(uses, batch_dim)
    a = torch.cat([input_rows(use.module, use.x, batch_dim) for use, _ in uses], dim=1)
    g = torch.cat([positions(use.module, grad, batch_dim) for use, grad in uses], dim=1)
    v, g_size, a_size = torch.einsum("nrko,nrki->koi", g, a), pair_norms(g), pair_norms(a)
    if sharing == "reduce":
        a, g = a.mean(1), g.sum(1)
    else:
        a, g = a.flatten(0, 1), g.flatten(0, 1)
    if isinstance(layer.module, nn.Embedding) and layer.module.padding_idx is not None:
        used = a.sum((1, 2)) > 0  # a padded position is no row at all
        a, g = a[used], g[used]
    noise = cancelled(pair_norms(g), g_size) or cancelled(v.norm(dim=(1, 2)), g_size * a_size)
    return Sums(outer_sum(a), len(a), outer_sum(g), v, float(g_size.norm() * a_size.norm()), noise)


def pair_norms(rows: Tensor) -> Tensor:
    """Norm of all rows ``[..., groups, d]`` of each group."""
    return rows.flatten(0, -3).norm(dim=(0, 2))


def norm_sums(uses: Sequence[tuple[Use, Tensor]], batch_dim: int) -> Sums:
    """The same for a norm layer."""
    per_example = sum(norm_rows(use.module, use.x, g, batch_dim) for use, g in uses)
    sizes = sum(per_channel(use.module, g.abs(), batch_dim).sum(0) for use, g in uses)
    v = per_example.sum(0)
    return Sums(None, 0, outer_sum(per_example), v, float(sizes.sum()), cancelled(v.norm(dim=1), sizes))


@dataclass
class Step:
    """All backward passes of one optimizer step: raw gradients, the passes' sums, and M."""

    gradients: Named
    passes: list[dict[str, Sums]]
    terms: int


# ---------------------------------------------------------------------------------------------------------------------
# Damped solves
# ---------------------------------------------------------------------------------------------------------------------


def mean_eigenvalue(matrix_: Tensor) -> float:
    """Trace over size."""
    return float(matrix_.trace()) / len(matrix_)


def dense_solve(a: Tensor, g: Tensor, v: Tensor, gamma: float) -> Tensor:
    """``(A (x) G + gamma I)^-1 V`` by an explicit Kronecker product; row-major flattening makes it ``kron(G, A)``."""
    return fisher_solve(torch.kron(g, a), v, gamma)


def fisher_solve(fisher: Tensor, v: Tensor, gamma: float) -> Tensor:
    """``(F + gamma I)^-1 v``."""
    damped = fisher + gamma * torch.eye(len(fisher), dtype=fisher.dtype)
    return torch.linalg.solve(damped, v.flatten()).reshape(v.shape)


def tikhonov_solve(a: Tensor, g: Tensor, v: Tensor, gamma: float) -> Tensor:
    """``(G + sqrt(gamma)/pi I)^-1 V (A + pi sqrt(gamma) I)^-1``."""
    return two_sided_solve(a, g, v, *factored_damping(a, g, gamma))


def factored_damping(a: Tensor, g: Tensor, gamma: float) -> tuple[float, float]:
    """``pi sqrt(gamma)`` for A, ``sqrt(gamma) / pi`` for G."""
    mean_a, mean_g = mean_eigenvalue(a), mean_eigenvalue(g)
    pi = math.sqrt(mean_a / mean_g) if mean_a > 0 and mean_g > 0 else 1.0
    return pi * math.sqrt(gamma), math.sqrt(gamma) / pi


def letter_solve(a: Tensor, g: Tensor, v: Tensor, gamma: float) -> Tensor:
    """Equations 9-10 of the paper to the letter: gamma is added to both factors."""
    return two_sided_solve(a, g, v, gamma, gamma)


def two_sided_solve(a: Tensor, g: Tensor, v: Tensor, damping_a: float, damping_g: float) -> Tensor:
    """``(G + damping_g I)^-1 V (A + damping_a I)^-1``."""
    left = torch.linalg.inv(g + damping_g * torch.eye(len(g), dtype=g.dtype))
    right = torch.linalg.inv(a + damping_a * torch.eye(len(a), dtype=a.dtype))
    return left @ v @ right


SOLVES: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "eigen": dense_solve,
    "inverse": tikhonov_solve,
    "inverse without pi": letter_solve,
}


@dataclass
class Pair:
    """One Kronecker pair (one group of one layer)."""

    a: Tensor
    g: Tensor

    @property
    def mean_eigenvalue(self) -> float:
        """Of ``A (x) G``."""
        return mean_eigenvalue(self.a) * mean_eigenvalue(self.g)

    def solve(self, v: Tensor, damping: float, relative: bool, solver: str) -> Tensor:
        """The direction for the gradient ``v [d_out, d_in]``."""
        return SOLVES[solver](self.a, self.g, v, gamma_of(self, damping, relative))

    def condition(self, damping: float, relative: bool, solver: str) -> float:
        """Condition number of what is solved with; the second of two solves amplifies the error of the first."""
        gamma, values = (
            gamma_of(self, damping, relative),
            [torch.linalg.eigvalsh(factor) for factor in (self.a, self.g)],
        )
        if solver == "eigen":
            return damped_condition(torch.outer(*values), gamma)
        shifts = factored_damping(self.a, self.g, gamma) if solver == "inverse" else (gamma, gamma)
        return math.prod(damped_condition(*pair) for pair in zip(values, shifts, strict=False))


@dataclass
class Curvature:
    """What one layer's last decomposition was made from: pairs, or the blocks of a norm layer."""

    pairs: list[Pair] = field(default_factory=list)
    blocks: Tensor | None = None

    @property
    def mean_eigenvalue(self) -> float:
        """Over the whole layer (for choosing a damping that matters)."""
        if self.blocks is not None:
            return float(torch.stack([block.trace() for block in self.blocks]).sum()) / self.blocks[:, 0].numel()
        return sum(pair.mean_eigenvalue for pair in self.pairs) / len(self.pairs)

    def solve(self, v: Tensor, damping: float, relative: bool = False, solver: str = "eigen") -> Tensor:
        """The direction for the canonical gradient ``v``, before any scaling."""
        if self.blocks is None:
            return torch.stack(
                [p.solve(part, damping, relative, solver) for p, part in zip(self.pairs, v, strict=False)]
            )
        damped = self.blocks + gamma_of(self, damping, relative) * torch.eye(self.blocks.shape[-1], dtype=v.dtype)
        return torch.stack([torch.linalg.solve(block, part) for block, part in zip(damped, v, strict=False)])

    def condition(self, damping: float, relative: bool, solver: str) -> float:
        """The largest condition number of the systems that are solved."""
        if self.blocks is None:
            return max(pair.condition(damping, relative, solver) for pair in self.pairs)
        return damped_condition(torch.linalg.eigvalsh(self.blocks), gamma_of(self, damping, relative))


def gamma_of(curvature: Pair | Curvature, damping: float, relative: bool) -> float:
    """The damping of a pair, or of a norm layer, in absolute terms."""
    return damping * ((curvature.mean_eigenvalue or 1.0) if relative else 1.0)


def damped_condition(eigenvalues: Tensor, damping: float) -> float:
    """Condition number of a positive semi-definite matrix with damping."""
    return (float(eigenvalues.max()) + damping) / damping


class RunningAverage:
    """Two running sums, value and weight: ``S <- xi S + total``, ``w <- xi w + count``; the average is ``S / w``."""

    def __init__(self, decay: float) -> None:
        self.decay, self.total, self.weight = decay, 0.0, 0.0

    def add(self, total: Tensor, count: float) -> None:
        """Let the past decay, and add."""
        self.total = self.decay * self.total + total
        self.weight = self.decay * self.weight + count

    @property
    def mean(self) -> Tensor:
        """The weighted average so far."""
        return self.total / self.weight


# ---------------------------------------------------------------------------------------------------------------------
# The oracle
# ---------------------------------------------------------------------------------------------------------------------


class Oracle:
    """K-FAC of DESIGN sections 2 and 3, run on a twin of the model so that nobody else's hooks are in the way."""

    def __init__(
        self,
        twin: nn.Module,
        *,
        decay: float = 0.95,
        sharing: str = "expand",
        average: str | None = "batch",
        terms: Callable[[Tensor], int] | None = None,
        batch_dim: int = 0,
        largest_block: int | None = None,
    ) -> None:
        self.model, self.layers = twin, find_layers(twin)
        self.sharing, self.average, self.terms, self.batch_dim = sharing, average, terms, batch_dim
        self.largest_block = largest_block
        self.averages = {layer.name: {key: RunningAverage(decay) for key in "AG"} for layer in self.layers}
        self.curvature: dict[str, Curvature] = {}

    def modules(self) -> list[nn.Module]:
        """Every module whose calls matter."""
        return [module for layer in self.layers for module in layer.modules]

    def count(self, output: Tensor) -> int:
        """M of one backward pass."""
        return self.terms(output) if self.terms else count_terms(output, self.average, self.batch_dim)

    def observe(self, passes: Sequence[tuple[Inputs, Tensor]], loss: LossFunction, state: Named | None = None) -> Step:
        """Run the backward passes of one step, from the parameters in ``state``."""
        if state is not None:
            self.model.load_state_dict(state)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        step = Step({name: torch.zeros_like(p) for name, p in trained.items()}, [], 0)
        for inputs, target in passes:
            with watched(self.modules()) as uses:
                output = self.model(*inputs)
            wanted = [use.output for use in uses] + list(trained.values())
            gradients = gradient(loss(output, target), wanted)
            for name, value in zip(trained, gradients[len(uses) :], strict=False):
                step.gradients[name] += value
            step.passes.append(self.sums(uses, gradients))
            step.terms += self.count(output)
        if self.average is None and self.terms is None:
            step.terms = 1  # a sum is a sum, over however many passes it is taken
        self.check_rows(step)
        return step

    def check_rows(self, step: Step) -> None:
        """The rows are right only if ``sum g a^T`` is the gradient that autograd gives the weight."""
        for layer in self.layers:
            seen = [sums[layer.name] for sums in step.passes if layer.name in sums]
            expected = layer.of(step.gradients)
            total = sum((sums.v for sums in seen), torch.zeros_like(expected))
            size = 1 + sum(sums.size for sums in seen)
            assert_near(total, expected, f"oracle's rows of {layer.name!r}", scale=size)

    def sums(self, uses: Sequence[Use], gradients: Sequence[Tensor]) -> dict[str, Sums]:
        """Moments of every layer that was used."""
        result = {}
        for layer in self.layers:
            mine = [(use, g) for use, g in zip(uses, gradients, strict=False) if use.module in layer.modules]
            if mine:
                result[layer.name] = layer_sums(layer, mine, self.sharing, self.batch_dim)
        return result

    def update(self, step: Step) -> None:
        """Fold one step into the running averages, normalised once by the totals of the step."""
        for layer in self.layers:
            seen = [sums[layer.name] for sums in step.passes if layer.name in sums]
            if not seen:
                continue
            average = self.averages[layer.name]
            average["G"].add(step.terms**2 * sum(sums.g for sums in seen), step.terms)
            if not is_norm(layer.module):
                average["A"].add(sum(sums.a for sums in seen), sum(sums.rows for sums in seen))

    def decompose(self) -> None:
        """Freeze the factors as they are now."""
        for layer in self.layers:
            average = self.averages[layer.name]
            if average["G"].weight == 0.0:
                continue
            if is_norm(layer.module):
                self.curvature[layer.name] = Curvature(blocks=average["G"].mean)
                continue
            a, g = self.limited(average["A"].mean), self.limited(average["G"].mean)
            self.curvature[layer.name] = Curvature(pairs=[Pair(*pair) for pair in zip(a, g, strict=False)])

    def limited(self, factor: Tensor) -> Tensor:
        """Keep only equal blocks along the diagonal of a factor that is too large; the last one may be smaller."""
        n = factor.shape[-1]
        if self.largest_block is None or n <= self.largest_block:
            return factor
        size = math.ceil(n / math.ceil(n / self.largest_block))
        block = torch.arange(n) // size
        return factor * (block[:, None] == block)

    def refresh(self, step: Step) -> None:
        """Statistics and decompositions of one step."""
        self.update(step)
        self.decompose()

    def directions(
        self, gradients: Named, damping: float, relative: bool = False, solver: str = "eigen"
    ) -> dict[str, Tensor]:
        """Canonical direction of every layer; the raw gradient where there is no curvature yet."""
        result = {}
        for layer in self.layers:
            v = layer.of(gradients)
            known = self.curvature.get(layer.name)
            result[layer.name] = v if known is None else known.solve(v, damping, relative, solver)
        return result

    def typical_eigenvalue(self) -> float:
        """Geometric mean over the layers of the mean eigenvalue: an absolute damping of this size matters.

        At least a hundredth of the largest, so that no system becomes too ill-conditioned to compare.
        """
        sizes = [c.mean_eigenvalue for c in self.curvature.values() if c.mean_eigenvalue > 0]
        if not sizes:
            return 1.0
        return max(math.exp(sum(map(math.log, sizes)) / len(sizes)), 0.01 * max(sizes))

    def well_posed(self, step: Step, damping: float, relative: bool = False, solver: str = "eigen") -> bool:
        """Whether a comparison to 1e-8 means anything in float64.

        No layer's curvature or gradient may be mere rounding, as where a norm or a softmax cancels it exactly, and the
        systems to solve must not amplify rounding too much.
        """
        if any(c.condition(damping, relative, solver) > LARGEST_CONDITION for c in self.curvature.values()):
            return False
        return not any(sums.noise for one in step.passes for sums in one.values())

    def uncovered(self) -> list[str]:
        """Parameters that no layer of the oracle owns."""
        covered = set()
        for layer in self.layers:
            covered.add(id(layer.module.weight))
            covered.add(id(trainable_bias(layer.module)))
        return [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in covered]


def gradient(value: Tensor, wanted: Sequence[Tensor], keep: bool = False) -> list[Tensor]:
    """Gradients, zeros where the value does not depend on a tensor."""
    found = torch.autograd.grad(value, wanted, allow_unused=True, retain_graph=keep)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=False)]


# ---------------------------------------------------------------------------------------------------------------------
# Sampled Fisher, in expectation
# ---------------------------------------------------------------------------------------------------------------------


def categorical_roots(output: Tensor, dim: int = -1) -> Iterator[Tensor]:
    """Functionals ``h . output`` with ``sum h h^T`` = Fisher of a softmax: ``h_k = sqrt(p_k) (p - e_k)``."""
    logits = output.movedim(dim, -1)
    logits = logits.reshape(-1, logits.shape[-1])
    for row in logits:
        p = row.detach().softmax(-1)
        for k, unit in enumerate(torch.eye(len(p), dtype=p.dtype)):
            yield p[k].sqrt() * (p - unit) @ row


def bernoulli_roots(output: Tensor) -> Iterator[Tensor]:
    """The same for independent Bernoulli outputs given by their logits."""
    for value in output.flatten():
        p = value.detach().sigmoid()
        yield (p * (1 - p)).sqrt() * value


def gaussian_roots(output: Tensor, variance: float = 1.0) -> Iterator[Tensor]:
    """The same for independent Gaussian outputs."""
    for value in output.flatten():
        yield value / math.sqrt(variance)


def expected_step(oracle: Oracle, inputs: Inputs, roots: Callable[[Tensor], Iterator[Tensor]]) -> Step:
    """The moments that a sampled Fisher has in expectation: the square roots' gradients are added up."""
    with watched(oracle.modules()) as uses:
        output = oracle.model(*inputs)
    terms = oracle.count(output)
    outputs = [use.output for use in uses]
    total: dict[str, Sums] = {}
    for value in roots(output):
        for name, sums in oracle.sums(uses, gradient(value / terms, outputs, keep=True)).items():
            sums.g = sums.g + (total[name].g if name in total else 0.0)
            total[name] = sums
    return Step({}, [total], terms)


# ---------------------------------------------------------------------------------------------------------------------
# Per-example gradients
# ---------------------------------------------------------------------------------------------------------------------


def per_example_gradients(
    model: nn.Module, passes: Sequence[tuple[Inputs, Tensor]], total: LossFunction
) -> list[Named]:
    """Gradient of every single example's own loss ``l_n``, one autograd call each."""
    result = []
    for inputs, target in passes:
        for n in range(len(target)):
            output = model(*(x[n : n + 1] for x in inputs))
            names, params = zip(*model.named_parameters(), strict=False)
            result.append(dict(zip(names, gradient(total(output, target[n : n + 1]), params), strict=False)))
    return result


def dense_fisher(layer: Layer, gradients: Sequence[Named]) -> Tensor:
    """``(1/N) sum_n vec(dl_n) vec(dl_n)^T`` of one layer's flattened canonical weight."""
    rows = torch.stack([layer.of(values).flatten() for values in gradients])
    return sum(torch.outer(row, row) for row in rows) / len(rows)


# ---------------------------------------------------------------------------------------------------------------------
# Running an optimizer
# ---------------------------------------------------------------------------------------------------------------------


def backward(model: nn.Module, passes: Sequence[tuple[Inputs, Tensor]], loss: LossFunction) -> None:
    """Accumulate the gradients of all passes into ``.grad``."""
    model.zero_grad()
    for inputs, target in passes:
        loss(model(*inputs), target).backward()


def apply(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    """One ``step()``: the change of every parameter."""
    before = parameters(model)
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    passes: Sequence[tuple[Inputs, Tensor]],
    loss: LossFunction,
) -> Named:
    """Backward passes and one ``step()``: the change of every parameter."""
    backward(model, passes, loss)
    return apply(model, optimizer)


def assert_steps_as(
    oracle: Oracle,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    passes: Sequence[tuple[Inputs, Tensor]],
    loss: LossFunction,
    damping: float,
    solver: str = "eigen",
) -> None:
    """One step at a rate of 1, whose factors are its own and those of the steps before, moves as the oracle does."""
    step = oracle.observe(passes, loss, snapshot(model))
    oracle.refresh(step)
    changes = take_step(model, optimizer, passes, loss)
    assert_applied(oracle, changes, oracle.directions(step.gradients, damping, solver=solver), step.gradients)
