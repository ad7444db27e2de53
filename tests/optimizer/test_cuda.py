"""A real CUDA device beside the CPU: the same training, in float64; where there is none, nothing is tested here.

What is batched, filled up and put off on a device is none of that on the CPU, so the CPU's numbers are the oracle.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kfac_optim import KFACSGD, EigenSolver, KFACAdamW, OfLargest, growing
from kfac_optim.layers import FoundLayers, LayerOptions
from kfac_optim.layers.moments import _SUMS_IN_FLOAT32
from kfac_optim.optimizers import KFACMixin
from tests.helpers.compare import assert_near, assert_same_weights
from tests.helpers.compiler import needs_compiler
from tests.helpers.files import packed, unpacked
from tests.helpers.settings import ALL_CLASSES, FLOAT64, PAPER
from tests.helpers.zoo import FAMILIES, Family

if not torch.cuda.is_available():
    reason = "needs a CUDA device; a simulated one is tested by tests/distributed/test_devices.py"
    pytest.skip(reason, allow_module_level=True)

STEPS = 12  # the first refresh is at once, the second in step 10
# By ways in which nothing is left out, and by the defaults, where an eigenvalue at the threshold of what is negligible
# may be on either side of it.
EXACT, TOLERANCE = 1e-8, 1e-6
ROUGH = {"MobileNet": 1e-6}  # CUDA's hardswish multiplies by a sixth in float32, whatever its input's type
DEFAULTS: dict[str, Any] = {**FLOAT64, "inv_update_steps": growing(0.5, 10)}  # that never wait
EXACTLY: dict[str, Any] = {**FLOAT64, **PAPER, "solver": EigenSolver(negligible=0.0)}
WAY: dict[str, dict[str, Any]] = {
    "defaults": DEFAULTS,
    "paper, eigen": EXACTLY,
    "paper, inverse": {**EXACTLY, "solver": "inverse"},
    "paper, in the background": {**EXACTLY, "spread": 2, "inv_update_steps": 4},
}


def trained(
    family: Family, cls: type[KFACMixin], device: str, steps: int = STEPS, **options: Any
) -> tuple[nn.Module, KFACMixin]:
    """The model of a family after some steps on the device, and its optimizer."""
    torch.manual_seed(0)
    model = family.make().double().to(device)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_bias is not None:
            # The gradient of a key's bias is rounding alone; where that is zero by chance, its direction is zero, too.
            module.in_proj_bias.register_hook(lambda gradient: gradient + 1e-6)
    optimizer = cls(family.part(model), **{**ALL_CLASSES[cls], "loss_average": family.average, **options})
    go_on(family, model, optimizer, steps)
    return model, optimizer


def go_on(family: Family, model: nn.Module, optimizer: KFACMixin, steps: int) -> None:
    """Train, on the same batches everywhere."""
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(0)
    batches = [family.batch(random) for _ in range(2)]
    for step in range(steps):
        batch = tree_map(lambda x: x.to(device, torch.float64 if x.is_floating_point() else x.dtype), batches[step % 2])
        optimizer.zero_grad()
        family.loss(model, batch).backward()
        optimizer.step()
    optimizer.curvature.synchronize()


@pytest.mark.parametrize("way", WAY)
@pytest.mark.parametrize("name", FAMILIES)
def test_trains_as_on_the_cpu(name: str, way: str) -> None:
    """Every family."""
    (model, optimizer), (expected, _) = (
        trained(FAMILIES[name], KFACSGD, device, **WAY[way]) for device in ("cuda", "cpu")
    )
    assert_same_weights(model.cpu(), expected, TOLERANCE if way == "defaults" else ROUGH.get(name, EXACT))
    assert {f.device.type for layer in optimizer.curvature.layers for f in optimizer.curvature.factors(layer)} == {
        "cuda"
    }


def test_hardswish_is_rough() -> None:
    """What ``ROUGH`` says: it is not the optimizer."""
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    off = float((F.hardswish(x.cuda()).cpu() - F.hardswish(x)).abs().max())
    assert 1e-10 < off < 1e-6


@pytest.mark.parametrize("cls", ALL_CLASSES)
@pytest.mark.parametrize("name", ["ResNet", "GPT"])
def test_each_class_trains_as_on_the_cpu(name: str, cls: type[KFACMixin]) -> None:
    (model, _), (expected, _) = (trained(FAMILIES[name], cls, device, 25, **DEFAULTS) for device in ("cuda", "cpu"))
    assert_same_weights(model.cpu(), expected, TOLERANCE)


def test_a_model_that_moves_after_construction() -> None:
    family = FAMILIES["ResNet"]
    torch.manual_seed(0)
    model = family.make().double()
    optimizer = KFACSGD(model, **ALL_CLASSES[KFACSGD], **DEFAULTS)
    go_on(family, model.to("cuda"), optimizer, STEPS)
    expected, _ = trained(family, KFACSGD, "cpu", **DEFAULTS)
    assert_same_weights(model.cpu(), expected, TOLERANCE)


def test_a_checkpoint_goes_on_on_the_cpu() -> None:
    family = FAMILIES["GPT"]
    model, optimizer = trained(family, KFACAdamW, "cuda", **DEFAULTS)
    file = packed({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    found = unpacked(file, map_location="cpu")
    other = family.make().double()
    resumed = KFACAdamW(other, loss_average=family.average, **ALL_CLASSES[KFACAdamW], **DEFAULTS)
    other.load_state_dict(found["model"])
    resumed.load_state_dict(found["optimizer"])
    for each, its in ((model, optimizer), (other, resumed)):
        go_on(family, each, its, STEPS)
    assert_same_weights(other, model.cpu(), TOLERANCE)


def test_a_step_with_gradients_that_overflow_is_left_out() -> None:
    """Decided on the device, for all parameters alike: Adam's moments and the weights stay as they are."""
    family = FAMILIES["GPT"]
    model, optimizer = trained(family, KFACAdamW, "cuda", **DEFAULTS)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    optimizer.step()
    optimizer.curvature.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.curvature.report()["skipped_steps"] == 1
    go_on(family, model, optimizer, 2)
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_learns(dtype: torch.dtype) -> None:
    """With a scaler whose first scale is too large: nothing is poisoned by the steps that it skips."""
    family = FAMILIES["ResNet"]
    torch.manual_seed(0)
    model = family.make().cuda()
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9, inv_update_steps=growing(0.5, 10))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30, enabled=dtype == torch.float16)
    batch = tree_map(lambda x: x.cuda(), family.batch(torch.Generator().manual_seed(0)))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = family.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    assert optimizer.curvature.report()["failed_decompositions"] == 0


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (7, 6)),
    "linear, positions": (lambda: nn.Linear(600, 5), (7, 3, 600)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, padding=1), (5, 4, 8, 8)),
    "groups, stride": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), (5, 4, 8, 8)),
    "one tap": (lambda: nn.Conv2d(4, 6, 1), (5, 4, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3), (5, 4, 8)),
}


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODULES)
def test_moments_of_half_precision_are_those_of_its_numbers(name: str, dtype: torch.dtype, limit: int | None) -> None:
    """Products of half precision are exact in float32, and no copy of the rows is made."""
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().cuda()
    (layer,) = FoundLayers([module], LayerOptions(max_factor_dim=limit)).layers
    a = torch.randn(shape, device="cuda").to(dtype)
    output = module(a.float())
    g = torch.randn_like(output).to(dtype)
    found, expected = [], []
    for moments, cast in ((found, torch.float32), (expected, torch.float64)):
        double = cast == torch.float64
        seen = layer.observe(module, a.double() if double else a, output, cast)
        rows = layer.multiplicand(g.double() if double else g, cast)
        assert double or rows.dtype == (dtype if _SUMS_IN_FLOAT32 else torch.float32)
        moments += [seen.a, layer.output_moment(module, rows, seen.context)]
    for moment, exact in zip(found, expected, strict=True):
        assert moment.dtype == torch.float32
        assert_near(moment.double(), exact, rel=1e-4)


