"""The view of `%gpuinfo -w`: the last snapshot, and under it a line of blocks a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpumagic.gpus.report import HistoryReport, SampleRow
from gpumagic.report.document import Block, Cell, Column, Document, Paragraph, Table, document_of
from gpumagic.report.plot import GIB, figure_of, label, new_figure, or_gap
from gpumagic.report.rendering import to_document
from gpumagic.report.units import NOT_AVAILABLE, sparkline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 30
"""Moments in a line."""


@document_of.register(HistoryReport)
def view_history(report: HistoryReport) -> Document:
    """Return the snapshot with the history under it."""
    blocks: list[Block] = list(to_document(report.latest).blocks) if report.latest else []
    devices = list(dict.fromkeys(row.device for row in report.samples))
    if devices:
        blocks.append(_lines(report.samples, devices))
        blocks.append(Paragraph("Lines reach from 0 to 100%, the newest at the right.", muted=True))
    blocks.append(Paragraph(_state(report), muted=True))
    return Document(tuple(blocks))


def _lines(samples: Sequence[SampleRow], devices: Sequence[str]) -> Table:
    grid = []
    for device in devices:
        recent = [row for row in samples if row.device == device][-SHOWN:]
        shares = (_line(recent, lambda row: row.utilization), _line(recent, _used), _line(recent, _allocated))
        grid.append([Cell(device), *shares])
    return Table(
        [Column("History"), Column("Util"), Column("Memory"), Column("This kernel", priority=1)], grid, "History"
    )


def _line(rows: Sequence[SampleRow], value: Callable[[SampleRow], float | None]) -> Cell:
    values = [value(row) for row in rows]
    if all(each is None for each in values):
        return Cell(NOT_AVAILABLE, muted=True)
    return Cell(sparkline(values, 0, 100))


def _used(row: SampleRow) -> float | None:
    return _share(row.memory_used, row.memory_total)


def _allocated(row: SampleRow) -> float | None:
    return _share(row.kernel_allocated, row.memory_total)


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else 100 * part / whole


def _state(report: HistoryReport) -> str:
    every = "" if report.interval is None else f"A snapshot every {report.interval:g} s"
    if report.ended is not None:
        return f"{every}; {report.ended}." if every else f"{report.ended}."
    return f"{every}, until {report.until}."


@figure_of.register(HistoryReport)
def plot_history(report: HistoryReport) -> Figure:
    """Return a figure with utilisation above memory over time, a line a device.

    Raises:
        GpuMagicError: matplotlib is not installed.
    """
    figure = new_figure(5)
    busy, memory = figure.subplots(2, 1, sharex=True)
    for device in dict.fromkeys(row.device for row in report.samples):
        rows = [row for row in report.samples if row.device == device]
        moments = [row.seconds for row in rows]
        busy.plot(moments, [or_gap(row.utilization) for row in rows], label=label(device))
        (line,) = memory.plot(moments, [or_gap(row.memory_used, GIB) for row in rows], label=label(f"{device}, all"))
        own = [or_gap(row.kernel_allocated, GIB) for row in rows]
        memory.plot(moments, own, "--", color=line.get_color(), label=label(f"{device}, this kernel"))
    busy.set(ylabel="Utilisation, %", ylim=(0, 100))
    memory.set(ylabel="Memory, GiB", xlabel="Seconds", ylim=(0, None))
    for axes in (busy, memory):
        if axes.lines:
            axes.legend(loc="upper left", fontsize="small")
    return figure
