"""M, the number of terms over which the loss takes its mean: the same loss has the same curvature however stated."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACSGD, CurvatureEngine
from kfac_optim.capture import LossTerms
from kfac_optim.capture.loss_terms import tensors_in
from tests.helpers.compare import (
    SAME,
    assert_near,
    assert_same_factors,
    assert_same_weights,
    assert_step_alike,
    factors_of,
)
from tests.helpers.reference import Oracle, assert_steps_as, averaged, cross_entropy
from tests.helpers.settings import OPTIONS, SOLVERS

pytestmark = pytest.mark.usefixtures("float64")

DAMPING, IGNORED = 0.1, -100


class Tagger(nn.Module):
    """A class for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.head = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.mix(x))))


def build(model: nn.Module, **keywords: object) -> KFACSGD:
    return KFACSGD(model, **(OPTIONS | {"lr": 1.0, "damping": DAMPING} | keywords))


def test_what_the_loss_is_averaged_over_is_one_value() -> None:
    """A name, None for a sum, the number of terms itself, or a function of the model's inputs and output."""
    inputs, output = (torch.randn(4, 3, 2),), torch.randn(4, 3, 5)
    counts: dict[Any, int] = {"batch": 4, "batch+sequence": 12, "elements": 60, None: 1, 7: 7}
    for average, count in counts.items():
        assert LossTerms(average).count(inputs, {}, output) == count
    assert LossTerms(lambda inputs, output: inputs[0].shape[1] * len(output)).count(inputs, {}, output) == 12
    assert LossTerms(lambda inputs, output: len(inputs["x"])).count((), {"x": inputs[0]}, output) == 4
    tokens, loss = torch.zeros(4, 3, dtype=torch.long), torch.zeros(())  # which have no features
    for average, count in (("batch", 4), ("batch+sequence", 12)):
        assert LossTerms(average).count((tokens,), {}, loss) == count
        assert LossTerms(average).count((), {}, loss) == LossTerms(average).count(("words",), {}, None) == 1


# Against the dense definition ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["batch", "batch+sequence", "elements", None])
@pytest.mark.parametrize("shape", [(6,), (4, 3), (2, 3, 2)])
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_loss_average_against_the_dense_definition(
    average: str | None, shape: tuple[int, ...], batch_dim: int, solver: str
) -> None:
    if batch_dim == 1 and len(shape) == 1:
        shape = (1, *shape)
    model, twin = Tagger(), Tagger()
    optimizer = build(model, loss_average=average, batch_dim=batch_dim, solver=SOLVERS[solver])
    oracle, loss = Oracle(twin, average=average, batch_dim=batch_dim), averaged(cross_entropy, average, batch_dim)
    for _ in range(2):
        passes = [((torch.randn(*shape, 3),), torch.randn(*shape, 5))]
        assert_steps_as(oracle, model, optimizer, passes, loss, DAMPING, solver)


def test_mean_and_sum_are_the_same_loss_in_other_units() -> None:
    """G of a sum over N terms is N times that of their mean, and the undamped direction is N times smaller."""
    model = Tagger()
    x, y = torch.randn(6, 3), torch.randint(5, (6,))
    found = []
    for average, reduction in (("batch", "mean"), (None, "sum")):
        optimizer = build(model, lr=0.0, loss_average=average)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        found.append(factors_of(optimizer))
        optimizer.curvature.close()
    for name, of_the_mean in found[0].items():
        assert_near(found[1][name], of_the_mean * (6 if name.endswith("G") else 1), name, SAME, scale=0.0)


# Counted by the user -------------------------------------------------------------------------------------------------


def tokens() -> tuple[Tensor, Tensor]:
    """Inputs, and targets of which some are ignored."""
    y = torch.randint(5, (4, 3))
    y[torch.rand(4, 3) < 0.4] = IGNORED
    y[0, 0] = 1
    return torch.randn(4, 3, 3), y


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


