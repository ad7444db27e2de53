"""What is told to users whose parameters have no layer, and whose arguments do not belong together."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kfac_optim import KFACSGD, Categorical, CurvatureEngine, KFACAdam, LayerOptions, register_layer
from kfac_optim.layers import LinearLayer, RowsLayer
from tests.helpers.training import train

OFTEN = {"factor_update_steps": 1, "inv_update_steps": 2}


def reasons_of(optimizer: KFACSGD | KFACAdam) -> dict[str, str]:
    """Why parameters have no layer, by their names."""
    return dict(optimizer.curvature.stages.trained.uncovered.values())


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
@pytest.mark.parametrize("cls", [KFACSGD, KFACAdam])
def test_an_empty_weight_is_declined_and_trains_as_before(shape: tuple[int, int], cls: type) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.empty = nn.Linear(*shape)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).sum() + self.empty(x[:, : shape[0]]).sum()

    model = Model()
    before = copy.deepcopy(model)
    optimizer = cls(model, lr=0.1, **OFTEN)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).backward()
        optimizer.step()
    assert reasons_of(optimizer)["empty.weight"] == "the weight is empty"
    assert [layer.name for layer in optimizer.curvature.layers] == ["fc"]
    assert not torch.equal(model.fc.weight, before.fc.weight)
    assert shape[1] == 0 or not torch.equal(model.empty.bias, before.empty.bias)


def test_complex_weights_are_declined() -> None:
    optimizer = KFACSGD(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, dtype=torch.complex64)), lr=0.1)
    assert [layer.name for layer in optimizer.curvature.layers] == ["0"]
    assert reasons_of(optimizer)["1.weight"] == "complex parameters"


def test_a_convolution_of_other_weights_than_its_own_is_declined() -> None:
    """Whose gradient is no product with patches; ``forward`` is as it was."""

    class Standardised(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
            return super()._conv_forward(input, weight, bias)

    model = nn.Sequential(nn.Conv2d(2, 3, 3), Standardised(3, 4, 3))
    optimizer = KFACSGD(model, lr=0.1)
    assert [layer.name for layer in optimizer.curvature.layers] == ["0"]
    assert "Standardised overrides Conv2d._conv_forward" in reasons_of(optimizer)["1.weight"]


def test_parameters_that_no_module_owns_train_by_the_base_rule() -> None:
    log_alpha, twin = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    with pytest.warns(UserWarning, match=r"no module was found.*base rule.*model=") as warned:
        first = KFACAdam([log_alpha], lr=0.1)
    assert len(warned) == 1
    second = torch.optim.Adam([twin], lr=0.1)
    for _ in range(4):
        for p, optimizer in ((log_alpha, first), (twin, second)):
            optimizer.zero_grad()
            (p.exp() * 3 + p).sum().backward()
            optimizer.step()
    assert torch.equal(log_alpha, twin) and not torch.equal(log_alpha, torch.zeros(1))
    assert "no module of the model owns it" in repr(first.curvature)
    state = first.state_dict()
    first.load_state_dict(state)
    copy.deepcopy(first)


class GraphConvolution(nn.Module):
    """A layer whose parameters are its own, as graph networks have them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


def test_a_model_without_any_layer_that_is_preconditioned_is_told_so_once() -> None:
    model = nn.Sequential(GraphConvolution(), nn.ReLU())
    with pytest.warns(UserWarning, match=r"none of the optimizer's parameters.*GraphConvolution.*curvature") as warned:
        optimizer = KFACAdam(model, lr=0.1)
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFACAdam(nn.Sequential(GraphConvolution(), nn.Linear(3, 2)), lr=0.1)
        KFACAdam(nn.Linear(3, 2), lr=0.1, skip_layers=[""])  # on purpose


