"""LSTM, GRU, RNN and their cells train as their equations, written out in Linear layers, do."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from kfac_optim import KFACSGD, Graft, KFACAdam, LayerOptions
from kfac_optim.layers import FoundLayers, tensors_of
from tests.helpers.compare import assert_identical, assert_near, assert_same_factors
from tests.helpers.recurrent import KINDS, Unrolled
from tests.helpers.settings import SETTINGS
from tests.helpers.versions import needs_export_flag

pytestmark = pytest.mark.usefixtures("float64")

CELLS: dict[str, Any] = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN_TANH": nn.RNNCell, "RNN_RELU": nn.RNNCell}
# G keeps a block for each gate by default, and the written-out layers know of no gates.
WHOLE: dict[str, Any] = SETTINGS | {"max_factor_dim": None}
D_IN, HIDDEN, STEPS = 3, 4, 7


def recurrent(kind: str, cls: Any, *args: Any, **options: Any) -> Any:
    if kind.startswith("RNN"):
        options["nonlinearity"] = kind.removeprefix("RNN_").lower()
    return cls(*args, **options)


class Reader(nn.Module):
    """A recurrent module under a Linear on some of what it returns."""

    def __init__(self, module: Any, parts: str, lengths: Tensor | None = None) -> None:
        super().__init__()
        self.rnn, self.parts, self.lengths = module, parts, lengths
        width = module.hidden_size * (2 if getattr(module, "bidirectional", False) else 1)
        self.head = nn.Linear(width if "sequence" in parts else module.hidden_size, 2)

    def written_out(self) -> Reader:
        twin = copy.deepcopy(self)
        twin.rnn = Unrolled(self.rnn)
        return twin

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        """``x``: ``[T, n, d]``; returns what is of the positions or of the final states, ``[n, ..., 2]``."""
        given: Any = x.transpose(0, 1) if self.rnn.batch_first else x
        if self.lengths is not None:
            given = pack_padded_sequence(x, self.lengths, enforce_sorted=bool((self.lengths.diff() <= 0).all()))
        y, final = self.rnn(given, state)
        found: Any = torch.zeros(())
        if "sequence" in self.parts:
            data = y.data if isinstance(y, PackedSequence) else y.transpose(0, 1) if self.rnn.batch_first else y
            return self.head(data.flatten(0, -2))
        for part in final if isinstance(final, tuple) else (final,):
            found = found + part.transpose(0, 1)
        return self.head(found)


def train(model: nn.Module, optimizer: Any, batches: int = STEPS, examples: int = 5, **how: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        x = torch.randn(6, examples, D_IN, generator=generator)
        state = how.get("state", lambda _: None)(generator)
        optimizer.zero_grad()
        model(x, state).square().mean().backward()
        optimizer.step()


def assert_trains_as_written_out(model: Reader, rel: float = 1e-8, **options: Any) -> None:
    twin, how = model.written_out(), {"state": options.pop("state", lambda _: None)}
    runs = [(own, KFACSGD(own, lr=0.05, momentum=0.9, **{**WHOLE, **options})) for own in (model, twin)]
    for own, optimizer in runs:
        train(own, optimizer, **how)
    (_, optimizer), (_, other) = runs
    assert_same_factors(optimizer, other, rel)
    found = [p for layer in optimizer.curvature.layers for p in layer.parameters]
    expected = [p for layer in other.curvature.layers for p in layer.parameters]
    assert set(found) == set(model.parameters())
    for p, q in zip(found, expected, strict=True):
        assert_near(p.detach(), q.detach(), rel=rel)


@st.composite
def readers(draw: st.DrawFn) -> tuple[Reader, dict[str, Any]]:
    """A model of any form, with the options of its optimizer."""
    torch.manual_seed(draw(st.integers(0, 999)))
    kind, levels, bidirectional = draw(st.sampled_from(list(KINDS))), draw(st.integers(1, 3)), draw(st.booleans())
    packed = draw(st.booleans())
    drawn = draw(st.lists(st.integers(1, 5), min_size=4, max_size=4)) + [6]
    lengths = torch.tensor(sorted(drawn, reverse=True) if draw(st.booleans()) else drawn) if packed else None
    form = {"bidirectional": bidirectional, "bias": draw(st.booleans())}
    form["batch_first"] = draw(st.booleans()) and not packed
    module = recurrent(kind, KINDS[kind], D_IN, HIDDEN, levels, **form)
    model = Reader(module, draw(st.sampled_from(["sequence", "final"])), lengths)
    options: dict[str, Any] = {"weight_sharing": draw(st.sampled_from(["expand"] if packed else ["expand", "reduce"]))}
    if draw(st.booleans()):
        places = levels * (2 if bidirectional else 1)

        def state(generator: torch.Generator) -> Any:
            h, c = (0.5 * torch.randn(places, 5, HIDDEN, generator=generator) for _ in range(2))
            return (h, c) if kind == "LSTM" else h

        options["state"] = state
    return model, options


@given(readers())
def test_factors_and_weights_are_those_of_the_equations_written_out(case: tuple[Reader, dict[str, Any]]) -> None:
    model, options = case
    assert_trains_as_written_out(model, **options)


class Decoder(nn.Module):
    """A cell that is called once for each position, as in many decoders."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.rnn, self.head = cell, nn.Linear(HIDDEN, 2)

    written_out = Reader.written_out

    def forward(self, x: Tensor, state: Any) -> Tensor:
        outputs = []
        for at in x:
            state = self.rnn(at, state)
            outputs.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", CELLS)
