"""`%devices` as a document: the largest storages, or totals by a key, then each device against its allocator.

The second half is what all tables of storages share: rows that are alike folded into one line, and the cells.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from gpumagic.memory.devices import BUILTIN_DEVICES
from gpumagic.memory.ledger import PART_OF_KIND
from gpumagic.memory.segments import CLEAR_WORKSPACES
from gpumagic.report.base import grouped
from gpumagic.report.document import Block, Cell, Column, Document, Heading, Paragraph, Segment, Table, document_of
from gpumagic.report.units import LARGE, count, few, shape, size
from gpumagic.tensors.report import (
    IN_GRAPH,
    DeviceMemoryRow,
    DiffRow,
    GraphRow,
    LeakRow,
    TensorReport,
    TensorRow,
    release_command,
    root_of,
)

Row = TypeVar("Row", TensorRow, LeakRow, DiffRow)

_FEW_ROWS = 3
"""Up to this many rows under names such as ``batch[0]`` keep lines of their own."""


@document_of.register(TensorReport)
def view_tensors(report: TensorReport) -> Document:
    """Return the document of a tensor report."""
    first, amount = _headline(report), _amount(report)
    blocks: list[Block] = [Heading(first), *([] if first == amount else [Paragraph(amount, muted=True)])]
    if report.tensors:
        blocks += _largest(report) if report.group_by is None else [_totals(report, report.group_by)]
    devices = [row for row in report.by_device if row.tensors or row.allocated or row.cached or row.other_processes]
    if devices:
        blocks.append(Table.of(devices, DEVICE_COLUMNS, "Each device"))
    if kept := ", ".join(f"{size(row.workspaces)} on {row.device}" for row in report.by_device if row.workspaces):
        blocks.append(Paragraph(f"Workspaces are cuBLAS's, {kept}: {CLEAR_WORKSPACES} frees them"))
    blocks += [Paragraph(_graph(row)) for row in report.graphs if row.nbytes >= LARGE and _graph(row) != first]
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


SHOWN = 20
"""Lines of a table unless more are asked for."""
LARGE_SHARE = 0.1
"""The share of all that the report lists, from which what may be freed is its first line."""


def _graph(row: GraphRow) -> str:
    kept = f"{row.name} keeps {size(row.nbytes)} of activations on {row.device} for backward"
    if row.example != row.name and row.tensors > 1:
        return f"{kept}, in {row.tensors:,} graphs: append loss.detach(), or loss.item() for a number"
    return f"{kept}: {row.example} = {row.example}.detach() frees them"


def _headline(report: TensorReport) -> str:
    """Return what keeps most memory for nothing and how to free it, or how much there is."""
    graph = next((row for row in report.graphs if _is_worth_it(row.nbytes, report)), None)
    leak = _largest_leak(report)
    if graph is not None and graph.nbytes >= (leak[0] if leak else 0):
        return _graph(graph)
    return leak[1] if leak else _amount(report)


def _largest_leak(report: TensorReport) -> tuple[int, str] | None:
    """Return what the line frees that frees most, and the sentence about it; graphs have one of their own."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for row in report.tensors:
        command = None if row.is_reached() or row.in_graph else release_command(row)
        if command is not None and row.nbytes:
            holder = row.holder or "Python"
            sums[f"The {holder}" if holder.startswith("last ") else holder, row.device, command] += row.nbytes
    for (holder, device, command), nbytes in sums.most_common(1):
        if _is_worth_it(nbytes, report):
            line = command.replace("\n", " and then ")
            return nbytes, f"{holder} keeps {size(nbytes)} on {device}: {line} frees it"
    return None


def _is_worth_it(nbytes: int, report: TensorReport) -> bool:
    return nbytes >= max(LARGE, LARGE_SHARE * sum(row.in_rows for row in report.by_device))


def _amount(report: TensorReport) -> str:
    tensors = sum(row.tensors for row in report.by_device)
    if not tensors:
        return f"No live tensors on {', '.join(report.only)}" if report.only else "No live tensors"
    storages = sum(row.storages for row in report.by_device)
    largest = max(row.in_rows for row in report.by_device)
    told = [row for row in report.by_device if row.tensors and (row.in_rows >= LARGE or largest < LARGE)]
    shares = ", ".join(f"{row.device} {size(row.in_rows)}{_cache(row)}" for row in told)
    return f"{count(tensors, 'tensor')} in {count(storages, 'storage')}: {shares}"


