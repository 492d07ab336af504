"""The report of `%gpuinfo`: a row a GPU, in which each figure is declared once, and the processes.

A figure's declaration says what the driver is asked, how the answer is written, and in which column. What reads figures
(`cards`), joins them (`probe`) and shows them (`view`) goes through the declarations; so do the reasons for those that
are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic.gpus.nvml import Unavailable
from gpumagic.report.base import Origin, Report
from gpumagic.report.document import Column
from gpumagic.report.units import percent, size

if TYPE_CHECKING:
    from gpumagic.gpus.nvml import Query


def call(name: str, *arguments: Any) -> tuple[Query]:
    """Return the call of the function ``nvmlDeviceGet...``, with its arguments after the device's handle."""
    return ((f"nvmlDeviceGet{name}", *arguments),)


@dataclass(frozen=True, slots=True)
class Figure:
    """How one figure is read and shown."""

    label: str
    """What ``-a`` calls it."""
    show: Callable[..., str] = str
    """Returns it as text; its maximum is the second argument where it has one."""
    read: tuple[Query, ...] = ()
    """What is asked: the newest version first, then those that older drivers know (the newest drop them)."""
    to: Callable[[Any], Any] = str
    """Makes the figure of the answer."""
    column: Column[Any] | None = None
    extra: bool = False
    """Whether the table says nothing where no device has it; ``-a`` says why."""
    title: str = ""
    """What the table's sentences call it where it is absent; by default its column's title."""
    most: str = ""
    """The name of the field that has its maximum."""
    of_instance: bool = False
    """Whether it is read of MIG instances too; all else the driver has for the whole card only (nvitop#5)."""


def figure(label: str, show: Callable[..., str] = str, **declared: Any) -> Any:
    """Return the dataclass field of a `Figure`, which is None until it is read."""
    column: Column[Any] | None = declared.get("column")
    if column is not None:
        declared.setdefault("title", column.title)
    return field(default=None, metadata={"figure": Figure(label, show, **declared)})


# Numbers of NVML's ABI that the declarations use.
CORE_SENSOR = 0
SM_CLOCK = 1
UNCORRECTED = 1
SINCE_LOADED = 0
MEMORY = (*call("MemoryInfo", 0x2000028), *call("MemoryInfo"))
"""Version 2 of the struct has what the driver reserves apart. The old form is tried after any error: version 2 fails on
WSL where the old one works, and gpustat replaces the getter by one that takes no version."""

# Bits of the clocks-event mask. "Idle" (1) is left out: it slows down nothing that anyone waits for.
THROTTLE_REASONS = {
    0x2: "application clocks setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "power brake",
    0x100: "display clock setting",
    0x200: "board limit",
    0x400: "reliability limit",
}


def reserved(memory: Any) -> int:
    """Return what the driver reserves for itself."""
    if not hasattr(memory, "reserved"):
        raise Unavailable("counted in memory_used by this driver")
    return int(memory.reserved)


