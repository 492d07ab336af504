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
from typing import Any, NamedTuple

import pytest
import torch

from gpumagic import fakecuda

CELLS = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(Path(__file__).parent.glob("user_cells/*.py"))
}
PINNING = {"bert_trainer", "timm_vit_amp"}
"""Their loaders pin memory, so their data cannot land on the device: torch's own default device fails there, too."""
on_a_device = pytest.mark.parametrize("name", sorted(set(CELLS) - PINNING))
WAYS = {
    "bare": "",
    "default": 'import torch; torch.set_default_device("cuda:0")',
    "oomguard": "%%oomguard -o report",
    "ondevice": "%%ondevice cuda:0 -o report",
}

pytestmark = pytest.mark.usefixtures("libraries", "few_objects")


class Outcome(NamedTuple):
    """What a cell has left on the first device, without cuBLAS's workspaces, and what it has copied.

    `torchs` was there before and stays: cuDNN's dropout states, for one, once an RNN of another test has used them.
    """

    error: BaseException | None
    held: int
    copies: Counter[tuple[str, str, int]]
    report: Any
    devices: Any
    unsplit: int
    peak: int
    torchs: int


_seen: dict[tuple[str, str], Outcome] = {}


@pytest.fixture(scope="module")
def libraries() -> None:
    """What the cells import is there before a test counts objects."""
    for name in ("accelerate", "lightning", "peft", "timm.optim", "torchvision", "transformers"):
        pytest.importorskip(name, reason="the extra `cuda` has it")
    torch.cuda.init()


@pytest.fixture
def ran(bare_shell) -> Callable[[str, str], Outcome]:
    """Run a cell in one of the ways, once, and return what came of it."""

    def ran(name: str, way: str) -> Outcome:
        if (name, way) not in _seen:
            bare_shell.run_line_magic("load_ext", "gpumagic")
            forget(bare_shell)
            _seen[name, way] = outcome(bare_shell, f"{WAYS[way]}\n{CELLS[name]}".lstrip())
            torch.set_default_device(None)
            forget(bare_shell)
            bare_shell.run_line_magic("unload_ext", "gpumagic")
        return _seen[name, way]

    return ran


def outcome(shell: Any, cell: str) -> Outcome:
    fakecuda.reset()
    torchs = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    error = shell.run_cell(cell, store_history=True).error_in_exec
    copies = Counter(copy[1:4] for copy in fakecuda.copies() if copy.direction != "within a device")
    peak = torch.cuda.max_memory_allocated(0)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    report, text = shell.user_ns.get("report"), error and RuntimeError(str(error))
    devices = [
        row for row in shell.run_line_magic("devices", "cuda:0").by_device if row.device == "cuda:0"
    ]
    return Outcome(
        text,
        torch.cuda.memory_allocated(0) - torchs,
        copies,
        report,
        devices,
        unsplit(),
        peak,
        torchs,
    )


def forget(shell: Any) -> None:
    shell.run_line_magic("reset", "-f")
    shell.last_execution_result = shell.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def unsplit() -> int:
    """Return the bytes that torch's blocks have beyond what was asked for: a rest of up to 1 MiB is not split off."""
    blocks = [
        block
        for part in torch.cuda.memory_snapshot()
        if part["device"] == 0
        for block in part["blocks"]
    ]
    taken = [block for block in blocks if block["state"].startswith("active")]
    return sum(block["size"] - -(-block["requested_size"] // 512) * 512 for block in taken)


@pytest.mark.parametrize("name", CELLS)
def test_under_oomguard_it_copies_and_leaves_what_it_does_bare(name: str, ran) -> None:
    bare, guarded = ran(name, "bare"), ran(name, "oomguard")
    assert bare.error is guarded.error is None
    assert guarded.held == bare.held
    assert guarded.copies == bare.copies


@on_a_device
def test_on_a_device_it_leaves_what_torchs_own_default_device_leaves(name: str, ran) -> None:
    ours, torchs = ran(name, "ondevice"), ran(name, "default")
    assert ours.error is torchs.error is None
    assert ours.held == torchs.held


@on_a_device
def test_the_report_has_the_copies_that_were_made(name: str, ran) -> None:
    ours = ran(name, "ondevice")
    made: Counter[tuple[str, str]] = Counter()
    for (source, target, nbytes), count in ours.copies.items():
        made[source, target] += nbytes * count
    told: Counter[tuple[str, str]] = Counter()
    for row in ours.report:
        told[row.source, row.target] += row.nbytes
    assert told == made


@pytest.mark.parametrize("name", sorted(PINNING))
def test_where_a_loader_pins_the_report_says_what_to_change(name: str, ran) -> None:
    ours = ran(name, "ondevice")
    if "index out of range" in str(ours.error):
        pytest.skip(
            "the indices of a shuffled loader are what lay in the device's memory: no kernel wrote them"
        )
    assert "only dense CPU tensors can be pinned" in str(ours.error)
    assert "pin_memory=False" in str(ours.report)


@pytest.mark.parametrize("name", CELLS)
def test_devices_attributes_every_byte_that_it_leaves(name: str, ran) -> None:
    bare = ran(name, "bare")
    assert sum(row.allocated for row in bare.devices) == bare.held + bare.torchs
    for row in bare.devices:
        unexplained = (row.unexplained or 0) - bare.torchs
        assert row.named + row.held + (row.graph or 0) == bare.held - unexplained
        # Where blocks are read, their owner has the rest as well; else it is what is unexplained, and nothing more.
        assert unexplained in {0, bare.unsplit}
