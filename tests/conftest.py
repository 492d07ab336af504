"""Shared by all tests: quiet threads, one simulated accelerator a process, shells and kernels, and the two stages."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import pytest

from gpumagic import fakecuda
from tests.stages import FEW, IS_WHOLE, MANY, is_deep

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tests.device import Accelerator

# What looks for the holders of a tensor follows all that these variables lead to: classes of libraries are imported
# where they are used.

# Two cores: torch's own threads would fight the kernels that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels and shells of the tests keep no history and read no profile of the user's.
os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how much Hypothesis tries, hear Ctrl-C, and compile the simulated GPU before there are many processes."""
    _load_profile("many" if is_deep(config) else "few")
    # A shell has what it starts with `&` ignore Ctrl-C, and so would every kernel that the tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    first = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if first and not fakecuda.is_enabled():  # tests/cuda has no use for it
        subprocess.run(
            [sys.executable, "-c", "from gpumagic.simgpu import _module; _module.load()"],
            check=False,
        )


def _load_profile(chosen: str) -> None:
    from hypothesis import HealthCheck, settings

    for name, count in (("few", FEW), ("many", MANY)):
        settings.register_profile(
            name,
            deadline=None,
            max_examples=count,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=not IS_WHOLE,
        )
    settings.load_profile(chosen)


@pytest.fixture(scope="session")
def two_devices() -> list[str]:
    """Two simulated devices of 4 GiB, on for the rest of the process."""
    from gpumagic import simgpu

    simgpu.enable(devices=2, memory="4GiB")
    return ["simgpu:0", "simgpu:1"]


@pytest.fixture(scope="session")
def _device() -> Accelerator:
    from tests import device

    return device.find()


@pytest.fixture
def device(_device: Accelerator) -> Accelerator:
    """The device that this process's torch has, with nothing counted yet: see `device.py`."""
    _device.start_clean()
    return _device


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs in a shell or a kernel, and on each device; have the tests of Hypothesis in both stages.

    Files that start their shell or kernel otherwise mark themselves.
    """
    for item in items:
        if _SHELLS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("ipython")
        if "device" in getattr(item, "fixturenames", ()) and "device" not in _parameters(item):
            item.add_marker("device")
        if is_deep(config) and hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker("deep")


def _parameters(item: pytest.Item) -> Collection[str]:
    return item.callspec.params if hasattr(item, "callspec") else ()


_SHELLS = frozenset({"bare_shell", "start_kernel"})


def pytest_collection_finish() -> None:
    """Have garbage be looked for among few objects: half of those that there are by now are pytest's own.

    A collection takes half a second with them, and thousands of tests collect. What a report says of frozen objects is
    true here too; the tests that are about it, and those of what no freeze hides, take `nothing_frozen`.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Run as in a process that hides no object from the garbage collector."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def empty_devices(two_devices: list[str]) -> None:
    """Two simulated devices with nothing on them and an empty cache.

    What an earlier test's shell keeps in a cycle may have been frozen before it became garbage.
    """
    import torch

    if any(map(torch.simgpu.memory_allocated, range(2))):
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    torch.simgpu.empty_cache()
    assert not any(map(torch.simgpu.memory_allocated, range(2))), "an earlier test keeps a tensor"


@pytest.fixture(scope="module")
def few_objects(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hide what other files of tests have left, for files that have gpumagic follow references again and again."""
    others = [name for name in sys.modules if "test_" in name and name != request.module.__name__]
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in others:
            patch.delitem(sys.modules, name)
        yield


@pytest.fixture
def bare_shell():
    """Return a real in-process shell whose displays are kept instead of shown."""
    shell = _new_shell()
    shell.run_line_magic("colors", "nocolor")
    yield shell
    shell.clear_instance()
    _empty(shell)


def _new_shell() -> InteractiveShell:
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryAccessor.enabled = False
    config.GPUMagic.advice_seconds = 0.0  # a test that wants advice tried says so
    InteractiveShell.clear_instance()
    return InteractiveShell.instance(config=config, display_pub_class=CapturingDisplayPublisher)


def _empty(shell: InteractiveShell) -> None:
    """Let go of what a test's cells made: shells live on in IPython's cycles, and tests ask what is on a device."""
    sys.modules[shell._orig_sys_modules_main_name] = (
        shell._orig_sys_modules_main_mod
    )  # it had put itself there
    shell.user_ns.clear()
    shell.user_ns_hidden.clear()
    shell.last_execution_result = None
    shell.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)


@pytest.fixture
def shell(bare_shell):
    """Return such a shell with the probe magics loaded."""
    from tests import probe_magics

    probe_magics.events.clear()
    probe_magics.modes().clear()
    bare_shell.run_line_magic("load_ext", "tests.probe_magics")
    yield bare_shell
    assert probe_magics.modes() == [], "a cell left its mode behind"


@pytest.fixture
def events(shell):
    """Return what has happened to the guards of the shell's cells so far."""
    return shell.user_ns["events"]


@pytest.fixture
def shown(bare_shell):
    """Return a function that lists what has been displayed, as plain text."""

    def texts():
        return [output["data"]["text/plain"] for output in bare_shell.display_pub.outputs]

    return texts


@pytest.fixture(scope="session")
def start_kernel(tmp_path_factory):
    """Return a function that starts a kernel, with extra environment variables; all are stopped at the end."""
    from tests.kernels import Kernel

    kernels = []

    def start(**extra):
        kernels.append(Kernel(tmp_path_factory.mktemp("ipython"), **extra))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.stop()


@pytest.fixture(scope="module")
def module_kernel(start_kernel):
    kernel = start_kernel()
    assert kernel.run("%load_ext tests.probe_magics").status == "ok"
    yield kernel
    assert kernel.value("modes()") == "[]", "a cell left its mode behind"


@pytest.fixture
def kernel(module_kernel):
    """Return a kernel with the probe magics, shared by the module; what happened before is forgotten."""
    module_kernel.run("events.clear()")
    return module_kernel


@pytest.fixture
def guarded(bare_shell, two_devices, warm_worker):
    """Return a function that runs a cell under %%oomguard -o report, in a shell with `take` and `fail`."""
    import gc

    from tests.oom.oom_cells import PRELUDE, forget_everything

    gc.collect()
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_cell(PRELUDE, store_history=True)

    def run(cell, options=""):
        bare_shell.user_ns.pop("report", None)
        return bare_shell.run_cell(f"%%oomguard -o report {options}\n{cell}", store_history=True)

    yield run
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    forget_everything(bare_shell)


@pytest.fixture(scope="session")
def _worker_of_the_tests():
    """One dry run worker for all tests: unloading the extension, which each shell's end does, leaves it alone."""
    from gpumagic.dryrun import client

    close = client.close
    yield
    close()


@pytest.fixture
def warm_worker(_worker_of_the_tests):
    """Keep the dry run worker from ending with the test's shell."""
    from gpumagic.dryrun import client

    with (
        pytest.MonkeyPatch.context() as patch
    ):  # of its own: the test's is undone before its shell ends
        patch.setattr(client, "close", lambda: None)
        yield
