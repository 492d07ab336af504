"""`%devices --diff` as a document: the largest changes, then each device's sums."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.report.document import Block, Cell, Column, Document, Heading, Paragraph, Segment, Table, document_of
from gpumagic.report.units import count, size
from gpumagic.tensors.report import DeviceChange, DiffReport, DiffRow, Growth
from gpumagic.tensors.view import STORAGE_COLUMNS, Line, fold, storage_cells

MAX_GROWING = 3
_WORDS = {"came": "new", "went": "freed", "resized": "resized", "lost its name": "unnamed"}


@document_of.register(DiffReport)
def view_diff(report: DiffReport) -> Document:
    """Return the document of the difference between two reports."""
    growth = [Heading(_growth(each)) for each in report.growing[:MAX_GROWING]]
    blocks: list[Block] = [*growth, Paragraph(_heading(report))] if growth else [Heading(_heading(report))]
    if report.changes:
        blocks += _largest(report)
        blocks.append(_devices(report.by_device))
    blocks += [Paragraph(note, muted=True) for note in report.notes]
    return Document(tuple(blocks))


def _growth(found: Growth) -> str:
    """Say what a variable has more of each time, and what to do about graphs that it keeps."""
    what = []
    if found.graphs > 0:
        what.append(f"{count(found.graphs, 'autograd graph')} of {size(found.graph_nbytes)}")
    if found.nbytes > found.graph_nbytes:
        what.append(f"{count(max(1, found.storages), 'tensor')} of {size(found.nbytes - found.graph_nbytes)}")
    grown = f"{found.name} grows by {' and '.join(what) or size(found.nbytes)} each time ({found.times} times in a row)"
    return f"{grown}: keep .item() or .detach() of what is collected" if found.graphs > 0 else grown


def _heading(report: DiffReport) -> str:
    if not report.since:
        return "Nothing to compare with yet"
    rows = {change: [row for row in report if row.change == change] for change in _WORDS}
    parts = []
    if rows["came"]:
        parts.append(f"{_signed(_sum(rows['came']))} in {count(len(rows['came']), 'new storage')}")
    if rows["went"]:
        parts.append(f"{_signed(_sum(rows['went']))} in {len(rows['went']):,} freed")
    if rows["resized"]:
        parts.append(f"{_signed(_sum(rows['resized']))} by resizing")
    if rows["lost its name"]:
        parts.append(f"{len(rows['lost its name']):,} without a name now")
    return f"{', '.join(parts) or 'No change'} since {report.since}"


def _sum(rows: Sequence[DiffRow]) -> int:
    return sum(row.nbytes or 0 for row in rows)


def _largest(report: DiffReport) -> list[Block]:
    lines = fold(report.changes)
    shown = lines if report.limit is None else lines[: report.limit]
    largest = max((_weight(line) for line in lines), default=0)
    columns = [Column("Change"), Column("Name", shrinks=True, cut="middle"), *STORAGE_COLUMNS]
    rows = [_cells(line, largest) for line in shown]
    blocks: list[Block] = [Table(columns, rows, caption="The largest changes")]
    if len(lines) > len(shown):
        blocks.append(Paragraph(f"and {count(len(lines) - len(shown), 'smaller change')}", muted=True))
    lost = [line for line in shown if line.row.change == "lost its name"]
    blocks += [Paragraph(f"{line.name}: kept by {line.row.holder or 'no variable'} now", muted=True) for line in lost]
    return blocks


def _cells(line: Line[DiffRow], largest: int) -> list[Cell]:
    row = line.row
    lost = row.change == "lost its name"
    text = size(_weight(line)) if lost or row.nbytes is None else _signed(line.nbytes)
    share = _weight(line) / largest if largest else 0.0
    nbytes = Cell(size(None) if row.nbytes is None else text, (Segment(share, "other" if line.nbytes < 0 else "main"),))
    return [Cell(_WORDS[row.change]), Cell(line.text, muted=row.name is None), *storage_cells(row, nbytes)]


def _weight(line: Line[DiffRow]) -> int:
    return abs(line.nbytes) or sum(row.size or 0 for row in line.members if row.change == "lost its name")


def _signed(nbytes: int) -> str:
    return f"+{size(nbytes)}" if nbytes > 0 else size(nbytes)


def _devices(rows: Sequence[DeviceChange]) -> Table:
    titles = ["New", "Freed", "Net"] + (["Allocator"] if any(row.allocated is not None for row in rows) else [])
    columns = [Column("Device"), *(Column(title, "right") for title in titles)]
    cells = []
    for row in rows:
        figures = [_signed(row.came), _signed(-row.went), _signed(row.net)]
        allocated = size(None) if row.allocated is None else _signed(row.allocated)
        cells.append([row.device, *figures, *([allocated] if len(titles) > 3 else [])])
    return Table(columns, cells, caption="Each device")
