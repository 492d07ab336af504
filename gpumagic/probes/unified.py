"""GPUs that share the host's memory: what is theirs, without passing the host's use off as the GPU's.

On them NVML refuses to answer (GB10), or answers with the host's figures, of which "used" counts every program
of the machine (nvitop#208, nvtop PR#511). A refusal alone proves nothing: WSL and old drivers refuse too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpumagic.probes import host
from gpumagic.probes.listed_processes import Process
from gpumagic.probes.nvml import Readings

NAMES = re.compile(r"\b(GB10|N1X|Orin|Xavier|Thor|Tegra|Jetson)\b", re.IGNORECASE)
SHARED = "the host's memory, shared"


def is_unified(values: dict[str, Any], reasons: dict[str, str]) -> bool:
    """Return whether a card has no memory of its own: its kind is known for that, and its figures agree."""
    if not NAMES.search(values.get("name") or ""):
        return False
    if "memory_total" in values:
        of_the_host = host.memory()
        return of_the_host is not None and abs(values["memory_total"] - of_the_host[1]) <= of_the_host[1] // 8
    return reasons.get("memory_total") == "not supported"


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
