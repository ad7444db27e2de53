"""Classes with a ``forward`` of their own: covered if they compute what a known layer does, and else declined."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfac_optim import KFACSGD, CurvatureEngine
from kfac_optim.layers import registry
from tests.helpers.compare import assert_same_factors, assert_same_weights, assert_step_alike
from tests.helpers.settings import SETTINGS

OFTEN = {"factor_update_steps": 1, "inv_update_steps": 2, "factor_dtype": torch.float64, "inv_dtype": torch.float64}


class NanoGPTLayerNorm(nn.Module):
    def __init__(self, ndim: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class ConvNeXtLayerNorm(nn.Module):
    def __init__(self, normalized_shape: int, data_format: str = "channels_last", eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps, self.data_format, self.normalized_shape = eps, data_format, (normalized_shape,)

    def forward(self, x: Tensor) -> Tensor:
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class CLIPLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.type(torch.float32)).type(x.dtype)


class GroupNorm32(nn.GroupNorm):
    """As in openai/improved-diffusion."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class SwishedGroupNorm(nn.GroupNorm):
    """As in openai/glide-text2im."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x.float()).to(x.dtype))


class ChannelsLastNorm(nn.GroupNorm):
    """No group norm: its channels come last."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.num_channels,), self.weight, self.bias, self.eps)


class CastingLinear(nn.Linear):
    """As in modded-nanogpt."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x), None if self.bias is None else self.bias.type_as(x))


class Transposed(nn.Module):
    def __init__(self, d_in: int = 6, d_out: int = 4) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d_in, d_out)), nn.Parameter(torch.zeros(d_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)


class OtherEps(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 3e-4) * self.weight


class EpsOutside(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon) * self.weight


class AffineInEval(NanoGPTLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None, None) if self.training else (self.weight, self.bias)
        return F.layer_norm(x, self.weight.shape, weight, bias, 1e-5)


class Detached(NanoGPTLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight.detach() * 0.5 + self.weight * 0.5, self.bias, 1e-5)


class Dropping(NanoGPTLayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class WithResidual(NanoGPTLayerNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x if residual is None else x + residual)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * 1.01


class Buffered(CastingLinear):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class OverImages(ConvNeXtLayerNorm):
    """Right for three dimensions, but over the first of four."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.dim() < 4 else 2 * y


