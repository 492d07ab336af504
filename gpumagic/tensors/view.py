"""`%devices` as a document: the largest storages, or totals by a key, then each device against its allocator.

The second half is what all tables of storages share: rows that are alike folded into one line, and the cells.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from gpumagic.memory.parts import PART_OF_KIND, SHORT_KINDS
from gpumagic.memory.workspaces import CLEAR_WORKSPACES
from gpumagic.report.document import Block, Cell, Column, Document, Heading, Paragraph, Segment, Table, document_of
from gpumagic.report.units import LARGE, count, shape, size
from gpumagic.tensors.report import (
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
_ROLES: tuple[Literal["main", "second", "other"], ...] = ("main", "second", "other")


@document_of.register(TensorReport)
def view_tensors(report: TensorReport) -> Document:
    """Return the document of a tensor report."""
    blocks: list[Block] = [Heading(_headline(report)), *_sums(report)]
    if report.group_by is not None:
        blocks += _totals(report, GROUP_KEYS[report.group_by], report.group_by.capitalize())
    elif report.tensors:
        blocks += _largest(report)
    if report.by_device:
        blocks += [*_devices(report.by_device), *_workspaces(report.by_device)]
    blocks += [
        Paragraph(_graph(row)) for row in report.graphs if row.nbytes >= LARGE and _graph(row) != _headline(report)
    ]
    blocks += [
        Paragraph(f"Unattributed on {row.device}: {size(row.nbytes)} in {count(row.blocks, 'block')} from {row.line}")
        for row in report.sources[:5]
    ]
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


LARGE_SHARE = 0.1
"""The share of all that the report lists, from which what may be freed is its first line."""


def _graph(row: GraphRow) -> str:
    kept = f"{row.name} keeps {size(row.nbytes)} of activations on {row.device} for backward"
    if row.example != row.name and row.tensors > 1:
        return f"{kept}, in {row.tensors:,} graphs: append loss.detach(), or loss.item() for a number"
    return f"{kept}: {row.example} = {row.example}.detach() frees them"


def _headline(report: TensorReport) -> str:
    """Return what keeps most memory for nothing and how to free it, or how much there is."""
    graph, leak = _largest_graph(report), _largest_leak(report)
    if graph is not None and graph.nbytes >= (leak.frees if leak else 0):
        return _graph(graph)
    if leak is not None:
        command = leak.command.replace("\n", " and then ")
        return f"{leak.holder} keeps {size(leak.frees)} on {leak.device}: {command} frees it"
    return _amount(report)


class Freeable(NamedTuple):
    """What no variable reaches, by what keeps it."""

    holder: str
    device: str
    frees: int
    command: str


def _largest_graph(report: TensorReport) -> GraphRow | None:
    return next((row for row in report.graphs if _is_worth_it(row.nbytes, report)), None)


def _largest_leak(report: TensorReport) -> Freeable | None:
    """Return the holder whose line frees most; graphs have a sentence of their own."""
    sums: Counter[tuple[str, str, str]] = Counter()
    for row in report.tensors:
        command = None if row.is_reached() or row.in_graph else release_command(row)
        if command is not None and row.nbytes:
            sums[_holder(row), row.device, command] += row.nbytes
    for (holder, device, command), nbytes in sums.most_common(1):
        if _is_worth_it(nbytes, report):
            return Freeable(holder, device, nbytes, command)
    return None


def _holder(row: TensorRow) -> str:
    holder = row.holder or "Python"
    return f"The {holder}" if holder.startswith("last ") else holder


def _is_worth_it(nbytes: int, report: TensorReport) -> bool:
    return nbytes >= max(LARGE, LARGE_SHARE * sum(row.in_rows for row in report.by_device))


def _sums(report: TensorReport) -> list[Block]:
    """Return how much there is, where the first line says something else."""
    amount = _amount(report)
    return [] if _headline(report) == amount else [Paragraph(amount, muted=True)]


def _amount(report: TensorReport) -> str:
    tensors = sum(row.tensors for row in report.by_device)
    if not tensors:
        return f"No live tensors on {', '.join(report.only)}" if report.only else "No live tensors"
    storages = sum(row.storages for row in report.by_device)
    shares = ", ".join(f"{row.device} {size(row.in_rows)}" for row in report.by_device if row.tensors)
    return f"{count(tensors, 'tensor')} in {count(storages, 'storage')}: {shares}"


def _largest(report: TensorReport) -> list[Block]:
    lines = fold(report.tensors)
    shown = lines if report.limit is None else lines[: report.limit]
    wholes = {row.device: row.in_rows for row in report.by_device}
    columns = [Column("Name", shrinks=True, cut="middle", least=20), *STORAGE_COLUMNS]
    rows = [_cells(line, wholes.get(line.row.device, 0)) for line in shown]
    return [Table(columns, rows, caption="The largest storages"), *_rest(report, shown), *_notes(shown)]


def _rest(report: TensorReport, shown: Sequence[Line[TensorRow]]) -> list[Block]:
    number = sum(row.storages for row in report.by_device) - sum(len(line.members) for line in shown)
    if number <= 0:
        return []
    nbytes = sum(row.in_rows for row in report.by_device) - sum(line.nbytes for line in shown)
    return [Paragraph(f"and {count(number, 'more storage', 'more storages')}, {size(nbytes)}", muted=True)]


def _cells(line: Line[TensorRow], whole: int) -> list[Cell]:
    row = line.row
    name = Cell(line.text, muted=row.name is None, title=", ".join(row.names))
    return [name, *storage_cells(row, size_cell(None if row.nbytes is None else line.nbytes, whole, row.kind))]


def _notes(lines: Sequence[Line[TensorRow]]) -> list[Block]:
    about: dict[str, list[str]] = {}
    for line in lines:
        if line.row.note is not None:
            about.setdefault(_note(line.row), []).append(line.text)
    return [Paragraph(f"{_some(names)}: {note}", muted=True) for note, names in about.items()]


def _note(row: TensorRow) -> str:
    if row.nbytes and row.viewed_nbytes is not None and 2 * row.viewed_nbytes <= row.nbytes:
        return f"a {size(row.viewed_nbytes)} view keeps a {size(row.nbytes)} storage alive; .clone() it"
    return row.note or ""


def _some(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


GROUP_KEYS: dict[str, Callable[[TensorRow], str]] = {
    "dtype": lambda row: row.dtype,
    "kind": lambda row: row.kind,
    "holder": lambda row: root_of(row.name) if row.name is not None else row.variable or holder_text(row.holder),
}


def _totals(report: TensorReport, key: Callable[[TensorRow], str], title: str) -> list[Block]:
    alike: dict[str, list[TensorRow]] = {}
    for row in report.tensors:
        alike.setdefault(key(row), []).append(row)
    sizes = {name: _sum(rows) for name, rows in alike.items()}
    whole = sum(nbytes or 0 for nbytes in sizes.values())
    columns = [Column(title, shrinks=True), *(Column(name, "right") for name in ("Size", "Tensors", "Storages"))]
    ordered = sorted(alike, key=lambda name: (-(sizes[name] or 0), name))
    shown = ordered if report.limit is None else ordered[: report.limit]
    rows = [
        (
            name,
            size_cell(sizes[name], whole, name),
            f"{sum(row.views + 1 for row in alike[name]):,}",
            f"{len(alike[name]):,}",
        )
        for name in shown
    ]
    blocks: list[Block] = [Table(columns, rows, caption=f"Live tensors by {title.lower()}")]
    if rest := ordered[len(shown) :]:
        nbytes = size(sum(sizes[name] or 0 for name in rest))
        blocks.append(Paragraph(f"and {len(rest):,} more, {nbytes}", muted=True))
    return blocks


def _sum(rows: Sequence[TensorRow]) -> int | None:
    known = [row.nbytes for row in rows if row.nbytes is not None]
    return sum(known) if known else None


_LEAST = {"Storages": 3, "Tensors": 2, "Cached": 1, "Others": 1}
"""What a narrow terminal drops, the highest first: the rest is the sum that has to add up."""


def _devices(rows: Iterable[DeviceMemoryRow]) -> list[Block]:
    rows = [row for row in rows if row.tensors or row.allocated or row.cached or row.other_processes]
    if not rows:
        return []
    columns = [Column("Device"), *(Column(title, "right", _LEAST.get(title, 0)) for title in _titles(rows))]
    return [Table(columns, [_figures(row, _titles(rows)) for row in rows], caption="Each device")]


def _workspaces(rows: Iterable[DeviceMemoryRow]) -> list[Block]:
    kept = ", ".join(f"{size(row.workspaces)} on {row.device}" for row in rows if row.workspaces)
    return [Paragraph(f"Workspaces are cuBLAS's, {kept}: {CLEAR_WORKSPACES} frees them")] if kept else []


def _titles(rows: Sequence[DeviceMemoryRow]) -> list[str]:
    titles = ["Tensors", "Storages", "Named", "No variable"]
    titles += ["In graphs"] if any(row.graph for row in rows) else []
    titles += ["Workspaces"] if any(row.workspaces for row in rows) else []
    titles += ["Unattributed", "Allocated", "Cached"] if any(row.allocated is not None for row in rows) else []
    return titles + (["Others"] if any(row.other_processes is not None for row in rows) else [])


def _figures(row: DeviceMemoryRow, titles: Sequence[str]) -> list[Cell | str]:
    reserved = (row.allocated or 0) + (row.cached or 0)
    rest = (row.graph or 0) + (row.workspaces or 0) + (row.unexplained or 0)
    parts = zip((row.named, row.held, rest), _ROLES, strict=True)
    bar = tuple(Segment(part / reserved, role) for part, role in parts) if reserved else ()
    cells: dict[str, Cell | str] = {
        "Tensors": f"{row.tensors:,}",
        "Storages": f"{row.storages:,}",
        "Named": size(row.named),
        "No variable": size(row.held),
        "In graphs": size(row.graph),
        "Workspaces": size(row.workspaces),
        "Unattributed": size(row.unexplained),
        "Allocated": Cell(size(row.allocated), bar),
        "Cached": size(row.cached),
        "Others": size(row.other_processes),
    }
    return [row.device, *(cells[title] for title in titles)]


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
    return name_pattern(holder) if holder is not None and holder.startswith("graph of ") else holder


def holder_text(holder: str | None) -> str:
    """Return what is shown in place of a name."""
    return "(no name)" if holder is None else f"({holder})"


STORAGE_COLUMNS = (
    Column("Device"),
    Column("Size", "right"),
    Column("Shape", shrinks=True),
    Column("Dtype", priority=2),
    Column("Kind", priority=1),
)
"""What every table of storages has, after the columns that identify a storage."""


def storage_cells(row: TensorRow | LeakRow | DiffRow, size_: Cell) -> list[Cell]:
    """Return the cells of a row under `STORAGE_COLUMNS`."""
    return [Cell(row.device), size_, Cell(shape_text(row.shape)), Cell(row.dtype), kind_cell(row.kind)]


def size_cell(nbytes: int | None, whole: int, kind: str = "") -> Cell:
    """Return a size with a bar: its share of the whole, in the colour of its kind."""
    return Cell(size(nbytes), bar=(Segment((nbytes or 0) / whole if whole else 0.0, part=PART_OF_KIND.get(kind, "")),))


def shape_text(sizes: tuple[int, ...]) -> str:
    """Return a shape as torch prints it, ``?`` for a size that torch knows only by a symbol."""
    return shape(sizes).replace("-1", "?")


def kind_cell(kind: str) -> Cell:
    """Return what a tensor is for, abbreviated."""
    return Cell(SHORT_KINDS.get(kind, kind), muted=kind == "plain", title=kind)
