"""The four magics on a real GPU: the behaviours that simgpu shows elsewhere, against CUDA's own figures."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter

import pytest
import torch

import gpumagic
from gpumagic.memory import allocator, segments

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
        assert row.pcie_generation is not None or row.reasons["pcie_generation"]
        assert row.clock_sm_max is not None or row.reasons["clock_sm_max"]


@pytest.mark.real_gpu("speed")
def test_gpuinfos_benchmark_measures_products_and_copies() -> None:
    from gpumagic.gpus import bench

    report = bench.benchmark(["cuda:0"], seconds=0.05)
    assert [row.reason for row in report] == [None] * len(report)
    assert (report.rate("cuda:0", "float32") or 0) > 1e11
    assert (report.rate("cuda:0", "device-to-device") or 0) > (report.rate("cuda:0", "host-to-device") or 0)


def test_devices_accounts_for_every_allocated_byte() -> None:
    gc.collect()
    kept = {"weights": torch.ones(1000, 1000, device="cuda:0"), "ids": torch.arange(7, device="cuda:0")}
    report = gpumagic.devices("cuda:0", namespace=kept)
    (total,) = [row for row in report.by_device if row.device == "cuda:0"]
    assert total.allocated == torch.cuda.memory_allocated(0)
    told = (total.named, total.held, total.graph, total.workspaces, total.unexplained)
    assert sum(part or 0 for part in told) == total.allocated
    (weights,) = [row for row in report if row.name == "weights"]
    assert weights.nbytes == 4_000_256  # 4,000,000 in blocks of 512
    del kept


def test_a_dry_run_can_begin_where_the_allocators_blocks_lie() -> None:
    kept = [torch.ones(3 * MIB, device="cuda:0") for _ in range(3)]
    del kept[1]
    figures = allocator.device_stats("cuda:0")
    assert figures is not None
    found = segments.read_segments("cuda:0", figures)
    assert found is not None
    lying = {block.address for segment in found for block in segment.blocks if block.is_owned}
    assert {each.data_ptr() for each in kept} <= lying


CELLS = {
    "to": lambda x, g: x.to("cuda:0"),
    "to with dtype": lambda x, g: x.to("cuda:0", torch.float16),
    "cuda": lambda x, g: x.cuda(),
    "cpu": lambda x, g: g.cpu(),
    "copy_": lambda x, g: g.copy_(x),
    "tensor of a list": lambda x, g: torch.tensor([1.0, 2.0, 3.0]),
    "item": lambda x, g: g[0, 0].item(),
    "tolist": lambda x, g: g.tolist(),
    "module": lambda x, g: torch.nn.Linear(4, 3, device="cpu").to("cuda:0"),
}


@pytest.mark.parametrize("name", CELLS)
def test_ondevice_reports_the_copies_that_are_made(name: str, copies_during) -> None:
    x, g = torch.ones(100, 10), torch.ones(100, 10, device="cuda:0")
    CELLS[name](x, g)  # contexts and caches are warm before anything is counted
    torch.cuda.synchronize()
    with copies_during() as copies, gpumagic.ondevice("cuda:0") as run:
        CELLS[name](x, g)
        torch.cuda.synchronize()
    assert run.report is not None
    assert copies == Counter({row.direction: row.count for row in run.report})


def test_ondevice_makes_the_device_the_default_and_the_current_one() -> None:
    index = torch.cuda.device_count() - 1
    with gpumagic.ondevice(f"cuda:{index}"):
        assert str(torch.zeros(1).device) == f"cuda:{index}"
        assert torch.zeros(1, device="cpu").cuda().device.index == index
        assert torch.cuda.current_device() == index
    assert str(torch.zeros(1).device) == "cpu"
    assert torch.cuda.current_device() == 0


def test_oomguard_gives_everything_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(0)
    _, total = torch.cuda.mem_get_info(0)

    def fill() -> list[torch.Tensor]:
        chunks = []
        while True:
            chunks.append(torch.empty(total // 8, dtype=torch.uint8, device="cuda:0"))

    with pytest.raises(gpumagic.OutOfMemory) as caught, gpumagic.oomguard() as guard:
        fill()
    assert isinstance(caught.value, torch.cuda.OutOfMemoryError)
    assert torch.cuda.memory_allocated(0) == before
    assert guard.report is not None
    assert guard.report.requested == pytest.approx(total // 8, rel=0.001)  # torch's message rounds it
    assert guard.report.allocated_at_failure > before
    assert guard.report.allocated_after == before