class EmbeddingOrHead(nn.Embedding):
    """Compared with numbers alone it is a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


class Pair(NanoGPTLayerNorm):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


def llama(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        pytest.importorskip("transformers")
        from transformers.models.llama.modeling_llama import LlamaRMSNorm as Llama
        from transformers.models.t5.modeling_t5 import T5LayerNorm

        return Llama(6, eps=1e-5) if kind == "llama" else T5LayerNorm(6, eps=1e-6)

    return make


def filled(weight: nn.Module, other: nn.Module) -> nn.Module:
    """The other module with the same parameters."""
    other.load_state_dict(weight.state_dict())
    return other


SAME: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "nanoGPT": (lambda: NanoGPTLayerNorm(6), lambda: nn.LayerNorm(6), "as nn.LayerNorm"),
    "nanoGPT, no bias": (lambda: NanoGPTLayerNorm(6, False), lambda: nn.LayerNorm(6, bias=False), "as nn.LayerNorm"),
    "ConvNeXt": (lambda: ConvNeXtLayerNorm(6), lambda: nn.LayerNorm(6, eps=1e-6), "as nn.LayerNorm"),
    "Llama": (lambda: LlamaRMSNorm(6), lambda: nn.RMSNorm(6, eps=1e-6), "as nn.RMSNorm"),
    "transformers' Llama": (llama("llama"), lambda: nn.RMSNorm(6, eps=1e-5), "as nn.RMSNorm"),
    "transformers' T5": (llama("t5"), lambda: nn.RMSNorm(6, eps=1e-6), "as nn.RMSNorm"),
    "CLIP": (lambda: CLIPLayerNorm(6), lambda: nn.LayerNorm(6), "as nn.LayerNorm"),
    "of group norm's class": (lambda: ChannelsLastNorm(1, 6), lambda: nn.LayerNorm(6), "as nn.LayerNorm"),
    "modded-nanogpt": (lambda: CastingLinear(6, 4), lambda: nn.Linear(6, 4), "as nn.Linear"),
    "transposed": (Transposed, Transposed, "as nn.Linear, transposed"),
}
OTHER: dict[str, Callable[[], nn.Module]] = {
    "Gemma": lambda: GemmaRMSNorm(6),
    "other eps": lambda: OtherEps(6),
    "eps outside": lambda: EpsOutside(6),
    "affine in eval mode": lambda: AffineInEval(6),
    "half a gradient": lambda: Detached(6),
    "dropout": lambda: Dropping(6),
    "a second argument": lambda: WithResidual(6),
    "other in four dimensions": lambda: OverImages(6),
    "indices or features": lambda: EmbeddingOrHead(6, 4),
    "two outputs": lambda: Pair(6),
    "GLIDE": lambda: SwishedGroupNorm(3, 6),
}


@pytest.mark.parametrize("name", SAME)
def test_what_computes_the_same_has_the_same_curvature(name: str) -> None:
    make, reference, note = SAME[name]
    own = make()
    plain = filled(own, reference())
    models = [nn.Sequential(nn.Linear(5, 6), part, nn.Tanh()) for part in (own, plain)]
    models[1][0].load_state_dict(models[0][0].state_dict())
    optimizers = [KFACSGD(model, lr=0.05, **OFTEN) for model in models]
    assert f"; {note}" in repr(optimizers[0].curvature).replace("  as nn", "; as nn")
    for _ in range(4):
        x = torch.randn(8, 3, 5)
        losses = [model(x).square().mean() for model in models]
        assert_step_alike(*zip(models, optimizers, losses, strict=True), rel=1e-4)


@pytest.mark.parametrize("name", OTHER)
def test_what_computes_something_else_is_declined(name: str) -> None:
    engine = CurvatureEngine(OTHER[name]())
    assert not engine.layers
    assert any("test_lookalikes." in reason for _, reason in engine.stages.trained.uncovered.values())


@pytest.mark.parametrize("kind", [Scaled, Buffered])
def test_what_is_around_a_known_function_makes_another_layer(kind: type[nn.Linear]) -> None:
    """It has the factors of that function's call (test_own_forward.py)."""
    assert " at F.linear in " in repr(CurvatureEngine(kind(6, 4)))


def test_a_large_weight_is_not_compared() -> None:
    """Unless a small stand-in can be."""
    model = nn.Sequential(Transposed(2048, 2049), CastingLinear(2048, 2049))
    assert [layer.name for layer in CurvatureEngine(model).layers] == ["1"]


class Sine(nn.Module):
    """Its forward has no signature that could be looked at."""

    forward = staticmethod(torch.sin)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def test_a_forward_without_a_signature_is_declined() -> None:
    engine = CurvatureEngine(nn.Sequential(nn.Linear(3, 3), Sine()))
    assert [layer.name for layer in engine.layers] == ["0"]


def test_a_layer_norm_over_channels_in_front_equals_one_behind_a_transposition() -> None:
    images, last = ConvNeXtLayerNorm(6, "channels_first"), nn.LayerNorm(6, eps=1e-6)
    engines = CurvatureEngine(images, **OFTEN), CurvatureEngine(last, **OFTEN)
    assert "as nn.LayerNorm, channels first" in repr(engines[0])
    x, weight = torch.randn(4, 6, 5, 3), torch.randn(4, 6, 5, 3)
    (images(x) * weight).sum().backward()
    (last(x.movedim(1, -1)) * weight.movedim(1, -1)).sum().backward()
    for engine in engines:
        engine.precondition_(lr=0.1)
    for p, q in zip(images.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 6, 5, 3)])
