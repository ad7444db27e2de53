"""Property tests: the applied weight change is minus the dense damped solve of the raw gradient, for any network.

The oracle (``reference.py``) writes ``A (x) G + gamma I`` out as one dense matrix per layer. Networks, batch sizes,
loss reductions, micro-batch splits, weight sharing and solvers are drawn by hypothesis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import KFACLAMB, KFACSGD, EigenSolver, InverseSolver, KFACAdam
from tests.helpers.compare import assert_applied, assert_near, snapshot
from tests.helpers.reference import (
    LOSSES,
    NOISE,
    Conv1D,
    Inputs,
    LossFunction,
    Named,
    Oracle,
    averaged,
    squared_error,
    take_step,
)
from tests.helpers.settings import EXACT, SOLVERS, damping_of
from tests.helpers.textbook import TextbookAdam, TextbookMomentum

pytestmark = pytest.mark.usefixtures("float64")

CHAIN_TOL = 1e-6  # Adam and LAMB divide by roots of small second moments, step after step, which amplifies rounding

LARGEST_WEIGHT = 100.0  # a course that diverges (small damping, few data) ends where saturated units lose all digits


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A parameter that no Kronecker block covers: it trains by the base rule."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return self.factor * x


class Pool(nn.Module):
    """Mean over the image."""

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, c, *image]`` to ``[n, c]``."""
        return x.flatten(2).mean(2)


KINDS: dict[str, Callable[..., nn.Module]] = {
    cls.__name__: cls
    for cls in (
        nn.Linear,
        Conv1D,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.LayerNorm,
        nn.GroupNorm,
        nn.Tanh,
        nn.ReLU,
        Pool,
        Scale,
    )
}


@dataclass(frozen=True)
class Part:
    """One module of a generated network."""

    kind: str
    options: tuple[tuple[str, object], ...] = ()

    def build(self) -> nn.Module:
        """Construct it."""
        return KINDS[self.kind](**dict(self.options))


def part(kind: str, **options: object) -> Part:
    """Shorthand."""
    return Part(kind, tuple(options.items()))


