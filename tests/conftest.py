"""Shared by all tests: quiet threads, one simulated accelerator for the whole process, and the two stages."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from stages import FEW, MANY, is_deep

# Two cores: torch's own threads would fight the kernels that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels and shells of the tests keep no history and read no profile of the user's.
os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")

for name, count in (("few", FEW), ("many", MANY)):
    settings.register_profile(
        name, deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow], derandomize=count == FEW
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how much Hypothesis tries, hear Ctrl-C, and compile the simulated GPU before there are many processes."""
    settings.load_profile("many" if is_deep(config) else "few")
    # A shell has what it starts with `&` ignore Ctrl-C, and so would every kernel that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        subprocess.run([sys.executable, "-c", "from gpumagic.simgpu import _build; _build.load()"], check=False)


@pytest.fixture(scope="session")
def two_devices() -> list[str]:
    """Two simulated devices of 4 GiB, on for the rest of the process."""
    from gpumagic import simgpu

    simgpu.enable(devices=2, memory="4GiB")
    return ["simgpu:0", "simgpu:1"]


def _turn(item: pytest.Item) -> int:
    """Return when a test's file is run: see `pytest_collection_modifyitems`."""
    if "simgpu" in item.path.parts:
        return 3 if item.path.stem == "test_operators" else 0
    return 1 if "unit" in item.path.parts else 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, and have the tests of Hypothesis in both stages.

    The simulated devices first: their tests start from empty ones, and any later test may keep a tensor. Then what
    looks at all objects of the process, while those are few. Torch's list of operators, which makes many, comes last.
    """
    items.sort(key=_turn)
    if is_deep(config):
        for item in items:
            if hasattr(getattr(item, "obj", None), "hypothesis"):
                item.add_marker("deep")


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Freeze the modules that there are, and pytest's own objects, for the time of a file.

    For files that have gpumagic look at all objects of the process again and again: there are half a million once
    tests have imported what they need. It would say that a freeze hides some, so this one is not counted.
    """
    count = gc.get_freeze_count
    gc.collect()
    gc.freeze()
    frozen = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: max(0, count() - frozen))
        yield
    gc.unfreeze()