def test_cells_train_as_written_out(kind: str, sharing: str) -> None:
    assert_trains_as_written_out(Decoder(recurrent(kind, CELLS[kind], D_IN, HIDDEN)), weight_sharing=sharing)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRUCell])
def test_a_single_example_needs_no_dimension_of_its_own(cls: Any) -> None:
    """Factors are those of a batch of one."""
    model = cls(D_IN, HIDDEN)
    twin = copy.deepcopy(model)
    x = torch.randn(D_IN) if cls is nn.GRUCell else torch.randn(6, D_IN)
    runs = []
    for own, given_ in ((model, x), (twin, x[None] if cls is nn.GRUCell else x[:, None])):
        optimizer = KFACSGD(own, lr=0.1, **SETTINGS)
        output = own(given_)
        (output if isinstance(output, Tensor) else output[0]).square().sum().backward()
        optimizer.step()
        runs.append(optimizer)
    assert_same_factors(*runs)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_near(p.detach(), q.detach())


def test_by_default_g_has_a_block_for_each_gate() -> None:
    model = nn.LSTM(D_IN, HIDDEN)
    whole, gates = (FoundLayers([model], LayerOptions(max_factor_dim=most)).layers[0] for most in (None, "auto"))
    assert whole.specs[1].blocks == 1 and gates.specs[1].blocks == 4 and gates.specs[1].size == HIDDEN
    assert "4 gates" in gates.notes[-1]
    assert FoundLayers([model], LayerOptions(max_factor_dim=3)).layers[0].specs[1].size <= 3


def test_the_sampled_fisher_draws_for_it_as_for_the_equations_written_out() -> None:
    model = Reader(nn.LSTM(D_IN, HIDDEN, 2), "sequence")
    assert_trains_as_written_out(model, fisher="gaussian", weight_sharing="reduce")


