"""What a communicator hands to its transport, seen in one process by transports that only pretend to have others."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import HorovodCommunicator
from kfac_optim.distributed import Broadcast, Communicator, share_gradients
from kfac_optim.distributed.packing import empty_for, packed, unpack


class Done:
    """An operation that has finished."""

    def wait(self) -> None:
        pass


class Recording(Communicator):
    """Rank 0 of two, the other of which has the same tensors; notes the sizes of what is sent."""

    def __init__(self, **options: Any) -> None:
        super().__init__(0, 2, **options)
        self.sent: list[int] = []

    def _start_sum(self, tensor: Tensor) -> Done:
        self.sent.append(tensor.nbytes)
        tensor.mul_(2)
        return Done()

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Done:
        self.sent.append(tensor.nbytes)
        return Done()


def test_what_is_packed_is_unpacked_whatever_its_strides() -> None:
    """A shard may have one row of a bias, or none; the bias is a column of a stack."""
    stack = torch.arange(42.0).view(2, 3, 7)
    sent = [stack[0, :1, -1], stack[1, :0, -1], stack[1, 1:, 2], stack[0].half(), torch.tensor(3, dtype=torch.int64)]
    received = [torch.zeros_like(stack)[0, :1, -1], *(torch.empty_like(t).contiguous() for t in sent[1:])]
    flat = empty_for(sent)
    flat.copy_(packed(sent))
    unpack(flat, received)
    for tensor, expected in zip(received, sent, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("numbers", [[4] * 6, [4, 4, 5, 3, 4, 4], [8, 4, 4, 8]])
def test_buckets_are_filled_to_the_last_byte_and_not_beyond(numbers: list[int]) -> None:
    tensors = [torch.full((n,), float(i)) for i, n in enumerate(numbers)]
    comm = Recording()
    comm.bucket_bytes = 32
    sums = list(comm.sum(tensors, "factors"))
    expected: list[int] = []
    for n in numbers:
        if not expected or expected[-1] + 4 * n > 32:
            expected.append(0)
        expected[-1] += 4 * n
    assert comm.sent == expected
    assert all(torch.equal(total, 2 * tensor) for total, tensor in zip(sums, tensors, strict=True))
    comm.sent.clear()
    comm.send([Broadcast(tensors, 0, (0, 1))], "decompositions")
    assert comm.sent == expected


def test_sums_have_buckets_of_one_type_and_broadcasts_of_several() -> None:
    tensors = [torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2)]
    comm = Recording()
    assert [total.dtype for total in comm.sum(tensors, "factors")] == [tensor.dtype for tensor in tensors]
    assert comm.sent == [16, 16, 8]
    comm.sent.clear()
    comm.send([Broadcast(tensors, 0, (0, 1))], "decompositions")
    assert comm.sent == [40]


def test_a_library_that_cannot_reduce_sums_for_all() -> None:
    """The owner's sums are yielded, and what really travelled is counted."""
    comm, tensors = Recording(), [torch.ones(2), torch.full((3,), 2.0), torch.ones(1)]
    first, second, _ = comm.sum(tensors, "factors", owners=[0, 0, 1])
    assert torch.equal(first, 2 * tensors[0]) and torch.equal(second, 2 * tensors[1])
    assert comm.sent == [20, 4], "one bucket for each owner"
    assert comm.traffic["factors"] == [24.0, 24.0]


class PretendHorovod(types.ModuleType):
    """As much of ``horovod.torch`` as the communicator asks for: rank 0 of two, the other one sends 7s and sums to 3x.

    What an operation does to its tensor is done when its handle is synchronized, and not before.
    """

    Sum = "sum"
    global_process_set = "all"

    def __init__(self) -> None:
        super().__init__("horovod.torch")
        self.pending: dict[int, Callable[[], Any]] = {}
        self.names: list[str] = []
        self.sets: list[Any] = []
        self.made: list[list[int]] = []

    def is_initialized(self) -> bool:
        return True

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _later(self, name: str, operation: Callable[[], Any]) -> int:
        assert name not in self.names
        self.names.append(name)
        self.pending[len(self.names)] = operation
        return len(self.names)

    def allreduce_async_(self, tensor: Tensor, *, name: str, op: str) -> int:
        assert op == self.Sum
        return self._later(name, lambda: tensor.mul_(3))

    def broadcast_async_(self, tensor: Tensor, root_rank: int, *, name: str, process_set: Any) -> int:
        self.sets.append(process_set)
        return self._later(name, lambda: tensor.fill_(7) if root_rank else tensor)

    def add_process_set(self, ranks: list[int]) -> str:
        self.made.append(ranks)
        return f"set of {ranks}"

    def synchronize(self, handle: int) -> None:
        self.pending.pop(handle)()


