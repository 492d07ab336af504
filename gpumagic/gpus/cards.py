"""What NVML knows of every card and MIG instance at one moment, field by field, each with its own reason if absent.

The newest form of a question is asked first, then the one older drivers know (those go in CUDA 14).

The driver measures PCIe throughput over 20 ms and blocks for them. NVLink has counters instead; they are read
before and after, so that the time the other questions take is what the rate is measured over.

What is only shown on request (``everything``) is only asked then; some of it blocks for 20 ms a card.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from gpumagic.gpus import nvml, other_devices
from gpumagic.gpus.nvml import NvmlFailure, Readings
from gpumagic.gpus.processes import DriverProcess, list_processes, with_utilization

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


def read_identity(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read what the card is called."""
    readings.take("name", lambda: to_str(binding.nvmlDeviceGetName(handle)))
    readings.take("uuid", lambda: to_str(binding.nvmlDeviceGetUUID(handle)))


def read_memory(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read the memory as the driver counts it, what it keeps for itself apart where it says so."""
    found = Readings()
    figures = found.take(
        "memory",
        lambda: binding.nvmlDeviceGetMemoryInfo(handle, version=binding.nvmlMemory_v2),
        # The second form after any error: v2 is refused on WSL where v1 works, and gpustat replaces the
        # getter by one that takes no version.
        lambda: binding.nvmlDeviceGetMemoryInfo(handle),
    )
    if figures is None:
        names = ("memory_total", "memory_used", "memory_free", "memory_reserved")
        readings.reasons.update(dict.fromkeys(names, found.reasons["memory"]))
        return
    readings.values.update(
        memory_total=int(figures.total), memory_used=int(figures.used), memory_free=int(figures.free)
    )  # free as given, never total - used: whether "used" contains "reserved" depends on the driver
    if hasattr(figures, "reserved"):
        readings.values["memory_reserved"] = int(figures.reserved)
    else:
        readings.reasons["memory_reserved"] = "counted in memory_used by this driver"


def read_state(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read how busy, warm and fast the card is, and whether its memory is sound."""
    take, sensor, sm = readings.take, 0, 1
    rates = take("utilization", lambda: binding.nvmlDeviceGetUtilizationRates(handle))
    if rates is None:
        readings.reasons["memory_utilization"] = readings.reasons["utilization"]
    else:
        readings.values.update(utilization=float(rates.gpu), memory_utilization=float(rates.memory))
    take(
        "temperature",
        lambda: float(binding.nvmlDeviceGetTemperatureV(handle, sensor)),
        lambda: float(binding.nvmlDeviceGetTemperature(handle, sensor)),
    )
    take("power", lambda: binding.nvmlDeviceGetPowerUsage(handle) / 1000)
    take("power_limit", lambda: binding.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
    take(
        "throttle_reasons",
        lambda: decode_throttle_reasons(binding.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        lambda: decode_throttle_reasons(binding.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    )
    take("clock_sm", lambda: int(binding.nvmlDeviceGetClockInfo(handle, sm)))
    take("clock_sm_max", lambda: int(binding.nvmlDeviceGetMaxClockInfo(handle, sm)))
    take(
        "performance_state",
        lambda: _performance_state(binding.nvmlDeviceGetPerformanceState(handle)),
        lambda: _performance_state(binding.nvmlDeviceGetPowerState(handle)),
    )
    uncorrected, volatile = 1, 0
    take("ecc_errors", lambda: int(binding.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile)))


def read_details(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read what is only shown on request."""
    take, memory_clock = readings.take, 2
    take("bus_id", lambda: to_str(binding.nvmlDeviceGetPciInfo(handle).busId))
    take("fan", lambda: float(binding.nvmlDeviceGetFanSpeed(handle)))
    take("clock_memory", lambda: int(binding.nvmlDeviceGetClockInfo(handle, memory_clock)))
    take("clock_memory_max", lambda: int(binding.nvmlDeviceGetMaxClockInfo(handle, memory_clock)))
    take("compute_capability", lambda: "{}.{}".format(*binding.nvmlDeviceGetCudaComputeCapability(handle)))
    take("encoder_utilization", lambda: float(binding.nvmlDeviceGetEncoderUtilization(handle)[0]))
    take("decoder_utilization", lambda: float(binding.nvmlDeviceGetDecoderUtilization(handle)[0]))
    take("pcie_generation", lambda: int(binding.nvmlDeviceGetCurrPcieLinkGeneration(handle)))
    take("pcie_generation_max", lambda: int(binding.nvmlDeviceGetMaxPcieLinkGeneration(handle)))
    take("pcie_width", lambda: int(binding.nvmlDeviceGetCurrPcieLinkWidth(handle)))
    take("pcie_width_max", lambda: int(binding.nvmlDeviceGetMaxPcieLinkWidth(handle)))


def decode_throttle_reasons(mask: int) -> tuple[str, ...]:
    """Return what a clocks-event mask says, in words; empty for a card that is idle or runs free."""
    words = [word for bit, word in THROTTLE_REASONS.items() if mask & bit]
    unknown = int(mask) & ~(sum(THROTTLE_REASONS) | 1)
    return (*words, f"unknown reason {unknown:#x}") if unknown else tuple(words)


def to_str(value: Any) -> Any:
    """Return a text of the binding as str; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _performance_state(number: int) -> str:
    if not 0 <= number <= 15:
        raise ValueError("unknown performance state")
    return f"P{number}"


NVLINK_FIELDS = {"nvlink_sent": 138, "nvlink_received": 139}  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX: KiB so far
ALL_LINKS = 0xFFFFFFFF
MAX_LINKS = 36
MIN_INTERVAL = 0.005
"""Seconds: over less than that the difference of two counters is no rate."""
TOPOLOGY_LEVELS = {
    0: "same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one CPU's PCIe",
    40: "one NUMA node",
    50: "across CPUs",
}


@dataclass(frozen=True, slots=True)
class NvlinkCounters:
    """A card's NVLink counters at one moment, in bytes, or the reason why there are none."""

    moment: float
    values: Mapping[str, int]
    reasons: Mapping[str, str]


def read_nvlink_counters(binding: ModuleType, handle: Any) -> NvlinkCounters:
    """Read how much went over all NVLinks of a card since its driver was loaded."""
    # One entry more than wanted: NVML is said to touch the one after the last in NVLink queries (nvitop's source).
    wanted = [(number, ALL_LINKS) for number in (*NVLINK_FIELDS.values(), NVLINK_FIELDS["nvlink_received"])]
    answers = Readings()
    fields = answers.take("fields", lambda: binding.nvmlDeviceGetFieldValues(handle, wanted))
    found = Readings()
    for position, name in enumerate(NVLINK_FIELDS):
        if fields is None:
            found.reasons[name] = answers.reasons["fields"]
        else:
            found.take(name, lambda field=fields[position]: _field_value(binding, field) * 1024)  # type: ignore[misc]
    return NvlinkCounters(time.monotonic(), found.values, found.reasons)


def read_throughput(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read what goes over PCIe and NVLink, in bytes a second, and how many NVLinks are up."""
    before = read_nvlink_counters(binding, handle)
    sent, received = 0, 1
    readings.take("pcie_sent", lambda: binding.nvmlDeviceGetPcieThroughput(handle, sent) * 1024)
    readings.take("pcie_received", lambda: binding.nvmlDeviceGetPcieThroughput(handle, received) * 1024)
    readings.take("nvlinks", lambda: _count_nvlinks(binding, handle))
    add_nvlink_rates(readings, before, read_nvlink_counters(binding, handle))


def add_nvlink_rates(readings: Readings, before: NvlinkCounters, after: NvlinkCounters) -> None:
    """Add the rates between two readings of the counters."""
    seconds = after.moment - before.moment
    for name in NVLINK_FIELDS:
        if name not in before.values or name not in after.values:
            readings.reasons[name] = {**before.reasons, **after.reasons}[name]
        elif seconds < MIN_INTERVAL:
            readings.reasons[name] = "measured over too short a time"
        else:
            readings.values[name] = int((after.values[name] - before.values[name]) / seconds)


def read_topology(binding: ModuleType, handles: Sequence[Any], mine: int) -> dict[str, str]:
    """Return how a card reaches each other one, by NVML index; a pair that cannot be read is left out."""
    found = {}
    for index, handle in enumerate(handles):
        if index == mine or handle is None or handles[mine] is None:
            continue
        way = Readings().take("way", lambda: _connection_type(binding, handles[mine], handle))  # noqa: B023
        if way is not None:
            found[str(index)] = way
    return found


def _connection_type(binding: ModuleType, one: Any, other: Any) -> str:
    over_nvlink, fine = 2, 0
    if Readings().take("nvlink", lambda: int(binding.nvmlDeviceGetP2PStatus(one, other, over_nvlink))) == fine:
        return "NVLink"
    return TOPOLOGY_LEVELS[int(binding.nvmlDeviceGetTopologyCommonAncestor(one, other))]


def _count_nvlinks(binding: ModuleType, handle: Any) -> int:
    up = int(binding.nvmlDeviceGetNvLinkState(handle, 0))  # refused where the card has no NVLink at all
    for link in range(1, MAX_LINKS):
        state, refusal = nvml.query(partial(binding.nvmlDeviceGetNvLinkState, handle, link))
        if refusal:
            break  # it has no more of them
        up += int(state or 0)
    return up


def _field_value(binding: ModuleType, field: Any) -> int:
    if field.nvmlReturn != 0:
        raise binding.NVMLError(field.nvmlReturn)
    return int(field.value.ullVal)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or a MIG instance of one, as NVML sees it."""

    index: int
    """NVML's index; for an instance that of its card."""
    values: Mapping[str, Any]
    """Figures by the names of `GpuRow`'s fields."""
    reasons: Mapping[str, str]
    processes: tuple[DriverProcess, ...] | None = None
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
class Asked:
    """What a snapshot reads beyond the figures of the table."""

    processes: bool = False
    """How busy each process keeps its card; which processes there are is read in any case."""
    everything: bool = False


@dataclass(frozen=True, slots=True)
class NvmlSnapshot:
    """All cards of the machine at one moment."""

    cards: tuple[Card, ...]
    driver_version: str | None
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""
    shadowed: bool = False
    """Whether the deprecated package `pynvml` stands in nvidia-ml-py's place."""


def read_cards(*, processes: bool = False, everything: bool = False) -> NvmlSnapshot | NvmlFailure:
    """Read every card, whatever is wrong with some of them; or return why NVML does not answer."""
    answer = _connect_and_count()
    if isinstance(answer, NvmlFailure):
        return answer
    binding, count = answer
    driver = Readings().take("driver_version", lambda: to_str(binding.nvmlSystemGetDriverVersion()))
    cuda = Readings().take(
        "cuda_version", binding.nvmlSystemGetCudaDriverVersion_v2, binding.nvmlSystemGetCudaDriverVersion
    )
    handles = [nvml.query(partial(binding.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    asked = Asked(processes, everything)
    cards = tuple(
        Card(index, {}, {"all": refusal}) if refusal else _read_card(binding, handle, index, asked)
        for index, (handle, refusal) in enumerate(handles)
    )
    if everything:
        cards = _with_topology(binding, cards, [handle for handle, _ in handles])
    newest = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    return NvmlSnapshot(cards, driver, newest, nvml.is_shadowed(binding))


def _connect_and_count() -> tuple[ModuleType, int] | NvmlFailure:
    for attempt in range(2):
        binding = nvml.connect()
        if isinstance(binding, NvmlFailure):
            return binding
        try:
            return binding, int(binding.nvmlDeviceGetCount())
        except Exception as error:
            if attempt or nvml.error_code(error) != nvml.UNINITIALIZED:
                return nvml.failure_of(error)
            nvml.reset()
    raise AssertionError("unreachable: the second attempt returns")


def _read_card(binding: ModuleType, handle: Any, index: int, asked: Asked) -> Card:
    readings = Readings()
    mode = Readings().take("mig", lambda: binding.nvmlDeviceGetMigMode(handle))
    mig = bool(mode and mode[0])
    read_identity(readings, binding, handle)
    read_memory(readings, binding, handle)
    read_state(readings, binding, handle)
    if asked.everything:
        read_details(readings, binding, handle)
        read_throughput(readings, binding, handle)
    processes = _read_processes(readings, binding, handle, asked)
    if other_devices.is_unified(readings, binding, handle):
        other_devices.use_host_memory(readings, processes)
    if mig:
        readings.reasons.update(_because_of_mig(readings.reasons))
    instances = _read_instances(binding, handle, index) if mig else ()
    return Card(index, readings.values, readings.reasons, processes, instances, mig)


def _read_processes(
    readings: Readings, binding: ModuleType, handle: Any, asked: Asked
) -> tuple[DriverProcess, ...] | None:
    processes = list_processes(readings, binding, handle)
    if not processes or not (asked.processes or asked.everything):
        return processes
    return with_utilization(processes, binding, handle)


def _with_topology(binding: ModuleType, cards: tuple[Card, ...], handles: list[Any]) -> tuple[Card, ...]:
    ways = [read_topology(binding, handles, card.index) for card in cards]
    return tuple(
        replace(card, values={**card.values, "topology": way}) if way or len(cards) == 1 else card
        for card, way in zip(cards, ways, strict=True)
    )


def _read_instances(binding: ModuleType, parent: Any, index: int) -> tuple[Card, ...]:
    limit = Readings().take("limit", lambda: int(binding.nvmlDeviceGetMaxMigDeviceCount(parent))) or 0
    found = []
    ask = binding.nvmlDeviceGetMigDeviceHandleByIndex
    for number in range(limit):
        handle = Readings().take("mig", partial(ask, parent, number))
        if handle is not None:  # places without an instance are "not found"
            found.append(_read_instance(binding, handle, index))
    return tuple(found)


def _read_instance(binding: ModuleType, handle: Any, index: int) -> Card:
    readings = Readings()
    read_identity(readings, binding, handle)
    read_memory(readings, binding, handle)
    processes = list_processes(readings, binding, handle)
    # The driver keeps all else for the whole card only (nvitop#5, dcgm-exporter#216); 0 would be a lie.
    return Card(index, readings.values, {"all": "n/a (MIG)", **readings.reasons}, processes, is_instance=True)


def _because_of_mig(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: "n/a (MIG)" for name, reason in reasons.items() if reason == "not supported"}
