"""The view of `%gpuinfo --each-cell`: which cell grew memory by how much."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.gpus.cells_report import CellRow, CellsReport
from gpumagic.memory import timeline_view
from gpumagic.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Fold,
    Heading,
    Paragraph,
    Segment,
    Table,
    document_of,
)
from gpumagic.report.units import NOT_AVAILABLE, count, duration, size

SHOWN = 20
SPARKS = 12


@document_of.register(CellsReport)
def view_cells(report: CellsReport) -> Document:
    """Return the latest cells, the earlier ones folded away, under the one that grew memory most."""
    blocks: list[Block] = [Heading(_headline(report))]
    earlier, latest = report.cells[:-SHOWN], report.cells[-SHOWN:]
    if latest:
        blocks.append(_table(latest, report, "The latest cells that touched a device's memory"))
    if earlier:
        blocks.append(Fold(f"{count(len(earlier), 'earlier row')}", [_table(earlier, report, "Earlier cells")]))
    if any(row.peak is None for row in report.cells):
        blocks.append(Paragraph(f"Peak {NOT_AVAILABLE}: the allocator's counter was higher before.", muted=True))
    return Document((*blocks, *(Paragraph(note, muted=True) for note in report.notes)))


def _headline(report: CellsReport) -> str:
    if not report.recorded:
        return "No cell has been recorded yet"
    touched = len({row.cell for row in report.cells})
    said = f"{count(report.recorded, 'cell')}, {touched} of which touched a device's memory"
    most = max(report.cells, key=lambda row: row.growth, default=None)
    if most is None or most.growth <= 0:
        return said
    return f"{said}; cell {most.cell} grew it most: {most.device} by {size(most.growth)}"


def _table(rows: Sequence[CellRow], report: CellsReport, caption: str) -> Table:
    largest = max((abs(row.growth) for row in report.cells), default=0) or 1
    columns = (
        Column("Cell", "right"), Column("Code", shrinks=True, code=True), Column("Device"), Column("Grew", "right"),
        Column("After", "right", priority=1), Column("Peak", "right", priority=1),
        Column("Time", "right", priority=2), Column("Over the cell", priority=3), Column("Before", "right", priority=4),
    )  # fmt: skip
    found: list[list[Cell | str]] = [
        [
            str(row.cell), row.code, row.device, _growth(row, largest), size(row.allocated_after), size(row.peak),
            duration(row.seconds), timeline_view.small(report.timelines.get(row.cell), row.device, SPARKS),
            size(row.allocated_before),
        ]
        for row in rows
    ]  # fmt: skip
    return Table(columns, found, caption, elsewhere="in a wider terminal, and in .to_pandas()")


def _growth(row: CellRow, largest: int) -> Cell:
    text = f"+{size(row.growth)}" if row.growth > 0 else size(row.growth)
    return Cell(text, (Segment(abs(row.growth) / largest, "main" if row.growth >= 0 else "other"),))
