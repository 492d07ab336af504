"""The questions about one card: one reading a field, each with its own fallback and its own reason.

The newest form of a question is asked first, then the one older drivers know (those go in CUDA 14).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gpumagic.gpus.nvml import Readings

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


def identity(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read what the card is called."""
    readings.take("name", lambda: text(binding.nvmlDeviceGetName(handle)))
    readings.take("uuid", lambda: text(binding.nvmlDeviceGetUUID(handle)))


def memory(readings: Readings, binding: ModuleType, handle: Any) -> None:
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


def condition(readings: Readings, binding: ModuleType, handle: Any) -> None:
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


def details(readings: Readings, binding: ModuleType, handle: Any) -> None:
    """Read what is only shown on request."""
    take, memory_clock = readings.take, 2
    take("bus_id", lambda: text(binding.nvmlDeviceGetPciInfo(handle).busId))
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


def text(value: Any) -> Any:
    """Return a text of the binding as str; older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _state(number: int) -> str:
    if not 0 <= number <= 15:
        raise ValueError("unknown performance state")
    return f"P{number}"