@dataclass(frozen=True)
class Stack:
    """A generated network: the shape of one example, and its modules in order."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def build(self, seed: int) -> nn.Sequential:
        """The same network for the same seed; norms and biases away from their initial values."""
        torch.manual_seed(seed)
        model = nn.Sequential(*(p.build() for p in self.parts))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        return model


def output_shape(shape: Sequence[int], part_: Part) -> tuple[int, ...]:
    """Shape of one example behind a module."""
    return tuple(part_.build()(torch.zeros(1, *shape)).shape[1:])


def example_output(stack: Stack) -> tuple[int, ...]:
    """Shape of the output for one example."""
    shape = stack.shape
    for p in stack.parts:
        shape = output_shape(shape, p)
    return shape


activations = st.sampled_from([(part("Tanh"),), (part("ReLU"),), ()])


@st.composite
def linear_stacks(draw: st.DrawFn) -> Stack:
    """One to three Linear-like layers over any token dimensions, LayerNorm and an uncovered parameter between."""
    tokens = draw(st.lists(st.integers(1, 3), max_size=2))
    width = first = draw(st.integers(1, 4))
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 3))):
        out = draw(st.integers(1, 4))
        if draw(st.booleans()):
            parts.append(part("Linear", in_features=width, out_features=out, bias=draw(st.booleans())))
        else:
            parts.append(part("Conv1D", nf=out, nx=width))
        if draw(st.booleans()) and out > 2:  # two normalised numbers are +-1, and no gradient passes
            parts.append(part("LayerNorm", normalized_shape=out, eps=0.1, bias=draw(st.booleans())))
        if draw(st.booleans()):
            parts.append(part("Scale"))
        parts.extend(draw(activations))
        width = out
    return Stack((*tokens, first), tuple(parts))


@st.composite
def convolutions(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    """A convolution that fits an image ``[channels, *sizes]``."""
    channels, *sizes = shape
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if channels % g == 0]))
    largest = 2 if len(sizes) == 3 else 3
    kernel = tuple(draw(st.integers(1, min(largest, size))) for size in sizes)
    dilation = tuple(
        draw(st.integers(1, 2)) if 2 * (k - 1) < size else 1 for k, size in zip(kernel, sizes, strict=False)
    )
    padding = draw(st.sampled_from(["same", "valid", "int"]))
    stride = 1 if padding == "same" else tuple(draw(st.integers(1, 2)) for _ in sizes)
    return part(
        f"Conv{len(sizes)}d",
        in_channels=channels,
        out_channels=groups * draw(st.integers(1, 2)),
        kernel_size=kernel,
        stride=stride,
        padding=tuple(draw(st.integers(0, min(2, size - 1))) for size in sizes) if padding == "int" else padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )


@st.composite
def transposed_convolutions(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    """A transposed convolution for an image ``[channels, *sizes]``."""
    channels, *sizes = shape
    groups = draw(st.sampled_from([g for g in (1, 2) if channels % g == 0]))
    kernel = tuple(draw(st.integers(1, 2)) for _ in sizes)
    stride = tuple(draw(st.integers(1, 2)) for _ in sizes)
    dilation = tuple(draw(st.integers(1, 2)) for _ in sizes)
    full = [(size - 1) * s + d * (k - 1) + 1 for size, s, d, k in zip(sizes, stride, dilation, kernel, strict=False)]
    return part(
        f"ConvTranspose{len(sizes)}d",
        in_channels=channels,
        out_channels=groups * draw(st.integers(1, 2)),
        kernel_size=kernel,
        stride=stride,
        padding=tuple(draw(st.integers(0, 1)) if size > 2 else 0 for size in full),
        output_padding=tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=False)),
        groups=groups,
        bias=draw(st.booleans()),
        dilation=dilation,
    )


@st.composite
def image_stacks(draw: st.DrawFn) -> Stack:
    """One or two convolutions, transposed or not, in one to three dimensions; a norm and a pooled head, maybe."""
    dims = draw(st.integers(1, 3))
    first = shape = (draw(st.integers(1, 4)), *(draw(st.integers(1, (6, 4, 3)[dims - 1])) for _ in range(dims)))
    parts: list[Part] = []
    for _ in range(draw(st.integers(1, 2))):
        small = math.prod(shape[1:]) <= 16
        kinds = convolutions(shape) | transposed_convolutions(shape) if small else convolutions(shape)
        parts.append(draw(kinds))
        shape = output_shape(shape, parts[-1])
        if draw(st.booleans()) and math.prod(shape) > 2:
            parts.append(part("GroupNorm", num_groups=1, num_channels=shape[0], eps=0.1))
        parts.extend(draw(activations))
    if draw(st.booleans()):
        parts += [part("Pool"), part("Linear", in_features=shape[0], out_features=draw(st.integers(1, 3)))]
    return Stack(first, tuple(parts))


# ---------------------------------------------------------------------------------------------------------------------
# Problems: a network, its data, its loss, and the settings of the optimizer
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Everything that is drawn for one comparison with the oracle."""

    stack: Stack
    batches: tuple[int, ...]  # sizes of the micro-batches
    average: str | None
    terms_per_example: int | None  # None: M follows from ``average``
    divided: bool  # the loss of each micro-batch is divided by their number, as trainers do
    loss: str
    sharing: str
    solver: str
    damping: float  # in units of a typical mean eigenvalue
    seed: int

    def models(self) -> tuple[nn.Module, nn.Module]:
        """The model to train and its twin for the oracle."""
        return self.stack.build(self.seed), self.stack.build(self.seed)

    def passes(self, step: int = 0, sizes: Sequence[int] | None = None) -> list[tuple[Inputs, Tensor]]:
        """The data of one step."""
        return make_passes(self.stack, sizes or self.batches, 1000 * self.seed + step)

    def total_loss(self) -> LossFunction:
        """The loss of one micro-batch."""
        mean = self.mean_loss()
        parts = len(self.batches) if self.divided else 1
        return lambda output, target: mean(output, target) / parts

    def mean_loss(self) -> LossFunction:
        """The loss ``(1/M) sum_m l_m``, or divided by the terms the user counts."""
        if self.terms_per_example is None:
            return averaged(LOSSES[self.loss], self.average)
        return lambda output, target: LOSSES[self.loss](output, target) / (self.terms_per_example * len(output))

    def oracle(self, twin: nn.Module, **options: object) -> Oracle:
        """The oracle with this problem's conventions."""
        count = self.terms_per_example
        terms = None if count is None else lambda output: count * len(output)
        return Oracle(twin, average=self.average, terms=terms, sharing=self.sharing, **options)

    def gamma(self, oracle: Oracle) -> float:
        """An absolute damping at which the curvature shows."""
        if self.solver != "inverse without pi":
            return self.damping * oracle.typical_eigenvalue()
        return math.sqrt(self.damping * oracle.typical_eigenvalue())  # it enters twice, once for each factor

    def keywords(self, damping: object) -> dict[str, object]:
        """Keywords of the optimizer."""
        count = self.terms_per_example
        terms = self.average if count is None else lambda inputs, output: count * len(output)
        options = {"loss_average": terms, "weight_sharing": self.sharing}
        return EXACT | options | {"damping": damping, "solver": SOLVERS[self.solver]}


