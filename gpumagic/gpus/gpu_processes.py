"""The processes of `%gpuinfo -p`."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.gpus.gpu_table import absent, short
from gpumagic.gpus.report import GpuRow, ProcessRow
from gpumagic.report.document import Block, Cell, Column, Heading, Paragraph, Table
from gpumagic.report.units import NOT_AVAILABLE, percent, size


def blocks(rows: Sequence[GpuRow]) -> list[Block]:
    """Return the processes of all devices in one table, and why there is none of some."""
    columns = [Column("Device"), Column("PID", "right"), Column("Memory", "right"), Column("Util", "right", 2),
               Column("User", priority=1), Column("Process", shrinks=True)]  # fmt: skip
    grid = [_process(row, each) for row in rows for each in row.processes or ()]
    if not any(each.utilization is not None for row in rows for each in row.processes or ()):
        columns, grid = columns[:3] + columns[4:], [cells[:3] + cells[4:] for cells in grid]
    found: list[Block] = [Heading("Processes"), Table(columns, grid, "Processes on the GPUs")] if grid else []
    unsaid = {each.reason for row in rows for each in row.processes or () if each.memory is None and each.reason}
    found += [
        Paragraph(f"Memory: {absent(reason)}.", muted=True)
        for reason in sorted(unsaid)
        if not reason.startswith(NOT_AVAILABLE)
    ]
    hidden = [row for row in rows if row.processes is None]
    if not grid and len(hidden) < len(rows):
        found.append(Paragraph("No process uses a GPU."))
    found += [
        Paragraph(f"Processes of {short(row)}: {absent(row.reasons.get('processes'))}.", muted=True) for row in hidden
    ]
    return found


def _process(row: GpuRow, each: ProcessRow) -> list[Cell | str]:
    name = each.name or ("another user's or an ended process" if each.pid is not None else "unknown")
    marks = ["this kernel"] * each.this_kernel + ["graphics"] * (each.kind == "graphics")
    return [
        short(row),
        Cell("-", muted=True) if each.pid is None else str(each.pid),
        _unsaid(each) if each.memory is None else size(each.memory),
        Cell("-", muted=True, title="no sample") if each.utilization is None else percent(each.utilization),
        each.user or Cell("-", muted=True),
        Cell(name + (f" ({', '.join(marks)})" if marks else ""), title=name),
    ]


def _unsaid(process: ProcessRow) -> Cell:
    reason = process.reason or "the driver does not say"
    return Cell(reason if reason.startswith(NOT_AVAILABLE) else NOT_AVAILABLE, muted=True, title=reason)
