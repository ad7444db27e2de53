"""The host and the device, under a communicator that sends nothing from the host, as NCCL.

A process of its own has a simulated CUDA device, whose tensors have numbers (:mod:`tests.helpers.accelerator`); all
cases run in it, and train as they do on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from kfac_optim import (
    KAISA,
    KFACSGD,
    Assignment,
    CurvatureEngine,
    EigenSolver,
    Graft,
    InverseSolver,
    LayerAssignment,
    LayerCost,
    LayerWise,
)
from kfac_optim.distributed import Broadcast, share_gradients
from kfac_optim.distributed.assignment import FactorPlace
from kfac_optim.layers import (
    FoundLayers,
    LayerOptions,
    RecurrentCall,
    convolution,
    moments,
    tensors_of,
    with_tensors,
)
from tests.helpers.compiler import needs_compiler
from tests.helpers.settings import OFTEN
from tests.helpers.training import train

noted: list[tuple[threading.Thread, str]] = []


class Noting:
    """Before a solver: notes in which thread, and with which precision of products, it decomposes on the device."""

    def decompose(self, factor: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        if factor.device.type == "cuda":
            noted.append((threading.current_thread(), torch.get_float32_matmul_precision()))
        decomposition: tuple[Tensor, ...] = super().decompose(factor, shift)  # type: ignore[misc]
        return decomposition


class NotingInverse(Noting, InverseSolver):
    """An inverse solver that notes."""


class NotingEigen(Noting, EigenSolver):
    """An eigen solver that notes."""


@dataclass(frozen=True)
class AllHere:
    """As ``FactorWise``, but all factors are decomposed here: the other rank is pretended, and decomposes none."""

    factors: FactorPlace = "replicated"

    def assign(self, costs: Sequence[LayerCost], world_size: int) -> Assignment:
        return Assignment((LayerAssignment((0, 0), (0, 1), self.factors),) * len(costs), (1.0,) * world_size)


OPTIONS: dict[str, Any] = {**OFTEN, "scaling": Graft(trust=1.0), "assignment": AllHere()}
STEPS = 7
SHAPE = (8, 2, 5, 5)


def make_net() -> nn.Sequential:
    """Convolutions, a norm layer and a head."""
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(4 * 3 * 3, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(device: str) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SHAPE, generator=random).to(device), torch.randint(3, SHAPE[:1], generator=random).to(device))
        for _ in range(STEPS)
    ]


def trained(device: str, place: Callable[[nn.Module], Any] | None = None, **options: Any) -> list[Tensor]:
    """The parameters after training under a communicator that refuses the host where there is a device.

    Args:
        device: Where to train.
        place: Called with the model after the optimizer has been built; None: the model is there before.
        **options: Of the optimizer; ``comm`` has those of the communicator.
    """
    from tests.helpers.accelerator import Mirrors

    comm = Mirrors("cpu" if device == "cuda" else None, **options.pop("comm", {}))
    model = make_net()
    if place is None:
        model.to(device)
    optimizer = KFACSGD(model, lr=0.05, momentum=0.9, communicator=comm, **{**OPTIONS, **options})
    if place is not None:
        place(model)
    train(model, optimizer, batches(device))
    optimizer.curvature.synchronize()
    assert set(comm.calls) >= {"sum"}
    return [p.detach().cpu() for p in model.parameters()]


def compare(place: Callable[[nn.Module], Any] | None = None, **options: Any) -> None:
    """Training on the device gives what it gives on the CPU."""
    for found, expected in zip(trained("cuda", place, **options), trained("cpu", **options), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def to_empty(model: nn.Module) -> None:
    values = {name: value.clone() for name, value in make_net().state_dict().items()}
    model.to("meta").to_empty(device="cuda")
    model.load_state_dict(values)


def compare_engines() -> None:
    """An engine in front of a foreign optimizer, of a model that moves before its first step."""
    from tests.helpers.accelerator import Mirrors

    results = []
    for device in ("cuda", "cpu"):
        model = make_net()
        comm = Mirrors("cpu" if device == "cuda" else None)
        engine = CurvatureEngine(model, communicator=comm, scaling=None, assignment=AllHere())
        optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.01)
        train(model, optimizer, batches(device), before_step=engine.precondition_)
        results.append([p.detach().cpu() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def tell_ranks_apart() -> None:
    """Ranks that have built something else say so instead of failing in a collective."""
    from tests.helpers.accelerator import Mirrors

    class Other(Mirrors):
        def _start_sum(self, tensor: Tensor) -> Any:
            tensor.add_(1)  # whatever the other rank has, it is something else
            return self._carry(tensor, "sum")

    optimizer = KFACSGD(make_net().to("cuda"), lr=0.1, communicator=Other("cpu"))
    try:
        optimizer.curvature.synchronize()
    except RuntimeError as error:
        assert "No backend" not in str(error), error
    else:
        raise AssertionError("no error")


def decompose_in_the_background() -> None:
    """TF32 is off in the worker's thread, unless the solver doesn't multiply; then the model's products keep it."""
    for solver, expected in ((NotingInverse(), "highest"), (NotingEigen(), "high")):
        noted.clear()
        torch.set_float32_matmul_precision("high")
        compare(solver=solver, spread=2, inv_update_steps=4)
        in_background = {found for thread, found in noted if thread is not threading.main_thread()}
        assert in_background == {expected}, noted
        assert torch.get_float32_matmul_precision() == "high"