def make_passes(stack: Stack, sizes: Sequence[int], seed: int) -> list[tuple[Inputs, Tensor]]:
    """Random inputs and targets for one step."""
    random = torch.Generator().manual_seed(seed)
    shape = example_output(stack)
    return [
        ((torch.randn(n, *stack.shape, generator=random),), 2 * torch.randn(n, *shape, generator=random)) for n in sizes
    ]


def has_tokens(stack: Stack) -> bool:
    """Whether the output's last dimension holds the classes: not so for images."""
    return not any(p.kind.startswith(("Conv1d", "Conv2d", "Conv3d", "ConvT")) for p in stack.parts)


@st.composite
def problems(draw: st.DrawFn, stacks: st.SearchStrategy[Stack], passes: int = 3) -> Problem:
    """Draw a problem; the batch sizes start at 1. Sums over several passes have a test of their own."""
    stack = draw(stacks)
    kinds = ["batch", "elements", None] + (["batch+sequence"] if has_tokens(stack) else [])
    average = draw(st.sampled_from(kinds))
    one_class = example_output(stack)[-1] == 1  # the cross entropy of a single class is constant
    terms = draw(st.sampled_from([None, None, 1, 3]))
    most = 1 if average is None and terms is None else passes
    return Problem(
        stack=stack,
        batches=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=most))),
        average=average,
        terms_per_example=terms,
        divided=draw(st.booleans()) and average is not None,
        loss=draw(st.sampled_from(sorted(set(LOSSES) - ({"cross entropy"} if one_class else set())))),
        sharing=draw(st.sampled_from(["expand", "reduce"])),
        solver=draw(st.sampled_from(sorted(SOLVERS))),
        damping=draw(st.sampled_from([0.01, 0.1, 1.0, 10.0])),
        seed=draw(st.integers(0, 10_000)),
    )


any_problem = problems(linear_stacks() | image_stacks())


# ---------------------------------------------------------------------------------------------------------------------
# One step
# ---------------------------------------------------------------------------------------------------------------------


def check_one_step(problem: Problem, relative: bool = False) -> None:
    """Compare one applied change with the oracle."""
    model, twin = problem.models()
    passes, loss = problem.passes(), problem.total_loss()
    oracle = problem.oracle(twin)
    step = oracle.observe(passes, loss)
    oracle.refresh(step)
    damping = problem.damping if relative else problem.gamma(oracle)
    assume(oracle.well_posed(step, damping, relative, problem.solver))
    optimizer = KFACSGD(model, **problem.keywords(damping_of(damping, relative)))
    changes = take_step(model, optimizer, passes, loss)
    directions = oracle.directions(step.gradients, damping, relative, problem.solver)
    assert_applied(oracle, changes, directions, step.gradients)


@given(problem=problems(linear_stacks()))
def test_linear_stack_moves_by_the_dense_damped_solve(problem: Problem) -> None:
    check_one_step(problem)


@given(problem=problems(image_stacks()))
def test_image_stack_moves_by_the_dense_damped_solve(problem: Problem) -> None:
    check_one_step(problem)


@given(problem=any_problem)
def test_relative_damping_is_a_multiple_of_each_pairs_mean_eigenvalue(problem: Problem) -> None:
    check_one_step(problem, relative=True)


