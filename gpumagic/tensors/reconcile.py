"""What Python can see on each device against what its allocator has handed out, and the lines that allocated the rest.

``torch.cuda.memory._record_memory_history()`` has the allocator keep the Python stack of every block it hands out;
the snapshot is read as its documentation describes it. Nothing is switched on here, and nothing asked while it is off.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumagic.memory import allocator
from gpumagic.source.frames import is_library
from gpumagic.tensors.records import DeviceMemoryRow, SourceRow, TensorRow

GRANULE = 512
"""Bytes: the caching allocators of torch hand out multiples of it (kMinBlockSize)."""


@dataclass(slots=True)
class _Sum:
    tensors: int = 0
    storages: int = 0
    named: int = 0
    held: int = 0
    graph: int = 0


def granule(device: str) -> int:
    """Return what a device's allocator rounds sizes up to; 1 where it does not round, or not in a known way."""
    known = allocator.device_stats(device) is not None and not device.startswith("mps")
    return GRANULE if known else 1


def by_device(rows: Iterable[TensorRow]) -> tuple[DeviceMemoryRow, ...]:
    """Return one row for each device that has live tensors or an allocator in use, accelerators first."""
    figures = allocator.all_device_stats()
    sums: dict[str, _Sum] = {device: _Sum() for device in figures}
    placed: dict[str, list[TensorRow]] = {}
    for row in rows:
        placed.setdefault(row.device, []).append(row)
    sums.update((device, _sum(alike)) for device, alike in placed.items())
    ordered = sorted(sums.items(), key=lambda item: (item[0] not in figures, item[0]))
    others = _other_processes(figures)
    return tuple(_row(device, total, figures.get(device), others.get(device)) for device, total in ordered)


def _sum(rows: list[TensorRow]) -> _Sum:
    named = sum([row.nbytes or 0 for row in rows if row.name is not None])
    graph = sum([row.nbytes or 0 for row in rows if row.in_graph])
    held = sum([row.nbytes or 0 for row in rows]) - named - graph
    return _Sum(len(rows) + sum([row.views for row in rows]), len(rows), named, held, graph)


def _other_processes(devices: Iterable[str]) -> dict[str, int | None]:
    """Return what other processes hold of each device, as far as the driver's tools tell; it takes about a ms."""
    from gpumagic.gpus import probe

    backends = {device.partition(":")[0] for device in devices}
    return {row.device: row.other_processes for row in probe.read_rows(backends) if row.device is not None}


def notes(rows: Iterable[TensorRow], devices: Iterable[DeviceMemoryRow]) -> list[str]:
    """Return what a reader of the sums has to know to believe them."""
    found = [
        f"{row.device}: tensors sum to more than its allocator handed out; some of their memory came from elsewhere"
        for row in devices
        if row.unexplained is not None and row.unexplained < 0
    ]
    if unknown := len([row for row in rows if row.nbytes is None]):
        found.append(f"storages of unknown size, in no sum: {unknown:,}")
    return found


def _row(device: str, total: _Sum, figures: allocator.AllocatorStats | None, others: int | None) -> DeviceMemoryRow:
    row = DeviceMemoryRow(device, total.tensors, total.storages, total.named, total.held, total.graph)
    if figures is None:
        return row
    return DeviceMemoryRow(
        device, total.tensors, total.storages, total.named, total.held, total.graph,
        unexplained=figures.allocated - total.named - total.held - total.graph,
        allocated=figures.allocated,
        cached=figures.reserved - figures.allocated,
        other_processes=others,
    )  # fmt: skip


UNKNOWN = "a line that was not recorded"
_IN_USE = "active_allocated"


def recorded_segments() -> Sequence[Mapping[str, Any]]:
    """Return the allocator's segments with the stacks of their blocks; none unless history is recorded."""
    torch = sys.modules.get("torch")
    is_recording = getattr(getattr(torch, "_C", None), "_cuda_isHistoryEnabled", None)
    if torch is None or is_recording is None or not torch.cuda.is_initialized() or not is_recording():
        return ()
    found: Sequence[Mapping[str, Any]] = torch.cuda.memory._snapshot()["segments"]
    return found


def allocation_sources(
    recorded: Iterable[Mapping[str, Any]], known: Iterable[tuple[str, int]], backend: str = "cuda"
) -> tuple[SourceRow, ...]:
    """Return, most bytes first, the lines that allocated the blocks in which no known storage lies.

    Args:
        recorded: the segments of a snapshot.
        known: device and address of each storage that a tensor has.
        backend: whose allocator it is.
    """
    addresses: dict[str, list[int]] = {}
    for device, address in sorted(known):
        addresses.setdefault(device, []).append(address)
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for segment in recorded:
        device = f"{backend}:{segment['device']}"
        for block in segment["blocks"]:
            if block["state"] == _IN_USE and not _holds_any(block, addresses.get(device, ())):
                key = (device, _line(block.get("frames", ())))
                nbytes, number = totals.get(key, (0, 0))
                totals[key] = (nbytes + block["size"], number + 1)
    rows = (SourceRow(device, line, nbytes, number) for (device, line), (nbytes, number) in totals.items())
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _holds_any(block: Mapping[str, Any], addresses: Sequence[int]) -> bool:
    last = bisect_right(addresses, block["address"] + block["size"] - 1)
    return last > 0 and addresses[last - 1] >= block["address"]


def _line(recorded: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line of the user's own code: ``"train.py:12 in step"``."""
    own = [each for each in recorded if not is_library("", each["filename"])] or list(recorded)
    if not own:
        return UNKNOWN
    return f"{own[0]['filename']}:{own[0]['line']} in {own[0]['name']}"
