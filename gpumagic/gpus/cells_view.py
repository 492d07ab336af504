"""The view of `%gpuinfo --each-cell`: which cell grew memory by how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpumagic.errors import GpuMagicError
from gpumagic.gpus.cells_report import CellRow, CellsReport
from gpumagic.memory.view import small_course
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
from gpumagic.report.plot import figure_of, label, new_figure, or_gap, unit_of
from gpumagic.report.units import NOT_AVAILABLE, count, duration, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            duration(row.seconds), small_course(report.timelines.get(row.cell), row.device, SPARKS),
            size(row.allocated_before),
        ]
        for row in rows
    ]  # fmt: skip
    return Table(columns, found, caption, elsewhere="in a wider terminal, and in .to_pandas()")


def _growth(row: CellRow, largest: int) -> Cell:
    text = f"+{size(row.growth)}" if row.growth > 0 else size(row.growth)
    return Cell(text, (Segment(abs(row.growth) / largest, "main" if row.growth >= 0 else "other"),))


@figure_of.register(CellsReport)
def plot_cells(report: CellsReport) -> Figure:
    """Return a figure of what was allocated after each cell, a line a device, with the cells' peaks above it.

    Raises:
        GpuMagicError: matplotlib is not installed, or no cell has been recorded.
    """
    if not report.cells:
        raise GpuMagicError("there is nothing to plot: no recorded cell touched a device's memory")
    figure = new_figure(3.5)
    axes = figure.subplots()
    unit, name = unit_of(max(row.peak or row.allocated_after for row in report.cells))
    for device in dict.fromkeys(row.device for row in report.cells):
        rows = [row for row in report.cells if row.device == device]
        numbers = [row.cell for row in rows]
        (line,) = axes.plot(
            numbers, [row.allocated_after / unit for row in rows], "o-", label=label(f"{device}, after")
        )
        peaks = [or_gap(row.peak, unit) for row in rows]
        axes.plot(numbers, peaks, "^", color=line.get_color(), label=label(f"{device}, peak"))
    axes.set(ylabel=f"Allocated, {name}", xlabel="Cell", ylim=(0, None))
    axes.legend(loc="upper left", fontsize="small")
    return figure
