"""GPUs that share the host's memory: what is theirs, without passing the host's use off as the GPU's.

On them NVML refuses to answer (GB10), or answers with the host's figures, of which "used" counts every program
of the machine (nvitop#208, nvtop PR#511). A refusal alone proves nothing: WSL and old drivers refuse too. What does
is CUDA's own word once it is in use; before that, a refusal by a card that shares the host's page tables (llmfit#93),
or the card's name together with such figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from gpumagic.gpus import cuda_in_use
from gpumagic.gpus.listed_processes import Process
from gpumagic.gpus.nvml import Readings
from gpumagic.memory import host

NAMES = re.compile(r"\b(GB10|N1X|Orin|Xavier|Thor|Tegra|Jetson)\b", re.IGNORECASE)
SHARED = "the host's memory, shared"
BY_NAME = "judged by its name"
_ATS = 2
"""NVML_DEVICE_ADDRESSING_MODE_ATS: the GPU walks the host's page tables. GH200 does so too, and has its own memory."""


def is_unified(readings: Readings, binding: ModuleType, handle: Any) -> bool:
    """Return whether a card has no memory of its own; where only its name tells, that is said among the reasons."""
    _, properties = cuda_in_use.devices().get(cuda_in_use.bare(readings.values.get("uuid")), (None, None))
    integrated = getattr(properties, "is_integrated", None)
    if integrated is not None:
        return bool(integrated)
    refused = readings.reasons.get("memory_total") == "not supported"
    if refused and _shares_page_tables(binding, handle):
        return True
    if not NAMES.search(readings.values.get("name") or "") or not (refused or _has_the_hosts_total(readings)):
        return False
    readings.reasons["unified"] = BY_NAME
    return True


def _shares_page_tables(binding: ModuleType, handle: Any) -> bool:
    return Readings().take("mode", lambda: int(binding.nvmlDeviceGetAddressingMode(handle))) == _ATS


def _has_the_hosts_total(readings: Readings) -> bool:
    of_the_host, total = host.memory(), readings.values.get("memory_total")
    return of_the_host is not None and total is not None and abs(total - of_the_host[1]) <= of_the_host[1] // 8


def memory(readings: Readings, processes: Sequence[Process] | None) -> None:
    """Replace the figures: all of the host's memory, what it can still give, and what is charged to GPU processes."""
    for name in ("memory_total", "memory_used", "memory_free", "memory_reserved"):
        readings.values.pop(name, None)
        readings.reasons[name] = SHARED
    readings.values["unified"] = True
    of_the_host = host.memory()
    if of_the_host is not None:
        readings.values.update(memory_free=of_the_host[0], memory_total=of_the_host[1])
    figures = [each.memory for each in processes or ()]
    known = [figure for figure in figures if figure is not None]
    if processes is not None and len(known) == len(figures):
        readings.values["memory_used"] = sum(known)
    else:
        readings.reasons["memory_used"] = "the driver does not say what the GPU's processes use"
