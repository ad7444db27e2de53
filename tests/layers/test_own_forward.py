"""Linear layers and convolutions with a ``forward`` of their own: what torch's function sees of them is their layer.

Each form that is public in several repositories is compared with the same network made of plain layers, in which pads,
crops and norms are modules of their own.
"""

from __future__ import annotations

import copy
import io
import math
import random
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from kfac_optim import KFAC, KFACSGD, Categorical, CurvatureEngine
from kfac_optim.layers import OwnForwardConvLayer, registry
from tests.helpers.compare import assert_all_near, assert_identical, assert_near, factors_of, values
from tests.helpers.ranks import run_ranks
from tests.helpers.settings import FLOAT64, OPTIONS
from tests.helpers.versions import needs_sharding_on_cpus, needs_traced_function_modes

pytestmark = pytest.mark.usefixtures("float64")

SAME = 1e-12


# The forms -----------------------------------------------------------------------------------------------------------


class CausalConv1d(nn.Conv1d):
    """Zeros in front of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


class CroppedConv1d(nn.Conv1d):
    """Zeros on both sides, and the end cut off."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., : -self.padding[0]]


class SameConv2d(nn.Conv2d):
    """TensorFlow's "same": as many zeros as the input's size needs."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for size, k, s, d in zip(x.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True):
            zeros = max((math.ceil(size / s) - 1) * s + (k - 1) * d + 1 - size, 0)
            pads[:0] = [zeros // 2, zeros - zeros // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class StaticSameConv2d(nn.Conv2d):
    """The zeros are those of one image size, in a submodule."""

    def __init__(self, *args: Any, pads: tuple[int, int, int, int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.static_padding = nn.ZeroPad2d(pads)

    def forward(self, x: Tensor) -> Tensor:
        x = self.static_padding(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NormedConv2d(nn.Conv2d):
    """A norm and an activation inside, as in detectron2."""

    def __init__(self, *args: Any, norm: nn.Module, activation: Callable[[Tensor], Tensor], **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return self.activation(self.norm(x))


class InflatedConv(nn.Conv2d):
    """Frames of a video are examples."""

    def forward(self, video: Tensor) -> Tensor:
        batch, channels, frames, *size = video.shape
        y = super().forward(video.transpose(1, 2).reshape(batch * frames, channels, *size))
        return y.unflatten(0, (batch, frames)).transpose(1, 2)


class GatedConv1d(nn.Conv1d):
    """Half of the channels gate the other half, with a residual."""

    def forward(self, x: Tensor) -> Tensor:
        y, gate = super().forward(F.pad(x, (2, 0))).chunk(2, dim=1)
        return (y + x) * torch.sigmoid(gate)


class ChannelsLastConv1d(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class OtherOptions(nn.Conv2d):
    """The options of the call are not those of the module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding="same", dilation=[2, 1], groups=self.groups)


