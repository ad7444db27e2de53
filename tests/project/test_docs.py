"""The code of README.rst and of the pages under docs runs; "Extending"'s examples compute what the package's own do.

Blocks of a page run in order, in one namespace that starts with the names of README's complete script. A comment before
a block changes that: ``.. ci: ranks`` runs it on two processes, ``.. ci: skip REASON`` not at all.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import os
import re
import socket
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import kfac_optim
from kfac_optim import KFACSGD, register_layer
from kfac_optim.common import machines
from kfac_optim.layers import LinearLayer
from tests.helpers.compare import (
    assert_all_near,
    assert_applied,
    assert_near,
    assert_same_factors,
    assert_same_weights,
    values,
)
from tests.helpers.pages import ROOT, blocks
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import Oracle, apply, averaged, backward, squared_error
from tests.helpers.settings import EXACT, FLOAT64, OFTEN, damping_of
from tests.helpers.training import make_model, train
from tests.helpers.versions import needs_sharding_on_cpus

PAGES = [ROOT / "README.rst", *sorted((ROOT / "docs").rglob("*.rst"))]
EXTENDING = ROOT / "docs" / "extending.rst"
SHELL = {"main", "tests", "install", "checks"}  # what .ci/run takes from the pages
MAX_LINES = 30
README_LIMITS = (250, 1600)  # lines, words
Outcome = tuple[list[Tensor], list[tuple[int, ...]], float]
LOSS = averaged(squared_error, "batch")


def run(page: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Executes the Python blocks of a page that have no mark, in a copy of ``names``."""
    namespace = {**names, "__name__": page.stem}
    for block in blocks(page):
        if block.language == "python" and not block.mark:
            code = "\n" * (block.line - 1) + block.code  # so that a traceback has the page's line numbers
            exec(compile(code, str(page), "exec", dont_inherit=True), namespace)
    return namespace


def complete_script() -> dict[str, Any]:
    """The names that README's complete script leaves behind."""
    script = next(block for block in blocks(ROOT / "README.rst") if block.language == "python" and not block.mark)
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(compile(script.code, "README.rst", "exec", dont_inherit=True), namespace)
    return namespace


@functools.cache
def extending() -> dict[str, Any]:
    """The names that the examples of docs/extending.rst define."""
    return run(EXTENDING, {})


def with_code(mark: str) -> list[Any]:
    """The pages that have a Python block with a mark, as parameters of a test."""
    marked = {page: [b.code for b in blocks(page) if b.language == "python" and b.mark == mark] for page in PAGES}
    shards = [needs_sharding_on_cpus]
    return [
        pytest.param(page, id=page.stem, marks=shards if any("fully_shard(" in code for code in codes) else ())
        for page, codes in marked.items()
        if codes
    ]


def test_every_mark_is_known() -> None:
    for page in PAGES:
        for block in blocks(page):
            known = block.mark in {"", "ranks"} or re.match("skip .", block.mark)
            assert known if block.language == "python" else block.mark in {"", *SHELL}, f"{page}:{block.line}"