@given(problem=any_problem, sizes=st.lists(st.integers(1, 3), min_size=2, max_size=3))
def test_sums_over_micro_batches_equal_the_sum_over_one_batch(problem: Problem, sizes: list[int]) -> None:
    """M is 1 for the loss whose gradient stands in ``.grad``, in however many passes the sum was taken."""
    check_one_step(replace(problem, average=None, terms_per_example=None, divided=False, batches=tuple(sizes)))


# ---------------------------------------------------------------------------------------------------------------------
# Several steps
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """A problem over several steps: sizes of the micro-batches of every step, the decay and the intervals."""

    problem: Problem
    steps: tuple[tuple[int, ...], ...]
    decay: float
    factor_every: int
    decompose_every: int


@st.composite
def courses(draw: st.DrawFn) -> Course:
    """Several steps of unequal batches; equal ones for a summed loss, whose scale follows the batch size."""
    problem = draw(any_problem)
    count = draw(st.integers(2, 5))
    summed = problem.average is None and problem.terms_per_example is None
    sizes = st.just((2,)) if summed else st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)
    return Course(
        problem=problem,
        steps=tuple(draw(sizes) for _ in range(count)),
        decay=draw(st.sampled_from([0.0, 0.5, 0.95])),
        factor_every=draw(st.integers(1, 3)),
        decompose_every=draw(st.integers(1, 3)),
    )


def run_course(
    course: Course,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    oracle: Oracle,
    gamma: float,
    compare: Callable[[Named, dict[str, Tensor], Named, Named], None],
) -> None:
    """Run both, step by step from the same weights, and compare every applied change."""
    problem, loss = course.problem, course.problem.mean_loss()
    for t, sizes in enumerate(course.steps):
        passes = problem.passes(step=t, sizes=sizes)
        before = snapshot(model)
        if max(float(value.abs().max()) for value in before.values()) > LARGEST_WEIGHT:
            return
        step = oracle.observe(passes, loss, before)
        if t % course.factor_every == 0:
            oracle.update(step)
        if t % course.decompose_every == 0:
            oracle.decompose()
        assume(oracle.well_posed(step, gamma, solver=problem.solver))
        changes = take_step(model, optimizer, passes, loss)
        compare(changes, oracle.directions(step.gradients, gamma, solver=problem.solver), step.gradients, before)


def course_setup(course: Course) -> tuple[nn.Module, Oracle, float, dict[str, object]]:
    """Model, oracle, damping, and the keywords of the optimizer but for the learning rate."""
    model, twin = course.problem.models()
    probe = course.problem.oracle(twin)
    probe.refresh(probe.observe(course.problem.passes(sizes=course.steps[0]), course.problem.mean_loss()))
    gamma = course.problem.gamma(probe)
    keywords = course.problem.keywords(gamma) | {
        "factor_decay": course.decay,
        "factor_update_steps": course.factor_every,
        "inv_update_steps": course.decompose_every,
    }
    return model, course.problem.oracle(twin, decay=course.decay), gamma, keywords


@given(course=courses())
def test_running_averages_and_stale_decompositions_follow_the_oracle(course: Course) -> None:
    model, oracle, gamma, keywords = course_setup(course)
    lr = 0.01
    optimizer = KFACSGD(model, **keywords | {"lr": lr})

    def compare(changes: Named, directions: dict[str, Tensor], gradients: Named, before: Named) -> None:
        assert_applied(oracle, changes, directions, gradients, lr)

    run_course(course, optimizer, model, oracle, gamma, compare)


def recurrences(oracle: Oracle, **options: object) -> dict[str, TextbookMomentum]:
    """One momentum recurrence per parameter."""
    return {name: TextbookMomentum(**options) for name, _ in oracle.model.named_parameters()}


@st.composite
def momenta(draw: st.DrawFn) -> dict[str, object]:
    """Momentum settings that SGD allows."""
    nesterov = draw(st.booleans())
    dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3]))
    return {"momentum": draw(st.sampled_from([0.5, 0.9])), "dampening": dampening, "nesterov": nesterov}