@pytest.fixture
def horovod(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendHorovod]:
    """A pretended Horovod in the place of the package."""
    package, module = types.ModuleType("horovod"), PretendHorovod()
    package.torch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", module)
    monkeypatch.setattr(HorovodCommunicator, "_sets", {})
    yield module


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_horovod_s_operations_are_waited_for_by_their_handles(horovod: PretendHorovod, bucket_bytes: int) -> None:
    comm = HorovodCommunicator(comm_dtype=torch.float16)
    comm.bucket_bytes = bucket_bytes
    assert (comm.rank, comm.world_size) == (0, 2)
    own = [torch.tensor([[1.0, -2.0]]), torch.tensor([[1e6, 0.5e6]])]
    for compressed in (False, True):
        for total, tensor in zip(comm.sum(own, "factors", compressed=compressed), own, strict=True):
            torch.testing.assert_close(total, 3 * tensor, rtol=1e-3, atol=0)
    received, kept = torch.zeros(3, dtype=torch.uint8), torch.arange(3)
    comm.send([Broadcast([received], 1, (0, 1)), Broadcast([kept], 0, (0, 1))], "decompositions")
    assert received.tolist() == [7, 7, 7]
    assert kept.tolist() == [0, 1, 2]
    assert horovod.sets == ["all", "all"]
    assert not horovod.pending


def test_horovod_makes_a_process_set_once_for_all_communicators(horovod: PretendHorovod) -> None:
    first, second = HorovodCommunicator(), HorovodCommunicator()
    for comm in (first, second):
        comm.prepare([(0, 1), (0, 2), (0, 2)])
    assert horovod.made == [[0, 2]]
    second.send([Broadcast([torch.ones(2)], 0, (0, 2))], "directions")
    assert horovod.sets == ["set of [0, 2]"]


def test_what_horovod_refuses_is_told_with_the_remedy(horovod: PretendHorovod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendHorovod, "add_process_set", None)
    with pytest.raises(RuntimeError, match=r"process set \(0, 2\).*set HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        HorovodCommunicator().prepare([(0, 2)])
    monkeypatch.setattr(PretendHorovod, "is_initialized", lambda self: False)
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        HorovodCommunicator()


class OutOfInputs(Communicator):
    """Rank 1 of two; rank 0 has inputs left, and broadcasts the given tensors."""

    bucket_bytes = 1

    def __init__(self, *sent: Tensor) -> None:
        super().__init__(1, 2)
        self.sent = list(sent)

    def _start_sum(self, tensor: Tensor) -> Done:
        tensor += torch.tensor([1.0, 0.0])
        return Done()

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Done:
        assert (source, members) == (0, (0, 1))
        tensor.copy_(self.sent.pop(0).view(-1).view(torch.uint8))
        return Done()


@pytest.mark.parametrize("exhausted", [True, False])
def test_a_rank_without_inputs_gets_the_gradients_of_the_others(exhausted: bool) -> None:
    """The first parameter has a gradient of old, the second has none, and neither has the third on the other rank."""
    parameters = [nn.Parameter(torch.zeros(2, 2)) for _ in range(3)]
    old = [torch.full((2, 2), 9.0), None, torch.full((2, 2), 9.0)]
    for p, g in zip(parameters, old, strict=True):
        p.grad = g
    new = [torch.arange(4.0).view(2, 2), -torch.arange(4.0).view(2, 2)]
    groups = [{"params": parameters, "lr": 0.5}]
    comm = OutOfInputs(torch.tensor([1, 1, 0], dtype=torch.uint8), torch.tensor([0.25], dtype=torch.float64), *new)
    if exhausted:
        share_gradients(comm, parameters, groups, exhausted=True)
        assert groups[0]["lr"] == 0.25
        assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [*(g.tolist() for g in new), None]
        assert not comm.sent
    else:  # both have inputs: nothing to share
        comm._start_sum = lambda tensor: [tensor.fill_(1.0), Done()][1]  # type: ignore[method-assign]
        share_gradients(comm, parameters, groups, exhausted=False)
        assert all(p.grad is g for p, g in zip(parameters, old, strict=True))
        assert len(comm.sent) == 4