def test_readme_can_be_finished() -> None:
    text = (ROOT / "README.rst").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LIMITS[0] and len(text.split()) <= README_LIMITS[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("page", with_code(""))
def test_the_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    namespace = run(page, {} if page.stem == "README" else complete_script())
    if "model" in namespace:
        assert all(bool(p.isfinite().all()) for p in namespace["model"].parameters())


@pytest.mark.slow
def test_the_table_of_llamas_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "distributed.rst"
    (block,) = (block for block in blocks(page) if "def llama(" in block.code)
    names: dict[str, Any] = {}
    exec(compile(block.code, str(page), "exec", dont_inherit=True), names)
    printed = [re.findall(r"([\d,]+\.\d) GiB", line) for line in capsys.readouterr().out.splitlines()]
    table = page.read_text(encoding="utf-8").partition("Models of Llama's shapes")[2].partition("max_factor_dim")[0]
    rows = [re.findall(r"[\d,]+\.\d", row) for row in table.splitlines() if re.match(r"\d+B, ", row)]
    # One column of the table has the snapshots and the local sums, which are as large as each other.
    assert len(rows) == 8
    for (factors, both, *rest), (in_code, snapshots, local, *others) in zip(rows, printed, strict=True):
        assert (factors, rest) == (in_code, others)
        assert float(both) == pytest.approx(float(snapshots.replace(",", "")) + float(local), abs=0.11)

    # By hand: packed triangles of q, k, v, out (4096 rows; 1024 of keys and values), of gate, up and down (14,336 rows
    # in two blocks of 7,168), and norms, vocabulary and embedding, whose factors are diagonal or 1 x 1.
    def packed(n: int) -> int:
        return n * (n + 1) // 2

    width, keys, hidden = packed(4096), packed(1024), 2 * packed(7168)
    numbers = 32 * (4 * width + 2 * (width + keys) + 3 * (width + hidden)) + 65 * 2 * 4096 + 2 * (128_256 + width)
    model = names["llama"](32, 4096, 14_336)
    assert kfac_optim.memory_estimate(model, world_size=256)["factors"] == 4 * numbers


def run_as_a_script(rank: int, world_size: int, code: str, port: int) -> None:
    """Executes what ``torchrun`` would start, with the environment that it would set."""
    dist.barrier()  # the other has connected
    dist.destroy_process_group()  # the code makes its own
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    exec(compile(code, "train.py", "exec", dont_inherit=True), {"__name__": "__main__"})


@pytest.mark.fast("README")
@pytest.mark.parametrize("page", with_code("ranks"))
def test_the_blocks_for_several_processes_run_on_two(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.mark == "ranks":
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            folder = f"import os; os.chdir({str(tmp_path)!r})"  # some write files
            run_ranks(2, run_as_a_script, "\n" * (block.line - 2) + f"{folder}\n{block.code}", port)


def test_every_place_that_the_method_page_names_exists() -> None:
    """``file``, ``name``, ``name``: a file of the repository, and names in that module."""
    text = (ROOT / "docs" / "method.rst").read_text(encoding="utf-8")
    places = re.findall(r"``((?:kfac_optim|tests)/[\w/]+\.py)``((?:,\s+``[\w.]+``)*)", text)
    assert len(places) > 20
    for path, names in places:
        assert (ROOT / path).is_file(), path
        for name in re.findall(r"``([\w.]+)``", names):
            functools.reduce(getattr, name.split("."), importlib.import_module(path[:-3].replace("/", ".")))


def test_every_module_that_the_pages_run_exists() -> None:
    """``python -m name``."""
    names = {name for page in PAGES for name in re.findall(r"python -m ([\w.]*\w)", page.read_text(encoding="utf-8"))}
    assert len(names) > 8
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    assert not missing


def test_an_extension_is_short() -> None:
    for block in blocks(EXTENDING):
        assert len([line for line in block.code.splitlines() if line]) < MAX_LINES, block.line


# A layer type --------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A net around three blocks that are either the page's layer or a grouped convolution of one tap."""

    def __init__(self, make_blocks: Any) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 12), nn.Linear(6, 3)
        self.blocks = make_blocks()

    def forward(self, x: Tensor) -> Tensor:
        """From ``[n, t, 5]`` to ``[n, 3]``."""
        h = torch.tanh(self.stem(x))
        grouped = isinstance(self.blocks, nn.Conv1d)
        h = self.blocks(h.mT).mT if grouped else self.blocks(h)
        return self.head(torch.tanh(h).mean(1))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "frozen bias"])
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
def test_the_layer_equals_a_grouped_convolution(weight_sharing: str, bias: bool) -> None:
    block_linear = extending()["BlockLinear"]
    new, old = Blocks(lambda: block_linear(3, 4, 2)), Blocks(lambda: nn.Conv1d(12, 6, 1, groups=3))
    state = {name: value.reshape(old.state_dict()[name].shape) for name, value in new.state_dict().items()}
    old.load_state_dict(state)
    for model in (new, old):
        model.blocks.bias.requires_grad_(bias)
    options: dict[str, Any] = {**EXACT, "lr": 0.1, "damping": 0.1, "weight_sharing": weight_sharing}
    optimizers = [KFACSGD(model, **options) for model in (new, old)]
    assert "BlockLinear, " + weight_sharing in str(optimizers[0].curvature)
    start = values(new)
    for _ in range(4):
        inputs, classes = torch.randn(7, 3, 5), torch.randint(3, (7,))
        for model, optimizer in zip((new, old), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
    assert_same_factors(*optimizers)
    for p, q, before in zip(new.parameters(), old.parameters(), start, strict=True):
        assert_near(p.detach(), q.detach().reshape(p.shape), rel=1e-10)
        assert torch.equal(p, before) != p.requires_grad


WRONG_ROWS: dict[str, tuple[Any, str]] = {
    "input_rows": (lambda self, module, a, output: iter([a.reshape(len(a), -1, 1, 12)]), "3, 4"),
    "output_rows": (lambda self, module, g, context: g.reshape(len(g), -1, 1, self.d_out), "3, 2"),
    "structure": (lambda self, module: tuple(self.weight_shape), "3, 3"),  # without the bias's column
}


@pytest.mark.parametrize("method", WRONG_ROWS)
def test_other_rows_than_a_layer_has_said_are_refused(method: str) -> None:
    """Those of the output, whose moments are one for all pairs, would be added to each without a word."""
    names, (wrong, rows) = extending(), WRONG_ROWS[method]
    module_type = type("OwnLinear", (names["BlockLinear"],), {})
    register_layer(module_type)(type("OwnLayer", (names["BlockLinearLayer"],), {method: wrong}))
    model = Blocks(lambda: module_type(3, 4, 2))
    optimizer = KFACSGD(model, lr=0.1)
    F.cross_entropy(model(torch.randn(7, 3, 5)), torch.randint(3, (7,))).backward()
    named = "input_rows" if method == "structure" else method
    with pytest.raises(ValueError, match=rf"'blocks': the rows of OwnLayer.{named}\(\) .*positions, {rows}\]"):
        optimizer.step()


class ScaledLinear(nn.Linear):
    """A Linear whose weight is scaled when it is used."""

    scale = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


@register_layer(ScaledLinear)
class ScaledLinearLayer(LinearLayer):
    """As the page says: only the input differs from a Linear."""

    def input_rows(self, module: Any, a: Tensor, output: Tensor) -> Any:
        return super().input_rows(module, a * module.scale, output)


class Scale(nn.Module):
    """In front of a plain Linear the same function, without a layer type of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * ScaledLinear.scale


@pytest.mark.usefixtures("double")
def test_a_linear_whose_input_differs() -> None:
    new, old = nn.Sequential(ScaledLinear(4, 3)), nn.Sequential(Scale(), nn.Linear(4, 3))
    old[1].load_state_dict(new[0].state_dict())
    optimizers = [KFACSGD(model, **EXACT | {"lr": 0.1, "damping": 0.1}) for model in (new, old)]
    for _ in range(3):
        inputs, classes = torch.randn(7, 4), torch.randint(3, (7,))
        for model, optimizer in zip((new, old), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
    for name, factor, wanted in zip(
        "AG", *(o.curvature.factors(o.curvature.layers[0]) for o in optimizers), strict=True
    ):
        assert_near(factor, wanted, name)
    assert_same_weights(new[0], old[1])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
def test_two_layers_of_one_module_equal_two_linears(weight_sharing: str) -> None:
    low_rank = extending()["LowRank"](5, 2, 4)
    linears = nn.Sequential(OrderedDict(down=nn.Linear(5, 2, bias=False), up=nn.Linear(2, 4, bias=False)))
    linears.load_state_dict({f"{name}.weight": value for name, value in low_rank.state_dict().items()})
    new, old = nn.Sequential(low_rank, nn.Tanh()), nn.Sequential(linears, nn.Tanh())
    options: dict[str, Any] = {**EXACT, "lr": 0.1, "damping": 0.1, "weight_sharing": weight_sharing}
    optimizers = [KFACSGD(model, **options) for model in (new, old)]
    for _ in range(4):
        inputs, classes = torch.randn(7, 3, 5), torch.randint(4, (7,))
        for model, optimizer in zip((new, old), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs).mean(1), classes).backward()
            optimizer.step()
    assert_same_factors(*optimizers)
    for p, q in zip(new.parameters(), old.parameters(), strict=True):
        assert_near(p.detach(), q.detach(), rel=1e-10)


def test_two_layers_of_one_name_are_refused() -> None:
    """They would be one in the state of an engine."""
    names = extending()
    module_type = type("OwnLowRank", (names["LowRank"],), {})
    register_layer(module_type)(lambda name, *given: [names[f"{side}Layer"](name, *given) for side in ("Down", "Up")])
    with pytest.raises(ValueError, match="layers of '0' .OwnLowRank. are named '0', '0': .* each a name of its own"):
        KFACSGD(nn.Sequential(module_type(5, 2, 4)), lr=0.1)


# A solver ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
@pytest.mark.parametrize("damping", [1e-4, 1e-2, 1.0])
def test_the_solver_equals_explicit_inverses(damping: float, relative: bool) -> None:
    """Dense and diagonal factors, and the blocks of a norm layer."""
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    oracle = Oracle(copy.deepcopy(model))
    passes = [((torch.randint(5, (6, 3)),), torch.randn(6, 2))]
    oracle.refresh(oracle.observe(passes, LOSS))
    options = EXACT | {"damping": damping_of(damping, relative), "solver": extending()["solver"]}
    optimizer = KFACSGD(model, **options)
    backward(model, passes, LOSS)
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = gradients[name].clone()
    assert len(oracle.layers) == 4
    directions = oracle.directions(gradients, damping, relative, "inverse")
    assert_applied(oracle, apply(model, optimizer), directions, gradients)


def matrix(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat((weight, bias[:, None]), dim=1).detach().clone()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("machine", ["cpu", "accelerator"])
@pytest.mark.parametrize("negligible", [0.0, 0.01])
def test_with_leading_eigenvalues_the_others_count_as_zero(
    negligible: float, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "machine_of", lambda _: machine)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    solver = extending()["Leading"](negligible, count=3)
    optimizer = KFACSGD(model, **EXACT | {"lr": 0.3, "damping": 1e-3, "solver": solver})
    backward(model, [((torch.randn(9, 6),), torch.randn(9, 2))], LOSS)
    before = [matrix(*layer.parameters) for layer in optimizer.curvature.layers]
    optimizer.step()
    for layer, old in zip(optimizer.curvature.layers, before, strict=True):
        kept = []
        for (factor,) in optimizer.curvature.factors(layer):
            values, vectors = torch.linalg.eigh(factor)
            values[:-3] = 0
            kept.append(vectors @ values.diag() @ vectors.T)
        fisher, gradient = torch.kron(kept[1], kept[0]), matrix(*(p.grad for p in layer.parameters))
        direction = torch.linalg.solve(fisher + 1e-3 * torch.eye(len(fisher)), gradient.flatten())
        moved = (matrix(*layer.parameters) - old).flatten()
        assert_near(moved, -0.3 * direction, layer.name, rel=1e-10 if negligible == 0 else negligible)


# A strategy ----------------------------------------------------------------------------------------------------------


def with_strategy(rank: int, world_size: int, ranks_per_node: int | None) -> Outcome:
    """Parameters after some steps; who preconditions each layer; bytes of directions per step."""
    strategy = {} if ranks_per_node is None else {"assignment": extending()["NodeWise"](ranks_per_node)}
    model = make_model().double()
    optimizer = KFACSGD(model, lr=0.1, momentum=0.9, **OFTEN, **FLOAT64, **strategy)
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    train(wrapped, optimizer, range(6), rank=rank, world_size=world_size)
    curvature = optimizer.curvature
    traffic = curvature.report()["traffic"].get("directions", {"sent": 0.0})["sent"]
    return values(model), [layer.gradient_workers for layer in curvature.stages.ranks.assignment.layers], traffic


def with_strategies(rank: int, world_size: int) -> list[Outcome]:
    return [with_strategy(rank, world_size, ranks_per_node) for ranks_per_node in (1, 2)]


@pytest.mark.slow
def test_the_strategy_trains_as_one_process() -> None:
    # A script for four runs on one, too.
    expected, workers, _ = with_strategy(0, 1, ranks_per_node=4)
    assert set(workers) == {(0,)}
    for p, q in zip(expected, with_strategy(0, 1, None)[0], strict=True):
        assert torch.equal(p, q)
    ranks = run_ranks(2, with_strategies)
    for one_each, both in ranks:
        assert_all_near([one_each[0], both[0]], expected)
        assert set(one_each[1]) == {(0,), (1,)} and set(both[1]) == {(0, 1)}
        assert one_each[2] > 0 and both[2] == 0  # only between nodes do preconditioned gradients travel


# A communicator ------------------------------------------------------------------------------------------------------


def with_communicator(rank: int, world_size: int) -> tuple[list[tuple[str, int]], dict[str, list[float]]]:
    communicator, model = extending()["Noting"](), make_model()
    optimizer = KFACSGD(model, lr=0.1, **OFTEN, communicator=communicator, assignment="layer-wise")
    train(DistributedDataParallel(model), optimizer, range(4), rank=rank, world_size=world_size)
    return communicator.noted, communicator.traffic


@pytest.mark.slow
def test_the_communicator_sees_all_traffic() -> None:
    for noted, traffic in run_ranks(2, with_communicator):
        sums, broadcasts = (sum(n for name, n in noted if name == kind) for kind in ("sum", "broadcast"))
        assert sums > 0 and broadcasts > 0
        # On two ranks, a sum is sent and received; a broadcast one or the other.
        assert 2 * sums + broadcasts == sum(map(sum, traffic.values()))


# A scaling, a sampled Fisher -----------------------------------------------------------------------------------------


def test_the_scaling_bounds_steps_and_the_fisher_samples() -> None:
    model = make_model()
    fisher = extending()["fisher"]
    options = {"scaling": extending()["scaling"], "fisher": fisher, "precondition": "gradient"}
    optimizer = KFACSGD(model, lr=0.1, **OFTEN, **options)
    before = dict(zip(model.parameters(), values(model), strict=True))
    train(model, optimizer, range(1))
    for layer in optimizer.curvature.layers:
        moved = sum(float((p.detach() - before[p]).square().sum()) for p in layer.parameters)
        gradient = sum(float(p.grad.square().sum()) for p in layer.parameters)
        assert 0 < moved <= (0.1 * 0.5) ** 2 * gradient * (1 + 1e-4)
    output = torch.zeros(1000, 2)
    assert set(fisher.sample_gradient(output, torch.Generator().manual_seed(0)).unique().tolist()) == {-1.0, 1.0}