def _cache(row: DeviceMemoryRow) -> str:
    """Return in words how much more the allocator keeps for later, if that is worth a word."""
    cached = row.cached or 0
    return f" and {size(cached)} of cache" if cached >= max(LARGE, LARGE_SHARE * (row.allocated or 0)) else ""


def _largest(report: TensorReport) -> Iterator[Block]:
    wholes = {row.device: row.in_rows for row in report.by_device}
    lines, limit = _in_order(fold(report.tensors), wholes, report.limit)
    yield Table.of(
        lines, NAMED_COLUMNS, "The largest storages", limit=limit, rest=more_storages,
        whole=lambda line: wholes.get(line.row.device, 0),
    )  # fmt: skip
    about = grouped((_note(line.row), line.text) for line in lines[:limit] if line.row.note is not None)
    for note, names in about.items():
        yield Paragraph(f"{few(list(dict.fromkeys(names)), 3)}: {note}", muted=True)


_FEW_LINES, _SMALL = 10, 0.001
"""Of more lines than so many, those of less than this share of what is on their device stand in one together."""


def _in_order(
    lines: list[Line[TensorRow]], wholes: Mapping[str, int], limit: int | None
) -> tuple[list[Line[TensorRow]], int | None]:
    """Return lines by size with those of accelerators first, and how many are shown: not the small ones of many."""
    if any(line.nbytes < after.nbytes for line, after in pairwise(lines)):
        return lines, limit  # someone has put them in another order
    small = {id(line) for line in lines if line.nbytes < _SMALL * wholes.get(line.row.device, 0)}
    if len(lines) <= _FEW_LINES or limit is None or limit > SHOWN or len(small) > len(lines) - 3:
        small = set()
    ordered = sorted(lines, key=lambda line: (id(line) in small, line.row.device in BUILTIN_DEVICES))
    return ordered, min(limit, len(lines) - len(small)) if small and limit is not None else limit


def _note(row: TensorRow) -> str:
    if row.nbytes and row.viewed_nbytes is not None and 2 * row.viewed_nbytes <= row.nbytes:
        return f"a {size(row.viewed_nbytes)} view keeps a {size(row.nbytes)} storage alive; .clone() it"
    return row.note or ""


GROUP_KEYS: dict[str, Callable[[TensorRow], str]] = {
    "dtype": lambda row: row.dtype,
    "kind": lambda row: row.kind,
    "holder": lambda row: root_of(row.name) if row.name is not None else row.variable or holder_text(row.holder),
}


class Total(NamedTuple):
    """What is alike by the key that totals were asked by."""

    name: str
    nbytes: int | None
    tensors: int
    storages: int


def _totals(report: TensorReport, by: str) -> Table:
    alike = grouped((GROUP_KEYS[by](row), row) for row in report.tensors)
    totals = [Total(name, _sum(rows), sum(row.views + 1 for row in rows), len(rows)) for name, rows in alike.items()]
    columns: tuple[Column[Total], ...] = (
        Column(by.capitalize(), lambda each: each.name, shrinks=True),
        Column(
            "Size", lambda each: size(each.nbytes), "right",
            bar=lambda each: {PART_OF_KIND.get(each.name, ""): each.nbytes or 0},
        ),
        Column("Tensors", lambda each: f"{each.tensors:,}", "right"),
        Column("Storages", lambda each: f"{each.storages:,}", "right"),
    )  # fmt: skip
    return Table.of(
        sorted(totals, key=lambda each: (-(each.nbytes or 0), each.name)), columns, f"Live tensors by {by}",
        limit=report.limit, whole=sum(each.nbytes or 0 for each in totals),
        rest=lambda left: f"and {len(left):,} more, {size(sum(each.nbytes or 0 for each in left))}" if left else "",
    )  # fmt: skip