def test_a_model_is_told_so_where_only_frozen_layers_could_be_preconditioned() -> None:
    """As with low-rank adapters that are parameters of layers with a forward of their own."""
    model = nn.Sequential(nn.Linear(4, 4), GraphConvolution())
    model[0].requires_grad_(requires_grad=False)
    told = r"none of the optimizer's parameters.*: all layers .* are frozen; no .* rule for [\w.]*GraphConvolution\. "
    for given in (model, model.parameters()):
        with pytest.warns(UserWarning, match=told):
            KFACAdam(given, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFACAdam(nn.Linear(4, 4).requires_grad_(requires_grad=False), lr=0.1)  # to be unfrozen later
        KFACAdam(nn.Sequential(model[0], nn.Linear(4, 2)), lr=0.1)


def test_weights_that_are_kept_apart_from_their_layers_ask_for_the_model() -> None:
    """So do the loss modules of torchrl."""
    net, kept = nn.Linear(3, 2), nn.Module()
    for name, parameter in net.named_parameters():
        kept.register_parameter(name, parameter)
    with pytest.warns(UserWarning, match="pass the model as model="):
        assert not KFACSGD(kept.parameters(), lr=0.1).curvature.layers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = KFACSGD(kept.parameters(), lr=0.1, model=net)
    assert [layer.weight for layer in optimizer.curvature.layers] == [kept.weight]
    with pytest.warns(UserWarning, match=r"adds a rule$"):
        KFACSGD(kept, lr=0.1)


def test_projections_of_attention_are_skipped_by_the_names_that_the_table_gives_them() -> None:
    def names(*patterns: str) -> list[str]:
        optimizer = KFACAdam(nn.TransformerEncoderLayer(8, 2), lr=0.1, skip_layers=patterns)
        return [layer.name for layer in optimizer.curvature.layers]

    everything = names()
    assert {"self_attn.in_proj", "self_attn.out_proj"} <= set(everything)
    assert names("in_proj") == [name for name in everything if name != "self_attn.in_proj"]
    assert names(r"attn\.out_proj$") == [name for name in everything if name != "self_attn.out_proj"]


def test_the_table_counts_one_layer_and_one_parameter_in_the_singular() -> None:
    table = repr(KFACAdam(nn.Sequential(GraphConvolution(), nn.Linear(3, 2)), lr=0.1).curvature)
    assert table.splitlines()[-1].startswith("1 layer preconditioned, 1 parameter by the base rule, ")


def test_a_model_that_owns_none_of_the_parameters_is_refused_at_construction() -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"model=Linear.*owns none of the 2 parameters"):
        KFACSGD(model.parameters(), model=other, lr=0.1)
    with pytest.raises(ValueError, match=r"model=Linear.*owns none of the 2 parameters"):
        CurvatureEngine(other, model.parameters())


def test_a_bias_whose_weight_another_optimizer_trains_is_not_called_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.MultiheadAttention(3, 1))
    model[1].bias.requires_grad_(False)
    weights = KFACSGD([p for p in model.parameters() if p.dim() > 1], model=model, lr=0.1)
    biases = KFACSGD([p for p in model.parameters() if p.dim() == 1], model=model, lr=0.1)
    assert not weights.curvature.stages.trained.uncovered
    text = "the weight of its layer is not among the optimizer's parameters"
    assert reasons_of(biases) == {
        "0.bias": text,
        "1.bias": "frozen when the optimizer was built",
        "2.in_proj_bias": text,
        "2.out_proj.bias": text,
    }


def test_several_roots_have_names_that_tell_them_apart() -> None:
    first, second, third = nn.Linear(4, 3), nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2))
    optimizer = KFACSGD([p for m in (first, second, third) for p in m.parameters()], lr=0.1)
    assert [layer.name for layer in optimizer.curvature.layers] == ["Linear-1", "Linear-2", "Sequential.0"]
    assert "(model)" not in repr(optimizer.curvature)
    alone = KFACSGD([*third.parameters()], lr=0.1)
    assert [layer.name for layer in alone.curvature.layers] == ["0"]


def test_repr_of_an_optimizer_shows_no_counters() -> None:
    model = nn.Linear(4, 3)
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9)
    text = repr(optimizer)
    assert "kfac_" not in text and "lr: 0.1" in text and "momentum: 0.9" in text
    assert text.startswith("KFACSGD (") and text.endswith(")")


# A loss that does not fit the sampled Fisher's distribution ---------------------------------------------------------


