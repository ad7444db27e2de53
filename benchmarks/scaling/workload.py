"""What K-FAC does for a model on one rank, counted rather than estimated.

The package's own code runs on meta tensors, which hold nothing and compute nothing, while :class:`Counter` counts
operations, flops and bytes: the counts follow the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kfac_optim import CurvatureEngine
from kfac_optim.distributed import Assignment, FactorWise, LayerCost
from kfac_optim.factors import FactorSpec
from kfac_optim.layers import KroneckerLayer
from kfac_optim.scaling import KLClip
from kfac_optim.solvers import EigenSolver
from kfac_optim.stacks import Direction

FLOAT = 4  # bytes of the numbers that are sent and stored unless said otherwise

# Work ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a piece of code does."""

    operations: float = 0.0  # Calls of kernels or operators
    flops: float = 0.0  # Floating-point operations of its products of matrices
    bytes: float = 0.0  # Read and written by everything else; a product's own hide behind its flops

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(times * self.operations, times * self.flops, times * self.bytes)


def total(works: Iterable[Work]) -> Work:
    """The sum of several pieces of work."""
    return sum(works, Work())


class Counter(TorchDispatchMode):
    """Counts the work of everything that runs inside ``with Counter() as counter:``; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
            moved = sum(_numbers(x) for x in (*args, *(kwargs or {}).values(), result)) if flops == 0 else 0
            self.work += Work(1, float(flops), float(moved))
        return result


def _numbers(x: Any) -> int:
    """Bytes of the tensors in an argument."""
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(map(_numbers, x)) if isinstance(x, (list, tuple)) else 0


# What is trained -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerWork:
    """One preconditioned layer."""

    a: FactorSpec  # Shape of A
    g: FactorSpec  # Shape of G
    cost: LayerCost  # What the engine tells the strategies
    statistics: Work  # Work of A and G for one batch
    handling: tuple[Work, Work]  # Work around the decompositions of A and of G: unpacking, damping, checks
    preconditioning: Work  # Work of one preconditioned gradient, eigen solver
    scaling: Work  # Work of kl_clip and of writing the direction back
    rows: int  # Rows of A and of G for one batch: examples times positions

    @property
    def factors(self) -> tuple[FactorSpec, FactorSpec]:
        """A and G."""
        return self.a, self.g

    @property
    def direction_bytes(self) -> int:
        """Bytes of the preconditioned gradient."""
        return FLOAT * self.a.pairs * self.a.dim * self.g.dim

    @property
    def unfolded(self) -> Work:
        """Work of the statistics if windows are unfolded first (im2col), as in the paper's implementation."""
        dims = [spec.dim for spec in self.factors]
        flops = sum(2.0 * self.rows * spec.pairs * spec.dim**2 for spec in self.factors)
        return Work(12, flops, FLOAT * (4.0 * self.rows * sum(dims) + 2.0 * sum(dim**2 for dim in dims)))


@dataclass(frozen=True)
class Workload:
    """A model as the cost model sees it."""

    name: str  # Name in tables
    layers: tuple[LayerWork, ...]  # The preconditioned layers
    parameters: int  # Number of the whole model's parameters; DDP reduces their gradients
    forward: Work  # Work of the forward pass of one micro-batch

    @property
    def packed_numbers(self) -> int:
        """Numbers in one triangle of every factor."""
        return sum(spec.packed_numel for layer in self.layers for spec in layer.factors)


class _Costs:
    """A strategy that keeps what the engine tells strategies."""

    def __init__(self) -> None:
        self.costs: tuple[LayerCost, ...] = ()

    def assign(self, costs: Sequence[LayerCost], world_size: int) -> Assignment:
        """See :class:`kfac_optim.distributed.AssignmentStrategy`."""
        self.costs = tuple(costs)
        return FactorWise().assign(costs, world_size)


