"""What Python can see on each device against what its allocator has handed out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpumagic.memory import allocator
from gpumagic.tensors.report import DeviceMemoryRow, TensorRow

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
    known = allocator.figures(device) is not None and not device.startswith("mps")
    return GRANULE if known else 1


def by_device(rows: Iterable[TensorRow]) -> tuple[DeviceMemoryRow, ...]:
    """Return one row for each device that has live tensors or an allocator in use, accelerators first."""
    figures = allocator.all_figures()
    sums: dict[str, _Sum] = {device: _Sum() for device in figures}
    placed: dict[str, list[TensorRow]] = {}
    for row in rows:
        placed.setdefault(row.device, []).append(row)
    sums.update((device, _sum(alike)) for device, alike in placed.items())
    ordered = sorted(sums.items(), key=lambda item: (item[0] not in figures, item[0]))
    others = _other_processes() if figures else {}
    return tuple(_row(device, total, figures.get(device), others.get(device)) for device, total in ordered)


def _sum(rows: list[TensorRow]) -> _Sum:
    named = sum([row.nbytes or 0 for row in rows if row.name is not None])
    graph = sum([row.nbytes or 0 for row in rows if row.in_graph])
    held = sum([row.nbytes or 0 for row in rows]) - named - graph
    return _Sum(len(rows) + sum([row.views for row in rows]), len(rows), named, held, graph)


def _other_processes() -> dict[str, int | None]:
    """Return what other processes hold of each device, as far as the driver's tools tell; it takes about a ms."""
    from gpumagic.gpus import probe

    return {row.device: row.other_processes for row in probe.read_gpus() if row.device is not None}


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


def _row(device: str, total: _Sum, figures: allocator.AllocatorFigures | None, others: int | None) -> DeviceMemoryRow:
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
