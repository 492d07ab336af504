"""Each device's sum of live tensors against its allocator's figures, and those against the whole card."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from gpumagic.heap.workspaces import workspace_bytes
from gpumagic.memory import allocator, devices
from gpumagic.memory.devices import Device
from gpumagic.tensors.report import DeviceMemoryRow, TensorRow


def memory_by_device(
    rows: Iterable[TensorRow], addresses: Collection[int]
) -> tuple[DeviceMemoryRow, ...]:
    """Return one row for each device that has live tensors or an allocator in use, accelerators first.

    Args:
        rows: all of a scan.
        addresses: of the storages that it has found.
    """
    figures = allocator.all_device_stats()
    placed: dict[str, list[TensorRow]] = {device: [] for device in figures}
    for row in rows:
        placed.setdefault(row.device, []).append(row)
    workspaces = workspace_bytes(addresses)
    # Of other devices no driver reports what other processes hold; to ask takes about a ms.
    backends = {Device.parse(device).backend for device in figures}
    driver = devices.driver_figures(backends) if "cuda" in backends else {}
    found: list[DeviceMemoryRow] = []
    for device in sorted(placed, key=lambda device: (device not in figures, device)):
        own = _sums(device, placed[device])
        if device in figures:
            allocated = figures[device].allocated
            kept = workspaces.get(device, 0)
            others = driver.get(device)
            own = replace(
                own,
                workspaces=kept,
                unexplained=allocated - own.in_rows - kept,
                allocated=allocated,
                cached=figures[device].reserved - allocated,
                other_processes=None if others is None else others.other_processes,
            )
        found.append(own)
    return tuple(found)


def _sums(device: str, rows: Sequence[TensorRow]) -> DeviceMemoryRow:
    """Return the sums of one device's rows."""
    named = 0
    graph = 0
    held = 0
    tensors = 0
    for row in rows:
        nbytes = row.nbytes or 0
        tensors += 1 + row.views
        if row.is_reached():
            named += nbytes
        elif row.in_graph:
            graph += nbytes
        else:
            held += nbytes
    return DeviceMemoryRow(device, tensors, len(rows), named, held, graph)


def notes_on_sums(
    rows: Iterable[TensorRow], summary: Iterable[DeviceMemoryRow]
) -> list[str]:
    """Return what a reader of the sums has to know to believe them."""
    too_much = "tensors sum to more than its allocator handed out; some of their memory came from elsewhere"
    exceeding = [row.device for row in summary if (row.unexplained or 0) < 0]
    notes = [f"{device}: {too_much}" for device in exceeding]
    unknown = sum(row.nbytes is None for row in rows)
    if unknown:
        notes.append(f"storages of unknown size, in no sum: {unknown:,}")
    return notes
