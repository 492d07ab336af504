"""Reports as figures, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from gpumagic.dryrun.report import RehearsalPoint, RehearsalReport
from gpumagic.errors import GpuMagicError
from gpumagic.gpus.cells_report import CellsReport
from gpumagic.gpus.report import HistoryReport
from gpumagic.memory.records import MemoryCourse, MemoryTimeline
from gpumagic.report import document
from gpumagic.report.units import cut_middle, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1024**3
MIB = 1024**2


def history(report: HistoryReport) -> Figure:
    """Return a figure with utilisation above memory over time, a line a device.

    Raises:
        GpuMagicError: matplotlib is not installed.
    """
    figure = _figure(5)
    busy, memory = figure.subplots(2, 1, sharex=True)
    for device in dict.fromkeys(row.device for row in report.samples):
        rows = [row for row in report.samples if row.device == device]
        moments = [row.seconds for row in rows]
        busy.plot(moments, [_or_gap(row.utilization) for row in rows], label=_label(device))
        (line,) = memory.plot(moments, [_or_gap(row.memory_used, GIB) for row in rows], label=_label(f"{device}, all"))
        own = [_or_gap(row.kernel_allocated, GIB) for row in rows]
        memory.plot(moments, own, "--", color=line.get_color(), label=_label(f"{device}, this kernel"))
    busy.set(ylabel="Utilisation, %", ylim=(0, 100))
    memory.set(ylabel="Memory, GiB", xlabel="Seconds", ylim=(0, None))
    for axes in (busy, memory):
        if axes.lines:
            axes.legend(loc="upper left", fontsize="small")
    return figure


def memory(timeline: MemoryTimeline | None) -> Figure:
    """Return a figure of the memory over a cell, a line a device, each marked where it was highest.

    Raises:
        GpuMagicError: matplotlib is not installed, or there is no timeline.
    """
    if timeline is None:
        raise GpuMagicError("there is no timeline to plot: the cell touched no device's memory")
    figure = _figure(3.5)
    axes = figure.subplots()
    unit, name = _unit(max(course.highest for course in timeline.courses))
    if len(timeline.courses) == 1:
        _lay_out_parts(axes, timeline.courses[0], timeline, unit)
    for course in timeline.courses:
        _draw(axes, course, timeline, unit)
    over = "Operators of the cell" if timeline.every_operator else "Seconds"
    axes.set(ylabel=f"Allocated, {name}", xlabel=over, ylim=(0, None), xlim=(0, None))
    axes.legend(loc="upper left", fontsize="small")
    return figure


def rehearsal(report: RehearsalReport) -> Figure:
    """Return a figure of the memory that a cell would take over its operators, by what it is, a picture a device.

    Raises:
        GpuMagicError: matplotlib is not installed, or the rehearsal came to no operator.
    """
    if not report.points:
        raise GpuMagicError("there is no timeline to plot: the rehearsal came to no operator")
    devices = [each for each in dict.fromkeys(point.device for point in report.points) if report.peak.get(each)]
    if not devices:
        raise GpuMagicError("there is no timeline to plot: the cell would touch no device's memory")
    figure = _figure(0.5 + 3 * len(devices))
    for axes, device in zip(figure.subplots(len(devices), squeeze=False, sharex=True)[:, 0], devices, strict=True):
        _lay_out_operators(axes, [point for point in report.points if point.device == device], device)
    axes.set(xlabel="Operators of the cell")
    return figure


def _lay_out_operators(axes: Any, points: Sequence[RehearsalPoint], device: str) -> None:
    """Draw one device of a rehearsal: its parts one on the other, and the peak with its line."""
    unit, name = _unit(max(point.allocated for point in points))
    steps = [point.operator for point in points]
    floor = [0.0] * len(points)
    for part in document.stacking_order(part for point in points for part in point.parts):
        top = [low + point.parts.get(part, 0) / unit for low, point in zip(floor, points, strict=True)]
        axes.fill_between(steps, floor, top, step="post", lw=0, color=_colour(part), alpha=0.85, label=_label(part))
        floor = top
    axes.plot(steps, floor, drawstyle="steps-post", color="0.5", lw=1, label=_label(device))
    place = floor.index(max(floor))
    line = points[place].line
    _mark(axes, steps[place], floor[place], "peak before the cell" if line is None else f"peak line {line}")
    axes.set(ylabel=f"Allocated, {name}", ylim=(0, None), xlim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", reverse=True)


def cells(report: CellsReport) -> Figure:
    """Return a figure of what was allocated after each cell, a line a device, with the cells' peaks above it.

    Raises:
        GpuMagicError: matplotlib is not installed, or no cell has been recorded.
    """
    if not report.cells:
        raise GpuMagicError("there is nothing to plot: no recorded cell touched a device's memory")
    figure = _figure(3.5)
    axes = figure.subplots()
    unit, name = _unit(max(row.peak or row.allocated_after for row in report.cells))
    for device in dict.fromkeys(row.device for row in report.cells):
        rows = [row for row in report.cells if row.device == device]
        numbers = [row.cell for row in rows]
        (line,) = axes.plot(
            numbers, [row.allocated_after / unit for row in rows], "o-", label=_label(f"{device}, after")
        )
        peaks = [_or_gap(row.peak, unit) for row in rows]
        axes.plot(numbers, peaks, "^", color=line.get_color(), label=_label(f"{device}, peak"))
    axes.set(ylabel=f"Allocated, {name}", xlabel="Cell", ylim=(0, None))
    axes.legend(loc="upper left", fontsize="small")
    return figure


def _draw(axes: Any, course: MemoryCourse, timeline: MemoryTimeline, unit: int) -> None:
    *moments, end = _moments(course, timeline)
    highs, lasts = ([each / unit for each in found] for found in _columns(course))
    (line,) = axes.plot(
        [*moments, end], [*lasts, course.after / unit], label=_label(course.device), drawstyle="steps-post"
    )
    axes.vlines(moments, lasts, highs, color=line.get_color(), alpha=0.5)
    if moments:
        top = highs.index(max(highs))
        where = f"line {course.line}" if course.line is not None else ""
        if not where and course.lines is not None:
            where = "lines {}-{}".format(*course.lines)
        _mark(axes, moments[top], highs[top], f"{'peak' if course.peak is not None else 'most seen'} {where}".strip())


def _moments(course: MemoryCourse, timeline: MemoryTimeline) -> list[float]:
    """Return where each point is drawn, in seconds or operators, and the end."""
    if timeline.every_operator:
        return [*(point.look for point in course.points), timeline.looks]
    return [*(point.seconds for point in course.points), timeline.seconds]


def _lay_out_parts(axes: Any, course: MemoryCourse, timeline: MemoryTimeline, unit: int) -> None:
    """Draw what was surely there as bands under the line."""
    moments = _moments(course, timeline)
    found = [point.parts or course.parts for point in course.points]
    found.append(found[-1] if found else course.parts)
    floor = [0.0] * len(found)
    for part in document.stacking_order(part for each in found for part in each):
        top = [low + each.get(part, 0) / unit for low, each in zip(floor, found, strict=True)]
        axes.fill_between(moments, floor, top, step="post", alpha=0.85, color=_colour(part), lw=0, label=_label(part))
        floor = top


def _label(text: str) -> str:
    """Return a name as matplotlib may have it, which takes `$` for mathematics and no lone surrogate."""
    return cut_middle(printable(text), 60).replace("$", r"\$")


def _colour(part: str) -> tuple[float, ...]:
    return tuple(each / 255 for each in document.PART_COLOURS.get(part, document.OTHER_COLOUR))


def _columns(course: MemoryCourse) -> tuple[Sequence[int], Sequence[int]]:
    return [point.high for point in course.points], [point.last for point in course.points]


def _mark(axes: Any, x: float, y: float, text: str) -> None:
    axes.plot([x], [y], "v", color="tab:orange")
    axes.annotate(text, (x, y), textcoords="offset points", xytext=(0, 6), ha="center", fontsize="small")
    axes.margins(y=0.15)


def _unit(most: int) -> tuple[int, str]:
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")


def _figure(height: float) -> Figure:
    """Return a figure that belongs to no window and to no pyplot state, so that it shows once, where it is returned.

    Raises:
        GpuMagicError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Plain
    except ImportError:
        raise GpuMagicError('plotting needs matplotlib: pip install matplotlib, or "gpumagic[plot]"') from None

    class ShownFigure(Plain):  # type: ignore[misc, unused-ignore]
        """Shows itself: IPython knows how to show figures only once pyplot has been imported."""

        def _repr_png_(self) -> bytes:
            picture = BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    return ShownFigure(figsize=(8, height), layout="constrained")


def _or_gap(value: float | None, unit: float = 1.0) -> float:
    return float("nan") if value is None else value / unit