def _sum(rows: Sequence[TensorRow]) -> int | None:
    known = [row.nbytes for row in rows if row.nbytes is not None]
    return sum(known) if known else None


def _allocated(row: DeviceMemoryRow) -> Cell:
    """Return what is allocated, with a bar of what has a name, what no variable reaches, and what else it is."""
    reserved = (row.allocated or 0) + (row.cached or 0)
    rest = (row.graph or 0) + (row.workspaces or 0) + (row.unexplained or 0)
    if not reserved:
        return Cell(size(row.allocated))
    bar = Segment(row.named / reserved), Segment(row.held / reserved, "second"), Segment(rest / reserved, "other")
    return Cell(size(row.allocated), bar)


DEVICE_COLUMNS: tuple[Column[DeviceMemoryRow], ...] = (
    Column("Device", lambda row: row.device),
    Column("Tensors", lambda row: f"{row.tensors:,}", "right", 2),
    Column("Storages", lambda row: f"{row.storages:,}", "right", 3),
    Column("Named", lambda row: size(row.named), "right"),
    Column("No variable", lambda row: size(row.held), "right"),
    Column("In graphs", lambda row: size(row.graph), "right", when=lambda row: row.graph),
    Column("Workspaces", lambda row: size(row.workspaces), "right", when=lambda row: row.workspaces),
    Column("Unattributed", lambda row: size(row.unexplained), "right", when=lambda row: row.allocated is not None),
    Column("Allocated", _allocated, "right", when=lambda row: row.allocated is not None),
    Column("Cached", lambda row: size(row.cached), "right", 1, when=lambda row: row.allocated is not None),
    Column(
        "Others", lambda row: size(row.other_processes), "right", 1, when=lambda row: row.other_processes is not None
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

    @property
    def text(self) -> str:
        """The name, and how many storages share it."""
        return f"{self.name} × {len(self.members):,}" if len(self.members) > 1 else self.name


def fold(rows: Sequence[Row]) -> list[Line[Row]]:
    """Return the rows as lines, in their order; where rows come by size, lines are ordered by their sums."""
    keys = [_fold_key(row) for row in rows]
    alike = Counter(keys)
    lines: dict[object, Line[Row]] = {}
    for position, (key, row) in enumerate(zip(keys, rows, strict=True)):
        named = getattr(row, "name", None)
        folds = named is None or (alike[key] > _FEW_ROWS and name_pattern(named) != named)
        name = holder_text(graph_pattern(row.holder)) if named is None else name_pattern(named) if folds else named
        line = lines.setdefault(key if folds else position, Line(row, name))
        line.members.append(row)
        line.nbytes += row.nbytes or 0
    sizes = [abs(row.nbytes or 0) for row in rows]
    if sizes == sorted(sizes, reverse=True):
        return sorted(lines.values(), key=lambda line: -abs(line.nbytes))
    return list(lines.values())


def _fold_key(row: TensorRow | LeakRow | DiffRow) -> object:
    name = getattr(row, "name", None)
    more = (getattr(row, "note", None), getattr(row, "change", None))
    return (
        name and name_pattern(name), row.device, row.shape, row.dtype, row.kind,
        graph_pattern(row.holder), row.nbytes is None, more,
    )  # fmt: skip


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
        Column("Kind", lambda line: Cell(line.row.kind, muted=line.row.kind == "plain"), priority=1),
    )


SIZE = Column[Line[Any]](
    "Size", lambda line: size(None if line.row.nbytes is None else line.nbytes), "right",
    bar=lambda line: {PART_OF_KIND.get(line.row.kind, ""): line.nbytes},
)  # fmt: skip
"""Bytes with a bar in the colour of what they are for."""
NAMED_COLUMNS: tuple[Column[Line[Any]], ...] = (
    Column(
        "Name", lambda line: Cell(line.text, muted=line.row.name is None, title=", ".join(line.row.names)),
        shrinks=True, cut="never", least=26,
    ),
    *storage_columns(SIZE),
)  # fmt: skip


def shape_text(sizes: tuple[int, ...]) -> str:
    """Return a shape as torch prints it, ``?`` for a size that torch knows only by a symbol."""
    return shape(sizes).replace("-1", "?")
