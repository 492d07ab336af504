"""What a user's editor knows of each public name. Never run: mypy reads it, and fails where a type is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import gpumagic
from gpumagic.advice.records import Advice
from gpumagic.cluster.report import PlacedRow
from gpumagic.dryrun.report import DryRunRow
from gpumagic.gpus.report import GpuRow, ProcessRow
from gpumagic.oom.report import OomReport
from gpumagic.tensors.report import DeviceMemoryRow, DiffRow, FreedRow, TensorRow, WayRow
from gpumagic.transfers.report import TransferReport, TransferRow
from gpumagic.transfers.run import DeviceRun

if TYPE_CHECKING:
    from typing_extensions import assert_type


def looking() -> None:
    gpus, tensors = gpumagic.gpuinfo(), gpumagic.devices()
    assert_type(gpus[0], GpuRow)
    assert_type(gpus[0].memory_total, int | None)
    assert_type(gpus[0].processes, tuple[ProcessRow, ...] | None)
    assert_type(gpus.best, str | None)
    assert_type(gpus.cause, str | None)
    assert_type(tensors[0], TensorRow)
    assert_type(tensors[0].shape, tuple[int, ...])
    assert_type(tensors.by_device, tuple[DeviceMemoryRow, ...])
    assert_type(tensors.leaks()[0], TensorRow)
    assert_type(tensors.since(tensors)[0], DiffRow)
    assert_type(gpumagic.why("x")[0], WayRow)
    assert_type(gpumagic.free_leaks()[0], FreedRow)
    assert_type(gpumagic.merge([gpus])[0], PlacedRow)
    assert_type(gpumagic.merge([gpumagic.gpuinfo()])[0], PlacedRow)
    assert_type(gpumagic.simgpu.copies(), list[tuple[str, str, str, int]])


def running() -> None:
    with gpumagic.ondevice("auto", fallback="cpu") as run:
        pass
    assert_type(run.report, TransferReport | None)
    assert run.report is not None
    assert_type(run.report.moves, tuple[TransferRow, ...])
    assert_type(run.report.peak, Mapping[str, int])
    with gpumagic.oomguard() as guard:
        pass
    assert_type(guard.report, OomReport | None)
    assert guard.report is not None
    assert_type(guard.report.advice, tuple[Advice, ...])


def dry_runs() -> None:
    report = gpumagic.dry_run("x = 1")
    assert_type(report[0], DryRunRow)
    assert_type(report.peak, dict[str, int])
    assert_type(report.fits, bool | None)
    assert_type(report.largest, int | None)


@gpumagic.ondevice("cuda:1")
def on_device(batch: int) -> str:
    return str(batch)


@gpumagic.oomguard(shrink="batch")
def guarded(batch: int = 256) -> str:
    return str(batch)


class Model:
    @gpumagic.ondevice("cuda:1")
    def forward(self, batch: int) -> str:
        return str(batch)


def decorating() -> None:
    assert_type(on_device(1), str)
    assert_type(on_device.run, DeviceRun)
    assert_type(guarded(batch=1), str)
    assert_type(Model().forward(1), str)
