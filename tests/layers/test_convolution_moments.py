"""The two ways to A of a convolution, products of shifted images and unfolded patches, and the choice between them."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfac_optim import LayerOptions
from kfac_optim.layers import FoundLayers, RowsLayer, convolution, shifts, windows
from kfac_optim.layers.shifts import shift_pays
from kfac_optim.layers.windows import Windows

pytestmark = pytest.mark.usefixtures("float64")

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """Any convolution of stride 1, or any transposed one, and its input."""
    dims, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
    sizes = st.lists(st.integers(1, 3 if dims == 3 else 4), min_size=dims, max_size=dims).map(tuple)
    ones = st.lists(st.integers(1, 2), min_size=dims, max_size=dims).map(tuple)
    kernel, dilation, lengths = draw(sizes), draw(ones), draw(st.lists(st.integers(1, 6), min_size=dims, max_size=dims))
    shared = {"kernel_size": kernel, "dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    transposed = draw(st.booleans())
    if transposed:
        kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        module = kind(2 * groups, groups, stride=draw(ones), **shared)
    else:
        zeros = st.lists(st.integers(0, 3), min_size=dims, max_size=dims).map(tuple)
        padding = draw(st.one_of(zeros, st.just("same")))
        module = CONVOLUTIONS[dims - 1](2 * groups, groups, padding=padding, **shared)
        before = [0] * dims if padding == "same" else [2 * zeros for zeros in padding]
        reach = [0] * dims if padding == "same" else [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        assume(all(n + b > r for n, b, r in zip(lengths, before, reach, strict=True)))
    torch.manual_seed(draw(st.integers(0, 999)))
    return module, torch.randn(draw(st.integers(1, 3)), 2 * groups, *lengths)


@given(convolutions(), st.sampled_from([1, 100, 2**22]))
def test_both_ways_give_the_moment_of_the_rows(case: tuple[nn.Module, Tensor], numbers_at_once: int) -> None:
    module, x = case
    module = module.double()
    (layer,) = FoundLayers([module], LayerOptions()).layers
    expected = RowsLayer.observe(layer, module, x, module(x), torch.float64)
    for shifted in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(convolution, "shift_pays", lambda *_, shifted=shifted, half=False: shifted)
            patch.setitem(windows.CHUNK_NUMEL, "cpu", numbers_at_once)
            patch.setitem(shifts._BLOCK_NUMEL, "cpu", numbers_at_once)
            found = layer.observe(module, x, module(x), torch.float64)
        torch.testing.assert_close(found.a, expected.a, rtol=1e-10, atol=1e-10)
        assert found.count == expected.count


SETTINGS: list[dict[str, Any]] = [
    {"dilation": (2, 2), "padding": (2, 2)},  # as segmentation networks dilate a pretrained backbone
    {"stride": (2,), "padding": (1,)},
    {"dilation": (2, 2), "padding": "same"},
    {"padding": "valid"},
    {"stride": 2, "dilation": 1, "padding": 1},
    {"stride": [2, 1], "dilation": [1, 2], "padding": [1, 0]},
]


@pytest.mark.parametrize(
    ("kind", "settings"),
    # A transposed convolution wants a tuple as its padding.
    [*((nn.Conv2d, each) for each in SETTINGS), *((nn.ConvTranspose2d, each) for each in SETTINGS[:2])],
    ids=str,
)
def test_settings_may_change_after_construction(kind: Any, settings: dict[str, Any]) -> None:
    x, module = torch.randn(2, 3, 8, 7), kind(3, 4, 3)
    whole = {
        name: tuple(value) * (2 // len(value)) if isinstance(value, list | tuple) else value
        for name, value in settings.items()
    }
    built = kind(3, 4, 3, **whole)
    for name, value in settings.items():
        setattr(module, name, value)
    found, expected = (
        FoundLayers([conv], LayerOptions()).layers[0].observe(conv, x, conv(x), torch.float64)
        for conv in (module, built)
    )
    torch.testing.assert_close(found.a, expected.a)
    assert found.count == expected.count


# Input, kernel, padding, groups; measured on one CPU thread, the second way takes at least twice the time of the first.
PAYS = [
    ((128, 16, 32, 32), 3, 1, 1),
    ((128, 64, 8, 8), 3, 1, 1),
    ((64, 64, 56, 56), 3, 1, 1),
    ((64, 512, 7, 7), 3, 1, 1),
    ((32, 64, 14, 14), 7, 3, 1),
    ((64, 96, 14, 14), 7, 3, 96),  # depthwise
]
DOES_NOT = [
    ((64, 1, 8, 8), 3, 1, 1),  # a single channel
    ((4, 1, 64, 64), 5, 0, 1),
    ((2, 16, 8, 8), 5, 2, 1),  # small
    ((16, 256, 56, 56), 1, 0, 1),  # nothing to shift
]


@pytest.mark.parametrize(("case", "pays"), [(c, True) for c in PAYS] + [(c, False) for c in DOES_NOT])
def test_the_way_is_chosen_by_shape(case: tuple[tuple[int, ...], int, int, int], pays: bool) -> None:
    shape, kernel, padding, groups = case
    sliding = Windows((kernel,) * 2, (1, 1), (1, 1), ((padding,) * 2,) * 2)
    assert shift_pays(torch.Size(shape), sliding, groups, torch.device("cpu"), half=False) is pays


def test_a_larger_stride_is_always_unfolded() -> None:
    sliding = Windows((7, 7), (1, 2), (1, 1), ((3, 3),) * 2)
    assert not shift_pays(torch.Size((32, 64, 14, 14)), sliding, 1, torch.device("cpu"), half=False)


@pytest.mark.parametrize(
    ("channels", "length", "examples"),
    [(16, 34, 28), (64, 34, 7), (64, 66, 1), (64, 258, 1), (1024, 3, 1024)],
    ids=["small", "larger", "largest", "above the limit", "as large as the moment"],
)
def test_patches_are_unfolded_for_as_many_examples_as_fit(channels: int, length: int, examples: int) -> None:
    """In 2^22 numbers, or in as many as the moment's own for each tap."""
    image = torch.empty(1).expand(1, channels, length, length)
    assert Windows((3, 3), (1, 1), (1, 1), ((0, 0), (0, 0))).examples_at_once(image) == examples


