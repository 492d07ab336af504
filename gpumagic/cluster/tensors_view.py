"""The part of `%devices --engines` about tensors: the largest of all engines, then the sums of each device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumagic.cluster.report import ClusterReport, EngineAnswer, engine_ranges
from gpumagic.memory.devices import Device
from gpumagic.report.base import grouped
from gpumagic.report.document import Block, Cell, Column, Paragraph, Segment, Table
from gpumagic.report.units import count, size, size_of
from gpumagic.tensors.report import DeviceMemoryRow, TensorReport, TensorRow
from gpumagic.tensors.view import GROUP_KEYS, Line, fold, kind_cell, shape_text, size_cell

UNEVEN = 2
"""Times what the other engines hold on average, from which one of them holds most."""
MAX_DEVICES = 24
"""Rows of devices, those with most in tensors first."""
Found = Sequence[tuple[EngineAnswer, TensorReport]]


def tensor_blocks(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks."""
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, TensorReport)]
    blocks = _largest(found, report.limit) if report.group_by is None else [_totals(found, report)]
    return _heading(found), [*blocks, *_devices(found)]


def _heading(found: Found) -> str:
    """Return which engine holds far more than the others, with its largest storage, or the sums."""
    sums = [row for _, own in found for row in own.by_device]
    tensors, whole = sum(row.tensors for row in sums), sum(row.in_rows for row in sums)
    if not tensors:
        return "No live tensors"
    held = [(sum(row.in_rows for row in own.by_device), place) for place, (_, own) in enumerate(found)]
    most, place = max(held)
    if len(found) < 2 or most < UNEVEN * (whole - most) / (len(found) - 1):
        return f"{count(tensors, 'tensor')}, {size(whole)}"
    answer, own = found[place]
    largest = next(iter(fold(own.tensors)), None)
    mostly = f", mostly {largest.text}" if largest is not None and largest.nbytes > most / 2 else ""
    return f"Engine {answer.label} holds most: {size_of(most, whole)}{mostly}"


@dataclass(slots=True)
class _MergedLine:
    """A line of the table: what one engine has, or several have alike, as replicas of a model do."""

    line: Line[TensorRow]
    engines: list[EngineAnswer]
    devices: dict[str, None]


def _largest(found: Found, limit: int | None) -> list[Block]:
    lines = _merged_lines(found)
    if not lines:
        return []
    shown = lines if limit is None else lines[:limit]
    title = "Size each" if any(len(line.engines) > 1 for line in shown) else "Size"
    columns = [
        Column("Engine", shrinks=True), Column("Name", shrinks=True, cut="middle"), Column("Device"),
        Column(title, "right"), Column("Shape", shrinks=True), Column("Dtype", priority=2), Column("Kind", priority=1),
    ]  # fmt: skip
    largest = shown[0].line.nbytes
    blocks: list[Block] = [Table(columns, [_line_cells(line, largest) for line in shown], "The largest storages")]
    if rest := lines[len(shown) :]:
        number = sum(len(each.line.members) * len(each.engines) for each in rest)
        nbytes = size(sum(each.line.nbytes * len(each.engines) for each in rest))
        blocks.append(Paragraph(f"and {count(number, 'more storage', 'more storages')}, {nbytes}", muted=True))
    return blocks


def _merged_lines(found: Found) -> list[_MergedLine]:
    """Return the lines of all engines, equal ones of several engines as one, by the bytes each engine has there."""
    merged: dict[object, _MergedLine] = {}
    for answer, report in found:
        for line in fold(report.tensors):
            row = line.row
            backend = Device.parse(row.device).backend  # each engine may have its own device of it
            key: object = (line.text, line.nbytes, row.nbytes is None, row.shape, row.dtype, row.kind, backend)
            if row.name is None or (key in merged and merged[key].engines[-1] is answer):
                key = (key, answer.engine, row.device)  # nothing says that it is the same thing there
            same = merged.setdefault(key, _MergedLine(line, [], {}))
            same.engines.append(answer)
            same.devices[row.device] = None
    return sorted(merged.values(), key=lambda each: -each.line.nbytes)