def share() -> None:
    """Uneven inputs, on a model that has moved since the optimizer was built."""
    from tests.helpers.accelerator import Mirrors

    model, comm = make_net(), Mirrors("cpu")
    optimizer = KFACSGD(model, lr=0.1, communicator=comm)
    model.to("cuda")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    share_gradients(comm, optimizer.param_groups[0]["params"], optimizer.param_groups, exhausted=True)
    assert "broadcast" in comm.calls


def carry() -> None:
    """All verbs, of tensors on the host, on the device, and of several dtypes."""
    from tests.helpers.accelerator import Mirrors

    for dtype in (None, torch.float16, torch.bfloat16, torch.float64):
        comm = Mirrors("cpu", comm_dtype=dtype)
        comm.use_device(torch.device("cuda", 0))
        for device in ("cpu", "cuda"):
            given = [torch.full((2, 3), 1.5, device=device), torch.full((), 2.0, dtype=torch.float64, device=device)]
            sums = list(comm.sum(given, "factors", compressed=True))
            assert [total.device for total in sums] == [each.device for each in given]
            assert [total.tolist() for total in sums] == [[[3.0] * 3] * 2, 4.0]
            owned, _ = comm.sum(given, "factors", owners=[0, 1], compressed=True)
            assert owned.tolist() == [[3.0] * 3] * 2
            room = [torch.zeros_like(tensor) for tensor in given]
            comm.exchange([(1, tensor) for tensor in given], [(1, tensor) for tensor in room], "directions")
            assert [tensor.tolist() for tensor in room] == [[[1.5] * 3] * 2, 2.0]
            for source, expected in ((0, 1.5), (1, 0.0)):
                comm.send([Broadcast(given[:1], source, (0, 1))], "decompositions")
                assert given[0].tolist() == [[expected] * 3] * 2
        assert {*comm.calls} >= {"sum", "reduce", "exchange", "broadcast"}