def test_the_choice_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    monkeypatch.setattr(convolution, "shifted_moment", lambda *_: taken.append(pays) or torch.zeros(1, 18, 18))
    module, x = nn.Conv2d(2, 2, 3, bias=False), torch.randn(1, 2, 8, 8)
    (layer,) = FoundLayers([module], LayerOptions()).layers
    for pays in (True, False):
        monkeypatch.setattr(convolution, "shift_pays", lambda *_, pays=pays, half=False: pays)
        layer.observe(module, x, module(x), torch.float64)
    assert taken == [True]


def test_a_3x3_kernel_takes_13_products_over_the_image_and_6_along_its_border() -> None:
    plan = shifts._plan(Windows((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))), (9, 7))
    sizes = [[stop - start for start, stop, _ in product.parts] for product in plan.products]
    assert len([size for size in sizes if min(size) > 1]) == 13
    assert len(sizes) == 19
    lines, columns = (n + 2 * (n - 1) + 2 * (n - 2) for n in (9, 7))  # over all distances
    assert sum(map(math.prod, sizes)) == (lines * columns + 9 * 7) / 2  # of opposite ones, one


def test_work_is_counted_as_the_plan_has_it() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        dims = range(draw.randint(1, 3))
        size, dilation = (tuple(draw.randint(1, most) for _ in dims) for most in (5, 3))
        padding = tuple((draw.randint(0, 9), draw.randint(0, 3)) for _ in dims)
        windows = Windows(size, (1,) * len(dims), dilation, padding)
        least = ((k - 1) * d + 1 - sum(p) for k, d, p in zip(size, dilation, padding, strict=True))
        lengths = tuple(max(1, length + draw.randint(0, 5)) for length in least)
        plan = shifts._plan(windows, lengths)
        positions = sum(math.prod(stop - start for start, stop, _ in product.parts) for product in plan.products)
        assert shifts._work(shifts._axes(windows, lengths)) == (len(plan.products), positions), (windows, lengths)


def test_no_plan_is_made_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a kernel as wide as a word's embedding has 51,360 pairs of taps, and each batch has another length."""
    monkeypatch.setattr(shifts, "_plan", lambda *_: pytest.fail("made a plan"))
    sliding = Windows((5, 64), (1, 1), (1, 1), ((0, 0), (0, 0)))
    assert not any(
        shift_pays(torch.Size((64, 1, words, 64)), sliding, 1, torch.device("cpu"), half=False)
        for words in range(20, 40)
    )
