"""`%devices` as a document: the largest storages, or totals by a key, then each device against its allocator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpumagic.render.document import Block, Cell, Column, Document, Heading, Paragraph, Segment, Table
from gpumagic.render.units import count, shape, size
from gpumagic.reports import DeviceMemoryRow, TensorReport, TensorRow

NO_NAME = "(no name)"


def view(report: TensorReport) -> Document:
    """Return the document of a tensor report."""
    blocks: list[Block] = [Heading(_heading(report))]
    if report.group_by is not None:
        blocks.append(_totals(report, _KEYS[report.group_by], report.group_by.capitalize()))
    elif report.tensors:
        blocks += _largest(report)
    if report.by_device:
        blocks += _devices(report.by_device)
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _heading(report: TensorReport) -> str:
    tensors = sum(row.tensors for row in report.by_device)
    if not tensors:
        return "No live tensors"
    storages = sum(row.storages for row in report.by_device)
    shares = ", ".join(f"{row.device} {size(row.named + row.held)}" for row in report.by_device if row.tensors)
    return f"{count(tensors, 'tensor')} in {count(storages, 'storage')}: {shares}"


@dataclass(slots=True)
class _Line:
    """A row of the table: one storage, or several alike that no name tells apart."""

    row: TensorRow
    storages: int = 0
    nbytes: int = 0

    def add(self, row: TensorRow) -> None:
        self.storages += 1
        self.nbytes += row.nbytes or 0


def _lines(rows: Sequence[TensorRow]) -> list[_Line]:
    lines: dict[object, _Line] = {}
    for position, row in enumerate(rows):
        alike = (row.device, row.shape, row.dtype, row.kind, row.holder, row.note, row.nbytes is None)
        key = position if row.name is not None else alike
        lines.setdefault(key, _Line(row)).add(row)
    sizes = [row.nbytes or 0 for row in rows]
    if sizes == sorted(sizes, reverse=True):  # listed by size: what is alike counts with its sum
        return sorted(lines.values(), key=lambda line: -line.nbytes)
    return list(lines.values())


def _largest(report: TensorReport) -> list[Block]:
    lines = _lines(report.tensors)
    shown = lines if report.limit is None else lines[: report.limit]
    wholes = {row.device: row.named + row.held for row in report.by_device}
    columns = [
        Column("Name", shrinks=True, cut="middle"),
        Column("Device"),
        Column("Size", "right"),
        Column("Shape", shrinks=True),
        Column("Dtype", priority=2),
        Column("Kind", priority=1),
    ]
    rows = [_cells(line, wholes.get(line.row.device, 0)) for line in shown]
    return [Table(columns, rows, caption="The largest storages"), *_rest(report, shown), *_notes(shown)]


def _rest(report: TensorReport, shown: Sequence[_Line]) -> list[Block]:
    number = sum(row.storages for row in report.by_device) - sum(line.storages for line in shown)
    if number <= 0:
        return []
    nbytes = sum(row.named + row.held for row in report.by_device) - sum(line.nbytes for line in shown)
    return [Paragraph(f"and {count(number, 'more storage', 'more storages')}, {size(nbytes)}", muted=True)]


def _cells(line: _Line, whole: int) -> list[Cell]:
    row = line.row
    return [
        Cell(_name(line), muted=row.name is None, title=", ".join(row.names)),
        Cell(row.device),
        _sized(None if row.nbytes is None else line.nbytes, whole),
        Cell(_shape(row.shape)),
        Cell(row.dtype),
        Cell(_SHORT_KINDS.get(row.kind, row.kind), muted=row.kind == "plain", title=row.kind),
    ]


_SHORT_KINDS = {"parameter": "param", "gradient": "grad", "optimizer state": "optim", "activation": "activ."}


def _name(line: _Line) -> str:
    row = line.row
    text = row.name or (NO_NAME if row.holder is None else f"({row.holder})")
    return f"{text} × {line.storages:,}" if line.storages > 1 else text


def _sized(nbytes: int | None, whole: int) -> Cell:
    return Cell(size(nbytes), bar=(Segment((nbytes or 0) / whole if whole else 0.0),))


def _notes(lines: Sequence[_Line]) -> list[Block]:
    about: dict[str, list[str]] = {}
    for line in lines:
        if line.row.note is not None:
            about.setdefault(_note(line.row), []).append(_name(line))
    return [Paragraph(f"{_some(names)}: {note}", muted=True) for note, names in about.items()]


def _note(row: TensorRow) -> str:
    if row.nbytes and row.viewed_nbytes is not None and 2 * row.viewed_nbytes <= row.nbytes:
        return f"a view of {size(row.viewed_nbytes)} keeps {size(row.nbytes)}; a .clone() of it would not"
    return row.note or ""


def _some(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def _shape(dims: tuple[int, ...]) -> str:
    return shape(dims).replace("-1", "?")  # a size that torch knows only by a symbol


_KEYS: dict[str, Callable[[TensorRow], str]] = {
    "device": lambda row: row.device,
    "dtype": lambda row: row.dtype,
    "kind": lambda row: row.kind,
    "holder": lambda row: _root(row.name) if row.name is not None else f"({row.holder})" if row.holder else NO_NAME,
}


def _root(name: str) -> str:
    return re.split(r"[.[{]", name, maxsplit=1)[0]


def _totals(report: TensorReport, key: Callable[[TensorRow], str], title: str) -> Table:
    alike: dict[str, list[TensorRow]] = {}
    for row in report.tensors:
        alike.setdefault(key(row), []).append(row)
    sizes = {name: _sum(rows) for name, rows in alike.items()}
    whole = sum(nbytes or 0 for nbytes in sizes.values())
    columns = [Column(title, shrinks=True), *(Column(name, "right") for name in ("Size", "Tensors", "Storages"))]
    rows = [
        (name, _sized(sizes[name], whole), f"{sum(row.views + 1 for row in alike[name]):,}", f"{len(alike[name]):,}")
        for name in sorted(alike, key=lambda name: (-(sizes[name] or 0), name))
    ]
    return Table(columns, rows, caption=f"Live tensors by {title.lower()}")


def _sum(rows: Sequence[TensorRow]) -> int | None:
    known = [row.nbytes for row in rows if row.nbytes is not None]
    return sum(known) if known else None


_LEAST = {"Storages": 3, "Tensors": 2, "Cached": 1}
"""What a narrow terminal can do without, the highest first: the rest is the sum that has to add up."""


def _devices(rows: Iterable[DeviceMemoryRow]) -> list[Block]:
    rows = list(rows)
    counted = any(row.allocated is not None for row in rows)
    titles = ["Tensors", "Storages", "Named", "Unnamed"]
    titles += ["Unexplained", "Allocated", "Cached"] if counted else []
    columns = [Column("Device"), *(Column(title, "right", _LEAST.get(title, 0)) for title in titles)]
    cells: list[list[str]] = []
    for row in rows:
        cells.append([row.device, f"{row.tensors:,}", f"{row.storages:,}", size(row.named), size(row.held)])
        if counted:
            cells[-1] += [size(row.unexplained), size(row.allocated), size(row.cached)]
    table = Table(columns, cells, caption="Each device")
    legend = "Named + unnamed + unexplained (autograd graphs, C++, other threads) = allocated."
    return [table, Paragraph(legend, muted=True)] if counted else [table]
