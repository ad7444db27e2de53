"""What tests on the simulated device (:mod:`benchmarks.launches.device`) need beside the package.

They need a C++ compiler, and a torch that has all functions which the device overrides. Somebody who has just cloned
the repository may have no compiler, and everything else can be tested without; so these tests are skipped there, and
the reason names the remedy. In ``.ci/run`` they never are: without a compiler they fail.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.launches.device import obstacle

__all__ = ["needs_compiler"]

needs_compiler = pytest.mark.skipif(
    bool(obstacle()) and os.environ.get("HYPOTHESIS_PROFILE") != "ci", reason=obstacle() or "a compiler is there"
)