@pytest.mark.parametrize("kind", ["int", "callable on the output", "callable on the inputs"])
def test_ignored_targets(kind: str) -> None:
    """``CrossEntropyLoss(ignore_index=...)`` takes its mean over the targets that are left."""
    x, y = tokens()
    terms = int((y != IGNORED).sum())
    assert 1 < terms < y.numel()

    def on_output(inputs: Any, output: Tensor) -> int:
        assert output.shape == (4, 3, 5)
        return terms

    def on_inputs(inputs: Any, output: Tensor) -> int:
        assert isinstance(inputs, tuple) and inputs[0] is x
        return terms

    choices: dict[str, object] = {
        "int": terms,
        "callable on the output": on_output,
        "callable on the inputs": on_inputs,
    }
    model, twin = Tagger(), Tagger()
    optimizer = build(model, loss_average=choices[kind])
    assert_steps_as(Oracle(twin, terms=lambda output: terms), model, optimizer, [((x,), y)], ignoring, DAMPING)


def test_loss_terms_of_a_model_called_by_keywords() -> None:
    """The callable then gets the dict of the keyword arguments."""
    seen: list[Any] = []

    def terms(inputs: Any, output: Tensor) -> int:
        seen.append(sorted(inputs))
        return int(inputs["mask"].sum())

    class Masked(Tagger):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x)

    model = Masked()
    plain = copy.deepcopy(model)
    x, mask = torch.randn(4, 3, 3), torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    first, second = build(model, loss_average=terms), build(plain, loss_average=6)
    losses = [m(x=x, mask=mask)[mask].square().sum(-1).mean() for m in (model, plain)]
    assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))
    assert seen == [["mask", "x"]]