def test_outputs_are_the_modules_own_and_may_be_changed_in_place() -> None:
    module = nn.LSTM(D_IN, HIDDEN)
    plain, x = copy.deepcopy(module), torch.randn(6, 5, D_IN)
    optimizer = KFACSGD(module, lr=0.1, **SETTINGS)
    runs = [(module, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))]
    for own, _ in runs:
        y, (h, c) = own(x)
        (y.relu_().sum() + h.mul_(2).sum() + c.square_().sum()).backward()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)
    optimizer.step()
    changed = optimizer.curvature.factors(optimizer.curvature.layers[0])
    twin = copy.deepcopy(plain)
    other = KFACSGD(twin, lr=0.1, **SETTINGS)
    y, (h, c) = twin(x)
    (y.relu().sum() + (2 * h).sum() + c.square().sum()).backward()
    other.step()
    for found, expected in zip(changed, other.curvature.factors(other.curvature.layers[0]), strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_lie_in_memory_as_the_modules_own(packed: bool) -> None:
    """Else dropout behind the module would leave out other units in steps with statistics."""
    module = nn.LSTM(D_IN, HIDDEN, 2, batch_first=True, bidirectional=True)
    x: Any = torch.randn(5, 6, D_IN)
    if packed:
        x = pack_padded_sequence(x, torch.tensor([6, 2, 3, 1, 5]), batch_first=True, enforce_sorted=False)
    plain = tensors_of(module(x))
    optimizer = KFACSGD(module, lr=0.1, **SETTINGS)
    watched = tensors_of(module(x))
    assert optimizer.curvature.layers and all(found is not own for found, own in zip(watched, plain, strict=True))
    for found, own in zip(watched, plain, strict=True):
        assert torch.equal(found, own) and found.stride() == own.stride()


def test_micro_batches_make_one_batch() -> None:
    model = Reader(nn.GRU(D_IN, HIDDEN), "final")
    twin = copy.deepcopy(model)
    x, optimizers = torch.randn(6, 8, D_IN), [KFACSGD(own, lr=0.1, **SETTINGS) for own in (model, twin)]
    model(x).square().mean().backward()
    for part in x.split(2, 1):
        (twin(part).square().mean() / 4).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same_factors(*optimizers)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_near(p.detach(), q.detach())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_call_without_examples_adds_nothing(kind: str, sharing: str) -> None:
    model = Reader(recurrent(kind, KINDS[kind], D_IN, HIDDEN, 2), "sequence")
    twin = copy.deepcopy(model)
    optimizers = [KFACSGD(own, lr=0.05, weight_sharing=sharing, **SETTINGS) for own in (model, twin)]
    x = torch.randn(6, 5, D_IN)
    (model(x).square().mean() + model.rnn(x[:, :0])[0].sum()).backward()
    twin(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert_same_factors(*optimizers)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_near(p.detach(), q.detach())


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_holds_a_call_that_the_user_has_let_go(backward: bool) -> None:
    """Neither its input, nor what it has returned; in no cycle either, which would last until a collection."""
    module = nn.LSTM(D_IN, HIDDEN)
    optimizer = KFACSGD(module, lr=0.05, **SETTINGS)
    gc.disable()
    try:
        x = torch.randn(6, 5, D_IN)
        y, state = module(x)
        held = [weakref.ref(tensor) for tensor in (x, y, *state)]
        if backward:
            y.sum().backward()
        del x, y, state
        assert [reference() for reference in held] == [None] * 4
    finally:
        gc.enable()
    assert optimizer.curvature.step_count == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_activation_checkpoint_changes_nothing(reentrant: bool) -> None:
    model = Reader(nn.LSTM(D_IN, HIDDEN, 2, bidirectional=True), "sequence")
    twin = copy.deepcopy(model)
    optimizers = [KFACSGD(own, lr=0.1, **SETTINGS) for own in (model, twin)]
    x = torch.randn(6, 5, D_IN, requires_grad=True)
    model(x).square().mean().backward()
    inner = twin.rnn
    y, _ = checkpoint(inner, x, use_reentrant=reentrant)  # type: ignore[misc]
    twin.head(y.flatten(0, -2)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    for layer, its in zip(*(o.curvature.layers for o in optimizers), strict=True):
        pairs = zip(optimizers[0].curvature.factors(layer), optimizers[1].curvature.factors(its), strict=True)
        for found, expected in pairs if "rnn" in layer.name else ():
            assert_near(found, expected, layer.name)


def test_a_compiled_model_trains_as_an_eager_one() -> None:
    model = Reader(nn.LSTM(D_IN, HIDDEN), "sequence")
    twin = copy.deepcopy(model)
    optimizers = [KFACSGD(own, lr=0.05, **SETTINGS) for own in (model, twin)]
    train(model, optimizers[0])
    train(torch.compile(twin, backend="aot_eager"), optimizers[1])  # type: ignore[arg-type]
    assert_same_factors(*optimizers)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_near(p.detach(), q.detach())


@needs_export_flag
@pytest.mark.parametrize("make", [lambda: nn.LSTM(D_IN, HIDDEN), lambda: nn.GRUCell(D_IN, HIDDEN)])
def test_a_model_that_is_being_trained_can_be_exported_without_a_break_in_the_graph(
    make: Callable[[], nn.Module],
) -> None:
    model, x = nn.ModuleList([make()]), torch.randn(5, D_IN)
    optimizer = KFACSGD(model, lr=0.05, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model[0], (x,), strict=True)
    assert not [node for node in exported.graph.nodes if "kfac" in str(node.target)]
    assert optimizer.curvature.step_count == 0


def test_dropout_between_levels_is_left_out_of_the_factors_alone() -> None:
    """The first level's inputs are what they are; the gradients are torch's."""
    model = Reader(nn.LSTM(D_IN, HIDDEN, 2, dropout=0.5), "sequence")
    optimizer = KFACAdam(model, lr=0.01, **SETTINGS)
    x = torch.randn(6, 5, D_IN)
    model(x).square().mean().backward()
    optimizer.step()
    a, _ = optimizer.curvature.factors(optimizer.curvature.layers[0])
    rows = torch.cat((x.flatten(0, 1), torch.ones(30, 1)), 1)
    assert_near(a[0], rows.T @ rows / 30)
    train(model, optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


class Own(nn.LSTM):
    def forward(self, *args: Any) -> Any:  # type: ignore[override]
        return super().forward(*args)


DECLINED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "projections": (lambda: nn.LSTM(D_IN, HIDDEN, proj_size=2), "projections"),
    "a forward of its own": (lambda: Own(D_IN, HIDDEN), "overrides LSTM.forward"),
    "weight norm": (lambda: parametrizations.weight_norm(nn.GRU(D_IN, HIDDEN), "weight_hh_l0"), "weight_hh_l0 is"),
    "pruned": (lambda: prune.l1_unstructured(nn.RNN(D_IN, HIDDEN), "weight_ih_l0", 0.5), "weight_ih_l0 is"),
}


@pytest.mark.parametrize("why", DECLINED)
def test_what_is_declined_trains_by_the_base_rule(why: str) -> None:
    make, reason = DECLINED[why]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.ModuleList([make()]))
    model, twin = models
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [(model, KFACSGD(model, lr=0.1)), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))]
        assert reason in str(runs[0][1].curvature)
        for own, optimizer in runs:
            for x in torch.ones(3, 4, 2, D_IN).unbind():
                optimizer.zero_grad()
                own[0](x)[0].square().sum().backward()
                optimizer.step()
    assert_identical(model, twin)


