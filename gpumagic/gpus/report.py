"""The reports of `%gpuinfo`, including those of `-w` and `--each-cell`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpumagic.memory.timeline import MemoryTimeline, plot
from gpumagic.report.base import Origin, Report, to_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process on one device, as the driver reports it."""

    pid: int | None
    """The process id, or None where the driver's number means nothing here (a container)."""
    name: str | None
    user: str | None
    memory: int | None
    """Bytes of device memory the driver charges to it; None where it does not say (WDDM, WSL)."""
    this_kernel: bool = False
    kind: str = "compute"
    """``"compute"`` or ``"graphics"``."""
    utilization: float | None = None
    """Percent of the last second in which its kernels ran, where the driver has a sample; read with ``processes``."""
    reason: str | None = None
    """Why ``memory`` is None."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One device: the driver's figures, joined with this kernel's memory on it."""

    device: str | None
    """Torch's name in this process, such as ``"cuda:1"``; None if torch cannot use it."""
    nvml_index: int | None = None
    uuid: str | None = None
    name: str | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    memory_reserved: int | None = None
    """Bytes the driver keeps for itself (NVML v2's ``reserved``); not part of torch's "reserved"."""
    kernel_allocated: int | None = None
    """Bytes in live tensors of this process, by torch's allocator."""
    kernel_reserved: int | None = None
    """Bytes torch's allocator took from the driver, allocated or cached."""
    other_processes: int | None = None
    """Bytes the driver charges to processes other than this kernel."""
    utilization: float | None = None
    """Percent of the last sample period in which any kernel ran; 100 does not mean full."""
    temperature: float | None = None
    """Degrees Celsius."""
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    """Watts."""
    throttle_reasons: tuple[str, ...] | None = None
    """Why the clocks are throttled, in words; empty if they are not."""
    processes: tuple[ProcessRow, ...] | None = None
    bus_id: str | None = None
    performance_state: str | None = None
    """``"P0"`` (fastest) to ``"P15"``."""
    fan: float | None = None
    """Percent."""
    clock_sm: int | None = None
    """MHz."""
    clock_sm_max: int | None = None
    clock_memory: int | None = None
    clock_memory_max: int | None = None
    compute_capability: str | None = None
    memory_utilization: float | None = None
    """Percent of the last sample period in which memory was read or written: bandwidth, not occupancy."""
    encoder_utilization: float | None = None
    decoder_utilization: float | None = None
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    """Lanes."""
    pcie_width_max: int | None = None
    pcie_sent: int | None = None
    """Bytes per second from the device to the host, over 20 ms."""
    pcie_received: int | None = None
    nvlinks: int | None = None
    """NVLinks that are up."""
    nvlink_sent: int | None = None
    """Bytes per second over all NVLinks while the report was made."""
    nvlink_received: int | None = None
    topology: Mapping[str, str] | None = None
    """The connection to each other GPU, such as ``"NVLink"``, by NVML index."""
    unified: bool = False
    """True where the device has no memory of its own: ``memory_total`` and ``memory_free`` are then the host's, and
    ``memory_used`` is what the driver charges to processes on it."""
    predicted: bool = False
    """True where ``device`` was inferred from the environment and CUDA may number differently."""
    simulated: bool = False
    """True for a simgpu device."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a field is None, by field name."""