@given(course=courses(), options=momenta())
def test_momentum_after_preconditioning_is_the_papers_order(course: Course, options: dict[str, object]) -> None:
    model, oracle, gamma, keywords = course_setup(course)
    lr, rules = 0.01, {layer.name: TextbookMomentum(**options) for layer in oracle.layers}
    rest = recurrences(oracle, **options)
    optimizer = KFACSGD(model, **keywords | {"lr": lr} | options)

    def compare(changes: Named, directions: dict[str, Tensor], gradients: Named, before: Named) -> None:
        moved = {name: rules[name](direction) for name, direction in directions.items()}
        uncovered = {name: rest[name](gradients[name]) for name in oracle.uncovered()}
        assert_applied(oracle, changes, moved, uncovered, lr)

    run_course(course, optimizer, model, oracle, gamma, compare)


@given(course=courses(), options=momenta(), weight_decay=st.sampled_from([0.0, 0.1]))
def test_momentum_first_preconditions_the_buffer_but_not_the_decay_in_it(
    course: Course, options: dict[str, object], weight_decay: float
) -> None:
    model, oracle, gamma, keywords = course_setup(course)
    lr, rules, pure_rules = 0.01, recurrences(oracle, **options), recurrences(oracle, **options)
    own = {"lr": lr, "precondition": "momentum", "weight_decay": weight_decay}
    optimizer = KFACSGD(model, **keywords | own | options)

    def compare(changes: Named, _: dict[str, Tensor], gradients: Named, before: Named) -> None:
        buffers = {name: rules[name](g + weight_decay * before[name]) for name, g in gradients.items()}
        pure = {name: pure_rules[name](g) for name, g in gradients.items()}
        decays = {name: buffer - pure[name] for name, buffer in buffers.items()}
        directions = oracle.directions(pure, gamma, solver=course.problem.solver)
        for layer in oracle.layers:
            directions[layer.name] = directions[layer.name] + layer.of(decays)
        assert_applied(oracle, changes, directions, buffers, lr)

    run_course(course, optimizer, model, oracle, gamma, compare)


def parameter_directions(oracle: Oracle, directions: dict[str, Tensor], gradients: Named) -> Named:
    """Directions in the shapes of the parameters: running numbers in place of values tell which entry is which."""
    result = dict(gradients)
    for layer in oracle.layers:
        names = {n: p for n, p in oracle.model.named_parameters() if n.rpartition(".")[0] == layer.name}
        places = entries(layer.of({n: torch.arange(p.numel()).reshape(p.shape) for n, p in names.items()}))
        kinds = entries(layer.of({n: torch.full(p.shape, k) for k, (n, p) in enumerate(names.items())}))
        for k, (name, p) in enumerate(names.items()):
            chosen = kinds == k
            flat = torch.empty(p.numel())
            flat[places[chosen]] = directions[layer.name].flatten()[chosen]
            result[name] = flat.reshape(p.shape)
    return result


def entries(values: Tensor) -> Tensor:
    """Flattened whole numbers."""
    return values.flatten().long()


@pytest.mark.parametrize("cls", [KFACAdam, KFACLAMB])
@given(course=courses())
def test_adam_and_lamb_run_their_own_update_on_the_direction(cls: type, course: Course) -> None:
    model, oracle, gamma, keywords = course_setup(course)
    lr, eps = 0.01, 0.1  # a large eps, so that the size of the direction matters and small entries do not explode
    rules = {name: TextbookAdam(eps=eps) for name, _ in model.named_parameters()}
    settings = {k: v for k, v in keywords.items() if k != "momentum"}
    optimizer = cls(model, **settings | {"lr": lr, "eps": eps})

    def compare(changes: Named, directions: dict[str, Tensor], gradients: Named, before: Named) -> None:
        inputs = parameter_directions(oracle, directions, gradients)
        largest = max(float(value.norm()) for value in inputs.values())
        assume(all(0 == float(v.norm()) or float(v.norm()) > NOISE * largest for v in inputs.values()))
        for name, value in inputs.items():  # (LAMB would blow mere rounding up to the size of the weight)
            rule = rules[name]
            wanted = rule.adam(value) if cls is KFACAdam else rule.lamb(value, before[name])
            assert_near(changes[name], -lr * wanted, name, CHAIN_TOL)

    run_course(course, optimizer, model, oracle, gamma, compare)


