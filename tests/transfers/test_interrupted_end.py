"""Ctrl-C at any moment while a `%%ondevice` cell begins or ends leaves nothing of it once the next cell has run."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._device
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

import gpumagic
from gpumagic.transfers import recording
from tests.interrupts import Interrupt

PACKAGE = Path(gpumagic.__file__).parent
ENDING = {str(PACKAGE / part) for part in (
    "notebook/cells.py", "notebook/guards.py", "transfers/run.py", "transfers/recording.py", "transfers/recorder.py",
    "transfers/operators.py", "transfers/device_mode.py",
)}  # fmt: skip
"""Where a cell's end is; what comes after it makes the report."""
BEGINNING = ENDING | {str(PACKAGE / part) for part in ("simgpu/_module.py", "memory/allocator.py")}


def state() -> dict[str, Any]:
    """Return what a cell must leave as it was."""
    return {
        "default": str(torch.get_default_device()), "noted": torch.utils._device.CURRENT_DEVICE,
        "function modes": _len_torch_function_stack(), "dispatch modes": _len_torch_dispatch_stack(),
        "device": torch.simgpu.current_device(), "gradients": torch.is_grad_enabled(),
        "torch": {name: id(value) for name, value in vars(torch).items() if callable(value)},
        "tensor": {name: id(value) for name, value in vars(torch.Tensor).items()},
        "storage": {name: id(value) for name, value in vars(torch.UntypedStorage).items()},
        "idle": recording.is_idle(),
        "threads": sorted(each.name for each in threading.enumerate() if "gpumagic" in each.name),
    }  # fmt: skip


@pytest.fixture
def shell(bare_shell, two_devices):
    bare_shell.run_line_magic("load_ext", "gpumagic")
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")


EVERY = [7, pytest.param(1, marks=pytest.mark.deep)]
"""Of so many lines one is tried."""


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(
    "magic", ["%%ondevice simgpu:1", "%%ondevice simgpu:1 --trace", "%%oomguard"]
)
def test_the_next_cell_finds_everything_as_it_was(shell, magic, every) -> None:
    shell.run_cell(f"{magic}\n1")  # what is made once for a process
    before, places = state(), []
    for line in count(step=every):
        interrupt = Interrupt(ENDING, line)
        interrupt.run(shell, f"{magic}\nimport torch\nx = torch.ones(2)\narm()")
        if not interrupt.where:
            break
        places.append(interrupt.where)
        shell.run_cell("1")
        assert state() == before, interrupt.where
    assert len(places) > 50 / every


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("magic", ["%ondevice simgpu:1", "%oomguard"])
def test_the_next_cell_finds_everything_as_it_was_before_the_cell_began(
    shell, magic, every
) -> None:
    shell.run_cell(f"%{magic}\n1")
    before, places = state(), []
    for line in count(step=every):
        interrupt = Interrupt(BEGINNING, line)
        interrupt.run(shell, f"import sys\narm()\n{magic}\nsys.settrace(None)")
        if not interrupt.where:
            break
        places.append(interrupt.where)
        assert isinstance(shell.last_execution_result.error_in_exec, KeyboardInterrupt), (
            interrupt.where
        )
        shell.run_cell("1")
        assert state() == before, interrupt.where
    assert len(places) > 20 / every
