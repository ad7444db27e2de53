"""Makes a build of torch without CUDA believe in one CUDA device that computes nothing.

:func:`load` has to come before torch is imported, so a process of its own does the counting (:mod:`.count`). The
library (``device.cpp``) is compiled once for each version of torch, by g++, into ``runs/``.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

SOURCE = Path(__file__).with_name("device.cpp")
BUILDS = Path("runs", "launches")
NEWEST = "versionRuntimeCuDNN"  # of the functions that device.cpp overrides, the last that torch got


def obstacle() -> str:
    """Say why the device cannot be made here; empty if it can."""
    if not shutil.which("g++"):
        return f"the simulated device ({SOURCE.name}) is compiled by g++: install it"
    hooks = folder_of_torch() / "include" / "ATen" / "detail" / "CUDAHooksInterface.h"
    if not hooks.is_file() or NEWEST not in hooks.read_text():
        version = importlib.metadata.version("torch")
        return f"the simulated device ({SOURCE.name}) needs headers of a newer torch than {version}: install one"
    return ""


def folder_of_torch() -> Path:
    """Return the folder of the installed torch, which need not have been imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def library(torch: Path) -> Path:
    """Return the compiled library, and compile it first where that has not been done.

    Args:
        torch: The folder of the installed torch.

    Raises:
        RuntimeError: If there is no compiler, or torch is too old.
    """
    built = BUILDS / f"device-{importlib.metadata.version('torch')}.so"
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        if reason := obstacle():
            raise RuntimeError(reason)
        BUILDS.mkdir(parents=True, exist_ok=True)
        headers = [f"-I{torch / 'include' / more}" for more in ("", "torch/csrc/api/include")]
        half = built.with_suffix(f".{os.getpid()}.tmp")  # other processes may compile it at the same time
        subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", SOURCE, "-o", half, *headers], check=True)
        half.replace(built)
    return built


def load() -> None:
    """Load the device.

    Raises:
        RuntimeError: If torch is imported already, and has looked for devices; if there is no compiler, or torch is too
            old.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the simulated device has to be loaded before torch is imported")
    torch = folder_of_torch()
    for each in (torch / "lib" / "libc10.so", torch / "lib" / "libtorch_cpu.so", library(torch)):
        ctypes.CDLL(str(each.resolve()), ctypes.RTLD_GLOBAL)


def leave() -> NoReturn:
    """End the process at once, and successfully.

    Autograd's thread of the device goes on for a moment after a backward pass, and runs Python. Where the interpreter
    has been taken down by then, it ends that thread inside of C++, which aborts the process.
    """
    sys.stdout.flush()
    os._exit(0)
