"""`%devices` as a document: the largest storages, or totals by a key, then each device against its allocator.

The second half is what all tables of storages share: rows that are alike folded into one line, and the cells.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gpumagic.memory.devices import BUILTIN_DEVICES
from gpumagic.memory.ledger import PART_OF_KIND
from gpumagic.memory.segments import CLEAR_WORKSPACES
from gpumagic.report.base import grouped
from gpumagic.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Heading,
    Paragraph,
    Segment,
    Table,
    document_of,
)
from gpumagic.report.units import LARGE, count, few, shape, size
from gpumagic.tensors.report import (
    DeviceMemoryRow,
    DiffRow,
    TensorReport,
    TensorRow,
    root_of,
)

Row = TypeVar("Row", TensorRow, DiffRow)

_FEW_ROWS = 3
"""Up to this many rows under names such as ``batch[0]`` keep lines of their own."""


@document_of.register(TensorReport)
def view_tensors(report: TensorReport) -> Document:
    """Return the document of a tensor report."""
    first = _headline(report)
    amount = _amount(report)
    blocks: list[Block] = [Heading(first)]
    if first != amount:
        blocks.append(Paragraph(amount, muted=True))
    if report.tensors and report.group_by is not None:
        blocks.append(_totals(report, report.group_by))
    elif report.tensors:
        blocks += _largest(report)
    devices = [row for row in report.by_device if _is_in_use(row)]
    if devices:
        blocks.append(Table.of(devices, DEVICE_COLUMNS, "Each device"))
    workspaces = {
        row.device: row.workspaces for row in report.by_device if row.workspaces
    }
    if workspaces:
        kept = f"Workspaces are cuBLAS's, {shares(workspaces)}"
        blocks.append(Paragraph(f"{kept}: {CLEAR_WORKSPACES} frees them"))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def shares(sums: Mapping[str, int]) -> str:
    """Return the bytes of each device in a sentence."""
    parts = [f"{size(nbytes)} on {device}" for device, nbytes in sums.items()]
    return ", ".join(parts)


def total_nbytes(rows: Iterable[TensorRow]) -> int:
    """Return the bytes of rows together; those of unknown size count nothing."""
    return sum(row.nbytes or 0 for row in rows)


def _is_in_use(row: DeviceMemoryRow) -> bool:
    return bool(row.tensors or row.allocated or row.cached or row.other_processes)


SHOWN = 20
"""Lines of a table unless more are asked for."""
_FEW_LINES, _SMALL = 10, 0.001
"""Of more lines than so many, those of less than this share of what is on their device stand in one together."""
LARGE_SHARE = 0.1
"""The share of all that the report lists, from which what may be freed is its first line."""


def _headline(report: TensorReport) -> str:
    """Return what keeps most memory for nothing and how to free it, or how much there is."""
    alike = grouped(
        ((holder_pattern(row), row.device, row.frees), row)
        for row in report.tensors
        if row.frees is not None and row.nbytes
    )
    if not alike:
        return _amount(report)
    rows = max(alike.values(), key=total_nbytes)
    listed = sum(row.in_rows for row in report.by_device)
    if total_nbytes(rows) < max(LARGE, LARGE_SHARE * listed):
        return _amount(report)
    row = rows[0]
    line = str(row.frees).replace("\n", " and then ")
    amount = size(total_nbytes(rows))
    if row.graph_of is not None:
        tensor = name_pattern(row.graph_of)
        activations = f"{amount} of activations on {row.device}"
        return f"{tensor} keeps {activations} for backward: {line} frees them"
    keeper = holder_pattern(row) or "Python"
    if row.holder_kind in ("last traceback", "last result"):
        keeper = f"The {keeper}"
    return f"{keeper} keeps {amount} on {row.device}: {line} frees it"


def _amount(report: TensorReport) -> str:
    """Return how much there is on each device, and how much more its allocator keeps for later."""
    tensors = sum(row.tensors for row in report.by_device)
    if not tensors and report.only:
        return f"No live tensors on {', '.join(report.only)}"
    if not tensors:
        return "No live tensors"
    storages = sum(row.storages for row in report.by_device)
    largest = max(row.in_rows for row in report.by_device)
    told: list[str] = []
    for row in report.by_device:
        if not row.tensors or row.in_rows < LARGE <= largest:
            continue
        share = f"{row.device} {size(row.in_rows)}"
        cached = row.cached or 0
        if cached >= max(
            LARGE, LARGE_SHARE * (row.allocated or 0)
        ):  # it is worth a word
            share += f" and {size(cached)} of cache"
        told.append(share)
    counted = f"{count(tensors, 'tensor')} in {count(storages, 'storage')}"
    return f"{counted}: {', '.join(told)}"


def _largest(report: TensorReport) -> Iterator[Block]:
    """Yield the table of the largest storages, and the notes of those that it shows."""
    wholes = {row.device: row.in_rows for row in report.by_device}
    rows = [row for row in report.tensors if row.is_reached() or row.nbytes != 0]
    lines = fold(rows)
    limit = report.limit
    small: set[int] = set()
    if limit is not None and limit <= SHOWN and len(lines) > _FEW_LINES:
        small = _small_lines(lines, wholes)
        limit = min(limit, len(lines) - len(small))

    def is_last(line: Line[TensorRow]) -> tuple[bool, bool]:
        return id(line) in small, line.row.device in BUILTIN_DEVICES

    lines.sort(key=is_last)
    yield Table.of(
        lines,
        NAMED_COLUMNS,
        "The largest storages",
        limit=limit,
        rest=more_storages,
        whole=lambda line: wholes.get(line.row.device, 0),
    )
    about = grouped((line.row.note, line.text) for line in lines[:limit])
    about.pop(None, None)
    for note, names in about.items():
        subjects = few(list(dict.fromkeys(names)), 3)
        yield Paragraph(f"{subjects}: {note}", muted=True)


def _small_lines(
    lines: Sequence[Line[TensorRow]], wholes: Mapping[str, int]
) -> set[int]:
    """Return the `id`s of the lines that stand in one together; none where that would leave hardly any."""
    small: set[int] = set()
    for line in lines:
        if line.nbytes < _SMALL * wholes.get(line.row.device, 0):
            small.add(id(line))
    if len(small) > len(lines) - 3:
        return set()
    return small


def _holder_of(row: TensorRow) -> str:
    """Return the variable that reaches a storage, or else what keeps it."""
    if row.name is not None:
        return root_of(row.name)
    return row.variable or holder_text(row.holder)


GROUP_KEYS: dict[str, Callable[[TensorRow], str]] = {
    "dtype": lambda row: row.dtype,
    "kind": lambda row: row.kind,
    "holder": _holder_of,
}


def _count_tensors(line: Line[TensorRow]) -> str:
    tensors = sum(row.views + 1 for row in line.members)
    return f"{tensors:,}"


def _colour_of(kind: str, line: Line[Any]) -> dict[str, int]:
    """Return the bytes of a line by the part that has the colour of its bar."""
    return {PART_OF_KIND.get(kind, ""): line.nbytes}


def _totals(report: TensorReport, by: str) -> Table:
    lines: dict[str, Line[TensorRow]] = {}
    for row in report.tensors:
        key = GROUP_KEYS[by](row)
        lines.setdefault(key, Line(row, key)).add(row)
    columns: tuple[Column[Line[TensorRow]], ...] = (
        Column(by.capitalize(), lambda line: line.name, shrinks=True),
        dataclasses.replace(SIZE, bar=lambda line: _colour_of(line.name, line)),
        Column("Tensors", _count_tensors, "right"),
        Column("Storages", lambda line: f"{len(line.members):,}", "right"),
    )
    return Table.of(
        sorted(lines.values(), key=lambda line: (-line.nbytes, line.name)),
        columns,
        f"Live tensors by {by}",
        limit=report.limit,
        whole=sum(line.nbytes for line in lines.values()),
        rest=more_storages,
    )


def _allocated(row: DeviceMemoryRow) -> Cell:
    """Return what is allocated, with a bar of what has a name, what no variable reaches, and what else it is."""
    reserved = (row.allocated or 0) + (row.cached or 0)
    if not reserved:
        return Cell(size(row.allocated))
    rest = row.graph or 0
    rest += row.workspaces or 0
    rest += row.unexplained or 0
    bar = (
        Segment(row.named / reserved),
        Segment(row.held / reserved, "second"),
        Segment(rest / reserved, "other"),
    )
    return Cell(size(row.allocated), bar)


def _has_allocator(row: DeviceMemoryRow) -> bool:
    return row.allocated is not None


DEVICE_COLUMNS: tuple[Column[DeviceMemoryRow], ...] = (
    Column("Device", lambda row: row.device),
    Column("Tensors", lambda row: f"{row.tensors:,}", "right", 2),
    Column("Storages", lambda row: f"{row.storages:,}", "right", 3),
    Column("Named", lambda row: size(row.named), "right"),
    Column("No variable", lambda row: size(row.held), "right"),
    Column(
        "In graphs",
        lambda row: size(row.graph),
        "right",
        when=lambda row: row.graph,
    ),
    Column(
        "Workspaces",
        lambda row: size(row.workspaces),
        "right",
        when=lambda row: row.workspaces,
    ),
    Column(
        "Unattributed",
        lambda row: size(row.unexplained),
        "right",
        when=_has_allocator,
    ),
    Column("Allocated", _allocated, "right", when=_has_allocator),
    Column(
        "Cached",
        lambda row: size(row.cached),
        "right",
        1,
        when=_has_allocator,
    ),
    Column(
        "Others",
        lambda row: size(row.other_processes),
        "right",
        1,
        when=lambda row: row.other_processes is not None,
    ),
)
"""A narrow terminal drops those of the highest number first: the rest is the sum that has to add up."""


@dataclass(slots=True)
class Line(Generic[Row]):
    """A line of a table: one storage, or several alike."""

    row: Row
    """The first of them."""
    name: str
    nbytes: int = 0
    """Of all of them together."""
    members: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a storage that is like the first."""
        self.members.append(row)
        self.nbytes += row.nbytes or 0

    @property
    def text(self) -> str:
        """The name, and how many storages share it."""
        if len(self.members) <= 1:
            return self.name
        return f"{self.name} × {len(self.members):,}"


