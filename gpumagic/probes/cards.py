"""What NVML knows of every card: one reading a field, each with its own fallback and its own reason.

The newest form of a question is asked first, then the one older drivers know. What is only shown on request
(``everything``) is only asked then. PCIe throughput is never asked: it blocks for 20 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from gpumagic.probes import nvml
from gpumagic.probes.nvml import Failure, Readings

# Bits of NVML's clocks-event mask. "Idle" is left out: it holds nothing back that anyone waits for.
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
LARGEST_PID = 2**22 if sys.platform != "win32" else 2**32


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the driver lists it; its pid may be of another pid namespace."""

    pid: int
    memory: int | None
    kind: str


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a MIG instance of one, as NVML sees it."""

    index: int
    """NVML's index; for an instance that of its card."""
    values: Mapping[str, Any]
    """Figures by the names of `GpuRow`'s fields."""
    reasons: Mapping[str, str]
    processes: tuple[Process, ...] | None = None
    instances: tuple[Card, ...] = ()
    mig: bool = False
    """Whether the card is in MIG mode: CUDA then uses its instances, never the card itself."""
    is_instance: bool = False

    @property
    def uuid(self) -> str | None:
        """Return the UUID with its ``GPU-`` or ``MIG-`` prefix, None if it could not be read."""
        uuid: str | None = self.values.get("uuid")
        return uuid


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All cards of the machine at one moment."""

    cards: tuple[Card, ...]
    driver_version: str | None
    shadowed: bool = False
    """Whether the deprecated package `pynvml` stands in nvidia-ml-py's place."""


def snapshot(*, everything: bool = False) -> Snapshot | Failure:
    """Read every card, whatever is wrong with some of them; or return why NVML does not answer."""
    answer = _count()
    if isinstance(answer, Failure):
        return answer
    binding, count = answer
    system = Readings()
    driver = system.take("driver_version", lambda: _text(binding.nvmlSystemGetDriverVersion()))
    cards = tuple(_card(binding, index, everything) for index in range(count))
    return Snapshot(cards, driver, nvml.is_shadowed(binding))


def _count() -> tuple[ModuleType, int] | Failure:
    for attempt in range(2):
        binding = nvml.connect()
        if isinstance(binding, Failure):
            return binding
        try:
            return binding, int(binding.nvmlDeviceGetCount())
        except Exception as error:
            if attempt or nvml.code(error) != nvml.UNINITIALIZED:
                return nvml.failure(error)
            nvml.forget()
    raise AssertionError("unreachable: the second attempt returns")


