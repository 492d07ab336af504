"""The line that `%gpuinfo --each-cell on` prints after a cell."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.gpus.cells_report import CellRow
from gpumagic.memory.timeline import MemoryTimeline
from gpumagic.memory.view import course_of, small_course
from gpumagic.report.text import terminal_has_unicode, to_ascii
from gpumagic.report.units import bounded, duration, printable, size

COLUMNS = 12


def line(seconds: float, rows: Sequence[CellRow], timeline: MemoryTimeline | None = None) -> str:
    """Return ``"1.24 s · cuda:0 ▁▃▆█▅ +1.2 GiB to 3.4 GiB, peak 5.0 GiB on line 7"``."""
    parts = [duration(seconds), *(_part(row, timeline) for row in rows)]
    text = bounded(printable(" · ".join(parts if rows else [*parts, "no device memory used"])))
    return text if terminal_has_unicode() else to_ascii(text)


def _part(row: CellRow, timeline: MemoryTimeline | None) -> str:
    sign = "+" if row.growth > 0 else "-" if row.growth < 0 else "±"
    drawn = small_course(timeline, row.device, COLUMNS)
    where = f"{row.device} {drawn}" if drawn else row.device
    moved = f"{where} {sign}{size(abs(row.growth))} to {size(row.allocated_after)}"
    if row.peak is None:
        return moved
    course = course_of(timeline, row.device)
    at = f" on line {course.line}" if course is not None and course.line is not None else ""
    return f"{moved}, peak {size(row.peak)}{at}"