@dataclass(frozen=True, repr=False)
class GPUReport(Report[GpuRow]):
    """The GPUs of this machine and this kernel's part in them, at one moment."""

    row_type: ClassVar[type[Any]] = GpuRow

    devices: tuple[GpuRow, ...]
    torch_version: str | None = None
    """None if torch is not installed."""
    cuda_build: str | None = None
    """CUDA (or ROCm) version torch was built with; None for a CPU-only build."""
    driver_version: str | None = None
    cuda_visible_devices: str | None = None
    """The environment variable as this process has it; None if it is not set."""
    best: str | None = None
    """The torch device with most free memory of those in the report; of all, it is ``%%ondevice auto``."""
    cause: str | None = None
    """Why there is no GPU, with the remedy, in one sentence; None if there is one."""
    show_processes: bool = False
    show_all: bool = False
    notes: tuple[str, ...] = ()
    origin: Origin = field(default_factory=Origin)

    @property
    def rows(self) -> tuple[GpuRow, ...]:
        return self.devices


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One device in one sample of a recording."""

    seconds: float
    """Since the recording began."""
    device: str
    memory_used: int | None = None
    memory_total: int | None = None
    kernel_allocated: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    power: float | None = None


@dataclass(frozen=True, repr=False)
class HistoryReport(Report[SampleRow]):
    """The GPUs over time, one row per device and sample, oldest first."""

    row_type: ClassVar[type[Any]] = SampleRow

    samples: tuple[SampleRow, ...]
    latest: Report[Any] | None = None
    """The last snapshot, whole: a `GPUReport`, or of many engines a `ClusterReport`."""
    interval: float | None = None
    """Seconds from one snapshot to the next."""
    ended: str | None = None
    """Why the recording has ended; None while it runs."""
    until: str = "stopped"
    """What ends it."""

    @property
    def rows(self) -> tuple[SampleRow, ...]:
        return self.samples

    def plot(self) -> Figure:
        """Return a matplotlib figure of utilisation and memory over time, one line per device.

        Raises:
            GpuMagicError: matplotlib is not installed.
        """
        return to_figure(self)


@dataclass(frozen=True, slots=True)
class CellRow:
    """What one cell did on one device, by the allocator's counters."""

    cell: int
    """Its number: ``In [12]``."""
    code: str
    """Its first line of code."""
    seconds: float
    device: str
    allocated_before: int
    allocated_after: int
    growth: int
    """After less before; negative where it freed."""
    peak: int | None
    """Peak bytes during the cell; None where the allocator's counter did not rise, and so does not tell."""


@dataclass(frozen=True, repr=False)
class CellsReport(Report[CellRow]):
    """The last cells that changed a device's memory, one row per cell and device, oldest first."""

    row_type: ClassVar[type[Any]] = CellRow

    cells: tuple[CellRow, ...]
    timelines: Mapping[int, MemoryTimeline] = field(default_factory=dict)
    """The memory allocated during each cell, by its number."""
    recorded: int = 0
    """How many cells there were, including those that changed nothing."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[CellRow, ...]:
        return self.cells

    def plot(self, cell: int | None = None) -> Figure:
        """Return a matplotlib figure of the memory after each cell, or during one.

        Args:
            cell: the number of a cell.

        Raises:
            GpuMagicError: matplotlib is not installed, or there is nothing to draw.
        """
        if cell is not None:
            return plot(self.timelines.get(cell))
        return to_figure(self)


@functools.singledispatch
def sample_rows(snapshot: object, seconds: float) -> tuple[SampleRow, ...]:  # noqa: ARG001  # for those that register
    """Return the rows of a snapshot taken ``seconds`` after the recording began: one per device, or per host."""
    raise TypeError(f"{type(snapshot).__name__} is no snapshot of GPUs")


@sample_rows.register(GPUReport)
def _samples_here(snapshot: GPUReport, seconds: float) -> tuple[SampleRow, ...]:
    return tuple(sample_row(seconds, device_label(row), row, row.kernel_allocated) for row in snapshot.devices)


def device_label(row: GpuRow) -> str:
    """Return torch's name of a GPU, or else its NVML index."""
    return row.device or f"NVML {row.nvml_index}"


def sample_row(seconds: float, device: str, row: GpuRow, allocated: int | None) -> SampleRow:
    """Return the row of one GPU, with the bytes that kernels have allocated on it."""
    return SampleRow(
        seconds=seconds, device=device, memory_used=row.memory_used, memory_total=row.memory_total,
        kernel_allocated=allocated, utilization=row.utilization, temperature=row.temperature, power=row.power,
    )  # fmt: skip
