"""`%gpuinfo` on a real GPU, against CUDA's own figures; `tests/test_every_device.py` has the other magics."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

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
