"""torch.compile: the values of eager training, no graph break by the hooks, and errors that say what to do.

Everything is compiled with ``fullgraph=True``, which raises at the first graph break, unless a test is about breaks.
``aot_eager`` runs the operators of eager mode and has to agree to the last bits; inductor makes its own sums.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from kfac_optim import KFACSGD, Categorical
from tests.helpers.compare import assert_close, assert_identical, assert_same_factors, assert_same_weights, values
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, KINDS, OFTEN, SETTINGS
from tests.helpers.training import backward, make_model, train
from tests.helpers.versions import (
    needs_export_flag,
    needs_graph_tag,
    needs_sharding_on_cpus,
    needs_shared_graphs,
    needs_traced_function_modes,
)

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, **OFTEN, **FLOAT64}
SAME = 1e-12  # float64; what the README states
Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graph and no count of another test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, backend: str = "aot_eager", fullgraph: bool = True) -> Call:
    return torch.compile(model, backend=backend, fullgraph=fullgraph)


def graphs() -> int:
    """Graphs that were compiled, recompilations included."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def classes(step: int, size: int = 8) -> Tensor:
    return torch.randint(3, (size,), generator=torch.Generator().manual_seed(step))


def numbers(step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


# Models and one step's backward of each ------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return make_model().double()


def on_vectors(call: Call, step: int) -> None:
    F.cross_entropy(call(numbers(step, 8, 4)), classes(step)).backward()


def convolutions() -> nn.Module:
    """In-place activations behind watched layers."""
    torch.manual_seed(0)
    first = [
        nn.Conv2d(1, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
    ]  # of a bias rounding would be left
    second = [nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(16, 3))


def on_images(call: Call, step: int) -> None:
    F.cross_entropy(call(numbers(step, 8, 1, 7, 7)), classes(step)).backward()


class Attention(nn.Module):
    """Self-attention (packed), attention to one other sequence (q and kv), to two (q, k, v), and with other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2)
        self.wide = nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True)
        self.key, self.value, self.head = nn.Linear(8, 6), nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.embedding(tokens))
        y, z = x.transpose(0, 1), torch.tanh(x).transpose(0, 1)[:3]
        y = y + self.cross(y, z, z)[0] + self.cross(y, z, z.square())[0]
        x = y.transpose(0, 1)
        return self.head((x + self.wide(x, self.key(x), self.value(x))[0]).mean(1))


def attention() -> nn.Module:
    torch.manual_seed(0)
    return Attention()


def on_tokens(call: Call, step: int) -> None:
    tokens = torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(step))
    F.cross_entropy(call(tokens), classes(step)).backward()


class Repeated(nn.Module):
    """Uses a layer several times, in one forward by calling itself; ``same``: twice on the same input."""

    def __init__(self, same: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.same = nn.Linear(4, 4), nn.Linear(4, 3), same

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        if self.same:
            return self.head(self.layer(x).relu() + self.layer(x).tanh())
        return self(self.layer(x).relu(), times - 1) if times else self.head(x)


class Checkpointed(nn.Module):
    """A checkpointed block between two layers; ``None``: without checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.first, self.last, self.reentrant = nn.Linear(4, 6), nn.Linear(6, 3), reentrant
        self.calls: list[Call] = [self.block]  # a list: not a second submodule

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        (call,) = self.calls
        x = call(x) if self.reentrant is None else checkpoint(call, x, use_reentrant=self.reentrant)
        return self.last(x.relu())


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class WithLoss(nn.Module):
    """Returns its loss beside the logits, which the loss does not reach a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        logits = self.body(x)
        return Output(F.cross_entropy(logits, labels), logits)


def with_labels(call: Call, step: int) -> None:
    call(numbers(step, 8, 4), labels=classes(step)).loss.backward()


def on_sequences(call: Call, step: int) -> None:
    F.cross_entropy(call(numbers(step, 4, 3, 4)).flatten(0, 1), classes(step, 12)).backward()


def accumulated(call: Call, step: int) -> None:
    """Micro-batches of two sizes, and an evaluation between them."""
    for part, size in enumerate((8, 4, 8)):
        loss = F.cross_entropy(call(numbers(100 * step + part, size, 4)), classes(100 * step + part, size))
        (loss * size / 20).backward()
        with torch.no_grad():
            call(numbers(7, 8, 4))


def forwards_first(call: Call, step: int) -> None:
    """Two forwards of different sizes, one that is never followed by a backward, then the backwards."""
    losses = [
        F.cross_entropy(call(numbers(step + k, size, 4)), classes(step + k, size)) for k, size in ((0, 8), (50, 4))
    ]
    call(numbers(7, 8, 4))
    for loss in losses:
        loss.backward()


def one_backward_for_three(call: Call, step: int) -> None:
    """The largest of them is neither the first nor the last."""
    sizes = ((0, 4), (50, 8), (90, 6))
    losses = [F.cross_entropy(call(numbers(step + k, size, 4)), classes(step + k, size)) for k, size in sizes]
    torch.stack(losses).sum().backward()


def among_monitors(call: Call, step: int) -> None:
    """Gradients that are taken for a look: of the weights before and after the pass, of the input in between."""
    parameters = list(call.parameters())  # type: ignore[attr-defined]
    x = numbers(step + 70, 8, 4).requires_grad_()
    torch.autograd.grad(7 * F.cross_entropy(call(x), classes(step)), parameters)
    on_vectors(call, step)
    torch.autograd.grad(7 * F.cross_entropy(call(x), classes(step)), x)
    torch.autograd.grad(7 * F.cross_entropy(call(x), classes(step)), parameters)


def sets_gradients(call: Call, step: int) -> None:
    """``.grad`` is set by the loop."""
    parameters = list(call.parameters())  # type: ignore[attr-defined]
    loss = F.cross_entropy(call(numbers(step, 8, 4)), classes(step))
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient


def run(call: Call, optimizer: torch.optim.Optimizer, one: Call, steps: range = range(6)) -> None:
    for step in steps:
        optimizer.zero_grad()
        one(call, step)
        optimizer.step()


def both(
    make: Callable[[], nn.Module], one: Call, compiler: Callable[[nn.Module], Call] = compiled, **options: Any
) -> tuple[KFACSGD, KFACSGD, nn.Module, nn.Module]:
    """Trains the model compiled and eagerly."""
    model, plain = make(), make()
    first, second = KFACSGD(model, **(OPTIONS | options)), KFACSGD(plain, **(OPTIONS | options))
    run(compiler(model), first, one)
    run(plain, second, one)
    return first, second, model, plain


def assert_same(
    make: Callable[[], nn.Module], one: Call, compiler: Callable[[nn.Module], Call] = compiled, **options: Any
) -> None:
    before = values(make())
    first, second, model, plain = both(make, one, compiler, **options)
    assert_same_factors(first, second, SAME)
    assert_same_weights(model, plain, SAME)
    assert any(not torch.equal(p, old) for p, old in zip(plain.parameters(), before, strict=True))


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.fast("^sgd")
@pytest.mark.parametrize("kind", KINDS)
def test_every_class_trains_as_in_eager_mode(kind: str) -> None:
    kfac, options = KINDS[kind]
    model, plain = mlp(), mlp()
    first, second = (kfac(m, **(SETTINGS | options)) for m in (model, plain))
    train(compiled(model), first, range(8))  # type: ignore[arg-type]
    train(plain, second, range(8))
    assert_close(model, plain, SAME)
    assert breaks() == 0
    assert graphs() == 2, "one graph for steps with statistics, one for steps without"


@pytest.mark.fast("^before")
@pytest.mark.parametrize("when", ["before", "after", "in place", "by layer"])
def test_whenever_and_whatever_is_compiled(when: str) -> None:
    model, plain = convolutions(), convolutions()
    call: Call = compiled(model) if when == "before" else model
    first, second = KFACSGD(call, **OPTIONS), KFACSGD(plain, **OPTIONS)
    if when == "after":
        call = compiled(model)
    elif when == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
    elif when == "by layer":
        for layer in model:  # type: ignore[attr-defined]
            layer.compile(backend="aot_eager")
    run(call, first, on_images)
    run(plain, second, on_images)
    assert_same_factors(first, second, SAME)
    assert_same_weights(model, plain, SAME)
    assert graphs() >= 2, "nothing was compiled"


class Nested(nn.Module):
    """A block with layers of its own and in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(5, 6)
        self.part = nn.Sequential(nn.Linear(6, 5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.part(self.norm(x)))


def encoder_block() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 5, dropout=0.0, batch_first=True)


def blocks_of(make: Callable[[], nn.Module], count: int = 9) -> nn.Sequential:
    """So many blocks between two layers; nine are more than dynamo makes graphs for."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *(make() for _ in range(count)), nn.Linear(6, 3))


def one_by_one(model: nn.Module) -> nn.Module:
    """Compiles the parts of a model between its first and its last layer."""
    for block in list(model)[1:-1]:  # type: ignore[call-overload]
        block.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.fast("Nested")
@needs_shared_graphs
@pytest.mark.parametrize("make", [Nested, pytest.param(encoder_block, marks=needs_traced_function_modes)])
def test_blocks_that_are_compiled_one_by_one_share_graphs(make: Callable[[], nn.Module]) -> None:
    """A graph for each would be more than dynamo makes, and the other blocks would run without being compiled."""

    def one(call: Call, step: int) -> None:
        F.cross_entropy(call(numbers(step, 8, 2, 4)).mean(1), classes(step)).backward()

    assert_same(lambda: blocks_of(make), one, one_by_one)
    assert graphs() == 2, "one graph for steps with statistics, one for steps without"


@pytest.mark.parametrize("left_out", ["1.out", "3.norm"])
def test_no_block_runs_the_graph_of_a_block_in_which_a_layer_is_left_out(left_out: str) -> None:
    """Its layer would not be seen: dynamo does not ask whether a module has hooks."""
    assert_same(lambda: blocks_of(Nested, 3), on_vectors, one_by_one, skip_layers=[left_out])


@pytest.mark.parametrize("make", [Nested, encoder_block])
def test_batches_of_many_sizes_share_a_graph(make: Callable[[], nn.Module]) -> None:
    """After two sizes dynamo makes a graph for all, as it does without K-FAC."""

    def one(call: Call, step: int) -> None:
        size = 4 + step
        F.cross_entropy(call(numbers(step, size, 2, 4)).mean(1), classes(step, size)).backward()

    assert_same(lambda: blocks_of(make, 1), one, factor_update_steps=1)
    assert graphs() == 2


@pytest.mark.slow
def test_attention() -> None:
    """Every projection of every kind of attention, and the table says nothing else."""
    first, second, model, plain = both(attention, on_tokens)
    assert_same_factors(first, second, SAME)
    assert_same_weights(model, plain, SAME)
    assert repr(first.curvature).count("by the base rule") == 1, "in the last line alone"
    assert F.linear is torch._C._nn.linear
    assert F.multi_head_attention_forward.__globals__ is vars(F)


ODD: dict[str, tuple[Callable[[], nn.Module], Call, dict[str, Any]]] = {
    "several calls": (Repeated, on_vectors, {}),
    "several calls, reduce": (Repeated, on_vectors, {"weight_sharing": "reduce"}),
    "loss in the output": (WithLoss, with_labels, {}),
    "accumulation and evaluation": (mlp, accumulated, {}),
    "forwards before backwards": (mlp, forwards_first, {}),
    "one backward of three forwards": (mlp, one_backward_for_three, {}),
    "among monitors": (mlp, among_monitors, {}),
    "gradients set by the loop": (mlp, sets_gradients, {}),
    "a term for each position": (mlp, on_sequences, {"loss_average": "batch+sequence"}),
    "terms by a function": (mlp, on_vectors, {"loss_average": lambda inputs, y: y.shape[0]}),
    "checkpoint": (lambda: Checkpointed(False), on_vectors, {}),
    "re-entrant checkpoint": (lambda: Checkpointed(True), on_vectors, {}),
}


@pytest.mark.fast("^(one backward|several calls$|among)")
@pytest.mark.parametrize("case", ODD)
def test_the_rules_of_capture_hold(case: str) -> None:
    make, one, options = ODD[case]
    assert_same(make, one, **options)


def test_a_smaller_call_of_the_frozen_model_before_the_backward_pass() -> None:
    """As for an adversarial example; it has an M of its own."""

    def one(call: Call, step: int) -> None:
        loss = F.cross_entropy(call(numbers(step, 8, 4)), classes(step))
        (model,) = call.models  # type: ignore[attr-defined]
        model.requires_grad_(False)
        call(numbers(step, 4, 4).requires_grad_())
        model.requires_grad_(True)
        loss.backward()

    factors = []
    for in_graph in (True, False):
        model = mlp()

        def call(x: Tensor, model: nn.Module = model) -> Tensor:
            return model(x)

        optimizer = KFACSGD(model, **OPTIONS)
        whole: Any = torch.compile(call, backend="aot_eager", fullgraph=True) if in_graph else call
        whole.models = [model]
        run(whole, optimizer, one, range(3))
        factors.append(optimizer)
    assert_same_factors(*factors, SAME)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_compiled_block_in_an_eager_checkpoint(reentrant: bool) -> None:
    """The graph runs again during the backward pass."""

    def block(model: nn.Module) -> nn.Module:
        model.calls[:] = [compiled(model.block)]  # type: ignore[arg-type, operator]
        return model

    assert_same(lambda: Checkpointed(reentrant), on_vectors, block)


@pytest.mark.slow
def test_a_break_of_the_users() -> None:
    """Between two layers; what is before it, is seen while the code of the outermost call has not taken effect."""

    class Broken(Repeated):
        def forward(self, x: Tensor, times: int = 2) -> Tensor:
            x = self.layer(x).relu()
            torch._dynamo.graph_break()
            return self.head(self.layer(x).relu())

    assert_same(Broken, on_vectors, lambda model: compiled(model, fullgraph=False))
    assert breaks() > 0


def test_two_optimizers_of_one_model() -> None:
    """Each has a part of the parameters; both watch the calls of the whole."""
    model = mlp()
    plain = copy.deepcopy(model)
    for net, call in ((model, compiled(model)), (plain, plain)):
        parameters = list(net.parameters())
        pair = [KFACSGD(own, model=net, **OPTIONS) for own in (parameters[:2], parameters[2:])]
        for step in range(6):
            net.zero_grad()
            on_vectors(call, step)
            for optimizer in pair:
                optimizer.step()
        assert all(optimizer.curvature.stages.refresher.refreshes for optimizer in pair)
    assert_same_weights(model, plain, SAME)


def test_hooks_have_one_order() -> None:
    """Graphs of torch 2.9 look for them in the order in which a plain dict would have them."""
    model = mlp()
    optimizers = [KFACSGD(model, **OPTIONS) for _ in range(2)]
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            assert list(dict.keys(hooks)) == list(hooks)  # ``dict.keys`` knows nothing of the order of an OrderedDict
    assert len(model._forward_pre_hooks) == len(optimizers)


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model, plain = mlp(), mlp()
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(plain, **OPTIONS)
    call = compiled(model)
    run(call, first, on_vectors, range(2))
    first.zero_grad()
    with pytest.raises(Exception, match="reduction dim"):
        call(torch.randn(8, 5))
    run(call, first, on_vectors, range(2, 6))
    run(plain, second, on_vectors)
    assert_same_weights(model, plain, SAME)


def test_autocast() -> None:
    def one(call: Call, step: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(call(numbers(step, 8, 4).float()), classes(step))
        loss.backward()

    first, second, model, plain = both(lambda: mlp().float(), one)
    assert_same_factors(first, second, 1e-6)
    assert_close(model, plain, 1e-6)


# Inductor ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("make", "one"), [(mlp, on_vectors), (convolutions, on_images)])
def test_inductor(make: Callable[[], nn.Module], one: Call) -> None:
    assert_same(make, one, lambda model: compiled(model, "inductor"))
    assert graphs() == 2


# Graph breaks, recompilations, warnings ------------------------------------------------------------------------------


@pytest.mark.fast("^(mlp|convolutions)")
@pytest.mark.parametrize(("make", "shape"), [(mlp, (8, 4)), (convolutions, (8, 1, 7, 7)), (attention, None)])
def test_the_hooks_break_no_graph(make: Callable[[], nn.Module], shape: tuple[int, ...] | None) -> None:
    """The number that the README gives, as torch counts it."""
    model = make()
    optimizer = KFACSGD(model, **OPTIONS)
    explained = torch._dynamo.explain(model)(torch.ones(8, 5).long() if shape is None else torch.randn(shape))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
    assert len(optimizer.curvature.layers) <= sum(
        "kfac_optim" in str(op) for ops in explained.ops_per_graph for op in ops
    )


@pytest.mark.slow
def test_compilation_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        both(convolutions, on_images)
    assert [str(warning.message) for warning in caught] == []


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_called_before_the_optimizer_was_built(in_place: bool) -> None:
    """The first step says what to do; after ``torch._dynamo.reset()`` training goes on as in eager mode."""
    model, plain = Repeated(), Repeated()
    if in_place:
        model.compile(backend="aot_eager")
    call: Call = model if in_place else compiled(model)
    on_vectors(call, 0)
    first, second = KFACSGD(model, **OPTIONS), KFACSGD(plain, **OPTIONS)
    first.zero_grad()
    on_vectors(call, 0)
    before = values(model)
    with pytest.raises(RuntimeError, match=r"before the first call of a compiled model.*torch\._dynamo\.reset\(\)"):
        first.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    torch._dynamo.reset()
    run(call, first, on_vectors)
    run(plain, second, on_vectors)
    assert_same_weights(model, plain, SAME)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_sampled_fisher_is_refused(fullgraph: bool) -> None:
    model = mlp()
    optimizer = KFACSGD(model, fisher=Categorical(), **OPTIONS)
    with pytest.raises(Exception, match="sampled Fisher needs gradients of single layers.*use fisher='empirical'"):
        compiled(model, fullgraph=fullgraph)(torch.randn(8, 4))
    del optimizer


# What an optimizer does otherwise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_compiled", [False, True])
def test_a_checkpoint_goes_from_eager_to_compiled_training_and_back(to_compiled: bool, tmp_path: Path) -> None:
    """The same keys, without the prefix of the compiled module, and the rest of the run as if nothing had happened."""
    uninterrupted = mlp()
    run(uninterrupted, KFACSGD(uninterrupted, **OPTIONS), on_vectors)
    models = [mlp() for _ in range(2)]
    optimizers = []
    for part, model in enumerate(models):
        call: Call = compiled(model) if to_compiled == bool(part) else model
        optimizers.append(KFACSGD(call, **OPTIONS))
        if part:
            model.load_state_dict(torch.load(tmp_path / "model.pt"))
            optimizers[1].load_state_dict(torch.load(tmp_path / "optimizer.pt"))
        run(call, optimizers[part], on_vectors, range(3 * part, 3 * part + 3))
        if not part:
            torch.save(model.state_dict(), tmp_path / "model.pt")
            torch.save(optimizers[0].state_dict(), tmp_path / "optimizer.pt")
    names = [[layer.name for layer in optimizer.curvature.layers] for optimizer in optimizers]
    assert names[0] == names[1] == ["0", "2", "3"]
    assert_same_weights(models[1], uninterrupted, SAME)


@pytest.mark.parametrize("whole", [False, True])
def test_a_step_in_a_compiled_function_breaks_the_graph_and_runs_as_ever(whole: bool) -> None:
    cls, base = KINDS["adam"]
    data = [(torch.randn(16, 6, generator=torch.Generator().manual_seed(i)), classes(i, 16)) for i in range(40)]

    def trained(compile_it: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))
        optimizer = cls(model, **{**base, **FLOAT64})

        def of_batch(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        of_one = torch.compile(of_batch, backend="eager") if compile_it else of_batch
        step = torch.compile(optimizer.step, backend="eager") if compile_it else optimizer.step
        for x, y in data:
            if whole:
                of_one(x, y)
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                step()
        return model

    assert_identical(trained(True), trained(False))
    package = Path(inspect.getfile(KFACSGD)).parent
    compiled = [(Path(str(m.co_filename)), m.co_name) for m in torch._dynamo.utils.get_compilation_metrics()]
    ours = [(path.name, name) for path, name in compiled if path.is_relative_to(package)]
    assert ours and not [frame for frame in ours if frame[0] != "optimizers.py"]


@pytest.mark.parametrize("cls", [torch.optim.SGD, KFACSGD])
def test_a_compiled_step_is_not_compiled_again(cls: type[torch.optim.Optimizer]) -> None:
    """What this package counts in all optimizers of the process must not be among the conditions."""
    model = make_model()
    optimizer = cls(model.parameters(), lr=torch.tensor(0.1))  # type: ignore[call-arg]
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    seen = []
    for step in range(9):
        backward(model, step)
        compiled()
        seen.append(torch._dynamo.utils.counters["frames"]["total"])
    assert seen[0] > 0 and seen[3] == seen[8]


@pytest.mark.slow
def test_after_close_the_base_class_remains() -> None:
    model, plain = mlp(), mlp()
    optimizer = KFACSGD(model, **OPTIONS)
    call = compiled(model)
    run(call, optimizer, on_vectors, range(3))
    optimizer.curvature.close()
    plain.load_state_dict(model.state_dict())
    base = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    base.load_state_dict(
        {"state": copy.deepcopy(momenta(optimizer)), "param_groups": base.state_dict()["param_groups"]}
    )
    run(call, optimizer, on_vectors, range(3, 6))
    run(plain, base, on_vectors, range(3, 6))
    assert_identical(model, plain)
    assert "kfac_optim" not in str(torch._dynamo.explain(model)(torch.randn(8, 4)).ops_per_graph)


def momenta(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    parameters = optimizer.param_groups[0]["params"]
    return {i: {"momentum_buffer": optimizer.state[p]["momentum_buffer"]} for i, p in enumerate(parameters)}


# Ranks ---------------------------------------------------------------------------------------------------------------


def train_wrapped(rank: int, world_size: int) -> list[list[Tensor]]:
    """compile(DDP(model)), then DDP(compile(model)); each rank takes its half of the batch."""
    torch.set_default_dtype(torch.float64)

    def one(call: Call, step: int) -> None:
        mine = slice(rank, None, world_size)
        F.cross_entropy(call(numbers(step, 8, 4)[mine]), classes(step)[mine]).backward()

    found = []
    for outside in (True, False):
        model = mlp()
        call: Call = compiled(DDP(model), fullgraph=False) if outside else DDP(compiled(model))  # type: ignore[arg-type]
        optimizer = KFACSGD(call, **OPTIONS)
        run(call, optimizer, one)
        assert [layer.name for layer in optimizer.curvature.layers] == ["0", "2", "3"]
        found.append(values(model))
    return found


@pytest.mark.slow
def test_two_ranks() -> None:
    plain = mlp()
    run(plain, KFACSGD(plain, **OPTIONS), on_vectors)
    for rank in run_ranks(2, train_wrapped, group_timeout=timedelta(seconds=120), limit=240.0):  # two compilations each
        for found in rank:
            for p, q in zip(found, values(plain), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


def train_sharded(rank: int, world_size: int) -> tuple[list[Tensor], int]:
    """In torchtitan's order: blocks are compiled one by one, then sharded."""
    torch.set_default_dtype(torch.float64)
    model = blocks_of(Nested)
    for block in list(one_by_one(model))[1:-1]:  # type: ignore[call-overload]
        fully_shard(block)
    fully_shard(model)

    def one(call: Call, step: int) -> None:
        mine = slice(rank, None, world_size)
        F.cross_entropy(call(numbers(step, 8, 4)[mine]), classes(step)[mine]).backward()

    run(model, KFACSGD(model, **OPTIONS), one)
    return [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)], graphs()


@needs_sharding_on_cpus
@needs_shared_graphs
def test_sharded_blocks_that_are_compiled_one_by_one_share_graphs() -> None:
    plain = blocks_of(Nested)
    run(plain, KFACSGD(plain, **OPTIONS), on_vectors)
    for found, count in run_ranks(2, train_sharded, group_timeout=timedelta(seconds=120), limit=240.0):
        assert count == 2
        for p, q in zip(found, values(plain), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


# Traced for use elsewhere --------------------------------------------------------------------------------------------


@needs_export_flag
def test_an_exported_model_knows_nothing_of_the_optimizer_that_trains_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(8, 6)
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=1, inv_update_steps=1)
    model(x).square().mean().backward()
    optimizer.step()
    model.eval()
    exported = torch.export.export(model, (x,))
    assert not [node for node in exported.graph.nodes if "kfac" in str(node.target)]
    torch.testing.assert_close(exported.module()(x), model(x))
    torch.testing.assert_close(torch.jit.trace(model, (x,))(x), model(x))
    model.train()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    assert optimizer.curvature.stages.progress.last_statistics == 1


# CUDA graphs ---------------------------------------------------------------------------------------------------------


@needs_graph_tag
def test_the_operators_stay_out_of_cuda_graphs() -> None:
    """mode="reduce-overhead" records a graph's kernels; the operators' Python code would not be replayed."""
    for name in ("record_input", "record_output_gradient"):
        operator = getattr(torch.ops.kfac_optim, name).default
        assert torch.Tag.cudagraph_unsafe in operator.tags


def test_recording_a_step_by_hand_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model().double()
    optimizer = KFACSGD(model, **OPTIONS)
    train(model, optimizer, range(2))
    inputs = torch.randn(2, 4)
    loss = model(inputs).square().mean()
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(RuntimeError, match="CUDA graph is being recorded.*reduce-overhead"):
        model(inputs)
    loss.backward()
    with pytest.raises(RuntimeError, match="CUDA graph is being recorded"):
        optimizer.step()
    with torch.no_grad():
        model(inputs)  # evaluation may be recorded
    optimizer.curvature.close()
    model(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.slow
def test_reduce_overhead_trains_as_eager() -> None:
    """On a CPU it records nothing; with the operators it has to compile all the same."""
    eager, compiled = make_model().double(), make_model().double()
    for model, call in ((eager, eager), (compiled, torch.compile(compiled, mode="reduce-overhead"))):
        train(call, KFACSGD(model, **OPTIONS), range(6))
    assert_same_weights(eager, compiled, 1e-9)


@pytest.mark.parametrize("fisher", ["empirical", "categorical"])
def test_compiled_autograd_is_refused_where_statistics_are_due(fisher: str) -> None:
    """There a backward pass is a graph of its own, in which nothing tells whose gradient a hook gets."""
    model = make_model().double()
    optimizer = KFACSGD(model, fisher=fisher, **OPTIONS)
    loss = F.cross_entropy(model(torch.randn(5, 4)), torch.randint(3, (5,)))
    with (
        compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")),
        warnings.catch_warnings(),
        pytest.raises(RuntimeError, match=r"compiled_autograd = False.*torch\.compile\(model\) works"),
    ):
        warnings.simplefilter("ignore")  # of dynamo, about what it can't trace
        loss.backward()
    optimizer.zero_grad()
    train(model, optimizer, range(3))


def test_parts_in_whose_places_their_compiled_versions_stand() -> None:
    """``model.blocks[i] = torch.compile(model.blocks[i])``, as torchtitan does, before the optimizer is built."""

    def train(*, compiled: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(*(torch.compile(b, backend="eager") if compiled else b for b in blocks), nn.Linear(4, 2))
        optimizer = KFACSGD(model, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return [factor for layer in optimizer.curvature.layers for factor in optimizer.curvature.factors(layer.name)]

    torch.testing.assert_close(train(compiled=True), train(compiled=False))


def test_a_pass_of_fake_tensors_leaves_training_as_it_was() -> None:
    """Such as one that estimates the memory of a training; what it made would not fit real tensors."""

    def trained(estimate: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(23, 29), nn.ReLU(), nn.LayerNorm(29), nn.Linear(29, 3)
        )  # sizes of no other test
        optimizer = KFACSGD(model, lr=0.1, factor_update_steps=1, inv_update_steps=1)
        x = torch.randn(8, 23)
        if estimate:
            with FakeTensorMode(allow_non_fake_inputs=True):
                twin = copy.deepcopy(model)
                KFACSGD(twin, lr=0.1)
                twin(torch.randn(8, 23)).sum().backward()
                model(torch.randn(8, 23))
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model

    assert_identical(trained(estimate=True), trained(estimate=False))