def fold(rows: Sequence[Row]) -> list[Line[Row]]:
    """Return the rows as lines, those of most bytes first."""
    keys: list[object] = [_fold_key(row) for row in rows]
    alike = Counter(keys)
    lines: dict[object, Line[Row]] = {}
    for position, row in enumerate(rows):
        key = keys[position]
        if row.name is None:
            pattern = holder_text(holder_pattern(row))
        else:
            pattern = name_pattern(row.name)
            if pattern == row.name or alike[key] <= _FEW_ROWS:
                pattern = row.name
                key = position  # a line of its own
        line = lines.setdefault(key, Line(row, pattern))
        line.add(row)
    return sorted(lines.values(), key=lambda line: -abs(line.nbytes))


def _fold_key(row: TensorRow | DiffRow) -> object:
    """Return what rows of one line have in common."""
    return (
        None if row.name is None else name_pattern(row.name),
        row.device,
        row.shape,
        row.dtype,
        row.kind,
        holder_pattern(row),
        row.nbytes is None,
        getattr(row, "note", None),
        getattr(row, "change", None),
    )


def name_pattern(name: str) -> str:
    """Return a name with its indices left open: ``"batch[…]"`` for ``"batch[17]"``."""
    return re.sub(r"\[\d+\]", "[…]", name)