LOSSES = {
    "cross entropy": lambda out, y: F.cross_entropy(out, y),
    "smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1, reduction="sum"),
    "squared error": lambda out, y: F.mse_loss(out, F.one_hot(y, out.shape[1]).to(out)),
    "binary": lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, out.shape[1]).to(out)),
}
FITS = {
    "categorical": {"cross entropy", "smoothed"},
    "bernoulli": {"binary", "squared error"},  # that one cannot be told apart
    "gaussian": {"binary", "squared error"},
    "empirical": set(LOSSES),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("fisher", FITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_does_not_fit_the_distribution_warns_once(fisher: str, loss: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = KFACSGD(model, lr=0.01, fisher=fisher, **OFTEN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            out = model(torch.randn(16, 4)).to(dtype)
            LOSSES[loss](out, torch.randint(5, (16,))).backward()
            optimizer.step()
    texts = [str(w.message) for w in caught]
    if loss in FITS[fisher]:
        assert not texts
    else:
        assert len(texts) == 1 and f"fisher='{fisher}'" in texts[0], texts


def test_the_check_of_the_loss_knows_the_dimension_of_the_classes_and_loss_scales() -> None:
    model = nn.Conv2d(1, 5, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = KFACSGD(model, lr=0.01, fisher=Categorical(dim=1), grad_scaler=scaler, **OFTEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(F.cross_entropy(model(torch.randn(4, 1, 3, 3)), torch.randint(5, (4, 3, 3)))).backward()
        scaler.step(optimizer)


def test_a_dimension_of_the_classes_that_the_output_lacks_is_named() -> None:
    model = nn.Linear(4, 3)
    optimizer = KFACSGD(model, lr=0.1, fisher=Categorical(dim=2))
    with pytest.raises(ValueError, match=r"Categorical\(dim=2\): the model's output \[5, 3\] has no such dimension"):
        optimizer.step(lambda: model(torch.randn(5, 4)))


@pytest.mark.parametrize("output_fn", [lambda output: None, lambda output: output.detach()])
def test_an_output_that_the_loss_is_not_taken_of_is_among_the_causes(output_fn: Any) -> None:
    model = nn.Linear(4, 3)
    optimizer = KFACSGD(model, lr=0.1, fisher=Categorical(output_fn=output_fn))
    with pytest.raises(RuntimeError, match="output_fn of a sampled fisher has to return the very tensor"):
        F.cross_entropy(model(torch.randn(5, 4)), torch.zeros(5, dtype=torch.long)).backward()
        optimizer.step()


def test_a_layer_type_that_lacks_a_part_is_refused_by_its_name() -> None:
    class Half(RowsLayer):
        """Rows, but no matrices."""

        def structure(self, module: nn.Module) -> tuple[int, int, int]:
            return 1, 3, 4

        def input_rows(self, module: nn.Module, a: Tensor, output: Tensor) -> Iterable[Tensor]:
            yield a[:, None, None]

        def output_rows(self, module: nn.Module, g: Tensor, context: object) -> Tensor:
            return g[:, None, None]

    with pytest.raises(TypeError, match="Half.*matrix_to_weight"):
        Half("half", nn.Linear(4, 3), LayerOptions())  # type: ignore[abstract]


@pytest.mark.parametrize(
    "computed",
    [
        lambda m: 2 * m[0],
        lambda m: -m[0],
        lambda m: m[0] + m[0].flip(0),
        lambda m: 0.75 * m[0] + 0.25 * m[0].flip(1),
        lambda m: torch.zeros_like(m[0]),
        lambda m: m[0, :1].repeat(3, 1),
    ],
)
def test_a_layer_type_that_computes_with_the_entries_of_its_matrix_is_refused(computed: Any) -> None:
    """One that reorders them is not, as transposed convolutions show."""

    class Own(nn.Linear):
        """With a layer type of its own."""

    class OwnLayer(LinearLayer):
        """Computes its weight."""

        def matrix_to_weight(self, matrix: Tensor) -> Tensor:
            found: Tensor = computed(matrix)
            return found

    register_layer(Own)(OwnLayer)
    with pytest.raises(TypeError, match=r"OwnLayer\.from_matrix\(\).*matrix_to_weight\(\): must return entries"):
        KFACSGD(Own(4, 3), lr=0.1)


def test_parameters_beside_a_layer_are_not_called_frozen() -> None:
    model = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    curvature = KFACSGD(model, lr=0.1).curvature
    assert dict(curvature.stages.trained.uncovered.values()) == dict.fromkeys(
        ("bias_k", "bias_v"), "neither weight nor bias of a layer"
    )
    assert [layer.name for layer in curvature.layers] == ["in_proj", "out_proj"]


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(2, 4))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_of_torch_jit_train_by_the_base_rule(make: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = KFACSGD(model.parameters(), lr=0.1)
    assert [layer.weight for layer in optimizer.curvature.layers] == [model[2].weight]
    assert "torch.jit" in str(optimizer.curvature)
    train(model, optimizer, range(2))
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_is_traced_after_the_optimizer_was_built_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = KFACSGD(model, lr=0.1)
    traced = torch.jit.trace(model, torch.randn(2, 20))
    with pytest.raises(RuntimeError, match="torch.jit has traced.*train the model that it was traced from"):
        for _ in range(4):
            optimizer.zero_grad()
            traced(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()


def test_what_was_exported_from_the_model_cannot_be_trained_by_its_optimizer() -> None:
    model, x = nn.Sequential(nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(8, 20)
    exported = torch.export.export(model, (x,)).module()
    optimizer = KFACSGD(model, lr=0.1)
    with pytest.raises(RuntimeError, match="torch.export has exported calls no hooks: train the model"):
        for _ in range(4):
            optimizer.zero_grad()
            exported(x).square().mean().backward()
            optimizer.step()


def test_a_pattern_of_skip_layers_that_matches_nothing_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.MultiheadAttention(6, 2))
    with pytest.warns(UserWarning, match=r"skip_layers: 'hed' matches the name of no layer"):
        KFACSGD(model, lr=0.1, skip_layers=["hed"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFACSGD(model, lr=0.1, skip_layers=["^0$", "in_proj"])


class Unseen(nn.Module):
    """The second layer's weight is used without its call; the third one's also beside its call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(self.layers[0](x), self.layers[1].weight)
        return F.linear(self.layers[2](hidden), self.layers[2].weight)


def test_warnings_point_to_the_line_that_led_to_them() -> None:
    """To the one that builds the optimizer, calls the model or takes the step, and not to one of this package."""
    model = Unseen()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        KFACAdam([nn.Parameter(torch.ones(2))], lr=0.1)
        optimizer = KFACSGD(model, lr=0.1, skip_layers=["nothing"], **OFTEN)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert {w.filename for w in caught} == {__file__}
    lines = Path(__file__).read_text().splitlines()
    pointed = {lines[w.lineno - 1].strip().partition("(")[0] for w in caught}
    assert pointed == {"KFACAdam", "optimizer = KFACSGD", "model", "optimizer.step"}
