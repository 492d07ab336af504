"""One snapshot of the GPUs -> the rows that a recording keeps of it."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.cluster.report import ClusterReport
from gpumagic.cluster.shared_gpus import SharedGpu, shared_gpus
from gpumagic.gpus.report import GPUReport, GpuRow, SampleRow

FEW = 32
"""GPUs of a cluster with a row each; of more, each host has one."""


def samples(seconds: float, report: GPUReport | ClusterReport) -> tuple[SampleRow, ...]:
    """Return a row a device, at a moment of the recording; of many engines a row a GPU, or a host."""
    if isinstance(report, GPUReport):
        return tuple(_sample(seconds, _name(row), row, row.kernel_allocated) for row in report.devices)
    gpus = shared_gpus(report)
    hosts: dict[str, list[SharedGpu]] = {}
    for gpu in gpus:
        hosts.setdefault(gpu.host, []).append(gpu)
    if len(gpus) > FEW:
        return tuple(_of_host(seconds, host, of_host) for host, of_host in hosts.items())
    several = len(hosts) > 1
    return tuple(_sample(seconds, _label(gpu, several), gpu.reading, gpu.allocated) for gpu in gpus)


def _name(row: GpuRow) -> str:
    return row.device or f"NVML {row.nvml_index}"


def _label(gpu: SharedGpu, several_hosts: bool) -> str:
    """Return what tells a GPU from the others: its host's name before it, or its process's engine."""
    names = {_name(kernel.row) for kernel in gpu.kernels}
    name = names.pop() if len(names) == 1 else f"NVML {gpu.reading.nvml_index}"
    parts = [gpu.host] * several_hosts + [f"engine {gpu.kernels[0].answer.engine}"] * gpu.reading.simulated
    return " ".join([*parts, name])


def _sample(seconds: float, device: str, row: GpuRow, allocated: int | None) -> SampleRow:
    return SampleRow(
        seconds=seconds, device=device, memory_used=row.memory_used, memory_total=row.memory_total,
        kernel_allocated=allocated, utilization=row.utilization, temperature=row.temperature, power=row.power,
    )  # fmt: skip


def _of_host(seconds: float, host: str, gpus: Sequence[SharedGpu]) -> SampleRow:
    busy = [gpu.reading.utilization for gpu in gpus if gpu.reading.utilization is not None]
    return SampleRow(
        seconds=seconds, device=host, memory_used=sum(gpu.used or 0 for gpu in gpus),
        memory_total=sum(gpu.reading.memory_total or 0 for gpu in gpus),
        kernel_allocated=sum(gpu.allocated for gpu in gpus), utilization=sum(busy) / len(busy) if busy else None,
    )  # fmt: skip