@pytest.mark.parametrize("n", [2, 32, 65, 300, 600])
def test_eigendecompositions(n: int) -> None:
    """In float64 where that is faster."""
    x = torch.randn(3, 2 * n, n, device="cuda")
    x = x.mT @ x / n
    values, vectors = EigenSolver().decompose(x, x.new_zeros(3))
    assert values.dtype == vectors.dtype == torch.float32 and bool((values.diff() >= 0).all())
    assert_near((vectors * values[:, None]) @ vectors.mT, x, rel=1e-4)
    assert_near(vectors.mT @ vectors, torch.eye(n, device="cuda").expand_as(x), rel=1e-4)


def waits_of(*steps: Any) -> list[int]:
    """How often the host has waited for the device in each of the steps."""
    found = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for step in steps:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step()
            found.append(sum("synchronizing CUDA operation" in str(each.message) for each in caught))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return found


@pytest.mark.parametrize("cls", ALL_CLASSES)
def test_an_ordinary_step_waits_once(cls: type[KFACMixin]) -> None:
    family = FAMILIES["GPT"]
    model, optimizer = trained(family, cls, "cuda", 11, inv_update_steps=growing(0.5, 10))
    optimizer.curvature.factor_update_steps = optimizer.curvature.inv_update_steps = 10**6
    optimizer.curvature.damping = OfLargest(0.01)
    batch = tree_map(lambda x: x.cuda(), family.batch(torch.Generator().manual_seed(0)))
    read = torch.ones(3, device="cuda").tolist
    assert waits_of(read, read) == [1, 1], "each wait is seen"
    waits = []
    for _ in range(10):
        optimizer.zero_grad()
        family.loss(model, batch).backward()
        waits += waits_of(optimizer.step)
    assert max(waits[2:]) == 1, waits


