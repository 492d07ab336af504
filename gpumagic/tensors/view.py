"""`%devices` as a document: the largest storages, or totals by a key, then each device against its allocator.

The second half is what all tables of storages share: rows that are alike folded into one line, and the cells.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    IN_GRAPH,
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
    first, amount = _headline(report), _amount(report)
    blocks: list[Block] = [
        Heading(first),
        *([] if first == amount else [Paragraph(amount, muted=True)]),
    ]
    if report.tensors:
        blocks += (
            _largest(report) if report.group_by is None else [_totals(report, report.group_by)]
        )
    devices = [
        row
        for row in report.by_device
        if row.tensors or row.allocated or row.cached or row.other_processes
    ]
    if devices:
        blocks.append(Table.of(devices, DEVICE_COLUMNS, "Each device"))
    if kept := ", ".join(
        f"{size(row.workspaces)} on {row.device}" for row in report.by_device if row.workspaces
    ):
        blocks.append(Paragraph(f"Workspaces are cuBLAS's, {kept}: {CLEAR_WORKSPACES} frees them"))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


SHOWN = 20
"""Lines of a table unless more are asked for."""
_FEW_LINES, _SMALL = 10, 0.001
"""Of more lines than so many, those of less than this share of what is on their device stand in one together."""
LARGE_SHARE = 0.1
"""The share of all that the report lists, from which what may be freed is its first line."""


def _headline(report: TensorReport) -> str:
    """Return what keeps most memory for nothing and how to free it, or how much there is."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for row in report.tensors:
        if row.frees is not None and row.nbytes:
            sums[graph_pattern(row.holder) or "Python", row.device, row.frees] += row.nbytes
    for (holder, device, command), nbytes in sums.most_common(1):
        if nbytes >= max(LARGE, LARGE_SHARE * sum(row.in_rows for row in report.by_device)):
            line = command.replace("\n", " and then ")
            if holder.startswith(IN_GRAPH):
                kept = f"{holder.removeprefix(IN_GRAPH)} keeps {size(nbytes)} of activations on {device} for backward"
                return f"{kept}: {line} frees them"
            keeper = f"The {holder}" if holder.startswith("last ") else holder
            return f"{keeper} keeps {size(nbytes)} on {device}: {line} frees it"
    return _amount(report)


def _amount(report: TensorReport) -> str:
    tensors = sum(row.tensors for row in report.by_device)
    if not tensors:
        return f"No live tensors on {', '.join(report.only)}" if report.only else "No live tensors"
    storages = sum(row.storages for row in report.by_device)
    largest = max(row.in_rows for row in report.by_device)
    told = [
        row for row in report.by_device if row.tensors and (row.in_rows >= LARGE or largest < LARGE)
    ]
    # How much more the allocator keeps for later, if that is worth a word.
    caches = {
        row.device: f" and {size(row.cached)} of cache"
        for row in told
        if (row.cached or 0) >= max(LARGE, LARGE_SHARE * (row.allocated or 0))
    }
    shares = ", ".join(
        f"{row.device} {size(row.in_rows)}{caches.get(row.device, '')}" for row in told
    )
    return f"{count(tensors, 'tensor')} in {count(storages, 'storage')}: {shares}"


def _largest(report: TensorReport) -> Iterator[Block]:
    wholes = {row.device: row.in_rows for row in report.by_device}
    lines, limit = (
        fold([row for row in report.tensors if row.is_reached() or row.nbytes != 0]),
        report.limit,
    )
    small = {id(line) for line in lines if line.nbytes < _SMALL * wholes.get(line.row.device, 0)}
    if len(lines) <= _FEW_LINES or limit is None or limit > SHOWN or len(small) > len(lines) - 3:
        small = set()
    lines.sort(key=lambda line: (id(line) in small, line.row.device in BUILTIN_DEVICES))
    limit = min(limit, len(lines) - len(small)) if small and limit is not None else limit
    yield Table.of(
        lines,
        NAMED_COLUMNS,
        "The largest storages",
        limit=limit,
        rest=more_storages,
        whole=lambda line: wholes.get(line.row.device, 0),
    )
    about = grouped(
        (line.row.note, line.text) for line in lines[:limit] if line.row.note is not None
    )
    for note, names in about.items():
        yield Paragraph(f"{few(list(dict.fromkeys(names)), 3)}: {note}", muted=True)


GROUP_KEYS: dict[str, Callable[[TensorRow], str]] = {
    "dtype": lambda row: row.dtype,
    "kind": lambda row: row.kind,
    "holder": lambda row: (
        root_of(row.name) if row.name is not None else row.variable or holder_text(row.holder)
    ),
}


