"""Memory over the course of a cell, as every report that has a timeline shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumagic.memory.timeline import DeviceTimeline, MemoryTimeline
from gpumagic.report import document
from gpumagic.report.document import Block, Fold, Paragraph, Sparkline, stacking_order
from gpumagic.report.plot import figure_of, label, mark_point, new_figure, part_colour, unit_for
from gpumagic.report.units import count, duration, size, sparkline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 60
MIN_POINTS = 4
"""Points from which on there is something to draw."""
MAX_DEVICES = 3
TOO_SHORT = "Too short a cell to draw its memory by the clock"
REST = "activations and others"


def timeline_blocks(timeline: MemoryTimeline | None, better: str = "") -> Iterator[Block]:
    """Yield the devices with most memory, the others folded; ``better`` says how to learn the line of a peak."""
    if timeline is None:
        return
    drawn = sorted(drawable_devices(timeline), key=lambda each: -each.highest)
    for series in drawn[:MAX_DEVICES]:
        yield from _device_blocks(series, timeline)
    if drawn[MAX_DEVICES:]:
        names = ", ".join(each.device for each in drawn[MAX_DEVICES:])
        inner = [block for series in drawn[MAX_DEVICES:] for block in _device_blocks(series, timeline)]
        yield Fold(f"memory on {names}", inner)
    if drawn:
        unknown = better and any(each.line is None for each in drawn[:MAX_DEVICES])
        yield Paragraph(f"{_method_note(timeline, drawn)}{f' {better}' if unknown else ''}", muted=True)
    elif better and not timeline.every_operator and any(each.highest for each in timeline.courses):
        yield Paragraph(f"{TOO_SHORT}: --trace does, after each operator.", muted=True)


def drawable_devices(timeline: MemoryTimeline | None) -> tuple[DeviceTimeline, ...]:
    """Return the devices with enough points to draw."""
    courses = () if timeline is None else timeline.courses
    return tuple(each for each in courses if len(each.points) >= MIN_POINTS and each.highest)


def device_timeline(timeline: MemoryTimeline | None, device: str) -> DeviceTimeline | None:
    """Return one device's part of a timeline, if it has one."""
    return next((each for each in (timeline.courses if timeline is not None else ()) if each.device == device), None)


def device_sparkline(timeline: MemoryTimeline | None, device: str, columns: int) -> str:
    """Return one device's memory as a few block characters, or "" where there is nothing to draw."""
    series = next((each for each in drawable_devices(timeline) if each.device == device), None)
    if series is None or timeline is None:
        return ""
    return sparkline([float(each) for each in heights(series, timeline, columns)], high=float(series.highest))


def bands(series: DeviceTimeline, timeline: MemoryTimeline, columns: int = COLUMNS) -> dict[str, list[float]]:
    """Return what each column certainly consists of, as shares of the highest, the rest last; empty if unknown."""
    whole = heights(series, timeline, columns)
    certain: list[Mapping[str, int]] = [series.parts] * columns
    highest = [-1] * columns
    for point in series.points:
        place = min(columns - 1, int(columns * timeline.share(point)))
        if point.parts and point.high > highest[place]:
            highest[place] = point.high
            certain[place:] = [point.parts] * (columns - place)
    certain = [each if sum(each.values()) <= top else {} for each, top in zip(certain, whole, strict=True)]
    names = document.stacking_order(part for each in certain for part in each)
    if not names:
        return {}
    found = {name: [each.get(name, 0) / series.highest for each in certain] for name in names}
    sums = [sum(each.values()) for each in certain]
    return {**found, REST: [(top - sure) / series.highest for top, sure in zip(whole, sums, strict=True)]}


def heights(series: DeviceTimeline, timeline: MemoryTimeline, columns: int = COLUMNS) -> list[int]:
    """Return the most bytes in each of so many equal parts of the cell; without a sample, the last value seen."""
    found: list[int | None] = [None] * columns
    last = [series.before] * columns
    for point in series.points:
        place = min(columns - 1, int(columns * timeline.share(point)))
        found[place] = max(point.high, found[place] or 0)
        last[place:] = [point.last] * (columns - place)
    return [last[place] if most is None else most for place, most in enumerate(found)]