def test_a_group_norm_that_casts_equals_one_that_does_not(shape: tuple[int, ...]) -> None:
    casting, plain = GroupNorm32(3, 6, eps=1e-3), nn.GroupNorm(3, 6, eps=1e-3)
    engines = CurvatureEngine(casting, **OFTEN), CurvatureEngine(plain, **OFTEN)
    assert "as nn.GroupNorm" in repr(engines[0])
    x, weight = torch.randn(shape), torch.randn(shape)
    for norm, engine in zip((casting, plain), engines, strict=True):
        (norm(x) * weight).sum().backward()
        engine.precondition_(lr=0.1)
    for p, q in zip(casting.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


class OnDefaultDevice(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return x * (x.square().mean(-1, keepdim=True) + torch.tensor(self.eps)).rsqrt() * self.weight


def test_comparing_does_not_depend_on_the_default_device() -> None:
    model = nn.Sequential(nn.Linear(3, 4), OnDefaultDevice(4, eps=1e-6))
    with torch.device("meta"):
        assert len(KFACSGD(model, lr=0.1).curvature.layers) == 2


def test_comparing_leaves_no_trace() -> None:
    """No hook fires, no random number is drawn, nothing of the module changes, and nobody is warned."""
    model = nn.Sequential(CastingLinear(6, 4), Dropping(4), NanoGPTLayerNorm(4)).eval()
    before, fired = copy.deepcopy(model.state_dict()), []
    for module in model:
        module.register_forward_hook(lambda *_: fired.append(1))
    state = torch.get_rng_state()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        engine = CurvatureEngine(model)
    assert torch.equal(state, torch.get_rng_state()) and not fired
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters()) and not any(m.training for m in model)
    assert [layer.name for layer in engine.layers] == ["0", "2"]


def test_layers_that_are_watched_already_are_recognised_again() -> None:
    """By another optimizer, and by the same one when it has got more parameters."""
    model = nn.Sequential(nn.Linear(5, 6), LlamaRMSNorm(6), NanoGPTLayerNorm(6), nn.Linear(6, 4))
    optimizer = KFACSGD(model[:3].parameters(), lr=0.1, model=model)
    again = KFACSGD(model, lr=0.1)
    assert [layer.name for layer in again.curvature.layers] == ["0", "1", "2", "3"]
    optimizer.add_param_group({"params": list(model[3].parameters())})
    assert [layer.name for layer in optimizer.curvature.layers] == ["0", "1", "2", "3"]


def test_modules_that_are_compiled_in_place_are_recognised() -> None:
    model = nn.Sequential(CastingLinear(5, 6), LlamaRMSNorm(6), NanoGPTLayerNorm(6), nn.Linear(6, 4)).double()
    twin = copy.deepcopy(model)
    for part in twin:
        part.compile(backend="aot_eager")
    optimizers = [KFACSGD(own, lr=0.1, **SETTINGS) for own in (model, twin)]
    for x in torch.randn(4, 7, 5, dtype=torch.float64):
        for own, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
    assert len(optimizers[1].curvature.layers) == 4
    assert_same_factors(*optimizers)
    assert_same_weights(model, twin)


def test_a_class_without_a_rule_is_named_with_its_module() -> None:
    engine = CurvatureEngine(nn.Sequential(nn.Linear(6, 6), GemmaRMSNorm(6)))
    (reason,) = {reason for _, reason in engine.stages.trained.uncovered.values()}
    assert reason == f"no Kronecker rule for {__name__}.GemmaRMSNorm"


def test_a_forward_that_was_replaced_on_one_module_is_declined() -> None:
    """What its class computes says nothing then; another module of the class is covered."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4), nn.Conv1d(4, 2, 1))
    patched, own = model[0], model[2]
    patched.forward = lambda x: F.linear(x, 0.1 * patched.weight, patched.bias)
    own.forward = functools.wraps(own.forward)(lambda x: type(own).forward(own, x))  # as accelerate's hooks do
    model[3]._conv_forward = lambda x, weight, bias: F.conv1d(x, 2 * weight, bias)
    optimizer = KFACSGD(model, lr=0.1)
    assert [layer.name for layer in optimizer.curvature.layers] == ["2"]
    assert "forward was replaced on this Linear alone" in repr(optimizer.curvature)
    assert "_conv_forward was replaced on this Conv1d alone" in repr(optimizer.curvature)


class Choosing(nn.Module):
    """Chooses among its own methods; to its class's rule that is the class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.zeros(4))
        self.forward = self.fast

    def fast(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(x)


def test_a_registered_class_may_choose_its_forward_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._FACTORIES, Choosing, registry._FACTORIES[nn.Linear])
    assert [layer.name for layer in KFACSGD(nn.Sequential(Choosing()), lr=0.1).curvature.layers] == ["0"]
