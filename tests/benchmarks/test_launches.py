"""``python -m benchmarks.launches``: what it counts, of programs whose kernels and waits can be counted by hand."""

import functools
import json
import subprocess
import sys
import textwrap

import pytest

from benchmarks.launches import __main__ as launches
from benchmarks.launches.device import load
from tests.helpers.compiler import needs_compiler

pytestmark = needs_compiler


# Loads the device and torch once and forks for each program: starting an interpreter takes longer than most of them.
SERVER = """
from benchmarks.launches import device
device.load()
import json, os, sys, torch, torch._dynamo
from benchmarks.launches.simulate import simulated
for line in sys.stdin:
    if os.fork() == 0:
        with simulated() as simulation:
            exec(json.loads(line))
            print(json.dumps(vars(simulation.take())))
        device.leave()
    if os.wait()[1] != 0:
        print("null", flush=True)
"""


@functools.cache
def server():
    """The process that forks; it ends with this one, which then closes its input."""
    return subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def counted(program):
    """Launches, waits, multiplications and peak bytes of a program on the simulated device, run in a new process."""
    process = server()
    process.stdin.write(json.dumps(textwrap.dedent(program)) + "\n")
    process.stdin.flush()
    found = json.loads(process.stdout.readline())
    assert found is not None, "the program failed; its traceback is on stderr"
    return found["launches"], found["waits"], found["flops"], found["peak"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        # zeros, a product with the transpose for free, relu (the peak), the sum, whose value is read
        (
            "x = torch.zeros(4, 8, device='cuda'); y = (x @ x.mT).relu(); float(y.sum())",
            (4, 1, 2 * 4 * 8 * 4, 128 + 64 + 64),
        ),
        # two tensors to the device, of which one waits; back at once; on the host nothing is counted
        ("x = torch.ones(2); x.cuda(); x.to('cuda', non_blocking=True).tolist(); (x * x).sum()", (2, 2, 0, 8)),
        # a list of tensors of one shape, and one with a tensor for each number
        (
            "x = [torch.zeros(n, device='cuda') for n in (2, 3)]; torch._foreach_mul_(x, 2.0)\n"
            "torch._foreach_mul_(x, [y.sum() for y in x])",
            (2 + 1 + 2 + 2, 0, 0, 8 + 12 + 4 + 4),
        ),
        # one of rows, which are contiguous, and one of columns, which are not
        (
            "x = torch.zeros(3, 2, device='cuda'); torch._foreach_mul_([*x], 2.0); torch._foreach_mul_([*x.mT], 2.0)",
            (1 + 1 + 2, 0, 0, 24),
        ),
        # Autograd's own thread is counted, too: two zeros, product, sum, ones, the weight's gradient (the peak)
        (
            "w = torch.zeros(4, 4, device='cuda', requires_grad=True); x = torch.zeros(2, 4, device='cuda')\n"
            "(x @ w).sum().backward()",
            (2 + 2 + 1 + 1, 0, 2 * 2 * (2 * 4 * 4), 64 + 32 + 4 + 4 + 64),
        ),
    ],
    ids=["product", "copies", "lists", "gaps", "backward"],
)
def test_counts_of_known_programs(program, expected):
    assert counted(program) == expected


# The package -------------------------------------------------------------------------------------------------------

STEPS = """
import kfac_optim
torch.manual_seed(0)
model = torch.nn.Sequential({layers}).cuda()
optimizer = kfac_optim.{cls}(model, lr=0.1, spread=0, factor_update_steps=10, inv_update_steps=1, {options})
def step():
    simulation.take()
    optimizer.zero_grad()
    model(torch.zeros({shape}, device="cuda")).square().mean().backward()
    {after_backward}
    optimizer.step()
for _ in range({steps}):
    step()
"""


def after_steps(layers, shape, *, cls="KFACSGD", steps=2, options="", after_backward="pass"):
    """Launches and waits of the last of some steps, each of which refreshes."""
    given = {"layers": layers, "shape": shape, "cls": cls, "steps": steps, "options": options}
    return counted(STEPS.format(**given, after_backward=after_backward))[:2]