def throttle_reasons(mask: int) -> tuple[str, ...]:
    """Return the reasons in a clocks-event mask, in words; empty for a card that is idle or not throttled."""
    words = [word for bit, word in THROTTLE_REASONS.items() if mask & bit]
    unknown = int(mask) & ~(sum(THROTTLE_REASONS) | 1)
    if unknown:
        words.append(f"unknown reason {unknown:#x}")
    return tuple(words)


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
    reason: str | None = None
    """Why ``memory`` is None."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One device: the driver's figures, joined with this kernel's memory on it.

    A figure that is added here is read, is a column of `to_pandas`, stands in ``-a`` and, with a ``column``, in the
    table, and has a reason where it is None.
    """

    device: str | None
    """Torch's name in this process, such as ``"cuda:1"``; None if torch cannot use it."""
    nvml_index: int | None = figure(
        "NVML index", column=Column("NVML", align="right", priority=2)
    )
    uuid: str | None = figure("UUID", read=call("UUID"), of_instance=True)
    name: str | None = figure(
        "",
        read=call("Name"),
        column=Column("Name", shrinks=True),
        of_instance=True,
    )
    memory_total: int | None = figure(
        "Memory, total",
        size,
        read=MEMORY,
        to=lambda memory: int(memory.total),
        column=Column("Memory"),
        of_instance=True,
    )
    memory_used: int | None = figure(
        "Memory, used",
        size,
        read=MEMORY,
        to=lambda memory: int(memory.used),
        of_instance=True,
    )
    memory_free: int | None = figure(
        "Memory, free",
        size,
        read=MEMORY,
        to=lambda memory: int(memory.free),
        of_instance=True,
    )
    """As the driver says, never total less used: whether "used" contains "reserved" depends on the driver."""
    memory_reserved: int | None = figure(
        "Memory, driver's own",
        size,
        read=MEMORY,
        to=reserved,
        of_instance=True,
    )
    """Bytes the driver keeps for itself (NVML v2's ``reserved``); not part of torch's "reserved"."""
    kernel_allocated: int | None = figure(
        "This kernel, tensors",
        size,
        column=Column("This kernel", align="right", priority=1),
    )
    """Bytes in live tensors of this process, by torch's allocator."""
    kernel_reserved: int | None = figure("This kernel, with cache", size)
    """Bytes torch's allocator took from the driver, allocated or cached."""
    other_processes: int | None = figure(
        "Other processes", size, column=Column("Others", align="right", priority=4)
    )
    """Bytes the driver charges to processes other than this kernel."""
    utilization: float | None = figure(
        "Utilization",
        percent,
        read=call("UtilizationRates"),
        to=lambda rates: float(rates.gpu),
        column=Column("Util", align="right", priority=3),
    )
    """Percent of the last sample period in which any kernel ran; 100 does not mean full."""
    temperature: float | None = figure(
        "Temperature",
        lambda degrees: f"{degrees:.0f} C",
        column=Column("Temp", align="right", priority=5),
        to=float,
        read=(*call("TemperatureV", CORE_SENSOR), *call("Temperature", CORE_SENSOR)),
    )
    """Degrees Celsius."""
    power: float | None = figure(
        "Power",
        lambda now, most: f"{now:.0f} W" if most is None else f"{now:.0f}/{most:.0f} W",
        read=call("PowerUsage"),
        to=lambda milliwatts: milliwatts / 1000,
        most="power_limit",
        column=Column("Power", align="right", priority=6),
    )
    """Watts."""
    power_limit: float | None = figure(
        "", read=call("EnforcedPowerLimit"), to=lambda milliwatts: milliwatts / 1000
    )
    """Watts."""
    throttle_reasons: tuple[str, ...] | None = figure(
        "Throttled by",
        lambda reasons: ", ".join(reasons) or "nothing",
        title="Throttling",
        read=(
            *call("CurrentClocksEventReasons"),
            *call("CurrentClocksThrottleReasons"),
        ),
        to=throttle_reasons,
    )
    """Why the clocks are throttled, in words; empty if they are not."""
    processes: tuple[ProcessRow, ...] | None = None
    clock_sm: int | None = figure(
        "SM clock",
        lambda now, most: f"{now} MHz" if most is None else f"{now} / {most} MHz",
        to=int,
        most="clock_sm_max",
        read=call("ClockInfo", SM_CLOCK),
        column=Column("SM clock", align="right", priority=8),
        extra=True,
    )
    """MHz."""
    clock_sm_max: int | None = figure("", read=call("MaxClockInfo", SM_CLOCK), to=int)
    ecc_errors: int | None = figure(
        "Uncorrected memory errors",
        read=call("TotalEccErrors", UNCORRECTED, SINCE_LOADED),
        to=int,
    )
    """Uncorrected memory errors since the driver was loaded."""
    unified: bool = False
    """True where the device has no memory of its own: ``memory_total`` and ``memory_free`` are then the host's, and
    ``memory_used`` is what the driver charges to processes on it."""
    predicted: bool = False
    """True where ``device`` was inferred from the environment and CUDA may number differently."""
    simulated: bool = False
    """True for a simgpu device."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a field is None, by field name."""

    @property
    def is_instance(self) -> bool:
        """Return whether it is a MIG instance."""
        return (self.uuid or "").startswith("MIG-")

    @property
    def label(self) -> str:
        """Return torch's name of a device, or NVML's where torch has none."""
        if self.device:
            return self.device
        kind = " MIG" if self.is_instance else ""
        return f"NVML {self.nvml_index}{kind}"


FIGURES: dict[str, Figure] = {
    declared.name: declared.metadata["figure"]
    for declared in fields(GpuRow)
    if "figure" in declared.metadata
}
NULLABLE = tuple(
    declared.name for declared in fields(GpuRow) if str(declared.type).endswith("None")
)
"""The fields that may be absent, and then have a reason."""
NOT_KNOWN = "not known"
"""The reason for what nobody says."""
SIMULATED = "simulated"
"""The reason for what a simulated device does not have."""


@dataclass(frozen=True, repr=False)
class GPUReport(Report[GpuRow]):
    """The GPUs of this machine and this kernel's part in them, at one moment."""

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


class CellChange(NamedTuple):
    """What one cell did on one device, by the allocator's counters."""

    device: str
    growth: int
    """Allocated bytes after the cell less those before; negative where it freed."""
    allocated: int
    """After the cell."""
    peak: int | None
    """Peak bytes during the cell; None where the allocator's counter did not rise, and so does not tell."""
