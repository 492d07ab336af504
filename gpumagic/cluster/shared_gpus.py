"""The GPUs behind the reports of many processes: one that several of them see is one, with several kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumagic.cluster.report import ClusterReport, EngineAnswer
from gpumagic.gpus.report import GPUReport, GpuRow, SampleRow, name_of, sample, samples


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """What one engine has on a GPU."""

    answer: EngineAnswer
    row: GpuRow
    """The GPU as this engine sees it, under its own name for it."""


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """One GPU, and the engines that see it."""

    host: str
    kernels: tuple[GpuKernel, ...]

    @property
    def reading(self) -> GpuRow:
        """Return what the last of its engines read of the driver: the readings are some milliseconds apart."""
        return self.kernels[-1].row

    @property
    def users(self) -> tuple[GpuKernel, ...]:
        """Return the kernels that hold memory there."""
        return tuple(kernel for kernel in self.kernels if kernel.row.kernel_reserved)

    @property
    def allocated(self) -> int:
        """Return the bytes in live tensors of all its kernels."""
        return sum(kernel.row.kernel_allocated or 0 for kernel in self.kernels)

    @property
    def reserved(self) -> int:
        """Return the bytes that the allocators of all its kernels hold."""
        return sum(kernel.row.kernel_reserved or 0 for kernel in self.kernels)

    @property
    def used(self) -> int | None:
        """Return the bytes in use on it: the driver's figure, or None."""
        return self.reading.memory_used

    @property
    def share(self) -> float:
        """Return how much of its memory is in use, from 0 to 1; 0 where that is not known."""
        return (self.used or 0) / (self.reading.memory_total or 1)


def shared_gpus(report: ClusterReport) -> tuple[SharedGpu, ...]:
    """Return the GPUs of a merged `%gpuinfo`, by host and then in the order in which their engines list them."""
    found: dict[tuple[object, ...], dict[tuple[str, int | None, int | str], GpuKernel]] = {}
    for answer, row in _seen(report.engines):
        process = (answer.origin.host, answer.origin.pid, "" if answer.origin.pid else answer.engine)
        found.setdefault(_identity(answer, row), {})[process] = GpuKernel(answer, row)
    gpus = [SharedGpu(str(key[0]), tuple(kernels.values())) for key, kernels in found.items()]
    return tuple(sorted(gpus, key=lambda gpu: gpu.host))


def _seen(answers: Iterable[EngineAnswer]) -> Iterable[tuple[EngineAnswer, GpuRow]]:
    for answer in answers:
        if isinstance(answer.report, GPUReport):
            for row in answer.report.devices:
                yield answer, row


def _identity(answer: EngineAnswer, row: GpuRow) -> tuple[object, ...]:
    """Return what tells a GPU from all others; a simulated one is its process's own."""
    if row.simulated:
        return answer.origin.host, answer.origin.pid or answer.engine, row.device
    return answer.origin.host, row.uuid or row.device or row.nvml_index


MOST_GPUS = 32
"""GPUs of a cluster with a row each in a recording; of more, each host has one."""


@samples.register(ClusterReport)
def _samples_of_engines(snapshot: ClusterReport, seconds: float) -> tuple[SampleRow, ...]:
    gpus = shared_gpus(snapshot)
    hosts: dict[str, list[SharedGpu]] = {}
    for gpu in gpus:
        hosts.setdefault(gpu.host, []).append(gpu)
    if len(gpus) > MOST_GPUS:
        return tuple(_of_host(seconds, host, of_host) for host, of_host in hosts.items())
    several = len(hosts) > 1
    return tuple(sample(seconds, _label(gpu, several), gpu.reading, gpu.allocated) for gpu in gpus)


def _label(gpu: SharedGpu, several_hosts: bool) -> str:
    """Return what tells a GPU from the others: its host's name before it, or its process's engine."""
    names = {name_of(kernel.row) for kernel in gpu.kernels}
    name = names.pop() if len(names) == 1 else f"NVML {gpu.reading.nvml_index}"
    parts = [gpu.host] * several_hosts + [f"engine {gpu.kernels[0].answer.engine}"] * gpu.reading.simulated
    return " ".join([*parts, name])


def _of_host(seconds: float, host: str, gpus: Sequence[SharedGpu]) -> SampleRow:
    busy = [gpu.reading.utilization for gpu in gpus if gpu.reading.utilization is not None]
    return SampleRow(
        seconds=seconds, device=host, memory_used=sum(gpu.used or 0 for gpu in gpus),
        memory_total=sum(gpu.reading.memory_total or 0 for gpu in gpus),
        kernel_allocated=sum(gpu.allocated for gpu in gpus), utilization=sum(busy) / len(busy) if busy else None,
    )  # fmt: skip