def multiply_half_precision() -> None:
    """Rows in half precision are multiplied as they are, which gives the moments of their numbers."""
    for module, shape in ((nn.Linear(6, 5), (7, 3, 6)), (nn.Conv2d(2, 4, 3, padding=1), (3, 2, 9, 9))):
        for shifted in (False, True):
            a = torch.randn(shape).bfloat16()
            output = module(a.float())
            g = torch.randn_like(output).bfloat16()
            found = []
            for device in ("cuda", "cpu"):
                (layer,) = FoundLayers([module], LayerOptions()).layers
                with patch.object(convolution, "shift_pays", lambda *_, chosen=shifted, **__: chosen):
                    seen = layer.observe(module, a.to(device), output.to(device), torch.float32)
                rows = layer.multiplicand(g.to(device), torch.float32)
                assert rows.dtype == (
                    torch.bfloat16 if device == "cuda" and moments._SUMS_IN_FLOAT32 else torch.float32
                )
                found.append([seen.a.cpu(), layer.output_moment(module, rows, seen.context).cpu()])
            for moment, expected in zip(*found, strict=True):
                torch.testing.assert_close(moment, expected, rtol=1e-5, atol=1e-5)


def go_back_through_time() -> None:
    """The indices of packed sequences are made on the CPU. Torch has no recurrent operation for such devices."""
    given = pack_padded_sequence(torch.randn(5, 4, 3), torch.tensor([2, 5, 1, 5]), enforce_sorted=False)
    for cls in (nn.LSTM, nn.GRU):
        found = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            module = cls(3, 4, bidirectional=True)
            with torch.no_grad():
                output = module(given)
            there = [tensor.to(device) for tensor in tensors_of(output)]
            its_output = with_tensors(output, iter(there))
            call = RecurrentCall(module.to(device), given.to(device), None, its_output, torch.float32)
            found.append([side.cpu() for of_layer in call.rows(there).values() for side in of_layer])
        torch.testing.assert_close(*found)


def streams_wait_for_each_other() -> None:
    """Before a job its stream waits for the model's; before its results are used the model's waits, and keeps them."""
    from tests.helpers.accelerator import CURRENT, EVENTS

    EVENTS.clear()
    trained("cuda", spread=2, inv_update_steps=4)
    side = {other for what, stream, other in EVENTS if what == "wait" and stream is CURRENT}
    assert len(side) == 1 and CURRENT not in side
    before = [what for what, stream, _ in EVENTS if what == "wait" and stream in side]
    after = [i for i, (what, stream, _) in enumerate(EVENTS) if what == "wait" and stream is CURRENT]
    assert len(before) == len(after) > 0
    for i in after:  # eigenvalues and eigenvectors
        assert EVENTS[i + 1 : i + 3] == [("record", CURRENT, CURRENT)] * 2


CASES: dict[str, Callable[[], Any]] = {
    "streams wait for each other": streams_wait_for_each_other,
    "the verbs": carry,
    "half precision": multiply_half_precision,
    "back through time": go_back_through_time,
    "built on the device": compare,
    "moved after the optimizer was built": lambda: compare(lambda model: model.to("cuda")),
    "built on meta": lambda: compare(to_empty),
    "nothing to precondition": lambda: compare(lambda model: model.to("cuda"), skip_layers=[".*"]),
    "layer-wise": lambda: compare(assignment="layer-wise"),
    "layer-wise, factors shared out": lambda: compare(assignment=LayerWise("sharded")),
    "factor-wise, factors shared out": lambda: compare(to_empty, assignment=AllHere("sharded"), inv_update_steps=4),
    "groups of ranks": lambda: compare(assignment=KAISA(grad_worker_fraction=0.5)),
    "inverse, float16 on the wire": lambda: compare(solver="inverse", comm={"comm_dtype": torch.float16}),
    "in the background": decompose_in_the_background,
    "part of the batch, spread": lambda: compare(spread=2, inv_update_steps=4, factor_batch_fraction=0.5),
    "an engine alone": compare_engines,
    "ranks that differ": tell_ranks_apart,
    "Join": share,
}


def run_all() -> None:
    """Prints what became of each case: nothing, or a traceback."""
    from tests.helpers.accelerator import devices

    outcomes = {}
    for name, case in CASES.items():
        try:
            with devices():
                case()
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    code = "from tests.helpers.accelerator import device; from tests.distributed import test_devices\n"
    code += "test_devices.run_all()\ndevice.leave()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_host_and_device(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]
