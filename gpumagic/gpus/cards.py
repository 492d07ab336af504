"""What NVML knows of every card and MIG instance at one moment, with a reason for each field that is unavailable.

The newest version of a query is tried first, then the one that older drivers know (those are removed in CUDA 14).

What is only shown on request (``everything``) is only read then: the driver measures PCIe throughput over 20 ms and
blocks meanwhile. NVLink has counters instead; they are read before and after, and the rate is over the time between.
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

# Bits of NVML's clocks-event mask. "Idle" is left out: it slows down nothing that anyone waits for.
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
    """Read the name and UUID."""
    readings.take("name", lambda: to_str(binding.nvmlDeviceGetName(handle)))
    readings.take("uuid", lambda: to_str(binding.nvmlDeviceGetUUID(handle)))


def read_memory(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read the memory as the driver counts it, with what the driver reserves apart where it says so."""
    found = Readings()
    figures = found.take(
        "memory",
        lambda: binding.nvmlDeviceGetMemoryInfo(handle, version=binding.nvmlMemory_v2),
        # The old form after any error: v2 fails on WSL where v1 works, and gpustat replaces the getter by one
        # that takes no version.
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
    """Read utilization, temperature, power, clocks and memory errors."""
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
    """Return the reasons in a clocks-event mask, in words; empty for a card that is idle or not throttled."""
    words = [word for bit, word in THROTTLE_REASONS.items() if mask & bit]
    unknown = int(mask) & ~(sum(THROTTLE_REASONS) | 1)
    return (*words, f"unknown reason {unknown:#x}") if unknown else tuple(words)


def to_str(value: Any) -> Any:
    """Return a string of the binding as str; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _performance_state(number: int) -> str:
    if not 0 <= number <= 15:
        raise ValueError("unknown performance state")
    return f"P{number}"


NVLINK_FIELDS = {"nvlink_sent": 138, "nvlink_received": 139}  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX: KiB so far
ALL_LINKS = 0xFFFFFFFF
MAX_LINKS = 36
MIN_INTERVAL = 0.005
"""Seconds; over less, the difference of two counters is no rate."""
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
    """A card's NVLink counters at one moment, in bytes, each with a value or a reason."""

    moment: float
    fields: Readings


def read_nvlink_counters(binding: ModuleType, handle: Any) -> NvlinkCounters:
    """Read how much went over all NVLinks of a card since its driver was loaded."""
    # One entry more than wanted: NVML is said to touch the one after the last in NVLink queries (nvitop's source).
    wanted = [(number, ALL_LINKS) for number in (*NVLINK_FIELDS.values(), NVLINK_FIELDS["nvlink_received"])]
    fields, reason = nvml.query(lambda: binding.nvmlDeviceGetFieldValues(handle, wanted))
    found = Readings()
    if fields is None:
        found.reasons.update(dict.fromkeys(NVLINK_FIELDS, reason or ""))
    for name, field in zip(NVLINK_FIELDS, fields or ()):  # noqa: B905  # there is one more
        found.take(name, lambda field=field: _field_value(binding, field) * 1024)  # type: ignore[misc]
    return NvlinkCounters(time.monotonic(), found)


def read_throughput(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read the throughput of PCIe and NVLink in bytes per second, and how many NVLinks are up."""
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
        if name not in before.fields.values or name not in after.fields.values:
            readings.reasons[name] = {**before.fields.reasons, **after.fields.reasons}[name]
        elif seconds < MIN_INTERVAL:
            readings.reasons[name] = "measured over too short a time"
        else:
            readings.values[name] = int((after.fields.values[name] - before.fields.values[name]) / seconds)


def read_topology(binding: ModuleType, handles: Sequence[Any], mine: int) -> dict[str, str]:
    """Return how a card is connected to each other one, by NVML index; unreadable pairs are left out."""
    found = {}
    for index, handle in enumerate(handles):
        if index == mine or handle is None or handles[mine] is None:
            continue
        link, _ = nvml.query(partial(_connection_type, binding, handles[mine], handle))
        if link is not None:
            found[str(index)] = link
    return found


def _connection_type(binding: ModuleType, one: Any, other: Any) -> str:
    over_nvlink, ok = 2, 0
    if nvml.query(lambda: int(binding.nvmlDeviceGetP2PStatus(one, other, over_nvlink)))[0] == ok:
        return "NVLink"
    return TOPOLOGY_LEVELS[int(binding.nvmlDeviceGetTopologyCommonAncestor(one, other))]


def _count_nvlinks(binding: ModuleType, handle: Any) -> int:
    up = int(binding.nvmlDeviceGetNvLinkState(handle, 0))  # an error where the card has no NVLink at all
    for link in range(1, MAX_LINKS):
        state, reason = nvml.query(partial(binding.nvmlDeviceGetNvLinkState, handle, link))
        if reason:
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
class NvmlSnapshot:
    """All cards of the machine at one moment."""

    cards: tuple[Card, ...]
    driver_version: str | None
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""
    shadowed: bool = False
    """Whether the deprecated package `pynvml` hides nvidia-ml-py."""


def read_cards(*, processes: bool = False, everything: bool = False) -> NvmlSnapshot | NvmlFailure:
    """Read every card, even if some fail; or return why NVML does not answer.

    Args:
        processes: also read how busy each process keeps its card; the processes are listed in any case.
        everything: also read the fields that are only shown on request.
    """
    return nvml.within_time(partial(_read_cards, processes, everything))


def _read_cards(processes: bool, everything: bool) -> NvmlSnapshot | NvmlFailure:
    answer = _connect_and_count()
    if isinstance(answer, NvmlFailure):
        return answer
    binding, count = answer
    driver, _ = nvml.query(lambda: to_str(binding.nvmlSystemGetDriverVersion()))
    cuda = Readings().take(
        "cuda_version", binding.nvmlSystemGetCudaDriverVersion_v2, binding.nvmlSystemGetCudaDriverVersion
    )
    handles = [nvml.query(partial(binding.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    cards = tuple(
        _read_card(binding, handle, index, processes or everything, everything)
        if reason is None
        else Card(index, {}, {"all": reason})
        for index, (handle, reason) in enumerate(handles)
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


def _read_card(binding: ModuleType, handle: Any, index: int, utilization: bool, everything: bool) -> Card:
    readings = Readings()
    mode, _ = nvml.query(lambda: binding.nvmlDeviceGetMigMode(handle))
    mig = bool(mode and mode[0])
    read_identity(readings, binding, handle)
    read_memory(readings, binding, handle)
    read_state(readings, binding, handle)
    if everything:
        read_details(readings, binding, handle)
        read_throughput(readings, binding, handle)
    processes = list_processes(readings, binding, handle)
    if processes and utilization:
        processes = with_utilization(processes, binding, handle)
    if other_devices.is_unified(readings, binding, handle):
        other_devices.use_host_memory(readings, processes)
    if mig:
        not_of_the_card = [name for name, reason in readings.reasons.items() if reason == "not supported"]
        readings.reasons.update(dict.fromkeys(not_of_the_card, "n/a (MIG)"))
    instances = _read_instances(binding, handle, index) if mig else ()
    return Card(index, readings.values, readings.reasons, processes, instances, mig)


def _with_topology(binding: ModuleType, cards: tuple[Card, ...], handles: list[Any]) -> tuple[Card, ...]:
    links = [read_topology(binding, handles, card.index) for card in cards]
    return tuple(
        replace(card, values={**card.values, "topology": each}) if each or len(cards) == 1 else card
        for card, each in zip(cards, links, strict=True)
    )


def _read_instances(binding: ModuleType, parent: Any, index: int) -> tuple[Card, ...]:
    limit, _ = nvml.query(lambda: int(binding.nvmlDeviceGetMaxMigDeviceCount(parent)))
    get = binding.nvmlDeviceGetMigDeviceHandleByIndex
    handles = [nvml.query(partial(get, parent, number))[0] for number in range(limit or 0)]
    return tuple(_read_instance(binding, each, index) for each in handles if each is not None)  # empty slots


def _read_instance(binding: ModuleType, handle: Any, index: int) -> Card:
    readings = Readings()
    read_identity(readings, binding, handle)
    read_memory(readings, binding, handle)
    processes = list_processes(readings, binding, handle)
    # The driver has all else for the whole card only (nvitop#5, dcgm-exporter#216); 0 would be wrong.
    return Card(index, readings.values, {"all": "n/a (MIG)", **readings.reasons}, processes, is_instance=True)
