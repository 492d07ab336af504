"""The host's own memory, for failures that have nothing to do with a GPU."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def memory() -> tuple[int, int] | None:
    """Return (available, total) bytes of RAM by the kernel's account, or None where it cannot be asked."""
    try:
        text = _MEMINFO.read_text()
    except OSError:  # not Linux
        return None
    figures = {name: int(number) * 1024 for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    if "MemAvailable" not in figures or "MemTotal" not in figures:
        return None
    return figures["MemAvailable"], figures["MemTotal"]