def test_nccl() -> None:
    """One rank: what is sent to nobody changes nothing, and every collective takes what it is given."""
    family = FAMILIES["ResNet"]
    expected, _ = trained(family, KFACSGD, "cuda", **DEFAULTS)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for assignment in ("layer-wise", "factor-wise"):
            model, _ = trained(family, KFACSGD, "cuda", assignment=assignment, **DEFAULTS)
            assert_same_weights(model, expected, TOLERANCE)
    finally:
        dist.destroy_process_group()


def test_a_cuda_graph_is_refused() -> None:
    family = FAMILIES["ResNet"]
    model, _ = trained(family, KFACSGD, "cuda", 3, **DEFAULTS)
    inputs = torch.zeros(4, 3, 8, 8, device="cuda", dtype=torch.float64)
    with pytest.raises(RuntimeError, match="CUDA graph is being recorded.*reduce-overhead"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(inputs)
    torch.cuda.synchronize()


class Perceptron(nn.Sequential):
    """What compiles in a moment."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


@needs_compiler
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_as_eager(mode: str) -> None:
    results: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Perceptron().double().cuda()
        optimizer = KFACSGD(model, **ALL_CLASSES[KFACSGD], **EXACTLY)
        called: Any = torch.compile(model, mode=mode) if compiled else model
        random = torch.Generator().manual_seed(0)
        for _ in range(STEPS):
            x = torch.randn(32, 8, generator=random, dtype=torch.float64).cuda()
            optimizer.zero_grad()
            called(x).square().mean().backward()
            optimizer.step()
        optimizer.curvature.synchronize()
        results.append([p.detach() for p in model.parameters()])
    assert_all_near(*results)


def assert_all_near(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for p, q in zip(found, expected, strict=True):
        assert_near(p, q, rel=EXACT)
