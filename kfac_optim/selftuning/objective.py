"""The loss of a step's batch around the present weights, from the model's outputs alone.

With outputs z, output changes ``u_i = J v_i`` and the gradient ``g = dL/dz``, all of them known without targets::

    v_i' F v_j  =  1/M sum_m u_i' H u_j                               H: Fisher matrix of the output distribution
    L(z') - L(z)  =  1/M sum_m KL(p_z | p_z') + <g, z' - z>           exact, if L is the negative log likelihood

``J v`` comes from one evaluation of the model at weights that are a little further along v. Only a part of the examples
is evaluated. The part of the change that is linear in the step is taken from the gradient, which gives it exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..capture import Fisher, Part
from ..distributed import Communicator
from .quadratic import QuadraticModel

# How far the weights move for a difference of outputs: this share of the last update's length or, before there is one,
# of the weights'. A step below the smallest share of the weights' length would leave nothing but rounding errors.
_STEP, _FIRST_STEP, _SMALLEST_STEP = 0.03, 1e-4, 1e-5

_TOLERANCE = 0.2  # the relative error allowed in a slope; differences of outputs have an error of some per cent

_NOT_CANONICAL = (
    "KFAC needs the loss to be the mean negative log likelihood of the output distribution, here {}, because it "
    "predicts the loss from the outputs alone; but {}. Possible causes: another distribution, or other classes than "
    "those of the last dimension (of an output [N, C, ...] pass Categorical(dim=1)); a mean over something "
    "other than loss_average; outputs without a target (let the model return only those that the loss uses); a loss "
    "scale (pass grad_scaler=); micro-batches whose losses are not divided by their number; clipped gradients; "
    "penalties or other terms. With step(closure) any loss works"
)
_UNSEEN = (
    "KFAC has gradients, but since the last step or zero_grad() it has seen no call of the model that they come from: "
    "build the optimizer before the forward pass, call the model that it was built with (or its DDP wrapper), not its "
    "parts, and backward() instead of torch.autograd.grad(); do not freeze the weights of all its layers; and if the "
    "loss is not taken of its first output tensor or its logits, give the fisher an output_fn"
)


class Objective:
    """A loss that is evaluated at other weights, by moving the weights there.

    ``gradients``: its gradients, by parameter; ``parts``: the examples of this rank that are evaluated; ``terms``: M,
    the number of its loss terms.
    """

    def __init__(
        self,
        gradients: Mapping[nn.Parameter, Tensor],
        parts: Sequence[Part],
        terms: int,
        fisher: Fisher,
        comm: Communicator,
    ) -> None:
        self.gradients, self.parameters = dict(gradients), list[Tensor](gradients)
        self.parts, self.fisher, self.comm = list(parts), fisher, comm
        self._share = 1 / comm.world_size if comm.average_gradients else 1.0  # the weight of this rank's loss
        self._terms = max(1, terms)
        self._weights = [p.detach().clone() for p in self.parameters]
        self._directions: list[Sequence[Tensor]] = []
        self._changes: list[list[Tensor]] = []  # u, by direction and part
        self._model: QuadraticModel | None = None

    @torch.no_grad()
    def model(self, directions: Sequence[Sequence[Tensor]], last_update: Sequence[Tensor] | None) -> QuadraticModel:
        """The quadratic model along some directions and the last update, if any, which comes last (a collective).

        Later calls of :meth:`change` refer to it.

        Raises:
            RuntimeError: On all ranks, if there is a gradient, but no part on any rank.
        """
        self._directions = vs = [*directions, *([] if last_update is None else [last_update])]
        pairs = list(itertools.combinations_with_replacement(range(len(vs)), 2))
        products = [_dot(vs[i], vs[j]) for i, j in pairs]
        norms = [product.sqrt() for product, (i, j) in zip(products, pairs, strict=True) if i == j]
        length = self._step_length(None if last_update is None else norms[-1])
        steps = [torch.where(norm > 0, length / norm, 1.0) for norm in norms]
        try:
            self._changes = [self._output_changes(v, step) for v, step in zip(vs, steps, strict=True)]
        finally:
            self.put_back()
        outputs = [part.output for part in self.parts]
        roots = [list(map(self.fisher.root, outputs, changes)) for changes in self._changes]  # H^(1/2) u

        def curvature(i: int, j: int) -> Tensor:
            return self._over_parts(lambda _, n: (roots[i][n] * roots[j][n]).sum() / self._terms)

        same_everywhere = [*(_dot(self.gradients.values(), v) for v in vs), *products]
        own = [*(curvature(i, j) for i, j in pairs), torch.tensor(float(len(self.parts)), device="cpu")]
        numbers = self._sum([x / self.comm.world_size for x in same_everywhere] + own)
        slopes, products_, curvatures, seen = numbers.split([len(vs), len(pairs), len(pairs), 1])
        if not seen and slopes.any():
            raise RuntimeError(_UNSEEN)
        self._model = QuadraticModel(slopes, _symmetric(curvatures, pairs), _symmetric(products_, pairs))
        return self._model

    @torch.no_grad()
    def place(self, coefficients: Tensor) -> list[Tensor]:
        """Moves the weights by the sum of the directions with these coefficients, ``[k]``; returns that sum."""
        first, *others = coefficients.tolist()
        total = list(torch._foreach_mul(list(self._directions[0]), first))
        for v, c in zip(self._directions[1:], others, strict=True):
            torch._foreach_add_(total, list(v), alpha=c)
        self._move(total)
        return total

    @torch.no_grad()
    def put_back(self) -> None:
        """Moves the weights back to where they were."""
        torch._foreach_copy_(self.parameters, self._weights)

    @torch.no_grad()
    def change(self, coefficients: Tensor) -> float:
        """How much the loss has changed at these coefficients, where :meth:`place` put the weights (a collective)."""
        assert self._model is not None

        def curved(part: Part, n: int) -> Tensor:
            output = part.evaluate()
            linear = sum((c * u[n] for c, u in zip(coefficients.tolist(), self._changes, strict=True)), part.output)
            return self.fisher.divergence(part.output, output) / self._terms + (part.gradient * (output - linear)).sum()

        return float(self._model.slopes @ coefficients + self._sum([self._over_parts(curved)])[0])

    def total(self, change: float) -> float:
        """The change of the whole loss, given that of this rank's loss (a collective)."""
        return float(self._sum([torch.tensor(change * self._share, dtype=torch.float64, device="cpu")])[0])

    @torch.no_grad()
    def check(self) -> None:
        """Raises RuntimeError unless the loss can be the negative log likelihood of the outputs seen so far.

        A collective, after :meth:`model`; the parts must hold all examples.
        """
        assert self._model is not None
        found = [self.fisher.target_problem(part.output, part.gradient * self._terms) for part in self.parts]
        problems = [problem for problem in found if problem]
        # This rank's share of <g, J v>, which should be <gradient, v>, for the first direction.
        own_slope = self._over_parts(lambda part, n: (part.gradient * self._changes[0][n]).sum())
        strange, slope = self._sum([torch.tensor(float(len(problems)), device="cpu"), own_slope]).tolist()
        expected = float(self._model.slopes[0])
        problem = ""
        if strange:
            problem = f"its gradient with respect to the output {(problems or ['fails this check on another rank'])[0]}"
        elif not abs(slope - expected) <= _TOLERANCE * abs(expected):
            problem = f"its slope along its own gradient is {expected:.4g}, and {slope:.4g} by way of the outputs"
        if problem:
            raise RuntimeError(_NOT_CANONICAL.format(type(self.fisher).__name__, problem))

    def _move(self, offset: Sequence[Tensor]) -> None:
        self.put_back()
        torch._foreach_add_(self.parameters, tuple(offset))

    def _step_length(self, last: Tensor | None) -> Tensor:
        """How far to move the weights for a difference of outputs; ``last``: the last update's length."""
        size = _dot(self._weights, self._weights).sqrt()
        size = torch.where(size > 0, size, 1.0)
        first = size * _FIRST_STEP
        return first if last is None else torch.where(last > 0, last * _STEP, first).clamp(min=_SMALLEST_STEP * size)

    def _output_changes(self, v: Sequence[Tensor], step: Tensor) -> list[Tensor]:
        """``J v`` of every part, from a step of ``step`` times v; leaves the weights there."""
        self._move(torch._foreach_mul(list(v), step))
        return [(part.evaluate() - part.output) / step for part in self.parts]

    def _over_parts(self, value: Callable[[Part, int], Tensor]) -> Tensor:
        """This rank's share of the sum of a value over all examples that the parts stand for, 0-dim."""
        values = [value(part, n) * (part.weight * self._share) for n, part in enumerate(self.parts)]
        return torch.stack(values).sum() if values else torch.zeros((), device="cpu")

    def _sum(self, numbers: Sequence[Tensor]) -> Tensor:
        """The sums over all ranks of 0-dim tensors, ``[n]``, in float64 on the CPU; this waits for the device."""
        flat = torch.stack([number.to(numbers[0].device) for number in numbers]).cpu().double()
        (total,) = self.comm.sum([flat], "counts")
        return total


def _dot(u: Iterable[Tensor], v: Iterable[Tensor]) -> Tensor:
    """The inner product of two directions, 0-dim."""
    products = [torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(u, v, strict=True)]
    return torch.stack([product.to(products[0]) for product in products]).sum()


def _symmetric(entries: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """The symmetric matrix with these entries at these pairs of indices."""
    size = pairs[-1][0] + 1
    matrix = entries.new_zeros(size, size)
    for entry, (i, j) in zip(entries, pairs, strict=True):
        matrix[i, j] = matrix[j, i] = entry
    return matrix