def workload(
    name: str,
    make: Callable[[], nn.Module],
    example: Sequence[int],
    batch: int,
    *,
    tokens: bool = False,
    **options: Any,
) -> Workload:
    """Looks at a model on the meta device: nothing is allocated, nothing computed.

    Args:
        name: Name in tables.
        make: Builds the model.
        example: Shape of one example.
        batch: Examples per rank and micro-batch.
        tokens: The examples are token numbers rather than floats.
        **options: Of :class:`~kfac_optim.CurvatureEngine`, ``skip_layers`` for instance.
    """
    with torch.device("meta"):
        model = make()
        inputs = torch.zeros(batch, *example, dtype=torch.long if tokens else torch.float32)
    notes = _Costs()
    engine = CurvatureEngine(model, assignment=notes, **options)
    engine.close()
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # input and output of the layers' modules

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen[module] = args[0], output

    for layer in engine.layers:
        layer.modules[0].register_forward_hook(note)
    with torch.no_grad(), Counter() as counter:
        model(inputs)
    pairs = zip(engine.layers, notes.costs, strict=True)
    layers = tuple(layer_work(layer, cost, *seen[layer.modules[0]]) for layer, cost in pairs)
    return Workload(name, layers, sum(p.numel() for p in model.parameters()), counter.work)


def layer_work(layer: KroneckerLayer, cost: LayerCost, a: Tensor, output: Tensor) -> LayerWork:
    """Counts the work of one layer, whose module has mapped ``a`` to ``output`` on the meta device.

    The second time: masks and indices that the package keeps for each shape take work in the first step alone.
    """
    _layer_work(layer, cost, a, output)
    return _layer_work(layer, cost, a, output)


def _layer_work(layer: KroneckerLayer, cost: LayerCost, a: Tensor, output: Tensor) -> LayerWork:
    module = layer.modules[0]
    specs = layer.specs
    if layer.diagonal_input:  # counting tokens is not defined on the meta device
        a, output = (torch.zeros(x.shape, dtype=x.dtype) for x in (a, output))
    with torch.no_grad():
        with Counter() as statistics:
            observation = layer.observe(module, a, output, torch.float32)
            moment = layer.output_moment(module, torch.empty_like(output), observation.context)
            for spec, new in zip(specs, (observation.a, moment), strict=True):
                spec.pack(new)
        preconditioning, direction = _preconditioned(layer, specs)
        with Counter() as scaling:
            multiplier = KLClip().multipliers([direction], 0)[0]
            layer.from_matrix(direction.direction * multiplier)
    rows = output.numel() // (layer.pairs * layer.d_out)
    handling = (_handled(specs, 0), _handled(specs, 1))
    return LayerWork(*specs, cost, statistics.work, handling, preconditioning, scaling.work, rows)


def _handled(specs: tuple[FactorSpec, FactorSpec], side: int) -> Work:
    """Does to a factor of the meta device what the engine does to it before and after its decomposition."""
    averages = [spec.empty(torch.float32, torch.device("meta")) for spec in specs]
    with torch.no_grad(), Counter() as counter:
        factor = specs[side].matrix(averages[side])
        for spec, average in zip(specs, averages, strict=True):
            spec.mean_eigenvalue(average)
        factor.isfinite().all()
    return counter.work


def _preconditioned(layer: KroneckerLayer, specs: tuple[FactorSpec, FactorSpec]) -> tuple[Work, Direction]:
    """Runs the eigen solver on a layer of the meta device."""
    p, meta = layer.pairs, torch.device("meta")
    gamma = torch.empty(p, device=meta)
    a, g = (
        tuple(torch.empty(p, *shape, device=meta) for shape in ([spec.dim], [spec.dim] * 2)[: 2 - spec.diagonal])
        for spec in specs
    )
    parts = [torch.empty_like(parameter).flatten() for parameter in layer.parameters]
    with Counter() as counter:
        gradient = torch.cat(parts) if len(parts) > 1 else parts[0]
        if layer.stored_transposed:
            gradient = gradient.view(p, layer.d_in, layer.d_out).mT
        else:
            gradient = gradient.view(p, layer.d_out, layer.d_in)
        result = EigenSolver().precondition(gradient, a, g, gamma)
    return counter.work, Direction(result, gradient, gradient, 1.0)