def test_a_weight_that_two_levels_share_is_declined() -> None:
    model = Reader(nn.LSTM(HIDDEN, HIDDEN, 2), "sequence")
    model.rnn.weight_hh_l1, model.rnn.bias_hh_l1 = model.rnn.weight_hh_l0, model.rnn.bias_hh_l0
    optimizer = KFACSGD(model, lr=0.05, **SETTINGS)
    assert {layer.name for layer in optimizer.curvature.layers} == {"rnn.ih_l0", "rnn.ih_l1", "head"}
    assert "weight shared by rnn.hh_l0 (Recurrent, expand) and rnn.hh_l1" in str(optimizer.curvature)


def test_skipped_and_frozen_weights_are_left_alone() -> None:
    model = Reader(nn.LSTM(D_IN, HIDDEN, 2), "sequence")
    model.rnn.weight_hh_l1.requires_grad_(False)
    optimizer = KFACSGD(model, lr=0.05, skip_layers=["ih_l1"], **SETTINGS)
    before = model.rnn.weight_hh_l1.clone()
    train(model, optimizer)
    assert set(optimizer.curvature.report()["layers"]) == {"rnn.ih_l0", "rnn.hh_l0", "head"}
    assert torch.equal(before, model.rnn.weight_hh_l1)


def test_packed_sequences_have_no_mean_over_positions() -> None:
    """With "reduce" they are not seen, and train by the base rule."""
    model = Reader(nn.GRU(D_IN, HIDDEN), "sequence", torch.tensor([6, 2, 3, 1, 5]))
    optimizer = KFACSGD(model, lr=0.05, weight_sharing="reduce", **SETTINGS)
    with pytest.warns(UserWarning, match="never seen"):
        train(model, optimizer)
    assert set(optimizer.curvature.report()["layers"]) == {"head"}


def test_reach_stays_low_where_cells_saturate() -> None:
    torch.manual_seed(0)
    model = Reader(nn.LSTM(D_IN, HIDDEN), "final")
    optimizer = KFACSGD(model, lr=0.01, momentum=0.9, scaling=Graft())
    train(model, optimizer, batches=60)
    reaches = {name: row["reach"] for name, row in optimizer.curvature.report()["layers"].items()}
    assert reaches["head"] > 0.05 and max(reaches["rnn.ih_l0"], reaches["rnn.hh_l0"]) == pytest.approx(0.05)


def test_inside_a_transform_it_is_not_seen_and_the_step_says_so() -> None:
    model = Reader(nn.LSTM(D_IN, HIDDEN), "final")
    optimizer = KFACSGD(model, lr=0.05, **SETTINGS)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (torch.randn(6, 5, D_IN),)).square().mean()

    gradients = torch.func.grad(loss)(parameters)
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    with pytest.raises(RuntimeError, match="none of its layers was seen"):
        optimizer.step()