class CircularConv1d(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class TwoWays(nn.Conv1d):
    """Forwards and backwards through time with one weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.flip(-1)).flip(-1)


class PixelLinear(nn.Linear):
    """Channels come second."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ResidualLinear(nn.Linear):
    def forward(self, x: Tensor, scale: float = 0.5) -> Tensor:
        return x + scale * F.linear(input=x, weight=self.weight, bias=self.bias)


class Chunked(nn.Linear):
    """Calls itself for a few examples at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self(part) for part in x.split(4)]) if len(x) > 4 else 2 * super().forward(x)


class Nested(nn.Conv1d):
    """Another layer of this kind runs inside, before its own function."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inner = CausalConv1d(self.in_channels, self.in_channels, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.inner(x)))


class Plain(nn.Module):
    """Plain layers, and what is around them; the parameters have the names of the form's."""

    def __init__(self, layer: nn.Module, call: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.layer, self.call, self.parts = layer, call, nn.ModuleDict(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x, *self.parts.values())


def pixels_of(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def gated(layer: nn.Module, x: Tensor) -> Tensor:
    y, gate = layer(F.pad(x, (2, 0))).chunk(2, dim=1)
    return (y + x) * torch.sigmoid(gate)


def frames_of(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


def padded(*pads: int) -> Callable[..., Tensor]:
    return lambda layer, x: layer(F.pad(x, pads))


@dataclass
class Form:
    """A subclass, the plain network that computes the same, and the shape of its input."""

    own: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def models(self) -> tuple[nn.Module, nn.Module]:
        """Both with an activation behind and a head, and with the same parameters."""
        torch.manual_seed(0)
        own, plain = self.own(), self.plain()
        x = torch.zeros(self.shape)
        head = nn.Linear(own(x).flatten(1).shape[1], 3)
        models = [nn.Sequential(m, nn.Tanh(), nn.Flatten(), h) for m, h in ((own, head), (plain, copy.deepcopy(head)))]
        with torch.no_grad():
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                q.copy_(p)
            for model in models:
                for part in model.modules():
                    if isinstance(part, nn.BatchNorm2d):
                        part.reset_running_stats()
        return models[0], models[1]


FORMS = {
    "causal": Form(
        lambda: CausalConv1d(2, 3, 3, dilation=2),
        lambda: Plain(nn.Conv1d(2, 3, 3, dilation=2), padded(4, 0)),
        (6, 2, 9),
    ),
    "cropped": Form(
        lambda: CroppedConv1d(2, 3, 3, padding=2),
        lambda: Plain(nn.Conv1d(2, 3, 3, padding=2), lambda layer, x: layer(x)[..., :-2]),
        (6, 2, 9),
    ),
    "same": Form(
        lambda: SameConv2d(2, 3, 3, stride=2, bias=False),
        lambda: Plain(nn.Conv2d(2, 3, 3, stride=2, bias=False), padded(0, 1, 1, 1)),
        (6, 2, 7, 8),
    ),
    "same, depthwise": Form(
        lambda: SameConv2d(4, 4, 3, stride=2, groups=4),
        lambda: Plain(nn.Conv2d(4, 4, 3, stride=2, groups=4), padded(1, 1, 0, 1)),
        (6, 4, 6, 5),
    ),
    "static same": Form(
        lambda: StaticSameConv2d(2, 3, 3, stride=2, pads=(0, 1, 0, 1)),
        lambda: Plain(nn.Conv2d(2, 3, 3, stride=2), padded(0, 1, 0, 1)),
        (6, 2, 6, 6),
    ),
    "norm inside": Form(
        lambda: NormedConv2d(2, 3, 3, norm=nn.BatchNorm2d(3), activation=F.relu_, bias=False),
        lambda: Plain(
            nn.Conv2d(2, 3, 3, bias=False), lambda layer, x, norm: F.relu_(norm(layer(x))), norm=nn.BatchNorm2d(3)
        ),
        (6, 2, 5, 5),
    ),
    "inflated": Form(
        lambda: InflatedConv(2, 3, 3, padding=1),
        lambda: Plain(nn.Conv2d(2, 3, 3, padding=1), frames_of),
        (4, 2, 3, 5, 5),
    ),
    "gated": Form(lambda: GatedConv1d(3, 6, 3), lambda: Plain(nn.Conv1d(3, 6, 3), gated), (6, 3, 7)),
    "channels last": Form(
        lambda: ChannelsLastConv1d(2, 3, 3),
        lambda: Plain(nn.Conv1d(2, 3, 3), lambda layer, x: layer(x.transpose(1, 2)).transpose(1, 2)),
        (6, 7, 2),
    ),
    "other options": Form(
        lambda: OtherOptions(2, 3, (3, 2), stride=2),
        lambda: Plain(nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(2, 1)), lambda layer, x: layer(x)),
        (6, 2, 5, 4),
    ),
    "circular": Form(
        lambda: CircularConv1d(2, 3, 3, padding=2, padding_mode="circular"),
        lambda: Plain(nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), lambda layer, x: 0.5 * layer(x)),
        (6, 2, 5),
    ),
    "two ways": Form(
        lambda: TwoWays(2, 3, 3),
        lambda: Plain(nn.Conv1d(2, 3, 3), lambda layer, x: layer(x) + layer(x.flip(-1)).flip(-1)),
        (6, 2, 5),
    ),
    "pixels": Form(lambda: PixelLinear(2, 3), lambda: Plain(nn.Linear(2, 3), pixels_of), (6, 2, 4, 3)),
    "residual": Form(
        lambda: ResidualLinear(4, 4), lambda: Plain(nn.Linear(4, 4), lambda layer, x: x + 0.5 * layer(x)), (6, 4)
    ),
    "chunked": Form(
        lambda: Chunked(4, 3),
        lambda: Plain(nn.Linear(4, 3), lambda layer, x: torch.cat([2 * layer(part) for part in x.split(4)])),
        (10, 4),
    ),
    "nested": Form(
        lambda: Nested(2, 3, 2),
        lambda: Plain(
            nn.Conv1d(2, 3, 2),
            lambda layer, x, inner: layer(torch.tanh(inner(F.pad(x, (1, 0))))),
            inner=nn.Conv1d(2, 2, 2),
        ),
        (6, 2, 5),
    ),
    "reduce": Form(
        lambda: CausalConv1d(2, 3, 3),
        lambda: Plain(nn.Conv1d(2, 3, 3), padded(2, 0)),
        (6, 2, 7),
        {"weight_sharing": "reduce"},
    ),
    "blocks": Form(
        lambda: SameConv2d(4, 3, 3),
        lambda: Plain(nn.Conv2d(4, 3, 3), padded(1, 1, 1, 1)),
        (6, 4, 5, 5),
        {"max_factor_dim": 8},
    ),
    "a part of the examples": Form(
        lambda: CausalConv1d(2, 3, 3),
        lambda: Plain(nn.Conv1d(2, 3, 3), padded(2, 0)),
        (8, 2, 7),
        {"factor_batch_fraction": 0.5},
    ),
}
COMPILED = ("causal", "same", "norm inside", "other options", "two ways", "pixels", "nested")


def loss_of(call: Callable[[Tensor], Tensor], step: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return F.cross_entropy(call(torch.randn(shape, generator=generator)), torch.arange(shape[0]) % 3)


def assert_alike(*runs: tuple[nn.Module, Any], rel: float = SAME) -> None:
    """The same factors, in order, and the same parameters."""
    (model, optimizer), (other, its) = runs
    found, wanted = (list(factors_of(each).values()) for each in (optimizer, its))
    assert len(found) == len(wanted) > 0
    for actual, expected in zip([*found, *values(model)], [*wanted, *values(other)], strict=True):
        assert_near(actual, expected, rel=rel)


def assert_trains_alike(form: Form, *runs: tuple[nn.Module, Any, Callable[[Tensor], Tensor]], steps: int = 4) -> None:
    for step in range(steps):
        for _, optimizer, call in runs:
            optimizer.zero_grad()
            loss_of(call, step, form.shape).backward()
            optimizer.step()
    (model, optimizer, _), (other, its, _) = runs
    assert_alike((model, optimizer), (other, its))


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_a_form_trains_as_plain_layers_do(name: str) -> None:
    form = FORMS[name]
    own, plain = form.models()
    runs = [(m, KFACSGD(m, **OPTIONS, **form.options), m) for m in (own, plain)]
    assert " at F." in repr(runs[0][1].curvature)
    assert_trains_alike(form, *runs)


@pytest.mark.parametrize("name", ["same", "residual"])
def test_the_sampled_fisher_sees_the_same(name: str) -> None:
    form = FORMS[name]
    runs = []
    for model in form.models():
        torch.manual_seed(1)
        runs.append((model, KFAC(model, fisher=Categorical(), **FLOAT64), model))
    assert_trains_alike(form, *runs)


def test_one_example_at_one_position_has_the_dense_fisher() -> None:
    """Of which the Kronecker product is exact."""
    model = SameConv2d(2, 3, 3, stride=4)
    engine = CurvatureEngine(model, **FLOAT64)
    model(torch.randn(1, 2, 3, 2)).square().sum().backward()
    g = torch.cat((model.weight.grad.flatten(1), model.bias.grad[:, None]), dim=1).flatten()
    engine.precondition_(lr=0.1)
    (layer,) = engine.layers
    a, own = (factor.squeeze(0) for factor in engine.factors(layer))
    assert_near(torch.kron(own, a), torch.outer(g, g), rel=SAME)


# What is declined ----------------------------------------------------------------------------------------------------


class StandardisedConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / w.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class MaskedLinear(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("mask", torch.ones_like(self.weight).tril())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class EqualisedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


class MaskedConv2d(nn.Conv2d):
    """PixelCNN's, which sets weights to zero in place."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("mask", torch.ones_like(self.weight))
        self.mask[:, :, 1, 1:] = self.mask[:, :, 2:] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


class BinaryLinear(nn.Linear):
    """Its weight becomes another tensor's numbers in each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.sign()
        return super().forward(x) * 0.5


class DemodulatedConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.square().sum((1, 2, 3))[:, None, None].rsqrt()


class SlicedConv1d(nn.Conv1d):
    """Its kernel grows from one tap: a view of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight[..., :1], self.bias)


class BiasBehind(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.conv1d(x, self.weight) + self.bias[:, None]


class BiasBefore(nn.Linear):
    """Takes the bias off the input as well."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.bias)


class OtherGroups(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x[:, :2], self.weight, self.bias, groups=1)


class WithMask(nn.Conv1d):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x * mask)


class SteppedTranspose(nn.ConvTranspose1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., 1:]


class Merging(nn.Linear):
    """LoRA: a low-rank addition to the weight."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.down, self.up = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.zeros(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.up @ self.down, self.bias)


OTHER = "does not give its own weight and bias to torch's function"
DECLINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "standardised": (lambda: StandardisedConv2d(2, 3, 3), (6, 2, 4, 4), OTHER),
    "masked": (lambda: MaskedLinear(4, 4), (6, 4), OTHER),
    "equalised": (lambda: EqualisedLinear(4, 4), (6, 4), OTHER),
    "masked in place": (lambda: MaskedConv2d(2, 3, 3), (6, 2, 4, 4), "changes its weight there"),
    "binary": (lambda: BinaryLinear(4, 4), (6, 4), "changes its weight there"),
    "demodulated": (lambda: DemodulatedConv2d(2, 3, 3), (6, 2, 4, 4), "uses its weight elsewhere, too"),
    "a part of it": (lambda: SlicedConv1d(2, 3, 3), (6, 2, 5), OTHER),
    "bias behind": (lambda: BiasBehind(2, 3, 3), (6, 2, 5), OTHER),
    "bias before": (lambda: BiasBefore(4, 4), (6, 4), "uses its bias elsewhere, too"),
    "other groups": (lambda: OtherGroups(4, 4, 3, groups=2), (6, 4, 5), OTHER),
    "merged": (lambda: Merging(4, 4), (6, 4), OTHER),
    "transposed": (lambda: SteppedTranspose(2, 3, 3), (6, 2, 5), "overrides ConvTranspose1d.forward; see"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_uses_its_weight_otherwise_trains_by_the_base_rule_from_the_first_step(name: str) -> None:
    make, shape, reason = DECLINED[name]
    model = nn.Sequential(make(), nn.Flatten())
    other, given = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="preconditions none"):
        optimizer = KFACSGD(model, lr=0.1, momentum=0.9)
    assert_identical_state(model, given)
    assert f"{type(model[0]).__name__} overrides" in repr(optimizer.curvature) and reason in repr(optimizer.curvature)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each, its in ((model, optimizer), (other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))):
            for step in range(5):
                its.zero_grad()
                loss_of(each, step, shape).backward()
                its.step()
    assert_identical(model, other)


def assert_identical_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_what_can_not_be_tried_is_declined() -> None:
    engine = CurvatureEngine(nn.Sequential(nn.Linear(3, 3), WithMask(2, 3, 3)))
    assert [layer.name for layer in engine.layers] == ["0"]
    assert "WithMask overrides Conv1d.forward and takes none of the inputs that were tried; see" in repr(engine)


def test_it_is_covered_if_it_is_registered_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._FACTORIES, WithMask, OwnForwardConvLayer)
    form = Form(
        lambda: Plain(WithMask(2, 3, 3), lambda layer, x: layer(x, x > 0)),
        lambda: Plain(nn.Conv1d(2, 3, 3), lambda layer, x: layer(x * (x > 0))),
        (6, 2, 5),
    )
    runs = [(model, KFACSGD(model, **OPTIONS), model) for model in form.models()]
    assert_trains_alike(form, *runs)


@pytest.mark.parametrize("norm", [weight_norm, nn.utils.weight_norm], ids=["parametrization", "hook"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_weight_norm_on_a_form_is_declined(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(norm(CausalConv1d(2, 3, 3)), nn.Flatten(), nn.Linear(15, 3))
    optimizer = KFACSGD(model, **OPTIONS)
    assert [layer.name for layer in optimizer.curvature.layers] == ["2"]
    reasons = {reason for _, reason in optimizer.curvature.stages.trained.uncovered.values()}
    assert all("is computed from other parameters" in reason for reason in reasons)


def test_a_form_is_covered_once_its_weight_is_a_parameter_again() -> None:
    model = nn.Sequential(CausalConv1d(2, 3, 3), nn.Flatten(), nn.Linear(15, 3))
    prune.random_unstructured(model[0], "weight", 0.5)
    optimizer = KFACSGD(model, **OPTIONS)
    assert [layer.name for layer in optimizer.curvature.layers] == ["2"]
    prune.remove(model[0], "weight")
    loss_of(model, 0, (6, 2, 5)).backward()
    optimizer.step()
    assert [layer.name for layer in optimizer.curvature.layers] == ["0", "2"]


def test_a_layer_in_place_of_a_declined_one_is_still_chosen_by_name_or_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(CausalConv1d(2, 3, 3), nn.Conv1d(3, 3, 1))
    skipping = CurvatureEngine(model, skip_layers=["0"])
    assert [layer.name for layer in skipping.layers] == ["1"] and "skip_layers matches '0'" in repr(skipping)
    monkeypatch.setitem(registry._FACTORIES, CausalConv1d, registry._FACTORIES[nn.Conv1d])
    assert "at F.conv1d" not in repr(CurvatureEngine(model))


class Counting(nn.BatchNorm2d):
    """Notes its calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return super().forward(x)


def test_trying_leaves_no_trace() -> None:
    """No random number is drawn, nothing of the module or of those inside changes, no hook fires, nobody is warned."""
    inside = Counting(3)
    inside.seen, fired = [], []
    model = NormedConv2d(2, 3, 3, norm=inside, activation=nn.Dropout()).eval()
    for module in (model, inside):
        module.register_forward_hook(lambda *_: fired.append(1))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        engine = CurvatureEngine(model)
    assert [layer.name for layer in engine.layers] == [""] and torch.equal(state, torch.get_rng_state())
    assert not fired and not inside.seen and not model.training and not inside.training
    assert_identical_state(model, before)
    assert not any(p.grad is not None for p in model.parameters())


def add_to_list(held: Any, x: Tensor) -> None:
    held["calls"].append(1)


def add_in_place(held: Any, x: Tensor) -> None:
    held[0].add_(1)


def remember(held: Any, x: Tensor) -> None:
    held.append(x)


def draw(held: Any, x: Tensor) -> None:
    torch.randn(2, generator=held)


def call_first(held: Any, x: Tensor) -> None:
    held[0](x)


class Holding(nn.Conv2d):
    """Uses something that it holds as an attribute."""

    def __init__(self, held: Any, use: Callable[[Any, Tensor], None]) -> None:
        super().__init__(2, 3, 3)
        self.held, self.use = held, use

    def forward(self, x: Tensor) -> Tensor:
        self.use(self.held, x)
        return super().forward(x) * 2


def state_of(held: Any) -> Any:
    held = getattr(held, "__self__", held)
    if isinstance(held, nn.Module):
        return [value.tolist() for value in held.state_dict().values()]
    if isinstance(held, (list, tuple, deque)):
        return [state_of(item) for item in held]
    return held.get_state().tolist() if isinstance(held, torch.Generator) else copy.deepcopy(held)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda: {"calls": []}, add_to_list),
        (lambda: [torch.zeros(2)], add_in_place),
        (lambda: np.zeros((1, 2)), lambda held, x: held.__iadd__(1.0)),
        (lambda: deque(maxlen=3), remember),
        (torch.Generator, draw),
        (lambda: [nn.BatchNorm2d(2)], call_first),
        (lambda: (nn.BatchNorm2d(2),), call_first),
        (lambda: [nn.BatchNorm2d(2).forward], call_first),
    ],
    ids=["nested", "tensor", "array", "deque", "generator", "module in a list", "module in a tuple", "method"],
)
def test_trying_leaves_what_a_module_holds_as_it_is(
    make: Callable[[], Any], use: Callable[[Any, Tensor], None]
) -> None:
    model = Holding(make(), use)
    before = state_of(model.held)
    assert len(CurvatureEngine(model).layers) == 1
    assert repr(state_of(model.held)) == repr(before)
    model(torch.randn(1, 2, 4, 4))
    assert repr(state_of(model.held)) != repr(before)


