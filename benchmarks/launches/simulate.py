"""Counts what a program would have a CUDA device do, without one: kernels launched, waits of the host, time, memory.

Tensors on the device are fake (``FakeTensorMode``): they have shapes, dtypes and a device, but no numbers. Tensors on
the host are real. What the host reads from the device is all ones and true. An operator that reads the shape of its
result from the device, like ``nonzero``, is an error.

A kernel is an operator that works on the device, with these exceptions: views and allocations are free; an operation on
a list of tensors takes as many kernels as its chunks call for, or one for each tensor where these differ in shape or
have gaps between their numbers; a convolution's backward pass takes two; a library's call (a product, an
eigendecomposition) is one, whatever it launches itself. The host waits where it reads a value, copies without
``non_blocking``, or a library reports its success.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import kfac_optim

PACKAGE = str(Path(kfac_optim.__file__).parent) + "/"
ELSEWHERE = "elsewhere"  # the model, its backward pass, the base optimizer's own step

# An H200's, for the estimates; seconds that a launch takes the host, and the shortest kernel.
BYTES_PER_SECOND = 4.8e12
FLOPS_PER_SECOND = {"fp32": 60e12, "tf32": 400e12, "half": 800e12}
LAUNCH_SECONDS, KERNEL_SECONDS = 5e-6, 2e-6

FREE = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided detach alias lift_fresh set_ resize_ record_stream "
    "_unsafe_view _reshape_alias is_pinned stride size dim storage_offset sym_size is_contiguous device layout".split()
)
READS = {"_local_scalar_dense", "equal"}
COPIES = {"copy_", "_to_copy", "_pin_memory"}
CHECKED = {"_linalg_eigh", "_linalg_check_errors"}  # they copy an error code to the host
# Tensors that one kernel of a multi-tensor operation takes, by the number of lists, and the elements of a chunk.
LIST_TENSORS, LIST_CHUNKS, CHUNK = {1: 110, 2: 64, 3: 48, 4: 36}, 320, 65536
CAT_TENSORS = 128  # that one kernel concatenates


@dataclass
class Count:
    """What the device was asked for."""

    launches: int = 0
    waits: int = 0
    seconds: float = 0.0  # A kernel takes its memory traffic's or its multiplications' time, at least its launch's
    flops: int = 0
    peak: int = 0  # Bytes on the device
    launched_at: Counter[str] = field(default_factory=Counter)  # By place in the package
    waited_at: Counter[str] = field(default_factory=Counter)


class Simulation(TorchDispatchMode):
    """Counts operators on fake CUDA tensors while it is active; enter it by :func:`simulated`."""

    def __init__(self) -> None:
        super().__init__()
        self._count = Count()
        self._held = 0
        self._storages: set[int] = set()

    def take(self) -> Count:
        """Return what was counted since the last call."""
        found, self._count = self._count, Count(peak=self._held)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator: on the host really, on the device not at all."""
        kwargs = kwargs or {}
        inputs = _on_device(tree_leaves((args, kwargs)))
        name = func._schema.name.split("::")[1]
        if not inputs and not _makes_on_device(kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        read = self._read(name, args, kwargs)
        if read is not None:
            self._hold(_on_device([read]))
            return read
        result = func(*args, **kwargs)
        outputs = _on_device(tree_leaves(result))
        self._hold(outputs)
        if name not in FREE and not getattr(func, "is_view", False):
            self._note(func, name, args, kwargs, inputs, outputs, result)
        return result

    def _read(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the host reads from the device by this operator; None: it reads nothing."""
        if name not in READS | COPIES:
            return None
        tensor = args[0]
        if name in READS:
            self._wait()
            return 1.0 if name != "equal" and tensor.is_floating_point() else True
        source = args[1] if name == "copy_" else tensor
        target = tensor.device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if source.device.type == "cuda" and target.type == "cpu":
            if not _non_blocking(name, args, kwargs):
                self._wait()
            with _disable_current_modes():
                if name == "copy_":
                    return tensor.fill_(1)
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return None

    def _note(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
        result: Any,
    ) -> None:
        """Count an operator of the device."""
        from_host = name in COPIES and any(isinstance(a, Tensor) and a.device.type == "cpu" for a in args[:2])
        if name in CHECKED or (from_host and not _non_blocking(name, args, kwargs)):
            self._wait()
        formula = flop_registry.get(func._overloadpacket)
        flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
        numbers = sum(t.nbytes for t in inputs) + sum(t.nbytes for t in outputs)
        if name.startswith("_foreach") and name.endswith("_"):
            numbers += sum(t.nbytes for t in args[0])
        seconds = max(flops / _rate(name, inputs or outputs), numbers / BYTES_PER_SECOND, KERNEL_SECONDS)
        self._count.flops += flops
        self._launch(_kernels(name, args), seconds)

    def _launch(self, kernels: int, seconds: float) -> None:
        self._count.launches += kernels
        self._count.launched_at[place()] += kernels
        self._count.seconds += max(seconds, kernels * LAUNCH_SECONDS)

    def _wait(self) -> None:
        self._count.waits += 1
        self._count.waited_at[place()] += 1

    def _hold(self, tensors: Sequence[Tensor]) -> None:
        """Count the memory of tensors, until it is freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._storages:
                self._storages.add(key)
                self._held += size
                self._count.peak = max(self._count.peak, self._held)
                weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._held -= size


@contextmanager
def simulated() -> Iterator[Simulation]:
    """Tensors on "cuda" are fake, and counted, in a ``with`` block."""
    foreach: list[list[Any]] = [_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types]
    tolist: Callable[[FakeTensor], Any] = FakeTensor.tolist
    for supported in foreach:
        supported.append(FakeTensor)
    FakeTensor.tolist = lambda tensor: tensor.cpu().tolist()  # type: ignore[assignment, method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Simulation() as simulation:
            yield simulation
    finally:
        for supported in foreach:
            supported.remove(FakeTensor)
        FakeTensor.tolist = tolist  # type: ignore[assignment, method-assign]


def place() -> str:
    """Return the innermost line of the package that is being run, its function, and up to two that led there."""
    line, names = ELSEWHERE, list[str]()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(names) < 3:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            if line == ELSEWHERE:
                line = f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
            if code.co_name not in names and not code.co_name.startswith("<"):  # as comprehensions' do
                names.append(code.co_name)
        frame = frame.f_back
    return " < ".join([f"{line} {names[0]}", *names[1:]]) if names else line


def _on_device(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.device.type == "cuda"]


def _makes_on_device(kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator without inputs on the device makes a tensor there."""
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"


def _non_blocking(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))


def _kernels(name: str, args: tuple[Any, ...]) -> int:
    """Return how many kernels an operator launches."""
    if name == "convolution_backward":
        return 2
    if name in ("cat", "stack"):
        return math.ceil(len(args[0]) / CAT_TENSORS)
    if not name.startswith("_foreach"):
        return 1
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    differ = any(len({(t.shape, t.dtype, t.stride()) for t in tensors}) > 1 for tensors in zip(*lists, strict=True))
    if differ or any(_has_gaps(t) for tensors in lists for t in tensors):
        return len(lists[0])
    tensors = math.ceil(len(lists[0]) / LIST_TENSORS[min(4, len(lists))])
    chunks = math.ceil(sum(math.ceil(t.numel() / CHUNK) for t in lists[0]) / LIST_CHUNKS)
    return max(tensors, chunks) + (name == "_foreach_norm")


def _has_gaps(tensor: Tensor) -> bool:
    """Whether a tensor's numbers do not lie side by side, in whatever order."""
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    sizes = [size for _, size in dims]
    return [stride for stride, _ in dims] != list(accumulate(sizes, operator.mul, initial=1))[: len(dims)]


def _rate(name: str, tensors: Sequence[Tensor]) -> float:
    """Return the multiplications per second of an operator."""
    if tensors[0].dtype in (torch.float16, torch.bfloat16):
        return FLOPS_PER_SECOND["half"]
    if name.startswith("convolution"):
        tf32 = torch.backends.cudnn.allow_tf32
    else:
        tf32 = torch.get_float32_matmul_precision() != "highest"
    return FLOPS_PER_SECOND["tf32" if tf32 else "fp32"]
