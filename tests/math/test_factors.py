"""Storage of factors: one triangle of each matrix, what belongs to which pair, and what is folded into the averages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kfac_optim.averages import Unpooled, fold_, traces
from kfac_optim.factors import FactorSpec, pack, read, unpack
from tests.helpers.compare import assert_near

pytestmark = pytest.mark.usefixtures("float64")


@example(n=1025, shape=())  # not by an index
@given(n=st.integers(1, 40), shape=st.sampled_from([(), (1,), (3,), (2, 3)]))
def test_every_entry_is_packed_once_and_comes_back(n: int, shape: tuple[int, ...]) -> None:
    matrix = torch.randn(*shape, n, n)
    matrix = matrix + matrix.mT
    packed = pack(matrix)
    assert packed.shape == (*shape, n * (n + 1) // 2)
    rows, columns = torch.tril_indices(n, n)
    assert torch.equal(packed.sort(-1).values, matrix[..., rows, columns].sort(-1).values)
    assert torch.equal(unpack(packed, n), matrix)


@given(pairs=st.integers(1, 4), blocks=st.integers(1, 4))
def test_blocks_of_a_pair_are_neighbours(pairs: int, blocks: int) -> None:
    """As in ``[p b, m, m]``: first those of the first pair."""
    spec = FactorSpec(pairs, 3 * blocks, blocks=blocks)
    assert spec.for_blocks(torch.arange(pairs)).tolist() == [pair for pair in range(pairs) for _ in range(blocks)]
    values = torch.randn(pairs * blocks)
    largest = [max(values[blocks * pair : blocks * (pair + 1)].tolist()) for pair in range(pairs)]
    assert spec.largest_of_blocks(values).tolist() == largest


@given(data=st.data())
def test_traces_of_packed_factors(data: st.DataObject) -> None:
    sizes = st.tuples(st.integers(1, 4), st.integers(1, 7), st.booleans(), st.just(1))
    blocks = st.tuples(st.integers(1, 3), st.integers(4, 9), st.just(False), st.integers(2, 4))
    specs = [FactorSpec(*size) for size in data.draw(st.lists(sizes | blocks, min_size=1, max_size=4))]
    matrices = [torch.rand(spec.shape, dtype=torch.float64) for spec in specs]
    matrices = [m if spec.diagonal else m @ m.mT for spec, m in zip(specs, matrices, strict=True)]
    wanted = [float((m if s.diagonal else m.diagonal(0, -2, -1)).sum()) for s, m in zip(specs, matrices, strict=True)]
    assert traces(specs, [s.pack(m) for s, m in zip(specs, matrices, strict=True)]).tolist() == pytest.approx(wanted)


PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def some_sum(spec: FactorSpec, dtype: torch.dtype, count: int) -> Tensor:
    """A packed sum of moments, of which some matrices are small, far below the range of float16, or zero."""
    sizes = torch.tensor([1.0, 1e-12, 0.0]).repeat(spec.matrices)[: spec.matrices, None]
    numbers = torch.rand(spec.matrices, spec.packed_numel // spec.matrices) * sizes * count
    return numbers.to(torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@given(data=st.data())
def test_averages_are_sums_divided_by_their_counts(dtype: torch.dtype, data: st.DataObject) -> None:
    """``S <- xi S + sum``, ``w <- xi w + count``, of several averages in one call; one is on another rank."""
    specs = [FactorSpec(3, 4), FactorSpec(3, 4), FactorSpec(2, 5, diagonal=True), FactorSpec(1, 3)]
    averages = [spec.empty(dtype, torch.device("cpu"), kept=i != 3) for i, spec in enumerate(specs)]
    sums, weights = [spec.zeros(torch.float64, torch.device("cpu")) for spec in specs], [0.0] * len(specs)
    steps = data.draw(st.integers(1, 4))
    for _ in range(steps):
        counts = [data.draw(st.sampled_from([0, 1, 5])) for _ in specs]
        decays = [data.draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])) for _ in specs]
        moments = [some_sum(spec, dtype, count) for spec, count in zip(specs, counts, strict=True)]
        updates = map(Unpooled, decays, counts)
        new = [None if i == 3 else moment.clone() for i, moment in enumerate(moments)]
        fold_(list(zip(averages, updates, new, strict=True)))
        for i, (count, decay, moment) in enumerate(zip(counts, decays, moments, strict=True)):
            if count:
                sums[i] = decay * sums[i] + moment
                weights[i] = decay * weights[i] + count
    assert [float(average["weight"]) for average in averages] == pytest.approx(weights)
    assert "value" not in averages[3]
    for average, total, weight in zip(averages[:3], sums, weights, strict=False):
        assert average["value"].dtype is dtype
        for found, expected in zip(read(average).double(), total / (weight or 1.0), strict=True):
            assert_near(found, expected, rel=4 * steps * torch.finfo(dtype).eps, scale=0.0)