def _totals(report: TensorReport, by: str) -> Table:
    lines: dict[str, Line[TensorRow]] = {}
    for row in report.tensors:
        key = GROUP_KEYS[by](row)
        lines.setdefault(key, Line(row, key)).add(row)
    columns: tuple[Column[Line[TensorRow]], ...] = (
        Column(by.capitalize(), lambda line: line.name, shrinks=True),
        dataclasses.replace(SIZE, bar=lambda line: {PART_OF_KIND.get(line.name, ""): line.nbytes}),
        Column("Tensors", lambda line: f"{sum(row.views + 1 for row in line.members):,}", "right"),
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
    rest = (row.graph or 0) + (row.workspaces or 0) + (row.unexplained or 0)
    if not reserved:
        return Cell(size(row.allocated))
    bar = (
        Segment(row.named / reserved),
        Segment(row.held / reserved, "second"),
        Segment(rest / reserved, "other"),
    )
    return Cell(size(row.allocated), bar)


DEVICE_COLUMNS: tuple[Column[DeviceMemoryRow], ...] = (
    Column("Device", lambda row: row.device),
    Column("Tensors", lambda row: f"{row.tensors:,}", "right", 2),
    Column("Storages", lambda row: f"{row.storages:,}", "right", 3),
    Column("Named", lambda row: size(row.named), "right"),
    Column("No variable", lambda row: size(row.held), "right"),
    Column("In graphs", lambda row: size(row.graph), "right", when=lambda row: row.graph),
    Column(
        "Workspaces", lambda row: size(row.workspaces), "right", when=lambda row: row.workspaces
    ),
    Column(
        "Unattributed",
        lambda row: size(row.unexplained),
        "right",
        when=lambda row: row.allocated is not None,
    ),
    Column("Allocated", _allocated, "right", when=lambda row: row.allocated is not None),
    Column(
        "Cached",
        lambda row: size(row.cached),
        "right",
        1,
        when=lambda row: row.allocated is not None,
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
        return f"{self.name} × {len(self.members):,}" if len(self.members) > 1 else self.name


def fold(rows: Sequence[Row]) -> list[Line[Row]]:
    """Return the rows as lines, those of most bytes first."""
    keys = [_fold_key(row) for row in rows]
    alike = Counter(keys)
    lines: dict[object, Line[Row]] = {}
    for position, (key, row) in enumerate(zip(keys, rows, strict=True)):
        name = (
            holder_text(graph_pattern(row.holder)) if row.name is None else name_pattern(row.name)
        )
        folds = row.name is None or (alike[key] > _FEW_ROWS and name != row.name)
        name = name if folds or row.name is None else row.name
        lines.setdefault(key if folds else position, Line(row, name)).add(row)
    return sorted(lines.values(), key=lambda line: -abs(line.nbytes))


def _fold_key(row: TensorRow | DiffRow) -> object:
    more = (getattr(row, "note", None), getattr(row, "change", None))
    return (
        row.name and name_pattern(row.name),
        row.device,
        row.shape,
        row.dtype,
        row.kind,
        graph_pattern(row.holder),
        row.nbytes is None,
        more,
    )


def name_pattern(name: str) -> str:
    """Return a name with its indices left open: ``"batch[…]"`` for ``"batch[17]"``."""
    return re.sub(r"\[\d+\]", "[…]", name)


def graph_pattern(holder: str | None) -> str | None:
    """Return a holder; the graphs of all tensors of one list are one."""
    return name_pattern(holder) if holder is not None and holder.startswith(IN_GRAPH) else holder


def holder_text(holder: str | None) -> str:
    """Return what is shown in place of a name."""
    return "(no name)" if holder is None else f"({holder})"


def more_storages(lines: Sequence[Line[Any]]) -> str:
    """Return what is not listed of the storages."""
    storages = sum(len(line.members) for line in lines)
    more = f"and {count(storages, 'more storage')}, {size(sum(line.nbytes for line in lines))}"
    return more if lines else ""


def storage_columns(nbytes: Column[Line[Any]]) -> tuple[Column[Line[Any]], ...]:
    """Return what every table of storages has after what identifies one; ``nbytes`` is its column of sizes."""
    return (
        Column("Device", lambda line: line.row.device),
        nbytes,
        Column("Shape", lambda line: shape_text(line.row.shape), shrinks=True),
        Column("Dtype", lambda line: line.row.dtype, priority=2),
        Column(
            "Kind", lambda line: Cell(line.row.kind, muted=line.row.kind == "plain"), priority=1
        ),
    )


SIZE = Column[Line[Any]](
    "Size",
    lambda line: size(None if line.row.nbytes is None else line.nbytes),
    "right",
    bar=lambda line: {PART_OF_KIND.get(line.row.kind, ""): line.nbytes},
)
"""Bytes with a bar in the colour of what they are for."""
NAMED_COLUMNS: tuple[Column[Line[Any]], ...] = (
    Column(
        "Name",
        lambda line: Cell(line.text, muted=line.row.name is None, title=", ".join(line.row.names)),
        shrinks=True,
        cut="never",
        least=26,
    ),
    *storage_columns(SIZE),
)


def shape_text(sizes: tuple[int, ...]) -> str:
    """Return a shape as torch prints it, ``?`` for a size that torch knows only by a symbol."""
    return shape(sizes).replace("-1", "?")
