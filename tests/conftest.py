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


class Settled:
    """The objects that were there before the tests of a file: modules, for the most part, and pytest's own.

    They are frozen, as each collection and each look of gpumagic's at all objects would go through half a million of
    them; and not counted as frozen, as gpumagic says what it cannot see because of a freeze of the user's.
    """

    def __init__(self) -> None:
        self._count, self._frozen = gc.get_freeze_count, 0
        gc.get_freeze_count = self._of_the_tests

    def renew(self) -> None:
        """Freeze what is there now."""
        gc.collect()
        gc.freeze()
        self._frozen = self._count()

    def _of_the_tests(self) -> int:
        return max(0, self._count() - self._frozen)


settled = Settled()


def pytest_collection_finish() -> None:
    """Begin with what the collection has made."""
    settled.renew()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Do it again after each file: some tests import half of torch."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        settled.renew()
    return result
