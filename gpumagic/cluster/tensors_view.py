"""The part of `%devices --engines` that is about tensors: the largest of all engines, then each device's sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpumagic.cluster.report import ClusterReport, EngineAnswer, engine_ranges
from gpumagic.report.document import Block, Cell, Column, Paragraph, Segment, Table
from gpumagic.report.units import count, size
from gpumagic.tensors.folding import Line, dims, fold, holder_text, kind_cell, sized
from gpumagic.tensors.records import DeviceMemoryRow, TensorRow
from gpumagic.tensors.report import TensorReport

MAX_DEVICES = 24
"""Rows of devices, those with most in tensors first."""


def tensor_blocks(report: ClusterReport) -> tuple[str, list[Block]]:
    """Return the heading and the blocks."""
    found = [(answer, answer.report) for answer in report.engines if isinstance(answer.report, TensorReport)]
    blocks: list[Block] = []
    if report.group_by is not None:
        blocks.append(_totals(found, report.group_by, report.limit))
    else:
        blocks += _largest(found, report.limit)
    return _heading(found), [*blocks, *_devices(found)]


Found = Sequence[tuple[EngineAnswer, TensorReport]]


def _heading(found: Found) -> str:
    sums = [row for _, report in found for row in report.by_device]
    tensors = sum(row.tensors for row in sums)
    if not tensors:
        return "No live tensors"
    return f"{count(tensors, 'tensor')}, {size(sum(row.in_rows for row in sums))}"


@dataclass(slots=True)
class _MergedLine:
    """A line of the table: what one engine has, or several have alike, as replicas of a model do."""

    line: Line[TensorRow]
    engines: list[EngineAnswer]
    devices: dict[str, None]

    @property
    def nbytes(self) -> int:
        return self.line.nbytes * len(self.engines)


def _largest(found: Found, limit: int | None) -> list[Block]:
    lines = _merged_lines(found)
    if not lines:
        return []
    shown = lines if limit is None else lines[:limit]
    each = any(len(line.engines) > 1 for line in shown)
    columns = [
        Column("Engine", shrinks=True), Column("Name", shrinks=True, cut="middle"), Column("Device"),
        Column("Size each" if each else "Size", "right"), Column("Shape", shrinks=True), Column("Dtype", priority=2),
        Column("Kind", priority=1),
    ]  # fmt: skip
    largest = shown[0].line.nbytes
    blocks: list[Block] = [Table(columns, [_line_cells(line, largest) for line in shown], "The largest storages")]
    if rest := lines[len(shown) :]:
        number = sum(len(alike.line.members) * len(alike.engines) for alike in rest)
        nbytes = size(sum(alike.nbytes for alike in rest))
        blocks.append(Paragraph(f"and {count(number, 'more storage', 'more storages')}, {nbytes}", muted=True))
    return blocks


def _merged_lines(found: Found) -> list[_MergedLine]:
    """Return the lines of all engines, those alike as one, by the bytes that each of these engines has there."""
    alike: dict[object, _MergedLine] = {}
    for answer, report in found:
        for line in fold(report.tensors):
            key = _likeness(line)
            if line.row.name is None or (key in alike and alike[key].engines[-1] is answer):
                key = (key, answer.engine, line.row.device)  # nothing says that it is the same thing there
            same = alike.setdefault(key, _MergedLine(line, [], {}))
            same.engines.append(answer)
            same.devices[line.row.device] = None
    return sorted(alike.values(), key=lambda each: -each.line.nbytes)


def _likeness(line: Line[TensorRow]) -> object:
    row = line.row
    backend = row.device.partition(":")[0]  # each engine may have its own device of it
    return line.text, line.nbytes, row.nbytes is None, row.shape, row.dtype, row.kind, backend


def _line_cells(alike: _MergedLine, largest: int) -> list[Cell | str]:
    line, row = alike.line, alike.line.row
    device = ", ".join(alike.devices) if len(alike.devices) <= 2 else count(len(alike.devices), "device")
    return [
        engine_ranges(alike.engines), Cell(line.text, muted=row.name is None, title=", ".join(row.names)), device,
        sized(None if row.nbytes is None else line.nbytes, largest), dims(row.shape), row.dtype, kind_cell(row.kind),
    ]  # fmt: skip


_KEYS: dict[str, Callable[[TensorRow], str]] = {
    "device": lambda row: row.device,
    "dtype": lambda row: row.dtype,
    "kind": lambda row: row.kind,
    "holder": lambda row: row.name.partition(".")[0].partition("[")[0] if row.name else holder_text(row.holder),
}


def _totals(found: Found, key: str, limit: int | None) -> Table:
    """Return a row a key, with how much of it the engine has that has most."""
    sums: dict[str, dict[str, int]] = {}
    for answer, report in found:
        for row in report.tensors:
            engines = sums.setdefault(_KEYS[key](row), {})
            engines[answer.label] = engines.get(answer.label, 0) + (row.nbytes or 0)
    ordered = sorted(sums, key=lambda name: -sum(sums[name].values()))[:limit]
    whole = sum(sum(engines.values()) for engines in sums.values())
    rows = [
        (name, sized(sum(sums[name].values()), whole), f"{len(sums[name]):,}", _largest_share(sums[name]))
        for name in ordered
    ]
    columns = [Column(key.capitalize(), shrinks=True), Column("Size", "right"), Column("Engines", "right"),
               Column("Most on")]  # fmt: skip
    return Table(columns, rows, f"Live tensors by {key}")


def _largest_share(engines: dict[str, int]) -> str:
    engine = max(engines, key=lambda each: engines[each])
    return f"{engine}: {size(engines[engine])}"


def _devices(found: Found) -> list[Block]:
    """Return a row for each device in use; the same device of several engines with the same figures is one row."""
    alike: dict[DeviceMemoryRow, list[EngineAnswer]] = {}
    for answer, report in found:
        for row in report.by_device:
            if row.tensors or row.allocated or row.cached:
                alike.setdefault(row, []).append(answer)
    if not alike:
        return []
    ordered = sorted(alike.items(), key=lambda each: -(each[0].allocated or each[0].in_rows))
    shown = ordered[:MAX_DEVICES]
    columns = [
        Column("Engine", shrinks=True), Column("Device"), Column("Tensors", "right", 2), Column("Named", "right"),
        Column("Unnamed", "right"), Column("Unexplained", "right", 1), Column("Allocated", "right"),
        Column("Cached", "right", 1),
    ]  # fmt: skip
    grid = [_device_cells(answers, row) for row, answers in shown]
    blocks: list[Block] = [Table(columns, grid, "Each engine's devices")]
    if rest := ordered[len(shown) :]:
        devices = count(sum(len(answers) for _, answers in rest), "device")
        blocks.append(Paragraph(f"and {devices} with less", muted=True))
    return blocks


def _device_cells(answers: Sequence[EngineAnswer], row: DeviceMemoryRow) -> Sequence[Cell | str]:
    reserved = (row.allocated or 0) + (row.cached or 0)
    rest = (row.graph or 0) + (row.unexplained or 0)
    bar = _bar((row.named, row.held, rest), reserved) if reserved else ()
    return (
        engine_ranges(answers), row.device, f"{row.tensors:,}", size(row.named), size(row.held + (row.graph or 0)),
        size(row.unexplained), Cell(size(row.allocated), bar), size(row.cached),
    )  # fmt: skip


def _bar(sizes: tuple[int, int, int], whole: int) -> tuple[Segment, ...]:
    named, unnamed, rest = (part / whole for part in sizes)
    return (Segment(named, "main"), Segment(unnamed, "second"), Segment(rest, "other"))
