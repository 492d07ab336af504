"""The processes that the driver lists on a card, by its own pids, and how busy each keeps it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumagic.gpus.nvml import Readings

LARGEST_PID = 2**22 if sys.platform != "win32" else 2**32
RECENT = 1_000_000
"""Microseconds: older samples say nothing of now, and without a limit the driver gives old ones (nvitop#91)."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the driver lists it; its pid may be of another pid namespace."""

    pid: int
    memory: int | None
    kind: str
    utilization: float | None = None
    """Percent of the last second in which its kernels ran; None without a sample of it."""


def listed(readings: Readings, binding: ModuleType, handle: Any) -> tuple[Process, ...] | None:
    """Return the processes on a card, or None with the reason among the readings."""
    total = readings.values.get("memory_total")
    found: dict[int, Process] = {}
    kinds = [("graphics", "Graphics"), *([("compute", "MPSCompute")] if _is_shared() else []), ("compute", "Compute")]
    for kind, name in kinds:
        ask = partial(_list, binding, handle, f"nvmlDeviceGet{name}RunningProcesses", total)
        answers = Readings()
        processes = answers.take("processes", partial(ask, "_v3"), partial(ask, "_v2"))
        if processes is None and name == "Compute":
            readings.reasons["processes"] = answers.reasons["processes"]
            return None
        for process in processes or ():
            _add(found, Process(process[0], process[1], kind))
    return tuple(found.values())


def _is_shared() -> bool:
    """Return whether CUDA's Multi-Process Service runs here: the driver lists its clients apart."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps").exists()  # noqa: S108  # NVIDIA's choice


def with_utilization(processes: Iterable[Process], binding: ModuleType, handle: Any) -> tuple[Process, ...]:
    """Return the processes with their share of the last second, where the driver has a sample."""
    since = time.time_ns() // 1000 - RECENT
    samples = Readings().take("samples", lambda: binding.nvmlDeviceGetProcessUtilization(handle, since))
    latest = {int(each.pid): each for each in sorted(samples or (), key=lambda each: int(each.timeStamp))}
    busy = {pid: float(each.smUtil) for pid, each in latest.items() if each.smUtil <= 100}
    return tuple(replace(each, utilization=busy.get(each.pid)) for each in processes)


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
