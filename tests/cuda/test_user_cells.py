"""Cells of user_cells/, written as the tutorials of their libraries write them: bare and under the magics, on CUDA.

Not among them: `generate` of transformers, which stops when a value on the device says so, and over the fake runtime
none ever does.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumagic import fakecuda

CELLS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("user_cells/*.py"))}
PINNING = {"bert_trainer", "timm_vit_amp"}
"""Their loaders pin memory, so their data cannot land on the device: torch's own default device fails there, too."""
on_a_device = pytest.mark.parametrize("name", sorted(set(CELLS) - PINNING))
Run = Callable[..., Any]


@pytest.fixture
def run(bare_shell) -> Run:
    """Run a cell, and return its result; what an earlier one made is gone."""
    bare_shell.run_line_magic("load_ext", "gpumagic")

    def run(cell: str, magic: str = "") -> Any:
        forget(bare_shell)
        return bare_shell.run_cell(f"{magic}\n{cell}" if magic else cell, store_history=True)

    yield run
    forget(bare_shell)
    bare_shell.run_line_magic("unload_ext", "gpumagic")


def forget(shell: Any) -> None:
    shell.run_line_magic("reset", "-f")
    shell.last_execution_result = shell.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated(0) == 0
    fakecuda.reset()


def held() -> int:
    """Return the bytes that a cell has left on the device, without cuBLAS's workspaces."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(0)


def copied() -> Counter[tuple[str, str, int]]:
    """Return how often the cell has copied how much from where to where."""
    return Counter(copy[1:4] for copy in fakecuda.copies())


def unsplit() -> int:
    """Return the bytes that torch's blocks have beyond what was asked for: a rest of up to 1 MiB is not split off."""
    blocks = [block for segment in torch.cuda.memory_snapshot(device=0) for block in segment["blocks"]]
    taken = [block for block in blocks if block["state"].startswith("active")]
    return sum(block["size"] - -(-block["requested_size"] // 512) * 512 for block in taken)


@pytest.mark.parametrize("name", CELLS)
def test_under_oomguard_it_leaves_what_it_leaves_bare(name: str, run: Run) -> None:
    for _ in range(2):  # the first time, there may be what is made once in a process
        run(CELLS[name]).raise_error()
    bare = held(), copied()
    run(CELLS[name], "%%oomguard").raise_error()
    assert (held(), copied()) == bare


@on_a_device
def test_on_a_device_it_leaves_what_torchs_own_default_device_leaves(name: str, run: Run) -> None:
    run(CELLS[name]).raise_error()  # what an import makes is there
    run(f'import torch; torch.set_default_device("cuda:0")\n{CELLS[name]}').raise_error()
    torch.set_default_device(None)
    bare = held()
    run(CELLS[name], "%%ondevice cuda:0").raise_error()
    assert held() == bare


@on_a_device
def test_the_report_has_the_copies_that_were_made(name: str, run: Run, bare_shell) -> None:
    run(CELLS[name], "%%ondevice cuda:0 -o report").raise_error()
    made: Counter[tuple[str, str]] = Counter()
    for copy in fakecuda.copies():
        if copy.direction != "within a device":
            made[copy.source, copy.target] += copy.nbytes
    told: Counter[tuple[str, str]] = Counter()
    for row in bare_shell.user_ns["report"]:
        told[row.source, row.target] += row.nbytes
    assert told == made


@pytest.mark.parametrize("name", sorted(PINNING))
def test_where_a_loader_pins_the_report_says_what_to_change(name: str, run: Run, bare_shell) -> None:
    result = run(CELLS[name], "%%ondevice cuda:0 -o report")
    assert "only dense CPU tensors can be pinned" in str(result.error_in_exec)
    assert "pin_memory=False" in str(bare_shell.user_ns["report"])


@pytest.mark.parametrize("name", CELLS)
def test_devices_attributes_every_byte_that_it_leaves(name: str, run: Run, bare_shell) -> None:
    run(CELLS[name]).raise_error()
    allocated = held()
    report = bare_shell.run_line_magic("devices", "cuda:0")
    total = next((row for row in report.by_device if row.device == "cuda:0"), None)
    assert (total.allocated if total else 0) == allocated
    if total is not None:
        assert total.named + total.held + (total.graph or 0) == allocated - (total.unexplained or 0)
        assert (total.unexplained or 0) == unsplit()
