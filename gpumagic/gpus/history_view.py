"""The GPUs over time: the records of `%gpuinfo -w` and `--each-cell`, and how they look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from gpumagic.gpus.report import GPUReport, SampleRow
from gpumagic.memory.timeline import MemoryTimeline, plot
from gpumagic.memory.view import device_sparkline, device_timeline
from gpumagic.report.base import Report, to_document
from gpumagic.report.columns import Column, Table
from gpumagic.report.document import Block, Cell, Document, Fold, Heading, Paragraph, document_of
from gpumagic.report.text import terminal_has_unicode, to_ascii
from gpumagic.report.units import NOT_AVAILABLE, count, duration, printable, size, sparkline, truncate_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class HistoryReport(Report[SampleRow]):
    """The GPUs over time, one row per device and sample, oldest first."""

    row_type: ClassVar[type[Any]] = SampleRow

    samples: tuple[SampleRow, ...]
    latest: GPUReport | None = None
    """The last snapshot, whole."""
    interval: float | None = None
    """Seconds from one snapshot to the next."""
    ended: str | None = None
    """Why the recording has ended; None while it runs."""
    until: str = "stopped"
    """What ends it."""

    @property
    def rows(self) -> tuple[SampleRow, ...]:
        return self.samples


MAX_SAMPLES = 30
"""Samples in a sparkline."""


@document_of.register(HistoryReport)
def view_history(report: HistoryReport) -> Document:
    """Return the snapshot with the history under it."""
    blocks: list[Block] = list(to_document(report.latest).blocks) if report.latest else []
    devices = list(dict.fromkeys(row.device for row in report.samples))
    if devices:
        blocks.append(_history(report.samples, devices))
        blocks.append(Paragraph("Lines reach from 0 to 100%, the newest at the right.", muted=True))
    every = "" if report.interval is None else f"A snapshot every {report.interval:g} s"
    how = f", until {report.until}" if report.ended is None else f"{'; ' * bool(every)}{report.ended}"
    blocks.append(Paragraph(f"{every}{how}.", muted=True))
    return Document(tuple(blocks))


def _history(samples: Sequence[SampleRow], devices: Sequence[str]) -> Table:
    recent = {device: [row for row in samples if row.device == device][-MAX_SAMPLES:] for device in devices}

    def line(share: Callable[[SampleRow], float | None]) -> Callable[[str], Cell]:
        return lambda device: _sparkline([share(row) for row in recent[device]])

    columns: list[Column[str]] = [
        Column("History", str),
        Column("Util", line(lambda row: row.utilization)),
        Column("Memory", line(lambda row: _percent_of(row.memory_used, row.memory_total))),
        Column("This kernel", line(lambda row: _percent_of(row.kernel_allocated, row.memory_total)), priority=1),
    ]
    return Table.of(devices, columns, "History")


def _sparkline(values: Sequence[float | None]) -> Cell:
    if all(each is None for each in values):
        return Cell(NOT_AVAILABLE, muted=True)
    return Cell(sparkline(values, 0, 100))


def _percent_of(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole


@dataclass(frozen=True, slots=True)
class CellRow:
    """What one cell did on one device, by the allocator's counters."""

    cell: int
    """Its number: ``In [12]``."""
    code: str
    """Its first line of code."""
    seconds: float
    device: str
    allocated_before: int
    allocated_after: int
    growth: int
    """After less before; negative where it freed."""
    peak: int | None
    """Peak bytes during the cell; None where the allocator's counter did not rise, and so does not tell."""