@pytest.mark.slow
def test_a_refresh_waits_once_for_factors_of_nearly_one_size():
    """Beside the decompositions: are gradients finite, are decompositions, and which eigenvalues matter."""
    linear = "torch.nn.Linear({}, {}), "
    sizes = [(40, 41), (41, 39), (39, 20)]  # A has 41, 42 and 40 rows, G 41, 39 and 20
    layers = "".join(linear.format(*size) for size in sizes)
    assert after_steps(layers, (8, 40))[1] == 3 + 2
    assert after_steps(layers + "torch.nn.LayerNorm(20)", (8, 40))[1] == 3 + 2, "of 1 and 2 rows: no library"
    assert after_steps("torch.nn.Embedding(9, 20), ", "4, dtype=torch.int64")[1] == 3 + 1, "a diagonal is there"


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "options"), [("KFACSGD", "momentum=0.9, "), ("KFACAdam", "")])
def test_of_stacks_products_alone_take_launches_of_their_own(cls, options):
    """In the third step, which is stretched."""
    program = STEPS.replace(
        "factor_update_steps=10, inv_update_steps=1",
        "inv_update_steps=1000, factor_update_steps=lambda t: 1 if t < 2 else 999",
    )
    few, many = (
        "".join(f"torch.nn.Linear({8 * i}, {8 * i + 8}, bias=False), " for i in range(1, n + 1)) for n in (3, 9)
    )
    given = {"shape": (8, 8), "cls": cls, "steps": 3, "after_backward": "simulation.take()"}
    given["options"] = options + "damping=kfac_optim.OfLargest(0.01)"
    launches = [counted(program.format(layers=layers, **given))[0] for layers in (few, many)]
    assert launches[1] - launches[0] == 6 * 4


@pytest.mark.slow
def test_vectors_are_multiplied_by_their_trust_ratios_side_by_side():
    """``skip_layers``: what is left is the base class's own step."""
    options = {"cls": "KFACLAMB", "options": "skip_layers=('',)"}
    few, many = (
        after_steps("torch.nn.LayerNorm(6), " * n, (8, 6), after_backward="simulation.take()", **options)[0]
        for n in (4, 16)
    )
    assert few == many


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["BatchNorm2d(4)", "BatchNorm2d(4).eval()", "GroupNorm(2, 4)"])
def test_statistics_of_a_norm_layer_take_few_launches(norm: str) -> None:
    """The sum of g, the normalised input, its product with g and the sum of that."""
    program = f"""
        from kfac_optim import LayerOptions
        from kfac_optim.layers import FoundLayers
        module = torch.nn.{norm}.cuda()
        (layer,) = FoundLayers([module], LayerOptions()).layers
        x = torch.zeros(3, 4, 5, 5, device="cuda")
        observation = layer.observe(module, x, x, torch.float32)
        simulation.take()
        with torch.no_grad():
            layer.output_moment(module, x, observation.context)
    """
    assert counted(program)[0] == 4


# The command -------------------------------------------------------------------------------------------------------


def test_the_device_has_to_come_before_torch():
    with pytest.raises(RuntimeError, match="before torch"):
        load()


def counts(**launches_and_waits):
    """What the counting process would give: launches of the passes and of the step, and waits of the step, by kind."""
    part = {"seconds": 1e-3, "peak": 2**20, "launched_at": {"a": 3, "elsewhere": 9}, "waited_at": {}}
    return {
        kind: {
            "passes": {**part, "launches": passes, "waits": 0},
            "step": {**part, "launches": step, "waits": waits, "waited_at": {"b": waits}},
        }
        for kind, (passes, step, waits) in launches_and_waits.items()
    }


def test_shares_are_of_forward_and_backward():
    found = counts(base=(100, 10, 0), ordinary=(100, 40, 1), statistics=(250, 60, 1), refresh=(100, 340, 12))
    rows = {row["step of"]: row for row in launches.rows_of(found)}
    assert [row["share"] for row in rows.values()] == ["0.10", "0.40", "1.70", "3.00"]
    assert [row["waits"] for row in rows.values()] == [0, 1, 1, 12]
    assert launches.places_of(found["refresh"]) == [
        {"place": "a", "launches": 6, "waits": None},
        {"place": "b", "launches": 0, "waits": 12},
    ]


@pytest.mark.slow
def test_the_command(tmp_path):
    assert launches.main(["--smoke", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "main.json").read_text())
    for result in found["results"]:
        rows = {row["step of"]: row for row in result["rows"]}
        assert rows["base"]["passes"] == rows["ordinary"]["passes"] == rows["refresh"]["passes"]
        assert rows["base"]["step"] < rows["repeated"]["step"] < rows["ordinary"]["step"] < rows["refresh"]["step"]
        assert rows["statistics"]["passes"] > rows["ordinary"]["passes"]
        places = [place["place"] for place in result["places"]["refresh"]]
        assert len(places) >= 10 and "elsewhere" not in places
    assert "share" in (tmp_path / "main.txt").read_text()


def test_without_a_compiler_the_command_names_it(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit):
        launches.main(["--smoke"])
    assert "compiled by g++: install it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_group_costs_plain_parameters_no_launch():
    """As under DDP: that there could be shards makes no parameter one that is looked at on its own."""
    script = """
        import json
        from benchmarks.launches.count import count
        import torch.distributed as dist
        import torch.distributed.tensor

        alone = count("resnet8", None, "KFACSGD")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        among_ranks = count("resnet8", None, "KFACSGD")
        dist.destroy_process_group()
        kinds = ("ordinary", "repeated")
        print(json.dumps([[counts[kind]["step"]["launches"] for kind in kinds] for counts in (alone, among_ranks)]))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=180).stdout
    alone, among_ranks = json.loads(found.splitlines()[-1])
    assert among_ranks == alone
