"""One torch thread, a fixed seed for every test, and hypothesis profiles (chosen by ``HYPOTHESIS_PROFILE``)."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(1)

# Every example builds a model, an optimizer and a dense oracle: slow is normal, a deadline would only measure the load.
settings.register_profile(
    "default",
    max_examples=15,
    derandomize=True,
    deadline=None,
    print_blob=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", parent=settings.get_profile("default"), max_examples=100)
settings.register_profile("thorough", parent=settings.get_profile("ci"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The cases that ``fast`` does not name are slow."""
    fast: dict[str, bool] = {}  # by test: whether any case is
    for item in items:
        mark = item.get_closest_marker("fast")
        if mark is not None:
            named = re.search(mark.args[0], item.nodeid.partition("[")[2].removesuffix("]")) is not None
            test = item.nodeid.partition("[")[0]
            fast[test] = fast.get(test, False) or named
            if not named:
                item.add_marker("slow")
    never = [test for test, found in fast.items() if not found]
    if never and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"'fast' names no case of {', '.join(never)}")


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Where a test or an optimizer looks through all objects, what is older than its module is not among them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same global seed, with denormal numbers, which runs of the benchmarks flush."""
    torch.manual_seed(0)
    torch.set_flush_denormal(False)


def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# For a test module that compares exact values, and for one test in a module whose others need the usual dtype.
float64 = pytest.fixture(scope="module", name="float64")(_in_float64)
double = pytest.fixture(name="double")(_in_float64)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """No state of Accelerate's from the test before, and none for the next."""
    from tests.helpers.frameworks import forget

    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the tests of a module share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def soon_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes a step is repeated from the second step on, instead of the twentieth."""
    monkeypatch.setattr("kfac_optim.steering.trust._YOUNG", 1)
