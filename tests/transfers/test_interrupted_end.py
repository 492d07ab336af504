"""Ctrl-C at any moment while a `%%ondevice` cell ends leaves nothing of it behind once the next cell has run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.utils._device
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

import gpumagic
from gpumagic.memory import sampler
from gpumagic.transfers import patches

PACKAGE = Path(gpumagic.__file__).parent
ENDING = {str(PACKAGE / part) for part in (
    "notebook/cells.py", "notebook/guards.py", "transfers/run.py", "transfers/patches.py", "transfers/recorder.py",
    "transfers/device_mode.py", "memory/sampler.py",
)}  # fmt: skip
"""Where a cell's end is; what comes after it makes the report."""


def state() -> dict[str, Any]:
    """Return what a cell must leave as it was."""
    return {
        "default": str(torch.get_default_device()), "noted": torch.utils._device.CURRENT_DEVICE,
        "function modes": _len_torch_function_stack(), "dispatch modes": _len_torch_dispatch_stack(),
        "device": torch.simgpu.current_device(), "gradients": torch.is_grad_enabled(),
        "torch": {name: id(value) for name, value in vars(torch).items() if callable(value)},
        "tensor": {name: id(value) for name, value in vars(torch.Tensor).items()},
        "storage": {name: id(value) for name, value in vars(torch.UntypedStorage).items()},
        "idle": (patches.is_idle(), sampler.is_idle()),
        "threads": sorted(each.name for each in threading.enumerate() if "gpumagic" in each.name),
    }  # fmt: skip


class Interrupt:
    """Raises KeyboardInterrupt at one line of the cell's end."""

    def __init__(self, line: int) -> None:
        self._left = line
        self.where = ""

    def arm(self) -> None:
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in ENDING or self.where:
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                self.where = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


@pytest.fixture
def shell(bare_shell, two_devices):
    bare_shell.run_line_magic("load_ext", "gpumagic")
    yield bare_shell
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def interrupted_at(shell, line: int, magic: str) -> str:
    """Run a cell and interrupt its end at that line; return where that is, nothing where it ended before."""
    interrupt = Interrupt(line)
    shell.user_ns["arm"] = interrupt.arm
    before = sys.gettrace()
    try:
        shell.run_cell(f"{magic}\nimport torch\nx = torch.ones(2)\narm()", store_history=True)
    finally:
        sys.settrace(before)
    return interrupt.where


@pytest.mark.parametrize("magic", ["%%ondevice simgpu:1", "%%ondevice simgpu:1 --trace", "%%oomguard"])
def test_the_next_cell_finds_everything_as_it_was(shell, magic) -> None:
    shell.run_cell(f"{magic}\n1")  # what is made once for a process
    before, places = state(), []
    for line in count():
        where = interrupted_at(shell, line, magic)
        if not where:
            break
        places.append(where)
        shell.run_cell("1")
        assert state() == before, where
    assert len(places) > 50