def test_a_module_that_holds_itself_is_tried() -> None:
    model = Holding([], lambda held, x: held[0].bias.add(x.mean()))
    model.held.append(model)
    assert len(CurvatureEngine(model).layers) == 1


def test_a_large_weight_is_not_tried() -> None:
    engine = CurvatureEngine(nn.Sequential(nn.Conv2d(2, 2, 1), CausalConv1d(8193, 8192, 1, device="meta")))
    assert [layer.name for layer in engine.layers] == ["0"]
    assert "is too large to be tried" in repr(engine)


def test_a_module_that_holds_a_large_one_is_declined() -> None:
    """Which may be the whole model, on a GPU."""
    model = nn.Sequential(nn.Conv2d(2, 2, 1), Holding([nn.Linear(2049, 2048, device="meta")], lambda *_: None))
    assert [layer.name for layer in CurvatureEngine(model).layers] == ["0"]


def test_trying_draws_no_random_numbers_of_python_and_numpy() -> None:
    drawing = Holding(None, lambda *_: (random.random(), np.random.random()) and None)
    random.seed(0)
    np.random.seed(0)
    expected = random.random(), np.random.random()
    random.seed(0)
    np.random.seed(0)
    assert len(CurvatureEngine(drawing).layers) == 1
    assert (random.random(), np.random.random()) == expected


