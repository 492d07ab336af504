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
from gpumagic.gpus.nvml import Failure, Readings
from gpumagic.gpus.processes import Process, listed, with_utilization

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
    readings.take("name", lambda: read_text(binding.nvmlDeviceGetName(handle)))
    readings.take("uuid", lambda: read_text(binding.nvmlDeviceGetUUID(handle)))


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


def read_condition(readings: Readings, binding: ModuleType, handle: Any) -> None:
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
        lambda: throttle_words(binding.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        lambda: throttle_words(binding.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
    )
    take("clock_sm", lambda: int(binding.nvmlDeviceGetClockInfo(handle, sm)))
    take("clock_sm_max", lambda: int(binding.nvmlDeviceGetMaxClockInfo(handle, sm)))
    take(
        "performance_state",
        lambda: _state(binding.nvmlDeviceGetPerformanceState(handle)),
        lambda: _state(binding.nvmlDeviceGetPowerState(handle)),
    )
    uncorrected, volatile = 1, 0
    take("ecc_errors", lambda: int(binding.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile)))


def read_details(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read what is only shown on request."""
    take, memory_clock = readings.take, 2
    take("bus_id", lambda: read_text(binding.nvmlDeviceGetPciInfo(handle).busId))
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


def throttle_words(mask: int) -> tuple[str, ...]:
    """Return what a clocks-event mask says, in words; empty for a card that is idle or runs free."""
    words = [word for bit, word in THROTTLE_REASONS.items() if mask & bit]
    unknown = int(mask) & ~(sum(THROTTLE_REASONS) | 1)
    return (*words, f"unknown reason {unknown:#x}") if unknown else tuple(words)


def read_text(value: Any) -> Any:
    """Return a text of the binding as str; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _state(number: int) -> str:
    if not 0 <= number <= 15:
        raise ValueError("unknown performance state")
    return f"P{number}"


FIELDS = {"nvlink_sent": 138, "nvlink_received": 139}  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _RX: KiB so far
ALL_LINKS = 0xFFFFFFFF
MOST_LINKS = 36
SHORTEST = 0.005
"""Seconds: over less than that the difference of two counters is no rate."""
LEVELS = {
    0: "same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one CPU's PCIe",
    40: "one NUMA node",
    50: "across CPUs",
}


@dataclass(frozen=True, slots=True)
class Counters:
    """A card's NVLink counters at one moment, in bytes, or the reason why there are none."""

    moment: float
    values: Mapping[str, int]
    reasons: Mapping[str, str]


def counters(binding: ModuleType, handle: Any) -> Counters:
    """Read how much went over all NVLinks of a card since its driver was loaded."""
    # One entry more than wanted: NVML is said to touch the one after the last in NVLink queries (nvitop's source).
    wanted = [(number, ALL_LINKS) for number in (*FIELDS.values(), FIELDS["nvlink_received"])]
    answers = Readings()
    fields = answers.take("fields", lambda: binding.nvmlDeviceGetFieldValues(handle, wanted))
    found = Readings()
    for position, name in enumerate(FIELDS):
        if fields is None:
            found.reasons[name] = answers.reasons["fields"]
        else:
            found.take(name, lambda field=fields[position]: _kib(binding, field) * 1024)  # type: ignore[misc]
    return Counters(time.monotonic(), found.values, found.reasons)


def traffic(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read what goes over PCIe and NVLink, in bytes a second, and how many NVLinks are up."""
    before = counters(binding, handle)
    sent, received = 0, 1
    readings.take("pcie_sent", lambda: binding.nvmlDeviceGetPcieThroughput(handle, sent) * 1024)
    readings.take("pcie_received", lambda: binding.nvmlDeviceGetPcieThroughput(handle, received) * 1024)
    readings.take("nvlinks", lambda: _links_up(binding, handle))
    rates(readings, before, counters(binding, handle))


def rates(readings: Readings, before: Counters, after: Counters) -> None:
    """Add the rates between two readings of the counters."""
    seconds = after.moment - before.moment
    for name in FIELDS:
        if name not in before.values or name not in after.values:
            readings.reasons[name] = {**before.reasons, **after.reasons}[name]
        elif seconds < SHORTEST:
            readings.reasons[name] = "measured over too short a time"
        else:
            readings.values[name] = int((after.values[name] - before.values[name]) / seconds)


def topology(binding: ModuleType, handles: Sequence[Any], mine: int) -> dict[str, str]:
    """Return how a card reaches each other one, by NVML index; a pair that cannot be read is left out."""
    found = {}
    for index, handle in enumerate(handles):
        if index == mine or handle is None or handles[mine] is None:
            continue
        way = Readings().take("way", lambda: _way(binding, handles[mine], handle))  # noqa: B023
        if way is not None:
            found[str(index)] = way
    return found


def _way(binding: ModuleType, one: Any, other: Any) -> str:
    over_nvlink, fine = 2, 0
    if Readings().take("nvlink", lambda: int(binding.nvmlDeviceGetP2PStatus(one, other, over_nvlink))) == fine:
        return "NVLink"
    return LEVELS[int(binding.nvmlDeviceGetTopologyCommonAncestor(one, other))]


def _links_up(binding: ModuleType, handle: Any) -> int:
    up = int(binding.nvmlDeviceGetNvLinkState(handle, 0))  # refused where the card has no NVLink at all
    for link in range(1, MOST_LINKS):
        state, refusal = nvml.ask(partial(binding.nvmlDeviceGetNvLinkState, handle, link))
        if refusal:
            break  # it has no more of them
        up += int(state or 0)
    return up


def _kib(binding: ModuleType, field: Any) -> int:
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
class Asked:
    """What a snapshot reads beyond the figures of the table."""

    processes: bool = False
    """How busy each process keeps its card; which processes there are is read in any case."""
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All cards of the machine at one moment."""

    cards: tuple[Card, ...]
    driver_version: str | None
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""
    shadowed: bool = False
    """Whether the deprecated package `pynvml` stands in nvidia-ml-py's place."""


def snapshot(*, processes: bool = False, everything: bool = False) -> Snapshot | Failure:
    """Read every card, whatever is wrong with some of them; or return why NVML does not answer."""
    answer = _count()
    if isinstance(answer, Failure):
        return answer
    binding, count = answer
    driver = Readings().take("driver_version", lambda: read_text(binding.nvmlSystemGetDriverVersion()))
    cuda = Readings().take(
        "cuda_version", binding.nvmlSystemGetCudaDriverVersion_v2, binding.nvmlSystemGetCudaDriverVersion
    )
    handles = [nvml.ask(partial(binding.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    asked = Asked(processes, everything)
    cards = tuple(
        Card(index, {}, {"all": refusal}) if refusal else _card(binding, handle, index, asked)
        for index, (handle, refusal) in enumerate(handles)
    )
    if everything:
        cards = _connected(binding, cards, [handle for handle, _ in handles])
    newest = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    return Snapshot(cards, driver, newest, nvml.is_shadowed(binding))


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


def _card(binding: ModuleType, handle: Any, index: int, asked: Asked) -> Card:
    readings = Readings()
    mode = Readings().take("mig", lambda: binding.nvmlDeviceGetMigMode(handle))
    mig = bool(mode and mode[0])
    read_identity(readings, binding, handle)
    read_memory(readings, binding, handle)
    read_condition(readings, binding, handle)
    if asked.everything:
        read_details(readings, binding, handle)
        traffic(readings, binding, handle)
    processes = _processes(readings, binding, handle, asked)
    if other_devices.is_unified(readings, binding, handle):
        other_devices.unified_memory(readings, processes)
    if mig:
        readings.reasons.update(_because_of_mig(readings.reasons))
    instances = _instances(binding, handle, index) if mig else ()
    return Card(index, readings.values, readings.reasons, processes, instances, mig)


def _processes(readings: Readings, binding: ModuleType, handle: Any, asked: Asked) -> tuple[Process, ...] | None:
    processes = listed(readings, binding, handle)
    if not processes or not (asked.processes or asked.everything):
        return processes
    return with_utilization(processes, binding, handle)


def _connected(binding: ModuleType, cards: tuple[Card, ...], handles: list[Any]) -> tuple[Card, ...]:
    ways = [topology(binding, handles, card.index) for card in cards]
    return tuple(
        replace(card, values={**card.values, "topology": way}) if way or len(cards) == 1 else card
        for card, way in zip(cards, ways, strict=True)
    )


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
    read_identity(readings, binding, handle)
    read_memory(readings, binding, handle)
    processes = listed(readings, binding, handle)
    # The driver keeps all else for the whole card only (nvitop#5, dcgm-exporter#216); 0 would be a lie.
    return Card(index, readings.values, {"all": "n/a (MIG)", **readings.reasons}, processes, is_instance=True)


def _because_of_mig(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: "n/a (MIG)" for name, reason in reasons.items() if reason == "not supported"}