def holder_pattern(row: TensorRow | DiffRow) -> str | None:
    """Return what keeps a row's tensor; the graphs of all tensors of one list are one."""
    if row.holder is None or row.graph_of is None:
        return row.holder
    return name_pattern(row.holder)


def holder_text(holder: str | None) -> str:
    """Return what is shown in place of a name."""
    return "(no name)" if holder is None else f"({holder})"


def more_storages(lines: Sequence[Line[Any]]) -> str:
    """Return what is not listed of the storages."""
    if not lines:
        return ""
    storages = sum(len(line.members) for line in lines)
    nbytes = sum(line.nbytes for line in lines)
    storages_text = count(storages, "more storage")
    return f"and {storages_text}, {size(nbytes)}"


def _kind_cell(line: Line[Any]) -> Cell:
    kind = line.row.kind
    return Cell(kind, muted=kind == "plain")


def storage_columns(nbytes: Column[Line[Any]]) -> tuple[Column[Line[Any]], ...]:
    """Return what every table of storages has after what identifies one; ``nbytes`` is its column of sizes."""
    return (
        Column("Device", lambda line: line.row.device),
        nbytes,
        Column("Shape", lambda line: shape_text(line.row.shape), shrinks=True),
        Column("Dtype", lambda line: line.row.dtype, priority=2),
        Column("Kind", _kind_cell, priority=1),
    )


def _size_text(line: Line[Any]) -> str:
    is_known = line.row.nbytes is not None
    return size(line.nbytes if is_known else None)


SIZE = Column[Line[Any]](
    "Size",
    _size_text,
    "right",
    bar=lambda line: _colour_of(line.row.kind, line),
)
"""Bytes with a bar in the colour of what they are for."""


def _name_cell(line: Line[TensorRow]) -> Cell:
    """Return the best name of a storage, with all its names on hover; muted where it has none."""
    row = line.row
    return Cell(line.text, muted=row.name is None, title=", ".join(row.names))


NAMED_COLUMNS: tuple[Column[Line[Any]], ...] = (
    Column("Name", _name_cell, shrinks=True, cut="never", least=26),
    *storage_columns(SIZE),
)


def shape_text(sizes: tuple[int, ...]) -> str:
    """Return a shape as torch prints it, ``?`` for a size that torch knows only by a symbol."""
    return shape(sizes).replace("-1", "?")
