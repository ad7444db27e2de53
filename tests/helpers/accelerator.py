"""CUDA tensors with numbers, computed on the CPU, and a communicator that carries nothing else, as NCCL.

Only for processes that have not imported torch yet: :func:`benchmarks.launches.device.load` comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from benchmarks.launches import device

device.load()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from kfac_optim.distributed import Communicator  # noqa: E402

CUDA = torch.device("cuda", 0)
TRANSFERS = ("_to_copy", "copy_")
OF_HALF_PRECISION = getattr(torch.ops.aten.bmm, "dtype", None)  # products in another type, which CPUs lack


class OnDevice(Tensor):
    """A tensor that says it is on the device; its numbers are in ``held``, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        like = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: OnDevice = Tensor._make_wrapper_subclass(cls, held.shape, device=CUDA, **like)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        """The numbers."""
        return self.cpu().tolist()

    def record_stream(self, stream: Stream) -> None:
        """There is one order of everything; notes that memory is to stay until the stream is done with it."""
        EVENTS.append(("record", stream, stream))


class Stream:
    """Runs what it is given at once, and notes who would have waited for whom."""

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        """There is nothing to wait for."""
        EVENTS.append(("wait", self, other))


CURRENT = Stream()
EVENTS: list[tuple[str, Stream, Stream]] = []  # what was asked, of which stream, and for which other one


class Device(TorchDispatchMode):
    """Makes what is created on "cuda" an :class:`OnDevice`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator, on the device if one of its tensors is or it says so.

    Raises:
        RuntimeError: If tensors of the host, but for numbers, are mixed with those of the device.
    """
    name, leaves = func._schema.name.split("::")[1], tree_leaves((args, kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    onto = kwargs.get("device")
    on_device = (
        any(isinstance(leaf, OnDevice) for leaf in inputs) if onto is None else torch.device(onto).type == "cuda"
    )
    host = [leaf for leaf in inputs if not isinstance(leaf, OnDevice) and leaf.dim() > 0]
    if host and any(isinstance(leaf, OnDevice) for leaf in inputs) and name not in TRANSFERS:
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
    if name == "copy_":
        on_device = isinstance(args[0], OnDevice)
    inner = {key: "cpu" if key == "device" and value is not None else value for key, value in kwargs.items()}
    plain_args, plain = tree_map(lambda x: x.held if isinstance(x, OnDevice) else x, (args, inner))
    if func is OF_HALF_PRECISION:
        result = torch.bmm(*(factor.to(plain_args[2]) for factor in plain_args[:2]))
    else:
        result = func(*plain_args, **plain)
    if name in TRANSFERS and inputs and isinstance(inputs[0], OnDevice) != on_device:
        result = result.clone() if result is plain_args[0] else result
    if on_device:
        result = tree_map(lambda x: OnDevice(x) if isinstance(x, Tensor) else x, result)
    return return_and_correct_aliasing(func, args, dict(kwargs), result)


class Done:
    """An operation that has finished."""

    def wait(self) -> None:
        """Returns."""


class Mirrors(Communicator):
    """Rank 0 of two, the other of which has and sends the same tensors, but zeros for what it broadcasts.

    Args:
        refused: A type of device from which nothing can be sent, as NCCL sends nothing from the CPU.
    """

    def __init__(self, refused: str | None = None, **options: Any) -> None:
        super().__init__(0, 2, **options)
        self.refused = refused
        self.calls: list[str] = []

    def wire_device(self, of: torch.device) -> torch.device:
        """As TorchCommunicator's."""
        return self._device if of.type == self.refused else of

    def _carry(self, tensor: Tensor, what: str) -> Done:
        if tensor.device.type == self.refused:
            raise RuntimeError(f"No backend type associated with device type {self.refused}")
        self.calls.append(what)
        return Done()

    def _start_sum(self, tensor: Tensor) -> Done:
        tensor.mul_(2)
        return self._carry(tensor, "sum")

    def _start_reduce(self, tensor: Tensor, owner: int) -> Done:
        tensor.mul_(2)
        return self._carry(tensor, "reduce")

    def _start_exchange(self, sent: Tensor, sizes: Sequence[int], received: Tensor, into: Sequence[int]) -> Done:
        received.copy_(sent)
        self._carry(sent, "exchange")
        return self._carry(received, "exchange")

    def _start_broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Done:
        if source != self.rank:
            tensor.zero_()
        return self._carry(tensor, "broadcast")


@contextmanager
def devices() -> Iterator[None]:
    """The device can be used, and ``Module.to`` keeps its parameters, as with real devices."""
    torch.cuda._lazy_init = lambda: None  # it would refuse a build without CUDA
    torch.cuda.Stream, torch.cuda.stream = Stream, nullcontext  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: CURRENT  # type: ignore[assignment]
    torch.__future__.set_swap_module_params_on_conversion(True)
    with Device():
        yield