@dataclass(frozen=True, repr=False)
class CellsReport(Report[CellRow]):
    """The last cells that changed a device's memory, one row per cell and device, oldest first."""

    row_type: ClassVar[type[Any]] = CellRow

    cells: tuple[CellRow, ...]
    timelines: Mapping[int, MemoryTimeline] = field(default_factory=dict)
    """The memory allocated during each cell, by its number."""
    recorded: int = 0
    """How many cells there were, including those that changed nothing."""
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[CellRow, ...]:
        return self.cells

    def plot(self, cell: int | None = None) -> Figure:
        """Return a matplotlib figure of the memory during a cell.

        Args:
            cell: its number; by default that of the last cell that is recorded.

        Raises:
            GpuMagicError: matplotlib is not installed, or there is nothing to draw.
        """
        return plot(self.timelines.get(max(self.timelines, default=0) if cell is None else cell))


MAX_CELLS = 20
LARGE = 1024**2
"""Bytes of growth with the longest bar, at least."""
TABLE_SPARKLINE = 12


@document_of.register(CellsReport)
def view_cells(report: CellsReport) -> Document:
    """Return the latest cells, with the earlier ones folded."""
    blocks: list[Block] = [Heading(_headline(report))]
    earlier, latest = report.cells[:-MAX_CELLS], report.cells[-MAX_CELLS:]
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
    changed = f"{len({row.cell for row in report.cells}):,} of {count(report.recorded, 'cell')} changed memory"
    most = max(report.cells, key=lambda row: row.growth, default=None)
    if most is None or most.growth <= 0:
        return f"No cell left more memory allocated; {changed}"
    return f"Cell {most.cell} added most: {size(most.growth)} on {most.device}; {changed}"


def _table(rows: Sequence[CellRow], report: CellsReport, caption: str) -> Table:
    columns: tuple[Column[CellRow], ...] = (
        Column("Cell", lambda row: str(row.cell), "right"),
        Column("Code", lambda row: row.code, shrinks=True, code=True),
        Column("Device", lambda row: row.device),
        Column("Grew", lambda row: f"{'+' * (row.growth > 0)}{size(row.growth)}", "right", bar=lambda row: row.growth),
        Column("After", lambda row: size(row.allocated_after), "right", 1),
        Column("Peak", lambda row: size(row.peak), "right", 1),
        Column("Time", lambda row: duration(row.seconds), "right", 2),
        Column(
            "Over the cell",
            lambda row: device_sparkline(report.timelines.get(row.cell), row.device, TABLE_SPARKLINE), priority=3,
        ),
        Column("Before", lambda row: size(row.allocated_before), "right", 4),
    )  # fmt: skip
    full = max(LARGE, *(abs(row.growth) for row in report.cells))  # cells that change little have no long bars
    return Table.of(rows, columns, caption, whole=full, elsewhere="in a wider terminal, and in .to_pandas()")


LINE_SPARKLINE = 12


def cell_line(seconds: float, rows: Sequence[CellRow], timeline: MemoryTimeline | None = None) -> str:
    """Return ``"1.24 s · cuda:0 ▁▃▆█▅ +1.2 GiB to 3.4 GiB, peak 5.0 GiB on line 7"``."""
    parts = [duration(seconds), *(_device_change(row, timeline) for row in rows)]
    text = truncate_words(printable(" · ".join(parts if rows else [*parts, "no device memory used"])))
    return text if terminal_has_unicode() else to_ascii(text)


def growth_line(device: str, nbytes: int, times: int) -> str:
    """Return the warning that a cell leaves more allocated each time that it runs."""
    grown = f"this cell left {size(nbytes)} more on {device}, as each of the last {times} times that it ran"
    return f"{grown}: %devices --diff after each run names what grows"


def _device_change(row: CellRow, timeline: MemoryTimeline | None) -> str:
    sign = "+" if row.growth > 0 else "-" if row.growth < 0 else "±"
    drawn = device_sparkline(timeline, row.device, LINE_SPARKLINE)
    where = f"{row.device} {drawn}" if drawn else row.device
    moved = f"{where} {sign}{size(abs(row.growth))} to {size(row.allocated_after)}"
    if row.peak is None:
        return moved
    series = device_timeline(timeline, row.device)
    at = f" on line {series.line}" if series is not None and series.line is not None else ""
    return f"{moved}, peak {size(row.peak)}{at}"
