"""Which of the rows were asked for, and which has most room."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpumagic.errors import DeviceNotFound
from gpumagic.gpus.report import GpuRow

READABLE = r"auto|\d+|(gpu|cuda|mps|xpu|simgpu)(:\d+)?|(GPU|MIG)-.+"
"""What can be asked for where there is no GPU: the answer is why, not that the name is wrong."""


def best(rows: Sequence[GpuRow]) -> str | None:
    """Return the torch device with most room: free by its driver, or cached by this kernel and so reusable.

    A real GPU is always before a simulated one; of equals the first is taken.
    """
    usable = [row for row in rows if row.device is not None and row.memory_free is not None]
    return max(usable, key=lambda row: (not row.simulated, _room(row)), default=_NOTHING).device


_NOTHING = GpuRow(device=None)


def _room(row: GpuRow) -> int:
    return (row.memory_free or 0) + (row.kernel_reserved or 0) - (row.kernel_allocated or 0)


def selected(rows: Sequence[GpuRow], wanted: Sequence[str]) -> tuple[GpuRow, ...]:
    """Return the rows asked for, each once and in that order; all if none is.

    Raises:
        DeviceNotFound: one of them is not here, or names no GPU at all; where there is none, a good name is no error.
    """
    chosen: list[GpuRow] = [] if wanted else list(rows)
    for name in (each.strip() for each in wanted):
        found = [row for row in rows if _means(name, row, rows)]
        readable = re.fullmatch(READABLE, name, re.IGNORECASE)
        if not found and (rows or not readable):
            here = ", ".join(row.device for row in rows if row.device) or "none that torch can use"
            wrong = "a GPU here" if readable or name in ("cpu", "meta") else "a device"
            raise DeviceNotFound(f"{name!r} is not {wrong}; there are {here}")
        chosen += [row for row in found if not any(row is each for each in chosen)]
    return tuple(chosen)


def _means(name: str, row: GpuRow, rows: Sequence[GpuRow]) -> bool:
    if name.startswith(("GPU-", "MIG-")):
        return row.uuid is not None and row.uuid.startswith(name)
    if row.device is None:
        return False
    lowered = name.lower()
    if lowered == "auto":
        return row.device == best(rows)
    if re.fullmatch(r"(gpu:)?\d+", lowered):
        return ordinal(row.device) == int(lowered.rpartition(":")[2])
    return lowered in (row.device, row.device.partition(":")[0], "gpu")


def ordinal(device: str | None) -> int:
    """Return 1 for ``"cuda:1"``."""
    return int((device or "").partition(":")[2] or 0)