def _device_blocks(series: DeviceTimeline, timeline: MemoryTimeline) -> Iterator[Block]:
    most = "at its peak" if series.peak is not None else "seen at most"
    said = (
        f"Memory on {series.device} over {duration(timeline.seconds)}: {size(series.before)} before, "
        f"{size(series.highest)} {most}, {size(series.after)} after"
    )
    yield Paragraph(f"{said}.")
    shown = heights(series, timeline)
    if series.parts:
        text = f"Of it, there all the time: {_listed(series.parts)}"
        yield Paragraph(f"{text}; the rest is activations and what else came and went.")
    if series.grown:
        yield Paragraph(f"New, and there at the end: {_listed(series.grown)}.")
    shares = [each / series.highest for each in shown]
    yield Sparkline(shares, shown.index(max(shown)), _peak_note(series), said, bands(series, timeline))


def _listed(found: Mapping[str, int]) -> str:
    return ", ".join(f"{part} {size(nbytes)}" for part, nbytes in found.items())


def _peak_note(series: DeviceTimeline) -> str:
    """Return the note at the highest column, with its line as far as that is certain."""
    most = f"{'peak' if series.peak is not None else 'most seen'} {size(series.highest)}"
    if series.line is not None:
        return f"{most}, line {series.line}" + (f": {series.code}" if series.code else "")
    if series.lines is not None:
        return f"{most}, between lines {series.lines[0]} and {series.lines[1]}"
    return most


def _method_note(timeline: MemoryTimeline, drawn: list[DeviceTimeline]) -> str:
    if timeline.every_operator:
        return "Allocated bytes after every operator."
    apart = timeline.seconds / max(1, timeline.looks - 1)
    said = f"Allocated bytes, looked at {count(timeline.looks, 'time')}, some {duration(apart)} apart"
    if any(each.peak is None for each in drawn):
        return f"{said}: a peak in between shows only where it is higher than any before the cell."
    return f"{said}; peaks in between are the allocator's own figure."


@figure_of.register(MemoryTimeline)
def plot_timeline(timeline: MemoryTimeline) -> Figure:
    """Return a figure of the memory over a cell, one line per device, its highest point marked.

    Raises:
        GpuMagicError: matplotlib is not installed.
    """
    figure = new_figure(3.5)
    axes = figure.subplots()
    unit, name = unit_for(max(series.highest for series in timeline.courses))
    if len(timeline.courses) == 1:
        _lay_out_parts(axes, timeline.courses[0], timeline, unit)
    for series in timeline.courses:
        _draw(axes, series, timeline, unit)
    over = "Operators of the cell" if timeline.every_operator else "Seconds"
    axes.set(ylabel=f"Allocated, {name}", xlabel=over, ylim=(0, None), xlim=(0, None))
    axes.legend(loc="upper left", fontsize="small")
    return figure


def _draw(axes: Any, series: DeviceTimeline, timeline: MemoryTimeline, unit: int) -> None:
    *moments, end = _moments(series, timeline)
    highs, lasts = ([each / unit for each in found] for found in _columns(series))
    (line,) = axes.plot(
        [*moments, end], [*lasts, series.after / unit], label=label(series.device), drawstyle="steps-post"
    )
    axes.vlines(moments, lasts, highs, color=line.get_color(), alpha=0.5)
    if moments:
        top = highs.index(max(highs))
        where = f"line {series.line}" if series.line is not None else ""
        if not where and series.lines is not None:
            where = "lines {}-{}".format(*series.lines)
        mark_point(
            axes, moments[top], highs[top], f"{'peak' if series.peak is not None else 'most seen'} {where}".strip()
        )


def _moments(series: DeviceTimeline, timeline: MemoryTimeline) -> list[float]:
    """Return where each point is drawn, in seconds or operators, and the end."""
    if timeline.every_operator:
        return [*(point.look for point in series.points), timeline.looks]
    return [*(point.seconds for point in series.points), timeline.seconds]


def _lay_out_parts(axes: Any, series: DeviceTimeline, timeline: MemoryTimeline, unit: int) -> None:
    """Draw what was certainly there as bands under the line."""
    moments = _moments(series, timeline)
    found = [point.parts or series.parts for point in series.points]
    found.append(found[-1] if found else series.parts)
    floor = [0.0] * len(found)
    for part in stacking_order(part for each in found for part in each):
        top = [low + each.get(part, 0) / unit for low, each in zip(floor, found, strict=True)]
        axes.fill_between(
            moments, floor, top, step="post", alpha=0.85, color=part_colour(part), lw=0, label=label(part)
        )
        floor = top


def _columns(series: DeviceTimeline) -> tuple[Sequence[int], Sequence[int]]:
    return [point.high for point in series.points], [point.last for point in series.points]