def test_loss_terms_add_up_over_micro_batches() -> None:
    """Unequal counts: each micro-batch brings its own, the loss divides by all of them."""
    model = Tagger()
    plain = copy.deepcopy(model)
    data = [tokens() for _ in range(3)]
    counts = [int((y != IGNORED).sum()) for _, y in data]
    coming = iter(counts)
    first = build(model, loss_average=lambda inputs, output: next(coming))
    second = build(plain, loss_average=sum(counts))
    for x, y in data:
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum").div(
            sum(counts)
        ).backward()
    first.step()
    ignoring(plain(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
    second.step()
    assert_same_factors(first, second)
    assert_same_weights(model, plain)


# Outputs of other kinds ----------------------------------------------------------------------------------------------


@dataclass
class Output:
    """transformers' kind of output: the loss stands before the logits."""

    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class Batch:
    """A model's only argument, or its output; it has no ``__dict__``."""

    x: Tensor
    weights: Tensor = field(init=False)  # never set


@dataclass
class Flagged:
    """An output whose tensors are not fields."""

    training: bool

    def __post_init__(self) -> None:
        self.results: list[Tensor] = []


class Wrapped(nn.Module):
    """A tagger whose output is of some kind."""

    def __init__(self, inner: Tagger, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.inner(x)
        loss = logits.square().sum() / logits[..., 0].numel()
        nested = {"outputs": [(logits, y)], "loss": loss}
        kinds = {"tensor": logits, "tuple": (logits, loss), "dataclass": Output(loss, logits), "nested": nested}
        kinds["object"] = SimpleNamespace(aside=logits[:1], logits=logits)
        return (
            kinds | {"scalar": loss, "none first": (None, logits), "integers first": (logits.argmax(-1)[:1], logits)}
        )[self.kind]


def loss_in(output: Any) -> Tensor:
    """The loss as the user would have it from each kind."""
    if isinstance(output, Output):
        return output.loss
    if isinstance(output, dict):
        return output["loss"]
    if isinstance(output, SimpleNamespace):
        output = output.logits
    if isinstance(output, tuple):
        output = output[0] if isinstance(output[0], Tensor) and output[0].is_floating_point() else output[1]
    return output if output.dim() == 0 else output.square().sum() / output[..., 0].numel()


@pytest.mark.parametrize("kind", ["tuple", "dataclass", "object", "nested", "scalar", "none first", "integers first"])
@pytest.mark.parametrize("average", ["batch", "batch+sequence", "elements"])
@pytest.mark.parametrize("shape", [(4,), (4, 3)])
@pytest.mark.parametrize("by_name", [False, True])
def test_models_that_return_other_things_count_the_same(
    kind: str, average: str, shape: tuple[int, ...], by_name: bool
) -> None:
    """A scalar's examples are those of the first tensor among the inputs, which may be given by name."""
    if kind == "scalar" and average == "elements":
        average = "batch"  # of the inputs nobody knows how many elements the output had
    inner = Tagger()
    model, plain = Wrapped(inner, kind), Wrapped(copy.deepcopy(inner), "tensor")
    x, y = torch.randn(*shape, 3), torch.randn(*shape)
    first, second = build(model, loss_average=average), build(plain, loss_average=average)
    losses = [loss_in(m(x=x, y=y) if by_name else m(x, y)) for m in (model, plain)]
    assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_and_outputs_may_be_dataclasses_with_slots(compiled: bool) -> None:
    """Such are the batches of darts."""

    class Taker(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, given: Any) -> Any:
            return Batch(self.inner(given.x)) if isinstance(given, Batch) else self.inner(given)

    model, x = Taker(Tagger()), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    first, second = build(model), build(plain)
    call = torch.compile(model, backend="eager") if compiled else model
    assert_step_alike((model, first, call(Batch(x)).x.square().mean()), (plain, second, plain(x).square().mean()))


@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_may_be_dataclasses_with_more_than_their_fields(compiled: bool) -> None:
    class Flagging(Tagger):
        def forward(self, x: Tensor) -> Any:
            output = Flagged(training=True)
            output.results.append(super().forward(x))
            return output

    model, plain, x = Flagging(), Tagger(), torch.randn(4, 3, 3)
    plain.load_state_dict(model.state_dict())
    first, second = build(model, loss_average="elements"), build(plain, loss_average="elements")
    call = torch.compile(model, backend="eager") if compiled else model
    assert_step_alike((model, first, call(x).results[0].square().mean()), (plain, second, plain(x).square().mean()))


class EntriesAsAttributes(dict[str, Any]):
    """A dict as many projects have one: it raises KeyError for an attribute that it lacks."""

    __getattr__ = dict.__getitem__


class AttributesAsEntries(dict[str, Any]):
    """Another one: an entry named "values" hides the method."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.__dict__ = self


class Refusing(NamedTuple):
    """An output that cannot give its logits."""

    values: Tensor

    @property
    def logits(self) -> Tensor:
        raise RuntimeError("not computed")


@dataclass
class Node:
    """A node of a tree that knows its parent."""

    values: Tensor | None = None
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)

    def grow(self) -> Node:
        """Adds a child, and returns the node itself."""
        self.children.append(Node(None, self))
        return self


@pytest.mark.parametrize(
    "kind",
    [
        lambda output: EntriesAsAttributes(values=output),
        lambda output: AttributesAsEntries(values=output),
        Refusing,
        lambda output: Node(output).grow(),
        lambda output: UserDict(values=output),
    ],
    ids=["entries as attributes", "attributes as entries", "no logits", "tree", "UserDict"],
)
def test_containers_of_any_kind_are_looked_into(kind: Callable[[Tensor], Any]) -> None:
    def values_of(given: Any) -> Tensor:
        return given["values"] if isinstance(given, (dict, UserDict)) else given.values

    class Taker(Tagger):
        def forward(self, given: Any) -> Any:
            return kind(super().forward(values_of(given)))

    model, plain, x = Taker(), Tagger(), torch.randn(4, 3)
    plain.load_state_dict(model.state_dict())
    first, second = build(model), build(plain)
    losses = values_of(model(kind(x))).square().mean(), plain(x).square().mean()
    assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


def look_into(x: Tensor) -> list[Tensor]:
    made = AttributesAsEntries(values=x)
    return [made[key] for key in made]


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("where", ["inputs", "output"])
def test_an_entry_may_hide_a_method_in_compiled_models(where: str, fullgraph: bool) -> None:
    class Taker(Tagger):
        def forward(self, given: Any) -> Any:
            output = super().forward(given if isinstance(given, Tensor) else given["values"])
            return AttributesAsEntries(values=output) if where == "output" else output

    model, plain, x = Taker(), Tagger(), torch.randn(4, 3)
    if fullgraph:  # asked of torch alone, without any hook
        try:
            torch.compile(look_into, backend="eager", fullgraph=True)(x)
        except torch._dynamo.exc.Unsupported:
            pytest.skip("this torch cannot make such a dict, or look into it, inside a graph")
    plain.load_state_dict(model.state_dict())
    first, second = build(model), build(plain)
    call: Any = torch.compile(model, backend="eager", fullgraph=fullgraph)
    output = call(AttributesAsEntries(values=x) if where == "inputs" else x)
    loss = (output if where == "inputs" else output["values"]).square().mean()
    assert_step_alike((model, first, loss), (plain, second, plain(x).square().mean()))


@pytest.mark.parametrize("where", ["inputs", "output"])
def test_trees_of_compiled_models_are_walked_to_an_end(where: str) -> None:
    """Compilers take a node that is met again for another one."""

    class Taker(Tagger):
        def forward(self, given: Any) -> Any:
            output = super().forward(given if isinstance(given, Tensor) else given.values)
            return Node(output).grow() if where == "output" else output

    model, plain, x = Taker(), Tagger(), torch.randn(4, 3)
    plain.load_state_dict(model.state_dict())
    first, second = build(model), build(plain)
    call = torch.compile(model, backend="eager")
    output = call(Node(x).grow() if where == "inputs" else x)
    loss = (output if where == "inputs" else output.values).square().mean()
    assert_step_alike((model, first, loss), (plain, second, plain(x).square().mean()))


def test_tensors_are_found_in_their_order_at_any_depth() -> None:
    tensors = [torch.ones(()) * i for i in range(4)]
    chain: list[Any] = [tensors[2]]
    for _ in range(5000):
        chain = [chain]
    assert tensors_in(({"a": tensors[0], "b": [tensors[1]]}, chain, tensors[3])) == tensors
    moved = OrderedDict(enumerate(tensors))
    moved.move_to_end(3, last=False)
    assert tensors_in(moved) == [tensors[i] for i in (3, 0, 1, 2)]


@pytest.mark.parametrize(("average", "terms"), [("batch", 2), ("elements", 18), ("batch+sequence", 6)])
def test_a_strided_nested_output(average: str, terms: int) -> None:
    """It has no shape, but sizes where all examples have the same."""
    model = nn.Sequential(nn.Linear(5, 3))
    optimizer = build(model, loss_average=average)
    examples = torch.nested.nested_tensor([torch.randn(4, 5), torch.randn(2, 5)], layout=torch.strided)
    torch.nested.to_padded_tensor(model(examples), 0.0).square().sum().backward()
    optimizer.step()
    assert float(optimizer.curvature.stages.blocks[0].state["current"]["G"]["weight"]) == terms


def test_a_scalar_over_tokens_counts_the_examples_of_integer_inputs() -> None:
    """A language model that returns its loss: token ids have no feature dimension."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)

        def forward(self, ids: Tensor) -> Tensor:
            logits = self.head(self.embed(ids[:, :-1]))
            return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    model = Language()
    plain = copy.deepcopy(model)
    ids = torch.randint(6, (4, 8))
    first, second = build(model), build(plain, loss_average=4)
    assert_step_alike((model, first, model(ids)), (plain, second, plain(ids)))


@pytest.mark.parametrize("average", ["batch", "batch+sequence"])
def test_sequence_first_equals_batch_first(average: str) -> None:
    """``batch_dim=1``: the same data transposed, under expand and reduce."""
    for sharing in ("expand", "reduce"):
        model = Tagger()
        plain = copy.deepcopy(model)
        keywords = {"loss_average": average, "weight_sharing": sharing}
        first, second = build(model, batch_dim=1, **keywords), build(plain, **keywords)
        x = torch.randn(7, 3, 3)
        terms = 7 if average == "batch" else 21
        losses = [m(inputs).square().sum() / terms for m, inputs in ((model, x.transpose(0, 1)), (plain, x))]
        assert_step_alike((model, first, losses[0]), (plain, second, losses[1]))


@pytest.mark.parametrize("call", [lambda f: f(), lambda f: torch.stack([f(), f()]).mean()], ids=["once", "twice"])
def test_validation_forwards_do_not_count(call: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    """Forwards without a backward pass, of other batch sizes, in either mode, leave M and the factors alone."""
    model = Tagger()
    plain = copy.deepcopy(model)
    first, second = build(model), build(plain)
    x = torch.randn(6, 3)
    model(torch.randn(9, 3))
    with torch.no_grad():
        model(torch.randn(11, 3))
    call(lambda: model(x).square().sum(-1).mean()).backward()
    with torch.inference_mode():
        model.eval()(torch.randn(13, 3))
    first.step()
    call(lambda: plain(x).square().sum(-1).mean()).backward()
    second.step()
    assert_same_factors(first, second)
    assert_same_weights(model, plain)


# Called by a framework -----------------------------------------------------------------------------------------------


class Loop(nn.Module):
    """As Lightning under DDP: a call of the module that holds the model runs the body of the loop instead."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Tagger()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def lend(self, body: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor) -> Any:
        own = self.forward

        def borrowed(x: Tensor, y: Tensor) -> Any:
            self.forward = own
            return body(x, y)

        self.forward = borrowed
        return self(x, y)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
@pytest.mark.parametrize("average", ["batch", "batch+sequence", "elements"])
def test_a_call_lent_to_the_loop_is_no_call_of_the_model(average: str, fisher: str, inside: bool) -> None:
    """M is that of the model's own call in it, with the backward pass outside as well as inside."""
    lent, plain = Loop(), Loop()
    plain.load_state_dict(lent.state_dict())
    options = {"loss_average": average, "fisher": fisher, "lr": 0.1}
    first, second = build(lent, **options), build(plain, **options)

    def body(x: Tensor, y: Tensor) -> Tensor | None:
        with torch.no_grad():  # a teacher, say
            lent(x[:1])
        loss = averaged(cross_entropy, average, 0)(lent(x), y)
        return loss.backward() if inside else loss

    for _ in range(3):
        x, y = torch.randn(4, 3, 3), torch.randn(4, 3, 5)
        for optimizer in (first, second):
            optimizer.zero_grad()
        loss = lent.lend(body, x, y)
        if loss is not None:
            loss.backward()
        averaged(cross_entropy, average, 0)(plain(x), y).backward()
        first.step()
        second.step()
    assert_same_factors(first, second)
    assert_same_weights(lent, plain)


def test_one_example_without_a_batch_dimension_is_one_term() -> None:
    vector, output = torch.randn(4), torch.randn(3)
    for average, count in (("batch", 1), ("batch+sequence", 1), ("elements", 3), (None, 1), (5, 5)):
        assert LossTerms(average).count((vector,), {}, output) == count
    assert LossTerms("batch").count((torch.randn(3, 4),), {}, output) == 3  # one number for each example
    assert LossTerms("batch").count((torch.randn(3),), {}, output) == 3
    assert LossTerms("batch").count((torch.randint(5, (9,)),), {}, output) == 3  # texts, one behind the other


def classifiers() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, copy.deepcopy(model)


def test_examples_one_by_one_have_the_curvature_of_their_batch() -> None:
    model, whole = classifiers()
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    first, second = (KFACSGD(m, **OPTIONS) for m in (model, whole))
    for one, target in zip(x[1:], y[1:], strict=True):
        (F.cross_entropy(model(one), target) / 6).backward()
    losses = F.cross_entropy(model(x[0]), y[0]) / 6, F.cross_entropy(whole(x), y)
    assert_step_alike((model, first, losses[0]), (whole, second, losses[1]))


def test_two_halves_of_a_batch_under_one_mean_with_the_number_of_terms_given() -> None:
    """It can't be told from two losses that are added up; ``loss_average`` says it."""
    model, whole = classifiers()
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    first, second = KFACSGD(model, **OPTIONS, loss_average=6), KFACSGD(whole, **OPTIONS)
    outputs = torch.cat([model(x[:3]), model(x[3:])]), whole(x)
    losses = [F.cross_entropy(output, y) for output in outputs]
    assert_step_alike((model, first, losses[0]), (whole, second, losses[1]))


def test_losses_of_several_calls_have_the_terms_of_the_largest_call() -> None:
    """They add rows, but no terms."""
    model, other = classifiers()
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(other, **OPTIONS, loss_average=4)
    losses = [F.cross_entropy(m(x[:4]), y[:4]) + F.cross_entropy(m(x[4:]), y[4:]) for m in (model, other)]
    assert_step_alike((model, first, losses[0]), (other, second, losses[1]))


@pytest.mark.parametrize("tokens", [False, True])
def test_examples_of_an_output_without_positions_come_first(tokens: bool) -> None:
    """Also where ``batch_dim=1`` says where they are in inputs of a sequence-first model."""

    class Pooled(nn.Module):
        def __init__(self, positions: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.positions = positions
            self.first = nn.Embedding(7, 6) if tokens else nn.Linear(4, 6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.first(x)).mean(self.positions))

    torch.manual_seed(1)
    x = torch.randint(7, (8, 5)) if tokens else torch.randn(8, 5, 4)
    y, found = torch.randint(3, (8,)), []
    for first in (True, False):
        model = Pooled(1 if first else 0)
        engine = CurvatureEngine(model, batch_dim=0 if first else 1)
        torch.nn.functional.cross_entropy(model(x if first else x.transpose(0, 1)), y).backward()
        engine.precondition_(lr=0.1)
        found.append(engine)
    for layer in ("first", "head"):
        for one, other in zip(*(engine.factors(layer) for engine in found), strict=True):
            torch.testing.assert_close(other, one)


class Nested(Tagger):
    """Adds its own output of the first example, by a call of itself or by its forward."""

    by_call = True

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        y = super().forward(x)
        return y + (self if self.by_call else self.forward)(x[:1], False) if again else y


@pytest.mark.parametrize("fisher", ["empirical", "gaussian"])
def test_a_model_that_calls_itself_counts_the_outermost_call(fisher: str) -> None:
    model = Nested()
    plain = copy.deepcopy(model)
    plain.by_call = False
    first, second = (build(m, fisher=fisher) for m in (model, plain))
    x = torch.randn(4, 3)
    assert_step_alike((model, first, model(x).square().mean()), (plain, second, plain(x).square().mean()))


@pytest.mark.parametrize("average", ["batch", "batch+sequence", "elements"])
@pytest.mark.parametrize("fisher", ["empirical", "gaussian"])
@pytest.mark.parametrize("shape", [(3,), (4, 3)], ids=str)
def test_a_layer_alone_is_a_model_like_one_in_a_container(average: str, fisher: str, shape: tuple[int, ...]) -> None:
    model = nn.Linear(3, 5)
    boxed = nn.Sequential(copy.deepcopy(model))
    first, second = (build(m, loss_average=average, fisher=fisher) for m in (model, boxed))
    x = torch.randn(shape)
    for m, optimizer in ((model, first), (boxed, second)):
        m(x).square().mean().backward()
        optimizer.step()
    factors, expected = first.curvature.factors(""), second.curvature.factors("0")
    assert all(map(torch.equal, factors, expected))
    assert_same_weights(model, boxed[0])


@pytest.mark.parametrize("terms", [None, -3, "many", math.inf, math.nan])
def test_a_callable_that_returns_no_number_of_terms_is_told_so(terms: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = KFACSGD(model, lr=0.1, loss_average=lambda inputs, output: terms)
    with pytest.raises(ValueError, match=f"loss_average: the callable has returned {terms!r}; must be"):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()


class Tree(nn.Module):
    """Calls itself for its halves, which have another kind of result."""

    def __init__(self) -> None:
        super().__init__()
        self.join, self.head = nn.Linear(6, 3), nn.Linear(3, 2)

    def forward(self, leaves: Tensor, top: bool = True) -> Any:
        halves = [self(half, top=False) if half.shape[1] > 1 else half[:, 0] for half in leaves.chunk(2, dim=1)]
        joined = self.join(torch.cat(halves, dim=1)).tanh()
        return {"logits": self.head(joined)} if top else joined


def test_a_callable_is_asked_about_the_model_and_not_about_its_calls_of_itself() -> None:
    model, asked = Tree(), []

    def terms(inputs: Any, output: Any) -> int:
        asked.append(output["logits"].shape[0])
        return asked[-1]

    optimizer = KFACSGD(model, lr=0.1, loss_average=terms)
    F.cross_entropy(model(torch.randn(5, 4, 3))["logits"], torch.arange(5) % 2).backward()
    optimizer.step()
    assert asked == [5]
