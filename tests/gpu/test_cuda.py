"""`%gpuinfo` on a real GPU, against CUDA's own figures; `tests/test_every_device.py` has the other magics."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import gpumagic

MIB = 2**20


def fresh(code: str) -> str:
    """Return what code prints in a process that has not touched CUDA."""
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def test_gpuinfo_initialises_neither_cuda_nor_torch() -> None:
    said = fresh(
        "import sys, gpumagic; report = gpumagic.gpuinfo(); print('torch' in sys.modules, report.cause)\n"
        "import torch; gpumagic.gpuinfo(); print(torch.cuda.is_initialized())"
    )
    assert said.splitlines() == ["False None", "False"]


def test_gpuinfo_joins_the_driver_and_torch_by_uuid() -> None:
    held = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda:0")
    (row,) = [row for row in gpumagic.gpuinfo() if row.device == "cuda:0"]
    assert str(torch.cuda.get_device_properties(0).uuid) in (row.uuid or "")
    assert not row.predicted
    assert row.kernel_allocated == torch.cuda.memory_allocated(0) >= held.nbytes
    assert row.kernel_reserved == torch.cuda.memory_reserved(0)
    free, total = torch.cuda.mem_get_info(0)
    assert row.memory_total == pytest.approx(total, rel=0.02)
    assert row.memory_free == pytest.approx(free, rel=0.05)


@pytest.mark.real_gpu("sensors")
def test_gpuinfo_reads_the_sensors() -> None:
    for row in gpumagic.gpuinfo():
        assert row.utilization is not None
        assert row.power is not None


def test_gpuinfo_reads_every_field_or_says_why() -> None:
    for row in gpumagic.gpuinfo(everything=True, processes=True):
        assert all(row.reasons.values())
        assert row.clock_sm_max is not None or row.reasons["clock_sm_max"]


@pytest.mark.parametrize(
    "cell", ["y = x * 2; z = y * 2", "y = torch.cat([x, x]); z = (y @ y.T).sum()"]
)
def test_a_dry_run_says_whether_a_cell_fits_under_the_cap_of_this_process(cell: str) -> None:
    torch.cuda.empty_cache()
    names = {"torch": torch, "x": torch.ones(4096, 1024, device="cuda")}
    exec(cell, dict(names))  # cuBLAS has its workspaces
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    exec(cell, dict(names))
    need, total = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    assert need > held + 20 * MIB
    try:
        for room, fits in ((need, True), (need - 2 * MIB, False)):
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(room / total)
            assert gpumagic.dry_run(cell, dict(names), device="cuda").fits is fits
            try:
                exec(cell, dict(names))
            except torch.OutOfMemoryError:
                assert not fits
            else:
                assert fits
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


ALLOCATORS = {
    "": "cuda allocator",
    "expandable_segments:True": "cuda allocator",
    "backend:cudaMallocAsync": "cuda async allocator",
}


@pytest.mark.parametrize("settings", ALLOCATORS)
def test_oomguard_gives_everything_back_whatever_the_allocator(settings: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", """
import torch, gpumagic
held = torch.ones(1 << 20, device="cuda")
before = torch.cuda.memory_allocated()
try:
    with gpumagic.oomguard() as guard:
        kept = torch.ones(1 << 20, device="cuda")
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
except gpumagic.OutOfMemory as error:
    kept = None
report = guard.report
print(report.kind, isinstance(error_type := report.requested, int) and error_type >= 1 << 42, report.cause,
      torch.cuda.memory_allocated() == before, sep="|")
"""],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings},
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    kind, requested, cause, is_back = said.stdout.strip().split("|")
    assert (kind, cause, is_back) == (ALLOCATORS[settings], "one request", "True")
    assert requested == "True"


def test_a_cell_is_shrunk_until_it_fits() -> None:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "gpumagic")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        done = shell.run_cell(
            "%%oomguard --shrink rows\nimport torch\nrows = 1024\nx = torch.ones(rows, 1 << 18, device='cuda')"
        )
        assert done.success
        assert shell.user_ns["rows"] == 64
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        shell.user_ns.clear()
        shell.run_line_magic("unload_ext", "gpumagic")
