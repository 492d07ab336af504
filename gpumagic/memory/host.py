"""The host's memory, for failures that have nothing to do with a GPU.

A container has a limit of its own, that of its control group, mostly far below the machine's memory.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

_ROOT = Path("/")
_CGROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "inactive_file"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes",
     "sys/fs/cgroup/memory/memory.stat", "total_inactive_file"),
)  # fmt: skip
"""Limit, use, statistics and the name there of the file cache that is given back at need: versions 2 and 1."""


def available_memory() -> tuple[int, int] | None:
    """Return (available, total) bytes of RAM, the container's where it has less, or None where it cannot be asked."""
    found = [each for each in (_machine_memory(), *map(_cgroup_memory, _CGROUPS)) if each is not None]
    return min(found, default=None)


def private_memory(process: int) -> int:
    """Return the bytes of RAM that a process has besides files and shared memory; 0 where it cannot be asked."""
    _, resident, shared, *_ = map(int, _read(f"proc/{process}/statm").split() or (0, 0, 0))
    return (resident - shared) * mmap.PAGESIZE


def _machine_memory() -> tuple[int, int] | None:
    text = _read("proc/meminfo")
    figures = {name: int(number) * 1024 for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    if "MemAvailable" not in figures or "MemTotal" not in figures:
        return None
    return figures["MemAvailable"], figures["MemTotal"]


def _cgroup_memory(files: tuple[str, str, str, str]) -> tuple[int, int] | None:
    limit, used, statistics = map(_read, files[:3])
    if not limit.strip().isdigit() or not used.strip().isdigit():  # "max": no limit
        return None
    cache = re.search(rf"^{files[3]} (\d+)$", statistics, re.MULTILINE)
    held = int(used) - (int(cache[1]) if cache is not None else 0)
    return max(0, int(limit) - held), int(limit)


def _read(path: str) -> str:
    try:
        return (_ROOT / path).read_text()
    except OSError:  # not Linux, or no such group
        return ""