def _card(binding: ModuleType, index: int, everything: bool) -> Card:
    readings = Readings()
    handle = readings.take("handle", lambda: binding.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return Card(index, {}, {"all": readings.reasons["handle"]})
    del readings.values["handle"]
    mode = Readings().take("mig", lambda: binding.nvmlDeviceGetMigMode(handle))
    mig = bool(mode and mode[0])
    _identity(readings, binding, handle)
    _memory(readings, binding, handle)
    _condition(readings, binding, handle)
    if everything:
        _details(readings, binding, handle)
    processes = _processes(readings, binding, handle)
    if mig:
        readings.reasons.update(_because_of_mig(readings.reasons))
    instances = _instances(binding, handle, index) if mig else ()
    return Card(index, readings.values, readings.reasons, processes, instances, mig)


def _instances(binding: ModuleType, parent: Any, index: int) -> tuple[Card, ...]:
    limit = Readings().take("limit", lambda: int(binding.nvmlDeviceGetMaxMigDeviceCount(parent))) or 0
    found = []
    ask = binding.nvmlDeviceGetMigDeviceHandleByIndex
    for number in range(limit):
        handle = Readings().take("mig", partial(ask, parent, number))
        if handle is not None:  # places without an instance are "not found"
            found.append(_instance(binding, handle, index))
    return tuple(found)


def _instance(binding: ModuleType, handle: Any, index: int) -> Card:
    readings = Readings()
    _identity(readings, binding, handle)
    _memory(readings, binding, handle)
    processes = _processes(readings, binding, handle)
    # The driver keeps all else for the whole card only (nvitop#5, dcgm-exporter#216); 0 would be a lie.
    return Card(index, readings.values, {"all": "n/a (MIG)", **readings.reasons}, processes, is_instance=True)


def _because_of_mig(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: "n/a (MIG)" for name, reason in reasons.items() if reason == "not supported"}


def _identity(readings: Readings, binding: ModuleType, handle: Any) -> None:
    readings.take("name", lambda: _text(binding.nvmlDeviceGetName(handle)))
    readings.take("uuid", lambda: _text(binding.nvmlDeviceGetUUID(handle)))


def _memory(readings: Readings, binding: ModuleType, handle: Any) -> None:
    found = Readings()
    memory = found.take(
        "memory",
        lambda: binding.nvmlDeviceGetMemoryInfo(handle, version=binding.nvmlMemory_v2),
        # The second form after any error: v2 is refused on WSL where v1 works, and gpustat replaces the
        # getter by one that takes no version.
        lambda: binding.nvmlDeviceGetMemoryInfo(handle),
    )
    if memory is None:
        names = ("memory_total", "memory_used", "memory_free", "memory_reserved")
        readings.reasons.update(dict.fromkeys(names, found.reasons["memory"]))
        return
    readings.values.update(
        memory_total=int(memory.total), memory_used=int(memory.used), memory_free=int(memory.free)
    )  # free as given, never total - used: whether "used" contains "reserved" depends on the driver
    if hasattr(memory, "reserved"):
        readings.values["memory_reserved"] = int(memory.reserved)
    else:
        readings.reasons["memory_reserved"] = "counted in memory_used by this driver"


def _condition(readings: Readings, binding: ModuleType, handle: Any) -> None:
    take, sensor = readings.take, 0
    take("utilization", lambda: float(binding.nvmlDeviceGetUtilizationRates(handle).gpu))
    take(
        "temperature",
        lambda: float(binding.nvmlDeviceGetTemperatureV(handle, sensor)),
        lambda: float(binding.nvmlDeviceGetTemperature(handle, sensor)),
    )
    take("power", lambda: binding.nvmlDeviceGetPowerUsage(handle) / 1000)
    take("power_limit", lambda: binding.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    take(
        "throttle_reasons",
        lambda: throttle_words(binding.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        lambda: throttle_words(binding.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    )


def _details(readings: Readings, binding: ModuleType, handle: Any) -> None:
    take, sm, memory = readings.take, 1, 2
    take("bus_id", lambda: _text(binding.nvmlDeviceGetPciInfo(handle).busId))
    take(
        "performance_state",
        lambda: _state(binding.nvmlDeviceGetPerformanceState(handle)),
        lambda: _state(binding.nvmlDeviceGetPowerState(handle)),
    )
    take("fan", lambda: float(binding.nvmlDeviceGetFanSpeed(handle)))
    take("clock_sm", lambda: int(binding.nvmlDeviceGetClockInfo(handle, sm)))
    take("clock_sm_max", lambda: int(binding.nvmlDeviceGetMaxClockInfo(handle, sm)))
    take("clock_memory", lambda: int(binding.nvmlDeviceGetClockInfo(handle, memory)))
    take("clock_memory_max", lambda: int(binding.nvmlDeviceGetMaxClockInfo(handle, memory)))
    take("compute_capability", lambda: "{}.{}".format(*binding.nvmlDeviceGetCudaComputeCapability(handle)))


def _processes(readings: Readings, binding: ModuleType, handle: Any) -> tuple[Process, ...] | None:
    total = readings.values.get("memory_total")
    found: dict[int, Process] = {}
    for kind, name in (("graphics", "Graphics"), ("compute", "Compute")):
        ask = partial(_list, binding, handle, f"nvmlDeviceGet{name}RunningProcesses", total)
        answers = Readings()
        listed = answers.take("processes", partial(ask, "_v3"), partial(ask, "_v2"))
        if listed is None and kind == "compute":
            readings.reasons["processes"] = answers.reasons["processes"]
            return None
        for process in listed or ():
            _add(found, Process(process[0], process[1], kind))
    return tuple(found.values())


def _add(found: dict[int, Process], process: Process) -> None:
    """Keep a process that is in both lists once: the driver charges it the same memory in each."""
    known = found.get(process.pid)
    if known is not None and process.memory is None:
        process = replace(process, memory=known.memory)
    found[process.pid] = process


def _list(
    binding: ModuleType, handle: Any, getter: str, total: int | None, version: str
) -> list[tuple[int, int | None]]:
    """Return (pid, bytes) pairs, or raise where the list was read by the wrong layout (nvitop#75, #88)."""
    pairs = [(int(each.pid), each.usedGpuMemory) for each in getattr(binding, getter + version)(handle)]
    for pid, memory in pairs:
        if not 0 < pid < LARGEST_PID or (total and memory is not None and memory > total):
            raise ValueError("a process list of another layout")
    return pairs


def throttle_words(mask: int) -> tuple[str, ...]:
    """Return what a clocks-event mask says, in words; empty for a card that is idle or runs free."""
    words = [word for bit, word in THROTTLE_REASONS.items() if mask & bit]
    unknown = int(mask) & ~(sum(THROTTLE_REASONS) | 1)
    return (*words, f"unknown reason {unknown:#x}") if unknown else tuple(words)


def _state(number: int) -> str:
    if not 0 <= number <= 15:
        raise ValueError("unknown performance state")
    return f"P{number}"


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
