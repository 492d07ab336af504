"""The magics on each device that a machine may have, against what the device itself counts: see `device.py`."""

from __future__ import annotations

import gc

import pytest
import torch

import gpumagic
from gpumagic._compat import torch_private
from gpumagic.memory import allocator, segments
from tests.device import Accelerator
from tests.transfers import traced_cells

pytestmark = pytest.mark.versions

MIB = 2**20


def test_gpuinfo_has_what_the_allocator_counts_for_this_kernel(device: Accelerator) -> None:
    held = torch.ones(3 * MIB, dtype=torch.uint8, device=device.name)
    (row,) = [row for row in gpumagic.gpuinfo() if row.device == device.name]
    assert row.kernel_allocated == device.allocated() >= held.nbytes
    assert row.kernel_reserved == device.torch.memory_reserved(0)


def test_devices_accounts_for_every_allocated_byte(device: Accelerator) -> None:
    kept = {
        "weights": torch.ones(1000, 1000, device=device.name),
        "ids": torch.arange(7, device=device.name),
    }
    report = gpumagic.devices(device.name, namespace=kept)
    (total,) = [row for row in report.by_device if row.device == device.name]
    assert total.allocated == device.allocated()
    told = (total.named, total.held, total.graph, total.workspaces, total.unexplained)
    assert sum(part or 0 for part in told) == total.allocated
    (weights,) = [row for row in report if row.name == "weights"]
    assert weights.nbytes == 4_000_256  # 4,000,000 in blocks of 512


def test_each_traced_line_takes_what_the_allocator_counts_when_it_runs_alone(
    device: Accelerator,
) -> None:
    if device.backend == "cuda" and not torch_private.SET_METADATA.is_there():
        pytest.skip("this torch's history says when a block was freed, not in which line")
    truth = traced_cells.measured(device.backend)
    told = traced_cells.traced(device.backend)
    for statement, alone, line in zip(traced_cells.STATEMENTS, truth, told, strict=True):
        slack = traced_cells.SLACK.get(device.backend, 0)
        assert all(abs(one - other) <= slack for one, other in zip(line, alone, strict=True)), (
            statement,
            line,
            alone,
        )


def test_a_dry_run_can_begin_where_the_allocators_blocks_lie(device: Accelerator) -> None:
    kept = [torch.ones(3 * MIB, device=device.name) for _ in range(3)]
    del kept[1]
    figures = allocator.device_stats(device.name)
    assert figures is not None
    found = segments.read_segments(device.name, figures)
    assert found is not None
    owned = {block.address for segment in found for block in segment.blocks if block.is_owned}
    assert {each.data_ptr() for each in kept} <= owned


COPIES = {
    "to": "x.to('{name}')",
    "to with dtype": "x.to('{name}', torch.float16)",
    "the backend's method": "x.{backend}()",
    "cpu": "g.cpu()",
    "copy_": "g.copy_(x)",
    "tensor of a list": "torch.tensor([1.0, 2.0, 3.0])",
    "item": "g[0, 0].item()",
    "tolist": "g.tolist()",
    "module": "torch.nn.Linear(4, 3, device='cpu').to('{name}')",
    "optimizer": "torch.optim.Adam([g.requires_grad_()], lr=0.1).zero_grad()",
    "several lines": "y = x.to('{name}')\nz = (y * 2).cpu()\nw = z.tolist()",
}


@pytest.mark.parametrize("what", COPIES)
def test_ondevice_reports_the_copies_that_the_device_counts(device: Accelerator, what: str) -> None:
    code = compile(COPIES[what].format(name=device.name, backend=device.backend), __file__, "exec")
    names = {"torch": torch, "x": torch.ones(100, 10), "g": torch.ones(100, 10, device=device.name)}
    exec(code, dict(names))  # contexts and caches are warm before anything is counted
    with device.copied() as copied, gpumagic.ondevice(device.name) as run:
        exec(code, names)
        device.torch.synchronize()
    assert run.report is not None
    assert copied.count == _summed(run.report, "count")
    assert copied.nbytes == _summed(run.report, "nbytes")


def _summed(report: gpumagic.TransferReport, field: str) -> dict[str, int]:
    directions = {row.direction for row in report}
    return {
        each: sum(getattr(row, field) for row in report if row.direction == each)
        for each in directions
    }


def test_ondevice_makes_the_device_the_default_and_the_current_one(device: Accelerator) -> None:
    index = device.torch.device_count() - 1
    name = f"{device.backend}:{index}"
    with gpumagic.ondevice(name):
        assert str(torch.zeros(1).device) == name
        assert torch.zeros(1, device="cpu").to(device.backend).device.index == index
        assert device.torch.current_device() == index
    assert str(torch.zeros(1).device) == "cpu"
    assert device.torch.current_device() == 0


def test_oomguard_gives_everything_back(device: Accelerator) -> None:
    gc.collect()
    device.torch.empty_cache()
    before = device.allocated()
    _, total = device.torch.mem_get_info(0)

    def fill() -> list[torch.Tensor]:
        chunks = []
        while True:
            chunks.append(torch.empty(total // 8, dtype=torch.uint8, device=device.name))

    with pytest.raises(gpumagic.OutOfMemory) as caught, gpumagic.oomguard() as guard:
        fill()
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert device.allocated() == before
    assert guard.report is not None
    assert guard.report.requested == pytest.approx(
        total // 8, rel=0.001
    )  # torch's message rounds it
    assert guard.report.allocated_at_failure > before
    assert guard.report.allocated_after == before