@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_modules_of_another_dtype_are_tried_anew(first: torch.dtype) -> None:
    """A cast to float32 leaves such weights as they are."""

    class CastingLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * F.linear(x.float(), self.weight.float(), self.bias.float())

    model = nn.ModuleList([CastingLinear(3, 3, dtype=first)])
    model += [CastingLinear(3, 3, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    found = [layer.weight.dtype for layer in CurvatureEngine(model).layers]
    assert found == [torch.float32] * (2 if first == torch.float32 else 1)


def test_an_optimizer_that_is_built_in_inference_mode_declines_the_same() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.square().sum()

    model = nn.Sequential(nn.Linear(3, 3), Scaled(3, 3))
    with torch.inference_mode():
        assert [layer.name for layer in CurvatureEngine(model).layers] == ["0"]


def test_a_norm_that_needs_a_gpu_in_train_mode_is_tried_in_eval_mode() -> None:
    class OnGPUs(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("expected input tensor to be on GPU")
            return super().forward(x)

    assert len(CurvatureEngine(NormedConv2d(2, 3, 3, norm=OnGPUs(3), activation=F.relu)).layers) == 1


# Ways of training ----------------------------------------------------------------------------------------------------


@needs_traced_function_modes
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_forms_train_as_eager_ones_do(name: str) -> None:
    torch._dynamo.reset()
    form = FORMS[name]
    model, _ = form.models()
    other = copy.deepcopy(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    runs = [(m, KFACSGD(m, **OPTIONS), f) for m, f in ((model, call), (other, other))]
    assert_trains_alike(form, *runs, steps=5)


@needs_traced_function_modes
@pytest.mark.parametrize("how", ["wrapped", "in place", "in place, later"])
def test_a_form_that_is_compiled_by_itself_trains_by_the_base_rule(how: str) -> None:
    """A graph of a hook alone cannot leave a function mode on; what is seen of the other layers stays the same."""
    torch._dynamo.reset()
    form = FORMS["causal"]
    model, _ = form.models()
    other = copy.deepcopy(model)
    if how == "wrapped":
        model[0] = torch.compile(model[0], backend="aot_eager")
    elif how == "in place":
        model[0].compile(backend="aot_eager")
    options = {**OPTIONS, "momentum": 0.0}
    runs = [(model, KFACSGD(model, **options)), (other, KFACSGD(other, **options, skip_layers=["^0"]))]
    if how == "in place, later":
        model[0].compile(backend="aot_eager")
    else:
        assert "compiled by itself" in repr(runs[0][1].curvature)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(6):
            for each, optimizer in runs:
                optimizer.zero_grad()
                loss_of(each, step, form.shape).backward()
                optimizer.step()
    assert any("'0': the weight has gradients" in str(w.message) for w in warned) == (how == "in place, later")
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_near(p.detach(), q.detach(), name, SAME)


class CompiledInside(CausalConv1d):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@needs_traced_function_modes
def test_a_form_with_a_compiled_forward_trains_by_the_base_rule_with_a_warning() -> None:
    torch._dynamo.reset()
    form = FORMS["causal"]
    other, _ = form.models()
    model = nn.Sequential(CompiledInside(2, 3, 3, dilation=2), *copy.deepcopy(other)[1:])
    model.load_state_dict(other.state_dict())
    runs = [(model, KFACSGD(model, **OPTIONS)), (other, KFACSGD(other, **OPTIONS, skip_layers=["^0"]))]
    with pytest.warns(UserWarning, match="'0': the weight has gradients, but the layer was never seen"):
        for step in range(6):
            for each, optimizer in runs:
                optimizer.zero_grad()
                loss_of(each, step, form.shape).backward()
                optimizer.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_near(p.detach(), q.detach(), name, SAME)


def test_a_form_with_a_scripted_part_is_declined() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        norm = torch.jit.script(nn.BatchNorm2d(3))
    engine = CurvatureEngine(nn.Sequential(nn.Linear(2, 2), NormedConv2d(2, 3, 3, norm=norm, activation=F.relu)))
    assert [layer.name for layer in engine.layers] == ["0"] and not norm.running_mean.any()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["causal", "norm inside", "two ways"])
def test_checkpointed_forms_train_as_others_do(name: str, reentrant: bool) -> None:
    form = FORMS[name]
    model, _ = form.models()
    if name == "norm inside":  # its running statistics would count the second run
        model[0].norm.momentum = 0.0
    other = copy.deepcopy(model)

    def call(x: Tensor) -> Tensor:
        return model[1:](checkpoint(model[0], x.requires_grad_(), use_reentrant=reentrant))

    assert_trains_alike(form, (model, KFACSGD(model, **OPTIONS), call), (other, KFACSGD(other, **OPTIONS), other))


def test_micro_batches_are_one_batch() -> None:
    form = FORMS["same"]
    model, other = form.models()
    runs = [(each, KFACSGD(each, **OPTIONS)) for each in (model, other)]
    for step in range(4):
        x = torch.randn(form.shape, generator=torch.Generator().manual_seed(step))
        for (each, optimizer), parts in zip(runs, (3, 1), strict=True):
            optimizer.zero_grad()
            for part, classes in zip(x.chunk(parts), (torch.arange(6) % 3).chunk(parts), strict=True):
                (F.cross_entropy(each(part), classes) / parts).backward()
            optimizer.step()
    assert_alike(*runs)


def test_autocast_gives_the_factors_of_plain_layers() -> None:
    form = FORMS["same"]
    runs = [(m.float(), KFACSGD(m, **OPTIONS)) for m in form.models()]
    for each, optimizer in runs:
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(form.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(each(x), torch.arange(6) % 3)
            loss.backward()
            optimizer.step()
    assert_alike(*runs)


def trained_on_ranks(rank: int, world_size: int, how: str) -> list[Tensor]:
    torch.set_default_dtype(torch.float64)
    form = FORMS["nested"]
    model, _ = form.models()
    wrapped: nn.Module = model
    if how == "DDP" and world_size > 1:
        wrapped = DDP(model)
    elif world_size > 1:
        for part in (model[0].inner, model[0], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = KFACSGD(wrapped, **OPTIONS)
    assert len(optimizer.curvature.layers) == 3
    for step in range(4):
        x = torch.randn(form.shape, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        classes = torch.arange(6) % 3
        F.cross_entropy(wrapped(x.chunk(world_size)[rank]), classes.chunk(world_size)[rank]).backward()
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in values(model)]


@pytest.mark.parametrize("how", ["DDP", pytest.param("FSDP2", marks=needs_sharding_on_cpus)])
def test_two_ranks_are_one_process(how: str) -> None:
    expected = trained_on_ranks(0, 1, how)
    assert_all_near(run_ranks(2, trained_on_ranks, how), expected, SAME)


# Hosts and their taps ------------------------------------------------------------------------------------------------


class Watching(nn.Conv1d):
    """Notes how many function modes are on while it runs, and stops like a user who interrupts it."""

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(torch._C._len_torch_function_stack())
        if self.interrupted:
            raise self.interrupted
        return 2 * super().forward(x)


def watching() -> Any:
    model = Watching(2, 3, 3)
    model.modes, model.interrupted = [], None
    return model


def test_a_host_has_a_function_mode_in_steps_with_statistics_alone() -> None:
    model = watching()
    optimizer = KFACSGD(model, lr=0.1, factor_update_steps=3)
    model.modes.clear()
    for _ in range(5):
        with torch.no_grad():
            model(torch.randn(4, 2, 5))
        model(torch.randn(4, 2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.modes == [0, 1, 0, 0, 0, 0, 0, 1, 0, 0] and torch._C._len_torch_function_stack() == 0


def test_a_call_that_ends_with_an_exception_takes_its_tap_off() -> None:
    model = watching()
    optimizer = KFACSGD(model, **OPTIONS)
    model.interrupted = ValueError
    with pytest.raises(ValueError):
        model(torch.randn(4, 2, 5))
    assert model.modes == [1] and torch._C._len_torch_function_stack() == 0
    optimizer.zero_grad()


@pytest.mark.parametrize("then", ["another call", "zero_grad", "close"])
def test_a_call_that_was_interrupted_leaves_no_tap(then: str) -> None:
    model, twin = watching(), watching()
    twin.load_state_dict(model.state_dict())
    optimizer, its = (KFACSGD(each, **OPTIONS) for each in (model, twin))
    model.interrupted = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 2, 5))
    model.interrupted = None
    assert torch._C._len_torch_function_stack() == 1
    if then == "zero_grad":
        optimizer.zero_grad()
    elif then == "close":
        optimizer.curvature.close()
    assert torch._C._len_torch_function_stack() == (then == "another call")
    for each in (model, twin) if then != "close" else ():
        torch.manual_seed(0)
        each(torch.randn(4, 2, 5)).square().mean().backward()
    assert torch._C._len_torch_function_stack() == 0
    if then != "close":
        optimizer.step()
        its.step()
        assert_alike((model, optimizer), (twin, its))


def test_two_optimizers_see_what_one_does() -> None:
    """Each of them has a part of a host's layers, or of those inside it."""
    form = FORMS["nested"]
    model, other = form.models()
    parts = [KFACSGD(model[0].inner.parameters(), model=model, **OPTIONS)]
    parts.append(KFACSGD([model[0].weight, model[0].bias, *model[3].parameters()], model=model, **OPTIONS))
    optimizer = KFACSGD(other, **OPTIONS)
    for step in range(4):
        for each, its in ((model, parts), (other, [optimizer])):
            loss_of(each, step, form.shape).backward()
            for one in its:
                one.step()
                one.zero_grad()
    found = {name: factor for part in parts for name, factor in factors_of(part).items()}
    expected = factors_of(optimizer)
    assert len(found) == len(expected)
    for actual, wanted in zip([found[name] for name in sorted(found)], expected.values(), strict=True):
        assert_near(actual, wanted, rel=SAME)


def test_two_optimizers_may_watch_one_host() -> None:
    form = FORMS["nested"]
    model, other = form.models()
    runs = [(model, [KFACSGD(model, **OPTIONS | {"lr": 0.0}) for _ in range(2)])]
    runs.append((other, [KFACSGD(other, **OPTIONS | {"lr": 0.0})]))
    for step in range(3):
        for each, optimizers in runs:
            loss_of(each, step, form.shape).backward()
            for optimizer in optimizers:
                optimizer.step()
            each.zero_grad()
    (_, both), (_, (alone,)) = runs
    for optimizer in both:
        assert_alike((model, optimizer), (other, alone))


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_of_a_form_have_no_hooks_and_may_be_watched(how: str) -> None:
    form = FORMS["causal"]
    model, _ = form.models()
    optimizer = KFACSGD(model, **OPTIONS)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert not other[0]._forward_pre_hooks and not other[0]._forward_hooks
    assert_trains_alike(form, (model, optimizer, model), (other, KFACSGD(other, **OPTIONS), other))
    optimizer.curvature.close()
    assert not model[0]._forward_pre_hooks and not model[0]._forward_hooks


class Switching(nn.Linear):
    """Masks its weight from some time on."""

    mode = "itself"

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "another":
            return F.linear(x, self.weight.tril(), self.bias)
        return F.linear(x, self.weight, self.bias) + (self.weight.sum() if self.mode == "also" else 1.0)


@pytest.mark.parametrize(
    ("mode", "words"), [("another", "was never seen"), ("also", "uses the weight beside the calls")]
)
def test_a_form_that_changes_later_is_warned_of(mode: str, words: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Switching(4, 4))
    optimizer = KFACSGD(model, **OPTIONS)
    model[1].mode = mode
    with pytest.warns(UserWarning, match=f"'1'.*{words}"):
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step, (6, 4)).backward()
            optimizer.step()


def test_modules_that_share_a_weight_are_one_layer() -> None:
    first, second = CausalConv1d(2, 2, 3), CausalConv1d(2, 2, 3, dilation=2)
    second.weight, second.bias = first.weight, first.bias
    model = nn.Sequential(first, nn.Tanh(), second, nn.Flatten())
    conv, again = nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3, dilation=2)
    conv.load_state_dict(first.state_dict())
    again.weight, again.bias = conv.weight, conv.bias
    pads = [nn.ConstantPad1d((2 * d, 0), 0.0) for d in (1, 2)]
    plain = nn.Sequential(pads[0], conv, nn.Tanh(), pads[1], again, nn.Flatten())
    runs = [(each, KFACSGD(each, **OPTIONS), each) for each in (model, plain)]
    assert_trains_alike(Form(lambda: model, lambda: plain, (6, 2, 7)), *runs)