# ---------------------------------------------------------------------------------------------------------------------
# One weight used several times
# ---------------------------------------------------------------------------------------------------------------------


class Repeated(nn.Module):
    """The same Linear called twice, on inputs with different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, t, 3]`` to ``[n, 2]``."""
        return self.head(self.cell(self.cell(x).tanh().mean(1, keepdim=True)).squeeze(1))


class RepeatedNorm(nn.Module):
    """The same norm called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, t, 3]`` to ``[n, 2]``."""
        return self.head(self.norm(self.norm(x).tanh().mean(1, keepdim=True)).squeeze(1))


class Tied(nn.Module):
    """Two modules that share weight and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, t, 3]`` to ``[n, 2]``."""
        return self.head(self.second(self.first(x).tanh().mean(1)))


class TiedConvolutions(nn.Module):
    """Two convolutions with one weight and different strides: the same rule, so their rows pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 2, 3, bias=False), nn.Conv1d(2, 2, 3, stride=2, padding=1, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, t, 2]`` to ``[n, 2]``."""
        return self.second(self.first(x.transpose(1, 2)).tanh()).sum(2)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("factory", [Repeated, RepeatedNorm, Tied, TiedConvolutions], ids=lambda f: f.__name__)
@given(batches=st.lists(st.integers(1, 3), min_size=1, max_size=2), seed=st.integers(0, 999))
def test_several_calls_in_one_backward_add_rows_not_examples(
    factory: Callable[[], nn.Module], sharing: str, batches: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    model, twin = factory(), factory()
    twin.load_state_dict(model.state_dict())
    passes = [((torch.randn(n, 4, 3 if factory is not TiedConvolutions else 2),), torch.randn(n, 2)) for n in batches]
    if factory is TiedConvolutions:
        passes = [((torch.randn(n, 5, 2),), y) for (n, (_, y)) in zip(batches, passes, strict=False)]
    oracle = Oracle(twin, sharing=sharing)
    loss = averaged(squared_error, "batch")
    step = oracle.observe(passes, loss)
    oracle.refresh(step)
    gamma = 0.1 * oracle.typical_eigenvalue()
    optimizer = KFACSGD(model, **EXACT | {"damping": gamma, "weight_sharing": sharing})
    changes = take_step(model, optimizer, passes, loss)
    assert_applied(oracle, changes, oracle.directions(step.gradients, gamma), step.gradients)


def token_model() -> nn.Module:
    """Three token-wise layers."""
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


# ---------------------------------------------------------------------------------------------------------------------
# The comparison itself has power
# ---------------------------------------------------------------------------------------------------------------------


def test_the_damping_of_these_tests_leaves_the_curvature_visible() -> None:
    """With a swamping damping every preconditioner passes; here the direction is far from the gradient."""
    linears = part("Linear", in_features=3, out_features=4), part("Linear", in_features=4, out_features=2)
    stack = Stack((3,), (linears[0], part("Tanh"), linears[1]))
    twin = stack.build(0)
    oracle = Oracle(twin)
    step = oracle.observe(make_passes(stack, [3], 0), averaged(squared_error, "batch"))
    oracle.refresh(step)
    directions = oracle.directions(step.gradients, 0.1 * oracle.typical_eigenvalue())
    for layer in oracle.layers:
        cosine = torch.cosine_similarity(layer.of(step.gradients).flatten(), directions[layer.name].flatten(), dim=0)
        assert cosine < 0.95, "the curvature is not visible"


def test_solvers_may_be_instances() -> None:
    passes = [((torch.randn(3, 5, 3),), torch.randn(3, 5, 2))]
    loss = averaged(squared_error, "batch")
    for name, instance in (("eigen", EigenSolver()), ("inverse", InverseSolver(pi=True)), ("inverse", InverseSolver())):
        changes = []
        for solver in (name, instance):
            torch.manual_seed(0)
            model = token_model()
            changes.append(take_step(model, KFACSGD(model, **EXACT | {"damping": 0.1, "solver": solver}), passes, loss))
        for key in changes[0]:
            assert torch.equal(changes[0][key], changes[1][key])