def _line_cells(merged: _MergedLine, largest: int) -> list[Cell | str]:
    line, row = merged.line, merged.line.row
    device = ", ".join(merged.devices) if len(merged.devices) <= 2 else count(len(merged.devices), "device")
    return [
        engine_ranges(merged.engines), Cell(line.text, muted=row.name is None, title=", ".join(row.names)), device,
        size_cell(None if row.nbytes is None else line.nbytes, largest), shape_text(row.shape), row.dtype,
        kind_cell(row.kind),
    ]  # fmt: skip


def _totals(found: Found, report: ClusterReport) -> Table:
    """Return one row per key, with the engine that has most of it."""
    key = str(report.group_by)
    sums: dict[str, dict[str, int]] = {}
    for answer, own in found:
        for row in own.tensors:
            engines = sums.setdefault(GROUP_KEYS[key](row), {})
            engines[answer.label] = engines.get(answer.label, 0) + (row.nbytes or 0)
    totals = {name: sum(engines.values()) for name, engines in sums.items()}
    whole = sum(totals.values())
    rows = []
    for name in sorted(totals, key=lambda name: -totals[name])[: report.limit]:
        engine, most = max(sums[name].items(), key=lambda each: each[1])
        rows.append((name, size_cell(totals[name], whole), f"{len(sums[name]):,}", f"{engine}: {size(most)}"))
    columns = [Column(key.capitalize(), shrinks=True), Column("Size", "right"), Column("Engines", "right"),
               Column("Most on")]  # fmt: skip
    return Table(columns, rows, f"Live tensors by {key}")


def _devices(found: Found) -> list[Block]:
    """Return one row per device in use; equal rows of several engines are one."""
    in_use = grouped(
        (row, answer)
        for answer, report in found
        for row in report.by_device
        if row.tensors or row.allocated or row.cached
    )
    if not in_use:
        return []
    ordered = sorted(in_use.items(), key=lambda each: -(each[0].allocated or each[0].in_rows))
    shown = ordered[:MAX_DEVICES]
    has_workspaces = any(row.workspaces for row, _ in shown)
    columns = [
        Column("Engine", shrinks=True), Column("Device"), Column("Tensors", "right", 2), Column("Named", "right"),
        Column("No variable", "right"), *([Column("Workspaces", "right", 1)] if has_workspaces else []),
        Column("Unattributed", "right", 1), Column("Allocated", "right"), Column("Cached", "right", 1),
    ]  # fmt: skip
    grid = [_device_cells(answers, row, has_workspaces) for row, answers in shown]
    blocks: list[Block] = [Table(columns, grid, "Each engine's devices")]
    if rest := ordered[len(shown) :]:
        devices = count(sum(len(answers) for _, answers in rest), "device")
        blocks.append(Paragraph(f"and {devices} with less", muted=True))
    return blocks


def _device_cells(answers: Sequence[EngineAnswer], row: DeviceMemoryRow, has_workspaces: bool) -> Sequence[Cell | str]:
    reserved = (row.allocated or 0) + (row.cached or 0)
    rest = (row.graph or 0) + (row.workspaces or 0) + (row.unexplained or 0)
    bar = (
        Segment(row.named / reserved, "main"),
        Segment(row.held / reserved, "second"),
        Segment(rest / reserved, "other"),
    ) if reserved else ()  # fmt: skip
    return (
        engine_ranges(answers), row.device, f"{row.tensors:,}", size(row.named), size(row.held + (row.graph or 0)),
        *([size(row.workspaces)] if has_workspaces else []), size(row.unexplained),
        Cell(size(row.allocated), bar), size(row.cached),
    )  # fmt: skip
